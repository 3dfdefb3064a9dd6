"""TorchTNT's ``TorchSnapshotSaver``, over snapshots. See ``docs/frameworks.md``.

    from actorsnap.interop.torchtnt import TorchSnapshotSaver

Puts ``actorsnap.interop.torchsnapshot`` where TorchTNT's module has torchsnapshot, for all of the
process. torchsnapshot itself is not needed; its last release lacks what TorchTNT 0.2.4 imports.
"""

from __future__ import annotations

import contextlib

from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.interop import torchsnapshot

try:
    from torchtnt.framework.callbacks import torchsnapshot_saver as _saver
except ImportError as error:
    raise ImportError(
        "actorsnap.interop.torchtnt needs TorchTNT 0.2.4, which imports pkg_resources: "
        "pip install 'actorsnap[torchtnt]' 'setuptools<81'"
    ) from error

__all__ = ["TorchSnapshotSaver"]

vars(_saver).update(
    torchsnapshot=torchsnapshot,
    Snapshot=torchsnapshot.Snapshot,
    PendingSnapshot=torchsnapshot.PendingSnapshot,
    override_max_per_rank_io_concurrency=contextlib.nullcontext,
    _TStateful=torchsnapshot.Stateful,
    _TORCHSNAPSHOT_AVAILABLE=True,
)


class TorchSnapshotSaver(_saver.TorchSnapshotSaver):  # type: ignore[misc]
    """TorchTNT's callback. Its knobs have no effect."""

    metadata_fname = COMMIT_KEY
    """By which TorchTNT knows a whole checkpoint."""
