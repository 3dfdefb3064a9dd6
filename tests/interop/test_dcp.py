"""``torch.distributed.checkpoint`` over snapshots, in one process (``actorsnap.interop.dcp``)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

from actorsnap import StateDict
from actorsnap.interop.dcp import ActorsnapReader, ActorsnapWriter
from actorsnap.sync import Snapshot

dcp: Any = torch.distributed.checkpoint  # its stubs export little

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _state(scale: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(8, 6) * scale
    return {
        "model": {"layer.weight": weight, "tied": weight, "bias": torch.randn(6).bfloat16()},
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(6, 8).t()}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "deep": [[1, 2], [{"x": torch.arange(3)}], (torch.ones(2), "s")],
        "step": 7,
        "name": "run",
        "nothing": None,
        "numbers": [1.5, 2.5],
        "flat": torch.arange(4),
        "bytes": b"\x00\xff",
        "io": io.BytesIO(b"content"),
        "array": np.arange(5, dtype=np.int32),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }


def _zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)({key: _zeroed(item) for key, item in value.items()})
    if isinstance(value, list):
        return [_zeroed(item) for item in value]
    return "other"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    if isinstance(one, dict):
        return [*map(str, one)] == [*map(str, other)] and all(
            map(_same, one.values(), other.values())
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def test_a_state_dict_round_trips_as_a_snapshot(tmp_path: Path) -> None:
    state = _state()
    metadata = dcp.save(state, storage_writer=ActorsnapWriter(tmp_path / "s"))
    assert not [*tmp_path.glob("s/.metadata"), *tmp_path.rglob("*.distcp")]
    back = _zeroed(state)
    weight = back["model"]["layer.weight"]
    dcp.load(back, storage_reader=ActorsnapReader(tmp_path / "s"))
    assert _same(state, back)
    assert back["model"]["layer.weight"] is weight
    read = ActorsnapReader(tmp_path / "s").read_metadata()
    assert read.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    assert read.planner_data == metadata.planner_data


def test_actorsnap_reads_it(tmp_path: Path) -> None:
    state = _state()
    dcp.save(state, storage_writer=ActorsnapWriter(tmp_path / "s", step=3, metadata={"a": 1}))
    snapshot = Snapshot(tmp_path / "s")
    assert snapshot.verify("full").ok
    assert (snapshot.step, snapshot.metadata["a"]) == (3, 1)
    assert snapshot.read_object("dcp/step") == 7
    assert snapshot.read_object("optim/param_groups/0/betas") == (0.9, 0.999)
    model = StateDict(**_zeroed(state["model"]))
    snapshot.restore({"model": model})
    assert _same(dict(model), state["model"])


def test_dcp_reads_an_ordinary_snapshot(tmp_path: Path) -> None:
    state = _state()
    nested = {key: StateDict(value) for key, value in state.items() if isinstance(value, dict)}
    nested["more"] = StateDict(x=(1, 2), y=[3, 4], z=[torch.ones(2)], deep=state["deep"])
    Snapshot.take(tmp_path / "s", nested)
    back = {key: _zeroed(dict(value)) for key, value in nested.items()}
    dcp.load(back, storage_reader=ActorsnapReader(tmp_path / "s"))
    assert _same({key: dict(value) for key, value in nested.items()}, back)
