# SPDX-License-Identifier: Apache-2.0
"""Reads cover what is asked for exactly once, and waste no more than blocks and gaps allow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError, IncompatibleState
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.geometry import Box
from actorsnap.planning.restore import BoxRead, Range, plan_boxes, plan_reads

MIB = 1 << 20

requests_strategy = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 40 * MIB),
        st.one_of(st.integers(0, 5000), st.integers(0, 20 * MIB)),
        st.booleans(),
    ).map(lambda t: Range(t[0], t[1], t[1] + t[2], t[3])),
    max_size=25,
)


@given(requests_strategy, st.integers(1, 16), st.integers(0, 2 * MIB))
def test_every_request_is_covered_exactly_once(
    requests: list[Range], chunk_mib: int, max_gap: int
) -> None:
    chunk = chunk_mib * MIB
    reads = plan_reads(requests, chunk_bytes=chunk, max_gap_bytes=max_gap)
    covered = [0] * len(requests)
    for read in reads:
        at = read.start
        assert read.gaps[0] == 0
        assert read.stop - read.start <= chunk
        for gap, part in zip(read.gaps, read.parts, strict=True):
            assert 0 <= gap <= max_gap
            at += gap
            request = requests[part.request]
            assert request.key == read.key
            assert request.start + part.start == at
            assert part.start == covered[part.request]
            assert part.start % MAX_BLOCK_BYTES == 0
            covered[part.request] = part.stop
            at = request.start + part.stop
        assert at == read.stop
        if not all(requests[part.request].in_place for part in read.parts):
            in_place = [part for part in read.parts if requests[part.request].in_place]
            assert all(part.stop - part.start < MAX_BLOCK_BYTES for part in in_place)
    assert covered == [r.stop - r.start for r in requests]


def test_neighbours_share_a_read() -> None:
    requests = [Range("a", 1000 * i, 1000 * i + 1000) for i in range(100)]
    (read,) = plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=0)
    assert (read.start, read.stop, len(read.parts)) == (0, 100_000, 100)


def test_a_gap_beyond_the_limit_is_not_read() -> None:
    requests = [Range("a", 0, 10), Range("a", 30, 40)]
    assert len(plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=19)) == 2
    (read,) = plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=20)
    assert read.gaps == (0, 20)


def test_what_goes_in_place_is_not_copied_with_the_rest() -> None:
    edge = Range("a", 0, MIB, in_place=False)
    inner = Range("a", MIB, 3 * MIB)
    behind = Range("a", 3 * MIB, 3 * MIB + 9, in_place=False)
    small = Range("a", 3 * MIB + 9, 3 * MIB + 18)
    reads = plan_reads([edge, inner, behind, small], chunk_bytes=8 * MIB, max_gap_bytes=0)
    assert [[part.request for part in read.parts] for read in reads] == [[0], [1], [2, 3]]


def test_objects_are_never_mixed() -> None:
    requests = [Range("a", 0, 10), Range("b", 10, 20)]
    assert [r.key for r in plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=99)] == ["a", "b"]


# Boxes ----------------------------------------------------------------------------------------


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover a shape, cut wherever; some are empty."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += box.split(dim, draw(st.integers(0, box.sizes[dim])))
    return draw(st.permutations(boxes))


def index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@given(st.data())
def test_each_wanted_element_is_delivered_once_and_no_block_is_wasted(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    stored = data.draw(partitions(shape))
    wanted = data.draw(partitions(shape))
    wanted = wanted[: data.draw(st.integers(0, len(wanted)))]
    itemsize = data.draw(st.sampled_from([1, MIB >> 4, MIB >> 1, MIB]))
    sizes = st.sampled_from([MIB >> 4, MIB >> 2, MIB])
    blocks = [data.draw(sizes) for _ in stored]
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    filled = [np.full(box.sizes, -1) for box in wanted]
    read_blocks = set()
    for read in plan_boxes("x", stored, wanted, itemsize=itemsize, block_bytes=blocks):
        box, block_bytes = stored[read.stored], blocks[read.stored]
        assert read.start % block_bytes == 0
        assert read.stop % block_bytes == 0 or read.stop == box.volume * itemsize
        assert read.start < read.stop
        for block in range(read.start // block_bytes, -(-read.stop // block_bytes)):
            assert (read.stored, block) not in read_blocks, "read twice"
            read_blocks.add((read.stored, block))
        elements = whole[index_of(box)].reshape(-1)[read.start // itemsize : read.stop // itemsize]
        assert list(read.wanted) == sorted(set(read.wanted))
        for number in read.wanted:
            target = filled[number].reshape(-1)
            flat = whole[index_of(wanted[number])].reshape(-1)
            if read.at is None:
                at = np.flatnonzero(np.isin(flat, elements))
                values = flat[at]
                assert len(at)
            else:
                assert read.wanted == (number,)
                at = read.at // itemsize + np.arange(len(elements))
                values = elements
            assert (target[at] == -1).all()
            target[at] = values
    needed = {
        (number, block)
        for number, box in enumerate(stored)
        for position, element in enumerate(whole[index_of(box)].reshape(-1))
        if any(np.isin(element, whole[index_of(each)]) for each in wanted)
        for block in range(
            position * itemsize // blocks[number],
            -(-(position + 1) * itemsize // blocks[number]),
        )
    }
    assert read_blocks == needed
    for each, found in zip(wanted, filled, strict=True):
        assert (found == whole[index_of(each)]).all()


def box(*ranges: tuple[int, int]) -> Box:
    return Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


def plan(stored: Sequence[Box], wanted: Sequence[Box], itemsize: int) -> list[BoxRead]:
    """With blocks of 1 MiB."""
    blocks = [MIB] * len(stored)
    return plan_boxes("m/x", stored, wanted, itemsize=itemsize, block_bytes=blocks)


def test_equal_boxes_are_one_plain_read() -> None:
    boxes = [box((0, 5), (0, 4000)), box((5, 9), (0, 4000))]
    assert plan(boxes, [boxes[1]], 4) == [BoxRead(1, 0, 64000, (0,), 0)]


def test_a_cut_of_the_first_dim_goes_in_place_but_for_the_edges() -> None:
    # Rows of a quarter of a block; the wanted ones begin and end inside of blocks.
    reads = plan([box((0, 100), (0, 4))], [box((6, 43), (0, 4))], MIB // 16)
    assert reads == [
        BoxRead(0, 2 * MIB, 10 * MIB, (0,), MIB // 2),
        BoxRead(0, MIB, 2 * MIB, (0,), None),
        BoxRead(0, 10 * MIB, 11 * MIB, (0,), None),
    ]


def test_each_stored_box_has_blocks_of_its_own_size() -> None:
    boxes = [box((0, 8)), box((8, 16))]
    blocks = [MIB >> 3, MIB >> 2]
    reads = plan_boxes("x", boxes, [box((1, 15))], itemsize=MIB >> 4, block_bytes=blocks)
    assert [(read.stored, read.start * 16 // MIB, read.stop * 16 // MIB) for read in reads] == [
        *((0, 2, 8), (0, 0, 2)),
        *((1, 0, 4), (1, 4, 8)),
    ]


def test_blocks_between_rows_are_not_read() -> None:
    reads = plan([box((0, 3), (0, 3))], [box((0, 3), (0, 2))], MIB)
    assert [(read.start // MIB, read.stop // MIB) for read in reads] == [(0, 2), (3, 5), (6, 8)]


def test_wanted_boxes_that_share_a_block_share_its_read() -> None:
    wanted = [box((n, n + 1)) for n in range(0, 8, 2)]
    assert plan([box((0, 8))], wanted, 4) == [BoxRead(0, 0, 32, (0, 1, 2, 3), None)]


def test_what_no_shard_has_is_named() -> None:
    stored = [box((0, 4), (0, 4)), box((0, 4), (4, 8)), box((4, 8), (0, 4))]
    assert plan(stored, [box((2, 4), (0, 8)), box((0, 8), (0, 4))], 4)
    with pytest.raises(FormatError, match=r"m/x.*\(4, 4\) up to \(5, 7\)"):
        plan(stored, [box((3, 5), (2, 7))], 4)
    with pytest.raises(FormatError, match="no shard has"):
        plan([], [box((0, 1))], 4)
    with pytest.raises(FormatError, match="overlap"):
        plan([box((0, 3)), box((2, 4))], [box((0, 4))], 4)
    assert plan([], [box((0, 0))], 4) == []


def test_no_part_of_a_disputed_box_is_read() -> None:
    stored = [box((0, 4)), box((4, 8))]

    def planned(*wanted: Box) -> list[BoxRead]:
        return plan_boxes("m/x", stored, wanted, itemsize=4, block_bytes=[16, 16], disputed={0})

    assert planned(box((0, 4)), box((5, 6))) == [
        BoxRead(0, 0, 16, (0,), 0),
        BoxRead(1, 0, 16, (1,), None),
    ]
    for part in ((0, 3), (3, 5), (0, 8)):
        with pytest.raises(IncompatibleState, match="ranks stored different values"):
            planned(box(part))
    # No rank stored elements 8 and 9 at all: that is damage.
    with pytest.raises(FormatError, match=r"no shard has .* \(8,\) up to \(10,\)"):
        planned(box((0, 10)))


def test_a_box_that_only_other_ranks_may_have_is_no_hole() -> None:
    arguments: dict[str, Any] = {"itemsize": 4, "block_bytes": [16]}
    for withheld, raised in (([box((4, 8))], IncompatibleState), ([], FormatError)):
        with pytest.raises(raised, match=r"\(4,\) up to \(8,\)"):
            plan_boxes("m/x", [box((0, 4))], [box((0, 8))], withheld=withheld, **arguments)


def test_thousands_of_boxes_of_one_path_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compared = 0
    intersect = Box.intersect

    def counted(self: Box, other: Box) -> Box | None:
        nonlocal num_compared
        num_compared += 1
        return intersect(self, other)

    monkeypatch.setattr(Box, "intersect", counted)
    grid = [
        box((32 * a, 32 * a + 32), (32 * b, 32 * b + 32))
        for a, b in itertools.product(range(64), range(64))
    ]
    whole = plan(grid, [box((0, 2048), (0, 2048))], 4)
    rows = [box((a, a + 2), (0, 2048)) for a in range(0, 2048, 2)]
    cut = plan(grid, rows, 4)
    for each in grid[:200]:
        plan(grid, [each], 4)
    assert len(whole) == 4096
    assert len(cut) == 4096
    assert num_compared < 100_000  # all pairs would be 5 million
