# SPDX-License-Identifier: Apache-2.0
"""What do the copies cost? Of small tensors, against other ways to gather them; of a CUDA device,
against its bus: told as skipped where there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from actorsnap import Options, StateDict
from actorsnap.planning.packing import Piece
from actorsnap.state.sources import HostMemory, gather
from actorsnap.sync import PendingSnapshot, Snapshot, warm_up
from bench.local import OURS, RAW, Contest, Need, Setting, emit, facts_of, folder, note, ratio
from bench.state import State, compare, llama, scramble, small, state_bytes

__all__ = ["ROWS"]

_CHUNK_BYTES = 16 << 20
_FEW = 20_000
_OPTIONS = Options(fsync=False)


def row_gather(setting: Setting) -> None:
    """Copies of small tensors on one thread, 20,000 of 4 KiB."""
    note("gather")
    state = small(_FEW, 4096)
    tensors = list(state.values())
    sources = [HostMemory(t.data_ptr(), t.nbytes, t) for t in tensors]
    out = bytearray(state_bytes(state))
    want = b"".join([t.numpy().tobytes() for t in tensors])

    def timed(copy: Callable[[Sequence[int], memoryview], None]) -> Callable[[], float]:
        def run() -> float:
            out[:] = bytes(len(out))
            step = _CHUNK_BYTES // 4096
            begin = time.perf_counter()
            for first in range(0, _FEW, step):
                items = range(first, min(first + step, _FEW))
                copy(items, memoryview(out)[first * 4096 : items.stop * 4096])
            elapsed = time.perf_counter() - begin
            if out != want:
                raise RuntimeError("the copy differs")
            return elapsed

        return run

    def ours(items: Sequence[int], memory: memoryview) -> None:
        gather(sources, [Piece(i, 0, 4096) for i in items], memory, lambda pinner: None)

    def views(items: Sequence[int], memory: memoryview) -> None:
        for number, i in enumerate(items):
            sources[i].copy_into(0, memory[number * 4096 : (number + 1) * 4096])

    def foreach(items: Sequence[int], memory: memoryview) -> None:
        flat = torch.frombuffer(memory, dtype=torch.float32)
        some = [tensors[i] for i in items]
        torch._foreach_copy_([part for part in flat.view(len(some), -1)], some)

    def cat(items: Sequence[int], memory: memoryview) -> None:
        flat = torch.frombuffer(memory, dtype=torch.float32)
        torch.cat([tensors[i].view(-1) for i in items], out=flat)

    contest = Contest()
    for name, copy in ((OURS, ours), ("view each", views), ("foreach", foreach), ("cat", cat)):
        contest.add(name, timed(copy))
    contest.play(setting.repeat)
    medians = contest.medians()
    emit(
        "gather 20,000 tensors of 4 KiB",
        ratios={"of view each": ratio(medians.get(OURS), medians.get("view each"))},
        needs={"of view each": Need(0.75, at_least=False)},
        missing=contest.missing,
        **facts_of(state, contest.seconds, "memory"),
    )


def _take(path: Path, state: State) -> PendingSnapshot:
    return Snapshot.async_take(path, {"model": StateDict(**state)}, options=_OPTIONS)


def row_cuda(setting: Setting) -> None:
    """From ``async_take`` to staged, against copies of all tensors into pinned memory."""
    if not torch.cuda.is_available():
        note("cuda: skipped, there is no CUDA device")
        return
    for name, state in (("large", llama(setting.gib)), ("small", small(_FEW, 4096))):
        note(f"cuda, {name} tensors")
        there = {path: tensor.cuda() for path, tensor in state.items()}
        target = {path: torch.zeros_like(tensor) for path, tensor in state.items()}
        # What the bus can do: one tensor, so that small ones are no excuse.
        whole = torch.cat([tensor.view(-1) for tensor in there.values()])
        pinned = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
        warm_up(state_bytes(state), options=_OPTIONS)
        contest = Contest()
        contest.add(RAW, partial(_timed_bus, whole, pinned))
        contest.add(OURS, partial(_timed_cuda, there, target, setting.tmpfs))
        contest.play(setting.repeat)
        medians = contest.medians()
        emit(
            f"cuda take to staged, {name} tensors",
            ratios={"of a pinned copy": ratio(medians.get(RAW), medians.get(OURS))},
            needs={"of a pinned copy": Need(0.85)} if name == "large" else {},
            missing=contest.missing,
            device=torch.cuda.get_device_name(),
            **facts_of(state, contest.seconds, "tmpfs"),
        )


def _timed_bus(whole: torch.Tensor, pinned: torch.Tensor) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    pinned.copy_(whole, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _timed_cuda(there: State, target: State, root: Path) -> float:
    with folder(root) as path:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pending = _take(path, there)
        elapsed = time.perf_counter() - begin
        pending.wait()
        scramble(target)
        Snapshot(path).restore({"model": StateDict(**target)})
        compare({name: tensor.cpu() for name, tensor in there.items()}, target)
        return elapsed


ROWS: dict[str, Callable[[Setting], None]] = {
    "gather": row_gather,
    "cuda": row_cuda,
}
