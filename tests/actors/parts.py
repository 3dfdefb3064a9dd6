# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie on some ranks each, without a process group: for simulated worlds."""

from __future__ import annotations

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

__all__ = ["part_of"]


class _Part(ShardedTensor):
    """What one rank has of a tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init__(self, *_: object, **__: object) -> None:
        """Asks no other rank."""

    def __del__(self) -> None:
        """Torch does not know of it."""


def part_of(whole: torch.Tensor, mesh: tuple[int, ...], rank: int) -> ShardedTensor:
    """Returns ``rank``'s rows of ``whole``, which is divided evenly over the ranks of ``mesh``."""
    num_rows = len(whole) // len(mesh)
    spec = EnumerableShardingSpec(
        [
            ShardMetadata([i * num_rows, 0], [num_rows, whole.shape[1]], f"rank:{owner}/cpu")
            for i, owner in enumerate(mesh)
        ]
    )
    part = _Part(
        spec,
        *whole.shape,
        dtype=whole.dtype,
        layout=whole.layout,
        requires_grad=False,
        pin_memory=False,
    )
    own = spec.shards[mesh.index(rank)]
    rows = whole[own.shard_offsets[0] :][:num_rows].clone()
    part._local_shards.append(Shard(rows, own))
    return part
