# SPDX-License-Identifier: Apache-2.0
"""An untouched optimizer gets the state of its class; a model's names are those of no wrapper."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from actorsnap.errors import UsageError
from actorsnap.state.optim import ModelState, plain_name, prime_optimizer

Factory = Callable[[Any], torch.optim.Optimizer]

# Every class of torch.optim, with the flags that change what its state is.
FACTORIES: dict[str, Factory] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adadelta-foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "Adagrad-fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "Adam": lambda p: torch.optim.Adam(p),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "Adam-foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW-maximize": lambda p: torch.optim.AdamW(p, maximize=True, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=1),
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "LBFGS-wolfe": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe", max_iter=3),
    "Muon": lambda p: torch.optim.Muon(x for x in p if x.ndim == 2),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "RMSprop-centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p)),
}


def test_all_of_torchs_are_here() -> None:
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} == {name.partition("-")[0] for name in FACTORIES}


def make_parameters(name: str = "") -> list[nn.Parameter]:
    torch.manual_seed(1)
    if name.startswith("LBFGS"):  # takes neither other layouts
        return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
    last = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    values = [torch.randn(4, 3), torch.randn(3), torch.randn(()), last]
    if name != "Adafactor":  # divides by the number of elements
        values.append(torch.randn(0, 3))
    return [nn.Parameter(value) for value in values]


def steps(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], count: int, seed: int = 2
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        if isinstance(optimizer, torch.optim.LBFGS):

            def closure() -> torch.Tensor:
                for p in parameters:
                    p.grad = None
                loss = sum([(p**4).sum() + p.sum() for p in parameters], torch.zeros(()))
                loss.backward()
                return loss

            optimizer.step(closure)
            continue
        for parameter in parameters:
            grad = torch.randn(parameter.shape, generator=generator)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = (
                grad.to_sparse() if is_sparse else torch.empty_like(parameter).copy_(grad)
            )
        optimizer.step()


def shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.device, value.requires_grad
    return type(value)


def described(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    state = optimizer.state_dict()["state"]
    return {
        number: {name: shape_of(value) for name, value in state[number].items()} for number in state
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", FACTORIES)
def test_the_state_is_that_of_a_step_and_nothing_else_changes(name: str) -> None:
    stepped_parameters = make_parameters(name)
    stepped = FACTORIES[name](stepped_parameters)
    steps(stepped, stepped_parameters, 1)
    parameters = make_parameters(name)
    optimizer = FACTORIES[name](parameters)
    parameters[0].grad = torch.full_like(parameters[0], 3)
    hooked: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    optimizer.register_step_post_hook(lambda *_: hooked.append(2))
    groups = copy.deepcopy(
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    generators = (torch.get_rng_state(), random.getstate())
    prime_optimizer(optimizer)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert not hooked
    assert parameters[0].grad is not None
    assert torch.equal(parameters[0].grad, torch.full_like(parameters[0], 3))
    assert all(parameter.grad is None for parameter in parameters[1:])
    assert all(map(torch.equal, parameters, make_parameters(name)))
    for group, old, rate in zip(optimizer.param_groups, groups, rates, strict=True):
        assert same({k: v for k, v in group.items() if k != "params"}, old)
        assert group["lr"] is rate
    if not name.startswith("LBFGS"):
        assert described(optimizer) == described(stepped)
    else:  # numbers may be tensors, and the history is as long as it is
        assert set(optimizer.state[parameters[0]]) == set(stepped.state[stepped_parameters[0]]) - {
            "al"
        }
    assert {id(p) for p in optimizer.state} <= {id(p) for p in parameters}
    # Idempotent: state that is there stays.
    before = {p: dict(optimizer.state[p]) for p in optimizer.state}
    prime_optimizer(optimizer)
    assert all(optimizer.state[p][key] is value for p in before for key, value in before[p].items())


@pytest.mark.parametrize("name", FACTORIES)
def test_training_goes_on_as_if_nothing_had_been_done(name: str) -> None:
    results = []
    for primes in (False, True):
        parameters = make_parameters(name)
        optimizer = FACTORIES[name](parameters)
        if primes:
            prime_optimizer(optimizer)
        steps(optimizer, parameters, 3)
        results.append((parameters, optimizer.state_dict()["state"]))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("name", FACTORIES)
def test_a_restored_optimizer_goes_on_like_the_saved_one(name: str) -> None:
    first_parameters = make_parameters(name)
    first = FACTORIES[name](first_parameters)
    steps(first, first_parameters, 2)
    parameters = [nn.Parameter(p.detach().clone()) for p in first_parameters]
    second = FACTORIES[name](parameters)
    prime_optimizer(second)
    # In place, as a restore does where kinds and shapes fit.
    saved = copy.deepcopy(first.state_dict())
    target = second.state_dict()
    for number, state in target["state"].items():
        for key, value in state.items():
            stored = saved["state"][number][key]
            if isinstance(value, torch.Tensor) and shape_of(value) == shape_of(stored):
                saved["state"][number][key] = value.copy_(stored)
    second.load_state_dict(saved)
    for optimizer, owned in ((first, first_parameters), (second, parameters)):
        steps(optimizer, owned, 2, seed=5)
    assert all(map(torch.equal, first_parameters, parameters))


def test_what_has_state_or_no_gradient_is_left_out() -> None:
    a, b, c = (nn.Parameter(torch.ones(n)) for n in (1, 2, 3))
    c.requires_grad_(False)
    optimizer = torch.optim.Adam([a], lr=0.1)
    a.grad = torch.ones(1)
    optimizer.step()
    optimizer.add_param_group({"params": [b, c], "lr": 0.5})
    step = optimizer.state[a]["step"]
    prime_optimizer(optimizer)
    assert optimizer.state[a]["step"] is step
    assert (float(step), float(optimizer.state[b]["step"])) == (1, 0)
    assert set(optimizer.state) == {a, b}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    for make in (FACTORIES["Adam"], FACTORIES["SGD-momentum"], FACTORIES["RMSprop"]):
        found = []
        for primes in (True, False):
            parameter = nn.Parameter(torch.ones(3, 2, dtype=dtype))
            optimizer = make([parameter])
            if primes:
                prime_optimizer(optimizer)
            else:
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            found.append(described(optimizer))
        assert found[0] == found[1]


def test_flags_that_cannot_step_here() -> None:
    for flags in ({"capturable": True}, {"differentiable": True}):
        parameters = make_parameters()
        optimizer = torch.optim.NAdam(parameters, **flags)  # type: ignore[arg-type]
        prime_optimizer(optimizer)
        state = optimizer.state[parameters[0]]
        assert set(state) == {"step", "mu_product", "exp_avg", "exp_avg_sq"}
        assert not any(value.requires_grad for value in state.values())
        assert state["step"].device == parameters[0].device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_capturable_on_a_device() -> None:
    found = []
    for primes in (True, False):
        parameter = nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.Adam([parameter], capturable=True)
        if primes:
            prime_optimizer(optimizer)
        else:
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        found.append(described(optimizer))
    assert found[0] == found[1]


def test_in_inference_mode_the_state_can_be_trained_with() -> None:
    parameters = make_parameters()
    optimizer = torch.optim.Adam(parameters)
    with torch.inference_mode():
        prime_optimizer(optimizer)
    steps(optimizer, parameters, 1)


class Strange(torch.optim.Optimizer):
    """An optimizer of somebody else: no ``_init_group``, counters in state and group."""

    def __init__(self, parameters: Any, fails: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1, "calls": 0})
        self.fails = fails

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            group["new"] = 1
            for parameter in group["params"]:
                if self.fails:
                    raise RuntimeError("no closure")
                state = self.state[parameter]
                state.setdefault("step", 0)
                state["step"] += 1
                state["noise"] = torch.randn(3)
                state["average"] = state.get("average", 0) + parameter.grad
                with torch.no_grad():
                    parameter.sub_(group["lr"] * state["noise"].sum())


def test_hyperparameters_of_somebody_elses_optimizer_are_kept() -> None:
    optimizer = Strange(make_parameters())
    (group,) = optimizer.param_groups
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    rate = torch.tensor(0.5)
    group |= {"betas": betas, "lr": rate}
    prime_optimizer(optimizer)
    assert optimizer.param_groups[0] is group
    assert group["betas"] is betas
    assert group["lr"] is rate
    assert [float(each) for each in (*betas, rate)] == pytest.approx([0.9, 0.99, 0.5])


def test_an_optimizer_of_somebody_else() -> None:
    parameters = make_parameters()
    optimizer = Strange([{"params": parameters[:2]}, {"params": parameters[2:]}])
    torch.manual_seed(4)
    generator = torch.get_rng_state()
    prime_optimizer(optimizer)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(map(torch.equal, parameters, make_parameters()))
    assert [group["calls"] for group in optimizer.param_groups] == [0, 0]
    assert all("new" not in group for group in optimizer.param_groups)
    assert [optimizer.state[p]["step"] for p in parameters] == [0] * 5
    assert [optimizer.state[p]["average"].shape for p in parameters] == [
        p.shape for p in parameters
    ]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    broken = Strange(parameters, fails=True)
    with pytest.raises(UsageError, match="Strange cannot be primed.*no closure.*run one step"):
        prime_optimizer(broken)
    assert not broken.state
    assert broken.param_groups[0]["calls"] == 0
    assert len(broken.param_groups[0]["params"]) == 5


# ModelState -------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) + self.frozen  # type: ignore[no-any-return]


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("flatten", [True, False])
def test_names_are_those_of_parameters(flatten: bool) -> None:
    def make() -> ModelState:
        model = Net()
        optimizers = [
            torch.optim.Adam(model.body.parameters(), lr=0.1),
            torch.optim.SGD([*model.head.parameters(), model.frozen], lr=0.2, momentum=0.5),
        ]
        return ModelState(model, optimizers, flatten=flatten)

    first, second = make(), make()
    train(first.model, *first.optimizers)
    saved = copy.deepcopy(first.state_dict())
    assert set(saved["model"]) == set(Net().state_dict())
    if flatten:
        assert saved["optim"]["param_groups.head.bias.lr"] == 0.2
        assert "state.body.0.weight.exp_avg" in saved["optim"]
    else:
        assert saved["optim"]["state"]["head.bias"].keys() == {"momentum_buffer"}
    # The second one was never stepped, and is a target of the same structure.
    target = second.state_dict()
    assert same(structure(target), structure(saved))
    assert all(not float(state.get("step", 0)) for state in second.optimizers[0].state.values())
    second.load_state_dict(saved)
    assert same(second.state_dict(), first.state_dict())
    assert set(saved["model"]) == set(Net().state_dict())
    torch.manual_seed(9)
    train(first.model, *first.optimizers)
    torch.manual_seed(9)
    train(second.model, *second.optimizers)
    assert same(second.state_dict(), first.state_dict())


def structure(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: structure(inner) for key, inner in value.items()}
    return str(shape_of(value)) if isinstance(value, torch.Tensor) else type(value).__name__


def test_tensors_are_the_live_ones() -> None:
    model = Net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    state = ModelState(model, optimizer).state_dict()
    assert state["model"]["head.bias"].data_ptr() == model.head.bias.data_ptr()
    average = optimizer.state[model.head.bias]["exp_avg"]
    assert state["optim"]["state.head.bias.exp_avg"].data_ptr() == average.data_ptr()


def test_a_model_alone_and_strictness() -> None:
    alone = ModelState(Net())
    saved = alone.state_dict()
    assert saved.keys() == {"model"}
    less = {"model": {k: v for k, v in saved["model"].items() if k != "head.bias"}}
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        alone.load_state_dict(less)
    alone.load_state_dict(less, strict=False)
    # A snapshot of the model alone leaves optimizers as they are.
    both = ModelState(alone.model, torch.optim.Adam(alone.model.parameters()))
    both.load_state_dict(saved)


def test_what_it_refuses() -> None:
    model: Any = Net()
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        ModelState(torch.optim.Adam(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes"):
        ModelState(model, [model])
    swapped: Any = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match=r"the model comes first: ModelState\(model, optimizers\)"):
        ModelState(swapped, model)
    with pytest.raises(UsageError, match="LBFGS"):
        ModelState(model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_of_other_parameters() -> None:
    """Made before ``fully_shard``, which replaces parameters."""
    model = Net()
    optimizer = torch.optim.Adam([*model.parameters()])
    model.head.weight = nn.Parameter(torch.zeros(2, 4))
    state = ModelState(model, optimizer)
    saved = {"model": model.state_dict(), "optim": {}}
    for call in (state.state_dict, lambda: state.load_state_dict(saved)):
        with pytest.raises(
            UsageError, match="parameters that are not in the model: create it after"
        ):
            call()
    assert not optimizer.state
    # Those of a part of the model may be left out.
    ModelState(model, torch.optim.Adam(model.body.parameters())).state_dict()


def test_plain_names() -> None:
    inner = nn.ModuleDict({"module": nn.Linear(1, 1), "_orig_mod": nn.Linear(1, 1)})
    assert plain_name(inner, "module.weight") == "module.weight"
    assert plain_name(inner, "_orig_mod.weight") == "_orig_mod.weight"
    compiled: Any = torch.compile(inner, backend="eager")
    assert plain_name(compiled, "_orig_mod.module.weight") == "module.weight"
