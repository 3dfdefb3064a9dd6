# SPDX-License-Identifier: Apache-2.0
"""Retention by property: nothing more goes at a second look, and nothing that went is missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import UsageError
from actorsnap.format.steps import StepName
from actorsnap.planning.keeping import (
    KeepPolicy,
    StoredStep,
    Verdict,
    current_generation,
    judge,
    keep,
    leftovers,
    metric_value,
    timeline,
    unread_run,
)

HOUR, DAY = 3600, 86400
wrong: Any = keep
"""For calls that mypy would refuse."""

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
"""A Monday."""


def stored(
    step: int, loss: float | None = None, *, g: int = 1, at: float | None = None
) -> StoredStep:
    metrics = {} if loss is None else {"loss": loss}
    created_s = NOON + step if at is None else at
    return StoredStep(name=StepName(step, g), created_s=created_s, metrics=metrics)


def with_losses(*losses: float | None) -> list[StoredStep]:
    """Steps 0, 1, ..."""
    return [stored(step, loss) for step, loss in enumerate(losses)]


def at_times(*times: float) -> list[StoredStep]:
    """Steps 0, 1, ..., created so many seconds after noon."""
    return [stored(step, at=NOON + time) for step, time in enumerate(times)]


def kept(policy: KeepPolicy, steps: Sequence[StoredStep]) -> list[int]:
    return [step.step for step in steps if step.name in policy.judge(steps)]


def staying(verdicts: Iterable[Verdict]) -> set[StepName]:
    return {verdict.name for verdict in verdicts if verdict.keeps}


# Properties

numbers = st.integers(1, 4)
values = st.sampled_from([0.0, -0.0, 0.1, 0.5, -1.0, math.inf, -math.inf, math.nan])
metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), values)
durations = st.sampled_from([0, 1, 1800, HOUR, 5 * HOUR, DAY, 9 * DAY, 40 * DAY, -DAY, 400 * DAY])

LEAVES: list[st.SearchStrategy[KeepPolicy]] = [
    st.builds(keep.all),
    st.builds(keep.last, numbers),
    st.builds(
        keep.best,
        st.sampled_from(["loss", "accuracy"]),
        st.sampled_from(["min", "max"]),
        n=numbers,
        pending=st.integers(0, 4),
    ),
    st.builds(keep.every, steps=st.sampled_from([1, 2, 5, 10, 1000])),
    st.sampled_from(["hourly", "daily", "weekly", "monthly", "yearly"]).flatmap(
        lambda period: st.builds(keep.thinned, **{period: numbers})
    ),
    st.builds(keep.thinned, hourly=numbers, daily=numbers, yearly=numbers),
    st.builds(
        keep.newer_than,
        st.sampled_from([1, 3600, 2 * 86400, 100 * 86400]).map(lambda s: timedelta(seconds=s)),
    ),
    st.builds(keep.at, st.frozensets(st.integers(0, 40), min_size=1)),
    st.just(keep.custom(lambda steps: [step for step in steps if step.step % 3 == 0])),
]
leaf_policies = st.one_of(LEAVES)


def join(policies: Sequence[KeepPolicy]) -> KeepPolicy:
    first, *others = policies
    for other in others:
        first = first | other
    return first


policies = leaf_policies | st.lists(leaf_policies, min_size=2, max_size=3).map(join)


@st.composite
def timelines(draw: st.DrawFn) -> list[StoredStep]:
    """Steps mostly rise; clocks jump in both directions."""
    steps: list[StoredStep] = []
    step, generation, created_s = 0, 1, NOON
    for _ in range(draw(st.integers(0, 3) | st.integers(4, 12))):
        if draw(st.integers(0, 4)) == 0:
            generation += 1
            step = max(0, step - draw(st.integers(0, 3)))
        step += draw(st.sampled_from([1, 1, 2, 5, 30]))
        created_s += draw(durations)
        name = StepName(step, generation)
        steps.append(StoredStep(name=name, created_s=created_s, metrics=draw(metrics)))
    return steps


@dataclass(frozen=True)
class Look:
    """A policy and what else counts, for judging any part of a timeline."""

    policy: KeepPolicy
    protected: Mapping[StepName, str]
    valid: Collection[StepName]
    min_valid: int
    is_protecting: bool

    def judge(self, steps: Sequence[StoredStep]) -> list[Verdict]:
        return judge(
            steps,
            self.policy,
            protected=self.protected,
            valid=self.valid,
            min_valid=self.min_valid,
        )

    def kept(self, steps: Sequence[StoredStep]) -> set[StepName]:
        if not self.is_protecting:
            return set(self.policy.judge(steps))
        return staying(self.judge(steps))


@st.composite
def looks(draw: st.DrawFn) -> tuple[list[StoredStep], Look]:
    steps = draw(timelines())
    names = frozenset([s.name for s in steps])
    some = st.frozensets(st.sampled_from(sorted(names, key=str))) if steps else st.just(names)
    protected = dict.fromkeys(draw(st.just(frozenset[StepName]()) | some), "pinned")
    valid = draw(st.just(names) | some)
    return steps, Look(
        draw(policies), protected, valid, draw(st.integers(1, 3)), is_protecting=draw(st.booleans())
    )


@given(looks(), st.data())
def test_a_second_look_lets_nothing_more_go(
    found: tuple[list[StoredStep], Look], data: st.DataObject
) -> None:
    """Also if something else, a pin that has gone since, had kept more."""
    steps, look = found
    first = look.kept(steps)
    left = [s for s in steps if s.name in first or data.draw(st.booleans())]
    assert first <= look.kept(left)
    alone = [s for s in steps if s.name in first]
    assert look.kept(alone) == first


@given(looks())
def test_a_step_that_goes_is_not_wanted_again(found: tuple[list[StoredStep], Look]) -> None:
    steps, look = found
    wanted = look.kept(steps)
    for num_old in range(len(steps)):
        old = steps[:num_old]
        gone = {s.name for s in old} - look.kept(old)
        assert not gone & wanted


@given(looks(), st.data())
def test_an_early_pass_costs_nothing_that_a_late_one_keeps(
    found: tuple[list[StoredStep], Look], data: st.DataObject
) -> None:
    steps, look = found
    num_old = data.draw(st.integers(0, len(steps)))
    old, new = steps[:num_old], steps[num_old:]
    early = look.kept(old)
    left = [s for s in old if s.name in early or data.draw(st.booleans())]
    assert look.kept(steps) <= look.kept([*left, *new])


@pytest.mark.parametrize("leaf", LEAVES, ids=range(len(LEAVES)))
@given(timelines(), st.data())
def test_each_policy_wants_no_step_again(
    leaf: st.SearchStrategy[KeepPolicy], steps: list[StoredStep], data: st.DataObject
) -> None:
    policy = data.draw(leaf)
    wanted = policy.judge(steps).keys()
    for num_old in range(len(steps)):
        old, new = steps[:num_old], steps[num_old:]
        early = policy.judge(old)
        left = [s for s in old if s.name in early]
        assert wanted <= early.keys() | {s.name for s in new}
        assert wanted <= policy.judge([*left, *new]).keys()


@given(looks())
def test_some_steps_always_stay(found: tuple[list[StoredStep], Look]) -> None:
    steps, look = found
    names = [s.name for s in steps]
    verdicts = look.judge(steps)
    assert [verdict.name for verdict in verdicts] == names
    left = staying(verdicts)
    assert set(names[-1:]) <= left
    assert look.protected.keys() <= left
    verified = [name for name in names if name in look.valid]
    assert set(verified[-max(1, look.min_valid) :]) <= left
    if len(verified) < look.min_valid:
        assert left == set(names)
    for verdict in verdicts:
        assert verdict.keeps == bool(verdict.reasons)
        assert all(verdict.reasons)


@given(timelines(), policies, policies)
def test_a_union_keeps_the_union(steps: list[StoredStep], a: KeepPolicy, b: KeepPolicy) -> None:
    assert (a | b).judge(steps).keys() == a.judge(steps).keys() | b.judge(steps).keys()
    assert (a | b).judge(steps).keys() == (b | a).judge(steps).keys()
    assert (a | a).judge(steps).keys() == a.judge(steps).keys()


@given(timelines(), policies)
def test_policies_keep_only_stored_steps(steps: list[StoredStep], policy: KeepPolicy) -> None:
    reasons = policy.judge(steps)
    assert reasons.keys() <= {s.name for s in steps}
    assert all(reasons.values())
    assert policy.judge(steps) == reasons


# Each policy


def test_all_and_last() -> None:
    steps = with_losses(None, None, None)
    assert kept(keep.all(), steps) == [0, 1, 2]
    assert kept(keep.last(1), steps) == [2]
    assert kept(keep.last(2), steps) == [1, 2]
    assert kept(keep.last(9), steps) == [0, 1, 2]
    assert kept(keep.last(9), []) == []
    assert keep.last(2).judge(steps)[StepName(2, 1)] == "last 2"


@pytest.mark.parametrize(
    ("losses", "smallest", "greatest"),
    [
        ([0.3, 0.1, 0.2], 1, 0),
        ([0.3, 0.0, 0.2], 1, 0),
        ([0.1, 0.1, 0.1], 0, 0),
        ([0.2, 0.1, 0.1], 1, 0),
        ([0.0, -0.0, 1.0], 0, 2),
        ([math.nan, 0.1, math.nan], 1, 1),
        ([math.nan, math.inf, math.nan], 1, 1),
        ([0.1, math.nan, 0.2], 0, 2),
        ([math.nan, math.nan, math.nan], 0, 0),
        ([-math.inf, math.inf, 0.0], 0, 1),
    ],
)
def test_the_best(losses: list[float], smallest: int, greatest: int) -> None:
    steps = with_losses(*losses)
    assert kept(keep.best("loss", "min"), steps) == [smallest]
    assert kept(keep.best("loss", "max"), steps) == [greatest]


def test_several_best() -> None:
    steps = with_losses(0.3, 0.1, math.nan, 0.2, 0.1)
    assert kept(keep.best("loss", "min", n=2), steps) == [1, 4]
    assert kept(keep.best("loss", "min", n=3), steps) == [1, 3, 4]
    assert kept(keep.best("loss", "max", n=4), steps) == [0, 1, 3, 4]
    assert kept(keep.best("loss", "max", n=5), steps) == [0, 1, 2, 3, 4]
    reasons = keep.best("loss", "min").judge(with_losses(0.113, 0.5))
    assert reasons == {StepName(0, 1): "best loss (min): 0.113"}
    assert keep.best("loss", "max").judge(with_losses(math.nan)) == {
        StepName(0, 1): "best loss (max): nan"
    }


def test_a_missing_metric_may_still_come() -> None:
    policy = keep.best("loss", "min")
    assert kept(policy, with_losses(0.1, None)) == [0, 1]
    assert kept(policy, with_losses(0.1, None, None, None, None, None)) == [0, 1, 2, 3, 4, 5]
    # The two newer ones stay, too: they count.
    assert kept(policy, with_losses(0.1, None, 0.2, 0.3)) == [0, 1, 2, 3]
    assert kept(policy, with_losses(0.1, None, 0.2, 0.3, 0.4)) == [0]
    assert kept(policy, with_losses(0.1, None, 0.2, math.nan, 0.4)) == [0]
    # It counts as NaN then.
    assert kept(policy, with_losses(None, math.nan, math.nan, math.nan)) == [0]
    assert kept(keep.best("loss", "min", n=4), with_losses(None, 3, 2, 1)) == [0, 1, 2, 3]
    # No patience.
    assert kept(keep.best("loss", "min", pending=0), with_losses(0.1, None)) == [0]
    assert kept(keep.best("loss", "min", pending=0), with_losses(None, None)) == [0]
    reasons = policy.judge(with_losses(None, 0.2, 0.1))
    assert reasons == {
        StepName(0, 1): "loss may still be recorded",
        StepName(1, 1): "loss of an older step may still be recorded",
        StepName(2, 1): "best loss (min): 0.1",
    }


@pytest.mark.parametrize("pending", [0, 1, 3])
def test_a_metric_of_every_other_step_lets_steps_go(pending: int) -> None:
    """Deletes would otherwise keep the number of newer steps with the metric low for ever."""
    policy = keep.last(3) | keep.best("loss", "min", pending=pending)
    left: list[StoredStep] = []
    for step in range(100):
        left.append(stored(step, 1 / (step + 1) if step % 2 else None))
        verdicts = judge(left, policy, protected={}, valid=[s.name for s in left])
        left = [s for s in left if s.name in staying(verdicts)]
        assert len(left) <= 3 + 1 + 2 * pending


@pytest.mark.parametrize(
    ("steps", "k", "expected"),
    [
        ([0, 500, 1000, 1500, 2000], 1000, [0, 1000, 2000]),
        ([1, 999, 1001, 1002, 3000, 3999], 1000, [1, 1001, 3000]),
        ([7], 1000, [7]),
        ([3, 4, 5], 1, [3, 4, 5]),
        ([], 1, []),
    ],
)
def test_every(steps: list[int], k: int, expected: list[int]) -> None:
    assert kept(keep.every(steps=k), [stored(step) for step in steps]) == expected


def test_every_takes_the_first_of_the_timeline() -> None:
    """Step 500 was stored by both generations: the run continued it and stored it again."""
    steps = [stored(500, g=1), stored(500, g=2), stored(600, g=2)]
    assert list(keep.every(steps=1000).judge(steps)) == [StepName(500, 1)]
    assert keep.every(steps=10_000).judge(steps)[StepName(500, 1)] == "every 10000 steps"


def test_thinned() -> None:
    steps = at_times(0, 60, HOUR, HOUR + 60, 5 * HOUR, DAY, 2 * DAY, 2 * DAY + HOUR, 7 * DAY)
    assert kept(keep.thinned(hourly=1), steps) == [8]
    assert kept(keep.thinned(hourly=3), steps) == [6, 7, 8]
    assert kept(keep.thinned(hourly=100), steps) == [0, 2, 4, 5, 6, 7, 8]
    assert kept(keep.thinned(daily=3), steps) == [5, 6, 8]
    assert kept(keep.thinned(weekly=9), steps) == [0, 8]
    assert kept(keep.thinned(monthly=9), steps) == [0]
    assert kept(keep.thinned(yearly=9), steps) == [0]
    assert kept(keep.thinned(hourly=1, daily=2, weekly=2), steps) == [0, 6, 8]


@pytest.mark.parametrize(
    ("period", "time", "later", "expected"),
    [
        ("hourly", (2026, 11, 23, 5, 59, 59), 1, "hourly 2026-11-23T05"),
        ("daily", (2026, 11, 23, 23, 59, 59), 1, "daily 2026-11-23"),
        ("weekly", (2026, 11, 29, 23, 59, 59), 1, "weekly 2026-W48"),
        ("weekly", (2027, 1, 3, 23, 59, 59), 1, "weekly 2026-W53"),
        ("monthly", (2024, 2, 29, 23, 59, 59), 1, "monthly 2024-02"),
        ("yearly", (2026, 12, 31, 23, 59, 59), 1, "yearly 2026"),
    ],
)
def test_periods_are_those_of_utc(
    period: str, time: tuple[int, ...], later: int, expected: str
) -> None:
    end = datetime(*time, tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]
    policy = keep.thinned(**{period: 9})
    before, within, after = stored(1, at=end - 1), stored(2, at=end), stored(3, at=end + later)
    assert policy.judge([before, within])[before.name] == expected
    assert kept(policy, [before, within, after]) == [1, 3]


def test_clocks_that_jump() -> None:
    """No step is earlier than the one before it."""
    ahead = at_times(0, 400 * DAY, HOUR, 2 * HOUR)
    assert kept(keep.thinned(yearly=9), ahead) == [0, 1]
    assert kept(keep.newer_than(timedelta(hours=1)), ahead) == [1, 2, 3]
    back = at_times(0, HOUR, -DAY, 2 * HOUR)
    assert kept(keep.thinned(hourly=9), back) == [0, 1, 3]
    assert kept(keep.newer_than(timedelta(hours=1)), back) == [1, 2, 3]


@pytest.mark.parametrize("created_s", [0.0, -1e9, 1e300, -1e300, math.inf, -math.inf])
def test_times_out_of_range(created_s: float) -> None:
    for period in ("hourly", "daily", "weekly", "monthly", "yearly"):
        assert kept(keep.thinned(**{period: 1}), [stored(1, at=created_s)]) == [1]


def test_newer_than() -> None:
    steps = at_times(0, DAY, 2 * DAY, 3 * DAY)
    assert kept(keep.newer_than(timedelta(days=1)), steps) == [2, 3]
    assert kept(keep.newer_than(timedelta(days=2)), steps) == [1, 2, 3]
    assert kept(keep.newer_than(timedelta(seconds=0.5)), steps) == [3]
    assert kept(keep.newer_than(timedelta(seconds=1)), []) == []


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        *((2 * DAY, "2 d"), (5400, "1.5 h"), (90.0, "1.5 min"), (0.5, "0.5 s")),
        *((365 * DAY, "365 d"), (86399, "24 h"), (1000 * DAY, "1000 d")),
    ],
)
def test_durations_in_reasons(age_s: float, text: str) -> None:
    assert list(keep.newer_than(timedelta(seconds=age_s)).judge([stored(1)]).values()) == [
        f"newer than {text}"
    ]


def test_at() -> None:
    steps = [stored(1), stored(2), stored(3), stored(2, g=2)]
    assert kept(keep.at([2, 7]), steps) == [2, 2]
    assert kept(keep.at(range(2, 9)), steps) == [2, 3, 2]
    assert kept(keep.at(np.array([3])), steps) == [3]
    assert keep.at([2]).judge(steps)[StepName(2, 1)] == "at 2"
    assert keep.at([2, 3, 3]) == keep.at({3, 2})


def test_custom() -> None:
    steps = [stored(1), stored(2), stored(3), stored(2, g=2)]
    assert kept(keep.custom(lambda steps: steps[-2:]), steps) == [3, 2]
    assert kept(keep.custom(lambda steps: [2, 9]), steps) == [2, 2]
    assert kept(keep.custom(lambda steps: (s.name for s in steps[:1])), steps) == [1]
    assert kept(keep.custom(lambda steps: [np.int64(3)]), steps) == [3]
    assert kept(keep.custom(lambda steps: ()), steps) == []
    assert keep.custom(lambda steps: [1]).judge(steps) == {StepName(1, 1): "custom"}


@pytest.mark.parametrize("result", [None, 3, "3", [None], ["3"], [True], [1.0], b"3"])
def test_a_result_of_custom_that_is_not_understood_deletes_nothing(result: Any) -> None:
    with pytest.raises(UsageError, match=r"keep\.custom: the function returned"):
        judge([stored(1)], keep.custom(lambda steps: result), protected={}, valid=())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wrong.last(0), r"keep\.last\(n\) .* not 0: write keep\.last\(1\)"),
        (lambda: wrong.last(-2), "not -2"),
        (lambda: wrong.last(True), "not True"),
        (lambda: wrong.last(1.0), "not 1.0"),
        (lambda: wrong.best("loss", "minimum"), 'write "min" if small values'),
        (lambda: wrong.best("", "min"), r'write keep\.best\("loss", "min"\)'),
        (lambda: wrong.best(None, "min"), "None names no metric"),
        (lambda: wrong.best("loss", "min", n=0), "write n=1"),
        (lambda: wrong.best("loss", "min", pending=-1), "write pending=0"),
        (lambda: wrong.every(steps=0), r"write keep\.every\(steps=1000\)"),
        (lambda: wrong.every(steps=-5), "not -5"),
        (lambda: wrong.thinned(), r"write keep\.thinned\(hourly=24, daily=7\)"),
        (lambda: wrong.thinned(hourly=0), r"keep\.thinned\(hourly=\.\.\.\) .* write hourly=1"),
        (lambda: wrong.thinned(hourly=1, daily=-1), "not -1"),
        (lambda: wrong.newer_than(5), r"write keep\.newer_than\(timedelta\(days=2\)\)"),
        (lambda: wrong.newer_than(timedelta(days=-1)), "more than 0"),
        (lambda: wrong.newer_than("2d"), "'2d'"),
        (lambda: wrong.newer_than(timedelta(0)), "more than 0"),
        (lambda: wrong.at(500), r"write keep\.at\(\[500, 1000\]\)"),
        (lambda: wrong.at([]), "takes steps"),
        (lambda: wrong.at([-1]), r"not \[-1\]"),
        (lambda: wrong.at(["1"]), "'1'"),
        (lambda: wrong.at("12"), "'12'"),
        (lambda: wrong.custom(3), "write a function of the steps"),
        (lambda: judge([], wrong.all(), protected={}, valid=(), min_valid=0), "min_valid=1"),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_only_policies_are_joined() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        keep.last(3) | 3  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        keep.last(3) | wrong.last
    joined = keep.last(1) | keep.all() | keep.at([1])
    assert joined == keep.last(1) | (keep.all() | keep.at([1]))
    assert joined.judge([stored(1)]) == {StepName(1, 1): "last 1, all, at 1"}


# Verdicts


def test_reasons() -> None:
    steps = with_losses(0.3, 0.1, 0.2, 0.4, 0.5)
    names = [s.name for s in steps]
    verdicts = judge(
        steps,
        keep.best("loss", "min") | keep.last(1),
        protected={names[0]: "pinned: paper", StepName(99, 1): "in flight"},
        valid=[*names[:4], StepName(98, 1)],
    )
    assert [verdict.reasons for verdict in verdicts] == [
        ("pinned: paper",),
        ("best loss (min): 0.1",),
        ("one of 2 verified",),
        ("newest verified", "one of 2 verified"),
        ("last 1", "newest"),
    ]
    assert all(verdict.keeps for verdict in verdicts)
    verdicts = judge(steps, keep.last(1), protected={}, valid=names)
    assert [verdict.keeps for verdict in verdicts] == [False, False, False, True, True]
    assert verdicts[0].reasons == ()


def test_nothing_goes_until_enough_is_verified() -> None:
    steps = with_losses(None, None, None)
    elsewhere = [StepName(7, 1), StepName(8, 1)]
    verdicts = judge(steps, keep.last(1), protected={}, valid=[steps[0].name, *elsewhere])
    assert verdicts[1] == Verdict(StepName(1, 1), True, ("only 1 of 2 verified",))
    assert judge([], keep.last(1), protected={}, valid=()) == []


def test_a_policy_that_keeps_nothing_empties_nothing() -> None:
    steps = with_losses(None, None, None, None)
    names = [s.name for s in steps]
    nothing = keep.custom(lambda steps: [])
    assert staying(judge(steps, nothing, protected={}, valid=names)) == set(names[2:])
    assert staying(judge(steps, nothing, protected={}, valid=names, min_valid=1)) == {names[3]}
    some = names[:2]  # the newest ones were not verified yet
    assert staying(judge(steps, nothing, protected={}, valid=some)) == {*some, names[3]}


def test_a_step_given_twice_counts_once() -> None:
    one, two = with_losses(0.1, 0.2)
    verdicts = judge(
        [one, two, two], keep.last(2), protected={}, valid=[one.name, two.name], min_valid=1
    )
    assert [(verdict.name.step, verdict.keeps) for verdict in verdicts] == [(0, True), (1, True)]


# Timelines


def names_of(*pairs: tuple[int, int]) -> list[StepName]:
    """From pairs of generation and step."""
    return [StepName(step, generation) for generation, step in pairs]


def test_a_rewind_abandons_later_steps() -> None:
    names = names_of((1, 100), (1, 300), (1, 500), (2, 400), (2, 450))
    parents = {1: None, 2: StepName(300, 1)}
    assert timeline(names, parents, 2) == names_of((1, 100), (1, 300), (2, 400), (2, 450))
    assert timeline(names, parents, 1) == names_of((1, 100), (1, 300), (1, 500))
    assert current_generation(names, parents) == 2


def test_limits_shrink_along_the_chain() -> None:
    """Generation 2 continued 500, and generation 3 an older step: 400, by way of 2."""
    names = names_of((1, 300), (1, 400), (1, 500), (2, 350), (2, 600), (3, 700))
    parents = {1: None, 2: StepName(500, 1), 3: StepName(350, 2)}
    assert timeline(names, parents, 3) == names_of((1, 300), (2, 350), (3, 700))


def test_order_is_by_generation_first() -> None:
    """A run may continue a snapshot and count its steps from 0 again."""
    names = names_of((1, 100), (1, 300), (2, 10), (2, 200))
    assert timeline(names[::-1], {2: StepName(300, 1)}, 2) == names


def test_the_snapshot_that_was_continued_may_be_gone() -> None:
    names = names_of((1, 100), (2, 400))
    assert timeline(names, {1: None, 2: StepName(300, 1)}, 2) == names


def test_generations_between_may_have_stored_nothing() -> None:
    names = names_of((1, 100), (3, 300))
    parents = {1: None, 2: StepName(100, 1), 3: StepName(100, 1)}
    assert timeline(names, parents, 3) == names
    assert timeline(names, parents, 2) == names[:1]
    assert current_generation(names[:1], {**parents, 4: None}) == 3
    assert timeline(names, {3: StepName(100, 2), 2: StepName(100, 1)}, 3) == names


def test_a_fresh_start_has_no_past() -> None:
    names = names_of((1, 100), (2, 50))
    assert timeline(names, {1: None, 2: None}, 2) == names[1:]
    assert timeline(names, {}, 2) == names[1:]
    assert timeline(names, {}, 9) == []


def test_the_current_generation() -> None:
    assert current_generation([], {}) is None
    assert current_generation([], {1: None, 2: None}) is None
    assert current_generation(names_of((1, 5), (3, 1)), {}) == 3
    assert current_generation(names_of((1, 5)), {1: None, 2: None}) == 1
    assert current_generation(names_of((1, 5)), {2: StepName(5, 1), 3: None}) == 2


@pytest.mark.parametrize(
    "parents",
    [
        {1: StepName(9, 1)},
        {1: StepName(9, 2), 2: StepName(9, 1)},
        {2: StepName(9, 1), 1: StepName(9, 3), 3: StepName(9, 2)},
    ],
)
def test_damaged_records_do_not_go_in_circles(parents: dict[int, StepName | None]) -> None:
    names = names_of((1, 1), (2, 2), (3, 3))
    for newest in (1, 2, 3):
        found = timeline(names, parents, newest)
        assert found[-1].generation == newest


generations = st.integers(1, 5)
some_names = st.lists(st.builds(StepName, st.integers(0, 9), generations), max_size=20)
some_parents = st.dictionaries(
    generations, st.none() | st.builds(StepName, st.integers(5, 9), generations)
) | st.fixed_dictionaries(
    {g: st.builds(StepName, st.integers(5, 9), st.integers(1, g - 1)) for g in range(2, 6)}
)


@given(some_names, some_parents, generations, st.randoms(use_true_random=False))
def test_the_order_of_names_is_irrelevant(
    names: list[StepName], parents: dict[int, StepName | None], newest: int, random: Any
) -> None:
    found = timeline(names, parents, newest)
    shuffled = random.sample(names, len(names))
    assert timeline([*shuffled, *names], parents, newest) == found
    assert current_generation(shuffled, parents) == current_generation(names, parents)
    assert len(set(found)) == len(found)
    assert set(found) <= set(names)
    assert {name for name in names if name.generation == newest} <= set(found)
    keys = [(name.generation, name.step) for name in found]
    assert keys == sorted(keys)


# Metrics


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0, 0.0), (0.25, 0.25), (-3, -3.0), (math.inf, math.inf), (Decimal("0.5"), 0.5)),
        *((np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.array(2.0), 2.0), (np.array([2]), 2.0)),
        *((torch.tensor(0.5), 0.5), (torch.tensor([3]), 3.0), (torch.ones((1, 1)), 1.0)),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
    ],
)
def test_metric_values(value: object, expected: float) -> None:
    result = metric_value(value)
    assert type(result) is float
    assert result == expected


def test_nan_is_a_metric_value() -> None:
    assert math.isnan(metric_value(math.nan))
    assert math.isnan(metric_value(torch.tensor(math.nan)))


@pytest.mark.parametrize(
    "value",
    [
        *(True, np.True_, torch.tensor(True), "0.5", np.str_("0.5"), b"0.5", bytearray(b"1")),
        *(None, [1.0], {}, 1j, object(), torch.ones(2), np.ones(2), torch.ones(0), 10**400),
        *(torch.ones(1, device="meta"), torch.tensor(1j), memoryview(b"1"), np.array("1")),
    ],
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="^not a number: "):
        metric_value(value)


def test_leftovers() -> None:
    """An unfinished save goes once no later save can take its name; intents of what is back go."""
    old, own, own_newer, other = StepName(5, 1), StepName(3, 2), StepName(9, 2), StepName(1, 3)
    found = leftovers(
        [old, own, own_newer, other, StepName(4, 2), StepName(2, 2)],
        [StepName(4, 2), StepName(1, 1)],
        committed=[StepName(4, 2)],
        damaged=[StepName(2, 2)],
        generation=2,
    )
    # 1.g1 is an intent without a folder; 9.g2 may still be saved; 3 is another manager's.
    assert found == {old, own, StepName(4, 2), StepName(1, 1)}
    assert leftovers([own], [], committed=[], damaged=[], generation=2) == set()
    assert leftovers([own], [], committed=[], damaged=[own_newer], generation=2) == {own}


# Reading back


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[StepName], dict[int, StepName | None]]:
    """Names, and what each generation continued: also a snapshot that is gone."""
    generations = draw(st.integers(1, 8))
    names = st.builds(StepName, st.integers(0, 5), st.integers(1, generations))
    parents: dict[int, StepName | None] = {}
    for generation in draw(st.sets(st.integers(1, generations))):
        parents[generation] = draw(st.none() | names)
    return draw(st.lists(names, unique=True, max_size=12)), parents


@given(trees(), st.data())
def test_few_records_find_the_newest(
    tree: tuple[list[StepName], dict[int, StepName | None]], data: st.DataObject
) -> None:
    names, parents = tree
    wanted = {name for name in names if data.draw(st.booleans())}
    known: dict[int, StepName | None] = {}
    while (generation := unread_run(names, parents, known, wanted=wanted)) is not None:
        assert generation not in known
        known[generation] = parents[generation]

    def newest(of: Mapping[int, StepName | None]) -> StepName | None:
        current = current_generation(names, of)
        run = [] if current is None else timeline(names, of, current)
        return next((name for name in reversed(run) if name in wanted), None)

    assert newest(known) == newest(parents)


def test_a_long_run_needs_one_record() -> None:
    """The last restart has saved nothing yet; or has, and then none."""
    names = [StepName(10 * n, n) for n in range(1, 301)]
    parents = {n: StepName(10 * (n - 1), n - 1) if n > 1 else None for n in range(1, 302)}
    assert unread_run(names, parents, {}, wanted=names) == 301
    assert unread_run(names, parents, {301: parents[301]}, wanted=names) is None
    assert unread_run(names, range(1, 301), {}, wanted=names) is None
