# SPDX-License-Identifier: Apache-2.0
"""What no repetition helps: said at once, with the bucket and the remedy, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actorsnap import NotASnapshot, Options, SnapshotAborted
from actorsnap.errors import AccessDenied, StorageError
from actorsnap.sync import Snapshot
from tests.cloud.places import is_state, keys_of, refused, state, uploads_of
from tests.servers.base import GcsServer, S3Server
from tests.servers.ceph import CephServer
from tests.servers.fake_gcs import FakeGcsServer
from tests.storage.peers import serving
from tests.support.cases import slow
from tests.support.proxy import Answer, FaultProxy

SMALL = 1000
SOON_S = 20.0
"""Much less than retries would take, which go on for a minute or two."""


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < 3 * SOON_S


def all_refuse(url: str, options: dict[str, Any], match: str, kind: type[StorageError]) -> None:
    """Saving and reading end with ``kind``, whose message has ``match``."""
    with refused(match, SnapshotAborted) as raised:
        Snapshot.take(url, state(1, num_floats=SMALL), storage_options=options)
    assert isinstance(raised.value.__cause__, kind)
    snapshot = Snapshot(url, storage_options=options)
    for call in (
        lambda: snapshot.restore(state(2, num_floats=SMALL)),
        snapshot.verify,
        snapshot.delete,
    ):
        with refused(match, kind):
            call()
    assert not any(value in repr(snapshot) for name, value in options.items() if "key" in name)


def test_no_such_bucket(ceph: CephServer) -> None:
    match = "'nobody-made-it': NoSuchBucket.*create it"
    all_refuse(ceph.url("nobody-made-it", "run"), ceph.storage_options(), match, StorageError)


def test_no_such_bucket_of_google(fake_gcs: FakeGcsServer) -> None:
    url = fake_gcs.url("nobody-made-it", "run")
    with refused("nobody-made-it", SnapshotAborted):
        Snapshot.take(url, state(1, num_floats=SMALL), storage_options=fake_gcs.storage_options())


def test_who_may_only_read_from_google(fake_gcs: FakeGcsServer) -> None:
    bucket = fake_gcs.make_bucket()
    url = fake_gcs.url(bucket, "run")
    Snapshot.take(url, state(1), storage_options=fake_gcs.storage_options())
    before = keys_of(fake_gcs, bucket)
    # The server lets everybody do everything.
    with FaultProxy(fake_gcs.endpoint) as proxy, proxy.fault(Answer(status=403), method="POST"):
        options = fake_gcs.storage_options(proxy)
        for where, overwrite in ((url, True), (fake_gcs.url(bucket, "new"), False)):
            with refused("Saving needs the role", SnapshotAborted) as raised:
                Snapshot.take(where, state(3), storage_options=options, overwrite=overwrite)
            assert isinstance(raised.value.__cause__, AccessDenied)
        target = state(2)
        Snapshot(url, storage_options=options).restore(target)
        assert is_state(target, 1)
        with refused("needs the role", AccessDenied):
            Snapshot(url, storage_options=options).delete()
    assert keys_of(fake_gcs, bucket) == before


@pytest.mark.parametrize("wrong", ["access_key_id", "secret_access_key"])
def test_wrong_keys(ceph: CephServer, bucket: str, wrong: str) -> None:
    options = ceph.storage_options() | {wrong: "secret-reader"}
    all_refuse(ceph.url(bucket, "run"), options, "the access key or its secret is", AccessDenied)
    assert keys_of(ceph, bucket) == []


def test_an_expired_token(ceph: CephServer, bucket: str, proxy: FaultProxy) -> None:
    options = ceph.storage_options(proxy) | {"session_token": "a-session-token"}
    with proxy.fault(Answer(status=400, code="ExpiredToken")):
        all_refuse(ceph.url(bucket, "run"), options, "pass a new session_token", AccessDenied)


def test_a_wrong_region(ceph: CephServer, bucket: str, proxy: FaultProxy) -> None:
    # No server here minds what a signature calls it.
    with proxy.fault(Answer(status=400, code="AuthorizationHeaderMalformed")):
        match = "another region: set the storage option region"
        all_refuse(ceph.url(bucket, "run"), ceph.storage_options(proxy), match, StorageError)


def granted(ceph: CephServer, bucket: str, name: str, *actions: str) -> dict[str, Any]:
    """``storage_options`` of somebody who may do this much in ``bucket``."""
    keys = ceph.make_user(name)
    who = {"AWS": [f"arn:aws:iam:::user/{name}"]}
    where = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    statement = {"Effect": "Allow", "Principal": who, "Action": actions, "Resource": where}
    owner = ceph.client()
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    owner.put_bucket_policy(Bucket=bucket, Policy=policy)
    owner.close()
    return ceph.storage_options() | {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
    }


def test_who_may_only_read(ceph: CephServer, bucket: str) -> None:
    url = ceph.url(bucket, "run")
    Snapshot.take(url, state(1, num_floats=SMALL), storage_options=ceph.storage_options())
    before = keys_of(ceph, bucket)
    options = granted(ceph, bucket, "only-reads", "s3:GetObject", "s3:ListBucket")
    target = state(2, num_floats=SMALL)
    Snapshot(url, storage_options=options).restore(target)
    assert is_state(target, 1, num_floats=SMALL)
    assert not Snapshot(url, storage_options=options).verify("full").problems
    for where, overwrite in ((url, True), (ceph.url(bucket, "new"), False)):
        with refused("do not allow it; saving needs s3:PutObject", SnapshotAborted):
            Snapshot.take(
                where,
                state(3, num_floats=SMALL),
                storage_options=options,
                overwrite=overwrite,
            )
    with refused("do not allow it", AccessDenied):
        Snapshot(url, storage_options=options).delete()
    assert keys_of(ceph, bucket) == before


def test_who_may_not_list(ceph: CephServer, bucket: str) -> None:
    url = ceph.url(bucket, "run")
    Snapshot.take(url, state(1, num_floats=SMALL), storage_options=ceph.storage_options())
    options = granted(ceph, bucket, "no-list", "s3:GetObject", "s3:PutObject", "s3:DeleteObject")
    target = state(2, num_floats=SMALL)
    Snapshot(url, storage_options=options).restore(target)
    assert is_state(target, 1, num_floats=SMALL)
    # Without it nobody can tell what is not there from what may not be seen.
    with refused("ListBucket", SnapshotAborted):
        Snapshot.take(ceph.url(bucket, "new"), state(3, num_floats=SMALL), storage_options=options)


OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"region": "us-east-1", "access_key_id": "k", "secret_access_key": "secret-reader"},
    "gs": {"token": "secret-reader"},
}


@pytest.mark.parametrize(
    ("scheme", "how"),
    [
        ("s3", "nobody listens"),
        slow("s3", "silence"),
        slow("s3", "no route"),
        ("gs", "silence"),
    ],
)
def test_an_endpoint_that_cannot_be_reached(scheme: str, how: str) -> None:
    options = OPTIONS[scheme].copy()
    deadline = Options(timeout_s=1.0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()
        options["endpoint_url"] = f"http://127.0.0.1:{address[1]}"
        if how == "silence":
            options["endpoint_url"] = stack.enter_context(serving(lambda peer: peer.hang())).url
        elif how == "nobody listens":
            listener.close()
        else:
            listener.listen(0)
            for _ in range(2):  # more than that, and the kernel answers no more
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
        began_s = time.monotonic()
        with refused(None, SnapshotAborted):
            Snapshot.take(
                f"{scheme}://bucket/run",
                state(1, num_floats=SMALL),
                storage_options=options,
                options=deadline,
            )
        with refused(None, StorageError):
            Snapshot(f"{scheme}://bucket/run", storage_options=options, options=deadline).verify()
        assert time.monotonic() - began_s < 2 * SOON_S


NAMES = ["ünï-コード", "with space", "per%20cent%", "plus+and#hash", "q?a=b&c;d,e:f@g$h!'(*)~"]
NAME = "/".join(NAMES)


@pytest.fixture(
    params=[
        "ceph",
        pytest.param("moto", marks=pytest.mark.slow),
        pytest.param("rclone", marks=pytest.mark.slow),
        "fake_gcs",
    ]
)
def server(request: pytest.FixtureRequest) -> S3Server | GcsServer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, S3Server | GcsServer)
    return found


@pytest.mark.few(1)
def test_names_that_urls_must_quote(server: S3Server | GcsServer) -> None:
    bucket, options = server.make_bucket(), server.storage_options()
    url = server.url(bucket, NAME)
    Snapshot.take(url, state(1, num_floats=400_000), storage_options=options)
    assert all(key.startswith(f"{NAME}/") for key in keys_of(server, bucket))
    Snapshot.take(url, state(2, num_floats=400_000), storage_options=options, overwrite=True)
    snapshot = Snapshot(url, storage_options=options)
    assert not snapshot.verify("full").problems
    target = state(3, num_floats=400_000)
    snapshot.restore(target)
    assert is_state(target, 2, num_floats=400_000)
    snapshot.delete()
    assert keys_of(server, bucket) == []
    with pytest.raises(NotASnapshot):
        snapshot.verify()


def test_keys_with_names_that_urls_must_quote(ceph: CephServer, bucket: str) -> None:
    options, url = ceph.storage_options(), ceph.url(bucket, "run")
    saved = {name: state(n)["at"] for n, name in enumerate(NAMES)}
    Snapshot.take(url, saved, storage_options=options)
    found = {name: state(-1)["at"] for name in saved}
    Snapshot(url, storage_options=options).restore(found)
    assert {name: value["step"] for name, value in found.items()} == {
        name: value["step"] for name, value in saved.items()
    }
    assert uploads_of(ceph, bucket) == []
