# SPDX-License-Identifier: Apache-2.0
"""The uploader actors: hash staged chunks and write them.

Each chunk is hashed once, in the memory that is written. If the storage can be called from threads,
each block is written right after hashing, by the same thread, while in the CPU cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.checksum_ledger import ChecksumLedger
from actorsnap.actors.compressor import CompressedStore
from actorsnap.actors.crew import Crew
from actorsnap.actors.items import SaveContext, StagedChunk
from actorsnap.actors.object_writers import RankObjects
from actorsnap.actors.trace import Row, Wait, Work
from actorsnap.format.checksum import append_blocks, block_checksums, crc32c
from actorsnap.storage.base import ObjectWriter

_HEAD_START_S = 0.002
"""Delay before uploaders start: the woken trainer gets the GIL and the CPUs first, otherwise a
switch interval (5 ms) later.
"""

_BATCH_BYTES = 1 << 20
_BATCH_VIEWS = 160
"""Views in one write call, of at most ``_BATCH_BYTES``. A view is up to three objects for Python's
garbage collector, which starts with the 700th.
"""


@dataclass(eq=False, repr=False)
class UploaderActor:
    """Stores chunks until the stream ends.

    Args:
        may_store: Copies are stored once this is set.
        report: Called with the object's number after each chunk.
        is_stopped: Returns whether to give up; called between two blocks, on any thread.
        compressed: None for plain objects.
    """

    context: SaveContext
    objects: RankObjects
    _: KW_ONLY
    chunks: MemoryObjectReceiveStream[StagedChunk]
    may_store: anyio.Event
    report: Callable[[int], None]
    is_stopped: Callable[[], bool]
    compressed: CompressedStore | None

    async def run(self, crew: Crew) -> None:
        """Stores chunks, until there are no more or the crew has too many workers.

        Raises:
            StorageError: A write failed; the chunk's lease is released.
        Cancellation: As for a failure; a block that a worker thread writes ends first.
        """
        async with self.chunks:
            if self.context.copies:
                await self.may_store.wait()
                await anyio.sleep(_HEAD_START_S)
            recorder = self.context.recorder
            with recorder.row("uploader") as row:
                while not crew.is_too_many:
                    try:
                        staged = await self.chunks.receive()
                    except anyio.EndOfStream:
                        break
                    row.note(Wait.CHUNK)
                    recorder.sample(
                        "staged chunks", lambda: self.chunks.statistics().current_buffer_used
                    )
                    try:
                        with crew.transfer(staged.chunk.stop - staged.chunk.start):
                            await self._store(staged, row)
                    finally:
                        if staged.lease is not None:
                            staged.lease.release()
                    self.report(staged.chunk.object)

    async def _store(self, staged: StagedChunk, row: Row) -> None:
        ledger = self.objects.ledgers[staged.chunk.object]
        writer = None
        if self.compressed is None:
            writer = await self.objects.writer_of(staged.chunk.object)
            row.note(Wait.OBJECT)
        pace = self.context.pace
        working: AbstractAsyncContextManager[bool | None] = (
            nullcontext() if pace is None else pace.working()
        )
        has_blocking_io = self.objects.storage.capabilities.has_blocking_io
        async with working as has_rested:
            if has_rested:
                row.note(Wait.PACE)
            if writer is not None and has_blocking_io:
                checksums = await self._write_blocking(staged, ledger, writer, row)
            else:
                checksums = await self._write(staged, ledger, writer, row)
            ledger.record(staged, checksums)

    async def _write_blocking(
        self, staged: StagedChunk, ledger: ChecksumLedger, writer: ObjectWriter, row: Row
    ) -> list[int]:
        checksums = await self.context.errands.run_cpu(
            _hash_and_write, writer, staged, ledger, self.is_stopped, row
        )
        if checksums is None:
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise RuntimeError(f"{ledger.key}: a chunk was abandoned without a cancellation")
        nbytes = staged.chunk.stop - staged.chunk.start
        self.context.board.add(hashed=nbytes, stored=nbytes)
        return checksums

    async def _write(
        self, staged: StagedChunk, ledger: ChecksumLedger, writer: ObjectWriter | None, row: Row
    ) -> list[int]:
        key, at, nbytes = ledger.key, staged.chunk.start, staged.chunk.stop - staged.chunk.start
        hashing = row.around(hash_chunk, Work.HASH, key, at, nbytes)
        views, checksums, whole = await self.context.errands.run_cpu(hashing, staged, ledger)
        self.context.board.add(hashed=nbytes)
        views = [staged.head, *views]
        if writer is None:
            assert self.compressed is not None
            itemsizes = [1, *ledger.itemsizes(staged)]
            stored = await self.compressed.store(key, at, views, itemsizes, whole, row)
            ledger.record_chunk(stored)
        else:
            resumed = self.objects.assignment.resumed
            is_reused = bool(resumed) and await writer.reuse(at, views, whole)
            if not is_reused:
                await writer.write_at(at, views, whole)
            row.note(Work.REUSE if is_reused else Work.STORE, key, at, nbytes)
        self.context.board.add(stored=nbytes)
        return checksums


def hash_chunk(
    staged: StagedChunk, ledger: ChecksumLedger
) -> tuple[list[memoryview], list[int], int]:
    """Returns the views of a chunk's leaves, their blocks' checksums, and that of all bytes."""
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
    row: Row,
) -> list[int] | None:
    """Returns the checksums of the blocks; None if stopped before the last one."""
    row.note(Wait.THREAD)
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
                    return None
                _write(writer, ledger.key, at, batch, batch_bytes, row)
                at += batch_bytes
                batch, batch_bytes = [], 0
    if batch:
        _write(writer, ledger.key, at, batch, batch_bytes, row)
    return checksums


def _write(
    writer: ObjectWriter,
    key: str,
    at: int,
    batch: Sequence[memoryview],
    nbytes: int,
    row: Row,
) -> None:
    row.note(Work.HASH, key, at, nbytes)
    writer.write_at_blocking(at, batch)
    row.note(Work.STORE, key, at, nbytes)
