# SPDX-License-Identifier: Apache-2.0
"""Breaks snapshots on a file system on purpose: bytes, or documents that are signed anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actorsnap.format.checksum import crc32c
from actorsnap.format.manifest import COMMIT_KEY
from tests.support.manifests import document_of, encoded

__all__ = ["files", "flip_bit", "resign", "rewrite_commit"]

_ZEROS = b'{"crc32c":"00000000",'


def files(root: Path) -> dict[str, Path]:
    """The objects of a snapshot: ``commit``, ``manifest``, and ``data`` (the large one)."""
    (manifest,) = root.glob("*/manifest/0.json")
    (data,) = root.glob("*/data/model/*.safetensors")
    return {"commit": root / COMMIT_KEY, "manifest": manifest, "data": data}


def flip_bit(path: Path, bit: int) -> None:
    """Flips one bit of a file, counted from its start."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def rewrite_commit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the commit object and gives it the checksum that fits."""
    path = root / COMMIT_KEY
    document = json.loads(path.read_bytes())
    change(document)
    del document["crc32c"]
    rest = json.dumps(document, separators=(",", ":")).encode()
    body = bytearray(_ZEROS + rest[1:])
    at = len(b'{"crc32c":"')
    body[at : at + 8] = b"%08x" % crc32c(body)
    path.write_bytes(body)


def resign(root: Path, change: Callable[[dict[str, Any]], None], rank: int = 0) -> None:
    """Changes a rank manifest and makes all checksums fit, so that only the change is wrong."""
    (path,) = root.glob(f"*/manifest/{rank}.json")
    document = document_of(path.read_bytes())
    change(document)
    path.write_bytes(encoded(document))
