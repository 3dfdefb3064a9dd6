# SPDX-License-Identifier: Apache-2.0
"""Codecs, and frames of compressed chunks (``docs/format.md``, "Compressed data object").

The shuffle gathers the first bytes of all items, then the second ones, and so on: neighbouring
weights have similar exponents and random mantissas. Shifts of whole items are two to eight times as
fast as a transposed copy, without the GIL.

Zstandard is Python's or, before 3.14, its backport, imported at first use.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    MissingPackage,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.checksum import crc32c

FRAME_BYTES = 1 << 20
"""Uncompressed; the last frame of a chunk may be shorter."""

FRAME_HEAD_BYTES = 5
"""Before each frame: shuffle width and checksum."""

_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_INSTALL = "pip install 'actorsnap[zstd]'"
_WINDOW_LOG = FRAME_BYTES.bit_length() - 1
_NAMED = re.compile("zstd(?::([1-9]|1[0-9]))?")
_ZSTD_LEVEL = 1
"""Slower levels gain nothing on shuffled weights: ``docs/decisions/0015-compression.md``."""

_UNSIGNED = {2: "<u2", 4: "<u4", 8: "<u8"}


class Codec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """``level`` is zstd's, 1 to 19; readers do not need it."""

    name: Literal["zstd"]
    level: int

    @classmethod
    def parse(cls, compression: str) -> Codec:
        match = _NAMED.fullmatch(compression) if isinstance(compression, str) else None
        if match is None:
            raise UsageError(
                'Options.compression must be None, "zstd" or "zstd:1" to "zstd:19", '
                f"not {compression!r}"
            )
        return cls(name="zstd", level=int(match[1] or _ZSTD_LEVEL))


@lru_cache(maxsize=1)
def _zstd() -> Any:
    return importlib.import_module(_MODULE)


def check_available() -> None:
    """Raises ``MissingPackage`` if no Zstandard library is installed."""
    if missing := _missing_library():
        raise MissingPackage(f"Options.compression needs {missing}")


def check_readable(key: str) -> None:
    """Raises ``UnsupportedFormat`` if no Zstandard library is installed."""
    if missing := _missing_library():
        raise UnsupportedFormat(key=key, detail=f"it is compressed, and to read it takes {missing}")


def _missing_library() -> str:
    """Describes the missing Zstandard library; empty if importable."""
    try:
        _zstd()
    except ImportError as error:
        return f"the package {_MODULE}, which cannot be imported ({error}): {_INSTALL}"
    return ""


