"""Reads the rank manifests of a snapshot in a stream: a few are in memory at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from actorsnap.actors.snapshot_reader import SnapshotReader
from actorsnap.errors import FormatError
from actorsnap.format.checksum import crc32c
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import Commit, ManifestRecord, RankManifest
from actorsnap.format.owners import owners_key
from actorsnap.format.tables import decode_lone_rank_manifest, decode_rank_manifest
from actorsnap.planning.ownership import OwnerIndex
from actorsnap.planning.survey import BATCH_BYTES, Holdings, memory_of
from actorsnap.runtime.source import MAX_SMALL_READS
from actorsnap.storage.base import for_each

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class ManifestStream:
    """The manifests of some ranks, to be looked at several times.

    They are kept if all of them are small, else read again. Several are read at once, but one job
    decodes, shows and drops a manifest, one at a time: its memory stays in a core's cache.

    Args:
        commit: None: there is no commit object.
        on_damage: Gets the error of a manifest that is missing or damaged, instead of the caller
            of ``each``.
    """

    reader: SnapshotReader
    attempt: str
    commit: Commit | None
    ranks: Sequence[int]
    on_damage: Callable[[FormatError], object] | None = None
    _kept: dict[int, RankManifest] | None = field(default_factory=dict)
    _kept_bytes: int = 0

    async def each(
        self,
        take: Callable[[RankManifest], object],
        ranks: Sequence[int] | None = None,
        on_record: Callable[[ManifestRecord], object] | None = None,
    ) -> None:
        """Calls ``take`` with each manifest, in rank order, on worker threads.

        Args:
            ranks: Only these, rising.
            on_record: Called before with what a manifest is, unless that was kept.

        Raises:
            ExceptionGroup: Errors of manifests and of ``take``.
        """

        async def perform(rank: int, wait: Callable[[], Awaitable[None]]) -> None:
            kept = None if self._kept is None else self._kept.get(rank)
            if kept is not None:
                await wait()
                await self.reader.run_blocking(take, kept)
                return

            def use(data: bytes, key: str) -> None:
                manifest, record = self._decode(rank, data, key)
                self._keep(manifest)
                if on_record is not None:
                    on_record(record)
                take(manifest)

            try:
                await self.reader.use_manifest(manifest_key(self.attempt, rank), use, wait)
            except FormatError as error:
                if self.on_damage is None:
                    raise
                await wait()
                self.on_damage(error)

        await in_turn(self.ranks if ranks is None else ranks, perform)

    def _decode(self, rank: int, data: bytes, key: str) -> tuple[RankManifest, ManifestRecord]:
        if self.commit is None:
            return decode_lone_rank_manifest(data, key)
        record = self.commit.record(rank)
        found = record or ManifestRecord(key=key, size=len(data), crc32c=crc32c(data))
        return decode_rank_manifest(data, key, record), found

    def _keep(self, manifest: RankManifest) -> None:
        if self._kept is not None:
            self._kept_bytes += memory_of(manifest)
            if self._kept_bytes > BATCH_BYTES:
                self._kept = None
            else:
                self._kept[manifest.rank] = manifest


@dataclass(eq=False, repr=False)
class OwnerCheck:
    """Compares the owner index with rank manifests.

    Attributes:
        encoded: Its bytes; None: the snapshot has none, and nothing is compared.
        problems: An error per manifest that contradicts it.
    """

    attempt: str
    encoded: bytes | None
    index: OwnerIndex | None
    problems: list[FormatError] = field(default_factory=list)

    @classmethod
    async def begin(cls, reader: SnapshotReader, commit: Commit) -> OwnerCheck:
        """Reads the owner index; raises as ``SnapshotReader.owners``."""
        found = await reader.owners(commit)
        if found is None:
            return cls(commit.attempt, None, None)
        index = await reader.run_blocking(OwnerIndex, found[0], commit.world_size)
        return cls(commit.attempt, found[1], index)

    def add(self, manifest: RankManifest, holdings: Holdings | None = None) -> None:
        """Blocks; for worker threads. ``holdings`` are those of the manifest, if known."""
        if self.index is None:
            return
        difference = self.index.difference(manifest, holdings)
        if difference is not None:
            detail = f"{difference}, which contradicts its manifest"
            self.problems.append(FormatError(key=owners_key(self.attempt), detail=detail))


def index_progress(
    world_size: int, progress: Callable[[int, int], None] | None
) -> Callable[[ManifestRecord], None]:
    """Returns what calls ``progress`` with the bytes of manifests, and an estimate of all."""
    count = nbytes = 0

    def note(record: ManifestRecord) -> None:
        nonlocal count, nbytes
        count, nbytes = count + 1, nbytes + record.size
        if progress is not None:
            progress(nbytes, nbytes * world_size // count)

    return note


async def in_turn(
    items: Sequence[T],
    perform: Callable[[T, Callable[[], Awaitable[None]]], Awaitable[object]],
) -> None:
    """Performs some items at a time; what follows ``await wait()``, one by one and in order.

    Args:
        perform: Gets an item and ``wait``.
    """
    now = 0
    waiting: dict[int, anyio.Event] = {}

    async def perform_one(turn: int) -> None:
        nonlocal now

        async def wait() -> None:
            if turn != now:
                event = waiting[turn] = anyio.Event()
                await event.wait()

        await perform(items[turn], wait)
        await wait()
        now += 1
        if (event := waiting.pop(now, None)) is not None:
            event.set()

    await for_each(range(len(items)), perform_one, at_once=MAX_SMALL_READS)
