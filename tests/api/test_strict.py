# SPDX-License-Identifier: Apache-2.0
"""What a restore calls missing, unexpected or mismatched, and what it hands over.

The rule per kind of stateful: a ``StateDict`` takes the snapshot's structure and keeps further
dict keys of its own, a module has a place for each leaf or its own way of loading, all else
gets what was saved.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actorsnap import IncompatibleState, ModelState, RestoreReport, StateDict, prime_optimizer
from actorsnap.sync import Snapshot
from tests.api.same import assert_same

pytestmark = pytest.mark.blocking


class Shelf:
    """Where one stateful is saved, to be restored into others."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, stateful: Any) -> None:
        Snapshot.take(self.path, {"s": stateful})

    def restore(self, target: Any, *, strict: bool = True) -> RestoreReport:
        return Snapshot(self.path).restore({"s": target}, strict=strict)

    def refuse(self, target: Any) -> IncompatibleState:
        """Restores what does not fit; returns the error."""
        with pytest.raises(IncompatibleState) as caught:
            self.restore(target)
        return caught.value


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "s")


either = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])

# StateDict ------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 1.5,
    "text": lambda: "text",
    "long text": lambda: "x" * 5000,
    "dict": lambda: {"acc": 1.5, "at": torch.ones(1)},
    "empty dict": dict,
    "list": lambda: [1, torch.ones(2)],
    "longer list": lambda: [7, torch.zeros(2), 9],
    "tuple": lambda: (1, {"a": [2]}),
    "tensor": lambda: torch.ones(2, 3),
    "array": lambda: np.ones(3),
}


@either
@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_that_was_saved_wins(shelf: Shelf, kind: str, strict: bool) -> None:
    saved = StateDict({name: KINDS[kind]() for name in KINDS})
    target = StateDict({name: make() for name, make in KINDS.items()})
    if kind == "empty dict":
        del saved.data["dict"], target.data["dict"]  # see the test of further keys
    shelf.save(saved)
    assert shelf.restore(target, strict=strict).is_complete
    assert_same(target.data, saved.data)


@either
def test_lists_are_taken_whole(shelf: Shelf, strict: bool) -> None:
    shelf.save(StateDict(h=[1, 2], n=[[torch.ones(2)]], t=()))
    kept = torch.zeros(2)
    target = StateDict(h=[7, 8, 9], n=[[kept, 5], [6]], t=(1, 2))
    assert shelf.restore(target, strict=strict).is_complete
    assert_same(target.data, {"h": [1, 2], "n": [[torch.ones(2)]], "t": ()})
    assert target["n"][0][0] is kept  # in place where it fits


def test_further_dict_keys_are_named_and_kept(shelf: Shelf) -> None:
    shelf.save(StateDict(a={"x": 1, "in list": [{"p": 1}]}, leaf=3, empty={}))
    new = {"deep": [1, {"empty": {}}]}
    target = StateDict(
        a={"x": 0, "y": 5, "in list": [{"p": 0, "q": 1}, 2]},
        leaf={"below": 1},
        empty={"z": 1},
        new=new,
        none={},
    )
    # Keys of a dict in a list as well: the snapshot has a dict at its place.
    expected = {"s/a/y", "s/a/in list/0/q", "s/empty/z", "s/new", "s/none"}
    assert set(shelf.refuse(target).missing) == expected
    assert set(shelf.restore(target, strict=False).missing) == expected
    assert target["new"] is new
    assert target["a"] == {"x": 1, "in list": [{"p": 1, "q": 1}], "y": 5}
    assert target["leaf"] == 3
    assert target["empty"] == {"z": 1}
    assert target["none"] == {}


