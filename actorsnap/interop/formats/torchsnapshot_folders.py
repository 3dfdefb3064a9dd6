# SPDX-License-Identifier: Apache-2.0
"""Reads folders of torchsnapshot: ``.snapshot_metadata``, and the files that it names.

The metadata has every leaf of every rank, without file sizes, checksums or a format version. As in
torchsnapshot, all ranks may read a sharded or replicated leaf; otherwise, only the rank that saved
it. Pickled objects are read without running their pickle. If that is not possible, they stay
pickles, which only ``Options(allow_pickle=True)`` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeAlias
from urllib.parse import unquote

import torch

from actorsnap.actors.formats import Foreign, Place
from actorsnap.errors import ActorSnapError, FormatError, UsageError
from actorsnap.format.layout import is_well_formed_key
from actorsnap.interop.formats.describing import Description
from actorsnap.interop.formats.pickles import StateDescriber
from actorsnap.interop.formats.torch_files import SavedFile, read_zip
from actorsnap.interop.formats.torchsnapshot_records import (
    METADATA_KEY,
    ChunkedRecord,
    DictRecord,
    ListRecord,
    Metadata,
    OrderedDictRecord,
    PickleRecord,
    Record,
    ShardedRecord,
    TensorRecord,
    ValueRecord,
    parse_metadata,
)
from actorsnap.log import Log
from actorsnap.state.tensors import DTYPES, QUANTIZED
from actorsnap.state.tree import escape
from actorsnap.storage.base import for_each
from actorsnap.storage.joined import KeyRange

logger = Log(__name__)

_AT_ONCE = 16
_JOINED = "joined"
"""Folder of the names of tensors in pieces; torchsnapshot has no such folder."""


async def read(place: Place) -> Foreign | None:
    """See ``actors.formats``."""
    if place.file or await place.find(METADATA_KEY) is None:
        return None
    data = await place.get(METADATA_KEY)
    metadata = await place.run_blocking(parse_metadata, data)
    files = await place.run_blocking(_files_of, metadata)
    saved: dict[str, SavedFile | ActorSnapError] = {}

    async def look(location: str) -> None:
        await place.need(location, f"{METADATA_KEY} names")
        if files[location]:
            try:
                saved[location] = await read_zip(place, location, allow_pickle=False)
            except UsageError as error:
                saved[location] = error

    await for_each(files, look, at_once=_AT_ONCE)
    return await place.run_blocking(_describe, place, metadata, saved)


def _files_of(metadata: Metadata) -> dict[str, bool]:
    """Returns the files by location, and whether they are of ``torch.save``.

    Raises:
        FormatError: A location is outside of the folder.
    """
    files: dict[str, bool] = {}
    for key, record in metadata.manifest.items():
        for part in _stored_in(record):
            location = part.location
            if not is_well_formed_key(location) or location.startswith(f"{_JOINED}/"):
                detail = f"{key!r:.200} is at {location!r:.200}, which is not a file of a snapshot"
                raise FormatError(key=METADATA_KEY, detail=detail)
            is_saved = part.serializer == "torch_save"
            if files.setdefault(location, is_saved) != is_saved:
                raise FormatError(key=location, detail="it is of two formats at once")
    return files


def _stored_in(record: Record) -> Iterator[TensorRecord | PickleRecord]:
    if isinstance(record, TensorRecord):
        yield record
    elif isinstance(record, PickleRecord):
        if not _is_none(record):
            yield record
    elif isinstance(record, ShardedRecord):
        yield from [shard.tensor for shard in record.shards]
    elif isinstance(record, ChunkedRecord):
        yield from [chunk.tensor for chunk in record.chunks]


def _is_none(record: PickleRecord) -> bool:
    # A file each, and an optimizer has many: nothing is in there.
    return record.obj_type == "builtins.NoneType"


def _describe(
    place: Place, metadata: Metadata, saved: Mapping[str, SavedFile | ActorSnapError]
) -> Foreign:
    ranks: list[dict[str, Record]] = [{} for _ in range(metadata.world_size)]
    for key, record in metadata.manifest.items():
        rank, _, path = key.partition("/")
        if not (rank.isascii() and rank.isdecimal() and path):
            raise FormatError(key=METADATA_KEY, detail=f"{key!r:.200} does not begin with a rank")
        if int(rank) >= len(ranks):
            detail = f"{key!r:.200} is of a rank that its world of {len(ranks)} lacks"
            raise FormatError(key=METADATA_KEY, detail=detail)
        ranks[int(rank)][path] = record
    world = _World(place, saved, _whole_shapes(ranks))
    manifests = []
    for number, records in enumerate(ranks):
        description = Description(place, number)
        _RankDescriber(world, description, records).add_all()
        manifests.append(description.manifest())
        world.joined.update(description.joined)
    return Foreign(format="torchsnapshot", manifests=tuple(manifests), joined=world.joined)


def _whole_shapes(ranks: Sequence[Mapping[str, Record]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of sharded tensors by path: up to where their last shards end."""
    shapes: dict[str, tuple[int, ...]] = {}
    for records in ranks:
        for path, record in records.items():
            if not isinstance(record, ShardedRecord):
                continue
            for shard in record.shards:
                ends = [at + n for at, n in zip(shard.offsets, shard.sizes, strict=False)]
                whole = shapes.get(path, (0,) * len(ends))
                if not len(ends) == len(whole) == len(shard.offsets) == len(shard.sizes):
                    detail = f"the shards of {path!r:.200} have different numbers of dims"
                    raise FormatError(key=METADATA_KEY, detail=detail)
                shapes[path] = tuple(map(max, whole, ends))
    return shapes


