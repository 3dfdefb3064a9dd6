# SPDX-License-Identifier: Apache-2.0
"""For ``make upstream-tests``: each process of PyTorch's own tests writes and reads snapshots.

Tests spawn ranks, which import no conftest; so this is on their ``PYTHONPATH``, where Python finds
it at each start.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch.distributed
import torch.testing._internal.common_distributed as common

from actorsnap.interop.dcp import ActorsnapWriter, install
from actorsnap.sync import Snapshot

_finish = ActorsnapWriter.finish
_skip: Any = common.skip_if_lt_x_gpu


def finish(writer: ActorsnapWriter, *args: Any, **kwargs: Any) -> None:
    """Checks that the save was ours."""
    _finish(writer, *args, **kwargs)
    assert writer.path is not None
    assert Snapshot(writer.path).verify().ok
    assert not [*Path(writer.path).glob("*.distcp")]


vars(common)["skip_if_lt_x_gpu"] = functools.partial(_skip, allow_cpu=True)
setattr(ActorsnapWriter, "finish", finish)  # noqa: B010
if torch.distributed.is_available():
    install()
