"""Plans the reads of a restore: which bytes of which boxes, merged and cut.

``plan_boxes`` selects the bytes of stored boxes that fill other boxes, in whole checksum blocks, as
verification needs. ``plan_reads`` turns byte ranges into reads. Neighbouring requests share a read
if the gap between them is at most ``max_gap_bytes``; large requests are cut between checksum
blocks.

Must not know tensors or the ranks that want them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from itertools import accumulate, product

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.geometry import Box, contiguous_runs, covers_exactly

__all__ = ["BoxRead", "Part", "Range", "Read", "find_hole", "plan_boxes", "plan_reads"]


# Boxes of a tensor ----------------------------------------------------------------------------


class BoxRead(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of a stored box, counted from its first byte: whole blocks.

    Attributes:
        stored: Number of the stored box.
        start, stop: Multiples of the box's checksum block; ``stop`` may also be the box's end.
        wanted: Numbers of the wanted boxes that have elements of these bytes, rising.
        at: If all these bytes belong to the only wanted box, in the same order: their offset in it,
            in bytes. Else None: the elements are scattered or dropped.
    """

    stored: int
    start: int
    stop: int
    wanted: tuple[int, ...]
    at: int | None


def plan_boxes(
    path: str,
    stored: Sequence[Box],
    wanted: Sequence[Box],
    *,
    itemsize: int,
    block_bytes: Sequence[int],
    disputed: Set[int] = frozenset(),
) -> list[BoxRead]:
    """Returns the reads of stored boxes that fill the wanted ones.

    No block is read twice if wanted boxes do not overlap. Blocks without wanted elements are not
    read.

    Args:
        path: For errors.
        stored: Boxes in the tensor's index space, each with its own bytes in C order. Disjoint,
            except for boxes that equal a wanted one.
        wanted: Boxes in the same space.
        itemsize: Bytes of an element.
        block_bytes: Per stored box, the size of its checksum blocks.
        disputed: Numbers of stored boxes that may fill only an equal wanted box.

    Raises:
        FormatError: Wanted elements are in no stored box, or in several.
    """
    finder = _Finder(stored)
    # Usually the mesh is the same. Where other meshes have other tensors under this path, the equal
    # box is the right one.
    same = {box: index for index, box in enumerate(stored)}
    shares: dict[int, list[tuple[int, Box]]] = {}
    for number, box in enumerate(wanted):
        if box.is_empty:
            continue
        if box in same:
            shares.setdefault(same[box], []).append((number, box))
            continue
        found: list[Box] = []
        for index in finder.near(box):
            shared = None if index in disputed else stored[index].intersect(box)
            if shared is not None:
                found.append(shared)
                shares.setdefault(index, []).append((number, shared))
        if not covers_exactly(box, found):
            hole = _hole(box, found)
            what = (
                "shards overlap"
                if hole is None
                else f"no shard has the elements from {hole.offsets} up to {hole.stops}, or "
                "several ranks stored different ones under this path. Each of those ranks can "
                "restore its own, with the world size of the save; use separate keys at the next "
                "take"
            )
            raise FormatError(key=path, detail=what)
    reads: list[BoxRead] = []
    for index, found_in in shares.items():
        reads += _reads_of(index, stored[index], found_in, wanted, itemsize, block_bytes[index])
    return reads


