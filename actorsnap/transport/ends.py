# SPDX-License-Identifier: Apache-2.0
"""Interface of a transport, and ends whose messages pass through a link.

A transport carries messages between participants (one per rank) and the coordinator of one call, in
order. It may lose messages after a party is gone. ``receive`` also returns its own observations.

The trainer owns the mailbox. Its ``Relay`` passes messages to and from the ``RelayedEnds`` of an
engine in the uploader process. If the trainer ends after staging, that process opens the mailbox
itself and connects the ends to its own relay.

This module must not know links, processes or torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, TypeAlias

import anyio
import msgspec

from actorsnap.protocol.failure import Failure, Stage, explain_coordinator_loss
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    Failed,
    FromCoordinator,
    Proceed,
    ToCoordinator,
)
from actorsnap.protocol.rounds import TakenOver


class Began(msgspec.Struct, frozen=True, kw_only=True):
    """A rank takes part in this call, with this tag.

    The coordinator receives it once per rank, before the rank's messages.
    """

    rank: int
    tag: bytes


class PeerLost(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="PeerLost"):
    """A rank that took part has fallen silent. Received once per rank.

    A rank that was never heard, in this call or one before, is not lost.

    Attributes:
        rank: At a participant's end always 0, the coordinator's.
        silent_s: Seconds of silence; 0.0 if the rank has left.
        how: The rank has left the topic of the call, which it had not begun: what it did. Else
            empty.
    """

    rank: int
    silent_s: float
    how: str = ""


class Broken(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="Broken"):
    """This end has failed. Received once, as the last item."""

    reason: str


class ParticipantEnd(Protocol):
    async def send(self, message: ToCoordinator) -> None: ...

    async def receive(self) -> FromCoordinator | PeerLost | Broken | TakenOver:
        """Cancellation: no message is lost."""

    def has_coordinator(self) -> bool:
        """Returns whether rank 0 is known to take part."""


class CoordinatorEnd(Protocol):
    async def send(self, rank: int, message: FromCoordinator) -> None: ...

    async def receive(self) -> ToCoordinator | Began | PeerLost | Broken | TakenOver:
        """Returns a message of any rank. Cancellation: no message is lost."""

    async def suspicion(self) -> str | None:
        """Returns why the other ranks may count this process as lost; None if they do not."""


Message: TypeAlias = FromCoordinator | ToCoordinator
Item: TypeAlias = FromCoordinator | ToCoordinator | PeerLost | Broken

_item = msgspec.msgpack.Decoder(Item)


def encode_item(item: Item) -> bytes:
    return msgspec.msgpack.encode(item)


def decode_item(data: bytes) -> Item:
    item: Item = _item.decode(data)
    return item


class RelayLink(Protocol):
    def post(self, to: int | None, message: Message) -> None:
        """Queues ``message`` for rank ``to``; None: the coordinator."""
        ...

    async def suspicion(self) -> str | None:
        """See ``CoordinatorEnd``."""
        ...


class _RelayedEnd:
    def __init__(self, wire: RelayLink) -> None:
        self.wire = wire
        self._in, self._out = anyio.create_memory_object_stream[Item | TakenOver](math.inf)

    def put(self, item: Item | TakenOver) -> None:
        self._in.send_nowait(item)

    async def receive(self) -> Any:
        return await self._out.receive()

    def close(self) -> None:
        self._in.close()
        self._out.close()


class RelayedParticipant(_RelayedEnd):
    """See ``transport.ends.ParticipantEnd``."""

    async def send(self, message: ToCoordinator) -> None:
        self.wire.post(None, message)

    def has_coordinator(self) -> bool:
        return True


class RelayedCoordinator(_RelayedEnd):
    """See ``transport.ends.CoordinatorEnd``."""

    async def send(self, rank: int, message: FromCoordinator) -> None:
        self.wire.post(rank, message)

    async def suspicion(self) -> str | None:
        return await self.wire.suspicion()


class RelayedEnds:
    """An engine's ends of one call; ``coordinator`` on rank 0 only. On the loop only."""

    def __init__(self, wire: RelayLink, *, rank: int) -> None:
        self.participant = RelayedParticipant(wire)
        self.coordinator = RelayedCoordinator(wire) if rank == 0 else None
        self._ends: list[_RelayedEnd] = [self.participant]
        if self.coordinator is not None:
            self._ends.append(self.coordinator)

    def put(self, to_coordinator: bool, item: Item) -> None:
        end = self.coordinator if to_coordinator else self.participant
        assert end is not None
        end.put(item)

    def move(self, wire: RelayLink) -> None:
        """Connects the ends to another wire; messages in transit may be lost."""
        for end in self._ends:
            end.wire = wire
            end.put(TakenOver())

    def break_off(self, reason: str) -> None:
        for end in self._ends:
            end.put(Broken(reason=reason))

    def close(self) -> None:
        """Idempotent."""
        for end in self._ends:
            end.close()


class InprocEnds(RelayedEnds):
    """Both ends of a single rank's call; messages are not encoded."""

    def __init__(self) -> None:
        super().__init__(self, rank=0)

    def post(self, to: int | None, message: Message) -> None:
        self.put(to is None, message)

    async def suspicion(self) -> str | None:
        return None


