"""How fast saves may be stored so that the trainer's steps stay as fast as they were.

Theory of operation. Steps that end while nothing is stored say what a step takes. Steps that end
while saves are stored say what that costs, in windows of some steps and a second. Costs grow with
the *duty* of the uploaders, the share of the time in which they work, so that a window with its
duty gives the slope, the windows together its estimate, older ones counting less, and the estimate
gives the largest duty that keeps within the limit. Short saves share a window, and what was learned
holds for the next one.

1. What is compared are means, without steps that took more than twice as long as others:
   evaluations and stalls of a data loader are nobody's doing. Medians would not do: uploaders work
   in bursts, which may meet one short step of ten.
2. The trainer changes by itself: batches get longer, or shorter. When uploaders are to be slowed,
   or seem to make the trainer faster, by measurements that are old, they *look*: they rest for some
   steps, and what a step takes is measured anew. They also look when a save begins and there were
   no steps before it.
3. They never rest for good: no duty is below ``MIN_DUTY``, but for the looks, which are short.
4. Nothing is slowed that lags behind its schedule: a straight line from the save's begin to half of
   its ``timeout_s``, less ``SLACK`` of it.
5. Nothing is slowed while a save is staged: the trainer waits for that, or will, and that may wait
   for memory. Nor when no steps are reported: there is no trainer to protect.
6. A duty is kept in *bursts*: all uploaders work at the same time, and then rest together. Of a
   burst and the rest behind it, the burst is the duty. Whoever works when the burst is over ends
   his chunk first, and that time counts.

It knows no clock, and is told what time it is; ``actors/pace.py`` waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, TypeAlias

import msgspec

__all__ = [
    "BURST_S",
    "MIN_DUTY",
    "Bursts",
    "PacingEvent",
    "PacingMachine",
    "SavingBegan",
    "SavingEnded",
    "Schedule",
    "SetDuty",
    "StagingBegan",
    "StepEnded",
    "TimePassed",
]

MIN_DUTY = 0.02
SLACK = 0.05
BURST_S = 0.02
"""About a training step: nobody begins a chunk in a burst that is older."""

_WINDOW, _WINDOW_S, _MAX_WINDOW = 16, 1.0, 256
"""Steps that are judged together: so many, and more until they took so long."""

_LOOK, _LOOK_S, _MAX_LOOK = 12, 0.25, 64
"""Steps of a look, in the same way."""

_CLOCK_S = 1e-6
"""No step is shorter: of what seems to take no time nothing is a share."""

_OLD = 4
"""After so many windows it is time to look again."""

_OUTLIER = 2.0
"""Times the median: such a step does not count."""

_AIM = 0.8
"""Of the limit: half of the windows are above what is aimed at."""

_FORGET = 0.7
_MOST_DOWN, _MOST_UP = 0.25, 2.0
"""Of the last duty, from window to window."""

_QUIET_S = 2.0
_QUIET_STEPS = 10
"""No step for so long: there is no trainer."""


# Events -------------------------------------------------------------------------------------


class StepEnded(msgspec.Struct, frozen=True):
    """The trainer has done a step."""

    seconds: float


class StagingBegan(msgspec.Struct, frozen=True):
    """A save is begun, and copies what it saves."""

    number: int


class SavingBegan(msgspec.Struct, frozen=True):
    """A save is staged, and is stored from now on; ``limit`` is its ``max_slowdown``."""

    number: int
    limit: float


class SavingEnded(msgspec.Struct, frozen=True):
    """It has ended in any way."""

    number: int


class Schedule(NamedTuple):
    """How much of a save's bytes are stored, and how much of its time is over."""

    stored: float
    elapsed: float


class TimePassed(msgspec.Struct, frozen=True):
    """So long has gone by since the last such event, and how far the saves are."""

    seconds: float
    schedules: Sequence[Schedule] = ()


# Commands -----------------------------------------------------------------------------------


class SetDuty(msgspec.Struct, frozen=True):
    """Uploaders work for this share of the time: 1 is all of it, 0 is a rest until the next one."""

    duty: float


PacingEvent: TypeAlias = StepEnded | StagingBegan | SavingBegan | SavingEnded | TimePassed