class ZstdStream:
    """Decodes a Zstandard stream of another program, of one or more frames.

    Raises:
        UnsupportedFormat: No Zstandard library is installed.
    """

    def __init__(self, key: str, max_bytes: int) -> None:
        check_readable(key)
        self._key = key
        self._max_bytes = self._left = max_bytes
        self._decoder: Any = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields what the next bytes of the stream hold, in parts of up to ``FRAME_BYTES``.

        Raises:
            FormatError: It is damaged, or all together is longer than ``max_bytes``.
        """
        zstd = _zstd()
        while data or (self._decoder is not None and not self._decoder.needs_input):
            if self._decoder is None:
                self._decoder = zstd.ZstdDecompressor()
            try:
                part: bytes = self._decoder.decompress(data, max_length=FRAME_BYTES)
            except zstd.ZstdError as error:
                raise self._error(f"is damaged: {error}") from error
            data = b""
            if self._decoder.eof:
                data, self._decoder = self._decoder.unused_data, None
            self._left -= len(part)
            if self._left < 0:
                raise self._error(f"is of more than {self._max_bytes} bytes")
            if part:
                yield part

    def end(self) -> None:
        """Raises ``FormatError`` unless the stream is complete."""
        if self._decoder is not None or self._left == self._max_bytes:
            raise self._error("is truncated")

    def _error(self, what: str) -> FormatError:
        return FormatError(key=self._key, detail=f"its zstd stream {what}")


def decompress(data: bytes, key: str, max_bytes: int) -> bytes:
    """Returns what a stream holds. Raises as ``ZstdStream``."""
    stream = ZstdStream(key, max_bytes)
    found = b"".join(stream.feed(data))
    stream.end()
    return found


def decompress_beginning(data: bytes, key: str, nbytes: int) -> bytes:
    """Returns up to ``nbytes`` bytes that the beginning ``data`` of a stream holds.

    Raises:
        UnsupportedFormat, FormatError: See ``ZstdStream``.
    """
    found = b""
    for part in ZstdStream(key, nbytes + FRAME_BYTES).feed(data):
        found += part
        if len(found) >= nbytes:
            break
    return found[:nbytes]


def count_frames(nbytes: int) -> int:
    return -(-nbytes // FRAME_BYTES)


def is_frame_count(nbytes: int, frames: Sequence[int]) -> bool:
    """Whether these are the frames of a chunk of ``nbytes`` bytes; none if uncompressed."""
    if not frames:
        return True
    return len(frames) == count_frames(nbytes) and (
        FRAME_HEAD_BYTES < min(frames) and max(frames) <= FRAME_BYTES + FRAME_HEAD_BYTES
    )


def width_for(itemsize: int) -> int:
    return itemsize if itemsize in (2, 4, 8, 16) else 1


# The shuffle ----------------------------------------------------------------------------------


def shuffle(source: memoryview, width: int, out: memoryview) -> None:
    """Writes ``source``, shuffled by ``width``, to ``out``, which has the same size."""
    whole = len(source) - len(source) % width
    into = np.frombuffer(out, np.uint8)
    items = np.frombuffer(source, np.uint8)
    planes = into[:whole].reshape(width, -1)
    if width in _UNSIGNED:
        left = items[:whole].view(_UNSIGNED[width])
        np.copyto(planes[0], left, casting="unsafe")
        shifted = np.empty_like(left)
        for number in range(1, width):
            np.right_shift(left, 8 * number, out=shifted)
            np.copyto(planes[number], shifted, casting="unsafe")
    else:
        np.copyto(planes, items[:whole].reshape(-1, width).T)
    into[whole:] = items[whole:]


def unshuffle(source: memoryview, width: int, out: memoryview) -> None:
    """Undoes ``shuffle``. ``out`` may begin anywhere in memory."""
    whole = len(source) - len(source) % width
    into = np.frombuffer(out, np.uint8)
    items = np.frombuffer(source, np.uint8)
    planes = items[:whole].reshape(width, -1)
    if width in _UNSIGNED:
        words = into[:whole].view(_UNSIGNED[width])
        np.copyto(words, planes[-1])
        for plane in planes[-2::-1]:
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, plane, out=words)
    else:
        np.copyto(into[:whole].reshape(-1, width), planes.T)
    into[whole:] = items[whole:]


# Frames ---------------------------------------------------------------------------------------


def pack_frame(source: memoryview, *, width: int, codec: Codec) -> tuple[bytes, bytes | memoryview]:
    """Returns head and body of the frame of ``source``, 1 to ``FRAME_BYTES`` bytes."""
    shuffled = source
    if width > 1:
        shuffled = memoryview(bytearray(len(source)))
        shuffle(source, width, shuffled)
    body: bytes | memoryview = _zstd().compress(shuffled, level=codec.level)
    if len(body) >= len(source):
        body, width = source, 0
    mark = bytes([width])
    return mark + crc32c(body, crc32c(mark)).to_bytes(4, "little"), body


class Unpacker:
    """Decodes frames of the chunk ``key``. Raises ``UnsupportedFormat`` without Zstandard."""

    def __init__(self, key: str) -> None:
        check_readable(key)
        self._key = key
        self._zstd = _zstd()

    def unpack(self, frame: memoryview, out: memoryview) -> None:
        """Writes the decoded bytes of ``frame`` to ``out``, which must have exactly their size.

        Uses at most twice ``FRAME_BYTES`` of memory, whatever size a frame claims.

        Raises:
            ChecksumMismatch: The frame is damaged, or does not have the size of ``out``.
        """
        width = frame[0]
        body = frame[FRAME_HEAD_BYTES:]
        checksum = crc32c(body, crc32c(frame[:1]))
        if checksum != int.from_bytes(frame[1:FRAME_HEAD_BYTES], "little"):
            raise self._damaged("its checksum does not match")
        if width == 0:
            if len(body) != len(out):
                raise self._damaged(f"it has {len(body)} bytes, not {len(out)}")
            out[:] = body
            return
        if width != 1 and width_for(width) != width:
            raise self._damaged(f"no shuffle has the width {width}")
        unshuffled = self._decompress(body, len(out))
        if width == 1:
            out[:] = unshuffled
        else:
            unshuffle(memoryview(unshuffled), width, out)

    def _decompress(self, body: memoryview, nbytes: int) -> bytes:
        zstd = self._zstd
        decompressor = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        )
        try:
            decoded: bytes = decompressor.decompress(body, max_length=nbytes + 1)
        except zstd.ZstdError as error:
            raise self._damaged(str(error)) from error
        if len(decoded) != nbytes or not decompressor.eof or decompressor.unused_data:
            raise self._damaged(f"it does not have {nbytes} bytes")
        return decoded

    def _damaged(self, what: str) -> ChecksumMismatch:
        return ChecksumMismatch(key=self._key, detail=f"a compressed frame is damaged: {what}")
