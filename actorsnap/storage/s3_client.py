# SPDX-License-Identifier: Apache-2.0
"""The client of an S3 endpoint: options, credentials, signatures, requests, errors.

aiobotocore resolves the endpoint, refreshes credentials, builds and parses control calls. All bytes
go over a ``Wire``: one form of deadlines, cancellation, proxies and TLS, and no thread starts at
exit. Bulk requests are signed here: aiobotocore takes no memoryviews.

Storages of an event loop with equal options share a client, unless ``AWS_*`` variables have changed
between them. A call is one request.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import os
import re
import ssl
import weakref
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import anyio
import msgspec
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.awsrequest import AWSPreparedRequest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    InvalidRegionError,
    NoCredentialsError,
    ParamValidationError,
    ProfileNotFound,
)
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader, create_loader
from botocore.parsers import create_parser
from botocore.utils import get_environ_proxies

from actorsnap.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    Throttled,
    UsageError,
)
from actorsnap.release import RELEASE
from actorsnap.storage.base import RunBlocking
from actorsnap.storage.network import NetworkOptions, check_secret, parse_retry_after, remedy
from actorsnap.storage.wire import Request, Response, Wire, WireError, host_header

MIB = 1 << 20

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"

_MAX_ANSWER_BYTES = 64 * MIB
"""For control calls: a page of a list may have 1000 quoted keys of 1 KiB."""


_SECRET = re.compile(
    "((?:secret_?access_?key|session_?token|security-token|signature)[\"'>:=]+\\s*(?:b')?)"
    "[A-Za-z0-9%+/=._-]+",
    re.IGNORECASE,
)


class _Redacted(logging.Filter):
    """Hides credentials in DEBUG logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _SECRET.sub(r"\1...", record.getMessage()), ()
        return True


for _name in ("auth", "endpoint", "parsers"):
    for _package in ("botocore", "aiobotocore"):
        logging.getLogger(f"{_package}.{_name}").addFilter(_Redacted())


class S3Options(NetworkOptions, frozen=True, kw_only=True):
    """``storage_options`` of ``s3://``, in addition to ``NetworkOptions``.

    botocore finds values that are None: environment, configuration files, instance.

    Attributes:
        profile: Section of the configuration files.
        addressing_style: Place of the bucket in URLs: ``"path"``, or ``"virtual"`` for the host.
        access_key_id, secret_access_key, session_token: Instead of botocore's chain.
        kms_key_id: For ``sse="aws:kms"``.
        storage_class, tags: Of new objects.
        request_payer: Agree to pay for requests to others' buckets.
        proxies: Proxy URL by the endpoint's scheme; ``{}`` for none.
        part_bytes: Least size of a write, 10 MiB or more; a part has at least half of it.
        has_conditional_put: Whether ``If-None-Match: *`` is honoured; None to find out.
    """

    region: str | None = None
    profile: str | None = None
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    kms_key_id: str | None = None
    storage_class: str | None = None
    tags: dict[str, str] = {}
    request_payer: bool = False
    proxies: dict[str, str] | None = None
    part_bytes: int = 15 * MIB
    has_conditional_put: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key belong together")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.kms_key_id is not None and self.sse not in ("aws:kms", "aws:kms:dsse"):
            raise ValueError("kms_key_id needs sse='aws:kms' or 'aws:kms:dsse'")
        for name in ("access_key_id", "secret_access_key", "session_token"):
            check_secret(name, getattr(self, name))
        if not 10 * MIB <= self.part_bytes <= 2048 * MIB:
            raise ValueError("part_bytes must be between 10 MiB and 2 GiB")

    def __repr__(self) -> str:
        # Without proxies (passwords) and KMS keys (accounts).
        return f"S3Options(endpoint_url={self.endpoint_url!r}, region={self.region!r})"


class BulkTarget(NamedTuple):
    """The object or part of a bulk request, and its headers."""

    bucket: str
    key: str
    headers: Mapping[str, str]
    query: Mapping[str, str] = {}


class _Bucket(msgspec.Struct, frozen=True):
    """The URL before an object's key, and the signatures' region; None if unsigned."""

    base_url: str
    region: str | None


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, S3Client]] = (
    weakref.WeakKeyDictionary()
)


