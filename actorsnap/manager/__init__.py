# SPDX-License-Identifier: Apache-2.0
"""Decides which snapshots to save, keep and restore: ``CheckpointManager`` for async code.

``actorsnap.manager.sync`` has the same for ordinary scripts. The first manager imports torch: the
shell's commands look at the root of a run without it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from actorsnap.errors import UsageError
from actorsnap.format.steps import StepName
from actorsnap.manager import looking
from actorsnap.manager.events import EventKind, EventReader, ManagerEvent
from actorsnap.manager.looking import Until
from actorsnap.manager.results import (
    Given,
    ManagerSettings,
    Metrics,
    PruneReport,
    Restored,
    Status,
    StepInfo,
)
from actorsnap.options import Options
from actorsnap.planning.cadence import SaveAnyOf, SavePolicy, every
from actorsnap.planning.keeping import KeepPolicy, StoredStep, Verdict, keep
from actorsnap.planning.marks import Pin
from actorsnap.runtime.location import AppState
from actorsnap.runtime.notices import Notice, Watcher, notices
from actorsnap.runtime.script import async_call, follow_async, run_async
from actorsnap.tracebacks import name_methods, short_traceback

if TYPE_CHECKING:
    from actorsnap.manager.body import ManagerBody
    from actorsnap.snapshot import PendingSnapshot, Snapshot

__all__ = [
    "CheckpointManager",
    "Decision",
    "EventKind",
    "KeepPolicy",
    "ManagerEvent",
    "ManagerHandle",
    "Notice",
    "Pin",
    "PruneReport",
    "Restored",
    "SavePolicy",
    "Status",
    "StepInfo",
    "StepName",
    "StoredStep",
    "Verdict",
    "Watcher",
    "every",
    "keep",
    "notices",
]

_DEFAULT_KEEP = keep.last(3)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of ``maybe_save``. True if the step is saved.

    Attributes:
        step: The step of the call.
        reason: Why the step is saved; empty if it is not.
        pending: The save in flight, a ``PendingSnapshot``. The manager raises its failure, too: see
            ``maybe_save``.
    """

    step: int
    reason: str = ""
    pending: Any = None

    def __bool__(self) -> bool:
        return bool(self.reason)


class ManagerHandle:
    """Base class of both ``CheckpointManager`` classes, for type annotations."""

    @short_traceback
    def __init__(
        self,
        root: str | os.PathLike[str],
        app_state: AppState | None = None,
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy = _DEFAULT_KEEP,
        min_valid: int = 2,
        max_pending: int = 1,
        tiers: Sequence[str | os.PathLike[str]] = (),
        replicated: Sequence[str] = (),
        stage: Literal["eager", "lazy"] = "eager",
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        group: Any = None,
        store: Any = None,
        progress: bool = False,
        notices: Sequence[Watcher] | None = None,
        watch_requests_s: float | None = None,
    ) -> None:
        from actorsnap.manager.body import ManagerBody

        self._own_body = ManagerBody(
            ManagerSettings(
                root=root,
                app_state=app_state,
                save=SaveAnyOf(()) if save is None else save,
                keep=keep,
                min_valid=min_valid,
                max_pending=max_pending,
                tiers=tiers,
                replicated=replicated,
                stage=stage,
                metadata=metadata,
                storage_options=storage_options,
                options=options,
                group=group,
                store=store,
                progress=progress,
                notices=notices,
                watch_requests_s=watch_requests_s,
            )
        )

    @property
    def _body(self) -> ManagerBody:
        """Raises UsageError in a fork, for all calls but ``close``."""
        body = self._own_body
        body.check_process()
        return body

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @property
    def path(self) -> str:
        """The root, without secrets."""
        return self._own_body.root.url

    @property
    @short_traceback
    def should_stop(self) -> bool:
        """True once a notice has arrived and the loop should end. Only ``maybe_save`` changes it.

        It becomes true on all ranks in the same call, which has saved the step if there was time.
        """
        return self._body.asking.calls.should_stop

    @short_traceback
    def request(self, reason: str = "request()") -> None:
        """Requests a save soon, on all ranks. The ranks agree on one of their next calls.

        Call it on any rank, from any thread or signal handler. With a single rank, the next
        ``maybe_save`` saves. Several requests before that cause one save.

        Args:
            reason: Stored with the snapshot: one line, at most 1,000 characters.

        Raises:
            UsageError: The reason is invalid, the manager is closed, or the process was forked.
                Nothing was requested.
        """
        self._body.request(reason)

    @short_traceback
    def status(self) -> Status:
        """Returns the state of the manager, as this rank knows it. Does no I/O."""
        return self._body.status()


