# SPDX-License-Identifier: Apache-2.0
"""Records what a manager has done, for ``CheckpointManager.events``.

A board keeps the latest events for any number of iterators. An iterator begins with the oldest one
that is kept; one that is too slow misses the oldest ones, and gets their number.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

_MAX_KEPT = 1000


class EventKind(StrEnum):
    """Kinds of ``ManagerEvent``."""

    DECIDED = "decided"
    """A save begins; the detail is the reason."""
    STAGED = "staged"
    """The trainer may go on."""
    COMMITTED = "committed"
    VERIFIED = "verified"
    """The committed snapshot is intact. Rank 0 only, like the events about deletions and drains."""
    FAILED = "failed"
    """A save failed, or its snapshot is damaged."""
    PRUNED = "pruned"
    DELETE_FAILED = "delete_failed"
    DRAINED = "drained"
    """Copied from the tier to the root."""
    DRAIN_FAILED = "drain_failed"
    FENCED = "fenced"
    """Another manager has begun a run at the root."""
    NOTICE = "notice"
    """The job will end soon. On the rank that got the notice, and on rank 0."""
    AGREED = "agreed"
    """The ranks agreed on a call; the detail has its number and the reason."""
    NOT_AGREED = "not_agreed"
    """The ranks did not agree, and training continues. Rank 0 will ask again, unless a rank has
    closed the manager."""
    UNSERVED = "unserved"
    """The manager was closed before a save that was asked for; the detail is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerEvent:
    """An action of a manager.

    Attributes:
        kind: An ``EventKind``, which is a str.
        step: Step of the snapshot, if the event concerns one.
        time_s: Seconds since 1970.
        num_missed: Number of events that the iterator missed right before this one.
    """

    kind: EventKind
    step: int | None
    detail: str
    time_s: float
    num_missed: int = 0


class EventBoard:
    """The latest events. Thread-safe; ``post`` never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[ManagerEvent] = deque(maxlen=_MAX_KEPT)
        self._num_posted = 0
        self._is_closed = False
        self._wakers: list[Callable[[], None]] = []

    def post(self, kind: EventKind, step: int | None = None, detail: str = "") -> None:
        """Adds an event. Do not call it from a signal handler."""
        event = ManagerEvent(kind=kind, step=step, detail=detail, time_s=time.time())
        with self._lock:
            self._kept.append(event)
            self._num_posted += 1
            wakers = [*self._wakers]
        for wake in wakers:
            wake()

    def close(self) -> None:
        """Ends the iterators, after the events that are kept."""
        with self._lock:
            self._is_closed = True
            wakers = [*self._wakers]
        for wake in wakers:
            wake()

    def next_after(self, num_read: int) -> ManagerEvent | None:
        """Returns the event after the first ``num_read``, or the oldest one kept."""
        with self._lock:
            num_gone = self._num_posted - len(self._kept)
            index = max(0, num_read - num_gone)
            if index == len(self._kept):
                return None
            return replace(self._kept[index], num_missed=max(0, num_gone - num_read))

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls ``wake`` from any thread after each change. Returns a function that ends that."""
        with self._lock:
            self._wakers.append(wake)
        return lambda: self._wakers.remove(wake)


class EventReader:
    """Reads each event of a board once (``runtime.script.follow_async``)."""

    def __init__(self, board: EventBoard) -> None:
        self._board = board
        self._num_read = 0
        self.is_over = False

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        return self._board.subscribe(wake)

    def read(self) -> ManagerEvent | None:
        is_closed = self._board.is_closed
        event = self._board.next_after(self._num_read)
        if event is not None:
            self._num_read += 1 + event.num_missed
        self.is_over = event is None and is_closed
        return event
