# SPDX-License-Identifier: Apache-2.0
"""App states of real ranks, one function per way to be parallel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from actorsnap import StateDict

__all__ = ["MODULES", "STATES", "full"]

MODULES = (
    "torch._dynamo",  # by an optimizer's first step
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""What these take long to import, for a ``Director``."""

DIM = 64
HIDDEN = 4 * DIM + 8
"""Divides by 2, 3 and 4, as tensor parallel layers have to; 37, below, by none."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.down(torch.relu(self.up(x)))) * self.get_buffer("scale").sum()


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(37, DIM), Block(), Block(), nn.Linear(DIM, 37, bias=False))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> float:
    torch.manual_seed(seed)
    tokens = torch.randint(37, (4, 8))
    loss = module(tokens).float().logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _trained(module: nn.Module, extra: dict[str, Any]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    step(module, optimizer)
    return {"model": module, "optim": optimizer, "extra": StateDict(extra)}


def _own() -> dict[str, Any]:
    rank = dist.get_rank()
    return {"rank": rank, "same": 7, "draws": torch.full((5,), float(rank))}


def ddp() -> dict[str, Any]:
    return _trained(nn.parallel.DistributedDataParallel(model()), _own())


def zero() -> dict[str, Any]:
    """Each rank steps some of the parameters, of the same shapes as other ranks' ones."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False))
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    model(torch.randn(4, DIM)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer.optim, "extra": StateDict(_own())}


def fsdp2() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    module = model()
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    return _trained(module, _own())


def two_meshes() -> dict[str, Any]:
    """FSDP2 of each half of the ranks, which hold the same."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("half", "dp"))
    module = model()
    for layer in module:
        fully_shard(layer, mesh=mesh["dp"])
    return _trained(module, _own())


def hsdp() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    module = model()
    fully_shard(module, mesh=mesh)
    return _trained(module, _own())


def stages() -> dict[str, Any]:
    """Two pipeline stages, each HSDP, whose names are alike; and loads that differ."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (2, 2, dist.get_world_size() // 4)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "copies", "shards"))
    torch.manual_seed(dist.get_rank() // (dist.get_world_size() // 2))
    module = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, DIM))
    fully_shard(module, mesh=mesh["copies", "shards"])
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    own = StateDict({"more": torch.randn(1 << 20 if dist.get_rank() == 0 else 8)})
    return {"model": module, "optim": optimizer, "own": own}


def halves() -> dict[str, Any]:
    """A model that the job divides by hand: two groups of DistributedDataParallel, whose names
    are alike, with buffers that differ on each rank."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(mesh.get_local_rank("tp"))
    module = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048))
    ddp = nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(ddp.parameters())
    ddp(torch.randn(4, 512) + dist.get_rank()).square().mean().backward()
    optimizer.step()
    own = StateDict({"more": torch.randn(1 << 20 if dist.get_rank() == 0 else 8)})
    return {"model": ddp, "optim": optimizer, "own": own}


def tensor_parallel() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in (module[1], module[2]):
        parallelize_module(layer, mesh, plan)
    return _trained(module, _own())


def fsdp2_and_tp() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    module = model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in (module[1], module[2]):
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return {"model": module, "extra": StateDict(_own())}


def experts() -> dict[str, Any]:
    """Each column of the mesh shards experts of its own, all under one name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "ep"))
    shared, own = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    torch.manual_seed(mesh.get_local_rank("ep"))
    nn.init.normal_(own.weight)
    torch.manual_seed(5)
    nn.init.normal_(shared.weight)
    nn.init.zeros_(shared.bias)
    nn.init.zeros_(own.bias)
    for layer in (shared, own):
        fully_shard(layer, mesh=mesh["dp"])
    return {"own": nn.ModuleDict({"w": own}), "shared": nn.ModuleDict({"w": shared})}


def tied() -> dict[str, Any]:
    """Two pipeline stages, each FSDP2, which have layers of their own and one embedding."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    stage, whole = mesh.get_local_rank("pp"), model()
    kept = {"embedding": whole[0], f"layer{stage}": whole[1 + stage]}
    for layer in kept.values():
        fully_shard(layer, mesh=mesh["dp"])
    return {"model": nn.ModuleDict(kept)}


def sharded_tensor() -> dict[str, Any]:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    world = dist.get_world_size()
    placements: Any = [f"rank:{rank}/cpu" for rank in range(world)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = sharded_tensor.zeros(ChunkShardingSpec(0, placements), 37, 5)
    for shard in made.local_shards():
        first = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(
            torch.arange(shard.tensor.numel()).view(shard.tensor.shape) + 5.0 * first
        )
    return {"table": StateDict({"weight": made, **_own()})}


def pipeline() -> dict[str, Any]:
    """Ranks hold different layers, under their names in the whole model."""
    whole = model()
    own = {name: layer for name, layer in whole.named_children()}
    world, rank = dist.get_world_size(), dist.get_rank()
    kept = {name: layer for name, layer in own.items() if int(name) % world == rank}
    return {"stage": nn.ModuleDict({f"layer{name}": layer for name, layer in kept.items()})}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    made.__name__: made
    for made in (
        ddp,
        zero,
        fsdp2,
        two_meshes,
        hsdp,
        stages,
        halves,
        tensor_parallel,
        fsdp2_and_tp,
        experts,
        tied,
        sharded_tensor,
        pipeline,
    )
}


def full(value: Any) -> Any:
    """A state dict with whole tensors in it. Collective."""
    if isinstance(value, dict):
        return {str(key): full(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(number): full(item) for number, item in enumerate(value)}
    if hasattr(value, "full_tensor"):
        return value.full_tensor().detach().clone()
    if type(value).__name__ == "ShardedTensor":
        out = torch.zeros(value.size()) if dist.get_rank() == 0 else None
        value.gather(0, out)
        holder = [out]
        dist.broadcast_object_list(holder)
        return holder[0]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
