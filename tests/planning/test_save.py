# SPDX-License-Identifier: Apache-2.0
"""What ranks share is written once, by all of them, evenly, and each packs the same objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actorsnap.errors import UsageError
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.geometry import Box, covers_exactly
from actorsnap.format.owners import Grid, Layout, MeshCut
from actorsnap.planning.inventory import (
    Inventory,
    Scope,
    Sharded,
    ShardedTable,
    build_inventory,
    check_sharded,
    digest_of,
    on_several_meshes,
    ranks_digest,
)
from actorsnap.planning.packing import (
    Item,
    ObjectPlan,
    PackingRules,
    RankPlan,
    check_memory,
    pack,
)
from actorsnap.planning.save import SavePlan, plan_save

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
MIB = 1 << 20
DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "complex128": 16}
RULES = PackingRules(chunk_bytes=2 * MIB, max_objects=2, min_object_bytes=2 * MIB)

Ranks = tuple[int, ...] | None
Holdings = list[dict[Ranks, list[Item]]]
"""Per rank, its items by scope; what it alone holds stands under ``()``."""


def make(path: str, *shape: int, dtype: str = "float32", is_whole: bool = False) -> Item:
    size = DTYPES[dtype]
    return Item(path, dtype, shape, prod(shape) * size, size, is_whole=is_whole)


def shard(path: str, offsets: tuple[int, ...], shape: tuple[int, ...], of: tuple[int, ...]) -> Item:
    return msgspec.structs.replace(make(path, *shape), offsets=offsets, global_shape=of)


@dataclass
class World:
    """All ranks' parts in one save, as they would play them."""

    holdings: Holdings
    rules: PackingRules = RULES
    several: frozenset[str] = frozenset()
    items: list[list[Item]] = field(default_factory=list)
    plan: SavePlan = field(init=False)
    objects: list[tuple[ObjectPlan, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        inventories, lists, scopes = [], {}, []
        for held in self.holdings:
            self.items.append([])
            own: list[range] = []
            found = []
            for ranks, items in held.items():
                first = len(self.items[-1])
                self.items[-1] += items
                if ranks != ():
                    own.append(range(first, first + len(items)))
                    digest = digest_of(items)
                    lists[digest] = items
                    found.append(Scope(ranks, digest, sum(item.nbytes for item in items)))
            private = sum(item.nbytes for item in held.get((), ()))
            inventories.append(Inventory(private, tuple(found)))
            scopes.append(own)
        self.plan = plan_save(inventories, lists, self.rules, self.several)
        assert self.plan == plan_save(inventories, lists, self.rules, self.several)
        for rank, (items, own) in enumerate(zip(self.items, scopes, strict=True)):
            encoded = msgspec.msgpack.encode(self.plan.ranks[rank])
            plan = msgspec.msgpack.decode(encoded, type=RankPlan)
            assert plan == self.plan.ranks[rank]
            assert self.plan.digests[rank] == digest_of(plan)
            self.objects.append(
                pack(items, attempt=ATTEMPT, rank=rank, rules=self.rules, scopes=own, plan=plan)
            )

    @property
    def loads(self) -> list[int]:
        """Bytes that each rank writes, without headers."""
        return [
            sum(
                end - start
                for plan in plans
                for start, end in zip(plan.starts, plan.ends, strict=True)
            )
            for plans in self.objects
        ]

    def check(self) -> None:
        """Asserts everything that must hold of any plan."""
        for rank, plans in enumerate(self.objects):
            assert self.plan.ranks[rank].is_shared == any(plan.is_shared for plan in plans)
            for number, plan in enumerate(plans):
                self._check_chunks(number, plan)
        self._check_objects()
        self._check_items()

    def _check_chunks(self, number: int, plan: ObjectPlan) -> None:
        at = 0 if plan.opens else plan.starts[0]
        leaves = len(plan.header) if plan.opens else at
        for start, end in zip(plan.starts, plan.ends, strict=True):
            assert start == leaves, "no gaps"
            leaves = end
        done = [0] * len(plan.items)
        for index, chunk in enumerate(plan.chunks):
            assert (chunk.object, chunk.index, chunk.start) == (number, index, at)
            at = chunk.stop
            self._check_size(plan, chunk.start, chunk.stop)
            inside = max(0, min(chunk.stop, len(plan.header)) - chunk.start)
            for piece in plan.pieces(chunk):
                assert piece.start == done[piece.item]
                assert piece.start % MAX_BLOCK_BYTES == 0
                done[piece.item] = piece.stop
                inside += piece.stop - piece.start
            assert inside == chunk.stop - chunk.start
        assert at == leaves
        assert plan.nbytes == at - plan.chunks[0].start
        assert done == [e - s for s, e in zip(plan.starts, plan.ends, strict=True)]

    def _check_size(self, plan: ObjectPlan, start: int, stop: int) -> None:
        least = self.rules.least_write_bytes(plan.size)
        assert stop - start >= least or stop == plan.size
        most = self.rules.chunk_bytes
        if least > 1:  # a chunk, and a rest that is too little for another
            most = max(most, least + MAX_BLOCK_BYTES) + least
        assert stop - max(start, len(plan.header)) <= most
        assert start > 0 or stop <= max(most, len(plan.header)) + most

    def _check_objects(self) -> None:
        writers: dict[str, list[tuple[int, ObjectPlan]]] = {}
        for rank, plans in enumerate(self.objects):
            assert len({plan.key for plan in plans}) == len(plans)
            for plan in plans:
                writers.setdefault(plan.key, []).append((rank, plan))
        for found in writers.values():
            (_, opener), *joiners = found
            at = 0
            for _, plan in found:
                assert (plan.header, plan.size) == (opener.header, opener.size)
                assert plan.is_shared == bool(joiners)
                assert plan.opens == (plan is opener), "the first range has the header"
                assert plan.chunks[0].start == at
                at = plan.chunks[-1].stop
            assert at == opener.size
            numbers = [
                chunk.start // self.rules.least_write_bytes(opener.size)
                for _, plan in found
                for chunk in plan.chunks
            ]
            assert numbers == sorted(set(numbers)), "they can number the writes"
            assert len(numbers) <= (self.rules.max_writes or len(numbers))
        for rank, plans in enumerate(self.objects):
            assert self.plan.joiners[rank] == tuple(
                tuple(other for other, _ in writers[plan.key] if other != rank)
                for plan in plans
                if plan.opens and plan.is_shared
            )

    def _check_items(self) -> None:
        scopes: list[list[Ranks]] = [
            [ranks if ranks != () else (rank, -1) for ranks, items in held.items() for _ in items]
            for rank, held in enumerate(self.holdings)
        ]
        expected: dict[object, list[Item]] = {}
        for ranks, items in zip(scopes, self.items, strict=True):
            for scope, item in zip(ranks, items, strict=True):
                expected.setdefault((scope, item.path, item.offsets), []).append(item)
        written: dict[object, list[tuple[int, int, Box | None]]] = {}
        for rank, plans in enumerate(self.objects):
            for plan in plans:
                leaves = zip(plan.items, plan.starts, plan.ends, plan.boxes, strict=True)
                for index, low, high, box in leaves:
                    item = self.items[rank][index]
                    start = 0 if box is None else box.start
                    found = written.setdefault((scopes[rank][index], item.path, item.offsets), [])
                    stored = None if box is None else Box(box.offsets, box.shape)
                    found.append((start, start + high - low, stored))
                    if box is not None:
                        assert box.global_shape == (item.global_shape or item.shape)
                        assert prod(box.shape) * item.itemsize == high - low > 0
        assert written.keys() == expected.keys()
        for key, parts in written.items():
            item = expected[key][0]
            if len(parts) == 1:
                assert parts == [(0, item.nbytes, None)]
                continue
            assert not any(holder.is_whole for holder in expected[key])
            at = 0
            for start, stop, _ in sorted(parts):
                assert start == at
                at = stop
            assert at == item.nbytes
            whole = Box(item.offsets or (0,) * len(item.shape), item.shape)
            assert covers_exactly(whole, [box for *_, box in parts if box is not None])


shapes = st.one_of(
    st.sampled_from([(), (0,), (3, 0, 5), (1,), (3 * MIB,), (1, 1, 3 * MIB), (7, 300_000)]),
    st.tuples(st.integers(1, 5_000_000)),
    st.tuples(st.integers(1, 5_000), st.integers(0, 999)),
    st.tuples(st.integers(1, 9), st.integers(1, 99), st.integers(1, 9_999)),
)


@st.composite
def lists_of_items(draw: st.DrawFn, prefix: str) -> list[Item]:
    items = []
    for number in range(draw(st.integers(0, 8))):
        path = f"{draw(st.sampled_from(['a', 'model']))}/{prefix}{number}"
        shape, is_shard = draw(shapes), draw(st.booleans())
        item = make(
            path, *shape, dtype=draw(st.sampled_from(sorted(DTYPES))), is_whole=draw(st.booleans())
        )
        if shape and is_shard:
            offsets = tuple(draw(st.integers(0, 3)) for _ in shape)
            item = msgspec.structs.replace(
                item, offsets=offsets, global_shape=tuple(n + 3 for n in shape)
            )
        items.append(item)
    return items


@st.composite
def worlds(draw: st.DrawFn) -> Holdings:
    """Ranks with overlapping scopes, some of which the holders list differently."""
    world = draw(st.integers(1, 6))
    holdings: Holdings = [{(): draw(lists_of_items(f"own{rank}."))} for rank in range(world)]
    everyone = st.lists(st.integers(0, world - 1), min_size=1, unique=True)
    scopes: list[Ranks] = draw(
        st.lists(
            st.one_of(st.none(), everyone.map(lambda ranks: tuple(sorted(ranks)))),
            max_size=4,
            unique=True,
        )
    )
    for number, scope in enumerate(scopes):
        items = draw(lists_of_items(f"{number}."))
        agree = draw(st.booleans())
        dropped = draw(
            st.sets(st.tuples(st.integers(0, world), st.sampled_from(range(8))), max_size=3)
        )
        for rank in range(world) if scope is None else scope:
            if agree:
                holdings[rank][scope] = items
                continue
            held = [
                msgspec.structs.replace(item, is_whole=draw(st.booleans()))
                for index, item in enumerate(items)
                if (rank, index) not in dropped
            ]
            if held or scope is not None:
                holdings[rank][scope] = draw(st.permutations(held))
    return holdings


@given(worlds(), st.integers(2, 5), st.integers(1, 3), st.integers(1, 8 * MIB))
def test_every_byte_is_written_once_by_a_holder_and_every_object_opened_once(
    holdings: Holdings, chunk_mib: int, max_objects: int, min_object_bytes: int
) -> None:
    World(
        holdings,
        PackingRules(
            chunk_bytes=chunk_mib * MIB,
            max_objects=max_objects,
            min_object_bytes=min_object_bytes,
        ),
    ).check()


@given(
    worlds(),
    st.sampled_from([2 * MIB, 16 * MIB]),
    st.sampled_from([1, 5 * MIB, 11 * MIB]),
    st.sampled_from([None, 10_000, 7, 2, 1]),
    st.booleans(),
)
def test_what_the_storage_demands_of_writes_is_kept(
    holdings: Holdings, chunk_bytes: int, min_write_bytes: int, max_writes: int | None, joins: bool
) -> None:
    world = World(
        holdings,
        PackingRules(
            chunk_bytes=chunk_bytes,
            max_objects=2,
            min_object_bytes=20 * MIB,
            min_write_bytes=min_write_bytes,
            max_writes=max_writes,
            has_joined_writers=joins,
        ),
    )
    world.check()
    assert joins or not any(plan.is_shared for plans in world.objects for plan in plans)


CLOUD = PackingRules(
    chunk_bytes=16 * MIB,
    max_objects=4,
    min_object_bytes=64 * MIB,
    min_write_bytes=5 * MIB,
    max_writes=10_000,
)


@given(st.integers(1, 8), lists_of_items("x"), st.integers(0, 1 << 30))
@example(8, [make("m/w", 1 << 30)], 0)
@example(8, [make(f"m/{n}", 3 * MIB, dtype="uint8") for n in range(27)], 0)
@example(7, [make("m/w", 10 * MIB)], 0)
def test_many_writers_of_an_object_store_are_balanced(
    world: int, items: list[Item], more: int
) -> None:
    items = [*items, make("m/more", more, dtype="uint8")]
    sim = World([{None: items}] * world, CLOUD)
    sim.check()
    whole = max((item.nbytes for item in items if item.is_whole), default=0)
    mean = sum(sim.loads) / world
    assert max(sim.loads) <= max(1.05 * mean, mean + CLOUD.chunk_bytes) + whole + 1


@pytest.mark.parametrize("world", [1, 3, 8, 1000])
def test_the_largest_object_of_s3(world: int) -> None:
    sim = World([{None: [make("m/w", (5 << 40) - MIB, dtype="uint8")]}] * world, CLOUD)
    sim.check()
    (size,) = {plan.size for plans in sim.objects for plan in plans}
    least = CLOUD.least_write_bytes(size)
    assert 524 * MIB < least < 525 * MIB
    chunks = [chunk for plans in sim.objects for plan in plans for chunk in plan.chunks]
    assert 4000 < len(chunks) <= 10_000
    assert max(sim.loads) <= 1.05 * sum(sim.loads) / world + least


def test_without_joined_writers_ranks_share_out_whole_objects() -> None:
    items = [make(f"m/{n}", 32 * MIB, dtype="uint8") for n in range(16)]
    rules = msgspec.structs.replace(CLOUD, has_joined_writers=False)
    sim = World([{None: items}] * 4, rules)
    sim.check()
    assert sim.loads == [4 * 32 * MIB] * 4
    assert not any(plan.is_shared for plans in sim.objects for plan in plans)


def test_copies_of_large_chunks_must_fit_into_the_budget() -> None:
    items = [make("m/w", 5 << 40, dtype="uint8")]
    objects = World([{(): items}], CLOUD).objects[0]
    needed = max(chunk.stop - chunk.start for chunk in objects[0].chunks[1:])
    check_memory(objects, CLOUD, needed)
    with pytest.raises(UsageError, match=f"copies of {needed} bytes, memory_budget_bytes"):
        check_memory(objects, CLOUD, needed - MIB)


def test_a_budget_below_a_chunk_is_no_matter_of_the_storage() -> None:
    objects = World([{(): [make("m/w", 64 * MIB)]}]).objects[0]
    check_memory(objects, RULES, 1)


def step_bytes(items: Sequence[Item]) -> int:
    """By how much a range may miss its size: a whole item, or a row that is not cut."""
    return max(
        (item.nbytes if item.is_whole else min(item.nbytes, MIB) for item in items), default=0
    )


@given(
    st.integers(1, 40),
    lists_of_items("x"),
    st.lists(st.integers(0, 20 * MIB), max_size=40),
)
@example(8, [make("m/w", 1 << 30)], [])
@example(3, [make("m/w", 100, 1000, 1000)], [40 * MIB, 0, 390 * MIB])
def test_the_busiest_rank_is_near_the_level(
    world: int, items: list[Item], private: list[int]
) -> None:
    private = (private + [0] * world)[:world]
    sim = World([{(): [make("own/x", nbytes, dtype="uint8")], None: items} for nbytes in private])
    shared = sum(item.nbytes for item in items)
    # The lightest ranks are filled to one level; the others have more by themselves.
    level = min((sum(sorted(private)[:n]) + shared) / n for n in range(1, world + 1))
    best = max(level, *private)
    assert max(sim.loads) <= 1.05 * best + step_bytes(items) + MIB // 2


@pytest.mark.parametrize("world", [2, 4, 8, 64, 4096])
def test_a_data_parallel_job_is_balanced_and_its_plans_stay_small(world: int) -> None:
    items = [make(f"{key}/layers.{i}.w", 256 + i % 100, 4096) for i in range(1000) for key in "mo"]
    digest = digest_of(items)
    scope = Scope(None, digest, sum(item.nbytes for item in items))
    plan = plan_save([Inventory(0, (scope,))] * world, {digest: items}, RULES)
    loads = [
        sum(part.stop - part.start for share in own.shares for part in share.parts)
        for own in plan.ranks
    ]
    assert sum(loads) == scope.nbytes
    assert max(loads) <= 1.05 * scope.nbytes / world
    assert max(len(msgspec.msgpack.encode(own)) for own in plan.ranks) <= 64


def test_hybrid_sharding_is_balanced_within_each_group_and_over_all() -> None:
    """4 replicas of 8 shards, a replicated embedding, and ranks with data of their own."""
    holdings: Holdings = []
    table = make("model/embedding", 50_000, 1024)
    for rank in range(32):
        group = tuple(range(rank % 8, 32, 8))
        shards = [
            shard(f"model/{i}", (rank % 8 * 100, 0), (100, 4096), (800, 4096)) for i in range(40)
        ]
        own = make("own/x", MIB * (rank % 3))
        holdings.append({(): [own], group: shards, None: [table]})
    world = World(holdings)
    world.check()
    assert max(world.loads) <= 1.05 * sum(world.loads) / 32
    assert max(len(msgspec.msgpack.encode(own)) for own in world.plan.ranks) <= 100


def test_loads_that_differ_are_levelled() -> None:
    world = World(
        [
            {
                (): [make("own/x", 8 * MIB, dtype="uint8")],
                None: [make("m/w", 24 * MIB, dtype="uint8")],
            },
            {None: [make("m/w", 24 * MIB, dtype="uint8")]},
        ]
    )
    world.check()
    assert world.loads == [16 * MIB, 16 * MIB]


def test_those_with_the_least_choice_come_first() -> None:
    table, half = make("m/table", 10 * MIB), make("m/half", 10 * MIB)
    pair: dict[Ranks, list[Item]] = {None: [table], (0, 1): [half]}
    world = World([pair, pair, {None: [table]}, {None: [table]}])
    world.check()
    assert world.loads == [20 * MIB] * 4


def test_empty_items_at_the_very_end_are_not_lost() -> None:
    """Behind the last byte of an object that two ranks write, and in an object without bytes."""
    items = [make("m/w", 2 * MIB), make("m/none", 0, dtype="uint8"), make("s/none", 0)]
    rules = msgspec.structs.replace(RULES, max_objects=1, min_object_bytes=64 * MIB)
    world = World([{None: items}] * 2, rules)
    world.check()
    assert [[plan.is_shared for plan in plans] for plans in world.objects] == [
        [True],
        [True, False],
    ]


def test_a_few_bytes_are_written_by_one_rank() -> None:
    world = World([{None: [make("m/w", 1000)]}] * 4)
    world.check()
    assert sorted(world.loads) == [0, 0, 0, 4000]
    assert [len(plans) for plans in world.objects] == [1, 0, 0, 0]


def test_rows_are_kept_and_whole_items_are_not_cut() -> None:
    rows = World([{None: [make("m/w", 1001, 1024)]}] * 4)
    rows.check()
    boxes = [box for plans in rows.objects for plan in plans for box in plan.boxes]
    assert [box and box.shape[1:] for box in boxes] == [(1024,)] * 4
    whole = World([{None: [make("m/w", 1001, 1024, is_whole=True)]}] * 4)
    whole.check()
    assert sorted(whole.loads) == [0, 0, 0, 1001 * 4096]


def test_cuts_move_to_edges_of_objects_and_items_nearby() -> None:
    world = World([{None: [make(f"m/{i}", 1000 + i % 7, 1000) for i in range(256)]}] * 2)
    world.check()
    assert not any(plan.is_shared for plans in world.objects for plan in plans)
    assert max(world.loads) <= 1.05 * sum(world.loads) / 2


def test_ranks_that_list_other_items_share_those_that_they_have_in_common() -> None:
    shared = [make(f"m/{i}", 1000, 1000) for i in range(8)]
    extra = make("log/x", 10)
    world = World([{None: [*shared, extra]}, {None: shared[::-1]}, {None: shared[:4]}, {}])
    world.check()
    runs = [share.items for share in world.plan.ranks[2].shares]
    assert runs == [((0, 4),)]
    assert not world.plan.ranks[3].shares


def test_groups_with_the_same_lowest_rank_never_name_the_same_object() -> None:
    scopes: list[Ranks] = [None, (0, 1), (0, 2), (0, 1, 2)]
    holdings: Holdings = [{(): [make(f"m/own{rank}", 2 * MIB)]} for rank in range(3)]
    for number, scope in enumerate(scopes):
        for rank in range(3) if scope is None else scope:
            holdings[rank][scope] = [make(f"m/{number}", 2 * MIB), make(f"s/{number}", 10)]
    world = World(holdings)
    world.check()
    keys = {plan.key for plans in world.objects for plan in plans}
    assert len(keys) == 2 * len(scopes) + 3


def test_what_several_scopes_list_is_stored_whole_by_each_holder() -> None:
    """Two meshes of two ranks have a tensor of one name, perhaps with other values, and load
    that differs: cuts of both would cross."""
    norm, table = shard("m/norm", (0,), (4 * MIB,), (4 * MIB,)), make("m/table", 4 * MIB)
    other = shard("m/other", (0,), (MIB,), (MIB,))
    first: dict[Ranks, list[Item]] = {None: [table], (0, 1): [norm, other]}
    world = World(
        [
            {(): [make("own/x", 3 * MIB)], **first},
            first,
            {None: [table], (2, 3): [norm]},
            {None: [table], (2, 3): [norm]},
        ],
        several=frozenset({"m/norm"}),
    )
    for items, plans in zip(world.items, world.objects, strict=True):
        at = items.index(norm)
        found = [
            (box, end - start)
            for plan in plans
            for item, box, start, end in zip(
                plan.items, plan.boxes, plan.starts, plan.ends, strict=True
            )
            if item == at
        ]
        assert found == [(None, norm.nbytes)]
    keys = [plan.key for plans in world.objects for plan in plans if plan.opens]
    assert len(set(keys)) == len(keys)
    assert sum(world.loads) == norm.nbytes * 4 + table.nbytes + other.nbytes + 3 * MIB * 4


def test_copies_of_what_lies_on_another_mesh_too_are_stored_whole_by_each_holder() -> None:
    """Ranks 0 and 1 have copies of a tensor, rank 2 one of this name, perhaps with other values."""
    copied, kept = shard("m/w", (0, 0), (8, 4), (8, 4)), shard("m/v", (0, 0), (8, 4), (8, 4))
    inventories, lists = [], {}
    for held in ([copied, kept], [copied, kept], [copied]):
        scopes = [((0, 1), range(2))] if kept in held else []
        inventory, found = build_inventory(held, scopes)
        inventories.append(inventory)
        lists.update(found)
    plan = plan_save(inventories, lists, RULES, frozenset(["m/w"]))
    written = [
        sum([part.stop - part.start for share in own.shares for part in share.parts])
        for own in plan.ranks
    ]
    assert sorted(written[:2]) == [copied.nbytes, copied.nbytes + kept.nbytes]
    assert inventories[2].private_bytes == copied.nbytes
    assert plan.ranks[2] == RankPlan()
    said = [
        ([0, 1], [Sharded("m/w", "f", (8, 4), b"a", 2), Sharded("m/v", "f", (8, 4), b"a", 2)]),
        ([2], [Sharded("m/w", "f", (8, 4), b"b", 1)]),
    ]
    assert on_several_meshes(said) == {"m/w"}


LAYOUTS = [None, Layout(Grid(0, ((4, 1),)), (MeshCut(0, 0),)), Layout(Grid(0, ((2, 2), (2, 1))))]
SHAPES = [(), (8, 4), (8, 4), (0,)]


@given(
    st.lists(
        st.builds(
            lambda ranks, **others: Sharded(ranks=ranks, num_ranks=len(ranks), **others),
            path=st.text(max_size=8),
            dtype=st.sampled_from(["float32", "int8"]),
            shape=st.sampled_from(SHAPES),
            ranks=st.sampled_from([b"four", b"ab"]),
            layout=st.sampled_from(LAYOUTS),
        )
    )
)
def test_sharded_tensors_arrive_as_they_were_sent(sent: list[Sharded]) -> None:
    payload = msgspec.msgpack.encode(ShardedTable.of(sent))
    table = msgspec.msgpack.decode(payload, type=ShardedTable)
    arrived = table.tensors()
    assert list(arrived) == sent
    # One object of each kind, not of each tensor.
    assert len({id(tensor.layout) for tensor in arrived} | {id(None)}) <= len(table.kinds) + 1


def test_what_ranks_see_differently_is_named_all_at_once() -> None:
    one = [make("m/a", 2, 3), make("m/b", 4), make("m/c", 5)]
    other = [make("m/a", 2, 4), make("m/b", 4, dtype="bfloat16"), make("m/c", 5)]
    with pytest.raises(UsageError) as caught:
        World([{None: one}, {None: one}, {None: other}])
    message = str(caught.value)
    assert "'m/a' is float32 (2, 3) on rank 0, float32 (2, 4) on rank 2" in message
    assert "'m/b' is float32 (4,) on rank 0, bfloat16 (4,) on rank 2" in message
    assert "m/c" not in message


def test_a_shard_of_another_tensor_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"'m/a' at \(2,\) is .* of \(8,\) on rank 0, .* of \(9,\)"
    ):
        World(
            [
                {(0, 1): [shard("m/a", (2,), (4,), (8,))]},
                {(0, 1): [shard("m/a", (2,), (4,), (9,))]},
            ]
        )


def test_ranks_that_do_not_list_a_scope_which_names_them_are_named() -> None:
    items = [make("m/a", 2, 3)]
    with pytest.raises(
        UsageError, match=r"'m/a' is shared by ranks 0 to 2 according to ranks 0 and 2, but not "
    ):
        World([{(0, 1, 2): items}, {}, {(0, 1, 2): items}])
    with pytest.raises(UsageError, match=r"to rank 0, but not according to ranks 1 and 7"):
        World([{(0, 1, 7): items}, {}])
    with pytest.raises(UsageError, match=r"shared by rank 0, but reported by rank 1 as"):
        World([{(0,): items}, {(0,): items}])


def test_a_part_that_nobody_stores_is_named() -> None:
    pair = [Sharded("m/a", "float32", (8,), ranks_digest((0, 2)), 2)]
    other = [Sharded("m/a", "float32", (8,), ranks_digest((1, 3)), 2)]
    check_sharded([([0, 2], pair), ([1, 3], other)])
    with pytest.raises(
        UsageError, match=r"'m/a' is sharded over 2 ranks, but is in the app state of rank 1 only$"
    ):
        check_sharded([([0, 2], pair), ([1], other)])
    text = r"'m/a' is sharded over 2 ranks, but not sharded in the app state of rank 3: shard it "
    with pytest.raises(UsageError, match=text):
        check_sharded([([0, 2], pair), ([1], other)], lambda paths: dict.fromkeys(paths, [3]))
    apart = [Sharded("m/a", "int8", (8,), ranks_digest((1, 3)), 2)]
    with pytest.raises(UsageError, match=r"float32 \(8,\) on rank 0, int8 \(8,\) on rank 1$"):
        check_sharded([([0, 2], pair), ([1], apart)])


def test_many_complaints_are_counted() -> None:
    with pytest.raises(UsageError, match=r"\.\.\. and 950 more"):
        World([{None: [make(f"m/{i}", n) for i in range(1000)]} for n in (1, 2)])


def test_what_stands_twice_is_refused() -> None:
    scope = Scope(None, digest_of([]), 0)
    with pytest.raises(ValueError, match="lists a scope twice"):
        plan_save([Inventory(0, (scope, scope))], {scope.digest: []}, RULES)
    item = make("m/a", 1)
    with pytest.raises(ValueError, match="'m/a' is listed twice"):
        World([{None: [item, item]}, {None: []}])


def test_digests_tell_lists_and_inventories_apart_and_are_stable() -> None:
    items = [make("m/a", 2, 3), make("m/b", 4)]
    assert digest_of(items) == digest_of(tuple(items))
    assert digest_of(items) != digest_of(items[::-1])
    assert digest_of([make("m/a", 1)]).hex() == "87292dc8a55d2bb9e8e42e34"
    one = Inventory(0, (Scope((0, 1), b"x", 1),))
    assert digest_of(one) == digest_of(Inventory(0, (Scope((0, 1), b"x", 1),)))
    assert digest_of(one) != digest_of(Inventory(1, one.scopes))
