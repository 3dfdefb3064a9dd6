# SPDX-License-Identifier: Apache-2.0
"""The staging actor: turns planned chunks into bytes that are safe to hash and write.

A blocking save views contiguous CPU tensors in place; others are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

import anyio

from actorsnap.actors.budget import Budget, Lease
from actorsnap.actors.fence import Fence
from actorsnap.actors.items import StagedChunk, StagingOrder
from actorsnap.actors.trace import NULL_RECORDER, ProgressBoard, Recorder, Row, Wait, Work
from actorsnap.planning.packing import Chunk, ObjectPlan, copy_turn_bytes
from actorsnap.protocol.save import Assignment
from actorsnap.state.sources import ByteSource, Gathering, Leaf, PartSource, gather
from actorsnap.storage.base import RunBlocking

_MAX_COPIED_BYTES = 48 << 20
"""Limit of copies in a blocking save, apart from the budget. The trainer does not wait for a copy
as such: more would only use memory.
"""

_DEVICE_COPIERS = 2
"""Threads that copy from devices: one begins its copies while those of the other are made."""


@dataclass(eq=False, repr=False)
class StagingActor:
    """Stages the chunks of one rank's plan; see ``Staging``.

    Args:
        copies: Copy every chunk, so that the trainer may overwrite its tensors once ``run`` has
            returned. False: only chunks that cannot be read in place.
        num_copiers: Threads that copy at once.
        fence: Chooses the next chunk, and is notified of each copied one. None: the order of
            storing applies.
    """

    leaves: Sequence[Leaf]
    _: KW_ONLY
    copies: bool
    budget: Budget
    run_blocking: RunBlocking
    num_copiers: int
    board: ProgressBoard
    recorder: Recorder = NULL_RECORDER
    fence: Fence | None = None
    _order: StagingOrder = field(init=False)
    _room: anyio.Semaphore = field(init=False)
    _sources: Sequence[Sequence[ByteSource]] = field(default=(), init=False)
    _turn_bytes: int = field(default=0, init=False)
    _largest_bytes: int = field(default=0, init=False)

    def prepare(self, assignment: Assignment) -> None:
        """Does nothing."""

    async def run(self, order: StagingOrder) -> None:
        """Stages all chunks. Call once.

        Raises:
            StateChanged: The state was changed without waiting for the fence.
        Cancellation: Leases of unsent chunks are released; a copy in flight ends first.
        """
        self._order = order
        largest = max([chunk.stop - chunk.start for chunk in order.chunks], default=1)
        self._largest_bytes = largest
        self._room = anyio.Semaphore(max(2, _MAX_COPIED_BYTES // max(1, largest)))
        chunks = iter(order.chunks)
        fence = self.fence
        num_copiers = self.num_copiers
        if self.copies and fence is None:
            on_devices = _is_on_devices(self.leaves)
            if on_devices:
                num_copiers = min(num_copiers, _DEVICE_COPIERS)
            self._turn_bytes = copy_turn_bytes(order.chunks, num_copiers, on_devices=on_devices)
        try:
            self._sources = [_sources_of(plan, self.leaves) for plan in order.objects]
            if fence is not None:
                fence.plan(order.objects, order.chunks)
            async with order.out, anyio.create_task_group() as tasks:
                for copier in range(num_copiers):
                    tasks.start_soon(self._stage_next, chunks, copier)
            if fence is not None:
                fence.check()
        finally:
            # The trainer may free its memory now.
            self.leaves = self._sources = ()
            if fence is not None:
                fence.open()
        order.may_store.set()

    async def _next(self, chunks: Iterator[Chunk], copier: int) -> Chunk | None:
        if self.fence is not None:
            return await self.fence.next_chunk(copier)
        return next(chunks, None)

    async def _stage_next(self, chunks: Iterator[Chunk], copier: int) -> None:
        with self.recorder.row("staging") as row:
            while (chunk := await self._next(chunks, copier)) is not None:
                staged = await self._stage(chunk, chunks, row)
                try:
                    while staged:
                        await self._send(staged[0])
                        del staged[0]
                except BaseException:
                    _release(staged)
                    raise
                self._note_sent(row)

    async def _send(self, staged: StagedChunk) -> None:
        chunk = staged.chunk
        if self.fence is not None:
            self.fence.finish(chunk)
        await self._order.out.send(staged)
        self.board.add(staged=chunk.stop - chunk.start)

    def _note_sent(self, row: Row) -> None:
        row.note(Wait.ROOM)
        out = self._order.out
        self.recorder.sample("staged chunks", lambda: out.statistics().current_buffer_used)
        self.recorder.sample("leased bytes", lambda: self.budget.leased_bytes)

    async def _stage(self, chunk: Chunk, chunks: Iterator[Chunk], row: Row) -> list[StagedChunk]:
        """Stages a chunk, and as many of ``chunks`` as make up a turn."""
        taken: Chunk | None = chunk
        staged: list[StagedChunk] = []
        gatherings: list[Gathering] = []
        nbytes = 0
        try:
            while taken is not None:
                each, gathering = await self._prepare(taken)
                staged.append(each)
                if gathering is not None:
                    gatherings.append(gathering)
                nbytes += taken.stop - taken.start
                has_time = nbytes < self._turn_bytes
                has_room = has_time and not self.budget.would_wait(self._largest_bytes)
                taken = next(chunks, None) if has_room else None
            if gatherings:
                row.note(Wait.MEMORY)
                key = self._order.objects[chunk.object].key
                copy = row.around(gather, Work.STAGE, key, chunk.start, nbytes)
                await self.run_blocking(copy, gatherings)
        except BaseException:
            _release(staged)
            raise
        return staged

    async def _prepare(self, chunk: Chunk) -> tuple[StagedChunk, Gathering | None]:
        plan = self._order.objects[chunk.object]
        sources = self._sources[chunk.object]
        pieces = list(plan.pieces(chunk))
        head = memoryview(plan.header)[chunk.start : min(chunk.stop, len(plan.header))]
        nbytes = chunk.stop - chunk.start - len(head)
        can_be_read_in_place = not self.copies and all(
            sources[piece.item].is_addressable for piece in pieces
        )
        if can_be_read_in_place or not pieces:
            return StagedChunk(chunk, head, pieces, sources, None), None
        if self.budget.would_wait(nbytes):
            self._order.may_store.set()
        lease = await self._lease(nbytes)
        gathering = Gathering(sources, pieces, lease.view, lease.pin)
        return StagedChunk(chunk, head, pieces, (), lease), gathering

    async def _lease(self, nbytes: int) -> Lease:
        if self.copies:
            return await self.budget.lease(nbytes)
        await self._room.acquire()
        try:
            lease = await self.budget.lease(nbytes)
        except BaseException:
            self._room.release()
            raise
        lease.on_release = self._room.release
        return lease


def _release(staged: Sequence[StagedChunk]) -> None:
    for each in staged:
        if each.lease is not None:
            each.lease.release()


def _is_on_devices(leaves: Sequence[Leaf]) -> bool:
    """Whether devices hold most of the bytes."""
    there = [leaf.item.nbytes for leaf in leaves if getattr(leaf.source, "copier", None)]
    return 2 * sum(there) > sum([leaf.item.nbytes for leaf in leaves])


def _sources_of(plan: ObjectPlan, leaves: Sequence[Leaf]) -> list[ByteSource]:
    return [
        source if box is None else PartSource(source, box.start, stop - start)
        for source, box, start, stop in zip(
            [leaves[item].source for item in plan.items],
            plan.boxes,
            plan.starts,
            plan.ends,
            strict=True,
        )
    ]
