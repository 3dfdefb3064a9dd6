# SPDX-License-Identifier: Apache-2.0
"""One machine, one process: how near to the machine's own limits, how far from the peers?

Prints one JSON line per row (``ROWS``) on standard output, progress on standard error. A row's
contenders run in turns, round after round, in one process; the first round is not counted; a
row's ratios are taken between the medians of that one run. What was saved is loaded back and
compared bit for bit, every time, outside the clock. bench/README.md has the table.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.limits import RawCopy, RawFiles
from bench.peers import PEERS, Actorsnap, ActorsnapAwait, Adapter
from bench.state import State, compare, llama, scramble, small, state_bytes

OURS = "actorsnap"
RAW = "raw"
SLOW_S = 10.0
NOISY = 1.5
LOAD_AT_START = round(os.getloadavg()[0], 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    gib: float
    repeat: int
    small_count: int
    tmpfs: Path
    disk: Path
    places: tuple[str, ...]
    peers: tuple[str, ...]

    def root(self, place: str) -> Path:
        return self.tmpfs if place == "tmpfs" else self.disk


@dataclass(slots=True)
class Contest:
    """Contenders in turns. Each is a function that runs once and returns the seconds that
    count; one that raises is out, and its reason is told."""

    runs: dict[str, Callable[[], float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, run: Callable[[], float]) -> None:
        if name not in self.missing:
            self.runs[name] = run

    def out(self, name: str, reason: BaseException | str) -> None:
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        self.missing[name] = text.splitlines()[0][:200] if text else "?"
        self.runs.pop(name, None)
        self.seconds.pop(name, None)

    def play(self, repeat: int) -> None:
        for turn in range(repeat + 1):
            order = list(self.runs)
            shift = turn % max(1, len(order))
            for name in order[shift:] + order[:shift]:
                if self.is_slow(name):
                    continue
                gc.collect()
                try:
                    elapsed = self.runs[name]()
                except Exception as exc:
                    note(f"  {name}: {type(exc).__name__}: {exc}")
                    self.out(name, exc)
                    continue
                note(f"  {turn}/{repeat} {name}: {elapsed * 1e3:.0f} ms")
                if turn > 0:
                    self.seconds.setdefault(name, []).append(elapsed)

    def is_slow(self, name: str) -> bool:
        """One counted run of something that takes this long is enough."""
        return any(seconds > SLOW_S for seconds in self.seconds.get(name, ()))

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.seconds.items()}


@dataclass(frozen=True, slots=True)
class Need:
    """What a ratio must reach: at least, or at most."""

    bound: float
    at_least: bool = True

    def holds(self, value: float | None) -> bool:
        if value is None:
            return False
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def emit(
    row: str,
    *,
    ratios: dict[str, float | None],
    needs: dict[str, Need],
    missing: dict[str, str],
    **facts: Any,
) -> None:
    line = {
        "row": row,
        "ok": all(need.holds(ratios.get(name)) for name, need in needs.items()),
        "ratios": {k: v if v is None else round(v, 3) for k, v in ratios.items()},
        "needs": {name: str(need) for name, need in needs.items()},
        **facts,
        "missing": missing,
        "machine": machine(),
        "load_at_start": LOAD_AT_START,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(line), flush=True)


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


@contextmanager
def folder(root: Path) -> Iterator[Path]:
    """A new empty folder, gone afterwards whatever happened."""
    path = Path(tempfile.mkdtemp(prefix="actorsnap-bench-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def prepared(contest: Contest, *adapters: Adapter) -> list[Adapter]:
    """Those that can be had; the others are noted as missing."""
    ready = []
    for adapter in adapters:
        try:
            adapter.prepare()
        except Exception as exc:
            contest.out(adapter.name, exc)
        else:
            ready.append(adapter)
    return ready


def peers_of(setting: Setting) -> list[Adapter]:
    return [peer() for peer in PEERS if peer.name in setting.peers]


def facts_of(state: State, seconds: dict[str, list[float]], place: str) -> dict[str, Any]:
    gib = state_bytes(state) / 2**30
    medians = {name: statistics.median(v) for name, v in seconds.items()}
    return {
        "place": place,
        "gib": round(gib, 3),
        "tensors": len(state),
        "runs": max((len(v) for v in seconds.values()), default=0),
        "seconds": {name: round(s, 4) for name, s in medians.items()},
        "seconds_min_max": {n: [round(min(v), 4), round(max(v), 4)] for n, v in seconds.items()},
        "gib_s": {name: round(gib / s, 2) for name, s in medians.items()},
        # Medians of these may be somebody else's doing: run again on a quiet machine.
        "noisy": sorted(n for n, v in seconds.items() if max(v) > NOISY * min(v)),
    }


def best_of(medians: dict[str, float], names: list[str]) -> tuple[str | None, float | None]:
    found = [(medians[n], n) for n in names if n in medians]
    return (min(found)[1], min(found)[0]) if found else (None, None)


# -- take ------------------------------------------------------------------------------------


def timed_save(
    adapter: Adapter | RawFiles, state: State, target: State, root: Path, *, fsync: bool
) -> Callable[[], float]:
    def run() -> float:
        with folder(root) as path:
            if fsync:
                os.sync()  # what others left to write is not ours to wait for
            begin = time.perf_counter()
            adapter.save(state, path, fsync=fsync)
            elapsed = time.perf_counter() - begin
            scramble(target)
            adapter.load(path, target)
            compare(state, target)
            return elapsed

    return run


def row_take(setting: Setting) -> None:
    state = llama(setting.gib)
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    for place in setting.places:
        for fsync in (False,) if place == "tmpfs" else (False, True):
            row = "take" if place == "tmpfs" else f"take {place} {'fsync' if fsync else 'no fsync'}"
            note(f"{row}: {setting.root(place)}")
            contest = Contest()
            contest.add(
                RAW, timed_save(RawFiles(state), state, target, setting.root(place), fsync=fsync)
            )
            adapters = prepared(contest, Actorsnap(), *peers_of(setting))
            for adapter in adapters:
                if fsync and adapter.fsync == "never":
                    contest.out(adapter.name, "offers no fsync")
                    continue
                contest.add(
                    adapter.name,
                    timed_save(adapter, state, target, setting.root(place), fsync=fsync),
                )
            contest.play(setting.repeat)
            medians = contest.medians()
            best, best_s = best_of(medians, [p.name for p in PEERS])
            ours = medians.get(OURS)
            emit(
                row,
                ratios={
                    "of raw": ratio(medians.get(RAW), ours),
                    "x best peer": ratio(best_s, ours),
                },
                needs={"of raw": Need(0.85), "x best peer": Need(1.3)} if place == "tmpfs" else {},
                missing=contest.missing,
                best_peer=best,
                **facts_of(state, contest.seconds, place),
            )


# -- restore ---------------------------------------------------------------------------------


def timed_load(
    load: Callable[[Path, State], None], state: State, target: State, path: Path
) -> Callable[[], float]:
    def run() -> float:
        scramble(target)
        begin = time.perf_counter()
        load(path, target)
        elapsed = time.perf_counter() - begin
        compare(state, target)
        return elapsed

    return run


def restore(setting: Setting, *, verify: bool) -> None:
    row = "restore" if verify else "restore verify=False"
    note(row)
    state = llama(setting.gib)
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    raw = RawFiles(state)
    contest = Contest()
    with folder(setting.tmpfs) as root:

        def place(name: str) -> Path:
            path = root / name
            path.mkdir()
            return path

        path = place(RAW)
        raw.save(state, path)

        def raw_load(path: Path, target: State) -> None:
            raw.load(path, target, verify=verify)

        contest.add(RAW, timed_load(raw_load, state, target, path))
        for adapter in prepared(contest, Actorsnap(verify=verify), *peers_of(setting)):
            # The peers verify nothing; without checksums only the fastest of them is asked.
            if not verify and not isinstance(adapter, Actorsnap) and adapter.name != "safetensors":
                continue
            name = OURS if isinstance(adapter, Actorsnap) else adapter.name
            path = place(name)
            try:
                adapter.save(state, path, fsync=False)
            except Exception as exc:
                contest.out(name, exc)
                continue
            contest.add(name, timed_load(adapter.load, state, target, path))
        contest.play(setting.repeat)
    medians = contest.medians()
    ours = medians.get(OURS)
    ratios = {"of raw": ratio(medians.get(RAW), ours)}
    ratios |= {f"x {p.name}": ratio(medians.get(p.name), ours) for p in PEERS if p.name in medians}
    if verify:
        needs = {"of raw": Need(0.92), "x dcp": Need(2.5), "x torchsnapshot": Need(2.5)}
    else:
        needs = {"x safetensors": Need(1.0)}
    emit(
        row,
        ratios=ratios,
        needs=needs,
        missing=contest.missing,
        **facts_of(state, contest.seconds, "tmpfs"),
    )


def row_restore(setting: Setting) -> None:
    restore(setting, verify=True)


def row_restore_unverified(setting: Setting) -> None:
    restore(setting, verify=False)


# -- async_take ------------------------------------------------------------------------------


def timed_async(adapter: Adapter, state: State, target: State, root: Path) -> Callable[[], float]:
    # What a trainer that goes on would change first. Put back once the save has ended.
    names = [*list(state)[:2], list(state)[-1]]

    def run() -> float:
        with folder(root) as path:
            kept = {name: state[name].clone() for name in names}
            begin = time.perf_counter()
            wait = adapter.async_save(state, path)
            elapsed = time.perf_counter() - begin
            try:
                for name in names:
                    state[name].fill_(3.0)
            finally:
                wait()
                for name in names:
                    state[name].copy_(kept[name])
            scramble(target)
            adapter.load(path, target)
            compare(state, target)
            return elapsed

    return run


def row_async(setting: Setting) -> None:
    note("async_take blocked")
    state = llama(setting.gib)
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    raw = RawCopy(state)

    def copy() -> float:
        begin = time.perf_counter()
        raw.run()
        elapsed = time.perf_counter() - begin
        raw.check()
        return elapsed

    contest = Contest()
    contest.add(RAW, copy)
    adapters = prepared(contest, Actorsnap(), ActorsnapAwait(), *peers_of(setting))
    try:
        for adapter in adapters:
            if not adapter.has_async:
                contest.out(adapter.name, "has no asynchronous save")
                continue
            contest.add(adapter.name, timed_async(adapter, state, target, setting.tmpfs))
        contest.play(setting.repeat)
    finally:
        for adapter in adapters:
            adapter.close()
    medians = contest.medians()
    limit = medians.get(RAW)
    ratios = {f"{n}, x raw copy": ratio(s, limit) for n, s in medians.items() if n != RAW}
    emit(
        "async_take blocked",
        ratios=ratios,
        needs={
            f"{OURS}, x raw copy": Need(1.2, at_least=False),
            f"{ActorsnapAwait.name}, x raw copy": Need(1.2, at_least=False),
        },
        missing=contest.missing,
        **facts_of(state, contest.seconds, "tmpfs"),
    )


# -- memory ----------------------------------------------------------------------------------


def status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{name} is not in /proc/self/status")


def child_memory(name: str, gib: float, root: Path) -> None:
    """In a process of its own: by how much one save raises the peak of resident memory.

    Imports are made before; threads, buffers and the rest of a first save count.
    """
    adapter = next(a for a in (Actorsnap(), *(peer() for peer in PEERS)) if a.name == name)
    adapter.prepare()
    state = llama(gib)
    with folder(root) as path:
        gc.collect()
        before = status_kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        adapter.save(state, path, fsync=False)
        growth = status_kib("VmHWM") - before
        target = {name: torch.zeros_like(t) for name, t in state.items()}
        adapter.load(path, target)
        compare(state, target)
    print(json.dumps({"growth_mib": round(growth / 1024, 1)}))


def child(*args: str) -> Any:
    """Runs this module in a new process and returns the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", *args],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def row_memory(setting: Setting) -> None:
    note("take extra memory")
    growth: dict[str, float] = {}
    missing: dict[str, str] = {}
    sizes = {OURS: [setting.gib, 2 * setting.gib]}
    for adapter in (Actorsnap(), *peers_of(setting)):
        for gib in sizes.get(adapter.name, [setting.gib]):
            label = f"{adapter.name}, {gib:g} GiB"
            try:
                args = ("--child-memory", adapter.name, "--gib", str(gib))
                found = child(*args, "--tmpfs-dir", str(setting.tmpfs))
            except (RuntimeError, subprocess.TimeoutExpired) as exc:
                missing[label] = str(exc)[:200]
                continue
            growth[label] = found["growth_mib"]
            note(f"  {label}: {growth[label]:.0f} MiB")
    ours = {f"{OURS}, {gib:g} GiB": Need(64.0, at_least=False) for gib in sizes[OURS]}
    emit(
        "take extra memory",
        ratios={label: growth.get(label) for label in ours},
        needs=ours,
        missing=missing,
        unit="MiB of peak resident memory above the state",
        growth_mib=growth,
    )


