# SPDX-License-Identifier: Apache-2.0
"""What the pages about preemption and XLA name is there. Commands of other systems are not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from actorsnap.manager import Notice, notices
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


def test_the_sources_are_all_there() -> None:
    named = {call.partition("(")[0].removeprefix("notices.") for call in calls()}
    assert named == {name for name in vars(notices) if not name.startswith("_")}
