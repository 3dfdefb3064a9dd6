# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_managers.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import gc
import shutil
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import chdir, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actorsnap import (
    ActorSnapError,
    IncompatibleState,
    NotASnapshot,
    Options,
    SnapshotAborted,
    StateDict,
    StorageError,
)
from actorsnap.errors import notes_of
from actorsnap.interop import xla
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime import bars
from actorsnap.runtime.team import find_team
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally, TallyStorage, fail
from tests.api.slow_storage import Gate
from tests.ranks.troubles import outcome, warnings
from tests.worlds import Rank, World

__all__ = ["direct_managers", "direct_resumes_with"]

T = TypeVar("T")
P = ParamSpec("P")

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


def vanishes(me: Rank, path: str) -> dict[str, Any]:
    """The newest is deleted after rank 0 has found it."""
    first = Trainer(path, me.rank)
    first.train(0, 10, 20)
    first.manager.close()
    dist.barrier()

    def vanish(operation: Operation) -> None:
        if me.rank == 1 and "step-0000000020.g1" in operation.path:
            shutil.rmtree(Path(path) / "step-0000000020.g1", ignore_errors=True)

    with faulty(lambda inner: TallyStorage(inner, Tally(look=vanish))):
        return Trainer(faulty_url(path), me.rank).restored()


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


def not_shared(me: Rank, path: str, call: str) -> dict[str, Any]:
    """The path is below a folder of the rank's own."""
    with chdir(Path(path) / str(me.rank)):
        trainer = Trainer("/proc/self/cwd/run", me.rank, has_own=False)
        found = trainer.restored() if call == "restore_latest" else {}
        return found or outcome(lambda: trainer.manager.restore(10))


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


def has_another_policy(me: Rank, path: str, num_saved: int) -> dict[str, Any]:
    policy = every.steps(10 if me.rank else 5)
    trainer = Trainer(
        path, me.rank, save=policy, options=msgspec.structs.replace(OPTIONS, timeout_s=2.0)
    )
    trainer.train(*range(num_saved))
    trainer.manager.wait()
    said = outcome(lambda: trainer.train(5))
    dist.barrier()
    trainer.manager.close()
    return said


def call_by_other_names(me: Rank, path: str) -> dict[str, Any]:
    trainer = Trainer(path, me.rank)
    manager = trainer.manager
    said = [outcome(lambda: (manager.async_save if me.rank else manager.maybe_save)(0))]
    said.append(outcome(lambda: (manager.save if me.rank else manager.maybe_save)(10)))
    manager.close()
    return {"said": said, "steps": manager.all_steps()}


def objects(me: Rank, path: str, case: str, whom: int) -> dict[str, Any]:
    """One rank alone goes back, or has no app state; then all go on."""
    trainer = Trainer(path, me.rank)
    trainer.train(0, 10)
    trainer.manager.wait()
    manager, is_wrong = trainer.manager, me.rank == whom
    if case == "goes_back":
        if is_wrong:
            manager.maybe_save(25)
        said = outcome(lambda: trainer.train(20))
        if is_wrong:
            said["again"] = outcome(lambda: manager.maybe_save(21))["error"]
    elif case == "save":
        if is_wrong:
            manager._body._settings = replace(manager._body._settings, app_state=None)
        said = outcome(lambda: trainer.train(20))
    else:
        state = None if is_wrong else {"train": trainer.train_state, "own": trainer.own}
        bare = CheckpointManager(path, save=every.steps(10), options=OPTIONS)
        call = bare.restore_latest if case == "restore_latest" else partial(bare.restore, 10)
        said = outcome(lambda: call(state))
    dist.barrier()
    after = Trainer(path, me.rank)
    found = after.restored()["found"]
    after.train(30)
    after.manager.close()
    return {**said, "found": found, "steps": after.manager.all_steps()}


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
        if trouble != "put_if_absent":  # of the first save alone
            trainer.train(0)
            trainer.manager.wait()
        broken = me.rank == whom
        if trouble == "list_folders":
            said = trainer.restored()
        elif trouble in ("stat", "put_if_absent"):
            said = outcome(lambda: trainer.train(10))
        else:
            said = outcome(lambda: trainer.manager.maybe_save(10, metrics=measure))
        dist.barrier()
        broken = False
        trainer.train(20)
        trainer.manager.close()
        return {**said, "steps": trainer.manager.all_steps()}


