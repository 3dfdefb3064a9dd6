"""Snapshots of safetensors files and Hugging Face repos, through the public API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actorsnap import Snapshot
from actorsnap.errors import ChecksumMismatch, FormatError, NotASnapshot


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 2, dtype=torch.float16))


def write_file(path: Path, state: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def write_repo(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Two files, and the index that Hugging Face writes."""
    names = sorted(state)
    files = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(files.values()):
        write_file(folder / file, {n: state[n] for n in names if files[n] == file})
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["file", "folder", "repo"])
async def test_restores_in_place(tmp_path: Path, kind: str) -> None:
    saved, model = make_model(0), make_model(1)
    if kind == "repo":
        write_repo(tmp_path, saved.state_dict())
    else:
        write_file(tmp_path / "model.safetensors", saved.state_dict())
    snapshot = Snapshot(tmp_path / "model.safetensors" if kind == "file" else tmp_path)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    report = await snapshot.restore({"model": model})
    assert report.is_complete
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(await snapshot.read_object(f"model/{name}"), value)


async def test_missing_file_of_a_repo(tmp_path: Path) -> None:
    write_repo(tmp_path, make_model().state_dict())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ChecksumMismatch, match="model-00002-of-00002.safetensors.*missing"):
        await Snapshot(tmp_path).get_manifest()


async def test_truncated(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, make_model().state_dict())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model\.safetensors.*truncated"):
        await Snapshot(tmp_path).get_manifest()


async def test_delete_leaves_other_formats_alone(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", make_model().state_dict())
    with pytest.raises(NotASnapshot):
        await Snapshot(tmp_path).delete()
    assert (tmp_path / "model.safetensors").exists()
