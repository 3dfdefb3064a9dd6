"""Reads the rank manifests of a snapshot in a stream: a few are in memory at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from actorsnap.format.manifest import ManifestRecord, RankManifest
from actorsnap.planning.survey import BATCH_BYTES, memory_of
from actorsnap.runtime.source import MAX_SMALL_READS
from actorsnap.storage.base import RunBlocking, for_each


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
        chosen = self.ranks if ranks is None else ranks
        turns = _Turns()

        async def perform(turn: int) -> None:
            rank = chosen[turn]
            found = None if self._kept is None else self._kept.get(rank)
            record = None
            if found is None:
                read = await self.read(rank)
                if read is not None:
                    found, record = read
            await turns.wait(turn)
            if found is not None:
                await self.run_blocking(self._take, found, record, take, on_record)
            turns.end()

        await for_each(range(len(chosen)), perform, at_once=MAX_SMALL_READS)

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
