# SPDX-License-Identifier: Apache-2.0
"""Scenarios in a process of their own: by how much a call grows the process at its peak.

``python -m tests.api.memory_child FOLDER SCENARIO ...`` prints each one's growth in bytes. The
peak is the kernel's (VmHWM), set back right before the call, so that what a warm-up of the same
kind has loaded does not count.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actorsnap import Options, StateDict
from actorsnap.storage import Storage, StorageContext
from actorsnap.storage.fs import open_fs
from actorsnap.storage.registry import register
from actorsnap.sync import Snapshot
from actorsnap.testing import ThrottledStorage
from tests.support.memory import return_free_memory

MIB = 1 << 20
OPTIONS = Options(fsync=False)
SMALL_BUDGET = Options(fsync=False, memory_budget_bytes=32 * MIB)
READ_BUDGET = Options(fsync=False, memory_budget_bytes=16 * MIB)

Call = Callable[[], Any]


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def growth(call: Call) -> int:
    """Peak minus what was there before, in bytes."""
    return_free_memory()  # of the warm-up
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return peak - before


def contiguous(mib: int) -> dict[str, StateDict]:
    """A quarter of it in tensors of 16 KiB."""
    small = torch.ones(mib // 4, MIB // 4).view(-1, 4096)
    return {
        "model": StateDict({f"w{n}": torch.ones(mib // 4, MIB // 4) for n in range(3)}),
        "small": StateDict({str(n): row.clone() for n, row in enumerate(small)}),
    }


def strided(mib: int) -> dict[str, StateDict]:
    return {
        "model": StateDict({f"w{n}": torch.ones(512, mib * 256).t() for n in range(2)}),
    }


def one_tensor(mib: int) -> dict[str, StateDict]:
    return {"s": StateDict(x=torch.ones(mib, MIB // 4))}


def of_many(mib: int) -> dict[str, StateDict]:
    """Tensors that do not lie in storage as they lie in memory, and a small part of one."""
    base = torch.ones(mib, MIB // 4)
    flat = base.view(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return {
            "s": StateDict(
                base=base,
                view=flat[1000:1004],
                half=flat[1000 : flat.numel() // 2],
                column=base[:, 7::128],
                quantized=torch.quantize_per_tensor(base, 0.1, 0, torch.qint8),
                sparse=base.view(mib * 64, 4096)[:, ::4].to_sparse_csr(),
            )
        }


def _open_slow(url: str, context: StorageContext) -> Storage:
    return ThrottledStorage(open_fs(url.removeprefix("slow://"), context), bytes_per_s=400e6)


def slow_take(build: Callable[[int], dict[str, StateDict]], mib: int, folder: Path) -> int:
    """Everything that waits for the storage waits at once: the most that can be in flight."""
    register("slow", _open_slow)
    Snapshot.take(folder / "warm", build(16), options=OPTIONS)
    state = build(mib)
    return growth(lambda: Snapshot.take(f"slow://{folder}/s", state, options=OPTIONS))


def take(build: Callable[[int], dict[str, StateDict]], mib: int, folder: Path) -> int:
    Snapshot.take(folder / "warm", build(16), options=OPTIONS)
    state = build(mib)
    return growth(lambda: Snapshot.take(folder / "s", state, options=OPTIONS))


def async_take(build: Callable[[int], dict[str, StateDict]], mib: int, folder: Path) -> int:
    Snapshot.async_take(folder / "warm", build(16), options=SMALL_BUDGET).wait()
    state = build(mib)
    return growth(lambda: Snapshot.async_take(folder / "s", state, options=SMALL_BUDGET).wait())


def read(out: Callable[[int], torch.Tensor] | None, mib: int, folder: Path) -> int:
    for name, size in (("warm", 16), ("s", mib)):
        Snapshot.take(folder / name, one_tensor(size), options=OPTIONS)
    target = [None if out is None else out(size) for size in (16, mib)]
    Snapshot(folder / "warm").read_object("s/x", target[0], memory_budget_bytes=MIB)
    snapshot = Snapshot(folder / "s")
    return growth(lambda: snapshot.read_object("s/x", target[1], memory_budget_bytes=MIB))


def read_part(name: str, fresh: bool, mib: int, folder: Path) -> int:
    """The growth besides what ``out`` has; that of a fresh value counts."""
    for at, size in (("warm", 16), ("s", mib)):
        state = of_many(size)
        Snapshot.take(folder / at, state, options=OPTIONS)
        out = None if fresh else state["s"][name].clone()
        del state
        snapshot = Snapshot(folder / at)
        found = growth(
            lambda: snapshot.read_object(f"s/{name}", out, memory_budget_bytes=MIB)  # noqa: B023
        )
    return found


def restore(build: Callable[[int], dict[str, StateDict]], mib: int, folder: Path) -> int:
    for name, size in (("warm", 16), ("s", mib)):
        state = build(size)
        Snapshot.take(folder / name, state, options=READ_BUDGET)
        snapshot = Snapshot(folder / name, options=READ_BUDGET)
        found = growth(lambda: snapshot.restore(state))  # noqa: B023 - called at once
    return found


def verify(mib: int, folder: Path) -> int:
    for name, size in (("warm", 16), ("s", mib)):
        Snapshot.take(folder / name, one_tensor(size), options=READ_BUDGET)
        snapshot = Snapshot(folder / name, options=READ_BUDGET)
        found = growth(lambda: snapshot.verify("full"))  # noqa: B023 - called at once
    return found


SCENARIOS: dict[str, tuple[int, Callable[[int, Path], int]]] = {
    "take": (512, lambda mib, at: take(contiguous, mib, at)),
    "take-strided": (256, lambda mib, at: slow_take(strided, mib, at)),
    "async-take": (256, lambda mib, at: async_take(contiguous, mib, at)),
    "async-take-strided": (256, lambda mib, at: async_take(strided, mib, at)),
    "read-into": (256, lambda mib, at: read(lambda n: torch.zeros(n, MIB // 4), mib, at)),
    "read-into-strided": (
        256,
        lambda mib, at: read(lambda n: torch.zeros(MIB // 4, n).t(), mib, at),
    ),
    "read-fresh": (256, lambda mib, at: read(None, mib, at)),
    "read-view": (64, lambda mib, at: read_part("view", True, mib, at)),
    "read-into-view": (64, lambda mib, at: read_part("half", False, mib, at)),
    "read-column": (64, lambda mib, at: read_part("column", True, mib, at)),
    "read-into-column": (64, lambda mib, at: read_part("column", False, mib, at)),
    "read-quantized": (64, lambda mib, at: read_part("quantized", True, mib, at)),
    "read-into-quantized": (64, lambda mib, at: read_part("quantized", False, mib, at)),
    "read-into-sparse": (64, lambda mib, at: read_part("sparse", False, mib, at)),
    "restore": (512, lambda mib, at: restore(contiguous, mib, at)),
    "restore-strided": (256, lambda mib, at: restore(strided, mib, at)),
    "verify": (256, verify),
}
"""Name -> MiB of state, and what is measured."""


def main() -> None:
    folder, *names = sys.argv[1:]
    found = {}
    for name in names:
        place = Path(folder, name)
        mib, measure = SCENARIOS[name]
        found[name] = measure(mib, place)
        shutil.rmtree(place)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
