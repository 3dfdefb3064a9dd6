"""What README shows is what is printed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actorsnap.cli import app
from tests.pages import ROOT, blocks

TEXT = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def printed(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=True,
    )
    return done.stdout


def timeless(text: str) -> str:
    # On a terminal, as in README, columns are aligned; in a pipe tabs stand between them.
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<time>", text).replace("\t", "  ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the quickstart has left its snapshots, as README says."""
    folder = tmp_path_factory.mktemp("readme")
    assert "$ python examples/quickstart_async.py ckpt\n" in TEXT
    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart_async.py"))
    with contextlib.chdir(folder):
        asyncio.run(quickstart["main"]("ckpt"))
    return folder


def test_the_shell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (block,) = blocks(section("From the shell"))
    for session in block.removeprefix("$ ").split("\n$ "):
        command, expected = session.split("\n", 1)
        program, *arguments = command.split()
        assert program == "actorsnap"
        # A process of its own for each would import torch each time; ``test_cli.py`` has some.
        found = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert (found.exit_code, found.stderr) == (0, ""), command
        assert timeless(found.stdout).rstrip() == timeless(expected).rstrip(), command


def test_without_actorsnap(folder: Path) -> None:
    text = section("Without actorsnap")
    (script,), (expected,) = blocks(text, "python"), blocks(text)
    assert printed("-c", script, cwd=folder) == expected
