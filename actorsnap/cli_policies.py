# SPDX-License-Identifier: Apache-2.0
"""Parses ``--keep`` policies: ``last:3``, ``best:loss:min``, ``newer_than:2d``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Literal

from actorsnap.errors import UsageError
from actorsnap.planning.keeping import KeepAnyOf, KeepPolicy, keep

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_time(text: str) -> timedelta:
    """Returns ``2d``, ``1.5h``, ``10min`` or ``30s`` as a time.

    Raises:
        ValueError: The text is none of these, or the time is too long.
    """
    found = re.fullmatch(r"([0-9.]+)(s|min|h|d)", text)
    if found is None:
        raise ValueError(text)
    try:
        return timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
    except OverflowError as error:
        raise ValueError(text) from error


def parse_policies(texts: Iterable[str]) -> KeepPolicy:
    """Returns a policy that keeps the steps that any of the texts keeps.

    Raises:
        UsageError: A text is not a policy.
    """
    policies = [_parse_policy(text) for text in texts]
    return policies[0] if len(policies) == 1 else KeepAnyOf(tuple(policies))


def _parse_policy(text: str) -> KeepPolicy:
    kind, _, arguments = text.partition(":")
    parse = _PARSERS.get(kind)
    if parse is None:
        kind = re.split("[=(]", kind)[0]
        if kind in _EXAMPLES:
            raise UsageError(f"--keep {text}: write {_EXAMPLES[kind]}")
        raise UsageError(f"--keep {text}: no such policy; there are {', '.join(_PARSERS)}")
    try:
        return parse(arguments)
    except ValueError as error:
        advice = f"write {_EXAMPLES[kind]}"
        if "of at least 1" in str(error):
            advice = f"the number must be at least 1, as in {_EXAMPLES[kind]}"
        elif "of more than 0" in str(error):
            advice = f"the time must be more than 0, as in {_EXAMPLES[kind]}"
        raise UsageError(f"--keep {text}: {advice}") from error


def _parse_all(arguments: str) -> KeepPolicy:
    if arguments:
        raise ValueError(arguments)
    return keep.all()


def _parse_best(arguments: str) -> KeepPolicy:
    found = re.fullmatch(r"(.+):(min|max)(?::([0-9]+))?", arguments)
    if found is None:
        raise ValueError(arguments)
    mode: Literal["min", "max"] = "min" if found[2] == "min" else "max"
    return keep.best(found[1], mode, n=int(found[3] or 1))


def _parse_newer_than(arguments: str) -> KeepPolicy:
    return keep.newer_than(parse_time(arguments))


def _parse_thinned(arguments: str) -> KeepPolicy:
    numbers: dict[str, int] = {}
    for part in arguments.split(","):
        period, _, number = part.partition("=")
        if period not in ("hourly", "daily", "weekly", "monthly", "yearly"):
            raise ValueError(period)
        numbers[period] = int(number)
    return keep.thinned(**numbers)


_PARSERS: Mapping[str, Callable[[str], KeepPolicy]] = {
    "all": _parse_all,
    "last": lambda text: keep.last(int(text)),
    "best": _parse_best,
    "every": lambda text: keep.every(steps=int(text)),
    "at": lambda text: keep.at([int(step) for step in text.split(",")]),
    "newer_than": _parse_newer_than,
    "thinned": _parse_thinned,
}
_EXAMPLES = {
    "all": "all",
    "last": "last:3",
    "best": "best:loss:min or best:accuracy:max:2",
    "every": "every:1000",
    "at": "at:500,1000",
    "newer_than": "newer_than:2d (or s, min, h)",
    "thinned": "thinned:hourly=24,daily=7",
}
