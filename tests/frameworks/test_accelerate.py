# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.accelerate`` with the real package: ``accelerations.py`` has what is run."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import pytest

from actorsnap.sync import Snapshot
from tests.frameworks.processes import run_example, run_function

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
    ),
]


def run(name: str, folder: Path, *, ranks: int = 1, expected: int = 0) -> Any:
    return run_function("accelerations.py", name, folder, ranks=ranks, expected=expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumes_in_the_middle_of_an_epoch(tmp_path: Path, ranks: int) -> None:
    straight = run("straight", tmp_path, ranks=ranks)
    run("saved", tmp_path, ranks=ranks, expected=-signal.SIGKILL)
    assert run("resumed", tmp_path, ranks=ranks) == straight
    snapshot = Snapshot(tmp_path / "ckpt")
    assert snapshot.step == 10
    assert snapshot.verify("full").ok


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1)])
def test_another_number_of_processes(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    run("saved", tmp_path, ranks=saved_by, expected=-signal.SIGKILL)
    same, other = (run("loaded", tmp_path, ranks=ranks) for ranks in (saved_by, loaded_by))
    assert same == other
    assert same["iteration"] == same["progress"]["epoch"] > 0
    paths = [path.split("/", 1)[1] for path in Snapshot(tmp_path / "ckpt").get_manifest()]
    for path in ("model/0.weight", "model/1.running_mean", "optimizer_1/state/0/exp_avg"):
        assert paths.count(path) == 1  # what all have in common is stored once
    assert paths.count("rng/torch") == saved_by


def test_a_folder_of_accelerate(tmp_path: Path) -> None:
    saved, loaded, error = run("from_accelerate", tmp_path)
    assert loaded == saved
    assert error == "NotASnapshot"


def test_in_a_manager(tmp_path: Path) -> None:
    saved, restored = run("managed", tmp_path)
    assert restored == saved


def test_a_stateful_loader(tmp_path: Path) -> None:
    rest, restored = run("stateful", tmp_path)
    assert len(rest) == 3
    assert restored == rest


def test_fsdp_through_dcp(tmp_path: Path) -> None:
    found = run("fsdp", tmp_path, ranks=2)
    assert found["names"] == ["optimizer_0", "pytorch_model_fsdp_0"]
    assert found["verified"] == [True, True]
    assert len(found["same"]) == 12
    assert all(found["same"])


def test_what_is_refused(tmp_path: Path) -> None:
    hooks, fsdp, deepspeed = run("refused", tmp_path)
    assert "register_save_state_pre_hook" in hooks
    assert "interop.dcp.install()" in fsdp
    assert "DEEPSPEED" in deepspeed


def test_the_example(tmp_path: Path) -> None:
    said = run_example("accelerate_resume.py", tmp_path)
    assert "a save is in flight: SIGKILL" in said
    assert "resumed and straight are equal, bit for bit" in said
