# SPDX-License-Identifier: Apache-2.0
"""A call that all ranks make together, as a sequence of rounds.

A rank works, *arrives* at the next round with a payload, and waits. When all ranks of the round
have arrived, the coordinator decides: ask some for more, let all proceed, or abort. This module
must not know the calls (``protocol.save``, ``protocol.restore``), clocks, transports or storage.

1. A rank leaves a round only after all ranks of the round have arrived.
2. The first failure, lost rank or passed deadline aborts the call on all ranks, with one failure.
3. The commit round is decided once. From its beginning only its result counts: failures and the
deadline merely hurry it, and a lost rank does not matter.
4. A rank that has arrived at the commit round and loses the coordinator does not know the outcome,
even if it has failed or was cancelled: its caller looks in the storage. Before that round nothing
can have been committed.
5. Messages may be late or repeated. A process that takes over an end repeats the end's last
message.

Both machines are tables with a row per state and a rule per event. A rule changes the machine and
returns commands, whose results come back as events. An event without a rule is a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

import msgspec

from actorsnap.protocol.failure import Failure
from actorsnap.protocol.messages import Aborted, Arrived, Ask, Failed, Proceed, Repeat

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")

FromRank: TypeAlias = Arrived | Failed
ToRank: TypeAlias = Ask | Proceed | Repeat | Aborted

Row: TypeAlias = Mapping[type, Callable[..., list[CommandT]]]
"""Rules by event type. A final state has none."""

Table: TypeAlias = Mapping[StateT, Row[CommandT]]


class ProtocolViolation(AssertionError):
    """An event that cannot happen in this state: a defect."""


class Machine(Generic[StateT, EventT, CommandT]):
    """The table's rules are methods of the machine."""

    def __init__(self, table: Table[StateT, CommandT], first: StateT) -> None:
        self.state = first
        self._table = table

    @property
    def is_final(self) -> bool:
        return not self._table[self.state]

    def handle(self, event: EventT) -> list[CommandT]:
        """Returns the commands to perform after ``event``.

        Raises:
            ProtocolViolation: The state has no rule for it.
        """
        if self.is_final:
            return []
        rule = self._table[self.state].get(type(event))
        if rule is None:
            raise ProtocolViolation(f"{type(event).__name__} while {self.state}")
        commands = rule(self, event)
        self.validate()
        return commands

    def validate(self) -> None:
        """Asserts the invariants, cheaply; called after each event."""

    def _ignore(self, event: EventT) -> list[CommandT]:
        return []


