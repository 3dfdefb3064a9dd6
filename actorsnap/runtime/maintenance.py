"""Scripts that verify, list and delete snapshots and collect garbage (see ``runtime.taking``)."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from actorsnap.actors.fetcher import (
    RangeRequest,
    SnapshotReader,
    find_commit,
    is_complete,
    read_commits,
    read_intact,
)
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    ObjectNotFound,
    StorageError,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.checksum import crc32c
from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import (
    COMMIT_KEY,
    OLDER_COMMIT_KEY,
    BytesEntry,
    Commit,
    ManifestRecord,
    ObjectRecord,
    RankManifest,
    Stored,
    StoredChunk,
    TensorEntry,
)
from actorsnap.log import Log
from actorsnap.planning.compressed_ranges import check_chunks
from actorsnap.planning.index import holes
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import (
    MAX_SMALL_READS,
    Source,
    collect_garbage,
    find_attempts,
    find_collectable,
)
from actorsnap.runtime.reading import begins_anew
from actorsnap.state.sources import MemorySink
from actorsnap.state.trial import Doubtful, try_manifests
from actorsnap.storage.base import RunBlocking, Storage
from actorsnap.storage.many import for_each

__all__ = [
    "CollectReport",
    "Leftover",
    "DataCheck",
    "VerifyReport",
    "collect",
    "delete",
    "find_leftovers",
    "find_snapshots",
    "verify",
]

logger = Log(__name__)

_NUMBER = re.compile("([0-9]+)")


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


def delete(source: Source) -> Script[None]:
    """Deletes the commit object first, so that a crash leaves only garbage."""

    async def step(host: Host) -> None:
        async with source.opened(host, "delete") as (storage, reader, errands):

            async def perform() -> None:
                newer = None
                try:
                    newer = await reader.commit()
                except (NotASnapshot, UnsupportedFormat):
                    raise
                except FormatError:
                    logger.info(
                        "%s: deleting a damaged snapshot",
                        source.location.display_url,
                        exc_info=True,
                    )
                older = (await read_commits(storage)).older
                superseded = [each.attempt for each in (newer, older) if isinstance(each, Commit)]
                for attempt in superseded:
                    host.resources.attempts.discard(storage.url, attempt)
                if older is not None:
                    # First, and in a separate request: a crash must not make it the valid one.
                    await storage.delete([OLDER_COMMIT_KEY])
                await storage.delete([COMMIT_KEY])
                # Attempts of a running take are kept: its commit would be damaged.
                await collect_garbage(host, storage, superseded=superseded, was_vacant=False)

            await errands.run(perform)

    yield step


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a place without a commit object.

    Attributes:
        attempt: The name.
        nbytes: Total size of its objects.
        created_s: Start time, in seconds since 1970.
        is_complete: Only the commit object is missing.
        is_garbage: It can no longer commit.
    """

    attempt: str
    nbytes: int
    created_s: int
    is_complete: bool
    is_garbage: bool


def find_leftovers(source: Source) -> Script[list[Leftover]]:
    """Returns the attempts at a place without a commit object, oldest first; otherwise nothing."""

    async def step(host: Host) -> list[Leftover]:
        async with source.opened(host, "list") as (storage, _, errands):

            async def perform() -> list[Leftover]:
                with contextlib.suppress(ChecksumMismatch):
                    if await find_commit(storage) is None:
                        attempts = await find_attempts(storage)
                        garbage = await find_collectable(host, attempts)
                        return [await describe(name, name in garbage) for name in attempts]
                return []

            async def describe(name: str, is_garbage: bool) -> Leftover:
                attempt = Attempt.parse(name)
                assert attempt is not None
                return Leftover(
                    attempt=name,
                    nbytes=sum([info.size async for info in storage.list(f"{name}/")]),
                    created_s=attempt.created_s,
                    is_complete=await is_complete(storage, errands.run_blocking, name),
                    is_garbage=is_garbage,
                )

            return await errands.run(perform)

    found: list[Leftover] = yield step
    return found


class CollectReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a garbage collection.

    Attributes:
        deleted: The deleted keys.
        kept: Complete attempts that were kept because there is no commit object or the snapshot is
            damaged.
        left: Other unfinished attempts that still exist.
        is_damaged: The snapshot is damaged: its commit object is, or the committed attempt is
            incomplete.
    """

    deleted: list[str]
    kept: list[str]
    left: list[str]
    is_damaged: bool


def collect(
    source: Source, *, force: bool, expendable: Collection[str] = ()
) -> Script[CollectReport]:
    """Deletes garbage at the URL; with ``force`` also attempts that may be running.

    Complete attempts are kept if there is no commit object or the snapshot is damaged, except
    ``expendable`` ones.
    """

    async def step(host: Host) -> CollectReport:
        async with source.opened(host, "collect") as (storage, _, errands):

            async def perform() -> CollectReport:
                collected = await collect_garbage(host, storage, force=force, expendable=expendable)
                left = {*await find_attempts(storage)} - {*collected.kept}
                with contextlib.suppress(ChecksumMismatch):  # the committed attempt is unknown
                    commit = await find_commit(storage)
                    if commit is not None:
                        left.discard(commit.attempt)
                return CollectReport(
                    deleted=[*collected.keys],
                    kept=[*collected.kept],
                    left=sorted(left),
                    is_damaged=collected.is_damaged,
                )

            return await errands.run(perform)

    found: CollectReport = yield step
    return found


class _NullSink:
    """A sink that only counts bytes, for verification."""

    is_addressable = False

    def __init__(self, nbytes: int, count: Callable[[int], None]) -> None:
        self.nbytes = nbytes
        self._count = count

    def view(self, start: int, stop: int) -> memoryview:
        raise AssertionError("not addressable")

    def copy_from(self, start: int, data: memoryview) -> None:
        self._count(len(data))


class _Meter:
    """Adds up the work of worker threads and reports it to the caller's ``progress``.

    Attributes:
        done, total: Bytes compared so far, and to compare in total.
    """

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self.done = self.total = 0

    def begin(self, total: int) -> None:
        self.total = total
        self.add(0)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self.total)


@begins_anew
def verify(
    source: Source, *, level: str, progress: Callable[[int, int], None] | None = None
) -> Script[VerifyReport]:
    """Checks a snapshot. ``progress`` gets bytes done and bytes in total, on any thread."""
    if level not in ("quick", "full"):
        raise UsageError(f'level must be "quick" or "full", not {level!r}')

    async def step(host: Host) -> VerifyReport:
        async with source.opened(host, "verify") as (storage, reader, errands):
            return await errands.run(perform, host, storage, reader, errands.run_blocking)

    async def perform(
        host: Host, storage: Storage, reader: SnapshotReader, run_blocking: RunBlocking
    ) -> VerifyReport:
        commit = await reader.commit()
        problems: list[ActorSnapError] = []
        manifests: dict[str, RankManifest] = {}

        async def read(record: ManifestRecord) -> None:
            try:
                manifests[record.key] = await reader.manifest(record)
            except FormatError as error:
                problems.append(error)

        await for_each(commit.manifests, read, at_once=MAX_SMALL_READS)
        check = DataCheck(source, host, storage, run_blocking, level=level, progress=progress)
        problems += await check.run(
            [manifests[r.key] for r in commit.manifests if r.key in manifests],
            is_complete=len(manifests) == len(commit.manifests),
        )
        if problems:
            await reader.check_replaced()
        return VerifyReport(
            level=level,
            num_objects=check.num_objects,
            nbytes=check.nbytes,
            problems=tuple(problems),
        )

    report: VerifyReport = yield step
    return report


class DataCheck:
    """Compares stored data with rank manifests.

    Args:
        storage: Open; the caller closes it.
        level: ``quick`` or ``full``; see ``VerifyReport``.
        progress: Gets bytes done and bytes in total, on any thread.

    Attributes:
        num_objects: Data objects checked.
        nbytes: Bytes of intact objects; 0 if ``quick``.
    """

    def __init__(
        self,
        source: Source,
        host: Host,
        storage: Storage,
        run_blocking: RunBlocking,
        *,
        level: str,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._url = source.location.display_url
        self._storage = storage
        self._run_blocking = run_blocking
        self._level = level
        self._meter = _Meter(progress)
        self._pool = source.fetcher(host, storage, verify=True, run_blocking=run_blocking)
        self._unverified = source.fetcher(host, storage, verify=False, run_blocking=run_blocking)
        self._held: dict[str, _Held] = {}
        self.num_objects = 0
        self.nbytes = 0

    async def run(
        self, manifests: Sequence[RankManifest], *, is_complete: bool
    ) -> list[ActorSnapError]:
        """Returns an error per damaged or missing object, and per entry that cannot be restored.

        Args:
            manifests: In rank order.
            is_complete: Whether these are all manifests; otherwise only objects are checked.

        Raises:
            UnsupportedFormat: The package that reads the data is not installed.
            StorageError: Reading failed.
        """
        problems: list[ActorSnapError] = []
        self._held, contradictions = await self._run_blocking(_stored_in, manifests)
        problems += contradictions
        held = self._held.values()
        if is_complete:
            problems += await self._run_blocking(lambda: [*holes(manifests), *_gaps(held)])
        total = sum(at.stop - at.start for each in held for _, at in each.leaves)
        await self._run_blocking(self._meter.begin, total)
        num_checked = 0

        async def check(record: ObjectRecord) -> None:
            nonlocal num_checked
            try:
                await self._check(record)
                num_checked += 1
            except ObjectNotFound as error:
                missing = ChecksumMismatch(key=error.key, detail="the object is missing")
                missing.__cause__ = error
                problems.append(missing)
            except UnsupportedFormat:
                raise  # neither intact nor damaged: the check is impossible
            except FormatError as error:
                problems.append(error)
            except BaseExceptionGroup as group:
                damage, other = group.split(FormatError)
                if damage is None or other is not None:
                    raise
                problems.append(_leaves(damage)[0])

        records = [each.record for each in held]
        # The pool itself limits concurrent reads.
        parallel_objects = self._storage.capabilities.preferred_parallel_objects
        at_once = parallel_objects if self._level == "full" else MAX_SMALL_READS
        await for_each(records, check, at_once=at_once)
        self.num_objects = len(records)
        meter = self._meter
        if not problems and (
            num_checked != len(records) or (self._level == "full" and meter.done < meter.total)
        ):
            raise StorageError(
                op="verify",
                key="",
                backend=self._url,
                detail=f"only {num_checked} of {len(records)} objects and {meter.done} of "
                f"{meter.total} bytes were compared, and nothing failed",
            )
        if self._level == "full" and is_complete:
            trial = await self._run_blocking(try_manifests, dict(enumerate(manifests)))
            known = {getattr(problem, "key", "") for problem in problems}
            problems += [problem for problem in trial.problems if problem.key not in known]

            async def build(leaf: Doubtful) -> None:
                problems.extend(await self._build(leaf))

            await for_each(trial.doubtful, build, at_once=1)
        return problems

    async def _build(self, leaf: Doubtful) -> list[FormatError]:
        """Returns the reasons why the leaf cannot be built; empty if it can."""
        try:
            part = await self._run_blocking(leaf.restore)
            await self._pool.fetch(
                [RangeRequest(leaf.index, want.stored, want.sink) for want in part.reads]
            )
            await self._run_blocking(part.build)
        except FormatError as error:
            found: list[Any] = [error]
        except BaseExceptionGroup as group:
            damage, other = group.split(FormatError)
            if damage is None or other is not None:
                raise
            found = _leaves(damage)
        else:
            return []
        # Checksum mismatches were reported before, per object.
        return [error for error in found if not isinstance(error, ChecksumMismatch)]

    async def _check(self, record: ObjectRecord) -> None:
        await self._check_sizes(record)
        if self._level == "full":
            await read_intact(self._storage, lambda: self._check_header(record))
            requests = [
                RangeRequest(manifest, at, _NullSink(at.stop - at.start, self._meter.add))
                for manifest, at in self._held[record.key].leaves
            ]
            await self._pool.fetch(requests)
            self.nbytes += record.size

    async def _check_sizes(self, record: ObjectRecord) -> None:
        if record.chunks:  # many keys: one listing
            listed = self._storage.list(f"{record.key}/")
            found = {info.key: info.size async for info in listed}
        else:
            found = {record.key: (await self._storage.stat(record.key)).size}
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
            return await self._storage.get(record.key, 0, record.header_bytes)
        header = np.empty(record.header_bytes, np.uint8)
        sink = MemorySink(header.ctypes.data, len(header), header)
        manifest, number = self._held[record.key].opener()
        at = Stored(number, 0, len(header), ())
        await self._unverified.fetch([RangeRequest(manifest, at, sink)])
        return header.tobytes()


@dataclass(slots=True, eq=False)
class _Held:
    """The records of all ranks about one data object.

    Attributes:
        parts: The manifests that list the object, with its number in each.
        leaves: The leaves stored in it.
    """

    record: ObjectRecord
    parts: list[tuple[RankManifest, int]] = field(default_factory=list)
    leaves: list[tuple[RankManifest, Stored]] = field(default_factory=list)

    @property
    def stored(self) -> dict[str, int]:
        """Keys and sizes of the stored objects."""
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
        """Returns the manifest and number that hold a compressed object's header.

        Raises:
            FormatError: no chunk begins at 0.
        """
        for manifest, number in self.parts:
            if manifest.objects[number].chunks[0].start == 0:
                return manifest, number
        raise FormatError(key=self.record.key, detail="no chunk begins at 0")


def _stored_in(manifests: Sequence[RankManifest]) -> tuple[dict[str, _Held], list[FormatError]]:
    """Returns the data objects by key, and an error per disagreement between ranks."""
    held: dict[str, _Held] = {}
    contradictions: list[FormatError] = []
    for manifest in manifests:
        for number, record in enumerate(manifest.objects):
            each = held.setdefault(record.key, _Held(record))
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


def _gaps(held: Iterable[_Held]) -> Iterator[FormatError]:
    """Yields an error per compressed object whose chunks do not cover it."""
    for each in held:
        if each.record.chunks:
            try:
                check_chunks(each.record.key, each.record.size, each.chunks)
            except FormatError as error:
                yield error


def _leaves(group: BaseExceptionGroup[Any]) -> list[Any]:
    found: list[Any] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found.extend(_leaves(error))
        else:
            found.append(error)
    return found


def find_snapshots(source: Source) -> Script[dict[str, Commit | FormatError | None]]:
    """Finds the snapshots one level below the URL.

    Returns:
        By name: the commit object; the error if it is damaged; None if there are only unfinished
        attempts.
    """

    async def step(host: Host) -> dict[str, Commit | FormatError | None]:
        found: dict[str, Commit | FormatError | None] = {}
        async with source.opened(host, "list") as (storage, _, errands):

            async def look(name: str) -> None:
                try:
                    commit = await find_commit(storage, folder=name)
                except FormatError as error:
                    found[name] = error
                    return
                if commit or any(map(Attempt.parse, await storage.list_folders(name))):
                    found[name] = commit

            async def perform() -> None:
                await for_each(await storage.list_folders(), look, at_once=MAX_SMALL_READS)

            await errands.run(perform)
        return dict(sorted(found.items(), key=lambda item: _natural(item[0])))

    found: dict[str, Commit | FormatError | None] = yield step
    return found


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Returns a sort key that orders the numbers in names by value."""
    # Every second part is a number. Without leading zeros, the longer number is the greater.
    parts = [part.lstrip("0") if n % 2 else part for n, part in enumerate(_NUMBER.split(name))]
    return [(len(part) if n % 2 else 0, part) for n, part in enumerate(parts)], name
