# SPDX-License-Identifier: Apache-2.0
"""Storage in this process's memory: ``memory://name/some/prefix``.

A space is shared by all instances with its name, from any thread and event loop. No blocking I/O,
so that callers take their async path.

To find callers' mistakes, ``write_at`` refuses a wrong CRC32C, and ``complete`` missing bytes and
writes that break the capabilities.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from anyio.lowlevel import checkpoint

from actorsnap.errors import ObjectExists, ObjectNotFound, UsageError
from actorsnap.format.checksum import crc32c_of
from actorsnap.storage.base import (
    BackendWriter,
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
    check_no_options,
    check_range,
    check_size,
    copy_into,
    flat,
    num_bytes,
    range_end,
    truncated,
)


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes | bytearray
    modified_s: float


@dataclass(slots=True)
class _Upload:
    """An object that a writer has not completed; ``full`` is its key in the space."""

    key: str
    full: str
    buffer: bytearray
    older: list[bytes | bytearray] = field(default_factory=list)
    ranges: set[tuple[int, int]] = field(default_factory=set)

    def num_written(self) -> int:
        """Returns the number of bytes before the first missing one."""
        position = 0
        for start, stop in sorted(self.ranges):
            if start > position:
                break
            position = max(position, stop)
        return position


@dataclass(slots=True)
class _Space:
    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[bytes, _Upload] = field(default_factory=dict)


_CAPABILITIES = Capabilities(checks_crc32c=True)

_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


def _space(name: str) -> _Space:
    with _spaces_lock:
        return _spaces.setdefault(name, _Space())


def forget_space(name: str) -> None:
    """Frees all objects of ``memory://name``. Open instances keep seeing them."""
    with _spaces_lock:
        _spaces.pop(name, None)


def open_memory(url: str, context: StorageContext) -> MemoryStorage:
    check_no_options(context, "memory://")
    place = url.removeprefix("memory://").rstrip("/")
    if not place:
        raise UsageError("memory:// needs a name: memory://name or memory://name/prefix")
    name, _, prefix = check_key(place).partition("/")
    return MemoryStorage(name, prefix)


class MemoryStorage(Storage):
    """Objects in a dict, under a prefix of a named space.

    All effects are atomic, after the only checkpoint of a call: a cancelled call has done nothing.
    ``capabilities`` are claimed and enforced, so that tests can try other backends' rules.
    """

    def __init__(
        self, name: str, prefix: str = "", *, capabilities: Capabilities = _CAPABILITIES
    ) -> None:
        self.url = f"memory://{name}/{prefix}".rstrip("/")
        self.capabilities = capabilities
        self._space = _space(name)
        self._prefix = f"{prefix}/" if prefix else ""

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        full = self._prefix + check_key(key)
        await checkpoint()
        data = b"".join(flat(views))
        with self._space.lock:
            self._space.objects[full] = _Object(data, time.time())

    async def put_if_absent(self, key: str, data: bytes) -> None:
        full = self._prefix + check_key(key)
        await checkpoint()
        value = _Object(bytes(data), time.time())
        with self._space.lock:
            if self._space.objects.setdefault(full, value) is not value:
                self._raise_exists("put_if_absent", key)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Opens a new object. Completes unfinished ``older`` ones: their writers end."""
        full = self._prefix + check_key(key)
        check_size(size)
        await checkpoint()
        token = secrets.token_bytes(16)
        upload = _Upload(key, full, bytearray(size))
        with self._space.lock:
            if full in self._space.objects:
                self._raise_exists("writer", key)
            for name in older:
                self._complete_older(self._prefix + check_key(name))
                older_object = self._space.objects.get(self._prefix + name)
                if older_object is not None:
                    upload.older.append(older_object.data)
            self._space.uploads[token] = upload
        return _MemoryWriter(self, upload, token, is_opener=True)

    def _complete_older(self, full: str) -> None:
        """Makes an object of its unfinished writers' leading bytes; ends them."""
        for token, upload in list(self._space.uploads.items()):
            if upload.full == full:
                del self._space.uploads[token]
                data = bytes(memoryview(upload.buffer)[: upload.num_written()])
                self._space.objects.setdefault(full, _Object(data, time.time()))

    async def join_writer(self, token: bytes) -> ObjectWriter:
        if not self.capabilities.has_joined_writers:
            raise UsageError(f"{self.url} has one writer per object")
        await checkpoint()
        with self._space.lock:
            upload = self._space.uploads.get(token)
        if upload is None:
            raise ObjectNotFound(
                op="join_writer", key="", backend=self.url, detail="no such writer is open"
            )
        return _MemoryWriter(self, upload, token, is_opener=False)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        data = (await self._find("get", key)).data
        return bytes(memoryview(data)[start : range_end(key, start, stop, len(data))])

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        check_range(offset, None)
        data = (await self._find("read_into", key)).data
        wanted = num_bytes(views)
        if wanted and offset + wanted > len(data):
            raise truncated(key, offset + wanted, len(data))
        copy_into(memoryview(data)[offset : offset + wanted], views)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await checkpoint()
        skip = len(self._prefix)
        with self._space.lock:
            infos = [
                ObjectInfo(key=key[skip:], size=len(value.data), modified_s=value.modified_s)
                for key, value in self._space.objects.items()
                if key.startswith(self._prefix + prefix)
            ]
        for info in sorted(infos, key=lambda info: info.key):
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        full = [self._prefix + check_key(key) for key in keys]
        await checkpoint()
        with self._space.lock:
            for key in full:
                self._space.objects.pop(key, None)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        await checkpoint()
        start = self._prefix + (f"{check_key(folder)}/" if folder else "")
        with self._space.lock:
            keys = [*self._space.objects, *[each.full for each in self._space.uploads.values()]]
        below = [key.removeprefix(start) for key in keys if key.startswith(start)]
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    async def delete_folder(self, folder: str) -> Sequence[str]:
        start = f"{self._prefix}{check_key(folder)}/"
        await checkpoint()
        with self._space.lock:
            objects, uploads = self._space.objects, self._space.uploads
            keys = [key for key in objects if key.startswith(start)]
            tokens = [token for token, each in uploads.items() if each.full.startswith(start)]
            for key in keys:
                del objects[key]
            keys += [uploads.pop(token).full for token in tokens]
        return [key.removeprefix(self._prefix) for key in keys]

    async def stat(self, key: str) -> ObjectInfo:
        value = await self._find("stat", key)
        return ObjectInfo(key=key, size=len(value.data), modified_s=value.modified_s)

    async def aclose(self) -> None:
        """Does nothing: the space outlives its instances."""

    async def _find(self, op: str, key: str) -> _Object:
        full = self._prefix + check_key(key)
        await checkpoint()
        with self._space.lock:
            value = self._space.objects.get(full)
        if value is None:
            raise ObjectNotFound(op=op, key=key, backend=self.url, detail="no such object")
        return value

    def _raise_exists(self, op: str, key: str) -> NoReturn:
        raise ObjectExists(op=op, key=key, backend=self.url, detail="the object exists already")


