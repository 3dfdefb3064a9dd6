# SPDX-License-Identifier: Apache-2.0
"""Makes a save in this process, from captured state to garbage collection."""

from __future__ import annotations

import datetime
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial

import anyio
import anyio.abc

from actorsnap.actors.abandonable import AbandonableTasks
from actorsnap.actors.commit import CommitActor
from actorsnap.actors.items import SaveContext, Staging
from actorsnap.actors.rounds import CoordinatorActor
from actorsnap.actors.saver import Saver
from actorsnap.actors.snapshot_reader import find_commit, read_commits
from actorsnap.actors.staging import StagingActor
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    NotASnapshot,
    ObjectExists,
    SnapshotAborted,
    StorageError,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.compression import Codec
from actorsnap.format.manifest import COMMIT_KEY, Commit, SaveRecord, features_of
from actorsnap.log import Log
from actorsnap.options import Options, chunk_within
from actorsnap.planning.packing import PackingRules
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.rounds import Coordinator
from actorsnap.protocol.save import Assignment, SaveDecisions, aborted
from actorsnap.release import RELEASE
from actorsnap.runtime.location import check_destination, open_location
from actorsnap.runtime.maintenance import collect_garbage, find_resumable
from actorsnap.runtime.save import Save
from actorsnap.runtime.texts import size_text
from actorsnap.state.sources import Captured
from actorsnap.storage.base import Capabilities, Storage
from actorsnap.transport.ends import CoordinatorEnd, InprocEnds, ParticipantEnd, RelayedEnds

logger = Log(__name__)

_PATIENCE_S = 5.0
"""Longest wait of the outcome for garbage collection."""

_MAX_PUT_BYTES = 1 << 30
"""Limit of a chunk stored as its own object. Object stores take at most 5 GiB per request."""

_MAX_COMPRESSED_BYTES = 64 << 20
"""Memory for compressed chunks when another process copies with the budget."""


class _CommittedBefore(Exception):
    """A dead process' attempt has committed the save."""


