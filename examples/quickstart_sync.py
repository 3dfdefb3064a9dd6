# SPDX-License-Identifier: Apache-2.0
"""Snapshots from an ordinary script."""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

from actorsnap import RNGState, StateDict
from actorsnap.sync import Snapshot


def main(folder: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    progress = StateDict(step=0)
    app_state = {
        "model": model,
        "optimizer": optimizer,
        "progress": progress,
        "rng": RNGState(),
    }

    def train_step() -> None:
        loss = model(torch.randn(64, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress["step"] += 1

    train_step()
    snapshot = Snapshot.take(f"{folder}/step-1", app_state)
    print("saved:", snapshot.path.rsplit("/", 1)[-1])

    pending = Snapshot.async_take(f"{folder}/step-1-pending", app_state)
    while not pending.done():
        train_step()
    snapshot = pending.wait()
    print("saved, while training went on:", snapshot.path.rsplit("/", 1)[-1])

    snapshot.restore(app_state)
    print("restored: step", progress["step"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as name:
            main(name)
