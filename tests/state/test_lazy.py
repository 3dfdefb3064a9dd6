# SPDX-License-Identifier: Apache-2.0
"""Which leaves an optimizer's step changes and nothing else: by memory, not by name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

from actorsnap.state.capture import capture
from actorsnap.state.lazy import LazyState, find_lazy, tensors_of
from actorsnap.state.optim import ModelState
from actorsnap.state.stateful import RNGState, StateDict

BIG = 3 << 20  # elements of float32: too many to be copied aside


def trained(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class Found:
    """What ``find_lazy`` says of an app state, by path."""

    def __init__(self, app_state: dict[str, Any]) -> None:
        self.leaves = capture(app_state).leaves
        before = [leaf.source for leaf in self.leaves]
        self.state: LazyState = find_lazy(app_state, self.leaves)
        self.paths = [leaf.item.path for leaf in self.leaves]
        self.eager = {self.paths[n] for n in self.state.eager}
        self.aside = {
            path
            for path, leaf, source in zip(self.paths, self.leaves, before, strict=True)
            if leaf.source is not source
        }
        self.lazy = {p for p in self.paths if p not in self.eager and p not in self.aside}

    def changed(self) -> str | None:
        found = self.state.changed(range(len(self.leaves)))
        return None if found is None else self.paths[found]

    def touched_by(self, optimizer: Any) -> list[str]:
        return [self.paths[n] for n in self.state.touched_by(optimizer)]


def test_parameters_and_states_of_optimizers_are_lazy_and_all_else_is_eager() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("large", torch.zeros(BIG))
    optimizer = trained(model, lr=torch.tensor(0.1))
    found = Found(
        {
            "model": model,
            "optim": optimizer,
            "rng": RNGState(),
            "own": StateDict(x=torch.ones(3), big=torch.ones(BIG), array=np.ones(BIG)),
        }
    )
    assert found.lazy == {f"model/{name}" for name, _ in model.named_parameters()} | {
        f"optim/state/{n}/{name}" for n in range(4) for name in ("step", "exp_avg", "exp_avg_sq")
    }
    assert found.eager == {"model/large", "own/big", "own/array"}
    assert {"model/1.running_mean", "own/x", "optim/param_groups/0/lr"} <= found.aside


def test_what_is_copied_aside_is_as_it_was() -> None:
    own = StateDict(x=torch.arange(9.0).view(3, 3).t(), data=bytearray(b"x" * 9000), big=None)
    found = Found({"own": own})
    own["x"].zero_()
    own["data"][:] = b"y" * 9000
    sources = {leaf.item.path: leaf.source for leaf in found.leaves}
    expected = torch.arange(9.0).view(3, 3).t().contiguous().numpy().tobytes()
    assert bytes(sources["own/x"].view(0, 36)) == expected
    assert bytes(sources["own/data"].view(0, 9000)) == b"x" * 9000


def test_frozen_parameters_and_averages_are_eager() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False))
    average = torch.optim.swa_utils.AveragedModel(model)
    found = Found({"model": model, "average": average})
    assert found.lazy == {"model/0.weight", "model/0.bias"}


def test_tied_parameters_and_statefuls_that_share_them() -> None:
    one, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    other.weight = one.weight
    optimizer = trained(torch.nn.ModuleList([one, other]))
    found = Found({"one": one, "other": other, "optim": optimizer, "both": StateDict(w=one.weight)})
    assert not found.eager
    assert found.lazy >= {"both/w", "one/bias", "other/bias"}  # of tied ones the first is stored
    assert set(found.touched_by(optimizer)) == found.lazy


def flat_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Parameters that are views of one buffer, which is what the optimizer has (as FSDP1)."""

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = torch.nn.Parameter(torch.arange(100.0))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            flat = self.flat.detach()
            return {"weight": flat[:60].view(6, 10), "bias": flat[60:99]}

    model = Flat()
    return model, trained(model)


def test_views_into_a_flat_parameter() -> None:
    model, optimizer = flat_model()
    found = Found({"model": model})
    assert found.lazy == {"model/weight", "model/bias"}
    assert set(found.touched_by(optimizer)) == found.lazy
    optimizer.step()
    assert found.changed() in found.lazy


def test_parameters_in_a_flat_buffer_with_something_else() -> None:
    """The other way round: nobody knows who changes the rest of the buffer."""
    flat = torch.zeros(2 * BIG)
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(flat[:BIG]))
    found = Found({"module": module, "own": StateDict(flat=flat)})
    assert found.eager == {"own/flat"}


def test_a_buffer_that_is_a_view_of_a_parameter_is_eager() -> None:
    module = torch.nn.Linear(4, 4)
    module.register_buffer("ends", module.weight.detach()[0])
    assert Found({"module": module}).lazy == {"module/bias"}


def test_a_buffer_with_gaps_reaches_to_its_last_element() -> None:
    whole = torch.arange(16.0).view(4, 4)
    module = torch.nn.Linear(4, 4)
    module.register_parameter("row", torch.nn.Parameter(whole[2]))
    module.register_buffer("column", whole[:, 0], persistent=False)
    assert Found({"module": module}).lazy == {"module/weight", "module/bias"}


def test_model_state() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = trained(model)
    found = Found({"both": ModelState(model, optimizer)})
    assert len(found.lazy) == 8
    assert set(found.touched_by(optimizer)) == found.lazy


