# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files: one, a Hugging Face repo, or a folder of DCP's Hugging Face writer.

A folder is read by its index (``*.safetensors.index.json``), else ``model.safetensors``, else all
``*.safetensors`` in it, else those in its folder ``sharded``. The tensors are at
``model/<name>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import msgspec

from actorsnap.actors.formats import Foreign, Place
from actorsnap.errors import FormatError
from actorsnap.format.layout import SAFETENSORS_DTYPES, dtype_itemsize, is_well_formed_key
from actorsnap.interop.formats.describing import DEFAULT_KEY, Description, path_of
from actorsnap.storage.base import for_each

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARDED = "sharded/"
"""Where DCP's writer puts what it then consolidates."""

_MAX_HEADER_BYTES = 100_000_000
"""Largest header that safetensors accepts, in bytes."""

_LENGTH_BYTES = 8
_GUESS_BYTES = 128 << 10
"""Read first: holds the header of most files."""

_AT_ONCE = 16
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_SHARDING = "DCP_SHARDING_INFO"


class _HeaderTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FileTensor(msgspec.Struct, frozen=True):
    """A tensor of a file: bytes ``[start, stop)``. ``dtype`` is torch's, and ``shape`` too.

    ``offsets``: where it is in its whole, for a shard.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offsets: tuple[int, ...] | None = None


class Header(msgspec.Struct, frozen=True):
    """``tensors`` by name, in the order of their bytes."""

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]


class _Sharding(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


class _RepoIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


async def read(place: Place) -> Foreign | None:
    """See ``actors.formats``."""
    if place.file:
        return await _read_files(place, [place.file]) if _is_safetensors(place.head) else None
    if (index := await _find_index(place)) is not None:
        return await _read_repo(place, index)
    if await place.find(_SINGLE) is not None:
        return await _read_files(place, [_SINGLE])
    names = [key for key in place.listed if key.endswith(SUFFIX)]
    for keys in (
        [key for key in names if "/" not in key],
        [key for key in names if key.startswith(_SHARDED) and key.count("/") == 1],
    ):
        if keys:
            return await _read_files(place, keys)
    return None


def _is_safetensors(head: bytes) -> bool:
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    return head[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and 2 <= length <= _MAX_HEADER_BYTES


async def _find_index(place: Place) -> str | None:
    if await place.find(_INDEX) is not None:
        return _INDEX
    found = [key for key in place.listed if key.endswith(INDEX_SUFFIX) and "/" not in key]
    if len(found) > 1:
        raise FormatError(
            key=found[0], detail=f"there are {len(found)} indexes: {', '.join(found[:5])}"
        )
    return found[0] if found else None


async def _read_files(place: Place, keys: Iterable[str]) -> Foreign:
    """Reads all tensors of files that were listed or found."""
    headers = await _headers(place, keys)
    metadata: dict[str, Any] = {}
    if len(headers) == 1:
        (header,) = headers.values()
        metadata = {name: text for name, text in header.metadata.items() if name != _SHARDING}
    tensors = [
        (name, key, tensor)
        for key, header in headers.items()
        for name, tensor in header.tensors.items()
    ]
    return await _describe(place, tensors, metadata)


async def _read_repo(place: Place, key: str) -> Foreign:
    """Reads what an index names.

    Raises:
        FormatError: A file is missing, or lacks a tensor.
    """
    await place.find(key)
    try:
        index = msgspec.json.decode(await place.get(key), type=_RepoIndex)
    except ValueError as error:
        raise FormatError(key=key, detail=f"it is not an index: {error}") from error
    folder = key.rpartition("/")[0]
    files = {
        name: f"{folder}/{file}" if folder else file for name, file in index.weight_map.items()
    }
    for file in dict.fromkeys(files.values()):
        if "/" in file or not file.endswith(SUFFIX) or not is_well_formed_key(file):
            detail = f"it names {file!r:.200}, which is not a file next to it"
            raise FormatError(key=key, detail=detail)
        await place.need(file, f"{key} names")
    headers = await _headers(place, dict.fromkeys(files.values()))
    tensors: list[tuple[str, str, FileTensor]] = []
    for name, file in files.items():
        tensor = headers[file].tensors.get(name)
        if tensor is None:
            raise FormatError(key=file, detail=f"{key} says that it has {name!r:.200}: it has not")
        tensors.append((name, file, tensor))
    return await _describe(place, tensors, index.metadata)


async def _headers(place: Place, keys: Iterable[str]) -> dict[str, Header]:
    ordered = list(keys)
    found: dict[str, Header] = {}

    async def read(key: str) -> None:
        info = await place.find(key)
        assert info is not None
        data = await place.get(key, 0, min(info.size, _GUESS_BYTES))
        end = header_end(data, info.size, key)
        if end > len(data):
            data += await place.get(key, len(data), end)
        found[key] = await place.run_blocking(parse_header, data[:end], info.size, key)

    await for_each(ordered, read, at_once=_AT_ONCE)
    return {key: found[key] for key in ordered}


def header_end(data: bytes, size: int, key: str) -> int:
    """Returns where the header of a file of ``size`` bytes ends, from its first 8 bytes.

    Raises:
        FormatError: It is not a safetensors file, or truncated.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
        raise FormatError(
            key=key, detail=f"it is not a safetensors file, or damaged; it has {size} bytes"
        )
    if _LENGTH_BYTES + length > size:
        raise FormatError(
            key=key,
            detail=f"truncated: it has {size} bytes, and its header {_LENGTH_BYTES + length}",
        )
    return _LENGTH_BYTES + length


