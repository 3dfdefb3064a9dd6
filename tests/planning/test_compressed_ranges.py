# SPDX-License-Identifier: Apache-2.0
"""Which stored bytes have which bytes of a compressed object: every range, exactly once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError
from actorsnap.format.compression import FRAME_BYTES, count_frames
from actorsnap.format.manifest import ObjectRecord, StoredChunk
from actorsnap.planning.restore import check_chunks, chunk_maps

KEY = "attempt/data/model/0-0.chunks"


@st.composite
def objects(draw: st.DrawFn) -> tuple[list[ObjectRecord], int]:
    """Records of several ranks that wrote one object, and its size."""
    edge = st.sampled_from([1, 7, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES])
    chunks: list[StoredChunk] = []
    at = 0
    for nbytes in draw(st.lists(edge, min_size=1, max_size=6)):
        frames: tuple[int, ...] = ()
        if draw(st.booleans()):
            sizes = st.integers(6, FRAME_BYTES + 5)
            frames = tuple(draw(sizes) for _ in range(count_frames(nbytes)))
        chunks.append(StoredChunk(at, at + nbytes, 0, frames))
        at += nbytes
    cut = draw(st.integers(0, len(chunks) - 1))
    parts = [part for part in (chunks[:cut], chunks[cut:]) if part]
    records = [
        ObjectRecord(key=KEY, size=at, header_bytes=1, header_crc32c=0, chunks=tuple(part))
        for part in parts
    ]
    return draw(st.permutations(records)), at


@given(objects(), st.data())
def test_extents_have_each_byte_once(
    found: tuple[list[ObjectRecord], int], data: st.DataObject
) -> None:
    records, size = found
    edges = {
        chunk.start + number * FRAME_BYTES + beside
        for record in records
        for chunk in record.chunks
        for number in range(count_frames(chunk.stop - chunk.start))
        for beside in (-1, 0, 1)
    }
    start = data.draw(st.sampled_from(sorted(edge for edge in edges if 0 <= edge < size)))
    stop = data.draw(st.integers(start + 1, size))
    chunks = {f"{KEY}/{chunk.start}": chunk for r in records for chunk in r.chunks}
    extents = list(chunk_maps(records)[KEY].extents(start, stop))
    assert extents[0].start <= start < extents[0].stop
    assert extents[-1].start < stop <= extents[-1].stop
    for one, two in pairwise(extents):
        assert one.stop == two.start
    for extent in extents:
        chunk = chunks[extent.key]
        assert chunk.start <= extent.start < extent.stop <= chunk.stop
        if not chunk.frames:
            assert (extent.start, extent.stop) == (max(start, chunk.start), min(stop, chunk.stop))
            assert extent.offset == extent.start - chunk.start
            assert extent.size == extent.stop - extent.start
            continue
        # Whole frames, and none that has nothing of what is wanted.
        first, rest = divmod(extent.start - chunk.start, FRAME_BYTES)
        assert rest == 0
        assert extent.frames == chunk.frames[first : first + len(extent.frames)]
        assert extent.offset == sum(chunk.frames[:first])
        assert len(extent.frames) == count_frames(extent.stop - extent.start)
        assert extent.start + FRAME_BYTES > start
        assert extent.stop - stop < FRAME_BYTES


@given(objects(), st.data())
def test_chunks_of_all_ranks_make_the_object(
    found: tuple[list[ObjectRecord], int], data: st.DataObject
) -> None:
    records, size = found
    chunks = [chunk for record in records for chunk in record.chunks]
    ordered = check_chunks(KEY, size, chunks)
    assert ordered == sorted(chunks, key=lambda chunk: chunk.start)
    lost = data.draw(st.integers(0, len(chunks) - 1))
    for wrong in (chunks[:lost] + chunks[lost + 1 :], [*chunks, chunks[lost]]):
        with pytest.raises(FormatError):
            check_chunks(KEY, size, wrong)
    with pytest.raises(FormatError):
        check_chunks(KEY, size + 1, chunks)


def test_bytes_that_no_chunk_has() -> None:
    chunks = (StoredChunk(10, 20, 0),)
    record = ObjectRecord(key=KEY, size=30, header_bytes=1, header_crc32c=0, chunks=chunks)
    (only,) = chunk_maps([record]).values()
    assert [extent.offset for extent in only.extents(12, 20)] == [2]
    for start, stop in ((9, 12), (15, 21), (20, 21)):
        with pytest.raises(FormatError, match="no chunk has the bytes"):
            list(only.extents(start, stop))
