"""Decides which snapshots to save, keep and restore: ``CheckpointManager`` for async code.

``actorsnap.manager.sync`` has the same for ordinary scripts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from actorsnap.format.steps import StepName
from actorsnap.manager.body import (
    ManagerBody,
    ManagerSettings,
    Metrics,
    PruneReport,
    Restored,
    Status,
    StepInfo,
)
from actorsnap.options import Options
from actorsnap.planning.cadence import SavePolicy, every
from actorsnap.planning.keeping import KeepPolicy, StoredStep, Verdict, keep
from actorsnap.runtime.location import AppState
from actorsnap.runtime.script import async_call, run_async
from actorsnap.snapshot import PendingSnapshot, Snapshot

__all__ = [
    "CheckpointManager",
    "Decision",
    "KeepPolicy",
    "ManagerHandle",
    "PruneReport",
    "Restored",
    "SavePolicy",
    "Status",
    "StepInfo",
    "StepName",
    "StoredStep",
    "Verdict",
    "every",
    "keep",
]

_DEFAULT_KEEP = keep.last(3)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of ``maybe_save``. True if the step is saved.

    Attributes:
        reason: Why; empty if it is not.
        pending: The save in flight, a ``PendingSnapshot``.
    """

    step: int
    reason: str = ""
    pending: Any = None

    def __bool__(self) -> bool:
        return bool(self.reason)


class ManagerHandle:
    """What both facades share. See ``CheckpointManager``."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        app_state: AppState | None = None,
        *,
        save: SavePolicy,
        keep: KeepPolicy = _DEFAULT_KEEP,
        min_valid: int = 2,
        max_pending: int = 1,
        replicated: Sequence[str] = (),
        stage: Literal["eager", "lazy"] = "eager",
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        group: Any = None,
        store: Any = None,
    ) -> None:
        self._body = ManagerBody(
            ManagerSettings(
                root=root,
                app_state=app_state,
                save=save,
                keep=keep,
                min_valid=min_valid,
                max_pending=max_pending,
                replicated=replicated,
                stage=stage,
                metadata=metadata,
                storage_options=storage_options,
                options=options,
                group=group,
                store=store,
            )
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @property
    def path(self) -> str:
        """The root, without secrets."""
        return self._body.root.url

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end. False: notices are not watched yet."""
        return False

    def status(self) -> Status:
        """Returns what this rank knows. No I/O."""
        return self._body.status()


