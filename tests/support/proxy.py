# SPDX-License-Identifier: Apache-2.0
"""A proxy that sits in front of an HTTP server and makes the network bad, on purpose.

The wire has a latency and a bandwidth; single requests get a fault, by rule. A test with a
fault says so in a ``with``, which fails if the fault did not happen::

    with FaultProxy("http://127.0.0.1:9000") as proxy:
        with proxy.fault(Answer(status=503), method="PUT", pattern="partNumber=2", times=3):
            options = {"endpoint_url": proxy.endpoint}
            await actorsnap.Snapshot.take(url, state, storage_options=options)

It works in front of S3, Google Cloud Storage and whatever else speaks HTTP/1.1 in plain text;
to the client it speaks TLS if asked to. ``tests/support/relay.py`` is the process that
does all this. This module starts, asks and ends it, and must not know how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from tests.support import relay
from tests.support.relay import (
    Answer,
    Cut,
    Delay,
    Drop,
    Exchange,
    Fault,
    FlipBit,
    LoseAnswer,
    Reset,
    SetHeader,
    Stall,
    Truncate,
    Way,
)

__all__ = [
    "Answer",
    "Cut",
    "Delay",
    "Drop",
    "Exchange",
    "Fault",
    "FaultProxy",
    "FlipBit",
    "LoseAnswer",
    "Reset",
    "Rule",
    "SetHeader",
    "Stall",
    "TlsFiles",
    "Truncate",
    "Way",
]


class TlsFiles(NamedTuple):
    """Paths of PEM files: what the proxy shows to clients, and what these need to trust it."""

    cert_file: str
    key_file: str
    ca_file: str


class Rule:
    """A fault that is being given to requests. Made by ``FaultProxy.add``."""

    def __init__(self, proxy: FaultProxy, number: int, description: str) -> None:
        self._proxy = proxy
        self._number = number
        self._description = description
        self._num_hits: int | None = None

    def __repr__(self) -> str:
        return f"<Rule {self._description}: {self.num_hits} hits>"

    @property
    def num_hits(self) -> int:
        """How often the fault has happened. It is counted before the client can notice it."""
        if self._num_hits is not None:
            return self._num_hits
        return int(self._proxy._command("hits", number=self._number))

    def remove(self) -> None:
        """Requests that begin from now on are not harmed. ``num_hits`` stays."""
        if self._num_hits is None:
            self._num_hits = int(self._proxy._command("remove", number=self._number))


class FaultProxy:
    """A proxy in front of ``upstream``, while entered.

    Methods block for less than a millisecond, and may be called from any thread.

    Args:
        upstream: ``http://host:port``.
        latency_s: Goes by before each request is passed on, and once more for each connection.
        bytes_per_s: The bandwidth of each way, over all connections; None: no limit.
        connection_bytes_per_s: The same for each connection.
        tls: The client's side speaks TLS, as 127.0.0.1.

    Attributes:
        endpoint: Its own address, as a URL without a path.
        ca_file: What a client has to trust; None without TLS.
    """

    def __init__(
        self,
        upstream: str,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        connection_bytes_per_s: float | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.endpoint = ""
        self.ca_file = tls.ca_file if tls else None
        self._settings = {
            "upstream": upstream,
            "latency_s": latency_s,
            "bytes_per_s": bytes_per_s,
            "connection_bytes_per_s": connection_bytes_per_s,
            "cert_file": tls and tls.cert_file,
            "key_file": tls and tls.key_file,
        }
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        # -I: nothing of the environment; -S: no packages, which need longer than all the rest.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", relay.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.endpoint = self._ask(self._settings)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None, "the proxy is not entered"
        return self._process.pid

    def add(
        self,
        fault: Fault,
        *,
        method: str | None = None,
        pattern: str = "",
        skip: int = 0,
        times: int | None = None,
        for_s: float | None = None,
    ) -> Rule:
        """From now on requests that match get ``fault``. Of several rules the oldest takes it.

        Args:
            fault: What happens to them.
            method: ``"PUT"``, for instance; None: any.
            pattern: A regular expression that is found in the path with its query, as sent.
            skip: So many requests that match are passed on unharmed first.
            times: So many are harmed then; None: all.
            for_s: None later than this after the first; None: no such limit.
        """
        rule = {
            "method": method,
            "pattern": pattern,
            "skip": skip,
            "times": times,
            "for_s": for_s,
        }
        number = self._command(
            "add", kind=type(fault).__name__, fault=dataclasses.asdict(fault), **rule
        )
        return Rule(self, number, f"{fault} for {method or 'any'} {pattern!r}")

    @contextlib.contextmanager
    def fault(self, fault: Fault, **rule: Any) -> Iterator[Rule]:
        """``add`` for the length of a ``with``.

        Raises:
            AssertionError: It ended without an error, and the fault has not happened.
        """
        added = self.add(fault, **rule)
        try:
            yield added
        finally:
            added.remove()
        assert added.num_hits, f"{added} was not hit; there were {self.exchanges()}"

    def exchanges(self) -> list[Exchange]:
        """The requests so far, in the order in which they came, and what became of each."""
        return [Exchange(**exchange) for exchange in self._command("exchanges")]

    def forget(self) -> None:
        """``exchanges`` begins anew."""
        self._command("forget")

    def _command(self, verb: str, **arguments: Any) -> Any:
        return self._ask({"verb": verb, "arguments": arguments})

    def _ask(self, message: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None, "the proxy is not entered"
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the proxy's process ended with {process.wait()}")
        return json.loads(answer)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
