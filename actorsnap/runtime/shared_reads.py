# SPDX-License-Identifier: Apache-2.0
"""The reads of each rank in a restore (``planning.shared_reads``).

Ranges wanted by several ranks are read once: each rank reads pieces and sends them to the others,
only after every rank has read its own (a round of ``protocol.rounds``). So no rank waits for one
whose storage has failed. Reading, sending and copying overlap. Each set and turn has its own
``Broadcaster``: abandoned broadcasts are not confused with others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import anyio
import numpy as np

from actorsnap.actors.abandonable import AbandonableTasks
from actorsnap.actors.budget import Purpose
from actorsnap.actors.fetcher import FetcherPool, RangeRequest
from actorsnap.format.manifest import Stored
from actorsnap.options import chunk_within
from actorsnap.planning.index import Index
from actorsnap.planning.restore import Part, Range, chunk_maps, plan_reads
from actorsnap.planning.shared_reads import (
    RankSet,
    ReadInterest,
    SharedReadPlan,
    SharedTurn,
    digest_ranges,
    rank_set,
    split_ranges,
)
from actorsnap.protocol.restore import ReadCost
from actorsnap.runtime.bars import ByteCount
from actorsnap.runtime.broadcast import Broadcaster, obstacle
from actorsnap.runtime.host import Host
from actorsnap.runtime.source import Source
from actorsnap.runtime.team import Team
from actorsnap.runtime.tracing import Observation
from actorsnap.runtime.value_reading import fetch_wanted, mark
from actorsnap.state.restore.build import KeyRestore
from actorsnap.state.restore.reads import Reads, Wanted, slice_stored
from actorsnap.state.sources import ByteSink, HostMemory
from actorsnap.storage.base import RunBlocking

NUM_BUFFERS = 4
"""Two for the rank's own pieces, of this round and the next; two for others'."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedRange:
    """A range that all ranks of a set want, and its destinations here."""

    stored: Stored
    sinks: Sequence[ByteSink]


_Common: TypeAlias = tuple[str, RankSet]
"""A top-level key, and the ranks likely to want the same ranges."""


