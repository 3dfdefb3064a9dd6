# SPDX-License-Identifier: Apache-2.0
"""Whole saves of simulated worlds, under a virtual clock: one outcome, always, in time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import pytest
import safetensors.torch
import torch
import trio.testing

from actorsnap.actors import saver
from actorsnap.errors import ObjectNotFound, StorageError, UsageError
from actorsnap.format.checksum import block_checksums, crc32c_of
from actorsnap.format.compression import FRAME_BYTES, Codec, Unpacker
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import (
    COMMIT_KEY,
    Commit,
    RankManifest,
    SaveRecord,
    TensorEntry,
    decode_commit,
    features_of,
)
from actorsnap.format.owners import decode_owners, owners_key
from actorsnap.format.tables import decode_rank_manifest
from actorsnap.planning.ownership import OwnerIndex
from actorsnap.planning.restore import chunk_maps
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import Ask
from actorsnap.protocol.save import Question, decode
from actorsnap.state.stateful import StateDict
from actorsnap.storage.base import (
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    num_bytes,
)
from actorsnap.storage.memory import MemoryStorage, open_memory
from actorsnap.storage.wrapper import Wrapper, WriterWrapper
from actorsnap.testing import FaultyStorage
from actorsnap.testing.faults import Verb
from tests.actors.parts import part_of
from tests.support.network import SimulatedNetwork
from tests.support.world import SimulatedSave

T = TypeVar("T")
ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
MIB = 1 << 20
ZSTD = Codec(name="zstd", level=1)
_names = itertools.count()


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def run_inline(fn: Callable[..., T], /, *args: Any) -> T:
    """Blocking calls on the loop: with no threads, a seed repeats a run exactly."""
    await anyio.lowlevel.checkpoint()
    return fn(*args)


def empty_storage() -> Storage:
    context = StorageContext(run_blocking=run_inline)
    return open_memory(f"memory://world-{next(_names)}", context)


def world_of(world_size: int, storages: list[Storage] | Storage, **changes: Any) -> SimulatedSave:
    shared = torch.arange(3 * MIB, dtype=torch.uint8)
    states = [
        {
            "model": StateDict(w=shared.clone(), b=torch.arange(7.0)),
            "private": StateDict(x=torch.full((5,), float(rank)), rank=rank),
        }
        for rank in range(world_size)
    ]
    settings: dict[str, Any] = {
        "storages": storages if isinstance(storages, list) else [storages] * world_size,
        "states": states,
        "run_blocking": run_inline,
        "attempt": ATTEMPT,
        "replicated": ["model/**"],
    }
    return SimulatedSave(**(settings | changes))


def tensor_of(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes).to(torch.uint8)


async def read_back(storage: Storage) -> tuple[Commit, list[RankManifest]]:
    commit = decode_commit(await storage.get(COMMIT_KEY))
    manifests = []
    for rank in range(commit.world_size):
        key = manifest_key(commit.attempt, rank)
        manifest = decode_rank_manifest(await storage.get(key), key)
        for held in manifest.objects:
            for key, size in held.stored:
                assert (await storage.stat(key)).size == size
        manifests.append(manifest)
    if commit.world_size > 1:
        data = await storage.get(owners_key(commit.attempt))
        owners = decode_owners(data, attempt=commit.attempt, world_size=commit.world_size)
        index = OwnerIndex(owners, commit.world_size)
        assert [index.difference(manifest) for manifest in manifests] == [None] * len(manifests)
    return commit, manifests


async def is_committed(storage: Storage) -> bool:
    try:
        await storage.stat(COMMIT_KEY)
    except ObjectNotFound:
        return False
    return True


@pytest.mark.parametrize("copies", [False, True])
async def test_many_ranks_make_one_snapshot(copies: bool) -> None:
    storage = empty_storage()
    world = world_of(4, storage, copies=copies)
    assert await world.run() == dict.fromkeys(range(4))
    assert world.staged == {0, 1, 2, 3}
    commit, manifests = await read_back(storage)
    assert commit.world_size == 4
    entries = [(m, e) for m in manifests for e in m.entries if isinstance(e, TensorEntry)]
    assert {m.rank for m, e in entries if e.path == "private/x"} == {0, 1, 2, 3}
    assert [e.path for _, e in entries].count("model/b") == 1
    # The large one is written by all, each a part, into objects that stay whole.
    parts = [(m, e) for m, e in entries if e.path == "model/w"]
    assert {m.rank for m, _ in parts} == {0, 1, 2, 3}
    whole = bytearray(3 * MIB)
    for manifest, entry in parts:
        assert entry.global_shape == (3 * MIB,)
        assert entry.offsets is not None
        at = entry.data
        data = await storage.get(manifest.objects[at.object].key, at.start, at.stop)
        assert block_checksums(memoryview(data), at.block_bytes) == at.crc32c
        assert len(data) == entry.shape[0]
        whole[entry.offsets[0] : entry.offsets[0] + len(data)] = data
    expected = torch.arange(3 * MIB, dtype=torch.uint8)
    assert bytes(whole) == expected.numpy().tobytes()
    keys = {m.objects[e.data.object].key for m, e in parts}
    assert len(keys) < 4
    loaded: dict[str, torch.Tensor] = {}
    for key in keys:
        loaded |= safetensors.torch.load(await storage.get(key))
    assert torch.equal(loaded["w"], expected)
    assert all(budget.leased_bytes == 0 for budget in world.budgets)


@pytest.mark.parametrize("codec", [None, ZSTD])
async def test_each_rank_repeats_what_the_commit_object_says(codec: Codec | None) -> None:
    """But the caller's metadata, which rank 0 has."""
    storage = empty_storage()
    world = world_of(3, storage, codec=codec, step=7, metadata={"run": "a"})
    assert await world.run() == dict.fromkeys(range(3))
    commit, manifests = await read_back(storage)
    assert (commit.world_size, commit.step, commit.metadata) == (3, 7, {"run": "a"})
    for manifest in manifests:
        save = manifest.save
        assert isinstance(save, SaveRecord)
        assert save.metadata == ({} if manifest.rank else commit.metadata)
        for name in ("world_size", "features", "fsync", "step"):
            assert getattr(save, name) == getattr(commit, name)


