# SPDX-License-Identifier: Apache-2.0
"""What memory does an asynchronous save take, and does anything grow from save to save?

As ``bench/local.py``: one JSON line per row (``ROWS``). Each measurement is made in a process of
its own, watched from this one: its memory and that of its uploader process together, in which
pages that they share count once (``bench.child.Memory``).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

import actorsnap.sync
from actorsnap import Options, StateDict
from actorsnap.runtime.host import Host
from bench.child import in_child, memory_of, shared_files, watched
from bench.local import Need, Setting, emit, folder, note, status_kib
from bench.ranks import module_of
from bench.state import compare, llama, scramble, state_bytes

__all__ = ["ROWS", "leftovers", "messages", "saves"]

MIB = 1 << 20
SHARE = 8
"""The state is so many budgets."""

SPARE_MIB = 64.0
NUM_WARM = 1000
"""Until about save 750 allocators and caches grow by 1 MiB; behind save 1,000 by some pages."""

NUM_SAVES = NUM_WARM + 500
NUM_TENSORS = 20_000
MESSAGE_BYTES = 4096
EVERY_S = 0.005


# A budget below the state -------------------------------------------------------------------


def budgeted(
    gib: float, offload: str, stage: Literal["eager", "lazy"], root: str
) -> dict[str, int]:
    """Saves with a budget of an eighth of the state, which is changed as soon as it may be."""
    state = llama(gib)
    app_state: dict[str, Any] = {"model": module_of(state)}
    budget = state_bytes(state) // SHARE
    options = Options(memory_budget_bytes=budget, offload=offload, fsync=False)
    with folder(Path(root)) as path:
        expected = {name: tensor.clone() for name, tensor in state.items()}
        gc.collect()
        before, before_kib = memory_of(os.getpid())["total"], status_kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        print("begin", flush=True)
        pending = actorsnap.sync.Snapshot.async_take(
            path / "snapshot", app_state, stage=stage, options=options
        )
        pending.staged()
        scramble(state)
        pending.wait()
        peak_kib = status_kib("VmHWM") - before_kib
        print("end", flush=True)
        actorsnap.sync.Snapshot(path / "snapshot").restore({"model": StateDict(state)})
        compare(expected, state)
    return {"before": before, "budget": budget, "resident": peak_kib << 10}


def row_budget(setting: Setting) -> None:
    note("async memory")
    growth: dict[str, float] = {}
    needs: dict[str, Need] = {}
    for offload, stage in (("thread", "eager"), ("process", "eager"), ("process", "lazy")):
        found, memory = watched(
            budgeted,
            EVERY_S,
            gib=setting.gib,
            offload=offload,
            stage=stage,
            root=str(setting.tmpfs),
        )
        way = f"{offload} {stage}"
        extra = {
            f"{way}, all": memory.peak["total"] - found["before"] - found["budget"],
            f"{way}, trainer alone": found["resident"] - found["budget"],
        }
        note(f"  {extra} bytes, {memory.num_samples} samples, {memory.peak}")
        for label, nbytes in extra.items():
            growth[label] = round(nbytes / MIB, 1)
            needs[label] = Need(SPARE_MIB, at_least=False)
    emit(
        "async memory",
        ratios=dict(growth),
        needs=needs,
        missing={},
        unit=f"MiB above the budget, which is 1/{SHARE} of the state. All: anonymous memory of "
        "trainer and uploader process, and the arena's file, looked at every "
        f"{EVERY_S * 1e3:g} ms; trainer alone: VmHWM",
        growth_mib=growth,
    )


# Many saves ---------------------------------------------------------------------------------


def leftovers() -> dict[str, int]:
    """What a process and those below it hold."""
    gc.collect()
    here = psutil.Process()
    family = [here, *here.children(recursive=True)]
    return {
        "memory": memory_of(here.pid)["total"],
        "descriptors": sum(process.num_fds() for process in family),
        "threads": sum(process.num_threads() for process in family),
        "processes": len(family),
        "shared memory": sum(
            shared_files([each.pid for each in family], "/memfd:", "/dev/shm/").values()
        ),
        "objects": len(gc.get_objects()),
    }


def saves(num_saves: int, num_warm: int, offload: str, root: str) -> list[dict[str, int]]:
    """``leftovers`` behind ``num_warm`` and behind ``num_saves`` saves of a small state."""
    state = {f"layer.{n}": torch.ones(1024) for n in range(64)}
    app_state = {"model": StateDict(state), "progress": StateDict(step=0)}
    options = Options(offload=offload, fsync=False)
    leftovers()  # what looking takes is there before
    found = []
    with folder(Path(root)) as path:
        for number in range(1, num_saves + 1):
            app_state["progress"]["step"] = number
            pending = actorsnap.sync.Snapshot.async_take(
                path / "snapshot", app_state, options=options, overwrite=True
            )
            pending.wait()
            if number in (num_warm, num_saves):
                del pending
                time.sleep(0.5)
                leftovers()  # looking takes memory, too
                found.append(leftovers())
    return found


def row_saves(setting: Setting) -> None:
    note(f"{NUM_SAVES} saves")
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    for offload in ("thread", "process"):
        first, last = in_child(
            saves,
            num_saves=NUM_SAVES,
            num_warm=NUM_WARM,
            offload=offload,
            root=str(setting.tmpfs),
        )
        note(f"  {offload}: {first} {last}")
        for name in ("memory", "descriptors", "threads", "shared memory"):
            label = f"{offload}, {name}"
            change = last[name] - first[name]
            ratios[label] = change / MIB if name == "memory" else change
            needs[label] = Need(1.0 if name == "memory" else 0.0, at_least=False)
    emit(
        "many saves",
        ratios=ratios,
        needs=needs,
        missing={},
        unit=f"growth from save {NUM_WARM} to save {NUM_SAVES}; memory in MiB",
    )


# Messages -----------------------------------------------------------------------------------


def messages(num_tensors: int, num_saves: int, root: str) -> list[int]:
    """Bytes between trainer and process, both ways, per save of small tensors."""
    state: dict[str, Any] = {f"layer.{n}.weight": torch.ones(4) for n in range(num_tensors)}
    app_state = {"model": StateDict(state), "progress": StateDict(step=0)}
    options = Options(offload="process", fsync=False)
    passed = [0]
    with folder(Path(root)) as path:
        for number in range(num_saves):
            app_state["progress"]["step"] = number
            actorsnap.sync.Snapshot.async_take(
                path / "snapshot", app_state, options=options, overwrite=True
            ).wait()
            uploader = Host.get().resources.uploader
            assert uploader is not None
            assert uploader._link is not None
            link = uploader._link
            passed.append(link.sent_bytes + link.received_bytes)
    return [after - before for before, after in zip(passed, passed[1:], strict=False)]


def row_messages(setting: Setting) -> None:
    note(f"messages of {NUM_TENSORS} tensors")
    passed = in_child(messages, num_tensors=NUM_TENSORS, num_saves=4, root=str(setting.tmpfs))
    note(f"  {passed}")
    emit(
        "messages to the process",
        ratios={"first save": float(passed[0]), "later ones": float(max(passed[1:]))},
        needs={"later ones": Need(MESSAGE_BYTES, at_least=False)},
        missing={},
        unit=f"bytes both ways per save of {NUM_TENSORS} tensors",
    )


ROWS: dict[str, Callable[[Setting], None]] = {
    "async-memory": row_budget,
    "many-saves": row_saves,
    "messages": row_messages,
}