@dataclass(eq=False, repr=False)
class RestoreReads:
    """One rank's reads for a restore.

    Args:
        parts: By escaped top-level key.
        team: None for a single rank.

    Attributes:
        count: Bytes that were read or received, of ``bytes_needed``. Gaps count as well.
    """

    source: Source
    index: Index
    parts: Mapping[str, KeyRestore]
    team: Team | None
    observation: Observation

    def __post_init__(self) -> None:
        ranks = () if self.team is None else self.team.ranks
        self._positions = {rank: at for at, rank in enumerate(ranks)}
        self._sets: dict[tuple[int, ...] | None, RankSet | None] = {}
        self._members: dict[RankSet, list[int]] = {}
        self._shareable = self._find_shareable()
        self.count = ByteCount()

    @cached_property
    def bytes_needed(self) -> int:
        wanted = sum(part.memory.reads.nbytes for part in self.parts.values())
        return wanted - sum(part.memory.surplus_bytes for part in self.parts.values())

    def interest(self, host: Host) -> ReadInterest:
        """Returns the ranges that this rank could share."""
        # The buffers must fit into the budget.
        piece_bytes = chunk_within(
            self.source.options.chunk_bytes, host.resources.budget.limit_bytes // NUM_BUFFERS
        )
        digests = [
            digest_ranges(key, ranks, self._ranges(shareable))
            for (key, ranks), shareable in self._shareable.items()
        ]
        return ReadInterest(tuple(digests), piece_bytes, obstacle())

    async def read(
        self, host: Host, plan: SharedReadPlan, arrive: Callable[[], Awaitable[object]], scope: str
    ) -> None:
        """Reads shared ranges turn by turn, then the others.

        Args:
            arrive: Waits until all ranks arrive at the next round.
            scope: See ``transport.store.StoreSave``.
        """
        mark(self.parts.values())
        for number, turn in enumerate(plan.turns):
            if turn.ranks:
                await self._share(host, plan.piece_bytes, turn, arrive, f"{scope}/{number}")
            else:
                for _ in range(turn.num_rounds):
                    await arrive()
        await fetch_wanted(
            *(host, self.source, self.index, self._unshared(plan)),
            observation=self.observation,
            on_read=self.count.add,
        )

    def weigh(self, host: Host, plan: SharedReadPlan) -> ReadCost:
        """Returns the cost of ``read``. Blocks; for worker threads."""
        options = self.source.options
        chunk_bytes = chunk_within(options.chunk_bytes, host.resources.budget.limit_bytes)
        chunks = chunk_maps(self.index.objects)
        bytes_read = num_requests = 0
        for batch in self._batches(plan):
            for read in plan_reads(
                batch, chunk_bytes=chunk_bytes, max_gap_bytes=options.max_gap_bytes
            ):
                if read.key in chunks:
                    sizes = [e.size for e in chunks[read.key].extents(read.start, read.stop)]
                else:
                    sizes = [read.stop - read.start]
                bytes_read += sum(sizes)
                num_requests += len(sizes)
        return ReadCost(self.bytes_needed, bytes_read, num_requests)

    def _batches(self, plan: SharedReadPlan) -> Iterator[list[Range]]:
        for batch in self._unshared(plan).batches():
            yield [
                Range(self._key(w.stored), w.stored.start, w.stored.stop, w.sink.is_addressable)
                for w in batch
            ]
        for turn in plan.turns:
            if turn.ranks:
                ranges = self._ranges(self._shared(turn))
                pieces, rank = self._pieces(turn)
                for by_rank in pieces:
                    yield [_slice(ranges, part) for part in by_rank[rank]]

    def _find_shareable(self) -> dict[_Common, list[SharedRange]]:
        """Returns ranges that other ranks likely want, in a common order."""
        found: dict[_Common, dict[tuple[str, int, int], tuple[Stored, list[ByteSink]]]] = {}
        if len(self._positions) < 2:
            return {}
        for key, part in self.parts.items():
            for want in part.memory.reads:
                ranks, stored = self._ranks_alike(want), want.stored
                if ranks and want.nbytes:
                    at = self._key(stored), stored.start, stored.stop
                    by_place = found.setdefault((key, ranks), {})
                    by_place.setdefault(at, (stored, []))[1].append(want.sink)
        return {
            common: [SharedRange(*by_place[at]) for at in sorted(by_place)]
            for common, by_place in found.items()
        }

    def _ranks_alike(self, want: Wanted) -> RankSet | None:
        """Returns the ranks that likely want the same range; None if only this one."""
        if want.holders not in self._sets:
            # Some ranks of a mesh may not restore.
            holders = self._positions if want.holders is None else want.holders
            members = sorted(self._positions[r] for r in holders if r in self._positions)
            found = rank_set(members) if len(members) > 1 else None
            if found is not None:
                self._members[found] = members
            self._sets[want.holders] = found
        return self._sets[want.holders]

    def _shared(self, turn: SharedTurn) -> list[SharedRange]:
        assert turn.ranks is not None
        return [each for key in turn.keys for each in self._shareable[key, turn.ranks]]

    def _unshared(self, plan: SharedReadPlan) -> Reads:
        shared = {(key, turn.ranks) for turn in plan.turns for key in turn.keys}
        found = Reads()
        for key, part in self.parts.items():
            reads = part.memory.reads
            if any(key == of_key for of_key, _ in shared):
                found.parts += [w for w in reads if (key, self._ranks_alike(w)) not in shared]
            else:
                found.parts += reads.parts
        return found

    def _key(self, stored: Stored) -> str:
        return self.index.objects[stored.object].key

    def _ranges(self, shared: Iterable[SharedRange]) -> list[Range]:
        return [Range(self._key(s.stored), s.stored.start, s.stored.stop) for s in shared]

    def _pieces(self, turn: SharedTurn) -> tuple[list[list[list[Part]]], int]:
        assert self.team is not None
        assert turn.ranks is not None
        members = self._members[turn.ranks]
        ranges = self._ranges(self._shared(turn))
        pieces = split_ranges(ranges, num_readers=len(members), num_rounds=turn.num_rounds)
        return pieces, members.index(self.team.rank)

    async def _share(
        self,
        host: Host,
        piece_bytes: int,
        turn: SharedTurn,
        arrive: Callable[[], Awaitable[object]],
        scope: str,
    ) -> None:
        source, team, observation = self.source, self.team, self.observation
        assert team is not None
        assert turn.ranks is not None
        pieces, rank = self._pieces(turn)
        async with source.opened(host, "read", self.index.attempt, observation.on_retry) as opened:
            errands = opened.errands
            fetcher = opened.fetcher(recorder=observation.recorder)
            # One lease for all: a second one might wait for ever.
            lease = await host.resources.budget.lease(NUM_BUFFERS * piece_bytes, Purpose.READING)
            members = self._members[turn.ranks]
            broadcaster = Broadcaster(
                host,
                team.connection,
                name=f"{scope}/{members[0]}",
                rank=rank,
                num_ranks=len(members),
                lost_after_s=source.options.lost_after_s,
            )
            is_done = False

            async def end() -> None:
                lease.release()
                await broadcaster.close(is_done=is_done)

            try:
                await SharedReadActor(
                    ranges=self._shared(turn),
                    pieces=pieces,
                    rank=rank,
                    memory=lease.view,
                    read=partial(_fetch_into, fetcher, self.index),
                    peers=broadcaster,
                    arrive=arrive,
                    run_blocking=host.run_blocking,
                    errands=errands,
                    on_delivered=self.count.add,
                ).run()
                is_done = True
            finally:
                # An abandoned broadcast may still write to it.
                await errands.clean_up(end)


