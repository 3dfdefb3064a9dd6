"""Which leaves share memory, and what is stored for those that do.

Implements "Tensors that overlap in memory are stored once" of ``docs/format.md``: finds the
groups, and decides per group whether one leaf is the base or the span of memory is, or whether
its members are stored apart after all. It must not know paths, entries or app states; members
are numbered by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from actorsnap.state.tensors import c_strides, extent_bytes

__all__ = [
    "Extents",
    "Group",
    "Region",
    "group",
    "share_bytes",
    "touched_without_gaps",
    "touching",
]

_MAX_EXACT = 128
"""Members up to which strided ones are compared in pairs. Beyond, extents decide."""

_MAX_WORK = 10_000

_MAX_SPAN = 2
"""A span of memory is stored for its members if it is at most so many times what they would
take each by itself. A row and a column of a large matrix share one element; the matrix is not
what was asked to be saved."""


class Region(msgspec.Struct, frozen=True, gc=False):
    """The memory of one leaf: its first byte, and how its elements lie from there.

    Attributes:
        start: Address of the first element.
        itemsize: Bytes of an element.
        shape, strides: In elements; strides are not negative.
    """

    start: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Address behind the last element."""
        return self.start + extent_bytes(self.shape, self.strides, self.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, as often as they appear."""
        count = self.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def is_contiguous(self) -> bool:
        """Whether memory order is C order, without gaps."""
        return 0 in self.shape or all(
            stride == expected or size == 1
            for size, stride, expected in zip(
                self.shape, self.strides, c_strides(self.shape), strict=True
            )
        )

    @property
    def repeats(self) -> bool:
        """Whether elements surely share memory with each other (expanded tensors)."""
        return self.stop - self.start < self.nbytes

    @property
    def has_no_gaps(self) -> bool:
        """Whether every byte from the first element to the last is an element's."""
        run = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride > run:
                    return False
                run += stride * (size - 1)
        return True

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for regions whose element i is the same memory, for every i."""
        strides: tuple[int, ...] = ()
        if 0 not in self.shape:
            strides = tuple(
                [0 if n == 1 else step for n, step in zip(self.shape, self.strides, strict=True)]
            )
        return (self.start, self.itemsize, self.shape, strides)

    def at(self, start: int) -> Region:
        """Returns the same layout from another address on."""
        return Region(start, self.itemsize, self.shape, self.strides)

    def same_layout(self, other: Region) -> bool:
        """Whether element i of both is the same memory, for every i."""
        return self.layout == other.layout


class Extents:
    """Where members lie in the memory of one device."""

    __slots__ = ("numbers", "starts", "stops")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, number: int, start: int, stop: int) -> None:
        """Adds a member that is not empty: its first byte, and the end."""
        self.numbers.append(number)
        self.starts.append(start)
        self.stops.append(stop)


class Group(msgspec.Struct, frozen=True):
    """Members that share memory.

    Attributes:
        members: Their numbers, ascending.
        base: The number of the member that is stored for all; None: the span is.
        start, stop: The span of memory that the group touches.
        same: All members have one layout, so they are views of the base as it is stored,
            whatever its strides in memory are.
    """

    members: tuple[int, ...]
    base: int | None
    start: int
    stop: int
    same: bool


def touching(starts: Sequence[int], stops: Sequence[int]) -> list[list[int]]:
    """Returns the groups of two and more whose extents form one piece, by their numbers."""
    if len(starts) < 2:
        return []
    low = np.asarray(starts, dtype=np.uint64)
    high = np.asarray(stops, dtype=np.uint64)
    order = np.argsort(low, kind="stable")
    low = low[order]
    reach = np.maximum.accumulate(high[order])
    # Where a new piece begins: nothing before reaches into it.
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = low[1:] >= reach[:-1]
    if is_first.all():
        return []
    begins = np.flatnonzero(is_first)
    ends = np.append(begins[1:], len(order))
    return [
        sorted(order[begin:end].tolist())
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        if end - begin > 1
    ]


class _Fake:
    """Memory described to numpy, which computes with the addresses and never reads."""

    def __init__(self, region: Region) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (region.start, True),
            "typestr": f"|V{region.itemsize}",
            "shape": region.shape,
            "strides": tuple([stride * region.itemsize for stride in region.strides]),
        }


def share_bytes(a: Region, b: Region) -> bool:
    """Whether two regions have a byte in common. True where that is too hard to say."""
    if a.stop <= b.start or b.stop <= a.start:
        return False
    try:
        return bool(
            np.shares_memory(np.asarray(_Fake(a)), np.asarray(_Fake(b)), max_work=_MAX_WORK)  # type: ignore[arg-type]
        )
    except np.exceptions.TooHardError:
        return True


def _connected(members: list[int], regions: dict[int, Region]) -> list[list[int]]:
    """Splits members whose extents overlap into those that share bytes.

    Interleaved columns of one matrix share extents and no byte; they are stored as the
    tensors that they are.
    """
    if len(members) > _MAX_EXACT or all(regions[m].is_contiguous for m in members):
        return [members]
    head = {member: member for member in members}

    def find(member: int) -> int:
        while head[member] != member:
            head[member] = head[head[member]]
            member = head[member]
        return member

    for index, a in enumerate(members):
        for b in members[index + 1 :]:
            if find(a) != find(b) and share_bytes(regions[a], regions[b]):
                head[find(b)] = find(a)
    pieces: dict[int, list[int]] = {}
    for member in members:
        pieces.setdefault(find(member), []).append(member)
    return list(pieces.values())


def _resolve(members: list[int], regions: dict[int, Region]) -> list[Group]:
    """Decides what is stored for members that share bytes."""
    first = regions[members[0]]
    if len(members) == 1 and not first.repeats:
        return []
    start = min(regions[m].start for m in members)
    stop = max(regions[m].stop for m in members)
    base = next(
        (
            m
            for m in members
            if regions[m].is_contiguous and (regions[m].start, regions[m].stop) == (start, stop)
        ),
        None,
    )
    if base is not None:
        return [Group(tuple(members), base, start, stop, same=False)]
    layouts: dict[tuple[object, ...], list[int]] = {}
    for member in members:
        layouts.setdefault(regions[member].layout, []).append(member)
    if len(layouts) == 1 and not first.repeats:
        return [Group(tuple(members), members[0], start, stop, same=True)]
    thin: list[list[int]] = []
    dense: list[int] = []
    apart = 0
    for alike in layouts.values():
        region = regions[alike[0]]
        extent = region.stop - region.start
        apart += min(region.nbytes, extent)
        if extent > _MAX_SPAN * region.nbytes:
            thin.append(alike)
        else:
            dense += alike
    if stop - start <= _MAX_SPAN * apart:
        return [Group(tuple(members), None, start, stop, same=False)]
    # Thin ones are stored apart, and so share with those alike only. The extents of the others
    # cover any span that they make, so this ends.
    groups = [found for alike in thin for found in _resolve(alike, regions)]
    return groups + _groups(sorted(dense), regions)


def _groups(members: list[int], regions: dict[int, Region]) -> list[Group]:
    """Returns the groups of two and more among members that are close to each other."""
    starts = [regions[m].start for m in members]
    stops = [regions[m].stop for m in members]
    groups = []
    for candidate in touching(starts, stops):
        for piece in _connected([members[i] for i in candidate], regions):
            groups += _resolve(piece, regions)
    return groups


def group(
    extents: Iterable[Extents],
    repeating: Iterable[int],
    region_of: Callable[[int], Region],
) -> list[Group]:
    """Finds the leaves that share memory.

    Args:
        extents: Of all members, by device.
        repeating: Numbers of members that share memory with themselves.
        region_of: Returns the ``Region`` of a member. Called only where extents overlap.

    Returns:
        Groups that share memory, also of one member that repeats itself.
    """
    groups: list[Group] = []
    rest = set(repeating)
    for device in extents:
        for candidate in touching(device.starts, device.stops):
            members = [device.numbers[i] for i in candidate]
            regions = {member: region_of(member) for member in members}
            groups += _groups(members, regions)
    for found in groups:
        rest.difference_update(found.members)
    for member in sorted(rest):
        groups += _resolve([member], {member: region_of(member)})
    return groups


def touched_without_gaps(regions: Iterable[Region], start: int, stop: int) -> bool:
    """Whether the regions surely touch every byte of ``[start, stop)``.

    A region with gaps counts for nothing, so a no may be wrong; a yes never is.
    """
    reach = start
    for region in sorted(regions, key=lambda region: region.start):
        if region.start <= reach and region.has_no_gaps:
            reach = max(reach, region.stop)
    return reach >= stop
