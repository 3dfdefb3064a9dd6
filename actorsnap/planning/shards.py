# SPDX-License-Identifier: Apache-2.0
"""The stored boxes of tensors, as columns of numbers.

One process that restores what a thousand ranks saved has a million of them: an object for each
would take 700 bytes. They become objects when they are looked at. Tensors that are cut alike share
their boxes, so that a read of one is planned for all.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from math import prod
from operator import le
from typing import Any, TypeAlias, overload

import msgspec
import numpy as np

from actorsnap.errors import FormatError
from actorsnap.format.checksum import block_bytes_of, combine, combine_blocks
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import Stored, TensorEntry, is_same_tensor


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A stored box of a tensor.

    ``is_disputed``: others stored other elements; it may fill only an equal box.
    """

    box: Box
    data: Stored
    is_disputed: bool = False


class TensorCut:
    """The boxes of a tensor, in the order of its shards. Equal only to itself."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        self.boxes = tuple(boxes)

    @cached_property
    def volumes(self) -> list[int]:
        return [box.volume for box in self.boxes]

    @cached_property
    def _bounds(self) -> set[tuple[int, ...]]:
        """The stops of the boxes, joined by dim if the boxes have equally many dims."""
        stops = {box.stops for box in self.boxes}
        if len({len(each) for each in stops}) != 1:
            return stops
        return {tuple([max(along) for along in zip(*stops, strict=True)])}

    def is_within(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all the boxes."""
        return all(
            len(stops) == len(shape) and all(map(le, stops, shape)) for stops in self._bounds
        )


