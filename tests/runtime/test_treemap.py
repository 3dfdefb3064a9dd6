# SPDX-License-Identifier: Apache-2.0
"""The page of ``actorsnap inspect --html``: its data, and that it needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from actorsnap import StateDict, cli
from actorsnap.format.geometry import Box
from actorsnap.sync import Snapshot
from tests.state.saved import Part, Saved


def page_of(path: Path) -> str:
    out = path.parent / "page.html"
    ended = CliRunner().invoke(cli.app, ["inspect", str(path), "--html", str(out), "--json"])
    assert ended.exit_code == 0, ended.stderr
    assert json.loads(ended.stdout) == {"written": str(out)}
    return out.read_text("utf-8")


def data_of(page: str) -> Any:
    found = re.search(r"const data = (.*);\n", page)
    assert found is not None
    return json.loads(found[1])


def test_sums_over_ranks(tmp_path: Path) -> None:
    """Shards of one tensor are one leaf, and so are the private leaves of one path."""
    boxes = [Box((2 * n,), (2,)) for n in range(3)]
    shards = [Part("m/a.w", torch.ones(2), box, (6,)) for box in boxes]
    private = [Part("o/x", torch.ones(n + 1)) for n in range(2)]
    ranks = [[shards[0], shards[2], private[0]], [shards[1], private[1]]]
    page = page_of(Saved(ranks).write(tmp_path / "s"))
    assert "without the headers" in page  # so its sum is less than that in the first line
    data = data_of(page)
    assert data["lines"][0] == f"{tmp_path / 's'}  {(8192 + 36) / 1024:.1f} KiB in 2 data objects"
    assert data["nodes"] == [
        [-1, "/m", 0, 0, ""],
        [0, "/a", 0, 0, ""],
        [1, ".w", 24, 2, "float32[6], sharded"],
        [-1, "/o", 0, 0, ""],
        [3, "/x", 12, 2, "several kinds"],
    ]


def test_the_page_runs_nothing_of_the_snapshot(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>/*data*/null<!--tables-->\x1b"
    Snapshot.take(tmp_path / "s", {evil: StateDict({evil: evil, "x": 1})}, metadata={evil: evil})
    page = page_of(tmp_path / "s")
    assert not re.search(r"(src|href)\s*=|https?://|@import|innerHTML", page)
    assert page.count("<script>") == page.count("</script>") == 1
    assert "\x1b" not in page
    (group, *_) = data_of(page)["nodes"]
    assert group[1].startswith("/<")


# As much of a browser as the page uses.
BROWSER = """
const element = () => ({ style: {}, children: [], value: "", clientWidth: 1000, clientHeight: 600,
  heard: {}, append(...all) { this.children.push(...all) },
  replaceChildren(...all) { this.children = all },
  get firstChild() { return this.children[0] },
  addEventListener(name, call) { this.heard[name] = call } });
const elements = {};
globalThis.document = { createElement: element, getElementById: id => elements[id] ||= element() };
globalThis.addEventListener = () => {};
"""
USE = """
const area = box => parseFloat(box.style.width) * parseFloat(box.style.height);
const boxes = () => elements.map.children.map(box => [box.textContent, Math.round(area(box))]);
const paths = () => elements.rows.children.map(row => row.children[0].textContent);
const seen = [boxes(), paths()];
elements.head.children[0].children[0].children[0].heard.click();
seen.push(paths());
elements.map.children.find(box => box.className === "group").heard.click();
seen.push(paths(), elements.trail.children.map(button => button.textContent));
elements.search.value = "X2";
elements.search.heard.input();
seen.push(paths());
console.log(JSON.stringify(seen));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no JavaScript here")
def test_the_page_draws_areas_and_sorts(tmp_path: Path) -> None:
    state = {
        "a": StateDict(x=torch.ones(600), n=1),
        "b": StateDict({"deep.c.x1": torch.ones(300), "deep.c.x2": torch.ones(100)}),
    }
    Snapshot.take(tmp_path / "s", state)
    source = page_of(tmp_path / "s").partition("<script>")[2].partition("</script>")[0]
    script = tmp_path / "page.js"
    script.write_text(BROWSER + source.replace('"use strict";', "") + USE)
    done = subprocess.run(["node", script], check=True, capture_output=True, text=True)
    boxes, paths, by_path, opened, trail, filtered = json.loads(done.stdout)
    areas = dict(boxes)
    # 4,000 bytes are 600,000 pixels. A group with only a group in it is one.
    assert areas["a  2.3 KiB"] == 360_000
    assert areas["b/deep.c  1.6 KiB"] == 240_000
    assert areas["x1  1.2 KiB"] == pytest.approx(3 * areas["x2  400 B"], rel=0.01)
    assert paths == ["a/x", "b/deep.c.x1", "b/deep.c.x2", "a/n"]
    assert by_path == ["a/n", "a/x", "b/deep.c.x1", "b/deep.c.x2"]
    assert opened == ["a/n", "a/x"]
    assert trail == ["all (3.9 KiB)", "a (2.3 KiB)"]
    assert filtered == []
