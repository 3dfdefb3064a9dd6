"""When a save is due, by the step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import UsageError
from actorsnap.planning.cadence import SavePolicy, every

wrong: Any = every
"""For calls that mypy would refuse."""


def due_steps(policy: SavePolicy, num_steps: int, first: int = 0) -> list[int]:
    return [
        step for step in range(first, first + num_steps) if policy.due(step, is_first=step == first)
    ]


leaf_policies: st.SearchStrategy[SavePolicy] = st.one_of(
    st.builds(every.steps, st.integers(1, 9)),
    st.builds(every.at, st.frozensets(st.integers(0, 30), min_size=1)),
    st.builds(every.first),
    st.builds(every.last),
    st.just(every.custom(lambda step: step % 7 == 3)),
)


@given(leaf_policies, leaf_policies, leaf_policies, st.integers(0, 20))
def test_a_union_is_due_when_one_is(
    a: SavePolicy, b: SavePolicy, c: SavePolicy, first: int
) -> None:
    joined = a | (b | c)
    assert joined == a | b | c
    due = [set(due_steps(policy, 20, first)) for policy in (a, b, c)]
    assert set(due_steps(joined, 20, first)) == due[0] | due[1] | due[2]
    assert bool(joined.at_end()) == any(policy.at_end() for policy in (a, b, c))


@given(st.integers(1, 50), st.integers(0, 49), st.integers(0, 10**12))
def test_steps(n: int, offset: int, step: int) -> None:
    policy = every.steps(n, offset=offset % n)
    assert bool(policy.due(step, is_first=False)) == (step % n == offset % n)
    assert policy.due(step, is_first=True) == policy.due(step, is_first=False)
    assert sum(bool(policy.due(step + i, is_first=False)) for i in range(n)) == 1


def test_due() -> None:
    assert due_steps(every.steps(500), 1200) == [0, 500, 1000]
    assert due_steps(every.steps(500, offset=499), 1200) == [499, 999]
    assert due_steps(every.at([3, 5, 99]), 10) == [3, 5]
    assert due_steps(every.first(), 10, first=7) == [7]
    assert due_steps(every.last(), 10) == []
    assert due_steps(every.custom(lambda step: step in (2, 4)), 10) == [2, 4]
    assert due_steps(every.custom(lambda step: bool(np.int64(step) % 2 == 0)), 4) == [0, 2]


def test_reasons() -> None:
    policy = every.first() | every.steps(500) | every.at([500, 700]) | every.last()
    assert policy.due(500, is_first=True) == "first step, every 500 steps, at 500"
    assert policy.due(700, is_first=False) == "at 700"
    assert policy.due(701, is_first=False) == ""
    assert policy.at_end() == "last step"
    assert (every.last() | every.last()).at_end() == "last step, last step"
    assert every.steps(500).at_end() == ""
    assert every.custom(lambda step: True).due(1, is_first=False) == "custom"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wrong.steps(0), r"every\.steps\(n\) .* not 0: write every\.steps\(500\)"),
        (lambda: wrong.steps(-500), "not -500"),
        (lambda: wrong.steps(0.5), "not 0.5"),
        (lambda: wrong.steps(True), "not True"),
        (lambda: wrong.steps(500, offset=-1), "offset=0"),
        (lambda: wrong.steps(500, offset=500), "never due: write offset=0"),
        (lambda: wrong.steps(500, offset=1234), "never due: write offset=234"),
        (lambda: wrong.at(500), r"write every\.at\(\[500, 1000\]\)"),
        (lambda: wrong.at([]), "takes steps"),
        (lambda: wrong.at([-1]), r"not \[-1\]"),
        (lambda: wrong.custom(500), "write a function of the step"),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_forgotten_return_is_noticed() -> None:
    forgotten: Any = lambda step: None  # noqa: E731
    with pytest.raises(UsageError, match="return True or False"):
        every.custom(forgotten).due(1, is_first=False)


def test_only_policies_are_joined() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        every.steps(500) | 500  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        every.steps(500) | wrong.last
