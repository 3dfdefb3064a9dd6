"""Reads the rank manifests of a snapshot in a stream: a few are in memory at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from actorsnap.format.manifest import ManifestRecord, RankManifest
from actorsnap.planning.survey import BATCH_BYTES, memory_of
from actorsnap.runtime.source import MAX_SMALL_READS
from actorsnap.storage.base import RunBlocking, for_each

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, repr=False)
class ManifestStream:
    """The manifests of some ranks, to be looked at several times.

    They are kept if all of them are small, else read again.

    Args:
        read: Returns a manifest, its size and checksum; None to leave the rank out.
    """

    ranks: Sequence[int]
    read: Callable[[int], Awaitable[tuple[RankManifest, ManifestRecord] | None]]
    run_blocking: RunBlocking
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
            ExceptionGroup: Errors of ``read`` and ``take``.
        """

        async def read(rank: int) -> tuple[RankManifest, ManifestRecord | None] | None:
            kept = None if self._kept is None else self._kept.get(rank)
            return await self.read(rank) if kept is None else (kept, None)

        async def use(found: tuple[RankManifest, ManifestRecord | None] | None) -> None:
            if found is not None:
                await self.run_blocking(self._take, *found, take, on_record)

        await in_turn(self.ranks if ranks is None else ranks, read, use)

    def _take(
        self,
        manifest: RankManifest,
        record: ManifestRecord | None,
        take: Callable[[RankManifest], object],
        on_record: Callable[[ManifestRecord], object] | None,
    ) -> None:
        if record is not None and self._kept is not None:
            self._kept_bytes += memory_of(manifest)
            if self._kept_bytes > BATCH_BYTES:
                self._kept = None
            else:
                self._kept[manifest.rank] = manifest
        if record is not None and on_record is not None:
            on_record(record)
        take(manifest)


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
    items: Sequence[T], read: Callable[[T], Awaitable[R]], use: Callable[[R], Awaitable[object]]
) -> None:
    """Reads some items at a time; uses one after the other, in order."""
    turns = _Turns()

    async def perform(turn: int) -> None:
        found = await read(items[turn])
        await turns.wait(turn)
        await use(found)
        turns.end()

    await for_each(range(len(items)), perform, at_once=MAX_SMALL_READS)


class _Turns:
    """Lets tasks go on in order."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, anyio.Event] = {}

    async def wait(self, turn: int) -> None:
        if turn != self._next:
            event = self._waiting[turn] = anyio.Event()
            await event.wait()

    def end(self) -> None:
        self._next += 1
        if (event := self._waiting.pop(self._next, None)) is not None:
            event.set()
