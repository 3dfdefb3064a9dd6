# SPDX-License-Identifier: Apache-2.0
"""Groups of an exchange's own: how their ranks meet, and what they leave at the store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from actorsnap.runtime.broadcast import Broadcaster
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.script import run_sync
from tests.support.store_server import serve_store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return serve_store()


def on_loop(work: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    def script() -> Script[None]:
        yield work

    run_sync(script(), name="test")


def members(host: Host, store: Any, num_ranks: int) -> list[Broadcaster]:
    return [
        Broadcaster(
            host, lambda: store, name="x/y", rank=rank, num_ranks=num_ranks, lost_after_s=1.0
        )
        for rank in range(num_ranks)
    ]


def test_everybody_gets_it_and_nothing_is_left(store: Any) -> None:
    # No more ranks than any runtime has threads: each waits in one of them.
    memories = [bytearray([rank] * 100_000) for rank in range(2)]

    async def run(rank: int, member: Broadcaster) -> None:
        await member.meet()
        for source in (1, 0):
            await member.broadcast(memoryview(memories[rank])[source * 1000 :][:1000], source)
        await member.close(is_done=True)

    async def work(host: Host) -> None:
        async with anyio.create_task_group() as tasks:
            for rank, member in enumerate(members(host, store, 2)):
                tasks.start_soon(run, rank, member)

    on_loop(work)
    for rank, memory in enumerate(memories):
        assert memory == bytes(1000) + b"\1" * 1000 + bytes([rank] * 98_000)
    assert store.list_keys() == []


def test_who_waits_for_a_rank_that_does_not_come_goes_at_once(store: Any) -> None:
    took_s: list[float] = []

    async def work(host: Host) -> None:
        come = members(host, store, 3)[1:]
        begun_s = anyio.current_time()
        with anyio.move_on_after(0.5):
            async with anyio.create_task_group() as tasks:
                for member in come:
                    tasks.start_soon(member.meet)
        took_s.append(anyio.current_time() - begun_s)
        assert len(store.list_keys()) == 3
        for member in come:
            await member.close(is_done=False)

    on_loop(work)
    assert took_s[0] < 5
    assert store.list_keys() == []


def test_a_broadcast_ends_when_another_rank_leaves(store: Any) -> None:
    """Not only by its timeout, which is half a minute."""

    async def work(host: Host) -> None:
        stays, leaves = members(host, store, 2)
        memory = memoryview(bytearray(10))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leaves.meet)
            await stays.meet()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leaves.broadcast, memory, 0)
            await stays.broadcast(memory, 0)

        async def leave() -> None:
            await anyio.sleep(0.2)
            await leaves.close(is_done=False)

        begun_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            with pytest.raises(RuntimeError):
                await stays.broadcast(memory, 1)
        assert anyio.current_time() - begun_s < 15
        await stays.close(is_done=False)

    on_loop(work)
    assert store.list_keys() == []
