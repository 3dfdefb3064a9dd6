# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.xla``: PyTorch/XLA's calls, with its results."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import anyio
import pytest
import torch

from actorsnap import IncompatibleState, RootTaken, StateDict, UsageError
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.interop.xla import CheckpointManager, prime_optimizer
from actorsnap.manager.sync import CheckpointManager as OwnManager
from actorsnap.manager.sync import every
from actorsnap.storage.wrapper import Wrapper
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url
from tests.servers.fake_gcs import FakeGcsServer
from tests.support import forker

T = TypeVar("T")
P = ParamSpec("P")

pytestmark = pytest.mark.usefixtures("forker")

# As in the documentation of PyTorch/XLA, but for the first line.
EXAMPLE = """\
from actorsnap.interop.xla import CheckpointManager, prime_optimizer

# Create a CheckpointManager to checkpoint every 10 steps into GCS.
chkpt_mgr = CheckpointManager('gs://my-bucket/my-experiment', 10)

# Select a checkpoint to restore from, and restore if applicable
tracked_steps = chkpt_mgr.all_steps()
if tracked_steps:
    # Choose the highest step
    best_step = max(tracked_steps)
    # Before restoring the checkpoint, the optimizer state must be primed
    # to allow state to be loaded into it.
    prime_optimizer(optim)
    state_dict = {'model': model.state_dict(), 'optim': optim.state_dict()}
    chkpt_mgr.restore(best_step, state_dict)
    model.load_state_dict(state_dict['model'])
    optim.load_state_dict(state_dict['optim'])

# Call `save` or `save_async` every step within the train loop. These methods
# return True when a checkpoint is taken.
for step, data in enumerate(dataloader):
    ...
    state_dict = {'model': model.state_dict(), 'optim': optim.state_dict()}
    if chkpt_mgr.save_async(step, state_dict):
        print(f'Checkpoint taken at step {step}')
"""

# What a TPU job has around the example; `...` of the example trains.
AROUND = """\
import sys, torch
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Linear(4, 4)
optim = torch.optim.Adam(model.parameters(), lr=0.1)

class Batches:
    def __iter__(self):
        say("begins")
        for _ in range(int(sys.argv[2])):
            optim.zero_grad()
            model(torch.ones(4)).sum().backward()
            optim.step()
            yield
        say("ends")

def say(what):
    weights = f", weights {model.weight.sum().item()}" if optim.state else ""
    print(f"{what} with {len(optim.state)} states{weights}", flush=True)

dataloader = Batches()
"""


def state(value: float) -> dict[str, Any]:
    return {
        "model": {
            "w": torch.full((4,), float(value)),
            "deep": {"b": torch.full((2,), -float(value))},
        }
    }


def weight_of(state: dict[str, Any]) -> float:
    (value,) = state["model"]["w"].unique().tolist()
    assert isinstance(value, float)
    return value


