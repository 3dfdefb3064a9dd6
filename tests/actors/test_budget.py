# SPDX-License-Identifier: Apache-2.0
"""The byte budget: first in, first out, never exceeded, nothing lost on cancellation."""

from __future__ import annotations

import random

import anyio
import pytest

from actorsnap.actors.budget import Budget, Lease, Purpose


async def test_leases_up_to_the_limit_and_waits_beyond() -> None:
    budget = Budget(10)
    first = await budget.lease(6)
    assert not budget.would_wait(4)
    assert budget.would_wait(5)
    with anyio.move_on_after(0.01) as scope:
        await budget.lease(5)
    assert scope.cancelled_caught
    first.release()
    with await budget.lease(5) as lease:
        assert len(lease.view) == 5
    assert budget.leased_bytes == 0


async def test_turns_are_taken_in_the_order_of_asking() -> None:
    budget = Budget(10)
    order: list[str] = []
    first = await budget.lease(9)

    async def ask(name: str, nbytes: int) -> None:
        lease = await budget.lease(nbytes)
        order.append(name)
        await anyio.lowlevel.checkpoint()
        lease.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "large", 10)
        await anyio.wait_all_tasks_blocked()
        # One byte is free, and it is not given to the small one: the large one came first.
        tasks.start_soon(ask, "small", 1)
        await anyio.wait_all_tasks_blocked()
        assert order == []
        first.release()
    assert order == ["large", "small"]


async def test_more_than_the_whole_budget_is_admitted_alone() -> None:
    budget = Budget(10)
    with await budget.lease(100) as lease:
        assert len(lease.view) == 100
        assert budget.would_wait(1)
    with await budget.lease(1):
        assert budget.would_wait(100)


async def test_a_cancelled_waiter_lets_the_next_one_through() -> None:
    budget = Budget(10)
    first = await budget.lease(5)
    got: list[Lease] = []

    async def ask_small() -> None:
        got.append(await budget.lease(5))

    async with anyio.create_task_group() as tasks:
        large = anyio.CancelScope()

        async def ask_large() -> None:
            with large:
                await budget.lease(10)

        tasks.start_soon(ask_large)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(ask_small)
        await anyio.wait_all_tasks_blocked()
        assert not got
        large.cancel()
    assert len(got) == 1
    got[0].release()
    first.release()
    assert budget.leased_bytes == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_grant_that_meets_a_cancellation_is_given_back() -> None:
    budget = Budget(10)
    first = await budget.lease(10)
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            # Whether the grant or the cancellation wins is the backend's affair.
            with await budget.lease(10):
                await anyio.sleep_forever()

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        first.release()  # grants
        tasks.cancel_scope.cancel()  # before the waiter runs
    assert budget.leased_bytes == 0


async def test_a_failed_allocation_leaves_nothing_leased() -> None:
    def allocate(nbytes: int) -> memoryview:
        raise MemoryError("none")

    budget = Budget(10, allocate=allocate)
    with pytest.raises(MemoryError):
        await budget.lease(3)
    assert budget.leased_bytes == 0


async def test_releasing_twice_is_harmless() -> None:
    budget = Budget(10)
    lease = await budget.lease(3)
    lease.release()
    lease.release()
    assert budget.leased_bytes == 0


async def test_a_raised_limit_admits_at_once() -> None:
    budget = Budget(1)
    first = await budget.lease(1)
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            (await budget.lease(4)).release()

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert budget.num_waiting == 1
        budget.limit_bytes = 5
    first.release()
    assert budget.num_waiting == 0


@pytest.mark.parametrize("seed", range(20))
async def test_never_above_the_limit_and_nothing_left(seed: int) -> None:
    rng = random.Random(seed)
    budget = Budget(100)
    async with anyio.create_task_group() as tasks:

        async def use(nbytes: int, rounds: int, patience: int) -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:

                    async def give_up() -> None:
                        for _ in range(patience):
                            await anyio.lowlevel.checkpoint()
                        scope.cancel()

                    inner.start_soon(give_up)
                    for _ in range(rounds):
                        with await budget.lease(nbytes):
                            leased = budget.leased_bytes
                            assert leased <= 100 or leased == nbytes
                            await anyio.lowlevel.checkpoint()
                    inner.cancel_scope.cancel()

        for _ in range(30):
            nbytes = rng.choice([1, 30, 99, 100, 150])
            tasks.start_soon(use, nbytes, rng.randrange(1, 5), rng.randrange(1, 40))
    assert budget.leased_bytes == 0
    assert budget.num_waiting == 0


async def test_reading_does_not_wait_for_saves_that_hold_everything() -> None:
    budget = Budget(10)
    saving = await budget.lease(10)
    async with anyio.create_task_group() as tasks:
        second: list[Lease] = []

        async def read() -> None:
            second.append(await budget.lease(4, Purpose.READING))

        with anyio.fail_after(60):
            first = await budget.lease(4, Purpose.READING)
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        # One at a time goes beyond the limit: the excess is a single read.
        assert not second
        assert budget.peak_bytes == 14
        first.release()
        await anyio.wait_all_tasks_blocked()
        second.pop().release()
    saving.release()
    assert budget.leased_bytes == 0


async def test_reading_alone_stays_within_the_limit() -> None:
    budget = Budget(10)
    leases = [await budget.lease(5, Purpose.READING) for _ in range(2)]
    with anyio.move_on_after(0.01) as scope:
        await budget.lease(5, Purpose.READING)
    assert scope.cancelled_caught
    for lease in leases:
        lease.release()
    assert budget.leased_bytes == 0


async def test_compressing_does_not_wait_for_what_is_staged() -> None:
    """It is what frees that. And reading waits for neither."""
    budget = Budget(10)
    staged = await budget.lease(10)
    with anyio.fail_after(60):
        compressing = await budget.lease(4, Purpose.COMPRESSING)
        reading = await budget.lease(3, Purpose.READING)
        decompressing = await budget.lease(2, Purpose.DECOMPRESSING)
    for purpose in Purpose:
        with anyio.move_on_after(0.01) as scope:
            await budget.lease(1, purpose)
        assert scope.cancelled_caught
    assert budget.peak_bytes == 19
    for lease in (staged, compressing, reading, decompressing):
        lease.release()
    assert budget.leased_bytes == 0
