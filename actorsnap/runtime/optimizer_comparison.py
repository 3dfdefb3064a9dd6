# SPDX-License-Identifier: Apache-2.0
"""Compares the optimizers of an app state with the saved ones: class, form, groups, first states.

torch loads the state of another optimizer without an error, or with some of its values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from actorsnap.format.manifest import CompositeEntry, TensorEntry, ValueEntry, ViewEntry
from actorsnap.planning.index import AnyEntry, Index, ShardedEntry
from actorsnap.planning.renaming import renamed
from actorsnap.runtime.location import AppState
from actorsnap.state.capture import optimizers_in
from actorsnap.state.distributed import is_distributed
from actorsnap.state.optim import (
    ModelState,
    class_names,
    parts_of,
    plain_name,
    takes_state_of,
)
from actorsnap.state.stateful import Matching, Stateful, matching_of
from actorsnap.state.tree import escape, join, unescape

_TENSORS = (TensorEntry, ShardedEntry, ViewEntry, CompositeEntry)
_PARAMS = re.compile("param_groups/[0-9]+/params(/[0-9]+)?")

_SHAPED_LIKE_PARAMETERS = frozenset(
    "acc_delta ax exp_avg exp_avg_sq exp_inf grad_avg max_exp_avg_sq momentum_buffer prev "
    "square_avg step_size sum".split()
)
"""Names of state tensors with the shape of their parameter, in the optimizers of torch."""


def with_numbered_states(index: Index, app_state: AppState) -> Index:
    """Returns an index in which the states of optimizers are numbered, as an optimizer does itself.

    ``torch.distributed.checkpoint.state_dict`` names them by parameter, in the order of the lists
    ``params``.
    """
    keys = {escape(key) for key, s in app_state.items() if matching_of(s) is Matching.GROUPS}
    numbers: dict[str, dict[str, int]] = {key: {} for key in keys}
    entries: list[AnyEntry] = []
    for entry in index.entries:
        key, _, rest = entry.path.partition("/")
        at = _PARAMS.fullmatch(rest) if key in keys and isinstance(entry, ValueEntry) else None
        if at is not None and isinstance(entry, ValueEntry):
            names = [entry.value] if at[1] else entry.value
            if not isinstance(names, list) or not all([type(name) is str for name in names]):
                return index
            known = numbers[key]
            found = [known.setdefault(escape(name), len(known)) for name in names]
            entry = msgspec.structs.replace(entry, value=found[0] if at[1] else found)
        entries.append(entry)
    if not any(numbers.values()):
        return index

    def renumbered(path: str) -> str:
        key, *names = path.split("/", 3)
        if key in keys and len(names) > 1 and names[0] == "state" and names[1] in numbers[key]:
            names[1] = str(numbers[key][names[1]])
        return "/".join([key, *names])

    return renamed(msgspec.structs.replace(index, entries=tuple(entries)), renumbered)


def other_optimizers(
    app_state: AppState, index: Index, states: Mapping[str, Any], *, allow_change: bool
) -> dict[str, str]:
    """Returns a line for each path of optimizers that must not take the saved state.

    Args:
        allow_change: Allow other classes.
    """
    lines = _other_forms(app_state, index, states)
    return lines if allow_change else lines | _changed_optimizers(app_state, index)


def _changed_optimizers(app_state: AppState, index: Index) -> dict[str, str]:
    return {
        path: f"{path}: saved from {saved}, the app state has {class_names(optimizers)}; "
        "to restore it anyway, pass options=Options(allow_optimizer_change=True) to "
        "Snapshot(path) or CheckpointManager"
        for path, optimizers in optimizers_in(app_state).items()
        if (saved := index.optimizers.get(path)) and not takes_state_of(optimizers, saved)
    }


def _other_forms(app_state: AppState, index: Index, states: Mapping[str, Any]) -> dict[str, str]:
    """Returns a line per ``ModelState`` whose optimizers were saved in a form that does not fit.

    The leaves of another form have other names, so their distribution is unknown. And
    torch loads other parameter groups without an error, but mixes or loses their hyperparameters.
    """
    lines: dict[str, str] = {}
    for key, stateful in app_state.items():
        if not isinstance(stateful, ModelState):
            continue
        path = join(key, "optim")
        entries = [e for e in index.entries if e.path.startswith(f"{path}/")]
        optim = states[key].get("optim")
        if entries and optim is not None:
            why = _difference_of_forms(path, entries, stateful, optim)
            if why is not None:
                lines[path] = f"{path}: {why}"
    return lines


def _difference_of_forms(
    path: str, entries: Sequence[AnyEntry], state: ModelState, optim: Mapping[str, Any]
) -> str | None:
    """``optim``: of ``state``."""
    parameters = [each for optimizer in state.optimizers for each in parameters_of(optimizer)]
    is_spread = any(map(is_distributed, parameters))
    groups, states = f"{path}/param_groups/", f"{path}/state/"
    names = [entry.path for entry in entries]
    was_flat = not any(name.startswith((groups, states)) for name in names)
    owners = {name[len(states) :].partition("/")[0] for name in names if name.startswith(states)}
    if owners and all(owner.isdecimal() for owner in owners):
        if not is_spread and state.flatten:
            return None  # torch finds their names
        return (
            "saved from a plain optimizer, whose parameters are numbered; restore it into the "
            "optimizer itself, after prime_optimizer(optimizer)"
        )
    if is_spread and was_flat is not state.flatten:
        return (
            f"saved with flatten={was_flat}, and the app state has distributed parameters and "
            f"flatten={state.flatten}; restore into ModelState(model, optimizers, "
            f"flatten={was_flat})"
        )
    if was_flat or state.flatten:
        return None
    saved: dict[str, set[str]] = {}
    for entry in entries:
        if entry.path.startswith(groups):
            group, _, rest = entry.path[len(groups) :].partition("/")
            names_in = saved.setdefault(group, set())
            if rest.startswith("params") and isinstance(entry, ValueEntry):
                value = entry.value
                names_in.update(map(str, value if isinstance(value, list) else [value]))
    held = [set(map(str, group["params"])) for group in optim["param_groups"]]
    # Long lists have not been read yet.
    is_known = all(saved.values())
    if not saved or (
        len(saved) == len(held)
        and not (is_known and sorted(map(sorted, saved.values())) != sorted(map(sorted, held)))
    ):
        return None
    return (
        "the parameter groups in the snapshot and in the app state have other parameters "
        f"({len(saved)} and {len(held)} groups); make the same groups. A state that is saved with "
        "flatten=True fits any groups"
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters_of(key: str, stateful: Stateful) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters of a module with their paths in a snapshot."""
    module, _ = parts_of(stateful)
    if module is None:
        return []
    named = module.named_parameters(remove_duplicate=False)
    if isinstance(stateful, ModelState):
        return [(join(key, "model", plain_name(module, name)), each) for name, each in named]
    return [(join(key, name), each) for name, each in named]


