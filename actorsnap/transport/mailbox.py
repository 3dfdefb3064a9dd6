# SPDX-License-Identifier: Apache-2.0
"""The threads of a store port: they send and receive frames, which ``transport.store`` interprets.

One thread sends, one receives, each on its own connection (``clone``). Loop and threads share two
queues and a few attributes, each set by one side only, without locks. Must not know torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import msgspec

from actorsnap.errors import describe, text_of
from actorsnap.log import Log
from actorsnap.protocol.messages import FromCoordinator, ToCoordinator

logger = Log(__name__)

PIECE_BYTES = 4 << 20
"""Maximum payload of a frame. The server closes a connection that sends over 8 MiB."""

STORE_ENDED = "its host, rank 0 or torchrun, has most likely ended. Start the job again"

_FOREVER = timedelta(days=365)
"""torch prints a warning each time a timeout expires."""

_encoder = msgspec.msgpack.Encoder()
_up_decoder = msgspec.msgpack.Decoder(ToCoordinator)
_down_decoder = msgspec.msgpack.Decoder(FromCoordinator)

_HELLO_MAX_S = 60.0
_MAX_PARTIAL = 256


class QueueStore(Protocol):
    """The required methods of a store, as of ``TCPStore`` and ``HashStore``."""

    def clone(self) -> Any:
        """Opens another connection."""

    def queue_push(self, key: str, value: bytes, /) -> None: ...

    def queue_pop(self, key: str, block: bool = True, /) -> bytes:
        """Removes the first value; waits for one up to the timeout."""

    def queue_len(self, key: str, /) -> int: ...

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Sets the timeout of all later calls."""


@dataclass(slots=True)
class StoreStatistics:
    """Traffic through the store since the port was made. Each field has one writing thread.

    Attributes:
        messages_sent, messages_received: Without those within rank 0.
        bytes_sent: Bytes of all frames.
        num_dropped: Late or foreign frames.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    num_dropped: int = 0
    num_undecodable: int = 0


class Kind(IntEnum):
    HELLO = 0  # to rank 0; token: the sender's own
    WELCOME = 1  # payload: the token of the rank's hello
    UP = 2  # to the coordinator
    DOWN = 3  # to a participant
    BEAT = 4  # payload: a ``Pulse``
    BYE = 5  # the sender's port closes, or rank 0 does not know the session
    STOP = 6  # to this process; token: its own


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One value in a mailbox."""

    kind: Kind
    sender: int
    token: bytes
    number: int = -1
    payload: bytes = b""
    is_last: bool = True


class Pulse(msgspec.Struct, frozen=True, array_like=True):
    """Content of a heartbeat.

    Attributes:
        every_s: Interval of this heartbeat, and the requested one of the others'.
        open: Tags of the sender's saves by number.
        awaited: Numbers of others' saves that the sender has not begun.
    """

    every_s: float
    open: dict[int, bytes] = {}
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivered:
    """A frame with its decoded payload."""

    frame: Frame
    content: Any = None


@dataclass(frozen=True, slots=True)
class Fault:
    reason: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    frame: bytes
    every_s: float
    is_hello: bool


_Job: TypeAlias = tuple[int, Frame, object] | tuple[()] | None
"""Receiver, frame, message for its payload, if any. Empty: look at the heartbeat; None: end."""


