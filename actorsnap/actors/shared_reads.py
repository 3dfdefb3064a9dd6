"""Reads ranges wanted by several ranks once: each rank reads pieces and sends them to the others.

Pieces are sent only after every rank has read its own (a round of ``protocol.rounds``), so no rank
waits for one whose storage has failed. Reading, sending and copying overlap. Each set and turn has
its own ``Peers``: abandoned broadcasts are not confused with others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from actorsnap.actors.abandonable import AbandonableTasks
from actorsnap.format.manifest import Stored
from actorsnap.planning.restore import Part
from actorsnap.state.restore.allocation import slice_stored
from actorsnap.state.sources import ByteSink
from actorsnap.storage.base import RunBlocking

__all__ = ["NUM_BUFFERS", "Peers", "SharedRange", "SharedReadActor"]

NUM_BUFFERS = 4
"""Two for the rank's own pieces, of this round and the next; two for others'."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedRange:
    """A range that all ranks of a set want, and its destinations here."""

    stored: Stored
    sinks: Sequence[ByteSink]


class Peers(Protocol):
    async def meet(self) -> None:
        """Connects to them. All call it at once, before the first broadcast."""
        ...

    async def broadcast(self, memory: memoryview, source: int) -> None:
        """Sends the memory of rank ``source`` of the set to the memory of all others."""
        ...


class SharedReadActor:
    """One rank's part in the reads of a set.

    Args:
        ranges: In the same order on all ranks.
        rank: Position of this rank in the set.
        memory: ``NUM_BUFFERS`` times the bytes of the largest piece.
        run_blocking: Copies pieces; always awaited, as the memory is the caller's.
    """

    def __init__(
        self,
        *,
        ranges: Sequence[SharedRange],
        pieces: Sequence[Sequence[Sequence[Part]]],
        rank: int,
        memory: memoryview,
        read: Callable[[Sequence[tuple[Stored, memoryview]]], Awaitable[None]],
        peers: Peers,
        arrive: Callable[[], Awaitable[object]],
        run_blocking: RunBlocking,
        errands: AbandonableTasks,
    ) -> None:
        self._ranges = ranges
        self._pieces = pieces
        self._rank = rank
        size = len(memory) // NUM_BUFFERS
        buffers = [memory[at * size : (at + 1) * size] for at in range(NUM_BUFFERS)]
        self._own, self._theirs = buffers[:2], buffers[2:]
        self._read = read
        self._peers = peers
        self._arrive = arrive
        self._run_blocking = run_blocking
        self._errands = errands
        self._error: Exception | None = None

    async def run(self) -> None:
        """Fills every sink.

        Raises:
            ChecksumMismatch, StorageError: Reading failed on this rank; raised after the pieces
                that others wait for are sent.
        Cancellation: Sinks hold any mixture. ``memory`` may be in use by errands.
        """
        if self._pieces:
            await self._errands.run(self._read_own, 0)
        for number in range(len(self._pieces)):
            await self._arrive()
            async with anyio.create_task_group() as tasks:
                if number + 1 < len(self._pieces):
                    tasks.start_soon(self._read_ahead, number + 1)
                if number == 0:
                    # Not earlier: after a failed read, the others would wait here too.
                    await self._errands.run(self._peers.meet)
                await self._exchange(number)
            if self._error is not None:
                raise self._error

    async def _read_ahead(self, number: int) -> None:
        try:
            await self._errands.run(self._read_own, number)
        except Exception as error:
            self._error = error

    async def _read_own(self, number: int) -> None:
        memory, at = self._own[number % 2], 0
        wanted: list[tuple[Stored, memoryview]] = []
        for part in self._pieces[number][self._rank]:
            stored = self._ranges[part.request].stored
            nbytes = part.stop - part.start
            wanted.append((slice_stored(stored, part.start, part.stop), memory[at : at + nbytes]))
            at += nbytes
        await self._read(wanted)

    async def _exchange(self, number: int) -> None:
        """Sends and receives the pieces of a round; copies each while the next one travels."""
        previous: tuple[Sequence[Part], memoryview] | None = None
        for source, parts in enumerate(self._pieces[number]):
            memory = self._memory(number, source, parts)
            if not memory:
                continue
            async with anyio.create_task_group() as tasks:
                if previous is not None:
                    tasks.start_soon(self._run_blocking, self._deliver, *previous)
                await self._errands.run(self._peers.broadcast, memory, source)
            previous = parts, memory
        if previous is not None:
            await self._run_blocking(self._deliver, *previous)

    def _memory(self, number: int, source: int, parts: Sequence[Part]) -> memoryview:
        nbytes = sum(part.stop - part.start for part in parts)
        if source == self._rank:
            return self._own[number % 2][:nbytes]
        if nbytes:
            self._theirs.reverse()  # the other buffer may still be copied from
        return self._theirs[0][:nbytes]

    def _deliver(self, parts: Sequence[Part], memory: memoryview) -> None:
        at = 0
        for part in parts:
            end = at + part.stop - part.start
            for sink in self._ranges[part.request].sinks:
                sink.copy_from(part.start, memory[at:end])
            at = end
