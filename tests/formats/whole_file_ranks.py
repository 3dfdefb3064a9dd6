# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_whole_file_ranks.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from actorsnap import Options, StateDict
from actorsnap.storage.base import Storage, StorageContext, num_bytes
from actorsnap.storage.fs import open_fs
from actorsnap.storage.registry import register
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import Snapshot
from tests.worlds import Rank, World

__all__ = ["direct", "make_tensors"]


def make_tensors() -> dict[str, torch.Tensor]:
    """With rows that are long enough to be read in parts: blocks are of 4 KiB."""
    return {
        "rows": torch.arange(96 * 1024, dtype=torch.float32).view(96, 1024),
        "columns": torch.arange(4.0 * 96 * 1024).view(4, 96 * 1024),
        "shared": torch.arange(64 * 1024, dtype=torch.float32) / 7,
        "step": torch.tensor(12),
    }


class _Counting(Wrapper):
    """Counts the bytes that are read into tensors; indexes are read by ``get``."""

    total = 0

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await super().read_into(key, offset, views)
        _Counting.total += num_bytes(views)


def _open(url: str, context: StorageContext) -> Storage:
    return _Counting(open_fs(url.removeprefix("counting://"), context))


def _work(me: Rank, path: str, mode: str) -> dict[str, Any]:
    me.join_gloo()
    register("counting", _open)
    mesh = init_device_mesh("cpu", (me.world,))
    wanted = make_tensors()
    targets = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    model = StateDict(
        rows=distribute_tensor(targets["rows"], mesh, [Shard(0)]),
        columns=distribute_tensor(targets["columns"], mesh, [Shard(1)]),
        shared=targets["shared"],
        step=distribute_tensor(targets["step"], mesh, [Replicate()]),
    )
    options = Options(read_mode=mode, timeout_s=60, lost_after_s=10)
    report = Snapshot(f"counting://{path}", options=options).restore({"model": model})
    found = {
        name: value.full_tensor() if name != "shared" else value for name, value in model.items()
    }
    dist.destroy_process_group()
    return {
        "is_complete": report.is_complete,
        "equal": [torch.equal(found[name], tensor) for name, tensor in wanted.items()],
        "num_read": _Counting.total,
    }


def direct(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, functools.partial(_work, **arguments))
    try:
        return world.results()
    finally:
        world.end()
