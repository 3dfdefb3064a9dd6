# SPDX-License-Identifier: Apache-2.0
"""Plans the reads of a restore, from boxes of tensors to stored bytes."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate, product

import msgspec

from actorsnap.errors import FormatError, IncompatibleState
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.compression import FRAME_BYTES
from actorsnap.format.geometry import Box, c_strides, covers_exactly, extent_bytes
from actorsnap.format.layout import chunk_key
from actorsnap.format.manifest import ObjectRecord, StoredChunk
from actorsnap.planning.shards import Shards


class BoxRead(msgspec.Struct, frozen=True, gc=False):
    """Whole checksum blocks, bytes ``[start, stop)`` of stored box number ``stored``.

    Attributes:
        wanted: Numbers of the wanted boxes that have elements of these bytes, rising.
        at: Byte offset in the only wanted box, if it has all these bytes in the same order. Else
            None: the elements are scattered or dropped.
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
    withheld: Sequence[Box] = (),
) -> list[BoxRead]:
    """Returns the reads of stored boxes that fill the wanted ones.

    Reads no block without wanted elements, and none twice if wanted boxes do not overlap.

    Args:
        stored: In C order. Disjoint, except for boxes that equal a wanted one.
        block_bytes: Size of checksum blocks, per stored box.
        disputed: Numbers of stored boxes that may fill only an equal wanted box.
        withheld: See ``Shards``.

    Raises:
        FormatError: Wanted elements are in no stored box, or in several.
        IncompatibleState: Ranks stored different values of wanted elements.
    """
    finder = _Finder(stored)
    # The usual case; if meshes have different tensors under this path, the right box.
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
            rivals = [*withheld, *[stored[index] for index in disputed]]
            raise _no_cover(path, box, found, rivals)
    reads: list[BoxRead] = []
    for index, parts in shares.items():
        reads += _reads_of(index, stored[index], parts, wanted, itemsize, block_bytes[index])
    return reads


def _no_cover(
    path: str, box: Box, found: Sequence[Box], rivals: Sequence[Box]
) -> FormatError | IncompatibleState:
    """Returns why ``found`` does not fill ``box``.

    Args:
        rivals: Disputed boxes. If they fill the rest, nothing is damaged.
    """
    hole = find_hole(box, found)
    if hole is None:
        return FormatError(key=path, detail="shards overlap")
    lost = find_hole(box, [*found, *rivals])
    if lost is not None:
        detail = f"no shard has the elements from {lost.offsets} up to {lost.stops}"
        return FormatError(key=path, detail=detail)
    line = (
        f"{path}: ranks stored different values of the elements from {hole.offsets} up to "
        f"{hole.stops}, for example of a layer that tensor parallelism left unsharded and that "
        "drifted apart. Each rank gets its own values back, on the mesh and number of ranks of "
        "the save only: restore there, or make the values equal on all ranks before you save. "
        "Different layers need different names"
    )
    return IncompatibleState(mismatched=[line], misfit="ranks")


class BoxPlan:
    """The reads that fill the wanted boxes of a tensor, and of all that are cut alike.

    Attributes:
        nbytes: Bytes of all reads.
        stored, starts: Those of each read, as numbers.
    """

    def __init__(self, reads: Sequence[BoxRead]) -> None:
        self.reads = reads
        self.nbytes = sum([read.stop - read.start for read in reads])
        self.stored = array("I", [read.stored for read in reads])
        self.starts = array("Q", [read.start for read in reads])


class BoxPlanner:
    """Plans tensors; once if they are cut alike and wanted alike, as most layers of a model are."""

    def __init__(self) -> None:
        self._plans: dict[object, BoxPlan] = {}

    def plan(self, path: str, shards: Shards, wanted: tuple[Box, ...], itemsize: int) -> BoxPlan:
        """See ``plan_boxes``."""
        sizes = shards.columns.sizes.tobytes(), shards.columns.counts.tobytes()
        key = shards.cut, sizes, shards.disputed, shards.withheld, wanted, itemsize
        if key not in self._plans:
            planned = plan_boxes(
                path,
                shards.cut.boxes,
                wanted,
                itemsize=itemsize,
                block_bytes=shards.block_bytes,
                disputed=shards.disputed,
                withheld=shards.withheld,
            )
            self._plans[key] = BoxPlan(planned)
        return self._plans[key]


