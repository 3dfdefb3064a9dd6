"""The uploader process: what runs in it.

It serves the trainer at the other end of the link, with an ``UploadedSave`` for each save. It has a
process group of its own, so that a terminal's Ctrl-C does not reach it, and its workers leave the
CPU to the trainer. When that is gone it finishes what is detached and staged, and aborts the rest.

It imports no torch, unless a detached save of several ranks needs the job's store.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any, TypeAlias

import anyio
import anyio.abc

from actorsnap.errors import printable
from actorsnap.protocol.failure import encode_value
from actorsnap.protocol.frames import (
    Alive,
    AttemptsEnded,
    CancelSave,
    ChangeEnvironment,
    ChangeLogLevel,
    ChangePace,
    EndSave,
    Finished,
    FromProcess,
    LeaveTeam,
    Logged,
    Ready,
    Remember,
    Save,
    StagingWaits,
    Structure,
    TeamRank,
    ToProcess,
)
from actorsnap.release import RELEASE
from actorsnap.runtime.arena import ArenaView
from actorsnap.runtime.host import Host, shutdown
from actorsnap.runtime.link import Link
from actorsnap.runtime.process import is_running
from actorsnap.runtime.ranks import RelayedTeam
from actorsnap.runtime.uploaded import UploadedSave
from actorsnap.storage.registry import find_opener
from actorsnap.transport.store import StorePort

__all__ = ["main"]

_TICK_S = 0.5
"""So often progress is told."""

_ALIVE_S = 5.0
"""So often at least something is said."""

Fields: TypeAlias = dict[str, str | int | float | None]

_USUAL = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime"])
"""What every line has; the rest are its fields."""

_GRACE_S = 20.0
"""Behind the trainer's end the process takes no longer."""


