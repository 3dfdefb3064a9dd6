# SPDX-License-Identifier: Apache-2.0
"""When to save: policies of two kinds.

*Step policies* depend on the step alone. All ranks call the manager with the same steps, so each
rank decides for itself and all decide the same, without a message. ``due`` runs in every step of
the training, in about 0.1 us per policy.

*Asked policies* depend on clocks, metrics, measured costs or notices, which differ between ranks.
Rank 0 asks them, and the ranks agree on a call that saves (``protocol.agreement``). Readings of
clocks are handed in, in seconds of one clock.

Policies are joined by ``|``: a save is due if it is for one of them.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from actorsnap.errors import UsageError
from actorsnap.planning.keeping import (
    check_count,
    checked_steps,
    every_text,
    metric_value,
)
from actorsnap.tracebacks import short_namespace


class SavePolicy(ABC):
    """Decides when to save. Combine policies with ``|``."""

    __slots__ = ()

    @abstractmethod
    def due(self, step: int, *, is_first: bool) -> str:
        """Returns why to save at ``step``; empty if no save is due.

        Args:
            is_first: Whether this is the manager's first step.
        """

    def at_end(self) -> str:
        """Returns why to save the last step when the run ends; empty if no save is due."""
        return ""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return (
            SaveAnyOf((*parts_of(self), *parts_of(other)))
            if isinstance(other, SavePolicy)
            else NotImplemented
        )


@dataclass(frozen=True, slots=True)
class SaveAnyOf(SavePolicy):
    """Saves when one of the policies does."""

    policies: tuple[SavePolicy, ...]

    def due(self, step: int, *, is_first: bool) -> str:
        reasons = ""
        for policy in self.policies:
            if reason := policy.due(step, is_first=is_first):
                reasons = f"{reasons}, {reason}" if reasons else reason
        return reasons

    def at_end(self) -> str:
        return ", ".join(filter(None, [policy.at_end() for policy in self.policies]))


def parts_of(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, SaveAnyOf) else (policy,)


@dataclass(frozen=True, slots=True)
class SaveSteps(SavePolicy):
    """Saves at each step with ``step % n == offset``. If ``offset`` is 0, this includes step 0."""

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_count(self.n, "every.steps(n)", "every.steps(500)")
        check_count(self.offset, "every.steps(n, offset)", "offset=0", least=0)
        if self.offset >= self.n:
            raise UsageError(
                f"every.steps({self.n}, offset={self.offset}) is never due: write "
                f"offset={self.offset % self.n}"
            )

    def due(self, step: int, *, is_first: bool) -> str:
        return every_text(self.n, "step") if step % self.n == self.offset else ""


@dataclass(frozen=True, slots=True)
class SaveAt(SavePolicy):
    """Saves at the given steps."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_steps(self.steps, "every.at"))

    def due(self, step: int, *, is_first: bool) -> str:
        return f"at {step}" if step in self.steps else ""


@dataclass(frozen=True, slots=True)
class SaveFirst(SavePolicy):
    """Saves at the first step of each run, including one that continues a snapshot."""

    def due(self, step: int, *, is_first: bool) -> str:
        return "first step" if is_first else ""


@dataclass(frozen=True, slots=True)
class SaveLast(SavePolicy):
    """Saves the last step when the manager is closed."""

    def due(self, step: int, *, is_first: bool) -> str:
        return ""

    def at_end(self) -> str:
        return "last step"


@dataclass(frozen=True, slots=True)
class SaveCustom(SavePolicy):
    """Saves at the steps for which ``is_due`` returns true.

    ``is_due`` must depend only on the step. Otherwise, ranks could save different steps.
    """

    is_due: Callable[[int], bool]

    def __post_init__(self) -> None:
        if not callable(self.is_due):
            raise UsageError(
                f"every.custom({self.is_due!r}): write a function of the step, such as "
                "lambda step: step % 500 == 0"
            )

    def due(self, step: int, *, is_first: bool) -> str:
        is_due: object = self.is_due(step)
        if is_due is None or isinstance(is_due, str):  # a forgotten return would never save
            raise UsageError(
                f"every.custom: the function returned {is_due!r}: return True or False"
            )
        return "custom" if is_due else ""


