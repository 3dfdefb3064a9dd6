# SPDX-License-Identifier: Apache-2.0
"""Packs leaves into data objects and splits a rank's writes into chunks (``docs/format.md``).

Aims at a few balanced objects that finish together; small leaves keep traversal order, so that
readers need few requests. Equal input gives an equal layout on every rank, so ranks can write one
object together and exchange only byte ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TypeAlias

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
    most_header_bytes,
    shard_name,
    top_level_key,
)

_SMALL_KEY_BYTES = 1 << 20
"""Smallest key that gets its own objects."""

_RUN_BYTES = 8 << 20
"""Smallest leaf, or run of leaves, that is balanced over objects on its own."""

_TURN_BYTES = 128 << 20
"""Most bytes of chunks that a thread copies in one turn."""

_MIN_TURNS = 4
"""Least turns of a thread that copies host memory, so that all threads end together."""


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The bytes of one leaf.

    Attributes:
        path: Escaped; unique within the rank.
        dtype: torch dtype name; ``uint8`` for raw bytes.
        shape: The shard's, for a shard.
        replicated: Every rank holds the same value.
        offsets, global_shape: Shards only: origin in the tensor, and its shape.
        is_whole: Must not be divided: other entries refer to it, or it is empty.
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
        return self.global_shape is not None


class ItemBox(msgspec.Struct, frozen=True, gc=False):
    """A box of an item, contiguous in its bytes from ``start`` on. A shard in the manifest."""

    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of an object."""

    object: int
    index: int
    start: int
    stop: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of a leaf of the object plan."""

    item: int
    start: int
    stop: int


class ObjectPlan(msgspec.Struct, frozen=True, gc=False):
    """The part of a data object that one rank writes; usually all of it.

    A leaf is an item, or a box of one that other ranks write too, and has its own checksum blocks.

    Attributes:
        items, starts, ends, boxes: Per leaf, in stored order: index of its item among the rank's,
            absolute byte range, and box (None: the whole item).
        size: Size of the whole object.
        opens: This rank creates and completes the object, and writes the header.
        is_shared: Other ranks write to it too.
        chunks: Cover the one range that the rank writes. Split leaves at multiples of the largest
            checksum block.
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
        return self.chunks[-1].stop - self.chunks[0].start

    @property
    def has_joiners(self) -> bool:
        return self.opens and self.is_shared

    def pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """Yields the parts of nonempty leaves in ``chunk``, in order."""
        start, stop = max(chunk.start, len(self.header)), chunk.stop
        index = bisect_right(self.ends, start)
        while index < len(self.starts) and self.starts[index] < stop:
            low, high = self.starts[index], self.ends[index]
            if high > low:
                first = 0 if start <= low else start - low
                yield Piece(index, first, (high if high <= stop else stop) - low)
            index += 1


