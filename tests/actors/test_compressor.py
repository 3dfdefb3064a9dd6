# SPDX-License-Identifier: Apache-2.0
"""What becomes of a chunk: frames that give its bytes back, or the chunk as it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorsnap.actors.budget import Budget
from actorsnap.actors.compressor import CompressedStore, shrinks
from actorsnap.actors.trace import NULL_RECORDER, Recorder, Wait
from actorsnap.format.checksum import crc32c
from actorsnap.format.compression import FRAME_BYTES, Codec, Unpacker, count_frames
from actorsnap.format.manifest import StoredChunk
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.memory import forget_space, open_memory
from actorsnap.testing import run_blocking_in_thread

T = TypeVar("T")
KEY = "attempt/data/model/0-0.chunks"
ZSTD = Codec(name="zstd", level=1)
NOISE = random.Random(15).randbytes(6 * FRAME_BYTES)


async def stored_of(
    views: Sequence[bytes], itemsizes: Sequence[int], *, start: int = 0
) -> tuple[StoredChunk, bytes]:
    """How a chunk was stored, and as what."""
    storage: Storage = open_memory(
        "memory://compressing", StorageContext(run_blocking=run_blocking_in_thread)
    )
    budget = Budget(1 << 30)
    store = CompressedStore(
        storage, codec=ZSTD, budget=budget, run_blocking=run_blocking_in_thread, num_threads=1
    )
    whole = b"".join(views)
    row = NULL_RECORDER.add_row("uploader")
    chunk = await store.store(
        KEY, start, [memoryview(view) for view in views], itemsizes, crc32c(whole), row
    )
    data = await storage.get(f"{KEY}/{start}")
    forget_space("compressing")
    assert budget.leased_bytes == 0
    assert budget.peak_bytes == len(whole)
    assert (chunk.start, chunk.stop) == (start, start + len(whole))
    assert (chunk.size, chunk.crc32c) == (len(data), crc32c(data))
    return chunk, data


def unpacked(chunk: StoredChunk, data: bytes) -> bytes:
    if not chunk.frames:
        return data
    out = memoryview(bytearray(chunk.stop - chunk.start))
    at = 0
    for number, size in enumerate(chunk.frames):
        into = out[number * FRAME_BYTES : (number + 1) * FRAME_BYTES]
        Unpacker(KEY).unpack(memoryview(data)[at : at + size], into)
        at += size
    return bytes(out)


def widths(chunk: StoredChunk, data: bytes) -> list[int]:
    found, at = [], 0
    for size in chunk.frames:
        found.append(data[at])
        at += size
    return found


_sizes = st.sampled_from(
    [0, 1, 3, 1000, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 5, 3 * FRAME_BYTES]
)


@given(
    st.lists(st.tuples(_sizes, st.sampled_from([1, 2, 3, 4, 8, 16]), st.booleans()), max_size=6),
    st.integers(0, 1 << 40),
)
@settings(max_examples=30, deadline=None)
def test_every_chunk_comes_back(leaves: list[tuple[int, int, bool]], start: int) -> None:
    views = [b"head"] + [
        NOISE[:size] if is_noise else (NOISE[:7] * (size // 7 + 1))[:size]
        for size, _, is_noise in leaves
    ]
    itemsizes = [1] + [itemsize for _, itemsize, _ in leaves]
    chunk, data = anyio.run(stored, views, itemsizes, start)
    assert unpacked(chunk, data) == b"".join(views)
    assert len(chunk.frames) in (0, count_frames(chunk.stop - chunk.start))


async def stored(
    views: Sequence[bytes], itemsizes: Sequence[int], start: int
) -> tuple[StoredChunk, bytes]:
    return await stored_of(views, itemsizes, start=start)


async def test_most_bytes_of_a_frame_say_how_it_is_shuffled() -> None:
    leaves = [(4096, 1), (600_000, 4), (FRAME_BYTES, 2), (FRAME_BYTES // 2, 2), (99, 8), (9, 3)]
    views = [bytes(size) for size, _ in leaves]
    chunk, data = await stored_of(views, [itemsize for _, itemsize in leaves])
    assert widths(chunk, data) == [4, 2, 2]


@pytest.mark.parametrize(("num_zeros", "is_compressed"), [(20_000, False), (60_000, True)])
async def test_a_little_is_not_worth_it(num_zeros: int, is_compressed: bool) -> None:
    """A chunk that shrinks by less than a 32nd is stored as it is."""
    chunk, data = await stored_of([bytes(num_zeros) + NOISE[: FRAME_BYTES - num_zeros]], [1])
    assert bool(chunk.frames) == is_compressed
    assert (len(data) == FRAME_BYTES) != is_compressed


async def test_four_frames_are_tried() -> None:
    for num_noisy, is_compressed in ((3, True), (4, False)):
        zeros = bytes(6 * FRAME_BYTES - num_noisy * FRAME_BYTES)
        chunk, data = await stored_of([NOISE[: num_noisy * FRAME_BYTES] + zeros], [1])
        assert bool(chunk.frames) == is_compressed
        assert widths(chunk, data) == ([0, 0, 0, 1, 1, 1] if is_compressed else [])


async def test_who_waits_for_a_thread_is_told_from_who_waits_for_memory() -> None:
    """One thread compresses one chunk a second; of memory there is enough."""
    now_s = 0

    async def run_for_a_second(fn: Callable[..., T], /, *args: Any) -> T:
        nonlocal now_s
        await anyio.lowlevel.checkpoint()
        result = fn(*args)
        now_s += 1
        return result

    context = StorageContext(run_blocking=run_blocking_in_thread)
    store = CompressedStore(
        open_memory("memory://compressing", context),
        codec=ZSTD,
        budget=Budget(1 << 30),
        run_blocking=run_for_a_second,
        num_threads=1,
    )
    recorder = Recorder(lambda: now_s)

    async def save(start: int) -> None:
        with recorder.row("uploader") as row:
            await store.store(KEY, start, [memoryview(NOISE[:1000])], [1], 0, row)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(save, number * 1000)
    forget_space("compressing")
    spent_s = {
        kind: sum(row.totals[kind].spent_ns for row in recorder.rows)
        for kind in (Wait.THREAD, Wait.MEMORY)
    }
    assert spent_s == {Wait.THREAD: 1 + 2 + 3, Wait.MEMORY: 0}


@pytest.mark.parametrize(
    ("done", "packed", "num_frames", "expected"),
    [
        (1, 1, 1, True),  # too early to decide
        (3, 3, 3, True),
        (4, 4, 4, False),
        (4, 3, 4, True),
        (16, 15.5, 16, True),
        (16, 15.6, 16, False),
        (16, 16.1, 16, False),  # larger than the chunk
    ],
)
def test_a_chunk_that_does_not_shrink(
    done: float, packed: float, num_frames: int, expected: bool
) -> None:
    sizes = int(done * FRAME_BYTES), int(packed * FRAME_BYTES)
    assert shrinks(*sizes, num_frames, of_bytes=16 * FRAME_BYTES) is expected


def test_a_chunk_of_one_frame_is_tried_at_its_end() -> None:
    assert not shrinks(FRAME_BYTES, FRAME_BYTES, 1, of_bytes=FRAME_BYTES)
    assert shrinks(FRAME_BYTES, FRAME_BYTES // 2, 1, of_bytes=FRAME_BYTES)
