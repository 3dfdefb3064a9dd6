"""What ranks and directors do in ``test_managers.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actorsnap import Options, StateDict
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime.team import find_team
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally, TallyStorage, fail
from tests.ranks.troubles import outcome
from tests.worlds import Rank, World

__all__ = ["direct_managers", "direct_resumes_with"]

OPTIONS = Options(timeout_s=60.0, lost_after_s=3.0, fsync=False)


class Trainer:
    """``train`` is equal on all ranks, ``own`` is the rank's."""

    def __init__(self, path: str, rank: int, *, has_own: bool = True, **settings: Any) -> None:
        self.rank = rank
        self.train_state = StateDict(weight=torch.zeros(300), step=-1)
        self.own = StateDict(x=torch.zeros(50))
        state = {"train": self.train_state, **({"own": self.own} if has_own else {})}
        self.manager = CheckpointManager(
            path,
            state,
            **{
                "save": every.steps(10),
                "keep": keep.all(),
                "replicated": ["train/**"],
                "options": OPTIONS,
                **settings,
            },
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            self.train_state["weight"].fill_(step)
            self.train_state["step"] = step
            self.own["x"].fill_(1000 * (self.rank + 1) + step)
            self.manager.maybe_save(step)

    def restored(self) -> dict[str, Any]:
        """The result of ``restore_latest``, and the state after it."""
        found: Any = None

        def restore() -> None:
            nonlocal found
            found = self.manager.restore_latest()

        said = outcome(restore)
        said["found"] = found and found.step
        said["skipped"] = [url.rpartition("/")[2] for url, _ in found.skipped] if found else []
        said["state"] = [
            self.train_state["step"],
            *self.train_state["weight"].unique().tolist(),
            *self.own["x"].unique().tolist(),
        ]
        return said


def damage(path: str, name: str, value: float) -> None:
    """Flips a bit of the first tensor at ``name`` that is full of ``value``."""
    wanted = torch.full((50,), value).numpy().tobytes()
    for file in (Path(path) / name).rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        at = data.find(wanted)
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError(f"{name} has no tensor of {value}")


def falls_back(me: Rank, path: str, whose: int) -> dict[str, Any]:
    """The newest is damaged where only one rank reads."""
    first = Trainer(path, me.rank)
    first.train(0, 10, 20)
    first.manager.close()
    dist.barrier()
    if me.rank == 0:
        damage(path, "step-0000000020.g1", 1000.0 * (whose + 1) + 20)
    dist.barrier()
    second = Trainer(path, me.rank)
    said = second.restored()
    second.train(20, 30)
    second.manager.close()
    return {**said, "steps": second.manager.all_steps()}


def finds_none(me: Rank, path: str) -> dict[str, Any]:
    fresh = Trainer(path, me.rank)
    nothing = fresh.restored()
    fresh.train(0, 10)
    fresh.manager.close()
    dist.barrier()
    if me.rank == 0:
        damage(path, "step-0000000000.g1", 0.0)
        damage(path, "step-0000000010.g1", 1010.0)
    dist.barrier()
    trainer = Trainer(path, me.rank)
    damaged = trainer.restored()
    allowed = trainer.manager.restore_latest(allow_fresh=True)
    return {"nothing": nothing, "damaged": damaged, "is_fresh": allowed is None}


def is_taken(me: Rank, path: str) -> dict[str, Any]:
    first, second = Trainer(path, me.rank), Trainer(path, me.rank)
    first.train(0)
    first.manager.wait()
    second.restored()
    second.train(10)
    second.manager.wait()
    said = outcome(lambda: first.train(10))
    third = first.restored()
    first.train(20)
    first.manager.close()
    return {**said, "then": third["found"], "steps": first.manager.all_steps()}


def differs(me: Rank, path: str) -> dict[str, Any]:
    trainer = Trainer(path, me.rank, save=every.steps(1))
    said = [outcome(lambda: trainer.train(10 + me.rank))]
    trainer.train(20)
    said.append(outcome(lambda: trainer.train(30 + me.rank)))
    trainer.train(40)
    trainer.manager.close()
    return {"said": said, "steps": trainer.manager.all_steps()}


def has_trouble(me: Rank, path: str, trouble: str, whom: int) -> dict[str, Any]:
    """A failing storage or metric on one rank; then all go on."""
    broken = False

    def strike(operation: Operation) -> None:
        if broken and operation.verb == trouble:
            fail(operation)

    def measure() -> dict[str, float]:
        if broken:
            raise ValueError("no such metric")
        return {"loss": 1.0}

    with faulty(lambda inner: TallyStorage(inner, Tally(look=strike))):
        trainer = Trainer(faulty_url(path), me.rank)
        trainer.train(0)
        trainer.manager.wait()
        broken = me.rank == whom
        if trouble == "list_folders":
            said = trainer.restored()
        elif trouble == "stat":
            said = outcome(lambda: trainer.train(10))
        else:
            said = outcome(lambda: trainer.manager.maybe_save(10, metrics=measure))
        dist.barrier()
        broken = False
        trainer.train(20)
        trainer.manager.close()
        return {**said, "steps": trainer.manager.all_steps()}


def is_idle(me: Rank, path: str) -> dict[str, Any]:
    """The messages that nothing due costs."""
    tally = Tally()
    with faulty(lambda inner: TallyStorage(inner, tally)):
        trainer = Trainer(faulty_url(path), me.rank)
        trainer.train(0)
        trainer.manager.wait()
        trainer.manager.prune(dry_run=True)
        dist.barrier()
        time.sleep(1.0)  # farewells of the last call
        team = find_team(None, None)
        assert team is not None

        def traffic() -> list[int]:
            found = team.port.statistics
            return [found.messages_sent, found.messages_received, found.bytes_sent]

        before, num_operations = traffic(), len(tally.operations)
        for step in range(1, 10):
            trainer.train(step)
            time.sleep(0.1)
        after = traffic()
        requests = [f"{each.verb} {each.path}" for each in tally.operations[num_operations:]]
        trainer.train(10)
        trainer.manager.close()
        return {"before": before, "after": after, "requests": requests, "then": traffic()}


def saves(me: Rank, path: str) -> Any:
    trainer = Trainer(path, me.rank, has_own=False)
    said = trainer.restored()
    begin = -10 if said["found"] is None else said["found"]
    trainer.train(begin + 10, begin + 20)
    trainer.manager.close()
    return {**said, "steps": trainer.manager.all_steps()}


_SCENARIOS: dict[str, Callable[..., Any]] = {
    scenario.__name__: scenario
    for scenario in (falls_back, finds_none, is_taken, differs, has_trouble, is_idle, saves)
}


def play(me: Rank, what: str, path: str, **arguments: Any) -> Any:
    me.join_gloo()
    said = _SCENARIOS[what](me, path, **arguments)
    dist.barrier()
    return said


def direct_managers(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, play, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def direct_resumes_with(sizes: list[int], path: str) -> list[Any]:
    """Worlds of these sizes, one after the other."""
    return [direct_managers(size, what="saves", path=path) for size in sizes]
