# SPDX-License-Identifier: Apache-2.0
"""Plans the copy of a snapshot: its objects, their order and writes, and the bytes to reuse.

A copy has the same objects, byte for byte, written in the order of ``docs/format.md``. Writes are
cut between spans with known checksums. Must not know storages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.checksum import MAX_BLOCK_BYTES, crc32c
from actorsnap.format.layout import chunk_key
from actorsnap.format.manifest import (
    BytesEntry,
    ManifestRecord,
    ObjectRecord,
    RankManifest,
    Stored,
    StoredChunk,
    TensorEntry,
)
from actorsnap.planning.packing import least_write_bytes
from actorsnap.planning.restore import check_chunks
from actorsnap.planning.survey import SurveyedObject


class ByteRange(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of an object."""

    start: int
    stop: int
    crc32c: int


class ObjectCopy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An object to copy.

    Attributes:
        head: The header of a data object; all of another object.
        data: The leaves' bytes after the head, rising and without gaps.
    """

    key: str
    size: int
    head: ByteRange
    data: tuple[Stored, ...] = ()

    def spans(self) -> Iterator[ByteRange]:
        """Yields all bytes, in order."""
        yield self.head
        for stored in self.data:
            start, block_bytes = stored.start, stored.block_bytes
            for value in stored.crc32c:
                stop = min(start + block_bytes, stored.stop)
                yield ByteRange(start, stop, value)
                start = stop


class CopyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a snapshot, except the commit object; manifests are written last.

    Attributes:
        sizes: Sizes of data objects, by key.
        whole: The owner index, if there is one, then the rank manifests.
    """

    sizes: dict[str, int]
    whole: tuple[ObjectCopy, ...]

    @property
    def objects(self) -> Iterator[tuple[str, int]]:
        """Yields keys and sizes."""
        yield from self.sizes.items()
        for each in self.whole:
            yield each.key, each.size

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.objects)


def plan_copy(
    objects: Iterable[SurveyedObject],
    manifests: Iterable[ManifestRecord],
    owners: tuple[str, bytes] | None = None,
) -> CopyPlan:
    """Returns the objects to copy.

    Args:
        owners: The owner index, if there is one.
    """
    whole: list[ObjectCopy] = []
    if owners is not None:
        key, encoded = owners
        whole.append(_whole(key, len(encoded), crc32c(encoded)))
    whole += [_whole(each.key, each.size, each.crc32c) for each in manifests]
    sizes = dict(chain.from_iterable(each.stored_objects for each in objects))
    return CopyPlan(sizes=sizes, whole=tuple(whole))


def _whole(key: str, size: int, crc: int) -> ObjectCopy:
    return ObjectCopy(key=key, size=size, head=ByteRange(0, size, crc))


def data_copies(manifests: Iterable[RankManifest], keys: Collection[str]) -> list[ObjectCopy]:
    """Returns the copies of some data objects, from the manifests that list them.

    Raises:
        FormatError: Ranks contradict each other about an object, or some of its bytes belong to no
            leaf.
    """
    records: dict[str, ObjectRecord] = {}
    chunks: dict[str, set[StoredChunk]] = {}
    data: dict[str, set[Stored]] = {}
    for manifest in manifests:
        for record in manifest.objects:
            if record.key not in keys:
                continue
            if not records.setdefault(record.key, record).is_like(record):
                raise FormatError(key=record.key, detail="ranks disagree about its size or header")
            chunks.setdefault(record.key, set()).update(record.chunks)
            data.setdefault(record.key, set())
        for entry in manifest.entries:
            if isinstance(entry, TensorEntry | BytesEntry) and entry.data.start < entry.data.stop:
                key = manifest.objects[entry.data.object].key
                if key in keys:
                    # The object's number differs between manifests of ranks that share a leaf.
                    data[key].add(msgspec.structs.replace(entry.data, object=0))
    copies: list[ObjectCopy] = []
    for key, record in records.items():
        if chunks[key]:
            copies += _chunk_objects(record, chunks[key])
        else:
            copies.append(_data_object(record, data[key]))
    return copies


def _chunk_objects(record: ObjectRecord, chunks: Collection[StoredChunk]) -> list[ObjectCopy]:
    return [
        _whole(chunk_key(record.key, chunk.start), chunk.size, chunk.crc32c)
        for chunk in check_chunks(record.key, record.size, chunks)
    ]


def _data_object(record: ObjectRecord, data: Collection[Stored]) -> ObjectCopy:
    ordered = tuple(sorted(data, key=lambda stored: stored.start))
    at = record.header_bytes
    for start, stop in chain(((s.start, s.stop) for s in ordered), [(record.size, record.size)]):
        if start != at:
            what = "belong to no leaf" if start > at else "belong to several leaves"
            detail = f"the bytes from {min(at, start)} up to {max(at, start)} {what}"
            raise FormatError(key=record.key, detail=detail)
        at = stop
    head = ByteRange(0, record.header_bytes, record.header_crc32c)
    return ObjectCopy(key=record.key, size=record.size, head=head, data=ordered)


def split_writes(
    copied: ObjectCopy, *, chunk_bytes: int, min_write_bytes: int = 1, max_writes: int | None = None
) -> Iterator[tuple[ByteRange, ...]]:
    """Yields the object's spans, write by write.

    Args:
        chunk_bytes: Largest write, unless one span or the other limits need more.
        min_write_bytes: Smallest write, except for the last one.
        max_writes: None: no limit.
    """
    least = least_write_bytes(copied.size, min_write_bytes=min_write_bytes, max_writes=max_writes)
    enough = max(chunk_bytes - MAX_BLOCK_BYTES, least, 1)
    batch: list[ByteRange] = []
    for span in copied.spans():
        batch.append(span)
        if span.stop - batch[0].start >= enough:
            yield tuple(batch)
            batch = []
    if batch:
        yield tuple(batch)


def reusable(plan: CopyPlan, found: Mapping[str, int], stored: Collection[str]) -> frozenset[str]:
    """Returns the keys of an interrupted copy's objects that may be kept if their bytes are right.

    Correct bytes are not enough: a file that was never synced reads well until the machine fails.

    Args:
        found: Keys and sizes in the attempt's folder at the destination.
        stored: Keys that a copy has noted as complete.
    """
    noted = frozenset(stored)
    return frozenset([key for key, size in plan.objects if key in noted and found.get(key) == size])