def ends_early(me: Rank, path: str, whom: int, how: str, then: str) -> dict[str, Any]:
    """One rank makes no more calls, and its process lives on; then all begin again."""
    texts = warnings()
    trainer = Trainer(path, me.rank)
    trainer.train(0, 10)
    said: list[dict[str, Any]] = []
    if me.rank == whom:
        if then == "waits":
            time.sleep(0.5)  # the others wait in their call
        with suppress(ValueError), trainer.manager:
            if how == "fails":
                raise ValueError("bad batch")
            if how == "unsaved":
                trainer.train(12)
    if then != "waits":
        dist.barrier()
    manager = trainer.manager
    if me.rank != whom:
        if then == "saves twice":
            said = [outcome(partial(trainer.train, step)) for step in (20, 30)]
        elif then == "restores":
            said = [outcome(manager.restore_latest)]
        elif then == "closes":
            trainer.train(12)
        else:
            said = [outcome(lambda: trainer.train(20))]
        said.append(outcome(manager.close))
    elif then in ("saves", "saves twice", "waits"):
        deadline = time.monotonic() + 20.0
        while not texts and time.monotonic() < deadline:
            time.sleep(0.01)
    dist.barrier()
    after = Trainer(path, me.rank)
    found = after.restored()["found"]
    after.train(20, 30)
    after.manager.close()
    return {"said": said, "texts": texts, "found": found, "steps": after.manager.all_steps()}


class HeldWrites(Wrapper):
    """Data of step 2 waits at the gate; on rank 1 its writes fail then."""

    def __init__(self, inner: Storage, gate: Gate, rank: int) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._gate, self._rank = gate, rank

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in ("put", "write_at") and "/step-0000000002." in self.url and "/data/" in key:
            await self._gate.pass_through(1)
            if self._rank == 1:
                raise StorageError(op=op, key=key, backend=self.url, detail="a scripted fault")
        return await call(*args, **kwargs)


def fails_apart(me: Rank, path: str, trouble: str, stage: str, ends_at: int = 8) -> dict[str, Any]:
    """The save of step 2 fails after rank 1 has returned and, if eager, while rank 0 copies."""
    gate, raised, saved = Gate(), [], []

    def measure() -> dict[str, float]:
        if trouble == "metrics" and me.rank == 1 and step == 2:
            raise ValueError("no such metric")
        return {}

    with faulty(lambda inner: HeldWrites(inner, gate, me.rank)):
        # Rank 0 has more data than memory, so its copies wait for its writes.
        options = msgspec.structs.replace(OPTIONS, memory_budget_bytes=3 << 20)
        settings: dict[str, Any] = {"save": every.steps(2) | every.last(), "options": options}
        trainer = Trainer(faulty_url(path), me.rank, stage=stage, **settings)
        if me.rank == 0:
            trainer.own["large"] = torch.zeros(2 << 20)
        began_s = time.monotonic()
        for step in range(ends_at + 1):
            try:
                if trainer.manager.maybe_save(step, metrics=measure):
                    saved.append(step)
            except SnapshotAborted as error:
                raised.append([step, str(error)])
            if step == 2 and (me.rank == 1 or trouble == "metrics"):
                gate.open()
            if step == 3:
                dist.barrier()  # as the collective of a training step
        said = outcome(trainer.manager.close)
        steps = trainer.manager.all_steps()
    seconds = time.monotonic() - began_s
    return {**said, "raised": raised, "saved": saved, "steps": steps, "all_s": seconds}


