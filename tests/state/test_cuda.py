"""Tensors on a device: saved from there, restored into there."""

from __future__ import annotations

import pytest
import torch

from actorsnap.state.stateful import RNGState
from tests.state.stored import store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_layouts_and_shared_memory_on_a_device() -> None:
    def make(fill: float) -> dict[str, torch.Tensor]:
        x = torch.arange(60, dtype=torch.float32, device="cuda").view(3, 4, 5) + fill
        flat = torch.arange(20.0, device="cuda") + fill
        return {
            "plain": x.clone(),
            "transposed": x.clone().transpose(0, 2),
            "sliced": x.clone()[:, ::2, 1:3],
            "conj": torch.view_as_complex(x[..., :2].contiguous()).conj(),
            "whole": x,
            "part": x[1:],
            "a": flat[:12],
            "b": flat[8:],
            "expanded": (torch.ones(1, device="cuda") + fill).expand(100),
            "bf16": x.bfloat16(),
            "sparse": torch.eye(3, device="cuda").to_sparse() * (1 + fill),
            "empty": x[:0],
        }

    state, target = make(0.0), make(1000.0)
    memory = store(state)
    result = memory.restore("s", target)
    fresh = memory.restore("s")
    for name, tensor in state.items():
        assert result[name] is target[name]
        assert torch.equal(result[name].to_dense(), tensor.to_dense())
        assert fresh[name].device.type == "cpu"
        assert torch.equal(fresh[name].to_dense(), tensor.cpu().to_dense())


def test_generators_of_devices() -> None:
    torch.rand(1, device="cuda")
    state = RNGState().state_dict()
    assert len(state["cuda"]) == torch.cuda.device_count()
    expected = torch.rand(4, device="cuda").tolist()
    RNGState().load_state_dict(state)
    assert torch.rand(4, device="cuda").tolist() == expected
