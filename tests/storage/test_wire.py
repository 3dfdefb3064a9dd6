# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of bulk bytes, against servers that do one thing each."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import anyio
import pytest

from actorsnap.storage.network import NetworkOptions
from actorsnap.storage.wire import Request, Response, Wire, WireError, WrongLength
from actorsnap.testing import bounded, run_blocking_in_thread
from tests.conftest import LeakCheck
from tests.storage.peers import Peer, Server, repeat, serving

T = TypeVar("T")


@contextlib.asynccontextmanager
async def wired(*, stall_s: float = 5.0, proxy: str | None = None) -> AsyncIterator[Wire]:
    options = NetworkOptions(connect_timeout_s=5, stall_timeout_s=stall_s, max_concurrency=4)
    wire = Wire(run_blocking_in_thread, options, proxy=proxy)
    try:
        yield wire
    finally:
        await wire.aclose()


def request_of(
    method: str, server: Server, headers: Mapping[str, str] = {}, deadline_s: float = 20
) -> Request:
    url = f"{server.url}/a%20b?c=d"
    return Request(method=method, url=url, headers=headers, deadline_s=deadline_s)


put = functools.partial(request_of, "PUT")
get = functools.partial(request_of, "GET")


@bounded(20)
async def test_views_arrive_back_to_back() -> None:
    seen: list[tuple[str, dict[str, str], bytes]] = []

    def script(peer: Peer) -> None:
        seen.append(peer.request())
        peer.answer(b"thanks", "201 Created", "X-Two: a", "X-Two: b")

    views = [memoryview(b"x" * 10)] * 9_000 + [memoryview(b"y" * 200_000), memoryview(b"")]
    with serving(script) as server:
        async with wired() as wire:
            response = await wire.send(put(server, {"X-One": "1"}), views)
    assert response == Response(
        status=201, headers={"content-length": "6", "x-two": "a, b"}, body=b"thanks"
    )
    ((line, headers, body),) = seen
    assert line == "PUT /a%20b?c=d HTTP/1.1"
    assert headers == {
        "host": server.url.removeprefix("http://"),
        "x-one": "1",
        "content-length": "290000",
    }
    assert body == b"x" * 90_000 + b"y" * 200_000


@pytest.mark.parametrize("status", ["200 OK", "206 Partial Content"])
@bounded(20)
async def test_a_body_fills_the_views(status: str) -> None:
    data = bytes(range(256)) * 8192

    def step(peer: Peer) -> None:
        peer.request()
        peer.answer(data, status)

    target = bytearray(len(data))
    view = memoryview(target)
    with serving(repeat(step)) as server:
        async with wired() as wire:
            response = await wire.receive(
                get(server), [view[:1], view[1:1], view[1:1000], view[1000:]]
            )
    assert target == data
    assert response.body == b""


@bounded(20)
async def test_many_views_are_filled_from_a_body_in_pieces() -> None:
    data = bytes(range(251)) * 4000
    cuts = [0, 1, 5, 9_000, 9_001, 300_000, len(data) - 1, len(data)]

    def step(peer: Peer) -> None:
        peer.request()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        peer.sock.sendall(head + data[: cuts[1]])
        for low, high in pairwise(cuts[1:]):
            time.sleep(0.02)
            peer.sock.sendall(data[low:high])

    target = bytearray(len(data))
    view = memoryview(target)
    size = 700  # more views than one system call takes
    with serving(repeat(step)) as server:
        async with wired() as wire:
            for _ in range(2):
                target[:] = bytes(len(data))
                views = [view[at : at + size] for at in range(0, len(data), size)]
                await wire.receive(get(server), views)
                assert target == data
    assert server.num_connections == 1


@bounded(20)
async def test_a_connection_is_kept_alive() -> None:
    def step(peer: Peer) -> None:
        peer.request()
        peer.answer(b"ok")

    with serving(repeat(step)) as server:
        async with wired() as wire:
            for _ in range(3):
                await wire.send(put(server), [memoryview(b"x")])
                await wire.receive(get(server), [memoryview(bytearray(2))])
    assert server.num_connections == 1


@bounded(20)
async def test_a_connection_that_the_server_has_closed_is_made_anew() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.answer(b"ok")  # and hangs up, without having said so

    with serving(script) as server:
        async with wired() as wire:
            for _ in range(3):
                assert (await wire.send(put(server))).body == b"ok"
                await anyio.sleep(0.05)
    assert server.num_connections == 3


