"""The result of a capture.

The uploader process imports this module, so it must not import torch.
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

    Not garbage-collected: walks over 100,000 leaves took half of the time of a capture.

    Attributes:
        source: Its bytes; keeps their memory alive.
        kind, dtype: ``type`` and ``dtype`` of the entry; a ``bytes`` entry has no dtype.
        holders: Group ranks with the same value, if some but not all have it.
        rank_zero_wins: Whether values may differ and this rank, the first, stores its own.
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
        """Ranks that share the writing; None for all, ``()`` for this rank alone."""
        return None if self.item.replicated and not self.rank_zero_wins else self.holders

    def entry(self, stored: Stored, box: ItemBox | None = None) -> TensorEntry | BytesEntry:
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
    """A captured app state. Refers to the app state's own memory.

    Attributes:
        parts: Leaves with bytes, and finished entries, in traversal order of sorted keys.
        globs: Of replicated leaves, sorted.
        sharded: Tensors that this rank and others hold parts of.
        optimizers: See ``RankManifest``.
    """

    parts: list[Part] = field(default_factory=list)
    globs: tuple[str, ...] = ()
    sharded: tuple[Sharded, ...] = ()
    optimizers: dict[str, str] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Leaf]:
        """The parts that have bytes, in order."""
        return [part for part in self.parts if type(part) is Leaf]

    @property
    def scopes(self) -> dict[tuple[int, ...] | None, list[int]]:
        """Indices of leaves by ``Leaf.scope``, except private ones."""
        scopes: dict[tuple[int, ...] | None, list[int]] = {}
        for index, leaf in enumerate(self.leaves):
            if leaf.scope != ():
                scopes.setdefault(leaf.scope, []).append(index)
        return scopes
