# SPDX-License-Identifier: Apache-2.0
"""Writes snapshots as checkpoints of ``torch.save`` and of torch.distributed.checkpoint (DCP).

This package writes no other pickles without ``allow_pickle``. These contain only dense tensors and
plain values; anything else raises an error with its path, before a byte is written. Data is read,
compared with its checksums, and streamed within ``Options.memory_budget_bytes``.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from io import BytesIO
from math import prod
from types import CoroutineType
from typing import Any, TypeVar, cast, overload

import msgspec
import torch

from actorsnap import sync
from actorsnap.actors.fetcher import RangeRequest
from actorsnap.errors import UsageError
from actorsnap.format.geometry import Box, c_strides, extent_bytes
from actorsnap.format.layout import dtype_itemsize
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.interop.formats.dcp_metadata import BYTES_IO, DcpMark
from actorsnap.interop.torch_archives import (
    ArchiveParts,
    SharedBytes,
    Stub,
    TensorStub,
    check_plain,
    not_plain,
)
from actorsnap.planning.index import AnyEntry, Elsewhere, Index, ShardedEntry
from actorsnap.planning.renaming import Rename, function_of
from actorsnap.planning.shards import Shard, Shards
from actorsnap.runtime.bars import Amount, shown
from actorsnap.runtime.export_selection import below, is_in_layer, readable
from actorsnap.runtime.exporting import (
    Body,
    Exporter,
    ExportReport,
    Known,
    OutFile,
    Part,
    StoredBytes,
    opened_for_export,
)
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import Location, check_flag, make_location
from actorsnap.runtime.script import AsyncCall, how_to_await, run_async, run_sync
from actorsnap.runtime.source import OpenSource, Source, begins_anew
from actorsnap.snapshot import Snapshot, SnapshotHandle
from actorsnap.state import objects
from actorsnap.state.restore.build import prepare, resolve
from actorsnap.state.restore.match import entries_by_key
from actorsnap.state.sources import HostMemory
from actorsnap.state.tree import escape
from actorsnap.storage.base import RunBlocking, Storage
from actorsnap.storage.registry import folder_and_name
from actorsnap.tracebacks import short_traceback

T = TypeVar("T")

_MAX_FILE_BYTES = 5 * 10**9
_METADATA = ".metadata"


class _Files(msgspec.Struct, frozen=True, eq=False):
    """Files to write. ``last``: content by key, written when ``files`` are complete."""

    files: list[OutFile]
    last: dict[str, bytes] = {}


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    key: str | None
    rename: Rename | None
    overwrite: bool

    def check(self) -> None:
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            raise UsageError(f"key must be a key of the app state, or None, not {self.key!r}")
        check_flag("overwrite", self.overwrite)
        if self.rename is not None:
            function_of(self.rename)


@overload
def export_torch(
    snapshot: Snapshot,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Awaitable[ExportReport]: ...
@overload
def export_torch(
    snapshot: sync.Snapshot,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> ExportReport: ...
@short_traceback
def export_torch(
    snapshot: SnapshotHandle,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> ExportReport | Awaitable[ExportReport]:
    """Writes a file as ``torch.save`` does: of the app state as a dict, or of one key's state.

    ``torch.load`` reads the file with ``weights_only=True``, with or without ``mmap=True``. Tensors
    that share memory also share it in the file. Sharded tensors are whole. Tensors are row-major (a
    memory format such as channels last is lost) and on the CPU. The file has the leaves that rank 0
    may read, and leaves that only one other rank has (pipelines).

    Args:
        snapshot: A ``Snapshot``. With one of ``actorsnap.sync``, the call blocks.
        path: The file.
        key: The part of the app state, or a path below one. None: all of it, by key; if DCP's
            calls saved it, their state dict.
        rename: See ``Snapshot.restore``. Applied before ``key`` is looked up.
        overwrite: Delete an older file first.
        storage_options, progress: See ``Snapshot.export_hf``.

    Raises:
        UsageError: An argument is invalid, for example a folder. Or a leaf, which the error names,
            is neither a dense tensor nor a plain value.
        ObjectExists: There is a file at ``path``.
        NotASnapshot, FormatError, ChecksumMismatch, StorageError: See ``Snapshot.export_hf``.
    Cancellation: The file is deleted, as after a failure. A process that dies leaves no file, or
    one that ``torch.load`` refuses.
    """
    call = _Call(key=key, rename=rename, overwrite=overwrite)
    url = make_location(path, storage_options).url
    folder = folder_and_name(url)
    local = url.removeprefix("file://").removeprefix("fs://")
    is_a_folder = UsageError(
        f"{os.fspath(path)!r} is a folder, and export_torch writes one file: name the file, such "
        f"as {os.path.join(os.fspath(path), 'model.pt')!r}"
    )
    if folder is None or os.fspath(path).endswith("/"):
        raise is_a_folder
    to = make_location(folder[0], storage_options)
    name = folder[1]

    async def older(target: Storage, run_blocking: RunBlocking) -> list[str]:
        if await run_blocking(os.path.isdir, local):
            raise is_a_folder
        return [info.key async for info in target.list(name) if info.key == name]

    def lay_out(state: object) -> _Files:
        return _Files([OutFile(name, ArchiveParts(state).parts, "last")])

    return _run(snapshot, to, call, older, lay_out, name="export_torch", progress=progress)


@overload
def export_dcp(
    snapshot: Snapshot,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Awaitable[ExportReport]: ...
@overload
def export_dcp(
    snapshot: sync.Snapshot,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> ExportReport: ...
@short_traceback
def export_dcp(
    snapshot: SnapshotHandle,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> ExportReport | Awaitable[ExportReport]:
    """Writes a folder for stock ``torch.distributed.checkpoint.load``, on any number of ranks.

    Leaves have DCP's names. Each shard of a sharded tensor becomes a chunk. The file ``.metadata``
    is written last. Empty dicts, which DCP cannot represent, are lost.

    Args:
        path: The folder.
        snapshot, key, rename, overwrite, storage_options, progress: See ``export_torch``.

    Raises:
        UsageError: See ``export_torch``. Or two leaves get the same name in DCP.
        ObjectExists: There is a DCP checkpoint, or a part of one, at ``path``.
        NotASnapshot, FormatError, ChecksumMismatch, StorageError: See ``Snapshot.export_hf``.
    Cancellation: The files are deleted, as after a failure. A process that dies leaves no
    ``.metadata``.
    """
    call = _Call(key=key, rename=rename, overwrite=overwrite)

    async def older(target: Storage, run_blocking: RunBlocking) -> list[str]:
        keys = [info.key async for info in target.list("") if "/" not in info.key]
        return sorted([k for k in keys if k == _METADATA or k.endswith(".distcp")])

    to = make_location(path, storage_options)
    return _run(
        snapshot,
        to,
        call,
        older,
        _lay_out_dcp,
        name="export_dcp",
        progress=progress,
        keeps_shards=True,
    )


def _run(
    snapshot: SnapshotHandle,
    to: Location,
    call: _Call,
    older: Callable[[Storage, RunBlocking], Awaitable[list[str]]],
    lay_out: Callable[[Any], _Files],
    *,
    name: str,
    progress: bool,
    keeps_shards: bool = False,
) -> ExportReport | Awaitable[ExportReport]:
    if not isinstance(snapshot, SnapshotHandle):
        raise UsageError(f"snapshot must be a Snapshot, not a {type(snapshot).__name__}")
    call.check()
    check_flag("progress", progress)
    exporters: list[Exporter] = []

    @begins_anew
    def script(source: Source) -> Script[ExportReport]:
        async def step(host: Host) -> ExportReport:
            async with opened_for_export(host, source, to) as (opened, target):

                async def perform() -> ExportReport:
                    state, count = await _state(opened, call, keeps_shards=keeps_shards)
                    exporter = Exporter(opened, target)
                    exporters[:] = [exporter]
                    files = await opened.errands.run_blocking(lay_out, state)
                    found = await older(target, opened.errands.run_blocking)
                    await exporter.make_way(found, overwrite=call.overwrite)
                    async with exporter.cleaning_up():
                        await exporter.write(files.files)
                        await opened.reader.check_replaced()
                        for key, data in files.last.items():
                            await exporter.put(key, data)
                    return ExportReport(
                        files=tuple(sorted(exporter.files)),
                        num_tensors=count,
                        nbytes=exporter.nbytes,
                    )

                return await opened.errands.run(perform)

        report: ExportReport = yield step
        return report

    def amounts() -> Sequence[Amount]:
        return [Amount("exporting", each.done_bytes, each.total_bytes) for each in exporters]

    source = snapshot._source
    whole = shown(script(source), amounts, source.location.display_url, is_on=progress)
    if isinstance(snapshot, sync.Snapshot):
        return run_sync(whole, name=name)

    coroutine = cast("CoroutineType[Any, Any, ExportReport]", run_async(whole))
    coroutine.__qualname__ = name
    caller = sys._getframe(3)  # of ``short_traceback``'s
    place = caller.f_code, caller.f_lineno
    return AsyncCall(coroutine, how_to_await(name), "nothing was exported", place)


class ShardedStub(Stub, frozen=True, eq=False):
    """Stub of a tensor that is written shard by shard."""

    index: Index
    entry: ShardedEntry


async def _state(opened: OpenSource, call: _Call, *, keeps_shards: bool) -> tuple[Any, int]:
    """Returns what to export, with ``TensorStub`` for tensors, and the number of these.

    Raises:
        UsageError: The key is missing, or a leaf is not a plain value.
    """

    key = call.key

    def is_below_key(path: str) -> bool:
        return key is None or below(path, key) is not None

    entries: list[AnyEntry] = []
    maker = _Stubs(keeps_shards=keeps_shards)
    indexes = await readable(opened, call.rename, is_below_key)
    for index, paths in indexes:
        found = [
            entry
            for entry in index.entries
            if (paths is None or entry.path in paths)
            and is_below_key(entry.path)
            and not isinstance(entry, Elsewhere)
        ]
        known = {entry.path for entry in entries}
        new = await maker.replaced(opened, index, found)
        entries += [entry for entry in new if entry.path not in known]
    if key is not None:
        first = indexes[0][0]
        if entries and all(is_in_layer(entry.path, key) for entry in entries):
            below_key = [f"{key}/{entry.path[len(key) + 1 :]}" for entry in entries]
            pairs = zip(entries, below_key, strict=True)
            entries = [msgspec.structs.replace(entry, path=path) for entry, path in pairs]
        root = resolve(entries or first.entries, key, first.held_by_other_ranks)
        return _built(root, entries), maker.count
    state = {each: _built(escape(each), own) for each, own in entries_by_key(entries).items()}
    mark = DcpMark.of((await opened.reader.commit()).metadata)
    return (state if mark is None else mark.state_dict_of(state)), maker.count


def _built(root: str, entries: Sequence[AnyEntry]) -> object:
    restore = prepare(root, entries, target=None, allow_pickle=True)
    assert not restore.memory.reads
    value = restore.build()
    check_plain(value, root)
    return value


class _Stubs:
    """Replaces the entries of leaves by values: tensors by what stands for them.

    Attributes:
        count: Number of tensors.
    """

    def __init__(self, *, keeps_shards: bool) -> None:
        self._keeps_shards = keeps_shards
        self._storages: dict[tuple[int, str], SharedBytes] = {}
        self.count = 0

    async def replaced(
        self, opened: OpenSource, index: Index, entries: Sequence[AnyEntry]
    ) -> list[AnyEntry]:
        by_path = {entry.path: entry for entry in index.entries}
        long = [entry for entry in entries if isinstance(entry, BytesEntry)]
        values = await _read_values(opened, index, long)
        found: list[AnyEntry] = []
        for entry in entries:
            path = entry.path
            if isinstance(entry, CompositeEntry):
                raise not_plain(path, "sparse or quantized tensor")
            if "@" in path:
                continue  # the memory of a view
            if isinstance(entry, ContainerEntry | ValueEntry):
                found.append(entry)
            elif isinstance(entry, BytesEntry):
                found.append(ValueEntry(path=path, value=objects.Opaque(values[path])))
            else:
                self.count += 1
                stub = self._stub(index, entry, by_path)
                found.append(ValueEntry(path=path, value=objects.Opaque(stub)))
        return found

    def _stub(self, index: Index, entry: AnyEntry, by_path: Mapping[str, AnyEntry]) -> object:
        assert isinstance(entry, TensorEntry | ShardedEntry | ViewEntry)
        if entry.type in ("numpy", "numpy_scalar") or not hasattr(torch, entry.dtype):
            raise not_plain(entry.path, f"numpy array of {entry.dtype}")
        base: AnyEntry | None = entry
        strides, offset = c_strides(entry.shape), 0
        if isinstance(entry, ViewEntry):
            base, strides, offset = by_path.get(entry.of), entry.strides, entry.offset
        if isinstance(base, ShardedEntry) and self._keeps_shards:
            StoredBytes.of(index, base)  # raises
            return ShardedStub(index, base)
        if not isinstance(base, TensorEntry | ShardedEntry):
            raise not_plain(entry.path, "view of something else")
        place = id(index), base.path
        if place not in self._storages:
            stored = StoredBytes.of(index, base)
            self._storages[place] = SharedBytes(Body(stored, stored.nbytes), base.dtype)
        return TensorStub(
            storage=self._storages[place],
            dtype=entry.dtype,
            shape=entry.shape,
            strides=strides,
            offset=offset,
            is_parameter=entry.type == "parameter",
            requires_grad=entry.requires_grad,
        )


async def _read_values(
    opened: OpenSource, index: Index, entries: Iterable[BytesEntry]
) -> dict[str, object]:
    """Reads long values.

    Raises:
        UsageError: One is an array, or pickled.
    """
    found: dict[str, tuple[str, bytearray]] = {}
    requests: list[RangeRequest] = []
    for entry in entries:
        if entry.type in ("pickle", "numpy"):
            raise not_plain(entry.path, "pickle" if entry.type == "pickle" else "numpy array")
        data = bytearray(entry.data.stop - entry.data.start)
        found[entry.path] = entry.type, data
        if data:
            memory = torch.frombuffer(data, dtype=torch.uint8)
            sink = HostMemory(memory.data_ptr(), len(data), memory)
            requests.append(RangeRequest(index, entry.data, sink))
    await opened.fetcher().fetch(requests)
    return {path: objects.decode(kind, data) for path, (kind, data) in found.items()}


def _lay_out_dcp(state: Any) -> _Files:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    if not isinstance(state, dict):
        raise UsageError(f"DCP saves dicts, and this key's state is a {type(state).__name__}")
    stubs: dict[int, TensorStub | ShardedStub] = {}
    try:
        flat, names = flatten_state_dict(_with_tensors(state, stubs))
    except ValueError as error:
        raise UsageError(f"two leaves would have one name of DCP's: {error}") from error
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    blobs = _Blobs()
    for name, value in flat.items():
        stub = stubs.get(id(value))
        if stub is None:
            described[name] = BytesStorageMetadata()
            if type(value) is tuple and len(value) == 2 and value[0] == BYTES_IO:
                value = BytesIO(value[1])
            out = BytesIO()
            torch.save(value, out)
            data = out.getvalue()
            places[MetadataIndex(name)] = _StorageInfo(*blobs.add([Known(data)], len(data)))
            continue
        chunks: list[ChunkStorageMetadata] = []
        for number, (box, tensor) in enumerate(_chunks(stub)):
            archive = ArchiveParts(tensor)
            offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            place = _StorageInfo(*blobs.add(archive.parts, archive.nbytes))
            places[MetadataIndex(name, offsets, number)] = place
        assert isinstance(value, torch.Tensor)
        properties = TensorProperties(dtype=value.dtype)
        described[name] = TensorStorageMetadata(properties, value.shape, chunks)
    metadata = Metadata(
        described,
        planner_data=names,
        storage_data=places,
        storage_meta=StorageMeta(),
        version="1.0.0",
    )
    return _Files(blobs.files(), {_METADATA: pickle.dumps(metadata)})


def _with_tensors(value: Any, stubs: dict[int, TensorStub | ShardedStub]) -> Any:
    """Puts tensors without data where stubs are: DCP's names depend on what is a tensor."""
    if isinstance(value, TensorStub | ShardedStub):
        entry = value if isinstance(value, TensorStub) else value.entry
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        stubs[id(tensor)] = value
        return tensor
    if isinstance(value, Mapping):
        return {key: _with_tensors(child, stubs) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_with_tensors(child, stubs) for child in value])
    return value


