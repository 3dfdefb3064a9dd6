"""Packs leaves into data objects and cuts a rank's writes into chunks.

Implements "Objects" and "Data object" of ``docs/format.md``. Aims at a few balanced objects that
finish together: each costs one inode lock or one multipart upload. A large leaf stays in one
object; small leaves are packed in traversal order, so that a reader needs few requests. Must not
know where bytes come from or go to.

Each holder packs shared items on its own. Equal input gives an equal layout on every rank, so
several ranks can write one object and exchange only byte ranges (``RankPlan``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.compression import Codec
from actorsnap.format.geometry import flat_range_boxes
from actorsnap.format.layout import (
    MAX_HEADER_BYTES,
    Slot,
    data_key,
    header_cost,
    lay_out,
    shard_name,
    top_level_key,
)

__all__ = [
    "Arranged",
    "Chunk",
    "Item",
    "ItemBox",
    "ObjectPart",
    "ObjectPlan",
    "PackingRules",
    "Piece",
    "RankPlan",
    "Share",
    "arrange",
    "canonical",
    "check_memory",
    "least_write_bytes",
    "pack",
    "write_order",
]

_SMALL_KEY_BYTES = 1 << 20
_RUN_BYTES = 8 << 20


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The bytes of one leaf.

    Attributes:
        path: Escaped; unique within the rank.
        dtype: torch dtype name; ``uint8`` for raw bytes.
        shape: In elements; for a shard, the shard's shape.
        nbytes, itemsize: Bytes of the item and of one element.
        replicated: Every rank holds the same value.
        offsets, global_shape: Shards only: origin in the tensor, and the tensor's shape.
        is_whole: One rank writes all of it: other entries refer to it, or it is empty.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    itemsize: int
    replicated: bool = False
    offsets: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    is_whole: bool = False

    @property
    def is_shard(self) -> bool:
        """Whether the item may be only a part of a tensor."""
        return self.global_shape is not None


class ItemBox(msgspec.Struct, frozen=True, gc=False):
    """A box of an item, contiguous in the item's bytes. A separate shard in the manifest.

    Attributes:
        start: Offset of its first byte in the item.
        shape: In elements.
        offsets, global_shape: Origin in the whole tensor, and the tensor's shape.
    """

    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The unit of staging and storing: bytes ``[start, stop)`` of object number ``object``."""

    object: int
    index: int
    start: int
    stop: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of leaf number ``item`` of the object plan.

    Counted from the start of the item, or of its box in ``ObjectPlan.boxes``.
    """

    item: int
    start: int
    stop: int


class ObjectPlan(msgspec.Struct, frozen=True, gc=False):
    """The part of a data object that one rank writes; usually all of it.

    A leaf is a whole item, or a box of an item that other ranks write too. Each leaf has its own
    checksum blocks. ``items``, ``starts``, ``ends`` and ``boxes`` are parallel, in stored order.

    Attributes:
        header: The safetensors header of the whole object; its first bytes.
        items: Per leaf, the index of its item among the rank's items.
        starts, ends: Per leaf, its absolute byte range.
        boxes: Per leaf, its box of the item; None for the whole item.
        size: Bytes of the whole object.
        opens: This rank creates the object, writes the header and completes the object.
        is_shared: Other ranks write to it too.
        chunks: Cover the one range that the rank writes, including the header if it opens the
            object. Cuts inside a leaf fall on multiples of the largest checksum block, counted from
            the leaf's start.
    """

    key: str
    header: bytes
    items: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    boxes: tuple[ItemBox | None, ...]
    size: int
    opens: bool
    is_shared: bool
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank writes."""
        return self.chunks[-1].stop - self.chunks[0].start

    @property
    def has_joiners(self) -> bool:
        """Whether this rank opens the object for other ranks too."""
        return self.opens and self.is_shared

    def pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """Yields the parts of leaves in ``chunk``, in order. Empty leaves have none."""
        start, stop = max(chunk.start, len(self.header)), chunk.stop
        index = bisect_right(self.ends, start)
        while index < len(self.starts) and self.starts[index] < stop:
            low, high = self.starts[index], self.ends[index]
            if high > low:
                yield Piece(index, max(start, low) - low, min(stop, high) - low)
            index += 1


