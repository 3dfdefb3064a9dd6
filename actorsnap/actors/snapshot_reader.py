# SPDX-License-Identifier: Apache-2.0
"""Finds the commit object of a snapshot, and reads its rank manifests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from actorsnap.actors.formats import MAX_LISTED, OpenForeign, Place, open_foreign
from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    ObjectNotFound,
    SnapshotReplaced,
    StorageError,
)
from actorsnap.format.foreign import HEAD_BYTES, attempts_in, recognize, recognize_file
from actorsnap.format.layout import manifest_key, manifest_prefix
from actorsnap.format.manifest import (
    COMMIT_KEY,
    COMMIT_KEYS,
    Commit,
    CompositeEntry,
    Entry,
    RankManifest,
    ViewEntry,
    decode_commit,
)
from actorsnap.format.owners import Owners, decode_owners, owners_key
from actorsnap.format.steps import StepName, names_prefix, parse_short_name
from actorsnap.format.tables import (
    PREFIX_BYTES,
    ManifestTable,
    decode_rank_manifest,
    decode_table,
    world_size_of,
)
from actorsnap.log import Log
from actorsnap.storage.base import ObjectInfo, RunBlocking, Storage, for_each

logger = Log(__name__)

T = TypeVar("T")

_DCP_KEY = ".metadata"
_PICKLE = b"\x80"
"""The first byte of a pickle."""

_MAX_ROUNDS = 3
"""A composite tensor, its parts, and the tensors that these view."""


async def find_commit(storage: Storage, *, folder: str = "") -> Commit | None:
    """Returns the commit object, if any.

    Raises:
        FormatError: It is damaged, or of a newer or another format.
    """
    # Again: an older snapshot may be replaced between the two reads.
    for key in (*COMMIT_KEYS, COMMIT_KEY):
        commit = await _read_commit(storage, key, folder)
        if commit is not None:
            return commit
    return None


@dataclass(frozen=True, slots=True)
class Commits:
    """Under ``COMMIT_KEY`` and ``OLDER_COMMIT_KEY``; errors where unusable."""

    newer: Commit | FormatError | None
    older: Commit | FormatError | None

    def valid(self) -> Commit | None:
        """Returns ``newer`` if it exists, else ``older``.

        Raises:
            FormatError: It is unusable.
        """
        commit = self.older if self.newer is None else self.newer
        if isinstance(commit, FormatError):
            raise commit
        return commit


async def read_commits(storage: Storage) -> Commits:
    """Reads both names of the commit object at once: may miss a snapshot that is being replaced."""
    commits: dict[str, Commit | FormatError | None] = {}
    failures: list[Exception] = []

    async def read(key: str) -> None:
        try:
            commits[key] = await _read_commit(storage, key)
        except FormatError as error:
            commits[key] = error
        except Exception as error:
            failures.append(error)

    await for_each(COMMIT_KEYS, read, at_once=len(COMMIT_KEYS))
    if failures:
        raise failures[0]
    return Commits(*[commits[key] for key in COMMIT_KEYS])


async def _read_commit(storage: Storage, key: str, folder: str = "") -> Commit | None:
    async def read() -> Commit:
        return decode_commit(await storage.get(f"{folder}/{key}" if folder else key), key)

    try:
        return await read_intact(storage, read)
    except ObjectNotFound:
        return None


async def is_complete(storage: Storage, run_blocking: RunBlocking, attempt: str) -> bool:
    """Returns whether an attempt lacks only a commit object: every rank has stored its manifest.

    If manifests do not record the world size, rank 0's suffices.
    """
    try:
        data = await storage.get(manifest_key(attempt, 0))
    except ObjectNotFound:
        return False
    world_size = await run_blocking(world_size_of, data)
    if world_size <= 1:
        return True
    keys = {info.key async for info in storage.list(manifest_prefix(attempt))}
    return all(manifest_key(attempt, rank) in keys for rank in range(world_size))


@contextmanager
def missing_is_damage(key: str, what: str = "object") -> Iterator[None]:
    """Raises ``ChecksumMismatch`` for a missing object."""
    try:
        yield
    except ObjectNotFound as error:
        raise ChecksumMismatch(key=error.key or key, detail=f"the {what} is missing") from error


async def read_intact(storage: Storage, read: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of ``read``; over a network, retries once: a bit may flip in transit."""
    if not storage.capabilities.has_blocking_io:
        try:
            return await read()
        except ChecksumMismatch as error:
            logger.warning("%s: %s; reading it again", storage.url, error)
    return await read()


