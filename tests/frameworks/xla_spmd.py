# SPDX-License-Identifier: Apache-2.0
"""Saves and restores with torch_xla itself: ``python -m tests.frameworks.xla_spmd``.

Needs an environment of its own, with torch_xla 2.9 and torch 2.9. Four devices of its CPU runtime.
"""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from typing import Any

import torch

from actorsnap import StateDict
from actorsnap.interop.xla import CheckpointManager, prime_optimizer
from actorsnap.sync import Snapshot

CUTS = [("x", "y"), ("y", None), (None, "x"), (None, None)]


def run(folder: str) -> None:
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
    xla: Any = import_module("torch_xla")
    spmd: Any = import_module("torch_xla.distributed.spmd")
    import_module("torch_xla.runtime").use_spmd()
    mesh = spmd.Mesh(list(range(4)), (2, 2), ("x", "y"))

    def make(seed: int, cut: tuple[str | None, str | None]) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).to("xla")
        spmd.mark_sharding(model[0].weight, mesh, cut)  # 5 rows: the last shard is padded
        spmd.mark_sharding(model[1].bias, mesh, (None,))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6).to("xla")).sum().backward()
        optimizer.step()
        xla.sync()

    def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
        xla.sync()
        states = optimizer.state_dict()["state"].values()
        found = [*model.state_dict().values(), *[x for state in states for x in state.values()]]
        return [torch.as_tensor(x).detach().cpu().clone() for x in found]

    model, optimizer = make(0, ("x", "y"))
    step(model, optimizer)
    wanted = values(model, optimizer)
    app_state = {
        "model": model,
        "optimizer": optimizer,
        "wrapped": StateDict(weight=spmd.wrap_if_sharded(model[0].weight)),
    }
    Snapshot.take(f"{folder}/take", app_state)
    pending = Snapshot.async_take(f"{folder}/async", app_state)
    step(model, optimizer)
    pending.wait()
    for name in ("take", "async"):
        for cut in CUTS:
            other, its = make(1, cut)
            prime_optimizer(its)
            marked = xla._XLAC._get_xla_sharding_spec(other[0].weight)
            Snapshot(f"{folder}/{name}").restore({"model": other, "optimizer": its})
            for found, value in zip(values(other, its), wanted, strict=True):
                assert torch.equal(found, value), (name, cut)
            assert xla._XLAC._get_xla_sharding_spec(other[0].weight) == marked, (name, cut)
            step(other, its)
            print(f"{name} to {cut}: equal, still sharded as {marked}")
    wrapped = StateDict(weight=spmd.wrap_if_sharded(make(2, ("y", "x"))[0][0].weight))
    Snapshot(f"{folder}/take").restore({"wrapped": wrapped})
    assert torch.equal(wrapped["weight"].global_tensor.detach().cpu(), wanted[0])
    manager = CheckpointManager(f"{folder}/run", 1, chkpt_on_preemption=False)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    assert manager.save(0, state)
    wanted = values(model, optimizer)
    step(model, optimizer)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    manager.restore(0, state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    for found, value in zip(values(model, optimizer), wanted, strict=True):
        assert torch.equal(found, value)
    print("CheckpointManager: equal")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(folder)
