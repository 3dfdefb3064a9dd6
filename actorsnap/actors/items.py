"""What travels between the actors of one process. Holds live memory; never encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actorsnap.actors.budget import Lease
from actorsnap.planning.packing import Chunk, Piece

__all__ = ["StagedChunk"]


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """A chunk whose bytes are ready to be hashed and written.

    Attributes:
        chunk: Which.
        head: Bytes of the object's header that the chunk begins with, or empty.
        pieces: What follows, in order.
        views: One per piece.
        lease: Released by whoever stored the chunk; None if the views are the trainer's
            own memory.
    """

    chunk: Chunk
    head: memoryview
    pieces: Sequence[Piece]
    views: Sequence[memoryview]
    lease: Lease | None
