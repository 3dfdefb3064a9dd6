"""Ranks that pass steps together, and share what they read, under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio.testing

from actorsnap.actors.errands import Errands
from actorsnap.actors.exchange import NUM_BUFFERS, Common, ExchangeActor
from actorsnap.actors.gathering import GatheringActor, MemberActor
from actorsnap.errors import ActorSnapError, RestoreAborted, StorageError
from actorsnap.format.checksum import block_checksums, choose_block_bytes
from actorsnap.format.manifest import Stored
from actorsnap.planning.exchange import count_rounds, cut
from actorsnap.planning.restore import Range
from actorsnap.protocol.gathering import Decision, GatheringMachine, MemberMachine
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.state.tensors import MemorySink
from actorsnap.transport.base import Lost
from actorsnap.transport.inproc import InprocTransport

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

    def __init__(self, num_ranks: int, num_steps: int, timeout_s: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self.transport = InprocTransport(num_ranks)
        self.gathering = GatheringActor(
            machine=GatheringMachine(world_size=num_ranks, decide=self.decide),
            end=self.transport.coordinator(),
            timeout_s=timeout_s,
        )
        self.members = [
            MemberActor(
                machine=MemberMachine(rank=rank),
                end=self.transport.participant(rank),
                timeout_s=timeout_s,
            )
            for rank in range(num_ranks)
        ]
        self.num_steps = num_steps
        self.outcomes: dict[int, str | None] = {}
        self.ended_at: dict[int, float] = {}

    def lose(self, rank: int) -> None:
        """As a transport says it to the coordinator."""
        self.transport._up_send.send_nowait(Lost(rank=rank, silent_s=30.0))  # type: ignore[arg-type]

    def lose_coordinator(self) -> None:
        """As a transport says it to the ranks."""
        for send, _ in self.transport._down:
            send.send_nowait(Lost(rank=0, silent_s=30.0))  # type: ignore[arg-type]

    def decide(self, step: int, payloads: Sequence[bytes]) -> Decision:
        return Decision(Stage.READ if step < self.num_steps - 1 else None, b"".join(payloads))

    async def run(
        self,
        body: Callable[[int, MemberActor], Awaitable[None]],
        *,
        without: Sequence[int] = (),
        has_coordinator: bool = True,
    ) -> None:
        async def run_rank(rank: int) -> None:
            member = self.members[rank]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(member.run)
                try:
                    await body(rank, member)
                except Exception as error:
                    while isinstance(error, ExceptionGroup):
                        error = error.exceptions[0]
                    if not isinstance(error, ActorSnapError):
                        raise
                    if member.verdict is None:
                        await member.fail(Failure.of(error, stage=member.stage, rank=rank))
                    self.outcomes[rank] = str(member.verdict)
                else:
                    self.outcomes[rank] = None
                self.ended_at[rank] = anyio.current_time()

        begun_at = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            if has_coordinator:
                tasks.start_soon(self.gathering.run)
            for rank in range(self.num_ranks):
                if rank not in without:
                    tasks.start_soon(run_rank, rank)
        self.transport.close()
        self.took_s = max(self.ended_at.values()) - begun_at


async def test_nobody_is_ahead() -> None:
    world = World(4, num_steps=5)
    at = [0] * 4

    async def body(rank: int, member: MemberActor) -> None:
        for step in range(5):
            await member.perform(lambda: anyio.sleep(random.random()))
            at[rank] = step + 1
            assert await member.arrive(bytes([rank])) == bytes(range(4))
            assert min(at) >= step + 1

    await world.run(body)
    assert world.outcomes == dict.fromkeys(range(4))


async def test_a_failure_ends_the_work_of_all() -> None:
    world = World(3, num_steps=2)

    async def body(rank: int, member: MemberActor) -> None:
        if rank == 1:
            raise StorageError(op="get", key="k", backend="b")
        await member.perform(anyio.sleep_forever)

    await world.run(body)
    assert set(world.outcomes.values()) == {"get of 'k' in b failed: StorageError"}
    assert set(world.outcomes) == {0, 1, 2}
    assert world.took_s == 0


async def test_who_never_comes_is_named_by_the_deadline() -> None:
    world = World(3, num_steps=1, timeout_s=60.0)

    async def body(rank: int, member: MemberActor) -> None:
        await member.arrive()

    await world.run(body, without=[2])
    assert "still waiting for rank(s) 2" in str(world.outcomes[0])
    assert world.outcomes[0] == world.outcomes[1]
    assert world.took_s == 60


async def test_without_rank_0_all_end_by_themselves() -> None:
    world = World(3, num_steps=1, timeout_s=60.0)

    async def body(rank: int, member: MemberActor) -> None:
        await member.arrive()

    await world.run(body, without=[0], has_coordinator=False)
    assert "rank 0, which coordinates, does not answer" in str(world.outcomes[1])
    assert world.outcomes[1] == world.outcomes[2]
    assert world.took_s == 70


@pytest.mark.parametrize("who", ["rank", "coordinator"])
async def test_who_is_lost_is_named(who: str) -> None:
    world = World(3, num_steps=2)
    lost = 2 if who == "rank" else 0

    async def body(rank: int, member: MemberActor) -> None:
        await member.arrive()
        if rank == 1 and who == "rank":
            world.lose(2)
        elif rank == 1:
            world.lose_coordinator()
        await member.perform(anyio.sleep_forever)

    await world.run(body, has_coordinator=True)
    assert f"restore aborted on rank {lost} in stage 'read'" in str(world.outcomes[1])
    assert "not heard for 30 s" in str(world.outcomes[1])
    assert len(set(world.outcomes.values())) == 1


# Shared reading


class Passing:
    """A broadcast between the ranks of one process; it needs all of them, in one order."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._here: dict[int, tuple[memoryview, int]] = {}
        self._all = anyio.Event()
        self.num_passed = 0

    def of(self, rank: int) -> Callable[[memoryview, int], Awaitable[None]]:
        async def broadcast(memory: memoryview, source: int) -> None:
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

        return broadcast

    @property
    def num_waiting(self) -> int:
        return len(self._here)


