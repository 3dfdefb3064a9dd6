"""The roll call: all ranks make one call, or all get one error that shows who called what."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import RestoreAborted, SnapshotAborted, UsageError
from actorsnap.protocol.calls import DeadlinePassed, RankLost, SendToRank
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.labels import CallKind, Label, named_ranks
from actorsnap.protocol.machine import ProtocolViolation
from actorsnap.protocol.messages import (
    Absent,
    AskLabel,
    Failed,
    Labelled,
)
from actorsnap.protocol.roll import (
    Called,
    Refuse,
    Reminded,
    RollCommand,
    RollMachine,
    RollState,
    Settle,
    Settled,
    Warn,
)

TAKE = Label(CallKind.TAKE, "s3://b/x", 5)
LATER = Label(CallKind.TAKE, "s3://b/x", 6)
RESTORE = Label(CallKind.RESTORE, "s3://b/x")
FULL = Failure(reason="the disk is full", stage=Stage.JOIN, rank=0)


def roll(world_size: int = 3, label: Label = TAKE) -> RollMachine:
    return RollMachine(label=label, world_size=world_size)


def called(machine: RollMachine, rank: int, label: Label = TAKE) -> list[RollCommand]:
    """A rank calls, and answers what it is asked."""
    commands = machine.handle(Called(rank, label.digest))
    if SendToRank(rank, AskLabel()) in commands:
        commands += machine.handle(Labelled(rank, label))
    return [command for command in commands if not isinstance(command, SendToRank)]


def refused(commands: Sequence[RollCommand]) -> str:
    (command,) = [command for command in commands if isinstance(command, Refuse)]
    error = command.failure.to_error()
    assert isinstance(error, UsageError)
    return str(error)


def test_ranks_that_call_alike_pass() -> None:
    machine = roll()
    assert [called(machine, rank) for rank in (2, 0, 1)] == [[]] * 3
    assert machine.state is RollState.CALLED
    assert machine.handle(Failed(1, FULL)) == []
    assert machine.remind_after_s == math.inf


@pytest.mark.parametrize(
    "other",
    [
        LATER,
        Label(CallKind.TAKE, "s3://b/x"),
        Label(CallKind.TAKE, "s3://b/y", 5),
        Label(CallKind.ASYNC_TAKE, "s3://b/x", 5),
        Label(CallKind.RESTORE, "s3://b/x", 5),
    ],
)
@pytest.mark.parametrize("odd", [0, 1, 7])
def test_one_rank_out_of_phase(other: Label, odd: int) -> None:
    machine = roll(8, other if odd == 0 else TAKE)
    order = list(range(8))
    random.Random(odd).shuffle(order)
    commands: list[RollCommand] = []
    for rank in order:
        commands += called(machine, rank, other if rank == odd else TAKE)
    parts = {0: "ranks 1 to 7", 1: "ranks 0 and 2 to 7", 7: "ranks 0 to 6"}
    text = refused(commands)
    assert f"{parts[odd]}: take('s3://b/x', step=5)" in text
    assert f"rank {odd}: {other}" in text
    assert machine.is_final


def test_who_has_not_called_is_shown_after_a_while() -> None:
    machine = roll(4)
    assert called(machine, 0) == []
    assert called(machine, 2, LATER) == [Settle()]
    assert machine.remind_after_s == math.inf
    text = refused(machine.handle(Settled()))
    assert "rank 0: take('s3://b/x', step=5); rank 2: take('s3://b/x', step=6); " in text
    assert "ranks 1 and 3: no call yet" in text


def test_a_failure_waits_for_the_labels() -> None:
    """What was not there may be there for those in phase."""
    machine = roll()
    called(machine, 0)
    assert machine.handle(Failed(0, FULL)) == [Settle()]
    assert called(machine, 1) == []
    assert "rank 2: take('s3://b/x', step=6)" in refused(called(machine, 2, LATER))
    for ending in (Called(2, TAKE.digest), Settled(), DeadlinePassed(5.0)):
        machine = roll()
        called(machine, 0)
        called(machine, 1)
        machine.handle(Failed(0, FULL))
        assert machine.handle(Failed(1, FULL)) == []
        assert machine.handle(ending) == [Refuse(FULL)]


def test_a_cancellation_and_bad_input_wait_for_nobody() -> None:
    cancelled = Failure(reason="enough", stage=Stage.CANCEL, rank=0)
    machine = roll()
    called(machine, 0)
    assert machine.handle(Failed(0, cancelled)) == [Refuse(cancelled)]
    machine = roll()
    called(machine, 0)
    assert machine.handle(Failed(1, FULL)) == [Refuse(FULL)]


def test_those_that_wait_are_reminded_three_times() -> None:
    machine = roll(8)
    called(machine, 0)
    called(machine, 4)
    absent = (1, 2, 3, 5, 6, 7)
    for after_s in (10.0, 60.0, 300.0):
        assert machine.remind_after_s == after_s
        reminder = [Warn(absent), SendToRank(4, Absent(absent))]
        assert machine.handle(Reminded()) == reminder
    assert machine.remind_after_s == math.inf


@pytest.mark.parametrize(("label", "kind"), [(TAKE, SnapshotAborted), (RESTORE, RestoreAborted)])
def test_the_end_names_who_has_not_called(label: Label, kind: type[Exception]) -> None:
    machine = roll(3, label)
    called(machine, 0, label)
    (command,) = machine.handle(DeadlinePassed(5.0))
    assert isinstance(command, Refuse)
    error = command.failure.to_error()
    assert isinstance(error, kind)
    assert f"timeout_s=5 is over; still waiting for ranks 1 and 2 to call {label}: " in str(error)
    machine = roll(3, label)
    called(machine, 0, label)
    (command,) = machine.handle(RankLost(2, 30.0))
    assert isinstance(command, Refuse)
    error = command.failure.to_error()
    assert isinstance(error, kind)
    assert (command.failure.rank, command.failure.stage) == (2, Stage.JOIN)
    assert "rank 2 was not heard for 30 s" in str(error)
    assert f"had not called {label}" in str(error)


def test_a_path_for_each_rank_is_not_listed_a_thousand_times() -> None:
    machine = roll(1000)
    commands: list[RollCommand] = []
    for rank in range(1000):
        label = TAKE if rank == 0 else Label(CallKind.TAKE, f"/ckpt/rank-{rank}" + "x" * 999)
        commands += called(machine, rank, label)
    text = refused(commands)
    assert len(text) < 2500
    assert "ranks 7 to 999: other calls" in text


@given(st.integers(0, 2**32).map(random.Random))
def test_all_alike_or_refused(rng: random.Random) -> None:
    """In any order, and with messages that come twice and late."""
    world_size = rng.randrange(1, 6)
    labels = [TAKE, *rng.choices([TAKE, TAKE, LATER], k=world_size - 1)]
    machine = roll(world_size)
    events: list[Called | Labelled | Failed] = [
        Called(rank, label.digest) for rank, label in enumerate(labels)
    ]
    sent: list[Called | Labelled | Failed] = []
    ends: list[Refuse] = []
    while events:
        event = rng.choice(events)
        if rng.random() < 0.7:
            events.remove(event)
        sent.append(event)
        for command in machine.handle(event):
            if isinstance(command, Refuse):
                ends.append(command)
            elif isinstance(command, SendToRank) and command.message == AskLabel():
                events.append(Labelled(command.rank, labels[command.rank]))
    is_alike = {*labels} == {TAKE}
    assert machine.state is (RollState.CALLED if is_alike else RollState.REFUSED)
    assert len(ends) == (0 if is_alike else 1)


def test_what_cannot_happen() -> None:
    with pytest.raises(ProtocolViolation, match="Settled while calling"):
        roll().handle(Settled())


def test_every_heartbeat_has_a_short_digest() -> None:
    assert len(TAKE.digest) <= 8


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 2, 3], "ranks 0 and 2 and 3"),
        ([0, 2, 3, 4, 7], "ranks 0, 2 to 4 and 7"),
        (list(range(1, 8)), "ranks 1 to 7"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others"),
    ],
)
def test_ranks_as_people_write_them(ranks: list[int], text: str) -> None:
    assert named_ranks(ranks) == text


def test_a_long_url_is_shown_by_its_end() -> None:
    label = Label(CallKind.TAKE, "s3://b/" + "x" * 300 + "/step-7")
    assert len(str(label)) < 200
    assert str(label).endswith("x/step-7')")
