# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``tests/test_examples.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

from examples import fsdp_resume, managed
from tests.worlds import Rank, World

__all__ = ["direct_fsdp_resume", "direct_managed"]

SIZE = fsdp_resume.SIZES["small"]


def fsdp_resume_run(me: Rank, who: str, folder: str, kill: bool) -> str:
    """What this rank says in one run."""
    me.follow_torchrun()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        asyncio.run(fsdp_resume.run(who, SIZE, Path(folder), kill=kill))
    return said.getvalue()


def direct_fsdp_resume(root: str) -> dict[str, Any]:
    """The four runs of the example, in ranks that need not import torch."""
    straight, killed, on_1, on_3 = (Path(root) / each for each in ("straight", "killed", "1", "3"))

    def play(num_ranks: int, folder: Path, *, kill: bool = False) -> str:
        world = World(num_ranks, fsdp_resume_run, who=folder.name, folder=str(folder), kill=kill)
        try:
            if kill:
                assert world.ranks[-1].dies()
                return ""
            return str(world.results()[0])
        finally:
            world.end()

    play(2, straight)
    play(2, killed, kill=True)
    said = {}
    for num_ranks, folder in ((1, on_1), (3, on_3)):
        shutil.copytree(killed, folder, ignore=shutil.ignore_patterns("*.jsonl"))
        said[folder.name] = play(num_ranks, folder)
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        runs = map(fsdp_resume.read, (straight, killed, on_1, on_3))
        status = fsdp_resume.compare(SIZE, *runs)
    return {"status": status, "said": said, "table": table.getvalue()}


def managed_run(me: Rank, folder: str, kill_at: int | None) -> str:
    """What this rank says in one run."""
    me.follow_torchrun()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        managed.train(folder, 25, kill_at)
    return said.getvalue()


def direct_managed(root: str) -> dict[str, str]:
    """What rank 0 of 2 says in a run without interruption, and in one after all were killed."""

    def play(folder: str, kill_at: int | None = None) -> str:
        world = World(2, managed_run, folder=folder, kill_at=kill_at)
        try:
            if kill_at is not None:
                assert all(rank.dies() for rank in world.ranks)
                return ""
            return str(world.results()[0])
        finally:
            world.end()

    straight = play(f"{root}/straight")
    play(f"{root}/killed", kill_at=10)
    return {"straight": straight, "resumed": play(f"{root}/killed")}
