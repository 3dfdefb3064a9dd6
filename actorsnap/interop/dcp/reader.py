# SPDX-License-Identifier: Apache-2.0
"""A DCP ``StorageReader`` of snapshots."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import ValueEntry
from actorsnap.interop.dcp.catalog import Catalog, DenseEntry, is_dense
from actorsnap.interop.dcp.writer import RAW, can_open
from actorsnap.interop.formats.dcp_metadata import BYTES_IO, DcpMark
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.planning.index import Wants
from actorsnap.planning.restore import BoxPlanner
from actorsnap.runtime.host import Script
from actorsnap.runtime.location import make_location, resolve_options
from actorsnap.runtime.partial_index import PartialIndex
from actorsnap.runtime.script import drive_sync
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source, begins_anew
from actorsnap.runtime.value_reading import fetch_wanted
from actorsnap.state import objects
from actorsnap.state.distributed import LocalPiece, Ranks
from actorsnap.state.process_group import global_rank
from actorsnap.state.restore.aliasing import is_writable, mark_written
from actorsnap.state.restore.build import KeyRestore, prepare
from actorsnap.state.restore.reads import BoxReads, Reads
from actorsnap.state.tensors import DTYPES, empty_tensor, slices_of
from actorsnap.tracebacks import short_traceback

logger = Log(__name__)


class ActorsnapReader(StorageReader):
    """Reads any snapshot for ``torch.distributed.checkpoint.load``, with DCP's planners.

    Each rank reads its own ranges, and verifies their checksums. A checkpoint of DCP's
    ``FileSystemWriter`` is read in place, without checksums, and without executing its pickles
    (``docs/migrate/index.md``).

    Args:
        path: A folder or URL. None: DCP's calls pass ``checkpoint_id``.
        storage_options, options: See ``Snapshot``.
        rank: The rank whose private leaves are read. None: this process's rank in the default
            process group. Snapshots of DCP's calls have no private leaves, except with
            ``use_collectives=False``.
        _extension_registry: Ignored. torch's zstd is supported, other extensions are refused.

    Raises:
        UsageError: An argument is invalid.
    """

    @short_traceback
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        _extension_registry: Any = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        rank: int | None = None,
    ) -> None:
        if path is not None:
            make_location(path, storage_options)
        self.path = path
        self.storage_options = storage_options
        self.options = options
        self.rank = rank
        self._forget()

    def _forget(self) -> None:
        self.load_id = uuid.uuid4().hex
        self._source: Source | None = None
        self._catalog: Catalog | None = None
        self._error: Exception | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self._forget()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return can_open(checkpoint_id)

    # Without **kwargs: with them DCP would call it again after an error, and leave its collective
    # path on this rank alone.
    def read_metadata(self) -> Metadata:
        """Returns the leaves that this rank may read.

        Errors are raised by ``set_up_storage_reader`` instead, where all ranks get them, as a
        ``CheckpointException``. Up to torch 2.11, DCP drops the errors of ``read_metadata``. Later
        releases keep their text.
        """
        meta = StorageMeta(checkpoint_id=self.path, load_id=self.load_id)
        try:
            return self._read_metadata(meta)
        except Exception as error:
            self._error = error
            return Metadata(state_dict_metadata={}, planner_data={}, storage_meta=meta)

    def _read_metadata(self, meta: StorageMeta) -> Metadata:
        self._source = source = self.source()
        rank = global_rank() if self.rank is None else self.rank
        self._catalog = drive_sync(load_catalog(source, rank))
        meta.save_id = self._catalog.index.attempt
        return self._catalog.metadata(meta)

    def source(self) -> Source:
        if self.path is None:
            raise UsageError(
                "no path: pass checkpoint_id=, or storage_reader=ActorsnapReader(path)"
            )
        location = make_location(self.path, self.storage_options)
        return Source(location, resolve_options(self.options))

    @short_traceback
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @short_traceback
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's items into the planner's tensors.

        Raises:
            SnapshotReplaced: The snapshot was replaced since ``read_metadata``.
            FormatError, ChecksumMismatch, StorageError: See ``Snapshot.restore``.
        """
        assert self._catalog is not None
        assert self._source is not None
        drive_sync(_read(self._source, PlannedReads(self._catalog, plan, planner, self._source)))
        done: Future[None] = Future()
        done.set_result(None)
        return done


@begins_anew
def load_catalog(source: Source, rank: int) -> Script[Catalog]:
    """Reads the index of everything that a rank may read: DCP's ``Metadata`` names it all."""

    async def read(opened: OpenSource) -> Catalog:
        commit = await opened.reader.commit()
        index = await source.begin_index(opened, rank, 1)
        if isinstance(index, PartialIndex):
            index = await index.complete(
                opened.reader,
                opened.errands.run_blocking,
                Wants(lambda path: True, {}),
                at_once=MAX_SMALL_READS,
            )
        return Catalog(index, DcpMark.of(commit.metadata))

    return (yield from source.perform("read", read))


def _read(source: Source, reads: PlannedReads) -> Script[None]:
    wanted = Reads([part for own in reads.wanted.values() for part in own.parts])
    reads.mark()
    index = reads.catalog.index
    yield lambda host: fetch_wanted(host, source, index, wanted)
    reads.finish()


