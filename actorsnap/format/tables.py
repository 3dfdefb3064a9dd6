# SPDX-License-Identifier: Apache-2.0
"""The codec of rank manifests, which begin with a table of their entries (``docs/format.md``).

A reader decodes a whole manifest; or the table from a prefix, and then the pages it needs. Entries
come only from bytes with the right checksum, and each is checked by itself. The whole manifest is
also checked for contradictions between entries. Older manifests are one JSON object.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import msgspec

from actorsnap.errors import ChecksumMismatch, FormatError, UsageError
from actorsnap.format.checksum import MAX_BLOCK_BYTES, Buffer, crc32c, is_block_count
from actorsnap.format.compression import is_frame_count
from actorsnap.format.geometry import extent_bytes
from actorsnap.format.layout import (
    MAX_BYTES,
    dtype_itemsize,
    is_compressed_key,
    is_well_formed_key,
    manifest_key,
)
from actorsnap.format.manifest import (
    COMPOSITE_PARTS,
    CRC_PREFIX,
    DECODE_ERRORS,
    ENCODE_ERRORS,
    BlockBytes,
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    Crc,
    Entry,
    ManifestRecord,
    ObjectRecord,
    RankManifest,
    SaveRecord,
    Size,
    Strict,
    TensorEntry,
    ViewEntry,
    check_attempt,
    encoder,
    fail,
    is_same_tensor,
    seal,
    unseal,
)

PAGE_ENTRIES = 16
"""Entries of each page but the last."""

PREFIX_BYTES = 16 << 10
"""The bytes to read first: they hold the table of some 2,000 entries."""

MAX_GAP_BYTES = 16 << 10
"""Unwanted bytes that are read rather than sending another request."""

_MEMORY_FORMAT_DIMS = {"channels_last": 4, "channels_last_3d": 5}
_MANY_DIMS = 64
"""From here on, products of sizes are bounded during computation."""


class EntryPage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The lines of ``PAGE_ENTRIES`` entries. ``size`` in bytes.

    Attributes:
        has_containers: Whether it may have containers; no path leads to empty ones.
    """

    size: Size
    crc32c: Crc
    has_containers: bool = True


class ManifestHead(Strict, frozen=True, kw_only=True, omit_defaults=False):
    """The first line of a rank manifest. See ``RankManifest``.

    ``paths`` has the CRC32C of each entry's path, of 4 bytes, little endian.
    """

    attempt: str
    rank: Size
    block_bytes: BlockBytes = MAX_BLOCK_BYTES
    objects: tuple[ObjectRecord, ...]
    save: SaveRecord
    optimizers: dict[str, str]
    pages: tuple[EntryPage, ...]
    paths: bytes


class _NameOnly(msgspec.Struct):
    kind: str
    path: str


class _SaveOnly(msgspec.Struct):
    save: SaveRecord | None = None


_head_decoder = msgspec.json.Decoder(ManifestHead)
_entry_decoder = msgspec.json.Decoder(Entry)
_name_decoder = msgspec.json.Decoder(_NameOnly)
_save_decoder = msgspec.json.Decoder(_SaveOnly)
_older_decoder = msgspec.json.Decoder(RankManifest)


