"""What travels between the actors of one process. Holds live memory; never encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actorsnap.actors.budget import Lease
from actorsnap.planning.packing import Chunk, Piece
from actorsnap.state.tensors import ByteSource

__all__ = ["StagedChunk"]


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
    lease: Lease | None

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
