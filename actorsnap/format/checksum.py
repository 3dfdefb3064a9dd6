"""Computes CRC32C: of bytes, of blocks, and of concatenations that are never joined.

This file decides how a leaf's bytes are cut into blocks of checksums (``docs/format.md``,
"Terms"). It must not know what the bytes mean or where they lie.

Theory of ``combine``: a CRC is the remainder of the message as a polynomial over GF(2). To
append ``n`` bytes is to multiply the message by ``x**(8n)``, so the CRC of a concatenation
is ``first * x**(8n) mod P``, xor ``second``. The initial and final inversions of CRC32C
cancel in that sum. ``x**(8n) mod P`` takes one multiplication per set bit of ``n``. A product
with a constant is linear in the other factor, so that for the few lengths that come often it is
looked up, byte by byte: 0.3 us instead of 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import crc32c as _crc32c

__all__ = ["BLOCK_BYTES", "append_blocks", "block_checksums", "combine", "crc32c", "crc32c_of"]

BLOCK_BYTES = 1 << 20
"""A leaf's bytes are checksummed in blocks of this size, counted from the leaf's start."""

Buffer: TypeAlias = bytes | bytearray | memoryview

_POLYNOMIAL = 0x82F63B78
"""Castagnoli, reflected: bit 31 is the coefficient of x**0."""


def crc32c(data: Buffer, value: int = 0) -> int:
    """Returns the CRC32C of ``data``, continuing from ``value``. C-contiguous buffers only."""
    return _crc32c.crc32c(data, value)


def crc32c_of(views: Iterable[Buffer]) -> int:
    """Returns the CRC32C of ``views``, back to back. C-contiguous buffers only."""
    value = 0
    for view in views:
        value = _crc32c.crc32c(view, value)
    return value


def block_checksums(view: memoryview[Any], block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Returns the CRC32C of each block of ``view``, counted from its start.

    Args:
        view: C-contiguous, any format; its raw bytes count.
        block_bytes: Size of a block. The last one may be shorter.

    Returns:
        One value per block; empty for an empty view.

    Raises:
        ValueError: ``block_bytes`` is not positive.
        TypeError: ``view`` is not C-contiguous.
    """
    if block_bytes <= 0:
        raise ValueError(f"block_bytes must be positive, got {block_bytes}")
    if view.nbytes == 0:  # memoryview.cast refuses views with a zero in their shape
        return ()
    flat = view.cast("B")
    # Slicing costs more than the checksum of a small leaf, and most leaves are one block.
    if len(flat) <= block_bytes:
        return (_crc32c.crc32c(flat),)
    return tuple(
        _crc32c.crc32c(flat[start : start + block_bytes])
        for start in range(0, len(flat), block_bytes)
    )


def combine(first: int, second: int, second_len: int) -> int:
    """Returns the CRC32C of two byte strings joined, from theirs alone.

    Args:
        first: CRC32C of the bytes that come first.
        second: CRC32C of the bytes that follow.
        second_len: How many bytes follow.

    Raises:
        ValueError: ``second_len`` is negative.
    """
    if second_len < 0:
        raise ValueError(f"second_len must not be negative, got {second_len}")
    if second_len.bit_count() == 1:  # blocks, and there are many of them
        low, second_byte, third_byte, high = _append_tables(second_len)
        return (
            low[first & 255]
            ^ second_byte[first >> 8 & 255]
            ^ third_byte[first >> 16 & 255]
            ^ high[first >> 24]
            ^ second
        )
    return _multiply(_append_operator(second_len), first) ^ second


def append_blocks(
    value: int, view: memoryview, checksums: Sequence[int], block_bytes: int = BLOCK_BYTES
) -> int:
    """Returns the CRC32C of some bytes and ``view`` behind them.

    What is left after the last full block is hashed again, which costs less than combining.

    Args:
        value: CRC32C of the bytes that come first.
        view: One-dimensional, of unsigned bytes.
        checksums: Of its blocks.
        block_bytes: Their size.
    """
    num_full = len(view) // block_bytes
    for checksum in checksums[:num_full]:
        value = combine(value, checksum, block_bytes)
    return _crc32c.crc32c(view[num_full * block_bytes :] if num_full else view, value)


def _multiply(a: int, b: int) -> int:
    """Returns ``a * b mod P``, both reflected."""
    product = 0
    mask = 1 << 31
    while mask:
        if a & mask:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        mask >>= 1
    return product


@lru_cache(maxsize=64)
def _squared_operator(power: int) -> int:
    """Returns ``x**(8 * 2**power) mod P``."""
    if power == 0:
        return 1 << 23  # x**8
    half = _squared_operator(power - 1)
    return _multiply(half, half)


# Blocks of one leaf share one length, and their last ones seldom repeat: few are worth keeping.
@lru_cache(maxsize=1024)
def _append_operator(num_bytes: int) -> int:
    """Returns ``x**(8 * num_bytes) mod P``."""
    result = 1 << 31  # x**0
    power = 0
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(_squared_operator(power), result)
        num_bytes >>= 1
        power += 1
    return result


@lru_cache(maxsize=32)
def _append_tables(num_bytes: int) -> tuple[list[int], ...]:
    """Returns ``byte * x**(8 * num_bytes) mod P`` by byte, for each byte of a checksum."""
    products = [_append_operator(num_bytes)]  # with x**0, x**1, ...
    while len(products) < 32:
        last = products[-1]
        products.append((last >> 1) ^ _POLYNOMIAL if last & 1 else last >> 1)
    products.reverse()  # bit 31 is the coefficient of x**0
    tables = []
    for at in range(0, 32, 8):
        table = [0]
        for product in products[at : at + 8]:
            table += [product ^ known for known in table]
        tables.append(table)
    return tuple(tables)
