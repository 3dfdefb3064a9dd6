# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/tables``: format version 1 with the feature of that name.

The snapshots ``1`` and ``4`` of as many ranks. Their manifests have several pages. As
``make_v1.py``: run once, and neither this file nor the snapshots are ever changed.

``python -m tests.golden.make_tables FOLDER`` makes them again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import torch

from actorsnap import StateDict
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.testing import run_blocking_in_thread
from tests.actors.parts import part_of
from tests.support.world import SimulatedSave

ATTEMPT = "20260101T000000-00000000-1-00000000"
WORLD_SIZES = (1, 4)
NUM_TENSORS = 40
STEP = 70
METADATA = {"loss": 0.25}


def whole(number: int) -> torch.Tensor:
    """Returns a tensor of the model, which all ranks divide."""
    return (torch.arange(8 * 3).reshape(8, 3) * 5 + number).to(torch.uint8)


def app_state(rank: int, world_size: int) -> dict[str, Any]:
    """Returns a rank's state, made anew by each call."""
    ranks = tuple(range(world_size))
    model = {f"w{number}": part_of(whole(number), ranks, rank) for number in range(NUM_TENSORS)}
    base = torch.arange(6.0)
    own = {
        "rank": rank,
        "base": base + rank,
        "tied": [base, base[2:4]],
        "sparse": torch.eye(3).to_sparse(),
        "empty": {},
        **{f"value{number}": number * 1.5 for number in range(20)},
    }
    return {"model": StateDict(model), "own": StateDict(own), "same": StateDict(x=torch.ones(3))}


async def make(folder: Path) -> None:
    """Takes the snapshots."""
    for world_size in WORLD_SIZES:
        context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
        storage = open_storage(folder / str(world_size), context)
        world = SimulatedSave(
            storages=[storage] * world_size,
            states=[app_state(rank, world_size) for rank in range(world_size)],
            run_blocking=run_blocking_in_thread,
            attempt=ATTEMPT,
            replicated=["same/**"],
            step=STEP,
            metadata=METADATA,
        )
        assert await world.run() == dict.fromkeys(range(world_size))
        await storage.aclose()


if __name__ == "__main__":
    anyio.run(make, Path(sys.argv[1]))
