# SPDX-License-Identifier: Apache-2.0
"""PyTorch-Ignite: a save handler for ``ignite.handlers.Checkpoint``.

See ``docs/integrations/ignite.md``.

from actorsnap.interop.ignite import ActorsnapSaver
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from actorsnap import sync
from actorsnap.interop import checkpoints
from actorsnap.interop.checkpoints import Checkpoints
from actorsnap.options import Options
from actorsnap.tracebacks import short_traceback

__all__ = ["ActorsnapSaver"]

try:
    _handlers = importlib.import_module("ignite.handlers.checkpoint")
    _ranks = importlib.import_module("ignite.distributed")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "actorsnap.interop.ignite needs PyTorch-Ignite: pip install 'actorsnap[ignite]'"
    ) from (None if str(error.name).partition(".")[0] == "ignite" else error)

_ALONE = "model"
"""The key of a state that ``Checkpoint`` saves alone, without its name."""


class ActorsnapSaver:
    """Saves checkpoints as snapshots in a folder, in the background; for ``Checkpoint``.

    At most one save is in flight. The next save or ``wait`` raises its error: call ``wait`` at the
    end, or use the saver in a ``with`` block. A checkpoint beyond ``n_saved`` is removed after the
    commit of the one that replaces it.

    Args:
        folder: A folder or URL.
        save_on_rank: The only rank that saves. On others, calls do nothing. Any rank may load.
        storage_options, options: See ``actorsnap.Snapshot``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        save_on_rank: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        self._folder = os.fspath(folder)
        self._is_saving = _ranks.get_rank() == save_on_rank
        self._replaced: list[str] = []
        self._storage_options = storage_options
        self._options = options
        self._checkpoints = Checkpoints(storage_options=storage_options, options=options)

    @property
    def pending(self) -> sync.PendingSnapshot | None:
        """The latest save, until its commit has been awaited."""
        return self._checkpoints.pending

    @short_traceback
    def __call__(
        self,
        checkpoint: Mapping[str, Any],
        filename: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Waits for the previous save, copies the checkpoint, and returns.

        Args:
            metadata: Ignite's. A priority that is not a score is the snapshot's ``step``.

        Raises:
            UsageError: Some values cannot be saved; names all.
            ActorSnapError: The previous save failed. Or see ``Snapshot.take``.
        """
        if not self._is_saving:
            return
        noted = metadata or {}
        step = noted.get("priority") if noted.get("score_name") is None else None
        # A stateful of its own, so that Snapshot.restore({"model": model}) reads it.
        is_flat = not any([isinstance(value, Mapping | list) for value in checkpoint.values()])
        state = {_ALONE: checkpoint} if is_flat else checkpoint
        self._checkpoints.save(self._path(filename), state, step=step)
        for replaced in self._replaced:
            if replaced != filename:
                self._checkpoints.remove(self._path(replaced))
        self._replaced.clear()

    def remove(self, filename: str) -> None:
        """Deletes a checkpoint after the commit of the next one, which is saved afterwards."""
        if self._is_saving:
            self._replaced.append(filename)

    @short_traceback
    def load(self, filename: str) -> dict[str, Any]:
        """Returns a checkpoint for ``Checkpoint.load_objects``, in new CPU memory.

        Args:
            filename: Name of a snapshot in the folder, or of a file that ``DiskSaver`` wrote.

        Raises:
            NotASnapshot: There is no checkpoint.
            ActorSnapError: The save in flight failed. Or see ``Snapshot.restore``.
        """
        checkpoint = self._checkpoints.load(self._path(filename))
        if checkpoint.keys() == {_ALONE}:
            alone: dict[str, Any] = checkpoint[_ALONE]
            return alone
        return checkpoint

    @short_traceback
    def latest(self) -> str | None:
        """Returns the name of the newest checkpoint that can be loaded, or None if there is none.

        Raises:
            StorageError: Reading failed.
        """
        path = checkpoints.latest(
            self._folder, storage_options=self._storage_options, options=self._options
        )
        return None if path is None else os.path.basename(path)

    @short_traceback
    def wait(self) -> None:
        """Waits until the latest save is committed. Deletes the checkpoints that it replaces.

        Raises:
            ActorSnapError: The save failed. Raised once.
        """
        self._checkpoints.wait()

    def __enter__(self) -> Self:
        return self

    @short_traceback
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wait()

    def _path(self, filename: str) -> str:
        return os.path.join(self._folder, filename)


_handlers.BaseSaveHandler.register(ActorsnapSaver)
