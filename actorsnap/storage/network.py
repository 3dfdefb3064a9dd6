# SPDX-License-Identifier: Apache-2.0
"""The common parts of storages over a network: options, URLs, headers, retries, an adaptive limit.

The limit belongs inside of the retries: an operation that waits for its next try takes no turn.
"""

from __future__ import annotations

import logging
import math
import random
import re
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import anyio
import msgspec

from actorsnap.errors import (
    ObjectExists,
    ObjectNotFound,
    StorageError,
    Throttled,
    UsageError,
)
from actorsnap.log import Log
from actorsnap.storage.base import ObjectInfo, Storage, StorageContext, check_key
from actorsnap.storage.wrapper import Wrapper, close_after, without_blocking_io
from actorsnap.wording import did_you_mean

logger = Log(__name__)

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
P = ParamSpec("P")

_CLEANUP = frozenset({"abort", "aclose"})
"""Never delayed: they free what other verbs wait for."""

_MAX_COUNT = 1_000_000
_MAX_TIMEOUT_S = 24 * 3600

_REPEAT_S = 15.0
"""Time between two warnings of a call that is retried."""

GIVEN_UP = "given up after"


class NetworkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all services. Times are in seconds.

    Attributes:
        endpoint_url: URL of a server other than the provider's.
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

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:
            url = urlsplit(self.endpoint_url)
            if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
                given = "" if "@" in self.endpoint_url else f", not {self.endpoint_url!r}"
                raise ValueError(
                    f"endpoint_url must be http://host or https://host, without a user{given}"
                )
            if url.port == 0:  # may raise
                raise ValueError("endpoint_url must not have port 0")
        for name in ("max_concurrency", "max_attempts"):
            if not 1 <= getattr(self, name) <= _MAX_COUNT:
                raise ValueError(f"{name} must be 1 or more, and at most {_MAX_COUNT}")
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
    # Callers begin with few transfers, and add more (``planning.transfers``).
    most = options.max_concurrency
    adaptive = AdaptiveStorage(storage, max_operations=most, first_operations=most)
    policy = RetryPolicy(max_attempts=options.max_attempts)
    return RetryStorage(adaptive, policy=policy, on_retry=context.on_retry)


def encode_crc32c(value: int) -> str:
    """Returns the form that both services use."""
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
    return f"check {places}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveStatistics:
    """``num_throttled`` counts refused operations, ``num_decreases`` decreases of the level."""

    level: int
    num_running: int
    num_waiting: int
    num_throttled: int
    num_decreases: int


