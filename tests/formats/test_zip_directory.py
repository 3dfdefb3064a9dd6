# SPDX-License-Identifier: Apache-2.0
"""Zip directories: the records of any stored archive are found, and no damage is taken for one."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError
from actorsnap.interop.formats.zip_directory import Reading, locate, read_directory

RECORDS = st.dictionaries(
    st.text("abc/._0", min_size=1, max_size=20), st.binary(max_size=200), max_size=8
)


def archive(records: dict[str, bytes], comment: bytes = b"", *, is_64: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in records.items():
            with file.open(name, "w", force_zip64=is_64) as record:
                record.write(data)
        file.comment = comment
    return out.getvalue()


def content(data: bytes, **tail_bytes: int) -> dict[str, bytes]:
    def read() -> Reading[dict[str, bytes]]:
        found = {}
        for name, record in (yield from read_directory(len(data), "x", **tail_bytes)).items():
            placed = yield from locate(record, len(data), "x")
            found[name] = yield placed.start, placed.start + placed.size
        return found

    reading = read()
    try:
        start, stop = next(reading)
        while True:
            assert 0 <= start <= stop <= len(data)
            start, stop = reading.send(data[start:stop])
    except StopIteration as ended:
        found: dict[str, bytes] = ended.value
        return found


@given(RECORDS, st.binary(max_size=40), st.booleans(), st.integers(0, 400))
def test_all_records(
    records: dict[str, bytes], comment: bytes, is_64: bool, tail_bytes: int
) -> None:
    if b"PK\x05\x06" not in comment:
        data = archive(records, comment, is_64=is_64)
        assert content(data) == content(data, tail_bytes=tail_bytes) == records


@given(RECORDS.filter(bool), st.data())
def test_damage(records: dict[str, bytes], data: st.DataObject) -> None:
    """A flipped bit of the directory, or a truncation: the same records, or a FormatError."""
    intact = archive(records)
    damaged = bytearray(intact)
    start = intact.rfind(b"PK\x01\x02")
    at = data.draw(st.integers(start, len(intact) - 1))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        content(bytes(damaged))
    except FormatError:
        pass
    with pytest.raises(FormatError):
        content(intact[: data.draw(st.integers(0, len(intact) - 22))])


def with_wide_member(data: bytes) -> bytes:
    """Moves sizes and offset of the only record into a zip64 field, as those of large files are."""
    at, end = data.rfind(b"PK\x01\x02"), data.rfind(b"PK\x05\x06")
    member, tail = bytearray(data[at:end]), bytearray(data[end:])
    stored, size = struct.unpack_from("<2L", member, 20)
    (header,) = struct.unpack_from("<L", member, 42)
    struct.pack_into("<2L", member, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<L", member, 42, 0xFFFFFFFF)
    extra = struct.pack("<2H2B", 9, 2, 0, 0) + struct.pack("<2H3Q", 1, 24, size, stored, header)
    struct.pack_into("<H", member, 30, len(extra))
    member += extra
    struct.pack_into("<L", tail, 12, len(member))
    return data[:at] + bytes(member) + bytes(tail)


def test_sizes_of_64_bits() -> None:
    assert content(with_wide_member(archive({"a/b": b"12345"}))) == {"a/b": b"12345"}


@pytest.mark.parametrize(
    ("header", "match"), [(1, "where the directory says"), (1 << 30, "outside")]
)
def test_a_record_elsewhere(header: int, match: str) -> None:
    data = bytearray(archive({"a": b"12345", "b": b"6789"}))
    struct.pack_into("<L", data, data.find(b"PK\x01\x02") + 42, header)
    with pytest.raises(FormatError, match=match):
        content(bytes(data))


def test_a_record_that_ends_behind_the_file() -> None:
    data = bytearray(archive({"a": b"12345"}))
    struct.pack_into("<2L", data, data.rfind(b"PK\x01\x02") + 20, 5000, 5000)
    with pytest.raises(FormatError, match="where the directory says"):
        content(bytes(data))


def test_packed_records_are_named() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", b"1" * 100)
    with pytest.raises(FormatError, match="'a' is compressed"):
        content(out.getvalue())
