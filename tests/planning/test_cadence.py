# SPDX-License-Identifier: Apache-2.0
"""When a save is due, by the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import UsageError
from actorsnap.planning.cadence import (
    AskedPolicy,
    Improvements,
    SaveCosts,
    SaveHistory,
    SavePolicy,
    every,
)

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
    assert every.steps(1).due(7, is_first=False) == "every step"
    assert every.steps(1_000_000).due(0, is_first=False) == "every 1000000 steps"
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
        (lambda: wrong.steps("100"), r"not '100': write every\.steps\(100\)"),
        (lambda: wrong.steps(1e3), r"not 1000\.0: write every\.steps\(1000\)"),
        (lambda: wrong.steps("0"), r"not '0': write every\.steps\(500\)"),
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


asked_policies: st.SearchStrategy[AskedPolicy] = st.one_of(
    st.builds(every.minutes, st.floats(0.01, 1000)),
    st.builds(every.pace, st.floats(0, 1000)),
    st.builds(every.overhead, st.floats(0.001, 1)),
    st.builds(every.improvement, st.just("loss"), st.sampled_from(["min", "max"])),
    st.just(every.notice()),
)
histories = st.builds(
    SaveHistory,
    begun_s=st.floats(0, 1e6),
    num_saves=st.integers(0, 3),
    is_pending=st.booleans(),
    stored_s=st.floats(0, 1e6),
    cost_s=st.one_of(st.none(), st.floats(0, 100)),
)


@given(asked_policies, st.integers(0, 100), st.booleans(), histories)
def test_asked_policies_are_due_by_the_clock_alone(
    policy: AskedPolicy, step: int, is_first: bool, history: SaveHistory
) -> None:
    assert policy.due(step, is_first=is_first) == ""
    assert policy.at_end() == ""
    assert policy.reason
    joined = every.steps(7) | policy
    assert bool(joined.due(step, is_first=is_first)) == (step % 7 == 0)
    assert policy.due_s(history) >= history.begun_s


@pytest.mark.parametrize(
    ("policy", "history", "due_s"),
    [
        (every.minutes(2), SaveHistory(100.0), 220.0),
        (every.minutes(0.5), SaveHistory(100.0, is_pending=True), 130.0),
        (every.pace(), SaveHistory(100.0), 100.0),
        (every.pace(), SaveHistory(100.0, 1, is_pending=True), math.inf),
        (every.pace(), SaveHistory(100.0, 1, stored_s=103.0), 103.0),
        (every.pace(60), SaveHistory(100.0, 1, stored_s=103.0), 160.0),
        (every.overhead(0.02), SaveHistory(100.0), 100.0),
        (every.overhead(0.02), SaveHistory(100.0, 1, stored_s=101.0, cost_s=0.5), 125.0),
        (every.overhead(), SaveHistory(100.0, 1, is_pending=True, cost_s=0.5), math.inf),
    ],
)
def test_when_a_clock_is_due(policy: AskedPolicy, history: SaveHistory, due_s: float) -> None:
    assert policy.due_s(history) == pytest.approx(due_s)


@pytest.mark.parametrize(
    "make",
    [
        lambda: every.minutes(0),
        lambda: every.minutes(math.nan),
        lambda: wrong.minutes("20"),
        lambda: every.pace(-1),
        lambda: every.overhead(0),
        lambda: every.overhead(2),
        lambda: wrong.improvement("loss", "least"),
        lambda: wrong.improvement(3, "min"),
        lambda: every.improvement("loss", "min", min_delta=-1),
    ],
)
def test_asked_policies_that_make_no_sense(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="every"):
        make()


@given(st.lists(st.floats(-10, 10) | st.just(math.nan)), st.sampled_from(["min", "max"]))
def test_improvements_are_records(values: list[float], mode: str) -> None:
    improvements = Improvements(every.improvement("m", mode))
    best: float | None = None
    for value in values:
        is_better = not math.isnan(value) and (
            best is None or (value < best if mode == "min" else value > best)
        )
        assert bool(improvements.judge({"m": value, "other": -99.0})) == is_better
        best = value if is_better else best


def test_costs_of_a_save() -> None:
    costs = SaveCosts()
    now = 0.0
    for _ in range(10):
        costs.enter(now, is_pending=False)
        now += 1.0
    assert costs.step_s == 1.0
    costs.enter(now, is_pending=False)
    now += 0.25
    costs.staged(0.25)
    costs.leave(now)
    for _ in range(4):
        now += 1.5  # slower, while it is stored
        costs.enter(now, is_pending=True)
    costs.stored(6.5)
    assert (costs.blocked_s, costs.slowdown_s, costs.cost_s) == (0.25, 2.0, 2.25)
    assert costs.step_s == 1.0
    # 2 steps, blocked, 1.5 times the save
    assert costs.has_time(2 + 0.25 + 9.75, num_steps=2, in_flight_s=None)
    assert not costs.has_time(2 + 0.25 + 9.74, num_steps=2, in_flight_s=None)
    assert not costs.has_time(2 + 0.25 + 9.75, num_steps=2, in_flight_s=6.0)
    assert costs.has_time(2 + 0.25 + 9.75, num_steps=2, in_flight_s=6.5)


def test_without_any_measurement_there_is_time() -> None:
    assert SaveCosts().has_time(0.1, num_steps=1, in_flight_s=None)
    assert not SaveCosts().has_time(0.0, num_steps=1, in_flight_s=None)
