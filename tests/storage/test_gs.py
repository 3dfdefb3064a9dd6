# SPDX-License-Identifier: Apache-2.0
"""Storage in Google Cloud Storage: the contract, faults of the network, credentials, errors."""

from __future__ import annotations

import json
import logging
import random
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from urllib.parse import parse_qs

import aiohttp
import anyio
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from actorsnap import sync
from actorsnap.errors import (
    AccessDenied,
    NotASnapshot,
    ObjectNotFound,
    SnapshotAborted,
    StorageError,
    Throttled,
    UsageError,
)
from actorsnap.format.checksum import crc32c
from actorsnap.storage import Storage, StorageContext
from actorsnap.storage.base import ObjectWriter
from actorsnap.storage.gs import open_gs
from actorsnap.storage.gs_client import GsClient, GsOptions, NewObject
from actorsnap.storage.wire import is_unknown_host
from actorsnap.testing import StorageConformance, bounded, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage, keys_in, pattern
from tests.servers.fake_gcs import FakeGcsServer
from tests.support.cases import slow
from tests.support.proxy import (
    Answer,
    Fault,
    FaultProxy,
    FlipBit,
    LoseAnswer,
    Reset,
    Stall,
    TlsFiles,
    Truncate,
    Way,
)

MIB = 1 << 20
SECRET = "ya29.a-token-that-no-log-may-show"


def opened(url: str, options: dict[str, Any]) -> Storage:
    return open_gs(url, StorageContext(run_blocking=run_blocking_in_thread, options=options))


@pytest.fixture
def bucket(fake_gcs: FakeGcsServer) -> str:
    return fake_gcs.make_bucket()


@pytest.fixture
def proxy(fake_gcs: FakeGcsServer) -> Iterator[FaultProxy]:
    with FaultProxy(fake_gcs.endpoint) as proxy:
        yield proxy


@pytest.mark.few(1)
class TestGs(StorageConformance):
    num_many = 100
    num_examples = 10

    # A rewrite of the fake ignores conditions.
    test_a_copying_writer_does_not_harm_an_object_that_exists = None  # type: ignore[assignment]

    @pytest.fixture
    def make_storage(self, fake_gcs: FakeGcsServer, bucket: str) -> MakeStorage:
        options = {**fake_gcs.storage_options(), "max_attempts": 2}
        return lambda: opened(fake_gcs.url(bucket, "some/prefix"), options)


@pytest.mark.slow
class TestGsOverTls(StorageConformance):
    num_many = 50
    num_examples = 5

    # A rewrite of the fake ignores conditions.
    test_a_copying_writer_does_not_harm_an_object_that_exists = None  # type: ignore[assignment]

    @pytest.fixture
    def make_storage(
        self, fake_gcs: FakeGcsServer, bucket: str, tls_files: TlsFiles
    ) -> Iterator[MakeStorage]:
        with FaultProxy(fake_gcs.endpoint, tls=tls_files) as proxy:
            options = {**fake_gcs.storage_options(through=proxy), "max_attempts": 2}
            yield lambda: opened(fake_gcs.url(bucket), options)


# --- components ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_writes", [2, slow(32), 33])
@bounded(60)
async def test_any_number_of_components_becomes_one_object(
    fake_gcs: FakeGcsServer, bucket: str, num_writes: int
) -> None:
    storages = [opened(fake_gcs.url(bucket), fake_gcs.storage_options()) for _ in range(2)]
    data = pattern(MIB * num_writes - 7)
    opener = await storages[0].writer("folder/key", len(data))
    joined = await storages[1].join_writer(opener.token)
    numbers = random.Random(0).sample(range(num_writes), num_writes)
    for number in numbers:
        view = memoryview(data)[MIB * number : MIB * number + MIB]
        await (opener, joined)[number % 2].write_at(MIB * number, [view])
    assert all(key.startswith("folder/") for key in await keys_in(storages[0]))
    await joined.release()
    await opener.complete()
    assert await keys_in(storages[0]) == ["folder/key"]
    assert await storages[0].get("folder/key") == data
    for storage in storages:
        await storage.aclose()


