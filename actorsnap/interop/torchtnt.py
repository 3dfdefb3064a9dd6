# SPDX-License-Identifier: Apache-2.0
"""TorchTNT's ``TorchSnapshotSaver``, over snapshots. See ``docs/integrations/torchtnt.md``.

    from actorsnap.interop.torchtnt import TorchSnapshotSaver

Puts ``actorsnap.interop.torchsnapshot`` where TorchTNT's module has torchsnapshot, for all of the
process. torchsnapshot itself is not needed; its last release lacks what TorchTNT 0.2.4 imports.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from actorsnap import sync
from actorsnap.errors import ActorSnapError, NotASnapshot, describe
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.interop import torchsnapshot
from actorsnap.interop.checkpoints import find_damage
from actorsnap.interop.formats.torchsnapshot_records import METADATA_KEY
from actorsnap.runtime.location import make_location, resolve_options
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source

try:
    from torchtnt.framework.callbacks import torchsnapshot_saver as _saver
    from torchtnt.utils import checkpoint as _checkpoint
except ImportError as error:
    raise ImportError(
        "actorsnap.interop.torchtnt needs TorchTNT 0.2.4, which imports pkg_resources: "
        "pip install 'actorsnap[torchtnt]' 'setuptools<81'"
    ) from (None if error.name == "torchtnt" else error)

__all__ = ["TorchSnapshotSaver"]

logger = logging.getLogger(__name__)

_exists = _checkpoint._metadata_exists


def _is_whole(fs: Any, path: str, metadata_fname: str) -> bool:
    """Whether TorchTNT may take a folder for a checkpoint; rank 0 asks.

    Folders that torchsnapshot wrote count, too. Damaged ones on a local disk do not.
    """
    names = (COMMIT_KEY, METADATA_KEY)
    if metadata_fname not in names:  # of another saver
        return bool(_exists(fs, path, metadata_fname))
    if not any([_exists(fs, path, name) for name in names]):
        return False
    if "file" not in fs.protocol:  # credentials are unknown here
        return True
    source = Source(make_location(path, None), resolve_options(None))
    damage = run_sync(find_damage(source), name="restore_from_latest")
    if damage:
        logger.warning("%s is skipped: %s", path, "; ".join(map(describe, damage)))
    return damage == []


vars(_checkpoint).update(_metadata_exists=_is_whole)
vars(_saver).update(
    torchsnapshot=torchsnapshot,
    Snapshot=torchsnapshot.Snapshot,
    PendingSnapshot=torchsnapshot.PendingSnapshot,
    override_max_per_rank_io_concurrency=contextlib.nullcontext,
    _TStateful=torchsnapshot.Stateful,
    _TORCHSNAPSHOT_AVAILABLE=True,
)


class TorchSnapshotSaver(_saver.TorchSnapshotSaver):  # type: ignore[misc]
    """TorchTNT's callback. Its knobs have no effect.

    An old checkpoint is deleted once the save in flight is committed. If that fails, the next save,
    or the end of the training, raises the error, and the old checkpoint stays.
    """

    metadata_fname = COMMIT_KEY

    def __init__(self, dirpath: str, **kwargs: Any) -> None:
        super().__init__(dirpath, **kwargs)
        self._prev_snapshot: torchsnapshot.PendingSnapshot | None
        self._removals: list[Any] = []
        self._checkpoint_manager.remove_checkpoint = self._remove_later

    def on_train_end(self, state: Any, unit: Any) -> None:
        super().on_train_end(state, unit)
        self._wait()

    def _checkpoint_impl(self, state: Any, unit: Any, *, checkpoint_path: str, hook: str) -> bool:
        previous = self._prev_snapshot
        if previous is not None and previous.path != checkpoint_path:
            self._wait()  # TorchTNT overlooks a save that failed before
        is_saved: bool = super()._checkpoint_impl(
            state, unit, checkpoint_path=checkpoint_path, hook=hook
        )
        if is_saved:  # in place of one of that name, maybe
            self._forget(checkpoint_path)
        return is_saved

    def _wait(self) -> None:
        """Waits for the save in flight, and makes the removals.

        Raises:
            RuntimeError: The save failed. Raised once; no snapshot is removed.
        """
        pending = self._prev_snapshot
        if pending is not None:
            try:
                pending.wait()
            except RuntimeError:
                self._prev_snapshot = None
                self._forget(pending.path)
                self._checkpoint_manager._ckpt_paths[:0] = self._removals
                self._removals.clear()
                raise
        while self._removals:
            self._remove(self._removals.pop(0).path)

    def _remove_later(self) -> None:
        """TorchTNT calls this in place of its ``remove_checkpoint``, on all ranks."""
        self._removals.append(self._checkpoint_manager._ckpt_paths.pop(0))
        if self._prev_snapshot is None:
            self._wait()

    def _remove(self, path: str) -> None:
        """Ends the snapshot first, so that a job killed in here leaves no damaged one."""
        if self._pg_wrapper.get_rank() != 0:
            return
        try:
            with contextlib.suppress(NotASnapshot):
                sync.Snapshot(path, storage_options=self._storage_options).delete()
            fs, _ = _checkpoint.url_to_fs(path)
            if fs.exists(path):
                fs.rm(path, recursive=True)
        except (ActorSnapError, OSError) as error:
            logger.warning("the checkpoint %s is not removed: %s", path, error)

    def _forget(self, path: str) -> None:
        paths = self._checkpoint_manager._ckpt_paths
        paths[:] = [each for each in paths if each.path != path]
