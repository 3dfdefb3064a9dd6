# SPDX-License-Identifier: Apache-2.0
"""The main program of the uploader process.

Serves the trainer over the link, with a ``ServedSave`` per save and a ``ServedCopy`` per copy. Its
process group gets no Ctrl-C; its workers have a lower priority. After the trainer's end it finishes
detached, staged saves and aborts the rest. Until then it ignores SIGTERM: a system that preempts a
job may send it to all processes, and the trainer decides whether to save or to end. Imports torch
only for detached saves of several ranks.
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
from typing import TypeAlias

import anyio
import anyio.abc

from actorsnap.protocol import uploader as frames
from actorsnap.protocol.failure import encode_value
from actorsnap.runtime.arena import ArenaView
from actorsnap.runtime.host import Host, shutdown
from actorsnap.runtime.link import Link
from actorsnap.runtime.offloaded_copy import ServedCopy
from actorsnap.runtime.process import is_running
from actorsnap.runtime.served_save import ServedSave
from actorsnap.runtime.team import TeamMemory
from actorsnap.storage.registry import find_opener
from actorsnap.transport.store import StorePort
from actorsnap.wording import printable

_TICK_S = 0.5
"""Interval of progress reports."""

_ALIVE_S = 5.0
"""Longest time between frames to the trainer."""

Fields: TypeAlias = dict[str, str | int | float | None]

_USUAL = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime"])
"""Other attributes of log records are fields."""

_GRACE_S = 20.0
"""Limit after the trainer's end without detached saves."""


