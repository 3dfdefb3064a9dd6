"""Storage in a bucket of Google Cloud Storage: ``gs://bucket/some/prefix`` or ``gcs://``.

Decides how each verb becomes objects of the bucket. Must not know: snapshots, attempts, components
of objects (``gs_upload``), requests (``gs_client``).

Rules:

- A key's object is named ``prefix/key``. ``put_if_absent``, and a writer when it makes its object,
  have the precondition ``ifGenerationMatch=0``, which the service checks.
- An object of one write is one upload, under its name. Else each write is an object, a *component*,
  and ``complete`` composes them: 32 at a time, more by a tree. They are in the folder
  ``<name>.<nonce>.parts``, so below every folder of the key, and are named by their offset: the
  opener finds those of joined writers by listing, if its own are not all. Deleting the folder of a
  dead writer's key deletes them, too.
- Opening and joining writers takes no request. A write after the object was completed or aborted
  is invisible: a component in that folder.
- An object of less than ``MIN_WRITE_BYTES`` is always one write.
- Each upload sends the CRC32C that the service must find, and the answer has the one it found. That
  of a composed object must equal the combination of its components'.
- Components have the class STANDARD: others charge for objects that are deleted early.
- A writer with ``older`` objects, and its joined writers, list the leftovers of them, with sizes
  and CRC32C, and copy, within the service, each component or object with exactly the bytes of one
  write. So it does not depend on them later. A range cannot be copied: an older object that was
  composed, and whose components were deleted, is of no use.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence

import anyio.lowlevel
import msgspec

from actorsnap.storage.base import (
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
    check_offset,
    check_range,
    check_size,
    truncated,
)
from actorsnap.storage.cloud import add_policies, convert_options, split_url
from actorsnap.storage.gs_client import GsClient, GsOptions
from actorsnap.storage.gs_upload import MIN_WRITE_BYTES, GsUpload, GsWriter, find_sources
from actorsnap.storage.vectored import flat

__all__ = ["GsStorage", "open_gs"]

_MAX_OBJECT_BYTES = 5 << 40
_BUCKET_PATTERN = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"


def open_gs(url: str, context: StorageContext) -> Storage:
    """Opens a prefix of a bucket. Connects on first use. Options: ``GsOptions``.

    Raises:
        UsageError: the URL has no bucket or a malformed prefix, or an option is unknown.
    """
    options = convert_options(context.options, GsOptions, scheme="gs")
    bucket, prefix = split_url(url, _BUCKET_PATTERN)
    return add_policies(GsStorage(bucket, prefix, options, context), options, context)


class GsStorage(Storage):
    """Objects below a prefix of one bucket. The module's docstring has the rules.

    All verbs raise ``AccessDenied`` or ``StorageError`` when they fail. Cancellation: at once; the
    request may have had its effect.
    """

    def __init__(
        self, bucket: str, prefix: str, options: GsOptions, context: StorageContext
    ) -> None:
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self.capabilities = Capabilities(
            min_write_bytes=MIN_WRITE_BYTES, max_object_bytes=_MAX_OBJECT_BYTES, checks_crc32c=True
        )
        self._client = GsClient(bucket, self.url, options, context)
        self._prefix = f"{prefix}/" if prefix else ""
        self._class = options.storage_class

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        name = self._name(key)
        crc = await self._client.crc32c(views)
        await self._client.upload("put", key, name, views, crc, storage_class=self._class)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a whole object. Atomicity: by a precondition that the service checks.

        Raises:
            ObjectExists: the key exists.
        """
        name = self._name(key)
        views = [memoryview(data)]
        crc = await self._client.crc32c(views)
        await self._client.upload(
            "put_if_absent", key, name, views, crc, storage_class=self._class, if_absent=True
        )

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Opens a new object. An existing one is seen when the object is made."""
        check_size(size)
        nonce = secrets.token_hex(8)
        upload = GsUpload(key=check_key(key), size=size, nonce=nonce, older=tuple(older))
        return await self._open_writer(upload, is_opener=True)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        return await self._open_writer(
            msgspec.msgpack.decode(token, type=GsUpload), is_opener=False
        )

    async def _open_writer(self, upload: GsUpload, *, is_opener: bool) -> ObjectWriter:
        await anyio.lowlevel.checkpoint()
        names = [self._name(key) for key in upload.older]
        sources = await find_sources(self._client, upload.key, names)
        name = self._name(upload.key)
        return GsWriter(self._client, upload, name, sources=sources, is_opener=is_opener)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes ``[start, stop)``. A whole object is compared with its CRC32C.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before ``stop``, or before ``start``.
        """
        check_range(start, stop)
        name = self._name(key)
        data = None if start == stop else await self._client.download("get", key, name, start, stop)
        if data is None:
            # There is no such byte; the service says no more than that.
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
        """
        check_offset(offset)
        name = self._name(key)
        targets = flat(views)
        if targets:
            await self._client.read_into("read_into", key, name, offset, targets)
        else:
            await self._client.stat("read_into", key, name)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields objects in key order, including those of open writers. Read-after-write."""
        skip = len(self._prefix)
        async for found in self._client.pages("list", prefix, self._prefix + prefix):
            for resource in found.resources:
                if not resource.name.endswith("/"):  # what some tools make for folders
                    yield ObjectInfo(
                        key=resource.name[skip:],
                        size=resource.size,
                        modified_s=resource.modified_s,
                    )

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, up to 100 per request. All are tried; the first error is raised at the
        end.

        Cancellation: some are deleted.
        """
        await self._client.delete("delete", {self._name(key): key for key in keys})

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        """Returns the folders in ``folder``; does not look below them."""
        start = self._prefix + (f"{check_key(folder)}/" if folder else "")
        folders: set[str] = set()
        async for page in self._client.pages("list", folder, start, delimiter="/"):
            folders.update(name.removeprefix(start).rstrip("/") for name in page.folders)
        return sorted(folders)

    async def stat(self, key: str) -> ObjectInfo:
        found = await self._client.stat("stat", key, self._name(key))
        return ObjectInfo(key=key, size=found.size, modified_s=found.modified_s)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)
