"""Items passed between the actors of one process; never encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actorsnap.planning.packing import Chunk, ObjectPlan, Piece
from actorsnap.state.sources import ByteSource

__all__ = ["StagedChunk", "StagedMemory", "Staging", "StagingOrder", "release_leases"]


class StagedMemory(Protocol):
    """Memory with copies; released once, by its last user."""

    view: memoryview

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """A chunk whose bytes are ready to be hashed and written.

    Attributes:
        head: The chunk's part of the object's header, or empty.
        sources: The trainer's own memory, per item of the object; for chunks without a lease.
        lease: Contiguous copies of the pieces, or None. Released after storing.
    """

    chunk: Chunk
    head: memoryview
    pieces: Sequence[Piece]
    sources: Sequence[ByteSource]
    lease: StagedMemory | None

    def views(self) -> Iterator[memoryview]:
        """Yields one view per piece, on demand: many at once (16,000 small tensors) would trigger
        full garbage collections.
        """
        if self.lease is None:
            for piece in self.pieces:
                yield self.sources[piece.item].view(piece.start, piece.stop)
            return
        at = 0
        for piece in self.pieces:
            end = at + piece.stop - piece.start
            yield self.lease.view[at:end]
            at = end


def release_leases(staged: MemoryObjectReceiveStream[StagedChunk]) -> None:
    """Empties the stream, which holds chunks only after a failure."""
    while True:
        try:
            chunk = staged.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return
        if chunk.lease is not None:
            chunk.lease.release()


@dataclass(frozen=True, slots=True, eq=False)
class StagingOrder:
    """Chunks to stage, and their destination.

    Attributes:
        chunks: In the order of storing.
        full: Set when staging waits for memory, and at its end. Until then the trainer waits for
            the copies, and uploaders leave the CPU to them.
    """

    objects: Sequence[ObjectPlan]
    chunks: Sequence[Chunk]
    out: MemoryObjectSendStream[StagedChunk]
    full: anyio.Event


class Staging(Protocol):
    async def run(self, order: StagingOrder) -> None:
        """Stages all chunks; releases the sources."""
        ...
