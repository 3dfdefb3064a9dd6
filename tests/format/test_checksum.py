"""CRC32C against the vectors of RFC 3720, by blocks, and joined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.checksum import (
    BLOCK_BYTES,
    append_blocks,
    block_checksums,
    combine,
    crc32c,
    crc32c_of,
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_vectors(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected
    assert crc32c(memoryview(data)) == expected
    assert crc32c(bytearray(data)) == expected


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_combine_equals_the_checksum_of_the_joined_bytes(first: bytes, second: bytes) -> None:
    joined = crc32c(first + second)
    assert combine(crc32c(first), crc32c(second), len(second)) == joined
    assert crc32c(second, crc32c(first)) == joined


@pytest.mark.parametrize("length", [1, 4095, 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_combine_of_long_tails(length: int) -> None:
    tail = bytes(length)
    assert combine(crc32c(b"head"), crc32c(tail), length) == crc32c(b"head" + tail)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**62), st.integers(0, 2**62))
def test_combine_of_lengths_that_no_buffer_has(crc: int, first: int, second: int) -> None:
    # Appending n then m zero bytes is appending n + m: the operators form a group.
    assert combine(combine(crc, 0, first), 0, second) == combine(crc, 0, first + second)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_combine_of_powers_of_two_agrees_with_two_halves(
    first: int, second: int, power: int
) -> None:
    # A power of two is looked up; one less and one more are multiplied.
    whole = combine(first, second, 2**power)
    assert whole == combine(combine(first, 0, 2**power - 1), 0, 1) ^ second


@given(st.binary(max_size=50), st.binary(max_size=200), st.sampled_from([1, 8, 16, 64]))
def test_blocks_are_appended(head: bytes, data: bytes, block_bytes: int) -> None:
    view = memoryview(data)
    checksums = block_checksums(view, block_bytes)
    assert append_blocks(crc32c(head), view, checksums, block_bytes) == crc32c(head + data)
    assert crc32c_of([memoryview(head), view]) == crc32c(head + data)


def test_full_blocks_are_not_hashed_again() -> None:
    view = memoryview(bytes(3 * BLOCK_BYTES))
    zeros, others = block_checksums(view), block_checksums(memoryview(b"x" * len(view)))
    assert append_blocks(0, view, zeros) == crc32c(view)
    assert append_blocks(0, view, others) == crc32c(b"x" * len(view))


def test_combine_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="negative"):
        combine(1, 2, -1)


@given(st.binary(max_size=100), st.integers(1, 40))
def test_blocks_cover_the_view_from_its_start(data: bytes, block_bytes: int) -> None:
    expected = [crc32c(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]
    assert block_checksums(memoryview(data), block_bytes) == tuple(expected)


def test_blocks_are_of_a_mebibyte_and_of_raw_bytes() -> None:
    data = bytes(range(256)) * (BLOCK_BYTES // 256) + bytes(8)
    expected = (crc32c(data[:BLOCK_BYTES]), crc32c(bytes(8)))
    assert block_checksums(memoryview(data)) == expected
    assert block_checksums(memoryview(data).cast("d")) == expected


def test_an_empty_view_has_no_blocks() -> None:
    assert block_checksums(memoryview(b"")) == ()
    assert block_checksums(memoryview(b"abc").cast("B", (3,))[3:]) == ()


def test_blocks_refuse_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="positive"):
        block_checksums(memoryview(b"abc"), 0)
    with pytest.raises(TypeError):
        block_checksums(memoryview(b"abcd")[::2])
