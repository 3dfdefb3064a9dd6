"""Storage in a bucket of S3 or of a compatible server: ``s3://bucket/prefix``.

Decides which requests make each verb. Must not know: snapshots, retries, concurrency (policies,
which ``open_s3`` adds), parts of objects (``s3_upload``), the form of requests and the limits of
servers (``s3_bucket``), sockets and signatures (``s3_client``, ``wire``).

- Objects of up to 1 MiB are one put, when they are complete; a joined writer cannot write them.
- Others are multipart uploads. A write's first part has number ``offset // unit + 1``, where the
  unit follows from the object's size; and a write has as many parts as lead to the number of the
  next one: mostly one, sometimes two. So parts are numbered 1, 2, 3, ..., which some servers
  require, and writers on other ranks need only the upload's id. A write is a unit or longer, so no
  part is less than half of one. ``complete`` names the parts by the ETags in the server's answers:
  it refuses parts that it lacks, or has otherwise. Then, and after several writers, the parts are
  listed first and must cover the object.
- Every body has its CRC32C. A server that compares it repeats it in the answer. For other servers
  payloads are signed: bytes with another SHA-256 are refused. Whether they are is tried once per
  client; if not, the MD5 goes along, which every server compares.
- ``put_if_absent`` is a put with ``If-None-Match: *``. Whether a server honours that is tried once
  per client, with an object of its own. If not, ``put_if_absent`` looks, puts and reads back: of
  two concurrent writers the last wins, and both can see which.
- A writer with ``older`` objects copies from them within the server. An upload that a dead writer
  left is first completed with its leading parts; a living writer to it fails. A copy counts if its
  CRC32C, or its ETag, an MD5, where the server sends none, is that of the bytes at hand. A joined
  writer copies nothing.
- ``list_folders``, ``delete`` and ``delete_folder`` include unfinished uploads: leftovers of a dead
  attempt are found and removed like its objects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from os.path import commonprefix
from typing import Any

import anyio.lowlevel
import msgspec

from actorsnap.errors import ObjectExists, ObjectNotFound, StorageError, UsageError
from actorsnap.log import Log
from actorsnap.storage.base import (
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
    check_offset,
    check_range,
    range_end,
)
from actorsnap.storage.cloud import add_policies, convert_options
from actorsnap.storage.s3_bucket import S3Bucket, info_of
from actorsnap.storage.s3_client import S3Options
from actorsnap.storage.s3_upload import (
    OlderObject,
    PartWriter,
    S3Upload,
    SmallWriter,
    leading_parts,
)
from actorsnap.storage.vectored import num_bytes

__all__ = ["S3Storage", "open_s3"]

logger = Log(__name__)

_ONE_PUT_BYTES = 1 << 20
_MAX_PARTS = 10_000
_MAX_OBJECT_BYTES = 5 << 40


def open_s3(url: str, context: StorageContext) -> Storage:
    """Opens ``s3://bucket/prefix``. No I/O.

    Raises:
        UsageError: the URL has no valid bucket, or an option is unknown or wrong.
    """
    options = convert_options(context.options, S3Options, scheme="s3")
    return add_policies(S3Storage(url, context, options), options, context)


class S3Storage(Storage):
    """One bucket, below a prefix. The module's docstring has the rules.

    Atomicity and durability of all verbs are the server's: an object appears, whole and durable,
    when the request that makes it is answered.
    """

    def __init__(self, url: str, context: StorageContext, options: S3Options) -> None:
        self.bucket = S3Bucket(url, context, options)
        self.url = self.bucket.url
        self.capabilities = Capabilities(
            min_write_bytes=options.part_bytes,
            max_writes=_MAX_PARTS,
            max_object_bytes=_MAX_OBJECT_BYTES,
            checks_crc32c=True,
            has_conditional_put=options.has_conditional_put is not False,
        )

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self.bucket.put("put", check_key(key), views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a whole object. Atomicity: the server's, if ``has_conditional_put``.

        Raises:
            ObjectExists: the key exists.
        """
        check_key(key)
        views = [memoryview(data)]
        if await self.bucket.has_conditional_put("put_if_absent"):
            await self.bucket.put_conditionally("put_if_absent", key, views)
            return
        self.capabilities = replace(self.capabilities, has_conditional_put=False)
        try:
            await self.stat(key)
        except ObjectNotFound:
            await self.bucket.put("put_if_absent", key, views)
            if await self.get(key) == data:
                return
        raise ObjectExists(
            op="put_if_absent", key=key, backend=self.url, detail="the object exists already"
        )

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Opens a new object. An existing one stays until ``complete`` replaces it."""
        check_key(key)
        if not 0 <= size <= _MAX_OBJECT_BYTES:
            raise UsageError(f"an object of {size} bytes cannot be: S3 takes up to 5 TiB")
        if size <= _ONE_PUT_BYTES:
            return SmallWriter(self.bucket, S3Upload(key=key, size=size), is_opener=True)
        sources: list[OlderObject] = []
        for name in older:
            older_bytes = await self._older_bytes(check_key(name))
            # Mostly a resumed save has taken over all of it, unless it died in the middle.
            if older_bytes > max([source.size for source in sources], default=0):
                sources.append(OlderObject(key=name, size=older_bytes))
        if sources and not await self.bucket.copies_parts(key, sources[0].key):
            sources = []
        unit = max(self.capabilities.min_write_bytes, -(-size // _MAX_PARTS))
        upload_id = await self.bucket.begin_upload(key)
        upload = S3Upload(key=key, size=size, id=upload_id, unit=unit)
        return PartWriter(self.bucket, upload, is_opener=True, sources=sources)

    async def _older_bytes(self, key: str) -> int:
        """Returns the size of an older object, completed from its upload if needed; or 0."""
        bucket = self.bucket
        try:
            with suppress(ObjectNotFound):
                return (await bucket.stat("writer", key)).size
            longest: tuple[int, str, Sequence[dict[str, Any]]] = 0, "", ()
            async for found, upload_id in bucket.uploads(key):
                if found == key:
                    parts = await bucket.parts("writer", key, upload_id)
                    num_stored = sum(part["Size"] for part in leading_parts(parts))
                    longest = max(longest, (num_stored, upload_id, parts), key=lambda each: each[0])
            older_bytes, upload_id, parts = longest
            if older_bytes:
                await self._complete_leading(key, upload_id, parts)
        except StorageError as error:
            if error.retryable:
                raise
            logger.info("%s: %s is not resumed: %s", self.url, key, error)
            return 0
        return older_bytes

    async def _complete_leading(
        self, key: str, upload_id: str, parts: Sequence[dict[str, Any]]
    ) -> None:
        """Makes an object that begins with the leading parts of an upload."""
        whole = leading_parts(parts)
        try:
            await self.bucket.complete_upload("writer", key, upload_id, whole)
        except StorageError as error:
            if error.retryable or len(whole) == len(parts):
                raise
            # Some servers want all their parts named, others none after a gap. Parts after it move,
            # and copies of them fail their checksums.
            await self.bucket.complete_upload("writer", key, upload_id, parts)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        """Returns a writer to an object that another party opened. No request."""
        upload = msgspec.msgpack.decode(token, type=S3Upload)
        await anyio.lowlevel.checkpoint()
        made = PartWriter if upload.id else SmallWriter
        return made(self.bucket, upload, is_opener=False)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes ``[start, stop)``. One request for a whole object of up to 1 MiB.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before ``stop``.
        """
        check_key(key)
        check_range(start, stop)
        if stop is None and not start:
            body, stop = await self.bucket.get("get", key)
            if len(body) == stop:
                return body
        elif stop is None or stop == start:
            stop = range_end(key, start, stop, (await self.bucket.stat("get", key)).size)
        data = bytearray(stop - start)
        if data:
            await self.bucket.receive("get", key, start, [memoryview(data)])
        return bytes(data)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills ``views`` from byte ``offset`` on, straight from the socket.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before the views are full.
        Cancellation: at once; nothing writes to the views after that.
        """
        check_key(key)
        check_offset(offset)
        if num_bytes(views):
            await self.bucket.receive("read_into", key, offset, views)
        else:
            await self.bucket.stat("read_into", key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields objects in key order, a page of 1000 per request."""
        async for page in self.bucket.pages("list", prefix):
            for each in page.get("Contents", ()):
                yield info_of(self.bucket.relative(each["Key"]), each)

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, 1000 per request, and uploads to them.

        Cancellation: some are deleted.
        """
        keys = [check_key(key) for key in keys]
        if keys:
            await self._abort_uploads(commonprefix(keys), frozenset(keys))
            await self.bucket.delete(keys)

    async def _abort_uploads(
        self, prefix: str, only: Collection[str] | None = None
    ) -> Sequence[str]:
        """Aborts unfinished uploads below ``prefix``, or of them ``only`` those to these keys.

        Returns their keys.
        """
        aborted = []
        async for key, upload_id in self.bucket.uploads(prefix):
            if only is None or key in only:
                await self.bucket.abort_upload(key, upload_id)
                aborted.append(key)
        return aborted

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        """Returns the folders of objects and of unfinished uploads."""
        start = f"{check_key(folder)}/" if folder else ""
        found: set[str] = set()
        async for page in self.bucket.pages("list_folders", start, Delimiter="/"):
            keys = [self.bucket.relative(each["Prefix"]) for each in page.get("CommonPrefixes", ())]
            found.update(key.removeprefix(start).rstrip("/") for key in keys)
        async for key, _ in self.bucket.uploads(start):
            name, is_folder, _ = key.removeprefix(start).partition("/")
            if is_folder:
                found.add(name)
        return sorted(found)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        """Deletes all objects in ``folder`` and aborts its uploads; returns their keys."""
        start = f"{check_key(folder)}/"
        keys = [*await self._abort_uploads(start)]
        keys.extend([info.key async for info in self.list(start)])
        await self.bucket.delete(keys)
        return keys

    async def stat(self, key: str) -> ObjectInfo:
        return await self.bucket.stat("stat", check_key(key))

    async def aclose(self) -> None:
        """Releases the shared client. Idempotent."""
        await self.bucket.aclose()
