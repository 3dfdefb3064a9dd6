"""Leaves that are no tensors: what is encoded inline, what as bytes, what is refused.

Implements "Inline encoding" of ``docs/format.md``, and the bytes of ``bytes`` entries. The
safe set is closed: a type outside of it is pickled if the caller allowed that, else refused.
It must not know where leaves stand, entries, app states or storage.
"""

from __future__ import annotations

import ast
import io
import struct
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from actorsnap.errors import FormatError, UsageError
from actorsnap.state.tensors import DTYPES
from actorsnap.state.tree import CONTAINER_TYPES

__all__ = [
    "INLINE_BYTES",
    "MAX_INT_BITS",
    "NUMPY_DTYPES",
    "NotInline",
    "array_from_npy",
    "array_to_npy",
    "bytes_of",
    "decode_attributes",
    "decode_inline",
    "encode_attributes",
    "encode_inline",
    "numpy_name",
    "pickled",
    "unpickled",
    "value_of",
]

INLINE_BYTES: Final = 4096
"""Longer bytes, strings and containers are stored as bytes, beside the tensors."""

MAX_INT_BITS: Final = 12_000
"""Python prints no integers that are much longer."""

_MAX_DEPTH: Final = 100
"""Of containers inside of one inline value. These recurse, on a stack that others use too."""

_INT64: Final = (-(1 << 63), 1 << 63)

_MEMORY_FORMATS: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.memory_format)
}
_LAYOUTS: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.layout)
}


_DICTS: Final[dict[str, Callable[[Any], Any]]] = {
    tag: kind for kind, tag in CONTAINER_TYPES.items() if issubclass(kind, dict)
}


class NotInline(Exception):
    """A value is outside of what the inline encoding can say.

    Attributes:
        value: It, or what is in it.
        kind: Names its type.
    """

    def __init__(self, value: object) -> None:
        kind = type(value)
        name = kind.__qualname__
        self.value = value
        self.kind = name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"
        super().__init__(self.kind)


# Inline encoding ----------------------------------------------------------------------------


def encode_inline(value: object, path: str) -> Any:
    """Returns ``value`` as something that JSON can hold.

    Raises:
        NotInline: It is outside of the safe set.
        UsageError: It contains itself or nests too deep. Names ``path``.
    """
    return _encode(value, path, 0)


def _encode(value: object, path: str, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        return _encode_str(value)  # type: ignore[arg-type]
    if kind is bool or value is None:
        return value
    if kind is int:
        low, high = _INT64
        return value if low <= value < high else _encode_int(value)  # type: ignore[operator, arg-type]
    if kind is float:
        return _encode_float(value)  # type: ignore[arg-type]
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.dtype):
        return {"$": "npdtype", "v": _encode_descr(value)}
    if kind in CONTAINER_TYPES:
        return _encode_container(value, path, depth + 1)
    raise NotInline(value)


