# SPDX-License-Identifier: Apache-2.0
"""Second pass of a restore: finds memory for the bytes of matched leaves.

Reads whole checksum blocks: into the target's memory if it has the stored layout, through a sink if
it has another one, else into fresh memory. Writes nothing to a target. Leaves that are views of the
same stored bytes share one read. In this order:

1. Targets that together have the stored layout take the bytes directly.
2. A view that is read alone takes only its elements.
3. Other views get fresh memory and are copied afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from actorsnap.errors import FormatError, IncompatibleState
from actorsnap.format.geometry import Box, c_strides
from actorsnap.format.manifest import BytesEntry, CompositeEntry, TensorEntry, ViewEntry
from actorsnap.planning.index import ShardedEntry
from actorsnap.planning.restore import BoxPlanner
from actorsnap.planning.shards import Shard, Shards
from actorsnap.state.composite import is_composite, take_apart
from actorsnap.state.distributed import LocalPiece, Ranks, is_distributed
from actorsnap.state.objects import NUMPY_DTYPES
from actorsnap.state.restore.aliasing import (
    Destination,
    Target,
    destination,
    is_injective,
    is_writable,
    matching_region,
)
from actorsnap.state.restore.checks import NUMPY_KINDS, itemsize_of
from actorsnap.state.restore.match import Match, Pair
from actorsnap.state.restore.reads import BoxReads, Reads, ReturnLanes, Wanted, slice_stored
from actorsnap.state.sharing import Region, region_of, touched_without_gaps
from actorsnap.state.sources import ByteSink, HostMemory
from actorsnap.state.tensors import (
    CARRIERS,
    DTYPES,
    ClippedSink,
    DeviceSink,
    ExtentSink,
    StridedMemory,
    as_bytes,
    empty_tensor,
    flat_bytes,
    storage_bytes,
    tensor_type,
)
from actorsnap.state.tree import part_path


class Fresh(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A leaf in fresh memory.

    Attributes:
        target: Gets a copy, if it can take one.
        value: The leaf; with a ``region``, raw bytes.
        region: Layout in ``value`` of an unaligned leaf, which torch cannot express.
    """

    entry: TensorEntry | ViewEntry | ShardedEntry
    target: Target | None
    value: Any
    region: Region | None = None


@dataclass(slots=True)
class Allocation:
    """Memory for the bytes of a match.

    Attributes:
        reads: All writes to a target before ``KeyRestore.build``.
        surplus_bytes: Bytes of ``reads`` outside of the boxes of distributed targets.
        destinations: Memory of the target that is written to.
        values: Targets that the reads complete, by path.
        buffers: Leaves to decode.
        spread: Views to copy into a distributed target; ``fresh`` has the whole.
        casts: Of distributed targets, by path: their pieces, each with one of the stored dtype.
        write_backs: See ``Sharding``; after all else.
        lanes: By device. Made in the thread of the caller, whose streams they use.
    """

    reads: Reads = field(default_factory=Reads)
    surplus_bytes: int = 0
    destinations: list[Destination] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    fresh: list[Fresh] = field(default_factory=list)
    buffers: list[tuple[Pair, bytearray]] = field(default_factory=list)
    spread: list[Pair] = field(default_factory=list)
    casts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    write_backs: list[Callable[[], None]] = field(default_factory=list)
    lanes: ReturnLanes = field(default_factory=ReturnLanes)


