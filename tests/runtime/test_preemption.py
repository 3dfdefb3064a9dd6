# SPDX-License-Identifier: Apache-2.0
"""Preemption under torchrun: real signals, one snapshot at one step on all ranks, or none.

Every scenario starts two ranks by torchrun; a rank begins it by itself, at a step of its own, and
writes what it saw to a file. Then one process restores the snapshots and looks at the values.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import Options, StateDict
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from tests.pages import ROOT

pytestmark = pytest.mark.slow

NUM_RANKS = 2
GRACE_S = 25.0
"""Of the notices. torchrun kills its workers 30 s after the signal."""

TRAINER = r"""
import contextlib, json, os, signal, sys, threading, time
from pathlib import Path
import torch
from actorsnap import Options, StateDict
from actorsnap.manager import every, keep, notices
from actorsnap.manager.sync import CheckpointManager

root, scenario = sys.argv[1], sys.argv[2]
folder, rank, world = Path(root).parent, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
said = {"rank": rank, "pid": os.getpid(), "saved": [], "last": None, "stopped": False, "error": ""}
calls = []  # of a handler that was there before
if scenario == "chained":
    signal.signal(signal.SIGTERM, lambda *_: calls.append(1))

def me(after_s=0.0):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGTERM)

def torchrun():
    os.kill(os.getppid(), signal.SIGTERM)

def tell():
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))

def at_first_deletion():
    # A signal in the middle of a delete: its intent is there.
    while not list((Path(root) / ".manager" / "deleting").glob("*.json")):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGTERM)

# step -> what this rank does after it
acts = {
    "one-0": {20: me} if rank == 0 else {},
    "one-1": {20: me} if rank == 1 else {},
    "chained": {20: me} if rank == 0 else {},
    "all-at-once": {20: torchrun} if rank == 0 else {},
    "skewed": {20 if rank == 0 else 35: me},
    "twice-one": {20: lambda: (me(), me())} if rank == 0 else {},
    "twice-torchrun": {20: lambda: (torchrun(), time.sleep(0.2), torchrun())} if rank == 0 else {},
    "late-second": {20: me} if rank == 0 else {},
    "commit": {20: me} if rank == 0 else {},
    "commit-all": {20: torchrun} if rank == 0 else {},
    "delete": {},
    "no-time": {20: me} if rank == 0 else {},
}[scenario]
step_s = 0.01 if rank == 0 else 0.025  # rank 0 is ahead
size = 40_000_000 if scenario in ("late-second", "commit", "commit-all") else 10_000
said["size"] = size
grace_s = 0.01 if scenario == "no-time" else 25.0

train = StateDict(weight=torch.zeros(size), step=-1)
own = StateDict(x=torch.zeros(50))
if scenario == "delete" and rank == 0:
    threading.Thread(target=at_first_deletion, daemon=True).start()
try:
    with CheckpointManager(
        root,
        {"train": train, "own": own},
        save=every.steps(10**9) | every.notice(),
        keep=keep.last(1) if scenario == "delete" else keep.all(),
        min_valid=1,
        replicated=["train/**"],
        options=Options(fsync=False, lost_after_s=10.0),
        notices=[notices.signals("SIGTERM", grace_s=grace_s)],
    ) as manager:
        for step in range(2000):
            time.sleep(step_s)
            train["weight"].fill_(step)
            train["step"] = step
            own["x"].fill_(1000 * (rank + 1) + step)
            if scenario in ("commit", "commit-all") and step == 20:
                manager.async_save(step)  # in flight when the signal comes
                said["saved"].append(step)
            elif scenario == "delete" and step in (10, 20):
                manager.save(step)
                said["saved"].append(step)
            elif manager.maybe_save(step):
                said["saved"].append(step)
                if scenario == "late-second" and step > 0 and rank == 0:
                    said["last"] = step
                    tell()
                    me(after_s=2.5)  # after the time in which two signals are one
                    time.sleep(30)
            said["last"] = step
            if manager.should_stop:
                said["stopped"] = True
                break
            if step in acts:
                said["signalled_s"] = time.time()
                acts[step]()
except BaseException as error:
    said["error"] = f"{type(error).__name__}: {error}"
said["calls"] = len(calls)
said["ended_s"] = time.time()
tell()
sys.exit(75 if said["stopped"] else 1 if said["error"] else 0)
"""


@dataclass
class Played:
    """One run: torchrun's exit code and output, what each rank said, the snapshots."""

    code: int
    output: str
    seconds: float
    ranks: dict[int, dict[str, Any]]
    steps: list[int]
    root: str
    values: dict[int, list[float]] = field(default_factory=dict)

    def same(self, name: str) -> Any:
        """What all ranks said."""
        found = [one[name] for one in self.ranks.values()]
        assert len(found) == NUM_RANKS, self.output
        assert all(value == found[0] for value in found), (name, found, self.output)
        return found[0]


