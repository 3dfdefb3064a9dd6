"""A save of this process that its uploader process makes: capture and staging are here.

Staged chunks keep their memory until the save has ended, so that another process can begin anew if
this one dies, or until some save has to wait for memory. Where no process can be started the save
is made here.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Sequence

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.errands import first_error
from actorsnap.actors.fence import Fence
from actorsnap.actors.items import StagedChunk, StagedMemory, StagingOrder, release_leases
from actorsnap.actors.staging import StagingActor, sources_of
from actorsnap.actors.trace import Phase, Record
from actorsnap.errors import SnapshotAborted, printable
from actorsnap.lines import Lines
from actorsnap.planning.packing import write_order
from actorsnap.protocol.frames import (
    ChunksStaged,
    Fault,
    Finished,
    Recorded,
    Save,
    StagingEnded,
    StagingFailed,
    StagingWaits,
    StagingWanted,
    ToProcess,
)
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.runtime.host import Host
from actorsnap.runtime.job import Job, SaveRequest
from actorsnap.runtime.observing import Observation
from actorsnap.runtime.offload import Uploader
from actorsnap.runtime.ranks import Membership
from actorsnap.runtime.saving import SaveJob
from actorsnap.runtime.structure import Described, describe
from actorsnap.state.captured import Captured

__all__ = ["GRACE_S", "OffloadedSave"]

logger = Lines(__name__)

GRACE_S = 2.0
"""Extra time the process has beyond the deadline, in seconds: it can say more about the reason."""


class OffloadedSave(Job):
    """A save in flight that the uploader process makes. See also ``Job``, and ``HandedSave``.

    Args:
        uploader, membership: See ``OffloadedTeamSave``; one rank alone has a process and no team.
    """

    described: Described

    def __init__(
        self,
        host: Host,
        uploader: Uploader | None,
        request: SaveRequest,
        captured: Captured,
        *,
        membership: Membership | None = None,
        fence: Fence | None = None,
        observation: Observation | None = None,
    ) -> None:
        super().__init__(host, request, membership=membership, fence=fence, observation=observation)
        self._maybe_uploader = uploader
        self._captured: Captured | None = captured
        self._number = -1 if uploader is None else uploader.new_number()
        self._tasks: anyio.abc.TaskGroup
        self._ended: anyio.Event
        self._error: BaseException | None = None
        self._cause: Exception | None = None
        self._wanted: StagingWanted | None = None
        self._is_wanted = False  # by the process that there is now
        # By number: the memory that is held, where it is, and what is stored of it.
        self._memory: dict[int, StagedMemory | None] = {}
        self._offsets: dict[int, int | None] = {}
        self._stored: set[int] = set()
        self._keeps = membership is None
        self._has_copied = False
        self._has_staged = False
        self._here: SaveJob | None = None

    @property
    def is_staging(self) -> bool:
        """Whether the process has to wait for this one."""
        return not self._has_staged

    @property
    def is_detached(self) -> bool:
        """Whether the save goes on without this process."""
        return self.options.detach and self._has_staged

    @property
    def _uploader(self) -> Uploader:
        assert self._maybe_uploader is not None
        return self._maybe_uploader

    def _awaited_at_exit(self) -> concurrent.futures.Future[None]:
        # What is detached needs this process until it is staged.
        return self.staged if self.options.detach else self.finished

    def _on_cancel(self, reason: str) -> None:
        if not self._has_begun:
            # ``start`` was interrupted. Other ranks count on this one: it begins, to end at once.
            self._host.submit(self._begin())
        elif self._here is not None:
            self._here.cancel(reason)
        else:
            self._uploader.cancel(self._number, reason)

    async def _run(self) -> None:
        self._ended = anyio.Event()
        try:
            await self._leave_gil_to_caller()
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await self._save()
                tasks.cancel_scope.cancel()
        except Exception as error:  # this end's own
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
        """Hands the save over; returns when it has ended."""
        self._tasks.start_soon(self._await_deadline)
        await self._describe()
        self._uploader.add(self._number, self)
        if self._cancel_reason is not None and self._here is None:
            self._uploader.cancel(self._number, self._cancel_reason)
        await self._ended.wait()

    async def _await_deadline(self) -> None:
        """Ends the save if the process is not there in time; one that is has the deadline, too."""
        await anyio.sleep(self._request.left_s + GRACE_S)
        if self._wanted is None and self._here is None:
            reason = (
                f"timeout_s={self.options.timeout_s:g} is over, and the uploader process has not "
                "begun the save"
            )
            failure = Failure(reason=reason, stage=Stage.JOIN, rank=self.rank)
            self._uploader.end(self._number, failure)

    async def _describe(self) -> None:
        assert self._captured is not None
        self.described = await self._host.run_blocking(describe, self._captured)

    def _leave_memory(self, *, is_read: bool) -> None:
        """Gives it back, unless the process goes on to read it: then nobody else may get it."""
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
        if self.fence is not None:
            self.fence.open()
        self.board.enter(Phase.COMMITTED)
        self.finished.set_result(None)

    # What the uploader calls

    def frame(self, values: list[tuple[int, bytes]], after: str) -> Save:
        """See ``HandedSave``."""
        self._is_wanted = False
        request = self._request
        return Save(
            number=self._number,
            structure=self.described.digest,
            values=values,
            url=printable(request.place.url),
            at=request.place.at.encode("utf-8", "surrogatepass"),
            storage_options=request.place.storage_options,
            # The trace is written here, and its path may be no UTF-8.
            options=msgspec.msgpack.encode(msgspec.structs.replace(request.options, trace=None)),
            left_s=request.left_s,
            budget_bytes=self._host.budget.limit_bytes,
            overwrite=request.overwrite,
            resume=request.resume,
            metadata=msgspec.json.encode(request.metadata),
            step=request.step,
            after=after,
            records=self._observation is not None,
        )

    def on_begun(self) -> None:
        """The process has the save."""

    def on_staging_wanted(self, frame: StagingWanted) -> None:
        """Stages; behind the death of a process, announces what is staged already."""
        before, self._wanted = self._wanted, frame
        self._is_wanted = True
        if before is None:
            self._tasks.start_soon(self._stage, frame)
        elif self._cause is not None:
            self._say_failed()
        elif (before.rules, before.plan) != (frame.rules, frame.plan):
            fault = Fault("RuntimeError", "the plan is not the same as before")
            self._say(StagingFailed(self._number, [fault]))
        else:
            self._say(ChunksStaged(self._number, list(self._offsets.items())))
            if self._has_staged:
                self._say(StagingEnded(self._number))
            elif not self._keeps:
                self._say(StagingWaits(self._number))

    def on_released(self, chunks: Sequence[int]) -> None:
        """The memory is free, or kept for another process."""
        self._stored.update(chunks)
        if not self._keeps:
            self.let_go()

    def let_go(self) -> None:
        """Gives back the memory of what is stored; the save can then not begin anew."""
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
        if self._observation is not None:
            self._observation.attempt = frame.attempt
            record = msgspec.msgpack.decode(frame.record, type=Record)
            # When the trainer may go on is known here.
            marks = [mark for mark in record.marks if mark.name != "staged"]
            record = msgspec.structs.replace(record, marks=marks)
            self._observation.adopt(record, frame.retries)

    def on_finished(self, frame: Finished) -> None:
        if frame.faults is not None:
            self._error = Fault.to_error(frame.faults)
            if self._cause is not None:
                self._error.__cause__ = self._cause
        self._finish()

    def _finish(self) -> None:
        """The process has told the outcome."""
        self._ended.set()

    def on_aborted(self, failure: Failure) -> None:
        self._error = failure.to_error()
        self._log_abort(failure)
        self._ended.set()

    def _log_abort(self, failure: Failure) -> None:
        is_expected = failure.stage is Stage.CANCEL
        level = logging.DEBUG if is_expected else logging.ERROR
        logger.log(level, "%s: %s", self.label, self._error)

    def make_here(self) -> None:
        """See ``HandedSave``. Nothing has been staged."""
        assert self._captured is not None
        self._here = job = SaveJob(
            self._host,
            self._request,
            self._captured,
            copies=True,
            membership=self._process_membership(),
            fence=self.fence,
            observation=self._observation,
        )
        self._captured = self._observation = None
        job.board.subscribe(lambda: self.board.show(job.board.latest))
        if self.fence is not None:
            _pass_on(job.eager_staged, self.eager_staged)
        _pass_on(job.staged, self.staged)
        self._follow(job)
        job.start()
        if self._cancel_reason is not None:
            job.cancel(self._cancel_reason)

    def _process_membership(self) -> Membership | None:
        """What the process would have got."""
        return None

    def _follow(self, job: SaveJob) -> None:
        """Ends as the save that is made here does."""
        _pass_on(job.finished, self.finished)
        self._ended.set()

    # Staging

    async def _stage(self, frame: StagingWanted) -> None:
        try:
            await self._stage_all(frame)
        except Exception as error:  # whatever a device copy raises
            cause = first_error(error)
            assert isinstance(cause, Exception)
            self._cause = cause
            self._say_failed()
            return
        self._captured = None
        self._has_staged = True
        if self._observation is not None:
            self._observation.recorder.mark("staged")
        self._say(StagingEnded(self._number))
        self.board.enter(Phase.STORING)
        self.staged.set_result(None)

    def _say_failed(self) -> None:
        assert self._cause is not None
        self._say(StagingFailed(self._number, Fault.chain(self._cause)))

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
            budget=self._host.budget,
            run_blocking=self._host.run_blocking,
            # One chunk waits for each thread, so that none idles while the loop hands on the last.
            num_copiers=2 * self._host.num_workers,
            board=self.board,
            recorder=None if self._observation is None else self._observation.recorder,
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
                offset = self._host.arena.offset_of(chunk.lease.view)
            self._memory[number] = chunk.lease
            self._offsets[number] = offset
            self._say(ChunksStaged(self._number, [(number, offset)]))

    async def _make_room(self, full: anyio.Event) -> None:
        """Where memory makes staging wait, no save keeps any for a process that may die."""
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
