# SPDX-License-Identifier: Apache-2.0
"""The examples that README shows, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.ranks.models import MODULES
from tests.support import forker
from tests.worlds import Director

pytestmark = pytest.mark.usefixtures("forker")

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *args: str, cwd: Path, timeout_s: float = 400.0) -> str:
    """Output of an example that must end well, without a warning."""
    done = subprocess.run(
        forker.command("-W", "error", str(EXAMPLES / name), *args),
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def left_behind(folder: Path) -> list[str]:
    """What is still in the folder for temporary files, but for torch's own cache."""
    return [p.name for p in folder.iterdir() if not p.name.startswith("torchinductor_")]


def test_quickstart_async(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("quickstart_async.py", str(folder), cwd=tmp_path).splitlines() == [
        "saved: step-30",
        "restored: step 30",
        "one object: (256, 256) True",
    ]
    assert sorted(p.name for p in folder.iterdir()) == ["step-10", "step-20", "step-30"]
    for path in folder.iterdir():
        assert (path / "actorsnap.json").is_file()


def test_quickstart_sync(tmp_path: Path) -> None:
    assert run("quickstart_sync.py", cwd=tmp_path).splitlines() == [
        "saved: step-1",
        "saved, while training went on: step-1-pending",
        "restored: step 1",
    ]
    assert left_behind(tmp_path) == []


@pytest.mark.slow  # test_managed_by_two_ranks kills and resumes, too
@pytest.mark.parametrize("size", ["small", "demo"])
def test_train_resume(tmp_path: Path, size: str) -> None:
    output = run("train_resume.py", "--size", size, cwd=tmp_path, timeout_s=600.0)
    assert "nothing committed: SIGKILL" in output
    assert "is skipped: it is unfinished" in output
    assert "losses and the final weights are equal" in output
    assert left_behind(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "demo"])
def test_fsdp_resume_by_torchrun(tmp_path: Path, size: str) -> None:
    output = run("fsdp_resume.py", "--size", size, cwd=tmp_path, timeout_s=900.0)
    assert output.count("is skipped: it is unfinished") == 2
    assert "saved by 2 ranks, has the same bits on 1 and 3" in output
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_fsdp_resume(tmp_path: Path) -> None:
    """Without torchrun, which takes most of the example's time to start."""
    with Director("tests.ranks.examples", *MODULES) as director:
        found = director.play("direct_fsdp_resume", root=str(tmp_path))
    assert found["status"] == 0, found["table"]
    for ranks in ("1", "3"):
        assert "step-00006 is skipped: it is unfinished" in found["said"][ranks]
        assert "step-00003 is committed" in found["said"][ranks]


@pytest.mark.slow  # its parts: test_managed_after_its_end, test_managed_by_two_ranks
def test_managed(tmp_path: Path) -> None:
    output = run("managed.py", "--steps", "25", cwd=tmp_path)
    assert "a save is in flight: SIGKILL" in output
    assert "restored step" in output
    assert "resumed and straight are equal, bit for bit" in output
    assert left_behind(tmp_path) == []


def test_exact_resume(tmp_path: Path) -> None:
    output = run("exact_resume.py", cwd=tmp_path)
    assert "Loader: resumes exactly" in output or "Shuffled: resumes exactly" in output
    firsts = re.findall(
        r"^without '(\w+)': .* right after the restore, first at ([^/]+)/", output, re.M
    )
    assert [key for key, _ in firsts] == [
        *("model", "optimizer", "scheduler", "scaler", "ema", "batches", "progress", "rng")
    ]
    assert all(key == named for key, named in firsts[:-1])
    assert firsts[-1] == ("rng", "random generators")
    assert left_behind(tmp_path) == []


def test_managed_after_its_end(tmp_path: Path) -> None:
    """A job that was killed after its last commit has no step to train."""
    first, second = (
        run("managed.py", "--folder", "run", "--steps", "2", cwd=tmp_path).splitlines()
        for _ in range(2)
    )
    assert second[0].startswith("restored step 1,")
    assert second[1:] == first[-2:]


def test_managed_by_two_ranks(tmp_path: Path) -> None:
    with Director("tests.ranks.examples", *MODULES) as director:
        found = director.play("direct_managed", root=str(tmp_path))
    straight, resumed = (found[each].splitlines() for each in ("straight", "resumed"))
    assert straight[0] == "nothing to resume: step 0"
    assert resumed[0].startswith("restored step ")
    assert straight[-1].startswith("the end: loss ")
    assert straight[-1] == resumed[-1]
    assert (tmp_path / "killed" / ".manager/runs/00000002.json").exists()
