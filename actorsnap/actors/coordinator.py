"""The coordinator actor: performs what ``protocol.coordinator`` decides.

It owns the attempt's deadline and the one operation that makes a snapshot: the commit.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import anyio
import anyio.lowlevel

from actorsnap.actors.errands import Errands, first_error
from actorsnap.actors.reader import find_commit
from actorsnap.actors.trace import Recorder, Work, row_of
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    describe,
)
from actorsnap.format.manifest import (
    COMMIT_KEY,
    Commit,
    ManifestRecord,
    SaveRecord,
    encode_commit,
)
from actorsnap.lines import Lines
from actorsnap.protocol.calls import DeadlinePassed, RankLost, SendToRank
from actorsnap.protocol.coordinator import (
    CommitFailed,
    CommitWritten,
    CoordinatorEvent,
    CoordinatorMachine,
    StopCommit,
    WriteCommit,
)
from actorsnap.protocol.messages import Failed, Failure, Stage
from actorsnap.storage.base import Storage
from actorsnap.storage.many import for_each
from actorsnap.storage.translated import ends_this_task
from actorsnap.transport.base import Broken, CoordinatorEnd, Lost

__all__ = ["CommitTemplate", "CoordinatorActor"]

logger = Lines(__name__)

_COMMIT_GRACE_S = 10.0
"""A commit that is under way when the caller cancels may take so long: mostly it succeeds, and
an unanswered one leaves garbage."""

_LOOK_S = 10.0
"""Bound of the look at what a failed commit has left."""

_LATE_LOOK_S = 2.0
"""The same behind the deadline."""

_NUM_LOOKERS = 16


class _Visible(Enum):
    NONE = auto()
    OURS = auto()
    ANOTHER = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTemplate:
    """What of the commit object is known before the ranks report.

    Attributes:
        save: What rank manifests repeat.
        overwrite: Replace a commit object that is there already.
    """

    attempt: str
    created: str
    save: SaveRecord
    overwrite: bool

    def fill(self, manifests: tuple[ManifestRecord, ...]) -> Commit:
        return self.save.commit(attempt=self.attempt, created=self.created, manifests=manifests)


class CoordinatorActor:
    """Runs one attempt to its outcome.

    Args:
        machine: Fresh.
        end: The transport's coordinator end.
        storage: Where the commit object goes; None where the save is known to fail.
        errands: Where the commit runs, which may hang.
        template: The rest of the commit object.
        timeout_s: Seconds until the attempt is aborted if it has not committed.
        deadline: The loop's time when they are over.
        on_failure: Gets the exception behind a failed commit, before it is reported.
        recorder: Gets what is done when, if anybody wants to know.

    Attributes:
        commit: What was committed, once it was.
        replaced: The attempt that its commit object replaced, if any.
        was_vacant: No commit object was there before, intact or damaged.
    """

    def __init__(
        self,
        *,
        machine: CoordinatorMachine,
        end: CoordinatorEnd,
        storage: Storage | None,
        errands: Errands,
        template: CommitTemplate,
        timeout_s: float,
        deadline: float,
        on_failure: Callable[[BaseException], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._machine = machine
        self._end = end
        self._given_storage = storage
        self._errands = errands
        self._template = template
        self._deadline = self._ends_s = deadline
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._recorder = recorder
        self._commit_scope = anyio.CancelScope()
        self._stop_reason = ""
        self._is_asked = False
        self.commit: Commit | None = None
        self.replaced: str | None = None
        self.was_vacant = not template.overwrite

    @property
    def _storage(self) -> Storage:
        assert self._given_storage is not None
        return self._given_storage

    async def run(self) -> None:
        """Returns when every rank has been told the outcome."""
        while not self._machine.is_final:
            await self._handle(await self._next_event())

    async def _next_event(self) -> CoordinatorEvent:
        with anyio.CancelScope(deadline=self._deadline) as scope:
            message = await self._end.receive()
            if isinstance(message, Lost):
                return RankLost(message.rank, message.silent_s)
            if isinstance(message, Broken):
                return Failed(0, Failure(reason=message.reason, stage=Stage.JOIN, rank=0))
            return message
        assert scope.cancelled_caught
        self._deadline = math.inf
        return DeadlinePassed(self._timeout_s, self._errands.trouble)

    async def _handle(self, event: CoordinatorEvent) -> None:
        for command in self._machine.handle(event):
            match command:
                case SendToRank():
                    await self._end.send(command.rank, command.message)
                case WriteCommit():
                    await self._handle(await self._commit(command.manifests))
                case StopCommit():
                    self._stop_reason = command.reason
                    self._commit_scope.deadline = anyio.current_time() + (
                        _COMMIT_GRACE_S if command.has_grace else 0.0
                    )

    async def _commit(self, manifests: tuple[ManifestRecord, ...]) -> CommitWritten | CommitFailed:
        """Writes the commit object while messages and the deadline are listened to."""
        commit = self._template.fill(manifests)
        ending: CommitWritten | CommitFailed | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            with self._commit_scope:
                ending = await self._errands.run(self._write_commit, commit)
            tasks.cancel_scope.cancel()
        if isinstance(ending, CommitWritten) and self._commit_scope.cancel_called:
            ending = None  # a client may have swallowed the cancellation
        if ending is None:
            ending = await self._unanswered()
        if isinstance(ending, CommitWritten):
            self.commit = commit
        return ending

    async def _listen(self) -> None:
        while True:
            await self._handle(await self._next_event())

    async def _write_commit(self, commit: Commit) -> CommitWritten | CommitFailed:
        try:
            data = encode_commit(commit)
            await self._look_before(commit)
            if absence := self._end.absence():
                return CommitFailed(
                    Failure(reason=absence, stage=Stage.COMMIT, rank=0, key=COMMIT_KEY)
                )
            self._is_asked = True
            with row_of(self._recorder, "coordinator") as row:
                if self._template.overwrite:
                    await self._storage.put(COMMIT_KEY, [memoryview(data)])
                else:
                    await self._storage.put_if_absent(COMMIT_KEY, data)
                if row is not None:
                    row.note(Work.COMMIT, COMMIT_KEY, 0, len(data))
        except BaseException as error:  # whatever a backend raises: what is stored must not be lost
            if ends_this_task(error):
                raise
            return await self._failed(first_error(error))
        return CommitWritten()

    async def _look_before(self, commit: Commit) -> None:
        """Sees what is about to be replaced, and that what is to be named is still there."""
        looks: list[Callable[[], Awaitable[None]]] = [
            partial(self._look_for, rank, record) for rank, record in enumerate(commit.manifests)
        ]
        if self._template.overwrite:
            looks.insert(0, self._look_for_older)
        await for_each(looks, lambda look: look(), at_once=min(_NUM_LOOKERS, len(looks)))
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def _look_for_older(self) -> None:
        with suppress(ChecksumMismatch):
            older = await find_commit(self._storage)
            self.replaced = older.attempt if older is not None else None
            self.was_vacant = older is None

    async def _look_for(self, rank: int, record: ManifestRecord) -> None:
        """Sees that what a rank has written is there, also for this rank."""
        try:
            await self._storage.stat(record.key)
        except ObjectNotFound as error:
            if rank == 0:
                raise
            raise StorageError(
                op="stat",
                key=record.key,
                backend=self._storage.url,
                detail=f"rank {rank} has written this rank manifest, and rank 0 does not see "
                "it: save to a path on storage that all ranks share",
            ) from error

    async def _failed(self, error: BaseException) -> CommitWritten | CommitFailed:
        visible = await self._visible() if self._is_asked else _Visible.NONE
        if isinstance(error, ObjectExists) and visible is _Visible.OURS:
            # The backend tried twice by itself, and met what its first try had created.
            return CommitWritten()
        self._on_failure(error)
        lost = isinstance(error, ObjectExists) or (
            visible is _Visible.ANOTHER and not self._template.overwrite
        )
        if lost:
            return CommitFailed(
                Failure.of(
                    ObjectExists(
                        op="commit",
                        key=COMMIT_KEY,
                        backend=self._storage.url,
                        detail="another snapshot was committed at this path meanwhile",
                    ),
                    stage=Stage.COMMIT,
                    key=COMMIT_KEY,
                )
            )
        return CommitFailed(
            Failure(
                reason=str(error) if isinstance(error, ActorSnapError) else describe(error),
                stage=Stage.COMMIT,
                rank=0,
                key=(error.key if isinstance(error, StorageError) else None) or COMMIT_KEY,
                may_be_visible=visible in (_Visible.OURS, _Visible.UNKNOWN),
            )
        )

    async def _unanswered(self) -> CommitWritten | CommitFailed:
        """The ending of a commit whose answer nobody waits for any more."""
        if not self._is_asked:
            return CommitFailed(
                Failure(reason=self._stop_reason, stage=Stage.COMMIT, rank=0, key=COMMIT_KEY)
            )
        if await self._visible() is _Visible.OURS:
            return CommitWritten()
        # The storage may still perform it: what the commit object names must stay.
        return CommitFailed(
            Failure(
                reason=f"{self._stop_reason}; the storage has not answered the commit, which "
                "may yet take effect",
                stage=Stage.COMMIT,
                rank=0,
                key=COMMIT_KEY,
                may_be_visible=True,
            )
        )

    async def _visible(self) -> _Visible:
        """Whose commit object lies there, after a commit that failed or was not answered."""
        left_s = self._ends_s - anyio.current_time()
        with anyio.move_on_after(max(_LATE_LOOK_S, min(left_s, _LOOK_S))):
            try:
                commit = await self._errands.run(find_commit, self._storage)
            except Exception:
                logger.debug("the commit object cannot be read", exc_info=True)
            else:
                if commit is None:
                    return _Visible.NONE
                is_ours = commit.attempt == self._template.attempt
                return _Visible.OURS if is_ours else _Visible.ANOTHER
        return _Visible.UNKNOWN
