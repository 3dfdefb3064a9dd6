# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``tests/ranks/test_pages.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.pages import ROOT, blocks
from tests.worlds import Rank, World

__all__ = ["direct_page"]


def page(me: Rank, name: str, folder: str, only: str = "") -> list[str]:
    """Runs the Python blocks of a page, one after the other; what each has printed.

    Args:
        only: Text of the blocks that are run; empty: all are.
    """
    me.follow_torchrun()
    os.chdir(folder)
    names: dict[str, Any] = {}
    printed = []
    for block in blocks((ROOT / name).read_text(), "python"):
        if only not in block:
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(block, f"{name}: {block[:60]!r}", "exec"), names)
        printed.append(said.getvalue())
    if dist.is_initialized():
        dist.barrier()  # a rank ends here without `atexit`, which sends its last messages
        dist.destroy_process_group()
    return printed


def direct_page(num_ranks: int, name: str, folder: str, only: str = "") -> list[Any]:
    Path(folder).mkdir(exist_ok=True)
    world = World(num_ranks, page, name=name, folder=folder, only=only)
    try:
        return world.results()
    finally:
        world.end()
