# SPDX-License-Identifier: Apache-2.0
"""torchsnapshot's own tests, with ``actorsnap.interop.torchsnapshot`` in its place.

    cd upstream; PYTHONPATH=$REPO:$REPO/tests/interop/upstream_torchsnapshot \
        pytest -c /dev/null --rootdir=. tests/test_snapshot.py tests/test_ddp.py ...

with ``tests`` of torchsnapshot at tag 0.1.0 in ``upstream/``, which git ignores. Tests start ranks,
which import no conftest; so this is on their ``PYTHONPATH``, where Python finds it at each start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchsnapshot
import torchsnapshot.manifest
import torchsnapshot.snapshot

from actorsnap import sync
from actorsnap.interop import torchsnapshot as ours

for module in (torchsnapshot, torchsnapshot.snapshot, torchsnapshot.manifest):
    for name in ours.__all__:
        if hasattr(module, name):
            setattr(module, name, getattr(ours, name))

_take = ours.Snapshot.take.__func__  # type: ignore[attr-defined]


def _checked_take(cls: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """Checks that the save was ours."""
    snapshot = _take(cls, path, *args, **kwargs)
    if snapshot.path == path:  # rank 0's
        assert sync.Snapshot(path).verify().ok
        assert not Path(path, ".snapshot_metadata").exists()
    return snapshot


setattr(ours.Snapshot, "take", classmethod(_checked_take))  # noqa: B010
