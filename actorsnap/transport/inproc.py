"""The transport inside one process: bounded streams, messages passed as they are.

Used for world size 1, and for simulated worlds of many ranks in tests.
"""

from __future__ import annotations

from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.transport.base import Broken, Lost

__all__ = ["InprocTransport"]

_MAX_MESSAGES_PER_RANK = 16
"""A rank sends and gets fewer than ten messages per attempt; more would be a defect."""

_Up: TypeAlias = ToCoordinator | Lost | Broken
_Down: TypeAlias = FromCoordinator | Lost | Broken


class InprocTransport:
    """All ends of one attempt."""

    def __init__(self, world_size: int) -> None:
        self._up_send, self._up_receive = anyio.create_memory_object_stream[_Up](
            _MAX_MESSAGES_PER_RANK * world_size
        )
        self._down: list[tuple[MemoryObjectSendStream[_Down], MemoryObjectReceiveStream[_Down]]] = [
            anyio.create_memory_object_stream[_Down](_MAX_MESSAGES_PER_RANK)
            for _ in range(world_size)
        ]

    def participant(self, rank: int) -> _Participant:
        """The end of ``rank``."""
        return _Participant(self._up_send, self._down[rank][1])

    def coordinator(self) -> _Coordinator:
        """The coordinator's end."""
        return _Coordinator(self._up_receive, [send for send, _ in self._down])

    def lose(self, rank: int, silent_s: float) -> None:
        """Tells the coordinator that ``rank`` is gone. For simulated worlds."""
        self._up_send.send_nowait(Lost(rank=rank, silent_s=silent_s))

    def lose_coordinator(self, silent_s: float) -> None:
        """Tells all ranks that the coordinator is gone. For simulated worlds."""
        for send, _ in self._down:
            send.send_nowait(Lost(rank=0, silent_s=silent_s))

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
        send: MemoryObjectSendStream[_Up],
        receive: MemoryObjectReceiveStream[_Down],
    ) -> None:
        self._send = send
        self._receive = receive

    async def send(self, message: ToCoordinator) -> None:
        await self._send.send(message)

    async def receive(self) -> _Down:
        return await self._receive.receive()


class _Coordinator:
    def __init__(
        self,
        receive: MemoryObjectReceiveStream[_Up],
        sends: list[MemoryObjectSendStream[_Down]],
    ) -> None:
        self._receive = receive
        self._sends = sends

    async def send(self, rank: int, message: FromCoordinator) -> None:
        await self._sends[rank].send(message)

    async def receive(self) -> _Up:
        return await self._receive.receive()

    def absence(self) -> str | None:
        return None
