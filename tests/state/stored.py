# SPDX-License-Identifier: Apache-2.0
"""A snapshot in one bytearray: stores what was captured, through the encoded manifest, and back.

Copies go in uneven steps, so that ranges begin and end inside of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from actorsnap.format.checksum import choose_block_bytes, crc32c
from actorsnap.format.manifest import (
    Entry,
    ObjectRecord,
    RankManifest,
    SaveRecord,
    Stored,
)
from actorsnap.format.tables import decode_rank_manifest, encode_rank_manifest
from actorsnap.planning.index import AnyEntry
from actorsnap.state.capture import capture
from actorsnap.state.records import Rebuild
from actorsnap.state.restore.build import KeyRestore, prepare
from actorsnap.state.restore.match import entries_by_key
from actorsnap.state.restore.reads import Wanted
from actorsnap.state.sources import Captured, Leaf
from actorsnap.state.stateful import StateDict
from actorsnap.state.tree import AS_RECORDS, escape

_HEADER = 4096
_ATTEMPT = "20260101T000000-00000000-1-00000000"


class Memory:
    """What one rank stored."""

    def __init__(self, captured: Captured, step: int = 48) -> None:
        self.data = bytearray(_HEADER)
        entries = [
            self._store(part, step) if isinstance(part, Leaf) else part for part in captured.parts
        ]
        manifest = RankManifest(
            attempt=_ATTEMPT,
            rank=0,
            objects=(
                ObjectRecord(
                    key=f"{_ATTEMPT}/data/x/0-0.safetensors",
                    size=len(self.data),
                    header_bytes=_HEADER,
                    header_crc32c=0,
                ),
            ),
            entries=tuple(entries),
            save=SaveRecord(world_size=1, features=("tables",)),
            optimizers={},
        )
        encoded = encode_rank_manifest(manifest)
        key = f"{_ATTEMPT}/manifest/0.json"
        self.entries: Sequence[Entry] = decode_rank_manifest(encoded, key).entries

    def _store(self, leaf: Leaf, step: int) -> Entry:
        source, item = leaf.source, leaf.item
        assert source.nbytes == item.nbytes
        data = bytearray(item.nbytes)
        step = max(1, step // item.itemsize) * item.itemsize
        for start in range(0, item.nbytes, step):
            stop = min(start + step, item.nbytes)
            source.copy_into(start, memoryview(data)[start:stop])
            if source.is_addressable:
                assert source.view(start, stop) == data[start:stop]
        begin = len(self.data)
        self.data += data
        size = choose_block_bytes(len(data), is_shard=item.is_shard)
        blocks = [crc32c(data[i : i + size]) for i in range(0, len(data), size)]
        return leaf.entry(Stored(0, begin, begin + len(data), tuple(blocks)))

    def fill(self, reads: Iterable[Wanted], step: int = 80) -> int:
        """Performs reads; returns their bytes."""
        total = 0
        for want in reads:
            stored, sink = want.stored, want.sink
            data = self.data[stored.start : stored.stop]
            assert sink.nbytes == len(data) > 0
            total += len(data)
            if sink.is_addressable and len(data) % 3:
                sink.view(0, len(data))[:] = data
                continue
            whole = step // 16 * 16
            for start in range(0, len(data), whole):
                chunk = bytes(data[start : start + whole])
                sink.copy_from(start, memoryview(chunk))
        return total

    def key(self, key: str) -> list[AnyEntry]:
        return entries_by_key(self.entries)[key]

    def restore(
        self,
        key: str,
        target: object | None = None,
        *,
        allow_pickle: bool = False,
        check: Callable[[KeyRestore], None] | None = None,
        rebuild: Rebuild = AS_RECORDS,
    ) -> Any:
        """Restores a key that must fit its target."""
        restore = prepare(
            escape(key),
            self.key(key),
            target=target,
            allow_pickle=allow_pickle,
            rebuild=rebuild,
        )
        if check is None:
            assert not restore.match.missing
            assert not restore.match.unexpected
            assert not restore.match.mismatched
        else:
            check(restore)
        self.fill(restore.memory.reads)
        return restore.build()


def store(state: Mapping[str, Any], **options: Any) -> Memory:
    """Captures and stores ``state`` under the key ``s``."""
    return Memory(capture({"s": StateDict(state)}, **options))


def round_trip(value: object, **options: Any) -> Any:
    """Returns ``value`` as it comes back, built fresh."""
    return store({"v": value}, **options).restore("s", **options)["v"]
