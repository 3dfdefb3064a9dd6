# SPDX-License-Identifier: Apache-2.0
"""Lists and deletes snapshots; finds attempts and claims, and deletes what can no longer commit.

Implements "Crash windows" of ``docs/format.md``.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from actorsnap.actors.snapshot_reader import Commits, find_commit, is_complete, read_commits
from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    StorageError,
    UnsupportedFormat,
)
from actorsnap.format.layout import (
    Attempt,
    claim_prefix,
    collection_key,
    manifest_prefix,
    parse_claim,
)
from actorsnap.format.manifest import COMMIT_KEY, OLDER_COMMIT_KEY, Commit
from actorsnap.log import Log
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.process import host_id
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source
from actorsnap.storage.base import ObjectInfo, Storage, for_each, size_below
from actorsnap.storage.wire import is_unreachable

logger = Log(__name__)

MAX_ATTEMPT_S = 24 * 3600
"""Longest time from the start of an attempt to its commit, enforced by the coordinator."""

_NUMBER = re.compile("([0-9]+)")

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


def delete(source: Source) -> Script[None]:
    """Deletes the commit object first: a crash leaves only garbage."""

    async def perform(opened: OpenSource) -> None:
        host, storage = opened.host, opened.storage
        newer = None
        try:
            newer = await opened.reader.own_commit()
        except (NotASnapshot, UnsupportedFormat):
            raise
        except FormatError:
            logger.info(
                "%s: deleting a damaged snapshot", source.location.display_url, exc_info=True
            )
        older = (await read_commits(storage)).older
        superseded = [each.attempt for each in (newer, older) if isinstance(each, Commit)]
        for attempt in superseded:
            host.resources.attempts.discard(storage.url, attempt)
        if older is not None:
            # First, in a separate request: a crash must not make it valid.
            await storage.delete([OLDER_COMMIT_KEY])
        await storage.delete([COMMIT_KEY])
        # Attempts of a running take are kept: its commit would be damaged.
        await collect_garbage(host, storage, superseded=superseded, was_vacant=False)

    yield from source.perform("delete", perform)


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a place without a commit object.

    Attributes:
        nbytes: Size of its objects.
        created_s: Since 1970.
        is_complete: Only the commit object is missing.
        is_garbage: It can no longer commit.
    """

    attempt: str
    nbytes: int
    created_s: int
    is_complete: bool
    is_garbage: bool


def find_leftovers(source: Source) -> Script[list[Leftover]]:
    """Returns the attempts, oldest first; none if there is a commit object."""

    async def perform(opened: OpenSource) -> list[Leftover]:
        with contextlib.suppress(ChecksumMismatch):
            if await find_commit(opened.storage) is None:
                attempts = await find_attempts(opened.storage)
                garbage = await find_collectable(opened.host, attempts)
                return [await describe(opened, name, name in garbage) for name in attempts]
        return []

    async def describe(opened: OpenSource, name: str, is_garbage: bool) -> Leftover:
        attempt = Attempt.parse(name)
        assert attempt is not None
        storage, run_blocking = opened.storage, opened.errands.run_blocking
        return Leftover(
            attempt=name,
            nbytes=await size_below(storage, f"{name}/"),
            created_s=attempt.created_s,
            is_complete=await is_complete(storage, run_blocking, name),
            is_garbage=is_garbage,
        )

    return (yield from source.perform("list", perform))


def measure_unused(source: Source) -> Script[tuple[int, int]]:
    """Returns number and bytes of the objects of attempts next to the committed one."""

    async def perform(opened: OpenSource) -> tuple[int, int]:
        commit = await opened.reader.own_commit()
        others = {*await find_attempts(opened.storage)} - {commit.attempt}
        sizes = [i.size for name in others async for i in opened.storage.list(f"{name}/")]
        return len(sizes), sum(sizes)

    return (yield from source.perform("list", perform))


