# SPDX-License-Identifier: Apache-2.0
"""Writes what ``torch.save`` writes: a zip file of a pickle and storages, without having the data.

The pickle is of tensors and plain values only, so ``torch.load(weights_only=True)`` reads it. Data
begins at multiples of 64 bytes, for ``torch.load(mmap=True)``. The CRC-32 of a storage follows its
data, so that the file can be written from its beginning to its end.
"""

from __future__ import annotations

import io
import pickle
import shlex
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from actorsnap.errors import UsageError
from actorsnap.interop.formats.dcp_metadata import TOP
from actorsnap.runtime.exporting import Body, Known, Late, Part

_ALIGNMENT = 64
_SMALL = (1 << 32) - 1
"""Sizes and offsets from here on need the zip64 format."""

_ELSEWHERE = (1 << 32) - 1
"""Stands in a field of 32 bits for a value in the zip64 format."""

_HAS_DESCRIPTOR, _IS_UTF8 = 0x8, 0x800
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_PLAIN = frozenset({bool, int, float, complex, str, bytes, bytearray, type(None)}) | {
    torch.Size,
    torch.dtype,
    torch.device,
}
_DICTS = (dict, OrderedDict, Counter)


class SharedBytes(msgspec.Struct, frozen=True, eq=False):
    """Bytes that tensors of a file share; ``dtype`` is torch's."""

    body: Body
    dtype: str


class Stub(msgspec.Struct, frozen=True, eq=False):
    """Stands for a tensor in a state."""


class TensorStub(Stub, frozen=True, eq=False):
    """Stub of a whole tensor. Strides are in elements, ``offset`` is in bytes."""

    storage: SharedBytes
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_parameter: bool
    requires_grad: bool


def check_plain(value: object, path: str) -> None:
    """Raises ``UsageError`` with the path of a value that ``weights_only`` refuses."""
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, Stub):
        return
    if kind in _DICTS:
        assert isinstance(value, Mapping)
        for key, child in value.items():
            check_plain(key, path)
            check_plain(child, f"{path}/{key}")
    elif kind in (list, tuple, set):
        assert isinstance(value, list | tuple | set)
        for number, child in enumerate(value):
            check_plain(child, f"{path}/{number}")
    else:
        raise not_plain(path, f"{kind.__module__}.{kind.__qualname__}")


def not_plain(path: str, what: str) -> UsageError:
    key, _, rest = path.partition("/")
    if key == TOP and rest:  # a key of the state dict, and not all tensors of its top level
        key = f"{TOP}/{rest.partition('/')[0]}"
    return UsageError(
        f"{path!r} is a {what}: only dense tensors and plain values are exported. Leave its key "
        f"out: on the command line --leave-out {shlex.quote(key)}; in Python, "
        "pass a function as rename= that returns None for the paths of this key"
    )


