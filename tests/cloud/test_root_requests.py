# SPDX-License-Identifier: Apache-2.0
"""What a manager asks of S3 does not grow with the snapshots at its root, but by pages of lists."""

from __future__ import annotations

from typing import Any

import pytest

from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from tests.cloud.roots import app_state, fill, requests_of
from tests.servers.ceph import CephServer
from tests.support.proxy import FaultProxy

LOOK = {"LIST with delimiter": 1, "LIST .manager/": 1, "LIST uploads": 1}
NUM = 25


@pytest.fixture
def settings(ceph: CephServer, bucket: str, proxy: FaultProxy) -> dict[str, Any]:
    """Of a manager at a root of many snapshots, of five runs."""
    fill(ceph, bucket, num_snapshots=NUM, num_runs=5)
    return {
        "root": ceph.url(bucket, "run"),
        "app_state": app_state(),
        "save": every.steps(1),
        "keep": keep.all(),
        "storage_options": ceph.storage_options(proxy),
    }


def test_the_newest_is_found_by_lists_alone(settings: dict[str, Any], proxy: FaultProxy) -> None:
    with CheckpointManager(**settings) as manager:
        found = manager.restore_latest()
    assert found is not None
    assert found.step == 10 * (NUM - 1)
    asked = requests_of(proxy.exchanges())
    # Verified, then restored: its commit object, manifest and data.
    restored = {"GET commit object": 2, "GET object": 3, "LIST of objects": 1}
    assert asked == LOOK | restored


def test_a_pass(settings: dict[str, Any], proxy: FaultProxy) -> None:
    with CheckpointManager(**settings) as manager:
        manager.restore_latest()
        manager.save(10 * NUM)
        manager.prune()
        proxy.forget()
        manager.prune()
        assert requests_of(proxy.exchanges()) == LOOK
        manager.record(0, {"val": 1.0})
        manager.pin(10, "paper")
        proxy.forget()
        manager.prune(keep.last(NUM))
        # Two marks are new. One step goes: an intent, a second look, its commit object, its
        # folder, the intent and the mark. Deleting looks for unfinished uploads.
        assert requests_of(proxy.exchanges()) == {
            "LIST with delimiter": 1,
            "LIST .manager/": 2,
            "LIST of objects": 1,
            "LIST uploads": 4,
            "GET .manager/": 2,
            "GET commit object": 1,
            "HEAD .manager/": 1,
            "PUT .manager/": 1,
            "DELETE of many": 3,
        }
        proxy.forget()
        deleted = manager.prune(keep.last(1)).deleted
        assert len(deleted) == NUM - 3
        assert requests_of(proxy.exchanges()) == {
            "LIST with delimiter": 1,
            "LIST .manager/": 2,
            "LIST of objects": len(deleted),
            "LIST uploads": 4,
            "GET commit object": len(deleted),
            "HEAD .manager/": 1,
            "PUT .manager/": len(deleted),
            "DELETE of many": 3,
        }
        # Pinned; restored from, which is one of two verified ones; the newest.
        assert manager.all_steps() == [10, 10 * (NUM - 1), 10 * NUM]
