# SPDX-License-Identifier: Apache-2.0
"""A training as users have it: Llama 2 7B in bf16 with AdamW, saved, restored, begun again.

As ``bench/local.py``: one JSON line per row (``ROWS``), contenders in turns, ratios between medians
of one run. There is room for one copy of the state only: what was loaded is compared by checksums.
"""

from __future__ import annotations

import importlib
import os
import statistics
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from crc32c import crc32c

from actorsnap import Options
from actorsnap.sync import Snapshot
from bench.child import Memory, in_child, memory_of
from bench.limits import RawFiles
from bench.local import OURS, RAW, Contest, Need, Setting, emit, folder, note, ratio
from bench.ranks import facts_of, fsdp
from bench.restart import WAYS, fill, prepare, restart, tensors, trained
from bench.savers import Saving
from bench.world import Here, Span, World, span_s

__all__ = ["ROWS", "LIBRARIES"]

MIB = 1 << 20
LOOK_S = 0.02
SPARE = 1.2
"""Free memory that a copy of the state takes, over its size."""


# Contenders ---------------------------------------------------------------------------------


class Library(ABC):
    """One way to save a model and its optimizer, and to load them back. On a rank."""

    copies_state = False
    """Whether its asynchronous save needs memory for a second state."""

    @abstractmethod
    def save(self, here: Here, path: Path) -> None: ...

    @abstractmethod
    def load(self, here: Here, path: Path) -> None: ...

    def begin(self, here: Here, path: Path) -> Saving:
        """Saves asynchronously: returns when the state may be changed again."""
        raise NotImplementedError

    @property
    def has_async(self) -> bool:
        return type(self).begin is not Library.begin

    def clean(self, here: Here) -> None:
        """After a load: what the next contender must not find."""
        return


class Actorsnap(Library):
    def _app_state(self, here: Here) -> dict[str, Any]:
        return {"model": here.held["model"], "optimizer": here.held["optimizer"]}

    def save(self, here: Here, path: Path) -> None:
        Snapshot.take(path / "snapshot", self._app_state(here), options=Options(fsync=False))

    def begin(self, here: Here, path: Path) -> Saving:
        pending = Snapshot.async_take(
            path / "snapshot", self._app_state(here), options=Options(fsync=False)
        )
        pending.staged()
        return Saving(pending.done, pending.wait)

    def load(self, here: Here, path: Path) -> None:
        before = [tensor.data_ptr() for _, tensor in held(here)]
        Snapshot(path / "snapshot").restore(self._app_state(here))
        if before != [tensor.data_ptr() for _, tensor in held(here)]:
            raise RuntimeError("not restored in place")


class Dcp(Library):
    copies_state = True

    def __init__(self) -> None:
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        self._states: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
        warnings.filterwarnings("ignore", module=r"torch\.distributed")

    def _state(self, here: Here) -> dict[str, Any]:
        model, optimizer = self._states.get_state_dict(here.held["model"], here.held["optimizer"])
        return {"model": model, "optimizer": optimizer}

    def save(self, here: Here, path: Path) -> None:
        writer = self._dcp.FileSystemWriter(path, sync_files=False)
        self._dcp.save(self._state(here), storage_writer=writer)

    def begin(self, here: Here, path: Path) -> Saving:
        writer = self._dcp.FileSystemWriter(path, sync_files=False)
        future = self._dcp.async_save(self._state(here), storage_writer=writer)
        return Saving(future.done, future.result)

    def load(self, here: Here, path: Path) -> None:
        state = self._state(here)
        self._dcp.load(state, storage_reader=self._dcp.FileSystemReader(path))
        self._states.set_state_dict(
            here.held["model"],
            here.held["optimizer"],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class TorchSave(Library):
    def save(self, here: Here, path: Path) -> None:
        model, optimizer = here.held["model"], here.held["optimizer"]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path / "state.pt")

    def load(self, here: Here, path: Path) -> None:
        state = torch.load(path / "state.pt", mmap=True, weights_only=True)
        here.held["model"].load_state_dict(state["model"])
        here.held["optimizer"].load_state_dict(state["optimizer"])

    def clean(self, here: Here) -> None:
        """The optimizer's state is the mapped file now: memory of its own again."""
        for values in here.held["optimizer"].state.values():
            for key, tensor in values.items():
                values[key] = tensor.clone()


class Raw(Library):
    """What the machine can do: two threads on each rank (``bench.limits``)."""

    def save(self, here: Here, path: Path) -> None:
        (path / f"{here.rank}").mkdir()
        RawFiles(dict(held(here))).save(dict(held(here)), path / f"{here.rank}")

    def load(self, here: Here, path: Path) -> None:
        RawFiles(dict(held(here))).load(path / f"{here.rank}", dict(held(here)))


