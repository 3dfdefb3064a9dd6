# SPDX-License-Identifier: Apache-2.0
"""App states, ``StateDict`` and random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from actorsnap.errors import UsageError
from actorsnap.state.capture import capture
from actorsnap.state.stateful import RNGState, StateDict, Stateful, validate_app_state
from tests.state.stored import Memory


def test_what_is_stateful() -> None:
    for value in (torch.nn.Linear(1, 1), StateDict(), RNGState()):
        assert isinstance(value, Stateful)
    assert not isinstance({}, Stateful)


def test_every_mistake_in_an_app_state_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        validate_app_state({"a": {}, 3: StateDict(), "b": StateDict, "c": StateDict()})
    text = str(caught.value)
    assert "'a' is of type dict" in text
    assert "actorsnap.StateDict" in text
    assert "the key 3 is of type int" in text
    assert "'b' is of type" in text
    assert "'c'" not in text
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError) as caught:
        validate_app_state({"m": model.state_dict(), "o": torch.optim.SGD([*model.parameters()])})
    assert str(caught.value).splitlines()[1:] == [
        "  the value at 'm' is a dict of tensors: pass the model itself, not its state_dict(); put "
        "other tensors into actorsnap.StateDict"
    ]
    for wrong in (dict[str, Any](), 3, None):
        with pytest.raises(UsageError):
            validate_app_state(wrong)


def test_state_dict_is_a_dict_whose_state_is_a_copy() -> None:
    state = StateDict(step=1, model=[1])
    shallow = state.state_dict()
    assert type(shallow) is dict
    shallow["step"] = 2
    assert state["step"] == 1
    assert shallow["model"] is state["model"]
    state.load_state_dict({"step": 5, "new": 6})
    assert dict(state) == {"step": 5, "model": [1], "new": 6}


def draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_generators_continue_where_they_were() -> None:
    draw()  # leaves half of a Gaussian pair in Python's and NumPy's generators
    memory = Memory(capture({"rng": RNGState()}))
    expected = [draw(), draw()]
    draw()
    RNGState().load_state_dict(memory.restore("rng"))
    assert [draw(), draw()] == expected
    # In place of the generators' current state works as well.
    RNGState().load_state_dict(memory.restore("rng", RNGState().state_dict()))
    assert [draw(), draw()] == expected


def test_the_state_is_compact() -> None:
    parts = capture({"rng": RNGState()}).parts
    assert len(parts) < 15


class Noisy:
    def state_dict(self) -> dict[str, Any]:
        return {"drawn": draw()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_taking_has_no_side_effect_on_generators() -> None:
    app_state = {"a": Noisy(), "rng": RNGState(), "z": Noisy()}
    before = RNGState().state_dict()
    expected = draw()
    RNGState().load_state_dict(before)
    memory = Memory(capture(app_state))
    assert draw() == expected
    # What is saved is the state before the statefuls drew.
    RNGState().load_state_dict(memory.restore("rng"))
    assert draw() == expected


class Failing(Noisy):
    def state_dict(self) -> dict[str, Any]:
        draw()
        raise ValueError


def test_a_failed_capture_has_no_side_effect_on_generators_either() -> None:
    before = RNGState().state_dict()
    expected = draw()
    RNGState().load_state_dict(before)
    with pytest.raises(ValueError):  # noqa: PT011
        capture({"rng": RNGState(), "z": Failing()})
    assert draw() == expected


def test_generators_that_the_snapshot_lacks_are_left_alone() -> None:
    before = random.getstate()
    state = RNGState().state_dict()
    del state["python"]
    RNGState().load_state_dict(state)
    assert random.getstate() == before


def test_a_state_that_does_not_fit_is_named() -> None:
    state = RNGState().state_dict()
    state["numpy"] = {**state["numpy"], "bit_generator": "PCG64"}
    with pytest.raises(UsageError, match="numpy random generator .*PCG64"):
        RNGState().load_state_dict(state)


def test_another_numpy_generator() -> None:
    numpy_random: Any = np.random
    old = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.PCG64(3))
    try:
        memory = Memory(capture({"rng": RNGState()}))
        expected = np.random.rand(3).tolist()
        RNGState().load_state_dict(memory.restore("rng"))
        assert np.random.rand(3).tolist() == expected
    finally:
        numpy_random.set_bit_generator(old)


class Cuda:
    """Stands in for ``torch.cuda``'s generators on a machine without devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
        self.states = [torch.full((16,), d, dtype=torch.uint8) for d in range(num_devices)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


def test_cuda_generators(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Cuda(monkeypatch, 3)
    memory = Memory(capture({"rng": RNGState()}))
    fewer = Cuda(monkeypatch, 2)
    fewer.states.reverse()
    RNGState().load_state_dict(memory.restore("rng"))
    assert [int(state[0]) for state in fewer.states] == [0, 1]
    assert "3 CUDA devices, this process has 2" in caplog.text
