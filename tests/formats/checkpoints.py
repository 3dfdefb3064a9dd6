# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints as other programs do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 2, dtype=torch.float16))


def is_same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def write_safetensors(path: Path, state: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def write_repo(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Two files, and the index that Hugging Face writes."""
    names = sorted(state)
    files = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(files.values()):
        write_safetensors(folder / file, {n: state[n] for n in names if files[n] == file})
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def training_state(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model and its optimizer after a step, and what people give to ``torch.save``."""
    model = make_model(seed).float()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 30)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "loss": torch.tensor(0.5),
    }
    return model, optimizer, saved


def with_header(path: Path, change: Any) -> None:
    """Rewrites a safetensors file with the header that ``change`` makes of its own."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    encoded = json.dumps(change(header) or header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[end:])
