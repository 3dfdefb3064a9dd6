# SPDX-License-Identifier: Apache-2.0
"""Encodes leaves that are no tensors, inline or as bytes (``docs/format.md``).

Types outside of a closed set are pickled if allowed, else refused. Equal sets are encoded alike in
every process. It must not know entries or storage, and imports torch for values of torch only: the
shell shows all others without it.
"""

from __future__ import annotations

import ast
import io
import pickle
import struct
import warnings
from base64 import b64decode, b64encode
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from functools import cache, partial
from math import isfinite
from pathlib import (
    Path,
    PosixPath,
    PurePath,
    PurePosixPath,
    PureWindowsPath,
    WindowsPath,
)
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import TensorType, encodes_values
from actorsnap.state.records import Rebuild, class_of, fields_of, fields_of_member
from actorsnap.state.tree import (
    AS_RECORDS,
    CONTAINER_TYPES,
    DICT_TYPES,
    FACTORIES,
    has_plain_factory,
    kind_of,
)

if TYPE_CHECKING:
    import torch

INLINE_BYTES: Final = 4096
"""Maximum length of inline values, in bytes."""

MAX_INT_BITS: Final = 12_000
"""Maximum length of an integer, in bits. Python refuses to print much longer ones."""

_MAX_DEPTH: Final = 100
"""Maximum nesting of inline containers, which are encoded by recursion."""

_INT64: Final = (-(1 << 63), 1 << 63)


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


