# SPDX-License-Identifier: Apache-2.0
"""Suggests arguments of a restore whose app state has leaves that the snapshot lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from actorsnap.planning.index import AnyEntry, Elsewhere
from actorsnap.planning.renaming import Rename
from actorsnap.state.optim import ModelState
from actorsnap.state.restore.match import Match
from actorsnap.state.stateful import Stateful
from actorsnap.state.tree import escape
from actorsnap.wording import did_you_mean, is_initial_lr

_MAX_COMPARED = 2000
"""Number of leaves that a suggestion is looked for in."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one restore.

    Args:
        entries: Of the snapshot, by key.
        states: Of the app state, in load order.
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

    def of_absent(self, key: str) -> str:
        """Returns the keys that the snapshot has instead, and how to restore from one."""
        others = sorted(self.entries.keys() - self.states.keys())
        text = f"the snapshot has no key {key!r}"
        pairs = self.rename.items() if isinstance(self.rename, Mapping) else ()
        for old, new in pairs:
            if new.startswith(f"{escape(key)}."):
                right = f"{escape(key)}/{new[len(escape(key)) + 1 :]}"
                return f"{text}; a slash follows a key: write { {old: right} } in rename="
        if names := {} if pairs else self._names_of_model_states(key, others):
            return f"{text}; if its parts are {' and '.join(map(repr, names))}, pass rename={names}"
        alike = self._with_names_of(key, others) or others
        near = (
            get_close_matches(key, alike, n=1)
            or [other for other in alike if key in other or (len(other) > 2 and other in key)]
            or (alike if alike is not others else [])
        )[:1]
        shown = near + [each for each in others or sorted(self.entries) if each not in near]
        has = f"it has {', '.join(map(repr, shown[:5])) or 'none'}{', ...' if shown[5:] else ''}"
        if near:
            hint = did_you_mean(key, near) or f"{has}."
            origin = next((old for old, new in pairs if new == escape(near[0])), escape(near[0]))
            return (
                f"{text}; {hint} To restore from another key, pass "
                f"rename={ {origin: escape(key)} } to Snapshot.restore"
            )
        found = [each for each in self.app_state if each in self.entries]
        absent = [each for each in self.app_state if each not in self.entries]
        if len(absent) > 1:
            text = f"the snapshot has no keys {', '.join(map(repr, absent))}"
        if not found or (others and len(found) < len(absent)):
            return f"{text}; {has}"
        them = "them as they are" if len(absent) > 1 else "it as it is"
        return f"{text}; {has}. To leave {them}, pass keys={found} to Snapshot.restore"

    def _names_of_model_states(self, key: str, others: Sequence[str]) -> dict[str, str]:
        """Returns a rename if either the snapshot or the app state has a ``ModelState``."""
        stateful = self.app_state[key]
        if isinstance(stateful, ModelState) and "model" in others:
            parts = {"model": "model", "optimizer": "optim", "optim": "optim"}
            return {old: f"{escape(key)}/{new}" for old, new in parts.items() if old in others}
        if isinstance(stateful, torch.nn.Module):
            for other in others:
                if _is_of_model_state(other, self.entries[other]):
                    return {f"{escape(other)}/model": escape(key)}
        return {}

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

    def _with_names_of(self, key: str, others: Iterable[str]) -> list[str]:
        """Returns the keys whose state has the names that the state of ``key`` has."""
        names = {escape(name) for name in self.states[key] or ()}

        def has_them(other: str) -> bool:
            below = len(escape(other)) + 1
            paths = [entry.path[below:] for entry in self.entries[other]]
            return names <= {path.partition("/")[0].partition("@")[0] for path in paths}

        return [other for other in others if has_them(other)] if names else []

    def _explain_model_state(self, key: str) -> str:
        is_module = isinstance(self.app_state[key], torch.nn.Module)
        if not is_module or not _is_of_model_state(key, self.entries[key]):
            return ""
        return f"a ModelState saved {key!r}: pass ModelState(model) instead of the model"

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