@bounded(20)
async def test_what_is_not_kept_is_closed(no_leaks: LeakCheck) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.answer(b"no", "404 Not Found", "Connection: close")

    with serving(script) as server:
        async with wired() as wire:
            response = await wire.receive(get(server), [memoryview(bytearray(9))])
            assert (response.status, response.body) == (404, b"no")
            no_leaks.restart()
            await wire.receive(get(server), [memoryview(bytearray(9))])


@bounded(20)
async def test_chunks_and_interim_answers() -> None:
    def step(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 100 Continue\r\n\r\n")
        peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        peer.say(b"4\r\nsome\r\n6\r\n bytes\r\n0\r\n\r\n")

    with serving(repeat(step)) as server:
        async with wired() as wire:
            for _ in range(2):
                assert (await wire.send(put(server), [memoryview(b"x")])).body == b"some bytes"
    assert server.num_connections == 1


@pytest.mark.parametrize("size", [0, 9, 11])
@bounded(20)
async def test_another_length_than_the_views_touches_nothing(size: int) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.answer(b"x" * size)

    target = bytearray(b"." * 10)
    with serving(script) as server:
        async with wired() as wire:
            with pytest.raises(WrongLength) as raised:
                await wire.receive(get(server), [memoryview(target)])
    assert raised.value.num_bytes == size
    assert target == b"." * 10


def _hang_up_in_body(peer: Peer) -> None:
    peer.request()
    peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort")


def _reset_in_body(peer: Peer) -> None:
    _hang_up_in_body(peer)
    linger = b"\1\0\0\0\0\0\0\0"
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def _hang_up(peer: Peer) -> None:
    peer.request()


def _talk_nonsense(peer: Peer) -> None:
    peer.request()
    peer.say(b"220 mail.example ESMTP\r\n")


@pytest.mark.parametrize("script", [_hang_up_in_body, _reset_in_body, _hang_up, _talk_nonsense])
@pytest.mark.parametrize("how", ["send", "receive"])
@bounded(20)
async def test_half_an_answer_is_none(script: Callable[[Peer], None], how: str) -> None:
    with serving(script) as server:
        async with wired() as wire:
            views = [memoryview(bytearray(10))]
            call = wire.send(get(server)) if how == "send" else wire.receive(get(server), views)
            with pytest.raises(WireError) as raised:
                await call
    assert raised.value.is_retryable
    assert not raised.value.is_timeout
    assert server.url in raised.value.detail
    assert "a%20b" not in raised.value.detail


@bounded(20)
async def test_a_server_that_refuses_a_body_is_heard() -> None:
    def script(peer: Peer) -> None:
        peer.head()
        peer.answer(b"too much", "413 Content Too Large", "Connection: close")
        time.sleep(0.2)  # and hangs up, with the body unread

    with serving(script) as server:
        async with wired() as wire:
            response = await wire.send(put(server), [memoryview(bytes(64 << 20))])
    assert (response.status, response.body) == (413, b"too much")


def _say_nothing(peer: Peer) -> None:
    peer.hang()


def _stop_reading(peer: Peer) -> None:
    peer.head()
    time.sleep(1)


def _stop_in_body(peer: Peer) -> None:
    _hang_up_in_body(peer)
    peer.hang()


_SILENT = [_say_nothing, _stop_reading, _stop_in_body]


async def _exchange(wire: Wire, request: Request) -> None:
    if request.method == "PUT":
        await wire.send(request, [memoryview(bytes(64 << 20))])
    else:
        await wire.receive(request, [memoryview(bytearray(10))])


def _request(server: Server, script: Callable[[Peer], None], deadline_s: float = 20) -> Request:
    method = "PUT" if script is _stop_reading else "GET"
    return request_of(method, server, deadline_s=deadline_s)


@pytest.mark.parametrize("script", _SILENT)
@bounded(20)
async def test_silence_ends_an_exchange(script: Callable[[Peer], None]) -> None:
    with serving(script) as server:
        async with wired(stall_s=0.2) as wire:
            with pytest.raises(WireError, match="silent for 0.2 s") as raised:
                await _exchange(wire, _request(server, script))
    assert raised.value.is_timeout
    assert raised.value.is_retryable


@pytest.mark.parametrize("script", _SILENT)
@bounded(20)
async def test_the_deadline_ends_an_exchange(script: Callable[[Peer], None]) -> None:
    with serving(script) as server:
        async with wired() as wire:
            with pytest.raises(WireError, match="took over 0.2 s") as raised:
                await _exchange(wire, _request(server, script, deadline_s=0.2))
    assert raised.value.is_timeout
    assert raised.value.is_retryable


@bounded(20)
async def test_a_slow_server_that_keeps_sending_is_no_silent_one() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n")
        for _ in range(30):
            time.sleep(0.05)
            peer.say(b"x")

    target = bytearray(30)
    with serving(script) as server:
        async with wired(stall_s=1.0) as wire:
            await wire.receive(get(server), [memoryview(target)])
    assert target == b"x" * 30


@pytest.mark.parametrize("script", _SILENT)
@bounded(20)
async def test_cancellation_returns_at_once_and_frees_the_thread(
    script: Callable[[Peer], None],
) -> None:
    running: list[None] = []

    async def counted(fn: Callable[..., T], /, *args: Any) -> T:
        def run() -> T:
            running.append(None)
            try:
                return fn(*args)
            finally:
                running.pop()

        return await run_blocking_in_thread(run)

    with serving(script) as server:
        options = NetworkOptions(connect_timeout_s=60.0, stall_timeout_s=60.0, max_concurrency=4)
        wire = Wire(counted, options)
        begun = time.monotonic()
        with anyio.move_on_after(0.3) as scope:
            await _exchange(wire, _request(server, script))
        assert scope.cancelled_caught
        assert not running
        assert time.monotonic() - begun < 10
        await wire.aclose()


@bounded(20)
async def test_a_cancellation_after_the_last_byte_does_not_harm_the_next_exchange() -> None:
    scope = anyio.CancelScope()

    async def cancelled_late(fn: Callable[..., T], /, *args: Any) -> T:
        result = await run_blocking_in_thread(fn, *args)
        scope.cancel()
        await anyio.sleep(0.01)  # the caller is cancelled meanwhile
        return result

    def answer(peer: Peer) -> None:
        peer.request()
        peer.answer(b"ok")

    with serving(repeat(answer)) as server:
        wire = Wire(cancelled_late, NetworkOptions(max_concurrency=4))
        with scope:
            await wire.send(put(server))
        assert scope.cancelled_caught
        scope = anyio.CancelScope()
        assert (await wire.send(put(server))).body == b"ok"
        await wire.aclose()


@bounded(20)
async def test_cancellation_before_it_begins_sends_nothing() -> None:
    with serving(_say_nothing) as server:
        async with wired() as wire:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await wire.send(put(server))
            assert scope.cancelled_caught
    assert server.num_connections == 0


@bounded(20)
async def test_nobody_listens() -> None:
    with serving(_say_nothing) as server:
        pass
    async with wired() as wire:
        with pytest.raises(WireError, match="cannot connect to 127.0.0.1") as raised:
            await wire.send(put(server))
    assert raised.value.is_retryable


@bounded(20)
async def test_an_unknown_host_is_not_tried_again() -> None:
    async with wired() as wire:
        with pytest.raises(WireError, match="not known") as raised:
            await wire.send(
                Request(method="PUT", url="http://host.invalid/", headers={}, deadline_s=15)
            )
    # Where no name server answers, another one may do so later.
    assert not raised.value.is_retryable or "emporary" in raised.value.detail


@bounded(20)
async def test_a_proxy_is_asked_for_the_whole_url() -> None:
    seen = []

    def script(peer: Peer) -> None:
        seen.append(peer.request())
        peer.answer(b"by proxy")

    with serving(script) as server:
        proxy = server.url.replace("http://", "http://user:pass%21word@")
        request = Request(method="GET", url="http://host.invalid/x?y", headers={}, deadline_s=9)
        async with wired(proxy=proxy) as wire:
            assert (await wire.send(request)).body == b"by proxy"
    ((line, headers, _),) = seen
    assert line == "GET http://host.invalid/x?y HTTP/1.1"
    assert headers["host"] == "host.invalid"
    assert headers["proxy-authorization"] == "Basic dXNlcjpwYXNzIXdvcmQ="


def test_requests_hide_signatures() -> None:
    request = Request(
        method="GET", url="http://h/?X-Signature=s3cret", headers={"A": "s3cret"}, deadline_s=1
    )
    assert "s3cret" not in repr(request)


@bounded(20)
async def test_a_header_that_cannot_be_sent_is_not_shown() -> None:
    with serving(lambda peer: None) as server:
        async with wired() as wire:
            with pytest.raises(WireError, match="the header 'X-Token' has characters") as raised:
                await wire.send(put(server, {"X-Token": "s3cret\n"}))
    assert not raised.value.is_retryable
    assert "s3cret" not in str(raised.value)
    assert raised.value.__suppress_context__
