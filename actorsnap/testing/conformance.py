# SPDX-License-Identifier: Apache-2.0
"""The contract of ``actorsnap.storage.base`` as a test suite for backends.

Needs pytest, hypothesis and anyio's pytest plugin. A complete test module::

    import pytest
    from actorsnap.storage import StorageContext
    from actorsnap.testing import StorageConformance, run_blocking_in_thread

    @pytest.fixture
    def anyio_backend():          # the default is asyncio and trio
        return "asyncio"

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def make_storage(self, tmp_path):
            def make():
                context = StorageContext(run_blocking=run_blocking_in_thread)
                return open_mine(f"mine://{tmp_path}", context)
            return make

``make_storage`` returns a function that opens the same place each time, empty when a test begins.
The fixture may be ``async`` and may clean up after a ``yield``. ``limit_s`` bounds every test;
``num_many`` is the number of objects in tests of paging.

No key is a folder of another one (``a`` and ``a/b``), because file systems cannot hold both; no
write is below ``capabilities.min_write_bytes``. Durability is not observable: backends must test
their own fsyncs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import pickle
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    UsageError,
)
from actorsnap.format.checksum import crc32c
from actorsnap.storage.base import ObjectInfo, ObjectWriter, Storage
from actorsnap.storage.memory import MemoryStorage
from actorsnap.storage.wrapper import unwrapped

MakeStorage: TypeAlias = Callable[[], Storage]

_MALFORMED_KEYS = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/.", "a\0b", "a\\b"]

# Includes special characters of URLs, shells and patterns.
_UNUSUAL_KEYS = [
    "with space",
    " leading and trailing ",
    "percent%20encoded%2F",
    "plus+equals=and&question?hash#",
    "colon:semicolon;comma,",
    "quotes'\"`",
    "star*brackets[a-z]{x,y}",
    "$dollar!bang@at^caret|pipe<less>greater~tilde",
    ".leading-dot",
    "trailing-dot.",
    "...",
    "-dash",
    "snow-\N{SNOWMAN}-\N{GRINNING FACE}",
    "e\N{COMBINING ACUTE ACCENT}",
    "x" * 200,
    "/".join(["deep"] * 30),
    "actorsnap.json",
    ".actorsnap",
    "20250101T000000-0badcafe-1-0badcafe/data/model=2F/0-0.safetensors",
]

_MODEL_KEYS = ["a", "b.c", "b-c", "d/x", "d/y", "d.e/x", "d/z/1", "é"]


def pattern(size: int, seed: int = 0) -> bytes:
    """Returns bytes without a short period, so that misplaced ranges differ."""
    return random.Random(seed).randbytes(size)


def views_of(data: bytes | bytearray, size: int) -> list[memoryview]:
    view = memoryview(data)
    return [view[start : start + size] for start in range(0, len(data), size)]


async def listed(storage: Storage, prefix: str = "") -> list[ObjectInfo]:
    return [info async for info in storage.list(prefix)]


async def keys_in(storage: Storage, prefix: str = "") -> list[str]:
    return [info.key for info in await listed(storage, prefix)]


def _bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(self: StorageConformance, /, *args: Any, **kwargs: Any) -> None:
        with anyio.fail_after(self.limit_s):
            await test(self, *args, **kwargs)

    return run


def _bound_tests(suite: type[StorageConformance]) -> type[StorageConformance]:
    for name, test in list(vars(suite).items()):
        if name.startswith("test_") and inspect.iscoroutinefunction(test):
            setattr(suite, name, _bounded(test))
    return suite


async def _put(storage: Storage, *keys: str, data: bytes = b"x") -> None:
    for key in keys:
        await storage.put(key, [memoryview(data)])


async def _write(storage: Storage, key: str, data: bytes) -> None:
    writer = await storage.writer(key, len(data))
    if data:
        await writer.write_at(0, [memoryview(data)])
    await writer.complete()


async def _create(storage: Storage, key: str, data: bytes, how: int) -> None:
    match how % 3:
        case 0:
            await _put(storage, key, data=data)
        case 1:
            await storage.put_if_absent(key, data)
        case _:
            await _write(storage, key, data)


async def _write_parts(writers: Sequence[ObjectWriter], data: bytes, part: int) -> None:
    """Writes parts of ``part`` bytes, all at once, by the writers in turn."""
    async with anyio.create_task_group() as tasks:
        for n, view in enumerate(views_of(data, part)):
            tasks.start_soon(writers[n % len(writers)].write_at, n * part, [view])


def _skip_unless(storage: Storage, capability: str) -> None:
    if not getattr(storage.capabilities, capability):
        pytest.skip(f"Capabilities.{capability} is False")


def _write_bytes(storage: Storage, at_least: int) -> int:
    return max(at_least, storage.capabilities.min_write_bytes)


def _copy_bytes(storage: Storage) -> int:
    return max(2_000_000, storage.capabilities.min_copy_bytes or 0)


async def _copying(storage: Storage, key: str, size: int, source: Storage) -> ObjectWriter:
    writer = await storage.copying_writer(key, size, source=source, sample="source/key")
    if writer is None:
        pytest.skip("the storage does not copy")
    return writer


@_bound_tests
class StorageConformance:
    """Base class of a test suite. Name subclasses ``Test...``, and define ``make_storage``."""

    limit_s: float = 300.0
    num_many: int = 1100
    num_examples: int = 40

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def make_storage(self) -> MakeStorage:
        raise NotImplementedError("the subclass must give the fixture make_storage")

    @pytest.fixture
    async def storage(self, make_storage: MakeStorage) -> AsyncIterator[Storage]:
        storage = make_storage()
        yield storage
        await storage.aclose()

    @pytest.fixture
    async def other(self, make_storage: MakeStorage) -> AsyncIterator[Storage]:
        other = make_storage()
        yield other
        await other.aclose()

    # --- put, get ---------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 5, 100_000])
    async def test_put_replaces_longer_and_shorter_objects(
        self, storage: Storage, other: Storage, size: int
    ) -> None:
        await storage.put("folder/key", [memoryview(b"older"), memoryview(bytearray(b" bytes"))])
        assert await other.get("folder/key") == b"older bytes"
        await storage.put("folder/key", views_of(pattern(size), 1000))
        for instance in (storage, other):
            data = await instance.get("folder/key")
            assert data == pattern(size)
            assert type(data) is bytes
        info = await storage.stat("folder/key")
        assert (info.key, info.size) == ("folder/key", size)
        assert info.modified_s >= 0.0
        assert await keys_in(storage) == ["folder/key"]

    async def test_a_reader_sees_the_older_or_the_newer_object(self, storage: Storage) -> None:
        older, newer = b"o" * 10_000, b"n" * 300_000
        await storage.put("key", [memoryview(older)])
        is_done = False
        num_read = 0

        async def read() -> None:
            nonlocal num_read
            while not is_done:
                data = await storage.get("key")
                assert data in (older, newer), f"a mixture of {len(data)} bytes"
                num_read += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(read)
            for _ in range(15):
                await storage.put("key", views_of(newer, 7_000))
                await storage.put("key", [memoryview(older)])
            is_done = True
        assert num_read

    async def test_concurrent_puts_leave_one_of_them(self, storage: Storage) -> None:
        data = [bytes([65 + n]) * (1000 + 999 * n) for n in range(10)]
        async with anyio.create_task_group() as tasks:
            for one in data:
                tasks.start_soon(storage.put, "key", [memoryview(one)])
        assert await storage.get("key") in data
        assert await keys_in(storage) == ["key"]

    async def test_views_are_not_kept(self, storage: Storage) -> None:
        data = bytearray(b"before")
        await storage.put("put", [memoryview(data)])
        writer = await storage.writer("written", len(data))
        await writer.write_at(0, [memoryview(data)])
        data[:] = b"after!"
        await writer.complete()
        assert await storage.get("put") == b"before"
        assert await storage.get("written") == b"before"
        data.extend(b"a view that is kept would make this raise BufferError")

    # --- put_if_absent ----------------------------------------------------------------------

    @pytest.mark.parametrize("how", range(3), ids=["put", "put_if_absent", "writer"])
    async def test_put_if_absent_creates_once_until_deleted(
        self, storage: Storage, how: int
    ) -> None:
        await _create(storage, "actorsnap.json", b"first", how)
        with pytest.raises(ObjectExists) as raised:
            await storage.put_if_absent("actorsnap.json", b"second")
        assert raised.value.key == "actorsnap.json"
        assert await storage.get("actorsnap.json") == b"first"
        assert await keys_in(storage) == ["actorsnap.json"]
        await storage.delete(["actorsnap.json"])
        await storage.put_if_absent("actorsnap.json", b"third")
        assert await storage.get("actorsnap.json") == b"third"

    async def test_exactly_one_of_many_put_if_absent_wins(
        self, storage: Storage, other: Storage
    ) -> None:
        _skip_unless(storage, "has_conditional_put")
        won: dict[bytes, bool] = {}

        async def race(storage: Storage, key: str, data: bytes) -> None:
            won[data] = True
            try:
                await storage.put_if_absent(key, data)
            except ObjectExists:
                won[data] = False

        for number in range(10):
            key = f"round-{number}/actorsnap.json"
            won.clear()
            async with anyio.create_task_group() as tasks:
                for n in range(12):
                    tasks.start_soon(race, (storage, other)[n % 2], key, b"%d" % n * (1 + 500 * n))
            assert sorted(won.values()) == [False] * 11 + [True]
            assert won[await storage.get(key)]
        assert len(await keys_in(storage)) == 10

    # --- writer -----------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(4))
    async def test_parts_in_random_order_and_at_once(self, storage: Storage, seed: int) -> None:
        """Of any sizes that are allowed, with a checksum or without."""
        rng = random.Random(seed)
        least = _write_bytes(storage, 20_000)
        sizes = [least + rng.choice([0, 1, 777, least - 1]) for _ in range(5)]
        sizes += [2 * least, least, rng.choice([1, least // 3])]  # the last one may be small
        data = pattern(sum(sizes), seed)
        writer = await storage.writer("folder/key", len(data))
        assert (writer.key, writer.size) == ("folder/key", len(data))
        parts = [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
        rng.shuffle(parts)
        async with anyio.create_task_group() as tasks:
            for start, size in parts:
                part = data[start : start + size]
                views = views_of(part, 1 + 997 * (seed + 1))
                checksum = crc32c(part) if rng.random() < 0.7 else None
                tasks.start_soon(writer.write_at, start, views, checksum)
        await writer.complete()
        assert await storage.get("folder/key") == data
        assert (await storage.stat("folder/key")).size == len(data)
        assert await keys_in(storage) == ["folder/key"]

    async def test_a_range_may_be_written_again(self, storage: Storage) -> None:
        size = _write_bytes(storage, 1000)
        data = pattern(size + 100)
        first, last = memoryview(data)[:size], memoryview(data)[size:]
        writer = await storage.writer("key", len(data))
        for _ in range(2):
            await writer.write_at(size, [last], crc32c(last))
            await writer.write_at(0, [first], crc32c(first))
        await writer.complete()
        assert await storage.get("key") == data

    @pytest.mark.parametrize("num_parts", [1, 2])
    async def test_a_write_that_is_not_what_it_says_is_refused(
        self, storage: Storage, num_parts: int
    ) -> None:
        _skip_unless(storage, "checks_crc32c")
        size = _write_bytes(storage, 1000)
        data = pattern(num_parts * size)
        views = views_of(data, size)
        writer = await storage.writer("key", len(data))

        async def write_all(flaw: int) -> None:
            for n, view in enumerate(views):
                await writer.write_at(n * size, [view], crc32c(view) ^ flaw)
            await writer.complete()

        # A write of the whole object may be sent by `complete`.
        with pytest.raises(StorageError) as raised:
            await write_all(flaw=1)
        assert raised.value.retryable
        assert await keys_in(storage) == []
        await write_all(flaw=0)
        assert await storage.get("key") == data

    async def test_joining_where_objects_have_one_writer(self, storage: Storage) -> None:
        if storage.capabilities.has_joined_writers:
            pytest.skip("the backend has joined writers")
        writer = await storage.writer("key", 3)
        with pytest.raises(UsageError):
            await storage.join_writer(writer.token)
        await writer.abort()

    async def test_parts_from_joined_writers(self, storage: Storage, other: Storage) -> None:
        _skip_unless(storage, "has_joined_writers")
        part = _write_bytes(storage, 10_000)
        data = pattern(6 * part)
        opener = await storage.writer("key", len(data))
        assert type(opener.token) is bytes
        joined = [await instance.join_writer(opener.token) for instance in (other, storage)]
        writers = [opener, *joined]
        assert [(writer.key, writer.size) for writer in writers] == [("key", len(data))] * 3
        await _write_parts(writers, data, part)
        for writer in joined:
            await writer.release()
        await opener.complete()
        for instance in (storage, other):
            assert await instance.get("key") == data

    async def test_a_released_writer_writes_no_more(self, storage: Storage) -> None:
        _skip_unless(storage, "has_joined_writers")
        opener = await storage.writer("key", 3)
        joined = await storage.join_writer(opener.token)
        await joined.release()
        with pytest.raises(StorageError):
            await joined.write_at(0, [memoryview(b"abc")])
        await joined.abort()  # without effect
        with pytest.raises(UsageError):
            await opener.release()
        await opener.write_at(0, [memoryview(b"abc")])
        await opener.complete()
        assert await storage.get("key") == b"abc"

    async def test_who_joins_after_abort_writes_nothing_that_is_seen(
        self, storage: Storage
    ) -> None:
        _skip_unless(storage, "has_joined_writers")
        part = _write_bytes(storage, 3)
        writer = await storage.writer("folder/key", 2 * part)
        await writer.abort()
        # Backends detect it on joining, on writing, or leave the data to the folder's deletion.
        with contextlib.suppress(StorageError):
            joined = await storage.join_writer(writer.token)
            await joined.write_at(0, [memoryview(pattern(part))])
            await joined.release()
        with pytest.raises(ObjectNotFound):
            await storage.get("folder/key")
        await storage.delete_folder("folder")
        assert await keys_in(storage) == []

    @pytest.mark.parametrize("written", ["all", "nothing", "cancelled"])
    async def test_abort_leaves_nothing_readable(self, storage: Storage, written: str) -> None:
        part = _write_bytes(storage, 1_000_000)
        data = pattern(4 * part)
        writer = await storage.writer("folder/key", len(data))
        with anyio.CancelScope() as scope:
            if written == "cancelled":
                scope.cancel()
            if written != "nothing":
                await _write_parts([writer], data, part)
        await writer.abort()
        with pytest.raises(ObjectNotFound):
            await storage.get("folder/key")
        with pytest.raises(ObjectNotFound):
            await storage.stat("folder/key")
        if written != "cancelled":  # a running request may leave a part
            assert await keys_in(storage) == []
        await _write(storage, "folder/key", b"second try")
        assert await storage.get("folder/key") == b"second try"

    @pytest.mark.parametrize("is_complete", [False, True])
    async def test_what_older_writers_left_is_reused_only_where_it_is_the_same(
        self, storage: Storage, other: Storage, is_complete: bool
    ) -> None:
        part = _write_bytes(storage, 1_000_000)
        older, newer = pattern(3 * part), bytearray(pattern(3 * part))
        newer[part + part // 2] ^= 1
        dead = await other.writer("older/key", len(older))
        for n, view in enumerate(views_of(older, part)[: 3 if is_complete else 2]):
            await dead.write_at(n * part, [view], crc32c(view))
        if is_complete:
            await dead.complete()
        names = ["missing/key", "older/key"]
        writer = await storage.writer("newer/key", len(newer), older=names)
        for n, view in enumerate(views_of(newer, part)):
            is_reused = await writer.reuse(n * part, [view[:100], view[100:]], crc32c(view))
            assert not (is_reused and view != older[n * part :][:part])
            if not is_reused:
                await writer.write_at(n * part, [view], crc32c(view))
        if not is_complete:
            with contextlib.suppress(StorageError):
                view = memoryview(bytes(part))
                await dead.write_at(2 * part, [view], crc32c(view))
                await dead.complete()
        await writer.complete()
        assert await storage.get("newer/key") == newer
        await storage.delete_folder("older")
        assert await storage.get("newer/key") == newer
        assert await storage.list_folders() == ["newer"]
        await dead.abort()

    # --- copying_writer ---------------------------------------------------------------------

    async def test_a_copy_of_a_whole_object(self, storage: Storage, other: Storage) -> None:
        data = pattern(_copy_bytes(storage) + 100)
        await _write(other, "source/key", data)
        writer = await _copying(storage, "copy/key", len(data), other)
        assert (writer.key, writer.size) == ("copy/key", len(data))
        found = await writer.copy_from(0, "source/key", 0, len(data))
        assert found in (None, crc32c(data))
        await writer.complete()
        for instance in (storage, other):
            assert await instance.get("copy/key") == data
        assert await storage.get("source/key") == data
        await storage.delete_folder("source")
        assert await storage.get("copy/key") == data

    async def test_copies_of_ranges_next_to_writes(self, storage: Storage, other: Storage) -> None:
        if storage.capabilities.min_copy_bytes is None:
            pytest.skip("Capabilities.min_copy_bytes is None")
        part = _copy_bytes(storage)
        source, written = pattern(2 * part + 321), pattern(part, seed=1)
        await _write(other, "source/key", source)
        # The source's second part, bytes of the writer's, the source's first part, its end.
        copied = {0: (part, 2 * part), 2 * part: (0, part), 3 * part: (2 * part, len(source))}
        writer = await _copying(storage, "copy/key", 3 * part + 321, other)

        async def copy(at: int, start: int, stop: int) -> None:
            found = await writer.copy_from(at, "source/key", start, stop)
            assert found in (None, crc32c(source[start:stop]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.write_at, part, views_of(written, 99_991), crc32c(written))
            for at, (start, stop) in copied.items():
                tasks.start_soon(copy, at, start, stop)
        await writer.complete()
        expected = source[part : 2 * part] + written + source[:part] + source[2 * part :]
        assert await other.get("copy/key") == expected

    @pytest.mark.parametrize("flaw", ["missing", "truncated"])
    async def test_a_copy_that_fails_leaves_nothing_readable(
        self, storage: Storage, other: Storage, flaw: str
    ) -> None:
        size = _copy_bytes(storage) + 100
        await _write(other, "source/key", pattern(size - 1 if flaw == "truncated" else size))
        writer = await _copying(storage, "copy/key", size, other)
        if flaw == "missing":
            with pytest.raises(ObjectNotFound):
                await writer.copy_from(0, "source/none", 0, size)
        else:
            with pytest.raises((ChecksumMismatch, StorageError)):
                await writer.copy_from(0, "source/key", 0, size)
        await writer.abort()
        with pytest.raises(ObjectNotFound):
            await storage.get("copy/key")
        await storage.delete_folder("copy")
        assert await keys_in(storage) == ["source/key"]
        await _write(storage, "copy/key", b"second try")
        assert await storage.get("copy/key") == b"second try"

    async def test_a_copying_writer_does_not_harm_an_object_that_exists(
        self, storage: Storage, other: Storage
    ) -> None:
        data = pattern(_copy_bytes(storage) + 100)
        await _write(other, "source/key", data)
        await _put(storage, "key", data=b"first")
        # As with `writer`, not every backend detects it.
        with contextlib.suppress(ObjectExists):
            writer = await _copying(storage, "key", len(data), other)
            with contextlib.suppress(ObjectExists):
                await writer.copy_from(0, "source/key", 0, len(data))
            await writer.abort()
        assert await storage.get("key") == b"first"

    async def test_a_storage_of_another_kind_is_not_copied_from(self, storage: Storage) -> None:
        if isinstance(unwrapped(storage), MemoryStorage):
            pytest.skip("the other kind is this one")
        source = MemoryStorage(f"conformance-{id(self)}")
        size = _copy_bytes(storage) + 100
        await _write(source, "source/key", pattern(size))
        writer = await storage.copying_writer("key", size, source=source, sample="source/key")
        assert writer is None
        assert await keys_in(storage) == []

    async def test_a_cancelled_put_is_done_or_not_done(self, storage: Storage) -> None:
        await _put(storage, "key", data=b"older")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await _put(storage, "key", data=b"newer")
        assert await storage.get("key") in (b"older", b"newer")
        assert await keys_in(storage) == ["key"]

    async def test_a_writer_does_not_harm_an_object_that_exists(self, storage: Storage) -> None:
        await _put(storage, "key", data=b"first")
        # Not every backend detects it; the others must still support abort.
        with contextlib.suppress(ObjectExists):
            writer = await storage.writer("key", 6)
            with contextlib.suppress(ObjectExists):
                await writer.write_at(0, [memoryview(b"second")])
            await writer.abort()
        assert await storage.get("key") == b"first"

    async def test_two_writers_of_different_keys(self, storage: Storage) -> None:
        one = await storage.writer("folder/one", 3)
        two = await storage.writer("folder/two", 3)
        await two.write_at(0, [memoryview(b"two")])
        await one.write_at(0, [memoryview(b"one")])
        await one.abort()
        await two.complete()
        assert await storage.get("folder/two") == b"two"
        assert await keys_in(storage) == ["folder/two"]

    async def test_concurrent_reads_of_8_mib(self, storage: Storage) -> None:
        part = _write_bytes(storage, 1 << 20)
        data = pattern(max(8 << 20, part))
        writer = await storage.writer("big", len(data))
        await _write_parts([writer], data, part)
        await writer.complete()
        target = bytearray(len(data))

        async def get(start: int) -> None:
            assert await storage.get("big", start, start + 999) == data[start : start + 999]

        async with anyio.create_task_group() as tasks:
            for start in range(0, len(data), 1_000_001):
                views = [memoryview(target)[start : start + 1_000_001]]
                tasks.start_soon(storage.read_into, "big", start, views)
                tasks.start_soon(get, start // 2)
        assert hashlib.sha256(target).digest() == hashlib.sha256(data).digest()

    async def test_empty_objects(self, storage: Storage) -> None:
        await storage.put("put", [])
        await _put(storage, "put-empty-view", data=b"")
        await storage.put_if_absent("absent", b"")
        await (await storage.writer("written", 0)).complete()
        joined = await storage.writer("written-nothing", 0)
        await joined.write_at(0, [])
        await joined.complete()
        expected = ["absent", "put", "put-empty-view", "written", "written-nothing"]
        assert [(i.key, i.size) for i in await listed(storage)] == [(k, 0) for k in expected]
        for key in expected:
            assert await storage.get(key) == b""
            assert await storage.get(key, 0, 0) == b""
            await storage.read_into(key, 0, [])

    async def test_many_views_per_call(self, storage: Storage) -> None:
        data = pattern(9_000)
        views = [*views_of(data, 3), memoryview(b"")]
        assert len(views) > 2 * 1024
        await storage.put("put", views)
        writer = await storage.writer("written", len(data))
        await writer.write_at(0, views)
        await writer.complete()
        for key in ("put", "written"):
            target = bytearray(len(data))
            await storage.read_into(key, 0, views_of(target, 2))
            assert target == data

    # --- reading ----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("start", "stop"),
        [(0, None), (0, 10), (3, 7), (9, 10), (4, 4), (10, 10), (10, None)]
        + [(0, 11), (9, 11), (10, 11), (20, 30), (50, 51)],
    )
    async def test_ranges(self, storage: Storage, start: int, stop: int | None) -> None:
        """Beyond the end they raise."""
        data = b"0123456789"
        await _put(storage, "key", data=data)
        size = (stop or len(data)) - start
        target = bytearray(b"." * (8 + size))
        view = memoryview(target)
        views = [view[8 : 7 + size], view[:0], view[4:5][:size]]
        if stop is None or stop <= len(data):
            assert await storage.get("key", start, stop) == data[start:stop]
            await storage.read_into("key", start, views)
            assert b"".join(views) == data[start:stop]
            assert target.count(b".") == 8
            return
        for call in (storage.get("key", start, stop), storage.read_into("key", start, views)):
            with pytest.raises(ChecksumMismatch) as raised:
                await call
            assert raised.value.key == "key"

    @pytest.mark.parametrize("place", ["empty", "next-to-another", "a-folder"])
    async def test_missing_objects(self, storage: Storage, place: str) -> None:
        key = {"empty": "key", "next-to-another": "folder/key"}.get(place, "folder")
        if place != "empty":
            await _put(storage, "folder/other")
        target = [memoryview(bytearray(1))]
        for call, op in (
            (storage.get(key), "get"),
            (storage.get(key, 0, 0), "get"),
            (storage.read_into(key, 0, target), "read_into"),
            (storage.stat(key), "stat"),
        ):
            with pytest.raises(ObjectNotFound) as raised:
                await call
            error = raised.value
            assert isinstance(error, FileNotFoundError)
            assert (error.op, error.key, error.backend) == (op, key, storage.url)
            assert not error.retryable
            copied = pickle.loads(pickle.dumps(error))
            assert copied.fields == error.fields
        await storage.delete([key])

    # --- list, delete -----------------------------------------------------------------------

    async def test_list_is_in_key_order(self, storage: Storage) -> None:
        # "/" sorts between "." and "0": folder order is not key order.
        keys = ["b/x", "a", "b-x", "b.x", "b0x", "b/x.y", "c/d/e", "c-d/e", "é", "Z", "10", "9"]
        async with anyio.create_task_group() as tasks:
            for key in keys:
                tasks.start_soon(storage.put, key, [memoryview(key.encode())])
        infos = [(info.key, info.size) for info in await listed(storage)]
        assert infos == [(key, len(key.encode())) for key in sorted(keys)]

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            ("", ["a/b/1", "a/b/2", "a/bc", "ab", "b"]),
            ("a", ["a/b/1", "a/b/2", "a/bc", "ab"]),
            ("a/", ["a/b/1", "a/b/2", "a/bc"]),
            ("a/b", ["a/b/1", "a/b/2", "a/bc"]),
            ("a/b/", ["a/b/1", "a/b/2"]),
            ("a/b/2", ["a/b/2"]),
            ("a/b/2/", []),
            ("b/", []),
            ("b/c/d", []),
            ("c", []),
            ("/", []),
            ("/a", []),
            ("a//", []),
            ("a/../", []),
            ("../", []),
            ("./a", []),
            (".", []),
            ("A", []),
        ],
    )
    async def test_list_takes_string_prefixes(
        self, storage: Storage, prefix: str, expected: list[str]
    ) -> None:
        assert await listed(storage, prefix) == []  # the place does not exist yet
        await _put(storage, "a/b/1", "a/b/2", "a/bc", "ab", "b")
        assert await keys_in(storage, prefix) == expected

    async def test_list_may_be_left_early(self, storage: Storage) -> None:
        await _put(storage, *"01234")
        infos = storage.list("")
        assert (await anext(infos)).key == "0"
        # Trio requires unexhausted generators to be closed.
        if isinstance(infos, AsyncGenerator):
            await infos.aclose()
        assert len(await keys_in(storage)) == 5

    async def test_other_verbs_while_listing(self, storage: Storage) -> None:
        await _put(storage, *"01234")
        seen = []
        async for info in storage.list(""):
            seen.append(info.key)
            assert await storage.get(info.key) == b"x"
            await storage.delete([info.key])
        assert seen == ["0", "1", "2", "3", "4"]
        assert await keys_in(storage) == []

    async def test_list_and_delete_many(self, storage: Storage) -> None:
        keys = [f"{n % 3}/{n:06d}" for n in range(self.num_many)]
        # In batches: the backend's process may have few descriptors.
        for start in range(0, len(keys), 50):
            async with anyio.create_task_group() as tasks:
                for key in keys[start : start + 50]:
                    tasks.start_soon(storage.put, key, [memoryview(b"x")])
        assert await keys_in(storage) == sorted(keys)
        assert await keys_in(storage, "1/") == sorted(key for key in keys if key[0] == "1")
        await storage.delete(keys[1:])
        assert await keys_in(storage) == keys[:1]

    async def test_delete(self, storage: Storage) -> None:
        await _put(storage, "a/1", "a/2", "a/b/3", "c")
        await storage.delete(["a/1", "missing", "a/missing", "missing/too", "a/b/3", "a/1"])
        assert await keys_in(storage) == ["a/2", "c"]
        with pytest.raises(ObjectNotFound):
            await storage.get("a/1")
        await storage.delete(["a/1", "a/b/3"])
        await storage.delete([])
        assert await keys_in(storage) == ["a/2", "c"]
        await storage.delete(["a/2", "c"])
        assert await keys_in(storage) == []

    async def test_folders(self, storage: Storage) -> None:
        assert await storage.list_folders() == []
        assert await storage.delete_folder("missing") == []
        await _put(storage, "a/1", "a/b/c/2", "a/d/3", "ab/4", "a.5", "6")
        assert await storage.list_folders() == ["a", "ab"]
        assert await storage.list_folders("a") == ["b", "d"]
        for missing in ("missing", "6", "6/b"):
            assert await storage.list_folders(missing) == []
        assert sorted(await storage.delete_folder("a")) == ["a/1", "a/b/c/2", "a/d/3"]
        assert await storage.list_folders() == ["ab"]
        assert await keys_in(storage) == ["6", "a.5", "ab/4"]

    async def test_folders_vanish_with_their_last_object(self, storage: Storage) -> None:
        await _put(storage, "name/deep/er")
        await storage.delete(["name/deep/er"])
        # A real folder that remained would be in the way.
        await _put(storage, "name", data=b"y")
        assert await storage.get("name") == b"y"

    async def test_creating_while_folders_vanish(self, storage: Storage) -> None:
        async def churn(n: int) -> None:
            for _ in range(10):
                key = f"shared/folder/{n}"
                await _create(storage, key, b"x", n)
                assert await storage.get(key) == b"x"
                await storage.delete([key])

        async with anyio.create_task_group() as tasks:
            for n in range(9):
                tasks.start_soon(churn, n)
        assert await keys_in(storage) == []

    # --- keys, life -------------------------------------------------------------------------

    @pytest.mark.parametrize("key", _MALFORMED_KEYS)
    async def test_malformed_keys_are_refused(self, storage: Storage, key: str) -> None:
        target = [memoryview(bytearray(1))]
        for call in (
            storage.put(key, [memoryview(b"x")]),
            storage.put_if_absent(key, b"x"),
            storage.writer(key, 1),
            storage.get(key),
            storage.read_into(key, 0, target),
            storage.delete([key]),
            storage.stat(key),
        ):
            with pytest.raises(UsageError):
                await call
        assert await keys_in(storage) == []

    async def test_unusual_keys(self, storage: Storage) -> None:
        for n, key in enumerate(_UNUSUAL_KEYS):
            await _create(storage, key, key.encode() + pattern(10, n), n)
        assert await keys_in(storage) == sorted(_UNUSUAL_KEYS)
        for n, key in enumerate(_UNUSUAL_KEYS):
            assert await storage.get(key) == key.encode() + pattern(10, n)
            assert (await storage.stat(key)).key == key
            assert await keys_in(storage, key) == [key]
        await storage.delete(_UNUSUAL_KEYS)
        assert await keys_in(storage) == []

    async def test_capabilities(self, storage: Storage) -> None:
        capabilities = storage.capabilities
        assert capabilities == storage.capabilities
        assert capabilities.min_write_bytes >= 1
        assert capabilities.max_writes is None or capabilities.max_writes >= 1
        assert capabilities.preferred_parallel_objects >= 1
        assert storage.url

    @pytest.mark.parametrize("use", ["none", "put", "open-writer"])
    async def test_aclose_is_idempotent(self, make_storage: MakeStorage, use: str) -> None:
        storage = make_storage()
        if use == "put":
            await _put(storage, "key")
        elif use == "open-writer":
            assert (await storage.writer("key", 1)).key == "key"
        await storage.aclose()
        await storage.aclose()

    # --- blocking I/O -----------------------------------------------------------------------

    async def test_blocking_io_from_threads(self, storage: Storage) -> None:
        _skip_unless(storage, "has_blocking_io")
        _skip_unless(storage, "has_joined_writers")
        part = _write_bytes(storage, 50_000)
        data = pattern(8 * part)
        target = bytearray(len(data))
        writer: ObjectWriter = await storage.writer("key", len(data))
        joined = await storage.join_writer(writer.token)

        def write(n: int) -> None:
            views = views_of(data[n * part : (n + 1) * part], 1 + part // 2000)
            (writer if n % 2 else joined).write_at_blocking(n * part, views)

        def read(n: int) -> None:
            view = memoryview(target)[n * part : (n + 1) * part]
            storage.read_into_blocking("key", n * part, [[view[:7], view[7:9]], [], [view[9:]]])

        def run_all(function: Callable[[int], None]) -> None:
            with ThreadPoolExecutor(4) as pool:
                for future in [pool.submit(function, n) for n in range(8)]:
                    future.result()

        await anyio.to_thread.run_sync(run_all, write)
        await joined.release()
        await writer.complete()
        await anyio.to_thread.run_sync(run_all, read)
        assert target == data

    async def test_blocking_io_raises_as_the_async_verbs_do(self, storage: Storage) -> None:
        _skip_unless(storage, "has_blocking_io")
        await _put(storage, "key", data=b"0123456789")

        def read(key: str, offset: int, size: int) -> None:
            storage.read_into_blocking(key, offset, [[memoryview(bytearray(size))]])

        expected: list[tuple[type[ActorSnapError], str, int, int]] = [
            (ChecksumMismatch, "key", 5, 6),
            (ObjectNotFound, "missing", 0, 1),
            (UsageError, "../key", 0, 1),
        ]
        for kind, key, offset, size in expected:
            with pytest.raises(kind):
                await anyio.to_thread.run_sync(read, key, offset, size)

    # --- model ------------------------------------------------------------------------------

    def test_agrees_with_a_dict(
        self,
        make_storage: MakeStorage,
        anyio_backend_name: str,
        anyio_backend_options: dict[str, Any],
    ) -> None:
        @settings(
            max_examples=self.num_examples,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(steps=st.lists(_STEPS, max_size=25))
        def agree(steps: list[_Step]) -> None:
            anyio.run(
                self._compare,
                make_storage,
                steps,
                backend=anyio_backend_name,
                backend_options=anyio_backend_options,
            )

        agree()

    async def _compare(self, make_storage: MakeStorage, steps: Sequence[_Step]) -> None:
        with anyio.fail_after(self.limit_s):
            storage = make_storage()
            await storage.delete(await keys_in(storage))
            model: dict[str, bytes] = {}
            for verb, key, data in steps:
                await _step(storage, model, verb, key, data)
            infos = [(info.key, info.size) for info in await listed(storage)]
            assert infos == [(key, len(model[key])) for key in sorted(model)]
            for key, value in model.items():
                assert await storage.get(key) == value
            await storage.delete(list(model))
            assert await keys_in(storage) == []
            await storage.aclose()


_Step: TypeAlias = tuple[str, str, bytes]

_VERBS = ["put", "put_if_absent", "write", "abort", "delete", "get", "list", "stat", "read_into"]

_STEPS: st.SearchStrategy[_Step] = st.tuples(
    st.sampled_from(_VERBS), st.sampled_from(_MODEL_KEYS), st.binary(max_size=40)
)


async def _step(
    storage: Storage, model: dict[str, bytes], verb: str, key: str, data: bytes
) -> None:
    is_there = key in model
    missing: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if is_there else pytest.raises(ObjectNotFound)
    )
    match verb:
        case "put":
            await storage.put(key, [memoryview(data)])
            model[key] = data
        case "put_if_absent":
            with pytest.raises(ObjectExists) if is_there else contextlib.nullcontext():
                await storage.put_if_absent(key, data)
            model.setdefault(key, data)
        case "write" | "abort":
            await _step_writer(storage, model, verb, key, data)
        case "delete":
            await storage.delete([key])
            model.pop(key, None)
        case "get":
            start = len(data) % (len(model.get(key, b"")) + 1)
            with missing:
                assert await storage.get(key, start) == model[key][start:]
        case "list":
            prefix = key[: len(data) % (len(key) + 1)]
            assert await keys_in(storage, prefix) == sorted(
                known for known in model if known.startswith(prefix)
            )
        case "stat":
            with missing:
                assert (await storage.stat(key)).size == len(model[key])
        case _:
            target = bytearray(len(model.get(key, b"")))
            with missing:
                await storage.read_into(key, 0, [memoryview(target)])
                assert target == model[key]


async def _step_writer(
    storage: Storage, model: dict[str, bytes], verb: str, key: str, data: bytes
) -> None:
    try:
        writer = await storage.writer(key, len(data))
    except ObjectExists:
        assert key in model
        return
    try:
        await writer.write_at(0, [memoryview(data)])
    except ObjectExists:
        assert key in model
    if verb == "abort" or key in model:
        await writer.abort()
    else:
        await writer.complete()
        model[key] = data
