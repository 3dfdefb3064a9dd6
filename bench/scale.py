# SPDX-License-Identifier: Apache-2.0
"""What does a restore of a snapshot of thousands of ranks cost a rank, and the storage?

As ``bench/local.py``: one JSON line per row (``ROWS``). The snapshots are those of
``bench/simulated.py``; each rank restores alone in a process of its own, as it would among others,
but for the rounds with them. Small jobs are real ranks, of this tree and of another one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from actorsnap import format as format_
from bench.child import in_child
from bench.local import Need, Setting, emit, note, status_kib

__all__ = ["ROWS"]

KIB, MIB = 1 << 10, 1 << 20
HERE = Path(__file__).resolve().parent


def _folder() -> Path:
    """Of the sources that make the manifests: those of others would be measured otherwise."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(format_.__path__[0]).glob("*.py")), HERE / "simulated.py"):
        digest.update(path.read_bytes())
    kept = Path(os.environ.get("BENCH_SCALE_DIR", tempfile.gettempdir()))
    return kept / f"actorsnap-bench-scale-{digest.hexdigest()[:8]}"


FOLDER = _folder()
"""Kept between runs: 1 GB of manifests."""

KINDS = ("fsdp", "hsdp", "tp", "stages")
SAMPLE = (0, 0.37, 0.81, -1)
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
    from actorsnap.runtime.restore import Overwritten, RestoreCall, restore_by
    from actorsnap.runtime.rounds import Alone
    from actorsnap.runtime.script import run_sync
    from actorsnap.runtime.source import Source

    options = Options(read_mode="direct", verify=verify, memory_budget_bytes=256 * MIB)
    source = Source(make_location(url, None), resolve_options(options))
    rounds = Alone(RestoreDecisions(mode=ReadMode.DIRECT), rank=rank)
    return run_sync(
        restore_by(rounds, source, RestoreCall(app_state=state), Overwritten()), name="restore"
    )