class SharedWorld(World):
    """All ranks want the same ranges of one object, twice in their memory."""

    def __init__(self, num_ranks: int, sizes: Sequence[int]) -> None:
        total = sum(sizes)
        num_rounds = count_rounds(total, num_readers=num_ranks, piece_bytes=PIECE)
        super().__init__(num_ranks, num_rounds + 1)
        rng = np.random.default_rng(7)
        self.object = rng.integers(0, 256, total, np.uint8)
        self.stored: list[Stored] = []
        at = 0
        for size in sizes:
            block_bytes = choose_block_bytes(size, is_shard=True)
            crc = block_checksums(self.object[at : at + size].data, block_bytes)
            self.stored.append(Stored(0, at, at + size, crc))
            at += size
        ranges = [Range("o", one.start, one.stop) for one in self.stored]
        self.pieces = cut(ranges, num_readers=num_ranks, piece_bytes=PIECE)
        self.passing = Passing(num_ranks)
        self.targets = [np.zeros((2, total), np.uint8) for _ in range(num_ranks)]
        self.bytes_read = [0] * num_ranks
        self.reads = 0
        self.fail_at = -1

    async def read(self, rank: int, wanted: Sequence[tuple[Stored, memoryview]]) -> None:
        self.reads += 1
        if self.reads == self.fail_at:
            raise StorageError(op="read", key="o", backend=f"of rank {rank}")
        await anyio.sleep(random.random())
        for stored, memory in wanted:
            memory[:] = self.object[stored.start : stored.stop].tobytes()
            assert block_checksums(memory, stored.block_bytes) == stored.crc32c
            self.bytes_read[rank] += len(memory)

    async def body(self, rank: int, member: MemberActor) -> None:
        commons = [
            Common(
                stored,
                [
                    MemorySink(row.ctypes.data + stored.start, stored.stop - stored.start, row)
                    for row in self.targets[rank]
                ],
            )
            for stored in self.stored
        ]

        async def read(wanted: Sequence[tuple[Stored, memoryview]]) -> None:
            await self.read(rank, wanted)

        async def exchange() -> None:
            async with anyio.create_task_group() as tasks:
                await ExchangeActor(
                    commons=commons,
                    pieces=self.pieces,
                    rank=rank,
                    num_ranks=self.num_ranks,
                    memory=memoryview(bytearray(NUM_BUFFERS * PIECE)),
                    read=read,
                    broadcast=self.passing.of(rank),
                    arrive=member.arrive,
                    run_blocking=run_inline,
                    errands=Errands(tasks, run_blocking=run_inline, label=f"rank {rank}"),
                ).run()

        await member.perform(exchange)
        await member.arrive()


SIZES = [3, 5 * MIB + 1, 0, MIB, 9 * MIB, *[1000] * 50]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
async def test_what_all_want_is_read_once(num_ranks: int) -> None:
    world = SharedWorld(num_ranks, SIZES)
    await world.run(world.body)
    assert world.outcomes == dict.fromkeys(range(num_ranks))
    for target in world.targets:
        assert (target == world.object).all()
    assert sum(world.bytes_read) == len(world.object)
    assert max(world.bytes_read) <= len(world.object) / num_ranks * 1.1 + MIB


async def test_a_read_that_fails_fails_everywhere_and_leaves_nobody_behind() -> None:
    """Whichever read fails: nobody waits in a broadcast, and no round is passed on in part."""
    fail_at = 1
    while True:
        world = SharedWorld(3, SIZES)
        world.fail_at = fail_at
        with anyio.fail_after(100):
            await world.run(world.body)
        assert world.passing.num_waiting == 0
        assert set(world.outcomes) == {0, 1, 2}
        (outcome,) = set(world.outcomes.values())
        if outcome is None:
            break
        assert "read of 'o' in of rank" in outcome
        filled = [bool(piece) for piece in world.pieces]
        whole_rounds = [sum(filled[:end]) for end in range(0, len(filled), 3)]
        assert world.passing.num_passed in whole_rounds
        fail_at += 1
    assert fail_at > 12


async def test_a_rank_that_dies_in_a_broadcast_is_left() -> None:
    world = SharedWorld(3, SIZES)

    async def body(rank: int, member: MemberActor) -> None:
        if rank == 2:  # it reads, and says so, but does not pass on
            await member.arrive()
            await anyio.sleep(30)
            world.lose(2)
            await member.perform(anyio.sleep_forever)
        await world.body(rank, member)

    await world.run(body)
    assert {type(outcome) for outcome in world.outcomes.values()} == {str}
    (outcome,) = set(world.outcomes.values())
    assert "restore aborted on rank 2" in str(outcome)
    assert 30 <= world.took_s < 34


async def test_abandoned_here_and_now() -> None:
    world = World(2, num_steps=1)
    member = world.members[1]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await anyio.lowlevel.checkpoint()
        member.abandon("the runtime was stopped")
        with pytest.raises(RestoreAborted, match="the runtime was stopped"):
            await member.arrive()
        tasks.cancel_scope.cancel()
    world.transport.close()
