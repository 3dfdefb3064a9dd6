# SPDX-License-Identifier: Apache-2.0
"""Agreement on a call: every order of a few ranks' steps, and random ones of many."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.protocol.agreement import Agreed, Calls, Entered, Wish, Wishes
from actorsnap.protocol.failure import Failure

LAST = 3
"""Calls of each rank; the last one is ``close``."""

Answer = Agreed | Failure


def always(until_s: float, num_steps: int) -> bool:
    return True


@dataclass
class SimRank:
    """A rank as two threads, in the steps that others can come between."""

    calls: Calls = field(default_factory=Calls)
    read: int | None = None
    is_counting: bool = False
    holding: int | None = None
    standing: Entered | None = None
    served: list[int] = field(default_factory=list)
    answered: bool = False

    def copy(self) -> SimRank:
        calls = Calls()
        for name in Calls.__slots__:
            value = getattr(self.calls, name)
            setattr(calls, name, [*value] if isinstance(value, list) else value)
        return SimRank(
            calls,
            self.read,
            self.is_counting,
            self.holding,
            self.standing,
            [*self.served],
            self.answered,
        )

    @property
    def key(self) -> tuple[object, ...]:
        calls = self.calls
        return (
            calls.entered,
            calls.held,
            calls.is_closed,
            tuple(calls.agreed),
            self.read,
            self.is_counting,
            self.holding,
            self.standing,
            tuple(self.served),
            self.answered,
        )


@dataclass
class SimWorld:
    """Ranks in one agreement. The runtime's thread begins to hold, reads the count, then looks
    whether it is the last. The trainer's closes before its last call, counts, then looks whether it
    must hold."""

    ranks: list[SimRank]
    answer: Answer | None = None

    def copy(self) -> SimWorld:
        return SimWorld([rank.copy() for rank in self.ranks], self.answer)

    @property
    def key(self) -> tuple[object, ...]:
        answer = self.answer.reason if isinstance(self.answer, Failure) else self.answer
        # Ranks are alike.
        return (*sorted([repr(rank.key) for rank in self.ranks]), answer)

    def steps(self) -> list[tuple[str, int]]:
        """What may happen next."""
        found = []
        for number, rank in enumerate(self.ranks):
            calls = rank.calls
            if rank.is_counting:
                # Counted; it looks now, and goes on unless it must hold.
                if calls.held is None:
                    found.append(("serve", number))
            elif calls.entered + 1 == LAST and not calls.is_closed:
                found.append(("close", number))
            elif calls.entered < LAST:
                found.append(("count", number))
            if rank.holding is None:
                found.append(("hold", number))
            elif rank.read is None:
                found.append(("read", number))
            elif rank.standing is None:
                found.append(("look", number))
            elif self.answer is not None and not rank.answered:
                found.append(("answer", number))
        return found

    def do(self, what: str, number: int) -> None:
        rank = self.ranks[number]
        calls = rank.calls
        match what:
            case "close":
                calls.is_closed = True
            case "count":
                calls.entered += 1
                rank.is_counting = True
            case "serve":
                if calls.serve():
                    rank.served.append(calls.entered)
                rank.is_counting = False
            case "hold":
                calls.held = rank.holding = 7
            case "read":
                rank.read = calls.entered
            case "look":
                assert rank.read is not None
                rank.standing = Entered(rank.read, calls.is_closed)
                self.decide()
            case "answer":
                rank.answered = True
                if isinstance(self.answer, Agreed):
                    calls.agree(self.answer)
                calls.release(7)

    def decide(self) -> None:
        standings = {n: r.standing for n, r in enumerate(self.ranks) if r.standing is not None}
        if len(standings) == len(self.ranks):
            wishes = Wishes(saves_on_notice=True)
            wishes.add(Wish("asked", 0))
            self.answer, _ = wishes.decide(standings, always)

    def check(self) -> None:
        """At the end: all have saved in the same call, or none has."""
        served = [rank.served for rank in self.ranks]
        assert all(one == served[0] for one in served), served
        assert all(rank.calls.entered == LAST and rank.calls.held is None for rank in self.ranks)
        if isinstance(self.answer, Agreed):
            assert served[0] == [self.answer.at]


def explore(num_ranks: int) -> tuple[int, set[int]]:
    """All orders. Returns the number of states, and the calls that saved (0: none)."""
    seen: set[object] = set()
    outcomes: set[int] = set()
    to_do = [SimWorld([SimRank() for _ in range(num_ranks)])]
    while to_do:
        world = to_do.pop()
        steps = world.steps()
        if not steps:
            world.check()
            outcomes.update(world.ranks[0].served or [0])
        for step in steps:
            following = world.copy()
            following.do(*step)
            if following.key not in seen:
                seen.add(following.key)
                to_do.append(following)
    return len(seen), outcomes


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_order_saves_at_one_call_or_at_none(num_ranks: int) -> None:
    num_states, outcomes = explore(num_ranks)
    assert num_states > 20**num_ranks
    assert outcomes == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(10))
def test_random_orders_of_many_ranks(seed: int) -> None:
    rng = random.Random(seed)
    world = SimWorld([SimRank() for _ in range(64)])
    while steps := world.steps():
        world.do(*rng.choice(steps))
    world.check()


def test_the_steps_of_calls_are_those_of_the_world() -> None:
    """The world takes ``enter`` and ``hold`` apart; put together they are these."""
    calls = Calls()
    assert not calls.enter()
    assert calls.hold(4) == Entered(1)
    assert calls.enter()  # it must hold
    assert calls.hold(5) == Entered(2)
    calls.release(4)
    assert calls.held == 5
    calls.agree(Agreed(at=3, since=0, reason="asked", saves=True))
    calls.release(5)
    assert calls.serve() == ""
    assert calls.enter(closes=True)
    assert calls.serve() == "asked"
    assert calls.hold(6) == Entered(3, is_closed=True)


@pytest.mark.parametrize(
    ("saved", "since", "saves"), [(-1, 0, True), (1, 2, True), (2, 2, False), (3, 2, False)]
)
def test_a_save_begun_since_serves(saved: int, since: int, saves: bool) -> None:
    calls = Calls()
    calls.saved = saved
    calls.agree(Agreed(at=1, since=since, reason="asked", saves=True, stops=True))
    calls.enter()
    assert bool(calls.serve()) == saves
    assert calls.should_stop


def test_an_answer_that_came_too_late_is_served_at_once() -> None:
    calls = Calls()
    for _ in range(5):
        calls.enter()
    calls.agree(Agreed(at=3, since=0, reason="asked", saves=True))
    assert calls.enter()
    assert calls.serve() == "asked"
    assert not calls.enter()


def test_two_agreements_on_one_call_are_one_save() -> None:
    calls = Calls()
    calls.agree(Agreed(at=1, since=0, reason="asked", saves=True))
    calls.agree(Agreed(at=1, since=0, reason="notice", saves=True, stops=True))
    calls.enter()
    assert calls.serve() == "asked, notice"
    assert calls.should_stop


wish = st.builds(
    Wish,
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([math.inf, 5.0, 9.0]),
)
counts = st.dictionaries(
    st.integers(0, 7), st.builds(Entered, st.integers(0, 9), st.booleans()), min_size=1
)


@given(st.lists(wish), counts, st.booleans(), st.booleans())
def test_decisions(
    added: Sequence[Wish], entered: dict[int, Entered], saves_on_notice: bool, has_time: bool
) -> None:
    wishes = Wishes(saves_on_notice=saves_on_notice)
    for each in added:
        wishes.add(each)
    asked: list[tuple[float, int]] = []

    def judge(until_s: float, num_steps: int) -> bool:
        asked.append((until_s, num_steps))
        return has_time or until_s == math.inf

    answer, about = wishes.decide(entered, judge)
    if any(each.is_closed for each in entered.values()):
        assert isinstance(answer, Failure)
        assert "the manager was closed" in answer.reason
        return
    assert isinstance(answer, Agreed)
    numbers = [each.calls for each in entered.values()]
    assert answer.at == max(numbers) + 1
    notices = [each for each in added if each.is_notice]
    assert answer.stops == bool(notices)
    until_s = min([each.until_s for each in notices], default=math.inf)
    assert asked == [(until_s, answer.at - min(numbers))]
    assert answer.is_late == (until_s < math.inf and not has_time)
    asks = any(not each.is_notice for each in added) or (bool(notices) and saves_on_notice)
    assert answer.saves == (asks and not answer.is_late)
    assert {each.reason for each in added} == set(filter(None, answer.reason.split(", ")))
    wishes.agreed(answer, about)
    assert not wishes
    # Any number of notices make one save, and an agreed save serves what was asked before it.
    if notices:
        assert not wishes.add(Wish("once more", 99, is_notice=True))
    assert wishes.add(Wish("before", answer.at)) != answer.saves
    assert wishes.add(Wish("after", answer.at + 1))


@given(st.lists(wish), st.integers(0, 5))
def test_a_save_serves_wishes_but_not_notices(added: Iterable[Wish], call: int) -> None:
    wishes = Wishes(saves_on_notice=True)
    for each in added:
        wishes.add(each)
    wishes.saved(call)
    left = {each.reason for each in added if each.is_notice or each.since > call}
    assert set(wishes.reasons) == left
    assert wishes.has_notice == any(each.is_notice for each in added)


def test_a_wish_is_new_once() -> None:
    wishes = Wishes(saves_on_notice=True)
    assert wishes.add(Wish("asked", 3))
    assert not wishes.add(Wish("asked", 3))
    assert not wishes.add(Wish("asked", 4))  # another time, and the same save
    wishes.saved(3)
    assert wishes.reasons == ("asked",)
    assert wishes.until_s == math.inf
    assert wishes.add(Wish("asked", 3, is_notice=True, until_s=9.0))
    assert not wishes.add(Wish("asked", 3, is_notice=True, until_s=5.0))
    assert wishes.until_s == 5.0
