"""Performs ``protocol.gathering``: the coordinator's side, and a rank's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.lowlevel

from actorsnap.errors import ActorSnapError, RestoreAborted
from actorsnap.protocol.calls import CoordinatorLost, DeadlinePassed, RankLost, Send, StepFailed
from actorsnap.protocol.gathering import (
    GatheringEvent,
    GatheringMachine,
    MemberEvent,
    MemberMachine,
    Pass,
    Reached,
)
from actorsnap.protocol.messages import Failed, Failure, Stage, ToCoordinator
from actorsnap.transport.base import Broken, CoordinatorEnd, Lost, ParticipantEnd

__all__ = ["GatheringActor", "MemberActor"]

T = TypeVar("T")

_BACKSTOP_S = 10.0
"""So much later than the coordinator a rank looks at the clock: mostly it is told in time."""


class GatheringActor:
    """The coordinator of one gathering.

    Args:
        timeout_s: Seconds from ``run`` until it is aborted.
    """

    def __init__(self, *, machine: GatheringMachine, end: CoordinatorEnd, timeout_s: float) -> None:
        self._machine = machine
        self._end = end
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """Returns when every rank has been told the outcome."""
        deadline = anyio.current_time() + self._timeout_s
        while not self._machine.is_final:
            event: GatheringEvent = DeadlinePassed(self._timeout_s)
            with anyio.CancelScope(deadline=deadline):
                event = await self._next_event()
            for command in self._machine.handle(event):
                await self._end.send(command.rank, command.message)

    async def _next_event(self) -> ToCoordinator | RankLost:
        message = await self._end.receive()
        if isinstance(message, Broken):
            return self._failed(message.reason)
        if absence := self._end.absence():
            # Who has given this process up has ended: here, too, nothing may pass any more.
            return self._failed(absence)
        if isinstance(message, Lost):
            return RankLost(message.rank, message.silent_s)
        return message

    def _failed(self, reason: str) -> Failed:
        stage = self._machine.stage
        error = RestoreAborted(reason=reason, rank=0, stage=str(stage))
        return Failed(0, Failure.of(error, stage=stage, rank=0))


class MemberActor:
    """A rank of one gathering. All on one event loop.

    Args:
        timeout_s: The coordinator's.
    """

    def __init__(self, *, machine: MemberMachine, end: ParticipantEnd, timeout_s: float) -> None:
        self._machine = machine
        self._end = end
        self._timeout_s = timeout_s
        self._over = anyio.Event()
        self._proceed = anyio.Event()
        self._payload = b""

    @property
    def stage(self) -> Stage:
        """Of the work that the rank does now."""
        return self._machine.stage

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self._machine.is_final

    @property
    def verdict(self) -> ActorSnapError | None:
        """What all ranks raise, once it is known. A new one at each call."""
        failure = self._machine.failure
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
        while not self._machine.is_final:
            event: MemberEvent = DeadlinePassed(self._timeout_s)
            with anyio.CancelScope(deadline=deadline):
                event = await self._next_event()
            await self._handle(event)

    async def arrive(self, payload: bytes = b"") -> bytes:
        """Waits until all ranks have arrived at the next step; returns what was decided.

        Raises:
            ActorSnapError: what all ranks raise, if that is the outcome.
        Cancellation: the rank still counts as arrived.
        """
        self._proceed = anyio.Event()
        await self._handle(Reached(payload))
        await self._first_of(self._proceed)
        self._check()
        return self._payload

    async def perform(self, step: Callable[[], Awaitable[T]]) -> T:
        """Awaits ``step()``; cancels it when the outcome is known.

        Raises:
            ActorSnapError: what all ranks raise, if that is the outcome.
            Exception: what the step raises.
        """
        results: list[T] = []

        async def work() -> None:
            results.append(await step())
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await self._over.wait()
            tasks.cancel_scope.cancel()
        self._check()
        if not results:
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise RuntimeError("a step ended without a result or an error")
        return results.pop()

    async def fail(self, failure: Failure) -> None:
        """Tells that this rank cannot go on, and waits for the outcome."""
        await self._handle(StepFailed(failure))
        await self._over.wait()

    def abandon(self, reason: str) -> None:
        """Ends it here and now; does nothing where the outcome is known."""
        self._machine.handle(CoordinatorLost(reason))
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

    async def _next_event(self) -> MemberEvent:
        message = await self._end.receive()
        if isinstance(message, Lost):
            return CoordinatorLost.silent(message.rank, message.silent_s)
        if isinstance(message, Broken):
            return CoordinatorLost(message.reason)
        return message

    async def _handle(self, event: MemberEvent) -> None:
        for command in self._machine.handle(event):
            match command:
                case Send():
                    await self._end.send(command.message)
                case Pass():
                    self._payload = command.payload
                    self._proceed.set()
                case _:
                    self._over.set()
