"""Scripts that list and delete snapshots and collect garbage."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection

import msgspec

from actorsnap.actors.snapshot_reader import (
    find_commit,
    is_complete,
    read_commits,
)
from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    UnsupportedFormat,
)
from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import (
    COMMIT_KEY,
    OLDER_COMMIT_KEY,
    Commit,
)
from actorsnap.log import Log
from actorsnap.runtime.garbage import collect_garbage, find_attempts, find_collectable
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.source import MAX_SMALL_READS, Source
from actorsnap.storage.base import for_each

__all__ = [
    "CollectReport",
    "Leftover",
    "collect",
    "delete",
    "find_leftovers",
    "find_snapshots",
]

logger = Log(__name__)

_NUMBER = re.compile("([0-9]+)")


def delete(source: Source) -> Script[None]:
    """Deletes the commit object first: a crash leaves only garbage."""

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
                    # First, in a separate request: a crash must not make it valid.
                    await storage.delete([OLDER_COMMIT_KEY])
                await storage.delete([COMMIT_KEY])
                # Attempts of a running take are kept: its commit would be damaged.
                await collect_garbage(host, storage, superseded=superseded, was_vacant=False)

            await errands.run(perform)

    yield step


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
        deleted: Keys.
        kept, is_damaged: See ``Collected``.
        left: Other unfinished attempts.
    """

    deleted: list[str]
    kept: list[str]
    left: list[str]
    is_damaged: bool


def collect(
    source: Source, *, force: bool, expendable: Collection[str] = ()
) -> Script[CollectReport]:
    """Deletes garbage; with ``force`` also attempts that may be running.

    Keeps complete attempts, except ``expendable`` ones, if there is no commit object or the
    snapshot is damaged.
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


def find_snapshots(source: Source) -> Script[dict[str, Commit | FormatError | None]]:
    """Finds the snapshots one level below the URL.

    Returns:
        By name: the commit object; an error if damaged; None if there are only unfinished attempts.
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
    """Returns a key that sorts numbers in names by value."""
    # Every second part is a number. Without leading zeros, the longer is the greater.
    parts = [part.lstrip("0") if n % 2 else part for n, part in enumerate(_NUMBER.split(name))]
    return [(len(part) if n % 2 else 0, part) for n, part in enumerate(parts)], name
