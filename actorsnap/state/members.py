"""Finds memory for stored bytes that one or several leaves are views of.

Decides, for one stored range, which part of it is read, how often and into what: the targets'
own memory where that is shaped as the stored bytes are, memory for just the elements of a view
that is read alone, else fresh memory that views are laid over or copied from. It must not know
entries or storage.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from actorsnap.state import targets
from actorsnap.state.memory import ByteSink, MemorySink
from actorsnap.state.objects import NUMPY_DTYPES
from actorsnap.state.sharing import Region, touched_without_gaps
from actorsnap.state.tensors import (
    CARRIERS,
    DTYPES,
    ClippedSink,
    StridedSink,
    c_strides,
    empty_tensor,
    extent_bytes,
)

__all__ = ["Member", "Placed", "is_laid_out", "place", "settle"]


class Member(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A leaf that is a view of stored bytes: all of them, or some.

    Attributes:
        path: Of the leaf.
        kind: ``type`` of its entry.
        dtype: Of its entry.
        shape, strides: In elements.
        offset: In bytes from the first stored one.
        requires_grad: Of a fresh tensor.
        target: The app state's tensor or array of the same kind, dtype and shape; anything
            else means that a fresh one is made.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    target: object

    @property
    def is_numpy(self) -> bool:
        """Whether it is an array, not a tensor."""
        return self.kind in ("numpy", "numpy_scalar")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        if self.is_numpy:
            return NUMPY_DTYPES[self.dtype][0].itemsize
        return DTYPES[self.dtype].itemsize

    def region(self, start: int) -> Region:
        """Where the leaf lies if the first stored byte lies at ``start``."""
        return Region(start + self.offset, self.itemsize, self.shape, self.strides)


class Placed(msgspec.Struct, frozen=True):
    """How stored bytes become members.

    Attributes:
        start, stop: The bytes to read: whole blocks, or up to the end.
        sinks: Each takes all of them. None where there is nothing to read.
        finish: What to do when they are filled.
    """

    start: int
    stop: int
    sinks: list[ByteSink]
    finish: Callable[[], None] | None


def place(
    nbytes: int, members: list[Member], values: dict[str, object], *, block_bytes: int
) -> Placed:
    """Finds memory for those of ``nbytes`` stored bytes that members are made of.

    Args:
        nbytes: How many were stored.
        members: The leaves that are made of them.
        values: Gets every member's value by its path; some only when ``finish`` has run.
        block_bytes: Bytes are read in blocks of this size only.

    Raises:
        MemoryError: There is not so much memory.
    """
    regions = [member.region(0) for member in members if 0 not in member.shape]
    low = min([region.start for region in regions], default=0)
    high = max([region.stop for region in regions], default=0)
    # What lies on multiples of its item size still does so, counted from here.
    low -= low % max([region.itemsize for region in regions], default=1)
    start = low - low % block_bytes
    stop = min(high + -high % block_bytes, nbytes)
    if low:
        members = [
            msgspec.structs.replace(member, offset=max(0, member.offset - low))
            for member in members
        ]
    sinks, finish = _place(high - low, members, values)
    if start == stop:
        sinks = []
    elif (start, stop) != (low, high):
        sinks = [ClippedSink(sink, low - start, stop - start) for sink in sinks]
    return Placed(start, stop, sinks, finish)


def _place(
    nbytes: int, members: list[Member], values: dict[str, object]
) -> tuple[list[ByteSink], Callable[[], None] | None]:
    """As ``place``, for all of ``nbytes`` bytes."""
    sinks: list[ByteSink] = []
    left: list[Member] = []
    spans: dict[tuple[object, int], list[tuple[Member, Region]]] = {}
    for member in members:
        target = member.target
        if not isinstance(target, torch.Tensor | np.ndarray):
            left.append(member)
            continue
        region = targets.region_of(target)
        if region is None or not is_laid_out(member, region):
            left.append(member)
            continue
        device = target.device if isinstance(target, torch.Tensor) else torch.device("cpu")
        start = region.start - member.offset
        spans.setdefault((device, start), []).append((member, region))
    for (_, start), found in spans.items():
        sink = _span(start, nbytes, found)
        if sink is None:
            left.extend(member for member, _ in found)
            continue
        sinks.append(sink)
        values.update((member.path, member.target) for member, _ in found)
    left = _place_whole(nbytes, left, sinks, values)
    if not left:
        return sinks, None
    if left == members and len(left) == 1 and _is_separable(left[0]):
        return _place_alone(left[0], sinks, values)
    return _place_fresh(nbytes, left, sinks, values)


def is_laid_out(member: Member, region: Region) -> bool:
    """Whether a target lies in memory as the leaf lies in the stored bytes."""
    if not targets_are_writable(member.target):
        return False
    return member.region(region.start - member.offset).same_layout(region)


def targets_are_writable(target: object) -> bool:
    """Whether memory of the target may be written; elements may share it."""
    if isinstance(target, np.ndarray):
        return bool(target.flags.writeable)
    return isinstance(target, torch.Tensor) and not target.is_meta


def _span(start: int, nbytes: int, found: list[tuple[Member, Region]]) -> ByteSink | None:
    # Bytes between the leaves may belong to someone else: they are not overwritten.
    if not touched_without_gaps([region for _, region in found], start, start + nbytes):
        return None
    owners: list[Any] = [member.target for member, _ in found]
    return targets.span_sink(start, nbytes, owners)


def _place_whole(
    nbytes: int, members: list[Member], sinks: list[ByteSink], values: dict[str, object]
) -> list[Member]:
    """Places targets of another layout that take all bytes, in order. Returns the others."""
    left: list[Member] = []
    placed: list[Region] = []
    for member in members:
        target: Any = member.target
        is_whole = (
            isinstance(target, torch.Tensor | np.ndarray)
            and member.offset == 0
            and member.region(0).is_contiguous
            and member.itemsize * prod(member.shape) == nbytes
            and targets.is_writable(target)
        )
        if not is_whole:
            left.append(member)
            continue
        region = targets.region_of(target)
        if region is None or not any(region.same_layout(other) for other in placed):
            sinks.append(targets.sink_of(target))
            if region is not None:
                placed.append(region)
        values[member.path] = target
    return left


def _is_separable(member: Member) -> bool:
    """Whether the member's elements can be told apart in any piece of its memory."""
    steps = [(n, step) for n, step in zip(member.shape, member.strides, strict=True) if step]
    return (
        0 not in member.shape
        and member.offset == 0  # else elements begin at odd addresses
        and targets.is_injective([n for n, _ in steps], [step for _, step in steps])
    )


