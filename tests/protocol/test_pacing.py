# SPDX-License-Identifier: Apache-2.0
"""The pace controller with a simulated trainer: it converges, and never stops a save."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.protocol.pacing import BURST_S, MIN_DUTY, Bursts, PaceController, is_behind

LIMIT = 0.02


@dataclass
class Trainer:
    """Steps that take longer the more is uploaded.

    Attributes:
        cost: By which share a step takes longer at full duty.
        noise: Standard deviation of steps, as a share.
        outliers: Share of the steps that take ten times as long.
        step_s: What one takes; bursts of uploaders hit short ones, or not.
        usual: What a step takes, by its number, as a factor.
        duties: Of each step beside a save.
    """

    cost: float
    noise: float = 0.02
    outliers: float = 0.0
    step_s: float = 0.1
    usual: Callable[[int], float] = lambda number: 1.0
    seed: int = 0
    controller: PaceController = field(default_factory=PaceController)
    duties: list[float] = field(default_factory=list)
    is_behind: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._number = 0
        self._is_saving = False

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            usual_s = self.step_s * self.usual(self._number)
            seconds = usual_s * max(0.3, self._random.gauss(1.0, self.noise))
            if self._random.random() < self.outliers:
                seconds += 10 * usual_s
            if self._is_saving:
                self.duties.append(self.controller.duty)
                seconds += usual_s * self.cost * self._share_hit()
            self._number += 1
            self.controller.end_step(seconds)
            self.controller.pass_time(seconds, is_behind=self.is_behind)

    def _share_hit(self) -> float:
        duty = self.controller.duty
        return duty if self.step_s >= 0.1 else float(self._random.random() < duty)

    def begin(self, number: int = 1, limit: float = LIMIT) -> None:
        self.controller.begin_storing(number, limit)
        self._is_saving = True

    def end(self, number: int = 1) -> None:
        self.controller.end(number)
        self._is_saving = False

    def slowdown(self, first: int) -> float:
        """Of all steps from the ``first`` beside a save on."""
        return self.cost * fmean(self.duties[first:])


@pytest.mark.few
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
@pytest.mark.parametrize("cost", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("step_s", [0.02, 0.1, 2.0])
def test_steps_stay_within_the_limit_and_uploads_go_on(
    step_s: float, cost: float, noise: float, seed: int
) -> None:
    trainer = Trainer(cost, noise, outliers=0.03, step_s=step_s, seed=seed)
    trainer.train(100)
    trainer.begin()
    trainer.train(3000 if step_s < 0.1 else 1000)
    assert trainer.slowdown(300) <= 1.5 * LIMIT
    assert fmean(trainer.duties[300:]) >= 0.4 * LIMIT / cost


def slowdown_by_bursts(cost: float, burst_s: float, step_s: float, limit: float) -> float:
    """Mean slowdown beside uploaders that work for ``burst_s`` and then rest for their duty.

    A step takes ``1 + cost`` times as long while they work.
    """
    controller, noise = PaceController(), random.Random(1)
    for _ in range(100):
        controller.end_step(step_s * noise.gauss(1.0, 0.02))
        controller.pass_time(step_s, is_behind=False)
    controller.begin_storing(1, limit)
    now_s, ends_s, is_working = 0.0, burst_s, True
    usual_s = spent_s = 0.0
    end_s = max(100.0, 400 * step_s)
    while now_s < end_s:
        left_s = step_s * noise.gauss(1.0, 0.02)
        begun_s, least_s, duty = now_s, left_s, controller.duty
        while left_s > 1e-9:
            factor = 1.0 + cost if is_working else 1.0
            passed_s = min(left_s * factor, max(ends_s - now_s, 1e-9))
            left_s -= passed_s / factor
            now_s += passed_s
            if now_s >= ends_s - 1e-9:
                is_working = not is_working or controller.duty == 1.0
                rest_s = burst_s * (1.0 / controller.duty - 1.0)
                ends_s = now_s + (burst_s if is_working else rest_s)
        if now_s > 0.4 * end_s:
            usual_s += least_s
            spent_s += now_s - begun_s
        controller.end_step(now_s - begun_s)
        controller.pass_time(now_s - begun_s, is_behind=False)
        if controller.duty != duty and not is_working:
            is_working, ends_s = True, now_s + burst_s  # another duty ends a rest
    return spent_s / usual_s - 1.0


@pytest.mark.parametrize("step_s", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("burst_s", [0.05, 0.3])
@pytest.mark.parametrize("cost", [0.3, 1.0, 4.0])
def test_bursts_longer_and_shorter_than_a_step(cost: float, burst_s: float, step_s: float) -> None:
    slowdown = slowdown_by_bursts(cost, burst_s, step_s, limit=0.1)
    assert 0.05 <= slowdown <= 0.2


def accumulating(number: int) -> float:
    """Of four micro-steps the last one has the optimizer's step."""
    return 1.6 if number % 4 == 3 else 0.8


