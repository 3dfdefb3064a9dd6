# SPDX-License-Identifier: Apache-2.0
"""Finds the leaves that an export writes: below a key, under new names, of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from actorsnap.errors import UsageError
from actorsnap.planning.index import Index, Wants, ancestors
from actorsnap.planning.renaming import Rename, check_used, function_of, paths_of, renamed
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource
from actorsnap.state.tree import human, parent_of
from actorsnap.wording import named_ranks


def below(path: str, key: str) -> str | None:
    """Returns the part of a path below a key: empty at the key itself, None elsewhere.

    Args:
        key: Of the app state, or a path below one; as in the manifest, or as typed. Below a key,
            also the first part of names (``model/encoder``).
    """
    path = parent_of(path)
    if path == key or path.startswith(f"{key}/") or is_in_layer(path, key):
        return path[len(key) + 1 :]
    if "%" not in path:
        return None
    tokens = path.split("/")
    for count in range(1, len(tokens) + 1):
        if human("/".join(tokens[:count])) == key:
            return "/".join(tokens[count:])
    return None


def is_in_layer(path: str, key: str) -> bool:
    """Whether a path goes on after a key with a dot, below a top-level key."""
    return "/" in key and path.startswith(f"{key}.")


async def readable(
    opened: OpenSource, rename: Rename | None, names: Callable[[str], bool]
) -> list[tuple[Index, frozenset[str] | None]]:
    """Returns rank 0's view, and those of other ranks that alone have some of the leaves.

    Args:
        names: Whether a leaf is wanted, by its path after ``rename``.

    Returns:
        Indexes after ``rename``, and the paths to take of them; None: all.

    Raises:
        UsageError: Several ranks have different leaves under one path, and rank 0 has none. Or
            ``rename`` does not fit the paths.
    """
    change = (lambda path: path) if rename is None else function_of(rename)
    seen: set[str] = set()

    def wants(path: str) -> bool:
        if rename is not None:
            seen.add(path)
        new = change(path.partition("@")[0])
        return bool(new) and names(str(new))

    indexes = await _views(opened, wants)
    if rename is None:
        return indexes
    check_used(rename, chain(seen, *[paths_of(index) for index, _ in indexes]))
    return [
        (
            renamed(index, rename),
            paths and frozenset([new for path in paths if (new := change(path))]),
        )
        for index, paths in indexes
    ]


async def _views(
    opened: OpenSource, names: Callable[[str], bool]
) -> list[tuple[Index, frozenset[str] | None]]:
    async def view(rank: int, wants: Wants) -> Index:
        begun = await opened.source.begin_index(opened, rank, num_ranks=1)
        if isinstance(begun, Index):
            return begun
        run_blocking = opened.errands.run_blocking
        return await begun.complete(opened.reader, run_blocking, wants, at_once=MAX_SMALL_READS)

    first = await view(0, Wants(names, {}))
    found: list[tuple[Index, frozenset[str] | None]] = [(first, None)]
    elsewhere: dict[int, set[str]] = {}
    for path, ranks in first.held_by_other_ranks.items():
        if not names(path):
            continue
        if len(ranks) > 1:
            raise UsageError(
                f"{named_ranks(ranks)} each saved their own {path!r}, and an export has "
                "room for one value. Leave it out with rename=, or export another key"
            )
        elsewhere.setdefault(ranks[0], set()).add(path)
    for rank, paths in sorted(elsewhere.items()):
        above = {parent for path in paths for parent in ancestors(path)}
        wanted = frozenset(paths | above)
        index = await view(rank, Wants(wanted.__contains__, {}))
        found.append((index, wanted))
    return found
