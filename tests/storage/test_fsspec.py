"""Storage by fsspec: the contract on several implementations, and what is weaker there."""

from __future__ import annotations

import itertools
from pathlib import Path

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from actorsnap.storage import StorageContext
from actorsnap.storage.registry import find_opener
from actorsnap.testing import StorageConformance, bounded, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage, keys_in

_numbers = itertools.count()


class AsyncMemory(AsyncFileSystem):  # type: ignore[misc]
    """An asynchronous object store in memory; its streams are blocking, as all are."""

    protocol = "asyncmemory"
    cachable = True

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._inner = MemoryFileSystem()

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("asyncmemory://").strip("/")

    def _at(self, path):
        return f"async/{path}"

    async def _cat_file(self, path, start=None, end=None, **kwargs):
        return self._inner.cat_file(self._at(path), start, end)

    async def _pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._inner.pipe_file(self._at(path), value, mode=mode)

    async def _info(self, path, **kwargs):
        info = self._inner.info(self._at(path))
        return {**info, "name": path}

    async def _ls(self, path, detail=True, **kwargs):
        found = self._inner.ls(self._at(path))
        return [{**info, "name": info["name"].removeprefix("/async/")} for info in found]

    async def _rm_file(self, path, **kwargs):
        self._inner.rm_file(self._at(path))

    def _open(self, path, mode="rb", **kwargs):
        assert not self.asynchronous
        return self._inner.open(self._at(path), mode)


fsspec.register_implementation("asyncmemory", AsyncMemory)


class TestFsspecMemory(StorageConformance):
    @pytest.fixture
    def make_storage(self) -> MakeStorage:
        name = f"test-{next(_numbers)}"
        context = StorageContext(run_blocking=run_blocking_in_thread)
        opener = find_opener(f"fsspec+memory://{name}/prefix")
        return lambda: opener(context)


class TestFsspecLocal(StorageConformance):
    num_many = 100
    @pytest.fixture
    def make_storage(self, tmp_path: Path) -> MakeStorage:
        context = StorageContext(run_blocking=run_blocking_in_thread)
        opener = find_opener(f"fsspec+file://{tmp_path}/folder")
        return lambda: opener(context)


class TestFsspecAsync(StorageConformance):
    @pytest.fixture
    def make_storage(self) -> MakeStorage:
        name = f"test-{next(_numbers)}"
        context = StorageContext(run_blocking=run_blocking_in_thread)
        opener = find_opener(f"asyncmemory://{name}/prefix")
        return lambda: opener(context)
