"""A save of several ranks that their uploader processes make: what is different from that of one.

Each rank has a process, or takes its part in the trainer where none can be started. A line between
the trainers (``protocol.line``) begins and ends such a save: it is handed over when rank 0's
process has it, behind those that were called before, and the outcome is the line's. It also tells
a rank that follows rank 0 that no process is to save.
"""

from __future__ import annotations

import concurrent.futures

import anyio
import msgspec

from actorsnap.actors.errands import Errands
from actorsnap.actors.fence import Fence
from actorsnap.actors.line import LineActor
from actorsnap.actors.reader import find_commit
from actorsnap.errors import (
    ActorSnapError,
    describe,
)
from actorsnap.lines import Lines
from actorsnap.protocol.frames import Save, StagingWanted, TeamPlace
from actorsnap.protocol.line import (
    Assigned,
    HandedOver,
    LineEvent,
    LineMachine,
    ProcessFinished,
    ProcessGone,
)
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.runtime.host import Host
from actorsnap.runtime.job import SaveRequest
from actorsnap.runtime.observing import Observation
from actorsnap.runtime.offload import Uploader
from actorsnap.runtime.offloaded import GRACE_S, OffloadedSave
from actorsnap.runtime.place import open_place
from actorsnap.runtime.ranks import Membership
from actorsnap.runtime.saving import SaveJob, failure_of
from actorsnap.state.captured import Captured

__all__ = ["OffloadedTeamSave"]

logger = Lines(__name__)

_LOOK_S = 10.0
"""Bound of the look whether a commit is visible, when nobody can tell any more."""

_STEAD = -2
"""Stands for the trainer where ``Uploader.incarnation`` is asked for."""

_OTHERS_GRACE_S = 4.0
"""Extra time rank 0's trainer has beyond the deadline to end the save, in seconds."""


