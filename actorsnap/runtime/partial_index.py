"""The index of a snapshot of many ranks, as far as one rank wants it.

Before the rank knows what it wants, it reads the owner index, its own manifest, and rank 0's. Then
it asks the ranks that have the rest. Without an owner index it asks all of them. Manifests are read
in batches; what is not wanted of them is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
"""So many manifests are read at once: an owner index would save little."""

_MAX_CHECKED = 64
"""Manifests compared with the owner index; of more, only that they have all that is wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialIndex:
    """The beginning of an index.

    Attributes:
        owners: None for older snapshots.
        first: Rank 0's manifest.
        own: None if the rank did not save.
    """

    commit: Commit
    rank: int
    owners: OwnerIndex | None
    first: RankManifest
    own: RankManifest | None

    @classmethod
    async def begin(
        cls, reader: SnapshotReader, run_blocking: RunBlocking, commit: Commit, rank: int
    ) -> PartialIndex:
        """Reads what every rank needs.

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

        ranks = {0, rank} if rank < commit.world_size else {0}
        await for_each([None, *ranks], read, at_once=3)
        begun = cls(commit, rank, owners, manifests[0], manifests.get(rank))
        await run_blocking(begun._check, manifests.values())
        return begun

    def contents(self, num_ranks: int) -> bytes:
        """Returns ``Ready.contents``."""
        if self.owners is None or self.own is None or num_ranks <= self.commit.world_size:
            return b""
        return contents_of(self.own, self.owners.private_everywhere)

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
        builder = IndexBuilder(
            self.first if self.own is None else self.own,
            is_own=self.own is not None,
            world_size=commit.world_size,
            wants=wants,
            private=None if owners is None else _ranks_of(owners.private),
        )
        known = {manifest.rank: manifest for manifest in (self.first, self.own) if manifest}
        paths: list[str] = []
        names = None
        asked: Collection[int] = range(commit.world_size)
        if owners is not None:
            everything = list(owners.paths)
            paths = [path for path in everything if wants.names(path)]
            if len(paths) < len(everything):
                names = wants.names
            asked = await run_blocking(owners.ranks_to_ask, wants, paths, known.keys())
            asked = sorted({*known, *asked})
        is_checked = owners is not None and len(asked) <= _MAX_CHECKED

        def add(manifests: Iterable[RankManifest]) -> None:
            for manifest in manifests:
                if is_checked and manifest.rank not in known:
                    assert owners is not None
                    self._refuse(owners.contradiction(manifest, paths))
                builder.add(manifest)

        ranks = list(asked)
        for at in range(0, len(ranks), at_once):
            batch = ranks[at : at + at_once]
            read: dict[int, RankManifest] = {}

            async def get(rank: int, read: dict[int, RankManifest] = read) -> None:
                read[rank] = known.get(rank) or await reader.manifest(commit, rank, names)

            await for_each(batch, get, at_once=at_once)
            await run_blocking(add, [read[rank] for rank in batch])
        return builder

    def _check(self, manifests: Iterable[RankManifest]) -> None:
        if self.owners is not None:
            for manifest in manifests:
                self._refuse(self.owners.difference(manifest))

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
