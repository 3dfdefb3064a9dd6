"""Reads cover what is asked for exactly once, and waste no more than the gap allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.manifest import BLOCK_BYTES
from actorsnap.planning.restore import Range, plan_reads

MIB = 1 << 20

requests_strategy = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 40 * MIB),
        st.one_of(st.integers(0, 5000), st.integers(0, 20 * MIB)),
    ).map(lambda t: Range(t[0], t[1], t[1] + t[2])),
    max_size=25,
)


@given(requests_strategy, st.integers(1, 16), st.integers(0, 2 * MIB))
def test_every_request_is_covered_exactly_once(
    requests: list[Range], chunk_mib: int, max_gap: int
) -> None:
    chunk = chunk_mib * MIB
    reads = plan_reads(requests, chunk_bytes=chunk, max_gap_bytes=max_gap)
    covered = [0] * len(requests)
    for read in reads:
        at = read.start
        assert read.gaps[0] == 0
        assert read.stop - read.start <= chunk
        for gap, part in zip(read.gaps, read.parts, strict=True):
            assert 0 <= gap <= max_gap
            at += gap
            request = requests[part.request]
            assert request.key == read.key
            assert request.start + part.start == at
            assert part.start == covered[part.request]
            assert part.start % BLOCK_BYTES == 0
            covered[part.request] = part.stop
            at = request.start + part.stop
        assert at == read.stop
    assert covered == [r.stop - r.start for r in requests]


def test_neighbours_share_a_read() -> None:
    requests = [Range("a", 1000 * i, 1000 * i + 1000) for i in range(100)]
    (read,) = plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=0)
    assert (read.start, read.stop, len(read.parts)) == (0, 100_000, 100)


def test_a_gap_beyond_the_limit_is_not_read() -> None:
    requests = [Range("a", 0, 10), Range("a", 30, 40)]
    assert len(plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=19)) == 2
    (read,) = plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=20)
    assert read.gaps == (0, 20)


def test_objects_are_never_mixed() -> None:
    requests = [Range("a", 0, 10), Range("b", 10, 20)]
    assert [r.key for r in plan_reads(requests, chunk_bytes=MIB, max_gap_bytes=99)] == ["a", "b"]
