"""Cancellation in the middle of a transfer: at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from actorsnap import Snapshot
from actorsnap.runtime.host import shutdown
from actorsnap.testing.proxy import Fault, FaultProxy, LoseAnswer, Rule, Stall, Way
from tests.api.places import assert_idle
from tests.cloud.places import is_state, keys_of, state, uploads_of
from tests.conftest import LeakCheck
from tests.servers.ceph import CephServer

SOON_S = 10.0
MIB = 1 << 20


async def cancelled_when_hit(rule: Rule, work: Coroutine[Any, Any, Any]) -> float:
    """Cancels ``work`` in the middle of the fault; returns how long that took, in seconds."""
    task = asyncio.create_task(work)
    with anyio.fail_after(60):
        while not rule.num_hits:
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    return time.monotonic() - began_s


@pytest.mark.parametrize(
    ("fault", "method", "pattern"),
    [
        pytest.param(Stall(way=Way.UP, after_bytes=MIB), "PUT", "partNumber=2", id="up"),
        pytest.param(Stall(way=Way.UP), "POST", "uploads", id="create"),
        pytest.param(Stall(way=Way.UP), "POST", "uploadId=", id="complete"),
        pytest.param(LoseAnswer(), "PUT", "partNumber=", id="waiting to try again"),
    ],
)
async def test_a_save(
    ceph: CephServer,
    bucket: str,
    proxy: FaultProxy,
    no_leaks: LeakCheck,
    fault: Fault,
    method: str,
    pattern: str,
) -> None:
    url, options = ceph.url(bucket, "run"), ceph.storage_options(proxy)
    await Snapshot.take(url, state(1), storage_options=options)
    before = keys_of(ceph, bucket)
    with proxy.fault(fault, method=method, pattern=pattern) as rule:
        took_s = await cancelled_when_hit(
            rule, Snapshot.take(url, state(2), storage_options=options, overwrite=True)
        )
    assert took_s < SOON_S
    assert keys_of(ceph, bucket) == before
    assert uploads_of(ceph, bucket) == []
    assert_idle()
    target = state(-1)
    await Snapshot(url, storage_options=options).restore(target)
    assert is_state(target, 1)
    await asyncio.to_thread(shutdown)


async def test_a_restore(
    ceph: CephServer, bucket: str, proxy: FaultProxy, no_leaks: LeakCheck
) -> None:
    url, options = ceph.url(bucket, "run"), ceph.storage_options(proxy)
    await Snapshot.take(url, state(1), storage_options=options)
    snapshot, target = Snapshot(url, storage_options=options), state(-1)
    stall = Stall(way=Way.DOWN, after_bytes=MIB)
    with proxy.fault(stall, method="GET", pattern="model") as rule:
        assert await cancelled_when_hit(rule, snapshot.restore(target)) < SOON_S
    assert_idle()
    await snapshot.restore(target)
    assert is_state(target, 1)
    await asyncio.to_thread(shutdown)
