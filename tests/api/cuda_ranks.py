# SPDX-License-Identifier: Apache-2.0
"""What each rank does in ``test_training_on_cuda.py``: ranks that share one GPU, under torchrun.

    torchrun ... -m tests.api.cuda_ranks save|restore FOLDER

NCCL refuses two ranks on one GPU, so with more than one only work without collectives of CUDA
tensors is done: FSDP2 shards a model, and a step is taken with gradients that are known.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actorsnap import ModelState, Options, StateDict, shutdown
from actorsnap.sync import Snapshot

NUM_STEPS = 3


def make(*, shards: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on the GPU, sharded over all ranks or whole, and its optimizer."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(37, 129), nn.LayerNorm(129), nn.Linear(129, 3)).to("cuda")
    if shards:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(NUM_STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number - 0.5)
        optimizer.step()


def expected() -> dict[str, torch.Tensor]:
    """Weights and moments by name, of the whole model."""
    model, optimizer = make(shards=False)
    train(model, optimizer)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        found |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return found


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises unless this rank's part has the bits that training made."""
    wanted = expected()
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    for name, parameter in model.named_parameters():
        local: Any = parameter
        pairs = {name: local, **{f"{name} {k}": v for k, v in optimizer.state[parameter].items()}}
        for key, value in pairs.items():
            whole = wanted[key]
            part = value.to_local() if hasattr(value, "to_local") else value
            if whole.ndim:
                chunks = whole.chunk(num_ranks)
                whole = chunks[rank] if rank < len(chunks) else whole[:0]
                assert part.is_cuda, key
            assert torch.equal(part.detach().cpu(), whole.cpu()), key


def save(path: str) -> None:
    model, optimizer = make(shards=True)
    train(model, optimizer)
    own = torch.full((1000,), float(dist.get_rank()), device="cuda")
    state = {"train": ModelState(model, optimizer), "own": StateDict(own=own)}
    pending = Snapshot.async_take(path, state, options=Options(fsync=False))
    train(model, optimizer)  # what was staged must not change
    pending.wait()


def restore(path: str) -> None:
    model, optimizer = make(shards=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    Snapshot(path).restore({"train": ModelState(model, optimizer)})
    check(model, optimizer)
    if dist.get_world_size() == 1:  # NCCL works: a step as users take it
        model(torch.ones(4, 37, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()


def main() -> None:
    what, path = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        {"save": save, "restore": restore}[what](path)
    finally:
        shutdown()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
