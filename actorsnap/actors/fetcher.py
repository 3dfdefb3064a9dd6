"""Reads a snapshot: commit object, rank manifests, and the bytes of leaves.

``SnapshotReader`` reads the index; ``FetcherPool`` reads bytes and verifies checksums in the
caller's own memory. ``planning.restore`` plans the reads.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import anyio
import anyio.lowlevel

from actorsnap.actors.budget import Budget, Purpose
from actorsnap.actors.trace import NULL_RECORDER, Recorder, Row, Wait, Work
from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    ObjectNotFound,
    SnapshotReplaced,
    StorageError,
)
from actorsnap.format.checksum import MAX_BLOCK_BYTES, block_checksums
from actorsnap.format.compression import FRAME_BYTES, Unpacker, check_readable
from actorsnap.format.foreign import attempts_in, recognize, recognize_file
from actorsnap.format.layout import manifest_key, manifest_prefix
from actorsnap.format.manifest import (
    COMMIT_KEY,
    COMMIT_KEYS,
    BytesEntry,
    Commit,
    ManifestRecord,
    RankManifest,
    Stored,
    TensorEntry,
    decode_commit,
    decode_rank_manifest,
    world_size_of,
)
from actorsnap.log import Log
from actorsnap.planning.index import Index, ShardedEntry
from actorsnap.planning.restore import ChunkMap, Extent, Range, Read, chunk_maps, plan_reads
from actorsnap.state.sources import ByteSink
from actorsnap.storage.base import RunBlocking, Storage
from actorsnap.storage.many import for_each

__all__ = [
    "Commits",
    "FetcherPool",
    "RangeRequest",
    "SnapshotReader",
    "find_commit",
    "is_complete",
    "read_commits",
    "read_intact",
]

logger = Log(__name__)

T = TypeVar("T")

_MAX_LISTED = 10_000
"""Maximum number of keys listed to explain why there is no snapshot."""

_MAX_VIEWS = 256

_MAX_NAMED = 4

_TURN_BYTES = 64 << 20
"""Bytes that one thread reads before it yields to others."""


async def find_commit(storage: Storage, *, folder: str = "") -> Commit | None:
    """Returns the commit object; None if there is none.

    Reads its older name only if the newer one is missing.

    Args:
        folder: Folder below the storage's root.

    Raises:
        FormatError: The commit object is damaged, or of a newer or another format.
        StorageError: Reading failed.
    """
    # The first name again: an older snapshot may have been replaced between the two reads.
    for key in (*COMMIT_KEYS, COMMIT_KEY):
        commit = await _read_commit(storage, key, folder)
        if commit is not None:
            return commit
    return None


@dataclass(frozen=True, slots=True)
class Commits:
    """The commit objects under both names: each a commit, None, or the reason why it is unusable.

    Attributes:
        newer: ``COMMIT_KEY``.
        older: ``OLDER_COMMIT_KEY``.
    """

    newer: Commit | FormatError | None
    older: Commit | FormatError | None

    def counting(self) -> Commit | None:
        """Returns the valid one: ``newer`` if it exists, else ``older``.

        Raises:
            FormatError: It is unusable.
        """
        found = self.older if self.newer is None else self.newer
        if isinstance(found, FormatError):
            raise found
        return found


async def read_commits(storage: Storage) -> Commits:
    """Reads both names of the commit object concurrently.

    May miss an older snapshot that is being replaced.

    Raises:
        StorageError: Reading failed.
    """
    found: dict[str, Commit | Exception | None] = {}

    async def read(key: str) -> None:
        try:
            found[key] = await _read_commit(storage, key)
        except Exception as error:
            found[key] = error

    await for_each(COMMIT_KEYS, read, at_once=len(COMMIT_KEYS))
    commits: list[Commit | FormatError | None] = []
    for key in COMMIT_KEYS:
        commit = found[key]
        if isinstance(commit, Exception) and not isinstance(commit, FormatError):
            raise commit
        commits.append(commit)
    return Commits(*commits)


async def _read_commit(storage: Storage, key: str, folder: str = "") -> Commit | None:
    async def read() -> Commit:
        return decode_commit(await storage.get(f"{folder}/{key}" if folder else key), key)

    try:
        return await read_intact(storage, read)
    except ObjectNotFound:
        return None


async def is_complete(storage: Storage, run_blocking: RunBlocking, attempt: str) -> bool:
    """Returns whether every rank of an attempt has stored its manifest.

    Such an attempt lacks only a commit object. If its manifests do not record the world size, the
    manifest of rank 0 suffices.

    Raises:
        StorageError: Reading or listing failed.
    """
    try:
        data = await storage.get(manifest_key(attempt, 0))
    except ObjectNotFound:
        return False
    world_size = await run_blocking(world_size_of, data)
    if world_size <= 1:
        return True
    keys = {info.key async for info in storage.list(manifest_prefix(attempt))}
    return all(manifest_key(attempt, rank) in keys for rank in range(world_size))


async def read_intact(storage: Storage, read: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of ``read``. Over a network, retries once: a bit may flip in transit.

    Raises:
        ChecksumMismatch: The retry failed too.
    """
    if not storage.capabilities.has_blocking_io:
        try:
            return await read()
        except ChecksumMismatch as error:
            logger.warning("%s; reading it again", error)
    return await read()


