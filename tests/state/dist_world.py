# SPDX-License-Identifier: Apache-2.0
"""Real processes over gloo for the tests of distributed tensors.

Each rank runs every case of ``dist_cases`` for its world's size in order, and writes
``{case: error or None}``.
"""

from __future__ import annotations

import datetime
import json
import signal
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks.models import MODULES
from tests.state.dist_cases import CASES
from tests.worlds import Child, Director, Rank, World

LIMIT_S = 300


def run_worlds(folder: Path, sizes: Iterable[int]) -> dict[int, dict[str, str]]:
    """Runs all cases of each size; returns what failed where, by case, empty if nothing."""
    failures: dict[int, dict[str, str]] = {}
    with Director("tests.state.dist_world", *MODULES) as director:
        for size in sizes:
            of_size = folder / str(size)
            of_size.mkdir()
            ended = director.play("direct_cases", folder=str(of_size), num_ranks=size)
            failures[size] = _failures(of_size, ended)
    return failures


def _failures(folder: Path, ended: list[str]) -> dict[str, str]:
    failures: dict[str, str] = {}
    for rank, ending in enumerate(ended):
        report = folder / f"rank{rank}.json"
        if not report.exists():
            failures["*"] = f"rank {rank} ended early: {ending}"
            continue
        for case, error in json.loads(report.read_text()).items():
            text = failures.get(case, "")
            failures[case] = text + (f"rank {rank}: {error}\n" if error else "")
    return failures


def direct_cases(folder: str, num_ranks: int) -> list[str]:
    """How each rank ended: nothing, or its error."""
    signal.alarm(LIMIT_S + 10)  # behind those of the ranks
    world = World(num_ranks, _run_cases, folder=folder)
    try:
        return [_ending(rank) for rank in world.ranks]
    finally:
        world.end()


def _ending(rank: Child) -> str:
    try:
        rank.result()
    except AssertionError as error:
        return str(error)
    return ""


def _run_cases(place: Rank, folder: str) -> None:
    signal.alarm(LIMIT_S)
    warnings.simplefilter("ignore")
    rank, world = place.rank, place.world
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )
    report: dict[str, str | None] = {}
    for name, (size, case) in CASES.items():
        if size != world:
            continue
        torch.manual_seed(7)
        try:
            case()
            report[name] = None
        except Exception:
            report[name] = traceback.format_exc()
        # Written first: a rank that fails alone makes the others fail in what follows.
        partial = Path(folder) / f"rank{rank}.part"
        partial.write_text(json.dumps(report))
        partial.rename(Path(folder) / f"rank{rank}.json")
        failed: list[bool] = [False] * world
        dist.all_gather_object(failed, report[name] is not None)
        if any(failed) and not all(failed):
            break  # ranks may be out of step; what follows would say nothing
    dist.barrier()
    dist.destroy_process_group()
