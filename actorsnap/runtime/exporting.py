# SPDX-License-Identifier: Apache-2.0
"""Writes files of other formats from a snapshot, whatever the format.

A file is a sequence of parts: bytes that are known, those of tensors, and bytes that follow from
others (checksums). What equals stored bytes is copied inside the storage where that is possible;
the rest is read, verified, converted if needed and sent, within the memory budget
(``planning/assembly.py``). Files of a failed or cancelled export are deleted.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias

import anyio
import msgspec
import torch

from actorsnap.actors.budget import Purpose
from actorsnap.actors.fetcher import RangeRequest
from actorsnap.errors import ChecksumMismatch, ObjectExists, UsageError
from actorsnap.format.checksum import (
    MAX_BLOCK_BYTES,
    combine,
    combine_blocks,
    combine_crc32,
    crc32c,
)
from actorsnap.format.geometry import Box, c_strides, extent_bytes, flat_range_boxes
from actorsnap.format.layout import dtype_itemsize
from actorsnap.format.manifest import COMMIT_KEYS, Stored, TensorEntry, ViewEntry
from actorsnap.log import Log
from actorsnap.options import chunk_within
from actorsnap.planning.assembly import Assembly, Fragment, Origin, Write
from actorsnap.planning.index import Index, ShardedEntry
from actorsnap.planning.restore import BoxPlan, BoxRead, only_run, plan_boxes
from actorsnap.planning.shards import Shard, Shards, TensorCut
from actorsnap.planning.transfers import FIRST_AT_ONCE
from actorsnap.runtime.copy_claim import naming_side
from actorsnap.runtime.host import Host
from actorsnap.runtime.location import Location
from actorsnap.runtime.source import OpenSource, Source, opened_storage
from actorsnap.state.distributed import LocalPiece
from actorsnap.state.restore.reads import BoxReads
from actorsnap.state.sources import MemoryPart
from actorsnap.storage.base import ObjectWriter, Storage, for_each

logger = Log(__name__)

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""dtypes by element size that move elements unchanged."""


