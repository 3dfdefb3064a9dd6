# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of its uploader process: starts and watches it, and hands saves to it.

``protocol.supervisor`` decides. The process is executed, not forked, does not import the user's
``__main__``, and imports torch only for detached saves of several ranks. It ends when the trainer's
end of the link closes.
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
from typing import Any, Protocol, TypeAlias

import anyio
import msgspec

from actorsnap.actors.abandonable import first_error
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.planning.packing import ObjectPlan, PackingRules, RankPlan, pack
from actorsnap.protocol import uploader as frames
from actorsnap.protocol.failure import Failure
from actorsnap.protocol.supervisor import (
    AbortSave,
    ProcessCommand,
    SaveHere,
    SendSave,
    Supervisor,
    SupervisorCommand,
    SupervisorState,
)
from actorsnap.runtime.host import Host
from actorsnap.runtime.link import Link
from actorsnap.runtime.location import Location
from actorsnap.runtime.structure import Described
from actorsnap.state.sources import Captured
from actorsnap.storage.registry import is_shared

logger = Log(__name__)

_BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; "
    "from actorsnap.runtime.uploader_process import main; main(*map(int, sys.argv[1:5]))"
)

_LOOK_S = 1.0
_SILENT_S = 30.0
"""Silence until the process is killed. It sends frames every few seconds."""

_START_S = 120.0
"""The same during start: modules may come from a slow network."""

_LEAVE_S = 10.0
"""Time to end until it is killed: it may be collecting garbage."""

_STDERR = 2
_FIRST_DESCRIPTOR = 3

_MAX_KNOWN = 4
"""Structures that the process remembers."""


_PackKey: TypeAlias = tuple[bytes, int, PackingRules, RankPlan]


class OffloadedWork(Protocol):
    """The trainer's half of a save or a copy in the process. See ``SupervisorCommand``."""

    @property
    def is_detached(self) -> bool: ...

    def begin(self, previous_attempt: str) -> None:
        """Sends it."""
        ...

    def deliver(self, frame: frames.FromSave) -> None: ...

    def abort(self, failure: Failure) -> None: ...

    def make_here(self) -> None: ...

    def let_go(self) -> None:
        """Releases memory kept in case the process dies."""
        ...

    def close_mailbox(self) -> None:
        """Hands the rank's mailbox over to the process."""
        ...


