# SPDX-License-Identifier: Apache-2.0
"""Sources of preemption notices: signals, Slurm, a file, a function, cloud metadata.

A watcher learns that the process is about to be ended, and calls ``on_notice`` with what it knows.
What follows is not decided here. ``docs/howto/preemption.md`` documents the watchers for users.

Signal handlers run between two bytecodes of the main thread, maybe while it holds a lock. They
take no lock, log nothing and wait for nothing; ``on_notice`` must do the same. Everything else
runs on daemon threads that mostly sleep.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from actorsnap.errors import UsageError, describe
from actorsnap.log import Log
from actorsnap.tracebacks import short_namespace
from actorsnap.wording import did_you_mean

logger = Log(__name__)

_SAME_SIGNAL_S = 2.0
"""Time after a first delivery in which another counts as the same signal, in seconds.

A launcher that forwards a signal and a system that sends it to all processes of a job deliver it
twice, some milliseconds apart.
"""

_LOOK_S = 1.0
"""Time between two looks at a file or the clock, in seconds."""

_WARN_AFTER = 3
"""Failures in a row before a watcher logs its only warning."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that this process will be ended.

    Attributes:
        reason: Source of the notice.
        grace_s: Time left when the notice arrived, in seconds. None: unknown.
    """

    reason: str
    grace_s: float | None


class Watcher(Protocol):
    """A source of notices, for one manager."""

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        """Begins to watch.

        Args:
            on_notice: Called once per notice, on any thread or in a signal handler, possibly while
                another call runs. Must not raise, wait, log or take a lock.

        Raises:
            UsageError: The watcher cannot work here, or is already started.
        """

    def stop(self) -> None:
        """Stops watching. May be repeated. A notice that was already detected may still arrive."""


class PollingWatcher:
    """Calls ``look`` on a daemon thread. Reports each reason once.

    A failing ``look`` is repeated; the third failure in a row logs a warning, once.

    Args:
        warning: Held once the warning is logged. Watchers of one source share it.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], Notice | None],
        every_s: float,
        warning: threading.Lock | None = None,
    ) -> None:
        self._name = name
        self._look = look
        self._every_s = every_s
        self._warning = warning or threading.Lock()
        self._stopping: threading.Event | None = None

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        if self._stopping is not None:
            raise _started_twice(self._name)
        self._stopping = threading.Event()
        threading.Thread(
            target=self._poll,
            args=(self._stopping, on_notice),
            name=f"actorsnap-notices-{self._name}",
            daemon=True,
        ).start()

    def stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()
            self._stopping = None

    def _poll(self, stopping: threading.Event, on_notice: Callable[[Notice], None]) -> None:
        num_failures = 0
        reported = set[str]()
        while not stopping.is_set():
            notice = None
            try:
                notice = self._look()
                num_failures = 0
            except Exception as error:
                num_failures += 1
                if num_failures == _WARN_AFTER and self._warning.acquire(blocking=False):
                    logger.warning(
                        "notices.%s: %s. Notices from there may be missed. It goes on trying, "
                        "and logs no further failure",
                        self._name,
                        describe(error),
                    )
            if notice is not None and notice.reason not in reported and not stopping.is_set():
                reported.add(notice.reason)
                on_notice(notice)
            stopping.wait(self._every_s)


class SignalNotices:
    """Treats signals as notices. The default is SIGTERM.

    The first signal is a notice, and the default action, which ends the process, does not run. A
    handler that Python code installed earlier is called, too: if it ends the process, the process
    still ends. A second signal goes to the previous handler or the default action, so a second
    SIGTERM ends the process. A repeat within two seconds of the first counts as the same signal.
    Different signals are counted separately. A forked child gets the previous handlers back.

    Args:
        signals: Names or numbers.
        grace_s: Time from the signal to the end of the process, in seconds. None: unknown.

    Raises:
        UsageError: An unknown signal, or one that cannot be handled.
    """

    def __init__(self, *signals: str | int, grace_s: float | None = None) -> None:
        self._numbers = [_number_of(each) for each in signals or ("SIGTERM",)]
        if grace_s is not None:
            _check_seconds(grace_s, "notices.signals", "grace_s")
        self._grace_s = grace_s
        self._handlers: list[_Handler] = []

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        if self._handlers:
            raise _started_twice("signals")
        if not _is_main_thread():
            raise UsageError(
                "notices.signals: only the main thread can handle signals, and this is thread "
                f"{threading.current_thread().name!r}: make the manager in the main thread, or "
                "handle the signal there yourself and use notices.custom or manager.request"
            )
        for number in self._numbers:
            notice = Notice(signal.Signals(number).name, self._grace_s)
            self._handlers.append(_Handler(number, notice, on_notice))

    def stop(self) -> None:
        """Restores the previous handlers, unless others were installed since.

        On another thread than the main one, the next signal restores them.
        """
        while self._handlers:
            self._handlers.pop().remove()


