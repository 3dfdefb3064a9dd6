# SPDX-License-Identifier: Apache-2.0
"""What docs/manager.md shows is what happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT, play

PAGE = ROOT / "docs" / "manager.md"


@pytest.mark.blocking
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    # The tree of a root, which is no output.
    assert play(PAGE.read_text(), names, "manager.md", skip=r"\Aruns/7/step") >= 7
