# SPDX-License-Identifier: Apache-2.0
"""Shows Zstandard streams of other programs as what they hold, for leaves inside of them."""

from __future__ import annotations

import errno
import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import anyio
import msgspec

from actorsnap.errors import ChecksumMismatch, FormatError, StorageError, StorageFull
from actorsnap.format.compression import ZstdStream
from actorsnap.storage.base import (
    ObjectInfo,
    RunBlocking,
    Storage,
    check_range,
    flat,
    num_bytes,
    range_end,
    truncated,
)
from actorsnap.storage.wrapper import Wrapper, without_blocking_io

if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_BYTES = 4 << 20
"""Of a stream, at a time."""

_MAX_FILES = 16
"""Temporary files that stay for later reads: reads go through the objects in order."""

_MAX_VIEWS = 1024
"""Of one system call: Linux's limit."""

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""Returns bytes ``[start, stop)``. Blocks."""


class Packed(msgspec.Struct, frozen=True):
    """An object that is a Zstandard stream.

    Attributes:
        name: What it holds, for errors.
        num_packed: Bytes of the stream.
        size: Bytes that can be read, from the beginning of what it holds.
        max_bytes: The most that it may hold.
    """

    name: str
    num_packed: int
    size: int
    max_bytes: int

    @abstractmethod
    def check(self, read: ReadAt, nbytes: int) -> None:
        """Checks the ``nbytes`` unpacked bytes. Blocks.

        Raises:
            FormatError: They differ from the index.
        """


class UnpackedStorage(Wrapper):
    """Shows what is in the objects ``packed`` of ``inner``.

    The first read of an object unpacks all of it into a temporary file without a name. The last
    ``_MAX_FILES`` of these serve later reads; ``aclose`` deletes them.
    """

    def __init__(
        self, inner: Storage, packed: Mapping[str, Packed], run_blocking: RunBlocking
    ) -> None:
        super().__init__(inner)
        # A thread that waits for another's unpacking would be lost to others.
        self.capabilities = without_blocking_io(inner.capabilities)
        self._packed = packed
        self._run_blocking = run_blocking
        self._locks: dict[str, anyio.Lock] = {}
        self._files: dict[str, _File] = {}

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key not in self._packed:
            return await super().get(key, start, stop)
        check_range(start, stop)
        data = bytearray(range_end(key, start, stop, self._packed[key].size) - start)
        await self.read_into(key, start, [memoryview(data)])
        return bytes(data)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Cancellation: an unpacking that was begun is undone; the next reader begins it again."""
        if key not in self._packed:
            await super().read_into(key, offset, views)
            return
        range_end(key, offset, offset + num_bytes(views), self._packed[key].size)
        async with self._locks.setdefault(key, anyio.Lock()):
            file = self._files.pop(key, None) or await self._unpack(key)
            self._files[key] = file  # the last one used
            file.num_readers += 1
        try:
            await self._run_blocking(file.read_into, offset, views)
        finally:
            file.num_readers -= 1
        idle = [name for name, held in self._files.items() if not held.num_readers]
        oldest = idle[: max(0, len(self._files) - _MAX_FILES)]
        for file in [self._files.pop(name) for name in oldest]:
            await self._close(file)

    async def stat(self, key: str) -> ObjectInfo:
        info = await super().stat(key)
        if key not in self._packed:
            return info
        size = self._packed[key].size
        return ObjectInfo(key=key, size=size, modified_s=info.modified_s)

    async def aclose(self) -> None:
        while self._files:
            await self._close(self._files.popitem()[1])
        await super().aclose()

    async def _unpack(self, key: str) -> _File:
        """Returns a file with all that a stream holds.

        Raises:
            ChecksumMismatch: The stream is damaged, or holds something else.
            StorageFull: There is no space for the file.
        """
        packed = self._packed[key]
        stream = ZstdStream(packed.name, packed.max_bytes)
        file = await self._run_blocking(_File, key, packed)
        try:
            for start in range(0, packed.num_packed, _READ_BYTES):
                stop = min(start + _READ_BYTES, packed.num_packed)
                data = await super().get(key, start, stop)
                await self._run_blocking(file.append, stream, data)
            await self._run_blocking(file.check, stream)
        except BaseException:
            await self._close(file)
            raise
        return file

    async def _close(self, file: _File) -> None:
        with anyio.CancelScope(shield=True):
            await self._run_blocking(file.close)


class _File:
    """A temporary file, which vanishes with its descriptor. All methods block."""

    def __init__(self, key: str, packed: Packed) -> None:
        self.num_readers = 0
        self._key = key
        self._packed = packed
        self._size = 0
        with self._explaining():
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # see close

    def append(self, stream: ZstdStream, data: bytes) -> None:
        with self._explaining():
            for part in stream.feed(data):
                left = memoryview(part)
                while left:
                    written = os.pwrite(self._file.fileno(), left, self._size)
                    self._size += written
                    left = left[written:]

    def check(self, stream: ZstdStream) -> None:
        with self._explaining():
            stream.end()
            if self._size < self._packed.size:
                raise truncated(self._key, self._packed.size, self._size)
            self._packed.check(self._read, self._size)

    def read_into(self, offset: int, views: Sequence[memoryview]) -> None:
        left = flat(views)
        while left:
            nbytes = os.preadv(self._file.fileno(), left[:_MAX_VIEWS], offset)
            if not nbytes:
                raise truncated(self._key, offset + num_bytes(left), offset)
            offset += nbytes
            while left and nbytes >= len(left[0]):
                nbytes -= len(left.pop(0))
            if nbytes:
                left[0] = left[0][nbytes:]

    def close(self) -> None:
        self._file.close()

    def _read(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self.read_into(start, [memoryview(data)])
        return bytes(data)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Translates what the temporary file or its content raises."""
        name = self._packed.name
        try:
            yield
        except FormatError as error:
            raise ChecksumMismatch(key=self._key, detail=f"{name}: {error.detail}") from error
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise (StorageFull if is_full else StorageError)(
                op="read_into",
                key=self._key,
                backend=tempfile.gettempdir(),
                detail=f"{name} is compressed: its {self._packed.size} bytes are unpacked into a "
                f"temporary file in {tempfile.gettempdir()}, where {error}. Free space there, or "
                "set TMPDIR to another folder",
            ) from error
