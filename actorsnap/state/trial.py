"""Finds what a restore would refuse of a snapshot, from its manifests.

Decides which ranks' views are tried, and which leaves have to be built to know whether they can be:
those whose bytes may be no value. It must not know storage. Bytes that differ from their checksums
are found elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from actorsnap.errors import FormatError
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    RankManifest,
    Stored,
    TensorEntry,
    ViewEntry,
)
from actorsnap.planning.index import AnyEntry, Index, index_of
from actorsnap.state.restore import KeyRestore, entries_by_key
from actorsnap.state.tree import part_path

__all__ = ["Doubtful", "Trial", "try_manifests"]

_MAX_VISITS = 2_000_000
"""Entries that are looked at, over all views: some seconds. Of more ranks, some are tried."""


@dataclass(frozen=True, slots=True)
class Doubtful:
    """A leaf that may turn out to be no value when its bytes are there.

    Attributes:
        index: What its entries' ``Stored.object`` count in.
        path: Of the leaf.
        entries: Its own, and those that it refers to.
    """

    index: Index
    path: str
    entries: tuple[AnyEntry, ...]

    def restore(self) -> KeyRestore:
        """Returns the restore of just this leaf, with memory."""
        return KeyRestore("", self.entries, target=None, allow_pickle=False, root=self.path)


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found.

    Attributes:
        problems: One per refusal, of all ranks.
        doubtful: Leaves to build.
    """

    problems: tuple[FormatError, ...]
    doubtful: tuple[Doubtful, ...]


def try_manifests(manifests: Mapping[int, RankManifest]) -> Trial:
    """Restores every key of every rank, and of a rank that did not save, without memory.

    Of very many ranks, some are tried; of the others only what they keep to themselves is.

    Args:
        manifests: Of all ranks that saved, by rank.
    """
    problems: dict[tuple[str, str], FormatError] = {}
    doubtful: dict[object, Doubtful] = {}
    tried = _ranks_to_try(manifests)
    newcomer = [len(manifests)] if len(manifests) > 1 else []
    for rank in (*tried, *newcomer):
        try:
            index = index_of(manifests, rank=rank)
        except FormatError as error:
            problems.setdefault((error.key, error.detail), error)
            continue
        _try_index(index, problems, doubtful)
    for rank in manifests.keys() - set(tried):
        _try_index(_alone(manifests[rank]), problems, doubtful)
    return Trial(tuple(problems.values()), tuple(doubtful.values()))


def _ranks_to_try(manifests: Mapping[int, RankManifest]) -> Sequence[int]:
    num_entries = sum([len(manifest.entries) for manifest in manifests.values()])
    ranks = sorted(manifests)
    step = 1 + num_entries * (len(ranks) + 1) // _MAX_VISITS
    return sorted({*ranks[::step], ranks[-1]})


def _alone(manifest: RankManifest) -> Index:
    """Returns the entries of a rank that refer to no other rank's."""
    held = {entry.path for entry in manifest.entries}
    torn = [
        f"{entry.path}@"
        for entry in manifest.entries
        if isinstance(entry, CompositeEntry)
        and not all(part_path(entry.path, part) in held for part in entry.parts)
    ]
    return Index(
        attempt=manifest.attempt,
        world_size=1,
        objects=manifest.objects,
        entries=tuple(
            [
                entry
                for entry in manifest.entries
                if not (isinstance(entry, TensorEntry) and entry.offsets is not None)
                and not f"{entry.path}@".startswith(tuple(torn))
            ]
        ),
        elsewhere={},
    )


def _try_index(
    index: Index,
    problems: dict[tuple[str, str], FormatError],
    doubtful: dict[object, Doubtful],
) -> None:
    try:
        by_key = entries_by_key(index.entries)
    except FormatError as error:
        problems.setdefault((error.key, error.detail), error)
        return
    for key, entries in by_key.items():
        try:
            KeyRestore(key, entries, target=None, allow_pickle=True, is_trial=True)
        except FormatError as error:
            problems.setdefault((error.key, error.detail), error)
            continue
        for identity, found in _find_doubtful(index, entries):
            doubtful.setdefault(identity, found)


def _find_doubtful(index: Index, entries: Sequence[AnyEntry]) -> Iterator[tuple[object, Doubtful]]:
    """Yields the leaves to build, with something that is equal for equal ones."""
    by_path: dict[str, AnyEntry] = {}
    for entry in entries:
        if isinstance(entry, BytesEntry) and entry.type in ("str", "json", "numpy"):
            yield (entry.type, _place(index, entry.data)), Doubtful(index, entry.path, (entry,))
        elif isinstance(entry, CompositeEntry):
            by_path = by_path or {each.path: each for each in entries}
            needed = [by_path[part_path(entry.path, part)] for part in entry.parts]
            needed += [by_path[part.of] for part in needed if isinstance(part, ViewEntry)]
            unique = {each.path: each for each in (entry, *needed)}
            places = [_place(index, each.data) for each in needed if isinstance(each, TensorEntry)]
            yield (repr(entry), *places), Doubtful(index, entry.path, tuple(unique.values()))


def _place(index: Index, data: Stored) -> object:
    return index.objects[data.object].key, data.start, data.stop
