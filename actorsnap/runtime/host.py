"""The runtime: an event loop on a thread of its own, worker threads, and the memory budget.

There is one ``Host`` per process, started by the first call and kept. Callers cross into its
loop here and nowhere else; a caller on another event loop is woken without blocking either.
All threads are daemons created up front: at interpreter exit no thread can be started any
more (Python 3.12), and threads that are joined by the interpreter would have to end before
pending snapshots do. This is the only module of the runtime that imports asyncio.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import multiprocessing
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

import anyio
import anyio.lowlevel

# Registers its exit hook, which is to run behind the one of this module: ranks finish their saves
# before they leave.
import actorsnap.transport.store  # noqa: F401
from actorsnap.actors.budget import Budget
from actorsnap.actors.errands import first_error
from actorsnap.actors.pace import Pace
from actorsnap.actors.trace import Progress, ProgressBoard
from actorsnap.errors import ActorSnapError, UsageError, notes_of, text_of
from actorsnap.format.layout import Attempt
from actorsnap.lines import Lines
from actorsnap.options import may_block_running_loop
from actorsnap.runtime.arena import Arena
from actorsnap.runtime.async_call import how_to_await
from actorsnap.runtime.commit_order import CommitOrder
from actorsnap.runtime.limits import default_budget_bytes, usable_cores
from actorsnap.runtime.pool import WorkerPool
from actorsnap.runtime.process import host_id, is_running
from actorsnap.storage.foreign_errors import ends_this_task

if TYPE_CHECKING:
    from actorsnap.runtime.offload import Uploader

__all__ = [
    "Call",
    "Host",
    "Script",
    "allow_in_running_loop",
    "refuse_running_loop",
    "run_async",
    "run_sync",
    "shutdown",
    "wait_done",
    "watch_async",
    "watch_sync",
]

logger = Lines(__name__)

T = TypeVar("T")

Script: TypeAlias = Generator[Callable[["Host"], Coroutine[Any, Any, Any]], Any, T]
"""The body of a public call, free of async and sync: it runs in the caller's thread, yields
what must run on the runtime's loop, and is sent its result."""

_MAX_WORKERS = 8

_MAX_ENDED = 64
"""So many attempts that have ended are remembered, the latest."""
_RELIEF_S = 0.25
"""So often is looked whether jobs wait for threads that hang."""

_STOP_S = 5.0
"""Stopping waits so long for what was cancelled: a storage that hangs must not keep the process."""

_is_blocking_allowed = False
"""Whether blocking calls may run in a thread whose event loop runs."""

_forked_from: int | None = None
"""The process that this one was forked from, if a runtime ran there."""


class Call(Generic[T]):
    """A coroutine on the runtime's loop.

    Attributes:
        future: Its outcome. Settled only when the coroutine has really ended, also after
            ``cancel``; then with ``CallCancelled``.
    """

    def __init__(self, host: Host, coroutine: Coroutine[Any, Any, T]) -> None:
        self._host = host
        self._coroutine = coroutine
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start(self) -> None:
        """Begins, from any thread."""
        self._host.begin(self)

    def start_here(self) -> None:
        """Begins; on the runtime's loop."""
        if not self.future.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        # Scopes can be made on a loop only.
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
            # The caller must not take it for its own Ctrl-C, exit or cancellation.
            self.future.set_exception(_contained(first_error(error), "in the runtime"))
        else:
            if self._scope.cancelled_caught:
                self.future.set_exception(CallCancelled())
            else:
                self.future.set_result(result)

    def cancel(self) -> None:
        """Asks the coroutine to end; from any thread, also if ``start`` was interrupted."""

        def request() -> None:
            self._is_cancelled = True
            if self._scope is not None:
                self._scope.cancel()
            elif self._task is None and not self.future.done():
                self._coroutine.close()
                self.future.set_exception(CallCancelled())

        self._host.call_soon(request)


