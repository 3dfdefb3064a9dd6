# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the site as inline SVG while it is built.

``dot`` and ``mermaid`` are formatters of code fences (mkdocs.yml). Graphs and state diagrams are
drawn by graphviz; sequence diagrams are drawn here. Lines and text have the colour of the text
around them, so one picture serves light and dark.
"""

from __future__ import annotations

import html
import re
import subprocess
from typing import Any

from pymdownx.superfences import SuperFencesException

_FONT_SIZE = 13
_ROW = 30


class PictureError(SuperFencesException):  # type: ignore[misc]  # it ships no types
    """A picture cannot be drawn. Superfences only logs other exceptions, and shows the source."""


def dot(source: str, language: str, css_class: str, *_: Any, **__: Any) -> str:
    """Draws a graph in the language of graphviz.

    Raises:
        PictureError: graphviz is not installed, or refuses the source.
    """
    return _framed(_draw(source), css_class)


def mermaid(source: str, language: str, css_class: str, *_: Any, **__: Any) -> str:
    """Draws a state diagram or a sequence diagram.

    Raises:
        PictureError: It is another diagram, or has a line that is not known.
    """
    kind, *lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    match kind:
        case "stateDiagram-v2":
            return _framed(_draw(_states(lines)), css_class)
        case "sequenceDiagram":
            return _framed(_Sequence(lines).svg(), css_class)
    raise PictureError(f"no picture for {kind!r}: only stateDiagram-v2 and sequenceDiagram")


def _framed(svg: str, css_class: str) -> str:
    return f'<div class="{css_class}">{svg}</div>'


def _draw(source: str) -> str:
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"], input=source, capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError as error:
        raise PictureError("graphviz is missing: apt-get install graphviz") from error
    if done.returncode or done.stderr:
        raise PictureError(f"graphviz: {done.stderr}\n{source}")
    svg = done.stdout[done.stdout.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r' font-family="[^"]*"', "", svg)
    # Graphviz omits the colour of text that is black.
    svg = re.sub(r'"(black|#000000)"', '"currentColor"', svg)
    svg = re.sub(
        r'(<polygon fill=")white("[^>]* stroke=")(none|transparent|white)"', r'\1none\2none"', svg
    )
    return svg.replace("\n\n", "\n")


def _states(lines: list[str]) -> str:
    edges = []
    for line in lines:
        found = re.fullmatch(r"(\S+) --> (\S+?)(?: : (.*))?", line)
        if found is None:
            raise PictureError(f"unknown line of a state diagram: {line!r}")
        start, end, label = found.groups()
        a = "begin" if start == "[*]" else start
        b = "end" if end == "[*]" else end
        wrapped = re.sub(r"(.{24,}?),? ", r"\1\\n", label or "")
        edges.append(f'{a} -> {b} [label="  {wrapped}  "]')
    return "\n".join(
        [
            "digraph {",
            'bgcolor="transparent"; rankdir=TB; nodesep=0.6; ranksep=0.5',
            'node [shape=box, style=rounded, fontname="sans-serif", fontsize=13]',
            'edge [fontname="sans-serif", fontsize=11]',
            *(
                f'{name} [shape={shape}, label="", width=0.15, style=filled, fillcolor=black]'
                for name, mark, shape in (
                    ("begin", "[*] -->", "circle"),
                    ("end", "--> [*]", "doublecircle"),
                )
                if any(mark in line for line in lines)
            ),
            *edges,
            "}",
        ]
    )


class _Sequence:
    """A sequence diagram: participants, messages, notes over one of them, optional parts."""

    def __init__(self, lines: list[str]) -> None:
        self._columns: dict[str, int] = {}
        self._titles: list[str] = []
        self._shapes: list[str] = []
        self._y = 3 * _ROW
        self._optional: list[tuple[int, str]] = []
        for line in lines:
            self._add(line)
        if self._optional:
            raise PictureError("an opt of a sequence diagram has no end")

    def _x(self, name: str) -> int:
        return self._column // 2 + 20 + self._columns[name] * self._column

    @property
    def _column(self) -> int:
        """Texts of messages between two parties must fit; there are few of them between four."""
        return 420 if len(self._columns) <= 2 else 230

    def _add(self, line: str) -> None:
        if found := re.fullmatch(r"participant (\w+) as (.*)", line):
            self._columns[found[1]] = len(self._columns)
            self._titles.append(found[2])
        elif found := re.fullmatch(r"(\w+)->>(\w+): (.*)", line):
            self._message(self._x(found[1]), self._x(found[2]), found[3])
        elif found := re.fullmatch(r"Note over (\w+): (.*)", line):
            self._note(self._x(found[1]), found[2])
        elif found := re.fullmatch(r"opt (.*)", line):
            self._optional.append((self._y - _ROW // 2, found[1]))
            self._y += _ROW
        elif line == "end" and self._optional:
            top, title = self._optional.pop()
            self._shapes.append(
                f'<rect x="8" y="{top}" width="{self._width - 16}" height="{self._y - top - 8}"'
                ' rx="6" fill="none" stroke="currentColor" stroke-dasharray="4 4" opacity="0.6"/>'
            )
            self._shapes.append(_text(16, top + 18, f"if {title}", anchor="start", style="italic"))
            self._y += 22
        else:
            raise PictureError(f"unknown line of a sequence diagram: {line!r}")

    @property
    def _width(self) -> int:
        return len(self._columns) * self._column + 40

    def _message(self, start: int, end: int, text: str) -> None:
        sign = 1 if end > start else -1
        self._shapes.append(_text((start + end) // 2, self._y - 6, text))
        self._shapes.append(
            f'<path d="M{start},{self._y} H{end - sign * 7}" stroke="currentColor"/>'
            f'<path d="M{end},{self._y} l{-sign * 9},-4 v8 z" fill="currentColor"/>'
        )
        self._y += _ROW + 6

    def _note(self, x: int, text: str) -> None:
        width = max(len(text) * 7 + 16, 80)
        self._shapes.append(
            f'<rect x="{x - width // 2}" y="{self._y - 20}" width="{width}" height="26" rx="4"'
            ' fill="#7f8fbf33" stroke="currentColor" stroke-width="0.5"/>'
        )
        self._shapes.append(_text(x, self._y - 2, text))
        self._y += _ROW + 4

    def svg(self) -> str:
        width, height = self._width, self._y
        lines = "".join(
            f'<path d="M{self._x(name)},44 V{height - 10}" stroke="currentColor" opacity="0.4"/>'
            f'<rect x="{self._x(name) - 100}" y="14" width="200" height="30" rx="6" fill="none"'
            f' stroke="currentColor"/>{_text(self._x(name), 34, title)}'
            for name, title in zip(self._columns, self._titles, strict=True)
        )
        return (
            f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' xmlns="http://www.w3.org/2000/svg" font-size="{_FONT_SIZE}">'
            f"{lines}{''.join(self._shapes)}</svg>"
        )


def _text(x: int, y: int, text: str, *, anchor: str = "middle", style: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-style="{style}">'
        f"{html.escape(text)}</text>"
    )
