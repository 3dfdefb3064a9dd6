"""The roll call at the beginning of each call that ranks make together, as a table.

The first heartbeat of every rank contains a digest of the ``Label`` of its call. The machine runs
in rank 0's process, in front of the coordinator of the save or restore. Its actor (``actors.roll``)
feeds it and passes other messages on to the coordinator.

Rules:

1. Messages of a rank pass only if its label is rank 0's. So no rank writes, and no round passes,
   before all ranks have made the same call.
2. If labels differ, all ranks get one ``UsageError`` that shows the labels: all of them, if all
   ranks call within ``SETTLE_S``. After a refusal no message passes: it may belong to another call.
3. A failure of one rank waits as long: a call out of phase may be its cause, and is then the error.
   A cancellation does not wait.
4. Ranks that have called are reminded of absent ones after each of ``REMIND_AFTER_S``. The
   deadline, and the loss of a rank, name the absent ranks too.

Messages may be repeated or late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.errors import UsageError
from actorsnap.protocol.calls import DeadlinePassed, RankLost, SendToRank
from actorsnap.protocol.failure import Failure, Stage, restore_aborted
from actorsnap.protocol.labels import Label, named_ranks
from actorsnap.protocol.machine import Machine, Table
from actorsnap.protocol.messages import (
    Absent,
    AskLabel,
    Failed,
    Labelled,
)

__all__ = [
    "REMIND_AFTER_S",
    "SETTLE_S",
    "Called",
    "Refuse",
    "Reminded",
    "RollCommand",
    "RollEvent",
    "RollMachine",
    "RollState",
    "Settle",
    "Settled",
    "Warn",
    "aborted",
    "awaiting",
    "overdue",
]

REMIND_AFTER_S = (10.0, 60.0, 300.0)
"""Times after its call at which a rank that waits for others logs a warning, in seconds."""

SETTLE_S = 5.0
"""Maximum wait for ranks that have not called, once the call is known to fail, in seconds."""

_MAX_LABELS = 6


class RollState(StrEnum):
    CALLING = "calling"
    SETTLING = "settling"
    CALLED = "called"
    REFUSED = "refused"


class Called(msgspec.Struct, frozen=True):
    """A rank makes a call; ``label`` is the digest of its ``Label``."""

    rank: int
    label: bytes


class Reminded(msgspec.Struct, frozen=True):
    """The next of ``REMIND_AFTER_S`` has passed."""


class Settled(msgspec.Struct, frozen=True):
    """``SETTLE_S`` have passed since ``Settle``."""


class Warn(msgspec.Struct, frozen=True):
    """Logs a warning: this rank waits for ``ranks`` to call."""

    ranks: tuple[int, ...]


class Settle(msgspec.Struct, frozen=True):
    """Requests ``Settled`` after ``SETTLE_S``."""


class Refuse(msgspec.Struct, frozen=True):
    """Ends the call on all ranks."""

    failure: Failure


RollEvent: TypeAlias = Called | Labelled | Failed | RankLost | Reminded | Settled | DeadlinePassed
RollCommand: TypeAlias = SendToRank | Warn | Settle | Refuse

_S = RollState


def awaiting(label: Label, ranks: Sequence[int]) -> str:
    """Describes a rank that waits for ``ranks`` to call."""
    return f"waiting for {named_ranks(ranks)} to call {label}: every rank has to call it"


def overdue(label: Label, ranks: Sequence[int], timeout_s: float) -> Failure:
    """Returns the failure of a call whose deadline has passed.

    Args:
        ranks: Ranks that have not called; empty if rank 0 has not answered.
    """
    reason = f"timeout_s={timeout_s:g} is over"
    if not ranks:
        reason += f", and rank 0, which coordinates {label}, has not answered"
        return aborted(label, reason, 0)
    reason += f"; still {awaiting(label, ranks)}"
    return aborted(label, reason, ranks[0] if len(ranks) == 1 else None)


def aborted(label: Label, reason: str, rank: int | None) -> Failure:
    """Returns a failure that is raised as the call's own error."""
    if label.kind.is_save:
        return Failure(reason=reason, stage=Stage.JOIN, rank=rank)
    return restore_aborted(reason, Stage.JOIN, rank)