LIBRARIES: dict[str, type[Library]] = {
    OURS: Actorsnap,
    "dcp": Dcp,
    "torch.save": TorchSave,
    RAW: Raw,
}


# On a rank ----------------------------------------------------------------------------------


def hold(here: Here, gib: float) -> int:
    """Makes the state that is saved and restored; returns its bytes on this rank."""
    model, optimizer = trained(gib)
    if here.num_ranks > 1:
        model = fsdp(model, here)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fill(model, optimizer)
    here.held |= {"model": model, "optimizer": optimizer, "libraries": {}}
    here.held["sums"] = checksums(here)
    return sum(tensor.nbytes for _, tensor in held(here))


def held(here: Here) -> list[tuple[str, torch.Tensor]]:
    return tensors(here.held["model"], here.held["optimizer"])


def checksums(here: Here) -> dict[str, int]:
    return {name: crc32c(t.view(-1).view(torch.uint8).numpy().data) for name, t in held(here)}


def check(here: Here) -> None:
    """Raises unless every tensor has the bits it had at first."""
    found = checksums(here)
    if wrong := [name for name, value in here.held["sums"].items() if found[name] != value]:
        raise RuntimeError(f"{len(wrong)} tensors differ from what was saved, {wrong[0]} first")


def scramble(here: Here) -> None:
    for _, tensor in held(here):
        tensor.fill_(-7.0)


def library(here: Here, name: str) -> Library:
    libraries: dict[str, Library] = here.held["libraries"]
    if name not in libraries:
        libraries[name] = LIBRARIES[name]()
    return libraries[name]


@dataclass(frozen=True, slots=True)
class Timed:
    """One run on a rank.

    Attributes:
        blocked_s: Until the trainer could go on.
        extra_bytes: Most memory above what there was before; None: not looked.
    """

    span: Span
    blocked_s: float
    extra_bytes: int | None


def run(here: Here, name: str, what: str, path: Path, *, looks: bool) -> Timed:
    """Saves (``save``, ``async``) or loads (``load``) by the library of this name."""
    one = library(here, name)
    blocked_s = 0.0
    changed = next(iter(held(here)))[1] if what == "async" else torch.empty(0)
    kept = changed.clone()

    def save_beside() -> None:
        nonlocal blocked_s
        begin_s = time.perf_counter()
        saving = one.begin(here, path)
        blocked_s = time.perf_counter() - begin_s
        changed.fill_(3.0)  # what a trainer that goes on does
        saving.wait()

    if what == "load":
        scramble(here)
    works: dict[str, Callable[[], object]] = {
        "save": partial(one.save, here, path),
        "load": partial(one.load, here, path),
        "async": save_beside,
    }
    with looked(looks) as memory:
        before = memory.peak.get("total", 0)
        span = here.timed(works[what])
    changed.copy_(kept)
    if what == "load":
        check(here)
        one.clean(here)
    return Timed(span, blocked_s, memory.peak["total"] - before if looks else None)


@contextmanager
def looked(looks: bool) -> Iterator[Memory]:
    """Of this process and those below it, until the end; see ``bench.child.Memory``."""
    memory, is_over = Memory(), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            memory.look(os.getpid())

    if not looks:
        yield memory
        return
    memory_of(os.getpid())
    memory.look(os.getpid())
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        is_over.set()
        thread.join()


# Saved and restored -------------------------------------------------------------------------


def row_training(num_ranks: int, names: list[str], setting: Setting) -> None:
    """The three rows of one process, or of some ranks, at each place."""
    with World(num_ranks) as world:
        nbytes = sum(world.call(hold, setting.gib))
        for place in setting.places:
            for what in ("save", "async", "load"):
                play(world, what, names, setting, place, nbytes)


TITLES = {"save": "take", "async": "async_take", "load": "restore"}


