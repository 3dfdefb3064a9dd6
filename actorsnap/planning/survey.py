# SPDX-License-Identifier: Apache-2.0
"""Sums up all rank manifests of a snapshot, reading each once.

Keeps some bytes per data object and rank that wrote to it, and nothing per leaf: a tool that needs
the leaves of an object reads those manifests again, batch by batch. Must not know how manifests are
read.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.geometry import Box
from actorsnap.format.layout import chunk_key
from actorsnap.format.manifest import (
    BytesEntry,
    ContainerEntry,
    ObjectRecord,
    RankManifest,
    StoredChunk,
    TensorEntry,
)
from actorsnap.planning.restore import check_chunks, find_hole

BATCH_BYTES = 32 << 20
"""Memory of the entries of one batch, about; a large object is a batch of its own."""

_LEAF_BYTES = 500
_NUMBER_BYTES = 36
"""Memory of an entry with its ranges, and of a checksum or a frame's size."""


@dataclass(slots=True, eq=False)
class SurveyedObject:
    """A data object.

    Attributes:
        record: Record of the first rank, without chunks.
        ranks: That list it, rising.
        stored: Start, stop and stored size of each chunk, if it is compressed.
        nbytes: Memory of its leaves and chunks, about.
    """

    record: ObjectRecord
    is_compressed: bool
    ranks: array[int] = field(default_factory=lambda: array("Q"))
    stored: array[int] = field(default_factory=lambda: array("Q"))
    nbytes: int = 0

    @property
    def stored_objects(self) -> Iterator[tuple[str, int]]:
        """Yields the keys and sizes of its stored objects."""
        key = self.record.key
        if not self.is_compressed:
            yield key, self.record.size
            return
        for start, size in dict(zip(self.stored[::3], self.stored[2::3], strict=True)).items():
            yield chunk_key(key, start), size


ShardKey: TypeAlias = tuple[
    tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, str, str, bool
]
"""Offsets and sizes of a box; shape, dtype, type and ``requires_grad`` of its tensor."""


class Holdings(msgspec.Struct, frozen=True):
    """The leaves of a rank manifest.

    Attributes:
        shards: Paths of those that are one box of tensors of one kind.
        others: Paths of entries without boxes, except containers.
    """

    shards: Mapping[ShardKey, Sequence[str]]
    others: Collection[str]


def holdings_of(manifest: RankManifest) -> Holdings:
    shards: dict[ShardKey, list[str]] = {}
    others: list[str] = []
    last: ShardKey | None = None
    paths: list[str] = []
    for entry in manifest.entries:
        if type(entry) is TensorEntry and entry.offsets is not None:
            key = (
                entry.offsets,
                entry.shape,
                entry.global_shape,
                entry.dtype,
                entry.type,
                entry.requires_grad,
            )
            if key != last:  # neighbours are often alike: quicker than a hash
                paths = shards.setdefault(key, [])
                last = key
            paths.append(entry.path)
        elif type(entry) is not ContainerEntry:
            others.append(entry.path)
    return Holdings(shards, others)


class Batch(msgspec.Struct, frozen=True):
    """Data objects whose leaves fit into memory together, and the ranks that have them."""

    keys: tuple[str, ...]
    ranks: tuple[int, ...]