class PackingRules(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Knobs of ``pack``, in bytes unless noted.

    Attributes:
        chunk_bytes: Largest chunk; at least two blocks. ``min_write_bytes`` and ``max_writes`` can
            make chunks larger.
        max_objects: Number of objects written in parallel, per top-level key.
        min_object_bytes: A key is spread over more objects only if each gets this much.
        min_write_bytes: Smallest chunk, except at the end of an object.
        max_writes: Largest number of chunks of an object, over all its writers; None for no limit.
        max_object_bytes: Largest object; None for no limit. A leaf must have less than half of it.
        has_joined_writers: Objects may have several writers.
        codec: Compresses chunks; None stores objects uncompressed.
    """

    chunk_bytes: int
    max_objects: int
    min_object_bytes: int
    min_write_bytes: int = 1
    max_writes: int | None = None
    max_object_bytes: int | None = None
    has_joined_writers: bool = True
    codec: Codec | None = None

    def least_write_bytes(self, size: int) -> int:
        """See ``least_write_bytes``."""
        return least_write_bytes(
            size, min_write_bytes=self.min_write_bytes, max_writes=self.max_writes
        )


def least_write_bytes(size: int, *, min_write_bytes: int, max_writes: int | None) -> int:
    """Returns the smallest write to an object of ``size`` bytes, except for its last write.

    With writes of this size there are at most ``max_writes``, each with its own ``offset //
    least``, which can number it.
    """
    return max(min_write_bytes, 1 if max_writes is None else -(-size // max_writes))


class ObjectPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a shared object that a rank writes. Empty only in an empty object.

    Attributes:
        number: Number of the object, as ``arrange`` counts.
        start, stop: Byte range, counted from the end of the object's header.
        opens: This rank creates and completes the object, and writes the header and the first byte.
        is_shared: Other ranks write to it too.
    """

    number: int
    start: int
    stop: int
    opens: bool
    is_shared: bool


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a group's items that a rank writes.

    Attributes:
        scope: Index of the scope in the rank's own inventory.
        items: The group's items in the scope's list, as rising runs ``(start, stop)``, packed in
            ``canonical`` order. None: all items, in list order.
        rank: The lowest holder; the objects' keys carry its number.
        first: Number of the group's first object among those of ``rank``.
        num_holders: More holders get more objects.
        parts: By rising object number. Together they are one range of the group's bytes.
    """

    scope: int
    items: tuple[tuple[int, int], ...] | None
    rank: int
    first: int
    num_holders: int
    parts: tuple[ObjectPart, ...]


class RankPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank's share of common items.

    Attributes:
        shares: In the order of their objects.
        first: Number of the rank's first private object.
    """

    shares: tuple[Share, ...] = ()
    first: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether the rank writes to an object that other ranks write to too."""
        return any(part.is_shared for share in self.shares for part in share.parts)


_NOTHING_SHARED = RankPlan()


def pack(
    items: Sequence[Item],
    *,
    attempt: str,
    rank: int,
    rules: PackingRules,
    scopes: Sequence[Sequence[int]] = (),
    plan: RankPlan = _NOTHING_SHARED,
) -> tuple[ObjectPlan, ...]:
    """Plans the data objects that one rank writes to, shared ones first.

    Covers each byte that the plan assigns to the rank once, and each item outside ``scopes``.

    Args:
        items: All items of the rank, in traversal order.
        attempt: The attempt's folder.
        rank: This rank.
        rules: The same on all ranks.
        scopes: Per scope of the rank's inventory, the indices of its items, in list order.
        plan: This rank's plan from ``plan_save``.
    """
    plans: list[ObjectPlan] = []

    def add(
        members: Sequence[int], arranged: Arranged, key: str, part: ObjectPart | None = None
    ) -> None:
        order = [members[position] for position in arranged.items]
        strip = 0 if arranged.token is None else len(arranged.token) + 1
        plans.append(_plan_object(items, order, key, strip, len(plans), rules, part))

    def key_of(arranged: Arranged, rank: int, first: int) -> str:
        return data_key(
            attempt,
            None if arranged.token is None else top_level_key(arranged.token),
            rank,
            first + arranged.number,
            is_compressed=rules.codec is not None,
        )

    for share in plan.shares:
        members = scopes[share.scope]
        if share.items is not None:
            members = [members[i] for start, stop in share.items for i in range(start, stop)]
            members.sort(key=lambda index: canonical(items[index]))
        objects = arrange([items[index] for index in members], rules, share.num_holders)
        for part in share.parts:
            arranged = objects[part.number]
            add(members, arranged, key_of(arranged, share.rank, share.first), part)
    shared = {index for members in scopes for index in members}
    own = [index for index in range(len(items)) if index not in shared]
    for arranged in arrange([items[index] for index in own], rules):
        add(own, arranged, key_of(arranged, rank, plan.first))
    return tuple(plans)


def write_order(objects: Sequence[ObjectPlan]) -> list[Chunk]:
    """Returns all chunks, interleaved so that all objects advance at the same rate.

    Two threads that write to one file are no faster than one, because of the inode lock.
    """
    chunks = [chunk for plan in objects for chunk in plan.chunks]
    chunks.sort(key=lambda c: ((c.index + 0.5) / len(objects[c.object].chunks), c.object))
    return chunks


class Arranged(msgspec.Struct, frozen=True, gc=False):
    """The items of one object.

    Attributes:
        token: The top-level key's token; None for the object of all small keys.
        number: Number of the object among those of its key.
        items: Positions among the arranged items, in stored order.
    """

    token: str | None
    number: int
    items: list[int]


def arrange(items: Sequence[Item], rules: PackingRules, num_writers: int = 1) -> list[Arranged]:
    """Distributes items over objects and orders them; each item goes into one object.

    A key may have up to ``num_writers`` objects even if ``rules.max_objects`` is smaller.
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

    objects: list[Arranged] = []
    small: list[int] = []
    max_objects = max(rules.max_objects, num_writers)
    for token, members in by_key.items():
        if totals[token] < _SMALL_KEY_BYTES:
            small.extend(members)
            continue
        count = min(max_objects, totals[token] // max(1, rules.min_object_bytes))
        groups = _distribute(items, members, max(1, count, _least_objects(totals[token], rules)))
        for number, group in enumerate(groups):
            objects.append(Arranged(token, number, _stored_order(items, group)))
    for number, group in enumerate(_split_headers(items, small)):
        objects.append(Arranged(None, number, _stored_order(items, group)))
    return objects


def _least_objects(total: int, rules: PackingRules) -> int:
    # The heaviest object has less than an equal share plus one leaf; each may be half of the limit.
    return 1 if rules.max_object_bytes is None else -(-total // (rules.max_object_bytes // 2))


def canonical(item: Item) -> tuple[str, tuple[int, ...]]:
    """Sort key for shared items that the ranks' lists order differently."""
    return item.path, item.offsets or ()


def _stored_order(items: Sequence[Item], members: list[int]) -> list[int]:
    # Falling item size aligns each tensor to its own item size, without gaps.
    return sorted(members, key=lambda index: -items[index].itemsize)


def _distribute(items: Sequence[Item], members: list[int], count: int) -> list[list[int]]:
    """Spreads a key's items over objects: the largest unit first, to the lightest object."""
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
    """Splits ``members`` where a header would exceed the format's limit."""
    # At most 12 bytes for a character, 32 for an offset or a size, 128 for the rest of an entry.
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
    order: Sequence[int],
    key: str,
    strip: int,
    number: int,
    rules: PackingRules,
    part: ObjectPart | None,
) -> ObjectPlan:
    """Lays out an object and plans ``part`` of it, or all of it if None."""
    layout = lay_out(
        [
            Slot(_name(item, strip), item.dtype, item.shape, item.nbytes)
            for item in (items[index] for index in order)
        ]
    )
    leaves = _Leaves(
        items=tuple(order),
        starts=layout.starts,
        ends=tuple(
            [start + items[index].nbytes for start, index in zip(layout.starts, order, strict=True)]
        ),
        boxes=(None,) * len(order),
    )
    begin, end = 0, layout.size
    if part is not None and part.is_shared:
        data_start = len(layout.header)
        begin, end = data_start + part.start, data_start + part.stop
        leaves = _leaves_within(items, leaves, begin, end, layout.size)
        begin = 0 if part.opens else begin
    least_bytes = rules.least_write_bytes(layout.size)
    cuts = _cut(
        leaves.starts,
        leaves.ends,
        begin,
        end,
        chunk_bytes=max(rules.chunk_bytes, least_bytes + MAX_BLOCK_BYTES),
        min_last_bytes=0 if end == layout.size else least_bytes,
    )
    return ObjectPlan(
        key=key,
        header=layout.header,
        items=leaves.items,
        starts=leaves.starts,
        ends=leaves.ends,
        boxes=leaves.boxes,
        size=layout.size,
        opens=part is None or part.opens,
        is_shared=part is not None and part.is_shared,
        chunks=tuple([Chunk(number, index, *cut) for index, cut in enumerate(cuts)]),
    )


class _Leaves(msgspec.Struct, frozen=True, gc=False):
    """Fields of ``ObjectPlan``."""

    items: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    boxes: tuple[ItemBox | None, ...]


def _leaves_within(
    items: Sequence[Item], leaves: _Leaves, begin: int, end: int, size: int
) -> _Leaves:
    """Returns the leaves in the object's bytes ``[begin, end)``.

    An empty item belongs to the range that starts at or contains it; at the very end of the object,
    to the last range.
    """
    first = bisect_left(leaves.starts, begin)
    if first and leaves.ends[first - 1] > begin:
        first -= 1
    last = len(leaves.starts) if end == size else bisect_left(leaves.starts, end)
    members: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    boxes: list[ItemBox | None] = []
    for position in range(first, last):
        index = leaves.items[position]
        low, high = leaves.starts[position], leaves.ends[position]
        if begin <= low and high <= end:
            members.append(index)
            starts.append(low)
            ends.append(high)
            boxes.append(None)
            continue
        item = items[index]
        for box, nbytes in _boxes(item, max(begin, low) - low, min(end, high) - low):
            members.append(index)
            starts.append(low + box.start)
            ends.append(low + box.start + nbytes)
            boxes.append(box)
    return _Leaves(tuple(members), tuple(starts), tuple(ends), tuple(boxes))


def _boxes(item: Item, start: int, stop: int) -> Iterator[tuple[ItemBox, int]]:
    """Yields the boxes of an item's bytes ``[start, stop)``, each with its size in bytes."""
    origin = item.offsets or (0,) * len(item.shape)
    whole = item.shape if item.global_shape is None else item.global_shape
    for box in flat_range_boxes(item.shape, start // item.itemsize, stop // item.itemsize):
        nbytes = box.volume * item.itemsize
        offsets = tuple([a + b for a, b in zip(origin, box.offsets, strict=True)])
        yield ItemBox(start, box.sizes, offsets, whole), nbytes
        start += nbytes


def _cut(
    starts: Sequence[int],
    ends: Sequence[int],
    begin: int,
    stop: int,
    *,
    chunk_bytes: int,
    min_last_bytes: int,
) -> Iterator[tuple[int, int]]:
    """Cuts ``[begin, stop)`` between leaves, or inside one on the grid of the largest blocks.

    Each chunk but the last has more than ``chunk_bytes`` less a block, unless it had to leave
    ``min_last_bytes`` for the last one; then it has at least ``min_last_bytes`` itself.
    """
    for start, end in zip(starts, ends, strict=True):
        while end - begin > chunk_bytes:
            # No room for a block: the bytes before it go alone (a large header, small items).
            room = max(0, begin + chunk_bytes - start)
            cut = start + room // MAX_BLOCK_BYTES * MAX_BLOCK_BYTES
            if stop - cut < min_last_bytes:
                cut = _cut_before(starts, stop - min_last_bytes)
                if cut - begin < min_last_bytes:
                    cut = stop
            yield begin, cut
            begin = cut
    if stop > begin:
        yield begin, stop


def _cut_before(starts: Sequence[int], at: int) -> int:
    """Returns the last possible cut up to ``at``; 0 if that is in the header."""
    index = bisect_right(starts, at) - 1
    return 0 if index < 0 else at - (at - starts[index]) % MAX_BLOCK_BYTES


def check_memory(objects: Sequence[ObjectPlan], rules: PackingRules, budget_bytes: int) -> None:
    """Checks that copies of all chunks that storage forces to be large fit into the budget.

    Raises:
        UsageError: They do not fit.
    """
    for plan in objects:
        needed = max([chunk.stop - max(chunk.start, len(plan.header)) for chunk in plan.chunks])
        if needed > max(rules.chunk_bytes, budget_bytes):
            raise UsageError(
                f"{plan.key!r} has {plan.size} bytes, and the storage takes no less than "
                f"{rules.least_write_bytes(plan.size)} of them at once: for copies of {needed} "
                f"bytes, memory_budget_bytes={budget_bytes} is too small"
            )