def parse_header(data: bytes, size: int, key: str) -> Header:
    """Parses the header, ``data``, of a file of ``size`` bytes.

    Raises:
        FormatError: It is malformed; or the tensors overlap, leave holes, or do not end where the
            file ends.
    """
    try:
        raw = msgspec.json.decode(data[_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        members = {
            name: msgspec.json.decode(each, type=_HeaderTensor) for name, each in raw.items()
        }
        sharding = msgspec.json.decode(metadata.get(_SHARDING, "{}"), type=dict[str, _Sharding])
    except (ValueError, RecursionError) as error:
        raise FormatError(key=key, detail=f"its header is malformed: {error}") from error
    tensors: dict[str, FileTensor] = {}
    at = 0
    for name, member in sorted(members.items(), key=lambda item: item[1].data_offsets):
        start, stop = member.data_offsets
        if start != at or stop < start:
            what = "overlaps another" if start < at else "leaves a hole before it"
            raise FormatError(key=key, detail=f"{name!r:.200} at [{start}, {stop}) {what}")
        at = stop
        shard = sharding.get(name)
        dtype, shape = _torch_type(member, name, key)
        tensors[name] = FileTensor(
            dtype,
            shape,
            len(data) + start,
            len(data) + stop,
            None if shard is None else shard.saved_offsets,
        )
    if len(data) + at != size:
        what = "truncated" if size < len(data) + at else "too long"
        raise FormatError(
            key=key, detail=f"{what}: it has {size} bytes, its tensors end at {len(data) + at}"
        )
    return Header(tensors, metadata)


def _torch_type(member: _HeaderTensor, name: str, key: str) -> tuple[str, tuple[int, ...]]:
    start, stop = member.data_offsets
    shape = member.shape
    dtype = _DTYPES.get(member.dtype)
    if dtype is None:
        detail = f"{name!r:.200} has the dtype {member.dtype!r:.80}, which torch lacks"
        raise FormatError(key=key, detail=detail)
    if member.dtype == "F4" and shape and shape[-1] % 2 == 0:
        shape = (*shape[:-1], shape[-1] // 2)  # a torch element packs two values
    itemsize = dtype_itemsize(dtype)
    assert itemsize is not None
    if min(shape, default=0) < 0 or prod(shape) * itemsize != stop - start:
        detail = f"{name!r:.200} has {stop - start} bytes, not those of {member.dtype} {shape}"
        raise FormatError(key=key, detail=detail)
    return dtype, shape


async def _describe(
    place: Place, tensors: list[tuple[str, str, FileTensor]], metadata: dict[str, Any]
) -> Foreign:
    return await place.run_blocking(_described, place, tensors, metadata)


def _described(
    place: Place, tensors: list[tuple[str, str, FileTensor]], metadata: dict[str, Any]
) -> Foreign:
    """Raises FormatError if files have one name, and not for parts of one tensor."""
    wholes = _whole_shapes(tensors)
    description = Description(place)
    first: dict[str, str] = {}
    for name, key, tensor in tensors:
        other = first.setdefault(name, key)
        if other != key and tensor.offsets is None:
            raise FormatError(
                key=key,
                detail=f"{name!r:.200} is also in {other!r}: open one of the files by its own URL",
            )
        is_shard = tensor.offsets is not None and tensor.shape != wholes[name]
        description.tensor(
            path_of(DEFAULT_KEY, name),
            tensor.dtype,
            tensor.shape,
            description.stored(key, tensor.start, tensor.stop),
            offsets=tensor.offsets if is_shard else None,
            global_shape=wholes[name] if is_shard else None,
        )
    return Foreign(format="safetensors", manifests=(description.manifest(),), metadata=metadata)


def _whole_shapes(tensors: list[tuple[str, str, FileTensor]]) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each tensor that is stored in parts: DCP's writer names no shape."""
    wholes: dict[str, tuple[int, ...]] = {}
    for name, key, tensor in tensors:
        if tensor.offsets is None:
            continue
        if len(tensor.offsets) != len(tensor.shape):
            raise FormatError(key=key, detail=f"{name!r:.200} has offsets {tensor.offsets}")
        stops = [at + size for at, size in zip(tensor.offsets, tensor.shape, strict=True)]
        wholes[name] = tuple(map(max, wholes.get(name, (0,) * len(stops)), stops))
    return wholes
