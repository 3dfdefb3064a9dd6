"""One rank's view of a snapshot, merged from the manifests of all ranks (``docs/format.md``).

All ranks may read shards (joined by path), ``replicated`` entries and everything in a snapshot of
one rank. Other leaves are private: rank k gets those that rank k saved. A rank outside the saved
world gets rank 0's containers and the private leaves that all ranks saved with equal content, so
that no step counter is lost when the world grows. Must not know restore targets or how bytes are
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import msgspec

from actorsnap.errors import FormatError
from actorsnap.format.checksum import combine, combine_blocks
from actorsnap.format.geometry import Box
from actorsnap.format.layout import shard_name
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    Entry,
    MemoryFormat,
    ObjectRecord,
    RankManifest,
    Stored,
    TensorEntry,
    TensorType,
    ViewEntry,
    is_same_tensor,
)


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A stored box of a tensor.

    ``is_disputed``: others stored other elements; it may fill only an equal box.
    """

    box: Box
    data: Stored
    is_disputed: bool = False


class ShardedEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tensor stored as boxes, never in a manifest; see ``TensorEntry``.

    Attributes:
        shape: The whole tensor's.
        shards: Unordered; each box once. They need not cover the tensor.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    type: TensorType
    requires_grad: bool
    shards: tuple[Shard, ...]
    memory_format: MemoryFormat | None = None
    attributes: dict[str, Any] | None = None


