"""What ranks and directors do in ``test_saves.py`` (see ``tests.worlds``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actorsnap.sync import Snapshot
from tests.ranks.models import STATES, full
from tests.worlds import Rank, World

__all__ = ["direct_take"]


def take(me: Rank, kind: str, path: str, folder: str) -> dict[str, Any]:
    """Saves twice, the second time in the background, and says what was to be saved."""
    me.join_gloo()
    state = STATES[kind]()
    expected = {key: full(value.state_dict()) for key, value in state.items()}
    torch.save(expected, Path(folder) / f"expected{me.rank}.pt")
    snapshot = Snapshot.take(path, state, metadata={"by": me.rank})
    pending = Snapshot.async_take(path + "-again", state)
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, torch.nn.Module):
                for parameter in value.parameters():
                    parameter.mul_(2)
    again = pending.wait()
    dist.barrier()
    said = {"path": snapshot.path, "metadata": snapshot.metadata, "again": again.path}
    dist.destroy_process_group()
    return said


def direct_take(num_ranks: int, kind: str, path: str, folder: str) -> list[Any]:
    world = World(num_ranks, take, kind=kind, path=path, folder=folder)
    try:
        return world.results()
    finally:
        world.end()
