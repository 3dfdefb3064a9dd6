# SPDX-License-Identifier: Apache-2.0
"""Reads stored bytes into the caller's memory, as ``planning.restore`` plans, and verifies them."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import accumulate

import anyio
import anyio.lowlevel
import msgspec

from actorsnap.actors.budget import Budget, Purpose
from actorsnap.actors.crew import Crew
from actorsnap.actors.snapshot_reader import missing_is_damage, read_intact
from actorsnap.actors.trace import NULL_RECORDER, Recorder, Row, Wait, Work
from actorsnap.errors import ChecksumMismatch, StorageError
from actorsnap.format.checksum import MAX_BLOCK_BYTES, block_checksums, crc32c
from actorsnap.format.compression import FRAME_BYTES, Unpacker, check_readable
from actorsnap.format.manifest import BytesEntry, RankManifest, Stored, TensorEntry
from actorsnap.planning.index import Index, ShardedEntry
from actorsnap.planning.restore import ChunkMap, Extent, Range, Read, chunk_maps, plan_reads
from actorsnap.planning.transfers import ReadQueue
from actorsnap.state.sources import ByteSink, Cut, scatter
from actorsnap.storage.base import RunBlocking, Storage

_MAX_VIEWS = 256
"""Views filled between two verifications."""

_MAX_PLANNED_PARTS = 64
"""Parts of a read up to which all its views are made before it begins. As many objects as many
small parts need would trigger full garbage collections.
"""

_MAX_NAMED = 4
"""Leaves that an error names."""

_TURN_S = 0.05
"""How long a worker thread reads before it asks for other work: each time wakes the loop's thread,
which takes the GIL and a core from the readers.
"""


class RangeRequest(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Stored bytes of one leaf, and their destination; ``index``: of ``stored.object``."""

    index: Index | RankManifest
    stored: Stored
    sink: ByteSink

    @property
    def key(self) -> str:
        return self.index.objects[self.stored.object].key

    def leaf(self) -> tuple[str, Stored]:
        """Returns the path and the stored range of the leaf or shard, for messages."""
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


