# SPDX-License-Identifier: Apache-2.0
"""Requests to one bucket of S3, and the server's abilities.

Decides which checks a body carries, and finds out which of them the server makes.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import anyio
from botocore.exceptions import BotoCoreError, ClientError

from actorsnap.errors import ObjectExists, ObjectNotFound, StorageError, Throttled
from actorsnap.format.checksum import crc32c_of
from actorsnap.log import Log
from actorsnap.storage.base import CLEANUP_S, ObjectInfo, StorageContext, num_bytes, truncated
from actorsnap.storage.network import encode_crc32c, split_url
from actorsnap.storage.s3_client import (
    UNSIGNED_PAYLOAD,
    BulkTarget,
    S3Client,
    S3Options,
    is_wrong_key,
    shared_client,
    translate_error,
)
from actorsnap.storage.wire import WireError, WrongLength

logger = Log(__name__)

_BUCKET_PATTERN = r"[A-Za-z0-9._-]{1,255}|arn:[A-Za-z0-9:_-]+"
"""Includes names older than Amazon's rules, and access points."""

_MAX_DELETED = 1000
"""Keys in one request."""

_CLEANUP_DELAYS_S = (0.2, 0.5, 1.0)
"""Between tries to delete a probe or to abort an upload, in seconds."""

_MISMATCHES = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch"}


class UploadPart(NamedTuple):
    """A part to be sent, at byte ``offset`` of its object."""

    number: int
    offset: int
    views: Sequence[memoryview]
    crc32c: int


class ObjectName(NamedTuple):
    """An object of any bucket that the client reaches."""

    bucket: str
    name: str


class Sent(NamedTuple):
    """A body that arrived: CRC32C as S3 writes it, ETag without quotes, length."""

    crc32c: str
    etag: str
    size: int


