"""The deciding side of a save, as a table.

One machine per attempt. Events go in by ``handle``, commands come out; whoever holds the
machine performs them and reports how they ended. It must not know storage, clocks or
transports: the deadline is an event, the commit is a command with two endings.

Rules:

1. Nothing is assigned before every rank has joined with the same release.
2. ``WriteCommit`` is given once, after every rank reported ``Stored``; never after a
   failure, a cancellation or the deadline.
3. Once it is given, the outcome is the commit's ending, whatever else arrives. A cancellation
   or the deadline only ends the waiting for it (``StopCommit``).
4. Every path ends in COMMITTED or ABORTED, and every rank is told the same.

An event that the table does not have for the state is a ``ProtocolViolation``, except in
the two final states, where late events are harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.format.manifest import ManifestRecord
from actorsnap.planning.save import plan_save
from actorsnap.protocol.messages import (
    Aborted,
    Assign,
    Committed,
    Failed,
    Failure,
    FromCoordinator,
    Join,
    Stage,
    Staged,
    Stored,
    ToCoordinator,
)

__all__ = [
    "CommitFailed",
    "CommitWritten",
    "CoordinatorCommand",
    "CoordinatorEvent",
    "CoordinatorMachine",
    "CoordinatorState",
    "DeadlinePassed",
    "ProtocolViolation",
    "SendToRank",
    "StopCommit",
    "WriteCommit",
]


class ProtocolViolation(AssertionError):
    """An event that cannot happen in this state: a defect, never an operating condition."""


class CoordinatorState(StrEnum):
    JOINING = "joining"
    STORING = "storing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class DeadlinePassed(msgspec.Struct, frozen=True):
    """The time that the caller allowed is over; ``timeout_s`` is for the message."""

    timeout_s: float


class CommitWritten(msgspec.Struct, frozen=True):
    """``WriteCommit`` succeeded."""


class CommitFailed(msgspec.Struct, frozen=True):
    """``WriteCommit`` failed, or was stopped without an answer. Nothing was committed by it,
    unless ``failure.may_be_visible``."""

    failure: Failure


class SendToRank(msgspec.Struct, frozen=True):
    """Send ``message`` to ``rank``."""

    rank: int
    message: FromCoordinator


class WriteCommit(msgspec.Struct, frozen=True):
    """Create the commit object that names these manifests, in rank order."""

    manifests: tuple[ManifestRecord, ...]


class StopCommit(msgspec.Struct, frozen=True):
    """Wait no longer for ``WriteCommit``, which still reports its ending.

    Attributes:
        reason: For people.
        has_grace: The commit may still take a moment: it is likely about to succeed.
    """

    reason: str
    has_grace: bool


CoordinatorEvent: TypeAlias = ToCoordinator | DeadlinePassed | CommitWritten | CommitFailed
CoordinatorCommand: TypeAlias = SendToRank | WriteCommit | StopCommit

_S = CoordinatorState


class CoordinatorMachine:
    """Decides over one attempt.

    Args:
        attempt: Its name.
        world_size: Ranks that take part.
        release: This release; every rank must be of the same.
    """

    def __init__(self, *, attempt: str, world_size: int, release: str) -> None:
        self.attempt = attempt
        self.world_size = world_size
        self.release = release
        self.state = _S.JOINING
        self.failure: Failure | None = None
        self._joined: dict[int, Join] = {}
        self._staged: set[int] = set()
        self._stored: dict[int, ManifestRecord] = {}

    @property
    def is_final(self) -> bool:
        return self.state in (_S.COMMITTED, _S.ABORTED)

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """Takes one event, returns what is to be done.

        Raises:
            ProtocolViolation: the table has no such transition.
        """
        if self.is_final or self._is_stale(event):
            return []
        rule = _TABLE.get((self.state, type(event)))
        if rule is None:
            raise ProtocolViolation(f"{type(event).__name__} while {self.state}")
        commands = rule(self, event)
        self.validate()
        return commands

    def validate(self) -> None:
        """Asserts the invariants; called after each step, cheap."""
        assert (self.failure is not None) == (self.state is _S.ABORTED)
        if self.state is not _S.JOINING and self.state is not _S.ABORTED:
            assert len(self._joined) == self.world_size
        if self.state in (_S.COMMITTING, _S.COMMITTED):
            assert len(self._stored) == self.world_size

    def _is_stale(self, event: CoordinatorEvent) -> bool:
        if isinstance(event, Staged | Stored):
            return event.attempt != self.attempt
        if isinstance(event, Failed):
            return event.attempt not in (None, self.attempt)
        return False

    def _missing(self, present: dict[int, object]) -> str:
        absent = [str(rank) for rank in range(self.world_size) if rank not in present]
        return ", ".join(absent[:16]) + (" ..." if len(absent) > 16 else "")

    def _on_join(self, event: Join) -> list[CoordinatorCommand]:
        if event.release != self.release:
            return self._abort(
                Failure(
                    reason=f"rank {event.rank} runs actorsnap {event.release}, the coordinator "
                    f"{self.release}; install the same release on all ranks",
                    stage=Stage.JOIN,
                    rank=event.rank,
                )
            )
        self._joined.setdefault(event.rank, event)
        if len(self._joined) < self.world_size:
            return []
        self.state = _S.STORING
        skips = plan_save([self._joined[rank].inventory for rank in range(self.world_size)])
        return [
            SendToRank(rank, Assign(attempt=self.attempt, skip=skip))
            for rank, skip in enumerate(skips)
        ]

    def _on_repeated_join(self, event: Join) -> list[CoordinatorCommand]:
        return []

    def _on_staged(self, event: Staged) -> list[CoordinatorCommand]:
        self._staged.add(event.rank)
        return []

    def _on_stored(self, event: Stored) -> list[CoordinatorCommand]:
        self._stored[event.rank] = event.manifest
        if len(self._stored) < self.world_size:
            return []
        self.state = _S.COMMITTING
        return [WriteCommit(tuple(self._stored[rank] for rank in range(self.world_size)))]

    def _on_failed(self, event: Failed) -> list[CoordinatorCommand]:
        return self._abort(event.failure)

    def _on_deadline(self, event: DeadlinePassed) -> list[CoordinatorCommand]:
        if self.state is _S.JOINING:
            waiting, stage = self._missing(dict(self._joined)), Stage.JOIN
        else:
            waiting, stage = self._missing(dict(self._stored)), Stage.STORE
        return self._abort(
            Failure(
                reason=f"timeout_s={event.timeout_s:g} is over; still waiting for rank(s) "
                f"{waiting}. Raise Options.timeout_s if the storage is that slow",
                stage=stage,
                rank=int(waiting) if waiting.isdigit() else None,
            )
        )

    def _on_late_failure(self, event: Failed) -> list[CoordinatorCommand]:
        return [StopCommit(event.failure.reason, has_grace=True)]

    def _on_late_deadline(self, event: DeadlinePassed) -> list[CoordinatorCommand]:
        return [StopCommit(f"timeout_s={event.timeout_s:g} is over", has_grace=False)]

    def _too_late(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        return []

    def _on_commit_written(self, event: CommitWritten) -> list[CoordinatorCommand]:
        self.state = _S.COMMITTED
        return self._tell_all(Committed(attempt=self.attempt))

    def _on_commit_failed(self, event: CommitFailed) -> list[CoordinatorCommand]:
        return self._abort(event.failure)

    def _abort(self, failure: Failure) -> list[CoordinatorCommand]:
        self.state = _S.ABORTED
        self.failure = failure
        return self._tell_all(Aborted(attempt=self.attempt, failure=failure))

    def _tell_all(self, message: FromCoordinator) -> list[CoordinatorCommand]:
        return [SendToRank(rank, message) for rank in range(self.world_size)]


_M = CoordinatorMachine
_TABLE: dict[tuple[CoordinatorState, type], Callable[..., list[CoordinatorCommand]]] = {
    (_S.JOINING, Join): _M._on_join,
    (_S.JOINING, Failed): _M._on_failed,
    (_S.JOINING, DeadlinePassed): _M._on_deadline,
    (_S.STORING, Join): _M._on_repeated_join,
    (_S.STORING, Staged): _M._on_staged,
    (_S.STORING, Stored): _M._on_stored,
    (_S.STORING, Failed): _M._on_failed,
    (_S.STORING, DeadlinePassed): _M._on_deadline,
    (_S.COMMITTING, Join): _M._too_late,
    (_S.COMMITTING, Staged): _M._too_late,
    (_S.COMMITTING, Stored): _M._too_late,
    (_S.COMMITTING, Failed): _M._on_late_failure,
    (_S.COMMITTING, DeadlinePassed): _M._on_late_deadline,
    (_S.COMMITTING, CommitWritten): _M._on_commit_written,
    (_S.COMMITTING, CommitFailed): _M._on_commit_failed,
}
