# SPDX-License-Identifier: Apache-2.0
"""A ``Save`` has its callers' futures and one outcome. An engine makes it: ``LocalEngine`` in this
process, ``RemoteEngine`` with the uploader process.
"""

from __future__ import annotations

import concurrent.futures
import time
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.abc

from actorsnap.actors.abandonable import first_error
from actorsnap.actors.fence import Fence
from actorsnap.actors.trace import Phase, ProgressBoard
from actorsnap.errors import SnapshotAborted, describe
from actorsnap.options import Options
from actorsnap.protocol.failure import Stage
from actorsnap.runtime.bars import Output
from actorsnap.runtime.host import Host, PendingSave
from actorsnap.runtime.location import Location
from actorsnap.runtime.resources import CommitTurn
from actorsnap.runtime.source import Source, Written
from actorsnap.runtime.team import Membership
from actorsnap.runtime.tracing import Observation
from actorsnap.storage.registry import without_secrets

_HEAD_START_S = 0.005
"""Delay of lazy staging after the call: a switch interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The arguments of a save.

    Attributes:
        location, resume: Rank 0's hold for all.
        begun_s: By ``time.monotonic``.
    """

    location: Location
    options: Options
    begun_s: float
    overwrite: bool = False
    resume: bool = False
    step: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds left of ``Options.timeout_s``; at least 0."""
        return max(0.0, self.begun_s + self.options.timeout_s - time.monotonic())


class Engine(Protocol):
    """One save, on the runtime's loop."""

    async def run(self, tasks: anyio.abc.TaskGroup) -> None:
        """Returns when the save is committed. Called once.

        Args:
            tasks: For tasks that may hang in a storage and outlive the outcome.

        Raises:
            Exception: The outcome, unless ``Save.commit`` was called.
        """
        ...

    def cancel(self, reason: str) -> None:
        """Requests an abort of ``run``. Idempotent."""
        ...

    def close(self) -> None:
        """Called after all tasks."""
        ...


