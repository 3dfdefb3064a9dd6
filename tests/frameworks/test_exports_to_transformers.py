# SPDX-License-Identifier: Apache-2.0
"""Exports, opened by the real ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap.sync import Snapshot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained(
    tmp_path: Path, is_tied: bool, max_shard_bytes: int, dtype: torch.dtype
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    Snapshot.take(tmp_path / "s", {"model": model})
    report = Snapshot(tmp_path / "s").export_hf(
        tmp_path / "hf", dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    assert bool(report.tied) == is_tied
    assert (len(report.files) > 1) == (max_shard_bytes == 100_000)
    config.save_pretrained(tmp_path / "hf")
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=dtype, output_loading_info=True
    )
    assert not any(loading.values()), loading
    mine, theirs = model.to(dtype).state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    tokens = torch.arange(20).view(2, 10)
    if dtype is torch.float32:  # ``to`` also rounds buffers that are in no checkpoint
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, again(tokens).logits)
    # A job goes on from there.
    Snapshot(tmp_path / "hf").restore({"model": model}, strict=False)