class Survey:
    """Sums up rank manifests, which are added in rank order.

    Attributes:
        objects: By key, in the order of the first ranks that list them.
        contradictions: An error per rank that disagrees with an earlier one about an object.
        leaf_bytes: Bytes of all leaves that manifests name.
    """

    def __init__(self) -> None:
        self.objects: dict[str, SurveyedObject] = {}
        self.contradictions: list[FormatError] = []
        self.leaf_bytes = 0
        self._shards = _Shards()

    def add(self, manifest: RankManifest, holdings: Holdings | None = None) -> None:
        """Adds a manifest; ``holdings`` are those of it, if known."""
        sizes = [0] * len(manifest.objects)
        leaf_bytes = 0
        for entry in manifest.entries:
            kind = type(entry)
            if kind is TensorEntry or kind is BytesEntry:
                data = entry.data  # type: ignore[union-attr]
                leaf_bytes += data.stop - data.start
                sizes[data.object] += _LEAF_BYTES + _NUMBER_BYTES * len(data.crc32c)
        self.leaf_bytes += leaf_bytes
        for record, nbytes in zip(manifest.objects, sizes, strict=True):
            self._add_object(manifest.rank, record, nbytes)
        self._shards.add((holdings or holdings_of(manifest)).shards)

    def _add_object(self, rank: int, record: ObjectRecord, nbytes: int) -> None:
        chunks = record.chunks
        found = self.objects.get(record.key)
        if found is None:
            if chunks:
                record = msgspec.structs.replace(record, chunks=())
            found = self.objects[record.key] = SurveyedObject(record, bool(chunks))
        elif bool(chunks) != found.is_compressed or record != found.record:
            bare = msgspec.structs.replace(record, chunks=()) if chunks else record
            if bool(chunks) != found.is_compressed or bare != found.record:
                detail = "ranks disagree about its size or header"
                self.contradictions.append(FormatError(key=record.key, detail=detail))
        found.ranks.append(rank)
        found.nbytes += nbytes
        for chunk in chunks:
            found.stored.extend((chunk.start, chunk.stop, chunk.size))
            found.nbytes += _LEAF_BYTES + _NUMBER_BYTES * len(chunk.frames)

    def holes(self) -> Iterator[FormatError]:
        """Yields an error per path whose tensor the shards of all ranks do not cover.

        And one per compressed object that its chunks do not cover.
        """
        yield from self._shards.holes()
        for key, found in self.objects.items():
            spans = zip(found.stored[::3], found.stored[1::3], strict=True)
            try:
                if found.is_compressed:
                    chunks = [StoredChunk(start, stop, 0) for start, stop in spans]
                    check_chunks(key, found.record.size, chunks)
            except FormatError as error:
                yield error

    def batches(self, max_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        """Yields all objects in batches, in order."""
        keys: list[str] = []
        ranks: set[int] = set()
        nbytes = 0
        for key, found in self.objects.items():
            if keys and nbytes + found.nbytes > max_bytes:
                yield Batch(tuple(keys), tuple(sorted(ranks)))
                keys, ranks, nbytes = [], set(), 0
            keys.append(key)
            ranks.update(found.ranks)
            nbytes += found.nbytes
        if keys:
            yield Batch(tuple(keys), tuple(sorted(ranks)))


def reduced(manifest: RankManifest, keys: Collection[str]) -> RankManifest:
    """Returns a manifest with the leaves and chunks that are in these objects, and no others."""
    wanted = [record.key in keys for record in manifest.objects]
    return msgspec.structs.replace(
        manifest,
        objects=tuple(
            [
                record
                if is_wanted or not record.chunks
                else msgspec.structs.replace(record, chunks=record.chunks[:1])
                for record, is_wanted in zip(manifest.objects, wanted, strict=True)
            ]
        ),
        entries=tuple(
            [
                entry
                for entry in manifest.entries
                if isinstance(entry, TensorEntry | BytesEntry) and wanted[entry.data.object]
            ]
        ),
    )


def memory_of(manifest: RankManifest) -> int:
    """Returns the memory of a decoded manifest, about."""
    numbers = sum(
        [len(e.data.crc32c) for e in manifest.entries if isinstance(e, TensorEntry | BytesEntry)]
    )
    frames = sum([len(c.frames) + 4 for record in manifest.objects for c in record.chunks])
    return _LEAF_BYTES * len(manifest.entries) + _NUMBER_BYTES * (numbers + frames)


_Face: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Dim, where it is, offsets and sizes along the other dims."""


class _Shards:
    """Joins the boxes of sharded tensors as they come; those that tile leave one box.

    Tensors of a kind that had the same boxes so far share one coverage.
    """

    def __init__(self) -> None:
        self._coverages: dict[str, _Coverage] = {}
        self._different: dict[str, FormatError] = {}

    def add(self, shards: Mapping[ShardKey, Sequence[str]]) -> None:
        """Adds the shards of one rank."""
        coverages = self._coverages
        for (offsets, sizes, *kind), paths in shards.items():
            coverage = coverages.get(paths[0])
            if coverage is None or not coverage.is_of(kind, paths):
                self._add_to_several(kind, offsets, sizes, paths)
            elif not coverage.is_whole:
                coverage.add(Box(offsets, sizes))

    def _add_to_several(
        self,
        kind: list[Any],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        paths: Sequence[str],
    ) -> None:
        """Adds a box to tensors that had different boxes so far."""
        by_coverage: dict[_Coverage | None, list[str]] = {}
        for path in paths:
            by_coverage.setdefault(self._coverages.get(path), []).append(path)
        for coverage, some in by_coverage.items():
            if coverage is not None and coverage.kind != kind:
                detail = "ranks have shards of different tensors under this path"
                for path in some:
                    self._different.setdefault(path, FormatError(key=path, detail=detail))
                continue
            if coverage is None or len(some) < len(coverage.paths):
                coverage = _Coverage(kind) if coverage is None else coverage.without(some)
                coverage.paths.update(some)
                self._coverages.update(dict.fromkeys(some, coverage))
            if not coverage.is_whole:
                coverage.add(Box(offsets, sizes))

    def holes(self) -> Iterator[FormatError]:
        yield from self._different.values()
        for path, coverage in self._coverages.items():
            hole = coverage.find_hole()
            if hole is not None:
                detail = f"no shard has the elements from {hole.offsets} up to {hole.stops}"
                yield FormatError(key=path, detail=detail)


class _Coverage:
    """Boxes of some tensors: neighbours that make one box are joined.

    Attributes:
        kind: Kind of the tensors; see ``ShardKey``.
    """

    __slots__ = ("_at_start", "_at_stop", "_boxes", "_hole", "_shape", "is_whole", "kind", "paths")

    def __init__(self, kind: list[Any]) -> None:
        self.kind = kind
        self.paths: set[str] = set()
        self._shape: tuple[int, ...] = kind[0]
        self._boxes: dict[Box, None] = {}
        self._at_start: dict[_Face, Box] = {}
        self._at_stop: dict[_Face, Box] = {}
        self._hole: list[Box | None] = []
        self.is_whole = False

    def is_of(self, kind: list[Any], paths: Sequence[str]) -> bool:
        """Whether these are all of its tensors."""
        return len(paths) == len(self.paths) and kind == self.kind and self.paths.issuperset(paths)

    def without(self, paths: Sequence[str]) -> _Coverage:
        """Drops some of its tensors; returns a copy for them."""
        self.paths.difference_update(paths)
        other = _Coverage(self.kind)
        other._boxes = dict(self._boxes)
        other._at_start, other._at_stop = dict(self._at_start), dict(self._at_stop)
        other.is_whole = self.is_whole
        return other

    def add(self, box: Box) -> None:
        if box in self._boxes:
            return
        while (neighbour := self._neighbour(box)) is not None:
            self._remove(neighbour)
            stops = tuple(map(max, box.stops, neighbour.stops))
            offsets = tuple(map(min, box.offsets, neighbour.offsets))
            sizes = tuple([stop - at for at, stop in zip(offsets, stops, strict=True)])
            box = Box(offsets, sizes)
        self._boxes[box] = None
        for dim in range(box.ndim):
            self._at_start[_face(box, dim, box.offsets[dim])] = box
            self._at_stop[_face(box, dim, box.stops[dim])] = box
        if box.sizes == self._shape:
            self.is_whole = True
            self._boxes, self._at_start, self._at_stop = {}, {}, {}

    def _neighbour(self, box: Box) -> Box | None:
        if box.is_empty:
            return None
        for dim in range(box.ndim):
            found = self._at_stop.get(_face(box, dim, box.offsets[dim])) or self._at_start.get(
                _face(box, dim, box.stops[dim])
            )
            if found is not None and not found.is_empty:
                return found
        return None

    def _remove(self, box: Box) -> None:
        del self._boxes[box]
        for dim in range(box.ndim):
            for faces, at in ((self._at_start, box.offsets[dim]), (self._at_stop, box.stops[dim])):
                face = _face(box, dim, at)
                if faces.get(face) == box:
                    del faces[face]

    def find_hole(self) -> Box | None:
        if self.is_whole:
            return None
        if not self._hole:
            boxes = sorted(self._boxes, key=lambda box: box.offsets)
            self._hole.append(find_hole(Box.whole(self._shape), boxes))
        return self._hole[0]


def _face(box: Box, dim: int, at: int) -> _Face:
    offsets, sizes = box.offsets, box.sizes
    return dim, at, offsets[:dim] + offsets[dim + 1 :], sizes[:dim] + sizes[dim + 1 :]
