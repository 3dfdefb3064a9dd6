# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_many_writers.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from actorsnap.storage.base import ObjectWriter
from actorsnap.storage.gs import GsWriter
from actorsnap.storage.s3 import PartWriter
from actorsnap.sync import Snapshot
from tests.cloud.places import state
from tests.worlds import Rank, World

__all__ = ["NUM_FLOATS", "direct_take"]

NUM_FLOATS = 100 << 18
"""Of one object, which is large enough for two writers."""


def take(me: Rank, url: str, env: dict[str, str]) -> list[bool]:
    """Saves what all hold; says, per object that it wrote to, whether that was a part of it."""
    os.environ |= env
    me.join_gloo()
    written: dict[str, int] = {}
    sizes: dict[str, int] = {}
    writer: Any = PartWriter if url.startswith("s3:") else GsWriter
    write_at = writer.write_at

    async def counted(
        self: ObjectWriter, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        sizes[self.key] = self.size
        written[self.key] = written.get(self.key, 0) + sum(view.nbytes for view in views)
        await write_at(self, offset, views, crc32c)

    writer.write_at = counted
    Snapshot.take(url, state(1, num_floats=NUM_FLOATS), replicated=["**"])
    dist.barrier()
    dist.destroy_process_group()
    return [nbytes < sizes[key] for key, nbytes in written.items()]


def direct_take(num_ranks: int, url: str, env: dict[str, str]) -> list[Any]:
    world = World(num_ranks, take, url=url, env=env)
    try:
        return world.results()
    finally:
        world.end()
