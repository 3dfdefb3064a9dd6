# SPDX-License-Identifier: Apache-2.0
"""The owner index: which ranks stored which boxes (``docs/format.md``, "Owner index").

It has each path once per kind: boxes that a mesh cuts follow from the mesh, irregular ones are
listed, other entries are grouped by the ranks that stored them. So a mesh costs a few bytes, for
any number of ranks. Must not know how it is computed or used (``planning.ownership``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Annotated, NoReturn, TypeAlias

import msgspec

from actorsnap.errors import ChecksumMismatch, FormatError
from actorsnap.format.geometry import Box
from actorsnap.format.layout import MAX_BYTES
from actorsnap.format.manifest import seal, unseal

MAX_STEPS = 1 << 20
"""Limit of the work of a lookup in one layout: of positions along axes, times groups."""

MAX_TOTAL_STEPS = 1 << 24
"""Limit of the work of lookups of all tensors, those of one shape once, and of listing ranks."""

_MAX_DIMS = 64
_MAX_RATIO = 40
"""Largest ratio of inflated to deflated bytes, so that a small object needs little memory."""

_MAX_SMALL_BYTES = 1 << 20
"""Inflated size to which the ratio does not apply."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
_Sizes: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=_MAX_DIMS)]
_Axes: TypeAlias = Annotated[
    tuple[tuple[_Positive, _Positive], ...], msgspec.Meta(max_length=_MAX_DIMS)
]
_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Grid(_Row, frozen=True, array_like=True, gc=False):
    """Ranks at regular distances: ``start`` plus multiples of each axis' step.

    Attributes:
        axes: Count and step. A step is larger than the reach of all smaller steps.
    """

    start: _Count
    axes: _Axes = ()

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple([count for count, _ in self.axes])

    @property
    def last(self) -> int:
        return self.start + sum([(count - 1) * step for count, step in self.axes])

    def __len__(self) -> int:
        return prod(self.counts)

    def __iter__(self) -> Iterator[int]:
        """Yields the ranks in the order of positions; the last axis changes fastest."""
        along = [range(0, count * step, step) for count, step in self.axes]
        return (self.start + sum(steps) for steps in product(*along))

    def position(self, rank: int) -> tuple[int, ...] | None:
        """Returns the position of a rank along the axes; None if it is not in the grid."""
        rest = rank - self.start
        found = [0] * len(self.axes)
        for axis in sorted(range(len(self.axes)), key=lambda axis: -self.axes[axis][1]):
            count, step = self.axes[axis]
            if count > 1:
                found[axis] = rest // step
                if not 0 <= found[axis] < count:
                    return None
                rest %= step
        return tuple(found) if rest == 0 else None

    def part(self, positions: Box) -> Grid:
        steps = [step for _, step in self.axes]
        start = sum([at * step for at, step in zip(positions.offsets, steps, strict=True)])
        return Grid(self.start + start, tuple(zip(positions.sizes, steps, strict=True)))

    def is_valid(self, world_size: int) -> bool:
        reach = 0
        for count, step in sorted(self.axes, key=lambda axis: axis[1]):
            if count > 1:
                if step <= reach:
                    return False
                reach += (count - 1) * step
        return self.start + reach < world_size


def grids_of(ranks: Iterable[int]) -> tuple[Grid, ...]:
    """Returns few grids that have the ranks, which are distinct and rising."""
    grids = [Grid(rank) for rank in ranks]
    count = 0
    while len(grids) != count:
        count = len(grids)
        grids = list(_join(grids))
    return tuple(grids)


def _join(grids: Sequence[Grid]) -> Iterator[Grid]:
    """Joins equal grids at equal distances."""
    index = 0
    while index < len(grids):
        first = grids[index]
        stop = index + 1
        while (
            stop < len(grids)
            and grids[stop].axes == first.axes
            and grids[stop].start - grids[stop - 1].start == grids[index + 1].start - first.start
        ):
            stop += 1
        if stop - index > 1:
            step = grids[index + 1].start - first.start
            yield Grid(first.start, ((stop - index, step), *first.axes))
        else:
            yield first
        index = stop


class MeshCut(_Row, frozen=True, array_like=True, gc=False):
    """A mesh axis that cuts a dim; see ``geometry.Placement``."""

    axis: _Count
    dim: _Count
    groups: _Positive = 1


class Layout(_Row, frozen=True, array_like=True, gc=False):
    """A mesh, and the axes that cut dims, in order. Along others the ranks hold the same."""

    mesh: Grid
    cuts: tuple[MeshCut, ...] = ()


