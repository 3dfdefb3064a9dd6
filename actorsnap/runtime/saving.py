"""One save in this process, from captured state to outcome.

Puts storage, transport, coordinator and participant together on the runtime's loop, maps
the outcome to one error, and collects garbage behind a commit.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import logging
import time
from typing import Any

import anyio

from actorsnap.actors.coordinator import CommitTemplate, CoordinatorActor
from actorsnap.actors.session import ParticipantActor, SaveSettings
from actorsnap.actors.trace import Phase, ProgressBoard
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    ObjectExists,
    SnapshotAborted,
    StorageError,
)
from actorsnap.format.manifest import COMMIT_KEY, Commit
from actorsnap.options import Options
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
    committed_attempt,
    open_place,
)
from actorsnap.state.capture import Captured
from actorsnap.storage.base import Storage
from actorsnap.transport.inproc import InprocTransport

__all__ = ["SaveJob"]

logger = logging.getLogger(__name__)

_CLEANUP_S = 30.0
"""What comes after the outcome takes no longer."""


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
        self._began_s = time.time()
        self._has_begun = False
        self.url = place.url
        self.label = f"snapshot {place.url} attempt {self._attempt} rank 0"
        self.board = ProgressBoard(self.label)
        self.staged: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.finished: concurrent.futures.Future[Commit] = concurrent.futures.Future()

    def start(self) -> None:
        """Begins; returns at once."""
        self._host.set_budget(self._options.memory_budget_bytes)
        self._host.track_save(self.finished, self.label)
        self._host.submit(self._run())

    def cancel(self, reason: str) -> None:
        """Asks for an abort, from any thread, also if ``start`` was interrupted. The commit
        may win nevertheless."""

        def request() -> None:
            self._cancel_reason = self._cancel_reason or reason
            if not self._has_begun and not self.finished.done():
                self._settle(SnapshotAborted(reason=reason, rank=0, stage=Stage.CANCEL))
            if self._participant is not None:
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
        return Source(self._place, self._options, self.finished.result())

    async def _run(self) -> None:
        if self.finished.done():
            return
        self._has_begun = True
        try:
            commit = await self._save()
        except BaseException as error:
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
        else:
            self._host.end_attempt(self._attempt)
            self.finished.set_result(commit)

    def _settle(self, error: BaseException) -> None:
        self.board.enter(Phase.ABORTED)
        self._host.end_attempt(self._attempt)
        if not self.staged.done():
            self.staged.set_exception(error)
        self.finished.set_exception(error)

    async def _save(self) -> Commit:
        options = self._options
        deadline = anyio.current_time() + options.timeout_s
        storage = await open_place(self._host, self._place, fsync=options.fsync)
        try:
            older = await self._look(storage, deadline)
            commit = await self._attempt_save(storage, deadline)
            self.board.enter(Phase.COMMITTED)
            logger.info("%s: committed", self.label)
            await self._collect(storage, older)
            return commit
        finally:
            with anyio.move_on_after(_CLEANUP_S, shield=True):
                await storage.aclose()

    async def _look(self, storage: Storage, deadline: float) -> str | None:
        """``_older_attempt``, within the deadline and until a cancellation."""
        reason = f"timeout_s={self._options.timeout_s:g} is over; the storage did not answer"
        stage = Stage.JOIN
        try:
            with anyio.CancelScope(deadline=deadline) as self._scope:
                return await self._older_attempt(storage)
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

    async def _older_attempt(self, storage: Storage) -> str | None:
        """The attempt that a commit replaces.

        Raises:
            ObjectExists: there is a commit, and ``overwrite`` is not given.
        """
        try:
            older = await committed_attempt(storage)
        except FormatError:
            logger.warning("%s: the commit object that is there is damaged", self.label)
            older = ""
        if older is not None and not self._overwrite:
            raise ObjectExists(
                op="take",
                key=COMMIT_KEY,
                backend=storage.url,
                detail="a snapshot is committed at this path. Take to another path, or pass "
                "overwrite=True: the old one stays valid until the new one is committed",
            )
        return older or None

    async def _attempt_save(self, storage: Storage, deadline: float) -> Commit:
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
                rules=PackingRules(
                    chunk_bytes=options.chunk_bytes,
                    max_objects=min(options.max_objects, capabilities.preferred_parallel_objects),
                    min_object_bytes=options.min_object_bytes,
                ),
                copies=self._copies,
                num_uploaders=options.num_uploaders,
                num_copiers=self._host.num_workers,
            ),
            budget=self._host.budget,
            run_blocking=self._host.run_blocking,
            board=self.board,
            on_staged=self._on_staged,
            on_failure=self._on_failure,
        )
        del captured
        coordinator = CoordinatorActor(
            machine=CoordinatorMachine(attempt=attempt, world_size=1, release=RELEASE),
            end=transport.coordinator(),
            storage=storage,
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
        return coordinator.commit

    def _on_staged(self) -> None:
        if not self.staged.done():
            self.staged.set_result(None)

    def _on_failure(self, error: BaseException) -> None:
        if self._cause is None:
            self._cause = error

    def _error(self, failure: Failure) -> ActorSnapError:
        if failure.already_exists:
            error: ActorSnapError = ObjectExists(
                op="commit", key=COMMIT_KEY, backend=self._place.url, detail=failure.reason
            )
        else:
            error = SnapshotAborted(
                reason=failure.reason,
                rank=failure.rank,
                stage=str(failure.stage),
                key=failure.key,
            )
        error.__cause__ = self._cause
        return error

    async def _collect(self, storage: Storage, older: str | None) -> None:
        """Garbage never makes a committed snapshot fail, nor keeps its caller waiting."""
        try:
            with anyio.move_on_after(_CLEANUP_S) as self._scope:
                await collect_garbage(self._host, storage, began_s=self._began_s, superseded=older)
            if self._scope.cancelled_caught:
                logger.warning("%s: garbage was left: deleting it took too long", self.label)
        except Exception as error:  # whatever a backend raises
            logger.warning("%s: garbage was left: %s", self.label, error)
        finally:
            self._scope = None


def _utc(seconds: float) -> str:
    when = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
