# SPDX-License-Identifier: Apache-2.0
"""What a copy moves: every byte once, in writes that the storage takes, and nothing twice."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.manifest import (
    ObjectRecord,
    RankManifest,
    Stored,
    TensorEntry,
)
from actorsnap.planning.copy import (
    ByteRange,
    CopyPlan,
    ObjectCopy,
    data_copies,
    reusable,
    split_writes,
)

_HEADER = 4096


def object_of(sizes: list[int]) -> ObjectCopy:
    at, data = _HEADER, []
    for size in sizes:
        num_blocks = -(-size // MAX_BLOCK_BYTES)
        data.append(Stored(0, at, at + size, tuple(range(num_blocks))))
        at += size
    return ObjectCopy(key="a", size=at, head=ByteRange(0, _HEADER, 1), data=tuple(data))


@given(
    sizes=st.lists(st.integers(1, 5 * MAX_BLOCK_BYTES), max_size=12),
    chunk_bytes=st.integers(2, 6).map(lambda n: n * MAX_BLOCK_BYTES),
    min_write_bytes=st.sampled_from([1, MAX_BLOCK_BYTES, 5 * MAX_BLOCK_BYTES]),
    max_writes=st.sampled_from([None, 1, 2, 7]),
)
def test_writes_cover_the_object_and_keep_the_limits(
    sizes: list[int], chunk_bytes: int, min_write_bytes: int, max_writes: int | None
) -> None:
    copied = object_of(sizes)
    writes = list(
        split_writes(
            copied,
            chunk_bytes=chunk_bytes,
            min_write_bytes=min_write_bytes,
            max_writes=max_writes,
        )
    )
    spans = [span for write in writes for span in write]
    assert spans[0].start == 0
    assert spans[-1].stop == copied.size
    assert all(a.stop == b.start for a, b in pairwise(spans))
    lengths = [write[-1].stop - write[0].start for write in writes]
    assert all(length >= min_write_bytes for length in lengths[:-1])
    assert max_writes is None or len(writes) <= max_writes
    if max_writes is None and min_write_bytes < chunk_bytes:
        assert max(lengths) <= max(chunk_bytes, min_write_bytes + MAX_BLOCK_BYTES)


def manifest(rank: int, *entries: TensorEntry, size: int = _HEADER + 8) -> RankManifest:
    record = ObjectRecord(key="A/data/x", size=size, header_bytes=_HEADER, header_crc32c=0)
    return RankManifest(attempt="A", rank=rank, objects=(record,), entries=entries)


def entry(start: int, stop: int, path: str = "x/a") -> TensorEntry:
    shape = (stop - start,)
    return TensorEntry(path=path, dtype="uint8", shape=shape, data=Stored(0, start, stop, (7,)))


def copies(*manifests: RankManifest) -> list[ObjectCopy]:
    return data_copies(manifests, ["A/data/x"])


def test_what_ranks_share_is_copied_once() -> None:
    first, second = entry(_HEADER, _HEADER + 4), entry(_HEADER + 4, _HEADER + 8, "x/b")
    (copied,) = copies(manifest(0, second, first), manifest(1, first))
    assert [(span.start, span.stop) for span in copied.spans()] == [
        (0, _HEADER),
        (_HEADER, _HEADER + 4),
        (_HEADER + 4, _HEADER + 8),
    ]
    assert data_copies([manifest(0, second, first)], ["A/data/y"]) == []


@pytest.mark.parametrize(
    ("manifests", "says"),
    [
        ([manifest(0, entry(_HEADER, _HEADER + 4))], "belong to no leaf"),
        ([manifest(0, entry(_HEADER + 4, _HEADER + 8))], "belong to no leaf"),
        (
            [manifest(0, entry(_HEADER, _HEADER + 8), entry(_HEADER + 2, _HEADER + 4, "x/b"))],
            "belong to several leaves",
        ),
        ([manifest(0), manifest(1, size=_HEADER)], "ranks disagree"),
    ],
)
def test_bytes_without_a_checksum_are_refused(manifests: list[RankManifest], says: str) -> None:
    with pytest.raises(FormatError, match=says):
        copies(*manifests)


def test_only_what_was_noted_as_complete_is_kept() -> None:
    found = {"a": 8, "b": 8, "c": 7, "other": 8}
    whole = ObjectCopy(key="d", size=8, head=ByteRange(0, 8, 0))
    plan = CopyPlan(sizes={"a": 8, "b": 8, "c": 8}, whole=(whole,))
    assert reusable(plan, found, ["a", "c", "d", "other"]) == {"a"}
    assert reusable(plan, found | {"d": 8}, ["c", "d"]) == {"d"}
