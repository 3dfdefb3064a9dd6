"""Writers of objects in S3: one put, or a multipart upload.

Decides an object's parts, and whether the server has all of them. Must not know: the verbs of a
storage, headers, the server's checks (``s3_bucket``). ``s3`` has the rules in words.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import anyio.lowlevel
import msgspec

from actorsnap.errors import ObjectNotFound, StorageError, UsageError
from actorsnap.format.checksum import combine, crc32c_of
from actorsnap.log import Log
from actorsnap.storage.base import ObjectWriter, check_write
from actorsnap.storage.cloud import encode_crc32c
from actorsnap.storage.s3_bucket import S3Bucket, Sent, error_code, etag_of
from actorsnap.storage.vectored import num_bytes, slice_views

__all__ = ["PartWriter", "SmallWriter", "OlderObject", "S3Upload", "leading_parts"]

logger = Log(__name__)


class OlderObject(NamedTuple):
    """An object whose bytes may be the leading ones of another."""

    key: str
    size: int


class S3Upload(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The state shared by the writers of one object; encoded, it is the token.

    Attributes:
        id: Of the multipart upload; empty for an object that is one put.
        unit: Least size of a write, the last one excepted.
    """

    key: str
    size: int
    id: str = ""
    unit: int = 0


class _Part(NamedTuple):
    number: int
    offset: int
    views: Sequence[memoryview]
    crc32c: int


class _Writer(ObjectWriter):
    """The common part of both kinds of writers."""

    def __init__(self, bucket: S3Bucket, upload: S3Upload, *, is_opener: bool) -> None:
        self.key = upload.key
        self.size = upload.size
        self.token = msgspec.msgpack.encode(upload)
        self._bucket = bucket
        self._upload = upload
        self._is_opener = is_opener
        self._has_ended = False

    async def release(self) -> None:
        """Ends a joined writer: its parts are durable already."""
        if self._is_opener:
            raise UsageError(f"{self.key!r}: the opener of an object completes or aborts it")
        self._has_ended = True
        await anyio.lowlevel.checkpoint()

    def _check(self, offset: int, views: Sequence[memoryview]) -> int:
        """Returns the end of a write."""
        if self._has_ended:
            raise self._error("write_at", "the writer was completed, released or aborted")
        return check_write(self, offset, views)

    def _error(self, op: str, detail: str) -> StorageError:
        return StorageError(op=op, key=self.key, backend=self._bucket.url, detail=detail)


