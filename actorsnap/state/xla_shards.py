# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch/XLA's SPMD mode, as boxes.

There a program is one for the devices of all processes: a tensor on the XLA device is global, and
each device has a shard or a copy of it. Parameters look like plain tensors. A process reads and
writes its shards as copies in host memory. torch_xla is not imported: without it there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from actorsnap.format.geometry import Box


class XlaPiece(NamedTuple):
    """A box on a device of this process.

    Attributes:
        tensor: A copy of its elements in host memory.
        is_stored: Whether this process stores it: several may have it.
    """

    box: Box
    tensor: torch.Tensor
    is_stored: bool


class XlaPieces(NamedTuple):
    """The parts of a tensor that a process has.

    Attributes:
        ranks: All processes.
        write_back: Copies all pieces to the devices. Call it once, with each piece written.
    """

    pieces: list[XlaPiece]
    ranks: tuple[int, ...]
    write_back: Callable[[], None]


def is_loaded() -> bool:
    """Whether ``is_global`` may be true."""
    return "torch_xla.distributed.spmd" in sys.modules


def is_global(value: object) -> bool:
    """Whether a tensor belongs to a program in SPMD mode."""
    spmd = sys.modules.get("torch_xla.distributed.spmd")
    if spmd is None or not isinstance(value, torch.Tensor):
        return False
    return isinstance(value, spmd.XLAShardedTensor) or (
        value.device.type == "xla" and sys.modules["torch_xla.runtime"].is_spmd()
    )


def find_pieces(tensor: Any) -> XlaPieces:
    """Copies a tensor for which ``is_global``; waits for the device."""
    spmd: Any = sys.modules["torch_xla.distributed.spmd"]
    runtime: Any = sys.modules["torch_xla.runtime"]
    ranks = tuple(range(runtime.process_count()))
    sharded = spmd.wrap_if_sharded(tensor)
    is_wrapped = isinstance(sharded, spmd.XLAShardedTensor)
    if not is_wrapped or sharded.sharding_type == spmd.ShardingType.REPLICATED:
        held = sharded.global_tensor if is_wrapped else tensor
        whole = held.detach().cpu()
        piece = XlaPiece(Box.whole(tuple(tensor.shape)), whole, runtime.process_index() == 0)
        return XlaPieces([piece], ranks, partial(_copy, held, whole))
    shape = tuple(tensor.shape)
    shards = sharded.local_shards
    first: dict[Box, Any] = {}
    stored: set[Box] = set()
    for shard in shards:
        box = Box(
            tuple([each.start for each in shard.indices]),
            tuple([each.stop - each.start for each in shard.indices]),
        )
        if shard.replica_id == 0:  # of the whole program: one device has it
            stored.add(box)
        # Further copies of the process are loaded from the same memory.
        shard.data = first.setdefault(box, shard).data
    pieces = [
        XlaPiece(box, shard.data[tuple([slice(0, size) for size in box.sizes])], box in stored)
        for box, shard in first.items()
        if not box.is_empty or 0 in shape  # else a device has nothing but padding
    ]
    return XlaPieces(pieces, ranks, partial(sharded.load_local_shards_, shards))


def _copy(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(whole)
