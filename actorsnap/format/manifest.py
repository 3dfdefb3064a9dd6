"""The schema of format version 1: commit object, rank manifests, entries (``docs/format.md``).

The only code that encodes, decodes and validates them. A valid document names only bytes that
exist, keys inside the snapshot, and views inside their base. Equal values are encoded to equal
bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite, prod
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias

import msgspec

from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.checksum import (
    MAX_BLOCK_BYTES,
    block_bytes_of,
    combine_blocks,
    crc32c,
    is_block_count,
)
from actorsnap.format.compression import is_frame_count
from actorsnap.format.geometry import extent_bytes
from actorsnap.format.layout import (
    DATA_ALIGNMENT,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    chunk_key,
    dtype_itemsize,
    is_compressed_key,
    is_well_formed_key,
    manifest_key,
)

FORMAT_NAME = "actorsnap"
FORMAT_VERSION = 1
FEATURES = ("annotations", "block_sizes", "compression", "owners")
"""Features that this release reads. A snapshot with another one is refused."""

COMMIT_KEY = "actorsnap.json"
OLDER_COMMIT_KEY = ".actorsnap"
"""Read, but no longer written: shells and copying programs skip dotfiles."""

COMMIT_KEYS = (COMMIT_KEY, OLDER_COMMIT_KEY)
"""The first one wins."""

MAX_NESTING = 900
"""Of inline values."""

COMPOSITE_PARTS: Mapping[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
    "quantized_tensor": ("int_repr",),
    "quantized_channel": ("int_repr", "scales", "zero_points"),
}
"""The parts of each layout, in order."""

_MEMORY_FORMAT_DIMS = {"channels_last": 4, "channels_last_3d": 5}
_MAX_JSON_DEPTH = 500
_MANY_DIMS = 64
"""From here on, products of sizes are bounded during computation."""

# Bounds are checked on decoding only.
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_Crc: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_WorldSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
_BlockBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=MAX_BLOCK_BYTES, le=MAX_BLOCK_BYTES)]
_HeaderBytes: TypeAlias = Annotated[
    int,
    msgspec.Meta(
        ge=DATA_ALIGNMENT, le=MAX_HEADER_BYTES + 2 * DATA_ALIGNMENT, multiple_of=DATA_ALIGNMENT
    ),
]

# Literals, because omit_defaults compares by identity: decoding returns the default string itself,
# so a decoded value is encoded to the same bytes.
ContainerType: TypeAlias = Literal["dict", "ordered_dict", "counter", "list", "tuple"]
MemoryFormat: TypeAlias = Literal["channels_last", "channels_last_3d"]
TensorType: TypeAlias = Literal["tensor", "parameter", "buffer", "numpy", "numpy_scalar"]
BytesType: TypeAlias = Literal["bytes", "bytearray", "str", "json", "pickle", "numpy"]
CompositeLayout: TypeAlias = Literal[
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "quantized_tensor",
    "quantized_channel",
]


class _Data(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Refuses unknown fields: a new field needs a feature flag or a new version."""


class ManifestRecord(_Data, frozen=True, kw_only=True, gc=False):
    """A rank manifest, in the commit object. ``size`` in bytes."""

    key: str
    size: _Size
    crc32c: _Crc


class Commit(_Data, frozen=True, kw_only=True, tag_field="format", tag=FORMAT_NAME):
    """The commit object. Its presence makes a snapshot.

    Attributes:
        attempt: Folder of all other objects of this snapshot.
        created: UTC, ISO 8601 with microseconds and ``Z``.
        manifests: In rank order.
        fsync: False if the writer did not wait for the disk.
        step, metadata: The caller's; metadata is any JSON object.
    """

    format: ClassVar[str] = FORMAT_NAME
    version: int
    features: tuple[str, ...] = ()
    world_size: _WorldSize
    attempt: str
    created: str
    manifests: tuple[ManifestRecord, ...]
    fsync: bool = True
    step: _Size | None = None
    metadata: dict[str, Any] = {}


