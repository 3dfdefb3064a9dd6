"""The line between trainers whose processes save: one outcome each, whatever dies."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.protocol.calls import (
    CoordinatorLost,
    DeadlinePassed,
    Finish,
    Looked,
    LookForCommit,
    RankLost,
    Send,
    SendToRank,
)
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.line import (
    Assigned,
    EndInProcess,
    HandedOver,
    HandOver,
    LineCommand,
    LineMachine,
    ProcessFinished,
    ProcessGone,
    SaveHere,
)
from actorsnap.protocol.machine import ProtocolViolation
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    Committed,
    Failed,
    Handed,
    Meet,
    SaveInTrainers,
)

KILLED = Failure(reason="the uploader process was killed", stage=Stage.STORE, rank=1)
FULL = Failure(reason="the disk is full", stage=Stage.STORE, rank=2)
VISIBLE = Failure(reason=KILLED.reason, stage=Stage.STORE, rank=1, may_be_visible=True)


def opened(rank: int, *, is_assigned: bool = False) -> LineMachine:
    machine = LineMachine(rank=rank, world_size=3)
    machine.begin()
    if is_assigned:
        machine.handle(Assigned())
    return machine


def told(failure: Failure | None) -> list[LineCommand]:
    """What rank 0 does at the end."""
    word = Committed() if failure is None else Aborted(failure)
    return [SendToRank(1, word), SendToRank(2, word), Finish(failure)]


def test_rank_0_hands_over_first_and_then_all_others() -> None:
    first, other = LineMachine(rank=0, world_size=3), LineMachine(rank=1, world_size=3)
    assert first.begin() == [HandOver("")]
    assert other.begin() == [Send(Handed(1))]
    assert first.handle(Handed(1)) == []
    meet = Meet("here")
    assert first.handle(HandedOver("here")) == []  # rank 2 has not called, or calls something else
    assert first.handle(Handed(1)) == []
    assert first.handle(Handed(2)) == [SendToRank(1, meet), SendToRank(2, meet)]
    assert first.handle(Handed(2)) == []
    assert other.handle(meet) == [HandOver("here")]
    assert other.handle(HandedOver("here")) == []


def test_a_rank_that_follows_saves_where_rank_0_does() -> None:
    for word, command in ((Meet("here"), HandOver("here")), (SaveInTrainers(), SaveHere())):
        machine = LineMachine(rank=1, world_size=3, follows=True)
        assert machine.begin() == [Send(Handed(1, follows=True))]
        assert machine.handle(word) == [command]
        assert machine.is_final == (command == SaveHere())
        assert machine.handle(Aborted(FULL)) == ([] if machine.is_final else [EndInProcess(FULL)])


def test_a_rank_that_follows_and_fails_tells_rank_0() -> None:
    machine = LineMachine(rank=1, world_size=3, follows=True)
    machine.begin()
    assert machine.handle(ProcessGone(KILLED)) == [Send(Failed(1, KILLED))]
    assert machine.handle(SaveInTrainers()) == []
    assert machine.handle(Aborted(KILLED)) == [Finish(KILLED)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("failure", [None, FULL])
def test_the_outcome_is_the_process(rank: int, failure: Failure | None) -> None:
    machine = opened(rank, is_assigned=True)
    end = [Finish(failure)] if rank else told(failure)
    assert machine.handle(ProcessFinished(failure)) == end
    assert machine.is_final
    assert machine.handle(ProcessGone(KILLED)) == []


def test_a_rank_that_saves_otherwise_ends_it_on_all() -> None:
    for message, words in (
        (Arrived(1, 0), "the same Options.offload"),
        (Failed(1, FULL), "the disk is full"),
    ):
        machine = opened(0)
        [command] = machine.handle(message)
        assert isinstance(command, EndInProcess)
        failure = command.failure
        assert words in failure.reason
        assert machine.handle(Failed(2, KILLED)) == []  # the first one counts
        assert machine.handle(ProcessFinished(failure)) == told(failure)


def test_what_rank_0_ends_is_the_error_elsewhere_whatever_the_process_says() -> None:
    machine = opened(1)
    assert machine.handle(Aborted(FULL)) == [EndInProcess(FULL)]
    lost = Failure(reason="nobody coordinates", stage=Stage.JOIN)
    assert machine.handle(ProcessFinished(lost)) == [Finish(FULL)]
    # But a commit cannot be undone.
    machine = opened(1, is_assigned=True)
    machine.handle(Aborted(FULL))
    assert machine.handle(ProcessFinished(None)) == [Finish(None)]


def test_a_trainer_that_dies_ends_it_only_before_all_processes_have_met() -> None:
    for machine, event in ((opened(0), RankLost(1, 5.0)), (opened(1), CoordinatorLost("gone", 0))):
        [command] = machine.handle(event)
        assert isinstance(command, EndInProcess)
        assert command.failure.stage is Stage.JOIN
    machine = opened(0, is_assigned=True)
    assert machine.handle(RankLost(1, 5.0)) == []
    machine = opened(1, is_assigned=True)
    assert machine.handle(CoordinatorLost("gone", 0)) == []


def test_rank_0_that_never_comes() -> None:
    machine = opened(1)
    [command] = machine.handle(DeadlinePassed(9.0))
    assert isinstance(command, EndInProcess)
    assert "timeout_s=9" in command.failure.reason
    assert machine.handle(ProcessGone(command.failure)) == [Finish(command.failure)]
    assert opened(1, is_assigned=True).handle(DeadlinePassed(9.0)) == []


def test_processes_that_do_not_begin_in_time() -> None:
    machine = opened(0)
    [command] = machine.handle(DeadlinePassed(9.0))
    assert isinstance(command, EndInProcess)
    reason = "timeout_s=9 is over, and the uploader processes have not begun the save"
    assert command.failure.reason == reason
    assert machine.handle(ProcessGone(command.failure)) == told(command.failure)
    assert opened(0, is_assigned=True).handle(DeadlinePassed(9.0)) == []


@pytest.mark.parametrize("word", [Committed(), Aborted(FULL)])
def test_a_rank_whose_process_dies_asks_rank_0(word: Committed | Aborted) -> None:
    machine = opened(1, is_assigned=True)
    assert machine.handle(ProcessGone(VISIBLE)) == [Send(Failed(1, KILLED))]
    end = None if isinstance(word, Committed) else FULL
    assert machine.handle(word) == [Finish(end)]


@pytest.mark.parametrize("event", [CoordinatorLost("gone", 0), DeadlinePassed(9.0)])
def test_a_rank_whose_process_dies_looks_where_rank_0_does_not_answer(
    event: CoordinatorLost | DeadlinePassed,
) -> None:
    for found, end in ((True, None), (False, VISIBLE), (None, VISIBLE)):
        machine = opened(1, is_assigned=True)
        machine.handle(ProcessGone(KILLED))
        assert machine.handle(event) == [LookForCommit()]
        assert machine.handle(Looked(found)) == [Finish(end)]
    # Nothing can be committed of which this rank has stored nothing.
    machine = opened(1)
    machine.handle(ProcessGone(VISIBLE))
    assert machine.handle(event) == [Finish(KILLED)]


def test_rank_0_whose_process_dies_looks_and_tells_all() -> None:
    for found, end in ((True, None), (False, VISIBLE)):
        machine = opened(0, is_assigned=True)
        assert machine.handle(ProcessGone(KILLED)) == [LookForCommit()]
        assert machine.handle(Looked(found)) == told(end)
    assert opened(0).handle(ProcessGone(KILLED)) == told(KILLED)


def test_what_no_rule_is_for_is_a_defect() -> None:
    with pytest.raises(ProtocolViolation, match="Looked while open"):
        opened(1).handle(Looked(True))


@given(st.lists(st.integers(0, 9), max_size=40), st.booleans(), st.data())
def test_all_trainers_have_one_outcome(
    choices: list[int], is_committed: bool, data: st.DataObject
) -> None:
    """Processes and trainers die at random; the rest hears each other, in order."""
    machines = [LineMachine(rank=rank, world_size=3) for rank in range(3)]
    mail: list[deque[object]] = [deque() for _ in range(3)]
    alive = [True] * 3  # trainers
    has = [False] * 3  # processes with the save
    outcome: list[Finish | None] = [None] * 3
    assigned = False
    verdict: list[Failure | None] = []  # what the processes have decided, once

    def perform(rank: int, commands: list[LineCommand]) -> None:
        for command in commands:
            match command:
                case Send():
                    mail[0].append(command.message)
                case SendToRank():
                    mail[command.rank].append(command.message)
                case HandOver():
                    has[rank] = True
                    step(rank, HandedOver("here"))
                case EndInProcess():
                    if not has[rank]:
                        step(rank, ProcessGone(command.failure))
                    elif rank == 0 and not verdict:
                        verdict.append(command.failure)
                    elif rank:
                        finish(rank)
                case LookForCommit():
                    found = bool(verdict) and verdict[0] is None
                    step(rank, Looked(found))
                case Finish():
                    assert outcome[rank] is None
                    outcome[rank] = command

    def step(rank: int, event: object) -> None:
        if alive[rank]:
            perform(rank, machines[rank].handle(event))  # type: ignore[arg-type]

    def finish(rank: int) -> None:
        if has[rank]:
            has[rank] = False
            # Without a decision a process that is left alone can only abort.
            step(rank, ProcessFinished(verdict[0] if verdict else FULL))

    def deliver(rank: int) -> None:
        if mail[rank]:
            step(rank, mail[rank].popleft())

    for rank in range(3):
        perform(rank, machines[rank].begin())
    for choice in choices:
        rank = data.draw(st.integers(0, 2))
        match choice:
            case 0 | 1 | 2 | 3:
                deliver(rank)
            case 4 if all(has) and not assigned:
                assigned = True
                for other in range(3):
                    step(other, Assigned())
            case 5 if assigned and all(has) and not verdict:
                verdict.append(None if is_committed else FULL)
            case 6 if verdict:
                finish(rank)
            case 7 if has[rank]:
                has[rank] = False
                step(rank, ProcessGone(KILLED))
            case 8 if rank and alive[rank]:
                alive[rank] = has[rank] = False
                step(0, RankLost(rank, 5.0))
    # Everything that is under way arrives; then the processes that are left end.
    for _ in range(4):
        for rank in range(3):
            while mail[rank]:
                deliver(rank)
        if not verdict and not all(has):
            verdict.append(FULL)  # somebody is missed by the processes' own coordinator
        if not verdict and all(has):
            verdict.append(None if is_committed and assigned else FULL)
        for rank in range(3):
            finish(rank)
    ends = [end for rank, end in enumerate(outcome) if alive[rank]]
    assert all(ends), outcome
    kinds = {end.failure is None for end in ends if end is not None}
    assert len(kinds) == 1, outcome
