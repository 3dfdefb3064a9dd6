# SPDX-License-Identifier: Apache-2.0
"""A storage whose writes wait for the test: what a trainer does meanwhile is then no race.

``GatedStorage`` lets a number of bytes through and holds the rest until the gate is opened.
Nothing sleeps or polls.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from actorsnap.storage.base import ObjectWriter, Storage, StorageContext, num_bytes
from actorsnap.storage.fs import open_fs
from actorsnap.storage.memory import open_memory
from actorsnap.storage.registry import register
from actorsnap.storage.wrapper import Wrapper, WriterWrapper, without_blocking_io

__all__ = ["Gate", "GatedStorage", "GatedWriter", "gated"]


class Gate:
    """Holds writers back. Opened and read from any thread.

    Attributes:
        num_held: Writes that had to wait.
    """

    def __init__(self, free_bytes: int = 0) -> None:
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._is_open = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._somebody_waits = threading.Event()
        self.num_held = 0

    async def pass_through(self, nbytes: int) -> None:
        with self._lock:
            self._free_bytes -= nbytes
            if self._is_open or self._free_bytes >= 0:
                return
            event = asyncio.Event()
            self._waiters.append((asyncio.get_running_loop(), event))
            self.num_held += 1
            self._somebody_waits.set()
        await event.wait()

    def wait_until_held(self, timeout_s: float = 60.0) -> None:
        """Returns when a write has come to the closed gate."""
        assert self._somebody_waits.wait(timeout_s), "no write came to the gate"

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            loop.call_soon_threadsafe(event.set)


class GatedStorage(Wrapper):
    """Passes everything on; bytes of data objects go through the gate first."""

    def __init__(self, inner: Storage, gate: Gate) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self.gate = gate

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return GatedWriter(self, inner)


class GatedWriter(WriterWrapper):
    """The writer of a ``GatedStorage``."""

    storage: GatedStorage

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self.storage.gate.pass_through(num_bytes(views))
        await self.inner.write_at(offset, views, crc32c)


_gates: dict[str, Gate] = {}
_numbers = itertools.count()


def _open_gated(url: str, context: StorageContext) -> Storage:
    place = url.removeprefix("gated://")
    name, _, rest = place.partition("/")
    inner: Storage
    if rest:
        inner = open_fs(f"/{rest}", context)
    else:
        inner = open_memory(f"memory://{name}", context)
    return GatedStorage(inner, _gates[name])


register("gated", _open_gated)


@contextmanager
def gated(folder: str | None = None, *, free_bytes: int = 0) -> Iterator[tuple[str, Gate]]:
    """The URL of a place behind a closed gate, in memory or in an absolute folder; and the gate.

    The gate is opened at the end, so that a failing test leaves no save waiting.
    """
    name = f"gate-{next(_numbers)}"
    gate = _gates[name] = Gate(free_bytes)
    try:
        yield (f"gated://{name}" + (folder or "")), gate
    finally:
        gate.open()
