"""One rank's side of a save, as a table.

The machine counts what is stored and decides what comes next; it sees numbers of chunks and
objects, never buffers.

Rules:

1. Objects that this rank opened for others as well are completed only when the coordinator
   says that all have written; ``Send(Written)`` follows when all chunks of shared objects
   are stored, and joined objects released.
2. The manifest is written only when staging has ended and every object is complete.
3. ``Send(Stored)`` follows the manifest; nothing else does.
4. After the first failure or a cancellation no more work is begun (``StopWork``), and the
   rank waits for the coordinator's verdict. It may still be ``Committed``: a cancellation
   can lose the race.
5. Without a coordinator the rank ends by itself. Before ``Stored`` nothing can have been
   committed; after it the storage is asked (``LookForCommit``), and nothing is deleted.
6. ``Finish`` is given exactly once; with ``Aborted``, ``DiscardObjects`` comes before it,
   unless a commit object that names the objects may be visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.format.manifest import SaveRecord
from actorsnap.planning.inventory import Inventory, Sharded, inventory_digest
from actorsnap.planning.packing import Item, PackingRules, RankPlan
from actorsnap.protocol.calls import (
    CoordinatorLost,
    Finish,
    Looked,
    LookForCommit,
    Send,
    StepFailed,
)
from actorsnap.protocol.machine import Machine, ProtocolViolation, Row, Table
from actorsnap.protocol.messages import (
    Aborted,
    AskInventory,
    AskItems,
    AskSharded,
    Assign,
    Committed,
    Complete,
    Failed,
    Failure,
    FromCoordinator,
    Items,
    Join,
    Meet,
    Offer,
    Opened,
    SaveInTrainers,
    ShardedTensors,
    Stage,
    Stored,
    Token,
    Tokens,
    Written,
)

__all__ = [
    "AnnounceStaged",
    "Begun",
    "CancelRequested",
    "ChunkStored",
    "CompleteObject",
    "DiscardObjects",
    "JoinObjects",
    "ManifestStored",
    "ObjectCompleted",
    "ObjectReleased",
    "ObjectWork",
    "ObjectsOpened",
    "ParticipantCommand",
    "ParticipantEvent",
    "ParticipantMachine",
    "ParticipantState",
    "Planned",
    "ReleaseObject",
    "StagingEnded",
    "StartStoring",
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
    LOOKING = "looking"
    FAILED = "failed"
    COMMITTED = "committed"
    ABORTED = "aborted"


# Events -------------------------------------------------------------------------------------


class Begun(msgspec.Struct, frozen=True):
    """The rank's state is captured; this is what it holds.

    Attributes:
        lists: The items of each scope, by digest.
        remembered: The plan of the save before, by its digest, or None.
        sharded: The tensors that it holds parts of.
    """

    inventory: Inventory
    lists: Mapping[bytes, tuple[Item, ...]]
    remembered: tuple[bytes, RankPlan] | None = None
    sharded: tuple[Sharded, ...] = ()


class ObjectWork(msgspec.Struct, frozen=True):
    """What this rank does for an object: so many chunks; opens (and completes) it or joins it;
    alone or with others."""

    num_chunks: int
    opens: bool = True
    is_shared: bool = False


class Planned(msgspec.Struct, frozen=True):
    """``StartStoring`` has packed the objects."""

    objects: tuple[ObjectWork, ...]


class ObjectsOpened(msgspec.Struct, frozen=True):
    """The objects that others join are open; one token each, in the order of the objects."""

    tokens: tuple[Token, ...]


class StagingEnded(msgspec.Struct, frozen=True):
    """Every chunk is staged: the trainer may overwrite its tensors."""


class ChunkStored(msgspec.Struct, frozen=True):
    """One more chunk of object number ``object`` is written."""

    object: int


class ObjectCompleted(msgspec.Struct, frozen=True):
    """``CompleteObject`` succeeded."""

    object: int


class ObjectReleased(msgspec.Struct, frozen=True):
    """``ReleaseObject`` succeeded."""

    object: int


class ManifestStored(msgspec.Struct, frozen=True):
    """``StoreManifest`` succeeded."""

    size: int
    crc32c: int


class CancelRequested(msgspec.Struct, frozen=True):
    """The caller wants no snapshot any more."""

    reason: str


# Commands -----------------------------------------------------------------------------------


class StartStoring(msgspec.Struct, frozen=True):
    """Pack what the plan says into objects, then stage and store."""

    attempt: str
    url: str
    fsync: bool
    rules: PackingRules
    plan: RankPlan
    digest: bytes
    save: SaveRecord
    resumed: tuple[str, ...]


class JoinObjects(msgspec.Struct, frozen=True):
    """Open these objects of others for writing."""

    tokens: tuple[Token, ...]


class AnnounceStaged(msgspec.Struct, frozen=True):
    """Tell the caller that it may overwrite its tensors."""


class CompleteObject(msgspec.Struct, frozen=True):
    """Make the object durable."""

    object: int


class ReleaseObject(msgspec.Struct, frozen=True):
    """Make what was written to an object of another rank as durable as a joiner can."""

    object: int


class StoreManifest(msgspec.Struct, frozen=True):
    """Write the rank manifest, durable."""


class StopWork(msgspec.Struct, frozen=True):
    """Begin no more work, wait a while for what is in flight."""


class DiscardObjects(msgspec.Struct, frozen=True):
    """Delete what this rank wrote. Failing to is harmless: it is garbage."""


ParticipantEvent: TypeAlias = (
    FromCoordinator
    | Begun
    | Planned
    | ObjectsOpened
    | StagingEnded
    | ChunkStored
    | ObjectCompleted
    | ObjectReleased
    | ManifestStored
    | StepFailed
    | CancelRequested
    | CoordinatorLost
    | Looked
)
ParticipantCommand: TypeAlias = (
    Send
    | StartStoring
    | JoinObjects
    | AnnounceStaged
    | CompleteObject
    | ReleaseObject
    | StoreManifest
    | LookForCommit
    | StopWork
    | DiscardObjects
    | Finish
)

_S = ParticipantState


class ParticipantMachine(Machine[ParticipantState, ParticipantEvent, ParticipantCommand]):
    """One rank in one attempt.

    Args:
        rank: This rank.
        release: This release, sent on joining.
    """

    def __init__(self, *, rank: int, release: str) -> None:
        super().__init__(_TABLE, _S.NEW)
        self.rank = rank
        self.release = release
        self._begun: Begun | None = None
        self._is_staged = False
        self._objects: tuple[ObjectWork, ...] = ()
        self._pending_chunks: list[int] = []
        # Objects that are neither complete nor released.
        self._open_objects = 0
        # Of these, the shared ones that chunks or a release are missing of.
        self._unwritten = 0
        self._may_complete = False
        # By key: tokens may come twice, and before this rank has planned.
        self._tokens: dict[str, Token] = {}
        self._has_reported = False
        self._lost: CoordinatorLost | None = None

    def validate(self) -> None:
        assert 0 <= self._unwritten <= self._open_objects
        if self.state in (_S.PUBLISHING, _S.REPORTED, _S.LOOKING, _S.COMMITTED):
            assert self._is_staged
            assert self._open_objects == 0

    # Joining

    def _on_begun(self, event: Begun) -> list[ParticipantCommand]:
        self.state = _S.JOINING
        self._begun = event
        remembered = event.remembered[0] if event.remembered else b""
        structure = inventory_digest(event.inventory)
        return [Send(Join(self.rank, self.release, structure, remembered))]

    def _on_ask_inventory(self, event: AskInventory) -> list[ParticipantCommand]:
        assert self._begun is not None
        return [Send(Offer(self.rank, self._begun.inventory))]

    def _on_ask_items(self, event: AskItems) -> list[ParticipantCommand]:
        assert self._begun is not None
        lists = self._begun.lists
        return [Send(Items(self.rank, {digest: lists[digest] for digest in event.digests}))]

    def _on_ask_sharded(self, event: AskSharded) -> list[ParticipantCommand]:
        assert self._begun is not None
        return [Send(ShardedTensors(self.rank, self._begun.sharded))]

    def _on_assign(self, event: Assign) -> list[ParticipantCommand]:
        assert self._begun is not None
        self.state = _S.PLANNING
        plan = event.plan
        if plan is None:
            assert self._begun.remembered is not None
            plan = self._begun.remembered[1]
        self._begun = None
        url = event.url.decode("utf-8", "surrogatepass")
        return [
            StartStoring(
                event.attempt,
                url,
                event.fsync,
                event.rules,
                plan,
                event.digest,
                event.save,
                event.resumed,
            )
        ]

    # Storing

    def _on_planned(self, event: Planned) -> list[ParticipantCommand]:
        self.state = _S.STORING
        self._objects = event.objects
        self._pending_chunks = [work.num_chunks for work in event.objects]
        self._open_objects = len(event.objects)
        self._unwritten = sum(work.is_shared for work in event.objects)
        joins = [JoinObjects(tuple(self._tokens.values()))] if self._tokens else []
        return [*joins, *self._publish_if_complete()]

    def _on_opened(self, event: ObjectsOpened) -> list[ParticipantCommand]:
        return [Send(Opened(self.rank, event.tokens))]

    def _on_tokens(self, event: Tokens) -> list[ParticipantCommand]:
        new = {token.key: token for token in event.tokens if token.key not in self._tokens}
        self._tokens |= new
        if not new or self.state is _S.PLANNING:
            return []
        return [JoinObjects(tuple(new.values()))]

    def _on_staging_ended(self, event: StagingEnded) -> list[ParticipantCommand]:
        self._is_staged = True
        return [AnnounceStaged(), *self._publish_if_complete()]

    def _on_chunk_stored(self, event: ChunkStored) -> list[ParticipantCommand]:
        number = event.object
        self._pending_chunks[number] -= 1
        if self._pending_chunks[number] < 0:
            raise ProtocolViolation(f"object {number} has fewer chunks")
        if self._pending_chunks[number]:
            return []
        work = self._objects[number]
        if not work.opens:
            return [ReleaseObject(number)]
        return self._note_written() if work.is_shared else [CompleteObject(number)]

    def _on_object_released(self, event: ObjectReleased) -> list[ParticipantCommand]:
        self._open_objects -= 1
        return [*self._note_written(), *self._publish_if_complete()]

    def _note_written(self) -> list[ParticipantCommand]:
        self._unwritten -= 1
        return [] if self._unwritten else [Send(Written(self.rank))]

    def _on_complete(self, event: Complete) -> list[ParticipantCommand]:
        if self._may_complete:
            return []
        self._may_complete = True
        return [
            CompleteObject(number)
            for number, work in enumerate(self._objects)
            if work.opens and work.is_shared
        ]

    def _on_object_completed(self, event: ObjectCompleted) -> list[ParticipantCommand]:
        self._open_objects -= 1
        return self._publish_if_complete()

    def _publish_if_complete(self) -> list[ParticipantCommand]:
        if not self._is_staged or self._open_objects:
            return []
        self.state = _S.PUBLISHING
        return [StoreManifest()]

    def _on_manifest_stored(self, event: ManifestStored) -> list[ParticipantCommand]:
        self.state = _S.REPORTED
        self._has_reported = True
        return [Send(Stored(self.rank, event.size, event.crc32c))]

    # Trouble

    def _on_step_failed(self, event: StepFailed) -> list[ParticipantCommand]:
        return self._fail(event.failure)

    def _on_cancel(self, event: CancelRequested) -> list[ParticipantCommand]:
        return self._fail(Failure(reason=event.reason, stage=Stage.CANCEL, rank=self.rank))

    def _fail(self, failure: Failure) -> list[ParticipantCommand]:
        self.state = _S.FAILED
        return [StopWork(), Send(Failed(self.rank, failure))]

    def _on_lost_when_failed(self, event: CoordinatorLost) -> list[ParticipantCommand]:
        return self._on_lost_when_reported(event) if self._has_reported else self._on_lost(event)

    def _on_lost_when_reported(self, event: CoordinatorLost) -> list[ParticipantCommand]:
        self.state = _S.LOOKING
        self._lost = event
        return [LookForCommit()]

    def _on_lost(self, event: CoordinatorLost) -> list[ParticipantCommand]:
        failure = Failure(reason=event.reason, stage=self._stage, rank=event.rank)
        self.state = _S.ABORTED
        return [StopWork(), DiscardObjects(), Finish(failure)]

    def _on_looked(self, event: Looked) -> list[ParticipantCommand]:
        assert self._lost is not None
        if event.is_committed:
            return self._on_committed(Committed())
        self.state = _S.ABORTED
        failure = Failure(
            reason=self._lost.reason,
            stage=Stage.COMMIT,
            rank=self._lost.rank,
            may_be_visible=True,
        )
        return [Finish(failure)]

    @property
    def _stage(self) -> Stage:
        return Stage.JOIN if self.state in (_S.NEW, _S.JOINING) else Stage.STORE

    def _on_committed(self, event: Committed) -> list[ParticipantCommand]:
        self.state = _S.COMMITTED
        return [Finish(None)]

    def _on_aborted(self, event: Aborted) -> list[ParticipantCommand]:
        self.state = _S.ABORTED
        if event.failure.may_be_visible:
            return [StopWork(), Finish(event.failure)]
        return [StopWork(), DiscardObjects(), Finish(event.failure)]


_M = ParticipantMachine
_TROUBLE: Row[ParticipantCommand] = {
    StepFailed: _M._on_step_failed,
    CancelRequested: _M._on_cancel,
    CoordinatorLost: _M._on_lost,
    Aborted: _M._on_aborted,
}
# Messages that came twice.
_JOINED: Row[ParticipantCommand] = dict.fromkeys(
    (SaveInTrainers, AskInventory, AskItems, AskSharded, Assign), _M._ignore
)
_STORED: Row[ParticipantCommand] = {**_JOINED, Tokens: _M._ignore, Complete: _M._ignore}
_TABLE: Table[ParticipantState, ParticipantCommand] = {
    _S.NEW: {
        Begun: _M._on_begun,
        Meet: _M._ignore,  # rank 0 will end it when it hears that this rank saves here
        SaveInTrainers: _M._ignore,
        **_TROUBLE,
    },
    _S.JOINING: {
        AskInventory: _M._on_ask_inventory,
        AskItems: _M._on_ask_items,
        AskSharded: _M._on_ask_sharded,
        Assign: _M._on_assign,
        Meet: _M._ignore,
        SaveInTrainers: _M._ignore,
        **_TROUBLE,
    },
    _S.PLANNING: {
        Planned: _M._on_planned,
        Tokens: _M._on_tokens,
        **_TROUBLE,
        **_JOINED,
    },
    _S.STORING: {
        ObjectsOpened: _M._on_opened,
        Tokens: _M._on_tokens,
        StagingEnded: _M._on_staging_ended,
        ChunkStored: _M._on_chunk_stored,
        ObjectReleased: _M._on_object_released,
        Complete: _M._on_complete,
        ObjectCompleted: _M._on_object_completed,
        **_TROUBLE,
        **_JOINED,
    },
    _S.PUBLISHING: {
        ManifestStored: _M._on_manifest_stored,
        **_TROUBLE,
        **_STORED,
    },
    _S.REPORTED: {
        Committed: _M._on_committed,
        Aborted: _M._on_aborted,
        StepFailed: _M._on_step_failed,  # elsewhere: the team has ended it
        CancelRequested: _M._on_cancel,
        CoordinatorLost: _M._on_lost_when_reported,
        **_STORED,
    },
    _S.LOOKING: {
        Looked: _M._on_looked,
        Committed: _M._on_committed,
        Aborted: _M._on_aborted,
        **dict.fromkeys((StepFailed, CancelRequested, CoordinatorLost), _M._ignore),
        **_STORED,
    },
    _S.FAILED: {
        Committed: _M._on_committed,  # a cancellation that came after Stored can lose against it
        Aborted: _M._on_aborted,
        CoordinatorLost: _M._on_lost_when_failed,
        StepFailed: _M._ignore,
        CancelRequested: _M._ignore,
        Meet: _M._ignore,
        **_STORED,
        # What was in flight still ends.
        **dict.fromkeys(
            (
                Begun,
                Planned,
                ObjectsOpened,
                StagingEnded,
                ChunkStored,
                ObjectCompleted,
                ObjectReleased,
                ManifestStored,
            ),
            _M._ignore,
        ),
    },
    _S.COMMITTED: {},
    _S.ABORTED: {},
}
