# SPDX-License-Identifier: Apache-2.0
"""Bad owner indices: an error that names the object, no wrong bytes, and bounded memory."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import actorsnap
from actorsnap import StateDict
from actorsnap.errors import ChecksumMismatch, FormatError, IncompatibleState, UsageError
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.owners import (
    Grid,
    Kept,
    Layout,
    Listed,
    MeshCut,
    Owners,
    RankBox,
    decode_owners,
    deflate_owners,
    encode_owners,
)
from actorsnap.planning.shared_reads import ReadMode
from actorsnap.protocol.restore import RestoreDecisions
from actorsnap.runtime import maintenance
from actorsnap.runtime.location import make_location, resolve_options
from actorsnap.runtime.process import host_id
from actorsnap.runtime.restore import Overwritten, RestoreCall, restore_by
from actorsnap.runtime.rounds import Alone
from actorsnap.runtime.script import run_async
from actorsnap.runtime.source import Source
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.testing import run_blocking_in_thread
from tests.api.test_recover import files_in
from tests.support.many import Many
from tests.support.world import SimulatedSave

RANKS = 20
"""More than read all manifests anyway (``partial_index.FEW_RANKS``)."""

_DEAD_PID = (1 << 22) + 1
ATTEMPT = f"20260101T000000-{host_id()}-{_DEAD_PID}-89abcdef"
KEY = f"{ATTEMPT}/owners.json"
STAGE = range(RANKS // 2, RANKS)
WHOLE = torch.arange(2 * RANKS * 3, dtype=torch.float32).reshape(2 * RANKS, 3)
MIB = 1 << 20


def sharded(whole: torch.Tensor, ranks: range, rank: int) -> DTensor:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=rank)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    rows, first = len(whole) // len(ranks), rank - ranks.start
    local = whole[rows * first : rows * first + rows].clone()
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def state_of(rank: int, whole: torch.Tensor = WHOLE) -> dict[str, StateDict]:
    return {"model": StateDict(w=sharded(whole, range(RANKS), rank)), "own": StateDict(rank=rank)}


def with_stage(rank: int, whole: torch.Tensor = WHOLE) -> dict[str, StateDict]:
    """The second half of the ranks has a tensor of its own."""
    state = state_of(rank, whole)
    if rank in STAGE:
        state["stage"] = StateDict(w=sharded(whole, STAGE, rank))
    return state


async def saved_at(
    folder: Path, state_of: Callable[[int], dict[str, StateDict]] = state_of
) -> Path:
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    storage = open_storage(str(folder), context)
    world = SimulatedSave(
        storages=[storage] * RANKS,
        states=[state_of(rank) for rank in range(RANKS)],
        run_blocking=run_blocking_in_thread,
        attempt=ATTEMPT,
    )
    assert await world.run() == dict.fromkeys(range(RANKS))
    await storage.aclose()
    return folder


async def restored(folder: Path, rank: int) -> torch.Tensor:
    """Restores as one rank of many would; returns what it has of the tensor then."""
    target = state_of(rank, torch.zeros_like(WHOLE))
    source = Source(make_location(folder, None), resolve_options(None))
    rounds = Alone(RestoreDecisions(mode=ReadMode.DIRECT), rank=rank)
    await run_async(restore_by(rounds, source, RestoreCall(app_state=target), Overwritten()))
    assert target["own"]["rank"] == rank
    local: torch.Tensor = target["model"]["w"].to_local()
    return local


async def copied(folder: Path) -> None:
    target = folder.with_name("copy")
    try:
        await actorsnap.Snapshot(folder).copy_to(target)
    finally:
        assert not (target / COMMIT_KEY).exists()


async def verified(folder: Path, level: str = "full") -> None:
    problems = (await actorsnap.Snapshot(folder).verify(level)).problems
    if problems:
        raise problems[0]


CALLS: dict[str, Callable[[Path], Awaitable[Any]]] = {
    "restore": lambda folder: restored(folder, 7),
    "verify": verified,
    "quick verify": lambda folder: verified(folder, "quick"),
    "copy": copied,
}


# What is wrong


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def changed(
    change: Callable[[Owners], Owners], attempt: str = ATTEMPT, world_size: int = RANKS
) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        owners = decode_owners(data, attempt=ATTEMPT, world_size=RANKS)
        return encode_owners(attempt, world_size, deflate_owners(change(owners)))

    return damage


def with_mesh(*axes: tuple[int, int], start: int = 0) -> Callable[[bytes], bytes]:
    layout = Layout(Grid(start, axes), (MeshCut(0, 0),))
    return changed(lambda owners: msgspec.structs.replace(owners, layouts=(layout,)))


def with_shape(*shape: int) -> Callable[[bytes], bytes]:
    def change(owners: Owners) -> Owners:
        (placed,) = owners.placed
        (tensor,) = placed.tensors
        tensors = (msgspec.structs.replace(tensor, shape=shape),)
        placed = msgspec.structs.replace(placed, tensors=tensors)
        return msgspec.structs.replace(owners, placed=(placed,))

    return changed(change)


def one_box_more(owners: Owners) -> Owners:
    """Says that rank 7 has the box of rank 8, too."""
    listed = Listed("model/w", (RankBox(7, (16, 0), (2, 3)),))
    return msgspec.structs.replace(owners, listed=(listed,))


def bomb(data: bytes) -> bytes:
    """Some KB that stand for a GiB."""
    size = 1 << 30
    packer = zlib.compressobj(9)
    packed = b"".join([*[packer.compress(bytes(MIB)) for _ in range(4)], packer.flush()])
    return encode_owners(ATTEMPT, RANKS, (size, packed))


def twice(owners: Owners) -> Owners:
    """Half of the ranks count twice, so all seem to have the leaf."""
    (kept,) = owners.private
    half = Grid(0, ((RANKS // 2, 1),))
    return msgspec.structs.replace(owners, private=(Kept((half, half), kept.paths),))


def equal_regions(owners: Owners) -> Owners:
    (placed,) = owners.placed
    regions = placed.regions * 1000
    return msgspec.structs.replace(
        owners, placed=(msgspec.structs.replace(placed, regions=regions),)
    )


ABSURD: dict[str, Callable[[bytes], bytes]] = {
    "a mesh of 2**60 ranks": with_mesh((1 << 60, 1)),
    "a mesh of 2**40 x 2**40 ranks": with_mesh((1 << 40, 1 << 40), (1 << 40, 1)),
    "a mesh of more ranks than saved": with_mesh((RANKS, 1), start=1),
    "ranks that do not exist": with_mesh((2, RANKS)),
    "a mesh of -1 ranks": with_mesh((-1, 1)),
    "a step of -1": with_mesh((RANKS, -1)),
    "a tensor of -1 rows": with_shape(-1, 3),
    "a tensor of 2**40 x 2**40": with_shape(1 << 40, 1 << 40),
    "a tensor of fewer dims than are cut": with_shape(),
    "a rank of a private leaf twice": changed(twice),
    "a thousand equal regions": changed(equal_regions),
    "a bomb": bomb,
}
BAD: dict[str, tuple[Callable[[bytes], bytes] | None, type[FormatError]]] = {
    "missing": (None, ChecksumMismatch),
    "empty": (lambda data: b"", ChecksumMismatch),
    "flipped": (flipped, ChecksumMismatch),
    "cut off": (lambda data: data[:-20], ChecksumMismatch),
    "of another attempt": (
        changed(lambda owners: owners, attempt=ATTEMPT.replace("2026", "2025")),
        FormatError,
    ),
    "of fewer ranks": (changed(lambda owners: owners, world_size=RANKS - 1), FormatError),
    **{what: (damage, FormatError) for what, damage in ABSURD.items()},
}
CONTRADICTING = {
    "a box more": changed(one_box_more),
    "another shape": with_shape(2 * RANKS, 4),
    "half of the rows": with_shape(RANKS, 3),
    "another mesh": with_mesh((RANKS // 2, 2)),
}


def put(saved: Path, damage: Callable[[bytes], bytes] | None) -> None:
    if damage is None:
        (saved / KEY).unlink()
    else:
        (saved / KEY).write_bytes(damage((saved / KEY).read_bytes()))


async def test_a_good_one(tmp_path: Path) -> None:
    saved = await saved_at(tmp_path / "s")
    for rank in (0, 7, RANKS - 1):
        assert torch.equal(await restored(saved, rank), WHOLE[2 * rank : 2 * rank + 2])
    assert torch.equal(await actorsnap.Snapshot(saved).read_object("model/w"), WHOLE)
    await verified(saved)
    await actorsnap.Snapshot(saved).copy_to(tmp_path / "copy")
    assert files_in(tmp_path / "copy") == files_in(saved)


async def test_a_layer_whose_shards_other_ranks_hold_is_read(tmp_path: Path) -> None:
    saved = await saved_at(
        tmp_path / "s",
        lambda rank: {"model": StateDict({"fc.w": sharded(WHOLE, range(RANKS), rank)})},
    )
    found = await actorsnap.Snapshot(saved).read_object("model/fc")
    assert torch.equal(found.pop("w"), WHOLE)
    assert not found


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_one(tmp_path: Path, what: str) -> None:
    saved = await saved_at(tmp_path / "s")
    damage, kind = BAD[what]
    put(saved, damage)
    for name, call in CALLS.items():
        tracemalloc.start()
        try:
            with pytest.raises(kind) as caught:
                await call(saved)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert caught.value.key == KEY, name
        assert peak < 16 * MIB, name
    await reads_right_or_names_it(saved)


@pytest.mark.parametrize("what", CONTRADICTING)
async def test_one_that_contradicts_a_manifest(tmp_path: Path, what: str) -> None:
    saved = await saved_at(tmp_path / "s")
    put(saved, CONTRADICTING[what])
    for name, call in CALLS.items():
        with pytest.raises(FormatError, match="according to the owner index.*contradict") as caught:
            await call(saved)
        assert caught.value.key == KEY, name
    await reads_right_or_names_it(saved)
    (saved / COMMIT_KEY).unlink()
    await actorsnap.Snapshot(saved).recover()  # without the index
    await verified(saved)
    assert torch.equal(await restored(saved, 7), WHOLE[14:16])


async def test_one_that_lacks_paths(tmp_path: Path) -> None:
    """Nobody knows what it lacks, but what is missing is an error."""
    saved = await saved_at(tmp_path / "s")
    put(saved, changed(lambda owners: Owners()))
    with pytest.raises((FormatError, IncompatibleState)):
        await restored(saved, 7)
    with pytest.raises((FormatError, UsageError)):
        await actorsnap.Snapshot(saved).read_object("model/w")
    for name in ("verify", "quick verify", "copy"):
        with pytest.raises(FormatError, match="according to the owner index") as caught:
            await CALLS[name](saved)
        assert caught.value.key == KEY, name


def without_stage(owners: Owners) -> Owners:
    kept = [each for each in owners.placed if each.tensors[0].path != "stage/w"]
    assert len(kept) < len(owners.placed)
    return msgspec.structs.replace(owners, placed=tuple(kept))


async def test_one_that_lacks_a_tensor(tmp_path: Path) -> None:
    """Rank 0 does not have it, either, and a rank that restores fewer boxes sees it in tables."""
    saved = await saved_at(tmp_path / "s", with_stage)
    assert torch.equal(await actorsnap.Snapshot(saved).read_object("stage/w"), WHOLE)
    put(saved, changed(without_stage))
    snapshot = actorsnap.Snapshot(saved)
    with pytest.raises(FormatError, match="'stage/w' according to the owner index") as caught:
        await snapshot.read_object("stage/w")
    assert caught.value.key == KEY
    for path in ("stage/x", "stag"):
        with pytest.raises(UsageError):
            await snapshot.read_object(path)
    state = {"stage": StateDict(w=sharded(torch.zeros_like(WHOLE), range(STAGE.stop), STAGE[2]))}
    source = Source(make_location(saved, None), resolve_options(None))
    rounds = Alone(RestoreDecisions(mode=ReadMode.DIRECT), rank=STAGE[2])
    with pytest.raises(FormatError, match="'stage/w' according to the owner index") as caught:
        await run_async(restore_by(rounds, source, RestoreCall(app_state=state), Overwritten()))
    assert caught.value.key == KEY


async def test_a_box_of_any_of_many_ranks_is_compared(tmp_path: Path) -> None:
    """However many manifests are read."""
    ranks = range(70)
    saved = Many("fsdp", len(ranks), 3).write(tmp_path)
    (key,) = saved.glob("*/owners.json")
    data = key.read_bytes()
    owners = decode_owners(data, attempt=key.parent.name, world_size=len(ranks))
    (placed,) = owners.placed
    more = tuple([Listed(each.path, (RankBox(66, (0, 0), (1, 1)),)) for each in placed.tensors])
    changed = msgspec.structs.replace(owners, listed=more)
    key.write_bytes(encode_owners(key.parent.name, len(ranks), deflate_owners(changed)))
    path = placed.tensors[0].path
    with pytest.raises(FormatError, match=f"rank 66 has '{path}' from") as caught:
        await actorsnap.Snapshot(saved).read_object(path)
    assert caught.value.key == str(key.relative_to(saved))


async def reads_right_or_names_it(saved: Path) -> None:
    """A call that reads all manifests does not need the index."""
    read, key = WHOLE, KEY
    try:
        read = await actorsnap.Snapshot(saved).read_object("model/w")
    except FormatError as error:
        key = error.key
    assert key == KEY
    assert torch.equal(read, WHOLE)


@pytest.mark.parametrize("has_all_manifests", [False, True])
async def test_it_is_garbage_without_the_commit(tmp_path: Path, has_all_manifests: bool) -> None:
    """A crash between the index and the commit; with all manifests, it could be recovered."""
    saved = await saved_at(tmp_path / "s")
    (saved / COMMIT_KEY).unlink()
    if not has_all_manifests:
        (saved / ATTEMPT / "manifest" / "5.json").unlink()
    assert (saved / KEY).exists()
    source = Source(make_location(saved, None), resolve_options(None))
    if has_all_manifests:
        report = await run_async(maintenance.collect(source, force=False))
        assert not report.deleted
        report = await run_async(maintenance.collect(source, force=False, deletable=[ATTEMPT]))
    else:
        report = await run_async(maintenance.collect(source, force=False))
    assert KEY in report.deleted
    assert files_in(tmp_path) == {}