AnyEntry: TypeAlias = Entry | ShardedEntry


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a snapshot that one rank may read.

    Attributes:
        world_size: Number of ranks that saved.
        entries: In traversal order.
        held_by_other_ranks: Paths of others' private leaves, with those ranks.
        optimizers: See ``RankManifest``; the rank's own values win, then the lowest rank's.
    """

    attempt: str
    world_size: int
    objects: tuple[ObjectRecord, ...]
    entries: tuple[AnyEntry, ...]
    held_by_other_ranks: Mapping[str, tuple[int, ...]]
    optimizers: Mapping[str, str] = {}


def index_of(manifests: Mapping[int, RankManifest], *, rank: int) -> Index:
    """Returns the view of one rank, which need not have saved.

    Raises:
        FormatError: Shards of one path belong to different tensors.
    """
    first = manifests[0]
    if len(manifests) == 1 and not any(map(_is_shard, first.entries)):
        return Index(
            attempt=first.attempt,
            world_size=1,
            objects=first.objects,
            entries=first.entries,
            held_by_other_ranks={},
            optimizers=first.optimizers or {},
        )
    return _Merger(manifests, rank).index()


def named_entries(manifest: RankManifest) -> dict[str, Entry]:
    """Returns the entries by path; ``<path>@<offsets>`` for shards that share one."""
    by_path = {entry.path: entry for entry in manifest.entries}
    if len(by_path) == len(manifest.entries):
        return by_path
    times = Counter(entry.path for entry in manifest.entries)
    return {
        shard_name(entry.path, entry.offsets)
        if times[entry.path] > 1 and isinstance(entry, TensorEntry) and entry.offsets is not None
        else entry.path: entry
        for entry in manifest.entries
    }


def named_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _one_cover(stored: Mapping[Box, Stored], shape: tuple[int, ...]) -> list[Box] | None:
    """Returns boxes that tile the tensor, or None if no tiling is certain.

    All tilings must hold the same bytes: checksums can be compared if the boxes are runs of rows.
    """
    row_volume = prod(shape[1:])
    ways: dict[int, tuple[int, list[Box]]] = {0: (0, [])}
    starts = {box.offsets[0] for box in stored} | {shape[0]}
    for box in sorted(stored, key=lambda box: box.offsets[0]):
        start, stop = box.offsets[0], box.stops[0]
        if box.volume != (stop - start) * row_volume or start not in ways or stop not in starts:
            return None
        data = stored[box]
        nbytes = data.stop - data.start
        before, boxes = ways[start]
        whole = combine(before, combine_blocks(data.crc32c, nbytes), nbytes)
        if ways.setdefault(stop, (whole, [*boxes, box]))[0] != whole:
            return None
    return ways[shape[0]][1]


def _is_shard(entry: AnyEntry) -> bool:
    return type(entry) is TensorEntry and entry.offsets is not None


class _Merger:
    def __init__(self, manifests: Mapping[int, RankManifest], rank: int) -> None:
        self._manifests = manifests
        self._own = manifests.get(rank)
        # Rank 0's for a rank that did not save.
        self._template = manifests[0] if self._own is None else self._own
        others = [each for each in manifests.values() if each is not self._template]
        self._in_order = [self._template, *others]
        self._records = list(self._template.objects)
        self._numbers = {record.part: number for number, record in enumerate(self._records)}
        own_entries = () if self._own is None else self._own.entries
        self._entries: dict[str, AnyEntry] = {entry.path: entry for entry in own_entries}
        self._own_paths = frozenset(self._entries)
        # By path: the holders of a private leaf.
        self._private: dict[str, list[int]] = {}

    def index(self) -> Index:
        self._take_readable()
        if self._own is None:
            self._take_alike()
        self._drop_broken_lists()
        self._add_containers()
        optimizers: dict[str, str] = {}
        for manifest in self._in_order:
            optimizers = (manifest.optimizers or {}) | optimizers
        return Index(
            attempt=self._template.attempt,
            world_size=len(self._manifests),
            objects=tuple(self._records),
            entries=tuple([self._entries[path] for path in self._order()]),
            held_by_other_ranks={
                path: tuple(sorted(ranks))
                for path, ranks in self._private.items()
                if path not in self._entries
            },
            optimizers=optimizers,
        )

    def _take_readable(self) -> None:
        shards: dict[str, list[tuple[RankManifest, TensorEntry]]] = {}
        is_alone = len(self._in_order) == 1
        for manifest in self._in_order:
            for entry in manifest.entries:
                path = entry.path
                if isinstance(entry, TensorEntry) and entry.offsets is not None:
                    shards.setdefault(path, []).append((manifest, entry))
                elif isinstance(entry, ContainerEntry):
                    continue
                elif entry.replicated or is_alone:
                    if path not in self._entries:
                        self._entries[path] = self._renumber_entry(entry, manifest)
                elif "@" not in path:
                    self._private.setdefault(path, []).append(manifest.rank)
        for path, held in shards.items():
            own = self._entries.get(path)
            if own is None or _is_shard(own):
                self._entries[path] = self._join(path, held)

    def _join(self, path: str, held: Sequence[tuple[RankManifest, TensorEntry]]) -> ShardedEntry:
        """Joins the shards of a path; the rank's own shards come first.

        A box that ranks stored with different values is disputed: tensors of several meshes have
        this path. All boxes are if meshes cut the path differently and checksums cannot prove that
        it is one tensor. A rank gets only its own disputed boxes.
        """
        _, first = held[0]
        assert first.global_shape is not None
        boxes: dict[Box, tuple[RankManifest, TensorEntry]] = {}
        disputed: set[Box] = set()
        for manifest, entry in held:
            if not is_same_tensor(first, entry):
                raise FormatError(
                    key=path,
                    detail=f"ranks {held[0][0].rank} and {manifest.rank} have shards of "
                    "different tensors under this path",
                )
            assert entry.offsets is not None
            box = Box(entry.offsets, entry.shape)
            _, other = boxes.setdefault(box, (manifest, entry))
            if other.data.crc32c != entry.data.crc32c:
                disputed.add(box)
        if sum([box.volume for box in boxes]) > prod(first.global_shape):
            stored = {box: entry.data for box, (_, entry) in boxes.items()}
            cover = None if disputed else _one_cover(stored, first.global_shape)
            if cover is None:
                disputed.update(boxes)
            else:
                boxes = {box: boxes[box] for box in cover}
        return ShardedEntry(
            path=path,
            dtype=first.dtype,
            shape=first.global_shape,
            type=first.type,
            requires_grad=first.requires_grad,
            memory_format=first.memory_format,
            attributes=first.attributes,
            shards=tuple(
                [
                    Shard(box, self._renumber(entry.data, manifest), box in disputed)
                    for box, (manifest, entry) in boxes.items()
                    if box not in disputed or manifest is self._own
                ]
            ),
        )

    def _take_alike(self) -> None:
        count = len(self._manifests)
        candidates = [
            path
            for path, ranks in self._private.items()
            if len(ranks) == count and path not in self._entries
        ]
        if not candidates:
            return
        by_path = [
            {entry.path: entry for entry in manifest.entries}
            for manifest in self._manifests.values()
        ]
        for path in candidates:
            contents = (_content(path, entries) for entries in by_path)
            first = next(contents)
            if all(content == first for content in contents):
                for entry in _closure(path, by_path[0]):
                    self._entries.setdefault(entry.path, entry)

    def _drop_broken_lists(self) -> None:
        """Drops others' lists that lack an item: later items would move up."""
        lists = {
            entry.path
            for manifest in self._in_order
            for entry in manifest.entries
            if isinstance(entry, ContainerEntry)
            and entry.type in ("list", "tuple")
            and entry.path not in self._own_paths
        }
        if not lists:
            return
        lacking = [path for path in self._private if path not in self._entries]
        broken = {parent for path in lacking for parent in _ancestors(path) if parent in lists}
        if not broken:
            return
        for path in list(self._entries):
            if not broken.isdisjoint(_ancestors(path.partition("@")[0])):
                del self._entries[path]
                if "@" not in path:
                    self._private.setdefault(path, list(self._manifests))

    def _add_containers(self) -> None:
        """Adds the containers; for a rank that did not save, also empty ones."""
        needed = {parent for path in self._entries for parent in _ancestors(path)}
        if self._own is None:
            entries = self._template.entries
            filled = {parent for entry in entries for parent in _ancestors(entry.path)}
            needed.update(entry.path for entry in entries if entry.path not in filled)
        for manifest in self._in_order:
            for entry in manifest.entries:
                if isinstance(entry, ContainerEntry) and entry.path in needed:
                    self._entries.setdefault(entry.path, entry)

    def _renumber(self, data: Stored, manifest: RankManifest) -> Stored:
        if manifest is self._template:
            return data
        record = manifest.objects[data.object]
        number = self._numbers.get(record.part)
        if number is None:
            number = self._numbers[record.part] = len(self._records)
            self._records.append(record)
        return Stored(number, data.start, data.stop, data.crc32c)

    def _renumber_entry(self, entry: Entry, manifest: RankManifest) -> Entry:
        if manifest is self._template or not isinstance(entry, TensorEntry | BytesEntry):
            return entry
        return msgspec.structs.replace(entry, data=self._renumber(entry.data, manifest))

    def _order(self) -> list[str]:
        """Returns the paths in an order that agrees with every rank's as far as possible.

        Ranks that divide a state store rising parts of it: a rank's paths follow those of lower
        ranks, but precede paths that follow them on both. The rank's own paths keep their order.
        """
        following: dict[str | None, str | None] = {None: None}
        before: dict[str | None, str | None] = {None: None}
        for manifest in self._manifests.values():
            paths = dict.fromkeys(e.path for e in manifest.entries if e.path in self._entries)
            anchor: str | None = None
            for path in reversed(paths):
                if path not in following:
                    last = before[anchor]
                    following[last], following[path] = path, anchor
                    before[anchor], before[path] = path, last
                anchor = path
        order: list[str] = []
        at = following[None]
        while at is not None:
            order.append(at)
            at = following[at]
        if self._own is not None:
            own = iter(dict.fromkeys(entry.path for entry in self._own.entries))
            order = [next(own) if path in self._own_paths else path for path in order]
        return order


def _ancestors(path: str) -> Iterator[str]:
    at = path.rfind("/")
    while at > 0:
        yield path[:at]
        at = path.rfind("/", 0, at)


def _closure(path: str, entries: Mapping[str, Entry]) -> list[Entry]:
    closure: list[Entry] = []
    pending = [path]
    while pending:
        entry = entries[pending.pop()]
        closure.append(entry)
        if isinstance(entry, ViewEntry):
            pending.append(entry.of)
        elif isinstance(entry, CompositeEntry):
            pending.extend(f"{entry.path}@{part}" for part in entry.parts)
    return closure


def _content(path: str, entries: Mapping[str, Entry]) -> list[Any]:
    """Returns equal values for equal leaves (and, but for CRC32C, only for those)."""
    return [
        # Without the place in the storage.
        msgspec.structs.replace(
            entry, data=Stored(0, 0, entry.data.stop - entry.data.start, entry.data.crc32c)
        )
        if isinstance(entry, TensorEntry | BytesEntry)
        else entry
        for entry in _closure(path, entries)
    ]
