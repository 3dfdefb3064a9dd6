"""What the ranks of a restore read, each for itself or for all (``planning.exchange``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import numpy as np

from actorsnap.actors.exchange import NUM_BUFFERS, Common, ExchangeActor
from actorsnap.actors.reader import Request
from actorsnap.format.manifest import Stored
from actorsnap.options import chunk_within
from actorsnap.planning.exchange import ReadPlan, Want, Wants, cut, want_of
from actorsnap.planning.index import Index
from actorsnap.planning.restore import Part, Range, plan_reads
from actorsnap.protocol.negotiation import Weighed
from actorsnap.runtime.broadcast import Broadcaster, obstacle_of
from actorsnap.runtime.host import Host
from actorsnap.runtime.place import Source
from actorsnap.runtime.ranks import Team
from actorsnap.runtime.reading import fetch_wanted, mark
from actorsnap.state.restore import KeyRestore, Wanted
from actorsnap.state.tensors import ByteSink, MemorySink

__all__ = ["Reading"]


class Reading:
    """What one rank has to read for a restore.

    Args:
        index: Of the snapshot.
        parts: By escaped top-level key.
        team: Whose ranks restore; None where this is the only one.
    """

    def __init__(
        self, source: Source, index: Index, parts: Mapping[str, KeyRestore], team: Team | None
    ) -> None:
        self._source = source
        self._index = index
        self._parts = parts
        self._team = team
        self._ranks = () if team is None else tuple(sorted(team.ranks))
        self._commons: dict[str, list[Common]] = {}
        if team is not None:
            self._commons = {key: self._commons_of(part.reads) for key, part in parts.items()}

    @property
    def bytes_needed(self) -> int:
        """Bytes that are put into the app state."""
        wanted = sum(_size(want) for part in self._parts.values() for want in part.reads)
        return wanted - sum(part.surplus_bytes for part in self._parts.values())

    def wants(self, host: Host) -> Wants:
        """What to tell the others."""
        keys: list[Want] = []
        grouped_bytes, obstacle = 0, ""
        if self._team is not None:
            keys = [want_of(key, self._ranges(own)) for key, own in self._commons.items()]
            reads = (want for part in self._parts.values() for want in part.reads)
            grouped_bytes = sum(
                _size(want) for want in reads if want.holders and not self._is_common(want)
            )
            obstacle = obstacle_of(self._team.process_group)
        # The buffers of an exchange must fit into the budget.
        piece_bytes = chunk_within(
            self._source.options.chunk_bytes, host.budget.limit_bytes // NUM_BUFFERS
        )
        return Wants(tuple(keys), grouped_bytes, piece_bytes, obstacle)

    async def read(
        self, host: Host, plan: ReadPlan, arrive: Callable[[], Awaitable[object]]
    ) -> None:
        """Reads everything.

        Args:
            arrive: Waits until all ranks have arrived at the next step.

        Raises:
            ChecksumMismatch, StorageError: see ``Snapshot.restore``.
        """
        mark(self._parts.values())
        if plan.keys:
            await self._exchange(host, plan, arrive)
        await fetch_wanted(host, self._source, self._index, self._rest(plan))

    def weigh(self, host: Host, plan: ReadPlan) -> Weighed:
        """What ``read`` would cost. Blocks: for a worker thread."""
        rest = [
            Range(self._key(want.stored), want.stored.start, want.stored.stop, _in_place(want))
            for want in self._rest(plan)
        ]
        batches = [rest]
        if plan.keys:
            assert self._team is not None
            commons = self._shared(plan)
            pieces = self._pieces(plan, commons)
            batches += [
                self._cut_ranges(commons, piece)
                for piece in pieces[self._team.rank :: self._team.world_size]
            ]
        options = self._source.options
        reads = [
            read
            for ranges in batches
            for read in plan_reads(
                ranges,
                chunk_bytes=chunk_within(options.chunk_bytes, host.budget.limit_bytes),
                max_gap_bytes=options.max_gap_bytes,
            )
        ]
        bytes_read = sum(read.stop - read.start for read in reads)
        return Weighed(self.bytes_needed, bytes_read, len(reads))

    def _commons_of(self, wanted: Iterable[Wanted]) -> list[Common]:
        """What all ranks are likely to want, each range once, in an order that all have."""
        sinks: dict[tuple[str, int, int], tuple[Stored, list[ByteSink]]] = {}
        for want in wanted:
            if self._is_common(want) and _size(want):
                stored = want.stored
                at = self._key(stored), stored.start, stored.stop
                sinks.setdefault(at, (stored, []))[1].append(want.sink)
        return [Common(*sinks[at]) for at in sorted(sinks)]

    def _is_common(self, want: Wanted) -> bool:
        return want.holders is None or want.holders == self._ranks

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

    def _shared(self, plan: ReadPlan) -> list[Common]:
        return [one for key in plan.keys for one in self._commons[key]]

    def _rest(self, plan: ReadPlan) -> list[Wanted]:
        return [
            want
            for key, part in self._parts.items()
            for want in part.reads
            if key not in plan.keys or not self._is_common(want)
        ]

    def _pieces(self, plan: ReadPlan, commons: Sequence[Common]) -> list[tuple[Part, ...]]:
        assert self._team is not None
        return cut(
            self._ranges(commons),
            num_readers=self._team.world_size,
            piece_bytes=plan.piece_bytes,
        )

    async def _exchange(
        self, host: Host, plan: ReadPlan, arrive: Callable[[], Awaitable[object]]
    ) -> None:
        source, team = self._source, self._team
        assert team is not None
        commons = self._shared(plan)
        async with source.opened(host, "read", self._index.attempt) as (storage, _, errands):
            fetcher = source.fetcher(host, storage)

            async def read(wanted: Sequence[tuple[Stored, memoryview]]) -> None:
                requests = []
                for stored, memory in wanted:
                    raw = np.frombuffer(memory, np.uint8)
                    sink = MemorySink(raw.ctypes.data, len(memory), raw)
                    requests.append(Request(self._index, stored, sink))
                await fetcher.fetch(requests)

            # One lease for all buffers: of two the second might wait for ever.
            lease = await host.budget.lease(NUM_BUFFERS * plan.piece_bytes, is_reading=True)

            async def release() -> None:
                lease.release()

            try:
                await ExchangeActor(
                    commons=commons,
                    pieces=self._pieces(plan, commons),
                    rank=team.rank,
                    num_ranks=team.world_size,
                    memory=lease.view,
                    read=read,
                    broadcast=Broadcaster(
                        host, team.process_group, patience_s=2 * source.options.lost_after_s
                    ),
                    arrive=arrive,
                    run_blocking=host.run_blocking,
                    errands=errands,
                ).run()
            finally:
                # A broadcast that was left behind may still write to it.
                await errands.clean_up(release)


def _size(want: Wanted) -> int:
    return want.stored.stop - want.stored.start


def _in_place(want: Wanted) -> bool:
    return want.sink.is_addressable
