"""Policies around a storage: prefix, limit, retry; and the base that they share.

Each wrapper decides one thing and passes everything else on. They must not know backends,
snapshots or threads. A wrapper owns what it wraps: its ``aclose`` closes that too.

``Wrapper`` keeps ``has_blocking_io``: a subclass that overrides ``read_into`` or whose writer
overrides ``write_at`` must either override the blocking twin or switch the capability off
(``without_blocking_io``); else its policy is passed by.
"""

from __future__ import annotations

import dataclasses
import random
from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio

from actorsnap.errors import FormatError, ObjectExists, ObjectNotFound, StorageError, UsageError
from actorsnap.lines import Lines
from actorsnap.storage.base import Capabilities, ObjectInfo, ObjectWriter, Storage, check_key

__all__ = [
    "LimitedStorage",
    "PrefixStorage",
    "RetryPolicy",
    "RetryStorage",
    "TurnsStorage",
    "Wrapper",
    "WriterWrapper",
    "without_blocking_io",
]

logger = Lines(__name__)

T = TypeVar("T")


@asynccontextmanager
async def _closing(found: AsyncIterator[ObjectInfo]) -> AsyncIterator[AsyncIterator[ObjectInfo]]:
    """Closes a backend's ``list`` with the wrapper's own, where it can be closed."""
    try:
        yield found
    finally:
        if isinstance(found, AsyncGenerator):
            await found.aclose()


def without_blocking_io(capabilities: Capabilities) -> Capabilities:
    """The same capabilities, for a wrapper whose policy exists in the async verbs only."""
    return dataclasses.replace(capabilities, has_blocking_io=False)


