# SPDX-License-Identifier: Apache-2.0
"""Ray Train: workers that save snapshots together, and report them.

See ``docs/integrations/ray.md``.

from actorsnap.interop.ray import ActorsnapReporter
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from actorsnap import sync
from actorsnap.errors import IncompatibleState, UsageError
from actorsnap.options import Options
from actorsnap.runtime.location import AppState
from actorsnap.runtime.restore import note_arguments
from actorsnap.tracebacks import short_traceback

__all__ = ["ActorsnapReporter"]

try:
    _train = importlib.import_module("ray.train")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "actorsnap.interop.ray needs Ray Train: pip install 'actorsnap[ray]'"
    ) from (None if str(error.name).partition(".")[0] == "ray" else error)

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""Beginnings of URLs, by pyarrow's names of file systems."""


class ActorsnapReporter:
    """Saves and reports checkpoints in a function that Ray Train runs on its workers.

    All workers together save one snapshot, in the background, directly to the run's storage. It is
    reported to Ray after the commit, so ``ray.train.get_checkpoint`` never returns an unfinished
    one. Nothing is uploaded a second time. At most one save is in flight.

    Args:
        replicated: See ``Snapshot.take``.
        storage_options, options: See ``actorsnap.Snapshot``. Ray's own credentials for the storage
            are not used.
    """

    def __init__(
        self,
        *,
        replicated: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        self.pending: sync.PendingSnapshot | None = None
        self._replicated = replicated
        self._storage_options = storage_options
        self._options = options
        self._names: set[str] | None = None

    @short_traceback
    def report(self, metrics: Mapping[str, Any], app_state: AppState, *, step: int) -> None:
        """Waits for the previous save, copies the state, and returns. All workers must call it.

        The snapshot is ``step-<step>`` in the run's folder, and replaces an unreported one with
        this name. If that one was reported, the new one is ``step-<step>-2``, because Ray deletes
        by name. Ray gets rank 0's ``metrics`` with it after the commit. If the save fails, Ray ends
        the workers, as if the function had raised the error.

        Args:
            metrics: See ``ray.train.report``.
            app_state: See ``Snapshot.take``.
            step: Training step of the state.

        Raises:
            UsageError: Some values, which the error names, cannot be saved. Or actorsnap does not
                support the run's storage.
            ActorSnapError: The previous save failed. Or see ``Snapshot.take``.
        """
        self.wait()
        storage = _train.get_context().get_storage()
        filesystem = storage.storage_filesystem
        names = self._reported()
        name, number = f"step-{step:08}", 1
        while name in names:
            number += 1
            name = f"step-{step:08}-{number}"
        path = f"{storage.experiment_fs_path}/{name}"
        pending = sync.Snapshot.async_take(
            _url_of(filesystem, path),
            app_state,
            replicated=self._replicated,
            overwrite=True,
            step=step,
            storage_options=self._storage_options,
            options=self._options,
        )
        self.pending = pending
        names.add(name)

        def committed(checkpoint: Any, name: str) -> Any:
            pending.wait()
            return checkpoint

        is_first = _train.get_context().get_world_rank() == 0
        _train.report(
            dict(metrics),
            _train.Checkpoint(path, filesystem) if is_first else None,
            checkpoint_upload_mode=_train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=committed,  # on a thread of Ray's
            delete_local_checkpoint_after_upload=False,  # Ray's default here is True
        )

    @short_traceback
    def restore(self, app_state: AppState) -> int | None:
        """Restores the latest reported checkpoint. All workers must call it.

        Returns:
            The step of the checkpoint, or None if there is none yet.

        Raises:
            ActorSnapError: See ``Snapshot.restore``.
        """
        checkpoint = _train.get_checkpoint()
        if checkpoint is None:
            return None
        snapshot = sync.Snapshot(
            _url_of(checkpoint.filesystem, checkpoint.path),
            storage_options=self._storage_options,
            options=self._options,
        )
        try:
            snapshot.restore(app_state)
        except IncompatibleState as error:
            note_arguments(error, snapshot.path, "A reporter's restore()")
            raise
        return snapshot.step

    @short_traceback
    def wait(self) -> None:
        """Waits until the latest save is committed.

        Raises:
            ActorSnapError: The save failed. Raised once.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()

    def _reported(self) -> set[str]:
        """Names of the checkpoints that Ray has, the same on all workers."""
        if self._names is None:
            reported = _train.get_all_reported_checkpoints()
            self._names = {each.checkpoint.path.rpartition("/")[2] for each in reported}
        return self._names


def _url_of(filesystem: Any, path: str) -> str:
    kind = filesystem.type_name
    if kind not in _SCHEMES:
        raise UsageError(
            f"actorsnap.interop.ray has no storage for {path} on a file system of type {kind!r}; "
            "use a storage_path on local disks, s3:// or gs://"
        )
    return _SCHEMES[kind] + path
