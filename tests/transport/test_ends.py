# SPDX-License-Identifier: Apache-2.0
"""Messages between a mailbox and an engine elsewhere, and what ends a call whose engine is gone."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import Aborted, Arrived, Ask, Failed, Proceed
from actorsnap.protocol.rounds import TakenOver
from actorsnap.transport.ends import (
    Broken,
    Item,
    PeerLost,
    Relay,
    RelayedEnds,
    decode_item,
    encode_item,
)

DEAD = Failure(reason="the uploader process was killed", stage=Stage.STORE, rank=1)
FULL = Failure(reason="the disk is full", stage=Stage.STORE, rank=2)


class End:
    """An end of a mailbox. What was sent is in ``sent``."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._in, self._out = anyio.create_memory_object_stream[Any](math.inf)

    def give(self, *items: Item) -> None:
        for item in items:
            self._in.send_nowait(item)

    async def send(self, *message: Any) -> None:
        self.sent.append(message if len(message) > 1 else message[0])

    async def receive(self) -> Any:
        return await self._out.receive()

    def has_coordinator(self) -> bool:
        return True

    async def suspicion(self) -> str | None:
        return "it was stopped"

    def close(self) -> None:
        self._in.close()
        self._out.close()


class Mailbox:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.participant = End()
        self.coordinator = End() if rank == 0 else None
        self.aborted: list[Failure] = []
        self.relay = Relay(
            rank=rank,
            world_size=3,
            participant=self.participant,
            coordinator=self.coordinator,
            on_aborted=self.aborted.append,
        )

    @property
    def down(self) -> list[Any]:
        assert self.coordinator is not None
        return self.coordinator.sent

    def engine(self) -> RelayedEnds:
        ends = RelayedEnds(self.relay, rank=self.rank)
        self.relay.attach(ends.put)
        return ends


@asynccontextmanager
async def mailbox(rank: int) -> AsyncIterator[Mailbox]:
    box = Mailbox(rank)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.relay.run)
        yield box
        tasks.cancel_scope.cancel()
    for end in (box.participant, box.coordinator):
        if end is not None:
            end.close()


def looks(found: bool | None) -> Callable[[], Awaitable[bool | None]]:
    async def look() -> bool | None:
        return found

    return look


async def never() -> bool | None:
    pytest.fail("nobody has to look")


@pytest.mark.parametrize(
    "item",
    [
        Arrived(1, 0, b"payload"),
        Failed(1, FULL),
        Ask(0, b"more", 1),
        Proceed(3, is_last=True),
        Aborted(FULL),
        PeerLost(rank=1, silent_s=3.5),
        Broken(reason="the store is gone"),
    ],
)
def test_items_come_back_as_they_were(item: Item) -> None:
    assert decode_item(encode_item(item)) == item


async def test_an_engine_has_both_ends() -> None:
    async with mailbox(0) as box:
        ends = box.engine()
        assert ends.coordinator is not None
        assert box.coordinator is not None
        box.participant.give(Proceed(0))
        box.coordinator.give(Arrived(1, 0), PeerLost(rank=2, silent_s=9.0))
        assert await ends.participant.receive() == Proceed(0)
        assert await ends.coordinator.receive() == Arrived(1, 0)
        assert await ends.coordinator.receive() == PeerLost(rank=2, silent_s=9.0)
        await ends.participant.send(Arrived(0, 0))
        await ends.coordinator.send(2, Proceed(0))
        await box.relay.flush()
        assert box.participant.sent == [Arrived(0, 0)]
        assert box.down == [(2, Proceed(0))]
        assert await ends.coordinator.suspicion() == "it was stopped"
        ends.close()


async def test_the_next_engine_gets_everything_until_one_has_begun() -> None:
    async with mailbox(1) as box:
        box.participant.give(Ask(0, b"", 1))
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            ends = box.engine()
            assert await ends.participant.receive() == Ask(0, b"", 1)
            ends.close()
        box.relay.forget()
        last = box.engine()
        box.participant.give(Proceed(0))
        assert await last.participant.receive() == Proceed(0)
        last.close()


