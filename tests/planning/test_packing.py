# SPDX-License-Identifier: Apache-2.0
"""The packer covers every byte once, aligned, balanced, and cut where checksums allow."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.planning.packing import (
    Chunk,
    Item,
    ItemBox,
    ObjectPart,
    ObjectPlan,
    PackingRules,
    RankPlan,
    Share,
    copy_turn_bytes,
    pack,
    write_order,
)

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}
MIB = 1 << 20


def rules(**changes: int) -> PackingRules:
    usual = PackingRules(chunk_bytes=16 * MIB, max_objects=4, min_object_bytes=64 * MIB)
    return msgspec.structs.replace(usual, **changes)


def make(path: str, dtype: str, numel: int) -> Item:
    size = DTYPES[dtype]
    return Item(path, dtype, (numel,), numel * size, size)


def names_in(header: bytes) -> set[str]:
    return set(json.loads(header[8:])) - {"__metadata__"}


items_strategy = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "model"]),
        st.sampled_from(sorted(DTYPES)),
        st.one_of(st.integers(0, 3000), st.integers(0, 3 * MIB)),
    ),
    max_size=40,
).map(lambda specs: [make(f"{k}/{i}", d, n) for i, (k, d, n) in enumerate(specs)])


def check(items: list[Item], plans: tuple[ObjectPlan, ...]) -> None:
    seen = [index for plan in plans for index in plan.items]
    assert sorted(seen) == list(range(len(items)))
    for number, plan in enumerate(plans):
        assert len(plan.header) % 4096 == 0
        at = len(plan.header)
        for index, start, end in zip(plan.items, plan.starts, plan.ends, strict=True):
            assert start == at, "no gaps"
            assert end - start == items[index].nbytes
            assert start % items[index].itemsize == 0
            at = end
        assert at == plan.size
        at = 0
        covered = dict.fromkeys(range(len(plan.items)), 0)
        for index, chunk in enumerate(plan.chunks):
            assert (chunk.object, chunk.index) == (number, index)
            assert chunk.start == at
            at = chunk.stop
            inside = 0
            for piece in plan.pieces(chunk):
                assert piece.start == covered[piece.item], "in order, without gaps"
                assert piece.start % MAX_BLOCK_BYTES == 0
                covered[piece.item] = piece.stop
                inside += piece.stop - piece.start
            head = max(0, min(chunk.stop, len(plan.header)) - chunk.start)
            assert inside + head == chunk.stop - chunk.start
        assert at == plan.size
        for position, done in covered.items():
            assert done == items[plan.items[position]].nbytes


@given(items_strategy, st.integers(2, 20), st.integers(1, 5), st.integers(1, 8 * MIB))
def test_every_byte_is_covered_exactly_once(
    items: list[Item], chunk_mib: int, max_objects: int, min_object_bytes: int
) -> None:
    limits = rules(
        chunk_bytes=chunk_mib * MIB, max_objects=max_objects, min_object_bytes=min_object_bytes
    )
    plans = pack(items, attempt=ATTEMPT, rank=0, rules=limits)
    check(items, plans)
    assert len({plan.key for plan in plans}) == len(plans)
    for plan in plans:
        for chunk in plan.chunks:
            assert chunk.stop - chunk.start <= max(limits.chunk_bytes, len(plan.header))
    assert plans == pack(items, attempt=ATTEMPT, rank=0, rules=limits)


@given(items_strategy)
def test_write_order_has_every_chunk_once(items: list[Item]) -> None:
    plans = pack(items, attempt=ATTEMPT, rank=0, rules=rules(min_object_bytes=MIB))
    order = write_order(plans)
    assert sorted((c.object, c.index) for c in order) == [
        (c.object, c.index) for plan in plans for c in plan.chunks
    ]


def test_large_keys_are_spread_and_balanced() -> None:
    items = [make(f"model/{i}", "float32", 4 * MIB) for i in range(64)]
    plans = pack(items, attempt=ATTEMPT, rank=3, rules=rules())
    assert len(plans) == 4
    sizes = [plan.size - len(plan.header) for plan in plans]
    assert max(sizes) == min(sizes)
    assert plans[0].key == f"{ATTEMPT}/data/model/3-0.safetensors"


def test_no_object_is_larger_than_the_storage_takes() -> None:
    items = [make(f"model/{n}", "uint8", 300 + n) for n in range(9000)]
    items += [make(f"model/large-{n}", "uint8", 4 * MIB) for n in range(9)]
    plans = pack(items, attempt=ATTEMPT, rank=0, rules=rules(max_object_bytes=10 * MIB))
    check(items, plans)
    assert max(plan.size for plan in plans) <= 10 * MIB


def test_neighbours_in_write_order_lie_in_different_objects() -> None:
    items = [make(f"model/{i}", "float32", 4 * MIB) for i in range(64)]
    order = write_order(pack(items, attempt=ATTEMPT, rank=0, rules=rules()))
    same = sum(a.object == b.object for a, b in zip(order, order[1:], strict=False))
    assert same == 0


def test_small_keys_share_one_object_with_the_key_in_the_name() -> None:
    items = [make("step/value", "float32", 10), make("rng/torch", "uint8", 5000)]
    (plan,) = pack(items, attempt=ATTEMPT, rank=0, rules=rules())
    assert plan.key == f"{ATTEMPT}/data/=small/0-0.safetensors"
    assert names_in(plan.header) == {"step/value", "rng/torch"}


def test_a_key_of_its_own_has_names_below_the_key() -> None:
    (plan,) = pack(
        [make("model/fc.weight", "float32", MIB)], attempt=ATTEMPT, rank=0, rules=rules()
    )
    assert names_in(plan.header) == {"fc.weight"}


def test_many_small_tensors_take_a_handful_of_objects() -> None:
    items = [make(f"model/{i}", "float32", 256) for i in range(100_000)]
    plans = pack(items, attempt=ATTEMPT, rank=0, rules=rules())
    assert len(plans) == 1
    check(items, plans)


def test_headers_beyond_the_limit_go_into_further_objects() -> None:
    items = [make(f"model/{i}" + "x" * 10_000, "float32", 64) for i in range(8_000)]
    plans = pack(items, attempt=ATTEMPT, rank=0, rules=rules())
    assert len(plans) == 2
    check(items, plans)


def test_a_part_of_an_item_is_boxes_and_the_object_stays_whole() -> None:
    """The middle of a tensor: the end of a row, a whole row, the beginning of one."""
    items = [make("log/x", "float32", 10), Item("m/w", "float32", (4, MIB), 16 * MIB, 4)]
    part = ObjectPart(0, 6 * MIB, 13 * MIB, False, True)
    share = Share(0, None, 3, 7, 2, (part,))
    shared, own = pack(
        items, attempt=ATTEMPT, rank=5, rules=rules(), scopes=[[1]], plan=RankPlan((share,), 2)
    )
    assert shared.key == f"{ATTEMPT}/data/m/3-7.safetensors"
    assert own.key == f"{ATTEMPT}/data/=small/5-2.safetensors"
    assert names_in(shared.header) == {"w"}
    assert (shared.size, shared.nbytes) == (4096 + 16 * MIB, 7 * MIB)
    assert not shared.opens
    assert shared.items == (1, 1, 1)
    assert shared.boxes == (
        ItemBox(6 * MIB, (1, MIB // 2), (1, MIB // 2), (4, MIB)),
        ItemBox(8 * MIB, (1, MIB), (2, 0), (4, MIB)),
        ItemBox(12 * MIB, (1, MIB // 4), (3, 0), (4, MIB)),
    )
    assert [start - 4096 for start in shared.starts] == [6 * MIB, 8 * MIB, 12 * MIB]
    assert [end - 4096 for end in shared.ends] == [8 * MIB, 12 * MIB, 13 * MIB]
    assert own.opens
    assert own.boxes == (None,)


@given(
    sizes=st.lists(st.integers(1, 512 * MIB), max_size=8),
    num_copiers=st.integers(1, 16),
    on_devices=st.booleans(),
)
def test_a_thread_copies_much_in_a_turn_but_all_threads_end_together(
    sizes: list[int], num_copiers: int, on_devices: bool
) -> None:
    chunks = [Chunk(0, index, 0, size) for index, size in enumerate(sizes)]
    nbytes = copy_turn_bytes(chunks, num_copiers, on_devices=on_devices)
    assert 0 <= nbytes <= 128 * MIB
    if on_devices or sum(sizes) >= 4 * num_copiers * 128 * MIB:
        assert nbytes == 128 * MIB
    else:
        assert 4 * num_copiers * nbytes <= sum(sizes)
