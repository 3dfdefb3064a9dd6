# SPDX-License-Identifier: Apache-2.0
"""Requests to one bucket of Google Cloud Storage, by its JSON API.

All requests go over a ``Wire``; access tokens come from the caller or from gcloud-aio-auth. An
upload is one *multipart* request: the object's metadata with the expected CRC32C, then the bytes.
Downloads have it in a header; it is compared for a whole object.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from email import message_from_bytes
from functools import partial
from http.client import responses
from itertools import islice
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import anyio
import msgspec
from gcloud.aio.auth import Token

from actorsnap.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    Throttled,
)
from actorsnap.format.checksum import crc32c, crc32c_of
from actorsnap.storage.base import RunBlocking, StorageContext, flat, num_bytes, truncated, try_each
from actorsnap.storage.network import (
    NetworkOptions,
    check_secret,
    decode_crc32c,
    encode_crc32c,
    parse_retry_after,
    remedy,
)
from actorsnap.storage.wire import Request, Response, Wire, WireError, WrongLength, is_unknown_host

_ROOT = "https://storage.googleapis.com"
_FIELDS = "name,size,crc32c,updated"
_IF_ABSENT = {"ifGenerationMatch": "0"}
_CONTENT_TYPE = "application/octet-stream"
_DETAIL_CHARS = 300
_PLACES = "the network, endpoint_url, STORAGE_EMULATOR_HOST and ca_bundle"
_SCOPES = ["https://www.googleapis.com/auth/devstorage.full_control"]
_REMEDY = (
    "Name a key by credentials_file or GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth "
    "application-default login`, or say anonymous=True for an emulator or a public bucket"
)
_MAX_BATCH = 100
"""Calls in one request."""


class GsOptions(NetworkOptions, frozen=True, kw_only=True):
    """``storage_options`` of ``gs://``, in addition to ``NetworkOptions``.

    ``endpoint_url`` defaults to ``STORAGE_EMULATOR_HOST``, which needs no credentials, or Google.

    Attributes:
        credentials_file: A service account's key, an authorized user, or a workload identity pool's
            configuration. None: Google's application default credentials.
        token: An access token instead; it is not renewed.
        user_project: Pays for requests.
        storage_class: Of new objects. None: the bucket's.
        kms_key: Full resource name of the Cloud KMS key for new objects.
    """

    credentials_file: str | None = None
    token: str | None = None
    user_project: str | None = None
    storage_class: str | None = None
    kms_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum([self.anonymous, self.token is not None, self.credentials_file is not None]) > 1:
            raise ValueError("anonymous, token and credentials_file exclude each other")
        check_secret("token", self.token)

    def __repr__(self) -> str:
        # Without the token.
        return f"GsOptions(endpoint_url={self.endpoint_url!r}, anonymous={self.anonymous})"


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """Name in the bucket, size in bytes, checksum, seconds since 1970."""

    name: str
    size: int
    crc32c: int
    modified_s: float


class NewObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object to create. Unless ``if_absent``, one of the same name is replaced."""

    name: str
    storage_class: str | None
    if_absent: bool = False

    def metadata(self, **fields: str) -> dict[str, str]:
        return (
            fields if self.storage_class is None else {**fields, "storageClass": self.storage_class}
        )


class Page(msgspec.Struct, frozen=True, kw_only=True):
    resources: Sequence[Resource]
    folders: Sequence[str]


