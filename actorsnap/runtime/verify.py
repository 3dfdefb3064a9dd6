# SPDX-License-Identifier: Apache-2.0
"""Verifies a snapshot: ``quick`` without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

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
    ObjectRecord,
    RankManifest,
    Stored,
    TensorEntry,
)
from actorsnap.planning.survey import (
    Batch,
    Holdings,
    Survey,
    SurveyedObject,
    holdings_of,
    reduced,
)
from actorsnap.runtime.host import Script
from actorsnap.runtime.manifests import ManifestStream, OwnerCheck, index_progress
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source, begins_anew
from actorsnap.state.sources import HostMemory
from actorsnap.storage.base import for_each

if TYPE_CHECKING:
    from actorsnap.state.restore.verification import Doubtful, EntryCheck


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verification.

    Attributes:
        level: ``quick`` checks the index, and the existence and sizes of objects. ``full`` checks
            every byte, and whether each rank can restore its entries.
        num_objects: Data objects checked.
        nbytes: Bytes read, and compared with checksums if there are any. 0 if ``quick``.
        has_checksums: False for a checkpoint in another format, which has nothing to compare with:
            ``quick`` checks that all bytes are there, ``full`` also reads them.
        problems: One error for each damaged or missing object, and for each entry that cannot be
            restored.
    """

    level: str
    num_objects: int
    nbytes: int
    has_checksums: bool = True
    problems: tuple[ActorSnapError, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __repr__(self) -> str:
        fields = [f"{name}={getattr(self, name)!r}" for name in ("ok", *self.__struct_fields__)]
        return f"VerifyReport({', '.join(fields)})"


@dataclass(eq=False, repr=False)
class _NullSink:
    """Only counts bytes."""

    is_addressable = False
    pinner = None
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
        if level == "full":
            await opened.errands.run_blocking(load_entry_check)
        problems: list[ActorSnapError] = []

        ranks = range(commit.world_size)
        stream = ManifestStream(reader, commit.attempt, commit, ranks, problems.append)
        check = DataCheck(opened, level=level, progress=progress)
        try:
            owners = await OwnerCheck.begin(reader, commit)
        except FormatError as error:
            owners = OwnerCheck(commit.attempt, None, None, [error])

        def take(manifest: RankManifest) -> None:
            holdings = holdings_of(manifest)
            check.add(manifest, holdings)
            owners.add(manifest, holdings)

        await stream.each(take, on_record=index_progress(commit.world_size, progress))
        problems += await check.run(stream, is_complete=not problems)
        problems += owners.problems
        if problems:
            await reader.check_replaced()
        return VerifyReport(
            level=level,
            num_objects=check.num_objects,
            nbytes=check.nbytes if reader.foreign is None else check.done_bytes,
            has_checksums=reader.foreign is None,
            problems=tuple(problems),
        )

    return (yield from source.perform("verify", perform))


def load_entry_check() -> type[EntryCheck]:
    """Imports torch: blocks for seconds the first time."""
    from actorsnap.state.restore.verification import EntryCheck

    return EntryCheck


@dataclass(eq=False, repr=False)
class DataCheck:
    """Compares stored data with rank manifests: ``add`` gets each of them, in order, then ``run``.

    Args:
        level, progress: See ``verify``.

    Attributes:
        num_objects: Data objects checked.
        nbytes: Bytes of intact objects; 0 if ``quick``.
        done_bytes: Bytes of leaves that were read so far.
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
        self._survey = Survey()
        self._entries = load_entry_check()() if self.level == "full" else None
        self._held: dict[str, _HeldObject] = {}
        self._listed: set[str] = set()
        self._lock = threading.Lock()
        self.done_bytes = self._total_bytes = 0
        self.num_objects = 0
        self.nbytes = 0

    def add(self, manifest: RankManifest, holdings: Holdings | None = None) -> None:
        """Blocks; for worker threads. ``holdings`` are those of the manifest, if known."""
        self._survey.add(manifest, holdings)
        if self._entries is not None:
            self._entries.add(manifest)

    async def run(self, stream: ManifestStream, *, is_complete: bool) -> list[ActorSnapError]:
        """Returns the problems of ``VerifyReport``.

        Args:
            is_complete: No manifest is missing. Otherwise only objects are checked.

        Raises:
            UnsupportedFormat: A package for the data is not installed.
            StorageError: Reading failed.
        """
        survey = self._survey
        problems: list[ActorSnapError] = [*survey.contradictions]
        if is_complete:
            problems += await self._run_blocking(lambda: [*survey.holes()])
        self._total_bytes = survey.leaf_bytes
        if self.level == "full":  # otherwise no data is read
            await self._run_blocking(self._count, 0)
        await self._list_sizes()
        num_checked = 0

        async def check(key: str) -> None:
            nonlocal num_checked
            try:
                with missing_is_damage(key):
                    await self._check(key)
                num_checked += 1
            except UnsupportedFormat:
                raise  # neither intact nor damaged
            except FormatError as error:
                problems.append(error)
            except BaseExceptionGroup as group:
                problems.append(_damage_in(group)[0])

        # The pool limits concurrent reads.
        parallel_objects = self.opened.storage.capabilities.preferred_parallel_objects
        at_once = parallel_objects if self.level == "full" else MAX_SMALL_READS
        for batch in survey.batches():
            if self.level == "full":
                await self._read_leaves(stream, batch)
            await for_each(batch.keys, check, at_once=at_once)
            self._held = {}
        self.num_objects = len(survey.objects)
        done, total = self.done_bytes, self._total_bytes
        if not problems and (
            num_checked != self.num_objects or (self.level == "full" and done < total)
        ):
            raise StorageError(
                op="verify",
                key="",
                backend=self.opened.source.location.display_url,
                detail=f"only {num_checked} of {self.num_objects} objects and {done} of "
                f"{total} bytes were compared, and nothing failed",
            )
        if self._entries is not None and is_complete:
            await self._check_entries(self._entries, stream, problems)
        return problems

    async def _check_entries(
        self, entries: EntryCheck, stream: ManifestStream, problems: list[ActorSnapError]
    ) -> None:
        await self._run_blocking(entries.try_common)
        await stream.each(entries.try_rank)
        known = {getattr(problem, "key", "") for problem in problems}
        problems += [e for e in entries.found.problems.values() if e.key not in known]

        async def build(leaf: Doubtful) -> None:
            problems.extend(await self._build(leaf))

        await for_each(entries.found.doubtful.values(), build, at_once=1)

    async def _read_leaves(self, stream: ManifestStream, batch: Batch) -> None:
        """Finds what the manifests have in the objects of a batch."""
        keys = frozenset(batch.keys)
        parts: list[RankManifest] = []
        await stream.each(lambda m: parts.append(reduced(m, keys)), batch.ranks)
        held = await self._run_blocking(_objects_in, parts)
        self._held = {key: held[key] for key in batch.keys if key in held}

    def _count(self, nbytes: int) -> None:
        """Adds up worker threads' bytes for the caller's ``progress``."""
        with self._lock:
            self.done_bytes += nbytes
            if self.progress is not None:
                self.progress(self.done_bytes, self._total_bytes)

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

    async def _check(self, key: str) -> None:
        record = self._survey.objects[key].record
        await self._check_sizes(self._survey.objects[key])
        if self.level == "full":
            if record.header_bytes:
                await read_intact(self.opened.storage, lambda: self._check_header(record))
            requests = [
                RangeRequest(manifest, at, _NullSink(at.stop - at.start, self._count))
                for manifest, at in self._held[key].leaves
            ]
            await self._pool.fetch(requests)
            self.nbytes += record.size

    async def _list_sizes(self) -> None:
        """Finds the objects that have their sizes: by pages of a list, not a request for each."""
        objects = self._survey.objects
        if not objects:
            return
        current = ""
        left: dict[str, int] = {}  # of the current object
        async for info in self.opened.storage.list(commonprefix([min(objects), max(objects)])):
            key = info.key if info.key in objects else info.key.rpartition("/")[0]
            if key not in objects:
                continue
            if key != current:
                current, left = key, dict(objects[key].stored_objects)
            if left.get(info.key) == info.size:
                del left[info.key]
                if not left:
                    self._listed.add(key)

    async def _check_sizes(self, surveyed: SurveyedObject) -> None:
        key = surveyed.record.key
        if key in self._listed:
            return
        # A list has no links, and may be old: only an answer about the object itself is proof.
        if surveyed.is_compressed:  # many keys
            listed = self.opened.storage.list(f"{key}/")
            found = {info.key: info.size async for info in listed}
        else:
            found = {key: (await self.opened.storage.stat(key)).size}
        for stored, size in surveyed.stored_objects:
            if stored not in found:
                raise ChecksumMismatch(key=stored, detail="the object is missing")
            if found[stored] != size:
                raise ChecksumMismatch(
                    key=stored, detail=f"has {found[stored]} bytes, was written with {size}"
                )

    async def _check_header(self, record: ObjectRecord) -> None:
        header = await self._read_header(record)
        if crc32c(header) != record.header_crc32c:
            raise ChecksumMismatch(key=record.key, detail="the safetensors header differs")

    async def _read_header(self, record: ObjectRecord) -> bytes:
        if not self._survey.objects[record.key].is_compressed:
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

    def opener(self) -> tuple[RankManifest, int]:
        """Returns the manifest and number with a compressed object's header.

        Raises:
            FormatError: no chunk begins at 0.
        """
        for manifest, number in self.parts:
            if manifest.objects[number].chunks[0].start == 0:
                return manifest, number
        raise FormatError(key=self.record.key, detail="no chunk begins at 0")


def _objects_in(manifests: Sequence[RankManifest]) -> dict[str, _HeldObject]:
    held: dict[str, _HeldObject] = {}
    for manifest in manifests:
        for number, record in enumerate(manifest.objects):
            each = held.setdefault(record.key, _HeldObject(record))
            if each.record.is_like(record):
                each.parts.append((manifest, number))
        for entry in manifest.entries:
            if isinstance(entry, TensorEntry | BytesEntry):
                leaves = held[manifest.objects[entry.data.object].key].leaves
                leaves.append((manifest, entry.data))
    return held


def _damage_in(group: BaseExceptionGroup[Any]) -> list[Any]:
    """Returns the format errors of a group; raises it if there are others."""
    damage, other = group.split(FormatError)
    if damage is None or other is not None:
        raise group
    found: list[Any] = []
    for error in damage.exceptions:
        found += _damage_in(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
