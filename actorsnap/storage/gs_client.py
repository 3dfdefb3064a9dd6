"""Requests to one bucket of Google Cloud Storage, by its JSON API.

Decides which request each call becomes, how it is authorized, and which error of the package an
answer is. Control calls go by gcloud-aio on the event loop; bytes in bulk by ``wire.py`` on
worker threads, from and into the caller's memory. Must not know: writers, components, retries.

Every upload is one *multipart* request: the object's metadata, with the CRC32C that the server
has to find, and the bytes behind it. That is what the header ``x-goog-hash`` is to other kinds
of upload. Downloads bring that header; it is compared where all of an object was asked for.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import anyio
import msgspec
from gcloud.aio.storage import Storage as Calls

from actorsnap.errors import (
    AccessDenied,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    Throttled,
)
from actorsnap.format.checksum import crc32c
from actorsnap.storage.base import RunBlocking
from actorsnap.storage.gs_auth import Credentials, CredentialsError, GivenToken
from actorsnap.storage.vectored import num_bytes
from actorsnap.storage.wire import Request, Response, Wire, WireError, WrongLength

__all__ = ["GsClient", "GsOptions", "Page", "Resource", "truncated"]

T = TypeVar("T")

_ROOT = "https://storage.googleapis.com"
_FIELDS = "name,size,crc32c,generation,updated"
_DETAIL_CHARS = 300


class GsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``storage_options`` of ``gs://``.

    Attributes:
        endpoint_url: Of another service. Default: ``STORAGE_EMULATOR_HOST``, which needs no
            credentials, or Google's.
        anonymous: Send no credentials, for emulators and public buckets.
        credentials_file: A service account's key, an authorized user, or the configuration of
            a workload identity pool. Default: Google's application default credentials.
        token: An access token instead; it is not renewed.
        user_project: The project that pays for the requests.
        storage_class: Of new objects. Default: the bucket's.
        kms_key: Cloud KMS key that encrypts new objects, by its full resource name.
        ca_bundle: A file of trusted certificate authorities.
        max_concurrency: Requests at once.
        max_attempts: Tries per request, the first included.
        connect_timeout_s: For one address, and for the TLS handshake.
        stall_timeout_s: So long may the service be silent.
        request_timeout_s: For a request without bulk bytes.
        transfer_timeout_s: For a write, or a range that is read.
    """

    endpoint_url: str | None = None
    anonymous: bool = False
    credentials_file: str | None = None
    token: str | None = None
    user_project: str | None = None
    storage_class: str | None = None
    kms_key: str | None = None
    ca_bundle: str | None = None
    max_concurrency: int = 32
    max_attempts: int = 12
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    request_timeout_s: float = 120.0
    transfer_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if sum([self.anonymous, self.token is not None, self.credentials_file is not None]) > 1:
            raise ValueError("anonymous, token and credentials_file exclude each other")
        if self.endpoint_url is not None:
            url = urlsplit(self.endpoint_url)
            if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
                raise ValueError("endpoint_url must be http://host or https://host, without a user")
        for name in ("max_concurrency", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        for name in ("connect", "stall", "request", "transfer"):
            if not getattr(self, f"{name}_timeout_s") > 0:
                raise ValueError(f"{name}_timeout_s must be greater than 0")

    def __repr__(self) -> str:
        # A token must not get into logs.
        return f"GsOptions(endpoint_url={self.endpoint_url!r}, anonymous={self.anonymous})"


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """What the service says of an object.

    Attributes:
        name: In the bucket.
        size: In bytes.
        crc32c: Of its bytes.
        generation: Of this content.
        modified_s: Seconds since 1970.
    """

    name: str
    size: int
    crc32c: int
    generation: str
    modified_s: float


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Some objects of a listing, the folders beside them, and where it goes on, if it does."""

    resources: Sequence[Resource]
    folders: Sequence[str]
    next_page: str


class GsClient:
    """One bucket. For use on one event loop; connects when it is first used.

    Each call is one request. ``op`` and ``key`` are for its errors, ``name`` is the object's in
    the bucket. All raise ``StorageError``, also where their docstrings name no error.

    Cancellation: at once, memory is free then; what was asked may have been done.

    Args:
        bucket: Its name.
        url: For errors.
        options: Where, as whom and how.
        run_blocking: For files, certificates and bulk transfers.
    """

    def __init__(
        self, bucket: str, url: str, options: GsOptions, run_blocking: RunBlocking
    ) -> None:
        emulator = None if options.endpoint_url else os.environ.get("STORAGE_EMULATOR_HOST")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        self._root = (options.endpoint_url or emulator or _ROOT).rstrip("/")
        self._is_anonymous = options.anonymous or bool(emulator)
        self._bucket = bucket
        self._url = url
        self._options = options
        self._run = run_blocking
        self._timeout = aiohttp.ClientTimeout(
            total=options.request_timeout_s,
            sock_connect=options.connect_timeout_s,
            sock_read=options.stall_timeout_s,
        )
        self._connecting = anyio.Lock()
        self._connected: _Connected | None = None

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
    ) -> None:
        """Creates an object of the bytes of ``views``, which have the CRC32C ``crc``.

        Raises:
            ObjectExists: it exists, and ``if_absent``. Else it is replaced.
            StorageError: retryable, if other bytes arrived.
        """
        boundary = secrets.token_hex(16)
        metadata = {"name": name, "crc32c": _encoded(crc)}
        if storage_class is not None:
            metadata["storageClass"] = storage_class
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(metadata)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        tail = f"\r\n--{boundary}--\r\n"
        body = [memoryview(head.encode()), *views, memoryview(tail.encode())]
        params = {"uploadType": "multipart", "fields": _FIELDS, **self._write_params()}
        if if_absent:
            params["ifGenerationMatch"] = "0"
        self._object_url(op, key, name)  # refuses what is no name
        url = f"{self._root}/upload/storage/v1/b/{self._bucket}/o?{urlencode(params)}"
        content = {"content-type": f"multipart/related; boundary={boundary}"}

        async def send(wire: Wire, headers: Mapping[str, str]) -> Response:
            return await wire.send(
                Request(
                    method="POST",
                    url=url,
                    headers={**content, **headers},
                    deadline_s=self._options.transfer_timeout_s,
                ),
                body,
            )

        response = await self._transfer(op, key, send)
        stored = self._resource(op, key, response.body)
        if stored.crc32c != crc or stored.size != num_bytes(views):
            raise self._error(op, key, "other bytes were stored than sent", retryable=True)

    async def compose(
        self,
        op: str,
        key: str,
        name: str,
        sources: Sequence[Resource],
        *,
        storage_class: str | None,
    ) -> Resource:
        """Creates or replaces an object of the bytes of up to 32 others, in this order.

        Raises:
            ObjectNotFound: a source is no longer there.
        """
        destination = {"contentType": "application/octet-stream"}
        if storage_class is not None:
            destination["storageClass"] = storage_class
        data = json.dumps(
            {
                "sourceObjects": [
                    {"name": source.name, "generation": source.generation} for source in sources
                ],
                "destination": destination,
            }
        )
        url = f"{self._object_url(op, key, name)}/compose"

        async def post(calls: Calls, headers: dict[str, str]) -> bytes:
            response = await calls.session.post(
                url,
                headers={**headers, "content-type": "application/json"},
                data=data,
                params={"fields": _FIELDS, **self._write_params()},
                timeout=self._timeout,
            )
            body: bytes = await response.read()
            return body

        return self._resource(op, key, await self._control(op, key, post))

    async def stat(self, op: str, key: str, name: str) -> Resource:
        """Looks at an object.

        Raises:
            ObjectNotFound: there is none.
        """
        body, _ = await self._get(op, key, name, {"fields": _FIELDS}, {})
        return self._resource(op, key, body)

    async def download(
        self, op: str, key: str, name: str, start: int, stop: int | None
    ) -> bytes | None:
        """The bytes ``[start, stop)`` as far as there are any. None: there is no byte ``start``.

        Raises:
            ObjectNotFound: there is no object.
            StorageError: retryable, if other bytes arrived than are stored.
        """
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
        """Fills ``views``, one byte at least, from byte ``offset`` on.

        Raises:
            ObjectNotFound: there is no object.
            ChecksumMismatch: it ends before the views are full.
        """
        stop = offset + num_bytes(views)
        url = f"{self._object_url(op, key, name)}?{urlencode({'alt': 'media', **self._params()})}"
        bounds = {"range": f"bytes={offset}-{stop - 1}"}

        async def receive(wire: Wire, headers: Mapping[str, str]) -> Response:
            return await wire.receive(
                Request(
                    method="GET",
                    url=url,
                    headers={**bounds, **headers},
                    deadline_s=self._options.transfer_timeout_s,
                ),
                views,
            )

        try:
            await self._transfer(op, key, receive)
        except _NoSuchRange:
            raise truncated(key, stop) from None

    async def list_page(
        self, op: str, key: str, prefix: str, *, page: str = "", delimiter: str = ""
    ) -> Page:
        """Up to 1000 objects whose name starts with ``prefix``, in the order of names.

        Args:
            op, key: For errors.
            prefix: Empty for all.
            page: ``next_page`` of the page before; empty for the first one.
            delimiter: Names that go on behind it are told as folders, which end in it.
        """
        params = {
            "prefix": prefix,
            "delimiter": delimiter,
            "pageToken": page,
            "maxResults": "1000",
            "fields": f"nextPageToken,prefixes,items({_FIELDS})",
            **self._params(),
        }
        given = {name: value for name, value in params.items() if value}

        async def call(calls: Calls, headers: dict[str, str]) -> dict[str, Any]:
            answer: dict[str, Any] = await calls.list_objects(
                self._bucket, params=given, headers=headers, timeout=self._timeout
            )
            return answer

        found = await self._control(op, key, call)
        return Page(
            resources=[self._resource(op, key, item) for item in found.get("items", ())],
            folders=found.get("prefixes", ()),
            next_page=found.get("nextPageToken", ""),
        )

    async def delete(self, op: str, key: str, name: str) -> None:
        """Deletes an object.

        Raises:
            ObjectNotFound: there is none.
        """
        self._object_url(op, key, name)  # refuses what is no name

        async def call(calls: Calls, headers: dict[str, str]) -> None:
            await calls.delete(
                self._bucket, name, params=self._params(), headers=headers, timeout=self._timeout
            )

        await self._control(op, key, call)

    async def aclose(self) -> None:
        """Closes all connections. Idempotent."""
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
        project = self._options.user_project
        return {} if project is None else {"userProject": project}

    def _write_params(self) -> dict[str, str]:
        key = self._options.kms_key
        return self._params() if key is None else {**self._params(), "kmsKeyName": key}

    async def _get(
        self, op: str, key: str, name: str, params: Mapping[str, str], bounds: Mapping[str, str]
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of an answer that is small enough for the loop."""
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
        """What ``call`` returns. A token that the service refuses is renewed once."""
        connected = await self._connect(op, key)
        for is_last in (False, True):
            token = await self._token(op, key, connected)
            try:
                return await call(connected.calls, _authorization(token))
            except aiohttp.ClientResponseError as error:
                if error.status == 401 and not is_last and connected.credentials.forget(token):
                    continue
                headers = {n.lower(): value for n, value in (error.headers or {}).items()}
                raise self._refusal(op, key, error.status, error.message, headers) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._unreachable(op, key, error) from error
        raise AssertionError

    async def _transfer(
        self, op: str, key: str, transfer: Callable[[Wire, Mapping[str, str]], Awaitable[Response]]
    ) -> Response:
        """The same for bulk transfers."""
        connected = await self._connect(op, key)
        for is_last in (False, True):
            token = await self._token(op, key, connected)
            try:
                response = await transfer(connected.wire, _authorization(token))
            except WrongLength as error:
                raise _NoSuchRange from error
            except WireError as error:
                raise self._error(op, key, error.detail, retryable=error.is_retryable) from error
            if response.status in (200, 206):
                return response
            if response.status == 401 and not is_last and connected.credentials.forget(token):
                continue
            said = response.body.decode(errors="replace")
            raise self._refusal(op, key, response.status, said, response.headers)
        raise AssertionError

    async def _connect(self, op: str, key: str) -> _Connected:
        async with self._connecting:
            if self._connected is None:
                options = self._options
                try:
                    tls = await self._run(_load_authorities, options.ca_bundle)
                except OSError as error:  # SSLError is one
                    detail = f"ca_bundle {options.ca_bundle!r} cannot be used: {error}"
                    raise self._error(op, key, detail) from error
                self._connected = _Connected(self._root, options, tls, self._run)
            return self._connected

    async def _token(self, op: str, key: str, connected: _Connected) -> str:
        if self._is_anonymous:
            return ""
        try:
            return await connected.credentials.get()
        except CredentialsError as error:
            if error.is_retryable:
                raise self._error(op, key, error.detail, retryable=True) from error
            raise AccessDenied(op=op, key=key, backend=self._url, detail=error.detail) from error

    # --- answers -------------------------------------------------------------------------------

    def _resource(self, op: str, key: str, answer: bytes | Mapping[str, Any]) -> Resource:
        try:
            found = json.loads(answer) if isinstance(answer, bytes) else answer
            return Resource(
                name=found["name"],
                size=int(found["size"]),
                crc32c=_decoded(found["crc32c"]),
                generation=str(found["generation"]),
                modified_s=datetime.fromisoformat(found["updated"]).timestamp(),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise self._error(
                op, key, f"the service answered something else than an object: {error!r}"
            ) from error

    def _refusal(
        self, op: str, key: str, status: int, said: str, headers: Mapping[str, str]
    ) -> Exception:
        """What an HTTP status means."""
        detail = f"HTTP {status}: {_message(said)}"
        place = f"the bucket {self._bucket!r}"

        def error(kind: type[StorageError], remedy: str = "", **fields: Any) -> StorageError:
            text = f"{detail}. {remedy}" if remedy else detail
            return kind(op=op, key=key, backend=self._url, detail=text, **fields)

        if status == 416:
            return _NoSuchRange()
        if status == 412:
            return error(ObjectExists)
        if status == 404:
            if op in _NEEDS_BUCKET_ONLY or "bucket does not exist" in said:
                return error(
                    StorageError,
                    f"Is there {place}? `gcloud storage buckets create gs://{self._bucket}` "
                    "makes it",
                )
            return error(ObjectNotFound)
        if status == 429 or status == 503 or "ateLimitExceeded" in said:
            return error(Throttled, retry_after_s=_seconds(headers.get("retry-after")))
        if status == 403 and "quotaExceeded" in said:
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
                f"Saving needs the role roles/storage.objectUser on {place}, reading "
                "roles/storage.objectViewer",
            )
        # What arrived was not what the metadata says: damaged on the way.
        is_damaged = status == 400 and "crc32c" in said.lower()
        return error(StorageError, retryable=is_damaged or status == 408 or status >= 500)

    def _unreachable(self, op: str, key: str, error: Exception) -> StorageError:
        if isinstance(error, aiohttp.ClientSSLError):
            detail = f"TLS with {self._root} failed: {error}. ca_bundle names other authorities"
            return self._error(op, key, detail)
        said = f"{type(error).__name__} {error}".rstrip()
        return self._error(op, key, f"no answer from {self._root}: {said}", retryable=True)

    def _error(self, op: str, key: str, detail: str, *, retryable: bool = False) -> StorageError:
        return StorageError(op=op, key=key, backend=self._url, detail=detail, retryable=retryable)


_NEEDS_BUCKET_ONLY = frozenset({"put", "put_if_absent", "writer", "write_at", "list"})


class _Connected:
    """What a client has once it is used; made on the event loop."""

    def __init__(
        self, root: str, options: GsOptions, tls: ssl.SSLContext, run_blocking: RunBlocking
    ) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=options.max_concurrency)
        )
        self.credentials: Credentials | GivenToken = (
            Credentials(
                options.credentials_file, self.session, run_blocking, options.request_timeout_s
            )
            if options.token is None
            else GivenToken(options.token)
        )
        # "dev": the headers of a request are all that it gets, and those have the token.
        self.calls = Calls(
            session=self.session, token=self.credentials, api_root=root, api_is_dev=True
        )
        self.wire = Wire(
            run_blocking,
            connect_s=options.connect_timeout_s,
            stall_s=options.stall_timeout_s,
            max_idle=options.max_concurrency,
            ssl_context=tls,
        )


