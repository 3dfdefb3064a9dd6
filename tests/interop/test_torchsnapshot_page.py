# SPDX-License-Identifier: Apache-2.0
"""What docs/migrate/torchsnapshot.md shows of torchsnapshot is what happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap.sync import Snapshot
from tests.pages import ROOT, all_blocks


def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/migrate/torchsnapshot.md").read_text()
    model = torch.nn.Linear(2, 2)
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    (_, code), (_, printed) = all_blocks(text)
    exec(compile(code, "docs/migrate/torchsnapshot.md", "exec"), names)
    assert capsys.readouterr().out == printed
    for step in (100, 200):
        assert Snapshot(f"ckpt/step-{step}").verify("full").ok
