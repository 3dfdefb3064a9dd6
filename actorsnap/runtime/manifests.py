# SPDX-License-Identifier: Apache-2.0
"""Reads the rank manifests of a snapshot in a stream: a few are in memory at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

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
from actorsnap.storage.base import RunBlocking, for_each

T = TypeVar("T")

_BURST_S = 0.05


@dataclass(eq=False, repr=False)
class ManifestStream:
    """The manifests of some ranks, to be looked at several times.

    They are kept if all of them are small, else read again. Several are read at once; one after
    the other is decoded, looked at and dropped: its memory stays in a core's cache.

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
            on_record: Called before with what a manifest is, unless that was kept, or is of another
                format.

        Raises:
            ExceptionGroup: Errors of manifests and of ``take``.
        """

        ranks = self.ranks if ranks is None else ranks
        turns = Turns(self.reader.run_blocking)

        def use(rank: int, data: bytes, key: str) -> None:
            manifest, record = self._decode(rank, data, key)
            self._keep(manifest)
            if on_record is not None:
                on_record(record)
            take(manifest)

        async def perform(turn: int) -> None:
            rank, run = ranks[turn], partial(turns.run, turn)
            kept = self._in_memory(rank)
            if kept is not None:
                await run(partial(take, kept))
                return
            try:
                key = manifest_key(self.attempt, rank)
                await self.reader.use_manifest(key, partial(use, rank), run)
            except FormatError as error:
                if self.on_damage is None:
                    raise
                await run(partial(self.on_damage, error))

        await for_each(range(len(ranks)), perform, at_once=MAX_SMALL_READS)

    def _in_memory(self, rank: int) -> RankManifest | None:
        if self.reader.foreign is not None:
            return self.reader.foreign.manifests[rank]
        return None if self._kept is None else self._kept.get(rank)

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


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], object]
    changed: anyio.Event = field(default_factory=anyio.Event)
    result: Any = None
    error: Exception | None = None
    is_done: bool = False


class Turns:
    """Runs calls of several tasks in order, on worker threads.

    Those that are ready together share a trip to a thread, whose cache they share, too.
    """

    def __init__(self, run_blocking: RunBlocking) -> None:
        self._run_blocking = run_blocking
        self._next = 0
        self._is_running = False
        self._jobs: dict[int, _Job] = {}

    async def run(self, turn: int, call: Callable[[], T]) -> T:
        """Returns the result of the call, after those of all turns before: 0, 1, 2, ...

        An error does not end the turn: it needs another call.
        """
        job = self._jobs[turn] = _Job(call)
        while not job.is_done:
            if turn == self._next and not self._is_running:
                await self._run_ready()
            else:
                await job.changed.wait()
                job.changed = anyio.Event()
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    async def _run_ready(self) -> None:
        jobs: list[_Job] = []
        while (job := self._jobs.get(self._next + len(jobs))) is not None:
            jobs.append(job)
        self._is_running = True
        try:
            await self._run_blocking(_run_all, jobs)
        finally:
            self._is_running = False
            for job in jobs:
                if not job.is_done:
                    break
                del self._jobs[self._next]
                job.changed.set()
                if job.error is not None:
                    break
                self._next += 1
            if (waiting := self._jobs.get(self._next)) is not None:
                waiting.changed.set()


def _run_all(jobs: Iterable[_Job]) -> None:
    """Runs calls up to the first error, for about ``_BURST_S``: a cancellation waits for them."""
    deadline_s = time.monotonic() + _BURST_S
    for job in jobs:
        try:
            job.result = job.call()
        except Exception as error:
            job.error = error
        job.is_done = True
        if job.error is not None or time.monotonic() > deadline_s:
            return
