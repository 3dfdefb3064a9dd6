# SPDX-License-Identifier: Apache-2.0
"""Storage in buckets: the contract, and what only this backend promises."""

from __future__ import annotations

import base64
import hashlib
import logging
import pickle
import re
import ssl
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import anyio
import msgspec
import pytest
import torch
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from actorsnap import Snapshot, sync
from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    ChecksumMismatch,
    ObjectExists,
    SnapshotAborted,
    StorageError,
    StorageFull,
    Throttled,
    UsageError,
)
from actorsnap.format.checksum import crc32c
from actorsnap.runtime.host import shutdown
from actorsnap.storage import Storage, StorageContext, open_storage
from actorsnap.storage.network import convert_options
from actorsnap.storage.s3 import S3Storage
from actorsnap.storage.s3_client import S3Options, sign
from actorsnap.testing import StorageConformance, bounded, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage, keys_in, pattern
from tests.conftest import LeakCheck
from tests.servers.base import S3Server
from tests.servers.ceph import CephServer
from tests.servers.moto import MotoServer
from tests.servers.rclone import RcloneServer
from tests.storage.peers import Peer, repeat, serving
from tests.support.proxy import Answer, Drop, FaultProxy, FlipBit, SetHeader, TlsFiles, Way

_MIB = 1 << 20
_SECRETS = ("AKIDOFATEST", "a-secret-of-this-test", "a-token-of-this-test")
_KEYS = dict(zip(("access_key_id", "secret_access_key", "session_token"), _SECRETS, strict=True))


@pytest.fixture
def options(moto: MotoServer) -> dict[str, Any]:
    """``storage_options`` of moto."""
    return moto.storage_options()


@pytest.fixture
def bucket(moto: MotoServer) -> str:
    """A new one on moto."""
    return moto.make_bucket()


def opened(url: str, options: dict[str, Any]) -> Storage:
    context = StorageContext(run_blocking=run_blocking_in_thread, options=options)
    return open_storage(url, context)


def bare(url: str, options: dict[str, Any]) -> S3Storage:
    """Without retries and limits."""
    context = StorageContext(run_blocking=run_blocking_in_thread)
    return S3Storage(url, context, convert_options(options, S3Options, scheme="s3"))


class OnServer(StorageConformance):
    num_many = 1010  # two pages
    num_examples = 5
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def make_storage(self, server: S3Server) -> MakeStorage:
        url = server.url(server.make_bucket(), "some/prefix")
        ours = {"part_bytes": 10 * _MIB, "max_attempts": 3}
        options = server.storage_options() | ours | self.options
        return lambda: opened(url, options)


@pytest.mark.few(1)
class TestCeph(OnServer):
    @pytest.fixture
    def server(self, ceph: CephServer) -> S3Server:
        return ceph


@pytest.mark.slow
class TestMoto(OnServer):
    num_many = 50

    # It repeats the checksum that it is told, and copies as much as there is.
    test_a_write_that_is_not_what_it_says_is_refused = None  # type: ignore[assignment]
    test_a_copy_that_fails_leaves_nothing_readable = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, moto: MotoServer) -> S3Server:
        return moto


@pytest.mark.slow
class TestRclone(OnServer):
    num_many = 50
    options: ClassVar[dict[str, Any]] = {"has_conditional_put": False}

    # It writes over the file that others read.
    test_a_reader_sees_the_older_or_the_newer_object = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, rclone: RcloneServer) -> S3Server:
        return rclone


@bounded(120)
async def test_over_tls(moto: MotoServer, tls_files: TlsFiles) -> None:
    url = moto.url(moto.make_bucket())
    data = pattern(18 * _MIB)
    with FaultProxy(moto.endpoint, tls=tls_files) as proxy:
        options = moto.storage_options(proxy)
        storage = bare(url, options)
        writer = await storage.writer("key", len(data))
        for start, stop in ((0, 15 * _MIB), (15 * _MIB, len(data))):
            await writer.write_at(start, [memoryview(data)[start:stop]])
        await writer.complete()
        target = bytearray(len(data))
        await storage.read_into("key", 0, [memoryview(target)])
        assert target == data
        await storage.aclose()
        stranger = bare(url, {**options, "ca_bundle": None})
        for call in (stranger.list_folders(), stranger.put("key", [])):
            with pytest.raises(StorageError, match="is not trusted.*ca_bundle") as raised:
                await call
            assert not raised.value.retryable
        await stranger.aclose()


@bounded(120)
async def test_bytes_that_change_on_the_way_are_sent_again(ceph: CephServer) -> None:
    url = ceph.url(ceph.make_bucket())
    data = pattern(6 * _MIB)
    with FaultProxy(ceph.endpoint) as proxy:
        storage = opened(url, ceph.storage_options(proxy))
        writer = await storage.writer("key", len(data))
        await storage.put("other", [])  # so that the server is known
        with proxy.fault(FlipBit(way=Way.UP, at_byte=3 * _MIB), method="PUT", times=1):
            await writer.write_at(0, [memoryview(data)])
        await writer.complete()
        assert await storage.get("key") == data
        await storage.aclose()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regoin": "x"}, "'regoin'; did you mean 'region'"),
        ({"zzz": 1}, "'zzz'; it has: endpoint_url, anonymous"),
        ({"region": 5}, r"`\$.region`"),
        ({"addressing_style": "dns"}, "'dns'"),
        ({"part_bytes": _MIB}, "part_bytes must be between 10 MiB"),
        ({"max_concurrency": 0}, "max_concurrency must be 1 or more"),
        ({"max_concurrency": 10**20}, "max_concurrency must be .* at most 1000000"),
        ({"max_attempts": 10**20}, "max_attempts must be .* at most 1000000"),
        ({"stall_timeout_s": 0}, r"stall_timeout_s must be in \(0, 86400\]"),
        ({"transfer_timeout_s": float("inf")}, "transfer_timeout_s must be in"),
        ({"secret_access_key": _SECRETS[1]}, "belong together"),
        ({"session_token": _SECRETS[2]}, "session_token needs"),
        ({"kms_key_id": "k"}, "kms_key_id needs sse"),
        ({"endpoint_url": f"http://{_SECRETS[0]}:{_SECRETS[1]}@host"}, "without a user"),
        ({"endpoint_url": "host:9000"}, "must be http://host"),
        ({"endpoint_url": "http://host:99999"}, "Port out of range"),
        ({**_KEYS, "session_token": f"{_SECRETS[2]}\n"}, "session_token must be ASCII"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        opened("s3://bucket", options)
    assert not any(secret in str(raised.value) for secret in _SECRETS)


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///key",
        "s3://bucket/a//b",
        "s3://bucket/../x",
        "s3://a bucket/x",
        f"s3://{_SECRETS[0]}:{_SECRETS[1]}@bucket/x",
    ],
)
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        opened(url, {})
    assert not any(secret in str(raised.value) for secret in _SECRETS)


