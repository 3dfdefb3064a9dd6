# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` over snapshots, in one process (``actorsnap.interop.dcp``)."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import importlib
import io
import logging
import pickle
import sys
from collections import deque
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import anyio.lowlevel
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from actorsnap import NotASnapshot, ObjectExists, Options, StateDict, UsageError
from actorsnap.format.manifest import TensorEntry
from actorsnap.interop import dcp as ours
from actorsnap.interop.dcp import (
    ActorsnapReader,
    ActorsnapStager,
    ActorsnapWriter,
    install,
    installed,
)
from actorsnap.runtime.host import Host
from actorsnap.sync import Snapshot
from tests.pages import ROOT, blocks

dcp: Any = torch.distributed.checkpoint  # its stubs export little

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.9's own writer
]


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


def _same(one: Any, other: Any) -> Any:
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


def test_one_import_changed(tmp_path: Path) -> None:
    state = _state()
    metadata = ours.save(state, checkpoint_id=tmp_path / "s")
    assert [*map(str, tmp_path.glob("s/*.json"))]
    back = _zeroed(state)
    weight = back["model"]["layer.weight"]
    ours.load(back, checkpoint_id=tmp_path / "s")
    assert _same(state, back)
    assert back["model"]["layer.weight"] is weight
    # The same as through torch's functions, in both directions.
    through = dcp.save(state, storage_writer=ActorsnapWriter(tmp_path / "t"))
    assert metadata.planner_data == through.planner_data
    assert metadata.state_dict_metadata.keys() == through.state_dict_metadata.keys()
    for load, folder in ((ours.load, "t"), (dcp.load, "s")):
        back = _zeroed(state)
        load(back, storage_reader=ActorsnapReader(tmp_path / folder))
        assert _same(state, back)


def test_a_future_of_an_asynchronous_save(tmp_path: Path) -> None:
    state = _state()
    expected = copy.deepcopy(state)
    future = ours.async_save(state, storage_writer=ActorsnapWriter(tmp_path / "s", marker=True))
    state["model"]["layer.weight"].zero_()
    assert "model.layer.weight" in future.result().state_dict_metadata
    assert (tmp_path / "s" / ".metadata").read_text().startswith("# actorsnap")
    back = _zeroed(state)
    ours.load(back, checkpoint_id=tmp_path / "s")
    assert _same(expected, back)
    with pytest.raises(CheckpointException) as caught:
        ours.async_save(
            state, storage_writer=ActorsnapWriter(tmp_path / "s", overwrite=False)
        ).result()
    assert isinstance(caught.value.failures[0][0], ObjectExists)


@pytest.mark.parametrize("passed", ["writer", "stager"])
def test_staging_copies_into_the_arena(tmp_path: Path, passed: str) -> None:
    state = _state()
    expected = copy.deepcopy(state)
    writer = ActorsnapWriter(tmp_path / "s")
    stager = ActorsnapStager() if passed == "stager" else None
    staged = (stager or writer).stage(state)
    assert staged["model"]["tied"].data_ptr() == staged["model"]["layer.weight"].data_ptr()
    assert _same(staged, expected)
    lent = Host.get().resources.arena.lent_bytes
    assert lent >= staged["model"]["tied"].nbytes
    del staged
    gc.collect()
    Host.get().submit(anyio.lowlevel.checkpoint()).future.result()
    assert Host.get().resources.arena.lent_bytes < lent
    future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    state["model"]["layer.weight"].zero_()
    future.result()
    back = _zeroed(state)
    dcp.load(back, storage_reader=ActorsnapReader(tmp_path / "s"))
    assert _same(expected, back)


def test_installed(tmp_path: Path) -> None:
    state = _state()
    torchs = dcp.FileSystemWriter
    dcp.save(state, checkpoint_id=tmp_path / "old")
    with installed(marker=True):
        assert dcp.FileSystemWriter is not torchs
        dcp.save(state, checkpoint_id=str(tmp_path / "s"))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "t", True, thread_count=2))
        for folder in ("s", "t"):
            back = _zeroed(state)
            dcp.load(back, checkpoint_id=tmp_path / folder)
            assert _same(state, back)
        back = _zeroed(state)
        dcp.load(back, checkpoint_id=tmp_path / "old")  # torch's, an array of numpy among it
        assert _same(state, back)
        with pytest.raises(UsageError, match="installed already"):
            install()
        with pytest.raises(RuntimeError, match="Cannot detect"):
            dcp.save(state, checkpoint_id="nowhere://x")
    assert dcp.FileSystemWriter is torchs
    assert Snapshot(tmp_path / "s").verify("full").ok
    assert Snapshot(tmp_path / "t").verify("full").ok
    with pytest.raises(CheckpointException):  # an UnpicklingError
        dcp.load(_zeroed(state), checkpoint_id=tmp_path / "s")
    back = _zeroed({key: state[key] for key in back})
    ours.load(back, checkpoint_id=tmp_path / "old")
    assert _same({key: state[key] for key in back}, back)