def find_snapshots(
    source: Source, *, failed: dict[str, StorageError] | None = None
) -> Script[dict[str, Commit | FormatError | None]]:
    """Finds the snapshots one level below the URL.

    Args:
        failed: Takes the errors of folders that cannot be read, instead of raising the first.
            Raised nevertheless: the storage cannot be reached.

    Returns:
        By name: the commit object; an error if damaged; None if there are only unfinished attempts.
    """

    async def perform(opened: OpenSource) -> dict[str, Commit | FormatError | None]:
        found: dict[str, Commit | FormatError | None] = {}
        storage = opened.storage

        async def look(name: str) -> None:
            try:
                commit = await find_commit(storage, folder=name)
            except FormatError as error:
                found[name] = error
                return
            if commit or any(map(Attempt.parse, await storage.list_folders(name))):
                found[name] = commit

        async def try_to_look(name: str) -> None:
            try:
                await look(name)
            except StorageError as error:
                if failed is None or is_unreachable(error):
                    raise
                failed[name] = error

        await for_each(await storage.list_folders(), try_to_look, at_once=MAX_SMALL_READS)
        return dict(sorted(found.items(), key=lambda item: natural_order(item[0])))

    return (yield from source.perform("list", perform))


def list_snapshots(source: Source) -> Script[list[Source]]:
    """Returns the committed snapshots one level below the URL. Damaged ones are logged."""
    found = yield from find_snapshots(source)
    sources = []
    for name, commit in found.items():
        if isinstance(commit, Commit):
            sources.append(source.below(name))
            sources[-1].note(commit)
        elif commit is not None:
            logger.warning("%s: left out, because it is damaged: %s", name, commit)
    return sources


def measure_folders(source: Source, names: Iterable[str]) -> Script[dict[str, int]]:
    """Returns the bytes of all objects in each folder. Leaves out what cannot be listed."""

    async def perform(opened: OpenSource) -> dict[str, int]:
        sizes: dict[str, int] = {}

        async def measure(name: str) -> None:
            with contextlib.suppress(StorageError):
                sizes[name] = await size_below(opened.storage, f"{name}/")

        await for_each(names, measure, at_once=MAX_SMALL_READS)
        return sizes

    return (yield from source.perform("list", perform))


def natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Returns a key that sorts numbers in names by value."""
    # Every second part is a number. Without leading zeros, the longer is the greater.
    parts = [part.lstrip("0") if n % 2 else part for n, part in enumerate(_NUMBER.split(name))]
    return [(len(part) if n % 2 else 0, part) for n, part in enumerate(parts)], name


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of a garbage collection.

    Attributes:
        deleted: Keys.
        kept: Complete attempts, kept because there is no commit object or the snapshot is damaged.
        left: Other unfinished attempts; only of ``collect``.
        is_damaged: The commit object is damaged, or the committed attempt incomplete.
    """

    deleted: Sequence[str] = ()
    kept: Sequence[str] = ()
    left: Sequence[str] = ()
    is_damaged: bool = False


def collect(source: Source, *, force: bool, deletable: Collection[str] = ()) -> Script[Collected]:
    """Deletes garbage; with ``force`` also attempts that may be running.

    Keeps complete attempts, except ``deletable`` ones, if there is no commit object or the
    snapshot is damaged.
    """

    async def perform(opened: OpenSource) -> Collected:
        storage = opened.storage
        collected = await collect_garbage(opened.host, storage, force=force, deletable=deletable)
        left = {*await find_attempts(storage)} - {*collected.kept}
        with contextlib.suppress(ChecksumMismatch):  # the committed attempt is unknown
            commit = await find_commit(storage)
            if commit is not None:
                left.discard(commit.attempt)
        return replace(collected, left=sorted(left))

    return (yield from source.perform("collect", perform))


