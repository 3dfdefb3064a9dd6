# SPDX-License-Identifier: Apache-2.0
"""The servers as fixtures: each is started when the first test asks for it, and lives until the
tests end. A plugin of pytest, loaded by ``tests/conftest.py``.

A test makes its own bucket, so that it may run beside others on one server. What a machine
cannot run is skipped with the reason; in CI what must be there fails instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TypeVar

import pytest

from tests.servers.base import S3Server, Server
from tests.servers.ceph import CephServer
from tests.servers.certificates import make_tls_files
from tests.servers.fake_gcs import FakeGcsServer
from tests.servers.moto import MotoServer
from tests.servers.rclone import RcloneServer
from tests.support.proxy import TlsFiles

ServerT = TypeVar("ServerT", bound=Server)


def _running(
    server_type: type[ServerT], factory: pytest.TempPathFactory, *, is_required: bool
) -> Iterator[ServerT]:
    if (missing := server_type.missing()) is not None:
        reason = f"{server_type.__name__}: {missing}; `make servers` installs what it needs"
        if is_required and os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with server_type(factory.mktemp(server_type.__name__)) as server:
        yield server


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    yield from _running(CephServer, tmp_path_factory, is_required=True)


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcsServer]:
    yield from _running(FakeGcsServer, tmp_path_factory, is_required=True)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneServer]:
    yield from _running(RcloneServer, tmp_path_factory, is_required=False)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    yield from _running(MotoServer, tmp_path_factory, is_required=False)


@pytest.fixture(params=["ceph", "moto", "rclone"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each server that speaks S3, one after the other."""
    server = request.getfixturevalue(request.param)
    assert isinstance(server, S3Server)
    return server


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """For a ``FaultProxy`` that speaks TLS in front of any server."""
    return make_tls_files(tmp_path_factory.mktemp("tls"))