def test_torchs_converters_when_installed(tmp_path: Path) -> None:
    format_utils: Any = importlib.import_module("torch.distributed.checkpoint.format_utils")
    state = {"model": {"w": torch.arange(4.0)}, "step": 3}
    torch.save(state, tmp_path / "a.pt")
    with installed():
        format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "s")
        format_utils.dcp_to_torch_save(tmp_path / "s", tmp_path / "b.pt")
    assert Snapshot(tmp_path / "s").verify().ok
    assert _same(dict(sorted(torch.load(tmp_path / "b.pt").items())), state)


def test_a_subset_of_keys(tmp_path: Path) -> None:
    state = _state()
    ours.save(state, checkpoint_id=tmp_path / "s")
    loaded = state_dict_loader._load_state_dict_from_keys(
        {"optim.state", "step"}, storage_reader=ActorsnapReader(tmp_path / "s")
    )
    assert _same(
        dict(sorted(loaded.items())), {"optim": {"state": state["optim"]["state"]}, "step": 7}
    )


class _Renames(DefaultSavePlanner):
    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"new_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class _Halves(DefaultSavePlanner):
    """Casts, as in torch's documentation."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, item: Any) -> Any:
        data: Any = super().resolve_data(item)
        return data if item.tensor_data is None else data.to(torch.float16)


def test_planners_rename_cast_and_load_partly(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {"x": torch.arange(4.0)}, "b": 3}
    dcp.save(state, storage_writer=ActorsnapWriter(tmp_path / "r"), planner=_Renames())
    back: dict[str, Any] = {"new_a": {"x": torch.zeros(4)}, "new_b": 0}
    dcp.load(back, storage_reader=ActorsnapReader(tmp_path / "r"))
    assert _same(back, {"new_a": state["a"], "new_b": 3})
    ours.save(state, checkpoint_id=tmp_path / "h", planner=_Halves())
    entry = Snapshot(tmp_path / "h").get_manifest()["0/a/x"]
    assert isinstance(entry, TensorEntry)
    assert entry.dtype == "float16"
    whole: dict[str, Any] = {"a": {"x": torch.zeros(4)}, "b": 0}
    ours.load(whole, checkpoint_id=tmp_path / "h")
    assert _same(whole, state)
    more: dict[str, Any] = {"a": {"x": torch.zeros(4), "y": torch.zeros(1)}}
    for load in (dcp.load, ours.load):
        with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: a.y"):
            load(more, storage_reader=ActorsnapReader(tmp_path / "h"))
    partly = DefaultLoadPlanner(allow_partial_load=True)
    ours.load(more, checkpoint_id=tmp_path / "h", planner=partly)
    assert _same(more["a"]["x"], state["a"]["x"])


@pytest.mark.parametrize("load", [dcp.load, ours.load], ids=["torch", "ours"])
def test_what_does_not_fit(tmp_path: Path, load: Any) -> None:
    ours.save({"a": {"x": torch.arange(4.0)}}, checkpoint_id=tmp_path / "s")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": {"x": torch.zeros(5)}}, storage_reader=ActorsnapReader(tmp_path / "s"))
    with pytest.raises(CheckpointException) as caught:
        load({}, storage_reader=ActorsnapReader(tmp_path / "none"))
    assert isinstance(caught.value.failures[0][0], NotASnapshot)
    cast: dict[str, Any] = {"a": {"x": torch.zeros(4, dtype=torch.int64)}}
    load(cast, storage_reader=ActorsnapReader(tmp_path / "s"))
    assert cast["a"]["x"].tolist() == [0, 1, 2, 3]
    strided: dict[str, Any] = {"a": {"x": torch.zeros(4, 2)[:, 0]}}
    load(strided, storage_reader=ActorsnapReader(tmp_path / "s"))
    assert strided["a"]["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("save", [dcp.save, ours.save], ids=["torch", "ours"])
def test_overwriting(tmp_path: Path, save: Any) -> None:
    for number in range(2):
        save({"n": number}, storage_writer=ActorsnapWriter(tmp_path / "s"))
    with pytest.raises(CheckpointException, match=r"Checkpoint already exists.*self.overwrite="):
        save({"n": 2}, storage_writer=ActorsnapWriter(tmp_path / "s", overwrite=False))
    assert Snapshot(tmp_path / "s").read_object("dcp/n") == 1


def test_errors_have_the_names_of_the_state_dict(tmp_path: Path) -> None:
    """Not those of the snapshot, where leaves of the top level are below a key."""
    with pytest.raises(CheckpointException) as caught:
        ours.save({"a": Fraction(1, 3), "b": {"dcp": Fraction(1, 4)}}, checkpoint_id=tmp_path / "s")
    for text in (str(caught.value), str(caught.value.__cause__)):
        assert [line.strip().split(" has ")[0] for line in text.splitlines()[1:]] == [
            "'b/dcp'",
            "'a'",
        ]
    assert pickle.loads(pickle.dumps(caught.value)).failures.keys() == {0}


@pytest.mark.parametrize("save", [dcp.save, ours.save], ids=["torch", "ours"])
def test_objects_need_allow_pickle(tmp_path: Path, save: Any) -> None:
    state = {"a": {"value": Fraction(1, 3)}}
    with pytest.raises(CheckpointException, match="'a/value' has the type fractions.Fraction"):
        save(state, storage_writer=ActorsnapWriter(tmp_path / "s"))
    options = Options(allow_pickle=True)
    save(state, storage_writer=ActorsnapWriter(tmp_path / "s", options=options))
    back = {"a": {"value": None}}
    with pytest.raises(CheckpointException, match="allow_pickle"):
        dcp.load(back, storage_reader=ActorsnapReader(tmp_path / "s"))
    dcp.load(back, storage_reader=ActorsnapReader(tmp_path / "s", options=options))
    assert back == state


class Phase(enum.Enum):
    WARM = 1


@dataclasses.dataclass
class Config:
    lr: float
    phase: Phase = Phase.WARM


@pytest.mark.parametrize("save", [dcp.save, ours.save], ids=["torch", "ours"])
@pytest.mark.parametrize("load", [dcp.load, ours.load], ids=["torch", "ours"])
def test_values_and_records_need_no_pickle(tmp_path: Path, save: Any, load: Any) -> None:
    state = {
        "seen": {1, "a"},
        "a": {"window": deque([torch.ones(2), 0.5], 3), "at": date(2026, 1, 2)},
        "config": Config(0.1),
    }
    save(state, storage_writer=ActorsnapWriter(tmp_path / "s"))
    assert Snapshot(tmp_path / "s").read_object("a/window/1") == 0.5
    back: dict[str, Any] = {"seen": None, "a": {"window": None, "at": None}, "config": None}
    with pytest.raises(CheckpointException, match=r"(?s)allowed_types.*Config"):
        load(back, storage_reader=ActorsnapReader(tmp_path / "s"))
    options = Options(allowed_types=[Config, Phase])
    load(back, storage_reader=ActorsnapReader(tmp_path / "s", options=options))
    assert _same(list(back["a"]["window"]), [torch.ones(2), 0.5])
    assert back.pop("a")["window"].maxlen == state.pop("a")["window"].maxlen  # type: ignore[index]
    assert back == state


def test_a_planner_that_does_not_flatten(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "n": [1, (2, 3)]}, "t": torch.zeros(3), "v": 5}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=ActorsnapWriter(tmp_path / "s"), planner=planner)
    back = {"model": {"w": torch.zeros(2)}, "t": torch.ones(3), "v": 0}
    dcp.load(
        back,
        storage_reader=ActorsnapReader(tmp_path / "s"),
        planner=DefaultLoadPlanner(False, flatten_sharded_tensors=False),
    )
    assert _same(back, state)


def test_a_writer_is_pickled_for_a_process(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(ActorsnapWriter(tmp_path / "s", options=Options())))
    assert writer.path == tmp_path / "s"


def test_reserved_and_ambiguous_names(tmp_path: Path) -> None:
    for save in (dcp.save, ours.save):
        with pytest.raises((CheckpointException, UsageError), match="'dcp'"):
            save({"dcp": {"x": 1}}, storage_writer=ActorsnapWriter(tmp_path / "s"))
    Snapshot.take(tmp_path / "t", {"a": StateDict({"b": {0: 1, "0": 2}})})
    with pytest.raises(CheckpointException, match=r"'a/b/0' and 'a/b/%30'.*one name"):
        dcp.load({}, storage_reader=ActorsnapReader(tmp_path / "t"))


def test_other_storages() -> None:
    for save in (dcp.save, ours.save):
        save({"n": torch.ones(3)}, storage_writer=ActorsnapWriter("memory://dcp"))
        back = {"n": torch.zeros(3)}
        ours.load(back, checkpoint_id="memory://dcp")
        assert back["n"].sum() == 3


class _Counter:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "t": torch.full((2,), float(self.n))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["t"].tolist() == [state["n"]] * 2
        self.n = state["n"]


@pytest.mark.parametrize("calls", [dcp, ours], ids=["torch", "ours"])
def test_statefuls(tmp_path: Path, calls: Any) -> None:
    counter = _Counter()
    counter.n = 5
    calls.save({"c": counter}, storage_writer=ActorsnapWriter(tmp_path / "s"))
    counter.n = 9
    calls.load({"c": counter}, storage_reader=ActorsnapReader(tmp_path / "s"))
    assert counter.n == 5


@pytest.mark.parametrize("save", [dcp.save, ours.async_save], ids=["torch", "ours"])
def test_the_uploader_process_stores(tmp_path: Path, save: Any) -> None:
    options = Options(offload="process")
    state = {"a": {"x": torch.arange(1 << 16)}}
    done = save(state, storage_writer=ActorsnapWriter(tmp_path / "s", options=options))
    if save is ours.async_save:
        done.result()
    uploader = Host.get().resources.uploader
    assert uploader is not None
    assert uploader.is_usable
    back = {"a": {"x": torch.zeros(1 << 16, dtype=torch.int64)}}
    ours.load(back, checkpoint_id=tmp_path / "s")
    assert _same(back, state)


def test_planner_data_of_a_foreign_planner(tmp_path: Path) -> None:
    class Foreign(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return [dataclasses.replace(plan, planner_data=object()) for plan in plans], metadata

    with pytest.raises(CheckpointException, match="Foreign has planner_data of its own"):
        dcp.save({"a": 1}, storage_writer=ActorsnapWriter(tmp_path / "s"), planner=Foreign())


class _Rot13(StreamTransformExtension):
    """What may be a cipher."""

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    @staticmethod
    def from_descriptor(version: str) -> Any:
        raise NotImplementedError

    get_descriptor = transform_to = transform_from = from_descriptor  # type: ignore[assignment]


def test_extensions_are_refused_but_zstandard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZStandard, "is_available", lambda: True)  # its library is another one
    with pytest.raises(UsageError, match=r"_extensions \(ZStandard, _Rot13\)"):
        ActorsnapWriter(tmp_path / "s", _extensions=[ZStandard(), _Rot13()])
    with installed(), pytest.raises(UsageError, match="_Rot13"):
        dcp.FileSystemWriter(tmp_path / "s", _extensions=[_Rot13()])
    state = {"a": {"x": torch.zeros(1 << 18)}}
    writer = ActorsnapWriter(tmp_path / "s", _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 1 << 16
    back = {"a": {"x": torch.ones(1 << 18)}}
    ours.load(back, checkpoint_id=tmp_path / "s")
    assert _same(back, state)


def test_the_package_has_the_names_of_torchs(tmp_path: Path) -> None:
    calls: Any = ours
    assert calls.FileSystemWriter is ActorsnapWriter
    assert calls.FileSystemReader is ActorsnapReader
    assert calls.DefaultSavePlanner is DefaultSavePlanner
    assert calls.state_dict_saver is dcp.state_dict_saver
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = calls.no_such_name
    with pytest.warns(UserWarning, match="argument order of save"):
        calls.save({"a": 1}, calls.FileSystemWriter(tmp_path / "s"))
    back = {"a": 0}
    with pytest.warns(UserWarning, match="argument order of load"):
        calls.load(back, calls.FileSystemReader(tmp_path / "s"))
    assert back == {"a": 1}


def test_an_empty_state_dict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for save in (dcp.save, ours.save):
        states: list[dict[str, Any]] = [{}, {"c": {}}]
        for state in states:
            save(state, storage_writer=ActorsnapWriter(tmp_path / "s"))
            for load in (dcp.load, ours.load):
                load(state, storage_reader=ActorsnapReader(tmp_path / "s"))
            assert Snapshot(tmp_path / "s").verify("full").ok
    assert "matches no leaf" not in caplog.text


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": {0: torch.ones(1), "0": torch.ones(2)}}, "'a.0'"),
        ({"a": {0: {"x": 1}, "0": {"y": 2}}}, "'a.0'"),
        ({"a": [{"b": {0: torch.ones(1), "0": 1}}]}, "'a.0.b.0'"),
        ({"a": {"b.c": 1}, "a.b": {"c": 2}}, "'a.b.c'"),
        ({"a": {"b": 1}, "a.b": 2}, "'a.b'"),
        ({0: 1, "0": 2}, "'0'"),
        ({0: {"x": 1}, "0": {"x": 2}}, "'0'"),
    ],
)
def test_two_leaves_of_one_name_are_refused(
    tmp_path: Path, state: dict[str, Any], name: str
) -> None:
    with pytest.raises((CheckpointException, UsageError), match=name):
        ours.save(state, checkpoint_id=tmp_path / "s")
    assert not [*tmp_path.glob("s/*.json")]


def test_a_planner_with_other_options_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later torch's, that a load of ours would ignore."""

    def __init__(self: Any, *, allow_unsafe_types: bool = True, **kwargs: Any) -> None:
        init(self, **kwargs)
        self.allow_unsafe_types = allow_unsafe_types

    def create_local_plan(self: Any) -> Any:
        if not self.allow_unsafe_types:
            raise ValueError("dtype mismatch")
        return create(self)

    init, create = DefaultLoadPlanner.__init__, DefaultLoadPlanner.create_local_plan
    state = {"a": {"x": torch.ones(2)}}
    ours.save(state, checkpoint_id=tmp_path / "s")
    monkeypatch.setattr(DefaultLoadPlanner, "__init__", __init__)
    monkeypatch.setattr(DefaultLoadPlanner, "create_local_plan", create_local_plan)
    ours.load(state, checkpoint_id=tmp_path / "s")
    strict: Any = DefaultLoadPlanner
    with pytest.raises(CheckpointException, match="dtype mismatch"):
        ours.load(state, checkpoint_id=tmp_path / "s", planner=strict(allow_unsafe_types=False))


