# SPDX-License-Identifier: Apache-2.0
"""Tensors on a CUDA device: how near to its bus are saves and restores, what do they cost training?

As ``bench/local.py``: one JSON line per row (``ROWS``), contenders in turns, results compared. Each
row needs a device, and says "not run" where there is none.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actorsnap import Options, StateDict
from actorsnap.sync import Snapshot, warm_up
from bench.local import OURS, RAW, Contest, Need, Setting, emit, facts_of, folder, note, ratio
from bench.state import State, compare, llama, scramble, small, state_bytes

__all__ = ["ROWS"]

_FEW = 20_000
_OPTIONS = Options(fsync=False)
_UNVERIFIED = Options(fsync=False, verify=False)
_BUFFER_BYTES = 16 << 20
_NUM_READERS = 4
PINNED = "dcp pinned"


# Savers -------------------------------------------------------------------------------------


class Saver(ABC):
    """One way to save tensors of a device in the background."""

    @abstractmethod
    def begin(self, state: State, path: Path) -> Callable[[], object]:
        """Returns once the state may be changed again; what it returns waits for the end."""

    @abstractmethod
    def load(self, path: Path, target: State) -> None: ...

    def close(self) -> None:
        return


class Actorsnap(Saver):
    def begin(self, state: State, path: Path) -> Callable[[], object]:
        pending = Snapshot.async_take(path, {"model": StateDict(**state)}, options=_OPTIONS)
        pending.staged()
        return pending.wait

    def load(self, path: Path, target: State) -> None:
        Snapshot(path).restore({"model": StateDict(**target)})


class Dcp(Saver):
    """``async_save`` with the stager that keeps pinned memory."""

    def __init__(self) -> None:
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
        options = staging.StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=True,
        )
        self._stager: Any = staging.DefaultStager(options)

    def begin(self, state: State, path: Path) -> Callable[[], object]:
        writer = self._dcp.FileSystemWriter(path, sync_files=False, thread_count=2)
        found = self._dcp.async_save(
            {"model": state}, storage_writer=writer, async_stager=self._stager
        )
        # Staged by now; other versions of torch return two futures.
        end: Callable[[], object] = getattr(found, "upload_completion", found).result
        return end

    def load(self, path: Path, target: State) -> None:
        self._dcp.load({"model": target}, storage_reader=self._dcp.FileSystemReader(path))

    def close(self) -> None:
        self._stager.close()


_SAVERS: dict[str, Callable[[], Saver]] = {
    OURS: Actorsnap,
    PINNED: Dcp,
}


@contextmanager
def _savers(contest: Contest) -> Iterator[dict[str, Saver]]:
    found: dict[str, Saver] = {}
    for name, make in _SAVERS.items():
        try:
            found[name] = make()
        except Exception as error:
            contest.out(name, error)
    try:
        yield found
    finally:
        for saver in found.values():
            saver.close()


@dataclass(frozen=True, slots=True)
class _Bus:
    """What the bus can do: one copy of all bytes between a device and pinned memory."""

    there: torch.Tensor
    here: torch.Tensor

    @classmethod
    def of(cls, nbytes: int) -> _Bus:
        return cls(
            torch.randint(255, (nbytes,), dtype=torch.uint8, device="cuda"),
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        )

    def save(self) -> float:
        return self._timed(self.here, self.there)

    def load(self) -> float:
        return self._timed(self.there, self.here)

    def _timed(self, out: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin


def _large(setting: Setting) -> State:
    return llama(setting.gib, device="cuda")


def _on_gpu(state: State) -> State:
    return {path: tensor.cuda() for path, tensor in state.items()}


def _facts(state: State, contest: Contest) -> dict[str, Any]:
    return {"device": torch.cuda.get_device_name(), **facts_of(state, contest.seconds, "tmpfs")}


# Saves --------------------------------------------------------------------------------------


def row_staging(kind: str, setting: Setting) -> None:
    """Until all tensors are staged, against one copy of their bytes into pinned memory."""
    row = f"cuda async_take to staged, {kind} tensors"
    note(row)
    there = _large(setting) if kind == "large" else _on_gpu(small(_FEW, 4096))
    state = {path: tensor.cpu() for path, tensor in there.items()}
    target = {path: torch.zeros_like(tensor) for path, tensor in state.items()}
    bus = _Bus.of(state_bytes(state))
    firsts: dict[str, float] = {}

    def turn(
        saver: Saver,
        name: str,
        state: State = state,
        there: State = there,
        target: State = target,
        firsts: dict[str, float] = firsts,
    ) -> float:
        with folder(setting.tmpfs) as path:
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            wait = saver.begin(there, path / "s")
            elapsed_s = time.perf_counter() - begin_s
            changed = next(iter(there))
            there[changed].zero_()
            wait()
            there[changed].copy_(state[changed])
            if name == OURS or name not in firsts:  # peers take long: once is enough
                scramble(target)
                saver.load(path / "s", target)
                compare(state, target)
            firsts.setdefault(name, round(elapsed_s, 3))
        return elapsed_s

    contest = Contest()
    contest.add(RAW, bus.save)
    with _savers(contest) as savers:
        for name, saver in savers.items():
            contest.add(name, partial(turn, saver, name))
        contest.play(setting.repeat)
    medians = contest.medians()
    ours = medians.get(OURS)
    emit(
        row,
        ratios={
            "of a pinned copy": ratio(medians.get(RAW), ours),
            **{f"of {n}'s": ratio(ours, s) for n, s in medians.items() if n.startswith("dcp")},
        },
        needs={
            "of a pinned copy": Need(0.9),
            f"of {PINNED}'s": Need(0.5, at_least=False),
        }
        if kind == "large"
        else {},
        missing=contest.missing,
        first_s=firsts,
        **_facts(state, contest),
    )


# Restores -----------------------------------------------------------------------------------


def _safetensors(path: Path, target: State) -> None:
    load: Any = importlib.import_module("safetensors.torch").load_file
    for name, tensor in load(path, device="cuda").items():
        target[name].copy_(tensor)


def _torch_load(path: Path, target: State) -> None:
    found = torch.load(path, mmap=True, map_location="cuda", weights_only=True)
    for name, tensor in found.items():
        target[name].copy_(tensor)


def _restore(options: Options, path: Path, target: State) -> None:
    Snapshot(path, options=options).restore({"model": StateDict(**target)})


def _raw_load(path: Path, target: State) -> None:
    """Some threads, each with two pinned buffers: reads one while the other is copied."""
    places, at = [], 0
    for tensor in target.values():
        flat = tensor.view(-1).view(torch.uint8)
        for start in range(0, len(flat), _BUFFER_BYTES):
            part = flat[start : start + _BUFFER_BYTES]
            places.append((at + start, part))
        at += len(flat)
    todo = iter(places)
    lock = threading.Lock()

    def work(buffers: list[torch.Tensor], views: list[memoryview]) -> None:
        stream = torch.cuda.Stream()
        events = [torch.cuda.Event() for _ in buffers]
        number = 0
        while True:
            with lock:
                found = next(todo, None)
            if found is None:
                break
            at, part = found
            events[number].synchronize()
            if os.preadv(file, [views[number][: len(part)]], at) != len(part):
                raise RuntimeError("short read")
            with torch.cuda.stream(stream):
                part.copy_(buffers[number][: len(part)], non_blocking=True)
                events[number].record(stream)
            number = 1 - number
        stream.synchronize()

    file = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            for done in [pool.submit(work, *pair) for pair in _pinned_buffers()]:
                done.result()
    finally:
        os.close(file)


_buffers: list[tuple[list[torch.Tensor], list[memoryview]]] = []


def _pinned_buffers() -> list[tuple[list[torch.Tensor], list[memoryview]]]:
    while len(_buffers) < _NUM_READERS:
        pair = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        _buffers.append((pair, [tensor.numpy().data for tensor in pair]))
    return _buffers


def row_restore(setting: Setting) -> None:
    """Into tensors on the device, from files in the page cache."""
    row = "cuda restore"
    note(row)
    there = _large(setting)
    state = {path: tensor.cpu() for path, tensor in there.items()}
    target = {path: torch.zeros_like(tensor) for path, tensor in there.items()}
    bus = _Bus.of(state_bytes(state))
    contest = Contest()

    def turn(load: Callable[[Path, State], None], path: Path) -> float:
        for tensor in target.values():
            tensor.fill_(-7.0)
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        load(path, target)
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - begin_s
        if wrong := [name for name in there if not torch.equal(there[name], target[name])]:
            raise RuntimeError(f"{wrong[0]} differs")
        return elapsed_s

    def write_raw(path: Path) -> None:
        with path.open("wb") as file:
            for tensor in state.values():
                file.write(tensor.numpy().data)

    def save_safetensors(path: Path) -> None:
        importlib.import_module("safetensors.torch").save_file(state, path)

    with folder(setting.tmpfs) as root:
        Actorsnap().begin(state, root / "s")()
        contest.add("pinned copy", bus.load)
        contest.add(OURS, partial(turn, partial(_restore, _OPTIONS), root / "s"))
        contest.add(
            f"{OURS} verify=False", partial(turn, partial(_restore, _UNVERIFIED), root / "s")
        )
        dcp = Dcp()
        peers: dict[str, tuple[Callable[[Path], object], Callable[[Path, State], None]]] = {
            RAW: (write_raw, _raw_load),
            "safetensors": (save_safetensors, _safetensors),
            "torch.load": (partial(torch.save, state), _torch_load),
            "dcp": (lambda path: dcp.begin(state, path)(), dcp.load),
        }
        for name, (save, load) in peers.items():
            try:
                save(root / name)
            except Exception as error:
                contest.out(name, error)
                continue
            contest.add(name, partial(turn, load, root / name))
        contest.play(setting.repeat)
    medians = contest.medians()
    ours, unverified = medians.get(OURS), medians.get(f"{OURS} verify=False")
    emit(
        row,
        ratios={
            "of raw": ratio(medians.get(RAW), ours),
            **{f"x {n}": ratio(medians.get(n), ours) for n in peers if n != RAW},
            "verify=False, of raw": ratio(medians.get(RAW), unverified),
            "verify=False, x safetensors": ratio(medians.get("safetensors"), unverified),
        },
        needs={"x safetensors": Need(1.0), "x dcp": Need(1.0), "x torch.load": Need(1.0)},
        missing=contest.missing,
        **_facts(state, contest),
    )


# Beside training ----------------------------------------------------------------------------


def row_trainer(setting: Setting) -> None:
    """What one save takes from a trainer that keeps the device busy, until its commit."""
    row = "cuda trainer"
    note(row)
    there = _large(setting)
    state = {path: tensor.cpu() for path, tensor in there.items()}
    target = {path: torch.zeros_like(tensor) for path, tensor in state.items()}
    bus = _Bus.of(state_bytes(state))
    warm_up(state_bytes(state), options=_OPTIONS)
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90
    hidden = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    blocked: dict[str, list[float]] = {}

    def step_s() -> float:
        """Seconds of a step: eight products, and a host that looks at the result."""
        begin_s = time.perf_counter()
        with torch.no_grad():
            result = hidden
            for _ in range(8):
                result = factor @ result
        result[0, 0].item()
        return time.perf_counter() - begin_s

    def turn(saver: Saver, name: str) -> float:
        before = [step_s() for _ in range(100)]
        usual_s = statistics.median(before)
        with folder(setting.tmpfs) as path:
            begin_s = time.perf_counter()
            wait = saver.begin(there, path / "s")
            blocked.setdefault(name, []).append(time.perf_counter() - begin_s)
            ended = threading.Event()

            def end() -> None:
                try:
                    wait()
                finally:
                    ended.set()

            waiter = threading.Thread(target=end)
            waiter.start()
            num_steps = 0
            while not ended.is_set():
                step_s()
                num_steps += 1
            elapsed_s = time.perf_counter() - begin_s
            waiter.join()
            if name == OURS or len(blocked[name]) == 1:
                scramble(target)
                saver.load(path / "s", target)
                compare(state, target)
        return elapsed_s - num_steps * usual_s

    contest = Contest()
    contest.add(RAW, bus.save)
    with _savers(contest) as savers:
        for name, saver in savers.items():
            contest.add(name, partial(turn, saver, name))
        contest.play(setting.repeat)
    medians = contest.medians()
    emit(
        row,
        ratios={
            "lost, of a pinned copy": ratio(medians.get(OURS), medians.get(RAW)),
            f"lost, of {PINNED}'s": ratio(medians.get(OURS), medians.get(PINNED)),
        },
        needs={f"lost, of {PINNED}'s": Need(0.5, at_least=False)},
        missing=contest.missing,
        blocked_ms={
            n: round(1e3 * statistics.median(v[1:]), 1) for n, v in blocked.items() if v[1:]
        },
        **_facts(state, contest),
    )


def _on_device(row: Callable[[Setting], None], title: str, setting: Setting) -> None:
    if torch.cuda.is_available():
        row(setting)
        return
    note(f"{title}: not run, there is no CUDA device")


ROWS: dict[str, Callable[[Setting], None]] = {
    "cuda-staging": partial(_on_device, partial(row_staging, "large"), "cuda-staging"),
    "cuda-staging-small": partial(_on_device, partial(row_staging, "small"), "cuda-staging-small"),
    "cuda-restore": partial(_on_device, row_restore, "cuda-restore"),
    "cuda-trainer": partial(_on_device, row_trainer, "cuda-trainer"),
}
