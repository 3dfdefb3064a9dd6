# SPDX-License-Identifier: Apache-2.0
"""``ActorsnapTrainer`` with the real ``transformers``: ``trainings.py`` has what is run."""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from actorsnap.sync import Snapshot
from tests.frameworks.processes import run_example, run_function

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]


def run(name: str, folder: Path, *, ranks: int = 1, expected: int = 0) -> Any:
    return run_function("trainings.py", name, folder, ranks=ranks, expected=expected)


def assert_goes_on(resumed: Any, straight: Any) -> None:
    """Every loss after the resume, and the weights, have the same bits."""
    assert resumed["weights"] == straight["weights"]
    assert resumed["losses"] == straight["losses"]


def test_killed_in_a_save(tmp_path: Path) -> None:
    straight = run("straight_wide", tmp_path / "straight")
    run("killed_before_the_commit", tmp_path / "killed", expected=-signal.SIGKILL)
    # The uploader process, which outlives the trainer, may have deleted what it stored.
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert {"checkpoint-3"} <= left <= {"checkpoint-3", "tmp-checkpoint-6"}
    assert not (tmp_path / "killed" / "tmp-checkpoint-6" / "actorsnap.json").exists()
    resumed = run("resumed_wide", tmp_path / "killed")
    assert (resumed["last"], resumed["first"]) == ("checkpoint-3", 3)
    assert_goes_on(resumed, straight)
    assert resumed["folders"] == [f"checkpoint-{step}" for step in (12, 3, 6, 9)]


def test_killed_between_commit_and_rename(tmp_path: Path) -> None:
    straight = run("straight", tmp_path / "straight")
    run("killed_after_the_commit", tmp_path / "killed", expected=-signal.SIGKILL)
    resumed = run("resumed", tmp_path / "killed")
    assert resumed["before"] == ["checkpoint-3", "tmp-checkpoint-6"]
    assert resumed["first"] == 6
    assert_goes_on(resumed, straight)
    assert resumed["folders"] == straight["folders"]
    for folder in (tmp_path / "killed").iterdir():
        assert Snapshot(folder).verify("full").ok


def test_two_ranks(tmp_path: Path) -> None:
    straight = run("straight", tmp_path / "straight", ranks=2)
    run("killed_after_the_commit", tmp_path / "killed", ranks=2, expected=-signal.SIGKILL)
    resumed = run("resumed", tmp_path / "killed", ranks=2)
    assert_goes_on(resumed, straight)
    assert resumed["folders"] == straight["folders"]
    snapshot = Snapshot(tmp_path / "killed" / "checkpoint-12")
    assert snapshot.verify("full").ok
    assert {path.split("/")[0] for path in snapshot.get_manifest()} == {"0", "1"}
    assert run("joined", tmp_path / "killed")["weights"] == straight["weights"]


def test_half_written_folders_are_not_taken(tmp_path: Path) -> None:
    straight = run("straight", tmp_path / "straight")
    found = run("half_written", tmp_path / "run")
    assert found["first"] == 6
    assert_goes_on(found, straight)
    assert sorted(found["refused"], key=int) == ["7", "8", "9", "10", "11"]
    assert "checkpoint-11: there is no such folder; " in found["refused"]["11"]
    for why in found["refused"].values():
        assert "the newest whole one is" in why
        assert "checkpoint-6" in why


def test_the_same_as_the_trainer(tmp_path: Path) -> None:
    """Losses, the best model, the folders that stay, and their ``trainer_state.json``."""
    *stock, one, two = run("like_the_trainer", tmp_path)
    assert stock == [one, two]
    assert len(one["folders"]) == 1
    assert len(two["folders"]) == 2


def test_save_only_model(tmp_path: Path) -> None:
    result = run("save_only_model", tmp_path)
    stock, ours = result["found"]
    assert ours == stock
    assert result["keys"] == ["model", "trainer"]


def test_a_job_that_the_trainer_began(tmp_path: Path) -> None:
    found = run("from_the_trainer", tmp_path)
    assert found["last"] == "checkpoint-12"
    assert_goes_on(found, found["stock"])


def test_the_scaler_goes_on(tmp_path: Path) -> None:
    assert run("scaler", tmp_path) == {"scale": 8.0}


def test_a_failed_save_is_raised_by_the_next(tmp_path: Path) -> None:
    assert run("failed_save", tmp_path) == {
        "error": "SnapshotAborted",
        "step": 9,
        "folders": ["checkpoint-3"],
    }


def test_the_save_on_sigterm(tmp_path: Path) -> None:
    straight = run("straight", tmp_path / "straight")
    resumed = run("on_sigterm", tmp_path / "stopped")
    assert resumed["before"] == ["checkpoint-3", "checkpoint-4"]
    assert (resumed["first"], resumed["stopped"]) == (4, 5)  # the step under way is finished
    assert_goes_on(resumed, straight)


def test_what_is_refused(tmp_path: Path) -> None:
    each_node, hub = run("refused", tmp_path)
    assert "save_on_each_node" in each_node
    assert "hub_strategy='end'" in hub


def test_the_example(tmp_path: Path) -> None:
    said = run_example("hf_trainer.py", tmp_path)
    assert re.search(r"^left behind: checkpoint-5(, tmp-checkpoint-10)?$", said, re.MULTILINE)
    assert "resumed and straight are equal, bit for bit" in said
