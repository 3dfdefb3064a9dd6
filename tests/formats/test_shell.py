# SPDX-License-Identifier: Apache-2.0
"""The shell on checkpoints of other formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actorsnap import StateDict
from actorsnap.sync import Snapshot
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
    assert ("all 24 B of data were read" if full else "no data was read") in ended.out
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


def test_an_export_names_the_keys_that_it_leaves_out(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"model": StateDict(w=torch.ones(2)), "at": StateDict(step=1)})
    ended = run("export", tmp_path / "s", tmp_path / "a", "--to", "hf")
    assert "left out 'at': without --key, only 'model' is exported" in " ".join(ended.err.split())
    assert run("export", tmp_path / "s", tmp_path / "b", "--to", "hf", "--key", "model").err == ""


def test_an_export_names_only_a_few_of_the_values_that_it_leaves_out(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "lr": {f"w{n}": 0.1 for n in range(200)}}
    Snapshot.take(tmp_path / "s", {"train": StateDict(state)})
    ended = run("export", tmp_path / "s", tmp_path / "a", "--to", "hf", "--key", "train")
    assert ended.code == 0
    assert ended.err.splitlines() == [
        *[f"left out 'train/lr/w{n}': it is not a tensor" for n in range(5)],
        "left out 195 more values; --json names all",
    ]
    arguments = ("--to", "hf", "--key", "train", "--json", "--overwrite")
    found = json.loads(run("export", tmp_path / "s", tmp_path / "a", *arguments).out)
    assert len(found["left_out"]) == 200


def test_convert_then_export(file: Path, tmp_path: Path) -> None:
    ended = run("convert", file, tmp_path / "s")
    assert ended.lines[0] == f"read {file}: safetensors"
    assert "1 tensor, 0 values, 24 B" in ended.lines[1]
    assert "verify --full" in ended.lines[2]
    s, out = tmp_path / "s", tmp_path / "out"
    ended = run(
        "export", s, out, "--to", "hf", "--dtype", "bfloat16", "--rename", "model/w=model/v"
    )
    assert (ended.code, ended.lines) == (0, ["exported 1 tensor to 1 file, 4.0 KiB"])
    assert load_file(out / "model.safetensors")["v"].dtype == torch.bfloat16
    assert run("export", s, out, "--to", "hf").code == 4
    assert run("export", s, out, "--to", "hf", "--overwrite").code == 0
    assert run("export", s, tmp_path / "x.pt", "--to", "torch", "--key", "model").code == 0
    assert torch.load(tmp_path / "x.pt")["w"].shape == (2, 3)
    assert '".metadata"' in run("export", s, tmp_path / "d", "--to", "dcp", "--json").out
    assert run("export", s, out, "--to", "dcp", "--dtype", "float16").code == 2
    assert run("export", s, out, "--to", "hf", "--rename", "model").code == 2