class SnapshotReader:
    """Reads the index of a committed snapshot, which may be replaced in the meantime.

    Args:
        storage: Open; owned by the caller.
        attempt: The attempt, if the commit object was read before.
        read_head: Returns the first bytes of a file at the storage's own URL, or None.
    """

    def __init__(
        self,
        storage: Storage,
        run_blocking: RunBlocking,
        attempt: str | None = None,
        read_head: Callable[[], Awaitable[bytes | None]] | None = None,
    ) -> None:
        self.storage = storage
        self._run_blocking = run_blocking
        self._attempt = attempt
        self._read_head = read_head

    async def commit(self) -> Commit:
        """Reads the commit object.

        Raises:
            NotASnapshot: There is none; the error describes the content found instead.
            FormatError: It is damaged, or of a newer format.
            StorageError: Reading failed.
        """
        try:
            commit = await find_commit(self.storage)
        except StorageError as error:
            if what := await self.explain(error):
                raise what from error
            raise
        if commit is None:
            raise await self._explain_absence()
        self._attempt = commit.attempt
        return commit

    async def explain(self, error: Exception) -> NotASnapshot | None:
        """Returns the error for a file in place of the snapshot's folder; None for other errors."""
        if isinstance(error, StorageError) and isinstance(error.__cause__, NotADirectoryError):
            return await self._explain_file()
        return None

    async def check_replaced(self) -> None:
        """Reads the commit object again after an inconsistency.

        Raises:
            SnapshotReplaced: It was replaced or deleted; the data read is not damaged.
            StorageError: Reading failed.
        """
        with suppress(FormatError):  # a damaged one proves nothing
            commit = await find_commit(self.storage)
            if commit is None or commit.attempt != self._attempt:
                raise SnapshotReplaced(url=self.storage.url, is_deleted=commit is None)

    async def manifest(self, record: ManifestRecord) -> RankManifest:
        """Reads the rank manifest named by ``record``.

        Raises:
            FormatError: It is missing or damaged.
            StorageError: Reading failed.
        """

        async def read() -> RankManifest:
            data = await self.storage.get(record.key)
            return await self._run_blocking(decode_rank_manifest, data, record, record.key)

        try:
            return await read_intact(self.storage, read)
        except ObjectNotFound as error:
            raise ChecksumMismatch(key=record.key, detail="the rank manifest is missing") from error

    async def _explain_absence(self) -> NotASnapshot:
        keys: list[str] = []
        async for info in self.storage.list(""):
            keys.append(info.key)
            if len(keys) >= _MAX_LISTED:
                break
        file = None if keys else await self._explain_file()
        if file is not None:
            return file
        url = self.storage.url
        complete = [
            name
            for name in attempts_in(keys)
            if await is_complete(self.storage, self._run_blocking, name)
        ]
        found, detail = recognize(keys, url=url, complete=complete)
        return NotASnapshot(key=url, detail=detail, found=found)

    async def _explain_file(self) -> NotASnapshot | None:
        """Describes the file at the URL; None if there is none."""
        head = None if self._read_head is None else await self._read_head()
        if head is None:
            return None
        found, detail = recognize_file(head, self.storage.url)
        return NotASnapshot(key=self.storage.url, detail=detail, found=found)


