# SPDX-License-Identifier: Apache-2.0
"""Scripts that read the index of a snapshot: no values, and so without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from actorsnap.errors import NotASnapshot, UsageError
from actorsnap.format.manifest import Commit, Entry, RankManifest
from actorsnap.planning.index import named_entries
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.manifests import ManifestStream, Turns, index_progress
from actorsnap.runtime.partial_index import FEW_RANKS
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source, begins_anew
from actorsnap.storage.base import for_each, size_below
from actorsnap.wording import named_ranks


@begins_anew
def load_commit(source: Source) -> Script[Commit]:
    commit = yield from source.perform("read", lambda opened: opened.reader.commit())
    source.note(commit)
    return commit


def exists(source: Source) -> Script[bool]:
    """Whether something can be restored from the place; damaged or not."""
    try:
        yield from load_commit(source)
    except NotASnapshot:
        return False
    return True


@begins_anew
def measure(source: Source) -> Script[int]:
    """Returns the bytes that a snapshot takes in its storage: of its own objects only."""

    async def perform(opened: OpenSource) -> int:
        commit, foreign = await opened.reader.commit(), opened.reader.foreign
        nbytes = (
            await size_below(opened.storage, f"{commit.attempt}/")
            if foreign is None
            else sum(info.size for info in foreign.files.values())
        )
        source.note(commit, nbytes)
        return nbytes

    return (yield from source.perform("list", perform))


@begins_anew
def each_manifest(
    source: Source,
    *looks: Callable[[Commit, RankManifest], object],
    rank: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Script[Commit]:
    """Calls each of ``looks`` with all rank manifests in rank order, or with one.

    Few are in memory at a time. Calls are on worker threads; they see another commit object if the
    snapshot was replaced meanwhile.

    Args:
        progress: Gets the bytes read for the first look, and an estimate of all.
    """

    async def perform(opened: OpenSource) -> Commit:
        reader = opened.reader
        commit = await reader.commit()
        source.note(commit)
        if rank is not None and not 0 <= rank < commit.world_size:
            present = named_ranks(range(commit.world_size))
            raise UsageError(f"the snapshot has only {present}, not {rank}")

        ranks = range(commit.world_size) if rank is None else (rank,)
        stream = ManifestStream(reader, commit.attempt, commit, ranks)
        note = index_progress(len(ranks), progress)
        if commit.world_size <= FEW_RANKS:
            await stream.each(lambda manifest: None)  # raises before the first look
        for look in looks:
            await stream.each(partial(look, commit), on_record=note)
            note = index_progress(len(ranks), None)
        return commit

    return (yield from source.perform("read", perform))


def get_manifest(source: Source, rank: int | None = None) -> Script[dict[str, Entry]]:
    """Returns all entries, by ``"<rank>/<path>"`` or ``"<rank>/<path>@<offsets>"``."""
    if rank is not None and type(rank) is not int:
        raise UsageError(f"rank must be an int, not {rank!r}")
    found: dict[str, Entry] = {}

    def take(_: Commit, manifest: RankManifest) -> None:
        if manifest.rank == (rank or 0):
            found.clear()
        for name, entry in named_entries(manifest).items():
            found[f"{manifest.rank}/{name}"] = entry

    yield from each_manifest(source, take, rank=rank)
    return found


def each_pair(
    left: Source,
    right: Source,
    take: Callable[[int, RankManifest | None, RankManifest | None], object],
) -> Script[None]:
    """Calls ``take`` with the manifests of each rank in two snapshots, ordered by rank as text.

    Raises:
        UsageError: One is of another format, without checksums.
    """

    async def step(host: Host) -> None:
        async with left.opened(host, "read") as one, right.opened(host, "read") as other:
            commits: list[Commit] = []
            for opened in (one, other):
                with opened.source.naming():
                    commits.append(await opened.reader.commit())
                if opened.reader.foreign is not None:
                    url = opened.source.location.display_url
                    raise UsageError(
                        f"{url} has no checksums to compare, because another program wrote it: "
                        "`actorsnap cp` makes a snapshot of it"
                    )

            ranks = sorted(range(max(commit.world_size for commit in commits)), key=str)
            turns = Turns(one.errands.run_blocking)

            async def perform(turn: int) -> None:
                rank = ranks[turn]
                found: list[Any] = [rank]
                for opened, commit in zip((one, other), commits, strict=True):
                    with opened.source.naming():
                        found.append(
                            await opened.reader.manifest(commit, rank)
                            if rank < commit.world_size
                            else None
                        )
                await turns.run(turn, partial(take, *found))

            each = partial(for_each, range(len(ranks)), perform, at_once=MAX_SMALL_READS)
            await one.errands.run(each)

    yield step
