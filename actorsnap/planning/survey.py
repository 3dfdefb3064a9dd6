"""What all rank manifests of a snapshot add up to, from one look at each.

Keeps some bytes per data object and rank that wrote to it, and nothing per leaf: a tool that needs
the leaves of an object reads those manifests again, batch by batch. Must not know how manifests are
read.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.geometry import Box
from actorsnap.format.layout import chunk_key
from actorsnap.format.manifest import (
    BytesEntry,
    ObjectRecord,
    RankManifest,
    TensorEntry,
)
from actorsnap.planning.restore import find_hole

BATCH_BYTES = 32 << 20
"""Memory of the entries of one batch, about; a large object is a batch of its own."""

_LEAF_BYTES = 500
_NUMBER_BYTES = 36
"""Memory of an entry with its ranges, and of a checksum or a frame's size."""


@dataclass(slots=True, eq=False)
class SurveyedObject:
    """A data object.

    Attributes:
        record: Of the first rank, without chunks.
        ranks: That list it, rising.
        stored: Start and stored size of each chunk, if it is compressed.
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
        chunks = dict(zip(self.stored[::2], self.stored[1::2], strict=True))
        for start, size in chunks.items():
            yield chunk_key(key, start), size


class Batch(msgspec.Struct, frozen=True):
    """Data objects whose leaves fit into memory together, and the ranks that have them."""

    keys: tuple[str, ...]
    ranks: tuple[int, ...]


class Survey:
    """Sums up rank manifests, which are added in rank order.

    Attributes:
        objects: By key, in the order of the first ranks that list them.
        contradictions: An error per rank that disagrees with an earlier one about an object.
        leaf_bytes: Of all leaves that manifests name.
    """

    def __init__(self) -> None:
        self.objects: dict[str, SurveyedObject] = {}
        self.contradictions: list[FormatError] = []
        self.leaf_bytes = 0
        self._shards = _Shards()

    def add(self, manifest: RankManifest) -> None:
        sizes = [0] * len(manifest.objects)
        shards: list[TensorEntry] = []
        leaf_bytes = 0
        for entry in manifest.entries:
            kind = type(entry)
            if kind is TensorEntry or kind is BytesEntry:
                data = entry.data  # type: ignore[union-attr]
                leaf_bytes += data.stop - data.start
                sizes[data.object] += _LEAF_BYTES + _NUMBER_BYTES * len(data.crc32c)
                if kind is TensorEntry and entry.offsets is not None:  # type: ignore[union-attr]
                    shards.append(entry)  # type: ignore[arg-type]
        self.leaf_bytes += leaf_bytes
        for record, nbytes in zip(manifest.objects, sizes, strict=True):
            self._add_object(manifest.rank, record, nbytes)
        self._shards.add(shards)

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
            found.stored.extend((chunk.start, chunk.size))
            found.nbytes += _LEAF_BYTES + _NUMBER_BYTES * len(chunk.frames)

    def holes(self) -> Iterator[FormatError]:
        """Yields an error per path whose tensor the shards of all ranks do not cover."""
        return self._shards.holes()

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


_Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""

_Face: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Dim, where it is, offsets and sizes along the other dims."""


class _Shards:
    """Joins the boxes of sharded tensors as they come; those that tile leave one box.

    Tensors that had the same boxes so far share one coverage.
    """

    def __init__(self) -> None:
        # What ``is_same_tensor`` compares.
        self._kinds: dict[str, tuple[str, tuple[int, ...] | None, str, bool]] = {}
        self._coverage: dict[str, _Coverage] = {}
        self._different: dict[str, FormatError] = {}

    def add(self, entries: Sequence[TensorEntry]) -> None:
        """Adds the shards of one rank."""
        boxes: dict[str, tuple[_Place, ...]] = {}
        kinds = self._kinds
        for entry in entries:
            path = entry.path
            kind = entry.dtype, entry.global_shape, entry.type, entry.requires_grad
            first = kinds.get(path)
            if first is None:
                kinds[path] = kind
            elif first != kind:
                detail = "ranks have shards of different tensors under this path"
                self._different.setdefault(path, FormatError(key=path, detail=detail))
                continue
            place: _Place = (entry.offsets, entry.shape)  # type: ignore[assignment]
            boxes[path] = (*boxes[path], place) if path in boxes else (place,)
        # Of each coverage: its paths by the boxes that this rank adds.
        changes: dict[_Coverage, dict[tuple[_Place, ...], list[str]]] = {}
        new: dict[tuple[int, ...], _Coverage] = {}
        coverages = self._coverage
        for path, added in boxes.items():
            coverage = coverages.get(path)
            if coverage is None:
                whole = kinds[path][1]
                assert whole is not None
                coverage = new.get(whole)
                if coverage is None:
                    coverage = new[whole] = _Coverage(whole)
            elif coverage.is_whole:
                continue
            by_boxes = changes.get(coverage)
            if by_boxes is None:
                by_boxes = changes[coverage] = {}
            by_boxes.setdefault(added, []).append(path)
        for coverage, by_boxes in changes.items():
            for boxes_added, paths in by_boxes.items():
                is_alone = len(by_boxes) == 1 and len(paths) == coverage.num_paths
                then = coverage if is_alone else coverage.copy()
                for offsets, sizes in boxes_added:
                    then.add(Box(offsets, sizes))
                if then is not coverage:
                    then.num_paths = len(paths)
                    coverage.num_paths -= sum([path in coverages for path in paths])
                    coverages.update(dict.fromkeys(paths, then))

    def holes(self) -> Iterator[FormatError]:
        yield from self._different.values()
        for path, coverage in self._coverage.items():
            hole = coverage.find_hole()
            if hole is not None:
                detail = f"no shard has the elements from {hole.offsets} up to {hole.stops}"
                yield FormatError(key=path, detail=detail)


class _Coverage:
    """Boxes of a tensor: neighbours that make one box are joined."""

    __slots__ = ("_at_start", "_at_stop", "_boxes", "_hole", "_shape", "is_whole", "num_paths")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._boxes: dict[Box, None] = {}
        self._at_start: dict[_Face, Box] = {}
        self._at_stop: dict[_Face, Box] = {}
        self._hole: list[Box | None] = []
        self.is_whole = False
        self.num_paths = 0

    def copy(self) -> _Coverage:
        other = _Coverage(self._shape)
        other._boxes = dict(self._boxes)
        other._at_start, other._at_stop = dict(self._at_start), dict(self._at_stop)
        other.is_whole = self.is_whole
        return other

    def add(self, box: Box) -> None:
        if self.is_whole or box in self._boxes:
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