class S3Bucket:
    """One bucket, below a prefix that is not in keys here."""

    def __init__(self, url: str, context: StorageContext, options: S3Options) -> None:
        name, prefix = split_url(url, _BUCKET_PATTERN)
        self.url = f"s3://{name}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._name = name
        self._context = context
        self._options = options
        self._shared: S3Client | None = None
        self._payer = {"RequestPayer": "requester"} if options.request_payer else {}
        self._read_headers = _to_headers(self._payer)
        self._object_properties = _object_properties(options)
        self._written = _to_headers({**self._payer, **self._object_properties})

    @property
    def client(self) -> S3Client:
        if self._shared is None:
            context = self._context
            run_io = context.run_io or context.run_blocking
            self._shared = shared_client(self._options, run_io)
        return self._shared

    async def aclose(self) -> None:
        client, self._shared = self._shared, None
        if client is not None:
            await client.release()

    def full(self, key: str) -> str:
        return self._prefix + key

    def named(self, key: str) -> ObjectName:
        return ObjectName(self._name, self.full(key))

    @contextmanager
    def _translate_errors(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError, WireError) as error:
            failure = translate_error(
                error, self.client, op=op, key=key, url=self.url, bucket=self._name
            )
            if isinstance(error, ClientError):
                error.__traceback__ = None  # only frames of clients: the server refused
            raise failure from (None if is_wrong_key(error) else error)

    async def call(self, op: str, key: str, operation: str, **params: Any) -> dict[str, Any]:
        """Makes a control call about the object ``key``; empty: the bucket."""
        if key:
            params["Key"] = self.full(key)
        with self._translate_errors(op, key):
            return await self.client.call(operation, Bucket=self._name, **self._payer, **params)

    def relative(self, full: str) -> str:
        return full.removeprefix(self._prefix)

    async def _pages(
        self, op: str, key: str, operation: str, markers: Mapping[str, str], **params: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Yields the pages of a list.

        ``markers`` maps fields of an answer to parameters of the next call.
        """
        after: dict[str, Any] = {}
        while True:
            page = await self.call(op, key, operation, **params, **after)
            yield page
            if not page.get("IsTruncated"):
                return
            after = {name: page[field] for field, name in markers.items()}

    def pages(self, op: str, prefix: str, **params: Any) -> AsyncIterator[dict[str, Any]]:
        """Yields up to 1000 objects below ``prefix`` a page."""
        markers = {"NextContinuationToken": "ContinuationToken"}
        full = self.full(prefix)
        return self._pages(op, "", "list_objects_v2", markers, Prefix=full, **params)

    async def uploads(self, prefix: str) -> AsyncIterator[tuple[str, str]]:
        """Yields key and id of unfinished uploads."""
        markers = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
        full = self.full(prefix)
        pages = self._pages("list", "", "list_multipart_uploads", markers, Prefix=full)
        try:
            async for page in pages:
                for each in page.get("Uploads", ()):
                    yield self.relative(each["Key"]), each["UploadId"]
        except StorageError as error:
            if error.retryable:
                raise
            # Not every server and policy allows it; the bucket's rules collect uploads
            # (AbortIncompleteMultipartUpload).
            logger.debug("%s: unfinished uploads cannot be listed: %s", self.url, error.detail)

    async def stat(self, op: str, key: str) -> ObjectInfo:
        answer = await self.call(op, key, "head_object")
        return ObjectInfo(key=key, size=answer["ContentLength"], modified_s=_modified_s(answer))

    async def receive(self, op: str, key: str, offset: int, views: Sequence[memoryview]) -> None:
        stop = offset + num_bytes(views)
        target = self._target(key, {"Range": f"bytes={offset}-{stop - 1}", **self._read_headers})
        try:
            with self._translate_errors(op, key):
                response = await self.client.receive(target, views)
        except StorageError as error:
            cause = error.__cause__
            if isinstance(cause, WrongLength) and cause.num_bytes is not None:
                raise truncated(key, stop, offset + cause.num_bytes) from error
            if error_code(error) in ("InvalidRange", "416"):
                raise truncated(key, stop) from error
            raise
        if offset and not response.headers.get("content-range", "").startswith(f"bytes {offset}-"):
            raise StorageError(
                op=op, key=key, backend=self.url, detail="the server does not heed ranges"
            )

    async def get(self, op: str, key: str) -> tuple[bytes, int]:
        """Returns an object's first bytes and its size."""
        with self._translate_errors(op, key):
            response = await self.client.receive(self._target(key, self._read_headers), None)
        return response.body, int(response.headers.get("content-length", len(response.body)))

    async def put(
        self, op: str, key: str, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self._send(op, key, self._target(key, self._written), views, crc32c)

    async def put_conditionally(self, op: str, key: str, views: Sequence[memoryview]) -> None:
        target = self._target(key, {**self._written, "If-None-Match": "*"})
        # With all checks at once: a retry would find the first try's object.
        await self._send(op, key, target, views, is_signed=True)

    def _target(self, key: str, headers: Mapping[str, str]) -> BulkTarget:
        return BulkTarget(self._name, self.full(key), headers)

    async def _send(
        self,
        op: str,
        key: str,
        target: BulkTarget,
        views: Sequence[memoryview],
        crc32c: int | None = None,
        *,
        is_signed: bool = False,
    ) -> Sent:
        if crc32c is None:
            (crc32c,) = await self.checksums([views])
        expected = encode_crc32c(crc32c)
        headers = {
            **target.headers,
            "x-amz-checksum-crc32c": expected,
            "x-amz-sdk-checksum-algorithm": "CRC32C",
        }
        target = target._replace(headers=headers)
        client, sent = self.client, None
        if not is_signed and client.checks_crc32c is not False:
            sent = await self._send_as(op, key, target, views, UNSIGNED_PAYLOAD)
            client.checks_crc32c = bool(sent.crc32c)
        if sent is None or not sent.crc32c:
            has_md5 = is_signed or not await self._checks_sha256(op)
            names = ["sha256", "md5"] if has_md5 else ["sha256"]
            actual, digests = await self._context.run_blocking(_hash, views, names)
            if actual != crc32c:
                raise self.changed(op, key, "the body to send")
            if has_md5:
                headers["Content-MD5"] = base64.b64encode(digests[1]).decode()
            sent = await self._send_as(op, key, target, views, digests[0].hex())
            client.checks_crc32c = bool(sent.crc32c)
        if sent.crc32c not in ("", expected):
            raise self.changed(op, key, "the body that arrived")
        return sent._replace(crc32c=expected)

    async def _send_as(
        self, op: str, key: str, target: BulkTarget, views: Sequence[memoryview], payload: str
    ) -> Sent:
        with self._translate_errors(op, key):
            response = await self.client.send(target, views, payload)
        crc32c = response.headers.get("x-amz-checksum-crc32c", "")
        return Sent(crc32c, response.headers.get("etag", "").strip('"'), num_bytes(views))

    def changed(self, op: str, key: str, what: str) -> StorageError:
        detail = f"bucket {self._name!r}: {what} has another CRC32C"
        return StorageError(op=op, key=key, backend=self.url, detail=detail, retryable=True)

    async def has_conditional_put(self, op: str) -> bool:
        """Whether ``If-None-Match`` works; tried in the scratch folder."""
        client = self.client
        async with client.probing:
            if client.has_conditional_put is None:
                client.has_conditional_put = await self._probe(op)
                if not client.has_conditional_put:
                    logger.warning(
                        "%s: the server does not heed If-None-Match: of two writers at the same "
                        "moment the last one wins, and each sees by reading back whose it is",
                        self.url,
                    )
        return client.has_conditional_put

    async def _probe(self, op: str) -> bool:
        async with self._probe_key() as key:
            try:
                await self.put_conditionally(op, key, [])
                await self.put_conditionally(op, key, [])
            except ObjectExists:
                return True
            except StorageError as error:
                if error_code(error) != "NotImplemented":
                    raise
            return False

    async def _checks_sha256(self, op: str) -> bool:
        """Whether a body that differs from the signed one is refused; tried."""
        client = self.client
        async with client.probing:
            if client.checks_sha256 is None:
                nothing = hashlib.sha256().hexdigest()
                async with self._probe_key() as key:
                    try:
                        views = [memoryview(b"x")]
                        target = self._target(key, self._written)
                        await self._send_as(op, key, target, views, nothing)
                        client.checks_sha256 = False
                    except StorageError as error:
                        if error.retryable and error_code(error) not in _MISMATCHES:
                            raise
                        client.checks_sha256 = True
            return client.checks_sha256

    @asynccontextmanager
    async def _probe_key(self) -> AsyncIterator[str]:
        """Yields a key in the scratch folder; deletes its object at the end."""
        folder = f"{self._context.scratch}/" if self._context.scratch else ""
        key = f"{folder}.{secrets.token_hex(8)}.probe"
        try:
            yield key
        finally:
            with anyio.CancelScope(shield=True), suppress(StorageError):
                await self._delete_probe(key)

    async def _delete_probe(self, key: str) -> None:
        # Nothing would delete the object later.
        await self._try_again(lambda: self.delete([key]))

    async def _try_again(self, call: Callable[[], Awaitable[object]]) -> None:
        """Makes a call that no retry policy wraps."""
        for delay_s in _CLEANUP_DELAYS_S:
            try:
                await call()
                return
            except StorageError as error:
                if not error.retryable:
                    raise
            await anyio.sleep(delay_s)
        await call()

    async def checksums(self, bodies: Sequence[Sequence[memoryview]]) -> Sequence[int]:
        return await self._context.run_blocking(lambda: [crc32c_of(views) for views in bodies])

    async def delete(self, keys: Sequence[str]) -> None:
        full = [self.full(key) for key in dict.fromkeys(keys)]
        for start in range(0, len(full), _MAX_DELETED):
            batch = full[start : start + _MAX_DELETED]
            listed = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
            answer = await self.call("delete", "", "delete_objects", Delete=listed)
            for failed in answer.get("Errors", ()):
                key = self.relative(str(failed.get("Key", "")))
                with suppress(ObjectNotFound):
                    # Some servers report a missing object as a failure.
                    await self.stat("delete", key)
                    failure = {"Error": failed, "ResponseMetadata": {"HTTPStatusCode": 200}}
                    with self._translate_errors("delete", key):
                        raise ClientError(failure, "DeleteObjects")

    async def begin_upload(self, key: str) -> str:
        """Begins an upload; returns its id. The first one alone learns the server's checks."""
        client = self.client
        if not client.knows_checks():
            async with client.beginning:
                if not client.knows_checks():
                    upload_id = await self._create_upload(key)
                    if client.knows_checks():
                        return upload_id
                    # Not during uploads: some servers delete their folder with the tried object.
                    await self.abort_upload(key, upload_id)
                    await self._checks_sha256("writer")
        return await self._create_upload(key)

    async def _create_upload(self, key: str) -> str:
        """Begins an upload; learns whether the server checks parts' checksums."""
        params = {"ChecksumAlgorithm": "CRC32C", **self._object_properties}
        answer = await self.call("writer", key, "create_multipart_upload", **params)
        if self.client.checks_crc32c is None:
            self.client.checks_crc32c = "ChecksumAlgorithm" in answer
        return str(answer["UploadId"])

    async def send_part(self, key: str, upload_id: str, part: UploadPart) -> Sent:
        query = {"partNumber": str(part.number), "uploadId": upload_id}
        target = self._target(key, self._read_headers)._replace(query=query)
        return await self._send("write_at", key, target, part.views, part.crc32c)

    async def parts(self, op: str, key: str, upload_id: str) -> Sequence[dict[str, Any]]:
        """Returns the server's list of parts, by rising number."""
        markers = {"NextPartNumberMarker": "PartNumberMarker"}
        pages = self._pages(op, key, "list_parts", markers, UploadId=upload_id)
        return [part async for page in pages for part in page.get("Parts", ())]

    async def complete_upload(
        self, op: str, key: str, upload_id: str, parts: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        names = {"PartNumber", "ETag"}
        if self.client.checks_crc32c is not False:
            names.add("ChecksumCRC32C")
        named = [{name: part[name] for name in names & part.keys()} for part in parts]
        params = {"UploadId": upload_id, "MultipartUpload": {"Parts": named}}
        return await self.call(op, key, "complete_multipart_upload", **params)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Ends an upload, also under cancellation; never raises ``StorageError``.

        An upload that it cannot end is logged as a warning.
        """
        why: object = f"the server did not answer within {CLEANUP_S:g} s"
        with anyio.move_on_after(CLEANUP_S, shield=True):
            try:
                await self._try_again(
                    lambda: self.call("abort", key, "abort_multipart_upload", UploadId=upload_id)
                )
                return
            except StorageError as error:
                if error_code(error) in ("NoSuchUpload", "404"):
                    return
                why = error
        logger.warning(
            "%s: an unfinished upload of %s is left; `actorsnap rm --garbage` of the snapshot's "
            "URL deletes it (%s)",
            self.url,
            key,
            why,
        )

    async def copies_parts(self, key: str, source: ObjectName) -> bool:
        """Whether the server copies from ``source``; tried with an upload to ``key``.

        Some write an empty part, which cannot be written again.
        """
        client = self.client
        async with client.probing:
            if client.copies_parts is None:
                upload_id = await self._create_upload(key)
                try:
                    copied = await self._copy("writer", key, upload_id, 1, source, "bytes=0-0")
                    client.copies_parts = bool(copied)
                except StorageError as error:
                    if error.retryable:
                        raise
                    client.copies_parts = False
                finally:
                    await self.abort_upload(key, upload_id)
        return client.copies_parts

    async def copy_part(
        self, key: str, upload_id: str, part: UploadPart, source: ObjectName
    ) -> Sent | None:
        """Copies a part from the same place in ``source``; None if that has other bytes."""
        size = num_bytes(part.views)
        bytes_range = f"bytes={part.offset}-{part.offset + size - 1}"
        try:
            copied = await self._copy("reuse", key, upload_id, part.number, source, bytes_range)
        except Throttled:
            raise
        except StorageError as error:
            logger.debug("%s: a part is sent, not copied: %s", self.url, error)
            return None
        sent = Sent(encode_crc32c(part.crc32c), etag_of(copied), size)
        if "ChecksumCRC32C" in copied:
            return sent if copied["ChecksumCRC32C"] == sent.crc32c else None
        actual, (md5,) = await self._context.run_blocking(_hash, part.views, ["md5"])
        return sent if (md5.hex(), actual) == (sent.etag, part.crc32c) else None

    async def copy_range(
        self, key: str, upload_id: str, number: int, source: ObjectName, start: int, stop: int
    ) -> Sent:
        """Copies bytes ``[start, stop)`` of ``source`` as a part; its CRC32C may be unknown."""
        bytes_range = f"bytes={start}-{stop - 1}"
        copied = await self._copy("copy_from", key, upload_id, number, source, bytes_range)
        if not copied:
            detail = "the server answered a copy of a part with nothing"
            raise StorageError(op="copy_from", key=key, backend=self.url, detail=detail)
        return Sent(str(copied.get("ChecksumCRC32C", "")), etag_of(copied), stop - start)

    async def _copy(
        self, op: str, key: str, upload_id: str, number: int, source: ObjectName, bytes_range: str
    ) -> Mapping[str, Any]:
        answer = await self.call(
            op,
            key,
            "upload_part_copy",
            UploadId=upload_id,
            PartNumber=number,
            CopySource={"Bucket": source.bucket, "Key": source.name},
            CopySourceRange=bytes_range,
        )
        copied: Mapping[str, Any] = answer.get("CopyPartResult", {})
        return copied


def _hash(views: Sequence[memoryview], names: Sequence[str]) -> tuple[int, list[bytes]]:
    digests = [hashlib.new(name, usedforsecurity=False) for name in names]
    for view in views:
        for digest in digests:
            digest.update(view)
    return crc32c_of(views), [digest.digest() for digest in digests]


def etag_of(part: Mapping[str, Any]) -> str:
    """Removes quotes, which servers add in some answers only."""
    return str(part.get("ETag", "")).strip('"')


_HEADERS = {
    "RequestPayer": "x-amz-request-payer",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "StorageClass": "x-amz-storage-class",
    "Tagging": "x-amz-tagging",
}
"""Headers of bulk requests, by the parameter of control calls."""


def _to_headers(params: Mapping[str, str]) -> dict[str, str]:
    return {_HEADERS[name]: value for name, value in params.items()}


def _object_properties(options: S3Options) -> dict[str, str]:
    params = {
        "ServerSideEncryption": options.sse,
        "SSEKMSKeyId": options.kms_key_id,
        "StorageClass": options.storage_class,
        "Tagging": urlencode(options.tags) or None,
    }
    return {name: value for name, value in params.items() if value is not None}


def _modified_s(answer: Mapping[str, Any]) -> float:
    modified: datetime | None = answer.get("LastModified")
    return 0.0 if modified is None else modified.timestamp()


def error_code(error: StorageError) -> str | None:
    cause = error.__cause__
    return cause.response["Error"].get("Code") if isinstance(cause, ClientError) else None


def info_of(key: str, listed: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(key=key, size=listed["Size"], modified_s=_modified_s(listed))