def play(
    world: World, what: str, names: list[str], setting: Setting, place: str, nbytes: int
) -> None:
    row = f"7B bf16 AdamW, {TITLES[what]}, {world.num_ranks} ranks, {place}"
    if world.num_ranks == 1:
        row = f"7B bf16 AdamW, {TITLES[what]}, {place}"
    note(f"{row}: {nbytes / 2**30:.2f} GiB")
    contest = Contest()
    blocked: dict[str, list[float]] = {}
    extra_mib: dict[str, float] = {}

    def turn(name: str, kept: Path | None) -> float:
        looks = name not in extra_mib  # in the round that does not count
        with folder(setting.root(place)) as path:
            os.sync()  # what others left to write is not ours to wait for
            at = kept or path
            ranks = world.call(run, name, what, at, looks=looks)
            if kept is None:
                world.call(run, name, "load", path, looks=False)
        if looks:
            extra_mib[name] = round(sum(one.extra_bytes or 0 for one in ranks) / MIB, 1)
        else:
            blocked.setdefault(name, []).append(max(one.blocked_s for one in ranks))
        return span_s([one.span for one in ranks])

    for name in names:
        if what == "async" and not LIBRARIES[name]().has_async:
            continue
        available = psutil.virtual_memory().available
        if what == "async" and LIBRARIES[name].copies_state and available < SPARE * nbytes:
            contest.out(name, f"it copies the state, and {available / 2**30:.1f} GiB are free")
            continue
        contest.add(name, partial(turn, name, None))
    if what == "load":
        play_loads(contest, world, names, setting, place, turn)
    else:
        contest.play(setting.repeat)
    medians = contest.medians()
    ours = medians.get(OURS)
    ratios = {"of raw": ratio(medians.get(RAW), ours)} if RAW in medians else {}
    ratios |= {f"x {n}": ratio(medians[n], ours) for n in medians if n not in (OURS, RAW)}
    blocked_ms = {n: round(1e3 * statistics.median(v), 1) for n, v in blocked.items() if any(v)}
    if what == "async":
        ratios |= {
            f"blocked, of {n}'s": ratio(blocked_ms.get(OURS), blocked_ms[n])
            for n in blocked_ms
            if n != OURS
        }
    emit(
        row,
        ratios=ratios,
        # torch.load(mmap=True) leaves the moments unread until the first step.
        needs={
            name: Need(1.0)
            for name in ratios
            if name == "x dcp" or (name == "x torch.save" and what == "save")
        },
        missing=contest.missing,
        **facts_of(contest, place, nbytes),
        gib_s={n: round(nbytes / 2**30 / s, 2) for n, s in medians.items()},
        blocked_ms=blocked_ms,
        extra_mib=extra_mib,
    )


def play_loads(
    contest: Contest,
    world: World,
    names: list[str],
    setting: Setting,
    place: str,
    turn: Callable[[str, Path | None], float],
) -> None:
    """Loads one checkpoint again and again. One contender after the other: not all checkpoints
    fit into the page cache, or onto the disk, at once. The raw limit takes turns with ours."""
    for name in [n for n in names if n != RAW]:
        with folder(setting.root(place)) as path:
            contest.runs.clear()
            for each in (name, RAW) if name == OURS else (name,):
                kept = path / each
                kept.mkdir()
                world.call(run, each, "save", kept, looks=False)
                contest.add(each, partial(turn, each, kept))
            contest.play(setting.repeat)


# Begun again --------------------------------------------------------------------------------

FILES = {OURS: OURS, "dcp": "dcp", "torch.save": "state.pt"}
"""Where ``bench.restart.prepare`` saves, below its folder."""


def warm(path: Path) -> None:
    """Reads all of a file or folder, so that the page cache has it if there is room."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(16 * MIB):
                    pass


def row_restart(setting: Setting) -> None:
    """From the start of a process to the end of its first ``optimizer.step()``."""
    for place in setting.places:
        row = f"7B bf16 AdamW, restart to the first step, {place}"
        note(row)
        contest = Contest()
        parts: dict[str, list[dict[str, float]]] = {}
        with folder(setting.root(place)) as root:
            prepared = in_child(prepare, gib=setting.gib, root=str(root))

            def turn(
                name: str,
                root: Path = root,
                expected: int = prepared["checksum"],
                parts: dict[str, list[dict[str, float]]] = parts,
            ) -> float:
                warm(root / FILES[name])
                found = in_child(
                    restart,
                    way=name,
                    gib=setting.gib,
                    root=str(root),
                    begin_s=time.perf_counter(),
                )
                if found["checksum"] != expected:
                    raise RuntimeError("the state after the first step is another")
                parts.setdefault(name, []).append(found)
                return float(found["total"])

            for name in WAYS:
                contest.add(name, partial(turn, name))
            contest.play(setting.repeat)
        medians = contest.medians()
        by_part = {
            name: {
                part: round(statistics.median(one[part] for one in runs[1:]), 3)
                for part in ("imports", "build", "restore", "step")
            }
            for name, runs in parts.items()
        }
        after = {n: medians[n] - by_part[n]["imports"] for n in medians}
        ratios = {f"x {n}": ratio(s, medians.get(OURS)) for n, s in medians.items() if n != OURS}
        ratios |= {
            f"after imports, x {n}": ratio(s, after.get(OURS))
            for n, s in after.items()
            if n != OURS
        }
        emit(
            row,
            ratios=ratios,
            needs={name: Need(1.0) for name in ratios},
            missing=contest.missing,
            **facts_of(contest, place, prepared["nbytes"]),
            parts_s=by_part,
            unit="the page cache is warm",
        )


ROWS: dict[str, Callable[[Setting], None]] = {
    "training": partial(row_training, 1, list(LIBRARIES)),
    "training-ranks": partial(row_training, 2, [n for n in LIBRARIES if n != "torch.save"]),
    "training-restart": row_restart,
}