class Wrapper(Storage):
    """Passes every verb on to ``inner``. Errors, cancellation and atomicity are the inner's."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self.inner.put(key, views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self.inner.put_if_absent(key, data)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        return await self.inner.writer(key, size, older=older)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        return await self.inner.join_writer(token)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self.inner.get(key, start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self.inner.read_into(key, offset, views)

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        self.inner.read_into_blocking(key, offset, batches)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self.inner.list(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        await self.inner.delete(keys)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        return await self.inner.list_folders(folder)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        return await self.inner.delete_folder(folder)

    async def stat(self, key: str) -> ObjectInfo:
        return await self.inner.stat(key)

    async def aclose(self) -> None:
        await self.inner.aclose()


class WriterWrapper(ObjectWriter):
    """Passes every verb on to ``inner``."""

    def __init__(self, inner: ObjectWriter) -> None:
        self.inner = inner
        self.key = inner.key
        self.size = inner.size
        self.token = inner.token

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self.inner.write_at(offset, views, crc32c)

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        self.inner.write_at_blocking(offset, views)

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        return await self.inner.reuse(offset, views, crc32c)

    async def complete(self) -> None:
        await self.inner.complete()

    async def release(self) -> None:
        await self.inner.release()

    async def abort(self) -> None:
        await self.inner.abort()


class PrefixStorage(Wrapper):
    """The objects of ``inner`` below ``prefix/``, under keys relative to it.

    Errors name the relative key and this storage's URL. Tokens are the inner's: they join
    through any wrapper with the same prefix.
    """

    def __init__(self, inner: Storage, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = f"{check_key(prefix)}/"
        self.url = f"{inner.url.rstrip('/')}/{prefix}"

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        with self._relative():
            await self.inner.put(self._full(key), views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        with self._relative():
            await self.inner.put_if_absent(self._full(key), data)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        with self._relative():
            full = [self._full(name) for name in older]
            inner = await self.inner.writer(self._full(key), size, older=full)
        return _PrefixWriter(self, inner)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        with self._relative():
            return _PrefixWriter(self, await self.inner.join_writer(token))

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._relative():
            return await self.inner.get(self._full(key), start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        with self._relative():
            await self.inner.read_into(self._full(key), offset, views)

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        with self._relative():
            self.inner.read_into_blocking(self._full(key), offset, batches)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async with _closing(self.inner.list(self._prefix + prefix)) as found:
            while True:
                # Not around the yield: what the consumer raises there is none of our business.
                with self._relative():
                    info = await anext(found, None)
                if info is None:
                    return
                yield dataclasses.replace(info, key=self._stripped(info.key))

    async def delete(self, keys: Sequence[str]) -> None:
        with self._relative():
            await self.inner.delete([self._full(key) for key in keys])

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        with self._relative():
            full = self._full(folder) if folder else self._prefix.removesuffix("/")
            return await self.inner.list_folders(full)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        with self._relative():
            return [*map(self._stripped, await self.inner.delete_folder(self._full(folder)))]

    async def stat(self, key: str) -> ObjectInfo:
        with self._relative():
            info = await self.inner.stat(self._full(key))
        return dataclasses.replace(info, key=key)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _stripped(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    @contextmanager
    def _relative(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            here = {"key": self._stripped(error.key), "backend": self.url}
            raise type(error)(**{**error.fields, **here}) from error
        except FormatError as error:
            raise type(error)(**{**error.fields, "key": self._stripped(error.key)}) from error


class _PrefixWriter(WriterWrapper):
    def __init__(self, storage: PrefixStorage, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._storage = storage
        self.key = storage._stripped(inner.key)

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        with self._storage._relative():
            await self.inner.write_at(offset, views, crc32c)

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        with self._storage._relative():
            self.inner.write_at_blocking(offset, views)

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        with self._storage._relative():
            return await self.inner.reuse(offset, views, crc32c)

    async def complete(self) -> None:
        with self._storage._relative():
            await self.inner.complete()

    async def release(self) -> None:
        with self._storage._relative():
            await self.inner.release()


class TurnsStorage(Wrapper):
    """Verbs that wait for their turn; a subclass says when that comes.

    Each ``write_at`` and each step of ``list`` is one operation; a writer that is open but idle,
    and ``abort``, are none: cleanup must not wait behind what it cleans up. Blocking I/O is off,
    for a worker thread cannot wait its turn on the loop. For use on one event loop.

    Cancellation: a waiting call ends without effect; a running one as the inner says.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)

    @abstractmethod
    def _turn(self) -> AbstractAsyncContextManager[object]:
        """Waits for the turn of an operation, which ends with the context."""

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        async with self._turn():
            await self.inner.put(key, views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        async with self._turn():
            await self.inner.put_if_absent(key, data)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        async with self._turn():
            return _TurnsWriter(self, await self.inner.writer(key, size, older=older))

    async def join_writer(self, token: bytes) -> ObjectWriter:
        async with self._turn():
            return _TurnsWriter(self, await self.inner.join_writer(token))

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        async with self._turn():
            return await self.inner.get(key, start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        async with self._turn():
            await self.inner.read_into(key, offset, views)

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        raise NotImplementedError("who waits for a turn has no blocking I/O")

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async with _closing(self.inner.list(prefix)) as found:
            while True:
                async with self._turn():
                    info = await anext(found, None)
                if info is None:
                    return
                yield info

    async def delete(self, keys: Sequence[str]) -> None:
        async with self._turn():
            await self.inner.delete(keys)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        async with self._turn():
            return await self.inner.list_folders(folder)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        async with self._turn():
            return await self.inner.delete_folder(folder)

    async def stat(self, key: str) -> ObjectInfo:
        async with self._turn():
            return await self.inner.stat(key)


class _TurnsWriter(WriterWrapper):
    def __init__(self, storage: TurnsStorage, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._turn = storage._turn

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        async with self._turn():
            await self.inner.write_at(offset, views, crc32c)

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        raise NotImplementedError("who waits for a turn has no blocking I/O")

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        async with self._turn():
            return await self.inner.reuse(offset, views, crc32c)

    async def complete(self) -> None:
        async with self._turn():
            await self.inner.complete()

    async def release(self) -> None:
        async with self._turn():
            await self.inner.release()


class LimitedStorage(TurnsStorage):
    """At most ``max_operations`` verbs at a time; more wait their turn, first come first served."""

    def __init__(self, inner: Storage, *, max_operations: int) -> None:
        if max_operations < 1:
            raise UsageError(f"max_operations must be 1 or more, not {max_operations}")
        super().__init__(inner)
        # Not a CapacityLimiter: that one knows tasks, and a task that iterates `list` may well
        # call other verbs of the same storage in between.
        self._turns = anyio.Semaphore(max_operations, fast_acquire=True)

    def statistics(self) -> anyio.SemaphoreStatistics:
        """How many calls wait."""
        return self._turns.statistics()

    def _turn(self) -> AbstractAsyncContextManager[object]:
        return self._turns


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When to try again: exponential backoff with a cap, and jitter.

    The defaults outlast a service that is away for a minute.

    Attributes:
        max_attempts: Tries in all, the first included.
        first_delay_s: Upper bound of the first wait; it doubles with each failure.
        max_delay_s: Upper bound of every wait that the storage has not asked for.
        max_total_s: No try begins later than so long after the first failure.
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
        """The wait after ``num_failures`` failures (1 or more), or None to give up.

        Args:
            num_failures: Tries so far; all failed.
            fraction: Where in the jitter's range to land, in [0, 1). The range is the upper
                half of the backoff: ranks that failed together must spread, but not hurry.
            elapsed_s: Since the first failure.
            retry_after_s: The least wait that the storage has asked for.
        """
        # min() of the exponent: 2.0 ** 1024 would overflow long after the cap is reached.
        backoff = min(self.first_delay_s * 2.0 ** min(num_failures - 1, 64), self.max_delay_s)
        delay_s = max(backoff * (0.5 + 0.5 * fraction), retry_after_s or 0.0)
        if num_failures >= self.max_attempts or elapsed_s + delay_s > self.max_total_s:
            return None
        return delay_s


class RetryStorage(Wrapper):
    """Tries again what failed with a ``StorageError`` that is ``retryable``.

    Verbs are repeatable as they stand, but for four:

    - ``put_if_absent``: a failed try may have created the object. If a later try finds it, its
      content is compared, and equal content counts as success. Callers whose data are equal
      to others' cannot tell who won; a commit object has the attempt in it.
    - ``list``: goes on after the last key that it has shown.
    - ``delete_folder``: returns the keys that the last try has deleted.
    - ``writer``: a failed try may have created the object; then ``ObjectExists`` is raised and
      the object is garbage of this attempt.

    Blocking I/O is off: waits belong to the loop.

    Args:
        inner: What is wrapped.
        policy: When to try again.
        on_retry: See ``StorageContext``.
        uniform, sleep, clock: Chance and time.
    Cancellation: ends a wait at once.
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

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self._retry(lambda: self.inner.put(key, views))

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

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        inner = await self._retry(lambda: self.inner.writer(key, size, older=older))
        return _RetryWriter(self, inner)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        return _RetryWriter(self, await self._retry(lambda: self.inner.join_writer(token)))

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self._retry(lambda: self.inner.get(key, start, stop))

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self._retry(lambda: self.inner.read_into(key, offset, views))

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        raise NotImplementedError("a retrying storage has no blocking I/O")

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        last = ""
        failures = _Failures()
        while True:
            try:
                async with _closing(self.inner.list(prefix)) as found:
                    async for info in found:
                        if info.key > last:  # else it was shown before the failure
                            last = info.key
                            failures = _Failures()
                            yield info
                return
            except StorageError as error:
                await self._wait(error, failures)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._retry(lambda: self.inner.delete(keys))

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        return await self._retry(lambda: self.inner.list_folders(folder))

    async def delete_folder(self, folder: str) -> Sequence[str]:
        return await self._retry(lambda: self.inner.delete_folder(folder))

    async def stat(self, key: str) -> ObjectInfo:
        return await self._retry(lambda: self.inner.stat(key))

    async def _holds(self, key: str, data: bytes) -> bool:
        try:
            return await self.get(key) == data
        except ObjectNotFound:
            return False

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        failures = _Failures()
        while True:
            try:
                return await call()
            except StorageError as error:
                await self._wait(error, failures)

    async def _wait(self, error: StorageError, failures: _Failures) -> None:
        """Waits before the next try, or raises ``error`` if there is to be none."""
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
        text = "%s; trying again in %.1f s"
        logger.info(text, error, delay_s, extra={"stage": error.op, "key": error.key})
        if self._on_retry is not None:
            self._on_retry(error, delay_s)
        await self._sleep(delay_s)


@dataclass(slots=True)
class _Failures:
    """Of one call, in a row."""

    count: int = 0
    first_s: float = 0.0


class _RetryWriter(WriterWrapper):
    def __init__(self, storage: RetryStorage, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._storage = storage

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self._storage._retry(lambda: self.inner.write_at(offset, views, crc32c))

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        raise NotImplementedError("a retrying storage has no blocking I/O")

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        return await self._storage._retry(lambda: self.inner.reuse(offset, views, crc32c))

    async def complete(self) -> None:
        await self._storage._retry(self.inner.complete)

    async def release(self) -> None:
        await self._storage._retry(self.inner.release)
