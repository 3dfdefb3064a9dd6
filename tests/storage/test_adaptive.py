# SPDX-License-Identifier: Apache-2.0
"""The number of operations at a time follows what the storage bears, under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio.testing

from actorsnap.errors import StorageError, Throttled, UsageError
from actorsnap.storage import AdaptiveStorage, RetryPolicy, RetryStorage, Storage, Wrapper
from actorsnap.storage.memory import MemoryStorage

ROUND_TRIP_S = 0.1


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Server(Wrapper):
    """Answers after a round trip; refuses what comes while ``capacity()`` are under way."""

    def __init__(self, capacity: Callable[[], float]) -> None:
        super().__init__(MemoryStorage("adaptive"))
        self._capacity = capacity
        self.error: StorageError = Throttled(op="put", key="", backend="test")
        self.num_running = self.max_running = self.num_refused = self.num_done = 0

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        is_refused = self.num_running >= self._capacity()
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await anyio.sleep(ROUND_TRIP_S)
        finally:
            self.num_running -= 1
        if is_refused:
            self.num_refused += 1
            raise self.error
        self.num_done += 1


def unlimited() -> float:
    return 10**9


async def put_many(storage: Storage, count: int) -> int:
    """Puts so many at once; returns how many failed."""
    num_failed = 0

    async def put() -> None:
        nonlocal num_failed
        try:
            await storage.put("key", [])
        except StorageError:
            num_failed += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(put)
    return num_failed


async def test_the_level_rises_by_about_one_a_round_trip_up_to_the_highest() -> None:
    server = Server(unlimited)
    storage = AdaptiveStorage(server, max_operations=12, first_operations=4)
    began_s = anyio.current_time()
    await put_many(storage, 4 + 5 + 6 + 7)
    assert server.max_running in (6, 7)
    assert anyio.current_time() - began_s == pytest.approx(4 * ROUND_TRIP_S, abs=ROUND_TRIP_S)
    await put_many(storage, 300)
    assert server.max_running == 12
    assert storage.statistics().level == 12


async def test_the_level_stays_where_it_does_not_bind() -> None:
    storage = AdaptiveStorage(Server(unlimited), max_operations=100, first_operations=4)
    for _ in range(50):
        await put_many(storage, 3)
    assert storage.statistics().level == 4


async def test_one_round_trip_of_refusals_halves_the_level_once() -> None:
    storage = AdaptiveStorage(Server(lambda: 0), max_operations=16, first_operations=16)
    assert await put_many(storage, 16) == 16
    statistics = storage.statistics()
    assert (statistics.level, statistics.num_decreases, statistics.num_throttled) == (8, 1, 16)
    assert statistics.num_running == statistics.num_waiting == 0


async def test_the_level_never_falls_below_one_and_comes_back() -> None:
    is_away = True
    server = Server(lambda: 0 if is_away else unlimited())
    storage = AdaptiveStorage(server, max_operations=16)
    await put_many(storage, 60)
    assert storage.statistics().level == 1
    is_away, server.max_running = False, 0
    await put_many(storage, 200)
    assert storage.statistics().level == server.max_running == 16


async def test_other_failures_are_no_reason_to_slow_down() -> None:
    server = Server(lambda: 0)
    server.error = StorageError(op="put", key="", backend="test", retryable=True)
    storage = AdaptiveStorage(server, max_operations=16)
    assert await put_many(storage, 60) == 60
    assert storage.statistics().level == 8
    assert storage.statistics().num_throttled == 0


@pytest.mark.parametrize("capacity", [1, 3, 10])
async def test_a_server_is_kept_busy_and_seldom_asked_too_much(capacity: int) -> None:
    server = Server(lambda: capacity)
    adaptive = AdaptiveStorage(server, max_operations=64, first_operations=64)
    policy = RetryPolicy(max_attempts=100, first_delay_s=0.1, max_delay_s=1.0)
    storage = RetryStorage(adaptive, policy=policy, uniform=random.Random(0).random)
    began_s = anyio.current_time()
    assert await put_many(storage, 400) == 0
    assert server.num_done == 400
    best_s = 400 / capacity * ROUND_TRIP_S
    assert anyio.current_time() - began_s < 2.5 * best_s
    # Every climb ends in a refusal or a few; at one at a time, every second operation does.
    assert server.num_refused - 64 < 400 * max(0.1, 1 / capacity)


async def test_half_a_minute_of_refusals_is_survived_with_the_default_policy() -> None:
    server = Server(lambda: 0 if 5 <= anyio.current_time() - began_s < 35 else unlimited())
    began_s = anyio.current_time()
    for uniform in (lambda: 0.0, random.Random(1).random):
        began_s = anyio.current_time()
        storage = RetryStorage(
            AdaptiveStorage(server, max_operations=16), policy=RetryPolicy(), uniform=uniform
        )
        assert await put_many(storage, 2000) == 0
        assert 35 < anyio.current_time() - began_s < 100
    assert server.num_refused < 1000


async def test_a_cancelled_operation_gives_its_turn_back() -> None:
    storage = AdaptiveStorage(Server(unlimited), max_operations=2, first_operations=2)
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(storage.put, "key", [])
        await anyio.wait_all_tasks_blocked()
        assert storage.statistics().num_running == 2
        assert storage.statistics().num_waiting == 3
        tasks.cancel_scope.cancel()
    assert await put_many(storage, 5) == 0
    assert storage.statistics().num_running == 0


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0)])
def test_levels_that_make_no_sense(wrong: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        AdaptiveStorage(Server(unlimited), max_operations=wrong[0], first_operations=wrong[1])