@pytest.mark.parametrize("size", [0, MIB - 1, MIB])
@bounded(60)
async def test_an_object_of_one_write_is_one_request(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy, size: int
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options(through=proxy))
    writer = await storage.writer("key", size)
    await writer.write_at(0, [memoryview(pattern(size))])
    await writer.complete()
    [exchange] = proxy.exchanges()
    assert exchange.bytes_up > size
    assert await keys_in(storage) == ["key"]
    await storage.aclose()


@bounded(60)
async def test_an_object_of_many_writes_is_two_requests_more(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options(through=proxy))
    writer = await storage.writer("key", 20 * MIB)
    for offset in range(0, 20 * MIB, MIB):
        await writer.write_at(offset, [memoryview(bytes(MIB))])
    await writer.complete()
    targets = [exchange.target for exchange in proxy.exchanges()]
    assert ["/upload/" in target for target in targets] == [True] * 20 + [False] * 2
    assert ["/compose" in targets[20], "/batch/" in targets[21]] == [True, True]
    await storage.aclose()


@bounded(60)
async def test_who_joins_after_the_end_changes_nothing(
    fake_gcs: FakeGcsServer, bucket: str
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options())
    data = pattern(2 * MIB)
    writer = await storage.writer("folder/key", len(data))
    for offset in (0, MIB):
        await writer.write_at(offset, [memoryview(data)[offset : offset + MIB]])
    await writer.complete()
    late = await storage.join_writer(writer.token)
    await late.write_at(MIB, [memoryview(bytes(MIB))])
    await late.release()
    assert await storage.get("folder/key") == data
    await storage.delete_folder("folder")
    assert await keys_in(storage) == []
    await storage.aclose()


@bounded(60)
async def test_bytes_that_were_never_written_are_missed(
    fake_gcs: FakeGcsServer, bucket: str
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options())
    writer = await storage.writer("key", 3 * MIB)
    for offset in (0, 2 * MIB):
        await writer.write_at(offset, [memoryview(pattern(MIB))])
    with pytest.raises(StorageError, match=f"byte {MIB} of {3 * MIB}"):
        await writer.complete()
    await writer.abort()
    assert await keys_in(storage) == []
    await storage.aclose()


@bounded(60)
async def test_a_dead_writer_leaves_nothing_outside_of_its_folder(
    fake_gcs: FakeGcsServer, bucket: str
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options())
    writer = await storage.writer("attempt/data/key", 2 * MIB)
    await writer.write_at(0, [memoryview(pattern(MIB))])
    assert await storage.list_folders() == ["attempt"]
    assert len(await storage.delete_folder("attempt")) == 1
    assert await keys_in(storage) == []
    await storage.aclose()


@bounded(60)
async def test_completing_again_after_a_lost_answer(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options(through=proxy))
    data = pattern(2 * MIB)
    writer = await storage.writer("key", len(data))
    for offset in (0, MIB):
        await writer.write_at(offset, [memoryview(data)[offset : offset + MIB]])
    with (
        proxy.fault(LoseAnswer(), pattern="compose", times=1),
        proxy.fault(Answer(status=500), pattern="/batch/", times=1),
    ):
        await writer.complete()
    assert await storage.get("key") == data
    assert await keys_in(storage) == ["key"]
    await storage.aclose()


@bounded(60)
async def test_a_component_that_the_server_loses(fake_gcs: FakeGcsServer, bucket: str) -> None:
    options = {**fake_gcs.storage_options(), "max_attempts": 1}
    storage = opened(fake_gcs.url(bucket), options)
    writer = await storage.writer("key", 2 * MIB)
    for offset in (0, MIB):
        await writer.write_at(offset, [memoryview(pattern(MIB))])
    await storage.delete([(await keys_in(storage))[1]])
    with pytest.raises(StorageError, match="complete of 'key'"):
        await writer.complete()
    await writer.abort()
    assert await keys_in(storage) == []
    await storage.aclose()


