# SPDX-License-Identifier: Apache-2.0
"""An asynchronous file system of fsspec, on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorsnap.sync import Snapshot
from tests.cloud.places import is_state, keys_of, state
from tests.servers.ceph import CephServer


# s3fs reads its configuration on the event loop.
@pytest.mark.blocking
def test_s3_by_its_file_system(ceph: CephServer, bucket: str, tmp_path: Path) -> None:
    url = f"fsspec+{ceph.url(bucket, 'run')}"
    options = {
        "key": ceph.access_key,
        "secret": ceph.secret_key,
        "endpoint_url": ceph.endpoint,
    }
    for seed in (1, 2):
        Snapshot.take(url, state(seed), storage_options=options, overwrite=seed == 2)
    snapshot = Snapshot(url, storage_options=options)
    assert not snapshot.verify("full").problems
    target = state(3)
    snapshot.restore(target)
    assert is_state(target, 2)
    there = str(tmp_path / "copy")
    snapshot.copy_to(there)
    target = state(3)
    Snapshot(there).restore(target)
    assert is_state(target, 2)
    snapshot.delete()
    assert keys_of(ceph, bucket) == []
