"""What docs/manager.md shows is what happens."""

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

import pytest
import torch
from typer.testing import CliRunner

from actorsnap import StateDict
from actorsnap.cli import app
from actorsnap.manager.sync import CheckpointManager, every
from tests.pages import ROOT, all_blocks, blocks

PAGE = ROOT / "docs" / "manager.md"


def shell(line: str) -> str:
    program, *arguments = shlex.split(line)
    assert program == "actorsnap"
    return CliRunner().invoke(app, arguments, catch_exceptions=False).output


def timeless(text: str) -> str:
    """Without ages, times, holders, sizes, losses, attempts; columns separated by two spaces."""
    text = re.sub(r"\d+ (s|min|h|d) old", "<age>", text)
    text = re.sub(r"\d+(\.\d)? ([KM]i)?B\b", "<size>", text)
    text = re.sub(r"\d{8}T\d{6}-[0-9a-f]+-\d+-[0-9a-f]+", "<attempt>", text)
    text = re.sub(r"\b[\w.-]+@[\w.-]+:\d+", "<holder>", text)
    text = re.sub(r"until \d{4}-\d\d-\d\d \d\d:\d\d UTC", "<until>", text)
    text = re.sub(r'"until": ".*"', '"until": <time>', text)
    text = re.sub(r"(loss=|loss \(min\): )[\d.]+", r"\1<loss>", text)
    lines = [re.sub(r"\t| {2,}", "  ", line).rstrip() for line in text.splitlines()]
    return "\n".join(lines)


@pytest.mark.blocking
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = ""
    kinds = []
    for kind, block in all_blocks(PAGE.read_text()):
        if kind == "python":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(block, f"manager.md: {block[:60]!r}", "exec"), names)
            printed = said.getvalue()
        elif kind == "" and block.startswith("$ "):
            for session in block.removeprefix("$ ").split("\n$ "):
                line, _, expected = session.partition("\n")
                assert timeless(shell(line)) == timeless(expected), line
        elif kind == "" and not block.startswith("runs/7/step"):
            assert timeless(printed) == timeless(block)
        kinds.append(kind)
    assert kinds.count("python") >= 7


@pytest.mark.blocking
def test_what_readme_shows(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().split("\n## A whole run\n")[1].split("\n## ")[0]
    (block,) = blocks(section, "python")
    assert '"/ckpt/run-7"' in block
    names: dict[str, Any] = {
        "app_state": {"train": StateDict(weight=torch.zeros(3))},
        "train_step": lambda: 0.5,
        "num_steps": 1001,
    }
    text = block.replace("/ckpt/run-7", str(tmp_path / "run"))
    code = compile(text, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def run() -> None:
        found = eval(code, names)
        assert inspect.isawaitable(found)
        await found

    asyncio.run(run())
    manager = CheckpointManager(tmp_path / "run", names["app_state"], save=every.steps(500))
    assert manager.all_steps() == [0, 500, 1000]
    assert manager.best("loss", "min").metrics == {"loss": 0.5}  # type: ignore[union-attr]
