# SPDX-License-Identifier: Apache-2.0
"""Invited calls over a port's messages, in one process and without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import Aborted, Arrived, Invite, Proceed, SaveWanted
from actorsnap.transport.ends import Broken, PeerLost
from actorsnap.transport.invitations import NO_CALL, Invitations, InvitedCall, Listener

TOPIC = b"12345678"
WANTED = SaveWanted(1, TOPIC, "asked", 3)


class FakeMail:
    """Delivers to other ranks' invitations at once."""

    def __init__(self, rank: int, ports: list[FakeMail]) -> None:
        self.rank = rank
        self.world_size = 3
        self.left: Sequence[int] = ()
        self.ports = ports
        self.sent: list[Any] = []
        self.told: list[tuple[bytes, int, str]] = []
        self.invitations = Invitations(self)

    def send_up(self, number: int, message: Any) -> None:
        self.sent.append(message)
        self.ports[0].invitations.on_message(number, message)

    def send_down(self, to: int, number: int, message: Any) -> None:
        self.sent.append(message)
        self.ports[to].invitations.on_message(number, message)

    def on_gone(self, topic: bytes, rank: int, how: str) -> None:
        self.told.append((topic, rank, how))


@pytest.fixture
def ports() -> list[FakeMail]:
    ports: list[FakeMail] = []
    ports.extend(FakeMail(rank, ports) for rank in range(3))
    return ports


class Heard:
    def __init__(self) -> None:
        self.calls: list[InvitedCall] = []
        self.wanted: list[SaveWanted] = []

    @property
    def listener(self) -> Listener:
        return Listener(invited=self.calls.append, wanted=self.wanted.append)

    def close(self) -> None:
        for call in self.calls:
            call.close()


async def test_a_call_runs_between_its_ends(ports: list[FakeMail]) -> None:
    heard = [Heard() for _ in ports]
    for port, each in zip(ports, heard, strict=True):
        port.invitations.listen(TOPIC, each.listener)
    call = ports[0].invitations.invite(TOPIC, 5.0)
    assert [len(each.calls) for each in heard] == [0, 1, 1]
    assert {each.calls[0].number for each in heard[1:]} == {call.number} == {-2}
    coordinator = call.ends.coordinator
    assert coordinator is not None
    for rank, one in enumerate([call, heard[1].calls[0], heard[2].calls[0]]):
        await one.ends.participant.send(Arrived(rank, 0))
        assert await coordinator.receive() == Arrived(rank, 0)
        await coordinator.send(rank, Proceed(0, is_last=True))
        assert await one.ends.participant.receive() == Proceed(0, is_last=True)
    # Messages of rank 0 to itself are not sent.
    assert [type(message) for message in ports[0].sent] == [Invite, Invite, Proceed, Proceed]
    assert await coordinator.suspicion() is None
    call.deadline = anyio.current_time() - 1.0
    assert "stopped" in (await coordinator.suspicion() or "")
    for each in heard:
        each.close()
    call.close()


async def test_a_listener_that_comes_late(ports: list[FakeMail]) -> None:
    call = ports[0].invitations.invite(TOPIC, 5.0)
    ports[1].invitations.want(WANTED)
    late, first = Heard(), Heard()
    ports[1].invitations.listen(b"another", first.listener)
    ports[1].invitations.listen(TOPIC, late.listener)
    ports[0].invitations.listen(TOPIC, first.listener)
    assert (len(first.calls), first.wanted) == (0, [WANTED])
    (joined,) = late.calls
    # Rank 0 has ended the call.
    call.close()
    await joined.ends.participant.send(Arrived(1, 0))
    answer = await joined.ends.participant.receive()
    assert isinstance(answer, Aborted)
    assert "ended" in answer.failure.reason
    late.close()


async def test_repeated_invitations_are_one_call(ports: list[FakeMail]) -> None:
    heard = Heard()
    ports[1].invitations.listen(TOPIC, heard.listener)
    for _ in range(2):
        ports[1].invitations.on_message(-2, Invite(TOPIC, 5.0))
    assert len(heard.calls) == 1
    heard.close()


async def test_ranks_that_leave(ports: list[FakeMail]) -> None:
    heard = Heard()
    ports[1].invitations.listen(TOPIC, heard.listener)
    ports[0].left = [2]
    call = ports[0].invitations.invite(TOPIC, 5.0)
    coordinator = call.ends.coordinator
    assert coordinator is not None
    assert await coordinator.receive() == PeerLost(rank=2, silent_s=0.0)
    ports[0].invitations.lose(1)
    assert await coordinator.receive() == PeerLost(rank=1, silent_s=0.0)
    ports[1].invitations.lose(0)
    participant = heard.calls[0].ends.participant
    assert await participant.receive() == PeerLost(rank=0, silent_s=0.0)
    heard.close()
    call.close()


def test_ranks_that_leave_a_topic(ports: list[FakeMail]) -> None:
    first, second, third = (port.invitations for port in ports)
    second.leave(TOPIC, "closed it")
    third.leave(b"another", "closed it")
    assert first.gone(TOPIC) == {1: "closed it"}
    assert ports[0].told == [(TOPIC, 1, "closed it"), (b"another", 2, "closed it")]
    # Only rank 0 tells all, except those that have gone.
    assert [port.told for port in ports[1:]] == [[], []]
    ports[0].left = [1]
    first.leave(TOPIC, "left it")
    assert (second.gone(TOPIC), third.gone(TOPIC)) == ({}, {0: "left it"})
    # Nothing is kept for what was left.
    third.leave(TOPIC, "closed it")
    assert (first.gone(TOPIC), len(ports[0].told), third.gone(TOPIC)) == ({}, 2, {})


async def test_a_store_that_breaks(ports: list[FakeMail]) -> None:
    call = ports[0].invitations.invite(TOPIC, 5.0)
    ports[0].invitations.break_off("gone")
    following = ports[0].invitations.invite(TOPIC, 5.0)
    for each in (call, following):
        assert await each.ends.participant.receive() == Broken(reason="gone")
        each.close()


async def test_late_answers_of_an_ended_call_are_dropped(ports: list[FakeMail]) -> None:
    failure = Failure(reason="late", stage=Stage.JOIN)
    ports[1].invitations.on_message(-7, Aborted(failure))
    ports[1].invitations.on_message(-7, Proceed(0))
    assert ports[1].sent == []
    assert NO_CALL == -1


def test_topics_are_numbered_by_name(ports: list[FakeMail]) -> None:
    a, b = ports[0].invitations, ports[1].invitations
    assert [a.make_topic("x"), a.make_topic("x"), a.make_topic("y")] == [
        b.make_topic("x"),
        b.make_topic("x"),
        b.make_topic("y"),
    ]
    assert a.make_topic("x") != a.make_topic("x")