# -- small tensors ---------------------------------------------------------------------------


def row_small(setting: Setting) -> None:
    note(f"{setting.small_count} small tensors")
    state = small(setting.small_count)
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    saves, loads = Contest(), Contest()
    objects: dict[str, int] = {}
    with folder(setting.tmpfs) as root:
        for adapter in prepared(saves, Actorsnap(), *peers_of(setting)):
            if adapter.slow_with_many:
                saves.out(adapter.name, adapter.slow_with_many)
                continue
            path = root / adapter.name
            path.mkdir()
            try:
                adapter.save(state, path, fsync=False)
            except Exception as exc:
                saves.out(adapter.name, exc)
                continue
            objects[adapter.name] = sum(p.is_file() for p in path.rglob("*"))
            saves.add(adapter.name, timed_save(adapter, state, target, setting.tmpfs, fsync=False))
            loads.add(adapter.name, timed_load(adapter.load, state, target, path))
        loads.missing |= saves.missing
        saves.play(setting.repeat)
        loads.play(setting.repeat)
    for row, contest in (("small tensors take", saves), ("small tensors restore", loads)):
        medians = contest.medians()
        needs = {"of torch.save's time": Need(0.5, at_least=False)}
        ratios = {"of torch.save's time": ratio(medians.get(OURS), medians.get("torch.save"))}
        if contest is saves:
            needs["objects"] = Need(12, at_least=False)
            ratios["objects"] = float(objects[OURS]) if OURS in objects else None
        emit(
            row,
            ratios=ratios,
            needs=needs,
            missing=contest.missing,
            objects=objects,
            **facts_of(state, contest.seconds, "tmpfs"),
        )


