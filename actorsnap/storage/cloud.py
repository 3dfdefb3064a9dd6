"""The common parts of the S3 and Google Cloud storages: URLs, options, headers, policies."""

from __future__ import annotations

import math
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from actorsnap.errors import UsageError, did_you_mean
from actorsnap.storage.base import Storage, StorageContext, check_key
from actorsnap.storage.policies import AdaptiveStorage, RetryPolicy, RetryStorage

__all__ = [
    "NetworkOptions",
    "add_policies",
    "check_secret",
    "convert_options",
    "decode_crc32c",
    "encode_crc32c",
    "parse_retry_after",
    "remedy",
    "split_url",
]

S = TypeVar("S", bound=msgspec.Struct)

_MAX_TIMEOUT_S = 24 * 3600


class NetworkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all services. Times are in seconds.

    Attributes:
        endpoint_url: Of a server other than the provider's.
        anonymous: Send no credentials, for public buckets and emulators.
        ca_bundle: File of trusted certificate authorities.
        max_concurrency: Requests at a time.
        max_attempts: Tries per request, the first included.
        connect_timeout_s: For one address, and for the TLS handshake.
        stall_timeout_s: Longest silence of a server.
        request_timeout_s: For a request without bulk bytes.
        transfer_timeout_s: For a write, or a range that is read.
    """

    endpoint_url: str | None = None
    anonymous: bool = False
    ca_bundle: str | None = None
    max_concurrency: int = 32
    max_attempts: int = 12
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    request_timeout_s: float = 120.0
    transfer_timeout_s: float = 600.0

    def __repr__(self) -> str:
        # Without secrets and accounts.
        return f"{type(self).__name__}(endpoint_url={self.endpoint_url!r})"

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:
            url = urlsplit(self.endpoint_url)
            if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
                raise ValueError("endpoint_url must be http://host or https://host, without a user")
            if url.port == 0:  # may raise
                raise ValueError("endpoint_url must not have port 0")
        for name in ("max_concurrency", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        for name in ("connect", "stall", "request", "transfer"):
            if not 0 < getattr(self, f"{name}_timeout_s") <= _MAX_TIMEOUT_S:
                raise ValueError(f"{name}_timeout_s must be in (0, {_MAX_TIMEOUT_S}]")


def split_url(url: str, bucket_pattern: str) -> tuple[str, str]:
    """Returns bucket and prefix, which may be empty, of ``scheme://bucket/some/prefix``."""
    scheme, _, place = url.partition("://")
    bucket, _, prefix = place.rstrip("/").partition("/")
    if not bucket:
        raise UsageError(f"{url!r} names no bucket: {scheme}://bucket/prefix")
    if not re.fullmatch(bucket_pattern, bucket):
        # Without the text: it may be key:secret@bucket.
        raise UsageError(
            f"the text between {scheme}:// and the next slash cannot be a bucket's name; "
            "credentials go into storage_options or the environment"
        )
    return bucket, check_key(prefix) if prefix else ""


def add_policies(storage: Storage, options: NetworkOptions, context: StorageContext) -> Storage:
    adaptive = AdaptiveStorage(storage, max_operations=options.max_concurrency)
    policy = RetryPolicy(max_attempts=options.max_attempts)
    return RetryStorage(adaptive, policy=policy, on_retry=context.on_retry)


def encode_crc32c(value: int) -> str:
    """As both services write it."""
    return b64encode(value.to_bytes(4, "big")).decode()


def decode_crc32c(text: str) -> int:
    return int.from_bytes(b64decode(text), "big")


def parse_retry_after(text: str | None) -> float | None:
    """Returns the seconds of ``Retry-After``; None for a date, which is a guess."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def remedy(is_timeout: bool, places: str) -> str:
    """Returns advice for a request without an answer."""
    if is_timeout:
        return "raise the timeouts in storage_options if the service is that slow"
    return f"look at {places}"


def check_secret(name: str, value: str | None) -> None:
    """Raises ``ValueError``, without the value, if no header can hold it."""
    if value is not None and not re.fullmatch("[!-~]+", value):
        raise ValueError(f"{name} must be ASCII, without spaces and line ends")


def convert_options(options: Mapping[str, Any], to: type[S], *, scheme: str) -> S:
    """Returns ``options`` as a ``to``. Errors show no values: they may be secrets."""
    names = to.__struct_fields__
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names) or f"it has: {', '.join(names)}"
            raise UsageError(f"{scheme}:// has no storage option {name!r}; {hint}")
    try:
        return msgspec.convert(dict(options), to)
    except msgspec.ValidationError as error:
        raise UsageError(f"storage_options of {scheme}://: {error}") from None
