# SPDX-License-Identifier: Apache-2.0
"""The process of a ``FaultProxy``: passes HTTP/1.1 on, but for the faults it is told.

Runs by path with the standard library alone, which takes 50 ms: it must import nothing of
actorsnap, which imports torch. A process of its own, so that a client under test shares no
interpreter with it. One thread per connection: each is plain blocking code, and sockets
release the lock.

A request is relayed body piece by body piece, nothing is kept, so that memory is bounded and
the pace of each side is felt by the other. Commands come as lines of JSON on standard input, each
is answered by one line; the end of the input ends the process. It must not know what the
requests mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 20
_MAX_HEAD_BYTES = 1 << 16
# What a token bucket may make up for after a thread slept too long.
_BURST_S = 0.02


class Way(StrEnum):
    """From the client to the server, or back."""

    UP = "up"
    DOWN = "down"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Fault):
    """The proxy reads the request and answers itself, with an error as S3 writes it."""

    status: int = 503
    code: str = "SlowDown"
    retry_after_s: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop(Fault):
    """The proxy reads the request and answers that all is well: with the body's MD5 as etag and
    the checksums that the request came with. The server hears nothing of it."""

    status: int = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoseAnswer(Fault):
    """The server does what it was asked to; the client's connection is reset instead of the
    answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay(Fault):
    """The request is passed on so much later."""

    delay_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut(Fault):
    """Ends the relaying of a body after ``after_bytes`` of it. A body that is shorter is not hit.

    On the way up the server gets no more than that of the request, and with 0 nothing at all,
    not even a connection; on the way down the head of the answer always arrives.
    """

    way: Way
    after_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reset(Cut):
    """The client's connection is reset there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncate(Cut):
    """The client's connection is closed there in good order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stall(Cut):
    """Neither reads nor says anything more, until the client closes the connection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlipBit(Fault):
    """One bit of the body arrives wrong. A body that is too short for it is not hit."""

    way: Way
    at_byte: int = 0
    bit: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetHeader(Fault):
    """The answer has this header with this value, whatever the server said; None removes it."""

    name: str
    value: str | None


FAULTS: dict[str, type[Fault]] = {
    fault.__name__: fault
    for fault in (Answer, Delay, Drop, FlipBit, LoseAnswer, Reset, SetHeader, Stall, Truncate)
}


@dataclasses.dataclass
class Exchange:
    """One request and what became of it. Complete as soon as the client has the whole answer."""

    method: str
    target: str
    status: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    fault: str | None = None


class _Rule:
    """Which requests get a fault.

    Args:
        fault: What they get.
        method: Of the request; None for any.
        pattern: Found in the path with its query.
        skip: So many requests that match go unharmed first.
        times: So many get the fault; None for all.
        for_s: No more of them later than this after the first.
    """

    def __init__(
        self,
        fault: Fault,
        *,
        method: str | None,
        pattern: str,
        skip: int,
        times: int | None,
        for_s: float | None,
    ) -> None:
        self.fault = fault
        self.num_hits = 0
        self._method = method
        self._pattern = re.compile(pattern)
        self._skip = skip
        self._times = times
        self._for_s = for_s
        self._num_matches = 0
        self._first_s: float | None = None

    def takes(self, exchange: Exchange) -> bool:
        """Whether this request is to be harmed. Counts it."""
        if self._method not in (None, exchange.method):
            return False
        if self._pattern.search(exchange.target) is None:
            return False
        self._num_matches += 1
        number = self._num_matches - self._skip
        if number <= 0 or (self._times is not None and number > self._times):
            return False
        if self._first_s is None:
            self._first_s = time.monotonic()
        return self._for_s is None or time.monotonic() - self._first_s < self._for_s


class _Bucket:
    """Lets bytes pass at a rate, over all threads that ask; in the order in which they ask."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Returns when the last of so many bytes has passed."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            start_s = max(self._free_s, time.monotonic() - _BURST_S)
            self._free_s = until_s = start_s + num_bytes / self._bytes_per_s
        time.sleep(max(0.0, until_s - time.monotonic()))


class _Gone(Exception):
    """The connection is not to be used any more."""


