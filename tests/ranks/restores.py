# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_restores.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from actorsnap import ActorSnapError, ModelState, Options, StateDict
from actorsnap import Snapshot as AsyncSnapshot
from actorsnap.errors import StorageError, notes_of
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.runtime import partial_index
from actorsnap.runtime.broadcast import Broadcaster
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url
from tests.ranks import models
from tests.ranks.models import STATES, full
from tests.worlds import Rank, World

__all__ = [
    "direct_buffers",
    "direct_cancelled",
    "direct_cut_otherwise",
    "direct_forms",
    "direct_killed",
    "direct_many",
    "direct_play",
    "direct_restore",
    "direct_stages",
    "direct_without_group",
]

LOST_AFTER_S = 3.0
TIMEOUT_S = 60.0
SAVE = Options(fsync=False, chunk_bytes=2 << 20)
MIB = 1 << 20


def options(mode: str) -> Options:
    return Options(
        read_mode=mode,
        chunk_bytes=2 * MIB,
        timeout_s=TIMEOUT_S,
        lost_after_s=LOST_AFTER_S,
        fsync=False,
    )


class Watched(Wrapper):
    """Counts the bytes of data that are read.

    Args:
        before: Called before each read with its number, and before each ``get`` with the key.
        after: Called after each ``get`` with the key.
    """

    def __init__(
        self,
        inner: Storage,
        before: Callable[[int | str], None] = lambda what: None,
        after: Callable[[str], None] = lambda key: None,
    ) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self.before = before
        self.after = after
        self.bytes_read = 0
        self.num_reads = 0

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        self.num_reads += 1
        self.before(self.num_reads)
        await super().read_into(key, offset, views)
        self.bytes_read += sum(len(view) for view in views)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.before(key)
        found = await super().get(key, start, stop)
        self.after(key)
        return found

    async def aclose(self) -> None:
        """All openings share it."""


class Watch:
    """All that this process reads through ``faulty://``."""

    def __init__(self, **hooks: Any) -> None:
        self.storages: list[Watched] = []
        self.hooks = hooks

    def __call__(self, inner: Storage) -> Storage:
        self.storages.append(Watched(inner, **self.hooks))
        return self.storages[-1]

    @property
    def bytes_read(self) -> int:
        return sum(storage.bytes_read for storage in self.storages)


def outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """How a call ended, and how long it took."""
    began = time.monotonic()
    said: dict[str, Any] = {"error": "", "text": "", "cause": "NoneType"}
    try:
        work()
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error), "notes": notes_of(error)}
        said["cause"] = type(error.__cause__).__name__
        if isinstance(error, ActorSnapError):
            said["fields"] = msgspec.to_builtins(error.fields)
    return {**said, "took_s": time.monotonic() - began}


# States of real trainers


def spoil(value: Any) -> None:
    """Overwrites every tensor of a state dict."""
    if isinstance(value, dict):
        for item in value.values():
            spoil(item)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            getattr(value, "_local_tensor", value).fill_(-3)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def restore(
    me: Rank,
    kind: str,
    path: str,
    mode: str,
    trace: str | None = None,
    compression: str | None = None,
) -> dict[str, Any]:
    """Saves, plans, spoils everything, restores; says what was read."""
    me.join_gloo()
    state = STATES[kind]()
    expected = {key: full(value.state_dict()) for key, value in state.items()}
    save = msgspec.structs.replace(SAVE, trace=trace, compression=compression)
    Snapshot.take(path, state, options=save)
    for value in state.values():
        spoil(value.state_dict())
    watch = Watch()
    with faulty(watch):
        traced = msgspec.structs.replace(options(mode), trace=trace)
        snapshot = Snapshot(faulty_url(path), options=traced)
        plan = snapshot.plan_restore(state)
        assert watch.bytes_read == 0
        report = snapshot.restore(state)
    found = {key: full(value.state_dict()) for key, value in state.items()}
    dist.barrier()  # rank 0 leaves by os._exit: what it sends must have come
    dist.destroy_process_group()
    return {
        "equal": {key: equal(found[key], expected[key]) for key in found},
        "is_complete": report.is_complete,
        "nbytes": report.nbytes,
        "bytes_read": watch.bytes_read,
        "plan": msgspec.to_builtins(plan),
        "read_amplification": plan.read_amplification,
    }


