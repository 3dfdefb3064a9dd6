# SPDX-License-Identifier: Apache-2.0
"""Saves and restores over a network that is bad, on purpose: they survive, or end whole."""

from __future__ import annotations

import time
from typing import Any

import pytest

from actorsnap import ChecksumMismatch, Options, SnapshotAborted
from actorsnap.errors import StorageError
from actorsnap.sync import Snapshot
from tests.cloud.places import Store, is_state, keys_of, refused, requests_of, state, uploads_of
from tests.servers.base import S3Server
from tests.servers.ceph import CephServer
from tests.servers.rclone import RcloneServer
from tests.support.cases import slow
from tests.support.proxy import (
    Answer,
    Drop,
    Fault,
    FaultProxy,
    FlipBit,
    LoseAnswer,
    Reset,
    Stall,
    Truncate,
    Way,
)

MIB = 1 << 20


def take(url: str, number: int, storage_options: dict[str, Any], **how: Any) -> None:
    Snapshot.take(url, state(number), storage_options=storage_options, **how)


def assert_saved(url: str, number: int, options: dict[str, Any]) -> None:
    target = state(-1)
    Snapshot(url, storage_options=options).restore(target)
    assert is_state(target, number)


@pytest.fixture(params=["ceph", "rclone", "fake_gcs"])
def any_server(request: pytest.FixtureRequest) -> Store:
    """The ways in which servers check what arrives: by CRC32C, by the signature alone, or not,
    but they say what they have got."""
    server = request.getfixturevalue(request.param)
    assert isinstance(server, Store)
    return server


@pytest.mark.few(1)
def test_a_bit_that_flips_on_the_way_up(store: Store, store_proxy: FaultProxy) -> None:
    url = store.url(store.make_bucket(), "run")
    flip = FlipBit(way=Way.UP, at_byte=MIB)
    with store_proxy.fault(flip, **requests_of(store).part, times=1):
        take(url, 1, store.storage_options(store_proxy))
    assert_saved(url, 1, store.storage_options())


@pytest.mark.few(2)
def test_a_bit_that_flips_on_the_way_down(any_server: Store) -> None:
    url = any_server.url(any_server.make_bucket(), "run")
    take(url, 1, any_server.storage_options())
    with FaultProxy(any_server.endpoint) as proxy:
        options = any_server.storage_options(proxy)
        flip = FlipBit(way=Way.DOWN, at_byte=MIB)
        data = requests_of(any_server).data
        with proxy.fault(flip, **data, times=1):
            assert_saved(url, 1, options)
        with proxy.fault(flip, **data), refused("model", ChecksumMismatch):
            Snapshot(url, storage_options=options).restore(state(-1))


@pytest.mark.few(1)
def test_bits_that_always_flip_on_the_way_up(any_server: Store) -> None:
    bucket = any_server.make_bucket()
    url = any_server.url(bucket, "run")
    take(url, 1, any_server.storage_options())
    before = keys_of(any_server, bucket)
    with FaultProxy(any_server.endpoint) as proxy:
        options = any_server.storage_options(proxy) | {"max_attempts": 3}
        with (
            proxy.fault(FlipBit(way=Way.UP, at_byte=MIB), **requests_of(any_server).part),
            refused("bucket", SnapshotAborted),
        ):
            take(url, 2, options, overwrite=True)
    assert keys_of(any_server, bucket) == before
    assert_saved(url, 1, any_server.storage_options())


def test_a_part_that_the_server_loses(ceph: CephServer, bucket: str, proxy: FaultProxy) -> None:
    url = ceph.url(bucket, "run")
    take(url, 1, ceph.storage_options())
    before = keys_of(ceph, bucket)
    with (
        proxy.fault(Drop(), method="PUT", pattern="partNumber=1&", times=1),
        refused("part 1, from byte 0 on, is lost", SnapshotAborted),
    ):
        take(url, 2, ceph.storage_options(proxy), overwrite=True)
    assert keys_of(ceph, bucket) == before
    assert uploads_of(ceph, bucket) == []
    assert_saved(url, 1, ceph.storage_options())


def outlast(store: Store, store_proxy: FaultProxy, for_s: float) -> None:
    """The server refuses everything for so long, from the second part on."""
    bucket = store.make_bucket()
    url, options = store.url(bucket, "run"), store.storage_options(store_proxy)
    began_s = time.monotonic()
    with store_proxy.fault(
        Answer(status=503), skip=requests_of(store).num_before, for_s=for_s
    ) as rule:
        take(url, 1, options)
        assert rule.num_hits >= 2
    assert time.monotonic() - began_s > for_s
    refusal = Answer(status=503, retry_after_s=1)
    with store_proxy.fault(refusal, **requests_of(store).data, skip=1, times=3):
        assert_saved(url, 1, options)
    assert uploads_of(store, bucket) == []


