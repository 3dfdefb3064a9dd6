# SPDX-License-Identifier: Apache-2.0
"""The script of ``Snapshot.export_hf``: safetensors files that ``from_pretrained`` opens.

Data objects are safetensors files already, so most bytes need no look: a file is a new header and
ranges of data objects, or a whole data object, copied inside the storage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from actorsnap.errors import UsageError
from actorsnap.format.checksum import crc32c
from actorsnap.format.geometry import c_strides
from actorsnap.format.layout import MAX_SHARD_BYTES, SAFETENSORS_DTYPES, Slot, lay_out
from actorsnap.format.manifest import (
    CompositeEntry,
    ContainerEntry,
    ObjectRecord,
    TensorEntry,
    ViewEntry,
)
from actorsnap.planning.assembly import Origin
from actorsnap.planning.index import AnyEntry, Elsewhere, Index, ShardedEntry
from actorsnap.planning.renaming import Rename, function_of, paths_of
from actorsnap.runtime.bars import Amount, shown
from actorsnap.runtime.export_selection import below, readable
from actorsnap.runtime.exporting import (
    Body,
    Exporter,
    ExportReport,
    Known,
    OutFile,
    Part,
    body_of,
    opened_for_export,
)
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import Location, check_flag
from actorsnap.runtime.source import Source, begins_anew
from actorsnap.state.restore.build import resolve
from actorsnap.state.tree import human
from actorsnap.storage.base import Storage

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_OURS = re.compile(r"model(?:-\d{5,}-of-\d{5,})?\.safetensors")
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_ARRAYS = ("numpy", "numpy_scalar")


class ExportCall(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``Snapshot.export_hf``."""

    key: str | None = None
    rename: Rename | None = None
    dtype: Any = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    overwrite: bool = False

    def check(self) -> None:
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            raise UsageError(f"key must be the name of a part of the app state, not {self.key!r}")
        if type(self.max_shard_bytes) is not int or self.max_shard_bytes < 1:
            raise UsageError(
                f"max_shard_bytes must be an int of at least 1, not {self.max_shard_bytes!r}"
            )
        check_flag("overwrite", self.overwrite)
        if self.rename is not None:
            function_of(self.rename)
        self.dtype_name()

    @property
    def model_key(self) -> str:
        return self.key or "model"

    def dtype_name(self) -> str | None:
        if self.dtype is None:
            return None
        name = str(self.dtype).removeprefix("torch.")
        if not isinstance(self.dtype, str | torch.dtype) or name not in _FLOATS:
            raise UsageError(f"dtype must be one of {', '.join(sorted(_FLOATS))}, not {self.dtype}")
        return name


class OutTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor to write; ``dtype`` is torch's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    body: Body
    origins: tuple[Origin, ...]

    @property
    def slot(self) -> Slot:
        return Slot(self.name, self.dtype, self.shape, self.body.nbytes)


@begins_anew
def export_hf(
    source: Source, to: Location, call: ExportCall, *, progress: bool = False
) -> Script[ExportReport]:
    call.check()
    check_flag("progress", progress)
    if to.display_url.endswith(".safetensors"):
        raise UsageError(
            f"{to.display_url!r} is the name of a file, and an export for Hugging Face is a folder "
            f"with a file {SINGLE}: name the folder, such as 'hf'"
        )
    exporters: list[Exporter] = []

    async def step(host: Host) -> ExportReport:
        async with opened_for_export(host, source, to) as (opened, target):

            async def perform() -> ExportReport:
                indexes = await readable(
                    opened, call.rename, lambda path: _name(path, call.model_key) is not None
                )
                exporter = Exporter(opened, target)
                exporters[:] = [exporter]
                plan = await _plan(exporter, call, indexes)
                await exporter.make_way(await _older(target), overwrite=call.overwrite)
                async with exporter.cleaning_up():
                    return await plan.write(exporter, opened.reader.check_replaced)

            return await opened.errands.run(perform)

    def script() -> Script[ExportReport]:
        report: ExportReport = yield step
        return report

    def amounts() -> list[Amount]:
        return [Amount("exporting", each.done_bytes, each.total_bytes) for each in exporters]

    url = source.location.display_url
    return (yield from shown(script(), amounts, url, is_on=progress))


