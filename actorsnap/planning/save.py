# SPDX-License-Identifier: Apache-2.0
"""Assigns writes to ranks, from the ranks' inventories.

The holders of common items write them once, together: each writes one range of the bytes, sized for
equal total loads. A rank's plan does not grow with the number of ranks or items.

Ranks that list the same items of a scope are a *group*. Groups with the fewest holders, which have
the least choice, come first; each fills up its holders' loads like water (``_fill``). The bytes of
a group are split into one range per writer, in rank order (``_GroupBytes``), at a near edge of an
object or item, else between rows; later, larger groups compensate. If several scopes of some ranks
list a box under one path, each holder writes all of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import prod
from typing import TypeAlias

import msgspec

from actorsnap.format.layout import MAX_HEADER_BYTES
from actorsnap.planning.inventory import Inventory, digest_of, index_runs, refuse
from actorsnap.planning.packing import (
    Arranged,
    Item,
    ObjectPart,
    PackingRules,
    RankPlan,
    Share,
    arrange,
    canonical,
)
from actorsnap.wording import named_ranks

_MAX_ROW_BYTES = 1 << 20
"""Largest row that is not cut inside."""

_MIN_RANGE_BYTES = 256 << 10
"""Smallest range for one rank; for less, opening an object costs more."""

_MOVE_DIVISOR = 64
"""Largest move of a cut to an edge: 1/64 of the adjacent ranges.

The busiest rank stays within 1.05 of the mean.
"""


class SavePlan(msgspec.Struct, frozen=True, gc=False):
    """The plans of all ranks and their digests.

    ``joiners``: per rank and shared object that it opens, in the order of ``pack``: the other
    writers, rising.
    """

    ranks: tuple[RankPlan, ...]
    digests: tuple[bytes, ...]
    joiners: tuple[tuple[tuple[int, ...], ...], ...]


def plan_save(
    inventories: Sequence[Inventory],
    lists: Mapping[bytes, Sequence[Item]],
    rules: PackingRules,
    several: Set[str] = frozenset(),
) -> SavePlan:
    """Divides shared items among their holders. Deterministic.

    Args:
        lists: The items of every scope, by digest.
        several: Paths that exist on several meshes; their items are divided only if all ranks share
            them.

    Raises:
        UsageError: Ranks disagree about the dtype, shape or holders of shared items; names all.
        ValueError: An inventory names a scope twice, or a list an item.
    """
    loads = [inventory.private_bytes for inventory in inventories]
    firsts = [0] * len(inventories)
    shares: list[list[Share]] = [[] for _ in inventories]
    joiners: list[list[tuple[int, ...]]] = [[] for _ in inventories]
    groups = _groups(inventories, lists, several)
    groups.sort(key=lambda group: (len(group.holders), group.holders))
    for group in groups:
        lowest, num_holders = group.holders[0], len(group.holders)
        objects = arrange(group.items, rules, num_holders)
        group_bytes = _GroupBytes(group.items, objects, rules)
        # Cuts move to edges and rows nearby.
        least_bytes = max(_MIN_RANGE_BYTES, 2 * rules.min_write_bytes)
        sizes = _fill(loads, group.holders, group_bytes.nbytes, least_bytes)
        writers: list[list[int]] = [[] for _ in objects]
        for rank, parts in zip(sizes, group_bytes.split(list(sizes.values())), strict=True):
            if not parts:
                continue
            scope, runs = group.places[rank]
            shares[rank].append(Share(scope, runs, lowest, firsts[lowest], num_holders, parts))
            loads[rank] += sum([part.stop - part.start for part in parts])
            for part in parts:
                writers[part.number].append(rank)
        for opener, *others in writers:
            if others:
                joiners[opener].append(tuple(others))
        firsts[lowest] += len(objects)
    plans = [RankPlan(tuple(own), first) for own, first in zip(shares, firsts, strict=True)]
    return SavePlan(
        ranks=tuple(plans),
        digests=tuple(map(digest_of, plans)),
        joiners=tuple(map(tuple, joiners)),
    )


_Place: TypeAlias = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that hold the same items of a scope.

    Attributes:
        places: Per rank (also of others), the scope's index in its inventory, and ``Share.items``.
    """

    holders: tuple[int, ...]
    items: Sequence[Item]
    places: Mapping[int, tuple[int, tuple[tuple[int, int], ...] | None]]


