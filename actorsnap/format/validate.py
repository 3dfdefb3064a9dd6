"""Checks that the numbers of a decoded document are consistent, which a schema cannot express.

Decides whether a well-typed commit object or rank manifest is valid, so that readers need no
further checks: a valid document names only bytes that exist, keys inside the snapshot, and views
inside their base. Must not know JSON's encoding or where documents are stored. Implements
``docs/format.md`` ("Objects", "Commit object", "Rank manifest"). Loops are written out: 100,000
entries take tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING, NoReturn

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.checksum import is_block_count
from actorsnap.format.compression import is_frame_count
from actorsnap.format.layout import (
    DATA_ALIGNMENT,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    bounded_volume,
    dtype_itemsize,
    is_compressed_key,
    is_well_formed_key,
    manifest_key,
)

if TYPE_CHECKING:
    from actorsnap.format.manifest import (
        BytesEntry,
        Commit,
        CompositeEntry,
        ObjectRecord,
        RankManifest,
        TensorEntry,
        ViewEntry,
    )

__all__ = [
    "COMPOSITE_PARTS",
    "check_commit",
    "check_composites",
    "check_json",
    "check_objects",
    "check_place",
    "check_stored",
    "check_tensors",
    "check_views",
]

COMPOSITE_PARTS: Mapping[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
    "quantized_tensor": ("int_repr",),
    "quantized_channel": ("int_repr", "scales", "zero_points"),
}
"""Composite layout -> the names of its parts, in order."""

_MEMORY_FORMAT_DIMS = {"channels_last": 4, "channels_last_3d": 5}
_MAX_JSON_DEPTH = 500
_MANY_DIMS = 64
"""Number of dims above which products of sizes are bounded during computation; below it that is
wasteful."""


def _volume(shape: Sequence[int]) -> int:
    return prod(shape) if len(shape) < _MANY_DIMS else bounded_volume(shape)


def check_commit(commit: Commit, key: str) -> None:
    """Raises FormatError if a well-typed commit object contradicts itself."""
    attempt = commit.attempt
    if "/" in attempt or not is_well_formed_key(attempt):
        _fail(key, f"{attempt!r:.200} is not an attempt folder")
    if commit.world_size < 1 or commit.world_size != len(commit.manifests):
        _fail(key, f"{len(commit.manifests)} manifests for a world size of {commit.world_size}")
    _check_keys([record.key for record in commit.manifests], attempt, key)
    for rank, record in enumerate(commit.manifests):
        if record.key != manifest_key(attempt, rank):
            _fail(key, f"{record.key!r:.200} is not the manifest of rank {rank}")


def check_place(manifest: RankManifest, key: str) -> None:
    """Raises FormatError if a rank manifest is stored under another rank's or attempt's key."""
    attempt = manifest.attempt
    if "/" in attempt or not is_well_formed_key(attempt):
        _fail(key, f"{attempt!r:.200} is not an attempt folder")
    if key != manifest_key(attempt, manifest.rank):
        _fail(key, f"it is the manifest of rank {manifest.rank} of attempt {attempt!r:.200}")


def check_objects(objects: Sequence[ObjectRecord], attempt: str, key: str) -> list[tuple[int, int]]:
    """Checks object records; returns the data range of each object, limited to the rank's part."""
    _check_keys([record.key for record in objects], attempt, key)
    for record in objects:
        header = record.header_bytes
        if (
            header > record.size
            or header < DATA_ALIGNMENT
            or header % DATA_ALIGNMENT
            or header > MAX_HEADER_BYTES + 2 * DATA_ALIGNMENT
        ):
            _fail(key, f"{record.key!r} of {record.size} bytes has a header of {header}")
        if bool(record.chunks) != is_compressed_key(record.key):
            _fail(key, f"{record.key!r} has {len(record.chunks)} chunks")
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


def _check_keys(keys: Sequence[str], attempt: str, where: str) -> None:
    folder = attempt + "/"
    for key in keys:
        if not is_well_formed_key(key) or not key.startswith(folder):
            _fail(where, f"{key!r:.200} is no key in {folder!r:.200}")
    if len(set(keys)) != len(keys):
        _fail(where, "two records have the same key")


def check_stored(
    entries: Sequence[TensorEntry] | Sequence[BytesEntry],
    extents: Sequence[tuple[int, int]],
    key: str,
) -> None:
    """Raises FormatError if an entry's byte range is outside its object's data.

    Also if it does not have one checksum per block.
    """
    num_objects = len(extents)
    for entry in entries:
        data = entry.data
        start = data.start
        stop = data.stop
        if data.object >= num_objects:
            _fail(key, f"{entry.path!r} lies in object {data.object} of {num_objects}")
        first, last = extents[data.object]
        if not first <= start <= stop <= last:
            _fail(key, f"{entry.path!r} lies at [{start}, {stop}), not in [{first}, {last})")
        if not is_block_count(stop - start, len(data.crc32c)):
            _fail(key, f"{entry.path!r} of {stop - start} bytes has {len(data.crc32c)} checksums")


def check_tensors(entries: Sequence[TensorEntry], key: str) -> None:
    """Raises FormatError if a tensor's size does not fit its dtype and shape.

    Also if a shard is outside its tensor.
    """
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


def check_views(views: Sequence[ViewEntry], bases: Mapping[str, TensorEntry], key: str) -> None:
    """Raises FormatError if a view's base does not exist or the view exceeds it."""
    for view in views:
        base = bases.get(view.of)
        if base is None:
            _fail(key, f"{view.path!r} views {view.of!r}, which is no tensor entry")
        shape = view.shape
        if len(shape) != len(view.strides) or _volume(shape) > MAX_BYTES:
            _fail(key, f"{view.path!r}: invalid strides {view.strides} for shape {shape}")
        # An unknown dtype has at least one byte: enough to keep offsets in the base.
        itemsize = dtype_itemsize(view.dtype) or 1
        end = view.offset
        if 0 not in shape:
            last = sum([(n - 1) * step for n, step in zip(shape, view.strides, strict=True)])
            end += (last + 1) * itemsize
        base_bytes = base.data.stop - base.data.start
        if end > base_bytes:
            _fail(key, f"{view.path!r} ends at {end} of the {base_bytes} bytes of {view.of!r}")


def check_composites(entries: Sequence[CompositeEntry], dense: Collection[str], key: str) -> None:
    """Raises FormatError if a composite's parts do not fit its layout or do not exist.

    Other ranks may have stored parts of a replicated composite.
    """
    for entry in entries:
        if entry.parts != COMPOSITE_PARTS[entry.layout]:
            _fail(key, f"{entry.path!r}: {entry.parts!r:.200} are not the parts of {entry.layout}")
        for part in entry.parts:
            if not entry.replicated and f"{entry.path}@{part}" not in dense:
                _fail(key, f"{entry.path!r} has no part {part!r}")
        if _volume(entry.shape) > MAX_BYTES:
            _fail(key, f"{entry.path!r} has shape {entry.shape}")


def check_json(value: object, where: str) -> None:
    """Raises UsageError if a value is not JSON, and would be read back as another value.

    ``where`` names the value; the error names the position inside it.
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


def _fail(key: str, detail: str) -> NoReturn:
    raise FormatError(key=key, detail=detail[:1000])
