"""The stored boxes of tensors, as columns of numbers.

One process that restores what a thousand ranks saved has a million of them: an object for each
would take 700 bytes. They become objects when they are looked at. Tensors that are cut alike share
their boxes, so that a read of one is planned for all.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from operator import le
from typing import overload

import msgspec

from actorsnap.format.checksum import block_bytes_of, combine, combine_blocks
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import Stored, TensorEntry


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A stored box of a tensor.

    ``is_disputed``: others stored other elements; it may fill only an equal box.
    """

    box: Box
    data: Stored
    is_disputed: bool = False


class Cut:
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


_NO_CUT = Cut(())


class Shards(Sequence[Shard]):
    """The shards of a tensor, each box once.

    Attributes:
        objects, starts, sizes: Where the bytes of each box are, by its number.
        crcs: Checksums of the blocks of all boxes, one box after the other.
        ends: By box, the end of its checksums in ``crcs``.
        disputed: Numbers of the boxes that may fill only an equal box.
    """

    __slots__ = ("crcs", "cut", "disputed", "ends", "objects", "sizes", "starts")

    def __init__(self, cut: Cut, disputed: Collection[int] = ()) -> None:
        self.cut = cut
        self.disputed = frozenset(disputed)
        self.objects, self.starts, self.sizes = array("I"), array("Q"), array("Q")
        self.crcs, self.ends = array("I"), array("I")

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Shards:
        disputed = [number for number, shard in enumerate(shards) if shard.is_disputed]
        found = cls(Cut([shard.box for shard in shards]), disputed)
        for shard in shards:
            found.append(shard.data.object, shard.data)
        return found

    def append(self, number: int, data: Stored) -> None:
        """Adds the place of the next box; ``number`` is the object's in the index."""
        start = data.start
        self.objects.append(number)
        self.starts.append(start)
        self.sizes.append(data.stop - start)
        self.crcs.extend(data.crc32c)
        self.ends.append(len(self.crcs))

    def part(self, numbers: Sequence[int], cut: Cut, disputed: Collection[int]) -> Shards:
        """Returns some of the shards, whose boxes are ``cut``'s."""
        found = Shards(cut, disputed)
        for number in numbers:
            found.append(self.objects[number], self.data(number))
        return found

    def data(self, number: int) -> Stored:
        start = self.starts[number]
        return Stored(
            self.objects[number], start, start + self.sizes[number], self.checksums(number)
        )

    def checksums(self, number: int) -> tuple[int, ...]:
        ends = self.ends
        return tuple(self.crcs[ends[number - 1] if number else 0 : ends[number]])

    @property
    def block_bytes(self) -> list[int]:
        """Size of the checksum blocks of each box."""
        counts = [stop - start for start, stop in zip((0, *self.ends), self.ends, strict=False)]
        return [block_bytes_of(n, count) for n, count in zip(self.sizes, counts, strict=True)]

    @property
    def content(self) -> frozenset[tuple[Box, tuple[int, ...]]]:
        """Equal if boxes and bytes are; checksums prove it."""
        return frozenset([(box, self.checksums(at)) for at, box in enumerate(self.cut.boxes)])

    def __len__(self) -> int:
        return len(self.ends)

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


class Cuts:
    """The boxes of many tensors; equal ones exist once, and so do equal lists of them."""

    def __init__(self) -> None:
        self._boxes: list[Box] = []
        self._numbers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._cuts: dict[bytes, Cut] = {}

    def number(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        place = offsets, sizes
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self._boxes)
            self._boxes.append(Box(offsets, sizes))
        return number

    def boxes(self, numbers: Iterable[int]) -> list[Box]:
        return [self._boxes[number] for number in numbers]

    def cut(self, numbers: Sequence[int]) -> Cut:
        key = array("I", numbers).tobytes()
        if key not in self._cuts:
            self._cuts[key] = Cut(self.boxes(numbers))
        return self._cuts[key]


class Joined:
    """The wanted shards of a path, in the order in which they are found.

    Attributes:
        first: The first entry, of ``rank``.
        numbers: The boxes' in ``Cuts``. They repeat if several ranks stored a box.
        stored: The shards; the boxes follow in the end.
        num_own: The first shards, of the rank that reads.
    """

    __slots__ = ("first", "num_own", "numbers", "rank", "shape", "stored")

    def __init__(self, first: TensorEntry, rank: int) -> None:
        assert first.global_shape is not None
        self.first = first
        self.rank = rank
        self.shape = first.global_shape
        self.numbers = array("I")
        self.num_own = 0
        self.stored = Shards(_NO_CUT)

    def shards(self, cuts: Cuts) -> Shards:
        """Joins the shards.

        A box that ranks stored with different values is disputed: tensors of several meshes have
        this path. All boxes are if meshes cut the path differently and checksums cannot prove that
        it is one tensor. A rank gets only its own disputed boxes.
        """
        numbers, stored = self.numbers, self.stored
        kept: dict[int, int] = {}
        disputed: set[int] = set()
        if len(set(numbers)) == len(numbers):
            kept = dict(zip(numbers, range(len(numbers)), strict=True))
        else:
            for at, number in enumerate(numbers):
                first = kept.setdefault(number, at)
                if stored.checksums(first) != stored.checksums(at):
                    disputed.add(number)
        cut = cuts.cut(list(kept))
        if sum(cut.volumes) > prod(self.shape):
            by_box = dict(zip(cut.boxes, kept, strict=True))
            data = {box: stored.data(kept[number]) for box, number in by_box.items()}
            cover = None if disputed else _one_cover(data, self.shape)
            if cover is None:
                disputed = set(kept)
            else:
                kept = {by_box[box]: kept[by_box[box]] for box in cover}
        own = frozenset(numbers[: self.num_own])
        usable = [number for number in kept if number not in disputed or number in own]
        if len(usable) == len(numbers) and not disputed:
            stored.cut = cut  # the usual case
            return stored
        return stored.part(
            [kept[number] for number in usable],
            cuts.cut(usable),
            [at for at, number in enumerate(usable) if number in disputed],
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
        before, boxes = ways[start]
        whole = combine(before, combine_blocks(data.crc32c, nbytes), nbytes)
        if ways.setdefault(stop, (whole, [*boxes, box]))[0] != whole:
            return None
    return ways[shape[0]][1]
