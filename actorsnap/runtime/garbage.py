"""Finds attempts and claims, and deletes what can no longer commit."""

from __future__ import annotations

import time
from collections.abc import (
    AsyncIterator,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass

from actorsnap.actors.snapshot_reader import (
    Commits,
    is_complete,
    read_commits,
)
from actorsnap.errors import (
    ChecksumMismatch,
)
from actorsnap.format.layout import (
    Attempt,
    claim_prefix,
    collection_key,
    manifest_prefix,
    parse_claim,
)
from actorsnap.format.manifest import OLDER_COMMIT_KEY, Commit
from actorsnap.log import Log
from actorsnap.planning.garbage import collectable, resumable, unclaimed
from actorsnap.runtime.host import Host
from actorsnap.runtime.process import host_id
from actorsnap.storage.base import ObjectInfo, Storage

__all__ = [
    "Claims",
    "Collected",
    "collect_garbage",
    "find_attempts",
    "find_claims",
    "find_collectable",
    "find_resumable",
]

logger = Log(__name__)

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
class Collected:
    """The result of a garbage collection.

    Attributes:
        keys: The deleted ones.
        kept: Complete attempts, kept because there is no commit object or the snapshot is damaged.
        is_damaged: The commit object is damaged, or the committed attempt incomplete.
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
        expendable: Attempts to delete even if complete.

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


class _Sweep:
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
        """Deletes ``garbage`` except the committed and kept attempts."""
        commits = await read_commits(self._storage)
        spared, complete, is_damaged = await self._spare(commits)
        for name in complete:
            spared.update(claims.copies.get(name, ()))  # for a resume
        doomed = [name for name in garbage if name not in spared]
        older = commits.older
        if older is not None and isinstance(commits.newer, Commit) and not is_damaged:
            # Before the objects named in it.
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
        """Returns attempts to keep, the complete uncommitted ones among them, and whether the
        snapshot is damaged.
        """
        try:
            commit = commits.valid()
        except ChecksumMismatch:
            # It named one of these. Deleting the snapshot deletes it, too.
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
        attempt = Attempt.parse(name)
        return attempt is not None and self._host.resources.attempts.is_running(attempt)

    async def _complete(self, attempts: Sequence[str]) -> list[str]:
        run_blocking = self._host.run_blocking
        return [name for name in attempts if await is_complete(self._storage, run_blocking, name)]


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

    copies: Mapping[str, Mapping[str, ObjectInfo]]
    collections: Sequence[str]


NO_CLAIMS = Claims(copies={}, collections=())


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
    """See ``planning.garbage.resumable``."""
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
    """See ``planning.garbage.collectable``."""

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
