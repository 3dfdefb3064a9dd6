# SPDX-License-Identifier: Apache-2.0
"""Computes which leaves take the space of a snapshot, over all ranks, for a page with a treemap."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from actorsnap.format.manifest import RankManifest, TensorEntry
from actorsnap.runtime import pages
from actorsnap.runtime.outline import ListedLeaf, describe, leaves_of
from actorsnap.runtime.texts import one_line

_NAME = re.compile(r"[/.][^/.]*")


@dataclass(slots=True)
class _Held:
    """A leaf in all ranks that stored some of it."""

    text: str
    nbytes: int = 0
    num_ranks: int = 0
    last_rank: int = -1


class Treemap:
    """Adds up leaves by path: shards of a tensor, and the private leaves of several ranks."""

    def __init__(self) -> None:
        self._leaves: dict[str, _Held] = {}

    def clear(self) -> None:
        self._leaves = {}

    def add(self, manifest: RankManifest) -> None:
        for leaf in leaves_of(manifest).values():
            if not leaf.counts:
                continue
            text = _text_of(leaf)
            held = self._leaves.setdefault(leaf.entry.path, _Held(text))
            if held.text != text:
                held.text = "several kinds"
            held.nbytes += leaf.nbytes
            held.num_ranks += held.last_rank != manifest.rank
            held.last_rank = manifest.rank

    def page(self, lines: Iterable[str]) -> str:
        """Returns the HTML page.

        Args:
            lines: Above the treemap.
        """
        data = {"lines": [one_line(line) for line in lines], "nodes": list(self._nodes())}
        return pages.fill("treemap.html", data)

    def _nodes(self) -> Iterator[tuple[int, str, int, int, str]]:
        """Yields parent (-1: none), name, bytes, ranks and text; parents first, groups with 0.

        Names begin with their separator: ``/``, or ``.`` within a name as modules have them.
        """
        numbers: dict[str, int] = {}
        for path, held in self._leaves.items():
            parent = -1
            names = _NAME.findall(f"/{path}")
            group = ""
            for name in names[:-1]:
                group += name
                if group not in numbers:
                    numbers[group] = len(numbers)
                    yield parent, one_line(name), 0, 0, ""
                parent = numbers[group]
            numbers[f"{path}/"] = len(numbers)  # no group has this name
            yield parent, one_line(names[-1]), held.nbytes, held.num_ranks, one_line(held.text)


def _text_of(leaf: ListedLeaf) -> str:
    entry = leaf.entry
    if isinstance(entry, TensorEntry) and entry.global_shape is not None:
        return f"{entry.dtype}[{', '.join(map(str, entry.global_shape))}], sharded"
    kind, *_ = describe(leaf)
    return kind