@bounded(60)
async def test_transfers_wait_where_there_is_room_for_many(
    fake_gcs: FakeGcsServer, bucket: str
) -> None:
    num_waiting = 0

    async def run_io(fn: Any, /, *args: Any) -> Any:
        nonlocal num_waiting
        num_waiting += 1
        return await run_blocking_in_thread(fn, *args)

    context = StorageContext(
        run_blocking=run_blocking_in_thread,
        run_io=run_io,
        options=fake_gcs.storage_options(),
    )
    storage = open_gs(fake_gcs.url(bucket), context)
    await storage.put("key", [memoryview(b"x")])
    await storage.read_into("key", 0, [memoryview(bytearray(1))])
    assert num_waiting == 2
    await storage.aclose()


# --- older objects ------------------------------------------------------------------------------


async def left(storage: Storage, data: bytes, *, key: str = "older/key") -> None:
    """What a writer that died before it could complete has left: MiB for MiB."""
    writer = await storage.writer(key, len(data))
    for offset in range(0, len(data), MIB):
        await writer.write_at(offset, [memoryview(data)[offset : offset + MIB]])


async def reused(writer: ObjectWriter, data: bytes, at: int, *, num: int = MIB) -> bool:
    view = memoryview(data)[at : at + num]
    return await writer.reuse(at, [view], crc32c(view))


@bounded(60)
async def test_older_components_are_copied_by_one_request_each(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options(through=proxy))
    data = pattern(3 * MIB)
    await left(storage, data[: 2 * MIB])
    proxy.forget()
    writer = await storage.writer("newer/key", len(data), older=["older/key"])
    joined = await storage.join_writer(writer.token)
    assert await reused(writer, data, 0)
    assert await reused(joined, data, MIB)
    assert not await reused(writer, data, 2 * MIB)
    asked = [exchange.target for exchange in proxy.exchanges()]
    assert ["/rewriteTo/" in target for target in asked] == [False, False, True, True]
    # It depends on them no more.
    await storage.delete_folder("older")
    await writer.write_at(2 * MIB, [memoryview(data)[2 * MIB :]])
    await writer.complete()
    assert await storage.get("newer/key") == data
    assert await keys_in(storage) == ["newer/key"]
    await storage.aclose()


