"""Finds entries that a restore would refuse, from the manifests of a snapshot.

Runs the first pass of a restore (``state.restore.match``), and finds leaves to build because their
bytes may be invalid. Does not find damaged bytes, nor uncovered tensors (``planning.index.holes``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    Entry,
    RankManifest,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.planning.index import AnyEntry, Elsewhere, Index, ShardedEntry, index_of
from actorsnap.state import objects
from actorsnap.state.restore.build import KeyRestore, prepare
from actorsnap.state.restore.match import Match, entries_by_key, match_key
from actorsnap.state.tree import escape, part_path

_MAX_CONFIRMED = 16
"""Maximum number of ranks whose problems are confirmed with all manifests; others are dropped."""


@dataclass(frozen=True, slots=True)
class Doubtful:
    """A leaf whose bytes may be invalid.

    Attributes:
        index: The view whose objects the entries refer to.
        entries: Its entry, and entries that this refers to.
    """

    index: Index
    path: str
    entries: tuple[AnyEntry, ...]

    def restore(self) -> KeyRestore:
        return prepare(self.path, self.entries, target=None, allow_pickle=False)


@dataclass(frozen=True, slots=True)
class Findings:
    """One error per refused entry, by path and detail; and leaves to build, by content."""

    problems: dict[tuple[str, str], FormatError] = field(default_factory=dict)
    doubtful: dict[object, Doubtful] = field(default_factory=dict)

    def add(self, error: FormatError) -> None:
        self.problems.setdefault((error.key, error.detail), error)


def verify_entries(manifests: Mapping[int, RankManifest]) -> Findings:
    """Tries every key for every rank that saved, and for one that did not. Allocates no memory.

    Avoids quadratic time: tries a rank's entries with those that every rank may read, then confirms
    problems with all manifests.
    """
    try:
        index = index_of(manifests, rank=len(manifests))
    except FormatError as error:
        return Findings({(error.key, error.detail): error})
    found = _try_index(index)
    if len(manifests) > 1:
        for manifest in manifests.values():
            _try_attributes_of_shards(found, manifest.entries)
        _try_each_rank(found, index, manifests)
    return found


def _try_each_rank(found: Findings, index: Index, manifests: Mapping[int, RankManifest]) -> None:
    common = RankManifest(
        attempt=index.attempt,
        rank=0,
        objects=index.objects,
        entries=_without_shards(index.entries, is_replicated=True),
    )
    confirmed = 0
    for rank, manifest in manifests.items():
        entries = _without_shards(manifest.entries)
        own = msgspec.structs.replace(manifest, entries=entries)
        tried = _try_index(index_of({0: common, 1: own}, rank=1))
        if tried.problems.keys() <= found.problems.keys():
            found.doubtful.update(tried.doubtful)
        elif confirmed < _MAX_CONFIRMED:
            confirmed += 1
            tried = _try_index(index_of(manifests, rank=rank))
            found.problems.update(tried.problems)
            found.doubtful.update(tried.doubtful)


def _without_shards(
    entries: Sequence[AnyEntry], *, is_replicated: bool = False
) -> tuple[Entry, ...]:
    """Replaces each sharded tensor by a plain leaf."""
    kept: dict[str, Entry] = {}
    for entry in entries:
        if isinstance(entry, ShardedEntry | Elsewhere) or (
            isinstance(entry, TensorEntry) and entry.offsets is not None
        ):
            kept[entry.path] = ValueEntry(path=entry.path, replicated=is_replicated)
        else:
            kept[entry.path] = entry
    return tuple(kept.values())


def _try_attributes_of_shards(found: Findings, entries: Sequence[Entry]) -> None:
    """Decodes the attributes of a rank's shards; a merged view keeps one rank's."""
    for entry in entries:
        if isinstance(entry, TensorEntry) and entry.offsets is not None and entry.attributes:
            try:
                objects.decode_attributes(entry.attributes, entry.path)
            except FormatError as error:
                found.add(error)


def _try_index(index: Index) -> Findings:
    found = Findings()
    try:
        by_key = entries_by_key(index.entries)
    except FormatError as error:
        found.add(error)
        return found
    for key, entries in by_key.items():
        try:
            match = match_key(escape(key), entries, allow_pickle=True)
        except FormatError as error:
            found.add(error)
        else:
            found.doubtful.update(_find_doubtful(index, match))
    return found


def _find_doubtful(index: Index, match: Match) -> Iterator[tuple[object, Doubtful]]:
    """Yields the leaves to build, each with a key for its content."""
    for pair in match.pairs:
        entry = pair.entry
        if isinstance(entry, BytesEntry) and entry.type in ("str", "json", "numpy"):
            content = entry.type, _location(index, entry.data)
            yield content, Doubtful(index, entry.path, (entry,))
    for composite in match.composites:
        entry = composite.entry
        assert isinstance(entry, CompositeEntry)
        parts = [match.parts[part_path(entry.path, part)] for part in entry.parts]
        bases = [match.bases[part.of] for part in parts if isinstance(part, ViewEntry)]
        needed = {each.path: each for each in (entry, *parts, *bases)}
        stored = [_location(index, e.data) for e in needed.values() if isinstance(e, TensorEntry)]
        yield (repr(entry), *stored), Doubtful(index, entry.path, tuple(needed.values()))


def _location(index: Index, data: Stored) -> object:
    return index.objects[data.object].key, data.start, data.stop