def evaluating(number: int) -> float:
    """An evaluation of 40 steps' length, marked as a step by mistake."""
    return 40.0 if number % 50 == 49 else 1.0


@pytest.mark.parametrize("usual", [accumulating, evaluating])
@pytest.mark.parametrize("limit", [0.05, 0.1])
def test_steps_of_mixed_length(usual: Callable[[int], float], limit: float) -> None:
    trainer = Trainer(0.6, usual=usual)
    trainer.train(100)
    trainer.begin(limit=limit)
    trainer.train(1000)
    assert 0.4 * limit <= trainer.slowdown(200) <= 1.5 * limit


@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_what_does_not_disturb_is_hardly_slowed(noise: float) -> None:
    trainer = Trainer(0.005, noise, outliers=0.03)
    trainer.train(50)
    trainer.begin()
    trainer.train(1000)
    assert fmean(trainer.duties) >= 0.8


def test_it_answers_to_the_first_window() -> None:
    trainer = Trainer(0.5)
    trainer.train(50)
    trainer.begin()
    trainer.train(17)
    assert trainer.controller.duty == 0.25
    trainer.train(51)
    assert trainer.controller.duty < 0.1


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_trainer_that_changes_by_itself_is_hardly_slowed(factor: float) -> None:
    trainer = Trainer(0.0, usual=lambda number: factor if number > 200 else 1.0)
    trainer.train(50)
    trainer.begin()
    trainer.train(1000)
    assert fmean(trainer.duties[500:]) >= 0.8


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_trainer_that_changes_by_itself_is_protected_again(factor: float) -> None:
    trainer = Trainer(0.5, usual=lambda number: factor if number > 500 else 1.0)
    trainer.train(50)
    trainer.begin()
    trainer.train(2000)
    assert trainer.slowdown(1200) <= 1.5 * LIMIT


def test_without_steps_before_it_begins_at_the_minimum() -> None:
    trainer = Trainer(0.2)
    trainer.train(1)
    trainer.begin()
    assert trainer.controller.duty == MIN_DUTY
    trainer.train(18)
    assert trainer.controller.duty == 1.0
    trainer.train(300)
    assert trainer.slowdown(100) <= 1.5 * LIMIT


def test_uploads_that_always_disturb_go_on_at_a_low_duty() -> None:
    trainer = Trainer(20.0)
    trainer.train(50)
    trainer.begin()
    trainer.train(2000)
    assert min(trainer.duties) >= MIN_DUTY
    assert fmean(trainer.duties[200:]) <= 3 * MIN_DUTY


def test_what_was_learned_is_known_in_the_next_save() -> None:
    trainer = Trainer(0.5)
    trainer.train(50)
    trainer.begin()
    trainer.train(300)
    trainer.end()
    assert trainer.controller.duty == 1.0
    trainer.train(50)
    trainer.begin(2)
    assert trainer.controller.duty < 0.2


def test_it_learns_from_many_short_saves() -> None:
    trainer = Trainer(0.5)
    for number in range(20):
        trainer.train(20)
        trainer.begin(number)
        trainer.train(5)
        trainer.end(number)
    trainer.train(20)
    trainer.begin(20)
    assert trainer.controller.duty < 0.1


