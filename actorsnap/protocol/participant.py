"""One rank's side of a save, as a table.

Same style as ``coordinator.py``: events in, commands out. The machine counts what is stored
and decides what comes next; it sees numbers of chunks and objects, never buffers.

Rules:

1. The manifest is written only when staging has ended and every object is complete.
2. ``Send(Stored)`` follows the manifest; nothing else does.
3. After the first failure or a cancellation no more work is begun (``StopWork``), and the
   rank waits for the coordinator's verdict. It may still be ``Committed``: a cancellation
   can lose the race.
4. ``Finish`` is given exactly once; with ``Aborted``, ``DiscardObjects`` comes before it,
   unless a commit object that names the objects may be visible.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.format.manifest import ManifestRecord
from actorsnap.planning.packing import Item
from actorsnap.protocol.coordinator import ProtocolViolation
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
    "AnnounceStaged",
    "Begun",
    "CancelRequested",
    "ChunkStored",
    "CompleteObject",
    "DiscardObjects",
    "Finish",
    "ManifestStored",
    "ObjectCompleted",
    "ParticipantCommand",
    "ParticipantEvent",
    "ParticipantMachine",
    "ParticipantState",
    "Planned",
    "Send",
    "StagingEnded",
    "StartStoring",
    "StepFailed",
    "StopWork",
    "StoreManifest",
]


class ParticipantState(StrEnum):
    NEW = "new"
    JOINING = "joining"
    PLANNING = "planning"
    STORING = "storing"
    PUBLISHING = "publishing"
    REPORTED = "reported"
    FAILED = "failed"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Begun(msgspec.Struct, frozen=True):
    """The rank's state is captured; this is what it holds."""

    inventory: tuple[Item, ...]


class Planned(msgspec.Struct, frozen=True):
    """``StartStoring`` has packed the objects: the number of chunks of each."""

    num_chunks: tuple[int, ...]


class StagingEnded(msgspec.Struct, frozen=True):
    """Every chunk is staged: the trainer may overwrite its tensors."""


class ChunkStored(msgspec.Struct, frozen=True):
    """One more chunk of object number ``object`` is written."""

    object: int


class ObjectCompleted(msgspec.Struct, frozen=True):
    """``CompleteObject`` succeeded."""

    object: int


class ManifestStored(msgspec.Struct, frozen=True):
    """``StoreManifest`` succeeded."""

    record: ManifestRecord


class StepFailed(msgspec.Struct, frozen=True):
    """Any command's work failed."""

    failure: Failure