def like_xla(me: Rank, path: str) -> dict[str, Any]:
    """Equal values of all ranks are stored once, as in torch.distributed.checkpoint."""
    manager = xla.CheckpointManager(path, 10, max_to_keep=2)
    state: dict[str, Any] = {}
    taken = []
    for step in (*range(12), *range(2)):
        state["model"] = {"w": torch.full((300,), float(step))}
        state["epoch"] = step
        taken.append(manager.save_async(step, state))
    manager.join()
    dist.barrier()
    loaded: dict[str, Any] = {"model": {"w": torch.zeros(300)}, "epoch": -1}
    said = outcome(lambda: manager.restore(0, loaded))
    return {
        **said,
        "taken": taken,
        "steps": manager.all_steps(),
        "epoch": loaded["epoch"],
        "weight": loaded["model"]["w"].unique().tolist(),
        "num_bytes": sum(f.stat().st_size for f in Path(path).glob("*.g2/**/*.safetensors")),
    }


def shows_progress(me: Rank, path: str) -> dict[str, Any]:
    """Counts the displays that are begun."""
    num_shown = 0

    class Counted(bars.Display):
        def start(self) -> None:
            nonlocal num_shown
            num_shown += 1
            super().start()

    bars.Display = Counted  # type: ignore[misc]
    try:
        trainer = Trainer(path, me.rank, progress=True)
        trainer.train(0)
        trainer.manager.save(5)
        trainer.restored()
        trainer.manager.close()
    finally:
        bars.Display = Counted.__base__  # type: ignore[misc, assignment]
    return {"num_shown": num_shown}


def traffic() -> list[int]:
    """Messages sent and received by this rank, and bytes sent."""
    team = find_team(None, None)
    assert team is not None
    found = team.port.statistics
    return [found.messages_sent, found.messages_received, found.bytes_sent]


QUIET_S = 0.5


def settled_traffic() -> list[int]:
    """``traffic`` after the farewells of the last call, which a busy machine may delay.

    Then all messages have arrived, no heartbeat is due and nothing changes, on any rank.
    """
    team = find_team(None, None)
    assert team is not None
    deadline = time.monotonic() + 60.0
    while True:
        before = traffic()
        dist.barrier()
        time.sleep(QUIET_S)
        dist.barrier()
        is_busy = traffic() != before or team.port._mailbox.beat is not None
        state = torch.tensor([int(is_busy), before[0] - before[1]])
        dist.all_reduce(state)
        if not state.any():
            return before
        assert time.monotonic() < deadline, (before, traffic())


def is_idle(me: Rank, path: str) -> dict[str, Any]:
    """The messages that nothing due costs."""
    tally = Tally()
    with faulty(lambda inner: TallyStorage(inner, tally)):
        trainer = Trainer(faulty_url(path), me.rank)
        trainer.train(0)
        trainer.manager.wait()
        trainer.manager.prune(dry_run=True)
        dist.barrier()
        before, num_operations = settled_traffic(), len(tally.operations)
        for step in range(1, 10):
            trainer.train(step)
            time.sleep(0.1)
        after = traffic()
        requests = [f"{each.verb} {each.path}" for each in tally.operations[num_operations:]]
        dist.barrier()  # a rank ahead would already save: its heartbeats count
        trainer.train(10)
        trainer.manager.close()
        return {"before": before, "after": after, "requests": requests, "then": traffic()}


def has_tier(me: Rank, path: str, tiers: list[str]) -> dict[str, Any]:
    """``tiers``: of each rank; empty for none."""
    given: dict[str, Any] = {"tiers": [tiers[me.rank]] if tiers[me.rank] else []}
    first = Trainer(path, me.rank, **given)
    said = outcome(lambda: first.train(0, 10, 20))
    if not said["error"]:
        first.manager.close()
        dist.barrier()
        second = Trainer(path, me.rank, **given)
        said |= second.restored()
        found = second.manager.restore(20)
        said["place"] = found.url.split("/")[-2]
        dist.barrier()
        if me.rank == 0:
            damage(tiers[0], "step-0000000020.g1", 2020.0)
        dist.barrier()
        third = Trainer(path, me.rank, **given)
        said["third"] = third.restored()
        said["then"] = third.manager.restore(20).url.split("/")[-2]
        third.train(30)
        third.manager.close()
    return said


def saves(me: Rank, path: str) -> Any:
    trainer = Trainer(path, me.rank, has_own=False)
    said = trainer.restored()
    begin = -10 if said["found"] is None else said["found"]
    trainer.train(begin + 10, begin + 20)
    trainer.manager.close()
    return {**said, "steps": trainer.manager.all_steps()}


