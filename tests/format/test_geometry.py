# SPDX-License-Identifier: Apache-2.0
"""Boxes against numpy: every rule here is what direct indexing gives."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.geometry import Box, covers_exactly, flat_range_boxes

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box, perhaps empty, within ``shape``."""
    offsets = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


def indices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


def flat_indices(shape: tuple[int, ...], box: Box) -> list[int]:
    numbered = np.arange(math.prod(shape)).reshape(shape)
    picked: list[int] = numbered[indices_of(box)].ravel().tolist()
    return picked


def painted(shape: tuple[int, ...], boxes: list[Box]) -> npt.NDArray[Any]:
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[indices_of(box)] += 1
    return counts


@given(st.data(), shapes)
def test_intersection_holds_the_shared_elements(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = sorted(set(flat_indices(shape, a)) & set(flat_indices(shape, b)))
    both = a.intersect(b)
    assert both == b.intersect(a)
    assert ([] if both is None else flat_indices(shape, both)) == shared
    assert both is None or not both.is_empty
    if not a.is_empty:
        assert b.contains(a) == (both == a)


@given(st.data(), shapes)
def test_volume_and_emptiness(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    assert box.volume == len(flat_indices(shape, box))
    assert box.is_empty == (box.volume == 0)
    assert Box.whole(shape).contains(box)
    assert box.ndim == len(shape)
    assert all(
        stop == at + size for stop, at, size in zip(box.stops, box.offsets, box.sizes, strict=True)
    )


@given(st.data(), shapes)
def test_relative_box_picks_the_same_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.sizes))
    shifted = Box(
        tuple(a + b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes
    )
    assert shifted.relative_to(outer) == inner
    numbered = np.arange(math.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(
        numbered[indices_of(shifted)], numbered[indices_of(outer)][indices_of(inner)]
    )


@given(st.data(), full_shapes.filter(bool))
def test_split_halves_cover_the_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    dim = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, box.sizes[dim]))
    first, rest = box.split(dim, at)
    assert first.sizes[dim] == at
    assert covers_exactly(box, [first, rest])


def test_misuse_is_refused() -> None:
    box = Box((0, 0), (2, 3))
    with pytest.raises(ValueError, match="as many offsets"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        Box((0,), (-1,))
    with pytest.raises(ValueError, match="negative"):
        Box((-1,), (1,))
    with pytest.raises(ValueError, match="shorter"):
        box.intersect(Box((), ()))
    with pytest.raises(ValueError, match="is not within"):
        Box((1, 0), (2, 3)).relative_to(box)
    for dim, at in ((2, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(ValueError, match="cannot be split"):
            box.split(dim, at)


def cut(rng: random.Random, box: Box, times: int) -> list[Box]:
    """Random guillotine cuts, in random order."""
    parts = [box]
    for _ in range(times):
        part = parts.pop(rng.randrange(len(parts)))
        if part.ndim == 0:
            parts.append(part)
            continue
        dim = rng.randrange(part.ndim)
        parts.extend(part.split(dim, rng.randint(0, part.sizes[dim])))
    rng.shuffle(parts)
    return parts


@given(full_shapes, st.integers(0, 12), st.randoms(use_true_random=False))
def test_cuts_of_a_box_cover_it(shape: tuple[int, ...], times: int, rng: random.Random) -> None:
    whole = Box.whole(shape)
    parts = cut(rng, whole, times)
    assert covers_exactly(whole, parts)
    full = [part for part in parts if not part.is_empty]
    assert not covers_exactly(whole, [p for p in parts if p is not full[0]])
    assert not covers_exactly(whole, [*parts, full[-1]])


@given(st.data(), shapes)
def test_cover_is_what_painting_says(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = data.draw(st.lists(boxes_in(shape), max_size=5))
    counts = painted(shape, parts)
    assert covers_exactly(Box.whole(shape), parts) == bool((counts == 1).all())


@given(full_shapes, st.integers(0, 12), st.randoms(use_true_random=False))
def test_a_moved_part_no_longer_covers(
    shape: tuple[int, ...], times: int, rng: random.Random
) -> None:
    whole = Box.whole(shape)
    parts = cut(rng, whole, times)
    moved = rng.randrange(len(parts))
    part = parts[moved]
    offsets = tuple(rng.randint(0, n - s) for n, s in zip(shape, part.sizes, strict=True))
    parts[moved] = Box(offsets, part.sizes)
    expected = bool((painted(shape, parts) == 1).all())
    assert covers_exactly(whole, parts) == expected


def test_a_pinwheel_that_no_line_separates() -> None:
    pinwheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert covers_exactly(Box.whole((3, 3)), pinwheel)
    # The same volume, all within, but two overlap and leave a gap.
    pinwheel[-1] = Box((0, 0), (1, 1))
    assert not covers_exactly(Box.whole((3, 3)), pinwheel)


def test_cover_of_nothing_and_of_a_point() -> None:
    point = Box((), ())
    assert covers_exactly(point, [point])
    assert not covers_exactly(point, [])
    assert not covers_exactly(point, [point, point])
    assert covers_exactly(Box.whole((0, 3)), [])
    assert covers_exactly(Box.whole((2,)), [Box((0,), (2,)), Box((7,), (0,))])
    assert not covers_exactly(Box.whole((2,)), [Box((0,), (1,)), Box((2,), (1,))])


def test_cover_of_large_meshes_is_not_quadratic() -> None:
    side = 150
    mesh = [Box((4 * i, 2 * j), (4, 2)) for i, j in product(range(side), repeat=2)]
    compared = 0
    intersect = Box.intersect

    def counted(self: Box, other: Box) -> Box | None:
        nonlocal compared
        compared += 1
        return intersect(self, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Box, "intersect", counted)
        assert covers_exactly(Box.whole((4 * side, 2 * side)), mesh)
    assert compared == 0


@given(st.data(), shapes)
def test_flat_range_as_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = flat_range_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert [i for box in boxes for i in flat_indices(shape, box)] == list(range(start, stop))
    for box in boxes:
        first, *_ = flat = flat_indices(shape, box)
        assert flat == list(range(first, first + box.volume))


def test_flat_range_reaches_the_bound_and_no_more() -> None:
    assert len(flat_range_boxes((4, 4, 4), 1, 63)) == 5
    assert flat_range_boxes((), 0, 1) == [Box((), ())]
    assert flat_range_boxes((), 1, 1) == []
    assert flat_range_boxes((1, 1, 3), 0, 3) == [Box.whole((1, 1, 3))]
    for start, stop in ((-1, 0), (2, 1), (0, 7)):
        with pytest.raises(ValueError, match="is not within"):
            flat_range_boxes((2, 3), start, stop)