class _Finder:
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
    """Returns a box in ``whole`` that no part covers, if any."""
    if covers_exactly(whole, parts):
        return None
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
                box, after = box.split(dim, shared.sizes[dim])
                left += [rest for rest in (before, after) if not rest.is_empty]
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
        run = only_run(box, shared)
        place = only_run(wanted[number], shared)
        if run is None or place is None:
            spans = _spans(box, shared, itemsize, min_gap_bytes=block_bytes)
            mixed += [(*_whole_blocks(*span, nbytes, block_bytes), number) for span in spans]
            continue
        start, stop = run * itemsize, (run + shared.volume) * itemsize
        low = start + -start % block_bytes
        high = stop if stop == nbytes else stop - stop % block_bytes
        if low >= high:
            mixed.append((*_whole_blocks(start, stop, nbytes, block_bytes), number))
            continue
        reads.append(BoxRead(index, low, high, (number,), place * itemsize + low - start))
        if start < low:
            mixed.append((low - block_bytes, low, number))
        if high < stop:
            mixed.append((*_whole_blocks(high, stop, nbytes, block_bytes), number))
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


def only_run(box: Box, part: Box) -> int | None:
    """Returns where ``part`` begins in the C order of ``box``; None if it is not one run."""
    inner = part.relative_to(box)
    strides = c_strides(box.sizes)
    start = sum([offset * stride for offset, stride in zip(inner.offsets, strides, strict=True)])
    return start if extent_bytes(inner.sizes, strides, 1) == inner.volume else None


def _whole_blocks(start: int, stop: int, nbytes: int, block_bytes: int) -> tuple[int, int]:
    return start - start % block_bytes, min(stop + -stop % block_bytes, nbytes)


def _spans(box: Box, part: Box, itemsize: int, *, min_gap_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of ``part`` in ``box``; joins them across smaller gaps."""
    inner = part.relative_to(box)
    first, length, pitch = 0, itemsize, itemsize
    rows: list[range] = []
    for offset, size, whole in zip(
        reversed(inner.offsets), reversed(inner.sizes), reversed(box.sizes), strict=True
    ):
        first += offset * pitch
        if rows or (size > 1 and pitch - length >= min_gap_bytes):
            rows.append(range(0, size * pitch, pitch))
        else:
            length += (size - 1) * pitch
        pitch *= whole
    for steps in product(*reversed(rows)):
        start = first + sum(steps)
        yield start, start + length


class Range(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of one leaf in an object; ``in_place``: read to their destination."""

    key: str
    start: int
    stop: int
    in_place: bool = True


class Part(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of a request, counted from its first byte."""

    request: int
    start: int
    stop: int


class Read(msgspec.Struct, frozen=True, gc=False):
    """A read of ``[start, stop)`` of an object for these parts, rising and disjoint.

    ``gaps[i]`` bytes before ``parts[i]`` are read and discarded.
    """

    key: str
    start: int
    stop: int
    parts: tuple[Part, ...]
    gaps: tuple[int, ...]


def plan_reads(requests: Sequence[Range], *, chunk_bytes: int, max_gap_bytes: int) -> list[Read]:
    """Merges and splits requests into reads, by object and offset.

    Covers each request's bytes once. Splits requests at multiples of the largest checksum block,
    counted from their start. A run of in-place bytes of at least that size does not share a read
    with other bytes: all of them would be copied.

    Args:
        requests: May overlap. Empty ones are dropped.
        chunk_bytes: Largest read, unless a block of the largest size is larger.
        max_gap_bytes: Most unwanted bytes between two parts of a read.
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


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Neighbouring frames of one chunk, or some bytes of an uncompressed chunk.

    Attributes:
        key, offset: The chunk's key, and the first stored byte in it.
        frames: Stored sizes; empty for an uncompressed chunk.
    """

    key: str
    offset: int
    start: int
    stop: int
    frames: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.frames) if self.frames else self.stop - self.start


class ChunkMap:
    """The chunks of a compressed object, from the records of any ranks that wrote to it."""

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
    if not chunk.frames:
        return Extent(chunk_key(key, chunk.start), start - chunk.start, start, stop, ())
    first = (start - chunk.start) // FRAME_BYTES
    last = -(-(stop - chunk.start) // FRAME_BYTES)
    return Extent(
        key=chunk_key(key, chunk.start),
        offset=sum(chunk.frames[:first]),
        start=chunk.start + first * FRAME_BYTES,
        stop=min(chunk.start + last * FRAME_BYTES, chunk.stop),
        frames=chunk.frames[first:last],
    )


def chunk_maps(records: Iterable[ObjectRecord]) -> dict[str, ChunkMap]:
    by_key: dict[str, list[ObjectRecord]] = {}
    for record in records:
        if record.chunks:
            by_key.setdefault(record.key, []).append(record)
    return {key: ChunkMap(of_object) for key, of_object in by_key.items()}


def check_chunks(key: str, size: int, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
    """Returns the chunks of an object of ``size`` bytes, rising.

    Raises:
        FormatError: The chunks have gaps, overlap, or do not add up to ``size``.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.start)
    at = 0
    for chunk in ordered:
        if chunk.start != at:
            break
        at = chunk.stop
    else:
        if at == size:
            return ordered
    raise FormatError(key=key, detail=f"no chunk begins at {at}, or several have what comes before")
