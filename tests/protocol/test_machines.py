"""Coordinator and participants, fed into each other: every schedule ends, and ends safely."""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import UsageError
from actorsnap.format.manifest import ManifestRecord, SaveRecord
from actorsnap.planning.inventory import (
    Inventory,
    Scope,
    Sharded,
    item_digest,
    sharded_digest,
)
from actorsnap.planning.packing import Item, PackingRules, RankPlan, pack
from actorsnap.protocol.calls import (
    CoordinatorLost,
    DeadlinePassed,
    Finish,
    Looked,
    LookForCommit,
    RankLost,
    Send,
    SendToRank,
    StepFailed,
)
from actorsnap.protocol.coordinator import (
    CommitFailed,
    CommitWritten,
    CoordinatorMachine,
    CoordinatorState,
    StopCommit,
    WriteCommit,
)
from actorsnap.protocol.machine import ProtocolViolation
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
    Items,
    Join,
    Offer,
    ShardedTensors,
    Stage,
    Stored,
    Token,
    Tokens,
)
from actorsnap.protocol.participant import (
    AnnounceStaged,
    Begun,
    CancelRequested,
    ChunkStored,
    CompleteObject,
    DiscardObjects,
    JoinObjects,
    ManifestStored,
    ObjectCompleted,
    ObjectReleased,
    ObjectsOpened,
    ObjectWork,
    ParticipantMachine,
    ParticipantState,
    Planned,
    ReleaseObject,
    StagingEnded,
    StartStoring,
    StopWork,
    StoreManifest,
)

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
RULES = PackingRules(chunk_bytes=2 << 20, max_objects=4, min_object_bytes=1 << 20)
LARGE = Item("m/w", "uint8", (5 << 20,), 5 << 20, 1, replicated=True)
NOTHING = Inventory(0, ())


def coordinator(world_size: int = 1, **more: Any) -> CoordinatorMachine:
    more = {"attempt": ATTEMPT, "url": "/s", "release": "1", "rules": RULES, **more}
    return CoordinatorMachine(save=SaveRecord(world_size=world_size), **more)


def joined(machine: CoordinatorMachine, rank: int = 0) -> list[object]:
    """Lets a rank with an empty inventory join."""
    commands: list[object] = []
    for command in machine.handle(Join(rank, "1", b"nothing")):
        if command == SendToRank(rank, AskInventory()):
            commands += machine.handle(Offer(rank, NOTHING))
        else:
            commands.append(command)
    return commands


def failure(stage: Stage = Stage.STORE, **more: Any) -> Failure:
    return Failure(reason="broken", stage=stage, rank=0, **more)


