"""Coordinator and participants, fed into each other: every schedule ends, and ends safely."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.manifest import ManifestRecord
from actorsnap.planning.packing import Item
from actorsnap.protocol.coordinator import (
    CommitFailed,
    CommitWritten,
    CoordinatorMachine,
    CoordinatorState,
    DeadlinePassed,
    ProtocolViolation,
    SendToRank,
    StopCommit,
    WriteCommit,
)
from actorsnap.protocol.messages import (
    Aborted,
    Committed,
    Failed,
    Failure,
    Join,
    Stage,
    Staged,
    Stored,
)
from actorsnap.protocol.participant import (
    AnnounceStaged,
    Begun,
    CancelRequested,
    ChunkStored,
    CompleteObject,
    DiscardObjects,
    Finish,
    ManifestStored,
    ObjectCompleted,
    ParticipantMachine,
    ParticipantState,
    Planned,
    Send,
    StagingEnded,
    StartStoring,
    StepFailed,
    StopWork,
    StoreManifest,
)

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
RECORD = ManifestRecord(key=f"{ATTEMPT}/manifest/0.json", size=1, crc32c=1)
ITEM = Item("m/w", "uint8", (1,), 1, 1)


def failure(stage: Stage = Stage.STORE, **more: Any) -> Failure:
    return Failure(reason="broken", stage=stage, rank=0, **more)


@dataclass
class World:
    """All machines of an attempt, and everything that is under way between them."""

    world_size: int
    chunks: tuple[int, ...]
    rng: random.Random
    faults: int
    release_of: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.coordinator = CoordinatorMachine(
            attempt=ATTEMPT, world_size=self.world_size, release="1"
        )
        self.ranks = [
            ParticipantMachine(rank=rank, release=self.release_of.get(rank, "1"))
            for rank in range(self.world_size)
        ]
        self.up: deque[object] = deque()
        self.down: list[deque[object]] = [deque() for _ in self.ranks]
        self.work: list[list[object]] = [[] for _ in self.ranks]
        self.finished: dict[int, Finish] = {}
        self.stopped: set[int] = set()
        self.discarded: set[int] = set()
        self.durable: set[int] = set()
        self.committed = False
        self.commits: list[object] = []

    def rank_event(self, rank: int, event: object) -> None:
        for command in self.ranks[rank].handle(event):  # type: ignore[arg-type]
            match command:
                case Send():
                    if isinstance(command.message, Stored):
                        assert rank in self.durable
                    self.up.append(command.message)
                case StartStoring():
                    self.work[rank].append(Planned(self.chunks))
                case CompleteObject():
                    self.work[rank].append(ObjectCompleted(command.object))
                case StoreManifest():
                    self.durable.add(rank)
                    self.work[rank].append(ManifestStored(RECORD))
                case StopWork():
                    self.stopped.add(rank)
                    self.work[rank].clear()
                case DiscardObjects():
                    assert not self.committed, "objects of a committed snapshot were deleted"
                    self.discarded.add(rank)
                case Finish():
                    assert rank not in self.finished
                    self.finished[rank] = command
                case AnnounceStaged():
                    pass

    def planned(self, rank: int) -> None:
        self.rank_event(rank, Planned(self.chunks))
        events: list[object] = [ChunkStored(o) for o, n in enumerate(self.chunks) for _ in range(n)]
        events.append(StagingEnded())
        self.rng.shuffle(events)
        self.work[rank].extend(events)

    def coordinator_event(self, event: object) -> None:
        for command in self.coordinator.handle(event):  # type: ignore[arg-type]
            match command:
                case SendToRank():
                    if isinstance(command.message, Committed):
                        assert self.committed
                    self.down[command.rank].append(command.message)
                case WriteCommit():
                    assert len(command.manifests) == self.world_size
                    assert self.durable == set(range(self.world_size))
                    assert not self.discarded
                    self.commits.append(command)

    def step(self) -> bool:
        """One random thing happens; False when nothing can any more."""
        choices: list[tuple[str, int]] = []
        if self.up:
            choices.append(("up", 0))
        if self.commits:
            choices.append(("commit", 0))
        choices += [("down", r) for r, queue in enumerate(self.down) if queue]
        choices += [("work", r) for r, queue in enumerate(self.work) if queue]
        if not choices:
            return False
        if self.faults and self.rng.random() < 0.1:
            self.faults -= 1
            rank = self.rng.randrange(self.world_size)
            kind = self.rng.choice(["cancel", "fail", "deadline"])
            if kind == "cancel":
                self.rank_event(rank, CancelRequested("enough"))
            elif kind == "deadline":
                self.coordinator_event(DeadlinePassed(1.0))
            elif self.work[rank]:
                self.rank_event(rank, StepFailed(failure()))
            return True
        kind, rank = self.rng.choice(choices)
        if kind == "up":
            self.coordinator_event(self.up.popleft())
        elif kind == "commit":
            self.commits.pop()
            if self.faults and self.rng.random() < 0.5:
                self.faults -= 1
                self.coordinator_event(CommitFailed(failure(Stage.COMMIT)))
            else:
                self.committed = True
                self.coordinator_event(CommitWritten())
        elif kind == "down":
            self.rank_event(rank, self.down[rank].popleft())
        else:
            event = self.work[rank].pop(0)
            if isinstance(event, Planned):
                self.planned(rank)
            else:
                self.rank_event(rank, event)
        return True

    def run(self) -> None:
        for rank in range(self.world_size):
            self.rank_event(rank, Begun((ITEM,)))
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
    chunks=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    rng=st.integers(0, 2**32).map(random.Random),
    faults=st.integers(0, 3),
)


@given(worlds)
def test_every_schedule_ends_with_one_outcome_for_all(world: World) -> None:
    world.run()
    assert set(world.finished) == set(range(world.world_size))
    outcomes = {finish.failure for finish in world.finished.values()}
    assert len(outcomes) == 1
    assert (outcomes == {None}) == world.committed
    if not world.committed:
        assert world.discarded == set(range(world.world_size))


def test_without_faults_it_commits() -> None:
    world = World(3, (2, 1), random.Random(1), 0)
    world.run()
    assert world.committed
    assert world.coordinator.state is CoordinatorState.COMMITTED
    assert {machine.state for machine in world.ranks} == {ParticipantState.COMMITTED}


def test_an_empty_state_commits() -> None:
    world = World(1, (), random.Random(1), 0)
    world.run()
    assert world.committed


def test_another_release_is_refused_and_named() -> None:
    world = World(2, (1,), random.Random(1), 0, {1: "0.9"})
    world.run()
    assert not world.committed
    reason = world.finished[0].failure
    assert reason is not None
    assert "rank 1 runs actorsnap 0.9" in reason.reason


def test_the_deadline_names_the_ranks_that_never_came() -> None:
    machine = CoordinatorMachine(attempt=ATTEMPT, world_size=3, release="1")
    machine.handle(Join(rank=1, release="1", inventory=()))
    commands = machine.handle(DeadlinePassed(5.0))
    assert len(commands) == 3
    assert machine.failure is not None
    assert "rank(s) 0, 2" in machine.failure.reason
    assert machine.failure.stage is Stage.JOIN


def test_messages_of_another_attempt_change_nothing() -> None:
    machine = CoordinatorMachine(attempt=ATTEMPT, world_size=1, release="1")
    machine.handle(Join(rank=0, release="1", inventory=()))
    assert machine.handle(Stored(attempt="older", rank=0, manifest=RECORD)) == []
    assert machine.state is CoordinatorState.STORING


def test_a_failure_during_the_commit_only_ends_the_waiting_for_it() -> None:
    machine = CoordinatorMachine(attempt=ATTEMPT, world_size=1, release="1")
    machine.handle(Join(rank=0, release="1", inventory=()))
    machine.handle(Staged(attempt=ATTEMPT, rank=0))
    assert machine.handle(Stored(attempt=ATTEMPT, rank=0, manifest=RECORD)) == [
        WriteCommit((RECORD,))
    ]
    cancelled = Failed(attempt=ATTEMPT, rank=0, failure=failure(Stage.CANCEL))
    assert machine.handle(cancelled) == [StopCommit("broken", has_grace=True)]
    assert machine.handle(DeadlinePassed(1.0)) == [
        StopCommit("timeout_s=1 is over", has_grace=False)
    ]
    assert machine.handle(CommitWritten()) == [SendToRank(0, Committed(attempt=ATTEMPT))]


def test_objects_stay_if_the_commit_may_be_visible() -> None:
    machine = ParticipantMachine(rank=0, release="1")
    machine.handle(Begun(()))
    commands = machine.handle(
        Aborted(attempt=ATTEMPT, failure=failure(Stage.COMMIT, may_be_visible=True))
    )
    assert not any(isinstance(command, DiscardObjects) for command in commands)
    assert isinstance(commands[-1], Finish)


def test_an_impossible_event_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="CommitWritten while joining"):
        CoordinatorMachine(attempt=ATTEMPT, world_size=1, release="1").handle(CommitWritten())
    with pytest.raises(ProtocolViolation, match="ChunkStored while new"):
        ParticipantMachine(rank=0, release="1").handle(ChunkStored(0))
