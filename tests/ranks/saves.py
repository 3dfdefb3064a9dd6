# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_saves.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actorsnap.actors import staging
from actorsnap.errors import SnapshotAborted, UsageError
from actorsnap.format import owners
from actorsnap.options import Options
from actorsnap.state.sources import gather
from actorsnap.state.stateful import StateDict
from actorsnap.sync import Snapshot
from tests.ranks.models import STATES, full, step
from tests.worlds import Rank, World

__all__ = [
    "direct_lose",
    "direct_take",
    "direct_take_without_index",
    "direct_train_on",
    "direct_values",
]


def take(me: Rank, kind: str, path: str, folder: str) -> dict[str, Any]:
    """Saves twice, the second time in the background, and says what was to be saved."""
    me.join_gloo()
    state = STATES[kind]()
    expected = {key: full(value.state_dict()) for key, value in state.items()}
    torch.save(expected, Path(folder) / f"expected{me.rank}.pt")
    snapshot = Snapshot.take(path, state, metadata={"by": me.rank})
    pending = Snapshot.async_take(path + "-again", state)
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, torch.nn.Module):
                for parameter in value.parameters():
                    parameter.mul_(2)
    again = pending.wait()
    dist.barrier()
    said = {"path": snapshot.path, "metadata": snapshot.metadata, "again": again.path}
    dist.destroy_process_group()
    return said


def direct_take(num_ranks: int, kind: str, path: str, folder: str) -> list[Any]:
    world = World(num_ranks, take, kind=kind, path=path, folder=folder)
    try:
        return world.results()
    finally:
        world.end()


def train_on(
    me: Rank, kind: str, path: str, folder: str, is_guarded: bool, offload: str
) -> dict[str, Any]:
    """Saves lazily, and steps while the copies dawdle."""
    me.join_gloo()
    state = STATES[kind]()
    module, optimizer = state["model"], state["optim"]
    expected = {key: full(value.state_dict()) for key, value in state.items()}
    torch.save(expected, Path(folder) / f"expected{me.rank}.pt")

    def copy_later(*arguments: Any) -> None:
        time.sleep(0.3)
        gather(*arguments)

    vars(staging)["gather"] = copy_later
    options = Options(offload=offload)
    pending = Snapshot.async_take(path, state, stage="lazy", options=options)
    if is_guarded:
        pending.guard(optimizer)
    for seed in (2, 3):
        step(module, optimizer, seed)
    said: dict[str, Any] = {"hooks": len(optimizer._optimizer_step_pre_hooks)}
    try:
        pending.wait()
    except SnapshotAborted as error:
        said["error"] = [type(error).__name__, error.fields]
    dist.barrier()
    dist.destroy_process_group()
    return said


def direct_train_on(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, train_on, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def lose(me: Rank, path: str) -> dict[str, Any]:
    """The last rank is gone before the second save; the others train on without it."""
    me.join_gloo()
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": module, "optim": optimizer}
    Snapshot.async_take(path, state).wait()
    if me.rank == me.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    options = Options(timeout_s=60, lost_after_s=1)
    pending = Snapshot.async_take(path + "-2", state, stage="lazy", options=options)
    pending.guard(optimizer)
    module(torch.ones(8)).sum().backward()
    began = time.monotonic()
    optimizer.step()
    said: dict[str, Any] = {"waited_s": time.monotonic() - began}
    try:
        pending.wait()
    except SnapshotAborted as error:
        said["error"] = str(error)
    optimizer.step()
    said["hooks"] = len(optimizer._optimizer_step_pre_hooks)
    return said


def direct_lose(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, lose, path=path)
    try:
        return [rank.result() for rank in world.ranks[:-1]]
    finally:
        world.end()


def take_without_index(me: Rank, path: str) -> dict[str, Any]:
    """Saves what an owner index cannot describe within its limits, and restores it."""
    me.join_gloo()
    owners.MAX_TOTAL_STEPS = 0
    state = STATES["fsdp2"]()
    expected = {key: full(value.state_dict()) for key, value in state.items()}
    snapshot = Snapshot.take(path, state)
    is_ok = snapshot.verify("full").ok
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    snapshot.restore(state)
    found = {key: full(value.state_dict()) for key, value in state.items()}
    is_same = all(
        torch.equal(found["model"][name], tensor) for name, tensor in expected["model"].items()
    )
    dist.destroy_process_group()
    return {"is_ok": is_ok, "is_same": is_same}


def direct_take_without_index(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, take_without_index, path=path)
    try:
        return world.results()
    finally:
        world.end()


@dataclass
class Settings:
    name: str
    window: Any


def values_of(rank: int) -> dict[str, Any]:
    """Values that all ranks hold, that are each rank's own, and that are equal by chance."""
    return {
        "same": StateDict(seen={"a", "b"}, window=deque([torch.ones(3), 1], 2)),
        "own": StateDict(at=date(2026, 1, 1 + rank), settings=Settings(str(rank), {rank})),
        "equal": StateDict(settings=Settings("x", frozenset("abc"))),
        "plain": StateDict(step=1),
    }


def take_values(me: Rank, path: str, offload: str) -> list[str]:
    """Saves values, changes them at once, and restores them from the snapshot."""
    me.join_gloo()
    options = Options(offload=offload, allowed_types=[Settings])
    state = values_of(me.rank)
    pending = Snapshot.async_take(path, state, replicated=["same/**"], options=options)
    state["same"]["seen"].clear()
    state["same"]["window"].append(2)
    state["own"]["settings"].name = "later"
    pending.wait()
    found = {key: StateDict() for key in state}
    Snapshot(path, options=options).restore(found)
    said = [
        key
        for key, value in values_of(me.rank).items()
        if sorted(repr(value.data)) != sorted(repr(found[key].data))
    ]
    try:
        Snapshot(path).restore({"equal": StateDict()})
    except UsageError as error:
        said.append(str(error).splitlines()[-1].strip())
    dist.barrier()
    dist.destroy_process_group()
    return said


def direct_values(path: str, offload: str) -> list[Any]:
    world = World(3, take_values, path=path, offload=offload)
    try:
        return world.results()
    finally:
        world.end()
