# SPDX-License-Identifier: Apache-2.0
"""The supervisor of the uploader process: each save ends once, whatever dies."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.supervisor import (
    AbortSave,
    ProcessCommand,
    SaveHere,
    SendSave,
    Supervisor,
    SupervisorCommand,
    SupervisorState,
)
from actorsnap.protocol.uploader import CancelSave

OTHERS = Failure(reason="rank 1 has failed", stage=Stage.CAPTURE, rank=1)
KILLED = "the uploader process was killed (SIGKILL)"
START, KILL = ProcessCommand.START, ProcessCommand.KILL


def ready(*numbers: int) -> Supervisor:
    """A supervisor whose process works on these saves."""
    machine = Supervisor()
    for number in numbers or (0,):
        machine.add_save(number)
    machine.note_ready()
    if not numbers:
        machine.note_save_ended(0)
    return machine


def aborted(command: SupervisorCommand) -> tuple[int, Stage, str, bool]:
    assert isinstance(command, AbortSave)
    failure = command.failure
    return command.number, failure.stage, failure.reason, failure.may_be_visible


def test_the_first_save_starts_the_process_and_is_sent_when_it_is_ready() -> None:
    machine = Supervisor()
    assert machine.add_save(1) == [START]
    assert machine.add_save(2) == []
    assert machine.note_ready() == [SendSave(1), SendSave(2)]
    assert machine.add_save(3) == [SendSave(3)]


def test_a_process_may_be_started_ahead() -> None:
    machine = Supervisor()
    assert machine.start() == [START]
    assert machine.start() == []
    assert machine.note_ready() == []
    assert machine.start() == []
    assert machine.add_save(1) == [SendSave(1)]


def test_a_process_that_was_started_ahead_and_fails_is_not_tried_for_ever() -> None:
    machine = Supervisor()
    machine.start()
    assert machine.note_process_ended(KILLED) == []
    machine.start()
    assert machine.note_process_ended(KILLED) == []
    assert machine.start() == []
    assert machine.add_save(1) == [SaveHere(1)]


def test_a_process_that_dies_idle_is_started_again_by_the_next_save() -> None:
    machine = ready()
    assert machine.note_process_ended(KILLED) == []
    assert machine.add_save(1) == [START]


def test_a_save_is_sent_again_once_with_the_attempt_that_died() -> None:
    machine = ready(1)
    machine.note_begun(1, "a")
    assert machine.note_process_ended(KILLED) == [START]
    assert machine.note_ready() == [SendSave(1, "a")]
    machine.note_begun(1, "b")
    [command] = machine.note_process_ended(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED, True)
    assert machine.state is SupervisorState.ABSENT


def test_a_save_whose_memory_is_gone_is_not_sent_again() -> None:
    machine = ready(1, 2)
    machine.note_begun(1, "a")
    machine.note_memory_gone(1)
    first, second = machine.note_process_ended(KILLED)
    assert aborted(first) == (1, Stage.STORE, KILLED, True)
    assert second == START  # for the other one
    assert machine.note_ready() == [SendSave(2)]


def test_what_had_no_attempt_yet_cannot_be_visible() -> None:
    machine = ready(1)
    machine.note_memory_gone(1)
    [command] = machine.note_process_ended(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED, False)


def test_without_a_process_that_starts_saves_are_made_here() -> None:
    machine = Supervisor()
    machine.add_save(1)
    assert machine.note_process_ended("no such file") == [START]
    assert machine.note_process_ended("no such file") == [SaveHere(1)]
    assert machine.add_save(2) == [SaveHere(2)]


def test_a_save_that_had_begun_is_not_made_here() -> None:
    machine = ready(1)
    machine.note_begun(1, "a")
    machine.note_process_ended(KILLED)
    machine.note_process_ended(KILLED)
    [command] = machine.note_process_ended(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED, True)


def test_failed_starts_count_in_a_row_only() -> None:
    machine = Supervisor()
    for number in range(4):
        machine.add_save(number)
        assert machine.note_process_ended(KILLED) == [START]
        assert machine.note_ready() == [SendSave(number)]
        machine.note_save_ended(number)
        assert machine.note_process_ended(KILLED) == []


def test_a_silent_process_is_killed_once() -> None:
    machine = ready(1)
    assert machine.note_silent() == [KILL]
    assert machine.note_silent() == []
    assert machine.add_save(2) == []
    assert machine.note_process_ended(KILLED) == [START]
    assert machine.note_ready() == [SendSave(1), SendSave(2)]


def test_a_process_that_is_silent_while_it_starts_has_failed_to() -> None:
    machine = Supervisor()
    machine.add_save(1)
    for _ in range(2):
        assert machine.note_silent() == [KILL]
        commands = machine.note_process_ended(KILLED)
    assert commands == [SaveHere(1)]


def test_a_cancelled_save_is_not_sent_again() -> None:
    machine = ready(1)
    machine.note_begun(1, "a")
    assert machine.cancel_save(1, "enough") == [CancelSave(1, "enough")]
    assert machine.cancel_save(1, "again") == []
    [command] = machine.note_process_ended(KILLED)
    assert aborted(command) == (1, Stage.CANCEL, "enough", True)


def test_a_save_that_waits_for_the_process_is_cancelled_here() -> None:
    machine = Supervisor()
    machine.add_save(1)
    [command] = machine.cancel_save(1, "enough")
    assert aborted(command) == (1, Stage.CANCEL, "enough", False)
    assert machine.note_ready() == []


def test_a_save_of_several_ranks_that_has_begun_is_not_sent_again() -> None:
    machine = Supervisor()
    machine.add_save(1, rank=3, is_shared=True)
    machine.note_ready()
    assert machine.note_process_ended(KILLED) == [START]  # it had not begun
    assert machine.note_ready() == [SendSave(1)]
    machine.note_begun(1, "")
    [command] = machine.note_process_ended(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED, False)
    assert isinstance(command, AbortSave)
    assert command.failure.rank == 3
    # But one that was never sent is for the next process, or made here.
    machine.add_save(2, is_shared=True)
    assert machine.note_process_ended(KILLED) == [START]
    assert machine.note_process_ended(KILLED) == [SaveHere(2)]


@pytest.mark.parametrize("rank", [0, 3])
def test_of_several_ranks_only_rank_0_may_have_committed(rank: int) -> None:
    """Otherwise the other ranks would leave the attempt's objects."""
    machine = Supervisor()
    machine.add_save(1, rank=rank, is_shared=True)
    machine.note_ready()
    machine.note_begun(1, "a")
    [command] = machine.note_process_ended(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED, rank == 0)