def test_the_order_is_that_of_parameter_groups() -> None:
    model = torch.nn.Linear(4, 4)
    groups: list[dict[str, Any]] = [{"params": [model.bias]}, {"params": [model.weight]}]
    optimizer = torch.optim.SGD(groups, momentum=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert Found({"m": model, "o": optimizer}).touched_by(optimizer) == [
        "m/bias",
        "o/state/0/momentum_buffer",
        "m/weight",
        "o/state/1/momentum_buffer",
    ]


def test_an_optimizer_of_other_tensors_in_the_same_memory() -> None:
    model, own = flat_model(), torch.nn.Linear(2, 2)
    found = Found({"model": model[0], "own": own})
    flat = [*model[0].parameters()][0].detach()
    others = [own.bias, torch.nn.Parameter(flat[55:65]), torch.nn.Parameter(flat[:1]), own.weight]
    assert found.touched_by(torch.optim.SGD(others, lr=0.1)) == [
        "own/bias",
        "model/weight",
        "model/bias",
        "own/weight",
    ]


def test_an_optimizer_that_touches_nothing_of_it() -> None:
    found = Found({"m": torch.nn.Linear(4, 4)})
    assert found.touched_by(trained(torch.nn.Linear(4, 4))) == []


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),  # which moves the step's counter only
    "adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-3, max_iter=2),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_is_seen(kind: str) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = OPTIMIZERS[kind](model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    found = Found({"m": model, "o": optimizer})
    assert len(found.touched_by(optimizer)) == len(found.lazy)
    closure()
    assert found.changed() is None, "forward and backward change nothing"
    optimizer.step(closure)
    for number, path in enumerate(found.paths):
        if path.startswith("m/"):
            assert found.state.changed([number]) == number, path


def kinds_with(flag: str) -> list[str]:
    kinds = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    return [name for name in kinds if flag in signature(getattr(torch.optim, name)).parameters]


@pytest.mark.parametrize("kind", kinds_with("fused"))
@pytest.mark.parametrize("has_stepped", [True, False], ids=["stepped", "new"])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ModelState"])
def test_a_fused_step_is_seen_or_nothing_of_it_is_lazy(
    kind: str, has_stepped: bool, wrap: bool
) -> None:
    """Whichever classes torch has: one that is new here is copied eagerly."""
    more: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" and has_stepped else {}
    model = torch.nn.Linear(4, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True, **more)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    if has_stepped:
        step()
    state = ModelState(model, optimizer) if wrap else None
    found = Found({"s": state} if state else {"m": model, "o": optimizer})
    assert found.changed() is None
    step()
    for number, path in enumerate(found.paths):
        is_trained = path.startswith(("m/", "s/model/"))
        if is_trained and path in found.lazy:
            assert found.state.changed([number]) == number, path
    assert bool(found.lazy) == (kind != "SGD"), "what has been tested may be lazy"


def test_what_says_fused_and_is_not_known_is_eager() -> None:
    class Kernel(torch.optim.RMSprop):
        """A kernel of somebody else, which writes by addresses."""

    model = torch.nn.Linear(4, 4)
    optimizer = Kernel(model.parameters())
    optimizer.defaults["fused"] = True
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert Found({"m": model, "o": optimizer}).lazy == set()
    optimizer.param_groups[0]["fused"] = False
    assert "m/weight" in Found({"m": model, "o": optimizer}).lazy


def test_inference_tensors_have_no_counters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with torch.inference_mode():
        optimizer.state[parameter] = {"x": torch.ones(2)}
        found = Found({"o": optimizer})
        optimizer.state[parameter]["x"].zero_()
    assert found.lazy == {"o/state/0/x"}
    assert found.changed() is None


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "shared": lambda tensor: tensor.share_memory_(),
    "emptied": lambda tensor: tensor.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("path", ["m/weight", "o/state/1/exp_avg", "v/%30"])
@pytest.mark.parametrize("move", MOVES)
def test_memory_that_is_given_back_is_seen(move: str, path: str) -> None:
    """No counter moves, and whoever reads it then crashes."""
    model = torch.nn.Linear(4, 4)
    optimizer = trained(model)
    flat = torch.nn.Parameter(torch.zeros(8))
    views = torch.nn.ParameterList([flat, torch.nn.Parameter(flat.detach()[2:].view(2, 3).t())])
    moved = {
        "m/weight": model.weight,
        "o/state/1/exp_avg": optimizer.state[model.bias]["exp_avg"],
        "v/%30": flat,
    }
    found = Found({"m": model, "o": optimizer, "v": views})
    assert found.changed() is None
    MOVES[move](moved[path].detach())
    assert found.changed() == path


def test_parameters_may_get_other_tensors() -> None:
    model = torch.nn.Linear(4, 4)
    found = Found({"m": model})
    model.double()
    assert found.changed() is None


def test_nothing_is_kept_when_it_is_released() -> None:
    model = torch.nn.Linear(4, 4)
    found = Found({"m": model})
    found.state.release()
    with torch.no_grad():
        model.weight.zero_()
    assert found.changed() is None
    assert found.touched_by(trained(model)) == []


def test_states_nested_in_lists() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    extra = [torch.ones(1), torch.ones(2)]
    optimizer.state[parameter] = {"old": [extra[0]], "deep": {"x": (extra[1],)}}
    assert [id(t) for t in tensors_of(optimizer)] == [id(t) for t in (parameter, *extra)]
    other = torch.ones(3)
    optimizer.state["of all"] = other  # type: ignore[index]
    expected = [id(t) for t in (parameter, *extra, other)]
    assert [id(t) for t in tensors_of(optimizer)] == expected
