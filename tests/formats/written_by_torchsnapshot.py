# SPDX-License-Identifier: Apache-2.0
"""Writes ``data/torchsnapshot``, by torchsnapshot 0.1.0. The tests need what it wrote only.

Run in a folder of its own, in an environment with torch and torchsnapshot:

    python tests/formats/written_by_torchsnapshot.py tests/formats/data/torchsnapshot
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

WORLD_SIZE = 2


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + number)
    return model


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An Adam that has made a step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def make_values() -> dict[str, Any]:
    """Leaves of each kind that torchsnapshot knows."""
    dense = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {
        "int": -(1 << 70),
        "float": 0.1,
        "infinite": float("inf"),
        "str": "日本 %2F",
        "bool": True,
        "bytes": b"\x00\xff",
        "none": None,
        "tuple": (1, 2.5, "x", (torch.arange(3), None)),
        "list": [10, [torch.ones(2)], {}, *range(12)],
        "dict": {1: "int", "a/b%2F": {"%": torch.zeros(1)}, "": "", "-3": "str"},
        "collision": {"1": "str", 1: "int"},
        "ordered": OrderedDict(b=1, a=OrderedDict()),
        "pairs": {(1, 2): 3},
        "size": torch.Size([1, 2]),
        "0-d": torch.tensor(7, dtype=torch.int16),
        "bfloat16": torch.arange(4).to(torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j, 3j]),
        "transposed": dense.t(),
        "pickled": argparse.Namespace(lr=0.5),
    }


def make_shared(rank: int) -> dict[str, Any]:
    """Replicated and private leaves; those that are named ``large`` are cut into chunks."""
    return {
        "replicated": torch.arange(4),
        "replicated_large": torch.arange(60, dtype=torch.float64).reshape(20, 3),
        "replicated_object": (1, torch.arange(2)),
        "replicated_value": 5,
        "private": torch.full((3,), rank),
        "private_large": torch.arange(60, dtype=torch.float64).reshape(20, 3) * (rank + 1),
        "private_object": (rank, torch.full((2,), rank)),
        "private_value": rank,
        "all_alike": "the same",
    }


def make_table(rows: int = 7, columns: int = 5) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def _make_sharded(rank: int, dim: int) -> Any:
    """A ShardedTensor: the first rank has 4 rows or columns, the second has the rest."""
    sharded_tensor: Any = import_module("torch.distributed._shard.sharded_tensor")
    table = make_table()
    start = 0 if rank == 0 else 4
    size = 4 if rank == 0 else table.shape[dim] - 4
    offsets = [start, 0] if dim == 0 else [0, start]
    local = table.narrow(dim, start, size).contiguous()
    shard = sharded_tensor.Shard.from_tensor_and_offsets(local, offsets, rank)
    return sharded_tensor.init_from_local_shards([shard], *table.shape)


def _write_alone(folder: Path) -> None:
    from torchsnapshot import RNGState, Snapshot, StateDict, knobs

    model = make_model()
    app_state = {
        "model": model,
        "optimizer": make_optimizer(model),
        "values": StateDict(**make_values()),
        "rng": RNGState(),
    }
    Snapshot.take(str(folder / "slabs"), app_state)
    with knobs.override_is_batching_disabled(True), knobs.override_max_chunk_size_bytes(100):
        table = make_table(20, 3)
        half = torch.arange(40).to(torch.complex64)
        app_state = {"values": StateDict(table=table, complex=half, row=table[:1])}
        Snapshot.take(str(folder / "files"), {**app_state, "model": model})


def _write_ranks(rank: int, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict, knobs

    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    app_state = {
        "shared": StateDict(**make_shared(rank)),
        "sharded": StateDict(rows=_make_sharded(rank, 0), columns=_make_sharded(rank, 1)),
        f"only{rank}": StateDict(x=torch.full((2,), rank)),
    }
    with knobs.override_max_chunk_size_bytes(100), knobs.override_max_shard_size_bytes(40):
        Snapshot.take(str(folder / "ranks"), app_state, replicated=["shared/replicated*"])
    torch.distributed.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    _write_alone(folder)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511")
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn(_write_ranks, (folder,), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
