"""The deciding side of a save, as a table.

One machine per attempt. It must not know storage, clocks or transports: the deadline is an
event, the commit is a command with two endings.

Rules:

1. Nothing is assigned before every rank has joined with the same release, and every
   inventory is known. Equal inventories are asked for once, whoever has them, and those of
   the save before are remembered (``Memory``). Where ranks hold parts of different tensors, one
   rank of each kind sends which, and a part that no rank stores ends the save.
2. Objects that several ranks write are completed after every rank has written.
3. ``WriteCommit`` is given once, after every rank reported ``Stored``; never after a
   failure, a cancellation, the loss of a rank or the deadline.
4. Once it is given, the outcome is the commit's ending, whatever else arrives. A cancellation
   or the deadline only ends the waiting for it (``StopCommit``).
5. Every path ends in COMMITTED or ABORTED, and every rank is told the same.

Messages may come twice and late.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import ManifestRecord, SaveRecord
from actorsnap.planning.inventory import Sharded, check_sharded, on_several_meshes
from actorsnap.planning.packing import PackingRules
from actorsnap.planning.save import SavePlan
from actorsnap.protocol.calls import DeadlinePassed, RankLost, SendToRank
from actorsnap.protocol.machine import Machine, Table
from actorsnap.protocol.memory import Memory
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
    Handed,
    Items,
    Join,
    Offer,
    Opened,
    SaveInTrainers,
    ShardedTensors,
    Stage,
    Stored,
    ToCoordinator,
    Token,
    Tokens,
    Written,
    unlike_processes,
)

__all__ = [
    "CommitFailed",
    "CommitWritten",
    "CoordinatorCommand",
    "CoordinatorEvent",
    "CoordinatorMachine",
    "CoordinatorState",
    "StopCommit",
    "WriteCommit",
]


class CoordinatorState(StrEnum):
    JOINING = "joining"
    STORING = "storing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class CommitWritten(msgspec.Struct, frozen=True):
    """``WriteCommit`` succeeded."""


class CommitFailed(msgspec.Struct, frozen=True):
    """``WriteCommit`` failed, or was stopped without an answer. Nothing was committed by it,
    unless ``failure.may_be_visible``."""

    failure: Failure


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


CoordinatorEvent: TypeAlias = (
    ToCoordinator | DeadlinePassed | RankLost | CommitWritten | CommitFailed
)
CoordinatorCommand: TypeAlias = SendToRank | WriteCommit | StopCommit

_S = CoordinatorState


class CoordinatorMachine(Machine[CoordinatorState, CoordinatorEvent, CoordinatorCommand]):
    """Decides over one attempt.

    Args:
        attempt: Its name.
        url: Where it is saved to.
        fsync: Whether everything has to be durable before the commit.
        save: What the commit object will say of the save; each rank repeats it in its manifest.
        release: This release; every rank must be of the same.
        rules: How all ranks pack.
        resumed: Dead attempts whose objects are used, the newest first.
        memory: What is known from the save before; no other machine may use it.
    """

    def __init__(
        self,
        *,
        attempt: str,
        url: str,
        save: SaveRecord,
        release: str,
        rules: PackingRules,
        fsync: bool = True,
        resumed: tuple[str, ...] = (),
        memory: Memory | None = None,
    ) -> None:
        super().__init__(_TABLE, _S.JOINING)
        self.attempt = attempt
        self.resumed = resumed
        self.url = url
        self.fsync = fsync
        self.world_size = save.world_size
        self._save = save
        self._save_of_others = msgspec.structs.replace(save, metadata={})
        self.release = release
        self.rules = rules
        self.failure: Failure | None = None
        self._memory = memory or Memory()
        self._joined: dict[int, Join] = {}
        # Digests that are asked for, and the rank that will answer.
        self._asked: dict[bytes, int] = {}
        self._asked_sharded: dict[bytes, int] = {}
        self._sharded: dict[bytes, tuple[Sharded, ...]] = {}
        self._handed: int | None = None
        self._plan: SavePlan | None = None
        self._writing: set[int] = set()
        self._stored: dict[int, Stored] = {}

    def validate(self) -> None:
        assert (self.failure is not None) == (self.state is _S.ABORTED)
        if self.state not in (_S.JOINING, _S.ABORTED):
            assert len(self._joined) == self.world_size
            assert self._plan is not None
        if self.state in (_S.COMMITTING, _S.COMMITTED):
            assert len(self._stored) == self.world_size
            assert not self._writing

    # Joining

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
        if event.rank in self._joined:
            return []
        self._joined[event.rank] = event
        if self._handed is not None:
            return self._abort_if_unlike()
        structure = event.structure
        if structure not in self._memory.inventories and structure not in self._asked:
            self._asked[structure] = event.rank
            return [SendToRank(event.rank, AskInventory())]
        return self._assign_if_known()

    def _on_offer(self, event: Offer) -> list[CoordinatorCommand]:
        structure = self._joined[event.rank].structure
        if self._asked.pop(structure, None) is None:
            return []
        self._memory.inventories[structure] = event.inventory
        wanted: list[bytes] = []
        for scope in event.inventory.scopes:
            if scope.digest not in self._memory.lists and scope.digest not in self._asked:
                self._asked[scope.digest] = event.rank
                wanted.append(scope.digest)
        if wanted:
            return [SendToRank(event.rank, AskItems(tuple(wanted)))]
        return self._assign_if_known()

    def _on_items(self, event: Items) -> list[CoordinatorCommand]:
        for digest, items in event.lists.items():
            if self._asked.pop(digest, None) is not None:
                self._memory.lists[digest] = items
        return self._assign_if_known()

    def _on_sharded(self, event: ShardedTensors) -> list[CoordinatorCommand]:
        digest = self._memory.inventories[self._joined[event.rank].structure].sharded
        if self._asked_sharded.pop(digest, None) is None:
            return []
        self._sharded[digest] = event.tensors
        if not self._asked_sharded:
            said = self._memory.sharded(self._structures)
            order = sorted(self._sharded, key=lambda digest: said[digest][0])
            lists = [(said[digest], self._sharded[digest]) for digest in order]
            try:
                check_sharded(lists)
            except UsageError as error:
                return self._abort(Failure.of(error, stage=Stage.PLAN))
            self._memory.agreed = said
            self._memory.several = on_several_meshes(lists)
        return self._assign_if_known()

    @property
    def _structures(self) -> tuple[bytes, ...]:
        return tuple(self._joined[rank].structure for rank in range(self.world_size))

    def _assign_if_known(self) -> list[CoordinatorCommand]:
        is_waiting = self._asked or self._asked_sharded
        if is_waiting or len(self._joined) < self.world_size:
            return []
        structures = self._structures
        said = self._memory.sharded(structures)
        if len(said) > 1 and said != self._memory.agreed:
            self._asked_sharded = {digest: ranks[0] for digest, ranks in said.items() if digest}
            return [SendToRank(rank, AskSharded()) for rank in self._asked_sharded.values()]
        try:
            plan = self._plan = self._memory.plan(structures, self.rules)
        except UsageError as error:
            return self._abort(Failure.of(error, stage=Stage.PLAN))
        self.state = _S.STORING
        self._writing = {rank for rank, own in enumerate(plan.ranks) if own.is_shared}
        return [SendToRank(rank, self._assignment(rank, plan)) for rank in self._joined]

    def _assignment(self, rank: int, plan: SavePlan) -> Assign:
        is_known = self._joined[rank].plan == plan.digests[rank]
        return Assign(
            self.attempt,
            self.url.encode("utf-8", "surrogatepass"),
            self.fsync,
            self.rules,
            plan.digests[rank],
            None if is_known else plan.ranks[rank],
            self._save if rank == 0 else self._save_of_others,
            self.resumed,
        )

    # Storing

    def _on_opened(self, event: Opened) -> list[CoordinatorCommand]:
        assert self._plan is not None
        tokens: dict[int, list[Token]] = {}
        for token, joiners in zip(event.tokens, self._plan.joiners[event.rank], strict=True):
            for rank in joiners:
                tokens.setdefault(rank, []).append(token)
        return [SendToRank(rank, Tokens(tuple(found))) for rank, found in tokens.items()]

    def _on_written(self, event: Written) -> list[CoordinatorCommand]:
        assert self._plan is not None
        if event.rank not in self._writing:
            return []
        self._writing.remove(event.rank)
        if self._writing:
            return []
        return [
            SendToRank(rank, Complete())
            for rank, own in enumerate(self._plan.ranks)
            if own.is_shared
        ]

    def _on_stored(self, event: Stored) -> list[CoordinatorCommand]:
        self._stored[event.rank] = event
        if len(self._stored) < self.world_size:
            return []
        self.state = _S.COMMITTING
        return [WriteCommit(tuple(self._record(rank) for rank in range(self.world_size)))]

    def _record(self, rank: int) -> ManifestRecord:
        stored = self._stored[rank]
        key = manifest_key(self.attempt, rank)
        return ManifestRecord(key=key, size=stored.size, crc32c=stored.crc32c)

    # Trouble

    def _on_handed(self, event: Handed) -> list[CoordinatorCommand]:
        if event.follows:
            return [SendToRank(event.rank, SaveInTrainers())]
        self._handed = event.rank
        return self._abort_if_unlike()

    def _abort_if_unlike(self) -> list[CoordinatorCommand]:
        # If the coordinator's own rank has failed that is why, and comes next.
        if self._handed is None or 0 not in self._joined:
            return []
        return self._abort(unlike_processes(self._handed))

    def _on_failed(self, event: Failed) -> list[CoordinatorCommand]:
        return self._abort(event.failure)

    def _on_lost(self, event: RankLost) -> list[CoordinatorCommand]:
        return self._abort(Failure(reason=event.reason, stage=self._stage, rank=event.rank))

    def _on_deadline(self, event: DeadlinePassed) -> list[CoordinatorCommand]:
        present: Mapping[int, object] = self._joined if self.state is _S.JOINING else self._stored
        absent = [rank for rank in range(self.world_size) if rank not in present]
        if not absent:  # all have joined, and somebody does not answer what was asked
            absent = sorted({*self._asked.values(), *self._asked_sharded.values()})
        rank = absent[0] if len(absent) == 1 else None
        return self._abort(Failure(reason=event.reason(absent), stage=self._stage, rank=rank))

    @property
    def _stage(self) -> Stage:
        return Stage.JOIN if self.state is _S.JOINING else Stage.STORE

    def _on_late_failure(self, event: Failed) -> list[CoordinatorCommand]:
        return [StopCommit(event.failure.reason, has_grace=True)]

    def _on_late_deadline(self, event: DeadlinePassed) -> list[CoordinatorCommand]:
        return [StopCommit(event.is_over, has_grace=False)]

    def _on_commit_written(self, event: CommitWritten) -> list[CoordinatorCommand]:
        self.state = _S.COMMITTED
        return self._tell_all(Committed())

    def _on_commit_failed(self, event: CommitFailed) -> list[CoordinatorCommand]:
        return self._abort(event.failure)

    def _abort(self, failure: Failure) -> list[CoordinatorCommand]:
        self.state = _S.ABORTED
        self.failure = failure
        return self._tell_all(Aborted(failure))

    def _tell_all(self, message: FromCoordinator) -> list[CoordinatorCommand]:
        return [SendToRank(rank, message) for rank in range(self.world_size)]


_M = CoordinatorMachine
_JOINING = (Handed, Join, Offer, Items, ShardedTensors)
_STORING = (Opened, Written, Stored)
_TABLE: Table[CoordinatorState, CoordinatorCommand] = {
    _S.JOINING: {
        Join: _M._on_join,
        Offer: _M._on_offer,
        Items: _M._on_items,
        ShardedTensors: _M._on_sharded,
        Handed: _M._on_handed,
        Failed: _M._on_failed,
        RankLost: _M._on_lost,
        DeadlinePassed: _M._on_deadline,
    },
    _S.STORING: {
        Opened: _M._on_opened,
        Written: _M._on_written,
        Stored: _M._on_stored,
        Failed: _M._on_failed,
        RankLost: _M._on_lost,
        DeadlinePassed: _M._on_deadline,
        # They came twice.
        **dict.fromkeys(_JOINING, _M._ignore),
    },
    _S.COMMITTING: {
        CommitWritten: _M._on_commit_written,
        CommitFailed: _M._on_commit_failed,
        Failed: _M._on_late_failure,
        DeadlinePassed: _M._on_late_deadline,
        # All have stored: what happens to a rank now does not matter.
        RankLost: _M._ignore,
        **dict.fromkeys((*_JOINING, *_STORING), _M._ignore),
    },
    _S.COMMITTED: {},
    _S.ABORTED: {},
}
