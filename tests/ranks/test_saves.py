"""Snapshots that several real ranks take together, read by nothing but the format's page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.assembled import assemble
from tests.worlds import Director


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.saves") as director:
        yield director


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for name, item in value.items() for k, v in _flat(item, f"{prefix}/{name}").items()
        }
    return {prefix: value}


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [
        (2, "ddp"),
        (4, "ddp"),
        (2, "zero"),
        (2, "fsdp2"),
        (4, "hsdp"),
        (2, "tensor_parallel"),
        (4, "fsdp2_and_tp"),
        (3, "sharded_tensor"),
        (2, "pipeline"),
    ],
)
def test_what_ranks_hold_is_what_is_stored(
    director: Director, tmp_path: Path, num_ranks: int, kind: str
) -> None:
    path = str(tmp_path / "snapshot")
    said = director.play(
        "direct_take", num_ranks=num_ranks, kind=kind, path=path, folder=str(tmp_path)
    )
    assert said == [{"path": path, "metadata": {"by": 0}, "again": path + "-again"}] * num_ranks
    for where in (path, path + "-again"):
        found = assemble(Path(where))
        assert found.num_duplicates == 0
        for rank in range(num_ranks):
            expected = torch.load(tmp_path / f"expected{rank}.pt")
            for leaf, value in _flat(expected, "").items():
                if not isinstance(value, torch.Tensor):
                    continue
                name = leaf[1:]
                if (rank, name) in found.private:
                    stored = found.private[rank, name]
                else:
                    stored = found.tensors[name]
                torch.testing.assert_close(stored, value, rtol=0, atol=0, msg=name)
