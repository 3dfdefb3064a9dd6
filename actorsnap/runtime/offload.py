"""The trainer's end of its uploader process: starts it, watches it, hands saves to it.

``protocol.supervisor`` decides; this performs. There is one process per runtime. It is
executed anew, not forked, and does not import the user's ``__main__``; torch only for saves of
several ranks. It ends when this end of the link closes, whatever closed it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import anyio

from actorsnap.actors.errands import first_error
from actorsnap.lines import Lines
from actorsnap.planning.packing import ObjectPlan, PackingRules, RankPlan, pack
from actorsnap.protocol.failure import Failure
from actorsnap.protocol.frames import (
    AbsenceAsked,
    Alive,
    AttemptsEnded,
    Begun,
    CancelSave,
    ChangeEnvironment,
    ChangeLogLevel,
    ChangePace,
    ChunksReleased,
    EndSave,
    Finished,
    FromProcess,
    Logged,
    MessageSent,
    Progressed,
    Ready,
    Recorded,
    Remember,
    Save,
    StagingWanted,
    TakeOverPrepared,
    ToProcess,
    TurnAsked,
)
from actorsnap.protocol.supervisor import (
    AbortSave,
    AskedToCancel,
    AskedToEnd,
    AskedToSave,
    AskedToStart,
    AttemptBegun,
    KillProcess,
    MemoryGone,
    ProcessEnded,
    ProcessReady,
    ProcessSilent,
    SaveEnded,
    SaveHere,
    SendCancel,
    SendEnd,
    SendSave,
    StartProcess,
    Supervisor,
    SupervisorEvent,
    SupervisorState,
)
from actorsnap.runtime.host import Host
from actorsnap.runtime.link import Link
from actorsnap.runtime.structure import Described
from actorsnap.state.captured import Captured

__all__ = ["HandedSave", "Uploader", "find_uploader"]

logger = Lines(__name__)

_BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; "
    "from actorsnap.runtime.uploading import main; main(*map(int, sys.argv[1:5]))"
)

_LOOK_S = 1.0
_SILENT_S = 30.0
"""A process says something every few seconds."""

_START_S = 120.0
"""Its modules may come from a slow network."""

_LEAVE_S = 10.0
"""At the end it is waited for so long, and then killed: it may collect garbage only."""

_STDERR = 2
_FIRST_DESCRIPTOR = 3
"""Behind the standard streams."""

_MAX_KNOWN = 4
"""So many structures are remembered."""


_PackKey: TypeAlias = tuple[bytes, int, PackingRules, RankPlan]


class HandedSave(Protocol):
    """A save that was handed to the process. Called on the runtime's loop.

    Attributes:
        described: What it is of.
        rank: Of this process, in the save.
    """

    described: Described
    rank: int

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part."""
        ...

    @property
    def is_detached(self) -> bool:
        """Whether the process is to go on with it when this one ends."""
        ...

    def frame(self, values: list[tuple[int, bytes]], after: str) -> Save:
        """What begins it; all that is staged is announced anew when that is asked for."""
        ...

    def on_sent(self) -> None: ...

    def on_begun(self) -> None: ...

    def on_message(self, frame: MessageSent) -> None: ...

    def on_absence_asked(self) -> None: ...

    def on_turn_asked(self) -> None: ...

    def on_take_over_prepared(self, error: str) -> None: ...

    def close_mailbox(self) -> None:
        """Leaves the rank's mailbox to the process. Blocks for a moment."""

    def on_staging_wanted(self, frame: StagingWanted) -> None: ...

    def on_released(self, chunks: Sequence[int]) -> None: ...

    def on_progress(self, hashed: int, stored: int) -> None: ...

    def on_recorded(self, frame: Recorded) -> None: ...

    def on_finished(self, frame: Finished) -> None: ...

    def on_aborted(self, failure: Failure) -> None: ...

    def let_go(self) -> None:
        """Gives memory back that is kept in case the process dies."""
        ...

    def make_here(self) -> None:
        """There is no process."""
        ...


