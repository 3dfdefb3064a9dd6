"""The return value of public async functions: a coroutine that reports a missing ``await``.

``Snapshot(path).restore(app_state)`` without ``await`` restores nothing, and Python only warns
about a coroutine. An ``AsyncCall`` is accepted wherever a coroutine is. Its messages show the
correct line of code.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from types import CoroutineType, TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from actorsnap.log import Log
from actorsnap.storage.registry import without_secrets

__all__ = ["AsyncCall", "async_call", "how_to_await"]

logger = Log(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_SNAPSHOT = "actorsnap.Snapshot(...)"
_CALLS = {
    "warm_up": ("await actorsnap.warm_up(...)", "nothing was prepared"),
    "Snapshot.take": ("snapshot = await actorsnap.Snapshot.take(...)", "nothing was saved"),
    "Snapshot.async_take": (
        "pending = await actorsnap.Snapshot.async_take(...)",
        "nothing was saved",
    ),
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
    "Snapshot.verify": (f"report = await {_SNAPSHOT}.verify()", "nothing was verified"),
    "Snapshot.copy_to": (f"report = await {_SNAPSHOT}.copy_to(...)", "nothing was copied"),
    "Snapshot.recover": (f"report = await {_SNAPSHOT}.recover()", "nothing was recovered"),
    "Snapshot.delete": (f"await {_SNAPSHOT}.delete()", "nothing was deleted"),
    "PendingSnapshot.staged": ("await pending.staged()", "nothing was waited for"),
    "PendingSnapshot.wait": ("snapshot = await pending.wait()", "nothing was waited for"),
    "PendingSnapshot.events": ("async for progress in pending.events():", ""),
}
"""The correct line of code, and the effect of a missing ``await``, by qualified name."""


def how_to_await(name: str) -> str:
    """Returns the line of async code for the public call ``name``."""
    return _CALLS[name][0]


def async_call(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Makes an ``async def`` return an ``AsyncCall``.

    Keeps signature and docstring. From Python 3.12 on, ``inspect.iscoroutinefunction`` returns true
    for the result; 3.11 cannot mark it.
    """
    line, missed = _CALLS[function.__qualname__]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        coroutine = cast("CoroutineType[Any, Any, T]", function(*args, **kwargs))
        return AsyncCall(coroutine, line, missed)

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(call)
    return call


class AsyncCall(Coroutine[Any, Any, T]):
    """A coroutine that reports if it is dropped without being awaited.

    It logs an error in place of Python's RuntimeWarning. ``send``, ``throw`` and ``close`` count as
    awaiting.
    """

    def __init__(self, coroutine: CoroutineType[Any, Any, T], line: str, missed: str) -> None:
        self._coroutine = coroutine
        self._line = line
        self._missed = missed
        self._is_awaited = False
        # Event loops use these as task names.
        self.__name__ = coroutine.__name__
        self.__qualname__ = coroutine.__qualname__

    def __await__(self) -> Generator[Any, Any, T]:
        self._is_awaited = True
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        self._is_awaited = True
        return self._coroutine.send(value)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Any:
        self._is_awaited = True
        if val is None and tb is None and isinstance(typ, BaseException):
            return self._coroutine.throw(typ)  # Python 3.12 deprecates the longer form
        return self._coroutine.throw(typ, val, tb)  # type: ignore[arg-type]

    def close(self) -> None:
        self._is_awaited = True
        self._coroutine.close()

    def __del__(self) -> None:
        if not self._is_awaited:
            with suppress(Exception):  # possibly at interpreter exit
                text = f"{self._name()} was never awaited: {self._missed}. {self._hint()}"
                self.close()
                logger.error("%s", text)

    def __repr__(self) -> str:
        if self._is_awaited:
            return f"<{self.__qualname__}()>"
        return f"<{self._name()}, which was not awaited: {self._missed}. {self._hint()}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_"):  # read by ``inspect.getcoroutinestate`` and debuggers
            return getattr(self._coroutine, name)
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__qualname__}() has to be awaited before its result has {name!r}. "
            f"{self._hint()}"
        )

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(
            f"{self.__qualname__}() has to be awaited before its result is read. {self._hint()}"
        )

    def _name(self) -> str:
        frame = self._coroutine.cr_frame  # None once the coroutine has ended
        arguments = frame.f_locals if frame is not None else {}
        subject = ""
        if "self" in arguments:
            subject = repr(arguments["self"].path)
        elif "path" in arguments:
            subject = repr(without_secrets(str(arguments["path"])))
        return f"{self.__qualname__}({subject})"

    def _hint(self) -> str:
        name = "Snapshot" if "." in self.__qualname__ else self.__qualname__
        return (
            f"Write `{self._line}`, or use `from actorsnap.sync import {name}` in a script without "
            "asyncio"
        )
