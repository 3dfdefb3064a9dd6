# SPDX-License-Identifier: Apache-2.0
"""Statefuls: the objects in an app state.

Decides which app states are valid, and how far a stateful may differ from a state to load. It must
not know paths, entries or storage.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from actorsnap.errors import UsageError
from actorsnap.state import devices
from actorsnap.state.optim import ModelState


@runtime_checkable
class Stateful(Protocol):
    """An object with ``state_dict()`` and ``load_state_dict()``: modules, optimizers, your own."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state. Its tensors are read, and restored into, in place."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that ``state_dict`` returned, perhaps in another process."""
        ...


def is_stateful(value: object) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, type)


class StateDict(UserDict[str, Any]):
    """A dict that is a ``Stateful``, for counters, configurations and single tensors.

    ``load_state_dict`` keeps keys that the loaded state lacks. With ``strict=False``, these are the
    keys that were added after the save.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns a shallow copy as a plain dict."""
        return dict(self.data)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.data.update(state_dict)


class RNGState:
    """The global random generators of Python, NumPy and torch (CPU and CUDA).

    NumPy's generator is saved if NumPy is imported, CUDA's if CUDA is initialized. Saving draws no
    numbers. A restore sets the generators that both the snapshot and the process have.
    """

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss_next = random.getstate()
        state: dict[str, Any] = {
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
                "gauss_next": gauss_next,
            },
            "torch": torch.get_rng_state(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        return state | devices.generator_states()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the generators in ``state_dict``.

        Raises:
            UsageError: A state does not fit this Python, NumPy or torch. Later generators keep
                their states.
        """
        setters: dict[str, Callable[[Any], object]] = {
            "python": _set_python,
            "torch": torch.set_rng_state,
            "numpy": _set_numpy,
            **devices.GENERATORS,
        }
        for name, setter in setters.items():
            if name not in state_dict:
                continue
            try:
                setter(state_dict[name])
            except Exception as error:
                raise UsageError(
                    f"the state of the {name} random generator does not fit this process: {error}"
                ) from error


def _set_python(state: Mapping[str, Any]) -> None:
    words = tuple(state["words"].tolist())
    random.setstate((state["version"], words, state["gauss_next"]))


def _set_numpy(state: Mapping[str, Any]) -> None:
    import numpy

    current = numpy.random.get_state(legacy=False)["bit_generator"]
    if state["bit_generator"] != current:
        raise ValueError(f"it is a {state['bit_generator']}, numpy.random uses {current}")
    numpy.random.set_state(dict(state))


def validate_app_state(app_state: object) -> None:
    """Raises ``UsageError`` unless a non-empty dict of statefuls with str keys."""
    if not isinstance(app_state, Mapping):
        raise UsageError(
            f"app_state must be a dict of objects with state_dict and load_state_dict, "
            f"not a {type(app_state).__name__}"
        )
    if not app_state:
        raise UsageError("app_state is empty; there is nothing to save or restore")
    wrong: list[str] = []
    for key, value in app_state.items():
        if type(key) is not str:
            wrong.append(f"the key {key!r} is of type {type(key).__name__}, not str")
        if not is_stateful(value):
            wrong.append(f"the value at {key!r} {_why_no_stateful(value)}")
            continue
        wrong.extend(
            f"the value at {key!r} is of type {type(value).__name__}: its {name} is async, "
            "and must be a plain method"
            for name in ("state_dict", "load_state_dict")
            if inspect.iscoroutinefunction(getattr(value, name))
        )
    if wrong:
        raise UsageError("app_state cannot be used:\n" + "\n".join(f"  {line}" for line in wrong))


def _why_no_stateful(value: object) -> str:
    tensors = [*value.values()] if isinstance(value, Mapping) else []
    if tensors and all(isinstance(each, torch.Tensor) for each in tensors):
        return (
            "is a dict of tensors: pass the model itself, not its state_dict(); put other tensors "
            "into actorsnap.StateDict"
        )
    return (
        f"is of type {type(value).__name__}, which lacks state_dict or load_state_dict; put loose "
        "values into actorsnap.StateDict"
    )


class Matching(StrEnum):
    """How far a stateful's current state must match the state to load."""

    LEAVES = "leaves"
    """Both sides must have the same leaves, except a module's extra states."""
    KEYS = "keys"
    """The saved structure replaces the current one. Unsaved dict keys are missing; saved tensors
    must fit."""
    MODEL = "model"
    """For a ``ModelState``: ``LEAVES`` for the model, ``KEYS`` for the optimizers."""
    GROUPS = "groups"
    """Like ``NOTHING``, but parameter groups must match, since torch checks them."""
    NOTHING = "nothing"
    """The saved state is loaded unchanged. Current tensors that fit only provide memory."""


