# SPDX-License-Identifier: Apache-2.0
"""Decides which steps a root keeps: timeline of a run, retention policies, a verdict on each step.

Policies are pure functions of the stored steps. They have no memory, no clock and no storage, so a
new manager decides as the last one did. ``a | b`` keeps the steps that ``a`` keeps and those that
``b`` keeps. For every policy, and for ``custom`` if its function has the same properties:

1. Judging the kept steps again deletes nothing more, even if other policies or protections kept
more.
2. A deleted step is not wanted again, however many newer steps come.

This is why grids are absolute, and each cell keeps its *first* step: of ``step // k``, or of an
hour in UTC. A distance between kept steps, or the last step of a cell, depends on other steps.

Clocks differ between machines, and jump. So times are first made monotone along the timeline: no
step is earlier than the one before it. Only grids of time and ``newer_than`` use them.
"""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Literal, SupportsIndex

from actorsnap.errors import UsageError
from actorsnap.format.steps import StepName
from actorsnap.tracebacks import short_namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """A committed snapshot at a root, as ``KeepPolicy`` sees it.

    Attributes:
        created_s: Time of its creation, in seconds since 1970, UTC.
    """

    name: StepName
    created_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The training step."""
        return self.name.step

    @property
    def generation(self) -> int:
        """The generation that saved it."""
        return self.name.generation


# Timelines


def current_generation(
    names: Iterable[StepName], parents: Mapping[int, StepName | None]
) -> int | None:
    """Returns the generation that a new run continues; None if there is none.

    It is the greatest one that stored something or continued a snapshot. A fresh start that stored
    nothing does not count: it abandoned nothing.
    """
    stored = {name.generation for name in names}
    continued = {generation for generation, parent in parents.items() if parent is not None}
    return max(stored | continued, default=None)


def timeline(
    names: Iterable[StepName], parents: Mapping[int, StepName | None], newest: int
) -> list[StepName]:
    """Returns the names that led to the generation ``newest``, oldest first.

    These are its own, those of its parent's generation up to the parent's step, and so on. Other
    names are abandoned branches.

    Args:
        parents: Per generation the snapshot that it continued, None for a fresh start. The timeline
            begins where a generation is missing.
    """
    limits: dict[int, float] = {}
    generation, limit = newest, math.inf
    while True:
        limits[generation] = limit
        parent = parents.get(generation)
        if parent is None or parent.generation >= generation:  # damage: records would go in circles
            break
        generation, limit = parent.generation, min(limit, parent.step)
    found = {name for name in names if name.step <= limits.get(name.generation, -1)}
    return sorted(found, key=lambda name: (name.generation, name.step))


def unread_run(
    names: Collection[StepName],
    generations: Collection[int],
    parents: Mapping[int, StepName | None],
    *,
    wanted: Collection[StepName],
) -> int | None:
    """Returns the run whose record must be read to find the newest wanted snapshot, if any.

    Finds the end of a timeline of hundreds of runs with few reads.

    Args:
        names: See ``timeline``.
        generations: Generations with a run record.
        parents: See ``timeline``; only from the records read so far.
    """
    stored = {name.generation for name in names}
    newest = max(stored, default=0)
    generation, limit = newest, math.inf
    for later in sorted([g for g in generations if g > newest], reverse=True):
        if later not in parents:
            return later
        if parents[later] is not None:
            generation = later
            break
    while generation and not any(n.generation == generation and n.step <= limit for n in wanted):
        if generation in generations and generation not in parents:
            return generation
        parent = parents.get(generation)
        if parent is None or parent.generation >= generation:
            break
        generation, limit = parent.generation, min(limit, parent.step)
    return None


def leftovers(
    names: Collection[StepName],
    intents: Collection[StepName],
    *,
    committed: Collection[StepName],
    damaged: Collection[StepName],
    generation: int,
) -> set[StepName]:
    """Returns the names of unfinished deletions and saves, which a manager's pass cleans up.

    A folder without a commit object is deleted if no later save can take its name: it has an
    earlier generation, or an earlier step than the newest one of ``generation``. The intent of a
    committed snapshot is deleted: the reason for the deletion may no longer hold.

    Args:
        names: Folders at the root, without saves in flight.
        intents: Deletions that have begun.
        damaged: Names whose commit object cannot be read.
        generation: The manager's generation.
    """
    stored = {*committed, *damaged}
    own = [name.step for name in stored if name.generation == generation]
    newest = (generation, max(own, default=-1))
    unfinished = {
        name for name in {*names, *intents} - stored if (name.generation, name.step) < newest
    }
    return unfinished | ({*intents} & {*committed})


# Policies


class KeepPolicy(ABC):
    """Decides which steps to keep. Combine policies with ``|``."""

    __slots__ = ()

    @abstractmethod
    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        """Returns the steps to keep, with the reason for each.

        Args:
            steps: In timeline order, oldest first; without duplicates.
        """

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return (
            KeepAnyOf((*_parts(self), *_parts(other)))
            if isinstance(other, KeepPolicy)
            else NotImplemented
        )


@dataclass(frozen=True, slots=True)
class KeepAnyOf(KeepPolicy):
    """Keeps each step that one of the policies keeps."""

    policies: tuple[KeepPolicy, ...]

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        reasons: dict[StepName, str] = {}
        for policy in self.policies:
            for name, reason in policy.judge(steps).items():
                reasons[name] = f"{reasons[name]}, {reason}" if name in reasons else reason
        return reasons


def kept_metrics(policy: KeepPolicy) -> list[str]:
    """Returns the metrics that a policy compares."""
    return [part.metric for part in _best_parts(policy)]


def unmeasured(policy: KeepPolicy, verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Counts the steps that stay only because they lack a metric, by metric.

    In an ordinary run, up to ``pending`` steps wait, and one more whose metric comes next. Metrics
    with no more than these are left out.
    """
    parts = _best_parts(policy)
    waiting = {part.waiting for part in parts}
    held = [verdict.reasons for verdict in verdicts if waiting.issuperset(verdict.reasons)]
    counts = {part: sum(part.waiting in reasons for reasons in held) for part in parts}
    return {part.metric: count for part, count in counts.items() if count > part.pending + 1}


