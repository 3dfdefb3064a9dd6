# SPDX-License-Identifier: Apache-2.0
"""Rounds: the two machines fed into each other, in random worlds and in all worlds of a small size.

A world has a network that delays, repeats and (when a process dies) loses messages, ranks that
fail at any time, a storage that may take the commit without an answer, and a deadline. Whatever
happens, every rank's outcome is what is in the storage, and it commits at most once.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.protocol import rounds
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    Ask,
    Failed,
    Proceed,
    Repeat,
)
from actorsnap.protocol.rounds import (
    AskMore,
    Continue,
    Coordinator,
    CoordinatorEvent,
    CoordinatorState,
    Decide,
    Decision,
    End,
    FromRank,
    Hurry,
    Lost,
    Overdue,
    Participant,
    ParticipantEvent,
    ParticipantState,
    ProtocolViolation,
    Reached,
    SendTo,
    Table,
    TakenOver,
    ToRank,
)

COMMIT_ROUND = 3
SKIPPED_ROUNDS = 2
NUM_QUESTIONS = 2
Happening: TypeAlias = Callable[[], None]


def failure(reason: str, *, may_be_visible: bool = False) -> Failure:
    return Failure(reason=reason, stage=Stage.STORE, may_be_visible=may_be_visible)


GONE = failure("the coordinator is gone")


@dataclass
class World:
    """A call of four rounds: 0 may ask for more, ranks in ``skipping`` have no part in 1 and 2, 3
    commits.

    Args:
        questioned: The ranks that round 0 asks for more, twice.
        repeats, failures, takeovers: How many messages are repeated, ranks fail or are cancelled,
            and ends are taken over, at most.
        loses_coordinator: The coordinator may disappear for good.
        has_deadline: The deadline may pass.
        commit_takes, commit_is_answered: What the storage does.
    """

    world_size: int
    skipping: frozenset[int] = frozenset()
    questioned: frozenset[int] = frozenset()
    repeats: int = 0
    failures: int = 0
    takeovers: int = 0
    loses_coordinator: bool = False
    has_deadline: bool = False
    commit_takes: bool = True
    commit_is_answered: bool = True
    num_commits: int = 0
    num_questions: int = 0
    is_visible: bool = False
    is_coordinator_here: bool = True
    up: list[list[FromRank]] = field(default_factory=list)
    down: list[list[ToRank]] = field(default_factory=list)
    decisions: list[Decide] = field(default_factory=list)
    work: dict[int, bytes | None] = field(default_factory=dict)
    outcomes: dict[int, bool] = field(default_factory=dict)
    arrived: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(world_size=self.world_size)
        self.ranks = [Participant(rank=rank) for rank in range(self.world_size)]
        self.up = [[] for _ in self.ranks]
        self.down = [[] for _ in self.ranks]
        # What a rank works on: an answer, or (None) what comes before its next round.
        self.work = dict.fromkeys(range(self.world_size))

    # What can happen next ---------------------------------------------------------------------

    def happenings(self) -> Iterator[Happening]:
        for rank in range(self.world_size):
            if self.up[rank]:
                yield partial(self.deliver_up, rank)
                if self.repeats:
                    yield partial(self.repeat, self.up[rank])
            if self.down[rank]:
                yield partial(self.deliver_down, rank)
                if self.repeats:
                    yield partial(self.repeat, self.down[rank])
            if rank in self.work:
                yield partial(self.finish_work, rank)
            if self.failures and rank not in self.outcomes:
                yield partial(self.fail, rank)
            if self.takeovers and rank not in self.outcomes:
                yield partial(self.take_over, rank)
        if self.decisions and self.is_coordinator_here:
            yield self.decide
        if self.takeovers and self.is_coordinator_here:
            yield self.take_over_coordinator
        if self.has_deadline and self.is_coordinator_here:
            yield self.pass_deadline
        if self.loses_coordinator:
            yield self.lose_coordinator

    def settle(self) -> bool:
        """What a process does after long silence; False if nobody waits."""
        waiting = [rank for rank in range(self.world_size) if rank not in self.outcomes]
        # Silence happens only where messages were lost with a process that died.
        assert not waiting or not self.is_coordinator_here or self.coordinator.is_over
        for rank in waiting:
            self.rank_event(rank, Lost(GONE))
        return bool(waiting)

    def deliver_up(self, rank: int) -> None:
        message = self.up[rank].pop(0)
        if self.is_coordinator_here:
            self.coordinator_event(message)

    def deliver_down(self, rank: int) -> None:
        self.rank_event(rank, self.down[rank].pop(0))

    def repeat(self, link: list[FromRank] | list[ToRank]) -> None:
        self.repeats -= 1
        link.append(link[0])  # type: ignore[arg-type]

    def finish_work(self, rank: int) -> None:
        answer = self.work.pop(rank)
        number = self.ranks[rank].round
        payload = b"stored" if number == COMMIT_ROUND else b"%d" % number
        if answer is None:
            self.arrived.add((rank, number))
        self.rank_event(rank, Reached(answer or payload, commits=number == COMMIT_ROUND))

    def fail(self, rank: int) -> None:
        self.failures -= 1
        self.work.pop(rank, None)
        self.rank_event(rank, Failed(rank, failure(f"rank {rank} failed")))

    def take_over(self, rank: int) -> None:
        """What the dead process had received, and not handled, is lost."""
        self.takeovers -= 1
        self.down[rank].clear()
        self.rank_event(rank, TakenOver())

    def take_over_coordinator(self) -> None:
        self.takeovers -= 1
        for link in self.up:
            link.clear()
        self.coordinator_event(TakenOver())

    def pass_deadline(self) -> None:
        self.has_deadline = False
        self.coordinator_event(Overdue(failure("timeout_s has passed")))

    def lose_coordinator(self) -> None:
        self.loses_coordinator = False
        self.is_coordinator_here = False
        for link in self.up:
            link.clear()

    def decide(self) -> None:
        command = self.decisions.pop(0)
        if command.commits:
            assert sorted(command.payloads) == list(range(self.world_size))
            assert set(command.payloads.values()) == {b"stored"}
            self.num_commits += 1
            self.is_visible = self.commit_takes
        self.coordinator_event(self.decision(command))

    def decision(self, command: Decide) -> Decision:
        if command.commits:
            if not self.commit_is_answered:
                return failure("no answer", may_be_visible=True)
            if not self.commit_takes:
                return failure("the commit failed")
            return Continue(is_last=True)
        if command.round == 0:
            if self.questioned and self.num_questions < NUM_QUESTIONS:
                self.num_questions += 1
                return AskMore(dict.fromkeys(sorted(self.questioned), b"more?"))
            return Continue(skips=dict.fromkeys(self.skipping, SKIPPED_ROUNDS))
        return Continue(commits_next=command.round == SKIPPED_ROUNDS)

    # The machines -----------------------------------------------------------------------------

    def coordinator_event(self, event: CoordinatorEvent) -> None:
        for command in self.coordinator.handle(event):
            match command:
                case SendTo():
                    self.down[command.rank].append(command.message)
                case Decide():
                    self.decisions.append(command)
                case Hurry():
                    assert self.coordinator.state is CoordinatorState.COMMITTING

    def rank_event(self, rank: int, event: ParticipantEvent) -> None:
        before = self.ranks[rank].round
        for command in self.ranks[rank].handle(event):
            match command:
                case Arrived() | Failed():
                    self.up[rank].append(command)
                case Proceed():
                    self.check_all_arrived(before)
                    self.work[rank] = None
                case Ask():
                    self.work[rank] = b"answer"
                case End():
                    self.work.pop(rank, None)
                    self.end(rank, command)

    def check_all_arrived(self, number: int) -> None:
        parties = set(range(self.world_size))
        if number in (1, 2):
            parties -= self.skipping
        assert {(rank, number) for rank in parties} <= self.arrived

    def end(self, rank: int, end: End) -> None:
        assert rank not in self.outcomes
        may_be_visible = end.failure is not None and end.failure.may_be_visible
        if end.is_unknown or may_be_visible:
            self.outcomes[rank] = self.is_visible  # it looks in the storage
        else:
            self.outcomes[rank] = end.failure is None

    def check(self) -> None:
        assert self.num_commits <= 1
        assert self.outcomes.keys() == set(range(self.world_size))
        assert set(self.outcomes.values()) == {self.is_visible}


def run(world: World, rng: random.Random) -> World:
    for _ in range(5_000):
        happenings = list(world.happenings())
        if not happenings:
            if not world.settle():
                world.check()
                return world
            continue
        rng.choice(happenings)()
    raise AssertionError("it does not end")


def few(limit: int) -> st.SearchStrategy[int]:
    return st.integers(0, limit)


@st.composite
def worlds(draw: st.DrawFn, *, is_calm: bool = False) -> World:
    size = draw(st.integers(1, 5))
    ranks = st.frozensets(st.integers(0, size - 1))
    skipping = draw(ranks)
    calm = World(size, skipping, draw(ranks), repeats=draw(few(5)))
    if is_calm:
        return calm
    return World(
        size,
        skipping,
        calm.questioned,
        repeats=calm.repeats,
        failures=draw(few(2)),
        takeovers=draw(few(2)),
        loses_coordinator=draw(st.booleans()),
        has_deadline=draw(st.booleans()),
        commit_takes=draw(st.booleans()),
        commit_is_answered=draw(st.booleans()),
    )


@given(worlds(), st.randoms(use_true_random=False))
def test_every_outcome_is_what_is_in_the_storage(world: World, rng: random.Random) -> None:
    run(world, rng)


@pytest.mark.slow
def test_every_outcome_is_what_is_in_the_storage_for_long() -> None:
    for seed in range(50_000):
        rng = random.Random(seed)
        size = rng.randint(1, 6)
        skipping = frozenset(rng.sample(range(size), rng.randint(0, size)))
        questioned = frozenset(rng.sample(range(size), rng.randint(0, size)))
        run(
            World(
                size,
                skipping,
                questioned,
                repeats=rng.randint(0, 5),
                failures=rng.randint(0, 2),
                takeovers=rng.randint(0, 3),
                loses_coordinator=rng.random() < 0.3,
                has_deadline=rng.random() < 0.3,
                commit_takes=rng.random() < 0.8,
                commit_is_answered=rng.random() < 0.8,
            ),
            rng,
        )


@given(worlds(is_calm=True), st.randoms(use_true_random=False))
def test_without_faults_it_commits(world: World, rng: random.Random) -> None:
    run(world, rng)
    assert world.is_visible
    assert world.coordinator.state is CoordinatorState.PASSED


# All worlds of a small size ---------------------------------------------------------------------


def snapshot(world: World) -> bytes:
    """Everything that decides how a world goes on."""
    machines = [
        {name: value for name, value in vars(machine).items() if name != "_table"}
        for machine in (world.coordinator, *world.ranks)
    ]
    own = {name: v for name, v in vars(world).items() if name not in ("coordinator", "ranks")}
    return repr((machines, sorted(own.items(), key=lambda item: item[0]))).encode()


def explore(first: World, *, at_most: int) -> int:
    """Goes through every order of events; returns the number of different worlds met."""
    seen = {snapshot(first)}
    unseen = [first]
    while unseen:
        world = unseen.pop()
        num_choices = len(list(world.happenings()))
        if not num_choices:
            ended = copy.deepcopy(world)
            while ended.settle():
                pass
            ended.check()
        for choice in range(num_choices):
            after = copy.deepcopy(world)
            list(after.happenings())[choice]()
            key = snapshot(after)
            if key not in seen:
                seen.add(key)
                unseen.append(after)
        assert len(seen) <= at_most
    return len(seen)


SMALL = [
    {"repeats": 1},
    {"failures": 1},
    {"failures": 1, "commit_is_answered": False},
    {"takeovers": 1},
    {"has_deadline": True, "commit_takes": False},
    {"loses_coordinator": True},
    {"loses_coordinator": True, "commit_is_answered": False},
]


@pytest.mark.few(4)
@pytest.mark.parametrize("faults", SMALL, ids=lambda faults: "-".join(faults))
@pytest.mark.parametrize(
    "skipping", [frozenset(), frozenset({1}), frozenset({0, 1})], ids=["all", "one", "none"]
)
def test_all_orders_of_two_ranks(faults: dict[str, bool | int], skipping: frozenset[int]) -> None:
    world = World(2, skipping, frozenset({1}), **faults)  # type: ignore[arg-type]
    assert explore(world, at_most=20_000) > 40


@pytest.mark.slow
@pytest.mark.parametrize("faults", SMALL, ids=lambda faults: "-".join(faults))
def test_all_orders_of_three_ranks(faults: dict[str, bool | int]) -> None:
    world = World(3, frozenset({1}), frozenset({2}), **faults)  # type: ignore[arg-type]
    assert explore(world, at_most=200_000) > 200


# One at a time ----------------------------------------------------------------------------------


def sent(commands: Sequence[object]) -> dict[int, ToRank]:
    return {command.rank: command.message for command in commands if isinstance(command, SendTo)}


def test_a_rank_that_arrives_alone_waits() -> None:
    coordinator = Coordinator(world_size=3)
    assert coordinator.handle(Arrived(1, 0)) == []
    assert coordinator.awaited == (0, 2)


def test_a_round_is_decided_from_the_payloads_of_its_ranks() -> None:
    coordinator = Coordinator(world_size=2)
    coordinator.handle(Arrived(1, 0, b"b"))
    assert coordinator.handle(Arrived(0, 0, b"a")) == [Decide(0, {0: b"a", 1: b"b"}, False)]


def test_an_answer_may_be_asked_for_twice() -> None:
    coordinator = Coordinator(world_size=2)
    coordinator.handle(Arrived(0, 0))
    coordinator.handle(Arrived(1, 0))
    asked = sent(coordinator.handle(AskMore({1: b"more?"})))
    assert asked == {1: Ask(0, b"more?", 1)}
    assert coordinator.awaited == (1,)
    assert sent(coordinator.handle(Arrived(1, 0))) == asked  # it did not hear the question
    assert coordinator.handle(Arrived(1, 0, b"answer", 1)) == [Decide(0, {1: b"answer"}, False)]
    again = sent(coordinator.handle(AskMore({1: b"even more?"})))
    assert again == {1: Ask(0, b"even more?", 2)}


def test_a_rank_that_did_not_hear_the_decision_gets_it_again() -> None:
    coordinator = Coordinator(world_size=1)
    coordinator.handle(Arrived(0, 0))
    decided = sent(coordinator.handle(Continue(common=b"plan")))
    assert sent(coordinator.handle(Arrived(0, 0))) == decided == {0: Proceed(0, b"plan", 1)}


def test_the_outcome_is_repeated_after_the_end() -> None:
    coordinator = Coordinator(world_size=1)
    coordinator.handle(Arrived(0, 0))
    last = sent(coordinator.handle(Continue(is_last=True)))
    assert sent(coordinator.handle(Arrived(0, 0))) == last
    aborted = Coordinator(world_size=1)
    aborted.handle(Lost(GONE))
    assert sent(aborted.handle(Arrived(0, 0))) == {0: Aborted(GONE)}


def test_a_rank_that_failed_and_did_not_hear_the_verdict_gets_it_again() -> None:
    coordinator = Coordinator(world_size=2)
    verdict = sent(coordinator.handle(Failed(1, GONE)))
    assert verdict == {0: Aborted(GONE), 1: Aborted(GONE)}
    assert sent(coordinator.handle(Failed(1, GONE))) == {1: Aborted(GONE)}


def test_a_repeated_question_is_answered_once() -> None:
    rank = Participant(rank=0)
    rank.handle(Reached())
    assert rank.handle(Ask(0, b"more?", 1)) == [Ask(0, b"more?", 1)]
    rank.handle(Reached(b"answer"))
    assert rank.handle(Ask(0, b"more?", 1)) == []


def test_a_commit_under_way_is_only_hurried() -> None:
    coordinator = Coordinator(world_size=1)
    coordinator.handle(Arrived(0, 0))
    coordinator.handle(Continue(commits_next=True))
    assert coordinator.handle(Arrived(0, 1)) == [Decide(1, {0: b""}, True)]
    assert coordinator.handle(Failed(0, GONE)) == [Hurry(GONE, has_grace=True)]
    assert coordinator.handle(Overdue(GONE)) == [Hurry(GONE, has_grace=False)]
    assert coordinator.handle(Lost(GONE)) == []
    assert sent(coordinator.handle(Continue(is_last=True))) == {0: Proceed(1, b"", 2, True)}


def test_a_rank_cancelled_after_its_last_arrival_takes_the_outcome() -> None:
    rank = Participant(rank=0)
    rank.handle(Reached(commits=True))
    rank.handle(Failed(0, GONE))
    assert rank.handle(Proceed(0, b"x", 1, True)) == [End(None, payload=b"x")]


def test_only_after_the_commit_round_the_outcome_is_unknown() -> None:
    rank = Participant(rank=0)
    rank.handle(Reached())
    assert copy.deepcopy(rank).handle(Lost(GONE)) == [End(GONE)]
    rank.handle(Proceed(0, b"", 1))
    rank.handle(Reached(commits=True))
    rank.handle(Failed(0, failure("cancelled")))
    assert rank.handle(Lost(GONE)) == [End(GONE, is_unknown=True)]


def test_what_cannot_happen_is_a_defect_and_changes_nothing() -> None:
    coordinator = Coordinator(world_size=1)
    with pytest.raises(ProtocolViolation, match="Continue while gathering"):
        coordinator.handle(Continue())
    assert coordinator.handle(Arrived(0, 0)) == [Decide(0, {0: b""}, False)]
    waiting = Participant(rank=0)
    waiting.handle(Reached())
    assert waiting.state is ParticipantState.WAITING
    with pytest.raises(ProtocolViolation, match="Reached while waiting"):
        waiting.handle(Reached())


def test_invariants_are_asserted_after_each_step() -> None:
    coordinator = Coordinator(world_size=2)
    coordinator.failure = GONE
    with pytest.raises(AssertionError):
        coordinator.handle(Arrived(0, 0))


def test_a_rank_that_has_ended_ignores_everything() -> None:
    rank = Participant(rank=0)
    finals = [rank.is_final]
    assert rank.handle(Aborted(GONE)) == [End(GONE)]
    for event in (Reached(), Failed(0, GONE), Proceed(0), Aborted(GONE), Lost(GONE)):
        assert rank.handle(event) == []
        finals.append(rank.is_final)
    assert finals == [False, True, True, True, True, True]


@pytest.mark.parametrize(
    ("table", "states", "finals"),
    [
        (rounds._COORDINATOR, CoordinatorState, set()),
        (rounds._PARTICIPANT, ParticipantState, {"ended"}),
    ],
)
def test_a_table_has_a_row_for_each_state_and_the_outcomes_are_final(
    table: Table[Any, Any], states: Collection[StrEnum], finals: set[str]
) -> None:
    assert table.keys() == set(states)
    assert {state for state, row in table.items() if not row} == finals


@pytest.mark.parametrize(
    ("message", "union"),
    [
        (Arrived(3, 1, b"x"), FromRank),
        (Failed(3, GONE), FromRank),
        (Ask(0, b"?", 1), ToRank),
        (Proceed(1, b"y", 2), ToRank),
        (Repeat(), ToRank),
        (Aborted(GONE), ToRank),
    ],
)
def test_messages_travel(message: object, union: object) -> None:
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data, type=union) == message
