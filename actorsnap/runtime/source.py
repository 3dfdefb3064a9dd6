# SPDX-License-Identifier: Apache-2.0
"""A snapshot that may exist: opens it and caches its index."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio

from actorsnap.actors.abandonable import AbandonableTasks, first_error
from actorsnap.actors.fetcher import FetcherPool
from actorsnap.actors.formats import OpenForeign
from actorsnap.actors.snapshot_reader import SnapshotReader
from actorsnap.errors import ChecksumMismatch, FormatError, SnapshotReplaced, StorageError
from actorsnap.format.manifest import Commit, RankManifest
from actorsnap.log import Log
from actorsnap.options import Options, chunk_within
from actorsnap.planning.index import Index, index_of
from actorsnap.runtime import partial_index
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import Location, OnRetry, open_location
from actorsnap.runtime.partial_index import PartialIndex
from actorsnap.state.records import Rebuild
from actorsnap.storage.base import Storage, for_each
from actorsnap.storage.registry import folder_and_name
from actorsnap.storage.unpacked import UnpackedStorage

T = TypeVar("T")
P = ParamSpec("P")

logger = Log(__name__)

MAX_SMALL_READS = 16
"""Maximum number of concurrent requests for small objects."""

_MAX_TRIES = 3
"""Tries, if the snapshot is replaced meanwhile."""


_SLOW = "the storage is slow or does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A snapshot as its save knows it, without reading.

    Attributes:
        metadata: Empty if unknown: only rank 0 knows it.
        nbytes, keys: Data before compression, headers included, and keys of the app state. 0 and
            empty if other ranks have saved too.
    """

    world_size: int
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class _Cache:
    """The index as last read; shared by copies of a ``Source``.

    Attributes:
        commit, nbytes: As last read, also if no index was.
        contents: Bytes of all ranks by top-level key, of ``commit``.
    """

    commit: Commit | None = None
    nbytes: int | None = None
    contents: Mapping[str, int] | None = None
    index: tuple[Commit, dict[int, RankManifest]] | None = None
    foreign: OpenForeign | None = None
    views: dict[int, Index] = field(default_factory=dict)
    begun: PartialIndex | None = None


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An opened ``Source``, for one operation.

    Attributes:
        errands: Runs work that does not write to the caller's memory: only errands can be abandoned
            if the storage hangs.
    """

    host: Host
    source: Source
    reader: SnapshotReader
    errands: AbandonableTasks

    @property
    def storage(self) -> Storage:
        """Storage of the data: the reader changes it for a file of another format."""
        return self.reader.storage

    def fetcher(self, **changes: Any) -> FetcherPool:
        options, budget = self.source.options, self.host.resources.budget
        pool = FetcherPool(
            self.storage,
            run_blocking=self.host.run_blocking,
            budget=budget,
            verify=options.verify,
            chunk_bytes=chunk_within(options.chunk_bytes, budget.limit_bytes),
            max_gap_bytes=options.max_gap_bytes,
            num_fetchers=options.num_uploaders,
        )
        return replace(pool, **changes)


class Source:
    """Place, options and cached index of a snapshot that may exist.

    Args:
        written: The snapshot just saved, for the handle that a save returns.
    """

    def __init__(
        self, location: Location, options: Options, written: Written | None = None
    ) -> None:
        self.written = written
        self.location = location
        self.options = options
        self._cache = _Cache()
        self._is_one_call = False
        self._deadline_s: float | None = None

    def for_one_call(self) -> Source:
        """Returns a copy whose operations share one ``timeout_s``."""
        if self._is_one_call:
            return self
        source = copy(self)
        source._is_one_call = True
        return source

    @property
    def seen(self) -> tuple[Commit | None, int | None]:
        """The commit object and the size as last read; maybe outdated."""
        return self._cache.commit, self._cache.nbytes

    @property
    def seen_contents(self) -> Mapping[str, int] | None:
        """Bytes by top-level key, of the commit object in ``seen``; None if they were not read."""
        return self._cache.contents

    def note(
        self, commit: Commit, nbytes: int | None = None, contents: Mapping[str, int] | None = None
    ) -> None:
        """Caches the values for ``seen`` and ``seen_contents``."""
        cache = self._cache
        if cache.commit != commit:
            cache.commit, cache.nbytes, cache.contents = commit, None, None
        if nbytes is not None:
            cache.nbytes = nbytes
        if contents is not None:
            cache.contents = contents

    def below(self, name: str) -> Source:
        """Returns the place of a folder at this one."""
        location = self.location
        urls = [f"{url.rstrip('/')}/{name}" for url in (location.url, location.display_url)]
        return Source(replace(location, url=urls[0], display_url=urls[1]), self.options)

    def _begin(self) -> float:
        """Returns the deadline of a new operation."""
        deadline_s = self._deadline_s
        if deadline_s is None:
            deadline_s = anyio.current_time() + self.options.timeout_s
            if self._is_one_call:
                self._deadline_s = deadline_s
        return deadline_s

    @asynccontextmanager
    async def opened(
        self, host: Host, op: str, attempt: str | None = None, on_retry: OnRetry | None = None
    ) -> AsyncIterator[OpenSource]:
        """Opens the storage for one operation within ``timeout_s``, which those of a call share.

        Args:
            op: For messages.
            attempt: To read, if the commit object was read before.
            on_retry: See ``StorageContext``.

        Raises:
            SnapshotReplaced: instead of ``ChecksumMismatch`` if the snapshot was replaced or
                deleted meanwhile.
            NotASnapshot: instead of ``StorageError`` if the URL is a file.
            StorageError: timed out; quotes the last retried error.
        """
        host.resources.set_budget(self.options.memory_budget_bytes)
        async with _errands(host, f"{op} {self.location.display_url}", on_retry) as errands:
            with anyio.CancelScope(deadline=self._begin()) as scope:
                async with AsyncExitStack() as storages:
                    reader = await self._reader(host, errands, storages, attempt)
                    storages.push_async_callback(_close_unpacked, errands, reader)
                    try:
                        with self.naming():
                            yield OpenSource(host, self, reader, errands)
                        if reader.foreign is not None:
                            self._cache.foreign = reader.foreign
                            # Nothing else shows that files were written while they were read.
                            await errands.run(reader.check_replaced)
                    except Exception as error:
                        if _is_damage(error):
                            await errands.run(reader.check_replaced)
                        if what := await errands.run(reader.explain, error):
                            raise what from first_error(error)
                        raise
        if scope.cancelled_caught:
            raise StorageError(
                op=op,
                key="",
                backend=self.location.display_url,
                detail=f"timeout_s={self.options.timeout_s:g} has passed; "
                f"{errands.trouble or errands.how_far() or _SLOW}. Raise Options.timeout_s for a "
                "slow storage",
                retryable=True,
            )

    async def _reader(
        self,
        host: Host,
        errands: AbandonableTasks,
        storages: AsyncExitStack,
        attempt: str | None,
    ) -> SnapshotReader:
        folder = folder_and_name(self.location.url)

        async def open_folder() -> tuple[Storage, str] | None:
            if folder is None:
                return None
            location = replace(self.location, url=folder[0])
            return await storages.enter_async_context(
                opened_storage(host, location, errands)
            ), folder[1]

        known = self._cache.foreign
        opened = None
        if known is not None and known.file and known.commit.attempt == attempt:
            opened = await open_folder()
        storage = (
            await storages.enter_async_context(self._open(host, errands))
            if opened is None
            else opened[0]
        )
        return SnapshotReader(
            storage,
            errands.run_blocking,
            attempt,
            open_folder,
            known,
            self.options.allow_pickle,
        )

    def _open(self, host: Host, errands: AbandonableTasks) -> AbstractAsyncContextManager[Storage]:
        return opened_storage(host, self.location, errands)

    def perform(
        self, op: str, work: Callable[[OpenSource], Awaitable[T]], attempt: str | None = None
    ) -> Script[T]:
        """Runs ``work`` as an errand of one operation; see ``opened``."""

        async def step(host: Host) -> T:
            async with self.opened(host, op, attempt) as opened:
                return await opened.errands.run(work, opened)

        result: T = yield step
        return result

    def rebuild(self, *, is_strict: bool) -> Rebuild:
        """Returns how records come back; ``is_strict`` refuses classes that are not allowed."""
        return Rebuild.of(self.options.allowed_types, is_strict=is_strict)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Adds the snapshot's URL to format errors."""
        try:
            yield
        except Exception as error:
            found = first_error(error)
            if isinstance(found, FormatError):
                found.name_snapshot(self.location.display_url)
            raise

    async def index(self, reader: SnapshotReader) -> tuple[Commit, dict[int, RankManifest]]:
        """Reads the commit object and all rank manifests, which are cached."""
        return await self._index(reader, await reader.commit())

    async def begin_index(
        self, opened: OpenSource, rank: int, num_ranks: int
    ) -> PartialIndex | Index:
        """Reads the commit object, and what a rank needs before it knows what it wants.

        Returns:
            Index: The snapshot is of few ranks: all of it.
        """
        reader, run_blocking = opened.reader, opened.errands.run_blocking
        commit = await reader.commit()
        self.note(commit)
        if rank == 0:
            await reader.warn_of_newer_dcp(commit)
        if commit.world_size <= partial_index.FEW_RANKS:
            _, manifests = await self._index(reader, commit)
            if len(manifests) == 1:
                return self.view(manifests, rank)
            return await run_blocking(self.view, manifests, rank)
        cache, begun = self._cache, self._cache.begun
        known = None if begun is None else (begun.commit, begun.rank, begun.num_ranks)
        if known != (commit, rank, num_ranks):
            cache.begun = await PartialIndex.begin(reader, run_blocking, commit, rank, num_ranks)
        assert cache.begun is not None
        return cache.begun

    async def _index(
        self, reader: SnapshotReader, commit: Commit
    ) -> tuple[Commit, dict[int, RankManifest]]:
        cache = self._cache
        if cache.index is None or cache.index[0] != commit:
            manifests: dict[int, RankManifest] = {}

            async def read(rank: int) -> None:
                manifests[rank] = await reader.manifest(commit, rank)

            await for_each(range(commit.world_size), read, at_once=MAX_SMALL_READS)
            cache.index = commit, dict(sorted(manifests.items()))
            cache.views = {}
        return cache.index

    def view(self, manifests: dict[int, RankManifest], rank: int) -> Index:
        """Returns the index as ``rank`` sees it; cached."""
        views = self._cache.views
        found = views.get(rank)
        if found is None:
            found = views[rank] = index_of(manifests, rank=rank)
        return found


