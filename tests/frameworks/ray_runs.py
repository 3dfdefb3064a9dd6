# SPDX-License-Identifier: Apache-2.0
"""Programs of ``test_ray.py``: ``python ray_runs.py NAME``, in an empty folder."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer

from actorsnap import StateDict, UsageError
from actorsnap.sync import Snapshot


def _starved(config: dict[str, Any]) -> None:
    """On each worker: the second save cannot write its data."""
    from actorsnap.interop.ray import ActorsnapReporter

    reporter = ActorsnapReporter(replicated=["state/step"])
    state = StateDict(step=0, weights=torch.zeros(1 << 20))
    assert reporter.restore({"state": state}) is None
    with pytest.raises(UsageError, match="state/object"):
        reporter.report({}, {"state": StateDict(object=object())}, step=1)
    for step in (1, 2):
        if step == 2:
            reporter.wait()
            ray.train.get_all_reported_checkpoints()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        state["step"] = step
        state["weights"] += 1
        reporter.report({"step": step}, {"state": state}, step=step)
    # Ray's error from another thread ends this, unless the second one was reported.
    ray.train.get_all_reported_checkpoints()
    Path(config["folder"], "reported").touch()


def failures() -> None:
    """A failed save ends the run; the checkpoint before it is the latest, and whole."""
    folder = os.getcwd()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        _starved,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="run", storage_path=folder),
    )
    with pytest.raises(ray.train.TrainingFailedError, match="File too large"):
        trainer.fit()
    ray.shutdown()
    assert not os.path.exists("reported")
    (step,) = [path for path in Path("run").iterdir() if path.is_dir()]
    assert step.name == "step-00000001"
    assert Snapshot(step).verify("full").ok
    assert Snapshot(step).read_object("state/step") == 1
    assert Snapshot(step).read_object("1/state/weights").unique().tolist() == [1]


def _recounts(config: dict[str, Any]) -> None:
    """On each worker: begins, after a failure, with the step that it restored."""
    from actorsnap.interop.ray import ActorsnapReporter

    reporter = ActorsnapReporter(replicated=["**"])
    state = StateDict(weights=torch.zeros(8))
    restored = reporter.restore({"state": state})
    for step in range(restored or 1, 7):
        state["weights"] += 1
        reporter.report({"step": step}, {"state": state}, step=step)
        if step == 3 and restored is None:
            ray.train.get_all_reported_checkpoints()
            raise RuntimeError("as any function of a user may")


def again() -> None:
    """A step that is reported twice has two checkpoints, which Ray deletes one by one."""
    folder = os.getcwd()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        _recounts,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    latest = trainer.fit().checkpoint
    ray.shutdown()
    kept = sorted(path.name for path in Path("run").iterdir() if path.is_dir())
    assert kept == ["step-00000005", "step-00000006"], kept
    assert latest is not None
    assert Snapshot(latest.path).read_object("state/weights").unique().tolist() == [7]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(f"{sys.argv[1]}: done", flush=True)
