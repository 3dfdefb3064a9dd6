"""The coordinator actor: performs what ``protocol.coordinator`` decides.

It owns the attempt's deadline and the one operation that makes a snapshot: the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio

from actorsnap.errors import ActorSnapError, ObjectExists, ObjectNotFound
from actorsnap.format.manifest import (
    COMMIT_KEY,
    FORMAT_VERSION,
    Commit,
    ManifestRecord,
    decode_commit,
    encode_commit,
)
from actorsnap.protocol.coordinator import (
    CommitFailed,
    CommitWritten,
    CoordinatorEvent,
    CoordinatorMachine,
    DeadlinePassed,
    SendToRank,
    WriteCommit,
)
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.storage.base import Storage
from actorsnap.transport.base import CoordinatorEnd

__all__ = ["CommitTemplate", "CoordinatorActor"]

logger = logging.getLogger(__name__)


class CommitTemplate:
    """What of the commit object is known before the ranks report.

    Args:
        overwrite: Replace a commit object that is there already.
    """

    def __init__(
        self,
        *,
        attempt: str,
        created: str,
        world_size: int,
        fsync: bool,
        metadata: dict[str, Any],
        overwrite: bool,
    ) -> None:
        self.attempt = attempt
        self.created = created
        self.world_size = world_size
        self.fsync = fsync
        self.metadata = metadata
        self.overwrite = overwrite

    def fill(self, manifests: tuple[ManifestRecord, ...]) -> Commit:
        return Commit(
            version=FORMAT_VERSION,
            world_size=self.world_size,
            attempt=self.attempt,
            created=self.created,
            manifests=manifests,
            fsync=self.fsync,
            metadata=self.metadata,
        )


class CoordinatorActor:
    """Runs one attempt to its outcome.

    Args:
        machine: Fresh.
        end: The transport's coordinator end.
        storage: Where the commit object goes.
        template: The rest of the commit object.
        timeout_s: Seconds until the attempt is aborted if it has not committed.
        on_failure: Gets the exception behind a failed commit, before it is reported.

    Attributes:
        commit: What was committed, once it was.
    """

    def __init__(
        self,
        *,
        machine: CoordinatorMachine,
        end: CoordinatorEnd,
        storage: Storage,
        template: CommitTemplate,
        timeout_s: float,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._machine = machine
        self._end = end
        self._storage = storage
        self._template = template
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self.commit: Commit | None = None

    async def run(self) -> None:
        """Returns when every rank has been told the outcome."""
        deadline = anyio.current_time() + self._timeout_s
        while not self._machine.is_final:
            event: CoordinatorEvent
            with anyio.move_on_at(deadline) as scope:
                event = await self._end.receive()
            if scope.cancelled_caught:
                event = DeadlinePassed(self._timeout_s)
                deadline = float("inf")
            await self._handle(event)

    async def _handle(self, event: CoordinatorEvent) -> None:
        for command in self._machine.handle(event):
            match command:
                case SendToRank():
                    await self._end.send(command.rank, command.message)
                case WriteCommit():
                    await self._handle(await self._commit(command.manifests))

    async def _commit(self, manifests: tuple[ManifestRecord, ...]) -> CommitWritten | CommitFailed:
        commit = self._template.fill(manifests)
        data = encode_commit(commit)
        try:
            if self._template.overwrite:
                await self._storage.put(COMMIT_KEY, [memoryview(data)])
            else:
                await self._storage.put_if_absent(COMMIT_KEY, data)
        except ObjectExists as error:
            self._on_failure(error)
            return CommitFailed(
                Failure(
                    reason="another snapshot was committed at this path meanwhile",
                    stage=Stage.COMMIT,
                    key=COMMIT_KEY,
                    already_exists=True,
                )
            )
        except ActorSnapError as error:
            self._on_failure(error)
            return CommitFailed(
                Failure(
                    reason=str(error),
                    stage=Stage.COMMIT,
                    rank=0,
                    key=COMMIT_KEY,
                    may_be_visible=await self._may_be_visible(),
                )
            )
        self.commit = commit
        return CommitWritten()

    async def _may_be_visible(self) -> bool:
        """Whether a commit that failed (a folder's fsync, a lost answer) took effect."""
        try:
            data = await self._storage.get(COMMIT_KEY)
            return decode_commit(data).attempt == self._template.attempt
        except ObjectNotFound:
            return False
        except ActorSnapError:
            return True
