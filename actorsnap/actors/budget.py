"""A first-in-first-out byte budget, shared by all snapshots of a process.

anyio's limiters count tokens, not bytes; this counts bytes. It decides only who may go next:
strictly in order of asking, so that a large request is not starved by small ones. One that is
larger than the whole budget is admitted when nothing else is leased, or nothing would move.
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
    event: anyio.Event = field(default_factory=anyio.Event)


class Lease:
    """The right to ``nbytes`` of memory, and the memory itself. Release it once, or use it
    as a context manager; releasing twice is harmless.

    Attributes:
        on_release: Called once when the lease is released, if set.
    """

    __slots__ = ("_budget", "nbytes", "on_release", "view")

    def __init__(self, budget: Budget, nbytes: int, view: memoryview) -> None:
        self._budget: Budget | None = budget
        self.nbytes = nbytes
        self.view = view
        self.on_release: Callable[[], None] | None = None

    def release(self) -> None:
        """Gives the bytes back; ``view`` must not be used any more."""
        budget, self._budget = self._budget, None
        if budget is not None:
            view, self.view = self.view, memoryview(b"")
            budget._release(self.nbytes, view)
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

    async def lease(self, nbytes: int) -> Lease:
        """Waits for its turn and for ``nbytes``, and allocates them.

        Cancellation: nothing stays leased.
        """
        if self.would_wait(nbytes):
            waiter = _Waiter(nbytes)
            self._waiters.append(waiter)
            try:
                await waiter.event.wait()
            except BaseException:
                if waiter.event.is_set():
                    self._leased -= nbytes
                else:
                    self._waiters.remove(waiter)
                self._admit()
                raise
        else:
            self._take(nbytes)
        try:
            return Lease(self, nbytes, self._allocate(nbytes))
        except BaseException:
            self._leased -= nbytes
            self._admit()
            raise

    def _fits(self, nbytes: int) -> bool:
        return self._leased + nbytes <= self._limit or self._leased == 0

    def _take(self, nbytes: int) -> None:
        self._leased += nbytes
        self._peak = max(self._peak, self._leased)

    def _release(self, nbytes: int, view: memoryview) -> None:
        self._leased -= nbytes
        self._free(view)
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].nbytes):
            waiter = self._waiters.popleft()
            self._take(waiter.nbytes)
            waiter.event.set()
