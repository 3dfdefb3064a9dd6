# SPDX-License-Identifier: Apache-2.0
"""What the machine itself can do: the raw limits that ratios are taken against."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from crc32c import crc32c

from bench.state import State

__all__ = ["RawCopy", "RawFiles", "RawPlaces"]

THREADS = 2
FILES = 4
# The sizes at which each did best on the machine of bench/README.md.
WRITE_CHUNK = 4 << 20
READ_CHUNK = 1 << 20
COPY_CHUNK = 8 << 20


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _shares(state: State) -> list[list[str]]:
    """The names of ``FILES`` files of about equal size: the largest tensors are dealt first."""
    names: list[list[str]] = [[] for _ in range(FILES)]
    sizes = [0] * FILES
    for name in sorted(state, key=lambda n: -state[n].numel()):
        smallest = sizes.index(min(sizes))
        names[smallest].append(name)
        sizes[smallest] += state[name].numel()
    return names


class RawFiles:
    """Four files, two threads, ``pwrite`` or ``preadv``, and CRC32C of every chunk."""

    def __init__(self, state: State) -> None:
        self._shares = _shares(state)
        self._pool = ThreadPoolExecutor(THREADS)
        self._sums: dict[tuple[int, int], int] = {}

    def save(self, state: State, folder: Path, *, fsync: bool = False) -> None:
        def write(index: int) -> None:
            fd = os.open(folder / f"{index}.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                at = 0
                for name in self._shares[index]:
                    view = _bytes_of(state[name])
                    for start in range(0, len(view), WRITE_CHUNK):
                        chunk = view[start : start + WRITE_CHUNK]
                        crc32c(chunk)
                        if os.pwrite(fd, chunk, at) != len(chunk):
                            raise OSError("short write")
                        at += len(chunk)
                if fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)

        list(self._pool.map(write, range(FILES)))

    def load(self, folder: Path, target: State, *, verify: bool = True) -> None:
        def read(index: int) -> None:
            fd = os.open(folder / f"{index}.raw", os.O_RDONLY)
            try:
                at = 0
                for name in self._shares[index]:
                    view = _bytes_of(target[name])
                    for start in range(0, len(view), READ_CHUNK):
                        chunk = view[start : start + READ_CHUNK]
                        if os.preadv(fd, [chunk], at) != len(chunk):
                            raise OSError("short read")
                        if verify:
                            crc32c(chunk)
                        at += len(chunk)
            finally:
                os.close(fd)

        list(self._pool.map(read, range(FILES)))


class RawPlaces:
    """``RawFiles.load`` from the one file of another program, which has each tensor at any byte."""

    def __init__(self, state: State, file: Path, starts: dict[str, int]) -> None:
        self._shares = _shares(state)
        self._pool = ThreadPoolExecutor(THREADS)
        self._file = file
        self._starts = starts

    def load(self, folder: Path, target: State) -> None:
        def read(index: int) -> None:
            fd = os.open(folder / self._file, os.O_RDONLY)
            try:
                for name in self._shares[index]:
                    view, begin = _bytes_of(target[name]), self._starts[name]
                    for start in range(0, len(view), READ_CHUNK):
                        chunk = view[start : start + READ_CHUNK]
                        if os.preadv(fd, [chunk], begin + start) != len(chunk):
                            raise OSError("short read")
            finally:
                os.close(fd)

        list(self._pool.map(read, range(FILES)))


class RawCopy:
    """Two threads copy a state into memory that has been written before."""

    def __init__(self, state: State) -> None:
        self._sources = [t.view(-1).view(torch.uint8).numpy() for t in state.values()]
        self._targets = [np.ones_like(a) for a in self._sources]
        spans = [
            (i, start, min(start + COPY_CHUNK, len(a)))
            for i, a in enumerate(self._sources)
            for start in range(0, len(a), COPY_CHUNK)
        ]
        self._spans = [spans[n::THREADS] for n in range(THREADS)]
        self._pool = ThreadPoolExecutor(THREADS)

    def run(self) -> None:
        def copy(spans: list[tuple[int, int, int]]) -> None:
            for i, start, stop in spans:
                np.copyto(self._targets[i][start:stop], self._sources[i][start:stop])

        list(self._pool.map(copy, self._spans))

    def check(self) -> None:
        for source, target in zip(self._sources, self._targets, strict=True):
            if not np.array_equal(source, target):
                raise RuntimeError("the copy differs")
