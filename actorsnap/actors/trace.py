"""What a save reports while it runs: one board of counters, readable from any thread.

The board holds only the latest state: a slow reader skips states, it never holds up a save
and nothing queues for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import StrEnum

import msgspec

__all__ = ["Phase", "Progress", "ProgressBoard"]

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """How far a save is."""

    STAGING = "staging"
    STORING = "storing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A state of a save on this rank. Counters are bytes and never fall.

    Attributes:
        phase: ``staging`` until the trainer may overwrite its tensors, then ``storing``;
            ``committed`` or ``aborted`` come last.
        total_bytes: What this rank stores, headers included; 0 until it is planned.
        staged_bytes, hashed_bytes, stored_bytes: Done so far.
    """

    phase: Phase = Phase.STAGING
    total_bytes: int = 0
    staged_bytes: int = 0
    hashed_bytes: int = 0
    stored_bytes: int = 0

    @property
    def is_last(self) -> bool:
        return self.phase in (Phase.COMMITTED, Phase.ABORTED)


class ProgressBoard:
    """The latest ``Progress`` of one save.

    Args:
        label: Stands in every log line: snapshot, attempt and rank.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._lock = threading.Lock()
        self._latest = Progress()
        self._listeners: list[Callable[[], None]] = []

    @property
    def latest(self) -> Progress:
        return self._latest

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls ``listener`` after each change, on the runtime's thread; it must not block.
        Returns what ends the subscription."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def plan(self, total_bytes: int) -> None:
        """Sets what there is to do."""
        self._change(total_bytes=total_bytes)

    def add(self, *, staged: int = 0, hashed: int = 0, stored: int = 0) -> None:
        """Counts bytes."""
        now = self._latest
        self._change(
            staged_bytes=now.staged_bytes + staged,
            hashed_bytes=now.hashed_bytes + hashed,
            stored_bytes=now.stored_bytes + stored,
        )

    def enter(self, phase: Phase) -> None:
        """Moves on to ``phase``; the last one stays."""
        if not self._latest.is_last:
            logger.debug("%s: %s", self.label, phase)
            self._change(phase=phase)

    def _change(self, **fields: object) -> None:
        with self._lock:
            self._latest = msgspec.structs.replace(self._latest, **fields)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()
