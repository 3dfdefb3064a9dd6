"""The deciding side of a save, as a table.

One machine per attempt. Events go in by ``handle``, commands come out; whoever holds the
machine performs them and reports how they ended. It must not know storage, clocks or
transports: the deadline is an event, the commit is a command with two endings.

Rules:

1. Nothing is assigned before every rank has joined with the same release, and every
   inventory is known. Equal inventories are asked for once, whoever has them, and those of
   the save before are remembered (``Memory``). Each rank tells what other meshes have, too,
   from what they have not; who does not yet is told how, once, and remembers it.
2. Objects that several ranks write are completed after every rank has written.
3. ``WriteCommit`` is given once, after every rank reported ``Stored``; never after a
   failure, a cancellation, the loss of a rank or the deadline.
4. Once it is given, the outcome is the commit's ending, whatever else arrives. A cancellation
   or the deadline only ends the waiting for it (``StopCommit``).
5. Every path ends in COMMITTED or ABORTED, and every rank is told the same.

Messages may come twice and late. An event that the table does not have for the state is a
``ProtocolViolation``, except in the two final states, where late events are harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import ManifestRecord
from actorsnap.planning.packing import Item, PackingRules
from actorsnap.planning.save import (
    Division,
    Inventory,
    SavePlan,
    Sharded,
    check_sharded,
    divide,
    division_digest,
    inventory_digest,
    lists_for_copies,
    on_several_meshes,
    plan_save,
)
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    AskInventory,
    AskItems,
    AskSharded,
    Assign,
    Committed,
    Complete,
    Divide,
    Divided,
    Failed,
    Failure,
    FromCoordinator,
    Items,
    Join,
    Offer,
    Opened,
    ShardedTensors,
    Stage,
    Staged,
    Stored,
    ToCoordinator,
    Token,
    Tokens,
    Written,
)

__all__ = [
    "CommitFailed",
    "CommitWritten",
    "CoordinatorCommand",
    "CoordinatorEvent",
    "CoordinatorMachine",
    "CoordinatorState",
    "DeadlinePassed",
    "Memory",
    "ProtocolViolation",
    "RankLost",
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


class RankLost(msgspec.Struct, frozen=True):
    """A rank that was heard before was not heard for ``silent_s``."""

    rank: int
    silent_s: float


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


CoordinatorEvent: TypeAlias = (
    ToCoordinator | DeadlinePassed | RankLost | CommitWritten | CommitFailed
)
CoordinatorCommand: TypeAlias = SendToRank | WriteCommit | StopCommit

_S = CoordinatorState


class Memory:
    """What the coordinator of a group remembers from its last save: bounded by one save.

    Attributes:
        inventories: By digest.
        lists: Item lists, by digest.
        agreed: What ``sharded`` returned when ranks were last seen to agree.
        divisions: How each of them then tells what others may hold as well apart.
        several: What then lay on several meshes.
    """

    def __init__(self) -> None:
        self.inventories: dict[bytes, Inventory] = {}
        self.lists: dict[bytes, tuple[Item, ...]] = {}
        self.agreed: dict[bytes, list[int]] = {}
        self.divisions: dict[bytes, Division] = {}
        self.several: frozenset[str] = frozenset()
        self._made_from: object = None
        self._plan: SavePlan | None = None

    def copy(self) -> Memory:
        """The same, for one save. It can be kept when that has planned."""
        other = Memory()
        other.inventories, other.lists = dict(self.inventories), dict(self.lists)
        other.agreed, other.divisions, other.several = self.agreed, self.divisions, self.several
        other._plan, other._made_from = self._plan, self._made_from
        return other

    def sharded(self, structures: Sequence[bytes]) -> dict[bytes, list[int]]:
        """What ranks with these inventories say of sharded tensors: digests, an empty one
        where there are none, and the ranks that say each, rising."""
        found: dict[bytes, list[int]] = {}
        for rank, structure in enumerate(structures):
            found.setdefault(self.inventories[structure].sharded, []).append(rank)
        return found

    def undivided(self, structures: Sequence[bytes]) -> dict[int, Division]:
        """The ranks that do not tell apart as ``divisions`` says, and how they have to."""
        found: dict[int, Division] = {}
        for rank, structure in enumerate(structures):
            inventory = self.inventories[structure]
            division = self.divisions.get(inventory.sharded)
            has_any = inventory.is_open or inventory.division
            if has_any and inventory.division != division_digest(division):
                found[rank] = division
        return found

    def missing_copies(
        self, structures: Sequence[bytes], copies: Sequence[Sequence[bytes]]
    ) -> dict[bytes, int]:
        """The lists to ask for of what turned out to be held by several: digests, and who
        answers."""
        found = lists_for_copies([self.inventories[digest] for digest in structures], copies)
        return {digest: rank for digest, rank in found.items() if digest not in self.lists}

    def plan(
        self,
        structures: tuple[bytes, ...],
        copies: tuple[tuple[bytes, ...], ...],
        rules: PackingRules,
    ) -> SavePlan:
        """The plan for ranks with these inventories; forgets what is not in it.

        Raises:
            UsageError: the inventories contradict each other.
        """
        # Contents change from save to save, but mostly not whose are equal.
        firsts: dict[bytes, int] = {}
        alike = tuple(
            [tuple([firsts.setdefault(digest, len(firsts)) for digest in own]) for own in copies]
        )
        several = self.several if self.sharded(structures) == self.agreed else frozenset()
        made_from = (structures, alike, rules, several)
        if self._plan is None or self._made_from != made_from:
            self._plan = plan_save(
                [self.inventories[digest] for digest in structures],
                self.lists,
                rules,
                copies,
                several,
            )
            self._made_from = made_from
        self.inventories = {digest: self.inventories[digest] for digest in set(structures)}
        used = {scope.digest for found in self.inventories.values() for scope in found.scopes}
        self.lists = {digest: held for digest, held in self.lists.items() if digest in used}
        return self._plan


class CoordinatorMachine:
    """Decides over one attempt.

    Args:
        attempt: Its name.
        url: Where it is saved to.
        fsync: Whether everything has to be durable before the commit.
        world_size: Ranks that take part.
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
        world_size: int,
        release: str,
        rules: PackingRules,
        fsync: bool = True,
        resumed: tuple[str, ...] = (),
        memory: Memory | None = None,
    ) -> None:
        self.attempt = attempt
        self.resumed = resumed
        self.url = url
        self.fsync = fsync
        self.world_size = world_size
        self.release = release
        self.rules = rules
        self.state = _S.JOINING
        self.failure: Failure | None = None
        self._memory = memory or Memory()
        self._joined: dict[int, Join] = {}
        # Digests that are asked for, and the rank that will answer.
        self._asked: dict[bytes, int] = {}
        self._asked_sharded: dict[bytes, int] = {}
        self._sharded: dict[bytes, tuple[Sharded, ...]] = {}
        # Ranks that are told how to divide, and have not yet.
        self._dividing: set[int] = set()
        self._plan: SavePlan | None = None
        self._writing: set[int] = set()
        self._staged: set[int] = set()
        self._stored: dict[int, Stored] = {}

    @property
    def is_final(self) -> bool:
        return self.state in (_S.COMMITTED, _S.ABORTED)

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """Takes one event, returns what is to be done.

        Raises:
            ProtocolViolation: the table has no such transition.
        """
        if self.is_final:
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
        if self.state not in (_S.JOINING, _S.ABORTED):
            assert len(self._joined) == self.world_size
            assert self._plan is not None
        if self.state in (_S.COMMITTING, _S.COMMITTED):
            assert len(self._stored) == self.world_size
            assert not self._writing

    def _missing(self, present: Mapping[int, object]) -> str:
        absent = [str(rank) for rank in range(self.world_size) if rank not in present]
        return ", ".join(absent[:16]) + (" ..." if len(absent) > 16 else "")

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
            if scope.ranks == ():
                continue  # who else has it is not known yet
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
            self._memory.divisions = dict(zip(order, divide(lists, self.world_size), strict=True))
            self._memory.several = on_several_meshes(lists)
        return self._assign_if_known()

    def _on_divided(self, event: Divided) -> list[CoordinatorCommand]:
        if event.rank not in self._dividing:
            return []
        self._dividing.remove(event.rank)
        structure = inventory_digest(event.inventory)
        self._memory.inventories[structure] = event.inventory
        self._joined[event.rank] = msgspec.structs.replace(
            self._joined[event.rank], structure=structure, copies=event.copies
        )
        return self._assign_if_known()

    @property
    def _structures(self) -> tuple[bytes, ...]:
        return tuple(self._joined[rank].structure for rank in range(self.world_size))

    def _assign_if_known(self) -> list[CoordinatorCommand]:
        is_waiting = self._asked or self._asked_sharded or self._dividing
        if is_waiting or len(self._joined) < self.world_size:
            return []
        structures = self._structures
        said = self._memory.sharded(structures)
        if len(said) > 1 and said != self._memory.agreed:
            self._asked_sharded = {digest: ranks[0] for digest, ranks in said.items() if digest}
            return [SendToRank(rank, AskSharded()) for rank in self._asked_sharded.values()]
        undivided = self._memory.undivided(structures)
        if undivided:
            self._dividing = set(undivided)
            return [SendToRank(rank, Divide(division)) for rank, division in undivided.items()]
        copies = tuple(self._joined[rank].copies for rank in range(self.world_size))
        wanted = self._memory.missing_copies(structures, copies)
        if wanted:
            self._asked |= wanted
            asked: dict[int, list[bytes]] = {}
            for digest, rank in wanted.items():
                asked.setdefault(rank, []).append(digest)
            return [SendToRank(rank, AskItems(tuple(digests))) for rank, digests in asked.items()]
        try:
            plan = self._plan = self._memory.plan(structures, copies, self.rules)
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

    def _on_staged(self, event: Staged) -> list[CoordinatorCommand]:
        self._staged.add(event.rank)
        return []

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

    def _on_arrived(self, event: Arrived) -> list[CoordinatorCommand]:
        return self._abort(
            Failure(
                reason=f"rank {event.rank} restores a snapshot while others take one: all ranks "
                "make the same calls in the same order",
                stage=Stage.JOIN,
                rank=event.rank,
            )
        )

    def _on_failed(self, event: Failed) -> list[CoordinatorCommand]:
        return self._abort(event.failure)

    def _on_lost(self, event: RankLost) -> list[CoordinatorCommand]:
        return self._abort(
            Failure(
                reason=f"rank {event.rank} was not heard for {event.silent_s:.0f} s: it was "
                "killed or stopped, or its machine or network is gone",
                stage=self._stage,
                rank=event.rank,
            )
        )

    def _on_deadline(self, event: DeadlinePassed) -> list[CoordinatorCommand]:
        waiting = self._missing(self._joined if self.state is _S.JOINING else self._stored)
        if not waiting:  # all have joined, and somebody does not answer what was asked
            asked = {*self._asked.values(), *self._asked_sharded.values(), *self._dividing}
            waiting = ", ".join(map(str, sorted(asked)))
        return self._abort(
            Failure(
                reason=f"timeout_s={event.timeout_s:g} is over; still waiting for rank(s) "
                f"{waiting}. Raise Options.timeout_s if the storage is that slow",
                stage=self._stage,
                rank=int(waiting) if waiting.isdigit() else None,
            )
        )

    @property
    def _stage(self) -> Stage:
        return Stage.JOIN if self.state is _S.JOINING else Stage.STORE

    def _on_late_failure(self, event: Failed) -> list[CoordinatorCommand]:
        return [StopCommit(event.failure.reason, has_grace=True)]

    def _on_late_deadline(self, event: DeadlinePassed) -> list[CoordinatorCommand]:
        return [StopCommit(f"timeout_s={event.timeout_s:g} is over", has_grace=False)]

    def _ignore(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        return []

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
_JOINING = (Join, Offer, Items, ShardedTensors, Divided)
_TABLE: dict[tuple[CoordinatorState, type], Callable[..., list[CoordinatorCommand]]] = {
    (_S.JOINING, Join): _M._on_join,
    (_S.JOINING, Offer): _M._on_offer,
    (_S.JOINING, Items): _M._on_items,
    (_S.JOINING, Arrived): _M._on_arrived,
    (_S.JOINING, ShardedTensors): _M._on_sharded,
    (_S.JOINING, Divided): _M._on_divided,
    (_S.STORING, Opened): _M._on_opened,
    (_S.STORING, Staged): _M._on_staged,
    (_S.STORING, Written): _M._on_written,
    (_S.STORING, Stored): _M._on_stored,
    (_S.COMMITTING, Failed): _M._on_late_failure,
    (_S.COMMITTING, DeadlinePassed): _M._on_late_deadline,
    (_S.COMMITTING, CommitWritten): _M._on_commit_written,
    (_S.COMMITTING, CommitFailed): _M._on_commit_failed,
    # All have stored: what happens to a rank now does not matter.
    (_S.COMMITTING, RankLost): _M._ignore,
    **{(state, Failed): _M._on_failed for state in (_S.JOINING, _S.STORING)},
    **{(state, DeadlinePassed): _M._on_deadline for state in (_S.JOINING, _S.STORING)},
    **{(state, RankLost): _M._on_lost for state in (_S.JOINING, _S.STORING)},
    # Messages that came twice.
    **{(_S.STORING, message): _M._ignore for message in _JOINING},
    **{
        (_S.COMMITTING, message): _M._ignore
        for message in (*_JOINING, Opened, Staged, Written, Stored)
    },
}
