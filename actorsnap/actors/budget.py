"""A first-in-first-out byte budget, shared by all snapshots of a process.

anyio's limiters count tokens, not bytes; this counts bytes. It decides only who may go next:
strictly in order of asking, so that a large request is not starved by small ones. One that is
larger than the whole budget is admitted when nothing else is leased, or nothing would move.

A lease for reading goes beyond the limit where no other one is lent: a save whose storage hangs
may hold everything until its deadline, and restores from healthy storages do not wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import anyio

__all__ = ["Budget", "BudgetStatistics", "Lease"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatistics:
    """Bytes leased now, their limit, the most ever leased, and how many wait."""

    leased_bytes: int
    limit_bytes: int
    peak_bytes: int
    num_waiting: int


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    is_reading: bool
    event: anyio.Event = field(default_factory=anyio.Event)


class Lease:
    """The right to ``nbytes`` of memory, and the memory itself. Release it once, or use it
    as a context manager; releasing twice is harmless.

    Attributes:
        on_release: Called once when the lease is released, if set.
    """

    __slots__ = ("_budget", "_is_reading", "nbytes", "on_release", "view")

    def __init__(self, budget: Budget, nbytes: int, view: memoryview, *, is_reading: bool) -> None:
        self._budget: Budget | None = budget
        self._is_reading = is_reading
        self.nbytes = nbytes
        self.view = view
        self.on_release: Callable[[], None] | None = None

    def release(self) -> None:
        """Gives the bytes back; ``view`` must not be used any more."""
        budget, self._budget = self._budget, None
        if budget is not None:
            view, self.view = self.view, memoryview(b"")
            budget._free(view)
            budget._give_back(self.nbytes, self._is_reading)
            if self.on_release is not None:
                self.on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Budget:
    """Lends memory up to a limit, in the order of asking. Used on one event loop only.

    Args:
        limit_bytes: At least 1.
        allocate: Gives writable memory of exactly that many bytes.
        free: Takes it back.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        allocate: Callable[[int], memoryview] | None = None,
        free: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._limit = limit_bytes
        self._allocate = allocate or (lambda nbytes: memoryview(bytearray(nbytes)))
        self._free = free or (lambda view: None)
        self._leased = 0
        self._num_reading = 0
        self._peak = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def limit_bytes(self) -> int:
        return self._limit

    @limit_bytes.setter
    def limit_bytes(self, value: int) -> None:
        self._limit = value
        self._admit()

    def statistics(self) -> BudgetStatistics:
        return BudgetStatistics(
            leased_bytes=self._leased,
            limit_bytes=self._limit,
            peak_bytes=self._peak,
            num_waiting=len(self._waiters),
        )

    def would_wait(self, nbytes: int) -> bool:
        """Whether ``lease(nbytes)`` would have to wait now."""
        return bool(self._waiters) or not self._fits(nbytes)

    async def lease(self, nbytes: int, *, is_reading: bool = False) -> Lease:
        """Waits for its turn and for ``nbytes``, and allocates them.

        Args:
            is_reading: Waits for no save; see the module's docstring.
        Cancellation: nothing stays leased.
        """
        waiter = _Waiter(nbytes, is_reading)
        self._waiters.append(waiter)
        self._admit()
        try:
            if not waiter.event.is_set():
                await waiter.event.wait()
            view = self._allocate(nbytes)
        except BaseException:
            if waiter.event.is_set():
                self._give_back(nbytes, is_reading)
            else:
                self._waiters.remove(waiter)
                self._admit()
            raise
        return Lease(self, nbytes, view, is_reading=is_reading)

    def _fits(self, nbytes: int) -> bool:
        return self._leased + nbytes <= self._limit or self._leased == 0

    def _give_back(self, nbytes: int, is_reading: bool) -> None:
        self._leased -= nbytes
        self._num_reading -= is_reading
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].nbytes):
            self._take(self._waiters.popleft())
        if self._num_reading == 0:
            reader = next((waiter for waiter in self._waiters if waiter.is_reading), None)
            if reader is not None:
                self._waiters.remove(reader)
                self._take(reader)

    def _take(self, waiter: _Waiter) -> None:
        self._leased += waiter.nbytes
        self._num_reading += waiter.is_reading
        self._peak = max(self._peak, self._leased)
        waiter.event.set()
