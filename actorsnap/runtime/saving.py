"""One save in this process, from captured state to outcome.

Connects storage, transport, participant and, on rank 0, the coordinator on the runtime's loop.
Maps the outcome to one error, and collects garbage after a commit.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import logging
import time
import traceback
from typing import TypeAlias

import anyio

from actorsnap.actors.abandonable import AbandonableTasks
from actorsnap.actors.commit import CommitActor, CommitTemplate
from actorsnap.actors.fence import Fence
from actorsnap.actors.fetcher import find_commit, read_commits
from actorsnap.actors.items import Stager
from actorsnap.actors.rounds import CoordinatorActor
from actorsnap.actors.saver import Saver, SaveSettings
from actorsnap.actors.trace import Phase
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    NotASnapshot,
    ObjectExists,
    SnapshotAborted,
    StorageError,
    UnsupportedFormat,
)
from actorsnap.format.compression import Codec
from actorsnap.format.manifest import COMMIT_KEY, Commit, SaveRecord, features_of
from actorsnap.log import Log
from actorsnap.options import chunk_within
from actorsnap.planning.packing import PackingRules
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.rounds import Coordinator
from actorsnap.protocol.save import Assignment, SaveDecisions, aborted
from actorsnap.release import RELEASE
from actorsnap.runtime.commit_order import CommitTurn
from actorsnap.runtime.garbage import collect_garbage, find_resumable
from actorsnap.runtime.host import Host
from actorsnap.runtime.job import Job, SaveRequest
from actorsnap.runtime.location import open_location
from actorsnap.runtime.team import Membership
from actorsnap.runtime.tracing import Observation
from actorsnap.state.captured import Captured
from actorsnap.storage.base import Capabilities, Storage
from actorsnap.transport.ends import CoordinatorEnd, ParticipantEnd
from actorsnap.transport.inproc import InprocTransport

__all__ = ["SaveJob"]

logger = Log(__name__)

_PATIENCE_S = 5.0
"""Time for which the outcome waits for garbage collection, up to the deadline, in seconds."""

_MAX_PUT_BYTES = 1 << 30
"""Upper limit of a chunk that is stored as its own object. Object stores accept at most 5 GiB per
request."""


class _CommittedBefore(Exception):
    """A dead process' attempt has already committed this save."""


_Ends: TypeAlias = tuple[ParticipantEnd, CoordinatorEnd | None]


