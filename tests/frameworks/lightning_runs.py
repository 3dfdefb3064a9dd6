# SPDX-License-Identifier: Apache-2.0
"""Programs of ``test_lightning.py``: ``python lightning_runs.py NAME``, in an empty folder."""

from __future__ import annotations

import os
import resource
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actorsnap import NotASnapshot, Options, SnapshotAborted, UsageError
from actorsnap.sync import Snapshot

if sys.argv[1:] == ["pytorch_lightning"]:
    import pytorch_lightning as L
    from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
else:
    import lightning as L
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from actorsnap.interop.lightning import ActorsnapCheckpointIO, latest, load_from_checkpoint

LAST = "checkpoints/last.ckpt"


class Model(L.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 32, extra: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        inputs = torch.randn(16, 8, generator=generator)
        loss: Tensor = (self.layers(inputs) - inputs.sin()).square().mean()
        # Smaller towards step 4, larger afterwards: which checkpoints are the best is known.
        self.log("score", abs(self.global_step - 4.0))
        return loss

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("crc", float(crc(self)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Do(Callback):  # type: ignore[misc]
    """Calls ``what`` when a step begins, after the checkpoint of the step before."""

    def __init__(self, step: int, what: Callable[[], object]) -> None:
        self.step = step
        self.what = what

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.what()


def crc(model: nn.Module) -> int:
    """CRC-32 of all weights and buffers, in 24 bits, which a float32 holds."""
    found = 0
    for tensor in model.state_dict().values():
        found = zlib.crc32(tensor.detach().numpy().tobytes(), found)
    return found & 0xFFFFFF


def checkpoints(**arguments: Any) -> ModelCheckpoint:
    defaults = {"filename": "{step}", "every_n_train_steps": 1, "save_last": True}
    return ModelCheckpoint("checkpoints", **defaults | arguments)


def make_trainer(checkpoint_io: Any, num_steps: int, *callbacks: Any, **arguments: Any) -> Any:
    return L.Trainer(
        max_steps=num_steps,
        plugins=[] if checkpoint_io is None else [checkpoint_io],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "devices": 1} | arguments,
    )


def fit(
    checkpoint_io: Any,
    num_steps: int,
    *callbacks: Any,
    resume: str | None = None,
    model: Any = None,
    **arguments: Any,
) -> Any:
    """Returns the trained model."""
    torch.manual_seed(7)
    model = model or Model()
    trainer = make_trainer(checkpoint_io, num_steps, *callbacks, **arguments)
    trainer.fit(model, loader(), ckpt_path=resume)
    return model


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.arange(4))  # type: ignore[arg-type]


def names() -> list[str]:
    return sorted(os.listdir("checkpoints"))


def top_k() -> None:
    """The best three and the last are kept, whole; the best one is tested."""
    best = checkpoints(monitor="score", save_top_k=3)
    torch.manual_seed(7)
    model = Model()
    stopping = EarlyStopping("score", patience=100, check_on_train_epoch_end=True)
    trainer = make_trainer(ActorsnapCheckpointIO(), 9, best, stopping)
    trainer.fit(model, loader())
    assert names() == ["last.ckpt", "step=4.ckpt", "step=5.ckpt", "step=6.ckpt"], names()
    for name in names():
        assert Snapshot(f"checkpoints/{name}").verify("full").ok
    assert os.path.basename(best.best_model_path) == "step=5.ckpt"  # logged before the step
    assert Snapshot(LAST).step == 9
    assert latest("checkpoints") == LAST
    whole = crc(model)
    (tested,) = trainer.test(model, loader(), ckpt_path="best", verbose=False)
    loaded = load_from_checkpoint(Model, best.best_model_path, width=32)
    assert tested["crc"] == crc(loaded) != whole
    assert loaded.hparams.width == 32
    assert crc(load_from_checkpoint(Model, LAST)) == whole
    Snapshot(LAST).restore({"model": model}, rename={"state_dict": "model"})


def resume() -> None:
    """From each step, with callbacks: as if never interrupted."""
    whole = crc(fit(None, 9, ModelCheckpoint("stock", save_top_k=0)))
    fit(ActorsnapCheckpointIO(), 8, checkpoints(save_top_k=-1))
    for step in range(1, 9):
        path = f"checkpoints/step={step}.ckpt"
        assert crc(fit(ActorsnapCheckpointIO(), 9, checkpoints(), resume=path)) == whole, step
    assert crc(fit(ActorsnapCheckpointIO(), 9, checkpoints(), resume="last")) == whole


def stock_files() -> None:
    """A job goes on from files of Lightning's own, under the same names."""
    fit(None, 4, checkpoints(monitor="score", save_top_k=2))
    assert all(os.path.isfile(f"checkpoints/{name}") for name in names())
    assert names() == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"], names()
    assert latest("checkpoints") == LAST
    best = checkpoints(monitor="score", save_top_k=2)
    model = fit(ActorsnapCheckpointIO(), 9, best, resume=LAST)
    whole = fit(None, 9, ModelCheckpoint("stock", save_top_k=0))
    assert crc(model) == crc(whole)
    assert names() == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"], names()
    assert os.path.isfile("checkpoints/step=4.ckpt")
    assert Snapshot("checkpoints/step=5.ckpt").step == 5
    assert Snapshot(LAST).step == 9
    assert crc(load_from_checkpoint(Model, "checkpoints/step=4.ckpt")) != crc(model)


def links() -> None:
    fit(ActorsnapCheckpointIO(), 3, checkpoints(save_last="link", save_top_k=-1))
    assert os.readlink(LAST) == "step=3.ckpt"
    model = fit(ActorsnapCheckpointIO(), 5, checkpoints(save_top_k=-1), resume=LAST)
    assert not os.path.islink(LAST)
    assert Snapshot("checkpoints/step=3.ckpt").step == 3
    assert crc(load_from_checkpoint(Model, LAST)) == crc(model)


def failures() -> None:
    """A save that fails in the background ends the training; what was committed stays."""

    def full(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def big() -> Any:
        return Model(4096)

    def starve() -> None:
        checkpoint_io.wait()
        full(1000)

    saves = {"save_last": None, "save_top_k": 1}
    checkpoint_io = ActorsnapCheckpointIO()
    with pytest.raises(SnapshotAborted, match=r"step=4\.ckpt"):  # at the next save
        fit(checkpoint_io, 6, Do(3, starve), checkpoints(**saves), model=big())
    full(resource.RLIM_INFINITY)
    assert latest("checkpoints") == "checkpoints/step=3.ckpt", names()

    best = latest("checkpoints")
    with pytest.raises(SnapshotAborted, match=r"step=4"):  # at the end
        fit(checkpoint_io, 4, Do(3, starve), checkpoints(**saves), model=big(), resume=best)
    full(resource.RLIM_INFINITY)
    assert latest("checkpoints") == best, names()


class Config:
    """No plain value."""

    def __init__(self) -> None:
        self.depth = 3


def objects() -> None:
    """Hyperparameters that are no plain values are refused by name, unless pickle is allowed."""
    with pytest.raises(UsageError, match="hyper_parameters/extra"):
        fit(ActorsnapCheckpointIO(), 1, checkpoints(), model=Model(extra=Config()))
    allowed = ActorsnapCheckpointIO(options=Options(allow_pickle=True))
    fit(allowed, 1, checkpoints(), model=Model(extra=Config()))
    with pytest.raises(UsageError, match="hyper_parameters/extra"):
        load_from_checkpoint(Model, LAST)
    loaded = load_from_checkpoint(Model, LAST, options=Options(allow_pickle=True))
    assert loaded.hparams.extra.depth == 3
    # A file of Lightning's own with the object.
    fit(None, 2, ModelCheckpoint("stock", save_last=True), model=Model(extra=Config()))
    with pytest.raises(UsageError, match="Config"):
        fit(ActorsnapCheckpointIO(), 3, checkpoints(), resume="stock/last.ckpt")
    fit(allowed, 3, checkpoints(), model=Model(extra=Config()), resume="stock/last.ckpt")


def requeued() -> None:
    """What SLURM's handler saves is committed when the call returns."""
    checkpoint_io = ActorsnapCheckpointIO()
    is_committed = []
    for name in ("other.ckpt", "hpc_ckpt_1.ckpt"):
        checkpoint_io.save_checkpoint({"epoch": 1}, name)
        is_committed.append(checkpoint_io.pending is None)
    assert is_committed == [False, True]
    assert Snapshot("hpc_ckpt_1.ckpt").read_object("epoch") == 1
    with pytest.raises(NotASnapshot):
        checkpoint_io.load_checkpoint("absent.ckpt")


def fabric() -> None:
    checkpoint_io = ActorsnapCheckpointIO()
    loop = L.Fabric(accelerator="cpu", devices=1, plugins=[checkpoint_io])
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, wrapped_optimizer = loop.setup(model, optimizer)
    loop.save("state.ckpt", {"model": wrapped, "optimizer": wrapped_optimizer, "step": 3})
    saved = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    state: dict[str, Any] = {"model": wrapped, "optimizer": wrapped_optimizer, "step": 0}
    loop.load("state.ckpt", state)
    assert state["step"] == 3
    assert torch.equal(model.weight, saved)


def pytorch_lightning() -> None:
    fit(ActorsnapCheckpointIO(), 3, checkpoints())
    assert Snapshot(LAST).step == 3
    assert "lightning" not in sys.modules


def model_parallel() -> None:
    """Lightning's own calls of DCP, on two ranks, over ``install()``."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from actorsnap.interop import dcp

    class Sharded(Model):
        def configure_model(self) -> None:
            for part in (*self.layers, self.layers):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def train(num_steps: int, resume: str | None = None) -> int:
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
        saves = checkpoints(save_top_k=-1, save_last=None)
        torch.manual_seed(7)
        model = fit(
            None, num_steps, saves, resume=resume, model=Sharded(), strategy=strategy, devices=2
        )
        whole = [
            (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().numpy()
            for each in model.parameters()
        ]
        return zlib.crc32(b"".join([each.tobytes() for each in whole]))

    with dcp.installed():
        straight = train(6)
        assert Snapshot("checkpoints/step=3.ckpt").verify("full").ok
        files = os.listdir("checkpoints/step=3.ckpt")
        assert {"meta.pt", "actorsnap.json"}.issubset(files), files
        assert not any(name.endswith((".distcp", ".metadata")) for name in files), files
        assert train(6, resume="checkpoints/step=3.ckpt") == straight


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    print(f"{sys.argv[1]}: done", flush=True)
