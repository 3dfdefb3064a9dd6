# SPDX-License-Identifier: Apache-2.0
"""Shows the entries of a snapshot as torchsnapshot does, whichever of the two wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from actorsnap.format.manifest import ContainerEntry, Entry, RankManifest, TensorEntry, ValueEntry
from actorsnap.interop.formats.torchsnapshot_records import (
    DictRecord,
    ListRecord,
    Metadata,
    OrderedDictRecord,
    PickleRecord,
    Record,
    ShardedRecord,
    ShardRecord,
    TensorRecord,
    value_record,
)
from actorsnap.planning.index import ancestors
from actorsnap.state.objects import decode_inline
from actorsnap.state.tree import Key, unescape

VERSION = "0.1.0"
"""Version that all releases of torchsnapshot write."""

_ELSEWHERE = "actorsnap"
"""Serializer of leaves that are in no form of torchsnapshot's."""

_TENSORS = frozenset({"tensor", "parameter", "buffer"})


class Named(msgspec.Struct, frozen=True):
    """The entries of a snapshot.

    Attributes:
        metadata: As torchsnapshot shows it: replicated leaves are among those of rank 0.
        paths: Ours by torchsnapshot's, of leaves and containers, without a rank.
    """

    metadata: Metadata
    paths: dict[str, str]


def name_entries(manifests: Iterable[RankManifest]) -> Named:
    """Returns the entries of all ranks, whose manifests are given in their order."""
    given = list(manifests)
    ranks = [_Rank() for _ in given]
    for manifest in given:
        keys = [record.key for record in manifest.objects]
        for entry in manifest.entries:
            if "@" not in entry.path:  # else a part of another
                is_replicated = getattr(entry, "replicated", False)
                ranks[0 if is_replicated else manifest.rank].add(entry, keys)
    records: dict[str, Record] = {}
    paths: dict[str, str] = {}
    for number, rank in enumerate(ranks):
        for name, path, record in rank.named():
            records[f"{number}/{name}"] = record
            paths.setdefault(name, path)
    return Named(Metadata(world_size=len(ranks), manifest=records, version=VERSION), paths)


@dataclass
class _Rank:
    """The tree of what one rank shows.

    Attributes:
        leaves: Entries by path, each with the keys of its manifest's objects. Shards share a path.
        containers: By path; None if a plain dict has no entry.
        children: Paths by that of their parent, in order.
    """

    leaves: dict[str, list[tuple[Entry, Sequence[str]]]] = field(default_factory=dict)
    containers: dict[str, ContainerEntry | None] = field(default_factory=dict)
    children: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, entry: Entry, keys: Sequence[str]) -> None:
        below = entry.path
        for above in ancestors(entry.path):
            self.containers.setdefault(above, None)
            self.children.setdefault(above, {})[below] = None
            below = above
        self.children.setdefault("", {})[below] = None
        if isinstance(entry, ContainerEntry):
            self.containers[entry.path] = entry
        else:
            self.leaves.setdefault(entry.path, []).append((entry, keys))

    def named(self) -> Iterator[tuple[str, str, Record]]:
        """Yields torchsnapshot's path, ours, and the record of each entry."""
        left = [("", path) for path in reversed(self.children.get("", {}))]
        while left:
            parent, path = left.pop()
            name = f"{parent}{_token(_key(path))}"
            below = list(self.children.get(path, {}))
            if path in self.leaves:
                yield name, path, _leaf_record(self.leaves[path])
                continue
            record = self._container_record(path, below)
            yield name, path, record
            if not isinstance(record, PickleRecord):
                left += [(f"{name}/", child) for child in reversed(below)]

    def _container_record(self, path: str, below: Sequence[str]) -> Record:
        entry = self.containers[path]
        kind = "dict" if entry is None else entry.type
        if kind == "list":
            return ListRecord()
        keys = [_key(child) for child in below]
        names = [key for key in keys if isinstance(key, str | int)]
        if kind not in ("dict", "ordered_dict") or len(set(map(str, names))) < len(keys):
            return PickleRecord(location="", serializer=_ELSEWHERE, obj_type=f"builtins.{kind}")
        return (DictRecord if kind == "dict" else OrderedDictRecord)(keys=tuple(names))


def _key(path: str) -> Key:
    return unescape(path.rpartition("/")[2])


def _token(key: Key) -> str:
    return str(key).replace("%", "%25").replace("/", "%2F")


def _leaf_record(found: Sequence[tuple[Entry, Sequence[str]]]) -> Record:
    entry, keys = found[0]
    replicated = bool(getattr(entry, "replicated", False))
    if isinstance(entry, TensorEntry) and entry.type in _TENSORS:
        if entry.offsets is None:
            return _tensor_record(entry, keys)
        return ShardedRecord(
            tuple(
                [
                    ShardRecord(shard.offsets, shard.shape, _tensor_record(shard, keys))
                    for shard, keys in found
                    if isinstance(shard, TensorEntry) and shard.offsets is not None
                ]
            )
        )
    if isinstance(entry, ValueEntry):
        value = decode_inline(entry.value, entry.path)
        record = value_record(value, replicated=replicated)
        if record is not None:
            return record
        kind = f"{type(value).__module__}.{type(value).__name__}"
    else:
        kind = str(getattr(entry, "type", "object"))
    return PickleRecord(location="", serializer=_ELSEWHERE, obj_type=kind, replicated=replicated)


def _tensor_record(entry: TensorEntry, keys: Sequence[str]) -> TensorRecord:
    data = entry.data
    return TensorRecord(
        location=keys[data.object],
        serializer="buffer_protocol",
        dtype=f"torch.{entry.dtype}",
        shape=entry.shape,
        replicated=entry.replicated,
        byte_range=(data.start, data.stop),
    )
