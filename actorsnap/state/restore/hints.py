# SPDX-License-Identifier: Apache-2.0
"""Suggests arguments of a restore whose app state has leaves that the snapshot lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from actorsnap.planning.index import AnyEntry, Elsewhere, ancestors
from actorsnap.planning.renaming import Rename
from actorsnap.state.optim import ModelState
from actorsnap.state.restore.match import Match
from actorsnap.state.stateful import Stateful
from actorsnap.state.tree import escape
from actorsnap.wording import did_you_mean, is_initial_lr

_OPTIMIZER = ("state", "param_groups")
"""Names in the state of an optimizer."""

_MAX_COMPARED = 2000
"""Number of leaves that a suggestion is looked for in."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one restore.

    Args:
        entries: Entries of the snapshot, by key.
        states: States of the app state, in load order.
        rename: What changed the paths of ``entries``.
    """

    entries: Mapping[str, Sequence[AnyEntry]]
    app_state: Mapping[str, Stateful]
    states: Mapping[str, Any]
    rename: Rename | None

    def of_missing(self, key: str, match: Match) -> list[str]:
        """Returns hints for a key some of whose leaves the snapshot lacks."""
        hint = (
            self._explain_model_state(key)
            or _explain_prefix(escape(key), match)
            or self._explain_layers(key, match)
            or self._explain_typo(key, match)
        )
        return [each for each in (hint, self._explain_initial_lr(key, match)) if each]

    def of_absent(self, absent: Sequence[str]) -> str:
        """Returns the keys that the snapshot has instead of ``absent``, and a rename from them."""
        shown = ", ".join(map(repr, absent))
        text = f"the snapshot has no {'key' if len(absent) == 1 else 'keys'} {shown}"
        for old, new in self._merged({}).items():
            key, dot, rest = new.partition(".")
            if dot and key in map(escape, absent):
                right = self._merged({}) | {old: f"{key}/{rest}"}
                return f"{text}; a slash follows a key: write {right} in rename="
        origins: dict[str, str] = {}
        for key in absent:
            origins |= self._origins_of(key, origins)
        others = self._others
        near = [each for each in others if escape(each) in origins]
        listed = near + [each for each in others or sorted(self.entries) if each not in near]
        more = ", ..." if listed[5:] else ""
        has = f"it has {', '.join(map(repr, listed[:5])) or 'none'}{more}"
        if origins:
            hint = did_you_mean(absent[0], near) if len(absent) == 1 else ""
            has_others = "key has another name" if len(absent) == 1 else "keys have other names"
            return (
                f"{text}; {hint or f'{has}.'} If the {has_others} there, pass "
                f"rename={self._merged(origins)} to Snapshot.restore"
            )
        found = [each for each in self.app_state if each in self.entries]
        if not found or (others and len(found) < len(absent)):
            return f"{text}; {has}"
        them = "them as they are" if len(absent) > 1 else "it as it is"
        return f"{text}; {has}. To leave {them}, pass keys={found} to Snapshot.restore"

    def _origins_of(self, key: str, used: Collection[str]) -> dict[str, str]:
        """Returns a rename to a key, or to the parts of a ``ModelState``, as far as it is likely.

        Args:
            used: What other keys are renamed from.
        """
        state = self.states[key]
        origin = self._origin_of(key, state, used, by_name=not self._is_model_state(key))
        if origin or not self._is_model_state(key):
            return _pair(origin, escape(key)) if origin else {}
        found: dict[str, str] = {}
        for part, names in (("model", state["model"]), ("optim", _OPTIMIZER)):
            if part in state and (origin := self._origin_of(part, names, {*used, *found})):
                found |= _pair(origin, f"{escape(key)}/{part}")
        return found

    def _origin_of(
        self, key: str, names: Iterable[Any] | None, used: Collection[str], *, by_name: bool = True
    ) -> str:
        """Returns a path of the snapshot that has all ``names`` below it, or a similar name."""
        others = [escape(each) for each in self._others if escape(each) not in used]
        entries = [entry for each in self._others for entry in self.entries[each]]
        places = _places_of([*map(escape, names or ())], entries)
        places = [place for place in places if place not in used]
        tops = [place for place in places if place in others]
        if not tops and places:
            named = [p for p in places if p.rstrip(".").replace(".", "/").endswith(f"/{key}")]
            (origin, *rest) = named or places
            return "" if rest else origin
        alike = tops or (others if by_name else [])
        near = (
            get_close_matches(key, alike, n=1)
            or [other for other in alike if key in other or (len(other) > 2 and other in key)]
            or tops
        )
        return near[0] if near else ""

    @property
    def _others(self) -> list[str]:
        """The keys that only the snapshot has."""
        return sorted(self.entries.keys() - self.states.keys())

    def _is_model_state(self, key: str) -> bool:
        return isinstance(self.app_state[key], ModelState)

    def _explain_layers(self, key: str, match: Match) -> str:
        """Returns the whole rename of layers whose names differ; else an empty text.

        A ``ModelState`` has the names of layers in its optimizer state, too.
        """
        missing = [path for path in match.missing if match.rules.is_strict(path)]
        if isinstance(self.rename, Mapping):
            pairs = dict(self.rename)
        elif self.rename is None:
            listed = {*match.unexpected, *match.unplaced}
            pairs = _renamed_layers(self.entries[key], match.targets, missing, listed)
        else:
            return ""
        for old, new in [*pairs.items()] if isinstance(self.app_state[key], ModelState) else []:
            for section in ("state", "param_groups"):
                renamed = new.replace("/model/", f"/optim/{section}.", 1)
                below = f"{renamed.rstrip('.')}."
                if renamed != new and any(path.startswith(below) for path in match.missing):
                    pairs.setdefault(old.replace("/model/", f"/optim/{section}.", 1), renamed)
        if pairs == (self.rename or {}):
            return ""
        return f"if layers have other names, pass rename={pairs} to Snapshot.restore"

    def _explain_typo(self, key: str, match: Match) -> str:
        """Returns similar names in the snapshot of the first missing leaves; else an empty text.

        Unexpected leaves are listed anyway.
        """
        listed = {*match.unexpected, *match.unplaced}
        free = [
            entry.path
            for entry in self.entries[key][:_MAX_COMPARED]
            if entry.path not in listed and not match.has_target(entry.path)
        ]
        hints: list[str] = []
        for path in match.missing[:3]:
            # Of a flat name, such as "param_groups.weight.lr", too: else all would be similar.
            parent = path[: max(path.rfind("/"), path.rfind(".")) + 1]
            rests = [other.removeprefix(parent) for other in free if other.startswith(parent)]
            names = [rest for rest in rests if not {"/", "."} & {*rest}]
            if hint := did_you_mean(path.removeprefix(parent), names, prefix=parent):
                hints.append(f"the snapshot has no {path!r}; {hint}")
        return " ".join(hints)

    def _explain_model_state(self, key: str) -> str:
        """Returns a hint if only one of the app state and the snapshot has a ``ModelState``."""
        root, stateful = escape(key), self.app_state[key]
        if isinstance(stateful, torch.nn.Module) and _is_of_model_state(key, self.entries[key]):
            return f"a ModelState saved {key!r}: pass ModelState(model) instead of the model"
        state = self.states[key] if self._is_model_state(key) else {}
        if root not in _places_of([*map(escape, state.get("model", ()))], self.entries[key]):
            return ""
        pairs = {root: f"{root}/model"}
        if "optim" in state and (origin := self._origin_of("optim", _OPTIMIZER, ())):
            pairs |= _pair(origin, f"{root}/optim")
        return (
            f"{key!r} is a plain model in the snapshot, and a ModelState in the app state: pass "
            f"rename={self._merged(pairs)} to Snapshot.restore"
        )

    def _merged(self, pairs: Mapping[str, str]) -> dict[str, str]:
        """Returns the user's rename with other pairs, whose origins it may have changed."""
        own = dict(self.rename) if isinstance(self.rename, Mapping) else {}
        return own | {_before(origin, own): new for origin, new in pairs.items()}

    def _explain_initial_lr(self, key: str, match: Match) -> str:
        """Empty, too, if the snapshot has others: then names differ."""
        is_one = isinstance(self.app_state[key], ModelState)
        if not is_one or any(is_initial_lr(entry.path) for entry in self.entries[key]):
            return ""
        if not any(is_initial_lr(path) for path in match.missing):
            return ""
        return (
            f"a learning-rate scheduler, new since the save, has added initial_lr to the optimizer "
            f"of {escape(key)!r}: restore before you make the scheduler, or pass strict=False once"
        )


