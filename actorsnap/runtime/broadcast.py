# SPDX-License-Identifier: Apache-2.0
"""Broadcasts CPU memory over a private gloo group: the job's own groups stay in step even if a
broadcast fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import torch
import torch.distributed as dist

from actorsnap.runtime.host import Host

_dist: Any = dist  # lacks stores and gloo in the stubs

if TYPE_CHECKING:

    class _Store:
        """Missing in the stubs."""

elif dist.is_available():
    from torch.distributed import Store as _Store
else:
    _Store = object

_BROADCAST_S = 30.0
"""Time limit between responsive ranks."""

_MAX_POLL_S = 0.25

_NUM_CLEANERS = 2
"""Ranks that remove others' keys: one may be killed."""


def obstacle() -> str:
    """Returns why this process cannot broadcast, if so."""
    if dist.is_available() and dist.is_gloo_available():
        return ""
    return "torch was built without gloo"


class Broadcaster:
    """Broadcasts among some ranks, one at a time.

    Args:
        connect: Returns a connection to the job's store. Blocks.
        name: Unique at the store; the same on all these ranks.
        rank: Position among the ``num_ranks``.
    """

    def __init__(
        self,
        host: Host,
        connect: Callable[[], Any],
        *,
        name: str,
        rank: int,
        num_ranks: int,
        lost_after_s: float,
    ) -> None:
        self._host = host
        # Errors are raised late: rank 0 identifies their cause first.
        self._patience_s = 2 * lost_after_s
        self._timeout_s = _BROADCAST_S + lost_after_s
        self._meeting = _Meeting(connect, name, rank, num_ranks, self._timeout_s)
        self._group: Any = None

    async def meet(self) -> None:
        """Makes the group, with the other ranks.

        Raises:
            RuntimeError: Ranks are missing.
        Cancellation: Takes effect at once.
        """

        async def end_meeting_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                self._meeting.is_over = True

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_meeting_when_cancelled)
            try:
                await self._host.run_blocking(self._make)
            except RuntimeError:
                await anyio.sleep(self._patience_s)
                raise
            tasks.cancel_scope.cancel()

    async def broadcast(self, memory: memoryview, source: int) -> None:
        """Sends ``memory`` from rank ``source``; others receive into theirs.

        Raises:
            RuntimeError: Another rank is gone.
        Cancellation: Delayed until another rank leaves, or the timeout: the group uses the memory.
        Run it as an errand.
        """
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        ended = anyio.Event()
        with anyio.CancelScope(shield=True):
            future = await self._host.run_blocking(self._begin, tensor, source)
            future.add_done_callback(lambda _: self._host.call_soon(ended.set))
            await ended.wait()
        try:
            future.value()
        except RuntimeError:
            await anyio.sleep(self._patience_s)
            raise

    async def close(self, *, is_done: bool) -> None:
        """Leaves the group.

        Args:
            is_done: All broadcasts succeeded on this rank.
        """
        await self._host.run_blocking(self._close, is_done)

    def _make(self) -> None:
        gloo = _dist.ProcessGroupGloo
        # gloo's defaults, but connections are made on first use: to all ranks they could exceed the
        # limit of open files.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        options = gloo._Options()
        options._devices = [
            gloo.create_device(interface=interface, lazy_init=True)
            if interface
            else gloo.create_default_device(lazy_init=True)
        ]
        options._threads = 2
        options._timeout = timedelta(seconds=self._timeout_s)
        meeting = self._meeting
        self._group = gloo(meeting, meeting.rank, meeting.num_ranks, options)
        meeting.exchange()

    def _begin(self, tensor: torch.Tensor, source: int) -> Any:
        options = _dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._group.broadcast([tensor], options).get_future()

    def _close(self, is_done: bool) -> None:
        self._group = None  # closes its connections, which wakes waiting ranks
        if not is_done:
            self._meeting.clear()


class _Meeting(_Store):
    """The store passed to gloo, for ranks to exchange addresses.

    Through the job's store, each rank would ask for every other one, without cancellation. This one
    exchanges all entries at once; the last rank removes them.
    """

    def __init__(
        self, connect: Callable[[], Any], name: str, rank: int, num_ranks: int, timeout_s: float
    ) -> None:
        super().__init__()
        self.rank = rank
        self.num_ranks = num_ranks
        self.is_over = False
        self._connect = connect
        self._keys = [f"{name}/{other}" for other in range(num_ranks)]
        self._count = f"{name}/count"
        self._timeout_s = timeout_s
        self._own: dict[str, bytes] = {}
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        assert not self._entries
        self._own[key] = value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Called when gloo connects: possibly late, on its own thread."""
        self.exchange()

    def get(self, key: str) -> bytes:
        return self._entries[key]

    def exchange(self) -> None:
        """Publishes this rank's entries and waits for all others. Later calls do nothing.

        Raises:
            RuntimeError: Ranks are missing at the timeout or the end of the meeting.
        """
        if self._entries:
            return
        store = self._connect()
        store.set(self._keys[self.rank], msgspec.msgpack.encode(self._own))
        num_here = store.add(self._count, 1)
        deadline, poll_s = time.monotonic() + self._timeout_s, 0.001
        while num_here < self.num_ranks:
            if self.is_over or time.monotonic() > deadline:
                raise RuntimeError(f"{num_here} of {self.num_ranks} ranks have met")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)
            num_here = store.add(self._count, 0)
        for encoded in store.multi_get(self._keys):
            self._entries |= msgspec.msgpack.decode(encoded, type=dict[str, bytes])
        if store.add(self._count, 1) == 2 * self.num_ranks:
            self._remove(self._keys)

    def clear(self) -> None:
        """Removes the keys of an incomplete meeting."""
        if not self._own:
            return  # nothing was published
        self._remove(self._keys if self.rank < _NUM_CLEANERS else [self._keys[self.rank]])

    def _remove(self, keys: list[str]) -> None:
        store = self._connect()
        for key in (*keys, self._count):
            store.delete_key(key)