@dataclass(frozen=True, slots=True)
class SaveHistory:
    """Times and numbers by which ``AskedPolicy`` objects judge.

    Attributes:
        begun_s: When the last save was begun, or the first call was made.
        num_saves: Number of saves begun so far.
        is_pending: The last save is not stored yet.
        stored_s: When the last save was stored.
        cost_s: Time that the last stored save cost the trainer; None before the first one.
    """

    begun_s: float
    num_saves: int = 0
    is_pending: bool = False
    stored_s: float = -math.inf
    cost_s: float | None = None


class AskedPolicy(SavePolicy):
    """A policy that only rank 0 asks."""

    __slots__ = ()

    def due(self, step: int, *, is_first: bool) -> str:
        return ""

    def due_s(self, history: SaveHistory) -> float:
        """Returns the time from which a save is due; infinite if no clock makes one due."""
        return math.inf

    @property
    @abstractmethod
    def reason(self) -> str:
        """The reason for a save that the clock made due."""


@dataclass(frozen=True, slots=True)
class SaveMinutes(AskedPolicy):
    """Saves when the previous save began at least ``t`` minutes ago."""

    t: float

    def __post_init__(self) -> None:
        _check_positive(self.t, "every.minutes(t)", "every.minutes(20), or every.minutes(0.5)")

    def due_s(self, history: SaveHistory) -> float:
        return history.begun_s + 60 * self.t

    @property
    def reason(self) -> str:
        return every_text(f"{self.t:g}", "minute")


@dataclass(frozen=True, slots=True)
class SavePace(AskedPolicy):
    """Saves as soon as the previous save is stored, but at most once every ``min_interval_s``."""

    min_interval_s: float = 0.0

    def __post_init__(self) -> None:
        _check_number(self.min_interval_s, "every.pace(min_interval_s)", "every.pace(60)")

    def due_s(self, history: SaveHistory) -> float:
        if history.is_pending:
            return math.inf
        if not history.num_saves:
            return history.begun_s
        return max(history.stored_s, history.begun_s + self.min_interval_s)

    @property
    def reason(self) -> str:
        return "the last one is stored"


@dataclass(frozen=True, slots=True)
class SaveOverhead(AskedPolicy):
    """Saves as often as possible while saves cost at most ``part`` of the training time.

    The cost is the time that the trainer waits, and the time by which steps take longer. The first
    save is due at once; its measured cost determines when the next one is due.
    """

    part: float = 0.02

    def __post_init__(self) -> None:
        _check_positive(self.part, "every.overhead(part)", "every.overhead(0.02) for 2 %")
        if self.part > 1:
            raise UsageError(
                f"every.overhead({self.part!r}): write a part of the time, such as 0.02 for 2 %"
            )

    def due_s(self, history: SaveHistory) -> float:
        if history.is_pending:
            return math.inf
        return history.begun_s + (history.cost_s or 0.0) / self.part

    @property
    def reason(self) -> str:
        return f"overhead {self.part:g}"


@dataclass(frozen=True, slots=True)
class SaveImprovement(AskedPolicy):
    """Saves when a metric is better than ever before in the run, by more than ``min_delta``."""

    metric: str
    mode: str
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.mode not in ("min", "max"):
            raise UsageError(
                f"every.improvement({self.metric!r}, {self.mode!r}): write for example "
                'every.improvement("val/loss", "min")'
            )
        _check_number(self.min_delta, "every.improvement(min_delta)", "min_delta=0.001")

    def is_better(self, value: float, best: float | None) -> bool:
        """NaN is never better; any number is better than None."""
        if math.isnan(value) or best is None:
            return not math.isnan(value)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta

    @property
    def reason(self) -> str:
        return f"{self.metric} improved"


def watched_metrics(policy: SavePolicy) -> list[str]:
    """Returns the metrics whose improvement a policy saves."""
    return [part.metric for part in parts_of(policy) if isinstance(part, SaveImprovement)]


