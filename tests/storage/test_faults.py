# SPDX-License-Identifier: Apache-2.0
"""Storages that fail on purpose: do they, and exactly when they should?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from actorsnap.errors import ObjectNotFound, StorageError, Throttled, UsageError
from actorsnap.storage import Storage, StorageContext, open_storage
from actorsnap.storage.memory import MemoryStorage, forget_space
from actorsnap.testing import (
    FaultyStorage,
    StorageConformance,
    ThrottledStorage,
    bounded,
    run_blocking_in_thread,
)
from actorsnap.testing.conformance import MakeStorage, keys_in
from actorsnap.testing.faults import Verb
from tests.api.zygote import Zygote

_numbers = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-faults-{next(_numbers)}"
    yield name
    forget_space(name)


@pytest.fixture
def fs(tmp_path: Path) -> Storage:
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    return open_storage(tmp_path / "root", context)


@pytest.mark.few
class TestFaultyWithoutFaults(StorageConformance):
    num_many = 100
    num_examples = 10

    @pytest.fixture(params=[True, False], ids=["blocking", "async"])
    def make_storage(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeStorage:
        context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
        return lambda: FaultyStorage(
            open_storage(tmp_path / "root", context), has_blocking_io=request.param
        )


@pytest.mark.few
class TestThrottled(StorageConformance):
    num_many = 100
    num_examples = 10

    @pytest.fixture
    def make_storage(self, name: str) -> MakeStorage:
        return lambda: ThrottledStorage(MemoryStorage(name), bytes_per_s=1e12)


async def work(storage: Storage) -> None:
    """One operation of each verb, aborts apart, in a fixed order."""
    await storage.put("put", [memoryview(b"put")])
    await storage.put_if_absent("absent", b"x")
    writer = await storage.writer("written", 2)
    try:
        joined = await storage.join_writer(writer.token)
        if storage.capabilities.has_blocking_io:
            await anyio.to_thread.run_sync(writer.write_at_blocking, 0, [memoryview(b"ab")])
        else:
            await writer.write_at(0, [memoryview(b"ab")])
        assert not await writer.reuse(0, [memoryview(b"ab")], 0)
        await joined.release()
        await joined.abort()  # without effect
        await writer.complete()
    except BaseException:
        await writer.abort()
        raise
    await storage.get("put")
    views = [memoryview(bytearray(2))]
    if storage.capabilities.has_blocking_io:
        await anyio.to_thread.run_sync(storage.read_into_blocking, "written", 0, [views])
    else:
        await storage.read_into("written", 0, views)
    assert len(await keys_in(storage)) == 3
    await storage.stat("put")
    await storage.delete(["put", "absent", "written"])
    assert await storage.list_folders() == []
    await storage.delete_folder("missing")


ORDER = [
    "put",
    "put_if_absent",
    "writer",
    "join_writer",
    "write_at",
    "reuse",
    "release",
    "complete",
    "get",
    "read_into",
    "list",
    "stat",
    "delete",
    "list_folders",
    "delete_folder",
]


@pytest.mark.parametrize("has_blocking_io", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@bounded(20)
async def test_the_kth_operation_fails_for_each_k(
    fs: Storage, has_blocking_io: bool, when: str
) -> None:
    failed = []
    for k in itertools.count(1):
        faulty = FaultyStorage(fs, fail_at=k, fail_when=when, has_blocking_io=has_blocking_io)
        assert faulty.capabilities.has_blocking_io is has_blocking_io
        try:
            await work(faulty)
        except StorageError as error:
            failed.append((error.op, error.detail))
        if not faulty.was_hit:
            assert faulty.num_operations == len(ORDER) + 1  # and one abort
            break
        # A writer that failed after its effect stays, so that all is clean for the next k.
        await fs.delete(["put", "absent", "written"])
    assert failed == [(verb, "a scripted fault") for verb in ORDER]


@bounded(10)
async def test_failures_before_and_after_the_effect(name: str) -> None:
    inner = MemoryStorage(name)
    for when, effect in (("before", []), ("after", ["key"])):
        faulty = FaultyStorage(inner, fail_at=1, fail_when=when)
        with pytest.raises(StorageError):
            await faulty.put_if_absent("key", b"x")
        assert await keys_in(inner) == effect


@bounded(10)
async def test_chosen_verbs_and_errors(name: str) -> None:
    error = Throttled(op="get", key="x", backend="test")
    faulty = FaultyStorage(MemoryStorage(name), fail_at=2, fail_verbs=["get"], error=error)
    await faulty.put("key", [memoryview(b"x")])
    await faulty.get("key")
    await faulty.stat("key")
    hits = [faulty.was_hit]
    with pytest.raises(Throttled) as raised:
        await faulty.get("key")
    assert raised.value is error
    assert [*hits, faulty.was_hit] == [False, True]
    await faulty.get("key")
    assert faulty.counts == {Verb.PUT: 1, Verb.GET: 3, Verb.STAT: 1}


@bounded(10)
async def test_a_store_that_is_gone(name: str) -> None:
    faulty = FaultyStorage(MemoryStorage(name), fail_at=2, is_lasting=True)
    writer = await faulty.writer("key", 1)
    for call in (writer.write_at(0, [memoryview(b"x")]), faulty.get("x"), keys_in(faulty)):
        with pytest.raises(StorageError, match="scripted"):
            await call
    await writer.abort()


@bounded(10)
async def test_errors_of_the_inner_storage_are_no_hits(name: str) -> None:
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, fail_when="after")
    with pytest.raises(ObjectNotFound):
        await faulty.get("missing")
    assert not faulty.was_hit


@bounded(10)
async def test_a_torn_write_writes_its_first_half(fs: Storage) -> None:
    views = [memoryview(b"ab"), memoryview(b"cd")]
    for key in ("async", "blocking"):
        faulty = FaultyStorage(fs, fail_at=1, fail_verbs=["write_at"], fail_when="halfway")
        writer = await faulty.writer(key, 4)
        if key == "async":
            with pytest.raises(StorageError, match="scripted"):
                await writer.write_at(0, views)
        else:
            with pytest.raises(StorageError, match="scripted"):
                writer.write_at_blocking(0, views)
        await writer.write_at(2, [memoryview(b"CD")])
        await writer.complete()
        assert await fs.get(key) == b"abCD"


@bounded(10)
async def test_what_comes_before_an_operation_is_waited_for(name: str) -> None:
    seen: list[tuple[Verb, str]] = []

    async def before(verb: Verb, key: str) -> None:
        seen.append((verb, key))
        if verb is Verb.GET:
            raise ObjectNotFound(op=verb, key=key, backend="", detail="hidden")

    faulty = FaultyStorage(MemoryStorage(name), before=before)
    await faulty.put("x", [memoryview(b"1")])
    with pytest.raises(ObjectNotFound, match="hidden"):
        await faulty.get("x")
    assert seen == [(Verb.PUT, "x"), (Verb.GET, "x")]
    assert not faulty.was_hit


@pytest.mark.parametrize("verb", sorted(set(Verb) - {Verb.COPYING_WRITER, Verb.COPY_FROM}))
@bounded(20)
async def test_a_stall_lasts_until_it_is_cancelled(fs: Storage, verb: Verb) -> None:
    faulty = FaultyStorage(fs, latency_s={verb: math.inf})
    assert faulty.capabilities.has_blocking_io is (verb not in ("write_at", "read_into"))
    is_finished = False

    async def run() -> None:
        nonlocal is_finished
        await work(faulty)
        is_finished = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await faulty.wait_stalled()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert faulty.was_hit
    assert not is_finished


@bounded(10)
async def test_latency(name: str) -> None:
    faulty = FaultyStorage(MemoryStorage(name), latency_s={"put": 0.05})
    start_s = anyio.current_time()
    await faulty.put("key", [memoryview(b"x")])
    assert anyio.current_time() - start_s >= 0.05


@pytest.mark.parametrize("anyio_backend", ["trio"])
@bounded(10)
async def test_latency_on_trio(name: str) -> None:
    await test_latency.__wrapped__(name)  # type: ignore[attr-defined]


def test_scripts_that_make_no_sense(name: str) -> None:
    inner = MemoryStorage(name)
    with pytest.raises(UsageError, match="fail_at counts from 1"):
        FaultyStorage(inner, fail_at=0)
    with pytest.raises(UsageError, match="kill_after counts from 1"):
        FaultyStorage(inner, kill_after=0)
    with pytest.raises(UsageError, match="'upload'.*verbs are put, "):
        FaultyStorage(inner, latency_s={"upload": math.inf})
    with pytest.raises(UsageError, match="bytes_per_s"):
        ThrottledStorage(inner, bytes_per_s=0)


# --- kill ------------------------------------------------------------------------------------

# What lies there after the k-th write, k = 0 to 5; the writer's file appears before its bytes.
STATES = [{}, {"1": b"x"}, {"1": b"x", "2": b"x"}, {"1": b"x", "2": b"x", "3": b"x"}]
STATES += [STATES[3], {"2": b"x", "3": b"x"}]


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.shared()


@pytest.mark.few
@pytest.mark.parametrize("how", ["blocking", "async"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("k", range(1, 7))
def test_the_process_dies_at_the_kth_write(
    zygote: Zygote, k: int, when: str, how: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    ending = zygote.call("write_and_die", root=str(root), k=k, when=when, how=how)
    found = {path.name: path.read_bytes() for path in root.glob("*")}
    if k == 6:
        assert ending.result() is None
        assert found == STATES[-1]
        return
    assert ending.was_killed, ending
    expected = dict(STATES[k - 1] if when == "before" else STATES[k])
    if (k, when) == (3, "before"):
        expected["3"] = b"\0"
    assert found == expected


# --- throttle --------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["trio"])
@bounded(10)
async def test_bytes_pay_in_turn(name: str) -> None:
    clock_s = 100.0
    storage = ThrottledStorage(MemoryStorage(name), bytes_per_s=1e6, clock=lambda: clock_s)
    await storage.put("a", [memoryview(bytes(10_000))])
    assert storage._free_at_s == pytest.approx(100.01)
    async with anyio.create_task_group() as tasks:
        for n in range(3):
            tasks.start_soon(storage.put_if_absent, f"{n}", bytes(10_000))
    assert storage._free_at_s == pytest.approx(100.04)
    clock_s = 200.0
    await storage.get("a")
    assert storage._free_at_s == pytest.approx(200.01)


@bounded(10)
async def test_throttling_takes_time(name: str) -> None:
    storage = ThrottledStorage(MemoryStorage(name), bytes_per_s=1e6)
    start_s = anyio.current_time()
    writer = await storage.writer("key", 50_000)
    await writer.write_at(0, [memoryview(bytes(50_000))])
    await writer.complete()
    assert anyio.current_time() - start_s >= 0.05
