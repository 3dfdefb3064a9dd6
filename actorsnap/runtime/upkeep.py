"""The bodies of the calls that check, list and delete snapshots, as scripts (see
``runtime.taking``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from actorsnap.actors.reader import (
    Request,
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
from actorsnap.lines import Lines
from actorsnap.planning.chunks import check_chunks
from actorsnap.planning.index import holes
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.place import (
    MAX_SMALL_READS,
    Source,
    collect_garbage,
    find_attempts,
    find_collectable,
)
from actorsnap.runtime.reading import begins_anew
from actorsnap.state.memory import MemorySink
from actorsnap.storage.base import RunBlocking, Storage
from actorsnap.storage.many import for_each

__all__ = [
    "CollectReport",
    "Leftover",
    "VerifyReport",
    "collect",
    "delete",
    "find_leftovers",
    "find_snapshots",
    "verify",
]

logger = Lines(__name__)


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification found.

    Attributes:
        level: ``quick`` (index, existence and sizes) or ``full`` (every byte).
        num_objects: Data objects looked at.
        nbytes: Bytes compared with checksums.
        problems: An error per damaged or missing object.
    """

    level: str
    num_objects: int
    nbytes: int
    problems: tuple[ActorSnapError, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def delete(source: Source) -> Script[None]:
    """The commit object first: what is left behind by a crash is garbage, not a ruin."""

    async def step(host: Host) -> None:
        async with source.opened(host, "delete") as (storage, reader, errands):

            async def perform() -> None:
                newer = None
                try:
                    newer = await reader.commit()
                except (NotASnapshot, UnsupportedFormat):
                    raise
                except FormatError:
                    logger.info("%s: deleting a damaged snapshot", source.place.url, exc_info=True)
                older = (await read_commits(storage)).older
                superseded = [each.attempt for each in (newer, older) if isinstance(each, Commit)]
                for attempt in superseded:
                    host.discard_attempt(attempt)
                if older is not None:
                    # First and by itself: a crash must not make it the one that counts.
                    await storage.delete([OLDER_COMMIT_KEY])
                await storage.delete([COMMIT_KEY])
                # Not what another take is writing: it would commit a ruin.
                await collect_garbage(host, storage, superseded=superseded, was_vacant=False)

            await errands.run(perform)

    yield step


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a place that has no commit object.

    Attributes:
        attempt: Its name.
        nbytes: The size of its objects.
        created_s: When it began, in seconds since 1970.
        is_complete: It lacks nothing but a commit object.
        is_garbage: It can no longer commit.
    """

    attempt: str
    nbytes: int
    created_s: int
    is_complete: bool
    is_garbage: bool


def find_leftovers(source: Source) -> Script[list[Leftover]]:
    """Returns the attempts at a place that has no commit object, the oldest first; else none."""

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
    """What a collection of garbage did.

    Attributes:
        deleted: Keys.
        kept: Complete attempts at a place without commit object, which were not to be deleted.
        left: Other unfinished attempts that are still there.
    """

    deleted: list[str]
    kept: list[str]
    left: list[str]


def collect(
    source: Source, *, force: bool, expendable: Collection[str] = ()
) -> Script[CollectReport]:
    """Deletes garbage at the URL; with ``force`` also attempts that may be running.

    Complete attempts at a place without commit object are kept, unless they are ``expendable``.
    """

    async def step(host: Host) -> CollectReport:
        async with source.opened(host, "collect") as (storage, _, errands):

            async def perform() -> CollectReport:
                collected = await collect_garbage(host, storage, force=force, expendable=expendable)
                left = {*await find_attempts(storage)} - {*collected.kept}
                with contextlib.suppress(ChecksumMismatch):  # which is its own cannot be told
                    commit = await find_commit(storage)
                    if commit is not None:
                        left.discard(commit.attempt)
                return CollectReport(
                    deleted=[*collected.keys], kept=[*collected.kept], left=sorted(left)
                )

            return await errands.run(perform)

    found: CollectReport = yield step
    return found


class _NullSink:
    """Takes bytes and only counts them: for verification."""

    is_addressable = False

    def __init__(self, nbytes: int, count: Callable[[int], None]) -> None:
        self.nbytes = nbytes
        self._count = count

    def view(self, start: int, stop: int) -> memoryview:
        raise AssertionError("not addressable")

    def copy_from(self, start: int, data: memoryview) -> None:
        self._count(len(data))


class _Meter:
    """Adds up what worker threads have done, and reports it to the caller's ``progress``."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        self._total = total
        self.add(0)

    def add(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)


@begins_anew
def verify(
    source: Source, *, level: str, progress: Callable[[int, int], None] | None = None
) -> Script[VerifyReport]:
    """Checks a snapshot; ``progress`` gets bytes compared, and bytes in all, on any thread."""
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
        done = 0
        meter = _Meter(progress)

        async def read(record: ManifestRecord) -> None:
            try:
                manifests[record.key] = await reader.manifest(record)
            except FormatError as error:
                problems.append(error)

        async def check_header(record: ObjectRecord) -> None:
            header = await read_header(record)
            if crc32c(header) != record.header_crc32c:
                raise ChecksumMismatch(key=record.key, detail="the safetensors header differs")

        async def read_header(record: ObjectRecord) -> bytes:
            if not record.chunks:
                return await storage.get(record.key, 0, record.header_bytes)
            header = np.empty(record.header_bytes, np.uint8)
            sink = MemorySink(header.ctypes.data, len(header), header)
            manifest, number = held[record.key].opener()
            at = Stored(number, 0, len(header), ())
            await unverified.fetch([Request(manifest, at, sink)])
            return header.tobytes()

        async def check_sizes(record: ObjectRecord) -> None:
            if record.chunks:  # of which there are many
                found = {info.key: info.size async for info in storage.list(f"{record.key}/")}
            else:
                found = {record.key: (await storage.stat(record.key)).size}
            for key, size in held[record.key].stored.items():
                if key not in found:
                    raise ChecksumMismatch(key=key, detail="the object is missing")
                if found[key] != size:
                    raise ChecksumMismatch(
                        key=key, detail=f"has {found[key]} bytes, was written with {size}"
                    )

        async def check(record: ObjectRecord) -> None:
            nonlocal done
            try:
                await check_sizes(record)
                if level == "full":
                    await read_intact(storage, lambda: check_header(record))
                    requests = [
                        Request(manifest, at, _NullSink(at.stop - at.start, meter.add))
                        for manifest, at in held[record.key].leaves
                    ]
                    await pool.fetch(requests)
                    done += record.size
            except ObjectNotFound as error:
                missing = ChecksumMismatch(key=error.key, detail="the object is missing")
                missing.__cause__ = error
                problems.append(missing)
            except UnsupportedFormat:
                raise  # whether it is damaged, nobody knows
            except FormatError as error:
                problems.append(error)
            except BaseExceptionGroup as group:
                damage, other = group.split(FormatError)
                if damage is None or other is not None:
                    raise
                problems.append(_leaves(damage)[0])

        await for_each(commit.manifests, read, at_once=MAX_SMALL_READS)
        in_order = [manifests[r.key] for r in commit.manifests if r.key in manifests]
        held, contradictions = await run_blocking(_stored_in, in_order)
        problems += contradictions
        records = [each.record for each in held.values()]
        if len(manifests) == len(commit.manifests):
            problems += await run_blocking(lambda: [*holes(in_order), *_gaps(held.values())])
        total = sum(at.stop - at.start for each in held.values() for _, at in each.leaves)
        await run_blocking(meter.begin, total)
        pool = source.fetcher(host, storage, verify=True, run_blocking=run_blocking)
        unverified = source.fetcher(host, storage, verify=False, run_blocking=run_blocking)
        # Of bytes, the pool reads many at a time by itself.
        parallel_objects = storage.capabilities.preferred_parallel_objects
        at_once = parallel_objects if level == "full" else MAX_SMALL_READS
        await for_each(records, check, at_once=at_once)
        if problems:
            await reader.check_replaced()
        return VerifyReport(
            level=level, num_objects=len(records), nbytes=done, problems=tuple(problems)
        )

    report: VerifyReport = yield step
    return report


@dataclass(slots=True, eq=False)
class _Held:
    """What ranks say of one data object.

    Attributes:
        parts: In which manifests it stands, and as which of their objects.
        leaves: What lies in it.
    """

    record: ObjectRecord
    parts: list[tuple[RankManifest, int]] = field(default_factory=list)
    leaves: list[tuple[RankManifest, Stored]] = field(default_factory=list)

    @property
    def stored(self) -> dict[str, int]:
        """Keys and sizes of what is stored of it."""
        return {
            key: size
            for manifest, number in self.parts
            for key, size in manifest.objects[number].stored
        }

    @property
    def chunks(self) -> list[StoredChunk]:
        """Those of all ranks."""
        return [
            chunk for manifest, number in self.parts for chunk in manifest.objects[number].chunks
        ]

    def opener(self) -> tuple[RankManifest, int]:
        """Where the object stands with its header, if it is compressed.

        Raises:
            FormatError: in no chunk.
        """
        for manifest, number in self.parts:
            if manifest.objects[number].chunks[0].start == 0:
                return manifest, number
        raise FormatError(key=self.record.key, detail="no chunk begins at 0")


def _stored_in(manifests: Sequence[RankManifest]) -> tuple[dict[str, _Held], list[FormatError]]:
    """The data objects by key, and where ranks disagree."""
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
    """An error per compressed object that the chunks of all ranks do not make."""
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
    """The snapshots one level below the URL, by name.

    Returns:
        The commit object; what is wrong with it; or None where there are unfinished attempts
        only.
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
        return dict(sorted(found.items()))

    found: dict[str, Commit | FormatError | None] = yield step
    return found
