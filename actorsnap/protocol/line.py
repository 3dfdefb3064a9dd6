"""What the trainers of a team say to each other about a save that their uploader processes make.

The processes have a team of their own, where one of them coordinates (``protocol.save``). It says
nothing of a rank that never gets there: one whose trainer failed to
capture, died, or was told other options; nor does it reach a trainer whose process has died. For
that each trainer keeps its line to the others open, under the number that the call has there.

Rules:

1. Rank 0's process gets the save first. When all trainers have made the call (``Handed``), rank 0
   tells the others where the processes meet (``Meet``), in the order of the calls, and they hand it
   over (``HandOver``), too. Where rank 0 saves in its trainer, those that follow it do so, too
   (``SaveHere``), and the line ends.
2. Whoever saves in its trainer, or has failed, says so to rank 0, which then ends the save in its
   process (``EndInProcess``), and so in all.
3. Before the rank's plan has come (``Assigned``) a trainer that is lost ends the save: its process
   may not have heard of it. From then on the processes look after each other, and trainers may go.
4. The outcome is the process', while there is one. When it dies, rank 0 is told, and answers.
   Where rank 0's own has died, or cannot answer, the storage is asked (``LookForCommit``).
5. Rank 0 tells all trainers the outcome, also those that come late.
6. ``Finish`` is given exactly once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.protocol.calls import (
    CoordinatorLost,
    DeadlinePassed,
    Finish,
    Looked,
    LookForCommit,
    RankLost,
    Send,
    SendToRank,
)
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.machine import Machine, Row, Table
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    Committed,
    Failed,
    FromCoordinator,
    Handed,
    Meet,
    SaveInTrainers,
    ToCoordinator,
    unlike_processes,
)

__all__ = [
    "Assigned",
    "EndInProcess",
    "HandOver",
    "HandedOver",
    "LineCommand",
    "LineEvent",
    "LineMachine",
    "LineState",
    "ProcessFinished",
    "ProcessGone",
    "SaveHere",
]


class LineState(StrEnum):
    OPEN = "open"
    ENDING = "ending"
    ALONE = "alone"
    LOOKING = "looking"
    HERE = "here"
    COMMITTED = "committed"
    ABORTED = "aborted"


class HandedOver(msgspec.Struct, frozen=True):
    """The process has got the save; the processes meet under this name."""

    name: str


class Assigned(msgspec.Struct, frozen=True):
    """The process has its plan: all ranks' processes have joined."""


class ProcessFinished(msgspec.Struct, frozen=True):
    """The process has told the outcome: why it is aborted, or None."""

    failure: Failure | None


class ProcessGone(msgspec.Struct, frozen=True):
    """The save has no process any more, or never got one, and this is why."""

    failure: Failure


class HandOver(msgspec.Struct, frozen=True):
    """Give the save to the process, which meets the others' under this name; on rank 0 none. Ends
    in ``HandedOver`` or ``ProcessGone``."""

    name: str


class EndInProcess(msgspec.Struct, frozen=True):
    """Have the process end the save so: on rank 0 for all, elsewhere without waiting for
    anybody. Ends in ``ProcessFinished`` or ``ProcessGone``."""

    failure: Failure


class SaveHere(msgspec.Struct, frozen=True):
    """Save in the trainer, which takes part as if it had from the beginning. The last command."""


LineEvent: TypeAlias = (
    ToCoordinator
    | FromCoordinator
    | RankLost
    | CoordinatorLost
    | DeadlinePassed
    | HandedOver
    | Assigned
    | ProcessFinished
    | ProcessGone
    | Looked
)
LineCommand: TypeAlias = (
    Send | SendToRank | HandOver | EndInProcess | LookForCommit | SaveHere | Finish
)

_S = LineState


