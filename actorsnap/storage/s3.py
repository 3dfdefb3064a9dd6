# SPDX-License-Identifier: Apache-2.0
"""Storage in a bucket of S3 or of a compatible server: ``s3://bucket/prefix``.

- Objects of up to 1 MiB are one put, on completion; joined writers cannot write them.
- Others are multipart uploads. A write's first part has number ``offset // unit + 1``, where the
  unit follows from the object's size; a write has as many parts as lead to the next one's number:
  one, sometimes two. So part numbers have no gaps, which some servers require, and writers on other
  ranks need only the upload's id. A write is a unit or longer, a part at least half of one.
  ``complete`` names the parts by ETag; if the server lacks one, and after several writers, the
  parts are listed first and must cover the object.
- Every body has its CRC32C, which a server that compares it repeats. For other servers the
  signature covers the SHA-256. Whether that is compared is tried once per client; if not, the MD5
  is added, which every server compares.
- ``put_if_absent`` is a put with ``If-None-Match: *``. Whether that is honoured is tried once per
  client. If not, it looks, puts and reads back: of two concurrent writers the last wins, and both
  can detect it.
- A writer with ``older`` objects copies from them within the server. A dead writer's upload is
  first completed with its leading parts; a living writer to it fails. A copy counts if its CRC32C,
  or else its ETag, an MD5, is that of the bytes at hand. A joined writer copies nothing.
- Unfinished uploads are listed as folders and deleted with objects.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import anyio.lowlevel
import msgspec

from actorsnap.errors import ObjectExists, ObjectNotFound, StorageError, UsageError
from actorsnap.format.checksum import combine, crc32c_of
from actorsnap.log import Log
from actorsnap.storage.base import (
    BackendWriter,
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
    check_range,
    num_bytes,
    range_end,
    slice_views,
    try_each,
)
from actorsnap.storage.network import (
    add_policies,
    convert_options,
    decode_crc32c,
    encode_crc32c,
)
from actorsnap.storage.s3_bucket import S3Bucket, Sent, UploadPart, error_code, etag_of, info_of
from actorsnap.storage.s3_client import S3Options
from actorsnap.storage.wrapper import unwrapped

logger = Log(__name__)

_ONE_PUT_BYTES = 1 << 20
_MAX_PARTS = 10_000
_MIN_PART_BYTES = 5 << 20
"""The service's, of all parts but the last."""

_MAX_OBJECT_BYTES = 5 << 40


def open_s3(url: str, context: StorageContext) -> Storage:
    options = convert_options(context.options, S3Options, scheme="s3")
    return add_policies(S3Storage(url, context, options), options, context)