def parameters_with_state(key: str, entries: Sequence[AnyEntry]) -> set[int]:
    """Returns the numbers of parameters whose saved state has more than counters."""
    prefix = f"{escape(key)}/state/"
    found: set[int] = set()
    for entry in entries:
        if isinstance(entry, _TENSORS) and prod(entry.shape) > 1 and entry.path.startswith(prefix):
            number = entry.path.removeprefix(prefix).partition("/")[0]
            if number.isdecimal():
                found.add(int(number))
    return found


def reshaped_parameters(
    key: str, optimizer: torch.optim.Optimizer, entries: Sequence[AnyEntry]
) -> dict[int, str]:
    """Returns a text for each parameter, by number, whose shape differs from its saved state's.

    Only for optimizers of torch itself: others may keep an ``exp_avg`` of another shape.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return {}
    parameters = parameters_of(optimizer)
    prefix = f"{escape(key)}/state/"
    found: dict[int, str] = {}
    for entry in entries:
        if not isinstance(entry, _TENSORS) or not entry.path.startswith(prefix):
            continue
        number, _, name = entry.path.removeprefix(prefix).partition("/")
        if name not in _SHAPED_LIKE_PARAMETERS or not number.isdecimal():
            continue
        at = int(number)
        if at >= len(parameters) or is_lazy(parameters[at]):
            continue
        saved, shape = tuple(entry.shape), tuple(parameters[at].shape)
        if saved != shape:
            found[at] = f"parameter {at} (saved: {saved}, here: {shape})"
    return found


def unprimed_optimizer(
    key: str, stateful: Stateful, entries: Sequence[AnyEntry], state: Any
) -> list[str]:
    """Returns a line if an optimizer of distributed parameters has no state yet."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return []
    if not any(map(is_distributed, parameters_of(stateful))):
        return []
    prefix = f"{escape(key)}/state/"
    for entry in entries:
        if isinstance(entry, TensorEntry | ShardedEntry | ViewEntry) and entry.shape:
            number = entry.path.removeprefix(prefix).partition("/")[0]
            if entry.path.startswith(prefix) and not state["state"].get(unescape(number)):
                return [
                    f"{escape(key)}: the optimizer has no state yet, and its parameters are "
                    "distributed tensors; call prime_optimizer(optimizer) first"
                ]
    return []