def test_tensors_of_another_shape_are_mismatched(shelf: Shelf) -> None:
    tensors = {"shape": torch.ones(2), "dtype": torch.ones(2), "layout": torch.eye(2).to_sparse()}
    shelf.save(StateDict(v=[tensors], array=np.ones(2), n=1))
    kept = {"shape": torch.zeros(3), "dtype": torch.zeros(2).half(), "layout": torch.zeros(2, 2)}
    target = StateDict(v=[dict(kept)], array=np.zeros(3), n=0)
    paths = ["s/array", "s/v/0/dtype", "s/v/0/layout", "s/v/0/shape"]
    error = shelf.refuse(target)
    assert sorted(line.partition(":")[0] for line in error.mismatched) == paths
    assert target["n"] == 0
    report = shelf.restore(target, strict=False)
    assert sorted(report.mismatched) == sorted(error.mismatched)
    assert target["n"] == 1
    assert all(target["v"][0][name] is tensor for name, tensor in kept.items())


# Optimizers, schedulers, anything else ----------------------------------------------------------


class Recorder:
    """Has ``values``; remembers what it was given."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.given: Any = None

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.given = state_dict


TARGETS_WITHOUT_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "functional": lambda: torch._to_functional_tensor(torch.zeros(4, dtype=torch.uint8)),
    "zeros of autograd": lambda: torch._efficientzerotensor((4,), dtype=torch.uint8),
    "no quantizer": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.quint8),
}


@pytest.mark.parametrize("name", TARGETS_WITHOUT_MEMORY)
def test_targets_that_nothing_can_be_read_into(shelf: Shelf, name: str) -> None:
    shelf.save(StateDict(x=torch.ones(4, dtype=torch.uint8)))
    (line,) = shelf.refuse(StateDict(x=TARGETS_WITHOUT_MEMORY[name]())).mismatched
    assert line.startswith("s/x: tensor in the snapshot; the app state's has ")
    assert "; save " in line


@either
def test_others_get_exactly_what_was_saved(shelf: Shelf, strict: bool) -> None:
    def state() -> dict[str, Any]:
        base = torch.arange(6.0)
        return {
            "shape": torch.ones(3),
            "dtype": torch.ones(2),
            "sparse": torch.eye(3).to_sparse(),
            "base": base,
            "view": base[2:4],
            "array": np.ones(2),
            "kind": np.ones(2),
            "fits": torch.ones(2),
            "nested": {"a": [1, {}]},
        }

    shelf.save(Recorder(**state()))
    target = Recorder(
        shape=torch.zeros(2),
        dtype=torch.zeros(2, dtype=torch.int64),
        sparse=torch.eye(3).double().to_sparse(),
        base=torch.zeros(5),
        view=torch.zeros(2),
        array=np.zeros(3),
        kind=torch.zeros(2),
        fits=torch.zeros(2),
        nested={"a": [1, {"x": torch.zeros(1)}, 3], "b": 4},
        more={"c": torch.zeros(1)},
    )
    assert shelf.restore(target, strict=strict).is_complete
    assert_same(target.given, state())
    for name in ("view", "fits"):
        assert target.given[name] is target.values[name]
    for name in ("shape", "dtype", "base"):
        assert not target.values[name].any()


@either
def test_an_optimizer_goes_back_to_before_its_first_step(tmp_path: Path, strict: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    app_state: dict[str, Any] = {"m": model, "o": optimizer}
    snapshot = Snapshot.take(tmp_path / "s", app_state)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state
    assert snapshot.restore(app_state, strict=strict).is_complete
    assert not optimizer.state


@pytest.mark.parametrize(("size", "shown"), [(1, "2"), (300, "301"), (2000, "another number of")])
def test_an_optimizer_with_other_groups_is_refused_untouched(
    tmp_path: Path, size: int, shown: str
) -> None:
    def stepped(*sizes: int) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.ones(1)) for _ in range(n)]} for n in sizes]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = torch.full((1,), float(sum(sizes)))
        optimizer.step()
        return optimizer

    saved = stepped(size + 1, size + 2)
    Snapshot.take(tmp_path / "s", {"o": saved, "z": StateDict(x=1)})
    snapshot = Snapshot(tmp_path / "s")
    cases: dict[tuple[int, ...], list[str]] = {
        (2 * size + 3,): ["o: 2 parameter groups in the snapshot, 1 in the app state"],
        (size + 1, size + 1, 1): ["o: 2 parameter groups in the snapshot, 3 in the app state"],
        (size + 2, size + 1): [
            f"o: {shown} params in parameter group 0 in the snapshot, {size + 2} in the app state"
        ],
    }
    for sizes, lines in cases.items():
        optimizer = stepped(*sizes)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(IncompatibleState, match="nothing was changed") as caught:
            snapshot.restore({"o": optimizer, "z": StateDict(x=0)})
        assert list(caught.value.mismatched) == lines
        rest = StateDict(x=0)
        report = snapshot.restore({"o": optimizer, "z": rest}, strict=False)
        assert list(report.mismatched) == lines
        assert rest["x"] == 1
        assert_same(optimizer.state_dict(), before)
    optimizer = stepped(size + 1, size + 2)
    assert snapshot.restore({"o": optimizer}).is_complete
    assert_same(optimizer.state_dict(), saved.state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_that_differ_by_a_prefix(tmp_path: Path, prefix: str) -> None:
    plain, wrapped = nn.Linear(2, 2), nn.Module()
    wrapped.add_module(prefix[:-1], nn.Linear(2, 2))
    one = Snapshot.take(tmp_path / "wrapped", {"model": wrapped})
    with pytest.raises(IncompatibleState) as caught:
        one.restore({"model": plain})
    assert list(caught.value.hints) == [
        f"the names of 'model' begin with '{prefix}' only in the snapshot: pass "
        f'rename="{prefix}" to Snapshot.restore'
    ]
    assert one.restore({"model": plain}, rename=prefix).is_complete
    other = Snapshot.take(tmp_path / "plain", {"model": plain})
    with pytest.raises(IncompatibleState) as caught:
        other.restore({"model": wrapped})
    assert list(caught.value.hints) == [
        f"the names of 'model' begin with '{prefix}' only in the app state: pass "
        f"rename={{'model/': 'model/{prefix}'}} to Snapshot.restore"
    ]
    assert other.restore({"model": wrapped}, rename={"model/": f"model/{prefix}"}).is_complete


def test_one_saved_parameter_group(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    Snapshot.take(tmp_path / "s", {"o": torch.optim.SGD(parameters, lr=0.5)})
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1)
    with pytest.raises(IncompatibleState, match="o: 1 parameter group in the snapshot, 2 in the"):
        Snapshot(tmp_path / "s").restore({"o": optimizer})


@either
def test_an_optimizer_that_adapts_its_groups_decides_itself(tmp_path: Path, strict: bool) -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    Snapshot.take(tmp_path / "s", {"o": torch.optim.SGD(parameters, lr=0.5)})
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1)

    def split(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        groups = [{**group, "params": [index]} for index in group["params"]]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(split)
    assert Snapshot(tmp_path / "s").restore({"o": optimizer}, strict=strict).is_complete
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


# Modules ----------------------------------------------------------------------------------------


class Extra(nn.Linear):
    """A module with state that it describes itself, and that may have another structure now."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRA: dict[str, Callable[[], Any]] = {
    "many": lambda: {i: float(i) for i in range(3)},
    "one": lambda: {0: 7.0},
    "none": dict,
    "list": lambda: [1, [2]],
    "null": lambda: None,
    "tensor": lambda: torch.ones(2),
    "other tensor": lambda: torch.ones(3, dtype=torch.int32),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "text": lambda: "x" * 5000,
}


