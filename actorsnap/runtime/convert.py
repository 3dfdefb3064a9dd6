# SPDX-License-Identifier: Apache-2.0
"""Copies a checkpoint of another format: writes a snapshot of ours, with checksums from then on.

The ranks of the source stay ranks. Objects are packed as in a save, and each chunk is read from the
source, hashed and written, within the memory budget. Data that a rank before has stored for all is
not stored again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
import numpy as np

from actorsnap.actors.abandonable import garbage_left
from actorsnap.actors.checksum_ledger import ChecksumLedger, manifest_of
from actorsnap.actors.commit import check_stored
from actorsnap.actors.fetcher import RangeRequest
from actorsnap.actors.items import StagedChunk
from actorsnap.actors.uploader import hash_chunk
from actorsnap.errors import UsageError
from actorsnap.format.layout import dtype_itemsize, manifest_key
from actorsnap.format.manifest import (
    BytesEntry,
    Commit,
    RankManifest,
    SaveRecord,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
    features_of,
    with_values,
)
from actorsnap.format.tables import encode_rank_manifest
from actorsnap.planning.packing import Chunk, Item, check_memory, pack
from actorsnap.planning.transfers import FIRST_AT_ONCE
from actorsnap.runtime.local_engine import rules_for, utc
from actorsnap.runtime.source import OpenSource
from actorsnap.state import objects
from actorsnap.state.sources import Captured, HostMemory, Leaf, Part
from actorsnap.storage.base import ObjectWriter, Storage, for_each

_NOWHERE = HostMemory(0, 0, None)
"""Stands for the bytes of leaves, which come from files."""


class _Origin(msgspec.Struct, frozen=True, eq=False):
    """Where a leaf's bytes come from: a range of a file; or ``data``, of a long value."""

    stored: Stored | None
    data: bytes = b""


@dataclass(slots=True, eq=False)
class _ViewSink:
    """Fills memory of a lease."""

    memory: memoryview
    is_addressable = True
    pinner = None

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def view(self, start: int, stop: int) -> memoryview:
        return self.memory[start:stop]

    def copy_from(self, start: int, data: memoryview) -> None:
        self.memory[start : start + len(data)] = data