name_methods(ManagerHandle, "CheckpointManager")


class CheckpointManager(ManagerHandle):
    """Saves, keeps and restores the snapshots of one training run, in one folder.

    A snapshot is a folder ``step-<step>.g<generation>`` at the root. A manager begins a new
    generation with its first save, and again with the first save after a restore, so snapshots are
    ordered by the course of the run, not by clocks or step numbers. A run consists of its own steps
    and those that it continues, up to the restored step. All other steps are abandoned.

    Every rank creates a manager and makes the same calls. Use it as ``async with``, or call
    ``close`` at the end.

    Args:
        root: A folder or URL for this run only.
        app_state: Statefuls by key, as for ``Snapshot.take``. May be passed with each call instead.
        save: When ``maybe_save`` saves, for example ``every.steps(500)``. None: only on
            ``request``. ``save`` and ``async_save`` save at any step.
        keep: Which steps to keep, for example ``keep.last(3) | keep.best("loss", "min")``. The
            default is ``keep.last(3)``. Judged on rank 0 after each commit, once the new snapshot
            is verified. The newest step, the newest verified one, ``min_valid`` verified ones, the
            restored one, abandoned steps and everything that no manager wrote are always kept.
        min_valid: Number of verified snapshots that are always kept.
        max_pending: Largest number of saves in flight. When it is reached, a due save first waits
            for the oldest one.
        tiers: A faster place for new snapshots, such as ``["/nvme/run-7"]``, for this run only.
            Saves go there, and are copied to the root in the background. Restores read the copies
            there. All ranks must share it: one machine, or a shared file system.
        replicated, stage, storage_options, options, group, store, progress: See
            ``Snapshot.async_take``.
        metadata: Stored with each snapshot.
        notices: Watchers that notice when the job is about to end. ``maybe_save`` then saves, if
            ``save`` has ``every.notice()`` and there is time, and ``should_stop`` becomes true.
            Ranks may have different watchers. A rank without any passes ``[]``. Watchers start with
            the ``async with`` block, or else with the first restore or ``maybe_save``.
        watch_requests_s: How often rank 0 checks for requests of ``actorsnap save-now``, in
            seconds; None: never.

    Raises:
        UsageError: An argument is invalid.
    """

    @short_traceback
    def __enter__(self) -> NoReturn:
        raise UsageError(
            "write async with CheckpointManager(...), or use the CheckpointManager of "
            "actorsnap.manager.sync"
        )

    def __exit__(self, *error: object) -> None:
        """Python looks for it before ``__enter__`` is called."""

    @async_call
    async def __aenter__(self) -> Self:
        self._body.asking.watch()
        return self

    @async_call
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_async(self._own_body.close(error=error))

    @async_call
    async def maybe_save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Decision:
        """Saves the step if the policy is due. Call it once per step, on all ranks.

        Returns when the state is staged. If no save is due, it sends no messages or requests.

        Args:
            step: Step of the training loop. Must not go back, except after ``restore``.
            metrics: Numbers by name. Rank 0's are stored, if the step is saved. A callable is
                called on every rank, only if the step is saved.
            metadata: Added to the manager's ``metadata``.

        Raises:
            UsageError: The step goes back, or an argument is invalid.
            RootTaken: A later manager has begun a run at the root. Nothing was saved.
            SnapshotAborted: This save failed. Or an earlier save failed in the background, and this
                step is still saved. All ranks raise it in the same call, even a rank on which
                ``pending.wait()`` has already raised it.
        Cancellation: See ``Snapshot.async_take``.
        """
        given = Given(metrics, app_state, metadata)
        due = self._body.due(step, given)
        if due is None:
            return Decision(step)
        reason, save = await run_async(
            self._body.maybe_save(step, due, given),
        )
        from actorsnap.snapshot import PendingSnapshot

        return Decision(step, reason, None if save is None else PendingSnapshot(save))

    @async_call
    async def save(
        self,
        step: int,
        *,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Saves the step now. Returns when it is committed and, on rank 0, verified.

        Raises:
            UsageError, RootTaken, SnapshotAborted: See ``maybe_save``.
            FormatError: The snapshot is committed, but damaged. Only on rank 0, which verifies it.
        Cancellation: See ``Snapshot.take``.
        """
        save = await run_async(
            self._body.save(
                step,
                Given(metrics, app_state, metadata),
                reason="save()",
                is_async=False,
                method="save",
            )
        )
        from actorsnap.snapshot import Snapshot

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
        """Saves the step now. Returns when the state is staged.

        Raises:
            UsageError, RootTaken, SnapshotAborted: See ``maybe_save``.
        Cancellation: See ``Snapshot.async_take``.
        """
        save = await run_async(
            self._body.save(
                step,
                Given(metrics, app_state, metadata),
                reason="async_save()",
                is_async=True,
                method="async_save",
            )
        )
        from actorsnap.snapshot import PendingSnapshot

        return PendingSnapshot(save)

    def events(self) -> AsyncGenerator[ManagerEvent, None]:
        """Yields what the manager does on this rank, from its first call until ``close``.

        The latest 1,000 events are kept. An iterator that is too slow misses older ones.
        ``num_missed`` of the next event counts these.
        """
        return follow_async(EventReader(self._body.events))

    @async_call
    async def restore_latest(
        self,
        app_state: AppState | None = None,
        *,
        strict: bool = True,
        valid: Literal["quick", "full"] = "quick",
        allow_fresh: bool = False,
    ) -> Restored | None:
        """Restores the newest intact snapshot of the run, on all ranks.

        Rank 0 chooses the snapshot for all ranks. If it is damaged, a warning is logged, and the
        next older one is restored. All other errors are raised, so that an outage or a wrong model
        does not cost steps.

        Args:
            strict: See ``Snapshot.restore``. With False, each snapshot is checked as with
                ``valid="full"``. If its damage were found only during the restore, values from it
                could stay in leaves that the older snapshot does not have.
            valid: How to check a snapshot before the restore (level of ``Snapshot.verify``). The
                restore itself also verifies the bytes that it reads.
            allow_fresh: Return None instead of raising ``NoValidSnapshot``.

        Returns:
            The restored snapshot, or None if nothing was ever committed at the root.

        Raises:
            NoValidSnapshot: There are snapshots, but none is intact. The error lists each with its
                reason.
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
            UsageError: The run has no such step. The error lists the existing ones.
            Exception: See ``Snapshot.restore``.
        Cancellation: Tensors may be partly overwritten.
        """
        return await run_async(self._body.restore(step, app_state, strict=strict))

    @async_call
    async def all_steps(self) -> list[int]:
        """Returns the steps of the run, in the order of the run. Each rank reads the root itself.

        While rank 0 deletes snapshots, even right after the ``with`` block, ranks may get different
        answers. If all need the same answer, broadcast rank 0's.

        Raises:
            StorageError: Listing or reading failed.
        """
        return [info.step for info in await run_async(self._body.steps(is_complete=False))]

    @async_call
    async def steps(self, *, all: bool = False) -> list[StepInfo]:
        """Returns the snapshots of the run, in the order of the run.

        Args:
            all: Include abandoned, damaged and unfinished snapshots, and those that are being
                deleted.

        Raises:
            StorageError: Listing or reading failed.
        """
        return await run_async(self._body.steps(is_complete=all))

    @async_call
    async def latest(self) -> StepInfo | None:
        """Returns the newest committed step of the run, without checking that it is intact.

        Raises:
            StorageError: Listing failed, or the newest step cannot be read.
        """
        return await run_async(self._body.latest())

    @async_call
    async def latest_valid(self, level: Literal["quick", "full"] = "quick") -> StepInfo | None:
        """Returns the newest step of the run that ``Snapshot.verify`` finds intact.

        Raises:
            StorageError: Listing failed, or a newer step cannot be read. A note names the newest
                one that can.
        """
        return await run_async(self._body.latest_valid(level))

    @async_call
    async def best(self, metric: str, mode: Literal["min", "max"]) -> StepInfo | None:
        """Returns the step with the best value of a metric. Of equal values, the oldest wins.

        Returns:
            None if no step has the metric as a number. If steps have metrics, a warning gives the
            reason.

        Raises:
            UsageError: The mode is invalid.
            StorageError: Listing failed, or a step of the run cannot be read: it may be the best. A
                note names the best one that can.
        """
        return await run_async(self._body.best(metric, mode))

    @async_call
    async def explain(self, keep: KeepPolicy | None = None) -> list[Verdict]:
        """Returns whether each step of the run is kept, and why. Deletes nothing.

        The reasons include those that protect a step from any policy: newest, verified, pinned (by
        whom and why), restored.

        Args:
            keep: A policy to use instead of the manager's.

        Raises:
            StorageError: Listing or reading failed.
        """
        return list((await run_async(self._body.prune(keep, dry_run=True))).verdicts)

    @async_call
    async def prune(self, keep: KeepPolicy | None = None, *, dry_run: bool = False) -> PruneReport:
        """Deletes the steps that the policy does not keep. Call it on rank 0, after its first save.

        Raises:
            UsageError: The call would delete steps, but this is not rank 0.
            StorageError: Listing or reading failed. Failed deletions are in the report.
        Cancellation: Some steps are deleted. The next pass deletes the rest.
        """
        return await run_async(self._body.prune(keep, dry_run=dry_run))

    @async_call
    async def delete(self, step: int | StepName, *, force: bool = False) -> None:
        """Deletes one snapshot. Call it on rank 0.

        Args:
            step: A step of the run or, if the run has no such step, an abandoned or damaged one. Or
                a name from ``steps(all=True)``.
            force: Also delete a pinned snapshot, or the only valid one of the run.

        Raises:
            UsageError: There is no such snapshot, it is pinned or the only valid one, or this is
                not rank 0.
            RootTaken: A later manager has begun a run at the root. Nothing was deleted.
            StorageError: Deleting failed, or the snapshot cannot be read. The next pass finishes a
                deletion that has begun.
        Cancellation: The next pass finishes a deletion that has begun.
        """
        await run_async(self._body.delete(step, force=force))

    @async_call
    async def pin(self, step: int | StepName, reason: str, until: Until = None) -> Pin:
        """Protects a snapshot from every policy and from ``delete``.

        Call it on one rank, in any process.
        A snapshot may have several pins, each of which protects it. Evaluation jobs, for example,
        pin the snapshots that they read.

        Args:
            step: See ``delete``.
            reason: For people, and for ``unpin``: one line, at most 1,000 characters.
            until: When the pin expires: a time, or a duration from now. None: never.

        Raises:
            UsageError: There is no such snapshot, it was deleted at the same time, or the reason is
                invalid.
            StorageError: Storing failed, or an earlier deletion has begun and does not end.
        Cancellation: The pin may be stored.
        """
        return await run_async(looking.pin(self._body.places, step, reason, until))

    @async_call
    async def unpin(self, step: int | StepName | Pin, reason: str | None = None) -> None:
        """Removes a pin, or all pins of a step if they have the same reason.

        Works for a damaged or unreadable snapshot, too.

        Args:
            step: The result of ``pin``, or a step.
            reason: Remove only pins with this reason.

        Raises:
            UsageError: There is no such pin, or the pins have several reasons.
            StorageError: Listing or deleting failed.
        """
        await run_async(looking.unpin(self._body.places, step, reason))

    @async_call
    async def record(self, step: int | StepName, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to a snapshot after its save.

        Call it on one rank, in any process.
        A value replaces an earlier one with the same name. Policies use it from the next pass on.

        Args:
            step: See ``delete``. May also be the step of a save in flight.

        Raises:
            UsageError: There is no such snapshot, or a value is not a number.
            StorageError: Storing failed.
        """
        await run_async(self._body.record(step, metrics))

    @async_call
    async def wait(self) -> None:
        """Waits until pending saves are committed and, on rank 0, verified.

        Raises:
            SnapshotAborted, RootTaken: A save failed.
            FormatError: A committed snapshot is damaged. Only on rank 0, which verifies it.
        Cancellation: The saves continue.
        """
        await run_async(self._body.wait())

    @async_call
    async def close(self, timeout_s: float = 60.0) -> None:
        """Saves the last step if the policy (``every.last``) or a request asks for it, with the
        arguments of its ``maybe_save``. Waits for pending saves.

        Args:
            timeout_s: Longest wait for deletions, in seconds. The next manager finishes the rest.

        Raises:
            UsageError: The timeout is invalid. Nothing was closed.
            SnapshotAborted, RootTaken, FormatError: See ``wait``.
        """
        await run_async(self._own_body.close(timeout_s=timeout_s))
