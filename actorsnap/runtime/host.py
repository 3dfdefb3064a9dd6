# SPDX-License-Identifier: Apache-2.0
"""The runtime: an event loop on its own thread, and worker threads.

The first call starts the only ``Host`` of the process. Callers enter its loop only through this
module and ``runtime/script.py``, the only ones with asyncio. All threads are daemons, created up
front: at interpreter exit none can be started (Python 3.12), and others would be joined before
pending snapshots end.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
import anyio.lowlevel

# Imported before this module registers its exit hook, so that ranks finish their saves before they
# leave.
import actorsnap.transport.store  # noqa: F401
from actorsnap.actors.abandonable import first_error
from actorsnap.errors import UsageError, text_of
from actorsnap.log import Log
from actorsnap.runtime.pool import Job, WorkerPool
from actorsnap.runtime.process import host_id, usable_cores
from actorsnap.runtime.resources import Resources
from actorsnap.storage.base import ends_this_task

logger = Log(__name__)

T = TypeVar("T")

Script: TypeAlias = Generator[Callable[["Host"], Coroutine[Any, Any, Any]], Any, T]
"""The body of a public call, async or sync. Runs in the caller's thread, yields steps for the
runtime's loop, and receives their results.
"""

_MAX_WORKERS = 8

_RELIEF_S = 0.25
"""Interval between checks for jobs that wait for hanging threads."""

_WAKE_S = 0.2
"""Longest time until the loop of a notebook sees an interrupt."""

_STOP_S = 5.0
"""Time limit for stopping cancelled calls: a hanging storage must not block exit."""

_forked_from: int | None = None
"""The parent process, if it had a runtime."""


class Call(Generic[T]):
    """A coroutine on the runtime's loop.

    Attributes:
        future: Settled when the coroutine has ended, also after ``cancel``, then with
            ``CallCancelled``.
    """

    def __init__(self, host: Host, coroutine: Coroutine[Any, Any, T]) -> None:
        self._host = host
        self._coroutine = coroutine
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start(self) -> None:
        self._host.begin(self)

    def start_here(self) -> None:
        """On the runtime's loop only."""
        if not self.future.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        # Only possible on a loop.
        self._scope = anyio.CancelScope()
        if self._is_cancelled:
            self._scope.cancel()
        try:
            with self._scope:
                result = await self._coroutine
        except Exception as error:
            self.future.set_exception(error)
        except BaseException as error:
            if ends_this_task(error):
                self.future.set_exception(error)
                raise
            # The caller must not take it for its own Ctrl-C.
            self.future.set_exception(_wrap_fatal(first_error(error), "in the runtime"))
        else:
            if self._scope.cancelled_caught:
                self.future.set_exception(CallCancelled())
            else:
                self.future.set_result(result)

    def cancel(self) -> None:
        """Cancels the call. On any thread, even if ``start`` was interrupted."""

        def request() -> None:
            self._is_cancelled = True
            if self._scope is not None:
                self._scope.cancel()
            elif self._task is None and not self.future.done():
                self._coroutine.close()
                self.future.set_exception(CallCancelled())

        self._host.call_soon(request)


