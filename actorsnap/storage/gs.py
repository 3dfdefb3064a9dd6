# SPDX-License-Identifier: Apache-2.0
"""Storage in a bucket of Google Cloud Storage: ``gs://bucket/some/prefix`` or ``gcs://``.

- A key's object is named ``prefix/key``. ``put_if_absent`` and writers create with
  ``ifGenerationMatch=0``.
- An object that its opener writes at once is one upload. Else each write is an object, a
  *component*, and ``complete`` composes them: 32 at a time, more by a tree. Components are named by
  their offset, in the folder ``<name>.<nonce>.parts``: the opener lists those of joined writers,
  and deleting the folder of a key deletes them.
- Opening and joining writers takes no request without ``older`` objects. A write after the ending
  is invisible: a component in that folder.
- Each upload sends its CRC32C, and the answer has the one that the service found. That of a
  composed object must equal the combination of its components'.
- Components have the class STANDARD: others charge for objects that are deleted early.
- A writer with ``older`` objects, and its joined writers, list leftovers with sizes and CRC32C, and
  copy each component or object with exactly the bytes of one write. A range cannot be copied: an
  older object that was composed, and whose components were deleted, is of no use.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import anyio
import anyio.lowlevel
import msgspec

from actorsnap.errors import ObjectExists, StorageError, UsageError
from actorsnap.format.checksum import combine
from actorsnap.log import Log
from actorsnap.storage.base import (
    CLEANUP_S,
    BackendWriter,
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
    check_range,
    check_size,
    flat,
    truncated,
    try_each,
)
from actorsnap.storage.gs_client import GsClient, GsOptions, NewObject, Resource
from actorsnap.storage.network import add_policies, convert_options, split_url
from actorsnap.storage.wrapper import unwrapped

logger = Log(__name__)

_MIN_WRITE_BYTES = 1 << 20
"""Smaller writes only make the tree of composing deeper."""

_MAX_SOURCES = 32
_COMPONENT_CLASS = "STANDARD"
# Tries to delete components.
_CLEANUP_TRIES = 3

Sources: TypeAlias = Mapping[tuple[int, int, int], str]
"""Names of leftovers, by offset in the object, size and CRC32C."""


_MAX_OBJECT_BYTES = 5 << 40
_BUCKET_PATTERN = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"


def open_gs(url: str, context: StorageContext) -> Storage:
    """Connects on first use. Options: ``GsOptions``."""
    options = convert_options(context.options, GsOptions, scheme="gs")
    bucket, prefix = split_url(url, _BUCKET_PATTERN)
    return add_policies(GsStorage(bucket, prefix, options, context), options, context)


class GsUpload(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The state shared by the writers of one object; encoded, it is the token.

    ``nonce`` is in the name of the components' folder; ``older`` has keys.
    """

    key: str
    size: int
    nonce: str
    older: tuple[str, ...] = ()


