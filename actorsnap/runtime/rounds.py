# SPDX-License-Identifier: Apache-2.0
"""Calls that ranks make together, in rounds (``protocol.rounds``)."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

import anyio
import msgspec

from actorsnap.actors.rounds import CoordinatorActor, Decisions, ParticipantActor
from actorsnap.errors import ActorSnapError, NotASnapshot, UsageError, describe, is_same
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.protocol.failure import Failure, Stage, restore_aborted, save_aborted
from actorsnap.protocol.messages import Label
from actorsnap.protocol.rounds import Continue, Coordinator, Participant
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.team import Team

logger = Log(__name__)

T = TypeVar("T")


Arrive: TypeAlias = Callable[[], Awaitable[bytes]]
Work: TypeAlias = Callable[[Host, Arrive], Awaitable[T]]


class Rounds(Protocol):
    """A rank's side of a call.

    Attributes:
        team: None for a single rank.
        scope: See ``transport.store.StoreSave``; not before the first round.
    """

    @property
    def team(self) -> Team | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def scope(self) -> str: ...

    def arrive(self, payload: bytes = b"", *, then: Stage | None = None) -> Script[bytes]:
        """See ``actors.rounds.ParticipantActor``."""
        ...

    def perform(self, work: Work[T]) -> Script[T]:
        """Runs work on the loop; cancels it if another rank fails."""
        ...


def call_together(
    team: Team | None,
    label: Label,
    options: Options,
    decisions: Decisions,
    body: Callable[[Rounds], Script[T]],
    *,
    topic: Topic | None = None,
    joins_promptly: bool = False,
) -> Script[T]:
    """Runs ``body`` on all ranks of ``team``; ``label`` must be equal.

    All ranks end alike, or with the same error: after ``timeout_s``, and soon after a rank failed,
    left the ``topic`` or was silent for ``lost_after_s``. On the failed rank, the error is the
    original or caused by it.

    Args:
        joins_promptly: See ``Team.begin``.
    """
    if team is None:
        return (yield from body(Alone(decisions)))
    name = b"" if topic is None else topic.name
    together = Together(team, label, options, decisions, name, joins_promptly)
    try:
        result = yield from body(together)
        if topic is not None:
            topic.note(team, together.scope)
        return result
    except Exception as error:
        yield from together.fail(error)
        raise
    finally:
        together.close()


def announce(
    team: Team | None,
    label: Label,
    options: Options,
    work: Callable[[], Script[Any]],
    refusal: Exception | None = None,
    *,
    topic: Topic | None = None,
) -> Script[Any]:
    """Runs ``work`` on rank 0; returns its result, of msgpack's types, on all ranks, or its error.

    A call of one round.

    Args:
        refusal: Raised on all ranks instead: the others must not wait for this one.
        topic: See ``call_together``.
    """

    def body(rounds: Rounds) -> Script[Any]:
        if refusal is not None:
            raise refusal
        payload = b""
        if rounds.rank == 0:
            payload = msgspec.msgpack.encode((yield from work()))
        return msgspec.msgpack.decode((yield from rounds.arrive(payload)))

    return (yield from call_together(team, label, options, _Announcement(), body, topic=topic))


def fail_next(team: Team, options: Options, failure: Failure) -> None:
    """Fails the next call of the ranks, in which this one takes no part. From any thread.

    Does not wait.
    """
    Together(team, None, options, _Announcement()).close(failure)


class Topic:
    """A subject of several calls, such as one manager on all ranks.

    The first call that succeeds names it: only then is it known what belongs together.
    """

    def __init__(self) -> None:
        self.name = b""
        self._team: Team | None = None

    def note(self, team: Team, scope: str) -> None:
        if team is not self._team:
            self._team = team
            self.name = hashlib.blake2b(scope.encode(), digest_size=8).digest()

    def leave(self, how: str) -> None:
        """Makes later calls of the other ranks fail; ``how`` is the reason. Does not wait."""
        if self._team is not None:
            self._team.leave(self.name, how)


class _Announcement:
    """Sends rank 0's payload to all."""

    stage = Stage.JOIN

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Continue:
        return Continue(common=payloads[0], is_last=True)