class _Stream:
    """One side's bytes, with a buffer of bounded size."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._memory = memoryview(bytearray(_PIECE_BYTES))
        self._start = self._end = 0

    def piece(self, max_bytes: int = _PIECE_BYTES) -> memoryview:
        """What comes next, empty at the end. Valid and writable until the next call."""
        if self._start == self._end:
            self._start, self._end = 0, self.sock.recv_into(self._memory)
        stop = min(self._end, self._start + max_bytes)
        found = self._memory[self._start : stop]
        self._start = stop
        return found

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with ``mark``; empty if the stream ends before anything comes.

        Raises:
            _Gone: It ends before the mark, or the mark is too far away.
        """
        found = b""
        while not found.endswith(mark):
            piece = bytes(self.piece())
            if not piece and not found:
                return b""
            if not piece or len(found) > _MAX_HEAD_BYTES:
                raise _Gone
            at = (found + piece).find(mark)
            used = len(piece) if at < 0 else at + len(mark) - len(found)
            self._start -= len(piece) - used
            found += piece[:used]
        return found


class _Head:
    """The first line and the headers of a message, kept as they came."""

    def __init__(self, data: bytes) -> None:
        self.first, *self._lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")

    def __bytes__(self) -> bytes:
        return ("\r\n".join([self.first, *self._lines]) + "\r\n\r\n").encode("latin-1")

    def items(self) -> Iterator[tuple[str, str]]:
        for line in self._lines:
            name, _, value = line.partition(":")
            yield name.lower(), value.strip()

    def get(self, name: str) -> str:
        return next((value for key, value in self.items() if key == name), "")

    def set(self, name: str, value: str | None) -> None:
        kept = [line for line in self._lines if line.partition(":")[0].lower() != name.lower()]
        self._lines = kept if value is None else [*kept, f"{name}: {value}"]

    def body(self, stream: _Stream, *, is_to_the_end: bool) -> Iterator[tuple[memoryview, bool]]:
        """The body in pieces, each with whether it is payload or the framing of chunks."""
        if "chunked" in self.get("transfer-encoding").lower():
            size = -1
            while size:
                line = stream.read_until(b"\r\n")
                size = int(line.split(b";")[0], 16)
                yield memoryview(line), False
                yield from _exactly(stream, size)
                if size:
                    yield memoryview(stream.read_until(b"\r\n")), False
            while line != b"\r\n":  # trailers
                line = stream.read_until(b"\r\n")
                yield memoryview(line), False
        elif length := self.get("content-length"):
            yield from _exactly(stream, int(length))
        elif is_to_the_end:
            while piece := stream.piece():
                yield piece, True


def _exactly(stream: _Stream, num_bytes: int) -> Iterator[tuple[memoryview, bool]]:
    while num_bytes:
        piece = stream.piece(num_bytes)
        if not piece:
            raise _Gone
        num_bytes -= len(piece)
        yield piece, True


