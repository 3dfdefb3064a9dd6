# SPDX-License-Identifier: Apache-2.0
"""What do copies of small tensors cost, against other ways to gather them?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from actorsnap.planning.packing import Piece
from actorsnap.state.sources import Gathering, HostMemory, gather
from bench.local import OURS, Contest, Need, Setting, emit, facts_of, note, ratio
from bench.state import small, state_bytes

__all__ = ["ROWS"]

_CHUNK_BYTES = 16 << 20
_FEW = 20_000


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
        pieces = [Piece(i, 0, 4096) for i in items]
        gather([Gathering(sources, pieces, memory, lambda pinner: None)])

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


ROWS: dict[str, Callable[[Setting], None]] = {"gather": row_gather}
