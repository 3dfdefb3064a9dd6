"""Gathering and members, fed into each other: all pass a step, or all get the same failure."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import RestoreAborted, UsageError
from actorsnap.protocol.calls import (
    CoordinatorLost,
    DeadlinePassed,
    Finish,
    RankLost,
    Send,
    SendToRank,
    StepFailed,
)
from actorsnap.protocol.gathering import (
    Decide,
    Decision,
    GatheringMachine,
    GatheringState,
    MemberMachine,
    MemberState,
    Pass,
    Reached,
)
from actorsnap.protocol.machine import ProtocolViolation
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    Failure,
    FromCoordinator,
    Opened,
    Proceed,
    Stage,
    ToCoordinator,
    Tokens,
)


def failure(rank: int = 0) -> Failure:
    error = RestoreAborted(reason="broken", rank=rank, stage=Stage.READ)
    return Failure.of(error, stage=Stage.READ, rank=rank)


def deciding(num_steps: int, refused: int = -1) -> Decide:
    """What every rank gets at a step is what all ranks brought, with the step's number."""

    def decide(step: int, payloads: Sequence[bytes]) -> Decision:
        if step == refused:
            raise UsageError("refused")
        stage = Stage.READ if step < num_steps - 1 else None
        return Decision(stage, bytes([step]) + b"".join(payloads))

    return decide


@dataclass
class World:
    """All machines, and what is under way between them.

    Args:
        faults: So many things go wrong.
        repeats: Messages that arrive twice.
        refused: The step whose decision fails.
    """

    world_size: int
    num_steps: int
    rng: random.Random
    faults: int = 0
    repeats: int = 0
    refused: int = -1

    def __post_init__(self) -> None:
        decide = deciding(self.num_steps, self.refused)
        self.gathering = GatheringMachine(world_size=self.world_size, decide=decide)
        self.members = [MemberMachine(rank=rank) for rank in range(self.world_size)]
        self.up: list[deque[ToCoordinator]] = [deque() for _ in self.members]
        self.down: list[deque[FromCoordinator]] = [deque() for _ in self.members]
        self.passed: list[list[bytes]] = [[] for _ in self.members]
        self.reached = [0] * self.world_size
        self.finished: dict[int, Failure | None] = {}
        self.dead: set[int] = set()

    def member_event(self, rank: int, event: object) -> None:
        if rank in self.dead:
            return
        for command in self.members[rank].handle(event):  # type: ignore[arg-type]
            match command:
                case Send():
                    self.up[rank].append(command.message)
                case Pass():
                    assert command.step == len(self.passed[rank])
                    assert min(self.reached) > command.step, "somebody had not arrived"
                    self.passed[rank].append(command.payload)
                case Finish():
                    assert rank not in self.finished
                    self.finished[rank] = command.failure

    def gathering_event(self, event: object) -> None:
        for command in self.gathering.handle(event):  # type: ignore[arg-type]
            self.down[command.rank].append(command.message)

    def take(self, queue: deque[object]) -> object:
        if self.repeats and self.rng.random() < 0.2:
            self.repeats -= 1
            return queue[0]
        return queue.popleft()

    def step(self) -> bool:
        """One random thing happens; False when nothing can any more."""
        working = [
            rank
            for rank, member in enumerate(self.members)
            if member.state is MemberState.WORKING and rank not in self.dead
        ]
        choices = [("up", rank) for rank, queue in enumerate(self.up) if queue]
        choices += [("down", rank) for rank, queue in enumerate(self.down) if queue]
        choices += [("work", rank) for rank in working]
        if not choices:
            return False
        if self.faults and self.rng.random() < 0.2:
            self.faults -= 1
            self.break_something(self.rng.randrange(self.world_size))
            return True
        kind, rank = self.rng.choice(choices)
        if kind == "up":
            self.gathering_event(self.take(self.up[rank]))  # type: ignore[arg-type]
        elif kind == "down":
            self.member_event(rank, self.take(self.down[rank]))  # type: ignore[arg-type]
        else:
            self.reached[rank] += 1
            self.member_event(rank, Reached(bytes([rank])))
        return True

    def break_something(self, rank: int) -> None:
        kind = self.rng.choice(["fail", "deadline", "die"])
        if kind == "fail":
            self.member_event(rank, StepFailed(failure(rank)))
        elif kind == "deadline":
            self.gathering_event(DeadlinePassed(1.0))
        else:
            self.dead.add(rank)
            self.gathering_event(RankLost(rank, 30.0))

    def run(self) -> None:
        steps = 0
        while self.step():
            steps += 1
            assert steps < 10_000