def shared_client(options: S3Options, run_io: RunBlocking) -> S3Client:
    """Returns the event loop's client. Release it once per call."""
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    key = msgspec.msgpack.encode(options)
    environment = {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
    client = clients.get(key)
    if client is None or client.environment != environment:
        client = clients[key] = S3Client(options, environment, run_io=run_io)
    client.num_users += 1
    return client


class S3Client:
    """An endpoint with its credentials. Get it by ``shared_client``.

    Abilities of the server are None until tried.

    Attributes:
        environment: ``AWS_*`` variables that it began with.
        num_users: Storages that use it; the last release closes its connections.
        checks_crc32c: Of bodies. If not, payloads are signed.
        checks_sha256: Of signed payloads.
        has_conditional_put: Whether ``If-None-Match: *`` is honoured.
        copies_parts: From objects into uploads.
        probing: Held by a trial.
        beginning: Held by the first upload, until the checks are known.
    """

    def __init__(
        self, options: S3Options, environment: Mapping[str, str], *, run_io: RunBlocking
    ) -> None:
        self.options = options
        self.environment = environment
        self.num_users = 0
        self.checks_crc32c: bool | None = None
        self.checks_sha256: bool | None = None
        self.has_conditional_put = options.has_conditional_put
        self.copies_parts: bool | None = None
        self.probing = anyio.Lock()
        self.beginning = anyio.Lock()
        self._run_io = run_io
        self._opening = anyio.Lock(fast_acquire=True)
        self._session: AioSession | None = None
        self._client: Any = None
        self._wire: Wire | None = None
        # Reading the trusted authorities takes longer than a round trip.
        self._ssl_context: ssl.SSLContext | None = None
        self._buckets: dict[str, _Bucket] = {}

    def knows_checks(self) -> bool:
        return bool(self.checks_crc32c) or self.checks_sha256 is not None

    async def release(self) -> None:
        """Ends one use. The last one closes the connections; credentials are kept."""
        self.num_users -= 1
        if not self.num_users and self._wire is not None:
            wire, self._wire = self._wire, None
            await wire.aclose()

    @property
    def is_of_environment(self) -> bool:
        """Whether the credentials are those in environment variables: nothing renews these."""
        used = None if self._session is None else self._session._credentials
        environ = os.environ
        return (
            used is not None
            and used.method == "env"
            and used.access_key == environ.get("AWS_ACCESS_KEY_ID")
            and used.token in (None, *map(environ.get, ("AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN")))
        )

    def renew(self) -> None:
        """Makes the next call look for credentials again."""
        self._client = None

    async def call(self, operation: str, **params: Any) -> dict[str, Any]:
        """Makes a control call by its aiobotocore name: ``call("head_object", Bucket=...)``."""
        await self._open()
        answer: dict[str, Any] = await getattr(self._client, operation)(**params)
        return answer

    async def send(self, target: BulkTarget, views: Sequence[memoryview], payload: str) -> Response:
        """Sends ``views`` as the body of a PUT.

        ``payload`` is their SHA-256 in hex digits, if it is to be signed. Cancellation: at once;
        the server may have acted on the request.
        """
        wire = await self._open()
        request = await self._request("PUT", target, payload)
        response = await wire.send(request, views)
        _check_is_no_page(request, response)
        _raise_for_status(response, "PUT")
        return response

    async def receive(self, target: BulkTarget, views: Sequence[memoryview] | None) -> Response:
        """Fills ``views`` with an object's bytes; if None, keeps up to 1 MiB as the body.

        Cancellation: at once; the views are free.
        """
        wire = await self._open()
        request = await self._request("GET", target, UNSIGNED_PAYLOAD)
        response = await (wire.send(request) if views is None else wire.receive(request, views))
        _check_is_no_page(request, response)
        _raise_for_status(response, "GET")
        return response

    async def _request(self, method: str, target: BulkTarget, payload: str) -> Request:
        at = await self._bucket(target.bucket)
        url = at.base_url + quote(target.key, safe="/~")
        if target.query:
            url += f"?{urlencode(target.query, quote_via=quote)}"
        sent = {"User-Agent": f"actorsnap/{RELEASE}", **target.headers}
        if at.region is not None:
            assert self._session is not None
            credentials = await self._session.get_credentials()
            if credentials is None:
                raise NoCredentialsError
            frozen = await credentials.get_frozen_credentials()
            now = datetime.now(UTC)
            sent |= sign(method, url, sent, frozen, region=at.region, payload=payload, now=now)
        deadline_s = self.options.transfer_timeout_s
        return Request(method=method, url=url, headers=sent, deadline_s=deadline_s)

    async def _bucket(self, name: str) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            # The URL has address, region, and whether to sign.
            url = urlsplit(
                await self._client.generate_presigned_url(
                    "get_object", Params={"Bucket": name, "Key": "k"}
                )
            )
            scope = parse_qs(url.query).get("X-Amz-Credential", [""])[0].split("/")
            region = scope[2] if len(scope) == 5 else None
            host = url.netloc
            if host == f"{name}.s3.amazonaws.com" and region not in (None, "us-east-1"):
                # Presigned URLs name the global host, which redirects for a day after a bucket's
                # creation.
                host = f"{name}.s3.{region}.amazonaws.com"
            base_url = f"{url.scheme}://{host}{url.path.removesuffix('k')}"
            bucket = self._buckets[name] = _Bucket(base_url, region)
        return bucket

    async def _open(self) -> Wire:
        async with self._opening:
            if self._client is None:
                self._session, self._client = await self._run_io(_open_client, self.options)
                self._client.meta.events.register("before-send.s3", self._send_control)
                self._buckets.clear()
            if self._wire is None:
                assert self._session is not None
                endpoint_url = self._client.meta.endpoint_url
                self._wire = await self._run_io(self._new_wire, self._session, endpoint_url)
            return self._wire

    def _new_wire(self, session: AioSession, endpoint_url: str) -> Wire:
        options = self.options
        proxies = options.proxies
        if proxies is None:
            proxies = get_environ_proxies(endpoint_url)
        scheme = urlsplit(endpoint_url).scheme
        if scheme == "https" and self._ssl_context is None:
            verify = options.ca_bundle or session.get_config_variable("ca_bundle") or True
            try:
                self._ssl_context = ssl.create_default_context(cafile=get_cert_path(verify))
            except OSError as error:
                raise UsageError(f"the certificates {verify!r} cannot be read: {error}") from error
        proxy = _check_proxy(proxies.get(scheme))
        return Wire(self._run_io, options, ssl_context=self._ssl_context, proxy=proxy)

    async def _send_control(
        self, request: AWSPreparedRequest, event_name: str, **_: Any
    ) -> AioAWSResponse:
        """Sends a control call: botocore uses a hook's response."""
        is_long = event_name.endswith(("CompleteMultipartUpload", "UploadPartCopy"))
        options = self.options
        headers = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in request.headers.items()
            if name not in ("Content-Length", "Expect")
        }
        assert self._wire is not None
        sent = Request(
            method=request.method,
            url=request.url,
            headers=headers,
            deadline_s=options.transfer_timeout_s if is_long else options.request_timeout_s,
            kept_bytes=_MAX_ANSWER_BYTES,
        )
        response = await self._wire.send(sent, [memoryview(request.body or b"")])
        _check_is_no_page(sent, response)
        return AioAWSResponse(request.url, response.status, response.headers, _Body(response.body))