_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass(eq=False)
class _World:
    """State that the describers of all ranks share.

    Attributes:
        saved: The files of ``torch.save``, or why they cannot be read.
        shapes: Of sharded tensors, by path.
        owners: Path and box of the bytes of files.
        joined: See ``Foreign``.
    """

    place: Place
    saved: Mapping[str, SavedFile | ActorSnapError]
    shapes: Mapping[str, tuple[int, ...]]
    owners: dict[KeyRange, tuple[str, _Box | None]] = field(default_factory=dict)
    joined: dict[str, tuple[KeyRange, ...]] = field(default_factory=dict)

    def claim(self, piece: KeyRange, key: str, box: _Box | None) -> None:
        """Raises FormatError if the same bytes belong to another path or box: names of files may
        collide, and then one has overwritten the other.
        """
        owner = self.owners.setdefault(piece, (key, box))
        if owner != (key, box) and piece.start < piece.stop:
            detail = f"it is of {owner[0]!r:.200} and of {key!r:.200}: one overwrote the other"
            raise FormatError(key=piece.key, detail=detail)


@dataclass(eq=False)
class _RankDescriber:
    """Describes what one rank saved, in the order of its containers.

    Args:
        records: By path, without the rank.
    """

    world: _World
    description: Description
    records: Mapping[str, Record]

    def add_all(self) -> None:
        """Raises FormatError if the records make no tree, or contradict the files."""
        children: dict[str, dict[str, str]] = {}
        for key in self.records:
            parent, _, token = key.rpartition("/")
            children.setdefault(parent, {})[token] = key
        roots = children.get("", {})
        # What is left to add, the next one last: its key, and its path here.
        left = [(key, escape(unquote(token))) for token, key in reversed(roots.items())]
        added: set[str] = set()
        while left:
            key, path = left.pop()
            added.add(key)
            left += reversed(self._add(key, path, children.get(key, {})))
        lost = next((key for key in self.records if key not in added), None)
        if lost is not None:
            raise FormatError(key=METADATA_KEY, detail=f"{lost!r:.200} is in no list and no dict")

    def _add(self, key: str, path: str, children: Mapping[str, str]) -> list[tuple[str, str]]:
        """Adds an entry. Returns keys and paths of what is in it."""
        record = self.records[key]
        match record:
            case ListRecord():
                self.description.container(path, "list")
                return _items(path, children)
            case DictRecord(keys):
                is_ordered = isinstance(record, OrderedDictRecord)
                self.description.container(path, "ordered_dict" if is_ordered else "dict")
                return [
                    (children[token], f"{path}/{escape(each)}")
                    for each in dict.fromkeys(keys)
                    if (token := _token(each)) in children
                ]
            case ValueRecord():
                try:
                    value = record.value
                except ValueError as error:
                    raise FormatError(
                        key=METADATA_KEY,
                        detail=f"{key!r:.200} is {record.serialized_value!r:.80}, which is not "
                        f"of type {record.type}",
                    ) from error
                self.description.value(path, value, replicated=record.replicated)
            case PickleRecord():
                if _is_none(record):
                    self.description.value(path, None, replicated=record.replicated)
                else:
                    self._add_saved(key, path, record)
            case TensorRecord():
                if record.serializer == "torch_save":
                    self._add_saved(key, path, record)
                else:
                    self._add_tensor(key, path, record)
            case ChunkedRecord():
                self._add_chunked(key, path, record)
            case ShardedRecord():
                self._add_shards(key, path, record)
        return []

    def _add_tensor(self, key: str, path: str, record: TensorRecord) -> None:
        piece, dtype = self._piece(key, record)
        self.description.tensor(
            path,
            dtype,
            record.shape,
            self.description.stored(piece.key, piece.start, piece.stop),
            replicated=record.replicated,
        )

    def _add_chunked(self, key: str, path: str, record: ChunkedRecord) -> None:
        """Adds a tensor whose rows are in several files."""
        shape = record.shape or (1,)
        chunks = sorted(record.chunks, key=lambda chunk: chunk.offsets)
        pieces: list[KeyRange] = []
        dtypes: set[str] = set()
        row = 0
        for chunk in chunks:
            if chunk.offsets != (row, *[0] * (len(shape) - 1)) or chunk.sizes[1:] != shape[1:]:
                break
            row += chunk.sizes[0]
            piece, dtype = self._piece(key, chunk.tensor, (chunk.offsets, chunk.sizes))
            pieces.append(piece)
            dtypes.add(dtype)
        if len(pieces) != len(chunks) or row != shape[0] or len(dtypes) != 1:
            raise FormatError(
                key=METADATA_KEY, detail=f"the chunks of {key!r:.200} do not make {record.shape}"
            )
        if len(pieces) == 1:
            stored = self.description.stored(pieces[0].key, pieces[0].start, pieces[0].stop)
        else:
            number = len(self.world.joined) + len(self.description.joined)
            stored = self.description.stored_in_pieces(f"{_JOINED}/{number}", pieces)
        self.description.tensor(
            path, dtypes.pop(), record.shape, stored, replicated=record.replicated
        )

    def _add_shards(self, key: str, path: str, record: ShardedRecord) -> None:
        for shard in record.shards:
            box = shard.offsets, shard.sizes
            piece, dtype = self._piece(key, shard.tensor, box)
            self.description.tensor(
                path,
                dtype,
                shard.sizes,
                self.description.stored(piece.key, piece.start, piece.stop),
                offsets=shard.offsets,
                global_shape=self.world.shapes[key],
            )

    def _piece(
        self, key: str, record: TensorRecord, box: _Box | None = None
    ) -> tuple[KeyRange, str]:
        """Returns the place of a dense tensor's bytes, and its dtype.

        Args:
            box: The part of a tensor that it is.

        Raises:
            FormatError: The file is too short, or the entry contradicts itself or others.
        """
        shape = record.shape if box is None else box[1]
        piece, dtype = self._find_piece(key, record, shape)
        self.world.claim(piece, key, box)
        return piece, dtype

    def _find_piece(
        self, key: str, record: TensorRecord, shape: tuple[int, ...]
    ) -> tuple[KeyRange, str]:
        location = record.location
        size = self.world.place.used[location].size
        name = record.dtype.removeprefix("torch.")
        if name not in DTYPES or name == record.dtype or record.shape != shape:
            detail = f"{key!r:.200} is {record.dtype!r:.80} of shape {record.shape}, not {shape}"
            raise FormatError(key=METADATA_KEY, detail=detail)
        if record.serializer == "torch_save":
            return self._saved_piece(key, record)
        if record.serializer != "buffer_protocol" or DTYPES[name] in QUANTIZED:
            detail = f"{key!r:.200} is {name}, serialized by {record.serializer!r:.80}"
            raise FormatError(key=METADATA_KEY, detail=f"{detail}: torchsnapshot never wrote that")
        start, stop = (0, size) if record.byte_range is None else record.byte_range
        nbytes = prod(shape) * DTYPES[name].itemsize
        if stop > size or (record.byte_range is None and size < nbytes):
            end = max(stop, start + nbytes)
            detail = f"truncated: it has {size} bytes, and {key!r:.200} ends at {end}"
            raise FormatError(key=location, detail=detail)
        if stop - start != nbytes:
            detail = f"{key!r:.200} is at [{start}, {stop}), and has {nbytes} bytes"
            raise FormatError(key=location, detail=detail)
        return KeyRange(location, start, stop), name

    def _saved_piece(self, key: str, record: TensorRecord) -> tuple[KeyRange, str]:
        """``_piece`` for a tensor that was saved by ``torch.save``."""
        saved = self.world.saved[record.location]
        tensor: Any = saved.state if isinstance(saved, SavedFile) else None
        if (
            not isinstance(saved, SavedFile)
            or type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or (storage := saved.ghosts.of(tensor)) is None
        ):
            raise UsageError(
                f"{key!r}: a part of a tensor is in the file {record.location}, in a form that "
                "cannot be read in place: convert the snapshot with torchsnapshot"
            ) from (saved if isinstance(saved, ActorSnapError) else None)
        self._check_shape(key, record, tensor)
        start = int(tensor.storage_offset()) * tensor.dtype.itemsize
        stop = start + tensor.numel() * tensor.dtype.itemsize
        if stop > storage.nbytes:
            detail = f"the tensor ends at byte {stop} of the {storage.nbytes} of its storage"
            raise FormatError(key=record.location, detail=detail)
        begin = saved.starts[storage.key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return KeyRange(record.location, begin + start, begin + stop), dtype

    def _add_saved(self, key: str, path: str, record: TensorRecord | PickleRecord) -> None:
        """Adds an object, or a tensor of a dtype without a plain form. Else it stays a pickle."""
        description, location = self.description, record.location
        if record.serializer != "torch_save":
            detail = f"{path!r:.200} is serialized by {record.serializer!r:.80}"
            raise FormatError(key=METADATA_KEY, detail=f"{detail}: torchsnapshot never wrote that")
        size = self.world.place.used[location].size
        self.world.claim(KeyRange(location, 0, size), key, None)
        saved = self.world.saved[location]
        num_before = len(description.entries)
        try:
            if isinstance(saved, ActorSnapError):
                raise saved
            if isinstance(record, TensorRecord):
                self._check_shape(path, record, saved.state)
            describer = StateDescriber(
                description,
                saved.key,
                saved.ghosts,
                partial(saved.stored, description),
                allow_pickle=False,
                replicated=record.replicated,
            )
            describer.add({path: saved.state})
        except UsageError as error:
            logger.info("%r stays a pickle: %s", path, error)
            del description.entries[num_before:]
            stored = description.stored(location, 0, size)
            description.pickled(path, stored, replicated=record.replicated)

    def _check_shape(self, key: str, record: TensorRecord, found: object) -> None:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else None
        if shape != record.shape:
            what = f"a tensor of shape {shape}" if shape is not None else "no tensor"
            detail = f"it has {what}, and {key!r:.200} {record.shape}"
            raise FormatError(key=record.location, detail=detail)


def _items(path: str, children: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns keys and paths of a list's items.

    Raises:
        FormatError: One has no position.
    """
    for token, key in children.items():
        if not (token.isascii() and token.isdecimal()):
            raise FormatError(key=METADATA_KEY, detail=f"{key!r:.200} has no position in its list")
    return [(children[token], f"{path}/{int(token)}") for token in sorted(children, key=int)]


def _token(key: bool | int | str) -> str:
    return str(key).replace("%", "%25").replace("/", "%2F")