class CheckpointManager(ManagerHandle):
    """Saves, keeps and restores the snapshots of one training run, in one folder.

    A snapshot is a folder ``step-<step>.g<generation>`` at the root. A manager takes a new
    generation with its first save, and again with the first save after a restore: so snapshots
    are ordered by the course of the run, not by clocks or step numbers. The steps of a run are its
    own and those that it continues, up to the step it was restored from; others are abandoned.

    All ranks make one and call it alike. Use it as ``async with``, or call ``close`` at the end.

    Args:
        root: A folder or URL for this run only.
        app_state: Statefuls by key, as for ``Snapshot.take``; may be passed with each call instead.
        save: When to save, for example ``every.steps(500)``.
        keep: What stays, for example ``keep.last(3) | keep.best("loss", "min")``. Judged on rank 0
            after each commit, once the new snapshot is verified. The newest step, the newest
            verified one, ``min_valid`` verified ones, the one restored from, abandoned steps and
            everything that no manager wrote stay anyway.
        min_valid: Number of verified snapshots that always stay.
        max_pending: Saves in flight. A due save waits for the oldest of them first.
        replicated, stage, storage_options, options, group, store: See ``Snapshot.async_take``.
        metadata: Stored with each snapshot.

    Raises:
        UsageError: A bad argument.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_async(self._body.close(has_failed=error is not None))

    @async_call
    async def maybe_save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Decision:
        """Saves the step if a policy says so; called once per step, by all ranks.

        Returns when the state is staged. While nothing is due it sends no message and makes no
        request.

        Args:
            step: Of the training loop. Must not go back, except after ``restore``.
            metrics: Numbers by name; rank 0's are stored. A callable is called on every rank, only
                if the step is saved.
            metadata: Added to the manager's.

        Raises:
            UsageError: The step goes back, or an argument is bad.
            RootTaken: A later manager has begun a run at the root. Nothing was saved.
            SnapshotAborted: This save failed, or the one before, which is awaited first.
        Cancellation: As of ``Snapshot.async_take``.
        """
        reason = self._body.due(step)
        if not reason:
            return Decision(step)
        save = await run_async(
            self._body.save(
                step,
                reason=reason,
                is_async=True,
                metrics=metrics,
                app_state=app_state,
                metadata=metadata,
            )
        )
        return Decision(step, reason, PendingSnapshot(save))

    @async_call
    async def save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Saves the step now; returns when it is committed and, on rank 0, verified.

        Raises:
            UsageError, RootTaken, SnapshotAborted: See ``maybe_save``.
            NoValidSnapshot: The committed snapshot is damaged.
        Cancellation: As of ``Snapshot.take``.
        """
        save = await run_async(
            self._body.save(
                step,
                reason="save()",
                is_async=False,
                metrics=metrics,
                app_state=app_state,
                metadata=metadata,
            )
        )
        return Snapshot._of(save)

    @async_call
    async def async_save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingSnapshot:
        """Saves the step now; returns when the state is staged.

        Raises:
            UsageError, RootTaken, SnapshotAborted: See ``maybe_save``.
        Cancellation: As of ``Snapshot.async_take``.
        """
        save = await run_async(
            self._body.save(
                step,
                reason="async_save()",
                is_async=True,
                metrics=metrics,
                app_state=app_state,
                metadata=metadata,
            )
        )
        return PendingSnapshot(save)

    @async_call
    async def restore_latest(
        self,
        app_state: AppState | None = None,
        *,
        strict: bool = True,
        valid: Literal["quick", "full"] = "quick",
        allow_fresh: bool = False,
    ) -> Restored | None:
        """Restores the newest whole snapshot of the run, on all ranks.

        Rank 0 looks. A damaged snapshot is skipped, with a warning, for the next older one. All
        other errors are raised: an outage or a wrong model must not cost steps.

        Args:
            strict: See ``Snapshot.restore``. False verifies every byte first.
            valid: Check before a snapshot is restored (``Snapshot.verify``); restored bytes are
                compared with their checksums anyway.
            allow_fresh: Return None instead of raising ``NoValidSnapshot``.

        Returns:
            None if nothing was ever committed at the root: a fresh start.

        Raises:
            NoValidSnapshot: There are snapshots, but none is whole; names each with its reason.
            IncompatibleState, StorageError, UnsupportedFormat: See ``Snapshot.restore``.
        Cancellation: Tensors may be partly overwritten.
        """
        return await run_async(
            self._body.restore_latest(
                app_state, strict=strict, valid=valid, allow_fresh=allow_fresh
            )
        )

    @async_call
    async def restore(
        self, step: int, app_state: AppState | None = None, *, strict: bool = True
    ) -> Restored:
        """Restores a step of the run, on all ranks. The next save abandons later steps.

        Raises:
            UsageError: The run has no such step; names those it has.
            Exception: See ``Snapshot.restore``.
        Cancellation: Tensors may be partly overwritten.
        """
        return await run_async(self._body.restore(step, app_state, strict=strict))

    @async_call
    async def all_steps(self) -> list[int]:
        """Returns the steps of the run, in its order. Each rank looks for itself.

        Raises:
            StorageError: Listing or reading failed.
        """
        return [info.step for info in await run_async(self._body.steps(is_complete=False))]

    @async_call
    async def steps(self, *, all: bool = False) -> list[StepInfo]:
        """Returns the snapshots of the run, in its order.

        Args:
            all: Also abandoned, damaged, unfinished ones, and those that are being deleted.

        Raises:
            StorageError: Listing or reading failed.
        """
        return await run_async(self._body.steps(is_complete=all))

    @async_call
    async def latest(self) -> StepInfo | None:
        """Returns the newest step of the run, committed but maybe damaged since.

        Raises:
            StorageError: Listing or reading failed.
        """
        return await run_async(self._body.latest())

    @async_call
    async def latest_valid(self, level: Literal["quick", "full"] = "quick") -> StepInfo | None:
        """Returns the newest step of the run that ``Snapshot.verify`` finds intact.

        Raises:
            StorageError: Listing or reading failed.
        """
        return await run_async(self._body.latest_valid(level))

    @async_call
    async def best(self, metric: str, mode: Literal["min", "max"]) -> StepInfo | None:
        """Returns the step of the run with the best value; of equal ones the oldest.

        Returns:
            None if no step has the metric as a number.

        Raises:
            UsageError: Another mode.
            StorageError: Listing or reading failed.
        """
        return await run_async(self._body.best(metric, mode))

    @async_call
    async def explain(self, keep: KeepPolicy | None = None) -> list[Verdict]:
        """Returns why each step of the run stays or goes. Deletes nothing.

        Args:
            keep: Another policy than the manager's.

        Raises:
            StorageError: Listing or reading failed.
        """
        return list((await run_async(self._body.prune(keep, dry_run=True))).verdicts)

    @async_call
    async def prune(self, keep: KeepPolicy | None = None, *, dry_run: bool = False) -> PruneReport:
        """Deletes what the policy gives up, now. On rank 0, after its first save.

        Raises:
            StorageError: Listing or reading failed. Failed deletions are in the report.
        Cancellation: Some are deleted; the next pass finishes.
        """
        return await run_async(self._body.prune(keep, dry_run=dry_run))

    @async_call
    async def delete(self, step: int, *, force: bool = False) -> None:
        """Deletes one step. On one rank.

        Args:
            force: Also the only snapshot of the root.

        Raises:
            UsageError: There is no such step, or it is the only one.
            StorageError: Deleting failed; what remains is no snapshot.
        """
        await run_async(self._body.delete(step, force=force))

    @async_call
    async def wait(self) -> None:
        """Waits until pending saves are committed and, on rank 0, verified.

        Raises:
            SnapshotAborted, RootTaken: A save failed.
            NoValidSnapshot: A committed snapshot is damaged.
        Cancellation: The saves continue.
        """
        await run_async(self._body.wait())

    @async_call
    async def close(self, timeout_s: float = 60.0) -> None:
        """Saves the last step if the policy says so (``every.last``) and waits for pending saves.

        Args:
            timeout_s: Bound of the wait for deletions; the next manager finishes them.

        Raises:
            SnapshotAborted, RootTaken, NoValidSnapshot: See ``wait``.
        """
        await run_async(self._body.close(timeout_s=timeout_s))
