"""What a rank holds, told apart by who else holds it: the same wherever the state is known.

A participant makes its inventory of it. Where the bytes lie elsewhere, as the uploader process'
do, both ends compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actorsnap.format.checksum import MAX_BLOCK_BYTES, crc32c
from actorsnap.planning.inventory import Division, classes_of, copies_digest
from actorsnap.planning.packing import canonical
from actorsnap.state.leaves import Captured, Leaf
from actorsnap.state.memory import ByteSource

__all__ = ["CopyHashes", "Stock", "checksums_of"]


@dataclass(frozen=True, slots=True)
class Stock:
    """A rank's leaves in scopes.

    Attributes:
        scopes: Who holds each, and the indices of its leaves, in the order of the inventory.
            ``()``: nobody knows; those come last.
        num_open: How many nobody knows of.
    """

    scopes: list[tuple[tuple[int, ...] | None, list[int]]]
    num_open: int

    @classmethod
    def of(cls, captured: Captured, leaves: Sequence[Leaf], division: Division) -> Stock:
        """Of those leaves of the state, what others may hold as well told apart so."""
        class_of = classes_of(captured.sharded, division)
        scopes: dict[tuple[int, ...] | None, list[int]] = {}
        classes: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if leaf.scope != ():
                scopes.setdefault(leaf.scope, []).append(index)
            elif leaf.is_copied and leaf.item.path in class_of:
                classes.setdefault(class_of[leaf.item.path], []).append(index)
        found = list(scopes.items())
        for indices in classes.values():
            # Not as this rank has them.
            indices.sort(key=lambda index: canonical(leaves[index].item))
            found.append(((), indices))
        return cls(found, len(classes))

    @property
    def open_scopes(self) -> list[list[int]]:
        """Those that nobody knows of."""
        return [indices for _, indices in self.scopes[len(self.scopes) - self.num_open :]]


class CopyHashes:
    """The contents of what other ranks may hold as well; each leaf is hashed once."""

    def __init__(self) -> None:
        self._checksums: dict[int, list[int]] = {}

    def take(self, stock: Stock, leaves: Sequence[Leaf]) -> tuple[bytes, ...]:
        """See ``messages.Join.copies``. Blocks; for worker threads."""
        known = self._checksums
        for indices in stock.open_scopes:
            for index in indices:
                if index not in known:
                    known[index] = checksums_of(leaves[index].source)
        return tuple(
            [copies_digest([known[index] for index in indices]) for indices in stock.open_scopes]
        )


def checksums_of(source: ByteSource) -> list[int]:
    """The checksums of a leaf's bytes, in blocks of the largest size."""
    checksums: list[int] = []
    buffer = memoryview(bytearray(0 if source.is_addressable else MAX_BLOCK_BYTES))
    for start in range(0, source.nbytes, MAX_BLOCK_BYTES):
        stop = min(start + MAX_BLOCK_BYTES, source.nbytes)
        if source.is_addressable:
            block = source.view(start, stop)
        else:
            block = buffer[: stop - start]
            source.copy_into(start, block)
        checksums.append(crc32c(block))
    return checksums
