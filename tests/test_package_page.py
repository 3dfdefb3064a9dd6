# SPDX-License-Identifier: Apache-2.0
"""What an index shows of the package, from real builds of its metadata."""

from __future__ import annotations

import email
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[1]


def built(folder: Path, repository: str) -> Message:
    """Metadata of a wheel of this tree."""
    folder.mkdir()
    project = (ROOT / "pyproject.toml").read_text()
    changed, count = re.subn(r'(?m)^repository = ".*"$', f'repository = "{repository}"', project)
    assert count == 1
    (folder / "pyproject.toml").write_text(changed)
    for name in ("README.md", "LICENSE", "docs", "actorsnap"):
        (folder / name).symlink_to(ROOT / name)
    script = "from hatchling.build import prepare_metadata_for_build_wheel as p; print(p('.'))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    return email.message_from_string((folder / done.stdout.strip() / "METADATA").read_text())


def test_links_are_absolute_once_there_is_a_repository(tmp_path: Path) -> None:
    message = built(tmp_path / "public", "https://example.org/us/actorsnap/")
    text = message.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert len(targets) > 15
    assert [target for target in targets if not target.startswith("https://")] == []
    base = "https://example.org/us/actorsnap"
    assert f"{base}/blob/v{message['Version']}/docs/install.md#training-frameworks" in targets
    assert f"Repository, {base}" in message.get_all("Project-URL", [])
    assert len(message.get_all("Project-URL", [])) == 4


def test_nothing_is_made_up_before(tmp_path: Path) -> None:
    message = built(tmp_path / "private", "")
    assert message.get_all("Project-URL") is None
    assert message["Description-Content-Type"] == "text/markdown"
    assert message.get_payload() == (ROOT / "README.md").read_text()
