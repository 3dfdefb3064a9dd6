# SPDX-License-Identifier: Apache-2.0
"""Snapshots in object storage, by the public API on real servers: what every test here gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.cloud.places import Store, assert_no_secret
from tests.servers.ceph import CephServer
from tests.support.proxy import FaultProxy


@pytest.fixture(autouse=True)
def _no_secrets_in_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which the package logs a credential, at any level."""
    caplog.set_level(logging.DEBUG, logger="actorsnap")
    yield
    for record in caplog.get_records("call"):
        error = record.exc_info and record.exc_info[1]
        assert_no_secret(f"{record.getMessage()} {error!r}")


@pytest.fixture(scope="module", params=["ceph", "fake_gcs"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each protocol that we speak, on one server."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Store)
    return found


@pytest.fixture
def store_proxy(store: Store) -> Iterator[FaultProxy]:
    """In front of it."""
    with FaultProxy(store.endpoint) as proxy:
        yield proxy


@pytest.fixture
def bucket(ceph: CephServer) -> str:
    """A new one."""
    return ceph.make_bucket()


@pytest.fixture
def proxy(ceph: CephServer) -> Iterator[FaultProxy]:
    """In front of Ceph."""
    with FaultProxy(ceph.endpoint) as proxy:
        yield proxy