def test_options_hide_what_is_secret() -> None:
    given = {**_KEYS, "proxies": {"http": f"http://u:{_SECRETS[1]}@p"}, "region": "r"}
    shown = repr(convert_options(given, S3Options, scheme="s3"))
    assert "'r'" in shown
    assert not any(secret in shown for secret in _SECRETS)


@bounded(60)
async def test_objects_get_their_properties(options: dict[str, Any], bucket: str) -> None:
    properties = {
        "sse": "aws:kms",
        "kms_key_id": "alias/mine",
        "storage_class": "STANDARD_IA",
        "tags": {"team": "a b+c"},
    }
    storage = bare(f"s3://{bucket}", {**options, **properties})
    await storage.put("put", [memoryview(b"x")])
    await storage.put_if_absent("absent", b"x")
    writer = await storage.writer("written", 6 * _MIB)
    await writer.write_at(0, [memoryview(bytes(6 * _MIB))])
    await writer.complete()
    for key in ("put", "absent", "written"):
        found = await storage.bucket.client.call("head_object", Bucket=bucket, Key=key)
        assert found["ServerSideEncryption"] == "aws:kms"
        assert found["StorageClass"] == "STANDARD_IA"
        tags = await storage.bucket.client.call("get_object_tagging", Bucket=bucket, Key=key)
        assert tags["TagSet"] == [{"Key": "team", "Value": "a b+c"}]
    await storage.aclose()


# --- writers --------------------------------------------------------------------------------------