def restored(root: str, size: int) -> tuple[list[int], dict[int, list[float]]]:
    """The steps of a root, all of which must be whole, and the values of each."""
    values = {}
    with CheckpointManager(root, save=every.steps(10**9), keep=keep.all()) as manager:
        steps = manager.all_steps()
        assert manager.latest_valid("full") == manager.latest() or not steps
        for info in manager.steps():
            train = StateDict(weight=torch.zeros(size), step=-1)
            manager.restore(info.step, {"train": train}, strict=False)
            values[info.step] = [train["step"], *train["weight"].unique().tolist()]
    return steps, values


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Played]:
    def play(scenario: str, *options: str) -> Played:
        script = tmp_path / "trainer.py"
        script.write_text(TRAINER)
        root = str(tmp_path / "run")
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started_s = time.monotonic()
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(NUM_RANKS), *options),
                *(str(script), root, scenario),
            ],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = launcher.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            output, _ = launcher.communicate()
            for file in tmp_path.glob("rank-*.json"):
                os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
            pytest.fail(f"torchrun hangs:\n{output}")
        seconds = time.monotonic() - started_s
        ranks = {
            said["rank"]: said
            for said in (json.loads(file.read_text()) for file in tmp_path.glob("rank-*.json"))
        }
        steps, values = restored(root, ranks[0]["size"])
        return Played(launcher.returncode, output, seconds, ranks, steps, root, values)

    return play


def check_one_snapshot(played: Played, *before: int) -> int:
    """All stopped at one step, with one snapshot of it, in time; returns the step."""
    assert played.same("error") == "", played.output
    assert played.same("stopped")
    (step,) = {one["last"] for one in played.ranks.values()}
    assert played.same("saved") == [*before, step]
    assert played.steps == [*before, step]
    assert played.values[step] == [step, float(step)]
    signalled_s = max(one.get("signalled_s", 0.0) for one in played.ranks.values())
    assert signalled_s == 0 or played.same("stopped")
    assert all(
        one["ended_s"] - signalled_s < GRACE_S for one in played.ranks.values() if signalled_s
    )
    assert played.code == 1  # torchrun's, after a signal or a failed worker
    return int(step)


@pytest.mark.parametrize("whom", [0, 1])
def test_a_signal_to_one_rank(play: Callable[..., Played], whom: int) -> None:
    played = play(f"one-{whom}")
    assert check_one_snapshot(played, 0) > 20
    assert "exitcode  : 75" in played.output


def test_an_earlier_handler_is_called_too(play: Callable[..., Played]) -> None:
    played = play("chained")
    check_one_snapshot(played, 0)
    assert played.ranks[0]["calls"] >= 1


def test_a_signal_to_torchrun(play: Callable[..., Played]) -> None:
    assert check_one_snapshot(play("all-at-once"), 0) > 20


def test_signals_at_skewed_steps(play: Callable[..., Played]) -> None:
    """Each rank gets its own, some steps apart: one snapshot, not two."""
    assert check_one_snapshot(play("skewed"), 0) > 20


@pytest.mark.parametrize("scenario", ["twice-one", "twice-torchrun"])
def test_two_deliveries_make_one_snapshot(play: Callable[..., Played], scenario: str) -> None:
    check_one_snapshot(play(scenario), 0)


def test_a_second_signal_ends_the_rank(play: Callable[..., Played]) -> None:
    """Whatever was in flight then: what is committed is whole, and the first one is there."""
    played = play("late-second")
    assert played.ranks[0]["stopped"] is False
    assert "Signal 15 (SIGTERM)" in played.output
    assert played.steps[0] == 0
    assert len(played.steps) <= 2
    assert played.code == 1


@pytest.mark.parametrize("scenario", ["commit", "commit-all"])
def test_a_signal_while_a_save_is_in_flight(play: Callable[..., Played], scenario: str) -> None:
    """It is finished; at most one more is made, at one step."""
    played = play(scenario)
    assert played.same("error") == "", played.output
    saved = played.same("saved")
    assert saved[:2] == [0, 20]
    assert len(saved) <= 3
    assert played.steps == saved
    assert played.same("stopped")
    played.same("last")
    for step in saved:
        assert played.values[step] == [step, float(step)]


def test_a_signal_in_a_delete(play: Callable[..., Played]) -> None:
    """The delete ends as it would, or the next manager ends it; the notice is served."""
    played = play("delete")
    assert played.same("error") == "", played.output
    assert played.same("stopped")
    last = played.same("saved")[-1]
    assert played.steps[-1] == last
    assert played.values[last] == [last, float(last)]
    with CheckpointManager(
        played.root,
        {"train": StateDict(weight=torch.zeros(10_000), step=-1)},
        save=every.steps(1),
        keep=keep.last(1),
        min_valid=1,
        options=Options(fsync=False),
    ) as manager:
        found = manager.restore_latest(strict=False)
        assert found is not None
        assert found.step == last
        manager.save(10**6)
    root = Path(played.root)
    assert list((root / ".manager" / "deleting").glob("*.json")) == []
    assert len(list(root.glob("step-*"))) == len(manager.all_steps())


def test_no_time_for_a_snapshot(play: Callable[..., Played]) -> None:
    """Nothing is begun that cannot end: the ranks stop at one step without a snapshot."""
    played = play("no-time")
    assert played.same("error") == "", played.output
    assert played.same("stopped")
    played.same("last")
    assert played.steps == played.same("saved") == [0]