@pytest.mark.few
@either
@pytest.mark.parametrize("saved", EXTRA)
def test_extra_state_is_taken_whole(shelf: Shelf, saved: str, strict: bool) -> None:
    def make(kind: str) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), Extra(EXTRA[kind]()))

    shelf.save(make(saved))
    for kind in EXTRA:
        target = make(kind)
        assert shelf.restore(target, strict=strict).is_complete
        assert_same(target[1].extra, EXTRA[saved]())  # type: ignore[index]


def test_extra_state_that_only_one_side_has(shelf: Shelf) -> None:
    shelf.save(nn.Linear(2, 2))
    assert shelf.refuse(Extra({1: 2})).missing == ("s/_extra_state",)
    other = Shelf(shelf.path.with_name("t"))
    other.save(Extra({1: 2, 3: 4}))
    assert other.refuse(nn.Linear(2, 2)).unexpected == ("s/_extra_state/1", "s/_extra_state/3")


def test_a_parameter_with_such_a_name_is_none(shelf: Shelf) -> None:
    module = nn.Module()
    module.my_extra_state = nn.Parameter(torch.ones(2))
    shelf.save(module)
    module.my_extra_state = nn.Parameter(torch.ones(3))
    assert len(shelf.refuse(module).mismatched) == 1


def module(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), layer)


def weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(3, 2))


def observer(seen: bool) -> nn.Module:
    made = torch.ao.quantization.PerChannelMinMaxObserver()
    if seen:
        made(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    return made


class Renamed(nn.Module):
    """Takes what it was saved as when its layer had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(3, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {name.replace("old.", "new."): value for name, value in state_dict.items()}
        return super().load_state_dict(state, strict, assign)


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Linear(3, 2)


class Forgiving(nn.Linear):
    """Needs no bias in the snapshot."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        hook: Any = self.register_load_state_dict_post_hook
        hook(lambda _, keys: keys.missing_keys.clear())


ADAPTING: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "pre-hook": (weight_norm, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
    "pre-hook of a submodule": (lambda: module(nn.Linear(3, 2)), lambda: module(nn.LazyLinear(2))),
    "post-hook": (lambda: nn.Linear(3, 2, bias=False), Forgiving),
    "_load_from_state_dict": (lambda: observer(True), lambda: observer(False)),
    "load_state_dict": (Old, Renamed),
}


@either
@pytest.mark.parametrize("name", ADAPTING)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_module_that_adapts_what_it_loads(shelf: Shelf, name: str, strict: bool) -> None:
    make, make_other = ADAPTING[name]
    saved, target, expected = make(), make_other(), make_other()
    shelf.save(saved)
    expected.load_state_dict(saved.state_dict())
    assert shelf.restore(target, strict=strict).is_complete
    found = target.state_dict()
    for key, value in expected.state_dict().items():
        if key in saved.state_dict() or name != "post-hook":
            assert torch.equal(found[key], value)


class Shifted(nn.Module):
    """Has one layer more in front than what was saved."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(num_layers))
        hook: Any = self.register_load_state_dict_pre_hook
        hook(self._shift)

    def _shift(self, _: Any, state: dict[str, Any], *__: Any) -> None:
        if len(state) < len(self.layers):
            saved = [state[f"layers.{i}.weight"] for i in range(len(state))]
            state["layers.0.weight"] = torch.zeros(2, 2)
            state.update({f"layers.{i}.weight": weight for i, weight in enumerate(saved, 1)})


def test_what_is_adapted_is_not_read_into_places_of_that_name(shelf: Shelf) -> None:
    saved, target = Shifted(3), Shifted(4)
    shelf.save(saved)
    assert shelf.restore(target).is_complete
    for i in range(3):
        assert torch.equal(
            target.state_dict()[f"layers.{i + 1}.weight"], saved.state_dict()[f"layers.{i}.weight"]
        )


class Adapting(nn.Module):
    """Has a hook, so that torch decides; that hook does nothing."""

    def __init__(self, width: int, **more: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)
        self.fits = nn.Linear(2, 2)
        for name, module in more.items():
            self.add_module(name, module)
        hook: Any = self.register_load_state_dict_pre_hook
        hook(lambda *_: None)


def test_what_torch_refuses_is_incompatible(tmp_path: Path) -> None:
    saved = Adapting(2, gone=nn.Linear(1, 1))
    Snapshot.take(tmp_path / "s", {"a": StateDict(x=1), "s": saved, "z": StateDict(x=1)})
    app_state: dict[str, Any] = {
        "a": StateDict(x=0),
        "s": Adapting(3, new=nn.Linear(1, 1)),
        "z": StateDict(x=0),
    }
    with pytest.raises(IncompatibleState) as caught:
        Snapshot(tmp_path / "s").restore(app_state)
    text = str(caught.value)
    assert "size mismatch for layer.weight" in text
    assert 'Missing key(s) in state_dict: "new.weight"' in text
    assert "gone.weight" in text
    assert "nothing was changed" not in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "'s'" in caught.value.__notes__[0]
    assert app_state["a"]["x"] == 1
    assert app_state["z"]["x"] == 0


def test_what_torch_leaves_out_is_reported(shelf: Shelf) -> None:
    saved = Adapting(2, gone=nn.Linear(1, 1))
    shelf.save(saved)
    target = Adapting(3, new=nn.Linear(1, 1))
    before = target.layer.weight.detach().clone()
    report = shelf.restore(target, strict=False)
    assert set(report.missing) == {"s/new.weight", "s/new.bias"}
    assert set(report.unexpected) == {"s/gone.weight", "s/gone.bias"}
    (line,) = report.mismatched
    assert line.startswith("s: size mismatch for layer.weight")
    assert torch.equal(target.layer.weight, before)
    assert torch.equal(target.fits.weight, saved.fits.weight)


def test_another_key_does_not_fit_before_torch_decides(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"s": Adapting(2), "t": StateDict(x=torch.ones(1))})
    target = Adapting(3)
    before = target.fits.weight.detach().clone()
    with pytest.raises(IncompatibleState, match="nothing was changed") as caught:
        Snapshot(tmp_path / "s").restore({"s": target, "t": StateDict(x=torch.ones(2))})
    assert [line.partition(":")[0] for line in caught.value.mismatched] == ["t/x"]
    assert torch.equal(target.fits.weight, before)


def test_plain_modules_are_refused_untouched(shelf: Shelf) -> None:
    """Batch norm only adapts what releases before 1.0 saved: it does not make torch decide."""
    shelf.save(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    target = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(4))
    before = target.state_dict()["0.weight"].clone()
    error = shelf.refuse(target)
    assert "nothing was changed" in str(error)
    assert len(error.mismatched) == 4
    assert torch.equal(target.state_dict()["0.weight"], before)


class Plain(nn.Linear):
    def load_state_dict(self, sd: Any) -> None:  # type: ignore[override]
        super().load_state_dict(sd)


class Anything(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        assert "strict" in kwargs
        return super().load_state_dict(*args, **kwargs)


@either
@pytest.mark.parametrize("kind", [Plain, Anything])
def test_strict_is_given_to_those_that_take_it(
    shelf: Shelf, kind: type[nn.Linear], strict: bool
) -> None:
    saved, target = kind(2, 2), kind(2, 2)
    shelf.save(saved)
    assert shelf.restore(target, strict=strict).is_complete
    assert torch.equal(target.weight, saved.weight)


# What load_state_dict raises ----------------------------------------------------------------------


class Failing(Recorder):
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise ZeroDivisionError


def test_what_load_state_dict_raises_gets_a_note(tmp_path: Path) -> None:
    app_state: dict[str, Any] = {"a": StateDict(x=1), "b": Failing(x=1), "c": StateDict(x=1)}
    snapshot = Snapshot.take(tmp_path / "s", app_state)
    with pytest.raises(ZeroDivisionError) as caught:
        snapshot.restore(app_state)
    note, ending = caught.value.__notes__
    assert ending.startswith("The restore failed: a, b may be partly overwritten. ")
    assert "load_state_dict() of 'b'" in note
    assert "'a'" in note
    assert "'c'" not in note
    with pytest.raises(ZeroDivisionError) as caught:
        snapshot.restore({"b": Failing(x=1)})
    assert "none" in caught.value.__notes__[0]


# ModelState


def model_state(
    dtype: torch.dtype = torch.float32,
    *,
    num_layers: int = 2,
    is_frozen: bool = False,
    has_optimizer: bool = True,
    flatten: bool = True,
) -> ModelState:
    """All parameters are 2, and averages 3."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)]).to(dtype)
    model[0].requires_grad_(not is_frozen)
    optimizer = torch.optim.AdamW(model.parameters())
    prime_optimizer(optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2)
            for value in optimizer.state.get(parameter, {}).values():
                value.fill_(3)
    return ModelState(model, optimizer if has_optimizer else (), flatten=flatten)


def tensors_of(state: ModelState) -> set[float]:
    states = [value for held in state.optimizers for value in held.state.values()]
    found = [*state.model.parameters(), *[t for one in states for t in one.values()]]
    return {number for t in found for number in t.detach().unique().tolist()}


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    ("saved", "target", "named"),
    [
        (
            {},
            {"dtype": torch.bfloat16},
            "s/model/0.weight: dtype float32 in the snapshot, bfloat16",
        ),
        ({}, {"num_layers": 3}, "s/model/2.weight"),
        ({"num_layers": 3}, {}, "s/model/2.weight"),
        ({"is_frozen": True}, {}, "s/optim/state"),
    ],
)
def test_a_model_state_that_does_not_fit_is_left_alone(
    tmp_path: Path, saved: dict[str, Any], target: dict[str, Any], named: str, flatten: bool
) -> None:
    Snapshot.take(tmp_path / "s", {"s": model_state(**saved, flatten=flatten)})
    state = model_state(**target, flatten=flatten)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(7)
    before = tensors_of(state)
    snapshot = Snapshot(tmp_path / "s")
    assert not snapshot.plan_restore({"s": state}).is_complete
    with pytest.raises(IncompatibleState, match=named):
        snapshot.restore({"s": state})
    assert tensors_of(state) == before == {3.0, 7.0}
    report = snapshot.restore({"s": state}, strict=False)
    assert named in "\n".join([*report.missing, *report.unexpected, *report.mismatched])
    has_all = "dtype" not in target and "num_layers" not in target
    assert (7.0 in tensors_of(state)) is not has_all


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ({}, {"has_optimizer": False}),
        ({"has_optimizer": False}, {}),
        ({}, {"is_frozen": True}),
        ({}, {"flatten": False}),
        ({"flatten": False}, {}),
    ],
)
def test_optimizers_of_a_model_state_may_differ(
    tmp_path: Path, saved: dict[str, Any], target: dict[str, Any]
) -> None:
    Snapshot.take(tmp_path / "s", {"s": model_state(**saved)})
    state = model_state(**target)
    nbytes = sum(t.nbytes for t in state.model.parameters())
    moments = [t for o in state.optimizers for held in o.state.values() for t in held.values()]
    for tensor in (*state.model.parameters(), *moments):
        tensor.detach().fill_(7)
    report = Snapshot(tmp_path / "s").restore({"s": state})
    assert report.is_complete
    if not state.optimizers:
        assert report.nbytes == nbytes
    assert (7.0 in tensors_of(state)) is ("has_optimizer" in saved)