def manager(path: Path, interval: int = 10, **settings: Any) -> CheckpointManager:
    return CheckpointManager(str(path), interval, **settings)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_the_documented_example_runs(fake_gcs: FakeGcsServer) -> None:
    """In two processes: the second one continues the first, and counts from 0 again."""
    fake_gcs.make_bucket("my-bucket")

    def run(seed: int, num_steps: int) -> tuple[list[str], str]:
        command = ["-W", "error", "-c", AROUND + EXAMPLE, str(seed), str(num_steps)]
        done = subprocess.run(
            forker.command(*command),
            env={**os.environ, **fake_gcs.env()},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr

    first, _ = run(1, 21)
    assert first[0] == "begins with 0 states"
    assert first[1:-1] == [f"Checkpoint taken at step {step}" for step in (0, 10, 20)]
    second, said = run(2, 15)
    # The weights of step 20, the last one.
    assert second[0] == first[-1].replace("ends", "begins")
    assert second[1:-1] == ["Checkpoint taken at step 0", "Checkpoint taken at step 10"]
    assert "step 0 comes after step 20" in said


def test_signature() -> None:
    """Of pytorch/xla at 134374e."""

    def parameters(function: Any) -> dict[str, object]:
        given = inspect.signature(function).parameters
        return {name: each.default for name, each in given.items()}

    empty = inspect.Parameter.empty
    assert parameters(CheckpointManager) == {
        "path": empty,
        "save_interval": empty,
        "max_to_keep": 0,
        "max_pending_async": 1,
        "num_of_threads": 1,
        "process_group": None,
        "chkpt_on_preemption": True,
    }
    for call in (CheckpointManager.save, CheckpointManager.save_async):
        expected = {"self": empty, "step": empty, "state_dict": empty, "force": False}
        assert parameters(call) == expected


def test_saves_each_interval_and_by_force(root: Path) -> None:
    chkpt_mgr = manager(root)
    assert chkpt_mgr.all_steps() == []
    assert not root.exists()
    taken = [step for step in range(21) if chkpt_mgr.save(step, state(step))]
    assert taken == [0, 10, 20]
    assert not chkpt_mgr.save(21, state(21))
    assert chkpt_mgr.save(22, state(22), force=True)
    assert chkpt_mgr.save_async(23, state(23), force=True)
    chkpt_mgr.join()
    assert chkpt_mgr.all_steps() == [0, 10, 20, 22, 23]
    assert chkpt_mgr.should_save(30)
    assert not chkpt_mgr.should_save(31)


def test_restores_in_place(root: Path) -> None:
    chkpt_mgr = manager(root)
    chkpt_mgr.save(0, {**state(1.0), "epoch": 3, "scale": torch.tensor(2.0), "lrs": [0.1, 0.2]})
    held = {**state(0.0), "epoch": 0, "scale": torch.tensor(0.0), "lrs": [0.0]}
    parts = [held["model"], held["model"]["deep"], held["lrs"]]
    tensors = [held["model"]["w"], held["model"]["deep"]["b"], held["scale"]]
    assert manager(root).restore(0, held) is None
    assert [held["model"], held["model"]["deep"], held["lrs"]] == parts
    assert held["model"] is parts[0]
    assert held["model"]["deep"] is parts[1]
    assert held["lrs"] is parts[2]
    assert [held["epoch"], held["lrs"]] == [3, [0.1, 0.2]]
    assert [each.unique().tolist() for each in tensors] == [[1.0], [-1.0], [2.0]]
    assert held["scale"] is tensors[2]


def test_restores_what_is_asked_for(root: Path) -> None:
    manager(root).save(0, {**state(1.0), "epoch": 3})
    part = {"model": {"deep": {"b": torch.zeros(2)}}}
    manager(root).restore(0, part)
    assert part["model"]["deep"]["b"].tolist() == [-1.0, -1.0]
    assert [*part, *part["model"]] == ["model", "deep"]
    empty: dict[str, Any] = {"model": {}}
    manager(root).restore(0, empty)
    assert empty["model"]["w"].tolist() == [1.0] * 4
    with pytest.raises(IncompatibleState, match="model/other"):
        manager(root).restore(0, {"model": {"other": torch.zeros(2)}})
    with pytest.raises(UsageError, match=r"no snapshot of step 5 to restore. Steps: 0"):
        manager(root).restore(5, part)


def test_an_optimizer_that_was_not_primed(root: Path) -> None:
    def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 3)
        return model, torch.optim.Adam(model.parameters())

    model, optim = training()
    model(torch.ones(3)).sum().backward()
    optim.step()
    manager(root).save(0, {"model": model.state_dict(), "optim": optim.state_dict()})
    for primes in (False, True):
        other, its = training()
        if primes:
            prime_optimizer(its)
        loaded = {"model": other.state_dict(), "optim": its.state_dict()}
        manager(root).restore(0, loaded)
        its.load_state_dict(loaded["optim"])
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(optim.state[mine]["exp_avg"], its.state[theirs]["exp_avg"])


def test_statefuls_in_the_state_dict(root: Path) -> None:
    model, counts = torch.nn.Linear(2, 2), StateDict(n=1)
    manager(root).save(0, {"model": model, "counts": counts})
    other, zero = torch.nn.Linear(2, 2), StateDict(n=0)
    manager(root).restore(0, {"model": other, "counts": zero})
    assert torch.equal(model.weight, other.weight)
    assert zero["n"] == 1


def test_any_program_reads_the_snapshots(root: Path) -> None:
    model = torch.nn.Linear(2, 2)
    manager(root).save(0, {"model": model.state_dict()})
    other = torch.nn.Linear(2, 2)
    Snapshot(root / "step-0000000000.g1").restore({"model": other})
    assert torch.equal(model.weight, other.weight)
    assert OwnManager(root, save=every.steps(1)).all_steps() == [0]


def test_the_oldest_go_by_age_and_not_by_step(root: Path) -> None:
    chkpt_mgr = manager(root, max_to_keep=2)
    for step, left in ((10, [10]), (20, [10, 20]), (30, [20, 30]), (10, [10, 30])):
        assert chkpt_mgr.save(step, state(step))
        assert chkpt_mgr.all_steps() == left
    held = state(0.0)
    chkpt_mgr = manager(root, max_to_keep=2)
    assert chkpt_mgr.save(20, state(20.5))
    assert chkpt_mgr.all_steps() == [10, 20]
    chkpt_mgr.restore(20, held)
    assert weight_of(held) == 20.5