class GsStorage(Storage):
    """Objects below a prefix of one bucket. The module's docstring has the rules.

    Cancellation: at once; the request may have had its effect.
    """

    def __init__(
        self, bucket: str, prefix: str, options: GsOptions, context: StorageContext
    ) -> None:
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self.capabilities = Capabilities(
            min_write_bytes=_MIN_WRITE_BYTES, max_object_bytes=_MAX_OBJECT_BYTES, checks_crc32c=True
        )
        self._client = GsClient(bucket, self.url, options, context)
        self._prefix = f"{prefix}/" if prefix else ""
        self._class = options.storage_class

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        new = NewObject(name=self._name(key), storage_class=self._class)
        await self._client.upload("put", key, new, views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Atomicity: by a precondition that the service checks."""
        new = NewObject(name=self._name(key), storage_class=self._class, if_absent=True)
        await self._client.upload("put_if_absent", key, new, [memoryview(data)])

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Opens a new object. An existing one is detected on creation."""
        check_size(size)
        nonce = secrets.token_hex(8)
        upload = GsUpload(key=check_key(key), size=size, nonce=nonce, older=tuple(older))
        return await self._open_writer(upload, is_opener=True)

    async def copying_writer(
        self, key: str, size: int, *, source: Storage, sample: str
    ) -> ObjectWriter | None:
        """Copies whole objects, between buckets that are opened with the same options."""
        check_size(size)
        origin = unwrapped(source)
        if not isinstance(origin, GsStorage) or origin._client.options != self._client.options:
            return None
        await anyio.lowlevel.checkpoint()
        upload = GsUpload(key=check_key(key), size=size, nonce=secrets.token_hex(8))
        name = self._name(key)
        return GsWriter(self._client, upload, name, sources={}, is_opener=True, origin=origin)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        return await self._open_writer(
            msgspec.msgpack.decode(token, type=GsUpload), is_opener=False
        )

    async def _open_writer(self, upload: GsUpload, *, is_opener: bool) -> ObjectWriter:
        await anyio.lowlevel.checkpoint()
        names = [self._name(key) for key in upload.older]
        sources = await _find_sources(self._client, upload.key, names)
        name = self._name(upload.key)
        return GsWriter(self._client, upload, name, sources=sources, is_opener=is_opener)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Compares a whole object with its CRC32C."""
        check_range(start, stop)
        name = self._name(key)
        data = None if start == stop else await self._client.download("get", key, name, start, stop)
        if data is None:
            # The service reports only that there is no such byte.
            if (await self._client.stat("get", key, name)).size < max(start, stop or 0):
                raise truncated(key, max(start, stop or 0))
            return b""
        if stop is not None and len(data) != stop - start:
            raise truncated(key, stop)
        return data

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        check_range(offset, None)
        name = self._name(key)
        targets = flat(views)
        if targets:
            await self._client.read_into("read_into", key, name, offset, targets)
        else:
            await self._client.stat("read_into", key, name)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields objects in key order, including open writers' components. Read-after-write."""
        skip = len(self._prefix)
        async for page in self._client.pages("list", prefix, self._prefix + prefix):
            for resource in page.resources:
                if not resource.name.endswith("/"):  # some tools make these for folders
                    yield ObjectInfo(
                        key=resource.name[skip:], size=resource.size, modified_s=resource.modified_s
                    )

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes up to 100 objects per request. All are tried. Cancellation: some are deleted."""
        await self._client.delete("delete", {self._name(key): key for key in keys})

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        start = self._prefix + (f"{check_key(folder)}/" if folder else "")
        folders: set[str] = set()
        async for page in self._client.pages("list", folder, start, delimiter="/"):
            folders.update(name.removeprefix(start).rstrip("/") for name in page.folders)
        return sorted(folders)

    async def stat(self, key: str) -> ObjectInfo:
        resource = await self._client.stat("stat", key, self._name(key))
        return ObjectInfo(key=key, size=resource.size, modified_s=resource.modified_s)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)


async def _find_sources(client: GsClient, key: str, names: Sequence[str]) -> Sources:
    """Returns leftovers of dead writers of ``names``, the newest first; a request per object."""
    sources: dict[tuple[int, int, int], str] = {}
    for name in names:
        try:
            async for page in client.pages("writer", key, name):
                for each in page.resources:
                    part = re.fullmatch(
                        r"|\.[0-9a-f]{16}\.parts/([0-9a-f]{16})", each.name.removeprefix(name)
                    )
                    if part is not None:
                        offset = int(part[1] or "0", 16)
                        sources.setdefault((offset, each.size, each.crc32c), each.name)
        except StorageError as error:
            if error.retryable:
                raise
            logger.info("%s: %s is not resumed: %s", client.url, name, error)
    return sources


class GsWriter(BackendWriter):
    """One object, or components of a future one. States: open -> composed -> ended."""

    def __init__(
        self,
        client: GsClient,
        upload: GsUpload,
        name: str,
        *,
        sources: Sources,
        is_opener: bool,
        origin: GsStorage | None = None,
    ) -> None:
        token = msgspec.msgpack.encode(upload)
        super().__init__(upload.key, upload.size, token, url=client.url, is_opener=is_opener)
        self._client = client
        self._name = name
        self._folder = f"{name}.{upload.nonce}.parts/"
        self._sources = sources
        self._origin = origin
        self._stored: dict[int, Resource] = {}  # by this writer, by offset
        self._leftovers: set[str] = set()  # known components
        self._has_begun = False  # the object may exist
        self._is_made = False
        self._num_cleanups = 0

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        num = self._check_write(offset, views) - offset
        if not num:
            return
        upload = partial(self._client.upload, "write_at", self.key, views=views, crc=crc32c)
        self._stored[offset] = await self._store(offset, num, upload)

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        num = self._check_write(offset, views) - offset
        source = self._sources.get((offset, num, crc32c))
        if source is None:
            return False
        copy = partial(self._client.copy, "reuse", self.key, source=source)
        try:
            copied = await self._store(offset, num, copy)
        except StorageError as error:
            if error.retryable:
                raise
            # Mostly it is gone: a garbage collection was faster.
            logger.info("%s: %s is not resumed: %s", self._client.url, source, error)
            return False
        if (copied.size, copied.crc32c) != (num, crc32c):
            return False  # its writer lives after all
        self._stored[offset] = copied
        return True

    async def copy_from(self, offset: int, key: str, start: int, stop: int) -> int | None:
        """Copies a whole object as this one."""
        assert self._origin is not None
        if offset or start or stop != self.size:
            raise UsageError(f"{self.key!r}: Google copies whole objects only")
        source, bucket = self._origin._name(key), self._origin._client.bucket
        copy = partial(self._client.copy, "copy_from", self.key, source=source, bucket=bucket)
        copied = await self._create(copy)
        if copied.size != self.size:
            raise truncated(key, self.size, copied.size)
        self._stored[0] = copied
        return copied.crc32c

    async def _store(
        self, offset: int, num: int, make: Callable[..., Awaitable[Resource]]
    ) -> Resource:
        """Stores a range as a component, or as the whole object."""
        if self._is_opener and num == self.size:
            return await self._create(make)
        name = f"{self._folder}{offset:016x}"
        self._leftovers.add(name)
        return await make(new=NewObject(name=name, storage_class=_COMPONENT_CLASS))

    async def _create(self, make: Callable[..., Awaitable[Resource]]) -> Resource:
        """Creates the object. Replaces only an object of an earlier try."""
        is_again, self._has_begun = self._has_begun, True
        storage_class = self._client.options.storage_class
        new = NewObject(name=self._name, storage_class=storage_class, if_absent=not is_again)
        try:
            return await make(new=new)
        except ObjectExists:
            self._has_begun = False
            raise

    async def complete(self) -> None:
        """Composes the components to one object and deletes them.

        Atomicity: the service's; an object of one write exists already. Cancellation: the object
        may exist; ``abort`` deletes it. May be called again after a failure.
        """
        self._require_opener()
        if not self._is_made:
            await self._make()
            self._is_made = True
        self._num_cleanups += 1
        try:
            await self._delete("complete", self._leftovers)
        except StorageError as error:
            if error.retryable and self._num_cleanups < _CLEANUP_TRIES:
                raise
            logger.warning("%s: components of %s stay: %s", self._url, self.key, error)
        self._has_ended = True

    async def _make(self) -> None:
        if not self.size:
            upload = partial(self._client.upload, "complete", self.key, views=(), crc=0)
            await self._create(upload)
            return
        stored: Mapping[int, Resource] = self._stored
        if _find_gap(stored, self.size) is not None:
            stored = await self._list_components()  # includes joined writers'
        if (at := _find_gap(stored, self.size)) is not None:
            raise self._error(
                "complete", f"byte {at} of {self.size} was never written, or written twice"
            )
        parts = [stored[offset] for offset in sorted(stored)]
        if parts[0].name != self._name:
            await self._compose(parts)

    async def _list_components(self) -> Mapping[int, Resource]:
        components = {}
        async for page in self._client.pages("complete", self.key, self._folder):
            for each in page.resources:
                self._leftovers.add(each.name)
                offset = each.name.removeprefix(self._folder)
                if re.fullmatch("[0-9a-f]{16}", offset):
                    components[int(offset, 16)] = each
        return components

    async def _compose(self, parts: Sequence[Resource]) -> None:
        crc = 0
        for part in parts:
            crc = combine(crc, part.crc32c, part.size)
        names = [part.name for part in parts]
        level = 0
        while len(names) > _MAX_SOURCES:
            level += 1
            names = await self._compose_level(names, level)
        compose = partial(self._client.compose, "complete", self.key, sources=names)
        whole = await self._create(compose)
        if (whole.size, whole.crc32c) != (self.size, crc):
            raise self._error(
                "complete",
                f"{whole.size} bytes with CRC32C {whole.crc32c:08x} were composed, "
                f"not {self.size} with {crc:08x}",
                retryable=True,
            )

    async def _compose_level(self, names: Sequence[str], level: int) -> list[str]:
        groups = {
            f"{self._folder}level-{level}-{start // _MAX_SOURCES}": names[start:][:_MAX_SOURCES]
            for start in range(0, len(names), _MAX_SOURCES)
        }
        self._leftovers.update(groups)

        async def compose(name: str) -> None:
            new = NewObject(name=name, storage_class=_COMPONENT_CLASS)
            await self._client.compose("complete", self.key, new, groups[name])

        await try_each(groups, compose, at_once=self._client.options.max_concurrency)
        return list(groups)

    async def abort(self) -> None:
        """Deletes all written objects, for the opener. No effect after an ending."""
        has_ended, self._has_ended = self._has_ended, True
        if has_ended or not self._is_opener:
            return
        with anyio.move_on_after(CLEANUP_S, shield=True):
            try:
                await self._list_components()
                await self._delete(
                    "abort", [*self._leftovers, *([self._name] if self._has_begun else [])]
                )
            except StorageError as error:
                logger.warning("%s: aborted object %s stays: %s", self._url, self.key, error)

    async def _delete(self, op: str, names: Collection[str]) -> None:
        await self._client.delete(op, dict.fromkeys(names, self.key))


def _find_gap(stored: Mapping[int, Resource], size: int) -> int | None:
    """Returns the first of ``size`` bytes that is not stored exactly once, or None."""
    position = 0
    for offset in sorted(stored):
        if offset != position:
            return min(offset, position)
        position += stored[offset].size
    return None if position == size else min(position, size)
