"""What does a restore of a snapshot of thousands of ranks cost a rank, and the storage?

As ``bench/local.py``: one JSON line per row (``ROWS``). The snapshots are those of
``bench/simulated.py``; each rank restores alone in a process of its own, as it would among others,
but for the rounds with them. Small jobs are real ranks, of this tree and of another one.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.child import in_child
from bench.local import Need, Setting, emit, note, status_kib

__all__ = ["ROWS"]

KIB, MIB = 1 << 10, 1 << 20
FOLDER = Path(os.environ.get("BENCH_SCALE_DIR", tempfile.gettempdir())) / "actorsnap-bench-scale"
"""Kept between runs: 1 GB of manifests."""

SAMPLE = (0, 1, 5, 0.37, 0.5, 0.81, -1)
"""Ranks that are measured: numbers, or parts of all ranks."""


def sample(ranks: int) -> list[int]:
    return sorted({int(n * ranks) if isinstance(n, float) else n % ranks for n in SAMPLE})


class _Stop(BaseException):
    """Enough was seen."""


# In children --------------------------------------------------------------------------------


def _use(is_filled: bool = True) -> Any:
    from bench import simulated

    simulated.scheme.snapshots = simulated.Snapshots(FOLDER)
    simulated.scheme.asked = simulated.Asked()
    simulated.scheme.is_filled = is_filled
    return simulated


def _restore(url: str, state: Any, rank: int, *, verify: bool = True) -> Any:
    from actorsnap import Options
    from actorsnap.planning.shared_reads import ReadMode
    from actorsnap.protocol.restore import RestoreDecisions
    from actorsnap.runtime.location import make_location, resolve_options
    from actorsnap.runtime.restore import restore_by
    from actorsnap.runtime.rounds import Alone
    from actorsnap.runtime.script import run_sync
    from actorsnap.runtime.source import Source

    options = Options(read_mode="direct", verify=verify, memory_budget_bytes=256 * MIB)
    source = Source(make_location(url, None), resolve_options(options))
    rounds = Alone(RestoreDecisions(mode=ReadMode.DIRECT), rank=rank)
    return run_sync(restore_by(rounds, source, state, strict=True), name="restore")


def _reset_peak() -> int:
    """Returns the resident KiB; ``VmHWM`` starts again from there."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_kib("VmRSS")


def restored(
    saved: list[Any], loaded: list[Any], rank: int, *, stops: bool = False
) -> dict[str, Any]:
    """One rank restores. ``stops``: at the first read of data.

    Returns the storage's counts, seconds until the first read, MiB until then.
    """
    torch.set_num_threads(1)
    simulated = _use()
    source, job = simulated.Job(*saved), simulated.Job(*loaded)
    # What is made or imported on first use is there before.
    small = simulated.Job("fsdp", 2, "tiny")
    _restore(f"sim://{small.name}", simulated.app_state(small, 0), 0)
    state = simulated.app_state(job, rank, fill=1.0)
    simulated.scheme.snapshots.place(source)
    asked = simulated.scheme.asked = simulated.Asked()
    found: dict[str, Any] = {}

    def on_data() -> None:
        found["peak_mib"] = (status_kib("VmHWM") - before_kib) / 1024

    asked.on_data = on_data
    before_kib = _reset_peak()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    report = _restore(f"sim://{source.name}", state, rank)
    end_s = time.perf_counter()
    model = next(iter(state.values()))
    for name, tensor in model.items():
        if not tensor._local_tensor.view(torch.int16).eq(0).all():
            raise RuntimeError(f"{name} was not restored")
    own = FOLDER / source.name / f"{rank}.json"
    if not own.exists():
        simulated.scheme.snapshots.make(source, [rank])
    return {
        **found,
        "first_read_s": asked.first_data_s - begin_s,
        "total_s": end_s - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "requests": asked.before_data,
        "index_requests": asked.index,
        "index_bytes": asked.index_bytes,
        "own_manifest": own.stat().st_size,
        "manifests": len(asked.manifests),
        "data_requests": asked.data,
        "data_bytes": asked.data_bytes,
        "restored_bytes": report.nbytes,
    }


