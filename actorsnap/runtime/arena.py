# SPDX-License-Identifier: Apache-2.0
"""Staging memory, reused by later saves.

Touching fresh memory is slow (2.4 instead of 5.2 GiB/s per thread), so released blocks are kept.
Block sizes are powers of two. Once shared, blocks are ranges of an in-memory file, which another
process maps (``ArenaView``), in segments: each mapping costs a descriptor. A segment is as large as
all before it, and a block begins at a multiple of its size, so no block crosses a boundary.

A block for device copies stays pinned until it is dropped. Pinning commits memory, so blocks are
pinned, not segments.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from actorsnap.log import Log
from actorsnap.state.sources import Pinner

logger = Log(__name__)

_MIN_CLASS_BYTES = 1 << 16
_SEGMENT_BYTES = 1 << 28
"""Size of the first segment."""

_WARMING_THREADS = 4
"""1 GiB takes them 0.24 s, one thread 0.61 s, eight 0.35 s."""


@dataclass(slots=True, eq=False)
class _Block:
    """``offset`` is the place in the file, None if private."""

    memory: mmap.mmap
    offset: int | None
    size: int
    pinner: Pinner | None = field(default=None, init=False)

    @property
    def address(self) -> int:
        return int(np.frombuffer(self.view(self.size), np.uint8).ctypes.data)

    def view(self, nbytes: int) -> memoryview:
        start = 0 if self.offset is None else self.offset - _segment(self.offset)[0]
        return memoryview(self.memory)[start : start + nbytes]

    def remove(self) -> None:
        assert self.offset is not None
        start = self.offset - _segment(self.offset)[0]
        self.memory.madvise(mmap.MADV_REMOVE, start, self.size)


class Arena:
    """Lends writable memory and keeps returned blocks. Thread-safe.

    Args:
        limit_bytes: Limit of lent and free blocks together; lent blocks alone may exceed it.

    Attributes:
        lent_bytes, free_bytes, pinned_bytes: Of such blocks.
        peak_bytes: Of lent and free blocks together, at most so far.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[_Block]] = {}
        self.free_bytes = 0
        self._lent: dict[int, _Block] = {}
        self.lent_bytes = 0
        self.peak_bytes = 0
        self._file: int | None = None
        self._file_bytes = 0
        self._segments: dict[int, mmap.mmap] = {}
        self._is_forgotten = False
        self._is_closed = False
        self.pinned_bytes = 0
        self._pins = True
        # Ranges of the file without a block, by size.
        self._holes: dict[int, list[int]] = {}

    def share(self) -> int:
        """Makes memory that is lent from now on shareable; returns the arena's file descriptor.

        Raises:
            OSError: the file could not be created.
        """
        with self._lock:
            if self._file is None:
                file = os.memfd_create("actorsnap", os.MFD_CLOEXEC)
                try:
                    os.ftruncate(file, _SEGMENT_BYTES)  # a file size limit also applies here
                except OSError:
                    os.close(file)
                    raise
                self._file = file
                self._drop_free()
            return self._file

    def close(self) -> None:
        """Closes the file and drops free blocks. Lent memory stays valid."""
        with self._lock:
            self._is_closed = True
            file, self._file = self._file, None
            self._drop_free()
            self._segments.clear()
            if file is not None:
                os.close(file)

    def forget(self) -> None:
        """Drops the parent's file in a forked child, without touching its memory."""
        self._lock = threading.Lock()  # it may have been held
        self._is_forgotten = True
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def allocate(self, nbytes: int) -> memoryview:
        """Returns ``nbytes`` of writable memory with unspecified content.

        Raises:
            MemoryError: no memory.
        """
        size = block_bytes(nbytes)
        with self._lock:
            blocks = self._free.get(size)
            if blocks:
                block = blocks.pop()
                self.free_bytes -= size
            else:
                if self.lent_bytes + self.free_bytes + size > self.limit_bytes:
                    self._drop_free()
                block = self._make(size)
            self.lent_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.lent_bytes + self.free_bytes)
            view = block.view(nbytes)
            self._lent[id(view)] = block
        return view

    def offset_of(self, view: memoryview) -> int:
        """Returns the offset of lent memory in the file.

        Raises:
            LookupError: it was lent before the arena was shared.
        """
        block = self._lent[id(view)]
        if block.offset is None:
            raise LookupError("this memory is not shared")
        return block.offset

    def free(self, view: memoryview) -> None:
        """Takes lent memory back. No other view of it may be in use."""
        with self._lock:
            block = self._lent.pop(id(view))
            self.lent_bytes -= block.size
            is_shared = block.offset is not None
            fits = self.lent_bytes + self.free_bytes + block.size <= self.limit_bytes
            if fits and not self._is_closed and is_shared == (self._file is not None):
                self._free.setdefault(block.size, []).append(block)
                self.free_bytes += block.size
            else:
                self._drop(block)

    def pin(self, view: memoryview, pinner: Pinner) -> None:
        """Pins lent memory, once. Blocks. Only for the borrower.

        If the system refuses, logs one warning and pins nothing any more: device copies also work
        with unpinned memory, only slower.
        """
        block = self._lent[id(view)]
        if block.pinner is not None or not self._pins:
            return
        try:
            _populate(block.view(block.size))  # pinning fresh pages takes twice as long
            pinner.pin(block.address, block.size)
        except OSError as error:
            with self._lock:
                is_first, self._pins = self._pins, False
            if is_first:
                logger.warning(
                    "staging memory is not pinned: copies from devices are slower: %s", error
                )
            return
        block.pinner = pinner
        with self._lock:
            self.pinned_bytes += block.size

    def warm_up(self, sizes: Iterable[int], pinner: Pinner | None = None) -> None:
        """Touches blocks for simultaneous loans of these sizes, up to the limit. Blocks.

        Args:
            pinner: Also pins the blocks.
        """
        views: list[memoryview] = []
        try:
            for size in sizes:
                if self.lent_bytes + block_bytes(size) > self.limit_bytes:
                    break
                views.append(self.allocate(size))

            def touch(view: memoryview) -> None:
                _populate(view)
                if pinner is not None:
                    self.pin(view, pinner)

            with ThreadPoolExecutor(_WARMING_THREADS) as pool:
                for _ in pool.map(touch, views):
                    pass
        finally:
            for view in views:
                self.free(view)

    def trim(self) -> None:
        with self._lock:
            self._drop_free()

    def _drop_free(self) -> None:
        for blocks in self._free.values():
            for block in blocks:
                self._drop(block)
        self._free.clear()
        self.free_bytes = 0

    def _drop(self, block: _Block) -> None:
        if self._is_forgotten:
            return
        if block.pinner is not None:
            # Unpinned first: the device must not reach reused pages.
            block.pinner.unpin(block.address)
            block.pinner = None
            self.pinned_bytes -= block.size
        if block.offset is None:
            return  # unmapped with its last view
        # The file keeps the pages until they are removed.
        block.remove()
        if self._file is not None:
            self._holes.setdefault(block.size, []).append(block.offset)

    def _make(self, size: int) -> _Block:
        try:
            if self._file is None:
                return _Block(_map_private(size), None, size)
            holes = self._holes.get(size)
            offset = holes.pop() if holes else self._new_range(size)
            return _Block(self._map_segment(self._file, offset), offset, size)
        except OSError as error:
            raise MemoryError(f"no {size} bytes of staging memory: {error}") from error

    def _new_range(self, size: int) -> int:
        offset = -(-self._file_bytes // size) * size
        if size > _SEGMENT_BYTES:
            offset = max(offset, size)
        self._file_bytes = offset + size
        return offset

    def _map_segment(self, file: int, offset: int) -> mmap.mmap:
        start, size = _segment(offset)
        if start not in self._segments:
            if os.fstat(file).st_size < start + size:
                os.ftruncate(file, start + size)
            self._segments[start] = mmap.mmap(file, size, offset=start)
        return self._segments[start]


class ArenaView:
    """Reads the shared arena of another process.

    Args:
        file: The arena's descriptor; the caller keeps it.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._segments: dict[int, mmap.mmap] = {}

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns the memory of an ``Arena.allocate`` of ``nbytes`` at ``offset``.

        Raises:
            MemoryError: the mapping failed, or there is no such block.
        """
        start, size = _segment(offset)
        if start not in self._segments:
            try:
                segment = mmap.mmap(self._file, size, prot=mmap.PROT_READ, offset=start)
            except (OSError, ValueError) as error:
                raise MemoryError(
                    f"process {os.getpid()} cannot map {size} bytes of staging memory: {error}"
                ) from error
            self._segments[start] = segment
        return memoryview(self._segments[start])[offset - start : offset - start + nbytes]


def _segment(offset: int) -> tuple[int, int]:
    """Returns start and size of the segment around ``offset``."""
    if offset < _SEGMENT_BYTES:
        return 0, _SEGMENT_BYTES
    start = 1 << (offset.bit_length() - 1)
    return start, start


def block_bytes(nbytes: int) -> int:
    return max(_MIN_CLASS_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else _MIN_CLASS_BYTES


def _populate(memory: memoryview) -> None:
    """Makes the kernel provide all pages at once, without the GIL; changes no byte."""
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    if _libc.madvise(address, len(memory), _MADV_POPULATE_WRITE) != 0:  # Linux before 5.14
        pages = memory[:: mmap.PAGESIZE]
        pages[:] = bytes(pages)


_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MADV_POPULATE_WRITE = 23


def _map_private(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages only makes the first touch slower.
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
