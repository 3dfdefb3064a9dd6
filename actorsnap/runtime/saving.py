"""One save in this process, from captured state to outcome.

Puts storage, transport, participant and, on rank 0, the coordinator together on the runtime's
loop, maps the outcome to one error, and collects garbage behind a commit.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import logging
import time
import traceback
from typing import Any, TypeAlias

import anyio

from actorsnap.actors.coordinator import CommitTemplate, CoordinatorActor
from actorsnap.actors.errands import Errands
from actorsnap.actors.reader import find_commit
from actorsnap.actors.session import ParticipantActor, SaveSettings
from actorsnap.actors.trace import Phase, ProgressBoard
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    NotASnapshot,
    ObjectExists,
    SnapshotAborted,
    StorageError,
    UnsupportedFormat,
)
from actorsnap.format.manifest import COMMIT_KEY, Commit
from actorsnap.options import Options, chunk_within
from actorsnap.planning.packing import PackingRules
from actorsnap.protocol.coordinator import CoordinatorMachine
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.protocol.participant import ParticipantMachine, StartStoring
from actorsnap.release import RELEASE
from actorsnap.runtime.host import Host
from actorsnap.runtime.place import (
    Place,
    Source,
    collect_garbage,
    find_resumable,
    open_place,
)
from actorsnap.runtime.ranks import Team
from actorsnap.state.capture import Captured
from actorsnap.storage.base import Capabilities, Storage
from actorsnap.storage.registry import without_secrets
from actorsnap.transport.base import CoordinatorEnd, ParticipantEnd
from actorsnap.transport.inproc import InprocTransport
from actorsnap.transport.store import StoreSave

__all__ = ["SaveJob"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""So long, and not beyond the deadline, the outcome waits for the garbage to be gone."""


_GRACE_S = 10.0
"""So much later than the coordinator a rank knows by itself that the time is over."""

_Ends: TypeAlias = tuple[ParticipantEnd, CoordinatorEnd | None]


class Membership:
    """A rank's part in one save of its team.

    Attributes:
        save: Whose number all ranks have taken.
        memory: What this save's coordinator knows from the one before.
    """

    def __init__(self, team: Team, save: StoreSave[Any, Any]) -> None:
        self.team = team
        self.save = save
        self.memory = team.memory.copy()


