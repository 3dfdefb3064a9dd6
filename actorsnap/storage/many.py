"""Many small calls at once, of which none stops the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio

from actorsnap.errors import ActorSnapError

__all__ = ["for_each"]

T = TypeVar("T")


async def for_each(do: Callable[[T], Awaitable[None]], items: Iterable[T], *, at_once: int) -> None:
    """Calls ``do`` with each item, ``at_once`` at a time.

    Cancellation: some are done.

    Raises:
        ActorSnapError: the first that a call raised; all items were tried.
    """
    waiting = iter(items)
    failures: list[ActorSnapError] = []

    async def work() -> None:
        for item in waiting:
            try:
                await do(item)
            except ActorSnapError as error:
                failures.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(work)
    if failures:
        raise failures[0]