@dataclass(eq=False, repr=False)
class LocalEngine:
    """Makes a save in this process. See ``Engine``.

    Args:
        captured: The rank's state, or the reason for its absence.
        copies: The trainer may change the state during the save.
        ends: The call's ends, if not those of ``save.membership``.
        staging: None: this process has the bytes.
        previous_attempt: Of a dead process, at this save: if it has committed, so has the save.
        cause: The exception for a ``captured`` failure.
    """

    save: Save
    captured: Captured | Failure | None
    _: KW_ONLY
    copies: bool
    ends: RelayedEnds | None = None
    staging: Staging | None = None
    previous_attempt: str = ""
    cause: BaseException | None = None

    def __post_init__(self) -> None:
        save = self.save
        self._host = save.host
        self._errands: AbandonableTasks  # these two are set by ``run``
        self._deadline: float
        self._resumed: tuple[str, ...] = ()
        # Rank 0's; the coordinator sends it.
        self._attempt = save.host.resources.attempts.new() if save.rank == 0 else None
        if self._attempt is not None:
            save.attempt = str(self._attempt)
            save.board.label += f" attempt {self._attempt}"
        self._storage: Storage | None = None
        self._superseded: Storage | None = None  # closed at the end: it may hang
        self._begun_s = time.monotonic()
        self._staged_s: float | None = None
        self._saver: Saver | None = None
        self._scope: anyio.CancelScope | None = None
        self._ended_before: frozenset[str] = frozenset()

    def cancel(self, reason: str) -> None:
        if self._saver is not None:
            self._saver.request_cancel(reason)
        elif self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        # All tasks have ended, and with them a request for the commit.
        self._end_attempt()

    async def run(self, tasks: anyio.abc.TaskGroup) -> None:
        save = self.save
        self._deadline = anyio.current_time() + save.request.left_s
        self._errands = AbandonableTasks(
            tasks,
            run_blocking=self._host.run_blocking,
            run_cpu=self._host.run_cpu,
            label=save.label,
            on_retry=save.observation.on_retry,
            deadline=self._deadline,
        )
        self._ended_before = self._host.resources.attempts.ended()
        await save.leave_gil_to_caller()
        if save.cancel_reason is not None:
            self.captured = Failure(reason=save.cancel_reason, stage=Stage.CANCEL, rank=save.rank)
        try:
            await self._make()
        except BaseException as error:
            self.captured = None
            if not save.is_committed:
                self._note_error(error)
            raise

    def _note_error(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            # A caller that still waits gets the error. It may never ask later: then rank 0 logs it
            # and so does the rank that failed. The other ranks would repeat the same text.
            is_expected = not (self.copies and self.save.eager_staged.done()) or (
                isinstance(error, SnapshotAborted)
                and (error.stage == Stage.CANCEL or self.save.rank not in (0, error.rank))
            )
            level = logging.DEBUG if is_expected else logging.ERROR
            self._log(level, "%s: %s", self.save.label, error, **_where(error))
        if not (isinstance(error, SnapshotAborted) and error.may_be_committed):
            self._end_attempt()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._host.resources.attempts.end(self._attempt)
            if not self.save.is_committed and self._storage is not None:
                self._host.resources.attempts.discard(self._storage.url, str(self._attempt))

    def _log(self, level: int, message: str, *args: object, **fields: object) -> None:
        save = self.save
        whose = {"snapshot": save.location.log_url, "attempt": save.attempt, "rank": save.rank}
        logger.log(level, message, *args, stacklevel=2, extra={**whose, **fields})

    def _log_totals(self) -> None:
        seconds, done = time.monotonic() - self._begun_s, self.save.board.latest
        staged_s = seconds if self._staged_s is None else self._staged_s
        self._log(
            logging.INFO,
            "%s: committed, %s in %.2f s, staged after %.2f s",
            self.save.label,
            size_text(done.total_bytes),
            seconds,
            staged_s,
            stage=str(done.phase),
            total_bytes=done.total_bytes,
            staged_bytes=done.staged_bytes,
            stored_bytes=done.stored_bytes,
            staged_s=staged_s,
            total_s=seconds,
        )

    async def _make(self) -> None:
        save = self.save
        fsync = save.options.fsync
        try:
            if save.rank == 0 and not isinstance(self.captured, Failure):
                try:
                    fsync = await self._prepare()
                except _CommittedBefore:
                    save.commit()
                    return
                except ActorSnapError as error:
                    if save.membership is None:
                        raise
                    self.captured = Failure.of_save(error, stage=Stage.JOIN, rank=0)
            committer = await self._run_actors(fsync=fsync)
            save.commit()
            # Later saves collect this attempt's garbage.
            self._end_attempt()
            self._log_totals()
            if committer is not None:
                await self._collect(committer)
        finally:
            for storage in (self._storage, self._superseded):
                if storage is not None:
                    with anyio.CancelScope(deadline=self._deadline):
                        await self._errands.close(storage.aclose)

    async def _prepare(self) -> bool:
        """Opens and checks the storage; returns whether the save must be durable."""
        fsync = self.save.options.fsync
        self._storage = storage = await self._open(fsync=fsync)
        older = await self._find_older_in_time(storage)
        if older is not None and older.fsync and not fsync:
            # Otherwise a power loss could destroy both snapshots.
            self._superseded = storage
            self._storage = await self._open(fsync=True)
            return True
        return fsync

    async def _open(self, *, fsync: bool) -> Storage:
        return await open_location(
            self._host,
            self.save.location,
            fsync=fsync,
            run_blocking=self._errands.run_blocking,
            scratch=self.save.attempt,
            on_retry=self._errands.note_retry,
        )

    async def _open_assigned(self, assignment: Assignment) -> Storage:
        self.save.attempt = assignment.attempt
        if self._storage is None:
            url = assignment.url.decode("utf-8", "surrogatepass")
            if url != self.save.location.url:
                self.save.move(url)
            self._storage = await self._open(fsync=assignment.fsync)
        return self._storage

    async def _find_older_in_time(self, storage: Storage) -> Commit | None:
        save = self.save
        try:
            with anyio.CancelScope(deadline=self._deadline) as self._scope:
                if save.cancel_reason is None:
                    return await self._errands.run(self._find_older, storage)
        except ObjectExists:
            raise
        except StorageError as error:
            self._on_failure(error)
            failure = Failure.caused_by(error, stage=Stage.JOIN, rank=0, key=COMMIT_KEY)
        else:
            stage, reason = Stage.CANCEL, save.cancel_reason
            if reason is None:
                trouble = self._errands.trouble or "the storage did not answer"
                stage, reason = (
                    Stage.JOIN,
                    f"timeout_s={save.options.timeout_s:g} has passed; {trouble}",
                )
            failure = Failure(reason=reason, stage=stage, rank=0, key=COMMIT_KEY)
        finally:
            self._scope = None
        raise self._to_error(failure)

    async def _find_older(self, storage: Storage) -> Commit | None:
        """Returns the intact commit to replace, if any; finds attempts to resume."""
        save, request = self.save, self.save.request
        what, older = "already has a snapshot", None
        await self._errands.run_blocking(check_destination, save.location)
        try:
            if request.overwrite:
                older = await find_commit(storage)
            else:
                # Both names at once: usually neither exists.
                older = (await read_commits(storage)).valid()
            exists = older is not None
            if older is not None and older.attempt == self.previous_attempt:
                raise _CommittedBefore
        except FormatError as error:
            if request.overwrite and isinstance(error, UnsupportedFormat | NotASnapshot):
                raise
            what, exists = f"has a damaged snapshot ({error})", True
            self._log(logging.WARNING, "%s: %s", save.label, error, **_where(error))
        if exists and not request.overwrite:
            raise ObjectExists(
                op="take",
                key="",
                backend=storage.url,
                detail=f"{storage.url} {what}. Save to another path, or pass overwrite=True: the "
                "old one stays valid until the new one is committed",
            )
        if request.resume:
            committed = None if older is None else older.attempt
            self._resumed = await find_resumable(self._host, storage, committed)
            attempts = ", ".join(self._resumed) or "nothing"
            self._log(logging.INFO, "%s: resumes %s", save.label, attempts)
        return older

    async def _run_actors(self, *, fsync: bool) -> CommitActor | None:
        """Returns the committer on rank 0."""
        save, membership = self.save, self.save.membership
        ends = InprocEnds() if membership is None else self.ends or membership.call
        context = self._make_context()
        coordinator = committer = owners = None
        if ends.coordinator is not None:
            coordinator, committer, decisions = self._make_coordinator(
                context, ends.coordinator, fsync=fsync
            )
            if save.world_size > 1:
                owners = partial(self._owners, decisions, committer)
        saver = self._make_saver(context, ends.participant, owners)
        self._saver = saver
        if save.cancel_reason is not None:
            saver.request_cancel(save.cancel_reason)
        try:
            async with anyio.create_task_group() as tasks:
                if coordinator is not None:
                    tasks.start_soon(coordinator.run)
                failure = await saver.run()
        finally:
            self._saver = None
            if membership is None:
                ends.close()
            if membership is not None and saver.remembered is not None:
                membership.team.remembered = saver.remembered
                membership.team.memory = membership.memory
            if committer is not None:
                save.is_unanswered = committer.is_unanswered
        is_committed = committer is not None and committer.committed is not None
        if failure is not None and not is_committed:
            raise self._to_error(failure)
        return committer

    def _owners(self, decisions: SaveDecisions, committer: CommitActor | None) -> bytes | None:
        """Returns the owner index; None where readers must do without: a save does not fail for it.

        On a worker thread, before the commit.
        """
        try:
            return decisions.owners()
        except FormatError as error:
            assert committer is not None
            committer.commit_object = committer.commit_object.without_owners()
            logger.warning("%s; the snapshot has no owner index", error)
            return None

    def _make_context(self) -> SaveContext:
        save, host = self.save, self._host
        return SaveContext(
            rank=save.rank,
            copies=self.copies,
            num_uploaders=save.options.num_uploaders,
            num_threads=host.num_workers,
            budget=host.resources.budget,
            errands=self._errands,
            board=save.board,
            on_staged=self._on_staged,
            on_failure=self._on_failure,
            recorder=save.observation.recorder,
            timeout_s=save.options.timeout_s,
            pace=host.resources.pace if self.copies else None,  # else the trainer waits
            max_compressed_bytes=None if self.staging is None else _MAX_COMPRESSED_BYTES,
        )

    def _make_saver(
        self, context: SaveContext, end: ParticipantEnd, owners: Callable[[], bytes | None] | None
    ) -> Saver:
        save, captured = self.save, self.captured
        self.captured = None
        assert captured is not None
        staging = self.staging
        if staging is None:
            staging = StagingActor(
                [] if isinstance(captured, Failure) else captured.leaves,
                copies=self.copies,
                budget=context.budget,
                run_blocking=self._errands.run_blocking,
                num_copiers=context.num_threads if self.copies else 1,
                board=save.board,
                recorder=context.recorder,
                fence=save.fence,
            )
        return Saver(
            context,
            captured,
            end=end,
            staging=staging,
            open_storage=self._open_assigned,
            remembered=None if save.membership is None else save.membership.team.remembered,
            has_owners=save.world_size > 1,
            owners=owners,
        )

    def _make_coordinator(
        self, context: SaveContext, end: CoordinatorEnd, *, fsync: bool
    ) -> tuple[CoordinatorActor, CommitActor | None, SaveDecisions]:
        save, request, options = self.save, self.save.request, self.save.options
        storage = self._storage
        record = SaveRecord(
            world_size=save.world_size,
            features=features_of(
                is_compressed=options.compression is not None, has_owners=save.world_size > 1
            ),
            fsync=options.fsync,
            step=request.step,
            metadata=request.metadata,
        )
        capabilities = Capabilities() if storage is None else storage.capabilities
        common = Assignment(
            attempt=save.attempt,
            url=request.location.url.encode("utf-8", "surrogatepass"),
            fsync=fsync,
            rules=rules_for(options, capabilities, context.budget.limit_bytes),
            save=record,
            resumed=self._resumed,
        )
        decisions = SaveDecisions(
            common,
            release=RELEASE,
            memory=None if save.membership is None else save.membership.memory,
        )
        committer = None
        if storage is not None:
            committer = CommitActor(
                context,
                record.commit(attempt=save.attempt, created=utc(time.time())),
                storage,
                overwrite=request.overwrite,
                deadline=self._deadline,
                suspicion=end.suspicion,
                turn=None if save.turn is None else save.turn.wait,
                has_values=lambda: decisions.has_values,
            )
        coordinator = CoordinatorActor(
            machine=Coordinator(world_size=save.world_size),
            end=end,
            decisions=decisions,
            aborted=aborted,
            timeout_s=options.timeout_s,
            deadline=self._deadline,
            committer=committer,
            trouble=lambda: context.errands.trouble,
        )
        return coordinator, committer, decisions

    def _on_staged(self) -> None:
        self._staged_s = time.monotonic() - self._begun_s
        if not self.save.staged.done():
            self.save.staged.set_result(None)

    def _on_failure(self, error: BaseException) -> None:
        if self.cause is None:
            self.cause = error
        # Frames may hold the app state in their locals.
        cleared: list[BaseException] = []  # causes can form a cycle
        seen: BaseException | None = error
        while seen is not None and not any(seen is other for other in cleared):
            traceback.clear_frames(seen.__traceback__)
            cleared.append(seen)
            seen = seen.__cause__ or seen.__context__

    def _to_error(self, failure: Failure) -> ActorSnapError:
        is_own = failure.rank in (None, self.save.rank)
        error = failure.to_error(
            cause=self.cause if is_own else None, names_rank=self.save.world_size > 1
        )
        if not is_own and not isinstance(error, SnapshotAborted | UsageError):
            error.add_note(f"actorsnap: this happened on rank {failure.rank}")
        return error

    async def _collect(self, committer: CommitActor) -> None:
        """Neither fails the save nor delays its caller for long."""

        async def collect() -> None:
            assert self._storage is not None
            await collect_garbage(
                self._host,
                self._storage,
                committed=self.save.attempt,
                superseded=[committer.replaced] if committer.replaced else [],
                was_vacant=committer.was_vacant,
                # Committed here in the meantime, and replaced.
                deletable=self._host.resources.attempts.ended() - self._ended_before,
            )

        async def lose_patience() -> None:
            await anyio.sleep_until(min(self._deadline, anyio.current_time() + _PATIENCE_S))
            self.save.end(None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lose_patience)
            await self._errands.clean_up(collect)
            tasks.cancel_scope.cancel()


def rules_for(options: Options, can: Capabilities, budget_bytes: int) -> PackingRules:
    """Returns how a save packs data for a storage, with this memory budget."""
    codec = None if options.compression is None else Codec.parse(options.compression)
    chunk_bytes = options.chunk_bytes
    if codec is not None:
        # Each chunk is an object, written in one request.
        can = Capabilities(preferred_parallel_objects=can.preferred_parallel_objects)
        chunk_bytes = min(chunk_bytes, _MAX_PUT_BYTES)
    return PackingRules(
        chunk_bytes=chunk_within(chunk_bytes, budget_bytes),
        max_objects=min(options.max_objects, can.preferred_parallel_objects),
        min_object_bytes=options.min_object_bytes,
        min_write_bytes=can.min_write_bytes,
        max_writes=can.max_writes,
        max_object_bytes=can.max_object_bytes,
        has_joined_writers=can.has_joined_writers,
        codec=codec,
    )


def _where(error: BaseException) -> dict[str, object]:
    """Fields of a log line."""
    return {name: getattr(error, name, None) for name in ("stage", "key")}


def utc(seconds: float) -> str:
    """Returns a time since 1970 in the format of commit objects."""
    when = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
