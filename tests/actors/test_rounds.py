# SPDX-License-Identifier: Apache-2.0
"""Ranks that pass rounds together, and share what they read, under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio.testing

from actorsnap.actors.abandonable import AbandonableTasks
from actorsnap.actors.rounds import CoordinatorActor, ParticipantActor
from actorsnap.errors import ActorSnapError, RestoreAborted, StorageError
from actorsnap.format.checksum import block_checksums, choose_block_bytes
from actorsnap.format.manifest import Stored
from actorsnap.planning.restore import Part, Range
from actorsnap.planning.shared_reads import (
    RankSet,
    ReadInterest,
    ReadMode,
    SharedTurn,
    digest_ranges,
    plan_shared_reads,
    rank_set,
    split_ranges,
)
from actorsnap.protocol.failure import (
    Failure,
    Stage,
    explain_coordinator_loss,
    explain_loss,
    restore_aborted,
)
from actorsnap.protocol.rounds import Continue, Coordinator, Participant
from actorsnap.runtime.shared_reads import NUM_BUFFERS, SharedRange, SharedReadActor
from actorsnap.state.sources import HostMemory
from actorsnap.transport.ends import Message, PeerLost, RelayedCoordinator, RelayedEnds

T = TypeVar("T")
MIB = 1 << 20
PIECE = 2 * MIB


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def run_inline(fn: Callable[..., T], /, *args: Any) -> T:
    await anyio.lowlevel.checkpoint()
    return fn(*args)


class World:
    """Ranks with their members; each runs ``body`` and keeps what it ended with."""

    def __init__(self, num_ranks: int, num_rounds: int, timeout_s: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self.ends = [RelayedEnds(self, rank=rank) for rank in range(num_ranks)]
        self.stage = Stage.JOIN
        self.coordinator = CoordinatorActor(
            machine=Coordinator(world_size=num_ranks),
            end=self.coordinator_end,
            decisions=self,
            aborted=restore_aborted,
            timeout_s=timeout_s,
        )
        self.participants = [
            ParticipantActor(
                machine=Participant(rank=rank),
                end=self.ends[rank].participant,
                aborted=restore_aborted,
                timeout_s=timeout_s,
            )
            for rank in range(num_ranks)
        ]
        self.num_rounds = num_rounds
        self.outcomes: dict[int, str | None] = {}
        self.ended_at: dict[int, float] = {}

    @property
    def coordinator_end(self) -> RelayedCoordinator:
        end = self.ends[0].coordinator
        assert end is not None
        return end

    def post(self, to: int | None, message: Message) -> None:
        self.ends[to or 0].put(to is None, message)

    async def suspicion(self) -> str | None:
        return None

    def lose(self, rank: int) -> None:
        """As a transport says it to the coordinator."""
        self.coordinator_end.put(PeerLost(rank=rank, silent_s=30.0))

    def lose_coordinator(self) -> None:
        """As a transport says it to the ranks."""
        for ends in self.ends:
            ends.participant.put(PeerLost(rank=0, silent_s=30.0))

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Continue:
        self.stage = Stage.READ
        return Continue(common=b"".join(payloads.values()), is_last=round == self.num_rounds - 1)

    def close(self) -> None:
        for ends in self.ends:
            ends.close()

    async def run(
        self,
        body: Callable[[int, ParticipantActor], Awaitable[None]],
        *,
        without: Sequence[int] = (),
        has_coordinator: bool = True,
    ) -> None:
        async def run_rank(rank: int) -> None:
            participant = self.participants[rank]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(participant.run)
                try:
                    await body(rank, participant)
                except Exception as error:
                    while isinstance(error, ExceptionGroup):
                        error = error.exceptions[0]
                    if not isinstance(error, ActorSnapError):
                        raise
                    if participant.verdict is None:
                        await participant.fail(
                            Failure.of(error, stage=participant.stage, rank=rank)
                        )
                    self.outcomes[rank] = str(participant.verdict)
                else:
                    self.outcomes[rank] = None
                self.ended_at[rank] = anyio.current_time()

        begun_at = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            if has_coordinator:
                tasks.start_soon(self.coordinator.run)
            for rank in range(self.num_ranks):
                if rank not in without:
                    tasks.start_soon(run_rank, rank)
        self.close()
        self.took_s = max(self.ended_at.values()) - begun_at


async def test_nobody_is_ahead() -> None:
    world = World(4, num_rounds=5)
    at = [0] * 4

    async def body(rank: int, participant: ParticipantActor) -> None:
        for number in range(5):
            await participant.perform(lambda: anyio.sleep(random.random()))
            at[rank] = number + 1
            assert await participant.arrive(bytes([rank])) == bytes(range(4))
            assert min(at) >= number + 1

    await world.run(body)
    assert world.outcomes == dict.fromkeys(range(4))


async def test_a_failure_ends_the_work_of_all() -> None:
    world = World(3, num_rounds=2)

    async def body(rank: int, participant: ParticipantActor) -> None:
        if rank == 1:
            raise StorageError(op="get", key="k", backend="b")
        await participant.perform(anyio.sleep_forever)

    await world.run(body)
    assert set(world.outcomes.values()) == {"StorageError (get of 'k' in b)"}
    assert set(world.outcomes) == {0, 1, 2}
    assert world.took_s == 0


async def test_who_never_comes_is_named_by_the_deadline() -> None:
    world = World(3, num_rounds=1, timeout_s=60.0)

    async def body(rank: int, participant: ParticipantActor) -> None:
        await participant.arrive()

    await world.run(body, without=[2])
    assert "still waiting for rank 2. " in str(world.outcomes[0])
    assert world.outcomes[0] == world.outcomes[1]
    assert world.took_s == 60


async def test_without_rank_0_all_end_by_themselves() -> None:
    world = World(3, num_rounds=1, timeout_s=60.0)

    async def body(rank: int, participant: ParticipantActor) -> None:
        await participant.arrive()

    await world.run(body, without=[0], has_coordinator=False)
    assert "rank 0, the coordinator, does not answer" in str(world.outcomes[1])
    assert world.outcomes[1] == world.outcomes[2]
    assert world.took_s == 64


@pytest.mark.parametrize("who", ["rank", "coordinator"])
async def test_who_is_lost_is_named(who: str) -> None:
    world = World(3, num_rounds=2)
    lost = 2 if who == "rank" else 0

    async def body(rank: int, participant: ParticipantActor) -> None:
        await participant.arrive(then=Stage.READ)
        if rank == 1 and who == "rank":
            world.lose(2)
        elif rank == 1:
            world.lose_coordinator()
        await participant.perform(anyio.sleep_forever)

    await world.run(body, has_coordinator=True)
    said = str(world.outcomes[1])
    assert said.startswith(f"restore aborted: rank {lost}")
    assert "sent nothing for 30 s" in said
    assert said.endswith(f"(rank {lost}, stage 'read')")
    assert len(set(world.outcomes.values())) == 1


@pytest.mark.parametrize("reason", [explain_loss(0, 0.0), explain_coordinator_loss(0.0)])
def test_who_has_left_was_not_silent(reason: str) -> None:
    """It said so: seconds of silence would send people looking for a network."""
    assert reason.startswith("rank 0")
    assert reason.endswith("has left: its process ended")


async def test_a_coordinator_that_was_given_up_passes_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it alone would have restored."""
    world = World(2, num_rounds=1)

    async def suspicion() -> str:
        return "it was stopped"

    async def body(rank: int, participant: ParticipantActor) -> None:
        if rank == 0:  # its arrival is the last
            await anyio.sleep(1)
            monkeypatch.setattr(world.coordinator._end, "suspicion", suspicion)
        await participant.arrive()

    await world.run(body)
    reason = "restore aborted: it was stopped (rank 0, stage 'join')"
    assert world.outcomes == {0: reason, 1: reason}