class RangeRequest:
    """Stored bytes of one leaf, and their destination.

    Args:
        index: The index that ``stored.object`` refers to.
    """

    __slots__ = ("index", "key", "sink", "stored")

    def __init__(self, index: Index | RankManifest, stored: Stored, sink: ByteSink) -> None:
        self.index = index
        self.key = index.objects[stored.object].key
        self.stored = stored
        self.sink = sink

    def leaf(self) -> tuple[str, Stored]:
        """Returns the path and the stored range of the leaf or shard. For messages only."""
        stored = self.stored
        return next(
            (path, data)
            for path, data in _all_stored(self.index)
            if data.object == stored.object and data.start <= stored.start < data.stop
        )


def _all_stored(index: Index | RankManifest) -> Iterator[tuple[str, Stored]]:
    for entry in index.entries:
        if isinstance(entry, TensorEntry | BytesEntry):
            yield entry.path, entry.data
        elif isinstance(entry, ShardedEntry):
            for shard in entry.shards:
                yield entry.path, shard.data


class FetcherPool:
    """Reads many leaves concurrently.

    Args:
        verify: Compare checksums.
        chunk_bytes, max_gap_bytes: See ``planning.restore.plan_reads``.
        num_fetchers: Reads in flight.
        budget: Lends memory for leaves that cannot be read in place.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        run_blocking: RunBlocking,
        budget: Budget,
        verify: bool,
        chunk_bytes: int,
        max_gap_bytes: int,
        num_fetchers: int,
        recorder: Recorder = NULL_RECORDER,
    ) -> None:
        self._storage = storage
        self._run_blocking = run_blocking
        self._budget = budget
        self._verify = verify
        self._chunk_bytes = chunk_bytes
        self._max_gap_bytes = max_gap_bytes
        self._num_fetchers = num_fetchers
        self._recorder = recorder

    async def fetch(self, requests: Sequence[RangeRequest]) -> None:
        """Fills every sink.

        Raises:
            ChecksumMismatch: Bytes are missing, or differ from those written; names the object and
                the leaf.
            UnsupportedFormat: They are compressed, and the library is missing; nothing was read.
            StorageError: Reading failed or was incomplete.
        Cancellation: Reads in flight on threads end first. Sinks hold any mixture.
        """
        in_place, others, chunks = await self._run_blocking(self._plan, requests)
        has_ended = False
        read_bytes: list[int] = []  # per read; appended to by threads

        def drain(row: Row) -> bool:
            """Reads on this thread for one turn; returns whether more may be left."""
            nbytes = 0
            row.note(Wait.THREAD)
            for read in ready:
                with _missing_is_damage(read):
                    read_bytes.append(self._read_in_place(requests, read, row))
                nbytes += read.stop - read.start
                if has_ended or nbytes >= _TURN_BYTES:
                    return not has_ended
            return False

        async def work() -> None:
            with self._recorder.row("fetcher") as row:
                while await self._run_blocking(drain, row):
                    pass
                for read in rest:
                    with _missing_is_damage(read):
                        await read_intact(
                            self._storage,
                            functools.partial(
                                self._fetch_one, requests, read, chunks.get(read.key), row
                            ),
                        )
                    read_bytes.append(read.stop - read.start)

        async def tell_threads() -> None:
            """Passes a cancellation on to threads, which only see ``has_ended``."""
            nonlocal has_ended
            try:
                await anyio.sleep_forever()
            finally:
                has_ended = True

        # Threads may share iterators of lists.
        ready, rest = iter(in_place), iter(others)
        async with anyio.create_task_group() as outer:
            outer.start_soon(tell_threads)
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self._num_fetchers, len(in_place) + len(others))):
                    tasks.start_soon(work)
            outer.cancel_scope.cancel()
        planned_bytes = sum(read.stop - read.start for read in (*in_place, *others))
        num_reads = len(in_place) + len(others)
        if len(read_bytes) != num_reads or sum(read_bytes) != planned_bytes:
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise StorageError(
                op="read_into",
                key="",
                backend=self._storage.url,
                detail=f"{len(read_bytes)} of {num_reads} reads returned {sum(read_bytes)} of "
                f"{planned_bytes} bytes, without an error",
            )

    def _plan(
        self, requests: Sequence[RangeRequest]
    ) -> tuple[list[Read], list[Read], dict[str, ChunkMap]]:
        """Returns reads that need only a thread, the other reads, and the compressed objects."""
        reads = plan_reads(
            [Range(r.key, r.stored.start, r.stored.stop, r.sink.is_addressable) for r in requests],
            chunk_bytes=self._chunk_bytes,
            max_gap_bytes=self._max_gap_bytes,
        )
        # Includes the objects of ranks whose bytes are gaps.
        keys = {request.key for request in requests}
        indexes = {id(request.index): request.index for request in requests}.values()
        chunks = chunk_maps(r for index in indexes for r in index.objects if r.key in keys)
        if chunks:
            check_readable(min(chunks))
        if not self._storage.capabilities.has_blocking_io:
            return [], reads, chunks
        in_place: list[Read] = []
        others: list[Read] = []
        for read in reads:
            is_alone = read.key not in chunks and _is_addressable(requests, read)
            (in_place if is_alone else others).append(read)
        return in_place, others, chunks

    async def _fetch_one(
        self, requests: Sequence[RangeRequest], read: Read, chunks: ChunkMap | None, row: Row
    ) -> None:
        if chunks is not None:
            await self._fetch_compressed(requests, read, chunks, row)
            return
        place = read.key, read.start, read.stop - read.start
        if _is_addressable(requests, read):
            targets = await self._run_blocking(lambda: list(_targets(requests, read)))
            row.note(Wait.THREAD)
            await self._storage.read_into(read.key, read.start, [t.view for t in targets])
            row.note(Work.READ, *place)
            if self._verify:
                verify = row.around(_verify_all, Work.VERIFY, *place)
                await self._run_blocking(verify, targets)
            return
        with await self._budget.lease(read.stop - read.start, Purpose.READING) as lease:
            row.note(Wait.MEMORY)
            if self._storage.capabilities.has_blocking_io:
                await self._run_blocking(self._read_through, requests, read, lease.view, row)
            else:
                await self._storage.read_into(read.key, read.start, [lease.view])
                row.note(Work.READ, *place)
                await self._run_blocking(self._deliver, requests, read, lease.view, row)

    async def _fetch_compressed(
        self, requests: Sequence[RangeRequest], read: Read, chunks: ChunkMap, row: Row
    ) -> None:
        nbytes = read.stop - read.start
        if _is_addressable(requests, read):
            targets = await self._run_blocking(lambda: list(_targets(requests, read)))
            await self._fill(requests, read, chunks, [target.view for target in targets], row)
            if self._verify:
                await self._run_blocking(_verify_all, targets)
                row.note(Work.VERIFY, read.key, read.start, nbytes)
            return
        with await self._budget.lease(nbytes, Purpose.READING) as lease:
            row.note(Wait.MEMORY)
            await self._fill(requests, read, chunks, [lease.view], row)
            await self._run_blocking(self._deliver, requests, read, lease.view, row)

    async def _fill(
        self,
        requests: Sequence[RangeRequest],
        read: Read,
        chunks: ChunkMap,
        views: Sequence[memoryview],
        row: Row,
    ) -> None:
        """Fills ``views`` with the bytes of a read from a compressed object."""
        extents = list(chunks.extents(read.start, read.stop))
        scratch_bytes = max([1, *[extent.size for extent in extents if extent.frames]])
        decompress = functools.partial(_decompress, requests, read)
        with await self._budget.lease(scratch_bytes, Purpose.DECOMPRESSING) as lease:
            row.note(Wait.MEMORY)
            for extent in extents:
                into = _Window(views, read.start).within(extent.start, extent.stop)
                stored = [lease.view[: extent.size]] if extent.frames else into.views
                if self._storage.capabilities.has_blocking_io:
                    await self._run_blocking(
                        self._read_extent, decompress, extent, stored, into, row
                    )
                    continue
                await self._storage.read_into(extent.key, extent.offset, stored)
                row.note(Work.READ, extent.key, extent.offset, extent.size)
                if extent.frames:
                    await self._run_blocking(decompress, extent, stored[0], into, row)

    def _read_extent(
        self,
        decompress: Callable[[Extent, memoryview, _Window, Row], None],
        extent: Extent,
        stored: Sequence[memoryview],
        into: _Window,
        row: Row,
    ) -> None:
        row.note(Wait.THREAD)
        self._storage.read_into_blocking(extent.key, extent.offset, [stored])
        row.note(Work.READ, extent.key, extent.offset, extent.size)
        if extent.frames:
            decompress(extent, stored[0], into, row)

    def _read_in_place(self, requests: Sequence[RangeRequest], read: Read, row: Row) -> int:
        """Returns the number of bytes filled and verified."""
        filled: list[int] = []
        batches = self._batches(requests, read, row, filled)
        self._storage.read_into_blocking(read.key, read.start, batches)
        return sum(filled)

    def _batches(
        self, requests: Sequence[RangeRequest], read: Read, row: Row, filled: list[int]
    ) -> Iterator[Sequence[memoryview]]:
        """Yields views to fill, up to 1 MiB at a time; verifies them while in the CPU's cache."""
        at, nbytes = read.start, 0
        batch: list[_Target] = []
        for target in _targets(requests, read):
            if nbytes + len(target.view) > MAX_BLOCK_BYTES or len(batch) >= _MAX_VIEWS:
                yield [target.view for target in batch]
                self._end_batch(batch, read.key, at, nbytes, row)
                filled.append(nbytes)
                at, nbytes, batch = at + nbytes, 0, []
            batch.append(target)
            nbytes += len(target.view)
        yield [target.view for target in batch]
        self._end_batch(batch, read.key, at, nbytes, row)
        filled.append(nbytes)

    def _end_batch(
        self, batch: Sequence[_Target], key: str, at: int, nbytes: int, row: Row
    ) -> None:
        """Verifies the batch just read."""
        row.note(Work.READ, key, at, nbytes)
        if self._verify:
            _verify_all(batch)
            row.note(Work.VERIFY, key, at, nbytes)

    def _read_through(
        self, requests: Sequence[RangeRequest], read: Read, memory: memoryview, row: Row
    ) -> None:
        row.note(Wait.THREAD)
        self._storage.read_into_blocking(read.key, read.start, [[memory]])
        row.note(Work.READ, read.key, read.start, len(memory))
        self._deliver(requests, read, memory, row)

    def _deliver(
        self, requests: Sequence[RangeRequest], read: Read, memory: memoryview, row: Row
    ) -> None:
        at = 0
        for gap, part in zip(read.gaps, read.parts, strict=True):
            at += gap
            view = memory[at : at + part.stop - part.start]
            at += len(view)
            request = requests[part.request]
            if self._verify:
                _verify(request, part.start, view)
            if request.sink.is_addressable:
                request.sink.view(part.start, part.stop)[:] = view
            else:
                request.sink.copy_from(part.start, view)
        row.note(Work.PLACE, read.key, read.start, len(memory))


