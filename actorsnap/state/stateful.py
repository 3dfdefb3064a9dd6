"""What an app state is made of: ``Stateful``, ``StateDict``, ``RNGState``.

Decides which random generators are saved and how, and what an app state may look like. It
must not know paths, entries or storage.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from actorsnap.errors import UsageError

__all__ = ["RNGState", "StateDict", "Stateful", "is_module", "load_state", "validate_app_state"]

_log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict()``: modules, optimizers, yours."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state. Tensors in it are saved from, and restored into, in place."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state that ``state_dict`` returned, perhaps in another process."""
        ...


class StateDict(UserDict[str, Any]):
    """A dict that is a ``Stateful``: for counters, configurations, loose tensors.

    ``load_state_dict`` sets the keys that it is given and leaves others as they are, so that
    a key that is newer than the snapshot keeps its value under ``strict=False``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns a shallow copy: a plain dict with the same values."""
        return dict(self.data)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets every key of ``state_dict``."""
        self.data.update(state_dict)


class RNGState:
    """The process's random generators: Python's, NumPy's global one, torch's on CPU and CUDA.

    NumPy's is saved if NumPy is imported, CUDA's if CUDA is initialised. Reading the state
    draws no number. Restoring sets those generators that the snapshot has and this process
    has too.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all generators' states."""
        version, words, gauss_next = random.getstate()
        state: dict[str, Any] = {
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64),
                "gauss_next": gauss_next,
            },
            "torch": torch.get_rng_state(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the generators that ``state_dict`` has a state for.

        Raises:
            UsageError: A state is not what this Python, NumPy or torch takes. Generators
                that come after it are left as they are.
        """
        setters: dict[str, Callable[[Any], object]] = {
            "python": _set_python,
            "torch": torch.set_rng_state,
            "numpy": _set_numpy,
            "cuda": _set_cuda,
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


def _set_cuda(states: list[torch.Tensor]) -> None:
    num_devices = torch.cuda.device_count()
    if len(states) > num_devices:
        _log.warning(
            "the snapshot has random states of %d CUDA devices, this process has %d; "
            "the rest is not restored",
            len(states),
            num_devices,
        )
    for device, state in enumerate(states[:num_devices]):
        torch.cuda.set_rng_state(state.cpu(), device)


def validate_app_state(app_state: object) -> None:
    """Checks that ``app_state`` is a non-empty dict of ``Stateful`` objects with str keys.

    Raises:
        UsageError: It is not. Names every key and type that is wrong.
    """
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
        if isinstance(value, type) or not isinstance(value, Stateful):
            wrong.append(
                f"the value at {key!r} is of type {type(value).__name__}, which lacks "
                "state_dict or load_state_dict; put loose values into actorsnap.StateDict"
            )
    if wrong:
        raise UsageError("app_state cannot be used:\n" + "\n".join(f"  {line}" for line in wrong))


def is_module(stateful: object) -> bool:
    """Whether ``stateful`` refuses what it has no place for, as an ``nn.Module`` does."""
    return isinstance(stateful, torch.nn.Module)


def load_state(stateful: Stateful, state: Any, *, strict: bool) -> None:
    """Hands a restored state over.

    ``strict`` reaches modules only; all else takes what it is given.
    """
    if isinstance(stateful, torch.nn.Module):
        stateful.load_state_dict(state, strict=strict)
    else:
        stateful.load_state_dict(state)
