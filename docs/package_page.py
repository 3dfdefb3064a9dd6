# SPDX-License-Identifier: Apache-2.0
"""Prepares the package's page on an index: README with absolute links, and the project's URLs.

An index shows README without the files beside it. Hatchling calls this for every build; see
``repository`` in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PAGES = {
    "Repository": "",
    "Documentation": "/blob/{tag}/docs/index.md",
    "Changelog": "/blob/{tag}/CHANGELOG.md",
    "Issues": "/issues",
}
"""Paths of GitHub."""


class PackagePage(MetadataHookInterface):
    """Sets ``readme`` and ``urls``. Without a repository, links stay relative."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = self.config["repository"].rstrip("/")
        if repository:
            tag = f"v{metadata['version']}"
            text = with_absolute_links(text, f"{repository}/blob/{tag}")
            metadata["urls"] = {
                name: repository + path.format(tag=tag) for name, path in _PAGES.items()
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, base: str) -> str:
    """Returns Markdown whose links to files are below ``base``."""
    return re.sub(r"\]\((?!https?:|#)", f"]({base}/", text)
