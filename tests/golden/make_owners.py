# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/owners``: format version 1 with the feature of that name.

By more ranks than a restore reads without the owner index. Tables name the pages with containers.
As ``make_v1.py``: run once, and neither this file nor the snapshot is ever changed.

``python -m tests.golden.make_owners FOLDER`` makes it again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from actorsnap import StateDict
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.testing import run_blocking_in_thread
from tests.actors.parts import part_of
from tests.support.world import SimulatedSave

ATTEMPT = "20260101T000000-00000000-1-00000000"
NUM_RANKS = 18
STAGE = range(12, NUM_RANKS)
IRREGULAR = (3, 4, 9, 16)

WHOLE = {
    "fsdp": torch.arange(35 * 3).reshape(35, 3).to(torch.uint8),
    "hsdp": torch.arange(18 * 2).reshape(18, 2).to(torch.uint8) + 100,
    "stage": torch.arange(12 * 2).reshape(12, 2).to(torch.uint8) + 200,
    "irregular": torch.arange(8 * 2).reshape(8, 2).to(torch.uint8) + 50,
}


def part(name: str, ranks: range, rank: int, *, copies: int = 1) -> DTensor:
    """Returns a rank's part of a tensor: its rows, which ``copies`` ranks have."""
    whole = WHOLE[name]
    numbers = torch.tensor(ranks)
    placements: tuple[Any, ...] = (Shard(0),)
    if copies > 1:
        numbers, placements = numbers.reshape(copies, -1), (Replicate(), Shard(0))
    mesh = DeviceMesh("cpu", numbers, _init_backend=False, _rank=rank)
    num_parts = len(ranks) // copies
    rows = -(-len(whole) // num_parts)
    first = (rank - ranks.start) % num_parts * rows
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(whole[first : first + rows].clone(), spec, requires_grad=False)


def model(rank: int, num_ranks: int) -> dict[str, Any]:
    """Returns a rank's part of what ``num_ranks`` divide, an even number."""
    return {
        "fsdp": part("fsdp", range(num_ranks), rank),
        "hsdp": part("hsdp", range(num_ranks), rank, copies=2),
    }


def app_state(rank: int) -> dict[str, Any]:
    """Returns a rank's state, made anew by each call."""
    base = torch.arange(6.0)
    own = {
        "rank": rank,
        "tied": [base, base[2:4]],
        "sparse": torch.eye(3).to_sparse(),
        "empty": [{}, ()],
        **{f"value{number}": number * 1.5 for number in range(20)},
    }
    state = {
        "model": StateDict(model(rank, NUM_RANKS)),
        "own": StateDict(own),
        "same": StateDict(x=torch.ones(3)),
    }
    if rank in IRREGULAR:
        state["irregular"] = StateDict(x=part_of(WHOLE["irregular"], IRREGULAR, rank))
    if rank in STAGE:
        state["stage"] = StateDict(x=part("stage", STAGE, rank))
    return state


async def make(folder: Path) -> None:
    """Takes the snapshot."""
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    storage = open_storage(folder, context)
    world = SimulatedSave(
        storages=[storage] * NUM_RANKS,
        states=[app_state(rank) for rank in range(NUM_RANKS)],
        run_blocking=run_blocking_in_thread,
        attempt=ATTEMPT,
        replicated=["same/**"],
    )
    assert await world.run() == dict.fromkeys(range(NUM_RANKS))
    await storage.aclose()


if __name__ == "__main__":
    anyio.run(make, Path(sys.argv[1]))
