# SPDX-License-Identifier: Apache-2.0
"""Compresses staged chunks and stores each as a separate object (``docs/format.md``).

Threads compress a chunk in short turns, into leased memory. A chunk that does not shrink is stored
uncompressed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import anyio
import anyio.lowlevel

from actorsnap.actors.budget import Budget, Lease, Purpose
from actorsnap.actors.trace import Row, Wait, Work
from actorsnap.format.checksum import crc32c
from actorsnap.format.compression import FRAME_BYTES, Codec, pack_frame, width_for
from actorsnap.format.layout import chunk_key
from actorsnap.format.manifest import StoredChunk
from actorsnap.storage.base import RunBlocking, Storage

_TURN_S = 0.05
"""After these a thread yields to other chunks."""

_MIN_SAVED = 1 / 32
"""Smallest saving that is worth decompressing, as a part of the chunk."""

_TRIAL_FRAMES = 4
"""Frames after which a chunk that does not shrink is stored uncompressed."""


@dataclass(eq=False, repr=False)
class CompressedStore:
    """Stores chunks.

    Args:
        num_threads: Chunks compressed at once. With more, all would be ready late.
        max_bytes: Bytes of chunks compressed or sent at once; None: limited by the budget.
    """

    storage: Storage
    _: KW_ONLY
    codec: Codec
    budget: Budget
    run_blocking: RunBlocking
    num_threads: int
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        self._threads = anyio.CapacityLimiter(self.num_threads)
        self._room = Budget(self.max_bytes or sys.maxsize, allocate=lambda _: memoryview(b""))

    async def store(
        self,
        key: str,
        start: int,
        views: Sequence[memoryview],
        itemsizes: Sequence[int],
        checksum: int,
        row: Row,
    ) -> StoredChunk:
        """Stores the chunk of the object ``key`` that begins at byte ``start``.


        Cancellation: A turn that a thread has begun ends first.
        """
        nbytes = sum(map(len, views))
        with await self._room.lease(nbytes):
            row.note(Wait.MEMORY)
            lease, packing = await self._compress(key, start, views, itemsizes, row)
            with lease:
                if packing.frames:
                    stored = [lease.view[: packing.size]]
                    await self.storage.put(chunk_key(key, start), stored)
                    checksum = packing.checksum
        if not packing.frames:
            await self.storage.put(chunk_key(key, start), views)
        row.note(Work.STORE, key, start, packing.size or nbytes)
        return StoredChunk(start, start + nbytes, checksum, tuple(packing.frames))

    async def _compress(
        self,
        key: str,
        start: int,
        views: Sequence[memoryview],
        itemsizes: Sequence[int],
        row: Row,
    ) -> tuple[Lease, _Packing]:
        async with self._threads:
            row.note(Wait.THREAD)
            lease = await self.budget.lease(sum(map(len, views)), Purpose.COMPRESSING)
            row.note(Wait.MEMORY)
            try:
                packing = _Packing(views, itemsizes, self.codec, lease.view)

                def compress_turn() -> bool:
                    row.note(Wait.THREAD)
                    done = packing.done
                    is_left = packing.compress_turn()
                    row.note(Work.COMPRESS, key, start + done, packing.done - done)
                    return is_left

                while await self.run_blocking(compress_turn):
                    await anyio.lowlevel.checkpoint_if_cancelled()
            except BaseException:
                lease.release()
                raise
        return lease, packing


def shrinks(done_bytes: int, packed_bytes: int, num_frames: int, *, of_bytes: int) -> bool:
    """Returns whether a chunk of ``of_bytes`` may be stored compressed, by its first frames.

    Args:
        done_bytes: Uncompressed size of these frames.
        packed_bytes: Their stored size.
    """
    if packed_bytes > of_bytes:
        return False
    is_tried = num_frames >= _TRIAL_FRAMES or done_bytes == of_bytes
    return not is_tried or packed_bytes <= done_bytes * (1 - _MIN_SAVED)


class _Packing:
    """A chunk during compression.

    Attributes:
        done: Processed bytes of the chunk.
        frames: Stored sizes; empty in the end if the chunk does not shrink.
        checksum: CRC32C of the frames.
    """

    def __init__(
        self,
        views: Sequence[memoryview],
        itemsizes: Sequence[int],
        codec: Codec,
        memory: memoryview,
    ) -> None:
        self._sources = _split_frames(views, itemsizes)
        self._codec = codec
        self._memory = memory
        self.done = 0
        self.frames: list[int] = []
        self.size = 0
        self.checksum = 0

    def compress_turn(self) -> bool:
        end_s = time.monotonic() + _TURN_S
        for source, width in self._sources:
            head, body = pack_frame(source, width=width, codec=self._codec)
            stop = self.size + len(head) + len(body)
            self.done += len(source)
            if not shrinks(self.done, stop, len(self.frames) + 1, of_bytes=len(self._memory)):
                self.frames.clear()
                self.size = 0
                return False
            self._memory[self.size : self.size + len(head)] = head
            self._memory[self.size + len(head) : stop] = body
            self.checksum = crc32c(self._memory[self.size : stop], self.checksum)
            self.frames.append(stop - self.size)
            self.size = stop
            if time.monotonic() >= end_s:
                return True
        return False


def _split_frames(
    views: Sequence[memoryview], itemsizes: Sequence[int]
) -> Iterator[tuple[memoryview, int]]:
    """Yields each frame and the shuffle width that suits most of its bytes."""
    parts: list[memoryview] = []
    nbytes_by_itemsize: Counter[int] = Counter()

    def frame() -> tuple[memoryview, int]:
        joined = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        ((itemsize, _),) = nbytes_by_itemsize.most_common(1)
        return joined, width_for(itemsize)

    room = FRAME_BYTES
    for view, itemsize in zip(views, itemsizes, strict=True):
        at = 0
        while at < len(view):
            part = view[at : at + room]
            parts.append(part)
            nbytes_by_itemsize[itemsize] += len(part)
            at += len(part)
            room -= len(part)
            if not room:
                yield frame()
                parts, nbytes_by_itemsize, room = [], Counter(), FRAME_BYTES
    if parts:
        yield frame()
