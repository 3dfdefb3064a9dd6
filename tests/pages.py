# SPDX-License-Identifier: Apache-2.0
"""What stands in the code blocks of README and the pages of ``docs``."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from actorsnap.cli import app

__all__ = ["ROOT", "all_blocks", "blocks", "play", "run_python", "shell", "timeless"]

ROOT = Path(__file__).resolve().parents[1]


def all_blocks(text: str) -> list[tuple[str, str]]:
    """Language (``""`` where none is said) and content of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str = "") -> list[str]:
    return [block for kind, block in all_blocks(text) if kind == language]


def run_python(block: str, names: dict[str, Any], title: str) -> str:
    """Runs a block as a script or, if it awaits, as a cell of a notebook; what it prints."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(block, f"{title}: {block[:60]!r}", "exec", flags=flags)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if code.co_flags & inspect.CO_COROUTINE:

            async def awaited() -> None:
                await eval(code, names)

            asyncio.run(awaited())
        else:
            exec(code, names)
    return printed.getvalue()


def shell(line: str) -> str:
    """What a command line prints; not in a process of its own, which would import torch."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "actorsnap", line
    return CliRunner().invoke(app, arguments, catch_exceptions=False).output


def timeless(text: str) -> str:
    """Without ages, times, holders, sizes, losses, attempts; columns separated by two spaces."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<time>", text)
    text = re.sub(r"\d+ (s|min|h|d) old", "<age>", text)
    text = re.sub(r"\d+(\.\d)? ([KMG]i)?B\b", "<size>", text)
    text = re.sub(r"\d{8}T\d{6}-[0-9a-f]+-\d+-[0-9a-f]+", "<attempt>", text)
    text = re.sub(r"\b[\w.-]+@[\w.-]+:\d+", "<holder>", text)
    text = re.sub(r"until \d{4}-\d\d-\d\d \d\d:\d\d UTC", "<until>", text)
    text = re.sub(r'"until": ".*"', '"until": <time>', text)
    text = re.sub(r"(loss=|loss \(min\): |\"loss\": )[\d.e-]+", r"\1<loss>", text)
    lines = [re.sub(r"\t| {2,}", "  ", line).rstrip() for line in text.splitlines()]
    return "\n".join(lines)


def play(text: str, names: dict[str, Any], title: str, *, skip: str = "") -> int:
    """Runs the Python blocks and shell sessions of a page in order, and compares what they print.

    A block without a language is a session (``$ actorsnap ...``), or what the block before it
    prints.

    Args:
        names: Globals of the Python blocks.
        skip: A regular expression: blocks that it finds are left out.

    Returns:
        The number of Python blocks.
    """
    printed, num_blocks, is_skipped = "", 0, False
    for kind, block in all_blocks(text):
        if kind in ("python", "") and skip and re.search(skip, block):
            is_skipped = True
        elif kind == "python":
            printed, is_skipped = run_python(block, names, title), False
            num_blocks += 1
        elif kind == "" and block.startswith("$ "):
            for session in block.removeprefix("$ ").split("\n$ "):
                line, _, expected = session.partition("\n")
                assert timeless(shell(line)) == timeless(expected), line
        elif kind == "" and not is_skipped:
            assert timeless(printed) == timeless(block), f"{title}: {block}"
    return num_blocks