calm = {
    "world_size": st.integers(1, 5),
    "num_steps": st.integers(1, 4),
    "rng": st.integers(0, 2**32).map(random.Random),
    "repeats": st.integers(0, 5),
}


@given(st.builds(World, **calm, faults=st.integers(0, 3), refused=st.integers(-3, 3)))
def test_all_pass_all_steps_or_all_get_one_failure(world: World) -> None:
    world.run()
    living = set(range(world.world_size)) - world.dead
    assert living <= set(world.finished)
    outcomes = {outcome for rank, outcome in world.finished.items() if rank in living}
    assert len(outcomes) <= 1
    longest = max(world.passed, key=len)
    for rank in range(world.world_size):
        assert world.passed[rank] == longest[: len(world.passed[rank])]
    everybody = bytes(range(world.world_size))
    assert longest == [bytes([step]) + everybody for step in range(len(longest))]
    if world.gathering.state is GatheringState.PASSED:
        assert outcomes <= {None}
    elif living:
        assert outcomes == {world.gathering.failure}


@given(st.builds(World, **calm))
def test_without_faults_all_pass(world: World) -> None:
    world.run()
    assert world.finished == dict.fromkeys(range(world.world_size))
    assert {len(passed) for passed in world.passed} == {world.num_steps}


def gathering(world_size: int = 2, num_steps: int = 2) -> GatheringMachine:
    return GatheringMachine(world_size=world_size, decide=deciding(num_steps))


def verdict(commands: Sequence[SendToRank]) -> Failure:
    assert [command.rank for command in commands] == list(range(len(commands)))
    (failure,) = {
        command.message.failure for command in commands if isinstance(command.message, Aborted)
    }
    return failure


def test_the_deadline_names_who_is_waited_for() -> None:
    machine = gathering(3)
    machine.handle(Arrived(1, 0))
    error = verdict(machine.handle(DeadlinePassed(5.0))).to_error()
    assert isinstance(error, RestoreAborted)
    assert "still waiting for rank(s) 0, 2" in str(error)
    assert (error.rank, error.stage) == (None, "join")


def test_a_lost_rank_is_named_with_the_stage() -> None:
    machine = gathering()
    for rank in range(2):
        machine.handle(Arrived(rank, 0))
    error = verdict(machine.handle(RankLost(1, 30.0))).to_error()
    assert isinstance(error, RestoreAborted)
    assert (error.rank, error.stage) == (1, "read")
    assert machine.handle(Arrived(0, 1)) == []  # it came late


def test_a_decision_that_fails_is_everybodys_error() -> None:
    machine = GatheringMachine(world_size=2, decide=deciding(2, refused=0))
    machine.handle(Arrived(0, 0))
    assert isinstance(verdict(machine.handle(Arrived(1, 0))).to_error(), UsageError)


def test_without_a_coordinator_a_rank_ends_by_itself() -> None:
    for event in (CoordinatorLost("rank 0 is gone", 0), DeadlinePassed(5.0)):
        for before in ([], [Reached()], [StepFailed(failure())]):
            member = MemberMachine(rank=1)
            for earlier in before:
                member.handle(earlier)
            (finish,) = member.handle(event)
            assert isinstance(finish, Finish)
            assert finish.failure is not None
            assert finish.failure.rank == 0


def test_who_is_cancelled_behind_the_last_step_has_passed() -> None:
    member = MemberMachine(rank=0)
    member.handle(Reached())
    member.handle(StepFailed(failure()))
    assert member.handle(Proceed(0, b"", None)) == [Finish(None)]


def test_what_cannot_happen() -> None:
    with pytest.raises(ProtocolViolation, match="is at 1, not 0"):
        gathering().handle(Arrived(0, 1))
    with pytest.raises(ProtocolViolation, match="Opened while gathering"):
        gathering().handle(Opened(0, ()))
    with pytest.raises(ProtocolViolation, match="Tokens while working"):
        MemberMachine(rank=0).handle(Tokens(()))
    with pytest.raises(ProtocolViolation, match="proceed from 0 at 0"):
        MemberMachine(rank=0).handle(Proceed(0, b"", None))


@pytest.mark.parametrize(
    ("message", "union"),
    [
        (Arrived(3, 1, b"x"), ToCoordinator),
        (Proceed(1, b"y", Stage.READ), FromCoordinator),
        (Proceed(1, b"y", None), FromCoordinator),
    ],
)
def test_messages_travel(message: object, union: object) -> None:
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data, type=union) == message
    assert len(data) <= 12
