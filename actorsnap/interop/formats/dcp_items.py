# SPDX-License-Identifier: Apache-2.0
"""Finds the data of the items in ``.distcp`` files, by small reads.

An item is a zip file of ``torch.save``, of a value or of a tensor, whose data may begin anywhere in
it: the first and the last KiB of each are read, in one read for neighbours. Of a file written with
``SerializationFormat.SAFETENSORS`` all tensors are one safetensors file, and are found in its
header.

What went through torch's ``ZStandard`` is one stream per item. A value is decompressed here; of a
tensor only the beginning, up to where its data begins: ``storage.unpacked`` does the rest when it
is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from actorsnap.actors.formats import Place
from actorsnap.errors import FormatError, UsageError
from actorsnap.format.compression import decompress, decompress_beginning
from actorsnap.interop.formats.dcp_metadata import StoredItem
from actorsnap.interop.formats.safetensors_files import FileTensor, header_end, parse_header
from actorsnap.interop.formats.torch_files import (
    ZIP_MAGIC,
    Archive,
    begin_archive,
    read_archive,
)
from actorsnap.interop.formats.zip_directory import (
    Reading,
    ZipRecord,
    answered_by,
    check_crc32,
    locate,
)
from actorsnap.storage.unpacked import Packed, ReadAt

_END_BYTES = 1024
"""Read of both ends of a tensor's zip file: torch 2.9 to 2.13 use 700 and 600."""

_GAP_BYTES = 64 << 10
"""Bytes that a read includes rather than being two."""

_READ_BYTES = 4 << 20
_BATCH_BYTES = 32 << 20
"""Bytes of reads whose items are parsed together."""

_HEADER_BYTES = 128 << 10
"""Read first of a safetensors file: holds most headers."""

_Range: TypeAlias = tuple[int, int]
_Piece: TypeAlias = tuple[int, bytes]
"""Bytes of a file, and the place of the first one."""

_ZSTD = "stream.zstd/1"
_MAX_UNPACKED_BYTES = 1 << 28
"""Largest total size of all compressed values of a folder, in bytes."""


_BEGINNING_BYTES = 64 << 10
"""Bytes read from the start of a compressed tensor: torch's data begins in the first KiB."""

_PACKED_BYTES = (128 << 10) + 64, 512 << 10
"""Read of a compressed tensor for its beginning; more if that is not there. A block of zstd, which
is decompressed at once, has up to 128 KiB."""

_END_OF_ZIP_BYTES = 64 << 10
"""After the data of a compressed tensor, at most: two small records and the directory."""


class Content(msgspec.Struct, frozen=True):
    """A zip file of ``torch.save``.

    Attributes:
        starts: Of its storages, by name: in the ``.distcp`` file; if it was compressed, in it.
        is_packed: Whether it was compressed. Of a tensor only the first storage is known then.
    """

    archive: Archive
    starts: dict[str, int]
    is_packed: bool = False


class PackedZip(Packed, frozen=True):
    """An item that is compressed.

    Attributes:
        storages: The parts to read: name, first byte and size.
    """

    storages: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, item: StoredItem, name: str, storages: Sequence[tuple[str, int, int]]) -> PackedZip:
        size = max([start + nbytes for _, start, nbytes in storages])
        return cls(
            name=name,
            num_packed=item.stop - item.start,
            size=size,
            max_bytes=_MAX_UNPACKED_BYTES if item.box is None else size + _END_OF_ZIP_BYTES,
            storages=tuple(storages),
        )

    def check(self, read: ReadAt, nbytes: int) -> None:
        """Compares the zip file's directory with ``storages``, and these with their checksums."""
        answered_by(read, self._check(nbytes))

    def _check(self, nbytes: int) -> Reading[None]:
        archive = yield from read_archive(nbytes, self.name)
        for storage, start, size in self.storages:
            record = archive.storages.get(storage, ZipRecord(storage, -1, -1))
            if record.size == size:
                record = yield from locate(record, nbytes, self.name)
            if (record.start, record.size) != (start, size):
                detail = f"data/{storage:.80} is not the {size} bytes from byte {start} on"
                raise FormatError(key=self.name, detail=f"damaged: {detail}")
            yield from check_crc32(record, self.name)


class Located(msgspec.Struct):
    """Contents of the files of a folder.

    Attributes:
        zips: By item.
        tensors: Tensors of safetensors files, by file and fqn.
        num_unpacked: Bytes of the values that were compressed.
    """

    zips: dict[StoredItem, Content]
    tensors: dict[str, Mapping[str, FileTensor]]
    num_unpacked: int = 0


