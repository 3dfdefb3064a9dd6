"""Steps that all ranks of a group pass together, as two tables.

A rank works, says that it has *arrived* at the next step, and waits. When all ranks have, the
coordinator decides the step from what they brought along, and all *proceed*. Which steps there
are, and what is decided, is the business of whoever hands in ``decide``: it must be pure.

Rules:

1. Nobody proceeds beyond a step before all ranks have arrived at it; all get the same decision.
2. The first failure, lost rank or the deadline aborts for all, with the same failure: also for
   those that work, and for the one that failed, which waits for the verdict.
3. A rank that has proceeded beyond the last step has an outcome, whatever comes later.
4. Without a coordinator, or without an answer, a rank ends by itself.

Messages may come twice and late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.errors import ActorSnapError, RestoreAborted
from actorsnap.protocol.calls import (
    CoordinatorLost,
    DeadlinePassed,
    Finish,
    RankLost,
    Send,
    SendToRank,
    StepFailed,
)
from actorsnap.protocol.machine import Machine, ProtocolViolation, Row, Table
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    Failed,
    Failure,
    FromCoordinator,
    Proceed,
    Stage,
    ToCoordinator,
)

__all__ = [
    "Decide",
    "Decision",
    "GatheringEvent",
    "GatheringMachine",
    "GatheringState",
    "MemberMachine",
    "MemberState",
    "Pass",
    "Reached",
]


class Decision(msgspec.Struct, frozen=True):
    """What a step has led to.

    Attributes:
        stage: Of the work that comes next; None: nothing, it was the last step.
        payload: For all ranks; msgpack.
    """

    stage: Stage | None
    payload: bytes = b""


Decide: TypeAlias = Callable[[int, Sequence[bytes]], Decision]
"""Decides a step, given its number and the payloads of all ranks in rank order. Raises
``ActorSnapError`` where that must be the end, on all ranks."""


def _aborted(reason: str, stage: Stage, rank: int | None) -> Failure:
    error = RestoreAborted(reason=reason, rank=rank, stage=str(stage))
    return Failure.of(error, stage=stage, rank=rank)


# The coordinator ----------------------------------------------------------------------------


class GatheringState(StrEnum):
    GATHERING = "gathering"
    PASSED = "passed"
    ABORTED = "aborted"


GatheringEvent: TypeAlias = ToCoordinator | RankLost | DeadlinePassed

_G = GatheringState


class GatheringMachine(Machine[GatheringState, GatheringEvent, SendToRank]):
    """The coordinator's side.

    Args:
        world_size: Ranks that take part.
        decide: Decides the steps.
    """

    def __init__(self, *, world_size: int, decide: Decide) -> None:
        super().__init__(_GATHERING, _G.GATHERING)
        self.world_size = world_size
        self.step = 0
        self.stage = Stage.JOIN
        self.failure: Failure | None = None
        self._decide = decide
        self._arrived: dict[int, bytes] = {}

    def validate(self) -> None:
        assert (self.failure is not None) == (self.state is _G.ABORTED)
        assert self.is_final or len(self._arrived) < self.world_size

    def _on_arrived(self, event: Arrived) -> list[SendToRank]:
        if event.step < self.step:
            return []  # it came twice
        if event.step > self.step:
            raise ProtocolViolation(f"rank {event.rank} is at {event.step}, not {self.step}")
        self._arrived[event.rank] = event.payload
        if len(self._arrived) < self.world_size:
            return []
        payloads = [self._arrived[rank] for rank in range(self.world_size)]
        self._arrived.clear()
        try:
            decision = self._decide(self.step, payloads)
        except ActorSnapError as error:
            return self._abort(Failure.of(error, stage=self.stage))
        message = Proceed(self.step, decision.payload, decision.stage)
        self.step += 1
        if decision.stage is None:
            self.state = _G.PASSED
        else:
            self.stage = decision.stage
        return self._tell_all(message)

    def _on_failed(self, event: Failed) -> list[SendToRank]:
        return self._abort(event.failure)

    def _on_lost(self, event: RankLost) -> list[SendToRank]:
        return self._abort(_aborted(event.reason, self.stage, event.rank))

    def _on_deadline(self, event: DeadlinePassed) -> list[SendToRank]:
        absent = [rank for rank in range(self.world_size) if rank not in self._arrived]
        rank = absent[0] if len(absent) == 1 else None
        return self._abort(_aborted(event.reason(absent), self.stage, rank))

    def _abort(self, failure: Failure) -> list[SendToRank]:
        self.state = _G.ABORTED
        self.failure = failure
        return self._tell_all(Aborted(failure))

    def _tell_all(self, message: FromCoordinator) -> list[SendToRank]:
        return [SendToRank(rank, message) for rank in range(self.world_size)]


# A rank -------------------------------------------------------------------------------------


class Reached(msgspec.Struct, frozen=True):
    """The rank's work before the next step is done."""

    payload: bytes = b""


