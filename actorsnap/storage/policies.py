"""Policies around a storage: an adaptive limit, retries.

The limit belongs inside of the retries: an operation that waits for its next try takes no turn.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import anyio

from actorsnap.errors import ObjectExists, ObjectNotFound, StorageError, Throttled, UsageError
from actorsnap.log import Log
from actorsnap.storage.base import ObjectInfo, Storage
from actorsnap.storage.wrapper import Wrapper, close_after, without_blocking_io

__all__ = ["AdaptiveStatistics", "AdaptiveStorage", "RetryPolicy", "RetryStorage"]

logger = Log(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_CLEANUP = frozenset({"abort", "aclose"})
"""Never delayed: they free what other verbs wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveStatistics:
    """``num_throttled`` counts refused operations, ``num_decreases`` falls of the level."""

    level: int
    num_running: int
    num_waiting: int
    num_throttled: int
    num_decreases: int


class AdaptiveStorage(Wrapper):
    """Some verbs at a time; others wait in order. Learns how many from the storage's answers.

    Each ``write_at`` and each step of ``list`` counts. Blocking I/O is off: a worker thread cannot
    wait on the loop. For one event loop.

    Additive increase, multiplicative decrease, as in TCP. A success while all turns are in use adds
    about one turn per round of operations. A throttled operation halves the level, never below one,
    but only if it began after the last fall: at most once per round trip.
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
                self._set_level(max(1.0, self._level / 2))
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
        max_attempts: Tries, the first included.
        first_delay_s: Upper bound of the first wait; it doubles with each failure.
        max_delay_s: Upper bound of waits that the storage did not ask for.
        max_total_s: Time after the first failure in which tries begin.
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
            elapsed_s: Since the first failure.
            retry_after_s: Least wait that the storage asked for.
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

    - ``put_if_absent``: an object of equal content counts as success: a failed try may have created
      it.
    - ``list``: continues after the last yielded key.
    - ``delete_folder``: returns the keys that the last try deleted.
    - ``writer``: if a failed try created the object, ``ObjectExists`` is raised, and it is garbage.

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
                error.add_note(f"given up after {failures.count} tries in {elapsed_s:.1f} s")
            raise error
        # Two failures may take minutes, and the caller should learn the reason.
        level = logging.WARNING if failures.count == 2 else logging.INFO
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
