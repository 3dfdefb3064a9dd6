# SPDX-License-Identifier: Apache-2.0
"""A trainer's save in its uploader process: the other half of ``RemoteEngine``.

The trainer copies the state into the arena and relays messages of its mailbox. If it ends and the
save continues, this process opens the mailbox.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import msgspec

from actorsnap.actors.items import StagedChunk, StagingOrder
from actorsnap.actors.trace import Recorder
from actorsnap.errors import describe
from actorsnap.options import Options
from actorsnap.protocol import uploader as frames
from actorsnap.protocol.failure import decode, encode
from actorsnap.protocol.save import Assignment
from actorsnap.runtime.host import Host, wait_done
from actorsnap.runtime.local_engine import LocalEngine
from actorsnap.runtime.location import Location
from actorsnap.runtime.resources import CommitTurn
from actorsnap.runtime.save import Save, SaveRequest
from actorsnap.runtime.structure import rebuild_state
from actorsnap.runtime.team import Membership, TeamMemory, open_port
from actorsnap.runtime.tracefile import About
from actorsnap.runtime.tracing import Observation
from actorsnap.state.process_group import StoreAddress, StoreAt
from actorsnap.transport.ends import Message, Relay, RelayedEnds, decode_item, encode_item
from actorsnap.transport.store import StorePort

if TYPE_CHECKING:
    from actorsnap.runtime.uploader_process import UploaderService


class ServedSave:
    """Connects a ``Save`` here with the trainer. Starts it at once.

    ``Staging`` of the engine; ``RelayLink`` of its ends.

    Args:
        trainer: The link to it.
        structure, values: Of this or an earlier ``BeginSave``.
        team: None for a single rank.
    """

    def __init__(
        self,
        host: Host,
        trainer: UploaderService,
        frame: frames.BeginSave,
        structure: frames.Structure,
        values: list[bytes],
        team: TeamMemory | None,
    ) -> None:
        self._host = host
        self._trainer = trainer
        self._number = frame.number
        # Unbounded: at most two small frames per chunk.
        self._staged_in, self._staged_out = anyio.create_memory_object_stream[frames.Staged](
            math.inf
        )
        self._hashed = self._stored = 0
        self._released: list[int] = []
        self._record: tuple[bytes, int] = (b"", 0)
        self._is_staged = False
        self._team = team
        self._turn: _LinkedTurn | None = None
        if frame.overwrite and frame.rank == 0:
            self._turn = _LinkedTurn(self._ask)
        self._answers: dict[frames.Subject, frames.Answer] = {}
        self._has_answer: dict[frames.Subject, anyio.Event] = {}
        self._has_left_trainer = False
        self._take_over: tuple[frames.TakeOver, StoreAt] | None = None
        self._ends: RelayedEnds | None = None
        membership = None
        if team is not None:
            self._ends = RelayedEnds(self, rank=team.rank)
            membership = Membership(team, self._ends)
        host.resources.set_budget(frame.budget_bytes)
        self._save = Save(
            host,
            _request_of(frame),
            membership=membership,
            observation=Observation(
                "save",
                [self._keep_record] if frame.is_recorded else (),
                process="of the uploader process",
            ),
            turn=self._turn,
        )
        current = list(values)
        for index, value in frame.values:
            current[index] = value
        self._save.engine = LocalEngine(
            self._save,
            rebuild_state(structure, current),
            copies=True,
            staging=self,
            previous_attempt=frame.previous_attempt,
        )
        trainer.send(frames.Begun(self._number, self._save.attempt))
        self._save.finished.add_done_callback(lambda _: self._end())
        self._save.start()

    @property
    def is_detached(self) -> bool:
        """The save no longer needs the trainer."""
        can_move = self._ends is None or self._take_over is not None
        return self._save.options.detach and self._is_staged and can_move

    def cancel(self, reason: str) -> None:
        self._save.cancel(reason)

    def leave_trainer(self) -> None:
        """Handles the trainer's end. Call in the order of the saves' numbers."""
        # A commit that waits for the trainer's answer proceeds: all ranks have arrived there.
        self._has_left_trainer = True
        if self._turn is not None:
            self._turn.own = self._host.resources.commit_order.join(self._save.location.canonical)
        for has_answer in self._has_answer.values():
            has_answer.set()

    def break_off(self, reason: str) -> None:
        """Ends the call of all ranks here: no message will come."""
        if self._ends is not None:
            self._ends.break_off(reason)

    def deliver(self, frame: frames.ToSave) -> None:
        match frame:
            case frames.Staged():
                self._is_staged = self._is_staged or frame.is_last
                self._staged_in.send_nowait(frame)
            case frames.CancelSave(is_concluded=True):
                self.break_off(frame.reason)
            case frames.CancelSave():
                self.cancel(frame.reason)
            case frames.EndReceived():
                assert self._ends is not None
                self._ends.put(frame.to_coordinator, decode_item(frame.item))
            case frames.Answered():
                self._answers[frame.subject] = frame.answer
                self._has_answer[frame.subject].set()
            case frames.TakeOver():
                self._host.submit(self._prepare_take_over(frame))

    # The trainer's mailbox

    def post(self, to: int | None, message: Message) -> None:
        """See ``RelayLink``."""
        self._trainer.send(frames.MessageSent(self._number, to, encode_item(message)))

    async def suspicion(self) -> str | None:
        """See ``RelayLink``."""
        answer = await self._ask("suspicion")
        return answer if isinstance(answer, str) else None

    async def _ask(self, subject: frames.Subject) -> frames.Answer:
        """Returns the trainer's answer; None after its end."""
        self._answers.pop(subject, None)
        if not self._has_left_trainer:
            self._has_answer[subject] = anyio.Event()
            self._trainer.send(frames.AnswerWanted(self._number, subject))
            await self._has_answer[subject].wait()
        return self._answers.get(subject)

    async def _prepare_take_over(self, frame: frames.TakeOver) -> None:
        # Imports torch.
        error = ""
        try:
            store = await self._host.run_blocking(
                _connect, StoreAddress(frame.host, frame.port, frame.prefix)
            )
            self._take_over = frame, store
        except Exception as failure:  # torch or network
            error = describe(failure)
        self._trainer.send(frames.TakeOverPrepared(self._number, error))

    @property
    def call_number(self) -> int:
        """Returns the number of the call to continue; -1 if none."""
        return -1 if self._take_over is None else self._take_over[0].call

    async def continue_alone(self, ports: dict[str, StorePort]) -> None:
        """Opens the mailbox after the trainer's end; waits for the save's end.

        Args:
            ports: By name. Call for a team's saves in the order of their calls.
        """
        if self._ends is None:
            return
        assert self._take_over is not None
        assert self._team is not None
        frame, store = self._take_over
        if frame.name not in ports:
            ports[frame.name] = open_port(frame, self._team, store)
        port = ports[frame.name]
        with port.begin(lost_after_s=self._save.options.lost_after_s, number=frame.call) as call:
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
                await wait_done(self._save.finished)
                await relay.flush()
                tasks.cancel_scope.cancel()

    def report_progress(self) -> None:
        """Reports new progress. Each frame wakes a thread of the trainer."""
        now = self._save.board.latest
        hashed, stored = now.hashed_bytes - self._hashed, now.stored_bytes - self._stored
        if hashed or stored or self._released:
            self._trainer.send(frames.Progressed(self._number, hashed, stored, self._released))
            self._hashed, self._stored, self._released = now.hashed_bytes, now.stored_bytes, []

    def _keep_record(self, recorder: Recorder, about: About, epoch_ns: int) -> None:
        """Keeps the recording for ``Finished``. On a worker thread."""
        self._record = msgspec.msgpack.encode(recorder.record()), about.retries

    def _end(self) -> None:
        self.report_progress()
        self._staged_in.close()
        self._staged_out.close()
        error = self._save.finished.exception()
        encoded = None if error is None else encode(error)
        self._trainer.finish(
            frames.Finished(self._number, encoded, self._save.is_unanswered, *self._record)
        )

    # Bytes, copied into the arena by the trainer

    def prepare(self, assignment: Assignment) -> None:
        """Lets the trainer stage while this process packs."""
        assert assignment.plan is not None
        self._trainer.send(
            frames.StagingWanted(
                self._number,
                assignment.rules,
                assignment.plan,
                assignment.attempt,
                assignment.url,
            )
        )

    async def run(self, order: StagingOrder) -> None:
        """Passes on staged chunks; raises staging's error."""
        async with order.out:
            async for frame in self._staged_out:
                for number, offset in frame.chunks:
                    await order.out.send(self._to_chunk(order, number, offset))
                if frame.is_waiting:
                    order.may_store.set()
                if frame.error:
                    raise decode(frame.error)
                if frame.is_last:
                    break
        order.may_store.set()

    def _to_chunk(self, order: StagingOrder, number: int, offset: int | None) -> StagedChunk:
        chunk = order.chunks[number]
        plan = order.objects[chunk.object]
        self._save.board.add(staged=chunk.stop - chunk.start)
        head = memoryview(plan.header)[chunk.start : min(chunk.stop, len(plan.header))]
        memory = None
        if offset is not None:
            nbytes = chunk.stop - chunk.start - len(head)
            memory = _ArenaMemory(self._trainer.view(offset, nbytes), number, self._release)
        return StagedChunk(chunk, head, list(plan.pieces(chunk)), (), memory)

    def _release(self, number: int) -> None:
        self._released.append(number)
        if self._trainer.reports_at_once:
            self.report_progress()


