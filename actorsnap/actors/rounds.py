# SPDX-License-Identifier: Apache-2.0
"""Performs ``protocol.rounds`` for the coordinator and for a rank."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from actorsnap.errors import ActorSnapError, RestoreAborted, UsageError
from actorsnap.protocol.failure import Failure, Stage, explain_coordinator_loss, explain_loss
from actorsnap.protocol.messages import Arrived, Ask, Failed, Proceed
from actorsnap.protocol.rounds import (
    Continue,
    Coordinator,
    CoordinatorEvent,
    CoordinatorState,
    Decide,
    Decision,
    End,
    FromRank,
    Hurry,
    Lost,
    Overdue,
    Participant,
    ParticipantEvent,
    Reached,
    SendTo,
    TakenOver,
    ToRank,
)
from actorsnap.transport.ends import Broken, CoordinatorEnd, ParticipantEnd, PeerLost
from actorsnap.wording import named_ranks

T = TypeVar("T")

_BACKSTOP_S = 4.0
"""Extra wait of a rank beyond the coordinator's deadline."""

_COMMIT_BACKSTOP_S = 20.0
"""Additional wait in the commit round: the coordinator may look for its commit."""


MakeFailure: TypeAlias = Callable[[str, Stage, int | None], Failure]
"""Makes a failure from the reason, the stage and the rank concerned."""


class Decisions(Protocol):
    """Decides the rounds of one call. Pure."""

    @property
    def stage(self) -> Stage: ...

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Decision:
        """Decides any round but the commit round.

        Raises:
            ActorSnapError: Ends the call on all ranks.
        """
        ...


class Committer(Protocol):
    async def commit(self, payloads: Mapping[int, bytes]) -> Failure | None:
        """Raises for defects only."""
        ...

    def end_soon(self, reason: str, *, has_grace: bool) -> None:
        """Asks ``commit`` to return soon."""
        ...


class CoordinatorActor:
    """The coordinator of one call.

    Args:
        deadline: The loop's time; None: ``timeout_s`` after the start of ``run``.
        committer: For a call with a commit round.
        trouble: Returns the last storage error, for the message at the deadline.
        overdue: Makes the whole message from the awaited ranks, if the limit is not ``timeout_s``.
    """

    def __init__(
        self,
        *,
        machine: Coordinator,
        end: CoordinatorEnd,
        decisions: Decisions,
        aborted: MakeFailure,
        timeout_s: float,
        deadline: float | None = None,
        committer: Committer | None = None,
        trouble: Callable[[], str] = str,
        overdue: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._machine = machine
        self._end = end
        self._decisions = decisions
        self._aborted = aborted
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._committer = committer
        self._trouble = trouble
        self._explain_overdue = overdue or self._explain_timeout
        # Two tasks handle events. The end of the call cancels both, but not between the messages
        # of a verdict: the other ranks would wait for theirs.
        self._handling = anyio.Lock(fast_acquire=True)
        self._over = anyio.Event()
        self._tasks: anyio.abc.TaskGroup

    async def run(self) -> None:
        """Returns when the outcome was sent to every rank."""
        if self._deadline is None:
            self._deadline = anyio.current_time() + self._timeout_s
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._listen, self._deadline)
            await self._over.wait()
            self._tasks.cancel_scope.cancel()

    async def _listen(self, deadline: float) -> None:
        while True:
            event: CoordinatorEvent | None = None
            with anyio.CancelScope(deadline=deadline):
                event = await self._next_event()
            if event is None:
                event, deadline = self._overdue(), math.inf
            await self._handle(event)

    async def _handle(self, event: CoordinatorEvent) -> None:
        async with self._handling:
            await self._handle_alone(event)

    async def _handle_alone(self, event: CoordinatorEvent) -> None:
        commands = deque(self._machine.handle(event))
        while commands:
            match commands.popleft():
                case SendTo(rank, message):
                    await self._end.send(rank, message)
                case Decide(commits=True) as command:
                    self._tasks.start_soon(self._commit, command.payloads)
                case Decide() as command:
                    commands += self._machine.handle(self._decide(command))
                case Hurry(failure, has_grace):
                    assert self._committer is not None
                    self._committer.end_soon(failure.reason, has_grace=has_grace)
        if self._machine.is_over:
            self._over.set()

    def _decide(self, command: Decide) -> Decision:
        try:
            return self._decisions.decide(command.round, command.payloads)
        except ActorSnapError as error:
            return Failure.of(error, stage=self._decisions.stage)

    async def _commit(self, payloads: Mapping[int, bytes]) -> None:
        assert self._committer is not None
        failure = await self._committer.commit(payloads)
        await self._handle(failure or Continue(is_last=True))

    async def _next_event(self) -> CoordinatorEvent:
        message = await self._end.receive()
        if isinstance(message, Broken):
            return Failed(0, self._failure(message.reason, 0))
        if self._committer is None and (suspicion := await self._end.suspicion()):
            # Ranks that gave this process up have ended: no round may pass. A committer checks this
            # itself, right before it commits.
            return Failed(0, self._failure(suspicion, 0))
        if isinstance(message, PeerLost):
            return Lost(await self._explain_lost(message))
        assert isinstance(message, FromRank | TakenOver), message
        return message

    async def _explain_lost(self, lost: PeerLost) -> Failure:
        """Names rank 0, not the lost rank, if that may have given rank 0 up."""
        # While it commits, a lost rank changes nothing, and the committer asks for suspicions.
        is_committing = self._machine.state is CoordinatorState.COMMITTING
        if not is_committing and (suspicion := await self._end.suspicion()):
            return self._failure(suspicion, 0)
        return self._failure(explain_loss(lost.rank, lost.silent_s), lost.rank)

    def _overdue(self) -> Overdue:
        awaited = self._machine.awaited
        reason = self._explain_overdue(awaited)
        return Overdue(self._failure(reason, awaited[0] if len(awaited) == 1 else None))

    def _explain_timeout(self, awaited: Sequence[int]) -> str:
        trouble = self._trouble()
        reason = f"timeout_s={self._timeout_s:g} has passed" + (f"; {trouble}" if trouble else "")
        if awaited:
            advice = "Raise Options.timeout_s if the storage is that slow"
            if self._committer is not None and self._decisions.stage is Stage.JOIN:
                advice = (
                    "A state_dict() call there has not ended, or the process is stopped: check "
                    "the log, or raise Options.timeout_s"
                )
            reason += f"; still waiting for {named_ranks(awaited)}. {advice}"
        return reason

    def _failure(self, reason: str, rank: int | None) -> Failure:
        return self._aborted(reason, self._decisions.stage, rank)


