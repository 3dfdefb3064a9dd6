# SPDX-License-Identifier: Apache-2.0
"""Finds entries that a restore would refuse, from the manifests of a snapshot.

Runs the first pass of a restore (``state.restore.match``), and finds leaves to build because their
bytes may be invalid. Does not find damaged bytes, nor shards that leave holes or are of different
tensors (``planning.survey``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    Entry,
    ObjectRecord,
    RankManifest,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.planning.index import (
    AnyEntry,
    Elsewhere,
    Index,
    ShardedEntry,
    _closure,
    _content,
    index_of,
)
from actorsnap.state import objects
from actorsnap.state.restore.build import KeyRestore, prepare
from actorsnap.state.restore.match import Match, entries_by_key, match_key
from actorsnap.state.tree import escape, part_path

_MAX_CONFIRMED = 16
"""Maximum number of ranks whose problems are confirmed with all paths; others are dropped."""


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
    """Tries every key for every rank that saved, and for one that did not; see ``EntryCheck``."""
    check = EntryCheck()
    for manifest in manifests.values():
        check.add(manifest)
    check.try_common()
    for manifest in manifests.values():
        check.try_rank(manifest)
    return check.found


class EntryCheck:
    """Tries keys without allocating memory for them, from two looks at each manifest.

    ``add`` gets all manifests, in rank order; ``try_common`` tries what a rank that did not save
    may read; ``try_rank`` gets all manifests again. Two manifests stand for those of all ranks:
    rank 0's, and one with each other path that any rank may read, once. So a tensor has one of its
    shards, and neither time nor memory is quadratic.

    Attributes:
        found: So far.
    """

    def __init__(self) -> None:
        self.found = Findings()
        self._num_ranks = 0
        self._first: RankManifest
        self._records: dict[tuple[str, int], tuple[int, ObjectRecord]] = {}
        # Of other ranks than 0: by path, for shards, private leaves and all others.
        self._others: dict[tuple[str, str], Entry] = {}
        self._held: set[tuple[str, str]] = set()
        # Rank 0's private leaves that all ranks so far stored with equal content.
        self._alike: dict[str, object] = {}
        self._all: dict[int, RankManifest] = {}
        self._common: RankManifest
        self._num_confirmed = 0

    def add(self, manifest: RankManifest) -> None:
        self._num_ranks += 1
        if self._num_ranks == 1:
            self._first = reduced = _with_one_shard_each(manifest)
            self._held.update([(_kind_of(entry), entry.path) for entry in reduced.entries])
            entries = {entry.path: entry for entry in reduced.entries}
            self._alike = {
                entry.path: _content(entry.path, entries)
                for entry in reduced.entries
                if _kind_of(entry) == "private" and "@" not in entry.path
            }
        else:
            self._keep_alike(manifest)
            for entry in manifest.entries:
                place = _kind_of(entry), entry.path
                if place not in self._held:
                    self._held.add(place)
                    if place[0] != "private":
                        entry = self._renumbered(entry, manifest)
                    elif "@" not in entry.path:
                        entry = ValueEntry(path=entry.path)
                    else:
                        continue
                    self._others[place] = entry
        _try_attributes_of_shards(self.found, manifest.entries)

    def _keep_alike(self, manifest: RankManifest) -> None:
        if self._alike:
            entries = {entry.path: entry for entry in manifest.entries}
            self._alike = {
                path: content
                for path, content in self._alike.items()
                if path in entries
                and _kind_of(entries[path]) == "private"
                and _content(path, entries) == content
            }

    def _renumbered(self, entry: Entry, manifest: RankManifest) -> Entry:
        if not isinstance(entry, TensorEntry | BytesEntry):
            return entry
        record = manifest.objects[entry.data.object]
        number, _ = self._records.setdefault(record.part, (len(self._records), record))
        return msgspec.structs.replace(
            entry, data=msgspec.structs.replace(entry.data, object=number)
        )

    def try_common(self) -> None:
        first = self._first
        self._all = {0: first}
        if self._num_ranks > 1:
            number = len(self._records)
            by_path = {entry.path: entry for entry in first.entries}
            alike = {e.path: e for path in self._alike for e in _closure(path, by_path)}
            moved = [
                msgspec.structs.replace(
                    e, data=msgspec.structs.replace(e.data, object=e.data.object + number)
                )
                if isinstance(e, TensorEntry | BytesEntry)
                else e
                for e in alike.values()
            ]
            records = [record for _, record in self._records.values()]
            self._all[1] = msgspec.structs.replace(
                first,
                rank=1,
                objects=(*records, *first.objects),
                entries=(*self._others.values(), *moved),
            )
        self._others, self._held = {}, set()
        index = index_of(self._all, rank=self._num_ranks)
        tried = _try_index(index)
        self.found.problems.update(tried.problems)
        self.found.doubtful.update(tried.doubtful)
        self._common = RankManifest(
            attempt=index.attempt,
            rank=0,
            objects=index.objects,
            entries=_without_shards(index.entries, is_replicated=True),
        )

    def try_rank(self, manifest: RankManifest) -> None:
        """Tries a rank's entries with those that every rank may read; then confirms problems."""
        if self._num_ranks == 1:
            return
        found = self.found
        own = msgspec.structs.replace(manifest, entries=_without_shards(manifest.entries))
        tried = _try_index(index_of({0: self._common, 1: own}, rank=1))
        if tried.problems.keys() <= found.problems.keys():
            found.doubtful.update(tried.doubtful)
        elif self._num_confirmed < _MAX_CONFIRMED:
            self._num_confirmed += 1
            own = _with_one_shard_each(manifest)
            try:
                tried = _try_index(index_of({**self._all, 2: own}, rank=2))
            except FormatError as error:  # shards of different tensors
                found.add(error)
                return
            found.problems.update(tried.problems)
            found.doubtful.update(tried.doubtful)


def _kind_of(entry: Entry) -> str:
    """Returns how ranks share an entry; see ``planning.index``."""
    if isinstance(entry, ContainerEntry):
        return "container"
    if isinstance(entry, TensorEntry) and entry.offsets is not None:
        return "shard"
    return "common" if entry.replicated else "private"


def _with_one_shard_each(manifest: RankManifest) -> RankManifest:
    kept: dict[tuple[str, str], Entry] = {}
    for entry in manifest.entries:
        kept.setdefault((_kind_of(entry), entry.path), entry)
    return msgspec.structs.replace(manifest, entries=tuple(kept.values()))


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
        if isinstance(entry, BytesEntry) and entry.type in ("str", "json", "values", "numpy"):
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
