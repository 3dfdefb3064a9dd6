"""A URL with its options: opened, indexed, and cleared of garbage."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from actorsnap.actors.reader import FetcherPool, SnapshotReader, find_commit
from actorsnap.errors import ChecksumMismatch, StorageError
from actorsnap.format.layout import attempt_of, manifest_key
from actorsnap.format.manifest import Commit, RankManifest
from actorsnap.options import Options, chunk_within
from actorsnap.planning.retention import collectable
from actorsnap.runtime.host import Host
from actorsnap.runtime.process import host_id
from actorsnap.storage.base import RunBlocking, Storage, StorageContext
from actorsnap.storage.registry import find_opener, is_ready, open_storage

__all__ = [
    "Place",
    "Source",
    "collect_garbage",
    "open_place",
    "open_ready_place",
]

logger = logging.getLogger(__name__)

_CLEANUP_S = 30.0
"""Closing a storage takes no longer."""


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


async def open_place(
    host: Host,
    place: Place,
    *,
    fsync: bool,
    run_blocking: RunBlocking | None = None,
    scratch: str = "",
) -> Storage:
    """Opens the storage. No I/O; a backend is loaded on a worker thread.

    Args:
        run_blocking: Where its blocking calls go; the host's where None.
        scratch: See ``StorageContext``.

    Raises:
        UsageError: unknown scheme or storage option.
    """
    context = _context(place, fsync, run_blocking or host.run_blocking, scratch)
    if is_ready(place.at):
        return open_storage(place.at, context)
    opener = await host.run_blocking(find_opener, place.at)
    return opener(context)


def open_ready_place(host: Host, place: Place, *, fsync: bool) -> Storage:
    """``open_place`` where the backend ``is_ready``."""
    return open_storage(place.at, _context(place, fsync, host.run_blocking))


def _context(
    place: Place, fsync: bool, run_blocking: RunBlocking, scratch: str = ""
) -> StorageContext:
    return StorageContext(
        options=place.storage_options, run_blocking=run_blocking, durable=fsync, scratch=scratch
    )


class Source:
    """A snapshot that may exist: where, how to read it, and its index once it was read."""

    def __init__(self, place: Place, options: Options) -> None:
        self.place = place
        self.options = options
        self._kept: tuple[Commit, dict[int, RankManifest]] | None = None

    @asynccontextmanager
    async def opened(
        self, host: Host, op: str, attempt: str | None = None
    ) -> AsyncIterator[tuple[Storage, SnapshotReader]]:
        """The storage, for one operation within ``timeout_s``.

        Args:
            op: What is done, for messages.
            attempt: Whose objects are read, if the commit object was read before.

        Raises:
            SnapshotReplaced: instead of ``ChecksumMismatch`` where another snapshot was
                committed meanwhile, or this one deleted.
            StorageError: the time is over.
        """
        host.set_budget(self.options.memory_budget_bytes)
        with anyio.move_on_after(self.options.timeout_s) as scope:
            storage = await open_place(host, self.place, fsync=True)
            reader = SnapshotReader(storage, host.run_blocking, attempt)
            try:
                yield storage, reader
            except Exception as error:
                if _is_damage(error):
                    await reader.check_replaced()
                raise
            finally:
                with anyio.move_on_after(_CLEANUP_S, shield=True):
                    await storage.aclose()
        if scope.cancelled_caught:
            raise StorageError(
                op=op,
                key="",
                backend=self.place.url,
                detail=f"timeout_s={self.options.timeout_s:g} is over; the storage does not "
                "answer. Raise Options.timeout_s if it is that slow",
                retryable=True,
            )

    async def index(self, reader: SnapshotReader) -> tuple[Commit, dict[int, RankManifest]]:
        """The commit object, read anew, and all rank manifests, kept until it is another one."""
        commit = await reader.commit()
        if self._kept is None or self._kept[0] != commit:
            manifests = [await reader.manifest(record) for record in commit.manifests]
            self._kept = commit, dict(enumerate(manifests))
        return self._kept

    def fetcher(self, host: Host, storage: Storage, **changes: Any) -> FetcherPool:
        settings: dict[str, Any] = {
            "run_blocking": host.run_blocking,
            "budget": host.budget,
            "verify": self.options.verify,
            "chunk_bytes": chunk_within(self.options.chunk_bytes, host.budget.limit_bytes),
            "max_gap_bytes": self.options.max_gap_bytes,
            "num_fetchers": self.options.num_uploaders,
        }
        return FetcherPool(storage, **(settings | changes))


def _is_damage(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(ChecksumMismatch) is not None
    return isinstance(error, ChecksumMismatch)


async def collect_garbage(
    host: Host, storage: Storage, *, superseded: str | None = None, force: bool = False
) -> list[str]:
    """Deletes what attempts left that can no longer commit.

    The order matters: an attempt that was dead before the commit object is read cannot have
    committed after it, so what is deleted belongs to no snapshot, whoever commits meanwhile.

    Args:
        superseded: An attempt that the caller knows to be replaced.
        force: Delete every other attempt, also one that may be running.

    Returns:
        The keys deleted.

    Raises:
        FormatError: the commit object is of a newer or another format; nothing was deleted.
        StorageError: listing, reading or deleting failed.
    """
    now_s = time.time()
    by_attempt: dict[str, list[str]] = {}
    async for info in storage.list(""):
        attempt = attempt_of(info.key)
        if attempt is not None:
            by_attempt.setdefault(attempt, []).append(info.key)
    garbage = list(by_attempt)
    if not force:
        garbage = await host.run_blocking(_find_collectable, host, by_attempt, now_s, superseded)
    try:
        commit = await find_commit(storage)
        spared = {commit.attempt} if commit is not None else set()
    except ChecksumMismatch:
        # It names one of those that were complete. Deleting the snapshot deletes that one.
        spared = {name for name, keys in by_attempt.items() if manifest_key(name, 0) in keys}
    keys = [key for name in garbage if name not in spared for key in by_attempt[name]]
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