def _places_of(names: Sequence[str], entries: Iterable[AnyEntry]) -> list[str]:
    """Returns the paths below which all names are; with the dot, if one separates them."""
    leaves = [entry.path.partition("@")[0] for entry in entries]
    paths = {each: None for path in leaves for each in (path, *ancestors(path))}
    found: list[str] = []
    for path in paths if names else ():
        for separator in "/.":
            place = path.removesuffix(f"{separator}{names[0]}")
            if place == path or (separator == "." and "/" not in place):
                continue
            if all(f"{place}{separator}{name}" in paths for name in names):
                found.append(place if separator == "/" else f"{place}.")
    return found


def _pair(origin: str, new: str) -> dict[str, str]:
    if origin.endswith(".") and "/" in new:
        return {origin: f"{new}/"}
    return {origin.rstrip("."): new}


def _before(path: str, pairs: Mapping[str, str]) -> str:
    """Returns the name in the snapshot of a path that a rename may have changed."""
    for old, new in pairs.items():
        if path == new or path.startswith(f"{new}/"):
            return f"{old}{path.removeprefix(new)}"
    return path


def _explain_prefix(root: str, match: Match) -> str:
    """Returns a rename for names that differ by a prefix of torch's wrappers or by a separator.

    Empty: they differ in another way.
    """
    missing = {*match.missing}
    saved = {*match.unexpected, *match.unplaced}
    for prefix in ("module.", "_orig_mod."):
        below = f"{root}/{prefix}"
        for longer, shorter, rename in (
            (saved, missing, f'"{prefix}"'),
            (missing, saved, str({f"{root}/": below})),
        ):
            names = [path.removeprefix(below) for path in longer if path.startswith(below)]
            if any(f"{root}/{name}" in shorter for name in names):
                where = "in the snapshot" if longer is saved else "in the app state"
                return (
                    f"the names of {root!r} begin with {prefix!r} only {where}: pass "
                    f"rename={rename} to Snapshot.restore"
                )
    for path in match.missing:
        key, _, name = path.partition("/")
        layers = name.split(".")
        for number in range(1, len(layers)):
            layer = f"{key}/{'.'.join(layers[:number])}"
            if f"{layer}/{'.'.join(layers[number:])}" in saved:
                return (
                    f"a rename moved a key to {layer!r}, but a dot follows the name of a layer: "
                    f'pass both with what follows them, rename={{"KEY/": "{layer}."}}'
                )
    return ""


