# SPDX-License-Identifier: Apache-2.0
"""CRC32C against the vectors of RFC 3720, by blocks, and joined."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actorsnap.format.checksum import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    append_blocks,
    block_bytes_of,
    block_checksums,
    choose_block_bytes,
    combine,
    combine_blocks,
    crc32c,
    crc32c_of,
    is_block_count,
)

MIB = 1 << 20


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


@pytest.mark.parametrize("length", [1, 4095, 4096, MIB, MIB + 1, 3 * MIB])
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
    view = memoryview(bytes(3 * MAX_BLOCK_BYTES))
    zeros = block_checksums(view, MIN_BLOCK_BYTES)
    others = block_checksums(memoryview(b"x" * len(view)), MIN_BLOCK_BYTES)
    assert append_blocks(0, view, zeros, MIN_BLOCK_BYTES) == crc32c(view)
    assert append_blocks(0, view, others, MIN_BLOCK_BYTES) == crc32c(b"x" * len(view))


def test_combine_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="negative"):
        combine(1, 2, -1)


@given(st.binary(max_size=100), st.integers(1, 40))
def test_blocks_cover_the_view_from_its_start(data: bytes, block_bytes: int) -> None:
    expected = [crc32c(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]
    assert block_checksums(memoryview(data), block_bytes) == tuple(expected)


def test_blocks_are_of_raw_bytes() -> None:
    data = bytes(range(256)) + bytes(8)
    expected = (crc32c(data[:256]), crc32c(bytes(8)))
    assert block_checksums(memoryview(data), 256) == expected
    assert block_checksums(memoryview(data).cast("d"), 256) == expected


def test_an_empty_view_has_no_blocks() -> None:
    assert block_checksums(memoryview(b""), 256) == ()
    assert block_checksums(memoryview(b"abc").cast("B", (3,))[3:], 256) == ()


def test_blocks_refuse_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="zero"):
        block_checksums(memoryview(b"abc"), 0)
    with pytest.raises(TypeError):
        block_checksums(memoryview(b"abcd")[::2], 256)


# How large blocks are ------------------------------------------------------------------------

# Around every power of two, where a rule of powers of two can go wrong.
sizes = st.one_of(
    st.integers(0, 1 << 26),
    st.builds(
        lambda power, factor, more: max(0, factor * (1 << power) + more),
        st.integers(10, 40),
        st.integers(1, 17),
        st.integers(-2, 2),
    ),
)
powers = st.sampled_from([MIN_BLOCK_BYTES << n for n in range(5)])


def test_powers_are_all_block_sizes() -> None:
    assert MIN_BLOCK_BYTES << 4 == MAX_BLOCK_BYTES


@given(sizes)
def test_a_shard_has_sixteen_full_blocks_if_sizes_allow(nbytes: int) -> None:
    size = choose_block_bytes(nbytes, is_shard=True)
    assert MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES
    assert size.bit_count() == 1
    assert nbytes // size >= 16 or size == MIN_BLOCK_BYTES
    assert nbytes // (2 * size) < 16 or size == MAX_BLOCK_BYTES


@given(sizes, sizes)
def test_blocks_of_a_larger_leaf_are_not_smaller(one: int, other: int) -> None:
    small, large = sorted([one, other])
    assert choose_block_bytes(small, is_shard=True) <= choose_block_bytes(large, is_shard=True)
    assert choose_block_bytes(small, is_shard=False) == MAX_BLOCK_BYTES


@pytest.mark.parametrize(
    ("nbytes", "kib"),
    [
        (0, 64),
        (2 * MIB - 1, 64),
        (2 * MIB, 128),
        (4 * MIB, 256),
        (16 * MIB - 1, 512),
        (16 * MIB, 1024),
        (1 << 40, 1024),
    ],
)
def test_the_rule_as_the_format_says_it(nbytes: int, kib: int) -> None:
    assert choose_block_bytes(nbytes, is_shard=True) == kib << 10


@given(sizes, powers, st.data())
def test_the_number_of_checksums_tells_the_size_of_the_blocks(
    nbytes: int, size: int, data: st.DataObject
) -> None:
    """Of a leaf, and of any run of its blocks."""
    count = -(-nbytes // size)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    run = min(last * size, nbytes) - first * size if first < last else 0
    for total, number in ((nbytes, count), (run, last - first)):
        assert is_block_count(total, number)
        found = block_bytes_of(total, number)
        assert found == size if number > 1 else total <= found <= max(size, MIN_BLOCK_BYTES)


@given(sizes, st.integers(0, 2000))
@example(4 * MIB, 2)
def test_a_number_of_checksums_that_no_block_size_gives_is_refused(nbytes: int, count: int) -> None:
    possible = {-(-nbytes // (MIN_BLOCK_BYTES << n)) for n in range(5)}
    assert is_block_count(nbytes, count) == (count in possible)


@given(st.integers(0, 300), st.sampled_from([MIN_BLOCK_BYTES, 2 * MIN_BLOCK_BYTES]))
def test_blocks_of_any_size_tell_the_checksum_of_the_whole(hundreds: int, size: int) -> None:
    data = bytes(range(100)) * (11 * hundreds)
    blocks = block_checksums(memoryview(data), size)
    assert combine_blocks(blocks, len(data)) == crc32c(data)
