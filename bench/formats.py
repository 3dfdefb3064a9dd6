# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs, in place: is it as fast as a read, and is little else read?

Without checksums on both sides: these formats have none. Ours opens the checkpoint anew each time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from actorsnap import Options, StateDict
from actorsnap.format.manifest import TensorEntry
from actorsnap.interop.exports import export_torch
from actorsnap.sync import Snapshot
from bench.limits import RawFiles, RawPlaces
from bench.local import (
    OURS,
    RAW,
    Contest,
    Need,
    Setting,
    emit,
    facts_of,
    folder,
    note,
    prepared,
    ratio,
    timed_load,
)
from bench.peers import Adapter, Dcp, Safetensors, TorchSave
from bench.ranks import Parallel, dcp_save, fsdp, hold, plain, restore, two_d, two_d_flat
from bench.state import State, llama, small
from bench.world import World

FORMATS: tuple[tuple[type[Adapter], str, str], ...] = (
    (Dcp, "", "__0_0.distcp"),
    (TorchSave, "state.pt", "state.pt"),
    (Safetensors, "state.safetensors", "state.safetensors"),
)
"""Who writes, what to open in the folder, and the file with the tensors."""

SMALL_COUNT, SMALL_BYTES = 10_000, 4096
PLACES = "raw, same places"


def load_in_place(file: str, path: Path, target: State) -> None:
    Snapshot(path / file).restore({"model": StateDict(target)})


def row_load(setting: Setting) -> None:
    state = llama(setting.gib)
    target = {name: tensor.clone() for name, tensor in state.items()}
    for kind, file, data_file in FORMATS:
        contest, raw, peer = Contest(), RawFiles(state), kind()
        row = f"restore of {peer.name} in place"
        note(row)
        with folder(setting.tmpfs) as root:
            (root / "raw").mkdir()
            raw.save(state, root / "raw")
            contest.add(
                RAW, timed_load(partial(raw.load, verify=False), state, target, root / "raw")
            )
            for adapter in prepared(contest, peer):
                path = root / "peer"
                path.mkdir()
                adapter.save(state, path, fsync=False)
                ours = partial(load_in_place, file)
                contest.add(OURS, timed_load(ours, state, target, path))
                contest.add(adapter.name, timed_load(adapter.load, state, target, path))
                places = RawPlaces(state, Path(data_file), _starts(path / file))
                contest.add(PLACES, timed_load(places.load, state, target, path))
            contest.play(setting.repeat)
        medians = contest.medians()
        emit(
            row,
            ratios={
                "of raw": ratio(medians.get(RAW), medians.get(OURS)),
                f"of {PLACES}": ratio(medians.get(PLACES), medians.get(OURS)),
                f"x {peer.name}": ratio(medians.get(peer.name), medians.get(OURS)),
            },
            needs={"of raw": Need(0.85)},
            missing=contest.missing,
            **facts_of(state, contest.seconds, "tmpfs"),
        )


def _starts(url: Path) -> dict[str, int]:
    """Returns the first byte of each tensor, by name."""
    entries = Snapshot(url).get_manifest(rank=0).values()
    return {
        entry.path.removeprefix("model/"): entry.data.start
        for entry in entries
        if isinstance(entry, TensorEntry)
    }


def row_small(setting: Setting) -> None:
    state = small(SMALL_COUNT, SMALL_BYTES)
    target = {name: tensor.clone() for name, tensor in state.items()}
    for kind, file, _ in FORMATS:
        contest, peer = Contest(), kind()
        row = f"restore of {SMALL_COUNT} tensors of {peer.name} in place"
        note(row)
        with folder(setting.tmpfs) as path:
            for adapter in prepared(contest, peer):
                adapter.save(state, path, fsync=False)
                ours = partial(load_in_place, file)
                contest.add(OURS, timed_load(ours, state, target, path))
                contest.add(adapter.name, timed_load(adapter.load, state, target, path))
            contest.play(setting.repeat)
        medians = contest.medians()
        emit(
            row,
            ratios={f"x {peer.name}": ratio(medians.get(peer.name), medians.get(OURS))},
            needs={},
            missing=contest.missing,
            **facts_of(state, contest.seconds, "tmpfs"),
        )


def row_reshard(setting: Setting) -> None:
    """Of DCP folders. Counts all that is read, also to open them."""
    note("resharding of DCP folders")
    ratios: dict[str, float | None] = {}

    def measure(label: str, world: World, parallel: Parallel, path: Path) -> None:
        needed = sum(world.call(hold, "small layers", setting.gib, parallel))
        found = world.call(restore, f"metered://{path}", Options(read_mode="direct"))
        read = sum(one.data_bytes + one.other_bytes for one in found)
        ratios[label] = read / needed
        note(f"  {label}: {read} of {needed} bytes")

    with World(1) as one, World(4) as four, folder(setting.tmpfs) as root:
        layouts: tuple[tuple[str, Parallel], ...] = (("fsdp", fsdp), ("two_d", two_d))
        for name, parallel in layouts:
            nbytes = sum(four.call(hold, "small layers", setting.gib, parallel))
            four.call(dcp_save, Dcp(), root / name)
        with World(3) as three:
            measure("FSDP2 4 -> 3", three, fsdp, root / "fsdp")
        measure("FSDP2 4 -> one process", one, plain, root / "fsdp")
        measure("2-D 2x2 -> 4x1", four, two_d_flat, root / "two_d")
    emit(
        "resharding of DCP folders, bytes read / needed",
        ratios=ratios,
        needs={name: Need(1.05, at_least=False) for name in ratios},
        missing={},
        gib=round(nbytes / 2**30, 3),
    )


def row_export(setting: Setting) -> None:
    """To Hugging Face and to ``torch.save``'s format, on one disk; all wait for the disk."""
    state = llama(setting.gib)
    note("export")
    contest = Contest()
    with folder(setting.disk) as root:
        Snapshot.take(root / "s", {"model": StateDict(state)})
        snapshot = Snapshot(root / "s")
        contest.add("export_hf", _timed(root, lambda to: snapshot.export_hf(to)))
        contest.add("export_torch", _timed(root, lambda to: export_torch(snapshot, to / "x.pt")))
        contest.add("cp", _timed(root, partial(_cp, root / "s")))
        contest.add("torch.save", _timed(root, partial(_torch_save, state)))
        contest.play(setting.repeat)
    medians = contest.medians()
    emit(
        "export on one disk",
        ratios={
            "hf x cp --reflink=auto": ratio(medians.get("cp"), medians.get("export_hf")),
            "torch x torch.save": ratio(medians.get("torch.save"), medians.get("export_torch")),
        },
        needs={},
        missing=contest.missing,
        **facts_of(state, contest.seconds, "disk"),
    )


def _timed(root: Path, export: Callable[[Path], object]) -> Callable[[], float]:
    def run() -> float:
        with folder(root) as path:
            os.sync()  # what others left to write is not ours to wait for
            begin = time.perf_counter()
            export(path)
            return time.perf_counter() - begin

    return run


def _cp(snapshot: Path, to: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=auto", snapshot, to / "copy"], check=True)
    for path in (to / "copy").rglob("*"):
        if path.is_file():
            _fsync(path)


def _torch_save(state: State, to: Path) -> None:
    torch.save(state, to / "x.pt")
    _fsync(to / "x.pt")


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


ROWS: dict[str, Callable[[Setting], None]] = {
    "formats": row_load,
    "formats-small": row_small,
    "formats-reshard": row_reshard,
    "formats-export": row_export,
}