def _request_of(frame: frames.BeginSave) -> SaveRequest:
    options = msgspec.msgpack.decode(frame.options, type=Options)
    return SaveRequest(
        location=Location.at(frame.place),
        overwrite=frame.overwrite,
        resume=frame.resume,
        step=frame.step,
        metadata=msgspec.json.decode(frame.metadata),
        options=options,
        begun_s=time.monotonic() - options.timeout_s + frame.left_s,
    )


def _connect(address: StoreAddress) -> StoreAt:
    store = StoreAt(address)
    store.clone()
    return store


class _LinkedTurn:
    """A turn of the trainer or, after its end, of this process.

    Attributes:
        own: This process' turn, set at the trainer's end.
    """

    def __init__(self, ask: Callable[[frames.Subject], Awaitable[frames.Answer]]) -> None:
        self._ask = ask
        self.own: CommitTurn | None = None

    async def wait(self) -> bool:
        is_unanswered = bool(await self._ask("turn"))
        return is_unanswered if self.own is None else await self.own.wait()

    def release(self, *, is_unanswered: bool = False) -> None:
        if self.own is not None:
            self.own.release(is_unanswered=is_unanswered)


class _ArenaMemory:
    """A chunk's memory, lent by the trainer."""

    def __init__(self, view: memoryview, number: int, release: Callable[[int], None]) -> None:
        self.view = view
        self._number = number
        self._release: Callable[[int], None] | None = release

    def release(self) -> None:
        """Reports once to the trainer."""
        release, self._release = self._release, None
        if release is not None:
            self.view = memoryview(b"")
            release(self._number)
