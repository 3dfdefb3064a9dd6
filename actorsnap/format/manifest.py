# SPDX-License-Identifier: Apache-2.0
"""The schema of format version 1: commit object, rank manifests, entries (``docs/format.md``).

The only code that encodes, decodes and validates them. A valid document names only bytes that
exist, keys inside the snapshot, and views inside their base. Equal values are encoded to equal
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from math import isfinite
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
)
from actorsnap.format.layout import (
    DATA_ALIGNMENT,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    chunk_key,
    is_well_formed_key,
    manifest_key,
)

FORMAT_NAME = "actorsnap"
FORMAT_VERSION = 1
FEATURES = ("annotations", "block_sizes", "compression", "owners", "tables", "values")
"""Features that this release reads. A snapshot with another one is refused."""

COMMIT_KEY = "actorsnap.json"
OLDER_COMMIT_KEY = ".actorsnap"
"""Read, but no longer written: shells and copying programs skip dotfiles."""

COMMIT_KEYS = (COMMIT_KEY, OLDER_COMMIT_KEY)
"""The first one wins."""

MAX_NESTING = 900
"""Largest nesting depth of inline values."""

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

VALUE_CONTAINERS = frozenset({"defaultdict", "deque", "record"})
"""Container types of the feature ``values``."""

VALUE_TAGS = frozenset(
    {
        *VALUE_CONTAINERS,
        *("set", "frozenset", "range"),
        *("path", "pure_posix_path", "pure_windows_path"),
        *("date", "time", "datetime", "timedelta", "timezone"),
    }
)
"""Inline types of the feature ``values``."""

_NESTED = frozenset({dict, list, tuple})
_MAX_JSON_DEPTH = 500
MAX_RANKS = 1 << 20
"""Largest number of ranks of a snapshot with the feature ``tables``."""

# Bounds are checked on decoding only.
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Crc: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_WorldSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
BlockBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=MAX_BLOCK_BYTES, le=MAX_BLOCK_BYTES)]
_HeaderBytes: TypeAlias = Annotated[
    int,
    msgspec.Meta(
        ge=DATA_ALIGNMENT, le=MAX_HEADER_BYTES + 2 * DATA_ALIGNMENT, multiple_of=DATA_ALIGNMENT
    ),
]

# Literals, because omit_defaults compares by identity: decoding returns the default string itself,
# so a decoded value is encoded to the same bytes.
ContainerType: TypeAlias = Literal[
    "dict", "ordered_dict", "counter", "list", "tuple", "defaultdict", "deque", "record"
]
MemoryFormat: TypeAlias = Literal["channels_last", "channels_last_3d"]
TensorType: TypeAlias = Literal["tensor", "parameter", "buffer", "numpy", "numpy_scalar"]
BytesType: TypeAlias = Literal["bytes", "bytearray", "str", "json", "pickle", "numpy", "values"]
CompositeLayout: TypeAlias = Literal[
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "quantized_tensor",
    "quantized_channel",
]


class Strict(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Refuses unknown fields: a new field needs a feature flag or a new version."""


class ManifestRecord(Strict, frozen=True, kw_only=True, gc=False):
    """A rank manifest, in an older commit object. ``size`` in bytes."""

    key: str
    size: Size
    crc32c: Crc


class Commit(Strict, frozen=True, kw_only=True, tag_field="format", tag=FORMAT_NAME):
    """The commit object. Its presence makes a snapshot.

    Attributes:
        attempt: Folder of all other objects of this snapshot.
        created: UTC, ISO 8601 with microseconds and ``Z``.
        manifests: In rank order; empty with the feature ``tables``.
        fsync: False if the writer did not wait for the disk.
        step, metadata: The caller's; metadata is any JSON object.
    """

    format: ClassVar[str] = FORMAT_NAME
    version: int
    features: tuple[str, ...] = ()
    world_size: _WorldSize
    attempt: str
    created: str
    manifests: tuple[ManifestRecord, ...] = ()
    fsync: bool = True
    step: Size | None = None
    metadata: dict[str, Any] = {}

    def record(self, rank: int) -> ManifestRecord | None:
        """Returns the record of a rank's manifest in an older commit object."""
        return self.manifests[rank] if self.manifests else None

    def created_at(self) -> datetime:
        """Returns ``created``.

        Raises:
            FormatError: It is not a time with a time zone. No reason to refuse a restore.
        """
        try:
            found = datetime.fromisoformat(self.created)
        except ValueError:
            found = None
        if found is None or found.tzinfo is None:
            fail(COMMIT_KEY, f"created {self.created!r:.100} is not a time with a time zone")
        return found

    def with_values(self) -> Commit:
        """Returns the commit object of a snapshot that needs the feature ``values``."""
        return msgspec.structs.replace(self, features=with_values(self.features))

    def without_owners(self) -> Commit:
        """Returns the commit object without the owner index."""
        features = tuple([each for each in self.features if each != "owners"])
        return msgspec.structs.replace(self, features=features)