@dataclass(slots=True)
class _Filled:
    """A tensor of the planner; ``memory`` gets the bytes, if not the tensor itself."""

    item: ReadItem
    tensor: torch.Tensor
    memory: torch.Tensor


@dataclass(eq=False)
class PlannedReads:
    """A load plan as reads of a snapshot.

    Attributes:
        wanted: Reads by top-level key. Do them, then call ``finish``.

    Raises:
        UsageError: A pickle, without ``Options.allow_pickle``; or a record of a class that is not
            in ``Options.allowed_types``.
        FormatError: The snapshot contradicts itself.
    """

    catalog: Catalog
    plan: LoadPlan
    planner: LoadPlanner
    source: Source
    wanted: dict[str, Reads] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._planner = BoxPlanner()
        self._filled: list[_Filled] = []
        self._values: list[tuple[ReadItem, KeyRestore | None, Any]] = []
        self._views: list[tuple[KeyRestore, list[tuple[Box, _Filled]]]] = []
        by_path: dict[str, list[ReadItem]] = {}
        for item in self.plan.items:
            path = self.catalog.paths[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                self._add_value(item, path)
            else:
                by_path.setdefault(path, []).append(item)
        for path, items in by_path.items():
            entry = self.catalog.entry(path)
            if not is_dense(entry):
                raise FormatError(key=path, detail="is not a dense tensor")
            self._add_tensors(path, entry, items)

    def mark(self) -> None:
        """Makes autograd graphs built on the old values refuse to run backward."""
        mark_written([filled.tensor for filled in self._filled])

    def finish(self) -> None:
        """Hands everything over to the planner. Call it once, after the reads."""
        for restore, parts in self._views:
            whole = restore.build()
            for box, filled in parts:
                filled.memory = whole[slices_of(box)]
        for filled in self._filled:
            if filled.memory is not filled.tensor:
                filled.tensor.copy_(filled.memory)
            self.planner.commit_tensor(filled.item, filled.tensor)
        for item, prepared, value in self._values:
            self.planner.load_bytes(item, _pickled(prepared.build() if prepared else value))

    def _want(self, path: str, reads: Reads) -> None:
        self.wanted.setdefault(path.partition("/")[0], Reads()).parts += reads.parts

    def _prepare(self, path: str) -> KeyRestore:
        restore = prepare(
            path,
            self.catalog.entries_of(path),
            target=None,
            allow_pickle=self.source.options.allow_pickle,
            world_size=self.catalog.index.world_size,
            rebuild=self.source.rebuild(is_strict=True),
        )
        self._want(path, restore.memory.reads)
        return restore

    def _add_value(self, item: ReadItem, path: str) -> None:
        entry = self.catalog.entry(path)
        if isinstance(entry, ValueEntry):
            value = objects.decode_inline(entry.value, path, self.source.rebuild(is_strict=True))
            self._values.append((item, None, value))
        else:
            self._values.append((item, self._prepare(path), None))

    def _add_tensors(self, path: str, entry: DenseEntry, items: list[ReadItem]) -> None:
        dtype = DTYPES[entry.dtype]
        shards = self.catalog.shards_of(entry)
        views: list[tuple[Box, _Filled]] = []
        if shards is None:
            self._views.append((self._prepare(path), views))
        pieces: list[LocalPiece] = []
        for item in items:
            tensor = self.planner.resolve_tensor(item).detach()
            sizes = tuple(item.lengths)
            if tuple(tensor.shape) != sizes:
                raise UsageError(
                    f"{item.storage_index.fqn!r}: the planner reads the shape {sizes} into a "
                    f"tensor of {tuple(tensor.shape)}"
                )
            start = item.storage_index.offset or (0,) * len(sizes)
            offsets = [a + b for a, b in zip(start, item.storage_offsets, strict=True)]
            box = Box(tuple(offsets), sizes)
            filled = _Filled(item, tensor, tensor)
            self._filled.append(filled)
            if shards is None:
                views.append((box, filled))
                continue
            if tensor.dtype is not dtype or not _takes_bytes(tensor):
                # DCP casts silently.
                filled.memory = empty_tensor(path, sizes, dtype)
            pieces.append(LocalPiece(box, filled.memory, None))
        if shards is not None and pieces:
            is_whole = len(pieces) == 1 and pieces[0].box == Box.whole(entry.shape)
            holders: Ranks | None = None if is_whole else ()
            boxes = tuple([piece.box for piece in pieces])
            plan = self._planner.plan(path, shards, boxes, dtype.itemsize)
            self._want(path, Reads([BoxReads(plan, shards, pieces, holders)]))


def _takes_bytes(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_writable(tensor)


def _pickled(value: Any) -> io.BytesIO:
    """Returns what ``torch.load`` reads, as the planners do."""
    if type(value) is tuple and len(value) == 2 and value[0] in (BYTES_IO, RAW):
        tag, data = value
        if tag == RAW:
            return io.BytesIO(data)
        value = io.BytesIO(data)
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out
