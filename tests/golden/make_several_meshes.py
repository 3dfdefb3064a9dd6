# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/several_meshes``: tensors of one name on several meshes, by four ranks.

It was made when a save compared checksums and stored equal shards of several meshes
once. Now each mesh stores its own: this file makes another snapshot, and the same state restores
from it. As ``make_v1.py``: run once, and neither this file nor the snapshot is ever
changed.

``python -m tests.golden.make_several_meshes FOLDER`` makes one again.
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

NUM_RANKS = 4
ATTEMPT = "20260101T000000-00000000-1-00000000"

PIPELINE = ((0, 1), (2, 3))
"""Two stages of two ranks each."""

GRID = ((0, 2), (1, 3))
"""The same ranks, across."""

MESHES = {
    "embedding": PIPELINE,
    "scale": PIPELINE,
    "layer0": PIPELINE[:1],
    "layer1": PIPELINE[1:],
    "norm": GRID,
    "expert": ((0, 3), (1, 2)),
    "table": ((0, 1, 2), (3,)),
    "cut": ((0,), (1, 2, 3)),
}
"""The meshes of each tensor. Equal everywhere, but for ``expert``, of which each mesh has another
one, and ``table``, of which rank 3 has."""


def whole(name: str, mesh: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor that lies on a mesh."""
    seed = list(MESHES).index(name)
    values = torch.arange(24 * 8).reshape(24, 8) * 7 + seed
    if name == "expert" or (name, mesh) == ("table", (3,)):
        values = values + 100 * MESHES[name].index(mesh)
    return values.to(torch.uint8)


def held_by(rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that a rank holds a part of, and on which mesh."""
    return {name: mesh for name, meshes in MESHES.items() for mesh in meshes if rank in mesh}


def app_state(rank: int) -> dict[str, Any]:
    """Returns a rank's state, made anew by each call."""
    held = {name: part_of(whole(name, mesh), mesh, rank) for name, mesh in held_by(rank).items()}
    return {"model": StateDict(held), "own": StateDict(rank=rank, x=torch.full((5,), float(rank)))}


async def make(folder: Path) -> None:
    """Takes the snapshot."""
    storage = open_storage(
        folder, StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    )
    world = SimulatedSave(
        storages=[storage] * NUM_RANKS,
        states=[app_state(rank) for rank in range(NUM_RANKS)],
        run_blocking=run_blocking_in_thread,
        attempt=ATTEMPT,
    )
    assert await world.run() == dict.fromkeys(range(NUM_RANKS))
    await storage.aclose()


if __name__ == "__main__":
    anyio.run(make, Path(sys.argv[1]))
