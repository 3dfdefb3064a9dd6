# SPDX-License-Identifier: Apache-2.0
"""The commit: the one operation that makes a snapshot visible.

Looks first, writes the commit object, and looks again if there was no answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from functools import partial

import anyio
import anyio.lowlevel

from actorsnap.actors.abandonable import AbandonableTasks, first_error
from actorsnap.actors.items import SaveContext
from actorsnap.actors.snapshot_reader import find_commit
from actorsnap.actors.trace import Work
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)
from actorsnap.format.layout import manifest_key, manifest_prefix, parse_manifest_key
from actorsnap.format.manifest import COMMIT_KEY, Commit, encode_commit
from actorsnap.log import Log
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.save import manifest_sizes
from actorsnap.storage.base import Storage, ends_this_task, for_each

logger = Log(__name__)

_COMMIT_GRACE_S = 10.0
"""For a commit after the caller cancels: it usually succeeds."""

_LOOK_S = 10.0
"""Limit of a look at the commit object."""

_LATE_LOOK_S = 2.0


async def is_committed(storage: Storage, errands: AbandonableTasks, attempt: str) -> bool:
    """Returns whether the commit object names ``attempt``; False without an answer."""
    with anyio.move_on_after(_LOOK_S):
        try:
            commit = await errands.run(find_commit, storage)
            return commit is not None and commit.attempt == attempt
        except Exception as error:  # any error of a backend
            logger.warning("%s: whether it is committed is unknown: %s", attempt, error)
    return False


async def _put(storage: Storage, data: bytes, *, overwrite: bool) -> None:
    if overwrite:
        await storage.put(COMMIT_KEY, [memoryview(data)])
    else:
        await storage.put_if_absent(COMMIT_KEY, data)


async def commit_alone(storage: Storage, commit: Commit, *, overwrite: bool) -> None:
    """Commits in a call by one process; looks for a commit whose answer is lost.

    Raises:
        ObjectExists: Another snapshot is committed, and ``overwrite`` is false.
        StorageError: It is not committed, or the storage does not answer.
    """
    try:
        await _put(storage, encode_commit(commit), overwrite=overwrite)
        # A client may have swallowed the cancellation without writing.
        await anyio.lowlevel.checkpoint_if_cancelled()
    except StorageError:
        try:
            # The backend may have repeated the request, and found the object of its first try.
            if await find_commit(storage) == commit:
                return
        except ActorSnapError:
            logger.debug("the commit object cannot be read", exc_info=True)
        raise


async def check_stored(storage: Storage, attempt: str, sizes: Sequence[int]) -> None:
    """Checks, by one listing, that the rank manifests are stored with these sizes in bytes.

    Raises:
        ObjectNotFound: One is missing.
        StorageError: One has another size.
    """
    listed = storage.list(manifest_prefix(attempt))
    found = {info.key: info.size async for info in listed}
    for rank, size in enumerate(sizes):
        key = manifest_key(attempt, rank)
        # A listing of a shared file system may be outdated.
        if found.get(key) != size and (now := (await storage.stat(key)).size) != size:
            raise StorageError(
                op="stat",
                key=key,
                backend=storage.url,
                detail=f"the rank manifest has {now} bytes, and {size} were written",
            )


class _Visible(Enum):
    NONE = auto()
    OURS = auto()
    ANOTHER = auto()
    UNKNOWN = auto()


@dataclass(eq=False, repr=False)
class CommitActor:
    """Commits one attempt; see ``actors.rounds.Committer``.

    Args:
        commit_object: What to commit.
        turn: Waits for earlier saves to the same path; returns whether the commit of one may yet
            take effect.
        has_values: Whether the snapshot needs the feature ``values``; asked before the commit.

    Attributes:
        replaced: The attempt that was replaced, if any.
        was_vacant: There was no commit object before, intact or damaged.
        is_unanswered: The result of the commit is unknown.
    """

    context: SaveContext
    commit_object: Commit
    storage: Storage
    _: KW_ONLY
    overwrite: bool
    deadline: float
    suspicion: Callable[[], Awaitable[str | None]]
    turn: Callable[[], Awaitable[bool]] | None = None
    has_values: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        self._attempt = self.commit_object.attempt
        self._is_waiting = False
        self._scope = anyio.CancelScope()
        self._stop_reason = ""
        self._is_asked = False
        self.committed: Commit | None = None
        self.replaced: str | None = None
        self.was_vacant = not self.overwrite
        self.is_unanswered = False

    def end_soon(self, reason: str, *, has_grace: bool) -> None:
        self._stop_reason = reason
        grace_s = _COMMIT_GRACE_S if has_grace else 0.0
        self._scope.deadline = anyio.current_time() + grace_s

    async def commit(self, payloads: Mapping[int, bytes]) -> Failure | None:
        sizes = manifest_sizes(payloads)
        if self.has_values is not None and self.has_values():
            self.commit_object = self.commit_object.with_values()
        answers: list[Failure | None] = []
        with self._scope:
            answers.append(await self.context.errands.run(self._write, sizes))
        # A client may swallow the cancellation and return without an answer.
        is_answered = bool(answers) and (answers[0] is not None or not self._scope.cancel_called)
        failure = answers[0] if is_answered else await self._unanswered()
        if failure is None:
            self.committed = self.commit_object
        return failure

    async def _write(self, sizes: Sequence[int]) -> Failure | None:
        try:
            data = encode_commit(self.commit_object)
            self._is_waiting = True
            may_be_replaced = self.turn is not None and await self.turn()
            self._is_waiting = False
            await self._look_before(sizes)
            if suspicion := await self.suspicion():
                return _failure(suspicion)
            self._is_asked = True
            with self.context.recorder.row("coordinator") as row:
                await _put(self.storage, data, overwrite=self.overwrite)
                row.note(Work.COMMIT, COMMIT_KEY, 0, len(data))
            if may_be_replaced:
                reason = (
                    "the storage has not answered the commit of an earlier save to this path, "
                    "which may yet replace this one: save again"
                )
                return _failure(reason, may_be_visible=True)
        except BaseException as error:  # any error of a backend: stored data must not be lost
            if ends_this_task(error):
                raise
            return await self._failed(first_error(error))
        return None

    async def _look_before(self, sizes: Sequence[int]) -> None:
        """Checks that all rank manifests exist; finds the commit object to be replaced."""
        looks: list[Callable[[], Awaitable[None]]] = [partial(self._look_for_manifests, sizes)]
        if self.overwrite:
            looks.append(self._look_for_older)
        await for_each(looks, lambda look: look(), at_once=len(looks))
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def _look_for_older(self) -> None:
        with suppress(ChecksumMismatch):
            older = await find_commit(self.storage)
            self.replaced = older.attempt if older is not None else None
            self.was_vacant = older is None

    async def _look_for_manifests(self, sizes: Sequence[int]) -> None:
        try:
            await check_stored(self.storage, self._attempt, sizes)
        except ObjectNotFound as error:
            rank = parse_manifest_key(self._attempt, error.key)
            if not rank:
                raise
            raise StorageError(
                op="stat",
                key=error.key,
                backend=self.storage.url,
                detail=f"rank {rank} has written this rank manifest, and rank 0 does not see "
                "it: save to a path on storage that all ranks share",
            ) from error

    async def _failed(self, error: BaseException) -> Failure | None:
        visible = await self._visible() if self._is_asked else _Visible.NONE
        if isinstance(error, ObjectExists) and visible is _Visible.OURS:
            return None
        self.context.on_failure(error)
        self.is_unanswered = visible is _Visible.UNKNOWN
        is_lost = isinstance(error, ObjectExists) or (
            visible is _Visible.ANOTHER and not self.overwrite
        )
        if is_lost:
            exists = ObjectExists(
                op="commit",
                key=COMMIT_KEY,
                backend=self.storage.url,
                detail="another snapshot was committed at this path in the meantime. Save to "
                "another path, or pass overwrite=True to replace it",
            )
            return Failure.of(exists, stage=Stage.COMMIT, key=COMMIT_KEY)
        return Failure.caused_by(
            error,
            stage=Stage.COMMIT,
            rank=0,
            key=COMMIT_KEY,
            may_be_visible=visible in (_Visible.OURS, _Visible.UNKNOWN),
        )

    async def _unanswered(self) -> Failure | None:
        if not self._is_asked:
            reason = self._stop_reason
            if self._is_waiting:
                reason += "; an earlier save to this path has to commit first and has not ended"
            return _failure(reason)
        if await self._visible() is _Visible.OURS:
            return None
        # The storage may still perform it: the objects it names must stay.
        self.is_unanswered = True
        reason = "the storage has not answered the commit, which may yet take effect"
        return _failure(f"{self._stop_reason}; {reason}", may_be_visible=True)

    async def _visible(self) -> _Visible:
        left_s = self.deadline - anyio.current_time()
        with anyio.move_on_after(max(_LATE_LOOK_S, min(left_s, _LOOK_S))):
            try:
                commit = await self.context.errands.run(find_commit, self.storage)
            except Exception:
                logger.debug("the commit object cannot be read", exc_info=True)
            else:
                if commit is None:
                    return _Visible.NONE
                is_ours = commit.attempt == self._attempt
                return _Visible.OURS if is_ours else _Visible.ANOTHER
        return _Visible.UNKNOWN


def _failure(reason: str, *, may_be_visible: bool = False) -> Failure:
    return Failure(
        reason=reason,
        stage=Stage.COMMIT,
        rank=0,
        key=COMMIT_KEY,
        may_be_visible=may_be_visible,
    )
