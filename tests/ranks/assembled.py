# SPDX-License-Identifier: Apache-2.0
"""What a snapshot holds, put together by nothing but ``docs/format.md``: the tests' own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.manifests import document_of

__all__ = ["Assembled", "assemble"]


class Assembled:
    """A snapshot's leaves.

    Attributes:
        tensors: Whole tensors by path, of what is replicated or sharded.
        private: By rank and path, what only that rank has.
        values: Inline values by rank and path.
        nbytes: Per rank, how many bytes its entries have.
        keys: Per rank, the data objects it wrote to.
        num_duplicates: Boxes that were stored again, with equal bytes.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.private: dict[tuple[int, str], torch.Tensor] = {}
        self.values: dict[tuple[int, str], Any] = {}
        self.nbytes: list[int] = []
        self.keys: list[set[str]] = []
        self.num_duplicates = 0
        self._found: dict[str, torch.Tensor] = {}

    def add(self, root: Path, rank: int, manifest: dict[str, Any]) -> None:
        objects = manifest["objects"]
        total = 0
        for entry in manifest["entries"]:
            path = entry["path"]
            if entry["kind"] == "value":
                self.values[rank, path] = entry.get("value")
            if entry["kind"] != "tensor":
                continue
            number, start, stop, _ = entry["data"]
            total += stop - start
            raw = (root / objects[number]["key"]).read_bytes()[start:stop]
            dtype = getattr(torch, entry["dtype"])
            part = torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8)).view(dtype)
            self._place(rank, entry, part.view(entry["shape"]))
        self.nbytes.append(total)
        self.keys.append({record["key"] for record in objects})

    def _place(self, rank: int, entry: dict[str, Any], part: torch.Tensor) -> None:
        path = entry["path"]
        offsets = entry.get("offsets")
        if offsets is None and not entry.get("replicated"):
            self.private[rank, path] = part
            return
        shape = entry["global_shape"] if offsets is not None else list(part.shape)
        if path not in self.tensors:
            self.tensors[path] = torch.zeros(shape, dtype=part.dtype)
            self._found[path] = torch.zeros(shape, dtype=torch.int32)
        begin = [0] * part.ndim if offsets is None else offsets
        box = tuple(slice(o, o + n) for o, n in zip(begin, part.shape, strict=True))
        if self._found[path][box].any():
            # Each of several meshes has stored its own.
            assert torch.equal(self.tensors[path][box], part), path
            self.num_duplicates += 1
        self.tensors[path][box] = part
        self._found[path][box] = 1

    def check(self) -> None:
        for path, found in self._found.items():
            assert bool(found.all()), f"{path}: elements are missing"


def assemble(root: Path) -> Assembled:
    """Reads the snapshot in the folder ``root``."""
    commit = json.loads((root / "actorsnap.json").read_text())
    result = Assembled()
    for rank in range(commit["world_size"]):
        path = root / commit["attempt"] / "manifest" / f"{rank}.json"
        manifest = document_of(path.read_bytes())
        assert manifest["rank"] == rank
        result.add(root, rank, manifest)
    result.check()
    return result
