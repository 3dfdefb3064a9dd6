"""Opening a URL with its options, reading its index, and collecting its garbage."""

from __future__ import annotations

import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import anyio

from actorsnap.actors.abandonable import AbandonableTasks, first_error
from actorsnap.actors.fetcher import (
    Commits,
    FetcherPool,
    SnapshotReader,
    is_complete,
    read_commits,
)
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    StorageError,
)
from actorsnap.format.claims import claim_prefix, collection_key, parse_claim
from actorsnap.format.foreign import HEAD_BYTES
from actorsnap.format.layout import Attempt, manifest_prefix
from actorsnap.format.manifest import OLDER_COMMIT_KEY, Commit, ManifestRecord, RankManifest
from actorsnap.log import Log
from actorsnap.options import Options, chunk_within
from actorsnap.planning.garbage import collectable, resumable, unclaimed
from actorsnap.planning.index import Index, index_of
from actorsnap.runtime.host import Host
from actorsnap.runtime.process import host_id
from actorsnap.storage.base import ObjectInfo, RunBlocking, Storage, StorageContext
from actorsnap.storage.foreign_errors import translate_opening
from actorsnap.storage.many import for_each
from actorsnap.storage.registry import (
    canonical,
    find_opener,
    folder_and_name,
    is_ready,
    open_storage,
)

__all__ = [
    "MAX_SMALL_READS",
    "Claims",
    "Collected",
    "Location",
    "Source",
    "collect_garbage",
    "find_attempts",
    "find_claims",
    "find_collectable",
    "find_resumable",
    "open_location",
    "open_ready_location",
]

logger = Log(__name__)

OnRetry: TypeAlias = Callable[[StorageError, float], None]

MAX_SMALL_READS = 16
"""Maximum number of concurrent requests for rank manifests and other small objects."""


_COMPLETE = (
    "%s: no commit object was here, but a complete attempt, which is left alone: %s. Either a save "
    "ended just before its commit, or a copy left the commit object out. To use the attempt, move "
    "its folder to another path and run `actorsnap recover` there. The next take with "
    "overwrite=True deletes it, and so does `actorsnap rm --garbage`"
)

