# SPDX-License-Identifier: Apache-2.0
"""Orders the chunks that a lazy staging copies; leaves, chunks and optimizers are numbers.

1. Eager chunks, with bytes of an eager leaf: the caller of the save waits for them.
2. Chunks that a step waits for.
3. Chunks that optimizers will touch, in that order.
4. The others, in the order of storing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain

from actorsnap.planning.packing import Chunk, ObjectPlan


def leaves_in(objects: Sequence[ObjectPlan], chunks: Sequence[Chunk]) -> list[frozenset[int]]:
    """Returns, per chunk, the leaves that have bytes in it."""
    return [
        frozenset(
            [objects[chunk.object].items[p.item] for p in objects[chunk.object].pieces(chunk)]
        )
        for chunk in chunks
    ]


def set_aside(sizes: Sequence[int], limit_bytes: int) -> list[int]:
    """Returns the positions of as many sizes as fit into ``limit_bytes`` together."""
    smallest = sorted(range(len(sizes)), key=sizes.__getitem__)
    total_bytes = accumulate([sizes[position] for position in smallest])
    return sorted(smallest[: sum(total <= limit_bytes for total in total_bytes)])


class Backlog:
    """The chunks of one rank's plan that are not copied yet.

    Args:
        leaves_of: The leaves in each chunk, in the order of storing.
    """

    def __init__(self, leaves_of: Sequence[Collection[int]], *, eager: Collection[int]) -> None:
        self._num_chunks = len(leaves_of)
        self._chunks_of: dict[int, list[int]] = {}
        for chunk, leaves in enumerate(leaves_of):
            for leaf in leaves:
                self._chunks_of.setdefault(leaf, []).append(chunk)
        self._left = set(range(len(leaves_of)))
        self._eager = frozenset(self.left_of(eager))
        self._eager_left = set(self._eager)
        self._awaited: set[int] = set()
        self._touched: dict[int, int] = {}
        self._queue = list(reversed(range(len(leaves_of))))
        self._sort()

    @property
    def has_eager_left(self) -> bool:
        return bool(self._eager_left)

    @property
    def is_handed_out(self) -> bool:
        """Whether each chunk is copied or being copied."""
        return not self._queue

    def take(self) -> int | None:
        """Returns the next chunk to copy, if any."""
        return self._queue.pop() if self._queue else None

    def finish(self, chunk: int) -> None:
        self._left.remove(chunk)
        self._eager_left.discard(chunk)

    def left_of(self, leaves: Iterable[int]) -> set[int]:
        """Returns the chunks with bytes of these leaves that are not copied yet."""
        chunks = chain.from_iterable([self._chunks_of.get(leaf, ()) for leaf in leaves])
        return self._left.intersection(chunks)

    def will_touch(self, leaves: Iterable[int]) -> None:
        """Notes that an optimizer will touch these leaves, in this order, after earlier ones."""
        for leaf in leaves:
            for chunk in self._chunks_of.get(leaf, ()):
                self._touched.setdefault(chunk, len(self._touched))
        self._sort()

    def promote(self, chunks: Iterable[int]) -> None:
        self._awaited.update(chunks)
        self._sort()

    def _sort(self) -> None:
        self._queue.sort(key=self._key, reverse=True)

    def _key(self, chunk: int) -> tuple[bool, bool, int, int]:
        turn = self._touched.get(chunk, self._num_chunks)
        return chunk not in self._eager, chunk not in self._awaited, turn, chunk
