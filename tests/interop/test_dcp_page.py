# SPDX-License-Identifier: Apache-2.0
"""What docs/migrate/dcp.md shows is what happens."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap.sync import Snapshot
from tests.pages import ROOT, all_blocks

PAGE = ROOT / "docs/migrate/dcp.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": torch.nn.Sequential(torch.nn.Linear(64, 256))}
    printed = ""
    for language, block in all_blocks(PAGE.read_text()):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, str(PAGE), "exec"), names)
            printed = out.getvalue()
        elif not block.startswith("make "):
            assert printed == block
    for step in (100, 200, 300, 400):
        assert Snapshot(tmp_path / "ckpt" / f"step-{step}").verify("full").ok
    assert Snapshot("ckpt/step-100").read_object("dcp/step") == 100
