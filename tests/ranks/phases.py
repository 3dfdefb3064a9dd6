# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_phases.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from actorsnap import Options, StateDict
from actorsnap.actors import roll as ends
from actorsnap.protocol import roll
from actorsnap.sync import Snapshot
from tests.ranks.troubles import outcome, warnings
from tests.worlds import Rank, World

__all__ = ["direct_late", "direct_out_of_phase", "direct_skipped"]

ODD = 1
"""The rank that makes another call than the others."""


def _state(fill: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.full((8,), fill), mesh, [Shard(0)], src_data_rank=None)
    return {"model": StateDict(w=whole)}


def _save(where: str, fill: float, options: Options, kind: str = "take", **more: Any) -> None:
    if kind == "take":
        Snapshot.take(where, _state(fill), options=options, **more)
    else:
        Snapshot.async_take(where, _state(fill), options=options, **more).wait()


def _listing(path: str) -> list[str]:
    root = Path(path)
    return sorted(str(found.relative_to(root)) for found in root.rglob("*"))


def out_of_phase(me: Rank, path: str, case: str, offload: str) -> dict[str, Any]:
    """One good save; then rank ``ODD`` makes another call; then all make the same again."""
    me.join_gloo()
    options = Options(fsync=False, timeout_s=60.0, lost_after_s=20.0, offload=offload)
    save = functools.partial(_save, options=options, overwrite=True)
    is_odd = me.rank == ODD
    here, there = f"{path}/s", f"{path}/t"
    save(here, 1.0, kind="async_take", step=1)
    save(there, 1.0, kind="async_take", step=1)
    dist.barrier()
    before = _listing(path)
    call: Callable[[], Any]
    match case:
        case "step":  # this rank has skipped the save of step 2
            number = 3 if is_odd else 2
            call = functools.partial(save, here, float(number), kind="async_take", step=number)
        case "path":
            where = there if is_odd else here
            call = functools.partial(save, where, 2.0, kind="async_take")
        case "kind":
            kind = "take" if is_odd else "async_take"
            call = functools.partial(save, here, 2.0, kind=kind, step=2)
        case "restore":
            restore = functools.partial(Snapshot(here, options=options).restore, _state(0.0))
            call = restore if is_odd else functools.partial(save, here, 2.0, step=2)
        case "restore of what is not there":
            gone = Snapshot(f"{path}/gone", options=options)
            restore = functools.partial(gone.restore, _state(0.0))
            call = restore if is_odd else functools.partial(save, here, 2.0, kind="async_take")
        case "other restore":
            where = f"{path}/gone" if is_odd else here
            call = functools.partial(Snapshot(where, options=options).restore, _state(0.0))
        case "other existing restore":
            where = there if is_odd else here
            call = functools.partial(Snapshot(where, options=options).restore, _state(0.0))
        case "dry run":
            snapshot = Snapshot(here, options=options)
            name = "plan_restore" if is_odd else "restore"
            call = functools.partial(getattr(snapshot, name), _state(0.0))
        case "spelling":
            odd = f"{path}//./s/"
            call = functools.partial(save, odd if is_odd else f"fs://{here}", 2.0)
        case _:
            raise AssertionError(case)
    first = outcome(call)
    dist.barrier()
    after = _listing(path)
    again = outcome(functools.partial(save, here, 4.0, kind="async_take", step=4))
    app = _state(0.0)
    restored = outcome(functools.partial(Snapshot(here, options=options).restore, app))
    value = app["model"]["w"].to_local().tolist()
    dist.barrier()
    return {
        "first": first,
        "again": again,
        "restored": restored,
        "value": value,
        "step": Snapshot(here).step,
        "changed": sorted(set(before) ^ set(after)),
    }


def direct_out_of_phase(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, out_of_phase, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def late(me: Rank, path: str, call: str, whom: Sequence[int], offload: str) -> dict[str, Any]:
    """Only the ranks ``whom`` call, as with ``torch.save``; the reminders come within a second.
    When they have given up, the others call, and then all save."""
    me.join_gloo()
    options = Options(fsync=False, timeout_s=60.0, lost_after_s=20.0, offload=offload)
    _save(f"{path}/s", 1.0, options, step=1)
    _save(f"{path}/s", 1.0, options, "async_take", overwrite=True)
    dist.barrier()
    for module in (ends, roll):
        setattr(module, "REMIND_AFTER_S", (0.3, 0.8, 1.2))  # noqa: B010 - for mypy it is a constant
    ends._PATIENCE_S = 1.0
    short = Options(fsync=False, timeout_s=3.0, lost_after_s=20.0, offload=offload)
    lines = warnings()
    make: Callable[[], Any]
    if call == "restore":
        snapshot = Snapshot(f"{path}/s", options=short)
        make = functools.partial(snapshot.restore, _state(0.0))
    else:
        make = functools.partial(_save, f"{path}/s", 2.0, short, call, overwrite=True, step=2)
    first = outcome(make) if me.rank in whom else None
    dist.barrier()
    reminders = [text for text in lines if f" rank {me.rank}: waiting for" in text]
    # The others call after all; those that had given up do not make the call again.
    late = None if me.rank in whom else outcome(make)
    again = outcome(functools.partial(_save, f"{path}/s", 4.0, options, overwrite=True, step=4))
    return {"first": first, "lines": reminders, "late": late, "again": again}


def direct_late(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, late, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def skipped(
    me: Rank, path: str, whom: Sequence[int], offload: str, missed: str, following: Sequence[str]
) -> dict[str, Any]:
    """The ranks ``whom`` skip a call; then all make the same calls, and meet before each."""
    me.join_gloo()
    ends._PATIENCE_S = 0.5
    options = Options(fsync=False, timeout_s=60.0, lost_after_s=20.0, offload=offload)
    kind = "take" if offload == "thread" else "async_take"
    _save(f"{path}/s", 1.0, options, kind, step=1)
    short = Options(fsync=False, timeout_s=2.0, lost_after_s=20.0, offload=offload)
    app = _state(0.0)

    def make(call: str, step: int) -> dict[str, Any]:
        if call == "restore":
            return outcome(functools.partial(Snapshot(f"{path}/s", options=short).restore, app))
        fill = float(step)
        save = functools.partial(_save, f"{path}/s", fill, short, kind, overwrite=True, step=step)
        return outcome(save)

    first = None if me.rank in whom else make(missed, 2)
    again = []
    for step, call in enumerate(following, 3):
        dist.barrier()
        again.append(make(call, step))
    dist.barrier()
    return {"first": first, "again": again, "value": app["model"]["w"].to_local().tolist()}


def direct_skipped(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, skipped, **arguments)
    try:
        return world.results()
    finally:
        world.end()
