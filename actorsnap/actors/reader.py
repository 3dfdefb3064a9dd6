"""Reads what lies in storage: commit object, rank manifests, and leaves' bytes.

``SnapshotReader`` is the index side; ``FetcherPool`` moves bytes. Checksums are verified on
the very memory that the caller gets. What to read is planned by ``planning.restore``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

import anyio

from actorsnap.actors.budget import Budget
from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    ObjectNotFound,
    SnapshotReplaced,
)
from actorsnap.format.checksum import crc32c
from actorsnap.format.foreign import recognize
from actorsnap.format.manifest import (
    BLOCK_BYTES,
    COMMIT_KEY,
    BytesEntry,
    Commit,
    ManifestRecord,
    RankManifest,
    Stored,
    TensorEntry,
    decode_commit,
    decode_rank_manifest,
)
from actorsnap.planning.index import Index, ShardedEntry
from actorsnap.planning.restore import Range, Read, plan_reads
from actorsnap.state.tensors import ByteSink
from actorsnap.storage.base import RunBlocking, Storage

__all__ = ["FetcherPool", "Request", "SnapshotReader", "find_commit"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_LISTED = 10_000
"""So many keys are looked at to say what is there instead of a snapshot."""

_MAX_VIEWS = 256

_TURN_BYTES = 64 << 20
"""So much a thread reads before others have their turn on it."""


async def find_commit(storage: Storage) -> Commit | None:
    """The commit object; None where there is none.

    Raises:
        FormatError: it is damaged, or of a newer or another format.
        StorageError: reading failed.
    """

    async def read() -> Commit:
        return decode_commit(await storage.get(COMMIT_KEY))

    try:
        return await _read_intact(storage, read)
    except ObjectNotFound:
        return None


async def _read_intact(storage: Storage, read: Callable[[], Awaitable[T]]) -> T:
    """What ``read`` returns; over a network it has two tries, for a bit may flip on the way.

    Raises:
        ChecksumMismatch: the second time, too: so they are stored, or too many flip.
    """
    if not storage.capabilities.has_blocking_io:
        try:
            return await read()
        except ChecksumMismatch as error:
            logger.warning("%s; reading it again", error)
    return await read()


class SnapshotReader:
    """Reads the index of a committed snapshot, which others may replace meanwhile.

    Args:
        storage: Open; stays the caller's.
        attempt: Whose objects are read, where the commit object was read before.
    """

    def __init__(
        self, storage: Storage, run_blocking: RunBlocking, attempt: str | None = None
    ) -> None:
        self.storage = storage
        self._run_blocking = run_blocking
        self._attempt = attempt

    async def commit(self) -> Commit:
        """The commit object.

        Raises:
            NotASnapshot: there is none; says what is there instead.
            FormatError: it is damaged, or of a newer format.
            StorageError: reading failed.
        """
        commit = await find_commit(self.storage)
        if commit is None:
            raise await self._explain_absence()
        self._attempt = commit.attempt
        return commit

    async def check_replaced(self) -> None:
        """Looks at the commit object again, when something is not as it says.

        Raises:
            SnapshotReplaced: it is another one now, or gone: what was read is not damaged.
            StorageError: reading failed.
        """
        with suppress(FormatError):  # what is damaged now says nothing
            commit = await find_commit(self.storage)
            if commit is None or commit.attempt != self._attempt:
                raise SnapshotReplaced(url=self.storage.url, is_deleted=commit is None)

    async def manifest(self, record: ManifestRecord) -> RankManifest:
        """The rank manifest that the commit object names by ``record``.

        Raises:
            FormatError: it is missing or damaged.
            StorageError: reading failed.
        """

        async def read() -> RankManifest:
            data = await self.storage.get(record.key)
            return await self._run_blocking(decode_rank_manifest, data, record, record.key)

        try:
            return await _read_intact(self.storage, read)
        except ObjectNotFound as error:
            raise ChecksumMismatch(key=record.key, detail="the rank manifest is missing") from error

    async def _explain_absence(self) -> NotASnapshot:
        keys: list[str] = []
        async for info in self.storage.list(""):
            keys.append(info.key)
            if len(keys) >= _MAX_LISTED:
                break
        found, detail = recognize(keys)
        return NotASnapshot(key=self.storage.url, detail=detail, found=found)


class Request:
    """Stored bytes of one leaf, and where they go.

    Args:
        index: What ``stored.object`` counts in.
    """

    __slots__ = ("_index", "key", "sink", "stored")

    def __init__(self, index: Index | RankManifest, stored: Stored, sink: ByteSink) -> None:
        self._index = index
        self.key = index.objects[stored.object].key
        self.stored = stored
        self.sink = sink

    def leaf(self) -> tuple[str, int]:
        """The path of the leaf that has the bytes, and where it, or its shard, begins in the
        object; looked up for messages only."""
        stored = self.stored
        return next(
            (path, data.start)
            for path, data in _all_stored(self._index)
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
    """Reads many leaves at once.

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
    ) -> None:
        self._storage = storage
        self._run_blocking = run_blocking
        self._budget = budget
        self._verify = verify
        self._chunk_bytes = chunk_bytes
        self._max_gap_bytes = max_gap_bytes
        self._num_fetchers = num_fetchers

    async def fetch(self, requests: Sequence[Request]) -> None:
        """Fills every sink.

        Raises:
            ChecksumMismatch: bytes are missing, or differ from what was written; names the
                object and the leaf.
            StorageError: reading failed.
        Cancellation: reads in flight on threads end first. Sinks hold any mixture.
        """
        in_place, others = await self._run_blocking(self._plan, requests)
        has_ended = False

        def drain() -> bool:
            """Reads on this thread for a while; True if there may be more."""
            nbytes = 0
            for read in ready:
                with _missing_is_damage(read):
                    self._read_in_place(requests, read)
                nbytes += read.stop - read.start
                if has_ended or nbytes >= _TURN_BYTES:
                    return not has_ended
            return False

        async def work() -> None:
            while await self._run_blocking(drain):
                pass
            for read in rest:
                with _missing_is_damage(read):
                    await _read_intact(
                        self._storage, functools.partial(self._fetch_one, requests, read)
                    )

        async def tell_threads() -> None:
            """A cancellation reaches threads by ``has_ended`` only."""
            nonlocal has_ended
            try:
                await anyio.sleep_forever()
            finally:
                has_ended = True

        # Iterators of lists may be shared by threads.
        ready, rest = iter(in_place), iter(others)
        async with anyio.create_task_group() as outer:
            outer.start_soon(tell_threads)
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self._num_fetchers, len(in_place) + len(others))):
                    tasks.start_soon(work)
            outer.cancel_scope.cancel()

    def _plan(self, requests: Sequence[Request]) -> tuple[list[Read], list[Read]]:
        """The reads that threads can do alone, and the others."""
        reads = plan_reads(
            [Range(r.key, r.stored.start, r.stored.stop, r.sink.is_addressable) for r in requests],
            chunk_bytes=self._chunk_bytes,
            max_gap_bytes=self._max_gap_bytes,
        )
        if not self._storage.capabilities.has_blocking_io:
            return [], reads
        in_place: list[Read] = []
        others: list[Read] = []
        for read in reads:
            (in_place if _is_addressable(requests, read) else others).append(read)
        return in_place, others

    async def _fetch_one(self, requests: Sequence[Request], read: Read) -> None:
        has_blocking_io = self._storage.capabilities.has_blocking_io
        if _is_addressable(requests, read):
            targets = await self._run_blocking(lambda: list(_targets(requests, read)))
            await self._storage.read_into(read.key, read.start, [t.view for t in targets])
            if self._verify:
                await self._run_blocking(_verify_all, targets)
            return
        with await self._budget.lease(read.stop - read.start, is_reading=True) as lease:
            if has_blocking_io:
                await self._run_blocking(self._read_through, requests, read, lease.view)
            else:
                await self._storage.read_into(read.key, read.start, [lease.view])
                await self._run_blocking(self._deliver, requests, read, lease.view)

    def _read_in_place(self, requests: Sequence[Request], read: Read) -> None:
        self._storage.read_into_blocking(read.key, read.start, self._batches(requests, read))

    def _batches(self, requests: Sequence[Request], read: Read) -> Iterator[Sequence[memoryview]]:
        """Views to fill, block by block; each is verified while it is in the CPU's cache."""
        nbytes = 0
        batch: list[_Target] = []
        for target in _targets(requests, read):
            if nbytes + len(target.view) > BLOCK_BYTES or len(batch) >= _MAX_VIEWS:
                yield [target.view for target in batch]
                if self._verify:
                    _verify_all(batch)
                nbytes, batch = 0, []
            batch.append(target)
            nbytes += len(target.view)
        yield [target.view for target in batch]
        if self._verify:
            _verify_all(batch)

    def _read_through(self, requests: Sequence[Request], read: Read, memory: memoryview) -> None:
        self._storage.read_into_blocking(read.key, read.start, [[memory]])
        self._deliver(requests, read, memory)

    def _deliver(self, requests: Sequence[Request], read: Read, memory: memoryview) -> None:
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


