# SPDX-License-Identifier: Apache-2.0
"""Finds the records of a zip file by ranges of it, without reading them.

Only what ``torch.save`` writes: stored records, not compressed, on one disk, with or without zip64.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import TypeAlias, TypeVar

import msgspec

from actorsnap.errors import FormatError

T = TypeVar("T")

Reading: TypeAlias = Generator[tuple[int, int], bytes, T]
"""Asks for bytes ``[start, stop)`` of a file, one range after the other, and returns a result."""

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_MEMBER = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_DESCRIPTOR = struct.Struct("<4s3L")
_HAS_DESCRIPTOR = 8
"""The flag of a record whose checksum and size follow its bytes."""

_MAX_COMMENT_BYTES = 1 << 16
_TAIL_BYTES = _END.size + _LOCATOR_64.size + _END_64.size + _MAX_COMMENT_BYTES
_IN_64 = 0xFFFFFFFF

_MAX_READ_BYTES = 1 << 28
"""Largest plausible size of a directory, and of a record that is read whole, in bytes."""

_CRC_BYTES = 1 << 20
"""Read at a time of a record that is not read whole."""


class ZipRecord(msgspec.Struct, frozen=True, gc=False):
    """A record: ``size`` bytes from ``start`` on.

    Attributes:
        header: Where its local header begins.
        packing: Why its bytes are not those in the file: ``"compressed"``; empty if they are.
        crc32: CRC-32 of its bytes; 0 if the writer did not compute it.
    """

    name: str
    header: int
    size: int
    start: int = -1
    packing: str = ""
    crc32: int = 0


async def answered(reading: Reading[T], read: Callable[[int, int], Awaitable[bytes]]) -> T:
    """Returns the result of ``reading``, with the bytes that ``read`` returns."""
    try:
        wanted = next(reading)
        while True:
            wanted = reading.send(await read(*wanted))
    except StopIteration as stop:
        result: T = stop.value
        return result


def answered_by(read: Callable[[int, int], bytes], reading: Reading[T]) -> T:
    """``answered`` for a ``read`` that is not async."""
    try:
        wanted = next(reading)
        while True:
            wanted = reading.send(read(*wanted))
    except StopIteration as stop:
        result: T = stop.value
        return result


def read_directory(
    size: int, key: str, tail_bytes: int = _TAIL_BYTES
) -> Reading[dict[str, ZipRecord]]:
    """Returns the records of a zip file of ``size`` bytes by name, with ``start`` still unknown.

    Args:
        tail_bytes: What to read first. The directory of most files is there.

    Raises:
        FormatError: It is not such a zip file, or truncated.
    """
    tail_start = max(0, size - tail_bytes)
    tail = yield tail_start, size
    at = tail.rfind(b"PK\x05\x06")
    if at < _LOCATOR_64.size and tail_start and tail_bytes < _TAIL_BYTES:
        return (yield from read_directory(size, key))
    if at < 0 or at + _END.size > len(tail):
        what = "truncated: the zip directory at its end is missing"
        detail = f"{what}. A save or a copy did not end: copy it again, or use another"
        raise FormatError(key=key, detail=detail)
    *_, count, length, start, _ = _END.unpack_from(tail, at)
    locator = at - _LOCATOR_64.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
        _, _, end_64, _ = _LOCATOR_64.unpack_from(tail, locator)
        if not 0 <= end_64 <= size - _END_64.size:
            raise FormatError(key=key, detail="damaged: the zip64 directory is outside of the file")
        data = yield end_64, end_64 + _END_64.size
        magic, *_, count, length, start = _END_64.unpack(data)
        if magic != b"PK\x06\x06":
            raise FormatError(key=key, detail="damaged: no zip64 directory is where it should be")
    if not 0 <= start <= start + length <= tail_start + at:
        raise FormatError(key=key, detail="damaged: the zip directory is outside of the file")
    if length > _MAX_READ_BYTES:
        raise FormatError(key=key, detail=f"damaged: its zip directory has {length} bytes")
    if start >= tail_start:
        directory = tail[start - tail_start : start - tail_start + length]
    else:
        directory = yield start, start + length
    try:
        return _parse(directory, count, key)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise FormatError(key=key, detail=f"its zip directory is damaged: {error}") from error


def _parse(directory: bytes, count: int, key: str) -> dict[str, ZipRecord]:
    records: dict[str, ZipRecord] = {}
    at = 0
    for _ in range(count):
        (magic, _, _, flags, method, _, _, crc32, stored, size, *lengths, _, _, _, header) = (
            _MEMBER.unpack_from(directory, at)
        )
        name_len, extra_len, comment_len = lengths
        if magic != b"PK\x01\x02":
            raise FormatError(key=key, detail="its zip directory is damaged")
        at += _MEMBER.size
        name = directory[at : at + name_len].decode()
        if extra_len:
            extra = directory[at + name_len : at + name_len + extra_len]
            size, stored, header = _wide(extra, size, stored, header)
        at += name_len + extra_len + comment_len
        packing = "encrypted" if flags & 1 else "compressed" if method or stored != size else ""
        if name in records:
            raise FormatError(key=key, detail=f"two records have the name {name!r:.200}")
        records[name] = ZipRecord(name, header, size, -1, packing, crc32)
    return records


def _wide(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """Returns sizes and offset with those of the zip64 field in place of full ones."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(values, size) if size == _IN_64 else size
            stored = next(values, stored) if stored == _IN_64 else stored
            header = next(values, header) if header == _IN_64 else header
            break
        at += 4 + length
    return size, stored, header


