"""Paces the uploaders; ``protocol.pacing`` decides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from actorsnap.protocol.pacing import Bursts

__all__ = ["Pace"]


class Pace:
    def __init__(self) -> None:
        self._bursts = Bursts()
        self._changed = anyio.Event()

    @property
    def duty(self) -> float:
        """Share of the time in which uploaders work: 0 pauses them, 1 never does."""
        return self._bursts.duty

    def set(self, duty: float) -> None:
        self._bursts.set(duty)
        self._wake()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[bool]:
        """Waits for permission to work on its body; yields whether there was a rest."""
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