_MAY_RUN = (
    "%s: no commit object was here, but a complete attempt that may still be saved or copied, and "
    "is left alone: %s. If its job has ended, or a copy left the commit object out, move its "
    "folder to another path and run `actorsnap recover --force` there. A later take with "
    "overwrite=True deletes it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The location of a snapshot.

    Attributes:
        display_url: The caller's URL without secrets, for messages.
        at: The full URL, independent of the working folder.
    """

    display_url: str
    url: str = field(repr=False)
    storage_options: dict[str, Any] = field(repr=False)  # may contain secrets

    @property
    def canonical(self) -> str:
        """The URL form in which ranks compare places."""
        return canonical(self.url)


async def open_location(
    host: Host,
    location: Location,
    *,
    fsync: bool,
    run_blocking: RunBlocking | None = None,
    scratch: str = "",
    on_retry: OnRetry | None = None,
) -> Storage:
    """Opens the storage. No I/O; backends are imported on a worker thread.

    Args:
        run_blocking: Runs its blocking calls; None: the host's.
        scratch, on_retry: See ``StorageContext``.

    Raises:
        UsageError: unknown scheme or storage option.
        StorageError: the factory of another package failed.
    """
    context = _context(host, location, fsync, run_blocking or host.run_blocking, scratch, on_retry)
    if is_ready(location.url):
        return translate_opening(location.display_url, lambda: open_storage(location.url, context))
    opener = await host.run_blocking(find_opener, location.url)
    return translate_opening(location.display_url, lambda: opener(context))


def open_ready_location(host: Host, location: Location, *, fsync: bool) -> Storage:
    """``open_location`` for a backend that ``is_ready``."""
    context = _context(host, location, fsync, host.run_blocking)
    return translate_opening(location.display_url, lambda: open_storage(location.url, context))


def _context(
    host: Host,
    location: Location,
    fsync: bool,
    run_blocking: RunBlocking,
    scratch: str = "",
    on_retry: OnRetry | None = None,
) -> StorageContext:
    return StorageContext(
        options=location.storage_options,
        run_blocking=run_blocking,
        run_io=host.run_io,
        durable=fsync,
        on_retry=on_retry,
        scratch=scratch,
    )


@dataclass(slots=True)
class _Known:
    """The index of a snapshot as last read."""

    index: tuple[Commit, dict[int, RankManifest]] | None = None
    views: dict[int, Index] = field(default_factory=dict)


class Source:
    """A snapshot that may exist: its place, the options, and the cached index."""

    def __init__(self, location: Location, options: Options) -> None:
        self.location = location
        self.options = options
        self._known = _Known()
        self._is_one_call = False
        self._deadline_s: float | None = None

    def for_one_call(self) -> Source:
        """Returns a copy for one call, whose operations share one ``timeout_s``."""
        if self._is_one_call:
            return self
        source = copy(self)
        source._is_one_call = True
        return source

    def _begin(self) -> float:
        """Returns the deadline of an operation that starts now."""
        deadline_s = self._deadline_s
        if deadline_s is None:
            deadline_s = anyio.current_time() + self.options.timeout_s
            if self._is_one_call:
                self._deadline_s = deadline_s
        return deadline_s

    @asynccontextmanager
    async def opened(
        self,
        host: Host,
        op: str,
        attempt: str | None = None,
        on_retry: OnRetry | None = None,
    ) -> AsyncIterator[tuple[Storage, SnapshotReader, AbandonableTasks]]:
        """Opens the storage for one operation within ``timeout_s``; those of one call share it.

        Work that does not write to the caller's memory runs as an errand. Only errands can be
        abandoned at the deadline or on cancellation when the storage hangs.

        Args:
            op: The operation, for messages.
            attempt: The attempt to read, if the commit object was read before.
            on_retry: See ``StorageContext``.

        Raises:
            SnapshotReplaced: instead of ``ChecksumMismatch`` if the snapshot was replaced or
                deleted in the meantime.
            NotASnapshot: instead of ``StorageError`` if the URL is a file.
            StorageError: timed out; quotes the last error that was retried.
        """
        host.resources.set_budget(self.options.memory_budget_bytes)
        async with _errands(host, f"{op} {self.location.display_url}", on_retry) as errands:
            with anyio.CancelScope(deadline=self._begin()) as scope:
                run_blocking = errands.run_blocking
                storage = await open_location(
                    host,
                    self.location,
                    fsync=True,
                    run_blocking=run_blocking,
                    on_retry=errands.note_retry,
                )

                async def read_head() -> bytes | None:
                    return await self._read_head(host, run_blocking)

                reader = SnapshotReader(storage, run_blocking, attempt, read_head)
                try:
                    with self.naming():
                        yield storage, reader, errands
                except Exception as error:
                    if _is_damage(error):
                        await errands.run(reader.check_replaced)
                    if what := await errands.run(reader.explain, error):
                        raise what from error
                    raise
                finally:
                    await errands.close(storage.aclose)
        if scope.cancelled_caught:
            raise StorageError(
                op=op,
                key="",
                backend=self.location.display_url,
                detail=f"timeout_s={self.options.timeout_s:g} is over; "
                f"{errands.trouble or 'the storage does not answer'}. Raise Options.timeout_s "
                "for a slow storage",
                retryable=True,
            )

    async def _read_head(self, host: Host, run_blocking: RunBlocking) -> bytes | None:
        """Returns the first bytes of the file or object with this exact URL; None if none."""
        parts = folder_and_name(self.location.url)
        if parts is None:
            return None
        folder, name = parts
        try:
            beside = await open_location(
                host, replace(self.location, url=folder), fsync=False, run_blocking=run_blocking
            )
            try:
                size = (await beside.stat(name)).size
                return await beside.get(name, 0, min(size, HEAD_BYTES))
            finally:
                await beside.aclose()
        except ActorSnapError:
            return None

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Adds the URL of the snapshot to format errors, which name an object or path."""
        try:
            yield
        except Exception as error:
            found = first_error(error)
            if isinstance(found, FormatError):
                found.name_snapshot(self.location.display_url)
            raise

    async def index(self, reader: SnapshotReader) -> tuple[Commit, dict[int, RankManifest]]:
        """Reads the commit object; returns it with all rank manifests, which are cached."""
        commit = await reader.commit()
        known = self._known
        if known.index is None or known.index[0] != commit:
            manifests: dict[int, RankManifest] = {}

            async def read(named: tuple[int, ManifestRecord]) -> None:
                rank, record = named
                manifests[rank] = await reader.manifest(record)

            await for_each(enumerate(commit.manifests), read, at_once=MAX_SMALL_READS)
            known.index = commit, dict(sorted(manifests.items()))
            known.views = {}
        return known.index

    def view(self, manifests: dict[int, RankManifest], rank: int) -> Index:
        """Returns the index as ``rank`` sees it; cached with the index."""
        views = self._known.views
        found = views.get(rank)
        if found is None:
            found = views[rank] = index_of(manifests, rank=rank)
        return found

    def fetcher(self, host: Host, storage: Storage, **changes: Any) -> FetcherPool:
        settings: dict[str, Any] = {
            "run_blocking": host.run_blocking,
            "budget": host.resources.budget,
            "verify": self.options.verify,
            "chunk_bytes": chunk_within(
                self.options.chunk_bytes, host.resources.budget.limit_bytes
            ),
            "max_gap_bytes": self.options.max_gap_bytes,
            "num_fetchers": self.options.num_uploaders,
        }
        return FetcherPool(storage, **(settings | changes))


@asynccontextmanager
async def _errands(
    host: Host, label: str, on_retry: OnRetry | None
) -> AsyncIterator[AbandonableTasks]:
    """Provides errands in a separate call, which ends when the last errand has returned."""
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
            tasks, run_blocking=host.run_blocking, label=label, on_retry=on_retry
        )
    finally:
        over.set()


