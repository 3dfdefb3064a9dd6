# SPDX-License-Identifier: Apache-2.0
"""Shared by the actors of one save, or passed between them; never encoded."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actorsnap.actors.abandonable import AbandonableTasks
from actorsnap.actors.budget import Budget
from actorsnap.actors.trace import NULL_RECORDER, ProgressBoard, Recorder
from actorsnap.planning.packing import Chunk, ObjectPlan, Piece
from actorsnap.protocol.pacing import Bursts
from actorsnap.protocol.save import Assignment
from actorsnap.release import RELEASE
from actorsnap.state.sources import ByteSource


class Pace:
    """Paces the uploaders; ``protocol.pacing`` decides."""

    def __init__(self) -> None:
        self._bursts = Bursts()
        self._changed = anyio.Event()

    @property
    def duty(self) -> float:
        """Share of the time in which uploaders work: 0 pauses them, 1 never does."""
        return self._bursts.duty

    def set(self, duty: float) -> None:
        self._bursts.set(duty)
        self._wake()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[bool]:
        """Waits for permission to work on its body; yields whether there was a rest."""
        has_rested = False
        while (rest_s := self._bursts.rest_s(anyio.current_time())) > 0.0:
            with anyio.move_on_after(rest_s):
                await self._changed.wait()
            has_rested = True
        self._bursts.begin(anyio.current_time())
        try:
            yield has_rested
        finally:
            if self._bursts.end(anyio.current_time()):
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveContext:
    """Shared by the actors of one rank's save.

    Attributes:
        copies: Copy all bytes before storing them, so that the trainer may continue.
        num_uploaders: Chunks hashed and written at once.
        num_threads: Threads that compress a chunk.
        errands: Runs all work of this rank that may hang.
        on_staged: Called when the trainer may overwrite its tensors.
        on_failure: Receives an exception before it is reported to the other ranks.
    """

    rank: int
    copies: bool
    num_uploaders: int
    num_threads: int
    budget: Budget
    errands: AbandonableTasks
    board: ProgressBoard
    on_staged: Callable[[], None]
    on_failure: Callable[[BaseException], None]
    recorder: Recorder = NULL_RECORDER
    timeout_s: float = math.inf
    pace: Pace | None = None
    max_compressed_bytes: int | None = None
    release: str = RELEASE


class StagedMemory(Protocol):
    """Memory with copies; released once, by its last user."""

    view: memoryview

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """A chunk whose bytes are ready to be hashed and written.

    Attributes:
        head: The chunk's part of the object's header, or empty.
        sources: The trainer's own memory, per item of the object; for chunks without a lease.
        lease: Contiguous copies of the pieces, or None. Released after storing.
    """

    chunk: Chunk
    head: memoryview
    pieces: Sequence[Piece]
    sources: Sequence[ByteSource]
    lease: StagedMemory | None

    def views(self) -> Iterator[memoryview]:
        """Yields one view per piece, on demand: many at once (16,000 small tensors) would trigger
        full garbage collections.
        """
        if self.lease is None:
            for piece in self.pieces:
                yield self.sources[piece.item].view(piece.start, piece.stop)
            return
        at = 0
        for piece in self.pieces:
            end = at + piece.stop - piece.start
            yield self.lease.view[at:end]
            at = end


def release_leases(staged: MemoryObjectReceiveStream[StagedChunk]) -> None:
    """Empties the stream, which holds chunks only after a failure."""
    while True:
        try:
            chunk = staged.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return
        if chunk.lease is not None:
            chunk.lease.release()


@dataclass(frozen=True, slots=True, eq=False)
class StagingOrder:
    """Chunks to stage, and their destination.

    Attributes:
        chunks: In the order of storing.
        may_store: Set when staging waits for memory, and at its end. Until then the trainer waits
            for the copies, and uploaders leave the CPU to them.
    """

    objects: Sequence[ObjectPlan]
    chunks: Sequence[Chunk]
    out: MemoryObjectSendStream[StagedChunk]
    may_store: anyio.Event


class Staging(Protocol):
    def prepare(self, assignment: Assignment) -> None:
        """Called before packing."""
        ...

    async def run(self, order: StagingOrder) -> None:
        """Stages all chunks; releases the sources."""
        ...
