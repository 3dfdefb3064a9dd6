# SPDX-License-Identifier: Apache-2.0
"""The fault proxy: does each fault happen, where it should and no more often?"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import re
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.support.proxy import (
    Answer,
    Delay,
    Drop,
    FaultProxy,
    FlipBit,
    LoseAnswer,
    Reset,
    SetHeader,
    Stall,
    TlsFiles,
    Truncate,
    Way,
)

BODY = bytes(range(256)) * 1024


class Handler(BaseHTTPRequestHandler):
    """Keeps what is put, and gives it back; in chunks if the path says so."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20
    origin: str
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["content-length"]))
            if len(body) < int(self.headers["content-length"]):
                self.close_connection = True
                return
        self.objects[self.path] = body
        self.send_response(201)
        self.send_header("ETag", '"right"')
        self.send_header("Location", f"{self.origin}/session")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        body = self.objects[self.path]
        self.send_response(200)
        if "to-the-end" in self.path:
            self.send_header("Connection", "close")
        elif "chunked" in self.path:
            self.send_header("Transfer-Encoding", "chunked")
            half = len(body) // 2
            body = b"".join(b"%x\r\n%s\r\n" % (len(b), b) for b in (body[:half], body[half:], b""))
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break off are what the tests are about."""


class Origin(NamedTuple):
    """The server behind the proxy."""

    url: str
    objects: dict[str, bytes]


@pytest.fixture
def origin() -> Iterator[Origin]:
    objects = {"/key": BODY, "/chunked": BODY, "/to-the-end": BODY}

    class HandlerOfOneTest(Handler):
        pass

    with QuietServer(("127.0.0.1", 0), HandlerOfOneTest) as server:
        HandlerOfOneTest.objects = objects
        HandlerOfOneTest.origin = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Origin(HandlerOfOneTest.origin, objects)
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(origin: Origin) -> Iterator[FaultProxy]:
    with FaultProxy(origin.url) as proxy:
        yield proxy


@contextlib.contextmanager
def connected(proxy: FaultProxy, timeout_s: float = 60.0) -> Iterator[http.client.HTTPConnection]:
    address = urlsplit(proxy.endpoint)
    assert address.hostname is not None
    if proxy.ca_file is None:
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    else:
        context = ssl.create_default_context(cafile=proxy.ca_file)
        connection = http.client.HTTPSConnection(
            address.hostname, address.port, timeout=timeout_s, context=context
        )
    with contextlib.closing(connection):
        yield connection


def get(connection: http.client.HTTPConnection, path: str = "/key") -> bytes:
    connection.request("GET", path)
    return connection.getresponse().read()


def put(
    connection: http.client.HTTPConnection, path: str, body: bytes, **headers: str
) -> http.client.HTTPResponse:
    connection.request("PUT", path, body, headers)
    response = connection.getresponse()
    response.read()
    return response


def test_without_faults_nothing_changes(proxy: FaultProxy, origin: Origin) -> None:
    with connected(proxy) as connection:
        assert get(connection) == BODY
        assert get(connection, "/chunked") == BODY
        connection.request("HEAD", "/key")
        head = connection.getresponse()
        assert (head.read(), head.getheader("content-length")) == (b"", str(len(BODY)))
        assert put(connection, "/a%20b?x=1", BODY).status == 201
        connection.request("PUT", "/pieces", iter([BODY[:100], BODY[100:]]), encode_chunked=True)
        connection.getresponse().read()
        assert get(connection, "/to-the-end") == BODY
        assert origin.objects["/a%20b?x=1"] == origin.objects["/pieces"] == BODY
    seen = [(e.method, e.target, e.status, e.bytes_up, e.bytes_down) for e in proxy.exchanges()]
    size = len(BODY)
    assert seen == [
        ("GET", "/key", 200, 0, size),
        ("GET", "/chunked", 200, 0, size),
        ("HEAD", "/key", 200, 0, 0),
        ("PUT", "/a%20b?x=1", 201, size, 0),
        ("PUT", "/pieces", 201, size, 0),
        ("GET", "/to-the-end", 200, 0, size),
    ]
    proxy.forget()
    assert proxy.exchanges() == []


def test_urls_of_the_server_stay_on_this_side(proxy: FaultProxy) -> None:
    with connected(proxy) as connection:
        assert put(connection, "/new", b"").getheader("location") == f"{proxy.endpoint}/session"


def test_expect_100_continue(proxy: FaultProxy) -> None:
    with connected(proxy) as connection:
        assert put(connection, "/new", BODY, Expect="100-continue").status == 201


def test_tls(origin: Origin, tls_files: TlsFiles) -> None:
    with FaultProxy(origin.url, tls=tls_files) as proxy:
        with connected(proxy) as connection:
            assert get(connection) == BODY
            with proxy.fault(FlipBit(way=Way.DOWN)):
                assert get(connection) != BODY
        assert proxy.ca_file == tls_files.ca_file


@pytest.mark.parametrize("retry_after_s", [None, 7])
def test_answer(proxy: FaultProxy, origin: Origin, retry_after_s: int | None) -> None:
    with connected(proxy) as connection:
        with proxy.fault(Answer(status=503, retry_after_s=retry_after_s)) as rule:
            response = put(connection, "/new", BODY)
        found = response.getheader("retry-after")
        assert found == (None if retry_after_s is None else str(retry_after_s))
        assert (response.status, rule.num_hits) == (503, 1)
        assert get(connection) == BODY
    assert "/new" not in origin.objects


def test_drop_claims_that_all_is_well(proxy: FaultProxy, origin: Origin) -> None:
    with connected(proxy) as connection, proxy.fault(Drop()):
        response = put(connection, "/new", BODY, **{"x-amz-checksum-crc32c": "AAAAAA=="})
    assert response.status == 200
    assert response.getheader("etag") == f'"{hashlib.md5(BODY).hexdigest()}"'
    assert response.getheader("x-amz-checksum-crc32c") == "AAAAAA=="
    assert "/new" not in origin.objects


def test_lose_answer(proxy: FaultProxy, origin: Origin) -> None:
    with connected(proxy) as connection:
        with proxy.fault(LoseAnswer()), pytest.raises(ConnectionResetError):
            put(connection, "/new", BODY)
    assert origin.objects["/new"] == BODY


def test_wrong_etag(proxy: FaultProxy) -> None:
    with connected(proxy) as connection:
        with proxy.fault(SetHeader(name="etag", value='"wrong"')):
            assert put(connection, "/new", BODY).getheader("etag") == '"wrong"'
        with proxy.fault(SetHeader(name="ETag", value=None)):
            assert put(connection, "/new", BODY).getheader("etag") is None
        assert put(connection, "/new", BODY).getheader("etag") == '"right"'


@pytest.mark.parametrize("path", ["/key", "/chunked"])
def test_flipped_bit_down(proxy: FaultProxy, path: str) -> None:
    with connected(proxy) as connection:
        with proxy.fault(FlipBit(way=Way.DOWN, at_byte=200_000, bit=3)):
            found = get(connection, path)
        assert found[200_000] == BODY[200_000] ^ 8
        assert found[:200_000] + found[200_001:] == BODY[:200_000] + BODY[200_001:]
        assert get(connection, path) == BODY


def test_flipped_bit_up(proxy: FaultProxy, origin: Origin) -> None:
    with connected(proxy) as connection, proxy.fault(FlipBit(way=Way.UP, at_byte=1)):
        put(connection, "/new", BODY)
    assert origin.objects["/new"] == BODY[:1] + bytes([BODY[1] ^ 1]) + BODY[2:]


def test_a_flip_beyond_the_body_is_not_hit(proxy: FaultProxy) -> None:
    with connected(proxy) as connection:
        rule = proxy.add(FlipBit(way=Way.DOWN, at_byte=len(BODY)))
        assert get(connection) == BODY
        assert rule.num_hits == 0


@pytest.mark.parametrize("after_bytes", [0, 1000, len(BODY)])
def test_reset_down(proxy: FaultProxy, after_bytes: int) -> None:
    with connected(proxy) as connection, proxy.fault(Reset(way=Way.DOWN, after_bytes=after_bytes)):
        connection.request("GET", "/key")
        response = connection.getresponse()
        # To the end of the stream and not of the body: the reset may come right after that.
        with pytest.raises(ConnectionResetError):
            response.fp.read()
    assert proxy.exchanges()[0].bytes_down == after_bytes


@pytest.mark.parametrize("after_bytes", [0, 1000])
def test_reset_up(proxy: FaultProxy, origin: Origin, after_bytes: int) -> None:
    with connected(proxy) as connection, proxy.fault(Reset(way=Way.UP, after_bytes=after_bytes)):
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            put(connection, "/new", BODY)
    assert "/new" not in origin.objects
    assert [e.bytes_up for e in proxy.exchanges()] == [after_bytes]


def test_truncated_down(proxy: FaultProxy) -> None:
    with connected(proxy) as connection:
        with proxy.fault(Truncate(way=Way.DOWN, after_bytes=1000)):
            with pytest.raises(http.client.IncompleteRead) as caught:
                get(connection)
    assert caught.value.partial == BODY[:1000]


@pytest.mark.few
@pytest.mark.parametrize("after_bytes", [0, 1000])
@pytest.mark.parametrize("way", list(Way))
def test_stall(proxy: FaultProxy, origin: Origin, way: Way, after_bytes: int) -> None:
    with connected(proxy, timeout_s=0.3) as connection:
        with proxy.fault(Stall(way=way, after_bytes=after_bytes), times=1) as rule:
            with pytest.raises(TimeoutError):
                put(connection, "/new", BODY) if way == Way.UP else get(connection)
            with connected(proxy) as other:  # one connection stands, the others do not
                assert get(other) == BODY
    assert rule.num_hits == 1
    assert "/new" not in origin.objects


def test_delay(proxy: FaultProxy) -> None:
    with connected(proxy) as connection, proxy.fault(Delay(delay_s=0.2)):
        start_s = time.monotonic()
        assert get(connection) == BODY
        assert time.monotonic() - start_s >= 0.2


def test_which_requests_a_rule_takes(proxy: FaultProxy) -> None:
    with connected(proxy) as connection:
        with proxy.fault(
            Answer(status=500), method="PUT", pattern=r"partNumber=\d", skip=1, times=2
        ) as rule:
            assert get(connection) == BODY
            paths = ["/k", *(f"/k?partNumber={number}" for number in range(5))]
            statuses = [put(connection, path, b"x").status for path in paths]
            assert statuses == [201, 201, 500, 500, 201, 201]
            assert rule.num_hits == 2
        assert [e.fault for e in proxy.exchanges()].count("Answer") == 2


def test_a_rule_for_a_time(proxy: FaultProxy) -> None:
    with connected(proxy) as connection, proxy.fault(Answer(), for_s=0.3) as rule:
        start_s = time.monotonic()
        num_refused = 0
        while put(connection, "/new", b"x").status == 503:
            num_refused += 1
            assert time.monotonic() - start_s < 60
        assert time.monotonic() - start_s >= 0.3
        assert rule.num_hits == num_refused > 1


def test_the_oldest_rule_takes_it(proxy: FaultProxy) -> None:
    with connected(proxy) as connection:
        first, second = proxy.add(Answer(status=500)), proxy.add(Answer(status=501))
        assert put(connection, "/new", b"").status == 500
        first.remove()
        first.remove()
        assert put(connection, "/new", b"").status == 501
        assert (first.num_hits, second.num_hits) == (1, 1)


def test_a_fault_that_never_happens_fails_the_test(proxy: FaultProxy) -> None:
    with pytest.raises(AssertionError, match=re.escape("'/other'")):
        with proxy.fault(Answer(), pattern="/other"):
            pass
    with pytest.raises(ZeroDivisionError), proxy.fault(Answer()):
        raise ZeroDivisionError


def test_a_server_that_is_gone_resets(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_address[1]
    with FaultProxy(f"http://127.0.0.1:{port}") as proxy, connected(proxy) as connection:
        with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
            get(connection)


def test_latency(origin: Origin) -> None:
    with FaultProxy(origin.url, latency_s=0.1) as proxy, connected(proxy) as connection:
        start_s = time.monotonic()
        assert [get(connection) for _ in range(2)] == [BODY] * 2
        assert 0.3 <= time.monotonic() - start_s < 3  # one for the connection, one for each


@pytest.mark.parametrize("way", list(Way))
def test_bandwidth_is_shared_by_connections(origin: Origin, way: Way) -> None:
    size, rate = 4 << 20, 32 << 20
    origin.objects["/large"] = bytes(size)

    def transfer(proxy: FaultProxy, number: int) -> None:
        with connected(proxy) as connection:
            if way == Way.UP:
                put(connection, f"/{number}", bytes(size))
            else:
                assert get(connection, "/large") == bytes(size)

    with FaultProxy(origin.url, bytes_per_s=rate) as proxy, ThreadPoolExecutor(2) as pool:
        start_s = time.monotonic()
        list(pool.map(transfer, [proxy] * 2, range(2)))
        took_s = time.monotonic() - start_s
    # The last piece has gone by then, and the first could make up for a moment's rest.
    assert took_s >= 2 * size / rate - 0.05


def test_bandwidth_of_each_connection(origin: Origin) -> None:
    size, rate = 2 << 20, 16 << 20
    origin.objects["/large"] = bytes(size)
    with FaultProxy(origin.url, connection_bytes_per_s=rate) as proxy:
        with connected(proxy) as connection:
            start_s = time.monotonic()
            get(connection, "/large")
            assert time.monotonic() - start_s >= size / rate - 0.05


def test_nothing_is_left(origin: Origin, no_leaks: object) -> None:
    with FaultProxy(origin.url) as proxy, connected(proxy) as connection:
        assert get(connection) == BODY