class LineMachine(Machine[LineState, LineEvent, LineCommand]):
    """One trainer in one save.

    Args:
        rank: Of the trainer.
        world_size: Of the team.
        follows: The trainer saves if rank 0's does.
    """

    def __init__(self, *, rank: int, world_size: int, follows: bool = False) -> None:
        super().__init__(_TABLE, _S.OPEN)
        self.rank = rank
        self.follows = follows
        self.world_size = world_size
        self._is_assigned = False
        self._is_cut = False
        # Of rank 0: who has called, and where the processes meet.
        self._handed = {0}
        self._meet: Meet | None = None
        self._failure: Failure | None = None

    def begin(self) -> list[LineCommand]:
        """What is done before anything else."""
        return [Send(Handed(self.rank, self.follows)) if self.rank else HandOver("")]

    def validate(self) -> None:
        assert (self._failure is None) == (self.state in (_S.OPEN, _S.HERE, _S.COMMITTED))
        assert self.follows or self.state is not _S.HERE
        assert self.rank or self.state is not _S.ALONE

    # What others say

    def _on_handed(self, event: Handed) -> list[LineCommand]:
        if event.rank in self._handed:
            return []
        self._handed.add(event.rank)
        return self._tell_where_to_meet()

    def _on_unlike(self, event: Arrived) -> list[LineCommand]:
        return self._end(unlike_processes(event.rank))

    def _on_failed(self, event: Failed | Aborted) -> list[LineCommand]:
        return self._end(event.failure)

    def _on_lost(self, event: RankLost) -> list[LineCommand]:
        if self._is_assigned:
            return []
        return self._end(Failure(reason=event.reason, stage=Stage.JOIN, rank=event.rank))

    def _on_cut(self, event: CoordinatorLost) -> list[LineCommand]:
        self._is_cut = True
        if self._is_assigned:
            return []
        return self._end(Failure(reason=event.reason, stage=Stage.JOIN, rank=event.rank))

    def _on_deadline(self, event: DeadlinePassed) -> list[LineCommand]:
        if self._is_assigned:
            return []  # there is a coordinator, which has a deadline
        what = "rank 0, which coordinates, is silent"
        if not self.rank:
            what = "the uploader processes have not begun the save"
        reason = f"timeout_s={event.timeout_s:g} is over, and {what}"
        return self._end(Failure(reason=reason, stage=Stage.JOIN, rank=0))

    def _end(self, failure: Failure) -> list[LineCommand]:
        self.state = _S.ENDING
        self._failure = failure
        return [EndInProcess(failure)]

    def _on_in_trainers(self, event: SaveInTrainers) -> list[LineCommand]:
        self.state = _S.HERE
        return [SaveHere()]

    # The process

    def _on_meet(self, event: Meet) -> list[LineCommand]:
        return [HandOver(event.name)]

    def _on_handed_over(self, event: HandedOver) -> list[LineCommand]:
        self._meet = Meet(event.name)
        return self._tell_where_to_meet()

    def _tell_where_to_meet(self) -> list[LineCommand]:
        if self._meet is None or len(self._handed) < self.world_size:
            return []
        return self._tell_all(self._meet)

    def _on_assigned(self, event: Assigned) -> list[LineCommand]:
        self._is_assigned = True
        return []

    def _on_finished(self, event: ProcessFinished) -> list[LineCommand]:
        if event.failure is None:
            return self._commit()
        # Elsewhere than on rank 0 it may not have been told why, but only to end.
        return self._abort((self._failure if self.rank else None) or event.failure)

    def _on_gone(self, event: ProcessGone) -> list[LineCommand]:
        if self.rank and self._failure is not None:
            return self._abort(self._failure)
        # Whether it may be visible is for those to say who look, or decide.
        failure = self._failure or event.failure
        failure = msgspec.structs.replace(failure, may_be_visible=False)
        if self.rank and not self._is_cut:
            self.state, self._failure = _S.ALONE, failure
            return [Send(Failed(self.rank, failure))]
        return self._look(failure)

    # Without a process

    def _on_silence(self, event: CoordinatorLost | DeadlinePassed) -> list[LineCommand]:
        assert self._failure is not None
        return self._look(self._failure)

    def _look(self, failure: Failure) -> list[LineCommand]:
        if not self._is_assigned:
            return self._abort(failure)
        self.state, self._failure = _S.LOOKING, failure
        return [LookForCommit()]

    def _on_looked(self, event: Looked) -> list[LineCommand]:
        assert self._failure is not None
        if event.is_committed:
            return self._commit()
        # It may have been on its way, and come to be seen later.
        return self._abort(msgspec.structs.replace(self._failure, may_be_visible=True))

    def _on_committed(self, event: Committed) -> list[LineCommand]:
        return self._commit()

    def _on_aborted(self, event: Aborted) -> list[LineCommand]:
        return self._abort(event.failure)

    def _commit(self) -> list[LineCommand]:
        self.state = _S.COMMITTED
        self._failure = None
        return [*self._tell_all(Committed()), Finish(None)]

    def _abort(self, failure: Failure) -> list[LineCommand]:
        self.state = _S.ABORTED
        self._failure = failure
        return [*self._tell_all(Aborted(failure)), Finish(failure)]

    def _tell_all(self, message: FromCoordinator) -> list[LineCommand]:
        others = range(1, self.world_size) if self.rank == 0 else ()
        return [SendToRank(rank, message) for rank in others]


_M = LineMachine
_OF_PROCESS: Row[LineCommand] = {
    HandedOver: _M._on_handed_over,
    Assigned: _M._on_assigned,
    ProcessFinished: _M._on_finished,
    ProcessGone: _M._on_gone,
}
_OF_OTHERS = (
    *(Arrived, Handed, Failed, RankLost, Meet, SaveInTrainers),
    *(CoordinatorLost, DeadlinePassed),
)
_TABLE: Table[LineState, LineCommand] = {
    _S.OPEN: {
        Handed: _M._on_handed,
        Meet: _M._on_meet,
        SaveInTrainers: _M._on_in_trainers,
        Arrived: _M._on_unlike,
        Failed: _M._on_failed,
        RankLost: _M._on_lost,
        Aborted: _M._on_failed,
        Committed: _M._ignore,  # the process will say it
        CoordinatorLost: _M._on_cut,
        DeadlinePassed: _M._on_deadline,
        **_OF_PROCESS,
    },
    _S.ENDING: {
        **_OF_PROCESS,
        **dict.fromkeys((*_OF_OTHERS, Aborted, Committed), _M._ignore),
    },
    _S.ALONE: {
        Meet: _M._ignore,
        SaveInTrainers: _M._ignore,
        Aborted: _M._on_aborted,
        Committed: _M._on_committed,
        CoordinatorLost: _M._on_silence,
        DeadlinePassed: _M._on_silence,
    },
    _S.LOOKING: {
        Looked: _M._on_looked,
        Aborted: _M._on_aborted,
        Committed: _M._on_committed,
        **dict.fromkeys(_OF_OTHERS, _M._ignore),
    },
    _S.HERE: {},
    _S.COMMITTED: {},
    _S.ABORTED: {},
}
