# SPDX-License-Identifier: Apache-2.0
"""Storages that fail, stall, slow down or kill the process on purpose.

Operations are counted to place a fault. Tests must assert ``was_hit``, or may pass without one.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple, ParamSpec, TypeVar

import anyio
import anyio.lowlevel

from actorsnap.errors import StorageError, UsageError
from actorsnap.storage.base import ObjectInfo, Storage, num_bytes
from actorsnap.storage.wrapper import Wrapper, without_blocking_io

T = TypeVar("T")
P = ParamSpec("P")


class Verb(StrEnum):
    PUT = "put"
    PUT_IF_ABSENT = "put_if_absent"
    WRITER = "writer"
    COPYING_WRITER = "copying_writer"
    JOIN_WRITER = "join_writer"
    WRITE_AT = "write_at"
    REUSE = "reuse"
    COPY_FROM = "copy_from"
    COMPLETE = "complete"
    RELEASE = "release"
    ABORT = "abort"
    GET = "get"
    READ_INTO = "read_into"
    LIST = "list"
    DELETE = "delete"
    LIST_FOLDERS = "list_folders"
    DELETE_FOLDER = "delete_folder"
    STAT = "stat"


class When(StrEnum):
    """Position of a fault relative to the operation's effect.

    Halfway tears a ``write_at``. Other verbs are atomic: halfway means before.
    """

    BEFORE = "before"
    HALFWAY = "halfway"
    AFTER = "after"


_WRITING = frozenset(
    {
        Verb.PUT,
        Verb.PUT_IF_ABSENT,
        Verb.WRITE_AT,
        Verb.REUSE,
        Verb.COPY_FROM,
        Verb.COMPLETE,
        Verb.DELETE,
        Verb.DELETE_FOLDER,
    }
)
# By contract, `abort` never raises StorageError.
_FAILING = frozenset(Verb) - {Verb.ABORT}


class FaultyStorage(Wrapper):
    """Forwards to ``inner``, except for the requested faults.

    Operations count from 1 in the order in which they begin, on any thread; a ``list`` counts once.
    The usual loop::

        for k in itertools.count(1):
            storage = FaultyStorage(inner, fail_at=k)
            try:
                await work(storage)
            except SnapshotAborted:
                assert storage.was_hit
            if not storage.was_hit:
                break

    Attributes:
        counts: Operations begun, by verb, including blocking ones.
        was_hit: Whether the failure or stall has happened, handled or not.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        fail_at: int | None = None,
        fail_verbs: Collection[Verb | str] = _FAILING,
        fail_when: When | str | None = None,
        error: Exception | None = None,
        is_lasting: bool = False,
        kill_after: int | None = None,
        latency_s: Mapping[Verb | str, float] | None = None,
        before: Callable[[Verb, str], Awaitable[None]] | None = None,
        has_blocking_io: bool = True,
    ) -> None:
        """Wraps ``inner``.

        Args:
            inner: The storage to wrap.
            fail_at: The operation, counted over ``fail_verbs``, that raises.
            fail_verbs: By default all but ``abort``.
            fail_when: Position of the failure or kill; None: a failure ``before``, a kill
                ``after``. A failure ``after`` is ambiguous, because the operation took effect; one
                ``halfway`` tears a write.
            error: None: a ``StorageError`` that is not retryable.
            is_lasting: All operations from ``fail_at`` on fail.
            kill_after: SIGKILL this process at that operation, counted over put, put_if_absent,
                write_at, reuse, complete, delete, delete_folder.
            latency_s: Seconds of delay of a verb; ``math.inf`` stalls it until it is cancelled.
            before: Awaited with verb and key as each operation begins; the operation raises its
                errors.
            has_blocking_io: False forces the async path; off, too, with ``before``, and if
                ``write_at`` or ``read_into`` stall, since a thread cannot be cancelled.

        Raises:
            UsageError: A count is below 1, or a verb is unknown.
        """
        super().__init__(inner)
        for name, count in (("fail_at", fail_at), ("kill_after", kill_after)):
            if count is not None and count < 1:
                raise UsageError(f"{name} counts from 1, not {count}")
        self.counts: Counter[Verb] = Counter()
        self.was_hit = False
        self._fail_at = fail_at
        self._fail_verbs = _verbs(fail_verbs) - {Verb.ABORT}
        self._fail_when = When(fail_when or When.BEFORE)
        self._error = error
        self._is_lasting = is_lasting
        self._kill_after = kill_after
        self._kill_when = When(fail_when or When.AFTER)
        latency_s = latency_s or {}
        _verbs(latency_s)
        self._latency_s = {Verb(verb): seconds for verb, seconds in latency_s.items()}
        self._before = before
        self._stalled = anyio.Event()
        self._lock = threading.Lock()
        self._num_failing = 0
        self._num_writing = 0
        stalls_io = math.inf in map(self._latency_s.get, (Verb.WRITE_AT, Verb.READ_INTO))
        if before is not None or stalls_io or not has_blocking_io:
            self.capabilities = without_blocking_io(inner.capabilities)

    @property
    def num_operations(self) -> int:
        """Number of operations so far."""
        with self._lock:
            return self.counts.total()

    async def wait_stalled(self) -> None:
        """Waits until an operation stalls."""
        await self._stalled.wait()

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op == "aclose":
            return await call(*args, **kwargs)
        verb = Verb(op)
        if self._before is not None:
            await self._before(verb, key)
        fault = self._begin(verb, key)
        latency_s = self._latency_s.get(verb)
        if latency_s is not None:
            if latency_s == math.inf:
                self.was_hit = True
                self._stalled.set()
                await anyio.sleep_forever()
            await anyio.sleep(latency_s)
        # A fault after `writer` drops the writer without an abort, like a lost answer.
        perform: Callable[..., Awaitable[T]] = call
        with self._strike(fault, args) as struck:
            return await perform(*struck, **kwargs)

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        verb = Verb(op)
        fault = self._begin(verb, key)
        if verb in self._latency_s:
            time.sleep(self._latency_s[verb])
        perform: Callable[..., T] = call
        with self._strike(fault, args) as struck:
            return perform(*struck, **kwargs)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        # Fails before its first item, or after its last one.
        for info in await self.around(Verb.LIST, prefix, self._list, prefix):
            yield info

    async def _list(self, prefix: str) -> Sequence[ObjectInfo]:
        return [info async for info in self.inner.list(prefix)]

    def _begin(self, verb: Verb, key: str) -> _Fault:
        fails = kills = False
        with self._lock:
            self.counts[verb] += 1
            if verb in self._fail_verbs:
                self._num_failing += 1
                fails = self._num_failing == self._fail_at or (
                    self._is_lasting
                    and self._fail_at is not None
                    and self._num_failing > self._fail_at
                )
            if verb in _WRITING:
                self._num_writing += 1
                kills = self._num_writing == self._kill_after
        fail_when = self._fail_when
        if fail_when is When.HALFWAY and verb is not Verb.WRITE_AT:
            fail_when = When.BEFORE
        return _Fault(verb, key, fail_when if fails else None, self._kill_when if kills else None)

    @contextmanager
    def _strike(self, fault: _Fault, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Yields the arguments of the operation; those of a torn ``write_at`` are cut."""
        self._strike_if(fault, When.BEFORE)
        if fault.fails is When.HALFWAY:
            data = b"".join(args[1])
            args = (args[0], [memoryview(data)[: len(data) // 2]])
        yield args
        self._strike_if(fault, When.HALFWAY)
        self._strike_if(fault, When.AFTER)

    def _strike_if(self, fault: _Fault, when: When) -> None:
        if fault.kills is when:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.fails is when:
            self.was_hit = True
            raise self._error or StorageError(
                op=fault.verb, key=fault.key, backend=self.url, detail="a scripted fault"
            )


class _Fault(NamedTuple):
    """Of one operation."""

    verb: Verb
    key: str
    fails: When | None
    kills: When | None


_PAID = {Verb.PUT: 1, Verb.PUT_IF_ABSENT: 1, Verb.READ_INTO: 2, Verb.WRITE_AT: 1}
"""Position of the bytes among the arguments."""


class ThrottledStorage(Wrapper):
    """Limits reads and writes together to ``bytes_per_s``, in the order of the calls.

    Blocking I/O is off. For one event loop.
    """

    def __init__(
        self, inner: Storage, *, bytes_per_s: float, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        if bytes_per_s <= 0:
            raise UsageError(f"bytes_per_s must be positive, not {bytes_per_s}")
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = 0.0

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in _PAID:
            data: Any = args[_PAID[Verb(op)]]
            await self._pay(len(data) if isinstance(data, bytes) else num_bytes(data))
        answer = await call(*args, **kwargs)
        if op == Verb.GET and isinstance(answer, bytes):
            await self._pay(len(answer))
        return answer

    async def _pay(self, count: int) -> None:
        now_s = self._clock()
        # Before the wait, so that concurrent callers queue up.
        self._free_at_s = max(self._free_at_s, now_s) + count / self._bytes_per_s
        await anyio.sleep(self._free_at_s - now_s)


def _verbs(names: Collection[Verb | str]) -> frozenset[Verb]:
    try:
        return frozenset(Verb(name) for name in names)
    except ValueError as error:
        raise UsageError(f"{error}; verbs are {', '.join(Verb)}") from error
