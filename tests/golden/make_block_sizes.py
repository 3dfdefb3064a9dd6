# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/block_sizes``: format version 1 with the feature of that name.

Leaves of the sizes at which the size of checksum blocks changes, below 4 MiB. As
``make_v1.py``: run once, and neither this file nor the snapshot is ever changed.

``python -m tests.golden.make_block_sizes FOLDER`` makes one again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch

from actorsnap import Options, StateDict
from actorsnap.actors import checksum_ledger
from actorsnap.format.checksum import choose_block_bytes
from actorsnap.format.layout import Attempt
from actorsnap.runtime import local_engine
from actorsnap.runtime.resources import Attempts
from actorsnap.sync import Snapshot

KIB = 1 << 10
SIZES = {
    "empty": 0,
    "one": 64 * KIB,
    "two": 64 * KIB + 1,
    "most": 2048 * KIB - 1,
    "uneven": 2048 * KIB + 1,
}
"""Bytes of each leaf."""


def app_state() -> dict[str, StateDict]:
    """What the snapshot holds; built anew by each call. No two blocks of a leaf are equal."""
    leaves = {}
    for name, nbytes in SIZES.items():
        numbers = torch.arange(nbytes, dtype=torch.int32)
        leaves[name] = (numbers % 251 + numbers // (64 * KIB)).to(torch.uint8)
    return {"leaves": StateDict(leaves)}


def block_bytes_of_a_shard(nbytes: int, *, is_shard: bool) -> int:
    return choose_block_bytes(nbytes, is_shard=True)


def make(folder: Path) -> None:
    """Takes the snapshot. A rank that is alone has no shards, but may write blocks like theirs."""
    attempt = Attempt(created_s=1_767_225_600, host="00000000", pid=1, nonce="00000000")
    with (
        mock.patch.object(Attempts, "new", return_value=attempt),
        mock.patch.object(checksum_ledger, "choose_block_bytes", block_bytes_of_a_shard),
        mock.patch.object(local_engine, "utc", return_value="2026-01-01T00:00:00.000000Z"),
    ):
        # A chunk ends inside of the larger ones.
        Snapshot.take(folder, app_state(), options=Options(fsync=False, chunk_bytes=2 << 20))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
