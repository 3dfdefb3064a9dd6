# SPDX-License-Identifier: Apache-2.0
"""Programs of ``test_ignite.py``: ``python ignite_runs.py NAME``, in an empty folder."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn

from actorsnap import NotASnapshot, Options, SnapshotAborted, UsageError
from actorsnap.interop.ignite import ActorsnapSaver
from actorsnap.sync import Snapshot

FOLDER = "checkpoints"


def objects() -> dict[str, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(held: dict[str, Any], num_epochs: int, checkpoint: Any, event: Any = None) -> None:
    """Two steps per epoch; a checkpoint after each, or at ``event``."""

    def step(engine: Any, batch: int) -> float:
        generator = torch.Generator().manual_seed(engine.state.iteration)
        inputs = torch.randn(16, 8, generator=generator)
        loss = (held["model"](inputs) - inputs.sin()).square().mean()
        held["optimizer"].zero_grad()
        loss.backward()
        held["optimizer"].step()
        engine.state.metrics["score"] = 9.0 - abs(engine.state.iteration - 5.0)
        return float(loss.detach())

    trainer = Engine(step)
    if checkpoint is not None:
        trainer.add_event_handler(event or Events.ITERATION_COMPLETED, checkpoint)
    trainer.run(range(2), max_epochs=num_epochs)


def state_of(held: dict[str, Any]) -> str:
    return repr([value.state_dict() for value in held.values()])


def names() -> list[str]:
    return sorted(os.listdir(FOLDER))


def n_saved() -> None:
    """The best two are kept, whole, and can be loaded."""
    held = objects()
    with ActorsnapSaver(FOLDER) as saver:
        best = Checkpoint(held, saver, n_saved=2, score_name="score", filename_prefix="best")
        newest = Checkpoint(held, saver, n_saved=1)
        train(held, 4, lambda engine: (best(engine), newest(engine)))
    assert saver.pending is None
    assert [name for name in names() if name.startswith("best")] == [
        "best_checkpoint_score=8.0000.pt",
        "best_checkpoint_score=9.0000.pt",
    ], names()
    assert [name for name in names() if not name.startswith("best")] == ["checkpoint_8.pt"]
    for name in names():
        assert Snapshot(f"{FOLDER}/{name}").verify("full").ok
    assert Snapshot(f"{FOLDER}/checkpoint_8.pt").step == 8
    assert saver.latest() == "checkpoint_8.pt"
    again = objects()
    Checkpoint.load_objects(again, saver.load("checkpoint_8.pt"))
    assert state_of(again) == state_of(held)
    Snapshot(f"{FOLDER}/checkpoint_8.pt").restore(again)


def one_object() -> None:
    """``Checkpoint`` passes its state without a name."""
    held = objects()
    model = {"net": held["model"]}
    with ActorsnapSaver(FOLDER) as saver:
        train(held, 1, Checkpoint(model, saver))
    again = {"net": objects()["model"]}
    Checkpoint.load_objects(again, saver.load("net_2.pt"))
    assert state_of(again) == state_of(model)
    Snapshot(f"{FOLDER}/net_2.pt").restore({"model": objects()["model"]})
    optimizer = {"optimizer": held["optimizer"]}
    with saver:
        train(held, 1, Checkpoint(optimizer, saver))
    fresh = {"optimizer": objects()["optimizer"]}
    Checkpoint.load_objects(fresh, saver.load("optimizer_2.pt"))
    assert state_of(fresh) == state_of(optimizer)


def stock_files() -> None:
    """What ``DiskSaver`` wrote is loaded, and replaced under its name."""
    held = objects()
    train(held, 2, Checkpoint(held, DiskSaver(FOLDER, create_dir=True), n_saved=1))
    assert os.path.isfile(f"{FOLDER}/checkpoint_4.pt")
    saver = ActorsnapSaver(FOLDER)
    newest = saver.latest()
    assert newest == "checkpoint_4.pt"
    again = objects()
    Checkpoint.load_objects(again, saver.load(newest))
    assert state_of(again) == state_of(held)
    with saver:
        train(again, 2, Checkpoint(again, saver, n_saved=1))
    assert names() == ["checkpoint_4.pt"]
    assert os.path.isdir(f"{FOLDER}/checkpoint_4.pt")
    assert Snapshot(f"{FOLDER}/checkpoint_4.pt").verify("full").ok


def failures() -> None:
    """A failed save is raised by the next one, or at the end; the one before stays."""

    def full(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def starve(engine: Any) -> None:
        checkpoint(engine)
        if engine.state.iteration == 3:
            saver.wait()
            full(1000)

    held = objects()
    saver = ActorsnapSaver(FOLDER)
    checkpoint = Checkpoint(held, saver, n_saved=1)
    with pytest.raises(SnapshotAborted, match=r"checkpoint_4\.pt"):
        train(held, 4, starve)
    full(resource.RLIM_INFINITY)
    assert saver.latest() == "checkpoint_3.pt", names()
    with pytest.raises(UsageError, match="config"):
        saver({"model": {}, "config": Options}, "other.pt")
    with pytest.raises(NotASnapshot):
        saver.load("absent.pt")


def _rank(local_rank: int) -> None:
    held = objects()
    with ActorsnapSaver(FOLDER, save_on_rank=1) as saver:
        train(held, 2, Checkpoint(held, saver, n_saved=1))
        assert (saver.pending is not None) == (idist.get_rank() == 1)
    idist.barrier()
    again = objects()
    Checkpoint.load_objects(again, saver.load("checkpoint_4.pt"))
    assert state_of(again) == state_of(held)


def two_ranks() -> None:
    """One rank saves; the others do not wait for it, nor it for them."""
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(_rank)
    assert Snapshot(f"{FOLDER}/checkpoint_4.pt").verify("full").ok


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    print(f"{sys.argv[1]}: done", flush=True)