def main(connection: int, arena: int, log_level: int, trainer: int) -> None:
    """Serves the trainer until it closes its end; then the process ends.

    Args:
        connection: Descriptor of this process' end of the link.
        arena: Descriptor of the trainer's arena.
        log_level: From which on lines go to the trainer's log.
        trainer: Its process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # That a job's store is gone is no news at the job's end; else it is said by errors.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    faulthandler.enable()
    host = Host.get()
    # Not the loop, nor what is short: a trainer may be waiting for the answer.
    host.lower_bulk()
    find_opener(os.sep)  # or the first save would wait for the import
    service = _Service(host, connection, ArenaView(arena), trainer)

    def terminate(number: int, frame: FrameType | None) -> None:
        host.call_soon(service.terminate)

    signal.signal(signal.SIGTERM, terminate)
    # A trainer that waits for its signals in a thread blocks them, and this has inherited that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    logging.getLogger().addHandler(service.forwarder)
    service.forwarder.follow(log_level)
    host.submit(service.run()).future.result()
    shutdown()


class _Service:
    """Lives on the loop of the process' runtime. See ``Trainer``."""

    def __init__(self, host: Host, connection: int, arena: ArenaView, trainer: int) -> None:
        self._host = host
        self._arena = arena
        self._connection = connection
        self._link: Link[ToProcess, FromProcess]
        self._known: dict[bytes, tuple[Structure, list[bytes]]] = {}
        self._saves: dict[int, UploadedSave] = {}
        # By number: what is remembered from save to save.
        self._teams: dict[int, RelayedTeam] = {}
        self._ports: dict[str, StorePort[Any, Any]] = {}
        self._idle: anyio.Event | None = None
        self._is_terminated = False
        self.is_in_a_hurry = False
        self.forwarder = _Forwarder(self)
        self._parent = os.getppid()
        # It may have died before this could look who started it.
        self._is_orphan = self._parent != trainer and not is_running(trainer)

    async def run(self) -> None:
        """Serves until the link ends, then waits for what is left."""
        self._link = Link(socket.socket(fileno=self._connection), ToProcess)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._link.flush_forever)
            tasks.start_soon(self._tick)
            self._host.on_attempt_ended = lambda attempt: self.send(AttemptsEnded([attempt]))
            self._link.send(Ready(RELEASE))
            while (frame := await self._link.receive()) is not None:
                self._take(frame)
            await self._outlive_trainer(tasks)
            tasks.cancel_scope.cancel()
        if self._saves:
            os._exit(1)

    async def _outlive_trainer(self, tasks: anyio.abc.TaskGroup) -> None:
        self._idle = anyio.Event()
        for _, save in sorted(self._saves.items()):
            save.leave_trainer()
        left = [save for save in self._saves.values() if not save.is_detached]
        for save in left:
            save.cancel("the trainer has ended")
            save.end("the trainer has ended")
        for save in sorted(self._saves.values(), key=lambda save: save.call_number):
            if save.is_detached:
                tasks.start_soon(save.continue_alone, self._ports)
        if self._saves:
            # Detached saves have deadlines of their own.
            with anyio.move_on_after(_GRACE_S if len(left) == len(self._saves) else None):
                await self._idle.wait()

    def terminate(self) -> None:
        """What SIGTERM asks for: aborts what is under way, tells that, and leaves."""
        if not self._is_terminated:
            self._is_terminated = True
            self._cancel_all("the uploader process was asked to end (SIGTERM)")

    def log(self, level: int, logger: str, text: str, fields: Fields) -> None:
        """Passes a line on, from any thread."""
        if self._idle is not None:
            print(f"actorsnap uploader: {text}", file=sys.stderr)
            return
        self._host.call_soon(lambda: self._link.send(Logged(level, logger, text, fields)))

    def send(self, frame: FromProcess) -> None:
        """See ``Trainer``."""
        self._link.send(frame)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """See ``Trainer``."""
        return self._arena.view(offset, nbytes)

    def ended(self, frame: Finished) -> None:
        """See ``Trainer``."""
        del self._saves[frame.number]
        self.is_in_a_hurry = self.is_in_a_hurry and bool(self._saves)
        self._link.send(frame)
        if self._idle is not None and not self._saves:
            self._idle.set()

    def _take(self, frame: ToProcess) -> None:
        match frame:
            case Remember():
                self._known.pop(frame.forgotten, None)
                self._known[frame.digest] = (frame.structure, frame.values)
            case Save() if self._is_terminated:
                pass  # the next process gets it
            case Save():
                team = None if frame.team is None else self._find_team(frame.team)
                structure, values = self._known[frame.structure]
                self._saves[frame.number] = UploadedSave(
                    self._host, self, frame, structure, values, team
                )
            case ChangeEnvironment():
                for name, value in frame.variables:
                    if value is None:
                        os.environb.pop(name, None)
                    else:
                        os.environb[name] = value
            case ChangeLogLevel():
                self.forwarder.follow(frame.level)
            case ChangePace():
                self._host.set_duty(frame.duty)
            case CancelSave():
                if frame.number in self._saves:
                    self._saves[frame.number].cancel(frame.reason)
            case EndSave():
                if frame.number in self._saves:
                    self._saves[frame.number].end(frame.reason)
            case AttemptsEnded():
                self._host.note_ended(frame.attempts)
            case LeaveTeam():
                self._teams.pop(frame.team, None)
            case Alive():
                pass
            case _:
                # Of a save that has ended here, the trainer may not know that yet.
                if frame.number in self._saves:
                    if isinstance(frame, StagingWaits):
                        self._hurry()
                    self._saves[frame.number].deliver(frame)

    def _find_team(self, rank: TeamRank) -> RelayedTeam:
        if rank.team not in self._teams:
            self._teams[rank.team] = RelayedTeam(rank.rank, rank.world_size)
        return self._teams[rank.team]

    def _hurry(self) -> None:
        """The trainer is told at once what is free, until all saves end."""
        self.is_in_a_hurry = True
        for save in self._saves.values():
            save.tell_released()

    def _cancel_all(self, reason: str) -> None:
        for save in self._saves.values():
            save.cancel(reason)

    async def _tick(self) -> None:
        said_s = time.monotonic()
        said_frames = 0
        while True:
            await anyio.sleep(_TICK_S)
            now = time.monotonic()
            for save in self._saves.values():
                save.tell_progress()
            if self._link.statistics.sent_frames == said_frames and now - said_s >= _ALIVE_S:
                self._link.send(Alive())
            if self._link.statistics.sent_frames != said_frames:
                said_s, said_frames = now, self._link.statistics.sent_frames
            is_orphan = self._is_orphan or os.getppid() != self._parent
            if is_orphan or (self._is_terminated and not self._saves):
                # A forked child of the trainer may hold its end of the link open.
                await self._link.flush()
                self._link.shut()


class _Forwarder(logging.Handler):
    """Passes lines on to the trainer's log."""

    def __init__(self, service: _Service) -> None:
        super().__init__()
        self._service = service

    def follow(self, level: int) -> None:
        """Passes on what is of this level and above."""
        self.setLevel(level)
        logging.getLogger("actorsnap").setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: Fields = {
                name: value
                for name, value in vars(record).items()
                if name not in _USUAL and isinstance(value, str | int | float | None)
            }
            text = printable(self.format(record))
            self._service.log(record.levelno, record.name, text, encode_value(fields))
        except Exception:
            self.handleError(record)
