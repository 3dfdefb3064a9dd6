# SPDX-License-Identifier: Apache-2.0
"""The reads of a restore: which stored bytes go to which memory.

Those that fill boxes are kept as plans, because one process may read a million of them. They become
objects when they are iterated over; in batches, few of them exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import torch

from actorsnap.format.manifest import Stored
from actorsnap.planning.restore import BoxPlan
from actorsnap.planning.shards import Shards
from actorsnap.state import devices
from actorsnap.state.devices import ReturnLane
from actorsnap.state.distributed import LocalPiece, Ranks
from actorsnap.state.sources import ByteSink, MemoryPart, memory_at
from actorsnap.state.tensors import (
    BoxSink,
    DeviceSink,
    flat_bytes,
    has_conj_or_neg_bit,
    is_addressable,
)

MAX_PLANNED_READS = 1 << 16
"""Reads of a batch: they take about 40 MiB until they are done."""


class Wanted(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Stored bytes, and their sink.

    Attributes:
        stored: Whole checksum blocks of a leaf.
        holders: Ranks likely to want these bytes, ascending. None means every rank that restores;
            empty means this rank alone.
    """

    stored: Stored
    sink: ByteSink
    holders: Ranks | None

    @property
    def nbytes(self) -> int:
        return self.stored.stop - self.stored.start


class ReturnLanes:
    """A return lane per device. Call it in the thread of the caller, whose streams they use."""

    def __init__(self) -> None:
        self._found: dict[torch.device, ReturnLane] = {}

    def of(self, device: torch.device) -> ReturnLane:
        lane = self._found.get(device)
        if lane is None:
            lane = self._found[device] = ReturnLane(devices.calls, device)
        return lane


class BoxReads:
    """The reads that fill the boxes of pieces with those of a stored tensor.

    Args:
        plan: Plan of ``shards``, and the boxes of the pieces.
        default: The holders of pieces without.
        lanes: For pieces on devices.
    """

    __slots__ = ("_memories", "_default", "_pieces", "plan", "shards")

    def __init__(
        self,
        plan: BoxPlan,
        shards: Shards,
        pieces: Sequence[LocalPiece],
        default: Ranks | None,
        lanes: ReturnLanes | None = None,
    ) -> None:
        self.plan = plan
        self.shards = shards
        self._pieces = pieces
        self._default = default
        found = ReturnLanes() if lanes is None else lanes
        self._memories = [_memory_of(each.tensor, found) for each in pieces]

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    def __len__(self) -> int:
        return len(self.plan.reads)

    def __getitem__(self, number: int) -> Wanted:
        read, shards, pieces = self.plan.reads[number], self.shards, self._pieces
        nbytes = read.stop - read.start
        sink: ByteSink
        memory = None if read.at is None else self._memories[read.wanted[0]]
        if read.at is not None and isinstance(memory, memoryview):
            sink = MemoryPart(memory, read.at, nbytes)
        elif read.at is not None and isinstance(memory, tuple):
            sink = DeviceSink(*memory, read.at, nbytes)
        else:
            targets = [(pieces[at].box, pieces[at].tensor) for at in read.wanted]
            sink = BoxSink(shards.cut.boxes[read.stored], read.start, nbytes, targets)
        default = self._default
        holders = {
            default if pieces[at].holders is None else pieces[at].holders for at in read.wanted
        }
        stored = slice_stored(shards.data(read.stored), read.start, read.stop)
        return Wanted(stored, sink, holders.pop() if len(holders) == 1 else ())

    def __iter__(self) -> Iterator[Wanted]:
        return map(self.__getitem__, range(len(self)))


def _memory_of(
    tensor: torch.Tensor, lanes: ReturnLanes
) -> memoryview | tuple[torch.Tensor, ReturnLane] | None:
    """Returns the memory of a tensor if it is in C order."""
    if is_addressable(tensor):
        return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)
    is_in_order = tensor.is_contiguous() and not has_conj_or_neg_bit(tensor)
    if is_in_order and devices.calls.has(tensor):
        return flat_bytes(tensor), lanes.of(tensor.device)
    return None


_Part: TypeAlias = Wanted | BoxReads


class Reads:
    """Iterates over ``Wanted``. Ranges may repeat."""

    def __init__(self, parts: Iterable[_Part] = ()) -> None:
        self.parts: list[_Part] = list(parts)

    def append(self, part: _Part) -> None:
        self.parts.append(part)

    @property
    def nbytes(self) -> int:
        return sum([part.nbytes for part in self.parts])

    def __len__(self) -> int:
        return sum([1 if isinstance(part, Wanted) else len(part) for part in self.parts])

    def __iter__(self) -> Iterator[Wanted]:
        for part in self.parts:
            if isinstance(part, Wanted):
                yield part
            else:
                yield from part

    def batches(self) -> Iterator[list[Wanted]]:
        """Yields all reads; if they are several batches, by object and offset."""
        count, max_reads = len(self), MAX_PLANNED_READS
        if count <= max_reads:
            yield list(self)
            return
        lengths = [1 if isinstance(part, Wanted) else len(part) for part in self.parts]
        of_part = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        firsts = np.cumsum([0, *lengths[:-1]])
        objects, starts = np.empty(count, np.uint32), np.empty(count, np.uint64)
        for part, first, length in zip(self.parts, firsts, lengths, strict=True):
            here = slice(first, first + length)
            if isinstance(part, Wanted):
                objects[here], starts[here] = part.stored.object, part.stored.start
            elif length:
                stored = np.frombuffer(part.plan.stored, np.uint32)
                objects[here] = np.frombuffer(part.shards.columns.objects, np.uint32)[stored]
                starts[here] = np.frombuffer(part.shards.columns.starts, np.uint64)[stored]
                starts[here] += np.frombuffer(part.plan.starts, np.uint64)
        order = np.lexsort((starts, objects))
        del objects, starts
        for at in range(0, count, max_reads):
            batch = order[at : at + max_reads]
            numbers = of_part[batch]
            within = batch - firsts[numbers]
            found: list[Wanted] = []
            for number, place in zip(numbers.tolist(), within.tolist(), strict=True):
                part = self.parts[number]
                found.append(part if isinstance(part, Wanted) else part[place])
            yield found


def slice_stored(data: Stored, start: int, stop: int) -> Stored:
    """Both offsets are block boundaries."""
    if stop - start == data.stop - data.start:
        return data
    block_bytes = data.block_bytes
    blocks = data.crc32c[start // block_bytes : -(-stop // block_bytes)]
    return Stored(data.object, data.start + start, data.start + stop, blocks)
