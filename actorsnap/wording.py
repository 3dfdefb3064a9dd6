# SPDX-License-Identifier: Apache-2.0
"""Names, ranks and lists as text, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby

_MAX_SHOWN_RANKS = 8
"""Limit of the numbers and ranges of ranks in a text."""


def printable(text: str) -> str:
    """Makes ``text`` encodable as UTF-8: paths may contain bytes, keys may contain surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def did_you_mean(
    name: object, known: Iterable[str], *, limit: int = 1, cutoff: float = 0.6, prefix: str = ""
) -> str:
    """Returns a question that suggests names in ``known`` similar to ``name``.

    Args:
        limit: Largest number of names to suggest.
        cutoff: Least similarity, from 0 to 1.
        prefix: Text in front of each name.

    Returns:
        For example ``"did you mean 'compression'?"``; empty if no name is similar.
    """
    near = get_close_matches(str(name), list(known), n=limit, cutoff=cutoff)
    return f"did you mean {joined([repr(prefix + other) for other in near], 'or')}?" if near else ""


def joined(names: Sequence[str], word: str = "and") -> str:
    """Returns names as text, such as ``a, b and c``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {word} {names[-1]}"


def named_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks as text, such as ``ranks 0, 2 and 4 to 7``."""
    ordered = sorted(ranks)
    shown: list[str] = []
    for _, run in groupby(enumerate(ordered), lambda place: place[1] - place[0]):
        numbers = [rank for _, rank in run]
        is_range = len(numbers) > 2
        shown += [f"{numbers[0]} to {numbers[-1]}"] if is_range else map(str, numbers)
    if len(shown) > _MAX_SHOWN_RANKS:
        shown[_MAX_SHOWN_RANKS:] = ["others"]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {joined(shown)}"


def format_list(title: str, lines: Sequence[str]) -> list[str]:
    """Returns a title and up to 20 lines below it; nothing without lines."""
    if not lines:
        return []
    shown = [f"    {line}" for line in lines[:20]]
    if len(lines) > 20:
        shown.append(f"    ... and {len(lines) - 20} more")
    return [f"  {title} ({len(lines)}):", *shown]
