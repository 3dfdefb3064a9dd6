# SPDX-License-Identifier: Apache-2.0
"""Arguments of the wrong type are refused before anything happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import actorsnap
from actorsnap import StateDict, UsageError
from actorsnap.manager import CheckpointManager, every, keep
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


_ANY: Any = actorsnap
_KEEP: Any = keep
_EVERY: Any = every
_MANAGER: Any = CheckpointManager


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: _ANY.Snapshot(), "Snapshot.__init__()"),
        (lambda: _ANY.sync.Snapshot("x", foo=1), "Snapshot.__init__()"),
        (lambda: _ANY.PendingSnapshot(), "PendingSnapshot.__init__()"),
        (lambda: _MANAGER(), "CheckpointManager.__init__()"),
        (lambda: _MANAGER("x", save=every.last()).status(1), "CheckpointManager.status()"),
        (lambda: _KEEP.last(), "keep.last.__init__()"),
        (lambda: _EVERY.steps(), "every.steps.__init__()"),
    ],
)
def test_wrong_calls_name_the_class_that_was_called(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(name)} "):
        call()