def _is_damage(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(ChecksumMismatch) is not None
    return isinstance(error, ChecksumMismatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of a garbage collection.

    Attributes:
        keys: The deleted keys.
        kept: Complete attempts that were kept because the place has no commit object or a damaged
            snapshot.
        is_damaged: The snapshot is damaged: its commit object is, or the committed attempt is
            incomplete.
    """

    keys: Sequence[str] = ()
    kept: Sequence[str] = ()
    is_damaged: bool = False


async def collect_garbage(
    host: Host,
    storage: Storage,
    *,
    committed: str | None = None,
    superseded: Collection[str] = (),
    force: bool = False,
    was_vacant: bool | None = None,
    expendable: Collection[str] = (),
) -> Collected:
    """Deletes the objects of attempts that can no longer commit.

    The order matters: an attempt that was dead before the commit object is read cannot commit
    after it. So no deleted object belongs to a snapshot, even if others commit concurrently.

    A complete attempt is kept if the place has no commit object, because the attempt may be a
    snapshot that lost it. It is also kept if the commit object is damaged or names an incomplete
    attempt. It is deleted if this process aborted it or deleted its snapshot.

    Args:
        committed: The attempt that the caller has just committed. An attempt that replaces it has
            a folder before: without another folder there is nothing to do.
        superseded: Attempts that are known to be replaced.
        force: Deletes every other attempt, including those that may be running.
        was_vacant: Whether there was no commit object before the caller's commit; None: use the
            current state. Complete attempts at such a place are named in a warning.
        expendable: Attempts to delete even if complete.

    Raises:
        FormatError: the commit object has a newer or another format; nothing was deleted.
        StorageError: listing, reading or deleting failed.
    """
    attempts = await find_attempts(storage)
    if attempts == [committed] and was_vacant is not False:
        return Collected()
    mine = {committed} if committed is not None else set()
    sweep = _Sweep(
        host,
        storage,
        attempts,
        was_vacant=was_vacant,
        expendable={*expendable, *mine, *host.resources.attempts.discarded(storage.url)},
    )
    if force:
        return await sweep.delete(attempts, NO_CLAIMS)
    garbage = await find_collectable(host, attempts, superseded)
    claims = await find_claims(storage, attempts) if garbage else NO_CLAIMS
    garbage = unclaimed(garbage, claims.copies)
    if claims.copies.keys().isdisjoint(garbage):
        return await sweep.delete(garbage, claims)
    # A copy may resume an interrupted one. A copy claims first and then looks for collections;
    # a collection announces itself first and then looks for claims. So one sees the other.
    async with _announced(host, storage):
        claims = await find_claims(storage, await find_attempts(storage))
        return await sweep.delete(unclaimed(garbage, claims.copies), claims)


@asynccontextmanager
async def _announced(host: Host, storage: Storage) -> AsyncIterator[None]:
    """Announces a collection of copies' leftovers in the storage."""
    collector = host.resources.attempts.new()
    try:
        await storage.put(collection_key(str(collector)), [memoryview(b"{}")])
        yield
        await storage.delete_folder(str(collector))
    finally:
        host.resources.attempts.end(collector)


class _Sweep:
    """The last step of a collection: reads the commit object and deletes garbage."""

    def __init__(
        self,
        host: Host,
        storage: Storage,
        attempts: Sequence[str],
        *,
        was_vacant: bool | None,
        expendable: Collection[str],
    ) -> None:
        self._host = host
        self._storage = storage
        self._attempts = attempts
        self._was_vacant = was_vacant
        self._expendable = expendable

    async def delete(self, garbage: Sequence[str], claims: Claims) -> Collected:
        """Deletes the attempts in ``garbage`` except the committed one and the kept ones."""
        commits = await read_commits(self._storage)
        spared, complete, is_damaged = await self._spare(commits)
        for name in complete:
            spared.update(claims.copies.get(name, ()))  # a resumed copy needs its claim
        doomed = [name for name in garbage if name not in spared]
        older = commits.older
        if older is not None and isinstance(commits.newer, Commit) and not is_damaged:
            # Before the objects that it names.
            await self._storage.delete([OLDER_COMMIT_KEY])
            if isinstance(older, Commit) and older.attempt not in {*spared, *claims.copies}:
                doomed = [name for name in self._attempts if name in {*doomed, older.attempt}]
        keys: list[str] = []
        for name in doomed:
            if commits.newer is commits.older is None:
                # If interrupted, no attempt looks complete.
                keys += await self._storage.delete_folder(manifest_prefix(name).rstrip("/"))
            keys += await self._storage.delete_folder(name)
            self._host.resources.attempts.forget_discarded(self._storage.url, name)
        if keys:
            logger.info("%s: deleted %d objects that were garbage", self._storage.url, len(keys))
        kept = [name for name in complete if name in garbage]
        if self._was_vacant:
            unsure = [name for name in complete if name not in garbage]
            for message, names in ((_COMPLETE, kept), (_MAY_RUN, unsure)):
                if names:
                    logger.warning(message, self._storage.url, ", ".join(names))
        return Collected(keys=keys, kept=kept, is_damaged=is_damaged)

    async def _spare(self, commits: Commits) -> tuple[set[str], list[str], bool]:
        """Returns the attempts to keep, the complete ones among them that are not committed, and
        whether the snapshot is damaged."""
        try:
            commit = commits.counting()
        except ChecksumMismatch:
            # It named one of the complete attempts. Deleting the snapshot also deletes that one.
            complete = await self._complete(self._attempts)
            spared = set(complete)
            if isinstance(commits.older, Commit):
                spared.add(commits.older.attempt)
            return spared, complete, True
        spared = {commit.attempt} if commit is not None else set()
        was_vacant = commit is None if self._was_vacant is None else self._was_vacant
        is_damaged = (
            commit is not None
            and commit.attempt not in self._expendable
            and not await self._complete([commit.attempt])
        )
        if not was_vacant and not is_damaged:
            return spared, [], False
        mine = spared.union(self._expendable)
        found = [name for name in self._attempts if name not in mine and not self._runs(name)]
        complete = await self._complete(found)
        return spared.union(complete), complete, is_damaged

    def _runs(self, name: str) -> bool:
        """Returns whether this process is saving the attempt."""
        attempt = Attempt.parse(name)
        return attempt is not None and self._host.resources.attempts.is_running(attempt)

    async def _complete(self, attempts: Sequence[str]) -> list[str]:
        run_blocking = self._host.run_blocking
        return [name for name in attempts if await is_complete(self._storage, run_blocking, name)]


async def find_attempts(storage: Storage) -> list[str]:
    """Returns the attempts with a folder, also an empty one."""
    return [name for name in await storage.list_folders() if Attempt.parse(name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The claims at a place.

    Attributes:
        copies: Copied attempts, each with the claims on it: the claim object by owner.
        collections: Attempts that announced a collection of copies' leftovers.
    """

    copies: Mapping[str, Mapping[str, ObjectInfo]]
    collections: Sequence[str]


NO_CLAIMS = Claims(copies={}, collections=())


async def find_claims(storage: Storage, attempts: Sequence[str]) -> Claims:
    """Returns the claims in the folders of ``attempts``."""
    copies: dict[str, dict[str, ObjectInfo]] = {}
    collections: list[str] = []
    for owner in attempts:
        async for info in storage.list(claim_prefix(owner)):
            attempt = parse_claim(owner, info.key)
            if attempt:
                copies.setdefault(attempt, {})[owner] = info
            elif attempt is not None:
                collections.append(owner)
    return Claims(copies=copies, collections=collections)


async def find_resumable(host: Host, storage: Storage, committed: str | None) -> tuple[str, ...]:
    """See ``planning.retention.resumable``.

    Raises:
        StorageError: listing failed.
    """
    return tuple(await _find_ended(host, await find_attempts(storage), committed))


async def _find_ended(
    host: Host, attempts: Sequence[str], committed: str | None = None
) -> list[str]:
    def find() -> list[str]:
        return resumable(
            attempts, host=host_id(), may_run=host.resources.attempts.may_run, committed=committed
        )

    return await host.run_blocking(find)


async def find_collectable(
    host: Host, attempts: Iterable[str], superseded: Collection[str] = ()
) -> list[str]:
    """See ``planning.retention.collectable``."""

    def find() -> list[str]:
        return collectable(
            attempts,
            now_s=now_s,
            host=host_id(),
            may_run=host.resources.attempts.may_run,
            superseded=superseded,
        )

    now_s = time.time()
    return await host.run_blocking(find)