class SaveRecord(Strict, frozen=True, kw_only=True):
    """The commit object's fields in a rank manifest, from which it can be rewritten.

    ``metadata`` is empty except in rank 0's manifest.
    """

    world_size: Size
    features: tuple[str, ...] = ()
    fsync: bool = True
    step: Size | None = None
    metadata: dict[str, Any] = {}

    def commit(
        self, *, attempt: str, created: str, manifests: tuple[ManifestRecord, ...] = ()
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
        crc32c: CRC32C of the stored bytes.
        frames: Stored size of each frame; empty if uncompressed.
    """

    start: Size
    stop: Size
    crc32c: Crc
    frames: tuple[Size, ...] = ()

    @property
    def size(self) -> int:
        return sum(self.frames) if self.frames else self.stop - self.start


class ObjectRecord(Strict, frozen=True, kw_only=True, gc=False):
    """A data object. Sizes in bytes.

    ``chunks`` has the rank's chunks, if the object is compressed.
    """

    key: str
    size: Size
    header_bytes: _HeaderBytes
    header_crc32c: Crc
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
    ``crc32c`` has one value per block, from ``start`` on. It is empty for an empty leaf, and for
    bytes of another format, which are read without a comparison; no manifest has those.
    """

    object: Size
    start: Size
    stop: Size
    crc32c: tuple[Crc, ...]

    @property
    def block_bytes(self) -> int:
        """The last block may be shorter."""
        return block_bytes_of(self.stop - self.start, len(self.crc32c))


class ContainerEntry(Strict, frozen=True, kw_only=True, tag_field="kind", tag="container"):
    """A container. Optional for a plain dict with children.

    ``attributes``, in the inline encoding: a module state dict's ``_metadata``; a deque's length
    limit; the name of a defaultdict's factory; module and qualified name of a record's class.
    """

    path: _Text
    type: ContainerType
    attributes: Any = None


class TensorEntry(Strict, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="tensor"):
    """A dense tensor or numpy array, C-contiguous, little endian.

    Attributes:
        dtype: Torch's (``"float32"``), or numpy's (``"<f8"``) if ``type`` is ``"numpy"`` or
            ``"numpy_scalar"``.
        shape: Shape of the bytes stored here, in elements.
        global_shape, offsets: Shards only: the whole tensor's shape, and the shard's origin in it.
            Shards of one tensor may share their path.
        replicated: Whether every rank held the same value.
        memory_format: Memory format of the restored tensor; None: row-major.
        attributes: A parameter's plain attributes, in the inline encoding.
    """

    path: _Text
    dtype: str
    shape: tuple[Size, ...]
    data: Stored
    type: TensorType = "tensor"
    requires_grad: bool = False
    global_shape: tuple[Size, ...] | None = None
    offsets: tuple[Size, ...] | None = None
    replicated: bool = False
    memory_format: MemoryFormat | None = None
    attributes: dict[str, Any] | None = None


class ViewEntry(Strict, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="view"):
    """A tensor that shares memory with another entry of the same rank manifest.

    ``of`` is the path of the base, a ``TensorEntry``. ``strides`` in elements of ``dtype``;
    ``offset`` in bytes from the base's first byte.
    """

    path: _Text
    of: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0
    type: TensorType = "tensor"
    requires_grad: bool = False
    replicated: bool = False


class CompositeEntry(Strict, frozen=True, kw_only=True, tag_field="kind", tag="composite"):
    """A sparse or quantized tensor, made of dense parts.

    The part ``p`` is the entry at ``<path>@<p>``. ``parameters`` has the other values
    (``is_coalesced``; ``scale``, ``zero_point``; ``axis``), in the inline encoding.
    """

    path: _Text
    layout: CompositeLayout
    dtype: str
    shape: tuple[Size, ...]
    parts: tuple[str, ...]
    parameters: dict[str, Any] = {}
    type: TensorType = "tensor"
    requires_grad: bool = False
    replicated: bool = False


class ValueEntry(Strict, frozen=True, kw_only=True, tag_field="kind", tag="value"):
    """A small non-tensor leaf, in the inline encoding."""

    path: _Text
    value: Any = None
    replicated: bool = False


class BytesEntry(Strict, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="bytes"):
    """A large leaf stored as raw bytes.

    ``str`` is UTF-8 with surrogates passed; ``json`` and ``values`` are in the inline encoding;
    ``numpy`` in ``numpy.lib.format`` v1.
    """

    path: _Text
    type: BytesType
    data: Stored
    replicated: bool = False


Entry: TypeAlias = (
    ContainerEntry | TensorEntry | ViewEntry | CompositeEntry | ValueEntry | BytesEntry
)


class RankManifest(Strict, frozen=True, kw_only=True, omit_defaults=False):
    """The entries that one rank stored, in traversal order.

    Children of a dict or list are ordered by their first entries. ``save`` and ``optimizers``
    (qualified class names by path) come with the feature ``annotations``. The fields are the
    members of an older manifest; ``tables`` has those of one with the feature ``tables``.
    """

    attempt: str
    rank: Size
    block_bytes: BlockBytes = MAX_BLOCK_BYTES
    objects: tuple[ObjectRecord, ...] = ()
    entries: tuple[Entry, ...] = ()
    save: SaveRecord | msgspec.UnsetType = msgspec.UNSET
    optimizers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


_commit_decoder = msgspec.json.Decoder(Commit)
encoder = msgspec.json.Encoder(order="deterministic")

# msgspec raises its own errors and UnicodeError (both ValueErrors), and RecursionError.
DECODE_ERRORS = (ValueError, RecursionError)
ENCODE_ERRORS = (TypeError, ValueError, RecursionError)

CRC_PREFIX = b'{"crc32c":"'
_CRC_AT = slice(len(CRC_PREFIX), len(CRC_PREFIX) + 8)
_CRC_END = len(CRC_PREFIX) + len('00000000",')


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
    return seal(encoder.encode(commit))


def seal(encoded: bytes) -> bytes:
    """Prepends the checksum of a JSON object with members as its first member."""
    body = bytearray(CRC_PREFIX + b'00000000",' + encoded[1:])
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
    except DECODE_ERRORS:
        head = _Head()
    is_ours = head.format == FORMAT_NAME
    body = unseal(data)
    if body is None:
        if is_ours and not data.startswith(CRC_PREFIX):
            _check_version(head.version, key)  # a newer one may have moved the checksum
        raise ChecksumMismatch(
            key=key,
            detail="the commit object is damaged: its checksum does not match",
        )
    if not is_ours:
        raise NotASnapshot(key=key, detail=f"its format is {_shown(head.format)}", found="unknown")
    _check_version(head.version, key)
    _check_features(head, key)
    try:
        commit = _commit_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise FormatError(key=key, detail=str(error)) from error
    _check_commit(commit, key)
    return commit


def unseal(data: bytes) -> bytes | None:
    """Returns a sealed JSON object without its checksum; None if it is damaged or not sealed."""
    if not data.startswith(CRC_PREFIX) or data[_CRC_AT.stop : _CRC_END] != b'",':
        return None
    crc = crc32c(memoryview(data)[_CRC_END - 2 :], crc32c(CRC_PREFIX + b"00000000"))
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
    """Returns the features of a save, without ``values``: those follow from the state."""
    optional = {"compression": is_compressed, "owners": has_owners}
    chosen = [name for name, has in optional.items() if has]
    return ("annotations", "block_sizes", *chosen, "tables")


def with_values(features: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*features, "values"}))


