"""When to save: policies that depend on the step alone.

All ranks call the manager with the same steps, so each rank decides for itself and all decide the
same, without a message. Nothing else may enter here: clocks, metrics, measured costs and notices
differ between ranks, so rank 0 decides by them for all.

Policies are joined by ``|``: a save is due if it is for one of them. ``due`` runs in every step of
the training, in about 0.1 us per policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass

from actorsnap.errors import UsageError
from actorsnap.planning.keeping import check_count, checked_steps


class SavePolicy(ABC):
    """Decides when to save. Policies are joined by ``|``."""

    __slots__ = ()

    @abstractmethod
    def due(self, step: int, *, is_first: bool) -> str:
        """Returns why to save at ``step``; empty if no save is due.

        Args:
            is_first: It is this manager's first step.
        """

    def at_end(self) -> str:
        """Returns why to save the last step when the run ends; empty if no save is due."""
        return ""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return (
            SaveAnyOf((*_parts(self), *_parts(other)))
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


def _parts(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, SaveAnyOf) else (policy,)


@dataclass(frozen=True, slots=True)
class SaveSteps(SavePolicy):
    """Saves at each step with ``step % n == offset``; with offset 0 also at step 0."""

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
        return f"every {self.n} steps" if step % self.n == self.offset else ""


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
    """Saves at the first step of each run, also of one that continues a snapshot."""

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

    It must depend on the step alone: ranks that decide differently would save different steps.
    """

    is_due: Callable[[int], bool]

    def __post_init__(self) -> None:
        if not callable(self.is_due):
            raise UsageError(
                f"every.custom({self.is_due!r}): write a function of the step, such as "
                "lambda step: step % 500 == 0"
            )

    def due(self, step: int, *, is_first: bool) -> str:
        is_due: bool | None = self.is_due(step)
        if is_due is None:  # a forgotten return would never save
            raise UsageError("every.custom: the function returned None: return True or False")
        return "custom" if is_due else ""


class every:
    """Policies for saving, to be joined by ``|``: ``every.steps(500) | every.last()``."""

    steps = SaveSteps
    at = SaveAt
    first = SaveFirst
    last = SaveLast
    custom = SaveCustom
