# SPDX-License-Identifier: Apache-2.0
"""The transport between processes: mailboxes in the job's c10d store.

Every rank has a mailbox, a queue in the store. A ``StorePort``, kept from save to save, is one
process' access to them. Its threads (``transport.mailbox``) only move frames; this module
interprets them, on the runtime's event loop.

Frames. A frame carries a message, or a piece of one, and the number of its save. It is kept until
that save begins here, and dropped after its end. Negative numbers are those of
``transport.invitations``.

Sessions exclude messages of earlier jobs. A rank first sends *hello* with a random token. Rank 0's
port answers *welcome* with that token and its session's token, which all other frames carry. Frames
of another session are dropped; frames before the welcome are kept until then.

Liveness. During a save rank 0 and each other rank exchange heartbeats with the numbers of their
saves, also a rank that has not begun one of them. A rank that was heard in a save, or has a session
when it begins, is lost after ``lost_after_s`` of silence. Only the deadline limits the wait for a
rank without a session. Silence is counted in small steps: a process that was stopped reads its mail
before it judges others. Rank 0 uses the times of its own heartbeats to detect that others may have
lost it.

This module must not know the meaning of messages, nor torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import msgspec

from actorsnap.errors import UsageError
from actorsnap.log import Log
from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.transport.ends import Began, Broken, PeerLost
from actorsnap.transport.invitations import Invitations
from actorsnap.transport.mailbox import (
    STORE_ENDED,
    Beat,
    Delivered,
    Fault,
    Frame,
    Kind,
    Mailbox,
    Pulse,
    QueueStore,
    StoreStatistics,
)

logger = Log(__name__)

_Received: TypeAlias = ToCoordinator | FromCoordinator | Began | PeerLost | Broken

_COORDINATOR = 0
_MAX_LOOK_S = 1.0
_GIVEN_UP = 2 / 3
"""Part of ``lost_after_s`` after which an absent process may have been given up: others may have
last heard it ``lost_after_s`` / 6 or slightly more before its absence.
"""
_MAX_UNPROVEN = 256

CONNECT_S = 60.0
"""Time without a connection after which the store is lost."""

_EXIT_S = 2.0

_TOKEN_BYTES = 8
_NO_PULSE = msgspec.msgpack.encode(Pulse(0.0))


class _End:
    """Queues items for one party of one save. On the loop only."""

    def __init__(self, port: StorePort, number: int, lost_after_s: float) -> None:
        self._port = port
        self._number = number
        self._lost_after_s = lost_after_s
        self._look_s = min(_MAX_LOOK_S, lost_after_s / 8)
        self._items: deque[_Received] = deque()
        self._came: anyio.Event | None = None
        self._heard: dict[int, float] = {}
        self._reported: set[int] = set()
        self._begun: set[int] = set()
        self._is_broken = False
        self._is_closed = False
        self._asked_s: float | None = None
        self._away_s = 0.0

    def put(self, item: _Received) -> None:
        if self._is_broken:
            return
        self._is_broken = isinstance(item, Broken)
        self._items.append(item)
        self._wake()

    def heard(self, rank: int, now: float) -> None:
        if rank not in self._reported:
            self._heard[rank] = now

    def lose(self, rank: int, silent_s: float, how: str = "") -> None:
        self._heard.pop(rank, None)
        if rank not in self._reported:
            self._reported.add(rank)
            self.put(PeerLost(rank=rank, silent_s=silent_s, how=how))

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._came is not None:
            self._came.set()

    def _check(self) -> None:
        if self._is_closed:
            raise anyio.ClosedResourceError

    async def receive(self) -> Any:
        await anyio.lowlevel.checkpoint_if_cancelled()
        while not self._items:
            self._check()
            self._came = anyio.Event()
            with anyio.move_on_after(self._look_s):
                await self._came.wait()
            self._came = None
            if not self._items:
                self._look()
        return self._items.popleft()

    def _look(self) -> None:
        now = self._port._look(2 * self._look_s)
        if self._asked_s is None:
            self._asked_s = now
        connect_s = self._port._connect_s
        if not self._port.is_connected and now - self._asked_s > connect_s:
            reason = f"the job's store has not answered for {connect_s:g} s: {STORE_ENDED}"
            self.put(Broken(reason=reason))
        silent = [
            (rank, now - heard)
            for rank, heard in self._heard.items()
            if now - heard > self._lost_after_s
        ]
        for rank, silent_s in silent:
            if self._port.rank == _COORDINATOR:
                # No heartbeats to a lost rank until it is heard again.
                self._port._mailbox.present.pop(rank, None)
            self.lose(rank, silent_s)


class StoreParticipant(_End):
    """A rank's end of one save; see ``transport.ends.ParticipantEnd``."""

    colleague: StoreCoordinator | None = None
    is_orphan = False
    is_coordinated = False

    def has_coordinator(self) -> bool:
        self._port._dispatch()
        return self.is_coordinated or self.colleague is not None

    async def send(self, message: ToCoordinator) -> None:
        self._check()
        if self.is_orphan:
            return
        if self.colleague is not None:
            self.colleague.put(message)
        else:
            self._port.send_up(self._number, message)


