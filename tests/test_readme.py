# SPDX-License-Identifier: Apache-2.0
"""What README shows is what happens.

Object storage: ``tests/cloud/test_page.py``; many ranks: ``tests/ranks/test_pages.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from actorsnap.manager.sync import CheckpointManager
from tests.pages import ROOT, blocks, play, run_python

TEXT = (ROOT / "README.md").read_text()


@pytest.mark.blocking
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    skip = r"://|init_process_group|pip install"
    assert play(TEXT, names, "README.md", skip=skip) == 3
    assert names["found"] is None
    for root in ("runs/7", "runs/8"):
        assert CheckpointManager(root, names["app_state"]).all_steps() == [700, 800, 900]
    # "Kill it and start it again"
    for block in blocks(TEXT, "python")[:2]:
        names["found"] = None
        run_python(block.partition("snapshot = ")[0], names, "README.md")
        found: Any = names["found"]
        assert found.step == 900


def test_it_stays_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_the_files_that_it_links_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)", TEXT)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_what_it_shows_type_checks(tmp_path: Path) -> None:
    """With mypy, as strict as it can be: dicts of statefuls are inferred, ``await`` is used."""
    script, *awaited = [b for b in blocks(TEXT, "python") if "init_process_group" not in b]
    body = "".join(textwrap.indent(block, "    ") for block in awaited)
    (tmp_path / "shown.py").write_text(f"{script}\nasync def shown() -> None:\n{body}")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "shown.py")],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
