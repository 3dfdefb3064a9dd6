# SPDX-License-Identifier: Apache-2.0
"""Memory regions of tensors and arrays, and groups of leaves that share memory.

Implements "Tensors that overlap in memory are stored once" of ``docs/format.md``: the base of a
group is one leaf or the whole span, or members are stored separately. It must not know paths,
entries or app states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from actorsnap.format.geometry import c_strides, extent_bytes
from actorsnap.state.sources import memory_at
from actorsnap.state.tensors import TensorOrArray, has_conj_or_neg_bit

_MAX_EXACT = 128
"""Maximum number of strided members compared in pairs; with more, extents decide."""

_MAX_WORK = 10_000
"""Effort limit of ``numpy.shares_memory``."""

_MAX_SPAN = 2
"""Maximum ratio of a stored span's size to its members' total size. A row and a column of a large
matrix share one element, but the user did not save the matrix."""


class Region(msgspec.Struct, frozen=True, gc=False):
    """The memory of one leaf.

    Attributes:
        start: Address of the first element.
        shape, strides: In elements; strides are not negative.
    """

    start: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + extent_bytes(self.shape, self.strides, self.itemsize)

    @property
    def nbytes(self) -> int:
        """Includes repeated elements."""
        return prod(self.shape) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        return 0 in self.shape or all(
            stride == expected or size == 1
            for size, stride, expected in zip(
                self.shape, self.strides, c_strides(self.shape), strict=True
            )
        )

    @property
    def repeats(self) -> bool:
        """Whether elements certainly share memory."""
        return self.stop - self.start < self.nbytes

    @property
    def has_no_gaps(self) -> bool:
        """Whether every byte of the extent belongs to an element."""
        run = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride > run:
                    return False
                run += stride * (size - 1)
        return True

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for regions with the same memory for each element."""
        strides: tuple[int, ...] = ()
        if 0 not in self.shape:
            strides = tuple(
                [0 if n == 1 else step for n, step in zip(self.shape, self.strides, strict=True)]
            )
        return (self.start, self.itemsize, self.shape, strides)

    def at(self, start: int) -> Region:
        """Returns the same layout at another address."""
        return Region(start, self.itemsize, self.shape, self.strides)


def memory_of(tensor: torch.Tensor) -> Region:
    """Returns the region of a tensor, lazily conjugated or not."""
    return Region(tensor.data_ptr(), tensor.itemsize, tuple(tensor.shape), tensor.stride())