class Mailbox:
    """A rank's mailbox, and access to the others'. The threads are daemons.

    Args:
        store: Cloned by the threads, then released.
        wake: Called by a thread when the loop should look at ``arrived``.

    Attributes:
        arrived: Received frames and faults, removed by the loop.
        beaten: Times of sent heartbeats, removed by the loop.
        beat: The heartbeat to send. The loop sets it, then calls ``wake_up``.
        present: Receivers of heartbeats, set by the loop.
        wakes_on_beat: Received heartbeats call ``wake``; set by the loop.
    """

    def __init__(
        self,
        store: QueueStore,
        *,
        keys: Sequence[str],
        rank: int,
        token: bytes,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.arrived: deque[Delivered | Fault] = deque()
        self.beaten: deque[float] = deque()
        self.beat: Beat | None = None
        self.wakes_on_beat = True
        # Ordered, and copied in one step.
        self.present: dict[int, None] = {}
        self._keys = keys
        self._rank = rank
        self._token = token
        self._wake = wake
        self._clock = clock
        self._outbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._connected = {"send": False, "receive": False}
        self.statistics = StoreStatistics()
        self._is_continued = False
        store_for: dict[str, QueueStore] = {"send": store, "receive": store}
        self._threads = [
            threading.Thread(
                target=self._guard,
                args=(work, store_for, what),
                name=f"actorsnap-store-{what}",
                daemon=True,
            )
            for what, work in (("send", self._send), ("receive", self._receive))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_connected(self) -> bool:
        return all(self._connected.values())

    def put(self, to: int, frame: Frame, message: object = None) -> None:
        """Queues a frame; with ``message`` as its payload, in pieces if it is large."""
        self._outbox.put((to, frame, message))

    def wake_up(self) -> None:
        """Makes the sending thread look at ``beat``."""
        self._outbox.put(())

    def stop(self, *, is_continued: bool = False) -> None:
        """Ends the threads after sending; empties the mailbox unless it is continued."""
        self._is_continued = is_continued
        self.put(self._rank, Frame(Kind.STOP, self._rank, self._token))
        self._outbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the threads; abandons those that still wait for the store.

        Logs a warning of these, unless ``timeout_s`` is 0.
        """
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if timeout_s and any(thread.is_alive() for thread in self._threads):
            logger.warning(
                "rank %d: the job's store did not answer within %g s, so the connection to it is "
                "not closed: the store's host, rank 0 or torchrun, is stopped or has ended",
                *(self._rank, timeout_s),
            )

    def _guard(
        self,
        work: Callable[[QueueStore], None],
        store_for: dict[str, QueueStore],
        what: str,
    ) -> None:
        try:
            store: QueueStore = store_for.pop(what).clone()
            store.set_timeout(_FOREVER)
            self._connected[what] = True
            self.wake_up()  # for a waiting hello
            work(store)
        except Exception as error:
            logger.debug("%s: cannot %s", self._keys[self._rank], what, exc_info=True)
            self._post(Fault(_explain(error)))
            self._outbox.put(None)  # ends the sending thread, useless alone

    def _receive(self, store: QueueStore) -> None:
        key = self._keys[self._rank]
        decoder = msgspec.msgpack.Decoder(Frame)
        pieces: dict[tuple[int, bytes, Kind, int], list[bytes]] = {}
        num_waiting = 0
        while True:
            # A blocking pop costs two requests: queued values are popped without blocking.
            data = store.queue_pop(key, num_waiting == 0)
            num_waiting = num_waiting - 1 if num_waiting else store.queue_len(key)
            try:
                frame = decoder.decode(data)
                if frame.kind is Kind.STOP and frame.token == self._token:
                    break
                arrived = self._decode(frame, pieces)
            except Exception as error:  # any content: the thread must continue
                self.statistics.num_undecodable += 1
                logger.warning("%s: dropped a frame of %d bytes: %s", key, len(data), error)
                continue
            if arrived is not None:
                self._post(arrived)
        if not self._is_continued:
            for _ in range(store.queue_len(key)):
                store.queue_pop(key)

    def _decode(
        self, frame: Frame, pieces: dict[tuple[int, bytes, Kind, int], list[bytes]]
    ) -> Delivered | None:
        """Returns None if pieces are missing."""
        if frame.kind is Kind.BEAT:
            return Delivered(frame, msgspec.msgpack.decode(frame.payload, type=Pulse))
        if frame.kind not in (Kind.UP, Kind.DOWN):
            return Delivered(frame)
        payload = frame.payload
        place = (frame.sender, frame.token, frame.kind, frame.number)
        if not frame.is_last:
            pieces.setdefault(place, []).append(payload)
            if len(pieces) > _MAX_PARTIAL:
                del pieces[next(iter(pieces))]
                self.statistics.num_undecodable += 1
            return None
        if place in pieces:
            payload = b"".join([*pieces.pop(place), payload])
            frame = msgspec.structs.replace(frame, payload=b"")
        self.statistics.messages_received += 1
        decoder = _up_decoder if frame.kind is Kind.UP else _down_decoder
        return Delivered(frame, decoder.decode(payload))

    def _send(self, store: QueueStore) -> None:
        beat_at, hello_s = 0.0, 0.0
        sent: Beat | None = None
        while True:
            beat = self._beat_to_send()
            try:
                wait_s = None if beat is None else max(0.0, beat_at - time.monotonic())
                job = self._outbox.get(timeout=wait_s)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                if job:
                    to, frame, message = job
                    if message is not None:
                        self._push_message(store, to, frame, message)
                    elif frame.kind is not Kind.BEAT or self.beat is None:
                        # A queued heartbeat must not follow ``beat``, which is newer.
                        self._push(store, to, _encoder.encode(frame))
                beat = self._beat_to_send()
            if beat is not sent:
                # Report begins and ends of saves and sessions at once.
                sent, beat_at, hello_s = beat, 0.0, 0.0
            if beat is not None and time.monotonic() >= beat_at:
                every_s = beat.every_s
                if beat.is_hello:
                    # The receiver may not run yet, and its mailbox fills up.
                    every_s = hello_s = min(max(every_s, 2 * hello_s), _HELLO_MAX_S)
                for other in list(self.present):
                    self._push(store, other, beat.frame)
                beat_at = time.monotonic() + every_s
                self.beaten.append(self._clock())

    def _beat_to_send(self) -> Beat | None:
        # No hello before the receiving connection is ready: as hellos become rarer, a late welcome
        # could make this rank appear lost.
        beat = self.beat
        is_mute = beat is not None and beat.is_hello and not self._connected["receive"]
        return None if is_mute else beat

    def _push_message(self, store: QueueStore, to: int, frame: Frame, message: object) -> None:
        try:
            payload = _encoder.encode(message)
        except Exception as error:  # a defect, limited to one message
            logger.exception("%s: a message cannot be encoded", self._keys[self._rank])
            self._post(Fault(f"a message cannot be encoded: {describe(error)}", frame.number))
            return
        for begin in range(0, max(1, len(payload)), PIECE_BYTES):
            piece = payload[begin : begin + PIECE_BYTES]
            is_last = begin + PIECE_BYTES >= len(payload)
            part = msgspec.structs.replace(frame, payload=piece, is_last=is_last)
            self._push(store, to, _encoder.encode(part))
        self.statistics.messages_sent += 1

    def _push(self, store: QueueStore, to: int, data: bytes) -> None:
        store.queue_push(self._keys[to], data)
        self.statistics.bytes_sent += len(data)

    def _post(self, arrived: Delivered | Fault) -> None:
        self.arrived.append(arrived)
        # During a save the loop reads heartbeats with other frames, or when it checks for silence.
        is_beat = isinstance(arrived, Delivered) and arrived.frame.kind is Kind.BEAT
        if self.wakes_on_beat or not is_beat:
            self._wake()


def _explain(error: Exception) -> str:
    kind = type(error).__name__
    if kind == "QueueEmptyError":
        return (
            "another process takes messages out of this rank's mailbox: two jobs use one store; "
            "give each of them a PrefixStore"
        )
    text = text_of(error).split("\n", 1)[0][:200]
    return f"the job's store stopped working: {STORE_ENDED} ({kind}: {text})"
