# SPDX-License-Identifier: Apache-2.0
"""A training process that begins again: its imports, its model, its checkpoint, its first step.

Each function runs in a process of its own (``bench.child.in_child``), which imports only what a
training script would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["prepare", "restart"]

STEP = 7


def trained(gib: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose parameters have no values yet, and its optimizer, without state."""
    import torch

    from bench.state import llama_7b_shapes

    root = torch.nn.Module()
    for name, shape in llama_7b_shapes(int(gib * 2**30)).items():
        *parents, leaf = name.split(".")
        above = root
        for parent in parents:
            if not hasattr(above, parent):
                above.add_module(parent, torch.nn.Module())
            above = above.get_submodule(parent)
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        above.register_parameter(leaf, parameter)
    return root, torch.optim.AdamW(root.parameters(), lr=1e-3)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's step. The gradients are zeros, which only DTensors need memory for."""
    import torch

    for parameter in model.parameters():
        if hasattr(parameter, "to_local"):
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    optimizer.step()
    optimizer.zero_grad()


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Random values everywhere; those of the second moment are not negative."""
    import torch

    step(model, optimizer)  # makes the moments
    block = torch.empty(1 << 22, dtype=torch.bfloat16)
    block.uniform_(0.0, 1.0, generator=torch.Generator().manual_seed(20260104))
    with torch.no_grad():
        for number, (name, tensor) in enumerate(tensors(model, optimizer)):
            if name.endswith(".step"):
                tensor.fill_(STEP)
                continue
            flat, at = tensor.view(-1), 0
            start = number * 65537 % (len(block) // 2)
            while at < len(flat):
                part = block[start : start + len(flat) - at]
                flat[at : at + len(part)] = part
                at += len(part)


def tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[str, torch.Tensor]]:
    """All that is saved: parameters, moments and step counters; of DTensors this rank's part."""

    def local(tensor: Any) -> torch.Tensor:
        found: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
        return found

    return [
        found
        for name, parameter in model.named_parameters()
        for found in (
            (name, local(parameter.detach())),
            *((f"{name}.{key}", local(t)) for key, t in optimizer.state[parameter].items()),
        )
    ]


def checksum(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    import torch
    from crc32c import crc32c

    value = 0
    for _, tensor in tensors(model, optimizer):
        value = crc32c(tensor.view(-1).view(torch.uint8).numpy().data, value)
    return value


def prepare(gib: float, root: str) -> dict[str, Any]:
    """Saves a training with each library; returns its bytes, and its checksum a step later."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

    from actorsnap import Options
    from actorsnap.manager.sync import CheckpointManager, every

    model, optimizer = trained(gib)
    fill(model, optimizer)
    app_state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(
        f"{root}/actorsnap", app_state, save=every.steps(1), options=Options(fsync=False)
    ) as manager:
        manager.save(STEP)
    states = get_state_dict(model, optimizer)
    save_by_dcp(
        dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=f"{root}/dcp/7"
    )
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{root}/state.pt"
    )
    nbytes = sum(tensor.nbytes for _, tensor in tensors(model, optimizer))
    step(model, optimizer)
    return {"nbytes": nbytes, "checksum": checksum(model, optimizer)}


def _actorsnap(root: str) -> Callable[[Any, Any], None]:
    from actorsnap.manager.sync import CheckpointManager, every

    def restore(model: Any, optimizer: Any) -> None:
        app_state = {"model": model, "optimizer": optimizer}
        manager = CheckpointManager(f"{root}/actorsnap", app_state, save=every.steps(1))
        if manager.restore_latest() is None:
            raise RuntimeError("nothing was restored")

    return restore


def _dcp(root: str) -> Callable[[Any, Any], None]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    def restore(model: Any, optimizer: Any) -> None:
        newest = max(Path(root, "dcp").iterdir(), key=lambda path: int(path.name))
        states = get_state_dict(model, optimizer)
        state: dict[str, Any] = dict(zip(("model", "optimizer"), states, strict=True))
        load(state, checkpoint_id=newest)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    return restore


def _torch_save(root: str) -> Callable[[Any, Any], None]:
    import torch

    def restore(model: Any, optimizer: Any) -> None:
        state = torch.load(f"{root}/state.pt", mmap=True, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return restore


WAYS: dict[str, Callable[[str], Callable[[Any, Any], None]]] = {
    "actorsnap": _actorsnap,
    "dcp": _dcp,
    "torch.save": _torch_save,
}


def restart(way: str, gib: float, root: str, begin_s: float) -> dict[str, float]:
    """Seconds of each part, and the checksum after the step; ``begin_s``: when the process was
    started, on the clock that all processes share."""
    import torch

    restore = WAYS[way](root)
    # The first optimizer and its first step import more of torch.
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
    imported_s = time.perf_counter()
    model, optimizer = trained(gib)
    built_s = time.perf_counter()
    restore(model, optimizer)
    restored_s = time.perf_counter()
    step(model, optimizer)
    end_s = time.perf_counter()
    found = checksum(model, optimizer)
    return {
        "total": end_s - begin_s,
        "imports": imported_s - begin_s,
        "build": built_s - imported_s,
        "restore": restored_s - built_s,
        "step": end_s - restored_s,
        "checksum": found,
        "pid": os.getpid(),
    }
