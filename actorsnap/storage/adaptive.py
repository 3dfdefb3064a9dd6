"""How many operations a storage is given at a time, learnt from its answers.

Theory of operation: additive increase, multiplicative decrease, as in TCP. Every operation that
succeeds while all turns are taken adds a fraction, about one turn per round of them. One that is
throttled halves the level, but only if it began after the level last fell: those that were under
way then are answers to the old level. So the level falls once per round trip at most, never below
one, and comes back by itself.

It must not know backends, nor when or whether an operation is tried again (``RetryStorage``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from actorsnap.errors import Throttled, UsageError
from actorsnap.lines import Lines
from actorsnap.storage.base import Storage
from actorsnap.storage.wrappers import TurnsStorage

__all__ = ["AdaptiveStatistics", "AdaptiveStorage"]

logger = Lines(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveStatistics:
    """What an ``AdaptiveStorage`` does.

    Attributes:
        level: Operations allowed at a time now.
        num_running, num_waiting: Operations.
        num_throttled: Operations that the storage has refused so far.
        num_decreases: How often the level fell for that.
    """

    level: int
    num_running: int
    num_waiting: int
    num_throttled: int
    num_decreases: int


class AdaptiveStorage(TurnsStorage):
    """As many operations at a time as the storage bears; more wait their turn, in their order.

    Put it inside of ``RetryStorage``: what waits to be tried again takes no turn.

    Args:
        inner: What is wrapped.
        max_operations: The highest level.
        first_operations: The level at first, if that is not above the highest.
    """

    def __init__(self, inner: Storage, *, max_operations: int, first_operations: int = 8) -> None:
        if min(max_operations, first_operations) < 1:
            raise UsageError(
                "max_operations and first_operations must be 1 or more, "
                f"not {max_operations} and {first_operations}"
            )
        super().__init__(inner)
        self._max_level = max_operations
        self._level = float(min(first_operations, max_operations))
        self._limiter = anyio.CapacityLimiter(int(self._level))
        self._num_throttled = 0
        self._num_decreases = 0

    def statistics(self) -> AdaptiveStatistics:
        """How it stands now."""
        limiter = self._limiter.statistics()
        return AdaptiveStatistics(
            level=int(self._level),
            num_running=limiter.borrowed_tokens,
            num_waiting=limiter.tasks_waiting,
            num_throttled=self._num_throttled,
            num_decreases=self._num_decreases,
        )

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        # On behalf of the operation: a task that iterates `list` may call other verbs in between.
        operation = object()
        await self._limiter.acquire_on_behalf_of(operation)
        num_decreases = self._num_decreases
        try:
            yield
        except Throttled:
            self._num_throttled += 1
            if num_decreases == self._num_decreases:
                self._num_decreases += 1
                self._set_level(max(1.0, self._level / 2))
                logger.info("%s throttles: %d operations at a time", self.url, self._level)
            raise
        else:
            if self._limiter.available_tokens <= 0:
                self._set_level(min(self._level + 1 / self._level, self._max_level))
        finally:
            self._limiter.release_on_behalf_of(operation)

    def _set_level(self, level: float) -> None:
        self._level = level
        self._limiter.total_tokens = int(level)
