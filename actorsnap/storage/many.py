"""Several awaits at a time, and never more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio

from actorsnap.errors import ActorSnapError

__all__ = ["for_each", "try_each"]

T = TypeVar("T")


async def for_each(
    items: Iterable[T], perform: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Awaits ``perform`` for each item, begun in their order.

    Raises:
        ExceptionGroup: what ``perform`` raised; the others were cancelled.
    """
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await perform(item)

    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(work)


async def try_each(
    items: Iterable[T], perform: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """``for_each``, of which none stops the others.

    Raises:
        ActorSnapError: the first that ``perform`` raised; all items were tried.
    """
    failures: list[ActorSnapError] = []

    async def attempt(item: T) -> None:
        try:
            await perform(item)
        except ActorSnapError as error:
            failures.append(error)

    await for_each(items, attempt, at_once=at_once)
    if failures:
        raise failures[0]