# Shared reading


class Passing:
    """Broadcasts between some ranks of one process; each needs all of them, in one order."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._here: dict[int, tuple[memoryview, int]] = {}
        self._all = anyio.Event()
        self.num_passed = 0
        self.num_met = 0
        self._met = anyio.Event()

    async def meet(self) -> None:
        self.num_met += 1
        if self.num_met == self._num_ranks:
            self._met.set()
        await self._met.wait()

    async def broadcast(self, rank: int, memory: memoryview, source: int) -> None:
        assert self.num_met == self._num_ranks
        self._here[rank] = memory, source
        everybody = self._all
        if len(self._here) == self._num_ranks:
            here, self._here, self._all = self._here, {}, anyio.Event()
            assert len({(len(view), source) for view, source in here.values()}) == 1
            for view, _ in here.values():
                view[:] = here[source][0]
            self.num_passed += 1
            everybody.set()
        await everybody.wait()

    def of(self, rank: int) -> Any:
        return Peer(self, rank)

    @property
    def num_waiting(self) -> int:
        return len(self._here)


class Peer(NamedTuple):
    """One rank's end, in place of its ``Broadcaster``."""

    passing: Passing
    rank: int

    async def meet(self) -> None:
        await self.passing.meet()

    async def broadcast(self, memory: memoryview, source: int) -> None:
        await self.passing.broadcast(self.rank, memory, source)