class _MemoryWriter(BackendWriter):
    def __init__(
        self, storage: MemoryStorage, upload: _Upload, token: bytes, *, is_opener: bool
    ) -> None:
        size = len(upload.buffer)
        super().__init__(upload.key, size, token, url=storage.url, is_opener=is_opener)
        self._storage = storage
        self._space = storage._space
        self._upload = upload

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        stop = self._check_write(offset, views)
        await checkpoint()
        is_checked = crc32c is not None and self._storage.capabilities.checks_crc32c
        if is_checked and crc32c_of(flat(views)) != crc32c:
            detail = f"[{offset}, {stop}) does not have the CRC32C that came with it"
            raise self._error("write_at", detail, retryable=True)
        with self._space.lock:
            self._require_open("write_at")
            self._upload.ranges.add((offset, stop))
        # Without the lock: ranges are disjoint, and a copy may be long.
        for view in flat(views):
            self._upload.buffer[offset : offset + view.nbytes] = view
            offset += view.nbytes

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        stop = offset + num_bytes(views)
        await checkpoint()
        with self._space.lock:
            self._require_open("reuse")
        for data in self._upload.older:
            older = memoryview(data)[offset:stop]
            if len(older) == stop - offset and crc32c_of([older]) == crc32c:
                self._upload.buffer[offset:stop] = older
                self._upload.ranges.add((offset, stop))
                return True
        return False

    async def complete(self) -> None:
        self._require_opener()
        await checkpoint()
        with self._space.lock:
            self._require_open("complete")
            fault = self._fault()
            if fault:
                raise self._error("complete", fault)
            value = _Object(self._upload.buffer, time.time())
            if self._space.objects.setdefault(self._upload.full, value) is not value:
                self._storage._raise_exists("complete", self.key)
            del self._space.uploads[self.token]

    def _fault(self) -> str:
        least_bytes = self._storage.capabilities.least_write_bytes(self.size)
        position = self._upload.num_written()
        for start, stop in sorted(self._upload.ranges):
            if stop - start < least_bytes and stop < self.size:
                return f"[{start}, {stop}) is less than {least_bytes} bytes"
        return f"byte {position} of {self.size} was never written" if position < self.size else ""

    async def abort(self) -> None:
        # No checkpoint: an abort must have its effect under cancellation.
        if self._is_opener:
            with self._space.lock:
                self._space.uploads.pop(self.token, None)

    def _require_open(self, op: str) -> None:
        if self._has_ended or self._space.uploads.get(self.token) is not self._upload:
            raise self._ended(op)
