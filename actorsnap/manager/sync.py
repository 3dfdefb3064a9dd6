# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.manager`` for ordinary scripts: blocking, otherwise the same."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from actorsnap import manager
from actorsnap.errors import UsageError
from actorsnap.format.steps import StepName
from actorsnap.manager import (
    Decision,
    KeepPolicy,
    ManagerHandle,
    Pin,
    PruneReport,
    Restored,
    Status,
    StepInfo,
    Verdict,
    every,
    keep,
    looking,
    notices,
)
from actorsnap.manager.events import EventReader, ManagerEvent
from actorsnap.manager.looking import Until
from actorsnap.manager.results import Given, Metrics
from actorsnap.runtime.location import AppState
from actorsnap.runtime.script import blocking_facade, follow_sync, refuse_running_loop, run_sync
from actorsnap.sync import PendingSnapshot, Snapshot
from actorsnap.tracebacks import short_traceback

__all__ = [
    "CheckpointManager",
    "Decision",
    "Restored",
    "Status",
    "StepInfo",
    "every",
    "keep",
    "notices",
]


@blocking_facade(manager.CheckpointManager)
class CheckpointManager(ManagerHandle):
    """``actorsnap.manager.CheckpointManager`` for scripts."""

    @short_traceback
    def __aenter__(self) -> NoReturn:
        raise UsageError(
            "write with CheckpointManager(...), or use the CheckpointManager of actorsnap.manager"
        )

    async def __aexit__(self, *error: object) -> None:
        """Python looks for it before ``__aenter__`` is called."""

    def __enter__(self) -> Self:
        refuse_running_loop("CheckpointManager.__enter__")
        self._body.asking.watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run_sync(self._own_body.close(error=error), name="CheckpointManager.close")

    def maybe_save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Decision:
        """See ``actorsnap.manager.CheckpointManager.maybe_save``."""
        refuse_running_loop("CheckpointManager.maybe_save")  # also if it is not due
        given = Given(metrics, app_state, metadata)
        due = self._body.due(step, given)
        if due is None:
            return Decision(step)
        reason, save = run_sync(
            self._body.maybe_save(step, due, given),
            name="CheckpointManager.maybe_save",
        )
        return Decision(step, reason, None if save is None else PendingSnapshot(save))

    def save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """See ``actorsnap.manager.CheckpointManager.save``."""
        save = run_sync(
            self._body.save(
                step,
                Given(metrics, app_state, metadata),
                reason="save()",
                is_async=False,
                method="save",
            ),
            name="CheckpointManager.save",
        )
        return Snapshot._of(save)

    def async_save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingSnapshot:
        """See ``actorsnap.manager.CheckpointManager.async_save``."""
        save = run_sync(
            self._body.save(
                step,
                Given(metrics, app_state, metadata),
                reason="async_save()",
                is_async=True,
                method="async_save",
            ),
            name="CheckpointManager.async_save",
        )
        return PendingSnapshot(save)

    def events(self) -> Generator[ManagerEvent, None, None]:
        """See ``actorsnap.manager.CheckpointManager.events``. Blocks between events."""
        return follow_sync(EventReader(self._body.events))

    def restore_latest(
        self,
        app_state: AppState | None = None,
        *,
        strict: bool = True,
        valid: Literal["quick", "full"] = "quick",
        allow_fresh: bool = False,
    ) -> Restored | None:
        """See ``actorsnap.manager.CheckpointManager.restore_latest``."""
        return run_sync(
            self._body.restore_latest(
                app_state, strict=strict, valid=valid, allow_fresh=allow_fresh
            ),
            name="CheckpointManager.restore_latest",
        )

    def restore(
        self, step: int, app_state: AppState | None = None, *, strict: bool = True
    ) -> Restored:
        """See ``actorsnap.manager.CheckpointManager.restore``."""
        return run_sync(
            self._body.restore(step, app_state, strict=strict), name="CheckpointManager.restore"
        )

    def all_steps(self) -> list[int]:
        """See ``actorsnap.manager.CheckpointManager.all_steps``."""
        return [
            info.step
            for info in run_sync(
                self._body.steps(is_complete=False), name="CheckpointManager.all_steps"
            )
        ]

    def steps(self, *, all: bool = False) -> list[StepInfo]:
        """See ``actorsnap.manager.CheckpointManager.steps``."""
        return run_sync(self._body.steps(is_complete=all), name="CheckpointManager.steps")

    def latest(self) -> StepInfo | None:
        """See ``actorsnap.manager.CheckpointManager.latest``."""
        return run_sync(self._body.latest(), name="CheckpointManager.latest")

    def latest_valid(self, level: Literal["quick", "full"] = "quick") -> StepInfo | None:
        """See ``actorsnap.manager.CheckpointManager.latest_valid``."""
        return run_sync(self._body.latest_valid(level), name="CheckpointManager.latest_valid")

    def best(self, metric: str, mode: Literal["min", "max"]) -> StepInfo | None:
        """See ``actorsnap.manager.CheckpointManager.best``."""
        return run_sync(self._body.best(metric, mode), name="CheckpointManager.best")

    def explain(self, keep: KeepPolicy | None = None) -> list[Verdict]:
        """See ``actorsnap.manager.CheckpointManager.explain``."""
        return list(
            (
                run_sync(self._body.prune(keep, dry_run=True), name="CheckpointManager.explain")
            ).verdicts
        )

    def prune(self, keep: KeepPolicy | None = None, *, dry_run: bool = False) -> PruneReport:
        """See ``actorsnap.manager.CheckpointManager.prune``."""
        return run_sync(self._body.prune(keep, dry_run=dry_run), name="CheckpointManager.prune")

    def delete(self, step: int | StepName, *, force: bool = False) -> None:
        """See ``actorsnap.manager.CheckpointManager.delete``."""
        run_sync(self._body.delete(step, force=force), name="CheckpointManager.delete")

    def pin(self, step: int | StepName, reason: str, until: Until = None) -> Pin:
        """See ``actorsnap.manager.CheckpointManager.pin``."""
        return run_sync(
            looking.pin(self._body.places, step, reason, until), name="CheckpointManager.pin"
        )

    def unpin(self, step: int | StepName | Pin, reason: str | None = None) -> None:
        """See ``actorsnap.manager.CheckpointManager.unpin``."""
        run_sync(looking.unpin(self._body.places, step, reason), name="CheckpointManager.unpin")

    def record(self, step: int | StepName, metrics: Mapping[str, Any]) -> None:
        """See ``actorsnap.manager.CheckpointManager.record``."""
        run_sync(self._body.record(step, metrics), name="CheckpointManager.record")

    def wait(self) -> None:
        """See ``actorsnap.manager.CheckpointManager.wait``."""
        run_sync(self._body.wait(), name="CheckpointManager.wait")

    def close(self, timeout_s: float = 60.0) -> None:
        """See ``actorsnap.manager.CheckpointManager.close``."""
        run_sync(self._own_body.close(timeout_s=timeout_s), name="CheckpointManager.close")