class PacingMachine:
    """One trainer's uploaders, whichever save they work for."""

    def __init__(self) -> None:
        self.duty = 1.0
        self._staging: set[int] = set()
        self._limits: dict[int, float] = {}
        self._undisturbed: deque[float] = deque(maxlen=_MAX_LOOK)
        self._disturbed: list[float] = []
        self._duties: list[float] = []
        # What is believed to keep within the limit, and the sums that the slope is made of.
        self._learned = 1.0
        self._duty_cost = 0.0
        self._duty_square = 0.0
        self._age = 0
        self._is_looking = False
        self._is_mixed = False
        self._is_behind = False
        self._last_s = 0.0
        self._quiet_s = math.inf  # before the first step there is no trainer
        self._is_quiet = True

    def handle(self, event: PacingEvent) -> list[SetDuty]:
        """Takes one event; returns the new duty, if it is another one."""
        match event:
            case StepEnded():
                self._on_step(event.seconds)
            case SavingBegan():
                self._on_began(event)
            case StagingBegan():
                self._staging.add(event.number)
                self._is_mixed = True
            case SavingEnded():
                self._staging.discard(event.number)
                self._limits.pop(event.number, None)
                self._is_mixed = self._is_mixed or not self._limits
            case TimePassed():
                self._on_time(event)
        commands = self._changed()
        self.validate()
        return commands

    def validate(self) -> None:
        """Asserts the invariants; called after each event, cheap."""
        assert MIN_DUTY <= self._learned <= 1.0
        assert self.duty == 0.0 or MIN_DUTY <= self.duty <= 1.0
        assert self._is_looking == (self.duty == 0.0)
        assert self._limits or self.duty == 1.0

    def _on_began(self, event: SavingBegan) -> None:
        is_first = not self._limits
        self._staging.discard(event.number)
        self._limits[event.number] = event.limit
        if is_first:
            self._age = 0
            self._is_behind = False
            self._is_mixed = True
            if not self._knows_usual() and not self._is_quiet:
                self._look()

    def _on_time(self, event: TimePassed) -> None:
        self._quiet_s += event.seconds
        self._is_quiet = self._quiet_s > max(_QUIET_S, _QUIET_STEPS * self._last_s)
        self._is_behind = any(
            schedule.stored < 2 * schedule.elapsed - SLACK for schedule in event.schedules
        )

    def _on_step(self, seconds: float) -> None:
        seconds = max(seconds, _CLOCK_S)
        self._quiet_s, self._is_quiet, self._last_s = 0.0, False, seconds
        if self._staging:
            pass  # neither disturbed by what is measured here, nor undisturbed
        elif self._is_mixed:  # something has changed in it
            self._is_mixed = False
        elif not self._limits:
            self._undisturbed.append(seconds)
        elif self.duty == 0.0:
            self._undisturbed.append(seconds)
            self._is_looking = not self._knows_usual()
        else:
            self._disturbed.append(seconds)
            self._duties.append(self.duty)
            if _suffices(self._disturbed, _WINDOW, _WINDOW_S, _MAX_WINDOW):
                self._judge()

    def _knows_usual(self) -> bool:
        return _suffices(self._undisturbed, _LOOK, _LOOK_S, _MAX_LOOK)

    def _judge(self) -> None:
        """Learns from a full window."""
        found, self._disturbed = self._disturbed, []
        duty, self._duties = fmean(self._duties), []
        if not self._knows_usual():
            self._look()
            return
        self._age += 1
        cost = _mean(found) / _mean(self._undisturbed) - 1.0
        duty_cost = _FORGET * self._duty_cost + duty * cost
        duty_square = _FORGET * self._duty_square + duty**2
        slope = duty_cost / duty_square
        limit = _AIM * min(self._limits.values())
        wanted = limit / slope if slope > limit else 1.0
        if self._age > _OLD and (wanted < self._learned or cost < -limit):
            self._look()
            return
        self._duty_cost, self._duty_square = duty_cost, duty_square
        lowest = max(MIN_DUTY, _MOST_DOWN * self._learned)
        self._learned = min(1.0, _MOST_UP * self._learned, max(lowest, wanted))

    def _look(self) -> None:
        self._undisturbed.clear()
        self._disturbed.clear()
        self._duties.clear()
        self._age = 0
        self._is_looking = True

    def _changed(self) -> list[SetDuty]:
        """Takes what follows from the state."""
        if not self._limits or self._staging or self._is_quiet or self._is_behind:
            self._is_looking = False
            duty = 1.0
        else:
            duty = 0.0 if self._is_looking else self._learned
        if duty == self.duty:
            return []
        self.duty = duty
        self._is_mixed = True
        return [SetDuty(duty)]


class Bursts:
    """When the uploaders of a process begin chunks, so that they keep a duty.

    Times are of any clock that does not go back.

    Attributes:
        duty: See ``SetDuty``.
    """

    def __init__(self) -> None:
        self.duty = 1.0
        self._num_working = 0
        self._begun_s = math.inf
        self._rests_until_s = -math.inf

    def set(self, duty: float) -> None:
        """Takes another duty: a rest ends, and a burst is what is begun from now on."""
        if duty != self.duty:
            self.duty = duty
            self._begun_s = math.inf
            self._rests_until_s = -math.inf

    def rest_s(self, now_s: float) -> float:
        """How long to rest before a chunk; infinite: until the duty or the burst is another."""
        if self.duty == 1.0:
            return 0.0
        is_over = self._num_working > 0 and now_s - self._begun_s >= BURST_S
        if self.duty == 0.0 or is_over:
            return math.inf
        return max(0.0, self._rests_until_s - now_s)

    def begin(self, now_s: float) -> None:
        """A chunk is begun."""
        self._begun_s = min(self._begun_s, now_s) if self._num_working else now_s
        self._num_working += 1

    def end(self, now_s: float) -> bool:
        """A chunk has ended; returns whether the burst has, too, so that the rest is known."""
        self._num_working -= 1
        if self._num_working or not 0.0 < self.duty < 1.0:
            return False
        burst_s = max(0.0, now_s - self._begun_s)
        self._rests_until_s = now_s + burst_s * (1.0 / self.duty - 1.0)
        return True


def _suffices(steps: Sequence[float], least: int, seconds: float, most: int) -> bool:
    return len(steps) >= least and (len(steps) >= most or sum(steps) >= seconds)


def _mean(steps: Sequence[float]) -> float:
    """Without outliers."""
    longest = _OUTLIER * sorted(steps)[len(steps) // 2]
    return fmean([seconds for seconds in steps if seconds <= longest])
