# SPDX-License-Identifier: Apache-2.0
"""Default devices other than the CPU, and modules on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actorsnap import IncompatibleState, RNGState, StateDict, Stateful
from actorsnap.sync import Snapshot
from tests.api.same import assert_same


@pytest.fixture(params=["with", "set_default_device"])
def meta_by_default(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "with":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def state() -> dict[str, Any]:
    with torch.device("cpu"):
        base = torch.arange(10.0)
        channels = torch.tensor([0.1, 0.2], dtype=torch.float64)
        return {
            "base": base,
            "view": base[2:5],
            "odd": base.view(torch.uint8)[1:9],
            "expanded": torch.ones(1).expand(4),
            "half": torch.ones(2, dtype=torch.int32).view(torch.complex32),
            "coo": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "channels": torch.quantize_per_channel(
                torch.ones(2, 2), channels, torch.zeros(2, dtype=torch.int64), 0, torch.qint8
            ),
            "array": np.arange(3),
            "parameter": nn.Parameter(torch.ones(2)),
            "number": 5,
        }


@pytest.mark.filterwarnings("ignore:.*(deprecated|beta state|Sparse invariant).*:UserWarning")
@pytest.mark.usefixtures("meta_by_default")
def test_the_default_device_is_of_no_account(tmp_path: Path) -> None:
    saved = state()
    Snapshot.take(tmp_path / "a", {"s": StateDict(saved), "rng": RNGState()})
    snapshot = Snapshot(tmp_path / "a")
    fresh = StateDict()
    target = StateDict(state())
    target["base"].zero_()
    snapshot.restore({"s": fresh, "rng": RNGState()})
    snapshot.restore({"s": target})
    with torch.device("cpu"):
        assert_same(dict(fresh), saved)
        assert_same(dict(target), saved)
        assert_same(snapshot.get_state_dict_for_key("s"), saved)
        for name, value in saved.items():
            assert_same(snapshot.read_object(f"s/{name}"), value)
    Snapshot.async_take(tmp_path / "b", {"s": StateDict(saved), "rng": RNGState()}).wait()


class Net(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("mean", torch.ones(2))
        self.a.bias.requires_grad_(False)


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


def test_a_module_on_meta_is_loaded(tmp_path: Path) -> None:
    saved = Net()
    Snapshot.take(tmp_path, {"m": saved})
    module = meta_net()
    assert Snapshot(tmp_path).restore({"m": module}).is_complete
    for name, value in saved.state_dict(keep_vars=True).items():
        found = module.state_dict(keep_vars=True)[name]
        assert found.device.type == "cpu"
        assert type(found) is type(value)
        assert found.requires_grad == value.requires_grad
        assert torch.equal(found, value)
    assert module.a.weight is module.b.weight
    module.b(module.a(torch.ones(3))).sum().backward()


def test_only_what_is_on_meta_is_replaced(tmp_path: Path) -> None:
    saved = Net()
    Snapshot.take(tmp_path, {"m": saved})
    module = meta_net()
    bias = module.a.bias = nn.Parameter(torch.zeros(3))
    mean = module.mean = torch.zeros(2)
    Snapshot(tmp_path).restore({"m": module})
    assert module.a.bias is bias
    assert module.mean is mean
    assert torch.equal(bias, saved.a.bias)
    assert torch.equal(mean, saved.mean)
    assert torch.equal(module.a.weight, saved.a.weight)


def test_tied_on_meta_and_untied_in_the_snapshot(tmp_path: Path) -> None:
    """Each gets its own value, as ``load_state_dict(assign=True)`` does it."""
    saved = Net()
    saved.b.weight = nn.Parameter(torch.ones(3, 3))
    Snapshot.take(tmp_path, {"m": saved})
    module = meta_net()
    Snapshot(tmp_path).restore({"m": module})
    assert torch.equal(module.a.weight, saved.a.weight)
    assert torch.equal(module.b.weight, saved.b.weight)


def test_what_is_missing_stays_on_meta(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"m": nn.Linear(3, 3, bias=False)})
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    report = Snapshot(tmp_path).restore({"m": module}, strict=False)
    assert report.missing == ("m/bias",)
    assert module.bias.is_meta
    assert not module.weight.is_meta


def test_loose_tensors_on_meta(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"s": StateDict(x=torch.ones(3))})
    target = StateDict(x=torch.zeros(3, device="meta"))
    Snapshot(tmp_path).restore({"s": target})
    assert torch.equal(target["x"], torch.ones(3))


class Wrapper:
    """Loads as most do: by copying."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(state_dict)