def header_range(record: ZipRecord, file_size: int, key: str) -> tuple[int, int]:
    """Returns the place of a record's local header, for ``placed``.

    Raises:
        FormatError: It is not in the file; or the record is packed.
    """
    if record.packing:
        detail = f"{record.name!r:.200} is {record.packing}: torch.save does not write that"
        raise FormatError(key=key, detail=detail)
    header = record.header
    if not 0 <= header <= file_size - _LOCAL.size:
        raise FormatError(key=key, detail=f"{record.name!r:.200} is outside of the file")
    return header, header + _LOCAL.size


def placed(record: ZipRecord, header: bytes, file_size: int, key: str) -> ZipRecord:
    """Returns a record with its ``start``, which only its local header tells.

    Raises:
        FormatError: There is no such header, or the record is not in the file.
    """
    magic, *_, name_len, extra_len = _LOCAL.unpack(header)
    start = record.header + _LOCAL.size + name_len + extra_len
    if magic != b"PK\x03\x04" or start + record.size > file_size:
        raise FormatError(key=key, detail=f"{record.name!r:.200} is not where the directory says")
    return ZipRecord(record.name, record.header, record.size, start, record.packing, record.crc32)


def locate(record: ZipRecord, file_size: int, key: str) -> Reading[ZipRecord]:
    """Returns a record with its ``start``. Raises as ``header_range`` and ``placed``."""
    return placed(record, (yield header_range(record, file_size, key)), file_size, key)


def read_record(record: ZipRecord, file_size: int, key: str) -> Reading[bytes]:
    """Returns the content of a small record.

    Raises:
        FormatError: As ``locate``; or its bytes do not match its checksum.
    """
    if record.size > _MAX_READ_BYTES:
        raise FormatError(key=key, detail=f"damaged: {record.name!r:.200} has {record.size} bytes")
    found = yield from locate(record, file_size, key)
    data = yield found.start, found.start + found.size
    if record.crc32 and zlib.crc32(data) != record.crc32:
        raise _mismatch(record, key)
    return data


def check_crc32(record: ZipRecord, key: str) -> Reading[None]:
    """Compares the bytes of a record of any size, with its ``start``, with its checksum.

    Raises:
        FormatError: They do not match.
    """
    found, stop = 0, record.start + record.size
    for start in range(record.start, stop if record.crc32 else 0, _CRC_BYTES):
        found = zlib.crc32((yield start, min(start + _CRC_BYTES, stop)), found)
    if found != record.crc32:
        raise _mismatch(record, key)


def _mismatch(record: ZipRecord, key: str) -> FormatError:
    detail = f"damaged: the bytes of {record.name!r:.200} do not match its checksum"
    return FormatError(key=key, detail=detail)


def first_records(beginning: bytes, key: str) -> Iterator[tuple[ZipRecord, bytes]]:
    """Yields the records that begin in the beginning of a zip file, by their local headers.

    The last one may end beyond it: then its ``size`` is -1, and its content is cut off. The same
    holds for a record of 4 GiB or more whose writer stored the size after the data.

    Raises:
        FormatError: There is something else, or a record is packed.
    """
    at = 0
    while at + _LOCAL.size <= len(beginning) and beginning[at : at + 4] != b"PK\x01\x02":
        magic, _, flags, method, *_, crc32, stored, size, name_len, extra_len = _LOCAL.unpack_from(
            beginning, at
        )
        start = at + _LOCAL.size + name_len + extra_len
        if start > len(beginning):
            return
        if magic != b"PK\x03\x04" or method or flags & 1 or stored != size:
            detail = f"no record of torch.save is at byte {at}"
            raise FormatError(key=key, detail=detail)
        stop = start + size
        if flags & _HAS_DESCRIPTOR:
            stop, crc32 = _find_end(beginning, start)
        try:
            name = beginning[at + _LOCAL.size : start - extra_len].decode()
        except UnicodeDecodeError as error:
            raise FormatError(key=key, detail=f"its zip file is damaged: {error}") from error
        is_whole = start <= stop <= len(beginning) and size != _IN_64
        size = stop - start if is_whole else -1
        yield ZipRecord(name, at, size, start, crc32=crc32), beginning[start:stop]
        if not is_whole:
            return
        at = stop + (_DESCRIPTOR.size if flags & _HAS_DESCRIPTOR else 0)


def _find_end(beginning: bytes, start: int) -> tuple[int, int]:
    """Returns where a record from ``start`` on ends, and its checksum; (-1, 0) if beyond it."""
    at = beginning.find(b"PK\x07\x08", start)
    while 0 <= at <= len(beginning) - _DESCRIPTOR.size:
        _, crc32, stored, size = _DESCRIPTOR.unpack_from(beginning, at)
        if stored == size == at - start and (
            not crc32 or zlib.crc32(memoryview(beginning)[start:at]) == crc32
        ):
            return at, crc32
        at = beginning.find(b"PK\x07\x08", at + 1)
    return -1, 0