def main(connection: int, arena: int, log_level: int, trainer: int) -> None:
    """Serves the trainer until it closes its end of the link.

    Args:
        connection: Descriptor of this end.
        arena: Descriptor of the trainer's arena.
        log_level: Level of lines for the trainer's log.
        trainer: Process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A missing store is normal at the end of a job; otherwise errors report it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    faulthandler.enable()
    host = Host.get()
    # The trainer may wait for the loop or for a short job.
    host.lower_bulk()
    find_opener(os.sep)  # or the first save waits
    service = UploaderService(host, connection, ArenaView(arena), trainer)

    def terminate(number: int, frame: FrameType | None) -> None:
        host.call_soon(service.terminate)

    signal.signal(signal.SIGTERM, terminate)
    # Inherited from a trainer that waits for its signals in a thread.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    logging.getLogger().addHandler(service.forwarder)
    service.forwarder.follow(log_level)
    host.submit(service.run()).future.result()
    shutdown()


class UploaderService:
    """The trainer's saves, and the link to it. On the loop of the uploader process.

    Attributes:
        reports_at_once: The trainer waits for memory: released chunks are reported at once.
    """

    def __init__(self, host: Host, connection: int, arena: ArenaView, trainer: int) -> None:
        self._host = host
        self._arena = arena
        self._connection = connection
        self._link: Link[frames.ToProcess, frames.FromProcess]
        self._known: dict[bytes, tuple[frames.Structure, list[bytes]]] = {}
        self._saves: dict[int, ServedSave | ServedCopy] = {}
        # By number, for later saves.
        self._teams: dict[int, TeamMemory] = {}
        self._ports: dict[str, StorePort] = {}
        self._idle: anyio.Event | None = None
        self.reports_at_once = False
        self.forwarder = _Forwarder(self)
        self._parent = os.getppid()
        # The trainer may have died before.
        self._is_orphan = self._parent != trainer and not is_running(trainer)

    async def run(self) -> None:
        """Serves until the link ends; waits for remaining saves."""
        self._link = Link(socket.socket(fileno=self._connection), frames.ToProcess)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._link.flush_forever)
            tasks.start_soon(self._tick)
            self._host.resources.attempts.on_end = lambda attempt: self.send(
                frames.AttemptsEnded([attempt])
            )
            self._link.send(frames.Alive())
            while (frame := await self._link.receive()) is not None:
                self._handle(frame)
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
            save.break_off("the trainer has ended")
        for save in sorted(self._saves.values(), key=lambda save: save.call_number):
            if isinstance(save, ServedSave) and save.is_detached:
                tasks.start_soon(save.continue_alone, self._ports)
        if self._saves:
            # Detached saves have their own deadlines.
            with anyio.move_on_after(_GRACE_S if len(left) == len(self._saves) else None):
                await self._idle.wait()

    def terminate(self) -> None:
        """Handles SIGTERM: after the trainer's end, aborts what remains."""
        if self._idle is not None:
            for save in self._saves.values():
                save.cancel("the uploader process was asked to end (SIGTERM)")

    def log(self, level: int, logger: str, text: str, fields: Fields) -> None:
        """Sends a log line to the trainer. On any thread."""
        if self._idle is not None:
            print(f"actorsnap uploader: {text}", file=sys.stderr)
            return
        self._host.call_soon(lambda: self._link.send(frames.Logged(level, logger, text, fields)))

    def send(self, frame: frames.FromProcess) -> None:
        self._link.send(frame)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._arena.view(offset, nbytes)

    def finish(self, frame: frames.Finished | frames.CopyEnded) -> None:
        del self._saves[frame.number]
        self.reports_at_once = self.reports_at_once and bool(self._saves)
        self._link.send(frame)
        if self._idle is not None and not self._saves:
            self._idle.set()

    def _handle(self, frame: frames.ToProcess) -> None:
        match frame:
            case frames.BeginSave():
                self._begin(frame)
            case frames.BeginCopy():
                self._saves[frame.number] = ServedCopy(self._host, self, frame)
            case frames.Configure():
                self._configure(frame)
            case frames.AttemptsEnded():
                self._host.resources.attempts.note_ended(frame.attempts)
            case frames.LeaveTeam():
                self._teams.pop(frame.team, None)
            case frames.Alive():
                pass
            case _:
                # The trainer may not know yet that the save has ended.
                if frame.number in self._saves:
                    if isinstance(frame, frames.Staged) and frame.is_waiting:
                        self._report_at_once()
                    self._saves[frame.number].deliver(frame)

    def _begin(self, frame: frames.BeginSave) -> None:
        if frame.structure is not None:
            self._known.pop(frame.forgotten, None)
            self._known[frame.digest] = frame.structure, [value for _, value in frame.values]
        team = None
        if frame.team is not None:
            team = self._teams.get(frame.team) or TeamMemory(frame.rank, frame.world_size)
            self._teams[frame.team] = team
        structure, values = self._known[frame.digest]
        self._saves[frame.number] = ServedSave(self._host, self, frame, structure, values, team)

    def _configure(self, frame: frames.Configure) -> None:
        for name, value in frame.variables:
            if value is None:
                os.environb.pop(name, None)
            else:
                os.environb[name] = value
        if frame.log_level is not None:
            self.forwarder.follow(frame.log_level)
        if frame.duty is not None:
            self._host.resources.set_duty(frame.duty)

    def _report_at_once(self) -> None:
        """Reports released chunks at once until all saves end."""
        self.reports_at_once = True
        for save in self._saves.values():
            save.report_progress()

    async def _tick(self) -> None:
        sent_s = time.monotonic()
        sent_frames = 0
        while True:
            await anyio.sleep(_TICK_S)
            now = time.monotonic()
            for save in self._saves.values():
                save.report_progress()
            if self._link.sent_frames == sent_frames and now - sent_s >= _ALIVE_S:
                self._link.send(frames.Alive())
            if self._link.sent_frames != sent_frames:
                sent_s, sent_frames = now, self._link.sent_frames
            if self._is_orphan or os.getppid() != self._parent:
                # A forked child may hold the trainer's end open.
                await self._link.flush()
                self._link.shut()


class _Forwarder(logging.Handler):
    """Forwards log lines to the trainer."""

    def __init__(self, service: UploaderService) -> None:
        super().__init__()
        self._service = service

    def follow(self, level: int) -> None:
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