class Pass(msgspec.Struct, frozen=True):
    """Go on beyond ``step``."""

    step: int
    payload: bytes


class MemberState(StrEnum):
    WORKING = "working"
    WAITING = "waiting"
    FAILED = "failed"
    PASSED = "passed"
    ABORTED = "aborted"


MemberEvent: TypeAlias = FromCoordinator | Reached | StepFailed | CoordinatorLost | DeadlinePassed
MemberCommand: TypeAlias = Send | Pass | Finish

_S = MemberState


class MemberMachine(Machine[MemberState, MemberEvent, MemberCommand]):
    """A rank's side.

    Args:
        rank: This rank.
    """

    def __init__(self, *, rank: int) -> None:
        super().__init__(_MEMBER, _S.WORKING)
        self.rank = rank
        self.step = 0
        self.stage = Stage.JOIN
        self.failure: Failure | None = None

    def validate(self) -> None:
        assert (self.failure is not None) == (self.state is _S.ABORTED)

    def _on_reached(self, event: Reached) -> list[MemberCommand]:
        self.state = _S.WAITING
        return [Send(Arrived(self.rank, self.step, event.payload))]

    def _on_proceed(self, event: Proceed) -> list[MemberCommand]:
        if event.step < self.step:
            return []  # it came twice
        if event.step > self.step:
            raise ProtocolViolation(f"proceed from {event.step} at {self.step}")
        self.step += 1
        if event.stage is None:
            self.state = _S.PASSED
            return [Pass(event.step, event.payload), Finish(None)]
        self.state, self.stage = _S.WORKING, event.stage
        return [Pass(event.step, event.payload)]

    def _on_repeated(self, event: Proceed) -> list[MemberCommand]:
        if event.step >= self.step:
            raise ProtocolViolation(f"proceed from {event.step} at {self.step}")
        return []

    def _on_late(self, event: Proceed) -> list[MemberCommand]:
        """All had arrived before the failure: one of the caller, who wants to wait no longer."""
        if event.stage is not None:
            return []  # the failure comes in time for the next step
        self.state = _S.PASSED
        return [Finish(None)]

    def _on_failed(self, event: StepFailed) -> list[MemberCommand]:
        self.state = _S.FAILED
        return [Send(Failed(self.rank, event.failure))]

    def _on_aborted(self, event: Aborted) -> list[MemberCommand]:
        return self._end(event.failure)

    def _on_lost(self, event: CoordinatorLost) -> list[MemberCommand]:
        return self._end(_aborted(event.reason, self.stage, event.rank))

    def _on_deadline(self, event: DeadlinePassed) -> list[MemberCommand]:
        return self._end(
            _aborted(
                f"timeout_s={event.timeout_s:g} is over, and rank 0, which coordinates, does not "
                "answer",
                self.stage,
                0,
            )
        )

    def _end(self, failure: Failure) -> list[MemberCommand]:
        self.state = _S.ABORTED
        self.failure = failure
        return [Finish(failure)]


_GM = GatheringMachine
_GATHERING: Table[GatheringState, SendToRank] = {
    _G.GATHERING: {
        Arrived: _GM._on_arrived,
        Failed: _GM._on_failed,
        RankLost: _GM._on_lost,
        DeadlinePassed: _GM._on_deadline,
    },
    _G.PASSED: {},
    _G.ABORTED: {},
}

_M = MemberMachine
_ENDS: Row[MemberCommand] = {
    Aborted: _M._on_aborted,
    CoordinatorLost: _M._on_lost,
    DeadlinePassed: _M._on_deadline,
}
_MEMBER: Table[MemberState, MemberCommand] = {
    _S.WORKING: {
        Reached: _M._on_reached,
        Proceed: _M._on_repeated,
        StepFailed: _M._on_failed,
        **_ENDS,
    },
    _S.WAITING: {
        Proceed: _M._on_proceed,
        StepFailed: _M._on_failed,  # the caller was cancelled while it waited
        **_ENDS,
    },
    _S.FAILED: {
        Proceed: _M._on_late,
        StepFailed: _M._ignore,
        Reached: _M._ignore,
        **_ENDS,
    },
    _S.PASSED: {},
    _S.ABORTED: {},
}
