# SPDX-License-Identifier: Apache-2.0
"""Collects the checksums of stored chunks, and makes the rank manifest from them."""

from __future__ import annotations

from collections.abc import Sequence

from actorsnap.actors.items import StagedChunk
from actorsnap.format.checksum import choose_block_bytes, crc32c
from actorsnap.format.manifest import (
    CompositeEntry,
    Entry,
    ObjectRecord,
    RankManifest,
    SaveRecord,
    Stored,
    StoredChunk,
    ViewEntry,
)
from actorsnap.planning.packing import Item, ObjectPlan
from actorsnap.state.sources import Captured, Leaf, Part
from actorsnap.state.tree import part_path


class ChecksumLedger:
    """Collects the block checksums of one object's items, in any order.

    Blocks are numbered across items. Chunks are split between blocks, so a chunk's blocks are
    adjacent.
    """

    def __init__(self, plan: ObjectPlan, items: Sequence[Item]) -> None:
        self.plan = plan
        self._items = items
        self._chunks: dict[int, StoredChunk] = {}
        self._first = [0]
        self._block_bytes: list[int] = []
        for start, end, item in zip(plan.starts, plan.ends, items, strict=True):
            block_bytes = choose_block_bytes(end - start, is_shard=item.is_shard)
            self._block_bytes.append(block_bytes)
            self._first.append(self._first[-1] - (start - end) // block_bytes)
        self._values: list[int | None] = [None] * self._first[-1]
        self._recorded_bytes = 0

    @property
    def key(self) -> str:
        return self.plan.key

    def block_bytes(self, item: int) -> int:
        return self._block_bytes[item]

    def itemsizes(self, staged: StagedChunk) -> list[int]:
        return [self._items[piece.item].itemsize for piece in staged.pieces]

    def record_chunk(self, chunk: StoredChunk) -> None:
        self._chunks[chunk.start] = chunk

    def record(self, staged: StagedChunk, checksums: Sequence[int]) -> None:
        """Records a stored chunk and the checksums of its blocks."""
        self._recorded_bytes += staged.chunk.stop - staged.chunk.start
        if checksums:
            piece = staged.pieces[0]
            first = self._first[piece.item] + piece.start // self._block_bytes[piece.item]
            self._values[first : first + len(checksums)] = checksums

    def check_complete(self) -> None:
        """Raises ``RuntimeError`` unless all planned bytes are stored."""
        planned_bytes = sum([chunk.stop - chunk.start for chunk in self.plan.chunks])
        if self._recorded_bytes != planned_bytes:
            raise RuntimeError(
                f"{self.key}: {self._recorded_bytes} of {planned_bytes} bytes were stored"
            )

    def stored(self, item: int, number: int) -> Stored:
        """Returns the location of an item, in object ``number`` of the rank manifest."""
        first, stop = self._first[item], self._first[item + 1]
        found = self._values
        # Most leaves have one block.
        values = (found[first],) if stop - first == 1 else tuple(found[first:stop])
        assert None not in values, "a block was never hashed"
        return Stored(number, self.plan.starts[item], self.plan.ends[item], values)  # type: ignore[arg-type]

    def to_record(self) -> ObjectRecord:
        return ObjectRecord(
            key=self.plan.key,
            size=self.plan.size,
            header_bytes=len(self.plan.header),
            header_crc32c=crc32c(self.plan.header),
            chunks=tuple([self._chunks[start] for start in sorted(self._chunks)]),
        )


def manifest_of(
    captured: Captured,
    ledgers: Sequence[ChecksumLedger],
    *,
    attempt: str,
    rank: int,
    save: SaveRecord,
) -> RankManifest:
    """Returns the rank manifest, from the ledgers of all objects of the rank.

    Leaves of ``captured`` that other ranks store are in no plan.
    """
    for ledger in ledgers:
        ledger.check_complete()
    return RankManifest(
        attempt=attempt,
        rank=rank,
        objects=tuple([ledger.to_record() for ledger in ledgers]),
        entries=_entries_of(captured.parts, ledgers),
        save=save,
        optimizers=captured.optimizers,
    )


def _entries_of(parts: Sequence[Part], ledgers: Sequence[ChecksumLedger]) -> tuple[Entry, ...]:
    # A place is a number, ``position * num_objects + object``: a tuple per leaf would trigger full
    # garbage collections.
    num_objects = len(ledgers)
    first_places: dict[int, int] = {}
    further_places: dict[int, list[int]] = {}  # of leaves that several objects share
    for number, ledger in enumerate(ledgers):
        for position, item in enumerate(ledger.plan.items):
            place = position * num_objects + number
            if first_places.setdefault(item, place) != place:
                further_places.setdefault(item, []).append(place)
    entries: list[Entry] = []
    absent: set[str] = set()
    leaf = -1
    for part in parts:
        if not isinstance(part, Leaf):
            entries.append(part)
            continue
        leaf += 1
        first_place = first_places.get(leaf)
        if first_place is None:
            absent.add(part.item.path)
            continue
        for place in (first_place, *further_places.get(leaf, ())):
            position, number = divmod(place, num_objects)
            ledger = ledgers[number]
            entries.append(part.entry(ledger.stored(position, number), ledger.plan.boxes[position]))
    if absent:
        entries = [entry for entry in entries if not _refers_to(entry, absent)]
    return tuple(entries)


def _refers_to(entry: Entry, absent: set[str]) -> bool:
    """Returns whether another rank stores the entry's target: it is useless here."""
    match entry:
        case ViewEntry():
            return entry.of in absent
        case CompositeEntry():
            # Several ranks may store its parts: the entry belongs to the rank of the first one.
            return part_path(entry.path, entry.parts[0]) in absent
    return False