class StoreCoordinator(_End):
    """The coordinator's end of one save; see ``transport.ends.CoordinatorEnd``."""

    colleague: StoreParticipant

    def began(self, rank: int, tag: bytes) -> None:
        if tag and rank not in self._begun:
            self._begun.add(rank)
            self.put(Began(rank=rank, tag=tag))

    async def suspicion(self) -> str | None:
        self._port._look(2 * self._look_s)
        if self._away_s <= _GIVEN_UP * self._lost_after_s:
            return None
        return (
            f"rank 0, which coordinates, was stopped for {self._away_s:.0f} s, or the job's store "
            "did not answer: the others may have given up on it"
        )

    async def send(self, rank: int, message: FromCoordinator) -> None:
        self._check()
        if rank == self._port.rank:
            self.colleague.put(message)
        else:
            self._port.send_down(rank, self._number, message)


class StoreSave:
    """This process' part in one save; ``coordinator`` on rank 0 only.

    Attributes:
        number: Equal on all ranks, if all begin their saves in the same order.
        tag: See ``Began``.
        topic: Ranks that have left it (``Invitations.leave``) do not begin this save.
    """

    def __init__(
        self, port: StorePort, number: int, lost_after_s: float, tag: bytes, topic: bytes
    ) -> None:
        self._port = port
        self.number = number
        self.tag = tag
        self.topic = topic
        self.lost_after_s = lost_after_s
        self.participant = StoreParticipant(port, number, lost_after_s)
        self.coordinator: StoreCoordinator | None = None
        self.ends: list[_End] = [self.participant]
        if port.rank == _COORDINATOR:
            self.coordinator = StoreCoordinator(port, number, lost_after_s)
            self.ends.append(self.coordinator)
            # Messages within rank 0 bypass the store.
            self.coordinator.colleague = self.participant
            self.participant.colleague = self.coordinator

    @property
    def scope(self) -> str:
        """Prefix for keys in the store: unique to this save, equal on all ranks."""
        port = self._port
        return f"actorsnap/{port.namespace}/{(port.session or b'').hex()}/{self.number}"

    def miss(self, rank: int, how: str) -> None:
        """The rank does not begin this save, unless it has. On the loop."""
        if self.coordinator is None:
            if not self.participant.is_coordinated:
                self.participant.lose(rank, 0.0, how)
        elif rank not in self.coordinator._begun:
            self.coordinator.lose(rank, 0.0, how)

    def close(self) -> None:
        """Thread-safe and idempotent."""
        self._port._run_on_loop(lambda: self._port._end(self))

    def __enter__(self) -> StoreSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StorePort:
    """One process' access to the mailboxes of a group.

    Args:
        store: Cloned by the daemon threads, then released.
        namespace: Identifies the job and the group; unique within the store.
        call_soon: Runs a callback on the event loop of the ends; thread-safe.
        clock: Measures silence only; in seconds.
        session: Session of another process' port to continue, if any.

    Attributes:
        session: None until rank 0 has answered. On the loop only.
    """

    def __init__(
        self,
        store: QueueStore,
        *,
        namespace: str,
        rank: int,
        world_size: int,
        call_soon: Callable[[Callable[[], None]], None],
        beat_s: float = 5.0,
        connect_s: float = CONNECT_S,
        clock: Callable[[], float] = time.monotonic,
        first_number: int = 0,
        session: bytes | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.namespace = namespace
        self._label = f"{namespace}/{rank}"
        self._call_soon = call_soon
        self._beat_s = beat_s
        self._connect_s = connect_s
        self._clock = clock
        self._pid = os.getpid()
        self._is_closing = False
        self._fault: str | None = None

        self._token = secrets.token_bytes(_TOKEN_BYTES)
        # The other ranks get the session with the welcome.
        if session is None and rank == _COORDINATOR:
            session = self._token
        self.session = session
        self._before_welcome: list[tuple[int, ToCoordinator]] = []
        self._unproven: deque[Delivered] = deque()
        self._left: set[int] = set()

        self._numbering = threading.Lock()
        self.next_number = first_number
        self._open: dict[int, StoreSave] = {}
        self._kept: dict[int, list[Delivered]] = {}
        # On the loop, which may register a save later than it is begun.
        self._registered_below = first_number

        # By sender: saves that this process has not begun.
        self._awaited: dict[int, Pulse] = {}

        self._active_s = 0.0
        self._looked_s = self._beaten_s = self._clock()

        self.invitations = Invitations(self)
        self._is_dispatch_due = False
        self._mailbox = Mailbox(
            store,
            keys=[f"actorsnap/{namespace}/{other}" for other in range(world_size)],
            rank=rank,
            token=self._token,
            wake=self._wake,
            clock=self._clock,
        )
        self._mailbox.start()
        _ports.add(self)

    @property
    def left(self) -> Collection[int]:
        """Ranks that have closed their ports. On the loop only."""
        return self._left

    @property
    def is_connected(self) -> bool:
        return self._mailbox.is_connected

    @property
    def is_broken(self) -> bool:
        return self._fault is not None or self._is_closing

    def begin(
        self,
        *,
        lost_after_s: float = 30.0,
        number: int | None = None,
        tag: bytes = b"",
        topic: bytes = b"",
    ) -> StoreSave:
        """Begins a save. From any thread, in the same order on all ranks.

        Args:
            number: Larger than all before. None: the next one.
            tag: See ``Began``; empty: none.
            topic: See ``StoreSave``; empty: none.

        Raises:
            UsageError: The process was forked from the port's.
        """
        if self._pid != os.getpid():
            raise UsageError(
                f"the connection to the job's store belongs to process {self._pid}, which this "
                "process was forked from. Save in the process that initialised the process group"
            )
        with self._numbering:
            if number is None:
                number = self.next_number
            assert number >= self.next_number
            self.next_number = number + 1
            save = StoreSave(self, number, lost_after_s, tag, topic)
            self._run_on_loop(lambda: self._register(save))
            return save

    def begin_after(self, save: StoreSave) -> StoreSave | None:
        """Begins the next save, with the tag and topic of ``save``, unless it has begun.

        On the loop.
        """
        with self._numbering:
            number = self.next_number
            if number != save.number + 1:
                return None
            self.next_number = number + 1
        following = StoreSave(self, number, save.lost_after_s, save.tag, save.topic)
        # Its messages must not overtake its heartbeat.
        self._register(following)
        return following

    @property
    def statistics(self) -> StoreStatistics:
        return self._mailbox.statistics

    def close(self, timeout_s: float = 8.0, *, is_continued: bool = False) -> None:
        """Sends queued messages and *bye*, empties the mailbox, and ends the threads.

        Open saves get ``Broken``. Blocks for at most ``timeout_s``: not for the loop. Idempotent;
        does nothing in a forked child.

        Args:
            is_continued: Another process continues this port: no *bye*, and the mailbox is not
                emptied.
        """
        if self._pid != os.getpid():
            return
        if not self._is_closing:
            self._is_closing = True
            self._mailbox.arrived.append(
                Fault("this process has closed its access to the job's store")
            )
            self._wake()
            if self.session is not None and not is_continued:
                others = [_COORDINATOR]
                if self.rank == _COORDINATOR:
                    others = list(self._mailbox.present)
                for other in others:
                    self._put(other, Kind.BYE, self.session)
            self._mailbox.stop(is_continued=is_continued)
        self._mailbox.join(timeout_s)

    def _wake(self) -> None:
        if not self._is_dispatch_due:
            self._is_dispatch_due = True
            self._run_on_loop(self._dispatch)

    def _run_on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._call_soon(callback)
        except Exception:  # the loop is closed
            logger.debug("%s: there is no loop", self._label, exc_info=True)

    # On the loop only from here on.

    def _dispatch(self) -> None:
        self._is_dispatch_due = False
        while self._mailbox.arrived:
            arrived = self._mailbox.arrived.popleft()
            if isinstance(arrived, Fault):
                self._on_fault(arrived)
            elif self.rank == _COORDINATOR:
                self._on_frame_up(arrived)
            else:
                self._on_frame_down(arrived)

    def _look(self, max_step_s: float) -> float:
        """Returns the seconds during which this process could receive."""
        self._dispatch()
        now = self._clock()
        step = max(0.0, now - self._looked_s)
        self._active_s += min(step, max_step_s)
        self._looked_s = now
        self._note_absence(now)
        return self._active_s

    def _note_absence(self, now: float) -> None:
        """Records how long the others had to wait for a heartbeat."""
        away_s = 0.0
        while self._mailbox.beaten:
            beaten_s = self._mailbox.beaten.popleft()
            away_s, self._beaten_s = max(away_s, beaten_s - self._beaten_s), beaten_s
        if not self.is_connected:
            self._beaten_s = now  # no other rank has heard this process yet
        away_s = max(away_s, now - self._beaten_s)
        for save in self._open.values():
            for end in save.ends:
                end._away_s = max(end._away_s, away_s)

    def _on_fault(self, fault: Fault) -> None:
        if fault.number is not None:
            save = self._open.get(fault.number)
            self._break([] if save is None else [save], fault.reason)
        elif self._fault is None:
            self._fault = fault.reason
            self._break(list(self._open.values()), fault.reason)
            self.invitations.break_off(fault.reason)

    def _break(self, saves: list[StoreSave], reason: str) -> None:
        for save in saves:
            for end in save.ends:
                end.put(Broken(reason=reason))

    def _on_frame_up(self, arrived: Delivered) -> None:
        frame = arrived.frame
        sender = frame.sender
        if not 0 < sender < self.world_size:
            self._drop(frame, f"rank {sender} is not of this group")
            return
        if frame.kind is Kind.HELLO:
            self._left.discard(sender)
            self._mailbox.present[sender] = None
            self._awaited.pop(sender, None)
            assert self.session is not None
            self._put(sender, Kind.WELCOME, self.session, frame.token)
            for number in self._open:
                self._heard(number, sender)
            return
        if frame.token != self.session:
            if frame.kind in (Kind.UP, Kind.BEAT):
                self._put(sender, Kind.BYE, frame.token)
            self._drop(frame, "another session")
            return
        if frame.kind is Kind.BYE:
            self._mailbox.present.pop(sender, None)
            self._awaited.pop(sender, None)
            self._left.add(sender)
            self.invitations.lose(sender)
            for save in self._open.values():
                end = save.coordinator
                # It may leave an earlier save, which has just ended here.
                if end is not None:
                    end.lose(sender, 0.0)
            return
        self._left.discard(sender)
        self._mailbox.present[sender] = None
        self._on_proven(arrived)

    def _on_frame_down(self, arrived: Delivered) -> None:
        frame = arrived.frame
        if frame.kind is Kind.WELCOME:
            if frame.payload == self._token:
                self._on_welcome(frame.token)
            else:
                self._drop(frame, "for another process with this rank: two jobs use one store")
        elif frame.kind in (Kind.HELLO, Kind.UP, Kind.STOP):
            self._drop(frame, "it is not for a rank other than 0")
        elif self.session is None:
            if frame.number < 0:
                self._say_hello()
            self._unproven.append(arrived)
            if len(self._unproven) > _MAX_UNPROVEN:
                self._drop(self._unproven.popleft().frame, "too many before the welcome")
        elif frame.token != self.session:
            self._drop(frame, "another session")
        elif frame.kind is Kind.BYE:
            self._on_coordinator_left()
        else:
            self._on_proven(arrived)

    def _on_welcome(self, session: bytes) -> None:
        if session == self.session:
            return
        if self.session is not None:
            self._on_coordinator_left()
        self.session = session
        self._set_beat()  # announces the saves to rank 0
        for number, message in self._before_welcome:
            self.send_up(number, message)
        self._before_welcome.clear()
        for number in self._open:
            self._heard(number, _COORDINATOR)
        waiting, self._unproven = self._unproven, deque()
        for arrived in waiting:
            self._on_frame_down(arrived)
        self._set_beat()

    def on_gone(self, topic: bytes, rank: int, how: str) -> None:
        for save in self._open.values():
            if save.topic == topic:
                save.miss(rank, how)

    def _on_coordinator_left(self) -> None:
        self.session = None
        self._awaited.clear()
        self.invitations.lose(_COORDINATOR)
        for save in self._open.values():
            # A later session reuses these numbers.
            save.participant.is_orphan = True
            save.participant.lose(_COORDINATOR, 0.0)
        self._set_beat()

    def _on_proven(self, arrived: Delivered) -> None:
        frame = arrived.frame
        if frame.kind is Kind.BEAT:
            self._on_pulse(frame.sender, arrived.content)
            return
        number = frame.number
        if number < 0:
            self.invitations.on_message(number, arrived.content)
            return
        save = self._open.get(number)
        if save is not None:
            self._heard(number, frame.sender)
            self._deliver(save, arrived)
        elif number < self._registered_below:
            self._drop(frame, "its save has ended")
        else:
            self.invitations.on_early(number, arrived.content)
            self._kept.setdefault(number, []).append(arrived)

    def _on_pulse(self, sender: int, pulse: Pulse) -> None:
        for number in (*pulse.open, *pulse.awaited):
            self._heard(number, sender)
        for number, tag in pulse.open.items():
            save = self._open.get(number)
            if save is not None and save.coordinator is not None:
                save.coordinator.began(sender, tag)
            elif save is not None:
                # Other ranks receive from rank 0 only.
                save.participant.is_coordinated = True
        below = self._registered_below
        awaited = {number: tag for number, tag in pulse.open.items() if number >= below}
        before = self._awaited.pop(sender, None)
        if awaited:
            self._awaited[sender] = Pulse(pulse.every_s, awaited)
        if self._awaited.get(sender) != before:
            self._set_beat()

    def _deliver(self, save: StoreSave, arrived: Delivered) -> None:
        if arrived.frame.kind is Kind.DOWN:
            save.participant.is_coordinated = True
            save.participant.put(arrived.content)
        elif save.coordinator is not None:
            save.coordinator.put(arrived.content)

    def _heard(self, number: int, sender: int) -> None:
        save = self._open.get(number)
        if save is not None:
            listener = save.participant if save.coordinator is None else save.coordinator
            listener.heard(sender, self._active_s)

    def _drop(self, frame: Frame, why: str) -> None:
        self.statistics.num_dropped += 1
        logger.debug(
            "%s: dropped a frame (%s of rank %d, save %d): %s",
            *(self._label, frame.kind.name, frame.sender, frame.number, why),
        )

    def _register(self, save: StoreSave) -> None:
        number = save.number
        for gap in range(self._registered_below, number):
            self.statistics.num_dropped += len(self._kept.pop(gap, ()))
        self._registered_below = number + 1
        now = self._clock()
        self._note_absence(now)
        if not self._open:
            self._looked_s = self._beaten_s = now  # no look while idle
        self._open[number] = save
        awaited = self._awaited.get(_COORDINATOR)
        save.participant.is_coordinated = awaited is not None and number in awaited.open
        self._mailbox.wakes_on_beat = False
        if self._fault is not None:
            self._break([save], self._fault)
            return
        if save.coordinator is not None:
            save.coordinator.began(_COORDINATOR, save.tag)
            for rank, pulse in self._awaited.items():
                save.coordinator.began(rank, pulse.open.get(number, b""))
        for arrived in self._kept.pop(number, ()):
            self._heard(number, arrived.frame.sender)
            self._deliver(save, arrived)
        for rank, how in self.invitations.gone(save.topic).items():
            save.miss(rank, how)
        if save.coordinator is not None:
            for rank in self._mailbox.present:
                self._heard(number, rank)
            for rank in sorted(self._left):
                save.coordinator.lose(rank, 0.0)
        elif self.session is not None:
            self._heard(number, _COORDINATOR)
        self._set_beat()

    def _end(self, save: StoreSave) -> None:
        for end in save.ends:
            end.close()
        if self._open.pop(save.number, None) is not None:
            self._mailbox.wakes_on_beat = not self._open
            self._set_beat()

    def _set_beat(self) -> None:
        awaited = {
            number
            for pulse in self._awaited.values()
            for number in pulse.open
            if number >= self._registered_below
        }
        if self.rank != _COORDINATOR:
            self._mailbox.present = {_COORDINATOR: None}
        had_beat = self._mailbox.beat is not None
        if not self._open and not awaited:
            self._mailbox.beat = None
            if had_beat and self.session is not None:
                # Otherwise a rank that waits for a save of this process sends heartbeats for ever.
                frame = Frame(Kind.BEAT, self.rank, self.session, payload=_NO_PULSE)
                for other in self._mailbox.present:
                    self._mailbox.put(other, frame)
            return
        every_s = min(
            self._beat_s,
            *[save.lost_after_s / 6 for save in self._open.values()],
            *[pulse.every_s for pulse in self._awaited.values()],
        )
        is_hello = self.session is None
        if is_hello:
            frame = Frame(Kind.HELLO, self.rank, self._token)
        else:
            assert self.session is not None
            tags = {number: save.tag for number, save in self._open.items()}
            pulse = Pulse(every_s, tags, tuple(sorted(awaited)))
            payload = msgspec.msgpack.encode(pulse)
            frame = Frame(Kind.BEAT, self.rank, self.session, payload=payload)
        self._mailbox.beat = Beat(msgspec.msgpack.encode(frame), every_s, is_hello)
        self._mailbox.wake_up()

    def _put(self, to: int, kind: Kind, token: bytes, payload: bytes = b"") -> None:
        self._mailbox.put(to, Frame(kind, self.rank, token, payload=payload))

    def _say_hello(self) -> None:
        """Asks for the session if no save is running; a save's heartbeats would ask."""
        self._put(_COORDINATOR, Kind.HELLO, self._token)

    def send_up(self, number: int, message: ToCoordinator) -> None:
        """Sends to the coordinator, also outside of a save."""
        if self.session is None:
            self._before_welcome.append((number, message))
            if number < 0:
                self._say_hello()
        else:
            frame = Frame(Kind.UP, self.rank, self.session, number)
            self._mailbox.put(_COORDINATOR, frame, message)

    def send_down(self, to: int, number: int, message: FromCoordinator) -> None:
        """Sends to a rank, also in a save that ended here."""
        assert self.session is not None
        self._mailbox.put(to, Frame(Kind.DOWN, self.rank, self.session, number), message)


_ports: weakref.WeakSet[StorePort] = weakref.WeakSet()


def _close_all() -> None:
    """Closes all ports at exit.

    A daemon thread that returns from the store while the interpreter ends would abort the process.
    ``runtime.host`` imports this module first, so it awaits pending saves before.
    """
    for port in list(_ports):
        with contextlib.suppress(Exception):
            port.close(_EXIT_S)


atexit.register(_close_all)
