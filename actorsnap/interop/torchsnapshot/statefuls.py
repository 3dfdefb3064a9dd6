# SPDX-License-Identifier: Apache-2.0
"""torchsnapshot's own statefuls."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from actorsnap.interop.checkpoints import Held


class StateDict(UserDict[str, Any]):
    """A dict that is a ``Stateful``. A restore adds and replaces keys, and removes none."""

    def state_dict(self) -> dict[str, Any]:
        return self.data

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.data.update(state_dict)


class RNGState:
    """torch's random generator on the CPU.

    ``take`` saves the state from before the call, and keeps it. ``restore`` sets it after all other
    statefuls, so the next random numbers are the same as after ``take``. At most one per app state.
    """

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"rng_state": torch.get_rng_state()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(state_dict["rng_state"])


@contextmanager
def generator_held(app_state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields an app state to save or restore. At the end the generator has the state in it.

    Raises:
        RuntimeError: There are several ``RNGState``.
    """
    copied = dict(app_state)
    keys = [key for key, stateful in copied.items() if isinstance(stateful, RNGState)]
    if len(keys) > 1:
        raise RuntimeError(f"Multiple RNGState objects in app state: {keys}") from None
    if not keys:
        yield copied
        return
    generator = copied[keys[0]]
    held = copied[keys[0]] = Held(generator.state_dict())
    yield copied
    generator.load_state_dict(held.state)
