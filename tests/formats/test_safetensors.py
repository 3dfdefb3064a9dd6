# SPDX-License-Identifier: Apache-2.0
"""Snapshots of safetensors files and Hugging Face repos."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorsnap import IncompatibleState, Snapshot
from actorsnap.errors import FormatError
from tests.formats.checkpoints import (
    is_same,
    make_model,
    with_header,
    write_repo,
    write_safetensors,
)


@pytest.mark.parametrize("kind", ["file", "folder", "repo", "unusual name"])
async def test_restores_in_place(tmp_path: Path, kind: str) -> None:
    saved, model = make_model(0), make_model(1)
    name = "weights.safetensors" if kind == "unusual name" else "model.safetensors"
    if kind == "repo":
        write_repo(tmp_path, saved.state_dict())
    else:
        write_safetensors(tmp_path / name, saved.state_dict())
    snapshot = Snapshot(tmp_path / name if kind == "file" else tmp_path)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    report = await snapshot.restore({"model": model})
    assert report.is_complete
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert is_same(model, saved)
    for name, value in saved.state_dict().items():
        assert torch.equal(await snapshot.read_object(f"model/{name}"), value)


async def test_every_dtype(tmp_path: Path) -> None:
    names = (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64"
    )
    names += " complex64 float8_e4m3fn float8_e5m2"
    state = {name: torch.ones(3, 2).to(getattr(torch, name)) for name in names.split()}
    state["scalar"], state["empty"] = torch.tensor(2.5), torch.ones(0, 4)
    save_file(state, tmp_path / "model.safetensors")
    found = await Snapshot(tmp_path).get_state_dict_for_key("model")
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))


async def test_metadata(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    snapshot = Snapshot(tmp_path / "a.safetensors")
    assert await snapshot.metadata == {"format": "pt"}
    assert await snapshot.step is None


async def test_a_tied_weight_under_one_name(tmp_path: Path) -> None:
    def tied() -> torch.nn.Module:
        model = torch.nn.ModuleDict({"e": torch.nn.Embedding(9, 4), "h": torch.nn.Linear(4, 9)})
        model["h"].weight = model["e"].weight
        return model

    saved, model = tied(), tied()
    state = {name: value for name, value in saved.state_dict().items() if name != "h.weight"}
    write_safetensors(tmp_path / "model.safetensors", state)
    assert (await Snapshot(tmp_path).restore({"model": model})).is_complete
    assert is_same(model, saved)
    assert model["h"].weight is model["e"].weight  # type: ignore[index]
    model["h"].weight = torch.nn.Parameter(torch.ones(9, 4))  # type: ignore[index]
    with pytest.raises(IncompatibleState) as caught:
        await Snapshot(tmp_path).restore({"model": model})
    assert caught.value.missing == ("model/h.weight",)


async def test_shards_by_dcp(tmp_path: Path) -> None:
    """DCP's Hugging Face writer stores parts, and where they are in a note in the header."""
    whole = torch.arange(24.0).view(6, 4)
    folder = tmp_path / "sharded"
    folder.mkdir()
    for rank, (start, stop) in enumerate([(0, 4), (4, 6)]):
        note = {"w": {"saved_offsets": [start, 0]}}
        save_file(
            {"w": whole[start:stop].clone()},
            folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(note)},
        )
    assert torch.equal(await Snapshot(tmp_path).read_object("model/w"), whole)
    assert torch.equal(await Snapshot(folder).read_object("model/w"), whole)
    # Consolidated files are the same state.
    save_file({"w": whole + 1}, tmp_path / "model-00001-of-00001.safetensors")
    assert torch.equal(await Snapshot(tmp_path).read_object("model/w"), whole + 1)


async def test_shards_with_a_hole(tmp_path: Path) -> None:
    note = json.dumps({"w": {"saved_offsets": [2, 0]}})
    save_file(
        {"w": torch.ones(2, 4)}, tmp_path / "a.safetensors", metadata={"DCP_SHARDING_INFO": note}
    )
    with pytest.raises(FormatError, match="no shard has the elements"):
        await Snapshot(tmp_path).read_object("model/w")


async def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        save_file({"w": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match="also in .*open one of the files"):
        await Snapshot(tmp_path).get_manifest()


async def test_missing_file_of_a_repo(tmp_path: Path) -> None:
    write_repo(tmp_path, make_model().state_dict())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match="model-00002-of-00002.safetensors.*missing"):
        await Snapshot(tmp_path).get_manifest()


INDEXES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda index: "{",
    "no map": lambda index: json.dumps({"metadata": {}}),
    "outside": lambda index: json.dumps({"weight_map": {"w": "../model.safetensors"}}),
    "lacks": lambda index: json.dumps({"weight_map": {**index["weight_map"], "new": FIRST}}),
}
FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("fault", INDEXES)
async def test_damaged_index(tmp_path: Path, fault: str) -> None:
    write_repo(tmp_path, make_model().state_dict())
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(INDEXES[fault](json.loads(path.read_text())))
    with pytest.raises(FormatError, match=r"index\.json|'new'"):
        await Snapshot(tmp_path).get_manifest()


def _set(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(fields)


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlap": (_set("b", data_offsets=[8, 20]), "overlaps"),
    "hole": (_set("b", data_offsets=[16, 24]), "hole|end at"),
    "shape": (_set("b", shape=[4]), "not those of F32"),
    "negative": (_set("b", shape=[-3]), "not those of F32"),
    "dtype": (_set("b", dtype="F6"), "'F6', which torch lacks"),
    "type": (_set("b", shape="3"), "malformed"),
    "beyond": (_set("b", data_offsets=[12, 1 << 60]), "not those of"),
    "backwards": (_set("b", data_offsets=[12, 4]), "not those of|hole|overlaps"),
    "metadata": (lambda header: {**header, "__metadata__": {"a": 1}}, "malformed"),
    "list": (lambda header: [1], "malformed"),
}


@pytest.mark.parametrize("fault", HEADERS)
async def test_damaged_header(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, path)
    change, match = HEADERS[fault]
    with_header(path, change)
    with pytest.raises(FormatError, match=match) as caught:
        await Snapshot(tmp_path).get_manifest()
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("size", [-1, 1, 7, 100])
async def test_another_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, make_model().state_dict())
    data = path.read_bytes()
    path.write_bytes(data + b"\0" if size == 1 else data[:size])
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        await Snapshot(tmp_path).get_manifest()


async def test_a_long_header(tmp_path: Path) -> None:
    """Longer than what is read at first."""
    state = {f"layer.{number}.{'x' * 50}": torch.tensor([number]) for number in range(3000)}
    save_file(state, tmp_path / "model.safetensors")
    found = await Snapshot(tmp_path).get_state_dict_for_key("model")
    assert {name: int(value) for name, value in found.items()} == {
        name: int(value) for name, value in state.items()
    }
