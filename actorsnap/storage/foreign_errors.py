"""The outermost wrapper of a storage: it raises errors of actorsnap only.

A backend or a library below it may raise anything. Raised as it is, a ``CancelledError`` would pass
for a cancellation, which task groups swallow, a ``SystemExit`` would end the event loop, and a
``KeyboardInterrupt`` would look like Ctrl-C. Each becomes a ``StorageError`` with the original as
its cause, and so does an answer of the wrong type. This module must not know backends.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

import anyio
import anyio.lowlevel

from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    Throttled,
    UsageError,
    attribute_of,
    describe,
)
from actorsnap.storage.base import ObjectInfo, ObjectWriter, Storage
from actorsnap.storage.wrapper import ListEnd, Wrapper

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

_OWN: tuple[type[ActorSnapError], ...] = (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageFull,
    Throttled,
    StorageError,
    ChecksumMismatch,
    UsageError,
)
"""What a storage may raise, the narrower first. Others say what no storage can know; a class that
is derived from these may lack their fields, and other processes and ranks do not know it."""


_TEXTS = ("op", "key", "backend", "detail")
"""The fields of a ``StorageError`` that are strings."""


class TranslatedStorage(Wrapper):
    """Raises ``ActorSnapError`` and cancellations only."""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            answer = await call(*args, **kwargs)
        except BaseException as error:
            if _is_own(error):
                raise
            if ends_this_task(error):
                if isinstance(error, BaseExceptionGroup):
                    # Scopes swallow a cancellation, but no group that has it among others.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                raise
            fault = _translate(error, op=op, key=key, backend=self.url)
            raise fault from fault.__cause__ or _shown(error)
        self._check(answer, op, key)
        return answer

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if _is_own(error):
                raise
            fault = _translate(error, op=op, key=key, backend=self.url)
            raise fault from fault.__cause__ or _shown(error)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = bytes(await super().get(key, start, stop))
        if stop is not None and len(data) != stop - start:
            raise self._refusal("get", key, f"{len(data)} bytes, not {stop - start}")
        return data

    def _check(self, answer: object, op: str, key: str) -> None:
        is_right, expected = _ANSWERS.get(op, (None, ""))
        if is_right is not None and not is_right(answer, key):
            raise self._refusal(op, key, f"{type(answer).__name__}, which is not {expected}")

    def _refusal(self, op: str, key: str, what: str) -> StorageError:
        detail = f"the storage answered with {what}"
        return StorageError(op=op, key=key, backend=self.url, detail=detail)


def _is_info(answer: object, key: str) -> bool:
    return (
        isinstance(answer, ObjectInfo)
        and isinstance(answer.key, str)
        and isinstance(answer.size, int)
        and answer.size >= 0
    )


def _is_step(answer: object, prefix: str) -> bool:
    # What is listed may be deleted by the key that it has here.
    return isinstance(answer, ListEnd) or (
        isinstance(answer, ObjectInfo) and _is_info(answer, "") and answer.key.startswith(prefix)
    )


def _is_names(answer: object, folder: str) -> bool:
    return (
        isinstance(answer, Collection)
        and not isinstance(answer, str)
        and all(isinstance(name, str) for name in answer)
    )


_INFO = "an ObjectInfo with a key and a size"
_ANSWERS: Mapping[str, tuple[Callable[[object, str], bool], str]] = {
    "delete_folder": (_is_names, "a sequence of keys"),
    "get": (lambda answer, _: isinstance(answer, bytes | bytearray | memoryview), "bytes"),
    "join_writer": (lambda answer, _: isinstance(answer, ObjectWriter), "an ObjectWriter"),
    "list": (_is_step, f"{_INFO}, the key beginning with the prefix"),
    "list_folders": (_is_names, "a sequence of names"),
    "reuse": (lambda answer, _: isinstance(answer, bool), "a bool"),
    "stat": (_is_info, _INFO),
    "writer": (lambda answer, _: isinstance(answer, ObjectWriter), "an ObjectWriter"),
}
"""By verb: whether it may answer so for that key, and how it should."""


def translate_opening(url: str, opener: Callable[[], Storage]) -> TranslatedStorage:
    """Opens a storage; ``url`` is for messages.

    Raises:
        ActorSnapError: the factory's, or a ``StorageError`` in place of another exception.
        KeyboardInterrupt: in the main thread, where it may be the user's.
    """
    try:
        return TranslatedStorage(opener())
    except BaseException as error:
        if _is_own(error):
            raise
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and is_main:
            raise
        fault = _translate(error, op="open", key="", backend=url)
        raise fault from fault.__cause__ or _shown(error)


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


def _shown(error: BaseException) -> BaseException:
    """The exception, or one in its place if tracebacks of it cannot be formatted."""
    try:
        getattr(error, "__notes__", None)
    except BaseException:
        return RuntimeError(describe(error)).with_traceback(error.__traceback__)
    return error


def _is_own(error: BaseException) -> bool:
    """Whether callers, other processes and ranks get it as it is."""
    if not isinstance(error, StorageError):
        return type(error) in _OWN
    wait_s = attribute_of(error, "retry_after_s")
    return (
        type(error) in _OWN
        and all(isinstance(attribute_of(error, name), str) for name in _TEXTS)
        and isinstance(attribute_of(error, "retryable"), bool)
        and (wait_s is None or (isinstance(wait_s, int | float) and 0 <= wait_s < math.inf))
    )


def _translate(error: BaseException, *, op: str, key: str, backend: str) -> ActorSnapError:
    """What a backend's exception is raised as."""
    leaf = error
    while isinstance(leaf, BaseExceptionGroup):
        ours = leaf.subgroup(_is_own)
        leaf = (ours or leaf).exceptions[0]
    if isinstance(leaf, ActorSnapError) and _is_own(leaf):
        return leaf
    detail = f"the storage raised {describe(leaf)}"
    own = next((kind for kind in _OWN if isinstance(leaf, kind)), None)
    if own is ChecksumMismatch:
        return ChecksumMismatch(key=key, detail=detail)
    if own is UsageError:
        return UsageError(detail)
    if type(leaf).__name__ == "CancelledError":
        detail += " although nobody cancelled the call: was its client closed?"
    retryable: bool | None = isinstance(leaf, ConnectionError | TimeoutError) or None
    kind = StorageError
    if own is not None and issubclass(own, StorageError):
        kind, retryable = own, attribute_of(leaf, "retryable") is True
    elif isinstance(leaf, OSError):
        number = attribute_of(leaf, "errno")
        kind = _KINDS.get(number if isinstance(number, int) else None, StorageError)
    return kind(op=op, key=key, backend=backend, detail=detail, retryable=retryable)
