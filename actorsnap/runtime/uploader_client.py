"""The trainer's end of its uploader process: starts it, watches it, and hands saves to it.

``protocol.supervisor`` decides; this module performs. There is one process per runtime. It is
executed, not forked. It does not import the user's ``__main__``, and torch only for saves of
several ranks. It ends when the trainer's end of the link closes, for any reason.
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

from actorsnap.actors.abandonable import first_error
from actorsnap.log import Log
from actorsnap.planning.packing import ObjectPlan, PackingRules, RankPlan, pack
from actorsnap.protocol.failure import Failure
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
from actorsnap.protocol.uploader import (
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
    ProcessStarted,
    Progressed,
    Recorded,
    Remember,
    Save,
    StagingWanted,
    TakeOverPrepared,
    ToProcess,
    TurnAsked,
)
from actorsnap.runtime.host import Host
from actorsnap.runtime.link import Link
from actorsnap.runtime.structure import Described
from actorsnap.state.captured import Captured

__all__ = ["HandedSave", "Uploader", "find_uploader"]

logger = Log(__name__)

_BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; "
    "from actorsnap.runtime.uploader_process import main; main(*map(int, sys.argv[1:5]))"
)

_LOOK_S = 1.0
_SILENT_S = 30.0
"""Silence after which the process is killed, in seconds. It sends frames every few seconds."""

_START_S = 120.0
"""The same limit during start, in seconds: modules may come from a slow network."""

_LEAVE_S = 10.0
"""Time for the process to end before it is killed, in seconds. Only garbage collection may be
left to do."""

_STDERR = 2
_FIRST_DESCRIPTOR = 3
"""The first descriptor after the standard streams."""

_MAX_KNOWN = 4
"""Maximum number of structures that the process remembers."""


_PackKey: TypeAlias = tuple[bytes, int, PackingRules, RankPlan]


class HandedSave(Protocol):
    """A save handed to the process. Methods are called on the runtime's loop.

    Attributes:
        described: The description of the state.
        rank: This process' rank in the save.
    """

    described: Described
    rank: int

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part."""
        ...

    @property
    def is_detached(self) -> bool:
        """Whether the process continues the save when this process ends."""
        ...

    def frame(self, values: list[tuple[int, bytes]], after: str) -> Save:
        """Returns the frame that begins the save; staged chunks are announced again on request."""
        ...

    def on_sent(self) -> None: ...

    def on_begun(self) -> None: ...

    def on_message(self, frame: MessageSent) -> None: ...

    def on_absence_asked(self) -> None: ...

    def on_turn_asked(self) -> None: ...

    def on_take_over_prepared(self, error: str) -> None: ...

    def close_mailbox(self) -> None:
        """Hands the rank's mailbox over to the process. Blocks for a moment."""

    def on_staging_wanted(self, frame: StagingWanted) -> None: ...

    def on_released(self, chunks: Sequence[int]) -> None: ...

    def on_progress(self, hashed: int, stored: int) -> None: ...

    def on_recorded(self, frame: Recorded) -> None: ...

    def on_finished(self, frame: Finished) -> None: ...

    def on_aborted(self, failure: Failure) -> None: ...

    def let_go(self) -> None:
        """Releases memory that is kept in case the process dies."""
        ...

    def make_here(self) -> None:
        """Makes the save in this process, because no uploader process can be started."""
        ...


