# SPDX-License-Identifier: Apache-2.0
"""The servers themselves: what tests of the backends rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from botocore.exceptions import ClientError

from tests.servers.base import S3Server
from tests.servers.ceph import CephServer
from tests.servers.fake_gcs import FakeGcsServer
from tests.support.proxy import FaultProxy, TlsFiles

REPOSITORY = Path(__file__).parents[2]

KEY = "folder/with space%20+&#ü"


def test_s3_servers_keep_what_they_are_given(s3_server: S3Server) -> None:
    bucket, client = s3_server.make_bucket(), s3_server.client()
    client.put_object(Bucket=bucket, Key=KEY, Body=b"x" * 1000)
    found = client.get_object(Bucket=bucket, Key=KEY, Range="bytes=1-10")
    assert found["Body"].read() == b"x" * 10
    assert [item["Key"] for item in client.list_objects_v2(Bucket=bucket)["Contents"]] == [KEY]
    client.close()


def test_s3_servers_check_keys(s3_server: S3Server, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["s3_server"] == "moto":
        pytest.skip("moto lets everyone in")
    client = s3_server.client(aws_secret_access_key="wrong")
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client.list_objects_v2(Bucket="bucket")
    client.close()


def test_s3_over_tls(s3_server: S3Server, tls_files: TlsFiles) -> None:
    bucket = s3_server.make_bucket()
    with FaultProxy(s3_server.endpoint, tls=tls_files) as proxy:
        assert proxy.endpoint.startswith("https://")
        client = s3_server.client(through=proxy)
        client.put_object(Bucket=bucket, Key="key", Body=bytes(3 << 20))
        assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == bytes(3 << 20)
        client.close()


def test_ceph_refuses_the_second_conditional_put(ceph: CephServer) -> None:
    bucket, client = ceph.make_bucket(), ceph.client()
    client.put_object(Bucket=bucket, Key="key", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="key", Body=b"second", IfNoneMatch="*")
    client.close()


def test_ceph_second_user_may_what_the_policy_grants(ceph: CephServer) -> None:
    bucket, owner = ceph.make_bucket(), ceph.client()
    owner.put_object(Bucket=bucket, Key="key", Body=b"x")
    reader = ceph.make_user("reader")
    grant = (
        '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:GetObject",'
        '"Principal": {"AWS": ["arn:aws:iam:::user/reader"]},'
        f'"Resource": ["arn:aws:s3:::{bucket}/*"]}}]}}'
    )
    owner.put_bucket_policy(Bucket=bucket, Policy=grant)
    client = ceph.client(
        aws_access_key_id=reader.access_key, aws_secret_access_key=reader.secret_key
    )
    assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == b"x"
    with pytest.raises(ClientError, match="AccessDenied"):
        client.put_object(Bucket=bucket, Key="key", Body=b"y")
    with pytest.raises(ClientError, match="AccessDenied"):
        client.list_objects_v2(Bucket=bucket)
    client.close()
    owner.close()


def test_ceph_frees_what_is_deleted(ceph: CephServer) -> None:
    bucket, client = ceph.make_bucket(), ceph.client()
    client.put_object(Bucket=bucket, Key="before", Body=b"")
    before = ceph.num_pieces()
    client.put_object(Bucket=bucket, Key="key", Body=bytes(32 << 20))
    assert ceph.num_pieces() > before + 1  # the last one is named like the object
    client.delete_object(Bucket=bucket, Key="key")
    client.close()
    deadline = time.monotonic() + 60
    while ceph.num_pieces() > before:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_servers_die_with_a_test_process_that_is_killed(
    fake_gcs: FakeGcsServer, tmp_path: Path
) -> None:
    script = (
        "import pathlib, time\n"
        "from tests.servers.fake_gcs import FakeGcsServer\n"
        "from tests.support.proxy import FaultProxy\n"
        f"server = FakeGcsServer(pathlib.Path({str(tmp_path)!r}))\n"
        "server.start()\n"
        "proxy = FaultProxy(server.endpoint).__enter__()\n"
        "print(*server.pids, proxy.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
