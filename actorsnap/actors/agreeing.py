# SPDX-License-Identifier: Apache-2.0
"""Performs one agreement (``protocol.agreement``) on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import anyio
import msgspec

from actorsnap.actors.rounds import CoordinatorActor, ParticipantActor
from actorsnap.errors import ActorSnapError
from actorsnap.protocol.agreement import Agreed, Calls, Entered
from actorsnap.protocol.failure import Failure, Stage, save_aborted
from actorsnap.protocol.rounds import Continue, Coordinator, Participant
from actorsnap.transport.ends import RelayedEnds
from actorsnap.wording import named_ranks

_BACKSTOP_S = 4.0
"""Extra time that a rank holds its call beyond rank 0's bound."""


Decide: TypeAlias = Callable[[Mapping[int, Entered]], Agreed | Failure]


class InvitedEnds(Protocol):
    """See ``transport.invitations.InvitedCall``."""

    number: int
    bound_s: float
    rank: int
    world_size: int
    ends: RelayedEnds


class Agreement:
    """One agreement on one rank.

    Args:
        decide: On rank 0: returns the decision on all ranks' counts.
        on_answer: Called with the answer before the rank goes on.
        limit: Name of the call's bound, for people.
    """

    def __init__(
        self,
        call: InvitedEnds,
        calls: Calls,
        decide: Decide | None = None,
        on_answer: Callable[[Agreed | Failure], None] = lambda _: None,
        limit: str = "Options.lost_after_s",
    ) -> None:
        self._call = call
        self._calls = calls
        self._decide = decide
        self._on_answer = on_answer
        self._limit = limit
        self._released = anyio.Event()

    async def run(self) -> Agreed | Failure:
        """Returns the answer, which ``calls`` then has.

        A rank that rank 0 leaves without an answer passes its calls after the bound, and still
        takes the answer if it comes.
        """
        call = self._call
        participant = ParticipantActor(
            machine=Participant(rank=call.rank),
            end=call.ends.participant,
            aborted=save_aborted,
            timeout_s=math.inf,
        )
        answer: Agreed | Failure
        try:
            async with anyio.create_task_group() as coordinating:
                if self._decide is not None:
                    coordinating.start_soon(self._coordinate, self._decide)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(participant.run)
                    tasks.start_soon(self._release_late)
                    arrived = msgspec.msgpack.encode(self._calls.hold(call.number))
                    try:
                        payload = await participant.arrive(arrived)
                    except ActorSnapError:
                        assert participant.outcome is not None
                        assert participant.outcome.failure is not None
                        answer = participant.outcome.failure
                    else:
                        answer = msgspec.msgpack.decode(payload, type=Agreed)
                        self._calls.agree(answer)
                    self._on_answer(answer)
                    self._release()
                    tasks.cancel_scope.cancel()
        finally:
            self._release()
        return answer

    async def released(self) -> None:
        """Waits until the call that holds may pass."""
        await self._released.wait()

    async def _coordinate(
        self, decide: Callable[[Mapping[int, Entered]], Agreed | Failure]
    ) -> None:
        end = self._call.ends.coordinator
        assert end is not None
        await CoordinatorActor(
            machine=Coordinator(world_size=self._call.world_size),
            end=end,
            decisions=_Decisions(decide),
            aborted=save_aborted,
            timeout_s=self._call.bound_s,
            overdue=lambda ranks: explain_late(named_ranks(ranks), self._call.bound_s, self._limit),
        ).run()

    async def _release_late(self) -> None:
        await anyio.sleep(self._call.bound_s + _BACKSTOP_S)
        self._release()

    def _release(self) -> None:
        self._calls.release(self._call.number)
        self._released.set()


def explain_late(who: str, bound_s: float, limit: str) -> str:
    return f"{who} did not answer within {bound_s:g} s ({limit})"


class _Decisions:
    stage = Stage.JOIN

    def __init__(self, decide: Decide) -> None:
        self._decide = decide

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Continue | Failure:
        decision = self._decide(
            {
                rank: msgspec.msgpack.decode(payload, type=Entered)
                for rank, payload in payloads.items()
            }
        )
        if isinstance(decision, Failure):
            return decision
        return Continue(common=msgspec.msgpack.encode(decision), is_last=True)
