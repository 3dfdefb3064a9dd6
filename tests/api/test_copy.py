# SPDX-License-Identifier: Apache-2.0
"""Copies between storages: the same bytes, committed last, resumed, and never a mixture."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actorsnap import (
    ActorSnapError,
    ChecksumMismatch,
    CopyEvent,
    NotASnapshot,
    ObjectExists,
    Options,
    Snapshot,
    StorageError,
    sync,
)
from actorsnap.format.layout import Attempt, collection_key, copy_claim_key, encode_copy_claim
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.runtime import copy, copy_claim, maintenance
from actorsnap.runtime.host import Host
from actorsnap.runtime.location import make_location
from actorsnap.runtime.script import run_async
from actorsnap.runtime.source import Source
from actorsnap.storage.base import ObjectWriter, Storage, StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.storage.wrapper import Wrapper, WriterWrapper, without_blocking_io
from actorsnap.testing import FaultyStorage, run_blocking_in_thread
from tests.api.damage import files, flip_bit
from tests.api.facades import Facade, each_facade
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import assert_idle, assert_whole, leftovers, number_at, state
from tests.api.zygote import Zygote
from tests.held.actorsnap_raising import Speechless
from tests.support.cases import slow

_spaces = itertools.count()
_SMALL_CHUNKS = Options(chunk_bytes=2 << 20)
_DEAD_PID = (1 << 22) + 1
"""Above what Linux gives to any process."""


@pytest.fixture
def memory() -> str:
    return f"memory://copy-{next(_spaces)}"


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """State 1, of several writes."""
    url = str(tmp_path / "saved")
    sync.Snapshot.take(url, state(1, num_floats=2_000_000))
    return url


def opened(url: object) -> Storage:
    return open_storage(str(url), StorageContext(run_blocking=run_blocking_in_thread))


async def objects(url: object) -> dict[str, bytes]:
    storage = opened(url)
    return {info.key: await storage.get(info.key) async for info in storage.list("")}


async def collect(url: str, *, force: bool = False) -> list[str]:
    """What ``actorsnap rm --garbage`` deletes."""
    source = Source(make_location(url, None), Options())
    return list((await run_async(maintenance.collect(source, force=force))).deleted)


async def attempt_at(url: str) -> str:
    return next(key.partition("/")[0] for key in await objects(url) if key != COMMIT_KEY)


# What comes out -------------------------------------------------------------------------------


@pytest.mark.few
@each_facade
@pytest.mark.parametrize("way", ["to memory", "from memory", "on disk"])
def test_a_copy_has_the_same_bytes(
    api: Facade, way: str, saved: str, memory: str, tmp_path: Path
) -> None:
    source, to = saved, memory
    if way == "from memory":
        api.run(api.Snapshot(saved).copy_to(memory))
        source, to = memory, str(tmp_path / "copy")
    elif way == "on disk":
        to = str(tmp_path / "copy")
    events: list[CopyEvent] = []
    snapshot = api.Snapshot(source, options=_SMALL_CHUNKS)
    report = api.run(snapshot.copy_to(to, on_event=events.append))
    there = asyncio.run(objects(to))
    assert there == asyncio.run(objects(saved))
    asyncio.run(assert_whole_copy(to))
    nbytes = sum(len(data) for key, data in there.items() if key != COMMIT_KEY)
    assert (report.num_copied, report.copied_bytes) == (len(there) - 1, nbytes)
    assert (report.num_skipped, report.was_there) == (0, False)
    kinds = [event.kind.value for event in events]
    assert kinds[0] == "begun"
    assert kinds[-1] == "committed"
    assert kinds.count("copied") == len(there) - 1
    assert kinds.count("moved") > len(there)
    assert "manifest/0.json" in events[-2].key
    assert events[-1].done_bytes == events[-1].total_bytes == nbytes
    assert_idle()


async def assert_whole_copy(url: str) -> None:
    assert (await Snapshot(url).verify("full")).ok
    assert await leftovers(url) == []


async def test_memory_is_bounded_by_the_budget(saved: str, memory: str) -> None:
    budget = Host.get().resources.budget
    before = budget.limit_bytes
    most: list[int] = []

    def look(event: CopyEvent) -> None:
        most.append(budget.leased_bytes)

    try:
        options = Options(memory_budget_bytes=4 << 20)
        await Snapshot(saved, options=options).copy_to(memory, on_event=look)
    finally:
        Host.get().resources.set_budget(before)
    assert 0 < max(most) <= 4 << 20
    await assert_whole_copy(memory)


# What is there --------------------------------------------------------------------------------


async def test_a_copy_that_is_there_is_left_alone(saved: str, memory: str) -> None:
    await Snapshot(saved).copy_to(memory)
    for overwrite in (False, True):
        with failing() as faults:
            report = await Snapshot(saved).copy_to(faulty_url(memory), overwrite=overwrite)
        assert report.was_there
        assert not {"put", "writer", "delete", "put_if_absent"} & {*faults[0].counts}


async def test_another_snapshot_is_replaced_only_if_asked(saved: str, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    await Snapshot.take(to, state(2))
    with pytest.raises(ObjectExists, match="destination|--overwrite") as caught:
        await Snapshot(saved).copy_to(to)
    assert caught.value.backend == to
    await assert_whole(to, 2)
    seen: list[int | None] = []

    async def look(verb: str, key: str) -> None:
        if verb == "write_at":
            seen.append(await number_at(to))

    with faulty(lambda inner: FaultyStorage(inner, before=look)):
        await Snapshot(saved).copy_to(faulty_url(to), overwrite=True)
    assert seen
    assert set(seen) == {2}
    assert await objects(to) == await objects(saved)


async def test_a_damaged_one_is_replaced_only_if_asked(saved: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    await Snapshot.take(str(to), state(2))
    flip_bit(files(to)["commit"], 300)
    with pytest.raises(ObjectExists, match="damaged"):
        await Snapshot(saved).copy_to(str(to))
    await Snapshot(saved).copy_to(str(to), overwrite=True)
    assert (await Snapshot(str(to)).verify("full")).ok


async def refused(error: type[ActorSnapError], saved: str, to: Path, match: str) -> str:
    """Copying raises the error, with and without ``overwrite``, and changes nothing."""
    before = await objects(to)
    for overwrite in (False, True, False):
        with pytest.raises(error, match=match) as caught:
            await Snapshot(saved).copy_to(str(to), overwrite=overwrite)
        assert getattr(caught.value, "backend", None) == str(to)
        assert await objects(to) == before
    return str(caught.value)


@pytest.mark.parametrize("what", ["manifest", "data"])
@pytest.mark.parametrize("how", ["missing", "short"])
async def test_the_same_snapshot_is_there_but_damaged(
    saved: str, tmp_path: Path, what: str, how: str
) -> None:
    to = tmp_path / "to"
    await Snapshot(saved).copy_to(str(to))
    path = files(to)[what]
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    key = str(path.relative_to(to))
    said = await refused(ObjectExists, saved, to, "this snapshot is committed there, but")
    assert key in said
    assert "`actorsnap rm`" in said
    assert "overwrite" not in said
    await Snapshot(str(to)).delete()
    await Snapshot(saved).copy_to(str(to))
    assert await objects(to) == await objects(saved)


async def test_the_same_snapshot_is_there_by_another_commit_object(
    saved: str, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    shutil.copytree(saved, to)
    (to / COMMIT_KEY).unlink()
    await Snapshot(str(to)).recover()
    said = await refused(ObjectExists, saved, to, "the commit object differs")
    assert "`actorsnap rm`" in said
    assert "overwrite" not in said
    assert (await Snapshot(str(to)).verify("full")).ok


@pytest.mark.parametrize("kind", ["complete", "incomplete", "damaged commit object"])
async def test_objects_that_another_program_copied(saved: str, tmp_path: Path, kind: str) -> None:
    """They are not claimed: by a claim the next copy would take them for its own."""
    to = tmp_path / "to"
    shutil.copytree(saved, to)
    if kind == "damaged commit object":
        (to / COMMIT_KEY).write_bytes(b"half")
        before = await objects(to)
        for _ in range(2):
            with pytest.raises(StorageError, match="`actorsnap cp` did not write them"):
                await Snapshot(saved).copy_to(str(to), overwrite=True)
        assert await objects(to) == before
        return
    (to / COMMIT_KEY).unlink()
    if kind == "incomplete":
        files(to)["manifest"].unlink()
    said = await refused(StorageError, saved, to, "`actorsnap cp` did not write them")
    assert "`actorsnap rm --garbage`" in said
    assert "`actorsnap recover`" in said
    if kind == "complete":
        await Snapshot(str(to)).recover()
        await assert_whole_copy(str(to))


async def test_another_copy_is_committed_while_this_one_looks(saved: str, tmp_path: Path) -> None:
    """Its objects are there then, and its claim is not there any more."""
    to, has_copied = str(tmp_path / "to"), False
    attempt = await attempt_at(saved)

    async def look(verb: str, key: str) -> None:
        nonlocal has_copied
        if verb == "list" and key == f"{attempt}/" and not has_copied:
            has_copied = True
            await Snapshot(saved).copy_to(to)

    with faulty(lambda inner: FaultyStorage(inner, before=look)):
        async with asyncio.timeout(60):
            report = await Snapshot(saved).copy_to(faulty_url(to))
    assert has_copied
    assert report.was_there
    assert await objects(to) == await objects(saved)


async def test_no_snapshot_at_the_source(tmp_path: Path, memory: str) -> None:
    with pytest.raises(NotASnapshot, match="the copy's source"):
        await Snapshot(str(tmp_path / "none")).copy_to(memory)
    assert await objects(memory) == {}


# Faults ---------------------------------------------------------------------------------------


@contextmanager
def failing(**faults: Any) -> Iterator[list[FaultyStorage]]:
    made: list[FaultyStorage] = []

    def wrap(inner: Storage) -> Storage:
        made.append(FaultyStorage(inner, **faults))
        return made[-1]

    with faulty(wrap):
        yield made


@pytest.mark.few(2)
@pytest.mark.parametrize("when", ["before", "after", "halfway"])
@pytest.mark.parametrize("side", ["source", "destination"])
async def test_every_operation_fails_once(
    side: str, when: str, tmp_path: Path, no_leaks: Any
) -> None:
    source = str(tmp_path / "source")
    await Snapshot.take(source, state(1))
    no_leaks.restart()
    for k in itertools.count(1):
        to = str(tmp_path / f"to-{k}")
        ends = (faulty_url(source), to) if side == "source" else (source, faulty_url(to))
        error: StorageError | None = None
        with failing(fail_at=k, fail_when=when) as faults:
            try:
                await Snapshot(ends[0], options=_SMALL_CHUNKS).copy_to(ends[1])
            except StorageError as caught:
                error = caught
        assert_idle()
        if error is None and not faults[0].was_hit:
            # Or the k-th was one that fails by itself.
            if faults[0].num_operations < k:
                break
            continue
        if error is None:  # the commit's answer was lost, or cleaning up failed
            assert side == "destination"
            await assert_whole_copy_or_garbage(to)
        else:
            assert f"the copy's {side}" in str(error), error
            assert "a scripted fault" in str(error)
            assert await number_at(to) in (None, 1)
        # The next one goes on where this one ended, and leaves nothing.
        await Snapshot(source).copy_to(to)
        assert await number_at(to) == 1
        await collect(to)
        assert await leftovers(to) == []
    assert k > (5 if side == "source" else 15)


async def test_a_failed_clean_up_is_one_line(
    saved: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to = str(tmp_path / "a copy")
    verbs = ("write_at", "delete_folder")
    with failing(fail_at=1, fail_verbs=verbs, is_lasting=True), pytest.raises(StorageError):
        await Snapshot(saved).copy_to(faulty_url(to))
    (record,) = [each for each in caplog.records if "garbage" in each.getMessage()]
    left = f"garbage was left at {to}; `actorsnap rm --garbage '{to}'` deletes it"
    assert left in record.getMessage()
    assert "a scripted fault" in record.getMessage()
    assert record.exc_info is None


async def test_a_copy_that_runs_out_of_time_says_how_far_it_came(
    saved: str, tmp_path: Path
) -> None:
    options = Options(timeout_s=1.0)
    with (
        faulty(lambda inner: FaultyStorage(inner, latency_s={"complete": math.inf})),
        pytest.raises(StorageError, match=r"7\.. MiB of 7\.. MiB were copied; the next") as raised,
    ):
        await Snapshot(saved, options=options).copy_to(faulty_url(tmp_path / "to"))
    assert "does not answer" not in str(raised.value)


def test_naming_a_side_keeps_the_notes() -> None:
    error = StorageError(op="get", key="k", backend="b", detail="down")
    error.add_note("given up after 3 tries in 1.0 s")
    with pytest.raises(StorageError) as raised, copy_claim.naming_side("the source", "url"):
        raise error
    assert raised.value.__notes__ == ["given up after 3 tries in 1.0 s"]


async def assert_whole_copy_or_garbage(url: str) -> None:
    assert (await Snapshot(url).verify("full")).ok
    await collect(url)
    assert await leftovers(url) == []


class _Flipping(Wrapper):
    """Flips a bit of the ``at``-th bytes that pass, and of all behind them if ``is_lasting``."""

    def __init__(self, inner: Storage, *, at: int, is_lasting: bool, writes: bool) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self.at, self.is_lasting, self.writes = at, is_lasting, writes
        self.count = 0

    def flips(self) -> bool:
        self.count += 1
        return self.count >= self.at if self.is_lasting else self.count == self.at

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self.inner.read_into(key, offset, views)
        if not self.writes and self.flips():
            views[0][len(views[0]) // 2] ^= 4

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return _FlippingWriter(self, inner)


class _FlippingWriter(WriterWrapper):
    storage: _Flipping

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        assert crc32c is not None
        if self.storage.writes and self.storage.flips():
            data = bytearray(b"".join(views))
            data[len(data) // 2] ^= 4
            views = [memoryview(data)]
        await self.inner.write_at(offset, views, crc32c)


async def test_a_bit_flipped_while_reading_is_read_again(saved: str, memory: str) -> None:
    with faulty(lambda inner: _Flipping(inner, at=2, is_lasting=False, writes=False)):
        await Snapshot(faulty_url(saved), options=_SMALL_CHUNKS).copy_to(memory)
    assert await objects(memory) == await objects(saved)


async def test_a_bit_that_stays_flipped_ends_the_copy(saved: str, memory: str) -> None:
    with faulty(lambda inner: _Flipping(inner, at=2, is_lasting=True, writes=False)):
        with pytest.raises(
            ChecksumMismatch, match="the copy's source: .* differ from what"
        ) as caught:
            await Snapshot(faulty_url(saved), options=_SMALL_CHUNKS).copy_to(memory)
    assert caught.value.key.endswith(".safetensors")
    assert COMMIT_KEY not in await objects(memory)


async def test_a_bit_flipped_while_writing_never_arrives(saved: str, memory: str) -> None:
    """The destination compares what arrives with the checksum that is sent along."""
    with faulty(lambda inner: _Flipping(inner, at=2, is_lasting=False, writes=True)):
        with pytest.raises(StorageError, match="the copy's destination"):
            await Snapshot(saved, options=_SMALL_CHUNKS).copy_to(faulty_url(memory))
    assert COMMIT_KEY not in await objects(memory)
    await Snapshot(saved).copy_to(memory)
    assert await objects(memory) == await objects(saved)


@pytest.mark.parametrize("what", ["manifest", "data"])
async def test_a_damaged_source(what: str, tmp_path: Path, memory: str) -> None:
    source = tmp_path / "source"
    await Snapshot.take(str(source), state(1))
    path = files(source)[what]
    flip_bit(path, 8 * (path.stat().st_size // 2))
    with pytest.raises(ChecksumMismatch, match="the copy's source") as caught:
        await Snapshot(str(source)).copy_to(memory)
    assert path.name in caught.value.key
    path.unlink()
    with pytest.raises(ChecksumMismatch, match="is missing"):
        await Snapshot(str(source)).copy_to(memory)
    assert COMMIT_KEY not in await objects(memory)


# Interrupted ----------------------------------------------------------------------------------


async def interrupted(source: str, to: str) -> str:
    """A copy that ends when its rank manifest is about to be written; returns the attempt."""

    async def stop(verb: str, key: str) -> None:
        if verb == "writer" and "/manifest/" in key:
            raise StorageError(op="writer", key=key, backend=to, detail="interrupted")

    with faulty(lambda inner: FaultyStorage(inner, before=stop)):
        with pytest.raises(StorageError, match="interrupted"):
            await Snapshot(source).copy_to(faulty_url(to))
    return await attempt_at(source)


async def test_what_was_complete_is_not_sent_again(saved: str, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    await interrupted(saved, to)
    events: list[CopyEvent] = []
    with failing() as faults:
        report = await Snapshot(saved).copy_to(faulty_url(to), on_event=events.append)
    assert report.num_skipped == 2  # the data objects
    assert report.num_copied == 1
    assert report.copied_bytes < 10_000 < report.skipped_bytes
    assert faults[0].counts["writer"] == 1  # type: ignore[index]
    assert [event.kind.value for event in events].count("skipped") == 2
    assert events[-1].done_bytes == events[-1].total_bytes
    assert await objects(to) == await objects(saved)


async def test_what_is_not_whole_is_sent_again(saved: str, tmp_path: Path) -> None:
    """Of its size, and noted as complete: only the bytes tell."""
    to = tmp_path / "to"
    await interrupted(saved, str(to))
    (data,) = to.glob("*/data/model/*.safetensors")
    flip_bit(data, 8 * 5_000_000)
    report = await Snapshot(saved, options=_SMALL_CHUNKS).copy_to(str(to))
    assert (report.num_skipped, report.num_copied) == (1, 2)
    assert await objects(to) == await objects(saved)


async def test_what_nobody_noted_is_sent_again(saved: str, tmp_path: Path) -> None:
    """It may be in the machine's cache only, and read well until that fails."""
    to = tmp_path / "to"
    attempt = await interrupted(saved, str(to))
    (claim,) = to.glob(f"*/claim/copy/{attempt}")
    claim.write_bytes(encode_copy_claim([]))
    report = await Snapshot(saved).copy_to(str(to))
    assert (report.num_skipped, report.num_copied) == (0, 3)
    assert await objects(to) == await objects(saved)