class Columns(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The places of stored boxes. Each is a column of unsigned numbers, a value per box.

    Attributes:
        objects: Numbers of objects in the index, 32 bits.
        starts, sizes: In the object, in bytes, 64 bits.
        counts: Numbers of checksums, 32 bits.
        firsts: Indices of the first checksum in ``crcs``, 64 bits.
        crcs: Checksums, 32 bits. Other boxes may have some of them.
    """

    objects: memoryview
    starts: memoryview
    sizes: memoryview
    counts: memoryview
    firsts: memoryview
    crcs: memoryview

    @classmethod
    def of(cls, stored: Sequence[Stored]) -> Columns:
        counts = [len(data.crc32c) for data in stored]
        return cls(
            objects=memoryview(array("I", [data.object for data in stored])),
            starts=memoryview(array("Q", [data.start for data in stored])),
            sizes=memoryview(array("Q", [data.stop - data.start for data in stored])),
            counts=memoryview(array("I", counts)),
            firsts=memoryview(array("Q", list(accumulate(counts, initial=0))[:-1])),
            crcs=memoryview(array("I", chain.from_iterable([data.crc32c for data in stored]))),
        )

    def part(self, start: int, stop: int) -> Columns:
        """Returns those of boxes ``[start, stop)``. Copies nothing."""
        at = slice(start, stop)
        return Columns(
            self.objects[at],
            self.starts[at],
            self.sizes[at],
            self.counts[at],
            self.firsts[at],
            self.crcs,
        )


class Shards(Sequence[Shard]):
    """The shards of a tensor, each box once.

    Attributes:
        cut: The boxes, by number.
        columns: Where they are stored.
        disputed: Numbers of the boxes that may fill only an equal box.
        withheld: Disputed boxes of other ranks, which are not among the shards.
    """

    __slots__ = ("columns", "cut", "disputed", "withheld")

    def __init__(
        self,
        cut: TensorCut,
        columns: Columns,
        disputed: Collection[int] = (),
        withheld: Iterable[Box] = (),
    ) -> None:
        self.cut = cut
        self.columns = columns
        self.disputed = frozenset(disputed)
        self.withheld = tuple(withheld)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Shards:
        return cls(
            TensorCut([shard.box for shard in shards]),
            Columns.of([shard.data for shard in shards]),
            [number for number, shard in enumerate(shards) if shard.is_disputed],
        )

    def data(self, number: int) -> Stored:
        columns = self.columns
        start = columns.starts[number]
        stop = start + columns.sizes[number]
        return Stored(columns.objects[number], start, stop, self.checksums(number))

    def checksums(self, number: int) -> tuple[int, ...]:
        columns = self.columns
        first = columns.firsts[number]
        return tuple(columns.crcs[first : first + columns.counts[number]])

    @property
    def block_bytes(self) -> list[int]:
        """Size of the checksum blocks of each box."""
        return list(map(block_bytes_of, self.columns.sizes, self.columns.counts))

    @property
    def content(self) -> frozenset[tuple[Box, tuple[int, ...]]]:
        """Equal if the boxes are and, by their checksums, the bytes."""
        return frozenset([(box, self.checksums(at)) for at, box in enumerate(self.cut.boxes)])

    def __len__(self) -> int:
        return len(self.cut.boxes)

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Shard]: ...
    def __getitem__(self, number: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        return Shard(self.cut.boxes[number], self.data(number), number in self.disputed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]


_Array: TypeAlias = np.ndarray[Any, Any]


class _Numbers(dict[Any, int]):
    """Numbers its keys in the order in which they are looked up."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class ShardTable:
    """Joins the shards that ranks stored, path by path. Add all, then ask.

    Attributes:
        firsts: By path, the first rank and its first shard.
    """

    def __init__(self) -> None:
        self.firsts: dict[str, tuple[int, TensorEntry]] = {}
        # Per rank with shards: it, and the number of its first.
        self._ranks: list[tuple[int, int]] = []
        self._num_own = 0
        self._paths = _Numbers()
        # Cut, with what shards of one tensor have in common.
        self._places = _Numbers()
        # A value per shard; per checksum.
        self._path, self._place, self._object = array("I"), array("I"), array("I")
        self._start, self._stop, self._count = array("Q"), array("Q"), array("I")
        self._crcs = array("I")

    def add(
        self,
        rank: int,
        shards: Sequence[TensorEntry],
        objects: Sequence[int],
        *,
        is_own: bool,
        is_wanted: Callable[[TensorEntry], bool] | None = None,
    ) -> None:
        """Adds a rank's shards, or those that are wanted.

        Args:
            objects: The index's numbers of the rank's objects.
            is_own: The rank is the one that reads. It comes first.

        Raises:
            FormatError: An unwanted shard belongs to another tensor.
        """
        firsts, paths, places = self.firsts, self._paths, self._places
        for entry in shards:
            if entry.path not in firsts:
                firsts[entry.path] = rank, entry
        if is_wanted is not None:
            for entry in shards:
                if not is_same_tensor(firsts[entry.path][1], entry):
                    raise self._mixed(entry.path, rank)
            shards = [entry for entry in shards if is_wanted(entry)]
        if not shards:
            return
        self._ranks.append((len(self._path), rank))
        # Comprehensions: there may be a million.
        self._path.extend([paths[e.path] for e in shards])
        self._place.extend(
            [
                places[e.offsets, e.shape, e.global_shape, e.dtype, e.type, e.requires_grad]
                for e in shards
            ]
        )
        stored = [e.data for e in shards]
        crcs = [data.crc32c for data in stored]
        self._object.extend([objects[data.object] for data in stored])
        self._start.extend([data.start for data in stored])
        self._stop.extend([data.stop for data in stored])
        self._count.extend(map(len, crcs))
        self._crcs.extend(chain.from_iterable(crcs))
        if is_own:
            self._num_own = len(self._path)

    def boxes(self, path: str) -> list[Box]:
        """Returns the wanted boxes of a path, each once."""
        if path not in self._paths:
            return []
        number = self._paths[path]
        start, stop = self._ends[number - 1] if number else 0, self._ends[number]
        return [self._boxes[each] for each in set(self._sorted[1][start:stop].tolist())]

    def joined(self) -> dict[str, Shards]:
        """Returns the shards of each path.

        Raises:
            FormatError: Shards of one path belong to different tensors.
        """
        order, place = self._sorted
        self._check_kinds()
        columns = self._columns(order)
        ends = self._ends
        num_own = np.bincount(self._path[: self._num_own], minlength=len(ends)).tolist()
        cuts: dict[bytes, TensorCut] = {}

        def cut_of(numbers: Sequence[int]) -> TensorCut:
            key = array("I", numbers).tobytes()
            if key not in cuts:
                cuts[key] = TensorCut([self._boxes[number] for number in numbers])
            return cuts[key]

        found: dict[str, Shards] = {}
        for path in self.firsts:
            if path not in self._paths:
                found[path] = Shards.of([])
                continue
            number = self._paths[path]
            start, stop = ends[number - 1] if number else 0, ends[number]
            numbers = place[start:stop].tolist()
            shape = self.shape(path)
            own = num_own[number]
            found[path] = _join(numbers, columns.part(start, stop), own, cut_of, shape)
        return found

    def shape(self, path: str) -> tuple[int, ...]:
        shape = self.firsts[path][1].global_shape
        assert shape is not None
        return shape

    @cached_property
    def _boxes(self) -> list[Box]:
        """Boxes by place."""
        return [Box(offsets, sizes) for offsets, sizes, *_ in self._places]

    @cached_property
    def _sorted(self) -> tuple[_Array, _Array]:
        """Shards by path, else in order: their numbers and places."""
        order = np.argsort(np.asarray(self._path), kind="stable")
        return order, np.asarray(self._place)[order]

    @cached_property
    def _ends(self) -> list[int]:
        """By path: the end of its shards among the sorted ones."""
        counts = np.bincount(self._path, minlength=len(self._paths))
        ends: list[int] = np.cumsum(counts).tolist()
        return ends

    def _columns(self, order: _Array) -> Columns:
        counts, starts = np.asarray(self._count), np.asarray(self._start)
        firsts = np.cumsum(counts, dtype=np.uint64) - counts
        sizes = np.asarray(self._stop) - starts

        def column(values: _Array) -> memoryview:
            return memoryview(values[order])  # type: ignore[arg-type]

        return Columns(
            objects=column(np.asarray(self._object)),
            starts=column(starts),
            sizes=column(sizes),
            counts=column(counts),
            firsts=column(firsts),
            crcs=memoryview(self._crcs),
        )

    def _check_kinds(self) -> None:
        order, place = self._sorted
        kinds = _Numbers()
        kind_of_place = np.array([kinds[each[2:]] for each in self._places], np.uint32)
        path, kind = np.asarray(self._path)[order], kind_of_place[place]
        differs = (kind[1:] != kind[:-1]) & (path[1:] == path[:-1])
        if differs.any():
            at = int(order[1:][differs][0])
            rank = next(rank for first, rank in reversed(self._ranks) if first <= at)
            raise self._mixed(list(self._paths)[self._path[at]], rank)

    def _mixed(self, path: str, rank: int) -> FormatError:
        return FormatError(
            key=path,
            detail=f"ranks {self.firsts[path][0]} and {rank} have shards of different tensors "
            "under this path",
        )


def _join(
    numbers: Sequence[int],
    columns: Columns,
    num_own: int,
    cut_of: Callable[[Sequence[int]], TensorCut],
    shape: tuple[int, ...],
) -> Shards:
    """Joins the shards of a path.

    A box that ranks stored with different values is disputed: tensors of several meshes have this
    path. All boxes are if meshes cut the path differently and checksums cannot prove that it is one
    tensor. A rank gets only its own disputed boxes.

    Args:
        numbers: The boxes'. They repeat if several ranks stored a box.
        num_own: The first shards, of the rank that reads.
    """
    stored = Shards(cut_of(numbers), columns)
    kept = dict(zip(numbers, range(len(numbers)), strict=True))
    disputed: set[int] = set()
    if len(kept) < len(numbers):
        kept = {}
        for at, number in enumerate(numbers):
            first = kept.setdefault(number, at)
            if stored.checksums(first) != stored.checksums(at):
                disputed.add(number)
    if sum([stored.cut.volumes[at] for at in kept.values()]) > prod(shape):
        by_box = {stored.cut.boxes[at]: number for number, at in kept.items()}
        data = {box: stored.data(kept[number]) for box, number in by_box.items()}
        cover = None if disputed else _one_cover(data, shape)
        if cover is None:
            disputed = set(kept)
        else:
            kept = {by_box[box]: kept[by_box[box]] for box in cover}
    own = frozenset(numbers[:num_own])
    usable = [number for number in kept if number not in disputed or number in own]
    if len(usable) == len(numbers) and not disputed:
        return stored  # the usual case
    return Shards(
        cut_of(usable),
        Columns.of([stored.data(kept[number]) for number in usable]),
        [at for at, number in enumerate(usable) if number in disputed],
        [stored.cut.boxes[at] for number, at in kept.items() if number in disputed - own],
    )


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
        if nbytes and not data.crc32c:
            return None
        before, boxes = ways[start]
        whole = combine(before, combine_blocks(data.crc32c, nbytes), nbytes)
        if ways.setdefault(stop, (whole, [*boxes, box]))[0] != whole:
            return None
    return ways[shape[0]][1]
