"""Plans the reads of a restore: which byte ranges, merged and cut how.

Every byte that is asked for is read once per request; neighbouring requests share a read if
the gap between them is at most ``max_gap_bytes``; large ones are cut on their checksum blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actorsnap.format.manifest import BLOCK_BYTES

__all__ = ["Part", "Range", "Read", "plan_reads"]


class Range(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of the object ``key``, all of one stored leaf."""

    key: str
    start: int
    stop: int


class Part(msgspec.Struct, frozen=True, gc=False):
    """The bytes ``[start, stop)``, counted from its first byte, of request number ``request``."""

    request: int
    start: int
    stop: int


class Read(msgspec.Struct, frozen=True, gc=False):
    """One read of ``[start, stop)`` of an object, and the parts it serves, in rising order.

    Parts do not overlap. Bytes between parts are read and thrown away (gaps).
    ``gaps[i]`` is the number of bytes to skip before ``parts[i]``.
    """

    key: str
    start: int
    stop: int
    parts: tuple[Part, ...]
    gaps: tuple[int, ...]


def plan_reads(requests: Sequence[Range], *, chunk_bytes: int, max_gap_bytes: int) -> list[Read]:
    """Merges and cuts requests into reads.

    Args:
        requests: In any order, over any number of objects; may overlap. Empty ones are
            dropped.
        chunk_bytes: Largest read, unless a single block is larger.
        max_gap_bytes: Largest number of unwanted bytes between two parts of a read.

    Returns:
        Reads, by object and offset. Each request's bytes are covered exactly once. Cuts
        inside a request fall on multiples of the checksum block, counted from its start.
    """
    stride = max(1, chunk_bytes // BLOCK_BYTES) * BLOCK_BYTES
    order = sorted(
        (index for index, request in enumerate(requests) if request.stop > request.start),
        key=lambda index: (requests[index].key, requests[index].start, index),
    )
    reads: list[Read] = []
    key, begin, end = "", 0, 0
    parts: list[Part] = []
    gaps: list[int] = []

    def close() -> None:
        if parts:
            reads.append(Read(key, begin, end, tuple(parts), tuple(gaps)))
            parts.clear()
            gaps.clear()

    for index in order:
        request = requests[index]
        size = request.stop - request.start
        step = size if size <= chunk_bytes else stride
        for low in range(0, size, step):
            high = min(low + step, size)
            at = request.start + low
            gap = at - end
            joins = (
                request.key == key
                and 0 <= gap <= max_gap_bytes
                and request.start + high - begin <= chunk_bytes
            )
            if not joins or not parts:
                close()
                key, begin, gap = request.key, at, 0
            parts.append(Part(index, low, high))
            gaps.append(gap)
            end = request.start + high
    close()
    return reads
