# SPDX-License-Identifier: Apache-2.0
"""Shards in columns are those that were added; what is cut alike is planned once."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from actorsnap.errors import FormatError, IncompatibleState
from actorsnap.format.checksum import block_bytes_of
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import Stored, TensorEntry
from actorsnap.planning.restore import BoxPlanner, plan_boxes
from actorsnap.planning.shards import Shard, Shards, ShardTable

MIB = 1 << 20
ROWS = (12, 4)


def rows(path: str, start: int, stop: int, crc: int = 0, of: tuple[int, ...] = ROWS) -> TensorEntry:
    shape = (stop - start, *of[1:])
    nbytes = prod(shape) * 4
    return TensorEntry(
        path=path,
        dtype="float32",
        shape=shape,
        data=Stored(0, 64 * start, 64 * start + nbytes, (crc,)),
        global_shape=of,
        offsets=(start, *[0] * (len(of) - 1)),
    )


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    nbytes = draw(st.integers(1, 3)) * MIB - draw(st.integers(0, 99))
    count = -(-nbytes // MIB)
    crcs = draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
    start = draw(st.integers(0, 2**53))
    return Stored(draw(st.integers(0, 2**31)), start, start + nbytes, tuple(crcs))


@given(st.lists(stored(), max_size=5), st.data())
def test_shards_are_those_that_were_given(data: list[Stored], more: st.DataObject) -> None:
    given = [
        Shard(Box((at,), (1,)), each, more.draw(st.booleans())) for at, each in enumerate(data)
    ]
    shards = Shards.of(given)
    assert [*shards] == given
    assert [shards[at] for at in range(-len(given), len(given))] == 2 * given
    assert shards.block_bytes == [each.block_bytes for each in data]
    assert (shards == Shards.of(given[1:])) is (not given)
    assert shards.content == Shards.of(given[::-1]).content
    with pytest.raises(IndexError):
        shards[len(given)]


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_ranks_add_their_rows_in_any_order(order: list[int], own_of: set[int]) -> None:
    table = ShardTable()
    for position, rank in enumerate(order):
        entries = [rows("a", 2 * rank, 2 * rank + 2, rank)]
        entries += [rows("b", 2 * rank, 2 * rank + 2, 9)] if rank in own_of else []
        objects = [100 + rank]
        table.add(rank, entries, objects, is_own=position == 0)
    joined = table.joined()
    assert list(joined) == ["a", "b"] if own_of else ["a"]
    found = [(s.box.offsets[0], s.data.object, s.data.crc32c) for s in joined["a"]]
    assert found == [(2 * rank, 100 + rank, (rank,)) for rank in order]
    assert {box.offsets[0] for box in table.boxes("a")} == set(range(0, 12, 2))
    if own_of:
        ranks = [rank for rank in order if rank in own_of]
        assert [s.data.object for s in joined["b"]] == [100 + rank for rank in ranks]
        assert (joined["a"].cut is joined["b"].cut) == (len(own_of) == 6), "cut alike"


def test_boxes_that_differ_are_the_owners_alone() -> None:
    for is_own in (False, True):
        table = ShardTable()
        for rank in range(3):
            own = rows("w", 0, 2, rank // 2), rows("w", 2 * rank + 2, 2 * rank + 4, 7)
            table.add(rank, own, [rank], is_own=is_own and rank == 0)
        shards = table.joined()["w"]
        disputed = [(0, 0, True)] if is_own else []
        found = [(s.box.offsets[0], s.data.object, s.is_disputed) for s in shards]
        assert found == [*disputed, (2, 0, False), (4, 1, False), (6, 2, False)]
        assert shards.withheld == (() if is_own else (Box((0, 0), (2, 4)),))


def test_what_is_unwanted_is_compared_all_the_same() -> None:
    table = ShardTable()
    no_boxes: dict[str, Any] = {"is_own": False, "is_wanted": lambda entry: False}
    table.add(0, [rows("w", 0, 2)], [0], **no_boxes)
    assert table.joined() == {"w": []}
    assert table.boxes("w") == []
    table = ShardTable()
    table.add(3, [rows("w", 0, 2)], [0], **no_boxes)
    with pytest.raises(FormatError, match="ranks 3 and 5 have shards of different tensors"):
        table.add(5, [rows("w", 2, 4, of=(13, 4))], [0], **no_boxes)


@pytest.mark.parametrize("change", [{"dtype": "int32"}, {"requires_grad": True}])
def test_the_first_rank_with_another_tensor_is_named(change: dict[str, Any]) -> None:
    table = ShardTable()
    for rank in (4, 0, 1, 2):
        entries = [rows("v", rank, rank + 1), rows("w", rank, rank + 1)]
        if rank == 1:
            entries[1] = replace(entries[1], **change)
        table.add(rank, entries, [rank], is_own=rank == 4)
    with pytest.raises(FormatError, match="ranks 4 and 1 have shards") as caught:
        table.joined()
    assert caught.value.key == "w"


def test_what_is_cut_and_wanted_alike_is_planned_once() -> None:
    table = ShardTable()
    for rank in range(3):
        names = "a", "b", "disputed"
        entries = [rows(name, 4 * rank, 4 * rank + 4, rank) for name in names]
        longer = Stored(0, 0, 64, (1, 2, 3)) if rank else Stored(0, 0, 64, (1,))
        entries.append(replace(rows("blocks", 4 * rank, 4 * rank + 4), data=longer))
        entries.append(rows("cut", 6 * rank, 6 * rank + 4, of=(16, 4)))
        table.add(rank, entries, [rank], is_own=True)
    joined = table.joined()
    whole = (Box.whole(ROWS),)
    part = (Box((2, 1), (7, 2)),)
    disputed = Shards(joined["a"].cut, joined["a"].columns, [0])
    planner = BoxPlanner()
    plan = planner.plan("a", joined["a"], whole, 4)
    assert planner.plan("b", joined["b"], whole, 4) is plan
    assert plan.nbytes == 12 * 4 * 4
    for shards, wanted, itemsize in (
        (joined["a"], part, 4),
        (joined["blocks"], whole, 4),
        (disputed, (Box((0, 0), (4, 4)),), 4),
        (joined["cut"], (Box((0, 0), (4, 4)),), 4),
        (joined["a"], whole, 8),
    ):
        found = planner.plan("x", shards, wanted, itemsize)
        assert found is not plan
        assert found.reads == plan_boxes(
            "x",
            shards.cut.boxes,
            wanted,
            itemsize=itemsize,
            block_bytes=[
                block_bytes_of(s.data.stop - s.data.start, len(s.data.crc32c)) for s in shards
            ],
            disputed=shards.disputed,
        )
        assert found.stored.tolist() == [read.stored for read in found.reads]
        assert found.starts.tolist() == [read.start for read in found.reads]
    with pytest.raises(IncompatibleState, match="ranks stored different values"):
        planner.plan("disputed", disputed, whole, 4)