async def collect_garbage(
    host: Host,
    storage: Storage,
    *,
    committed: str | None = None,
    superseded: Collection[str] = (),
    force: bool = False,
    was_vacant: bool | None = None,
    deletable: Collection[str] = (),
) -> Collected:
    """Deletes the objects of attempts that can no longer commit.

    An attempt dead before the commit object is read cannot commit after it. So no deleted object
    belongs to a snapshot, even if others commit concurrently.

    A complete attempt may be a snapshot that lost its commit object. It is kept if there is none,
    or if it is damaged or names an incomplete attempt, unless this process aborted the attempt or
    deleted its snapshot.

    Args:
        committed: The attempt just committed. If no other has a folder, nothing is done.
        superseded: Attempts known to be replaced.
        force: Deletes every other attempt, even if it may be running.
        was_vacant: There was no commit object before the caller's commit: warns about complete
            attempts. None: the current state counts.
        deletable: Attempts to delete even if complete.

    Raises:
        FormatError: newer or foreign format; nothing was deleted.
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
        committed,
        was_vacant,
        {*deletable, *mine, *host.resources.attempts.discarded(storage.url)},
    )
    if force:
        return await sweep.delete(attempts, Claims())
    garbage = await find_collectable(host, attempts, superseded)
    claims = await find_claims(storage, attempts) if garbage else Claims()
    garbage = unclaimed(garbage, claims.copies)
    if claims.copies.keys().isdisjoint(garbage):
        return await sweep.delete(garbage, claims)
    # Leftovers of a copy may be resumed. A copy claims, then looks for collections; a collection
    # announces itself, then looks for claims: one sees the other.
    async with _announce_collection(host, storage):
        claims = await find_claims(storage, await find_attempts(storage))
        return await sweep.delete(unclaimed(garbage, claims.copies), claims)


@asynccontextmanager
async def _announce_collection(host: Host, storage: Storage) -> AsyncIterator[None]:
    """Announces a collection of copies' leftovers."""
    collector = host.resources.attempts.new()
    try:
        await storage.put(collection_key(str(collector)), [memoryview(b"{}")])
        yield
        await storage.delete_folder(str(collector))
    finally:
        host.resources.attempts.end(collector)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The arguments of ``collect_garbage``, and the attempts at the place."""

    host: Host
    storage: Storage
    attempts: Sequence[str]
    committed: str | None
    was_vacant: bool | None
    deletable: Collection[str]

    async def delete(self, garbage: Sequence[str], claims: Claims) -> Collected:
        """Deletes ``garbage`` except the committed and kept attempts."""
        commits = await read_commits(self.storage)
        spared, complete, is_damaged = await self._spare(commits)
        for name in complete:
            spared.update(claims.copies.get(name, ()))  # for a resume
        doomed = [name for name in garbage if name not in spared]
        older = commits.older
        if older is not None and isinstance(commits.newer, Commit) and not is_damaged:
            # Before the objects named in it.
            await self.storage.delete([OLDER_COMMIT_KEY])
            if isinstance(older, Commit) and older.attempt not in {*spared, *claims.copies}:
                doomed = [name for name in self.attempts if name in {*doomed, older.attempt}]
        deleted: list[str] = []
        for name in doomed:
            if commits.newer is commits.older is None:
                # If interrupted, no attempt looks complete.
                deleted += await self.storage.delete_folder(manifest_prefix(name).rstrip("/"))
            deleted += await self.storage.delete_folder(name)
            self.host.resources.attempts.forget_discarded(self.storage.url, name)
        if deleted:
            logger.info("%s: deleted %d objects that were garbage", self.storage.url, len(deleted))
        kept = [name for name in complete if name in garbage]
        if self.was_vacant:
            # A later one is a save that waits for its turn to commit here.
            unsure = [name for name in complete if name not in garbage and self._is_earlier(name)]
            for message, names in ((_COMPLETE, kept), (_MAY_RUN, unsure)):
                if names:
                    logger.warning(message, self.storage.url, ", ".join(names))
        return Collected(deleted=deleted, kept=kept, is_damaged=is_damaged)

    def _is_earlier(self, name: str) -> bool:
        """Whether the attempt began before the one just committed."""
        attempt, committed = Attempt.parse(name), Attempt.parse(self.committed or "")
        if attempt is None or committed is None:
            return True
        return attempt.created_s < committed.created_s

    async def _spare(self, commits: Commits) -> tuple[set[str], list[str], bool]:
        """Returns attempts to keep, the complete uncommitted ones among them, and whether the
        snapshot is damaged.
        """
        try:
            commit = commits.valid()
        except ChecksumMismatch:
            # It named one of these. Deleting the snapshot deletes it, too.
            complete = await self._complete(self.attempts)
            spared = set(complete)
            if isinstance(commits.older, Commit):
                spared.add(commits.older.attempt)
            return spared, complete, True
        spared = {commit.attempt} if commit is not None else set()
        was_vacant = commit is None if self.was_vacant is None else self.was_vacant
        is_damaged = (
            commit is not None
            and commit.attempt not in self.deletable
            and not await self._complete([commit.attempt])
        )
        if not was_vacant and not is_damaged:
            return spared, [], False
        mine = spared.union(self.deletable)
        found = [name for name in self.attempts if name not in mine and not self._runs(name)]
        complete = await self._complete(found)
        return spared.union(complete), complete, is_damaged

    def _runs(self, name: str) -> bool:
        attempt = Attempt.parse(name)
        return attempt is not None and self.host.resources.attempts.is_running(attempt)

    async def _complete(self, attempts: Sequence[str]) -> list[str]:
        run_blocking = self.host.run_blocking
        return [name for name in attempts if await is_complete(self.storage, run_blocking, name)]


async def find_attempts(storage: Storage) -> list[str]:
    """Returns the attempts with a folder."""
    return [name for name in await storage.list_folders() if Attempt.parse(name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The claims at a place.

    Attributes:
        copies: By copied attempt: claim objects by owner.
        collections: Attempts announcing a collection of copies' leftovers.
    """

    copies: Mapping[str, Mapping[str, ObjectInfo]] = field(default_factory=dict)
    collections: Sequence[str] = ()


