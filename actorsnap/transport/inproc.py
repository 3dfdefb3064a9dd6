"""The transport inside one process: bounded streams that pass messages as they are."""

from __future__ import annotations

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actorsnap.protocol.messages import FromCoordinator, ToCoordinator

__all__ = ["InprocTransport"]

_MAX_MESSAGES_PER_RANK = 16
"""Capacity of a stream. A rank exchanges fewer than ten messages per attempt; more are a defect."""


class InprocTransport:
    """All ends of one attempt."""

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

    def participant(self, rank: int) -> _Participant:
        return _Participant(self._up_send, self._down[rank][1])

    def coordinator(self) -> _Coordinator:
        return _Coordinator(self._up_receive, [send for send, _ in self._down])

    def close(self) -> None:
        """Closes all ends; receivers get ``anyio.EndOfStream``."""
        self._up_send.close()
        self._up_receive.close()
        for send, receive in self._down:
            send.close()
            receive.close()


class _Participant:
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


class _Coordinator:
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