@dataclass
class World:
    """All machines of an attempt, and everything that is under way between them.

    Args:
        items: What all ranks hold: its objects are written by several of them.
        private: Chunks of an object of each rank's own, 0 for none.
        repeats: Messages that arrive twice.
    """

    world_size: int
    rng: random.Random
    items: tuple[Item, ...] = (LARGE,)
    private: int = 1
    faults: int = 0
    repeats: int = 0
    release_of: dict[int, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    remembered: dict[int, tuple[bytes, RankPlan]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.coordinator = coordinator(self.world_size, memory=self.memory)
        self.ranks = [
            ParticipantMachine(rank=rank, release=self.release_of.get(rank, "1"))
            for rank in range(self.world_size)
        ]
        self.up: list[deque[object]] = [deque() for _ in self.ranks]
        self.down: list[deque[object]] = [deque() for _ in self.ranks]
        self.work: list[list[object]] = [[] for _ in self.ranks]
        self.objects: list[tuple[ObjectWork, ...]] = [() for _ in self.ranks]
        self.keys: list[list[str]] = [[] for _ in self.ranks]
        self.finished: dict[int, Finish] = {}
        self.discarded: set[int] = set()
        self.durable: set[int] = set()
        self.dead: set[int] = set()
        self.sent: list[object] = []
        self.chunks_to_come: dict[str, int] = {}
        self.committed = False
        self.commits: list[object] = []

    # What commands do

    def rank_event(self, rank: int, event: object) -> None:
        if rank in self.dead:
            return
        work = self.work[rank]
        for command in self.ranks[rank].handle(event):  # type: ignore[arg-type]
            match command:
                case Send():
                    if isinstance(command.message, Stored):
                        assert rank in self.durable
                    self.sent.append(command.message)
                    self.up[rank].append(command.message)
                case StartStoring():
                    self.remembered[rank] = (command.digest, command.plan)
                    self.plan(rank, command)
                case JoinObjects():
                    for token in command.tokens:
                        number = self.keys[rank].index(token.key)
                        assert token.token == token.key.encode()
                        chunks = self.objects[rank][number].num_chunks
                        work += [ChunkStored(number)] * chunks
                case CompleteObject():
                    key = self.keys[rank][command.object]
                    assert self.chunks_to_come.get(key, 0) == 0, "completed too early"
                    work.append(ObjectCompleted(command.object))
                case ReleaseObject():
                    work.append(ObjectReleased(command.object))
                case StoreManifest():
                    self.durable.add(rank)
                    work.append(ManifestStored(1, 1))
                case LookForCommit():
                    self.work[rank] = work = [Looked(self.committed)]
                case StopWork():
                    work.clear()
                case DiscardObjects():
                    assert not self.committed, "objects of a committed snapshot were deleted"
                    self.discarded.add(rank)
                case Finish():
                    assert rank not in self.finished
                    self.finished[rank] = command
                case AnnounceStaged():
                    pass

    def plan(self, rank: int, command: StartStoring) -> None:
        """Packs as an actor does, and notes what will happen then, in any order."""
        private = Item(f"own{rank}/w", "uint8", (self.private << 20,), self.private << 20, 1)
        plans = pack(
            [*self.items, *[private] * bool(self.private)],
            attempt=ATTEMPT,
            rank=rank,
            rules=command.rules,
            scopes=(tuple(range(len(self.items))),) if self.items else (),
            plan=command.plan,
        )
        self.objects[rank] = tuple(
            ObjectWork(len(plan.chunks), plan.opens, plan.is_shared) for plan in plans
        )
        self.keys[rank] = [plan.key for plan in plans]
        events: list[object] = [StagingEnded()]
        for number, plan in enumerate(plans):
            if plan.is_shared:
                count = self.chunks_to_come.get(plan.key, 0)
                self.chunks_to_come[plan.key] = count + len(plan.chunks)
            if plan.opens:
                events += [ChunkStored(number)] * len(plan.chunks)
        tokens = tuple(Token(p.key, p.key.encode()) for p in plans if p.opens and p.is_shared)
        if tokens:
            events.append(ObjectsOpened(tokens))
        self.rng.shuffle(events)
        self.work[rank] += [Planned(self.objects[rank]), *events]

    def coordinator_event(self, event: object) -> None:
        for command in self.coordinator.handle(event):  # type: ignore[arg-type]
            match command:
                case SendToRank():
                    if isinstance(command.message, Committed):
                        assert self.committed
                    self.sent.append(command.message)
                    self.down[command.rank].append(command.message)
                case WriteCommit():
                    assert [m.key for m in command.manifests] == [
                        f"{ATTEMPT}/manifest/{rank}.json" for rank in range(self.world_size)
                    ]
                    assert self.durable == set(range(self.world_size))
                    assert not self.discarded
                    self.commits.append(command)

    # What happens

    def step(self) -> bool:
        """One random thing happens; False when nothing can any more."""
        choices: list[tuple[str, int]] = [("up", r) for r, queue in enumerate(self.up) if queue]
        if self.commits:
            choices.append(("commit", 0))
        choices += [("down", r) for r, queue in enumerate(self.down) if queue]
        choices += [("work", r) for r, queue in enumerate(self.work) if queue]
        if not choices:
            return False
        if self.faults and self.rng.random() < 0.1:
            self.faults -= 1
            self.break_something(self.rng.randrange(self.world_size))
            return True
        kind, rank = self.rng.choice(choices)
        if kind == "up":
            self.coordinator_event(self.take(self.up[rank]))
        elif kind == "commit":
            self.commits.pop()
            if self.faults and self.rng.random() < 0.5:
                self.faults -= 1
                self.coordinator_event(CommitFailed(failure(Stage.COMMIT)))
            else:
                self.committed = True
                self.coordinator_event(CommitWritten())
        elif kind == "down":
            self.rank_event(rank, self.take(self.down[rank]))
        else:
            event = self.work[rank].pop(0)
            if isinstance(event, ChunkStored):
                key = self.keys[rank][event.object]
                if key in self.chunks_to_come:
                    self.chunks_to_come[key] -= 1
            self.rank_event(rank, event)
        return True

    def take(self, queue: deque[object]) -> object:
        if self.repeats and self.rng.random() < 0.2:
            self.repeats -= 1
            return queue[0]
        return queue.popleft()

    def break_something(self, rank: int) -> None:
        kind = self.rng.choice(["cancel", "fail", "deadline", "die"])
        if kind == "cancel":
            self.rank_event(rank, CancelRequested("enough"))
        elif kind == "deadline":
            self.coordinator_event(DeadlinePassed(1.0))
        elif kind == "die":
            self.dead.add(rank)
            self.work[rank].clear()
            self.coordinator_event(RankLost(rank, 30.0))
        elif self.work[rank]:
            self.rank_event(rank, StepFailed(failure()))

    def begin(self) -> None:
        lists = {item_digest(self.items): self.items} if self.items else {}
        scopes = tuple(
            Scope(None, digest, sum(item.nbytes for item in items))
            for digest, items in lists.items()
        )
        for rank in range(self.world_size):
            inventory = Inventory(self.private << 20, scopes)
            self.rank_event(rank, Begun(inventory, lists, self.remembered.get(rank)))

    def run(self) -> None:
        self.begin()
        steps = 0
        while self.step():
            steps += 1
            assert steps < 10_000
        if not self.coordinator.is_final:  # somebody never reported: the deadline ends it
            self.coordinator_event(DeadlinePassed(1.0))
            while self.step():
                pass


worlds = st.builds(
    World,
    world_size=st.integers(1, 5),
    rng=st.integers(0, 2**32).map(random.Random),
    items=st.sampled_from([(), (LARGE,), (LARGE, Item("m/b", "uint8", (3,), 3, 1, True))]),
    private=st.integers(0, 3),
    faults=st.integers(0, 3),
    repeats=st.integers(0, 5),
)


@given(worlds)
def test_every_schedule_ends_with_one_outcome_for_all(world: World) -> None:
    world.run()
    living = set(range(world.world_size)) - world.dead
    assert living <= set(world.finished)
    outcomes = {finish.failure for finish in world.finished.values()}
    assert len(outcomes) <= 1
    if living:
        assert (outcomes == {None}) == world.committed
    if not world.committed:
        assert living <= world.discarded


@given(worlds, st.integers(0, 200))
def test_without_a_coordinator_every_rank_ends_and_keeps_what_is_committed(
    world: World, steps: int
) -> None:
    world.faults = 0
    world.begin()
    for _ in range(steps):
        world.step()
    was_final = world.coordinator.is_final
    for rank in range(world.world_size):
        world.up[rank].clear()
        world.down[rank].clear()
        world.rank_event(rank, CoordinatorLost("gone"))
    world.commits.clear()
    while world.step():
        pass
    assert set(world.finished) == set(range(world.world_size))
    if world.committed:
        assert {finish.failure for finish in world.finished.values()} == {None}
    else:
        assert None not in {finish.failure for finish in world.finished.values()}
    assert not was_final or world.committed


def test_without_faults_it_commits() -> None:
    world = World(3, random.Random(1), private=2)
    world.run()
    assert world.committed
    assert any(isinstance(message, Tokens) for message in world.sent)
    assert sum(isinstance(message, Complete) for message in world.sent) == 3
    assert world.coordinator.state is CoordinatorState.COMMITTED
    assert {machine.state for machine in world.ranks} == {ParticipantState.COMMITTED}


def test_an_empty_state_commits() -> None:
    world = World(1, random.Random(1), items=(), private=0)
    world.run()
    assert world.committed


def test_equal_inventories_are_asked_for_once_and_then_remembered() -> None:
    first = World(4, random.Random(1))
    first.run()
    assert sum(isinstance(message, AskInventory) for message in first.sent) == 1
    assert sum(isinstance(message, AskItems) for message in first.sent) == 1
    again = World(4, random.Random(2), memory=first.memory, remembered=first.remembered)
    again.run()
    assert again.committed
    assert not any(isinstance(message, AskInventory | AskItems) for message in again.sent)
    assigned = [message for message in again.sent if isinstance(message, Assign)]
    assert [message.plan for message in assigned] == [None] * 4


def test_an_answer_that_comes_twice_is_not_taken_for_the_next_one() -> None:
    """Each rank lists other items of a scope."""
    lists = [(LARGE,), (LARGE, msgspec.structs.replace(LARGE, path="m/norm"))]
    digests = [item_digest(items) for items in lists]
    machine = coordinator(2)
    for rank, items in enumerate(lists):
        machine.handle(Join(rank, "1", b"%d" % rank))
        scope = Scope(None, digests[rank], sum(item.nbytes for item in items))
        asked = machine.handle(Offer(rank, Inventory(0, (scope,))))
        assert asked == [SendToRank(rank, AskItems((digests[rank],)))]
    answer = Items(0, {digests[0]: lists[0]})
    assert machine.handle(answer) == machine.handle(answer) == []
    machine.handle(Items(1, {digests[1]: lists[1]}))
    assert machine.state is CoordinatorState.STORING


def test_ranks_with_different_sharded_tensors_send_them_once() -> None:
    machine = coordinator(2)
    sharded = [
        tuple(Sharded(path, "uint8", (8,), b"%d" % rank, 1) for path in ("m/tied", f"m/{rank}"))
        for rank in range(2)
    ]
    commands: list[object] = []
    for rank, own in enumerate(sharded):
        machine.handle(Join(rank, "1", b"%d" % rank))
        commands = [*machine.handle(Offer(rank, Inventory(16, sharded=sharded_digest(own))))]
    assert commands == [SendToRank(rank, AskSharded()) for rank in range(2)]
    answer = ShardedTensors(0, sharded[0])
    assert machine.handle(answer) == machine.handle(answer) == []
    late = copy.deepcopy(machine)
    machine.handle(ShardedTensors(1, sharded[1]))
    assert machine.state is CoordinatorState.STORING
    late.handle(DeadlinePassed(5.0))
    assert late.failure is not None
    assert late.failure.rank == 1, "the one that does not answer"


def test_a_rank_that_forgot_its_plan_is_sent_it_again() -> None:
    first = World(2, random.Random(1))
    first.run()
    del first.remembered[1]
    again = World(2, random.Random(2), memory=first.memory, remembered=first.remembered)
    again.run()
    assert again.committed
    plans = [message.plan for message in again.sent if isinstance(message, Assign)]
    assert sorted(plan is None for plan in plans) == [False, True]


def test_another_release_is_refused_and_named() -> None:
    world = World(2, random.Random(1), release_of={1: "0.9"})
    world.run()
    assert not world.committed
    reason = world.finished[0].failure
    assert reason is not None
    assert "rank 1 runs actorsnap 0.9" in reason.reason


def test_inventories_that_contradict_each_other_are_a_usage_error_everywhere() -> None:
    machine = coordinator(2)
    commands: list[object] = []
    for rank in range(2):
        item = Item("m/w", "uint8", (3 + rank,), 3 + rank, 1, replicated=True)
        digest = item_digest((item,))
        machine.handle(Join(rank, "1", b"%d" % rank))
        machine.handle(Offer(rank, Inventory(0, (Scope(None, digest, 3 + rank),))))
        commands = [*machine.handle(Items(rank, {digest: (item,)}))]
    assert machine.state is CoordinatorState.ABORTED
    assert machine.failure is not None
    assert isinstance(machine.failure.to_error(), UsageError)
    assert "m/w" in machine.failure.reason
    assert commands == [SendToRank(rank, Aborted(machine.failure)) for rank in range(2)]


def test_the_deadline_names_the_ranks_that_never_came() -> None:
    machine = coordinator(3)
    joined(machine, 1)
    commands = machine.handle(DeadlinePassed(5.0))
    assert len(commands) == 3
    assert machine.failure is not None
    assert "rank(s) 0, 2" in machine.failure.reason
    assert machine.failure.stage is Stage.JOIN


def test_the_deadline_names_the_rank_that_does_not_answer() -> None:
    machine = coordinator(1)
    machine.handle(Join(0, "1", b"x"))
    machine.handle(DeadlinePassed(5.0))
    assert machine.failure is not None
    assert machine.failure.rank == 0


def test_a_lost_rank_is_named_and_does_not_matter_once_all_have_stored() -> None:
    machine = coordinator(2)
    joined(machine, 0)
    joined(machine, 1)
    machine.handle(RankLost(1, 31.0))
    assert machine.failure is not None
    assert (machine.failure.rank, machine.failure.stage) == (1, Stage.STORE)
    assert "31 s" in machine.failure.reason
    machine = coordinator(1)
    joined(machine)
    machine.handle(Stored(0, 1, 1))
    assert machine.handle(RankLost(0, 31.0)) == []
    assert machine.state is CoordinatorState.COMMITTING


def test_a_failure_during_the_commit_only_ends_the_waiting_for_it() -> None:
    machine = coordinator(1)
    joined(machine)
    record = ManifestRecord(key=f"{ATTEMPT}/manifest/0.json", size=1, crc32c=1)
    assert machine.handle(Stored(0, 1, 1)) == [WriteCommit((record,))]
    cancelled = Failed(0, failure(Stage.CANCEL))
    assert machine.handle(cancelled) == [StopCommit("broken", has_grace=True)]
    assert machine.handle(DeadlinePassed(1.0)) == [
        StopCommit("timeout_s=1 is over", has_grace=False)
    ]
    assert machine.handle(CommitWritten()) == [SendToRank(0, Committed())]


def test_objects_stay_if_the_commit_may_be_visible() -> None:
    machine = ParticipantMachine(rank=0, release="1")
    machine.handle(Begun(NOTHING, {}))
    commands = machine.handle(Aborted(failure(Stage.COMMIT, may_be_visible=True)))
    assert not any(isinstance(command, DiscardObjects) for command in commands)
    assert isinstance(commands[-1], Finish)


def test_an_impossible_event_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="CommitWritten while joining"):
        coordinator().handle(CommitWritten())
    with pytest.raises(ProtocolViolation, match="ChunkStored while new"):
        ParticipantMachine(rank=0, release="1").handle(ChunkStored(0))