@bounded(60)
async def test_a_failed_abort_is_tried_again(
    moto: MotoServer, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultProxy(moto.endpoint) as proxy:
        storage = bare(f"s3://{bucket}", moto.storage_options(proxy))
        for times, num_left in ((2, 0), (None, 1)):
            writer = await storage.writer("key", 6 * _MIB)
            with proxy.fault(Answer(status=500), method="DELETE", times=times):
                await writer.abort()
            assert len([each async for each in storage.bucket.uploads("")]) == num_left
            lines = [each for each in caplog.messages if "unfinished upload of key" in each]
            assert len(lines) == num_left
        assert "`actorsnap rm --garbage` of the snapshot's URL deletes it" in lines[0]
        await storage.aclose()


@bounded(60)
async def test_a_lost_part_is_found(options: dict[str, Any], bucket: str) -> None:
    storage = bare(f"s3://{bucket}", options)
    data = memoryview(bytes(20 * _MIB))
    for ranges, what in (
        ([(15, 20)], r"part 1, from byte 0 on, is lost"),
        ([(0, 15)], r"15728640 of 20971520 bytes"),
        ([], r"0 of 20971520 bytes"),
    ):
        writer = await storage.writer("key", 20 * _MIB)
        for start, stop in ranges:
            await writer.write_at(start * _MIB, [data[start * _MIB : stop * _MIB]])
        with pytest.raises(StorageError, match=what):
            await writer.complete()
        await writer.abort()
    assert await keys_in(storage) == []
    await storage.aclose()


@bounded(120)
async def test_who_wrote_all_parts_names_them(ceph: CephServer) -> None:
    """What the server says of a part need not be asked for again, unless it does not agree."""
    data = memoryview(pattern(20 * _MIB))

    async def save(storage: S3Storage, *others: tuple[int, int]) -> None:
        """Writes from 0 to 15 MiB, and ``others`` through a writer that joins."""
        writer = await storage.writer("key", len(data))
        joined = await storage.join_writer(writer.token)
        for to, start, stop in ((writer, 0, 15), *((joined, *each) for each in others)):
            await to.write_at(start * _MIB, [data[start * _MIB : stop * _MIB]])
        if not others:
            await writer.write_at(15 * _MIB, [data[15 * _MIB :]])
        await writer.complete()

    with FaultProxy(ceph.endpoint) as proxy:
        storage = bare(ceph.url(ceph.make_bucket()), ceph.storage_options(proxy))

        def ending() -> list[str]:
            """The methods of requests about a whole upload: GET lists it, POST completes it."""
            asked = proxy.exchanges()
            proxy.forget()
            about = [each.method for each in asked if "?uploadId=" in each.target]
            return [method for method in about if method != "DELETE"]

        await save(storage)
        assert ending() == ["POST"]
        await save(storage, (15, 20))
        assert ending() == ["GET", "POST"]
        with proxy.fault(SetHeader(name="ETag", value='"harmed"'), pattern="partNumber=2"):
            await save(storage)
        assert ending() == ["POST", "GET", "POST"]
        assert await storage.get("key") == data
        with (
            proxy.fault(Drop(), method="PUT", pattern="partNumber=2"),
            pytest.raises(StorageError, match="15728640 of 20971520 bytes were written"),
        ):
            await save(storage)
        await storage.aclose()


@bounded(120)
async def test_uploads_that_begin_together_learn_what_is_checked_once(
    rclone: RcloneServer,
) -> None:
    with FaultProxy(rclone.endpoint) as proxy:
        storage = bare(rclone.url(rclone.make_bucket()), rclone.storage_options(proxy))
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(storage.writer, f"key{number}", 6 * _MIB)
        asked = [(each.method, each.target.partition("?")[2]) for each in proxy.exchanges()]
        probe = [".probe" in each.target for each in proxy.exchanges()].index(True)
        begun = [n for n, each in enumerate(asked) if each == ("POST", "uploads")]
        # The first one was ended before; and all others began behind.
        assert [n < probe for n in begun] == [True, False, False, False, False]
        assert sum(".probe" in each.target for each in proxy.exchanges()) == 1
        await storage.aclose()


@bounded(60)
async def test_complete_may_be_repeated(options: dict[str, Any], bucket: str) -> None:
    storage = bare(f"s3://{bucket}", options)
    data = pattern(6 * _MIB)
    writer = await storage.writer("key", len(data))
    await writer.write_at(0, [memoryview(data)])
    await writer.complete()
    await writer.complete()  # as if the first answer was lost
    assert await storage.get("key") == data
    await storage.delete(["key"])
    with pytest.raises(StorageError):
        await writer.complete()
    await storage.aclose()


@bounded(60)
async def test_writes_shorter_than_a_unit_are_refused(options: dict[str, Any], bucket: str) -> None:
    storage = bare(f"s3://{bucket}", {**options, "part_bytes": 12 * _MIB})
    assert storage.capabilities.min_write_bytes == 12 * _MIB
    writer = await storage.writer("key", 40 * _MIB)
    with pytest.raises(UsageError, match="at least 12582912 bytes"):
        await writer.write_at(12 * _MIB, [memoryview(bytes(13 * _MIB))[: 12 * _MIB - 1]])
    await writer.abort()
    with pytest.raises(UsageError, match="5 TiB"):
        await storage.writer("key", (5 << 40) + 1)
    await storage.aclose()


@bounded(60)
async def test_parts_are_numbered_without_gaps(options: dict[str, Any], bucket: str) -> None:
    storage = bare(f"s3://{bucket}", {**options, "part_bytes": 10 * _MIB})
    data = memoryview(pattern(63 * _MIB))
    opener = await storage.writer("key", len(data))
    joined = await storage.join_writer(opener.token)
    cuts = [0, 10, 29, 60, 63]  # one part, one, four and one
    for n, writer in ((2, joined), (0, opener), (3, joined), (1, opener)):
        part = data[cuts[n] * _MIB : cuts[n + 1] * _MIB]
        await writer.write_at(cuts[n] * _MIB, [part[:100], part[100:]], crc32c(part))
    with pytest.raises(StorageError, match="the body to send has another CRC32C"):
        await opener.write_at(29 * _MIB, [data[29 * _MIB : 60 * _MIB]], 1)
    parts = await storage.bucket.client.call(
        "list_parts", Bucket=bucket, Key="key", UploadId=msgspec.msgpack.decode(opener.token)[2]
    )
    sizes = [part["Size"] / _MIB for part in parts["Parts"]]
    assert [part["PartNumber"] for part in parts["Parts"]] == list(range(1, len(sizes) + 1))
    assert sum(sizes) == 63
    assert min(sizes[:-1]) >= 5
    await joined.release()
    await opener.complete()
    assert await storage.get("key") == data
    await storage.aclose()


@bounded(60)
async def test_unfinished_uploads_are_found_and_removed(
    options: dict[str, Any], bucket: str
) -> None:
    storage = bare(f"s3://{bucket}/place", options)
    await storage.writer("attempt/data/0", 6 * _MIB)
    await storage.put("other/key", [memoryview(b"x")])
    assert await storage.list_folders() == ["attempt", "other"]
    assert await storage.list_folders("attempt") == ["data"]
    assert await storage.delete_folder("attempt") == ["attempt/data/0"]
    assert await storage.list_folders() == ["other"]
    uploads = await storage.bucket.client.call("list_multipart_uploads", Bucket=bucket)
    assert not uploads.get("Uploads")
    await storage.aclose()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ceph", "moto"])
@bounded(60)
async def test_what_lies_before_a_gap_is_resumed(name: str, request: Any) -> None:
    server: S3Server = request.getfixturevalue(name)
    options = {**server.storage_options(), "part_bytes": 10 * _MIB}
    storage = bare(f"s3://{server.make_bucket()}", options)
    data = [memoryview(pattern(10 * _MIB, seed)) for seed in range(4)]
    died = await storage.writer("older", 40 * _MIB)
    for n in (0, 1, 3):  # the parts that were under way end in any order
        await died.write_at(n * 10 * _MIB, [data[n]])
    writer = await storage.writer("key", 40 * _MIB, older=["older"])
    reused = []
    for n, part in enumerate(data):
        reused.append(await writer.reuse(n * 10 * _MIB, [part], crc32c(part)))
        if not reused[-1]:
            await writer.write_at(n * 10 * _MIB, [part])
    await writer.complete()
    assert reused == [True, True, False, False]
    assert await storage.get("key") == b"".join(data)
    await storage.aclose()


@bounded(60)
async def test_an_object_is_deleted_with_unfinished_uploads_to_it(
    options: dict[str, Any], bucket: str
) -> None:
    storage = bare(f"s3://{bucket}/place", options)
    for key in ("attempt/one", "attempt/two", "attempt/other"):
        await storage.writer(key, 6 * _MIB)
    await storage.delete(["attempt/one", "attempt/two"])
    uploads = await storage.bucket.client.call("list_multipart_uploads", Bucket=bucket)
    assert [upload["Key"] for upload in uploads["Uploads"]] == ["place/attempt/other"]
    await storage.delete_folder("attempt")
    await storage.aclose()


@bounded(60)
async def test_botocore_logs_no_secrets(moto: MotoServer, caplog: pytest.LogCaptureFixture) -> None:
    # moto asks nobody who he is.
    options = {**moto.storage_options(), **_KEYS}
    with caplog.at_level(logging.DEBUG, logger="botocore"):
        logging.getLogger("botocore.parsers").debug("<SecretAccessKey>%s</", _SECRETS[1])
        storage = bare(f"s3://{moto.make_bucket()}", options)
        await storage.put("key", [memoryview(b"x")])
        await storage.list_folders()
        await storage.aclose()
    assert "CanonicalRequest" in caplog.text
    assert not any(secret in caplog.text for secret in _SECRETS[1:])
    assert not re.search("signature[:=]\\s*[0-9a-f]", caplog.text, re.IGNORECASE)


@bounded(60)
async def test_what_is_said_of_a_truncated_object_is_true(
    options: dict[str, Any], bucket: str
) -> None:
    storage = bare(f"s3://{bucket}", options)
    await storage.put("key", [memoryview(b"0123456789")])
    for offset, said in ((5, "20 bytes are needed, the object has 10"), (15, "has fewer")):
        with pytest.raises(ChecksumMismatch, match=said):
            await storage.read_into("key", offset, [memoryview(bytearray(20 - offset))])
    await storage.aclose()


@bounded(60)
async def test_parts_that_are_listed_without_checksums(
    bucket: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = bare(f"s3://{bucket}", options)
    data = pattern(20 * _MIB)
    list_parts, complete = storage.bucket.parts, storage.bucket.complete_upload

    async def bare_parts(*args: Any) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in part.items() if name != "ChecksumCRC32C"}
            for part in await list_parts(*args)
        ]

    async def answered(*args: Any) -> dict[str, Any]:
        return {**await complete(*args), "ChecksumCRC32C": "AAAAAA=="}

    monkeypatch.setattr(storage.bucket, "parts", bare_parts)
    monkeypatch.setattr(storage.bucket, "complete_upload", answered)
    writer = await storage.writer("key", len(data))
    joined = await storage.join_writer(writer.token)
    await joined.write_at(0, [memoryview(data)])
    await joined.release()
    await writer.complete()
    assert await storage.get("key") == data
    await storage.aclose()


