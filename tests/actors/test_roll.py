# SPDX-License-Identifier: Apache-2.0
"""The roll call between simulated ranks, under a virtual clock."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
import trio.testing

from actorsnap.actors.roll import Caller, Roll
from actorsnap.errors import UsageError
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import Aborted, Arrived, CallKind, Failed, Label, Labelled
from actorsnap.protocol.roll import NO_LABEL, RollCall
from actorsnap.transport.ends import Began, Broken, PeerLost
from tests.support.network import SimulatedNetwork

TIMEOUT_S = 3600.0
LABEL = Label(CallKind.TAKE, "/ckpt", 7)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Ranks:
    """The ends of a call. ``calls`` says when a rank makes it, and which."""

    def __init__(self, world_size: int) -> None:
        self.network = SimulatedNetwork(world_size)
        self.world_size = world_size
        self.heard: dict[int, object] = {}
        self.ended_s: dict[int, float] = {}

    async def call(self, rank: int, label: Label = LABEL, *, at_s: float = 0.0) -> None:
        await anyio.sleep(at_s)
        caller = Caller(
            self.network.participant(rank),
            rank=rank,
            label=label,
            timeout_s=TIMEOUT_S,
        )
        self.network.begin(rank, label.digest)
        async with anyio.create_task_group() as tasks:
            if rank == 0:
                tasks.start_soon(self.coordinate, label)
            caller.begin()
            await caller.send(Arrived(rank, 0))
            self.heard[rank] = await caller.receive()
            self.ended_s[rank] = anyio.current_time()

    async def coordinate(self, label: Label) -> None:
        roll_call = RollCall(label=label, world_size=self.world_size)
        end = Roll(self.network.coordinator(), roll_call=roll_call, timeout_s=TIMEOUT_S)
        end.begin()
        failure = Failure(reason="all have written", stage=Stage.STORE)
        written = 0
        while written < self.world_size:
            message = await end.receive()
            if isinstance(message, Failed):
                failure = message.failure
                break
            assert isinstance(message, Arrived)
            written += 1
        for rank in range(self.world_size):
            await end.send(rank, Aborted(failure))

    def failure(self, rank: int) -> Failure:
        message = self.heard[rank]
        assert isinstance(message, Aborted)
        return message.failure


def reminders(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_all_call(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(3)
    async with anyio.create_task_group() as tasks:
        for rank in range(3):
            tasks.start_soon(ranks.call, rank)
    assert {ranks.failure(rank).reason for rank in range(3)} == {"all have written"}
    assert reminders(caplog) == []


async def test_only_rank_0_calls(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(8)
    begun_s = anyio.current_time()
    times: list[float] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.call, 0)
        for after_s in (9.0, 2.0, 48.0, 2.0, 238.0, 2.0, 3000.0):
            await anyio.sleep(after_s)
            times.append(len(reminders(caplog)))
    assert times == [0, 1, 1, 2, 2, 3, 3]
    text = "waiting for ranks 1 to 7 to call take('/ckpt', step=7): every rank has to call it"
    assert reminders(caplog) == [f"snapshot /ckpt rank 0: {text}"] * 3
    failure = ranks.failure(0)
    assert failure.reason == f"timeout_s=3600 has passed; still {text}"
    assert ranks.ended_s[0] - begun_s == pytest.approx(TIMEOUT_S, abs=1.0)


async def test_all_but_rank_0_call(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(3)
    begun_s = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for rank in (1, 2):
            tasks.start_soon(ranks.call, rank)
    lines = reminders(caplog)
    assert len(lines) == 6
    assert (
        sum("rank 1: waiting for rank 0 to call take('/ckpt', step=7): " in x for x in lines) == 3
    )
    for rank in (1, 2):
        failure = ranks.failure(rank)
        assert "timeout_s=3600 has passed; still waiting for rank 0 to call" in failure.reason
        assert failure.rank == 0
        assert ranks.ended_s[rank] - begun_s < TIMEOUT_S + 5.0


async def test_every_rank_that_waits_names_the_absent_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.call, 0)
        tasks.start_soon(ranks.call, 1)
        await anyio.sleep(100.0)
        tasks.start_soon(ranks.call, 2)
    found = sorted(reminders(caplog))
    assert [line[: len("snapshot /ckpt rank 1: waiting for rank 2")] for line in found] == [
        f"snapshot /ckpt rank {rank}: waiting for rank 2" for rank in (0, 0, 1, 1)
    ]
    assert ranks.failure(2).reason == "all have written"


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_lost_store_is_no_absent_rank(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    network = SimulatedNetwork(2)
    network.begin(rank, LABEL.digest)
    end: Caller | Roll
    if rank:
        end = Caller(
            network.participant(1),
            rank=1,
            label=LABEL,
            timeout_s=TIMEOUT_S,
            is_connected=lambda: False,
        )
    else:
        roll_call = RollCall(label=LABEL, world_size=2)
        coordinator = network.coordinator()
        end = Roll(
            coordinator, roll_call=roll_call, timeout_s=TIMEOUT_S, is_connected=lambda: False
        )
    with anyio.move_on_after(11.0):
        end.begin()
        await end.receive()
    text = "waiting for the job's store, which does not answer, to call take('/ckpt', step=7)"
    assert reminders(caplog) == [f"snapshot /ckpt rank {rank}: {text}"]


async def test_a_slow_rank_0_is_not_said_to_be_absent(caplog: pytest.LogCaptureFixture) -> None:
    """It has called, and does not look at messages yet."""
    network = SimulatedNetwork(2)
    network.begin(0)
    caller = Caller(network.participant(1), rank=1, label=LABEL, timeout_s=TIMEOUT_S)
    with anyio.move_on_after(2 * TIMEOUT_S):
        caller.begin()
        await caller.receive()
    assert reminders(caplog) == []


async def test_ranks_out_of_phase_wait_for_the_others_a_moment() -> None:
    other = Label(CallKind.TAKE, "/ckpt", 8)
    for late_s, shown in ((4.0, "ranks 0 and 2: take"), (40.0, "rank 2: no call yet")):
        ranks = Ranks(3)
        begun_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks.call, 0)
            tasks.start_soon(ranks.call, 1, other)
            await anyio.sleep(late_s)
            tasks.start_soon(ranks.call, 2)
        errors = {str(ranks.failure(rank).to_error()) for rank in range(3)}
        (text,) = errors
        assert shown in text
        assert "rank 1: take('/ckpt', step=8)" in text
        assert isinstance(ranks.failure(2).to_error(), UsageError)
        assert ranks.ended_s[0] - begun_s == pytest.approx(min(late_s, 5.0), abs=0.1)


async def test_a_lost_rank_had_not_called() -> None:
    ranks = Ranks(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.call, 0)
        await anyio.sleep(1.0)
        ranks.network._up.put(0.0, PeerLost(rank=1, silent_s=30.0))
    assert "rank 1 sent nothing for 30 s" in ranks.failure(0).reason
    assert "it had not called take('/ckpt', step=7)" in ranks.failure(0).reason
    ranks = Ranks(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.call, 1)
        await anyio.sleep(1.0)
        ranks.network._down[1].put(0.0, PeerLost(rank=0, silent_s=30.0))
    assert "it had not called take('/ckpt', step=7)" in ranks.failure(1).reason


async def test_a_rank_that_has_left_makes_no_more_calls() -> None:
    how = "closed its manager after step 7"
    ranks = Ranks(3)
    async with anyio.create_task_group() as tasks:
        for rank in (0, 1):
            tasks.start_soon(ranks.call, rank)
        await anyio.sleep(1.0)
        ranks.network._up.put(0.0, PeerLost(rank=2, silent_s=0.0, how=how))
    for rank in (0, 1):
        assert ranks.failure(rank).rank == 2
        assert f"rank 2 {how}; it had not called take(" in ranks.failure(rank).reason
    # Without rank 0, a rank withdraws: rank 0 may make another call with this number.
    network = SimulatedNetwork(2)
    network.begin(0)
    network._down[1].put(0.0, PeerLost(rank=0, silent_s=0.0, how=how))
    caller = Caller(network.participant(1), rank=1, label=LABEL, timeout_s=TIMEOUT_S)
    caller.begin()
    message = await caller.receive()
    assert isinstance(message, Aborted)
    assert message.failure.reason == f"rank 0 {how}; it had not called take('/ckpt', step=7)"
    assert await network.coordinator().receive() == Failed(1, message.failure, NO_LABEL)


async def test_after_a_refusal_only_losses_go_on() -> None:
    """What a rank sends after its label belongs to a call that rank 0 does not make."""
    network = SimulatedNetwork(2)
    other = Label(CallKind.RESTORE, "/ckpt")
    end = Roll(
        network.coordinator(),
        roll_call=RollCall(label=LABEL, world_size=2),
        timeout_s=TIMEOUT_S,
    )
    end.begin()
    for message in (
        Began(rank=0, tag=LABEL.digest),
        Began(rank=1, tag=other.digest),
        Labelled(1, other),
        Arrived(1, 0),
        Failed(1, Failure(reason="the other call failed", stage=Stage.JOIN, rank=1)),
        PeerLost(rank=1, silent_s=30.0),
        Broken(reason="the store is gone"),
    ):
        network._up.put(0.0, message)
    refused = await end.receive()
    assert isinstance(refused, Failed)
    assert isinstance(refused.failure.to_error(), UsageError)
    assert await end.receive() == PeerLost(rank=1, silent_s=30.0)
    assert await end.receive() == Broken(reason="the store is gone")


async def test_a_late_rank_0_gets_the_reason_of_those_that_wait_no_more() -> None:
    ranks = Ranks(3)
    begun_s = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for rank in (1, 2):
            tasks.start_soon(ranks.call, rank)
        await anyio.sleep(TIMEOUT_S + 600.0)
        assert ranks.ended_s.keys() == {1, 2}
        tasks.start_soon(ranks.call, 0)
    reasons = {ranks.failure(rank).reason for rank in range(3)}
    (reason,) = reasons
    assert "timeout_s=3600 has passed; still waiting for rank 0 to call take(" in reason
    for rank, ended_s in ranks.ended_s.items():
        late_s = 0.0 if rank else 600.0
        assert ended_s - begun_s == pytest.approx(TIMEOUT_S + late_s, abs=4.0)


async def test_who_waits_for_a_slow_rank_0_says_so_at_the_deadline() -> None:
    """It has called, but ``state_dict()`` hangs there, and so nobody looks at messages."""
    network = SimulatedNetwork(2)
    network.begin(0)
    caller = Caller(network.participant(1), rank=1, label=LABEL, timeout_s=TIMEOUT_S)
    begun_s = anyio.current_time()
    caller.begin()
    message = await caller.receive()
    assert isinstance(message, Aborted)
    assert message.failure.rank == 0
    assert message.failure.reason == (
        "timeout_s=3600 has passed, and rank 0, the coordinator of take('/ckpt', step=7), "
        "has not answered"
    )
    assert anyio.current_time() - begun_s == pytest.approx(TIMEOUT_S, abs=4.0)
    assert await network.coordinator().receive() == Failed(1, message.failure)


@pytest.mark.parametrize("has_called", [False, True])
async def test_a_cancelled_rank_waits_for_a_rank_0_that_has_called(has_called: bool) -> None:
    network = SimulatedNetwork(2)
    if has_called:
        network.begin(0)
    caller = Caller(network.participant(1), rank=1, label=LABEL, timeout_s=TIMEOUT_S)
    failure = Failure(reason="the caller was interrupted", stage=Stage.CANCEL, rank=1)
    heard: list[object] = []

    async def listen() -> None:
        heard.append(await caller.receive())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await anyio.sleep(1.0)
        await caller.send(Failed(1, failure))
        await anyio.sleep(1.0)
        assert heard == ([] if has_called else [Aborted(failure)])
        tasks.cancel_scope.cancel()
