"""The staging actor: turns planned chunks into bytes that are safe to hash and write.

It takes chunks in write order and sends them on a bounded stream. A chunk of contiguous CPU
tensors in a blocking save is sent as views of the trainer's own memory, without a copy;
anything else is copied into leased memory first, on worker threads. It must not know what
becomes of the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from actorsnap.actors.budget import Budget
from actorsnap.actors.items import StagedChunk
from actorsnap.actors.trace import ProgressBoard
from actorsnap.planning.packing import Chunk, ObjectPlan, Piece
from actorsnap.state.tensors import ByteSource
from actorsnap.storage.base import RunBlocking

__all__ = ["StagingActor"]

_EMPTY = memoryview(b"")
_INLINE_PIECES = 64
"""Up to so many pieces, making views on the loop is cheaper than a hop to a thread."""


class StagingActor:
    """Stages all chunks of one rank's plan.

    Args:
        objects: The plan.
        order: The chunks, in the order in which they are to be stored.
        sources: Per object, the byte source of each item, in stored order.
        copies: True copies every chunk, so that the trainer may overwrite its tensors as
            soon as ``run`` has returned; they are not referred to any more then. False copies
            only what cannot be read in place.
        out: Where staged chunks go; closed at the end.
        budget: Lends the memory for copies.
        full: Set when the budget makes staging wait, and at its end: until then the storing
            side leaves the CPU to the copies, because the trainer waits for them.
        num_copiers: Copies made at once.
    """

    def __init__(
        self,
        *,
        objects: Sequence[ObjectPlan],
        order: Sequence[Chunk],
        sources: Sequence[Sequence[ByteSource]],
        copies: bool,
        out: MemoryObjectSendStream[StagedChunk],
        budget: Budget,
        full: anyio.Event,
        run_blocking: RunBlocking,
        num_copiers: int,
        board: ProgressBoard,
    ) -> None:
        self._objects = objects
        self._order = order
        self._sources = sources
        self._copies = copies
        self._out = out
        self._budget = budget
        self._full = full
        self._run_blocking = run_blocking
        self._num_copiers = num_copiers
        self._board = board

    async def run(self) -> None:
        """Stages everything.

        Raises:
            Exception: what a device copy raises.
        Cancellation: leases of chunks that were not sent are released; a copy in flight
            ends first.
        """
        chunks = iter(self._order)
        async with self._out, anyio.create_task_group() as tasks:
            for _ in range(self._num_copiers):
                tasks.start_soon(self._stage_next, chunks)
        if self._copies:
            self._sources = ()
        self._full.set()

    async def _stage_next(self, chunks: Iterator[Chunk]) -> None:
        for chunk in chunks:
            staged = await self._stage(chunk)
            try:
                await self._out.send(staged)
            except BaseException:
                if staged.lease is not None:
                    staged.lease.release()
                raise
            self._board.add(staged=chunk.stop - chunk.start)

    async def _stage(self, chunk: Chunk) -> StagedChunk:
        plan = self._objects[chunk.object]
        sources = self._sources[chunk.object]
        pieces = list(plan.pieces(chunk))
        head = memoryview(plan.header)[chunk.start : min(chunk.stop, len(plan.header))]
        nbytes = chunk.stop - chunk.start - len(head)
        if nbytes == 0:
            return StagedChunk(chunk, head, (), (), None)
        if not self._copies and all(sources[piece.item].is_addressable for piece in pieces):
            if len(pieces) <= _INLINE_PIECES:
                views = _views(sources, pieces)
            else:
                views = await self._run_blocking(_views, sources, pieces)
            return StagedChunk(chunk, head, pieces, views, None)
        if self._budget.would_wait(nbytes):
            self._full.set()
        lease = await self._budget.lease(nbytes)
        try:
            views = await self._run_blocking(_copy, sources, pieces, lease.view)
        except BaseException:
            lease.release()
            raise
        return StagedChunk(chunk, head, pieces, views, lease)


def _views(sources: Sequence[ByteSource], pieces: Sequence[Piece]) -> list[memoryview]:
    return [sources[piece.item].view(piece.start, piece.stop) for piece in pieces]


def _copy(
    sources: Sequence[ByteSource], pieces: Sequence[Piece], memory: memoryview
) -> list[memoryview]:
    views = []
    at = 0
    for piece in pieces:
        end = at + piece.stop - piece.start
        view = memory[at:end]
        sources[piece.item].copy_into(piece.start, view)
        views.append(view)
        at = end
    return views
