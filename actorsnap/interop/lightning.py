# SPDX-License-Identifier: Apache-2.0
"""Lightning: a ``CheckpointIO`` for one device, DDP and Fabric.

See ``docs/integrations/lightning.md``.

    from actorsnap.interop.lightning import ActorsnapCheckpointIO

Serves ``lightning`` and ``pytorch_lightning``. The strategies FSDP and ModelParallel take no
``CheckpointIO``: ``actorsnap.interop.dcp.install()`` serves those.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from actorsnap import sync
from actorsnap.errors import UsageError
from actorsnap.interop.checkpoints import Checkpoints, latest, read_checkpoint
from actorsnap.options import Options
from actorsnap.tracebacks import short_traceback

__all__ = ["ActorsnapCheckpointIO", "latest", "load_from_checkpoint"]

_PACKAGES = ("lightning.fabric.plugins", "lightning_fabric.plugins")
"""Each has an abstract class ``CheckpointIO`` of its own."""

_REQUEUED = "hpc_ckpt_"
"""Begins the name of a checkpoint after which Lightning requeues its job in SLURM."""


class ActorsnapCheckpointIO:
    """Saves the checkpoints of ``Trainer`` and ``Fabric`` as snapshots, in the background.

    At most one save is in flight. Its error is raised by the next save, by ``wait``, or at
    the end of ``Trainer.fit``. A checkpoint is removed after the commit of the one that replaces
    it. Only the rank that Lightning calls saves. Any rank may load.

    Args:
        storage_options, options: See ``actorsnap.Snapshot``.
    """

    def __init__(
        self,
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        _register()
        self._checkpoints = Checkpoints(storage_options=storage_options, options=options)

    @property
    def pending(self) -> sync.PendingSnapshot | None:
        """The latest save, until its commit has been awaited."""
        return self._checkpoints.pending

    @short_traceback
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Waits for the previous save, copies the checkpoint, and returns.

        Before SLURM requeues the job, it returns when the checkpoint is committed.

        Raises:
            UsageError: Some values, which the error names, cannot be saved. Or ``storage_options``
                is passed.
            ActorSnapError: The previous save failed. Or see ``Snapshot.take``.
        """
        if storage_options is not None:
            raise UsageError("pass storage_options to ActorsnapCheckpointIO, not to a save")
        self._checkpoints.save(path, checkpoint, step=checkpoint.get("global_step"))
        if os.path.basename(os.fspath(path)).startswith(_REQUEUED):
            self.wait()

    @short_traceback
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: object = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Waits for the save in flight. Returns a checkpoint, with tensors in new CPU memory.

        Args:
            path: Path of a snapshot, or of a ``.ckpt`` file of Lightning.
            map_location: Must be the CPU. Lightning copies tensors to their devices.
            weights_only: Ignored. Pickled objects are read only with
                ``Options(allow_pickle=True)``.

        Raises:
            NotASnapshot: There is no checkpoint.
            UsageError: ``map_location`` is another device. Or the checkpoint has objects, which the
                error names, that only pickle can read.
            ActorSnapError: The save in flight failed. Or see ``Snapshot.restore``.
        """
        if map_location is not None and str(map_location) != "cpu":
            raise UsageError(
                f"map_location={map_location!r}: checkpoints are read to the CPU, and "
                "load_state_dict copies them to the device; leave it out"
            )
        return self._checkpoints.load(path)

    @short_traceback
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint once the save in flight is committed, without raising its error."""
        self._checkpoints.remove(path)

    @short_traceback
    def wait(self) -> None:
        """Waits until the latest save is committed. Deletes the checkpoints that it replaces.

        Raises:
            ActorSnapError: The save failed. Raised once.
        """
        self._checkpoints.wait()

    @short_traceback
    def teardown(self) -> None:
        """Called by Lightning at the end. Calls ``wait``."""
        self.wait()


@short_traceback
def load_from_checkpoint(
    cls: Any,
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
    **kwargs: Any,
) -> Any:
    """``cls.load_from_checkpoint(path, **kwargs)`` for a snapshot.

    Lightning's own method opens a file. This function holds the checkpoint in memory twice.

    Args:
        cls: A ``LightningModule`` or ``LightningDataModule``.
        storage_options, options: See ``actorsnap.Snapshot``.
        kwargs: Keyword arguments of ``cls.load_from_checkpoint``.

    Raises:
        NotASnapshot: There is no checkpoint.
        ActorSnapError: See ``Snapshot.restore``.
    """
    file = io.BytesIO()
    torch.save(read_checkpoint(path, storage_options=storage_options, options=options), file)
    file.seek(0)
    kwargs.setdefault("weights_only", False)  # the pickle was made here
    return cls.load_from_checkpoint(file, **kwargs)


def _register() -> None:
    """Makes ours a ``CheckpointIO`` of each imported package; imports one if none is.

    Raises:
        ModuleNotFoundError: None is installed.
    """
    for name in _PACKAGES:
        if not any(each in sys.modules for each in _PACKAGES):
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
    found = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    if not found:
        raise ModuleNotFoundError(
            "actorsnap.interop.lightning needs Lightning: pip install 'actorsnap[lightning]'"
        )
    for package in found:
        package.CheckpointIO.register(ActorsnapCheckpointIO)


_register()