def test_without_a_process_group_a_call_is_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in DCP: also under torchrun, whose ranks ``Snapshot.take`` would wait for."""
    address = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    options = Options(timeout_s=2)
    ways: list[dict[str, Any]] = [{}, {"use_collectives": False}]
    for save in (dcp.save, ours.save):
        for more in ways:
            path = tmp_path / f"{save.__module__}-{len(more)}"
            save({"a": 5}, storage_writer=ActorsnapWriter(path, options=options), **more)
            for load in (dcp.load, ours.load):
                back = {"a": 0}
                load(back, storage_reader=ActorsnapReader(path, options=options, rank=0))
                assert back == {"a": 5}
    future = ours.async_save({"a": 6}, storage_writer=ActorsnapWriter(path, options=options))
    future.result()
    assert Snapshot(path).read_object("dcp/a") == 6


@pytest.mark.parametrize("how", ["torch", "ours", "async"])
def test_ids_of_saves_and_loads(tmp_path: Path, how: str) -> None:
    """As ``FileSystemWriter`` and ``FileSystemReader`` have them."""
    writer, reader = ActorsnapWriter(tmp_path / "s"), ActorsnapReader(tmp_path / "s")
    if how == "async":
        metadata = ours.async_save({"a": 1}, storage_writer=writer).result()
    else:
        metadata = (dcp if how == "torch" else ours).save({"a": 1}, storage_writer=writer)
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert found.load_id == reader.load_id
    for each in (metadata, pickle.loads(pickle.dumps(metadata))):
        assert each.storage_meta.save_id == found.save_id
        assert str(each.storage_meta.checkpoint_id) == str(tmp_path / "s")
    if how != "async":
        assert writer.save_id == found.save_id


def test_a_newer_save_of_dcp_itself_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"

    def loads() -> tuple[list[str], int]:
        caplog.clear()
        state = {"own": {"step": 0}}
        ours.load(state, checkpoint_id=path)
        kept = StateDict(step=0)
        Snapshot(path).restore({"own": kept})
        assert state["own"]["step"] == kept["step"]
        warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
        return [each.getMessage() for each in warnings], kept["step"]

    dcp.save({"own": {"step": 1}}, checkpoint_id=path)
    ours.save({"own": {"step": 2}}, checkpoint_id=path)
    assert loads() == ([], 2)
    ours.save({"own": {"step": 3}}, storage_writer=ActorsnapWriter(path, marker=True))
    assert loads() == ([], 3)
    dcp.save({"own": {"step": 4}}, checkpoint_id=path)
    lines, step = loads()
    assert step == 3
    assert len(lines) == 2
    assert f"{path}: torch's dcp.save has saved here after the snapshot" in lines[0]


def test_a_marker_without_a_snapshot(tmp_path: Path) -> None:
    ours.save({"a": 1}, storage_writer=ActorsnapWriter(tmp_path / "s", marker=True))
    Snapshot(tmp_path / "s").delete()
    assert (tmp_path / "s" / ".metadata").exists()
    for load in (dcp.load, ours.load):
        with pytest.raises(CheckpointException) as caught:
            load({"a": 0}, storage_reader=ActorsnapReader(tmp_path / "s"))
        assert isinstance(caught.value.failures[0][0], NotASnapshot)


def test_installing_leaves_torchs_other_writers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.checkpoint._fsspec_filesystem"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with installed():
        module = importlib.import_module(name)
        assert not issubclass(module.FsspecReader, ActorsnapReader)


def test_the_phases_of_dcp_are_logged_as_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [
        block
        for block in blocks((ROOT / "docs/howto/observability.md").read_text(), "python")
        if "_dcp_logger" in block
    ]
    names: dict[str, Any] = {}
    exec(compile(block, "observability.md", "exec"), names)
    logger = names["_dcp_logger"]

    def phases() -> list[str]:
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]

    try:
        path, state = str(tmp_path / "s"), {"a": {"x": torch.ones(3)}}
        ours.save(state, checkpoint_id=path)
        assert phases() == ["save"]
        ours.save(state, checkpoint_id=path, planner=DefaultSavePlanner(flatten_state_dict=False))
        expected = ["local_step", "global_step", "write_data", "finish_checkpoint", "save"]
        assert [name for name in phases() if name in expected] == expected
        with installed():
            dcp.save(state, checkpoint_id=path)
            assert [name for name in phases() if name in expected] == expected
            dcp.load(state, checkpoint_id=path)
        expected = ["local_step", "global_step", "read_data", "load"]
        assert [name for name in phases() if name in expected] == expected
    finally:
        logger.removeHandler(logger.handlers[-1])


def test_dcps_logger_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per call, whoever makes it."""
    (name,) = [n for n in logging.root.manager.loggerDict if n.endswith("-dcp_logger")]
    caplog.set_level(logging.DEBUG, name)
    events: list[Any] = []

    def keep(record: logging.LogRecord) -> None:
        if record.name == name:
            events.append(dict(cast(Any, record.msg)))

    # torch logs one dict twice, and changes it in between.
    monkeypatch.setattr(caplog.handler, "emit", keep)
    state = {"a": {"x": torch.ones(3)}}
    path = str(tmp_path / "s")
    ours.save(state, checkpoint_id=path)
    ours.async_save(state, checkpoint_id=path).result()
    ours.load(state, checkpoint_id=path)
    ours.save(state, checkpoint_id=path, planner=DefaultSavePlanner(flatten_state_dict=False))
    with pytest.raises(CheckpointException):
        ours.load(state, checkpoint_id=path + "-none")
    calls = [
        (event["func_name"], event["event"], event["checkpoint_id"].removeprefix(path))
        for event in events
        if event["func_name"] in ("save", "async_save", "load")
    ]
    assert calls == [
        *(("save", "start", ""), ("save", "end", "")),
        *(("async_save", "start", ""), ("async_save", "end", "")),
        *(("load", "start", ""), ("load", "end", "")),
        *(("save", "start", ""), ("save", "end", "")),
        *(("load", "start", "-none"), ("load", "exception", "-none")),
    ]
    assert all(event["times_spent"] > 0 for event in events if event["event"] == "end")