def region_of(value: TensorOrArray) -> Region | None:
    """Returns None if strides cannot express the memory."""
    if isinstance(value, torch.Tensor):
        return None if has_conj_or_neg_bit(value) else memory_of(value)
    itemsize = value.itemsize
    if any([stride < 0 or stride % itemsize for stride in value.strides]):
        return None
    strides = tuple([stride // itemsize for stride in value.strides])
    return Region(value.ctypes.data, itemsize, value.shape, strides)


class Extents:
    """Non-empty address ranges of members, in the memory of one device."""

    __slots__ = ("numbers", "starts", "stops")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, number: int, start: int, stop: int) -> None:
        self.numbers.append(number)
        self.starts.append(start)
        self.stops.append(stop)


class AliasGroup(msgspec.Struct, frozen=True):
    """Members that share memory.

    Attributes:
        members: Ascending.
        base: Number of the member that is stored for all; None for the span.
        start, stop: The span that the group touches.
        same: Whether all have one layout. Views then have C-order strides, like the stored base.
    """

    members: tuple[int, ...]
    base: int | None
    start: int
    stop: int
    same: bool


def touching(starts: Sequence[int], stops: Sequence[int]) -> list[list[int]]:
    """Returns groups of two or more extents that overlap transitively, as indices."""
    if len(starts) < 2:
        return []
    low = np.asarray(starts, dtype=np.uint64)
    high = np.asarray(stops, dtype=np.uint64)
    order = np.argsort(low, kind="stable")
    low = low[order]
    reach = np.maximum.accumulate(high[order])
    # No earlier extent reaches a new group.
    begins = np.flatnonzero(low[1:] >= reach[:-1]) + 1
    if len(begins) == len(order) - 1:
        return []
    return [sorted(piece.tolist()) for piece in np.split(order, begins) if len(piece) > 1]


def _array_over(region: Region) -> Any:
    """Returns an array that is never read, for ``numpy.shares_memory``."""
    memory = memory_at(region.start, region.stop - region.start, None)
    strides = [stride * region.itemsize for stride in region.strides]
    return np.ndarray(region.shape, f"V{region.itemsize}", memory, 0, strides)


def share_bytes(a: Region, b: Region) -> bool:
    """Returns True if undecided."""
    if a.stop <= b.start or b.stop <= a.start:
        return False
    try:
        return bool(np.shares_memory(_array_over(a), _array_over(b), _MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _connected(members: list[int], regions: dict[int, Region]) -> list[list[int]]:
    """Splits members whose extents overlap into groups that share bytes.

    Interleaved columns of a matrix overlap, but share no byte.
    """
    if len(members) > _MAX_EXACT or all(regions[m].is_contiguous for m in members):
        return [members]
    groups: list[list[int]] = []
    for member in members:
        own, others = [member], []
        for group in groups:
            if any(share_bytes(regions[member], regions[other]) for other in group):
                own += group
            else:
                others.append(group)
        groups = [*others, sorted(own)]
    return sorted(groups)


def _resolve(members: list[int], regions: dict[int, Region]) -> list[AliasGroup]:
    """Returns the groups to store for members that share bytes."""
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
        return [AliasGroup(tuple(members), base, start, stop, same=False)]
    layouts: dict[tuple[object, ...], list[int]] = {}
    for member in members:
        layouts.setdefault(regions[member].layout, []).append(member)
    if len(layouts) == 1 and not first.repeats:
        return [AliasGroup(tuple(members), members[0], start, stop, same=True)]
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
        return [AliasGroup(tuple(members), None, start, stop, same=False)]
    # Thin members are stored separately, so share only with equal ones. Other extents are dense
    # enough for any span of theirs, so this terminates.
    groups = [each for alike in thin for each in _resolve(alike, regions)]
    return groups + _groups(sorted(dense), regions)


def _groups(members: list[int], regions: dict[int, Region]) -> list[AliasGroup]:
    starts = [regions[m].start for m in members]
    stops = [regions[m].stop for m in members]
    groups = []
    for candidate in touching(starts, stops):
        for piece in _connected([members[i] for i in candidate], regions):
            groups += _resolve(piece, regions)
    return groups


def find_groups(
    extents: Iterable[Extents],
    repeating: Iterable[int],
    region_of_member: Callable[[int], Region],
) -> list[AliasGroup]:
    """Returns groups of leaves that share memory, also of one leaf that repeats elements.

    Args:
        extents: One per device.
        repeating: Members whose elements share memory.
        region_of_member: Called for overlaps and repeats only.
    """
    groups: list[AliasGroup] = []
    for device in extents:
        for candidate in touching(device.starts, device.stops):
            members = [device.numbers[i] for i in candidate]
            groups += _groups(members, {member: region_of_member(member) for member in members})
    grouped = {member for group in groups for member in group.members}
    for member in sorted(set(repeating) - grouped):
        groups += _resolve([member], {member: region_of_member(member)})
    return groups


def touched_without_gaps(regions: Iterable[Region], start: int, stop: int) -> bool:
    """Whether regions without gaps certainly touch every byte of ``[start, stop)``."""
    reach = start
    for region in sorted(regions, key=lambda region: region.start):
        if region.start <= reach and region.has_no_gaps:
            reach = max(reach, region.stop)
    return reach >= stop