def _measured(saved: tuple[Any, ...], loaded: tuple[Any, ...], rank: int) -> dict[str, Any]:
    """The second of two runs: the first one makes manifests."""
    job = {"saved": list(saved), "loaded": list(loaded), "rank": rank}
    in_child(restored, **job)
    found: dict[str, Any] = in_child(restored, **job)
    note(f"    rank {rank}: {found}")
    return found


# Rows ---------------------------------------------------------------------------------------

_WAYS: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...], float], ...] = tuple(
    [(f"{kind} 4,096 -> 4,096", (kind, 4096), (kind, 4096), 2.0) for kind in ("fsdp", "hsdp", "tp", "stages")]
    + [(f"{kind} 4,096 -> 3,072", (kind, 4096), (kind, 3072), 4.0) for kind in ("fsdp", "hsdp", "tp", "stages")]
    + [
        ("fsdp -> hsdp 4,096", ("fsdp", 4096), ("hsdp", 4096), 4.0),
        ("fsdp 4,096 -> 4,096, Llama's shapes", ("fsdp", 4096, "llama"), ("fsdp", 4096, "llama"), 2.0),
        ("fsdp 4,096 -> 3,072, Llama's shapes", ("fsdp", 4096, "llama"), ("fsdp", 3072, "llama"), 4.0),
    ]
)


def row_index(setting: Setting) -> None:
    """Index bytes read by one rank beyond 64 KiB, in manifests of its own; requests."""
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    facts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, saved, loaded, bound in _WAYS:
        note(f"index: {name}")
        try:
            ranks = [rank for rank in sample(loaded[1])]
            runs = {rank: _measured(saved, loaded, rank) for rank in ranks}
        except RuntimeError as error:
            missing[name] = str(error)[:200]
            continue
        worst = max((run["index_bytes"] - 64 * KIB) / run["own_manifest"] for run in runs.values())
        ratios[f"{name}: bytes"] = worst
        needs[f"{name}: bytes"] = Need(bound, at_least=False)
        ratios[f"{name}: requests"] = max(run["requests"] for run in runs.values())
        needs[f"{name}: requests"] = Need(8, at_least=False)
        facts[name] = {
            "index_bytes_a_manifest": round(
                max(run["index_bytes"] / run["own_manifest"] for run in runs.values()), 3
            ),
            "own_manifest": [run["own_manifest"] for run in runs.values()],
            "index_bytes": [run["index_bytes"] for run in runs.values()],
            "manifests": [run["manifests"] for run in runs.values()],
            "first_read_s": [round(run["first_read_s"], 3) for run in runs.values()],
            "peak_mib": [round(run["peak_mib"], 1) for run in runs.values()],
        }
    emit(
        "scale index of one rank",
        ratios=ratios,
        needs=needs,
        missing=missing,
        unit="(index bytes - 64 KiB) / own manifest, worst rank; requests before the first data",
        ways=facts,
    )


def row_large(setting: Setting) -> None:
    """Memory and time until the first read, 8,192 ranks saved."""
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    facts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for kind in ("fsdp", "hsdp", "tp", "stages"):
        note(f"8,192 ranks: {kind}")
        try:
            runs = [_measured((kind, 8192), (kind, 8192), rank) for rank in (1, 5000)]
        except RuntimeError as error:
            missing[kind] = str(error)[:200]
            continue
        ratios[f"{kind}: MiB"] = max(run["peak_mib"] for run in runs)
        needs[f"{kind}: MiB"] = Need(64, at_least=False)
        ratios[f"{kind}: s"] = max(run["first_read_s"] for run in runs)
        needs[f"{kind}: s"] = Need(0.5, at_least=False)
        facts[kind] = runs
    emit(
        "scale 8,192 ranks",
        ratios=ratios,
        needs=needs,
        missing=missing,
        unit="growth of resident memory, seconds; from the call to the first read of data",
        runs=facts,
    )


ROWS: dict[str, Callable[[Setting], None]] = {
    "scale-index": row_index,
    "scale-large": row_large,
}
