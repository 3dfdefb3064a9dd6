"""Storage in a bucket of S3 or of a server that speaks its protocol: ``s3://bucket/prefix``.

Decides which requests make each verb. Must not know: snapshots, retries, concurrency (wrappers,
which ``open_s3`` puts around it), sockets and signatures (``s3_client``, ``wire``).

- Objects of up to 1 MiB are one put, when they are complete; a joined writer cannot write them.
- Others are multipart uploads. A write's first part is number ``offset // unit + 1``, where the
  unit follows from the object's size; and a write has as many parts as lead to the number of the
  next one: mostly one, sometimes two. So parts are numbered 1, 2, 3, ..., which some servers want,
  and writers on other ranks need to know no more than the upload's id. A write is a unit or longer,
  so that no part is less than half of one. ``complete`` lists the parts and wants them to cover the
  object.
- Every body has its CRC32C with it. A server that compares it repeats it in the answer. Where one
  does not, payloads are signed: what arrives otherwise is refused for its SHA-256. Whether it is
  is tried once per client; where it is not, the MD5 goes along, which every server compares.
- ``put_if_absent`` is a put with ``If-None-Match: *``. Whether a server honours that is tried once
  per client, with an object of its own. Where it does not, ``put_if_absent`` looks, puts and reads
  back: of two writers at the same moment the last wins, and both can see which.
- ``list_folders`` and ``delete_folder`` know unfinished uploads, too: what a dead attempt left is
  found and removed like its objects.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlencode

import anyio
import anyio.lowlevel
import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from actorsnap.errors import (
    ChecksumMismatch,
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
from actorsnap.storage.options import convert_options
from actorsnap.storage.s3_client import (
    UNSIGNED_PAYLOAD,
    S3Client,
    S3Options,
    crc32c_text,
    explained,
    shared_client,
)
from actorsnap.storage.vectored import between, num_bytes
from actorsnap.storage.wire import WireError, WrongLength
from actorsnap.storage.wrappers import RetryPolicy, RetryStorage

__all__ = ["S3Storage", "open_s3"]

logger = logging.getLogger(__name__)

_ONE_PUT_BYTES = 1 << 20
_MAX_PARTS = 10_000
_MAX_OBJECT_BYTES = 5 << 40
_MAX_DELETED = 1000
"""Keys in one request."""

_MISMATCHES = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch"}

_CLEANUP_S = 30.0
"""Ending an upload takes no longer, also if the caller is cancelled; what is left is garbage."""


def open_s3(url: str, context: StorageContext) -> Storage:
    """Opens ``s3://bucket/prefix``. No I/O.

    Raises:
        UsageError: the URL names no bucket, or an option is unknown or wrong.
    """
    options = convert_options(context.options, S3Options, scheme="s3")
    storage = S3Storage(url, context, options)
    policy = RetryPolicy(max_attempts=options.max_attempts, first_delay_s=0.25, max_delay_s=10.0)
    adaptive = AdaptiveStorage(storage, max_operations=options.max_concurrency)
    return RetryStorage(adaptive, policy=policy)


class S3Storage(Storage):
    """One bucket, below a prefix. The module's docstring has the rules.

    Atomicity and durability of all verbs are the server's: an object is there, whole and
    durable, when the request that makes it is answered, and never seen before.
    """

    def __init__(self, url: str, context: StorageContext, options: S3Options) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        prefix = prefix.rstrip("/")
        if not bucket:
            raise UsageError(f"{url!r} names no bucket: s3://bucket/prefix")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.capabilities = Capabilities(
            min_write_bytes=options.part_bytes,
            max_writes=_MAX_PARTS,
            checks_crc32c=True,
            has_conditional_put=options.has_conditional_put is not False,
        )
        self._bucket = bucket
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._context = context
        self._options = options
        self._shared: S3Client | None = None
        self._payer = {"RequestPayer": "requester"} if options.request_payer else {}
        self._read_headers = _headers(self._payer)
        self._properties = _properties(options)
        self._written = _headers({**self._payer, **self._properties})

    @property
    def client(self) -> S3Client:
        """The client; on the event loop that uses this storage."""
        if self._shared is None:
            context = self._context
            run_waiting = context.run_waiting or context.run_blocking
            self._shared = shared_client(self._options, run_waiting)
        return self._shared

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Writes a whole object. Atomicity: the server's."""
        await self._put("put", check_key(key), views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a whole object. Atomicity: the server's, where ``has_conditional_put``.

        Raises:
            ObjectExists: the key exists.
        """
        check_key(key)
        views = [memoryview(data)]
        if await self._has_conditional_put("put_if_absent"):
            await self._put_conditionally("put_if_absent", key, views)
            return
        try:
            await self.stat(key)
        except ObjectNotFound:
            await self._put("put_if_absent", key, views)
            if await self.get(key) == data:
                return
        raise ObjectExists(
            op="put_if_absent", key=key, backend=self.url, detail="the object exists already"
        )

    async def writer(self, key: str, size: int) -> ObjectWriter:
        """Opens a new object. One that exists stays until ``complete`` replaces it."""
        check_key(key)
        if not 0 <= size <= _MAX_OBJECT_BYTES:
            raise UsageError(f"an object of {size} bytes cannot be: S3 takes up to 5 TiB")
        if size <= _ONE_PUT_BYTES:
            return _SmallWriter(self, _Upload(key=key, size=size), is_opener=True)
        upload_id = await self._begin(key)
        unit = max(self.capabilities.min_write_bytes, -(-size // _MAX_PARTS))
        upload = _Upload(key=key, size=size, id=upload_id, unit=unit)
        return _PartWriter(self, upload, is_opener=True)

    async def _begin(self, key: str) -> str:
        """Begins an upload; the first one of a client alone, to learn what the server checks."""
        client = self.client
        if not client.knows_checks:
            async with client.beginning:
                if not client.knows_checks:
                    upload_id = await self._create(key)
                    if client.knows_checks:
                        return upload_id
                    # Not beside uploads: some servers delete their folder with the object that
                    # is tried.
                    await self.abort(key, upload_id)
                    await self._checks_sha256("writer")
        return await self._create(key)

    async def _create(self, key: str) -> str:
        """Begins an upload, and learns whether the server knows the checksums of parts."""
        answer = await self.call(
            "writer",
            key,
            "create_multipart_upload",
            ChecksumAlgorithm="CRC32C",
            **self._properties,
        )
        if self.client.checks_crc32c is None:
            self.client.checks_crc32c = "ChecksumAlgorithm" in answer
        return str(answer["UploadId"])

    async def join_writer(self, token: bytes) -> ObjectWriter:
        """A writer to an object that another party opened. No request: writing tells."""
        upload = msgspec.msgpack.decode(token, type=_Upload)
        await anyio.lowlevel.checkpoint()
        made = _PartWriter if upload.id else _SmallWriter
        return made(self, upload, is_opener=False)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes ``[start, stop)``. One request for a whole object of up to 1 MiB.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before ``stop``.
        """
        check_key(key)
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(f"not a range of bytes: [{start}, {stop})")
        if stop is None and not start:
            with self._explained("get", key):
                response = await self.client.receive(
                    self._bucket, self._full(key), self._read_headers, None
                )
            stop = int(response.headers.get("content-length", len(response.body)))
            if len(response.body) == stop:
                return response.body
        elif stop is None or stop == start:
            size = (await self._stat("get", key)).size
            stop = size if stop is None else stop
            if max(start, stop) > size:
                raise _truncated(key, max(start, stop), size)
        data = bytearray(stop - start)
        if data:
            await self._receive("get", key, start, [memoryview(data)])
        return bytes(data)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills ``views`` from byte ``offset`` on: from the socket, without a copy.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before the views are full.
        Cancellation: at once; nothing writes to the views any more.
        """
        check_key(key)
        if offset < 0:
            raise UsageError(f"not an offset: {offset}")
        if num_bytes(views):
            await self._receive("read_into", key, offset, views)
        else:
            await self._stat("read_into", key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Objects in key order, a page of 1000 per request."""
        async for page in self._pages("list", Prefix=self._prefix + prefix):
            for each in page.get("Contents", ()):
                key = each["Key"].removeprefix(self._prefix)
                yield ObjectInfo(key=key, size=each["Size"], modified_s=_modified_s(each))

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, 1000 per request. Cancellation: some are deleted."""
        full = [self._full(check_key(key)) for key in dict.fromkeys(keys)]
        for start in range(0, len(full), _MAX_DELETED):
            batch = full[start : start + _MAX_DELETED]
            answer = await self.call(
                "delete",
                "",
                "delete_objects",
                Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
            )
            for failed in answer.get("Errors", ()):
                await self._check_deleted(failed)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        """The folders of objects and of unfinished uploads."""
        start = self._prefix + (f"{check_key(folder)}/" if folder else "")
        found: set[str] = set()
        async for page in self._pages("list_folders", Prefix=start, Delimiter="/"):
            found.update(each["Prefix"] for each in page.get("CommonPrefixes", ()))
        async for key, _ in self._uploads(start):
            if "/" in key.removeprefix(start):
                found.add(start + key.removeprefix(start).partition("/")[0])
        return sorted(name.removeprefix(start).rstrip("/") for name in found)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        """Deletes all objects in ``folder`` and aborts all uploads to it; returns their keys."""
        start = f"{check_key(folder)}/"
        keys = []
        async for key, upload_id in self._uploads(self._prefix + start):
            await self.abort(key.removeprefix(self._prefix), upload_id)
            keys.append(key.removeprefix(self._prefix))
        keys.extend([info.key async for info in self.list(start)])
        await self.delete(keys)
        return keys

    async def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object.

        Raises:
            ObjectNotFound: no such object.
        """
        return await self._stat("stat", check_key(key))

    async def aclose(self) -> None:
        """Gives the shared client back. Idempotent."""
        client, self._shared = self._shared, None
        if client is not None:
            await client.release()

    # --- requests -------------------------------------------------------------------------------

    def _full(self, key: str) -> str:
        return self._prefix + key

    @contextmanager
    def _explained(self, op: str, key: str) -> Iterator[None]:
        """Raises what a failure means as an error of this package."""
        try:
            yield
        except (ClientError, BotoCoreError, WireError) as error:
            raise explained(
                error, self.client, op=op, key=key, url=self.url, bucket=self._bucket
            ) from error

    async def call(self, op: str, key: str, operation: str, **params: Any) -> dict[str, Any]:
        """A control call, about the object ``key`` where that is not empty."""
        if key:
            params["Key"] = self._full(key)
        with self._explained(op, key):
            return await self.client.call(operation, Bucket=self._bucket, **self._payer, **params)

    async def _pages(self, op: str, **params: Any) -> AsyncIterator[dict[str, Any]]:
        after: dict[str, str] = {}
        while True:
            page = await self.call(op, "", "list_objects_v2", **params, **after)
            yield page
            if not page.get("IsTruncated"):
                return
            after = {"ContinuationToken": page["NextContinuationToken"]}

    async def _uploads(self, start: str) -> AsyncIterator[tuple[str, str]]:
        """Full key and id of each unfinished upload below ``start``."""
        after: dict[str, str] = {}
        while True:
            try:
                page = await self.call("list", "", "list_multipart_uploads", Prefix=start, **after)
            except StorageError as error:
                if error.retryable:
                    raise
                # Not every server and every policy allows it; then they are the bucket's rules
                # to collect (AbortIncompleteMultipartUpload).
                logger.debug("%s: unfinished uploads cannot be listed: %s", self.url, error.detail)
                return
            for each in page.get("Uploads", ()):
                yield each["Key"], each["UploadId"]
            if not page.get("IsTruncated"):
                return
            after = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    async def _stat(self, op: str, key: str) -> ObjectInfo:
        answer = await self.call(op, key, "head_object")
        return ObjectInfo(key=key, size=answer["ContentLength"], modified_s=_modified_s(answer))

    async def _receive(self, op: str, key: str, offset: int, views: Sequence[memoryview]) -> None:
        stop = offset + num_bytes(views)
        headers = {"Range": f"bytes={offset}-{stop - 1}", **self._read_headers}
        try:
            with self._explained(op, key):
                response = await self.client.receive(self._bucket, self._full(key), headers, views)
        except StorageError as error:
            cause = error.__cause__
            if isinstance(cause, WrongLength) and cause.num_bytes is not None:
                raise _truncated(key, stop, offset + cause.num_bytes) from error
            if _code(error) in ("InvalidRange", "416"):
                raise _truncated(key, stop, offset) from error
            raise
        if offset and not response.headers.get("content-range", "").startswith(f"bytes {offset}-"):
            raise StorageError(
                op=op, key=key, backend=self.url, detail="the server does not heed ranges"
            )

    async def _put(self, op: str, key: str, views: Sequence[memoryview]) -> None:
        await self.send(op, key, {}, self._written, views)

    async def _put_conditionally(self, op: str, key: str, views: Sequence[memoryview]) -> None:
        headers = {**self._written, "If-None-Match": "*"}
        # With all checks at once: a second try would find what the first has created.
        await self.send(op, key, {}, headers, views, is_signed=True)

    async def send(
        self,
        op: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        views: Sequence[memoryview],
        crc32c: int | None = None,
        *,
        is_signed: bool = False,
    ) -> str:
        """Sends an object or a part, with its CRC32C; returns that as S3 writes it."""
        if crc32c is None:
            crc32c = await self._context.run_blocking(crc32c_of, views)
        expected = crc32c_text(crc32c)
        headers = {
            **headers,
            "x-amz-checksum-crc32c": expected,
            "x-amz-sdk-checksum-algorithm": "CRC32C",
        }
        client, reported = self.client, None
        if not is_signed and client.checks_crc32c is not False:
            reported = await self._send(op, key, query, headers, views, UNSIGNED_PAYLOAD)
            client.checks_crc32c = reported is not None
        if reported is None:
            has_md5 = is_signed or not await self._checks_sha256(op)
            hashes = await self._context.run_blocking(_hash, views, has_md5)
            if hashes.crc32c != crc32c:
                raise self._changed(op, key, "what is to be sent")
            if has_md5:
                headers["Content-MD5"] = hashes.md5
            reported = await self._send(op, key, query, headers, views, hashes.sha256)
            client.checks_crc32c = reported is not None
        if reported not in (None, expected):
            raise self._changed(op, key, "what arrived")
        return expected

    async def _send(
        self,
        op: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        views: Sequence[memoryview],
        payload: str,
    ) -> str | None:
        """One request; returns the CRC32C that the server says."""
        with self._explained(op, key):
            response = await self.client.send(
                "PUT", self._bucket, self._full(key), query, headers, views, payload=payload
            )
        return response.headers.get("x-amz-checksum-crc32c")

    def _changed(self, op: str, key: str, what: str) -> StorageError:
        detail = f"bucket {self._bucket!r}: {what} has another CRC32C"
        return StorageError(op=op, key=key, backend=self.url, detail=detail, retryable=True)

    async def _has_conditional_put(self, op: str) -> bool:
        """Whether ``If-None-Match`` works; tried with an object in the scratch folder."""
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
        if not client.has_conditional_put:
            self.capabilities = replace(self.capabilities, has_conditional_put=False)
        return client.has_conditional_put

    async def _probe(self, op: str) -> bool:
        async with self._probe_key() as key:
            try:
                await self._put_conditionally(op, key, [])
                await self._put_conditionally(op, key, [])
            except ObjectExists:
                return True
            except StorageError as error:
                if _code(error) != "NotImplemented":
                    raise
            return False

    async def _checks_sha256(self, op: str) -> bool:
        """Whether a body that is not what is signed is refused; tried with one."""
        client = self.client
        async with client.probing:
            if client.checks_sha256 is None:
                nothing = hashlib.sha256().hexdigest()
                async with self._probe_key() as key:
                    try:
                        await self._send(op, key, {}, self._written, [memoryview(b"x")], nothing)
                        client.checks_sha256 = False
                    except StorageError as error:
                        if error.retryable and _code(error) not in _MISMATCHES:
                            raise
                        client.checks_sha256 = True
            return client.checks_sha256

    @asynccontextmanager
    async def _probe_key(self) -> AsyncIterator[str]:
        """The key of an object in the scratch folder, which is deleted in the end."""
        folder = f"{self._context.scratch}/" if self._context.scratch else ""
        key = f"{folder}.{secrets.token_hex(8)}.probe"
        try:
            yield key
        finally:
            with anyio.CancelScope(shield=True), suppress(StorageError):
                await self.delete([key])

    async def checksums(
        self, key: str, parts: Sequence[Sequence[memoryview]], crc32c: int | None
    ) -> Sequence[int]:
        """The CRC32C of each part of a write, which as a whole is to have this one."""
        found = await self._context.run_blocking(lambda: [crc32c_of(part) for part in parts])
        whole = 0
        for part, checksum in zip(parts, found, strict=True):
            whole = combine(whole, checksum, num_bytes(part))
        if crc32c not in (None, whole):
            raise self._changed("write_at", key, "what is to be sent")
        return found

    async def put_whole(self, key: str, data: bytes, crc32c: int | None) -> None:
        """The put of a small writer."""
        await self.send("complete", key, {}, self._written, [memoryview(data)], crc32c)

    async def send_part(
        self, upload: _Upload, number: int, views: Sequence[memoryview], crc32c: int | None
    ) -> str:
        """Sends a part; returns its CRC32C as S3 writes it."""
        query = {"partNumber": str(number), "uploadId": upload.id}
        return await self.send("write_at", upload.key, query, self._read_headers, views, crc32c)

    async def _check_deleted(self, failed: Mapping[str, Any]) -> None:
        key = str(failed.get("Key", "")).removeprefix(self._prefix)
        with suppress(ObjectNotFound):
            # Some servers call it a failure that there is nothing to delete.
            await self._stat("delete", key)
            failure = {"Error": failed, "ResponseMetadata": {"HTTPStatusCode": 200}}
            with self._explained("delete", key):
                raise ClientError(failure, "DeleteObjects")

    async def abort(self, key: str, upload_id: str) -> None:
        """Ends an upload, also under cancellation; never raises ``StorageError``."""
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            try:
                await self.call(
                    "abort",
                    key,
                    "abort_multipart_upload",
                    UploadId=upload_id,
                )
            except StorageError as error:
                logger.debug("%s: an upload was not aborted: %s", self.url, error)


class _Hashes(NamedTuple):
    """Of a body, as headers have them.

    Attributes:
        md5: Empty where nobody asked for it.
    """

    crc32c: int
    sha256: str
    md5: str


def _hash(views: Sequence[memoryview], has_md5: bool) -> _Hashes:
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    for view in views:
        sha256.update(view)
        if has_md5:
            md5.update(view)
    text = base64.b64encode(md5.digest()).decode() if has_md5 else ""
    return _Hashes(crc32c_of(views), sha256.hexdigest(), text)


class _Upload(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What writers of one object share: a token is this, encoded.

    Attributes:
        id: Of the multipart upload; empty for an object that is one put.
        unit: No write is shorter, but the last one.
    """

    key: str
    size: int
    id: str = ""
    unit: int = 0


class _Writer(ObjectWriter):
    """What both kinds of writers have in common."""

    def __init__(self, storage: S3Storage, upload: _Upload, *, is_opener: bool) -> None:
        self.key = upload.key
        self.size = upload.size
        self.token = msgspec.msgpack.encode(upload)
        self._storage = storage
        self._upload = upload
        self._is_opener = is_opener
        self._has_ended = False

    async def release(self) -> None:
        """Ends a joined writer: all parts are durable already."""
        if self._is_opener:
            raise UsageError(f"{self.key!r}: the opener of an object completes or aborts it")
        self._has_ended = True
        await anyio.lowlevel.checkpoint()

    def _check(self, offset: int, stop: int) -> None:
        if self._has_ended:
            raise self._failed("write_at", "the writer was completed, released or aborted")
        if offset < 0 or stop > self.size:
            raise UsageError(f"[{offset}, {stop}) is outside of {self.key!r}, {self.size} bytes")

    def _failed(self, op: str, detail: str) -> StorageError:
        return StorageError(op=op, key=self.key, backend=self._storage.url, detail=detail)


class _SmallWriter(_Writer):
    """An object that is one put. Its bytes are copied: they are put when it is complete."""

    _data: bytes | None = None
    _crc32c: int | None = None

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        stop = offset + num_bytes(views)
        self._check(offset, stop)
        if not self._is_opener:
            raise self._failed("write_at", f"who opens {self.size} bytes writes them, all at once")
        if stop - offset < self.size:
            raise UsageError(f"{self.key!r}: an object of {self.size} bytes is one write")
        await anyio.lowlevel.checkpoint()
        self._data, self._crc32c = b"".join(views), crc32c

    async def complete(self) -> None:
        if self._data is None and self.size:
            raise self._failed("complete", f"0 of {self.size} bytes were written")
        await self._storage.put_whole(self.key, self._data or b"", self._crc32c)
        self._has_ended = True

    async def abort(self) -> None:
        self._has_ended = True
        self._data = None


class _PartWriter(_Writer):
    """A multipart upload."""

    def __init__(self, storage: S3Storage, upload: _Upload, *, is_opener: bool) -> None:
        super().__init__(storage, upload, is_opener=is_opener)
        self._checksums: dict[int, str] = {}
        self._may_be_complete = False

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Sends one part, or several. Cancellation: at once; they may be there or not."""
        stop = offset + num_bytes(views)
        self._check(offset, stop)
        if stop == offset:
            return
        parts = self._cut(offset, stop, views)
        checksums: Sequence[int | None] = [crc32c]
        if len(parts) > 1:
            checksums = await self._storage.checksums(self.key, parts, crc32c)
        for number, (part, checksum) in enumerate(
            zip(parts, checksums, strict=True), offset // self._upload.unit + 1
        ):
            self._checksums[number] = await self._storage.send_part(
                self._upload, number, part, checksum
            )

    async def complete(self) -> None:
        """Makes the object of its parts. Repeatable: an answer may have been lost."""
        try:
            parts = await self._parts()
            self._may_be_complete = True
            answer = await self._storage.call(
                "complete",
                self.key,
                "complete_multipart_upload",
                UploadId=self._upload.id,
                MultipartUpload={"Parts": [_named(part) for part in parts]},
            )
        except StorageError as error:
            # Some servers call an upload that is gone an object that is not there.
            is_gone = isinstance(error, ObjectNotFound) or _code(error) == "NoSuchUpload"
            if not (self._may_be_complete and is_gone):
                raise
            if (await self._storage.stat(self.key)).size != self.size:
                raise
        else:
            reported = answer.get("ChecksumCRC32C")
            if reported is not None and reported not in _whole(parts):
                raise self._failed("complete", "the whole object has another CRC32C than its parts")
        self._has_ended = True

    async def abort(self) -> None:
        """Ends the upload. Requests under way may leave parts, which are garbage."""
        if self._is_opener and not self._has_ended:
            await self._storage.abort(self.key, self._upload.id)
        self._has_ended = True

    def _cut(
        self, offset: int, stop: int, views: Sequence[memoryview]
    ) -> list[Sequence[memoryview]]:
        """The parts of a write, about equally long."""
        unit = self._upload.unit
        num_parts = stop // unit - offset // unit
        if stop == self.size:
            num_parts = max(1, (stop - offset) // unit)
        elif stop - offset < unit:
            raise UsageError(f"{self.key!r}: a write has at least {unit} bytes")
        cuts = [(stop - offset) * n // num_parts for n in range(num_parts + 1)]
        return [between(views, *cut) for cut in pairwise(cuts)]

    async def _parts(self) -> list[dict[str, Any]]:
        """What the server has, of all writers.

        Raises:
            StorageError: that is not the whole object, or has other checksums.
        """
        parts: list[dict[str, Any]] = []
        after: dict[str, int] = {}
        while True:
            page = await self._storage.call(
                "complete", self.key, "list_parts", UploadId=self._upload.id, **after
            )
            parts += page.get("Parts", ())
            if not page.get("IsTruncated"):
                break
            after = {"PartNumberMarker": page["NextPartNumberMarker"]}
        self._check_parts(parts)
        return parts

    def _check_parts(self, parts: Sequence[Mapping[str, Any]]) -> None:
        position = 0
        for number, part in enumerate(parts, 1):
            if part["PartNumber"] != number:
                raise self._failed("complete", f"part {number}, from byte {position} on, is lost")
            known, reported = self._checksums.get(number), part.get("ChecksumCRC32C")
            if known is not None and reported is not None and reported != known:
                raise self._failed("complete", f"part {number} has another CRC32C than was sent")
            position += part["Size"]
        if position != self.size:
            raise self._failed("complete", f"{position} of {self.size} bytes were written")


def _named(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in ("PartNumber", "ETag", "ChecksumCRC32C") if name in part}


def _whole(parts: Sequence[Mapping[str, Any]]) -> set[str]:
    """The CRC32C of an object of these parts, in both ways that S3 has to say it."""
    values = [base64.b64decode(part["ChecksumCRC32C"]) for part in parts]
    whole = 0
    for part, value in zip(parts, values, strict=True):
        whole = combine(whole, int.from_bytes(value, "big"), part["Size"])
    return {crc32c_text(whole), f"{crc32c_text(crc32c_of(values))}-{len(parts)}"}


_HEADERS = {
    "RequestPayer": "x-amz-request-payer",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "StorageClass": "x-amz-storage-class",
    "Tagging": "x-amz-tagging",
}
"""How bulk requests say what control calls say by parameters."""


def _headers(params: Mapping[str, str]) -> dict[str, str]:
    return {_HEADERS[name]: value for name, value in params.items()}


def _properties(options: S3Options) -> dict[str, str]:
    """What new objects get, as parameters of control calls."""
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


def _code(error: StorageError) -> str | None:
    """What the server called it."""
    cause = error.__cause__
    return cause.response["Error"].get("Code") if isinstance(cause, ClientError) else None


def _truncated(key: str, wanted: int, size: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        key=key, detail=f"truncated: {wanted} bytes are needed, the object has {size}"
    )