@dataclass(eq=False, repr=False)
class Save:
    """A save in flight.

    Args:
        membership: None for a single rank.
        fence: None: staging is eager.
        turn: None: ``start`` takes one to overwrite.

    Attributes:
        engine: Set before ``start``.
        attempt: The attempt's name, once known.
        eager_staged: Settled when the call that began the save may return, or with its error.
            ``staged`` without a fence.
        staged: Settled when the trainer may overwrite its tensors, or with the save's error.
        finished: Settled with the outcome for users.
        is_committed: Nothing can fail the save any more.
        is_unanswered: See ``CommitActor``.
        is_detached: The uploader process continues the save without this one.
        output: Where its progress is drawn while a caller waits for it. None: nowhere.
        keys: Keys of this rank's app state, if known.
    """

    host: Host
    request: SaveRequest
    _: KW_ONLY
    membership: Membership | None = None
    fence: Fence | None = None
    observation: Observation = field(default_factory=partial(Observation, "save"))
    turn: CommitTurn | None = None
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.rank = 0 if self.membership is None else self.membership.team.rank
        self.world_size = 1 if self.membership is None else self.membership.team.world_size
        self.board = ProgressBoard(f"snapshot {self.location.log_url} rank {self.rank}")
        self.attempt = ""
        self.cancel_reason: str | None = None
        self.is_committed = False
        self.is_unanswered = False
        self.is_detached = False
        self.output: Output | None = None
        self.keys: tuple[str, ...] = ()
        self._has_begun = False
        self.staged: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        # The save no longer needs this process.
        self._left: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.eager_staged = self.staged
        if self.fence is not None:
            self.eager_staged = concurrent.futures.Future()
            self.fence.on_eager_staged = partial(_settle, self.eager_staged)
            if not self.fence.has_eager:
                _settle(self.eager_staged)

    @property
    def url(self) -> str:
        """Rank 0's, for people, once known."""
        return self.request.location.display_url

    @property
    def location(self) -> Location:
        return self.request.location

    @property
    def options(self) -> Options:
        return self.request.options

    @property
    def label(self) -> str:
        return self.board.label

    # From any thread

    def start(self) -> None:
        self.host.resources.set_budget(self.options.memory_budget_bytes)
        abort = self.cancel if self.options.at_exit == "abort" else None
        self.host.track_save(PendingSave(future=self._left, label=self.label, abort=abort))
        if self.turn is None and self.rank == 0 and self.request.overwrite:
            self.turn = self.host.resources.commit_order.join(self.location.canonical)
        self.host.submit(self._begin())

    def cancel(self, reason: str) -> None:
        """Requests an abort, even if ``start`` was interrupted. The commit may win."""
        self.check_process()
        if self.finished.done():
            return  # maybe no runtime

        def request() -> None:
            self.cancel_reason = self.cancel_reason or reason
            if not self._has_begun:
                # Other ranks count on this one: the save begins and fails.
                self.host.submit(self._begin())
            elif self.is_committed:
                self.end(None)
            else:
                self.engine.cancel(reason)

        self.host.call_soon(request)

    def is_done(self) -> bool:
        self.check_process()
        return self.finished.done()

    def watched(self) -> ProgressBoard:
        self.check_process()
        return self.board

    def check_process(self) -> None:
        self.host.check_process()

    def source(self) -> Source:
        """Returns the snapshot, after ``finished`` has succeeded."""
        self.finished.result()
        is_alone, request = self.world_size == 1, self.request
        written = Written(
            world_size=self.world_size,
            step=request.step,
            metadata=request.metadata if self.rank == 0 else {},
            nbytes=self.board.latest.total_bytes if is_alone else 0,
            keys=self.keys if is_alone else (),
        )
        return Source(self.location, self.options, written)

    # On the runtime's loop

    async def _begin(self) -> None:
        if not self._has_begun and not self.finished.done():
            self._has_begun = True
            await self._run()

    async def _run(self) -> None:
        try:
            # Inside: hanging tasks must not delay the outcome.
            async with anyio.create_task_group() as tasks:
                error: BaseException | None = None
                try:
                    await self.engine.run(tasks)
                except Exception as failure:
                    error = first_error(failure)
                except BaseException:
                    error = self._stopped()
                    raise
                finally:
                    await self._end_observation(error)
                    self.end(error)
                    if self.membership is not None:
                        self.membership.call.close()
                    self.leave_process()
        finally:
            self.engine.close()

    def _stopped(self) -> SnapshotAborted:
        reason, is_detached = "the runtime was stopped", self.is_detached
        if is_detached:
            reason += "; the uploader process goes on"
        return SnapshotAborted(
            reason=reason,
            rank=self.rank,
            stage=str(Stage.STORE if is_detached else Stage.CANCEL),
            may_be_committed=is_detached,
        )

    async def _end_observation(self, error: BaseException | None) -> None:
        observation, self.observation = self.observation, Observation("save")
        observation.attempt = self.attempt
        is_committed = error is None or self.is_committed
        await observation.end(
            self.host,
            url=self.url,
            rank=self.rank,
            world_size=self.world_size,
            outcome="committed" if is_committed else "aborted",
            error="" if error is None or is_committed else describe(error),
        )

    # For the engine

    async def leave_gil_to_caller(self) -> None:
        """Lets a caller that does not wait run first."""
        if self.fence is not None and not self.fence.has_eager:
            await anyio.sleep(_HEAD_START_S)

    def move(self, url: str) -> None:
        """Changes the target to rank 0's."""
        location = replace(self.location, display_url=without_secrets(url), url=url)
        self.request = replace(self.request, location=location)

    def leave_process(self) -> None:
        """Lets this process exit: the save has ended or left it."""
        _settle(self._left)

    def commit(self) -> None:
        """Notes the commit; later saves to the path may commit. Idempotent."""
        if not self.is_committed:
            self.is_committed = True
            self._end_turn()
            self.board.enter(Phase.COMMITTED)

    def end(self, error: BaseException | None) -> None:
        """Reports the outcome, once. A committed save has no error."""
        if self.finished.done():
            return
        if error is None:
            self.commit()
        if self.fence is not None:
            self.fence.open()
        if self.is_committed:
            self.finished.set_result(None)
            return
        self._end_turn()
        self.board.enter(Phase.ABORTED)
        for future in (self.eager_staged, self.staged, self.finished):
            if not future.done():
                future.set_exception(error)

    def _end_turn(self) -> None:
        if self.turn is not None:
            self.turn.release(is_unanswered=self.is_unanswered)


def _settle(future: concurrent.futures.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