@dataclass(eq=False, repr=False)
class Relay:
    """The mailbox' side of one call; a ``RelayLink``. On the loop only.

    Args:
        participant, coordinator: Ends of the mailbox; ``coordinator`` on rank 0 only.
        on_aborted: Called when the coordinator aborts the call.
    """

    _: KW_ONLY
    rank: int
    world_size: int
    participant: ParticipantEnd
    coordinator: CoordinatorEnd | None
    on_aborted: Callable[[Failure], None]

    def __post_init__(self) -> None:
        self._put: Callable[[bool, Item], None] | None = None
        self._kept: list[tuple[bool, Item]] | None = []
        self._posted_in, self._posted_out = anyio.create_memory_object_stream[
            tuple[int | None, Message] | anyio.Event
        ](math.inf)
        # To conclude the call in place of an engine that died.
        self._rounds = dict.fromkeys(range(self.world_size), 0)
        self._sent_outcome: Proceed | Aborted | None = None
        self._outcome: Proceed | Aborted | PeerLost | Broken | None = None
        self._over = anyio.Event()

    async def run(self) -> None:
        """Passes messages on until cancelled. Call once."""
        async with self._posted_in, self._posted_out, anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_posted)
            tasks.start_soon(self._pass_on, self.participant, False)
            if self.coordinator is not None:
                tasks.start_soon(self._pass_on, self.coordinator, True)

    def attach(self, put: Callable[[bool, Item], None]) -> None:
        """Passes all items to an engine, also those received so far."""
        self._put = put
        for to_coordinator, item in self._kept or ():
            put(to_coordinator, item)

    def forget(self) -> None:
        """Stops keeping items: no engine can replace the present one."""
        self._kept = None

    def post(self, to: int | None, message: Message) -> None:
        if to is not None:
            self._sent_outcome = _outcome_of(message) or self._sent_outcome
        with contextlib.suppress(anyio.ClosedResourceError):  # the call has ended
            self._posted_in.send_nowait((to, message))

    async def flush(self) -> None:
        sent = anyio.Event()
        self._posted_in.send_nowait(sent)
        await sent.wait()

    async def suspicion(self) -> str | None:
        assert self.coordinator is not None
        return await self.coordinator.suspicion()

    async def conclude(
        self, failure: Failure, look: Callable[[], Awaitable[bool | None]]
    ) -> Failure | None:
        """Ends the call in place of an engine that is gone; on rank 0, for all ranks.

        Args:
            failure: Why there is no engine.
            look: Returns whether the call has committed; None: the storage does not answer.

        Returns:
            None if committed.
        """
        self._put = None
        if self.coordinator is not None:
            return await self._conclude_for_all(failure, look)
        if self._outcome is None:
            self.post(None, Failed(self.rank, failure))
            await self._over.wait()
        match self._outcome:
            case Aborted(verdict):
                return verdict
            case Proceed():
                return None
            case PeerLost(silent_s=silent_s):
                reason = explain_coordinator_loss(silent_s)
            case Broken(reason=reason):
                pass
        if await look():
            return None
        return Failure(reason=reason, stage=Stage.COMMIT, rank=0, may_be_visible=True)

    async def _conclude_for_all(
        self, failure: Failure, look: Callable[[], Awaitable[bool | None]]
    ) -> Failure | None:
        outcome = self._sent_outcome
        if outcome is None:
            is_committed = await look()
            outcome = Proceed(0, is_last=True) if is_committed else Aborted(failure)
        for rank in range(self.world_size):
            message = outcome
            if isinstance(outcome, Proceed):
                message = Proceed(self._rounds[rank], is_last=True)
            self.post(rank, message)
        return outcome.failure if isinstance(outcome, Aborted) else None

    def _note(self, item: Item) -> None:
        outcome = item if isinstance(item, PeerLost | Broken) else _outcome_of(item)
        if outcome is not None:
            self._outcome = outcome
            self._over.set()
        if isinstance(item, Aborted):
            self.on_aborted(item.failure)

    async def _send_posted(self) -> None:
        async for posted in self._posted_out:
            if isinstance(posted, anyio.Event):
                posted.set()
                continue
            to, message = posted
            if to is None:
                await self.participant.send(message)  # type: ignore[arg-type]
            else:
                assert self.coordinator is not None
                await self.coordinator.send(to, message)  # type: ignore[arg-type]

    async def _pass_on(self, end: ParticipantEnd | CoordinatorEnd, to_coordinator: bool) -> None:
        while True:
            item = await end.receive()
            assert not isinstance(item, TakenOver)
            if isinstance(item, Began):
                continue  # the call is the same on all ranks
            if to_coordinator and isinstance(item, Arrived):
                self._rounds[item.rank] = item.round
            if self._kept is not None:
                self._kept.append((to_coordinator, item))
            if self._put is not None:
                self._put(to_coordinator, item)
            if not to_coordinator:
                self._note(item)
            if isinstance(item, Broken):
                return


def _outcome_of(message: object) -> Proceed | Aborted | None:
    if isinstance(message, Aborted) or (isinstance(message, Proceed) and message.is_last):
        return message
    return None