async def test_leftovers_that_no_copy_claims_are_not_touched(saved: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    attempt = await interrupted(saved, str(to))
    (claim,) = to.glob(f"*/claim/copy/{attempt}")
    claim.unlink()
    with pytest.raises(StorageError, match="rm --garbage"):
        await Snapshot(saved).copy_to(str(to))
    await collect(str(to), force=True)
    await Snapshot(saved).copy_to(str(to))
    await assert_whole_copy(str(to))


async def test_a_cancelled_copy_leaves_garbage_only(saved: str, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    for at in itertools.count(1, 3):
        barrier = Barrier(at)
        with faulty(functools.partial(BarrierStorage, barrier=barrier)):
            task = asyncio.create_task(
                Snapshot(saved, options=_SMALL_CHUNKS).copy_to(faulty_url(to))
            )
            reached = asyncio.create_task(asyncio.to_thread(barrier.wait_reached))
            await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                barrier.give_up()
                await reached
                await task
                break
            task.cancel()
            barrier.release()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert_idle()
        assert await number_at_or_none(to)
        if COMMIT_KEY in await objects(to):
            break
    assert at > 10
    await collect(to)
    assert await objects(to) == await objects(saved)


async def number_at_or_none(url: str) -> bool:
    try:
        return (await Snapshot(url).verify("full")).ok
    except NotASnapshot as error:
        return error.found in ("absent", "unfinished")


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.shared()


@pytest.mark.parametrize("when", [slow("before"), "after"])
def test_killed_at_every_write(zygote: Zygote, tmp_path: Path, when: str) -> None:
    source = str(tmp_path / "source")
    sync.Snapshot.take(source, state(1))
    whole = asyncio.run(objects(source))
    skipped = []
    for at in itertools.count(1):
        to = str(tmp_path / f"to-{at}")
        sync.Snapshot.take(to, state(2))
        ending = zygote.call("copy_and_die_at_operation", source=source, to=to, at=at, when=when)
        if not ending.was_killed:
            ending.result()
            assert asyncio.run(objects(to)) == whole
            break
        assert asyncio.run(number_at(to)) in (1, 2)
        skipped.append(sync.Snapshot(source).copy_to(to, overwrite=True).num_skipped)
        assert asyncio.run(number_at(to)) == 1
        asyncio.run(collect(to))
        assert asyncio.run(objects(to)) == whole
    assert at > 8
    assert max(skipped) >= 1  # how many are noted by then is a matter of time


# Others ---------------------------------------------------------------------------------------


def claimed_by(to: Path, attempt: str, *, pid: int = _DEAD_PID, host: str = "ffffffff") -> Path:
    """Claims ``attempt`` in the name of a copy that began a minute before."""
    now = Attempt.parse(attempt)
    assert now is not None
    copier = str(Attempt(created_s=now.created_s - 60, host=host, pid=pid, nonce="00000000"))
    path = to / copy_claim_key(copier, attempt)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_copy_claim([]))
    return path


async def test_garbage_is_not_collected_while_a_copy_runs(saved: str, tmp_path: Path) -> None:
    """The attempt's save has ended: nothing but the claim protects it."""
    to = tmp_path / "to"
    collected: list[str] = []

    async def look(verb: str, key: str) -> None:
        if verb == "complete":
            collected.extend(await collect(str(to)))
            await Snapshot.take(str(to), state(3), overwrite=True)

    with faulty(lambda inner: FaultyStorage(inner, before=look)):
        await Snapshot(saved).copy_to(faulty_url(to), overwrite=True)
    assert collected == []
    assert await objects(to) == await objects(saved)


async def test_a_dead_copys_leftovers_are_garbage(saved: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    attempt = await interrupted(saved, str(to))
    deleted = await collect(str(to))
    assert {key.partition("/")[0] for key in deleted} > {attempt}
    assert await objects(to) == {}
    # Of a copy on another machine it cannot be told whether it lives.
    await interrupted(saved, str(to))
    claimed_by(to, attempt)
    await collect(str(to))
    assert any(key.startswith(attempt) for key in await objects(to))


async def test_a_copy_waits_for_a_collection(saved: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    await interrupted(saved, str(to))
    collector = Host.get().resources.attempts.new()
    flag = to / collection_key(str(collector))
    flag.parent.mkdir(parents=True)
    flag.write_bytes(b"{}")
    copy = asyncio.create_task(Snapshot(saved).copy_to(str(to)))
    await asyncio.wait([copy], timeout=1.2)
    assert not copy.done()
    assert not (to / COMMIT_KEY).exists()
    Host.get().resources.attempts.end(collector)
    await copy
    assert await number_at_or_none(str(to))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["memory", "fs"])
async def test_two_copies_at_once(kind: str, saved: str, memory: str, tmp_path: Path) -> None:
    to = memory if kind == "memory" else str(tmp_path / "to")

    async def try_copy() -> object:
        try:
            return await Snapshot(saved, options=_SMALL_CHUNKS).copy_to(to)
        except ActorSnapError as error:
            return error

    ended = await asyncio.gather(*[try_copy() for _ in range(3)])
    copied = [each for each in ended if isinstance(each, copy.CopyReport)]
    assert len([report for report in copied if not report.was_there]) == 1
    for each in ended:
        if isinstance(each, Exception):
            assert "another copy of this snapshot to there is under way" in str(each)
    await assert_whole_copy(to)
    assert await objects(to) == await objects(saved)


async def test_two_snapshots_to_one_place(saved: str, tmp_path: Path) -> None:
    other, to = str(tmp_path / "other"), str(tmp_path / "to")
    await Snapshot.take(other, state(2))
    barrier = Barrier(1, verbs=frozenset({"put_if_absent"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        slow = asyncio.create_task(Snapshot(saved).copy_to(faulty_url(to)))
        assert await asyncio.to_thread(barrier.wait_reached)
        await Snapshot(other).copy_to(to)
        barrier.release()
        with pytest.raises(ObjectExists, match="the copy's destination"):
            await slow
    await assert_whole(to, 2)


async def test_a_copy_of_another_machine_that_stood_still_is_resumed(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "to"
    attempt = await interrupted(saved, str(to))
    claim = claimed_by(to, attempt)
    with pytest.raises(StorageError, match="another copy of this snapshot"):
        await Snapshot(saved).copy_to(str(to))
    monkeypatch.setattr(copy_claim, "_STALE_S", -1.0)
    monkeypatch.setattr(copy_claim.CopyClaim, "check_renewed", lambda self: None)
    report = await Snapshot(saved).copy_to(str(to))
    assert report.num_skipped == 2
    assert not claim.exists()
    assert await objects(to) == await objects(saved)


async def test_a_copy_that_cannot_renew_its_claim_gives_up(
    saved: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_claim, "_STALE_S", -1.0)
    with pytest.raises(StorageError, match="stood still"):
        await Snapshot(saved).copy_to(memory)
    assert COMMIT_KEY not in await objects(memory)


def files_of(to: Path) -> list[Path]:
    return list(to.glob("*/data/model/*.safetensors"))


async def test_an_object_deleted_by_force_is_noticed(saved: str, tmp_path: Path) -> None:
    to = tmp_path / "to"

    async def look(verb: str, key: str) -> None:
        if verb == "writer" and "/manifest/" in key:
            (data,) = await asyncio.to_thread(files_of, to)
            await asyncio.to_thread(data.unlink)

    with faulty(lambda inner: FaultyStorage(inner, before=look)):
        with pytest.raises(StorageError, match="was deleted or changed") as caught:
            await Snapshot(saved).copy_to(faulty_url(to))
    assert "/data/model/" in caught.value.key
    assert not (to / COMMIT_KEY).exists()


async def test_a_replaced_source_is_copied_anew(tmp_path: Path, memory: str) -> None:
    source = str(tmp_path / "source")
    await Snapshot.take(source, state(1))
    has_replaced = False

    async def look(verb: str, key: str) -> None:
        nonlocal has_replaced
        if verb == "read_into" and not has_replaced:
            has_replaced = True
            await Snapshot.take(source, state(2), overwrite=True)

    with faulty(lambda inner: FaultyStorage(inner, before=look)):
        await Snapshot(faulty_url(source)).copy_to(memory)
    await assert_whole(memory, 2, is_clean=False)


async def test_a_callback_that_fails_ends_the_copy(saved: str, memory: str) -> None:
    def fail(event: CopyEvent) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await Snapshot(saved).copy_to(memory, on_event=fail)
    assert COMMIT_KEY not in await objects(memory)
    assert_idle()


async def test_a_callback_that_runs_out_ends_the_copy(saved: str, memory: str) -> None:
    """A future takes no ``StopIteration``: nobody would hear of it."""
    steps: Iterator[None] = iter(())
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        async with asyncio.timeout(30):
            await Snapshot(saved).copy_to(memory, on_event=lambda _: next(steps))
    assert isinstance(caught.value.__cause__, StopIteration)
    assert COMMIT_KEY not in await objects(memory)
    assert_idle()


async def test_a_callback_that_raises_what_cannot_be_told(saved: Path, memory: str) -> None:
    def fail(_: CopyEvent) -> None:
        raise Speechless

    with pytest.raises(RuntimeError, match="Speechless: <its __str__ raises") as caught:
        await Snapshot(saved, options=Options(timeout_s=20.0)).copy_to(memory, on_event=fail)
    assert isinstance(caught.value.__cause__, Speechless)
    assert_idle()
