"""The outermost wrapper of a storage: it raises errors of actorsnap only.

A backend or a library below it may raise anything. Raised as it is, a ``CancelledError`` would pass
for a cancellation, which task groups swallow, a ``SystemExit`` would end the event loop, and a
``KeyboardInterrupt`` would look like Ctrl-C. Each becomes a ``StorageError`` with the original as
its cause. This module must not know backends.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import anyio

from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    StorageError,
    StorageFull,
    describe,
)
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import Wrapper

__all__ = ["TranslatedStorage", "ends_this_task", "translate_opening"]

T = TypeVar("T")
P = ParamSpec("P")

_KINDS: dict[int | None, type[StorageError]] = {
    errno.EACCES: AccessDenied,
    errno.EDQUOT: StorageFull,
    errno.ENOSPC: StorageFull,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
}
"""Errors by ``OSError.errno``. Without ENOENT and EEXIST: saves act on the existence of objects, so
only a backend's own ``ObjectNotFound`` or ``ObjectExists`` counts.
"""


class TranslatedStorage(Wrapper):
    """Raises ``ActorSnapError`` and cancellations only."""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await call(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, ActorSnapError) or ends_this_task(error):
                raise
            fault = _translate(error, op=op, key=key, backend=self.url)
            raise fault from fault.__cause__ or error

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return call(*args, **kwargs)
        except ActorSnapError:
            raise
        except BaseException as error:
            fault = _translate(error, op=op, key=key, backend=self.url)
            raise fault from fault.__cause__ or error


def translate_opening(url: str, opener: Callable[[], Storage]) -> TranslatedStorage:
    """Opens a storage; ``url`` is for messages.

    Raises:
        ActorSnapError: the factory's, or a ``StorageError`` in place of another exception.
        KeyboardInterrupt: in the main thread, where it may be the user's.
    """
    try:
        return TranslatedStorage(opener())
    except ActorSnapError:
        raise
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and is_main:
            raise
        fault = _translate(error, op="open", key="", backend=url)
        raise fault from fault.__cause__ or error


def ends_this_task(error: BaseException) -> bool:
    """Returns whether an exception ends its coroutine: the task was cancelled or is being closed.

    Any other ``CancelledError`` is a failure: aiohttp raises one in a request whose session is
    closed, and so does a future that its owner cancels.
    """
    if isinstance(error, Exception):
        return False
    if isinstance(error, GeneratorExit) and not _runs_in_a_task():
        return True  # the garbage collector closes a coroutine that never ended
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        found = error.subgroup(cancelled) is not None
    else:
        found = isinstance(error, cancelled)
    return found and anyio.current_effective_deadline() == -math.inf


def _runs_in_a_task() -> bool:
    try:
        anyio.get_current_task()
    except (AttributeError, RuntimeError):  # no task, no event loop
        return False
    return True


def _translate(error: BaseException, *, op: str, key: str, backend: str) -> ActorSnapError:
    """Returns the error of actorsnap for a backend's exception."""
    leaf = error
    while isinstance(leaf, BaseExceptionGroup):
        ours = leaf.subgroup(ActorSnapError)
        leaf = (ours or leaf).exceptions[0]
    if isinstance(leaf, ActorSnapError):
        return leaf
    detail = f"the storage raised {describe(leaf)}"
    if type(leaf).__name__ == "CancelledError":
        detail += " although nobody cancelled the call: was its client closed?"
    kind = StorageError
    if isinstance(leaf, OSError):
        kind = _KINDS.get(leaf.errno, StorageError)
    return kind(
        op=op,
        key=key,
        backend=backend,
        detail=detail,
        retryable=isinstance(leaf, ConnectionError | TimeoutError) or None,
    )