def encodes_values(encoded: object) -> bool:
    """Whether reading an inline value needs the feature ``values``."""
    if isinstance(encoded, dict):
        return encoded.get("$") in VALUE_TAGS or encodes_values(encoded.get("v"))
    if isinstance(encoded, list | tuple):
        return any([type(item) in _NESTED and encodes_values(item) for item in encoded])
    return False


def needs_values(entry: object) -> bool:
    """Whether reading an entry without bytes needs the feature ``values``."""
    if type(entry) is ValueEntry:
        return type(entry.value) in _NESTED and encodes_values(entry.value)
    if type(entry) is ContainerEntry:
        return entry.type in VALUE_CONTAINERS or encodes_values(entry.attributes)
    return False


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


def _check_commit(commit: Commit, key: str) -> None:
    attempt = commit.attempt
    check_attempt(attempt, key)
    if "tables" in commit.features:
        if commit.manifests or commit.world_size > MAX_RANKS:
            fail(key, f"{len(commit.manifests)} manifests, and a world size of {commit.world_size}")
        return
    if commit.world_size != len(commit.manifests):
        fail(key, f"{len(commit.manifests)} manifests for a world size of {commit.world_size}")
    for rank, record in enumerate(commit.manifests):
        if record.key != manifest_key(attempt, rank):
            fail(key, f"{record.key!r:.200} is not the manifest of rank {rank}")


def check_attempt(attempt: str, key: str) -> None:
    if "/" in attempt or not is_well_formed_key(attempt):
        fail(key, f"{attempt!r:.200} is not an attempt folder")


def fail(key: str, detail: str) -> NoReturn:
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
                if type(key) is not str:
                    raise UsageError(
                        f"the key {key!r} in {where} is of type {type(key).__qualname__}; keys in "
                        "JSON are text"
                    )
                _check_text(key, f"the key {key!r} in {where}")
                pending.append((child, f"{where}[{key!r}]", depth + 1))
        elif isinstance(value, list | tuple):
            pending.extend((v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value))
        elif type(value) is float:
            if not isfinite(value):
                raise UsageError(f"{where} is {value}, which JSON lacks: write it as text")
        elif type(value) is int:
            if not -(1 << 63) <= value < 1 << 64:
                raise UsageError(f"{where} is an integer of more than 64 bits; write it as text")
        elif value is not None and type(value) is not bool:
            _check_text(value, where)


def _check_text(value: object, where: str) -> None:
    if type(value) is not str:
        raise UsageError(
            f"{where} is of type {type(value).__qualname__}, which JSON lacks: make it a str, "
            "number, bool, list, dict or None"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} is not Unicode text: {error}") from error