class OffloadedTeamSave(OffloadedSave):
    """A rank's part in it. See also ``OffloadedSave``, and ``LineWork``.

    Args:
        uploader: None where this rank can have none; others take part.
        membership: In the team of the trainers.
        follows: Whether rank 0 may have its trainer save, and so this rank, too.
    """

    def __init__(
        self,
        host: Host,
        uploader: Uploader | None,
        request: SaveRequest,
        captured: Captured,
        *,
        membership: Membership,
        follows: bool,
        fence: Fence | None,
        observation: Observation | None,
    ) -> None:
        super().__init__(
            host,
            uploader,
            request,
            captured,
            membership=membership,
            fence=fence,
            observation=observation,
        )
        self._team = membership.team
        self._call = membership.call
        self._follows = follows
        self._line: LineActor | None = None
        self._errands: Errands
        self._meeting = ""
        self._may_hand_over: anyio.Event
        self._is_handed_over = self._is_given_up = self._is_trainers = False
        self._told: Failure | None = None

    def _awaited_at_exit(self) -> concurrent.futures.Future[None]:
        if self.options.detach and self._team.hosts_store:
            return self.finished  # the process needs the store
        return super()._awaited_at_exit()

    def _on_cancel(self, reason: str) -> None:
        if self._is_handed_over or self._here is not None or not self._has_begun:
            super()._on_cancel(reason)
        elif self._line is not None:
            self._give_up(Failure(reason=reason, stage=Stage.CANCEL, rank=self.rank))

    async def _run(self) -> None:
        self._may_hand_over = anyio.Event()
        async with anyio.create_task_group() as behind:
            run_blocking, label = self._host.run_blocking, self.label
            self._errands = Errands(behind, run_blocking=run_blocking, label=label)
            await super()._run()

    async def _save(self) -> None:
        self._line = line = LineActor(
            machine=LineMachine(rank=self.rank, world_size=self._world_size, follows=self._follows),
            ends=(self._call.participant, self._call.coordinator),
            work=self,
            timeout_s=self.options.timeout_s,
            left_s=self._request.left_s + (_OTHERS_GRACE_S if self.rank else GRACE_S),
        )
        self._tasks.start_soon(self._await_turn)
        if self._maybe_uploader is not None and not self._follows:
            self._maybe_uploader.start(for_ranks=True)
        if self._cancel_reason is not None:
            self.cancel(self._cancel_reason)
        failure = await line.run()
        if self._is_trainers:
            self.make_here()
            await self._ended.wait()
            return
        if failure is None:
            self._error = None
        elif failure is not self._told:
            self._error = failure.to_error()
            if failure.rank == self.rank:
                self._error.__cause__ = self._cause
            if self._told is None:
                self._log_abort(failure)  # else the process has
        self._ended.set()

    def _post(self, event: LineEvent) -> None:
        assert self._line is not None
        self._line.post(event)

    async def _await_turn(self) -> None:
        """Hands the save over behind those that were called before it."""
        async with self._team.turn:
            try:
                if self._maybe_uploader is not None and not self._is_given_up:
                    await self._describe()
            except Exception as error:
                self._cause = error
                self._give_up(Failure(reason=describe(error), stage=Stage.JOIN, rank=self.rank))
                return
            await self._may_hand_over.wait()
            if self._is_given_up:
                return
            self._is_handed_over = True
            if self._maybe_uploader is None:
                self.make_here()
            else:
                self._maybe_uploader.start(for_ranks=True)
                self._maybe_uploader.add(self._number, self)

    # What the line has done

    def hand_over(self, name: str) -> None:
        """See ``LineWork``."""
        self._meeting = name
        self._may_hand_over.set()

    def end_in_process(self, failure: Failure) -> None:
        """See ``LineWork``."""
        if self._here is not None:
            self._here.end(failure)
        elif self._is_handed_over:
            self._uploader.end(self._number, failure)
        else:
            self._give_up(failure)

    def _give_up(self, failure: Failure) -> None:
        """No process will get the save."""
        if not self._is_given_up:
            self._is_given_up = True
            self._post(ProcessGone(failure))

    def save_here(self) -> None:
        """See ``LineWork``."""
        self._is_trainers = self._is_given_up = True
        self._may_hand_over.set()

    async def look_for_commit(self) -> bool | None:
        """See ``LineWork``."""
        assert self._wanted is not None
        found: bool | None = None
        with anyio.move_on_after(_LOOK_S):
            try:
                run_blocking = self._errands.run_blocking
                storage = await open_place(
                    self._host, self._request.place, fsync=False, run_blocking=run_blocking
                )
                try:
                    commit = await self._errands.run(find_commit, storage)
                    found = commit is not None and commit.attempt == self._wanted.attempt
                finally:
                    await self._errands.close(storage.aclose)
            except Exception as error:  # whatever a backend raises
                logger.warning("%s: whether it is committed is unknown: %s", self.label, error)
        return found

    # What the uploader calls

    def frame(self, values: list[tuple[int, bytes]], after: str) -> Save:
        """See ``HandedSave``."""
        team = self._process_place(self._uploader.incarnation)
        return msgspec.structs.replace(super().frame(values, after), team=team)

    def _process_place(self, incarnation: int) -> TeamPlace:
        """Where this rank's process, or this one in its stead, meets the others."""
        team, address = self._team, self._team.address
        assert address is not None
        if team.rank == 0:
            self._meeting = team.meeting(incarnation)
        return TeamPlace(
            team=team.number,
            name=self._meeting,
            rank=team.rank,
            world_size=team.world_size,
            host=address.host,
            port=address.port,
            call=self._call.number,
        )

    def on_begun(self) -> None:
        """The process, or this one in its stead, has the save: the others may follow."""
        self._post(HandedOver(self._meeting))

    def on_staging_wanted(self, frame: StagingWanted) -> None:
        """See ``HandedSave``."""
        self._post(Assigned())
        at = frame.at.decode("utf-8", "surrogatepass")
        if at != self._request.place.at:  # rank 0's
            self._go_to(at)
        super().on_staging_wanted(frame)

    def on_aborted(self, failure: Failure) -> None:
        self._post(ProcessGone(failure))

    def _finish(self) -> None:
        """The process has told the outcome, the line concludes."""
        error = self._error
        if isinstance(error, ActorSnapError):
            self._told = failure_of(error)
        elif error is not None:
            self._told = Failure(reason=describe(error), stage=Stage.STORE, rank=self.rank)
        self._post(ProcessFinished(self._told))

    # Where there is no process

    def _process_membership(self) -> Membership:
        if self._is_trainers:
            assert self._membership is not None
            return self._membership
        place = self._process_place(_STEAD)
        team = self._team.in_processes_stead(place)
        return team.join_agreed(place.call, self.options)

    def _follow(self, job: SaveJob) -> None:
        if self._is_trainers:
            job.finished.add_done_callback(self._on_made_by_trainers)
            return
        self.on_begun()
        job.staged.add_done_callback(self._on_staged_here)
        job.finished.add_done_callback(self._on_made_here)

    def _on_staged_here(self, staged: concurrent.futures.Future[None]) -> None:
        if staged.exception() is None:
            self._post(Assigned())

    def _on_made_by_trainers(self, finished: concurrent.futures.Future[None]) -> None:
        self._error = finished.exception()
        self._ended.set()

    def _on_made_here(self, finished: concurrent.futures.Future[None]) -> None:
        self._error = finished.exception()
        self._finish()
