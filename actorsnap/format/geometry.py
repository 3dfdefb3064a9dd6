# SPDX-License-Identifier: Apache-2.0
"""Boxes in index space, and their flat ranges. The only index arithmetic of the package.

A box is the part ``offsets[d] <= i[d] < offsets[d] + sizes[d]`` of a tensor's indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from math import prod
from typing import TypeAlias

import msgspec


class Box(msgspec.Struct, frozen=True, gc=False):
    """Offsets and sizes in global index space, in elements. Zero dims hold one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"a box needs as many offsets as sizes: {self.offsets}, {self.sizes}")
        # min() is much faster than any().
        if self.sizes and (min(self.sizes) < 0 or min(self.offsets) < 0):
            raise ValueError(
                f"offsets and sizes must not be negative: {self.offsets}, {self.sizes}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def volume(self) -> int:
        return prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple([o + s for o, s in zip(self.offsets, self.sizes, strict=True)])

    def intersect(self, other: Box) -> Box | None:
        """Returns the shared box; None if it is empty."""
        offsets: list[int] = []
        sizes: list[int] = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = a if a > b else b
            size = min(a + n, b + m) - start
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Returns whether this box contains ``other``. The bounds of an empty ``other`` count."""
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def relative_to(self, outer: Box) -> Box:
        """Returns the same box, counted from the start of ``outer``, which contains it."""
        if not outer.contains(self):
            raise ValueError(f"{self} is not within {outer}")
        offsets = tuple([a - b for a, b in zip(self.offsets, outer.offsets, strict=True)])
        return Box(offsets, self.sizes)

    def split(self, dim: int, at: int) -> tuple[Box, Box]:
        """Cuts along ``dim``: the first ``at`` indices of this box, and the rest."""
        if not 0 <= dim < len(self.sizes) or not 0 <= at <= self.sizes[dim]:
            raise ValueError(f"{self} cannot be split along dim {dim} after {at} indices")
        o, s = self.offsets, self.sizes
        return (
            Box(o, (*s[:dim], at, *s[dim + 1 :])),
            Box((*o[:dim], o[dim] + at, *o[dim + 1 :]), (*s[:dim], s[dim] - at, *s[dim + 1 :])),
        )


def covers_exactly(whole: Box, parts: Sequence[Box]) -> bool:
    """Whether ``parts`` hold each element of ``whole`` once, and no others.

    Disjoint parts inside ``whole`` cover it if their volumes add up; empty parts are ignored. A
    sweep along a dim separates parts into groups that share no index of that dim; groups are swept
    along the next dim. Meshes and flat ranges separate fully: O(n log n). Parts that no dim
    separates (a pinwheel) are compared in pairs.
    """
    parts = [part for part in parts if not part.is_empty]
    if not all(whole.contains(part) for part in parts):
        return False
    if sum(part.volume for part in parts) != whole.volume:
        return False
    pending = [parts] if len(parts) > 1 else []
    while pending:
        group = pending.pop()
        for dim in range(whole.ndim):
            groups = _separate(group, dim)
            if len(groups) > 1:
                pending.extend(g for g in groups if len(g) > 1)
                break
        else:
            if any(a.intersect(b) is not None for a, b in combinations(group, 2)):
                return False
    return True


def _separate(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Returns groups of boxes that share no index of ``dim``."""
    groups: list[list[Box]] = []
    reach = -1
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        start = box.offsets[dim]
        if start >= reach:
            groups.append([])
        groups[-1].append(box)
        reach = max(reach, start + box.sizes[dim])
    return groups


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a C-ordered array, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return tuple(strides)


def extent_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    last = sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
    return (last + 1) * itemsize


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns the C-order flat element range ``[start, stop)`` of ``shape`` as boxes, in C order.

    Each is a contiguous flat range. At most ``2 * ndim - 1``: rows up to a slab's end, whole slabs,
    and rows down to ``stop``.
    """
    total = prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"flat range [{start}, {stop}) is not within shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    strides = c_strides(shape)
    ndim = len(shape)
    boxes: list[Box] = []
    position = start
    while position < stop:
        # The outermost dim whose slab begins here and ends before stop.
        dim = 0
        while position % strides[dim] or position + strides[dim] > stop:
            dim += 1
        parent = strides[dim - 1] if dim else total
        end = min(stop, position - position % parent + parent)
        count = (end - position) // strides[dim]
        index = [position // strides[d] % shape[d] for d in range(dim + 1)]
        boxes.append(
            Box(
                (*index, *[0] * (ndim - dim - 1)),
                (*[1] * dim, count, *shape[dim + 1 :]),
            )
        )
        position += count * strides[dim]
    return boxes


# The boxes of a distributed tensor that one rank of a mesh holds, as ``torch.chunk``


Run: TypeAlias = tuple[int, int]
"""Indices ``[start, stop)`` along a dim."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A mesh axis that cuts a dim of a tensor, seen from one rank.

    Attributes:
        parts, index: Ranks along the axis, and this rank's position.
        groups: Pieces that the dim is cut into first; each is then cut into ``parts``. FSDP2 uses
            several for dims that tensor parallelism cuts further to the right.
    """

    dim: int
    parts: int
    index: int
    groups: int = 1


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A box that a rank holds, and the same elements in its local tensor."""

    box: Box
    local: Box


def _chunk(size: int, parts: int, index: int) -> Run:
    """The last parts are short."""
    step = -(-size // parts)
    return min(size, step * index), min(size, step * (index + 1))


def _select(runs: Sequence[Run], wanted: Iterable[Run]) -> list[Run]:
    """Returns the global indices at local ones: ``wanted`` counts along all of ``runs``."""
    found: list[Run] = []
    for first, stop in wanted:
        at = 0
        for start, end in runs:
            size = end - start
            low, high = max(first, at), min(stop, at + size)
            if low < high:
                begin = start + low - at
                if found and found[-1][1] == begin:
                    found[-1] = (found[-1][0], begin + high - low)
                else:
                    found.append((begin, begin + high - low))
            at += size
    return found


def _runs(size: int, cuts: Iterable[Placement]) -> list[Run]:
    runs = [(0, size)] if size else []
    held = size
    for cut in cuts:
        wanted: list[Run] = []
        for group in range(cut.groups):
            start, stop = _chunk(held, cut.groups, group)
            low, high = _chunk(stop - start, cut.parts, cut.index)
            if low < high:
                wanted.append((start + low, start + high))
        runs = _select(runs, wanted)
        held = sum([stop - start for start, stop in runs])
    return runs


def place(shape: Sequence[int], cuts: Sequence[Placement]) -> tuple[list[Placed], tuple[int, ...]]:
    """Returns the boxes that a rank holds, in the C order of its local tensor, and its shape.

    Several if a dim is cut in groups. Every rank holds the whole (empty) box of a tensor without
    elements, so that a manifest names it.

    Raises:
        ValueError: A cut does not fit the shape.
    """
    for cut in cuts:
        if not 0 <= cut.dim < len(shape) or not 0 <= cut.index < cut.parts or cut.groups < 1:
            raise ValueError(f"{cut} does not cut a tensor of shape {tuple(shape)}")
    dims: list[list[tuple[int, int, int]]] = []  # offset, offset in the local tensor, size
    local_shape: list[int] = []
    for dim, size in enumerate(shape):
        at = 0
        dims.append([])
        for start, stop in _runs(size, [cut for cut in cuts if cut.dim == dim]):
            dims[-1].append((start, at, stop - start))
            at += stop - start
        local_shape.append(at)
    found = []
    for parts in product(*dims):
        sizes = tuple([part[2] for part in parts])
        box = Box(tuple([part[0] for part in parts]), sizes)
        found.append(Placed(box, Box(tuple([part[1] for part in parts]), sizes)))
    if 0 in shape:
        whole = Box.whole(shape)
        found = [Placed(whole, whole)]
    return found, tuple(local_shape)
