"""Finds what a restore would refuse of a snapshot, from its manifests.

Decides which views are tried, and which leaves have to be built to know whether they can be: those
whose bytes may be no value. It must not know storage. Bytes that differ from their checksums are
found elsewhere, and so are shards that do not cover their tensor (``planning.index.holes``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from actorsnap.planning.index import AnyEntry, Index, ShardedEntry, index_of
from actorsnap.state import objects
from actorsnap.state.restore import KeyRestore, Match, entries_by_key, match_key, prepare
from actorsnap.state.tree import escape, part_path

__all__ = ["Doubtful", "Trial", "try_manifests"]

_MAX_CONFIRMED = 16
"""Ranks whose findings are confirmed with all manifests; then enough is known."""


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
        return prepare("", self.entries, target=None, allow_pickle=False, root=self.path)


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

    Merging all manifests again for each rank would take the square of their number. So a rank's
    entries are tried with those that everybody may read, and what is found is confirmed.

    Args:
        manifests: Of all ranks that saved, by rank.
    """
    found = _Findings()
    try:
        index = index_of(manifests, rank=len(manifests))
    except FormatError as error:
        found.add(error)
        return found.trial()
    found.try_index(index)
    if len(manifests) == 1:
        return found.trial()
    for manifest in manifests.values():
        found.try_attributes_of_shards(manifest.entries)
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
        attempt = _Findings(found)
        attempt.try_index(index_of({0: common, 1: own}, rank=1))
        if attempt.problems.keys() <= found.problems.keys():
            found.doubtful.update(attempt.doubtful)
        elif confirmed < _MAX_CONFIRMED:
            confirmed += 1
            found.try_index(index_of(manifests, rank=rank))
    return found.trial()


def _without_shards(
    entries: Sequence[AnyEntry], *, is_replicated: bool = False
) -> tuple[Entry, ...]:
    """Returns the entries with another leaf in the place of each sharded tensor."""
    kept: dict[str, Entry] = {}
    for entry in entries:
        if isinstance(entry, ShardedEntry) or (
            isinstance(entry, TensorEntry) and entry.offsets is not None
        ):
            kept[entry.path] = ValueEntry(path=entry.path, replicated=is_replicated)
        else:
            kept[entry.path] = entry
    return tuple(kept.values())


class _Findings:
    """What trials of several views have found; each problem and each leaf once."""

    def __init__(self, before: _Findings | None = None) -> None:
        self.problems: dict[tuple[str, str], FormatError] = {}
        if before is not None:
            self.problems.update(before.problems)
        self.doubtful: dict[object, Doubtful] = {}

    def add(self, error: FormatError) -> None:
        self.problems.setdefault((error.key, error.detail), error)

    def trial(self) -> Trial:
        return Trial(tuple(self.problems.values()), tuple(self.doubtful.values()))

    def try_attributes_of_shards(self, entries: Sequence[Entry]) -> None:
        """Decodes what the view of another rank has once only, from one of them."""
        for entry in entries:
            if isinstance(entry, TensorEntry) and entry.offsets is not None and entry.attributes:
                try:
                    objects.decode_attributes(entry.attributes, entry.path)
                except FormatError as error:
                    self.add(error)

    def try_index(self, index: Index) -> None:
        """Restores every key of a view."""
        try:
            by_key = entries_by_key(index.entries)
        except FormatError as error:
            self.add(error)
            return
        for key, entries in by_key.items():
            try:
                match = match_key(escape(key), entries, allow_pickle=True)
            except FormatError as error:
                self.add(error)
                continue
            for identity, found in _find_doubtful(index, match):
                self.doubtful.setdefault(identity, found)


def _find_doubtful(index: Index, match: Match) -> Iterator[tuple[object, Doubtful]]:
    """Yields the leaves to build, each with a key that is equal for equal ones."""
    for pair in match.pairs:
        entry = pair.entry
        if isinstance(entry, BytesEntry) and entry.type in ("str", "json", "numpy"):
            yield (entry.type, _place(index, entry.data)), Doubtful(index, entry.path, (entry,))
    for composite in match.composites:
        entry = composite.entry
        assert isinstance(entry, CompositeEntry)
        parts = [match.parts[part_path(entry.path, part)] for part in entry.parts]
        bases = {part.of: match.bases[part.of] for part in parts if isinstance(part, ViewEntry)}
        needed = {each.path: each for each in (entry, *parts, *bases.values())}
        places = [_place(index, e.data) for e in needed.values() if isinstance(e, TensorEntry)]
        yield (repr(entry), *places), Doubtful(index, entry.path, tuple(needed.values()))


def _place(index: Index, data: Stored) -> object:
    return index.objects[data.object].key, data.start, data.stop
