# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.ray`` on a local cluster of Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.programs import needs, run

pytestmark = needs("ray")


@pytest.fixture(autouse=True)
def _short_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For Ray's sockets, whose paths are longer than those of pytest allow."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def test_the_example(tmp_path: Path) -> None:
    """Two workers, of which one is killed."""
    output = run("examples/ray_train.py", cwd=tmp_path)
    lines = output.splitlines()
    straight, killed = ([x for x in lines if x.startswith(k)] for k in ("straight:", "killed:"))
    assert "'restored': 0" in straight[0]
    assert "'restored': 10" in killed[0]
    assert all(x.endswith("kept step-00000015, step-00000020") for x in straight + killed)
    assert lines[-1] == "straight and killed are equal, bit for bit"


@pytest.mark.parametrize("name", ["failures", "again"])
def test_a_program(tmp_path: Path, name: str) -> None:
    output = run("tests/frameworks/ray_runs.py", name, cwd=tmp_path)
    assert f"{name}: done" in output.splitlines()
