# SPDX-License-Identifier: Apache-2.0
"""Snapshots of many ranks without ranks: who stored which box is written down by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from actorsnap.format.checksum import block_checksums, choose_block_bytes, crc32c
from actorsnap.format.geometry import Box
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import (
    COMMIT_KEY,
    Entry,
    ObjectRecord,
    RankManifest,
    SaveRecord,
    Stored,
    TensorEntry,
    TensorType,
    encode_commit,
)
from actorsnap.format.tables import encode_rank_manifest
from actorsnap.planning.index import Index, index_of
from actorsnap.state.restore.reads import Wanted
from actorsnap.state.tensors import DTYPE_NAMES, bytes_of

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
_HEADER = 4096


class Part(msgspec.Struct, frozen=True):
    """A tensor that one rank stores: all of it, or the box ``box`` of one of ``shape``."""

    path: str
    tensor: torch.Tensor
    box: Box | None = None
    shape: tuple[int, ...] | None = None
    replicated: bool = False
    type: TensorType = "tensor"


class Saved:
    """What ranks stored; ``ranks[k]`` are the parts and entries of rank k, in traversal order."""

    def __init__(self, ranks: Sequence[Sequence[Part | Entry]]) -> None:
        self.data: dict[str, bytearray] = {}
        self._save = SaveRecord(world_size=len(ranks), features=("tables",))
        self.manifests = {rank: self._store(rank, parts) for rank, parts in enumerate(ranks)}

    def _store(self, rank: int, parts: Sequence[Part | Entry]) -> RankManifest:
        key = f"{ATTEMPT}/data/x/{rank}-0.safetensors"
        data = self.data[key] = bytearray(b" " * _HEADER)
        entries: list[Entry] = []
        for part in parts:
            if not isinstance(part, Part):
                entries.append(part)
                continue
            raw = bytes_of(part.tensor)
            start = len(data)
            data += raw
            blocks = block_checksums(memoryview(raw), choose_block_bytes(len(raw), is_shard=True))
            entries.append(
                TensorEntry(
                    path=part.path,
                    dtype=DTYPE_NAMES[part.tensor.dtype],
                    shape=tuple(part.tensor.shape),
                    data=Stored(0, start, len(data), blocks),
                    type=part.type,
                    global_shape=part.shape,
                    offsets=None if part.box is None else part.box.offsets,
                    replicated=part.replicated,
                )
            )
        record = ObjectRecord(
            key=key,
            size=len(data),
            header_bytes=_HEADER,
            header_crc32c=crc32c(bytes(data[:_HEADER])),
        )
        return RankManifest(
            attempt=ATTEMPT,
            rank=rank,
            objects=(record,),
            entries=tuple(entries),
            save=self._save,
            optimizers={},
        )

    def index(self, rank: int) -> Index:
        return index_of(self.manifests, rank=rank)

    def fill(self, index: Index, reads: Iterable[Wanted], step: int = 48) -> int:
        """Performs reads, in uneven steps; returns their bytes."""
        total = 0
        for want in reads:
            stored = want.stored
            data = self.data[index.objects[stored.object].key][stored.start : stored.stop]
            assert block_checksums(memoryview(data), stored.block_bytes) == stored.crc32c
            assert want.sink.nbytes == len(data) > 0
            total += len(data)
            if want.sink.is_addressable:
                want.sink.view(0, len(data))[:] = data
                continue
            for start in range(0, len(data), step):
                want.sink.copy_from(start, memoryview(bytes(data[start : start + step])))
        return total

    def write(self, folder: Path) -> Path:
        """Makes a committed snapshot of it."""
        for rank, manifest in self.manifests.items():
            self._put(folder / manifest_key(ATTEMPT, rank), encode_rank_manifest(manifest))
        for key, data in self.data.items():
            self._put(folder / key, data)
        commit = self._save.commit(attempt=ATTEMPT, created="2026-01-01T00:00:00.000000Z")
        self._put(folder / COMMIT_KEY, encode_commit(commit))
        return folder

    @staticmethod
    def _put(path: Path, data: bytes | bytearray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