async def locate_items(place: Place, items: Mapping[StoredItem, str], key: str) -> Located:
    """Locates items, given with their fqns, which the metadata file ``key`` names.

    Raises:
        FormatError: A file is missing or too short, or has something else. Names file and item.
        UsageError: A transformation is unknown.
    """
    for file in sorted({item.file for item in items}):
        await place.need(file, f"{key} names")
    ordered = await place.run_blocking(_ordered, place, items)
    located = Located({}, {})
    others: dict[str, int] = {}
    for batch in _batches(ordered):
        pending = [_Parsing(item, fqn, located) for item, fqn in batch]
        pieces = _Pieces()
        while pending:
            wanted: dict[str, list[_Range]] = {}
            for parsing in pending:
                wanted.setdefault(parsing.item.file, []).extend(parsing.wanted)
            await pieces.read(place, wanted)
            pending = await place.run_blocking(_advance, pending, pieces, located, others)
    for file, start in others.items():
        located.tensors[file] = await _read_safetensors(place, file, start)
    return located


def _ordered(place: Place, items: Mapping[StoredItem, str]) -> list[tuple[StoredItem, str]]:
    """Returns items and their fqns by file and place. Raises as ``locate_items``."""
    ordered = sorted(items.items(), key=lambda pair: (pair[0].file, pair[0].start))
    for item, fqn in ordered:
        size = place.used[item.file].size
        if item.stop > size:
            detail = f"truncated: it has {size} bytes, and {fqn!r:.200} ends at {item.stop}"
            raise FormatError(key=item.file, detail=detail)
        if not item.transforms:
            continue
        _check_transforms(item, fqn)
        if item.box is None and item.stop - item.start > _MAX_UNPACKED_BYTES:
            detail = f"{fqn!r:.200} is a compressed value of {item.stop - item.start} bytes"
            raise FormatError(key=item.file, detail=detail)
    return ordered


def _check_transforms(item: StoredItem, fqn: str) -> None:
    for name in item.transforms:
        if name != _ZSTD:
            raise UsageError(
                f"{fqn!r} in {item.file} went through {name!r:.100}, an extension of "
                "torch.distributed.checkpoint, which only the program that wrote it can undo"
            )
    if len(item.transforms) > 1:
        raise UsageError(f"{fqn!r} in {item.file} was compressed twice, which torch does not do")


def _parse(item: StoredItem, fqn: str, located: Located) -> Reading[Content | None]:
    """Parses an item, whose bytes begin at 0; returns None if it is not a zip file.

    Args:
        located: What was found before. Counts what is decompressed.
    """
    size = item.stop - item.start
    name = f"{fqn!r:.200} in {item.file}"
    if item.transforms and item.box is not None:
        return (yield from _parse_packed_tensor(size, name))
    if item.transforms:
        data = decompress((yield 0, size), name, _MAX_UNPACKED_BYTES - located.num_unpacked)
        located.num_unpacked += len(data)
        return answered_by(lambda start, stop: data[start:stop], _parse_packed_value(data, name))
    if (yield 0, min(size, len(ZIP_MAGIC))) != ZIP_MAGIC:
        return None
    archive = yield from read_archive(size, name, tail_bytes=_END_BYTES)
    starts: dict[str, int] = {}
    for storage, record in archive.storages.items():
        placed = yield from locate(record, size, name)
        starts[storage] = item.start + placed.start
    return Content(archive, starts)


def _parse_packed_tensor(size: int, name: str) -> Reading[Content]:
    for nbytes in _PACKED_BYTES:
        packed = yield 0, min(nbytes, size)
        beginning = decompress_beginning(packed, name, _BEGINNING_BYTES)
        archive = begin_archive(beginning, name)
        if archive is not None:
            starts = {storage: record.start for storage, record in archive.storages.items()}
            return Content(archive, starts, is_packed=True)
    detail = f"its zstd stream of {size} bytes is truncated, or begins with no tensor of torch.save"
    raise FormatError(key=name, detail=detail)


def _parse_packed_value(data: bytes, name: str) -> Reading[Content]:
    archive = yield from read_archive(len(data), name)
    starts: dict[str, int] = {}
    for storage, record in archive.storages.items():
        placed = yield from locate(record, len(data), name)
        starts[storage] = placed.start
    return Content(archive, starts, is_packed=True)


