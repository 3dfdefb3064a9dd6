# SPDX-License-Identifier: Apache-2.0
"""Trainings with Hugging Face's Accelerate, each in processes of its own.

    python tests/frameworks/accelerations.py NAME FOLDER

prints the result of one of the functions below as JSON, on the last line of rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, set_seed
from accelerate.utils.fsdp_utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from torch import nn
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from actorsnap import StateDict
from actorsnap.errors import ActorSnapError
from actorsnap.interop.accelerate import (
    app_state,
    async_save_state,
    load_state,
    replicated,
    save_state,
)
from actorsnap.interop.dcp import installed
from actorsnap.manager import every
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot


class Training:
    """Two models with an optimizer each, a scheduler, a scaler, and a counter of one's own."""

    def __init__(self, *, seed: int = 7, stateful: bool = False) -> None:
        set_seed(seed)
        torch.set_num_threads(1)
        config = DataLoaderConfiguration(
            use_seedable_sampler=True, use_stateful_dataloader=stateful
        )
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=float(2 * seed))
        body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        models = [body, nn.Linear(16, 1)]
        for n in range(8):
            models[1].register_buffer(f"mark{n}", torch.zeros(1 << 16))
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
        data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
        loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator())
        prepare = self.accelerator.prepare
        self.models = [prepare(model) for model in models]
        self.optimizers = [prepare(optimizer) for optimizer in optimizers]
        self.scheduler = prepare(scheduler)
        self.loader = prepare(loader)
        self.progress = StateDict(epoch=0, batches=0)
        self.accelerator.register_for_checkpointing(self.progress)

    def run(self, num_steps: int, *, skips: bool = True) -> list[float]:
        """Trains from where it is; returns the losses of this rank."""
        losses: list[float] = []
        while len(losses) < num_steps:
            self.loader.set_epoch(self.progress["epoch"])
            batches = self.loader
            if skips:
                done = self.progress["batches"]
                batches = self.accelerator.skip_first_batches(self.loader, done)
            for (batch,) in batches:
                losses.append(self.step(batch))
                self.progress["batches"] += 1
                if len(losses) == num_steps:
                    return losses
            self.progress.update(epoch=self.progress["epoch"] + 1, batches=0)
        return losses

    def step(self, batch: Any) -> float:
        body, head = self.models
        loss = (head(body(batch)) - batch.sum(1, keepdim=True)).square().mean()
        self.accelerator.backward(loss)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.item())

    def outcome(self) -> dict[str, Any]:
        crc = 0
        for model in self.models:
            for tensor in model.state_dict().values():
                crc = zlib.crc32(tensor.numpy().tobytes(), crc)
        return {
            "weights": crc,
            "lr": self.scheduler.get_last_lr(),
            "scale": self.accelerator.scaler.get_scale(),
            "progress": dict(self.progress),
            "iteration": self.loader.iteration,
        }


def straight(folder: Path) -> Any:
    training = Training()
    losses = training.run(16)
    return training.outcome() | {"losses": losses[10:]}


def saved(folder: Path) -> Any:
    """Saves in the middle of an epoch, twice, and dies."""
    training = Training()
    training.run(5)
    save_state(training.accelerator, folder / "ckpt", step=5)
    training.run(5)
    # Those of rank 0 count.
    head = training.accelerator.unwrap_model(training.models[1])
    for buffer in head.buffers():
        buffer.fill_(training.accelerator.process_index)
    pending = async_save_state(training.accelerator, folder / "ckpt", step=10)
    training.run(1)  # changes all that was saved
    pending.wait()
    training.accelerator.wait_for_everyone()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(folder: Path) -> Any:
    training = Training(seed=9)
    load_state(training.accelerator, folder / "ckpt")
    losses = training.run(6)
    return training.outcome() | {"losses": losses}


def loaded(folder: Path) -> Any:
    """By another number of processes."""
    training = Training(seed=9)
    load_state(training.accelerator, folder / "ckpt")
    return training.outcome()


def from_accelerate(folder: Path) -> Any:
    """From a folder of ``accelerator.save_state``, and from none."""
    training = Training()
    training.run(6)
    training.accelerator.save_state(str(folder / "ckpt"))
    other = Training(seed=9)
    load_state(other.accelerator, folder / "ckpt")
    try:
        load_state(other.accelerator, folder / "none")
    except ActorSnapError as error:
        return [training.outcome(), other.outcome(), type(error).__name__]
    return None


def managed(folder: Path) -> Any:
    """The app state in a ``CheckpointManager``."""
    found = []
    for seed in (7, 9):
        training = Training(seed=seed)
        state = app_state(training.accelerator)
        once = replicated(training.accelerator)
        with CheckpointManager(folder, state, save=every.steps(1), replicated=once) as manager:
            if manager.restore_latest() is None:
                training.run(4)
                manager.maybe_save(4)
        found.append(training.outcome())
    return found


def stateful(folder: Path) -> Any:
    """A stateful data loader goes on in the middle of an epoch, without skipping."""

    def rows(training: Training) -> list[Any]:
        return [batch[0].tolist() for batch in training.loader]

    training = Training(stateful=True)
    training.run(5, skips=False)
    save_state(training.accelerator, folder / "ckpt")
    other = Training(stateful=True, seed=9)
    load_state(other.accelerator, folder / "ckpt")
    return [rows(Training(stateful=True))[5:], rows(other)]


def refused(folder: Path) -> Any:
    training = Training()
    training.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    found = []
    for kind in (None, DistributedType.FSDP, DistributedType.DEEPSPEED):
        if kind is not None:
            training.accelerator.state.distributed_type = kind
        try:
            save_state(training.accelerator, folder / "ckpt")
        except ActorSnapError as error:
            found.append(str(error))
    return found + [path.name for path in folder.iterdir()]


def fsdp(folder: Path) -> Any:
    """Accelerate's own calls for FSDP2, with a stub where its plugin needs a GPU."""
    training = Training()
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=None,
        optim_state_dict_config=None,
    )
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        made.append((model, optimizer))
    (model, optimizer), (other, other_optimizer) = made
    accelerator = training.accelerator
    with installed():
        save_fsdp_model(plugin, accelerator, model, str(folder))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
        load_fsdp_model(plugin, accelerator, other, str(folder))
        load_fsdp_optimizer(plugin, accelerator, other_optimizer, other, str(folder))
    pairs: list[tuple[Any, Any]] = []
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        pairs.append((left, right))
        ours, theirs = optimizer.state[left], other_optimizer.state[right]
        pairs += [(ours[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq")]
    same = [torch.equal(left.full_tensor(), right.full_tensor()) for left, right in pairs]
    return {
        "same": same,
        "verified": [Snapshot(path).verify("full").ok for path in sorted(folder.iterdir())],
        "names": sorted(path.name for path in folder.iterdir()),
    }


if __name__ == "__main__":
    result = globals()[sys.argv[1]](Path(sys.argv[2]))
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
