"""Orders the commits of this process to one path by their calls.

Otherwise a large save would replace a later, smaller one. Only for saves with ``overwrite``.
"""

from __future__ import annotations

import threading
from typing import Protocol

import anyio

__all__ = ["CommitOrder", "CommitTurn", "LocalTurn"]


class CommitTurn(Protocol):
    """The position of one save. On the runtime's loop only."""

    async def wait(self) -> bool:
        """Waits for the end of all earlier saves.

        Returns:
            Whether an earlier commit, unanswered by the storage, may still take effect; true for
            one save only.
        """
        ...

    def release(self, *, is_unanswered: bool = False) -> None:
        """Lets later saves commit. Idempotent."""
        ...


class CommitOrder:
    """The latest turn of each path. Thread-safe."""

    def __init__(self) -> None:
        self._last: dict[str, LocalTurn] = {}
        self._lock = threading.Lock()

    def join(self, path: str) -> LocalTurn:
        """Takes a turn; ``path`` is a normalised URL."""
        with self._lock:
            turn = self._last[path] = LocalTurn(self, path, self._last.get(path))
            return turn

    def _forget(self, turn: LocalTurn) -> None:
        with self._lock:
            if self._last.get(turn.path) is turn:
                del self._last[turn.path]


class LocalTurn:
    """See ``CommitTurn``."""

    def __init__(self, order: CommitOrder, path: str, before: LocalTurn | None) -> None:
        self.path = path
        self._order = order
        self._before = before
        self._is_unanswered: bool | None = None
        self._waiting: list[anyio.Event] = []

    async def wait(self) -> bool:
        is_unanswered = False
        while (before := self._before) is not None:
            if before._is_unanswered is None:
                ended = anyio.Event()
                before._waiting.append(ended)
                await ended.wait()
            # It may have ended before its turn.
            is_unanswered |= bool(before._is_unanswered)
            self._before = before._before
        return is_unanswered

    def release(self, *, is_unanswered: bool = False) -> None:
        if self._is_unanswered is None:
            self._is_unanswered = is_unanswered
            for ended in self._waiting:
                ended.set()
            if self._before is None and not is_unanswered:
                self._order._forget(self)