def drifts(me: Rank, path: str) -> Any:
    """FSDP2 over tensor parallel on four ranks, then FSDP2 alone on two, then four again.

    At the last step, the norm that tensor parallel left unsharded differs between its ranks.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    layers = nn.ModuleDict({"norm": nn.LayerNorm(64), "head": nn.Linear(64, 64)})
    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    is_first = not Path(path).exists()
    dist.barrier()
    manager = CheckpointManager(path, {"model": layers}, options=OPTIONS, keep=keep.all())
    norm: Any = layers["norm"].weight

    def fill(value: float) -> None:
        norm.to_local().detach().fill_(value)

    if is_first:
        for step, value in ((0, 1.0), (10, 2.0 + mesh.get_local_rank("tp"))):
            fill(value)
            manager.save(step)
        manager.close()
        return {}
    fill(-1.0)
    said = outcome(manager.restore_latest)
    said |= {"norm": norm.to_local().unique().tolist(), "tp": mesh.get_local_rank("tp")}
    state = {"model": layers}
    plan = Snapshot(f"{path}/step-0000000010.g1").plan_restore(state)
    said["plan"] = list(plan.mismatched)
    report = Snapshot(f"{path}/step-0000000010.g1").restore(state, strict=False)
    said["lenient"] = [*report.mismatched]
    said["left"] = norm.to_local().unique().tolist()
    said["earlier"] = outcome(lambda: manager.restore(0))["error"]
    said["now"] = norm.to_local().unique().tolist()
    manager.close()
    return said


def does_not_fit(me: Rank, path: str) -> dict[str, Any]:
    """Notes of errors that all ranks have alike."""
    with CheckpointManager(path, {"model": nn.Linear(2, 2)}, options=OPTIONS) as manager:
        manager.save(0)
    dist.barrier()
    other = {"model": nn.Linear(2, 3)}
    said: dict[str, Any] = {}
    with CheckpointManager(path, other, options=OPTIONS) as manager:
        try:
            manager.restore_latest()
        except IncompatibleState as error:
            said["unfit"] = notes_of(error)
    dist.barrier()
    time.sleep(0.3 * me.rank)  # rank 0 is the first to look
    try:
        Snapshot(f"{path}/nowhere", options=OPTIONS).restore(other)
    except NotASnapshot as error:
        said["absent"] = notes_of(error)
    return said


def finds_a_file(me: Rank, path: str) -> list[str]:
    """The root is a file."""
    Path(path).touch()
    dist.barrier()
    manager = CheckpointManager(path, {"x": StateDict()}, save=every.steps(1), options=OPTIONS)
    try:
        manager.maybe_save(1)
    except NotASnapshot as error:
        return traceback.format_exception(error)
    return []


def ends_the_group(me: Rank, path: str) -> list[str]:
    """The process group ends before the manager."""
    state = {"train": StateDict(step=0)}
    texts = warnings()
    settings: dict[str, Any] = {"save": every.last(), "replicated": ["**"], "options": OPTIONS}
    with suppress(ActorSnapError), CheckpointManager(path, state, **settings) as manager:
        manager.save(0)
        manager.maybe_save(1)
        dist.destroy_process_group()
        gc.collect()
    return texts


_SCENARIOS: dict[str, Callable[..., Any]] = {
    scenario.__name__: scenario
    for scenario in (
        *(falls_back, finds_none, not_shared, is_taken, differs, objects, has_trouble, ends_early),
        *(fails_apart, is_idle, like_xla, saves, shows_progress, has_tier, drifts),
        *(has_another_policy, call_by_other_names, vanishes, does_not_fit, ends_the_group),
        finds_a_file,
    )
}


def play(me: Rank, what: str, path: str, **arguments: Any) -> Any:
    me.join_gloo()
    said = _SCENARIOS[what](me, path, **arguments)
    if dist.is_initialized():
        dist.barrier()
    return said


def direct_managers(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, play, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def direct_resumes_with(sizes: list[int], path: str, what: str = "saves") -> list[Any]:
    """Worlds of these sizes, one after the other."""
    return [direct_managers(size, what=what, path=path) for size in sizes]
