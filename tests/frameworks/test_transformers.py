"""``ActorsnapTrainer`` with the real ``transformers``: ``trainings.py`` has what is run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actorsnap.sync import Snapshot
from tests.pages import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]

SCRIPT = Path(__file__).parent / "trainings.py"
TIMEOUT_S = 200.0


def run(name: str, folder: Path, *, ranks: int = 1, expected: int = 0) -> Any:
    """Returns the result of a function of ``trainings.py``, with all ranks."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    children = []
    for rank in range(ranks):
        world: dict[str, str] = {}
        if ranks > 1:
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            world |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        children.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), name, str(folder)],
                env=environment | world,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [child.communicate(timeout=TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (out, err) in zip(children, said, strict=True):
        assert child.returncode == expected, out[-2000:] + err[-4000:]
    return None if expected else json.loads(said[0][0].splitlines()[-1])


def assert_goes_on(resumed: Any, straight: Any) -> None:
    """Every loss after the resume, and the weights, have the same bits."""
    assert resumed["weights"] == straight["weights"]
    assert resumed["losses"] == straight["losses"]


def test_killed_in_a_save(tmp_path: Path) -> None:
    straight = run("straight_wide", tmp_path / "straight")
    run("killed_before_the_commit", tmp_path / "killed", expected=-signal.SIGKILL)
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert left == ["checkpoint-3", "tmp-checkpoint-6"]
    assert not (tmp_path / "killed" / "tmp-checkpoint-6" / "actorsnap.json").exists()
    resumed = run("resumed_wide", tmp_path / "killed")
    assert resumed["last"] == "checkpoint-3"
    assert_goes_on(resumed, straight)
    assert resumed["folders"] == [f"checkpoint-{step}" for step in (12, 3, 6, 9)]


def test_killed_between_commit_and_rename(tmp_path: Path) -> None:
    straight = run("straight", tmp_path / "straight")
    run("killed_after_the_commit", tmp_path / "killed", expected=-signal.SIGKILL)
    resumed = run("resumed", tmp_path / "killed")
    assert resumed["before"] == ["checkpoint-3", "tmp-checkpoint-6"]
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


def test_half_written_folders_are_not_taken(tmp_path: Path) -> None:
    straight = run("straight", tmp_path / "straight")
    found = run("half_written", tmp_path / "run")
    assert found["first"] == 6
    assert_goes_on(found, straight)
    assert sorted(found["refused"]) == ["7", "8", "9"]
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


def test_what_is_refused(tmp_path: Path) -> None:
    each_node, hub = run("refused", tmp_path)
    assert "save_on_each_node" in each_node
    assert "hub_strategy='end'" in hub


def test_the_example(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "hf_trainer.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left behind: checkpoint-5, tmp-checkpoint-10" in done.stdout
    assert "resumed and straight are equal, bit for bit" in done.stdout
