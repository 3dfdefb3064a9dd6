"""Requests to one bucket of Google Cloud Storage, by its JSON API.

Control calls go by gcloud-aio on the event loop; bulk bytes by ``wire.py`` on worker threads, from
and into the caller's memory. An upload is one *multipart* request: the object's metadata with the
expected CRC32C, then the bytes. Downloads have it in a header; it is compared for a whole object.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from email import message_from_bytes
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import anyio
import msgspec
from gcloud.aio.storage import Storage as Calls

from actorsnap.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    Throttled,
)
from actorsnap.format.checksum import crc32c, crc32c_of
from actorsnap.storage.base import StorageContext, flat, num_bytes, truncated, try_each
from actorsnap.storage.cloud import (
    NetworkOptions,
    check_secret,
    decode_crc32c,
    encode_crc32c,
    parse_retry_after,
    remedy,
)
from actorsnap.storage.gs_auth import Credentials, CredentialsError, GivenToken
from actorsnap.storage.wire import Request, Response, Wire, WireError, WrongLength, is_unknown_host

__all__ = ["GsClient", "GsOptions", "Page", "Resource"]

T = TypeVar("T")

_ROOT = "https://storage.googleapis.com"
_FIELDS = "name,size,crc32c,updated"
_IF_ABSENT = {"ifGenerationMatch": "0"}
_DETAIL_CHARS = 300
_PLACES = "the network, endpoint_url, STORAGE_EMULATOR_HOST and ca_bundle"
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
        self._bucket = bucket
        self.url = url
        self.options = options
        self._context = context
        self._run = context.run_blocking
        self._timeout = aiohttp.ClientTimeout(
            total=options.request_timeout_s,
            sock_connect=options.connect_timeout_s,
            sock_read=options.stall_timeout_s,
        )
        self._connecting = anyio.Lock()
        self._connected: _Connections | None = None

    async def crc32c(self, views: Sequence[memoryview]) -> int:
        return await self._run(crc32c_of, flat(views))

    async def upload(
        self,
        op: str,
        key: str,
        name: str,
        views: Sequence[memoryview],
        crc: int,
        *,
        storage_class: str | None,
        if_absent: bool = False,
    ) -> Resource:
        """Creates an object of the bytes of ``views``, which have the CRC32C ``crc``.

        Raises:
            ObjectExists: It exists, and ``if_absent``. Else it is replaced.
            StorageError: Retryable, if other bytes arrived.
        """
        views = flat(views)
        boundary = secrets.token_hex(16)
        metadata = {"crc32c": encode_crc32c(crc)}
        if storage_class is not None:
            metadata["storageClass"] = storage_class
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(metadata)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        tail = f"\r\n--{boundary}--\r\n"
        body = [memoryview(head.encode()), *views, memoryview(tail.encode())]
        params = {"uploadType": "multipart", "name": name, "fields": _FIELDS}
        params |= self._write_params()
        if if_absent:
            params |= _IF_ABSENT
        self._object_url(op, key, name)  # refuses bad names
        url = f"{self._root}/upload/storage/v1/b/{self._bucket}/o?{urlencode(params)}"
        content = {"content-type": f"multipart/related; boundary={boundary}"}
        response = await self._transfer(
            op, key, url, content, lambda wire, request: wire.send(request, body), method="POST"
        )
        stored = self._resource(op, key, self._json(op, key, response.body))
        if stored.crc32c != crc or stored.size != num_bytes(views):
            # The service refuses them; emulators may store them.
            await self.delete(op, {name: key})
            raise self._error(op, key, "other bytes were stored than sent", retryable=True)
        return stored

    async def compose(
        self,
        op: str,
        key: str,
        name: str,
        sources: Sequence[str],
        *,
        storage_class: str | None,
        if_absent: bool = False,
    ) -> Resource:
        """Concatenates up to 32 objects, in this order."""
        content = {
            "sourceObjects": [{"name": source} for source in sources],
            "destination": _composite_metadata(storage_class),
        }
        url = f"{self._object_url(op, key, name)}/compose"
        params = {"fields": _FIELDS, **self._write_params()}
        if if_absent:
            params |= _IF_ABSENT
        return self._resource(op, key, await self._post(op, key, url, params, content))

    async def copy(
        self,
        op: str,
        key: str,
        name: str,
        source: str,
        *,
        storage_class: str | None,
        if_absent: bool = False,
    ) -> Resource:
        """Copies an object.

        A change of place, class or key is a real copy and takes more than one request.
        """
        target = quote(name, safe="")
        url = f"{self._object_url(op, key, source)}/rewriteTo/b/{self._bucket}/o/{target}"
        params = {"fields": f"rewriteToken,resource({_FIELDS})", **self._params()}
        if self.options.kms_key is not None:
            params["destinationKmsKeyName"] = self.options.kms_key
        if if_absent:
            params |= _IF_ABSENT
        while True:
            answer = await self._post(op, key, url, params, _composite_metadata(storage_class))
            if not answer.get("rewriteToken"):
                return self._resource(op, key, answer.get("resource", {}))
            params["rewriteToken"] = str(answer["rewriteToken"])  # it continues there

    async def stat(self, op: str, key: str, name: str) -> Resource:
        body, _ = await self._get(op, key, name, {"fields": _FIELDS}, {})
        return self._resource(op, key, self._json(op, key, body))

    async def download(
        self, op: str, key: str, name: str, start: int, stop: int | None
    ) -> bytes | None:
        """Returns the existing bytes of ``[start, stop)``; None if there is no byte ``start``."""
        bounds = {}
        if start or stop is not None:
            bounds["range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        try:
            data, headers = await self._get(op, key, name, {"alt": "media"}, bounds)
        except _NoSuchRange:
            return None
        known = _stored_checksum(headers)
        if not bounds and known is not None and await self._run(crc32c, data) != known:
            raise self._error(op, key, "other bytes arrived than are stored", retryable=True)
        return data

    async def read_into(
        self, op: str, key: str, name: str, offset: int, views: Sequence[memoryview]
    ) -> None:
        stop = offset + num_bytes(views)
        url = f"{self._object_url(op, key, name)}?{urlencode({'alt': 'media', **self._params()})}"
        bounds = {"range": f"bytes={offset}-{stop - 1}"}
        try:
            await self._transfer(
                op, key, url, bounds, lambda wire, request: wire.receive(request, views)
            )
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
            **self._params(),
        }
        params = {name: value for name, value in params.items() if value}

        async def call(calls: Calls, headers: dict[str, str]) -> dict[str, Any]:
            answer: dict[str, Any] = await calls.list_objects(
                self._bucket, params=params, headers=headers, timeout=self._timeout
            )
            return answer

        while True:
            answer = await self._control(op, key, call)
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
        suffix = f"?{urlencode(self._params())}" if self._params() else ""
        calls = []
        for number, (name, key) in enumerate(batch):
            path = urlsplit(self._object_url(op, key, name)).path
            calls.append(
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{number}>\r\n\r\n"
                f"DELETE {path}{suffix} HTTP/1.1\r\n\r\n\r\n"
            )
        data = "".join([*calls, f"--{boundary}--\r\n"]).encode()
        content = {"content-type": f"multipart/mixed; boundary={boundary}"}

        async def call(calls: Calls, headers: dict[str, str]) -> Mapping[int, tuple[int, str]]:
            response = await calls.session.post(
                f"{self._root}/batch/storage/v1",
                headers={**headers, **content},
                data=data,
                timeout=self._timeout,
            )
            answers = _parse_batch(response.headers["content-type"], await response.read())
            if any(status == 401 for status, _ in answers.values()):
                raise aiohttp.ClientResponseError(
                    response.request_info, (), status=401, message="the token was refused"
                )
            return answers

        answers = await self._control(op, batch[0][1], call)
        for number, (_, key) in enumerate(batch):
            status, body = answers.get(number, (500, "no answer came"))
            if not (200 <= status < 300 or status == 404):
                raise self._error_from_response(op, key, status, body, {})

    async def aclose(self) -> None:
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.credentials.close()
            await connected.session.close()
            await connected.wire.aclose()

    # --- requests ------------------------------------------------------------------------------

    def _object_url(self, op: str, key: str, name: str) -> str:
        try:
            quoted = quote(name, safe="")
        except UnicodeEncodeError as error:
            raise self._error(op, key, "the key is no valid object name") from error
        return f"{self._root}/storage/v1/b/{self._bucket}/o/{quoted}"

    def _params(self) -> dict[str, str]:
        project = self.options.user_project
        return {} if project is None else {"userProject": project}

    def _write_params(self) -> dict[str, str]:
        key = self.options.kms_key
        return self._params() if key is None else {**self._params(), "kmsKeyName": key}

    async def _post(
        self, op: str, key: str, url: str, params: Mapping[str, str], content: object
    ) -> Mapping[str, Any]:
        async def call(calls: Calls, headers: dict[str, str]) -> bytes:
            response = await calls.session.post(
                url,
                headers={**headers, "content-type": "application/json"},
                data=json.dumps(content),
                params=params,
                timeout=self._timeout,
            )
            body: bytes = await response.read()
            return body

        return self._json(op, key, await self._control(op, key, call))

    async def _get(
        self, op: str, key: str, name: str, params: Mapping[str, str], bounds: Mapping[str, str]
    ) -> tuple[bytes, Mapping[str, str]]:
        url = self._object_url(op, key, name)

        async def call(calls: Calls, headers: dict[str, str]) -> tuple[bytes, Mapping[str, str]]:
            response = await calls.session.get(
                url,
                headers={**headers, **bounds, "accept-encoding": "identity"},
                params={**params, **self._params()},
                timeout=self._timeout,
            )
            return await response.read(), response.headers

        return await self._control(op, key, call)

    async def _control(
        self, op: str, key: str, call: Callable[[Calls, dict[str, str]], Awaitable[T]]
    ) -> T:
        """Awaits ``call``. Renews a refused token once."""
        connected = await self._connect(op, key)
        for is_last in (False, True):
            token = await self._token(op, key, connected)
            try:
                return await call(connected.calls, _authorization(token))
            except aiohttp.ClientResponseError as error:
                if error.status == 401 and not is_last and connected.credentials.forget(token):
                    continue
                headers = {n.lower(): value for n, value in (error.headers or {}).items()}
                raise self._error_from_response(
                    op, key, error.status, error.message, headers
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._error_without_response(op, key, error) from error
        raise AssertionError

    async def _transfer(
        self,
        op: str,
        key: str,
        url: str,
        headers: Mapping[str, str],
        transfer: Callable[[Wire, Request], Awaitable[Response]],
        *,
        method: str = "GET",
    ) -> Response:
        connected = await self._connect(op, key)
        for is_last in (False, True):
            token = await self._token(op, key, connected)
            request = Request(
                method=method,
                url=url,
                headers={**headers, **_authorization(token)},
                deadline_s=self.options.transfer_timeout_s,
            )
            try:
                response = await transfer(connected.wire, request)
            except WrongLength as error:
                raise _NoSuchRange from error
            except WireError as error:
                detail = f"{error.detail}; {remedy(error.is_timeout, _PLACES)}"
                raise self._error(op, key, detail, retryable=error.is_retryable) from error
            if response.status in (200, 206):
                return response
            if response.status == 401 and not is_last and connected.credentials.forget(token):
                continue
            body = response.body.decode(errors="replace")
            raise self._error_from_response(op, key, response.status, body, response.headers)
        raise AssertionError

    async def _connect(self, op: str, key: str) -> _Connections:
        async with self._connecting:
            if self._connected is None:
                options = self.options
                try:
                    tls = await self._run(_load_authorities, options.ca_bundle)
                except OSError as error:  # includes SSLError
                    detail = f"ca_bundle {options.ca_bundle!r} cannot be used: {error}"
                    raise self._error(op, key, detail) from error
                self._connected = _Connections(self._root, options, tls, self._context)
            return self._connected

    async def _token(self, op: str, key: str, connected: _Connections) -> str:
        if self._is_anonymous:
            return ""
        try:
            return await connected.credentials.get()
        except CredentialsError as error:
            if error.is_retryable:
                raise self._error(op, key, error.detail, retryable=True) from error
            raise AccessDenied(op=op, key=key, backend=self.url, detail=error.detail) from error

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
        detail = f"bucket {self._bucket!r}: HTTP {status}: {_parse_message(body)}"

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
                    f"Is there such a bucket? `gcloud storage buckets create gs://{self._bucket}` "
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
                "The credentials were refused, or their token has expired: look at "
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

    def _error_without_response(self, op: str, key: str, error: Exception) -> StorageError:
        if isinstance(error, aiohttp.ClientSSLError):
            detail = f"TLS with {self._root} failed: {error}. ca_bundle names other authorities"
            return self._error(op, key, detail)
        detail = f"no answer from {self._root}: {type(error).__name__} {error}".rstrip()
        detail += f"; {remedy(isinstance(error, TimeoutError), _PLACES)}"
        return self._error(op, key, detail, retryable=not is_unknown_host(error))

    def _error(self, op: str, key: str, detail: str, *, retryable: bool = False) -> StorageError:
        detail = f"bucket {self._bucket!r}: {detail}"
        return StorageError(op=op, key=key, backend=self.url, detail=detail, retryable=retryable)


_NEEDS_BUCKET_ONLY = frozenset({"put", "put_if_absent", "writer", "write_at", "list"})


class _Connections:
    def __init__(
        self, root: str, options: GsOptions, tls: ssl.SSLContext, context: StorageContext
    ) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=options.max_concurrency)
        )
        self.credentials: Credentials | GivenToken = (
            Credentials(
                options.credentials_file,
                self.session,
                context.run_blocking,
                options.request_timeout_s,
            )
            if options.token is None
            else GivenToken(options.token)
        )
        # "dev": a request gets only these headers, which have the token.
        self.calls = Calls(
            session=self.session, token=self.credentials, api_root=root, api_is_dev=True
        )
        self.wire = Wire(
            context.run_io or context.run_blocking,
            connect_s=options.connect_timeout_s,
            stall_s=options.stall_timeout_s,
            max_idle=options.max_concurrency,
            ssl_context=tls,
        )


class _NoSuchRange(Exception):
    """The object ends before the requested bytes."""


def _load_authorities(ca_bundle: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_bundle)


def _authorization(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _composite_metadata(storage_class: str | None) -> dict[str, str]:
    metadata = {"contentType": "application/octet-stream"}
    return metadata if storage_class is None else {**metadata, "storageClass": storage_class}


def _parse_batch(content_type: str, body: bytes) -> Mapping[int, tuple[int, str]]:
    """Returns status and body of each answer, by the number of its call."""
    message = message_from_bytes(f"content-type: {content_type}\r\n\r\n".encode() + body)
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
