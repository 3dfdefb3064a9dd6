# SPDX-License-Identifier: Apache-2.0
"""Targets that share memory while what is stored for them does not, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actorsnap import IncompatibleState, StateDict
from actorsnap.sync import Snapshot


def linear(value: float, size: int = 4) -> nn.Linear:
    module = nn.Linear(size, size, bias=False)
    nn.init.constant_(module.weight, value)
    return module


class Tied(nn.Module):
    def __init__(self, first: float, second: float | None) -> None:
        super().__init__()
        self.a = linear(first)
        self.b = linear(0 if second is None else second)
        if second is None:
            self.b.weight = self.a.weight


@pytest.mark.parametrize("size", [4, 1500])
@pytest.mark.parametrize("name", ["zbest", "best"])
def test_a_loose_alias_of_a_module_gets_memory_of_its_own(
    tmp_path: Path, size: int, name: str
) -> None:
    """The module keeps its memory, whichever key comes first."""
    best = {"weight": torch.full((size, size), 7.0)}
    Snapshot.take(tmp_path, {"model": linear(1, size), name: StateDict(best=best)})
    module = linear(0, size)
    weight = module.weight
    aliases = StateDict(best=module.state_dict())
    report = Snapshot(tmp_path).restore({"model": module, name: aliases})
    assert report.is_complete
    assert module.weight is weight
    assert (module.weight == 1).all()
    assert (aliases["best"]["weight"] == 7).all()


@pytest.mark.filterwarnings("ignore:Sparse invariant:UserWarning")
def test_kinds_of_loose_aliases(tmp_path: Path) -> None:
    def state(shared: bool) -> dict[str, Any]:
        x = torch.arange(12.0).view(3, 4)
        y = x if shared else x + 100
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), x[0, :2], (3,))
        return {
            "a": x,
            "array": y.numpy(),
            "row": y[1] if shared else y[1].clone(),
            "strided": y.t() if shared else y.t().clone() + 1,
            "reversed": y.numpy()[:, ::-1] if shared else y.numpy()[:, ::-1] + 2,
            "parameter": nn.Parameter(y if shared else y + 3),
            "sparse": sparse if shared else sparse * 5,
        }

    saved = state(shared=False)
    Snapshot.take(tmp_path, {"s": StateDict(saved)})
    target = StateDict(state(shared=True))
    first = target["a"]
    assert Snapshot(tmp_path).restore({"s": target}).is_complete
    assert target["a"] is first
    for name, value in saved.items():
        found = target[name]
        assert type(found) is type(value), name
        if isinstance(value, torch.Tensor):
            assert torch.equal(found.detach().to_dense(), value.detach().to_dense()), name
        else:
            np.testing.assert_array_equal(found, value, name)


def test_stored_together_and_shared_stays_shared(tmp_path: Path) -> None:
    module = Tied(3, None)
    alias = StateDict(w=module.a.weight.detach(), row=module.a.weight.detach()[1])
    Snapshot.take(tmp_path, {"a": alias, "m": module, "z": StateDict(w=module.a.weight)})
    target = Tied(0, None)
    weight = target.a.weight
    loose = StateDict(w=weight.detach(), row=weight.detach()[1])
    last = StateDict(w=weight)
    assert Snapshot(tmp_path).restore({"a": loose, "m": target, "z": last}).is_complete
    assert (weight == 3).all()
    assert target.a.weight is target.b.weight is weight is last["w"]
    assert loose["row"].data_ptr() == weight[1].data_ptr()


def test_neighbours_in_one_buffer_are_no_conflict(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(6)]
    columns = {n: torch.full((5,), float(i)) for i, n in enumerate(names)}
    Snapshot.take(tmp_path, {"s": StateDict(columns)})
    matrix = torch.zeros(5, 6)
    target = StateDict({name: matrix[:, i] for i, name in enumerate(names)})
    Snapshot(tmp_path).restore({"s": target})
    assert torch.equal(matrix, torch.arange(6.0).expand(5, 6))


def test_a_tied_module_refuses_what_was_saved_untied(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"m": Tied(1, 2)})
    target = Tied(0, None)
    with pytest.raises(IncompatibleState) as caught:
        Snapshot(tmp_path).restore({"m": target})
    (line,) = caught.value.mismatched
    assert "m/a.weight" in line
    assert "m/b.weight" in line
    assert "share memory in the app state, but not in the snapshot" in line
    assert (target.a.weight == 0).all()  # nothing was read
    remedy = eval(line.partition("pass rename=")[2])
    assert Snapshot(tmp_path).restore({"m": target}, rename=remedy).is_complete
    assert target.a.weight is target.b.weight
    assert len(target.a.weight.unique()) == 1


def test_a_tied_module_takes_the_last_one_where_that_is_allowed(tmp_path: Path) -> None:
    """As ``load_state_dict`` of an untied state does."""
    Snapshot.take(tmp_path, {"m": Tied(1, 2)})
    target = Tied(0, None)
    report = Snapshot(tmp_path).restore({"m": target}, strict=False)
    assert len(report.mismatched) == 1
    assert target.a.weight is target.b.weight
    assert (target.a.weight == 2).all()


def test_two_modules_that_share_a_parameter(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"m": linear(1), "n": linear(2)})
    one, two = linear(0), linear(0)
    two.weight = one.weight
    with pytest.raises(IncompatibleState, match="share memory"):
        Snapshot(tmp_path).restore({"m": one, "n": two})


def test_tensors_that_were_saved_tied_into_ones_that_are_not(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"m": Tied(4, None)})
    target = Tied(0, 1)
    Snapshot(tmp_path).restore({"m": target})
    assert (target.a.weight == 4).all()
    assert (target.b.weight == 4).all()
    assert target.a.weight.data_ptr() != target.b.weight.data_ptr()


def test_views_of_one_base_at_the_wrong_places(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    Snapshot.take(tmp_path, {"s": StateDict(base=base, low=base[:4], high=base[4:])})
    memory = torch.zeros(8)
    target = StateDict(base=memory, low=memory[4:], high=memory[4:])
    Snapshot(tmp_path).restore({"s": target})
    assert torch.equal(target["base"], base)
    assert torch.equal(target["low"], base[:4])
    assert torch.equal(target["high"], base[4:])


def halves(a: torch.Tensor, b: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.p1, module.p2 = nn.Parameter(a), nn.Parameter(b)
    return module


@pytest.mark.parametrize("name", ["a", "z"])
def test_who_overlaps_a_module_that_gives_way_moves(tmp_path: Path, name: str) -> None:
    """``load_state_dict`` still copies into all of the memory that the module's leaf has."""
    saved = halves(torch.ones(4), torch.full((8,), 2.0))
    Snapshot.take(tmp_path, {"m": saved, name: StateDict(x=torch.full((4,), 3.0))})
    memory = torch.zeros(8)
    loose = StateDict(x=memory[4:])
    target = halves(memory[:4], memory)
    report = Snapshot(tmp_path).restore({"m": target, name: loose}, strict=False)
    (line,) = report.mismatched
    assert line.startswith("m/p1, m/p2:")
    assert (loose["x"] == 3).all()


def test_every_leaf_that_overlaps_a_module_that_gives_way_is_named(tmp_path: Path) -> None:
    saved = {"m": halves(torch.ones(4), torch.full((8,), 2.0)), "n": nn.Module()}
    saved["n"].p = nn.Parameter(torch.full((4,), 3.0))
    Snapshot.take(tmp_path, saved)
    memory = torch.zeros(8)
    other = nn.Module()
    other.p = nn.Parameter(memory[4:])
    target = {"m": halves(memory[:4], memory), "n": other}
    report = Snapshot(tmp_path).restore(target, strict=False)
    assert [line.partition(":")[0] for line in report.mismatched] == ["m/p1, m/p2", "m/p2, n/p"]
