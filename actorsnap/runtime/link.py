# SPDX-License-Identifier: Apache-2.0
"""Frames over a socket pair: length (four bytes) and msgpack data."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Generic, TypeVar

import anyio
import msgspec

In = TypeVar("In")
Out = TypeVar("Out")

_PREFIX_BYTES = 4
_READ_BYTES = 1 << 18


class Link(Generic[In, Out]):
    """One end of the connection, which it owns. On one event loop only.

    Args:
        incoming: Type of received frames.
    """

    def __init__(self, connection: socket.socket, incoming: Any) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._received = bytearray()
        self._outgoing = bytearray()
        self._has_outgoing = anyio.Event()
        self.sent_bytes = self.sent_frames = 0
        self.received_bytes = self.received_frames = 0

    def send(self, frame: Out) -> None:
        """Queues a small frame for ``flush_forever``. Never waits."""
        data = self._encoder.encode(frame)
        self._outgoing += len(data).to_bytes(_PREFIX_BYTES, "big")
        self._outgoing += data
        self.sent_bytes += _PREFIX_BYTES + len(data)
        self.sent_frames += 1
        self._has_outgoing.set()

    async def flush_forever(self) -> None:
        """Sends queued frames until cancelled or the other end is gone."""
        while True:
            await self._has_outgoing.wait()
            if not await self.flush():
                return
            self._has_outgoing = anyio.Event()

    async def flush(self) -> bool:
        """Sends queued frames. False: the other end is gone."""
        while self._outgoing:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError:
                return False
        return True

    async def receive(self) -> In | None:
        """Returns the next frame; None if the other end is gone.

        Raises:
            ValueError: invalid data.
        """
        while True:
            have = len(self._received) - _PREFIX_BYTES
            wanted = int.from_bytes(self._received[:_PREFIX_BYTES], "big")
            if have >= 0 and have >= wanted:
                end = _PREFIX_BYTES + wanted
                frame: In = self._decoder.decode(self._received[_PREFIX_BYTES:end])
                del self._received[:end]
                self.received_frames += 1
                self.received_bytes += end
                return frame
            await anyio.wait_readable(self._socket)
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                return None
            if not data:
                return None
            self._received += data

    def shut(self) -> None:
        """Ends both directions and wakes waiting tasks."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this end. Only while no task waits at it."""
        self._socket.close()
