# SPDX-License-Identifier: Apache-2.0
"""The base of all wrappers around a storage: every verb, through one hook. And the outermost one.

A policy overrides ``around`` and, for worker threads, ``around_blocking``; or switches blocking I/O
off (``without_blocking_io``). A wrapper owns its inner storage: ``aclose`` closes both.

The outermost wrapper raises errors of actorsnap only. A backend may raise anything:
``CancelledError``, which task groups swallow; ``SystemExit``, which ends the event loop;
``KeyboardInterrupt``, which looks like Ctrl-C. Each becomes the cause of a ``StorageError``. An
answer of the wrong type is one, too.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import math
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

import anyio.lowlevel

from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    ChecksumMismatch,
    MissingPackage,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    Throttled,
    UsageError,
    attribute_of,
    describe,
)
from actorsnap.storage.base import Capabilities, ObjectInfo, ObjectWriter, Storage, ends_this_task

T = TypeVar("T")
P = ParamSpec("P")


def unwrapped(storage: Storage) -> Storage:
    """Returns the backend below all wrappers."""
    while isinstance(storage, Wrapper):
        storage = storage.inner
    return storage


class ListEnd(enum.Enum):
    """The answer after the last object of a ``list``."""

    END = enum.auto()


def without_blocking_io(capabilities: Capabilities) -> Capabilities:
    return dataclasses.replace(capabilities, has_blocking_io=False)


@asynccontextmanager
async def close_after(infos: AsyncIterator[ObjectInfo]) -> AsyncIterator[AsyncIterator[ObjectInfo]]:
    try:
        yield infos
    finally:
        if isinstance(infos, AsyncGenerator):
            await infos.aclose()


class Wrapper(Storage):
    """Passes every verb on to ``inner``, whose errors, cancellation and atomicity remain."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Awaits ``call(...)``, the verb ``op`` on ``key``; each step of a ``list`` is a call.

        Includes writers' verbs. ``call`` is not a closure over the arguments: its frame, in a
        failure's traceback, would keep the app state alive.
        """
        return await call(*args, **kwargs)

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``around`` for worker threads."""
        if not self.capabilities.has_blocking_io:
            raise NotImplementedError(f"{type(self).__name__} has no blocking I/O")
        return call(*args, **kwargs)

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return WriterWrapper(self, inner)

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self.around("put", key, self.inner.put, key, views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self.around("put_if_absent", key, self.inner.put_if_absent, key, data)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        inner = await self.around("writer", key, self.inner.writer, key, size, older=older)
        return self.wrap_writer(inner)

    async def copying_writer(
        self, key: str, size: int, *, source: Storage, sample: str
    ) -> ObjectWriter | None:
        inner = await self.around(
            "copying_writer",
            key,
            self.inner.copying_writer,
            key,
            size,
            source=source,
            sample=sample,
        )
        return None if inner is None else self.wrap_writer(inner)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        return self.wrap_writer(await self.around("join_writer", "", self.inner.join_writer, token))

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self.around("get", key, self.inner.get, key, start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self.around("read_into", key, self.inner.read_into, key, offset, views)

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        self.around_blocking("read_into", key, self.inner.read_into_blocking, key, offset, batches)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        infos: AsyncIterator[ObjectInfo] | None = None

        async def step() -> ObjectInfo | ListEnd:
            nonlocal infos
            if infos is None:
                infos = self.inner.list(prefix)
            return await anext(infos, ListEnd.END)

        try:
            while not isinstance(info := await self.around("list", prefix, step), ListEnd):
                yield info
        finally:
            if isinstance(infos, AsyncGenerator):
                await infos.aclose()

    async def delete(self, keys: Sequence[str]) -> None:
        key = keys[0] if len(keys) == 1 else ""
        await self.around("delete", key, self.inner.delete, keys)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        return await self.around("list_folders", folder, self.inner.list_folders, folder)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        return await self.around("delete_folder", folder, self.inner.delete_folder, folder)

    async def stat(self, key: str) -> ObjectInfo:
        return await self.around("stat", key, self.inner.stat, key)

    async def aclose(self) -> None:
        await self.around("aclose", "", self.inner.aclose)


class WriterWrapper(ObjectWriter):
    """Passes every verb on to ``inner``, through the hooks of ``storage``."""

    def __init__(self, storage: Wrapper, inner: ObjectWriter) -> None:
        self.storage = storage
        self.inner = inner
        self.key = inner.key
        self.size = inner.size
        self.token = inner.token

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self.storage.around("write_at", self.key, self.inner.write_at, offset, views, crc32c)

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        self.storage.around_blocking(
            "write_at", self.key, self.inner.write_at_blocking, offset, views
        )

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        return await self.storage.around("reuse", self.key, self.inner.reuse, offset, views, crc32c)

    async def copy_from(self, offset: int, key: str, start: int, stop: int) -> int | None:
        return await self.storage.around(
            "copy_from", self.key, self.inner.copy_from, offset, key, start, stop
        )

    async def complete(self) -> None:
        await self.storage.around("complete", self.key, self.inner.complete)

    async def release(self) -> None:
        await self.storage.around("release", self.key, self.inner.release)

    async def abort(self) -> None:
        await self.storage.around("abort", self.key, self.inner.abort)


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
    MissingPackage,
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
    "copying_writer": (
        lambda answer, _: answer is None or isinstance(answer, ObjectWriter),
        "an ObjectWriter or None",
    ),
    "copy_from": (lambda answer, _: answer is None or isinstance(answer, int), "a CRC32C or None"),
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
        detail += " although the call was not cancelled: was its client closed?"
    kind, retryable = StorageError, isinstance(leaf, ConnectionError | TimeoutError)
    if own is not None and issubclass(own, StorageError):
        kind, retryable = own, attribute_of(leaf, "retryable") is True
    elif isinstance(leaf, OSError):
        number = attribute_of(leaf, "errno")
        kind = _KINDS.get(number if isinstance(number, int) else None, StorageError)
    return kind(op=op, key=key, backend=backend, detail=detail, retryable=retryable)
