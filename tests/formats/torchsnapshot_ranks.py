# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_torchsnapshot_ranks.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from actorsnap import Options, StateDict
from actorsnap.sync import Snapshot
from tests.formats.written_by_torchsnapshot import make_table
from tests.worlds import Rank, World

__all__ = ["direct"]


def _work(me: Rank, path: str, mode: str) -> dict[str, Any]:
    me.join_gloo()
    mesh = init_device_mesh("cpu", (me.world,))
    zeros = torch.zeros(7, 5)
    sharded = StateDict(
        rows=distribute_tensor(zeros, mesh, [Shard(1)]),
        columns=distribute_tensor(zeros, mesh, [Shard(0)]),
    )
    shared = StateDict(replicated_large=torch.zeros(20, 3, dtype=torch.float64), own=None)
    snapshot = Snapshot(path, options=Options(read_mode=mode, timeout_s=60, lost_after_s=10))
    report = snapshot.restore({"sharded": sharded, "shared": shared}, strict=False)
    table = make_table()
    found = {
        "sharded": [torch.equal(sharded[name].full_tensor(), table) for name in sharded],
        "shared": {
            name: value.tolist() if isinstance(value, torch.Tensor) else str(value)
            for name, value in shared.items()
        },
        "missing": sorted(report.missing),
    }
    dist.destroy_process_group()
    return found


def direct(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, functools.partial(_work, **arguments))
    try:
        return world.results()
    finally:
        world.end()
