# SPDX-License-Identifier: Apache-2.0
"""Snapshots of many ranks without ranks: planned, packed and described by the ranks' own code.

One rank at a time is in memory. ``python -m tests.support.many FOLDER KIND RANKS TENSORS`` writes
one whose data objects have only their headers and sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from actorsnap.actors.checksum_ledger import ChecksumLedger, manifest_of
from actorsnap.format.checksum import block_checksums, crc32c
from actorsnap.format.geometry import Box
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import (
    COMMIT_KEY,
    ContainerEntry,
    ManifestRecord,
    RankManifest,
    SaveRecord,
    ValueEntry,
    ViewEntry,
    encode_commit,
    encoder,
    features_of,
    seal,
)
from actorsnap.format.owners import Grid, Layout, MeshCut, deflate_owners, encode_owners, owners_key
from actorsnap.format.tables import encode_rank_manifest
from actorsnap.planning.inventory import (
    Inventory,
    Sharded,
    build_inventory,
    on_several_meshes,
    ranks_digest,
)
from actorsnap.planning.ownership import held_boxes, owners_of
from actorsnap.planning.packing import Item, ItemBox, ObjectPlan, PackingRules, pack
from actorsnap.planning.save import plan_save
from actorsnap.state.sources import Captured, HostMemory, Leaf

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
RULES = PackingRules(chunk_bytes=2 << 20, max_objects=2, min_object_bytes=64 << 20)
_NOWHERE = HostMemory(0, 0, None)


def layout_of(kind: str, ranks: int) -> Layout:
    """``fsdp``; ``hsdp`` with two copies; ``fsdp_tp`` with two ranks per tensor-parallel group."""
    if kind == "fsdp":
        return Layout(Grid(0, ((ranks, 1),)), (MeshCut(0, 0),))
    mesh = Grid(0, ((2, ranks // 2), (ranks // 2, 1)))
    if kind == "hsdp":
        return Layout(mesh, (MeshCut(1, 0),))
    mesh = Grid(0, ((ranks // 2, 2), (2, 1)))
    return Layout(mesh, (MeshCut(1, 1), MeshCut(0, 0)))


class Many:
    """The app states of many ranks.

    Args:
        kind: ``ddp``, or see ``layout_of``.
        tensors: Of the model, for each rank.
        width: Columns; a rank has ``rows`` rows of sharded tensors, the last one fewer.
        older: Without tables and owner index.
    """

    def __init__(
        self,
        kind: str,
        ranks: int,
        tensors: int,
        *,
        width: int = 8,
        rows: int = 2,
        older: bool = False,
        rules: PackingRules = RULES,
    ) -> None:
        self.kind, self.ranks, self.older, self.rules = kind, ranks, older, rules
        self.shape = (ranks * rows - 1, width)
        self.paths = [f"model/layers.{n // 9}.block.{n % 9}.weight" for n in range(tensors)]
        features = features_of(is_compressed=False, has_owners=not older and ranks > 1)
        if older:
            features = tuple([each for each in features if each != "tables"])
        self.save = SaveRecord(world_size=ranks, features=features, step=7)
        self._numbers = {path: number for number, path in enumerate(self.paths)}

    def value(self, path: str) -> np.ndarray[Any, Any]:
        """Returns a whole tensor."""
        number = self._numbers[path]
        return (np.arange(np.prod(self.shape)) + 1000 * number).reshape(self.shape).astype("<f4")

    def write(self, folder: Path, *, has_data: bool = True) -> Path:
        """Makes a committed snapshot.

        Args:
            has_data: Otherwise checksums are arbitrary, and data objects sparse.
        """
        records = [
            self._put_manifest(folder, each) for each in self.manifests(folder, has_data=has_data)
        ]
        if "owners" in self.save.features:
            data = encode_owners(ATTEMPT, self.ranks, deflate_owners(self.owners))
            _put(folder / owners_key(ATTEMPT), data)
        commit = self.save.commit(
            attempt=ATTEMPT,
            created="2026-01-01T00:00:00.000000Z",
            manifests=tuple(records) if self.older else (),
        )
        _put(folder / COMMIT_KEY, encode_commit(commit))
        return folder

    def manifests(
        self, folder: Path | None = None, *, has_data: bool = False
    ) -> Iterator[RankManifest]:
        """Yields the rank manifests; stores data objects in the folder."""
        inventories: list[Inventory] = []
        lists: dict[bytes, tuple[Item, ...]] = {}
        sharded: dict[bytes, tuple[Sharded, ...]] = {}
        outlines: dict[bytes, Any] = {}
        for rank in range(self.ranks):
            captured = self.captured(rank)
            inventory, own = _inventory(captured)
            if inventories and inventories[-1] == inventory:
                inventory = inventories[-1]
            inventories.append(inventory)
            lists.update({digest: items for digest, items in own.items() if digest not in lists})
            outlines.setdefault(inventory.outline, captured.outline)
            if captured.sharded:
                sharded.setdefault(inventory.sharded, captured.sharded)
        together = [
            ([r for r, i in enumerate(inventories) if i.sharded == digest], held)
            for digest, held in sharded.items()
        ]
        plan = plan_save(inventories, lists, self.rules, on_several_meshes(together))
        self.owners = owners_of(inventories, lists, sharded, outlines, plan.ranks, self.rules)
        for rank in range(self.ranks):
            captured = self.captured(rank)
            plans = pack(
                [leaf.item for leaf in captured.leaves],
                attempt=ATTEMPT,
                rank=rank,
                rules=self.rules,
                scopes=list(captured.scopes.values()),
                plan=plan.ranks[rank],
            )
            ledgers = [self._ledger(captured, each, has_data) for each in plans]
            if folder is not None:
                for each in plans:
                    self._store(folder, captured, each, has_data)
            yield manifest_of(captured, ledgers, attempt=ATTEMPT, rank=rank, save=self.save)

    def captured(self, rank: int) -> Captured:
        parts: list[Any] = [
            ContainerEntry(path="extra", type="dict"),
            ContainerEntry(path="extra/list", type="list"),
            ValueEntry(path="extra/list/0", value=rank),
            ValueEntry(path="extra/lr", value=0.5),
            ValueEntry(path="extra/step", value=7, replicated=True),
            ContainerEntry(path="model", type="ordered_dict"),
        ]
        sharded: list[Sharded] = []
        if self.kind == "ddp":
            nbytes = int(np.prod(self.shape)) * 4
            items = [Item(p, "float32", self.shape, nbytes, 4, True) for p in self.paths]
            parts += [Leaf(item, _NOWHERE, "tensor", "float32") for item in items]
        else:
            layout = layout_of(self.kind, self.ranks)
            mesh, digest = tuple(range(self.ranks)), ranks_digest(tuple(range(self.ranks)))
            at = layout.mesh.position(rank)
            assert at is not None
            half = self.ranks // 2
            holders = (rank % half, rank % half + half) if self.kind == "hsdp" else ()
            boxes = held_boxes(layout, self.shape, at)
            for path in self.paths:
                sharded.append(Sharded(path, "float32", self.shape, digest, len(mesh), layout))
                for box in boxes:
                    nbytes = box.volume * 4
                    item = Item(
                        path, "float32", box.sizes, nbytes, 4, False, box.offsets, self.shape
                    )
                    parts.append(Leaf(item, _NOWHERE, "parameter", "float32", holders=holders))
        generator = Item("rng", "uint8", (16,), 16, 1)
        parts.append(Leaf(generator, _NOWHERE, "tensor", "uint8"))
        parts.append(
            ViewEntry(path="rng_view", of="rng", dtype="uint8", shape=(4,), strides=(1,), offset=4)
        )
        return Captured(parts, sharded=tuple(sharded))

    def _ledger(self, captured: Captured, plan: ObjectPlan, has_data: bool) -> ChecksumLedger:
        leaves = captured.leaves
        items = [leaves[item].item for item in plan.items]
        ledger = ChecksumLedger(plan, items)
        columns = zip(items, plan.starts, plan.ends, plan.boxes, strict=True)
        for position, (item, start, end, box) in enumerate(columns):
            size = ledger.block_bytes(position)
            values = (0x9E3779B9 * (start + 1) & 0xFFFFFFFF,) * -((start - end) // size)
            if has_data:
                values = block_checksums(memoryview(self._bytes_of(item, box, end - start)), size)
            first = ledger._first[position]
            ledger._values[first : first + len(values)] = values
        ledger._recorded_bytes = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        return ledger

    def _store(self, folder: Path, captured: Captured, plan: ObjectPlan, has_data: bool) -> None:
        leaves = captured.leaves
        path = folder / plan.key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as file:
            if plan.opens:
                file.write(plan.header)
                file.truncate(plan.size)
            columns = zip(plan.items, plan.starts, plan.ends, plan.boxes, strict=True)
            for item, start, end, box in columns if has_data else ():
                file.seek(start)
                file.write(self._bytes_of(leaves[item].item, box, end - start))

    def _bytes_of(self, item: Item, part: ItemBox | None, nbytes: int) -> bytes:
        if item.path == "rng":
            return bytes(range(16))
        whole = self.value(item.path)
        if item.offsets is not None:
            box = Box(item.offsets, item.shape)
            whole = whole[tuple(map(slice, box.offsets, box.stops))]
        start = 0 if part is None else part.start
        return whole.tobytes()[start : start + nbytes]

    def _put_manifest(self, folder: Path, manifest: RankManifest) -> ManifestRecord:
        data = seal(encoder.encode(manifest)) if self.older else encode_rank_manifest(manifest)
        key = manifest_key(ATTEMPT, manifest.rank)
        _put(folder / key, data)
        return ManifestRecord(key=key, size=len(data), crc32c=crc32c(data))


def _inventory(captured: Captured) -> tuple[Inventory, Mapping[bytes, tuple[Item, ...]]]:
    return build_inventory(
        [leaf.item for leaf in captured.leaves],
        captured.scopes.items(),
        sharded=captured.sharded,
        outline=captured.outline,
    )


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    folder, kind, ranks, tensors = sys.argv[1:5]
    older = sys.argv[5:] == ["older"]
    Many(kind, int(ranks), int(tensors), width=1024, older=older).write(
        Path(folder), has_data=False
    )
