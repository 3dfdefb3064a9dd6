# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state is restored into the class that it was saved from, or by an option."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actorsnap import IncompatibleState, ModelState, Options, StateDict
from actorsnap.state import capture
from actorsnap.sync import Snapshot
from tests.api.same import assert_same
from tests.support.manifests import document_of

pytestmark = pytest.mark.blocking

ADAMW, SGD = "torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"
ANYWAY = Options(allow_optimizer_change=True)
OPTIMIZERS = [name for name in torch.optim.__all__ if name[0].isupper() and name != "Optimizer"]
MORE: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
    torch.optim.AdamW: {"amsgrad": True},
}


class Trainer:
    def __init__(self, kind: type[torch.optim.Optimizer], wrap: bool = False, **more: Any) -> None:
        self.model = nn.Linear(2, 2)
        make: Any = kind
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=0.1, **more)
        self.step()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if wrap:
            self.state = {"train": ModelState(self.model, self.optimizer)}
        self.state["own"] = StateDict(x=0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_the_class_is_recorded(tmp_path: Path, offload: str) -> None:
    trainer = Trainer(torch.optim.AdamW)
    linear = nn.Linear(1, 1)
    both = [torch.optim.SGD([linear.weight], lr=1.0), torch.optim.AdamW([linear.bias])]
    state = trainer.state | {"a/b": ModelState(linear, both), "alone": ModelState(linear)}
    options = Options(offload=offload, fsync=False)
    Snapshot.async_take(tmp_path / "s", state, options=options).wait()
    (manifest,) = (tmp_path / "s").glob("*/manifest/0.json")
    recorded = document_of(manifest.read_bytes())["optimizers"]
    assert recorded == {"optimizer": ADAMW, "a%2Fb/optim": f"{ADAMW}, {SGD}"}
    assert Snapshot(tmp_path / "s").restore(state).is_complete


def fine_tuned(num_classes: int, kind: Any = torch.optim.AdamW, **more: Any) -> dict[str, Any]:
    """A body, a head and an optimizer that has taken no step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, num_classes))
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1, **more)}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.randn(2, 4)).sum().backward()
    state["optimizer"].step()


@pytest.mark.parametrize("first", ["model", "adam"], ids=["after", "before"])
def test_the_state_of_a_parameter_of_another_shape_is_left_out(tmp_path: Path, first: str) -> None:
    """Whichever key is compared first."""
    saved, target = fine_tuned(2), fine_tuned(3)
    step(saved)
    rename = None if first == "model" else {"optimizer": first}
    Snapshot.take(tmp_path / "s", saved)
    if rename is not None:
        target[first] = target.pop("optimizer")
    snapshot = Snapshot(tmp_path / "s")
    report = snapshot.restore(target, strict=False, rename=rename)
    (line,) = [line for line in report.mismatched if not line.startswith("model/")]
    key = first.replace("model", "optimizer")
    assert line.startswith(f"{key}: its saved state does not fit model/1.weight, model/1.bias, of")
    assert [line.partition(":")[0] for line in report.mismatched[:2]] == [
        "model/1.weight",
        "model/1.bias",
    ]
    assert snapshot.plan_restore(target, rename=rename).mismatched == report.mismatched
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore(target, rename=rename)
    assert caught.value.mismatched == report.mismatched
    assert torch.equal(target["model"][0].weight, saved["model"][0].weight)
    assert not target[key].state
    step({"model": target["model"], "optimizer": target[key]})


@pytest.mark.parametrize("is_primed", [False, True])
def test_the_state_of_a_parameter_of_another_shape_is_left_out_without_its_module(
    tmp_path: Path, is_primed: bool
) -> None:
    saved, target = fine_tuned(2), fine_tuned(3)
    step(saved)
    if is_primed:
        step(target)
    Snapshot.take(tmp_path / "s", saved)
    before = copy.deepcopy(target["optimizer"].state_dict())
    with pytest.raises(IncompatibleState, match="nothing was changed") as caught:
        Snapshot(tmp_path / "s").restore({"optimizer": target["optimizer"]})
    (line,) = caught.value.mismatched
    assert line.startswith(
        "optimizer: its saved state does not fit parameter 2 (saved: (2, 8), here: (3, 8)), "
        "parameter 3 (saved: (2,), here: (3,)), of another shape in the app state"
    )
    assert_same(target["optimizer"].state_dict(), before)
    step(target)


@pytest.mark.parametrize(
    "kind",
    [
        *[getattr(torch.optim, name) for name in OPTIMIZERS],
        type("Factored", (torch.optim.SGD,), {"__module__": "mine"}),
    ],
)
def test_the_state_of_any_optimizer_fits_its_own_parameters(tmp_path: Path, kind: Any) -> None:
    """Whatever the shapes of its state are."""
    saved, target = (nn.Linear(8, 4, bias=False) for _ in range(2))
    optimizers = [kind(each.parameters(), **MORE.get(kind, {})) for each in (saved, target)]
    saved(torch.ones(2, 8)).sum().backward()
    if kind is torch.optim.SparseAdam:
        assert saved.weight.grad is not None
        saved.weight.grad = saved.weight.grad.to_sparse()
    optimizers[0].step(lambda: saved(torch.ones(2, 8)).sum())
    if kind.__module__ == "mine":  # of a third party
        optimizers[0].state[saved.weight]["exp_avg"] = torch.ones(2)
    Snapshot.take(tmp_path / "s", {"optimizer": optimizers[0]})
    assert Snapshot(tmp_path / "s").restore({"optimizer": optimizers[1]}).is_complete
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_with_another_dtype_or_without_state_is_restored(
    tmp_path: Path, kind: Any
) -> None:
    saved = fine_tuned(2, kind)
    target = fine_tuned(2 if kind is torch.optim.AdamW else 3, kind)
    step(saved)
    saved["optimizer"].param_groups[0]["lr"] = 0.5
    target["model"][1].to(torch.float64)
    Snapshot.take(tmp_path / "s", saved)
    report = Snapshot(tmp_path / "s").restore(target, strict=False)
    assert [line.partition(":")[0] for line in report.mismatched] == [
        "model/1.weight",
        "model/1.bias",
    ]
    assert target["optimizer"].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ModelState"])
def test_another_class_is_refused_by_name(tmp_path: Path, wrap: bool) -> None:
    saved = Trainer(torch.optim.AdamW, wrap)
    saved.state["own"]["x"] = 1
    Snapshot.take(tmp_path / "s", saved.state)
    snapshot = Snapshot(tmp_path / "s")
    trainer = Trainer(torch.optim.SGD, wrap, momentum=0.9)
    model, optimizer = (
        copy.deepcopy(each.state_dict()) for each in (trainer.model, trainer.optimizer)
    )
    with pytest.raises(IncompatibleState, match="nothing was changed") as caught:
        snapshot.restore(trainer.state)
    (line,) = caught.value.mismatched
    path = "train/optim" if wrap else "optimizer"
    assert line.startswith(f"{path}: saved from {ADAMW}, the app state has {SGD};")
    assert "pass options=Options(allow_optimizer_change=True) to Snapshot(path) or" in line
    assert snapshot.plan_restore(trainer.state).mismatched == (line,)
    assert_same(trainer.model.state_dict(), model)
    # What does not fit is left out; the rest is restored, and training goes on.
    report = snapshot.restore(trainer.state, strict=False)
    assert (report.mismatched, report.missing, report.unexpected) == ((line,), (), ())
    assert_same(trainer.model.state_dict(), saved.model.state_dict())
    assert_same(trainer.optimizer.state_dict(), optimizer)
    assert trainer.state["own"]["x"] == 1
    trainer.step()


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ModelState"])
def test_an_option_restores_it_nevertheless(tmp_path: Path, wrap: bool) -> None:
    saved = Trainer(torch.optim.AdamW, wrap)
    Snapshot.take(tmp_path / "s", saved.state)
    trainer = Trainer(torch.optim.Adam, wrap)
    with pytest.raises(IncompatibleState, match="saved from"):
        Snapshot(tmp_path / "s").restore(trainer.state)
    assert Snapshot(tmp_path / "s", options=ANYWAY).restore(trainer.state).is_complete
    for name in ("exp_avg", "step"):
        found, expected = (
            each.optimizer.state[each.model.weight][name] for each in (trainer, saved)
        )
        assert torch.equal(found, expected)
    trainer.step()


def test_a_class_may_move_and_be_derived_from(tmp_path: Path) -> None:
    derived: Any = type("Mine", (torch.optim.AdamW,), {"__module__": "my.train"})
    moved: Any = type("Mine", (torch.optim.AdamW,), {"__module__": "another.place"})
    namesake: Any = type("Adam", (torch.optim.SGD,), {"__module__": "quantized.optim"})
    modular: Any = type("Adam", (torch.optim.SGD,), {"__module__": "torchquantized"})
    for number, (kind, other, is_taken) in enumerate(
        [
            (derived, moved, True),
            (torch.optim.AdamW, derived, True),
            (namesake, modular, True),
            (namesake, torch.optim.Adam, False),
            (torch.optim.Adam, namesake, False),
            (modular, torch.optim.Adam, False),
            (derived, torch.optim.AdamW, False),
            (torch.optim.Adam, torch.optim.AdamW, False),  # which torch has derived from it
        ]
    ):
        snapshot = Snapshot.take(tmp_path / str(number), Trainer(kind).state)
        plan = snapshot.plan_restore(Trainer(other).state)
        assert plan.is_complete == is_taken, (kind, other)


class Wrapper(torch.optim.Optimizer):
    """As ``accelerate.optimizer.AcceleratedOptimizer``: one class around all others."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state, self.param_groups = optimizer.state, optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def test_a_wrapper_has_the_class_of_what_it_wraps(tmp_path: Path) -> None:
    saved = Trainer(torch.optim.AdamW)
    snapshot = Snapshot.take(tmp_path / "s", {"optimizer": Wrapper(saved.optimizer)})
    other = Trainer(torch.optim.SGD, momentum=0.9)
    with pytest.raises(IncompatibleState, match=f"saved from {ADAMW}, the app state has {SGD}"):
        snapshot.restore({"optimizer": Wrapper(other.optimizer)})
    for optimizer in (Wrapper(saved.optimizer), saved.optimizer):
        assert snapshot.restore({"optimizer": optimizer}).is_complete


def test_several_optimizers_are_compared_as_a_set(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD([model.weight], lr=0.1)
    other = torch.optim.AdamW([model.bias])
    Snapshot.take(tmp_path / "s", {"train": ModelState(model, [one, other])})
    snapshot = Snapshot(tmp_path / "s")
    assert snapshot.restore({"train": ModelState(model, [other, one])}).is_complete
    both = [torch.optim.SGD([each], lr=0.1) for each in (model.weight, model.bias)]
    with pytest.raises(IncompatibleState, match=f"saved from {ADAMW}, {SGD}, the app state has"):
        snapshot.restore({"train": ModelState(model, both)})


def test_what_recorded_nothing_is_restored_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(capture, "optimizers_in", lambda app_state: {})
        Snapshot.take(tmp_path / "s", Trainer(torch.optim.AdamW).state)
    trainer = Trainer(torch.optim.Adam)
    assert Snapshot(tmp_path / "s").restore(trainer.state).is_complete


def test_a_plain_stateful_takes_it(tmp_path: Path) -> None:
    """To look into it, for example."""
    Snapshot.take(tmp_path / "s", Trainer(torch.optim.AdamW).state)
    seen = StateDict()
    assert Snapshot(tmp_path / "s").restore({"optimizer": seen}).is_complete
    assert "param_groups" in seen


def grouped(*names: str) -> ModelState:
    """A model whose optimizer has a group per string of parameter names; one step is done."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[f"{i}.{name}"] for i in (0, 1) for name in each.split()], "lr": rate}
        for each, rate in zip(names, (0.1, 0.2), strict=False)
    ]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return ModelState(model, optimizer, flatten=False)


@pytest.mark.parametrize(
    ("saved", "current"),
    [
        (["weight bias"], ["bias", "weight"]),
        (["bias", "weight"], ["weight bias"]),
    ],
)
def test_other_parameter_groups_of_a_model_state(
    tmp_path: Path, saved: list[str], current: list[str]
) -> None:
    """torch would load them, and lose hyperparameters."""
    Snapshot.take(tmp_path / "s", {"t": grouped(*saved)})
    state = grouped(*current)
    before = copy.deepcopy(state.state_dict())
    with pytest.raises(IncompatibleState, match=f"{len(saved)} and {len(current)} groups") as error:
        Snapshot(tmp_path / "s").restore({"t": state})
    assert "flatten=True" in str(error.value)
    assert_same(state.state_dict(), before)
    report = Snapshot(tmp_path / "s").restore({"t": state}, strict=False)
    assert len(report.mismatched) == 1
    assert_same(state.state_dict()["optim"], before["optim"])
    state.optimizers[0].step()


def test_the_order_of_groups_and_parameters_may_differ(tmp_path: Path) -> None:
    saved = grouped("bias", "weight")
    Snapshot.take(tmp_path / "s", {"t": saved})
    state = grouped("weight", "bias")
    Snapshot(tmp_path / "s").restore({"t": state})
    rates = {
        name: group["lr"]
        for group in state.state_dict()["optim"]["param_groups"]
        for name in group["params"]
    }
    assert rates == {"0.bias": 0.1, "1.bias": 0.1, "0.weight": 0.2, "1.weight": 0.2}


def test_an_optimizers_own_state_into_a_model_state_per_group(tmp_path: Path) -> None:
    """Its parameters are numbered; ``flatten=True`` takes it."""
    saved = grouped("weight bias")
    Snapshot.take(tmp_path / "s", {"m": saved.model, "o": saved.optimizers[0]})
    names = {"m": "t/model", "o": "t/optim"}
    state = grouped("weight bias")
    with pytest.raises(IncompatibleState, match="saved from a plain optimizer"):
        Snapshot(tmp_path / "s").restore({"t": state}, rename=names)
    flat = ModelState(state.model, state.optimizers)
    Snapshot(tmp_path / "s").restore({"t": flat}, rename=names)
    assert_same(state.state_dict(), saved.state_dict())
