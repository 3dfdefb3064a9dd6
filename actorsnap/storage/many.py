"""Concurrent awaits with a limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio
import anyio.lowlevel

from actorsnap.errors import ActorSnapError

__all__ = ["for_each", "try_each"]

T = TypeVar("T")


async def for_each(
    items: Iterable[T], perform: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Awaits ``perform`` for each item, started in order, ``at_once`` of them at a time.

    Raises:
        ExceptionGroup: errors of ``perform``; the others were cancelled.
        RuntimeError: some have not ended. A task group swallows a ``CancelledError`` even if nobody
            cancelled anything.
    """
    waiting = iter(items)
    num_begun = num_done = 0

    async def work() -> None:
        nonlocal num_begun, num_done
        for item in waiting:
            num_begun += 1
            await perform(item)
            num_done += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(work)
    if num_done != num_begun:
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise RuntimeError(f"{num_begun - num_done} operations ended without a result or an error")


async def try_each(
    items: Iterable[T], perform: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """``for_each``, where a failure does not stop the others; raises the first one."""
    failures: list[ActorSnapError] = []

    async def attempt(item: T) -> None:
        try:
            await perform(item)
        except ActorSnapError as error:
            failures.append(error)

    await for_each(items, attempt, at_once=at_once)
    if failures:
        raise failures[0]