def _groups(
    inventories: Sequence[Inventory],
    lists: Mapping[bytes, Sequence[Item]],
    several: Set[str],
) -> list[_Group]:
    # By scope and digest: the ranks that list it, each with the scope's index in its inventory.
    scopes: dict[tuple[int, ...] | None, dict[bytes, dict[int, int]]] = {}
    for rank, inventory in enumerate(inventories):
        for index, scope in enumerate(inventory.scopes):
            by_digest = scopes.setdefault(scope.ranks, {})
            by_digest.setdefault(scope.digest, {})[rank] = index
        if len({scope.ranks for scope in inventory.scopes}) < len(inventory.scopes):
            raise ValueError(f"rank {rank} lists a scope twice")
    groups: list[_Group] = []
    complaints = _differing_globs(inventories)
    for ranks, by_digest in scopes.items():
        undivided: Set[_Place] = frozenset()
        if ranks is not None:
            complaints += _differing_holders(ranks, by_digest, lists)
            if several:
                listed = chain.from_iterable([lists[digest] for digest in by_digest])
                undivided = {(i.path, i.offsets) for i in listed if i.path in several}
        if len(by_digest) > 1 or undivided:
            groups += _group_by_holders(by_digest, lists, undivided, complaints)
            continue
        for digest, indices in by_digest.items():
            places = {rank: (index, None) for rank, index in indices.items()}
            groups.append(_Group(tuple(places), lists[digest], places))
    refuse(
        complaints,
        "the ranks disagree about shared leaves. Pass the same app state and the same replicated= "
        "on all of them; replicated= must not match leaves that differ between ranks:",
    )
    return groups


def _differing_globs(inventories: Sequence[Inventory]) -> list[str]:
    first = inventories[0].globs
    return [
        f"replicated= is {list(first)} on rank 0, {list(inventory.globs)} on rank {rank}"
        for rank, inventory in enumerate(inventories)
        if inventory.globs != first
    ]


def _differing_holders(
    ranks: tuple[int, ...],
    by_digest: Mapping[bytes, Mapping[int, int]],
    lists: Mapping[bytes, Sequence[Item]],
) -> list[str]:
    absent = sorted(set(ranks).difference(*by_digest.values()))
    complaints = []
    for digest, indices in by_digest.items():
        strangers = sorted(indices.keys() - set(ranks))
        example = lists[digest][0].path if lists[digest] else ""
        shared = f"{example!r} is shared by {named_ranks(ranks)}"
        if absent:
            complaints.append(
                f"{shared} according to {named_ranks(indices)}, but not "
                f"according to {named_ranks(absent)}"
            )
        if strangers:
            complaints.append(f"{shared}, but reported by {named_ranks(strangers)} as well")
    return complaints


def _group_by_holders(
    by_digest: Mapping[bytes, Mapping[int, int]],
    lists: Mapping[bytes, Sequence[Item]],
    undivided: Set[_Place],
    complaints: list[str],
) -> list[_Group]:
    """Groups the items of a scope whose ranks list different items.

    Each holder of an item in ``undivided`` stores all of it: cuts of several scopes would cross.
    """
    listed = [(lists[digest], indices) for digest, indices in by_digest.items()]
    # By place and the values that must agree: list number and index in the list.
    variants_of: dict[_Place, dict[object, list[tuple[int, int]]]] = {}
    for number, (items, _) in enumerate(listed):
        for index, item in enumerate(items):
            value = (item.dtype, item.shape, item.nbytes, item.itemsize, item.global_shape)
            variants = variants_of.setdefault((item.path, item.offsets), {})
            variants.setdefault(value, []).append((number, index))
    # By list numbers and whether undivided: the indices in those lists.
    members: dict[tuple[tuple[int, ...], bool], list[tuple[int, ...]]] = {}
    for place, variants in variants_of.items():
        if len(variants) > 1:
            complaints.append(_describe_variants(listed, variants.values()))
            continue
        for at in variants.values():
            numbers, indices = zip(*at, strict=True)
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"{listed[numbers[0]][0][indices[0]].path!r} is listed twice")
            members.setdefault((numbers, place in undivided), []).append(indices)
    groups = []
    for (numbers, is_undivided), rows in members.items():
        items = [
            _whole_if_any([listed[n][0][i] for n, i in zip(numbers, row, strict=True)])
            for row in rows
        ]
        items.sort(key=canonical)
        places = {
            rank: (scope, runs)
            for number, column in zip(numbers, zip(*rows, strict=True), strict=True)
            for runs in [index_runs(column)]
            for rank, scope in listed[number][1].items()
        }
        holders = tuple(sorted(places))
        writers = [(rank,) for rank in holders] if is_undivided else [holders]
        groups += [_Group(ranks, items, places) for ranks in writers]
    return groups