class Uploader:
    """The process, or the one after it. Used on the runtime's loop only.

    Attributes:
        incarnation: Counts the processes.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._machine = Supervisor()
        self._arena = host.arena.share()
        host.on_attempt_ended = lambda attempt: self.send(AttemptsEnded([attempt]))
        self._numbers = itertools.count()
        self._saves: dict[int, HandedSave] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.incarnation = 0
        self._link: Link[FromProcess, ToProcess] | None = None
        self._heard_s = 0.0
        # What the process knows, the latest last.
        self._known: dict[bytes, list[bytes]] = {}
        self._environment: dict[bytes, bytes] = {}
        self._log_level = logging.NOTSET
        # Of the last save: the next one is mostly the same.
        self._packed: tuple[_PackKey, tuple[ObjectPlan, ...]] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether there is a process that listens."""
        return self._machine.state is SupervisorState.READY

    @property
    def is_usable(self) -> bool:
        """Whether a process can be had, as far as is known."""
        return self._machine.state is not SupervisorState.UNUSABLE

    def new_number(self) -> int:
        """What a save is named by in all calls and frames."""
        return next(self._numbers)

    def add(self, number: int, save: HandedSave) -> None:
        """Takes a save over."""
        self._saves[number] = save
        self._handle(AskedToSave(number, save.rank, save.is_shared))

    def start(self) -> None:
        """Starts the process, if there is none; returns at once."""
        self._handle(AskedToStart())

    def cancel(self, number: int, reason: str) -> None:
        """Asks for an abort; the commit may win nevertheless."""
        self._handle(AskedToCancel(number, reason))

    def end(self, number: int, failure: Failure) -> None:
        """Ends a save because its team has."""
        self._handle(AskedToEnd(number, failure))

    def forget_memory(self, number: int) -> None:
        """Notes that what was staged of a save is overwritten from now on."""
        self._handle(MemoryGone(number))

    def pack(
        self, described: Described, captured: Captured, rank: int, wanted: StagingWanted
    ) -> tuple[ObjectPlan, ...]:
        """What is to be staged, without knowing where it goes. Blocks; for worker threads."""
        key = (described.digest, rank, wanted.rules, wanted.plan)
        packed = self._packed
        if packed is None or packed[0] != key:
            objects = pack(
                described.structure.items,
                attempt="",
                rank=rank,
                rules=wanted.rules,
                scopes=list(captured.scopes.values()),
                plan=wanted.plan,
            )
            packed = self._packed = key, objects
        return packed[1]

    def set_duty(self, duty: float) -> None:
        """Changes the pace of the process' uploaders."""
        self.send(ChangePace(duty))

    def make_room(self) -> None:
        """A save waits for memory: none is kept for another process any more."""
        for save in self._saves.values():
            save.let_go()

    def send(self, frame: ToProcess) -> None:
        """Sends a frame; it goes nowhere if there is no process."""
        if self._link is not None:
            self._link.send(frame)

    def _handle(self, event: SupervisorEvent) -> None:
        for command in self._machine.handle(event):
            match command:
                case StartProcess():
                    self._host.serve(self._live())
                case KillProcess():
                    assert self._process is not None
                    self._process.kill()
                case SendSave():
                    self._send_save(command.number, command.after)
                case SendCancel():
                    self.send(CancelSave(command.number, command.reason))
                case SendEnd():
                    self.send(EndSave(command.number, command.failure.reason))
                case AbortSave():
                    self._saves.pop(command.number).on_aborted(command.failure)
                case SaveHere():
                    self._saves.pop(command.number).make_here()

    def _send_environment(self) -> None:
        """Sends the variables that are not as the process knows them."""
        before, now = self._environment, dict(os.environb)
        changed = [
            (name, now.get(name)) for name in before | now if before.get(name) != now.get(name)
        ]
        if changed:
            self._environment = now
            self.send(ChangeEnvironment(changed))

    def _send_log_level(self) -> None:
        """Sends from which level on lines are wanted, if that is not as the process knows it."""
        if self._log_level != (now := _log_level()):
            self._log_level = now
            self.send(ChangeLogLevel(now))

    def _send_save(self, number: int, after: str) -> None:
        self._send_environment()
        self._send_log_level()
        save = self._saves[number]
        digest, values = save.described.digest, save.described.values
        before = self._known.pop(digest, None)
        if before is None:
            forgotten = b""
            if len(self._known) == _MAX_KNOWN:
                forgotten = next(iter(self._known))
                del self._known[forgotten]
            self.send(Remember(digest, save.described.structure, values, forgotten))
            before = values
        self._known[digest] = before
        pairs = enumerate(zip(values, before, strict=True))
        changed = [(position, now) for position, (now, then) in pairs if now != then]
        self.send(save.frame(changed, after))
        save.on_sent()

    async def _live(self) -> None:
        """One process from its start to its end."""
        try:
            self._heard_s = time.monotonic()
            self.incarnation += 1
            # Here, not at the end of the one before: what was sent behind that went nowhere.
            self._known.clear()
            self._environment, self._log_level = dict(os.environb), _log_level()
            process, connection = await self._host.run_blocking(
                _start, self._arena, self._environment, self._log_level
            )
        except Exception as error:  # nor must what is odd about this process end a save
            logger.warning("the uploader process cannot be started: %s", error)
            self._handle(ProcessEnded(f"the uploader process cannot be started: {error}"))
            return
        self._process, self._link = process, Link(connection, FromProcess)
        is_stopped = True
        try:
            await self._serve(self._link)
            is_stopped = False
        except Exception as error:
            # A fault of this program; the saves must not wait for ever because of it.
            is_stopped = False
            logger.error("the uploader process is given up", exc_info=first_error(error))
        finally:
            link, self._link, self._process = self._link, None, None
            detached = [save for save in self._saves.values() if save.is_detached]
            if is_stopped:
                for save in detached:
                    save.close_mailbox()
            # Not closed only: a forked child may have inherited it.
            link.shut()
            link.close()
            if is_stopped and detached:
                process.returncode = 0  # or its object would miss it
            else:
                with anyio.CancelScope(shield=True):
                    reason = await self._host.run_blocking(_end, process)
        logger.warning("%s", reason)
        self._handle(ProcessEnded(reason))

    async def _serve(self, link: Link[FromProcess, ToProcess]) -> None:
        """Exchanges frames until the process is gone."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.flush_forever)
            tasks.start_soon(self._watch)
            while (frame := await link.receive()) is not None:
                self._heard_s = time.monotonic()
                self._take(frame)
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        looked_s = time.monotonic()
        while True:
            await anyio.sleep(_LOOK_S)
            now = time.monotonic()
            if now - looked_s > 2 * _LOOK_S:
                # This process was stopped itself: what has come meanwhile is read first.
                self._heard_s += now - looked_s
            looked_s = now
            is_starting = self._machine.state is SupervisorState.STARTING
            silent_s = now - self._heard_s
            if silent_s > (_START_S if is_starting else _SILENT_S):
                logger.warning("the uploader process was silent for %.0f s: killed", silent_s)
                self._handle(ProcessSilent(silent_s))

    def _take(self, frame: FromProcess) -> None:
        match frame:
            case Ready():
                self.set_duty(self._host.pace.duty)
                self.send(AttemptsEnded(self._host.ended_attempts()))
                self._handle(ProcessReady())
            case Begun():
                self._handle(AttemptBegun(frame.number, frame.attempt))
                if frame.number in self._saves:
                    self._saves[frame.number].on_begun()
            case Logged():
                Lines(frame.logger).log(frame.level, "%s", frame.text, extra=frame.fields)
            case AttemptsEnded():
                self._host.note_ended(frame.attempts)
            case Alive():
                pass
            case _:
                save = self._saves.get(frame.number)
                if save is not None:
                    self._pass_on(save, frame)

    def _pass_on(
        self,
        save: HandedSave,
        frame: StagingWanted
        | ChunksReleased
        | Progressed
        | Recorded
        | MessageSent
        | AbsenceAsked
        | TurnAsked
        | TakeOverPrepared
        | Finished,
    ) -> None:
        match frame:
            case StagingWanted():
                if save.is_shared:
                    # Rank 0's name for it, which that has begun.
                    self._handle(AttemptBegun(frame.number, frame.attempt))
                save.on_staging_wanted(frame)
            case ChunksReleased():
                save.on_released(frame.chunks)
            case Progressed():
                save.on_progress(frame.hashed, frame.stored)
            case Recorded():
                save.on_recorded(frame)
            case MessageSent():
                save.on_message(frame)
            case AbsenceAsked():
                save.on_absence_asked()
            case TurnAsked():
                save.on_turn_asked()
            case TakeOverPrepared():
                save.on_take_over_prepared(frame.error)
            case Finished():
                del self._saves[frame.number]
                self._handle(SaveEnded(frame.number))
                save.on_finished(frame)


def _log_level() -> int:
    return logging.getLogger("actorsnap").getEffectiveLevel()


def _start(
    arena: int, environment: dict[bytes, bytes], log_level: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process; returns it and this end of the link.

    Raises:
        OSError, ValueError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs, _passed(theirs.fileno(), arena) as passed:
        try:
            # What is no text there is ignored by imports, too.
            path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
            process = subprocess.Popen(
                [
                    sys.executable or "python3",
                    *("-c", _BOOT, *map(str, [*passed, log_level, os.getpid()])),
                    *path,
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if _has_stderr() else subprocess.DEVNULL,
                pass_fds=passed,
                # No Ctrl-C comes here. Nor is it a session of its own: Linux shares out the CPU
                # among sessions first (autogroup), whatever the priorities in them.
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


@contextlib.contextmanager
def _passed(*descriptors: int) -> Iterator[list[int]]:
    """Copies that no standard stream of the process takes the place of: in a trainer that has
    closed its own, new descriptors get their numbers."""
    with contextlib.ExitStack() as copies:
        passed: list[int] = []
        for descriptor in descriptors:
            passed.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR))
            copies.callback(os.close, passed[-1])
        yield passed


def _has_stderr() -> bool:
    """Whether a process would inherit one; what this program has opened there is none."""
    try:
        return os.get_inheritable(_STDERR)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a process that was told to end, or is dead; says how it ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVE_S)
    if process.poll() is None:
        process.kill()
    code = process.wait()
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the uploader process was killed ({signal.Signals(-code).name})"
    return f"the uploader process has ended (exit status {code})"


_lock = threading.Lock()


def find_uploader(host: Host) -> Uploader:
    """The runtime's own; always the same one. Starts nothing.

    Raises:
        OSError: there is no shared memory to be had.
    """
    with _lock:
        if host.uploader is None:
            host.uploader = Uploader(host)
        return host.uploader