@pytest.mark.parametrize("copies", [False, True])
async def test_many_ranks_compress_one_object(copies: bool) -> None:
    """Each compresses its part, into chunks of its own; on a storage that joins no writers."""
    storage = empty_storage()
    world = world_of(4, storage, copies=copies, codec=ZSTD)
    assert await world.run() == dict.fromkeys(range(4))
    commit, manifests = await read_back(storage)
    assert commit.features == features_of(is_compressed=True, has_owners=True)
    (key,) = {
        m.objects[e.data.object].key
        for m in manifests
        for e in m.entries
        if e.path == "model/w" and isinstance(e, TensorEntry)
    }
    records = [record for m in manifests for record in m.objects if record.key == key]
    assert len(records) == 4
    data = bytearray(records[0].size)
    for extent in chunk_maps(records)[key].extents(0, len(data)):
        stored = memoryview(await storage.get(extent.key, extent.offset))
        assert len(stored) == extent.size < extent.stop - extent.start
        at = 0
        for number, size in enumerate(extent.frames):
            start = extent.start + number * FRAME_BYTES
            out = memoryview(data)[start : min(start + FRAME_BYTES, extent.stop)]
            Unpacker(extent.key).unpack(stored[at : at + size], out)
            at += size
    loaded = safetensors.torch.load(bytes(data))
    assert torch.equal(loaded["w"], torch.arange(3 * MIB, dtype=torch.uint8))
    assert all(budget.leased_bytes == 0 for budget in world.budgets)


async def test_a_rank_that_cannot_compress_is_everybodys_outcome() -> None:
    storage = empty_storage()
    broken = FaultyStorage(storage, fail_at=2, fail_verbs=[Verb.PUT])
    world = world_of(3, [storage, storage, broken], codec=ZSTD, chunk_bytes=MIB)
    outcomes = await world.run()
    assert broken.was_hit
    assert len(set(outcomes.values())) == 1
    failure = outcomes[0]
    assert isinstance(failure, Failure)
    assert (failure.rank, failure.stage) == (2, Stage.STORE)
    assert [info.key async for info in storage.list("")] == []


