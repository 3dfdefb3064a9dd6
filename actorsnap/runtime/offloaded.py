"""The trainer's half of a save made by the uploader process: capture and staging.

Staged chunks keep their memory until the save has ended, so that a new process can repeat the save
if this one dies. They give it up earlier if any save waits for memory. If no process can be
started, the save is made in the trainer.

With several ranks the mailbox also stays in the trainer, and messages are relayed
(``transport.relay``). If the process dies, the trainer ends the call. With ``detach``, if the
trainer ends, the process opens the mailbox.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Sequence

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.abandonable import AbandonableTasks, first_error
from actorsnap.actors.fence import Fence
from actorsnap.actors.fetcher import find_commit
from actorsnap.actors.items import StagedChunk, StagedMemory, StagingOrder, release_leases
from actorsnap.actors.staging import StagingActor, sources_of
from actorsnap.actors.trace import Phase, Record
from actorsnap.errors import SnapshotAborted, describe, printable
from actorsnap.log import Log
from actorsnap.planning.packing import write_order
from actorsnap.protocol.failure import Failure, Stage, decode, encode
from actorsnap.protocol.uploader import (
    AbsenceReported,
    ChunksStaged,
    EndReceived,
    Finished,
    MessageSent,
    Recorded,
    Save,
    StagingEnded,
    StagingFailed,
    StagingWaits,
    StagingWanted,
    ToProcess,
    TurnGiven,
)
from actorsnap.runtime.host import Host
from actorsnap.runtime.job import Job, SaveRequest
from actorsnap.runtime.location import open_location
from actorsnap.runtime.saving import SaveJob
from actorsnap.runtime.structure import Described, describe_state
from actorsnap.runtime.team import Membership, RelayedCall, Team, TeamCall
from actorsnap.runtime.tracing import Observation
from actorsnap.runtime.uploader_client import Uploader
from actorsnap.state.captured import Captured
from actorsnap.transport.ends import Broken, PeerLost
from actorsnap.transport.relay import Item, Relay, RelayedEnds, decode_item, encode_item

__all__ = ["OffloadedSave"]

logger = Log(__name__)

_GRACE_S = 2.0
"""Extra time of the process beyond the deadline, in seconds: it can report better reasons."""

_OTHERS_GRACE_S = 4.0
"""The same for ranks that wait for rank 0's verdict, in seconds."""

_LOOK_S = 10.0
"""Time limit for checking whether a dead process has committed the save, in seconds."""

_VERDICT_S = 20.0
"""Extra time beyond the deadline to wait for rank 0's verdict if the process died, in seconds."""

_CLOSE_S = 2.0
"""Time limit for handing the mailbox over to the process, in seconds."""


