"""Performs ``protocol.rounds``: the coordinator's side, and a rank's."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel

from actorsnap.errors import ActorSnapError, RestoreAborted
from actorsnap.protocol.calls import CoordinatorLost, DeadlinePassed, RankLost
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.protocol.rounds import (
    Abort,
    Coordinator,
    CoordinatorEvent,
    CoordinatorGone,
    Decide,
    Decided,
    Decision,
    End,
    Enter,
    FromCoordinator,
    FromRank,
    Interrupted,
    Participant,
    ParticipantEvent,
    Reached,
    Report,
    SendTo,
    WorkFailed,
)
from actorsnap.transport.base import Broken, CoordinatorEnd, Lost, ParticipantEnd

__all__ = ["CoordinatorActor", "Decisions", "ParticipantActor"]

T = TypeVar("T")

_BACKSTOP_S = 10.0
"""Seconds that a rank waits beyond the coordinator's deadline before it ends on its own."""


class Decisions(Protocol):
    """Decides the rounds of one call. Pure."""

    @property
    def stage(self) -> Stage:
        """The work that leads to the next round."""
        ...

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Decision:
        """Decides a round.

        Raises:
            ActorSnapError: The call ends on all ranks with this error.
        """
        ...


def _aborted(reason: str, stage: Stage, rank: int | None) -> Failure:
    error = RestoreAborted(reason=reason, rank=rank, stage=str(stage))
    return Failure.of(error, stage=stage, rank=rank)


class CoordinatorActor:
    """The coordinator of one call.

    Args:
        timeout_s: Seconds from ``run`` until the call is aborted.
    """

    def __init__(
        self,
        *,
        machine: Coordinator,
        end: CoordinatorEnd,
        decisions: Decisions,
        timeout_s: float,
    ) -> None:
        self._machine = machine
        self._end = end
        self._decisions = decisions
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """Returns when the outcome was sent to every rank."""
        deadline = anyio.current_time() + self._timeout_s
        while not self._machine.is_over:
            event: CoordinatorEvent | None = None
            with anyio.CancelScope(deadline=deadline):
                event = await self._next_event()
            await self._handle(event or self._overdue())

    async def _handle(self, event: CoordinatorEvent) -> None:
        commands = deque(self._machine.handle(event))
        while commands:
            match commands.popleft():
                case SendTo(rank, message):
                    await self._end.send(rank, message)
                case Decide() as command:
                    commands += self._machine.handle(Decided(self._decide(command)))

    def _decide(self, command: Decide) -> Decision:
        stage = self._decisions.stage
        try:
            return self._decisions.decide(command.round, command.payloads)
        except ActorSnapError as error:
            return Abort(Failure.of(error, stage=stage))

    async def _next_event(self) -> CoordinatorEvent:
        message = await self._end.receive()
        if isinstance(message, Broken):
            return self._interrupted(message.reason, 0)
        if absence := self._end.absence():
            # The ranks that gave this process up have ended: no round may pass here, either.
            return self._interrupted(absence, 0)
        if isinstance(message, Lost):
            return self._interrupted(RankLost(message.rank, message.silent_s).reason, message.rank)
        assert isinstance(message, FromRank), message
        return message

    def _overdue(self) -> Interrupted:
        awaited = self._machine.awaited
        reason = DeadlinePassed(self._timeout_s).reason(awaited)
        return self._interrupted(reason, awaited[0] if len(awaited) == 1 else None)

    def _interrupted(self, reason: str, rank: int | None) -> Interrupted:
        return Interrupted(_aborted(reason, self._decisions.stage, rank))


class ParticipantActor:
    """A rank of one call. All on one event loop.

    Args:
        timeout_s: The coordinator's.

    Attributes:
        stage: The work that the rank does now.
    """

    def __init__(self, *, machine: Participant, end: ParticipantEnd, timeout_s: float) -> None:
        self.stage = Stage.JOIN
        self._machine = machine
        self._end = end
        self._timeout_s = timeout_s
        self._over = anyio.Event()
        self._proceed = anyio.Event()
        self._payload = b""
        self._failure: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self._machine.is_final

    @property
    def verdict(self) -> ActorSnapError | None:
        """The error that all ranks raise, once it is known. A new one at each call."""
        failure = self._failure
        if failure is None:
            return None
        error = failure.to_error()
        if failure.rank is not None and not isinstance(error, RestoreAborted):
            error.add_note(
                f"actorsnap: it began on rank {failure.rank}, in stage '{failure.stage}'"
            )
        return error

    async def run(self) -> None:
        """Listens until the outcome is known."""
        deadline = anyio.current_time() + self._timeout_s + _BACKSTOP_S
        while not self.is_over:
            event: ParticipantEvent | None = None
            with anyio.CancelScope(deadline=deadline):
                event = await self._next_event()
            await self._handle(event or self._overdue())

    async def arrive(self, payload: bytes = b"", *, then: Stage | None = None) -> bytes:
        """Waits until all ranks have arrived at the next round; returns the decision.

        Args:
            then: The stage of the work that follows; None: as before.

        Raises:
            ActorSnapError: The one that all ranks raise, if that is the outcome.
        Cancellation: The rank still counts as arrived.
        """
        self._proceed = anyio.Event()
        await self._handle(Reached(payload))
        await self._first_of(self._proceed)
        self._check()
        self.stage = then or self.stage
        return self._payload

    async def perform(self, work: Callable[[], Awaitable[T]]) -> T:
        """Awaits ``work()``; cancels it when the outcome is known.

        Raises:
            ActorSnapError: The one that all ranks raise, if that is the outcome.
            Exception: Raised by the work.
        """
        results: list[T] = []

        async def run() -> None:
            results.append(await work())
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await self._over.wait()
            tasks.cancel_scope.cancel()
        self._check()
        if not results:
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise RuntimeError("the work ended without a result or an error")
        return results.pop()

    async def fail(self, failure: Failure) -> None:
        """Reports that this rank cannot go on, and waits for the outcome."""
        await self._handle(WorkFailed(failure))
        await self._over.wait()

    def abandon(self, reason: str) -> None:
        """Ends the call on this rank now; does nothing if the outcome is known."""
        for command in self._machine.handle(self._gone(reason, None)):
            assert isinstance(command, End)
            self._end_with(command)
        self._over.set()

    async def _first_of(self, event: anyio.Event) -> None:
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait)
            await self._over.wait()
            tasks.cancel_scope.cancel()

    def _check(self) -> None:
        verdict = self.verdict
        if verdict is not None:
            raise verdict

    async def _next_event(self) -> ParticipantEvent:
        message = await self._end.receive()
        if isinstance(message, Lost):
            lost = CoordinatorLost.silent(message.rank, message.silent_s)
            return self._gone(lost.reason, lost.rank)
        if isinstance(message, Broken):
            return self._gone(message.reason, None)
        assert isinstance(message, FromCoordinator), message
        return message

    def _overdue(self) -> CoordinatorGone:
        return self._gone(
            f"timeout_s={self._timeout_s:g} is over, and rank 0, which coordinates, does not "
            "answer",
            0,
        )

    def _gone(self, reason: str, rank: int | None) -> CoordinatorGone:
        return CoordinatorGone(_aborted(reason, self.stage, rank))

    async def _handle(self, event: ParticipantEvent) -> None:
        for command in self._machine.handle(event):
            match command:
                case Report(message):
                    await self._end.send(message)
                case Enter(payload):
                    self._payload = payload
                    self._proceed.set()
                case End():
                    self._end_with(command)

    def _end_with(self, end: End) -> None:
        self._failure = end.failure
        self._payload = end.payload
        self._over.set()
