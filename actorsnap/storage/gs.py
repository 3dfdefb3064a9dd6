"""Storage in a bucket of Google Cloud Storage: ``gs://bucket/some/prefix``, ``gcs://`` alike.

Decides how each verb becomes objects of the bucket. How those are asked for is
``gs_client.py``'s. Must not know: snapshots, attempts, requests.

Rules:

- A key's object is named ``prefix/key``. ``put_if_absent`` has the precondition
  ``ifGenerationMatch=0``, which the service checks.
- A writer's object that comes in one write is one upload, under its name. Else each write is an
  object, a *component*, and ``complete`` composes them: 32 at a time, more by a tree. They lie
  in the folder ``<name>.<nonce>.parts``, so below every folder of the key, and are named by their
  offset: the opener finds those of joined writers by listing. Who deletes the key's folder,
  because its owner is dead, deletes them too.
- The folder has an object ``open`` as long as the writer may be joined. An object of less than
  ``min_write_bytes`` is always one write, and needs no folder.
- CRC32C: each upload says what the service has to find, and the answer what it has found. That
  of a composed object must be what those of its components combine to.
- Components are of the class STANDARD: others charge for objects that are deleted early.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import AsyncIterator, Sequence

import anyio
import anyio.lowlevel

from actorsnap.errors import (
    ObjectExists,
    ObjectNotFound,
    StorageError,
    UsageError,
)
from actorsnap.format.checksum import combine, crc32c_of
from actorsnap.storage.adaptive import AdaptiveStorage
from actorsnap.storage.base import (
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
)
from actorsnap.storage.gs_client import GsClient, GsOptions, Resource, truncated
from actorsnap.storage.many import for_each
from actorsnap.storage.options import convert_options
from actorsnap.storage.vectored import flat, num_bytes
from actorsnap.storage.wrappers import RetryPolicy, RetryStorage

__all__ = ["GsStorage", "open_gs"]

logger = logging.getLogger(__name__)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# Less is not worth a request, and more of them only make the tree of composing deeper.
_MIN_WRITE_BYTES = 1 << 20
_MAX_SOURCES = 32
_COMPONENT_CLASS = "STANDARD"
# How long cleanup may take when the caller is cancelled.
_CLEANUP_S = 30.0
# So often is tried to delete components; more of them are not worth the object.
_CLEANUP_TRIES = 3


def open_gs(url: str, context: StorageContext) -> Storage:
    """Opens a prefix of a bucket, with retries and as many requests at once as the service bears.

    Connects when it is first used. Options: ``GsOptions``.

    Raises:
        UsageError: the URL has no bucket or a malformed prefix, or an option is unknown.
    """
    options = convert_options(context.options, GsOptions, scheme="gs")
    place = url.partition("://")[2].rstrip("/")
    bucket, _, prefix = place.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{url!r} names no bucket: gs://bucket or gs://bucket/prefix")
    if prefix:
        check_key(prefix)
    storage = GsStorage(bucket, prefix, options, context)
    adaptive = AdaptiveStorage(storage, max_operations=options.max_concurrency)
    return RetryStorage(adaptive, policy=RetryPolicy(max_attempts=options.max_attempts))


class GsStorage(Storage):
    """Objects below a prefix of one bucket. The module's docstring has the rules.

    Cancellation: comes at once; what was asked may have been done.
    """

    def __init__(
        self, bucket: str, prefix: str, options: GsOptions, context: StorageContext
    ) -> None:
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self.capabilities = Capabilities(min_write_bytes=_MIN_WRITE_BYTES, checks_crc32c=True)
        self._client = GsClient(bucket, self.url, options, context.run_blocking)
        self._prefix = f"{prefix}/" if prefix else ""
        self._run = context.run_blocking
        self._class = options.storage_class
        self._max_concurrency = options.max_concurrency

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Writes a whole object. Atomicity: the service's.

        Raises:
            AccessDenied, StorageError: it failed.
        """
        name = self._name(key)
        crc = await self._crc32c(views)
        await self._client.upload("put", key, name, flat(views), crc, storage_class=self._class)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a whole object. Atomicity: by a precondition that the service checks.

        Raises:
            ObjectExists: the key exists.
            AccessDenied, StorageError: it failed.
        """
        name = self._name(key)
        views = flat([memoryview(data)])
        crc = await self._crc32c(views)
        await self._client.upload(
            "put_if_absent", key, name, views, crc, storage_class=self._class, if_absent=True
        )

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Opens a new object, and notes in the bucket that it may be joined.

        Cancellation: a note may be left.

        Raises:
            ObjectExists: the key exists.
            AccessDenied, StorageError: it failed.
        """
        name = self._name(key)
        if size < 0:
            raise UsageError(f"an object cannot have {size} bytes")
        await self._refuse_existing(key, name)
        writer = _GsWriter(self, key, size, secrets.token_hex(8), is_opener=True)
        if writer.has_folder:
            await self._client.upload(
                "writer", key, writer.marker, [], 0, storage_class=_COMPONENT_CLASS
            )
        return writer

    async def _refuse_existing(self, key: str, name: str) -> None:
        try:
            await self._client.stat("stat", key, name)
        except ObjectNotFound:
            return
        raise ObjectExists(
            op="writer", key=key, backend=self.url, detail="the object exists already"
        )

    async def join_writer(self, token: bytes) -> ObjectWriter:
        """A writer to an object that another party opened.

        Raises:
            ObjectNotFound: it was completed or aborted.
            AccessDenied, StorageError: it failed.
        """
        nonce, size, key = token.decode().split(" ", 2)
        writer = _GsWriter(self, check_key(key), int(size), nonce, is_opener=False)
        if writer.has_folder:
            await self._client.stat("join_writer", key, writer.marker)
        return writer

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes ``[start, stop)``. A whole object is compared with its CRC32C.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before ``stop``, or before ``start``.
            AccessDenied, StorageError: it failed.
        """
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(f"not a range of bytes: [{start}, {stop})")
        name = self._name(key)
        data = None if start == stop else await self._client.download("get", key, name, start, stop)
        if data is None:
            # There is no byte to be had; the service says no more than that.
            if (await self._client.stat("get", key, name)).size < max(start, stop or 0):
                raise truncated(key, max(start, stop or 0))
            return b""
        if stop is not None and len(data) != stop - start:
            raise truncated(key, stop)
        return data

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills ``views`` from byte ``offset`` on, straight from the socket.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before the views are full.
            AccessDenied, StorageError: it failed.
        """
        if offset < 0:
            raise UsageError(f"not an offset: {offset}")
        name = self._name(key)
        targets = flat(views)
        if targets:
            await self._client.read_into("read_into", key, name, offset, targets)
        else:
            await self._client.stat("read_into", key, name)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Objects in key order, those of open writers included. Read-after-write.

        Raises:
            AccessDenied, StorageError: it failed.
        """
        skip = len(self._prefix)
        async for found in self._pages("list", prefix, self._prefix + prefix):
            for resource in found:
                if not resource.name.endswith("/"):  # what some tools make for folders
                    yield ObjectInfo(
                        key=resource.name[skip:],
                        size=resource.size,
                        modified_s=resource.modified_s,
                    )

    async def _pages(self, op: str, key: str, prefix: str) -> AsyncIterator[Sequence[Resource]]:
        page = ""
        while True:
            found = await self._client.list_page(op, key, prefix, page=page)
            yield found.resources
            page = found.next_page
            if not page:
                return

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, several at once. All are tried; the first error is raised at the end.

        Cancellation: some are deleted.

        Raises:
            AccessDenied, StorageError: an object cannot be deleted.
        """
        names = {self._name(key): key for key in keys}

        async def delete(name: str) -> None:
            await self._delete("delete", names[name], name)

        await for_each(delete, names, at_once=self._max_concurrency)

    async def _delete(self, op: str, key: str, name: str) -> None:
        try:
            await self._client.delete(op, key, name)
        except ObjectNotFound:
            pass

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        """The folders in ``folder``; what lies in them is not looked at.

        Raises:
            AccessDenied, StorageError: it failed.
        """
        start = self._prefix + (f"{check_key(folder)}/" if folder else "")
        folders: set[str] = set()
        page = ""
        while True:
            found = await self._client.list_page("list", folder, start, page=page, delimiter="/")
            folders.update(name.removeprefix(start).rstrip("/") for name in found.folders)
            page = found.next_page
            if not page:
                return sorted(folders)

    async def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object.

        Raises:
            ObjectNotFound: no such object.
            AccessDenied, StorageError: it failed.
        """
        found = await self._client.stat("stat", key, self._name(key))
        return ObjectInfo(key=key, size=found.size, modified_s=found.modified_s)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    async def _crc32c(self, views: Sequence[memoryview]) -> int:
        return await self._run(crc32c_of, flat(views))


class _GsWriter(ObjectWriter):
    """One object, or components that will be one. States: open -> composed -> ended."""

    def __init__(
        self, storage: GsStorage, key: str, size: int, nonce: str, *, is_opener: bool
    ) -> None:
        self.key = key
        self.size = size
        self.token = f"{nonce} {size} {key}".encode("utf-8", "surrogatepass")
        self._storage = storage
        self._client = storage._client
        self._name = storage._name(key)
        self._folder = f"{self._name}.{nonce}.parts/"
        self.marker = f"{self._folder}open"
        self.has_folder = size >= _MIN_WRITE_BYTES
        self._is_opener = is_opener
        self._is_whole = False  # nothing is to be composed
        self._is_composed = False
        self._is_ended = False
        self._num_cleanups = 0

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Uploads ``views``. Cancellation: a component may be left, which ``abort`` deletes.

        Raises:
            AccessDenied, StorageError: it failed, or the writer was ended.
        """
        num = num_bytes(views)
        if offset < 0 or offset + num > self.size:
            raise UsageError(
                f"[{offset}, {offset + num}) is outside of {self.key!r}, {self.size} bytes"
            )
        if self._is_ended:
            raise self._error("write_at", "the writer was completed, released or aborted")
        if not self._is_opener and not self.has_folder:
            raise self._error("write_at", "so small an object is one write, of its opener")
        if not num:
            return
        crc = await self._storage._crc32c(views) if crc32c is None else crc32c
        self._is_whole = self._is_opener and num == self.size
        await self._client.upload(
            "write_at",
            self.key,
            self._name if self._is_whole else f"{self._folder}{offset:016x}",
            flat(views),
            crc,
            storage_class=self._storage._class if self._is_whole else _COMPONENT_CLASS,
        )

    async def complete(self) -> None:
        """Makes one object of the components and deletes them.

        Atomicity: the service's; an object of one write is there already. Cancellation: the
        object may be there; ``abort`` deletes it. May be called again after a failure.

        Raises:
            AccessDenied, StorageError: it failed, or some bytes were never written.
        """
        if not self._is_opener:
            raise UsageError(f"{self.key!r}: only the opener of an object completes it")
        if not self.size and not self._is_whole:
            self._is_whole = True
            await self._client.upload(
                "complete", self.key, self._name, [], 0, storage_class=self._storage._class
            )
        if not self._is_whole and not self._is_composed:
            await self._compose()
            self._is_composed = True
        self._num_cleanups += 1
        try:
            await self._delete_parts("complete")
        except StorageError as error:
            if error.retryable and self._num_cleanups < _CLEANUP_TRIES:
                raise
            logger.warning("%s: components of %s stay: %s", self._storage.url, self.key, error)
        self._is_ended = True

    async def _compose(self) -> None:
        components = await self._components()
        position = 0
        crc = 0
        for component in components:
            if self._offset(component) != position:
                break
            crc = combine(crc, component.crc32c, component.size)
            position += component.size
        if position != self.size:
            raise self._error(
                "complete", f"byte {position} of {self.size} was never written, or written twice"
            )
        level = 0
        while len(components) > _MAX_SOURCES:
            level += 1
            components = await self._compose_level(components, level)
        whole = await self._client.compose(
            "complete",
            self.key,
            self._name,
            components,
            storage_class=self._storage._class,
        )
        if (whole.size, whole.crc32c) != (self.size, crc):
            raise self._error(
                "complete",
                f"{whole.size} bytes with CRC32C {whole.crc32c:08x} were composed, "
                f"not {self.size} with {crc:08x}",
                retryable=True,
            )

    async def _components(self) -> list[Resource]:
        pages = self._storage._pages("complete", self.key, self._folder)
        return [
            resource
            async for page in pages
            for resource in page
            if re.fullmatch("[0-9a-f]{16}", resource.name.removeprefix(self._folder))
        ]

    def _offset(self, component: Resource) -> int:
        return int(component.name.removeprefix(self._folder), 16)

    async def _compose_level(self, sources: Sequence[Resource], level: int) -> list[Resource]:
        groups = [
            sources[start : start + _MAX_SOURCES] for start in range(0, len(sources), _MAX_SOURCES)
        ]
        composed: dict[int, Resource] = {}

        async def compose(number: int) -> None:
            composed[number] = await self._client.compose(
                "complete",
                self.key,
                f"{self._folder}level-{level}-{number}",
                groups[number],
                storage_class=_COMPONENT_CLASS,
            )

        await for_each(compose, range(len(groups)), at_once=self._storage._max_concurrency)
        return [composed[number] for number in range(len(groups))]

    async def release(self) -> None:
        """Ends a joined writer; what it wrote is durable already."""
        if self._is_opener:
            raise UsageError(f"{self.key!r}: the opener of an object completes or aborts it")
        await anyio.lowlevel.checkpoint()
        self._is_ended = True

    async def abort(self) -> None:
        """Deletes what was written, for the opener. Without effect after an ending."""
        is_ended, self._is_ended = self._is_ended, True
        if is_ended or not self._is_opener:
            return
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            try:
                if self._is_whole or self._is_composed:
                    await self._storage._delete("abort", self.key, self._name)
                await self._delete_parts("abort")
            except StorageError as error:
                logger.warning(
                    "%s: aborted object %s stays: %s", self._storage.url, self.key, error
                )

    async def _delete_parts(self, op: str) -> None:
        async def delete(name: str) -> None:
            await self._storage._delete(op, self.key, name)

        if not self.has_folder:
            return
        # The marker first: nobody joins any more.
        await delete(self.marker)
        if not self._is_whole:
            pages = self._storage._pages(op, self.key, self._folder)
            names = [resource.name async for page in pages for resource in page]
            await for_each(delete, names, at_once=self._storage._max_concurrency)

    def _error(self, op: str, detail: str, *, retryable: bool = False) -> StorageError:
        return StorageError(
            op=op, key=self.key, backend=self._storage.url, detail=detail, retryable=retryable
        )