async def test_ends_move_to_another_mailbox() -> None:
    async with mailbox(1) as old, mailbox(1) as new:
        ends = old.engine()
        ends.move(new.relay)
        new.relay.attach(ends.put)
        new.participant.give(Proceed(0))
        assert [await ends.participant.receive() for _ in range(2)] == [TakenOver(), Proceed(0)]
        await ends.participant.send(Arrived(1, 1))
        await new.relay.flush()
        assert (old.participant.sent, new.participant.sent) == ([], [Arrived(1, 1)])
        ends.close()


@pytest.mark.parametrize(
    ("item", "outcome"), [(Aborted(FULL), FULL), (Proceed(3, is_last=True), None)]
)
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_rank_without_its_engine_waits_for_the_verdict(
    item: Item, outcome: Failure | None, is_late: bool
) -> None:
    async with mailbox(1) as box:
        box.engine().close()
        if is_late:

            async def conclude() -> None:
                assert await box.relay.conclude(DEAD, never) == outcome

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(conclude)
                await anyio.wait_all_tasks_blocked()
                assert box.participant.sent == [Failed(1, DEAD)]
                box.participant.give(Proceed(1), item)
        else:
            box.relay.attach(lambda _, item: None)
            box.participant.give(item)
            await anyio.wait_all_tasks_blocked()
            assert await box.relay.conclude(DEAD, never) == outcome
            assert box.participant.sent == []
        assert box.aborted == ([FULL] if outcome else [])


@pytest.mark.parametrize("found", [True, False, None])
async def test_a_rank_that_loses_rank_0_as_well_looks_in_the_storage(found: bool | None) -> None:
    async with mailbox(1) as box:
        box.participant.give(PeerLost(rank=0, silent_s=9.0))
        await anyio.wait_all_tasks_blocked()
        outcome = await box.relay.conclude(DEAD, looks(found))
    if found:
        assert outcome is None
    else:
        assert outcome is not None
        assert outcome.may_be_visible
        assert "rank 0, the coordinator, sent nothing for 9 s" in outcome.reason


@pytest.mark.parametrize("found", [True, False, None])
async def test_rank_0_without_its_engine_ends_the_call_of_all(found: bool | None) -> None:
    async with mailbox(0) as box:
        assert box.coordinator is not None
        box.relay.attach(lambda _, item: None)
        box.coordinator.give(Arrived(0, 1), Arrived(1, 3), Arrived(2, 3))
        await anyio.wait_all_tasks_blocked()
        outcome = await box.relay.conclude(DEAD, looks(found))
        await box.relay.flush()
        if found:
            assert outcome is None
            rounds = (1, 3, 3)
            expected: Any = [(n, Proceed(at, is_last=True)) for n, at in enumerate(rounds)]
        else:
            assert outcome == DEAD
            expected = [(rank, Aborted(DEAD)) for rank in range(3)]
        assert box.down == expected


@pytest.mark.parametrize("sent", [Aborted(FULL), Proceed(3, is_last=True)])
async def test_rank_0_repeats_the_outcome_that_its_engine_had_begun_to_send(sent: Any) -> None:
    async with mailbox(0) as box:
        ends = box.engine()
        assert ends.coordinator is not None
        assert box.coordinator is not None
        box.coordinator.give(*[Arrived(rank, 3) for rank in range(3)])
        await anyio.wait_all_tasks_blocked()
        await ends.coordinator.send(1, Proceed(2))
        await ends.coordinator.send(0, sent)
        outcome = await box.relay.conclude(DEAD, never)
        await box.relay.flush()
        assert outcome == (FULL if isinstance(sent, Aborted) else None)
        assert box.down == [(1, Proceed(2)), (0, sent), *[(rank, sent) for rank in range(3)]]
        ends.close()