@contextmanager
def _missing_is_damage(read: Read) -> Iterator[None]:
    try:
        yield
    except ObjectNotFound as error:
        raise ChecksumMismatch(key=error.key or read.key, detail="the object is missing") from error


def _is_addressable(requests: Sequence[RangeRequest], read: Read) -> bool:
    return all(requests[part.request].sink.is_addressable for part in read.parts)


class _Window:
    """Views of adjacent bytes of an object, beginning at ``start``."""

    def __init__(self, views: Sequence[memoryview], start: int) -> None:
        self.views = views
        self.start = start
        self.stop = start + sum(map(len, views))
        self._starts = list(accumulate(map(len, views), initial=start))

    def within(self, start: int, stop: int) -> _Window:
        """Returns the part of the window within ``[start, stop)``."""
        start, stop = max(start, self.start), min(stop, self.stop)
        index = max(bisect_right(self._starts, start) - 1, 0)
        found: list[memoryview] = []
        at = start
        while at < stop:
            low = self._starts[index]
            found.append(self.views[index][at - low : stop - low])
            at += len(found[-1])
            index += 1
        return _Window(found, start)


def _decompress(
    requests: Sequence[RangeRequest],
    read: Read,
    extent: Extent,
    stored: memoryview,
    into: _Window,
    row: Row,
) -> None:
    """Fills ``into`` from the frames of an extent.

    Raises:
        ChecksumMismatch: A frame is damaged; names the leaves concerned.
    """
    row.note(Wait.THREAD)
    unpacker = Unpacker(extent.key)
    scratch = memoryview(b"")
    at, position = extent.start, 0
    for size in extent.frames:
        frame = stored[position : position + size]
        stop = min(at + FRAME_BYTES, extent.stop)
        window = into.within(at, stop)
        is_alone = len(window.views) == 1 and len(window.views[0]) == stop - at
        if not is_alone:
            scratch = scratch or memoryview(bytearray(FRAME_BYTES))
        try:
            unpacker.unpack(frame, window.views[0] if is_alone else scratch[: stop - at])
        except ChecksumMismatch as error:
            wanted = _wanted_of(requests, read, window.start, window.stop)
            raise ChecksumMismatch(
                key=error.key, detail=f"{error.detail}; it contains bytes of {wanted}"
            ) from error.__cause__
        if not is_alone:
            low = window.start - at
            for view in window.views:
                view[:] = scratch[low : low + len(view)]
                low += len(view)
        at, position = stop, position + size
    row.note(Work.DECOMPRESS, extent.key, extent.start, extent.stop - extent.start)