class _Handler:
    """An installed signal handler, and what it replaced.

    ``signal.getsignal`` does not know the handlers that C code installed. So the operating
    system's entry is kept, too: it restores any of them.
    """

    _installed: list[_Handler] = []
    _forking = threading.local()

    def __init__(self, number: int, notice: Notice, on_notice: Callable[[Notice], None]) -> None:
        self._number = number
        self._notice = notice
        self._on_notice: Callable[[Notice], None] | None = on_notice
        self._first_s: float | None = None
        self._action = _exchange_action(number)
        self._previous: Any = signal.getsignal(number)
        signal.signal(number, self)
        self._installed.append(self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        on_notice, now_s = self._on_notice, time.monotonic()
        if on_notice is not None and self._first_s is None:
            self._first_s = now_s
            on_notice(self._notice)
        is_passed_on = on_notice is None or now_s - (self._first_s or now_s) > _SAME_SIGNAL_S
        previous, _ = self._replaced()
        if callable(previous):
            # Python's own handler of Ctrl-C is the default action.
            if is_passed_on or previous is not signal.default_int_handler:
                previous(number, frame)
        elif is_passed_on and (on_notice is not None or self._is_installed()):
            self._restore()
            os.kill(os.getpid(), number)

    def remove(self) -> None:
        self._on_notice = None
        if self in self._installed:
            self._installed.remove(self)
        if self._is_installed() and _is_main_thread():
            self._restore()

    def _is_installed(self) -> bool:
        return signal.getsignal(self._number) is self

    def _replaced(self) -> tuple[Any, bytes]:
        """Returns the handler and the entry before this one, without removed ones of this class."""
        if isinstance(self._previous, _Handler) and self._previous._on_notice is None:
            return self._previous._replaced()
        return self._previous, self._action

    def _restore(self) -> None:
        previous, action = self._replaced()
        signal.signal(self._number, signal.SIG_DFL if previous is None else previous)
        _exchange_action(self._number, action)

    @classmethod
    def before_fork(cls) -> None:
        numbers = [handler._number for handler in cls._installed]
        cls._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    @classmethod
    def after_in_parent(cls) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, cls._forking.mask)

    @classmethod
    def after_in_child(cls) -> None:
        for handler in reversed(cls._installed.copy()):
            handler.remove()
        signal.pthread_sigmask(signal.SIG_SETMASK, cls._forking.mask)


# Data loader workers and other children are ended by signals of their own. One that comes during
# the fork waits, as Python drops it otherwise.
os.register_at_fork(
    before=_Handler.before_fork,
    after_in_parent=_Handler.after_in_parent,
    after_in_child=_Handler.after_in_child,
)


def _exchange_action(number: int, new: bytes | None = None) -> bytes:
    """Returns the C library's entry for a signal, a ``struct sigaction``, and sets another."""
    import ctypes  # not needed by those who use no signals

    old = ctypes.create_string_buffer(1024)  # the structure has less on all systems
    if ctypes.CDLL(None, use_errno=True).sigaction(number, new, old) != 0:
        raise OSError(ctypes.get_errno(), f"sigaction({number})")
    return old.raw


class SlurmNotices:
    """Gives a notice before the job's time limit. Does nothing without Slurm.

    Uses two sources: the clock, with ``SLURM_JOB_END_TIME``, and SIGUSR1, which ``#SBATCH
    --signal=USR1@120`` asks Slurm to send. For SIGTERM, which Slurm sends to end or preempt a
    job, use ``notices.signals``.

    Args:
        before_s: Time between the notice and the end, in seconds: the number in ``--signal``, minus
            the time that the launcher and the batch script need at the end.
    """

    def __init__(self, *, before_s: float = 120.0) -> None:
        _check_seconds(before_s, "notices.slurm", "before_s")
        self._before_s = before_s
        self._end_s = math.inf
        self._signal = SignalNotices("SIGUSR1")
        self._clock = PollingWatcher("slurm", self._look, _LOOK_S)

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        if "SLURM_JOB_ID" not in os.environ:
            return
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        try:
            self._end_s = float(end)
        except ValueError:
            self._end_s = math.inf
            logger.warning(
                "notices.slurm: SLURM_JOB_END_TIME=%r is not a time: only its signal counts", end
            )
        self._signal.start(lambda notice: on_notice(self._notice("Slurm: " + notice.reason)))
        self._clock.start(on_notice)

    def stop(self) -> None:
        self._signal.stop()
        self._clock.stop()

    def _look(self) -> Notice | None:
        is_due = self._end_s - time.time() <= self._before_s
        return self._notice("Slurm: the job's time limit") if is_due else None

    def _notice(self, reason: str) -> Notice:
        # A signal of a preemption comes long before the time limit, one of an extended job after.
        left_s = self._end_s - time.time()
        return Notice(reason, left_s if 0 < left_s < self._before_s else self._before_s)


