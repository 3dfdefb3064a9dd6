# SPDX-License-Identifier: Apache-2.0
"""Counts, sizes and ages as text, and text that cannot steer a terminal."""

from __future__ import annotations

import html
import re

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Escapes terminal control characters except line ends."""
    return _STEERING.sub(lambda m: m[0] if m[0] == "\n" else ascii(m[0])[1:-1], text)


def one_line(text: str) -> str:
    return visible(text).replace("\n", "\\n")


def preformatted(text: str) -> str:
    """Returns HTML for a notebook."""
    return f"<pre>{html.escape(visible(text))}</pre>"


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
