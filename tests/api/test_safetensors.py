# SPDX-License-Identifier: Apache-2.0
"""Data objects are safetensors files: the real library opens them, without actorsnap's help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from actorsnap import Options, StateDict
from actorsnap.sync import Snapshot
from tests.api.same import assert_same, raw_bytes
from tests.api.states import CASES, DTYPES, dense

MIB = 1 << 20


def objects(folder: Path, name: str) -> list[Path]:
    found = sorted(folder.glob(f"*/data/{name}/*.safetensors"))
    assert found, f"no data object of {name!r}"
    return found


def load(paths: list[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        part = safetensors.torch.load_file(path)
        assert not part.keys() & tensors.keys()
        tensors |= part
    return tensors


@pytest.mark.parametrize("num_objects", [1, 3])
def test_a_module_is_loaded_without_actorsnap(tmp_path: Path, num_objects: int) -> None:
    def build(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Embedding(3000, 800),
            torch.nn.Linear(800, 3000),
            torch.nn.BatchNorm1d(3000),
            torch.nn.Conv2d(2, 3, 3),
        )
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    model, other = build(1), build(2)
    options = Options(max_objects=num_objects, min_object_bytes=MIB // 2)
    Snapshot.take(tmp_path, {"model": model}, options=options)
    paths = objects(tmp_path, "model")
    assert len(paths) == num_objects
    tensors = load(paths)
    assert tensors.keys() == model.state_dict().keys()
    other.load_state_dict(tensors)
    for name, value in model.state_dict().items():
        assert_same(other.state_dict()[name], value, name)


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return 8 + length, header


def test_alignment_and_order(tmp_path: Path) -> None:
    state = {f"{name}-{n}": dense(DTYPES[name], 3, 5, n + 1) for n in range(3) for name in DTYPES}
    state["big"] = dense(torch.int16, MIB)
    Snapshot.take(tmp_path, {"s": StateDict(state)})
    (path,) = objects(tmp_path, "s")
    begin, header = header_of(path)
    assert begin % 4096 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    position = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == position, f"a gap before {name}"
        # Aligned to what the manifest says it is, so that a reader may map it.
        assert (begin + start) % state[name].dtype.itemsize == 0
        position = stop
    assert begin + position == path.stat().st_size


def test_every_dtype_that_safetensors_knows(tmp_path: Path) -> None:
    """As itself; what it lacks as its bytes."""
    state = {name: dense(dtype, 2, 6) for name, dtype in DTYPES.items()}
    Snapshot.take(tmp_path, {"s": StateDict(state)})
    (path,) = objects(tmp_path, "=small")
    tensors = load([path])
    own = {
        *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        "float4_e2m1fn_x2",
    }
    for name, tensor in state.items():
        found = tensors[f"s/{name}"]
        assert raw_bytes(found) == raw_bytes(tensor), name
        if found.dtype == tensor.dtype:
            assert found.shape == tensor.shape, name
        else:
            assert found.dtype == torch.uint8, name
            assert found.shape == (tensor.nbytes,), name
    assert {n for n in state if tensors[f"s/{n}"].dtype == state[n].dtype} == own


def test_odd_leaves_are_valid_files_too(tmp_path: Path) -> None:
    for number, (case, build) in enumerate(CASES.items()):
        place = tmp_path / str(number)
        Snapshot.take(place, {"s": StateDict(build())})
        for path in place.glob("*/data/*/*.safetensors"):
            with safetensors.safe_open(path, "pt") as file:
                names = list(file.keys())
                assert names, case
                for name in names:
                    file.get_tensor(name)


def test_names(tmp_path: Path) -> None:
    """Below the key; whole paths where an object holds several keys."""
    large = StateDict({"__metadata__": torch.ones(2), "a": {"b/c": torch.ones(MIB // 4)}})
    state = {"large": large, "x/y": StateDict(n=torch.ones(1)), "z": StateDict(m=torch.zeros(1))}
    Snapshot.take(tmp_path, state)
    assert load(objects(tmp_path, "large")).keys() == {"%5F_metadata__", "a/b%2Fc"}
    assert load(objects(tmp_path, "=small")).keys() == {"x%2Fy/n", "z/m"}


@pytest.mark.parametrize(
    ("key", "folder"),
    [
        ("a/b ü", "a=2Fb=20=C3=BC"),
        ("", "="),
        ("1", "1"),
        ("=small", "=3Dsmall"),
        ("..", "=2E."),
        ("%2F", "=252F"),
        ("\ud800@", "=ED=A0=80=40"),
    ],
)
def test_folders_are_named_after_keys(tmp_path: Path, key: str, folder: str) -> None:
    Snapshot.take(tmp_path, {key: StateDict(x=torch.ones(MIB // 4))})
    assert load(objects(tmp_path, folder)).keys() == {"x"}


def test_what_has_no_tensors(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"s": StateDict(step=1, empty=np.empty(0))})
    (path,) = objects(tmp_path, "=small")
    assert load([path])["s/empty"].shape == (0,)
