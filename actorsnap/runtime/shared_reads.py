"""The reads of each rank in a restore, for itself or for others (``planning.exchange``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from actorsnap.actors.budget import Purpose
from actorsnap.actors.fetcher import RangeRequest
from actorsnap.actors.shared_reads import NUM_BUFFERS, Common, ExchangeActor
from actorsnap.format.manifest import Stored
from actorsnap.options import chunk_within
from actorsnap.planning.compressed_ranges import chunk_maps
from actorsnap.planning.index import Index
from actorsnap.planning.restore import Part, Range, plan_reads
from actorsnap.planning.shared_reads import (
    ReadInterest,
    ReadPlan,
    ReadShare,
    Runs,
    cut,
    runs_of,
    shares_of,
    want_of,
)
from actorsnap.protocol.restore import Weighed
from actorsnap.runtime.broadcast import Broadcaster, obstacle
from actorsnap.runtime.host import Host
from actorsnap.runtime.reading import fetch_wanted, mark
from actorsnap.runtime.source import Source
from actorsnap.runtime.team import Team
from actorsnap.runtime.tracing import Observation
from actorsnap.state.restore import KeyRestore, Wanted
from actorsnap.state.sources import ByteSink, MemorySink

__all__ = ["Reading"]

_Place: TypeAlias = tuple[str, Runs | None]
"""Key and ranks of a ``Want``."""


class Reading:
    """One rank's reads for a restore.

    Args:
        index: The index of the snapshot.
        parts: By escaped top-level key.
        team: The ranks that restore; None for a single rank.
        observation: Records work and waits.
    """

    def __init__(
        self,
        source: Source,
        index: Index,
        parts: Mapping[str, KeyRestore],
        team: Team | None,
        observation: Observation,
    ) -> None:
        self._source = source
        self._index = index
        self._parts = parts
        self._team = team
        self._observation = observation
        self._positions: dict[int, int] = {}
        if team is not None:
            self._positions = {rank: number for number, rank in enumerate(team.ranks)}
        self._commons = self._find_commons()

    @property
    def bytes_needed(self) -> int:
        """Bytes to put into the app state."""
        wanted = sum(_size(want) for part in self._parts.values() for want in part.reads)
        return wanted - sum(part.surplus_bytes for part in self._parts.values())

    def wants(self, host: Host) -> ReadInterest:
        """Returns this rank's message about shared wants."""
        # The buffers of an exchange must fit into the budget.
        piece_bytes = chunk_within(
            self._source.options.chunk_bytes, host.resources.budget.limit_bytes // NUM_BUFFERS
        )
        alike = [want_of(*place, self._ranges(own)) for place, own in self._commons.items()]
        return ReadInterest(tuple(alike), piece_bytes, obstacle())

    async def read(
        self, host: Host, plan: ReadPlan, arrive: Callable[[], Awaitable[object]], scope: str
    ) -> None:
        """Reads everything.

        Args:
            arrive: Waits until all ranks have arrived at the next round.
            scope: See ``transport.store.StoreSave``.

        Raises:
            ChecksumMismatch, StorageError: see ``Snapshot.restore``.
        """
        mark(self._parts.values())
        for number, share in enumerate(self._shares(plan)):
            if share.members:
                await self._exchange(host, plan, share, arrive, f"{scope}/{number}")
            else:
                for _ in range(share.num_rounds):
                    await arrive()
        await fetch_wanted(
            host,
            self._source,
            self._index,
            self._rest(plan),
            observation=self._observation,
        )

    def weigh(self, host: Host, plan: ReadPlan) -> Weighed:
        """Returns the cost of ``read``. Blocks; for worker threads."""
        rest = [
            Range(self._key(want.stored), want.stored.start, want.stored.stop, _in_place(want))
            for want in self._rest(plan)
        ]
        batches = [rest]
        for share in self._shares(plan):
            if share.members:
                assert self._team is not None
                position = share.members.index(self._team.rank)
                commons = self._shared(share)
                pieces = self._pieces(share, commons)[position :: len(share.members)]
                batches += [self._cut_ranges(commons, piece) for piece in pieces]
        options = self._source.options
        reads = [
            read
            for ranges in batches
            for read in plan_reads(
                ranges,
                chunk_bytes=chunk_within(options.chunk_bytes, host.resources.budget.limit_bytes),
                max_gap_bytes=options.max_gap_bytes,
            )
        ]
        chunks = chunk_maps(self._index.objects)
        bytes_read = num_requests = 0
        for read in reads:
            if read.key in chunks:
                for extent in chunks[read.key].extents(read.start, read.stop):
                    bytes_read += extent.size
                    num_requests += 1
            else:
                bytes_read += read.stop - read.start
                num_requests += 1
        return Weighed(self.bytes_needed, bytes_read, num_requests)

    def _find_commons(self) -> dict[_Place, list[Common]]:
        """Returns ranges that other ranks are likely to want, each once, in a common order."""
        sinks: dict[_Place, dict[tuple[str, int, int], tuple[Stored, list[ByteSink]]]] = {}
        for key, part in self._parts.items():
            for want in part.reads:
                place = self._place(key, want)
                if place is not None and _size(want):
                    stored = want.stored
                    at = self._key(stored), stored.start, stored.stop
                    found = sinks.setdefault(place, {})
                    found.setdefault(at, (stored, []))[1].append(want.sink)
        return {
            place: [Common(*found[at]) for at in sorted(found)] for place, found in sinks.items()
        }

    def _place(self, key: str, want: Wanted) -> _Place | None:
        """Ranks likely to want the same range; None if only this rank does."""
        if self._team is None or want.holders == ():
            return None
        if want.holders is None:
            return key, None
        # Some ranks of a mesh may not restore.
        members = sorted(self._positions[rank] for rank in want.holders if rank in self._positions)
        if len(members) < 2:
            return None
        return key, None if len(members) == len(self._positions) else runs_of(members)

    def _key(self, stored: Stored) -> str:
        return self._index.objects[stored.object].key

    def _ranges(self, commons: Iterable[Common]) -> list[Range]:
        return [Range(self._key(one.stored), one.stored.start, one.stored.stop) for one in commons]

    def _cut_ranges(self, commons: Sequence[Common], piece: Iterable[Part]) -> list[Range]:
        found = []
        for part in piece:
            stored = commons[part.request].stored
            begin = stored.start
            found.append(Range(self._key(stored), begin + part.start, begin + part.stop))
        return found

    def _shares(self, plan: ReadPlan) -> list[ReadShare]:
        team = self._team
        return [] if team is None else shares_of(plan, team.rank, team.world_size)

    def _shared(self, share: ReadShare) -> list[Common]:
        return [one for key in share.keys for one in self._commons[key, share.ranks]]

    def _rest(self, plan: ReadPlan) -> list[Wanted]:
        shared = {(key, share.ranks) for share in self._shares(plan) for key in share.keys}
        return [
            want
            for key, part in self._parts.items()
            for want in part.reads
            if self._place(key, want) not in shared
        ]

    def _pieces(self, share: ReadShare, commons: Sequence[Common]) -> list[tuple[Part, ...]]:
        return cut(
            self._ranges(commons),
            num_readers=len(share.members),
            num_rounds=share.num_rounds,
        )

    async def _exchange(
        self,
        host: Host,
        plan: ReadPlan,
        share: ReadShare,
        arrive: Callable[[], Awaitable[object]],
        scope: str,
    ) -> None:
        source, team = self._source, self._team
        assert team is not None
        commons = self._shared(share)
        rank = share.members.index(team.rank)
        observation = self._observation
        opened = source.opened(host, "read", self._index.attempt, observation.on_retry)
        async with opened as (storage, _, errands):
            fetcher = source.fetcher(host, storage, recorder=observation.recorder)

            async def read(wanted: Sequence[tuple[Stored, memoryview]]) -> None:
                requests = []
                for stored, memory in wanted:
                    raw = np.frombuffer(memory, np.uint8)
                    sink = MemorySink(raw.ctypes.data, len(memory), raw)
                    requests.append(RangeRequest(self._index, stored, sink))
                await fetcher.fetch(requests)

            # One lease for all buffers: with two, the second might wait for ever.
            lease = await host.resources.budget.lease(
                NUM_BUFFERS * plan.piece_bytes, Purpose.READING
            )

            is_done = False
            broadcaster = Broadcaster(
                host,
                team.connection,
                name=f"{scope}/{share.members[0]}",
                rank=rank,
                num_ranks=len(share.members),
                lost_after_s=source.options.lost_after_s,
            )

            async def end() -> None:
                lease.release()
                await broadcaster.close(is_done=is_done)

            try:
                await ExchangeActor(
                    commons=commons,
                    pieces=self._pieces(share, commons),
                    rank=rank,
                    num_ranks=len(share.members),
                    memory=lease.view,
                    read=read,
                    meet=broadcaster.meet,
                    broadcast=broadcaster,
                    arrive=arrive,
                    run_blocking=host.run_blocking,
                    errands=errands,
                ).run()
                is_done = True
            finally:
                # An abandoned broadcast may still write to the memory.
                await errands.clean_up(end)


def _size(want: Wanted) -> int:
    return want.stored.stop - want.stored.start


def _in_place(want: Wanted) -> bool:
    return want.sink.is_addressable