class PackingRules(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Knobs of ``pack``.

    Attributes:
        chunk_bytes: Largest chunk, at least two blocks; ``min_write_bytes`` and ``max_writes`` take
            precedence.
        max_objects: Per top-level key.
        min_object_bytes: A key is spread over more objects only if each gets this much.
        min_write_bytes: Smallest chunk, except at the end of an object.
        max_writes: Most chunks of an object, over all its writers; None: no limit.
        max_object_bytes: None: no limit. A leaf must have less than half of it.
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
        return least_write_bytes(
            size, min_write_bytes=self.min_write_bytes, max_writes=self.max_writes
        )


def least_write_bytes(size: int, *, min_write_bytes: int, max_writes: int | None) -> int:
    """Returns the smallest write, except the last, to an object of ``size`` bytes.

    Keeps the number of writes within ``max_writes``, and gives each its own number (offset /
    result).
    """
    return max(min_write_bytes, 1 if max_writes is None else -(-size // max_writes))


class ObjectPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a shared object that a rank writes. Empty only in an empty object.

    Attributes:
        start, stop: Byte range, counted from the end of the header.
        opens, is_shared: See ``ObjectPlan``. The opener also writes the first byte.
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
        items: The group's items in the scope's list, as rising ranges ``(start, stop)``, packed in
            ``canonical`` order. None: all items, in list order.
        rank: The lowest holder, which the objects' keys name.
        first: Number of the group's first object among those of ``rank``.
        parts: By rising object number. Together they are one range of the group's bytes.
    """

    scope: int
    items: tuple[tuple[int, int], ...] | None
    rank: int
    first: int
    num_holders: int
    parts: tuple[ObjectPart, ...]


class RankPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank's shares of common items; ``first`` is the number of its first private object."""

    shares: tuple[Share, ...] = ()
    first: int = 0

    @property
    def is_shared(self) -> bool:
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

    Covers each byte that the plan assigns to the rank, and each item outside ``scopes``, once.

    Args:
        scopes: Per scope of the rank's inventory, the indices of its items, in list order.
        plan: This rank's plan from ``plan_save``.
    """
    plans: list[ObjectPlan] = []

    def add(
        members: Sequence[int],
        arranged: Arranged,
        owner: int,
        first: int,
        part: ObjectPart | None = None,
    ) -> None:
        token = arranged.token
        key = data_key(
            attempt,
            None if token is None else top_level_key(token),
            owner,
            first + arranged.number,
            is_compressed=rules.codec is not None,
        )
        order = [members[position] for position in arranged.items]
        strip = 0 if token is None else len(token) + 1
        plans.append(_plan_object(items, order, key, strip, len(plans), rules, part))

    for share in plan.shares:
        members = scopes[share.scope]
        if share.items is not None:
            members = [members[i] for start, stop in share.items for i in range(start, stop)]
            members.sort(key=lambda index: canonical(items[index]))
        objects = arrange([items[index] for index in members], rules, share.num_holders)
        for part in share.parts:
            add(members, objects[part.number], share.rank, share.first, part)
    shared = {index for members in scopes for index in members}
    own = [index for index in range(len(items)) if index not in shared]
    for arranged in arrange([items[index] for index in own], rules):
        add(own, arranged, rank, plan.first)
    return tuple(plans)


def written_items(
    items: Sequence[Item], arranged: Arranged, part: ObjectPart
) -> Iterator[tuple[int, ItemBox | None]]:
    """Yields the items, and boxes of items, in a part of an object."""
    ends = tuple(accumulate([items[index].nbytes for index in arranged.items]))
    if part.is_shared:
        starts = (0, *ends[:-1])
        leaves = _leaves_within(items, arranged.items, starts, ends, part.start, part.stop)
        yield from ((index, box) for index, _, _, box in leaves)
    else:
        yield from ((index, None) for index in arranged.items)


def write_order(objects: Sequence[ObjectPlan]) -> list[Chunk]:
    """Returns all chunks, interleaved so that all objects advance at the same rate.

    Two threads are no faster than one on the same file: inode lock.
    """
    chunks = [chunk for plan in objects for chunk in plan.chunks]
    chunks.sort(key=lambda c: ((c.index + 0.5) / len(objects[c.object].chunks), c.object))
    return chunks


def copy_turn_bytes(chunks: Sequence[Chunk], num_copiers: int, *, on_devices: bool) -> int:
    """Returns the size of a turn: a thread that copies takes chunks until it has this much.

    If each chunk were a turn, threads and the event loop would hand the GIL to each other for
    longer than the copy takes on a bus, and for a tenth of it in memory.
    """
    if on_devices:
        return _TURN_BYTES
    nbytes = sum([chunk.stop - chunk.start for chunk in chunks])
    return min(_TURN_BYTES, nbytes // (_MIN_TURNS * num_copiers))


class Arranged(msgspec.Struct, frozen=True, gc=False):
    """The items of one object.

    Attributes:
        token: The top-level key's; None for an object of small keys.
        items: Positions among the arranged items, in stored order.
    """

    token: str | None
    number: int
    items: list[int]


def arrange(items: Sequence[Item], rules: PackingRules, num_writers: int = 1) -> list[Arranged]:
    """Distributes items over objects; each key gets up to ``num_writers`` or ``max_objects``."""
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

    def add(token: str | None, groups: Sequence[list[int]]) -> None:
        for number, group in enumerate(groups):
            # Falling item size aligns tensors without gaps.
            group.sort(key=lambda index: -items[index].itemsize)
            objects.append(Arranged(token, number, group))

    for token, members in by_key.items():
        if totals[token] < _SMALL_KEY_BYTES:
            small.extend(members)
            continue
        count = max(1, min(max_objects, totals[token] // max(1, rules.min_object_bytes)))
        if rules.max_object_bytes is not None:
            # Objects have less than an equal share plus one leaf, each up to half of the limit.
            count = max(count, -(-totals[token] // (rules.max_object_bytes // 2)))
        add(token, _distribute(items, members, count))
    add(None, _split_headers(items, small))
    return objects


def canonical(item: Item) -> tuple[str, tuple[int, ...]]:
    return item.path, item.offsets or ()


def _distribute(items: Sequence[Item], members: list[int], count: int) -> list[list[int]]:
    """Spreads a key's items: the largest unit first, to the lightest object."""
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
    return [part for group in groups for part in _split_headers(items, sorted(group))]


def _split_headers(items: Sequence[Item], members: list[int]) -> list[list[int]]:
    if not members:
        return []
    longest = max([len(items[index].path) for index in members])
    most_dims = max([len(items[index].shape) for index in members])
    if len(members) * most_header_bytes(longest, most_dims) <= MAX_HEADER_BYTES:
        return [members]  # usual; the exact sizes take as long as the rest of packing
    groups: list[list[int]] = [[]]
    cost = 0
    for index in members:
        item = items[index]
        added = header_cost(item.path, len(item.shape))
        cost += added
        if cost > MAX_HEADER_BYTES and groups[-1]:
            groups.append([])
            cost = added
        groups[-1].append(index)
    return groups


_Leaf: TypeAlias = tuple[int, int, int, ItemBox | None]


def _plan_object(
    items: Sequence[Item],
    order: Sequence[int],
    key: str,
    strip: int,
    number: int,
    rules: PackingRules,
    part: ObjectPart | None,
) -> ObjectPlan:
    slots: list[Slot] = []
    for index in order:
        item = items[index]
        name = item.path[strip:] or item.path
        if item.offsets is not None:
            name = shard_name(name, item.offsets)
        slots.append(Slot(name, item.dtype, item.shape, item.nbytes))
    layout = lay_out(slots)
    starts = layout.starts
    ends = tuple([start + slot.nbytes for start, slot in zip(starts, slots, strict=True)])
    indices, boxes = tuple(order), (None,) * len(order)
    begin, end = 0, layout.size
    if part is not None and part.is_shared:
        data_start = len(layout.header)
        begin, end = data_start + part.start, data_start + part.stop
        leaves = _leaves_within(items, order, starts, ends, begin, end)
        indices, starts, ends, boxes = zip(*leaves, strict=True)
        begin = 0 if part.opens else begin
    least_bytes = rules.least_write_bytes(layout.size)
    chunks = _split_writes(
        starts,
        ends,
        begin,
        end,
        chunk_bytes=max(rules.chunk_bytes, least_bytes + MAX_BLOCK_BYTES),
        min_last_bytes=0 if end == layout.size else least_bytes,
    )
    return ObjectPlan(
        key=key,
        header=layout.header,
        items=indices,
        starts=starts,
        ends=ends,
        boxes=boxes,
        size=layout.size,
        opens=part is None or part.opens,
        is_shared=part is not None and part.is_shared,
        chunks=tuple([Chunk(number, index, *bounds) for index, bounds in enumerate(chunks)]),
    )


def _leaves_within(
    items: Sequence[Item],
    order: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    begin: int,
    end: int,
) -> Iterator[_Leaf]:
    """Yields the leaves in the object's bytes ``[begin, end)``.

    An empty item belongs to the range that starts at or contains it, or ends the object with it.
    """
    first = bisect_left(starts, begin)
    if first and ends[first - 1] > begin:
        first -= 1
    last = len(starts) if end == ends[-1] else bisect_left(starts, end)
    for position in range(first, last):
        index, low, high = order[position], starts[position], ends[position]
        if begin <= low and high <= end:
            yield index, low, high, None
            continue
        for box, nbytes in _boxes(items[index], max(begin, low) - low, min(end, high) - low):
            yield index, low + box.start, low + box.start + nbytes, box


def _boxes(item: Item, start: int, stop: int) -> Iterator[tuple[ItemBox, int]]:
    origin = item.offsets or (0,) * len(item.shape)
    whole = item.shape if item.global_shape is None else item.global_shape
    for box in flat_range_boxes(item.shape, start // item.itemsize, stop // item.itemsize):
        nbytes = box.volume * item.itemsize
        offsets = tuple([a + b for a, b in zip(origin, box.offsets, strict=True)])
        yield ItemBox(start, box.sizes, offsets, whole), nbytes
        start += nbytes


def _split_writes(
    starts: Sequence[int],
    ends: Sequence[int],
    begin: int,
    stop: int,
    *,
    chunk_bytes: int,
    min_last_bytes: int,
) -> Iterator[tuple[int, int]]:
    """Splits ``[begin, stop)`` between leaves, or inside one on the grid of the largest blocks.

    Every chunk but the last is longer than ``chunk_bytes`` minus one block, with two exceptions:
    bytes before a leaf without room for a block, and the chunk before the last, which leaves
    ``min_last_bytes`` for it.
    """
    for start, end in zip(starts, ends, strict=True):
        while end - begin > chunk_bytes:
            # No room for a block: the bytes before it go alone (a large header, small items).
            room = max(0, begin + chunk_bytes - start)
            cut = start + room // MAX_BLOCK_BYTES * MAX_BLOCK_BYTES
            if stop - cut < min_last_bytes:
                cut = _last_cut(starts, stop - min_last_bytes)
                if cut - begin < min_last_bytes:
                    cut = stop
            yield begin, cut
            begin = cut
    if stop > begin:
        yield begin, stop


def _last_cut(starts: Sequence[int], at: int) -> int:
    index = bisect_right(starts, at) - 1
    return 0 if index < 0 else at - (at - starts[index]) % MAX_BLOCK_BYTES


def check_memory(objects: Sequence[ObjectPlan], rules: PackingRules, budget_bytes: int) -> None:
    """Raises ``UsageError`` if a required chunk's copy exceeds the budget."""
    for plan in objects:
        needed = max([chunk.stop - max(chunk.start, len(plan.header)) for chunk in plan.chunks])
        if needed > max(rules.chunk_bytes, budget_bytes):
            raise UsageError(
                f"{plan.key!r} has {plan.size} bytes, and the storage takes no less than "
                f"{rules.least_write_bytes(plan.size)} of them at once: for copies of {needed} "
                f"bytes, memory_budget_bytes={budget_bytes} is too small"
            )