def test_no_steps_no_pace() -> None:
    trainer = Trainer(0.5)
    trainer.train(50)
    trainer.begin()
    trainer.train(300)
    learned = trainer.controller.duty
    assert learned < 0.2
    for _ in range(5):
        trainer.controller.pass_time(0.5, is_behind=False)
    assert trainer.controller.duty == 1.0  # an evaluation, or the end
    trainer.train(1)
    assert trainer.controller.duty == learned


def test_saves_without_a_trainer_are_not_slowed() -> None:
    controller = PaceController()
    for number in range(10):
        controller.begin_storing(number, LIMIT)
        for _ in range(2 * number):
            assert controller.duty == 1.0
            controller.pass_time(0.5, is_behind=False)
        controller.end(number)
        assert controller.duty == 1.0


def test_a_save_behind_its_schedule_is_not_slowed() -> None:
    trainer = Trainer(1.0)
    trainer.train(50)
    trainer.begin()
    trainer.train(300)
    controller = trainer.controller
    learned = controller.duty
    assert learned < 0.1
    trainer.is_behind = True
    trainer.train(100)
    assert controller.duty == 1.0
    trainer.is_behind = False
    trainer.train(1)
    assert controller.duty == learned  # full speed taught it nothing


def test_the_schedule_ends_at_half_of_the_time() -> None:
    assert not is_behind(0.0, 0.02)
    assert is_behind(0.05, 0.1)
    assert not is_behind(0.2, 0.1)
    assert is_behind(0.9, 0.5)
    assert not is_behind(1.0, 0.5)


def test_a_save_is_stored_in_half_of_its_time_whatever_it_costs() -> None:
    """At full duty it takes a tenth of its ``timeout_s``."""
    trainer = Trainer(1.0)
    trainer.train(50)
    trainer.begin()
    stored = elapsed = 0.0
    while stored < 1.0:
        trainer.train(1)
        elapsed += 0.0005
        stored += 0.005 * trainer.controller.duty
        trainer.is_behind = is_behind(stored, elapsed)
        assert elapsed < 0.55


def test_nothing_is_slowed_while_a_save_is_staged() -> None:
    trainer = Trainer(0.5)
    trainer.train(50)
    trainer.begin()
    trainer.train(300)
    learned = trainer.controller.duty
    assert learned < 0.2
    trainer.controller.begin_staging(2)
    assert trainer.controller.duty == 1.0  # it may wait for the first one's memory
    trainer.train(100)  # lazily staged
    assert trainer.controller.duty == 1.0
    trainer.controller.begin_storing(2, LIMIT)
    assert trainer.controller.duty == learned


def test_steps_during_staging_are_not_measured() -> None:
    trainer = Trainer(0.0)
    trainer.train(50)
    trainer.controller.begin_staging(1)
    for _ in range(200):
        trainer.controller.end_step(3 * 0.1)
    trainer.begin()
    trainer.cost = 0.5
    trainer.train(300)
    assert trainer.controller.duty < 0.1


def test_the_strictest_limit_holds() -> None:
    trainer = Trainer(0.4)
    trainer.train(50)
    trainer.controller.begin_storing(7, 0.5)
    trainer.begin()
    trainer.train(600)
    assert trainer.slowdown(300) <= 1.5 * LIMIT
    trainer.end()
    trainer._is_saving = True
    trainer.train(600)
    assert fmean(trainer.duties[-200:]) > 0.8


seconds = st.floats(0.0, 1e4)
numbers = st.integers(0, 3)
calls: st.SearchStrategy[Callable[[PaceController], None]] = st.one_of(
    st.one_of(seconds, st.floats(0.09, 0.11)).map(lambda s: lambda c: c.end_step(s)),
    numbers.map(lambda number: lambda c: c.begin_staging(number)),
    st.tuples(numbers, st.floats(1e-6, 1.0)).map(lambda save: lambda c: c.begin_storing(*save)),
    numbers.map(lambda number: lambda c: c.end(number)),
    st.tuples(seconds, st.booleans()).map(
        lambda passed: lambda c: c.pass_time(passed[0], is_behind=passed[1])
    ),
)


@given(st.lists(st.tuples(calls, st.integers(1, 30)), max_size=40))
def test_it_never_stops_uploads_and_always_releases_them(
    given: list[tuple[Callable[[PaceController], None], int]],
) -> None:
    controller = PaceController()
    for call, times in given:
        for _ in range(times):
            call(controller)
            assert MIN_DUTY <= controller.duty <= 1.0
    for number in range(4):
        controller.end(number)
    assert controller.duty == 1.0


