# SPDX-License-Identifier: Apache-2.0
"""Names objects and claims, and lays out leaves in data objects that safetensors can open.

Implements ``docs/format.md`` ("Objects", "Data object").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from math import prod

import msgspec

DATA_ALIGNMENT = 4096
"""Alignment of the data section in a data object, in bytes."""

MAX_HEADER_BYTES = 64 << 20
"""JSON without padding, in bytes. safetensors refuses 100 MB and more."""

MAX_BYTES = (1 << 63) - 1

MAX_SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in one file of an export; transformers loads a file at a time."""

SAFETENSORS_DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
}
"""torch dtype -> safetensors dtype, if ``safetensors.torch.load_file`` (0.8) returns the original
dtype. Others are stored as one-dimensional ``U8``."""

_TORCH_ITEMSIZES = {
    **dict.fromkeys(
        ["bool", "int8", "uint8", "qint8", "quint8", "quint4x2", "quint2x4", "bits8"]
        + ["bits1x8", "bits2x4", "bits4x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
        + ["float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
        + [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)],
        1,
    ),
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16", "bits16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32", "complex32", "qint32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    "complex128": 16,
}

_NUMPY_DTYPE = re.compile(r"[<>|=]?([?biufcSVUmM])([0-9]{1,9})(?:\[[^\]]*\])?")


@lru_cache(maxsize=256)
def dtype_itemsize(name: str) -> int | None:
    """Returns the bytes per element of a torch (``float32``) or numpy (``<f8``) dtype; None if
    unknown."""
    itemsize = _TORCH_ITEMSIZES.get(name)
    if itemsize is None and (match := _NUMPY_DTYPE.fullmatch(name)):
        itemsize = int(match[2]) * (4 if match[1] == "U" else 1)
    return itemsize


# Object keys


_ATTEMPT = re.compile(r"([0-9]{8}T[0-9]{6})-([0-9a-f]{8})-(0|[1-9][0-9]{0,18})-([0-9a-f]{8})")
_EPOCH = datetime(1970, 1, 1)


class Attempt(msgspec.Struct, frozen=True):
    """Creator and start time of an attempt. Its ``str`` is the folder's name.

    Attributes:
        created_s: In seconds since 1970, UTC.
        host: 8 hex digits for the host and its process namespace.
        nonce: 8 random hex digits.
    """

    created_s: int
    host: str
    pid: int
    nonce: str

    @classmethod
    def parse(cls, text: str) -> Attempt | None:
        match = _ATTEMPT.fullmatch(text)
        if match is None:
            return None
        try:
            time = datetime.strptime(match[1], "%Y%m%dT%H%M%S")
        except ValueError:
            return None
        if time < _EPOCH:
            return None
        created_s = (time - _EPOCH) // timedelta(seconds=1)
        return cls(created_s, match[2], int(match[3]), match[4])

    def __str__(self) -> str:
        return f"{self._time:%Y%m%dT%H%M%S}-{self.host}-{self.pid}-{self.nonce}"

    @property
    def created(self) -> str:
        """Time of creation, in the format of commit objects."""
        return f"{self._time:%Y-%m-%dT%H:%M:%S}.000000Z"

    @property
    def _time(self) -> datetime:
        return _EPOCH + timedelta(seconds=self.created_s)


def is_well_formed_key(key: str) -> bool:
    """Whether ``key`` is relative and stays inside the snapshot on every storage."""
    return (
        "\\" not in key
        and "\0" not in key
        and all(part not in ("", ".", "..") for part in key.split("/"))
    )


def top_level_key(token: str) -> str:
    """Returns the app state's key for a path's first component."""
    if token == "%":
        return ""
    return _ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), token)


_ESCAPED = re.compile("%u([0-9a-f]{4})|%([0-9A-F]{2})")


