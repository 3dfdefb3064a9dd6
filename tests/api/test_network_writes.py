# SPDX-License-Identifier: Apache-2.0
"""Writing over a network: what does not depend on each other is asked for at the same time."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence

import anyio
import pytest
import torch

from actorsnap import Options, StateDict
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.storage.base import ObjectInfo, ObjectWriter, Storage
from actorsnap.storage.memory import forget_space
from actorsnap.storage.wrapper import Wrapper, WriterWrapper, without_blocking_io
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url

MIB = 1 << 20
NUM_OBJECTS = 4
OPTIONS = Options(max_objects=NUM_OBJECTS, min_object_bytes=8 * MIB, chunk_bytes=2 * MIB)
_names = itertools.count()


@pytest.fixture
def url() -> Iterator[str]:
    name = f"network-writes-{next(_names)}"
    yield faulty_url(f"memory://{name}/s")
    forget_space(name)


def state() -> dict[str, StateDict]:
    return {"model": StateDict({f"w{n}": torch.rand(2 * MIB) for n in range(NUM_OBJECTS)})}


class OneAtLast(Wrapper):
    """Opens one object not before all others are asked for, and something is written to one."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._num_asked = 0
        self._all_asked, self.has_written = anyio.Event(), anyio.Event()

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        self._num_asked += 1
        if self._num_asked == 1:
            with anyio.fail_after(60):
                await self._all_asked.wait()
                await self.has_written.wait()
        elif self._num_asked == NUM_OBJECTS:
            self._all_asked.set()
        return await super().writer(key, size, older=older)

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return _Telling(self, inner)


class _Telling(WriterWrapper):
    storage: OneAtLast

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self.inner.write_at(offset, views, crc32c)
        self.storage.has_written.set()


def test_objects_are_opened_together_and_written_as_soon_as_they_are(url: str) -> None:
    saved, target = state(), state()
    with faulty(OneAtLast):
        Snapshot.take(url, saved, options=OPTIONS)
    Snapshot(url).restore(target)
    assert all(torch.equal(saved["model"][name], target["model"][name]) for name in saved["model"])


class Asked(Wrapper):
    """Notes what is asked once the commit object was written."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.verbs: list[str] = []
        self._is_committed = False

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self.inner.put(key, views)
        self._is_committed |= key == COMMIT_KEY

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self.inner.put_if_absent(key, data)
        self._is_committed |= key == COMMIT_KEY

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._note("get")
        return await self.inner.get(key, start, stop)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        self._note("list")
        async for info in self.inner.list(prefix):
            yield info

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        self._note("list_folders")
        return await self.inner.list_folders(folder)

    def _note(self, verb: str) -> None:
        if self._is_committed:
            self.verbs.append(verb)


def test_a_first_save_looks_for_garbage_by_one_request(url: str) -> None:
    storages: list[Asked] = []

    def wrap(inner: Storage) -> Storage:
        storages.append(Asked(inner))
        return storages[-1]

    with faulty(wrap):
        Snapshot.take(url, state(), options=OPTIONS)
        assert [verb for each in storages for verb in each.verbs] == ["list_folders"]
        Snapshot.take(url, state(), options=OPTIONS, overwrite=True)
        assert "list" in storages[-1].verbs
