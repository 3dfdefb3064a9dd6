"""Several awaits at a time, and never more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio

__all__ = ["for_each"]

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
