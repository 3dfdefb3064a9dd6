# SPDX-License-Identifier: Apache-2.0
"""Policies around a storage."""

from __future__ import annotations

import itertools
import logging
import math
import pickle
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import (
    ObjectExists,
    ObjectNotFound,
    StorageError,
    Throttled,
    UsageError,
)
from actorsnap.storage import (
    AdaptiveStorage,
    ObjectInfo,
    RetryPolicy,
    RetryStorage,
    Storage,
    StorageContext,
    Wrapper,
    open_storage,
)
from actorsnap.storage.memory import MemoryStorage, forget_space
from actorsnap.storage.wrapper import close_after
from actorsnap.testing import (
    FaultyStorage,
    StorageConformance,
    bounded,
    run_blocking_in_thread,
)
from actorsnap.testing.conformance import MakeStorage, keys_in
from actorsnap.testing.faults import Verb

T = TypeVar("T")
P = ParamSpec("P")

_numbers = itertools.count()

POLICY = RetryPolicy(max_attempts=4, first_delay_s=1.0, max_delay_s=3.0)
BUSY = Throttled(op="any", key="any", backend="test")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-wrappers-{next(_numbers)}"
    yield name
    forget_space(name)


class Sleeps:
    """Takes the place of sleep; remembers, and lets others run."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []

    async def __call__(self, delay_s: float) -> None:
        self.delays_s.append(delay_s)
        await anyio.lowlevel.checkpoint()


def retrying(inner: Storage, sleep: Callable[[float], Awaitable[None]]) -> RetryStorage:
    return RetryStorage(inner, policy=POLICY, uniform=lambda: 0.0, sleep=sleep)


# --- the contract holds through each wrapper -------------------------------------------------


class WrappedConformance(StorageConformance):
    num_many = 300
    num_examples = 10

    # Other loops are the backends' tests' matter: this class runs them often enough.
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    def wrap(self, inner: Storage) -> Storage:
        raise NotImplementedError

    @pytest.fixture(params=["memory", "fs"])
    def make_storage(
        self, name: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> MakeStorage:
        urls = {"memory": f"memory://{name}", "fs": f"fs://{tmp_path_factory.mktemp('root')}/x"}
        url = urls[request.param]
        context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
        return lambda: self.wrap(open_storage(url, context))


@pytest.mark.few
class TestWrapper(WrappedConformance):
    def wrap(self, inner: Storage) -> Storage:
        return Wrapper(inner)


@pytest.mark.few
class TestAdaptive(WrappedConformance):
    def wrap(self, inner: Storage) -> Storage:
        return AdaptiveStorage(inner, max_operations=3, first_operations=2)


@pytest.mark.few
class TestRetry(WrappedConformance):
    def wrap(self, inner: Storage) -> Storage:
        return retrying(inner, Sleeps())


@pytest.mark.few
class TestRetryOfFailures(WrappedConformance):
    """The contract holds although many operations fail, before or after their effect."""

    # Of a writer that was opened although the call failed, a file system keeps the file, and
    # the retry rightly says that it exists. Memory only, therefore.
    @pytest.fixture
    def make_storage(self, name: str) -> MakeStorage:
        # So many tries that no test runs out of them.
        policy = RetryPolicy(max_attempts=200, first_delay_s=0.0, max_delay_s=0.0)
        return lambda: RetryStorage(Flaky(MemoryStorage(name)), policy=policy, sleep=Sleeps())


FLAKY = {"put", "put_if_absent", "writer", "write_at", "get", "read_into", "delete", "stat"}


class Flaky(Wrapper):
    """Fails four of ten operations by a fixed seed, half of them after their effect."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._random = random.Random(0)

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op not in FLAKY:
            return await call(*args, **kwargs)
        number = self._random.random()
        if number < 0.2:
            raise Throttled(op="any", key="any", backend="test")
        result = await call(*args, **kwargs)
        if number < 0.4:
            raise Throttled(op="any", key="any", backend="test")
        return result


# --- limit -----------------------------------------------------------------------------------