class FileNotices(PollingWatcher):
    """Gives a notice when a file appears or is written again.

    A file that already exists at the start is ignored, so that a restarted job does not stop at
    once.

    Args:
        grace_s: Time from the notice to the end of the process, in seconds. None: unknown.

    Raises:
        UsageError: A path that no file can have.
    """

    def __init__(self, path: str | os.PathLike[str], *, grace_s: float | None = None) -> None:
        if grace_s is not None:
            _check_seconds(grace_s, "notices.file", "grace_s")
        self._path = _checked_path(path)
        self._grace_s = grace_s
        self._is_known = False
        self._known: tuple[int, int] | None = None
        super().__init__("file", self._look_at_file, _LOOK_S)

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        self._is_known = False
        super().start(on_notice)

    def _look_at_file(self) -> Notice | None:
        stamp = self._stamp()
        if not self._is_known:
            self._known, self._is_known = stamp, True
        if stamp is None or stamp == self._known:
            return None
        return Notice(f"file {self._path}", self._grace_s)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


class CustomNotices(PollingWatcher):
    """Polls a function for notices, on a separate thread.

    Args:
        check: Function that returns a ``Notice``, or None. It may block. An error counts as None.
        every_s: Time between two calls, in seconds.
    """

    def __init__(self, check: Callable[[], Notice | None], *, every_s: float = 5.0) -> None:
        _check_seconds(every_s, "notices.custom", "every_s")
        if not callable(check):
            raise UsageError(
                f"notices.custom({check!r}): write a function that returns a Notice or None"
            )
        super().__init__("custom", lambda: _checked(check()), every_s)


def _checked(notice: Notice | None) -> Notice | None:
    if notice is not None and not isinstance(notice, Notice):
        raise TypeError(f"the function returned {notice!r}: return a Notice or None")
    return notice


@short_namespace
class notices:
    """Sources of notices: ``notices=[notices.signals("SIGTERM", grace_s=25), notices.aws()]``."""

    signals = SignalNotices
    slurm = SlurmNotices
    file = FileNotices
    custom = CustomNotices

    @staticmethod
    def aws(*, rebalance: bool = False, endpoint: str = "http://169.254.169.254") -> Watcher:
        """Watches for the interruption of an EC2 spot instance, every 5 s.

        Uses IMDSv2. If the process runs in a container, the instance needs a hop limit of 2.

        Args:
            rebalance: Treats rebalance recommendations as notices, too. They mean that an
                interruption has become more likely, not that one is certain.
            endpoint: URL of the metadata server.
        """
        from actorsnap.runtime.instance_metadata import AwsNotices  # with http.client

        return AwsNotices(rebalance=rebalance, endpoint=endpoint)

    @staticmethod
    def gce(*, endpoint: str = "http://metadata.google.internal") -> Watcher:
        """Watches for the preemption of a Compute Engine instance.

        Args:
            endpoint: URL of the metadata server.
        """
        from actorsnap.runtime.instance_metadata import GceNotices  # with http.client

        return GceNotices(endpoint=endpoint)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _number_of(given: str | int) -> int:
    try:
        number = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        hint = did_you_mean(given, [each.name for each in signal.Signals])
        raise UsageError(
            f"notices.signals({given!r}): no such signal; {hint or 'SIGTERM is an example'}"
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(
            f"notices.signals({number.name!r}): no process can handle it; use the signal that "
            "comes before it, mostly SIGTERM"
        )
    return number


def _checked_path(path: object) -> str:
    """Returns an absolute path."""
    example = 'write the path of a file, such as notices.file("/run/stop")'
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"notices.file({path!r}): {example}") from None
    if not text.strip() or "\0" in text:
        raise UsageError(f"notices.file({path!r}): {example}")
    return str(Path(text).absolute())


def _check_seconds(value: float, where: str, name: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{where}: {name}={value!r} must be a number of seconds above 0")


def _started_twice(name: str) -> UsageError:
    return UsageError(
        f"notices.{name} was started before and not stopped: make one watcher for each manager"
    )
