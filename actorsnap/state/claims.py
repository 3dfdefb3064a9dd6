"""Which memory of the app state stored leaves are restored into, and who gives way to whom.

Decides whether two leaves would be written to the same memory although other bytes are stored
for each. Memory that leaves share in the app state and in the snapshot alike is no matter. It
must not know entries or storage, nor which keys there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from actorsnap.state.members import Member, is_laid_out
from actorsnap.state.sharing import Region, share_bytes, touching
from actorsnap.state.targets import Target, region_of
from actorsnap.state.tensors import extent_bytes

__all__ = ["Claim", "claim", "disputes"]

_MAX_EXACT = 128
"""Overlapping extents up to which strided targets are compared in pairs. Beyond, extents decide."""


class Claim(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Memory of the app state that a leaf is restored into.

    Attributes:
        path: Of the leaf.
        target: What has the memory.
        start, stop: Its extent.
        base: Path of the entry that has the leaf's bytes; of a sharded one, what stands for
            its content.
        origin: Where the first byte of ``base`` belongs, if the target lies in memory as the
            leaf does in those bytes; else how both lie. Claims with the same ``base`` and
            ``origin`` agree about every byte.
        device: Whose addresses they are; None for the CPU's.
    """

    path: str
    target: Target
    start: int
    stop: int
    base: str
    origin: object
    device: torch.device | None = None

    @property
    def region(self) -> Region:
        """How the target lies in memory; all of its extent where strides cannot tell."""
        target = self.target
        if isinstance(target, torch.Tensor):
            return Region(self.start, target.itemsize, tuple(target.shape), target.stride())
        return region_of(target) or Region(self.start, 1, (self.stop - self.start,), (1,))


def claim(
    path: str, target: Any, base: str, member: Member | None = None, origin: object = None
) -> list[Claim]:
    """Returns the claim of a leaf, if its target has memory that may be written.

    Args:
        path: Of the leaf.
        target: What it is restored into; anything.
        base: See ``Claim``.
        member: How the leaf lies in the stored bytes, if it is a view of them.
        origin: See ``Claim``; where there is no member.
    """
    device = None
    if isinstance(target, np.ndarray):
        if not target.flags.writeable:
            return []
        reaches = [
            (size - 1) * stride for size, stride in zip(target.shape, target.strides, strict=True)
        ]
        start = stop = target.ctypes.data
        start += sum([reach for reach in reaches if reach < 0])
        stop += sum([reach for reach in reaches if reach > 0]) + target.itemsize
    elif isinstance(target, torch.Tensor) and not target.is_meta:
        if not target.is_cpu:
            device = target.device
        start = target.data_ptr()
        stop = start + extent_bytes(target.shape, target.stride(), target.itemsize)
    else:
        return []
    if 0 in target.shape:
        return []
    if member is not None:
        region = region_of(target)
        if region is not None and is_laid_out(member, region):
            origin = region.start - member.offset
        else:
            is_lazy = region is None and isinstance(target, torch.Tensor)
            origin = (
                member.region(0).layout,
                region and region.layout,
                is_lazy and (target.is_conj(), target.is_neg()),
            )
    return [Claim(path, target, start, stop, base, origin, device)]


def disputes(claims: Sequence[Claim], fixed: Sequence[Claim] = ()) -> list[tuple[Claim, Claim]]:
    """Returns the claims that cannot both be met: who keeps the memory, and who gives way.

    One that is real is always seen. One that is none may be, between leaves of which one is
    restored with other strides than it was saved with, or among very many in one place.

    Args:
        claims: Who comes first keeps the memory; who gives way gets other memory.
        fixed: Come before ``claims``, and are written to their memory even if they give way:
            each is in as many disputes as it has with others of them.
    """
    found: list[tuple[Claim, Claim]] = []
    for device in {each.device for each in (*fixed, *claims)}:
        here = [each for each in fixed if each.device == device]
        num_fixed = len(here)
        here += [each for each in claims if each.device == device]
        for piece in touching([each.start for each in here], [each.stop for each in here]):
            if len({(here[n].base, here[n].origin) for n in piece}) > 1:
                found.extend((here[a], here[b]) for a, b in _disputes(here, num_fixed, piece))
    return found


def _disputes(
    claims: Sequence[Claim], num_fixed: int, numbers: Sequence[int]
) -> list[tuple[int, int]]:
    """As ``disputes``, among claims that form one piece of memory: from its start to its end."""
    found: list[tuple[int, int]] = []
    open_: list[int] = []
    for number in sorted(numbers, key=lambda number: claims[number].start):
        begin = claims[number].start
        open_ = [other for other in open_ if claims[other].stop > begin]
        kept: list[int] = []
        stays = True
        for other in open_:
            if stays and not _agree(claims[number], claims[other], len(open_) <= _MAX_EXACT):
                owner, loser = sorted((number, other))
                found.append((owner, loser))
                if loser >= num_fixed:
                    stays = loser != number
                    if stays:
                        continue
            kept.append(other)
        open_ = [*kept, number] if stays else kept
    return found


def _agree(a: Claim, b: Claim, is_exact: bool) -> bool:
    """Whether two claims, whose extents overlap, can both be met."""
    if (a.base, a.origin) == (b.base, b.origin):
        return True
    return is_exact and not share_bytes(a.region, b.region)
