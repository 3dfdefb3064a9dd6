# SPDX-License-Identifier: Apache-2.0
"""The trainer's half of a save in the uploader process: capture and staging.

Staged chunks keep their memory, so that a new process can repeat the save, until the save ends
or any save waits for memory. If no process can be started, a ``LocalEngine`` makes the save.

With several ranks the mailbox stays in the trainer, which relays messages (``transport.ends``) and
ends the call if the process dies. With ``detach``, the process opens the mailbox if the trainer
ends.
"""

from __future__ import annotations

import logging

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.abandonable import AbandonableTasks, first_error
from actorsnap.actors.commit import is_committed
from actorsnap.actors.items import StagedChunk, StagedMemory, StagingOrder, release_leases
from actorsnap.actors.staging import StagingActor
from actorsnap.actors.trace import Phase, Record
from actorsnap.errors import describe, set_cause
from actorsnap.log import Log
from actorsnap.planning.packing import write_order
from actorsnap.protocol import uploader as frames
from actorsnap.protocol.failure import Failure, Stage, decode, encode
from actorsnap.runtime.local_engine import LocalEngine
from actorsnap.runtime.location import open_location
from actorsnap.runtime.save import Save
from actorsnap.runtime.structure import Described, describe_state
from actorsnap.runtime.team import Team, TeamCall
from actorsnap.runtime.uploader_client import Uploader
from actorsnap.state.sources import Captured
from actorsnap.transport.ends import (
    Broken,
    Item,
    PeerLost,
    Relay,
    RelayedEnds,
    decode_item,
    encode_item,
)

logger = Log(__name__)

_GRACE_S = 2.0
"""The process' time beyond the deadline: it reports better reasons."""

_OTHERS_GRACE_S = 4.0
"""The same for ranks that wait for rank 0's verdict."""

_LOOK_S = 10.0
"""Time limit for checking whether a dead process has committed."""

_VERDICT_S = 20.0
"""Extra wait for rank 0's verdict if the process died."""

_CLOSE_S = 2.0
"""Time limit for handing over the mailbox."""


