# SPDX-License-Identifier: Apache-2.0
"""Frames of compressed chunks: exact for all bytes; damage ends in an error, in little memory."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorsnap.errors import ChecksumMismatch, MissingPackage, UnsupportedFormat
from actorsnap.format import compression
from actorsnap.format.checksum import crc32c
from actorsnap.format.compression import (
    FRAME_BYTES,
    FRAME_HEAD_BYTES,
    Codec,
    Unpacker,
    check_available,
    is_frame_count,
    pack_frame,
    shuffle,
    unshuffle,
    width_for,
)
from tests.support.cases import examples

WIDTHS = (1, 2, 4, 8, 16)
zstd = compression._zstd()  # whichever this Python has
KEY = "attempt/data/model/0-0.chunks/0"


def packed(data: bytes, *, width: int = 1, level: int = 1) -> bytearray:
    head, body = pack_frame(memoryview(data), width=width, codec=Codec(name="zstd", level=level))
    return bytearray(head + bytes(body))


def unpacked(frame: bytes | bytearray, nbytes: int) -> bytes:
    # Numpy must not need memory that is aligned.
    out = bytearray(nbytes + 1)
    Unpacker(KEY).unpack(memoryview(frame), memoryview(out)[1:])
    return bytes(out[1:])


def signed(width: int, body: bytes) -> bytearray:
    """A frame whose checksum fits, whatever it holds."""
    mark = bytes([width])
    return bytearray(mark + crc32c(body, crc32c(mark)).to_bytes(4, "little") + body)


@pytest.mark.parametrize(("text", "level"), [("zstd", 1), ("zstd:1", 1), ("zstd:19", 19)])
def test_options_name_a_codec(text: str, level: int) -> None:
    assert Codec.parse(text) == Codec(name="zstd", level=level)


@given(st.binary(min_size=1, max_size=300), st.sampled_from(WIDTHS[1:]))
def test_a_shuffle_gathers_the_bytes_of_items(data: bytes, width: int) -> None:
    out, back = bytearray(len(data)), bytearray(len(data) + 1)
    shuffle(memoryview(data), width, memoryview(out))
    whole = len(data) - len(data) % width
    planes = b"".join(data[number:whole:width] for number in range(width))
    assert bytes(out) == planes + data[whole:]
    unshuffle(memoryview(out), width, memoryview(back)[1:])
    assert bytes(back[1:]) == data


@given(
    st.binary(min_size=1, max_size=2000),
    st.integers(1, 50),
    st.sampled_from(WIDTHS),
    st.sampled_from([1, 3, 19]),
)
@example(b"\0", FRAME_BYTES, 16, 1)
@settings(max_examples=60, deadline=None)
def test_a_frame_comes_back(data: bytes, times: int, width: int, level: int) -> None:
    data *= times
    frame = packed(data, width=width, level=level)
    assert len(frame) <= len(data) + FRAME_HEAD_BYTES
    assert is_frame_count(len(data), [len(frame)])
    assert unpacked(frame, len(data)) == data


def test_what_does_not_shrink_is_kept_as_it_is() -> None:
    data = random.Random(0).randbytes(5000)
    frame = packed(data, width=4)
    assert frame[0] == 0
    assert frame[FRAME_HEAD_BYTES:] == data


@pytest.mark.parametrize("itemsize", range(1, 33))
def test_items_of_other_sizes_are_not_shuffled(itemsize: int) -> None:
    assert width_for(itemsize) == (itemsize if itemsize in WIDTHS else 1)


@given(st.integers(0, 8 * 200), st.sampled_from(WIDTHS))
@settings(max_examples=examples(300), deadline=None)
def test_a_flipped_bit_is_found(bit: int, width: int) -> None:
    data = bytes(range(100)) * 3
    frame = packed(data, width=width)
    frame[bit // 8 % len(frame)] ^= 1 << bit % 8
    with pytest.raises(ChecksumMismatch, match="a compressed frame is damaged"):
        unpacked(frame, len(data))


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_bytes_that_are_signed_but_wrong_do_no_harm(data: st.DataObject) -> None:
    """As if somebody meant it: the checksum fits, what it covers is cut or bent."""
    body = bytearray(zstd.compress(bytes(range(250)) * 20, level=3))
    body = body[: data.draw(st.integers(1, len(body)))]
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    frame = signed(data.draw(st.integers(0, 255)), bytes(body))
    nbytes = data.draw(st.sampled_from([1, 4999, 5000, 5001, FRAME_BYTES]))
    with suppress(ChecksumMismatch):
        assert len(unpacked(frame, nbytes)) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "window_log"), [(1 << 30, None), (FRAME_BYTES + 1, None), (FRAME_BYTES, 27)]
)
def test_a_frame_that_claims_too_much_takes_no_memory(nbytes: int, window_log: int | None) -> None:
    """A bomb: little that becomes much, or that needs a large window."""
    parameter = zstd.CompressionParameter
    options: dict[int, int] = {parameter.compression_level: 1}
    if window_log is not None:
        options |= {parameter.window_log: window_log, parameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    body, zeros = b"", bytes(1 << 20)
    for at in range(0, nbytes, len(zeros)):
        body += compressor.compress(zeros[: nbytes - at])
    frame = signed(1, body + compressor.flush())
    tracemalloc.start()
    try:
        with pytest.raises(ChecksumMismatch):
            unpacked(frame, FRAME_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 4 * FRAME_BYTES
    finally:
        tracemalloc.stop()


def test_two_frames_in_one_are_damage() -> None:
    body = zstd.compress(b"a" * 10) + zstd.compress(b"")
    with pytest.raises(ChecksumMismatch, match="10 bytes"):
        unpacked(signed(1, body), 10)


@pytest.mark.parametrize(
    ("nbytes", "sizes", "fits"),
    [
        (1, (), True),
        (1, (6,), True),
        (1, (5,), False),
        (1, (6, 6), False),
        (FRAME_BYTES, (FRAME_BYTES + 5,), True),
        (FRAME_BYTES, (FRAME_BYTES + 6,), False),
        (FRAME_BYTES + 1, (7, 7), True),
        (FRAME_BYTES + 1, (7,), False),
    ],
)
def test_sizes_of_frames(nbytes: int, sizes: tuple[int, ...], fits: bool) -> None:
    assert is_frame_count(nbytes, sizes) == fits


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_MODULE", "no_such_zstd")
    compression._zstd.cache_clear()
    try:
        with pytest.raises(MissingPackage, match=r"no_such_zstd.*pip install 'actorsnap\[zstd\]'"):
            check_available()
        with pytest.raises(UnsupportedFormat, match=r"pip install 'actorsnap\[zstd\]'"):
            Unpacker(KEY)
    finally:
        compression._zstd.cache_clear()
