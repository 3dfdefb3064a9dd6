# SPDX-License-Identifier: Apache-2.0
"""Both facades behind one: a test is written once and runs through ``await`` and blocking.

``api.run`` takes what a call of ``api.Snapshot`` returned: a coroutine of the async facade runs
in an event loop of its own, a value of the blocking one is passed through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

import actorsnap
import actorsnap.sync

__all__ = ["Facade", "each_facade", "each_place"]


class Facade:
    """Calls through one of the facades. ``Snapshot`` is its class."""

    def __init__(self, name: str, snapshot: Any) -> None:
        self.name = name
        self.Snapshot = snapshot

    def run(self, outcome: Any) -> Any:
        """The result of a call."""
        if self.name == "sync":
            return outcome

        async def wait() -> Any:
            return await outcome

        return anyio.run(wait)

    def all(self, items: AsyncIterator[Any] | Iterator[Any]) -> list[Any]:
        """All items of an iterator that a call returned."""
        if isinstance(items, Iterator):
            return list(items)

        async def collect() -> list[Any]:
            return [item async for item in items]

        return list(anyio.run(collect))


FACADES = (
    Facade("async", actorsnap.Snapshot),
    Facade("sync", actorsnap.sync.Snapshot),
)

each_facade = pytest.mark.parametrize("api", FACADES, ids=[facade.name for facade in FACADES])
each_place = pytest.mark.parametrize("scheme", ["fs", "memory"])