def _chunks(stub: TensorStub | ShardedStub) -> list[tuple[Box, TensorStub]]:
    """Returns the stored boxes of a tensor, each as a tensor of its own."""
    if isinstance(stub, TensorStub):
        # Only what it has of memory that it shares.
        itemsize = dtype_itemsize(stub.dtype) or 1
        nbytes = extent_bytes(stub.shape, stub.strides, itemsize)
        body = Body(stub.storage.body.stored, nbytes, stub.offset)
        alone = msgspec.structs.replace(
            stub,
            storage=SharedBytes(body, stub.dtype),
            offset=0,
            is_parameter=False,
            requires_grad=False,
        )
        return [(Box.whole(stub.shape), alone)]
    entry, found = stub.entry, []
    for number, box in enumerate(entry.shards.cut.boxes):
        if box.is_empty:
            continue
        nbytes = prod(box.sizes) * (dtype_itemsize(entry.dtype) or 1)
        shards = Shards.of([Shard(Box.whole((nbytes,)), entry.shards.data(number))])
        body = Body(StoredBytes(stub.index, entry.path, shards, (nbytes,)), nbytes)
        storage = SharedBytes(body, entry.dtype)
        strides = c_strides(box.sizes)
        tensor = TensorStub(storage, entry.dtype, box.sizes, strides, 0, False, False)
        found.append((box, tensor))
    return found


class _Blobs:
    """Puts what DCP reads at once into files, one after the other."""

    def __init__(self) -> None:
        self._files: list[list[Part]] = [[]]
        self._at = 0

    def add(self, parts: Sequence[Part], nbytes: int) -> tuple[str, int, int]:
        """Returns the file's name, and offset and length in it."""
        if self._at and self._at + nbytes > _MAX_FILE_BYTES:
            self._files.append([])
            self._at = 0
        self._files[-1] += parts
        place = _data_name(len(self._files) - 1), self._at, nbytes
        self._at += nbytes
        return place

    def files(self) -> list[OutFile]:
        return [OutFile(_data_name(number), parts) for number, parts in enumerate(self._files)]


def _data_name(number: int) -> str:
    return f"__0_{number}.distcp"
