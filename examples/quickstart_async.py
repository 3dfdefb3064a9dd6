# SPDX-License-Identifier: Apache-2.0
"""Snapshots from a trainer that is a coroutine."""

from __future__ import annotations

import asyncio
import sys
import tempfile

import torch
from torch import nn

from actorsnap import PendingSnapshot, RNGState, Snapshot, StateDict


async def main(folder: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    progress = StateDict(step=0)
    app_state = {
        "model": model,
        "optimizer": optimizer,
        "progress": progress,
        "rng": RNGState(),
    }

    pending: PendingSnapshot | None = None
    for step in range(1, 31):
        loss = model(torch.randn(64, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress["step"] = step
        if step % 10 == 0:
            if pending is not None:
                await pending.wait()
            # Returns when the tensors may change again; storing goes on behind the training.
            pending = await Snapshot.async_take(f"{folder}/step-{step}", app_state)

    assert pending is not None
    snapshot = await pending.wait()
    print("saved:", snapshot.path.rsplit("/", 1)[-1])

    progress["step"] = -1
    await snapshot.restore(app_state)
    print("restored: step", progress["step"])

    weight = await snapshot.read_object("model/0.weight")
    print("one object:", tuple(weight.shape), torch.equal(weight, model.state_dict()["0.weight"]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(main(name))
