# SPDX-License-Identifier: Apache-2.0
"""A storage of another package, whose operations a test in another process holds, or lets fail.

``held:///folder/snapshot`` is on the local file system. Before an operation it looks for files
beside the snapshot: while there is a ``hold-<operation>`` it waits, and says so by a
``held-<operation>``; ``fail-<operation>`` makes it fail, for what ``HELD_DETAIL`` says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import anyio

from actorsnap import StorageFull
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.storage.base import ObjectWriter, RunBlocking, Storage, StorageContext
from actorsnap.storage.fs import open_fs
from actorsnap.storage.wrapper import Wrapper


class HeldStorage(Wrapper):
    """Operations: ``writer``, ``manifest``, ``commit``, and ``committed`` behind that."""

    def __init__(self, inner: Storage, beside: Path, run_blocking: RunBlocking) -> None:
        super().__init__(inner)
        self._beside = beside
        self._run_blocking = run_blocking

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        await self._pass("writer", key)
        return await super().writer(key, size, older=older)

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        is_commit = key == COMMIT_KEY
        await self._pass("commit" if is_commit else "manifest", key)
        await super().put(key, views)
        if is_commit:
            await self._pass("committed", key)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self._pass("commit", key)
        await super().put_if_absent(key, data)
        await self._pass("committed", key)

    async def _pass(self, operation: str, key: str) -> None:
        if await self._is_there(f"fail-{operation}"):
            try:
                raise ValueError("the client's own error")
            except ValueError as error:
                raise StorageFull(
                    op=operation,
                    key=key,
                    backend=self.url,
                    detail=os.environ.get("HELD_DETAIL", "no room"),
                    retry_after_s=1.5,
                ) from error
        if await self._is_there(f"hold-{operation}"):
            await self._run_blocking((self._beside / f"held-{operation}").touch)
        while await self._is_there(f"hold-{operation}"):  # noqa: ASYNC110 - another process ends it
            await anyio.sleep(0.01)

    async def _is_there(self, name: str) -> bool:
        return await self._run_blocking((self._beside / name).exists)


def open_held(url: str, context: StorageContext) -> Storage:
    path = Path(url.removeprefix("held://"))
    return HeldStorage(open_fs(str(path), context), path.parent, context.run_blocking)