_CAST_ELEMENTS = 1 << 18
"""Number of elements converted at a time."""


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export.

    Attributes:
        files: Keys of the written files, relative to the destination.
        num_tensors: Tensors written.
        nbytes: Size of all files.
        copied_bytes: Bytes copied within the storage, without passing through this process. They
            were compared with the snapshot's checksums only if the storage reports its own.
        left_out: Paths of values that the format cannot hold. Without ``key``, ``export_hf`` writes
            the key ``"model"``; then this also has the other keys.
        tied: Maps the name of a written tensor to the names of tensors that are left out because
            they share its memory.
    """

    files: tuple[str, ...]
    num_tensors: int
    nbytes: int
    copied_bytes: int = 0
    left_out: tuple[str, ...] = ()
    tied: dict[str, tuple[str, ...]] = {}


@dataclass(eq=False, slots=True)
class StoredBytes:
    """The C-order bytes of a stored tensor, whole or in shards.

    Shards get a last dim of bytes, so that every range of bytes is some boxes.
    """

    index: Index
    path: str
    shards: Shards
    shape: tuple[int, ...]
    _block_bytes: list[int] = field(init=False, default_factory=list)

    @classmethod
    def of(cls, index: Index, entry: TensorEntry | ShardedEntry) -> StoredBytes:
        """Raises ``FormatError`` or ``IncompatibleState`` if shards do not make up the tensor."""
        if isinstance(entry, TensorEntry):
            whole = Box.whole((entry.data.stop - entry.data.start,))
            return cls(index, entry.path, Shards.of([Shard(whole, entry.data)]), whole.sizes)
        itemsize = dtype_itemsize(entry.dtype) or 1
        shards = entry.shards
        boxes, withheld = (
            [Box((*box.offsets, 0), (*box.sizes, itemsize)) for box in some]
            for some in (shards.cut.boxes, shards.withheld)
        )
        cut = Shards(TensorCut(boxes), shards.columns, shards.disputed, withheld)
        found = cls(index, entry.path, cut, (*entry.shape, itemsize))
        found._plan([Box.whole(found.shape)])  # raises
        return found

    @property
    def nbytes(self) -> int:
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Length in bytes. Cuts at its multiples let reads cover whole blocks."""
        if len(self.shape) == 1:
            return MAX_BLOCK_BYTES
        row = max(1, prod(self.shape[1:]))
        return max(1, MAX_BLOCK_BYTES // row) * row

    def pieces(self) -> list[tuple[int, Stored]]:
        """Returns the stored ranges that make up the bytes in order, each with its position.

        Empty if there are none, as for a tensor that is cut along another dim than the first.
        """
        whole = Box.whole(self.shape)
        found: list[tuple[int, Stored]] = []
        for number, box in enumerate(self.shards.cut.boxes):
            at = None if number in self.shards.disputed else only_run(whole, box)
            if at is None:
                return []
            if box.volume:
                found.append((at, self.shards.data(number)))
        found.sort(key=lambda each: each[0])
        end = 0
        for at, stored in found:
            if at != end:
                return []
            end += stored.stop - stored.start
        return found if end == self.nbytes else []

    def requests(self, start: int, stop: int, out: memoryview) -> Iterator[RangeRequest]:
        """Yields the reads of bytes ``[start, stop)`` into ``out``."""
        if len(self.shards) == 1 and (start, stop) == (0, self.nbytes) and stop:
            yield RangeRequest(self.index, self.shards.data(0), MemoryPart(out, 0, stop))
            return
        memory = torch.frombuffer(out, dtype=torch.uint8)
        boxes = flat_range_boxes(self.shape, start, stop)
        parts: list[LocalPiece] = []
        at = 0
        for box in boxes:
            parts.append(LocalPiece(box, memory[at : at + box.volume].view(box.sizes), None))
            at += box.volume
        for each in BoxReads(BoxPlan(self._plan(boxes)), self.shards, parts, None):
            yield RangeRequest(self.index, each.stored, each.sink)

    def _plan(self, boxes: Sequence[Box]) -> list[BoxRead]:
        self._block_bytes = self._block_bytes or self.shards.block_bytes
        return plan_boxes(
            self.path,
            self.shards.cut.boxes,
            boxes,
            itemsize=1,
            block_bytes=self._block_bytes,
            disputed=self.shards.disputed,
            withheld=self.shards.withheld,
        )


class Strided(msgspec.Struct, frozen=True):
    """Elements in ``StoredBytes`` that are not next to each other; strides in elements."""

    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(eq=False)
class Body:
    """The bytes of a tensor in a file.

    Attributes:
        nbytes: In the file.
        skip: Bytes of ``stored`` before the first one.
        layout: Gathers the elements; the body is read at once.
        cast: Stored and written dtype.
        has_crc32: Whether ``crc32`` is wanted.
    """

    stored: StoredBytes
    nbytes: int
    skip: int = 0
    layout: Strided | None = None
    cast: tuple[torch.dtype, torch.dtype] | None = None
    has_crc32: bool = False

    def __post_init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}
        self._num_summed = 0
        self._is_summed = anyio.Event()
        if not self.nbytes:
            self._is_summed.set()

    @property
    def is_verbatim(self) -> bool:
        return self.layout is None and self.cast is None

    def fragment(self, joined: Iterable[str]) -> Fragment:
        """Args: joined: Keys that are no objects, but pieces of several."""
        step = max(1, self.stored.row_bytes)
        if self.layout is not None:
            step = max(1, self.nbytes)
        elif self.cast is not None:
            ours, theirs = self.cast
            step = max(1, step // ours.itemsize) * theirs.itemsize
        return Fragment(self.nbytes, step, self._origins(joined))

    def _origins(self, joined: Iterable[str]) -> tuple[Origin, ...]:
        if not self.is_verbatim or self.has_crc32:  # whose bytes must be seen
            return ()
        found: list[Origin] = []
        for at, stored in self.stored.pieces():
            record = self.stored.index.objects[stored.object]
            if record.chunks or record.key in joined:
                return ()
            low = max(self.skip - at, 0)
            high = min(self.skip + self.nbytes - at, stored.stop - stored.start)
            if low < high:
                found.append(Origin(record.key, stored.start + low, stored.start + high))
        return tuple(found)

    @property
    def crc32c(self) -> int | None:
        """CRC32C, combined from the snapshot's checksums; None if these do not suffice."""
        if not self.is_verbatim or self.skip or self.nbytes != self.stored.nbytes:
            return 0 if not self.nbytes else None
        value, left = 0, self.nbytes
        for _, stored in self.stored.pieces():
            size = stored.stop - stored.start
            if not stored.crc32c:
                return None
            value = combine(value, combine_blocks(stored.crc32c, size), size)
            left -= size
        return None if left else value

    def note_crc32(self, start: int, view: memoryview) -> None:
        """Blocks. Call ``finish_crc32`` on the loop afterwards."""
        self._sums[start] = zlib.crc32(view), len(view)

    def finish_crc32(self, nbytes: int) -> None:
        self._num_summed += nbytes
        if self._num_summed == self.nbytes:
            self._is_summed.set()

    async def crc32(self) -> int:
        """Waits until all bytes are read, then returns their CRC32."""
        if not self._is_summed.is_set():  # waiting would be a turn of the loop per tensor
            await self._is_summed.wait()
        value = 0
        for start in sorted(self._sums):
            value = combine_crc32(value, *self._sums[start])
        return value


class Known(msgspec.Struct, frozen=True, eq=False):
    """Bytes that are known; ``origins``: see ``Fragment``."""

    data: bytes
    origins: tuple[Origin, ...] = ()


class Late(msgspec.Struct, frozen=True, eq=False):
    """``size`` bytes that are known once the earlier bodies of the file are read."""

    size: int
    make: Callable[[], Awaitable[bytes]]


Part: TypeAlias = Known | Late | Body


class OutFile(msgspec.Struct, frozen=True, eq=False):
    """A file to write.

    Attributes:
        completes: The part without which no program opens the file. It is written when all others
            are durable, if readers can see an unfinished file.
    """

    key: str
    parts: Sequence[Part]
    completes: Literal["first", "last"] | None = None

    @property
    def nbytes(self) -> int:
        return sum(map(_size_of, self.parts))


def _size_of(part: Part) -> int:
    if isinstance(part, Known):
        return len(part.data)
    return part.size if isinstance(part, Late) else part.nbytes


class Exporter:
    """Writes files to a storage, and deletes them if the export fails.

    Args:
        opened: Its reader has read the commit, and so knows where the data is.

    Attributes:
        files, nbytes, copied_bytes: See ``ExportReport``.
        done_bytes, total_bytes: Bytes of all files passed so far.
    """

    def __init__(self, opened: OpenSource, target: Storage) -> None:
        self.opened = opened
        self._storage, self._target = opened.storage, target
        options, budget = opened.source.options, opened.host.resources.budget
        self._chunk_bytes = chunk_within(options.chunk_bytes, budget.limit_bytes)
        self._budget = budget
        self._fetcher = opened.fetcher()
        self._run_blocking = opened.errands.run_blocking
        self._at_once = min(options.num_uploaders, FIRST_AT_ONCE)
        self._moving = anyio.CapacityLimiter(self._at_once)
        foreign = opened.reader.foreign
        self.joined = frozenset(() if foreign is None else foreign.joined)
        self.files: list[str] = []
        self.nbytes = self.copied_bytes = self.done_bytes = self.total_bytes = 0

    async def copies_whole_objects(self, sample: str) -> bool:
        """Returns whether the storage copies whole objects, but not ranges of them."""
        if self._target.capabilities.min_copy_bytes is not None or sample in self.joined:
            return False
        probe = await self._target.copying_writer("=", 0, source=self._storage, sample=sample)
        if probe is not None:
            await probe.abort()
        return probe is not None

    async def write(self, files: Sequence[OutFile]) -> None:
        """Writes all files. See ``cleaning_up`` for what a failure leaves."""
        self.total_bytes += sum([file.nbytes for file in files])
        at_once = self._target.capabilities.preferred_parallel_objects
        await for_each(files, self._write, at_once=at_once)

    async def put(self, key: str, data: bytes) -> None:
        """Writes a small file at once, replacing an older one."""
        self.total_bytes += len(data)
        with self._writing():
            await self._target.put(key, [memoryview(data)])
        self._note_file(key, len(data))
        self.done_bytes += len(data)

    async def make_way(self, keys: Sequence[str], *, overwrite: bool) -> None:
        """Deletes older files, the first key first.

        Raises:
            ObjectExists: There are older files, and ``overwrite`` is false.
            UsageError: The older files are the source of the export.
        """
        target, foreign = self._target, self.opened.reader.foreign
        if keys and not overwrite:
            raise ObjectExists(
                op="export",
                key=keys[0],
                backend=target.url,
                detail="an export or a checkpoint is there already, perhaps a part of one. Export "
                "to another place, delete it, or pass overwrite=True (on the command line "
                "--overwrite)",
            )
        own = COMMIT_KEYS if foreign is None else foreign.files
        sources = await self._run_blocking(_places, self._storage, own)
        found = await self._run_blocking(_places, target, keys)
        if same := sorted(sources.keys() & found.keys()):
            raise UsageError(
                f"{found[same[0]]!r} in {target.url} is part of what is exported, and would be "
                "deleted first: export to another place"
            )
        for key in keys:
            await target.delete([key])

    @asynccontextmanager
    async def cleaning_up(self) -> AsyncIterator[None]:
        """Deletes the written files if the block fails or is cancelled."""
        try:
            yield
        except BaseException:
            await self.opened.errands.clean_up(lambda: self._target.delete(self.files[::-1]))
            raise

    def _note_file(self, key: str, nbytes: int) -> None:
        self.files.append(key)
        self.nbytes += nbytes

    async def _write(self, file: OutFile) -> None:
        assembly = Assembly([self._fragment(part) for part in file.parts])
        with self._writing():
            writer, whole, copies = await self._open(file.key, assembly)
        try:
            await self._fill(file, assembly, writer, whole, copies=copies)
            with self._writing():
                await writer.complete()
        except BaseException:
            await self.opened.errands.clean_up(writer.abort)
            raise
        self._note_file(file.key, assembly.size)

    def _fragment(self, part: Part) -> Fragment:
        if isinstance(part, Body):
            return part.fragment(self.joined)
        size = _size_of(part)
        return Fragment(size, max(1, size), part.origins if isinstance(part, Known) else ())

    async def _open(self, key: str, assembly: Assembly) -> tuple[ObjectWriter, Origin | None, bool]:
        """Returns a writer, the object to copy as a whole, and whether ranges can be copied."""
        target = self._target
        sample = next((o.key for part in assembly.fragments for o in part.origins), None)
        whole = assembly.whole_object
        if whole is not None:
            stored = await self._storage.stat(whole.key)
            if (whole.start, whole.stop) != (0, stored.size):
                whole = None
        has_ranges = target.capabilities.min_copy_bytes is not None
        if sample is not None and (has_ranges or whole is not None):
            writer = await target.copying_writer(
                key, assembly.size, source=self._storage, sample=sample
            )
            if writer is not None:
                return writer, None if has_ranges else whole, has_ranges
        return await target.writer(key, assembly.size), None, False

    async def _fill(
        self,
        file: OutFile,
        assembly: Assembly,
        writer: ObjectWriter,
        whole: Origin | None,
        *,
        copies: bool,
    ) -> None:
        """Writes all bytes, and compares their checksum if all of it is known."""
        capabilities, size = self._target.capabilities, assembly.size
        expected = _crc32c_of(file.parts)
        sums: dict[int, tuple[int, int]] | None = None
        if expected is not None and (copies or whole) and capabilities.checks_crc32c:
            sums = {}

        async def perform(write: Write) -> None:
            nonlocal sums
            nbytes = write.stop - write.start
            async with self._moving:
                if write.origin is None:
                    found = await self._send(file, assembly, write, writer)
                else:
                    with self._writing():
                        found = await writer.copy_from(
                            write.start, write.origin.key, write.origin.start, write.origin.stop
                        )
                    self.copied_bytes += nbytes
            self.done_bytes += nbytes
            if found is None:
                sums = None
            elif sums is not None:
                sums[write.start] = found, nbytes

        async def perform_all(start: int, stop: int) -> None:
            least_bytes = (
                capabilities.least_copy_bytes(size)
                if copies
                else capabilities.least_write_bytes(size)
            )
            writes = assembly.writes(
                start, stop, chunk_bytes=self._chunk_bytes, least_bytes=least_bytes, copies=copies
            )
            await for_each(writes, perform, at_once=self._at_once)

        if whole is not None:
            await perform(Write(0, size, whole))
        elif file.completes is not None and capabilities.has_blocking_io and len(file.parts) > 1:
            # A file, which a crash would leave unfinished under its name.
            cut = assembly.starts[1] if file.completes == "first" else assembly.starts[-2]
            ranges = [(0, cut), (cut, size)]
            await perform_all(*ranges[file.completes == "first"])
            with self._writing():
                # Its release makes all that was written durable.
                await (await self._target.join_writer(writer.token)).release()
            await perform_all(*ranges[file.completes != "first"])
        else:
            await perform_all(0, size)
        if sums is not None and expected is not None:
            found = 0
            for start in sorted(sums):
                found = combine(found, *sums[start])
            if found != expected:
                raise ChecksumMismatch(
                    key=file.key,
                    detail="what the storage copied differs from what was saved: "
                    "`actorsnap verify --full` finds the damage",
                )

    async def _send(
        self, file: OutFile, assembly: Assembly, write: Write, writer: ObjectWriter
    ) -> int | None:
        """Reads, converts and writes; returns the CRC32C if the storage wants it."""
        spans = list(assembly.within(write.start, write.stop))
        with await self._budget.lease(write.stop - write.start) as lease:
            views: list[memoryview] = []
            at = 0
            for _, start, stop in spans:
                views.append(lease.view[at : at + stop - start])
                at += stop - start
            requests = await self._run_blocking(_requests, file.parts, spans, views)
            with self._reading():
                if requests:
                    await self._fetcher.fetch(requests)
                for (number, start, stop), view in zip(spans, views, strict=True):
                    part = file.parts[number]
                    if isinstance(part, Body) and not part.is_verbatim:
                        await self._convert(part, start, stop, view)
            await self._run_blocking(_note_crc32, file.parts, spans, views)
            for number, start, stop in spans:
                part = file.parts[number]
                if isinstance(part, Body):
                    part.finish_crc32(stop - start)
            for (number, start, stop), view in zip(spans, views, strict=True):
                part = file.parts[number]
                if isinstance(part, Late):
                    view[:] = (await part.make())[start:stop]
            checksum: int | None = None
            if self._target.capabilities.checks_crc32c:
                checksum = await self._run_blocking(crc32c, lease.view)
            with self._writing():
                await writer.write_at(write.start, [lease.view], checksum)
            return checksum

    async def _convert(self, body: Body, start: int, stop: int, view: memoryview) -> None:
        """Fills ``view`` with bytes ``[start, stop)`` of a body that is not stored like this."""
        layout = body.layout
        if layout is not None:
            low, nbytes = body.skip, extent_bytes(layout.shape, layout.strides, layout.itemsize)
        else:
            assert body.cast is not None
            ours, theirs = body.cast
            low = body.skip + start // theirs.itemsize * ours.itemsize
            nbytes = (stop - start) // theirs.itemsize * ours.itemsize
        # Not of the purpose READING: reading may need that, too.
        with await self._budget.lease(nbytes, Purpose.COMPRESSING) as lease:
            requests = await self._run_blocking(
                lambda: list(body.stored.requests(low, low + nbytes, lease.view))
            )
            await self._fetcher.fetch(requests)
            await self._run_blocking(_fill, body, lease.view, view, start, stop)

    def _reading(self) -> AbstractContextManager[None]:
        return naming_side("the export's source", self._storage.url)

    def _writing(self) -> AbstractContextManager[None]:
        return naming_side("the export's destination", self._target.url)


def _crc32c_of(parts: Sequence[Part]) -> int | None:
    """Returns the CRC32C of a file by the snapshot's checksums, if they tell."""
    value = 0
    for part in parts:
        if isinstance(part, Late):
            return None
        found = crc32c(part.data) if isinstance(part, Known) else part.crc32c
        if found is None:
            return None
        value = combine(value, found, _size_of(part))
    return value


def _requests(
    parts: Sequence[Part], spans: Sequence[tuple[int, int, int]], views: Sequence[memoryview]
) -> list[RangeRequest]:
    """Fills in what is known, and returns the reads of the rest."""
    found: list[RangeRequest] = []
    for (number, start, stop), view in zip(spans, views, strict=True):
        part = parts[number]
        if isinstance(part, Known):
            view[:] = part.data[start:stop]
        elif isinstance(part, Body) and part.is_verbatim:
            found += part.stored.requests(part.skip + start, part.skip + stop, view)
    return found


def _note_crc32(
    parts: Sequence[Part], spans: Sequence[tuple[int, int, int]], views: Sequence[memoryview]
) -> None:
    for (number, start, _), view in zip(spans, views, strict=True):
        part = parts[number]
        if isinstance(part, Body) and part.has_crc32:
            part.note_crc32(start, view)


def _fill(body: Body, stored: memoryview, view: memoryview, start: int, stop: int) -> None:
    out = torch.frombuffer(view, dtype=torch.uint8)
    layout, cast = body.layout, body.cast
    itemsize = cast[1].itemsize if cast else layout.itemsize if layout else 1
    if layout is None:
        elements = torch.frombuffer(stored, dtype=torch.uint8)
    else:
        source = torch.frombuffer(stored, dtype=_CARRIERS[layout.itemsize])
        gathered = source.as_strided(layout.shape, layout.strides).contiguous().reshape(-1)
        elements = gathered[start // itemsize : stop // itemsize].view(torch.uint8)
    if cast is None:
        out.copy_(elements)
        return
    ours, theirs = cast
    at = 0
    # By parts, through a little memory: ``out`` need not be aligned.
    for part in elements.view(ours).split(_CAST_ELEMENTS):
        converted = part.to(theirs).view(torch.uint8)
        out[at : at + len(converted)] = converted
        at += len(converted)


def body_of(
    index: Index, entry: TensorEntry | ShardedEntry | ViewEntry, base: TensorEntry | None = None
) -> Body:
    """Returns the C-order bytes of a tensor; ``base``: of a view."""
    if not isinstance(entry, ViewEntry):
        stored = StoredBytes.of(index, entry)
        return Body(stored, stored.nbytes)
    assert base is not None
    stored, itemsize = StoredBytes.of(index, base), dtype_itemsize(entry.dtype) or 1
    nbytes = prod(entry.shape) * itemsize
    extent = extent_bytes(entry.shape, entry.strides, itemsize)
    if entry.strides == c_strides(entry.shape) or extent == nbytes == itemsize or not nbytes:
        return Body(stored, nbytes, entry.offset)
    layout = Strided(itemsize, entry.shape, entry.strides)
    return Body(stored, nbytes, entry.offset, layout)


def _places(storage: Storage, keys: Iterable[str]) -> dict[str, str]:
    """Returns a name of each key's place, by which equal ones are found, and the key. Blocks."""
    names = {f"{storage.url}/{key}": key for key in keys}
    if storage.capabilities.has_blocking_io:
        return {os.path.realpath(name): key for name, key in names.items()}
    return names


@asynccontextmanager
async def opened_for_export(
    host: Host, source: Source, to: Location
) -> AsyncIterator[tuple[OpenSource, Storage]]:
    async with source.opened(host, "export") as opened:
        async with opened_storage(host, to, opened.errands) as target:
            yield opened, target
