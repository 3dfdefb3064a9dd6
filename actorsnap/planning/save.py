"""Decides which rank writes what, from the ranks' inventories.

A replicated leaf, and a shard that several ranks hold, is written once, by the rank that has
least to write so far. Deterministic: largest first, ties by path, then by rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorsnap.planning.packing import Item

__all__ = ["plan_save"]


def plan_save(inventories: Sequence[Sequence[Item]]) -> list[tuple[int, ...]]:
    """Balances shared items over ranks.

    Args:
        inventories: Per rank, its items in traversal order.

    Returns:
        Per rank, the indices of the items that it does *not* write, rising. Across ranks,
        each replicated path and each distinct shard is written exactly once.
    """
    loads = [0] * len(inventories)
    holders: dict[tuple[str, tuple[int, ...] | None], list[tuple[int, int]]] = {}
    for rank, inventory in enumerate(inventories):
        for index, item in enumerate(inventory):
            if item.replicated or item.offsets is not None:
                holders.setdefault((item.path, item.offsets), []).append((rank, index))
            else:
                loads[rank] += item.nbytes
    skipped: list[list[int]] = [[] for _ in inventories]
    shared = [
        (-inventories[held[0][0]][held[0][1]].nbytes, key[0], key[1] or (), held)
        for key, held in holders.items()
    ]
    shared.sort(key=lambda entry: entry[:3])
    for negative_bytes, _, _, held in shared:
        writer = min(held, key=lambda place: (loads[place[0]], place[0]))
        loads[writer[0]] -= negative_bytes
        for rank, index in held:
            if (rank, index) != writer:
                skipped[rank].append(index)
    return [tuple(sorted(indices)) for indices in skipped]