class Uploader:
    """The uploader process and its replacements. On the runtime's loop only.

    Attributes:
        incarnation: Number of processes started.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._machine = Supervisor()
        self._arena = host.resources.arena.share()
        host.resources.attempts.on_end = lambda attempt: self.send(frames.AttemptsEnded([attempt]))
        self._numbers = itertools.count()
        self._saves: dict[int, OffloadedWork] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.incarnation = 0
        self._link: Link[frames.FromProcess, frames.ToProcess] | None = None
        self._heard_s = 0.0
        # Values sent with the structures that the process knows, the latest last.
        self._known: dict[bytes, list[tuple[int, bytes]]] = {}
        self._environment: dict[bytes, bytes] = {}
        self._log_level = logging.NOTSET
        # The next save usually has the same plan.
        self._packed: tuple[_PackKey, tuple[ObjectPlan, ...]] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        return self._machine.state is SupervisorState.READY

    @property
    def is_usable(self) -> bool:
        """No start has failed for good."""
        return self._machine.state is not SupervisorState.UNUSABLE

    def new_number(self) -> int:
        return next(self._numbers)

    def add(self, number: int, save: OffloadedWork, *, rank: int, is_shared: bool) -> None:
        self._saves[number] = save
        self._perform(self._machine.add_save(number, rank=rank, is_shared=is_shared))

    def start(self) -> None:
        self._perform(self._machine.start())

    def cancel(self, number: int, reason: str) -> None:
        self._perform(self._machine.cancel_save(number, reason))

    def conclude(self, number: int, failure: Failure) -> None:
        self._perform(self._machine.conclude_save(number, failure))

    def forget_memory(self, number: int) -> None:
        self._machine.note_memory_gone(number)

    def pack(
        self, described: Described, captured: Captured, rank: int, wanted: frames.StagingWanted
    ) -> tuple[ObjectPlan, ...]:
        """Returns the objects to stage, without a place. Blocks; for worker threads."""
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
        self.send(frames.Configure(duty=duty))

    def make_room(self) -> None:
        """Releases memory kept in case the process dies."""
        for save in self._saves.values():
            save.let_go()

    def send(self, frame: frames.ToProcess) -> None:
        """Dropped if there is no process."""
        if self._link is not None:
            self._link.send(frame)

    def send_begin(self, frame: frames.BeginSave) -> None:
        """Begins a save, without structure and values that the process knows."""
        self.send_environment()
        known = self._known.pop(frame.digest, None)
        if known is None:
            known = frame.values
            if len(self._known) == _MAX_KNOWN:
                forgotten = next(iter(self._known))
                del self._known[forgotten]
                frame = msgspec.structs.replace(frame, forgotten=forgotten)
        else:
            pairs = zip(frame.values, known, strict=True)
            changed = [value for value, before in pairs if value != before]
            frame = msgspec.structs.replace(frame, structure=None, values=changed)
        self._known[frame.digest] = known
        self.send(frame)

    def send_environment(self) -> None:
        """Sends what changed since the last work."""
        before, now, log_level = self._environment, dict(os.environb), _log_level()
        changed = [
            (name, now.get(name)) for name in before | now if before.get(name) != now.get(name)
        ]
        if changed or log_level != self._log_level:
            self._environment, self._log_level = now, log_level
            self.send(frames.Configure(changed, log_level))

    def _perform(self, commands: list[SupervisorCommand]) -> None:
        for command in commands:
            match command:
                case ProcessCommand.START:
                    self._host.serve(self._live())
                case ProcessCommand.KILL:
                    assert self._process is not None
                    self._process.kill()
                case SendSave():
                    self._saves[command.number].begin(command.previous_attempt)
                case frames.CancelSave():
                    self.send(command)
                case AbortSave():
                    self._saves.pop(command.number).abort(command.failure)
                case SaveHere():
                    self._saves.pop(command.number).make_here()

    async def _live(self) -> None:
        try:
            self._heard_s = time.monotonic()
            self.incarnation += 1
            # Not at the previous end: frames sent since then were dropped.
            self._known.clear()
            self._environment, self._log_level = dict(os.environb), _log_level()
            process, connection = await self._host.run_blocking(
                _start, self._arena, self._environment, self._log_level
            )
        except Exception as error:  # must not fail a save
            logger.warning("the uploader process cannot be started: %s", error)
            reason = f"the uploader process cannot be started: {error}"
            self._perform(self._machine.note_process_ended(reason))
            return
        self._process, self._link = process, Link(connection, frames.FromProcess)
        is_stopped = True
        try:
            await self._serve(self._link)
            is_stopped = False
        except Exception as error:
            # A bug here; saves must not wait for ever.
            is_stopped = False
            logger.error("the uploader process is given up", exc_info=first_error(error))
        finally:
            link, self._link, self._process = self._link, None, None
            detached = [save for save in self._saves.values() if save.is_detached]
            if is_stopped:
                for save in detached:
                    save.close_mailbox()
            # A forked child may have inherited the socket.
            link.shut()
            link.close()
            if is_stopped and detached:
                process.returncode = 0  # against Popen's warning about a running child
            else:
                with anyio.CancelScope(shield=True):
                    reason = await self._host.run_blocking(_end, process)
        logger.warning("%s", reason)
        self._perform(self._machine.note_process_ended(reason))

    async def _serve(self, link: Link[frames.FromProcess, frames.ToProcess]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.flush_forever)
            tasks.start_soon(self._watch)
            while (frame := await link.receive()) is not None:
                self._heard_s = time.monotonic()
                self._handle(frame)
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
                self._perform(self._machine.note_silent())

    def _handle(self, frame: frames.FromProcess) -> None:
        match frame:
            case frames.Alive():
                if self._machine.state is SupervisorState.STARTING:
                    self.set_duty(self._host.resources.pace.duty)
                    self.send(frames.AttemptsEnded([*self._host.resources.attempts.ended()]))
                    self._perform(self._machine.note_ready())
            case frames.Logged():
                Log(frame.logger).log(frame.level, "%s", frame.text, extra=frame.fields)
            case frames.AttemptsEnded():
                self._host.resources.attempts.note_ended(frame.attempts)
            case _:
                self._deliver(frame)

    def _deliver(self, frame: frames.FromSave) -> None:
        save = self._saves.get(frame.number)
        if save is None:
            return  # ended here
        if isinstance(frame, frames.Begun | frames.StagingWanted):
            self._machine.note_begun(frame.number, frame.attempt)
        elif isinstance(frame, frames.Finished | frames.CopyEnded):
            del self._saves[frame.number]
            self._machine.note_save_ended(frame.number)
        save.deliver(frame)


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
            # Imports ignore other entries, too.
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
                # No Ctrl-C. Not a separate session: Linux divides CPU time between sessions first
                # (autogroup), whatever their priorities.
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


@contextlib.contextmanager
def _passed(*descriptors: int) -> Iterator[list[int]]:
    """Duplicates descriptors above the standard streams, whose numbers a trainer that has closed
    them gives to new descriptors.
    """
    with contextlib.ExitStack() as copies:
        passed: list[int] = []
        for descriptor in descriptors:
            passed.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR))
            copies.callback(os.close, passed[-1])
        yield passed


def _has_stderr() -> bool:
    """Returns whether standard error was inherited, not opened by Python."""
    try:
        return os.get_inheritable(_STDERR)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> str:
    """Waits for a process, then kills it; returns how it ended."""
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
    """Returns the runtime's only uploader. Starts nothing.

    Raises:
        OSError: no shared memory.
    """
    with _lock:
        if host.resources.uploader is None:
            host.resources.uploader = Uploader(host)
        return host.resources.uploader


def find_usable_uploader(
    host: Host, locations: Sequence[Location], options: Options
) -> Uploader | None:
    """Returns the runtime's uploader. Starts nothing.

    Returns:
        None: ``options`` want none, no process can be started, or it would not find or not
        understand the locations.
    """
    if options.offload == "thread" or not all([is_shared(each.url) for each in locations]):
        return None
    try:
        for each in locations:
            _check_sendable(each.storage_options)
        uploader = find_uploader(host)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
        OSError,
        msgspec.MsgspecError,
    ) as error:
        is_wanted = options.offload == "process" or options.detach
        logger.log(
            logging.WARNING if is_wanted else logging.DEBUG,
            "snapshot %s: no uploader process for it: %s",
            locations[-1].display_url,
            error,
        )
        return None
    return uploader if uploader.is_usable else None


def _check_sendable(storage_options: dict[str, Any]) -> None:
    """Raises if the options would not arrive unchanged."""
    data = msgspec.msgpack.encode(storage_options)
    if not _is_same(msgspec.msgpack.decode(data, type=dict[str, Any]), storage_options):
        raise ValueError("storage_options would arrive changed: use lists, str and numbers")


def _is_same(there: Any, here: Any) -> bool:
    """Equal and of the same types: an enum differs from its value."""
    if type(there) is not type(here) or there != here:
        return False
    if isinstance(there, dict):
        return _is_same([*there], [*here]) and _is_same([*there.values()], [*here.values()])
    return not isinstance(there, list) or all(map(_is_same, there, here))
