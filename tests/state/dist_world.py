"""Real processes over gloo for the tests of distributed tensors.

``python -m tests.state.dist_world FOLDER RANK WORLD`` is one rank: it runs every case of
``dist_cases`` for that world size in order and writes ``{case: error or None}``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0


def run_world(folder: Path, world: int) -> dict[str, str]:
    """Runs all cases on ``world`` ranks; returns what failed where, by case, empty if nothing."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    logs = [(folder / f"log{rank}").open("wb") for rank in range(world)]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.state.dist_world", str(folder), str(rank), str(world)],
            cwd=ROOT,
            env=environment,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline:
            codes = [child.poll() for child in children]
            if None not in codes or any(code not in (None, 0) for code in codes):
                break
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
        for log in logs:
            log.close()
    failures: dict[str, str] = {}
    for rank in range(world):
        report = folder / f"rank{rank}.json"
        if not report.exists():
            failures["*"] = f"rank {rank} ended early:\n" + (folder / f"log{rank}").read_text()
            continue
        for case, error in json.loads(report.read_text()).items():
            text = failures.get(case, "")
            failures[case] = text + (f"rank {rank}: {error}\n" if error else "")
    return failures


def main(folder: Path, rank: int, world: int) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    from tests.state.dist_cases import CASES

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=20),
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
        partial = folder / f"rank{rank}.part"
        partial.write_text(json.dumps(report))
        partial.rename(folder / f"rank{rank}.json")
        failed: list[bool] = [False] * world
        dist.all_gather_object(failed, report[name] is not None)
        if any(failed) and not all(failed):
            break  # ranks may be out of step; what follows would say nothing
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
