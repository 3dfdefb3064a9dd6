# SPDX-License-Identifier: Apache-2.0
"""The names of torch.distributed.checkpoint (DCP) for the entries of a snapshot, and back.

DCP names a leaf by the keys above it, joined by dots (its *fqn*). It descends into dicts, and into
lists that hold tensors or further such containers; other lists, and all tuples, deques and objects
are leaves.

A DCP state dict may have leaves at its top level, where an app state has statefuls. They are stored
below the key ``TOP``, and a ``DcpMark`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from actorsnap.errors import UsageError
from actorsnap.format.geometry import Box, c_strides
from actorsnap.format.manifest import (
    CompositeEntry,
    ContainerEntry,
    ContainerType,
    TensorEntry,
    ViewEntry,
)
from actorsnap.interop.formats.dcp_metadata import TOP, DcpMark
from actorsnap.planning.index import AnyEntry, Index, ShardedEntry
from actorsnap.planning.shards import Shard, Shards
from actorsnap.state.restore.checks import NUMPY_KINDS
from actorsnap.state.tensors import DTYPES
from actorsnap.state.tree import join, parent_of, unescape

_LEAVES = frozenset({"tuple", "deque", "record"})
"""Types of containers that DCP does not descend into, besides some lists."""

DenseEntry: TypeAlias = TensorEntry | ViewEntry | ShardedEntry

ObjectPath: TypeAlias = tuple[str | int, ...]
"""DCP's: str for dict keys, int for list positions."""


def stored_path(fqn: str, path: ObjectPath | None) -> ObjectPath:
    """Returns the keys of a leaf in the snapshot.

    Args:
        path: In the state dict, if the planner knows; it must make the fqn.

    Raises:
        UsageError: The state dict has a dict of the reserved name.
    """
    if path is None or ".".join(map(str, path)) != fqn:
        path = (fqn,)
    if len(path) == 1:
        return (TOP, *path)
    if path[0] == TOP:
        raise UsageError(
            f"{fqn!r}: the top-level key {TOP!r} is where actorsnap stores tensors and values that "
            "a state dict has at its top level; rename it"
        )
    return path


def containers_above(paths: Iterable[ObjectPath]) -> dict[str, ContainerType]:
    """Returns the lists above leaves, by escaped path, outer ones first."""
    found: dict[str, ContainerType] = {}
    for path in paths:
        for length in range(1, len(path)):
            if type(path[length]) is int:
                found.setdefault(join(*path[:length]), "list")
    return dict(sorted(found.items()))


