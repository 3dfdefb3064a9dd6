# SPDX-License-Identifier: Apache-2.0
"""What the pages about preemption and XLA name is there. Commands of other systems are not run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorsnap.manager import Notice, notices
from actorsnap.sync import Snapshot
from tests.pages import ROOT, blocks

PAGE = (ROOT / "docs/howto/preemption.md").read_text()


def calls() -> Iterator[str]:
    """Each ``notices.<name>(...)`` of the page."""
    for text in [*blocks(PAGE, "python"), *re.findall(r"`([^`\n]*notices\.[^`\n]*\))`", PAGE)]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("notices."):
                yield ast.unparse(node)


@pytest.mark.parametrize("call", sorted(set(calls())))
def test_each_source_can_be_made(call: str) -> None:
    watcher = eval(call, {"notices": notices, "check": lambda: Notice("x", None)})
    assert watcher.start
    assert watcher.stop


@pytest.mark.parametrize("page", ["howto/preemption.md", "integrations/xla.md"])
def test_the_examples_run(page: str) -> None:
    found = blocks((ROOT / "docs" / page).read_text(), "python")
    assert found
    for block in found:
        exec(compile(block, f"{page}: {block[:60]!r}", "exec"), {})


def test_the_first_example_exits_with_75_when_torchrun_ends_the_ranks(tmp_path: Path) -> None:
    """A rank that has left the ``with`` block gets SIGTERM when another has exited."""
    program = f"""
import os, signal
from actorsnap import StateDict

names = {{"__name__": "page"}}
exec({blocks(PAGE, "python")[0]!r}, names)
try:
    notice = lambda: os.kill(os.getpid(), signal.SIGTERM)
    names["train"]({str(tmp_path / "run")!r}, {{"x": StateDict(n=1)}}, 1000, notice)
finally:
    notice()
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120, check=False)
    assert ended.returncode == 75
    assert [snapshot.step for snapshot in Snapshot.list(tmp_path / "run")] == [0]


def test_the_sources_are_all_there() -> None:
    named = {call.partition("(")[0].removeprefix("notices.") for call in calls()}
    assert named == {name for name in vars(notices) if not name.startswith("_")}