# Reports --------------------------------------------------------------------------------------


def test_reports_are_readable(tmp_path: Path) -> None:
    """Printed, and in a notebook."""
    Snapshot.take(tmp_path / "s", {"model": nn.Linear(2, 2), "<old>": StateDict(x=1)})
    snapshot = Snapshot(tmp_path / "s")
    model = nn.Linear(2, 3)
    model.register_buffer("<new>", torch.zeros(1))
    report = snapshot.restore({"model": model}, strict=False, rename={"<old>": "model/<old>"})
    lines = [
        "  missing in the snapshot (1):",
        "    model/<new>",
        "  unexpected in the snapshot (1):",
        "    <old>/x",
        "  mismatched (2):",
        *[f"    {line}" for line in report.mismatched],
    ]
    assert str(report).splitlines() == ["restored; 0 B read. Left out:", *lines]
    assert "<pre>restored; 0 B read." in report._repr_html_()
    assert "&lt;new&gt;" in report._repr_html_()
    assert str(snapshot.restore({"model": nn.Linear(2, 2)})) == "restored; 24 B read"
    plan = snapshot.plan_restore({"model": nn.Linear(2, 2)})
    assert str(plan).startswith("24 B to restore, ")
    assert str(plan).endswith("; mode direct: there is one rank")
