# SPDX-License-Identifier: Apache-2.0
"""The states that are saved: made of random bytes once, the same in every run."""

from __future__ import annotations

import math

import torch

__all__ = ["compare", "llama", "llama_7b_shapes", "scramble", "small", "state_bytes"]

State = dict[str, torch.Tensor]


def llama(gib: float, layers: int = 18, device: str = "cpu") -> State:
    """A Llama-like fp32 model of ``gib`` GiB: 165 tensors, from 4 KiB to about 80 MiB each."""
    hidden = max(64, round(1024 * math.sqrt(gib) / 64) * 64)
    ffn = round(hidden * 2.6875 / 32) * 32
    per_layer = 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden
    vocab = max(256, (int(gib * 2**30) // 4 - layers * per_layer - hidden) // (2 * hidden))
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocab, hidden)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.attention.wq.weight": (hidden, hidden),
            f"layers.{i}.attention.wk.weight": (hidden, hidden),
            f"layers.{i}.attention.wv.weight": (hidden, hidden),
            f"layers.{i}.attention.wo.weight": (hidden, hidden),
            f"layers.{i}.feed_forward.w1.weight": (ffn, hidden),
            f"layers.{i}.feed_forward.w2.weight": (hidden, ffn),
            f"layers.{i}.feed_forward.w3.weight": (ffn, hidden),
            f"layers.{i}.attention_norm.weight": (hidden,),
            f"layers.{i}.ffn_norm.weight": (hidden,),
        }
    shapes |= {"norm.weight": (hidden,), "output.weight": (vocab, hidden)}
    generator = torch.Generator(device).manual_seed(20260101)
    return {
        name: torch.empty(shape, device=device).uniform_(-1.0, 1.0, generator=generator)
        for name, shape in shapes.items()
    }


def llama_7b_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Llama 2 7B with as many of its 32 layers as fit into ``nbytes``: bf16 weights, and both
    moments of AdamW in bf16. Where not one layer fits, with all dims halved until it does."""
    shrink = 1
    while True:
        hidden, ffn, vocab = 4096 // shrink, 11008 // shrink, 32000 // shrink
        layer: dict[str, tuple[int, ...]] = {
            **{f"attention.w{x}.weight": (hidden, hidden) for x in "qkvo"},
            "feed_forward.w1.weight": (ffn, hidden),
            "feed_forward.w2.weight": (hidden, ffn),
            "feed_forward.w3.weight": (ffn, hidden),
            "attention_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
        }
        left = nbytes // 6 - hidden * (2 * vocab + 1)
        layers = min(32, left // sum(math.prod(shape) for shape in layer.values()))
        if layers >= 1 or shrink == 64:
            break
        shrink *= 2
    return {
        "tok_embeddings.weight": (vocab, hidden),
        **{f"layers.{i}.{n}": s for i in range(max(1, layers)) for n, s in layer.items()},
        "norm.weight": (hidden,),
        "output.weight": (vocab, hidden),
    }


def small(count: int = 100_000, size_bytes: int = 1024) -> State:
    """``count`` fp32 tensors of ``size_bytes`` each, every one with a storage of its own."""
    generator = torch.Generator().manual_seed(20260102)
    return {
        f"blocks.{i // 100}.p{i % 100}": torch.rand(size_bytes // 4, generator=generator)
        for i in range(count)
    }


def state_bytes(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


def scramble(state: State) -> None:
    """Overwrites every tensor in place, so that a load which does nothing is seen. Keeps the
    memory warm."""
    for tensor in state.values():
        tensor.fill_(-7.0)


def compare(expected: State, found: State) -> None:
    """Raises unless all tensors of both states have the same bits."""
    if expected.keys() != found.keys():
        raise RuntimeError(f"{len(expected)} tensors expected, {len(found)} found")
    for name, tensor in expected.items():
        if not torch.equal(tensor.view(torch.int32), found[name].view(torch.int32)):
            raise RuntimeError(f"{name} differs from what was saved")
