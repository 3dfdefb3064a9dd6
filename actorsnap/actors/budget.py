# SPDX-License-Identifier: Apache-2.0
"""A first-in-first-out byte budget, shared by all snapshots of a process.

Strictly in order, so small requests do not starve a large one. One larger than the budget is
admitted when nothing else is leased. Except for staging, the first lease of each purpose may exceed
the limit: restores must not wait for a save whose storage hangs, and staged memory is only freed by
storing, which may need memory. A task that waits for such a lease may hold one for an earlier
purpose in ``Purpose``, and no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self

import anyio

from actorsnap.state.sources import Pinner


class Purpose(Enum):
    STAGING = auto()
    COMPRESSING = auto()
    READING = auto()
    DECOMPRESSING = auto()


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    purpose: Purpose
    event: anyio.Event = field(default_factory=anyio.Event)


class Lease:
    """The right to ``nbytes`` of memory, and the memory. Releasing it twice is harmless."""

    __slots__ = ("_budget", "_purpose", "nbytes", "on_release", "view")

    def __init__(self, budget: Budget, nbytes: int, view: memoryview, purpose: Purpose) -> None:
        self._budget: Budget | None = budget
        self._purpose = purpose
        self.nbytes = nbytes
        self.view = view
        self.on_release: Callable[[], None] | None = None

    def release(self) -> None:
        """Returns the bytes to the budget; ``view`` must not be used any more."""
        budget, self._budget = self._budget, None
        if budget is not None:
            view, self.view = self.view, memoryview(b"")
            budget._free(view)
            budget._give_back(self.nbytes, self._purpose)
            if self.on_release is not None:
                self.on_release()

    def pin(self, pinner: Pinner) -> None:
        """Pins the memory for a device, once; from any thread. See ``Arena.pin``."""
        assert self._budget is not None
        self._budget._pin(self.view, pinner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Budget:
    """Lends memory up to a limit, in order of request. On one event loop only.

    Args:
        limit_bytes: At least 1.
        allocate: Returns writable memory of exactly the given number of bytes.
        free: Takes the memory back.
        pin: Pins the memory for a device, if the system permits.

    Attributes:
        leased_bytes, peak_bytes: Now, and at most so far.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        allocate: Callable[[int], memoryview] | None = None,
        free: Callable[[memoryview], None] | None = None,
        pin: Callable[[memoryview, Pinner], None] | None = None,
    ) -> None:
        self._limit = limit_bytes
        self._allocate = allocate or (lambda nbytes: memoryview(bytearray(nbytes)))
        self._free = free or (lambda view: None)
        self._pin = pin or (lambda view, pinner: None)
        self.leased_bytes = 0
        self._num_lent = dict.fromkeys(Purpose, 0)
        self.peak_bytes = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def limit_bytes(self) -> int:
        return self._limit

    @limit_bytes.setter
    def limit_bytes(self, value: int) -> None:
        self._limit = value
        self._admit()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def would_wait(self, nbytes: int) -> bool:
        return bool(self._waiters) or not self._fits(nbytes)

    async def lease(self, nbytes: int, purpose: Purpose = Purpose.STAGING) -> Lease:
        """Waits for its turn and for ``nbytes``. Cancellation: Nothing stays leased."""
        waiter = _Waiter(nbytes, purpose)
        self._waiters.append(waiter)
        self._admit()
        try:
            if not waiter.event.is_set():
                await waiter.event.wait()
            view = self._allocate(nbytes)
        except BaseException:
            if waiter.event.is_set():
                self._give_back(nbytes, purpose)
            else:
                self._waiters.remove(waiter)
                self._admit()
            raise
        return Lease(self, nbytes, view, purpose)

    def _fits(self, nbytes: int) -> bool:
        return self.leased_bytes + nbytes <= self._limit or self.leased_bytes == 0

    def _give_back(self, nbytes: int, purpose: Purpose) -> None:
        self.leased_bytes -= nbytes
        self._num_lent[purpose] -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].nbytes):
            self._take(self._waiters.popleft())
        for waiter in list(self._waiters):
            if waiter.purpose is not Purpose.STAGING and not self._num_lent[waiter.purpose]:
                self._waiters.remove(waiter)
                self._take(waiter)

    def _take(self, waiter: _Waiter) -> None:
        self.leased_bytes += waiter.nbytes
        self._num_lent[waiter.purpose] += 1
        self.peak_bytes = max(self.peak_bytes, self.leased_bytes)
        waiter.event.set()