class Opaque(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An object that was unpickled: in memory only, in no manifest.

    An array or number of numpy, or anything else with the user's permission.
    """

    value: object


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A value that is not unpickled: in memory only, in no manifest. ``reason`` is for the user."""

    reason: str


class NotInline(Exception):
    """The inline encoding does not cover ``value``."""

    def __init__(self, value: object) -> None:
        kind = type(value)
        name = kind.__qualname__
        self.value = value
        self.kind = name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"
        super().__init__(self.kind)


def encode_inline(value: object, path: str) -> Any:
    """Encodes ``value`` for JSON.

    Raises:
        NotInline: A part needs pickle.
        UsageError: The value contains itself or nests too deep. Names ``path``.
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
    if encoder is None and kind.__module__ == "torch":
        encoder = _torch_encoders().get(kind)
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.dtype):
        return {"$": "npdtype", "v": _encode_descr(value)}
    if kind in _SETS or kind_of(value) is not None:
        return _encode_container(value, path, depth + 1)
    if isinstance(value, Enum):
        return _encode_record(value, fields_of_member(value), path, depth + 1)
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
    """Returns numpy's description, if that restores the dtype."""
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
    if kind_of(value) == "record":
        fields = fields_of(value)
        if fields is None:
            raise NotInline(value)
        return _encode_record(value, fields, path, depth)
    if kind is defaultdict:
        if not has_plain_factory(value):
            raise NotInline(value)
        name = getattr(value.default_factory, "__name__", None)
        return {"$": "defaultdict", "v": [_encode_pairs(value, path, depth), name]}
    if issubclass(kind, dict):
        return {"$": CONTAINER_TYPES[kind], "v": _encode_pairs(value, path, depth)}
    items = [_encode(item, path, depth) for item in value]
    if kind is deque:
        return {"$": "deque", "v": [items, value.maxlen]}
    if kind in _SETS:
        # Their order differs between processes.
        return {"$": kind.__name__, "v": sorted(items, key=msgspec.json.encode)}
    return items if kind is list else {"$": "tuple", "v": items}


def _encode_record(value: object, fields: dict[str, Any], path: str, depth: int) -> Any:
    return {"$": "record", "v": [*class_of(value), _encode_pairs(fields, path, depth)]}


def _encode_pairs(value: Mapping[Any, Any], path: str, depth: int) -> list[list[Any]]:
    pairs = []
    low, high = _INT64
    for key, item in value.items():
        # Avoids most calls: ``_metadata`` of a module has a dict per submodule.
        if type(key) is not str or not key.isascii():
            key = _encode(key, path, depth)
        kind = type(item)
        if kind is dict and depth < _MAX_DEPTH:
            item = {"$": "dict", "v": _encode_pairs(item, path, depth + 1)}
        elif kind is not int or not low <= item < high:
            item = _encode(item, path, depth)
        pairs.append([key, item])
    return pairs


def _encode_zone(zone: object) -> Any:
    if zone is None:
        return None
    if type(zone) is not timezone:  # others read the time zones of a machine
        raise NotInline(zone)
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [_microseconds(offset), *map(_encode_str, name)]


def _microseconds(value: timedelta) -> int:
    return value // timedelta(microseconds=1)


def _encode_time(value: datetime | time) -> Any:
    text = value.replace(tzinfo=None).isoformat()
    return {"$": type(value).__name__, "v": [text, value.fold, _encode_zone(value.tzinfo)]}


def _encode_path(tag: str) -> Callable[[PurePath], Any]:
    return lambda value: {"$": tag, "v": _encode_str(value.as_posix())}


_SETS: Final = frozenset({set, frozenset})
_ENCODERS: Final[dict[type, Any]] = {
    range: lambda v: {"$": "range", "v": [_encode(n, "", 0) for n in (v.start, v.stop, v.step)]},
    date: lambda v: {"$": "date", "v": v.isoformat()},
    time: _encode_time,
    datetime: _encode_time,
    timedelta: lambda v: {"$": "timedelta", "v": [v.days, v.seconds, v.microseconds]},
    timezone: lambda v: {"$": "timezone", "v": _encode_zone(v)},
    PosixPath: _encode_path("path"),
    WindowsPath: _encode_path("path"),
    PurePosixPath: _encode_path("pure_posix_path"),
    PureWindowsPath: _encode_path("pure_windows_path"),
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    complex: lambda v: {"$": "complex", "v": [_encode_float(v.real), _encode_float(v.imag)]},
}


@cache
def _torch_encoders() -> dict[type, Any]:
    import torch

    return {
        torch.Size: lambda v: {"$": "size", "v": list(v)},
        torch.dtype: lambda v: {"$": "dtype", "v": _name(v)},
        torch.device: lambda v: {"$": "device", "v": str(v)},
        torch.layout: lambda v: {"$": "layout", "v": _name(v)},
        torch.memory_format: lambda v: {"$": "memory_format", "v": _name(v)},
    }


def decode_inline(encoded: Any, path: str, rebuild: Rebuild = AS_RECORDS) -> Any:
    """Decodes a value of ``encode_inline``.

    Raises:
        FormatError: ``encoded`` encodes no value. Names ``path``.
        UsageError: The value is ``Refused``, or a record that cannot be rebuilt. Names ``path``.
    """
    if type(encoded) is Refused:
        raise UsageError(encoded.reason)
    try:
        return _decode(encoded, 0, rebuild)
    except UsageError as error:
        raise UsageError(f"{path!r} {error}") from error
    except FormatError as error:
        raise FormatError(key=path, detail=error.detail) from error
    except Exception as error:
        raise FormatError(key=path, detail=f"the inline value is malformed: {error}") from error


def _decode(encoded: Any, depth: int, rebuild: Rebuild) -> Any:
    if encoded is None or type(encoded) in (str, bool, int, float):
        return encoded
    if type(encoded) is Opaque:
        value = encoded.value
        return value.copy() if type(value) is np.ndarray else value
    if depth > _MAX_DEPTH:
        raise FormatError(key="", detail="the inline value nests too deep")
    if isinstance(encoded, list | tuple):
        return [_decode(item, depth + 1, rebuild) for item in encoded]
    if not isinstance(encoded, dict) or set(encoded) != {"$", "v"}:
        raise FormatError(key="", detail="an inline object has other members than '$' and 'v'")
    tag, value = encoded["$"], encoded["v"]
    if type(tag) is str and tag in _NESTED_DECODERS:
        return _NESTED_DECODERS[tag](value, depth + 1, rebuild)
    if tag in _TORCH_TAGS:
        return _torch_decoders()[tag](value)
    if tag not in _DECODERS:
        raise FormatError(key="", detail=f"unknown inline type {tag!r:.80}")
    return _DECODERS[tag](value)


def _decode_items(value: Any, depth: int, rebuild: Rebuild) -> list[Any]:
    if type(value) is not list:
        raise ValueError("its items are not a list")
    return [_decode(item, depth, rebuild) for item in value]


def _decode_pairs(value: Any, depth: int, rebuild: Rebuild) -> dict[Any, Any]:
    return {_decode(k, depth, rebuild): _decode(v, depth, rebuild) for k, v in value}


def _decode_dict(
    kind: Callable[[Any], Any], value: Any, depth: int, rebuild: Rebuild
) -> dict[Any, Any]:
    found: dict[Any, Any] = kind(_decode_pairs(value, depth, rebuild))
    return found


def _decode_set(kind: type, value: Any, depth: int, rebuild: Rebuild) -> Any:
    found = kind(_decode_items(value, depth, rebuild))
    if len(found) != len(value):
        raise ValueError("items of a set are equal")
    return found


def _decode_deque(value: Any, depth: int, rebuild: Rebuild) -> deque[Any]:
    encoded, limit = value
    items = _decode_items(encoded, depth, rebuild)
    if limit is not None and (type(limit) is not int or len(items) > limit):
        raise ValueError(f"a deque of at most {limit!r:.80} items has {len(items)}")
    return deque(items, limit)


def _decode_defaultdict(value: Any, depth: int, rebuild: Rebuild) -> defaultdict[Any, Any]:
    pairs, name = value
    if name is not None and name not in FACTORIES:
        raise ValueError(f"{name!r:.80} is not a factory")
    return defaultdict(FACTORIES.get(name), _decode_pairs(pairs, depth, rebuild))


def _decode_record(value: Any, depth: int, rebuild: Rebuild) -> object:
    module, qualname, pairs = value
    fields = _decode_pairs(pairs, depth, rebuild)
    if set(map(type, fields)) - {str} or len(fields) != len(pairs):
        raise ValueError("the fields of a record have different names")
    return rebuild.record(module, qualname, fields)


_NESTED_DECODERS: Final[dict[str, Callable[[Any, int, Rebuild], Any]]] = {
    "tuple": lambda v, depth, rebuild: tuple(_decode_items(v, depth, rebuild)),
    "set": partial(_decode_set, set),
    "frozenset": partial(_decode_set, frozenset),
    "deque": _decode_deque,
    "defaultdict": _decode_defaultdict,
    "record": _decode_record,
    **{name: partial(_decode_dict, kind) for name, kind in DICT_TYPES.items()},
}


def _decode_float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, dict):
        value = value["v"]
    (result,) = struct.unpack(">d", bytes.fromhex(value))
    return float(result)