class _Plan(msgspec.Struct, frozen=True, eq=False):
    shards: list[list[OutTensor]]
    left_out: tuple[str, ...]
    tied: dict[str, tuple[str, ...]]
    records: dict[str, ObjectRecord]

    async def write(self, exporter: Exporter, check_replaced: Callable[[], Any]) -> ExportReport:
        count = len(self.shards)
        files: list[OutFile] = []
        names: dict[str, str] = {}
        for number, tensors in enumerate(self.shards, 1):
            key = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            names |= {tensor.name: key for tensor in tensors}
            header = _header(tensors, self.records)
            parts: list[Part] = [header, *[tensor.body for tensor in tensors]]
            files.append(OutFile(key, parts, "first" if count == 1 else None))
        await exporter.write(files)
        await check_replaced()
        if count > 1:
            total = sum([tensor.body.nbytes for shard in self.shards for tensor in shard])
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            await exporter.put(INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2))
        return ExportReport(
            files=tuple(sorted(exporter.files)),
            num_tensors=len(names),
            nbytes=exporter.nbytes,
            copied_bytes=exporter.copied_bytes,
            left_out=self.left_out,
            tied=self.tied,
        )


async def _older(target: Storage) -> list[str]:
    """Returns files of another export; the index first, without which shards are nothing."""
    found = [info.key async for info in target.list("model")]
    return sorted([key for key in found if key == INDEX or _OURS.fullmatch(key)], reverse=True)


async def _plan(
    exporter: Exporter, call: ExportCall, indexes: Sequence[tuple[Index, frozenset[str] | None]]
) -> _Plan:
    """Decides on all files.

    Raises:
        UsageError: The key is missing, or the format lacks a tensor; names it.
    """
    selection = _Selection(call, exporter.joined)
    for index, paths in indexes:
        await exporter.opened.errands.run_blocking(selection.add, index, paths)
    if not selection.tensors:
        first = indexes[0][0]
        try:
            resolve(first.entries, call.model_key, first.held_by_other_ranks)
        except UsageError as error:
            if call.key is not None:
                raise
            raise UsageError(
                f"pass the model's key in key= (on the command line --key): {error}"
            ) from None
        raise UsageError(f"there are no tensors below the key {call.model_key!r}")
    tensors = list(selection.tensors.values())
    sample = next((t.origins[0].key for t in tensors if t.origins), None)
    by_objects = sample is not None and await exporter.copies_whole_objects(sample)
    return _Plan(
        _shards(tensors, selection.records, call.max_shard_bytes, by_objects=by_objects),
        (*selection.left_out, *(_other_keys(indexes[0][0], call) if call.key is None else ())),
        {name: tuple(others) for name, others in selection.tied.items()},
        selection.records,
    )


def _other_keys(index: Index, call: ExportCall) -> list[str]:
    """Returns the other keys of the app state, escaped."""
    return sorted({path.partition("/")[0] for path in paths_of(index)} - {call.model_key})


class _Selection:
    """Collects the tensors below a key.

    Attributes:
        tensors: By name.
        left_out: Paths of other values.
        tied: By the name that is written, those that are the same memory.
        records: Records of all objects, by key.
    """

    def __init__(self, call: ExportCall, joined: frozenset[str]) -> None:
        self._key = call.model_key
        self._dtype = call.dtype_name()
        self._joined = joined
        self.tensors: dict[str, OutTensor] = {}
        self.left_out: list[str] = []
        self.tied: dict[str, list[str]] = {}
        self.records: dict[str, ObjectRecord] = {}

    def add(self, index: Index, paths: frozenset[str] | None) -> None:
        """Adds the leaves of an index, or those at ``paths``.

        Raises:
            UsageError: safetensors cannot hold a tensor.
            FormatError: Its shards do not make it up.
        """
        self.records |= {record.key: record for record in index.objects}
        by_path = {entry.path: entry for entry in index.entries}
        same: dict[object, str] = {}
        for entry in index.entries:
            path = entry.path
            name = _name(path, self._key)
            if name is None or (paths is not None and path not in paths):
                continue
            if isinstance(entry, ContainerEntry | Elsewhere) or "@" in path:
                continue  # parts, of a tensor that is refused, or the memory of a view
            if isinstance(entry, CompositeEntry):
                raise _refused(path, f"{entry.layout.replace('_', ' ')} tensor")
            if not isinstance(entry, TensorEntry | ShardedEntry | ViewEntry):
                self.left_out.append(path)
                continue
            if entry.type in _ARRAYS:
                raise _refused(path, "numpy array")
            identity = _identity(entry)
            if identity in same:
                self.tied.setdefault(same[identity], []).append(name)
                continue
            if name in self.tensors or name == "__metadata__":
                raise UsageError(f"{path!r} cannot have the name {name!r} in a file: it is taken")
            same[identity] = name
            self.tensors[name] = self._tensor(name, index, entry, by_path)

    def _tensor(
        self,
        name: str,
        index: Index,
        entry: TensorEntry | ShardedEntry | ViewEntry,
        by_path: dict[str, AnyEntry],
    ) -> OutTensor:
        base = by_path.get(entry.of) if isinstance(entry, ViewEntry) else None
        if isinstance(entry, ViewEntry) and not isinstance(base, TensorEntry):
            raise _refused(entry.path, "view of a sharded tensor")
        body = body_of(index, entry, base if isinstance(base, TensorEntry) else None)
        dtype = entry.dtype
        if self._dtype not in (None, dtype) and dtype in _FLOATS:
            assert self._dtype is not None
            body = _cast(body, dtype, self._dtype)
            dtype = self._dtype
        if dtype not in SAFETENSORS_DTYPES:
            raise _refused(entry.path, f"tensor of {dtype}")
        origins = body.fragment(self._joined).origins
        return OutTensor(name, dtype, entry.shape, body, origins)


