# SPDX-License-Identifier: Apache-2.0
"""Checks that a training resumes exactly, and shows what happens if it forgets something.

    python examples/exact_resume.py

The training has everything that jobs forget: a shuffled data loader, dropout (random generators), a
learning rate scheduler, a gradient scaler, an average of the weights, a counter. ``check_resume``
runs it once without interruption and once restored, and compares batches, losses and all state bit
for bit. Then it does so without one key of the app state after the other, and prints what it found.

The data loader is ``torchdata.StatefulDataLoader`` if torchdata is installed, else ``Shuffled``,
which is the least that a loader needs. Exit code 0 if all is found, 1 if not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from actorsnap import RNGState, StateDict, Stateful
from actorsnap.testing import check_resume

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None

SAMPLES = torch.linspace(-1, 1, 320).reshape(40, 8)
BATCH_SIZE = 8


class Shuffled:
    """Shuffled batches of one epoch. Its state: the order, the position, and the generator."""

    def __init__(self, samples: Tensor) -> None:
        self.samples = samples
        self.generator = torch.Generator().manual_seed(7)
        self.order = torch.empty(0, dtype=torch.int64)
        self.position = 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        if self.position >= len(self.order):
            self.order = torch.randperm(len(self.samples), generator=self.generator)
            self.position = 0
        while self.position < len(self.order):
            rows = self.order[self.position : self.position + BATCH_SIZE]
            self.position += len(rows)
            yield [self.samples[rows]]

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "position": self.position,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]
        self.generator.set_state(state["generator"])


class Batches:
    """The batches of a loader, epoch after epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch: Iterator[list[Tensor]] = iter(())

    def take(self) -> Tensor:
        for (batch,) in self.epoch:
            return batch
        self.epoch = iter(self.loader)
        (batch,) = next(self.epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        # Here, not in the next step: a loader of torch then draws a random number, and restore()
        # sets the generators of RNGState last.
        self.epoch = iter(self.loader)


class Training:
    """Everything that a run is made of; all of it is in ``app_state``, but for ``forgotten``."""

    def __init__(self, forgotten: str = "") -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        self.batches = Batches(make_loader())
        self.progress = StateDict(steps=0)
        app_state: dict[str, Stateful] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": self.ema,
            "batches": self.batches,
            "progress": self.progress,
            "rng": RNGState(),  # the dropout's
        }
        self.app_state = {key: app_state[key] for key in app_state if key != forgotten}

    def step(self) -> dict[str, Any]:
        batch = self.batches.take()
        loss = (self.model(batch) - batch.sum(1, keepdim=True).sin()).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.progress["steps"] += 1
        return {"batch": batch, "loss": loss.detach()}


def make_loader() -> Any:
    """A loader without a generator of its own: its seeds come from torch's global one."""
    if StatefulDataLoader is None:
        return Shuffled(SAMPLES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(TensorDataset(SAMPLES), batch_size=BATCH_SIZE, shuffle=True)


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    loader = type(make_loader()).__name__
    check_resume(Training, steps=7, more=9)  # an epoch has 5 steps
    print(f"with {loader}: resumes exactly")
    is_found = True
    for key in Training().app_state:
        try:
            check_resume(lambda key=key: Training(forgotten=key), steps=7, more=9)  # type: ignore[misc]
        except AssertionError as error:
            print(f"\nwithout {key!r}: {error}")
        else:
            print(f"\nwithout {key!r}: NOT FOUND")
            is_found = False
    return 0 if is_found else 1


if __name__ == "__main__":
    sys.exit(main())