class _Member(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A view of stored bytes; its region is relative to their first."""

    entry: TensorEntry | ViewEntry
    target: Target | None
    region: Region


def find_memory(match: Match) -> Allocation:
    """Finds memory for all leaves.

    A leaf that ranks stored with different values keeps that of its target, as a mismatch.

    Raises:
        FormatError: Shards overlap or do not cover their tensor.
        IncompatibleState: Ranks stored different values of a leaf without a target.
        MemoryError: Names the leaf.
    """
    memory, planner = Allocation(), BoxPlanner()
    contested: set[str] = set()
    views: dict[str, list[_Member]] = {}
    for pair in match.pairs:
        entry = pair.entry
        match entry:
            case TensorEntry() if pair.sharding is None and entry.path not in match.bases:
                _add_tensor(memory, match, pair, entry)
            case TensorEntry() if pair.sharding is not None:
                shards = Shards.of([Shard(Box.whole(entry.shape), entry.data)])
                _add_boxes(memory, planner, pair, entry, shards, entry.path)
            case TensorEntry() | ViewEntry():
                _add_view(memory, views, pair, entry)
            case ShardedEntry():
                try:
                    _add_boxes(memory, planner, pair, entry, entry.shards, _Content(entry))
                except IncompatibleState as error:
                    if pair.target is None:
                        raise
                    match.mismatched.extend(error.mismatched)
                    match.values[entry.path] = pair.target
                    contested.add(entry.path)
                    continue
            case BytesEntry():
                _add_buffer(memory, match, pair, entry)
        if pair.sharding is not None and pair.sharding.write_back is not None:
            memory.write_backs.append(pair.sharding.write_back)
    match.pairs[:] = [pair for pair in match.pairs if pair.entry.path not in contested]
    for pair in match.composites:
        _add_parts(memory, match, views, pair)
    for path, members in views.items():
        _add_members(memory, match, match.bases[path], members)
    return memory


def _holders(match: Match, entry: TensorEntry | BytesEntry) -> Ranks | None:
    return None if entry.replicated or match.world_size == 1 else ()


def _add_buffer(memory: Allocation, match: Match, pair: Pair, entry: BytesEntry) -> None:
    nbytes = entry.data.stop - entry.data.start
    try:
        data = bytearray(nbytes)
    except MemoryError as error:
        raise MemoryError(f"{entry.path!r}: no memory for {nbytes} bytes") from error
    memory.destinations += destination(entry.path, pair.target, entry.path)
    if nbytes:
        sink = as_bytes(np.frombuffer(data, np.uint8))
        memory.reads.append(Wanted(entry.data, sink, _holders(match, entry)))
    memory.buffers.append((pair, data))


def _add_tensor(memory: Allocation, match: Match, pair: Pair, entry: TensorEntry) -> None:
    path, data, target = entry.path, entry.data, pair.target
    nbytes = data.stop - data.start
    sink: ByteSink | None = None
    if pair.address is not None and target is not None:
        if nbytes:
            start, device = pair.address, None
            assert isinstance(target, torch.Tensor)
            if target.is_cpu:
                sink = HostMemory(start, nbytes, target)
            else:
                device = target.device
                sink = DeviceSink(flat_bytes(target), memory.lanes.of(device), 0, nbytes)
            memory.destinations.append(
                Destination(path, target, start, start + nbytes, path, start, device)
            )
        memory.values[path] = target
    elif target is None and pair.dtype is not None:
        tensor = empty_tensor(path, entry.shape, pair.dtype, memory_format=entry.memory_format)
        sink = as_bytes(tensor)
        memory.fresh.append(Fresh(entry, None, tensor))
    else:
        member = _member(entry, target)
        memory.destinations += destination(path, target, path, member.region)
        if target is None or not is_writable(target):
            _add_members(memory, match, entry, [member])
            return
        # An array, or on a device, or strided.
        sink = as_bytes(target)
        memory.values[path] = target
    if nbytes and sink is not None:
        memory.reads.append(Wanted(data, sink, _holders(match, entry)))


def _add_view(
    memory: Allocation, views: dict[str, list[_Member]], pair: Pair, entry: TensorEntry | ViewEntry
) -> None:
    base = entry.of if isinstance(entry, ViewEntry) else entry.path
    if pair.sharding is None:
        member = _member(entry, pair.target)
        memory.destinations += destination(entry.path, pair.target, base, member.region)
    else:
        # Copied from the whole: it has its base's checksums, and any strides.
        memory.destinations += _destinations_of_pieces(pair, base)
        memory.spread.append(pair)
        member = _member(entry, None)
    views.setdefault(base, []).append(member)


def _add_parts(
    memory: Allocation, match: Match, views: dict[str, list[_Member]], pair: Pair
) -> None:
    composite, target = pair.entry, pair.target
    assert isinstance(composite, CompositeEntry)
    split = take_apart(target) if isinstance(target, torch.Tensor) else ""
    held = {} if isinstance(split, str) else dict(split[2])
    for name in composite.parts:
        part = match.parts[part_path(composite.path, name)]
        base = part.of if isinstance(part, ViewEntry) else part.path
        member = _member(part, None)
        memory.destinations += destination(composite.path, held.get(name), base, member.region)
        if base in match.bases:
            views.setdefault(base, []).append(member)
        else:
            assert isinstance(part, TensorEntry)
            _add_tensor(memory, match, Pair(part, DTYPES[part.dtype], None), part)


class _Content:
    """A sharded tensor as a base. One with two names is saved twice; equal ones may share memory.

    Compared for the few that touch.
    """

    __slots__ = ("_entry",)

    def __init__(self, entry: ShardedEntry) -> None:
        self._entry = entry

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Content):
            return False
        own, its = self._entry, other._entry
        return own is its or (own.dtype == its.dtype and own.shards.content == its.shards.content)

    def __hash__(self) -> int:
        return hash((self._entry.dtype, len(self._entry.shards)))


def _add_boxes(
    memory: Allocation,
    planner: BoxPlanner,
    pair: Pair,
    entry: TensorEntry | ShardedEntry,
    shards: Shards,
    base: object,
) -> None:
    """See ``Destination`` for ``base``."""
    path, target, sharding = entry.path, pair.target, pair.sharding
    dtype = pair.dtype or DTYPES[NUMPY_DTYPES[entry.dtype].name]
    pieces = [] if sharding is None else list(sharding.pieces)
    whole = Box.whole(entry.shape)
    # Precedes allocation: the manifest may claim any global shape.
    boxes = (whole,) if sharding is None else tuple([piece.box for piece in pieces])
    plan = planner.plan(path, shards, boxes, dtype.itemsize)
    if sharding is None:
        tensor = _tensor_over(target) if target is not None and is_writable(target) else None
        if tensor is None:
            tensor = empty_tensor(path, entry.shape, dtype, memory_format=entry.memory_format)
            value = tensor if pair.dtype is not None else tensor.numpy()
            memory.fresh.append(Fresh(entry, target, value))
        else:
            memory.values[path] = target
            memory.destinations += destination(path, target, base)
        piece = LocalPiece(whole, tensor, None)
        memory.reads.append(BoxReads(plan, shards, [piece], None, memory.lanes))
        return
    memory.values[path] = target
    if pair.is_cast:
        stored = [
            LocalPiece(piece.box, empty_tensor(path, piece.box.sizes, dtype), piece.holders)
            for piece in pieces
        ]
        memory.casts[path] = [(a.tensor, b.tensor) for a, b in zip(pieces, stored, strict=True)]
        pieces = stored
    else:
        memory.destinations += _destinations_of_pieces(pair, base)
    memory.reads.append(BoxReads(plan, shards, pieces, (), memory.lanes))
    memory.surplus_bytes += plan.nbytes
    memory.surplus_bytes -= sum(piece.tensor.nbytes for piece in pieces)


def _destinations_of_pieces(pair: Pair, base: object) -> list[Destination]:
    pieces = () if pair.sharding is None else pair.sharding.pieces
    return [
        found
        for piece in pieces
        for found in destination(pair.entry.path, piece.tensor, base, origin=piece.box.offsets)
    ]


def _member(entry: TensorEntry | ViewEntry, target: Target | None) -> _Member:
    itemsize = itemsize_of(entry)
    if isinstance(entry, ViewEntry):
        return _Member(entry, target, Region(entry.offset, itemsize, entry.shape, entry.strides))
    return _Member(entry, target, Region(0, itemsize, entry.shape, c_strides(entry.shape)))


def _add_members(
    memory: Allocation, match: Match, base: TensorEntry, members: list[_Member]
) -> None:
    data = base.data
    regions = [member.region for member in members if 0 not in member.region.shape]
    low = min([region.start for region in regions], default=0)
    high = max([region.stop for region in regions], default=0)
    # Keeps aligned members aligned.
    low -= low % max([region.itemsize for region in regions], default=1)
    start = low - low % data.block_bytes
    stop = min(high + -high % data.block_bytes, data.stop - data.start)
    if low:
        members = [
            _Member(each.entry, each.target, each.region.at(max(0, each.region.start - low)))
            for each in members
        ]
    try:
        sinks = _find_sinks(memory, high - low, members)
    except MemoryError:
        raise
    except Exception as error:  # torch and numpy refuse some dims
        path = members[0].entry.path
        raise FormatError(key=path, detail=f"no such tensor: {error}") from error
    if start == stop:
        return
    if (start, stop) != (low, high):
        sinks = [ClippedSink(sink, low - start, stop - start) for sink in sinks]
    data = slice_stored(data, start, stop)
    for sink in sinks:
        memory.reads.append(Wanted(data, sink, _holders(match, base)))


def _find_sinks(memory: Allocation, nbytes: int, members: list[_Member]) -> list[ByteSink]:
    """Returns sinks that each take all bytes."""
    sinks: list[ByteSink] = []
    left = _take_spans(memory, nbytes, members, sinks)
    if not left:
        return sinks
    if left == members and len(left) == 1 and _is_separable(left[0].region):
        return [_take_elements(memory, left[0])]
    return [*sinks, _take_fresh(memory, nbytes, left)]


def _take_spans(
    memory: Allocation, nbytes: int, members: list[_Member], sinks: list[ByteSink]
) -> list[_Member]:
    """Adds sinks for targets of the stored layout; returns the other members."""
    left: list[_Member] = []
    spans: dict[tuple[object, int], list[tuple[_Member, Region]]] = {}
    for member in members:
        target = member.target
        region = None if target is None else matching_region(target, member.region)
        if region is None:
            left.append(member)
            continue
        device = target.device if isinstance(target, torch.Tensor) else torch.device("cpu")
        start = region.start - member.region.start
        spans.setdefault((device, start), []).append((member, region))
    for (_, start), span in spans.items():
        sink = None
        # Bytes between the leaves may belong to others.
        if touched_without_gaps([region for _, region in span], start, start + nbytes):
            sink = _span_sink(start, nbytes, [member.target for member, _ in span])
        if sink is None:
            left.extend(member for member, _ in span)
            continue
        sinks.append(sink)
        memory.values.update((member.entry.path, member.target) for member, _ in span)
    return left


def _is_separable(region: Region) -> bool:
    """Whether the elements in any piece of the memory can be identified."""
    steps = [(n, step) for n, step in zip(region.shape, region.strides, strict=True) if step]
    return (
        0 not in region.shape
        and region.start == 0  # else elements are unaligned
        and is_injective([n for n, _ in steps], [step for _, step in steps])
    )


def _take_elements(memory: Allocation, member: _Member) -> ByteSink:
    """Returns a sink for a view that is read alone; drops bytes between its elements."""
    target, region = member.target, member.region
    if target is not None and is_writable(target):
        tensor = _tensor_over(target)
        if tensor is not None:
            memory.values[member.entry.path] = target
            return ExtentSink(tensor, region.strides)
    if region.has_no_gaps:
        return _take_fresh(memory, region.stop, [member])
    # Stores repeated elements once.
    sizes = tuple([n if step else 1 for n, step in zip(region.shape, region.strides, strict=True)])
    raw = empty_tensor(member.entry.path, (prod(sizes) * region.itemsize,), torch.uint8)
    dense = c_strides(sizes)
    strides = tuple([step and own for step, own in zip(region.strides, dense, strict=True)])
    compact = Region(0, region.itemsize, region.shape, strides)
    memory.fresh.append(Fresh(member.entry, target, lay_over(raw, member.entry, compact)))
    return ExtentSink(raw.view(CARRIERS[region.itemsize]).view(sizes), region.strides)


def _take_fresh(memory: Allocation, nbytes: int, members: Sequence[_Member]) -> ByteSink:
    """Adds members as views of fresh memory; returns its sink."""
    raw = empty_tensor(members[0].entry.path, (nbytes,), torch.uint8)
    for member in members:
        entry, region = member.entry, member.region
        if region.start % region.itemsize:
            part = raw[region.start : region.stop]
            fresh = Fresh(entry, member.target, part, region.at(0))
        else:
            fresh = Fresh(entry, member.target, lay_over(raw, entry, region))
        memory.fresh.append(fresh)
    return HostMemory(raw.data_ptr(), nbytes, raw)


def lay_over(
    raw: torch.Tensor, entry: TensorEntry | ViewEntry | ShardedEntry, region: Region
) -> Any:
    """Returns a leaf as a view of raw memory. ``region`` must be aligned."""
    if entry.type in NUMPY_KINDS:
        steps = tuple([stride * region.itemsize for stride in region.strides])
        dtype = NUMPY_DTYPES[entry.dtype]
        return np.ndarray(region.shape, dtype, raw.numpy(), region.start, steps)
    offset = region.start // region.itemsize
    tensor = empty_tensor(entry.path, (0,), DTYPES[entry.dtype])
    return tensor.set_(raw.untyped_storage(), offset, region.shape, region.strides)


def _tensor_over(target: Target) -> torch.Tensor | None:
    """Returns a writable target as a tensor; None for unusual strides."""
    if isinstance(target, torch.Tensor):
        return target
    if region_of(target) is None:
        return None
    name = str(CARRIERS[target.itemsize]).removeprefix("torch.")
    return torch.from_numpy(target.view(name))


def _span_sink(start: int, nbytes: int, targets: Sequence[Any]) -> ByteSink | None:
    """Returns None if the targets' storage does not contain the span."""
    first = targets[0]
    if not isinstance(first, torch.Tensor) or first.is_cpu:
        return HostMemory(start, nbytes, targets)
    raw = storage_bytes(first, start, nbytes)
    return None if raw is None else StridedMemory(raw)


def stand_in(path: str, target: Target) -> Target | None:
    """Returns a target of the same kind in its own memory; None for composites."""
    if isinstance(target, np.ndarray):
        return np.empty_like(target)
    if is_distributed(target):
        return torch.empty_like(target)
    if is_composite(target):
        return None
    fresh = empty_tensor(path, target.shape, target.dtype, target.device)
    return typed(fresh, tensor_type(target), target.requires_grad)


def typed(tensor: torch.Tensor, kind: str, requires_grad: bool) -> torch.Tensor:
    """Returns a fresh tensor as a Parameter, Buffer or Tensor."""
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if requires_grad:
        tensor.requires_grad_()
    return torch.nn.Buffer(tensor) if kind == "buffer" else tensor
