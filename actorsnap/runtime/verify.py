"""Verifies a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec
import numpy as np

from actorsnap.actors.fetcher import RangeRequest
from actorsnap.actors.snapshot_reader import missing_is_damage, read_intact
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    StorageError,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.checksum import crc32c
from actorsnap.format.manifest import (
    BytesEntry,
    Commit,
    ObjectRecord,
    RankManifest,
    Stored,
    StoredChunk,
    TensorEntry,
)
from actorsnap.format.owners import owners_key
from actorsnap.planning.index import holes
from actorsnap.planning.ownership import OwnerIndex
from actorsnap.planning.restore import check_chunks
from actorsnap.runtime.host import Script
from actorsnap.runtime.reading import begins_anew
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source
from actorsnap.state.restore.verification import Doubtful, verify_entries
from actorsnap.state.sources import HostMemory
from actorsnap.storage.base import for_each


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verification.

    Attributes:
        level: ``quick``: index, existence and sizes; ``full``: every byte, and whether each rank
            can restore its entries.
        num_objects: Data objects checked.
        nbytes: Bytes compared with checksums.
        problems: An error per damaged or missing object, and per entry that cannot be restored.
    """

    level: str
    num_objects: int
    nbytes: int
    problems: tuple[ActorSnapError, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(eq=False, repr=False)
class _NullSink:
    """Only counts bytes."""

    is_addressable = False
    nbytes: int
    count: Callable[[int], None]

    def view(self, start: int, stop: int) -> memoryview:
        raise AssertionError("not addressable")

    def copy_from(self, start: int, data: memoryview) -> None:
        self.count(len(data))


@begins_anew
def verify(
    source: Source, *, level: str, progress: Callable[[int, int], None] | None = None
) -> Script[VerifyReport]:
    """Checks a snapshot. ``progress`` gets done and total bytes, on any thread."""
    if level not in ("quick", "full"):
        raise UsageError(f'level must be "quick" or "full", not {level!r}')

    async def perform(opened: OpenSource) -> VerifyReport:
        reader = opened.reader
        commit = await reader.commit()
        problems: list[ActorSnapError] = []
        manifests: dict[int, RankManifest] = {}

        async def read(rank: int) -> None:
            try:
                manifests[rank] = await reader.manifest(commit, rank)
            except FormatError as error:
                problems.append(error)

        await for_each(range(commit.world_size), read, at_once=MAX_SMALL_READS)
        check = DataCheck(opened, level=level, progress=progress)
        problems += await check.run(
            [manifests[rank] for rank in sorted(manifests)],
            is_complete=len(manifests) == commit.world_size,
        )
        problems += await _check_owners(opened, commit, level, list(manifests.values()))
        if problems:
            await reader.check_replaced()
        return VerifyReport(
            level=level,
            num_objects=check.num_objects,
            nbytes=check.nbytes,
            problems=tuple(problems),
        )

    return (yield from source.perform("verify", perform))


async def _check_owners(
    opened: OpenSource, commit: Commit, level: str, manifests: Sequence[RankManifest]
) -> list[FormatError]:
    """Returns why the owner index is of no use; a full check compares it with all manifests."""
    try:
        found = await opened.reader.owners(commit)
    except FormatError as error:
        return [error]
    if found is None or level == "quick":
        return []
    index = OwnerIndex(found[0], commit.world_size)

    def compare() -> list[FormatError]:
        key = owners_key(commit.attempt)
        found = [index.difference(manifest) for manifest in manifests]
        return [FormatError(key=key, detail=each) for each in found if each is not None]

    return await opened.host.run_blocking(compare)


@dataclass(eq=False, repr=False)
class DataCheck:
    """Compares stored data with rank manifests.

    Args:
        level, progress: See ``verify``.

    Attributes:
        num_objects: Data objects checked.
        nbytes: Of intact objects; 0 if ``quick``.
    """

    opened: OpenSource
    _: KW_ONLY
    level: str
    progress: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        opened = self.opened
        self._run_blocking = run_blocking = opened.errands.run_blocking
        self._pool = opened.fetcher(verify=True, run_blocking=run_blocking)
        self._unverified = opened.fetcher(verify=False, run_blocking=run_blocking)
        self._held: dict[str, _HeldObject] = {}
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0
        self.num_objects = 0
        self.nbytes = 0

    async def run(
        self, manifests: Sequence[RankManifest], *, is_complete: bool
    ) -> list[ActorSnapError]:
        """Returns the problems of ``VerifyReport``.

        Args:
            manifests: In rank order.
            is_complete: Otherwise only objects are checked.

        Raises:
            UnsupportedFormat: A package for the data is not installed.
            StorageError: Reading failed.
        """
        problems: list[ActorSnapError] = []
        self._held, contradictions = await self._run_blocking(_objects_in, manifests)
        problems += contradictions
        held = self._held.values()
        if is_complete:
            problems += await self._run_blocking(lambda: [*holes(manifests), *_gaps(held)])
        self._total_bytes = sum(at.stop - at.start for each in held for _, at in each.leaves)
        await self._run_blocking(self._count, 0)
        num_checked = 0

        async def check(record: ObjectRecord) -> None:
            nonlocal num_checked
            try:
                with missing_is_damage(record.key):
                    await self._check(record)
                num_checked += 1
            except UnsupportedFormat:
                raise  # neither intact nor damaged
            except FormatError as error:
                problems.append(error)
            except BaseExceptionGroup as group:
                problems.append(_damage_in(group)[0])

        records = [each.record for each in held]
        # The pool limits concurrent reads.
        parallel_objects = self.opened.storage.capabilities.preferred_parallel_objects
        at_once = parallel_objects if self.level == "full" else MAX_SMALL_READS
        await for_each(records, check, at_once=at_once)
        self.num_objects = len(records)
        done, total = self._done_bytes, self._total_bytes
        if not problems and (
            num_checked != len(records) or (self.level == "full" and done < total)
        ):
            raise StorageError(
                op="verify",
                key="",
                backend=self.opened.source.location.display_url,
                detail=f"only {num_checked} of {len(records)} objects and {done} of "
                f"{total} bytes were compared, and nothing failed",
            )
        if self.level == "full" and is_complete:
            found = await self._run_blocking(verify_entries, dict(enumerate(manifests)))
            known = {getattr(problem, "key", "") for problem in problems}
            problems += [error for error in found.problems.values() if error.key not in known]

            async def build(leaf: Doubtful) -> None:
                problems.extend(await self._build(leaf))

            await for_each(found.doubtful.values(), build, at_once=1)
        return problems

    def _count(self, nbytes: int) -> None:
        """Adds up worker threads' bytes for the caller's ``progress``."""
        with self._lock:
            self._done_bytes += nbytes
            if self.progress is not None:
                self.progress(self._done_bytes, self._total_bytes)

    async def _build(self, leaf: Doubtful) -> list[FormatError]:
        """Returns why the leaf cannot be built; empty if it can."""
        try:
            part = await self._run_blocking(leaf.restore)
            await self._pool.fetch(
                [RangeRequest(leaf.index, want.stored, want.sink) for want in part.memory.reads]
            )
            await self._run_blocking(part.build)
        except FormatError as error:
            found: list[Any] = [error]
        except BaseExceptionGroup as group:
            found = _damage_in(group)
        else:
            return []
        # Mismatches are already reported, per object.
        return [error for error in found if not isinstance(error, ChecksumMismatch)]

    async def _check(self, record: ObjectRecord) -> None:
        await self._check_sizes(record)
        if self.level == "full":
            await read_intact(self.opened.storage, lambda: self._check_header(record))
            requests = [
                RangeRequest(manifest, at, _NullSink(at.stop - at.start, self._count))
                for manifest, at in self._held[record.key].leaves
            ]
            await self._pool.fetch(requests)
            self.nbytes += record.size

    async def _check_sizes(self, record: ObjectRecord) -> None:
        if record.chunks:  # many keys
            listed = self.opened.storage.list(f"{record.key}/")
            found = {info.key: info.size async for info in listed}
        else:
            found = {record.key: (await self.opened.storage.stat(record.key)).size}
        for key, size in self._held[record.key].stored.items():
            if key not in found:
                raise ChecksumMismatch(key=key, detail="the object is missing")
            if found[key] != size:
                raise ChecksumMismatch(
                    key=key, detail=f"has {found[key]} bytes, was written with {size}"
                )

    async def _check_header(self, record: ObjectRecord) -> None:
        header = await self._read_header(record)
        if crc32c(header) != record.header_crc32c:
            raise ChecksumMismatch(key=record.key, detail="the safetensors header differs")

    async def _read_header(self, record: ObjectRecord) -> bytes:
        if not record.chunks:
            return await self.opened.storage.get(record.key, 0, record.header_bytes)
        header = np.empty(record.header_bytes, np.uint8)
        sink = HostMemory(header.ctypes.data, len(header), header)
        manifest, number = self._held[record.key].opener()
        at = Stored(number, 0, len(header), ())
        await self._unverified.fetch([RangeRequest(manifest, at, sink)])
        return header.tobytes()


@dataclass(slots=True, eq=False)
class _HeldObject:
    """The records of all ranks about one data object.

    Attributes:
        parts: The manifests that list it, with its number in each.
        leaves: Stored in it.
    """

    record: ObjectRecord
    parts: list[tuple[RankManifest, int]] = field(default_factory=list)
    leaves: list[tuple[RankManifest, Stored]] = field(default_factory=list)

    @property
    def stored(self) -> dict[str, int]:
        return {
            key: size
            for manifest, number in self.parts
            for key, size in manifest.objects[number].stored
        }

    @property
    def chunks(self) -> list[StoredChunk]:
        return [
            chunk for manifest, number in self.parts for chunk in manifest.objects[number].chunks
        ]

    def opener(self) -> tuple[RankManifest, int]:
        """Returns the manifest and number with a compressed object's header.

        Raises:
            FormatError: no chunk begins at 0.
        """
        for manifest, number in self.parts:
            if manifest.objects[number].chunks[0].start == 0:
                return manifest, number
        raise FormatError(key=self.record.key, detail="no chunk begins at 0")


def _objects_in(
    manifests: Sequence[RankManifest],
) -> tuple[dict[str, _HeldObject], list[FormatError]]:
    """Returns data objects by key, and an error per disagreement between ranks."""
    held: dict[str, _HeldObject] = {}
    contradictions: list[FormatError] = []
    for manifest in manifests:
        for number, record in enumerate(manifest.objects):
            each = held.setdefault(record.key, _HeldObject(record))
            if each.record.is_like(record):
                each.parts.append((manifest, number))
            else:
                detail = "ranks disagree about its size or header"
                contradictions.append(FormatError(key=record.key, detail=detail))
        for entry in manifest.entries:
            if isinstance(entry, TensorEntry | BytesEntry):
                leaves = held[manifest.objects[entry.data.object].key].leaves
                leaves.append((manifest, entry.data))
    return held, contradictions


def _gaps(held: Iterable[_HeldObject]) -> Iterator[FormatError]:
    """Yields an error per compressed object that its chunks do not cover."""
    for each in held:
        if each.record.chunks:
            try:
                check_chunks(each.record.key, each.record.size, each.chunks)
            except FormatError as error:
                yield error


def _damage_in(group: BaseExceptionGroup[Any]) -> list[Any]:
    """Returns the format errors of a group; raises it if there are others."""
    damage, other = group.split(FormatError)
    if damage is None or other is not None:
        raise group
    found: list[Any] = []
    for error in damage.exceptions:
        found += _damage_in(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