# --- the client -----------------------------------------------------------------------------------


@bounded(60)
async def test_storages_share_a_client(
    options: dict[str, Any], bucket: str, no_leaks: LeakCheck
) -> None:
    one, two = (bare(f"s3://{bucket}/{n}", options) for n in range(2))
    other = bare(f"s3://{bucket}", {**options, "region": "eu-west-1"})
    assert one.bucket.client is two.bucket.client
    assert one.bucket.client is not other.bucket.client
    await one.put("key", [memoryview(b"x")])
    assert await two.list_folders() == []
    client = one.bucket.client
    await one.aclose()
    await one.aclose()
    assert await two.list_folders() == []
    await two.aclose()
    await other.aclose()
    assert client.num_users == 0


@bounded(60)
async def test_trusted_authorities_are_read_once(
    moto: MotoServer, bucket: str, tls_files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than a round trip, and nobody needs them without TLS."""
    num_read = 0
    create = ssl.create_default_context

    def counted(**how: Any) -> ssl.SSLContext:
        nonlocal num_read
        num_read += 1
        return create(**how)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    with FaultProxy(moto.endpoint) as plain, FaultProxy(moto.endpoint, tls=tls_files) as secure:
        for proxy, expected in ((plain, 0), (secure, 1), (secure, 1)):
            storage = bare(f"s3://{bucket}", moto.storage_options(proxy))
            await storage.put("key", [memoryview(b"x")])
            await storage.aclose()
            assert num_read == expected


@pytest.mark.slow  # tests/cloud saves and restores, too
def test_snapshots(options: dict[str, Any], bucket: str, no_leaks: LeakCheck) -> None:
    url = f"s3://{bucket}/runs/1"
    model = torch.nn.Linear(1500, 2000)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sync.Snapshot.take(url, {"model": model}, storage_options=options)
    with pytest.raises(ObjectExists):
        sync.Snapshot.take(url, {"model": model}, storage_options=options)
    shutdown()  # another runtime, another loop
    pending = sync.Snapshot.async_take(f"{url}-b", {"model": model}, storage_options=options)
    pending.wait()
    torch.nn.init.zeros_(model.weight)
    snapshot = sync.Snapshot(url, storage_options=options)
    snapshot.restore({"model": model})
    assert all(torch.equal(saved[name], found) for name, found in model.state_dict().items())
    snapshot.delete()
    shutdown()
    listing = (
        urllib.request.urlopen(f"{options['endpoint_url']}/{bucket}", timeout=30).read().decode()
    )
    keys = re.findall("<Key>(.*?)</Key>", listing)
    assert len(keys) == 3
    assert all(key.startswith("runs/1-b/") for key in keys)


# --- what servers say -----------------------------------------------------------------------------


def _error(code: str, **more: str) -> bytes:
    fields = "".join(f"<{name}>{value}</{name}>" for name, value in more.items())
    return f"<?xml version='1.0'?><Error><Code>{code}</Code>{fields}</Error>".encode()


@bounded(30)
async def test_a_page_of_the_longest_keys() -> None:
    keys = [f"p/{n:04}{'k' * 1018}" for n in range(1000)]
    found = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    page = f"<ListBucketResult>{found}</ListBucketResult>".encode()
    assert len(page) > _MIB

    def step(peer: Peer) -> None:
        peer.request()
        peer.answer(page)

    with serving(repeat(step)) as server:
        storage = bare("s3://thebucket/p", {"endpoint_url": server.url, **_KEYS})
        assert [f"p/{info.key}" async for info in storage.list("")] == keys
        await storage.aclose()


@pytest.mark.parametrize(
    ("status", "fields", "body", "kind", "is_retryable", "remedy"),
    [
        ("404 Not Found", [], _error("NoSuchBucket"), StorageError, False, "create it"),
        ("403 Forbidden", [], _error("AccessDenied"), AccessDenied, False, "needs s3:"),
        ("403 Forbidden", [], _error("InvalidAccessKeyId"), AccessDenied, False, "is wrong"),
        ("403 Forbidden", [], _error("SignatureDoesNotMatch"), AccessDenied, False, "is wrong"),
        ("400 Bad Request", [], _error("ExpiredToken"), AccessDenied, False, "session_token"),
        (
            "403 Forbidden",
            ["Date: Wed, 01 Jan 2020 00:00:00 GMT"],
            _error("RequestTimeTooSkewed"),
            StorageError,
            True,
            r"clock of this machine is wrong by \+\d+ s",
        ),
        (
            "301 Moved Permanently",
            ["x-amz-bucket-region: eu-west-1"],
            _error("PermanentRedirect"),
            StorageError,
            False,
            "the storage option region=eu-west-1",
        ),
        (
            "400 Bad Request",
            [],
            _error("AuthorizationHeaderMalformed", Region="eu-west-2"),
            StorageError,
            False,
            "the storage option region=eu-west-2",
        ),
        ("503 Slow Down", ["Retry-After: 7"], _error("SlowDown"), Throttled, True, "slow down"),
        ("429 Too Many", [], b"", Throttled, True, "slow down"),
        ("500 Oops", [], _error("InternalError", Message="try"), StorageError, True, "try"),
        ("502 Bad Gateway", [], b"<html>proxy</html>", StorageError, True, "502"),
        ("400 Bad Request", [], _error("BadDigest"), StorageError, True, "BadDigest"),
        ("400 Bad Request", [], _error("InvalidArgument"), StorageError, False, "InvalidArg"),
        ("501 Not Implemented", [], _error("NotImplemented"), StorageError, False, "NotImpl"),
        ("403 Forbidden", [], _error("QuotaExceeded"), StorageFull, False, "no quota"),
    ],
)
@bounded(30)
async def test_errors_name_the_bucket_and_the_remedy(
    status: str,
    fields: list[str],
    body: bytes,
    kind: type[StorageError],
    is_retryable: bool,
    remedy: str,
) -> None:
    def step(peer: Peer) -> None:
        peer.request()
        peer.answer(body, status, *fields)

    with serving(repeat(step)) as server:
        storage = bare("s3://thebucket/p", {"endpoint_url": server.url, **_KEYS})
        errors = []
        for op, call in (
            ("put", storage.put("the/key", [memoryview(b"x")])),
            ("read_into", storage.read_into("the/key", 5, [memoryview(bytearray(3))])),
            ("list_folders", storage.list_folders()),
        ):
            with pytest.raises(kind) as raised:
                await call
            errors.append(raised.value)
            assert raised.value.op == op
        await storage.aclose()
    assert [error.key for error in errors] == ["the/key", "the/key", ""]
    for error in errors:
        assert type(error) is kind
        assert error.retryable is is_retryable
        assert "thebucket" in str(error)
        assert error.backend == "s3://thebucket/p"
        assert re.search(remedy.replace("{", r"\{"), str(error))
        assert pickle.loads(pickle.dumps(error)).fields == error.fields
        assert (error.retry_after_s == 7) is ("Retry-After: 7" in fields)
        chain: list[BaseException | None] = [error, error.__cause__, error.__context__]
        shown = "".join(f"{each} {each!r}" for each in chain)
        assert not any(secret in shown for secret in _SECRETS)
        # Only what it adds is shown below our error: for example who was denied what.
        cause = error.__cause__
        assert (cause is None) is (remedy == "is wrong")
        assert error.__suppress_context__
        assert cause is None or cause.__traceback__ is None


@pytest.mark.parametrize(
    ("proxy", "error", "message"),
    [
        (f"http://u:{_SECRETS[1]}@host:x", UsageError, "a proxy is http://host:port"),
        (f"socks5://u:{_SECRETS[1]}@127.0.0.1:1", UsageError, "a proxy is http://host:port"),
        (f"u:{_SECRETS[1]}@127.0.0.1:1", StorageError, "cannot connect to 127.0.0.1:1:"),
    ],
)
@bounded(30)
async def test_proxies_that_cannot_be_used(
    proxy: str, error: type[Exception], message: str
) -> None:
    storage = bare("s3://bucket", {"proxies": {"http": proxy}, "endpoint_url": "http://h", **_KEYS})
    with pytest.raises(error, match=message) as raised:
        await storage.stat("key")
    assert _SECRETS[1] not in str(raised.value)
    await storage.aclose()


@bounded(30)
async def test_an_endpoint_of_the_environment_without_a_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"user:{_SECRETS[1]}@localhost:9000")
    storage = bare("s3://bucket", _KEYS)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL.* http://host") as raised:
        await storage.stat("key")
    assert _SECRETS[1] not in str(raised.value)
    await storage.aclose()


@bounded(30)
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
async def test_an_endpoint_without_a_password_is_shown(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "127.0.0.1:5987")
    storage = bare("s3://bucket", _KEYS)
    match = f"^{name} is '127.0.0.1:5987': it must begin with http:// or https://$"
    with pytest.raises(UsageError, match=match):
        await storage.stat("key")
    await storage.aclose()
    with pytest.raises(UsageError, match=r"without a user, not '127\.0\.0\.1:5987'"):
        bare("s3://bucket", {"endpoint_url": "127.0.0.1:5987", **_KEYS})
    with pytest.raises(UsageError, match="without a user$"):
        bare("s3://bucket", {"endpoint_url": "http://a:b@host", **_KEYS})


@bounded(30)
@pytest.mark.parametrize("status", ["404 File not found", "405 Not allowed", "501 Unsupported"])
async def test_an_endpoint_that_has_no_such_page(status: str) -> None:
    """As ``python -m http.server`` answers."""

    def step(peer: Peer) -> None:
        peer.request()
        peer.answer(b"<!DOCTYPE HTML>\n<html></html>", status, "Content-Type: text/html")

    with serving(repeat(step)) as server:
        storage = bare("s3://bucket/p", {"endpoint_url": server.url, **_KEYS})
        match = f"'bucket': {server.url} answered with a web page.*endpoint_url"
        with pytest.raises(StorageError, match=match) as raised:
            await storage.get("key")
        assert type(raised.value) is StorageError
        with pytest.raises(StorageError, match=match):
            [info async for info in storage.list("")]
        await storage.aclose()


@bounded(30)
async def test_an_object_that_is_a_page() -> None:
    page = b"<!doctype html><html></html>"

    def step(peer: Peer) -> None:
        peer.request()
        peer.answer(page, "200 OK", "Content-Type: binary/octet-stream")

    with serving(repeat(step)) as server:
        storage = bare("s3://bucket/p", {"endpoint_url": server.url, **_KEYS})
        assert await storage.get("key") == page
        await storage.aclose()


@bounded(30)
async def test_an_endpoint_that_serves_pages() -> None:
    """The console of a server has another port than its API."""

    def step(peer: Peer) -> None:
        peer.request()
        peer.answer(b"\n<!DOCTYPE html><html></html>", "200 OK", "Content-Type: text/html")

    with serving(repeat(step)) as server:
        storage = bare("s3://bucket/p", {"endpoint_url": server.url, **_KEYS})
        match = f"'bucket': {server.url} answered with a web page.*endpoint_url"
        for call in (storage.get("key"), storage.list_folders(), storage.put("key", [])):
            with pytest.raises(StorageError, match=match) as raised:
                await call
            assert not raised.value.retryable
        await storage.aclose()


@bounded(30)
async def test_what_a_denied_request_lacks() -> None:
    def step(peer: Peer) -> None:
        line, _, _ = peer.request()
        peer.answer(b"" if line.startswith("HEAD") else _error("AccessDenied"), "403 Forbidden")

    with serving(repeat(step)) as server:
        storage = bare("s3://bucket/p", {"endpoint_url": server.url, **_KEYS})
        reading = "reading needs s3:GetObject and s3:ListBucket"
        absent = "without s3:ListBucket, a missing object is denied, too"
        for call, texts in (
            (storage.get("key"), [reading, absent]),
            (storage.stat("key"), [reading, absent]),
            (storage.list_folders(), [reading]),
            (storage.put("key", []), ["saving needs s3:PutObject"]),
        ):
            with pytest.raises(AccessDenied) as raised:
                await call
            for text in texts:
                assert text in str(raised.value)
            assert (absent in str(raised.value)) is (absent in texts)
        await storage.aclose()


_CONNECT = "'bucket': cannot connect to 127.0.0.1.*; check .* endpoint_url"


@bounded(30)
async def test_an_endpoint_that_is_not_there() -> None:
    with serving(lambda peer: None) as server:
        pass
    storage = bare("s3://bucket", {"endpoint_url": server.url, **_KEYS})
    for call in (storage.put("key", []), storage.list_folders()):
        with pytest.raises(StorageError, match=_CONNECT) as raised:
            await call
        assert raised.value.retryable
    await storage.aclose()


@bounded(30)
async def test_a_silent_endpoint_is_given_up() -> None:
    with serving(lambda peer: peer.hang()) as server:
        options = {"endpoint_url": server.url, "stall_timeout_s": 0.2, **_KEYS}
        storage = bare("s3://bucket", options)
        for call in (storage.put("key", []), storage.list_folders()):
            with pytest.raises(
                StorageError, match=r"silent for 0.2 s; raise .* storage_options"
            ) as raised:
                await call
            assert raised.value.retryable
        await storage.aclose()


@bounded(30)
async def test_a_region_that_cannot_be_one() -> None:
    storage = bare("s3://bucket", {"region": "a region", **_KEYS})
    with pytest.raises(StorageError, match="region_name.*; correct the storage option") as raised:
        await storage.stat("key")
    assert type(raised.value) is StorageError
    await storage.aclose()


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.usefixtures("no_credentials")
@bounded(30)
async def test_no_credentials() -> None:
    storage = bare("s3://bucket", {"endpoint_url": "http://127.0.0.1:1"})
    for call in (storage.put("key", []), storage.list_folders()):
        with pytest.raises(AccessDenied, match="AWS_ACCESS_KEY_ID") as raised:
            await call
        assert raised.value.__cause__ is None  # it says nothing else
    await storage.aclose()
    storage = bare("s3://bucket", {"endpoint_url": "http://127.0.0.1:1", "profile": "nobody"})
    with pytest.raises(StorageError, match="nobody"):
        await storage.put("key", [])
    await storage.aclose()


@pytest.mark.usefixtures("no_credentials")
@pytest.mark.parametrize("place", ["environment", "file"])
@bounded(90)
async def test_credentials_that_come_later(
    moto: MotoServer, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    env = moto.env()
    keys = {name: env.pop(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    if place == "file":  # else the endpoint comes later, too
        for name, value in env.items():
            monkeypatch.setenv(name, value)
    url = moto.url(bucket, "s")
    snapshot = Snapshot(url)
    with pytest.raises(AccessDenied, match="no credentials"):
        await snapshot.exists()
    with pytest.raises(SnapshotAborted, match="no credentials"):
        await Snapshot.take(url, {"model": torch.nn.Linear(2, 2)})
    if place == "file":
        lines = [f"{name.lower()} = {value}" for name, value in keys.items()]
        (tmp_path / "credentials").write_text("\n".join(["[default]", *lines]))
    else:
        for name, value in (env | keys).items():
            monkeypatch.setenv(name, value)
    assert not await snapshot.exists()
    # The process that stores it began with the old environment.
    await (await Snapshot.async_take(url, {"model": torch.nn.Linear(2, 2)}))
    assert await snapshot.exists()


@pytest.mark.usefixtures("no_credentials")
@bounded(30)
async def test_an_endpoint_that_is_corrected_later(
    moto: MotoServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = moto.env()
    for name, value in {**env, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    storage = bare(f"s3://{bucket}", {})
    with pytest.raises(StorageError):
        await storage.put("key", [])
    await storage.aclose()
    monkeypatch.setenv("AWS_ENDPOINT_URL", env["AWS_ENDPOINT_URL"])
    storage = bare(f"s3://{bucket}", {})
    await storage.put("key", [])
    await storage.aclose()


@pytest.mark.usefixtures("no_credentials")
@bounded(30)
async def test_expired_credentials_are_looked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")

    def step(peer: Peer) -> None:
        _, headers, _ = peer.request()
        if "Credential=OLD/" in headers["authorization"]:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEW")  # as a sidecar would
            peer.answer(_error("ExpiredToken"), "400 Bad Request")
        else:
            peer.answer(b"data")

    with serving(repeat(step)) as server:
        storage = opened("s3://bucket", {"endpoint_url": server.url})
        assert await storage.get("key", 0, 4) == b"data"
        await storage.aclose()


@pytest.mark.usefixtures("no_credentials")
@pytest.mark.parametrize("token", [None, "token"])
@bounded(30)
async def test_expired_credentials_of_the_environment_fail_at_once(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    num_requests = 0

    def step(peer: Peer) -> None:
        nonlocal num_requests
        peer.request()
        num_requests += 1
        peer.answer(_error("ExpiredToken"), "400 Bad Request")

    with serving(repeat(step)) as server:
        storage = opened("s3://bucket", {"endpoint_url": server.url})
        with pytest.raises(AccessDenied, match="log in again"):
            await storage.get("key", 0, 4)
        await storage.aclose()
    assert num_requests == 1


@pytest.mark.parametrize("token", [None, "a/token+with=signs"])
@pytest.mark.parametrize(
    ("method", "url", "headers"),
    [
        ("GET", "http://127.0.0.1:9000/b/run-1/a~b/c%20d%2Be", {"Range": "bytes=0-9"}),
        ("GET", "https://b.s3.eu-west-1.amazonaws.com:443/k", {}),
        (
            "PUT",
            "https://[::1]:8443/b/k?uploadId=2~a%2F%3D&partNumber=10&part-a=1&part=2",
            {
                "x-amz-checksum-crc32c": "AAAAAA==",
                "x-amz-tagging": "a=b&c=  d",
                "If-None-Match": "*",
            },
        ),
    ],
)
def test_signatures_are_those_of_botocore(
    method: str,
    url: str,
    headers: dict[str, str],
    token: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: now)
    credentials = Credentials("AKIDOFATEST", "a-secret", token).get_frozen_credentials()
    headers = {"User-Agent": "actorsnap", **headers}
    payload = hashlib.sha256(b"x").hexdigest()

    class Signer(S3SigV4Auth):  # type: ignore[misc]
        def payload(self, request: AWSRequest) -> str:
            return payload

    request = AWSRequest(method=method, url=url, headers=headers)
    Signer(credentials, "s3", "eu-west-1").add_auth(request)
    added = sign(method, url, headers, credentials, region="eu-west-1", payload=payload, now=now)
    assert {**headers, **added} == dict(request.headers.items())


@bounded(30)
async def test_anonymous_requests_are_not_signed() -> None:
    seen: list[dict[str, str]] = []

    def step(peer: Peer) -> None:
        seen.append(peer.request()[1])
        peer.answer(b"data")

    with serving(repeat(step)) as server:
        storage = bare("s3://bucket", {"endpoint_url": server.url, "anonymous": True})
        assert await storage.get("key", 0, 4) == b"data"
        await storage.delete([])
        await storage.stat("key")
        await storage.aclose()
    assert len(seen) == 2
    assert not any("authorization" in headers for headers in seen)


# --- servers that know less -----------------------------------------------------------------------


class Lax:
    """A server that heeds no conditions and compares no checksums. Signatures are not looked at."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts: list[tuple[str, dict[str, str], bytes]] = []
        self.after_put: Callable[[str], None] = lambda path: None
        self.fields: Callable[[dict[str, str]], list[str]] = lambda headers: []

    def step(self, peer: Peer) -> None:
        line, headers, body = peer.request()
        method, target, _ = line.split(" ")
        path = urlsplit(target).path
        match method:
            case "PUT":
                self.puts.append((target, headers, body))
                self.objects[path] = body
                self.after_put(path)
                peer.answer(b"", "200 OK", 'ETag: "x"', *self.fields(headers))
            case "POST":
                for key in re.findall(b"<Key>(.*?)</Key>", body):
                    self.objects.pop(f"{path}/{key.decode()}", None)
                peer.answer(b"<DeleteResult/>")
            case _ if path not in self.objects:
                peer.answer(b"" if method == "HEAD" else _error("NoSuchKey"), "404 Not Found")
            case "HEAD":
                peer.say(
                    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n"
                    b"Last-Modified: Wed, 01 Jan 2020 00:00:00 GMT\r\n\r\n"
                )
            case _:
                peer.answer(self.objects[path])


@bounded(30)
async def test_a_server_without_conditional_puts_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lax = Lax()
    with serving(repeat(lax.step)) as server, caplog.at_level(logging.WARNING):
        storage = bare("s3://bucket/p", {"endpoint_url": server.url, **_KEYS})
        before = storage.capabilities
        await storage.put_if_absent("one", b"one")
        assert before.has_conditional_put
        assert not storage.capabilities.has_conditional_put
        with pytest.raises(ObjectExists):
            await storage.put_if_absent("one", b"two")
        assert lax.objects == {"/bucket/p/one": b"one"}, "the probe is left, or the object replaced"
        assert [record.message for record in caplog.records] == [
            "s3://bucket/p: the server does not heed If-None-Match: of two writers at the same "
            "moment the last one wins, and each sees by reading back whose it is"
        ]

        # Another writer comes between the put and the reading back.
        lax.after_put = lambda path: lax.objects.update({path: b"theirs"})
        with pytest.raises(ObjectExists):
            await storage.put_if_absent("two", b"ours")
        await storage.aclose()


@bounded(30)
async def test_a_probe_does_not_stay_if_its_deletion_is_throttled() -> None:
    lax = Lax()
    with serving(repeat(lax.step)) as server, FaultProxy(server.url) as proxy:
        storage = bare("s3://bucket/p", {"endpoint_url": proxy.endpoint, **_KEYS})
        with proxy.fault(Answer(status=503), method="POST", pattern="delete", times=2):
            await storage.put_if_absent("one", b"one")
        assert list(lax.objects) == ["/bucket/p/one"]
        await storage.aclose()


@bounded(30)
async def test_payloads_are_signed_where_checksums_are_not_compared() -> None:
    lax = Lax()
    with serving(repeat(lax.step)) as server:
        storage = bare("s3://bucket", {"endpoint_url": server.url, **_KEYS})
        await storage.put("one", [memoryview(b"o"), memoryview(b"ne")])
        await storage.put("two", [memoryview(b"two")])
        await storage.aclose()
    hashes = [headers["x-amz-content-sha256"] for _, headers, _ in lax.puts]
    nothing, one, two = (hashlib.sha256(data).hexdigest() for data in (b"", b"one", b"two"))
    assert hashes == ["UNSIGNED-PAYLOAD", nothing, one, two]
    assert [body for _, _, body in lax.puts] == [b"one", b"x", b"one", b"two"]
    # It let pass what is not what was signed.
    md5s = [headers.get("content-md5") for _, headers, _ in lax.puts]
    expected = [base64.b64encode(hashlib.md5(data).digest()).decode() for data in (b"one", b"two")]
    assert md5s == [None, None, *expected]
    assert list(lax.objects) == ["/bucket/one", "/bucket/two"], "the probe is left"


@bounded(30)
async def test_a_server_that_checks_signed_payloads_needs_no_more() -> None:
    lax = Lax()

    def step(peer: Peer) -> None:
        line, headers, body = peer.request()
        lax.puts.append((line, headers, body))
        signed = headers["x-amz-content-sha256"]
        if signed in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
            peer.answer(b"", "200 OK", 'ETag: "x"')
        else:
            peer.answer(_error("XAmzContentSHA256Mismatch"), "400 Bad Request")

    with serving(repeat(step)) as server:
        storage = bare("s3://bucket", {"endpoint_url": server.url, **_KEYS})
        await storage.put("one", [memoryview(b"one")])
        await storage.put("two", [memoryview(b"two")])
        await storage.aclose()
    bodies = [body for line, _, body in lax.puts if line.startswith("PUT")]
    assert bodies == [b"one", b"x", b"one", b"two"]
    assert not any("content-md5" in headers for line, headers, _ in lax.puts if "PUT" in line)


@bounded(30)
async def test_what_arrives_otherwise_is_refused() -> None:
    lax = Lax()
    with serving(repeat(lax.step)) as server:
        storage = bare("s3://bucket", {"endpoint_url": server.url, **_KEYS})
        lax.fields = lambda headers: ["x-amz-checksum-crc32c: AAAAAA=="]
        with pytest.raises(StorageError, match="another CRC32C") as raised:
            await storage.put("key", [memoryview(b"data")])
        assert raised.value.retryable
        lax.fields = lambda headers: [f"x-amz-checksum-crc32c: {headers['x-amz-checksum-crc32c']}"]
        await storage.put("key", [memoryview(b"data")])
        await storage.aclose()
    _, headers, _ = lax.puts[-1]
    assert headers["x-amz-checksum-crc32c"] == "rth90Q=="
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


@bounded(30)
async def test_a_server_that_does_not_heed_ranges_restores_nothing() -> None:
    lax = Lax()
    with serving(repeat(lax.step)) as server:
        storage = bare("s3://bucket", {"endpoint_url": server.url, **_KEYS})
        lax.objects["/bucket/key"] = b"0123456789"
        for size in (10, 5):
            with pytest.raises(ActorSnapError):
                await storage.read_into("key", 3, [memoryview(bytearray(size))])
        await storage.aclose()
