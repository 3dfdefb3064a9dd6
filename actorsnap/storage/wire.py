# SPDX-License-Identifier: Apache-2.0
"""An HTTP/1.1 client for bulk bytes: memory to socket and socket to memory, without a copy.

Each exchange (request and response) blocks on a worker thread, without the GIL
(``docs/decisions/0009``). For cancellation and deadlines its socket is shut down: the call returns
at once. A name lookup that hangs ends when the resolver gives up.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import anyio
import anyio.lowlevel

from actorsnap.errors import StorageError, notes_of
from actorsnap.storage.base import RunBlocking
from actorsnap.storage.network import GIVEN_UP, NetworkOptions

_SMALL_BYTES = 64 * 1024
"""Smaller neighbours are joined: copying costs less than a system call each."""

_MAX_VIEWS = 512
"""Views that one system call fills; Linux takes 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request without its body.

    Attributes:
        url: With scheme and host; path and query are sent as they are.
        headers: Without ``Host``, ``Content-Length`` and ``Connection``. Never shown: they and the
            URL may hold signatures.
        deadline_s: Includes connecting.
        kept_bytes: Limit on a body that goes into no views. None: all of it.
    """

    method: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    deadline_s: float
    kept_bytes: int | None = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """``headers`` by lower-case name; repeated ones are joined by commas.

    ``body`` is empty if it went into the caller's views.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class WireError(Exception):
    """No complete response came.

    Attributes:
        detail: Names the host, never path, query or headers.
        is_retryable: The same exchange may succeed later.
        is_timeout: A deadline is over, or the server was silent for too long.
    """

    def __init__(self, detail: str, *, is_retryable: bool = True, is_timeout: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.is_retryable = is_retryable
        self.is_timeout = is_timeout


class WrongLength(WireError):
    """The announced body differs in length from the views."""

    def __init__(self, detail: str, *, num_bytes: int | None) -> None:
        super().__init__(detail, is_retryable=False)
        self.num_bytes = num_bytes


def is_unreachable(error: StorageError) -> bool:
    """Returns whether a call was given up without an answer. The next call would take as long."""
    is_given_up = any(note.startswith(GIVEN_UP) for note in notes_of(error))
    cause = error.__cause__
    while isinstance(cause, StorageError | BaseExceptionGroup):  # callers name the snapshot
        cause = cause.__cause__ if isinstance(cause, StorageError) else cause.exceptions[0]
    return error.retryable and is_given_up and isinstance(cause, WireError | OSError)


def is_unknown_host(error: BaseException) -> bool:
    """Whether the host does not exist: a retry is of no use."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, socket.gaierror):
        # Clients keep the resolver's error as ``os_error`` or as the cause.
        cause = getattr(cause, "os_error", None) or cause.__cause__
    return cause is not None and cause.errno != socket.EAI_AGAIN


class _Exchange(NamedTuple):
    """One request, with the views that are its body, or that the response fills."""

    request: Request
    outgoing: Sequence[memoryview] = ()
    incoming: Sequence[memoryview] | None = None


class Wire:
    """Connections that are kept alive, as many per server as ``options`` allow. For one event loop.

    Args:
        ssl_context: None: the system's trusted authorities.
        proxy: Of HTTP, perhaps with user and password.
    """

    def __init__(
        self,
        run_blocking: RunBlocking,
        options: NetworkOptions,
        *,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        self.options = options
        self.proxy = urlsplit(proxy) if proxy else None
        self._run_blocking = run_blocking
        self._ssl_context = ssl_context
        self._idle: dict[str, list[_Connection]] = {}
        self._is_closed = False

    async def send(self, request: Request, views: Sequence[memoryview] = ()) -> Response:
        """Sends ``views``, back to back, as the body; they are not kept.

        Raises:
            WireError: No complete response came; the server may have acted.
        Cancellation: at once; the server may have acted.
        """
        return await self._perform(_Exchange(request, outgoing=views))

    async def receive(self, request: Request, views: Sequence[memoryview]) -> Response:
        """Fills ``views``, back to back, with the body of a 200 or 206 of exactly their length.

        Raises:
            WrongLength: The body has another length. The views are untouched.
            WireError: No complete response came. The views' content is unspecified.
        Cancellation: at once; the views are free.
        """
        return await self._perform(_Exchange(request, incoming=views))

    async def aclose(self) -> None:
        """Closes idle connections; others when their exchange ends."""
        self._is_closed = True
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()
        await anyio.lowlevel.checkpoint()

    async def _perform(self, exchange: _Exchange) -> Response:
        connection = self._take(urlsplit(exchange.request.url))
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(exchange.request.deadline_s, connection.cut_late)
        # Not a task group, which took 15 ms of CPU per GiB more.
        work = loop.create_task(self._run_blocking(connection.perform, exchange))
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            # A failure by this cut is no failure of the server.
            connection.cut()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([work])
            work.exception()
            raise
        finally:
            deadline.cancel()
            self._give_back(connection)
        return work.result()

    def _take(self, url: SplitResult) -> _Connection:
        idle = self._idle.get(f"{url.scheme}://{url.netloc}")
        return idle.pop() if idle else _Connection(self, url)

    def tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    def _give_back(self, connection: _Connection) -> None:
        idle = self._idle.setdefault(connection.place, [])
        if (
            connection.is_reusable
            and not connection.is_cut
            and not self._is_closed
            and len(idle) < self.options.max_concurrency
        ):
            idle.append(connection)
        else:
            connection.close()


class _Connection(http.client.HTTPConnection):
    """One connection to one server, opened on first use and after a loss.

    Methods except ``cut``, ``cut_late`` and ``close`` run on worker threads, one at a time.

    Attributes:
        is_reusable: Another exchange may follow.
        is_cut: No other exchange may follow.
    """

    def __init__(self, wire: Wire, url: SplitResult) -> None:
        self.place = f"{url.scheme}://{url.netloc}"
        self.is_reusable = False
        self.is_cut = False
        self._is_late = False
        self._stall_s = wire.options.stall_timeout_s
        self._ssl_context = wire.tls() if url.scheme == "https" else None
        self._server = url.hostname or ""
        self._proxy_headers: dict[str, str] = {}
        self._names_whole_url = False
        port = url.port or (80 if self._ssl_context is None else 443)
        address, proxy = (self._server, port), wire.proxy
        if proxy is not None:
            address = (proxy.hostname or "", proxy.port or 80)
        super().__init__(*address, timeout=wire.options.connect_timeout_s)
        if proxy is not None and self._ssl_context is None:
            self._names_whole_url = True
            self._proxy_headers = _proxy_headers(proxy)
        elif proxy is not None:
            self.set_tunnel(self._server, port, _proxy_headers(proxy))
        # http.client connects by it; so the socket can be cut meanwhile.
        self._create_connection = self._open_socket

    def cut(self) -> None:
        """Makes all use of the socket by a thread fail at once."""
        self.is_cut = True
        _shut_down(self.sock)

    def cut_late(self) -> None:
        """``cut`` at the deadline."""
        self._is_late = True
        self.cut()

    def perform(self, exchange: _Exchange) -> Response:
        self.is_reusable = False
        try:
            self._ensure_connected()
            return self._perform(exchange)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._translate_error(error, exchange.request.deadline_s) from error

    def connect(self) -> None:
        super().connect()
        if self._ssl_context is not None:
            # Stored before the handshake, which can thus be cut.
            self.sock = self._ssl_context.wrap_socket(
                self.sock, server_hostname=self._server, do_handshake_on_connect=False
            )
            self._check_cut()
            self.sock.do_handshake()
        else:
            # For calls in ``_blocking``.
            stall = struct.pack("ll", *divmod(round(self._stall_s * 1e6), 1_000_000))
            for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.sock.setsockopt(socket.SOL_SOCKET, name, stall)
        self.sock.settimeout(self._stall_s)

    def _ensure_connected(self) -> None:
        self._check_cut()
        if self.sock is not None and _is_stale(self.sock):
            self.close()
        if self.sock is None:
            self.connect()

    def _open_socket(
        self, address: tuple[str, int], timeout: float, source_address: None
    ) -> socket.socket:
        host, port = address
        failure: OSError | None = None
        for family, kind, proto, _, resolved in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        ):
            self.sock = socket.socket(family, kind, proto)
            try:
                self._check_cut()
                self.sock.settimeout(timeout)
                self.sock.connect(resolved)
            except OSError as error:
                self.sock.close()
                failure = error
            else:
                return self.sock
        raise _NoConnection(f"cannot connect to {host}:{port}: {_describe(failure)}") from failure

    def _check_cut(self) -> None:
        if self.is_cut:
            raise ConnectionAbortedError("cut")

    def _perform(self, exchange: _Exchange) -> Response:
        request, outgoing, incoming = exchange
        # A response keeps its socket open longer than its connection.
        with self._send(request, outgoing) as response:
            headers = {name.lower(): response.getheader(name, "") for name in response.headers}
            body = b""
            if incoming is not None and response.status in (200, 206):
                self._fill(response, incoming)
            else:
                body = response.read(request.kept_bytes)
                if response.length and len(body) < (request.kept_bytes or 0):
                    raise _HungUp
            self.is_reusable = response.isclosed() and not response.will_close
            return Response(status=response.status, headers=headers, body=body)

    def _send(self, request: Request, outgoing: Sequence[memoryview]) -> http.client.HTTPResponse:
        url = urlsplit(request.url)
        path = (
            request.url if self._names_whole_url else f"{url.path or '/'}?{url.query}".rstrip("?")
        )
        self.putrequest(request.method, path, skip_host=True, skip_accept_encoding=True)
        self.putheader("Host", host_header(url))
        for name, value in {**request.headers, **self._proxy_headers}.items():
            try:
                self.putheader(name, value)
            except ValueError:
                # Not shown, not even as a cause: it may be a token.
                detail = f"the header {name!r} has characters that cannot be sent to {self.place}"
                raise WireError(detail, is_retryable=False) from None
        num_bytes = sum(view.nbytes for view in outgoing)
        if num_bytes or request.method not in ("GET", "HEAD"):
            self.putheader("Content-Length", str(num_bytes))
        try:
            self.endheaders()
            with self._blocking():
                for view in _join_small(outgoing):
                    self.sock.sendall(view)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a body answers before it hangs up.
            self._check_cut()
            response = self.getresponse()
            response.will_close = True
            return response
        return self.getresponse()

    def _fill(self, response: http.client.HTTPResponse, views: Sequence[memoryview]) -> None:
        wanted = sum(view.nbytes for view in views)
        if response.length != wanted:
            raise WrongLength(
                f"{wanted} bytes were requested, and {response.length} are to come",
                num_bytes=response.length,
            )
        rest = deque([view.cast("B") for view in views if view.nbytes])
        if rest and self.sock is not None and self._ssl_context is None:
            # What came with the headers is in the response's buffer.
            _read(response, rest, len(response.peek()))
            with self._blocking():
                while rest:
                    some = list(islice(rest, _MAX_VIEWS))
                    num_bytes = self.sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
                    response.length -= num_bytes
                    _skip(rest, num_bytes)
        _read(response, rest, wanted)
        response.read()  # detects the end

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Lets the kernel wait for bulk bytes: a call moves all of its views, without the GIL.

        With Python's timeouts each call moves what fits into the kernel's buffers, and the thread
        then waits for the GIL. The kernel adds up the waits of a call, which then returns what it
        has moved: a silence of up to twice the limit may pass. Not for TLS, whose records are
        small.
        """
        if self._ssl_context is not None:
            yield
            return
        sock = self.sock
        sock.settimeout(None)
        try:
            yield
        except BlockingIOError:
            raise TimeoutError from None
        finally:
            sock.settimeout(self._stall_s)

    def _translate_error(self, error: Exception, deadline_s: float) -> WireError:
        place = self.place
        if self._is_late:
            return WireError(f"{place} took over {deadline_s:g} s", is_timeout=True)
        if isinstance(error, TimeoutError):
            return WireError(f"{place} was silent for {self._stall_s:g} s", is_timeout=True)
        if isinstance(error, _NoConnection):
            return WireError(str(error), is_timeout=isinstance(error.__cause__, TimeoutError))
        if isinstance(error, socket.gaierror):
            return WireError(
                f"the host of {place} is not known: {error.strerror}",
                is_retryable=not is_unknown_host(error),
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return WireError(
                f"the certificate of {place} is not trusted: {error.verify_message}",
                is_retryable=False,
            )
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return WireError(f"TLS with {place} failed: {error.reason}", is_retryable=False)
        return WireError(f"the connection to {place} broke: {_describe(error)}")


class _HungUp(ConnectionError):
    def __str__(self) -> str:
        return "the server hung up in mid-body"


class _NoConnection(OSError):
    """No address of the server could be reached."""


def _read(response: http.client.HTTPResponse, rest: deque[memoryview], num_bytes: int) -> None:
    """Reads up to ``num_bytes`` into the views of ``rest``, of which what is left stays."""
    while rest and num_bytes:
        received = response.readinto(rest[0][:num_bytes])
        num_bytes -= received
        _skip(rest, received)


def _skip(rest: deque[memoryview], num_bytes: int) -> None:
    """Removes the bytes that were received."""
    if not num_bytes:
        raise _HungUp
    while num_bytes and num_bytes >= len(rest[0]):
        num_bytes -= len(rest.popleft())
    if num_bytes:
        rest[0] = rest[0][num_bytes:]


def _join_small(views: Sequence[memoryview]) -> Iterator[memoryview | bytearray]:
    small = bytearray()
    for view in views:
        if len(small) + view.nbytes <= _SMALL_BYTES:
            small += view
            continue
        if small:
            yield small
            small = bytearray()
        yield view
    if small:
        yield small


def host_header(url: SplitResult) -> str:
    """Returns the host as signed: with the port only if it is not the scheme's own."""
    if url.port == {"http": 80, "https": 443}[url.scheme]:
        return url.netloc.rpartition(":")[0]
    return url.netloc


def _is_stale(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _shut_down(sock: socket.socket | None) -> None:
    if sock is None:
        return
    try:
        # Not SSLSocket.shutdown, which would drop TLS: a thread could continue in plain text.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # not connected yet, or no longer


def _describe(error: BaseException | None) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
