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

from actorsnap.actors.budget import Budget, Lease
from actorsnap.actors.items import StagedChunk
from actorsnap.actors.trace import ProgressBoard
from actorsnap.planning.packing import Chunk, ObjectPlan, Piece
from actorsnap.state.tensors import ByteSource
from actorsnap.storage.base import RunBlocking

__all__ = ["StagingActor"]

_MAX_COPIED_BYTES = 48 << 20
"""What a blocking save copies is bounded by this, whatever the budget: nobody waits for the
copies, so that more of them in flight would only take memory."""


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
        largest = max([chunk.stop - chunk.start for chunk in order], default=1)
        self._room = anyio.Semaphore(max(2, _MAX_COPIED_BYTES // max(1, largest)))

    async def run(self) -> None:
        """Stages everything.

        Raises:
            Exception: what a device copy raises.
        Cancellation: leases of chunks that were not sent are released; a copy in flight
            ends first.
        """
        chunks = iter(self._order)
        try:
            async with self._out, anyio.create_task_group() as tasks:
                for _ in range(self._num_copiers):
                    tasks.start_soon(self._stage_next, chunks)
        finally:
            # The trainer may free its memory now, whoever still holds this actor.
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
        can_be_read_in_place = not self._copies and all(
            sources[piece.item].is_addressable for piece in pieces
        )
        if can_be_read_in_place or not pieces:
            return StagedChunk(chunk, head, pieces, sources, None)
        if self._budget.would_wait(nbytes):
            self._full.set()
        lease = await self._lease(nbytes)
        try:
            await self._run_blocking(_copy, sources, pieces, lease.view)
        except BaseException:
            lease.release()
            raise
        return StagedChunk(chunk, head, pieces, (), lease)

    async def _lease(self, nbytes: int) -> Lease:
        if self._copies:
            return await self._budget.lease(nbytes)
        await self._room.acquire()
        try:
            lease = await self._budget.lease(nbytes)
        except BaseException:
            self._room.release()
            raise
        lease.on_release = self._room.release
        return lease


def _copy(sources: Sequence[ByteSource], pieces: Sequence[Piece], memory: memoryview) -> None:
    at = 0
    for piece in pieces:
        end = at + piece.stop - piece.start
        sources[piece.item].copy_into(piece.start, memory[at:end])
        at = end