def _whole_if_any(items: Sequence[Item]) -> Item:
    if items[0].is_whole or not any(item.is_whole for item in items):
        return items[0]
    return msgspec.structs.replace(items[0], is_whole=True)


def _describe_variants(
    listed: Sequence[tuple[Sequence[Item], Mapping[int, int]]],
    variants: Iterable[Sequence[tuple[int, int]]],
) -> str:
    lines = []
    for variant in variants:
        number, index = variant[0]
        item = listed[number][0][index]
        whole = "" if item.global_shape is None else f" of {item.global_shape}"
        rank = min([min(listed[n][1]) for n, _ in variant])
        lines.append((rank, f"{item.dtype} {item.shape}{whole} on rank {rank}"))
    offsets = "" if item.offsets is None else f" at {item.offsets}"
    return f"{item.path!r}{offsets} is " + ", ".join([text for _, text in sorted(lines)])


def _fill(
    loads: Sequence[int], holders: Sequence[int], nbytes: int, least_bytes: int
) -> dict[int, int]:
    """Returns each writer's bytes, in rank order, for equal loads; at least ``least_bytes``."""
    order = sorted(holders, key=lambda rank: (loads[rank], rank))
    count, below = 1, loads[order[0]]
    while count < len(order):
        load = loads[order[count]]
        if (nbytes + below + load) // (count + 1) - load < least_bytes:
            break
        count, below = count + 1, below + load
    level, rest = divmod(nbytes + below, count)
    return {
        rank: level - loads[rank] + (position < rest)
        for rank, position in sorted(zip(order[:count], range(count), strict=True))
    }


class _GroupBytes:
    def __init__(
        self, items: Sequence[Item], objects: Sequence[Arranged], rules: PackingRules
    ) -> None:
        self._rules = rules
        self._items = [items[index] for arranged in objects for index in arranged.items]
        self._edges = [0, *accumulate([item.nbytes for item in self._items])]
        counts = accumulate([len(arranged.items) for arranged in objects])
        self._object_edges = [0, *[self._edges[count] for count in counts]]
        self.nbytes = self._edges[-1]

    def split(self, sizes: Sequence[int]) -> list[tuple[ObjectPart, ...]]:
        """Returns the parts of the objects in consecutive ranges of about these sizes."""
        cuts = [0]
        target = 0
        for left, right in pairwise(sizes):
            target += left
            cut = max(cuts[-1], self._cut(target, min(left, right) // _MOVE_DIVISOR))
            cuts.append(self._with_room(cuts[-1], cut))
        cuts.append(self.nbytes)
        ranges: list[tuple[ObjectPart, ...]] = []
        number, count = 0, len(self._object_edges) - 1
        for begin, end in pairwise(cuts):
            parts: list[ObjectPart] = []
            # The writer of the last byte also gets empty objects.
            is_last = end == self.nbytes
            while number < count and (is_last or begin < end):
                low, high = self._object_edges[number : number + 2]
                if low >= end and not is_last:
                    break
                start, stop = max(begin, low), min(end, high)
                is_shared = (start, stop) != (low, high)
                parts.append(ObjectPart(number, start - low, stop - low, start == low, is_shared))
                if high > end:
                    break
                number += 1
            ranges.append(tuple(parts))
        return ranges

    def _cut(self, target: int, slack: int) -> int:
        for edges in (self._object_edges, self._edges):
            index = bisect_right(edges, target) - 1
            low, high = edges[index], edges[index + 1]
            nearest = low if target - low <= high - target else high
            if abs(nearest - target) <= slack or not self._rules.has_joined_writers:
                return nearest
        row = _row_bytes(self._items[index])
        return low + (target - low + row // 2) // row * row

    def _with_room(self, previous: int, cut: int) -> int:
        """Returns ``cut``, or the edge or cut before it if the range between is too small."""
        index = bisect_right(self._object_edges, cut) - 1
        begin = max(previous, self._object_edges[index])
        if begin == cut:
            return cut
        low, high = self._object_edges[index : index + 2]
        # The header's size is not known here.
        least_bytes = self._rules.least_write_bytes(high - low + MAX_HEADER_BYTES)
        return cut if cut - begin >= least_bytes else begin


def _row_bytes(item: Item) -> int:
    """Returns the granularity of cuts: inner dims of at most ``_MAX_ROW_BYTES``."""
    if item.is_whole or prod(item.shape) * item.itemsize != item.nbytes:
        return item.nbytes
    row = item.itemsize
    for size in reversed(item.shape[1:]):
        if row * size > _MAX_ROW_BYTES:
            break
        row *= size
    return row