async def find_claims(storage: Storage, attempts: Sequence[str]) -> Claims:
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
    """Returns the attempts whose objects a resumed save may use, newest first.

    Includes those of other hosts: the caller asserts that their job is gone.
    """
    names = await find_attempts(storage)

    def find() -> list[Attempt]:
        return [a for a in map(Attempt.parse, names) if a is not None and not _may_run(host, a)]

    found = await host.run_blocking(find)
    found.sort(key=lambda attempt: (attempt.created_s, attempt.nonce), reverse=True)
    return tuple([str(attempt) for attempt in found if str(attempt) != committed])


async def find_collectable(
    host: Host, attempts: Iterable[str], superseded: Collection[str] = ()
) -> list[str]:
    """Returns the attempts whose objects may be deleted, except the committed one.

    Callers must read the commit object *after* this call, or they could miss a commit.

    Args:
        superseded: Attempts known to be committed and replaced.
    """

    def is_garbage(name: str) -> bool:
        attempt = Attempt.parse(name)
        if attempt is None:
            return False
        is_dead = attempt.host == host_id() and not _may_run(host, attempt)
        is_old = now_s - attempt.created_s > MAX_ATTEMPT_S
        return is_dead or is_old or name in superseded

    now_s = time.time()
    return await host.run_blocking(lambda: [name for name in attempts if is_garbage(name)])


async def may_run(host: Host, attempts: Iterable[str]) -> bool:
    """Returns whether any of these attempts may be running on this host."""
    found = [attempt for attempt in map(Attempt.parse, attempts) if attempt is not None]
    return await host.run_blocking(lambda: any(_may_run(host, attempt) for attempt in found))


def is_of_another_host(attempt: str) -> bool:
    parsed = Attempt.parse(attempt)
    return parsed is not None and parsed.host != host_id()


def _may_run(host: Host, attempt: Attempt) -> bool:
    """Returns whether an attempt of this host may be running."""
    return attempt.host == host_id() and host.resources.attempts.may_run(attempt)


def unclaimed(garbage: Sequence[str], claims: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the attempts in ``garbage`` that no running copy claims.

    Args:
        garbage: See ``find_collectable``; copies in it are not running.
        claims: By attempt, the copies that claim it.
    """
    dead = frozenset(garbage)
    return [name for name in garbage if dead.issuperset(claims.get(name, ()))]
