# SPDX-License-Identifier: Apache-2.0
"""Compares an app state with a snapshot, without reading data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.options import Options
from actorsnap.planning.index import AnyEntry, Index, ShardedEntry, Wants
from actorsnap.planning.renaming import Rename
from actorsnap.planning.shared_reads import ReadInterest
from actorsnap.protocol.restore import Comparison
from actorsnap.runtime.location import AppState
from actorsnap.runtime.optimizer_comparison import (
    named_parameters_of,
    other_optimizers,
    parameters_of,
    parameters_with_state,
    reshaped_parameters,
    unprimed_optimizer,
    with_numbered_states,
)
from actorsnap.state.distributed import Describer, Sharding, is_distributed
from actorsnap.state.objects import Refused, decode_inline
from actorsnap.state.records import Rebuild
from actorsnap.state.restore.aliasing import find_conflicts
from actorsnap.state.restore.build import KeyRestore, prepare
from actorsnap.state.restore.hints import Hints
from actorsnap.state.restore.match import Interest, entries_by_key
from actorsnap.state.stateful import (
    Matching,
    RNGState,
    Stateful,
    adapts,
    can_assign,
    loads_dicts_only,
    matching_of,
)
from actorsnap.state.tree import DICT_TYPES, escape, join
from actorsnap.wording import named_ranks


@dataclass(slots=True)
class Compared:
    """The result of a comparison.

    Attributes:
        parts: The restorable part of each key, in load order.
        adapting: The comparison of each module that adapts the loaded state itself.
        missing, unexpected, mismatched, kept: See ``RestoreReport``.
        hints: See ``IncompatibleState``.
        keys: Keys of the snapshot.
        without_optim: Keys of each ``ModelState`` whose optimizers keep their values.
        unplaced: Paths without a place here, by escaped key. Other ranks may have one (pipeline
            stages).
    """

    parts: dict[str, KeyRestore] = field(default_factory=dict)
    adapting: dict[str, KeyRestore] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unplaced: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    without_optim: list[str] = field(default_factory=list)

    keys: tuple[str, ...] = ()

    @property
    def num_restored(self) -> int:
        """Number of leaves that the snapshot gives."""
        return sum([part.match.num_restored for part in self.parts.values()])

    @property
    def written_in_place(self) -> list[str]:
        """Escaped keys with tensors or arrays that take the bytes as they are read."""
        return [escape(key) for key, part in self.parts.items() if part.memory.destinations]

    def build(self) -> dict[str, Any]:
        states = {key: part.build() for key, part in self.parts.items()}
        for key in self.without_optim:
            if key in states:
                states[key].pop("optim", None)
        return states

    @property
    def has_unexpected(self) -> bool:
        return bool(self.unexpected) or any(self.unplaced.values())

    def name_as_stored(self, origins: Mapping[str, str]) -> None:
        """Names unexpected leaves as the snapshot does.

        Args:
            origins: Stored paths by those that a rename made of them.
        """
        unexpected = [*self.unexpected, *[p for paths in self.unplaced.values() for p in paths]]
        for path in unexpected:
            if path in origins:
                self.hints.append(
                    f"rename= turns {origins[path]!r} into {path!r}, which has no place in the app "
                    "state"
                )
                break
        self.unexpected = [origins.get(path, path) for path in self.unexpected]
        self.unplaced = {
            key: tuple([origins.get(path, path) for path in paths])
            for key, paths in self.unplaced.items()
        }

    def message(self, interest: ReadInterest) -> Comparison:
        return Comparison(
            interest,
            tuple(self.missing),
            tuple(self.unexpected),
            tuple(self.mismatched),
            self.unplaced,
            tuple(self.hints),
        )


def wanted_of(app_state: AppState, states: Mapping[str, Any]) -> Wants:
    """Returns what a comparison may want of a snapshot.

    Of a distributed tensor without elements on this rank that is nothing. Ranks that have some
    compare its dtype and shape.
    """
    interests: dict[str, Interest] = {}
    unheld: set[str] = set()
    boxes: dict[str, tuple[Box, ...]] = {}
    describer = Describer()
    for key, state in states.items():
        stateful, root = app_state[key], escape(key)
        # A module that adapts may get a state of its own.
        target = None if adapts(stateful) else state
        interests[root] = interest = Interest(root, target, matching_of(stateful))
        for path, value in interest.targets.items():
            if is_distributed(value):
                sharding = describer.describe(value)
                pieces = sharding.pieces if isinstance(sharding, Sharding) else ()
                held = [piece.box for piece in pieces if not piece.box.is_empty]
                if held or not isinstance(sharding, Sharding) or not value.numel() or value.is_meta:
                    boxes[path] = tuple([piece.box for piece in pieces])
                else:
                    unheld.add(path)

    def names(path: str) -> bool:
        if path in unheld:
            return False
        interest = interests.get(path.partition("/")[0].partition("@")[0])
        return interest is not None and interest.wants(path)

    return Wants(cache(names), boxes)


def compare(
    index: Index,
    app_state: AppState,
    states: Mapping[str, Any],
    *,
    rank: int,
    options: Options,
    casts: bool = False,
    rename: Rename | None = None,
) -> Compared:
    """Compares an app state with a snapshot.

    Args:
        index: As seen by ``rank``.
        states: In load order.
        casts: See ``match_key``.
        rename: What changed the paths of ``index``, for hints.

    Raises:
        UsageError, FormatError, MemoryError: See ``prepare``.
    """
    index = with_numbered_states(index, app_state)
    comparer = _Comparer(index, app_state, states, rank, options, casts, rename)
    for key in states:
        comparer.compare(key)
    comparer.explain_absence()
    comparer.leave_out_states()
    comparer.separate_memory()
    return comparer.compared


@dataclass(eq=False, repr=False)
class _Comparer:
    index: Index
    app_state: AppState
    states: Mapping[str, Any]
    rank: int
    options: Options
    casts: bool
    rename: Rename | None

    def __post_init__(self) -> None:
        index, app_state, states, options = self.index, self.app_state, self.states, self.options
        self._entries = entries_by_key(index.entries)
        self._private: dict[str, list[str]] = {}
        for path in index.held_by_other_ranks:
            self._private.setdefault(path.partition("/")[0], []).append(path)
        self._changed = other_optimizers(
            app_state, index, states, allow_change=options.allow_optimizer_change
        )
        self.compared = Compared(
            keys=tuple(self._entries),
            without_optim=[key for key in states if join(key, "optim") in self._changed],
        )
        self._states = {
            key: {name: value for name, value in state.items() if name != "optim"}
            if key in self.compared.without_optim
            else state
            for key, state in states.items()
        }
        self._absent: list[str] = []
        self._hints = Hints(self._entries, app_state, self._states, self.rename)

    def compare(self, key: str) -> None:
        compared, stateful = self.compared, self.app_state[key]
        private = self._private.get(escape(key), [])
        if isinstance(stateful, RNGState) and self._must_keep(key, private):
            return
        if key not in self._entries:
            compared.mismatched += self._explain_private(key, private)
            if not private:
                compared.missing.append(escape(key))
                self._absent.append(key)
            return
        if loads_dicts_only(stateful) and (what := _what_is_no_dict(key, self._entries[key])):
            compared.mismatched.append(
                f"{escape(key)}: {what} in the snapshot, not a dict; read it with "
                f"snapshot.read_object({escape(key)!r})"
            )
            return
        if escape(key) in self._changed:
            compared.mismatched.append(self._changed[escape(key)])
            return
        if key in compared.without_optim:
            compared.mismatched.append(self._changed[join(key, "optim")])
        if unprimed := unprimed_optimizer(key, stateful, self._entries[key], self._states[key]):
            compared.mismatched += unprimed
            return
        part = self._prepare(key)
        private = [path for path in private if part.match.has_target(path)]
        compared.mismatched += self._explain_private(key, private)
        if private and matching_of(stateful) in (Matching.GROUPS, Matching.NOTHING):
            return  # its state would have holes
        stuck = _stuck_on_meta(key, stateful, part)
        compared.mismatched += stuck
        if isinstance(stateful, torch.optim.Optimizer) and (stuck or part.match.mismatched):
            compared.mismatched += part.match.mismatched
            return  # loads all of its state or none
        differs = (
            part.match.missing
            or part.match.unexpected
            or part.match.unplaced
            or part.match.mismatched
        )
        if part.match.missing:
            compared.hints += self._hints.of_missing(key, part.match)
        if differs and adapts(stateful):
            compared.adapting[key] = part
            # Fresh: a module that adapts may move a leaf.
            part = self._prepare(key, is_fresh=True)
        explained = {*private}
        compared.missing += [path for path in part.match.missing if path not in explained]
        compared.unexpected += part.match.unexpected
        compared.unplaced[escape(key)] = tuple(part.match.unplaced)
        compared.mismatched += part.match.mismatched
        compared.parts[key] = part

    def explain_absence(self) -> None:
        if absent := [key for key in self.app_state if key in self._absent]:
            self.compared.hints.insert(0, self._hints.of_absent(absent))

    def leave_out_states(self) -> None:
        """Leaves out optimizers with the state of a parameter that has another shape.

        torch would load it, and fail in the next step.
        """
        parts = self.compared.parts
        reshaped = {
            id(parameter): path
            for key in parts
            for path, parameter in named_parameters_of(key, self.app_state[key])
            if path in parts[key].match.reshaped
        }
        for key in [key for key in parts if matching_of(self.app_state[key]) is Matching.GROUPS]:
            optimizer: Any = self.app_state[key]
            owners = [reshaped.get(id(each)) for each in parameters_of(optimizer)]
            stateful = parameters_with_state(key, self._entries[key])
            named = {n: path for n, path in enumerate(owners) if path is not None and n in stateful}
            unnamed = reshaped_parameters(key, optimizer, self._entries[key])
            if misfits := [*(unnamed | named).values()]:
                shown = ", ".join(misfits[:3]) + (", ..." if misfits[3:] else "")
                self.compared.mismatched.append(
                    f"{escape(key)}: its saved state does not fit {shown}, of another shape in the "
                    "app state; the optimizer keeps its own state"
                )
                del parts[key]

    def separate_memory(self) -> None:
        """Separates leaves that share memory only in the app state.

        Parameters of modules keep it: modules compute with it. Otherwise the first leaf keeps it.
        """
        parts = self.compared.parts
        # load_state_dict copies into the module's own memory: the last one wins.
        in_modules = [key for key in parts if isinstance(self.app_state[key], torch.nn.Module)]
        others = [key for key in parts if key not in in_modules]
        fixed = [each for key in in_modules for each in parts[key].memory.destinations]
        destinations = [each for key in others for each in parts[key].memory.destinations]
        lines: dict[str, None] = {}
        unshared: dict[str, set[str]] = {}
        key_of = {escape(key): key for key in parts}
        for owner, other in find_conflicts(destinations, fixed):
            key = key_of[other.path.partition("/")[0]]
            unshared.setdefault(key, set()).add(other.path)
            if key in in_modules:
                remedy = "Untie them before the restore"
                if owner.path.partition("/")[0] == other.path.partition("/")[0]:
                    left_out = f"lambda path: None if path == {other.path!r} else path"
                    remedy = f"{remedy}, or read only one: pass rename={left_out}"
                lines[
                    f"{owner.path}, {other.path}: they share memory in the app state, but not in "
                    f"the snapshot. {remedy}"
                ] = None
        self.compared.mismatched += lines
        for key, paths in unshared.items():
            parts[key] = self._prepare(key, unshared=paths)

    def _prepare(
        self, key: str, *, is_fresh: bool = False, unshared: Iterable[str] = ()
    ) -> KeyRestore:
        return prepare(
            escape(key),
            self._entries[key],
            target=None if is_fresh else self._states[key],
            allow_pickle=self.options.allow_pickle,
            matching=Matching.KEYS if is_fresh else matching_of(self.app_state[key]),
            unshared=unshared,
            world_size=self.index.world_size,
            casts=self.casts,
            rebuild=Rebuild.of(self.options.allowed_types, is_strict=True),
        )

    def _must_keep(self, key: str, private: Sequence[str]) -> bool:
        index, rank = self.index, self.rank
        is_private = rank >= index.world_size and not all(
            getattr(entry, "replicated", True) for entry in self._entries.get(key, ())
        )
        if not private and not is_private:
            return False
        ranks = sorted({rank for path in private for rank in index.held_by_other_ranks[path]})
        self.compared.kept.append(
            f"{escape(key)}: rank {rank} keeps the states of its random generators: only "
            f"{named_ranks(ranks or range(index.world_size))} of {index.world_size} saved theirs"
        )
        return True

    def _explain_private(self, key: str, paths: Sequence[str]) -> list[str]:
        """Returns a line per set of ranks with wanted private leaves."""
        index = self.index
        by_ranks: dict[Sequence[int], list[str]] = {}
        for path in paths:
            by_ranks.setdefault(index.held_by_other_ranks[path], []).append(path)
        return [
            f"{escape(key)}: the snapshot has values only for {named_ranks(ranks)} (saved by "
            f"{index.world_size} ranks): {', '.join(own[:3])}"
            f"{', ...' if len(own) > 3 else ''}. A private value goes back to the rank that saved "
            "it. If it is equal on all ranks, pass it in replicated=[...] when you save; otherwise "
            "leave the key out"
            for ranks, own in by_ranks.items()
        ]


def _what_is_no_dict(key: str, entries: Sequence[AnyEntry]) -> str | None:
    """Describes the saved state of ``key`` if it cannot be a dict."""
    root = escape(key)
    for entry in entries:
        if entry.path != root:
            continue
        match entry:
            case ContainerEntry():
                is_dict = entry.type in DICT_TYPES or entry.type == "defaultdict"
                return None if is_dict else f"a {entry.type}"
            case ValueEntry() if type(entry.value) is not Refused:
                value = decode_inline(entry.value, root)
                return None if isinstance(value, Mapping) else f"the value {value!r:.80}"
            case BytesEntry():
                return f"a {entry.type}" if entry.type in ("str", "bytes", "bytearray") else None
            case TensorEntry() | ShardedEntry() | ViewEntry() | CompositeEntry():
                return "a tensor"
    return None


def _stuck_on_meta(key: str, stateful: Stateful, part: KeyRestore) -> list[str]:
    """Returns a line per leaf on the meta device that cannot be replaced."""
    if can_assign(stateful):
        return []
    if isinstance(stateful, torch.optim.Optimizer) and any(
        parameter.is_meta for parameter in parameters_of(stateful)
    ):
        return [
            f"{escape(key)}: its parameters are on the meta device, and its state would go "
            "there; make the optimizer after the module was restored"
        ]
    kind = type(stateful).__qualname__
    return [
        f"{path}: it is on the meta device, and a {kind} cannot take over another tensor; "
        "materialise it with to_empty(...)"
        for path in part.match.on_meta
    ]