class GsClient:
    """One bucket. For one event loop; connects on first use.

    A call is one request, unless documented otherwise, and raises ``StorageError``. ``op`` and
    ``key`` are for errors, ``name`` is the object's in the bucket.

    Cancellation: at once, with the memory free; the request may have had its effect.
    """

    def __init__(self, bucket: str, url: str, options: GsOptions, context: StorageContext) -> None:
        emulator = None if options.endpoint_url else os.environ.get("STORAGE_EMULATOR_HOST")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        self._root = (options.endpoint_url or emulator or _ROOT).rstrip("/")
        self._is_anonymous = options.anonymous or bool(emulator)
        self.bucket = bucket
        self.url = url
        self.options = options
        self._context = context
        self._run = context.run_blocking
        self._connecting = anyio.Lock()
        self._wire: Wire | None = None
        self._credentials: _Credentials | None = None

    async def upload(
        self,
        op: str,
        key: str,
        new: NewObject,
        views: Sequence[memoryview],
        crc: int | None = None,
    ) -> Resource:
        """Creates an object of the bytes of ``views``; ``crc`` is their CRC32C, if known.

        Raises:
            ObjectExists: It exists, and ``if_absent``.
            StorageError: Retryable, if other bytes arrived.
        """
        views = flat(views)
        if crc is None:
            crc = await self._run(crc32c_of, views)
        boundary = secrets.token_hex(16)
        metadata = new.metadata(crc32c=encode_crc32c(crc))
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(metadata)}\r\n"
            f"--{boundary}\r\nContent-Type: {_CONTENT_TYPE}\r\n\r\n"
        )
        tail = f"\r\n--{boundary}--\r\n"
        body = [memoryview(head.encode()), *views, memoryview(tail.encode())]
        query = self._creation_query(new, uploadType="multipart", name=new.name, fields=_FIELDS)
        self._object_url(op, key, new.name)  # refuses bad names
        url = f"{self._root}/upload/storage/v1/b/{self.bucket}/o?{query}"
        content = {"content-type": f"multipart/related; boundary={boundary}"}
        response = await self._send(op, key, "POST", url, content, body, is_bulk=True)
        stored = self._resource(op, key, self._json(op, key, response.body))
        if stored.crc32c != crc or stored.size != num_bytes(views):
            # The service refuses them; emulators may store them.
            await self.delete(op, {new.name: key})
            raise self._error(op, key, "other bytes were stored than sent", retryable=True)
        return stored

    async def compose(self, op: str, key: str, new: NewObject, sources: Sequence[str]) -> Resource:
        """Concatenates up to 32 objects, in this order."""
        content = {
            "sourceObjects": [{"name": source} for source in sources],
            "destination": new.metadata(contentType=_CONTENT_TYPE),
        }
        query = self._creation_query(new, fields=_FIELDS)
        url = f"{self._object_url(op, key, new.name)}/compose?{query}"
        return self._resource(op, key, await self._post(op, key, url, content))

    async def copy(
        self, op: str, key: str, new: NewObject, source: str, bucket: str | None = None
    ) -> Resource:
        """Copies an object, of another ``bucket`` if given.

        A change of place, class or key is a real copy and takes more than one request.
        """
        name = quote(new.name, safe="")
        place = self._object_url(op, key, source, bucket)
        url = f"{place}/rewriteTo/b/{self.bucket}/o/{name}"
        params = {"fields": f"rewriteToken,resource({_FIELDS})"}
        if self.options.kms_key is not None:
            params["destinationKmsKeyName"] = self.options.kms_key
        if new.if_absent:
            params |= _IF_ABSENT
        content = new.metadata(contentType=_CONTENT_TYPE)
        while True:
            answer = await self._post(op, key, f"{url}?{self._query(**params)}", content)
            if not answer.get("rewriteToken"):
                return self._resource(op, key, answer.get("resource", {}))
            params["rewriteToken"] = str(answer["rewriteToken"])  # it continues there

    async def stat(self, op: str, key: str, name: str) -> Resource:
        url = f"{self._object_url(op, key, name)}?{self._query(fields=_FIELDS)}"
        response = await self._send(op, key, "GET", url)
        return self._resource(op, key, self._json(op, key, response.body))

    async def download(
        self, op: str, key: str, name: str, start: int, stop: int | None
    ) -> bytes | None:
        """Returns the existing bytes of ``[start, stop)``; None if there is no byte ``start``."""
        bounds = {}
        if start or stop is not None:
            bounds["range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        url = f"{self._object_url(op, key, name)}?{self._query(alt='media')}"
        try:
            response = await self._send(op, key, "GET", url, bounds)
        except _NoSuchRange:
            return None
        data, known = response.body, _stored_checksum(response.headers)
        if not bounds and known is not None and await self._run(crc32c, data) != known:
            raise self._error(op, key, "other bytes arrived than are stored", retryable=True)
        return data

    async def read_into(
        self, op: str, key: str, name: str, offset: int, views: Sequence[memoryview]
    ) -> None:
        stop = offset + num_bytes(views)
        url = f"{self._object_url(op, key, name)}?{self._query(alt='media')}"
        bounds = {"range": f"bytes={offset}-{stop - 1}"}

        try:
            await self._send(op, key, "GET", url, bounds, into=views, is_bulk=True)
        except _NoSuchRange:
            raise truncated(key, stop) from None

    async def pages(
        self, op: str, key: str, prefix: str, *, delimiter: str = ""
    ) -> AsyncIterator[Page]:
        """Yields objects whose name starts with ``prefix``, by name; a request per page. Longer
        names with ``delimiter`` are reported as folders, which end in it."""
        params = {
            "prefix": prefix,
            "delimiter": delimiter,
            "maxResults": "1000",
            "fields": f"nextPageToken,prefixes,items({_FIELDS})",
        }
        params = {name: value for name, value in params.items() if value}
        while True:
            url = f"{self._root}/storage/v1/b/{self.bucket}/o?{self._query(**params)}"
            answer = self._json(op, key, (await self._send(op, key, "GET", url)).body)
            yield Page(
                resources=[self._resource(op, key, item) for item in answer.get("items", ())],
                folders=answer.get("prefixes", ()),
            )
            if not answer.get("nextPageToken"):
                return
            params["pageToken"] = answer["nextPageToken"]

    async def delete(self, op: str, names: Mapping[str, str]) -> None:
        """Deletes up to 100 objects per request; ignores missing ones, tries all.

        ``names`` maps objects' names to keys, for errors.
        """
        each = iter(names.items())
        batches = iter(lambda: list(islice(each, _MAX_BATCH)), [])
        delete = partial(self._delete_batch, op)
        await try_each(batches, delete, at_once=self.options.max_concurrency)

    async def _delete_batch(self, op: str, batch: Sequence[tuple[str, str]]) -> None:
        boundary = secrets.token_hex(16)
        query = self._query()
        calls = []
        for number, (name, key) in enumerate(batch):
            path = urlsplit(self._object_url(op, key, name)).path
            calls.append(
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{number}>\r\n\r\n"
                f"DELETE {path}{query and f'?{query}'} HTTP/1.1\r\n\r\n\r\n"
            )
        body = [memoryview("".join([*calls, f"--{boundary}--\r\n"]).encode())]
        content = {"content-type": f"multipart/mixed; boundary={boundary}"}
        url = f"{self._root}/batch/storage/v1"
        answers = _parse_batch(await self._send(op, batch[0][1], "POST", url, content, body))
        for number, (_, key) in enumerate(batch):
            status, answer = answers.get(number, (500, "no answer came"))
            if not (200 <= status < 300 or status == 404):
                raise self._error_from_response(op, key, status, answer, {})

    async def aclose(self) -> None:
        wire, self._wire = self._wire, None
        credentials, self._credentials = self._credentials, None
        if credentials is not None:
            await credentials.aclose()
        if wire is not None:
            await wire.aclose()

    # --- requests ------------------------------------------------------------------------------

    def _object_url(self, op: str, key: str, name: str, bucket: str | None = None) -> str:
        try:
            quoted = quote(name, safe="")
        except UnicodeEncodeError as error:
            raise self._error(op, key, "the key is not a valid object name") from error
        return f"{self._root}/storage/v1/b/{bucket or self.bucket}/o/{quoted}"

    def _query(self, **params: str) -> str:
        if self.options.user_project is not None:
            params["userProject"] = self.options.user_project
        return urlencode(params)

    def _creation_query(self, new: NewObject, **params: str) -> str:
        if self.options.kms_key is not None:
            params["kmsKeyName"] = self.options.kms_key
        if new.if_absent:
            params |= _IF_ABSENT
        return self._query(**params)

    async def _post(self, op: str, key: str, url: str, content: object) -> Mapping[str, Any]:
        headers = {"content-type": "application/json"}
        body = [memoryview(json.dumps(content).encode())]
        return self._json(op, key, (await self._send(op, key, "POST", url, headers, body)).body)

    async def _send(
        self,
        op: str,
        key: str,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        *,
        into: Sequence[memoryview] | None = None,
        is_bulk: bool = False,
    ) -> Response:
        """Sends a request; ``into`` takes the response's body. Renews a refused token once."""
        wire = await self._connect(op, key)
        options = self.options
        for is_last in (False, True):
            token = await self._token(op, key)
            authorization = {"authorization": f"Bearer {token}"} if token else {}
            request = Request(
                method=method,
                url=url,
                headers={**(headers or {}), **authorization},
                deadline_s=options.transfer_timeout_s if is_bulk else options.request_timeout_s,
                kept_bytes=None,
            )
            try:
                if into is None:
                    response = await wire.send(request, body)
                else:
                    response = await wire.receive(request, into)
            except WrongLength as error:
                raise _NoSuchRange from error
            except WireError as error:
                detail = f"{error.detail}; {remedy(error.is_timeout, _PLACES)}"
                raise self._error(op, key, detail, retryable=error.is_retryable) from error
            if _is_refused(response) and not is_last and self._forget(token):
                continue
            if response.status in (200, 206):
                return response
            text = response.body.decode(errors="replace")
            raise self._error_from_response(op, key, response.status, text, response.headers)
        raise AssertionError

    async def _connect(self, op: str, key: str) -> Wire:
        async with self._connecting:
            if self._wire is None:
                options = self.options
                try:
                    load = partial(ssl.create_default_context, cafile=options.ca_bundle)
                    tls = await self._run(load)
                except OSError as error:  # includes SSLError
                    detail = f"ca_bundle {options.ca_bundle!r} cannot be used: {error}"
                    raise self._error(op, key, detail) from error
                if not self._is_anonymous and options.token is None:
                    self._credentials = _Credentials(options, tls, self._run)
                self._wire = Wire(self._context.run_io or self._run, options, ssl_context=tls)
            return self._wire

    def _forget(self, token: str) -> bool:
        """Whether another token than a refused one can be had."""
        return self._credentials is not None and self._credentials.forget(token)

    async def _token(self, op: str, key: str) -> str:
        if self._credentials is None:
            return "" if self._is_anonymous else self.options.token or ""
        try:
            return await self._credentials.get()
        except TimeoutError as error:
            limit_s = self.options.request_timeout_s
            detail = f"no access token came within {limit_s:g} s"
            raise self._no_token(op, key, detail, is_passing=True) from error
        except aiohttp.ClientResponseError as error:
            detail = f"no access token was given: {error.status} {error.message[:_DETAIL_CHARS]}"
            is_passing = error.status >= 500 or error.status == 429
            raise self._no_token(op, key, detail, is_passing=is_passing) from error
        except aiohttp.ClientError as error:
            detail = f"no access token can be fetched: {error}"
            is_passing = not is_unknown_host(error)
            raise self._no_token(op, key, detail, is_passing=is_passing) from error
        except (OSError, ValueError, LookupError) as error:
            detail = f"the credentials cannot be used: {type(error).__name__}: {error}"
            raise self._no_token(op, key, detail, is_passing=False) from error

    def _no_token(self, op: str, key: str, detail: str, *, is_passing: bool) -> StorageError:
        detail = f"{detail}. {_REMEDY}"
        if is_passing:
            return self._error(op, key, detail, retryable=True)
        return AccessDenied(op=op, key=key, backend=self.url, detail=detail)

    # --- answers -------------------------------------------------------------------------------

    def _json(self, op: str, key: str, answer: bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(answer)
        except ValueError as error:
            raise self._error(op, key, f"the service answered no JSON: {error}") from error
        return value if isinstance(value, dict) else {}

    def _resource(self, op: str, key: str, fields: Mapping[str, Any]) -> Resource:
        try:
            return Resource(
                name=fields["name"],
                size=int(fields["size"]),
                crc32c=decode_crc32c(fields["crc32c"]),
                modified_s=datetime.fromisoformat(fields["updated"]).timestamp(),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise self._error(
                op, key, f"the service answered something else than an object: {error!r}"
            ) from error

    def _error_from_response(
        self, op: str, key: str, status: int, body: str, headers: Mapping[str, str]
    ) -> Exception:
        message = _parse_message(body) or responses.get(status, "no reason was given")
        detail = f"bucket {self.bucket!r}: HTTP {status}: {message}"

        def error(kind: type[StorageError], advice: str = "", **fields: Any) -> StorageError:
            text = f"{detail}. {advice}" if advice else detail
            return kind(op=op, key=key, backend=self.url, detail=text, **fields)

        if status == 416:
            return _NoSuchRange()
        if status == 412:
            return error(ObjectExists)
        if status == 404:
            if op in _NEEDS_BUCKET_ONLY or "bucket does not exist" in body:
                return error(
                    StorageError,
                    f"Is there such a bucket? `gcloud storage buckets create gs://{self.bucket}` "
                    "makes it",
                )
            return error(ObjectNotFound)
        if status == 429 or status == 503 or "ateLimitExceeded" in body:
            return error(Throttled, retry_after_s=parse_retry_after(headers.get("retry-after")))
        if status == 403 and "quotaExceeded" in body:
            return error(StorageFull, "The project's quota is used up")
        if status == 401:
            return error(
                AccessDenied,
                "The credentials were refused, or their token has expired: check "
                "credentials_file, token, GOOGLE_APPLICATION_CREDENTIALS and the clock",
            )
        if status == 403:
            return error(
                AccessDenied,
                "Saving needs the role roles/storage.objectUser on the bucket, reading "
                "roles/storage.objectViewer",
            )
        # Other bytes arrived.
        is_damaged = status == 400 and "crc32c" in body.lower()
        return error(StorageError, retryable=is_damaged or status == 408 or status >= 500)

    def _error(self, op: str, key: str, detail: str, *, retryable: bool = False) -> StorageError:
        detail = f"bucket {self.bucket!r}: {detail}"
        return StorageError(op=op, key=key, backend=self.url, detail=detail, retryable=retryable)


_NEEDS_BUCKET_ONLY = frozenset({"put", "put_if_absent", "writer", "write_at", "list"})


class _Credentials:
    """Google's application default credentials, or a file's; tokens are renewed in time."""

    def __init__(self, options: GsOptions, tls: ssl.SSLContext, run_blocking: RunBlocking) -> None:
        self._options = options
        self._run = run_blocking
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls))
        self._source: Any = None  # a ``Token``, once needed
        # All waiters share gcloud-aio's fetching task: one at a time, or the cancellation of one
        # would reach the others.
        self._turn = anyio.Lock()

    async def get(self) -> str:
        """Returns a token that is valid for some minutes."""
        async with self._turn:
            with anyio.fail_after(self._options.request_timeout_s):
                if self._source is None:
                    self._source = await self._run(self._load)
                token: str = await self._source.get()
        return token

    def forget(self, token: str) -> bool:
        """Drops a refused ``token``. Returns whether ``get`` will return another one."""
        if self._source is None:
            return False
        if self._source.access_token == token:
            self._source.access_token = None
        return True

    async def aclose(self) -> None:
        if self._source is not None and self._source.acquiring is not None:
            self._source.acquiring.cancel()
        await self._session.close()

    def _load(self) -> Token:
        return _SingleTryToken(
            service_file=self._options.credentials_file, session=self._session, scopes=_SCOPES
        )


class _SingleTryToken(Token):  # type: ignore[misc]
    """Requests a token once: gcloud-aio's retries are silent; the storage retries."""

    async def acquire_access_token(self) -> None:
        await inspect.unwrap(Token.acquire_access_token)(self)


class _NoSuchRange(Exception):
    """The object ends before the requested bytes."""


def _is_refused(response: Response) -> bool:
    """Whether the token was refused, if only for one call of a batch."""
    if response.status != 200 or "multipart/mixed" not in response.headers.get("content-type", ""):
        return response.status == 401
    return any(status == 401 for status, _ in _parse_batch(response).values())


def _parse_batch(response: Response) -> Mapping[int, tuple[int, str]]:
    """Returns status and body of each answer, by the number of its call."""
    head = f"content-type: {response.headers.get('content-type', '')}\r\n\r\n"
    message = message_from_bytes(head.encode() + response.body)
    answers = {}
    for part in message.walk():
        number = re.search(r"(\d+)>?$", part.get("content-id", ""))
        answer = str(part.get_payload())
        status = re.match(r"HTTP/[\d.]+ (\d{3})", answer)
        if number and status:
            answers[int(number[1])] = int(status[1]), answer
    return answers


def _stored_checksum(headers: Mapping[str, str]) -> int | None:
    """Returns the whole object's CRC32C, also for a part's download."""
    for one in headers.get("x-goog-hash", "").split(","):
        kind, _, value = one.strip().partition("=")
        if kind == "crc32c":
            return decode_crc32c(value)
    return None


def _parse_message(body: str) -> str:
    """Returns the message of an error object, or the body's beginning."""
    start = body.find("{")
    try:
        return str(json.loads(body[start:])["error"]["message"])[:_DETAIL_CHARS]
    except (ValueError, LookupError, TypeError):
        return body[:_DETAIL_CHARS]
