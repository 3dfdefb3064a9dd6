"""TorchTNT's ``TorchSnapshotSaver`` over ``actorsnap.interop.torchsnapshot``."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

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


def make_unit(seed: int) -> Any:
    from torchtnt.framework.unit import TrainUnit

    class Unit(TrainUnit[torch.Tensor]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            layers = torch.nn.Linear(8, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1)
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
