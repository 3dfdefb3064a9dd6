# SPDX-License-Identifier: Apache-2.0
"""The roll call: all ranks make one call, or all get one error that shows who called what."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import RestoreAborted, SnapshotAborted, UsageError
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.protocol.roll import RollCall, RollState

TAKE = Label(CallKind.TAKE, "s3://b/x", 5)
LATER = Label(CallKind.TAKE, "s3://b/x", 6)
RESTORE = Label(CallKind.RESTORE, "s3://b/x")
FULL = Failure(reason="the disk is full", stage=Stage.JOIN, rank=0)


def begin(world_size: int = 3, label: Label = TAKE) -> RollCall:
    return RollCall(label=label, world_size=world_size)


def call(roll: RollCall, rank: int, label: Label = TAKE) -> None:
    """A rank calls, and answers what it is asked."""
    if roll.on_called(rank, label.digest):
        roll.on_labelled(rank, label)


def refusal(roll: RollCall) -> str:
    """The text of the common error."""
    assert roll.state is RollState.REFUSED
    assert roll.refusal is not None
    error = roll.refusal.to_error()
    assert isinstance(error, UsageError)
    return str(error)


def test_ranks_that_call_alike_pass() -> None:
    roll = begin()
    for rank in (2, 0, 1):
        assert roll.state is RollState.CALLING
        call(roll, rank)
    assert roll.state is RollState.CALLED
    roll.on_failed(1, FULL)
    roll.on_lost(2, 30.0)
    roll.on_deadline(5.0)
    assert roll.state is RollState.CALLED
    assert roll.refusal is None
    assert roll.remind_after_s == math.inf


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
    roll = begin(8, other if odd == 0 else TAKE)
    order = list(range(8))
    random.Random(odd).shuffle(order)
    for rank in order:
        assert not roll.is_over
        call(roll, rank, other if rank == odd else TAKE)
    parts = {0: "ranks 1 to 7", 1: "ranks 0 and 2 to 7", 7: "ranks 0 to 6"}
    text = refusal(roll)
    assert f"{parts[odd]}: take('s3://b/x', step=5)" in text
    assert f"rank {odd}: {other}" in text


@pytest.mark.parametrize("closing", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("other", [TAKE, RESTORE])
def test_a_manager_that_is_closed_early(other: Label, closing: tuple[int, ...]) -> None:
    close = Label(CallKind.CLOSE, "s3://b")
    roll = begin(3, close if 0 in closing else other)
    for rank in (2, 0, 1):
        call(roll, rank, close if rank in closing else other)
    assert roll.refusal is not None
    error = roll.refusal.to_error()
    assert isinstance(error, SnapshotAborted if other is TAKE else RestoreAborted)
    assert error.rank == (closing[0] if len(closing) == 1 else None)
    who = {(0,): "rank 0 has", (1,): "rank 1 has", (0, 2): "ranks 0 and 2 have"}[closing]
    assert f"{who} closed" in error.reason
    assert f"had not called {other}, which" in error.reason


def test_who_has_not_called_is_shown_after_a_while() -> None:
    roll = begin(4)
    call(roll, 0)
    call(roll, 2, LATER)
    assert roll.state is RollState.SETTLING
    assert roll.remind_after_s == math.inf
    roll.on_settled()
    text = refusal(roll)
    assert "rank 0: take('s3://b/x', step=5); rank 2: take('s3://b/x', step=6); " in text
    assert "ranks 1 and 3: no call yet" in text


def test_a_failure_waits_for_the_labels() -> None:
    """What was not there may be there for those in phase."""
    roll = begin()
    call(roll, 0)
    roll.on_failed(0, FULL)
    assert roll.state is RollState.SETTLING
    call(roll, 1)
    assert roll.state is RollState.SETTLING
    call(roll, 2, LATER)
    assert "rank 2: take('s3://b/x', step=6)" in refusal(roll)


@pytest.mark.parametrize("end", ["all have called", "settled", "deadline"])
def test_a_failure_is_the_error_of_ranks_that_call_alike(end: str) -> None:
    roll = begin()
    call(roll, 0)
    call(roll, 1)
    roll.on_failed(0, FULL)
    roll.on_failed(1, FULL)
    assert roll.state is RollState.SETTLING
    match end:
        case "settled":
            roll.on_settled()
        case "deadline":
            roll.on_deadline(5.0)
        case _:
            call(roll, 2)
    assert roll.refusal == FULL


def test_a_cancellation_and_bad_input_wait_for_nobody() -> None:
    cancelled = Failure(reason="enough", stage=Stage.CANCEL, rank=0)
    for rank, failure in ((0, cancelled), (1, FULL)):
        roll = begin()
        call(roll, 0)
        roll.on_failed(rank, failure)
        assert roll.state is RollState.REFUSED
        assert roll.refusal == failure


def test_those_that_wait_are_reminded_three_times() -> None:
    roll = begin(8)
    call(roll, 0)
    call(roll, 4)
    for after_s in (10.0, 60.0, 300.0):
        assert roll.remind_after_s == after_s
        assert roll.remind() == ((1, 2, 3, 5, 6, 7), [4])
    assert roll.remind_after_s == math.inf


@pytest.mark.parametrize(("label", "kind"), [(TAKE, SnapshotAborted), (RESTORE, RestoreAborted)])
def test_the_end_names_who_has_not_called(label: Label, kind: type[Exception]) -> None:
    roll = begin(3, label)
    call(roll, 0, label)
    roll.on_deadline(5.0)
    assert roll.refusal is not None
    error = roll.refusal.to_error()
    assert isinstance(error, kind)
    assert f"timeout_s=5 has passed; still waiting for ranks 1 and 2 to call {label}: " in str(
        error
    )
    roll = begin(3, label)
    call(roll, 0, label)
    roll.on_lost(2, 30.0)
    assert roll.refusal is not None
    error = roll.refusal.to_error()
    assert isinstance(error, kind)
    assert (roll.refusal.rank, roll.refusal.stage) == (2, Stage.JOIN)
    assert "rank 2 sent nothing for 30 s" in str(error)
    assert f"had not called {label}" in str(error)


def test_a_path_for_each_rank_is_not_listed_a_thousand_times() -> None:
    roll = begin(1000)
    for rank in range(1000):
        label = TAKE if rank == 0 else Label(CallKind.TAKE, f"/ckpt/rank-{rank}" + "x" * 999)
        call(roll, rank, label)
    text = refusal(roll)
    assert len(text) < 2500
    assert "ranks 7 to 999: other calls" in text


@given(st.integers(0, 2**32).map(random.Random))
def test_all_alike_or_refused(rng: random.Random) -> None:
    """In any order, and with messages that come twice and late."""
    world_size = rng.randrange(1, 6)
    labels = [TAKE, *rng.choices([TAKE, TAKE, LATER], k=world_size - 1)]
    roll = begin(world_size)
    events = [(False, rank) for rank in range(world_size)]
    ends: list[RollState] = []
    while events:
        event = is_label, rank = rng.choice(events)
        if rng.random() < 0.7:
            events.remove(event)
        if is_label:
            roll.on_labelled(rank, labels[rank])
        elif roll.on_called(rank, labels[rank].digest):
            events.append((True, rank))
        if roll.is_over:
            ends.append(roll.state)
    end = RollState.CALLED if {*labels} == {TAKE} else RollState.REFUSED
    assert {*ends} == {end}


def test_every_heartbeat_has_a_short_digest() -> None:
    assert len(TAKE.digest) <= 8


def test_a_long_url_is_shown_by_its_end() -> None:
    label = Label(CallKind.TAKE, "s3://b/" + "x" * 300 + "/step-7")
    assert len(str(label)) < 200
    assert str(label).endswith("x/step-7')")