class _NoSuchRange(Exception):
    """The object ends before the bytes that were asked for."""


def truncated(key: str, wanted: int) -> ChecksumMismatch:
    """The object has less than ``wanted`` bytes."""
    return ChecksumMismatch(
        key=key, detail=f"truncated: {wanted} bytes are needed, the object has fewer"
    )


def _load_authorities(ca_bundle: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_bundle)


def _authorization(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _encoded(crc: int) -> str:
    return b64encode(crc.to_bytes(4, "big")).decode()


def _decoded(crc: str) -> int:
    return int.from_bytes(b64decode(crc), "big")


def _stored_checksum(headers: Mapping[str, str]) -> int | None:
    """CRC32C of the whole object, of which a download may be a part."""
    for one in headers.get("x-goog-hash", "").split(","):
        kind, _, value = one.strip().partition("=")
        if kind == "crc32c":
            return _decoded(value)
    return None


def _message(said: str) -> str:
    """What Google's error object says, or the beginning of what came."""
    start = said.find("{")
    try:
        return str(json.loads(said[start:])["error"]["message"])[:_DETAIL_CHARS]
    except (ValueError, LookupError, TypeError):
        return said[:_DETAIL_CHARS]


def _seconds(retry_after: str | None) -> float | None:
    return float(retry_after) if retry_after is not None and retry_after.isdigit() else None
