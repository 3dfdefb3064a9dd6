"""Arguments of the wrong type are refused before anything happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import StateDict, UsageError
from actorsnap.sync import Snapshot


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Snapshot.take(tmp_path / "s", {"s": StateDict(w=torch.ones(3))})
    return tmp_path / "s"


@pytest.mark.parametrize("budget", ["1MB", 1.5e6, True, 1 << 19])
def test_a_budget_is_an_integer_of_a_block_at_least(saved: Path, budget: Any) -> None:
    with pytest.raises(UsageError, match=rf"at least 1048576 .* as an int, not {budget!r}"):
        Snapshot(saved).read_object("s/w", memory_budget_bytes=budget)


@pytest.mark.parametrize("flag", ["no", 0, None])
def test_flags_are_true_or_false(saved: Path, flag: Any) -> None:
    state = {"s": StateDict(w=torch.zeros(3))}
    with pytest.raises(UsageError, match=f"strict must be True or False, not {flag!r}"):
        Snapshot(saved).restore(state, strict=flag)
    with pytest.raises(UsageError, match=f"overwrite must be True or False, not {flag!r}"):
        Snapshot.take(saved, state, overwrite=flag)
    assert torch.equal(Snapshot(saved).read_object("s/w"), torch.ones(3))
