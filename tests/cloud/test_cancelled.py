# SPDX-License-Identifier: Apache-2.0
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
from tests.api.places import assert_idle
from tests.cloud.places import Store, is_state, keys_of, requests_of, state, uploads_of
from tests.conftest import LeakCheck
from tests.support.proxy import Fault, FaultProxy, LoseAnswer, Rule, Stall, Way

SOON_S = 20.0
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


@pytest.mark.few
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        pytest.param(Stall(way=Way.UP, after_bytes=MIB), "part", id="up"),
        pytest.param(Stall(way=Way.UP), "create", id="create"),
        pytest.param(Stall(way=Way.UP), "complete", id="complete"),
        pytest.param(LoseAnswer(), "part", id="waiting to try again"),
    ],
)
async def test_a_save(
    store: Store, store_proxy: FaultProxy, no_leaks: LeakCheck, fault: Fault, what: str
) -> None:
    bucket = store.make_bucket()
    url, options = store.url(bucket, "run"), store.storage_options(store_proxy)
    await Snapshot.take(url, state(1), storage_options=options)
    before = keys_of(store, bucket)
    with store_proxy.fault(fault, **getattr(requests_of(store), what)) as rule:
        took_s = await cancelled_when_hit(
            rule, Snapshot.take(url, state(2), storage_options=options, overwrite=True)
        )
    assert took_s < SOON_S
    assert keys_of(store, bucket) == before
    assert uploads_of(store, bucket) == []
    assert_idle()
    target = state(-1)
    await Snapshot(url, storage_options=options).restore(target)
    assert is_state(target, 1)
    await asyncio.to_thread(shutdown)


@pytest.mark.few(1)
async def test_a_restore(store: Store, store_proxy: FaultProxy, no_leaks: LeakCheck) -> None:
    url = store.url(store.make_bucket(), "run")
    options = store.storage_options(store_proxy)
    await Snapshot.take(url, state(1), storage_options=options)
    snapshot, target = Snapshot(url, storage_options=options), state(-1)
    stall = Stall(way=Way.DOWN, after_bytes=MIB)
    with store_proxy.fault(stall, **requests_of(store).data) as rule:
        assert await cancelled_when_hit(rule, snapshot.restore(target)) < SOON_S
    assert_idle()
    await snapshot.restore(target)
    assert is_state(target, 1)
    await asyncio.to_thread(shutdown)