async def test_a_rank_without_the_library_is_everybodys_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has looked at its own installation only."""
    ranks = iter(range(3))

    def check_available() -> None:
        if next(ranks) == 1:
            raise UsageError("no zstd here")

    monkeypatch.setattr(saver, "check_available", check_available)
    storage = empty_storage()
    outcomes = await world_of(3, storage, codec=ZSTD).run()
    assert len(set(outcomes.values())) == 1
    failure = outcomes[0]
    assert isinstance(failure, Failure)
    assert failure.stage == Stage.PLAN
    error = failure.to_error()
    assert isinstance(error, UsageError)
    assert "no zstd here" in str(error)
    assert [info.key async for info in storage.list("")] == []


async def test_one_ranks_storage_error_is_everybodys_outcome() -> None:
    storage = empty_storage()
    broken = FaultyStorage(storage, fail_at=1, fail_verbs=[Verb.WRITE_AT])
    world = world_of(3, [storage, storage, broken], replicated=[])
    outcomes = await world.run()
    assert broken.was_hit
    assert len(set(outcomes.values())) == 1
    failure = outcomes[0]
    assert isinstance(failure, Failure)
    assert (failure.rank, failure.stage) == (2, Stage.STORE)
    assert isinstance(world.causes[0], StorageError)
    assert not await is_committed(storage)
    assert [info.key async for info in storage.list("")] == []


async def test_one_listing_finds_the_manifests_of_all_ranks() -> None:
    storage = empty_storage()
    counting = FaultyStorage(storage)
    world = world_of(5, [counting, *[storage] * 4], replicated=[], overwrite=False)
    assert await world.run() == dict.fromkeys(range(5))
    assert (counting.counts[Verb.LIST], counting.counts[Verb.STAT]) == (1, 0)


class _Listing(Wrapper):
    """Lists manifests as an outdated folder has them."""

    def __init__(self, inner: Storage, change: Callable[[ObjectInfo], ObjectInfo | None]) -> None:
        super().__init__(inner)
        self._change = change

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in self.inner.list(prefix):
            if (changed := self._change(info)) is not None:
                yield changed


@pytest.mark.parametrize("is_absent", [True, False])
async def test_an_outdated_listing_is_no_failure(is_absent: bool) -> None:
    storage = empty_storage()
    outdated = _Listing(storage, lambda i: None if is_absent else replace(i, size=i.size - 1))
    counting = FaultyStorage(outdated)
    world = world_of(3, [counting, storage, storage], replicated=[])
    assert await world.run() == dict.fromkeys(range(3))
    assert counting.counts[Verb.STAT] == 3


@pytest.mark.parametrize("what", ["missing", "cut off"])
async def test_a_manifest_that_rank_0_sees_otherwise(what: str) -> None:
    storage = empty_storage()

    async def damage(verb: Verb, key: str) -> None:
        path = manifest_key(ATTEMPT, 2)
        if verb is Verb.LIST:
            data = await storage.get(path)
            await storage.delete([path])
            if what == "cut off":
                await storage.put(path, [memoryview(data)[:-1]])

    faulty = FaultyStorage(storage, before=damage)
    outcomes = await world_of(3, [faulty, storage, storage], replicated=[]).run()
    failure = outcomes[0]
    assert isinstance(failure, Failure)
    assert outcomes == dict.fromkeys(range(3), failure)
    assert (failure.stage, failure.key) == (Stage.COMMIT, manifest_key(ATTEMPT, 2))
    says = "storage that all ranks share" if what == "missing" else "were written"
    assert says in failure.reason
    assert not await is_committed(storage)


async def test_a_stalled_rank_ends_at_the_deadline() -> None:
    storage = empty_storage()
    stalled = FaultyStorage(storage, latency_s={Verb.WRITE_AT: math.inf})
    begun = anyio.current_time()
    world = world_of(3, [storage, stalled, storage], replicated=[], timeout_s=1500.0)
    outcomes = await world.run()
    assert anyio.current_time() - begun == pytest.approx(1500.0)
    assert len(set(outcomes.values())) == 1
    assert outcomes[0] is not None
    assert outcomes[0].rank == 1
    assert "waiting for rank 1. " in outcomes[0].reason
    assert not await is_committed(storage)


async def test_a_look_that_hangs_keeps_nobody_from_the_outcome() -> None:
    storage = empty_storage()
    commits = anyio.Event()

    async def commit_slowly(verb: Verb, key: str) -> None:
        if verb is Verb.PUT_IF_ABSENT:
            commits.set()
            await anyio.sleep(5)

    async def hang(verb: Verb, key: str) -> None:
        if verb is Verb.GET:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5000)

    world = world_of(
        2, [FaultyStorage(storage, before=commit_slowly), FaultyStorage(storage, before=hang)]
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run)
        await commits.wait()
        killed_s = anyio.current_time()
        world.kill(0)
    assert world.outcomes.keys() == {1}
    assert world.outcomes[1] is not None
    assert world.outcomes[1].may_be_visible
    assert world.told_s[1] - killed_s <= 30 + 10 + 2, "silence, look, a grace"


async def test_a_rank_of_another_release_is_refused_by_all() -> None:
    storage = empty_storage()
    outcomes = await world_of(2, storage, release_of={1: "0.0.1"}).run()
    assert len(set(outcomes.values())) == 1
    assert outcomes[0] is not None
    assert "0.0.1" in outcomes[0].reason


async def test_a_budget_below_the_state_still_stages_everything() -> None:
    storage = empty_storage()
    world = world_of(2, storage, copies=True, budget_bytes=MIB, replicated=[])
    assert await world.run() == {0: None, 1: None}
    for budget in world.budgets:
        assert budget.leased_bytes == 0
        assert budget.peak_bytes <= 2 * MIB  # one chunk, larger than the whole budget


class Recording(Wrapper):
    """Notes each write: its key, offset, size, and whether it came with its CRC32C."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.writes: list[tuple[str, int, int, bool]] = []

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return _RecordingWriter(self, inner)