class SmallWriter(_Writer):
    """An object that is one put. Keeps a copy of the bytes until it is complete."""

    _data: bytes | None = None
    _crc32c: int | None = None

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        stop = self._check(offset, views)
        if not self._is_opener:
            raise self._error("write_at", f"who opens {self.size} bytes writes them, all at once")
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
    """A multipart upload."""

    def __init__(
        self,
        bucket: S3Bucket,
        upload: S3Upload,
        *,
        is_opener: bool,
        sources: Sequence[OlderObject] = (),
    ) -> None:
        super().__init__(bucket, upload, is_opener=is_opener)
        self._sources = sources
        self._sent: dict[int, Sent] = {}
        self._may_be_complete = False

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Sends one part, or several. Cancellation: at once; they may be stored or not."""
        for part in await self._split_write(offset, views, crc32c):
            self._sent[part.number] = await self._bucket.send_part(
                self.key, self._upload.id, part.number, part.views, part.crc32c
            )

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        """Copies the parts. Cancellation: at once; they may be stored or not."""
        stop = offset + num_bytes(views)
        sources = [source.key for source in self._sources if stop <= source.size]
        if not sources:
            return False
        parts = await self._split_write(offset, views, crc32c)
        for source in sources:
            if await self._copy(source, parts):
                return True
        return False

    async def _copy(self, source: str, parts: Sequence[_Part]) -> bool:
        for part in parts:
            sent = await self._bucket.copy_part(
                self.key,
                self._upload.id,
                part.number,
                source,
                part.offset,
                part.views,
                part.crc32c,
            )
            if sent is None:
                return False
            self._sent[part.number] = sent
        return True

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
            # Some servers list parts without their checksums.
            is_known = all("ChecksumCRC32C" in part for part in parts)
            if reported is not None and is_known and reported not in _whole_checksums(parts):
                raise self._error("complete", "the whole object has another CRC32C than its parts")
        self._has_ended = True

    async def _complete(self) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
        """Returns the object's parts, and the server's answer to the completion."""
        parts = self._own_parts()
        if parts:
            self._may_be_complete = True
            try:
                return parts, await self._request_completion(parts)
            except StorageError as error:
                if error_code(error) != "InvalidPart":
                    raise
                # It lacks a part that it acknowledged, or its answer was damaged on the way.
                logger.debug("%s: %s; what has it?", self._bucket.url, error)
        parts = await self._list_parts()
        self._may_be_complete = True
        return parts, await self._request_completion(parts)

    async def _request_completion(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return await self._bucket.complete_upload("complete", self.key, self._upload.id, parts)

    async def abort(self) -> None:
        """Ends the upload. Running requests may leave parts, which are garbage."""
        if self._is_opener and not self._has_ended:
            await self._bucket.abort_upload(self.key, self._upload.id)
        self._has_ended = True

    async def _split_write(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None
    ) -> Sequence[_Part]:
        """Returns the parts of a write, of about equal length.

        Raises:
            StorageError: its bytes have another CRC32C; retryable.
        """
        stop = self._check(offset, views)
        if stop == offset:
            return ()
        unit = self._upload.unit
        num_parts = stop // unit - offset // unit
        if stop == self.size:
            num_parts = max(1, (stop - offset) // unit)
        elif stop < offset + unit:
            raise UsageError(f"{self.key!r}: a write has at least {unit} bytes")
        if num_parts == 1 and crc32c is not None:
            bodies: Sequence[Sequence[memoryview]] = [views]
            checksums: Sequence[int] = [crc32c]
        else:
            cuts = [(stop - offset) * n // num_parts for n in range(num_parts + 1)]
            bodies = [slice_views(views, *cut) for cut in pairwise(cuts)]
            checksums = await self._checksums(bodies, crc32c)
        parts = []
        for number, (body, checksum) in enumerate(
            zip(bodies, checksums, strict=True), offset // unit + 1
        ):
            parts.append(_Part(number=number, offset=offset, views=body, crc32c=checksum))
            offset += num_bytes(body)
        return parts

    async def _checksums(
        self, bodies: Sequence[Sequence[memoryview]], crc32c: int | None
    ) -> Sequence[int]:
        """Returns the CRC32C of each part of a write, after a check of the whole's."""
        checksums = await self._bucket.checksums(bodies)
        whole = 0
        for body, checksum in zip(bodies, checksums, strict=True):
            whole = combine(whole, checksum, num_bytes(body))
        if crc32c not in (None, whole):
            raise self._bucket.changed("write_at", self.key, "what is to be sent")
        return checksums

    def _own_parts(self) -> Sequence[dict[str, Any]]:
        """Returns all parts like the server's list if this writer wrote them all; else none."""
        own = sorted(self._sent.items())
        parts = [
            {
                "PartNumber": number,
                "ETag": f'"{sent.etag}"',
                "ChecksumCRC32C": sent.crc32c,
                "Size": sent.size,
            }
            for number, sent in own
            if sent.etag
        ]
        is_whole = sum(part["Size"] for part in leading_parts(parts)) == self.size
        return parts if is_whole else ()

    async def _list_parts(self) -> Sequence[dict[str, Any]]:
        """Returns the server's parts, of all writers.

        Raises:
            StorageError: they are not the whole object, or not what was sent.
        """
        parts = await self._bucket.parts("complete", self.key, self._upload.id)
        whole = leading_parts(parts)
        num_stored = sum(part["Size"] for part in whole)
        if len(whole) < len(parts):
            number = len(whole) + 1
            raise self._error("complete", f"part {number}, from byte {num_stored} on, is lost")
        if num_stored != self.size:
            raise self._error("complete", f"{num_stored} of {self.size} bytes were written")
        for part in parts:
            self._check_part(part)
        return parts

    def _check_part(self, part: Mapping[str, Any]) -> None:
        number = part["PartNumber"]
        sent = self._sent.get(number)
        if sent is None:
            return
        if part.get("ChecksumCRC32C", sent.crc32c) != sent.crc32c:
            raise self._error("complete", f"part {number} has another CRC32C than was sent")
        if self._sources and etag_of(part) != sent.etag:
            # A copy whose answer was lost may arrive late and replace a sent part.
            raise self._error("complete", f"part {number} is not the one that was sent")


def leading_parts(parts: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Returns the parts without a gap, from the first byte on."""
    stop = next((n for n, part in enumerate(parts) if part["PartNumber"] != n + 1), len(parts))
    return parts[:stop]


def _whole_checksums(parts: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the CRC32C of an object of these parts, in both forms of S3."""
    values = [base64.b64decode(part["ChecksumCRC32C"]) for part in parts]
    whole = 0
    for part, value in zip(parts, values, strict=True):
        whole = combine(whole, int.from_bytes(value, "big"), part["Size"])
    return {encode_crc32c(whole), f"{encode_crc32c(crc32c_of(values))}-{len(parts)}"}