class _Parsing:
    """An item that is parsed. ``wanted``: ranges of its file to read first, then next."""

    __slots__ = ("_asked", "_piece", "_reading", "fqn", "item", "wanted")

    def __init__(self, item: StoredItem, fqn: str, located: Located) -> None:
        self.item = item
        self.fqn = fqn
        self.wanted = _first_reads(item)
        self._reading = _parse(item, fqn, located)
        self._asked = (0, 0)
        self._piece: _Piece = 0, b""

    def advance(self, pieces: _Pieces) -> Content | None:
        """Returns the item's content, as ``_parse`` does.

        Raises:
            _Unread: ``wanted`` must be read first.
        """
        begin, at, piece = self.item.start, *self._piece
        answer = self._reading.send
        try:
            if self._asked == (0, 0):
                self._asked = next(self._reading)
            while True:
                start, stop = self._asked[0] + begin, self._asked[1] + begin
                if not at <= start <= stop <= at + len(piece):  # most are where the last one was
                    self.wanted = [(start, stop)]
                    at, piece = self._piece = pieces.find(self.item.file, start, stop)
                self._asked = answer(piece[start - at : stop - at])
        except StopIteration as stop_iteration:
            found: Content | None = stop_iteration.value
            return found


class _Unread(Exception):
    """Bytes of a file are in no piece."""


def _first_reads(item: StoredItem) -> list[_Range]:
    start, stop = item.start, item.stop
    if item.transforms and item.box is not None:
        return [(start, min(stop, start + _PACKED_BYTES[0]))]
    is_whole = item.transforms or (item.box is None and stop - start <= _READ_BYTES)
    if is_whole or stop - start <= 2 * _END_BYTES:
        return [(start, stop)]
    return [(start, start + _END_BYTES), (stop - _END_BYTES, stop)]


def _batches(
    items: Sequence[tuple[StoredItem, str]],
) -> Iterator[Sequence[tuple[StoredItem, str]]]:
    """Yields parts of the items of which about ``_BATCH_BYTES`` are read."""
    first = nbytes = 0
    for number, (item, _) in enumerate(items):
        nbytes += sum([stop - start for start, stop in _first_reads(item)])
        if nbytes >= _BATCH_BYTES:
            yield items[first : number + 1]
            first, nbytes = number + 1, 0
    if first < len(items):
        yield items[first:]


class _Pieces:
    """Bytes of files that were read, in rounds; those of a round do not overlap."""

    def __init__(self) -> None:
        self._rounds: list[dict[str, tuple[list[int], list[bytes]]]] = []

    def find(self, file: str, start: int, stop: int) -> _Piece:
        """Returns a piece with these bytes. Raises ``_Unread`` if no round has read them all."""
        for each in self._rounds:
            starts, pieces = each.get(file, ([], []))
            at = bisect_right(starts, start) - 1
            if at >= 0 and stop <= starts[at] + len(pieces[at]):
                return starts[at], pieces[at]
        raise _Unread

    async def read(self, place: Place, wanted: Mapping[str, list[_Range]]) -> None:
        """Reads ranges of files in one round."""
        reads = [(file, *run) for file, ranges in wanted.items() for run in _merged(ranges)]
        pieces: dict[str, tuple[list[int], list[bytes]]] = {file: ([], []) for file in wanted}
        for (file, start, _), data in zip(reads, await place.get_all(reads), strict=True):
            pieces[file][0].append(start)
            pieces[file][1].append(data)
        self._rounds.append(pieces)


def _merged(ranges: list[_Range]) -> Iterator[_Range]:
    """Yields reads of rising ranges: neighbours share one of ``_READ_BYTES``, or of one range."""
    run: _Range | None = None
    for start, stop in sorted(ranges):
        if run is None:
            run = start, stop
        elif start <= run[1] or (start <= run[1] + _GAP_BYTES and stop <= run[0] + _READ_BYTES):
            run = run[0], max(run[1], stop)
        else:
            yield run
            run = start, stop
    if run is not None:
        yield run


def _advance(
    pending: Sequence[_Parsing], pieces: _Pieces, located: Located, others: dict[str, int]
) -> list[_Parsing]:
    """Returns the items that need more bytes. ``others``: files with tensors in no zip file."""
    left: list[_Parsing] = []
    for parsing in pending:
        item = parsing.item
        try:
            content = parsing.advance(pieces)
        except _Unread:
            left.append(parsing)
            continue
        if content is not None:
            located.zips[item] = content
        elif item.box is None:
            detail = f"{parsing.fqn!r:.200} at byte {item.start} was not written by torch.save"
            raise FormatError(key=item.file, detail=detail)
        else:
            others[item.file] = item.start
    return left


async def _read_safetensors(place: Place, file: str, start: int) -> dict[str, FileTensor]:
    """Reads the header of a safetensors file that begins at byte ``start``."""
    size = place.used[file].size - start
    data = await place.get(file, start, start + min(size, _HEADER_BYTES))
    end = header_end(data, size, file)
    if end > len(data):
        data += await place.get(file, start + len(data), start + end)
    header = await place.run_blocking(parse_header, data[:end], size, file)
    return {
        name: msgspec.structs.replace(tensor, start=start + tensor.start, stop=start + tensor.stop)
        for name, tensor in header.tensors.items()
    }