class SaveJob:
    """A save in flight.

    Args:
        place: Where this rank was asked to save; rank 0's holds.
        captured: The rank's state, or why there is none.
        resume: Use what dead attempts at the place have left; rank 0's holds.
        membership: None where this is the only rank.
        cause: The exception behind ``captured`` where that is a failure.

    Attributes:
        staged: Settled when the trainer may overwrite its tensors; with the save's error if
            it ends before.
        finished: Settled with the outcome; the error is the one that users see.
        board: Progress.
    """

    def __init__(
        self,
        host: Host,
        *,
        place: Place,
        captured: Captured | Failure,
        copies: bool,
        overwrite: bool,
        resume: bool,
        metadata: dict[str, Any],
        options: Options,
        membership: Membership | None = None,
        cause: BaseException | None = None,
    ) -> None:
        self._host = host
        self._place = place
        self._captured: Captured | Failure | None = captured
        self._copies = copies
        self._overwrite = overwrite
        self._resume = resume
        self._resumed: tuple[str, ...] = ()
        self._metadata = metadata
        self._options = options
        self._membership = membership
        self._rank = 0 if membership is None else membership.team.rank
        # Of rank 0; the others are told.
        self._attempt = host.new_attempt() if self._rank == 0 else None
        self._storage: Storage | None = None
        self._cause = cause
        self._participant: ParticipantActor | None = None
        self._cancel_reason: str | None = None
        self._scope: anyio.CancelScope | None = None
        self._has_begun = False
        self._is_committed = False
        self.label = f"snapshot {place.url} rank {self._rank}"
        if self._attempt is not None:
            self.label += f" attempt {self._attempt}"
        self.board = ProgressBoard(self.label)
        self.staged: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._concluded: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def url(self) -> str:
        """Where it is saved to: rank 0's, as soon as that is known."""
        return self._place.url

    def start(self) -> None:
        """Begins; returns at once."""
        self._host.set_budget(self._options.memory_budget_bytes)
        self._host.track_save(self._concluded, self.label)
        self._host.submit(self._run())

    def cancel(self, reason: str) -> None:
        """Asks for an abort, from any thread, also if ``start`` was interrupted. The commit
        may win nevertheless."""
        self.check_process()
        if self.finished.done():
            return  # the runtime may be gone

        def request() -> None:
            self._cancel_reason = self._cancel_reason or reason
            if not self._has_begun and not self.finished.done():
                self._settle(SnapshotAborted(reason=reason, rank=self._rank, stage=Stage.CANCEL))
                self._leave()
                self._concluded.set_result(None)
            if self._is_committed:
                self._tell()
            elif self._participant is not None:
                self._participant.request_cancel(reason)
            elif self._scope is not None:
                self._scope.cancel()

        self._host.call_soon(request)

    def is_done(self) -> bool:
        self.check_process()
        return self.finished.done()

    def watched(self) -> ProgressBoard:
        self.check_process()
        return self.board

    def check_process(self) -> None:
        """Raises ``UsageError`` in a forked child."""
        self._host.check_process()

    def source(self) -> Source:
        """The committed snapshot; only after ``finished`` succeeded."""
        self.finished.result()
        return Source(self._place, self._options)

    async def _run(self) -> None:
        if self.finished.done():
            return
        self._has_begun = True
        # Told first, ended later: calls of the storage that hang are no reason to keep the outcome.
        try:
            async with anyio.create_task_group() as tasks:
                await self._conclude(
                    Errands(tasks, run_blocking=self._host.run_blocking, label=self.label)
                )
        finally:
            # Now no commit that was not answered can take effect any more.
            self._end_attempt()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._host.end_attempt(self._attempt)

    async def _conclude(self, errands: Errands) -> None:
        """Saves, and tells the outcome."""
        try:
            await self._save(errands)
            self._tell()
        except BaseException as error:
            if self._is_committed:
                self._tell()
                raise
            if isinstance(error, Exception):
                shown: BaseException = error
                # Until staged the caller waits and gets the error; later nobody may ask.
                is_expected = not (self._copies and self.staged.done()) or (
                    isinstance(error, SnapshotAborted) and error.stage == Stage.CANCEL
                )
                logger.log(
                    logging.DEBUG if is_expected else logging.ERROR, "%s: %s", self.label, error
                )
            else:
                shown = SnapshotAborted(
                    reason="the runtime was stopped", rank=self._rank, stage="cancel"
                )
            self._settle(shown)
            if not isinstance(error, Exception):
                raise
        finally:
            self._leave()
            self._concluded.set_result(None)

    def _leave(self) -> None:
        """The other ranks hear no more that this one takes part."""
        if self._membership is not None:
            self._membership.save.close()

    def _tell(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _settle(self, error: BaseException) -> None:
        self._captured = None
        self.board.enter(Phase.ABORTED)
        if not (isinstance(error, SnapshotAborted) and error.may_be_committed):
            self._end_attempt()
        if not self.staged.done():
            self.staged.set_exception(error)
        self.finished.set_exception(error)

    async def _save(self, errands: Errands) -> None:
        deadline = anyio.current_time() + self._options.timeout_s
        fsync = self._options.fsync
        try:
            if self._rank == 0 and not isinstance(self._captured, Failure):
                try:
                    fsync = await self._prepare(errands, deadline)
                except ActorSnapError as error:
                    if self._membership is None:
                        raise
                    self._captured = _failure_of(error)
            coordinator = await self._attempt_save(errands, deadline, fsync=fsync)
            self._is_committed = True
            # From now on whoever comes last collects what this attempt leaves.
            self._end_attempt()
            self.board.enter(Phase.COMMITTED)
            logger.info("%s: committed", self.label)
            if coordinator is not None:
                await self._collect(errands, coordinator.replaced, deadline)
        finally:
            if self._storage is not None:
                await errands.clean_up(self._storage.aclose)

    async def _prepare(self, errands: Errands, deadline: float) -> bool:
        """Opens the storage and looks what is there; returns whether all must be durable."""
        fsync = self._options.fsync
        self._storage = storage = await self._open(errands, str(self._attempt), fsync=fsync)
        older = await self._look(storage, errands, deadline)
        if older is not None and older.fsync and not fsync:
            # Else a power loss could leave neither the older one nor this one.
            await errands.clean_up(storage.aclose)
            self._storage = await self._open(errands, str(self._attempt), fsync=True)
            return True
        return fsync

    async def _open(self, errands: Errands, attempt: str, *, fsync: bool) -> Storage:
        return await open_place(
            self._host,
            self._place,
            fsync=fsync,
            run_blocking=errands.run_blocking,
            scratch=attempt,
        )

    async def _open_assigned(self, errands: Errands, command: StartStoring) -> Storage:
        """The storage that the coordinator says: rank 0's options hold for all."""
        if self._storage is None:
            if command.url != self._place.at:
                url = without_secrets(command.url)
                logger.warning("%s: rank 0 saves to %s: so does this rank", self.label, url)
                self._place = Place(
                    url=url, at=command.url, storage_options=self._place.storage_options
                )
            self._storage = await self._open(errands, command.attempt, fsync=command.fsync)
        return self._storage

    async def _look(self, storage: Storage, errands: Errands, deadline: float) -> Commit | None:
        """``_older``, within the deadline and until a cancellation."""
        reason = f"timeout_s={self._options.timeout_s:g} is over; the storage did not answer"
        stage = Stage.JOIN
        try:
            with anyio.CancelScope(deadline=deadline) as self._scope:
                return await errands.run(self._older, storage)
            if self._cancel_reason is not None:
                reason, stage = self._cancel_reason, Stage.CANCEL
        except ObjectExists:
            raise
        except StorageError as error:
            self._on_failure(error)
            reason = str(error)
        finally:
            self._scope = None
        raise self._error(Failure(reason=reason, stage=stage, rank=0, key=COMMIT_KEY))

    async def _older(self, storage: Storage) -> Commit | None:
        """What a commit will replace; None if nothing, or what cannot be read.

        Also finds what there is to resume.

        Raises:
            ObjectExists: there is a commit object, and ``overwrite`` is not given.
            UnsupportedFormat, NotASnapshot: it is not this release's to replace.
        """
        what, older = "a snapshot is committed", None
        try:
            older = await find_commit(storage)
            is_there = older is not None
        except FormatError as error:
            if self._overwrite and isinstance(error, UnsupportedFormat | NotASnapshot):
                raise
            what, is_there = f"there is a damaged snapshot ({error})", True
            logger.warning("%s: %s", self.label, error)
        if is_there and not self._overwrite:
            raise ObjectExists(
                op="take",
                key=COMMIT_KEY,
                backend=storage.url,
                detail=f"{what} at this path. Take to another path, or pass "
                "overwrite=True: the old one stays valid until the new one is committed",
            )
        if self._resume:
            committed = None if older is None else older.attempt
            self._resumed = await find_resumable(self._host, storage, committed)
            logger.info("%s: resumes %s", self.label, ", ".join(self._resumed) or "nothing")
        return older

    async def _attempt_save(
        self, errands: Errands, deadline: float, *, fsync: bool
    ) -> CoordinatorActor | None:
        """Runs this rank's actors to the end; returns the coordinator, if it is here.

        Raises:
            ActorSnapError: it is not committed.
        """
        options, membership = self._options, self._membership
        captured, self._captured = self._captured, None
        assert captured is not None
        if membership is None:
            transport = InprocTransport(world_size=1)
            ends: _Ends = transport.participant(0), transport.coordinator()
            remembered = None
        else:
            ends = membership.save.participant, membership.save.coordinator
            remembered = membership.team.remembered
        participant = ParticipantActor(
            machine=ParticipantMachine(rank=self._rank, release=RELEASE),
            end=ends[0],
            open_storage=functools.partial(self._open_assigned, errands),
            captured=captured,
            settings=SaveSettings(
                copies=self._copies,
                num_uploaders=options.num_uploaders,
                num_copiers=self._host.num_workers,
            ),
            budget=self._host.budget,
            errands=errands,
            board=self.board,
            on_staged=self._on_staged,
            on_failure=self._on_failure,
            remembered=remembered,
            deadline=None if self._rank == 0 else deadline + _GRACE_S,
        )
        del captured
        coordinator = None
        if ends[1] is not None:
            coordinator = self._coordinator(ends[1], errands, deadline, fsync=fsync)
        self._participant = participant
        if self._cancel_reason is not None:
            participant.request_cancel(self._cancel_reason)
        try:
            async with anyio.create_task_group() as tasks:
                if coordinator is not None:
                    tasks.start_soon(coordinator.run)
                failure = await participant.run()
        finally:
            self._participant = None
            if membership is None:
                transport.close()
            elif participant.remembered is not None:
                membership.team.remembered = participant.remembered
                membership.team.memory = membership.memory
        is_committed = coordinator is not None and coordinator.commit is not None
        if failure is not None and not is_committed:
            raise self._error(failure)
        return coordinator

    def _coordinator(
        self, end: CoordinatorEnd, errands: Errands, deadline: float, *, fsync: bool
    ) -> CoordinatorActor:
        options, membership = self._options, self._membership
        world_size = 1 if membership is None else membership.team.world_size
        storage = self._storage
        can = Capabilities() if storage is None else storage.capabilities
        return CoordinatorActor(
            machine=CoordinatorMachine(
                attempt=str(self._attempt),
                url=self._place.at,
                fsync=fsync,
                world_size=world_size,
                release=RELEASE,
                rules=PackingRules(
                    chunk_bytes=chunk_within(options.chunk_bytes, self._host.budget.limit_bytes),
                    max_objects=min(options.max_objects, can.preferred_parallel_objects),
                    min_object_bytes=options.min_object_bytes,
                    min_write_bytes=can.min_write_bytes,
                    max_writes=can.max_writes,
                    max_object_bytes=can.max_object_bytes,
                    has_joined_writers=can.has_joined_writers,
                ),
                resumed=self._resumed,
                memory=None if membership is None else membership.memory,
            ),
            end=end,
            storage=self._storage,
            errands=errands,
            template=CommitTemplate(
                attempt=str(self._attempt),
                created=_utc(time.time()),
                world_size=world_size,
                fsync=options.fsync,
                metadata=self._metadata,
                overwrite=self._overwrite,
            ),
            timeout_s=options.timeout_s,
            deadline=deadline,
            on_failure=self._on_failure,
        )

    def _on_staged(self) -> None:
        if not self.staged.done():
            self.staged.set_result(None)

    def _on_failure(self, error: BaseException) -> None:
        if self._cause is None:
            self._cause = error
        # The traceback stays, but what its frames held goes: it may be the app state.
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)
            seen = seen.__cause__ or seen.__context__

    def _error(self, failure: Failure) -> ActorSnapError:
        error = failure.to_error()
        if failure.rank in (None, self._rank):
            error.__cause__ = self._cause
        elif not isinstance(error, SnapshotAborted):
            error.add_note(f"actorsnap: this happened on rank {failure.rank}")
        return error

    async def _collect(self, errands: Errands, replaced: str | None, deadline: float) -> None:
        """Garbage never makes a committed snapshot fail, nor keeps its caller waiting long."""

        async def collect() -> None:
            assert self._storage is not None
            committed = str(self._attempt)
            await collect_garbage(
                self._host, self._storage, committed=committed, superseded=replaced
            )

        async def lose_patience() -> None:
            await anyio.sleep_until(min(deadline, anyio.current_time() + _PATIENCE_S))
            self._tell()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lose_patience)
            await errands.clean_up(collect)
            tasks.cancel_scope.cancel()


def _failure_of(error: ActorSnapError) -> Failure:
    """What rank 0 tells the others of an error that it met before it began."""
    if isinstance(error, SnapshotAborted):
        return Failure(
            reason=error.reason, stage=Stage(error.stage), rank=error.rank, key=error.key
        )
    return Failure.of(error, stage=Stage.JOIN, rank=0)


def _utc(seconds: float) -> str:
    when = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
