"""Policies around a storage: prefix, limit, retry; and the base that they share.

Each wrapper decides one thing and passes everything else on. They must not know backends,
snapshots or threads. A wrapper owns what it wraps: its ``aclose`` closes that too.

``Wrapper`` keeps ``has_blocking_io``: a subclass that overrides ``around``, ``read_into`` or its
writer's ``write_at`` must either override the blocking twin or switch the capability off
(``without_blocking_io``). Otherwise blocking calls bypass its policy.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
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
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import anyio

from actorsnap.errors import FormatError, ObjectExists, ObjectNotFound, StorageError, UsageError
from actorsnap.lines import Lines
from actorsnap.storage.base import Capabilities, ObjectInfo, ObjectWriter, Storage, check_key

__all__ = [
    "LimitedStorage",
    "ListEnd",
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
P = ParamSpec("P")


class ListEnd(enum.Enum):
    """What the last step of a ``list`` returns."""

    END = enum.auto()


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
    """Passes every verb on to ``inner``. Errors, cancellation and atomicity are the inner's.

    Every call of the inner storage and of its writers goes through ``around``, or on a worker
    thread through ``around_blocking``. A policy for all verbs overrides these two.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Awaits ``call(...)``, the verb ``op`` on ``key``; each step of a ``list`` is a call.

        ``call`` is no closure: the frame of one, in a traceback, would keep the caller's memory.
        """
        return await call(*args, **kwargs)

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``around`` for worker threads."""
        return call(*args, **kwargs)

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self.around("put", key, self.inner.put, key, views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self.around("put_if_absent", key, self.inner.put_if_absent, key, data)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        return _AroundWriter(
            self,
            await self.around("writer", key, self.inner.writer, key, size, older=older),
        )

    async def join_writer(self, token: bytes) -> ObjectWriter:
        return _AroundWriter(
            self, await self.around("join_writer", "", self.inner.join_writer, token)
        )

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self.around("get", key, self.inner.get, key, start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self.around("read_into", key, self.inner.read_into, key, offset, views)

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        self.around_blocking("read_into", key, self.inner.read_into_blocking, key, offset, batches)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        found: AsyncIterator[ObjectInfo] | None = None

        async def step() -> ObjectInfo | ListEnd:
            nonlocal found
            if found is None:
                found = self.inner.list(prefix)
            return await anext(found, ListEnd.END)

        try:
            while not isinstance(info := await self.around("list", prefix, step), ListEnd):
                yield info
        finally:
            if isinstance(found, AsyncGenerator):
                await found.aclose()

    async def delete(self, keys: Sequence[str]) -> None:
        key = keys[0] if len(keys) == 1 else ""
        await self.around("delete", key, self.inner.delete, keys)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        return await self.around("list_folders", folder, self.inner.list_folders, folder)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        return await self.around("delete_folder", folder, self.inner.delete_folder, folder)

    async def stat(self, key: str) -> ObjectInfo:
        return await self.around("stat", key, self.inner.stat, key)

    async def aclose(self) -> None:
        await self.around("aclose", "", self.inner.aclose)


class WriterWrapper(ObjectWriter):
    """Passes every verb on to ``inner``, through ``around`` and ``around_blocking``."""

    def __init__(self, inner: ObjectWriter) -> None:
        self.inner = inner
        self.key = inner.key
        self.size = inner.size
        self.token = inner.token

    async def around(
        self, op: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See ``Wrapper.around``."""
        return await call(*args, **kwargs)

    def around_blocking(
        self, op: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See ``Wrapper.around_blocking``."""
        return call(*args, **kwargs)

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self.around("write_at", self.inner.write_at, offset, views, crc32c)

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        self.around_blocking("write_at", self.inner.write_at_blocking, offset, views)

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        return await self.around("reuse", self.inner.reuse, offset, views, crc32c)

    async def complete(self) -> None:
        await self.around("complete", self.inner.complete)

    async def release(self) -> None:
        await self.around("release", self.inner.release)

    async def abort(self) -> None:
        await self.around("abort", self.inner.abort)


class _AroundWriter(WriterWrapper):
    """A writer whose verbs go through the hooks of its storage."""

    def __init__(self, storage: Wrapper, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._storage = storage

    async def around(
        self, op: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._storage.around(op, self.key, call, *args, **kwargs)

    def around_blocking(
        self, op: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._storage.around_blocking(op, self.key, call, *args, **kwargs)


_CLEANUP = frozenset({"abort", "aclose"})
"""Verbs that no policy delays."""


class PrefixStorage(Wrapper):
    """The objects of ``inner`` below ``prefix/``, under keys relative to it.

    Errors name the relative key and this storage's URL. Tokens are the inner's: they join
    through any wrapper with the same prefix.
    """

    def __init__(self, inner: Storage, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = f"{check_key(prefix)}/"
        self.url = f"{inner.url.rstrip('/')}/{prefix}"

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with self._relative():
            return await call(*args, **kwargs)

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with self._relative():
            return call(*args, **kwargs)

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await super().put(self._full(key), views)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await super().put_if_absent(self._full(key), data)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        full = [self._full(name) for name in older]
        return self._named(await super().writer(self._full(key), size, older=full))

    async def join_writer(self, token: bytes) -> ObjectWriter:
        return self._named(await super().join_writer(token))

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await super().get(self._full(key), start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await super().read_into(self._full(key), offset, views)

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        super().read_into_blocking(self._full(key), offset, batches)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async with _closing(super().list(self._prefix + prefix)) as found:
            async for info in found:
                yield dataclasses.replace(info, key=self._stripped(info.key))

    async def delete(self, keys: Sequence[str]) -> None:
        await super().delete([self._full(key) for key in keys])

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        full = self._full(folder) if folder else self._prefix.removesuffix("/")
        return await super().list_folders(full)

    async def delete_folder(self, folder: str) -> Sequence[str]:
        return [*map(self._stripped, await super().delete_folder(self._full(folder)))]

    async def stat(self, key: str) -> ObjectInfo:
        return dataclasses.replace(await super().stat(self._full(key)), key=key)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _stripped(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _named(self, writer: ObjectWriter) -> ObjectWriter:
        writer.key = self._stripped(writer.key)
        return writer

    @contextmanager
    def _relative(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            here = {"key": self._stripped(error.key), "backend": self.url}
            raise type(error)(**{**error.fields, **here}) from error
        except FormatError as error:
            raise type(error)(**{**error.fields, "key": self._stripped(error.key)}) from error


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

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in _CLEANUP:
            return await call(*args, **kwargs)
        async with self._turn():
            return await call(*args, **kwargs)

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        raise NotImplementedError("who waits for a turn has no blocking I/O")


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

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        raise NotImplementedError("a retrying storage has no blocking I/O")

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
                async with _closing(self.inner.list(prefix)) as found:
                    async for info in found:
                        if info.key > last:  # else it was shown before the failure
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
        # A call that fails twice may be held up for minutes, and its caller should know why.
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
