# SPDX-License-Identifier: Apache-2.0
"""What does a ``CheckpointManager`` leave behind, and what does its retention take from a trainer?

As ``bench/local.py``: one JSON line per row (``ROWS``). Each measurement is made in a process of
its own. What an idle ``maybe_save`` costs: ``bench/policies.py``.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import actorsnap.sync
from actorsnap import Options, StateDict
from actorsnap.manager import KeepPolicy, every, keep
from actorsnap.manager.sync import CheckpointManager
from bench.child import in_child
from bench.local import Need, Setting, emit, folder, note
from bench.memory import MIB, leftovers
from bench.state import llama
from bench.trainer import Trainer

__all__ = ["ROWS", "retention", "soak"]

# Many saves with restarts -------------------------------------------------------------------

NUM_WARM = 500
"""Of ``NUM_SAVES``: allocators and caches grow until then."""

NUM_SAVES = 1000
RESTART_EVERY = 50


def soak(offload: str, root: str) -> dict[str, Any]:
    """``leftovers`` after ``NUM_WARM`` and ``NUM_SAVES`` saves, and the objects at the root."""
    state = {f"layer.{n}": torch.ones(1024) for n in range(64)}
    app_state = {"model": StateDict(state), "progress": StateDict(step=-1)}
    options = Options(offload=offload, fsync=False)
    leftovers()  # what looking takes is there before
    found = []
    with folder(Path(root)) as path:
        for first in range(0, NUM_SAVES, RESTART_EVERY):
            with CheckpointManager(
                path / "run", app_state, save=every.steps(1), keep=keep.last(3), options=options
            ) as manager:
                restored = manager.restore_latest()
                if (restored.step + 1 if restored else 0) != first:
                    raise RuntimeError(f"restored {restored}, not step {first - 1}")
                for step in range(first, first + RESTART_EVERY):
                    app_state["progress"]["step"] = step
                    manager.maybe_save(step)
            if first + RESTART_EVERY in (NUM_WARM, NUM_SAVES):
                del manager
                time.sleep(0.5)
                leftovers()  # looking takes memory, too
                found.append(leftovers())
        files = [file for file in (path / "run").rglob("*") if file.is_file()]
        names = {each.name for each in (path / "run").iterdir()}
    num_records = sum(".manager" in file.parts for file in files)
    return {"looks": found, "names": sorted(names), "files": len(files), "records": num_records}


def row_soak(setting: Setting) -> None:
    note(f"manager: {NUM_SAVES} saves, a restart every {RESTART_EVERY}")
    ratios: dict[str, float | None] = {}
    needs: dict[str, Need] = {}
    facts: dict[str, Any] = {}
    for offload in ("thread", "process"):
        begun_s = time.perf_counter()
        result = in_child(soak, offload=offload, root=str(setting.tmpfs))
        first, last = result["looks"]
        note(f"  {offload}: {first} {last} {result['names']}")
        for name in ("memory", "descriptors", "threads", "shared memory"):
            label = f"{offload}, {name}"
            change = last[name] - first[name]
            ratios[label] = change / MIB if name == "memory" else change
            needs[label] = Need(1.0 if name == "memory" else 0.0, at_least=False)
        # The last three, the one restored from, and the records of runs.
        ratios[f"{offload}, snapshots"] = len(result["names"]) - 1
        needs[f"{offload}, snapshots"] = Need(4.0, at_least=False)
        facts[offload] = {
            "files": result["files"],
            "records": result["records"],
            "s": round(time.perf_counter() - begun_s, 1),
        }
    emit(
        "manager soak",
        ratios=ratios,
        needs=needs,
        missing={},
        unit=f"growth from save {NUM_WARM} to save {NUM_SAVES}; memory in MiB",
        at_the_end=facts,
    )


# Retention next to a trainer ----------------------------------------------------------------

STEPS_PER_SAVE = 100
SAVES_PER_BLOCK = 2
STATE_GIB = 1 / 16


def lost(steps: list[float]) -> float:
    """Share of the time between two saves that its steps lost: beyond the quicker ones' time.

    Machines drift by more than a manager costs, but not within two seconds.
    """
    usual_s = statistics.quantiles(steps, n=4)[0]
    return sum(steps) / (len(steps) * usual_s) - 1


def retention(num_rounds: int, root: str) -> dict[str, list[float]]:
    """What the steps of each save lose (``lost``), in turns; ``cpu``: of all other threads.

    What a manager does in the trainer's process takes from the trainer at most its CPU time, which
    other programs on the machine disturb less. The uploader process is not counted: it gets what
    the trainer leaves.

    ``saves``: ``Snapshot.async_take`` alone; the others: a manager that keeps all or three, and
    two that keep three, with a tier and so a drain per save.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    state = llama(STATE_GIB)
    app_state = {"model": StateDict(state)}
    trainer = Trainer(state)
    found: dict[str, list[float]] = {}
    with folder(Path(root)) as path:
        managers = {
            name: CheckpointManager(
                path / name, app_state, save=every.steps(STEPS_PER_SAVE), keep=policy
            )
            for name, policy in _POLICIES.items()
        }
        for name, options in _DRAINING.items():
            managers[name] = CheckpointManager(
                path / name,
                app_state,
                save=every.steps(STEPS_PER_SAVE),
                keep=keep.last(3),
                tiers=[path / f"tier of {name}"],
                options=options,
            )

        def take(step: int) -> None:
            if step % STEPS_PER_SAVE == 0:
                if pending:
                    pending.pop().wait()
                url = path / "saves" / f"step-{step}"
                pending.append(actorsnap.sync.Snapshot.async_take(url, app_state))

        pending: list[Any] = []
        calls: dict[str, Callable[[int], Any]] = {"saves": take, "no saves": lambda step: None}
        calls |= {name: manager.maybe_save for name, manager in managers.items()}
        num_steps = STEPS_PER_SAVE * SAVES_PER_BLOCK
        for number in range(num_rounds + 1):
            order = [*calls]
            shift = number % len(order)
            for name in order[shift:] + order[:shift]:
                begin_cpu = time.process_time() - time.thread_time()
                times: list[float] = []
                for step in range(number * num_steps, (number + 1) * num_steps):
                    begin_s = time.perf_counter()
                    trainer.timed_step()
                    calls[name](step)
                    times.append(time.perf_counter() - begin_s)
                # Not timed, but the rest of the work: nothing of it goes on in the next block.
                for each in (*pending, *managers.values()):
                    each.wait()
                pending.clear()
                while any(each.status().draining for each in managers.values()):
                    time.sleep(0.01)
                time.sleep(0.3)
                cpu_s = time.process_time() - time.thread_time() - begin_cpu
                if number > 0:  # the first one warms up
                    for at in range(0, num_steps, STEPS_PER_SAVE):
                        found.setdefault(name, []).append(lost(times[at : at + STEPS_PER_SAVE]))
                    found.setdefault(f"{name} cpu", []).append(cpu_s / sum(times))
                if name in ("saves", "keep.all()"):
                    shutil.rmtree(path / name)
        for manager in managers.values():
            manager.close()
    return found