class Begun(NamedTuple):
    """A chunk: when it was begun, whether nobody was at work, how long somebody had been."""

    at_s: float
    is_first: bool
    worked_s: float


class Uploaders:
    """They begin a chunk whenever they may.

    Args:
        num: How many.
        chunks_s: What chunks take, one after the other.
    """

    def __init__(self, num: int, chunks_s: Iterator[float]) -> None:
        self.bursts = Bursts()
        self.begun: list[Begun] = []
        self.now_s = 0.0
        self._num = num
        self._chunks_s = chunks_s
        self._worked_s = 0.0
        self._ends_s: list[float] = []

    def go_on(self, num_times: int = 1) -> None:
        """So many times, a chunk or a rest ends."""
        for _ in range(num_times):
            rest_s = self._begin()
            if self._ends_s and self._ends_s[0] <= self.now_s + rest_s:
                end_s = heapq.heappop(self._ends_s)
                self._worked_s += end_s - self.now_s
                self.now_s = end_s
                self.bursts.end(end_s)
            else:
                assert not self._ends_s, "the burst is not over, and they rest"
                self.now_s = max(self.now_s + rest_s, math.nextafter(self.now_s, math.inf))

    def _begin(self) -> float:
        while len(self._ends_s) < self._num:
            if rest_s := self.bursts.rest_s(self.now_s):
                return rest_s
            self.begun.append(Begun(self.now_s, not self._ends_s, self._worked_s))
            self.bursts.begin(self.now_s)
            heapq.heappush(self._ends_s, self.now_s + next(self._chunks_s))
        return math.inf


lengths = st.lists(st.floats(0.001, 3.0), min_size=1, max_size=20).map(cycle)


@given(st.integers(1, 8), lengths, st.floats(MIN_DUTY, 0.99))
def test_of_a_burst_and_its_rest_the_burst_is_the_duty(
    num: int, chunks_s: Iterator[float], duty: float
) -> None:
    uploaders = Uploaders(num, chunks_s)
    uploaders.bursts.set(duty)
    uploaders.go_on(200)  # a burst has up to 168 chunks
    burst_s = 0.0
    for begun in uploaders.begun:
        if begun.is_first:
            burst_s = begun.at_s
            assert begun.worked_s == pytest.approx(duty * begun.at_s)
        assert begun.at_s - burst_s < BURST_S
    assert sum(begun.is_first for begun in uploaders.begun) > 1


@given(st.integers(1, 8), lengths)
def test_at_full_duty_nobody_rests(num: int, chunks_s: Iterator[float]) -> None:
    uploaders = Uploaders(num, chunks_s)
    uploaders.go_on(20)
    assert len(uploaders.begun) == num + 19


def test_another_duty_ends_a_rest_and_the_same_does_not() -> None:
    bursts = Bursts()
    bursts.set(0.5)
    bursts.begin(0.0)
    assert bursts.end(10.0)
    bursts.set(0.5)
    assert bursts.rest_s(11.0) == 9.0
    bursts.set(0.4)
    assert bursts.rest_s(11.0) == 0.0


def test_without_a_duty_they_rest_until_it_is_changed() -> None:
    bursts = Bursts()
    bursts.begin(0.0)
    bursts.set(0.0)
    assert not bursts.end(1.0)
    assert bursts.rest_s(1e9) == math.inf
    bursts.set(1.0)
    assert bursts.rest_s(1e9) == 0.0


def test_what_was_worked_at_another_duty_is_not_rested_for() -> None:
    """Uploaders that take turns at full duty are in one burst, however long that is."""
    uploaders = Uploaders(2, cycle([1.0, 1.3]))
    uploaders.go_on(100)
    before_s = uploaders.now_s
    assert [begun.is_first for begun in uploaders.begun].count(True) == 1
    uploaders.bursts.set(0.5)
    uploaders.go_on(3)
    assert uploaders.begun[-1].at_s == before_s
    assert uploaders.now_s <= before_s + 2 * 1.3
