# SPDX-License-Identifier: Apache-2.0
"""The roll call at the beginning of each call that ranks make together.

A rank's first heartbeat contains a digest of its call's ``Label``. Messages may be repeated or
late.

1. No message of a rank passes unless its label is rank 0's. So no rank writes, and no round passes,
before all ranks have made the same call.
2. If labels differ, all ranks get one ``UsageError`` with the labels, after ``SETTLE_S`` or once
all ranks have called. If they differ by a manager's ``close`` only, they get the abort of an early
end. Then no message passes: it may belong to another call.
3. A failure of one rank waits as long: a call out of phase may be its cause, and is then the error.
A cancellation does not wait.
4. Ranks that have called are reminded of absent ones, which the deadline and the loss of a rank
name too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from actorsnap.errors import UsageError
from actorsnap.protocol.failure import Failure, Stage, explain_loss, restore_aborted
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.wording import named_ranks

REMIND_AFTER_S = (10.0, 60.0, 300.0)
"""Times after its call at which a waiting rank logs a warning."""

SETTLE_S = 5.0
"""Maximum wait for absent ranks once the call is known to fail."""

NO_LABEL = bytes(8)
"""Stands for the label of a call that a rank never makes, whatever it calls next."""

_MAX_LABELS = 6


class RollState(StrEnum):
    CALLING = "calling"
    SETTLING = "settling"
    """The call will be refused; absent ranks still get ``SETTLE_S``."""
    CALLED = "called"
    REFUSED = "refused"


_S = RollState


def awaiting(label: Label, ranks: Sequence[int], *, is_connected: bool = True) -> str:
    """Returns whom a call waits for.

    Args:
        is_connected: Whether ``ranks`` can be heard. If not, they may have called.
    """
    if not is_connected:
        return f"waiting for the job's store, which does not answer, to call {label}"
    policy = ", with the same save= policy" if label.is_by_policy else ""
    return f"waiting for {named_ranks(ranks)} to call {label}: every rank has to call it{policy}"


def overdue(
    label: Label,
    ranks: Sequence[int],
    timeout_s: float,
    limit: str = "timeout_s",
    *,
    is_connected: bool = True,
) -> Failure:
    """Returns the failure; empty ``ranks``: rank 0 has not answered.

    Args:
        limit: Name of the option that bounds the time.
        is_connected: See ``awaiting``.
    """
    reason = f"{limit}={timeout_s:g} has passed"
    if not ranks:
        reason += f", and rank 0, the coordinator of {label}, has not answered"
        return aborted(label, reason, 0)
    reason += f"; still {awaiting(label, ranks, is_connected=is_connected)}"
    return aborted(label, reason, ranks[0] if is_connected and len(ranks) == 1 else None)


def aborted(label: Label, reason: str, rank: int | None) -> Failure:
    if label.kind.is_save:
        return Failure(reason=reason, stage=Stage.JOIN, rank=rank)
    return restore_aborted(reason, Stage.JOIN, rank)


class RollCall:
    """The roll call of one call; ``label`` is rank 0's. Ignores events after its end.

    Args:
        is_known: False if rank 0 has bad input and so no label: the call must fail.

    Attributes:
        refusal: Ends the call on all ranks, if set.
    """

    def __init__(self, *, label: Label, world_size: int, is_known: bool = True) -> None:
        self.state = _S.CALLING
        self.refusal: Failure | None = None
        self.label = label
        self.world_size = world_size
        self._own = label.digest if is_known else b""
        self._called: dict[int, bytes] = {}
        self._gone: set[int] = set()
        self._labels: dict[bytes, Label] = {self._own: label}
        self._asked: set[bytes] = set()
        self._failure: Failure | None = None
        self._num_reminders = 0

    @property
    def is_over(self) -> bool:
        return self.state in (_S.CALLED, _S.REFUSED)

    def has_called(self, rank: int) -> bool:
        return rank in self._called

    @property
    def remind_after_s(self) -> float:
        """Seconds after rank 0's call at which the next ``remind`` is due."""
        left = REMIND_AFTER_S[self._num_reminders :]
        return left[0] if left and self.state is _S.CALLING else math.inf

    def renewed(self) -> RollCall:
        return RollCall(label=self.label, world_size=self.world_size)

    def label_for(self, rank: int) -> bytes:
        """Returns ``Aborted.label``."""
        if rank in self._gone:
            return NO_LABEL
        return b"" if rank in self._called else self._own

    def on_called(self, rank: int, digest: bytes) -> bool:
        """Records a rank's call. Returns whether to ask for its label."""
        if self.is_over or rank in self._called:
            return False
        self._called[rank] = digest
        is_asked = False
        if digest != self._own:
            self.state = _S.SETTLING
            is_asked = digest not in self._asked and len(self._asked) < _MAX_LABELS
            if is_asked:
                self._asked.add(digest)
        self._end_if_complete()
        return is_asked

    def on_labelled(self, rank: int, label: Label) -> None:
        if not self.is_over:
            self._labels[self._called[rank]] = label
            self._end_if_complete()

    def on_failed(self, rank: int, failure: Failure) -> None:
        if self.is_over:
            return
        # A rank with invalid input has no label.
        if failure.stage is Stage.CANCEL or rank not in self._called:
            self._refuse(failure)
        else:
            self._failure = self._failure or failure
            self.state = _S.SETTLING

    def on_lost(self, rank: int, silent_s: float, how: str = "") -> None:
        if how:
            self._gone.add(rank)
        reason = explain_loss(rank, silent_s, how)
        if rank not in self._called:
            reason += f"; it had not called {self.label}, which every rank has to call"
        self._end(self._failure or aborted(self.label, reason, rank))

    def remind(self) -> tuple[tuple[int, ...], list[int]]:
        """Returns the absent ranks, and the ranks to remind of them."""
        self._num_reminders += 1
        return tuple(self._absent), [rank for rank in self._called if rank]

    def on_settled(self) -> None:
        """Refuses the call, ``SETTLE_S`` after it began to settle."""
        assert self.state is _S.SETTLING
        self._end(self._failure)

    def on_deadline(
        self, timeout_s: float, limit: str = "timeout_s", *, is_connected: bool = True
    ) -> None:
        late = overdue(self.label, self._absent, timeout_s, limit, is_connected=is_connected)
        self._end(self._failure or late)

    @property
    def _absent(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._called]

    def _end_if_complete(self) -> None:
        has_labels = self._asked <= self._labels.keys()
        if len(self._called) < self.world_size or not has_labels:
            return
        if self.state is _S.SETTLING:
            self._end(self._failure)
        else:
            self.state = _S.CALLED

    def _end(self, failure: Failure | None) -> None:
        # A difference between labels explains any failure.
        if self.is_over:
            return
        if any(digest != self._own for digest in self._called.values()):
            failure = self._early_end() or Failure.of(
                UsageError(self._difference()), stage=Stage.JOIN
            )
        assert failure is not None
        self._refuse(failure)

    def _refuse(self, failure: Failure) -> None:
        self.state, self.refusal = _S.REFUSED, failure

    def _early_end(self) -> Failure | None:
        """Returns the failure if some ranks close a manager, and the others make one other call."""
        labels = {rank: self._labels.get(digest) for rank, digest in sorted(self._called.items())}
        closing = [rank for rank, each in labels.items() if each and each.kind is CallKind.CLOSE]
        others = {label for rank, label in labels.items() if rank not in closing}
        if len(others) != 1 or (other := others.pop()) is None:
            return None
        has, their = ("has", "its") if len(closing) == 1 else ("have", "their")
        reason = (
            f"{named_ranks(closing)} {has} closed {their} CheckpointManager, and had not called "
            f"{other}, which every rank has to call"
        )
        return aborted(other, reason, closing[0] if len(closing) == 1 else None)

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
            f"the ranks make different calls: {'; '.join(shown)}. Every rank must make the "
            "same calls in the same order. Find the rank that skipped or repeated a call, passed "
            "another path, ended its loop early, or whose manager has another save= policy"
        )
