"""What the saves and reads of a process share besides threads: memory, the pace, the uploader
process, and the record of their attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from actorsnap.actors.budget import Budget
from actorsnap.actors.pace import Pace
from actorsnap.runtime.arena import Arena
from actorsnap.runtime.attempts import Attempts
from actorsnap.runtime.commit_order import CommitOrder
from actorsnap.runtime.limits import default_budget_bytes

if TYPE_CHECKING:
    from actorsnap.runtime.uploader_client import Uploader

__all__ = ["Resources"]


class Resources:
    """See ``Host.resources``. On the runtime's loop only, unless a member says otherwise.

    Args:
        call_on_loop: See ``Host.call_on_loop``.

    Attributes:
        uploader: See ``uploader_client.find_uploader``.
    """

    def __init__(self, call_on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._call_on_loop = call_on_loop
        limit = default_budget_bytes()
        self.arena = Arena(limit)
        self.budget = Budget(
            limit, allocate=self.arena.allocate, free=self.arena.free, pin=self.arena.pin
        )
        self.pace = Pace()
        self.commit_order = CommitOrder()
        self.attempts = Attempts()
        self.uploader: Uploader | None = None

    def set_budget(self, limit_bytes: int | None) -> None:
        """Changes the memory budget, from any thread; None keeps it."""
        if limit_bytes is None:
            return

        def change() -> None:
            if limit_bytes != self.budget.limit_bytes:
                self.arena.limit_bytes = limit_bytes
                self.arena.trim()
                self.budget.limit_bytes = limit_bytes

        self._call_on_loop(change)

    def set_duty(self, duty: float) -> None:
        """Sets the share of time in which saves are stored, here and in the uploader process."""
        self.pace.set(duty)
        if self.uploader is not None:
            self.uploader.set_duty(duty)