class AdaptiveStorage(Wrapper):
    """Limits the number of verbs at a time; others wait in order. Adapts to the storage's answers.

    Each ``write_at`` and each step of ``list`` counts. Blocking I/O is off: a worker thread cannot
    wait on the loop. For one event loop.

    The limit grows additively and shrinks multiplicatively, as in TCP. Successes while the limit is
    reached raise it by about one per round of operations. A throttled operation halves the limit,
    or the number of operations if that is less, but not below one, and only if it began after the
    last decrease: at most once per round trip.
    """

    def __init__(self, inner: Storage, *, max_operations: int, first_operations: int = 8) -> None:
        if min(max_operations, first_operations) < 1:
            raise UsageError(
                "max_operations and first_operations must be 1 or more, "
                f"not {max_operations} and {first_operations}"
            )
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._max_level = max_operations
        self._level = float(min(first_operations, max_operations))
        self._limiter = anyio.CapacityLimiter(int(self._level))
        self._num_throttled = 0
        self._num_decreases = 0

    def statistics(self) -> AdaptiveStatistics:
        """Returns the current limit and the number of calls."""
        limiter = self._limiter.statistics()
        return AdaptiveStatistics(
            level=int(self._level),
            num_running=limiter.borrowed_tokens,
            num_waiting=limiter.tasks_waiting,
            num_throttled=self._num_throttled,
            num_decreases=self._num_decreases,
        )

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in _CLEANUP:
            return await call(*args, **kwargs)
        # A task that iterates `list` may call other verbs in between.
        operation = object()
        await self._limiter.acquire_on_behalf_of(operation)
        num_decreases = self._num_decreases
        try:
            result = await call(*args, **kwargs)
            if self._limiter.available_tokens <= 0:
                self._set_level(min(self._level + 1 / self._level, self._max_level))
            return result
        except Throttled:
            self._num_throttled += 1
            if num_decreases == self._num_decreases:
                self._num_decreases += 1
                num_running = self._limiter.borrowed_tokens
                self._set_level(max(1.0, min(self._level, num_running) / 2))
                logger.info("%s throttles: %d operations at a time", self.url, self._level)
            raise
        finally:
            self._limiter.release_on_behalf_of(operation)

    def _set_level(self, level: float) -> None:
        self._level = level
        self._limiter.total_tokens = int(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with a cap, and jitter.

    Attributes:
        max_attempts: Tries, including the first.
        first_delay_s: Upper bound of the first wait; it doubles with each failure.
        max_delay_s: Upper bound of waits that the storage did not ask for.
        max_total_s: Time after the first failure within which tries may begin.
    """

    max_attempts: int = 20
    first_delay_s: float = 0.25
    max_delay_s: float = 10.0
    max_total_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise UsageError(f"max_attempts must be 1 or more, not {self.max_attempts}")
        if not 0 <= self.first_delay_s <= self.max_delay_s:
            raise UsageError(
                "0 <= first_delay_s <= max_delay_s must hold, "
                f"not {self.first_delay_s} and {self.max_delay_s}"
            )
        if not self.max_total_s >= 0:
            raise UsageError(f"max_total_s must be 0 or more, not {self.max_total_s}")

    def delay_s(
        self,
        num_failures: int,
        fraction: float,
        *,
        elapsed_s: float = 0.0,
        retry_after_s: float | None = None,
    ) -> float | None:
        """Returns the wait after ``num_failures`` failures in a row; None to give up.

        Args:
            num_failures: 1 or more.
            fraction: The jitter, in [0, 1): a position in the upper half of the backoff.
            elapsed_s: Time since the first failure.
            retry_after_s: Shortest wait that the storage asked for.
        """
        # 2.0 ** 1024 would overflow.
        backoff = min(self.first_delay_s * 2.0 ** min(num_failures - 1, 64), self.max_delay_s)
        delay_s = max(backoff * (0.5 + 0.5 * fraction), retry_after_s or 0.0)
        if num_failures >= self.max_attempts or elapsed_s + delay_s > self.max_total_s:
            return None
        return delay_s


class RetryStorage(Wrapper):
    """Repeats a verb that failed with a ``retryable`` ``StorageError``.

    Special cases:

    - ``put_if_absent``: an equal object counts as success: a failed try may have created it.
    - ``list``: continues after the last yielded key.
    - ``delete_folder``: returns the keys that the last try deleted.
    - ``writer``: if a failed try created the object, it is garbage, and ``ObjectExists`` is raised.

    Blocking I/O is off. Cancellation: ends a wait at once.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        policy: RetryPolicy,
        on_retry: Callable[[StorageError, float], None] | None = None,
        uniform: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._policy = policy
        self._on_retry = on_retry
        self._uniform = uniform
        self._sleep = sleep
        self._clock = clock
        self._warned: tuple[str, float] | None = None  # the last detail, and when

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in _CLEANUP:
            return await call(*args, **kwargs)
        failures = _Failures()
        while True:
            try:
                return await call(*args, **kwargs)
            except StorageError as error:
                await self._wait(error, failures)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        failures = _Failures()
        while True:
            try:
                return await self.inner.put_if_absent(key, data)
            except ObjectExists:
                if not failures.count or not await self._holds(key, data):
                    raise
                return None
            except StorageError as error:
                await self._wait(error, failures)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        last = ""
        failures = _Failures()
        while True:
            try:
                async with close_after(self.inner.list(prefix)) as infos:
                    async for info in infos:
                        if info.key > last:  # else yielded before the failure
                            last = info.key
                            failures = _Failures()
                            yield info
                return
            except StorageError as error:
                await self._wait(error, failures)

    async def _holds(self, key: str, data: bytes) -> bool:
        try:
            return await self.get(key) == data
        except ObjectNotFound:
            return False

    async def _wait(self, error: StorageError, failures: _Failures) -> None:
        """Waits before the next try, or raises ``error`` to give up."""
        now_s = self._clock()
        failures.count += 1
        if failures.count == 1:
            failures.first_s = now_s
        elapsed_s = now_s - failures.first_s
        delay_s = None
        if error.retryable:
            delay_s = self._policy.delay_s(
                failures.count,
                self._uniform(),
                elapsed_s=elapsed_s,
                retry_after_s=error.retry_after_s,
            )
        if delay_s is None:
            if failures.count > 1:
                error.add_note(f"{GIVEN_UP} {failures.count} tries in {elapsed_s:.1f} s")
            raise error
        # Two failures may take minutes, and the caller should learn the reason.
        is_due = failures.warned_s is None or now_s - failures.warned_s >= _REPEAT_S
        if self._warned is not None and self._warned[0] == error.detail:
            # Calls at the same time fail for the same reason.
            is_due = is_due and now_s - self._warned[1] >= _REPEAT_S
        level = logging.WARNING if failures.count >= 2 and is_due else logging.INFO
        if level == logging.WARNING:
            failures.warned_s = now_s
            self._warned = error.detail, now_s
        where = {"stage": error.op, "key": error.key}
        logger.log(level, "%s; trying again in %.1f s", error, delay_s, extra=where)
        if self._on_retry is not None:
            self._on_retry(error, delay_s)
        await self._sleep(delay_s)


@dataclass(slots=True)
class _Failures:
    """Of one call, in a row."""

    count: int = 0
    first_s: float = 0.0
    warned_s: float | None = None