@pytest.mark.parametrize("size", [MIB // 2, 3 * MIB])
@bounded(60)
async def test_an_older_object_of_one_write_is_copied(
    fake_gcs: FakeGcsServer, bucket: str, size: int
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options())
    data = pattern(size)
    await storage.put("older/key", [memoryview(data)])
    writer = await storage.writer("newer/key", size, older=["older/key"])
    assert await reused(writer, data, 0, num=size)
    await writer.complete()
    assert await storage.get("newer/key") == data
    await storage.aclose()


@bounded(60)
async def test_what_vanishes_or_changes_while_it_is_copied_is_sent(
    fake_gcs: FakeGcsServer, bucket: str
) -> None:
    """By a collector, and by a writer that is not dead."""
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options())
    data = pattern(3 * MIB)
    await left(storage, data)
    writer = await storage.writer("newer/key", len(data), older=["older/key"])
    first, second, _ = sorted(await keys_in(storage))
    await storage.delete([first])
    await storage.put(second, [memoryview(bytes(MIB))])
    for n, is_there in enumerate((False, False, True)):
        assert await reused(writer, data, n * MIB) is is_there
        if not is_there:
            await writer.write_at(n * MIB, [memoryview(data)[n * MIB : (n + 1) * MIB]])
    await writer.complete()
    assert await storage.get("newer/key") == data
    await storage.aclose()


@bounded(60)
async def test_a_bit_that_flipped_in_an_older_component(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    """A server that does not look stores it, and the writer dies before it has deleted that."""
    options = {**fake_gcs.storage_options(through=proxy), "max_attempts": 1}
    storage = opened(fake_gcs.url(bucket), options)
    data = pattern(2 * MIB)
    with (
        proxy.fault(FlipBit(way=Way.UP, at_byte=UP), pattern="/upload/", times=1),
        proxy.fault(Reset(way=Way.UP), pattern="/batch/", times=1),
        pytest.raises(StorageError),
    ):
        await left(storage, data)
    assert len(await keys_in(storage)) == 1
    writer = await storage.writer("newer/key", len(data), older=["older/key"])
    assert not await reused(writer, data, 0)
    assert not any("rewriteTo" in exchange.target for exchange in proxy.exchanges())
    await storage.aclose()


@bounded(60)
async def test_older_objects_that_may_not_be_listed_are_sent(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    storage = opened(fake_gcs.url(bucket), fake_gcs.storage_options(through=proxy))
    data = pattern(2 * MIB)
    await left(storage, data)
    with proxy.fault(Answer(status=403), method="GET", times=1):
        writer = await storage.writer("newer/key", len(data), older=["older/key"])
    assert not await reused(writer, data, 0)
    writer = await storage.writer("newer/key", len(data), older=["older/key"])
    with proxy.fault(Answer(status=403), pattern="rewriteTo", times=1):
        assert not await reused(writer, data, 0)
    with proxy.fault(Answer(status=503), pattern="rewriteTo", times=1):
        assert await reused(writer, data, 0)
    await writer.abort()
    await storage.aclose()


# --- faults -------------------------------------------------------------------------------------

UP = 300_000
"""Somewhere in the body of an upload of 1 MiB."""


@pytest.mark.parametrize(
    "fault",
    [
        Answer(status=503),
        slow(Answer(status=429, retry_after_s=0)),
        slow(Answer(status=500)),
        slow(Answer(status=408)),
        LoseAnswer(),
        slow(Reset(way=Way.UP, after_bytes=UP)),
        slow(Stall(way=Way.UP, after_bytes=UP)),
        FlipBit(way=Way.UP, at_byte=UP),
    ],
    ids=repr,
)
@bounded(60)
async def test_faults_on_the_way_up(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy, fault: Fault
) -> None:
    options = fake_gcs.storage_options(through=proxy)
    storage = opened(fake_gcs.url(bucket), {**options, "stall_timeout_s": 0.5})
    data = pattern(3 * MIB)
    writer = await storage.writer("key", len(data))
    with proxy.fault(fault, pattern="/upload/", skip=1, times=2):
        for offset in range(0, len(data), MIB):
            view = memoryview(data)[offset : offset + (MIB)]
            await writer.write_at(offset, [view[:100_000], view[100_000:]])
    await writer.complete()
    assert await storage.get("key") == data
    await storage.aclose()


@pytest.mark.parametrize(
    "fault",
    [
        slow(Answer(status=503)),
        slow(Reset(way=Way.DOWN, after_bytes=UP)),
        slow(Truncate(way=Way.DOWN, after_bytes=UP)),
        Stall(way=Way.DOWN, after_bytes=UP),
        FlipBit(way=Way.DOWN, at_byte=UP),
    ],
    ids=repr,
)
@bounded(60)
async def test_faults_on_the_way_down(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy, fault: Fault
) -> None:
    options = fake_gcs.storage_options(through=proxy)
    storage = opened(fake_gcs.url(bucket), {**options, "stall_timeout_s": 0.5})
    data = pattern(MIB)
    await storage.put("key", [memoryview(data)])
    with proxy.fault(fault, pattern="alt=media", times=2):
        assert await storage.get("key") == data
    if not isinstance(fault, FlipBit):  # of a range the service tells no checksum
        target = bytearray(len(data))
        with proxy.fault(fault, pattern="alt=media", times=2):
            await storage.read_into("key", 0, [memoryview(target)])
        assert target == data
    await storage.aclose()


@bounded(60)
async def test_a_damaged_composite_is_never_complete(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    options = {**fake_gcs.storage_options(through=proxy), "max_attempts": 2}
    storage = opened(fake_gcs.url(bucket), options)
    writer = await storage.writer("key", 2 * MIB)
    for offset in (0, MIB):
        await writer.write_at(offset, [memoryview(pattern(MIB))])
    other = opened(fake_gcs.url(bucket), fake_gcs.storage_options())
    [component, _] = await keys_in(other)
    await other.put(component, [memoryview(pattern(MIB + 1))])
    with pytest.raises(StorageError, match=f"{2 * MIB + 1} bytes with CRC32C"):
        await writer.complete()
    await writer.abort()
    assert await keys_in(storage) == []
    await storage.aclose()
    await other.aclose()


# --- errors -------------------------------------------------------------------------------------


@bounded(60)
async def test_no_such_bucket(fake_gcs: FakeGcsServer) -> None:
    storage = opened("gs://no-such-bucket/a", fake_gcs.storage_options())
    with pytest.raises(StorageError, match=r"no-such-bucket.*buckets create") as raised:
        await storage.put("key", [memoryview(b"x")])
    assert not raised.value.retryable
    with pytest.raises(StorageError, match="no-such-bucket"):
        await keys_in(storage)
    with pytest.raises(ObjectNotFound):
        await storage.get("key")
    await storage.aclose()


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (401, AccessDenied, "credentials were refused"),
        slow(403, AccessDenied, "roles/storage.objectUser"),
        slow(400, StorageError, "bucket '.*': HTTP 400"),
        (429, Throttled, "HTTP 429"),
        slow(503, Throttled, "given up after 2 tries"),
    ],
)
@bounded(60)
async def test_refusals(
    fake_gcs: FakeGcsServer,
    bucket: str,
    proxy: FaultProxy,
    status: int,
    kind: type[StorageError],
    says: str,
) -> None:
    options = {"endpoint_url": proxy.endpoint, "token": SECRET, "max_attempts": 2}
    storage = opened(fake_gcs.url(bucket, "p"), options)
    target = [memoryview(bytearray(1))]
    with proxy.fault(Answer(status=status)):
        for call in (
            storage.put("key", [memoryview(b"x")]),
            storage.read_into("key", 0, target),
            storage.get("key"),
            storage.stat("key"),
            storage.delete(["key"]),
        ):
            with pytest.raises(kind) as raised:
                await call
            told = "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
            assert re.search(says, told)
            assert raised.value.key == "key"
            assert bucket in told
            assert SECRET not in repr(raised.getrepr(showlocals=False))
    expected = 10 if kind is Throttled else 5
    assert len(proxy.exchanges()) == expected
    await storage.aclose()


@pytest.mark.parametrize("is_silent", [True, False])
@bounded(30)
async def test_an_endpoint_that_does_not_answer(is_silent: bool) -> None:
    with anyio.CancelScope():
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        if not is_silent:
            await listener.aclose()
        options = {
            "endpoint_url": f"http://127.0.0.1:{port}",
            "anonymous": True,
            "stall_timeout_s": 0.2,
            "max_attempts": 2,
        }
        storage = opened("gs://bucket/p", options)
        for call in (storage.put("key", [memoryview(b"x")]), storage.get("key")):
            with pytest.raises(StorageError, match=f"127.0.0.1:{port}") as raised:
                await call
            assert raised.value.retryable
        await storage.aclose()
        await listener.aclose()


@bounded(30)
async def test_a_certificate_that_is_not_trusted(
    fake_gcs: FakeGcsServer, bucket: str, tls_files: TlsFiles
) -> None:
    with FaultProxy(fake_gcs.endpoint, tls=tls_files) as proxy:
        options = {"endpoint_url": proxy.endpoint, "anonymous": True}
        storage = opened(fake_gcs.url(bucket), options)
        for call in (storage.put("key", [memoryview(b"x")]), storage.get("key")):
            with pytest.raises(StorageError, match="ca_bundle|not trusted") as raised:
                await call
            assert not raised.value.retryable
        await storage.aclose()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoint": "x"}, "no storage option 'endpoint'; did you mean 'endpoint_url'"),
        ({"token": 5}, "token"),
        ({"token": SECRET, "anonymous": True}, "exclude each other"),
        ({"endpoint_url": "localhost:80"}, "http://host"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"stall_timeout_s": 0}, "stall_timeout_s"),
        ({"stall_timeout_s": float("inf")}, "stall_timeout_s"),
        ({"token": f"{SECRET}\n"}, "token must be"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        opened("gs://bucket", options)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["gs://", "gs:///a", "gs://UPPER/a", "gs://bucket/a//b", f"gs://me:{SECRET}@bucket/a"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        opened(url, {})
    assert SECRET not in str(raised.value)


@bounded(30)
async def test_nobody_listens() -> None:
    options = {"endpoint_url": "http://127.0.0.1:1", "anonymous": True, "max_attempts": 1}
    storage = opened("gs://the-bucket/p", options)
    for call in (storage.stat("key"), storage.put("key", [memoryview(b"x")])):
        with pytest.raises(StorageError, match="the-bucket.*endpoint_url") as raised:
            await call
        assert raised.value.key == "key"
    await storage.aclose()


def test_a_token_is_not_shown() -> None:
    assert SECRET not in repr(GsOptions(token=SECRET))


# --- credentials --------------------------------------------------------------------------------


_FOUND = {
    "name": "key",
    "size": "5",
    "crc32c": "AAAAAA==",
    "updated": "2026-01-01T00:00:00Z",
}


class _Google(BaseHTTPRequestHandler):
    """Gives tokens ``token-1``, ``token-2``, ...; objects to whoever has the latest one."""

    given: ClassVar[list[dict[str, list[str]]]]
    num_refused: ClassVar[int]
    num_expired: ClassVar[int]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path.startswith("/batch"):
            self._answer_batch(body.decode())
            return
        if "/rewriteTo/" in self.path:
            is_last = "rewriteToken=more" in self.path
            self._answer(200, {"resource": _FOUND} if is_last else {"rewriteToken": "more"})
            return
        if self.path.startswith("/upload"):
            # As the real service says it; fake-gcs-server stores what arrives.
            message = 'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "AAAAAB==".'
            type(self).num_refused += 1
            self._answer(400, {"error": {"message": message}})
            return
        self.given.append(parse_qs(body.decode()))
        self._answer(200, {"access_token": f"token-{len(self.given)}", "expires_in": 3600})

    def do_GET(self) -> None:
        latest = f"Bearer token-{len(self.given)}"
        if self.headers["authorization"] != latest or len(self.given) <= self.num_expired:
            type(self).num_refused += 1
            self._answer(401, {"error": {"message": "Invalid Credentials"}})
            return
        self._answer(200, _FOUND)

    def _answer_batch(self, body: str) -> None:
        """Deletes objects; answers in another order, and of each with the status in its name."""
        asked = re.findall(r"Content-ID: <(\d+)>\r\n\r\nDELETE \S+%2F(\d+) HTTP", body)
        parts = [
            "--answer\r\nContent-Type: application/http\r\n"
            f"Content-ID: <response-{number}>\r\n\r\nHTTP/1.1 {status} As said\r\n"
            'Content-Type: application/json\r\n\r\n{"error": {"message": "Said so"}}\r\n'
            for number, status in reversed(asked)
        ]
        data = ("".join(parts) + "--answer--").encode()
        self._send(200, "multipart/mixed; boundary=answer", data)

    def _answer(self, status: int, content: object) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, content_type: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def google() -> Iterator[tuple[str, type[_Google]]]:
    class Handler(_Google):
        given: ClassVar[list[dict[str, list[str]]]] = []
        num_refused = 0
        num_expired = 0

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Handler
    server.shutdown()
    thread.join()
    server.server_close()


def write_service_account(folder: Path, url: str) -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    content = {
        "type": "service_account",
        "client_email": "saver@project.iam",
        "private_key": pem.decode(),
        "token_uri": f"{url}/token",
    }
    (folder / "key.json").write_text(json.dumps(content))
    return str(folder / "key.json")


def write_workload_identity(folder: Path, url: str) -> str:
    (folder / "subject").write_text("the-subject-token")
    content = {
        "type": "external_account",
        "audience": "pool",
        "subject_token_type": "jwt",
        "token_url": f"{url}/token",
        "credential_source": {"file": str(folder / "subject")},
    }
    (folder / "identity.json").write_text(json.dumps(content))
    return str(folder / "identity.json")


@pytest.mark.few(3)
@pytest.mark.blocking  # gcloud-aio reads the file of a workload identity's token on the loop
@pytest.mark.parametrize("num_expired", [0, 1])
@pytest.mark.parametrize("how", ["service-account", "workload-identity", "default"])
@bounded(30)
async def test_credentials(
    google: tuple[str, type[_Google]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    num_expired: int,
) -> None:
    url, handler = google
    handler.num_expired = num_expired
    write = write_workload_identity if how == "workload-identity" else write_service_account
    options: dict[str, Any] = {"endpoint_url": url}
    if how == "default":
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", write(tmp_path, url))
    else:
        options["credentials_file"] = write(tmp_path, url)
    storage = opened("gs://bucket", options)
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(storage.stat, "key")
    # One token for all, and another one only when that was refused.
    assert len(handler.given) == 1 + num_expired
    asked = handler.given[0]
    if how == "workload-identity":
        assert asked["subject_token"] == ["the-subject-token"]
    else:
        assert "jwt-bearer" in asked["grant_type"][0]
    await storage.aclose()


@bounded(30)
async def test_a_token_that_is_refused_again_is_an_error(
    google: tuple[str, type[_Google]], tmp_path: Path
) -> None:
    url, handler = google
    handler.num_expired = 100
    options = {"endpoint_url": url, "credentials_file": write_service_account(tmp_path, url)}
    storage = opened("gs://bucket", options)
    with pytest.raises(AccessDenied, match="Invalid Credentials"):
        await storage.stat("key")
    assert handler.num_refused == 2
    await storage.aclose()


@bounded(30)
async def test_bytes_that_the_service_finds_damaged_are_sent_again(
    google: tuple[str, type[_Google]],
) -> None:
    url, handler = google
    storage = opened("gs://bucket", {"endpoint_url": url, "anonymous": True, "max_attempts": 3})
    with pytest.raises(StorageError, match="match calculated CRC32C"):
        await storage.put("key", [memoryview(b"x")])
    assert handler.num_refused == 3
    await storage.aclose()


@bounded(30)
async def test_a_copy_of_several_requests(google: tuple[str, type[_Google]]) -> None:
    url, _ = google
    options = GsOptions(endpoint_url=url, anonymous=True)
    context = StorageContext(run_blocking=run_blocking_in_thread)
    client = GsClient("bucket", "gs://bucket", options, context)
    copied = await client.copy("reuse", "key", NewObject(name="new", storage_class=None), "old")
    assert (copied.name, copied.size) == ("key", 5)
    await client.aclose()


@pytest.mark.parametrize(
    ("status", "kind"), [(204, None), (404, None), (403, AccessDenied), (503, Throttled)]
)
@bounded(30)
async def test_deletions_of_which_one_fails(
    google: tuple[str, type[_Google]], status: int, kind: type[StorageError] | None
) -> None:
    url, _ = google
    storage = opened("gs://bucket", {"endpoint_url": url, "anonymous": True, "max_attempts": 1})
    keys = [f"{n}/204" for n in range(250)] + [f"that/{status}"]
    if kind is None:
        await storage.delete(keys)
    else:
        with pytest.raises(kind, match="Said so") as raised:
            await storage.delete(keys)
        assert raised.value.key == f"that/{status}"
    await storage.aclose()


@bounded(30)
async def test_credentials_that_cannot_be_read(tmp_path: Path) -> None:
    options = {"credentials_file": str(tmp_path / "missing.json")}
    storage = opened("gs://bucket", options)
    with pytest.raises(AccessDenied, match=r"missing.json.*credentials_file"):
        await storage.stat("key")
    await storage.aclose()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts whose address is looked for; there are none."""
    found: list[str] = []

    def getaddrinfo(host: str, *_: object, **__: object) -> NoReturn:
        found.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return found


@bounded(30)
async def test_no_credentials_are_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """No file names any, and no metadata server exists: neither changes while one waits."""
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    retried: list[object] = []
    context = StorageContext(
        run_blocking=run_blocking_in_thread, on_retry=lambda *what: retried.append(what)
    )
    storage = open_gs("gs://bucket", context)
    with pytest.raises(AccessDenied, match="gcloud auth application-default login"):
        await storage.stat("key")
    await storage.aclose()
    assert asked == ["metadata.google.internal"]
    assert retried == []


@bounded(30)
async def test_an_unknown_host_is_an_error_at_once(asked: list[str]) -> None:
    retried: list[object] = []
    options = {"endpoint_url": "http://nothing.invalid", "anonymous": True}
    context = StorageContext(
        run_blocking=run_blocking_in_thread,
        options=options,
        on_retry=lambda *what: retried.append(what),
    )
    storage = open_gs("gs://bucket", context)
    with pytest.raises(StorageError, match=r"nothing\.invalid"):
        await storage.stat("key")
    await storage.aclose()
    assert asked == ["nothing.invalid"]
    assert retried == []


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_a_resolver_that_fails_for_now_is_asked_again(number: int) -> None:
    error = aiohttp.ClientConnectionError()
    error.__cause__ = socket.gaierror(number, "no address")
    assert is_unknown_host(error) == (number != socket.EAI_AGAIN)


# --- snapshots ----------------------------------------------------------------------------------


class Weights:
    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.state = {f"w{n}": torch.randn(3 << 18, generator=made) for n in range(12)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


@pytest.mark.slow  # tests/cloud saves and restores, too
@pytest.mark.parametrize("scheme", ["gs", slow("gcs")])
def test_snapshots(
    fake_gcs: FakeGcsServer,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scheme: str,
) -> None:
    for name, value in fake_gcs.env().items():
        monkeypatch.setenv(name, value)
    url = f"{scheme}://{bucket}/run/step-1"
    with caplog.at_level(logging.WARNING):
        snapshot = sync.Snapshot.take(url, {"model": Weights(1)})
        found = Weights(2)
        sync.Snapshot(url).restore({"model": found})
        for name, tensor in Weights(1).state.items():
            assert torch.equal(found.state[name], tensor)
        assert not snapshot.verify("full").problems
        sync.Snapshot.take(url, {"model": Weights(3)}, overwrite=True)
        sync.Snapshot(url).delete()
    assert not caplog.records
    with pytest.raises(NotASnapshot):
        sync.Snapshot(url).get_manifest()


@pytest.mark.slow  # the tests of tests/cloud show it, too
def test_a_save_survives_a_bad_network(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    options = {**fake_gcs.storage_options(through=proxy), "stall_timeout_s": 1.0}
    url = fake_gcs.url(bucket, "run")
    with (
        proxy.fault(Reset(way=Way.UP, after_bytes=UP), pattern="/upload/", times=1),
        proxy.fault(FlipBit(way=Way.UP, at_byte=UP), pattern="/upload/", times=1),
        proxy.fault(Answer(status=503), pattern="/upload/", skip=1, for_s=1.0),
    ):
        sync.Snapshot.take(url, {"model": Weights(1)}, storage_options=options)
    found = Weights(2)
    with (
        proxy.fault(Truncate(way=Way.DOWN, after_bytes=UP), pattern="safetensors", times=1),
        proxy.fault(Stall(way=Way.DOWN, after_bytes=UP), pattern="safetensors", times=1),
    ):
        sync.Snapshot(url, storage_options=options).restore({"model": found})
    for name, tensor in Weights(1).state.items():
        assert torch.equal(found.state[name], tensor)


def test_a_save_that_may_not_write_aborts(
    fake_gcs: FakeGcsServer, bucket: str, proxy: FaultProxy
) -> None:
    options = fake_gcs.storage_options(through=proxy)
    with (
        proxy.fault(Answer(status=403), method="POST", pattern="/upload/"),
        pytest.raises(SnapshotAborted, match="objectUser"),
    ):
        sync.Snapshot.take(fake_gcs.url(bucket), {"model": Weights(1)}, storage_options=options)
