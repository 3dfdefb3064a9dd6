"""The public calls for ordinary scripts: blocking, otherwise the same as the async ones.

Ctrl-C in a call aborts it like a cancellation and is raised after the abort. In a thread with a
running event loop every call raises ``UsageError``, except in notebooks (IPython kernels) and after
``allow_in_running_loop()``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from actorsnap import snapshot
from actorsnap.actors.trace import Progress
from actorsnap.options import Options
from actorsnap.runtime import reading, taking
from actorsnap.runtime.location import AppState
from actorsnap.runtime.script import (
    allow_in_running_loop,
    blocking_call,
    refuse_running_loop,
    run_blocking,
    run_sync,
    watch_sync,
)
from actorsnap.snapshot import PendingHandle, SnapshotHandle

__all__ = ["PendingSnapshot", "Snapshot", "allow_in_running_loop", "warm_up"]


def warm_up(nbytes: int, *, options: Options | None = None) -> None:
    """See ``actorsnap.warm_up``."""
    run_sync(taking.warm_up(nbytes, options), name="warm_up")


class Snapshot(SnapshotHandle):
    """``actorsnap.Snapshot`` for scripts."""

    _run = staticmethod(run_blocking)

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
        progress: bool = False,
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
            progress=progress,
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
        progress: bool = False,
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
            progress=progress,
        )
        save = run_sync(taking.take(call, is_async=True), name="Snapshot.async_take")
        return PendingSnapshot(save)

    restore = blocking_call(snapshot.Snapshot.restore)
    plan_restore = blocking_call(snapshot.Snapshot.plan_restore)
    read_object = blocking_call(snapshot.Snapshot.read_object)
    get_manifest = blocking_call(snapshot.Snapshot.get_manifest)
    get_state_dict_for_key = blocking_call(snapshot.Snapshot.get_state_dict_for_key)
    verify = blocking_call(snapshot.Snapshot.verify)
    copy_to = blocking_call(snapshot.Snapshot.copy_to)
    export_hf = blocking_call(snapshot.Snapshot.export_hf)
    recover = blocking_call(snapshot.Snapshot.recover)
    delete = blocking_call(snapshot.Snapshot.delete)

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``metadata`` passed to ``take``. Reads the commit object once."""
        commit = run_sync(reading.load_commit(self._source), name="Snapshot.metadata")
        return commit.metadata

    @property
    def step(self) -> int | None:
        """The ``step`` passed to ``take``, or None. Reads the commit object once."""
        commit = run_sync(reading.load_commit(self._source), name="Snapshot.step")
        return commit.step


class PendingSnapshot(PendingHandle):
    """``actorsnap.PendingSnapshot`` for scripts. Ctrl-C leaves the save running."""

    _run = staticmethod(run_blocking)

    staged = blocking_call(snapshot.PendingSnapshot.staged)

    def wait(self) -> Snapshot:
        """See ``actorsnap.PendingSnapshot.wait``."""
        run_sync(taking.await_pending(self._save, self._save.finished), name="PendingSnapshot.wait")
        return Snapshot._of(self._save)

    def events(self) -> Iterator[Progress]:
        """See ``actorsnap.PendingSnapshot.events``; blocks between states."""
        refuse_running_loop("PendingSnapshot.events")
        return watch_sync(self._save.watched())
