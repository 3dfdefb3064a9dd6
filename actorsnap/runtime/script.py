"""Runs the scripts of public calls, for callers on an event loop and in plain threads.

A caller on an event loop is woken without blocking that loop or the runtime's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar, cast

import anyio

from actorsnap.actors.trace import Progress, ProgressBoard
from actorsnap.errors import ActorSnapError, UsageError, notes_of
from actorsnap.options import may_block_running_loop
from actorsnap.runtime.async_call import how_to_await
from actorsnap.runtime.host import Call, Host, Script, check_not_forked, wait_done

__all__ = [
    "allow_in_running_loop",
    "refuse_running_loop",
    "run_async",
    "run_sync",
    "watch_async",
    "watch_sync",
]

T = TypeVar("T")

_is_blocking_allowed = False
"""Whether blocking calls are allowed in a thread with a running event loop."""


async def run_async(script: Script[T]) -> T:
    """Runs a public call's script for a caller on an asyncio event loop.

    Raises:
        UsageError: no asyncio loop runs, as under trio or in a process forked from a coroutine.
    Cancellation: cancels the step on the runtime and waits for its end before it raises.
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
                step = script.throw(_unwrap_group(error))
            else:
                step = script.send(call.future.result())
    except StopIteration as end:
        return cast("T", end.value)


def _require_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        check_not_forked()
        raise UsageError(
            "no asyncio event loop runs here: use asyncio, or the same call of actorsnap.sync in "
            "a worker thread"
        ) from None


async def _start_host() -> None:
    """``Host.get`` for a caller on an event loop, which must not block."""
    if Host.running_here() is None:
        started = Host.begin_start()
        await wait_done(started)
        started.result()


async def _outlast_cancellation(future: concurrent.futures.Future[Any]) -> None:
    """Waits until the runtime has ended the call, even if the caller is cancelled repeatedly."""
    # Without the shield, anyio's scopes would cancel in each turn of the loop.
    with anyio.CancelScope(shield=True):
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await wait_done(future)


async def watch_async(board: ProgressBoard) -> AsyncGenerator[Progress, None]:
    """Yields the latest state of ``board`` and then each change until the last one."""
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
    """``watch_async`` for a plain thread; blocks between states."""
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

    Ctrl-C cancels the step on the runtime and is raised when the step has ended.

    Raises:
        UsageError: an event loop runs in this thread and must not be blocked.
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
                step = script.throw(_unwrap_group(error))
            else:
                step = script.send(call.future.result())
    except StopIteration as end:
        return cast("T", end.value)


def allow_in_running_loop() -> None:
    """Lets the calls of ``actorsnap.sync`` block running event loops in the whole process.

    For synchronous frameworks in a program with an event loop. A call then blocks the loop of its
    thread until it returns, and async calls on that loop wait; the runtime has its own loop.
    ``ACTORSNAP_ALLOW_IN_RUNNING_LOOP=1`` has the same effect. Under ``asyncio.run`` the first
    Ctrl-C takes effect when the call has returned, the second one at once.
    """
    global _is_blocking_allowed
    _is_blocking_allowed = True


def refuse_running_loop(name: str) -> None:
    """Raises ``UsageError`` in a thread with a running event loop, unless blocking is allowed.

    Notebook kernels are allowed: the loop that runs their cells has no other work.
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
    """Returns whether this process is an IPython kernel (Jupyter, Colab), without importing it."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None


def _unwrap_group(error: BaseException) -> BaseException:
    """Unwraps an exception group to one of its errors, with the group as the cause.

    Errors of this package are copied, because the future keeps the original. Raising the original
    would form a reference cycle through its traceback and keep the caller's app state alive until
    the next garbage collection.
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
    except Exception:  # a user's subclass with another constructor
        return error
    fresh.__cause__ = error.__cause__
    for note in notes_of(error):
        fresh.add_note(note)
    return fresh