def _wanted_of(requests: Sequence[RangeRequest], read: Read, start: int, stop: int) -> str:
    """Returns the leaves of a read that have bytes in ``[start, stop)`` of the object."""
    paths: dict[str, None] = {}
    at = read.start
    for gap, part in zip(read.gaps, read.parts, strict=True):
        low = at + gap
        at = low + part.stop - part.start
        request = requests[part.request]
        # Verification also requests headers, which have no checksums of their own.
        if low < stop and start < at and request.stored.crc32c:
            paths[request.leaf()[0]] = None
            if len(paths) > _MAX_NAMED:
                break
    named = [repr(path) for path in paths][:_MAX_NAMED] or ["no leaf"]
    return ", ".join(named) + (" and more" if len(paths) > _MAX_NAMED else "")


class _Target(NamedTuple):
    """Memory to fill: part of a leaf, or a gap (``request`` is None)."""

    request: RangeRequest | None
    start: int
    view: memoryview


def _targets(requests: Sequence[RangeRequest], read: Read) -> Iterator[_Target]:
    """Yields the targets of a read in order; large parts are split into blocks of maximum size."""
    for gap, part in zip(read.gaps, read.parts, strict=True):
        if gap:
            yield _Target(None, 0, memoryview(bytearray(gap)))
        request = requests[part.request]
        view = request.sink.view(part.start, part.stop)
        if len(view) <= MAX_BLOCK_BYTES:
            yield _Target(request, part.start, view)
            continue
        for low in range(0, len(view), MAX_BLOCK_BYTES):
            yield _Target(request, part.start + low, view[low : low + MAX_BLOCK_BYTES])


def _verify_all(targets: Sequence[_Target]) -> None:
    for target in targets:
        if target.request is not None:
            _verify(target.request, target.start, target.view)


def _verify(request: RangeRequest, start: int, view: memoryview) -> None:
    """Verifies a leaf's bytes from ``start`` (the beginning of a block) against its checksums."""
    stored = request.stored
    # A single block covers the whole view. Most leaves have one block where there are many leaves.
    block_bytes = stored.block_bytes if len(stored.crc32c) > 1 else MAX_BLOCK_BYTES
    number = start // block_bytes
    found = block_checksums(view, block_bytes)
    expected = stored.crc32c[number : number + len(found)]
    if found == expected:
        return
    number += [a == b for a, b in zip(found, expected, strict=True)].index(False)
    path, leaf = request.leaf()
    at = stored.start + number * block_bytes
    raise ChecksumMismatch(
        key=request.key,
        detail=f"block {(at - leaf.start) // leaf.block_bytes} of {path!r} "
        f"(bytes from {at}) differs from what was saved",
    )
