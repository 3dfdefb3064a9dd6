# SPDX-License-Identifier: Apache-2.0
"""``save_state`` and ``load_state`` of Hugging Face's Accelerate, over snapshots.

from actorsnap.interop.accelerate import load_state, save_state

save_state(accelerator, "ckpt/100")  # was: accelerator.save_state("ckpt/100")
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from actorsnap import sync
from actorsnap.errors import IncompatibleState, NotASnapshot, UsageError
from actorsnap.options import Options
from actorsnap.runtime.restore import note_arguments
from actorsnap.state.stateful import RNGState, Stateful
from actorsnap.tracebacks import short_traceback

try:
    import accelerate
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.utils import broadcast
except ImportError as missing:
    raise ImportError(
        "actorsnap.interop.accelerate needs accelerate: pip install 'actorsnap[accelerate]'"
    ) from (None if missing.name == "accelerate" else missing)

__all__ = ["app_state", "async_save_state", "load_state", "replicated", "save_state"]

_OWN = "accelerate"
"""The key of what the accelerator itself counts."""


def app_state(accelerator: accelerate.Accelerator) -> dict[str, Stateful]:
    """Returns everything that ``accelerator.save_state`` saves, as an app state.

    Pass it to ``Snapshot`` or ``CheckpointManager``; with several processes, also pass
    ``replicated=replicated(accelerator)``. Buffers are saved from rank 0.

    Keys: ``model``, ``optimizer``, ``scheduler``, ``dataloader``, ``custom``, then ``model_1`` and
    so on; ``scaler``, ``rng``, ``accelerate``. Of a data loader, the epoch and seed are saved and,
    with ``use_stateful_dataloader``, the position.

    Raises:
        UsageError: The accelerator trains by FSDP, DeepSpeed, Megatron-LM or XLA, or has hooks that
            save by themselves.
    """
    _refuse_other_engines(accelerator)
    found: dict[str, Any] = {
        _OWN: _Counters(accelerator),
        "rng": RNGState(),
        **_numbered("model", _models(accelerator)),
        # Without Accelerate's wrappers: of a torch optimizer more is known.
        **_numbered("optimizer", [each.optimizer for each in accelerator._optimizers]),
        **_numbered("scheduler", accelerator._schedulers),
        **_numbered("dataloader", [_Loader(each) for each in accelerator._dataloaders]),
        **_numbered("custom", accelerator._custom_objects),
    }
    return found if accelerator.scaler is None else found | {"scaler": accelerator.scaler}


def replicated(accelerator: accelerate.Accelerator) -> list[str]:
    """Returns globs of the leaves that are equal in all processes, and so are stored once."""
    keys = [
        _OWN,
        *_numbered("model", accelerator._models),
        *_numbered("optimizer", accelerator._optimizers),
        *_numbered("scheduler", accelerator._schedulers),
    ]
    keys += [] if accelerator.scaler is None else ["scaler"]
    return [f"{key}/**" for key in keys]


@short_traceback
def save_state(
    accelerator: accelerate.Accelerator,
    output_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> sync.Snapshot:
    """Saves ``app_state(accelerator)``. On return, the snapshot is durable and visible.

    All processes must call it. A snapshot at ``output_dir`` is replaced, and stays valid until the
    commit.

    Args:
        output_dir: A path or URL.
        step, metadata, storage_options, options: See ``actorsnap.Snapshot.take``.

    Raises:
        UsageError: See ``app_state``.
        ActorSnapError: See ``actorsnap.Snapshot.take``.
    """
    return sync.Snapshot.take(
        output_dir,
        app_state(accelerator),
        replicated=replicated(accelerator),
        overwrite=True,
        step=step,
        metadata=metadata,
        storage_options=storage_options,
        options=options,
    )


@short_traceback
def async_save_state(
    accelerator: accelerate.Accelerator,
    output_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> sync.PendingSnapshot:
    """Like ``save_state``, but returns when the state is copied, and continues in the background.

    Raises: See ``save_state``; failures after the return are raised by ``PendingSnapshot.wait``.
    """
    return sync.Snapshot.async_take(
        output_dir,
        app_state(accelerator),
        replicated=replicated(accelerator),
        overwrite=True,
        step=step,
        metadata=metadata,
        storage_options=storage_options,
        options=options,
    )


@short_traceback
def load_state(
    accelerator: accelerate.Accelerator,
    input_dir: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> None:
    """Restores ``app_state(accelerator)`` from a snapshot, on any number of processes.

    All processes must call it, after ``prepare``. A folder of ``accelerator.save_state`` is loaded
    by ``accelerator.load_state``, which unpickles.

    Raises:
        NotASnapshot: There is no checkpoint.
        UsageError, ActorSnapError: See ``app_state``, ``actorsnap.Snapshot.restore``.
    """
    wanted = app_state(accelerator)
    snapshot = sync.Snapshot(input_dir, storage_options=storage_options, options=options)
    try:
        snapshot.read_object(_OWN)
    except (NotASnapshot, UsageError):
        if not _is_of_accelerate(input_dir):
            raise
        accelerator.load_state(os.fspath(input_dir))
        return
    wanted |= _numbered("model", list(map(_plain, accelerator._models)))
    try:
        snapshot.restore(wanted)
    except IncompatibleState as error:
        note_arguments(error, snapshot.path, "load_state()")
        raise


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    return {name if n == 0 else f"{name}_{n}": each for n, each in enumerate(objects)}


def _plain(model: Any) -> torch.nn.Module:
    """Returns a model without the wrappers that change its names."""
    inner = getattr(model, "_orig_mod", model)
    found: torch.nn.Module = inner.module if isinstance(inner, DistributedDataParallel) else inner
    return found


def _models(accelerator: accelerate.Accelerator) -> list[Any]:
    models = list(map(_plain, accelerator._models))
    return list(map(_Model, models)) if accelerator.num_processes > 1 else models


def _is_of_accelerate(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(os.fspath(path), "random_states_0.pkl"))


def _refuse_other_engines(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind == accelerate.DistributedType.FSDP:
        raise UsageError(
            "with FSDP call accelerator.save_state itself, after actorsnap.interop.dcp.install() "
            "and with SHARDED_STATE_DICT"
        )
    types = accelerate.DistributedType
    if kind in (types.DEEPSPEED, types.MEGATRON_LM, types.XLA):
        raise UsageError(
            f"the state of {kind.value} is not saved this way: use its own checkpoints"
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise UsageError(
            "this accelerator has hooks of register_save_state_pre_hook or "
            "register_load_state_pre_hook, which write and read files of their own: remove them, "
            "and register_for_checkpointing what they save"
        )


class _Model:
    """A model that several processes train: the buffers of rank 0 count, as in Accelerate."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        state = self._model.state_dict()
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            if name in state and type(buffer) is torch.Tensor:
                state[name] = broadcast(buffer.detach().clone())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state_dict)


class _Counters:
    """The counters of an accelerator."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        iteration = self._accelerator.project_configuration.iteration
        return {"step": self._accelerator.step, "iteration": iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]
        self._accelerator.project_configuration.iteration = state_dict["iteration"]


class _Loader:
    """A prepared data loader: the epoch that it is in, and the order of the epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"iteration": self._loader.iteration}
        sampler = self._loader.get_sampler()
        if isinstance(sampler, SeedableRandomSampler):
            state["seed"] = sampler.initial_seed
        if getattr(self._loader, "use_stateful_dataloader", False):
            state["position"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._loader.iteration = state_dict["iteration"]
        sampler = self._loader.get_sampler()
        if "seed" in state_dict and isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = state_dict["seed"]
        if "position" in state_dict:
            self._loader.load_state_dict(state_dict["position"])
