# SPDX-License-Identifier: Apache-2.0
"""A restore is a write that autograd must see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actorsnap import StateDict
from actorsnap.sync import Snapshot

WAYS: dict[str, Callable[[Snapshot, torch.Tensor], object]] = {
    "restore": lambda snapshot, x: snapshot.restore({"s": StateDict(x=x)}),
    "restore a view": lambda snapshot, x: snapshot.restore({"v": StateDict(x=x)}),
    "read_object": lambda snapshot, x: snapshot.read_object("s/x", x),
}


@pytest.mark.parametrize("way", WAYS)
def test_backward_refuses_what_was_overwritten(tmp_path: Path, way: str) -> None:
    stored = torch.full((4,), 5.0)
    snapshot = Snapshot.take(
        tmp_path, {"s": StateDict(x=stored[:2].clone()), "v": StateDict(x=stored[:2], b=stored)}
    )
    weight = torch.ones(2, requires_grad=True)
    x = torch.ones(2)
    y = (weight * x).sum()
    WAYS[way](snapshot, x)
    assert x.tolist() == [5, 5]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