class RemoteEngine:
    """See ``Engine``. The uploader calls it, too."""

    _described: Described
    _tasks: anyio.abc.TaskGroup
    _hanging: anyio.abc.TaskGroup
    _ended: anyio.Event

    def __init__(self, save: Save, captured: Captured, uploader: Uploader) -> None:
        self._save = save
        self._host = save.host
        self._uploader = uploader
        self._captured: Captured | None = captured
        self._number = uploader.new_number()
        self._error: BaseException | None = None
        self._cause: Exception | None = None
        self._wanted: frames.StagingWanted | None = None
        self._is_wanted = False  # by the current process
        # By chunk number: held memory, stored chunks.
        self._memory: dict[int, StagedMemory | None] = {}
        self._stored: set[int] = set()
        self._keeps = save.membership is None
        self._may_detach = save.options.detach
        self._has_begun_there = False
        self._is_handed_back = False
        self._has_copied = False
        self._has_staged = False
        self._relay: Relay | None = None
        self._take_over_prepared: anyio.Event | None = None
        if save.membership is not None:
            team, call = save.membership.team, save.membership.call
            assert isinstance(team, Team)
            self._team = team
            # The store must outlive the trainer.
            self._may_detach = self._may_detach and team.can_be_continued
            self._relay = Relay(
                rank=team.rank,
                world_size=team.world_size,
                participant=call.participant,
                coordinator=call.coordinator,
                on_aborted=self._conclude_unless_begun,
            )

    @property
    def is_detached(self) -> bool:
        return self._save.is_detached

    def cancel(self, reason: str) -> None:
        self._uploader.cancel(self._number, reason)

    def close(self) -> None: ...

    async def run(self, tasks: anyio.abc.TaskGroup) -> None:
        self._hanging, self._ended = tasks, anyio.Event()
        try:
            if self._relay is None:
                await self._save.leave_gil_to_caller()
            async with anyio.create_task_group() as self._tasks:
                await self._hand_over()
                await self._ended.wait()
                if self._is_handed_back:
                    await self._save_here()
                if self._relay is not None:
                    await self._relay.flush()
                self._tasks.cancel_scope.cancel()
        finally:
            self._captured = None
            # The process reads a detached save.
            is_read = self._save.is_detached and not self._ended.is_set()
            for memory in self._memory.values():
                if memory is not None and not is_read:
                    memory.release()
            self._memory.clear()
        if self._error is not None:
            raise self._error

    async def _hand_over(self) -> None:
        self._tasks.start_soon(self._await_deadline)
        if self._relay is not None:
            self._tasks.start_soon(self._relay.run)
            await self._save.leave_gil_to_caller()
        self._described = await self._host.run_blocking(describe_state, self._captured)
        self._uploader.add(
            self._number, self, rank=self._save.rank, is_shared=self._relay is not None
        )
        if self._save.cancel_reason is not None:
            self.cancel(self._save.cancel_reason)

    async def _await_deadline(self) -> None:
        """Ends the save if the process does not begin in time; a running one has the deadline."""
        save = self._save
        await anyio.sleep(save.request.left_s + (_OTHERS_GRACE_S if save.rank else _GRACE_S))
        reason = (
            f"timeout_s={save.options.timeout_s:g} has passed, and the uploader process has not "
            "begun the save"
        )
        self._conclude_unless_begun(Failure(reason=reason, stage=Stage.JOIN, rank=save.rank))

    def _conclude_unless_begun(self, failure: Failure) -> None:
        """For rank 0's abort; an engine in the process receives it itself."""
        if not self._has_begun_there and not self._is_handed_back:
            self._uploader.conclude(self._number, failure)

    async def _save_here(self) -> None:
        save, captured = self._save, self._captured
        assert captured is not None
        self._captured = None
        ends: RelayedEnds | None = None
        if self._relay is not None:
            ends = RelayedEnds(self._relay, rank=save.rank)
            self._relay.attach(ends.put)
        save.engine = engine = LocalEngine(save, captured, copies=True, ends=ends)
        del captured
        try:
            await engine.run(self._hanging)
        except Exception as error:
            self._error = error
        finally:
            if ends is not None:
                ends.close()

    # For the uploader

    def begin(self, previous_attempt: str) -> None:
        """Sends the save; staged chunks are announced again on request."""
        self._is_wanted = False
        save, request, described = self._save, self._save.request, self._described
        self._uploader.send_begin(
            frames.BeginSave(
                number=self._number,
                digest=described.digest,
                structure=described.structure,
                values=list(enumerate(described.values)),
                place=request.location.place,
                # The trainer writes the trace; its path may not be UTF-8.
                options=msgspec.msgpack.encode(request.options.for_process()),
                left_s=request.left_s,
                budget_bytes=self._host.resources.budget.limit_bytes,
                overwrite=request.overwrite,
                resume=request.resume,
                metadata=msgspec.json.encode(request.metadata),
                step=request.step,
                previous_attempt=previous_attempt,
                is_recorded=save.observation.is_watched,
                team=None if self._relay is None else self._team.number,
                rank=save.rank,
                world_size=save.world_size,
            )
        )
        if self._relay is not None:
            self._relay.attach(self._pass_on)

    def _pass_on(self, to_coordinator: bool, item: Item) -> None:
        self._uploader.send(frames.EndReceived(self._number, to_coordinator, encode_item(item)))

    def deliver(self, frame: frames.FromSave) -> None:
        match frame:
            case frames.Begun():
                self._save.attempt = frame.attempt
                self._has_begun_there = True
                if self._relay is not None:
                    self._relay.forget()
            case frames.MessageSent():
                assert self._relay is not None
                message = decode_item(frame.message)
                assert not isinstance(message, PeerLost | Broken)
                self._relay.post(frame.to, message)
            case frames.AnswerWanted():
                self._tasks.start_soon(self._answer, frame.subject)
            case frames.StagingWanted():
                self._on_staging_wanted(frame)
            case frames.Progressed():
                self._on_progress(frame)
            case frames.TakeOverPrepared():
                self._on_take_over_prepared(frame.error)
            case frames.Finished():
                self._on_finished(frame)

    def abort(self, failure: Failure) -> None:
        if self._relay is None:
            self._abort(failure)
        else:
            self._tasks.start_soon(self._conclude_for_process, self._relay, failure)

    def let_go(self) -> None:
        """Releases stored chunks; the save can then not be repeated."""
        self._keeps = False
        for chunk in self._stored:
            memory = self._memory.get(chunk)
            if memory is not None:
                del self._memory[chunk]
                self._uploader.forget_memory(self._number)
                memory.release()
        self._stored.clear()

    def make_here(self) -> None:
        """Makes the save in this process: no other can be started. Nothing is staged."""
        self._is_handed_back = True
        self._ended.set()

    def close_mailbox(self) -> None:
        """Hands the mailbox over to the process. Blocks for a moment."""
        if self._relay is not None:
            self._team.port.close(_CLOSE_S, is_continued=True)

    async def _answer(self, subject: frames.Subject) -> None:
        answer: frames.Answer
        if subject == "turn":
            assert self._save.turn is not None
            answer = await self._save.turn.wait()
        else:
            assert self._relay is not None
            answer = await self._relay.suspicion()
        self._uploader.send(frames.Answered(self._number, subject, answer))

    def _on_take_over_prepared(self, error: str) -> None:
        assert self._take_over_prepared is not None
        if error:
            self._may_detach = False
            logger.warning(
                "%s: the save is not detached, this process waits for it: %s",
                self._save.label,
                error,
            )
        self._take_over_prepared.set()

    def _on_staging_wanted(self, frame: frames.StagingWanted) -> None:
        """Starts staging. For a second process, announces the staged chunks."""
        before, self._wanted = self._wanted, frame
        self._is_wanted = True
        url = frame.url.decode("utf-8", "surrogatepass")
        if self._relay is not None:
            self._save.attempt = frame.attempt
            if url != self._save.location.url:  # rank 0's
                self._save.move(url)
        if before is None:
            self._tasks.start_soon(self._stage, frame)
        elif self._cause is not None:
            self._report_failed(self._cause)
        elif (before.rules, before.plan) != (frame.rules, frame.plan):
            self._report_failed(RuntimeError("the plan is not the same as before"))
        else:
            self._report(
                frames.Staged(
                    self._number,
                    [(number, self._offset_of(memory)) for number, memory in self._memory.items()],
                    is_waiting=not self._keeps and not self._has_staged,
                    is_last=self._has_staged,
                )
            )

    def _on_progress(self, frame: frames.Progressed) -> None:
        self._save.board.add(hashed=frame.hashed, stored=frame.stored)
        self._stored.update(frame.released)
        if not self._keeps:
            self.let_go()

    def _on_finished(self, frame: frames.Finished) -> None:
        self._save.is_unanswered = frame.is_unanswered
        if frame.record:
            record = msgspec.msgpack.decode(frame.record, type=Record)
            # The trainer marks the end of staging.
            marks = [mark for mark in record.marks if mark.name != "staged"]
            record = msgspec.structs.replace(record, marks=marks)
            self._save.observation.adopt(record, frame.retries)
        if frame.error is not None:
            self._error = decode(frame.error)
            if self._cause is not None:
                set_cause(self._error, self._cause)
        self._ended.set()

    async def _conclude_for_process(self, relay: Relay, failure: Failure) -> None:
        """Ends the call of all ranks for a dead process."""
        outcome: Failure | None = msgspec.structs.replace(failure, may_be_visible=True)
        with anyio.move_on_after(self._save.request.left_s + _VERDICT_S):
            outcome = await relay.conclude(failure, self._is_committed)
        if outcome is not None:
            self._abort(outcome)
        self._ended.set()

    def _abort(self, failure: Failure) -> None:
        is_own = failure.rank == self._save.rank
        self._error = failure.to_error(
            cause=self._cause if is_own else None, names_rank=self._save.world_size > 1
        )
        is_expected = failure.stage is Stage.CANCEL
        level = logging.DEBUG if is_expected else logging.ERROR
        logger.log(level, "%s: %s", self._save.label, self._error)
        self._ended.set()

    async def _is_committed(self) -> bool:
        """False if the storage does not answer."""
        if self._wanted is None:
            return False
        errands = AbandonableTasks(
            self._hanging, run_blocking=self._host.run_blocking, label=self._save.label
        )
        with anyio.move_on_after(_LOOK_S):
            try:
                storage = await open_location(
                    self._host,
                    self._save.location,
                    fsync=False,
                    run_blocking=errands.run_blocking,
                )
                try:
                    return await is_committed(storage, errands, self._wanted.attempt)
                finally:
                    await errands.close(storage.aclose)
            except Exception as error:  # of any backend
                logger.warning(
                    "%s: whether it is committed is unknown: %s", self._save.label, error
                )
        return False

    # Staging

    async def _stage(self, frame: frames.StagingWanted) -> None:
        try:
            await self._stage_all(frame)
        except Exception as error:  # of any device
            cause = first_error(error)
            assert isinstance(cause, Exception)
            self._cause = cause
            self._report_failed(cause)
            return
        if self._relay is not None and self._may_detach:
            await self._prepare_detaching()
        self._captured = None
        self._has_staged = True
        self._save.observation.recorder.mark("staged")
        self._report(frames.Staged(self._number, is_last=True))
        self._save.board.enter(Phase.STORING)
        if self._may_detach:
            self._save.is_detached = True
            self._save.leave_process()
        self._save.staged.set_result(None)

    async def _prepare_detaching(self) -> None:
        """Waits until the process can open the mailbox."""
        assert self._save.membership is not None
        call = self._save.membership.call
        assert isinstance(call, TeamCall)
        self._take_over_prepared = anyio.Event()
        try:
            self._report(await self._team.take_over(self._number, call))
        except Exception as error:  # of torch's store
            self._on_take_over_prepared(describe(error))
        await self._take_over_prepared.wait()

    async def _stage_all(self, frame: frames.StagingWanted) -> None:
        assert self._captured is not None
        objects = await self._host.run_blocking(
            self._uploader.pack, self._described, self._captured, self._save.rank, frame
        )
        chunks = write_order(objects)
        self._save.board.plan(sum(plan.nbytes for plan in objects))
        out, staged = anyio.create_memory_object_stream[StagedChunk](len(chunks) + 1)
        order = StagingOrder(objects, chunks, out, anyio.Event())
        staging = StagingActor(
            self._captured.leaves,
            copies=True,
            budget=self._host.resources.budget,
            run_blocking=self._host.run_blocking,
            num_copiers=self._host.num_workers,
            board=self._save.board,
            recorder=self._save.observation.recorder,
            fence=self._save.fence,
        )
        numbers = {(chunk.object, chunk.index): n for n, chunk in enumerate(chunks)}
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._announce, staged, numbers)
                tasks.start_soon(self._make_room, order.may_store)
                await staging.run(order)
                self._has_copied = True
        finally:
            with staged:
                release_leases(staged)

    async def _announce(
        self,
        staged: MemoryObjectReceiveStream[StagedChunk],
        numbers: dict[tuple[int, int], int],
    ) -> None:
        async for chunk in staged:
            number = numbers[chunk.chunk.object, chunk.chunk.index]
            self._memory[number] = chunk.lease
            self._report(frames.Staged(self._number, [(number, self._offset_of(chunk.lease))]))

    def _offset_of(self, memory: StagedMemory | None) -> int | None:
        return None if memory is None else self._host.resources.arena.offset_of(memory.view)

    async def _make_room(self, full: anyio.Event) -> None:
        """If staging waits for memory, releases memory kept for a repeated save."""
        await full.wait()
        if not self._has_copied:
            self._report(frames.Staged(self._number, is_waiting=True))
            self._uploader.make_room()

    def _report_failed(self, cause: Exception) -> None:
        self._report(frames.Staged(self._number, error=encode(cause)))

    def _report(self, frame: frames.ToProcess) -> None:
        if self._is_wanted:
            self._uploader.send(frame)
