"""A URL with its options: opened, indexed, and cleared of garbage."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from actorsnap.actors.reader import FetcherPool, SnapshotReader
from actorsnap.errors import ObjectNotFound
from actorsnap.format.layout import attempt_of, is_commit_temporary
from actorsnap.format.manifest import COMMIT_KEY, Commit, RankManifest, decode_commit
from actorsnap.options import Options
from actorsnap.planning.retention import MAX_ATTEMPT_S, collectable
from actorsnap.runtime.host import Host, host_id
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import find_opener, is_ready, open_storage

__all__ = [
    "Place",
    "Source",
    "collect_garbage",
    "committed_attempt",
    "open_place",
    "open_ready_place",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a snapshot lies.

    Attributes:
        url: As the caller gave it.
        at: The same, wherever the process' working folder may be by now.
    """

    url: str
    at: str
    storage_options: dict[str, Any]


async def open_place(host: Host, place: Place, *, fsync: bool) -> Storage:
    """Opens the storage. No I/O; a backend is loaded on a worker thread.

    Raises:
        UsageError: unknown scheme or storage option.
    """
    if is_ready(place.at):
        return open_ready_place(host, place, fsync=fsync)
    opener = await host.run_blocking(find_opener, place.at)
    return opener(_context(host, place, fsync))


def open_ready_place(host: Host, place: Place, *, fsync: bool) -> Storage:
    """``open_place`` where the backend ``is_ready``."""
    return open_storage(place.at, _context(host, place, fsync))


def _context(host: Host, place: Place, fsync: bool) -> StorageContext:
    return StorageContext(
        options=place.storage_options, run_blocking=host.run_blocking, durable=fsync
    )


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
        storage = await open_place(host, self.place, fsync=True)
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
    host: Host,
    storage: Storage,
    *,
    began_s: float | None = None,
    superseded: str | None = None,
    force: bool = False,
) -> list[str]:
    """Deletes what attempts left that can no longer commit.

    The order matters: an attempt that was dead before the commit object is read cannot have
    committed after it, so what is deleted belongs to no snapshot, whoever commits meanwhile.

    Args:
        began_s: When the caller's attempt began, which has just committed: temporaries of
            the commit object from before are nobody's.
        superseded: An attempt that the caller knows to be replaced.
        force: Delete every other attempt, also one that may be running.

    Returns:
        The keys deleted.

    Raises:
        FormatError: the commit object is damaged; nothing was deleted.
        StorageError: listing, reading or deleting failed.
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
            is_older = began_s is not None and info.modified_s < began_s
            if is_old or is_older or force:
                keys.append(info.key)
    garbage = list(by_attempt)
    if not force:
        garbage = await host.run_blocking(_find_collectable, host, by_attempt, now_s, superseded)
    committed = await committed_attempt(storage)
    for attempt in garbage:
        if attempt != committed:
            keys.extend(by_attempt[attempt])
    if keys:
        await storage.delete(keys)
        logger.info("%s: deleted %d objects that were garbage", storage.url, len(keys))
    return keys


def _find_collectable(
    host: Host, attempts: Iterable[str], now_s: float, superseded: str | None
) -> list[str]:
    return collectable(
        attempts,
        now_s=now_s,
        host=host_id(),
        may_run=host.may_run,
        superseded=superseded,
    )


async def committed_attempt(storage: Storage) -> str | None:
    """The attempt that the commit object names; None where there is no commit object.

    Raises:
        FormatError: it is damaged.
        StorageError: reading failed.
    """
    try:
        data = await storage.get(COMMIT_KEY)
    except ObjectNotFound:
        return None
    return decode_commit(data).attempt
