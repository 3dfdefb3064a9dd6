# SPDX-License-Identifier: Apache-2.0
"""Fetchers: what a cancellation reaches, and what lies between wanted bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest

from actorsnap.actors.budget import Budget
from actorsnap.actors.fetcher import FetcherPool, RangeRequest
from actorsnap.format.checksum import MAX_BLOCK_BYTES, block_checksums
from actorsnap.format.manifest import ObjectRecord, RankManifest, Stored, StoredChunk
from actorsnap.planning.index import Index
from actorsnap.state.sources import HostMemory
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.storage.wrapper import Wrapper
from actorsnap.testing import run_blocking_in_thread

pytestmark = pytest.mark.anyio
NUM_BLOCKS = 32


class Held(Wrapper):
    """Every read waits until ``go``."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.num_reads = 0
        self.has_begun, self.go = threading.Event(), threading.Event()

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        self.num_reads += 1
        self.has_begun.set()
        assert self.go.wait(60)
        super().read_into_blocking(key, offset, batches)


async def test_a_cancelled_fetch_begins_no_more_reads(tmp_path: Path) -> None:
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    storage = Held(open_storage(tmp_path, context))
    size = NUM_BLOCKS * MAX_BLOCK_BYTES
    await storage.put("object", [memoryview(bytes(size))])
    target = np.ones(size, np.uint8)
    sink = HostMemory(target.ctypes.data, size, target)
    record = ObjectRecord(key="object", size=size, header_bytes=0, header_crc32c=0)
    manifest = RankManifest(attempt="a", rank=0, objects=(record,))
    pool = FetcherPool(
        storage,
        run_blocking=run_blocking_in_thread,
        budget=Budget(1 << 20),
        verify=False,
        chunk_bytes=2 * MAX_BLOCK_BYTES,
        max_gap_bytes=0,
        num_fetchers=2,
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.fetch, [RangeRequest(manifest, Stored(0, 0, size, ()), sink)])
        await anyio.to_thread.run_sync(storage.has_begun.wait, 20)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.05)
        storage.go.set()
    assert storage.num_reads <= 2
    await storage.aclose()


class Counted(Wrapper):
    """Counts the calls that each read is made of."""

    num_calls = 0

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        def counted() -> Iterator[Sequence[memoryview]]:
            for views in batches:
                self.num_calls += 1
                yield views

        super().read_into_blocking(key, offset, counted())


@pytest.mark.parametrize(("verify", "num_calls"), [(True, NUM_BLOCKS), (False, NUM_BLOCKS // 2)])
async def test_only_bytes_to_verify_are_read_block_by_block(
    verify: bool, num_calls: int, tmp_path: Path
) -> None:
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    storage = Counted(open_storage(tmp_path, context))
    size = NUM_BLOCKS * MAX_BLOCK_BYTES
    data = np.arange(size // 8).view(np.uint8)
    await storage.put("object", [data.data])
    target = np.ones(size, np.uint8)
    sink = HostMemory(target.ctypes.data, size, target)
    record = ObjectRecord(key="object", size=size, header_bytes=0, header_crc32c=0)
    manifest = RankManifest(attempt="a", rank=0, objects=(record,))
    pool = FetcherPool(
        storage,
        run_blocking=run_blocking_in_thread,
        budget=Budget(1 << 20),
        verify=verify,
        chunk_bytes=2 * MAX_BLOCK_BYTES,
        max_gap_bytes=0,
        num_fetchers=2,
    )
    sums = block_checksums(data.data, MAX_BLOCK_BYTES)
    await pool.fetch([RangeRequest(manifest, Stored(0, 0, size, sums), sink)])
    assert np.array_equal(target, data)
    assert storage.num_calls == num_calls
    await storage.aclose()


async def test_what_another_rank_compressed_may_be_a_gap(tmp_path: Path) -> None:
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    storage = open_storage(tmp_path, context)
    key = "a/data/model/0-0.chunks"
    records = []
    for rank, start in enumerate((0, 10, 20)):
        await storage.put(f"{key}/{start}", [memoryview(bytes([rank + 1]) * 10)])
        chunks = (StoredChunk(start, start + 10, 0),)
        records.append(
            ObjectRecord(key=key, size=30, header_bytes=0, header_crc32c=0, chunks=chunks)
        )
    index = Index(
        attempt="a", world_size=3, objects=tuple(records), entries=(), held_by_other_ranks={}
    )
    target = np.zeros(20, np.uint8)
    pool = FetcherPool(
        storage,
        run_blocking=run_blocking_in_thread,
        budget=Budget(1 << 20),
        verify=False,
        chunk_bytes=2 * MAX_BLOCK_BYTES,
        max_gap_bytes=10,
        num_fetchers=2,
    )
    await pool.fetch(
        [
            RangeRequest(index, Stored(0, 0, 10, ()), HostMemory(target.ctypes.data, 10, target)),
            RangeRequest(
                index, Stored(2, 20, 30, ()), HostMemory(target.ctypes.data + 10, 10, target)
            ),
        ]
    )
    assert target.tolist() == [1] * 10 + [3] * 10
    await storage.aclose()