class SaveRecord(_Data, frozen=True, kw_only=True):
    """The commit object's fields in a rank manifest, from which it can be rewritten.

    ``metadata`` is empty except in rank 0's manifest.
    """

    world_size: _Size
    features: tuple[str, ...] = ()
    fsync: bool = True
    step: _Size | None = None
    metadata: dict[str, Any] = {}

    def commit(
        self, *, attempt: str, created: str, manifests: tuple[ManifestRecord, ...]
    ) -> Commit:
        return Commit(
            version=FORMAT_VERSION,
            attempt=attempt,
            created=created,
            manifests=manifests,
            **msgspec.structs.asdict(self),
        )


class StoredChunk(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Bytes ``[start, stop)`` of a compressed data object, stored as a separate object.

    Attributes:
        crc32c: Of the stored bytes.
        frames: Stored size of each frame; empty if uncompressed.
    """

    start: _Size
    stop: _Size
    crc32c: _Crc
    frames: tuple[_Size, ...] = ()

    @property
    def size(self) -> int:
        return sum(self.frames) if self.frames else self.stop - self.start


class ObjectRecord(_Data, frozen=True, kw_only=True, gc=False):
    """A data object. Sizes in bytes.

    ``chunks`` has the rank's chunks, if the object is compressed.
    """

    key: str
    size: _Size
    header_bytes: _HeaderBytes
    header_crc32c: _Crc
    chunks: tuple[StoredChunk, ...] = ()

    @property
    def stored(self) -> tuple[tuple[str, int], ...]:
        """Keys and sizes of the stored objects; of a compressed one only the rank's chunks."""
        if not self.chunks:
            return ((self.key, self.size),)
        return tuple([(chunk_key(self.key, chunk.start), chunk.size) for chunk in self.chunks])

    @property
    def part(self) -> tuple[str, int]:
        return self.key, self.chunks[0].start if self.chunks else 0

    def is_like(self, other: ObjectRecord) -> bool:
        """Whether the object is the same; chunks may differ."""
        is_same_kind = bool(self.chunks) == bool(other.chunks)
        return is_same_kind and msgspec.structs.replace(self, chunks=other.chunks) == other


class Stored(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The range of a leaf's bytes: ``[object, start, stop, crc32c]``.

    ``object`` indexes the manifest's ``objects``; ``start`` and ``stop`` are byte offsets in it;
    ``crc32c`` has one value per block, from ``start`` on.
    """

    object: _Size
    start: _Size
    stop: _Size
    crc32c: tuple[_Crc, ...]

    @property
    def block_bytes(self) -> int:
        """The last block may be shorter."""
        return block_bytes_of(self.stop - self.start, len(self.crc32c))


class ContainerEntry(_Data, frozen=True, kw_only=True, tag_field="kind", tag="container"):
    """A dict, OrderedDict, Counter, list or tuple. Optional for a plain dict with children.

    ``attributes`` holds a module state dict's ``_metadata``, in the inline encoding.
    """

    path: _Text
    type: ContainerType
    attributes: Any = None


class TensorEntry(_Data, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="tensor"):
    """A dense tensor or numpy array, C-contiguous, little endian.

    Attributes:
        dtype: Torch's (``"float32"``), or numpy's (``"<f8"``) if ``type`` is ``"numpy"`` or
            ``"numpy_scalar"``.
        shape: Of the bytes stored here, in elements.
        global_shape, offsets: Shards only: the whole tensor's shape, and the shard's origin in it.
            Shards of one tensor may share their path.
        replicated: Whether every rank held the same value.
        memory_format: Of the restored tensor; None: row-major.
        attributes: A parameter's plain attributes, in the inline encoding.
    """

    path: _Text
    dtype: str
    shape: tuple[_Size, ...]
    data: Stored
    type: TensorType = "tensor"
    requires_grad: bool = False
    global_shape: tuple[_Size, ...] | None = None
    offsets: tuple[_Size, ...] | None = None
    replicated: bool = False
    memory_format: MemoryFormat | None = None
    attributes: dict[str, Any] | None = None


class ViewEntry(_Data, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="view"):
    """A tensor that shares memory with another entry of the same rank manifest.

    ``of`` is the path of the base, a ``TensorEntry``. ``strides`` in elements of ``dtype``;
    ``offset`` in bytes from the base's first byte.
    """

    path: _Text
    of: str
    dtype: str
    shape: tuple[_Size, ...]
    strides: tuple[_Size, ...]
    offset: _Size = 0
    type: TensorType = "tensor"
    requires_grad: bool = False
    replicated: bool = False


class CompositeEntry(_Data, frozen=True, kw_only=True, tag_field="kind", tag="composite"):
    """A sparse or quantized tensor, made of dense parts.

    The part ``p`` is the entry at ``<path>@<p>``. ``parameters`` has the other values
    (``is_coalesced``; ``scale``, ``zero_point``; ``axis``), in the inline encoding.
    """

    path: _Text
    layout: CompositeLayout
    dtype: str
    shape: tuple[_Size, ...]
    parts: tuple[str, ...]
    parameters: dict[str, Any] = {}
    type: TensorType = "tensor"
    requires_grad: bool = False
    replicated: bool = False


class ValueEntry(_Data, frozen=True, kw_only=True, tag_field="kind", tag="value"):
    """A small non-tensor leaf, in the inline encoding."""

    path: _Text
    value: Any = None
    replicated: bool = False


class BytesEntry(_Data, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="bytes"):
    """A large leaf stored as raw bytes.

    ``str`` is UTF-8 with surrogates passed; ``json`` is in the inline encoding; ``numpy`` in
    ``numpy.lib.format`` v1.
    """

    path: _Text
    type: BytesType
    data: Stored
    replicated: bool = False


Entry: TypeAlias = (
    ContainerEntry | TensorEntry | ViewEntry | CompositeEntry | ValueEntry | BytesEntry
)


class RankManifest(_Data, frozen=True, kw_only=True, omit_defaults=False):
    """The entries that one rank stored, in traversal order.

    Children of a dict or list are ordered by their first entries. ``save`` and ``optimizers``
    (qualified class names by path) come with the feature ``annotations``.
    """

    attempt: str
    rank: _Size
    block_bytes: _BlockBytes = MAX_BLOCK_BYTES
    objects: tuple[ObjectRecord, ...] = ()
    entries: tuple[Entry, ...] = ()
    save: SaveRecord | msgspec.UnsetType = msgspec.UNSET
    optimizers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


_commit_decoder = msgspec.json.Decoder(Commit)
_manifest_decoder = msgspec.json.Decoder(RankManifest)
_encoder = msgspec.json.Encoder(order="deterministic")

# msgspec raises its own errors and UnicodeError (both ValueErrors), and RecursionError.
_DECODE_ERRORS = (ValueError, RecursionError)
_ENCODE_ERRORS = (TypeError, ValueError, RecursionError)

_CRC_PREFIX = b'{"crc32c":"'
_CRC_AT = slice(len(_CRC_PREFIX), len(_CRC_PREFIX) + 8)
_CRC_END = len(_CRC_PREFIX) + len('00000000",')


class _Head(msgspec.Struct):
    """Checked before the other members, whose types a newer version may change."""

    format: Any = None
    version: Any = None
    features: Any = ()


_head_decoder = msgspec.json.Decoder(_Head)


def encode_commit(commit: Commit) -> bytes:
    """Encodes a commit object; its own checksum is the first member.

    The metadata must pass ``check_json``.
    """
    return seal(_encoder.encode(commit))


def seal(encoded: bytes) -> bytes:
    """Prepends the checksum of a JSON object with members as its first member."""
    body = bytearray(_CRC_PREFIX + b'00000000",' + encoded[1:])
    body[_CRC_AT] = b"%08x" % crc32c(body)
    return bytes(body)


def decode_commit(data: bytes | bytearray | memoryview, key: str = COMMIT_KEY) -> Commit:
    """Decodes and checks a commit object; errors name ``key``.

    Raises:
        ChecksumMismatch: It is damaged; no other program uses the name.
        NotASnapshot: It is intact, but of another format (``found="unknown"``).
        UnsupportedFormat: It has a newer version or an unknown feature.
        FormatError: It is intact, but violates version 1.
    """
    data = bytes(data)
    try:
        head = _head_decoder.decode(data)
    except _DECODE_ERRORS:
        head = _Head()
    is_ours = head.format == FORMAT_NAME
    body = unseal(data)
    if body is None:
        if is_ours and not data.startswith(_CRC_PREFIX):
            _check_version(head.version, key)  # a newer one may have moved the checksum
        raise ChecksumMismatch(
            key=key,
            detail="the commit object is damaged: its checksum does not fit",
        )
    if not is_ours:
        raise NotASnapshot(key=key, detail=f"its format is {_shown(head.format)}", found="unknown")
    _check_version(head.version, key)
    _check_features(head, key)
    try:
        commit = _commit_decoder.decode(body)
    except _DECODE_ERRORS as error:
        raise FormatError(key=key, detail=str(error)) from error
    _check_commit(commit, key)
    return commit


def unseal(data: bytes) -> bytes | None:
    """Returns a sealed JSON object without its checksum; None if it is damaged or not sealed."""
    if not data.startswith(_CRC_PREFIX) or data[_CRC_AT.stop : _CRC_END] != b'",':
        return None
    crc = crc32c(memoryview(data)[_CRC_END - 2 :], crc32c(_CRC_PREFIX + b"00000000"))
    # Bytes, not numbers: a flipped bit may turn a hex digit into upper case.
    return b"{" + data[_CRC_END:] if data[_CRC_AT] == b"%08x" % crc else None


def _check_version(version: object, key: str) -> None:
    if type(version) is int and version > FORMAT_VERSION:
        raise UnsupportedFormat(
            key=key,
            detail=f"the snapshot is of format version {_shown(version)}, and this release "
            f"reads up to version {FORMAT_VERSION}. Install a newer actorsnap",
        )


def _check_features(head: _Head, key: str) -> None:
    if type(head.version) is not int or head.version < 1:
        raise FormatError(key=key, detail=f"no format version: {_shown(head.version)}")
    features = head.features
    if not isinstance(features, list):
        return  # absent, or strict decoding reports it
    unknown = sorted({f for f in features if isinstance(f, str)} - set(FEATURES))
    if unknown:
        raise UnsupportedFormat(
            key=key,
            detail=f"the snapshot needs the features {', '.join(unknown)[:400]}, and this "
            f"release knows {', '.join(FEATURES)}. Install a newer actorsnap",
        )


def _shown(value: object) -> str:
    """Returns a short text. repr of a deeply nested value would recurse."""
    return repr(value)[:80] if isinstance(value, str | int) else type(value).__name__


def features_of(*, is_compressed: bool, has_owners: bool) -> tuple[str, ...]:
    optional = {"compression": is_compressed, "owners": has_owners}
    return ("annotations", "block_sizes", *[name for name, has in optional.items() if has])


def features_in(manifests: Iterable[RankManifest]) -> tuple[str, ...]:
    """Returns the features needed to read manifests without ``save``."""
    features = set()
    for manifest in manifests:
        if any([record.chunks for record in manifest.objects]):
            features.add("compression")
        for entry in manifest.entries:
            if isinstance(entry, TensorEntry | BytesEntry) and len(entry.data.crc32c) > 1:
                if entry.data.block_bytes < MAX_BLOCK_BYTES:
                    features.add("block_sizes")
    return tuple(sorted(features))


def encode_rank_manifest(manifest: RankManifest) -> bytes:
    """Encodes a rank manifest. With ``save``, its own checksum comes first.

    Raises:
        UsageError: A value is not JSON. The message names the path.
    """
    try:
        encoded = _encoder.encode(manifest)
    except _ENCODE_ERRORS as error:
        raise UsageError(_why_not_encoded(manifest, error)) from error
    return encoded if manifest.save is msgspec.UNSET else seal(encoded)


def _why_not_encoded(manifest: RankManifest, error: Exception) -> str:
    for entry in manifest.entries:
        try:
            _encoder.encode(entry)
        except _ENCODE_ERRORS as cause:
            return f"{entry.path!r} cannot be written as JSON: {cause}"
    return f"the manifest of rank {manifest.rank} cannot be written as JSON: {error}"


def decode_rank_manifest(
    data: bytes | bytearray | memoryview, record: ManifestRecord, key: str
) -> RankManifest:
    """Decodes and checks a rank manifest; errors name ``key``.

    Raises:
        ChecksumMismatch: Size or checksum differ from the commit object's.
        FormatError: It is intact, but violates version 1.
    """
    if len(data) != record.size:
        raise ChecksumMismatch(
            key=key, detail=f"it has {len(data)} bytes, and {record.size} were written"
        )
    if (crc := crc32c(data)) != record.crc32c:
        raise ChecksumMismatch(
            key=key, detail=f"its CRC32C is {crc:08x}, and {record.crc32c:08x} was written"
        )
    has_checksum = data[: len(_CRC_PREFIX)] == _CRC_PREFIX
    try:
        manifest = _manifest_decoder.decode(b"{" + data[_CRC_END:] if has_checksum else data)
    except _DECODE_ERRORS as error:
        raise FormatError(key=key, detail=str(error)) from error
    _check_manifest(manifest, key)
    return manifest


def decode_lone_rank_manifest(data: bytes, key: str) -> tuple[RankManifest, ManifestRecord]:
    """Decodes and checks a rank manifest without a commit object; returns its record, too.

    Well-formed damage of an older release's manifest, which has no checksum, is not detected.

    Raises:
        ChecksumMismatch: Its own checksum does not match.
        FormatError: It violates version 1.
    """
    has_checksum = data.startswith(_CRC_PREFIX)
    if has_checksum and unseal(data) is None:
        raise ChecksumMismatch(key=key, detail="its own checksum does not fit")
    record = ManifestRecord(key=key, size=len(data), crc32c=crc32c(data))
    manifest = decode_rank_manifest(data, record, key)
    if manifest.save is not msgspec.UNSET and not has_checksum:
        raise FormatError(key=key, detail="its own checksum is missing")
    return manifest, record


def world_size_of(data: bytes) -> int:
    """Returns the world size that a rank manifest records; 1 if it is older or unreadable."""
    try:
        save = _manifest_decoder.decode(unseal(data) or data).save
    except _DECODE_ERRORS:
        return 1
    return 1 if isinstance(save, msgspec.UnsetType) else save.world_size


def is_same_content(a: Stored, b: Stored) -> bool:
    """Whether all checksums are equal; block sizes may differ."""
    nbytes = a.stop - a.start
    if nbytes != b.stop - b.start:
        return False
    if len(a.crc32c) == len(b.crc32c):
        return a.crc32c == b.crc32c
    return combine_blocks(a.crc32c, nbytes) == combine_blocks(b.crc32c, nbytes)


def is_same_tensor(a: TensorEntry, b: TensorEntry) -> bool:
    return (a.dtype, a.global_shape, a.type, a.requires_grad) == (
        b.dtype,
        b.global_shape,
        b.type,
        b.requires_grad,
    )


# Checks of well-typed documents


def _check_manifest(manifest: RankManifest, key: str) -> None:
    attempt = manifest.attempt
    _check_attempt(attempt, key)
    if key != manifest_key(attempt, manifest.rank):
        _fail(
            key,
            f"it is the manifest of rank {manifest.rank} of attempt {attempt!r:.200}: the file or "
            "its folder was renamed, or copied from another snapshot; undo that",
        )
    boxes: frozenset[str] = frozenset()
    if len({entry.path for entry in manifest.entries}) != len(manifest.entries):
        boxes = _paths_of_boxes(manifest.entries, key)
    of_type: dict[type, list[Any]] = {}
    for entry in manifest.entries:
        of_type.setdefault(type(entry), []).append(entry)
    tensors: list[TensorEntry] = of_type.get(TensorEntry, [])
    views: list[ViewEntry] = of_type.get(ViewEntry, [])
    extents = _check_objects(manifest.objects, attempt, key)
    _check_stored(tensors, extents, key)
    _check_stored(of_type.get(BytesEntry, []), extents, key)
    _check_tensors(tensors, key)
    if views:
        bases = {entry.path: entry for entry in tensors if entry.path not in boxes}
        _check_views(views, bases, key)
    if composites := of_type.get(CompositeEntry):
        dense = {entry.path for entry in tensors}
        dense.update([entry.path for entry in views])
        _check_composites(composites, dense, key)


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
            _fail(key, f"two entries have the path {entry.path!r}")
        if not is_same_tensor(first, entry):
            _fail(key, f"shards of several tensors are {entry.path!r}")
        seen = offsets.setdefault(entry.path, {first.offsets})
        if entry.offsets in seen:
            _fail(key, f"two shards of {entry.path!r} are at the same place")
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


def _check_commit(commit: Commit, key: str) -> None:
    attempt = commit.attempt
    _check_attempt(attempt, key)
    if commit.world_size != len(commit.manifests):
        _fail(key, f"{len(commit.manifests)} manifests for a world size of {commit.world_size}")
    for rank, record in enumerate(commit.manifests):
        if record.key != manifest_key(attempt, rank):
            _fail(key, f"{record.key!r:.200} is not the manifest of rank {rank}")


def _check_attempt(attempt: str, key: str) -> None:
    if "/" in attempt or not is_well_formed_key(attempt):
        _fail(key, f"{attempt!r:.200} is not an attempt folder")


def _check_objects(
    objects: Sequence[ObjectRecord], attempt: str, key: str
) -> list[tuple[int, int]]:
    """Checks object records; returns each object's data range, limited to the rank's part."""
    folder = attempt + "/"
    for record in objects:
        if not is_well_formed_key(record.key) or not record.key.startswith(folder):
            _fail(key, f"{record.key!r:.200} is no key in {folder!r:.200}")
        if record.header_bytes > record.size:
            _fail(
                key,
                f"{record.key!r} of {record.size} bytes has a header of {record.header_bytes}",
            )
        if bool(record.chunks) != is_compressed_key(record.key):
            _fail(key, f"{record.key!r} has {len(record.chunks)} chunks")
    if len({record.key for record in objects}) != len(objects):
        _fail(key, "two records have the same key")
    return [_check_chunks(record, key) for record in objects]


def _check_chunks(record: ObjectRecord, key: str) -> tuple[int, int]:
    if not record.chunks:
        return record.header_bytes, record.size
    at = record.chunks[0].start
    for chunk in record.chunks:
        if chunk.start != at or not at < chunk.stop <= record.size:
            _fail(
                key,
                f"{record.key!r}: invalid chunk [{chunk.start}, {chunk.stop}), expected from {at}",
            )
        if not is_frame_count(chunk.stop - at, chunk.frames):
            _fail(key, f"{record.key!r}: invalid frames of the chunk from {at}: {chunk.frames!r}")
        at = chunk.stop
    return max(record.header_bytes, record.chunks[0].start), at


def _check_stored(
    entries: Sequence[TensorEntry] | Sequence[BytesEntry],
    extents: Sequence[tuple[int, int]],
    key: str,
) -> None:
    """Checks that byte ranges are in their object's data, with one checksum per block."""
    num_objects = len(extents)
    for entry in entries:
        data = entry.data
        start = data.start
        stop = data.stop
        if data.object >= num_objects:
            _fail(key, f"{entry.path!r} is in object {data.object} of {num_objects}")
        first, last = extents[data.object]
        if not first <= start <= stop <= last:
            _fail(key, f"{entry.path!r} is at [{start}, {stop}), not in [{first}, {last})")
        if not is_block_count(stop - start, len(data.crc32c)):
            _fail(key, f"{entry.path!r} of {stop - start} bytes has {len(data.crc32c)} checksums")


def _check_tensors(entries: Sequence[TensorEntry], key: str) -> None:
    """Checks that sizes fit dtype and shape, and that shards are in their tensor."""
    for entry in entries:
        shape = entry.shape
        num_bytes = entry.data.stop - entry.data.start
        itemsize = dtype_itemsize(entry.dtype)
        volume = _volume(shape)
        if volume > MAX_BYTES or (itemsize is not None and volume * itemsize != num_bytes):
            _fail(key, f"{entry.path!r} of {num_bytes} bytes is not {entry.dtype:.80} {shape}")
        if entry.offsets is not None or entry.global_shape is not None:
            _check_shard(entry, key)
        if entry.memory_format and _MEMORY_FORMAT_DIMS[entry.memory_format] != len(shape):
            _fail(key, f"{entry.path!r} of shape {shape} is not {entry.memory_format}")


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
    _fail(key, f"{entry.path!r}: no shard {shape} at {offsets} of shape {whole}")


def _check_views(views: Sequence[ViewEntry], bases: Mapping[str, TensorEntry], key: str) -> None:
    for view in views:
        base = bases.get(view.of)
        if base is None:
            _fail(key, f"{view.path!r} views {view.of!r}, which is no tensor entry")
        shape = view.shape
        if len(shape) != len(view.strides) or _volume(shape) > MAX_BYTES:
            _fail(key, f"{view.path!r}: invalid strides {view.strides} for shape {shape}")
        # An unknown dtype has at least one byte.
        itemsize = dtype_itemsize(view.dtype) or 1
        end = view.offset + extent_bytes(shape, view.strides, itemsize)
        base_bytes = base.data.stop - base.data.start
        if end > base_bytes:
            _fail(key, f"{view.path!r} ends at {end} of the {base_bytes} bytes of {view.of!r}")


def _check_composites(entries: Sequence[CompositeEntry], dense: Collection[str], key: str) -> None:
    """Checks parts. Other ranks may have stored those of a replicated composite."""
    for entry in entries:
        if entry.parts != COMPOSITE_PARTS[entry.layout]:
            _fail(key, f"{entry.path!r}: {entry.parts!r:.200} are not the parts of {entry.layout}")
        for part in entry.parts:
            if not entry.replicated and f"{entry.path}@{part}" not in dense:
                _fail(key, f"{entry.path!r} has no part {part!r}")
        if _volume(entry.shape) > MAX_BYTES:
            _fail(key, f"{entry.path!r} has shape {entry.shape}")


def _fail(key: str, detail: str) -> NoReturn:
    raise FormatError(key=key, detail=detail[:1000])


def check_json(value: object, where: str) -> None:
    """Raises ``UsageError`` if a value is not JSON or would be read back as another one.

    The error names the position, from ``where`` on.
    """
    pending: list[tuple[object, str, int]] = [(value, where, 0)]
    while pending:
        value, where, depth = pending.pop()
        if depth > _MAX_JSON_DEPTH:
            raise UsageError(f"{where:.200}... nests deeper than {_MAX_JSON_DEPTH}")
        if isinstance(value, dict):
            for key, child in value.items():
                _check_text(key, f"the key {key!r} in {where}")
                pending.append((child, f"{where}[{key!r}]", depth + 1))
        elif isinstance(value, list | tuple):
            pending.extend((v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value))
        elif type(value) is float:
            if not isfinite(value):
                raise UsageError(f"{where} is {value}, which JSON lacks")
        elif type(value) is int:
            if not -(1 << 63) <= value < 1 << 64:
                raise UsageError(f"{where} is an integer of more than 64 bits; write it as text")
        elif value is not None and type(value) is not bool:
            _check_text(value, where)


def _check_text(value: object, where: str) -> None:
    if type(value) is not str:
        raise UsageError(f"{where} is a {type(value).__qualname__}, which JSON lacks")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} is no Unicode text: {error}") from error
