# SPDX-License-Identifier: Apache-2.0
"""A DCP ``AsyncStager`` that copies into the staging memory of saves."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import AsyncStager

from actorsnap.runtime.host import Host
from actorsnap.state import devices
from actorsnap.state.sources import memory_at
from actorsnap.state.tensors import carried

_SLAB_BYTES = 16 << 20
_ALIGNMENT = 64


class ActorsnapStager(AsyncStager):
    """Copies a state dict for ``torch.distributed.checkpoint.async_save``.

    The memory of a copy is reused after the last of its tensors is gone. So a later ``stage`` never
    writes to a copy in use, and pages stay warm from save to save. The copies are not counted in
    ``Options.memory_budget_bytes``.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the copy. The originals may then be overwritten.

        Tensors that share all their memory also do so in the copy.

        Raises:
            MemoryError: The memory could not be allocated.
        """
        staging = _Staging(Host.get())
        staged: dict[str, Any] = staging.copied(state_dict)
        staging.synchronize()
        return staged

    def synchronize_staging(self) -> None:
        pass  # ``stage`` has waited

    def close(self) -> None:
        pass  # nothing is kept


class _Slab:
    """Memory of the arena. Returned with the last tensor in it."""

    def __init__(self, host: Host, nbytes: int) -> None:
        self._host = host
        self.view = host.resources.arena.allocate(nbytes)
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)
        self.size = nbytes
        self.used = 0

    def __del__(self) -> None:
        view, arena = self.view, self._host.resources.arena
        # Not here: a garbage collection may run within the arena's lock.
        with contextlib.suppress(Exception):
            self._host.call_soon(lambda: arena.free(view))


@dataclass(slots=True)
class _Staging:
    host: Host
    _slab: _Slab | None = None
    _copies: dict[Any, torch.Tensor] = field(default_factory=dict)
    _devices: set[torch.device] = field(default_factory=set)

    def copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            # Keeps the type, and the attributes of a module's state dict.
            result = copy.copy(value)
            for key in value:
                result[key] = self.copied(value[key])
            return result
        if type(value) in (list, tuple):
            return type(value)([self.copied(item) for item in value])
        if isinstance(value, Mapping):
            return {key: self.copied(item) for key, item in value.items()}
        return copy.deepcopy(value)

    def synchronize(self) -> None:
        for device in self._devices:
            devices.synchronize(device)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, ShardedTensor):
            shards = [
                Shard(self._dense(shard.tensor), shard.metadata) for shard in tensor.local_shards()
            ]
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                shards, tensor.metadata(), process_group=tensor._process_group
            )
        if hasattr(tensor, "__tensor_flatten__"):  # DTensor and other wrappers
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            for name, part in inner.items():
                if isinstance(part, torch.Tensor):  # torch 2.13 also names the mesh
                    inner[name] = self._tensor(part)
            return type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
                inner, context, tensor.size(), tensor.stride()
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.detach().clone().cpu()
        return self._dense(tensor)

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            return tensor.clone().cpu()
        if key not in self._copies:
            self._copies[key] = copied = self._memory(tensor)
            carried(copied).copy_(carried(tensor), non_blocking=True)
            if not tensor.is_cpu:
                self._devices.add(tensor.device)
        return self._copies[key]

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.nbytes
        slab = self._slab
        if slab is None or slab.used + nbytes > slab.size:
            slab = _Slab(self.host, max(nbytes, _SLAB_BYTES))
            if not tensor.is_cpu and (pinner := devices.calls.own_pinner()) is not None:
                self.host.resources.arena.pin(slab.view, pinner)
            if nbytes < _SLAB_BYTES:
                self._slab = slab
        memory = memory_at(slab.address + slab.used, nbytes, slab)
        slab.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(tensor.dtype).view(tensor.shape)
