"""Packs the leaves that one rank writes into data objects, and cuts the objects into chunks.

Implements "Objects" and "Data object" of ``docs/format.md``. What it aims at: a handful of
objects (one inode lock or one multipart upload each), balanced, so that they finish
together; large leaves whole in one object; small leaves together, in traversal order, so
that a reader needs few requests. It must not know where bytes come from or go to. Equal
input gives an equal plan on every rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

import msgspec

from actorsnap.format.layout import (
    MAX_HEADER_BYTES,
    Slot,
    data_key,
    header_cost,
    lay_out,
    shard_name,
    small_data_key,
    top_level_key,
)
from actorsnap.format.manifest import BLOCK_BYTES

__all__ = ["Chunk", "Item", "ObjectPlan", "PackingRules", "Piece", "pack", "write_order"]

_SMALL_KEY_BYTES = 1 << 20
_RUN_BYTES = 8 << 20


class Item(msgspec.Struct, frozen=True, gc=False):
    """One leaf's bytes, as the planner sees them.

    Attributes:
        path: Unique within the rank, escaped.
        dtype: torch dtype name; ``uint8`` for raw bytes.
        shape: Of these bytes, in elements (the shard's for a shard).
        nbytes: Their number.
        itemsize: Bytes of an element.
        replicated: Every rank holds the same value.
        offsets, global_shape: Only for a shard: where it begins, and the tensor's shape.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    itemsize: int
    replicated: bool = False
    offsets: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The unit of staging and storing: bytes ``[start, stop)`` of object number ``object``."""

    object: int
    index: int
    start: int
    stop: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of item number ``item`` of the object (in stored order)."""

    item: int
    start: int
    stop: int


class ObjectPlan(msgspec.Struct, frozen=True, gc=False):
    """A data object to write.

    Attributes:
        key: Where.
        header: The safetensors header; the object's first bytes.
        items: Indices into the rank's items, in stored order.
        starts: Absolute offset of each item's first byte, in the same order.
        ends: Absolute offset behind each item's last byte.
        size: Bytes of the object.
        chunks: Together they cover ``[0, size)``. The first one includes the header. Cuts
            inside an item fall on multiples of the checksum block, counted from its start.
    """

    key: str
    header: bytes
    items: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    size: int
    chunks: tuple[Chunk, ...]

    def pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The parts of items that lie in ``chunk``, in order. Empty items have none."""
        start, stop = max(chunk.start, len(self.header)), chunk.stop
        index = bisect_right(self.ends, start)
        while index < len(self.starts) and self.starts[index] < stop:
            low, high = self.starts[index], self.ends[index]
            if high > low:
                yield Piece(index, max(start, low) - low, min(stop, high) - low)
            index += 1


class PackingRules(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``pack``, in bytes.

    Attributes:
        chunk_bytes: Largest chunk; at least two blocks.
        max_objects: Objects written in parallel, per top-level key.
        min_object_bytes: A key is spread over more objects only if each gets this much.
    """

    chunk_bytes: int
    max_objects: int
    min_object_bytes: int


def pack(
    items: Sequence[Item], *, attempt: str, rank: int, rules: PackingRules
) -> tuple[ObjectPlan, ...]:
    """Plans the data objects of one rank. Covers each item exactly once.

    Args:
        items: What the rank writes, in traversal order.
        attempt: The attempt's folder.
        rank: For the objects' names.
        rules: Sizes.
    """
    by_key: dict[str, list[int]] = {}
    totals: dict[str, int] = {}
    for index, item in enumerate(items):
        token = item.path.partition("/")[0]
        if token in by_key:
            by_key[token].append(index)
            totals[token] += item.nbytes
        else:
            by_key[token] = [index]
            totals[token] = item.nbytes

    plans: list[ObjectPlan] = []
    small: list[int] = []
    for token, members in by_key.items():
        if totals[token] < _SMALL_KEY_BYTES:
            small.extend(members)
            continue
        groups = _distribute(items, members, totals[token], rules)
        for number, group in enumerate(groups):
            key = data_key(attempt, top_level_key(token), rank, number)
            plans.append(_plan_object(items, group, key, len(token) + 1, len(plans), rules))
    for number, group in enumerate(_split_headers(items, small)):
        key = small_data_key(attempt, rank, number)
        plans.append(_plan_object(items, group, key, 0, len(plans), rules))
    return tuple(plans)


def write_order(objects: Sequence[ObjectPlan]) -> list[Chunk]:
    """All chunks, interleaved so that all objects advance at the same rate.

    Neighbours in this order lie in different objects where possible: two threads that write
    one file gain nothing over one (inode lock).
    """
    chunks = [chunk for plan in objects for chunk in plan.chunks]
    chunks.sort(key=lambda c: ((c.index + 0.5) / len(objects[c.object].chunks), c.object))
    return chunks


def _distribute(
    items: Sequence[Item], members: list[int], total: int, rules: PackingRules
) -> list[list[int]]:
    """Spreads a key's items over objects: largest unit first, to the lightest object."""
    count = max(1, min(rules.max_objects, total // max(1, rules.min_object_bytes)))
    if count == 1:
        return _split_headers(items, members)
    units: list[tuple[int, list[int]]] = []
    run: list[int] = []
    run_bytes = 0
    for index in members:
        nbytes = items[index].nbytes
        if nbytes >= _RUN_BYTES:
            units.append((nbytes, [index]))
            continue
        run.append(index)
        run_bytes += nbytes
        if run_bytes >= _RUN_BYTES:
            units.append((run_bytes, run))
            run, run_bytes = [], 0
    if run:
        units.append((run_bytes, run))
    units.sort(key=lambda unit: (-unit[0], unit[1][0]))
    loads = [(0, n) for n in range(count)]
    heapify(loads)
    groups: list[list[int]] = [[] for _ in range(count)]
    for nbytes, unit in units:
        load, n = loads[0]
        groups[n].extend(unit)
        heapreplace(loads, (load + nbytes, n))
    result: list[list[int]] = []
    for group in groups:
        if group:
            group.sort()
            result.extend(_split_headers(items, group))
    return result


def _split_headers(items: Sequence[Item], members: list[int]) -> list[list[int]]:
    """Cuts ``members`` where a header would grow over the format's limit."""
    # At most 12 bytes for a character, 32 for an offset or a size, 128 for what is around.
    bound = sum(12 * len(items[i].path) + 64 * len(items[i].shape) + 192 for i in members)
    if bound <= MAX_HEADER_BYTES:
        return [members] if members else []
    result: list[list[int]] = []
    group: list[int] = []
    cost = 0
    for index in members:
        item = items[index]
        item_cost = header_cost(Slot(_name(item, 0), item.dtype, item.shape, item.nbytes))
        if group and cost + item_cost > MAX_HEADER_BYTES:
            result.append(group)
            group, cost = [], 0
        group.append(index)
        cost += item_cost
    if group:
        result.append(group)
    return result


def _name(item: Item, strip: int) -> str:
    name = item.path[strip:] or item.path
    return name if item.offsets is None else shard_name(name, item.offsets)


def _plan_object(
    items: Sequence[Item],
    members: list[int],
    key: str,
    strip: int,
    number: int,
    rules: PackingRules,
) -> ObjectPlan:
    # Falling item size keeps each tensor aligned to its own, without gaps.
    order = sorted(members, key=lambda index: -items[index].itemsize)
    layout = lay_out(
        [
            Slot(_name(item, strip), item.dtype, item.shape, item.nbytes)
            for item in (items[index] for index in order)
        ]
    )
    ends = tuple(
        start + items[index].nbytes for start, index in zip(layout.starts, order, strict=True)
    )
    return ObjectPlan(
        key=key,
        header=layout.header,
        items=tuple(order),
        starts=layout.starts,
        ends=ends,
        size=layout.size,
        chunks=tuple(
            Chunk(number, index, start, stop)
            for index, (start, stop) in enumerate(
                _cut(layout.starts, ends, layout.size, rules.chunk_bytes)
            )
        ),
    )


def _cut(
    starts: Sequence[int], ends: Sequence[int], size: int, chunk_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cuts ``[0, size)`` between items, or inside one on its block grid."""
    begin = 0
    for start, end in zip(starts, ends, strict=True):
        while end - begin > chunk_bytes:
            # No room for a block: what came before goes alone (a large header, small items).
            room = max(0, begin + chunk_bytes - start)
            cut = start + room // BLOCK_BYTES * BLOCK_BYTES
            yield begin, cut
            begin = cut
    if size > begin or size == 0:
        yield begin, size
