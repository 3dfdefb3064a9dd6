"""The body of ``Snapshot.restore``, as a script (see ``runtime.taking``).

``state_dict`` and ``load_state_dict`` run in the caller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch

from actorsnap.errors import (
    IncompatibleState,
)
from actorsnap.runtime.host import Script
from actorsnap.runtime.inputs import (
    AppState,
    check_flag,
)
from actorsnap.runtime.place import (
    Source,
)
from actorsnap.runtime.reading import begins_anew, fetch, load_index
from actorsnap.state.claims import disputes
from actorsnap.state.restore import KeyRestore, entries_by_key
from actorsnap.state.stateful import (
    RNGState,
    Stateful,
    adapts,
    can_assign,
    loader,
    matching_of,
    torch_complaints,
    validate_app_state,
)
from actorsnap.state.tree import escape, join

__all__ = [
    "RestoreReport",
    "restore",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore left out; all empty if everything fitted.

    Attributes:
        missing: Paths of the app state that the snapshot lacks, of modules and of dicts in a
            ``StateDict``; they keep their values.
        unexpected: Paths of the snapshot that a module has no place for; not restored.
        mismatched: A line per leaf of a module or ``StateDict`` whose kind, dtype or shape
            differs; they keep their values. Or per optimizer that cannot take what was saved;
            it keeps all its values. Or per two leaves of modules that share memory in the app
            state only: it holds the value that was loaded last.
        nbytes: Bytes read into place.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    nbytes: int = 0

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)


@begins_anew
def restore(source: Source, app_state: AppState, *, strict: bool) -> Script[RestoreReport]:
    """Compares everything, then reads everything, then hands over key by key."""
    check_flag("strict", strict)
    validate_app_state(app_state)
    _, manifests = yield from load_index(source)
    by_key = entries_by_key(manifests[0].entries)
    # The global order of state_dict calls; generators last, as other loads may draw numbers.
    keys = sorted(app_state, key=lambda key: (isinstance(app_state[key], RNGState), key))
    missing = [escape(key) for key in keys if key not in by_key]
    unexpected: list[str] = []
    mismatched: list[str] = []
    states: dict[str, Any] = {}
    parts: dict[str, KeyRestore] = {}
    adapting: dict[str, KeyRestore] = {}

    def compare(key: str, apart: Iterable[str] = ()) -> KeyRestore:
        return KeyRestore(
            key,
            by_key[key],
            target=states[key],
            allow_pickle=source.options.allow_pickle,
            matching=matching_of(app_state[key]),
            apart=apart,
        )

    for key in keys:
        if key not in by_key:
            continue
        stateful = app_state[key]
        # A generator that only this process has is no reason to refuse the others.
        states[key] = None if isinstance(stateful, RNGState) else stateful.state_dict()
        part = compare(key)
        stuck = _stuck_on_meta(key, stateful, part)
        mismatched.extend(stuck)
        if isinstance(stateful, torch.optim.Optimizer) and (stuck or part.mismatched):
            mismatched.extend(part.mismatched)
            continue  # it takes all or nothing
        if (part.missing or part.unexpected or part.mismatched) and adapts(stateful):
            adapting[key] = part
            # Fresh: what is adapted may go to another place than the one that has its name.
            part = KeyRestore(
                key, by_key[key], target=None, allow_pickle=source.options.allow_pickle
            )
        missing.extend(part.missing)
        unexpected.extend(part.unexpected)
        mismatched.extend(part.mismatched)
        parts[key] = part
    shared, apart = _settle(app_state, parts)
    mismatched.extend(shared)
    for key, paths in apart.items():
        parts[key] = compare(key, paths)
    if strict and (missing or unexpected or mismatched):
        raise IncompatibleState(missing=missing, unexpected=unexpected, mismatched=mismatched)
    loaders = {key: loader(app_state[key], strict=strict) for key in parts}
    nbytes: int = yield lambda host: fetch(host, source, manifests[0], list(parts.values()))
    for index, (key, part) in enumerate(parts.items()):
        state = part.build()
        try:
            if key in adapting:
                left_out = _load_adapting(key, loaders[key], state, adapting[key], strict=strict)
                missing.extend(left_out.missing)
                unexpected.extend(left_out.unexpected)
                mismatched.extend(left_out.mismatched)
            else:
                loaders[key](state)
        except Exception as error:
            loaded = ", ".join(map(repr, list(parts)[:index])) or "none"
            error.add_note(
                f"actorsnap: load_state_dict() of {key!r} in the app state raised this; "
                f"keys that were loaded before: {loaded}"
            )
            raise
    return RestoreReport(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        nbytes=nbytes,
    )


def _stuck_on_meta(key: str, stateful: Stateful, part: KeyRestore) -> list[str]:
    """A line per leaf on meta in whose place a stateful cannot put what is restored."""
    if can_assign(stateful):
        return []
    if isinstance(stateful, torch.optim.Optimizer):
        held = [p for group in stateful.param_groups for p in group["params"]]
        if any(parameter.is_meta for parameter in held):
            return [
                f"{escape(key)}: its parameters are on the meta device, and its state would go "
                "there; make the optimizer after the module was restored"
            ]
    kind = type(stateful).__qualname__
    return [
        f"{path}: it is on the meta device, and a {kind} cannot take over another tensor; "
        "materialise it with to_empty(...)"
        for path in part.on_meta
    ]


def _settle(
    app_state: AppState, parts: Mapping[str, KeyRestore]
) -> tuple[list[str], dict[str, set[str]]]:
    """Finds memory that leaves share in the app state, but not in the snapshot.

    A module's parameters keep it, as a module computes with the memory that it has; else the
    first leaf does.

    Returns:
        A line per leaf of a module that had to give way to another module's or its own; and,
        by key, the paths of all that get memory of their own.
    """
    # Of two modules' leaves the last one wins, as when load_state_dict copies.
    in_modules = [key for key in parts if isinstance(app_state[key], torch.nn.Module)]
    others = [key for key in parts if key not in in_modules]
    # load_state_dict copies a module's leaf into the memory it has, wherever it was read to.
    fixed = [claim for key in in_modules for claim in parts[key].claims]
    claims = [claim for key in others for claim in parts[key].claims]
    lines: dict[str, None] = {}
    apart: dict[str, set[str]] = {}
    key_of = {escape(key): key for key in parts}
    for owner, other in disputes(claims, fixed):
        key = key_of[other.path.partition("/")[0]]
        apart.setdefault(key, set()).add(other.path)
        if key in in_modules:
            lines[
                f"{owner.path}, {other.path}: they share memory in the app state, but not in the "
                "snapshot"
            ] = None
    return list(lines), apart


def _load_adapting(
    key: str, load: Callable[[Any], Any], state: Any, compared: KeyRestore, *, strict: bool
) -> RestoreReport:
    """Lets a module decide what it can make of a state; returns what it left out.

    Raises:
        IncompatibleState: strict, and torch says that something does not fit.
    """
    try:
        keys = load(state)
    except RuntimeError as error:
        complaints = [f"{key}: {line}" for line in torch_complaints(error)]
        if not complaints:
            raise
        if strict:
            raise IncompatibleState(mismatched=complaints, is_untouched=False) from error
        # torch tells no more than that, but has loaded all that does fit.
        return RestoreReport(
            missing=tuple(compared.missing),
            unexpected=tuple(compared.unexpected),
            mismatched=tuple(complaints),
        )
    return RestoreReport(
        missing=tuple(join(key, name) for name in getattr(keys, "missing_keys", ())),
        unexpected=tuple(join(key, name) for name in getattr(keys, "unexpected_keys", ())),
    )