@dataclass(frozen=True, slots=True)
class SaveNotice(AskedPolicy):
    """Saves when a notice says that the job will end soon, if there is enough time."""

    @property
    def reason(self) -> str:
        return "notice"


def _check_number(value: object, name: str, example: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise UsageError(f"{name} must be a number of at least 0, not {value!r}: {example}")


def _check_positive(value: object, name: str, example: str) -> None:
    _check_number(value, name, example)
    if not value:
        raise UsageError(f"{name} must be greater than 0: {example}")


class Improvements:
    """The best values so far of the metrics that policies watch.

    Attributes:
        best: By metric and mode. Stored with each snapshot.
    """

    def __init__(self, policy: SavePolicy) -> None:
        self._policies = [p for p in parts_of(policy) if isinstance(p, SaveImprovement)]
        self.best: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._policies)

    def judge(self, metrics: Mapping[str, object]) -> str:
        """Returns why to save; empty if nothing has improved. Remembers better values.

        Raises:
            UsageError: A metric is not a number.
        """
        found: list[str] = []
        for policy in self._policies:
            if policy.metric not in metrics:
                continue
            try:
                value = metric_value(metrics[policy.metric])
            except TypeError as error:
                raise UsageError(f"metric {policy.metric!r}: {error}") from None
            key = f"{policy.metric} ({policy.mode})"
            best = self.best.get(key)
            if policy.is_better(value, best) and math.isfinite(value):
                self.best[key] = value
                found.append(f"{policy.reason}: {value:g}")
        return ", ".join(found)


_NUM_STEPS = 16
"""Number of latest steps for the median."""


class SaveCosts:
    """Measures steps, and what saves cost the trainer. All times are handed in, in seconds.

    Attributes:
        step_s: Median of the latest steps without a save in flight; 0 if there was none.
        blocked_s: Time for which the last save blocked the trainer.
        save_s: Time from the start of the last save to its commit.
        slowdown_s: Extra time of the steps while the last save was in flight.
    """

    def __init__(self) -> None:
        self.blocked_s = 0.0
        self.save_s = 0.0
        self.slowdown_s = 0.0
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._left_s: float | None = None
        self._during_s = 0.0
        self._num_during = 0

    @property
    def step_s(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    @property
    def cost_s(self) -> float:
        return self.blocked_s + self.slowdown_s

    def enter(self, now_s: float, *, is_pending: bool) -> None:
        """Notes the beginning of a ``maybe_save`` call, which ends a step."""
        left_s = self._left_s
        if left_s is not None:
            if is_pending:
                self._during_s += now_s - left_s
                self._num_during += 1
            else:
                self._steps.append(now_s - left_s)
        self._left_s = now_s

    def leave(self, now_s: float) -> None:
        """Notes the end of the call."""
        self._left_s = now_s

    def staged(self, blocked_s: float) -> None:
        """Notes that a save is staged and the trainer continues."""
        self.blocked_s = blocked_s
        self._during_s, self._num_during = 0.0, 0

    def stored(self, save_s: float) -> None:
        """Notes that this save is committed."""
        self.save_s = save_s
        self.slowdown_s = max(0.0, self._during_s - self._num_during * self.step_s)

    def has_time(self, left_s: float, *, num_steps: int, in_flight_s: float | None) -> bool:
        """Returns whether a save can be committed within ``left_s``.

        Args:
            num_steps: Steps until it begins.
            in_flight_s: Age of a save in flight, which must end first; None without one.
        """
        wait_s = 0.0 if in_flight_s is None else max(0.0, self.save_s - in_flight_s)
        needed_s = num_steps * self.step_s + wait_s + self.blocked_s + _SAFETY * self.save_s
        return left_s > 0 and left_s >= needed_s


_SAFETY = 1.5
"""Factor on the duration of the last save."""


@short_namespace
class every:
    """Policies for saving, to be joined by ``|``: ``every.steps(500) | every.last()``."""

    steps = SaveSteps
    at = SaveAt
    first = SaveFirst
    last = SaveLast
    custom = SaveCustom
    minutes = SaveMinutes
    improvement = SaveImprovement
    notice = SaveNotice
    pace = SavePace
    overhead = SaveOverhead