class Uploader:
    """The uploader process and its replacements. On the runtime's loop only.

    Attributes:
        incarnation: Number of processes started so far.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._machine = Supervisor()
        self._arena = host.resources.arena.share()
        host.resources.attempts.on_end = lambda attempt: self.send(AttemptsEnded([attempt]))
        self._numbers = itertools.count()
        self._saves: dict[int, HandedSave] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.incarnation = 0
        self._link: Link[FromProcess, ToProcess] | None = None
        self._heard_s = 0.0
        # Known to the process, the latest last.
        self._known: dict[bytes, list[bytes]] = {}
        self._environment: dict[bytes, bytes] = {}
        self._log_level = logging.NOTSET
        # The last plan: the next save is usually the same.
        self._packed: tuple[_PackKey, tuple[ObjectPlan, ...]] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None without a process."""
        return None if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether a process is running and listening."""
        return self._machine.state is SupervisorState.READY

    @property
    def is_usable(self) -> bool:
        """Whether no attempt to start a process has failed for good."""
        return self._machine.state is not SupervisorState.UNUSABLE

    def new_number(self) -> int:
        """Returns a number that identifies a save in all calls and frames."""
        return next(self._numbers)

    def add(self, number: int, save: HandedSave) -> None:
        self._saves[number] = save
        self._handle(AskedToSave(number, save.rank, save.is_shared))

    def start(self) -> None:
        """Starts the process if there is none."""
        self._handle(AskedToStart())

    def cancel(self, number: int, reason: str) -> None:
        """Requests an abort; the commit may still win."""
        self._handle(AskedToCancel(number, reason))

    def end(self, number: int, failure: Failure) -> None:
        """Ends a save because its team has ended it."""
        self._handle(AskedToEnd(number, failure))

    def forget_memory(self, number: int) -> None:
        """Records that a save's staged memory will be overwritten."""
        self._handle(MemoryGone(number))

    def pack(
        self, described: Described, captured: Captured, rank: int, wanted: StagingWanted
    ) -> tuple[ObjectPlan, ...]:
        """Returns the objects to stage; their places are not decided yet. Blocks; for worker
        threads."""
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
        self.send(ChangePace(duty))

    def make_room(self) -> None:
        """Releases memory kept in case the process dies, because a save waits for memory."""
        for save in self._saves.values():
            save.let_go()

    def send(self, frame: ToProcess) -> None:
        """Sends a frame; drops it if there is no process."""
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
        before, now = self._environment, dict(os.environb)
        changed = [
            (name, now.get(name)) for name in before | now if before.get(name) != now.get(name)
        ]
        if changed:
            self._environment = now
            self.send(ChangeEnvironment(changed))

    def _send_log_level(self) -> None:
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
        try:
            self._heard_s = time.monotonic()
            self.incarnation += 1
            # Cleared here, not at the previous end: frames sent in between were dropped.
            self._known.clear()
            self._environment, self._log_level = dict(os.environb), _log_level()
            process, connection = await self._host.run_blocking(
                _start, self._arena, self._environment, self._log_level
            )
        except Exception as error:  # an unusual environment must not fail a save
            logger.warning("the uploader process cannot be started: %s", error)
            self._handle(ProcessEnded(f"the uploader process cannot be started: {error}"))
            return
        self._process, self._link = process, Link(connection, FromProcess)
        is_stopped = True
        try:
            await self._serve(self._link)
            is_stopped = False
        except Exception as error:
            # A bug in this program; saves must not wait for ever because of it.
            is_stopped = False
            logger.error("the uploader process is given up", exc_info=first_error(error))
        finally:
            link, self._link, self._process = self._link, None, None
            detached = [save for save in self._saves.values() if save.is_detached]
            if is_stopped:
                for save in detached:
                    save.close_mailbox()
            # A plain close is not enough: a forked child may have inherited the socket.
            link.shut()
            link.close()
            if is_stopped and detached:
                process.returncode = 0  # avoids the warning of Popen about a running child
            else:
                with anyio.CancelScope(shield=True):
                    reason = await self._host.run_blocking(_end, process)
        logger.warning("%s", reason)
        self._handle(ProcessEnded(reason))

    async def _serve(self, link: Link[FromProcess, ToProcess]) -> None:
        """Exchanges frames until the process has ended."""
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
                # This process was suspended: read pending frames first.
                self._heard_s += now - looked_s
            looked_s = now
            is_starting = self._machine.state is SupervisorState.STARTING
            silent_s = now - self._heard_s
            if silent_s > (_START_S if is_starting else _SILENT_S):
                logger.warning("the uploader process was silent for %.0f s: killed", silent_s)
                self._handle(ProcessSilent(silent_s))

    def _take(self, frame: FromProcess) -> None:
        match frame:
            case ProcessStarted():
                self.set_duty(self._host.resources.pace.duty)
                self.send(AttemptsEnded(self._host.resources.attempts.latest_ended()))
                self._handle(ProcessReady())
            case Begun():
                self._handle(AttemptBegun(frame.number, frame.attempt))
                if frame.number in self._saves:
                    self._saves[frame.number].on_begun()
            case Logged():
                Log(frame.logger).log(frame.level, "%s", frame.text, extra=frame.fields)
            case AttemptsEnded():
                self._host.resources.attempts.note_ended(frame.attempts)
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
                    # Rank 0's attempt.
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
    """Starts a process; returns it and the trainer's end of the link.

    Raises:
        OSError, ValueError: the start failed.
    """
    ours, theirs = socket.socketpair()
    with theirs, _passed(theirs.fileno(), arena) as passed:
        try:
            # Imports also ignore entries that are not strings.
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
                # A separate process group gets no Ctrl-C. Not a separate session: Linux divides CPU
                # time between sessions first (autogroup) and ignores priorities between them.
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


@contextlib.contextmanager
def _passed(*descriptors: int) -> Iterator[list[int]]:
    """Duplicates descriptors above the standard streams. In a trainer that has closed its own
    streams, new descriptors get those numbers."""
    with contextlib.ExitStack() as copies:
        passed: list[int] = []
        for descriptor in descriptors:
            passed.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR))
            copies.callback(os.close, passed[-1])
        yield passed


def _has_stderr() -> bool:
    """Returns whether a process would inherit stderr; descriptors opened by Python are not
    inheritable."""
    try:
        return os.get_inheritable(_STDERR)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> str:
    """Waits for a process that ends or is dead, and kills it if needed; returns how it ended."""
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
    """Returns the uploader of the runtime, always the same one. Starts nothing.

    Raises:
        OSError: no shared memory is available.
    """
    with _lock:
        if host.resources.uploader is None:
            host.resources.uploader = Uploader(host)
        return host.resources.uploader
