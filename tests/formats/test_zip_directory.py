"""Zip directories: the records of any stored archive are found, and no damage is taken for one."""

from __future__ import annotations

import io
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

    reading, answer = read(), None
    try:
        while True:
            start, stop = reading.send(answer)  # type: ignore[arg-type]
            assert 0 <= start <= stop <= len(data)
            answer = data[start:stop]
    except StopIteration as ended:
        return ended.value


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