class CallCancelled(Exception):
    """Never reaches users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """A save that interpreter exit must not cut off.

    Attributes:
        future: Done when the save no longer needs this process.
        label: For the log.
        abort: Requests an abort at exit, with a reason. None: exit waits.
    """

    future: concurrent.futures.Future[Any]
    label: str
    abort: Callable[[str], None] | None


class Host:
    """The runtime of this process: ``Host.get()``.

    Attributes:
        resources: Shared by the calls; the host only makes and frees it.
    """

    _instance: Host | None = None
    _instance_lock = threading.Lock()

    def __init__(self) -> None:
        self.pid = os.getpid()
        host_id()  # cached: its reads would block a loop
        self.resources = Resources(self.call_on_loop)
        self.num_workers = max(2, min(_MAX_WORKERS, usable_cores()))
        self._is_relieving = False
        self._is_stopping = False
        self._calls: set[Call[Any]] = set()
        self._services: set[Call[Any]] = set()
        self._saves: dict[concurrent.futures.Future[Any], PendingSave] = {}
        with contextlib.ExitStack() as undo:
            self._loop = asyncio.new_event_loop()
            undo.callback(self._loop.close)
            # One pool until ``lower_bulk``.
            self._workers = self._bulk = WorkerPool(self.num_workers)
            undo.callback(self._workers.stop, timeout_s=None)
            self._thread = threading.Thread(
                target=self._run_loop, name="actorsnap-runtime", daemon=True
            )
            self._thread.start()
            undo.pop_all()

    @classmethod
    def get(cls) -> Host:
        """Starts the runtime if needed, also in a forked child."""
        return cls.running_here() or cls.begin_start().result()

    @classmethod
    def begin_start(cls) -> concurrent.futures.Future[Host]:
        """Starts in a separate thread: Ctrl-C cannot interrupt it."""
        started: concurrent.futures.Future[Host] = concurrent.futures.Future()

        def start() -> None:
            try:
                started.set_result(cls._start())
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=start, name="actorsnap-start", daemon=True).start()
        return started

    @classmethod
    def running_here(cls) -> Host | None:
        host = cls._instance
        return host if host is not None and host.pid == os.getpid() else None

    @classmethod
    def _start(cls) -> Host:
        with cls._instance_lock:
            host = cls.running_here()
            if host is None:
                host = cls._instance = Host()
                if multiprocessing.parent_process() is not None:
                    # Such a child skips atexit.
                    multiprocessing.util.Finalize(None, shutdown, exitpriority=0)
            return host

    async def run_blocking(self, fn: Callable[..., T], /, *args: Any) -> T:
        """See ``storage.base.RunBlocking``. For short work."""
        return await self._run(self._workers.submit, fn, args)

    async def run_cpu(self, fn: Callable[..., T], /, *args: Any) -> T:
        """``run_blocking`` for long work: hashing, compressing and writing."""
        return await self._run(self._bulk.submit, fn, args)

    async def run_io(self, fn: Callable[..., T], /, *args: Any) -> T:
        """See ``storage.base.StorageContext``."""
        return await self._run(self._bulk.submit_waiting, fn, args)

    async def _run(
        self, submit: Callable[[Job], None], fn: Callable[..., T], args: tuple[Any, ...]
    ) -> T:
        await anyio.lowlevel.checkpoint_if_cancelled()
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            elif isinstance(error, Exception) and not isinstance(error, StopIteration):
                future.set_exception(error)
            else:
                # A future rejects it, or it would end the loop or look like a cancellation.
                future.set_exception(_wrap_fatal(error, "on a worker thread"))

        def done(result: Any, error: BaseException | None) -> None:
            # The loop closes when the process drops the runtime.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(settle, result, error)

        submit((fn, args, done))
        if not self._is_relieving:
            self._is_relieving = True
            self._loop.call_later(_RELIEF_S, self._relieve)
        # The call may write to the caller's memory. See ``AbandonableTasks``.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    def lower_bulk(self) -> None:
        """Moves bulk work to threads of lower CPU and disk priority."""
        self._bulk = WorkerPool(self.num_workers)
        self._bulk.lower_priority()

    def _relieve(self) -> None:
        self._is_relieving = True  # also if no thread can be started now
        try:
            self._is_relieving = any([pool.relieve() for pool in (self._workers, self._bulk)])
        finally:
            if self._is_relieving:
                self._loop.call_later(_RELIEF_S, self._relieve)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_stopping:
                # Raised by a storage client, these would end the loop.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
        finally:
            self._loop.close()

    def check_process(self) -> None:
        """Raises ``UsageError`` in a fork of the runtime's process."""
        if self.pid != os.getpid():
            raise _forked_error(self.pid)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Call[T]:
        call = Call(self, coroutine)
        try:
            call.start()
        except KeyboardInterrupt:
            call.cancel()
            raise
        return call

    def serve(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a background service until the runtime stops."""
        self.begin(Call(self, coroutine), self._services)

    def begin(self, call: Call[Any], among: set[Call[Any]] | None = None) -> None:
        among = self._calls if among is None else among
        self.check_process()
        among.add(call)
        call.future.add_done_callback(lambda _: among.discard(call))
        self._loop.call_soon_threadsafe(call.start_here)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs the callback on the loop soon. On any thread."""
        self.check_process()
        self._loop.call_soon_threadsafe(callback)

    def call_on_loop(self, callback: Callable[[], None]) -> None:
        """``call_soon``, but at once on the loop's thread."""
        if threading.current_thread() is self._thread:
            callback()
        else:
            self._loop.call_soon_threadsafe(callback)

    def track_save(self, save: PendingSave) -> None:
        """Makes interpreter exit wait for the save or abort it."""
        self._saves[save.future] = save
        save.future.add_done_callback(lambda done: self._saves.pop(done, None))

    def pending_saves(self) -> list[PendingSave]:
        return list(self._saves.values())

    def stop(self) -> None:
        """Cancels all calls and ends all threads, for tests and exit.

        Abandons calls that hang in a storage, with their threads and the loop, which frees their
        memory should they return.
        """
        calls = (*self._calls, *self._services)
        for call in calls:
            call.cancel()
        _, hanging = concurrent.futures.wait([call.future for call in calls], timeout=_STOP_S)
        if hanging:
            logger.warning(
                "%d calls hang in a storage, and what they were doing is lost", len(hanging)
            )
            return
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        for pool in (self._workers, self._bulk):
            pool.stop(timeout_s=_STOP_S)
        self.resources.arena.close()


def _wrap_fatal(error: BaseException, where: str) -> RuntimeError:
    fault = RuntimeError(f"{type(error).__name__} {where}: {text_of(error)}")
    fault.__cause__ = error
    return fault


def shutdown() -> None:
    """Waits for pending saves, then stops the runtime's threads and frees its memory.

    Runs at interpreter exit. If you call it earlier, the next call of actorsnap starts a new
    runtime. Running saves are finished, or aborted with ``Options.at_exit="abort"``. Failures are
    logged.
    """
    host = Host._instance
    if host is None or host.pid != os.getpid():
        return
    pending = [save for save in host.pending_saves() if not save.future.done()]
    for save in pending:
        if save.abort is None:
            logger.warning("%s: waiting for the pending snapshot before exit", save.label)
        else:
            logger.warning("%s: aborting the pending snapshot before exit", save.label)
            save.abort("the runtime stops, and Options.at_exit is 'abort'")
    concurrent.futures.wait([save.future for save in pending])
    with Host._instance_lock:
        if Host._instance is host:
            Host._instance = None
    host.stop()


atexit.register(shutdown)


def _forget_in_child() -> None:
    # The parent's threads are gone, and its lock may be held.
    global _forked_from
    if Host._instance is not None:
        _forked_from = Host._instance.pid
        Host._instance.resources.arena.forget()
    Host._instance = None
    Host._instance_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


def check_not_forked() -> None:
    """Raises ``UsageError`` in a fork of a process with a runtime."""
    if _forked_from is not None:
        raise _forked_error(_forked_from) from None


def _forked_error(pid: int) -> UsageError:
    return UsageError(
        f"this object belongs to process {pid}, which this process was forked "
        "from: its runtime does not run here. Wait for pending snapshots before you "
        "fork, and open the snapshot again in the child"
    )


async def wait_done(future: concurrent.futures.Future[Any]) -> None:
    """Waits on the caller's loop until ``future`` is settled; does not raise its error.

    Cancellation: the future continues.
    """
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake(_: object) -> None:
        # The caller's loop may be closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    with interruptible():
        await done.wait()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets ipykernel interrupt a wait on the caller's loop.

    Its signal handler cancels the cell by ``call_soon``, which does not wake a loop that sleeps in
    ``select``. A timer does. Signal handlers run in the main thread only.
    """
    if "ipykernel" not in sys.modules or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def rearm() -> None:
        nonlocal timer
        timer = loop.call_later(_WAKE_S, rearm)

    rearm()
    try:
        yield
    finally:
        timer.cancel()
