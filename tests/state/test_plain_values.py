# SPDX-License-Identifier: Apache-2.0
"""Containers and numbers as programs keep them: schedulers, histories, odd keys."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import BytesEntry, ContainerEntry, ValueEntry
from actorsnap.state.capture import capture
from actorsnap.state.stateful import StateDict
from tests.api.same import assert_same
from tests.state.stored import Memory, round_trip, store
from tests.state.test_tree import same

# Counters -------------------------------------------------------------------------------------


def test_a_counter_comes_back_as_one() -> None:
    for value in (Counter({3: 1, 1: 2}), Counter(), {(1, 2): Counter("ab")}):
        assert same(round_trip(value), value)
    assert round_trip(Counter("a"))["b"] == 0


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 2))]


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind(parameters(), lr=0.1)  # type: ignore[call-arg]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda _: 0.9),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1])]
    ),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "SWALR": lambda o: SWALR(o, 0.05),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_comes_back(name: str) -> None:
    scheduler = SCHEDULERS[name](optimizer())
    state = scheduler.state_dict()
    back = Memory(capture({"s": scheduler})).restore("s")
    assert_same(back, state)
    SCHEDULERS[name](optimizer()).load_state_dict(back)


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_comes_back(kind: type[torch.optim.Optimizer]) -> None:
    tuned = optimizer(kind)
    (parameter,) = tuned.param_groups[0]["params"]
    parameter.grad = torch.ones(3, 2)
    if kind is torch.optim.SparseAdam:
        parameter.grad = parameter.grad.to_sparse()
    tuned.step(lambda: 1.0)
    back = Memory(capture({"s": tuned})).restore("s")
    assert_same(back, tuned.state_dict())
    optimizer(kind).load_state_dict(back)


def test_other_states_of_torch_come_back() -> None:
    averaged = AveragedModel(torch.nn.Linear(2, 2))
    scaler = torch.amp.GradScaler("cpu")
    memory = Memory(capture({"averaged": averaged, "scaler": scaler}))
    assert_same(memory.restore("averaged"), averaged.state_dict())
    assert_same(memory.restore("scaler"), scaler.state_dict())


# Types, not names -----------------------------------------------------------------------------


def test_an_ordered_dict_below_an_odd_key_stays_one() -> None:
    value = {(1, 2): OrderedDict(x=1)}
    assert same(round_trip(value), value)


def test_a_class_that_has_the_name_of_a_container_is_refused() -> None:
    namesake = type("OrderedDict", (dict,), {})
    for value in (namesake(x=1), {(1, 2): namesake(x=1)}):
        with pytest.raises(UsageError, match=r"'s/v' .*OrderedDict.* which needs pickle"):
            round_trip(value)


# Long lists -----------------------------------------------------------------------------------

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just("\ud800")
)


@given(st.lists(plain, max_size=20), st.booleans())
def test_a_long_list_is_one_leaf_and_exact(items: list[Any], is_tuple: bool) -> None:
    long: Any = [*items, *range(300)]
    if is_tuple:
        long = tuple(long)
    memory = store({"v": long})
    assert [entry.path for entry in memory.entries] == ["s/v"]
    assert same(memory.restore("s")["v"], long)
    target: Any = {"v": [0.0] * 300}
    assert same(memory.restore("s", target)["v"], long)


@pytest.mark.parametrize(("saved", "now"), [(300, 3), (3, 300), (300, 0), (0, 300)])
def test_a_history_that_was_longer_or_shorter_fits(saved: int, now: int) -> None:
    state = StateDict(history=[0.5] * saved, more={"x": (1,) * saved})
    memory = Memory(capture({"s": state}))
    target = {"history": [1.5] * now, "more": {"x": (2,) * now}}
    assert same(memory.restore("s", target), state.data)


def test_where_long_lists_lie() -> None:
    history = [math.sin(i) for i in range(10_000)]
    state = {
        "history": history,
        "few": [1.5] * 256,
        "short": [True] * 257,
        "words": ["word" * 2000] * 300,
        "big": [2**70, math.nan, -0.0, None] * 100,
    }
    memory = store(state)
    kinds = {entry.path: type(entry) for entry in memory.entries if "few/" not in entry.path}
    assert kinds == {
        "s/history": BytesEntry,
        "s/few": ContainerEntry,
        "s/short": ValueEntry,
        "s/words": BytesEntry,
        "s/big": BytesEntry,
    }
    assert {e.type for e in memory.entries if isinstance(e, BytesEntry)} == {"json"}
    (entry,) = (e for e in memory.entries if e.path == "s/history")
    assert isinstance(entry, BytesEntry)
    # As docs/format.md says: any program that reads JSON reads it.
    assert json.loads(memory.data[entry.data.start : entry.data.stop]) == history
    assert entry.data.stop - entry.data.start < 22 * len(history)
    assert same(memory.restore("s"), state)


def test_lists_with_tensors_are_lists_of_leaves() -> None:
    memory = store({"v": [*range(300), torch.ones(2)]})
    assert len(memory.entries) == 302


def test_a_long_list_that_is_damaged_is_a_format_error() -> None:
    memory = store({"v": [0.1] * 3000})
    memory.data[4096] = 0x7B
    with pytest.raises(FormatError, match="s/v: its bytes are no json value"):
        memory.restore("s")


def test_long_values_below_odd_keys_do_not_lie_in_the_manifest() -> None:
    value = {(1, 2): [0.1] * 5000, (3,): "x" * 5000, None: b"y" * 5000}
    memory = store({"v": value})
    assert [type(entry) for entry in memory.entries] == [BytesEntry]
    assert same(memory.restore("s")["v"], value)


# Refusals say why -----------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "tuple key": (
        {(0, 1): torch.ones(2)},
        r"a dict with the key \(0, 1\) of type tuple and a torch.Tensor in it; "
        "tensors and arrays need keys of type str, int, float, bool or None",
    ),
    "tensor beside": ({(0, 1): 1, "w": torch.ones(2)}, r"the key \(0, 1\) of type tuple and a"),
    "array": ({(0, 1): [np.ones(2)]}, r"the key \(0, 1\) of type tuple and a numpy.ndarray in it"),
    "numpy key": (
        {np.int64(3): torch.ones(2)},
        r"a dict with the key np.int64\(3\) of type numpy.int64, .*convert it to",
    ),
    "numpy key and number": ({np.int64(3): 1}, "key np.int64.3. of type numpy.int64"),
    "large int": (10**4000, r"an int of 13288 bits; at most 12000 are stored"),
    "large int in a list": ([10**4000] * 300, "holds an int of 13288 bits"),
    "large int as a key": ({10**4000: torch.ones(2)}, "a key that is an int of 13288 bits"),
    "deep": ({(0,): [slice(3)]}, "holds a value of type slice, which needs pickle"),
    "factory": (defaultdict(lambda: 0, a=1), "is a defaultdict with the factory <function"),
    "factory inside": ({(0,): defaultdict(Any)}, "holds a defaultdict with the factory typing.Any"),
    "tensor in a set": ({torch.ones(2)}, "is a set with a torch.Tensor in it; only dicts, lists"),
    "zone": (datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC")), "holds a time in the zone UTC, which"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_reason(name: str) -> None:
    value, reason = REFUSED[name]
    with pytest.raises(UsageError, match=rf"'s/v' .*{reason}") as caught:
        store({"v": value})
    is_lambda = name == "factory"  # which cannot be pickled
    further = (
        "leave it out" if is_lambda else "allow pickle with options=Options(allow_pickle=True)"
    )
    assert f", or {further}" in str(caught.value)
    assert len(str(caught.value)) < 500


class Async:
    async def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class AsyncLoad:
    def state_dict(self) -> dict[str, Any]:
        return {}

    async def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_an_async_state_dict_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'a' .* Async: its state_dict is async"):
        capture({"a": Async()})
    with pytest.raises(UsageError, match=r"'a' .* AsyncLoad: its load_state_dict is async"):
        capture({"a": AsyncLoad(), "b": StateDict(x=1)})