class Holders(_Row, frozen=True, array_like=True, gc=False):
    """Ranks of a layout that stored what they hold.

    Attributes:
        offsets, sizes: Their positions in the mesh; empty: all.
        part: They stored only these elements of their boxes, ``[start, stop)`` in C order.
    """

    layout: _Count
    offsets: _Sizes = ()
    sizes: _Sizes = ()
    part: tuple[_Count, _Count] | None = None


class Tensor(_Row, frozen=True, array_like=True, gc=False):
    path: _Text
    shape: _Sizes


class Owned(_Row, frozen=True, array_like=True, gc=False):
    """Tensors that the same regions stored."""

    regions: tuple[Holders, ...]
    tensors: tuple[Tensor, ...]


class RankBox(_Row, frozen=True, array_like=True, gc=False):
    rank: _Count
    offsets: _Sizes
    sizes: _Sizes

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class Listed(_Row, frozen=True, array_like=True, gc=False):
    """Boxes of a tensor that follow from no layout, rising by rank and offsets."""

    path: _Text
    boxes: tuple[RankBox, ...]


class Kept(_Row, frozen=True, array_like=True, gc=False):
    """Entries without boxes, except containers and parts of private leaves."""

    ranks: tuple[Grid, ...]
    paths: tuple[_Text, ...]


class Owners(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The owner index of a snapshot.

    Attributes:
        common: Entries that all ranks may read.
        private: Entries of the ranks that stored them.
    """

    layouts: tuple[Layout, ...] = ()
    placed: tuple[Owned, ...] = ()
    listed: tuple[Listed, ...] = ()
    common: tuple[Kept, ...] = ()
    private: tuple[Kept, ...] = ()


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object: ``owners`` is the deflated JSON of ``Owners``, of ``size`` bytes."""

    attempt: str
    world_size: _Positive
    size: _Count
    owners: bytes


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Owners)
_envelope_decoder = msgspec.json.Decoder(_Envelope)


def owners_key(attempt: str) -> str:
    return f"{attempt}/owners.json"


def deflate_owners(owners: Owners) -> tuple[int, bytes]:
    """Returns what does not depend on the attempt: input of ``encode_owners``."""
    body = _encoder.encode(owners)
    deflated = zlib.compress(body, 9)
    if len(body) > _most_bytes(deflated):
        deflated = zlib.compress(body, 0)
    return len(body), deflated


def encode_owners(attempt: str, world_size: int, deflated: tuple[int, bytes]) -> bytes:
    size, body = deflated
    return seal(
        _encoder.encode(_Envelope(attempt=attempt, world_size=world_size, size=size, owners=body))
    )


def decode_owners(data: bytes, *, attempt: str, world_size: int) -> Owners:
    """Decodes and checks an owner index. Time and memory are bounded by its size.

    Raises:
        ChecksumMismatch: It is damaged.
        FormatError: It is intact, but of another snapshot or not valid.
    """
    key = owners_key(attempt)
    body = unseal(data)
    if body is None:
        raise ChecksumMismatch(key=key, detail="the owner index is damaged: its checksum differs")
    try:
        envelope = _envelope_decoder.decode(body)
        if (envelope.attempt, envelope.world_size) != (attempt, world_size):
            _fail(
                key,
                f"it is the owner index of {envelope.world_size} ranks of attempt "
                f"{envelope.attempt!r:.200}, not of {world_size} of this one",
            )
        if envelope.size > _most_bytes(envelope.owners):
            _fail(key, f"{len(envelope.owners)} deflated bytes stand for {envelope.size}")
        inflate = zlib.decompressobj()
        inflated = inflate.decompress(envelope.owners, envelope.size + 1)
        if len(inflated) != envelope.size or not inflate.eof:
            _fail(key, f"{len(inflated)} bytes were inflated, not {envelope.size}")
        owners = _decoder.decode(inflated)
    except (ValueError, RecursionError, zlib.error) as error:
        raise FormatError(key=key, detail=str(error)[:1000]) from error
    _check(owners, world_size, key)
    return owners


def _most_bytes(deflated: bytes) -> int:
    return max(_MAX_SMALL_BYTES, _MAX_RATIO * len(deflated))