class CancelRequested(msgspec.Struct, frozen=True):
    """The caller wants no snapshot any more."""

    reason: str


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to the coordinator."""

    message: ToCoordinator


class StartStoring(msgspec.Struct, frozen=True):
    """Pack all items but ``skip`` into objects, then stage and store them."""

    attempt: str
    skip: tuple[int, ...]


class AnnounceStaged(msgspec.Struct, frozen=True):
    """Tell the caller that it may overwrite its tensors."""


class CompleteObject(msgspec.Struct, frozen=True):
    """Make the object durable."""

    object: int


class StoreManifest(msgspec.Struct, frozen=True):
    """Write the rank manifest, durable."""


class StopWork(msgspec.Struct, frozen=True):
    """Begin no more work, wait a while for what is in flight."""


class DiscardObjects(msgspec.Struct, frozen=True):
    """Delete what this rank wrote. Failing to is harmless: it is garbage."""


class Finish(msgspec.Struct, frozen=True):
    """The end: committed, or aborted with a failure."""

    failure: Failure | None


ParticipantEvent: TypeAlias = (
    FromCoordinator
    | Begun
    | Planned
    | StagingEnded
    | ChunkStored
    | ObjectCompleted
    | ManifestStored
    | StepFailed
    | CancelRequested
)
ParticipantCommand: TypeAlias = (
    Send
    | StartStoring
    | AnnounceStaged
    | CompleteObject
    | StoreManifest
    | StopWork
    | DiscardObjects
    | Finish
)

_S = ParticipantState


class ParticipantMachine:
    """One rank in one attempt.

    Args:
        rank: This rank.
        release: This release, sent on joining.
    """

    def __init__(self, *, rank: int, release: str) -> None:
        self.rank = rank
        self.release = release
        self.state = _S.NEW
        self.attempt: str | None = None
        self._is_staged = False
        self._pending_chunks: list[int] = []
        self._open_objects = 0

    @property
    def is_final(self) -> bool:
        return self.state in (_S.COMMITTED, _S.ABORTED)

    def handle(self, event: ParticipantEvent) -> list[ParticipantCommand]:
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
        assert self._open_objects >= 0
        if self.state in (_S.PUBLISHING, _S.REPORTED, _S.COMMITTED):
            assert self._is_staged
            assert self._open_objects == 0

    def _is_stale(self, event: ParticipantEvent) -> bool:
        if isinstance(event, Committed | Aborted) and self.attempt is not None:
            return event.attempt != self.attempt
        return False

    def _on_begun(self, event: Begun) -> list[ParticipantCommand]:
        self.state = _S.JOINING
        return [Send(Join(rank=self.rank, release=self.release, inventory=event.inventory))]

    def _on_assign(self, event: Assign) -> list[ParticipantCommand]:
        self.state = _S.PLANNING
        self.attempt = event.attempt
        return [StartStoring(event.attempt, event.skip)]

    def _on_planned(self, event: Planned) -> list[ParticipantCommand]:
        self.state = _S.STORING
        self._pending_chunks = list(event.num_chunks)
        self._open_objects = len(event.num_chunks)
        return self._publish_if_complete()

    def _on_staging_ended(self, event: StagingEnded) -> list[ParticipantCommand]:
        assert self.attempt is not None
        self._is_staged = True
        return [
            AnnounceStaged(),
            Send(Staged(attempt=self.attempt, rank=self.rank)),
            *self._publish_if_complete(),
        ]

    def _on_chunk_stored(self, event: ChunkStored) -> list[ParticipantCommand]:
        self._pending_chunks[event.object] -= 1
        if self._pending_chunks[event.object] < 0:
            raise ProtocolViolation(f"object {event.object} has fewer chunks")
        return [CompleteObject(event.object)] if not self._pending_chunks[event.object] else []

    def _on_object_completed(self, event: ObjectCompleted) -> list[ParticipantCommand]:
        self._open_objects -= 1
        return self._publish_if_complete()

    def _publish_if_complete(self) -> list[ParticipantCommand]:
        if not self._is_staged or self._open_objects:
            return []
        self.state = _S.PUBLISHING
        return [StoreManifest()]

    def _on_manifest_stored(self, event: ManifestStored) -> list[ParticipantCommand]:
        assert self.attempt is not None
        self.state = _S.REPORTED
        return [Send(Stored(attempt=self.attempt, rank=self.rank, manifest=event.record))]

    def _on_step_failed(self, event: StepFailed) -> list[ParticipantCommand]:
        return self._fail(event.failure)

    def _on_cancel(self, event: CancelRequested) -> list[ParticipantCommand]:
        return self._fail(Failure(reason=event.reason, stage=Stage.CANCEL, rank=self.rank))

    def _fail(self, failure: Failure) -> list[ParticipantCommand]:
        self.state = _S.FAILED
        return [
            StopWork(),
            Send(Failed(attempt=self.attempt, rank=self.rank, failure=failure)),
        ]

    def _ignore(self, event: ParticipantEvent) -> list[ParticipantCommand]:
        return []

    def _on_late_assign(self, event: Assign) -> list[ParticipantCommand]:
        self.attempt = event.attempt
        return []

    def _on_committed(self, event: Committed) -> list[ParticipantCommand]:
        self.state = _S.COMMITTED
        return [Finish(None)]

    def _on_aborted(self, event: Aborted) -> list[ParticipantCommand]:
        self.state = _S.ABORTED
        if event.failure.may_be_visible:
            return [StopWork(), Finish(event.failure)]
        return [StopWork(), DiscardObjects(), Finish(event.failure)]


_M = ParticipantMachine
_WORKING = (_S.PLANNING, _S.STORING, _S.PUBLISHING)
_PROGRESS = (Planned, StagingEnded, ChunkStored, ObjectCompleted, ManifestStored, StepFailed)
_TABLE: dict[tuple[ParticipantState, type], Callable[..., list[ParticipantCommand]]] = {
    (_S.NEW, Begun): _M._on_begun,
    (_S.JOINING, Assign): _M._on_assign,
    (_S.PLANNING, Planned): _M._on_planned,
    (_S.STORING, StagingEnded): _M._on_staging_ended,
    (_S.STORING, ChunkStored): _M._on_chunk_stored,
    (_S.STORING, ObjectCompleted): _M._on_object_completed,
    (_S.PUBLISHING, ManifestStored): _M._on_manifest_stored,
    (_S.REPORTED, Committed): _M._on_committed,
    (_S.FAILED, Assign): _M._on_late_assign,
    # A cancellation that came after Stored can lose against the commit.
    (_S.FAILED, Committed): _M._on_committed,
    **{(state, StepFailed): _M._on_step_failed for state in (_S.JOINING, *_WORKING)},
    **{
        (state, CancelRequested): _M._on_cancel
        for state in (_S.NEW, _S.JOINING, *_WORKING, _S.REPORTED)
    },
    **{
        (state, Aborted): _M._on_aborted
        for state in (_S.JOINING, *_WORKING, _S.REPORTED, _S.FAILED)
    },
    # What was in flight when the rank failed still ends.
    **{(_S.FAILED, event): _M._ignore for event in (*_PROGRESS, CancelRequested)},
}
