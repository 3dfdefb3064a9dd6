# SPDX-License-Identifier: Apache-2.0
"""A snapshot of two ranks of torchsnapshot, restored by real ranks, in other numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.formats.test_torchsnapshot import DATA
from tests.formats.written_by_torchsnapshot import make_shared
from tests.support.cases import slow
from tests.worlds import Director

pytestmark = pytest.mark.usefixtures("forker")


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.formats.torchsnapshot_ranks") as director:
        yield director


def as_said(rank: int) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else str(value)
        for name, value in make_shared(rank).items()
    }


@pytest.mark.parametrize(
    ("num_ranks", "mode"), [slow(1, "direct"), (2, "direct"), (3, "shared"), slow(4, "direct")]
)
def test_restores_on_any_number_of_ranks(director: Director, num_ranks: int, mode: str) -> None:
    said = director.play("direct", num_ranks=num_ranks, path=str(DATA / "ranks"), mode=mode)
    for rank, found in enumerate(said):
        assert found["sharded"] == [True, True]
        saved = as_said(min(rank, 1))
        if rank < 2:
            assert {name: found["shared"][name] for name in saved} == saved
            continue
        for name, value in saved.items():
            # Values in the index are equal beyond doubt.
            is_for_all = name.startswith("replicated") or name == "all_alike"
            assert found["shared"].get(name) == (value if is_for_all else None), name
