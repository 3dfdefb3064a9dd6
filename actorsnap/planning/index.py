# SPDX-License-Identifier: Apache-2.0
"""One rank's view of a snapshot, merged from the manifests of all ranks (``docs/format.md``).

All ranks may read shards (joined by path), ``replicated`` entries and everything in a snapshot of
one rank. Other leaves are private: rank k gets those that rank k saved. A rank outside the saved
world gets rank 0's containers and the private leaves that all ranks saved with equal content, so
that no step counter is lost when the world grows. Must not know restore targets or how bytes are
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeAlias

import msgspec

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
)
from actorsnap.planning.shards import Shards, ShardTable

_WHOLE = frozenset({"list", "tuple", "deque", "record"})
"""Types of containers that no rank reads without some of their items."""


class ShardedEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tensor stored as boxes, never in a manifest; see ``TensorEntry``.

    Attributes:
        shape: The whole tensor's.
        shards: Unordered. They need not cover the tensor.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    type: TensorType
    requires_grad: bool
    shards: Shards
    memory_format: MemoryFormat | None = None
    attributes: dict[str, Any] | None = None


class Elsewhere(msgspec.Struct, frozen=True, gc=False):
    """A leaf that any rank may read, and this one does not want. No manifest has such entries."""

    path: str


AnyEntry: TypeAlias = Entry | ShardedEntry | Elsewhere


class Wants(msgspec.Struct, frozen=True):
    """The leaves of a snapshot that a rank wants.

    Attributes:
        names: Whether it wants the leaf, or the part of a leaf, with this path. Bases of wanted
            views may be unknown before.
        boxes: Of distributed tensors, by path: what it wants of them. Of others it wants all.
    """

    names: Callable[[str], bool]
    boxes: Mapping[str, tuple[Box, ...]]

    def more(self, paths: Collection[str]) -> Wants:
        """Returns these wants, and all of some more leaves."""
        names = self.names
        boxes = {path: boxes for path, boxes in self.boxes.items() if path not in paths}
        return Wants(lambda path: path in paths or names(path), boxes)

    def has_shard(self, entry: TensorEntry) -> bool:
        assert entry.offsets is not None
        return self.has_part(entry.path, entry.offsets, entry.shape)

    def has_part(self, path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """Whether the box has wanted elements, or is an empty tensor's."""
        wanted = self.boxes.get(path)
        if wanted is None or 0 in sizes:
            return True
        for box in wanted:
            if 0 in box.sizes:
                continue
            if len(box.offsets) != len(offsets):
                return True
            for a, n, b, m in zip(offsets, sizes, box.offsets, box.sizes, strict=True):
                if a + n <= b or b + m <= a:
                    break
            else:
                return True
        return False


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
    held_by_other_ranks: Mapping[str, Sequence[int]]
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
    own = manifests.get(rank)
    template = first if own is None else own
    builder = IndexBuilder(template, is_own=own is not None, world_size=len(manifests))
    for manifest in manifests.values():
        builder.add(manifest)
    return builder.index()


def contents_of(manifest: RankManifest, paths: Iterable[str]) -> bytes:
    """Returns 8 bytes per private leaf, equal for equal leaves."""
    by_path = {entry.path: entry for entry in manifest.entries}
    contents = [
        blake2b(msgspec.msgpack.encode(_content(path, by_path)), digest_size=8).digest()
        for path in paths
    ]
    return b"".join(contents)


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


def _is_shard(entry: AnyEntry) -> bool:
    return type(entry) is TensorEntry and entry.offsets is not None


