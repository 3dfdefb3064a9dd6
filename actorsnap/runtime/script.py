# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts of public calls, for callers on an event loop (without blocking it) and in plain
threads.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import functools
import inspect
import re
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from types import CodeType, CoroutineType, TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import anyio

from actorsnap.actors.trace import Progress, ProgressBoard
from actorsnap.errors import ActorSnapError, UsageError, notes_of
from actorsnap.log import Log
from actorsnap.options import may_block_running_loop
from actorsnap.runtime.host import (
    Call,
    Host,
    Script,
    check_not_forked,
    interruptible,
    wait_done,
)
from actorsnap.storage.registry import without_secrets
from actorsnap.tracebacks import short_traceback, shorten

T = TypeVar("T")
P = ParamSpec("P")
ItemT = TypeVar("ItemT", covariant=True)

_is_blocking_allowed = False
"""Whether calls may block a thread with a running event loop."""


async def run_async(script: Script[T]) -> T:
    """Runs a script for a caller on an asyncio event loop.

    Raises:
        UsageError: no asyncio loop runs, as under trio or in a process forked from a coroutine.
    Cancellation: cancels the step and waits for its end.
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
            except asyncio.CancelledError as cancelled:
                call.cancel()
                await _outlast_cancellation(call.future)
                # It may have to wait: the step had succeeded just before it was cancelled.
                closing = host.submit(host.run_blocking(_close, script, cancelled))
                await _outlast_cancellation(closing.future)
                closing.future.result()
                raise
            error = call.future.exception()
            if error is not None:
                step = script.throw(_unwrap_group(error))
            else:
                step = script.send(call.future.result())
    except StopIteration as end:
        return cast("T", end.value)


def _close(script: Script[Any], interrupt: BaseException) -> None:
    """Ends a script whose caller is interrupted; its notes on that go to ``interrupt``."""
    ending = GeneratorExit()
    with contextlib.suppress(GeneratorExit, StopIteration):
        script.throw(ending)
        script.close()  # raises: it must not go on
    for note in notes_of(ending):
        interrupt.add_note(note)


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
    """``Host.get`` without blocking the caller's event loop."""
    if Host.running_here() is None:
        started = Host.begin_start()
        await wait_done(started)
        started.result()


async def _outlast_cancellation(future: concurrent.futures.Future[Any]) -> None:
    """Waits for the end of the call, through repeated cancellation."""
    # Otherwise anyio's scopes would cancel in each turn of the loop.
    with anyio.CancelScope(shield=True):
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await wait_done(future)


class Reader(Protocol[ItemT]):
    """Reads items that other threads make.

    Attributes:
        is_over: After ``read``: there will be no more.
    """

    @property
    def is_over(self) -> bool: ...

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls ``wake`` from any thread for a new item. Returns a function that ends that."""
        ...

    def read(self) -> ItemT | None:
        """Returns the next item; None: not yet."""
        ...


class _ProgressReader:
    def __init__(self, board: ProgressBoard) -> None:
        self._board = board
        self._shown: Progress | None = None

    @property
    def is_over(self) -> bool:
        return self._shown is not None and self._shown.is_last

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        return self._board.subscribe(wake)

    def read(self) -> Progress | None:
        if self._board.latest == self._shown:
            return None
        self._shown = self._board.latest
        return self._shown


def watch_async(board: ProgressBoard) -> AsyncGenerator[Progress, None]:
    """Yields the latest state of ``board`` and each change until the last."""
    return follow_async(_ProgressReader(board))


def watch_sync(board: ProgressBoard) -> Generator[Progress, None, None]:
    """``watch_async`` for a plain thread; blocks between states."""
    return follow_sync(_ProgressReader(board))


async def follow_async(reader: Reader[T]) -> AsyncGenerator[T, None]:
    """Yields the items of a reader until it is over."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(changed.set)

    unsubscribe = reader.subscribe(wake)
    try:
        while not reader.is_over:
            changed.clear()
            item = reader.read()
            if item is not None:
                yield item
            elif not reader.is_over:
                with interruptible():
                    await changed.wait()
    finally:
        unsubscribe()


