# SPDX-License-Identifier: Apache-2.0
"""Names, ranks and lists as text, for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby, islice

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
    """Returns a title and up to 20 lines below it; nothing without lines.

    Names of a parameter in a flat optimizer state share a line.
    """
    if not lines:
        return []
    folded: dict[str, list[str]] = {}
    for line in lines:
        parameter = _FLAT_NAME.match(line)
        folded.setdefault(parameter[1] if parameter else line, []).append(line)
    shown = [_folded(start, own) for start, own in islice(folded.items(), 20)]
    if rest := [line for own in islice(folded.values(), 20, None) for line in own]:
        shown.append(f"    ... and {len(rest)} more")
    return [f"  {title} ({len(lines)}):", *shown]


_FLAT_NAME = re.compile(r"(.+/(?:state|param_groups)\.[^:\s]+\.)[^.:/\s]+$")


def _folded(start: str, lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return f"    {lines[0]}"
    names = [line.removeprefix(start) for line in lines]
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"    {start}* ({', '.join(names[:3])}{rest})"


def is_initial_lr(path: str) -> bool:
    """Whether a path is of the value that a learning-rate scheduler adds to its optimizer."""
    return path.endswith((".initial_lr", "/initial_lr"))