def _decode_descr(descr: Any) -> Any:
    """Restores the tuples, which JSON lacks."""
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


def _decode_str(value: Any) -> str:
    value = _decode(value, 0, AS_RECORDS)
    if type(value) is not str:
        raise ValueError(f"{value!r:.80} is not text")
    return value


def _decode_path(kind: type[PurePath]) -> Callable[[Any], PurePath]:
    return lambda value: kind(_decode_str(value))


def _decode_range(value: Any) -> range:
    start, stop, step = _integers([_decode(each, 0, AS_RECORDS) for each in value])
    return range(start, stop, step)


def _integers(values: list[Any]) -> list[int]:
    if set(map(type, values)) != {int}:
        raise ValueError(f"{values!r:.80} are not integers")
    return values


def _decode_date(value: Any) -> date:
    found = date.fromisoformat(value)
    if found.isoformat() != value:
        raise ValueError(f"{value!r:.80} is not a date")
    return found


def _decode_zone(value: Any) -> timezone:
    offset, *name = value
    return timezone(timedelta(microseconds=_integers([offset])[0]), *map(_decode_str, name))


def _decode_time(kind: type[Any]) -> Callable[[Any], Any]:
    def decode(value: Any) -> Any:
        text, fold, zone = value
        found = kind.fromisoformat(text)
        if found.isoformat() != text or found.tzinfo is not None:
            raise ValueError(f"{text!r:.80} is not of type {kind.__name__}")
        return found.replace(fold=fold, tzinfo=None if zone is None else _decode_zone(zone))

    return decode


_DECODERS: Final[dict[str, Any]] = {
    "range": _decode_range,
    "date": _decode_date,
    "time": _decode_time(time),
    "datetime": _decode_time(datetime),
    "timedelta": lambda v: timedelta(*_integers(v)),
    "timezone": _decode_zone,
    "path": _decode_path(Path),
    "pure_posix_path": _decode_path(PurePosixPath),
    "pure_windows_path": _decode_path(PureWindowsPath),
    "int": int,
    "float": _decode_float,
    "complex": lambda v: complex(_decode_float(v[0]), _decode_float(v[1])),
    "bytes": lambda v: b64decode(v, validate=True),
    "bytearray": lambda v: bytearray(b64decode(v, validate=True)),
    "str": lambda v: b64decode(v, validate=True).decode("utf-8", "surrogatepass"),
    "npdtype": _decode_dtype,
}

_TORCH_TAGS: Final = ("size", "dtype", "device", "layout", "memory_format")


@cache
def _torch_decoders() -> dict[str, Any]:
    import torch

    from actorsnap.state.tensors import DTYPES

    def constants(kind: type) -> dict[str, Any]:
        return {_name(value): value for value in vars(torch).values() if isinstance(value, kind)}

    return {
        "size": torch.Size,
        "dtype": DTYPES.__getitem__,
        "device": torch.device,
        "layout": constants(torch.layout).__getitem__,
        "memory_format": constants(torch.memory_format).__getitem__,
    }


def classes_in(encoded: Any) -> Iterator[tuple[str, str]]:
    """Yields module and qualified name of the records in an inline value."""
    if isinstance(encoded, dict):
        value = encoded.get("v")
        if encoded.get("$") == "record" and isinstance(value, list | tuple) and len(value) == 3:
            module, qualname, _ = value
            yield str(module), str(qualname)
        encoded = value
    if isinstance(encoded, list | tuple):
        for item in encoded:
            yield from classes_in(item)