class NoAssign(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict)


def test_who_cannot_assign_refuses(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"w": Wrapper(nn.Linear(3, 3)), "n": nn.Linear(3, 3)})
    with torch.device("meta"):
        app_state: dict[str, Stateful] = {"w": Wrapper(nn.Linear(3, 3)), "n": NoAssign(3, 3)}
    with pytest.raises(IncompatibleState) as caught:
        Snapshot(tmp_path).restore(app_state)
    assert [line.split(":")[0] for line in caught.value.mismatched] == [
        "n/weight",
        "n/bias",
        "w/weight",
        "w/bias",
    ]
    assert "meta device" in str(caught.value)
    assert "to_empty" in str(caught.value)


def test_an_optimizer_of_a_meta_module_refuses(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        module = nn.Linear(2, 2)
        return {"m": module, "o": torch.optim.Adam(module.parameters())}

    app_state = make()
    app_state["m"](torch.ones(2)).sum().backward()
    app_state["o"].step()
    Snapshot.take(tmp_path, app_state)
    with torch.device("meta"):
        app_state = make()
    with pytest.raises(IncompatibleState, match="make the optimizer after"):
        Snapshot(tmp_path).restore(app_state)
    Snapshot(tmp_path).restore({"m": app_state["m"]})
    optimizer = torch.optim.Adam(app_state["m"].parameters())
    Snapshot(tmp_path).restore({"o": optimizer})
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_what_is_left_out_on_meta_keeps_its_values(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    saved = torch.optim.Adam(module.parameters(), lr=0.5)
    module(torch.ones(2)).sum().backward()
    saved.step()
    Snapshot.take(tmp_path, {"o": saved, "w": Wrapper(module), "z": StateDict(x=1)})
    with torch.device("meta"):
        target = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(target.parameters(), lr=0.1)
    taker = Taker(x=0, **target.state_dict())
    rest = StateDict(x=0)
    app_state: dict[str, Any] = {"o": optimizer, "w": taker, "z": rest}
    report = Snapshot(tmp_path).restore(app_state, strict=False)
    assert [line.partition(":")[0] for line in report.mismatched] == ["o", "w/weight", "w/bias"]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state
    assert taker.state["weight"].is_meta
    assert rest["x"] == 1


class Taker:
    """Takes what it is given, without a word that it can."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Untied(nn.Module):
    one: torch.Tensor
    two: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(4))
        self.part = nn.Parameter(torch.zeros(2))
        self.register_buffer("one", torch.zeros(3))
        self.register_buffer("two", torch.zeros(3))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_untied_stays_untied_where_it_was_saved_tied(tmp_path: Path, device: str) -> None:
    saved = Untied()
    saved.a = saved.b = nn.Parameter(torch.arange(4.0))
    saved.part = nn.Parameter(saved.a.detach()[2:])
    saved.one = saved.two = torch.arange(3.0)
    Snapshot.take(tmp_path, {"m": saved})
    with torch.device(device):
        module = Untied()
    Snapshot(tmp_path).restore({"m": module})
    found = module.state_dict(keep_vars=True)
    for name, value in saved.state_dict().items():
        assert torch.equal(found[name], value), name
        assert found[name].is_leaf
    assert len({each.untyped_storage().data_ptr() for each in found.values()}) == len(found)