async def _fetch_into(
    fetcher: FetcherPool, index: Index, wanted: Sequence[tuple[Stored, memoryview]]
) -> None:
    requests = []
    for stored, memory in wanted:
        raw = np.frombuffer(memory, np.uint8)
        requests.append(RangeRequest(index, stored, HostMemory(raw.ctypes.data, len(memory), raw)))
    await fetcher.fetch(requests)


def _slice(ranges: Sequence[Range], part: Part) -> Range:
    whole = ranges[part.request]
    return Range(whole.key, whole.start + part.start, whole.start + part.stop)


@dataclass(eq=False, kw_only=True)
class SharedReadActor:
    """One rank's part in the reads of a set.

    Args:
        ranges: In the same order on all ranks.
        rank: Position of this rank in the set.
        memory: ``NUM_BUFFERS`` times the bytes of the largest piece.
        run_blocking: Copies pieces; always awaited, as the memory is the caller's.
        on_delivered: Gets the number of bytes that were copied; on any thread.
    """

    ranges: Sequence[SharedRange]
    pieces: Sequence[Sequence[Sequence[Part]]]
    rank: int
    memory: memoryview
    read: Callable[[Sequence[tuple[Stored, memoryview]]], Awaitable[None]]
    peers: Broadcaster
    arrive: Callable[[], Awaitable[object]]
    run_blocking: RunBlocking
    errands: AbandonableTasks
    on_delivered: Callable[[int], None] = lambda nbytes: None

    def __post_init__(self) -> None:
        size = len(self.memory) // NUM_BUFFERS
        buffers = [self.memory[at * size : (at + 1) * size] for at in range(NUM_BUFFERS)]
        self._own, self._theirs = buffers[:2], buffers[2:]
        self._error: Exception | None = None

    async def run(self) -> None:
        """Fills every sink.

        Raises:
            ChecksumMismatch, StorageError: Reading failed on this rank; raised after the pieces
                that others wait for are sent.
        Cancellation: Sinks hold any mixture. ``memory`` may be in use by errands.
        """
        if self.pieces:
            await self.errands.run(self._read_own, 0)
        for number in range(len(self.pieces)):
            await self.arrive()
            async with anyio.create_task_group() as tasks:
                if number + 1 < len(self.pieces):
                    tasks.start_soon(self._read_ahead, number + 1)
                if number == 0:
                    # Not earlier: after a failed read, the others would wait here too.
                    await self.errands.run(self.peers.meet)
                await self._exchange(number)
            if self._error is not None:
                raise self._error

    async def _read_ahead(self, number: int) -> None:
        try:
            await self.errands.run(self._read_own, number)
        except Exception as error:
            self._error = error

    async def _read_own(self, number: int) -> None:
        memory, at = self._own[number % 2], 0
        wanted: list[tuple[Stored, memoryview]] = []
        for part in self.pieces[number][self.rank]:
            stored = self.ranges[part.request].stored
            nbytes = part.stop - part.start
            wanted.append((slice_stored(stored, part.start, part.stop), memory[at : at + nbytes]))
            at += nbytes
        await self.read(wanted)

    async def _exchange(self, number: int) -> None:
        """Sends and receives the pieces of a round; copies each while the next one travels."""
        previous: tuple[Sequence[Part], memoryview] | None = None
        for source, parts in enumerate(self.pieces[number]):
            memory = self._memory(number, source, parts)
            if not memory:
                continue
            async with anyio.create_task_group() as tasks:
                if previous is not None:
                    tasks.start_soon(self.run_blocking, self._deliver, *previous)
                await self.errands.run(self.peers.broadcast, memory, source)
            previous = parts, memory
        if previous is not None:
            await self.run_blocking(self._deliver, *previous)

    def _memory(self, number: int, source: int, parts: Sequence[Part]) -> memoryview:
        nbytes = sum(part.stop - part.start for part in parts)
        if source == self.rank:
            return self._own[number % 2][:nbytes]
        if nbytes:
            self._theirs.reverse()  # the other buffer may still be copied from
        return self._theirs[0][:nbytes]

    def _deliver(self, parts: Sequence[Part], memory: memoryview) -> None:
        at = 0
        for part in parts:
            end = at + part.stop - part.start
            for sink in self.ranges[part.request].sinks:
                sink.copy_from(part.start, memory[at:end])
            at = end
        self.on_delivered(at)
