"""Passes CPU memory from one rank to some others, over a gloo group of their own.

The group is made for one exchange and belongs to nobody else. So it needs no process group of
the job, and the job's own is in step whatever becomes of the exchange.
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

__all__ = ["Broadcaster", "obstacle"]

_dist: Any = dist  # the stubs lack the stores, and gloo

if TYPE_CHECKING:

    class _Store:
        """Of torch, whose stub lacks it."""

elif dist.is_available():
    from torch.distributed import Store as _Store
else:
    _Store = object

_PASSING_S = 30.0
"""A broadcast takes no longer, where all ranks are as awake as ``lost_after_s`` asks."""

_MAX_POLL_S = 0.25

_NUM_KEEPERS = 2
"""So many ranks remove what others have left."""


def obstacle() -> str:
    """Why this process cannot pass memory on; empty if it can."""
    if dist.is_available() and dist.is_gloo_available():
        return ""
    return "torch was built without gloo"


class Broadcaster:
    """The broadcasts of one exchange, one at a time.

    Args:
        connect: Returns a connection to the job's store. Blocks.
        name: Of the exchange, the same on all its ranks, and no other one's at the store ever.
        rank: This one, of ``num_ranks`` that take part.
        lost_after_s: See ``Options``.
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
        # What fails here fails because of another rank, and rank 0 will find out which.
        self._patience_s = 2 * lost_after_s
        self._timeout_s = _PASSING_S + lost_after_s
        self._meeting = _Meeting(connect, name, rank, num_ranks, self._timeout_s)
        self._group: Any = None

    async def meet(self) -> None:
        """Makes the group, together with the other ranks.

        Raises:
            RuntimeError: not all have come; later, as the verdict counts.
        Cancellation: at once.
        """

        async def watch() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                self._meeting.is_over = True

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                await self._host.run_blocking(self._make)
            except RuntimeError:
                await anyio.sleep(self._patience_s)
                raise
            tasks.cancel_scope.cancel()

    async def __call__(self, memory: memoryview, source: int) -> None:
        """Sends ``memory`` if this is rank ``source`` of the exchange, else receives into it.

        Raises:
            RuntimeError: another rank is gone; later, as the verdict counts.
        Cancellation: the group may go on to use the memory until another rank leaves it, or its
            timeout; an errand shields from that.
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
        """Leaves the group, after the last broadcast has ended here.

        Args:
            is_done: Whether it has served its purpose, on this rank at least.
        """
        await self._host.run_blocking(self._close, is_done)

    def _make(self) -> None:
        gloo = _dist.ProcessGroupGloo
        # As gloo does by itself, but that it connects to a rank when it has to do with it. With a
        # connection to each, a process might have more of them than it may.
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
        meeting.hear()

    def _begin(self, tensor: torch.Tensor, source: int) -> Any:
        options = _dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._group.broadcast([tensor], options).get_future()

    def _close(self, is_done: bool) -> None:
        self._group = None  # closes its connections: who waits at one hears it
        if not is_done:
            self._meeting.clear()


class _Meeting(_Store):
    """The store that gloo gets to see, where ranks tell each other their addresses.

    At the job's own each rank would ask for every other one, wait there whatever happens, and
    leave its address behind. Here it says all that it has to say at once, and takes what all
    have said at once; the last one to do so removes it.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        name: str,
        rank: int,
        num_ranks: int,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.num_ranks = num_ranks
        self.is_over = False
        self._connect = connect
        self._keys = [f"{name}/{other}" for other in range(num_ranks)]
        self._count = f"{name}/count"
        self._timeout_s = timeout_s
        self._said: dict[str, bytes] = {}
        self._heard: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        assert not self._heard
        self._said[key] = value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Called when gloo connects; that may be much later, in a thread of its own."""
        self.hear()

    def get(self, key: str) -> bytes:
        return self._heard[key]

    def hear(self) -> None:
        """Says what was set, and waits until all ranks have; once.

        Raises:
            RuntimeError: they have not, and the time is over, or the meeting.
        """
        if self._heard:
            return
        store = self._connect()
        store.set(self._keys[self.rank], msgspec.msgpack.encode(self._said))
        num_here = store.add(self._count, 1)
        deadline, poll_s = time.monotonic() + self._timeout_s, 0.001
        while num_here < self.num_ranks:
            if self.is_over or time.monotonic() > deadline:
                raise RuntimeError(f"{num_here} of {self.num_ranks} ranks have met")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)
            num_here = store.add(self._count, 0)
        for said in store.multi_get(self._keys):
            self._heard |= msgspec.msgpack.decode(said, type=dict[str, bytes])
        if store.add(self._count, 1) == 2 * self.num_ranks:
            self._remove(self._keys)

    def clear(self) -> None:
        """Removes what is left of a meeting that may not have come to its end."""
        if not self._said:
            return  # this rank has not come
        # Who was killed cannot remove its own: two do it for all, as one may be that.
        self._remove(self._keys if self.rank < _NUM_KEEPERS else [self._keys[self.rank]])

    def _remove(self, keys: list[str]) -> None:
        store = self._connect()
        for key in (*keys, self._count):
            store.delete_key(key)