def _name(path: str, key: str) -> str | None:
    """Returns the name of a leaf below ``key``, None of others."""
    rest = below(path, key)
    return human(rest, ".") if rest else None


def _identity(entry: TensorEntry | ShardedEntry | ViewEntry) -> object:
    """Returns equal values for tensors that are the same elements of the same memory."""
    if isinstance(entry, ViewEntry):
        return entry.of, entry.offset, entry.dtype, entry.shape, entry.strides
    return entry.path, 0, entry.dtype, entry.shape, c_strides(entry.shape)


def _cast(body: Body, dtype: str, to: str) -> Body:
    ours, theirs = getattr(torch, dtype), getattr(torch, to)
    nbytes = body.nbytes // ours.itemsize * theirs.itemsize
    return Body(body.stored, nbytes, body.skip, body.layout, (ours, theirs))


def _refused(path: str, what: str) -> UsageError:
    return UsageError(
        f"{path!r} is a {what}, which safetensors cannot hold: export another key. In Python, a "
        "function in rename= can leave it out: return None for it"
    )


def _shards(
    tensors: Sequence[OutTensor],
    records: dict[str, ObjectRecord],
    max_bytes: int,
    *,
    by_objects: bool,
) -> list[list[OutTensor]]:
    """Returns the tensors of each file, in the order of the stored bytes.

    Args:
        by_objects: Only whole objects can be copied: each one is a file.
    """
    numbers = {key: number for number, key in enumerate(records)}
    far = len(numbers)

    def place(tensor: OutTensor) -> tuple[int, int]:
        if not tensor.origins:
            return far, 0
        return numbers[tensor.origins[0].key], tensor.origins[0].start

    ordered = sorted(tensors, key=place)
    if not by_objects and sum([tensor.body.nbytes for tensor in ordered]) <= max_bytes:
        return [ordered]
    groups: dict[str, list[OutTensor]] = {}
    for tensor in ordered:
        if len(tensor.origins) == 1:
            groups.setdefault(tensor.origins[0].key, []).append(tensor)
    least_bytes = 0 if by_objects else max_bytes // 2
    shards = [
        group
        for key, group in groups.items()
        if least_bytes < records[key].size <= max_bytes and _header(group, records).origins
    ]
    done = {tensor.name for shard in shards for tensor in shard}
    shard: list[OutTensor] = []
    shard_bytes = 0
    for tensor in ordered:
        if tensor.name in done:
            continue
        if shard and shard_bytes + tensor.body.nbytes > max_bytes:
            shards.append(shard)
            shard, shard_bytes = [], 0
        shard.append(tensor)
        shard_bytes += tensor.body.nbytes
    return [*shards, shard] if shard else shards


def _header(tensors: Sequence[OutTensor], records: dict[str, ObjectRecord]) -> Known:
    """Returns a file's header; with its origin if the file is a stored object, byte for byte."""
    layout = lay_out([tensor.slot for tensor in tensors])
    header = layout.header
    key = next((origin.key for tensor in tensors for origin in tensor.origins), None)
    record = None if key is None else records[key]
    if (
        record is None
        or (record.size, record.header_bytes) != (layout.size, len(header))
        or record.header_crc32c != crc32c(header)
    ):
        return Known(header)
    at = len(header)
    for tensor in tensors:
        if sum([origin.nbytes for origin in tensor.origins]) != tensor.body.nbytes:
            return Known(header)
        for origin in tensor.origins:
            if (origin.key, origin.start) != (record.key, at):
                return Known(header)
            at = origin.stop
    return Known(header, (Origin(record.key, 0, len(header)),))