class ManifestTable:
    """The head of a rank manifest: finds, reads and checks its pages.

    Attributes:
        offsets: Offsets of the pages in the manifest; the last one is the manifest's size.
    """

    def __init__(self, head: ManifestHead, head_bytes: int, key: str) -> None:
        self.head = head
        self.key = key
        sizes = [page.size for page in head.pages]
        self.offsets = tuple(accumulate(sizes, initial=head_bytes))
        num_entries, rest = divmod(len(head.paths), 4)
        if rest or len(head.pages) != -(-num_entries // PAGE_ENTRIES):
            fail(key, f"{len(head.pages)} pages for {len(head.paths)} bytes of path checksums")
        _check_key(head.attempt, head.rank, key)
        if "tables" not in head.save.features:
            fail(key, "it has a table, and its save does not name the feature")
        self._hashes = struct.unpack(f"<{num_entries}I", head.paths)
        self._extents = _check_objects(head.objects, head.attempt, key)

    def pages_of(self, paths: Iterable[str]) -> list[int]:
        """Returns the pages that have the entries of these paths, and perhaps a few more."""
        wanted = frozenset(_hashes_of(paths))
        at = [number for number, path in enumerate(self._hashes) if path in wanted]
        return list(dict.fromkeys([number // PAGE_ENTRIES for number in at]))

    @property
    def container_pages(self) -> list[int]:
        """The pages that may have containers."""
        return [number for number, page in enumerate(self.head.pages) if page.has_containers]

    def runs(self, pages: Iterable[int], max_gap_bytes: int = MAX_GAP_BYTES) -> Iterator[range]:
        """Yields the pages to read together, to get rising ``pages`` and small gaps between."""
        first = stop = -1
        for page in pages:
            if first >= 0 and self.offsets[page] - self.offsets[stop] > max_gap_bytes:
                yield range(first, stop)
                first = -1
            first, stop = page if first < 0 else first, page + 1
        if first >= 0:
            yield range(first, stop)

    def span(self, run: range) -> tuple[int, int]:
        """Returns where adjacent pages start and stop in the manifest."""
        return self.offsets[run.start], self.offsets[run.stop]

    def split(self, first: int, data: Buffer) -> Iterator[tuple[int, memoryview]]:
        """Yields adjacent pages with their numbers. ``data`` is all of them, from ``first``.

        Raises:
            ChecksumMismatch: A page is damaged. Those before it were yielded.
        """
        begin, view = self.offsets[first], memoryview(data)
        stop = bisect_right(self.offsets, begin + len(view)) - 1
        if self.offsets[stop] != begin + len(view):
            raise ChecksumMismatch(key=self.key, detail=f"page {stop} is cut off")
        for number in range(first, stop):
            page = view[self.offsets[number] - begin : self.offsets[number + 1] - begin]
            if crc32c(page) != self.head.pages[number].crc32c:
                raise ChecksumMismatch(key=self.key, detail=f"page {number} is damaged")
            yield number, page

    def entries(
        self,
        pages: Mapping[int, memoryview],
        wants: Callable[[str], bool] | None = None,
        *,
        wants_containers: bool = False,
    ) -> list[Entry]:
        """Returns the entries of some pages of ``split``, in order.

        Entries whose path ``wants`` refuses are not decoded. Not checked is what spans several
        entries: bases of views, parts of composites, repeated paths.

        Args:
            wants_containers: All containers are wanted.

        Raises:
            FormatError: A page violates version 1.
        """
        entries: list[Entry] = []
        for number in sorted(pages):
            entries += self._decode_page(number, pages[number], wants, wants_containers)
        _check_each(entries, self._extents, self.key)
        return entries

    def manifest(self, data: Buffer, wants: Callable[[str], bool] | None = None) -> RankManifest:
        """Returns the whole manifest, from the bytes after the head. Raises as ``entries``.

        Entries whose path ``wants`` refuses are not decoded, and contradictions between entries not
        found.
        """
        num_bytes = self.offsets[-1] - self.offsets[0]
        if len(data) != num_bytes:
            raise ChecksumMismatch(
                key=self.key,
                detail=f"it has {len(data)} bytes after its head, and {num_bytes} were written",
            )
        entries = self.entries(dict(self.split(0, data)), wants)
        if wants is None:
            _check_together(entries, self.key)
        return self.with_entries(entries)

    def with_entries(self, entries: Iterable[Entry]) -> RankManifest:
        """Returns a manifest with these entries alone."""
        head = self.head
        return RankManifest(
            attempt=head.attempt,
            rank=head.rank,
            block_bytes=head.block_bytes,
            objects=head.objects,
            entries=tuple(entries),
            save=head.save,
            optimizers=head.optimizers,
        )

    def _decode_page(
        self,
        number: int,
        page: memoryview,
        wants: Callable[[str], bool] | None,
        wants_containers: bool,
    ) -> list[Entry]:
        try:
            if wants is None:
                entries = _entry_decoder.decode_lines(page)
                paths = [entry.path for entry in entries]
            else:
                lines = bytes(page).splitlines()
                names = [_name_decoder.decode(line) for line in lines]
                paths = [name.path for name in names]
                entries = [
                    _entry_decoder.decode(line)
                    for line, name in zip(lines, names, strict=True)
                    if wants(name.path) or (wants_containers and name.kind == "container")
                ]
        except DECODE_ERRORS as error:
            raise FormatError(key=self.key, detail=str(error)) from error
        if not self.head.pages[number].has_containers and _has_containers(entries):
            fail(self.key, f"page {number} has containers, which the table denies")
        at = number * PAGE_ENTRIES
        if _hashes_of(paths) != self._hashes[at : at + PAGE_ENTRIES]:
            fail(self.key, f"the entries of page {number} are not those of the table")
        return entries


def _has_containers(entries: Iterable[Entry]) -> bool:
    return ContainerEntry in map(type, entries)


def _hashes_of(paths: Iterable[str]) -> tuple[int, ...]:
    paths = list(paths)
    try:
        return tuple(map(crc32c, map(str.encode, paths)))
    except UnicodeEncodeError:  # typed by a user: those of a manifest have no surrogates
        return tuple([crc32c(path.encode("utf-8", "surrogatepass")) for path in paths])


def encode_rank_manifest(manifest: RankManifest) -> bytes:
    """Encodes a rank manifest. Needs ``save`` and ``optimizers``.

    Raises:
        UsageError: A value is not JSON. The message names the path.
    """
    entries = manifest.entries
    try:
        groups = [entries[at : at + PAGE_ENTRIES] for at in range(0, len(entries), PAGE_ENTRIES)]
        # msgspec keeps the iterator of anything but a list for ever.
        pages = [encoder.encode_lines(list(group)) for group in groups]
        hashes = _hashes_of([entry.path for entry in entries])
        head = ManifestHead(
            attempt=manifest.attempt,
            rank=manifest.rank,
            block_bytes=manifest.block_bytes,
            objects=manifest.objects,
            save=manifest.save,  # type: ignore[arg-type]
            optimizers=manifest.optimizers,  # type: ignore[arg-type]
            pages=tuple(
                [
                    EntryPage(len(page), crc32c(page), _has_containers(group))
                    for page, group in zip(pages, groups, strict=True)
                ]
            ),
            paths=struct.pack(f"<{len(hashes)}I", *hashes),
        )
        return b"".join([seal(encoder.encode(head)), b"\n", *pages])
    except ENCODE_ERRORS as error:
        raise UsageError(_why_not_encoded(manifest, error)) from error


def _why_not_encoded(manifest: RankManifest, error: Exception) -> str:
    for entry in manifest.entries:
        try:
            encoder.encode(entry)
        except ENCODE_ERRORS as cause:
            return f"{entry.path!r} cannot be written as JSON: {cause}"
    return f"the manifest of rank {manifest.rank} cannot be written as JSON: {error}"


def decode_table(prefix: Buffer, key: str) -> ManifestTable | None:
    """Decodes and checks the table of a rank manifest; errors name ``key``.

    Returns:
        None: ``prefix`` is too short.

    Raises:
        ChecksumMismatch: The table is damaged.
        FormatError: It is intact, but violates version 1.
    """
    prefix = bytes(prefix)
    size = prefix.find(b"\n")
    if size < 0:
        return None
    body = unseal(prefix[:size])
    if body is None:
        raise ChecksumMismatch(key=key, detail="the checksum of its first line does not match")
    try:
        head = _head_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise FormatError(key=key, detail=str(error)) from error
    return ManifestTable(head, size + 1, key)


def decode_rank_manifest(
    data: Buffer,
    key: str,
    record: ManifestRecord | None = None,
    wants: Callable[[str], bool] | None = None,
) -> RankManifest:
    """Decodes and checks a rank manifest; errors name ``key``.

    Args:
        record: The commit object's, of an older manifest.
        wants: See ``ManifestTable.manifest``. Older manifests are decoded as a whole.

    Raises:
        ChecksumMismatch: It is damaged.
        FormatError: It is intact, but violates version 1.
    """
    data = bytes(data)
    if record is not None:
        return _decode_older(data, key, record)
    table = decode_table(data, key)
    if table is None:
        raise ChecksumMismatch(key=key, detail="it ends within its first line")
    return table.manifest(memoryview(data)[table.offsets[0] :], wants)


def _decode_older(data: bytes, key: str, record: ManifestRecord) -> RankManifest:
    if len(data) != record.size:
        raise ChecksumMismatch(
            key=key, detail=f"it has {len(data)} bytes, and {record.size} were written"
        )
    if (crc := crc32c(data)) != record.crc32c:
        raise ChecksumMismatch(
            key=key, detail=f"its CRC32C is {crc:08x}, and {record.crc32c:08x} was written"
        )
    try:
        manifest = _older_decoder.decode(unseal(data) or data)
    except DECODE_ERRORS as error:
        raise FormatError(key=key, detail=str(error)) from error
    if manifest.save is not msgspec.UNSET and "tables" in manifest.save.features:
        fail(key, "it has no table, and its save names the feature")
    _check_key(manifest.attempt, manifest.rank, key)
    extents = _check_objects(manifest.objects, manifest.attempt, key)
    _check_each(manifest.entries, extents, key)
    _check_together(manifest.entries, key)
    return manifest


def decode_lone_rank_manifest(data: bytes, key: str) -> tuple[RankManifest, ManifestRecord]:
    """Decodes and checks a rank manifest without a commit object; returns its record, too.

    Well-formed damage of an older release's manifest, which has no checksum, is not detected.

    Raises:
        ChecksumMismatch: Its own checksum does not match.
        FormatError: It violates version 1.
    """
    record = ManifestRecord(key=key, size=len(data), crc32c=crc32c(data))
    if b"\n" in data:
        return decode_rank_manifest(data, key), record
    has_checksum = data.startswith(CRC_PREFIX)
    if has_checksum and unseal(data) is None:
        raise ChecksumMismatch(key=key, detail="its own checksum does not match")
    manifest = _decode_older(data, key, record)
    if manifest.save is not msgspec.UNSET and not has_checksum:
        raise FormatError(key=key, detail="its own checksum is missing")
    return manifest, record


def check_foreign_manifest(manifest: RankManifest) -> None:
    """Checks what a reader found in files of another format, as a manifest of ours is checked.

    Raises:
        FormatError: Bytes are outside of their file, or of another number than dtype and shape
            say; a shard is outside of its tensor, a view of its base. Names the leaf.
    """
    key = f"the index of {manifest.attempt}"
    for record in manifest.objects:
        if not is_well_formed_key(record.key):
            fail(key, f"{record.key!r:.200} is not the name of a file")
    extents = [(record.header_bytes, record.size) for record in manifest.objects]
    _check_each(manifest.entries, extents, key, has_checksums=False)
    _check_together(manifest.entries, key)


def check_disjoint(
    manifests: Iterable[RankManifest], joined: Mapping[str, Sequence[tuple[str, int, int]]]
) -> None:
    """Checks that leaves of another format have the same bytes, or none in common.

    Args:
        joined: Objects that are no files: key, start and stop of each of their pieces.

    Raises:
        FormatError: Two leaves overlap. Names them.
    """
    places: dict[tuple[str, int, int], str] = {}
    for manifest in manifests:
        for entry in manifest.entries:
            if isinstance(entry, TensorEntry | BytesEntry) and entry.data.start < entry.data.stop:
                data = entry.data
                key = manifest.objects[data.object].key
                for place in joined.get(key, [(key, data.start, data.stop)]):
                    places.setdefault(place, entry.path)
    last, end, before = "", 0, ""
    for (name, start, stop), path in sorted(places.items()):
        if name == last and start < end:
            fail(name, f"{before!r} and {path!r} overlap at byte {start}")
        last, end, before = name, stop, path


def world_size_of(data: bytes) -> int:
    """Returns the world size that a rank manifest records; 1 if it is older or unreadable."""
    line = data.partition(b"\n")[0]
    try:
        save = _save_decoder.decode(unseal(line) or line).save
    except DECODE_ERRORS:
        return 1
    return 1 if save is None else save.world_size


# Checks of well-typed documents


def _check_key(attempt: str, rank: int, key: str) -> None:
    check_attempt(attempt, key)
    if key != manifest_key(attempt, rank):
        fail(
            key,
            f"it is the manifest of rank {rank} of attempt {attempt!r:.200}: the file or "
            "its folder was renamed, or copied from another snapshot; undo that",
        )


def _check_each(
    entries: Iterable[Entry],
    extents: Sequence[tuple[int, int]],
    key: str,
    *,
    has_checksums: bool = True,
) -> None:
    of_type = _by_type(entries)
    _check_tensors(of_type.get(TensorEntry, []), extents, key, has_checksums)
    for entry in of_type.get(BytesEntry, []):
        _check_stored(entry, extents, key, has_checksums)
    for view in of_type.get(ViewEntry, []):
        if len(view.shape) != len(view.strides) or _volume(view.shape) > MAX_BYTES:
            fail(key, f"{view.path!r}: invalid strides {view.strides} for shape {view.shape}")
    for entry in of_type.get(CompositeEntry, []):
        if entry.parts != COMPOSITE_PARTS[entry.layout]:
            fail(key, f"{entry.path!r}: {entry.parts!r:.200} are not the parts of {entry.layout}")
        if _volume(entry.shape) > MAX_BYTES:
            fail(key, f"{entry.path!r} has shape {entry.shape}")


def _check_together(entries: Sequence[Entry], key: str) -> None:
    """Checks paths, bases of views, and parts of composites."""
    boxes: frozenset[str] = frozenset()
    if len({entry.path for entry in entries}) != len(entries):
        boxes = _paths_of_boxes(entries, key)
    if {ViewEntry, CompositeEntry}.isdisjoint(map(type, entries)):
        return
    of_type = _by_type(entries)
    tensors: list[TensorEntry] = of_type.get(TensorEntry, [])
    views: list[ViewEntry] = of_type.get(ViewEntry, [])
    if views:
        bases = {entry.path: entry for entry in tensors if entry.path not in boxes}
        _check_views(views, bases, key)
    if composites := of_type.get(CompositeEntry):
        dense = {entry.path for entry in tensors}
        dense.update([entry.path for entry in views])
        _check_composites(composites, dense, key)


def _by_type(entries: Iterable[Entry]) -> dict[type, list[Any]]:
    of_type: dict[type, list[Any]] = {}
    for entry in entries:
        of_type.setdefault(type(entry), []).append(entry)
    return of_type


def _paths_of_boxes(entries: Sequence[Entry], key: str) -> frozenset[str]:
    """Returns repeated paths, whose entries must be different boxes of one tensor."""
    firsts: dict[str, Entry] = {}
    offsets: dict[str, set[tuple[int, ...]]] = {}
    for entry in entries:
        first = firsts.setdefault(entry.path, entry)
        if first is entry:
            continue
        if not (
            isinstance(entry, TensorEntry)
            and isinstance(first, TensorEntry)
            and entry.offsets is not None
            and first.offsets is not None
        ):
            fail(key, f"two entries have the path {entry.path!r}")
        if not is_same_tensor(first, entry):
            fail(key, f"shards of several tensors are {entry.path!r}")
        seen = offsets.setdefault(entry.path, {first.offsets})
        if entry.offsets in seen:
            fail(key, f"two shards of {entry.path!r} are at the same place")
        seen.add(entry.offsets)
    return frozenset(offsets)


def _volume(shape: Sequence[int]) -> int:
    """Returns the number of elements; of very many dims, a bound above ``MAX_BYTES`` suffices.

    A hostile shape of a million sizes must not cost a million-digit product.
    """
    if len(shape) < _MANY_DIMS:
        return prod(shape)
    volume = 1
    for size in shape:
        volume *= size
        if volume > MAX_BYTES:
            break
    return 0 if 0 in shape else volume


def _check_objects(
    objects: Sequence[ObjectRecord], attempt: str, key: str
) -> list[tuple[int, int]]:
    """Checks object records; returns each object's data range, limited to the rank's part."""
    folder = attempt + "/"
    for record in objects:
        if not is_well_formed_key(record.key) or not record.key.startswith(folder):
            fail(key, f"{record.key!r:.200} is not a key in {folder!r:.200}")
        if record.header_bytes > record.size:
            fail(
                key,
                f"{record.key!r} of {record.size} bytes has a header of {record.header_bytes}",
            )
        if bool(record.chunks) != is_compressed_key(record.key):
            fail(key, f"{record.key!r} has {len(record.chunks)} chunks")
    if len({record.key for record in objects}) != len(objects):
        fail(key, "two records have the same key")
    return [_check_chunks(record, key) for record in objects]


def _check_chunks(record: ObjectRecord, key: str) -> tuple[int, int]:
    if not record.chunks:
        return record.header_bytes, record.size
    at = record.chunks[0].start
    for chunk in record.chunks:
        if chunk.start != at or not at < chunk.stop <= record.size:
            fail(
                key,
                f"{record.key!r}: invalid chunk [{chunk.start}, {chunk.stop}), expected from {at}",
            )
        if not is_frame_count(chunk.stop - at, chunk.frames):
            fail(key, f"{record.key!r}: invalid frames of the chunk from {at}: {chunk.frames!r}")
        at = chunk.stop
    return max(record.header_bytes, record.chunks[0].start), at


def _check_stored(
    entry: TensorEntry | BytesEntry,
    extents: Sequence[tuple[int, int]],
    key: str,
    has_checksums: bool,
) -> None:
    """Checks that a byte range is in its object's data, and has one checksum per block."""
    data = entry.data
    start, stop = data.start, data.stop
    if data.object >= len(extents):
        fail(key, f"{entry.path!r} is in object {data.object} of {len(extents)}")
    first, last = extents[data.object]
    if not first <= start <= stop <= last:
        fail(key, f"{entry.path!r} is at [{start}, {stop}), not in [{first}, {last})")
    if has_checksums and not is_block_count(stop - start, len(data.crc32c)):
        fail(key, f"{entry.path!r} of {stop - start} bytes has {len(data.crc32c)} checksums")


def _check_tensors(
    entries: Sequence[TensorEntry],
    extents: Sequence[tuple[int, int]],
    key: str,
    has_checksums: bool,
) -> None:
    """``_check_tensor`` for each: most are like others, except for where they are stored."""
    seen: set[object] = set()
    latest: object = None
    first = last = 0
    for entry in entries:
        data = entry.data
        start, stop = data.start, data.stop
        kind = (
            data.object,
            stop - start,
            len(data.crc32c),
            entry.dtype,
            entry.shape,
            entry.offsets,
            entry.global_shape,
            entry.memory_format,
        )
        if kind != latest:  # quicker than a hash, and neighbours are often alike
            if kind not in seen:
                _check_tensor(entry, extents, key, has_checksums)
                seen.add(kind)
            latest = kind
            first, last = extents[data.object]
        if not first <= start <= stop <= last:
            _check_stored(entry, extents, key, has_checksums)


def _check_tensor(
    entry: TensorEntry, extents: Sequence[tuple[int, int]], key: str, has_checksums: bool
) -> None:
    """Checks where a tensor is stored, and that dtype, shape and offsets are possible."""
    _check_stored(entry, extents, key, has_checksums)
    shape = entry.shape
    num_bytes = entry.data.stop - entry.data.start
    itemsize = dtype_itemsize(entry.dtype)
    volume = _volume(shape)
    if volume > MAX_BYTES or (itemsize is not None and volume * itemsize != num_bytes):
        fail(key, f"{entry.path!r} of {num_bytes} bytes is not {entry.dtype:.80} {shape}")
    if entry.offsets is not None or entry.global_shape is not None:
        _check_shard(entry, key)
    if entry.memory_format and _MEMORY_FORMAT_DIMS[entry.memory_format] != len(shape):
        fail(key, f"{entry.path!r} of shape {shape} is not {entry.memory_format}")


def _check_shard(entry: TensorEntry, key: str) -> None:
    whole = entry.global_shape
    offsets = entry.offsets
    shape = entry.shape
    if whole is not None and offsets is not None and len(whole) == len(offsets) == len(shape):
        for offset, size, end in zip(offsets, shape, whole, strict=True):
            if offset + size > end:
                break
        else:
            if _volume(whole) <= MAX_BYTES:
                return
    fail(key, f"{entry.path!r}: no shard {shape} at {offsets} of shape {whole}")


def _check_views(views: Sequence[ViewEntry], bases: Mapping[str, TensorEntry], key: str) -> None:
    for view in views:
        base = bases.get(view.of)
        if base is None:
            fail(key, f"{view.path!r} views {view.of!r}, which is not a tensor entry")
        # An unknown dtype has at least one byte.
        itemsize = dtype_itemsize(view.dtype) or 1
        end = view.offset + extent_bytes(view.shape, view.strides, itemsize)
        base_bytes = base.data.stop - base.data.start
        if end > base_bytes:
            fail(key, f"{view.path!r} ends at {end} of the {base_bytes} bytes of {view.of!r}")


def _check_composites(entries: Sequence[CompositeEntry], dense: Collection[str], key: str) -> None:
    """Checks parts. Other ranks may have stored those of a replicated composite."""
    for entry in entries:
        for part in entry.parts:
            if not entry.replicated and f"{entry.path}@{part}" not in dense:
                fail(key, f"{entry.path!r} has no part {part!r}")
