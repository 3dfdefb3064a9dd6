"""The supervisor of the uploader process: each save ends once, whatever dies."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.supervisor import (
    AbortSave,
    AskedToCancel,
    AskedToEnd,
    AskedToSave,
    AskedToStart,
    AttemptBegun,
    KillProcess,
    MemoryGone,
    ProcessEnded,
    ProcessReady,
    ProcessSilent,
    SaveEnded,
    SaveHere,
    SendCancel,
    SendEnd,
    SendSave,
    StartProcess,
    Supervisor,
    SupervisorCommand,
    SupervisorState,
)

OTHERS = Failure(reason="rank 1 has failed", stage=Stage.CAPTURE, rank=1)
KILLED = ProcessEnded("the uploader process was killed (SIGKILL)")


def ready(*numbers: int) -> Supervisor:
    """A supervisor whose process works on these saves."""
    machine = Supervisor()
    for number in numbers or (0,):
        machine.handle(AskedToSave(number))
    machine.handle(ProcessReady())
    if not numbers:
        machine.handle(SaveEnded(0))
    return machine


def aborted(command: SupervisorCommand) -> tuple[int, Stage, str, bool]:
    assert isinstance(command, AbortSave)
    failure = command.failure
    return command.number, failure.stage, failure.reason, failure.may_be_visible


def test_the_first_save_starts_the_process_and_is_sent_when_it_is_ready() -> None:
    machine = Supervisor()
    assert machine.handle(AskedToSave(1)) == [StartProcess()]
    assert machine.handle(AskedToSave(2)) == []
    assert machine.handle(ProcessReady()) == [SendSave(1), SendSave(2)]
    assert machine.handle(AskedToSave(3)) == [SendSave(3)]


def test_a_process_may_be_started_ahead() -> None:
    machine = Supervisor()
    assert machine.handle(AskedToStart()) == [StartProcess()]
    assert machine.handle(AskedToStart()) == []
    assert machine.handle(ProcessReady()) == []
    assert machine.handle(AskedToStart()) == []
    assert machine.handle(AskedToSave(1)) == [SendSave(1)]


def test_a_process_that_was_started_ahead_and_fails_is_not_tried_for_ever() -> None:
    machine = Supervisor()
    machine.handle(AskedToStart())
    assert machine.handle(KILLED) == []
    machine.handle(AskedToStart())
    assert machine.handle(KILLED) == []
    assert machine.handle(AskedToStart()) == []
    assert machine.handle(AskedToSave(1)) == [SaveHere(1)]


def test_a_process_that_dies_idle_is_started_again_by_the_next_save() -> None:
    machine = ready()
    assert machine.handle(KILLED) == []
    assert machine.handle(AskedToSave(1)) == [StartProcess()]


def test_a_save_is_sent_again_once_with_the_attempt_that_died() -> None:
    machine = ready(1)
    machine.handle(AttemptBegun(1, "a"))
    assert machine.handle(KILLED) == [StartProcess()]
    assert machine.handle(ProcessReady()) == [SendSave(1, "a")]
    machine.handle(AttemptBegun(1, "b"))
    [command] = machine.handle(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED.reason, True)
    assert machine.state is SupervisorState.ABSENT


def test_a_save_whose_memory_is_gone_is_not_sent_again() -> None:
    machine = ready(1, 2)
    machine.handle(AttemptBegun(1, "a"))
    machine.handle(MemoryGone(1))
    first, second = machine.handle(KILLED)
    assert aborted(first) == (1, Stage.STORE, KILLED.reason, True)
    assert second == StartProcess()  # for the other one
    assert machine.handle(ProcessReady()) == [SendSave(2)]


def test_what_had_no_attempt_yet_cannot_be_visible() -> None:
    machine = ready(1)
    machine.handle(MemoryGone(1))
    [command] = machine.handle(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED.reason, False)


def test_without_a_process_that_starts_saves_are_made_here() -> None:
    machine = Supervisor()
    machine.handle(AskedToSave(1))
    assert machine.handle(ProcessEnded("no such file")) == [StartProcess()]
    assert machine.handle(ProcessEnded("no such file")) == [SaveHere(1)]
    assert machine.handle(AskedToSave(2)) == [SaveHere(2)]


def test_a_save_that_had_begun_is_not_made_here() -> None:
    machine = ready(1)
    machine.handle(AttemptBegun(1, "a"))
    machine.handle(KILLED)
    machine.handle(KILLED)
    [command] = machine.handle(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED.reason, True)


def test_failed_starts_count_in_a_row_only() -> None:
    machine = Supervisor()
    for number in range(4):
        machine.handle(AskedToSave(number))
        assert machine.handle(KILLED) == [StartProcess()]
        assert machine.handle(ProcessReady()) == [SendSave(number)]
        machine.handle(SaveEnded(number))
        assert machine.handle(KILLED) == []


def test_a_silent_process_is_killed_once() -> None:
    machine = ready(1)
    assert machine.handle(ProcessSilent(30.0)) == [KillProcess()]
    assert machine.handle(ProcessSilent(31.0)) == []
    assert machine.handle(AskedToSave(2)) == []
    assert machine.handle(KILLED) == [StartProcess()]
    assert machine.handle(ProcessReady()) == [SendSave(1), SendSave(2)]


def test_a_process_that_is_silent_while_it_starts_has_failed_to() -> None:
    machine = Supervisor()
    machine.handle(AskedToSave(1))
    for _ in range(2):
        assert machine.handle(ProcessSilent(30.0)) == [KillProcess()]
        commands = machine.handle(KILLED)
    assert commands == [SaveHere(1)]


def test_a_cancelled_save_is_not_sent_again() -> None:
    machine = ready(1)
    machine.handle(AttemptBegun(1, "a"))
    assert machine.handle(AskedToCancel(1, "enough")) == [SendCancel(1, "enough")]
    assert machine.handle(AskedToCancel(1, "again")) == []
    [command] = machine.handle(KILLED)
    assert aborted(command) == (1, Stage.CANCEL, "enough", True)


def test_a_save_that_waits_for_the_process_is_cancelled_here() -> None:
    machine = Supervisor()
    machine.handle(AskedToSave(1))
    [command] = machine.handle(AskedToCancel(1, "enough"))
    assert aborted(command) == (1, Stage.CANCEL, "enough", False)
    assert machine.handle(ProcessReady()) == []


def test_a_save_of_several_ranks_that_has_begun_is_not_sent_again() -> None:
    machine = Supervisor()
    machine.handle(AskedToSave(1, rank=3, is_shared=True))
    machine.handle(ProcessReady())
    assert machine.handle(KILLED) == [StartProcess()]  # it had not begun
    assert machine.handle(ProcessReady()) == [SendSave(1)]
    machine.handle(AttemptBegun(1, ""))
    [command] = machine.handle(KILLED)
    assert aborted(command) == (1, Stage.STORE, KILLED.reason, False)
    assert isinstance(command, AbortSave)
    assert command.failure.rank == 3
    # But one that was never sent is for the next process, or made here.
    machine.handle(AskedToSave(2, is_shared=True))
    assert machine.handle(KILLED) == [StartProcess()]
    assert machine.handle(KILLED) == [SaveHere(2)]


def test_what_the_team_has_ended_is_passed_on_once() -> None:
    machine = ready(1)
    machine.handle(AttemptBegun(1, "a"))
    assert machine.handle(AskedToEnd(1, OTHERS)) == [SendEnd(1, OTHERS)]
    assert machine.handle(AskedToEnd(1, OTHERS)) == []
    assert machine.handle(KILLED) == [AbortSave(1, OTHERS)]
    machine.handle(AskedToSave(2))
    assert machine.handle(AskedToEnd(2, OTHERS)) == [AbortSave(2, OTHERS)]  # it was not sent yet
    machine = ready(3)  # the process does not answer yet
    assert machine.handle(AskedToEnd(3, OTHERS)) == [SendEnd(3, OTHERS), AbortSave(3, OTHERS)]
    assert machine.handle(AttemptBegun(3, "a")) == []


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
        for command in commands:
            match command:
                case StartProcess():
                    assert not is_there
                    is_there, killed = True, False
                case KillProcess():
                    assert is_there
                    assert not killed
                    killed = True
                case SendSave():
                    assert is_there
                    assert not ended[command.number]
                    sent.add(command.number)
                case SendCancel() | SendEnd():
                    assert command.number in sent
                case AbortSave() | SaveHere():
                    ended[command.number] += 1
                    sent.discard(command.number)

    def end_process() -> None:
        nonlocal is_there
        if is_there:
            is_there = False
            sent.clear()
            perform(machine.handle(KILLED))

    def get_ready() -> None:
        if is_there and not killed and machine.state is SupervisorState.STARTING:
            perform(machine.handle(ProcessReady()))

    for choice in choices:
        number = asked[choice % len(asked)] if asked else None
        match choice:
            case 0 | 1:
                asked.append(len(asked))
                perform(machine.handle(AskedToSave(asked[-1])))
            case 2:
                get_ready()
            case 3:
                end_process()
            case 4:
                perform(machine.handle(ProcessSilent(30.0)))
            case 5 if sent:
                perform(machine.handle(AttemptBegun(min(sent), "a")))
            case 6 if sent:
                perform(machine.handle(MemoryGone(min(sent))))
            case 7 if sent:
                ended[min(sent)] += 1
                perform(machine.handle(SaveEnded(min(sent))))
                sent.discard(min(sent))
            case 9:
                perform(machine.handle(AskedToStart()))
            case 10:
                asked.append(len(asked))
                perform(machine.handle(AskedToSave(asked[-1], is_shared=True)))
            case 11 if number is not None:
                perform(machine.handle(AskedToEnd(number, OTHERS)))
            case 8 if number is not None:
                perform(machine.handle(AskedToCancel(number, "enough")))
    for _ in range(4):  # a death per save, two failed starts
        end_process()
    assert ended == Counter(asked)
    assert machine.num_saves == 0
