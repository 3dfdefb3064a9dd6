"""A URL with its options: opened, indexed, and cleared of garbage."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from actorsnap.actors.reader import FetcherPool, SnapshotReader
from actorsnap.format.layout import attempt_of, is_commit_temporary
from actorsnap.format.manifest import Commit, RankManifest
from actorsnap.options import Options
from actorsnap.planning.retention import MAX_ATTEMPT_S, collectable
from actorsnap.runtime.host import Host, host_id, is_process_alive
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage

__all__ = ["Place", "Source", "collect_garbage", "open_place"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a snapshot lies, as the caller gave it."""

    url: str
    storage_options: dict[str, Any]


def open_place(host: Host, place: Place, *, fsync: bool) -> Storage:
    """Opens the storage. No I/O.

    Raises:
        UsageError: unknown scheme or storage option.
    """
    context = StorageContext(
        options=place.storage_options, run_blocking=host.run_blocking, durable=fsync
    )
    return open_storage(place.url, context)


class Source:
    """A snapshot that may exist: where, how to read it, and its index once it was read."""

    def __init__(self, place: Place, options: Options, commit: Commit | None = None) -> None:
        self.place = place
        self.options = options
        self.commit = commit
        self.manifests: dict[int, RankManifest] = {}

    @asynccontextmanager
    async def opened(self, host: Host) -> AsyncIterator[tuple[Storage, SnapshotReader]]:
        host.set_budget(self.options.memory_budget_bytes)
        storage = open_place(host, self.place, fsync=True)
        try:
            yield storage, SnapshotReader(storage, host.run_blocking)
        finally:
            with anyio.CancelScope(shield=True):
                await storage.aclose()

    async def index(self, reader: SnapshotReader) -> tuple[Commit, dict[int, RankManifest]]:
        """The commit object and all rank manifests; read once."""
        if self.commit is None or len(self.manifests) < self.commit.world_size:
            commit = await reader.commit()
            self.manifests = {
                rank: await reader.manifest(rank) for rank in range(commit.world_size)
            }
            self.commit = commit
        return self.commit, self.manifests

    def fetcher(self, host: Host, storage: Storage, **changes: Any) -> FetcherPool:
        settings: dict[str, Any] = {
            "run_blocking": host.run_blocking,
            "budget": host.budget,
            "verify": self.options.verify,
            "chunk_bytes": self.options.chunk_bytes,
            "max_gap_bytes": self.options.max_gap_bytes,
            "num_fetchers": self.options.num_uploaders,
        }
        return FetcherPool(storage, **(settings | changes))


async def collect_garbage(
    storage: Storage,
    *,
    committed: str | None,
    has_just_committed: bool = False,
    superseded: str | None = None,
    force: bool = False,
) -> list[str]:
    """Deletes what attempts left that can no longer commit.

    Args:
        committed: The attempt that the commit object names.
        has_just_committed: The caller has created that commit object: temporaries of
            others have lost the race.
        superseded: An attempt that the caller knows to be replaced.
        force: Delete every other attempt, also one that may be running.

    Returns:
        The keys deleted.
    """
    now_s = time.time()
    by_attempt: dict[str, list[str]] = {}
    keys: list[str] = []
    async for info in storage.list(""):
        attempt = attempt_of(info.key)
        if attempt is not None:
            by_attempt.setdefault(attempt, []).append(info.key)
        elif is_commit_temporary(info.key):
            is_old = now_s - info.modified_s > MAX_ATTEMPT_S
            if is_old or has_just_committed or force:
                keys.append(info.key)
    if force:
        garbage = [attempt for attempt in by_attempt if attempt != committed]
    else:
        garbage = collectable(
            by_attempt,
            committed=committed,
            now_s=now_s,
            host=host_id(),
            is_alive=is_process_alive,
            superseded=superseded,
        )
    for attempt in garbage:
        keys.extend(by_attempt[attempt])
    if keys:
        await storage.delete(keys)
        logger.info("%s: deleted %d objects of %d attempts", storage.url, len(keys), len(garbage))
    return keys