def follow_sync(reader: Reader[T]) -> Generator[T, None, None]:
    """``follow_async`` for a plain thread; blocks between items."""
    changed = threading.Event()
    unsubscribe = reader.subscribe(changed.set)
    try:
        while not reader.is_over:
            changed.clear()
            item = reader.read()
            if item is not None:
                yield item
            elif not reader.is_over:
                changed.wait()
    finally:
        unsubscribe()


def run_sync(script: Script[T], *, name: str) -> T:
    """Runs a script for a caller in a plain thread.

    Ctrl-C cancels the step and is raised after its end.

    Raises:
        UsageError: a running event loop must not be blocked.
    """
    refuse_running_loop(name)
    return drive_sync(script)


def drive_sync(script: Script[T]) -> T:
    """``run_sync`` that also blocks a running event loop."""
    try:
        step = next(script)
        while True:
            host = Host.get()
            call = Call(host, step(host))
            try:
                call.start()
                error = call.future.exception()
            except BaseException as interrupt:
                call.cancel()
                try:
                    concurrent.futures.wait([call.future])
                finally:  # a second Ctrl-C does not wait
                    _close(script, interrupt)
                raise
            if error is not None:
                step = script.throw(_unwrap_group(error))
            else:
                step = script.send(call.future.result())
    except StopIteration as end:
        return cast("T", end.value)


async def run_blocking(script: Script[T]) -> T:
    """``run_async`` for the methods of ``blocking_call``: blocks, and never suspends."""
    return drive_sync(script)


