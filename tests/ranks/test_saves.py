"""Snapshots that several real ranks take together, read by nothing but the format's page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap.errors import FormatError
from actorsnap.sync import Snapshot
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


def test_tensors_of_one_name_on_several_meshes(director: Director, tmp_path: Path) -> None:
    """Each rank's own ones are stored, and only who saved them can have them."""
    path = str(tmp_path / "s")
    director.play("direct_take", num_ranks=4, kind="experts", path=path, folder=str(tmp_path))
    snapshot = Snapshot(path)
    assert snapshot.verify("full").ok
    expected = torch.load(tmp_path / "expected0.pt")
    found = snapshot.get_state_dict_for_key("shared")
    assert torch.equal(found["w.weight"], expected["shared"]["w.weight"])
    with pytest.raises(FormatError, match="several ranks stored different ones under this name"):
        snapshot.get_state_dict_for_key("own")
