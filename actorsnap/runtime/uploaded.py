"""A save of the trainer, in its uploader process: the other half of an ``OffloadedSave``.

A ``SaveJob`` makes it, as it makes any save. Only the copies of the state come from the trainer,
through the arena: what would stage passes them on here, and tells the trainer which memory is free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from actorsnap.actors.items import StagedChunk, StagingOrder
from actorsnap.actors.trace import ProgressBoard, Recorder
from actorsnap.options import Options
from actorsnap.planning.packing import Chunk
from actorsnap.protocol.failure import EncodedError, Failure, decode, encode
from actorsnap.protocol.frames import (
    Begun,
    ChunksReleased,
    ChunksStaged,
    FromProcess,
    Progressed,
    Recorded,
    Save,
    StagingEnded,
    StagingFailed,
    StagingWaits,
    StagingWanted,
    Structure,
)
from actorsnap.protocol.save import Assignment
from actorsnap.runtime.host import Host
from actorsnap.runtime.job import SaveRequest
from actorsnap.runtime.observing import Observation
from actorsnap.runtime.place import Place
from actorsnap.runtime.ranks import Team
from actorsnap.runtime.saving import SaveJob
from actorsnap.runtime.structure import rebuild
from actorsnap.runtime.tracefile import About

__all__ = ["Trainer", "UploadedSave"]

_STILL_S = 5.0
"""A trainer that ranks wait for says something every second."""


class Trainer(Protocol):
    """What a save needs of the trainer. Called on the runtime's loop.

    Attributes:
        is_in_a_hurry: It waits for memory, and is told at once what is free.
    """

    is_in_a_hurry: bool

    def send(self, frame: FromProcess) -> None:
        """Tells it something."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """See ``ArenaView.view``."""
        ...

    def ended(self, number: int, error: tuple[EncodedError, ...] | None) -> None:
        """Tells it an outcome."""
        ...


class UploadedSave:
    """Lives on the loop of the process' runtime; begins at once.

    Args:
        structure, values: What ``Remember`` said.
        team: Of the processes, where this is not the only rank.
    """

    def __init__(
        self,
        host: Host,
        trainer: Trainer,
        frame: Save,
        structure: Structure,
        values: list[bytes],
        team: Team | None,
    ) -> None:
        self._host = host
        self._trainer = trainer
        self._number = frame.number
        # At most two per chunk, all of them small.
        self._in, self._out = anyio.create_memory_object_stream[
            ChunksStaged | StagingWaits | StagingEnded | StagingFailed
        ](math.inf)
        self._hashed = self._stored = 0
        self._released: list[int] = []
        self._is_staged = False
        current = list(values)
        for number, value in frame.values:
            current[number] = value
        host.set_budget(frame.budget_bytes)
        options = msgspec.msgpack.decode(frame.options, type=Options)
        membership = None
        if team is not None:
            assert frame.team is not None
            membership = team.join_agreed(frame.team.call, options)
        self._job = SaveJob(
            host,
            SaveRequest(
                place=Place(
                    url=frame.url,
                    at=frame.at.decode("utf-8", "surrogatepass"),
                    storage_options=frame.storage_options,
                ),
                overwrite=frame.overwrite,
                resume=frame.resume,
                step=frame.step,
                metadata=msgspec.json.decode(frame.metadata),
                options=options,
                begun_s=time.monotonic() - options.timeout_s + frame.left_s,
            ),
            rebuild(structure, current),
            copies=True,
            membership=membership,
            observation=Observation("save", [self._send_record] if frame.records else ()),
            stager=self,
            after=frame.after,
        )
        trainer.send(Begun(self._number, self._job.attempt))
        self._job.finished.add_done_callback(lambda _: self._end())
        self._job.start()

    @property
    def is_detached(self) -> bool:
        """Whether it needs no trainer any more."""
        return self._job.options.detach and self._is_staged

    def cancel(self, reason: str) -> None:
        self._job.cancel(reason)

    def end(self, failure: Failure) -> None:
        """See ``EndSave``."""
        self._job.end(failure)

    def watch_trainer(self, silent_s: float) -> None:
        """Gives the save up, for all ranks, when the trainer neither stages nor ends."""
        limit_s = max(_STILL_S, self._job.options.lost_after_s)
        if self._job.is_shared and not self._is_staged and silent_s > limit_s:
            self.cancel(f"this rank's trainer was not heard for {silent_s:.0f} s: it was stopped")

    def deliver(self, frame: ChunksStaged | StagingWaits | StagingEnded | StagingFailed) -> None:
        """Takes what the trainer says about staging."""
        self._is_staged = self._is_staged or isinstance(frame, StagingEnded)
        self._in.send_nowait(frame)

    def tell_released(self) -> None:
        """Tells which chunks are not needed any more since that was told last."""
        if self._released:
            self._trainer.send(ChunksReleased(self._number, self._released))
            self._released = []

    def tell_progress(self) -> None:
        """Tells what is done since that was told last. Each frame wakes a thread of the trainer."""
        self.tell_released()
        now = self._job.board.latest
        hashed, stored = now.hashed_bytes - self._hashed, now.stored_bytes - self._stored
        if hashed or stored:
            self._trainer.send(Progressed(self._number, hashed, stored))
            self._hashed, self._stored = now.hashed_bytes, now.stored_bytes

    def _send_record(self, recorder: Recorder, about: About, epoch_ns: int) -> None:
        """On a worker thread, and before the save is finished."""
        record = msgspec.msgpack.encode(recorder.record())
        frame = Recorded(self._number, about.attempt, about.retries, record)
        self._host.call_soon(lambda: self._trainer.send(frame))

    def _end(self) -> None:
        self.tell_progress()
        self._in.close()
        self._out.close()
        error = self._job.finished.exception()
        self._trainer.ended(self._number, None if error is None else encode(error))

    def prepare(self, assignment: Assignment) -> None:
        """Lets the trainer begin, while this process packs."""
        assert assignment.plan is not None
        self._trainer.send(
            StagingWanted(
                self._number,
                assignment.rules,
                assignment.plan,
                assignment.attempt,
                assignment.url,
            )
        )

    def make(self, order: StagingOrder) -> _ArenaStaging:
        """See ``Stager``."""
        return _ArenaStaging(order, self._out, self._trainer.view, self._release, self._job.board)

    def _release(self, number: int) -> None:
        self._released.append(number)
        if self._trainer.is_in_a_hurry:
            self.tell_released()


class _ArenaStaging:
    """Staging that the trainer does: here the chunks only pass."""

    def __init__(
        self,
        order: StagingOrder,
        said: anyio.abc.ObjectReceiveStream[
            ChunksStaged | StagingWaits | StagingEnded | StagingFailed
        ],
        view: Callable[[int, int], memoryview],
        release: Callable[[int], None],
        board: ProgressBoard,
    ) -> None:
        self._order = order
        self._said = said
        self._view = view
        self._release = release
        self._board = board

    async def run(self) -> None:
        """Passes chunks on.

        Raises:
            Exception: what has failed in the trainer.
        """
        async with self._order.out:
            async for frame in self._said:
                match frame:
                    case ChunksStaged():
                        for number, offset in frame.chunks:
                            await self._order.out.send(self._chunk(number, offset))
                    case StagingWaits():
                        self._order.full.set()
                    case StagingFailed():
                        raise decode(frame.error)
                    case StagingEnded():
                        break
        self._order.full.set()

    def _chunk(self, number: int, offset: int | None) -> StagedChunk:
        chunk: Chunk = self._order.chunks[number]
        self._board.add(staged=chunk.stop - chunk.start)
        plan = self._order.objects[chunk.object]
        head = memoryview(plan.header)[chunk.start : min(chunk.stop, len(plan.header))]
        memory = None
        if offset is not None:
            nbytes = chunk.stop - chunk.start - len(head)
            memory = _ArenaMemory(self._view(offset, nbytes), number, self._release)
        return StagedChunk(chunk, head, list(plan.pieces(chunk)), (), memory)


class _ArenaMemory:
    """A chunk's memory, lent by the trainer."""

    def __init__(self, view: memoryview, number: int, release: Callable[[int], None]) -> None:
        self.view = view
        self._number = number
        self._release: Callable[[int], None] | None = release

    def release(self) -> None:
        """Tells the trainer, once."""
        release, self._release = self._release, None
        if release is not None:
            self.view = memoryview(b"")
            release(self._number)