def _reset_peak() -> int:
    """Returns the resident KiB; ``VmHWM`` starts again from there."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_kib("VmRSS")


def restored(saved: list[Any], loaded: list[Any], rank: int) -> dict[str, Any]:
    """One rank restores.

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
    num_made = simulated.scheme.snapshots.num_made
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    report = _restore(f"sim://{source.name}", state, rank)
    end_s = time.perf_counter()
    if not asked.data:  # the rank holds nothing
        asked.before_data, asked.first_data_s = asked.index, end_s
        on_data()
    model = next(iter(state.values()))
    for name, tensor in model.items():
        if not tensor._local_tensor.view(torch.int16).eq(0).all():
            raise RuntimeError(f"{name} was not restored")
    num_made = simulated.scheme.snapshots.num_made - num_made
    own = FOLDER / source.name / f"{rank}.json"
    simulated.scheme.snapshots.make(source, [rank])
    return {
        **found,
        "num_made": num_made,
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
    """A run that finds all manifests made."""
    job = {"saved": list(saved), "loaded": list(loaded), "rank": rank}
    found: dict[str, Any] = in_child(restored, **job)
    while found["num_made"]:
        found = in_child(restored, **job)
    note(f"    rank {rank}: {found}")
    return found


# Rows ---------------------------------------------------------------------------------------

_LLAMA = "Llama's shapes"
_WAYS: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...], float], ...] = (
    *[(f"{kind} 4,096 -> 4,096", (kind, 4096), (kind, 4096), 2.0) for kind in KINDS],
    *[(f"{kind} 4,096 -> 3,072", (kind, 4096), (kind, 3072), 4.0) for kind in KINDS],
    ("fsdp -> hsdp 4,096", ("fsdp", 4096), ("hsdp", 4096), 4.0),
    *[
        (
            f"fsdp 4,096 -> {loaded:,}, {_LLAMA}",
            ("fsdp", 4096, "llama"),
            ("fsdp", loaded, "llama"),
            x,
        )
        for loaded, x in ((4096, 2.0), (3072, 4.0))
    ],
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
    for kind in KINDS:
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


# All ranks ----------------------------------------------------------------------------------


def dcp_metadata(ranks: int) -> int:
    """Bytes of the ``.metadata`` of the same state: the object that rank 0 of DCP pickles."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from actorsnap.planning.ownership import held_boxes

    simulated = _use()
    job = simulated.Job("fsdp", ranks)
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    key, tensors = job.tensors(0)
    at = [0] * ranks
    for each in tensors:
        name = f"{key}.{each.name}"
        size = torch.Size(each.shape)
        chunks = []
        for rank in range(ranks):
            for box in held_boxes(each.layout, each.shape, (rank,)):
                offsets = torch.Size(box.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
                length = box.volume * 2
                index = MetadataIndex(name, offsets, len(chunks) - 1)
                stored[index] = _StorageInfo(f"__{rank}_0.distcp", at[rank], length)
                at[rank] += length
        properties = TensorProperties(dtype=torch.bfloat16)
        described[name] = TensorStorageMetadata(properties, size, chunks)
    return len(pickle.dumps(Metadata(described, {n: (n,) for n in described}, stored)))


def row_all_ranks(setting: Setting) -> None:
    ranks = 1024
    note(f"all of {ranks} ranks")
    runs = [_measured(("fsdp", ranks), ("fsdp", ranks), rank) for rank in sample(ranks)]
    mean = sum(run["index_bytes"] for run in runs) / len(runs)
    metadata = in_child(dcp_metadata, ranks=ranks)
    emit(
        "scale index of all ranks",
        ratios={"actorsnap/dcp bytes": mean / metadata},
        needs={"actorsnap/dcp bytes": Need(0.01, at_least=False)},
        missing={},
        gib={
            "actorsnap": round(mean * ranks / 2**30, 3),
            "dcp": round(metadata * ranks / 2**30, 3),
        },
        bytes_of_one_rank={"actorsnap": round(mean), "dcp": metadata},
    )


# One process --------------------------------------------------------------------------------


def whole(ranks: int) -> dict[str, Any]:
    """One process restores everything into memory that is never touched."""
    torch.set_num_threads(1)
    simulated = _use(is_filled=False)
    small, job = simulated.Job("fsdp", 2, "tiny"), simulated.Job("fsdp", ranks)
    _restore(f"sim://{small.name}", simulated.app_state(small, 0), 0, verify=False)
    state = simulated.app_state(small, 0)
    key, tensors = job.tensors(0)
    model = {each.name: torch.empty(each.shape, dtype=torch.bfloat16) for each in tensors}
    state[key] = type(state[key])(model)
    simulated.scheme.snapshots.place(job)
    asked = simulated.scheme.asked = simulated.Asked()
    found: dict[str, Any] = {}

    def on_data() -> None:
        found["index_mib"] = (status_kib("VmHWM") - before_kib) / 1024
        found["index_cpu_s"] = time.process_time() - begin_cpu_s

    asked.on_data = on_data
    before_kib = _reset_peak()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    report = _restore(f"sim://{job.name}", state, 0, verify=False)
    return {
        "cpu_s": time.process_time() - begin_cpu_s,
        **found,
        "peak_mib": (status_kib("VmHWM") - before_kib) / 1024,
        "index_s": asked.first_data_s - begin_s,
        "total_s": time.perf_counter() - begin_s,
        "gib": report.nbytes / 2**30,
        "index_bytes": asked.index_bytes,
        "requests": asked.before_data,
        "data_requests": asked.data,
    }


def row_one_process(setting: Setting) -> None:
    ranks = 1024
    note(f"one process, {ranks} ranks saved")
    _make_all("fsdp", ranks)
    runs = [in_child(whole, ranks=ranks) for _ in range(2)]
    note(f"  {runs}")
    emit(
        "scale one process",
        ratios={
            "MiB": max(run["peak_mib"] for run in runs),
            "index s / s of 20 GiB at 1 GiB/s": median(run["index_s"] for run in runs) / 20,
        },
        needs={
            "MiB": Need(256, at_least=False),
            "index s / s of 20 GiB at 1 GiB/s": Need(0.1, at_least=False),
        },
        missing={},
        runs=runs,
    )


def one_object(kind: str, ranks: int) -> dict[str, Any]:
    from actorsnap.sync import Snapshot

    torch.set_num_threads(1)
    simulated = _use()
    Snapshot("sim://fsdp-2-tiny").read_object("model/layers.50.q_proj")
    job = simulated.Job(kind, ranks)
    simulated.scheme.snapshots.place(job)
    num_made = simulated.scheme.snapshots.num_made
    asked = simulated.scheme.asked = simulated.Asked()
    before_kib = _reset_peak()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    key = job.tensors(0)[0]
    read = Snapshot(f"sim://{job.name}").read_object(f"{key}/layers.50.q_proj")
    elapsed = time.perf_counter() - begin_s
    return {
        "num_made": simulated.scheme.snapshots.num_made - num_made,
        "s": elapsed,
        "cpu_s": time.process_time() - begin_cpu_s,
        "mib": (status_kib("VmHWM") - before_kib) / 1024,
        "tensor_mib": read.nbytes / MIB,
        "index_bytes": asked.index_bytes,
        "requests": asked.before_data,
        "data_requests": asked.data,
    }


def row_read_object(setting: Setting) -> None:
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    facts: dict[str, Any] = {}
    for kind in ("fsdp",):
        note(f"read_object, 4,096 ranks: {kind}")
        _make_all(kind, 4096)
        run = in_child(one_object, kind=kind, ranks=4096)
        note(f"  {run}")
        ratios |= {f"{kind}: MiB": run["mib"], f"{kind}: s": run["s"]}
        needs |= {f"{kind}: MiB": Need(256, False), f"{kind}: s": Need(10, False)}
        facts[kind] = run
    emit("scale read_object", ratios=ratios, needs=needs, missing={}, runs=facts)


def command(ranks: int, words: list[str]) -> dict[str, Any]:
    """A command of the shell, in this process."""
    from actorsnap.cli import app as shell

    torch.set_num_threads(1)
    simulated = _use()
    job = simulated.Job("fsdp", ranks)
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        shell([*words, "sim://fsdp-2-tiny"])
    simulated.scheme.snapshots.place(job)
    asked = simulated.scheme.asked = simulated.Asked()
    out = io.StringIO()
    status: object = 0
    before_kib = _reset_peak()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    with redirect_stdout(out):
        try:
            status = shell([*words, f"sim://{job.name}"])
        except SystemExit as end:
            status = end.code
    return {
        "s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "mib": (status_kib("VmHWM") - before_kib) / 1024,
        "requests": asked.index,
        "data_requests": asked.data,
        "index_bytes": asked.index_bytes,
        "status": str(status),
        "said_bytes": len(out.getvalue()),
        "said": out.getvalue()[-200:],
    }


def row_commands(setting: Setting) -> None:
    ranks = 4096
    _make_all("fsdp", ranks)
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    facts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for words in (["inspect"], ["verify"]):
        name = words[0]
        note(f"{' '.join(words)}, {ranks} ranks")
        try:
            run = in_child(command, ranks=ranks, words=words)
        except RuntimeError as error:
            missing[name] = str(error)
            continue
        note(f"  {run}")
        ratios |= {f"{name}: MiB": run["mib"], f"{name}: s": run["s"]}
        needs |= {f"{name}: MiB": Need(512, False), f"{name}: s": Need(30, False)}
        facts[name] = run
    emit("scale inspect, verify", ratios=ratios, needs=needs, missing=missing, runs=facts)


def _make_all(kind: str, ranks: int) -> None:
    note(f"  manifests of {kind}, {ranks} ranks")
    in_child(make, kind=kind, ranks=ranks)


def make(kind: str, ranks: int) -> int:
    """Makes all that is missing of a snapshot; what the data objects are, too."""
    simulated = _use()
    job = simulated.Job(kind, ranks)
    simulated.scheme.snapshots.make(job, range(ranks))
    asked = simulated.Asked()
    storage = simulated.SimulatedStorage(simulated.scheme.snapshots, job, asked, is_filled=False)
    return len(storage._objects)


# Small jobs ---------------------------------------------------------------------------------

BEFORE = os.environ.get("BENCH_BEFORE", "")
"""Another checkout of this repository, to compare with."""

SMALL_ROUNDS = 7


def small_restores(here: Any, path: str) -> dict[str, Any]:
    """In a rank: saves and restores 64 MiB in 90 tensors; seconds, requests and bytes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from actorsnap import Options, StateDict
    from actorsnap.storage.base import Storage
    from actorsnap.storage.registry import open_storage, register
    from actorsnap.storage.wrapper import Wrapper, without_blocking_io
    from actorsnap.sync import Snapshot

    counts = {"requests": 0, "bytes": 0}

    class Counted(Wrapper):
        def __init__(self, inner: Storage) -> None:
            super().__init__(inner)
            self.capabilities = without_blocking_io(inner.capabilities)

        async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            found = await super().get(key, start, stop)
            counts["requests"] += 1
            counts["bytes"] += len(found)
            return found

        async def read_into(self, key: str, offset: int, views: Any) -> None:
            await super().read_into(key, offset, views)
            counts["requests"] += 1
            counts["bytes"] += sum(map(len, views))

    def open_counted(url: str, context: Any) -> Storage:
        return Counted(open_storage(url.removeprefix("counted://"), context))

    register("counted", open_counted)
    mesh = init_device_mesh("cpu", (here.num_ranks,)) if here.num_ranks > 1 else None

    def state(fill: float) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for number in range(90):
            whole = torch.full((256, 728), fill + number)
            tensors[f"w{number}"] = whole
            if mesh is not None:
                tensors[f"w{number}"] = distribute_tensor(whole, mesh, [Shard(0)])
        return {"model": StateDict(tensors), "loader": StateDict(position=here.rank)}

    Snapshot.take(path, state(1.0), options=Options(fsync=False), overwrite=True)
    target = state(0.0)
    Snapshot(f"counted://{path}").restore(target)
    counted = dict(counts)
    seconds = []
    for _ in range(SMALL_ROUNDS):
        if mesh is not None:
            dist.barrier()
        begin_s = time.perf_counter()
        Snapshot(path).restore(target)
        if mesh is not None:
            dist.barrier()
        seconds.append(time.perf_counter() - begin_s)
    last = target["model"]["w7"]
    local = last if mesh is None else last.to_local()
    if not bool(local.eq(8.0).all()):
        raise RuntimeError("not what was saved")
    return {"s": median(seconds), **counted}


def small(ranks: int, root: str) -> dict[str, float]:
    """In a child, maybe of another tree: all ranks together."""
    from bench.local import folder
    from bench.world import World

    with folder(Path(root)) as path, World(ranks) as world:
        found = world.call(small_restores, path=str(path / "s"))
    return {
        "s": max(each["s"] for each in found),
        "requests": sum(each["requests"] for each in found),
        "bytes": sum(each["bytes"] for each in found),
    }


def row_small(setting: Setting) -> None:
    """Restores by 1 to 8 real ranks, in turns with another tree's."""
    if not BEFORE:
        note("small jobs: BENCH_BEFORE names no other tree")
        return
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    facts: dict[str, Any] = {}
    for ranks in (1, 2, 4, 8):
        runs: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
        for turn in range(3):
            for which in ("before", "after") if turn % 2 else ("after", "before"):
                runs[which].append(_small_in(BEFORE if which == "before" else "", ranks, setting))
        note(f"small, {ranks} ranks: {runs}")
        facts[str(ranks)] = runs
        for name, slack in (("s", 1.1), ("requests", 1.0), ("bytes", 1.01)):
            after, before = [median(each[name] for each in runs[w]) for w in ("after", "before")]
            ratios[f"{ranks} ranks: {name}"] = after / before
            needs[f"{ranks} ranks: {name}"] = Need(slack, at_least=False)
    emit("scale small jobs", ratios=ratios, needs=needs, missing={}, runs=facts)


def _small_in(tree: str, ranks: int, setting: Setting) -> dict[str, float]:
    """``small`` with ``actorsnap`` of a tree, and this tree's ``bench``."""
    here = Path(__file__).parents[1]
    code = (
        "import json, sys; from bench.scale import small; "
        "print(json.dumps(small(int(sys.argv[1]), sys.argv[2])))"
    )
    with tempfile.TemporaryDirectory() as both:
        (Path(both) / "bench").symlink_to(here / "bench")
        (Path(both) / "actorsnap").symlink_to(Path(tree or here).resolve() / "actorsnap")
        done = subprocess.run(
            [sys.executable, "-c", code, str(ranks), str(setting.tmpfs)],
            env=os.environ | {"PYTHONPATH": both},
            cwd=both,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# The save -----------------------------------------------------------------------------------


def saved(kind: str, ranks: int) -> dict[str, Any]:
    """First and repeated save of one coordinator, with and without an owner index."""
    from actorsnap.protocol.save import PlanCache
    from bench import simulated

    job = simulated.Job(kind, ranks)
    found: dict[str, Any] = {}
    for has_owners in (False, True):
        memory = PlanCache()
        for is_repeated in (False, True):
            run = simulated.coordinate(job, memory, has_owners=has_owners, is_repeated=is_repeated)
            name = f"{'repeated' if is_repeated else 'first'}{'' if has_owners else ', before'}"
            found[name] = {
                "up": run.up,
                "down": run.down,
                "cpu_s": round(run.seconds, 3),
                "owners_cpu_s": round(run.owners_s, 3),
                "owners_bytes": len(run.owners),
            }
    return found


def row_save(setting: Setting) -> None:
    """What the owner index adds to a save of 4,096 ranks; the rest is in ``bench/protocol.py``."""
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    facts: dict[str, Any] = {}
    for kind in KINDS:
        note(f"save, 4,096 ranks: {kind}")
        run = in_child(saved, kind=kind, ranks=4096)
        note(f"  {run}")
        facts[kind] = run
        for name in ("first", "repeated"):
            after, before = run[name], run[f"{name}, before"]
            ratios[f"{kind} {name}: bytes"] = (after["up"] + after["down"]) / (
                before["up"] + before["down"]
            )
            ratios[f"{kind} {name}: coordinator s"] = (
                after["cpu_s"] + after["owners_cpu_s"]
            ) / max(0.001, before["cpu_s"])
        needs[f"{kind} repeated: bytes"] = Need(1.0, at_least=False)
    emit("scale save", ratios=ratios, needs=needs, missing={}, runs=facts)


def shared(copies: int, shards: int) -> dict[str, float]:
    """What the coordinator decides about shared reads of a mesh of replicas."""
    from actorsnap.planning.restore import Range
    from actorsnap.planning.shared_reads import (
        ReadInterest,
        ReadMode,
        digest_ranges,
        plan_shared_reads,
        rank_set,
    )

    num_ranks = copies * shards
    everybody = rank_set(range(num_ranks))
    interests = []
    for rank in range(num_ranks):
        shard = rank % shards
        alike = rank_set(range(shard, num_ranks, shards))
        ranges = [Range(f"{shard}.safetensors", 0, 40 * MIB)]
        digests = [digest_ranges(key, alike, ranges) for key in ("model", "optim")]
        digests.append(digest_ranges("common", everybody, [Range("common", 0, 6 * MIB)]))
        interests.append(ReadInterest(tuple(digests), 4 * MIB, ""))
    begin_s = time.process_time()
    plans = plan_shared_reads(interests, ReadMode.SHARED)
    return {
        "cpu_s": round(time.process_time() - begin_s, 3),
        "up": max(len(msgspec.msgpack.encode(each)) for each in interests),
        "down": max(len(msgspec.msgpack.encode(each)) for each in plans),
        "turns": max(len(each.turns) for each in plans),
    }


def row_shared(setting: Setting) -> None:
    """``Options.read_mode="shared"`` of 4,096 ranks of HSDP: CPU seconds, bytes per rank."""
    runs = {
        f"{copies} x {shards}": shared(copies, shards)
        for copies, shards in ((2, 2048), (64, 64), (2048, 2), (4096, 1))
    }
    note(f"shared reads of 4,096 ranks: {runs}")
    ratios: dict[str, float | None] = {
        "coordinator CPU s": max(run["cpu_s"] for run in runs.values())
    }
    emit("scale shared", ratios=ratios, needs={}, missing={}, runs=runs)


ROWS: dict[str, Callable[[Setting], None]] = {
    "scale-index": row_index,
    "scale-large": row_large,
    "scale-all-ranks": row_all_ranks,
    "scale-one-process": row_one_process,
    "scale-read-object": row_read_object,
    "scale-commands": row_commands,
    "scale-small": row_small,
    "scale-save": row_save,
    "scale-shared": row_shared,
}