def sign(
    method: str,
    url: str,
    headers: Mapping[str, str],
    credentials: Any,
    *,
    region: str,
    payload: str,
    now: datetime,
) -> dict[str, str]:
    """Returns the headers of a signature, AWS4-HMAC-SHA256, for headers and the hash of a payload.

    That of botocore takes four times as long, on the loop, which all requests share.

    Args:
        url: Quoted, with its query in any order.
        credentials: Frozen ones of botocore.
    """
    at = urlsplit(url)
    added = {"X-Amz-Date": now.strftime("%Y%m%dT%H%M%SZ"), "X-Amz-Content-SHA256": payload}
    if credentials.token:
        added["X-Amz-Security-Token"] = credentials.token
    signed = {name.lower(): " ".join(value.split()) for name, value in {**headers, **added}.items()}
    signed.pop("user-agent", None)  # proxies change it
    signed["host"] = host_header(at)
    ordered = sorted(signed.items())
    names = ";".join([name for name, _ in ordered])
    by_name = sorted(at.query.split("&"), key=lambda pair: pair.split("="))
    lines = [method, at.path, "&".join(by_name)]
    lines += [f"{name}:{value}" for name, value in ordered]
    digest = hashlib.sha256("\n".join([*lines, "", names, payload]).encode()).hexdigest()
    scope = f"{added['X-Amz-Date'][:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{added['X-Amz-Date']}\n{scope}\n{digest}"
    # Not hmac.digest, which gives up the GIL: the loop then waits for its turn among the uploaders.
    key = _signing_key(credentials.secret_key, scope)
    signature = hmac.new(key, text.encode(), "sha256").digest()
    added["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature.hex()}"
    )
    return added