class CallCancelled(Exception):
    """A ``Call`` ended because it was cancelled. Never reaches users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """A save that an exit must not cut off.

    Attributes:
        future: Done when nothing of it needs this process any more.
        label: Its name in the log.
        abort: Asks for its abort, with a reason, at exit; None: exits wait for the save.
    """

    future: concurrent.futures.Future[Any]
    label: str
    abort: Callable[[str], None] | None


class Host:
    """One process' runtime. Get it by ``Host.get()``."""

    _instance: Host | None = None
    _instance_lock = threading.Lock()

    def __init__(self) -> None:
        self.pid = os.getpid()
        host_id()  # kept from here on: on an event loop its reads would block
        limit = default_budget_bytes()
        self.arena = Arena(limit)
        self.budget = Budget(
            limit, allocate=self.arena.allocate, free=self.arena.free, pin=self.arena.pin
        )
        self.pace = Pace()
        self.commit_order = CommitOrder()
        self.uploader: Uploader | None = None  # see ``runtime.offload.find_uploader``
        self.num_workers = max(2, min(_MAX_WORKERS, usable_cores()))
        self._is_relieving = False
        self._is_stopping = False
        self._calls: set[Call[Any]] = set()
        self._services: set[Call[Any]] = set()
        self._saves: dict[concurrent.futures.Future[Any], PendingSave] = {}
        self._running: set[Attempt] = set()
        # The names are keys, the oldest first.
        self._ended: dict[str, None] = {}
        self._discarded: dict[tuple[str, str], None] = {}
        self._ended_beside: dict[str, None] = {}
        self.on_attempt_ended: Callable[[str], None] = lambda _: None
        with contextlib.ExitStack() as undo:
            self._loop = asyncio.new_event_loop()
            undo.callback(self._loop.close)
            # Both the same, until bulk work leaves the CPU to others.
            self._workers = self._bulk = WorkerPool(self.num_workers)
            undo.callback(self._workers.stop, timeout_s=None)
            self._thread = threading.Thread(
                target=self._run_loop, name="actorsnap-runtime", daemon=True
            )
            self._thread.start()
            undo.pop_all()

    @classmethod
    def get(cls) -> Host:
        """The process' runtime; starts it if there is none, also in a forked child."""
        return cls._running_here() or _begin_start().result()

    @classmethod
    def _running_here(cls) -> Host | None:
        host = cls._instance
        return host if host is not None and host.pid == os.getpid() else None

    @classmethod
    def _start(cls) -> Host:
        with cls._instance_lock:
            host = cls._running_here()
            if host is None:
                host = cls._instance = Host()
                if multiprocessing.parent_process() is not None:
                    # Such a child leaves by os._exit, past atexit.
                    multiprocessing.util.Finalize(None, shutdown, exitpriority=0)
            return host

    async def run_blocking(self, fn: Callable[..., T], /, *args: Any) -> T:
        """See ``storage.base.RunBlocking``."""
        return await self._run(self._workers.submit, fn, args)

    async def run_bulk(self, fn: Callable[..., T], /, *args: Any) -> T:
        """``run_blocking``, of what may take its time: bytes are hashed, compressed and written."""
        return await self._run(self._bulk.submit, fn, args)

    async def run_waiting(self, fn: Callable[..., T], /, *args: Any) -> T:
        """See ``storage.base.StorageContext``."""
        return await self._run(self._bulk.submit_waiting, fn, args)

    async def _run(
        self, submit: Callable[..., None], fn: Callable[..., T], args: tuple[Any, ...]
    ) -> T:
        await anyio.lowlevel.checkpoint_if_cancelled()
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            elif isinstance(error, Exception) and not isinstance(error, StopIteration):
                future.set_exception(error)
            else:
                # No future takes it; or it would end the loop, or look like a cancellation.
                future.set_exception(_contained(error, "on a worker thread"))

        def done(result: Any, error: BaseException | None) -> None:
            # The loop is closed only when the process gives the runtime up.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(settle, result, error)

        submit(fn, args, done)
        if not self._is_relieving:
            self._is_relieving = True
            self._loop.call_later(_RELIEF_S, self._relieve)
        # Here it is always waited for, because the call may write to the caller's memory. Who
        # may do without the result waits elsewhere (``actors.errands``).
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    def set_duty(self, duty: float) -> None:
        """For which share of the time saves are stored, here or in the uploader process. On the
        loop."""
        self.pace.set(duty)
        if self.uploader is not None:
            self.uploader.set_duty(duty)

    def lower_bulk(self) -> None:
        """Bulk work leaves CPU and disk to whoever else wants them: it gets threads of its own."""
        self._bulk = WorkerPool(self.num_workers)
        self._bulk.lower_priority()

    def _relieve(self) -> None:
        # First: were it to fail, the next call must find that nobody looks any more.
        self._is_relieving = False
        if any([pool.relieve() for pool in (self._workers, self._bulk)]):
            self._is_relieving = True
            self._loop.call_later(_RELIEF_S, self._relieve)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_stopping:
                # A storage client that raises these would end the loop, and all that waits for it.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
        finally:
            self._loop.close()

    def check_process(self) -> None:
        """Raises ``UsageError`` in a process forked from the one that owns the runtime."""
        if self.pid != os.getpid():
            raise _forked(self.pid)

    def set_budget(self, limit_bytes: int | None) -> None:
        """Changes the process' memory budget, at once on the loop; None leaves it."""
        if limit_bytes is None:
            return

        def change() -> None:
            if limit_bytes != self.budget.limit_bytes:
                self.arena.limit_bytes = limit_bytes
                self.arena.trim()
                self.budget.limit_bytes = limit_bytes

        if threading.current_thread() is self._thread:
            change()
        else:
            self._loop.call_soon_threadsafe(change)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Call[T]:
        """Starts ``coroutine`` on the loop."""
        call = Call(self, coroutine)
        try:
            call.start()
        except KeyboardInterrupt:
            call.cancel()
            raise
        return call

    def serve(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts on the loop what is no call, but lasts until the runtime is stopped."""
        self._begin(Call(self, coroutine), self._services)

    def begin(self, call: Call[Any]) -> None:
        """See ``Call.start``."""
        self._begin(call, self._calls)

    def _begin(self, call: Call[Any], among: set[Call[Any]]) -> None:
        self.check_process()
        among.add(call)
        call.future.add_done_callback(lambda _: among.discard(call))
        self._loop.call_soon_threadsafe(call.start_here)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs a callback on the loop, from any thread."""
        self.check_process()
        self._loop.call_soon_threadsafe(callback)

    def track_save(self, save: PendingSave) -> None:
        """Makes interpreter exit wait for a save, or abort it."""
        self._saves[save.future] = save
        save.future.add_done_callback(lambda done: self._saves.pop(done, None))

    def pending_saves(self) -> list[PendingSave]:
        return list(self._saves.values())

    def new_attempt(self) -> Attempt:
        """A name no other attempt has. It counts as running until ``end_attempt``."""
        attempt = Attempt(
            created_s=int(time.time()),
            host=host_id(),
            pid=os.getpid(),
            nonce=secrets.token_hex(4),
        )
        self._running.add(attempt)
        return attempt

    def end_attempt(self, attempt: Attempt) -> None:
        """Notes that the attempt will not commit any more, or has. On the loop only."""
        if attempt in self._running:
            self._running.remove(attempt)
            _remember(self._ended, str(attempt))
            self.on_attempt_ended(str(attempt))

    def ended_attempts(self) -> list[str]:
        """Those of this process, the latest ones. On the loop only."""
        return list(self._ended)

    def all_ended(self) -> frozenset[str]:
        """The latest attempts of this process and of the one next to it. On the loop only."""
        return frozenset([*self._ended, *self._ended_beside])

    def discard_attempt(self, url: str, attempt: str) -> None:
        """Notes that this process aborted the attempt or deletes its snapshot. On the loop only.

        Args:
            url: The storage's. An attempt of the same name elsewhere is a copy, and stays.
        """
        _remember(self._discarded, (url, attempt))

    def forget_discarded(self, url: str, attempt: str) -> None:
        """Notes that the attempt is deleted: one of its name is a copy now. On the loop only."""
        self._discarded.pop((url, attempt), None)

    def discarded_attempts(self, url: str) -> frozenset[str]:
        """Returns the latest attempts at ``url`` that are no longer needed. On the loop only."""
        return frozenset(attempt for place, attempt in self._discarded if place == url)

    def note_ended(self, attempts: Iterable[str]) -> None:
        """Notes the same of attempts of the process beside this one: an uploader's trainer, or a
        trainer's uploader. On the loop only."""
        for attempt in attempts:
            _remember(self._ended_beside, attempt)

    def runs(self, attempt: Attempt) -> bool:
        """Returns whether the attempt is under way in this process. On the loop only."""
        return attempt in self._running

    def may_run(self, attempt: Attempt) -> bool:
        """Whether an attempt of this machine and process namespace may be under way.

        Of those that bear this process' id, the ones begun here are known, and all others are
        from before the id was given anew.
        """
        if attempt.pid == os.getpid():
            return attempt in self._running
        return str(attempt) not in self._ended_beside and is_running(attempt.pid)

    def stop(self) -> None:
        """Cancels what runs, ends all threads. For tests and for exit.

        What hangs in a storage is left behind with its threads, which are daemons, and with the
        loop: it gives back their memory should they ever return.
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
        self.arena.close()


def _contained(error: BaseException, where: str) -> RuntimeError:
    """An error in place of one that no future takes, or that would end a loop or a task."""
    fault = RuntimeError(f"{type(error).__name__} {where}: {text_of(error)}")
    fault.__cause__ = error
    return fault


def _remember(attempts: dict[T, None], attempt: T) -> None:
    attempts[attempt] = None
    if len(attempts) > _MAX_ENDED:
        del attempts[next(iter(attempts))]


def shutdown() -> None:
    """Waits for pending saves, then stops the runtime's threads and frees its memory.

    The next call starts a new runtime. Runs by itself when the interpreter exits: a snapshot
    that was begun is finished, or aborted where ``Options.at_exit`` says so; one that fails then is
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
    # The parent's runtime has no threads here, and its lock may have been held.
    global _forked_from
    if Host._instance is not None:
        _forked_from = Host._instance.pid
        Host._instance.arena.forget()
    Host._instance = None
    Host._instance_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


def _forked(pid: int) -> UsageError:
    return UsageError(
        f"this object belongs to process {pid}, which this process was forked "
        "from: its runtime does not run here. Wait for pending snapshots before you "
        "fork, and open the snapshot anew in the child"
    )


async def run_async(script: Script[T]) -> T:
    """Runs a public call's script for a caller on an asyncio event loop.

    Raises:
        UsageError: there is none: under trio, or in a process forked from a coroutine.
    Cancellation: what runs on the runtime is cancelled and has ended when this raises.
    """
    _require_loop()
    try:
        await _start_host()
        step = next(script)
        while True:
            host = Host.get()
            call = host.submit(step(host))
            try:
                await wait_done(call.future)
            except asyncio.CancelledError:
                call.cancel()
                await _outlast_cancellation(call.future)
                script.close()
                raise
            error = call.future.exception()
            if error is not None:
                step = script.throw(_plain(error))
            else:
                step = script.send(call.future.result())
    except StopIteration as end:
        return cast("T", end.value)


def _require_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if _forked_from is not None:
            raise _forked(_forked_from) from None
        raise UsageError(
            "no asyncio event loop runs here: use asyncio, or the same call of actorsnap.sync in "
            "a worker thread"
        ) from None


async def _start_host() -> None:
    """``Host.get`` for a caller whose loop must not be blocked."""
    if Host._running_here() is None:
        started = _begin_start()
        await wait_done(started)
        started.result()


def _begin_start() -> concurrent.futures.Future[Host]:
    """Starts the runtime in a thread of its own, which no Ctrl-C interrupts half-way."""
    started: concurrent.futures.Future[Host] = concurrent.futures.Future()

    def start() -> None:
        try:
            started.set_result(Host._start())
        except BaseException as error:
            started.set_exception(error)

    threading.Thread(target=start, name="actorsnap-start", daemon=True).start()
    return started


async def wait_done(future: concurrent.futures.Future[Any]) -> None:
    """Waits on the caller's loop until ``future`` is settled; does not raise its error.

    Cancellation: the future goes on.
    """
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake(_: object) -> None:
        # The caller's loop may be closed when the runtime is done.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()


async def _outlast_cancellation(future: concurrent.futures.Future[Any]) -> None:
    """Waits until the runtime has let go, however often the caller is cancelled."""
    # The shield keeps anyio's scopes from cancelling in each turn of the loop.
    with anyio.CancelScope(shield=True):
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await wait_done(future)


async def watch_async(board: ProgressBoard) -> AsyncGenerator[Progress, None]:
    """The states of ``board`` as they come, the latest first, until the last one."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(changed.set)

    unsubscribe = board.subscribe(wake)
    try:
        shown: Progress | None = None
        while shown is None or not shown.is_last:
            changed.clear()
            if board.latest != shown:
                shown = board.latest
                yield shown
            else:
                await changed.wait()
    finally:
        unsubscribe()


def watch_sync(board: ProgressBoard) -> Generator[Progress, None, None]:
    """``watch_async`` for an ordinary thread; blocks between states."""
    changed = threading.Event()
    unsubscribe = board.subscribe(changed.set)
    try:
        shown: Progress | None = None
        while shown is None or not shown.is_last:
            changed.clear()
            if board.latest != shown:
                shown = board.latest
                yield shown
            else:
                changed.wait()
    finally:
        unsubscribe()


def run_sync(script: Script[T], *, name: str) -> T:
    """Runs a public call's script for a caller in an ordinary thread.

    An interrupt (Ctrl-C) cancels what runs on the runtime and is raised when it has ended.

    Raises:
        UsageError: this thread runs an event loop, which must not be blocked.
    """
    refuse_running_loop(name)
    try:
        step = next(script)
        while True:
            host = Host.get()
            call = Call(host, step(host))
            try:
                call.start()
                error = call.future.exception()
            except BaseException:
                call.cancel()
                concurrent.futures.wait([call.future])
                script.close()
                raise
            if error is not None:
                step = script.throw(_plain(error))
            else:
                step = script.send(call.future.result())
    except StopIteration as end:
        return cast("T", end.value)


def allow_in_running_loop() -> None:
    """Lets the calls of ``actorsnap.sync`` block running event loops, in the whole process.

    For synchronous frameworks in a program that runs a loop. A call then blocks the loop of its
    thread until it returns, and async calls on that loop wait; the runtime has a loop of its own.
    ``ACTORSNAP_ALLOW_IN_RUNNING_LOOP=1`` has the same effect. Under ``asyncio.run`` the first
    Ctrl-C takes effect when the call has returned, the second one at once.
    """
    global _is_blocking_allowed
    _is_blocking_allowed = True


def refuse_running_loop(name: str) -> None:
    """Raises ``UsageError`` in a thread whose event loop runs, unless it may be blocked.

    It may in the kernel of a notebook, whose cells run in a loop that has nothing else to do.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if _is_blocking_allowed or _is_in_kernel() or may_block_running_loop():
        return
    line = how_to_await(name)
    if name.startswith("PendingSnapshot."):
        line = f"{how_to_await('Snapshot.async_take')}; {line}"
    raise UsageError(
        f"actorsnap.sync.{name} would block the event loop that runs in this thread. Write "
        f"`{line}`. Or let it block: call `actorsnap.sync.allow_in_running_loop()` first, or set "
        "ACTORSNAP_ALLOW_IN_RUNNING_LOOP=1"
    ) from None


def _is_in_kernel() -> bool:
    """Whether this process is an IPython kernel (Jupyter, Colab); does not import IPython."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None


def _plain(error: BaseException) -> BaseException:
    """One error instead of a group of one's children, with the group as its cause.

    Ours is a copy: futures keep the original. Raising that would close a circle through the
    frames of its traceback, and the caller's app state would live until the collector comes.
    """
    if isinstance(error, BaseExceptionGroup):
        leaf: BaseException = error
        while isinstance(leaf, BaseExceptionGroup):
            ours = [
                e for e in leaf.exceptions if isinstance(e, ActorSnapError | BaseExceptionGroup)
            ]
            leaf = (ours or leaf.exceptions)[0]
        if leaf.__cause__ is None:
            leaf.__cause__ = error
        error = leaf
    if not isinstance(error, ActorSnapError):
        return error
    try:
        fresh = copy.copy(error).with_traceback(error.__traceback__)
    except Exception:  # a class derived from one of ours, which is made in another way
        return error
    fresh.__cause__ = error.__cause__
    for note in notes_of(error):
        fresh.add_note(note)
    return fresh