class ParticipantActor:
    """A rank of one call.


    Attributes:
        outcome: None until it is known.
    """

    def __init__(
        self, *, machine: Participant, end: ParticipantEnd, aborted: MakeFailure, timeout_s: float
    ) -> None:
        self.stage = Stage.JOIN
        self.outcome: End | None = None
        self._machine = machine
        self._end = end
        self._aborted = aborted
        self._timeout_s = timeout_s
        self._over = anyio.Event()
        self._proceed = anyio.Event()
        self._payload = b""
        self._then = self.stage
        self._deadline = math.inf
        self._patience: anyio.CancelScope | None = None
        self._answer: Callable[[bytes], bytes] = _no_answer

    @property
    def is_over(self) -> bool:
        return self._machine.is_final

    @property
    def verdict(self) -> ActorSnapError | None:
        """A new error of the failed call, the same on all ranks."""
        failure = None if self.outcome is None else self.outcome.failure
        if failure is None:
            return None
        error = failure.to_error(names_rank=True)
        if failure.rank is not None and not isinstance(error, RestoreAborted | UsageError):
            error.add_note(
                f"actorsnap: rank {failure.rank} was the first to fail, in stage '{failure.stage}'"
            )
        return error

    async def run(self) -> None:
        self._deadline = anyio.current_time() + self._timeout_s + _BACKSTOP_S
        while not self.is_over:
            event: ParticipantEvent | None = None
            with anyio.CancelScope(deadline=self._deadline) as self._patience:
                event = await self._next_event()
            await self._handle(event or self._overdue())

    async def arrive(
        self,
        payload: bytes = b"",
        *,
        then: Stage | None = None,
        commits: bool = False,
        answer: Callable[[bytes], bytes] | None = None,
    ) -> bytes:
        """Waits until all ranks have arrived at the next round; returns the decision.

        Args:
            then: Stage of the following work; None: unchanged.
            commits: This is the commit round.

        Raises:
            ActorSnapError: The call has failed; the same on all ranks.
        Cancellation: The rank still counts as arrived.
        """
        self._proceed = anyio.Event()
        if self.is_over:
            self._proceed.set()
        self._answer = answer or _no_answer
        self._then = then or self.stage
        if commits:
            self._deadline += _COMMIT_BACKSTOP_S
            if self._patience is not None:
                self._patience.deadline = self._deadline
        await self._handle(Reached(payload, commits))
        await self._proceed.wait()
        self._check()
        return self._payload

    async def perform(self, work: Callable[[], Awaitable[T]]) -> T:
        """Awaits ``work()``; cancels it when the outcome is known.

        Raises:
            ActorSnapError: The call has failed; the same on all ranks.
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
        """Reports a failure of this rank; waits for the outcome."""
        await self._handle(Failed(self._machine.rank, failure))
        await self._over.wait()

    async def wait(self) -> End:
        await self._over.wait()
        assert self.outcome is not None
        return self.outcome

    def abandon(self, failure: Failure) -> None:
        """Ends the call on this rank now, unless the outcome is known."""
        for command in self._machine.handle(Lost(failure)):
            assert isinstance(command, End)
            self._finish(command)

    def _check(self) -> None:
        verdict = self.verdict
        if verdict is not None:
            raise verdict

    async def _next_event(self) -> ParticipantEvent:
        message = await self._end.receive()
        if isinstance(message, PeerLost):
            return self._lost(explain_coordinator_loss(message.silent_s), message.rank)
        if isinstance(message, Broken):
            return self._lost(message.reason, None)
        assert isinstance(message, ToRank | TakenOver), message
        return message

    def _overdue(self) -> Lost:
        return self._lost(
            f"timeout_s={self._timeout_s:g} has passed, and rank 0, the coordinator, does not "
            "answer",
            0,
        )

    def _lost(self, reason: str, rank: int | None) -> Lost:
        return Lost(self._aborted(reason, self.stage, rank))

    async def _handle(self, event: ParticipantEvent) -> None:
        commands = deque(self._machine.handle(event))
        while commands:
            match commands.popleft():
                case Arrived() | Failed() as message:
                    await self._end.send(message)
                case Ask(payload=question):
                    commands += self._machine.handle(Reached(self._answer(question)))
                case Proceed(payload=payload):
                    self.stage, self._payload = self._then, payload
                    self._proceed.set()
                case End() as end:
                    self._finish(end)

    def _finish(self, end: End) -> None:
        self.outcome = end
        self._payload = end.payload
        self._proceed.set()
        self._over.set()


def _no_answer(question: bytes) -> bytes:
    raise AssertionError("no question is expected in this round")