def matching_of(stateful: Stateful) -> Matching:
    """Optimizers and schedulers rebuild their state."""
    if isinstance(stateful, torch.nn.Module):
        return Matching.LEAVES
    if isinstance(stateful, torch.optim.Optimizer):
        load = getattr(stateful.load_state_dict, "__func__", None)
        is_torchs = load is torch.optim.Optimizer.load_state_dict
        if is_torchs and not stateful._optimizer_load_state_dict_pre_hooks:
            return Matching.GROUPS
    if isinstance(stateful, ModelState) and not adapts(stateful.model):
        return Matching.MODEL
    return Matching.KEYS if isinstance(stateful, StateDict) else Matching.NOTHING


def loads_dicts_only(stateful: Stateful) -> bool:
    """Whether ``load_state_dict`` is one of this package or of torch, which fails on other states.

    False for modules: their leaves are compared one by one.
    """
    if isinstance(stateful, StateDict):
        return type(stateful).load_state_dict is StateDict.load_state_dict
    return isinstance(stateful, RNGState | ModelState) or matching_of(stateful) is Matching.GROUPS


def adapts(stateful: Stateful) -> bool:
    """Whether a module may load other leaves than its own."""
    if not isinstance(stateful, torch.nn.Module):
        return False
    load = getattr(stateful.load_state_dict, "__func__", None)
    return load is not torch.nn.Module.load_state_dict or any(
        not all(map(_is_fully_shards, module._load_state_dict_pre_hooks.values()))
        or not all(map(_is_fully_shards, module._load_state_dict_post_hooks.values()))
        # torch's own layers adapt only states of torch before 1.0.
        or not module._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        for module in stateful.modules()
    )


def _is_fully_shards(hook: Any) -> bool:
    """Hooks of ``fully_shard`` do not change the state."""
    module: str = getattr(hook, "__module__", None) or ""
    return module.startswith("torch.distributed.fsdp._fully_shard.")


def can_assign(stateful: Stateful) -> bool:
    if isinstance(stateful, torch.nn.Module):
        return _takes(stateful.load_state_dict, "assign")
    return isinstance(stateful, StateDict)


def loader(stateful: Stateful, *, strict: bool) -> Callable[[Any], Any]:
    """Returns ``load_state_dict``, bound to ``strict`` and ``assign`` if the method takes them.

    ``assign`` is for tensors on meta.
    """
    load: Callable[..., Any] = stateful.load_state_dict
    if isinstance(stateful, ModelState):
        return partial(load, strict=strict)
    if not isinstance(stateful, torch.nn.Module):
        return load
    if _takes(load, "strict"):
        load = partial(load, strict=strict)
    if can_assign(stateful) and any(held.is_meta for held in _tensors(stateful).values()):
        return lambda state: load(_to_assign(stateful, state), assign=True)
    return load


def _takes(load: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(load).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }


def _to_assign(module: torch.nn.Module, state: Any) -> Any:
    """Keeps ties, and tensors that are not on meta, under ``assign=True``.

    That alone would replace every parameter, untie a parameter with two names, and tie tensors that
    only the snapshot ties.
    """
    made: dict[tuple[int, int], torch.Tensor] = {}
    holders: dict[int, int] = {}  # by restored storage: the one on meta
    for name, held in _tensors(module).items():
        value = state.get(name)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        if value.is_meta or not held.is_meta:
            if value.data_ptr() == held.data_ptr():
                state[name] = held
            continue
        of = (id(held), value.data_ptr())
        if of not in made:
            holder = held.untyped_storage()._cdata
            attributes = vars(value)
            if holders.setdefault(value.untyped_storage()._cdata, holder) != holder:
                value = value.detach().clone().requires_grad_(value.requires_grad)
            if isinstance(held, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=held.requires_grad)
                if type(held) is torch.nn.Parameter:  # the module's own attributes win
                    vars(value).update({**attributes, **vars(held)})
            made[of] = value
        state[name] = made[of]
    return state


def torch_complaints(error: RuntimeError) -> list[str]:
    """Returns the misfits in an error of a module's ``load_state_dict``; [] for others.

    torch raises it after loading all that fits.
    """
    title, *complaints = str(error).split("\n\t")
    return complaints if title.startswith("Error(s) in loading state_dict for ") else []
