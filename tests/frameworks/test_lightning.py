# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.lightning`` with Lightning itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.programs import needs, run

pytestmark = needs("lightning")


@pytest.mark.parametrize("num_devices", ["1", "2"])
def test_the_example(tmp_path: Path, num_devices: str) -> None:
    """Two devices: the ranks of DDP, of which one saves."""
    output = run("examples/lightning_resume.py", "--devices", num_devices, cwd=tmp_path)
    assert "part of a checkpoint is stored: SIGKILL" in output
    assert "newest-step=15.ckpt is skipped: it is unfinished" in output
    assert "resumes from epoch=1-step=15.ckpt" in output
    assert "resumed and straight are equal, bit for bit" in output


@pytest.mark.parametrize(
    "name",
    [
        "top_k",
        "resume",
        "stock_files",
        "links",
        "failures",
        "objects",
        "requeued",
        "fabric",
        pytest.param("pytorch_lightning", marks=needs("pytorch_lightning")),
        "model_parallel",
    ],
)
def test_a_program(tmp_path: Path, name: str) -> None:
    output = run("tests/frameworks/lightning_runs.py", name, cwd=tmp_path)
    assert output.count(f"{name}: done") == (2 if name == "model_parallel" else 1)  # ranks