@dataclass(eq=False, repr=False)
class Conversion:
    """Writes a checkpoint of another format as a snapshot, all but the commit object.

    Args:
        opened: Its reader has read the commit.
        attempt: Folder of the snapshot's objects; running until the commit.
        on_moved: Gets key and number of leaf bytes of each written chunk.
        on_copied: Gets key and size of each complete object.

    Attributes:
        total_bytes: Bytes of all leaves; after ``plan``.
    """

    opened: OpenSource
    target: Storage
    attempt: str
    _: KW_ONLY
    on_moved: Callable[[str, int], Awaitable[None]]
    on_copied: Callable[[str, int], Awaitable[None]]

    def __post_init__(self) -> None:
        opened = self.opened
        foreign = opened.reader.foreign
        assert foreign is not None
        self._source, self._manifests = foreign.commit, foreign.manifests
        self._run_blocking = opened.errands.run_blocking
        self._options = msgspec.structs.replace(opened.source.options, compression=None)
        self._fetcher = opened.fetcher(verify=False)
        self._stored: set[tuple[str, tuple[int, ...] | None]] = set()
        self._sizes: list[int] = []
        self._ranks: list[tuple[RankManifest, Captured, list[_Origin]]] = []
        self._has_values = False
        self.total_bytes = 0

    def plan(self) -> None:
        """Finds what to store. Blocks."""
        for manifest in self._manifests:
            parts, origins = self._parts_of(manifest)
            captured = Captured(parts=parts, optimizers=dict(manifest.optimizers or {}))
            self.total_bytes += sum([leaf.item.nbytes for leaf in captured.leaves])
            self._has_values |= captured.has_values
            self._ranks.append((manifest, captured, origins))

    async def run(self) -> Commit:
        """Returns the commit object to write; after ``plan``.

        Raises:
            SnapshotReplaced: The source has changed meanwhile.
            ActorSnapError: Reading or writing failed. The caller must delete the attempt's objects.
        """
        for manifest, captured, origins in self._ranks:
            await self._convert(manifest, captured, origins)
        await check_stored(self.target, self.attempt, self._sizes)
        await self.opened.reader.check_replaced()
        return self._record.commit(attempt=self.attempt, created=utc(time.time()))

    @property
    def _record(self) -> SaveRecord:
        source, features = self._source, features_of(is_compressed=False, has_owners=False)
        return SaveRecord(
            world_size=source.world_size,
            features=with_values(features) if self._has_values else features,
            fsync=True,
            step=source.step,
            metadata=source.metadata,
        )

    async def _convert(
        self, manifest: RankManifest, captured: Captured, origins: Sequence[_Origin]
    ) -> None:
        """Writes the objects of a rank, then its manifest."""
        items = [leaf.item for leaf in captured.leaves]
        budget = self.opened.host.resources.budget
        rules = rules_for(self._options, self.target.capabilities, budget.limit_bytes)
        plans = pack(items, attempt=self.attempt, rank=manifest.rank, rules=rules)
        check_memory(plans, rules, budget.limit_bytes)
        ledgers = [ChecksumLedger(plan, [items[item] for item in plan.items]) for plan in plans]

        async def write(ledger: ChecksumLedger) -> None:
            await self._write_object(manifest, ledger, origins)

        at_once = self.target.capabilities.preferred_parallel_objects
        await for_each(ledgers, write, at_once=at_once)
        encoded = await self._run_blocking(self._encode, captured, ledgers, manifest.rank)
        key = manifest_key(self.attempt, manifest.rank)
        await self.target.put(key, [memoryview(encoded)])
        self._sizes.append(len(encoded))
        await self.on_copied(key, len(encoded))

    def _encode(self, captured: Captured, ledgers: Sequence[ChecksumLedger], rank: int) -> bytes:
        save = self._record
        if rank:
            save = msgspec.structs.replace(save, metadata={})
        made = manifest_of(captured, ledgers, attempt=self.attempt, rank=rank, save=save)
        return encode_rank_manifest(made)

    def _parts_of(self, manifest: RankManifest) -> tuple[list[Part], list[_Origin]]:
        """Returns what the rank stores, and where each of its leaves comes from."""
        parts: list[Part] = []
        origins: list[_Origin] = []
        dropped: set[str] = set()

        def add(leaf: Leaf, origin: _Origin) -> None:
            parts.append(leaf)
            origins.append(origin)

        for entry in manifest.entries:
            if isinstance(entry, TensorEntry | BytesEntry):
                if self._is_stored(entry):
                    dropped.add(entry.path)
                else:
                    add(_leaf_of(entry), _Origin(entry.data))
            elif isinstance(entry, ValueEntry):
                if (array := _array_of(entry)) is not None:
                    add(*array)
                    continue
                kind, data = self._encoded(entry)
                if kind is None:
                    parts.append(entry)
                else:
                    add(
                        _bytes_leaf(entry.path, kind, len(data), entry.replicated),
                        _Origin(None, data),
                    )
            elif not (isinstance(entry, ViewEntry) and entry.of in dropped):
                parts.append(entry)
        return parts, origins

    def _encoded(self, entry: ValueEntry) -> tuple[str | None, Any]:
        """Returns type and bytes of a value that is too long for a manifest; else None.

        Raises:
            UsageError: It would be pickled, and pickles are not allowed. Or it is ``Refused``.
        """
        value = objects.decode_inline(entry.value, entry.path)
        if type(entry.value) is not objects.Opaque:
            return objects.encode(value, entry.path)
        if not self._options.allow_pickle:
            kind = type(value)
            raise UsageError(
                f"{entry.path!r} is of type {kind.__module__}.{kind.__qualname__}, which a "
                "snapshot only stores as a pickle. If you trust the file, pass "
                "options=Options(allow_pickle=True)"
            )
        return "pickle", objects.pickled(value)

    def _is_stored(self, entry: TensorEntry | BytesEntry) -> bool:
        """Whether a rank before has stored the same for all; notes it, if not."""
        offsets = entry.offsets if isinstance(entry, TensorEntry) else None
        if offsets is None and not entry.replicated:
            return False
        place = entry.path, offsets
        is_stored = place in self._stored
        self._stored.add(place)
        return is_stored

    async def _write_object(
        self, manifest: RankManifest, ledger: ChecksumLedger, origins: Sequence[_Origin]
    ) -> None:
        plan = ledger.plan
        writer = await self.target.writer(plan.key, plan.size)

        async def move(chunk: Chunk) -> None:
            await self._move(manifest, ledger, origins, chunk, writer)

        try:
            at_once = min(self._options.num_uploaders, FIRST_AT_ONCE)
            await for_each(plan.chunks, move, at_once=at_once)
            await writer.complete()
        except BaseException:
            await self.opened.errands.clean_up(writer.abort, garbage_left(self.target.url))
            raise
        await self.on_copied(plan.key, plan.size)

    async def _move(
        self,
        manifest: RankManifest,
        ledger: ChecksumLedger,
        origins: Sequence[_Origin],
        chunk: Chunk,
        writer: ObjectWriter,
    ) -> None:
        plan = ledger.plan
        head = memoryview(plan.header)[chunk.start : min(chunk.stop, len(plan.header))]
        nbytes = chunk.stop - chunk.start - len(head)
        pieces = list(plan.pieces(chunk))
        with await self.opened.host.resources.budget.lease(max(1, nbytes)) as lease:
            requests: list[RangeRequest] = []
            at = 0
            for piece in pieces:
                origin = origins[plan.items[piece.item]]
                view = lease.view[at : at + piece.stop - piece.start]
                at += len(view)
                if origin.stored is None:
                    view[:] = origin.data[piece.start : piece.stop]
                    continue
                start = origin.stored.start + piece.start
                wanted = Stored(origin.stored.object, start, start + len(view), ())
                requests.append(RangeRequest(manifest, wanted, _ViewSink(view)))
            await self._fetcher.fetch(requests)
            staged = StagedChunk(chunk, head, pieces, (), lease)
            views, checksums, whole = await self._run_blocking(hash_chunk, staged, ledger)
            await writer.write_at(chunk.start, [head, *views], whole)
        ledger.record(staged, checksums)
        await self.on_moved(plan.key, nbytes)