def blocking_call(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Makes an async method block, in a class whose ``_run`` is ``run_blocking``.

    Keeps signature and docstring.

    Raises:
        UsageError: From the result; a running event loop must not be blocked.
    """
    function = inspect.unwrap(method)

    @functools.wraps(function)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        refuse_running_loop(function.__qualname__)
        try:
            function(self, *args, **kwargs).send(None)
        except StopIteration as end:
            return cast("T", end.value)
        raise AssertionError(f"{function.__qualname__} was suspended")

    return call


def blocking_facade(of: type) -> Callable[[type[T]], type[T]]:
    """Completes a class whose methods are those of an async one, but block.

    Methods get the docstrings of their async twins, and short tracebacks (``tracebacks``).
    """

    def complete(facade: type[T]) -> type[T]:
        for name, value in list(vars(facade).items()):
            if name.startswith("_") and name not in ("__enter__", "__exit__"):
                continue
            is_public = not name.startswith("_")
            doc = _blocking_doc(inspect.getdoc(getattr(of, name))) if is_public else None
            if isinstance(value, property) and value.fget is not None:
                short = property(short_traceback(value.fget, doc), doc=doc)
                setattr(facade, name, short)
            elif isinstance(value, classmethod):
                setattr(facade, name, classmethod(short_traceback(value.__func__, doc)))
            elif inspect.isfunction(value):
                setattr(facade, name, short_traceback(value, doc))
        return facade

    return complete


_AWAITED = re.compile(r"\b(?:await |async (?=with |for ))")


def _blocking_doc(doc: str | None) -> str | None:
    """Returns the docstring of an async call for the blocking one."""
    return doc and _AWAITED.sub("", doc).replace("Cancellation", "Ctrl-C")


async def run_on_loop(host: Host, script: Script[T]) -> T:
    """Runs a script as a part of other work on the runtime's loop; it must not block."""
    try:
        step = next(script)
        while True:
            try:
                result = await step(host)
            except Exception as error:
                step = script.throw(_unwrap_group(error))
            else:
                step = script.send(result)
    except StopIteration as end:
        return cast("T", end.value)
    finally:
        script.close()


def allow_in_running_loop() -> None:
    """Lets the calls of ``actorsnap.sync`` block running event loops, in the whole process.

    Use this for synchronous frameworks in a program with an event loop. A call blocks the loop of
    its thread until it returns, so async calls on that loop wait. actorsnap's own loop continues.
    Same as ``ACTORSNAP_ALLOW_IN_RUNNING_LOOP=1``. Under ``asyncio.run``, the first Ctrl-C takes
    effect after the call, the second one at once.
    """
    global _is_blocking_allowed
    _is_blocking_allowed = True


def refuse_running_loop(name: str) -> None:
    """Raises ``UsageError`` on a running event loop, unless blocking is allowed.

    It is in notebook kernels: the loop that runs their cells has no other work.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if _is_blocking_allowed or is_in_kernel() or may_block_running_loop():
        return
    module = "actorsnap.manager.sync" if name.startswith("CheckpointManager") else "actorsnap.sync"
    line = f"`{how_to_await(name)}`"
    if name.startswith("PendingSnapshot."):
        line = f"`{how_to_await('Snapshot.async_take')}`, then {line}"
    raise UsageError(
        f"{module}.{name} would block the event loop that runs in this thread. Write "
        f"{line}. Or let it block: call `actorsnap.sync.allow_in_running_loop()` first, or set "
        "ACTORSNAP_ALLOW_IN_RUNNING_LOOP=1"
    ) from None


def is_in_kernel() -> bool:
    """Detects an IPython kernel (Jupyter, Colab), without importing it."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None


def _unwrap_group(error: BaseException) -> BaseException:
    """Returns one error of an exception group, caused by the group if that has further errors.

    Errors of this package are copied: the original, which the future keeps, would form a reference
    cycle through its traceback and keep the app state alive until a garbage collection.
    """
    if isinstance(error, BaseExceptionGroup):
        leaf: BaseException = error
        is_only = True
        while isinstance(leaf, BaseExceptionGroup):
            ours = [
                e for e in leaf.exceptions if isinstance(e, ActorSnapError | BaseExceptionGroup)
            ]
            is_only = is_only and len(leaf.exceptions) == 1
            leaf = (ours or leaf.exceptions)[0]
        if leaf.__cause__ is None:
            is_complete = is_only and isinstance(leaf, ActorSnapError)
            leaf.__cause__ = None if is_complete else error
        error = leaf
    if not isinstance(error, ActorSnapError):
        return error
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except Exception:  # a subclass that refuses
        return error


logger = Log(__name__)

_SNAPSHOT = "actorsnap.Snapshot(...)"
_CALLS = {
    "warm_up": ("await actorsnap.warm_up(...)", "nothing was prepared"),
    "Snapshot.take": ("snapshot = await actorsnap.Snapshot.take(...)", "nothing was saved"),
    "Snapshot.async_take": (
        "pending = await actorsnap.Snapshot.async_take(...)",
        "nothing was saved",
    ),
    "Snapshot.export_hf": (f"await {_SNAPSHOT}.export_hf(...)", "nothing was exported"),
    "export_torch": ("await export_torch(actorsnap.Snapshot(...), ...)", "nothing was exported"),
    "export_dcp": ("await export_dcp(actorsnap.Snapshot(...), ...)", "nothing was exported"),
    "Snapshot.restore": (f"await {_SNAPSHOT}.restore(...)", "nothing was restored"),
    "Snapshot.plan_restore": (f"plan = await {_SNAPSHOT}.plan_restore(...)", "nothing was planned"),
    "Snapshot.read_object": (f"value = await {_SNAPSHOT}.read_object(...)", "nothing was read"),
    "Snapshot.get_manifest": (f"entries = await {_SNAPSHOT}.get_manifest()", "nothing was read"),
    "Snapshot.get_state_dict_for_key": (
        f"state_dict = await {_SNAPSHOT}.get_state_dict_for_key(...)",
        "nothing was read",
    ),
    "Snapshot.metadata": (f"metadata = await {_SNAPSHOT}.metadata", "nothing was read"),
    "Snapshot.step": (f"step = await {_SNAPSHOT}.step", "nothing was read"),
    "Snapshot.exists": (f"if await {_SNAPSHOT}.exists():", "nothing was looked for"),
    "Snapshot.created": (f"created = await {_SNAPSHOT}.created", "nothing was read"),
    "Snapshot.world_size": (f"world_size = await {_SNAPSHOT}.world_size", "nothing was read"),
    "Snapshot.nbytes": (f"nbytes = await {_SNAPSHOT}.nbytes", "nothing was read"),
    "Snapshot.keys": (f"keys = await {_SNAPSHOT}.keys()", "nothing was read"),
    "Snapshot.tree": (f"print(await {_SNAPSHOT}.tree())", "nothing was read"),
    "Snapshot.list": ("snapshots = await actorsnap.Snapshot.list(...)", "nothing was read"),
    "Snapshot.verify": (f"report = await {_SNAPSHOT}.verify()", "nothing was verified"),
    "Snapshot.copy_to": (f"report = await {_SNAPSHOT}.copy_to(...)", "nothing was copied"),
    "Snapshot.recover": (f"report = await {_SNAPSHOT}.recover()", "nothing was recovered"),
    "Snapshot.delete": (f"await {_SNAPSHOT}.delete()", "nothing was deleted"),
    "PendingSnapshot.staged": ("await pending.staged()", "nothing was waited for"),
    "PendingSnapshot.wait": ("snapshot = await pending.wait()", "nothing was waited for"),
    "CheckpointManager.__enter__": (
        "async with actorsnap.manager.CheckpointManager(...) as manager:",
        "",
    ),
    "PendingSnapshot.events": ("async for progress in pending.events():", ""),
}
"""The correct code, and the effect of a missing ``await``, by name."""


def how_to_await(name: str) -> str:
    return _CALLS[name][0] if name in _CALLS else f"await manager.{name.partition('.')[2]}(...)"


def async_call(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Makes an ``async def`` return an ``AsyncCall``.

    Keeps signature and docstring. ``inspect.iscoroutinefunction`` is true for the result from
    Python 3.12 on; 3.11 cannot mark it.
    """
    name = function.__qualname__
    line = how_to_await(name)
    missed = _CALLS[name][1] if name in _CALLS else "nothing happened"

    @short_traceback
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        coroutine = cast("CoroutineType[Any, Any, T]", function(*args, **kwargs))
        caller = sys._getframe(2)  # of ``short_traceback``'s
        return AsyncCall(coroutine, line, missed, (caller.f_code, caller.f_lineno))

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(call)
    return call


_Place: TypeAlias = tuple[CodeType, int]
"""A line of code."""

_dropped: dict[tuple[int, int], tuple[_Place, int]] = {}
"""The lines whose calls were not awaited, each with the number of these calls. Code objects count
by identity: a notebook's cell that runs again has an equal one.
"""


def _is_first_at(place: _Place) -> bool:
    code, line = place
    _, num_calls = _dropped.get((id(code), line), (place, 0))
    _dropped[id(code), line] = place, num_calls + 1
    return num_calls == 0


@atexit.register
def _report_dropped() -> None:
    for (code, line), num_calls in _dropped.values():
        if num_calls > 1:
            logger.error(
                "%s:%d: %d more calls were never awaited", code.co_filename, line, num_calls - 1
            )


class AsyncCall(Coroutine[Any, Any, T]):
    """A coroutine that logs an error if it is never awaited, in place of Python's RuntimeWarning:
    once for each ``place`` of code. ``send``, ``throw`` and ``close`` count as awaiting.
    """

    def __init__(
        self, coroutine: CoroutineType[Any, Any, T], line: str, missed: str, place: _Place
    ) -> None:
        self._coroutine = coroutine
        self._line = line
        self._missed = missed
        self._place = place
        self._is_awaited = False
        self._has_raised = False  # an error that says it all
        # Event loops name tasks by these.
        self.__name__ = coroutine.__name__
        self.__qualname__ = coroutine.__qualname__

    def __await__(self) -> Generator[Any, Any, T]:
        self._is_awaited = True
        return self._outcome()

    def _outcome(self) -> Generator[Any, Any, T]:
        try:
            return (yield from self._coroutine.__await__())
        except (Exception, asyncio.CancelledError) as error:
            self._shorten(error)
            raise  # without this frame

    def _shorten(self, error: BaseException) -> None:
        # anyio's cancellations are recognized by their argument
        if isinstance(error, asyncio.CancelledError) and not error.args:
            error.args = (f"{self.__qualname__}() was cancelled",)
        shorten(error)

    def send(self, value: Any, /) -> Any:
        self._is_awaited = True
        try:
            return self._coroutine.send(value)
        except StopIteration:
            raise
        except (Exception, asyncio.CancelledError) as error:
            self._shorten(error)
            raise  # without this frame

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Any:
        self._is_awaited = True
        try:
            if val is None and tb is None and isinstance(typ, BaseException):
                return self._coroutine.throw(typ)  # 3.12 deprecates the longer form
            return self._coroutine.throw(typ, val, tb)  # type: ignore[arg-type]
        except StopIteration:
            raise
        except (Exception, asyncio.CancelledError) as error:
            self._shorten(error)
            raise  # without this frame

    def close(self) -> None:
        self._is_awaited = True
        self._coroutine.close()

    def __del__(self) -> None:
        if not self._is_awaited:
            with suppress(Exception):  # maybe at interpreter exit
                text = f"{self._name()} was never awaited: {self._missed}. {self._hint()}"
                self.close()
                if not self._has_raised and _is_first_at(self._place):
                    logger.error("%s", text)

    def __repr__(self) -> str:
        if self._is_awaited:
            return f"<{self.__qualname__}()>"
        return f"<{self._name()}, which was not awaited: {self._missed}. {self._hint()}>"

    @short_traceback
    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_"):  # for ``inspect`` and debuggers
            return getattr(self._coroutine, name)
        if name.startswith("_"):
            raise AttributeError(name)
        self._has_raised = True
        raise AttributeError(
            f"{self.__qualname__}() has to be awaited before its result has {name!r}. "
            f"{self._hint()}"
        ) from None

    @short_traceback
    def __getitem__(self, key: Any) -> NoReturn:
        self._has_raised = True
        raise TypeError(
            f"{self.__qualname__}() has to be awaited before its result is read. {self._hint()}"
        ) from None

    @short_traceback
    def __bool__(self) -> NoReturn:
        self._has_raised = True
        raise TypeError(
            f"{self.__qualname__}() has to be awaited before its result is tested. {self._hint()}"
        ) from None

    def _name(self) -> str:
        frame = self._coroutine.cr_frame  # None after the end
        arguments = frame.f_locals if frame is not None else {}
        subject = ""
        if "self" in arguments:
            subject = repr(arguments["self"].path)
        elif "path" in arguments or "root" in arguments:
            path = arguments.get("path", arguments.get("root"))
            subject = repr(without_secrets(str(path)))
        return f"{self.__qualname__}({subject})"

    def _hint(self) -> str:
        name, dot, _ = self.__qualname__.partition(".")
        if name.startswith("export_"):
            return f"Write `{self._line}`, or pass a Snapshot of actorsnap.sync, without await"
        module = "actorsnap.manager.sync" if name == "CheckpointManager" else "actorsnap.sync"
        name = "Snapshot" if dot and name != "CheckpointManager" else name
        return f"Write `{self._line}`, or use `from {module} import {name}`, which needs no await"