def test_what_the_team_has_ended_is_passed_on_once() -> None:
    machine = ready(1)
    machine.note_begun(1, "a")
    assert machine.conclude_save(1, OTHERS) == [CancelSave(1, OTHERS.reason, is_concluded=True)]
    assert machine.conclude_save(1, OTHERS) == []
    assert machine.note_process_ended(KILLED) == [AbortSave(1, OTHERS)]
    machine.add_save(2)
    assert machine.conclude_save(2, OTHERS) == [AbortSave(2, OTHERS)]  # it was not sent yet
    machine = ready(3)  # the process does not answer yet
    assert machine.conclude_save(3, OTHERS) == [
        CancelSave(3, OTHERS.reason, is_concluded=True),
        AbortSave(3, OTHERS),
    ]
    machine.note_begun(3, "a")
    assert not machine._saves


def validate(machine: Supervisor) -> None:
    saves = machine._saves.values()
    if machine.state in (SupervisorState.ABSENT, SupervisorState.UNUSABLE):
        assert not saves
    if machine.state is SupervisorState.STARTING:
        assert not any(save.is_sent for save in saves)
    if machine.state is SupervisorState.READY:
        assert all(save.is_sent for save in saves)


@given(st.lists(st.integers(0, 11), max_size=60))
def test_each_save_ends_exactly_once(choices: list[int]) -> None:
    """What the shell may do at random; then it lets everything end."""
    machine = Supervisor()
    asked: list[int] = []
    sent: set[int] = set()
    ended: Counter[int] = Counter()
    is_there = False  # a process, ready or not
    killed = False

    def perform(commands: list[SupervisorCommand]) -> None:
        nonlocal is_there, killed
        validate(machine)
        for command in commands:
            match command:
                case ProcessCommand.START:
                    assert not is_there
                    is_there, killed = True, False
                case ProcessCommand.KILL:
                    assert is_there
                    assert not killed
                    killed = True
                case SendSave():
                    assert is_there
                    assert not ended[command.number]
                    sent.add(command.number)
                case CancelSave():
                    assert command.number in sent
                case AbortSave() | SaveHere():
                    ended[command.number] += 1
                    sent.discard(command.number)

    def end_process() -> None:
        nonlocal is_there
        if is_there:
            is_there = False
            sent.clear()
            perform(machine.note_process_ended(KILLED))

    def get_ready() -> None:
        if is_there and not killed and machine.state is SupervisorState.STARTING:
            perform(machine.note_ready())

    for choice in choices:
        number = asked[choice % len(asked)] if asked else None
        match choice:
            case 0 | 1:
                asked.append(len(asked))
                perform(machine.add_save(asked[-1]))
            case 2:
                get_ready()
            case 3:
                end_process()
            case 4:
                perform(machine.note_silent())
            case 5 if sent:
                machine.note_begun(min(sent), "a")
                perform([])
            case 6 if sent:
                machine.note_memory_gone(min(sent))
                perform([])
            case 7 if sent:
                ended[min(sent)] += 1
                machine.note_save_ended(min(sent))
                perform([])
                sent.discard(min(sent))
            case 9:
                perform(machine.start())
            case 10:
                asked.append(len(asked))
                perform(machine.add_save(asked[-1], is_shared=True))
            case 11 if number is not None:
                perform(machine.conclude_save(number, OTHERS))
            case 8 if number is not None:
                perform(machine.cancel_save(number, "enough"))
    for _ in range(4):  # a death per save, two failed starts
        end_process()
    assert ended == Counter(asked)
    assert not machine._saves
