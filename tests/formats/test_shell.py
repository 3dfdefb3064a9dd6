"""The shell on checkpoints of other formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.formats.checkpoints import write_safetensors
from tests.test_cli import run

pytestmark = pytest.mark.blocking


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.arange(6.0).view(2, 3)})
    return tmp_path / "model.safetensors"


def test_looks(file: Path) -> None:
    assert run("ls", file).lines == ["0/model/w\tfloat32[2, 3]\t24 B"]
    shown = run("inspect", file)
    assert shown.lines[1].endswith("world size 1, safetensors")
    assert run("cat", file, "model/w").out.startswith("tensor([[0., 1., 2.]")


@pytest.mark.parametrize("full", [(), ("--full",)])
def test_verify(file: Path, full: tuple[str, ...]) -> None:
    ended = run("verify", *full, file)
    assert ended.code == 0
    assert "no checksums: there is nothing to compare with" in ended.out
    assert '"has_checksums": false' in run("verify", *full, "--json", file).out


def test_cp_then_diff(file: Path, tmp_path: Path) -> None:
    assert run("cp", file, tmp_path / "s").code == 0
    assert "compared with checksums" in run("verify", "--full", tmp_path / "s").out
    ended = run("diff", file, tmp_path / "s")
    assert ended.code == 2
    assert "no checksums to compare" in ended.err


def test_rm_refuses(file: Path) -> None:
    ended = run("rm", "--yes", file)
    assert ended.code == 2
    assert "rm deletes only snapshots" in " ".join(ended.err.split())
    assert file.exists()