@functools.lru_cache(maxsize=8)
def _signing_key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


class _Body:
    """A body as ``AioAWSResponse`` reads it."""

    def __init__(self, body: bytes) -> None:
        self._data = body

    async def read(self) -> bytes:
        return self._data


@functools.cache
def _shared_loader() -> Loader:
    """Shares loaded service models, which take 0.1 s each, among clients."""
    return create_loader()


def _open_client(options: S3Options) -> tuple[AioSession, Any]:
    """Opens a session and its client; on a worker thread, with a temporary event loop.

    The client opens no connection, so it is not bound to that loop.
    """

    async def open_client() -> tuple[AioSession, Any]:
        session = AioSession(profile=options.profile)
        session.register_component("data_loader", _shared_loader())
        if options.access_key_id is not None:
            session.set_credentials(
                options.access_key_id, options.secret_access_key, options.session_token
            )
        config = AioConfig(
            signature_version=UNSIGNED if options.anonymous else "s3v4",
            # The storage retries; these would be hidden.
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": options.addressing_style, "payload_signing_enabled": False},
        )
        context = session.create_client(
            "s3", region_name=options.region, endpoint_url=options.endpoint_url, config=config
        )
        try:
            return session, await context.__aenter__()
        except ValueError as error:
            if "Invalid endpoint" not in str(error):
                raise
            raise UsageError(_wrong_endpoint(str(error))) from None

    return asyncio.run(open_client())


def _wrong_endpoint(text: str) -> str:
    """Describes an endpoint of the environment or the configuration, without a password in it."""
    value = text.partition(": ")[2]
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if not value or "@" in value:
        where = f"the endpoint in {' or '.join(names)} or the configuration"
        return f"{where} must be http://host or https://host, without a user"
    name = next((name for name in names if os.environ.get(name) == value), "the endpoint_url")
    if value.startswith(("http://", "https://")):
        return f"{name} is {value!r}: it must be http://host or https://host"
    return f"{name} is {value!r}: it must begin with http:// or https://"


def _check_proxy(given: str | None) -> str | None:
    """Returns a proxy's URL, which the environment may give without a scheme.

    Raises:
        UsageError: It is malformed. Not shown: it may have a password.
    """
    if not given:
        return None
    proxy = given if "://" in given else f"http://{given}"
    url = urlsplit(proxy)
    try:
        is_valid = url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError("a proxy is http://host:port, or http://user:password@host:port")
    return proxy


def _check_is_no_page(request: Request, response: Response) -> None:
    """Raises ``WireError`` for an answer of a server for browsers, such as a console."""
    is_page = response.body[:64].lstrip().lower().startswith((b"<!doctype html", b"<html"))
    is_page = is_page and "html" in response.headers.get("content-type", "html")  # else an object
    # Proxies answer with pages, too, but not with these statuses.
    is_answer = response.status < 300 or response.status in (404, 405, 501)
    if is_answer and is_page and "x-amz-request-id" not in response.headers:
        url = urlsplit(request.url)
        place = f"{url.scheme}://{url.netloc}"
        detail = f"{place} answered with a web page: it is not an S3 endpoint"
        raise WireError(detail, is_retryable=False)


def _raise_for_status(response: Response, operation: str) -> None:
    if response.status < 300:
        return
    parsed = create_parser("rest-xml").parse(
        {"status_code": response.status, "headers": response.headers, "body": response.body}, None
    )
    raise ClientError(parsed, operation)


# --- Errors ---------------------------------------------------------------------------------------