class OffloadedSave(Job):
    """A save made by the uploader process. See also ``Job`` and ``HandedSave``."""

    described: Described

    def __init__(
        self,
        host: Host,
        uploader: Uploader,
        request: SaveRequest,
        captured: Captured,
        *,
        membership: Membership | None = None,
        fence: Fence | None = None,
        observation: Observation | None = None,
    ) -> None:
        super().__init__(host, request, membership=membership, fence=fence, observation=observation)
        self._uploader = uploader
        self._captured: Captured | None = captured
        self._number = uploader.new_number()
        self._tasks: anyio.abc.TaskGroup
        self._ended: anyio.Event
        self._error: BaseException | None = None
        self._cause: Exception | None = None
        self._wanted: StagingWanted | None = None
        self._is_wanted = False  # by the current process
        # By chunk number: the held memory, its offset, and the stored chunks.
        self._memory: dict[int, StagedMemory | None] = {}
        self._offsets: dict[int, int | None] = {}
        self._stored: set[int] = set()
        self._keeps = membership is None
        self._may_detach = request.options.detach
        self._has_begun_there = False
        self._relay: Relay | None = None
        self._moved: anyio.Event | None = None
        if membership is not None:
            team, call = membership.team, membership.call
            assert isinstance(team, Team)
            self._team = team
            # The process needs a store that outlives the trainer.
            self._may_detach = self._may_detach and team.can_be_continued
            self._relay = Relay(
                rank=team.rank,
                world_size=team.world_size,
                participant=call.participant,
                coordinator=call.coordinator,
                on_aborted=self._on_verdict,
            )
        self._has_copied = False
        self._has_staged = False
        self._here: SaveJob | None = None

    @property
    def is_detached(self) -> bool:
        """Whether the save continues without this process."""
        return self._may_detach and self._has_staged

    def _awaited_at_exit(self) -> concurrent.futures.Future[None]:
        # A detached save needs this process until it is staged.
        return self.staged if self._may_detach else self.finished

    def _on_cancel(self, reason: str) -> None:
        if not self._has_begun:
            # ``start`` was interrupted. Other ranks count on this one: it begins and ends at once.
            self._host.submit(self._begin())
        elif self._here is not None:
            self._here.cancel(reason)
        else:
            self._uploader.cancel(self._number, reason)

    async def _run(self) -> None:
        self._ended = anyio.Event()
        try:
            if self._relay is None:
                await self._leave_gil_to_caller()
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await self._save()
                if self._relay is not None:
                    await self._relay.flush()
                tasks.cancel_scope.cancel()
        except Exception as error:  # an error of the trainer's half
            self._error = first_error(error)
        except BaseException:
            self._error = self._stopped()
            raise
        finally:
            self._leave()
            if self._here is None or self.is_shared:
                self._captured = None
                self._leave_memory(is_read=self.is_detached and not self._ended.is_set())
                await self._end_observation(self._error)
                self._settle(self._error)

    async def _save(self) -> None:
        """Hands the save over and waits for its end."""
        self._tasks.start_soon(self._await_deadline)
        if self._relay is not None:
            self._tasks.start_soon(self._relay.run)
            await self._leave_gil_to_caller()
        self.described = await self._host.run_blocking(describe_state, self._captured)
        self._uploader.add(self._number, self)
        if self._cancel_reason is not None and self._here is None:
            self._uploader.cancel(self._number, self._cancel_reason)
        await self._ended.wait()

    async def _await_deadline(self) -> None:
        """Ends the save if the process does not begin in time; a running one has the deadline."""
        await anyio.sleep(self._request.left_s + (_OTHERS_GRACE_S if self.rank else _GRACE_S))
        if not self._has_begun_there and self._here is None:
            reason = (
                f"timeout_s={self.options.timeout_s:g} is over, and the uploader process has not "
                "begun the save"
            )
            failure = Failure(reason=reason, stage=Stage.JOIN, rank=self.rank)
            self._uploader.end(self._number, failure)

    def _leave_memory(self, *, is_read: bool) -> None:
        """Releases staging memory, except blocks that the uploader process is still reading."""
        for memory in self._memory.values():
            if memory is not None and not is_read:
                memory.release()
        self._memory.clear()

    def _stopped(self) -> SnapshotAborted:
        if self.is_detached:
            return SnapshotAborted(
                reason="the runtime was stopped; the uploader process goes on",
                rank=self.rank,
                stage=str(Stage.STORE),
                may_be_committed=True,
            )
        reason = "the runtime was stopped"
        return SnapshotAborted(reason=reason, rank=self.rank, stage=str(Stage.CANCEL))

    def _settle(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
            return
        self._end_turn()
        if self.fence is not None:
            self.fence.open()
        self.board.enter(Phase.COMMITTED)
        self.finished.set_result(None)

    # What the uploader calls

    def frame(self, values: list[tuple[int, bytes]], after: str) -> Save:
        self._is_wanted = False
        request = self._request
        return Save(
            number=self._number,
            structure=self.described.digest,
            values=values,
            url=printable(request.location.display_url),
            at=request.location.url.encode("utf-8", "surrogatepass"),
            storage_options=request.location.storage_options,
            # The trainer writes the trace, and its path may not be UTF-8.
            options=msgspec.msgpack.encode(msgspec.structs.replace(request.options, trace=None)),
            left_s=request.left_s,
            budget_bytes=self._host.resources.budget.limit_bytes,
            overwrite=request.overwrite,
            resume=request.resume,
            metadata=msgspec.json.encode(request.metadata),
            step=request.step,
            after=after,
            records=self._observation.is_watched,
            team=None if self._relay is None else self._team.as_rank(),
        )

    def on_sent(self) -> None:
        """Relays everything that has arrived for this rank to the process."""
        if self._relay is not None:
            self._relay.attach(self._pass_on_item)

    def _pass_on_item(self, to_coordinator: bool, item: Item) -> None:
        self._uploader.send(EndReceived(self._number, to_coordinator, encode_item(item)))

    def on_begun(self) -> None:
        self._has_begun_there = True
        if self._relay is not None:
            self._relay.forget()

    def on_message(self, frame: MessageSent) -> None:
        assert self._relay is not None
        message = decode_item(frame.message)
        assert not isinstance(message, PeerLost | Broken)
        self._relay.post(frame.to, message)

    def on_absence_asked(self) -> None:
        """Reports whether a rank is absent, after reading the mailbox."""
        self._tasks.start_soon(self._report_absence)

    def on_turn_asked(self) -> None:
        """Gives the commit turn when earlier saves have ended, in either process."""
        self._tasks.start_soon(self._give_turn)

    async def _give_turn(self) -> None:
        assert self._turn is not None
        is_unanswered = await self._turn.wait()
        self._uploader.send(TurnGiven(self._number, is_unanswered))

    async def _report_absence(self) -> None:
        assert self._relay is not None
        reason = await self._relay.absence()
        self._uploader.send(AbsenceReported(self._number, reason))

    def on_take_over_prepared(self, error: str) -> None:
        """Allows the save to be detached, unless there is an error."""
        assert self._moved is not None
        if error:
            self._may_detach = False
            logger.warning(
                "%s: the save is not detached, this process waits for it: %s", self.label, error
            )
        self._moved.set()

    def close_mailbox(self) -> None:
        if self._relay is not None:
            self._team.port.close(_CLOSE_S, is_continued=True)

    def _on_verdict(self, failure: Failure) -> None:
        """Ends the save after rank 0's abort, unless a saver has begun: that ends it."""
        if not self._has_begun_there and self._here is None:
            self._uploader.end(self._number, failure)

    def on_staging_wanted(self, frame: StagingWanted) -> None:
        """Starts staging. For a second process, announces the chunks already staged."""
        before, self._wanted = self._wanted, frame
        self._is_wanted = True
        at = frame.at.decode("utf-8", "surrogatepass")
        if self.is_shared and at != self._request.location.url:  # rank 0's
            self._go_to(at)
        if before is None:
            self._tasks.start_soon(self._stage, frame)
        elif self._cause is not None:
            self._say_failed(self._cause)
        elif (before.rules, before.plan) != (frame.rules, frame.plan):
            self._say_failed(RuntimeError("the plan is not the same as before"))
        else:
            self._say(ChunksStaged(self._number, list(self._offsets.items())))
            if self._has_staged:
                self._say(StagingEnded(self._number))
            elif not self._keeps:
                self._say(StagingWaits(self._number))

    def on_released(self, chunks: Sequence[int]) -> None:
        """Records stored chunks; keeps or releases their memory."""
        self._stored.update(chunks)
        if not self._keeps:
            self.let_go()

    def let_go(self) -> None:
        """Releases the memory of stored chunks; the save can then not be repeated."""
        self._keeps = False
        for chunk in self._stored:
            memory = self._memory.pop(chunk, None)
            if memory is not None:
                self._uploader.forget_memory(self._number)
                memory.release()
        self._stored.clear()

    def on_progress(self, hashed: int, stored: int) -> None:
        self.board.add(hashed=hashed, stored=stored)

    def on_recorded(self, frame: Recorded) -> None:
        self._observation.attempt = frame.attempt
        record = msgspec.msgpack.decode(frame.record, type=Record)
        # The trainer marks the end of staging itself.
        marks = [mark for mark in record.marks if mark.name != "staged"]
        record = msgspec.structs.replace(record, marks=marks)
        self._observation.adopt(record, frame.retries)

    def on_finished(self, frame: Finished) -> None:
        self.is_unanswered = frame.is_unanswered
        if frame.error is not None:
            self._error = decode(frame.error)
            if self._cause is not None:
                self._error.__cause__ = self._cause
        self._ended.set()

    def on_aborted(self, failure: Failure) -> None:
        if self._relay is None:
            self._abort(failure)
        else:
            self._tasks.start_soon(self._conclude, self._relay, failure)

    async def _conclude(self, relay: Relay, failure: Failure) -> None:
        """Ends the call of all ranks in place of the dead process."""
        outcome: Failure | None = msgspec.structs.replace(failure, may_be_visible=True)
        with anyio.move_on_after(self._request.left_s + _VERDICT_S):
            outcome = await relay.conclude(failure, self._is_committed)
        if outcome is not None:
            self._abort(outcome)
        self._ended.set()

    def _abort(self, failure: Failure) -> None:
        self._error = failure.to_error()
        if failure.rank == self.rank:
            self._error.__cause__ = self._cause
        is_expected = failure.stage is Stage.CANCEL
        level = logging.DEBUG if is_expected else logging.ERROR
        logger.log(level, "%s: %s", self.label, self._error)
        self._ended.set()

    async def _is_committed(self) -> bool | None:
        """Returns whether the save is committed; None if the storage does not answer."""
        if self._wanted is None:
            return False
        found: bool | None = None
        async with anyio.create_task_group() as tasks:
            errands = AbandonableTasks(
                tasks, run_blocking=self._host.run_blocking, label=self.label
            )
            with anyio.move_on_after(_LOOK_S):
                try:
                    found = await self._look(errands, self._wanted.attempt)
                except Exception as error:  # any error of a backend
                    logger.warning("%s: whether it is committed is unknown: %s", self.label, error)
        return found

    async def _look(self, errands: AbandonableTasks, attempt: str) -> bool:
        storage = await open_location(
            self._host,
            self._request.location,
            fsync=False,
            run_blocking=errands.run_blocking,
        )
        try:
            commit = await errands.run(find_commit, storage)
            return commit is not None and commit.attempt == attempt
        finally:
            await errands.close(storage.aclose)

    def make_here(self) -> None:
        """See ``HandedSave``. Nothing has been staged."""
        assert self._captured is not None
        self._here = job = SaveJob(
            self._host,
            self._request,
            self._captured,
            copies=True,
            membership=self._relayed_membership(),
            fence=self.fence,
            observation=self._observation,
            turn=self._turn,
        )
        self._captured, self._observation = None, Observation("save")
        job.board.subscribe(lambda: self.board.show(job.board.latest))
        if self.fence is not None:
            _pass_on(job.eager_staged, self.eager_staged)
        _pass_on(job.staged, self.staged)
        if self._relay is None:
            _pass_on(job.finished, self.finished)
            self._ended.set()
        else:
            job.finished.add_done_callback(self._on_made_here)
        job.start()
        if self._cancel_reason is not None:
            job.cancel(self._cancel_reason)

    def _relayed_membership(self) -> Membership | None:
        """Returns the membership for a save in the trainer, over the relay."""
        if self._relay is None:
            return None
        ends = RelayedEnds(self._relay, rank=self.rank)
        self._relay.attach(ends.put)
        return Membership(self._team, RelayedCall(ends))

    def _on_made_here(self, finished: concurrent.futures.Future[None]) -> None:
        self._error = finished.exception()
        self._ended.set()

    # Staging

    async def _stage(self, frame: StagingWanted) -> None:
        try:
            await self._stage_all(frame)
        except Exception as error:  # any error of a device copy
            cause = first_error(error)
            assert isinstance(cause, Exception)
            self._cause = cause
            self._say_failed(cause)
            return
        if self._relay is not None and self._may_detach:
            await self._prepare_detaching()
        self._captured = None
        self._has_staged = True
        self._observation.recorder.mark("staged")
        self._say(StagingEnded(self._number))
        self.board.enter(Phase.STORING)
        self.staged.set_result(None)

    async def _prepare_detaching(self) -> None:
        """Waits until the process can open the rank's mailbox."""
        assert self._membership is not None
        call = self._membership.call
        assert isinstance(call, TeamCall)
        self._moved = anyio.Event()
        try:
            self._say(await self._team.take_over(self._number, call))
        except Exception as error:  # any error of torch's store
            self.on_take_over_prepared(describe(error))
        await self._moved.wait()

    def _say_failed(self, cause: Exception) -> None:
        self._say(StagingFailed(self._number, encode(cause)))

    async def _stage_all(self, frame: StagingWanted) -> None:
        assert self._captured is not None
        leaves = self._captured.leaves
        objects = await self._host.run_blocking(
            self._uploader.pack, self.described, self._captured, self.rank, frame
        )
        chunks = write_order(objects)
        self.board.plan(sum(plan.nbytes for plan in objects))
        out, staged = anyio.create_memory_object_stream[StagedChunk](len(chunks) + 1)
        order = StagingOrder(objects, chunks, out, anyio.Event())
        staging = StagingActor(
            order,
            sources=[sources_of(plan, leaves) for plan in objects],
            copies=True,
            budget=self._host.resources.budget,
            run_blocking=self._host.run_blocking,
            # A waiting chunk per thread keeps threads busy while the loop passes on the last one.
            num_copiers=2 * self._host.num_workers,
            board=self.board,
            recorder=self._observation.recorder,
            fence=self.fence,
            on_eager_staged=self._on_eager_staged,
        )
        numbers = {(chunk.object, chunk.index): n for n, chunk in enumerate(chunks)}
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._announce, staged, numbers)
                tasks.start_soon(self._make_room, order.full)
                await staging.run()
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
            offset = None
            if chunk.lease is not None:
                offset = self._host.resources.arena.offset_of(chunk.lease.view)
            self._memory[number] = chunk.lease
            self._offsets[number] = offset
            self._say(ChunksStaged(self._number, [(number, offset)]))

    async def _make_room(self, full: anyio.Event) -> None:
        """If staging has to wait for memory, releases memory kept for a repeated save."""
        await full.wait()
        if not self._has_copied:
            self._say(StagingWaits(self._number))
            self._uploader.make_room()

    def _say(self, frame: ToProcess) -> None:
        if self._is_wanted:
            self._uploader.send(frame)


def _pass_on(
    source: concurrent.futures.Future[None], target: concurrent.futures.Future[None]
) -> None:
    def settle(done: concurrent.futures.Future[None]) -> None:
        error = done.exception()
        if error is None:
            target.set_result(None)
        else:
            target.set_exception(error)

    if not target.done():
        source.add_done_callback(settle)