def _array_of(entry: ValueEntry) -> tuple[Leaf, _Origin] | None:
    """Returns what to store of a numpy value, whose bytes were in a pickle."""
    value = entry.value.value if type(entry.value) is objects.Opaque else None
    kind = objects.numpy_kind(value)
    if kind is None:
        return None
    array = np.asarray(value)
    item = Item(
        path=entry.path,
        dtype=array.dtype.name,
        shape=array.shape,
        nbytes=array.nbytes,
        itemsize=array.itemsize,
        replicated=entry.replicated,
    )
    return Leaf(item, _NOWHERE, kind, array.dtype.str), _Origin(None, array.tobytes())


def _leaf_of(entry: TensorEntry | BytesEntry) -> Leaf:
    nbytes = entry.data.stop - entry.data.start
    if isinstance(entry, BytesEntry):
        return _bytes_leaf(entry.path, entry.type, nbytes, entry.replicated)
    itemsize = dtype_itemsize(entry.dtype)
    assert itemsize is not None
    return Leaf(
        item=Item(
            path=entry.path,
            dtype=entry.dtype,
            shape=entry.shape,
            nbytes=nbytes,
            itemsize=itemsize,
            replicated=entry.replicated,
            offsets=entry.offsets,
            global_shape=entry.global_shape,
        ),
        source=_NOWHERE,
        kind=entry.type,
        dtype=entry.dtype,
        requires_grad=entry.requires_grad,
        memory_format=entry.memory_format,
        attributes=entry.attributes,
    )


def _bytes_leaf(path: str, kind: Any, nbytes: int, replicated: bool) -> Leaf:
    item = Item(
        path=path, dtype="uint8", shape=(nbytes,), nbytes=nbytes, itemsize=1, replicated=replicated
    )
    return Leaf(item=item, source=_NOWHERE, kind=kind, dtype="")
