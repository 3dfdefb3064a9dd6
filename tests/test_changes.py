# SPDX-License-Identifier: Apache-2.0
"""The fragments of the changelog become a part of CHANGELOG.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAGMENTS = sorted(
    path for path in (ROOT / "docs" / "changes").glob("*") if path.name != "README.md"
)


@pytest.fixture(scope="module")
def part() -> str:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.8.7"]
    done = subprocess.run(
        [*command, "--date", "2026-11-24"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_fragment_is_in_it(part: str) -> None:
    """One of a misspelt kind would be left out in silence."""
    assert part.startswith("## 9.8.7 (2026-11-24)\n")
    words = " ".join(part.split())
    for path in FRAGMENTS:
        text = " ".join(path.read_text().replace("](../", "](docs/").split())
        assert text in words, path.name
    assert part.count("\n- ") >= len(FRAGMENTS)


def test_kinds_are_in_order(part: str) -> None:
    kinds = ["New", "Fixed", "Format: what is stored", "Removed", "Documentation"]
    found = re.findall("^### (.*)$", part, re.MULTILINE)
    assert found == [kind for kind in kinds if kind in found]
    assert found or not FRAGMENTS


def test_links_are_those_of_the_changelog(part: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", part):
        assert (ROOT / target).exists(), target