_DRAINING = {
    "keep.last(3), a drain": Options(),
    "keep.last(3), a paced drain": Options(max_slowdown=0.02),
}
_POLICIES: dict[str, KeepPolicy] = {"keep.all()": keep.all(), "keep.last(3)": keep.last(3)}


def row_retention(setting: Setting) -> None:
    note(f"manager: steps of {1e3 * 0.02:.0f} ms, a save every {STEPS_PER_SAVE}")
    rounds = 4 * setting.repeat
    times = in_child(retention, num_rounds=rounds, root=str(setting.tmpfs))
    ratios: dict[str, float | None] = {}
    for name, other in (
        ("keep.last(3)", "saves"),
        ("keep.last(3)", "keep.all()"),
        *((name, "saves") for name in _DRAINING),
    ):
        each = [a - b for a, b in zip(times[name], times[other], strict=True)]
        ratios[f"{name} over {other}, %"] = 100 * statistics.median(each)
        note(f"  {name} over {other}: {[round(100 * value, 1) for value in each]}")
        cpu = [a - b for a, b in zip(times[f"{name} cpu"], times[f"{other} cpu"], strict=True)]
        ratios[f"{name} over {other}, CPU, %"] = 100 * statistics.median(cpu)
        note(f"  cpu: {[round(100 * value, 1) for value in cpu]}")
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios["saves over no saves, %"] = 100 * (medians["saves"] - medians["no saves"])
    emit(
        "manager retention",
        ratios=ratios,
        needs={name: Need(2.0, at_least=False) for name in ratios if name.startswith("keep")},
        missing={},
        seconds={name: round(value, 5) for name, value in medians.items()},
        unit="medians over the saves; share of the time that steps lost; cpu: the same of a core",
        rounds=rounds,
    )


def cost(num_saves: int, root: str) -> dict[str, list[float]]:
    """CPU seconds of this process per save of 64 MiB, with all that follows it; in turns."""
    app_state = {"model": StateDict(llama(STATE_GIB))}
    options = Options(offload="thread")
    found: dict[str, list[float]] = {name: [] for name in ("saves", *_POLICIES)}
    with folder(Path(root)) as path:
        managers = {
            name: CheckpointManager(
                path / name, app_state, save=every.steps(1), keep=policy, options=options
            )
            for name, policy in _POLICIES.items()
        }
        for step in range(num_saves + 4):  # the first ones warm up
            for name, times in found.items():
                begin_s = time.process_time()
                if name == "saves":
                    url = path / "saves" / f"step-{step}"
                    actorsnap.sync.Snapshot.async_take(url, app_state, options=options).wait()
                else:
                    managers[name].maybe_save(step)
                    managers[name].wait()
                time.sleep(0.25)
                times.append(time.process_time() - begin_s)
            shutil.rmtree(path / "saves")
            shutil.rmtree(path / "keep.all()" / f"step-{step - 3:010d}.g1", ignore_errors=True)
        for manager in managers.values():
            manager.close()
    return {name: times[4:] for name, times in found.items()}


def row_cost(setting: Setting) -> None:
    note("manager: CPU time per save")
    times = in_child(cost, num_saves=10 * setting.repeat, root=str(setting.tmpfs))
    medians = {name: statistics.median(each) for name, each in times.items()}
    extra_s = medians["keep.last(3)"] - medians["saves"]
    emit(
        "manager cost",
        ratios={"keep.last(3) over saves, ms of CPU": 1e3 * extra_s},
        needs={},
        missing={},
        seconds={name: round(value, 5) for name, value in medians.items()},
        unit="CPU seconds per save, median",
    )


ROWS: dict[str, Callable[[Setting], None]] = {
    "manager-soak": row_soak,
    "manager-retention": row_retention,
    "manager-cost": row_cost,
}