def _place_alone(
    member: Member, sinks: list[ByteSink], values: dict[str, object]
) -> tuple[list[ByteSink], Callable[[], None] | None]:
    """Places a member that all bytes are read for: those between its elements are not kept."""
    target = member.target
    if isinstance(target, torch.Tensor | np.ndarray) and targets.is_writable(target):
        sink = targets.strided_sink(target, member.strides)
        if sink is not None:
            sinks.append(sink)
            values[member.path] = target
            return sinks, None
    region = member.region(0)
    if region.has_no_gaps:
        return _place_fresh(region.stop, [member], sinks, values)
    # What is repeated is kept once.
    sizes = tuple([n if step else 1 for n, step in zip(member.shape, member.strides, strict=True)])
    memory = empty_tensor((prod(sizes) * member.itemsize,), torch.uint8)
    elements = memory.view(CARRIERS[member.itemsize]).view(sizes)
    sinks.append(StridedSink(elements, member.strides))
    strides = [step and dense for step, dense in zip(member.strides, c_strides(sizes), strict=True)]
    compact = msgspec.structs.replace(member, strides=tuple(strides))
    return sinks, settle(compact, _laid_over(memory, compact), values)


def _place_fresh(
    nbytes: int, members: list[Member], sinks: list[ByteSink], values: dict[str, object]
) -> tuple[list[ByteSink], Callable[[], None] | None]:
    """Lays members over fresh memory; those with a target are copied from there later."""
    first = members[0]
    if len(members) == 1 and not first.is_numpy and first.region(0).nbytes == nbytes:
        # The usual case by far, without the detour over raw memory.
        if first.offset == 0 and first.region(0).is_contiguous:
            tensor = empty_tensor(first.shape, DTYPES[first.dtype])
            sinks.append(MemorySink(tensor.data_ptr(), nbytes, tensor))
            return sinks, settle(first, tensor, values)
    memory = empty_tensor((nbytes,), torch.uint8)
    sinks.append(MemorySink(memory.data_ptr(), nbytes, memory))
    finishers = []
    for member in members:
        if member.offset % member.itemsize:
            finishers.append(_realign(member, memory, values))
            continue
        finish = settle(member, _laid_over(memory, member), values)
        if finish is not None:
            finishers.append(finish)
    if not finishers:
        return sinks, None

    def finish_all() -> None:
        for finish in finishers:
            finish()

    return sinks, finish_all


def _laid_over(memory: torch.Tensor, member: Member) -> Any:
    """Returns a member as a view of raw memory."""
    if member.is_numpy:
        dtype = NUMPY_DTYPES[member.dtype][0]
        strides = tuple([stride * dtype.itemsize for stride in member.strides])
        return np.ndarray(member.shape, dtype, memory.numpy(), member.offset, strides)
    dtype_ = DTYPES[member.dtype]
    tensor = empty_tensor((0,), dtype_)
    offset = member.offset // member.itemsize
    return tensor.set_(memory.untyped_storage(), offset, member.shape, member.strides)


def _realign(member: Member, memory: torch.Tensor, values: dict[str, object]) -> Callable[[], None]:
    """Torch has no tensors at odd addresses: such a member gets a copy of its bytes."""

    def finish() -> None:
        size = extent_bytes(member.shape, member.strides, member.itemsize)
        own = memory[member.offset : member.offset + size].clone()
        at_zero = msgspec.structs.replace(member, offset=0)
        then = settle(at_zero, _laid_over(own, at_zero), values)
        if then is not None:
            then()

    return finish


def settle(member: Member, fresh: Any, values: dict[str, object]) -> Callable[[], None] | None:
    """Makes ``fresh`` the member's value, now or when its bytes are there."""
    target = member.target
    path = member.path
    if isinstance(target, torch.Tensor) and not target.is_meta:

        def assign() -> None:
            value = targets.assign_tensor(target, fresh)
            if value is fresh:
                value = targets.typed(fresh, member.kind, member.requires_grad)
            values[path] = value

        return assign
    if isinstance(target, np.ndarray):

        def assign_array() -> None:
            values[path] = targets.assign_array(target, fresh)

        return assign_array
    if member.kind == "numpy_scalar":

        def take_scalar() -> None:
            values[path] = fresh[()]

        return take_scalar
    values[path] = (
        fresh if member.is_numpy else targets.typed(fresh, member.kind, member.requires_grad)
    )
    return None
