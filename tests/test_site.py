# SPDX-License-Identifier: Apache-2.0
"""The site's generated pages are up to date, and its checks find what they look for.

``make site`` builds it, with warnings as errors.
"""

from __future__ import annotations

import ast
import asyncio
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import actorsnap
from actorsnap import errors, manager, storage, testing
from actorsnap.interop import dcp
from actorsnap.manager import every, keep, notices
from actorsnap.sync import Snapshot
from docs import generate_reference
from docs.hooks import generated_pages, troubles_of
from docs.pictures import PictureError, mermaid
from tests.pages import ROOT


@pytest.mark.parametrize("path", generate_reference.pages(), ids=lambda path: path.name)
def test_a_page_of_the_reference_is_up_to_date(path: Path) -> None:
    assert generate_reference.pages()[path] == path.read_text(), "run: make docs"


def test_each_error_has_its_meaning_and_what_to_do() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", page, flags=re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted({*errors.__all__} - {"ActorSnapError"})
    tree = page.partition("```\n")[2].partition("```")[0]
    for name in errors.__all__:
        assert re.search(rf"\b{name}\b", tree), name
        if base := re.search(rf"\b{name} \((\w+)\)", tree):
            kind = getattr(errors, name)
            assert base[1] in {each.__name__ for each in kind.__mro__}


def texts_of_the_source() -> str:
    """Every literal text of the package, f-strings without what they fill in."""
    found: list[str] = []
    for path in (ROOT / "actorsnap").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            " ".join(node.value.split())
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs
        ]
    return "\n".join(found)


def text_of_a_superfluous_await() -> str:
    """Python's own text."""
    call: Any = Snapshot

    async def mistake() -> None:
        await call("memory://s")

    with pytest.raises(TypeError) as raised:
        asyncio.run(mistake())
    return str(raised.value)


def test_messages_of_troubleshooting_are_those_of_the_source() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    known = texts_of_the_source() + text_of_a_superfluous_await()
    for row in re.findall(r"^\| (.+?) \|", page, flags=re.MULTILINE):
        for message in row.split("`")[1::2]:
            for part in message.split("...") if " " in message else []:
                assert part.strip(" ,()") in known, message


def test_each_extra_is_in_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/install.md").read_text()
    ours = {"dev", "docs", "release", "test"}
    missing = [
        name
        for name in project["optional-dependencies"]
        if name not in ours and f"`actorsnap[{name}]`" not in page
    ]
    assert missing == []


def test_each_option_of_the_storages_has_a_link_from_the_guides() -> None:
    for page in ("howto/s3.md", "howto/gcs.md"):
        assert "reference/storage-options.md" in (ROOT / "docs" / page).read_text()


def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"]
    printed = ["".join(each.get("text", "") for each in output) for output in outputs]
    assert [text for text in printed if text] == [
        "100 True\n",
        "150 160\n",
        "torch.Size([64, 32]) 150 True\n",
        "ObjectExists\n",
    ]


def test_pages_are_made_of_other_files() -> None:
    pages = dict(generated_pages())
    assert "nn.Sequential" in pages["examples/quickstart_sync.md"]
    assert "await Snapshot.take" in pages["examples/notebook.md"]
    assert "(notebook.ipynb)" in pages["examples/notebook.md"]
    assert pages["examples/notebook.ipynb"].startswith("{")
    assert "(0011-uploader-process.md)" in pages["decisions/index.md"]
    assert "## New" in pages["changelog.md"]


def test_the_check_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">x</a> <a href="b.html#gone">x</a> <a href="gone.html">x</a>'
        '<a href="https://example.org/">fine</a> <img src="https://example.org/x.png">'
    )
    (tmp_path / "b.html").write_text('<p id="here">x</p>')
    (tmp_path / "x.css").write_text("a { background: url(https://example.org/x.png) }")
    assert sorted(troubles_of(tmp_path)) == [
        "a.html: b.html#gone has no such anchor",
        "a.html: gone.html leads nowhere",
        "a.html: loads https://example.org/x.png",
        "x.css: loads from another host",
    ]


def test_pictures() -> None:
    drawn = mermaid(
        "sequenceDiagram\n"
        "    participant a as <one>\n"
        "    participant b as two\n"
        "    a->>b: hello\n"
        "    opt maybe\n"
        "    Note over b: thinks\n"
        "    b->>a: answers\n"
        "    end\n",
        "mermaid",
        "picture",
    )
    for text in ("&lt;one&gt;", ">two<", ">hello<", ">if maybe<", ">thinks<", ">answers<"):
        assert text in drawn
    with pytest.raises(PictureError, match="pie"):
        mermaid("pie", "mermaid", "picture")
    with pytest.raises(PictureError, match="unknown line"):
        mermaid("sequenceDiagram\n    a --> b", "mermaid", "picture")
    with pytest.raises(PictureError, match="no end"):
        mermaid("sequenceDiagram\n    opt x", "mermaid", "picture")


def test_the_reference_has_each_policy_and_watcher() -> None:
    page = (ROOT / "docs/reference/manager.md").read_text()
    for holder in (every, keep, notices):
        for name in [name for name in vars(holder) if not name.startswith("_")]:
            assert f"### `{holder.__name__}.{name}(" in page
    assert "notices.signals" in page


@pytest.mark.parametrize(
    "module", [actorsnap, manager, storage, testing, dcp], ids=lambda module: module.__name__
)
def test_each_public_name_has_an_entry_and_a_docstring(module: ModuleType) -> None:
    """Errors, policies, watchers and options have pages, or sections, of their own."""
    elsewhere = {*errors.__all__, "Options", "__version__", "every", "keep", "notices"}
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    entries = set(re.findall(rf"^::: {re.escape(module.__name__)}\.(\w+)$", pages, re.MULTILINE))
    names = {*module.__all__} - elsewhere
    assert sorted(names - entries) == []
    undescribed = []
    for name in names:
        made = getattr(module, name)
        own = vars(made).get("__doc__") if isinstance(made, type) else made.__doc__
        if not own:  # pages would show an inherited one
            undescribed.append(name)
    assert undescribed == []
    assert "`actorsnap.from_env()`" in pages


def test_each_adapter_has_an_entry() -> None:
    """Read from the source: some frameworks are not installed."""
    same_calls = {"torchtitan", "torchtnt", "xla"}  # those of the libraries that they replace
    page = (ROOT / "docs/reference/interop.md").read_text()
    entries = set(re.findall(r"^::: actorsnap\.interop\.(\w+\.\w+)$", page, re.MULTILINE))
    names: list[str] = []
    for path in (ROOT / "actorsnap/interop").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                if path.stem not in same_calls:
                    names += [f"{path.stem}.{name}" for name in ast.literal_eval(node.value)]
    assert names
    assert sorted({*names} - entries) == []


def test_the_reference_of_errors_has_one_tree() -> None:
    """The other would come from the module's docstring, which the site shows."""
    assert "├──" not in str(errors.__doc__)