class Continue(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of the round proceed.

    Attributes:
        common: Payload of other ranks.
        skips: By rank, number of following rounds without it.
        commits_next: The next round is the commit round, of all ranks.
    """

    payloads: Mapping[int, bytes] = {}
    common: bytes = b""
    skips: Mapping[int, int] = {}
    commits_next: bool = False
    is_last: bool = False


class AskMore(msgspec.Struct, frozen=True):
    """Asks these ranks; the round is then decided again, from the answers alone."""

    questions: Mapping[int, bytes]


Decision: TypeAlias = Continue | AskMore | Failure
"""How a round ends; a ``Failure`` ends the call on all ranks."""


class Lost(msgspec.Struct, frozen=True):
    """Event: a rank was lost; for a rank: the coordinator."""

    failure: Failure


class Overdue(msgspec.Struct, frozen=True):
    """Event: the deadline has passed."""

    failure: Failure


class TakenOver(msgspec.Struct, frozen=True):
    """Event: this process continues for another one, whose messages may be lost."""


class Decide(msgspec.Struct, frozen=True):
    """Command: decide the round. Ends in a ``Decision``.

    Attributes:
        payloads: Payloads of the ranks of the round; after ``AskMore``, of the ranks asked.
        commits: This is the commit round, once in a call.
    """

    round: int
    payloads: Mapping[int, bytes]
    commits: bool


class Hurry(msgspec.Struct, frozen=True):
    """Command: end the commit in progress soon. Its result still decides.

    Attributes:
        has_grace: The commit, likely to succeed, may take a moment: a rank has failed or was
            cancelled. False after the deadline.
    """

    failure: Failure
    has_grace: bool


class SendTo(msgspec.Struct, frozen=True):
    rank: int
    message: ToRank


class CoordinatorState(StrEnum):
    GATHERING = "gathering"
    DECIDING = "deciding"
    COMMITTING = "committing"
    PASSED = "passed"
    ABORTED = "aborted"


CoordinatorEvent: TypeAlias = FromRank | Decision | Lost | Overdue | TakenOver
CoordinatorCommand: TypeAlias = Decide | Hurry | SendTo

_C = CoordinatorState


class Coordinator(Machine[CoordinatorState, CoordinatorEvent, CoordinatorCommand]):
    """One call; a rank that repeats a message after the end gets the outcome again."""

    def __init__(self, *, world_size: int) -> None:
        super().__init__(_COORDINATOR, _C.GATHERING)
        self.world_size = world_size
        self.round = 0
        self.failure: Failure | None = None
        self._commits = False
        self._payloads: dict[int, bytes] = {}
        # Per rank: next round, last ``Ask`` of this round, number of the last answer.
        self._next = dict.fromkeys(range(world_size), 0)
        self._asked: dict[int, Ask] = {}
        self._num_answered: dict[int, int] = {}
        # The ranks of the next decision, and the absent ones. Stored: computing them at each
        # arrival would be quadratic in the number of ranks.
        self._parties = frozenset(range(world_size))
        self._awaited = set(self._parties)
        self._sent: dict[int, Proceed] = {}

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known. Repeated messages are still answered."""
        return self.state in (_C.PASSED, _C.ABORTED)

    @property
    def awaited(self) -> tuple[int, ...]:
        return tuple(sorted(self._awaited)) if self.state is _C.GATHERING else ()

    def validate(self) -> None:
        assert (self.failure is not None) == (self.state is _C.ABORTED)
        assert self._awaited or self.state is not _C.GATHERING
        if self.state is _C.COMMITTING:
            assert len(self._parties) == self.world_size

    def _on_arrived(self, event: Arrived) -> list[CoordinatorCommand]:
        rank = event.rank
        sent = self._sent.get(rank)
        if sent is not None and sent.round == event.round:
            return [SendTo(rank, sent)]
        if event.round != self._next[rank]:
            return []
        asked = self._asked.get(rank)
        if asked is not None and event.num_asked < asked.num_asked:
            return [SendTo(rank, asked)]
        if self._num_answered.get(rank, -1) >= event.num_asked:
            return []  # repeated
        self._num_answered[rank] = event.num_asked
        self._payloads[rank] = event.payload
        self._awaited.discard(rank)
        return self._decide_if_all_arrived()

    def _gather(self, parties: Iterable[int]) -> None:
        self.state = _C.GATHERING
        self._parties = frozenset(parties)
        self._awaited = set(self._parties - self._payloads.keys())

    def _decide_if_all_arrived(self) -> list[CoordinatorCommand]:
        if self.state is not _C.GATHERING or self._awaited:
            return []
        self.state = _C.COMMITTING if self._commits else _C.DECIDING
        payloads = {rank: self._payloads.pop(rank) for rank in sorted(self._parties)}
        return [Decide(self.round, payloads, self._commits)]

    def _on_ask_more(self, decision: AskMore) -> list[CoordinatorCommand]:
        self._gather(decision.questions)
        for rank, payload in decision.questions.items():
            before = self._asked.get(rank)
            num_asked = 1 if before is None else before.num_asked + 1
            self._asked[rank] = Ask(self.round, payload, num_asked)
        return [SendTo(rank, self._asked[rank]) for rank in decision.questions]

    def _on_continue(self, decision: Continue) -> list[CoordinatorCommand]:
        ranks = self._in_round()
        for rank in ranks:
            self._next[rank] = self.round + 1 + decision.skips.get(rank, 0)
            payload = decision.payloads.get(rank, decision.common)
            self._sent[rank] = Proceed(self.round, payload, self._next[rank], decision.is_last)
            self._num_answered.pop(rank, None)
        sends: list[CoordinatorCommand] = [SendTo(rank, self._sent[rank]) for rank in ranks]
        if decision.is_last:
            self.state = _C.PASSED
            return sends
        self.round += 1
        self._commits = decision.commits_next
        self._asked = {}
        self._gather(self._in_round())
        return [*sends, *self._decide_if_all_arrived()]

    def _in_round(self) -> list[int]:
        return [rank for rank, at in self._next.items() if at == self.round]

    def _on_failed(self, event: Failed | Lost | Overdue) -> list[CoordinatorCommand]:
        return self._abort(event.failure)

    def _on_failed_late(self, event: Failed | Overdue) -> list[CoordinatorCommand]:
        return [Hurry(event.failure, has_grace=isinstance(event, Failed))]

    def _abort(self, failure: Failure) -> list[CoordinatorCommand]:
        self.state = _C.ABORTED
        self.failure = failure
        return [SendTo(rank, Aborted(failure)) for rank in range(self.world_size)]

    def _on_taken_over(self, event: TakenOver) -> list[CoordinatorCommand]:
        return [SendTo(rank, Repeat()) for rank in range(self.world_size)]

    def _repeat_outcome(self, event: FromRank) -> list[CoordinatorCommand]:
        if self.failure is not None:
            return [SendTo(event.rank, Aborted(self.failure))]
        return [SendTo(event.rank, self._sent[event.rank])]


class Reached(msgspec.Struct, frozen=True):
    """Event: the rank's next work, or its answer to an ``Ask``, is ready."""

    payload: bytes = b""
    commits: bool = False


class End(msgspec.Struct, frozen=True):
    """Last command: the call has ended.

    Attributes:
        is_unknown: The coordinator is gone, and may have committed.
    """

    failure: Failure | None
    is_unknown: bool = False
    payload: bytes = b""


class ParticipantState(StrEnum):
    WORKING = "working"
    WAITING = "waiting"
    FAILED = "failed"
    ENDED = "ended"


ParticipantEvent: TypeAlias = ToRank | Reached | Failed | Lost | TakenOver
ParticipantCommand: TypeAlias = FromRank | Ask | Proceed | End
_P = ParticipantState


class Participant(Machine[ParticipantState, ParticipantEvent, ParticipantCommand]):
    def __init__(self, *, rank: int) -> None:
        super().__init__(_PARTICIPANT, _P.WORKING)
        self.rank = rank
        self.round = 0
        self._num_asked = 0
        self._has_arrived_to_commit = False
        self._sent: FromRank | None = None

    def _on_reached(self, event: Reached) -> list[ParticipantCommand]:
        self.state = _P.WAITING
        self._has_arrived_to_commit |= event.commits
        self._sent = Arrived(self.rank, self.round, event.payload, self._num_asked)
        return [self._sent]

    def _on_failed(self, event: Failed) -> list[ParticipantCommand]:
        self.state = _P.FAILED
        self._sent = event
        return [event]

    def _on_ask(self, event: Ask) -> list[ParticipantCommand]:
        if (event.round, event.num_asked) != (self.round, self._num_asked + 1):
            return []
        self.state = _P.WORKING
        self._num_asked = event.num_asked
        return [event]

    def _on_proceed(self, event: Proceed) -> list[ParticipantCommand]:
        if event.round != self.round:
            return []
        if event.is_last:
            return self._end(End(None, payload=event.payload))
        self.state = _P.WORKING
        self.round, self._num_asked = event.next_round, 0
        return [event]

    def _on_late_proceed(self, event: Proceed) -> list[ParticipantCommand]:
        # After a failure only the last round counts.
        if event.round != self.round or not event.is_last:
            return []
        return self._end(End(None, payload=event.payload))

    def _on_aborted(self, event: Aborted) -> list[ParticipantCommand]:
        return self._end(End(event.failure))

    def _on_lost(self, event: Lost) -> list[ParticipantCommand]:
        return self._end(End(event.failure, is_unknown=self._has_arrived_to_commit))

    def _on_repeat(self, event: Repeat | TakenOver) -> list[ParticipantCommand]:
        return [] if self._sent is None else [self._sent]

    def _end(self, end: End) -> list[ParticipantCommand]:
        self.state = _P.ENDED
        return [end]


_MC = Coordinator
_UNFINISHED: Row[CoordinatorCommand] = {
    Arrived: _MC._on_arrived,
    Failed: _MC._on_failed,
    Lost: _MC._on_failed,
    Overdue: _MC._on_failed,
    TakenOver: _MC._on_taken_over,
}
_OVER: Row[CoordinatorCommand] = {
    Arrived: _MC._repeat_outcome,
    Failed: _MC._repeat_outcome,
    Continue: _MC._ignore,
    AskMore: _MC._ignore,
    Failure: _MC._ignore,
    Lost: _MC._ignore,
    Overdue: _MC._ignore,
    TakenOver: _MC._on_taken_over,
}
_COORDINATOR: Table[CoordinatorState, CoordinatorCommand] = {
    _C.GATHERING: _UNFINISHED,
    _C.DECIDING: {
        **_UNFINISHED,
        Continue: _MC._on_continue,
        AskMore: _MC._on_ask_more,
        Failure: _MC._abort,
    },
    _C.COMMITTING: {
        **_UNFINISHED,
        Continue: _MC._on_continue,
        Failure: _MC._abort,
        Failed: _MC._on_failed_late,
        Lost: _MC._ignore,  # all ranks have arrived
        Overdue: _MC._on_failed_late,
    },
    _C.PASSED: _OVER,
    _C.ABORTED: _OVER,
}

_MP = Participant
_ALWAYS: Row[ParticipantCommand] = {
    Aborted: _MP._on_aborted,
    Lost: _MP._on_lost,
    Repeat: _MP._on_repeat,
    TakenOver: _MP._on_repeat,
}
_PARTICIPANT: Table[ParticipantState, ParticipantCommand] = {
    _P.WORKING: {
        **_ALWAYS,
        Reached: _MP._on_reached,
        Failed: _MP._on_failed,
        Ask: _MP._ignore,
        Proceed: _MP._ignore,
    },
    _P.WAITING: {
        **_ALWAYS,
        Failed: _MP._on_failed,
        Ask: _MP._on_ask,
        Proceed: _MP._on_proceed,
    },
    _P.FAILED: {
        **_ALWAYS,
        Reached: _MP._ignore,
        Failed: _MP._ignore,
        Ask: _MP._ignore,
        Proceed: _MP._on_late_proceed,
    },
    _P.ENDED: {},
}