class RollMachine(Machine[RollState, RollEvent, RollCommand]):
    """The roll call of one call; ``label`` is rank 0's."""

    def __init__(self, *, label: Label, world_size: int) -> None:
        super().__init__(_TABLE, _S.CALLING)
        self.label = label
        self.world_size = world_size
        self._own = label.digest
        self._called: dict[int, bytes] = {}
        self._labels: dict[bytes, Label] = {self._own: label}
        # Digests whose labels were requested.
        self._asked: set[bytes] = set()
        self._failure: Failure | None = None
        self._num_reminders = 0

    def validate(self) -> None:
        assert self.state is not _S.CALLED or (self._is_complete and not self._is_unlike)
        assert self.state is not _S.CALLING or not self._is_unlike

    @property
    def remind_after_s(self) -> float:
        """Seconds after rank 0's call at which the next ``Reminded`` is due."""
        left = REMIND_AFTER_S[self._num_reminders :]
        return left[0] if left and self.state is _S.CALLING else math.inf

    def renewed(self) -> RollMachine:
        """Returns a machine for the same call under another number."""
        return RollMachine(label=self.label, world_size=self.world_size)

    def label_for(self, rank: int) -> bytes:
        """Returns the label to send to ``rank`` with the end of the call; see ``Aborted``."""
        return b"" if rank in self._called else self._own

    @property
    def _absent(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._called]

    @property
    def _is_unlike(self) -> bool:
        return any(digest != self._own for digest in self._called.values())

    @property
    def _is_complete(self) -> bool:
        has_labels = self._asked <= self._labels.keys()
        return len(self._called) == self.world_size and has_labels

    def _on_called(self, event: Called) -> list[RollCommand]:
        if event.rank in self._called:
            return []
        self._called[event.rank] = event.label
        commands: list[RollCommand] = []
        if event.label != self._own:
            commands += self._settle()
            if event.label not in self._asked and len(self._asked) < _MAX_LABELS:
                self._asked.add(event.label)
                commands.append(SendToRank(event.rank, AskLabel()))
        return [*commands, *self._conclude()]

    def _on_labelled(self, event: Labelled) -> list[RollCommand]:
        self._labels[self._called[event.rank]] = event.label
        return self._conclude()

    def _on_failed(self, event: Failed) -> list[RollCommand]:
        # A rank with invalid input has no label.
        if event.failure.stage is Stage.CANCEL or event.rank not in self._called:
            return self._refuse(event.failure)
        self._failure = self._failure or event.failure
        return self._settle()

    def _on_lost(self, event: RankLost) -> list[RollCommand]:
        reason = event.reason
        if event.rank not in self._called:
            reason += f"; it had not called {self.label}, which every rank has to call"
        return self._end(self._failure or aborted(self.label, reason, event.rank))

    def _on_reminded(self, event: Reminded) -> list[RollCommand]:
        self._num_reminders += 1
        absent = tuple(self._absent)
        waiting = [rank for rank in self._called if rank]
        return [Warn(absent), *[SendToRank(rank, Absent(absent)) for rank in waiting]]

    def _on_settled(self, event: Settled) -> list[RollCommand]:
        return self._end(self._failure)

    def _on_deadline(self, event: DeadlinePassed) -> list[RollCommand]:
        return self._end(self._failure or overdue(self.label, self._absent, event.timeout_s))

    def _settle(self) -> list[RollCommand]:
        if self.state is _S.SETTLING:
            return []
        self.state = _S.SETTLING
        return [Settle()]

    def _conclude(self) -> list[RollCommand]:
        if not self._is_complete:
            return []
        if self.state is _S.SETTLING:
            return self._end(self._failure)
        self.state = _S.CALLED
        return []

    def _end(self, failure: Failure | None) -> list[RollCommand]:
        if self._is_unlike:
            return self._refuse(Failure.of(UsageError(self._difference()), stage=Stage.JOIN))
        assert failure is not None
        return self._refuse(failure)

    def _refuse(self, failure: Failure) -> list[RollCommand]:
        self.state = _S.REFUSED
        return [Refuse(failure)]

    def _difference(self) -> str:
        ranks: dict[bytes, list[int]] = {}
        for rank in sorted(self._called):
            ranks.setdefault(self._called[rank], []).append(rank)
        shown = [
            f"{named_ranks(ranks[digest])}: {self._labels[digest]}"
            for digest in sorted(ranks, key=lambda digest: ranks[digest][0])
            if digest in self._labels
        ]
        others = sorted(
            rank for digest in ranks if digest not in self._labels for rank in ranks[digest]
        )
        if others:
            shown.append(f"{named_ranks(others)}: other calls")
        if self._absent:
            shown.append(f"{named_ranks(self._absent)}: no call yet")
        return (
            f"the ranks make different calls: {'; '.join(shown)}. All ranks make the same calls in "
            "the same order: find out which rank skipped or repeated one"
        )


_M = RollMachine
_TABLE: Table[RollState, RollCommand] = {
    _S.CALLING: {
        Called: _M._on_called,
        Failed: _M._on_failed,
        RankLost: _M._on_lost,
        Reminded: _M._on_reminded,
        DeadlinePassed: _M._on_deadline,
    },
    _S.SETTLING: {
        Called: _M._on_called,
        Labelled: _M._on_labelled,
        Failed: _M._on_failed,
        RankLost: _M._on_lost,
        Settled: _M._on_settled,
        DeadlinePassed: _M._on_deadline,
    },
    _S.CALLED: {},
    _S.REFUSED: {},
}