def _renamed_layers(
    entries: Sequence[AnyEntry],
    targets: Mapping[str, Any],
    missing: Sequence[str],
    unexpected: Collection[str],
) -> dict[str, str]:
    """Returns paths of layers in the snapshot, with those of the same layers in the app state.

    The leaves of both have the same names and shapes, and no other layer's have.
    """
    if not missing or not unexpected or max(len(missing), len(unexpected)) > _MAX_COMPARED:
        return {}
    shapes = {e.path: tuple(getattr(e, "shape", ())) for e in entries if e.path in unexpected}
    if any(isinstance(entry, Elsewhere) for entry in entries if entry.path in unexpected):
        shapes = {}  # unknown: names must do
    else:
        shapes |= {path: tuple(getattr(targets[path], "shape", ())) for path in missing}
    fixed = {layer for e in entries if e.path not in unexpected for layer, _ in _layers(e.path)}
    olds, news = _by_leaves(unexpected, shapes, fixed), _by_leaves(missing, shapes, fixed)
    pairs: dict[str, str] = {}
    for leaves, layers in news.items():
        if len(layers) == len(olds.get(leaves, ())) == 1:
            pairs[olds[leaves][0]] = layers[0]
    above = {*pairs}
    return {o: n for o, n in pairs.items() if not above & {layer for layer, _ in _layers(o)}}


def _by_leaves(
    paths: Iterable[str], shapes: Mapping[str, Sequence[int]], fixed: Collection[str]
) -> dict[frozenset[Any], list[str]]:
    """Returns the layers with these leaves and no others, by names and shapes of the leaves."""
    leaves: dict[str, list[Any]] = {}
    for path in paths:
        for layer, rest in _layers(path):
            if layer not in fixed:
                leaves.setdefault(layer, []).append((rest, shapes.get(path)))
    layers: dict[frozenset[Any], list[str]] = {}
    for layer, names in leaves.items():
        layers.setdefault(frozenset(names), []).append(layer)
    return layers


def _layers(path: str) -> list[tuple[str, str]]:
    """Returns each layer that has the leaf, outermost first, and the leaf's name below it."""
    dots = [at for at, character in enumerate(path) if character == "." and "/" in path[:at]]
    return [(path[:at], path[at + 1 :]) for at in dots]


def _is_of_model_state(key: str, entries: Sequence[AnyEntry]) -> bool:
    """Whether the names below are those of a ``ModelState``; a module's have no slash."""
    below = f"{escape(key)}/"
    names = {e.path.removeprefix(below).split("/")[0] for e in entries if e.path != escape(key)}
    return "model" in names and names <= {"model", "optim"}
