"""The bodies of the calls that check, list and delete snapshots, as scripts (see
``runtime.taking``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from actorsnap.actors.reader import Request, SnapshotReader, find_commit
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
from actorsnap.format.layout import attempt_of
from actorsnap.format.manifest import (
    COMMIT_KEY,
    BytesEntry,
    Commit,
    ObjectRecord,
    RankManifest,
    Stored,
    TensorEntry,
    decode_commit,
)
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.place import (
    Source,
    collect_garbage,
    find_attempts,
)
from actorsnap.runtime.reading import begins_anew
from actorsnap.storage.base import RunBlocking, Storage

__all__ = [
    "VerifyReport",
    "collect",
    "delete",
    "find_snapshots",
    "verify",
]

logger = logging.getLogger(__name__)


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
                attempt = None
                try:
                    attempt = (await reader.commit()).attempt
                except (NotASnapshot, UnsupportedFormat):
                    raise
                except FormatError:
                    logger.info("%s: deleting a damaged snapshot", source.place.url, exc_info=True)
                await storage.delete([COMMIT_KEY])
                # Not what another take is writing: it would commit a ruin.
                await collect_garbage(host, storage, superseded=attempt)

            await errands.run(perform)

    yield step


def collect(source: Source, *, force: bool) -> Script[tuple[list[str], list[str]]]:
    """Deletes garbage at the URL; with ``force`` also attempts that may be running.

    Returns:
        The keys deleted, and the unfinished attempts that were left.
    """

    async def step(host: Host) -> tuple[list[str], list[str]]:
        async with source.opened(host, "collect") as (storage, _, errands):

            async def perform() -> tuple[list[str], list[str]]:
                deleted = await collect_garbage(host, storage, force=force)
                left = set(await find_attempts(storage))
                with contextlib.suppress(ChecksumMismatch):  # which is its own cannot be told
                    commit = await find_commit(storage)
                    if commit is not None:
                        left.discard(commit.attempt)
                return deleted, sorted(left)

            return await errands.run(perform)

    found: tuple[list[str], list[str]] = yield step
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
        num_objects = done = 0
        total = 0
        meter = _Meter(progress)
        # Several ranks may have written one object.
        work: dict[str, tuple[ObjectRecord, list[tuple[RankManifest, Stored]]]] = {}
        for named in commit.manifests:
            try:
                manifest = await reader.manifest(named)
            except FormatError as error:
                problems.append(error)
                continue
            for record in manifest.objects:
                if work.setdefault(record.key, (record, []))[0] != record:
                    detail = "ranks disagree about its size or header"
                    problems.append(FormatError(key=record.key, detail=detail))
            for entry in manifest.entries:
                if isinstance(entry, TensorEntry | BytesEntry):
                    at = entry.data
                    work[manifest.objects[at.object].key][1].append((manifest, at))
                    total += at.stop - at.start
        await run_blocking(meter.begin, total)
        for record, held in work.values():
            num_objects += 1
            try:
                info = await storage.stat(record.key)
                if info.size != record.size:
                    raise ChecksumMismatch(
                        key=record.key,
                        detail=f"has {info.size} bytes, was written with {record.size}",
                    )
                if level == "full":
                    header = await storage.get(record.key, 0, record.header_bytes)
                    if crc32c(header) != record.header_crc32c:
                        raise ChecksumMismatch(
                            key=record.key, detail="the safetensors header differs"
                        )
                    pool = source.fetcher(host, storage, verify=True, run_blocking=run_blocking)
                    requests = [
                        Request(manifest, at, _NullSink(at.stop - at.start, meter.add))
                        for manifest, at in held
                    ]
                    await pool.fetch(requests)
                    done += record.size
            except ObjectNotFound as error:
                missing = ChecksumMismatch(key=record.key, detail="the object is missing")
                missing.__cause__ = error
                problems.append(missing)
            except FormatError as error:
                problems.append(error)
            except BaseExceptionGroup as group:
                damage, other = group.split(FormatError)
                if damage is None or other is not None:
                    raise
                problems.append(_leaves(damage)[0])
        if problems:
            await reader.check_replaced()
        return VerifyReport(
            level=level, num_objects=num_objects, nbytes=done, problems=tuple(problems)
        )

    report: VerifyReport = yield step
    return report


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

            async def perform() -> None:
                async for info in storage.list(""):
                    name, _, key = info.key.partition("/")
                    if key == COMMIT_KEY:
                        try:
                            found[name] = decode_commit(await storage.get(info.key))
                        except FormatError as error:
                            found[name] = error
                    elif attempt_of(key) is not None:
                        found.setdefault(name, None)

            await errands.run(perform)
        return found

    found: dict[str, Commit | FormatError | None] = yield step
    return found
