# SPDX-License-Identifier: Apache-2.0
"""What the tutorial shows is what happens. Its ranks: ``tests/ranks/test_pages.py``; its bucket:
``tests/cloud/test_page.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT, all_blocks, run_python, shell, timeless
from tests.support.scripts import run_script

pytestmark = pytest.mark.usefixtures("forker")

TEXT = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.blocking
def test_steps_1_to_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps = TEXT.partition("\n## 5. ")[0]
    names: dict[str, Any] = {}
    printed, sessions = "", 0
    for kind, block in all_blocks(steps):
        if kind == "python" and ("sys.argv" in block or "asyncio.run" in block):
            Path("train_async.py" if "asyncio" in block else "train.py").write_text(block)
        elif kind == "python":
            printed = run_python(block, names, "tutorial.md")
        elif kind == "" and block.startswith("$ "):
            for session in block.removeprefix("$ ").split("\n$ "):
                line, _, expected = session.partition("\n")
                found = run_script(line, tmp_path) if line.startswith("python ") else shell(line)
                assert timeless(found) == timeless(expected), line
                sessions += 1
        elif kind == "":
            assert printed == block
    assert sessions == 6