def _encode_str(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            data = value.encode("utf-8", "surrogatepass")
            return {"$": "str", "v": b64encode(data).decode()}
    return value


def _encode_int(value: int) -> Any:
    if value.bit_length() > MAX_INT_BITS:
        raise NotInline(value)
    return {"$": "int", "v": str(value)}


def _encode_float(value: float) -> Any:
    return value if isfinite(value) else {"$": "float", "v": struct.pack(">d", value).hex()}


def _encode_bytes(value: bytes | bytearray) -> Any:
    return {"$": type(value).__name__, "v": b64encode(value).decode()}


def _encode_descr(dtype: np.dtype[Any]) -> Any:
    """Returns numpy's own description, if numpy makes an equal dtype from it."""
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        same = np.lib.format.descr_to_dtype(descr)
    except (TypeError, ValueError):
        raise NotInline(dtype) from None
    if same != dtype or dtype.hasobject or dtype.isbuiltin == 2 or dtype.kind == "T":
        raise NotInline(dtype)
    return descr


def _encode_container(value: Any, path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise UsageError(f"the value at {path!r} nests too deep, or contains itself")
    kind = type(value)
    if kind is list or kind is tuple:
        items = [_encode(item, path, depth) for item in value]
        return items if kind is list else {"$": "tuple", "v": items}
    pairs = []
    low, high = _INT64
    for key, item in value.items():
        # Without a call for most: a module's state dict has a dict of its own for each submodule.
        if type(key) is not str or not key.isascii():
            key = _encode(key, path, depth)
        if type(item) is not int or not low <= item < high:
            item = _encode(item, path, depth)
        pairs.append([key, item])
    return {"$": CONTAINER_TYPES[kind], "v": pairs}


_ENCODERS: Final[dict[type, Any]] = {
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    complex: lambda v: {"$": "complex", "v": [_encode_float(v.real), _encode_float(v.imag)]},
    torch.Size: lambda v: {"$": "size", "v": list(v)},
    torch.dtype: lambda v: {"$": "dtype", "v": str(v).removeprefix("torch.")},
    torch.device: lambda v: {"$": "device", "v": str(v)},
    torch.layout: lambda v: {"$": "layout", "v": str(v).removeprefix("torch.")},
    torch.memory_format: lambda v: {"$": "memory_format", "v": str(v).removeprefix("torch.")},
}


def decode_inline(encoded: Any, path: str) -> Any:
    """Returns the value that ``encode_inline`` took.

    Raises:
        FormatError: It is not the inline encoding of any value. Names ``path``.
    """
    if encoded is None or type(encoded) in (str, bool, int, float):
        return encoded
    try:
        return _decode(encoded, 0)
    except FormatError as error:
        raise FormatError(key=path, detail=error.detail) from error
    except Exception as error:
        raise FormatError(key=path, detail=f"the inline value is malformed: {error}") from error


def _decode(encoded: Any, depth: int) -> Any:
    if encoded is None or type(encoded) in (str, bool, int, float):
        return encoded
    if depth > _MAX_DEPTH:
        raise FormatError(key="", detail="the inline value nests too deep")
    if isinstance(encoded, list | tuple):
        return [_decode(item, depth + 1) for item in encoded]
    if not isinstance(encoded, dict) or set(encoded) != {"$", "v"}:
        raise FormatError(key="", detail="an inline object has other members than '$' and 'v'")
    tag, value = encoded["$"], encoded["v"]
    if tag == "tuple":
        return tuple([_decode(item, depth + 1) for item in value])
    if type(tag) is str and tag in _DICTS:
        return _DICTS[tag]({_decode(k, depth + 1): _decode(v, depth + 1) for k, v in value})
    if tag not in _DECODERS:
        raise FormatError(key="", detail=f"unknown inline type {tag!r:.80}")
    return _DECODERS[tag](value)


def _decode_float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, dict):
        value = value["v"]
    (result,) = struct.unpack(">d", bytes.fromhex(value))
    return float(result)


def _decode_descr(descr: Any) -> Any:
    """JSON has no tuples, which numpy's descriptions of fields are made of."""
    if isinstance(descr, str):
        return descr
    fields: list[Any] = []
    for name, kind, *shape in descr:
        title = tuple(name) if isinstance(name, list) else name
        fields.append((title, _decode_descr(kind), *[tuple(dims) for dims in shape]))
    return fields


def _decode_dtype(value: Any) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(_decode_descr(value))
    if dtype.hasobject:
        raise ValueError("a numpy dtype of objects")
    return dtype


_DECODERS: Final[dict[str, Any]] = {
    "int": int,
    "float": _decode_float,
    "complex": lambda v: complex(_decode_float(v[0]), _decode_float(v[1])),
    "bytes": lambda v: b64decode(v, validate=True),
    "bytearray": lambda v: bytearray(b64decode(v, validate=True)),
    "str": lambda v: b64decode(v, validate=True).decode("utf-8", "surrogatepass"),
    "size": torch.Size,
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
    "layout": _LAYOUTS.__getitem__,
    "memory_format": _MEMORY_FORMATS.__getitem__,
    "npdtype": _decode_dtype,
}


# Attributes ----------------------------------------------------------------------------------


def _is_attribute(name: object) -> bool:
    """Whether a parameter may have an attribute of that name of the user's own."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not name.startswith("_")
        and not hasattr(torch.nn.Parameter, name)
    )


def encode_attributes(parameter: torch.Tensor, path: str) -> dict[str, Any] | None:
    """Returns the plain attributes of a parameter in the inline encoding, None if it has none.

    Left out are names that begin with ``_``, which are a library's, those of torch itself, values
    outside of the safe set, and those that are longer than is stored inline.
    """
    found: dict[str, Any] = {}
    for name, value in vars(parameter).items():
        if _is_attribute(name):
            with suppress(NotInline, UsageError):
                encoded = encode_inline(value, path)
                if len(msgspec.json.encode(encoded)) <= INLINE_BYTES:
                    found[name] = encoded
    return found or None


def decode_attributes(encoded: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the attributes that ``encode_attributes`` took.

    Raises:
        FormatError: One of them is not the inline encoding of any value. Names ``path``.
    """
    return {
        name: decode_inline(value, path) for name, value in encoded.items() if _is_attribute(name)
    }


# Bytes --------------------------------------------------------------------------------------


def bytes_of(value: object, path: str) -> tuple[str, bytes | bytearray] | None:
    """Returns type and bytes of a value that is too long for a manifest; None for others.

    Raises:
        NotInline, UsageError: As ``encode_inline``, for what is in a container.
    """
    kind = type(value)
    if kind is bytes or kind is bytearray:
        assert isinstance(value, bytes | bytearray)
        return (kind.__name__, value) if len(value) > INLINE_BYTES else None
    if kind is str:
        assert isinstance(value, str)
        if len(value) <= INLINE_BYTES // 4:
            return None
        data = value.encode("utf-8", "surrogatepass")
        return ("str", data) if len(data) > INLINE_BYTES else None
    if kind in CONTAINER_TYPES:
        data = msgspec.json.encode(encode_inline(value, path))
        return ("json", data) if len(data) > INLINE_BYTES else None
    return None


def value_of(kind: str, data: bytearray) -> Any:
    """Returns the value of a ``bytes`` entry that is neither pickled nor an array.

    Raises:
        Exception: The bytes are not of that type.
    """
    if kind == "bytes":
        return bytes(data)
    if kind == "bytearray":
        return data
    if kind == "json":
        return _decode(msgspec.json.decode(data), 0)
    return data.decode("utf-8", "surrogatepass")


def pickled(value: object) -> bytes:
    """Returns ``value`` as ``torch.save`` writes it, pickle protocol 5."""
    out = io.BytesIO()
    torch.save(value, out, pickle_protocol=5)
    return out.getvalue()


def unpickled(data: bytearray) -> Any:
    """Returns what ``pickled`` took, tensors on CPU. Runs whatever code the bytes ask for."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


# NumPy --------------------------------------------------------------------------------------

NUMPY_DTYPES: Final[dict[str, tuple[np.dtype[Any], str]]] = {
    dtype.str: (dtype, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
    for dtype in [np.dtype(name)]
}
"""numpy's type string -> its dtype, and the torch dtype of the same bytes."""


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Returns the type string of a dtype that torch has too; None for any other."""
    name = dtype.str
    return name if name in NUMPY_DTYPES and NUMPY_DTYPES[name][0] == dtype else None


def array_to_npy(array: np.ndarray[Any, Any]) -> bytes:
    """Returns an array of a dtype that torch lacks as an ``.npy`` file.

    Raises:
        NotInline: Its dtype holds Python objects, or numpy cannot describe it.
    """
    _encode_descr(array.dtype)
    out = io.BytesIO()
    with warnings.catch_warnings():
        # That numpy before 1.9 (or 1.17) cannot read this version of the format.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def array_from_npy(data: bytearray) -> np.ndarray[Any, Any]:
    """Returns the array in an ``.npy`` file, in the memory of ``data``.

    numpy's own reader allocates what the header asks for before it looks for the bytes.

    Raises:
        ValueError: It is no such file, holds Python objects, or is too short or long.
    """
    major = data[6] if len(data) > 12 and data.startswith(b"\x93NUMPY") else 0
    if not 1 <= major <= 3:
        raise ValueError("it is no .npy file of version 1 to 3")
    begin = 10 if major == 1 else 12
    start = begin + int.from_bytes(data[8:begin], "little")
    text = data[begin:start].decode("utf-8" if major == 3 else "latin-1")
    header = ast.literal_eval(text.strip())
    if set(header) != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header is malformed")
    dtype = np.lib.format.descr_to_dtype(header["descr"])
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    order: Literal["C", "F"] = "F" if header["fortran_order"] else "C"
    array: np.ndarray[Any, Any] = np.ndarray(
        header["shape"], dtype, buffer=data, offset=start, order=order
    )
    if start + array.nbytes != len(data):
        raise ValueError(f"it has {len(data)} bytes, not {start + array.nbytes}")
    return array
