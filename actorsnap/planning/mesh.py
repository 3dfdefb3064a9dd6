"""Computes the boxes of a distributed tensor that one rank of a mesh holds, as ``torch.chunk``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeAlias

import msgspec

from actorsnap.format.geometry import Box

__all__ = ["Placement", "Placed", "local_shape", "place"]

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


def _all_runs(shape: Sequence[int], cuts: Sequence[Placement]) -> list[list[Run]]:
    for cut in cuts:
        if not 0 <= cut.dim < len(shape) or not 0 <= cut.index < cut.parts or cut.groups < 1:
            raise ValueError(f"{cut} does not cut a tensor of shape {tuple(shape)}")
    return [_runs(size, [cut for cut in cuts if cut.dim == dim]) for dim, size in enumerate(shape)]


def local_shape(shape: Sequence[int], cuts: Sequence[Placement]) -> tuple[int, ...]:
    """Returns the shape of a rank's local tensor after these cuts, in order."""
    return tuple([sum([stop - start for start, stop in runs]) for runs in _all_runs(shape, cuts)])


def place(shape: Sequence[int], cuts: Sequence[Placement]) -> list[Placed]:
    """Returns the boxes that a rank holds, in the C order of its local tensor.

    Several if a dim is cut in groups. Every rank holds the whole (empty) box of a tensor without
    elements, so that a manifest names it.

    Raises:
        ValueError: A cut does not fit the shape.
    """
    all_runs = _all_runs(shape, cuts)
    if 0 in shape:
        whole = Box.whole(shape)
        return [Placed(whole, whole)]
    dims: list[list[tuple[int, int, int]]] = []  # offset, offset in the local tensor, size
    for runs in all_runs:
        at = 0
        dim = []
        for start, stop in runs:
            dim.append((start, at, stop - start))
            at += stop - start
        dims.append(dim)
    found = []
    for parts in product(*dims):
        sizes = tuple([part[2] for part in parts])
        box = Box(tuple([part[0] for part in parts]), sizes)
        found.append(Placed(box, Box(tuple([part[1] for part in parts]), sizes)))
    return found
