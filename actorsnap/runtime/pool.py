# SPDX-License-Identifier: Apache-2.0
"""Worker threads for blocking calls, first come first served. Independent of event loops.

One thread per core: copies and checksums gain nothing from more. Jobs that wait for a network do,
and get a thread at once. If all threads hang in a storage, more are started
(``docs/decisions/0003-worker-threads.md``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

_HANGS_AFTER_S = 0.5
"""Age of a hanging job. Copying or hashing a chunk takes a tenth."""

_MAX_EXTRA = 32
_IDLE_S = 5.0

_NICE = 19
"""Nice value of lowered threads: on a shared core they get a seventieth of the others' time. The
kernel derives the lowest I/O priority of the usual class (``ioprio_set(2)``).
"""


Job: TypeAlias = tuple[
    Callable[..., Any], tuple[Any, ...], Callable[[Any, BaseException | None], None]
]
"""A call ``fn(*args)`` on a thread, and a callback for its result or error."""


class WorkerPool:
    """Daemon threads with one job queue.

    Args:
        num_threads: Kept from the start: at interpreter exit none can be started (Python
            3.12).
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._busy_since: dict[threading.Thread, float] = {}
        self._numbers = itertools.count()
        self._is_lowered = False
        try:
            for _ in range(num_threads):
                self._add(idle_s=None)
        except BaseException:
            self.stop(timeout_s=None)
            raise

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def submit_waiting(self, job: Job) -> None:
        """``submit`` for a job that mostly waits: starts a thread unless one is idle."""
        num_idle = len(self._threads) - len(self._busy_since) - self._jobs.qsize()
        if num_idle <= 0:
            self._add_extra(1)
        self.submit(job)

    def relieve(self) -> bool:
        """Starts threads for waiting jobs if all others hang.

        Returns:
            Whether jobs wait: call again later.
        """
        num_waiting = self._jobs.qsize()
        busy_since = list(self._busy_since.values())
        latest = time.monotonic() - _HANGS_AFTER_S
        if len(busy_since) == len(self._threads) and all(begin < latest for begin in busy_since):
            self._add_extra(num_waiting)
        return num_waiting > 0

    def lower_priority(self) -> None:
        """Lowers CPU and disk priority of present and future threads."""
        self._is_lowered = True
        for thread in tuple(self._threads):
            if thread.native_id is not None:  # else it lowers itself
                lower_priority(thread.native_id)

    def stop(self, timeout_s: float | None) -> None:
        """Ends all threads; waits for running jobs."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        threads = tuple(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _add_extra(self, num_wanted: int) -> None:
        room = self.num_threads + _MAX_EXTRA - len(self._threads)
        with contextlib.suppress(RuntimeError):  # at interpreter exit
            for _ in range(min(num_wanted, room)):
                self._add(idle_s=_IDLE_S)

    def _add(self, idle_s: float | None) -> None:
        thread = threading.Thread(
            target=self._work,
            args=(idle_s,),
            name=f"actorsnap-worker-{next(self._numbers)}",
            daemon=True,
        )
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            raise

    def _work(self, idle_s: float | None) -> None:
        this = threading.current_thread()
        if self._is_lowered:
            lower_priority(threading.get_native_id())
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get(timeout=idle_s)) is not None:
                self._busy_since[this] = time.monotonic()
                fn, args, done = job
                result, failure = None, None
                try:
                    result = fn(*args)
                except BaseException as error:
                    failure = error
                # Who is told may change the tensors, and free them: this thread must not keep them.
                del job, fn, args
                done(result, failure)
                del done, result, failure
                del self._busy_since[this]
        self._threads.discard(this)


def lower_priority(thread: int) -> None:
    """Lowers CPU and disk priority of a thread, by native id. Irreversible. Linux only: elsewhere
    it applies to the process. A refusal is ignored.

    The thread no longer preempts others (``SCHED_BATCH``).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