class Gauge(Wrapper):
    """Counts the operations that run at once, and holds each until told."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.num_running = 0
        self.max_running = 0
        self.go = anyio.Event()

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self.go.wait()
            await self.inner.put(key, views)
        finally:
            self.num_running -= 1


@bounded(10)
async def test_no_more_operations_than_allowed(name: str) -> None:
    gauge = Gauge(MemoryStorage(name))
    storage = AdaptiveStorage(gauge, max_operations=3)
    async with anyio.create_task_group() as tasks:
        for n in range(10):
            tasks.start_soon(storage.put, f"{n}", [memoryview(b"x")])
        await anyio.wait_all_tasks_blocked()
        assert gauge.num_running == 3
        assert storage.statistics().num_waiting == 7
        gauge.go.set()
    assert gauge.max_running == 3
    assert len(await keys_in(storage)) == 10


@bounded(10)
async def test_cancelled_operations_give_their_turn_back(name: str) -> None:
    gauge = Gauge(MemoryStorage(name))
    storage = AdaptiveStorage(gauge, max_operations=1)
    async with anyio.create_task_group() as tasks:
        for n in range(3):
            tasks.start_soon(storage.put, f"{n}", [memoryview(b"x")])
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    gauge.go.set()
    await storage.put("after", [memoryview(b"x")])
    assert await keys_in(storage) == ["after"]


@bounded(10)
async def test_abort_does_not_wait_for_a_turn(name: str) -> None:
    gauge = Gauge(MemoryStorage(name))
    storage = AdaptiveStorage(gauge, max_operations=1)
    writer = await storage.writer("key", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(storage.put, "held", [memoryview(b"x")])
        await anyio.wait_all_tasks_blocked()
        await writer.abort()
        gauge.go.set()


# --- retry -----------------------------------------------------------------------------------


@given(
    max_attempts=st.integers(1, 2000),
    delays_s=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)).map(sorted),
    num_failures=st.integers(1, 3000),
    fraction=st.floats(0, 1, exclude_max=True),
)
def test_a_policy_stays_in_its_bounds(
    max_attempts: int, delays_s: list[float], num_failures: int, fraction: float
) -> None:
    policy = RetryPolicy(
        max_attempts=max_attempts,
        first_delay_s=delays_s[0],
        max_delay_s=delays_s[1],
        max_total_s=math.inf,
    )
    delay_s = policy.delay_s(num_failures, fraction)
    assert (delay_s is None) == (num_failures >= max_attempts)
    if delay_s is not None:
        backoff_s = min(delays_s[0] * 2.0 ** min(num_failures - 1, 64), delays_s[1])
        assert backoff_s / 2 <= delay_s <= backoff_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"first_delay_s": -1.0},
        {"max_delay_s": 0.5},
        {"max_total_s": -1.0},
        {"max_total_s": math.nan},
    ],
)
def test_policies_that_make_no_sense(wrong: dict[str, float]) -> None:
    fields = {"max_attempts": 1, "first_delay_s": 1.0, "max_delay_s": 1.0, **wrong}
    with pytest.raises(UsageError):
        RetryPolicy(**fields)  # type: ignore[arg-type]


@bounded(10)
async def test_waits_grow_to_the_cap_and_then_the_error_comes(name: str) -> None:
    sleeps = Sleeps()
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, is_lasting=True, error=BUSY)
    with pytest.raises(Throttled) as raised:
        await retrying(faulty, sleeps).get("key")
    assert raised.value is BUSY
    assert faulty.counts == {Verb.GET: 4}
    # Uniform is 0.0, so each wait is half of the backoff: 1, 2, and 4 capped to 3.
    assert sleeps.delays_s == [0.5, 1.0, 1.5]


@bounded(10)
async def test_the_second_retry_of_a_call_is_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, is_lasting=True, error=BUSY)
    with caplog.at_level(logging.INFO, "actorsnap"), pytest.raises(Throttled):
        await retrying(faulty, Sleeps()).get("key")
    levels = [r.levelname for r in caplog.records if "trying again" in r.getMessage()]
    assert levels == ["INFO", "WARNING", "INFO"]


@bounded(10)
async def test_the_warning_is_repeated_now_and_then(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = itertools.count(0.0, 6.0)
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, is_lasting=True, error=BUSY)
    storage = RetryStorage(
        faulty,
        policy=RetryPolicy(max_attempts=10, first_delay_s=1.0, max_delay_s=3.0),
        uniform=lambda: 0.0,
        sleep=Sleeps(),
        clock=lambda: next(now_s),
    )
    with caplog.at_level(logging.WARNING, "actorsnap"), pytest.raises(Throttled):
        await storage.get("key")
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 3


@bounded(10)
async def test_calls_that_fail_together_warn_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, is_lasting=True, error=BUSY)
    storage = retrying(faulty, Sleeps())
    failed: list[str] = []

    async def get(key: str) -> None:
        with pytest.raises(Throttled):
            await storage.get(key)
        failed.append(key)

    with caplog.at_level(logging.WARNING, "actorsnap"):
        async with anyio.create_task_group() as tasks:
            for key in ("a", "b", "c"):
                tasks.start_soon(get, key)
    assert len(failed) == 3
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 1


def test_the_defaults_outlast_a_minute_however_the_jitter_falls() -> None:
    policy = RetryPolicy()
    elapsed_s, num_failures = 0.0, 1
    while (delay_s := policy.delay_s(num_failures, 0.0, elapsed_s=elapsed_s)) is not None:
        elapsed_s, num_failures = elapsed_s + delay_s, num_failures + 1
    assert 60 < elapsed_s < 120


@bounded(10)
async def test_the_time_is_bounded_besides_the_tries(name: str) -> None:
    now_s = 100.0

    async def sleep(delay_s: float) -> None:
        nonlocal now_s
        now_s += delay_s

    policy = RetryPolicy(max_attempts=1000, first_delay_s=1.0, max_delay_s=4.0, max_total_s=30.0)
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, is_lasting=True, error=BUSY)
    storage = RetryStorage(
        faulty, policy=policy, uniform=lambda: 0.5, sleep=sleep, clock=lambda: now_s
    )
    with pytest.raises(Throttled):
        await storage.get("key")
    # Waits of 0.75, 1.5, then 3 each.
    assert now_s == 100.0 + 0.75 + 1.5 + 9 * 3.0
    assert faulty.counts == {Verb.GET: 12}


@pytest.mark.parametrize(
    ("asked_s", "delays_s"), [(0.1, [0.5]), (7.5, [7.5]), (119.0, [119.0]), (121.0, [])]
)
@bounded(10)
async def test_the_storage_may_ask_for_longer_waits(
    name: str, asked_s: float, delays_s: list[float]
) -> None:
    sleeps = Sleeps()
    busy = Throttled(op="any", key="any", backend="test", retry_after_s=asked_s)
    assert pickle.loads(pickle.dumps(busy)).retry_after_s == asked_s
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, error=busy)
    storage = retrying(faulty, sleeps)
    if delays_s:
        await storage.put("key", [memoryview(b"x")])
    else:
        with pytest.raises(Throttled):
            await storage.put("key", [memoryview(b"x")])
    assert sleeps.delays_s == delays_s


@bounded(10)
async def test_only_retryable_errors_are_retried(name: str) -> None:
    sleeps = Sleeps()
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1)
    storage = retrying(faulty, sleeps)
    with pytest.raises(StorageError, match="scripted fault"):
        await storage.put("key", [memoryview(b"x")])
    with pytest.raises(ObjectNotFound):
        await storage.get("key")
    assert faulty.was_hit
    assert faulty.counts == {Verb.PUT: 1, Verb.GET: 1}
    assert sleeps.delays_s == []


@pytest.mark.parametrize("verb", list(Verb))
@bounded(10)
async def test_each_verb_gets_over_one_failure(name: str, verb: Verb) -> None:
    if verb is Verb.ABORT:
        pytest.skip("abort does not fail by contract")
    if verb is Verb.COPY_FROM:
        pytest.skip("the memory copies nothing: see tests/api/test_export.py")
    sleeps = Sleeps()
    inner = MemoryStorage(name)
    await inner.put("older", [memoryview(b"older")])
    faulty = FaultyStorage(inner, fail_at=1, fail_verbs=[verb], error=BUSY)
    storage = retrying(faulty, sleeps)
    assert await keys_in(storage) == ["older"]
    await storage.put("put", [memoryview(b"put")])
    await storage.put_if_absent("absent", b"absent")
    writer = await storage.writer("written", 2)
    joined = await storage.join_writer(writer.token)
    await writer.write_at(0, [memoryview(b"w")])
    await joined.write_at(1, [memoryview(b"j")])
    assert not await writer.reuse(0, [memoryview(b"w")], 0)
    assert await storage.copying_writer("copy", 2, source=inner, sample="older") is None
    await joined.release()
    await writer.complete()
    assert await storage.get("written") == b"wj"
    target = bytearray(3)
    await storage.read_into("put", 0, [memoryview(target)])
    assert target == b"put"
    assert (await storage.stat("absent")).size == 6
    await storage.delete(["older"])
    assert await keys_in(storage) == ["absent", "put", "written"]
    assert await storage.list_folders() == []
    assert await storage.delete_folder("missing") == []
    assert faulty.was_hit
    assert sleeps.delays_s == [0.5]


@bounded(10)
async def test_put_if_absent_whose_answer_was_lost_is_a_success(name: str) -> None:
    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, fail_when="after", error=BUSY)
    await retrying(faulty, Sleeps()).put_if_absent("key", b"mine")
    assert faulty.counts == {Verb.PUT_IF_ABSENT: 2, Verb.GET: 1}
    assert await faulty.get("key") == b"mine"


@bounded(10)
async def test_put_if_absent_that_lost_after_a_failure(name: str) -> None:
    inner = MemoryStorage(name)
    await inner.put("key", [memoryview(b"theirs")])
    faulty = FaultyStorage(inner, fail_at=1, error=BUSY)
    with pytest.raises(ObjectExists):
        await retrying(faulty, Sleeps()).put_if_absent("key", b"mine")
    assert faulty.was_hit
    assert await inner.get("key") == b"theirs"


@bounded(10)
async def test_put_if_absent_of_equal_content_without_a_failure_loses(name: str) -> None:
    storage = retrying(MemoryStorage(name), Sleeps())
    await storage.put_if_absent("key", b"same")
    with pytest.raises(ObjectExists):
        await storage.put_if_absent("key", b"same")


class FailingList(Wrapper):
    """Its ``list`` fails after two items, then after four, and so on."""

    num_lists = 0

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        self.num_lists += 1
        left = 2 * self.num_lists
        async with close_after(self.inner.list(prefix)) as infos:
            async for info in infos:
                if not left:
                    raise BUSY
                left -= 1
                yield info


@bounded(10)
async def test_list_goes_on_where_it_failed(name: str) -> None:
    inner = MemoryStorage(name)
    keys = [f"{n}" for n in range(9)]
    for key in keys:
        await inner.put(key, [memoryview(b"x")])
    sleeps = Sleeps()
    failing = FailingList(inner)
    assert await keys_in(retrying(failing, sleeps)) == keys
    assert failing.num_lists == 5
    # Each failure came after progress, so the waits did not grow.
    assert sleeps.delays_s == [0.5] * 4


@bounded(10)
async def test_cancellation_ends_a_wait(name: str) -> None:
    waits = anyio.Event()

    async def sleep(delay_s: float) -> None:
        waits.set()
        await anyio.sleep_forever()

    faulty = FaultyStorage(MemoryStorage(name), fail_at=1, error=BUSY)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(retrying(faulty, sleep).put, "key", [memoryview(b"x")])
        await waits.wait()
        tasks.cancel_scope.cancel()
    assert faulty.counts == {Verb.PUT: 1}