class SharedWorld(World):
    """Ranks that want ranges of one object, twice in their memory.

    Args:
        sets: Ranks that want the same, and their ranges' sizes; they share in turns, as planned.
    """

    def __init__(self, num_ranks: int, sets: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        rng = np.random.default_rng(7)
        total = sum(sum(sizes) for sizes in sets.values())
        self.object = rng.integers(0, 256, total, np.uint8)
        self.stored: dict[RankSet, list[Stored]] = {}
        at = 0
        self.members = {rank_set(members): members for members in sets}
        for members, sizes in sets.items():
            stored = self.stored[rank_set(members)] = []
            for size in sizes:
                block_bytes = choose_block_bytes(size, is_shard=True)
                crc = block_checksums(self.object[at : at + size].data, block_bytes)
                stored.append(Stored(0, at, at + size, crc))
                at += size
        interests = [
            ReadInterest(
                tuple(
                    digest_ranges("k", ranks, ranges_of(self.stored[ranks]))
                    for members in sets
                    for ranks in [rank_set(members)]
                    if rank in members
                ),
                PIECE,
                "",
            )
            for rank in range(num_ranks)
        ]
        self.plans = plan_shared_reads(interests, ReadMode.SHARED)
        super().__init__(num_ranks, self.plans[0].num_rounds + 1)
        self.passing = {
            (turn, members): Passing(len(members))
            for turn in range(len(self.plans[0].turns))
            for members in sets
        }
        self.targets = [np.zeros((2, total), np.uint8) for _ in range(num_ranks)]
        self.bytes_read = [0] * num_ranks
        self.reads = 0
        self.fail_at = -1

    def pieces(self, turn: SharedTurn) -> list[list[list[Part]]]:
        assert turn.ranks is not None
        ranges = ranges_of(self.stored[turn.ranks])
        return split_ranges(ranges, num_readers=turn.ranks.num_ranks, num_rounds=turn.num_rounds)

    async def read(self, rank: int, wanted: Sequence[tuple[Stored, memoryview]]) -> None:
        self.reads += 1
        if self.reads == self.fail_at:
            raise StorageError(op="read", key="o", backend=f"of rank {rank}")
        await anyio.sleep(random.random())
        for stored, memory in wanted:
            memory[:] = self.object[stored.start : stored.stop].tobytes()
            assert block_checksums(memory, stored.block_bytes) == stored.crc32c
            self.bytes_read[rank] += len(memory)

    async def body(self, rank: int, participant: ParticipantActor) -> None:
        async def read(wanted: Sequence[tuple[Stored, memoryview]]) -> None:
            await self.read(rank, wanted)

        async def exchange() -> None:
            for number, turn in enumerate(self.plans[rank].turns):
                if turn.ranks is None:
                    for _ in range(turn.num_rounds):
                        await participant.arrive()
                    continue
                members = self.members[turn.ranks]
                position = members.index(rank)
                ranges = [
                    SharedRange(
                        stored,
                        [
                            HostMemory(
                                row.ctypes.data + stored.start, stored.stop - stored.start, row
                            )
                            for row in self.targets[rank]
                        ],
                    )
                    for stored in self.stored[turn.ranks]
                ]
                async with anyio.create_task_group() as tasks:
                    await SharedReadActor(
                        ranges=ranges,
                        pieces=self.pieces(turn),
                        rank=position,
                        memory=memoryview(bytearray(NUM_BUFFERS * PIECE)),
                        read=read,
                        peers=self.passing[number, members].of(position),
                        arrive=participant.arrive,
                        run_blocking=run_inline,
                        errands=AbandonableTasks(
                            tasks, run_blocking=run_inline, label=f"rank {rank}"
                        ),
                    ).run()

        await participant.perform(exchange)
        await participant.arrive()

    def check(self) -> None:
        """Each rank has what it wants, and each set has read its bytes once."""
        assert self.outcomes == dict.fromkeys(range(self.num_ranks))
        wanted = np.zeros((self.num_ranks, len(self.object)), bool)
        for ranks, stored in self.stored.items():
            for rank in self.members[ranks]:
                for one in stored:
                    wanted[rank, one.start : one.stop] = True
        for rank, target in enumerate(self.targets):
            assert (target == np.where(wanted[rank], self.object, 0)).all()
        assert sum(self.bytes_read) == len(self.object)


def ranges_of(stored: Sequence[Stored]) -> list[Range]:
    return [Range("o", one.start, one.stop) for one in stored]


def everybody(num_ranks: int) -> SharedWorld:
    return SharedWorld(num_ranks, {tuple(range(num_ranks)): SIZES})


SIZES = [3, 5 * MIB + 1, 0, MIB, 9 * MIB, *[1000] * 50]


@pytest.mark.parametrize("num_ranks", [2, 5])
async def test_what_all_want_is_read_once(num_ranks: int) -> None:
    world = everybody(num_ranks)
    await world.run(world.body)
    world.check()
    assert max(world.bytes_read) <= len(world.object) / num_ranks * 1.1 + MIB


async def test_what_the_ranks_of_a_set_want_is_read_once() -> None:
    """Sets of a mesh, in the same rounds; a set of all; some that overlap, and one rank less."""
    world = SharedWorld(
        7,
        {
            (0, 2, 4): SIZES,
            (1, 3, 5): [2 * MIB, 5],
            (0, 1, 2, 3, 4, 5): [7 * MIB, 3],
            (4, 5): [MIB + 1],
            (3, 4): [3 * MIB],
        },
    )
    turns = zip(*[plan.turns for plan in world.plans], strict=True)
    assert [len({part.ranks for part in turn} - {None}) for turn in turns] == [1, 2, 1, 1]
    await world.run(world.body)
    world.check()
    assert world.bytes_read[6] == 0


async def test_a_read_that_fails_in_one_set_fails_everywhere() -> None:
    world = SharedWorld(4, {(0, 2): [9 * MIB], (1, 3): [9 * MIB]})
    world.fail_at = 6
    with anyio.fail_after(100):
        await world.run(world.body)
    (outcome,) = set(world.outcomes.values())
    assert "read of 'o' in of rank" in str(outcome)
    assert set(world.outcomes) == {0, 1, 2, 3}


async def test_a_read_that_fails_fails_everywhere_and_leaves_nobody_behind() -> None:
    """Whichever read fails: nobody waits in a broadcast, and no round is passed on in part."""
    fail_at = 1
    while True:
        world = everybody(3)
        passing = world.passing[0, (0, 1, 2)]
        world.fail_at = fail_at
        with anyio.fail_after(100):
            await world.run(world.body)
        assert passing.num_waiting == 0
        assert set(world.outcomes) == {0, 1, 2}
        (outcome,) = set(world.outcomes.values())
        if outcome is None:
            break
        assert "read of 'o' in of rank" in outcome
        pieces = world.pieces(world.plans[0].turns[0])
        filled = [sum(map(bool, pieces_of_round)) for pieces_of_round in pieces]
        whole_rounds = [sum(filled[:end]) for end in range(len(filled))]
        assert passing.num_passed in whole_rounds
        fail_at += 1
    assert fail_at > 12


async def test_a_rank_that_dies_in_a_broadcast_is_left() -> None:
    world = everybody(3)

    async def body(rank: int, participant: ParticipantActor) -> None:
        if rank == 2:  # it reads, and says so, but does not pass on
            await participant.arrive()
            await anyio.sleep(30)
            world.lose(2)
            await participant.perform(anyio.sleep_forever)
        await world.body(rank, participant)

    await world.run(body)
    assert {type(outcome) for outcome in world.outcomes.values()} == {str}
    (outcome,) = set(world.outcomes.values())
    assert "restore aborted: rank 2" in str(outcome)
    assert 30 <= world.took_s < 34


async def test_abandoned_here_and_now() -> None:
    world = World(2, num_rounds=1)
    participant = world.participants[1]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(participant.run)
        await anyio.lowlevel.checkpoint()
        participant.abandon(restore_aborted("the runtime was stopped", Stage.JOIN, None))
        with pytest.raises(RestoreAborted, match="the runtime was stopped"):
            await participant.arrive()
        tasks.cancel_scope.cancel()
    world.close()