class ArchiveParts:
    """A zip file of ``torch.save``, as parts.

    Args:
        state: Plain values (``check_plain``).
    """

    def __init__(self, state: object) -> None:
        self.parts: list[Part] = []
        self._at = 0
        # Name, CRC-32 or body, size and place of each record.
        self._records: list[tuple[bytes, int | Body, int, int]] = []
        out = io.BytesIO()
        pickler = _StatePickler(out)
        pickler.dump(state)
        self._add("data.pkl", out.getvalue())
        self._add(".format_version", b"1")
        self._add(".storage_alignment", str(_ALIGNMENT).encode())
        self._add("byteorder", b"little")
        for number, storage in enumerate(pickler.storages):
            self._add(f"data/{number}", storage.body)
        self._add("version", b"3\n")
        size = len(self._directory([0] * len(self._records)))
        self._append(Late(size, self._finished), size)

    @property
    def nbytes(self) -> int:
        return self._at

    def _add(self, name: str, content: bytes | Body) -> None:
        encoded = f"archive/{name}".encode()
        is_body = isinstance(content, Body)
        size = content.nbytes if isinstance(content, Body) else len(content)
        crc32 = content if isinstance(content, Body) else zlib.crc32(content)
        self._records.append((encoded, crc32, size, self._at))
        is_large = size >= _SMALL
        extra = struct.pack("<2H2Q", 1, 16, size, size) if is_large else b""
        fixed = self._at + _LOCAL.size + len(encoded) + len(extra) + 4
        padding = -fixed % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        shown = (0, 0, 0) if isinstance(crc32, Body) else (crc32, size, size)
        if is_large:
            shown = shown[0], _ELSEWHERE, _ELSEWHERE
        header = _LOCAL.pack(
            b"PK\3\4",
            45 if is_large else 20,
            _IS_UTF8 | (_HAS_DESCRIPTOR if is_body else 0),
            *(0, 0, 0),
            *shown,
            len(encoded),
            len(extra),
        )
        self._append(Known(header + encoded + extra), len(header) + len(encoded) + len(extra))
        if not isinstance(content, Body):
            self._append(Known(content), size)
            return
        self._append(content, size)
        layout = struct.Struct("<4sI2Q" if is_large else "<4s3I")

        async def descriptor() -> bytes:
            return layout.pack(b"PK\7\x08", await content.crc32(), size, size)

        self._append(Late(layout.size, descriptor), layout.size)

    def _append(self, part: Part, size: int) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, Known) and isinstance(part, Known):
            self.parts[-1] = Known(last.data + part.data)
        else:
            self.parts.append(part)
        self._at += size

    async def _finished(self) -> bytes:
        return self._directory(
            [await crc.crc32() if isinstance(crc, Body) else crc for _, crc, _, _ in self._records]
        )

    def _directory(self, sums: list[int]) -> bytes:
        """Returns the central directory and what follows it."""
        start = self._records_end
        found = bytearray()
        for (name, content, size, at), crc32 in zip(self._records, sums, strict=True):
            large = [value for value in (size, size, at) if value >= _SMALL]
            extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
            found += _CENTRAL.pack(
                b"PK\1\2",
                *(0, 45 if large else 20),
                _IS_UTF8 | (_HAS_DESCRIPTOR if isinstance(content, Body) else 0),
                *(0, 0, 0),
                crc32,
                _field(size),
                _field(size),
                len(name),
                len(extra),
                *(0, 0, 0, 0),
                _field(at),
            )
            found += name + extra
        count, size = len(self._records), len(found)
        if max(start, size) >= _SMALL or count >= 0xFFFF:
            end = start + size
            found += struct.pack(
                "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start
            )
            found += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        found += struct.pack(
            "<4s4H2IH",
            b"PK\5\6",
            *(0, 0),
            min(count, 0xFFFF),
            min(count, 0xFFFF),
            _field(size),
            _field(start),
            0,
        )
        return bytes(found)

    @property
    def _records_end(self) -> int:
        return sum([_length(part) for part in self.parts if not self._is_directory(part)])

    def _is_directory(self, part: Part) -> bool:
        return isinstance(part, Late) and part.make == self._finished


def _field(value: int) -> int:
    return value if value < _SMALL else _ELSEWHERE


def _length(part: Part) -> int:
    if isinstance(part, Known):
        return len(part.data)
    return part.size if isinstance(part, Late) else part.nbytes


class _StatePickler(pickle.Pickler):
    """Collects ``storages`` and names them by their number, as ``torch.save`` does."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self.storages: list[SharedBytes] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if not isinstance(value, _Reference):
            return None
        storage = value.storage
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
            storage.body.has_crc32 = True
        nbytes = storage.body.nbytes
        if value.kind is torch.UntypedStorage:
            return "storage", value.kind, str(number), "cpu", nbytes
        itemsize = getattr(torch, storage.dtype).itemsize
        return "storage", value.kind, str(number), "cpu", nbytes // itemsize

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorStub):
            return NotImplemented
        dtype: torch.dtype = getattr(torch, value.dtype)
        names = torch.storage._dtype_to_storage_type_map()
        arguments = (value.offset // dtype.itemsize, value.shape, value.strides)
        hooks: OrderedDict[str, object] = OrderedDict()
        if dtype in names and value.dtype == value.storage.dtype:
            kind = getattr(torch, names[dtype])
            found = _Reduced(
                torch._utils._rebuild_tensor_v2,
                (_Reference(value.storage, kind), *arguments, self._needs(value), hooks),
            )
        else:
            kind = torch.UntypedStorage
            found = _Reduced(
                torch._utils._rebuild_tensor_v3,
                (_Reference(value.storage, kind), *arguments, self._needs(value), hooks, dtype),
            )
        if not value.is_parameter:
            return found.function, found.arguments
        return torch._utils._rebuild_parameter, (found, value.requires_grad, hooks)

    @staticmethod
    def _needs(value: TensorStub) -> bool:
        """A parameter needs a gradient itself, not its data."""
        return value.requires_grad and not value.is_parameter


class _Reference(msgspec.Struct, frozen=True, eq=False):
    storage: SharedBytes
    kind: Any


class _Reduced:
    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments
