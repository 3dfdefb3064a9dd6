# SPDX-License-Identifier: Apache-2.0
"""Metadata servers of AWS and Google, as far as their pages describe them, and broken ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

__all__ = ["Answer", "AwsMetadata", "GceMetadata", "Request", "serve"]


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    query: dict[str, str] = field(default_factory=dict)


@dataclass
class Answer:
    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent as it is, in place of an answer of HTTP."""


@contextmanager
def serve(respond: Callable[[Request], Answer]) -> Iterator[str]:
    """A server on a free port, each request on its own thread; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = respond(Request(self.command, parts.path, headers, query))
            with suppress(OSError):  # the client may have gone
                if answer.raw is not None:
                    self.wfile.write(answer.raw)
                    return
                self.send_response_only(answer.status)  # without a date
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body.encode())

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class AwsMetadata:
    """IMDSv2: each request needs a token, which expires.

    Attributes:
        trouble: Answers in the server's place, if it returns an answer.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.items: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.num_tokens = 0
        self.trouble: Callable[[Request], Answer | None] = lambda _: None

    def interrupt(self, *, left_s: float, action: str = "terminate", skew_s: float = 0.0) -> None:
        """A notice of EC2. The instance's clock is ``skew_s`` ahead of the server's."""
        self.skew_s = skew_s
        end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - skew_s + left_s))
        self.items["spot/instance-action"] = json.dumps({"action": action, "time": end})

    skew_s = 0.0

    def __call__(self, request: Request) -> Answer:
        self.requests.append(request)
        if answer := self.trouble(request):
            return answer
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() - self.skew_s))
        headers = {"Date": date}
        if (request.method, request.path) == ("PUT", "/latest/api/token"):
            if int(request.headers["x-aws-ec2-metadata-token-ttl-seconds"]) > 21600:
                return Answer(400)
            self.num_tokens += 1
            self.tokens.add(f"token-{self.num_tokens}")
            return Answer(200, f"token-{self.num_tokens}", headers)
        if request.headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return Answer(401)
        body = self.items.get(request.path.removeprefix("/latest/meta-data/"))
        return Answer(404, "<html>Not Found</html>") if body is None else Answer(200, body, headers)


class GceMetadata:
    """Values with an ETag each; a request may wait until one changes.

    Attributes:
        trouble: Answers in the server's place, if it returns an answer.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.trouble: Callable[[Request], Answer | None] = lambda _: None
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def __call__(self, request: Request) -> Answer:
        self.requests.append(request)
        if answer := self.trouble(request):
            return answer
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(403)
        key = request.path.removeprefix("/computeMetadata/v1/instance/")
        with self._changed:
            if key not in self._values:
                return Answer(404)
            if request.query.get("wait_for_change") == "true":
                self._changed.wait_for(
                    lambda: self._etag(key) != request.query["last_etag"],
                    timeout=float(request.query["timeout_sec"]),
                )
            headers = {"Metadata-Flavor": "Google", "ETag": self._etag(key)}
            return Answer(200, self._values[key] + "\n", headers)

    def _etag(self, key: str) -> str:
        return f"{abs(hash(self._values[key])):x}"
