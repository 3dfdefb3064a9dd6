# SPDX-License-Identifier: Apache-2.0
"""The workers that move bytes, as many at a time as ``planning.transfers`` decides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
from anyio.abc import TaskGroup

from actorsnap.planning.transfers import FIRST_AT_ONCE, Climb
from actorsnap.storage.base import Storage


class Crew:
    """Starts workers in ``tasks``; more, or fewer, as transfers go.

    Args:
        work: One worker: transfers until nothing is left, or it ``is_too_many``.
        most: Workers at a time. For a storage with blocking I/O it is up to ``FIRST_AT_ONCE``:
            worker threads are the limit there.
    """

    def __init__(
        self, tasks: TaskGroup, work: Callable[[Crew], Awaitable[None]], storage: Storage, most: int
    ) -> None:
        if storage.capabilities.has_blocking_io:
            most = min(most, FIRST_AT_ONCE)
        self._tasks = tasks
        self._work = work
        self._climb = Climb(first=FIRST_AT_ONCE, most=most)
        self._num_running = 0

    @property
    def at_once(self) -> int:
        return self._climb.at_once

    @property
    def is_too_many(self) -> bool:
        return self._num_running > self._climb.at_once

    def start(self) -> None:
        while self._num_running < self._climb.at_once:
            self._num_running += 1
            self._tasks.start_soon(self._run)

    async def _run(self) -> None:
        try:
            await self._work(self)
        finally:
            self._num_running -= 1

    @contextmanager
    def transfer(self, nbytes: int) -> Iterator[Callable[[], float]]:
        """Measures a transfer; yields a function that returns its seconds."""
        began, begin_s = self._climb.begin(), anyio.current_time()

        def seconds() -> float:
            return anyio.current_time() - begin_s

        yield seconds
        self._climb.end(began, nbytes, seconds())
        self.start()