@dataclass(frozen=True)
class FetcherPool:
    """Reads many leaves concurrently.

    Args:
        chunk_bytes, max_gap_bytes: See ``planning.restore.plan_reads``.
        budget: Lends memory for leaves that cannot be read in place.
        on_read: Gets the number of bytes of each read that is done; on any thread.
    """

    storage: Storage
    _: KW_ONLY
    run_blocking: RunBlocking
    budget: Budget
    verify: bool
    chunk_bytes: int
    max_gap_bytes: int
    num_fetchers: int
    recorder: Recorder = NULL_RECORDER
    on_read: Callable[[int], None] = lambda nbytes: None

    async def fetch(self, requests: Sequence[RangeRequest]) -> None:
        """Fills every sink.

        Raises:
            ChecksumMismatch: Bytes are missing or damaged; names the object and the leaf.
            UnsupportedFormat: They are compressed, and the library is missing; nothing was read.
            StorageError: Reading failed or was incomplete.
        Cancellation: Reads in flight on threads end first. Sinks hold any mixture.
        """
        in_place, others, chunks = await self.run_blocking(self._plan, requests)
        has_ended = False
        read_bytes: list[int] = []  # per read; appended to by threads

        def read_turn(row: Row) -> bool:
            """Returns whether more may be left."""
            row.note(Wait.THREAD)
            until_s = time.monotonic() + _TURN_S
            for read in in_place_left:
                with missing_is_damage(read.key):
                    read_bytes.append(self._read_in_place(requests, read, row))
                self.on_read(read.stop - read.start)
                if has_ended or time.monotonic() >= until_s:
                    return not has_ended
            return False

        async def work(crew: Crew) -> None:
            with self.recorder.row("fetcher") as row:
                has_more = bool(in_place)
                while has_more:
                    has_more = await self.run_blocking(read_turn, row)
                while not crew.is_too_many and (read := queue.take(crew.at_once)) is not None:
                    fetch = partial(self._fetch_one, requests, read, chunks.get(read.key), row)
                    nbytes = read.stop - read.start
                    with missing_is_damage(read.key), crew.transfer(nbytes) as seconds:
                        await read_intact(self.storage, fetch)
                        queue.end(nbytes, seconds())
                    read_bytes.append(nbytes)
                    self.on_read(nbytes)

        async def stop_threads_when_cancelled() -> None:
            nonlocal has_ended
            try:
                await anyio.sleep_forever()
            finally:
                has_ended = True

        in_place_left = iter(in_place)
        queue = ReadQueue(
            others,
            may_join=lambda read: read.key not in chunks and _is_addressable(requests, read),
            max_gap_bytes=self.max_gap_bytes,
        )
        async with anyio.create_task_group() as outer:
            outer.start_soon(stop_threads_when_cancelled)
            async with anyio.create_task_group() as tasks:
                num_workers = min(self.num_fetchers, len(in_place) + len(others))
                Crew(tasks, work, self.storage, num_workers).start()
            outer.cancel_scope.cancel()
        planned_bytes = sum(read.stop - read.start for read in (*in_place, *others))
        if sum(read_bytes) != planned_bytes:
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise StorageError(
                op="read_into",
                key="",
                backend=self.storage.url,
                detail=f"{len(read_bytes)} reads returned {sum(read_bytes)} of {planned_bytes} "
                "bytes, without an error",
            )

    def _plan(
        self, requests: Sequence[RangeRequest]
    ) -> tuple[list[Read], list[Read], dict[str, ChunkMap]]:
        """Returns reads that need only a thread, the others, and the compressed objects."""
        reads = plan_reads(
            [Range(r.key, r.stored.start, r.stored.stop, r.sink.is_addressable) for r in requests],
            chunk_bytes=self.chunk_bytes,
            max_gap_bytes=self.max_gap_bytes,
        )
        # Includes the objects of ranks whose bytes are gaps.
        keys = {request.key for request in requests}
        indexes = {id(request.index): request.index for request in requests}.values()
        chunks = chunk_maps(r for index in indexes for r in index.objects if r.key in keys)
        if chunks:
            check_readable(min(chunks))
        in_place: list[Read] = []
        others: list[Read] = []
        has_blocking_io = self.storage.capabilities.has_blocking_io
        for read in reads:
            needs_thread_only = (
                has_blocking_io and read.key not in chunks and _is_addressable(requests, read)
            )
            (in_place if needs_thread_only else others).append(read)
        return in_place, others, chunks

    def _read_in_place(self, requests: Sequence[RangeRequest], read: Read, row: Row) -> int:
        """Reads in batches, each verified while in the CPU's cache; returns the bytes read.

        Bytes that nothing verifies do not end a batch: each call hands the GIL over twice.
        """
        key, at = read.key, read.start
        planned: Iterable[_Batch] = _batched(_targets(requests, read), verify=self.verify)
        if len(read.parts) <= _MAX_PLANNED_PARTS:
            # Python code between two calls makes threads wait for each other's GIL.
            planned = list(planned)

        def batches() -> Iterator[list[memoryview]]:
            nonlocal at
            for batch in planned:
                nbytes = batch.nbytes
                yield batch.views
                row.note(Work.READ, key, at, nbytes)
                row.look()
                if batch.verified:
                    _verify_all(batch.verified)
                    row.note(Work.VERIFY, key, at, nbytes)
                at += nbytes

        self.storage.read_into_blocking(read.key, read.start, batches())
        return at - read.start

    async def _fetch_one(
        self, requests: Sequence[RangeRequest], read: Read, chunks: ChunkMap | None, row: Row
    ) -> None:
        place = read.key, read.start, read.stop - read.start
        if _is_addressable(requests, read):
            targets = await self.run_blocking(lambda: list(_targets(requests, read)))
            row.note(Wait.THREAD)

            def verify() -> None:
                if self.verify:
                    row.note(Wait.THREAD)
                    _verify_all(targets)
                    row.note(Work.VERIFY, *place)

            await self._fill(requests, read, chunks, [t.view for t in targets], verify, row)
            return
        with await self.budget.lease(read.stop - read.start, Purpose.READING) as lease:
            row.note(Wait.MEMORY)

            sinks = [requests[part.request].sink for part in read.parts]
            pinner = next((found for sink in sinks if (found := sink.pinner) is not None), None)

            def deliver() -> None:
                row.note(Wait.THREAD)
                if pinner is not None:
                    lease.pin(pinner)
                self._deliver(requests, read, lease.view)
                row.note(Work.PLACE, *place)

            await self._fill(requests, read, chunks, [lease.view], deliver, row)

    async def _fill(
        self,
        requests: Sequence[RangeRequest],
        read: Read,
        chunks: ChunkMap | None,
        views: Sequence[memoryview],
        finish: Callable[[], None],
        row: Row,
    ) -> None:
        """Fills ``views`` with the bytes of a read; then calls ``finish`` on a worker thread."""
        if chunks is None:
            await self._read(read.key, read.start, views, finish, row)
            return
        extents = list(chunks.extents(read.start, read.stop))
        scratch_bytes = max([1, *[extent.size for extent in extents if extent.frames]])
        with await self.budget.lease(scratch_bytes, Purpose.DECOMPRESSING) as lease:
            row.note(Wait.MEMORY)
            for extent in extents:
                into = _Window(views, read.start).within(extent.start, extent.stop)
                if not extent.frames:
                    await self._read(extent.key, extent.offset, into.views, None, row)
                    continue
                frames = lease.view[: extent.size]
                decompress = partial(_decompress, requests, read, extent, frames, into, row)
                await self._read(extent.key, extent.offset, [frames], decompress, row)
        await self.run_blocking(finish)

    async def _read(
        self,
        key: str,
        offset: int,
        views: Sequence[memoryview],
        then: Callable[[], None] | None,
        row: Row,
    ) -> None:
        """Like ``_fill``, but starts at byte ``offset``."""
        nbytes = sum(map(len, views))

        def read_and_go_on() -> None:
            row.note(Wait.THREAD)
            self.storage.read_into_blocking(key, offset, [views])
            row.note(Work.READ, key, offset, nbytes)
            if then is not None:
                then()

        if self.storage.capabilities.has_blocking_io:
            await self.run_blocking(read_and_go_on)
            return
        await self.storage.read_into(key, offset, views)
        row.note(Work.READ, key, offset, nbytes)
        if then is not None:
            await self.run_blocking(then)

    def _deliver(self, requests: Sequence[RangeRequest], read: Read, memory: memoryview) -> None:
        at = 0
        cuts: list[Cut] = []
        for gap, part in zip(read.gaps, read.parts, strict=True):
            at += gap
            nbytes = part.stop - part.start
            request = requests[part.request]
            if self.verify and (block_bytes := _block_bytes(request)):
                _verify(request, part.start, memory[at : at + nbytes], block_bytes)
            cuts.append(Cut(request.sink, part.start, at, nbytes))
            at += nbytes
        scatter(memory, cuts)