def direct_restore(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, restore, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def cut_otherwise(me: Rank, path: str, compression: str | None) -> dict[str, Any]:
    """Saves rows, restores columns, all of it, and rows again."""
    me.join_gloo()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers = torch.Generator().manual_seed(4)
    whole = torch.randn(6001, 300, generator=numbers)
    saved = distribute_tensor(whole, mesh, [Shard(0)])
    options = msgspec.structs.replace(SAVE, compression=compression)
    Snapshot.take(path, {"m": StateDict(w=saved)}, options=options)
    said = {}
    for name, placement in (("columns", Shard(1)), ("all", Replicate()), ("rows", Shard(0))):
        target = StateDict(w=distribute_tensor(torch.zeros_like(whole), mesh, [placement]))
        Snapshot(path).restore({"m": target})
        said[name] = torch.equal(target["w"].full_tensor(), whole)
    dist.barrier()
    dist.destroy_process_group()
    return said


def direct_cut_otherwise(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, cut_otherwise, **arguments)
    try:
        return world.results()
    finally:
        world.end()


# Other numbers of ranks

SHAPES = ((96, 5), (37, 5), (7, 33), (5,), (1, 3), (0, 4), (2048, 130))
"""Of tensors: even, uneven, fewer rows than ranks, empty, several checksum blocks."""


def _many(num_ranks: int, *, is_filled: bool) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """An app state of DTensors on two meshes, with the same random bits in any world."""
    flat = init_device_mesh("cpu", (num_ranks,))
    square = init_device_mesh("cpu", (max(1, num_ranks // 2), min(2, num_ranks)))
    tensors: dict[str, Any] = {}
    numbers = torch.Generator().manual_seed(5)
    for number, shape in enumerate(SHAPES):
        whole = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=numbers)
        if not is_filled:
            whole = torch.zeros_like(whole)
        tensors[f"flat{number}"] = distribute_tensor(whole, flat, [Shard(0)])
        tensors[f"copied{number}"] = distribute_tensor(whole, square, [Shard(0), Replicate()])
        if len(shape) == 2:
            tensors[f"cut{number}"] = distribute_tensor(whole, square, [Shard(0), Shard(1)])
    own = StateDict(step=3 if is_filled else 0)
    return {"model": StateDict(tensors), "own": own}, lambda name: tensors[name].to_local()


def many(me: Rank, path: str, saves: bool) -> dict[str, Any]:
    """Saves; or restores what another number of ranks saved, and compares each bit that it has."""
    me.join_gloo()
    expected, expected_local = _many(me.world, is_filled=True)
    manifests: set[str] = set()
    if saves:
        Snapshot.take(path, expected, options=SAVE)
    target, local = _many(me.world, is_filled=False)
    partial_index.FEW_RANKS = 0  # else so few ranks read all manifests
    watch = Watch(before=lambda what: manifests.add(what) if "/manifest/" in str(what) else None)
    with faulty(watch):
        report = Snapshot(faulty_url(path), options=options("auto")).restore(target)
    names = list(expected["model"])
    wrong = [name for name in names if not torch.equal(local(name), expected_local(name))]
    dist.barrier()
    dist.destroy_process_group()
    return {
        "wrong": wrong,
        "step": target["own"]["step"],
        "is_complete": report.is_complete,
        "manifests": len(manifests),
    }


def direct_many(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, many, **arguments)
    try:
        return world.results()
    finally:
        world.end()


# ModelState over FSDP2


def _model_state(flatten: bool, seed: int) -> ModelState:
    module = models.model(seed)
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    models.step(module, optimizer)
    return ModelState(module, optimizer, flatten=flatten)


def forms(me: Rank, path: str, flatten: bool) -> dict[str, Any]:
    """Saves one form of the optimizer's state, restores into the other, and into the same."""
    me.join_gloo()
    saved = _model_state(flatten, 0)
    expected = full(saved.state_dict())
    Snapshot.take(path, {"train": saved}, options=SAVE)
    other = _model_state(not flatten, 1)
    before = full(other.state_dict())
    said = outcome(lambda: Snapshot(path).restore({"train": other}))
    said["is_untouched"] = equal(full(other.state_dict()), before)
    report = Snapshot(path).restore({"train": other}, strict=False)
    said["mismatched"] = report.mismatched
    found = full(other.state_dict())
    said["model"] = equal(found["model"], expected["model"])
    said["optimizer is kept"] = equal(found["optim"], before["optim"])
    models.step(other.model, other.optimizers[0], 2)
    same = _model_state(flatten, 1)
    Snapshot(path).restore({"train": same})
    said["same form"] = equal(full(same.state_dict()), expected)
    dist.barrier()
    dist.destroy_process_group()
    return said


def direct_forms(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, forms, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def evaluated(me: Rank, path: str) -> list[bool]:
    """Saves and restores after an evaluation: only a backward pass shards the model again."""
    me.join_gloo()
    same = []
    for name in ("named", "plain"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(37, 8), nn.Linear(8, 37))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train = ModelState(model, optimizer)
        state = {"train": train} if name == "named" else {"model": model, "optimizer": optimizer}

        def evaluate(model: nn.Module = model) -> None:
            with torch.no_grad():
                model(torch.arange(4))
            assert not any(isinstance(each, DTensor) for each in model.parameters())

        models.step(model, optimizer)
        expected = full(train.state_dict())
        evaluate()
        Snapshot.take(f"{path}/{name}", state, options=SAVE)
        models.step(model, optimizer)
        evaluate()
        assert Snapshot(f"{path}/{name}").plan_restore(state).is_complete
        evaluate()
        Snapshot(f"{path}/{name}").restore(state)
        same.append(equal(full(train.state_dict()), expected))
        models.step(model, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    return same


def direct_evaluated(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, evaluated, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def buffers(me: Rank, path: str, saves: bool) -> list[float]:
    """Statistics of a BatchNorm, which differ on each rank; saves them, or restores them."""
    me.join_gloo()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    fully_shard(module)
    filling = me.rank + 1.0 if saves else -1.0
    for buffer in module.buffers():
        buffer.fill_(filling)
    state = {"plain": module, "named": ModelState(module)}
    if saves:
        Snapshot.take(path, state, options=SAVE)
        for buffer in module.buffers():
            buffer.fill_(-1)
    found: set[float] = set()
    for key, value in state.items():
        Snapshot(path).restore({key: value})
        for buffer in module.buffers():
            found.add(float(buffer.max()))
            buffer.fill_(-1)
    dist.barrier()
    dist.destroy_process_group()
    return sorted(found)


def direct_buffers(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, buffers, **arguments)
    try:
        return world.results()
    finally:
        world.end()


# Stages


def _stages(num_stages: int, num_layers: int = 4) -> nn.ModuleDict:
    """This rank's stage of a pipeline, sharded over the ranks that have it."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_stages, world // num_stages), mesh_dim_names=("pp", "dp"))
    stage = dist.get_rank() * num_stages // world
    layers = {
        str(n): nn.Linear(3, 5) for n in range(num_layers) if min(n, 3) * num_stages // 4 == stage
    }
    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return nn.ModuleDict(layers)


def _fill(module: nn.Module, offset: float) -> None:
    for name, parameter in module.named_parameters():
        _fill_one(parameter, float(name[0]) + offset)


def _fill_one(parameter: Any, value: float) -> None:
    with torch.no_grad():
        parameter.to_local().fill_(value)


def _values(module: nn.Module) -> dict[str, list[float]]:
    """What this rank has of each layer; of weights."""
    weights = {n[0]: p for n, p in module.named_parameters() if n.endswith("weight")}
    return {name: p.to_local().unique().tolist() for name, p in weights.items()}  # type: ignore[attr-defined]


def stages(me: Rank, path: str, strict: bool) -> dict[str, Any]:
    """Saves two stages, restores one, four, and some with too few or too many layers."""
    me.join_gloo()
    saved = _stages(2)
    _fill(saved, 1.0)
    Snapshot.take(path, {"m": saved}, options=SAVE)
    said: dict[str, Any] = {}
    for name, num_stages, num_layers in (
        ("one", 1, 4),
        ("two", 2, 4),
        ("four", 4, 4),
        ("fewer", 1, 3),
        ("more", 1, 5),
    ):
        target = _stages(num_stages, num_layers)
        _fill(target, -9.0)
        state = {"m": target}
        plan = Snapshot(path).plan_restore(state)
        restore = functools.partial(Snapshot(path, options=options("auto")).restore, state)
        said[name] = outcome(functools.partial(restore, strict=strict))
        said[name] |= {"values": _values(target), "planned": [*plan.missing, *plan.unexpected]}
    dist.barrier()
    return said


def direct_stages(**arguments: Any) -> list[Any]:
    world = World(4, stages, **arguments)
    try:
        return world.results()
    finally:
        world.end()


# Groups of an exchange's own

SIZES = (7 * MIB, 300, 5 * MIB + 12, 100)
"""Of the tensors, in bytes: with pieces of 2 MiB they make more than one round of 3 ranks."""


def model(fill: float) -> dict[str, Any]:
    tensors = {f"w{n}": torch.full((size // 4,), fill + n) for n, size in enumerate(SIZES)}
    return {"model": StateDict(tensors)}


def values(state: dict[str, Any]) -> list[list[float]]:
    return [t.unique().tolist() for t in state["model"].values()]


def left_keys(me: Rank) -> list[str]:
    """What exchanges have left in the store; mailboxes are queues, which are not listed."""
    return [key for key in me.store().list_keys() if "actorsnap/" in key]


def without_group(me: Rank, path: str) -> dict[str, Any]:
    """A job that has initialised no process group."""
    me.follow_torchrun()
    Snapshot.take(path, model(1.0), replicated=["model/**"], options=SAVE)
    target = model(0.0)
    watch = Watch()
    with faulty(watch):
        report = Snapshot(faulty_url(path), options=options("shared")).restore(target)
    return {"values": values(target), "bytes_read": watch.bytes_read, "nbytes": report.nbytes}


def direct_without_group(**arguments: Any) -> list[Any]:
    world = World(2, without_group, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def cancelled(me: Rank, path: str) -> dict[str, Any]:
    """Rank 1 is cancelled between two broadcasts of a round; then tensors are sent, and all is
    restored again."""
    me.join_gloo()
    Snapshot.take(path, model(1.0), replicated=["model/**"], options=SAVE)
    has_sent = threading.Event()
    broadcast = Broadcaster.broadcast

    async def slow(self: Broadcaster, memory: memoryview, source: int) -> None:
        await broadcast(self, memory, source)
        has_sent.set()
        await anyio.sleep(0.2)

    async def run() -> None:
        whole = asyncio.create_task(
            AsyncSnapshot(path, options=options("shared")).restore(model(0.0))
        )
        if me.rank == 1:
            await asyncio.to_thread(has_sent.wait, 60)
            whole.cancel()
        with suppress(asyncio.CancelledError):
            await whole

    if me.rank == 1:
        Broadcaster.broadcast = slow  # type: ignore[method-assign]
    said = outcome(lambda: asyncio.run(run()))
    Broadcaster.broadcast = broadcast  # type: ignore[method-assign]
    sent = [torch.full((3,), float(n) if me.rank == 0 else -1.0) for n in range(3)]
    for tensor in sent:
        dist.broadcast(tensor, 0)
    target = model(0.0)
    said["again"] = outcome(lambda: Snapshot(path, options=options("shared")).restore(target))[
        "text"
    ]
    dist.barrier()
    left = left_keys(me)
    dist.barrier()
    sent_values = [tensor.tolist() for tensor in sent]
    return {**said, "sent": sent_values, "values": values(target), "left": left}


def direct_cancelled(**arguments: Any) -> list[Any]:
    world = World(2, cancelled, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def killed(me: Rank, path: str, whom: int) -> dict[str, Any]:
    """``whom`` is killed between two broadcasts; the others go on without it."""
    me.join_gloo()
    others = dist.new_group([rank for rank in range(me.world) if rank != whom])
    Snapshot.take(path, model(1.0), replicated=["model/**"], options=SAVE)
    broadcast = Broadcaster.broadcast
    calls: list[int] = []

    async def deadly(self: Broadcaster, memory: memoryview, source: int) -> None:
        calls.append(source)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        await broadcast(self, memory, source)

    if me.rank == whom:
        Broadcaster.broadcast = deadly  # type: ignore[method-assign]
    snapshot = Snapshot(path, options=options("shared"))
    said = outcome(lambda: snapshot.restore(model(0.0)))
    total = torch.ones(1)
    dist.all_reduce(total, group=others)
    target = model(0.0)
    said["again"] = outcome(lambda: snapshot.restore(target, group=others))["text"]
    dist.barrier(others)
    left = left_keys(me)
    dist.barrier(others)
    return {**said, "total": total.item(), "values": values(target), "left": left}


def direct_killed(whom: int, **arguments: Any) -> list[Any]:
    world = World(3, killed, whom=whom, **arguments)
    try:
        return [rank.result() for number, rank in enumerate(world.ranks) if number != whom]
    finally:
        world.end()


# Trouble


class Collective:
    """A stateful whose methods need all ranks; raises or dies in the one called ``trouble``."""

    def __init__(self, fill: float, trouble: str = "") -> None:
        self.x = torch.full((5,), fill)
        self.trouble = trouble
        self.calls: list[str] = []

    def _meet(self, name: str) -> None:
        self.calls.append(name)
        if self.trouble == f"kill {name}":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        if self.trouble == f"raise {name}":
            raise ValueError("boom")

    def state_dict(self) -> dict[str, Any]:
        self._meet("state_dict")
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._meet("load_state_dict")
        self.x = state["x"]


def states(fill: float, trouble: str = "") -> dict[str, Any]:
    return {"a": Collective(fill, trouble), "b": Collective(fill), **model(fill)}


def replace(path: str, flag: Path, rank: int) -> Callable[[str], None]:
    """Puts another commit object in place between the reads of rank 0 and rank 1."""

    def before(key: str | int) -> None:
        if key == COMMIT_KEY and rank == 1 and not (flag / "done").exists():
            while not (flag / "read").exists():
                time.sleep(0.01)
            (flag / "done").touch()
            os.replace(flag / "commit", Path(path) / COMMIT_KEY)

    def after(key: str) -> None:
        if key == COMMIT_KEY and rank == 0:
            (flag / "read").touch()

    return before if rank == 1 else after


def hooks(me: Rank, path: str, trouble: str, is_victim: bool) -> dict[str, Any]:
    def read(what: int | str) -> None:
        if what == 2 and trouble == "storage":
            raise StorageError(op="read", key="k", backend="b")
        if what == 2 and trouble == "kill read":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == COMMIT_KEY and trouble == "index":
            raise StorageError(op="get", key="k", backend="b")

    if trouble == "replaced":
        when = "before" if me.rank == 1 else "after"
        return {when: replace(path, Path(path + "-flags"), me.rank)}
    return {"before": read} if is_victim else {}


def play(me: Rank, path: str, mode: str, trouble: str, whom: int) -> dict[str, Any]:
    """Saves, then restores, with trouble on one rank; then restores once more."""
    me.join_gloo()
    everything = ["a/**", "b/**", "model/**"]
    Snapshot.take(path, states(1.0), replicated=everything, options=SAVE)
    if trouble == "replaced":
        Snapshot.take(path + "-next", states(11.0), replicated=everything, options=SAVE)
        if me.rank == 0:
            os.mkdir(path + "-flags")
            shutil.copy(f"{path}-next/{COMMIT_KEY}", f"{path}-flags/commit")
            (attempt,) = (p for p in Path(path + "-next").iterdir() if p.is_dir())
            shutil.copytree(attempt, Path(path) / attempt.name)
        dist.barrier()
    is_victim = me.rank == whom
    target = states(0.0, trouble if is_victim else "")
    if is_victim and trouble == "mismatch":
        target["model"]["w1"] = torch.zeros(3)
    if is_victim and trouble == "input":
        target["b"] = object()
    watch = Watch(**hooks(me, path, trouble, is_victim))
    with faulty(watch):
        snapshot = Snapshot(faulty_url(path), options=options(mode))
        if is_victim and trouble == "takes":
            # Without what would wait for the other rank before the calls can meet.
            plain = {"model": target["model"]}
            said = outcome(lambda: Snapshot.take(path + "-other", plain, options=SAVE))
        else:
            said = outcome(lambda: snapshot.restore(target))
    said["calls"] = [*target["a"].calls, *getattr(target["b"], "calls", ())]
    said["model"] = [t.unique().tolist() for t in target["model"].values()]
    said["x"] = target["a"].x[0].item()
    me.say(said)
    me.hear()
    again = states(0.0)
    said["again"] = outcome(lambda: Snapshot(path, options=options(mode)).restore(again))["text"]
    said["model again"] = [t.unique().tolist() for t in again["model"].values()]
    dist.barrier()
    return said


def direct_play(num_ranks: int, trouble: str, whom: int, **arguments: Any) -> list[Any]:
    """What each rank says; without the one that is killed."""
    world = World(num_ranks, play, trouble=trouble, whom=whom, **arguments)
    try:
        others = [
            rank
            for number, rank in enumerate(world.ranks)
            if number != whom or not trouble.startswith("kill")
        ]
        said = [rank.hear() for rank in others]
        assert not any("value" in one for one in said), said
        if trouble.startswith("kill"):
            return said
        for rank in others:
            rank.tell()
        return [rank.result() for rank in others]
    finally:
        world.end()
