"""How the command line prints: escaped lines, columns, JSON, sizes and ages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = [
    "age_text",
    "count_of",
    "one_line",
    "print_columns",
    "print_json",
    "size_text",
    "visible",
    "write_lines",
]

_MAX_ALIGNED = 60
"""Widest cell that moves the next column, in characters."""

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns ``text`` with terminal control characters escaped; line ends stay."""
    return _STEERING.sub(lambda m: m[0] if m[0] == "\n" else ascii(m[0])[1:-1], text)


def one_line(text: str) -> str:
    return visible(text).replace("\n", "\\n")


def write_lines(lines: Iterable[str]) -> None:
    """Prints lines in batches: a manifest may have a million of them."""
    lines = iter(lines)
    while batch := list(islice(lines, 10_000)):
        sys.stdout.write("".join([f"{one_line(line)}\n" for line in batch]))


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Prints cells aligned on a terminal, with tabs between them in a pipe.

    Does not use ``rich.table``, which cuts paths at the terminal's width: see decision 0001.
    """
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(map(one_line, row)) + "\n" for row in rows)
        return
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [0] * max(map(len, cells), default=0)
    for row in cells:
        for number, cell in enumerate(row[:-1]):
            if len(cell) <= _MAX_ALIGNED:
                widths[number] = max(widths[number], len(cell))
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        sys.stdout.write(line.rstrip() + "\n")


def print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def count_of(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def size_text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def age_text(seconds: float) -> str:
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
