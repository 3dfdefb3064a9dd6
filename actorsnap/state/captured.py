"""An app state, taken apart: leaves with bytes, and finished entries.

``capture`` makes it, saving stores it, also in the uploader process: nothing here may import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from actorsnap.format.manifest import BytesEntry, Entry, MemoryFormat, Stored, TensorEntry
from actorsnap.planning.inventory import Sharded
from actorsnap.planning.packing import Item, ItemBox
from actorsnap.state.sources import ByteSource

__all__ = ["Captured", "Leaf", "Part"]


class Leaf(msgspec.Struct, gc=False, eq=False):
    """A leaf with bytes.

    A struct, because the collector would otherwise walk over 100,000 leaves again and again
    while they are made, which took half of the time of a capture.

    Attributes:
        item: What the planner sees.
        source: Its bytes; keeps their memory alive.
        kind: ``type`` of the entry.
        dtype: ``dtype`` of the entry; empty for a ``bytes`` entry.
        requires_grad: As the tensor.
        memory_format, attributes: See ``TensorEntry``.
        holders: Ranks of the group that hold it with the same value, if some do and not all.
        rank_zero_wins: Values of the ranks may differ; this rank is the first, and stores its own.
    """

    item: Item
    source: ByteSource
    kind: Any
    dtype: str
    requires_grad: bool = False
    holders: tuple[int, ...] = ()
    rank_zero_wins: bool = False
    memory_format: MemoryFormat | None = None
    attributes: dict[str, Any] | None = None

    @property
    def scope(self) -> tuple[int, ...] | None:
        """Who writes it together: these ranks; None: all; ``()``: this one alone."""
        return None if self.item.replicated and not self.rank_zero_wins else self.holders

    def entry(self, stored: Stored, box: ItemBox | None = None) -> TensorEntry | BytesEntry:
        """Returns the manifest entry, given where the bytes of the leaf, or of a box of it,
        were stored."""
        item = self.item
        if not self.dtype:
            return BytesEntry(
                path=item.path, type=self.kind, data=stored, replicated=item.replicated
            )
        place = item if box is None else box
        return TensorEntry(
            path=item.path,
            dtype=self.dtype,
            shape=place.shape,
            data=stored,
            type=self.kind,
            requires_grad=self.requires_grad,
            global_shape=place.global_shape,
            offsets=place.offsets,
            replicated=item.replicated,
            memory_format=self.memory_format,
            attributes=self.attributes,
        )


Part: TypeAlias = Leaf | Entry


@dataclass(frozen=True, slots=True)
class Captured:
    """An app state, taken apart. Refers to the app state's own memory.

    Attributes:
        parts: Leaves with bytes, and finished entries, in traversal order: keys sorted.
        globs: What the caller has called replicated, sorted.
        sharded: The tensors of which several ranks hold parts, this one among them.
        optimizers: See ``RankManifest``.
    """

    parts: list[Part] = field(default_factory=list)
    globs: tuple[str, ...] = ()
    sharded: tuple[Sharded, ...] = ()
    optimizers: dict[str, str] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Leaf]:
        """The parts that have bytes, in the same order."""
        return [part for part in self.parts if type(part) is Leaf]

    @property
    def scopes(self) -> dict[tuple[int, ...] | None, list[int]]:
        """The indices of the leaves that ranks hold together, by those ranks; None: all of them.

        In the order of the inventory, wherever the state is known. Private leaves are left out.
        """
        scopes: dict[tuple[int, ...] | None, list[int]] = {}
        for index, leaf in enumerate(self.leaves):
            if leaf.scope != ():
                scopes.setdefault(leaf.scope, []).append(index)
        return scopes
