# SPDX-License-Identifier: Apache-2.0
"""HTML pages of one file that makes no request: a template, with data and tables put into it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files

import msgspec


def fill(
    template: str, data: object, tables: Iterable[tuple[str, Sequence[Sequence[str]]]] = ()
) -> str:
    """Returns a page.

    Args:
        template: A file next to this one, with the marks ``/*data*/null`` in its script and
            ``<!--tables-->``.
        data: For JSON.
        tables: Title and rows, the header first.
    """
    text = files(__package__).joinpath(template).read_text("utf-8")
    # "</script" would end the script, even in a string.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    # Tables come last: the escaped data cannot contain their mark.
    filled = text.replace("/*data*/null", encoded)
    return filled.replace("<!--tables-->", "".join(_table(*table) for table in tables))


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "th" if number == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row))
    body = "\n".join(lines)
    return f'<h2>{html.escape(title)}</h2>\n<div class="wide">\n<table>\n{body}\n</table>\n</div>\n'