def safe_name(key: str) -> str:
    """Returns a top-level key's folder name. ASCII, never empty."""
    raw = key.encode("utf-8", "surrogatepass")
    escaped = "".join([chr(byte) if byte in _SAFE_BYTES else f"={byte:02X}" for byte in raw])
    if not escaped:
        return "="
    if escaped[0] == ".":
        escaped = "=2E" + escaped[1:]
    if len(escaped) > 120:
        escaped = f"{escaped[:100]}=~{sha256(raw).hexdigest()[:16]}"
    return escaped


_CHUNKS = ".chunks"
_SAFE_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


def data_key(
    attempt: str, key: str | None, rank: int, n: int, *, is_compressed: bool = False
) -> str:
    """Returns the key of a rank's ``n``-th data object of the top-level ``key``.

    None: the object that small keys share.
    """
    name = "=small" if key is None else safe_name(key)
    kind = _CHUNKS if is_compressed else ".safetensors"
    return f"{attempt}/data/{name}/{rank}-{n}{kind}"


def is_compressed_key(key: str) -> bool:
    return key.endswith(_CHUNKS)


def chunk_key(key: str, start: int) -> str:
    return f"{key}/{start}"


def manifest_key(attempt: str, rank: int) -> str:
    return f"{manifest_prefix(attempt)}{rank}.json"


def manifest_prefix(attempt: str) -> str:
    return f"{attempt}/manifest/"


def parse_manifest_key(attempt: str, key: str) -> int | None:
    """Returns the rank whose manifest in ``attempt`` is at ``key``; None for other keys."""
    digits = key.removeprefix(manifest_prefix(attempt)).removesuffix(".json")
    is_rank = digits.isascii() and digits.isdigit() and len(digits) < 10
    return int(digits) if is_rank and manifest_key(attempt, int(digits)) == key else None


def shard_name(name: str, offsets: Sequence[int]) -> str:
    """Returns the name in a data object of the shard at ``offsets``."""
    return f"{name}@{','.join(map(str, offsets))}"


# Data objects


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A leaf to place in a data object.

    ``name`` is unique in the object; ``dtype`` is torch's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class ObjectLayout(msgspec.Struct, frozen=True, gc=False):
    """The layout of a data object. Sizes in bytes.

    Attributes:
        header: The first bytes: length, JSON, padding.
        starts: Absolute offset of each slot, in the given order.
    """

    header: bytes
    starts: tuple[int, ...]
    size: int


class _Tensor(msgspec.Struct, frozen=True, gc=False):
    """A member of a safetensors header. Offsets count from the data section."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_METADATA = "__metadata__"
_ESCAPED_METADATA = "%5F_metadata__"
_HEADER_PREFIX = b'{"__metadata__":{"format":"pt"}'
"""Some programs that open safetensors files for torch require ``format``."""

_LENGTH_BYTES = 8
_SLOT_COST = 128
"""Upper bound of a header member's fixed text, two offsets and an eighth of the prefix."""

_MEMBERS_AT_ONCE = 256
"""Members of a header that are encoded at once. Many more, kept until the last one, would trigger
full garbage collections.
"""

_encoder = msgspec.json.Encoder()


def header_cost(name: str, ndim: int) -> int:
    """Returns an upper bound of a leaf's bytes in a header, also of a shard of ``name``."""
    return _SLOT_COST + len(_encoder.encode(name)) + 42 * ndim  # 21 per size or offset


def most_header_bytes(name_length: int, ndim: int) -> int:
    """Returns an upper bound of ``header_cost``, for names of up to ``name_length`` characters."""
    return _SLOT_COST + 2 + 6 * name_length + 42 * ndim  # JSON: up to 6 bytes per character


