"""What travels between the actors of one process. Holds live memory; never encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actorsnap.planning.packing import Chunk, ObjectPlan, Piece
from actorsnap.protocol.save import Assignment
from actorsnap.state.sources import ByteSource

__all__ = ["StagedChunk", "StagedMemory", "Stager", "Staging", "StagingOrder", "release_leases"]


class StagedMemory(Protocol):
    """Memory that holds copies; released once, by whoever needs it last."""

    view: memoryview

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """A chunk whose bytes are ready to be hashed and written.

    Attributes:
        chunk: Which.
        head: Bytes of the object's header that the chunk begins with, or empty.
        pieces: What follows, in order.
        sources: Per item of the object, the trainer's own memory; used without a lease only.
        lease: Memory with copies of the pieces, back to back, or None. Released by whoever
            stored the chunk.
    """

    chunk: Chunk
    head: memoryview
    pieces: Sequence[Piece]
    sources: Sequence[ByteSource]
    lease: StagedMemory | None

    def views(self) -> Iterator[memoryview]:
        """One per piece, made as they are asked for.

        Views of 16,000 small tensors at a time would send the garbage collector over every
        object of the process again and again.
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
    """Empties the stream; only after a failure is anything in it."""
    while True:
        try:
            chunk = staged.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return
        if chunk.lease is not None:
            chunk.lease.release()


@dataclass(frozen=True, slots=True, eq=False)
class StagingOrder:
    """What is to be staged, and where it goes.

    Attributes:
        objects: The plan.
        chunks: In the order in which they are to be stored.
        out: Where staged chunks go; closed at the end.
        full: Set when memory makes staging wait, and at its end: until then the storing
            side leaves the CPU to the copies, because the trainer waits for them.
    """

    objects: Sequence[ObjectPlan]
    chunks: Sequence[Chunk]
    out: MemoryObjectSendStream[StagedChunk]
    full: anyio.Event


class Staging(Protocol):
    """Fulfils one order."""

    async def run(self) -> None:
        """Stages everything; the sources are not referred to any more then."""
        ...


class Stager(Protocol):
    """Stages somewhere else, where the bytes are."""

    def prepare(self, assignment: Assignment) -> None:
        """Takes notice of what will be packed, and how: staging may begin."""
        ...

    def make(self, order: StagingOrder) -> Staging:
        """Passes on here what is staged there."""
        ...