class Catalog:
    """The leaves of a snapshot by fqn, as one rank sees them.

    Args:
        mark: None for a snapshot of other calls.

    Attributes:
        paths: Escaped, by fqn.

    Raises:
        UsageError: Two leaves have one fqn.
    """

    def __init__(self, index: Index, mark: DcpMark | None) -> None:
        self.index = index
        self.paths: dict[str, str] = {}
        self._mark = mark
        self._by_path = {entry.path: entry for entry in index.entries}
        self._types = {e.path: e.type for e in index.entries if isinstance(e, ContainerEntry)}
        self._descended = self._find_descended()
        self._leaves: dict[str, str | None] = {"": None}
        self._members: dict[str, list[AnyEntry]] = {}
        self._object_paths: dict[str, ObjectPath] = {}
        for entry in index.entries:
            at = parent_of(entry.path)
            if isinstance(entry, ContainerEntry):
                leaf = self._leaf_at(at)
                if leaf is None:
                    continue
            else:
                leaf = self._leaf_at(at.rpartition("/")[0]) or at
            self._members.setdefault(leaf, []).append(entry)
        for leaf in self._members:
            keys = self._keys(leaf)
            fqn = ".".join(map(str, keys))
            if self.paths.setdefault(fqn, leaf) != leaf:
                raise UsageError(
                    f"{self.paths[fqn]!r} and {leaf!r} of the snapshot have one name in "
                    f"torch.distributed.checkpoint, {fqn!r}: use Snapshot.restore"
                )
            self._object_paths[fqn] = keys

    def metadata(self, storage_meta: StorageMeta | None = None) -> Metadata:
        """Returns the leaves for DCP's planners."""
        listed: dict[str, Any] = {}
        for fqn, path in self.paths.items():
            entry = self._by_path.get(path)
            listed[fqn] = (
                _tensor_metadata(self, entry) if is_dense(entry) else BytesStorageMetadata()
            )
        return Metadata(
            state_dict_metadata=listed,
            planner_data=dict(self._object_paths),
            storage_data={},
            storage_meta=storage_meta,
        )

    def entry(self, path: str) -> AnyEntry | None:
        """Returns None for a container that has no entry."""
        return self._by_path.get(path)

    def entries_of(self, path: str) -> list[AnyEntry]:
        """Returns the entries of a leaf, in order, and those that views refer to."""
        found = self._members[path]
        own = {entry.path for entry in found}
        bases = {entry.of for entry in found if isinstance(entry, ViewEntry)} - own
        return found + [self._by_path[base] for base in sorted(bases)]

    def shards_of(self, entry: DenseEntry) -> Shards | None:
        """Returns the stored boxes; None for a view with another layout than its base."""
        if isinstance(entry, ShardedEntry):
            return entry.shards
        if isinstance(entry, TensorEntry):
            return Shards.of([Shard(Box.whole(entry.shape), entry.data)])
        base = self._by_path.get(entry.of)
        if (
            isinstance(base, TensorEntry)
            and base.dtype == entry.dtype
            and base.shape == entry.shape
            and entry.offset == 0
            and entry.strides == c_strides(entry.shape)
        ):
            return Shards.of([Shard(Box.whole(base.shape), base.data)])
        return None

    def _find_descended(self) -> set[str]:
        """Returns the lists that DCP descends into."""
        found: set[str] = set()

        def descend(child: str) -> None:
            parent = child.rpartition("/")[0]
            if self._types.get(parent) == "list" and parent not in found:
                found.add(parent)
                descend(parent)

        seen: set[str] = set()
        for entry in self.index.entries:
            at = entry.path
            if "@" in at:
                continue
            if is_dense(entry) or isinstance(entry, CompositeEntry):
                descend(at)
            if not isinstance(entry, ContainerEntry):
                at = at.rpartition("/")[0]
            while at and at not in seen:
                seen.add(at)
                if self._types.get(at) not in ("list", *_LEAVES):  # a dict
                    descend(at)
                at = at.rpartition("/")[0]
        return found

    def _leaf_at(self, path: str) -> str | None:
        """Returns the outermost container, down to ``path``, that is a leaf for DCP."""
        if path not in self._leaves:
            parent = path.rpartition("/")[0]
            kind = self._types.get(path)
            is_leaf = kind in _LEAVES or (kind == "list" and path not in self._descended)
            if self._mark is not None and not self._mark.flat:
                is_leaf = parent == self._mark.key
            above = self._leaf_at(parent)
            self._leaves[path] = above or (path if is_leaf else None)
        return self._leaves[path]

    def _keys(self, path: str) -> ObjectPath:
        keys: list[str | int] = []
        parent = ""
        for token in path.split("/"):
            key = unescape(token)
            is_item = self._types.get(parent) == "list"
            keys.append(key if is_item and isinstance(key, int) else str(key))
            parent = f"{parent}/{token}" if parent else token
        return tuple(keys) if self._mark is None else self._mark.keys_of(keys)


def is_dense(entry: AnyEntry | None) -> TypeGuard[DenseEntry]:
    """Whether the entry is a dense tensor, and no array."""
    if isinstance(entry, TensorEntry | ViewEntry | ShardedEntry):
        return entry.type not in NUMPY_KINDS
    return False


def _tensor_metadata(catalog: Catalog, entry: DenseEntry) -> TensorStorageMetadata:
    shards = catalog.shards_of(entry)
    boxes = (Box.whole(entry.shape),) if shards is None else shards.cut.boxes
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[entry.dtype], requires_grad=entry.requires_grad),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in sorted(boxes, key=lambda box: box.offsets)
        ],
    )
