"""Limits how much uploads slow the trainer's steps.

Theory of operation. Steps that end while nothing is stored measure the usual step time. Steps that
end while saves are stored measure the cost, in windows of several steps. Costs grow with the *duty*
of the uploaders, the share of the time in which they work. Each window gives a slope; their
average, with less weight on older ones, gives the largest duty within the limit. Short saves share
a window, and the next save inherits the estimate.

1. Means are compared, without steps that took more than twice the median: uploads do not cause
   evaluations and stalls of a data loader. Medians would not do: a burst may affect one short step
   in ten.
2. Batches may get longer or shorter. If old measurements suggest a lower duty, or that uploads make
   the trainer faster, uploaders *look*: they rest for some steps while the usual step time is
   measured again. They also look when a save begins and no steps preceded it.
3. No duty is below ``MIN_DUTY``, except during a look, which is short.
4. Uploads are not slowed while a save lags behind its schedule: a straight line from its begin to
   half of its ``timeout_s``, less ``SLACK`` of it.
5. Uploads are not slowed while a save is staged: the trainer waits for it, or will, and staging may
   wait for memory. Nor without reported steps: there is no trainer to protect.
6. A duty is realised in *bursts*: all uploaders work at the same time, then rest together. The duty
   is the burst's share of both. A chunk in progress when the burst ends is finished and counts.

This module has no clock: ``actors/pace.py`` measures and waits.
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
"""Length of a burst, in seconds, about a training step: no chunk begins in an older burst."""

_WINDOW, _WINDOW_S, _MAX_WINDOW = 16, 1.0, 256
"""Size of a window: minimum number of steps, minimum seconds, maximum number of steps."""

_LOOK, _LOOK_S, _MAX_LOOK = 12, 0.25, 64
"""Size of a look, likewise."""

_CLOCK_S = 1e-6
"""Minimum length of a step, in seconds; prevents a division by zero."""

_OLD = 4
"""Number of windows after which measurements of the usual step time are old."""

_OUTLIER = 2.0
"""Multiple of the median above which a step does not count."""

_AIM = 0.8
"""Part of the limit that is aimed at: half of the windows exceed the aim."""

_FORGET = 0.7
_MOST_DOWN, _MOST_UP = 0.25, 2.0
"""Limits of the change of duty from window to window, as factors."""

_QUIET_S = 2.0
_QUIET_STEPS = 10
"""Time without a step after which there is no trainer: the larger of seconds and multiples of a
step.
"""


# Events -------------------------------------------------------------------------------------


class StepEnded(msgspec.Struct, frozen=True):
    """The trainer has finished a step."""

    seconds: float


class StagingBegan(msgspec.Struct, frozen=True):
    """A save has begun to copy its state."""

    number: int


class SavingBegan(msgspec.Struct, frozen=True):
    """A save is staged and is being stored; ``limit`` is its ``max_slowdown``."""

    number: int
    limit: float


class SavingEnded(msgspec.Struct, frozen=True):
    """A save has ended, with any outcome."""

    number: int


class Schedule(NamedTuple):
    """Stored share of a save's bytes, and elapsed share of its time."""

    stored: float
    elapsed: float


class TimePassed(msgspec.Struct, frozen=True):
    """Time since the last such event, and the progress of the saves."""

    seconds: float
    schedules: Sequence[Schedule] = ()


# Commands -----------------------------------------------------------------------------------


class SetDuty(msgspec.Struct, frozen=True):
    """Sets the share of the time in which uploaders work: 1 is all of it, 0 rests until the next
    one.
    """

    duty: float


PacingEvent: TypeAlias = StepEnded | StagingBegan | SavingBegan | SavingEnded | TimePassed


class PacingMachine:
    """Paces all uploaders of one trainer, across saves."""

    def __init__(self) -> None:
        self.duty = 1.0
        self._staging: set[int] = set()
        self._limits: dict[int, float] = {}
        self._undisturbed: deque[float] = deque(maxlen=_MAX_LOOK)
        self._disturbed: list[float] = []
        self._duties: list[float] = []
        # The duty believed to keep within the limit, and the sums for the slope.
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
        """Handles one event; returns the new duty, if it has changed."""
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
            pass  # staging disturbs such a step in ways that are not measured here
        elif self._is_mixed:  # the duty or the set of saves changed during the step
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
        """Applies the duty that follows from the state."""
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
    """Times the chunks of a process' uploaders to keep a duty.

    Times are of any monotonic clock.

    Attributes:
        duty: See ``SetDuty``.
    """

    def __init__(self) -> None:
        self.duty = 1.0
        self._num_working = 0
        self._begun_s = math.inf
        self._rests_until_s = -math.inf

    def set(self, duty: float) -> None:
        """Changes the duty; ends a rest, and a new burst begins."""
        if duty != self.duty:
            self.duty = duty
            self._begun_s = math.inf
            self._rests_until_s = -math.inf

    def rest_s(self, now_s: float) -> float:
        """Returns the seconds to rest before a chunk; infinite: until the duty or the burst
        changes.
        """
        if self.duty == 1.0:
            return 0.0
        is_over = self._num_working > 0 and now_s - self._begun_s >= BURST_S
        if self.duty == 0.0 or is_over:
            return math.inf
        return max(0.0, self._rests_until_s - now_s)

    def begin(self, now_s: float) -> None:
        """Records the begin of a chunk."""
        self._begun_s = min(self._begun_s, now_s) if self._num_working else now_s
        self._num_working += 1

    def end(self, now_s: float) -> bool:
        """Records the end of a chunk; returns whether the burst has ended, so that the rest is
        known.
        """
        self._num_working -= 1
        if self._num_working or not 0.0 < self.duty < 1.0:
            return False
        burst_s = max(0.0, now_s - self._begun_s)
        self._rests_until_s = now_s + burst_s * (1.0 / self.duty - 1.0)
        return True


def _suffices(steps: Sequence[float], least: int, seconds: float, most: int) -> bool:
    return len(steps) >= least and (len(steps) >= most or sum(steps) >= seconds)


def _mean(steps: Sequence[float]) -> float:
    """Returns the mean without outliers."""
    longest = _OUTLIER * sorted(steps)[len(steps) // 2]
    return fmean([seconds for seconds in steps if seconds <= longest])
