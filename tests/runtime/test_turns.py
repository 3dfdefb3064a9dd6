# SPDX-License-Identifier: Apache-2.0
"""Calls of several tasks in order: what waits, what an error does, who shares a trip."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from actorsnap.runtime.manifests import Turns
from actorsnap.storage.base import for_each
from actorsnap.testing import run_blocking_in_thread


@pytest.mark.parametrize("seed", range(20))
async def test_calls_are_in_order_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    num_turns = 60
    failing = set(rng.sample(range(num_turns), 5))
    trips = 0
    seen: list[int] = []
    is_running = False

    async def run_blocking(fn: Callable[..., Any], /, *args: Any) -> Any:
        nonlocal trips
        trips += 1
        return await run_blocking_in_thread(fn, *args)

    turns = Turns(run_blocking)

    def call(turn: int) -> int:
        nonlocal is_running
        assert not is_running
        is_running = True
        if turn not in failing:
            seen.append(turn)
        is_running = False
        if turn in failing:
            failing.remove(turn)
            raise ValueError(turn)
        return -turn

    async def perform(turn: int) -> None:
        for _ in range(rng.randrange(12)):
            await anyio.lowlevel.checkpoint()
        try:
            found = await turns.run(turn, partial(call, turn))
        except ValueError:
            found = await turns.run(turn, partial(call, turn))
        assert found == -turn

    with anyio.fail_after(20):
        await for_each(range(num_turns), perform, at_once=rng.randrange(1, 17))
    assert seen == list(range(num_turns))
    assert trips <= num_turns + 5


async def test_ready_calls_share_a_trip() -> None:
    trips: list[int] = []

    async def run_blocking(fn: Callable[..., Any], /, *args: Any) -> Any:
        trips.append(len(args[0]))
        return await run_blocking_in_thread(fn, *args)

    turns = Turns(run_blocking)
    async with anyio.create_task_group() as tasks:
        for turn in reversed(range(8)):
            tasks.start_soon(turns.run, turn, lambda: None)
    assert trips == [8]


async def test_an_error_ends_those_after_it() -> None:
    turns = Turns(run_blocking_in_thread)
    seen: list[int] = []

    def call(turn: int) -> None:
        seen.append(turn)
        if turn == 3:
            raise ValueError

    with anyio.fail_after(20), pytest.raises(ExceptionGroup) as caught:
        await for_each(range(20), lambda turn: turns.run(turn, partial(call, turn)), at_once=8)
    assert caught.group_contains(ValueError)
    assert seen == [0, 1, 2, 3]
