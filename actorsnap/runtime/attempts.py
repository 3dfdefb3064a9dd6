"""Attempts of this process, and of the other one of trainer and uploader process.

A name is unique on its host while its process runs. On the runtime's loop only, except ``new``.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from actorsnap.format.layout import Attempt
from actorsnap.runtime.process import host_id, is_running

__all__ = ["Attempts"]

T = TypeVar("T")

_MAX_ENDED = 64
"""Maximum number of ended attempts to remember."""


class Attempts:
    """Running, ended and discarded attempts.

    Attributes:
        on_end: Called with the name of each attempt of this process that ends.
    """

    def __init__(self) -> None:
        self._running: set[Attempt] = set()
        # Dicts as ordered sets, the oldest first.
        self._ended: dict[str, None] = {}
        self._ended_elsewhere: dict[str, None] = {}
        self._discarded: dict[tuple[str, str], None] = {}
        self.on_end: Callable[[str], None] = lambda _: None

    def new(self) -> Attempt:
        """Returns a unique name. The attempt counts as running until ``end``."""
        attempt = Attempt(
            created_s=int(time.time()),
            host=host_id(),
            pid=os.getpid(),
            nonce=secrets.token_hex(4),
        )
        self._running.add(attempt)
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Records that the attempt has committed or can no longer commit."""
        if attempt in self._running:
            self._running.remove(attempt)
            _remember(self._ended, str(attempt))
            self.on_end(str(attempt))

    def note_ended(self, attempts: Iterable[str]) -> None:
        """Records ended attempts of the other process."""
        for attempt in attempts:
            _remember(self._ended_elsewhere, attempt)

    def latest_ended(self) -> list[str]:
        """Returns the latest ended attempts of this process."""
        return list(self._ended)

    def all_ended(self) -> frozenset[str]:
        """Returns the latest ended attempts of both processes."""
        return frozenset([*self._ended, *self._ended_elsewhere])

    def is_running(self, attempt: Attempt) -> bool:
        """Returns whether the attempt runs in this process."""
        return attempt in self._running

    def may_run(self, attempt: Attempt) -> bool:
        """Returns whether an attempt of this machine and process namespace may be running.

        Attempts with this process' id are known if they began here. All others are older: the
        system has reused the id.
        """
        if attempt.pid == os.getpid():
            return attempt in self._running
        return str(attempt) not in self._ended_elsewhere and is_running(attempt.pid)

    def discard(self, url: str, attempt: str) -> None:
        """Records that this process aborted the attempt or deletes its snapshot.

        Args:
            url: The storage. An attempt of the same name at another URL is a copy and is kept.
        """
        _remember(self._discarded, (url, attempt))

    def forget_discarded(self, url: str, attempt: str) -> None:
        """Records that the attempt is deleted; one of its name is now a copy."""
        self._discarded.pop((url, attempt), None)

    def discarded(self, url: str) -> frozenset[str]:
        """Returns the latest attempts at ``url`` that are not needed."""
        return frozenset(attempt for place, attempt in self._discarded if place == url)


def _remember(attempts: dict[T, None], attempt: T) -> None:
    attempts[attempt] = None
    if len(attempts) > _MAX_ENDED:
        del attempts[next(iter(attempts))]
