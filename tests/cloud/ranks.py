"""What ranks and directors do in ``test_many_writers.py`` (see ``tests.worlds``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from actorsnap.storage.s3 import S3Storage
from actorsnap.sync import Snapshot
from tests.cloud.places import state
from tests.worlds import Rank, World

__all__ = ["NUM_FLOATS", "direct_take"]

NUM_FLOATS = 100 << 18
"""Of one object, which is large enough for two writers."""


def take(me: Rank, url: str) -> list[bool]:
    """Saves what all hold; says, per object that it wrote to, whether that was a part of it."""
    me.join_gloo()
    written: dict[str, int] = {}
    sizes: dict[str, int] = {}
    send_part = S3Storage.send_part

    async def counted(
        self: S3Storage, upload: Any, number: int, views: Sequence[memoryview], crc32c: int | None
    ) -> Any:
        sizes[upload.key] = upload.size
        written[upload.key] = written.get(upload.key, 0) + sum(view.nbytes for view in views)
        return await send_part(self, upload, number, views, crc32c)

    S3Storage.send_part = counted  # type: ignore[method-assign]
    Snapshot.take(url, state(1, num_floats=NUM_FLOATS), replicated=["**"])
    dist.barrier()
    dist.destroy_process_group()
    return [nbytes < sizes[key] for key, nbytes in written.items()]


def direct_take(num_ranks: int, url: str) -> list[Any]:
    world = World(num_ranks, take, url=url)
    try:
        return world.results()
    finally:
        world.end()
