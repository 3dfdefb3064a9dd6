# SPDX-License-Identifier: Apache-2.0
"""Exports of what several real ranks saved: shards are joined, and every format is whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from actorsnap import UsageError
from actorsnap.interop.exports import export_dcp, export_torch
from actorsnap.sync import Snapshot
from tests.ranks.models import MODULES
from tests.support.cases import slow
from tests.worlds import Director


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.saves", *MODULES) as director:
        yield director


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [
        (2, "fsdp2"),
        slow(4, "fsdp2"),
        slow(2, "ddp"),
        slow(4, "hsdp"),
        slow(2, "tensor_parallel"),
        (4, "fsdp2_and_tp"),
    ],
)
def test_all_formats(director: Director, tmp_path: Path, num_ranks: int, kind: str) -> None:
    path = str(tmp_path / "s")
    director.play("direct_take", num_ranks=num_ranks, kind=kind, path=path, folder=str(tmp_path))
    model: dict[str, torch.Tensor] = torch.load(tmp_path / "expected0.pt")["model"]
    snapshot = Snapshot(path)
    report = snapshot.export_hf(tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    tied = {other for others in report.tied.values() for other in others}
    assert found.keys() | tied == model.keys()
    assert all(torch.equal(found[name], model[name]) for name in found)
    if kind == "fsdp2":
        assert not tied
    export_torch(snapshot, tmp_path / "x.pt", key="model")
    loaded: dict[str, torch.Tensor] = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded.keys() == model.keys()
    assert all(torch.equal(loaded[name], model[name]) for name in model)
    export_dcp(snapshot, tmp_path / "d", key="model")
    target: dict[str, Any] = {name: torch.zeros_like(t) for name, t in model.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(target, checkpoint_id=tmp_path / "d")
    assert all(torch.equal(target[name], model[name]) for name in model)
    # Each shard is a chunk: nothing is joined, and any ranks read what they need.
    metadata = FileSystemReader(tmp_path / "d").read_metadata()
    chunks = [len(each.chunks) for each in metadata.state_dict_metadata.values()]  # type: ignore[union-attr]
    assert (max(chunks) > 1) == (kind != "ddp")


def test_of_private_leaves_rank_0_counts(director: Director, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    director.play("direct_take", num_ranks=2, kind="ddp", path=path, folder=str(tmp_path))
    # Each rank's own: rank 0's is exported.
    export_torch(Snapshot(path), tmp_path / "x.pt", key="extra")
    assert torch.load(tmp_path / "x.pt")["rank"] == 0


@pytest.mark.slow
def test_pipelines(director: Director, tmp_path: Path) -> None:
    """What one other rank has alone is exported, too."""
    path = str(tmp_path / "s")
    director.play("direct_take", num_ranks=2, kind="pipeline", path=path, folder=str(tmp_path))
    expected: dict[str, torch.Tensor] = {}
    for rank in range(2):
        expected |= torch.load(tmp_path / f"expected{rank}.pt")["stage"]
    Snapshot(path).export_hf(tmp_path / "hf", "stage")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(UsageError, match="no path 'absent'"):
        export_dcp(Snapshot(path), tmp_path / "d", key="absent")
