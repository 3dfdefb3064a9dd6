# SPDX-License-Identifier: Apache-2.0
"""Reads folders of torch.distributed.checkpoint (DCP), as its ``FileSystemWriter`` makes them.

``.metadata`` names all leaves and their items in the ``.distcp`` files; files that it does not name
are older. With ``use_collectives=False`` each rank has a metadata file of its own, for what it has
saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import msgspec
import torch

from actorsnap.actors.formats import Foreign, Place
from actorsnap.errors import FormatError, UsageError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import RankManifest, Stored
from actorsnap.interop.formats.dcp_items import Content, Located, PackedZip, locate_items
from actorsnap.interop.formats.dcp_metadata import (
    BYTES_IO,
    DcpMark,
    DcpMetadata,
    Path,
    StoredItem,
    StoredLeaf,
    bytes_io_of,
    decode_metadata,
)
from actorsnap.interop.formats.describing import DEFAULT_KEY, Description, path_of
from actorsnap.interop.formats.pickles import Ghosts, SavedStorage, StateDescriber, unpickle
from actorsnap.interop.formats.torch_files import check_state
from actorsnap.planning.index import ancestors
from actorsnap.state.composite import is_composite
from actorsnap.state.tensors import DTYPE_NAMES
from actorsnap.storage.joined import KeyRange
from actorsnap.storage.unpacked import Packed

_METADATA = ".metadata"
_OF_RANK = re.compile(r"__(0|[1-9][0-9]{0,6})\.metadata")
_OURS = b"# actorsnap"
"""Begins the file that ``ActorsnapWriter(marker=True)`` leaves."""


_CONVERT = "Load the folder with torch.distributed.checkpoint, and save it with actorsnap"


class _RowMajor(msgspec.Struct, frozen=True):
    """Elements in row-major order: bytes ``[start, stop)`` of a file."""

    dtype: str
    start: int
    stop: int


async def read(place: Place) -> Foreign | None:
    """See ``actors.formats``."""
    if place.file:
        return None
    keys = [_METADATA]
    if await place.find(_METADATA) is None:
        keys = await _metadata_of_ranks(place)
        if not keys:
            return None
    ranks: list[DcpMetadata] = []
    for key in keys:
        data = await place.get(key)
        if data.startswith(_OURS):
            return None
        ranks.append(
            await place.run_blocking(
                partial(decode_metadata, data, key, allow_pickle=place.allow_pickle)
            )
        )
    paths = _Paths(ranks)
    manifests = []
    joined: dict[str, tuple[KeyRange, ...]] = {}
    packed: dict[str, Packed] = {}
    for rank, metadata in enumerate(ranks):
        items = {item: leaf.fqn for leaf in metadata.leaves for item in leaf.items}
        describer = _Describer(place, rank, await locate_items(place, items, keys[rank]))
        manifests.append(await place.run_blocking(describer.manifest, metadata.leaves, paths))
        joined.update(describer.description.joined)
        packed.update(describer.description.packed)
    # ``interop.dcp`` and exports name leaves as DCP does.
    mark = DcpMark(flat=all([each.is_flat for each in ranks]), key=paths.key)
    return Foreign(
        format="torch.distributed.checkpoint",
        manifests=tuple(manifests),
        joined=joined,
        packed=packed,
        metadata=mark.metadata(),
    )


async def _metadata_of_ranks(place: Place) -> list[str]:
    """Returns the metadata files of a save without collectives, in rank order.

    Raises:
        FormatError: That of a rank is missing.
    """
    found = [int(match[1]) for match in map(_OF_RANK.fullmatch, place.listed) if match]
    keys = [f"__{rank}.metadata" for rank in range(max(found, default=-1) + 1)]
    for key in keys:
        await place.need(key, f"the save that made {keys[-1]} made, too")
    return keys


class _Paths:
    """Where leaves are in an app state (``docs/migrate/index.md``, "Where a state is").

    Attributes:
        key: Of the leaves at the top level of the state dict; empty if they keep their names.
        lists: Paths of lists.
    """

    def __init__(self, ranks: Sequence[DcpMetadata]) -> None:
        leaves = [leaf for metadata in ranks for leaf in metadata.leaves]
        sections = {leaf.path[0] for leaf in leaves if len(leaf.path) > 1}
        names = {leaf.path[0] for leaf in leaves}
        self.key = "" if DEFAULT_KEY in names and sections else DEFAULT_KEY
        self._has_sections = bool(sections)
        self._numbered = _numbered_states(leaves)
        self._paths: dict[str, Path] = {}
        children: dict[Path, set[str | int]] = {}
        for leaf in leaves:
            path = self._paths[leaf.fqn] = self._place(leaf)
            for length in range(1, len(path)):
                children.setdefault(path[:length], set()).add(path[length])
        for path in self._paths.values():
            if path in children:
                raise FormatError(key=path_of(*path), detail="it is a tensor or value, and a dict")
        # Before the conversion of names to numbers, only positions in lists are numbers.
        self.lists = {
            path_of(*path)
            for path, keys in children.items()
            if path not in self._numbered and keys == set(range(len(keys)))
        }

    def of(self, leaf: StoredLeaf) -> str:
        return path_of(*self._paths[leaf.fqn])

    def _place(self, leaf: StoredLeaf) -> Path:
        path = leaf.path
        if len(path) == 1 and self.key and (leaf.shape is not None or not self._has_sections):
            return (self.key, *path)
        for length in range(len(path) - 1):
            if path[: length + 1] in self._numbered:
                return (*path[: length + 1], int(path[length + 1]), *path[length + 2 :])
        return path


def _numbered_states(leaves: Iterable[StoredLeaf]) -> set[Path]:
    """Returns the dicts ``state`` of optimizers whose keys are numbers, which DCP makes text."""
    optimizers = {
        leaf.path[: leaf.path.index("param_groups")]
        for leaf in leaves
        if "param_groups" in leaf.path
    }
    states = {(*path, "state") for path in optimizers}
    keys: dict[Path, list[str]] = {}
    for leaf in leaves:
        for length in range(1, len(leaf.path)):
            if leaf.path[:length] in states:
                keys.setdefault(leaf.path[:length], []).append(str(leaf.path[length]))
    return {path for path, names in keys.items() if all(map(_is_number, names))}


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name


class _Describer:
    """Describes the leaves of a rank."""

    def __init__(self, place: Place, rank: int, located: Located) -> None:
        self.description = Description(place, rank)
        self._located = located
        self._allow_pickle = place.allow_pickle
        # Equal pickles are frequent: learning rates; tensors of one shape.
        self._unpickled: dict[bytes, tuple[Any, Ghosts]] = {}
        self._packed: dict[StoredItem, PackedZip] = {}

    def manifest(self, leaves: Iterable[StoredLeaf], paths: _Paths) -> RankManifest:
        """Raises as ``actors.formats.open_foreign``."""
        described: set[str] = set()
        for leaf in leaves:
            path = paths.of(leaf)
            for parent in [*ancestors(path)][::-1]:
                if parent in paths.lists and parent not in described:
                    described.add(parent)
                    self.description.container(parent, "list")
            for item in leaf.items:
                self._add(path, leaf, item)
        return self.description.manifest()

    def _add(self, path: str, leaf: StoredLeaf, item: StoredItem) -> None:
        if item.box is not None:
            self._add_box(path, leaf, item, item.box)
            return
        entries = self.description.entries
        before = len(entries)
        try:
            name = f"{leaf.fqn!r:.200} in {item.file}"
            content = self._located.zips[item]
            self._add_whole(path, item, content, *self._unpickle(content, name), name)
        except UsageError as error:
            # The rest of the folder is as good as before.
            del entries[before:]
            self.description.refused(path, error)

    def _add_box(self, path: str, leaf: StoredLeaf, item: StoredItem, box: Box) -> None:
        name = f"{leaf.fqn!r:.200} in {item.file}"
        content = self._located.zips.get(item)
        dense: _RowMajor | None
        ghosts = Ghosts()
        if content is None:
            dense = self._of_safetensors(leaf, item, box)
        else:
            value, ghosts = self._unpickle(content, name)
            _check_tensor(value, box, name)
            dense = _row_major(value, ghosts, content, item)
        is_whole = box.sizes == leaf.shape
        if dense is not None:
            self.description.tensor(
                path,
                dense.dtype,
                box.sizes,
                self._stored(item, content, ghosts, dense.start, dense.stop, name),
                offsets=None if is_whole else box.offsets,
                global_shape=None if is_whole else leaf.shape,
            )
        elif content is not None and is_whole:
            self._add_whole(path, item, content, value, ghosts, name)
        else:
            raise UsageError(
                f"{name}: the part at {box.offsets} is not stored row by row. {_CONVERT}"
            )

    def _add_whole(
        self, path: str, item: StoredItem, content: Content, value: Any, ghosts: Ghosts, name: str
    ) -> None:
        """Adds a value, perhaps with tensors in it, or a tensor that does not consist of rows."""

        def stored(saved: SavedStorage, start: int, stop: int) -> Stored:
            begin = content.starts.get(saved.key, item.start)
            return self._stored(item, content, ghosts, begin + start, begin + stop, name)

        describer = StateDescriber(
            self.description, name, ghosts, stored, allow_pickle=self._allow_pickle
        )
        describer.add({path: value})

    def _stored(
        self,
        item: StoredItem,
        content: Content | None,
        ghosts: Ghosts,
        start: int,
        stop: int,
        name: str,
    ) -> Stored:
        """Returns bytes of the file, or of what the item holds if that was compressed."""
        if content is None or not content.is_packed:
            return self.description.stored(item.file, start, stop)
        if start == stop:
            return self.description.stored(item.file, item.start, item.start)
        packed = self._packed.get(item)
        if packed is None:
            storages = [(s.key, content.starts[s.key], s.nbytes) for s in ghosts.found.values()]
            packed = self._packed[item] = PackedZip.of(item, name, storages)
        piece = KeyRange(item.file, item.start, item.stop)
        return self.description.stored_packed(piece, packed, start, stop)

    def _unpickle(self, content: Content, name: str) -> tuple[Any, Ghosts]:
        pickled = content.archive.pickle
        found = self._unpickled.get(pickled)
        if found is None:
            ghosts = Ghosts()
            content_of_io = bytes_io_of(pickled)
            if content_of_io is not None:
                value: Any = (BYTES_IO, content_of_io)
            else:
                value = unpickle(BytesIO(pickled), ghosts, name, allow_pickle=self._allow_pickle)
                check_state(value, len(pickled), name)
            found = value, ghosts
            if not self._allow_pickle:  # plain values, which nothing changes
                self._unpickled[pickled] = found
        for saved in found[1].found.values():
            content.archive.record(saved, name)
        return found

    def _of_safetensors(self, leaf: StoredLeaf, item: StoredItem, box: Box) -> _RowMajor:
        """Raises FormatError if the file lacks the part of the tensor."""
        tensor = self._located.tensors[item.file].get(leaf.fqn)
        offsets = None if tensor is None else tensor.offsets or (0,) * len(tensor.shape)
        if tensor is None or (offsets, tensor.shape) != (box.offsets, box.sizes):
            raise FormatError(
                key=item.file,
                detail=f"it lacks the part of {leaf.fqn!r:.200} at {box.offsets}: torch "
                "keeps only one part of a tensor per safetensors file",
            )
        return _RowMajor(tensor.dtype, tensor.start, tensor.stop)


def _check_tensor(value: Any, box: Box, name: str) -> None:
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != box.sizes:
        what = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            what = f"of the shape {tuple(value.shape)}"
        raise FormatError(key=name, detail=f"it is {what}, and the metadata says {box.sizes}")


def _row_major(tensor: Any, ghosts: Ghosts, content: Content, item: StoredItem) -> _RowMajor | None:
    """Returns None for a tensor with other strides, and for sparse and quantized ones."""
    if type(tensor) is not torch.Tensor or is_composite(tensor) or not tensor.is_contiguous():
        return None
    saved = ghosts.of(tensor)
    if saved is None or not tensor.numel():
        return _RowMajor(DTYPE_NAMES[tensor.dtype], item.start, item.start)
    start = int(tensor.storage_offset()) * tensor.dtype.itemsize
    stop = start + tensor.numel() * tensor.dtype.itemsize
    if stop > saved.nbytes:
        return None  # refused there
    begin = content.starts[saved.key]
    return _RowMajor(DTYPE_NAMES[tensor.dtype], begin + start, begin + stop)