def _is_attribute(name: object) -> bool:
    import torch

    return (
        isinstance(name, str)
        and name.isidentifier()
        and not name.startswith("_")
        and not hasattr(torch.nn.Parameter, name)
    )


def encode_attributes(parameter: torch.Tensor, path: str) -> dict[str, Any] | None:
    """Encodes the plain attributes of a parameter inline; returns None without any.

    Skips names of torch and of libraries (a leading ``_``), and values that are unsafe, records or
    too long.
    """
    attributes: dict[str, Any] = {}
    for name, value in vars(parameter).items():
        if _is_attribute(name):
            with suppress(NotInline, UsageError):
                encoded = encode_inline(value, path)
                is_short = len(msgspec.json.encode(encoded)) <= INLINE_BYTES
                if is_short and not any(classes_in(encoded)):  # no restore needs a class for them
                    attributes[name] = encoded
    return attributes or None


def decode_attributes(
    encoded: Mapping[str, Any], path: str, rebuild: Rebuild = AS_RECORDS
) -> dict[str, Any]:
    """See ``decode_inline``."""
    return {
        name: decode_inline(value, path, rebuild)
        for name, value in encoded.items()
        if _is_attribute(name)
    }


def encode(value: object, path: str) -> tuple[str | None, Any]:
    """Encodes a value inline; or as bytes, if too long.

    Returns:
        The type of a ``bytes`` entry and its bytes; or None and the inline value.

    Raises:
        NotInline, UsageError: See ``encode_inline``.
    """
    kind = type(value)
    if kind in (bytes, bytearray) and len(value) > INLINE_BYTES:  # type: ignore[arg-type]
        return kind.__name__, value
    if kind is str and len(value) > INLINE_BYTES // 4:  # type: ignore[arg-type]
        data = value.encode("utf-8", "surrogatepass")  # type: ignore[attr-defined]
        if len(data) > INLINE_BYTES:
            return "str", data
    encoded = encode_inline(value, path)
    if kind in CONTAINER_TYPES or kind in _SETS:
        data = msgspec.json.encode(encoded)
        if len(data) > INLINE_BYTES:
            return "values" if encodes_values(encoded) else "json", data
    return None, encoded


def decode(kind: str, data: bytearray, rebuild: Rebuild = AS_RECORDS) -> Any:
    """Decodes a ``bytes`` entry. Unpickling runs any code in it.

    Raises:
        UsageError: See ``decode_inline``.
        Exception: The bytes are no value of that type.
    """
    match kind:
        case "bytes":
            return bytes(data)
        case "bytearray":
            return data
        case "json" | "values":
            return _decode(msgspec.json.decode(data), 0, rebuild)
        case "numpy":
            return array_from_npy(data)
        case "pickle":
            import torch

            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        case _:
            return data.decode("utf-8", "surrogatepass")


def pickled(value: object) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(value, out, pickle_protocol=5)
    return out.getvalue()


def can_be_pickled(value: object) -> bool:
    """Whether pickle takes ``value``. Runs its code, and keeps no bytes."""
    try:
        pickle.Pickler(_Sink(), protocol=5).dump(value)
    except Exception:  # of the value's own code
        return False
    return True


class _Sink:
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    np.dtype(name).str: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Dtypes that torch has, too, with the same name; by numpy's type string."""


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Returns None for a dtype that torch lacks."""
    return dtype.str if NUMPY_DTYPES.get(dtype.str) == dtype else None


def numpy_kind(value: object) -> TensorType | None:
    """Returns the type of the entry for a numpy value of a dtype that torch has, too."""
    if isinstance(value, np.ndarray | np.generic) and numpy_name(value.dtype) is not None:
        if isinstance(value, np.generic):
            return "numpy_scalar"
        return "numpy" if type(value) is np.ndarray else None
    return None


def array_to_npy(array: np.ndarray[Any, Any]) -> bytes:
    """Encodes an array of a dtype that torch lacks as an ``.npy`` file.

    Raises:
        NotInline: The dtype holds Python objects, or numpy cannot describe it.
    """
    _encode_descr(array.dtype)
    out = io.BytesIO()
    with warnings.catch_warnings():
        # numpy warns that releases before 1.17 cannot read it.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def array_from_npy(data: bytearray) -> np.ndarray[Any, Any]:
    """Decodes an ``.npy`` file in the memory of ``data``. numpy's reader trusts the header's size.

    Raises:
        ValueError: ``data`` is not such a file, holds Python objects, or has the wrong length.
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
