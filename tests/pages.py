"""What stands in the code blocks of README and the pages of ``docs``."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ROOT", "all_blocks", "blocks"]

ROOT = Path(__file__).resolve().parents[1]


def all_blocks(text: str) -> list[tuple[str, str]]:
    """Language (``""`` where none is said) and content of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str = "") -> list[str]:
    return [block for kind, block in all_blocks(text) if kind == language]
