# SPDX-License-Identifier: Apache-2.0
"""What a save and a restore ask of a server: no byte twice, and nothing per chunk but the chunk."""

from __future__ import annotations

import re
from collections.abc import Sequence

import anyio
import pytest
import torch

from actorsnap import StateDict
from actorsnap.storage.base import ObjectWriter, Storage
from actorsnap.storage.memory import forget_space
from actorsnap.storage.wrapper import Wrapper
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url
from tests.cloud.places import state
from tests.servers.ceph import CephServer
from tests.servers.fake_gcs import FakeGcsServer
from tests.support.proxy import FaultProxy

NUM_FLOATS = 64 << 18
"""Of four parts."""


def test_no_byte_travels_twice(ceph: CephServer, bucket: str, proxy: FaultProxy) -> None:
    url, options = ceph.url(bucket, "run"), ceph.storage_options(proxy)
    Snapshot.take(url, state(1, num_floats=NUM_FLOATS), storage_options=options)
    asked = proxy.exchanges()
    parts = [found[1] for each in asked if (found := re.search("partNumber=(.*?)&", each.target))]
    assert sorted(parts) == ["1", "2", "3", "4", "5"]
    # Before the first part: is there a snapshot, of either name (two, at once), create the upload,
    # and, once per client, four for what the server checks. After the last: complete, the manifest
    # and a look at it, once per client three for conditional puts, the commit, and two that look
    # for garbage.
    assert len(asked) - len(parts) <= 16
    proxy.forget()
    Snapshot(url, storage_options=options).restore(state(2, num_floats=NUM_FLOATS))
    asked = proxy.exchanges()
    assert sum(each.bytes_down for each in asked) < 4 * NUM_FLOATS + 20_000
    assert len(asked) <= 2 + 5


@pytest.mark.parametrize(
    ("num_objects", "num_floats", "num_uploads", "num_others"),
    # Small leaves of all keys lie in one object.
    [(1, 2500, 1, 0), (20, 1 << 19, 20, 0), (1, NUM_FLOATS, 5, 2)],
)
def test_requests_of_a_save_to_google(
    fake_gcs: FakeGcsServer, num_objects: int, num_floats: int, num_uploads: int, num_others: int
) -> None:
    """``num_others``: compose the object of its components, delete these."""
    app_state = {f"model{n}": StateDict(w=torch.zeros(num_floats)) for n in range(num_objects)}
    url = fake_gcs.url(fake_gcs.make_bucket(), "run")
    with FaultProxy(fake_gcs.endpoint) as proxy:
        Snapshot.take(url, app_state, storage_options=fake_gcs.storage_options(proxy))
        asked = [exchange.target for exchange in proxy.exchanges()]
    assert sum("%2Fdata%2F" in each for each in asked if "/upload/" in each) == num_uploads
    # Is there a snapshot, also of the older name (no listing there could tell: both are asked for
    # at once); the manifest; is it there; the commit object; is there garbage.
    assert len(asked) == num_uploads + num_others + 6


class OpenedTogether(Wrapper):
    """No writer is open before so many are wanted."""

    def __init__(self, inner: Storage, num_writers: int) -> None:
        super().__init__(inner)
        self._num_missing = num_writers
        self._has_all = anyio.Event()

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        self._num_missing -= 1
        if not self._num_missing:
            self._has_all.set()
        with anyio.fail_after(60):
            await self._has_all.wait()
        return await self.inner.writer(key, size, older=older)


def test_objects_are_opened_at_once() -> None:
    app_state = {f"model{n}": StateDict(w=torch.zeros(1 << 19)) for n in range(8)}
    with faulty(lambda inner: OpenedTogether(inner, len(app_state))):
        Snapshot.take(faulty_url("memory://opened-together/run"), app_state)
    forget_space("opened-together")
