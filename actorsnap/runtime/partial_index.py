# SPDX-License-Identifier: Apache-2.0
"""The index of a snapshot of many ranks, as far as one rank wants it.

A rank first reads the owner index; then its own manifest, and those of the ranks that have the
rest. Without an owner index, it reads all manifests. They are read in batches, and unwanted entries
are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from actorsnap.actors.snapshot_reader import SnapshotReader
from actorsnap.errors import FormatError
from actorsnap.format.manifest import Commit, RankManifest
from actorsnap.format.owners import Grid, owners_key
from actorsnap.planning.index import Index, IndexBuilder, Wants, contents_of
from actorsnap.planning.ownership import OwnerIndex
from actorsnap.storage.base import RunBlocking, for_each

FEW_RANKS = 16
"""Number of ranks up to which all manifests are read: an owner index would save little."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialIndex:
    """The beginning of an index, for one of ``num_ranks``.

    Attributes:
        owners: None for older snapshots.
        known: The manifests that are needed before the rank knows what it wants. Without an owner
            index its own; rank 0's if the rank did not save.
    """

    commit: Commit
    rank: int
    num_ranks: int
    owners: OwnerIndex | None
    known: Mapping[int, RankManifest]

    @classmethod
    async def begin(
        cls,
        reader: SnapshotReader,
        run_blocking: RunBlocking,
        commit: Commit,
        rank: int,
        num_ranks: int,
    ) -> PartialIndex:
        """Reads what a rank of ``num_ranks`` needs.

        Raises:
            FormatError: An object is missing or damaged, or they contradict each other.
        """
        manifests: dict[int, RankManifest] = {}
        owners: OwnerIndex | None = None

        async def read(each: int | None) -> None:
            nonlocal owners
            if each is not None:
                manifests[each] = await reader.manifest(commit, each)
            elif (found := await reader.owners(commit)) is not None:
                owners = await run_blocking(OwnerIndex, found[0], commit.world_size)

        ranks = [rank if rank < commit.world_size else 0]
        if "owners" in commit.features and rank < commit.world_size >= num_ranks:
            ranks = []  # a part of it may be enough
        await for_each([None, *ranks], read, at_once=2)
        begun = cls(commit, rank, num_ranks, owners, manifests)
        if owners is not None:
            for manifest in manifests.values():
                begun._refuse(await run_blocking(owners.difference, manifest))
        return begun

    def contents(self) -> bytes:
        """Returns ``Ready.contents``."""
        own = self.known.get(self.rank)
        if self.owners is None or own is None or self.num_ranks <= self.commit.world_size:
            return b""
        return contents_of(own, self.owners.private_everywhere)

    async def complete(
        self,
        reader: SnapshotReader,
        run_blocking: RunBlocking,
        wants: Wants,
        alike: Sequence[int] = (),
        *,
        at_once: int,
    ) -> Index:
        """Reads the rest of what the rank wants.

        Args:
            alike: See ``protocol.restore.Alike``.
            at_once: Maximum number of concurrent requests.

        Raises:
            FormatError: A manifest is missing or damaged, or contradicts others or the owner index.
        """
        while True:
            builder = await self._build(reader, run_blocking, wants, at_once)
            more = builder.overlapping() | builder.bases()
            new = {path for path in more if path in wants.boxes or not wants.names(path)}
            if not new:
                break
            wants = wants.more(new)
        if self.owners is None:
            return await run_blocking(builder.index)
        everywhere = self.owners.private_everywhere
        others = [path for path in self.owners.paths if "@" not in path and not wants.names(path)]
        return await run_blocking(
            partial(builder.index, alike=[everywhere[number] for number in alike], others=others)
        )

    async def _build(
        self, reader: SnapshotReader, run_blocking: RunBlocking, wants: Wants, at_once: int
    ) -> IndexBuilder:
        commit, owners = self.commit, self.owners
        is_own = self.rank < commit.world_size
        known, names = dict(self.known), None
        paths: list[str] = []
        unlisted: list[str] = []  # perhaps a manifest has them nevertheless
        are_few = False
        asked: Sequence[int] = range(commit.world_size)
        if owners is not None:
            everything = list(owners.paths)
            paths = [path for path in everything if wants.names(path)]
            unlisted = [path for path in wants.boxes if path not in owners]
            are_few = 2 * len(paths) <= len(everything)
            if len(paths) < len(everything):
                names = wants.names
            first = self.rank if is_own else 0
            if first not in known:
                known[first] = await self._own(
                    *(reader, run_blocking, owners, wants), paths, unlisted
                )
            asked = await run_blocking(owners.ranks_to_ask, wants, paths, known.keys())
            asked = sorted({*known, *asked})
        builder = IndexBuilder(
            known[self.rank if is_own else 0],
            is_own=is_own,
            world_size=commit.world_size,
            wants=wants,
            private=None if owners is None else _ranks_of(owners.private),
        )

        def add(manifests: Iterable[RankManifest]) -> None:
            for manifest in manifests:
                if owners is not None and manifest.rank not in known:
                    self._refuse(owners.contradiction(manifest, paths))
                builder.add(manifest)

        for at in range(0, len(asked), at_once):
            batch = asked[at : at + at_once]
            read: dict[int, RankManifest] = {}

            async def get(rank: int, read: dict[int, RankManifest] = read) -> None:
                if rank in known:
                    read[rank] = known[rank]
                elif are_few:
                    read[rank] = await reader.entries(commit, rank, [*paths, *unlisted])
                else:
                    read[rank] = await reader.manifest(commit, rank, names)

            await for_each(batch, get, at_once=at_once)
            await run_blocking(add, [read[rank] for rank in batch])
        return builder

    async def _own(
        self,
        reader: SnapshotReader,
        run_blocking: RunBlocking,
        owners: OwnerIndex,
        wants: Wants,
        paths: Sequence[str],
        unlisted: Sequence[str],
    ) -> RankManifest:
        """Reads the rank's own manifest, or the pages with what it needs, and with containers.

        Containers are in no owner index, and empty ones are leaves.
        """
        needed = await run_blocking(owners.needed_of, self.rank, wants, paths)
        if needed is None:
            manifest = await reader.manifest(self.commit, self.rank)
            self._refuse(await run_blocking(owners.difference, manifest))
        else:
            manifest = await reader.entries(
                self.commit, self.rank, [*needed, *unlisted], with_containers=True
            )
            self._refuse(await run_blocking(owners.contradiction, manifest, needed))
        return manifest

    async def check_absent(
        self, reader: SnapshotReader, run_blocking: RunBlocking, path: str, *, at_once: int
    ) -> None:
        """Looks for a path that the owner index lacks in the tables of all manifests.

        Raises:
            FormatError: A manifest has it.
        """
        owners = self.owners
        if owners is None or path in owners:
            return

        async def look(rank: int) -> None:
            manifest = await reader.entries(self.commit, rank, [path])
            self._refuse(await run_blocking(owners.contradiction, manifest, ()))

        await for_each(range(self.commit.world_size), look, at_once=at_once)

    def _refuse(self, contradiction: str | None) -> None:
        if contradiction is not None:
            raise FormatError(
                key=owners_key(self.commit.attempt),
                detail=f"{contradiction}, which contradicts its manifest",
            )


def _ranks_of(groups: Mapping[str, tuple[Grid, ...]]) -> dict[str, Sequence[int]]:
    """Returns the ranks of each path; paths share them."""
    found: dict[tuple[Grid, ...], Sequence[int]] = {}
    for grids in groups.values():
        if grids not in found:
            found[grids] = tuple(sorted([rank for grid in grids for rank in grid]))
    return {path: found[grids] for path, grids in groups.items()}
