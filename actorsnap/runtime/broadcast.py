"""Passes CPU memory from one rank to all others, over the job's process group."""

from __future__ import annotations

from typing import Any

import anyio
import torch
import torch.distributed as dist

from actorsnap.runtime.host import Host

__all__ = ["Broadcaster", "obstacle_of"]


def obstacle_of(process_group: Any) -> str:
    """Why a group's ranks cannot pass memory on to each other; empty if they can."""
    if process_group is None:
        return "only a store was given, and no process group"
    backends = dist.get_backend_config(process_group)
    if "cpu:gloo" not in backends.split(","):
        return (
            f"the process group ({backends}) has no gloo for CPU memory: initialise it with "
            "backend='cpu:gloo,cuda:nccl'"
        )
    return ""


class Broadcaster:
    """The broadcasts of one restore, one at a time.

    Args:
        patience_s: So long is the verdict waited for when one fails. That is because of another
            rank, and rank 0 will find out which.
    """

    def __init__(self, host: Host, process_group: Any, patience_s: float) -> None:
        self._host = host
        self._group = process_group
        self._patience_s = patience_s

    async def __call__(self, memory: memoryview, source: int) -> None:
        """Sends ``memory`` if this is rank ``source`` of the group, else receives into it.

        Cancellation: the process group may go on to use the memory until its own timeout; an
        errand shields from that.
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

    def _begin(self, tensor: torch.Tensor, source: int) -> Any:
        work = dist.broadcast(tensor, group_src=source, group=self._group, async_op=True)
        assert work is not None
        return work.get_future()