def _is_addressable(requests: Sequence[RangeRequest], read: Read) -> bool:
    return all(requests[part.request].sink.is_addressable for part in read.parts)


class _Target(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Memory to fill: part of a leaf, or a gap (``request`` is None).

    ``block_bytes``: of the leaf's checksums; 0: nothing verifies it.
    """

    request: RangeRequest | None
    start: int
    view: memoryview
    block_bytes: int


class _Batch(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Memory that is filled at once, and the targets in it that must be verified."""

    views: list[memoryview]
    verified: list[_Target]
    nbytes: int


def _targets(requests: Sequence[RangeRequest], read: Read) -> Iterator[_Target]:
    """Yields the targets of a read in order; splits large parts into the largest blocks."""
    for gap, part in zip(read.gaps, read.parts, strict=True):
        if gap:
            yield _Target(None, 0, memoryview(bytearray(gap)), 0)
        request, start = requests[part.request], part.start
        view, block_bytes = request.sink.view(start, part.stop), _block_bytes(request)
        if len(view) <= MAX_BLOCK_BYTES:
            yield _Target(request, start, view, block_bytes)
            continue
        for low in range(0, len(view), MAX_BLOCK_BYTES):
            block = view[low : low + MAX_BLOCK_BYTES]
            yield _Target(request, start + low, block, block_bytes)


def _batched(targets: Iterator[_Target], *, verify: bool) -> Iterator[_Batch]:
    """Yields batches with at most the largest block to verify."""
    views: list[memoryview] = []
    verified: list[_Target] = []
    verified_bytes = nbytes = 0
    for target in targets:
        size = len(target.view) if verify and target.block_bytes else 0
        if views and (verified_bytes + size > MAX_BLOCK_BYTES or len(views) >= _MAX_VIEWS):
            yield _Batch(views, verified, nbytes)
            views, verified, verified_bytes, nbytes = [], [], 0, 0
        views.append(target.view)
        nbytes += len(target.view)
        if size:
            verified.append(target)
            verified_bytes += size
    if views:
        yield _Batch(views, verified, nbytes)


def _verify_all(targets: Sequence[_Target]) -> None:
    for target in targets:
        if target.request is not None and target.block_bytes:
            _verify(target.request, target.start, target.view, target.block_bytes)


def _block_bytes(request: RangeRequest) -> int:
    """Returns the block size of the checksums; 0 if another format has none."""
    stored = request.stored
    count = len(stored.crc32c)
    # Usual with many leaves: a single block covers the view.
    return stored.block_bytes if count > 1 else MAX_BLOCK_BYTES if count else 0


def _verify(request: RangeRequest, start: int, view: memoryview, block_bytes: int) -> None:
    stored = request.stored
    number = start // block_bytes
    if len(view) == block_bytes and crc32c(view) == stored.crc32c[number]:
        return  # large leaves: each view is a block
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


class _Window:
    def __init__(self, views: Sequence[memoryview], start: int) -> None:
        self.views = views
        self.start = start
        self._starts = list(accumulate(map(len, views), initial=start))
        self.stop = self._starts[-1]

    def within(self, start: int, stop: int) -> _Window:
        start, stop = max(start, self.start), min(stop, self.stop)
        index = max(bisect_right(self._starts, start) - 1, 0)
        views: list[memoryview] = []
        at = start
        while at < stop:
            low = self._starts[index]
            views.append(self.views[index][at - low : stop - low])
            at += len(views[-1])
            index += 1
        return _Window(views, start)


def _decompress(
    requests: Sequence[RangeRequest],
    read: Read,
    extent: Extent,
    stored: memoryview,
    into: _Window,
    row: Row,
) -> None:
    """Fills ``into`` from the frames of an extent."""
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
            leaves = _name_leaves(requests, read, window.start, window.stop)
            raise ChecksumMismatch(
                key=error.key, detail=f"{error.detail}; it contains bytes of {leaves}"
            ) from error.__cause__
        if not is_alone:
            low = window.start - at
            for view in window.views:
                view[:] = scratch[low : low + len(view)]
                low += len(view)
        at, position = stop, position + size
    row.note(Work.DECOMPRESS, extent.key, extent.start, extent.stop - extent.start)


def _name_leaves(requests: Sequence[RangeRequest], read: Read, start: int, stop: int) -> str:
    paths: dict[str, None] = {}
    at = read.start
    for gap, part in zip(read.gaps, read.parts, strict=True):
        low = at + gap
        at = low + part.stop - part.start
        request = requests[part.request]
        # ``verify`` also requests headers, which have no checksums of their own.
        if low < stop and start < at and request.stored.crc32c:
            paths[request.leaf()[0]] = None
            if len(paths) > _MAX_NAMED:
                break
    named = [repr(path) for path in paths][:_MAX_NAMED] or ["no leaf"]
    return ", ".join(named) + (" and more" if len(paths) > _MAX_NAMED else "")
