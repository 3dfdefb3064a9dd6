# SPDX-License-Identifier: Apache-2.0
"""How much to move over a network at a time, from how the last transfers went.

Both classes are told durations; neither has a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from actorsnap.planning.restore import Read

FIRST_AT_ONCE = 8
"""Transfers at a time before anything is known."""

MAX_JOINED_BYTES = 64 << 20
"""Largest read that joins others: a failure repeats all of it."""

_JOINED_S = 2.0
"""Duration of a joined read."""

_GAIN = 1.25
"""Least growth of the speed that twice as many transfers must bring."""

_HOLD_ROUNDS = 16
"""Rounds after a failed increase without another one."""


class Climb:
    """Decides how many transfers run at a time: twice as many while that brings more speed.

    A round is as many transfers as run at a time, all of which began in it. Its speed is their
    number times their mean speed. An increase that did not pay is taken back.

    Attributes:
        at_once: From ``first`` to ``most``, never less than where it paid last.
    """

    def __init__(self, *, first: int, most: int) -> None:
        self.at_once = min(first, most)
        self._most = most
        self._round = 0
        self._speeds: list[float] = []
        self._before: tuple[int, float] | None = None
        self._num_held = 0

    def begin(self) -> int:
        """Returns the round of a transfer that begins."""
        return self._round

    def end(self, began: int, nbytes: int, seconds: float) -> None:
        """Notes the end of a transfer; ``began``: what ``begin`` returned."""
        if began != self._round or seconds <= 0:
            return
        self._speeds.append(nbytes / seconds)
        if len(self._speeds) < self.at_once:
            return
        speed = self.at_once * sum(self._speeds) / len(self._speeds)
        self._speeds = []
        if self._before is not None and speed < _GAIN * self._before[1]:
            self._change(self._before[0])
            self._before, self._num_held = None, _HOLD_ROUNDS
        elif self._num_held:
            self._num_held -= 1
        elif self.at_once < self._most:
            self._before = self.at_once, speed
            self._change(min(2 * self.at_once, self._most))
        else:
            self._before = None

    def _change(self, at_once: int) -> None:
        self.at_once = at_once
        self._round += 1


class ReadQueue:
    """Hands out planned reads in order, and joins neighbours: each request costs time and CPU.

    A joined read has about the bytes that its predecessor would have brought in two seconds, up to
    64 MiB, and at most half of the share of each concurrent transfer in the bytes left: so the
    reads become smaller again, and all transfers end together.

    Args:
        may_join: Whether a read needs no memory of its own.
    """

    def __init__(
        self, reads: Sequence[Read], *, may_join: Callable[[Read], bool], max_gap_bytes: int
    ) -> None:
        self._reads = reads
        self._may_join = may_join
        self._max_gap_bytes = max_gap_bytes
        self._at = 0
        self._left_bytes = sum([read.stop - read.start for read in reads])
        self._joined_bytes = 0.0

    def take(self, at_once: int) -> Read | None:
        """Returns the next read, of ``at_once`` at a time; None: there are no more."""
        if self._at == len(self._reads):
            return None
        first = last = self._at
        start = self._reads[first].start
        most = min(self._joined_bytes, self._left_bytes / at_once)
        while last + 1 < len(self._reads) and self._joins(last, start, most):
            last += 1
        self._at = last + 1
        read = _joined(self._reads[first : last + 1])
        self._left_bytes -= sum([each.stop - each.start for each in self._reads[first : last + 1]])
        return read

    def end(self, nbytes: int, seconds: float) -> None:
        """Notes the end of a read."""
        if seconds > 0:
            self._joined_bytes = min(nbytes / seconds * _JOINED_S, MAX_JOINED_BYTES)

    def _joins(self, last: int, start: int, most: float) -> bool:
        one, other = self._reads[last : last + 2]
        return (
            other.stop - start <= most
            and one.key == other.key
            and 0 <= other.start - one.stop <= self._max_gap_bytes
            and self._may_join(one)
            and self._may_join(other)
        )


def _joined(reads: Sequence[Read]) -> Read:
    if len(reads) == 1:
        return reads[0]
    gaps = list(reads[0].gaps)
    for one, other in pairwise(reads):
        gaps += [other.start - one.stop + other.gaps[0], *other.gaps[1:]]
    return msgspec.structs.replace(
        reads[0],
        stop=reads[-1].stop,
        parts=tuple([part for read in reads for part in read.parts]),
        gaps=tuple(gaps),
    )
