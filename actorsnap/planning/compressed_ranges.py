"""Maps bytes of a compressed data object to stored bytes.

Only index arithmetic of ``docs/format.md`` ("Compressed data object"). Must not know how frames are
decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.compression import FRAME_BYTES
from actorsnap.format.layout import chunk_key
from actorsnap.format.manifest import ObjectRecord, StoredChunk

__all__ = ["ChunkMap", "Extent", "check_chunks", "chunk_maps"]


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Neighbouring frames of one chunk, or some bytes of an uncompressed chunk.

    Attributes:
        key: The chunk's key.
        offset: Offset of the first stored byte in the chunk.
        start, stop: Range of the object's bytes.
        frames: Stored size of each frame; empty for an uncompressed chunk.
    """

    key: str
    offset: int
    start: int
    stop: int
    frames: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of stored bytes."""
        return sum(self.frames) if self.frames else self.stop - self.start


class ChunkMap:
    """The chunks of one compressed object, from the records of any ranks that wrote to it."""

    def __init__(self, records: Iterable[ObjectRecord]) -> None:
        chunks: dict[int, StoredChunk] = {}
        for record in records:
            self._key = record.key
            chunks.update((chunk.start, chunk) for chunk in record.chunks)
        self._starts = sorted(chunks)
        self._chunks = [chunks[start] for start in self._starts]

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """Yields the extents that hold bytes ``[start, stop)`` of the object, rising.

        Raises:
            FormatError: No chunk has some of the bytes.
        """
        index = max(bisect_right(self._starts, start) - 1, 0)
        at = start
        for chunk in self._chunks[index:]:
            if at >= stop or not chunk.start <= at < chunk.stop:
                break
            yield _extent(self._key, chunk, at, min(stop, chunk.stop))
            at = chunk.stop
        if at < stop:
            raise FormatError(key=self._key, detail=f"no chunk has the bytes from {at}")


def _extent(key: str, chunk: StoredChunk, start: int, stop: int) -> Extent:
    first = (start - chunk.start) // FRAME_BYTES
    if not chunk.frames:
        return Extent(chunk_key(key, chunk.start), start - chunk.start, start, stop, ())
    last = -(-(stop - chunk.start) // FRAME_BYTES)
    return Extent(
        key=chunk_key(key, chunk.start),
        offset=sum(chunk.frames[:first]),
        start=chunk.start + first * FRAME_BYTES,
        stop=min(chunk.start + last * FRAME_BYTES, chunk.stop),
        frames=chunk.frames[first:last],
    )


def chunk_maps(records: Iterable[ObjectRecord]) -> dict[str, ChunkMap]:
    """Returns the chunks of each compressed object by its key, from the records of any ranks."""
    parts: dict[str, list[ObjectRecord]] = {}
    for record in records:
        if record.chunks:
            parts.setdefault(record.key, []).append(record)
    return {key: ChunkMap(found) for key, found in parts.items()}


def check_chunks(key: str, size: int, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
    """Returns the chunks of an object of ``size`` bytes, of all ranks, rising.

    Raises:
        FormatError: The chunks have gaps, overlap, or do not add up to ``size``.
    """
    found = sorted(chunks, key=lambda chunk: chunk.start)
    at = 0
    for chunk in found:
        if chunk.start != at:
            break
        at = chunk.stop
    else:
        if at == size:
            return found
    raise FormatError(key=key, detail=f"no chunk begins at {at}, or several have what comes before")
