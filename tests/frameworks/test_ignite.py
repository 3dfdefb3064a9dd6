# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.ignite`` with PyTorch-Ignite itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.programs import needs, run

pytestmark = needs("ignite")


def test_the_example(tmp_path: Path) -> None:
    output = run("examples/ignite_resume.py", cwd=tmp_path)
    assert "part of a checkpoint is stored: SIGKILL" in output
    assert "checkpoint_15.pt is skipped: it is unfinished" in output
    assert "resumes from checkpoint_10.pt" in output
    assert output.count("kept: checkpoint_25.pt, checkpoint_30.pt\n") == 2
    assert "resumed and straight are equal, bit for bit" in output


@pytest.mark.parametrize("name", ["n_saved", "one_object", "stock_files", "failures", "two_ranks"])
def test_a_program(tmp_path: Path, name: str) -> None:
    output = run("tests/frameworks/ignite_runs.py", name, cwd=tmp_path)
    assert f"{name}: done" in output.splitlines()
