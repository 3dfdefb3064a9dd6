"""One save in this process, from captured state to outcome.

Puts storage, transport, coordinator and participant together on the runtime's loop, maps
the outcome to one error, and collects garbage behind a commit.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import logging
import time
import traceback
from typing import Any

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
from actorsnap.protocol.participant import ParticipantMachine
from actorsnap.release import RELEASE
from actorsnap.runtime.host import Host
from actorsnap.runtime.place import (
    Place,
    Source,
    collect_garbage,
    open_place,
)
from actorsnap.state.capture import Captured
from actorsnap.storage.base import Storage
from actorsnap.transport.inproc import InprocTransport

__all__ = ["SaveJob"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""So long, and not beyond the deadline, the outcome waits for the garbage to be gone."""


class SaveJob:
    """A save in flight.

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
        captured: Captured,
        copies: bool,
        overwrite: bool,
        metadata: dict[str, Any],
        options: Options,
    ) -> None:
        self._host = host
        self._place = place
        self._captured: Captured | None = captured
        self._copies = copies
        self._overwrite = overwrite
        self._metadata = metadata
        self._options = options
        self._attempt = host.new_attempt()
        self._cause: BaseException | None = None
        self._participant: ParticipantActor | None = None
        self._cancel_reason: str | None = None
        self._scope: anyio.CancelScope | None = None
        self._has_begun = False
        self._committed: Commit | None = None
        self.url = place.url
        self.label = f"snapshot {place.url} attempt {self._attempt} rank 0"
        self.board = ProgressBoard(self.label)
        self.staged: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.finished: concurrent.futures.Future[Commit] = concurrent.futures.Future()
        self._concluded: concurrent.futures.Future[None] = concurrent.futures.Future()

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
                self._settle(SnapshotAborted(reason=reason, rank=0, stage=Stage.CANCEL))
                self._concluded.set_result(None)
            if self._committed is not None:
                self._tell(self._committed)
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
            self._host.end_attempt(self._attempt)

    async def _conclude(self, errands: Errands) -> None:
        """Saves, and tells the outcome."""
        try:
            self._tell(await self._save(errands))
        except BaseException as error:
            if self._committed is not None:
                self._tell(self._committed)
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
                shown = SnapshotAborted(reason="the runtime was stopped", rank=0, stage="cancel")
            self._settle(shown)
            if not isinstance(error, Exception):
                raise
        finally:
            self._concluded.set_result(None)

    def _tell(self, commit: Commit) -> None:
        if not self.finished.done():
            self.finished.set_result(commit)

    def _settle(self, error: BaseException) -> None:
        self._captured = None
        self.board.enter(Phase.ABORTED)
        if not (isinstance(error, SnapshotAborted) and error.may_be_committed):
            self._host.end_attempt(self._attempt)
        if not self.staged.done():
            self.staged.set_exception(error)
        self.finished.set_exception(error)

    async def _save(self, errands: Errands) -> Commit:
        options = self._options
        deadline = anyio.current_time() + options.timeout_s
        storage = await self._open(errands, fsync=options.fsync)
        try:
            older = await self._look(storage, errands, deadline)
            if older is not None and older.fsync and not options.fsync:
                # Else a power loss could leave neither the older one nor this one.
                await errands.clean_up(storage.aclose)
                storage = await self._open(errands, fsync=True)
            commit, replaced = await self._attempt_save(storage, errands, deadline)
            self._committed = commit
            # From now on whoever comes last collects what this attempt leaves.
            self._host.end_attempt(self._attempt)
            self.board.enter(Phase.COMMITTED)
            logger.info("%s: committed", self.label)
            await self._collect(storage, errands, replaced, deadline)
            return commit
        finally:
            await errands.clean_up(storage.aclose)

    async def _open(self, errands: Errands, *, fsync: bool) -> Storage:
        return await open_place(
            self._host,
            self._place,
            fsync=fsync,
            run_blocking=errands.run_blocking,
            scratch=str(self._attempt),
        )

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
        return older

    async def _attempt_save(
        self, storage: Storage, errands: Errands, deadline: float
    ) -> tuple[Commit, str | None]:
        """Returns what was committed, and the attempt that it replaced."""
        options, attempt = self._options, str(self._attempt)
        transport = InprocTransport(world_size=1)
        captured, self._captured = self._captured, None
        assert captured is not None
        capabilities = storage.capabilities
        participant = ParticipantActor(
            machine=ParticipantMachine(rank=0, release=RELEASE),
            end=transport.participant(0),
            storage=storage,
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
        )
        del captured
        coordinator = CoordinatorActor(
            machine=CoordinatorMachine(
                attempt=attempt,
                url=self.url,
                world_size=1,
                release=RELEASE,
                rules=PackingRules(
                    chunk_bytes=chunk_within(options.chunk_bytes, self._host.budget.limit_bytes),
                    max_objects=min(options.max_objects, capabilities.preferred_parallel_objects),
                    min_object_bytes=options.min_object_bytes,
                ),
            ),
            end=transport.coordinator(),
            storage=storage,
            errands=errands,
            template=CommitTemplate(
                attempt=attempt,
                created=_utc(time.time()),
                world_size=1,
                fsync=options.fsync,
                metadata=self._metadata,
                overwrite=self._overwrite,
            ),
            timeout_s=options.timeout_s,
            deadline=deadline,
            on_failure=self._on_failure,
        )
        self._participant = participant
        if self._cancel_reason is not None:
            participant.request_cancel(self._cancel_reason)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(coordinator.run)
                failure = await participant.run()
        finally:
            self._participant = None
            transport.close()
        if failure is not None:
            raise self._error(failure)
        assert coordinator.commit is not None
        return coordinator.commit, coordinator.replaced

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
        error.__cause__ = self._cause
        return error

    async def _collect(
        self, storage: Storage, errands: Errands, replaced: str | None, deadline: float
    ) -> None:
        """Garbage never makes a committed snapshot fail, nor keeps its caller waiting long."""

        async def collect() -> None:
            await collect_garbage(self._host, storage, superseded=replaced)

        async def lose_patience(commit: Commit) -> None:
            await anyio.sleep_until(min(deadline, anyio.current_time() + _PATIENCE_S))
            self._tell(commit)

        async with anyio.create_task_group() as tasks:
            assert self._committed is not None
            tasks.start_soon(lose_patience, self._committed)
            await errands.clean_up(collect)
            tasks.cancel_scope.cancel()


def _utc(seconds: float) -> str:
    when = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