@dataclass(eq=False, repr=False)
class SnapshotReader:
    """Reads the index of a committed snapshot, which may be replaced in the meantime.

    Args:
        open_folder: Opens the storage's folder, if it has one; returns it with the storage's name
            there. For a URL of a file.
        known: What was at this URL before, if that was of another format. With its ``attempt``, the
            storage is already that of its files.

    Attributes:
        storage: Storage of the data; after ``commit``, for a file of another format, its folder.
        foreign: What ``commit`` has found, if that is of another format.

    ``_are_short`` is whether a manifest was shorter than a prefix: the others may be, too.
    """

    storage: Storage
    run_blocking: RunBlocking
    attempt: str | None = None
    open_folder: Callable[[], Awaitable[tuple[Storage, str] | None]] | None = None
    known: OpenForeign | None = None
    allow_pickle: bool = False
    _are_short: bool = False
    _listed: dict[str, ObjectInfo] = field(default_factory=dict)
    _file: tuple[Storage, ObjectInfo, bytes] | None = None

    def __post_init__(self) -> None:
        known = self.known
        is_same = known is not None and known.commit.attempt == self.attempt
        self.foreign = known if is_same else None
        if self.foreign is not None:
            self.storage = self.foreign.over(self.storage, self.run_blocking)

    async def commit(self) -> Commit:
        """Reads the commit object, or its substitute for another format.

        Raises:
            NotASnapshot: No snapshot is there; the message describes the content found instead.
            FormatError: It is damaged, or of a newer format.
        """
        if self.foreign is not None:
            return self.foreign.commit  # ``storage`` may be that of its folder now
        try:
            return await self.own_commit()
        except NotASnapshot as error:
            # Not what a save of ours has left.
            if error.found in ("absent", "foreign", "unknown"):
                self.foreign = await self._open_foreign()
            if self.foreign is None:
                raise
        self.attempt = self.foreign.commit.attempt
        self.storage = self.foreign.over(self.storage, self.run_blocking)
        return self.foreign.commit

    async def own_commit(self) -> Commit:
        """``commit`` without other formats, for callers that change the snapshot."""
        try:
            commit = await find_commit(self.storage)
        except StorageError as error:
            if what := await self.explain(error):
                raise what from None
            raise
        if commit is None:
            raise await self._explain_absence()
        self.attempt = commit.attempt
        return commit

    async def warn_of_newer_dcp(self, commit: Commit) -> None:
        """Logs if torch's own DCP has saved to the folder of a snapshot of a DCP call since."""
        if self.foreign is not None or "dcp" not in commit.metadata:
            return
        with suppress(StorageError, ChecksumMismatch):
            if await self.storage.get(_DCP_KEY, 0, 1) != _PICKLE:  # a marker of ours
                return
            saved_s = [(await self.storage.stat(key)).modified_s for key in (_DCP_KEY, COMMIT_KEY)]
            if saved_s[0] > saved_s[1]:
                logger.warning(
                    "%s: torch's dcp.save has saved here after the snapshot, which is read: load "
                    "the newer checkpoint with torch's dcp.load, and save to a folder of its own",
                    self.storage.url,
                )

    async def explain(self, error: Exception) -> NotASnapshot | None:
        """Returns the error for a file in place of the folder; None for other errors."""
        is_file = (
            error.subgroup(_is_of_a_file) is not None
            if isinstance(error, ExceptionGroup)
            else _is_of_a_file(error)
        )
        return await self._explain_file() if is_file else None

    async def check_replaced(self) -> None:
        """Raises ``SnapshotReplaced`` if an inconsistency is not damage: the commit has changed.

        Files of another format are compared by size and time.
        """
        if self.foreign is not None:
            if await self.foreign.has_changed(self.storage):
                raise SnapshotReplaced(url=self.storage.url, is_deleted=False)
            return
        with suppress(FormatError):  # a damaged one proves nothing
            commit = await find_commit(self.storage)
            if commit is None and self.attempt is None:
                return  # it is damage of another format
            if commit is None or commit.attempt != self.attempt:
                raise SnapshotReplaced(url=self.storage.url, is_deleted=commit is None)

    async def manifest(
        self, commit: Commit, rank: int, wants: Callable[[str], bool] | None = None
    ) -> RankManifest:
        """Reads a rank manifest, or its wanted entries; see ``decode_rank_manifest``.

        Raises:
            FormatError: It is missing or damaged.
        """
        if self.foreign is not None:
            return self.foreign.manifests[rank]
        record = commit.record(rank)

        def decode(data: bytes, key: str) -> RankManifest:
            return decode_rank_manifest(data, key, record, wants)

        return await self.use_manifest(manifest_key(commit.attempt, rank), decode)

    async def entries(
        self, commit: Commit, rank: int, paths: Iterable[str], *, with_containers: bool = False
    ) -> RankManifest:
        """Reads the entries with some paths, and what these consist of, in a few ranges.

        Args:
            with_containers: All containers of the rank, too.

        Raises:
            FormatError: The manifest is missing or damaged.
        """
        wanted = set(paths)
        if self.foreign is not None or commit.record(rank) is not None:  # it has no table
            return await self.manifest(commit, rank)
        key = manifest_key(commit.attempt, rank)

        async def read() -> RankManifest | None:
            prefix = await self._prefix(key)
            table = await self.run_blocking(decode_table, prefix, key)
            if table is None:
                return None
            pages: dict[int, memoryview] = {}
            more = table.container_pages if with_containers else []
            for _ in range(_MAX_ROUNDS):
                new = sorted({*more, *table.pages_of(wanted)} - pages.keys())
                await self._add_pages(pages, table, prefix, new)
                entries = await self.run_blocking(
                    partial(table.entries, wants_containers=with_containers),
                    *(pages, wanted.__contains__),
                )
                parts = wanted.union(*map(_consists_of, entries))
                if parts == wanted:
                    return table.with_entries(entries)
                wanted.update(parts)
            raise FormatError(key=key, detail="a view refers to no tensor entry")

        with missing_is_damage(key, "rank manifest"):
            found = await read_intact(self.storage, read)
        return found or await self.manifest(commit, rank)

    async def _add_pages(
        self, pages: dict[int, memoryview], table: ManifestTable, prefix: bytes, new: Sequence[int]
    ) -> None:
        """Takes rising pages from the prefix, and reads the others."""
        num_within = bisect_right(table.offsets, len(prefix)) - 1
        within = [page for page in new if page < num_within]
        for run in table.runs(within, 0):
            pages.update(table.split(run.start, prefix[slice(*table.span(run))]))
        for run in table.runs(new[len(within) :]):
            data = await self.storage.get(table.key, *table.span(run))
            pages.update(table.split(run.start, data))

    async def _prefix(self, key: str) -> bytes:
        """Returns the beginning of a manifest; all of it, if it or one before was short.

        Nothing names sizes of manifests, and storages refuse a range beyond the end.
        """
        if not self._are_short:
            try:
                return await self.storage.get(key, 0, PREFIX_BYTES)
            except ChecksumMismatch:
                self._are_short = True
        return await self.storage.get(key)

    async def owners(self, commit: Commit) -> tuple[Owners, bytes] | None:
        """Reads the owner index, and its bytes; None if the snapshot has none.

        Raises:
            FormatError: It is missing or damaged.
        """
        if "owners" not in commit.features:
            return None
        key = owners_key(commit.attempt)

        def decode(data: bytes) -> Owners:
            return decode_owners(data, attempt=commit.attempt, world_size=commit.world_size)

        async def read() -> tuple[Owners, bytes]:
            data = await self.storage.get(key)
            return await self.run_blocking(decode, data), data

        with missing_is_damage(key, "owner index"):
            return await read_intact(self.storage, read)

    async def use_manifest(
        self,
        key: str,
        use: Callable[[bytes, str], T],
        run: Callable[[Callable[[], T]], Awaitable[T]] | None = None,
    ) -> T:
        """Reads a rank manifest; returns what ``use`` makes of its bytes and key.

        Over a network, a ``ChecksumMismatch`` of ``use`` leads to a second read and call.

        Args:
            run: Runs the call; None: on a worker thread.

        Raises:
            ChecksumMismatch: The manifest is missing.
        """
        run = run or self.run_blocking

        async def read() -> T:
            data = await self.storage.get(key)
            return await run(partial(use, data, key))

        with missing_is_damage(key, "rank manifest"):
            return await read_intact(self.storage, read)

    async def _open_foreign(self) -> OpenForeign | None:
        """Returns a checkpoint of another format; called after the explanations below."""
        if self._file is None:
            place = Place(self.storage, self.run_blocking, self._listed)
        else:
            self.storage, info, head = self._file
            place = Place(self.storage, self.run_blocking, {info.key: info}, info.key, head)
        place.allow_pickle = self.allow_pickle
        known = self.known
        if known is not None and known.is_still(place):
            return known
        return await open_foreign(place)

    async def _explain_absence(self) -> NotASnapshot:
        self._listed = {}
        async for info in self.storage.list(""):
            self._listed[info.key] = info
            if len(self._listed) >= MAX_LISTED:
                break
        keys = [*self._listed]
        if not keys and (file := await self._explain_file()):
            return file
        url = self.storage.url
        if not keys and (step := await self._find_step()):
            detail = f"no files are there; that step is {url.rstrip('/').rpartition('/')[0]}/{step}"
            return NotASnapshot(key=url, detail=detail, found="absent")
        complete = [
            name
            for name in attempts_in(keys)
            if await is_complete(self.storage, self.run_blocking, name)
        ]
        found, detail = recognize(keys, url=url, complete=complete)
        return NotASnapshot(key=url, detail=detail, found=found)

    async def _find_step(self) -> str | None:
        """Returns the folder of a manager's step that the URL abbreviates (``runs/1/step-350``)."""
        number = parse_short_name(self.storage.url.rstrip("/").rpartition("/")[2])
        opened = None if number is None or self.open_folder is None else await self.open_folder()
        if number is None or opened is None:
            return None
        folder, _ = opened
        found: list[StepName] = []
        with suppress(StorageError):
            async for info in folder.list(names_prefix(number)):
                name, _, rest = info.key.partition("/")
                if rest in COMMIT_KEYS and (step := StepName.parse(name)):
                    found.append(step)
        newest = max(found, key=lambda step: step.generation, default=None)
        return None if newest is None else str(newest)

    async def _explain_file(self) -> NotASnapshot | None:
        opened = None if self.open_folder is None else await self.open_folder()
        if opened is None:
            return None
        folder, name = opened
        try:
            info = await folder.stat(name)
            head = await folder.get(name, 0, min(info.size, HEAD_BYTES))
        except AccessDenied:
            raise
        except ActorSnapError:
            return None
        self._file = folder, info, head
        found, detail = recognize_file(head, self.storage.url)
        return NotASnapshot(key=self.storage.url, detail=detail, found=found)


def _consists_of(entry: Entry) -> list[str]:
    """Returns the paths of the entries that have an entry's bytes."""
    if isinstance(entry, ViewEntry):
        return [entry.of]
    if isinstance(entry, CompositeEntry):
        return [f"{entry.path}@{part}" for part in entry.parts]
    return []


def _is_of_a_file(error: BaseException) -> bool:
    return isinstance(error, StorageError) and isinstance(error.__cause__, NotADirectoryError)
