"""Zip directories: the records of any stored archive are found, and no damage is taken for one."""

from __future__ import annotations

import io
import zipfile

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError
from actorsnap.interop.formats.zip_directory import locate, read_directory

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


def content(data: bytes) -> dict[str, bytes]:
    async def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(data)
        return data[start:stop]

    async def run() -> dict[str, bytes]:
        found = {}
        for record in await read_directory(read, len(data), "x"):
            placed = await locate(read, record, len(data), "x")
            found[record.name] = data[placed.start : placed.start + placed.size]
        return found

    return anyio.run(run)


@given(RECORDS, st.binary(max_size=40), st.booleans())
def test_all_records(records: dict[str, bytes], comment: bytes, is_64: bool) -> None:
    if b"PK\x05\x06" not in comment:
        assert content(archive(records, comment, is_64=is_64)) == records


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