class _RecordingWriter(WriterWrapper):
    storage: Recording

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        is_right = crc32c == crc32c_of(views)
        self.storage.writes.append((self.key, offset, num_bytes(views), is_right))
        await self.inner.write_at(offset, views, crc32c)


@pytest.mark.parametrize("copies", [False, True])
async def test_each_write_brings_its_checksum_and_is_as_the_storage_wants_it(copies: bool) -> None:
    rules = Capabilities(min_write_bytes=5 * MIB, max_writes=4, checks_crc32c=True)
    storage = Recording(MemoryStorage(f"world-{next(_names)}", capabilities=rules))
    state = {"model": StateDict({f"w{n}": tensor_of(n * 100_001) for n in range(30)})}
    world = world_of(3, storage, copies=copies, states=[state] * 3, replicated=["**"])
    assert await world.run() == dict.fromkeys(range(3))
    await read_back(storage)  # and `complete` has looked
    sizes = {key: (await storage.stat(key)).size for key, *_ in storage.writes}
    assert max(sizes.values()) > 15 * MIB
    for key, offset, nbytes, is_right in storage.writes:
        assert is_right
        assert nbytes >= rules.least_write_bytes(sizes[key]) or offset + nbytes == sizes[key]


async def test_killed_ranks_are_resumed_by_others() -> None:
    storage = empty_storage()
    slow = FaultyStorage(storage, latency_s={Verb.COMPLETE: 100.0})
    dying = world_of(2, slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dying.run)
        await anyio.sleep(50.0)
        dying.kill(0)
        dying.kill(1)
    assert not await is_committed(storage)

    counting = Recording(storage)
    world = world_of(2, counting, attempt=ATTEMPT.replace("89abcdef", "00000000"))
    world.resumed = (ATTEMPT,)
    assert await world.run() == {0: None, 1: None}
    _, manifests = await read_back(storage)
    assert {record.key.split("/")[0] for m in manifests for record in m.objects} == {world.attempt}
    assert counting.writes == []


async def test_one_writer_per_object_is_enough() -> None:
    rules = Capabilities(has_joined_writers=False)
    storage = MemoryStorage(f"world-{next(_names)}", capabilities=rules)
    state = {"model": StateDict({f"w{n}": tensor_of(MIB) for n in range(8)})}
    world = world_of(4, storage, states=[state] * 4, replicated=["**"])
    assert await world.run() == dict.fromkeys(range(4))
    commit, manifests = await read_back(storage)
    keys = [held.key for manifest in manifests for held in manifest.objects]
    assert len(keys) == len({*keys})
    assert commit.world_size == 4


async def test_a_budget_below_the_least_write_is_refused_before_anything_is_stored() -> None:
    rules = Capabilities(min_write_bytes=5 * MIB)
    storage = MemoryStorage(f"world-{next(_names)}", capabilities=rules)
    state = {"model": StateDict(w=tensor_of(20 * MIB))}
    world = world_of(2, storage, copies=True, budget_bytes=3 * MIB, states=[state] * 2)
    outcomes = await world.run()
    for failure in outcomes.values():
        assert failure is not None
        with pytest.raises(UsageError, match="memory_budget_bytes=3145728 is too small"):
            raise failure.to_error()
    assert [info.key async for info in storage.list("")] == []


