# SPDX-License-Identifier: Apache-2.0
"""Limits how much uploads slow the trainer's steps: a proportional controller.

``PaceController`` compares the mean times of steps during and without saves; their ratio less 1 is
the *slowdown*. After each window of steps it changes the *duty* of the uploaders, the share of the
time in which they work, in proportion to the distance of the slowdown from the limit. It keeps what
it learned; short saves share a window.

1. Steps of more than ``_OUTLIER`` medians (evaluations, stalls of a data loader) do not count.
Medians alone would miss a burst that affects one short step in ten.
2. No duty is below ``MIN_DUTY``: a save always ends. So small a duty hardly slows a step, so such
steps measure the usual time again. A trainer that became slower by itself lowers the duty to the
minimum once. A save starts there if the usual time is unknown.
3. Steps during a save that are shorter than usual by more than the limit show that the usual time
is outdated: it is measured again.
4. Uploads are not slowed while a save is behind its schedule (``is_behind``) or is staged, as the
trainer waits for it or will, and staging may wait for memory. Nor without reported steps: there is
no trainer to protect.

A duty is realised in *bursts* (``Bursts``): all uploaders work at the same time, then rest
together. A chunk in progress at the burst's end is finished and counts.

This module has no clock: ``runtime/pacing.py`` and ``actors/items.py`` measure and wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median, pstdev

MIN_DUTY = 0.01
BURST_S = 0.02
"""Length of a burst, about a training step: no chunk begins in an older burst."""

_WINDOW, _WINDOW_S, _MAX_WINDOW = 16, 1.0, 256
"""Minimum steps, minimum seconds, maximum steps."""

_CLOCK_S = 1e-6
_OUTLIER = 8.0
"""Multiple of the median above which a step does not count. Bursts of compressing threads, which
compete for the GIL, make a short step five times as long.
"""

_AIM = 0.8
"""Part of the limit that is aimed at: half of the windows exceed the aim."""

_PRECISION = 0.25
"""Maximum standard error of a mean, as a part of the slowdown or the limit, the larger one."""

_MOST_DOWN, _MOST_UP = 0.25, 2.0
"""Limits of the change of duty per window, as factors."""

_QUIET_S, _QUIET_STEPS = 2.0, 10
"""Time without a step after which there is no trainer: the larger of seconds and steps."""

_SCHEDULE_SLACK = 0.05
"""Share of its bytes by which a save may lag."""


def is_behind(stored: float, elapsed: float) -> bool:
    """Returns whether a save is behind a straight line to its end at half of its ``timeout_s``.

    Args:
        stored: Stored share of its bytes.
        elapsed: Elapsed share of its ``timeout_s``.
    """
    return stored < 2 * elapsed - _SCHEDULE_SLACK


class PaceController:
    """Sets the duty of all uploaders of one trainer, across saves."""

    def __init__(self) -> None:
        self.duty = 1.0
        self._staging: set[int] = set()
        self._limits: dict[int, float] = {}
        self._usual: deque[float] = deque(maxlen=_MAX_WINDOW)
        self._window: list[float] = []
        self._window_duty = 1.0
        self._learned = 1.0
        self._is_mixed = False
        self._is_behind = False
        self._last_s = 0.0
        self._quiet_s = math.inf  # before the first step there is no trainer

    def begin_staging(self, number: int) -> None:
        self._staging.add(number)
        self._is_mixed = True
        self._update()

    def begin_storing(self, number: int, limit: float) -> None:
        """A save is staged; ``limit`` is its ``max_slowdown``."""
        self._staging.discard(number)
        self._limits[number] = limit
        self._is_mixed = True
        self._update()

    def end(self, number: int) -> None:
        self._staging.discard(number)
        self._limits.pop(number, None)
        self._is_mixed = True
        if not self._limits:
            self._is_behind = False
        self._update()

    def pass_time(self, seconds: float, *, is_behind: bool) -> None:
        """Adds the time since the last call."""
        self._quiet_s += seconds
        self._is_behind = is_behind
        self._update()

    def end_step(self, seconds: float) -> None:
        seconds = max(seconds, _CLOCK_S)
        self._quiet_s, self._last_s = 0.0, seconds
        if self._is_mixed:  # the duty or the set of saves changed during the step
            self._is_mixed = False
        elif self._staging:
            pass  # staging disturbs steps, too
        elif not self._limits:
            self._usual.append(seconds)
        elif not self._is_behind:
            if self._window_duty != self.duty:
                self._window, self._window_duty = [], self.duty
            self._window.append(seconds)
            if len(self._window) % _WINDOW == 0 and _suffices(self._window):
                self._judge()
        self._update()

    def _judge(self) -> None:
        """Learns from a window, if its mean is known well enough."""
        limit = min(self._limits.values())
        mean_s, error_s = _mean(self._window)
        if not _suffices(self._usual):
            self._usual.extend(self._window)
        usual_s, _ = _mean(self._usual)
        slowdown = mean_s / usual_s - 1.0
        precision = _PRECISION * max(limit, abs(slowdown))
        if error_s > precision * mean_s and len(self._window) < _MAX_WINDOW:
            return
        window, self._window = self._window, []
        if self.duty == MIN_DUTY:
            self._usual.clear()
            self._usual.extend(window)
            slowdown = 0.0
        elif slowdown < -limit:
            self._usual.clear()
            return
        factor = 2.0 - slowdown / (_AIM * limit)
        factor = min(_MOST_UP, max(_MOST_DOWN, factor))
        self._learned = min(1.0, max(MIN_DUTY, factor * self._learned))

    def _update(self) -> None:
        is_quiet = self._quiet_s > max(_QUIET_S, _QUIET_STEPS * self._last_s)
        if not self._limits or self._staging or is_quiet or self._is_behind:
            duty = 1.0
        elif not _suffices(self._usual):
            duty = MIN_DUTY
        else:
            duty = self._learned
        if duty != self.duty:
            self.duty = duty
            self._is_mixed = True


def _suffices(steps: Sequence[float]) -> bool:
    return len(steps) >= _WINDOW and (len(steps) >= _MAX_WINDOW or sum(steps) >= _WINDOW_S)


def _mean(steps: Sequence[float]) -> tuple[float, float]:
    """Returns the mean without outliers, and its standard error."""
    longest = _OUTLIER * median(steps)
    counted = [seconds for seconds in steps if seconds <= longest]
    return fmean(counted), pstdev(counted) / math.sqrt(len(counted))


class Bursts:
    """Times the chunks of a process' uploaders to keep a duty, by any monotonic clock."""

    def __init__(self) -> None:
        self.duty = 1.0
        self._num_working = 0
        self._begun_s = math.inf
        self._rests_until_s = -math.inf

    def set(self, duty: float) -> None:
        if duty != self.duty:
            self.duty = duty
            self._begun_s = math.inf
            self._rests_until_s = -math.inf

    def rest_s(self, now_s: float) -> float:
        """Returns the seconds to rest before a chunk; infinite: until the duty or burst changes."""
        if self.duty == 1.0:
            return 0.0
        is_over = self._num_working > 0 and now_s - self._begun_s >= BURST_S
        if self.duty == 0.0 or is_over:
            return math.inf
        return max(0.0, self._rests_until_s - now_s)

    def begin(self, now_s: float) -> None:
        self._begun_s = min(self._begun_s, now_s) if self._num_working else now_s
        self._num_working += 1

    def end(self, now_s: float) -> bool:
        """Ends a chunk; returns whether the burst has ended, so that the rest is known."""
        self._num_working -= 1
        if self._num_working or not 0.0 < self.duty < 1.0:
            return False
        burst_s = max(0.0, now_s - self._begun_s)
        self._rests_until_s = now_s + burst_s * (1.0 / self.duty - 1.0)
        return True