def _best_parts(policy: KeepPolicy) -> list[KeepBest]:
    return [part for part in _parts(policy) if isinstance(part, KeepBest)]


def _parts(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.policies if isinstance(policy, KeepAnyOf) else (policy,)


@dataclass(frozen=True, slots=True)
class KeepAll(KeepPolicy):
    """Keeps every step."""

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        return {step.name: "all" for step in steps}


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keeps the ``n`` newest steps."""

    n: int

    def __post_init__(self) -> None:
        check_count(self.n, "keep.last(n)", "keep.last(1)")

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        return {step.name: f"last {self.n}" for step in steps[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keeps the ``n`` steps with the best value of a metric.

    Of two steps with equal values, the older one is better. NaN is worse than any number. A step
    without the metric stays until ``pending`` newer steps have the metric, because it may still be
    recorded. Then the step counts as NaN. The newer steps also stay until then, because deleting
    them would restart the count.
    """

    metric: str
    mode: Literal["min", "max"]
    n: int = 1
    pending: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(
                f'keep.best: {self.metric!r} names no metric: write keep.best("loss", "min")'
            )
        if self.mode not in ("min", "max"):
            raise UsageError(
                f'keep.best({self.metric!r}, {self.mode!r}): write "min" if small values are good, '
                'or "max"'
            )
        call = f"keep.best({self.metric!r}, {self.mode!r}"
        check_count(self.n, f"{call}, n=...)", "n=1")
        check_count(self.pending, f"{call}, pending=...)", "pending=0", least=0)

    @property
    def waiting(self) -> str:
        """The reason of a step that stays because it lacks the metric."""
        return f"{self.metric} may still be recorded"

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        reasons: dict[StepName, str] = {}
        judged: list[tuple[StepName, float]] = []
        newer: list[StepName] = []  # with the metric
        counted = 0  # of them, those newer than the oldest step that waits
        for step in reversed(steps):
            if self.metric in step.metrics:
                newer.append(step.name)
                judged.append((step.name, step.metrics[self.metric]))
            elif len(newer) >= self.pending:
                judged.append((step.name, math.nan))
            else:
                reasons[step.name] = self.waiting
                counted = len(newer)
        for name in newer[:counted]:
            reasons[name] = f"{self.metric} of an older step may still be recorded"
        judged.reverse()
        judged.sort(key=self._rank)  # stable: of equal values the older one comes first
        for name, value in judged[: self.n]:
            reasons[name] = f"best {self.metric} ({self.mode}): {value:.6g}"
        return reasons

    def _rank(self, judged: tuple[StepName, float]) -> tuple[bool, float]:
        _, value = judged
        if math.isnan(value):
            return True, 0.0
        return False, value if self.mode == "min" else -value


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(KeepPolicy):
    """Keeps the first step at or after each multiple of ``steps``."""

    steps: int

    def __post_init__(self) -> None:
        check_count(self.steps, "keep.every(steps=...)", "keep.every(steps=1000)")

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        cells = [str(step.step // self.steps) for step in steps]
        return {step.name: every_text(self.steps, "step") for _, step in _firsts(cells, steps)}


Period = Literal["hourly", "daily", "weekly", "monthly", "yearly"]


def _iso_week(time: datetime) -> str:
    year, week, _ = time.isocalendar()
    return f"{year}-W{week:02}"


_CELL_OF: Mapping[Period, Callable[[datetime], str]] = {
    "hourly": lambda time: time.isoformat(timespec="hours").removesuffix("+00:00"),
    "daily": lambda time: time.date().isoformat(),
    "weekly": _iso_week,
    "monthly": lambda time: time.date().isoformat()[:7],
    "yearly": lambda time: time.date().isoformat()[:4],
}


@dataclass(frozen=True, slots=True)
class KeepThinned(KeepPolicy):
    """Keeps the first step of each of the ``n`` newest periods, in UTC, that have steps."""

    period: Period
    n: int

    def __post_init__(self) -> None:
        call = f"keep.thinned({self.period}=...)"
        check_count(self.n, call, f"{self.period}=1, or leave it out")

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        cell_of = _CELL_OF[self.period]
        cells = [cell_of(_utc(time_s)) for time_s in _times_of(steps)]
        firsts = list(_firsts(cells, steps))[-self.n :]
        return {step.name: f"{self.period} {cell}" for cell, step in firsts}


def thinned(
    *,
    hourly: int | None = None,
    daily: int | None = None,
    weekly: int | None = None,
    monthly: int | None = None,
    yearly: int | None = None,
) -> KeepPolicy:
    """Keeps the first step of each of the newest hours, days, ISO weeks, months and years.

    Periods are in UTC. Periods without steps do not count.
    """
    numbers: dict[Period, int | None] = {
        "hourly": hourly,
        "daily": daily,
        "weekly": weekly,
        "monthly": monthly,
        "yearly": yearly,
    }
    policies = [KeepThinned(period, n) for period, n in numbers.items() if n is not None]
    if not policies:
        raise UsageError("keep.thinned() keeps nothing: write keep.thinned(hourly=24, daily=7)")
    return policies[0] if len(policies) == 1 else KeepAnyOf(tuple(policies))


@dataclass(frozen=True, slots=True)
class KeepNewerThan(KeepPolicy):
    """Keeps steps that are at most ``age`` older than the newest one."""

    age: timedelta

    def __post_init__(self) -> None:
        # A number is refused: in a policy that deletes, 5 must not be seconds for one reader and
        # days for another.
        if not isinstance(self.age, timedelta) or self.age <= timedelta():
            raise UsageError(
                f"keep.newer_than({self.age!r}) takes a timedelta of more than 0: write "
                "keep.newer_than(timedelta(days=2))"
            )

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        times = _times_of(steps)
        age_s = self.age.total_seconds()
        reason = f"newer than {_text_of_seconds(age_s)}"
        return {
            step.name: reason
            for step, time_s in zip(steps, times, strict=True)
            if times[-1] - time_s <= age_s
        }


@dataclass(frozen=True, slots=True)
class KeepAt(KeepPolicy):
    """Keeps the given steps."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_steps(self.steps, "keep.at"))

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        return {step.name: f"at {step.step}" for step in steps if step.step in self.steps}


Chosen = StoredStep | StepName | SupportsIndex


@dataclass(frozen=True, slots=True)
class KeepCustom(KeepPolicy):
    """Keeps the steps that ``choose`` returns, as steps, names or numbers.

    ``choose`` gets the steps of the run, oldest first. Choose each step by its own properties.
    A choice by position from the oldest (``steps[::2]``) deletes more in every pass, because the
    deleted steps are missing the next time. Returned steps that are not stored are ignored.
    """

    choose: Callable[[Sequence[StoredStep]], Iterable[Chosen]]

    def __post_init__(self) -> None:
        if not callable(self.choose):
            raise UsageError(
                f"keep.custom({self.choose!r}): write a function of the steps that returns the "
                "ones to keep, such as lambda steps: steps[-3:]"
            )

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        chosen = self.choose(tuple(steps))
        # A result that is not understood must not delete anything.
        if not isinstance(chosen, Iterable) or isinstance(chosen, str | bytes):
            raise UsageError(
                f"keep.custom: the function returned {chosen!r}: return a list of steps to keep"
            )
        wanted = {_name_or_number(choice) for choice in chosen}
        return {s.name: "custom" for s in steps if s.name in wanted or s.step in wanted}


def _name_or_number(choice: object) -> StepName | int:
    if isinstance(choice, StoredStep):
        return choice.name
    if isinstance(choice, StepName):
        return choice
    return _integer(choice, "keep.custom: the function returned", "return the steps to keep")


@short_namespace
class keep:
    """Retention policies, to be joined by ``|``: ``keep.last(3) | keep.best("loss", "min")``."""

    all = KeepAll
    last = KeepLast
    best = KeepBest
    every = KeepEvery
    thinned = staticmethod(thinned)
    newer_than = KeepNewerThan
    at = KeepAt
    custom = KeepCustom


def _times_of(steps: Sequence[StoredStep]) -> list[float]:
    return list(accumulate([step.created_s for step in steps], max))


def _utc(time_s: float) -> datetime:
    try:
        return datetime.fromtimestamp(time_s, UTC)
    except (ValueError, OverflowError, OSError):  # beyond the years 1 to 9999
        return datetime.min.replace(tzinfo=UTC) if time_s < 0 else datetime.max.replace(tzinfo=UTC)


def _firsts(cells: Sequence[str], steps: Sequence[StoredStep]) -> Iterator[tuple[str, StoredStep]]:
    """Yields the first step of each cell; oldest first."""
    seen = set()
    for cell, step in zip(cells, steps, strict=True):
        if cell not in seen:
            seen.add(cell)
            yield cell, step


def _text_of_seconds(seconds: float) -> str:
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next((u for u in units if seconds >= u[1]), units[-1])
    return f"{round(seconds / size, 2):.6g} {unit}"


# Arguments, also of ``planning.cadence``


def _integer(value: object, call: str, instead: str) -> int:
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    raise UsageError(f"{call} {value!r}: {instead}")


_WHOLE_NUMBER = re.compile(r" *([0-9]+)(?:\.0)? *")


def every_text(count: object, unit: str) -> str:
    """Returns for example ``"every 500 steps"`` or ``"every step"``."""
    return f"every {unit}" if str(count) == "1" else f"every {count} {unit}s"


def check_count(value: object, call: str, instead: str, *, least: int = 1) -> None:
    """Raises UsageError unless ``value`` is an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        given = _WHOLE_NUMBER.fullmatch(str(value)) if isinstance(value, str | float) else None
        if given is not None and int(given[1]) >= least:
            instead = re.sub("[0-9]+", str(int(given[1])), instead, count=1)
        raise UsageError(f"{call} takes an int of at least {least}, not {value!r}: write {instead}")


def checked_steps(steps: object, call: str) -> frozenset[int]:
    """Returns steps as a set; refuses anything else."""
    instead = f"write {call}([500, 1000])"
    if not isinstance(steps, Iterable) or isinstance(steps, str | bytes):
        raise UsageError(f"{call}({steps!r}): {instead}")
    found = frozenset([_integer(step, f"{call}: no step is", instead) for step in steps])
    if not found or min(found) < 0:
        raise UsageError(f"{call} takes steps from 0 on, not {sorted(found)}: {instead}")
    return found


# Verdicts


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step is kept. A step that is deleted has no reasons."""

    name: StepName
    keeps: bool
    reasons: tuple[str, ...]


def judge(
    steps: Sequence[StoredStep],
    policy: KeepPolicy,
    *,
    protected: Mapping[StepName, str],
    valid: Collection[StepName],
    min_valid: int = 2,
) -> list[Verdict]:
    """Returns a verdict on each step, in the same order.

    Under any policy, the newest step, the newest verified one and the ``min_valid`` newest verified
    ones stay. Nothing is deleted while fewer are verified.

    Args:
        steps: In timeline order, oldest first.
        protected: Steps that stay for other reasons: pinned, in flight, just restored from.
        valid: Steps that were verified.
    """
    check_count(min_valid, "min_valid", "min_valid=1")
    names = list(dict.fromkeys([step.name for step in steps]))
    reasons: dict[StepName, list[str]] = {name: [] for name in names}
    unique = list({step.name: step for step in steps}.values())
    for part in _parts(policy):
        for name, reason in part.judge(unique).items():
            reasons[name].append(reason)
    known = frozenset(valid)
    verified = [name for name in names if name in known]
    for name in names[-1:]:
        reasons[name].append("newest")
    for name in verified[-1:]:
        reasons[name].append("newest verified")
    for name in verified[-min_valid:]:
        reasons[name].append(f"one of {min_valid} verified")
    for name in names:
        if name in protected:
            reasons[name].append(protected[name])
        if len(verified) < min_valid:
            reasons[name].append(f"only {len(verified)} of {min_valid} verified")
    return [Verdict(name, bool(reasons[name]), tuple(reasons[name])) for name in names]


# Metrics


def metric_value(value: object) -> float:
    """Returns a metric as a float: a number, or a tensor or numpy array with one element.

    Raises:
        TypeError: The value is anything else, such as a bool or str.
    """
    try:
        item = getattr(value, "item", None)
        number = item() if callable(item) else value
        if not isinstance(number, bool | str | bytes | bytearray | memoryview):
            return float(number)  # type: ignore[arg-type]
    except Exception as error:  # tensors raise RuntimeError, and others anything
        raise TypeError(f"not a number: {type(value).__name__}: {error}") from error
    raise TypeError(f"not a number: {type(number).__name__}")
