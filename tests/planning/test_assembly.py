# SPDX-License-Identifier: Apache-2.0
"""Files of fragments: every byte is written once, in writes that a storage takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actorsnap.planning.assembly import Assembly, Fragment, Origin, Write
from tests.support.cases import examples

ORIGINS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 60)), max_size=3
)


@st.composite
def fragments(draw: st.DrawFn) -> list[Fragment]:
    found = []
    for _ in range(draw(st.integers(1, 6))):
        origins = [Origin(key, at, at + n) for key, at, n in draw(ORIGINS)]
        size = sum([origin.nbytes for origin in origins]) if origins else draw(st.integers(0, 90))
        step = draw(st.sampled_from([1, 4, 16, 1000]))
        found.append(Fragment(size, step, tuple(origins)))
    return found


def bytes_of(assembly: Assembly, start: int, stop: int) -> list[tuple[str, int] | None]:
    """What each byte of a file is: a byte of an object, or None."""
    found: list[tuple[str, int] | None] = []
    for fragment in assembly.fragments:
        stored = [(o.key, at) for o in fragment.origins for at in range(o.start, o.stop)]
        found += stored or [None] * fragment.size
    return found[start:stop]


@settings(max_examples=examples(400), deadline=None)
@given(fragments(), st.integers(1, 40), st.integers(1, 70), st.booleans())
def test_writes(made: list[Fragment], least: int, chunk: int, copies: bool) -> None:
    assembly = Assembly(made)
    size = assembly.size
    writes = assembly.writes(0, size, chunk_bytes=chunk, least_bytes=least, copies=copies)
    assert [w.start for w in writes] + [size] == [0] * bool(size) + [w.stop for w in writes] + (
        [] if size else [0]
    )
    for write in writes:
        assert write.stop - write.start >= least or write.stop == size
        if write.origin is not None:
            assert copies
            stored = range(write.origin.start, write.origin.stop)
            expected = [(write.origin.key, at) for at in stored]
            assert bytes_of(assembly, write.start, write.stop) == expected
        spans = list(assembly.within(write.start, write.stop))
        assert sum([stop - start for _, start, stop in spans]) == write.stop - write.start


def test_little_is_sent_before_a_copy() -> None:
    mib = 1 << 20
    object_of = Origin("a", 8192, 8192 + 200 * mib)
    assembly = Assembly([Fragment(4096), Fragment(200 * mib, mib, (object_of,))])
    writes = assembly.writes(
        0, assembly.size, chunk_bytes=16 * mib, least_bytes=5 * mib, copies=True
    )
    assert writes[0] == Write(0, 5 * mib)
    assert all(write.origin is not None for write in writes[1:])
    # From then on at multiples of a block, for reflinks.
    assert all(write.start % 4096 == 0 for write in writes[1:])
    assert max(write.stop - write.start for write in writes) <= 64 * mib


def test_a_whole_object() -> None:
    parts = [Fragment(10, 1, (Origin("a", 0, 10),)), Fragment(5, 1, (Origin("a", 10, 15),))]
    assert Assembly(parts).whole_object == Origin("a", 0, 15)
    assert Assembly([*parts, Fragment(1)]).whole_object is None
