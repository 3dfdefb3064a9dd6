# SPDX-License-Identifier: Apache-2.0
"""Computes the owner index of a save, and answers which ranks stored what.

``owners_of`` knows only what rank 0 knows when a save is planned. ``OwnerIndex`` is what a reader
asks. Neither may look at rank manifests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import TypeAlias

from msgspec.structs import replace

from actorsnap.format.geometry import Box, Placement, Run, c_strides, flat_range_boxes, place
from actorsnap.format.manifest import ContainerEntry, RankManifest, TensorEntry
from actorsnap.format.owners import (
    Grid,
    Holders,
    Kept,
    Layout,
    Listed,
    Owned,
    Owners,
    RankBox,
    Tensor,
    grids_of,
)
from actorsnap.planning.index import Wants
from actorsnap.planning.inventory import Inventory, Outline, Sharded, index_runs
from actorsnap.planning.packing import (
    Arranged,
    Item,
    ItemBox,
    PackingRules,
    RankPlan,
    Share,
    arrange,
    canonical,
    written_items,
)
from actorsnap.planning.survey import Holdings, holdings_of

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Offsets and sizes of a shard; None for an entry without."""

# What a reader asks


class OwnerIndex:
    """Answers which ranks stored what, from a checked index.

    Attributes:
        world_size: Number of ranks that saved.
    """

    def __init__(self, owners: Owners, world_size: int) -> None:
        self.world_size = world_size
        self._owners = owners
        self._layouts = owners.layouts
        self._placed = {
            tensor.path: (tensor.shape, placed.regions)
            for placed in owners.placed
            for tensor in placed.tensors
        }
        self._listed = {listed.path: _Boxes(listed.boxes) for listed in owners.listed}
        self._common = {path: kept.ranks for kept in owners.common for path in kept.paths}
        self._private = {path: kept.ranks for kept in owners.private for path in kept.paths}

        self._irregular = self._listed.keys() | self._common.keys() | self._private.keys()
        # Equal for tensors that are cut alike, and have no other entries.
        self._kinds = {
            path: (shape, id(regions))
            for path, (shape, regions) in self._placed.items()
            if path not in self._irregular
        }

    def __contains__(self, path: str) -> bool:
        return path in self._placed or path in self._irregular

    @property
    def paths(self) -> Iterator[str]:
        """Yields the paths that all ranks may read; unordered."""
        yield from self._placed
        yield from self._listed.keys() - self._placed.keys()
        yield from self._common.keys() - self._placed.keys() - self._listed.keys()

    @property
    def private(self) -> Mapping[str, tuple[Grid, ...]]:
        """The ranks that stored private leaves, by path."""
        return self._private

    @property
    def private_everywhere(self) -> tuple[str, ...]:
        """Paths that all ranks stored for themselves: everybody's, if their values are equal."""
        return tuple(
            [p for p, ranks in self._private.items() if sum(map(len, ranks)) == self.world_size]
        )

    def ranks_with(self, path: str, wanted: Box | None = None) -> tuple[Grid, ...]:
        """Returns the ranks whose manifests have what all may read under a path.

        A rank that stored an entry without boxes has all of it: one of those is enough.

        Args:
            wanted: Only ranks with a box that intersects it; empty tensors count as intersecting.
        """
        return (*self._common.get(path, ()), *self._boxes(path, wanted))

    def _boxes(self, path: str, wanted: Box | None) -> tuple[Grid, ...]:
        found: list[Grid] = []
        if path in self._placed:
            shape, regions = self._placed[path]
            for region in regions:
                found += _ranks_in(self._layouts[region.layout], region, shape, wanted)
        if path in self._listed:
            found += self._listed[path].grids(wanted)
        return tuple(found)

    def ranks_to_ask(
        self, wants: Wants, paths: Iterable[str], asked: Collection[int]
    ) -> tuple[int, ...]:
        """Returns the ranks, other than ``asked``, whose manifests have what is wanted; rising.

        At least one rank with each path is among them or ``asked``.

        Args:
            paths: Wanted ones.
        """
        found = set(asked)
        alike: dict[object, set[int]] = {}
        for path in paths:
            boxes = wants.boxes.get(path)
            if path in self._placed and not self._is_empty(path):
                shape, regions = self._placed[path]
                key = shape, id(regions), boxes
                if key not in alike:
                    alike[key] = set(self._with_boxes(path, boxes))
                found |= alike[key]
            if path in self._listed:
                found.update(self._with_boxes(path, boxes))
        for path in paths:
            for grids in (self._common.get(path), self._any_with_boxes(path, wants)):
                if grids and not any(g.position(rank) is not None for g in grids for rank in found):
                    found.add(grids[0].start)
        return tuple(sorted(found.difference(asked)))

    def _with_boxes(self, path: str, boxes: Sequence[Box] | None) -> Iterator[int]:
        for box in [None] if boxes is None else boxes:
            yield from chain.from_iterable(self._boxes(path, box))

    def _any_with_boxes(self, path: str, wants: Wants) -> tuple[Grid, ...]:
        """Returns ranks with boxes of a tensor that is empty, or of which the rank may want none.

        Of such a tensor the manifest of one rank says enough.
        """
        if path in self._common or (path not in wants.boxes and not self._is_empty(path)):
            return ()
        return self._boxes(path, None)

    def _is_empty(self, path: str) -> bool:
        return path in self._placed and 0 in self._placed[path][0]

    def places(self, path: str, rank: int) -> set[Box | None]:
        """Returns what the rank's manifest must have under a path."""
        found: set[Box | None] = set()
        if path in self._placed:
            shape, regions = self._placed[path]
            for region in regions:
                layout = self._layouts[region.layout]
                at = layout.mesh.position(rank)
                if at is not None and _whole(region, layout).contains(Box(at, (1,) * len(at))):
                    found.update(_parts(held_boxes(layout, shape, at), region))
        if path in self._listed:
            found.update(self._listed[path].by_rank.get(rank, ()))
        for kept in (self._common, self._private):
            if any(grid.position(rank) is not None for grid in kept.get(path, ())):
                found.add(None)
        return found

    def needed_of(self, rank: int, wants: Wants, paths: Iterable[str]) -> frozenset[str] | None:
        """Returns what a rank needs of its own manifest, besides containers.

        That is its private leaves, and those of ``paths``, which all may read, of which it stored a
        wanted box. If nobody did, its box is as good as any: only dtype and shape are wanted.

        Returns:
            None: Most of the manifest.
        """
        stored: set[str] = set()
        needed: set[str] = set()
        for kept in self._owners.private:
            if any(grid.position(rank) is not None for grid in kept.ranks):
                needed.update(kept.paths)
        wanted = frozenset(paths)
        alike: dict[object, tuple[bool, bool]] = {}
        for path in self.paths:
            boxes = wants.boxes.get(path)
            key = self._kinds.get(path, path), boxes, path in wanted
            if key not in alike:
                places = self.places(path, rank)
                has_part = any(
                    [b is None or wants.has_part(path, b.offsets, b.sizes) for b in places]
                )
                if not has_part and path in wanted:
                    has_part = next(self._with_boxes(path, boxes), None) is None
                alike[key] = bool(places), has_part
            is_stored, has_part = alike[key]
            if is_stored:
                stored.add(path)
            if is_stored and has_part and path in wanted:
                needed.add(path)
        return frozenset(needed) if 2 * len(needed) <= len(stored | needed) else None

    def contradiction(self, manifest: RankManifest, paths: Iterable[str]) -> str | None:
        """As ``difference``, of a manifest with some entries.

        Args:
            paths: All entries under these are among them.
        """
        rank = manifest.rank
        found: dict[str, tuple[Place, ...]] = {}
        for entry in manifest.entries:
            if type(entry) is TensorEntry:
                offsets = entry.offsets
                place: Place = None if offsets is None else (offsets, entry.shape)
            elif type(entry) is ContainerEntry:
                continue
            else:
                place = None
            before = found.get(entry.path)
            found[entry.path] = (place,) if before is None else (*before, place)
        alike: dict[object, frozenset[Place]] = {}
        for path in paths:
            kind = self._kinds.get(path, path)
            expected = alike.get(kind)
            if expected is None:
                expected = alike[kind] = frozenset(
                    [None if b is None else (b.offsets, b.sizes) for b in self.places(path, rank)]
                )
            present = found.get(path, ())
            if len(present) != len(expected) or not expected.issuperset(present):
                lacking = expected.difference(present)
                at = next(iter(lacking or set(present) - expected), None)
                box = None if at is None else Box(*at)
                return _contradiction(rank, path, box, is_lacking=bool(lacking))
        for path in found.keys() - self._placed.keys() - self._irregular:
            if "@" not in path:
                return _contradiction(rank, path, None, is_lacking=False)
        return None

    def difference(self, manifest: RankManifest, holdings: Holdings | None = None) -> str | None:
        """Returns how a rank manifest contradicts the index; None if it does not.

        Args:
            holdings: Those of the manifest, if known.
        """
        held, rank = holdings or holdings_of(manifest), manifest.rank
        expected = self._stored_by(rank)
        found: dict[_Place, Set[str]] = {None: frozenset(held.others)}
        for (offsets, sizes, *_), paths in held.shards.items():
            _join(found, (offsets, sizes), frozenset(paths))
        lacking: list[tuple[str, _Place]] = []
        more: list[tuple[str, _Place]] = []
        for at in expected.keys() | found.keys():
            ours, theirs = expected.get(at, frozenset()), found.get(at, frozenset())
            if ours != theirs:
                lacking += [(path, at) for path in ours - theirs]
                # Parts of private leaves are in the manifest of the leaf.
                more += [(path, at) for path in theirs - ours if at or "@" not in path]
        if not lacking and not more:
            return None
        path, at = min(lacking or more, key=lambda each: each[0])
        box = None if at is None else Box(*at)
        return _contradiction(rank, path, box, is_lacking=bool(lacking))

    def _stored_by(self, rank: int) -> dict[_Place, Set[str]]:
        """Returns the paths that the rank's manifest must have, by the box that it stored."""
        found: dict[_Place, Set[str]] = {}
        for regions, shape, paths in self._placed_alike:
            for region in regions:
                layout = self._layouts[region.layout]
                at = layout.mesh.position(rank)
                if at is not None and _whole(region, layout).contains(Box(at, (1,) * len(at))):
                    for box in _parts(held_boxes(layout, shape, at), region):
                        _join(found, (box.offsets, box.sizes), paths)
        for path, listed in self._listed.items():
            for box in listed.by_rank.get(rank, ()):
                _join(found, (box.offsets, box.sizes), {path})
        for grids, paths in self._kept_alike:
            if any(grid.position(rank) is not None for grid in grids):
                _join(found, None, paths)
        return found

    @cached_property
    def _placed_alike(self) -> list[tuple[Sequence[Holders], tuple[int, ...], frozenset[str]]]:
        """Tensors with the same regions and shape."""
        found: list[tuple[Sequence[Holders], tuple[int, ...], frozenset[str]]] = []
        for placed in self._owners.placed:
            by_shape: dict[tuple[int, ...], list[str]] = {}
            for tensor in placed.tensors:
                by_shape.setdefault(tensor.shape, []).append(tensor.path)
            found += [(placed.regions, shape, frozenset(p)) for shape, p in by_shape.items()]
        return found

    @cached_property
    def _kept_alike(self) -> list[tuple[Sequence[Grid], frozenset[str]]]:
        kept = (*self._owners.common, *self._owners.private)
        return [(each.ranks, frozenset(each.paths)) for each in kept]


_Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Offsets and sizes of a box; None: an entry without one."""


def _join(found: dict[_Place, Set[str]], place: _Place, paths: Set[str]) -> None:
    found[place] = found[place] | paths if place in found else paths


def _contradiction(rank: int, path: str, box: Box | None, *, is_lacking: bool) -> str:
    where = "" if box is None else f" from {box.offsets} up to {box.stops}"
    verb = "has" if is_lacking else "does not have"
    return f"rank {rank} {verb} {path!r}{where} according to the owner index"


def held_boxes(layout: Layout, shape: tuple[int, ...], position: Sequence[int]) -> list[Box]:
    """Returns the boxes of a tensor that the rank at a position in the mesh holds."""
    counts = layout.mesh.counts
    cuts = [Placement(c.dim, counts[c.axis], position[c.axis], c.groups) for c in layout.cuts]
    return [placed.box for placed in place(shape, cuts)[0]]


def _parts(held: Sequence[Box], region: Holders) -> list[Box]:
    if region.part is None:
        return list(held)
    start, stop = region.part
    if len(held) != 1:
        return []
    volume = held[0].volume
    return [
        Box(tuple([a + b for a, b in zip(held[0].offsets, box.offsets, strict=True)]), box.sizes)
        for box in flat_range_boxes(held[0].sizes, min(start, volume), min(stop, volume))
    ]


def _whole(region: Holders, layout: Layout) -> Box:
    if not region.sizes:
        return Box.whole(layout.mesh.counts)
    return Box(region.offsets, region.sizes)


def _ranks_in(
    layout: Layout, region: Holders, shape: tuple[int, ...], wanted: Box | None
) -> Iterator[Grid]:
    within = _whole(region, layout)
    if 0 in shape:  # all hold the empty box
        yield layout.mesh.part(within)
        return
    wanted = Box.whole(shape) if wanted is None else wanted
    if wanted.is_empty or wanted.ndim != len(shape):
        return
    counts = layout.mesh.counts
    ways: list[list[tuple[tuple[int, Run], ...]]] = []
    for dim in sorted({cut.dim for cut in layout.cuts}):
        cuts = [cut for cut in layout.cuts if cut.dim == dim]
        run = (wanted.offsets[dim], min(shape[dim], wanted.stops[dim]))
        found = _along(shape[dim], tuple([(counts[c.axis], c.groups) for c in cuts]), (run,))
        axes = [cut.axis for cut in cuts]
        ways.append([tuple(zip(axes, runs, strict=True)) for runs in found])
    for way in product(*ways):
        offsets, sizes = list(within.offsets), list(within.sizes)
        for axis, (start, stop) in (each for along in way for each in along):
            end = min(offsets[axis] + sizes[axis], stop)
            offsets[axis] = max(offsets[axis], start)
            sizes[axis] = end - offsets[axis]
        if all(size > 0 for size in sizes):
            found_at = Box(tuple(offsets), tuple(sizes))
            if region.part is None or wanted.contains(Box.whole(shape)):
                yield layout.mesh.part(found_at)
            else:
                yield from _with_parts(layout, region, shape, wanted, found_at)


def _with_parts(
    layout: Layout, region: Holders, shape: tuple[int, ...], wanted: Box, within: Box
) -> Iterator[Grid]:
    spans = [range(o, o + n) for o, n in zip(within.offsets, within.sizes, strict=True)]
    for at in product(*spans):
        if any(wanted.intersect(box) for box in _parts(held_boxes(layout, shape, at), region)):
            yield layout.mesh.part(Box(at, (1,) * len(at)))


@lru_cache(maxsize=64)
def _along(
    size: int, cuts: tuple[tuple[int, int], ...], wanted: tuple[Run, ...]
) -> list[tuple[Run, ...]]:
    """Returns the positions whose ranks hold wanted indices of a dim, as boxes of positions.

    Args:
        cuts: Per axis that cuts the dim, in order: its number of ranks, and groups.
        wanted: Within ``size``.
    """
    (parts, groups), *rest = cuts
    if groups == 1 and not rest:
        step = -(-size // parts)
        runs: list[Run] = []
        for start, stop in sorted([(a // step, (b - 1) // step + 1) for a, b in wanted if a < b]):
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        return [(run,) for run in runs]
    # Per position, the wanted indices among those that the rank holds, counted locally.
    local: dict[int, list[Run]] = {}
    group = -(-size // groups)
    step = -(-group // parts)
    full, left = divmod(size, group)
    width = -(-left // parts)

    def num_held(at: int) -> int:
        of_full, of_last = group - at * step, left - at * width
        return full * max(0, min(step, of_full)) + max(0, min(width, of_last))

    is_whole = wanted == ((0, size),)
    if is_whole:
        local = {at: [(0, held)] for at in range(parts) if (held := num_held(at))}
    for first, last in () if is_whole else wanted:
        for number in range(first // group, -(-last // group)):
            begin, end = number * group, min(size, (number + 1) * group)
            low, high = max(first, begin) - begin, min(last, end) - begin
            each = -(-(end - begin) // parts)
            for at in range(low // each, -(-high // each)):
                start = max(low, at * each) - at * each
                stop = min(high, (at + 1) * each) - at * each
                before = number * max(0, min(step, group - at * step))
                local.setdefault(at, []).append((before + start, before + stop))
    if not rest:
        return [(run,) for run in index_runs(local)]
    alike: dict[tuple[tuple[Run, ...], ...], list[int]] = {}
    for at, runs in local.items():
        alike.setdefault(tuple(_along(num_held(at), tuple(rest), tuple(runs))), []).append(at)
    return [
        (run, *more) for found, ats in alike.items() for run in index_runs(ats) for more in found
    ]


class _Boxes:
    """The listed boxes of a path, ordered so that a lookup looks at few."""

    def __init__(self, boxes: Sequence[RankBox]) -> None:
        self._boxes = sorted(boxes, key=lambda each: each.offsets[:1])
        self._starts = [each.offsets[0] for each in self._boxes if each.offsets]
        self._longest = max([each.sizes[0] for each in self._boxes if each.sizes], default=0)
        self.by_rank: dict[int, list[Box]] = {}
        for each in boxes:
            self.by_rank.setdefault(each.rank, []).append(each.box)

    def grids(self, wanted: Box | None) -> tuple[Grid, ...]:
        found = self._boxes
        if wanted is not None and self._starts and not any(0 in each.sizes for each in found):
            low = bisect_left(self._starts, wanted.offsets[0] - self._longest + 1)
            high = bisect_left(self._starts, wanted.stops[0])
            found = [each for each in found[low:high] if each.box.intersect(wanted)]
        return grids_of(sorted({each.rank for each in found}))


# What rank 0 computes


_Part: TypeAlias = tuple[int, int] | None
_Arranged: TypeAlias = tuple[Sequence[Item], Sequence[Arranged]]


def owners_of(
    inventories: Sequence[Inventory],
    lists: Mapping[bytes, Sequence[Item]],
    sharded: Mapping[bytes, Sequence[Sharded]],
    outlines: Mapping[bytes, Outline],
    plans: Sequence[RankPlan],
    rules: PackingRules,
) -> Owners:
    """Returns the owner index of a save.

    Args:
        inventories, plans: By rank.
        lists, sharded, outlines: Of the inventories, by digest.
    """
    builder = _Builder(lists, rules)
    for digest, tensors in sharded.items():
        builder.add_sharded(digest, tensors)
    for rank, (inventory, plan) in enumerate(zip(inventories, plans, strict=True)):
        builder.add_plan(rank, inventory, plan)
    ranks_of: dict[bytes, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        ranks_of.setdefault(inventory.outline, []).append(rank)
    for digest, outline in outlines.items():
        builder.add_outline(outline, ranks_of.get(digest, []))
    return builder.build()


class _Builder:
    def __init__(self, lists: Mapping[bytes, Sequence[Item]], rules: PackingRules) -> None:
        self._lists = lists
        self._rules = rules
        self._layouts: dict[Layout, int] = {}
        # By identity, because the hash of a layout takes long and most tensors share theirs: the
        # layout, which keeps its id, whether it has copies, and all its ranks as regions.
        self._known: dict[int, tuple[Layout, bool, tuple[Holders, ...]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        # A path on several meshes has a dict, used as an ordered set.
        self._regions: dict[str, tuple[Holders, ...] | dict[Holders, None]] = {}
        self._listed: dict[str, list[RankBox]] = {}
        self._common: dict[str, list[tuple[int, ...]]] = {}
        self._private: dict[str, list[tuple[int, ...]]] = {}
        # By digest: the layouts of tensors whose boxes several ranks hold, by path.
        self._copied: dict[bytes, dict[str, Layout]] = {}
        self._several: dict[bytes, frozenset[str]] = {}
        self._arranged: dict[object, _Arranged] = {}
        # By what ranks stored of such tensors: the ranks.
        self._alike: dict[tuple[bytes, tuple[tuple[str, _Part], ...]], list[int]] = {}

    def add_sharded(self, digest: bytes, tensors: Iterable[Sharded]) -> None:
        copied = self._copied[digest] = {}
        for tensor in tensors:
            layout = tensor.layout
            if layout is None:
                continue
            path, shape = tensor.path, tensor.shape
            self._shapes[path] = shape
            known = self._known.get(id(layout))
            if known is None:
                number = self._layouts.setdefault(layout, len(self._layouts))
                known = layout, _has_copies(layout), (Holders(number),)
                self._known[id(layout)] = known
            _, has_copies, all_ranks = known
            if has_copies or (0 in shape and len(layout.mesh) > 1):
                copied[path] = layout
            else:
                self._add_regions(path, all_ranks)

    def _add_regions(self, path: str, added: tuple[Holders, ...]) -> None:
        before = self._regions.get(path)
        if before is None:
            self._regions[path] = added
        elif isinstance(before, dict):
            before.update(dict.fromkeys(added))
        else:
            self._regions[path] = dict.fromkeys((*before, *added))

    def add_plan(self, rank: int, inventory: Inventory, plan: RankPlan) -> None:
        own = (rank,)
        copied = self._copied.get(inventory.sharded, {})
        alike: dict[str, _Part] = {}
        for share in plan.shares:
            digest = inventory.scopes[share.scope].digest
            several = self._on_several_boxes(digest)
            items, objects = self._arrange(digest, share)
            for part in share.parts:
                for index, box in written_items(items, objects[part.number], part):
                    item = items[index]
                    path = item.path
                    if path in copied and path not in several:
                        alike[path] = _joined(alike.get(path), box, item.itemsize)
                    elif box is not None:
                        self._list(path, RankBox(rank, box.offsets, box.shape))
                    elif item.offsets is not None:
                        self._list(path, RankBox(rank, item.offsets, item.shape))
                    else:
                        self._common.setdefault(path, []).append(own)
        if alike:
            self._alike.setdefault((inventory.sharded, tuple(alike.items())), []).append(rank)

    def add_outline(self, outline: Outline, ranks: Sequence[int]) -> None:
        if not ranks:
            return
        every = tuple(ranks)
        for path in outline.private:
            self._private.setdefault(path, []).append(every)
        for path in outline.common:
            self._common.setdefault(path, []).append(every)
        for path, target in outline.follows:
            stored = {rank for each in self._common.get(target, ()) for rank in each}
            if found := tuple([rank for rank in ranks if rank in stored]):
                self._common.setdefault(path, []).append(found)
        for path, offsets, sizes in outline.boxes:
            for rank in ranks:
                self._list(path, RankBox(rank, offsets, sizes))

    def build(self) -> Owners:
        for (digest, stored), ranks in self._alike.items():
            regions: dict[Layout, tuple[Holders, ...]] = {}
            for path, part in stored:
                layout = self._copied[digest][path]
                if layout not in regions:
                    regions[layout] = tuple(_regions(layout, self._layouts[layout], ranks))
                found = regions[layout]
                if part is not None:
                    found = tuple([replace(region, part=part) for region in found])
                self._add_regions(path, found)
        placed: dict[tuple[Holders, ...], list[Tensor]] = {}
        by_identity: dict[int, list[Tensor]] = {}  # as above
        for path, held in self._regions.items():
            tensors = by_identity.get(id(held))
            if tensors is None:
                tensors = by_identity[id(held)] = placed.setdefault(tuple(held), [])
            tensors.append(Tensor(path, self._shapes[path]))
        return Owners(
            layouts=tuple(self._layouts),
            placed=tuple([Owned(key, tuple(tensors)) for key, tensors in placed.items()]),
            listed=tuple([Listed(path, tuple(boxes)) for path, boxes in self._listed.items()]),
            common=_grouped(self._common),
            private=_grouped(self._private),
        )

    def _list(self, path: str, box: RankBox) -> None:
        self._listed.setdefault(path, []).append(box)

    def _on_several_boxes(self, digest: bytes) -> frozenset[str]:
        if digest not in self._several:
            times = Counter([item.path for item in self._lists[digest]])
            self._several[digest] = frozenset([path for path, n in times.items() if n > 1])
        return self._several[digest]

    def _arrange(self, digest: bytes, share: Share) -> _Arranged:
        key = digest, share.items, share.num_holders
        if key not in self._arranged:
            items = self._lists[digest]
            if share.items is not None:
                items = [items[i] for start, stop in share.items for i in range(start, stop)]
                items.sort(key=canonical)
            self._arranged[key] = items, arrange(items, self._rules, share.num_holders)
        return self._arranged[key]


def _has_copies(layout: Layout) -> bool:
    """Returns whether several ranks hold the same box of a tensor that is not empty."""
    cut = {each.axis for each in layout.cuts}
    return any([n > 1 for axis, n in enumerate(layout.mesh.counts) if axis not in cut])


def _joined(before: _Part, box: ItemBox | None, itemsize: int) -> _Part:
    """Returns the elements of an item in a box, and in the boxes before it."""
    if box is None:
        return None
    start = box.start // itemsize
    return (start if before is None else before[0]), start + prod(box.shape)


def _regions(layout: Layout, number: int, ranks: Sequence[int]) -> list[Holders]:
    """Returns the positions of the ranks as boxes; along axes that cut nothing they are few."""
    counts, cut = layout.mesh.counts, {each.axis for each in layout.cuts}
    order = sorted(range(len(counts)), key=lambda axis: axis in cut)
    strides = c_strides([counts[axis] for axis in order])
    numbers = []
    for rank in ranks:
        at = layout.mesh.position(rank)
        assert at is not None, f"rank {rank} holds a part and is not in the mesh {layout.mesh}"
        numbers.append(sum([at[axis] * n for axis, n in zip(order, strides, strict=True)]))
    regions = []
    for start, stop in index_runs(numbers):
        if stop - start == len(layout.mesh):
            return [Holders(number)]
        for box in flat_range_boxes([counts[axis] for axis in order], start, stop):
            places = [order.index(axis) for axis in range(len(counts))]
            offsets = tuple([box.offsets[place] for place in places])
            regions.append(Holders(number, offsets, tuple([box.sizes[place] for place in places])))
    return regions


def _grouped(kept: Mapping[str, Sequence[tuple[int, ...]]]) -> tuple[Kept, ...]:
    """Groups paths with the same ranks, as far as these are the same tuples."""
    groups: dict[tuple[int, ...], tuple[Sequence[tuple[int, ...]], list[str]]] = {}
    for path, several in kept.items():
        groups.setdefault(tuple(map(id, several)), (several, []))[1].append(path)
    return tuple(
        [
            Kept(grids_of(sorted({*chain.from_iterable(several)})), tuple(paths))
            for several, paths in groups.values()
        ]
    )