# -- import ----------------------------------------------------------------------------------


def row_import(setting: Setting) -> None:
    note("import actorsnap")
    # torch leaves about a million objects; whether the collector walks over them during our
    # import is part of what a user waits for, and told apart in `gc_ms`.
    code = """
import gc, time, torch
marks = []
gc.callbacks.append(lambda phase, info: marks.append(time.perf_counter()))
begin = time.perf_counter()
import actorsnap
print((time.perf_counter() - begin) * 1e3, (sum(marks[1::2]) - sum(marks[::2])) * 1e3)
"""
    values: list[float] = []
    collecting: list[float] = []
    missing: dict[str, str] = {}
    for turn in range(setting.repeat + 1):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0:
            missing[OURS] = (done.stderr.strip().splitlines() or ["no message"])[-1]
            break
        if turn > 0:
            total, collector = done.stdout.split()
            values.append(float(total))
            collecting.append(float(collector))
    emit(
        "import actorsnap",
        ratios={"ms": statistics.median(values) if values else None},
        needs={"ms": Need(150.0, at_least=False)},
        missing=missing,
        unit="ms, with torch already imported",
        gc_ms=round(statistics.median(collecting), 1) if collecting else None,
        runs=len(values),
    )


ROWS: dict[str, Callable[[Setting], None]] = {
    "take": row_take,
    "restore": row_restore,
    "restore-unverified": row_restore_unverified,
    "async": row_async,
    "memory": row_memory,
    "small": row_small,
    "import": row_import,
}
