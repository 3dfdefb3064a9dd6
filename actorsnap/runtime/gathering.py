"""Calls that all ranks make together, as scripts (see ``runtime.taking``).

The body of such a call goes through numbered steps (``protocol.gathering``). Whatever it raises
on one rank ends it on all ranks, with the same error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias, TypeVar

import anyio

from actorsnap.actors.gathering import GatheringActor, MemberActor
from actorsnap.errors import (
    ActorSnapError,
    RestoreAborted,
    describe,
)
from actorsnap.lines import Lines
from actorsnap.options import Options
from actorsnap.protocol.gathering import Decide, GatheringMachine, MemberMachine
from actorsnap.protocol.labels import Label
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.ranks import Team

__all__ = ["Alone", "Steps", "go_through"]

logger = Lines(__name__)

T = TypeVar("T")


Arrive: TypeAlias = Callable[[], Awaitable[bytes]]
Step: TypeAlias = Callable[[Host, Arrive], Awaitable[T]]


class Steps(Protocol):
    """A rank's way through the steps.

    Attributes:
        team: None where there is but one rank.
        rank: Of this process in its group.
        scope: See ``transport.store.StoreSave``; behind the first step.
    """

    @property
    def team(self) -> Team | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def scope(self) -> str: ...

    def arrive(self, payload: bytes = b"") -> Script[bytes]:
        """Waits until all ranks have arrived; returns what was decided."""
        ...

    def perform(self, step: Step[T]) -> Script[T]:
        """Runs work on the runtime's loop; cancels it when another rank has failed. The work may
        ``arrive`` itself."""
        ...


def go_through(
    team: Team | None,
    label: Label,
    options: Options,
    decide: Decide,
    body: Callable[[Steps], Script[T]],
) -> Script[T]:
    """Runs ``body``, on all ranks of ``team`` together; ``label`` is the same on all.

    It ends with the body on all ranks, or with the same error on all: by ``timeout_s``, and
    soon after one has failed, or was not heard for ``lost_after_s``. On the rank where that
    began the error has what was raised there as its cause, or is that.
    """
    if team is None:
        return (yield from body(Alone(decide)))
    together = Together(team, label, options, decide)
    try:
        return (yield from body(together))
    except Exception as error:
        yield from together.fail(error)
        raise
    finally:
        together.close()


class Alone:
    """The steps of a call that one rank makes, or would make if there were others."""

    team = None
    scope = ""

    def __init__(self, decide: Decide, *, rank: int = 0) -> None:
        self.rank = rank
        self._decide = decide
        self._step = 0

    def arrive(self, payload: bytes = b"") -> Script[bytes]:
        yield from ()
        return self._decided(payload)

    def perform(self, step: Step[T]) -> Script[T]:
        async def arrive() -> bytes:
            return self._decided(b"")

        async def run(host: Host) -> T:
            return await step(host, arrive)

        result: T = yield run
        return result

    def _decided(self, payload: bytes) -> bytes:
        decision = self._decide(self._step, [payload])
        self._step += 1
        return decision.payload


class Together:
    """This process' part in a call of its team. Takes the next number of the team."""

    def __init__(self, team: Team, label: Label, options: Options, decide: Decide) -> None:
        self.team = team
        self.rank = team.rank
        self._host = Host.get()
        self._call = team.begin(label, options)
        self.member = MemberActor(
            machine=MemberMachine(rank=team.rank),
            end=self._call.participant,
            timeout_s=options.timeout_s,
        )
        self._coordinator: GatheringActor | None = None
        if self._call.coordinator is not None:
            self._coordinator = GatheringActor(
                machine=GatheringMachine(world_size=team.world_size, decide=decide),
                end=self._call.coordinator,
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
                await self.member.run()
        except Exception:
            logger.exception("rank %d: a defect while ranks pass steps together", self.rank)
            raise
        finally:
            self.member.abandon("the runtime was stopped")
            self._call.close()

    def arrive(self, payload: bytes = b"") -> Script[bytes]:
        decided: bytes = yield lambda _: self.member.arrive(payload)
        return decided

    def perform(self, step: Step[T]) -> Script[T]:
        result: T = yield lambda host: self.member.perform(lambda: step(host, self.member.arrive))
        return result

    def fail(self, error: Exception) -> Script[None]:
        """Tells the others that this rank cannot go on.

        Raises:
            ActorSnapError: what all ranks raise, unless that is ``error`` itself.
        """
        was_over = self.member.is_over
        if not was_over:
            yield lambda _: self.member.fail(self._failure_of(error))
        verdict = self.member.verdict
        is_same = isinstance(error, ActorSnapError) and _is_same(error, verdict)
        if verdict is None or (is_same and not was_over):
            return
        # What began elsewhere came here by a step, as a copy without the note that says where.
        raise verdict from None if is_same else error

    def close(self) -> None:
        """Takes leave if the outcome is not known: the caller was interrupted."""
        if not self.member.is_over:
            interrupted = RestoreAborted(
                reason="the caller was interrupted", rank=self.rank, stage=str(Stage.CANCEL)
            )
            failure = Failure.of(interrupted, stage=Stage.CANCEL, rank=self.rank)
            self._host.submit(self.member.fail(failure))

    def _failure_of(self, error: Exception) -> Failure:
        rank, stage = self.rank, self.member.stage
        if not isinstance(error, ActorSnapError):
            error = RestoreAborted(reason=describe(error), rank=rank, stage=str(stage))
        return Failure.of(error, stage=stage, rank=rank)


def _is_same(error: ActorSnapError, other: ActorSnapError | None) -> bool:
    return type(error) is type(other) and other is not None and error.fields == other.fields
