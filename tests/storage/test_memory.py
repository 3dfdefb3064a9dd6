# SPDX-License-Identifier: Apache-2.0
"""Storage in memory: the contract, and what only this backend promises."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import anyio
import pytest

from actorsnap.errors import ObjectExists, StorageError, UsageError
from actorsnap.storage import Capabilities, StorageContext, open_storage
from actorsnap.storage.memory import MemoryStorage, forget_space
from actorsnap.testing import StorageConformance, bounded, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage, keys_in

_numbers = itertools.count()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-memory-{next(_numbers)}"
    yield name
    forget_space(name)


@pytest.mark.few
class TestMemory(StorageConformance):
    @pytest.fixture
    def make_storage(self, name: str) -> MakeStorage:
        context = StorageContext(run_blocking=run_blocking_in_thread)
        return lambda: open_storage(f"memory://{name}", context)


@pytest.mark.few
class TestMemoryAsACloud(StorageConformance):
    """The suite keeps to what a storage may demand of writes: the memory would refuse."""

    num_many = 50
    num_examples = 10

    @pytest.fixture
    def make_storage(self, name: str) -> MakeStorage:
        rules = Capabilities(
            min_write_bytes=60_000, max_writes=20, has_joined_writers=False, checks_crc32c=True
        )
        return lambda: MemoryStorage(name, capabilities=rules)


@pytest.mark.few
class TestMemoryPrefix(StorageConformance):
    num_many = 50
    num_examples = 10

    @pytest.fixture
    def make_storage(self, name: str) -> MakeStorage:
        context = StorageContext(run_blocking=run_blocking_in_thread)
        return lambda: open_storage(f"memory://{name}/some/prefix/", context)


@bounded(10)
async def test_prefixes_are_places_of_one_space(name: str) -> None:
    space = MemoryStorage(name)
    await MemoryStorage(name, "a/b").put("key", [memoryview(b"x")])
    await MemoryStorage(name, "a/bc").put("key", [memoryview(b"y")])
    assert await keys_in(space) == ["a/b/key", "a/bc/key"]
    assert await keys_in(MemoryStorage(name, "a")) == ["b/key", "bc/key"]
    assert await keys_in(MemoryStorage(name, "a/b")) == ["key"]


@pytest.mark.parametrize(
    ("size", "cuts", "fault"),
    [
        (1000, [0, 300, 600], ""),
        (1000, [0, 300, 600, 999], ""),
        (1000, [0, 99, 600], r"\[0, 99\) is less than 250"),
        (1000, [0, 300, 549], r"\[300, 549\) is less than 250"),
        (200, [0, 100], ""),
        (200, [0, 99], "less than 100"),
    ],
)
@bounded(10)
async def test_writes_are_held_to_the_capabilities(
    name: str, size: int, cuts: list[int], fault: str
) -> None:
    rules = Capabilities(min_write_bytes=100, max_writes=4)
    writer = await MemoryStorage(name, capabilities=rules).writer("key", size)
    for start, stop in itertools.pairwise([*cuts, size]):
        await writer.write_at(start, [memoryview(bytes(stop - start))])
    if fault:
        with pytest.raises(StorageError, match=fault):
            await writer.complete()
    else:
        await writer.complete()


@bounded(10)
async def test_spaces_are_apart_and_can_be_forgotten(name: str) -> None:
    await MemoryStorage(name).put("key", [memoryview(b"x")])
    assert await keys_in(MemoryStorage(f"{name}-other")) == []
    forget_space(name)
    forget_space(name)
    forget_space(f"{name}-other")
    assert await keys_in(MemoryStorage(name)) == []


@bounded(10)
async def test_an_unfinished_object_is_invisible(name: str) -> None:
    storage = MemoryStorage(name)
    writer = await storage.writer("key", 3)
    await writer.write_at(0, [memoryview(b"abc")])
    assert await keys_in(storage) == []
    await writer.complete()
    assert await keys_in(storage) == ["key"]


@bounded(10)
async def test_complete_refuses_an_object_with_holes(name: str) -> None:
    storage = MemoryStorage(name)
    writer = await storage.writer("key", 10)
    await writer.write_at(6, [memoryview(b"6789")])
    await writer.write_at(0, [memoryview(b"0123")])
    with pytest.raises(StorageError, match="byte 4 of 10 was never written"):
        await writer.complete()
    await writer.write_at(4, [memoryview(b"45")])
    await writer.complete()
    assert await storage.get("key") == b"0123456789"


@bounded(10)
async def test_a_writer_of_an_object_that_exists_is_refused(name: str) -> None:
    storage = MemoryStorage(name)
    await storage.put("key", [memoryview(b"x")])
    with pytest.raises(ObjectExists):
        await storage.writer("key", 1)


@bounded(10)
async def test_the_first_of_two_writers_of_a_key_wins(name: str) -> None:
    storage = MemoryStorage(name)
    writers = [await storage.writer("key", 1) for _ in range(2)]
    for n, writer in enumerate(writers):
        await writer.write_at(0, [memoryview(b"%d" % n)])
    await writers[1].complete()
    with pytest.raises(ObjectExists):
        await writers[0].complete()
    assert await storage.get("key") == b"1"


@bounded(10)
async def test_misuse_of_a_writer(name: str) -> None:
    storage = MemoryStorage(name)
    writer = await storage.writer("key", 3)
    joined = await storage.join_writer(writer.token)
    for offset, data in ((-1, b"a"), (1, b"abc"), (4, b"")):
        with pytest.raises(UsageError):
            await writer.write_at(offset, [memoryview(data)])
    with pytest.raises(UsageError, match="only the opener"):
        await joined.complete()
    await joined.abort()
    await writer.write_at(0, [memoryview(b"abc")])
    await writer.complete()
    await writer.abort()
    assert await storage.get("key") == b"abc"
    for call in (writer.complete(), joined.write_at(0, [memoryview(b"x")])):
        with pytest.raises(StorageError, match="completed, released or aborted"):
            await call
    assert await storage.get("key") == b"abc"


def test_one_space_from_many_threads_and_loops(name: str) -> None:
    """Each thread has a loop of its own; exactly one of them wins each key."""
    won: list[tuple[int, int]] = []

    async def compete(thread: int) -> None:
        storage = MemoryStorage(name)
        for n in range(50):
            try:
                await storage.put_if_absent(f"{n}", b"%d" % thread)
            except ObjectExists:
                continue
            won.append((thread, n))

    threads = [threading.Thread(target=anyio.run, args=(compete, n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sorted(n for _, n in won) == list(range(50))


@pytest.mark.parametrize("url", ["memory://", "memory:///", "memory://a//b", "memory://a/../b"])
def test_malformed_urls(url: str) -> None:
    with pytest.raises(UsageError):
        open_storage(url, StorageContext(run_blocking=run_blocking_in_thread))


def test_options_are_refused_by_name() -> None:
    context = StorageContext(run_blocking=run_blocking_in_thread, options={"region": "x"})
    with pytest.raises(UsageError, match="region"):
        open_storage("memory://name", context)
