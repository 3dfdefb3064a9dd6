# SPDX-License-Identifier: Apache-2.0
"""The public calls for ordinary scripts: they block, and otherwise equal the async ones.

Ctrl-C during a call aborts it like a cancellation, and is raised after the abort. In a thread with
a running event loop, every call raises ``UsageError``, except in notebooks (IPython kernels) and
after ``allow_in_running_loop()``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from actorsnap import snapshot
from actorsnap.actors.trace import Progress
from actorsnap.format.manifest import Commit
from actorsnap.options import Options
from actorsnap.runtime import maintenance, reading, taking
from actorsnap.runtime.location import AppState
from actorsnap.runtime.script import (
    allow_in_running_loop,
    blocking_call,
    blocking_facade,
    refuse_running_loop,
    run_blocking,
    run_sync,
    watch_sync,
)
from actorsnap.snapshot import PendingHandle, SnapshotHandle, source_of
from actorsnap.tracebacks import short_traceback

__all__ = ["PendingSnapshot", "Snapshot", "allow_in_running_loop", "warm_up"]


@short_traceback
def warm_up(nbytes: int, *, options: Options | None = None) -> None:
    """Prepares this rank for asynchronous saves of ``nbytes``, so that the first one is not slower.

    Allocates and touches memory, up to ``Options.memory_budget_bytes``, and starts the uploader
    process if ``Options.offload`` asks for it.

    Raises:
        UsageError: An argument is invalid.
        MemoryError: The memory could not be allocated.

    Examples:
        >>> warm_up(sum(p.nbytes for p in model.parameters()))
    """
    run_sync(taking.warm_up(nbytes, options), name="warm_up")


@blocking_facade(snapshot.Snapshot)
class Snapshot(SnapshotHandle):
    """A handle to the saved app state at a URL, without ``await``. Creating a handle does no I/O.

    A handle refers to its path, so each call reads the commit object again. If the snapshot is
    replaced while a call reads it, the call starts over, at most three times, and may then call
    ``state_dict()`` again. After that, or if the snapshot was deleted, it raises
    ``SnapshotReplaced``. ``Options.timeout_s`` limits the reads of each call.

    Args:
        path: A local path, or the URL of a storage, such as ``s3://bucket/run``.
        storage_options: Options of the storage.
        options: None uses the defaults and the ``ACTORSNAP_*`` variables.

    Raises:
        UsageError: The path or an option is invalid.

    Examples:
        >>> snapshot = Snapshot.take("ckpt/step-1", {"model": model}, step=1)
        >>> report = Snapshot("ckpt/step-1").restore({"model": model})
    """

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
    keys = blocking_call(snapshot.Snapshot.keys)
    tree = blocking_call(snapshot.Snapshot.tree)
    exists = blocking_call(snapshot.Snapshot.exists)

    @property
    def metadata(self) -> dict[str, Any]:
        """See ``actorsnap.Snapshot.metadata``."""
        return self._commit("metadata").metadata

    @property
    def step(self) -> int | None:
        """See ``actorsnap.Snapshot.step``."""
        return self._commit("step").step

    @property
    def created(self) -> datetime:
        """See ``actorsnap.Snapshot.created``."""
        return self._commit("created").created_at()

    @property
    def world_size(self) -> int:
        """See ``actorsnap.Snapshot.world_size``."""
        return self._commit("world_size").world_size

    @property
    def nbytes(self) -> int:
        """See ``actorsnap.Snapshot.nbytes``."""
        return run_sync(reading.measure(self._source), name="Snapshot.nbytes")

    def _commit(self, name: str) -> Commit:
        return run_sync(reading.load_commit(self._source), name=f"Snapshot.{name}")

    @classmethod
    def list(
        cls,
        root: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> Sequence[Snapshot]:
        """See ``actorsnap.Snapshot.list``."""
        found = maintenance.list_snapshots(source_of(root, storage_options, options))
        return [cls._at(source) for source in run_sync(found, name="Snapshot.list")]


@blocking_facade(snapshot.PendingSnapshot)
class PendingSnapshot(PendingHandle):
    """A save in progress. Call ``wait()`` for the result, or poll ``done()``.

    If you drop the handle, the save continues and a failure is logged as an error. At interpreter
    exit, ``Options.at_exit`` applies. Ctrl-C during a call leaves the save running.

    Examples:
        >>> pending = Snapshot.async_take("ckpt/step-2", {"model": model}, step=2)
        >>> snapshot = pending.wait()
    """

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