class S3Upload(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The state shared by the writers of one object; encoded, it is the token.

    Attributes:
        id: ID of the multipart upload; empty for an object that is one put.
        unit: Least size of a write, the last one excepted.
    """

    key: str
    size: int
    id: str = ""
    unit: int = 0


class S3Storage(Storage):
    """One bucket, below a prefix. See the module.

    An object appears, whole and durable, with the answer to the request that makes it.
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
            min_copy_bytes=_MIN_PART_BYTES,
        )

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self.bucket.put("put", check_key(key), views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Atomicity: the server's, if ``has_conditional_put``."""
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
        sources: list[ObjectInfo] = []
        for name in older:
            older_bytes = await self._older_bytes(check_key(name))
            # Mostly a resumed save has taken over all of it.
            if older_bytes > max([source.size for source in sources], default=0):
                sources.append(ObjectInfo(key=name, size=older_bytes))
        if sources and not await self.bucket.copies_parts(key, self.bucket.named(sources[0].key)):
            sources = []
        unit = max(self.capabilities.min_write_bytes, -(-size // _MAX_PARTS))
        upload_id = await self.bucket.begin_upload(key)
        upload = S3Upload(key=key, size=size, id=upload_id, unit=unit)
        return PartWriter(self.bucket, upload, is_opener=True, sources=sources)

    async def copying_writer(
        self, key: str, size: int, *, source: Storage, sample: str
    ) -> ObjectWriter | None:
        """Copies within one server: between places that are opened with the same options."""
        check_key(key)
        origin = unwrapped(source)
        if (
            not isinstance(origin, S3Storage)
            or origin.bucket.client is not self.bucket.client
            or not _ONE_PUT_BYTES < size <= _MAX_OBJECT_BYTES
            or not await self.bucket.copies_parts(key, origin.bucket.named(check_key(sample)))
        ):
            return None
        unit = self.capabilities.least_copy_bytes(size)
        upload_id = await self.bucket.begin_upload(key)
        upload = S3Upload(key=key, size=size, id=upload_id, unit=unit)
        return PartWriter(self.bucket, upload, is_opener=True, origin=origin.bucket)

    async def _older_bytes(self, key: str) -> int:
        """Returns an older object's size, completed from its upload if needed; or 0."""
        bucket = self.bucket
        try:
            with suppress(ObjectNotFound):
                return (await bucket.stat("writer", key)).size
            longest: tuple[int, str, Sequence[dict[str, Any]]] = 0, "", ()
            async for name, upload_id in bucket.uploads(key):
                if name == key:
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
        """Makes an object that begins with an upload's leading parts."""
        whole = leading_parts(parts)
        try:
            await self.bucket.complete_upload("writer", key, upload_id, whole)
        except StorageError as error:
            if error.retryable or len(whole) == len(parts):
                raise
            # Some servers want all parts named, others none after a gap. Copies of later parts,
            # which move, fail their checksums.
            await self.bucket.complete_upload("writer", key, upload_id, parts)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        upload = msgspec.msgpack.decode(token, type=S3Upload)
        await anyio.lowlevel.checkpoint()
        writer = PartWriter if upload.id else SmallWriter
        return writer(self.bucket, upload, is_opener=False)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
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
        check_key(key)
        check_range(offset, None)
        if num_bytes(views):
            await self.bucket.receive("read_into", key, offset, views)
        else:
            await self.bucket.stat("read_into", key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
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
        """Aborts uploads below ``prefix``, or ``only`` those to these keys; returns the keys."""
        aborted = []
        async for key, upload_id in self.bucket.uploads(prefix):
            if only is None or key in only:
                await self.bucket.abort_upload(key, upload_id)
                aborted.append(key)
        return aborted

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        """Includes folders of unfinished uploads."""
        start = f"{check_key(folder)}/" if folder else ""
        keys: list[str] = []
        troubles: list[StorageError] = []

        async def list_objects() -> None:
            async for page in self.bucket.pages("list_folders", start, Delimiter="/"):
                prefixes = page.get("CommonPrefixes", ())
                keys.extend([self.bucket.relative(each["Prefix"]) for each in prefixes])

        async def list_uploads() -> None:
            try:
                keys.extend([key async for key, _ in self.bucket.uploads(start)])
            except StorageError as error:  # that of the objects counts first
                troubles.append(error)

        await try_each([list_objects, list_uploads], lambda look: look(), at_once=2)
        if troubles:
            raise troubles[0]
        parts = [key.removeprefix(start).partition("/") for key in keys]
        return sorted({name for name, is_folder, _ in parts if is_folder})

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
        await self.bucket.aclose()


class _Writer(BackendWriter):
    def __init__(self, bucket: S3Bucket, upload: S3Upload, *, is_opener: bool) -> None:
        token = msgspec.msgpack.encode(upload)
        super().__init__(upload.key, upload.size, token, url=bucket.url, is_opener=is_opener)
        self._bucket = bucket
        self._upload = upload


class SmallWriter(_Writer):
    """An object that is one put. Keeps a copy of the bytes until it is complete."""

    _data: bytes | None = None
    _crc32c: int | None = None

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        stop = self._check_write(offset, views)
        if not self._is_opener:
            raise self._error("write_at", f"{self.size} bytes are one write, of the opener")
        if stop - offset < self.size:
            raise UsageError(f"{self.key!r}: an object of {self.size} bytes is one write")
        await anyio.lowlevel.checkpoint()
        self._data, self._crc32c = b"".join(views), crc32c

    async def complete(self) -> None:
        if self._data is None and self.size:
            raise self._error("complete", f"0 of {self.size} bytes were written")
        views = [memoryview(self._data or b"")]
        await self._bucket.put("complete", self.key, views, self._crc32c)
        self._has_ended = True

    async def abort(self) -> None:
        self._has_ended = True
        self._data = None


class PartWriter(_Writer):
    def __init__(
        self,
        bucket: S3Bucket,
        upload: S3Upload,
        *,
        is_opener: bool,
        sources: Sequence[ObjectInfo] = (),
        origin: S3Bucket | None = None,
    ) -> None:
        super().__init__(bucket, upload, is_opener=is_opener)
        self._sources = sources
        self._origin = origin
        self._sent: dict[int, Sent] = {}
        self._may_be_complete = False

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Sends one part, or several. Cancellation: at once; some may be stored."""
        for part in await self._split_write(offset, views, crc32c):
            self._sent[part.number] = await self._bucket.send_part(self.key, self._upload.id, part)

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        stop = offset + num_bytes(views)
        sources = [source.key for source in self._sources if stop <= source.size]
        if not sources:
            return False
        parts = await self._split_write(offset, views, crc32c)
        for source in sources:
            for part in parts:
                named = self._bucket.named(source)
                sent = await self._bucket.copy_part(self.key, self._upload.id, part, named)
                if sent is None:
                    break
                self._sent[part.number] = sent
            else:
                return True
        return False

    async def copy_from(self, offset: int, key: str, start: int, stop: int) -> int | None:
        """Copies part by part. Cancellation: at once; some may be stored."""
        assert self._origin is not None
        end = self._check_range(offset, offset + stop - start)
        source = self._origin.named(check_key(key))
        whole: int | None = 0
        for number, low, high in self._cuts(offset, end):
            sent = await self._bucket.copy_range(
                self.key,
                self._upload.id,
                number,
                source,
                start + low - offset,
                start + high - offset,
            )
            self._sent[number] = sent
            if whole is not None:
                found = decode_crc32c(sent.crc32c) if sent.crc32c else None
                whole = None if found is None else combine(whole, found, sent.size)
        return whole

    async def complete(self) -> None:
        """Makes the object of its parts. Repeatable: an answer may have been lost."""
        try:
            parts, answer = await self._complete()
        except StorageError as error:
            # Some servers report a finished upload as a missing object.
            is_gone = isinstance(error, ObjectNotFound) or error_code(error) == "NoSuchUpload"
            if not (self._may_be_complete and is_gone):
                raise
            if (await self._bucket.stat("complete", self.key)).size != self.size:
                raise
        else:
            reported = answer.get("ChecksumCRC32C")
            # Some servers list parts without checksums.
            is_known = all("ChecksumCRC32C" in part for part in parts)
            if reported is not None and is_known and reported not in _whole_checksums(parts):
                raise self._error("complete", "the whole object has another CRC32C than its parts")
        self._has_ended = True

    async def _complete(self) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
        parts = self._own_parts()
        if parts:
            self._may_be_complete = True
            try:
                return parts, await self._request_completion(parts)
            except StorageError as error:
                if error_code(error) != "InvalidPart":
                    raise
                # An acknowledged part is missing, or the answer was damaged.
                logger.debug("%s: %s; its parts are listed", self._url, error)
        parts = await self._list_parts()
        self._may_be_complete = True
        return parts, await self._request_completion(parts)

    async def _request_completion(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return await self._bucket.complete_upload("complete", self.key, self._upload.id, parts)

    async def abort(self) -> None:
        """Running requests may leave garbage parts."""
        if self._is_opener and not self._has_ended:
            await self._bucket.abort_upload(self.key, self._upload.id)
        self._has_ended = True

    async def _split_write(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None
    ) -> Sequence[UploadPart]:
        """Returns parts of about equal length."""
        stop = self._check_write(offset, views)
        if stop == offset:
            return ()
        ranges = self._cuts(offset, stop)
        if len(ranges) == 1 and crc32c is not None:
            bodies: Sequence[Sequence[memoryview]] = [views]
            checksums: Sequence[int] = [crc32c]
        else:
            bodies = [slice_views(views, low - offset, high - offset) for _, low, high in ranges]
            checksums = await self._bucket.checksums(bodies)
            whole = 0
            for body, checksum in zip(bodies, checksums, strict=True):
                whole = combine(whole, checksum, num_bytes(body))
            if crc32c not in (None, whole):
                raise self._bucket.changed("write_at", self.key, "the body to send")
        return [
            UploadPart(number=number, offset=low, views=body, crc32c=checksum)
            for (number, low, _), body, checksum in zip(ranges, bodies, checksums, strict=True)
        ]

    def _cuts(self, offset: int, stop: int) -> Sequence[tuple[int, int, int]]:
        """Returns number, start and stop of the parts of a write, which is not empty."""
        unit = self._upload.unit
        num_parts = stop // unit - offset // unit
        if stop == self.size:
            num_parts = max(1, (stop - offset) // unit)
        elif stop < offset + unit:
            raise UsageError(f"{self.key!r}: a write has at least {unit} bytes")
        cuts = [offset + (stop - offset) * n // num_parts for n in range(num_parts + 1)]
        return [
            (number, low, high)
            for number, (low, high) in enumerate(pairwise(cuts), offset // unit + 1)
        ]

    def _own_parts(self) -> Sequence[dict[str, Any]]:
        """Returns all parts like the server's list; none if others wrote some."""
        parts = [
            {
                "PartNumber": number,
                "ETag": f'"{sent.etag}"',
                # Of a copied part some servers tell none.
                **({"ChecksumCRC32C": sent.crc32c} if sent.crc32c else {}),
                "Size": sent.size,
            }
            for number, sent in sorted(self._sent.items())
            if sent.etag
        ]
        is_whole = sum(part["Size"] for part in leading_parts(parts)) == self.size
        return parts if is_whole else ()

    async def _list_parts(self) -> Sequence[dict[str, Any]]:
        """Returns all writers' parts from the server; they must be the whole object."""
        parts = await self._bucket.parts("complete", self.key, self._upload.id)
        whole = leading_parts(parts)
        num_stored = sum(part["Size"] for part in whole)
        if len(whole) < len(parts):
            number = len(whole) + 1
            raise self._error("complete", f"part {number}, from byte {num_stored} on, is lost")
        if num_stored != self.size:
            raise self._error("complete", f"{num_stored} of {self.size} bytes were written")
        for part in parts:
            number = part["PartNumber"]
            sent = self._sent.get(number)
            if sent is None:
                continue
            if sent.crc32c and part.get("ChecksumCRC32C", sent.crc32c) != sent.crc32c:
                raise self._error("complete", f"part {number} has another CRC32C than was sent")
            if self._sources and etag_of(part) != sent.etag:
                # A copy whose answer was lost may arrive late and replace a sent part.
                raise self._error("complete", f"part {number} is not the one that was sent")
        return parts


def leading_parts(parts: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Returns the parts before the first gap."""
    stop = next((n for n, part in enumerate(parts) if part["PartNumber"] != n + 1), len(parts))
    return parts[:stop]


def _whole_checksums(parts: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns an object's possible CRC32Cs, in both forms of S3."""
    values = [base64.b64decode(part["ChecksumCRC32C"]) for part in parts]
    whole = 0
    for part, value in zip(parts, values, strict=True):
        whole = combine(whole, int.from_bytes(value, "big"), part["Size"])
    return {encode_crc32c(whole), f"{encode_crc32c(crc32c_of(values))}-{len(parts)}"}
