"""A save in flight, as its caller sees it.

The common part of ``SaveJob`` and ``OffloadedSave``: the request, the futures that callers wait
for, the calls from other threads, and the outcome, which is reported once.
"""

from __future__ import annotations

import abc
import concurrent.futures
import time
from dataclasses import dataclass, replace
from typing import Any

import anyio

from actorsnap.actors.fence import Fence
from actorsnap.actors.trace import Phase, ProgressBoard
from actorsnap.errors import printable
from actorsnap.options import Options
from actorsnap.runtime.commit_order import CommitTurn
from actorsnap.runtime.host import Host, PendingSave
from actorsnap.runtime.location import Location
from actorsnap.runtime.source import Source
from actorsnap.runtime.team import Membership
from actorsnap.runtime.tracing import Observation, error_text
from actorsnap.storage.registry import without_secrets

__all__ = ["Job", "SaveRequest"]

_HEAD_START_S = 0.005
"""Delay of a lazily staged save after the call, in seconds: a switch interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The arguments of a save.

    Attributes:
        place: The target; rank 0's holds for all ranks.
        overwrite: Whether to replace a committed snapshot.
        resume: Whether to use objects of dead attempts at the place; rank 0's holds.
        step: The caller's training step, or None.
        metadata: The caller's metadata.
        begun_s: Start of the call, by ``time.monotonic``.
    """

    location: Location
    overwrite: bool
    resume: bool
    step: int | None
    metadata: dict[str, Any]
    options: Options
    begun_s: float

    @property
    def left_s(self) -> float:
        """Seconds until ``Options.timeout_s`` has passed; at least 0."""
        return max(0.0, self.begun_s + self.options.timeout_s - time.monotonic())


class Job(abc.ABC):
    """A save in flight.

    Args:
        membership: None for a single rank.
        fence: See ``Saver``.
        turn: None: ``start`` takes one if the save overwrites.
        observation: Records work and waits.

    Attributes:
        rank: This process' rank in the save.
        eager_staged: Settled when the call that began the save may return, or with the save's
            error. The same as ``staged`` without a fence.
        staged: Settled when the trainer may overwrite its tensors, or with the save's error.
        finished: Settled with the outcome; its error is raised to users.
        board: Progress.
        is_unanswered: See ``CommitActor``.
    """

    def __init__(
        self,
        host: Host,
        request: SaveRequest,
        *,
        membership: Membership | None,
        fence: Fence | None,
        observation: Observation | None,
        turn: CommitTurn | None = None,
    ) -> None:
        self._host = host
        self._request = request
        self._membership = membership
        self._observation = observation or Observation("save")
        self._turn = turn
        self.is_unanswered = False
        self._has_begun = False
        self._cancel_reason: str | None = None
        self.fence = fence
        self.rank = 0 if membership is None else membership.team.rank
        self._world_size = 1 if membership is None else membership.team.world_size
        self.board = ProgressBoard(printable(f"snapshot {self.url} rank {self.rank}"))
        self.staged: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.eager_staged = self.staged
        if fence is not None:
            self.eager_staged = concurrent.futures.Future()
            if not fence.has_eager:
                self.eager_staged.set_result(None)

    @property
    def url(self) -> str:
        """The target's URL: rank 0's, once known."""
        return self._request.location.display_url

    @property
    def location(self) -> Location:
        """The target: rank 0's, once known."""
        return self._request.location

    @property
    def options(self) -> Options:
        return self._request.options

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part."""
        return self._membership is not None

    @property
    def label(self) -> str:
        """The name in the log."""
        return self.board.label

    # From any thread

    def start(self) -> None:
        self._host.resources.set_budget(self.options.memory_budget_bytes)
        abort = self.cancel if self.options.at_exit == "abort" else None
        future = self._awaited_at_exit()
        self._host.track_save(PendingSave(future=future, label=self.label, abort=abort))
        if self._turn is None and self.rank == 0 and self._request.overwrite:
            self._turn = self._host.resources.commit_order.join(self._request.location.canonical)
        self._host.submit(self._begin())

    def cancel(self, reason: str) -> None:
        """Requests an abort, also if ``start`` was interrupted. The commit may still win."""
        self.check_process()
        if self.finished.done():
            return  # the runtime may have ended

        def request() -> None:
            self._cancel_reason = self._cancel_reason or reason
            self._on_cancel(reason)

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
        """Returns the committed snapshot. Only after ``finished`` has succeeded."""
        self.finished.result()
        return Source(self._request.location, self.options)

    # On the runtime's loop

    @abc.abstractmethod
    def _awaited_at_exit(self) -> concurrent.futures.Future[None]:
        """Returns a future that is done when the save no longer needs this process."""

    @abc.abstractmethod
    async def _run(self) -> None:
        """Saves and reports the outcome."""

    @abc.abstractmethod
    def _on_cancel(self, reason: str) -> None:
        """Handles an abort request. May be called repeatedly."""

    async def _begin(self) -> None:
        """Runs the save once, unless it has already ended."""
        if not self._has_begun and not self.finished.done():
            self._has_begun = True
            await self._run()

    async def _leave_gil_to_caller(self) -> None:
        """Lets the caller run first if it does not wait for the save."""
        if self.fence is not None and not self.fence.has_eager:
            await anyio.sleep(_HEAD_START_S)

    def _go_to(self, at: str) -> None:
        """Changes the target to rank 0's."""
        location = replace(self._request.location, display_url=without_secrets(at), url=at)
        self._request = replace(self._request, location=location)

    def _on_eager_staged(self) -> None:
        if not self.eager_staged.done():
            self.eager_staged.set_result(None)

    def _leave(self) -> None:
        """Ends this rank's part in the call."""
        if self._membership is not None:
            self._membership.call.close()

    def _end_turn(self) -> None:
        """Lets later saves to the path commit."""
        if self._turn is not None:
            self._turn.release(is_unanswered=self.is_unanswered)

    def _fail(self, error: BaseException) -> None:
        """Reports that there will be no snapshot."""
        self._end_turn()
        self.board.enter(Phase.ABORTED)
        if self.fence is not None:
            self.fence.open()
        for future in (self.eager_staged, self.staged):
            if not future.done():
                future.set_exception(error)
        self.finished.set_exception(error)

    async def _end_observation(self, error: BaseException | None) -> None:
        """Exports the recording, before the outcome is reported."""
        observation, self._observation = self._observation, Observation("save")
        await observation.end(
            self._host,
            url=self.url,
            rank=self.rank,
            world_size=self._world_size,
            outcome="committed" if error is None else "aborted",
            error="" if error is None else error_text(error),
        )