def test_keeps_one(root: Path) -> None:
    chkpt_mgr = manager(root, max_to_keep=1)
    for step in (0, 10, 20):
        chkpt_mgr.save_async(step, state(step))
    chkpt_mgr.join()
    assert chkpt_mgr.all_steps() == [20]


def test_a_step_is_saved_again(root: Path) -> None:
    chkpt_mgr = manager(root)
    for value in (1.0, 2.0):
        assert chkpt_mgr.save(0, state(value))
    assert chkpt_mgr.all_steps() == [0]
    held = state(0.0)
    chkpt_mgr.restore(0, held)
    assert weight_of(held) == 2
    assert chkpt_mgr.save(0, state(3.0))
    chkpt_mgr.restore(0, held)
    assert weight_of(held) == 3.0


def test_each_epoch_counts_from_0(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    chkpt_mgr = manager(root, max_to_keep=3, max_pending_async=2)
    for epoch in range(3):
        for step in range(15):
            assert chkpt_mgr.save_async(step, state(100 * epoch + step)) is (step % 10 == 0)
    chkpt_mgr.join()
    assert chkpt_mgr.all_steps() == [0, 10]
    held = state(0.0)
    chkpt_mgr.restore(10, held)
    assert weight_of(held) == 210.0
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "step 0 comes after step 14" in warnings[0].getMessage()


def test_a_restore_is_a_rewind(root: Path) -> None:
    chkpt_mgr = manager(root)
    for step in (0, 10, 20):
        chkpt_mgr.save(step, state(step))
    chkpt_mgr.restore(10, state(0.0))
    assert chkpt_mgr.save(15, state(15), force=True)
    assert chkpt_mgr.all_steps() == [0, 10, 15]


def test_going_back_takes_no_root_from_a_later_job(root: Path) -> None:
    older, newer = manager(root), manager(root)
    older.save(10, state(10))
    newer.save(20, state(20))
    for step in (0, 30):
        with pytest.raises(RootTaken, match="another manager saves to"):
            older.save(step, state(step))
    newer.save(0, state(0))
    assert newer.all_steps() == [0, 10, 20]


class SlowCommits(Wrapper):
    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op == "put_if_absent" and key == COMMIT_KEY:
            await anyio.sleep(0.3)
        return await call(*args, **kwargs)


def test_going_back_waits_for_commits(root: Path) -> None:
    """Else the new generation would continue an older snapshot."""
    with faulty(SlowCommits):
        chkpt_mgr = CheckpointManager(faulty_url(root), 10, max_pending_async=3)
        for step in (10, 20, 0):
            assert chkpt_mgr.save_async(step, state(step))
        chkpt_mgr.join()
        assert chkpt_mgr.all_steps() == [0, 10, 20]


def test_bad_arguments(root: Path) -> None:
    for settings in (
        {"interval": 0},
        {"max_to_keep": -1},
        {"max_pending_async": 0},
        {"interval": 2.5},
    ):
        with pytest.raises(UsageError, match="must be an integer of at least"):
            manager(root, **settings)
    with pytest.raises(UsageError, match="cannot be used"):
        manager(root).save(0, {3: torch.ones(1)})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="app_state is empty"):
        manager(root).save(0, {})


def test_preemption_must_be_watched(root: Path) -> None:
    assert not manager(root).reached_preemption(3)
    with pytest.raises(UsageError, match="chkpt_on_preemption"):
        manager(root, chkpt_on_preemption=False).reached_preemption(3)
    assert not manager(root, chkpt_on_preemption=False).should_save(3)


@pytest.mark.parametrize(
    "call",
    [
        lambda manager: manager.save("a", state(1)),
        lambda manager: manager.save_async(-1, state(1)),
        lambda manager: manager.save(20, 3),
        lambda manager: manager.save(20, None),
        lambda manager: manager.save(25, 3),
        lambda manager: manager.should_save("a"),
        lambda manager: manager.restore(20, 3),
        lambda manager: manager.restore("a", state(1)),
        lambda manager: CheckpointManager(None, 5),  # type: ignore[arg-type]
        lambda manager: CheckpointManager(3, 5),  # type: ignore[arg-type]
        lambda manager: CheckpointManager("run", 5, chkpt_on_preemption=3),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_usage_errors(tmp_path: Path, call: Callable[[Any], Any]) -> None:
    manager = CheckpointManager(str(tmp_path / "run"), 10)
    assert manager.save(20, state(1))
    with pytest.raises(UsageError):
        call(manager)
    assert manager.all_steps() == [20]