class IndexBuilder:
    """Joins the entries of rank manifests, which need not be in memory together.

    Holds what the rank wants, and one of each container. The template's manifest is the rank's own;
    rank 0's for a rank that did not save.

    Args:
        template: Template of all manifests, the only one that is given twice: here, and to ``add``.
        is_own: Whether the template is the rank's own.
        wants: Other leaves get no entries, or ``Elsewhere``. None: all of them.
        private: Holders of private leaves, if not all manifests are added.
    """

    def __init__(
        self,
        template: RankManifest,
        *,
        is_own: bool,
        world_size: int,
        wants: Wants | None = None,
        private: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._template = template
        self._world_size = world_size
        self._is_own = is_own
        self._wants = wants
        self._records = list(template.objects)
        self._numbers = {record.part: number for number, record in enumerate(self._records)}
        self._entries: dict[str, AnyEntry] = {}
        self._shards = ShardTable()
        self._elsewhere: dict[str, None] = {}
        self._known_private = private
        # By path: the holders of a private leaf, as runs.
        self._private: dict[str, list[range]] = {}
        self._containers: dict[str, ContainerEntry] = {}
        self._optimizers = dict(template.optimizers or {})
        self._order = _Order()
        if is_own:
            self._entries = {entry.path: entry for entry in template.entries}
        self._template_paths = frozenset([entry.path for entry in template.entries])
        self._own_paths = self._template_paths if is_own else frozenset()
        # Of a rank that did not save: rank 0's private leaves that all have so far.
        self._alike: dict[str, list[Any]] = {}
        self._template_by_path: dict[str, Entry] = {}
        if not is_own:
            self._template_by_path = {entry.path: entry for entry in template.entries}
        self._take(template)

    def add(self, manifest: RankManifest) -> None:
        """Adds a manifest, or those of its entries that the rank wants. In rank order.

        Raises:
            FormatError: Shards of one path belong to different tensors; or from ``index``.
        """
        if manifest is not self._template:
            self._take(manifest)
            self._optimizers = (manifest.optimizers or {}) | self._optimizers
        if self._known_private is None:
            self._count_private(manifest)
        own = self._template_paths
        self._order.add([e.path for e in manifest.entries if e.path in own or self._is_ordered(e)])

    def overlapping(self) -> set[str]:
        """Returns paths of which several boxes have the same wanted elements.

        What they are depends on all boxes: the builder of these must want the whole.
        """
        if self._wants is None:
            return set()
        boxes = self._wants.boxes
        return {path for path in boxes if path in self._shards.firsts and self._overlaps(path)}

    def bases(self) -> set[str]:
        """Returns the tensors that views refer to, as far as they are not there."""
        views = [entry for entry in self._entries.values() if isinstance(entry, ViewEntry)]
        return {view.of for view in views if view.of not in self._entries}

    def index(self, *, alike: Iterable[str] | None = None, others: Iterable[str] = ()) -> Index:
        """Returns the view of the rank; the builder is of no use any more.

        Args:
            alike: The private leaves that all ranks saved with equal content. None: they were
                found among all manifests.
            others: Paths that all ranks may read; those without an entry are ``Elsewhere``.

        Raises:
            FormatError: Shards of one path belong to different tensors.
        """
        for path, shards in self._shards.joined().items():
            own = self._entries.get(path)
            if own is None or _is_shard(own):
                self._entries[path] = self._sharded(path, shards)
        for path in self._own_paths & self._elsewhere.keys():
            if _is_shard(self._entries[path]):
                self._entries[path] = Elsewhere(path)
        if not self._is_own:
            for path in self._alike if alike is None else alike:
                if path in self._template_by_path and path not in self._entries:
                    for entry in _closure(path, self._template_by_path):
                        self._entries.setdefault(entry.path, entry)
        self._drop_broken_lists()
        self._elsewhere.update(dict.fromkeys(others))
        self._add_containers()
        entries = [self._entries[path] for path in self._paths_in_order()]
        entries += [Elsewhere(path) for path in self._elsewhere if path not in self._entries]
        return Index(
            attempt=self._template.attempt,
            world_size=self._world_size,
            objects=tuple(self._records),
            entries=tuple(entries),
            held_by_other_ranks=self._held_by_other_ranks(),
            optimizers=self._optimizers,
        )

    def _take(self, manifest: RankManifest) -> None:
        """Takes what all may read."""
        objects = manifest.objects
        is_template = manifest is self._template
        # Of its objects in the index, as far as known.
        numbers: list[int | None] = [None] * len(objects)
        if is_template:
            numbers = list(range(len(objects)))
        is_alone = self._world_size == 1
        wants, found = self._wants, self._entries

        def number_of(at: int) -> int:
            number = numbers[at]
            if number is None:
                record = objects[at]
                number = self._numbers.get(record.part)
                if number is None:
                    number = self._numbers[record.part] = len(self._records)
                    self._records.append(record)
                numbers[at] = number
            return number

        shards: list[TensorEntry] = []
        for entry in manifest.entries:
            if type(entry) is TensorEntry and entry.offsets is not None:
                shards.append(entry)
                continue
            path = entry.path
            if isinstance(entry, ContainerEntry):
                self._containers.setdefault(path, entry)
            elif not (entry.replicated or is_alone) or path in found:
                continue
            elif wants is not None and not wants.names(path):
                self._elsewhere[path] = None
            elif isinstance(entry, TensorEntry | BytesEntry):
                data = entry.data
                moved = Stored(number_of(data.object), data.start, data.stop, data.crc32c)
                found[path] = msgspec.structs.replace(entry, data=moved)
            else:
                found[path] = entry
        is_wanted: Callable[[TensorEntry], bool] | None = None
        if wants is not None:
            named = [entry for entry in shards if wants.names(entry.path)]
            if len(named) < len(shards):
                unnamed = dict.fromkeys([entry.path for entry in shards])
                self._elsewhere.update([(p, None) for p in unnamed if not wants.names(p)])
            shards = named
            if wants.boxes:
                is_wanted = wants.has_shard
        self._shards.add(
            manifest.rank,
            shards,
            [number_of(at) for at in range(len(objects))] if shards else (),
            is_own=is_template and self._is_own,
            is_wanted=is_wanted,
        )

    def _sharded(self, path: str, shards: Shards) -> ShardedEntry:
        _, first = self._shards.firsts[path]
        return ShardedEntry(
            path=path,
            dtype=first.dtype,
            shape=self._shards.shape(path),
            type=first.type,
            requires_grad=first.requires_grad,
            memory_format=first.memory_format,
            attributes=first.attributes,
            shards=shards,
        )

    def _is_ordered(self, entry: Entry) -> bool:
        return isinstance(entry, ContainerEntry) or entry.replicated or _is_shard(entry)

    def _count_private(self, manifest: RankManifest) -> None:
        rank = manifest.rank
        private = [
            entry.path
            for entry in manifest.entries
            if not isinstance(entry, ContainerEntry)
            and not entry.replicated
            and "@" not in entry.path
            and not _is_shard(entry)
        ]
        for path in private:
            runs = self._private.setdefault(path, [])
            if runs and runs[-1].stop == rank:
                runs[-1] = range(runs[-1].start, rank + 1)
            else:
                runs.append(range(rank, rank + 1))
        if self._is_own:
            return
        if manifest is self._template:
            by_path = self._template_by_path
            self._alike = {path: _content(path, by_path) for path in private}
            return
        by_path = {entry.path: entry for entry in manifest.entries} if self._alike else {}
        self._alike = {
            path: content
            for path, content in self._alike.items()
            if path in by_path and _content(path, by_path) == content
        }

    def _overlaps(self, path: str) -> bool:
        assert self._wants is not None
        boxes, ndim = self._shards.boxes(path), len(self._shards.shape(path))
        for wanted in self._wants.boxes[path]:
            if wanted.ndim != ndim:
                continue
            shared = [wanted.intersect(box) for box in boxes]
            if sum([box.volume for box in shared if box is not None]) > wanted.volume:
                return True
        return False

    def _drop_broken_lists(self) -> None:
        """Drops others' lists that lack an item: later items would move up. And records."""
        lists = {
            path
            for path, entry in self._containers.items()
            if entry.type in _WHOLE and path not in self._own_paths
        }
        if not lists:
            return
        private = self._private if self._known_private is None else self._known_private
        lacking = [path for path in private if path not in self._entries]
        broken = {parent for path in lacking for parent in ancestors(path) if parent in lists}
        if not broken:
            return
        for path in list(self._entries):
            if not broken.isdisjoint(ancestors(path.partition("@")[0])):
                del self._entries[path]
                if "@" not in path:
                    self._private.setdefault(path, [range(self._world_size)])

    def _add_containers(self) -> None:
        """Adds the containers; for a rank that did not save, also empty ones."""
        needed = {
            parent for path in chain(self._entries, self._elsewhere) for parent in ancestors(path)
        }
        if not self._is_own:
            entries = self._template.entries
            filled = {parent for entry in entries for parent in ancestors(entry.path)}
            for entry in entries:
                if isinstance(entry, ContainerEntry) and entry.path not in filled:
                    needed.update([entry.path, *ancestors(entry.path)])
        for path, entry in self._containers.items():
            if path in needed:
                self._entries.setdefault(path, entry)

    def _held_by_other_ranks(self) -> dict[str, Sequence[int]]:
        held: dict[str, Sequence[int]] = {
            path: ranks
            for path, ranks in (self._known_private or {}).items()
            if path not in self._entries
        }
        # Paths share the ranks.
        alike: dict[tuple[range, ...], tuple[int, ...]] = {}
        for path, runs in self._private.items():
            if path not in self._entries:
                key = tuple(runs)
                if key not in alike:
                    alike[key] = tuple(chain.from_iterable(runs))
                held[path] = alike[key]
        return held

    def _paths_in_order(self) -> list[str]:
        order = [path for path in self._order.paths() if path in self._entries]
        if self._is_own:
            own = iter(dict.fromkeys(entry.path for entry in self._template.entries))
            order = [next(own) if path in self._own_paths else path for path in order]
        return self._parents_first(order)

    def _parents_first(self, paths: Iterable[str]) -> list[str]:
        """Moves containers before what is in them: partial manifests need not have them."""
        found: dict[str, None] = {}
        last = ""
        for path in paths:
            parent = path[: max(path.rfind("/"), 0)]
            if parent != last:
                above = [each for each in ancestors(path) if each in self._entries]
                found.update(dict.fromkeys(reversed(above)))
                last = parent
            found[path] = None
        return list(found)


class _Order:
    """An order of paths that agrees with every rank's as far as possible.

    Ranks that divide a state store rising parts of it: a rank's paths follow those of lower ranks,
    but precede paths that follow them on both. The rank's own paths keep their order.
    """

    def __init__(self) -> None:
        self._following: dict[str | None, str | None] = {None: None}
        self._before: dict[str | None, str | None] = {None: None}
        self._last: list[str] = []

    def add(self, paths: list[str]) -> None:
        """Adds a rank's; ranks rise."""
        if paths == self._last:
            return
        self._last = paths
        following, before = self._following, self._before
        anchor: str | None = None
        for path in reversed(dict.fromkeys(paths)):
            if path not in following:
                last = before[anchor]
                following[last], following[path] = path, anchor
                before[anchor], before[path] = path, last
            anchor = path

    def paths(self) -> Iterator[str]:
        at = self._following[None]
        while at is not None:
            yield at
            at = self._following[at]


def ancestors(path: str) -> Iterator[str]:
    """Yields the paths above a path, the nearest first."""
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
    return [_content_of(entry) for entry in _closure(path, entries)]


def _content_of(entry: Entry) -> object:
    if not isinstance(entry, TensorEntry | BytesEntry):
        return entry
    data = entry.data
    nbytes = data.stop - data.start
    if nbytes and not data.crc32c:
        return object()  # nothing proves it equal to any other
    # Without the place in the storage.
    return msgspec.structs.replace(entry, data=Stored(0, 0, nbytes, data.crc32c))
