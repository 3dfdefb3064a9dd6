"""What a save and a restore ask of a server: no byte twice, and nothing per chunk but the chunk."""

from __future__ import annotations

import re

from actorsnap.sync import Snapshot
from actorsnap.testing.proxy import FaultProxy
from tests.cloud.places import state
from tests.servers.ceph import CephServer

NUM_FLOATS = 64 << 18
"""Of four parts."""


def test_no_byte_travels_twice(ceph: CephServer, bucket: str, proxy: FaultProxy) -> None:
    url, options = ceph.url(bucket, "run"), ceph.storage_options(proxy)
    Snapshot.take(url, state(1, num_floats=NUM_FLOATS), storage_options=options)
    asked = proxy.exchanges()
    parts = [found[1] for each in asked if (found := re.search("partNumber=(.*?)&", each.target))]
    assert sorted(parts) == ["1", "2", "3", "4", "5"]
    # Before the first part: is there a snapshot, create the upload, and, once per client, four for
    # what the server checks. After the last: complete, the manifest and a look at it, once per
    # client three for conditional puts, the commit, and two that look for garbage.
    assert len(asked) - len(parts) <= 15
    proxy.forget()
    Snapshot(url, storage_options=options).restore(state(2, num_floats=NUM_FLOATS))
    asked = proxy.exchanges()
    assert sum(each.bytes_down for each in asked) < 4 * NUM_FLOATS + 20_000
    assert len(asked) <= 2 + 5
