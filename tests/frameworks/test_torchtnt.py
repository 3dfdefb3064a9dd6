# SPDX-License-Identifier: Apache-2.0
"""TorchTNT's ``TorchSnapshotSaver`` over ``actorsnap.interop.torchsnapshot``."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from actorsnap.sync import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Any:
    if "pkg_resources" not in sys.modules:
        # setuptools has dropped it. TorchTNT asks it for torch's version.
        stub: Any = ModuleType("pkg_resources")
        stub.get_distribution = lambda name: SimpleNamespace(
            version=importlib.metadata.version(name)
        )
        monkeypatch.setitem(sys.modules, "pkg_resources", stub)
    pytest.importorskip("torchtnt")
    from actorsnap.interop.torchtnt import TorchSnapshotSaver

    return TorchSnapshotSaver


def make_unit(seed: int, width: int = 64) -> Any:
    from torchtnt.framework.unit import TrainUnit

    class Unit(TrainUnit[torch.Tensor]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            layers = torch.nn.Linear(8, width), torch.nn.Dropout(), torch.nn.Linear(width, 1)
            self.model = torch.nn.Sequential(*layers)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

        def train_step(self, state: Any, data: torch.Tensor) -> None:
            self.model(data).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    return Unit()


def train(unit: Any, *, epochs: int, callbacks: Any = ()) -> None:
    from torchtnt.framework.train import train

    batches = torch.arange(32.0).view(4, 1, 8)
    train(unit, [*batches], max_epochs=epochs, callbacks=[*callbacks])


def values(unit: Any) -> list[torch.Tensor]:
    return [*unit.model.state_dict().values(), torch.get_rng_state()]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def small_files() -> Iterator[None]:
    """No file may be larger than 100 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_resumes(saver: Any, tmp_path: Path, is_async: bool) -> None:
    straight = make_unit(0)
    train(straight, epochs=5)
    expected = values(straight)

    unit = make_unit(0)
    callback = saver(
        str(tmp_path),
        save_every_n_epochs=1,
        keep_last_n_checkpoints=2,
        async_checkpoint=is_async,
    )
    train(unit, epochs=3, callbacks=[callback])
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == ["epoch_2_train_step_8", "epoch_3_train_step_12"]
    assert all(Snapshot(tmp_path / name).verify("full").ok for name in names)

    other = make_unit(1)
    (tmp_path / "epoch_9_train_step_36").mkdir()  # unfinished
    assert saver.restore_from_latest(str(tmp_path), other)
    assert other.train_progress.num_epochs_completed == 3
    train(other, epochs=5)
    assert all(map(torch.equal, values(other), expected))


def test_a_save_that_fails_is_raised_and_the_old_checkpoint_stays(
    saver: Any, tmp_path: Path
) -> None:
    unit = make_unit(0, width=1 << 14)
    callback = saver(str(tmp_path), save_every_n_epochs=1, keep_last_n_checkpoints=1)
    train(unit, epochs=1, callbacks=[callback])
    with small_files(), pytest.raises(RuntimeError, match="File too large"):
        train(unit, epochs=4, callbacks=[callback])
    whole = [name for name in names_in(tmp_path) if (tmp_path / name / "actorsnap.json").exists()]
    assert whole == ["epoch_1_train_step_4"]
    assert saver.restore_from_latest(str(tmp_path), unit)
    train(unit, epochs=3, callbacks=[callback])  # raised once: the callback goes on
    whole = [name for name in names_in(tmp_path) if (tmp_path / name / "actorsnap.json").exists()]
    assert whole == ["epoch_3_train_step_12"]


def test_the_last_save_is_waited_for_although_it_is_not_the_best(
    saver: Any, tmp_path: Path
) -> None:
    from torchtnt.utils.checkpoint import BestCheckpointConfig

    unit = make_unit(0, width=1 << 14)
    unit.score = 1.0
    best = BestCheckpointConfig("score", "min")
    callback = saver(
        str(tmp_path),
        save_every_n_epochs=2,
        keep_last_n_checkpoints=1,
        best_checkpoint_config=best,
    )
    with small_files(), pytest.raises(RuntimeError, match="File too large"):
        train(unit, epochs=3, callbacks=[callback])


def test_a_step_is_saved_again(saver: Any, tmp_path: Path) -> None:
    def callback() -> Any:
        return saver(str(tmp_path), save_every_n_epochs=1, keep_last_n_checkpoints=2)

    train(make_unit(0), epochs=3, callbacks=[callback()])
    unit = make_unit(1)
    saver.restore(str(tmp_path / "epoch_2_train_step_8"), unit)
    train(unit, epochs=5, callbacks=[callback()])
    assert names_in(tmp_path) == ["epoch_4_train_step_16", "epoch_5_train_step_20"]


def test_a_damaged_checkpoint_is_passed_over(saver: Any, tmp_path: Path) -> None:
    unit = make_unit(0)
    train(unit, epochs=2, callbacks=[saver(str(tmp_path), save_every_n_epochs=1)])
    for path in (tmp_path / "epoch_2_train_step_8").rglob("*"):
        if path.is_file() and path.name != "actorsnap.json":
            os.truncate(path, path.stat().st_size // 2)
    other = tmp_path / "epoch_3_train_step_12"  # of TorchTNT's saver for DCP
    dcp_save({"x": torch.ones(1)}, checkpoint_id=other, no_dist=True)
    assert saver.restore_from_latest(str(tmp_path), unit)
    assert unit.train_progress.num_epochs_completed == 1


def test_a_run_goes_on_from_folders_of_torchsnapshot(saver: Any, tmp_path: Path) -> None:
    stock = pytest.importorskip("torchsnapshot")
    from torchtnt.framework.callbacks import TorchSnapshotSaver
    from torchtnt.framework.callbacks._checkpoint_utils import _prepare_app_state

    unit = make_unit(0)
    train(unit, epochs=2)
    app_state = {**_prepare_app_state(unit), "rng_state": stock.RNGState()}
    stock.Snapshot.take(str(tmp_path / "epoch_2_train_step_8"), app_state)
    other = make_unit(1)
    assert saver.restore_from_latest(str(tmp_path), other)
    assert all(map(torch.equal, values(other), values(unit)))
    callback = saver(str(tmp_path), save_every_n_epochs=1, keep_last_n_checkpoints=2)
    train(other, epochs=4, callbacks=[callback])
    assert names_in(tmp_path) == ["epoch_3_train_step_12", "epoch_4_train_step_16"]
    # Code that still has the old import sees the same.
    assert TorchSnapshotSaver.restore_from_latest(str(tmp_path), other)
    assert other.train_progress.num_epochs_completed == 4