def _check(owners: Owners, world_size: int, key: str) -> None:
    for layout in owners.layouts:
        _check_layout(layout, world_size, key)
    num_steps = 0
    for placed in owners.placed:
        num_shapes = len({tensor.shape for tensor in placed.tensors})
        num_steps += num_shapes * _check_regions(placed.regions, owners.layouts, key)
        layouts = [owners.layouts[region.layout] for region in placed.regions]
        max_dim = max([cut.dim + 1 for layout in layouts for cut in layout.cuts], default=0)
        for tensor in placed.tensors:
            if len(tensor.shape) < max_dim or prod(tensor.shape) > MAX_BYTES:
                _fail(key, f"{tensor.path!r:.200} of shape {tensor.shape} does not fit its mesh")
    _check_once([tensor.path for placed in owners.placed for tensor in placed.tensors], key)
    for listed in owners.listed:
        for each in listed.boxes:
            if each.rank >= world_size or len(each.offsets) != len(each.sizes):
                what = f"{each} is not a box of one of {world_size} ranks"
                _fail(key, f"{listed.path!r:.200}: {what}")
        if len({len(each.sizes) for each in listed.boxes}) > 1:
            _fail(key, f"{listed.path!r:.200} has boxes of several dimensions")
    _check_once([listed.path for listed in owners.listed], key)
    for kept in (owners.common, owners.private):
        for group in kept:
            num_steps += _check_ranks(group, world_size, key)
            if num_steps > MAX_TOTAL_STEPS:
                break
        _check_once([path for group in kept for path in group.paths], key)
    if num_steps > MAX_TOTAL_STEPS:
        _fail(key, f"to look up its tensors would take {num_steps} steps")


def _check_ranks(group: Kept, world_size: int, key: str) -> int:
    """Checks that the ranks are distinct. Returns their number."""
    for grid in group.ranks:
        if not grid.is_valid(world_size):
            _fail(key, f"{grid} is not within {world_size} ranks")
    num_ranks = sum(map(len, group.ranks))
    if num_ranks > world_size or (
        len(group.ranks) > 1 and len({rank for grid in group.ranks for rank in grid}) < num_ranks
    ):
        _fail(key, f"ranks that stored {group.paths[:1]} are named twice")
    return num_ranks


def _check_layout(layout: Layout, world_size: int, key: str) -> None:
    counts = layout.mesh.counts
    if not layout.mesh.is_valid(world_size):
        _fail(key, f"the mesh {layout.mesh} is not within {world_size} ranks")
    axes = [cut.axis for cut in layout.cuts]
    if len(set(axes)) < len(axes) or max(axes, default=-1) >= len(counts):
        _fail(key, f"{layout.cuts} do not cut along axes of a mesh of shape {counts}")
    if max([cut.dim for cut in layout.cuts], default=0) >= _MAX_DIMS:
        _fail(key, f"{layout.cuts} cut dims that no tensor has")
    if lookup_steps(layout) > MAX_STEPS:
        _fail(key, f"{layout.cuts} cut a tensor into too many pieces")


def lookup_steps(layout: Layout) -> int:
    """Returns the positions that a lookup may have to look at one by one.

    A cut that is the last of its dim, without groups, needs none.
    """
    last = {cut.dim: cut for cut in layout.cuts}
    return prod(
        [
            cut.groups * layout.mesh.counts[cut.axis]
            for cut in layout.cuts
            if cut.groups > 1 or last[cut.dim] is not cut
        ]
    )


def _check_regions(regions: Sequence[Holders], layouts: Sequence[Layout], key: str) -> int:
    """Checks regions of the same tensors. Returns the steps of a lookup."""
    num_steps = 0
    num_positions: dict[int, int] = {}
    for region in regions:
        if region.layout >= len(layouts):
            _fail(key, f"layout {region.layout} of {len(layouts)}")
        layout = layouts[region.layout]
        counts = layout.mesh.counts
        if region.sizes or region.offsets:
            if not len(region.sizes) == len(region.offsets) == len(counts) or not Box.whole(
                counts
            ).contains(Box(region.offsets, region.sizes)):
                _fail(key, f"{region} is not within a mesh of shape {counts}")
        volume = prod(region.sizes or counts)
        num_steps += lookup_steps(layout)
        if region.part is not None:
            num_steps += volume
            if region.part[0] >= region.part[1] or volume > MAX_STEPS:
                _fail(key, f"{region} stands for no part of the boxes of few ranks")
        num_positions[region.layout] = num_positions.get(region.layout, 0) + max(1, volume)
        if num_positions[region.layout] > len(layout.mesh):
            _fail(key, f"{len(regions)} regions have positions of layout {region.layout} in common")
    return num_steps


def _check_once(paths: Sequence[str], key: str) -> None:
    if len(set(paths)) < len(paths):
        seen: set[str] = set()
        for path in paths:
            if path in seen:
                _fail(key, f"{path!r:.200} is named twice")
            seen.add(path)


def _fail(key: str, detail: str) -> NoReturn:
    raise FormatError(key=key, detail=detail[:1000])
