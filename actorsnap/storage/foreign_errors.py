"""The outermost wrapper of a storage: it raises errors of actorsnap only.

A backend may raise anything: ``CancelledError``, which task groups swallow; ``SystemExit``, which
ends the event loop; ``KeyboardInterrupt``, which looks like Ctrl-C. Each becomes the cause of a
``StorageError``. So does an answer of the wrong type.
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
only a backend's own ``ObjectNotFound`` or ``ObjectExists`` counts."""

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
"""Errors that a storage may raise, the narrower first. A derived class may lack their fields, and
other processes cannot decode it."""


class TranslatedStorage(Wrapper):
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
                    # Scopes swallow a cancellation alone, but not in a group.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                raise
            fault = _translate(error, op=op, key=key, backend=self.url)
            raise fault from fault.__cause__
        is_right, expected = _ANSWERS.get(op, (None, ""))
        if is_right is not None and not is_right(answer, key):
            raise self._refusal(op, key, f"{type(answer).__name__}, which is not {expected}")
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
            raise fault from fault.__cause__

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = bytes(await super().get(key, start, stop))
        if stop is not None and len(data) != stop - start:
            raise self._refusal("get", key, f"{len(data)} bytes, not {stop - start}")
        return data

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
    # A listed object may be deleted by this key.
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
"""By verb: a test of its answer for a key, and the expected one."""


def translate_opening(url: str, opener: Callable[[], Storage]) -> TranslatedStorage:
    """Opens a storage; ``url`` is for messages.

    Raises:
        KeyboardInterrupt: In the main thread, where it may be the user's.
    """
    try:
        return TranslatedStorage(opener())
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if _is_own(error) or (isinstance(error, KeyboardInterrupt) and is_main):
            raise
        fault = _translate(error, op="open", key="", backend=url)
        raise fault from fault.__cause__


def ends_this_task(error: BaseException) -> bool:
    """Whether an exception ends its coroutine: the task was cancelled or is being closed.

    Other ``CancelledError`` are failures: aiohttp raises one when its session is closed.
    """
    if isinstance(error, Exception):
        return False
    if isinstance(error, GeneratorExit) and not _runs_in_a_task():
        return True  # garbage collection of an unfinished coroutine
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        is_cancelled = error.subgroup(cancelled) is not None
    else:
        is_cancelled = isinstance(error, cancelled)
    return is_cancelled and anyio.current_effective_deadline() == -math.inf


def _runs_in_a_task() -> bool:
    try:
        anyio.get_current_task()
    except (AttributeError, RuntimeError):  # no task, no event loop
        return False
    return True


def _translate(error: BaseException, *, op: str, key: str, backend: str) -> ActorSnapError:
    """Returns actorsnap's error for another exception, its cause."""
    own = _own_error(error, op=op, key=key, backend=backend)
    if own.__cause__ is None:
        own.__cause__ = error
        try:
            getattr(error, "__notes__", None)
        except BaseException:  # no traceback can be formatted
            stand_in = RuntimeError(describe(error))
            own.__cause__ = stand_in.with_traceback(error.__traceback__)
    return own


def _is_own(error: BaseException) -> bool:
    """Whether it is raised unchanged."""
    if not isinstance(error, StorageError):
        return type(error) in _OWN
    wait_s = attribute_of(error, "retry_after_s")
    return (
        type(error) in _OWN
        and all(isinstance(attribute_of(error, name), str) for name in ("op", "key", "backend"))
        and isinstance(attribute_of(error, "detail"), str)
        and isinstance(attribute_of(error, "retryable"), bool)
        and (wait_s is None or (isinstance(wait_s, int | float) and 0 <= wait_s < math.inf))
    )


def _own_error(error: BaseException, *, op: str, key: str, backend: str) -> ActorSnapError:
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
    kind, retryable = StorageError, isinstance(leaf, ConnectionError | TimeoutError)
    if own is not None and issubclass(own, StorageError):
        kind, retryable = own, attribute_of(leaf, "retryable") is True
    elif isinstance(leaf, OSError):
        number = attribute_of(leaf, "errno")
        kind = _KINDS.get(number if isinstance(number, int) else None, StorageError)
    return kind(op=op, key=key, backend=backend, detail=detail, retryable=retryable)