class Alone:
    """The rounds of a single rank."""

    team = None
    scope = ""

    def __init__(self, decisions: Decisions, *, rank: int = 0) -> None:
        self.rank = rank
        self._decisions = decisions
        self._round = 0

    def arrive(self, payload: bytes = b"", *, then: Stage | None = None) -> Script[bytes]:
        yield from ()
        return self._decide(payload)

    def perform(self, work: Work[T]) -> Script[T]:
        async def arrive() -> bytes:
            return self._decide(b"")

        async def run(host: Host) -> T:
            return await work(host, arrive)

        result: T = yield run
        return result

    def _decide(self, payload: bytes) -> bytes:
        decision = self._decisions.decide(self._round, {0: payload})
        assert isinstance(decision, Continue)
        self._round += 1
        return decision.payloads.get(0, decision.common)


class Together:
    """This process' part in the next call of its team.

    Args:
        label: None: the call must fail.
        topic, joins_promptly: See ``Team.begin``.
    """

    def __init__(
        self,
        team: Team,
        label: Label | None,
        options: Options,
        decisions: Decisions,
        topic: bytes = b"",
        joins_promptly: bool = False,
    ) -> None:
        self.team = team
        self.rank = team.rank
        self._host = Host.get()
        self._aborted = restore_aborted if label and not label.kind.is_save else save_aborted
        self._call = team.begin(label, options, topic=topic, joins_promptly=joins_promptly)
        self._participant = ParticipantActor(
            machine=Participant(rank=team.rank),
            end=self._call.participant,
            aborted=self._aborted,
            timeout_s=options.timeout_s,
        )
        self._coordinator: CoordinatorActor | None = None
        if self._call.coordinator is not None:
            self._coordinator = CoordinatorActor(
                machine=Coordinator(world_size=team.world_size),
                end=self._call.coordinator,
                decisions=decisions,
                aborted=self._aborted,
                timeout_s=options.timeout_s,
            )
        self._host.submit(self._run())

    @property
    def scope(self) -> str:
        return self._call.scope

    async def _run(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                if self._coordinator is not None:
                    tasks.start_soon(self._coordinator.run)
                await self._participant.run()
        except Exception:
            logger.exception("rank %d: a defect in the rounds of a call", self.rank)
            raise
        finally:
            stage = self._participant.stage
            self._participant.abandon(self._aborted("the runtime was stopped", stage, None))
            self._call.close()

    def arrive(self, payload: bytes = b"", *, then: Stage | None = None) -> Script[bytes]:
        decided: bytes = yield lambda _: self._participant.arrive(payload, then=then)
        return decided

    def perform(self, work: Work[T]) -> Script[T]:
        participant = self._participant
        result: T = yield lambda host: participant.perform(lambda: work(host, participant.arrive))
        return result

    def fail(self, error: Exception) -> Script[None]:
        """Reports this rank's failure to the others.

        Raises:
            ActorSnapError: The common error, unless it is ``error``.
        """
        participant = self._participant
        was_over = participant.is_over
        if not was_over:
            yield lambda _: participant.fail(self._failure_of(error))
        verdict = participant.verdict
        if verdict is not None and isinstance(error, UsageError):
            named = self._failure_of(error).to_error(names_rank=True)
            if is_same(named, verdict):
                raise verdict.with_traceback(error.__traceback__) from error.__cause__
        is_own = is_same(error, verdict)
        # Each rank looks for the snapshot itself: the first to miss it is as good as any.
        has_looked = isinstance(error, NotASnapshot)
        if verdict is None or (is_own and (has_looked or not was_over)):
            return
        # Another rank's error arrives as a copy, without its note.
        raise verdict from verdict.__cause__ if is_own else error

    def close(self, failure: Failure | None = None) -> None:
        """Reports ``failure``, or an interrupted caller, unless the call is over."""
        if not self._participant.is_over:
            interrupted = self._aborted("the caller was interrupted", Stage.CANCEL, self.rank)
            self._host.submit(self._participant.fail(failure or interrupted))

    def _failure_of(self, error: Exception) -> Failure:
        rank, stage = self.rank, self._participant.stage
        if not isinstance(error, ActorSnapError):
            return self._aborted(describe(error), stage, rank, error)
        return Failure.of(error, stage=stage, rank=rank)
