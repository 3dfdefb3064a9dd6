# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of a manager's calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, SupportsIndex

from actorsnap.errors import UsageError
from actorsnap.format.steps import MAX_STEP, StepName
from actorsnap.options import Options
from actorsnap.planning.cadence import SavePolicy
from actorsnap.planning.keeping import KeepPolicy, Verdict
from actorsnap.planning.marks import Pin
from actorsnap.runtime.location import AppState, check_flag, check_metadata

if TYPE_CHECKING:
    from actorsnap.runtime.restore import RestoreReport

Metrics = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
"""Numbers by name, or a callable, which is called on every rank if the step is saved. With
``every.improvement``, rank 0 calls it at each step."""


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments that the trainer passes with a step. See ``CheckpointManager.maybe_save``."""

    metrics: Metrics = None
    app_state: AppState | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A snapshot at the root.

    Attributes:
        created: Time of the save, in UTC. None unless committed.
        metrics: See ``CheckpointManager.maybe_save``.
        state: ``"committed"``; ``"abandoned"``: committed, but the run continued from an earlier
            step; ``"damaged"``: its commit object cannot be read; ``"unfinished"``: never
            committed; ``"deleting"``.
        pins: Reasons why it is not deleted.
        is_durable: Whether it is committed at the root. False: only on the tier (``tiers``).
    """

    step: int
    url: str
    name: StepName
    state: str
    created: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    is_durable: bool = False

    def __repr__(self) -> str:
        """Fits into a line: leaves out the URL."""
        parts = [str(self.name), self.state]
        if self.created is not None:
            parts.append(f"{self.created:%Y-%m-%d %H:%M:%S} UTC")
        parts += [f"{name}={value:.6g}" for name, value in self.metrics.items()]
        parts += map(str, self.pins)
        return f"StepInfo({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of a restore.

    Attributes:
        url: URL of the restored copy: on the tier if the copy there is intact, otherwise at the
            root.
        skipped: URLs of damaged newer snapshots, or damaged copies on the tier, with the reasons.
    """

    step: int
    url: str
    report: RestoreReport
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """The result of ``prune``.

    Attributes:
        verdicts: A verdict on each committed step of the run, oldest first.
        deleted: URLs; with ``dry_run`` those that would be deleted.
        failed: Reasons by URL: steps that could not be read or deleted. A later pass tries again.
    """

    verdicts: tuple[Verdict, ...]
    deleted: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a manager, as this rank knows it.

    Attributes:
        generation: Current generation of the manager; None before its first save.
        committed: The last step known to be committed.
        verified: The last step that was also verified. Rank 0 only.
        pending: Steps in flight.
        failed_deletes: Reasons by URL; a later pass tries again. Under the root's own URL if a
            whole pass failed, for example because a policy raised. Rank 0 only.
        num_deletes_left: Number of steps that the last pass had no time to delete, although no
            policy keeps them. Rank 0 only.
        is_superseded: Another manager has begun a run at the root: this one deletes nothing.
        draining: Steps that are on the tier and not yet at the root. Rank 0 only.
        failed_drains: Reasons by URL; later drains try again. Rank 0 only.
        due_in_s: Seconds until a clock makes a save due. Rank 0 only; None if no clock does.
        requests: Reasons of saves that were requested and have not begun. Rank 0 has those of all
            ranks, other ranks their own.
        last_agreement: Outcome of the latest agreement between the ranks. Empty before the first
            one.
    """

    generation: int | None
    committed: int | None
    verified: int | None
    pending: tuple[int, ...]
    failed_deletes: Mapping[str, str]
    num_deletes_left: int
    is_superseded: bool
    draining: tuple[int, ...]
    failed_drains: Mapping[str, str]
    due_in_s: float | None
    requests: tuple[str, ...]
    last_agreement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSettings:
    """The arguments of ``CheckpointManager``."""

    root: Any
    app_state: AppState | None
    save: SavePolicy
    keep: KeepPolicy
    min_valid: int
    max_pending: int
    replicated: Sequence[str]
    stage: str
    metadata: Mapping[str, Any] | None
    storage_options: Mapping[str, Any] | None
    options: Options | None
    group: Any
    store: Any
    tiers: Sequence[Any] = ()
    progress: bool = False
    notices: Sequence[Any] | None = None
    watch_requests_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.save, SavePolicy):
            raise UsageError(f"save must be a policy like every.steps(500), not {self.save!r}")
        check_keep(self.keep)
        for name in ("min_valid", "max_pending"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} must be an integer of at least 1, not {value!r}")
        check_metadata(self.metadata)
        check_flag("progress", self.progress)
        app_state = self.app_state
        if app_state or not isinstance(app_state, Mapping | None):
            from actorsnap.state.stateful import validate_app_state  # torch

            validate_app_state(app_state)
        every_s = self.watch_requests_s
        is_number = isinstance(every_s, int | float) and not isinstance(every_s, bool)
        if every_s is not None and not (is_number and every_s > 0):
            raise UsageError(
                f"watch_requests_s must be a number greater than 0, or None, not {every_s!r}"
            )


def check_keep(policy: object) -> None:
    if not isinstance(policy, KeepPolicy):
        raise UsageError(f"keep must be a policy like keep.last(3), not {policy!r}")


def check_training_step(step: object) -> int:
    """Returns the step as an int. Accepts other integer types, such as numpy's."""
    if type(step) is int and 0 <= step <= MAX_STEP:
        return step
    if isinstance(step, SupportsIndex) and type(step) not in (int, bool):
        return check_training_step(operator.index(step))
    raise UsageError(f"step must be the training step: an integer of at least 0, not {step!r}")
