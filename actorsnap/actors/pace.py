"""The pace of the uploaders: performs what ``protocol.pacing`` decides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from actorsnap.protocol.pacing import Bursts

__all__ = ["Pace"]


class Pace:
    """One for all uploaders of a process. Used on one event loop only."""

    def __init__(self) -> None:
        self._bursts = Bursts()
        self._changed = anyio.Event()

    @property
    def duty(self) -> float:
        """From 0, a rest until it is changed, to 1, all of the time."""
        return self._bursts.duty

    def set(self, duty: float) -> None:
        """Changes the duty, also for those that rest now."""
        self._bursts.set(duty)
        self._wake()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[bool]:
        """Waits until it may be worked; what is done inside is a piece of work.

        Yields:
            Whether there was a rest.
        Cancellation: nothing is left behind.
        """
        has_rested = False
        while (rest_s := self._bursts.rest_s(anyio.current_time())) > 0.0:
            with anyio.move_on_after(rest_s):
                await self._changed.wait()
            has_rested = True
        self._bursts.begin(anyio.current_time())
        try:
            yield has_rested
        finally:
            if self._bursts.end(anyio.current_time()):
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