@pytest.mark.parametrize("store", [slow("ceph"), "fake_gcs"], indirect=True)
def test_a_server_that_is_away_for_a_while(store: Store, store_proxy: FaultProxy) -> None:
    outlast(store, store_proxy, 1.0)


@pytest.mark.slow
def test_a_server_that_is_away_for_half_a_minute(store: Store, store_proxy: FaultProxy) -> None:
    outlast(store, store_proxy, 30.0)


@pytest.mark.few
@pytest.mark.parametrize(
    "fault",
    [
        Stall(way=Way.UP, after_bytes=MIB),
        Reset(way=Way.UP, after_bytes=MIB),
        slow(Truncate(way=Way.UP, after_bytes=MIB)),
        slow(Stall(way=Way.DOWN)),
        LoseAnswer(),
    ],
    ids=repr,
)
def test_a_connection_that_breaks_on_the_way_up(
    store: Store, store_proxy: FaultProxy, fault: Fault
) -> None:
    bucket = store.make_bucket()
    url = store.url(bucket, "run")
    options = store.storage_options(store_proxy) | {"stall_timeout_s": 1.0}
    with store_proxy.fault(fault, **requests_of(store).part, times=2):
        take(url, 1, options)
    assert_saved(url, 1, store.storage_options())
    assert uploads_of(store, bucket) == []


@pytest.mark.few
@pytest.mark.parametrize("kind", [Stall, Reset, slow(Truncate)])
def test_a_connection_that_breaks_on_the_way_down(
    store: Store, store_proxy: FaultProxy, kind: Any
) -> None:
    bucket = store.make_bucket()
    url = store.url(bucket, "run")
    options = store.storage_options(store_proxy) | {"stall_timeout_s": 1.0}
    take(url, 1, store.storage_options())
    fault = kind(way=Way.DOWN, after_bytes=MIB)
    with store_proxy.fault(fault, **requests_of(store).data, times=2):
        assert_saved(url, 1, options)


@pytest.mark.few
@pytest.mark.parametrize("what", ["create", "complete", "commit"])
def test_an_answer_that_is_lost(store: Store, store_proxy: FaultProxy, what: str) -> None:
    bucket = store.make_bucket()
    url = store.url(bucket, "run")
    with store_proxy.fault(LoseAnswer(), **getattr(requests_of(store), what), times=1):
        take(url, 1, store.storage_options(store_proxy))
    assert_saved(url, 1, store.storage_options())
    if what != "create":  # then there are two of them
        assert uploads_of(store, bucket) == []


@pytest.mark.parametrize("store", ["ceph", slow("fake_gcs")], indirect=True)
def test_a_server_that_stalls_for_ever(store: Store, store_proxy: FaultProxy) -> None:
    bucket = store.make_bucket()
    url = store.url(bucket, "run")
    options = store.storage_options(store_proxy) | {"stall_timeout_s": 1.0}
    began_s = time.monotonic()
    with (
        store_proxy.fault(Stall(way=Way.UP, after_bytes=MIB), **requests_of(store).part),
        refused(None, SnapshotAborted),
    ):
        take(url, 1, options, options=Options(timeout_s=2.5))
    assert time.monotonic() - began_s < 60
    assert keys_of(store, bucket) == []
    assert uploads_of(store, bucket) == []


@pytest.mark.parametrize("store", [slow("ceph"), "fake_gcs"], indirect=True)
def test_a_transfer_that_takes_too_long(store: Store) -> None:
    bucket = store.make_bucket()
    url = store.url(bucket, "run")
    take(url, 1, store.storage_options())
    with FaultProxy(store.endpoint, connection_bytes_per_s=MIB) as slow:
        options = store.storage_options(slow) | {"transfer_timeout_s": 1.0, "max_attempts": 2}
        with refused("took over 1 s", SnapshotAborted):
            take(f"{url}-2", 1, options)
        with refused("took over 1 s", StorageError):
            Snapshot(url, storage_options=options).restore(state(-1))
    if isinstance(store, S3Server):  # else what comes late is an object, and garbage
        assert uploads_of(store, bucket) == []


@pytest.mark.slow  # how they are numbered: tests/storage/test_s3.py
def test_many_parts_on_a_server_that_wants_no_gaps(rclone: RcloneServer) -> None:
    bucket, options = rclone.make_bucket(), rclone.storage_options()
    num_floats = 100 << 18  # of 100 MiB, one object
    Snapshot.take(
        rclone.url(bucket, "run"), state(1, num_floats=num_floats), storage_options=options
    )
    target = state(-1, num_floats=num_floats)
    Snapshot(rclone.url(bucket, "run"), storage_options=options).restore(target)
    assert is_state(target, 1, num_floats=num_floats)
