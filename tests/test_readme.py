"""What README shows is what is printed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import runpy
import subprocess
import sys
import textwrap
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


def test_what_it_shows_type_checks(tmp_path: Path) -> None:
    """With mypy, as strict as it can be: dicts of statefuls are inferred, ``await`` is used."""
    shown = [
        block
        for title in ("Three ways to use it", "Many ranks")
        for block in blocks(section(title), "python")
        if "app_state = {" in block
    ]
    assert len(shown) == 2
    head = (
        "import torch\n"
        "from actorsnap import Snapshot, StateDict\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "progress = StateDict(step=0)\n"
    )
    text = head + "".join(
        f"async def shown_{number}() -> None:\n{textwrap.indent(block, '    ')}\n"
        for number, block in enumerate(shown)
    )
    text += (
        "def blocking() -> None:\n"
        "    import actorsnap.sync\n"
        '    app_state = {"model": model, "progress": progress}\n'
        '    actorsnap.sync.Snapshot.take("a", app_state).restore(app_state)\n'
    )
    (tmp_path / "shown.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "shown.py")],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_actorsnap(folder: Path) -> None:
    text = section("Without actorsnap")
    (script,), (expected,) = blocks(text, "python"), blocks(text)
    assert printed("-c", script, cwd=folder) == expected
