# SPDX-License-Identifier: Apache-2.0
"""Restores of a part of an app state, under other names, into other dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from actorsnap import IncompatibleState, Options, RestoreReport, StateDict, UsageError
from actorsnap.planning.shared_reads import ReadMode
from actorsnap.protocol.restore import RestoreDecisions
from actorsnap.runtime import partial_index
from actorsnap.runtime.location import Location
from actorsnap.runtime.restore import Overwritten, RestoreCall, restore_by
from actorsnap.runtime.rounds import Alone
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.sync import Snapshot
from tests.state.test_distributed import fake_rank

pytestmark = pytest.mark.blocking


def linear(value: float, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    module = torch.nn.Linear(4, 4, dtype=dtype)
    torch.nn.init.constant_(module.weight, value)
    torch.nn.init.constant_(module.bias, value)
    return module


def is_all(module: torch.nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in module.parameters())


def test_keys(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"a": linear(1), "b": linear(2)})
    state = {"a": linear(0), "b": linear(0)}
    report = Snapshot(tmp_path).restore(state, keys=["b"])
    assert report.is_complete
    assert is_all(state["a"], 0)
    assert is_all(state["b"], 2)
    assert Snapshot(tmp_path).plan_restore(state, keys=["b"]).bytes_needed == report.nbytes
    with pytest.raises(UsageError, match=r"no key 'bb'; did you mean 'b'"):
        Snapshot(tmp_path).restore(state, keys=["bb"])
    with pytest.raises(UsageError, match="keys must be a list"):
        Snapshot(tmp_path).restore(state, keys="b")


@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize(
    "rename",
    [
        {"state_dict/module.": "model/", "state_dict": "model"},
        lambda path: path.replace("state_dict", "model").replace("module.", ""),
    ],
)
def test_rename(tmp_path: Path, is_foreign: bool, rename: Any) -> None:
    saved = {"state_dict": torch.nn.ModuleDict({"module": linear(3)})}
    path = tmp_path / "s"
    if is_foreign:
        torch.save({key: module.state_dict() for key, module in saved.items()}, path)
    else:
        Snapshot.take(path, saved)
    module = linear(0)
    with pytest.raises(IncompatibleState):
        Snapshot(path).restore({"model": module})
    assert Snapshot(path).plan_restore({"model": module}, rename=rename).bytes_needed == 80
    assert Snapshot(path).restore({"model": module}, rename=rename).is_complete
    assert is_all(module, 3)


def test_rename_by_a_prefix(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"model": torch.nn.ModuleDict({"_orig_mod": linear(3)})})
    module = linear(0)
    assert Snapshot(tmp_path).restore({"model": module}, rename="_orig_mod.").is_complete
    assert is_all(module, 3)


def test_a_prefix_that_no_name_has(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path, {"model": linear(3)})
    module = linear(0)
    assert snapshot.restore({"model": module}, rename="_orig_mod.").is_complete
    assert is_all(module, 3)


def test_rename_into_a_compiled_module(tmp_path: Path) -> None:
    """Whose names have a prefix."""
    snapshot = Snapshot.take(tmp_path, {"model": linear(3)})
    compiled = torch.nn.ModuleDict({"_orig_mod": linear(0)})
    snapshot.restore({"model": compiled}, rename={"model/": "model/_orig_mod."})
    assert is_all(compiled["_orig_mod"], 3)


@pytest.mark.parametrize("written_by", ["take", "torch", "safetensors"])
def test_a_renamed_layer(tmp_path: Path, written_by: str) -> None:
    old = torch.nn.ModuleDict({"fc1": linear(3), "fc10": linear(4)})
    path = tmp_path / ("s.safetensors" if written_by == "safetensors" else "s")
    if written_by == "take":
        Snapshot.take(path, {"model": old})
    elif written_by == "torch":
        torch.save(old.state_dict(), path)
    else:
        save_file(old.state_dict(), path)
    new = torch.nn.ModuleDict({"encoder": linear(0), "fc10": linear(0)})
    Snapshot(path).restore({"model": new}, rename={"model/fc1": "model/encoder"})
    assert is_all(new["encoder"], 3)
    assert is_all(new["fc10"], 4)
    for call in (Snapshot(path).restore, Snapshot(path).plan_restore):
        with pytest.raises(UsageError, match="no path that begins with 'model/fcl'; did you mean"):
            call({"model": new}, rename={"model/fcl": "model/encoder"})


def test_a_rename_to_a_name_that_the_app_state_lacks(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path / "s", {"model": torch.nn.Sequential(linear(3), linear(4))})
    model = torch.nn.ModuleDict({"one": linear(0), "1": linear(0)})
    rename = {"model/0": "model/oen"}
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"model": model}, rename=rename)
    assert set(caught.value.unexpected) == {"model/0.weight", "model/0.bias"}
    (hint,) = caught.value.hints
    assert hint == (
        "rename= turns 'model/0.weight' into 'model/oen.weight', which has no place in the app "
        "state"
    )
    assert "pass rename=" not in str(caught.value)
    report = snapshot.restore({"model": model}, rename=rename, strict=False)
    assert set(report.unexpected) == {"model/0.weight", "model/0.bias"}
    assert set(report.missing) == {"model/one.weight", "model/one.bias"}
    assert snapshot.plan_restore({"model": model}, rename=rename).unexpected == report.unexpected


def test_a_layer_becomes_a_key(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"model": torch.nn.Sequential(linear(3), linear(4))})
    layer = linear(0)
    Snapshot(tmp_path / "s").restore({"layer": layer}, rename={"model/1": "layer"})
    assert is_all(layer, 4)
    with pytest.raises(UsageError, match=r"pass rename=\{'model/1': 'layer'\}"):
        Snapshot(tmp_path / "s").restore({"layer": layer}, rename={"layer": "model/1"})
    with pytest.raises(UsageError, match=r"because 'model/0.(weight|bias)' has that path, too"):
        Snapshot(tmp_path / "s").restore(
            {"model": layer}, rename={"model/0": "model", "model/1": "model"}
        )


@pytest.mark.parametrize("few", [0, 64], ids=["in parts", "whole"])
def test_a_layer_is_read(tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_index, "FEW_RANKS", few)
    body = torch.nn.Sequential(linear(3), linear(4))
    model = torch.nn.ModuleDict({"body": body, "body2": linear(5)})
    snapshot = Snapshot.take(tmp_path / "s", {"model": model, "own": StateDict({"a.b": [1, 2]})})
    found = snapshot.read_object("model/body")
    assert list(found) == list(body.state_dict())
    body.load_state_dict(found)
    assert is_all(body[1], 4)
    assert [*snapshot.read_object("0/model/body.1")] == ["weight", "bias"]
    assert snapshot.read_object("own/a") == {"b": [1, 2]}
    for path in ("model/bod", "model/body.", "mod"):
        with pytest.raises(UsageError, match="the snapshot has no path"):
            snapshot.read_object(path)
    with pytest.raises(IncompatibleState, match="model/body: a container in the snapshot"):
        snapshot.read_object("model/body", out=torch.ones(4))


def test_a_key_becomes_a_layer(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"layer": linear(3)})
    model = torch.nn.Sequential(linear(0))
    Snapshot(tmp_path / "s").restore({"model": model}, rename={"layer/": "model/0."})
    assert is_all(model[0], 3)
    with pytest.raises(IncompatibleState) as caught:
        Snapshot(tmp_path / "s").restore({"model": model}, rename={"layer": "model/0"})
    assert any('rename={"KEY/": "model/0."}' in hint for hint in caught.value.hints)


def test_an_optimizer_moves(tmp_path: Path) -> None:
    """As in Lightning's files: a list of optimizers."""
    module = linear(1)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]},
        tmp_path / "x.ckpt",
    )
    other = linear(0)
    another = torch.optim.Adam(other.parameters())
    Snapshot(tmp_path / "x.ckpt").restore(
        {"model": other, "optimizer": another},
        rename={"state_dict": "model", "optimizer_states/0": "optimizer"},
    )
    assert torch.equal(other.weight, module.weight)
    assert str(another.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    Snapshot.take(tmp_path, {"model": linear(1.5, torch.float16)})
    module = linear(0, dtype)
    weight = module.weight
    with pytest.raises(IncompatibleState, match="dtype float16 in the snapshot"):
        Snapshot(tmp_path).restore({"model": module})
    assert Snapshot(tmp_path).restore({"model": module}, cast=True).is_complete
    assert module.weight is weight
    assert weight.dtype is dtype
    assert is_all(module, 1.5)


def test_cast_of_loose_tensors_and_meta(tmp_path: Path) -> None:
    Snapshot.take(
        tmp_path,
        {"s": StateDict(a=torch.ones(3), n=torch.arange(3)), "model": linear(2, torch.bfloat16)},
    )
    a = torch.zeros(3, dtype=torch.float16)
    target = StateDict(a=a, n=torch.arange(3))
    with torch.device("meta"):
        module = torch.nn.Linear(4, 4)
    Snapshot(tmp_path).restore({"s": target, "model": module}, cast=True)
    assert target["a"] is a
    assert a.tolist() == [1, 1, 1]
    assert module.weight.dtype is torch.float32
    assert is_all(module, 2)
    # Only between floating-point dtypes, and of equal shapes.
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.float16)):
        with pytest.raises(IncompatibleState, match="float32 in the snapshot"):
            Snapshot(tmp_path).restore({"s": StateDict(a=wrong, n=torch.arange(3))}, cast=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_strided", [False, True])
def test_a_part_of_a_dtensor(tmp_path: Path, is_strided: bool, dtype: torch.dtype) -> None:
    whole = torch.arange(32.0).view(8, 4)
    saved = whole.t().contiguous().t() if is_strided else whole
    torch.save({"s": {"w": saved}}, tmp_path / "x.pt")
    for rank in range(2):
        with fake_rank(rank, 2):
            mesh = DeviceMesh("cpu", torch.arange(2))
            zeros = torch.zeros(8, 4, dtype=dtype)
            target = distribute_tensor(zeros, mesh, [Shard(0)], src_data_rank=None)
            held = target.to_local().data_ptr()
            report = restored_by(rank, tmp_path / "x.pt", {"s": StateDict(w=target)})
            assert report.is_complete
            assert target.to_local().data_ptr() == held
            assert torch.equal(target.to_local(), whole[4 * rank : 4 * rank + 4].to(dtype))


def restored_by(rank: int, path: Path, app_state: Any) -> RestoreReport:
    """What the rank of a larger group does, with casts."""
    location = Location(display_url=str(path), url=str(path), storage_options={})
    steps = Alone(RestoreDecisions(mode=ReadMode.AUTO), rank=rank)
    source = Source(location, Options())
    script = restore_by(steps, source, RestoreCall(app_state=app_state, cast=True), Overwritten())
    return run_sync(script, name="restore")


def test_a_restore_that_finds_nothing_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Snapshot.take(tmp_path, {"state_dict": linear(1), "at": StateDict(step=3)})
    Snapshot(tmp_path).restore({"model": linear(0)}, strict=False)
    assert "nothing was restored, because no leaf" in caplog.text
    assert "model" in caplog.text
    assert "state_dict" in caplog.text
    caplog.clear()
    Snapshot(tmp_path).restore({"at": StateDict(step=0), "model": linear(0)}, strict=False)
    Snapshot(tmp_path).restore({"state_dict": linear(0)}, strict=False)
    assert not caplog.text
    Snapshot(tmp_path).restore({"state_dict": torch.nn.Linear(7, 9)}, strict=False)
    assert "Mismatched: state_dict/" in caplog.text
    assert "Missing" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_conversion_that_cast_does_not_make(tmp_path: Path, dtype: torch.dtype) -> None:
    Snapshot.take(tmp_path / "s", {"s": StateDict(a=torch.ones(3, dtype=dtype))})
    for cast in (False, True):
        with pytest.raises(IncompatibleState) as caught:
            Snapshot(tmp_path / "s").restore({"s": StateDict(a=torch.ones(3))}, cast=cast)
        told = "; cast=True converts only floating-point dtypes of tensors"
        assert (told in caught.value.mismatched[0]) is cast
