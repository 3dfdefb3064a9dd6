"""The public calls for ordinary scripts: blocking, otherwise the same as the async ones.

Ctrl-C in a call aborts it like a cancellation and is raised after the abort. In a thread with a
running event loop every call raises ``UsageError``, except in notebooks (IPython kernels) and after
``allow_in_running_loop()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from actorsnap.actors.trace import Progress
from actorsnap.format.manifest import Entry
from actorsnap.options import Options
from actorsnap.runtime import copy, location, maintenance, reading, recover, restore, taking, verify
from actorsnap.runtime.copy import CopyEvent, CopyReport
from actorsnap.runtime.location import AppState
from actorsnap.runtime.recover import RecoverCall, RecoverReport
from actorsnap.runtime.restore import RestorePlan, RestoreReport
from actorsnap.runtime.script import (
    allow_in_running_loop,
    refuse_running_loop,
    run_sync,
    watch_sync,
)
from actorsnap.runtime.verify import VerifyReport
from actorsnap.snapshot import PendingHandle, SnapshotHandle

__all__ = ["PendingSnapshot", "Snapshot", "allow_in_running_loop", "warm_up"]


def warm_up(nbytes: int, *, options: Options | None = None) -> None:
    """See ``actorsnap.warm_up``."""
    run_sync(taking.warm_up(nbytes, options), name="warm_up")


class Snapshot(SnapshotHandle):
    """``actorsnap.Snapshot`` for scripts."""

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        *,
        replicated: Sequence[str] = (),
        overwrite: bool = False,
        resume: bool = False,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        group: Any = None,
        store: Any = None,
    ) -> Snapshot:
        """See ``actorsnap.Snapshot.take``."""
        call = taking.TakeCall(
            path=path,
            app_state=app_state,
            replicated=replicated,
            overwrite=overwrite,
            resume=resume,
            step=step,
            metadata=metadata,
            storage_options=storage_options,
            options=options,
            group=group,
            store=store,
        )
        save = run_sync(taking.take(call, is_async=False), name="Snapshot.take")
        return cls._of(save)

    @classmethod
    def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        *,
        replicated: Sequence[str] = (),
        overwrite: bool = False,
        resume: bool = False,
        step: int | None = None,
        stage: Literal["eager", "lazy"] = "eager",
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        group: Any = None,
        store: Any = None,
    ) -> PendingSnapshot:
        """See ``actorsnap.Snapshot.async_take``; blocks while the state is copied eagerly."""
        call = taking.TakeCall(
            path=path,
            app_state=app_state,
            replicated=replicated,
            overwrite=overwrite,
            resume=resume,
            step=step,
            stage=stage,
            metadata=metadata,
            storage_options=storage_options,
            options=options,
            group=group,
            store=store,
        )
        save = run_sync(taking.take(call, is_async=True), name="Snapshot.async_take")
        return PendingSnapshot(save)

    def restore(
        self, app_state: AppState, *, strict: bool = True, group: Any = None, store: Any = None
    ) -> RestoreReport:
        """See ``actorsnap.Snapshot.restore``."""
        return run_sync(
            restore.restore(self._source, app_state, strict=strict, group=group, store=store),
            name="Snapshot.restore",
        )

    def plan_restore(
        self, app_state: AppState, *, group: Any = None, store: Any = None
    ) -> RestorePlan:
        """See ``actorsnap.Snapshot.plan_restore``."""
        return run_sync(
            restore.plan_restore(self._source, app_state, group=group, store=store),
            name="Snapshot.plan_restore",
        )

    def read_object(
        self, path: str, out: Any = None, *, memory_budget_bytes: int | None = None
    ) -> Any:
        """See ``actorsnap.Snapshot.read_object``."""
        return run_sync(
            reading.read_object(self._source, path, out, memory_budget_bytes=memory_budget_bytes),
            name="Snapshot.read_object",
        )

    def get_manifest(self) -> dict[str, Entry]:
        """See ``actorsnap.Snapshot.get_manifest``."""
        return run_sync(reading.get_manifest(self._source), name="Snapshot.get_manifest")

    def get_state_dict_for_key(self, key: str) -> Any:
        """See ``actorsnap.Snapshot.get_state_dict_for_key``."""
        return run_sync(
            reading.get_state_dict_for_key(self._source, key),
            name="Snapshot.get_state_dict_for_key",
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``metadata`` passed to ``take``. Reads the commit object once."""
        commit, _ = run_sync(reading.load_index(self._source), name="Snapshot.metadata")
        return commit.metadata

    @property
    def step(self) -> int | None:
        """The ``step`` passed to ``take``, or None. Reads the commit object once."""
        commit, _ = run_sync(reading.load_index(self._source), name="Snapshot.step")
        return commit.step

    def verify(self, level: str = "quick") -> VerifyReport:
        """See ``actorsnap.Snapshot.verify``."""
        return run_sync(verify.verify(self._source, level=level), name="Snapshot.verify")

    def copy_to(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        on_event: Callable[[CopyEvent], object] | None = None,
    ) -> CopyReport:
        """See ``actorsnap.Snapshot.copy_to``."""
        to = location.make_location(path, storage_options)
        location.check_flag("overwrite", overwrite)
        return run_sync(
            copy.copy(self._source, to, overwrite=overwrite, on_event=on_event),
            name="Snapshot.copy_to",
        )

    def recover(
        self,
        *,
        attempt: str | None = None,
        world_size: int | None = None,
        force: bool = False,
        replace_damaged: bool = False,
    ) -> RecoverReport:
        """See ``actorsnap.Snapshot.recover``."""
        call = RecoverCall(
            attempt=attempt, world_size=world_size, force=force, replace_damaged=replace_damaged
        )
        return run_sync(recover.recover(self._source, call), name="Snapshot.recover")

    def delete(self) -> None:
        """See ``actorsnap.Snapshot.delete``."""
        run_sync(maintenance.delete(self._source), name="Snapshot.delete")


class PendingSnapshot(PendingHandle):
    """``actorsnap.PendingSnapshot`` for scripts."""

    def staged(self) -> None:
        """Blocks until the trainer may overwrite its tensors. Ctrl-C leaves the save running."""
        run_sync(taking.await_staged(self._save), name="PendingSnapshot.staged")

    def wait(self) -> Snapshot:
        """See ``actorsnap.PendingSnapshot.wait``. Ctrl-C leaves the save running."""
        run_sync(taking.await_pending(self._save, self._save.finished), name="PendingSnapshot.wait")
        return Snapshot._of(self._save)

    def events(self) -> Iterator[Progress]:
        """See ``actorsnap.PendingSnapshot.events``; blocks between states."""
        refuse_running_loop("PendingSnapshot.events")
        return watch_sync(self._save.watched())