@contextmanager
def _missing_is_damage(read: Read) -> Iterator[None]:
    try:
        yield
    except ObjectNotFound as error:
        raise ChecksumMismatch(key=read.key, detail="the object is missing") from error


def _is_addressable(requests: Sequence[Request], read: Read) -> bool:
    return all(requests[part.request].sink.is_addressable for part in read.parts)


class _Target(NamedTuple):
    """Memory to fill: a part of a leaf, or a gap (``request`` is None)."""

    request: Request | None
    start: int
    view: memoryview


def _targets(requests: Sequence[Request], read: Read) -> Iterator[_Target]:
    """What a read fills, in order; large parts block by block."""
    for gap, part in zip(read.gaps, read.parts, strict=True):
        if gap:
            yield _Target(None, 0, memoryview(bytearray(gap)))
        request = requests[part.request]
        view = request.sink.view(part.start, part.stop)
        if len(view) <= BLOCK_BYTES:
            yield _Target(request, part.start, view)
            continue
        for low in range(0, len(view), BLOCK_BYTES):
            yield _Target(request, part.start + low, view[low : low + BLOCK_BYTES])


def _verify_all(targets: Sequence[_Target]) -> None:
    for target in targets:
        if target.request is not None:
            _verify(target.request, target.start, target.view)


def _verify(request: Request, start: int, view: memoryview) -> None:
    """Compares a leaf's bytes from ``start`` (a block's begin) on with its checksums."""
    expected = request.stored.crc32c
    number = start // BLOCK_BYTES
    for low in range(0, len(view), BLOCK_BYTES):
        if crc32c(view[low : low + BLOCK_BYTES]) != expected[number]:
            path, begin = request.leaf()
            at = request.stored.start + number * BLOCK_BYTES
            raise ChecksumMismatch(
                key=request.key,
                detail=f"block {(at - begin) // BLOCK_BYTES} of {path!r} "
                f"(bytes from {at}) differs from what was saved",
            )
        number += 1
