# SPDX-License-Identifier: Apache-2.0
"""``faulty://<url>``: the place at ``<url>`` through whatever wrapper a test has chosen.

Every call of the API opens its storage anew, some twice. Here all openings of one scenario
share one wrapper, so that a fault at "the k-th operation" means the k-th of the whole call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from actorsnap.storage.base import ObjectInfo, Storage, StorageContext
from actorsnap.storage.registry import open_storage, register
from actorsnap.storage.wrapper import Wrapper, without_blocking_io

__all__ = ["Barrier", "BarrierStorage", "faulty", "faulty_url"]

T = TypeVar("T")
P = ParamSpec("P")

WAIT_S = 60.0
"""Bound of every wait for another thread; reached only by a failing test."""


class _Scheme:
    def __init__(self) -> None:
        self.wrap: Callable[[Storage], Storage] | None = None
        self.opened: dict[str, Storage] = {}

    def __call__(self, url: str, context: StorageContext) -> Storage:
        inner = url.removeprefix("faulty://")
        if self.wrap is None:
            return open_storage(inner, context)
        if inner not in self.opened:
            self.opened[inner] = self.wrap(open_storage(inner, context))
        return self.opened[inner]


_scheme = _Scheme()
register("faulty", _scheme)


def faulty_url(url: object) -> str:
    """The URL by which ``url`` is opened through the wrapper."""
    return f"faulty://{url}"


@contextmanager
def faulty(wrap: Callable[[Storage], Storage]) -> Iterator[None]:
    """Within, ``faulty://`` URLs open through ``wrap``, once per URL."""
    _scheme.wrap, _scheme.opened = wrap, {}
    try:
        yield
    finally:
        _scheme.wrap, _scheme.opened = None, {}


class Barrier:
    """Holds the k-th operation until it is let go; used from any thread.

    Args:
        at: Which operation, counted from 1.
        verbs: Count these only.
        threads_only: Count only what runs on worker threads.

    Attributes:
        verb: Of the operation that is or was held.
        key: Likewise.
        before: Verbs and keys of the operations that began earlier.
    """

    def __init__(
        self, at: int, *, verbs: frozenset[str] | None = None, threads_only: bool = False
    ) -> None:
        self.is_blocking = threads_only
        self._at = at
        self._verbs = verbs
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._release = threading.Event()
        self._has_given_up = False
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.verb = ""
        self.key = ""
        self.before: list[tuple[str, str]] = []
        self._num_counted = 0

    @property
    def was_reached(self) -> bool:
        return self._reached.is_set() and not self._has_given_up

    def wait_reached(self) -> bool:
        """Blocks until the operation has begun; False if that takes too long."""
        return self._reached.wait(WAIT_S)

    def release(self) -> None:
        """Lets the operation go on."""
        with self._lock:
            self._release.set()
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            loop, event = waiting
            loop.call_soon_threadsafe(event.set)

    def give_up(self) -> None:
        """Ends ``wait_reached``: the operation will never come."""
        self._has_given_up = True
        self._reached.set()

    def _is_held(self, verb: str, key: str, *, is_thread: bool = False) -> bool:
        with self._lock:
            if not self.verb:
                self.before.append((verb, key))
            if self._verbs is not None and verb not in self._verbs:
                return False
            if self.is_blocking and not is_thread:
                return False
            self._num_counted += 1
            if self._num_counted != self._at:
                return False
            self.before.pop()
            self.verb, self.key = verb, key
            return True

    async def enter(self, verb: str, key: str) -> None:
        """Counts an operation, and holds it if it is the one."""
        if not self._is_held(verb, key):
            return
        event = asyncio.Event()
        with self._lock:
            if self._release.is_set():
                event.set()
            self._waiting = (asyncio.get_running_loop(), event)
        self._reached.set()
        await event.wait()

    def enter_blocking(self, verb: str, key: str) -> None:
        """``enter`` for worker threads."""
        if self._is_held(verb, key, is_thread=True):
            self._reached.set()
            assert self._release.wait(WAIT_S), "nobody let the operation go on"


class BarrierStorage(Wrapper):
    """Passes everything on, each operation through ``barrier`` first.

    Without ``has_blocking_io`` nothing runs on worker threads, so that a cancellation can
    reach the operation that is held.
    """

    def __init__(self, inner: Storage, barrier: Barrier, *, has_blocking_io: bool = False) -> None:
        super().__init__(inner)
        self._barrier = barrier
        if not has_blocking_io:
            self.capabilities = without_blocking_io(inner.capabilities)

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op != "aclose":
            await self._barrier.enter(op, key)
        return await call(*args, **kwargs)

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._barrier.enter_blocking(op, key)
        return call(*args, **kwargs)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._barrier.enter("list", prefix)  # once, not for each step
        async for info in self.inner.list(prefix):
            yield info