@pytest.mark.few(20)
@pytest.mark.parametrize("seed", range(60))
async def test_whatever_happens_all_commit_or_all_abort(seed: int) -> None:
    rng = random.Random(seed)
    storage = empty_storage()
    world_size = rng.randrange(1, 5)
    storages: list[Storage] = []
    for _ in range(world_size):
        fault = rng.choice(["none", "none", "fail", "ambiguous", "stall", "slow"])
        if fault == "none":
            storages.append(storage)
        elif fault == "stall":
            verb = rng.choice([Verb.WRITE_AT, Verb.PUT, Verb.COMPLETE, Verb.WRITER])
            storages.append(FaultyStorage(storage, latency_s={verb: math.inf}))
        elif fault == "slow":
            slow: dict[Verb | str, float] = {
                Verb.WRITE_AT: rng.random() * 20,
                Verb.PUT: rng.random() * 50,
            }
            storages.append(FaultyStorage(storage, latency_s=slow))
        else:
            storages.append(
                FaultyStorage(
                    storage,
                    fail_at=rng.randrange(1, 15),
                    fail_when="after" if fault == "ambiguous" else "before",
                )
            )
    world = world_of(
        world_size,
        storages,
        copies=rng.random() < 0.5,
        replicated=rng.choice([[], ["model/**"]]),
    )
    begun = anyio.current_time()

    async def cancel_sometime() -> None:
        await anyio.sleep(rng.random() * 100)
        rank = rng.randrange(world_size)
        world.participants[rank].request_cancel("enough")

    async with anyio.create_task_group() as tasks:
        if rng.random() < 0.3:
            tasks.start_soon(cancel_sometime)
        outcomes = await world.run()
        tasks.cancel_scope.cancel()

    assert anyio.current_time() - begun <= 60.0 + 30.0 + 50.0, "deadline, clean-up, a slow put"
    assert len(set(outcomes.values())) == 1, f"seed {seed}: ranks disagree"
    outcome = outcomes[0]
    if outcome is None or outcome.may_be_visible:
        assert await is_committed(storage)
        await read_back(storage)
    else:
        assert not await is_committed(storage)
    assert all(budget.leased_bytes == 0 for budget in world.budgets)


class Overheard(SimulatedNetwork):
    """Attributes: messages: What was sent, and by whom."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.messages: list[tuple[int, object]] = []

    def _carry(self, sender: int, inbox: Any, message: object) -> None:
        self.messages.append((sender, message))
        super()._carry(sender, inbox, message)

    def asked(self) -> list[str]:
        """What ranks were asked for in this save."""
        questions = [
            decode(message.payload, Question)
            for _, message in self.messages
            if isinstance(message, Ask)
        ]
        kinds = ("inventory", "sharded", "lists", "outline")
        return [next(kind for kind in kinds if getattr(each, kind)) for each in questions]

    def nbytes(self, rank: int) -> int:
        sent = [message for sender, message in self.messages if sender == rank]
        return sum(len(msgspec.msgpack.encode(message)) for message in sent)


def stages(embedding: Sequence[tuple[int, ...]]) -> list[dict[str, StateDict]]:
    """Two pipeline stages of two ranks each; the embedding lies on these meshes."""
    whole = torch.arange(64 * 1024).to(torch.uint8).reshape(64, 1024)
    states = []
    for rank in range(4):
        mesh = (0, 1) if rank < 2 else (2, 3)
        held = {f"layer{rank // 2}": part_of(whole, mesh, rank)}
        if mesh in embedding:
            held["embedding"] = part_of(whole, mesh, rank)
        states.append({"model": StateDict(held)})
    return states


async def test_each_mesh_stores_its_own_and_says_so_once() -> None:
    storage = empty_storage()
    numbers = itertools.count()

    async def save(
        states: list[dict[str, StateDict]], before: SimulatedSave | None = None, **more: Any
    ) -> tuple[SimulatedSave, Overheard]:
        network = Overheard(4)
        if before is not None:
            more = {"memory": before.memory, "remembered": before.learned} | more
        more["attempt"] = f"20260101T00000{next(numbers)}-0123abcd-1-89abcdef"
        world = world_of(4, storage, states=states, network=network, overwrite=True, **more)
        assert await world.run() == dict.fromkeys(range(4))
        return world, network

    tied = stages([(0, 1), (2, 3)])
    first, network = await save(tied)
    # Boxes that follow from no mesh are each rank's own; the tensors are those of its stage.
    assert network.asked() == [*["inventory"] * 4, *["sharded", "outline"] * 2]
    _, manifests = await read_back(storage)
    paths = [entry.path for manifest in manifests for entry in manifest.entries]
    counts = [paths.count(f"model/{name}") for name in ("embedding", "layer0", "layer1")]
    assert counts == [4, 2, 2]
    again, network = await save(tied, first)
    assert network.asked() == []
    assert max(network.nbytes(rank) for rank in range(1, 4)) <= 200
    apart, network = await save(stages([(0, 1)]), again)
    assert network.asked() == [*["inventory"] * 2, "sharded", "outline"]
    _, network = await save(stages([(0, 1)]), apart)
    assert network.asked() == []