def lay_out(slots: Sequence[Slot]) -> ObjectLayout:
    """Lays out ``slots`` consecutively, in the given order, and encodes the header.

    Raises:
        ValueError: Names are not unique, a size does not fit dtype and shape, or the header is
            longer than ``MAX_HEADER_BYTES``.
    """
    names: set[str] = set()
    members: dict[str, _Tensor] = {}
    encoded = [_HEADER_PREFIX]
    offsets: list[int] = []
    types: dict[object, tuple[str, tuple[int, ...]]] = {}  # few, in a model
    position = 0
    for slot in slots:
        name = _ESCAPED_METADATA if slot.name == _METADATA else slot.name
        if name in names:
            raise ValueError(f"{name!r} is twice in one data object")
        names.add(name)
        nbytes = slot.nbytes
        kind = slot.dtype, slot.shape, nbytes
        found = types.get(kind)
        if found is None:
            found = types[kind] = _stored_type(slot)
        dtype, shape = found
        stop = position + nbytes
        members[name] = _Tensor(dtype, shape, (position, stop))
        offsets.append(position)
        position = stop
        if len(members) == _MEMBERS_AT_ONCE:
            encoded.append(_encoder.encode(members)[1:-1])
            members = {}
    if members:
        encoded.append(_encoder.encode(members)[1:-1])
    json = b",".join(encoded) + b"}"
    if len(json) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a header of {len(json)} bytes is longer than {MAX_HEADER_BYTES}: "
            "more names go into a further object"
        )
    data_start = -(-(_LENGTH_BYTES + len(json)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    padded = json.ljust(data_start - _LENGTH_BYTES, b" ")
    return ObjectLayout(
        header=len(padded).to_bytes(_LENGTH_BYTES, "little") + padded,
        starts=tuple([data_start + offset for offset in offsets]),
        size=data_start + position,
    )


def _stored_type(slot: Slot) -> tuple[str, tuple[int, ...]]:
    dtype = SAFETENSORS_DTYPES.get(slot.dtype)
    shape = slot.shape
    if dtype is None:
        if slot.nbytes < 0:
            raise ValueError(f"{slot.name!r} has {slot.nbytes} bytes")
        return "U8", (slot.nbytes,)
    if prod(shape) * _TORCH_ITEMSIZES[slot.dtype] != slot.nbytes or min(shape, default=0) < 0:
        raise ValueError(
            f"{slot.name!r} has {slot.nbytes} bytes, not those of {slot.dtype} {shape}"
        )
    if dtype == "F4":
        # A torch element packs two values; safetensors counts values.
        return (dtype, (*shape[:-1], 2 * shape[-1])) if shape else ("U8", (1,))
    return dtype, shape


_COLLECT = "collect"
_COPY = "copy/"


class _CopyClaim(msgspec.Struct):
    stored: list[str]


def claim_prefix(owner: str) -> str:
    return f"{owner}/claim/"


def copy_claim_key(owner: str, attempt: str) -> str:
    """Returns the key by which ``owner`` claims the attempt that it copies."""
    return f"{claim_prefix(owner)}{_COPY}{attempt}"


def collection_key(owner: str) -> str:
    """Returns the key by which ``owner`` announces the deletion of copies' leftovers."""
    return f"{claim_prefix(owner)}{_COLLECT}"


def parse_claim(owner: str, key: str) -> str | None:
    """Returns the attempt that a claim names; ``""`` for a collection, None for other keys."""
    rest = key.removeprefix(claim_prefix(owner))
    if rest == _COLLECT:
        return ""
    attempt = rest.removeprefix(_COPY)
    is_claim = rest.startswith(_COPY) and not attempt.startswith(".") and "/" not in attempt
    return attempt if is_claim and attempt else None


def encode_copy_claim(stored: Iterable[str]) -> bytes:
    """Encodes a copy's claim; ``stored`` has the keys of complete objects."""
    return msgspec.json.encode(_CopyClaim(sorted(stored)))


def decode_copy_claim(data: bytes) -> list[str]:
    """Returns the keys of complete objects; empty if the claim is unreadable."""
    try:
        return msgspec.json.decode(data, type=_CopyClaim).stored
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
