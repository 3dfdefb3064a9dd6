# SPDX-License-Identifier: Apache-2.0
"""Shared by the saves and reads of a process: memory, pace, attempts and the order of commits."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio

from actorsnap.actors.budget import Budget
from actorsnap.actors.items import Pace
from actorsnap.format.layout import Attempt
from actorsnap.runtime.arena import Arena
from actorsnap.runtime.process import default_budget_bytes, host_id, is_running

if TYPE_CHECKING:
    from actorsnap.runtime.uploader_client import Uploader

T = TypeVar("T")

_MAX_ENDED = 128
"""Limit of remembered attempts."""


class Resources:
    """See ``Host.resources``. On the runtime's loop only, unless noted.

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
        """Sets the share of time for storing, here and in the uploader process."""
        self.pace.set(duty)
        if self.uploader is not None:
            self.uploader.set_duty(duty)


class Attempts:
    """Attempts of this process and its partner: trainer or uploader process.

    On the runtime's loop only, except ``new``.

    Attributes:
        on_end: Called with the name of each own attempt that ends.
    """

    def __init__(self) -> None:
        self._running: set[Attempt] = set()
        # Ordered sets, the oldest first.
        self._ended: dict[str, None] = {}
        self._discarded: dict[tuple[str, str], None] = {}
        self.on_end: Callable[[str], None] = lambda _: None

    def new(self) -> Attempt:
        """Returns a unique name, running until ``end``."""
        attempt = Attempt(
            created_s=int(time.time()),
            host=host_id(),
            pid=os.getpid(),
            nonce=secrets.token_hex(4),
        )
        self._running.add(attempt)
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Records that it has committed or can no longer commit."""
        if attempt in self._running:
            self._running.remove(attempt)
            _remember(self._ended, str(attempt))
            self.on_end(str(attempt))

    def note_ended(self, attempts: Iterable[str]) -> None:
        """Records the other process' ended attempts."""
        for attempt in attempts:
            _remember(self._ended, attempt)

    def ended(self) -> frozenset[str]:
        """Returns the latest of both processes."""
        return frozenset(self._ended)

    def is_running(self, attempt: Attempt) -> bool:
        return attempt in self._running

    def may_run(self, attempt: Attempt) -> bool:
        """Returns whether an attempt of this machine and process namespace may be running.

        With this process' id, those that did not begin here are older: the id was reused.
        """
        if attempt.pid == os.getpid():
            return attempt in self._running
        return str(attempt) not in self._ended and is_running(attempt.pid)

    def discard(self, url: str, attempt: str) -> None:
        """Records an attempt that this process aborted, or whose snapshot it deletes.

        Args:
            url: The storage. An attempt of the same name elsewhere is a copy and is kept.
        """
        _remember(self._discarded, (url, attempt))

    def forget_discarded(self, url: str, attempt: str) -> None:
        """Records that it is deleted: one of its name is now a copy."""
        self._discarded.pop((url, attempt), None)

    def discarded(self, url: str) -> frozenset[str]:
        """Returns the latest attempts at ``url`` that are not needed."""
        return frozenset(attempt for place, attempt in self._discarded if place == url)


def _remember(attempts: dict[T, None], attempt: T) -> None:
    attempts[attempt] = None
    if len(attempts) > _MAX_ENDED:
        del attempts[next(iter(attempts))]


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
