# SPDX-License-Identifier: Apache-2.0
"""Reads in batches are the same reads, each once, in the order of the storage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.checksum import MIN_BLOCK_BYTES
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import Stored
from actorsnap.planning.restore import BoxPlanner
from actorsnap.planning.shards import Shard, Shards
from actorsnap.state.distributed import LocalPiece
from actorsnap.state.restore import reads
from actorsnap.state.restore.reads import BoxReads, Reads, Wanted
from actorsnap.state.sources import HostMemory, MemoryPart

BLOCK = MIN_BLOCK_BYTES
WIDTH = BLOCK // 4


def place(want: Wanted) -> tuple[int, int, int, int]:
    sink = want.sink
    assert isinstance(sink, HostMemory | MemoryPart)
    address = np.frombuffer(sink.view(0, want.nbytes), np.uint8).ctypes.data
    return want.stored.object, want.stored.start, want.stored.stop, address


@given(st.data(), st.integers(1, 9))
def test_batches(data: st.DataObject, max_reads: int) -> None:
    found, planner = Reads(), BoxPlanner()
    tensors = []
    for _ in range(data.draw(st.integers(0, 5))):
        if data.draw(st.booleans()):
            tensors.append(torch.zeros(8))
            at = data.draw(st.integers(0, 2**40))
            stored = Stored(data.draw(st.integers(0, 3)), at, at + 32, (1,))
            found.append(Wanted(stored, HostMemory(tensors[-1].data_ptr(), 32, None), None))
            continue
        # Rows of two checksum blocks; of some, only the second one is wanted.
        order = data.draw(st.permutations(range(4)))
        shards = []
        for row in order:
            at = data.draw(st.integers(0, 2**40))
            stored = Stored(data.draw(st.integers(0, 3)), at, at + 2 * BLOCK, (row, row))
            shards.append(Shard(Box((row, 0), (1, 2 * WIDTH)), stored))
        whole = Shards.of(shards)
        first, left = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([0, WIDTH]))
        box = Box((first, left), (4 - first, 2 * WIDTH - left))
        tensors.append(torch.zeros(box.sizes))
        plan = planner.plan("w", whole, (box,), 4)
        found.append(BoxReads(plan, whole, [LocalPiece(box, tensors[-1], None)], ()))
    expected = [place(want) for want in found]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "MAX_PLANNED_READS", max_reads)
        batches = [[place(want) for want in batch] for batch in found.batches()]
    got = [each for batch in batches for each in batch]
    assert len(got) == len(found) == len(expected)
    assert sorted(got) == sorted(expected)
    assert found.nbytes == sum(stop - start for _, start, stop, _ in got)
    assert all(len(batch) <= max_reads for batch in batches)
    assert all(len(batch) == max_reads for batch in batches[:-1])
    if len(batches) > 1:
        assert [each[:2] for each in got] == sorted(each[:2] for each in got)
