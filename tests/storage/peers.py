# SPDX-License-Identifier: Apache-2.0
"""HTTP servers that do one thing each, as a script says: for tests of clients."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

__all__ = ["Peer", "Server", "repeat", "serving"]


class Peer:
    """One connection, as a server's script sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""

    def request(self) -> tuple[str, dict[str, str], bytes]:
        """The next request: its first line, its headers by lower-case name, its body."""
        line, headers = self.head()
        while len(self._rest) < int(headers.get("content-length", 0)):
            self._rest += self._more()
        size = int(headers.get("content-length", 0))
        body, self._rest = self._rest[:size], self._rest[size:]
        return line, headers, body

    def head(self) -> tuple[str, dict[str, str]]:
        while b"\r\n\r\n" not in self._rest:
            self._rest += self._more()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        pairs = [field.split(": ", 1) for field in fields]
        assert len({name.lower() for name, _ in pairs}) == len(pairs), "a header came twice"
        return line, {name.lower(): value for name, value in pairs}

    def answer(self, body: bytes = b"", status: str = "200 OK", *fields: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields]
        self.say("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)

    def hang(self) -> None:
        """Until the client hangs up."""
        with contextlib.suppress(OSError):
            while self.sock.recv(1 << 16):
                pass

    def _more(self) -> bytes:
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError
        return data


class Server:
    """Runs ``script`` for each connection, in a thread of its own."""

    def __init__(self, script: Callable[[Peer], None]) -> None:
        self.num_connections = 0
        self._script = script
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.num_connections += 1
                self._socks.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            self._script(Peer(sock))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def serving(script: Callable[[Peer], None]) -> Iterator[Server]:
    server = Server(script)
    try:
        yield server
    finally:
        server.close()


def repeat(step: Callable[[Peer], None]) -> Callable[[Peer], None]:
    """A script that does the same for each request of a connection."""

    def script(peer: Peer) -> None:
        while True:
            step(peer)

    return script
