"""From stored boxes of a tensor into the boxes that this process holds.

Decides which sink takes which stored bytes: the target's own memory where elements lie there as
they were stored, else one that spreads them. It must not know entries' kinds, the app state or
how bytes are fetched. What is read at all is planned by ``planning.restore.plan_boxes``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from actorsnap.format.geometry import Box
from actorsnap.format.manifest import Stored
from actorsnap.planning.index import Shard
from actorsnap.planning.restore import BoxRead, plan_boxes
from actorsnap.state.distributed import Ranks
from actorsnap.state.memory import ByteSink, MemorySink
from actorsnap.state.tensors import BoxSink, is_addressable

__all__ = ["BoxTarget", "Wanted", "box_reads", "cut", "plan_shards"]


class Wanted(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Stored bytes, and where they go.

    Attributes:
        stored: Of the index; whole checksum blocks of a leaf.
        sink: Takes all of them.
        holders: Who is likely to want just these bytes. None: every rank that restores. Some
            ranks, rising: those of a mesh that hold the same box. Empty: this rank only.
    """

    stored: Stored
    sink: ByteSink
    holders: Ranks | None


class BoxTarget(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A box to fill.

    Attributes:
        box: In global index space.
        tensor: Its elements, of the box's sizes, on any device. They must not share memory.
        holders: See ``Wanted``.
    """

    box: Box
    tensor: torch.Tensor
    holders: Ranks | None


def plan_shards(
    path: str, shards: Sequence[Shard], boxes: Sequence[Box], itemsize: int
) -> list[BoxRead]:
    """Returns what to read of the shards to fill boxes. Takes no memory for them.

    Args:
        path: Of the tensor, for errors.
        shards: Of the tensor.
        boxes: Boxes that do not overlap.
        itemsize: Bytes of an element.

    Raises:
        FormatError: The shards do not have all elements, overlap, or are disputed.
    """
    return plan_boxes(
        path,
        [shard.box for shard in shards],
        boxes,
        itemsize=itemsize,
        block_bytes=[shard.data.block_bytes for shard in shards],
        disputed={number for number, shard in enumerate(shards) if shard.is_disputed},
    )


def box_reads(
    planned: Sequence[BoxRead], shards: Sequence[Shard], targets: Sequence[BoxTarget]
) -> list[Wanted]:
    """Returns what ``plan_shards`` has planned, with the memory that it goes to.

    Args:
        planned: The plan for the boxes of ``targets``.
        shards: Those that were planned for.
        targets: In the order of the plan's boxes.
    """
    wanted: list[Wanted] = []
    for read in planned:
        shard = shards[read.stored]
        found = [targets[number] for number in read.wanted]
        nbytes = read.stop - read.start
        tensor = found[0].tensor
        sink: ByteSink
        if read.at is not None and is_addressable(tensor):
            sink = MemorySink(tensor.data_ptr() + read.at, nbytes, tensor)
        else:
            sink = BoxSink(shard.box, read.start, nbytes, [(t.box, t.tensor) for t in found])
        holders = {target.holders for target in found}
        wanted.append(
            Wanted(
                cut(shard.data, read.start, read.stop),
                sink,
                holders.pop() if len(holders) == 1 else (),
            )
        )
    return wanted


def cut(data: Stored, start: int, stop: int) -> Stored:
    """Returns those blocks of stored bytes that begin at ``start`` and end at ``stop``."""
    if stop - start == data.stop - data.start:
        return data
    block_bytes = data.block_bytes
    blocks = data.crc32c[start // block_bytes : -(-stop // block_bytes)]
    return Stored(data.object, data.start + start, data.start + stop, blocks)
