# SPDX-License-Identifier: Apache-2.0
"""Changes the paths of an index before it is compared with an app state.

Checkpoints of wrapped models have prefixes (``_orig_mod.``, ``module.``), those of other programs
other top-level keys. Must not know targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.manifest import ContainerEntry, ViewEntry
from actorsnap.planning.index import AnyEntry, Index, ancestors
from actorsnap.wording import did_you_mean

Rename: TypeAlias = Mapping[str, str] | str | Callable[[str], str | None]
"""See ``Snapshot.restore``."""


def function_of(rename: object) -> Callable[[str], str | None]:
    """Returns a rename as a function from a path to the new one, or to None: leave it out.

    Raises:
        UsageError: It is not a rename.
    """
    if isinstance(rename, str) and rename:
        return lambda path: _without_prefix(path, rename)
    if isinstance(rename, Mapping):
        if not all(isinstance(text, str) and old for old, text in rename.items()):
            raise UsageError(f"rename must map path prefixes to others, not {dict(rename)!r:.200}")
        # The longest first.
        prefixes = sorted(rename.items(), key=lambda pair: -len(pair[0]))
        return lambda path: _with_prefix(path, prefixes)
    if callable(rename):
        return rename
    raise UsageError(
        f"rename must be a dict, a prefix or a function of a path, not {type(rename).__name__}"
    )


def _without_prefix(path: str, prefix: str) -> str:
    key, slash, name = path.partition("/")
    return f"{key}{slash}{name.removeprefix(prefix)}"


def _with_prefix(path: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if _is_prefix(old, path):
            rest = path.removeprefix(old)
            if rest.startswith(".") and "/" not in new:
                rest = f"/{rest[1:]}"  # "new" is a key now, and a slash follows a key
            return f"{new}{rest}".removeprefix("/")
    return path


def _is_prefix(old: str, path: str) -> bool:
    """Returns whether ``path`` is ``old``, or goes on after it with another name.

    A dot separates names below a key. In a key, it is a character like any other: ``model`` is no
    prefix of ``model.ema``.
    """
    if not path.startswith(old):
        return False
    after = path[len(old) : len(old) + 1]
    return old[-1] in "/." or after in ("", "/") or (after == "." and "/" in old)


def check_used(rename: Rename | None, paths: Iterable[str]) -> None:
    """Checks that each prefix of a mapping has a path.

    Args:
        paths: Paths of all ranks, before the change.

    Raises:
        UsageError: A prefix has none, so it is misspelled or the snapshot is another one.
    """
    if not isinstance(rename, Mapping):
        return
    known = dict.fromkeys([path.partition("@")[0] for path in paths])
    for old in rename:
        if any(_is_prefix(old, path) for path in known):
            continue
        wanted, names = old.rstrip("/."), _names(known)
        last = wanted.rpartition("/")[2]
        below = [name for name in names if name.endswith(f"/{last}")]
        hint = did_you_mean(wanted, below or names, limit=2, cutoff=0.0 if below else 0.6)
        new = rename[old]
        if any(_is_prefix(new, path) for path in known if new):
            hint = f"a rename goes from the snapshot to the app state: pass rename={ {new: old} }"
        elif not hint:
            keys = sorted({path.partition("/")[0] for path in known})
            hint = f"it has the keys {', '.join(map(repr, keys[:5]))}"
        raise UsageError(f"rename: the snapshot has no path that begins with {old!r}; {hint}")


def _names(paths: Iterable[str]) -> list[str]:
    """Returns paths and what is above them: enough of them to suggest one."""
    found: dict[str, None] = {}
    for path in islice(paths, _MAX_COMPARED):
        found |= dict.fromkeys([*ancestors(path), path])
        key, slash, name = path.partition("/")
        at = name.find(".")
        while slash and at >= 0:
            found[f"{key}/{name[:at]}"] = None
            at = name.find(".", at + 1)
    return list(found)


_MAX_COMPARED = 2000
"""Number of paths that a suggestion is looked for in: comparing takes about 10 us each."""


def paths_of(index: Index) -> list[str]:
    """Returns the paths of an index, and those that only other ranks have."""
    return [*(entry.path for entry in index.entries), *index.held_by_other_ranks]


def origins_of(index: Index, rename: Rename) -> dict[str, str]:
    """Returns the stored path of each new one that differs."""
    change = function_of(rename)
    pairs = [(change(path), path) for path in paths_of(index)]
    return {new: path for new, path in pairs if new and new != path}


def renamed(index: Index, rename: Rename) -> Index:
    """Returns an index with other paths.

    Raises:
        UsageError: Two leaves would have one path; a leaf has none; or a view would lose its base.
    """
    change = function_of(rename)
    known: dict[str, str | None] = {}

    def path_of(path: str) -> str | None:
        base, at, part = path.partition("@")
        if base not in known:
            new = change(base)
            if new is not None and not isinstance(new, str):
                raise UsageError(f"rename returned {new!r:.80} for {base!r}, not a str or None")
            known[base] = new
        new = known[base]
        return new and f"{new}{at}{part}"

    containers: dict[str, ContainerEntry] = {}
    leaves: dict[str, AnyEntry] = {}
    origins: dict[str, str] = {}
    order: list[str] = []
    for entry in index.entries:
        new = path_of(entry.path)
        if isinstance(entry, ContainerEntry):
            if new and new not in containers:
                containers[new] = msgspec.structs.replace(entry, path=new)
                order.append(new)
            continue
        if new is None:
            continue
        if not new:
            raise UsageError(f"rename of {entry.path!r}: it would have no path")
        if new in leaves:
            raise UsageError(
                f"rename of {entry.path!r}: {new!r} would be two leaves, because "
                f"{origins[new]!r} has that path, too. Rename one of them to another path; a "
                "function leaves one out if it returns None for it"
            )
        if isinstance(entry, ViewEntry):
            base = path_of(entry.of)
            if not base:
                raise UsageError(
                    f"rename leaves out {entry.of!r}, whose memory {entry.path!r} shares"
                )
            entry = msgspec.structs.replace(entry, of=base)
        origins[new] = entry.path
        leaves[new] = msgspec.structs.replace(entry, path=new)
        order.append(new)
    private = [(path_of(path), ranks) for path, ranks in index.held_by_other_ranks.items()]
    classes = [(path_of(path), name) for path, name in index.optimizers.items()]
    return msgspec.structs.replace(
        index,
        entries=tuple(_in_order(order, containers, leaves)),
        held_by_other_ranks={path: ranks for path, ranks in private if path},
        optimizers={path: name for path, name in classes if path},
    )


def _in_order(
    order: Sequence[str],
    containers: Mapping[str, ContainerEntry],
    leaves: Mapping[str, AnyEntry],
) -> list[AnyEntry]:
    """Returns entries so that containers precede their children."""
    done: set[str] = set()
    entries: list[AnyEntry] = []
    for path in order:
        for above in reversed([path, *ancestors(path)]):
            if above in containers and above not in done:
                done.add(above)
                entries.append(containers[above])
        if path in leaves:
            entries.append(leaves[path])
    return entries