_THROTTLED = {
    "BandwidthLimitExceeded",
    "RequestLimitExceeded",
    "RequestThrottled",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
}
_TRANSIENT = {
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
"""A retry may avoid these failures."""

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_WRONG_KEYS = {"InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_ELSEWHERE = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}


_NEEDED_TO_SAVE = (
    "saving needs s3:PutObject, GetObject, ListBucket, DeleteObject, AbortMultipartUpload, "
    "ListMultipartUploadParts and ListBucketMultipartUploads"
)
_NEEDED_TO_READ = "reading needs s3:GetObject and s3:ListBucket"
_OF_OBJECTS = ("get", "read_into", "stat")
_OF_LISTS = ("list", "list_folders")


def _needed(op: str) -> str:
    """Returns the permissions for what ``op`` is a part of."""
    if op in _OF_LISTS:
        return _NEEDED_TO_READ
    if op in _OF_OBJECTS:
        return f"{_NEEDED_TO_READ}; without s3:ListBucket, a missing object is denied, too"
    return _NEEDED_TO_SAVE


def translate_error(
    error: Exception, client: S3Client, *, op: str, key: str, url: str, bucket: str
) -> StorageError:
    """Returns the error, with advice, for a botocore error or a ``WireError``."""
    if isinstance(error, ClientError):
        kind, detail, fields = _error_from_response(error, client, op)
    else:
        kind, detail, fields = _error_without_response(error, client)
    return kind(op=op, key=key, backend=url, detail=f"bucket {bucket!r}: {detail}", **fields)


def is_wrong_key(error: Exception) -> bool:
    """Returns whether the error means missing or wrong credentials, and nothing else."""
    if isinstance(error, NoCredentialsError):
        return True
    return isinstance(error, ClientError) and error.response["Error"].get("Code") in _WRONG_KEYS


_Meaning: TypeAlias = tuple[type[StorageError], str, dict[str, Any]]


def _error_without_response(error: Exception, client: S3Client) -> _Meaning:
    if isinstance(error, WireError):
        advice = remedy(error.is_timeout, "the server, endpoint_url, proxies and ca_bundle")
        return StorageError, f"{error.detail}; {advice}", {"retryable": error.is_retryable}
    if isinstance(error, InvalidRegionError | ParamValidationError | ProfileNotFound):
        return (
            StorageError,
            f"{str(error).rstrip('.')}; correct the storage option or the configuration",
            {},
        )
    assert isinstance(error, BotoCoreError)
    client.renew()
    # Without its message: some quote a credential helper's output.
    return (
        AccessDenied,
        f"no credentials were found ({type(error).__name__}): set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, a profile, or storage_options; anonymous=True for public buckets",
        {},
    )


def _error_from_response(error: ClientError, client: S3Client, op: str) -> _Meaning:
    about = error.response.get("ResponseMetadata", {})
    status = int(about.get("HTTPStatusCode", 0))
    headers: Mapping[str, str] = about.get("HTTPHeaders", {})
    failure = error.response.get("Error", {})
    code = str(failure.get("Code") or status)
    answer = f"{code} ({status})"
    wait_s = parse_retry_after(headers.get("retry-after"))
    if code in ("NoSuchKey", "NotFound", "404"):  # HEAD is answered by a status only
        return ObjectNotFound, f"{answer}: no such object", {}
    if code == "NoSuchBucket":
        return StorageError, f"{answer}: create it, or correct its name or endpoint_url", {}
    if status == 412:
        return ObjectExists, f"{answer}: the object exists already", {}
    if code in _THROTTLED or status in (429, 503):
        return Throttled, f"{answer}: the server asks to slow down", {"retry_after_s": wait_s}
    if code == "RequestTimeTooSkewed":
        detail = (
            f"{answer}: the clock of this machine is wrong{_describe_skew(headers)}; set it (NTP)"
        )
        return StorageError, detail, {"retryable": True}
    if code in _EXPIRED:
        client.renew()
        are_given = client.options.access_key_id is not None
        advice = "pass a new session_token" if are_given else "log in again"
        detail = f"{answer}: the credentials have expired: {advice}"
        return AccessDenied, detail, {"retryable": not are_given and not client.is_of_environment}
    if code in _ELSEWHERE or status in (301, 307, 308):
        region = headers.get("x-amz-bucket-region") or failure.get("Region")
        name = f"the storage option region={region}" if region else "the storage option region"
        return StorageError, f"{answer}: it is in another region: set {name}", {}
    if code in _FULL or status == 507:
        return StorageFull, f"{answer}: no room or no quota is left", {}
    if code in _WRONG_KEYS:
        client.renew()
        detail = f"{answer}: the access key or its secret is wrong for this endpoint"
        return AccessDenied, detail, {}
    if status in (401, 403):
        return AccessDenied, f"{answer}: the credentials do not allow it; {_needed(op)}", {}
    message = failure.get("Message") or "the server does not say why"
    detail = f"{answer}: {message[:300]}; check storage_options, and what the server supports"
    is_transient = code in _TRANSIENT or (status >= 500 and status != 501)
    return StorageError, detail, {"retryable": is_transient, "retry_after_s": wait_s}


def _describe_skew(headers: Mapping[str, str]) -> str:
    """Describes the clock's error, from the response's date."""
    try:
        there = parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError):
        return ""
    return f" by {(datetime.now(UTC) - there).total_seconds():+.0f} s"
