"""The actor of a trainer's line to the others of its team: see ``protocol.line``, which decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable
from typing import Protocol

import anyio
import anyio.abc

from actorsnap.lines import Lines
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
from actorsnap.protocol.failure import Failure
from actorsnap.protocol.line import EndInProcess, HandOver, LineEvent, LineMachine, SaveHere
from actorsnap.protocol.messages import (
    Arrived,
    Failed,
    FromCoordinator,
    Handed,
    SaveInTrainers,
    ToCoordinator,
    unlike_processes,
)
from actorsnap.transport.base import Broken, CoordinatorEnd, Lost, ParticipantEnd

__all__ = ["LineActor", "LineWork"]

logger = Lines(__name__)


class LineWork(Protocol):
    """What a line has done."""

    def hand_over(self, name: str) -> None:
        """See ``HandOver``."""
        ...

    def end_in_process(self, failure: Failure) -> None:
        """See ``EndInProcess``."""
        ...

    def save_here(self) -> None:
        """See ``SaveHere``: the ends are the save's that is made here."""
        ...

    def look_for_commit(self) -> Awaitable[bool | None]:
        """See ``LookForCommit``; None if the storage does not tell. Raises nothing."""
        ...


class LineActor:
    """One trainer's, in one save. Used on the runtime's loop only.

    Args:
        machine: Fresh.
        ends: The transport's end of this rank, and on rank 0 the coordinator's.
        work: Performs what has to do with the process.
        timeout_s: The caller's, for people.
        left_s: Seconds until the line ends where no process has its plan.
    """

    def __init__(
        self,
        *,
        machine: LineMachine,
        ends: tuple[ParticipantEnd, CoordinatorEnd | None],
        work: LineWork,
        timeout_s: float,
        left_s: float,
    ) -> None:
        self._machine = machine
        self._participant, self._coordinator = ends
        self._work = work
        self._timeout_s = timeout_s
        self._left_s = left_s
        self._events: deque[LineEvent] = deque()
        self._has_events = anyio.Event()
        self._stays = anyio.Event()

    def post(self, event: LineEvent) -> None:
        """Tells it what has happened; never waits."""
        self._events.append(event)
        self._has_events.set()

    async def run(self) -> Failure | None:
        """Returns the outcome: None if committed, or if the save is made here; else why not."""
        machine = self._machine
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._receive)
            tasks.start_soon(self._await_deadline)
            commands = machine.begin()
            failure: Failure | None = None
            while True:
                for command in commands:
                    match command:
                        case Send():
                            await self._participant.send(command.message)
                        case SendToRank():
                            assert self._coordinator is not None
                            await self._coordinator.send(command.rank, command.message)
                        case HandOver():
                            self._work.hand_over(command.name)
                        case EndInProcess():
                            self._work.end_in_process(command.failure)
                        case LookForCommit():
                            tasks.start_soon(self._look)
                        case SaveHere():
                            self._work.save_here()
                        case Finish():
                            failure = command.failure
                if machine.is_final:
                    break
                event = await self._next()
                commands = machine.handle(event)
                if isinstance(event, SaveInTrainers) and not machine.is_final:
                    self._stays.set()
            tasks.cancel_scope.cancel()
        return failure

    async def _next(self) -> LineEvent:
        while not self._events:
            self._has_events = anyio.Event()
            await self._has_events.wait()
        return self._events.popleft()

    async def _receive(self) -> None:
        end = self._participant if self._coordinator is None else self._coordinator
        while True:
            match await end.receive():
                case Lost() as lost if self._coordinator is None:
                    self.post(CoordinatorLost.silent(lost.rank, lost.silent_s))
                case Lost() as lost:
                    self.post(RankLost(lost.rank, lost.silent_s))
                case Broken() as broken:
                    self.post(CoordinatorLost(broken.reason))
                    return
                case message:
                    self.post(message)
                    if isinstance(message, SaveInTrainers):
                        # If the save is made here, what comes now is for that.
                        await self._stays.wait()

    async def _await_deadline(self) -> None:
        await anyio.sleep(self._left_s)
        self.post(DeadlinePassed(self._timeout_s))

    async def _look(self) -> None:
        self.post(Looked(await self._work.look_for_commit()))


class TrainersEnd:
    """Rank 0's end of a save that the trainers make; a ``CoordinatorEnd``.

    Answers the trainers whose uploader processes would save.
    """

    def __init__(self, end: CoordinatorEnd) -> None:
        self._end = end
        self._has_joined = False
        self._unlike: Failed | None = None

    def absence(self) -> str | None:
        """See ``CoordinatorEnd``."""
        return self._end.absence()

    async def send(self, rank: int, message: FromCoordinator) -> None:
        """See ``CoordinatorEnd``."""
        await self._end.send(rank, message)

    async def receive(self) -> ToCoordinator | Lost | Broken:
        """See ``CoordinatorEnd``."""
        while True:
            message = await self._end.receive()
            match message:
                case Handed(rank, True):
                    await self._end.send(rank, SaveInTrainers())
                case Handed(rank):
                    self._unlike = Failed(rank, unlike_processes(rank))
                case Arrived(rank=0):
                    self._has_joined = True
                    if self._unlike is None:
                        return message
                case _:
                    return message
            # If rank 0 itself has failed that is the reason, and comes next.
            if self._unlike is not None and self._has_joined:
                return self._unlike
