"""The base of all wrappers around a storage: every verb, through one hook.

A policy overrides ``around`` and, for worker threads, ``around_blocking``; or switches blocking I/O
off (``without_blocking_io``). A wrapper owns its inner storage: ``aclose`` closes both.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from actorsnap.storage.base import Capabilities, ObjectInfo, ObjectWriter, Storage

__all__ = ["ListEnd", "Wrapper", "WriterWrapper", "close_after", "without_blocking_io"]

T = TypeVar("T")
P = ParamSpec("P")


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

        Includes writers' verbs. ``call`` is no closure over the arguments: its frame, in a
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

    async def complete(self) -> None:
        await self.storage.around("complete", self.key, self.inner.complete)

    async def release(self) -> None:
        await self.storage.around("release", self.key, self.inner.release)

    async def abort(self) -> None:
        await self.storage.around("abort", self.key, self.inner.abort)
