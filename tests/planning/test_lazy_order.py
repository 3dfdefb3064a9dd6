# SPDX-License-Identifier: Apache-2.0
"""The backlog hands each chunk out once: eager ones first, then awaited ones, then by turns."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actorsnap.planning.lazy_order import Backlog, leaves_in, set_aside
from actorsnap.planning.packing import Item, PackingRules, pack, write_order

MIB = 1 << 20

leaf = st.integers(0, 9)
plans = st.lists(st.frozensets(leaf, max_size=4), max_size=12)


def drain(backlog: Backlog) -> list[int]:
    taken = []
    while (chunk := backlog.take()) is not None:
        taken.append(chunk)
        backlog.finish(chunk)
    return taken


@given(plans, st.frozensets(leaf), st.lists(leaf, unique=True), st.frozensets(leaf))
def test_the_order(
    leaves_of: list[frozenset[int]],
    eager: frozenset[int],
    touched: list[int],
    awaited: frozenset[int],
) -> None:
    backlog = Backlog(leaves_of, eager=eager)
    backlog.will_touch(touched)
    backlog.promote(backlog.left_of(awaited))
    order = drain(backlog)
    assert sorted(order) == list(range(len(leaves_of)))

    def turn(chunk: int) -> int:
        turns = [touched.index(each) for each in leaves_of[chunk] if each in touched]
        return min(turns, default=len(touched))

    def key(chunk: int) -> tuple[bool, bool, int]:
        leaves = leaves_of[chunk]
        return not leaves & eager, not leaves & awaited, turn(chunk)

    assert [key(chunk) for chunk in order] == sorted(map(key, order))


@given(plans, st.frozensets(leaf), st.data())
def test_what_is_left_is_what_was_not_finished(
    leaves_of: list[frozenset[int]], eager: frozenset[int], data: Any
) -> None:
    backlog = Backlog(leaves_of, eager=eager)
    left = set(range(len(leaves_of)))
    under_way: list[int] = []
    while left:
        may_finish = under_way and data.draw(st.booleans())
        if not may_finish and (taken := backlog.take()) is not None:
            under_way.append(taken)
        else:
            chunk = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            backlog.finish(chunk)
            left.remove(chunk)
        if data.draw(st.booleans()):
            backlog.will_touch(data.draw(st.lists(leaf, max_size=4)))
        for each in range(10):
            assert backlog.left_of([each]) == {c for c in left if each in leaves_of[c]}
        assert backlog.has_eager_left == any(leaves_of[chunk] & eager for chunk in left)
        assert backlog.is_handed_out == (left == set(under_way))
    assert backlog.take() is None


def test_what_is_awaited_while_others_are_copied_comes_next() -> None:
    backlog = Backlog([frozenset([n]) for n in range(6)], eager=[])
    backlog.will_touch([5, 4, 3])
    assert backlog.take() == 5
    backlog.promote(backlog.left_of([1]))
    assert [backlog.take(), backlog.take(), backlog.take()] == [1, 4, 3]


def test_leaves_in_chunks() -> None:
    """Small leaves share a chunk, large ones have several, empty ones none."""
    sizes = [100, 5 * MIB, 0, 200]
    items = [Item(f"k/{n}", "uint8", (size,), size, 1) for n, size in enumerate(sizes)]
    rules = PackingRules(chunk_bytes=2 * MIB, max_objects=1, min_object_bytes=64 * MIB)
    objects = pack(items, attempt="a", rank=0, rules=rules)
    found = leaves_in(objects, write_order(objects))
    assert frozenset().union(*found) == {0, 1, 3}
    assert sum(1 in leaves for leaves in found) >= 3
    assert sum(0 in leaves for leaves in found) == 1


@given(st.lists(st.integers(1, 100)), st.integers(0, 300))
def test_as_many_are_set_aside_as_fit(sizes: list[int], limit: int) -> None:
    aside = set_aside(sizes, limit)
    assert sum(sizes[n] for n in aside) <= limit
    smallest = sorted(sizes)[: len(aside) + 1]
    assert len(aside) == len(sizes) or sum(smallest) > limit