class SaveJob(Job):
    """A save made in this process. See also ``Job``.

    Args:
        captured: The rank's state, or the reason for its absence.
        copies: The trainer may change the state before the save has ended.
        stager: See ``Saver``.
        after: An attempt at this save whose process has died: if it has committed, so has the save.
        cause: The exception for a ``captured`` failure.
    """

    def __init__(
        self,
        host: Host,
        request: SaveRequest,
        captured: Captured | Failure,
        *,
        copies: bool,
        membership: Membership | None = None,
        fence: Fence | None = None,
        observation: Observation | None = None,
        stager: Stager | None = None,
        after: str = "",
        cause: BaseException | None = None,
        turn: CommitTurn | None = None,
    ) -> None:
        super().__init__(
            host,
            request,
            membership=membership,
            fence=fence,
            observation=observation,
            turn=turn,
        )
        self._captured: Captured | Failure | None = captured
        self._copies = copies
        self._stager = stager
        self._after = after
        self._cause = cause
        self._recorder = self._observation.recorder
        self._resumed: tuple[str, ...] = ()
        # On rank 0; the coordinator sends it to the others.
        self._attempt = host.resources.attempts.new() if self.rank == 0 else None
        self._told = "" if self._attempt is None else str(self._attempt)
        if self._attempt is not None:
            self.board.label += f" attempt {self._attempt}"
        self._storage: Storage | None = None
        self._superseded: Storage | None = None  # closed at the end, because it may hang
        self._begun_s = time.monotonic()
        self._staged_s: float | None = None
        self._saver: Saver | None = None
        self._scope: anyio.CancelScope | None = None
        self._is_committed = False
        self._ended_before: frozenset[str] = frozenset()
        self._concluded: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def attempt(self) -> str:
        """The attempt's name on rank 0; empty on other ranks."""
        return str(self._attempt or "")

    def _awaited_at_exit(self) -> concurrent.futures.Future[None]:
        return self._concluded

    def _on_cancel(self, reason: str) -> None:
        if not self._has_begun:
            # Other ranks count on this one, so the save begins and fails at once.
            self._captured = Failure(reason=reason, stage=Stage.CANCEL, rank=self.rank)
            self._host.submit(self._begin())
        elif self._is_committed:
            self._tell()
        elif self._saver is not None:
            self._saver.request_cancel(reason)
        elif self._scope is not None:
            self._scope.cancel()

    async def _run(self) -> None:
        # The outcome is reported first: hanging storage calls must not delay it.
        try:
            async with anyio.create_task_group() as tasks:
                await self._conclude(
                    AbandonableTasks(
                        tasks,
                        run_blocking=self._host.run_blocking,
                        run_cpu=self._host.run_cpu,
                        label=self.label,
                        on_retry=self._observation.on_retry,
                        deadline=anyio.current_time() + self._request.left_s,
                    )
                )
        finally:
            # A commit without an answer can no longer take effect.
            self._end_attempt()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._host.resources.attempts.end(self._attempt)
            if not self._is_committed and self._storage is not None:
                self._host.resources.attempts.discard(self._storage.url, str(self._attempt))

    async def _conclude(self, errands: AbandonableTasks) -> None:
        """Saves and reports the outcome."""
        try:
            await self._save(errands)
            await self._end_observation(None)
            self._tell()
        except BaseException as error:
            if self._is_committed:
                self._tell()
                raise
            if isinstance(error, Exception):
                shown: BaseException = error
                # A caller that still waits gets the error. Later, nobody may ask for it.
                is_expected = not (self._copies and self.eager_staged.done()) or (
                    isinstance(error, SnapshotAborted) and error.stage == Stage.CANCEL
                )
                level = logging.DEBUG if is_expected else logging.ERROR
                self._say(level, "%s: %s", self.label, error, **_where(error))
            else:
                shown = SnapshotAborted(
                    reason="the runtime was stopped", rank=self.rank, stage="cancel"
                )
            await self._end_observation(shown)
            self._fail(shown)
            if not isinstance(error, Exception):
                raise
        finally:
            self._leave()

    def _leave(self) -> None:
        super()._leave()
        self._concluded.set_result(None)

    def _tell(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._captured = None
        if not (isinstance(error, SnapshotAborted) and error.may_be_committed):
            self._end_attempt()
        super()._fail(error)

    def _say(self, level: int, message: str, *args: object, **fields: object) -> None:
        whose = {"snapshot": self.url, "attempt": self._told, "rank": self.rank}
        logger.log(level, message, *args, stacklevel=2, extra={**whose, **fields})

    def _log_totals(self) -> None:
        seconds, done = time.monotonic() - self._begun_s, self.board.latest
        staged_s = seconds if self._staged_s is None else self._staged_s
        self._say(
            logging.INFO,
            "%s: committed, %.1f MiB in %.2f s, staged after %.2f s",
            self.label,
            done.total_bytes / (1 << 20),
            seconds,
            staged_s,
            stage=str(done.phase),
            total_bytes=done.total_bytes,
            staged_bytes=done.staged_bytes,
            stored_bytes=done.stored_bytes,
            staged_s=staged_s,
            total_s=seconds,
        )

    async def _end_observation(self, error: BaseException | None) -> None:
        self._observation.attempt = self._told
        await super()._end_observation(error)

    async def _save(self, errands: AbandonableTasks) -> None:
        deadline = anyio.current_time() + self._request.left_s
        fsync = self.options.fsync
        self._ended_before = self._host.resources.attempts.all_ended()
        await self._leave_gil_to_caller()
        try:
            if self.rank == 0 and not isinstance(self._captured, Failure):
                try:
                    fsync = await self._prepare(errands, deadline)
                except _CommittedBefore:
                    self._is_committed = True
                    self._end_turn()
                    return
                except ActorSnapError as error:
                    if self._membership is None:
                        raise
                    self._captured = Failure.of_save(error, stage=Stage.JOIN, rank=0)
            committer = await self._attempt_save(errands, deadline, fsync=fsync)
            self._is_committed = True
            self._end_turn()
            # From here on later saves collect this attempt's garbage.
            self._end_attempt()
            self.board.enter(Phase.COMMITTED)
            self._log_totals()
            if committer is not None:
                await self._collect(errands, committer, deadline)
        finally:
            for storage in (self._storage, self._superseded):
                if storage is not None:
                    await self._close(storage, errands, deadline)

    async def _prepare(self, errands: AbandonableTasks, deadline: float) -> bool:
        """Opens the storage and checks its state; returns whether the save must be durable."""
        fsync = self.options.fsync
        self._storage = storage = await self._open(errands, str(self._attempt), fsync=fsync)
        older = await self._look(storage, errands, deadline)
        if older is not None and older.fsync and not fsync:
            # Otherwise a power loss could destroy both snapshots.
            self._superseded = storage
            self._storage = await self._open(errands, str(self._attempt), fsync=True)
            return True
        return fsync

    async def _close(self, storage: Storage, errands: AbandonableTasks, deadline: float) -> None:
        with anyio.CancelScope(deadline=deadline):
            await errands.close(storage.aclose)

    async def _open(self, errands: AbandonableTasks, attempt: str, *, fsync: bool) -> Storage:
        return await open_location(
            self._host,
            self._request.location,
            fsync=fsync,
            run_blocking=errands.run_blocking,
            scratch=attempt,
            on_retry=errands.note_retry,
        )

    async def _open_assigned(self, errands: AbandonableTasks, assignment: Assignment) -> Storage:
        """Opens the storage that the coordinator assigns; rank 0's options hold for all ranks."""
        self._told = assignment.attempt
        if self._storage is None:
            url = assignment.url.decode("utf-8", "surrogatepass")
            if url != self._request.location.url:
                self._go_to(url)
            self._storage = await self._open(errands, assignment.attempt, fsync=assignment.fsync)
        return self._storage

    async def _look(
        self, storage: Storage, errands: AbandonableTasks, deadline: float
    ) -> Commit | None:
        """Runs ``_older`` with the deadline and with cancellation."""
        reason, stage, key = "", Stage.JOIN, COMMIT_KEY
        try:
            with anyio.CancelScope(deadline=deadline) as self._scope:
                if self._cancel_reason is None:
                    return await errands.run(self._older, storage)
            if self._cancel_reason is not None:
                reason, stage = self._cancel_reason, Stage.CANCEL
        except ObjectExists:
            raise
        except StorageError as error:
            self._on_failure(error)
            reason, key = str(error), error.key or COMMIT_KEY
        finally:
            self._scope = None
        if not reason:
            trouble = errands.trouble or "the storage did not answer"
            reason = f"timeout_s={self.options.timeout_s:g} is over; {trouble}"
        raise self._error(Failure(reason=reason, stage=stage, rank=0, key=key))

    async def _older(self, storage: Storage) -> Commit | None:
        """Returns the commit that this save will replace; None if there is none or it is damaged.

        Also finds attempts to resume.

        Raises:
            ObjectExists: there is a commit object, and ``overwrite`` is false.
            UnsupportedFormat, NotASnapshot: this release cannot replace it.
        """
        what, older = "a snapshot is committed", None
        try:
            if self._request.overwrite:
                older = await find_commit(storage)
            else:
                # Reads both names at once: usually neither exists.
                older = (await read_commits(storage)).counting()
            is_there = older is not None
            if older is not None and older.attempt == self._after:
                raise _CommittedBefore
        except FormatError as error:
            if self._request.overwrite and isinstance(error, UnsupportedFormat | NotASnapshot):
                raise
            what, is_there = f"there is a damaged snapshot ({error})", True
            self._say(logging.WARNING, "%s: %s", self.label, error, **_where(error))
        if is_there and not self._request.overwrite:
            raise ObjectExists(
                op="take",
                key=COMMIT_KEY,
                backend=storage.url,
                detail=f"{what} at this path. Take to another path, or pass "
                "overwrite=True: the old one stays valid until the new one is committed",
            )
        if self._request.resume:
            committed = None if older is None else older.attempt
            self._resumed = await find_resumable(self._host, storage, committed)
            older_attempts = ", ".join(self._resumed) or "nothing"
            self._say(logging.INFO, "%s: resumes %s", self.label, older_attempts)
        return older

    async def _attempt_save(
        self, errands: AbandonableTasks, deadline: float, *, fsync: bool
    ) -> CommitActor | None:
        """Runs this rank's actors to the end; returns the committer on rank 0.

        Raises:
            ActorSnapError: the save is not committed.
        """
        options, membership = self.options, self._membership
        captured, self._captured = self._captured, None
        assert captured is not None
        if membership is None:
            transport = InprocTransport(world_size=1)
            ends: _Ends = transport.participant(0), transport.coordinator()
            remembered = None
        else:
            ends = membership.call.participant, membership.call.coordinator
            remembered = membership.team.remembered
        saver = Saver(
            rank=self.rank,
            release=RELEASE,
            end=ends[0],
            open_storage=functools.partial(self._open_assigned, errands),
            captured=captured,
            settings=SaveSettings(
                copies=self._copies,
                num_uploaders=options.num_uploaders,
                num_copiers=self._host.num_workers,
                pace=self._host.resources.pace
                if self._copies
                else None,  # otherwise the trainer waits
            ),
            budget=self._host.resources.budget,
            errands=errands,
            board=self.board,
            on_staged=self._on_staged,
            on_failure=self._on_failure,
            stager=self._stager,
            fence=self.fence,
            on_eager_staged=self._on_eager_staged,
            remembered=remembered,
            timeout_s=options.timeout_s,
            recorder=self._recorder,
        )
        del captured
        coordinator = committer = None
        if ends[1] is not None:
            coordinator, committer = self._coordinator(ends[1], errands, deadline, fsync=fsync)
        self._saver = saver
        if self._cancel_reason is not None:
            saver.request_cancel(self._cancel_reason)
        try:
            async with anyio.create_task_group() as tasks:
                if coordinator is not None:
                    tasks.start_soon(coordinator.run)
                failure = await saver.run()
        finally:
            self._saver = None
            if membership is None:
                transport.close()
            elif saver.remembered is not None:
                membership.team.remembered = saver.remembered
                membership.team.memory = membership.memory
            if committer is not None:
                self.is_unanswered = committer.is_unanswered
        is_committed = committer is not None and committer.committed is not None
        if failure is not None and not is_committed:
            raise self._error(failure)
        return committer

    def _coordinator(
        self, end: CoordinatorEnd, errands: AbandonableTasks, deadline: float, *, fsync: bool
    ) -> tuple[CoordinatorActor, CommitActor | None]:
        options, membership = self.options, self._membership
        storage = self._storage
        can = Capabilities() if storage is None else storage.capabilities
        codec = None if options.compression is None else Codec.parse(options.compression)
        chunk_bytes = options.chunk_bytes
        if codec is not None:
            # Each chunk is an object, written in one request.
            can = Capabilities(preferred_parallel_objects=can.preferred_parallel_objects)
            chunk_bytes = min(chunk_bytes, _MAX_PUT_BYTES)
        save = SaveRecord(
            world_size=self._world_size,
            features=features_of(is_compressed=codec is not None),
            fsync=options.fsync,
            step=self._request.step,
            metadata=self._request.metadata,
        )
        attempt = str(self._attempt)
        decisions = SaveDecisions(
            attempt=attempt,
            url=self._request.location.url,
            fsync=fsync,
            save=save,
            release=RELEASE,
            rules=PackingRules(
                chunk_bytes=chunk_within(chunk_bytes, self._host.resources.budget.limit_bytes),
                max_objects=min(options.max_objects, can.preferred_parallel_objects),
                min_object_bytes=options.min_object_bytes,
                min_write_bytes=can.min_write_bytes,
                max_writes=can.max_writes,
                max_object_bytes=can.max_object_bytes,
                has_joined_writers=can.has_joined_writers,
                codec=codec,
            ),
            resumed=self._resumed,
            memory=None if membership is None else membership.memory,
        )
        committer = None
        if storage is not None:
            committer = CommitActor(
                template=CommitTemplate(
                    attempt=attempt,
                    created=_utc(time.time()),
                    save=save,
                    overwrite=self._request.overwrite,
                ),
                records=decisions.records,
                storage=storage,
                errands=errands,
                deadline=deadline,
                absence=end.absence,
                on_failure=self._on_failure,
                turn=None if self._turn is None else self._turn.wait,
                recorder=self._recorder,
            )
        coordinator = CoordinatorActor(
            machine=Coordinator(world_size=self._world_size),
            end=end,
            decisions=decisions,
            aborted=aborted,
            timeout_s=options.timeout_s,
            deadline=deadline,
            committer=committer,
            trouble=lambda: errands.trouble,
        )
        return coordinator, committer

    def _on_staged(self) -> None:
        self._staged_s = time.monotonic() - self._begun_s
        if not self.staged.done():
            self.staged.set_result(None)

    def _on_failure(self, error: BaseException) -> None:
        if self._cause is None:
            self._cause = error
        # The traceback is kept without its frames' locals: they may hold the app state.
        cleared: list[BaseException] = []  # causes can form a cycle
        seen: BaseException | None = error
        while seen is not None and not any(seen is other for other in cleared):
            traceback.clear_frames(seen.__traceback__)
            cleared.append(seen)
            seen = seen.__cause__ or seen.__context__

    def _error(self, failure: Failure) -> ActorSnapError:
        error = failure.to_error()
        if failure.rank in (None, self.rank):
            error.__cause__ = self._cause or error.__cause__
        elif not isinstance(error, SnapshotAborted):
            error.add_note(f"actorsnap: this happened on rank {failure.rank}")
        return error

    async def _collect(
        self, errands: AbandonableTasks, committer: CommitActor, deadline: float
    ) -> None:
        """Collects garbage. Never fails the committed save, nor delays its caller for long."""

        async def collect() -> None:
            assert self._storage is not None
            await collect_garbage(
                self._host,
                self._storage,
                committed=str(self._attempt),
                superseded=[committer.replaced] if committer.replaced else [],
                was_vacant=committer.was_vacant,
                # Attempts that committed here in the meantime were replaced.
                expendable=self._host.resources.attempts.all_ended() - self._ended_before,
            )

        async def lose_patience() -> None:
            await anyio.sleep_until(min(deadline, anyio.current_time() + _PATIENCE_S))
            self._tell()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lose_patience)
            await errands.clean_up(collect)
            tasks.cancel_scope.cancel()


def _where(error: BaseException) -> dict[str, object]:
    """Returns the stage and key of a failure, as fields of a log line."""
    return {name: getattr(error, name, None) for name in ("stage", "key")}


def _utc(seconds: float) -> str:
    when = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
