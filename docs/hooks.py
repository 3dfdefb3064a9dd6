# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: pages made from files outside ``docs``, and a check of the built site.

- The benchmarks, the examples, CONTRIBUTING.md, the decisions and the changelog become pages.
- Links to these files, which work in a checkout, lead to their pages. A notebook can be downloaded.
- A page that a docstring names becomes a link.
- The build fails if a page has a broken link, or makes a browser ask another host.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

_PAGES = {
    "bench/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
}
"""Pages by the file outside ``docs`` that has their text."""

_LOADS = {"img": "src", "script": "src", "iframe": "src", "link": "href", "source": "src"}
"""Attributes whose URL a browser loads by itself, by element."""

_KINDS = {
    "feature": "New",
    "removal": "Removed",
    "format": "Stored format",
    "fix": "Fixed",
    "docs": "Documentation",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    for path, content in generated_pages():
        files.append(File.generated(config, path, content=content))
    return files


def generated_pages() -> Iterator[tuple[str, str]]:
    """Yields the path and the text of each page that is made from other files."""
    yield "benchmarks.md", (ROOT / "bench/README.md").read_text().replace("](../docs/", "](")
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        if (ROOT / name).exists():
            yield _PAGES[name], (ROOT / name).read_text().replace("](docs/", "](")
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield f"examples/{path.stem}.md", f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        download = f"[Download {path.name}]({path.name})"
        yield f"examples/{path.stem}.md", _notebook(json.loads(path.read_text()), download)
        yield f"examples/{path.name}", path.read_text()
    yield "decisions/index.md", _decisions()
    yield "changelog.md", _changelog()


def _notebook(notebook: Any, download: str) -> str:
    """The cells, with a link to the file after the first one, which has the title."""
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        cells.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    return "\n\n".join([cells[0], download, *cells[1:]]) + "\n"


def _decisions() -> str:
    lines = [
        f"- [{path.read_text().partition(chr(10))[0].removeprefix('# ')}]({path.name})"
        for path in sorted((ROOT / "docs/decisions").glob("*.md"))
    ]
    head = "# Decisions\n\nWhy things are as they are: one page each, with what was measured.\n\n"
    return head + "\n".join(lines) + "\n"


def _changelog() -> str:
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    folder = ROOT / "docs/changes"
    for path in sorted(folder.glob("*.*.md"), key=_topic):
        text = " ".join(path.read_text().split()).replace("](../", "](")
        found[path.name.split(".")[-2]].append(f"- {text}")
    parts = [
        f"## {title}\n\n" + "\n".join(found[kind]) for kind, title in _KINDS.items() if found[kind]
    ]
    head = "# Changelog\n\nNothing is released yet. The first release will contain:\n\n"
    return head + "\n\n".join(parts) + "\n"


def _topic(fragment: Path) -> str:
    """The words of a fragment's name, by which towncrier sorts."""
    return fragment.name.partition(".")[0].partition("-")[2]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links to files outside ``docs`` to their pages, those to notebooks also to the file."""
    folder = posixpath.dirname(page.file.src_path) or "."

    def replace(match: re.Match[str]) -> str:
        outside = match[1].lstrip("./")
        target = _PAGES.get(outside)
        if found := re.fullmatch(r"examples/(\w+)\.(py|ipynb)", outside):
            target = f"examples/{found[1]}.md"
        if target is None:
            return match[0]
        link = f"]({posixpath.relpath(target, folder)}{match[2] or ''})"
        if found and found[2] == "ipynb":
            return f"]({posixpath.relpath(outside, folder)}), or [read it here{link}"
        return link

    return re.sub(r"\]\(((?:\.\./)+[\w./-]+)(#[\w-]*)?\)", replace, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Links the pages that docstrings name by their path in a checkout.

    Links to notebooks download them: browsers would show their JSON.
    """

    def replace(match: re.Match[str]) -> str:
        if (target := files.get_file_from_path(match[1])) is None:
            return match[0]
        title = escape(target.content_string.partition("\n")[0].removeprefix("# "))
        return f'<a href="{target.url_relative_to(page.file)}">{title}</a>'

    html = re.sub(r'<a (?=href="[^"]*\.ipynb")', "<a download ", html)
    return re.sub(r"<code>docs/([\w./-]+\.md)</code>", replace, html)


class _Page(HTMLParser):
    """Links, loaded URLs and anchors of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if (name := _LOADS.get(tag)) and name in found and found.get("rel") != "canonical":
            self.loads.append(found[name])


def on_post_build(config: Any) -> None:
    """Checks the built pages.

    Raises:
        PluginError: A link leads nowhere, or a browser would load from another host.
    """
    if troubles := [*troubles_of(Path(config["site_dir"]))]:
        raise PluginError("\n".join(["the site is broken:", *troubles]))


def troubles_of(site: Path) -> Iterator[str]:
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for url in page.loads:
            if urlsplit(url).netloc:
                yield f"{name}: loads {url}"
        for url in {*page.links, *page.loads}:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{name}: {url} leads nowhere"
            elif parts.fragment and target in pages:
                known = pages[target].anchors
                if unquote(parts.fragment) not in known and not parts.fragment.startswith("__"):
                    yield f"{name}: {url} has no such anchor"
    for style in sorted(site.rglob("*.css")):
        if re.search(r"@import|url\(['\"]?(?:https?:)?//", style.read_text()):
            yield f"{style.relative_to(site)}: loads from another host"