@asynccontextmanager
async def opened_storage(
    host: Host, location: Location, errands: AbandonableTasks, *, scratch: str = ""
) -> AsyncIterator[Storage]:
    """Opens a storage whose calls are errands; see ``open_location``."""
    storage = await open_location(
        host,
        location,
        fsync=True,
        run_blocking=errands.run_blocking,
        scratch=scratch,
        on_retry=errands.note_retry,
    )
    try:
        yield storage
    finally:
        await errands.close(storage.aclose)


@asynccontextmanager
async def _errands(
    host: Host, label: str, on_retry: OnRetry | None
) -> AsyncIterator[AbandonableTasks]:
    """Provides errands in a separate call, which ends with the last errand."""
    tasks = anyio.create_task_group()
    begun, over = anyio.Event(), anyio.Event()

    async def keep() -> None:
        async with tasks:
            begun.set()
            with anyio.CancelScope(shield=True):
                await over.wait()

    host.submit(keep())
    try:
        await begun.wait()
        yield AbandonableTasks(
            # In the uploader process a copy is bulk work.
            tasks,
            run_blocking=host.run_cpu,
            label=label,
            on_retry=on_retry,
        )
    finally:
        over.set()


async def _close_unpacked(errands: AbandonableTasks, reader: SnapshotReader) -> None:
    """Deletes the temporary files over the storage of a checkpoint of another format."""
    if isinstance(reader.storage, UnpackedStorage):
        await errands.close(reader.storage.aclose)


def _is_damage(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(ChecksumMismatch) is not None
    return isinstance(error, ChecksumMismatch)


def begins_anew(
    script: Callable[Concatenate[Source, P], Script[T]],
) -> Callable[Concatenate[Source, P], Script[T]]:
    """Starts a reading call again if the snapshot is replaced.

    All tries share one ``timeout_s``. Format errors name the snapshot.
    """

    @functools.wraps(script)
    def wrapped(source: Source, /, *args: P.args, **kwargs: P.kwargs) -> Script[T]:
        source = source.for_one_call()
        with source.naming():
            for _ in range(_MAX_TRIES - 1):
                try:
                    return (yield from script(source, *args, **kwargs))
                except SnapshotReplaced as error:
                    if error.is_deleted:
                        raise
                    logger.info("%s Reading the new one", error)
            return (yield from script(source, *args, **kwargs))

    return wrapped
