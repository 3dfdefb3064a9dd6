"""Interface of a transport, and the transport inside one process.

A transport carries messages between participants (one per rank) and the coordinator of one call, in
order. It may lose messages after a party is gone. ``receive`` also returns its own observations.
"""

from __future__ import annotations

from typing import Protocol

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.protocol.rounds import TakenOver

__all__ = ["Began", "Broken", "CoordinatorEnd", "InprocTransport", "PeerLost", "ParticipantEnd"]


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
    """

    rank: int
    silent_s: float


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

    async def absence(self) -> str | None:
        """Returns why the ranks may have given this process up: it may have been stopped."""


_MAX_MESSAGES_PER_RANK = 16
"""Capacity of a stream; a call takes fewer than ten messages per rank."""


class InprocTransport:
    """All ends of one call in one process; messages are not encoded."""

    def __init__(self, world_size: int) -> None:
        self._up_send, self._up_receive = anyio.create_memory_object_stream[ToCoordinator](
            _MAX_MESSAGES_PER_RANK * world_size
        )
        self._down: list[
            tuple[
                MemoryObjectSendStream[FromCoordinator], MemoryObjectReceiveStream[FromCoordinator]
            ]
        ] = [
            anyio.create_memory_object_stream[FromCoordinator](_MAX_MESSAGES_PER_RANK)
            for _ in range(world_size)
        ]

    def participant(self, rank: int) -> _InprocParticipant:
        return _InprocParticipant(self._up_send, self._down[rank][1])

    def coordinator(self) -> _InprocCoordinator:
        return _InprocCoordinator(self._up_receive, [send for send, _ in self._down])

    def close(self) -> None:
        self._up_send.close()
        self._up_receive.close()
        for send, receive in self._down:
            send.close()
            receive.close()


class _InprocParticipant:
    def __init__(
        self,
        send: MemoryObjectSendStream[ToCoordinator],
        receive: MemoryObjectReceiveStream[FromCoordinator],
    ) -> None:
        self._send = send
        self._receive = receive

    async def send(self, message: ToCoordinator) -> None:
        await self._send.send(message)

    async def receive(self) -> FromCoordinator:
        return await self._receive.receive()

    def has_coordinator(self) -> bool:
        return True


class _InprocCoordinator:
    def __init__(
        self,
        receive: MemoryObjectReceiveStream[ToCoordinator],
        sends: list[MemoryObjectSendStream[FromCoordinator]],
    ) -> None:
        self._receive = receive
        self._sends = sends

    async def send(self, rank: int, message: FromCoordinator) -> None:
        await self._sends[rank].send(message)

    async def receive(self) -> ToCoordinator:
        return await self._receive.receive()

    async def absence(self) -> str | None:
        return None