class _Finder:
    """Finds the boxes that a given box may intersect."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._order = list(range(len(boxes)))
        ndim = boxes[0].ndim if boxes else 0
        if ndim:
            self._dim = dim = max(range(ndim), key=lambda d: len({b.offsets[d] for b in boxes}))
            self._order.sort(key=lambda index: boxes[index].offsets[dim])
            self._starts = [boxes[index].offsets[dim] for index in self._order]
            self._reach = list(accumulate([boxes[index].stops[dim] for index in self._order], max))

    def near(self, box: Box) -> list[int]:
        if not box.ndim or not self._order:
            return self._order
        start = box.offsets[self._dim]
        low = bisect_right(self._reach, start)
        return self._order[low : bisect_left(self._starts, start + box.sizes[self._dim])]


def find_hole(whole: Box, parts: Sequence[Box]) -> Box | None:
    """Returns a box in ``whole`` that no part covers, or None if the parts cover ``whole``."""
    return None if covers_exactly(whole, parts) else _hole(whole, parts)


def _hole(whole: Box, parts: Sequence[Box]) -> Box | None:
    left = [whole]
    for part in parts:
        boxes, left = left, []
        for box in boxes:
            shared = box.intersect(part)
            if shared is None:
                left.append(box)
                continue
            for dim in range(box.ndim):
                before, box = box.split(dim, shared.offsets[dim] - box.offsets[dim])
                box, behind = box.split(dim, shared.sizes[dim])
                left += [rest for rest in (before, behind) if not rest.is_empty]
    return left[0] if left else None


def _reads_of(
    index: int,
    box: Box,
    shares: Sequence[tuple[int, Box]],
    wanted: Sequence[Box],
    itemsize: int,
    block_bytes: int,
) -> list[BoxRead]:
    nbytes = box.volume * itemsize
    reads: list[BoxRead] = []
    # Blocks that do not go to one place as a whole.
    mixed: list[tuple[int, int, int]] = []
    for number, shared in shares:
        run = _only_run(box, shared)
        place = _only_run(wanted[number], shared)
        if run is None or place is None:
            spans = _spans(box, shared, itemsize, min_gap_bytes=block_bytes)
            mixed += [(*_grown(*span, nbytes, block_bytes), number) for span in spans]
            continue
        start, stop = run * itemsize, (run + shared.volume) * itemsize
        low = start + -start % block_bytes
        high = stop if stop == nbytes else stop - stop % block_bytes
        if low >= high:
            mixed.append((*_grown(start, stop, nbytes, block_bytes), number))
            continue
        reads.append(BoxRead(index, low, high, (number,), place * itemsize + low - start))
        if start < low:
            mixed.append((low - block_bytes, low, number))
        if high < stop:
            mixed.append((*_grown(high, stop, nbytes, block_bytes), number))
    mixed.sort()
    at = 0
    while at < len(mixed):
        start, stop, _ = mixed[at]
        numbers: set[int] = set()
        while at < len(mixed) and mixed[at][0] <= stop:
            stop = max(stop, mixed[at][1])
            numbers.add(mixed[at][2])
            at += 1
        reads.append(BoxRead(index, start, stop, tuple(sorted(numbers)), None))
    return reads


def _only_run(box: Box, part: Box) -> int | None:
    """Returns where ``part`` begins in the C-order elements of ``box``; None if it is not one
    run."""
    start, count = next(contiguous_runs(box.sizes, part.relative_to(box)))
    return start if count == part.volume else None


def _grown(start: int, stop: int, nbytes: int, block_bytes: int) -> tuple[int, int]:
    """Returns the bytes of the blocks that ``[start, stop)`` touches."""
    return start - start % block_bytes, min(stop + -stop % block_bytes, nbytes)


def _spans(box: Box, part: Box, itemsize: int, *, min_gap_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of ``part`` in ``box``; smaller gaps than ``min_gap_bytes`` are
    joined."""
    inner = part.relative_to(box)
    first, length, pitch = 0, itemsize, itemsize
    rows: list[range] = []
    for offset, size, whole in zip(
        reversed(inner.offsets), reversed(inner.sizes), reversed(box.sizes), strict=True
    ):
        first += offset * pitch
        # Gaps along an outer dim are never smaller.
        if rows or (size > 1 and pitch - length >= min_gap_bytes):
            rows.append(range(0, size * pitch, pitch))
        else:
            length += (size - 1) * pitch
        pitch *= whole
    for steps in product(*reversed(rows)):
        start = first + sum(steps)
        yield start, start + length


# Byte ranges of objects -----------------------------------------------------------------------


class Range(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of the object ``key``, all of one stored leaf.

    ``in_place``: they can be read directly into their destination.
    """

    key: str
    start: int
    stop: int
    in_place: bool = True


class Part(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of request number ``request``, counted from its first byte."""

    request: int
    start: int
    stop: int


class Read(msgspec.Struct, frozen=True, gc=False):
    """One read of ``[start, stop)`` of an object, and the parts that it serves, rising.

    Parts do not overlap. ``gaps[i]`` is the number of bytes before ``parts[i]`` that are read and
    discarded.
    """

    key: str
    start: int
    stop: int
    parts: tuple[Part, ...]
    gaps: tuple[int, ...]


def plan_reads(requests: Sequence[Range], *, chunk_bytes: int, max_gap_bytes: int) -> list[Read]:
    """Merges and cuts requests into reads.

    Args:
        requests: In any order, over any number of objects; may overlap. Empty ones are dropped.
        chunk_bytes: Largest read, unless a block of the largest size is larger.
        max_gap_bytes: Largest number of unwanted bytes between two parts of a read.

    Returns:
        Reads, by object and offset. Each request's bytes are covered exactly once. Cuts inside a
        request fall on multiples of the largest checksum block, counted from its start. A run of
        in-place bytes of at least that size does not share a read with other bytes, because all of
        them would be copied.
    """
    stride = max(1, chunk_bytes // MAX_BLOCK_BYTES) * MAX_BLOCK_BYTES
    order = sorted(
        (index for index, request in enumerate(requests) if request.stop > request.start),
        key=lambda index: (requests[index].key, requests[index].start, index),
    )
    reads: list[Read] = []
    key, begin, end, in_place = "", 0, 0, True
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
                and (
                    request.in_place == in_place
                    or (high - low if request.in_place else end - begin) < MAX_BLOCK_BYTES
                )
            )
            if not joins or not parts:
                close()
                key, begin, gap, in_place = request.key, at, 0, True
            in_place = in_place and request.in_place
            parts.append(Part(index, low, high))
            gaps.append(gap)
            end = request.start + high
    close()
    return reads
