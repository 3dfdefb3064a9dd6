# SPDX-License-Identifier: Apache-2.0
"""Memory that leaves are restored into, and conflicts in it.

Leaves conflict if they would write different bytes to the same memory, unless they share it in the
snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch

from actorsnap.format.geometry import extent_bytes
from actorsnap.state.sharing import Region, memory_of, region_of, share_bytes, touching
from actorsnap.state.tensors import TensorOrArray

Target: TypeAlias = TensorOrArray
"""A value that can be restored in place."""
TARGET_TYPES: Final = (torch.Tensor, np.ndarray)

_MAX_EXACT = 128
"""Maximum number of overlapping extents compared in pairs; with more, extents decide."""


def _has_writable_memory(target: object) -> bool:
    if isinstance(target, np.ndarray):
        return bool(target.flags.writeable)
    return isinstance(target, torch.Tensor) and not target.is_meta


def is_writable(target: Target) -> bool:
    """Whether every element has writable memory of its own."""
    if not _has_writable_memory(target):
        return False
    if isinstance(target, torch.Tensor):
        return target.is_contiguous() or is_injective(tuple(target.shape), target.stride())
    return is_injective(target.shape, [abs(stride) // target.itemsize for stride in target.strides])


def is_injective(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether certainly no two elements share memory, and each stride spans the smaller dims."""
    if 0 in shape:
        return True
    reach = 0
    dims = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def matching_region(target: Target, stored: Region) -> Region | None:
    """Returns a writable target's region; None unless its layout is that of ``stored``."""
    region = region_of(target) if _has_writable_memory(target) else None
    if region is None or stored.at(region.start).layout != region.layout:
        return None
    return region


def mark_written(targets: Iterable[Target]) -> None:
    """Makes autograd graphs built on the old values refuse to run backward."""
    tensors = [target for target in targets if isinstance(target, torch.Tensor)]
    torch.autograd.graph.increment_version([each for each in tensors if not each.is_inference()])


class Destination(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Memory of the app state that a leaf is restored into.

    Attributes:
        start, stop: Extent of ``target``.
        base: Path of the entry with the leaf's bytes; a sharded one's content.
        origin: Address for the first byte of ``base``, if target and stored leaf have the same
            layout; else both layouts. Destinations with equal ``base`` and ``origin`` agree about
            every byte.
        device: None for the CPU.
    """

    path: str
    target: Target
    start: int
    stop: int
    base: object
    origin: object
    device: torch.device | None = None

    @property
    def region(self) -> Region:
        """The target's whole extent if strides cannot express it."""
        if isinstance(self.target, torch.Tensor):
            return memory_of(self.target)
        return region_of(self.target) or Region(self.start, 1, (self.stop - self.start,), (1,))


def destination(
    path: str, target: Any, base: object, stored: Region | None = None, origin: object = None
) -> list[Destination]:
    """Returns a list of one; [] if ``target`` has no writable memory.

    Args:
        stored: Region of the leaf in the stored bytes, if it is a view of them.
        origin: Used without ``stored``.
    """
    if not _has_writable_memory(target) or 0 in target.shape:
        return []
    device = None
    if isinstance(target, torch.Tensor):
        if not target.is_cpu:
            device = target.device
        start = target.data_ptr()
        stop = start + extent_bytes(target.shape, target.stride(), target.itemsize)
    else:
        reaches = [(n - 1) * step for n, step in zip(target.shape, target.strides, strict=True)]
        start = target.ctypes.data + sum([reach for reach in reaches if reach < 0])
        stop = target.ctypes.data + sum([reach for reach in reaches if reach > 0])
        stop += target.itemsize
    if stored is not None:
        region = region_of(target)
        if region is not None and stored.at(region.start).layout == region.layout:
            origin = region.start - stored.start
        else:
            is_lazy = region is None and isinstance(target, torch.Tensor)
            origin = (
                stored.layout,
                region and region.layout,
                is_lazy and (target.is_conj(), target.is_neg()),
            )
    return [Destination(path, target, start, stop, base, origin, device)]


def find_conflicts(
    destinations: Sequence[Destination], fixed: Sequence[Destination] = ()
) -> list[tuple[Destination, Destination]]:
    """Returns pairs that cannot both be restored in place: the first keeps its memory.

    May report pairs without a conflict if strides differ from the saved ones, or very many
    destinations overlap.

    Args:
        destinations: In order. The second of a pair gets other memory.
        fixed: Precede ``destinations`` and are written even if they lose, so all conflicts among
            them are reported.
    """
    conflicts: list[tuple[Destination, Destination]] = []
    for device in {each.device for each in (*fixed, *destinations)}:
        here = [each for each in fixed if each.device == device]
        num_fixed = len(here)
        here += [each for each in destinations if each.device == device]
        for piece in touching([each.start for each in here], [each.stop for each in here]):
            if len({(here[n].base, here[n].origin) for n in piece}) > 1:
                conflicts.extend((here[a], here[b]) for a, b in _conflicts(here, num_fixed, piece))
    return conflicts


def _conflicts(
    destinations: Sequence[Destination], num_fixed: int, numbers: Sequence[int]
) -> list[tuple[int, int]]:
    conflicts: list[tuple[int, int]] = []
    open_: list[int] = []
    for number in sorted(numbers, key=lambda number: destinations[number].start):
        begin = destinations[number].start
        open_ = [other for other in open_ if destinations[other].stop > begin]
        kept: list[int] = []
        stays = True
        for other in open_:
            is_exact = len(open_) <= _MAX_EXACT
            if stays and not _agree(destinations[number], destinations[other], is_exact):
                owner, loser = sorted((number, other))
                conflicts.append((owner, loser))
                if loser >= num_fixed:
                    stays = loser != number
                    if stays:
                        continue
            kept.append(other)
        open_ = [*kept, number] if stays else kept
    return conflicts


def _agree(a: Destination, b: Destination, is_exact: bool) -> bool:
    """Whether two destinations with overlapping extents can both be written."""
    if (a.base, a.origin) == (b.base, b.origin):
        return True
    return is_exact and not share_bytes(a.region, b.region)
