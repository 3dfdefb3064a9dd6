"""A trainer's save in its uploader process: the other half of an ``OffloadedSave``.

A ``SaveJob`` makes it, like any save. Two parts stay in the trainer: copies of the state, which
arrive through the arena, and the rank's mailbox, whose messages are relayed. If the trainer ends
and the save continues, this process opens the mailbox.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import anyio
import anyio.abc
import msgspec

from actorsnap.actors.items import StagedChunk, StagingOrder
from actorsnap.actors.trace import ProgressBoard, Recorder
from actorsnap.errors import describe
from actorsnap.options import Options
from actorsnap.planning.packing import Chunk
from actorsnap.protocol.failure import decode, encode
from actorsnap.protocol.save import Assignment
from actorsnap.protocol.uploader import (
    AbsenceAsked,
    AbsenceReported,
    Begun,
    ChunksReleased,
    ChunksStaged,
    EndReceived,
    Finished,
    FromProcess,
    MessageSent,
    Progressed,
    Recorded,
    Save,
    StagingEnded,
    StagingFailed,
    StagingWaits,
    StagingWanted,
    Structure,
    TakeOver,
    TakeOverPrepared,
    TurnAsked,
    TurnGiven,
)
from actorsnap.runtime.commit_order import CommitTurn
from actorsnap.runtime.host import Host, wait_done
from actorsnap.runtime.job import SaveRequest
from actorsnap.runtime.location import Location
from actorsnap.runtime.saving import SaveJob
from actorsnap.runtime.structure import rebuild_state
from actorsnap.runtime.team import Membership, RelayedCall, RelayedTeam, open_port
from actorsnap.runtime.tracefile import About
from actorsnap.runtime.tracing import Observation
from actorsnap.state.process_group import StoreAddress, StoreAt
from actorsnap.transport.relay import Message, Relay, RelayedEnds, decode_item, encode_item
from actorsnap.transport.store import StorePort

__all__ = ["Trainer", "UploadedSave"]

Delivered: TypeAlias = (
    ChunksStaged
    | StagingWaits
    | StagingEnded
    | StagingFailed
    | EndReceived
    | AbsenceReported
    | TakeOver
    | TurnGiven
)


class Trainer(Protocol):
    """The trainer, as a save sees it. Methods are called on the runtime's loop.

    Attributes:
        is_in_a_hurry: The trainer waits for memory: released chunks are reported at once.
    """

    is_in_a_hurry: bool

    def send(self, frame: FromProcess) -> None:
        """Sends a frame."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """See ``ArenaView.view``."""
        ...

    def ended(self, frame: Finished) -> None:
        """Reports an outcome."""
        ...


class UploadedSave:
    """A save that starts at once, on the loop of the uploader process.

    Args:
        structure, values: See ``Remember``.
        team: None for a single rank.
    """

    def __init__(
        self,
        host: Host,
        trainer: Trainer,
        frame: Save,
        structure: Structure,
        values: list[bytes],
        team: RelayedTeam | None,
    ) -> None:
        self._host = host
        self._trainer = trainer
        self._number = frame.number
        # Unbounded: at most two small frames per chunk.
        self._in, self._out = anyio.create_memory_object_stream[
            ChunksStaged | StagingWaits | StagingEnded | StagingFailed
        ](math.inf)
        self._hashed = self._stored = 0
        self._released: list[int] = []
        self._is_staged = False
        current = list(values)
        for number, value in frame.values:
            current[number] = value
        host.resources.set_budget(frame.budget_bytes)
        options = msgspec.msgpack.decode(frame.options, type=Options)
        self._team = team
        self._ends: RelayedEnds | None = None
        self._turn: _LinkedTurn | None = None
        if frame.overwrite and (team is None or team.rank == 0):
            self._turn = _LinkedTurn(self._ask_turn)
        self._absences: list[AbsenceReported] = []
        self._has_absence = anyio.Event()
        self._take_over: tuple[TakeOver, StoreAt] | None = None
        membership = None
        if team is not None:
            self._ends = RelayedEnds(self, rank=team.rank)
            membership = Membership(team, RelayedCall(self._ends))
        self._job = SaveJob(
            host,
            SaveRequest(
                location=Location(
                    display_url=frame.url,
                    url=frame.at.decode("utf-8", "surrogatepass"),
                    storage_options=frame.storage_options,
                ),
                overwrite=frame.overwrite,
                resume=frame.resume,
                step=frame.step,
                metadata=msgspec.json.decode(frame.metadata),
                options=options,
                begun_s=time.monotonic() - options.timeout_s + frame.left_s,
            ),
            rebuild_state(structure, current),
            copies=True,
            membership=membership,
            observation=Observation("save", [self._send_record] if frame.records else ()),
            stager=self,
            after=frame.after,
            turn=self._turn,
        )
        trainer.send(Begun(self._number, self._job.attempt))
        self._job.finished.add_done_callback(lambda _: self._end())
        self._job.start()

    @property
    def is_detached(self) -> bool:
        """Whether the save no longer needs the trainer."""
        can_move = self._ends is None or self._take_over is not None
        return self._job.options.detach and self._is_staged and can_move

    def cancel(self, reason: str) -> None:
        self._job.cancel(reason)

    def leave_trainer(self) -> None:
        """Handles the trainer's end. Call in the order of the saves' numbers."""
        # A commit that waits for the trainer's answer proceeds: all ranks have arrived there.
        self._absences.append(AbsenceReported(self._number, None))
        self._has_absence.set()
        if self._turn is not None:
            self._turn.leave_trainer(
                self._host.resources.commit_order.join(self._job.location.canonical)
            )

    def _ask_turn(self) -> None:
        self._trainer.send(TurnAsked(self._number))

    def end(self, reason: str) -> None:
        """See ``EndSave``. Also called if the trainer ends and the save depends on it."""
        if self._ends is not None:
            self._ends.break_off(reason)

    def deliver(self, frame: Delivered) -> None:
        match frame:
            case EndReceived():
                assert self._ends is not None
                self._ends.put(frame.to_coordinator, decode_item(frame.item))
            case AbsenceReported():
                self._absences.append(frame)
                self._has_absence.set()
            case TurnGiven():
                assert self._turn is not None
                self._turn.give(is_unanswered=frame.is_unanswered)
            case TakeOver():
                self._host.submit(self._prepare_take_over(frame))
            case _:
                self._is_staged = self._is_staged or isinstance(frame, StagingEnded)
                self._in.send_nowait(frame)

    # The mailbox, which the trainer owns

    def post(self, to: int | None, message: Message) -> None:
        """See ``Wire``."""
        self._trainer.send(MessageSent(self._number, to, encode_item(message)))

    async def absence(self) -> str | None:
        """See ``Wire``."""
        self._has_absence = anyio.Event()
        self._trainer.send(AbsenceAsked(self._number))
        await self._has_absence.wait()
        return self._absences.pop().reason

    async def _prepare_take_over(self, frame: TakeOver) -> None:
        """Connects to the ranks' store. Imports torch."""
        error = ""
        try:
            store = await self._host.run_blocking(
                _connect, StoreAddress(frame.host, frame.port, frame.prefix)
            )
            self._take_over = frame, store
        except Exception as failure:  # any error of torch or the network
            error = describe(failure)
        self._trainer.send(TakeOverPrepared(self._number, error))

    @property
    def call_number(self) -> int:
        """The number of the call prepared for take-over; -1 without one."""
        return -1 if self._take_over is None else self._take_over[0].call

    async def continue_alone(self, ports: dict[str, StorePort[Any, Any]]) -> None:
        """Opens the rank's mailbox after the trainer's end; waits for the end of the save.

        Args:
            ports: Open ports by name. Call for the saves of a team in the order of their calls.
        """
        if self._ends is None:
            return
        assert self._take_over is not None
        assert self._team is not None
        frame, store = self._take_over
        if frame.name not in ports:
            ports[frame.name] = open_port(frame, self._team, store)
        port = ports[frame.name]
        with port.begin(lost_after_s=self._job.options.lost_after_s, number=frame.call) as call:
            relay = Relay(
                rank=port.rank,
                world_size=port.world_size,
                participant=call.participant,
                coordinator=call.coordinator,
                on_aborted=lambda _: None,
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(relay.run)
                self._ends.move(relay)
                relay.attach(self._ends.put)
                await wait_done(self._job.finished)
                await relay.flush()
                tasks.cancel_scope.cancel()

    def tell_released(self) -> None:
        """Reports the chunks released since the last report."""
        if self._released:
            self._trainer.send(ChunksReleased(self._number, self._released))
            self._released = []

    def tell_progress(self) -> None:
        """Reports the progress since the last report. Each frame wakes a thread of the trainer."""
        self.tell_released()
        now = self._job.board.latest
        hashed, stored = now.hashed_bytes - self._hashed, now.stored_bytes - self._stored
        if hashed or stored:
            self._trainer.send(Progressed(self._number, hashed, stored))
            self._hashed, self._stored = now.hashed_bytes, now.stored_bytes

    def _send_record(self, recorder: Recorder, about: About, epoch_ns: int) -> None:
        """Sends the recording. On a worker thread, before the save is finished."""
        record = msgspec.msgpack.encode(recorder.record())
        frame = Recorded(self._number, about.attempt, about.retries, record)
        self._host.call_soon(lambda: self._trainer.send(frame))

    def _end(self) -> None:
        self.tell_progress()
        self._in.close()
        self._out.close()
        error = self._job.finished.exception()
        encoded = None if error is None else encode(error)
        self._trainer.ended(Finished(self._number, encoded, self._job.is_unanswered))

    def prepare(self, assignment: Assignment) -> None:
        """Lets the trainer start staging while this process packs."""
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


def _connect(address: StoreAddress) -> StoreAt:
    """Returns a store after a test connection. Blocks."""
    store = StoreAt(address)
    store.clone()
    return store


class _LinkedTurn:
    """A ``CommitTurn`` given by the trainer or, after its end, by this process."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._given = anyio.Event()
        self._is_unanswered = False
        self._own: CommitTurn | None = None

    def give(self, *, is_unanswered: bool) -> None:
        self._is_unanswered = is_unanswered
        self._given.set()

    def leave_trainer(self, own: CommitTurn) -> None:
        """Continues with a turn of this process after the trainer's end."""
        self._own = own
        self._given.set()

    async def wait(self) -> bool:
        self._ask()
        await self._given.wait()
        return self._is_unanswered if self._own is None else await self._own.wait()

    def release(self, *, is_unanswered: bool = False) -> None:
        if self._own is not None:
            self._own.release(is_unanswered=is_unanswered)


class _ArenaStaging:
    """Receives chunks that the trainer has staged."""

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
        """Passes chunks on to the uploaders.

        Raises:
            Exception: the error of the trainer's staging.
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
    """Memory of a chunk, lent by the trainer."""

    def __init__(self, view: memoryview, number: int, release: Callable[[int], None]) -> None:
        self.view = view
        self._number = number
        self._release: Callable[[int], None] | None = release

    def release(self) -> None:
        """Reports the release to the trainer, once."""
        release, self._release = self._release, None
        if release is not None:
            self.view = memoryview(b"")
            release(self._number)
