"""The uploader actors: hash staged chunks and write them.

A pool of them takes chunks from one bounded stream. Each chunk is checksummed from the very
memory that is written, once: the CRC32C of the chunk, which goes with it to the storage, comes
from those of its blocks. Where the storage can be called from threads, hashing and writing
share one hop and the CPU cache: a block is written right after it was hashed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.items import StagedChunk
from actorsnap.actors.trace import ProgressBoard
from actorsnap.format.checksum import (
    MAX_BLOCK_BYTES,
    append_blocks,
    block_checksums,
    choose_block_bytes,
    crc32c,
)
from actorsnap.format.manifest import Stored
from actorsnap.planning.packing import ObjectPlan
from actorsnap.state.tensors import ByteSource
from actorsnap.storage.base import ObjectWriter, RunBlocking

__all__ = ["ChecksumLedger", "UploaderActor", "checksums_of"]

_BATCH_BYTES = 1 << 20
_BATCH_VIEWS = 512
"""Small pieces are gathered up to these sizes for one write call."""


class ChecksumLedger:
    """Collects the block checksums of one object's items, in any order.

    Args:
        is_shard: Of each item of the plan, whether it is a part of a tensor.

    The blocks of an object are numbered through, item by item. A chunk's blocks are
    neighbours, because chunks are cut between blocks.
    """

    def __init__(self, plan: ObjectPlan, is_shard: Iterable[bool]) -> None:
        self._plan = plan
        self._first = [0]
        self._block_bytes: list[int] = []
        for start, end, shard in zip(plan.starts, plan.ends, is_shard, strict=True):
            block_bytes = choose_block_bytes(end - start, is_shard=shard)
            self._block_bytes.append(block_bytes)
            self._first.append(self._first[-1] - (start - end) // block_bytes)
        self._values: list[int | None] = [None] * self._first[-1]

    def block_bytes(self, item: int) -> int:
        """The size of the blocks of item ``item``."""
        return self._block_bytes[item]

    def record(self, staged: StagedChunk, checksums: Sequence[int]) -> None:
        """Notes the checksums of a chunk's blocks."""
        if checksums:
            piece = staged.pieces[0]
            first = self._first[piece.item] + piece.start // self._block_bytes[piece.item]
            self._values[first : first + len(checksums)] = checksums

    def stored(self, item: int, number: int) -> Stored:
        """Where item ``item`` lies, in object number ``number`` of the rank manifest.

        Raises:
            AssertionError: a block was never recorded.
        """
        values = tuple(self._values[self._first[item] : self._first[item + 1]])
        assert None not in values, "a block was never hashed"
        return Stored(number, self._plan.starts[item], self._plan.ends[item], values)  # type: ignore[arg-type]


class UploaderActor:
    """Stores chunks until the stream ends.

    Args:
        chunks: A clone of the stream of staged chunks.
        writer_of: The writer of an object, by its number; waits until it is open.
        ledgers: Per object, where its checksums go.
        begin: Nothing is stored before this is set.
        report: Awaited with the object's number after each chunk.
        is_stopped: Asked between two blocks, on any thread: True lets the rest go.
        has_blocking_io: Whether the writers may be called from worker threads.
        resumes: Whether to ask the writers for what dead attempts have left.
    """

    def __init__(
        self,
        *,
        chunks: MemoryObjectReceiveStream[StagedChunk],
        writer_of: Callable[[int], Awaitable[ObjectWriter]],
        ledgers: Sequence[ChecksumLedger],
        begin: anyio.Event,
        run_blocking: RunBlocking,
        report: Callable[[int], Awaitable[None]],
        is_stopped: Callable[[], bool],
        has_blocking_io: bool,
        resumes: bool,
        board: ProgressBoard,
    ) -> None:
        self._chunks = chunks
        self._writer_of = writer_of
        self._ledgers = ledgers
        self._begin = begin
        self._run_blocking = run_blocking
        self._report = report
        self._is_stopped = is_stopped
        self._has_blocking_io = has_blocking_io
        self._resumes = resumes
        self._board = board

    async def run(self) -> None:
        """Stores chunks.

        Raises:
            StorageError: a write failed; the chunk's lease is released.
        Cancellation: as for a failure; a block that a worker thread writes ends first.
        """
        async with self._chunks:
            await self._begin.wait()
            async for staged in self._chunks:
                try:
                    await self._store(staged)
                finally:
                    if staged.lease is not None:
                        staged.lease.release()
                await self._report(staged.chunk.object)

    async def _store(self, staged: StagedChunk) -> None:
        writer = await self._writer_of(staged.chunk.object)
        ledger = self._ledgers[staged.chunk.object]
        nbytes = staged.chunk.stop - staged.chunk.start
        if self._has_blocking_io:
            checksums = await self._run_blocking(
                _hash_and_write, writer, staged, ledger, self._is_stopped
            )
            await anyio.lowlevel.checkpoint_if_cancelled()  # if it was stopped half-way
            self._board.add(hashed=nbytes, stored=nbytes)
        else:
            views, checksums, whole = await self._run_blocking(_hash, staged, ledger)
            self._board.add(hashed=nbytes)
            at, views = staged.chunk.start, [staged.head, *views]
            if not (self._resumes and await writer.reuse(at, views, whole)):
                await writer.write_at(at, views, whole)
            self._board.add(stored=nbytes)
        ledger.record(staged, checksums)


def _hash(staged: StagedChunk, ledger: ChecksumLedger) -> tuple[list[memoryview], list[int], int]:
    """What to write behind the head, the checksums of its blocks, and that of the chunk."""
    views = list(staged.views())
    checksums: list[int] = []
    whole = crc32c(staged.head)
    for piece, view in zip(staged.pieces, views, strict=True):
        block_bytes = ledger.block_bytes(piece.item)
        found = block_checksums(view, block_bytes)
        whole = append_blocks(whole, view, found, block_bytes)
        checksums += found
    return views, checksums, whole


def _hash_and_write(
    writer: ObjectWriter,
    staged: StagedChunk,
    ledger: ChecksumLedger,
    is_stopped: Callable[[], bool],
) -> list[int]:
    checksums: list[int] = []
    at = staged.chunk.start
    batch: list[memoryview] = [staged.head]
    batch_bytes = len(staged.head)
    for piece, view in zip(staged.pieces, staged.views(), strict=True):
        block_bytes = ledger.block_bytes(piece.item)
        for low in range(0, len(view), _BATCH_BYTES):
            part = view if len(view) <= _BATCH_BYTES else view[low : low + _BATCH_BYTES]
            checksums += block_checksums(part, block_bytes)
            batch.append(part)
            batch_bytes += len(part)
            if batch_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_VIEWS:
                if is_stopped():
                    return []
                writer.write_at_blocking(at, batch)
                at += batch_bytes
                batch, batch_bytes = [], 0
    if batch:
        writer.write_at_blocking(at, batch)
    return checksums


def checksums_of(source: ByteSource) -> list[int]:
    """The checksums of a leaf's bytes, in blocks of the largest size."""
    checksums: list[int] = []
    buffer = memoryview(bytearray(0 if source.is_addressable else MAX_BLOCK_BYTES))
    for start in range(0, source.nbytes, MAX_BLOCK_BYTES):
        stop = min(start + MAX_BLOCK_BYTES, source.nbytes)
        if source.is_addressable:
            block = source.view(start, stop)
        else:
            block = buffer[: stop - start]
            source.copy_into(start, block)
        checksums.append(crc32c(block))
    return checksums