class Relay:
    """All connections of one proxy, its rules, and what it has seen."""

    def __init__(
        self,
        upstream: str,
        *,
        latency_s: float,
        bytes_per_s: float | None,
        connection_bytes_per_s: float | None,
        cert_file: str | None,
        key_file: str | None,
    ) -> None:
        parts = urlsplit(upstream)
        self.upstream = upstream
        self.address = (parts.hostname or "", parts.port or 80)
        self.latency_s = latency_s
        self.connection_bytes_per_s = connection_bytes_per_s
        self.buckets = {way: _Bucket(bytes_per_s) for way in Way}
        self.exchanges: list[Exchange] = []
        self.tls: ssl.SSLContext | None = None
        if cert_file is not None:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(cert_file, key_file)
        self._rules: dict[int, _Rule] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)

    @property
    def origin(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"

    def accept_for_ever(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=_Connection(self, sock).run, daemon=True).start()

    def begin(self, exchange: Exchange) -> _Rule | None:
        """Notes a request. Returns the first rule that takes it."""
        with self._lock:
            self.exchanges.append(exchange)
            return next((rule for rule in self._rules.values() if rule.takes(exchange)), None)

    def hit(self, rule: _Rule, exchange: Exchange) -> None:
        """A fault happens now."""
        with self._lock:
            rule.num_hits += 1
            exchange.fault = type(rule.fault).__name__

    def obey(self, command: dict[str, Any]) -> Any:
        """Performs one command of the ``FaultProxy``. Returns the answer."""
        verb, arguments = command["verb"], command.get("arguments", {})
        with self._lock:
            match verb:
                case "add":
                    fault = FAULTS[arguments.pop("kind")](**arguments.pop("fault"))
                    number = next(self._numbers)
                    self._rules[number] = _Rule(fault, **arguments)
                    return number
                case "remove":
                    return self._rules.pop(arguments["number"]).num_hits
                case "hits":
                    return self._rules[arguments["number"]].num_hits
                case "exchanges":
                    return [dataclasses.asdict(exchange) for exchange in self.exchanges]
                case "forget":
                    return self.exchanges.clear()
                case _:
                    raise ValueError(verb)


class _Connection:
    """One connection of a client, with the one to the server that belongs to it."""

    def __init__(self, relay: Relay, sock: socket.socket) -> None:
        self._relay = relay
        self._sock = sock
        self._server: _Stream | None = None
        rate = relay.connection_bytes_per_s
        self._buckets = {way: [relay.buckets[way], _Bucket(rate)] for way in Way}

    def run(self) -> None:
        """Relays until one side has had enough. Errors of sockets end it without a word."""
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            time.sleep(self._relay.latency_s)  # of the handshake
            if self._relay.tls is not None:
                self._sock = self._relay.tls.wrap_socket(self._sock, server_side=True)
            client = _Stream(self._sock)
            while data := client.read_until(b"\r\n\r\n"):
                self._relay_one(client, _Head(data))
        except (_Gone, OSError):
            pass
        finally:
            self._sock.close()
            self._hang_up()

    def _relay_one(self, client: _Stream, request: _Head) -> None:
        method, target, _ = request.first.split(" ", 2)
        exchange = Exchange(method, target)
        rule = self._relay.begin(exchange)
        time.sleep(self._relay.latency_s)
        if request.get("expect"):
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.set("expect", None)
        match rule and rule.fault:
            case Delay(delay_s=delay_s):
                self._hit(rule, exchange)
                time.sleep(delay_s)
            case Answer() | Drop():
                self._answer(client, request, rule, exchange)
                return
            case Cut(way=Way.UP, after_bytes=0):
                self._cut(rule, exchange)
        server = self._connected()
        self._ask(client, server, request, rule, exchange)
        self._reply(server, rule, exchange)

    def _hit(self, rule: _Rule | None, exchange: Exchange) -> None:
        assert rule is not None
        self._relay.hit(rule, exchange)

    def _answer(
        self, client: _Stream, request: _Head, rule: _Rule | None, exchange: Exchange
    ) -> None:
        """Answers in the server's place."""
        assert rule is not None
        md5 = hashlib.md5(usedforsecurity=False)
        for piece, is_payload in request.body(client, is_to_the_end=False):
            if is_payload:
                exchange.bytes_up += len(piece)
                md5.update(piece)
        head, body = _Head(b"HTTP/1.1 200 OK\r\n\r\n"), b""
        if isinstance(rule.fault, Answer):
            exchange.status = rule.fault.status
            if exchange.method != "HEAD":
                body = f"<Error><Code>{rule.fault.code}</Code></Error>".encode()
            head.set("Content-Type", "application/xml")
            if rule.fault.retry_after_s is not None:
                head.set("Retry-After", str(rule.fault.retry_after_s))
        elif isinstance(rule.fault, Drop):
            exchange.status = rule.fault.status
            head.set("ETag", f'"{md5.hexdigest()}"')
            for name, value in request.items():
                if name.startswith("x-amz-checksum-"):
                    head.set(name, value)
        head.first = f"HTTP/1.1 {exchange.status} Proxy"
        head.set("Content-Length", str(len(body)))
        self._hit(rule, exchange)
        self._sock.sendall(bytes(head) + body)

    def _ask(
        self,
        client: _Stream,
        server: _Stream,
        request: _Head,
        rule: _Rule | None,
        exchange: Exchange,
    ) -> None:
        """Passes the request on. A server that answers before it has all of it is sent no more."""
        server.sock.sendall(bytes(request))
        is_heard = True
        body = request.body(client, is_to_the_end=False)
        for piece in self._harmed(body, Way.UP, rule, exchange):
            is_heard = is_heard and not _is_readable(server.sock)
            if is_heard:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    server.sock.sendall(piece)

    def _reply(self, server: _Stream, rule: _Rule | None, exchange: Exchange) -> None:
        """Passes the answer on."""
        answer = _Head(b"HTTP/1.1 100 Continue\r\n\r\n")
        while answer.first.split(" ")[1].startswith("1"):
            data = server.read_until(b"\r\n\r\n")
            if not data:
                self._reset()
            answer = _Head(data)
        status = int(answer.first.split(" ")[1])
        fault = rule and rule.fault
        if isinstance(fault, LoseAnswer):
            self._hit(rule, exchange)
            self._reset()
        if isinstance(fault, SetHeader):
            self._hit(rule, exchange)
            answer.set(fault.name, fault.value)
        # Where an upload goes on is said as an URL: it stays on this side of the proxy.
        if location := answer.get("location"):
            answer.set("Location", location.replace(self._relay.upstream, self._relay.origin, 1))
        exchange.status = status
        self._sock.sendall(bytes(answer))
        is_to_the_end = False
        body: Iterator[tuple[memoryview, bool]] = iter(())
        if exchange.method != "HEAD" and status not in (204, 304):
            is_to_the_end = not (answer.get("content-length") or answer.get("transfer-encoding"))
            body = answer.body(server, is_to_the_end=is_to_the_end)
        for piece in self._harmed(body, Way.DOWN, rule, exchange):
            self._sock.sendall(piece)
        if is_to_the_end or "close" in answer.get("connection").lower():
            raise _Gone

    def _harmed(
        self,
        body: Iterator[tuple[memoryview, bool]],
        way: Way,
        rule: _Rule | None,
        exchange: Exchange,
    ) -> Iterator[memoryview]:
        """The body at the pace of the wire, and with the rule's fault in it."""
        fault = rule and rule.fault
        cut_at = fault.after_bytes if isinstance(fault, Cut) and fault.way == way else None
        flip = fault if isinstance(fault, FlipBit) and fault.way == way else None
        offset = 0
        if cut_at == 0:
            self._cut(rule, exchange)
        for piece, is_payload in body:
            is_cut = False
            if is_payload:
                if cut_at is not None and offset + len(piece) >= cut_at:
                    piece, is_cut = piece[: cut_at - offset], True
                if flip is not None and offset <= flip.at_byte < offset + len(piece):
                    self._hit(rule, exchange)
                    piece[flip.at_byte - offset] ^= 1 << flip.bit
                offset += len(piece)
                if way == Way.UP:
                    exchange.bytes_up += len(piece)
                else:
                    exchange.bytes_down += len(piece)
            for bucket in self._buckets[way]:
                bucket.take(len(piece))
            yield piece
            if is_cut:
                self._cut(rule, exchange)

    def _cut(self, rule: _Rule | None, exchange: Exchange) -> None:
        assert rule is not None
        self._hit(rule, exchange)
        match rule.fault:
            case Reset():
                self._reset()
            case Stall():
                closed = select.poll()
                closed.register(self._sock, select.POLLRDHUP)
                closed.poll()
            case Truncate():
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._sock, socket.SHUT_WR)
        raise _Gone

    def _reset(self) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise _Gone

    def _connected(self) -> _Stream:
        """The connection to the server; a new one if that of the request before was closed."""
        if self._server is not None and _is_readable(self._server.sock):
            self._hang_up()
        if self._server is None:
            sock = socket.create_connection(self._relay.address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._server = _Stream(sock)
        return self._server

    def _hang_up(self) -> None:
        if self._server is not None:
            self._server.sock.close()
            self._server = None


def _is_readable(sock: socket.socket) -> bool:
    """Whether there is something to read, or the other side is gone."""
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    return bool(ready.poll(0))


def main() -> None:
    """Serves until standard input ends. The first line out is the proxy's URL."""
    relay = Relay(**json.loads(sys.stdin.readline()))
    threading.Thread(target=relay.accept_for_ever, daemon=True).start()
    print(json.dumps(relay.origin), flush=True)
    for line in sys.stdin:
        print(json.dumps(relay.obey(json.loads(line))), flush=True)
    os._exit(0)  # whatever its threads wait for


if __name__ == "__main__":
    main()
