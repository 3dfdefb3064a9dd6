# SPDX-License-Identifier: Apache-2.0
"""torch_xla in SPMD mode, as far as its tensors are saved and restored; no device and no compiler.

As there, a sharded parameter looks like a plain tensor of a device whose memory cannot be read: it
holds NaN here. The shards are elsewhere, one per device, padded to equal shapes; reading copies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch

__all__ = ["FakeXla", "fake_xla"]

_device = torch.Tensor.device


class ShardingType(IntEnum):
    """Numbers as in torch_xla 2.9."""

    REPLICATED = 0
    TILED = 3
    PARTIAL = 5


@dataclass
class XLAShard:
    data: torch.Tensor
    indices: Any
    shard_device: str
    replica_id: int


@dataclass
class _Held:
    """What the devices of all processes have of a tensor."""

    shards: list[XLAShard]
    sharding_type: ShardingType
    loads: int = 0

    @property
    def num_boxes(self) -> int:
        if self.sharding_type is ShardingType.REPLICATED:
            return 1
        boxes = [[(each.start, each.stop) for each in shard.indices] for shard in self.shards]
        return len({str(box) for box in boxes if all(start < stop for start, stop in box)})


def _storage_of(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    number: int = tensor.untyped_storage()._cdata
    return number


class FakeXla:
    def __init__(self) -> None:
        self.process = 0
        self.num_processes = 1
        self.num_devices = 4
        self._held: dict[int, _Held] = {}  # by storage, which views and detached tensors share
        self._alive: list[torch.Tensor] = []

    def put(
        self, value: torch.Tensor, mesh: Sequence[int], spec: Sequence[int | None] | None
    ) -> torch.nn.Parameter:
        """Returns a parameter on the device.

        Args:
            mesh: Shape of the mesh of all devices.
            spec: As in ``mark_sharding``: the axis that cuts each dim. None: not marked.
        """
        parameter = torch.nn.Parameter(value.clone())
        self._alive.append(parameter)
        if spec is None:
            self._held[_storage_of(parameter)] = _Held([], ShardingType.REPLICATED)
            return parameter
        assert prod(mesh) == self.num_devices
        used = [axis for axis in spec if axis is not None]
        kind = ShardingType.TILED if len(used) == len(mesh) else ShardingType.PARTIAL
        held = _Held([], kind if used else ShardingType.REPLICATED)
        self._held[_storage_of(parameter)] = held
        for number, at in enumerate(product(*map(range, mesh))):
            indices, data = [], value
            for dim, (size, axis) in enumerate(zip(value.shape, spec, strict=True)):
                step = size if axis is None else -(-size // mesh[axis])
                start = min(size, 0 if axis is None else at[axis] * step)
                stop = min(size, start + step)
                indices.append(slice(start, stop, 1))
                data = data.narrow(dim, start, stop - start)
                padding = [0, 0] * (value.ndim - dim - 1) + [0, step - (stop - start)]
                data = torch.nn.functional.pad(data, padding, value=torch.nan)
            others = [n for axis, n in enumerate(at) if axis not in used]
            replica = number if not used else int(any(others))
            shown = indices if used else ...
            held.shards.append(XLAShard(data.clone(), shown, f"TPU:{number}", replica))
        if used:
            parameter.data.fill_(torch.nan)
        return parameter

    def held(self, tensor: torch.Tensor) -> _Held | None:
        return self._held.get(_storage_of(tensor))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the value that the devices have; fails if copies differ."""
        held = self._held[_storage_of(tensor)]
        if held.sharding_type is ShardingType.REPLICATED:
            return tensor.detach().clone()
        found = torch.full(tensor.shape, torch.nan)
        for shard in held.shards:
            own = shard.data[tuple(slice(0, i.stop - i.start) for i in shard.indices)]
            before = found[tuple(shard.indices)]
            assert bool((before.isnan() | (before == own)).all())
            found[tuple(shard.indices)] = own
        return found

    def local(self, held: _Held) -> list[XLAShard]:
        each = self.num_devices // self.num_processes
        return held.shards[self.process * each : (self.process + 1) * each]


@contextmanager
def _modules(fake: FakeXla, patch: pytest.MonkeyPatch) -> Iterator[FakeXla]:
    class Sharded(torch.Tensor):
        global_tensor: torch.Tensor

        @property
        def sharding_type(self) -> ShardingType:
            held = fake.held(self.global_tensor)
            assert held is not None
            return held.sharding_type

        @property
        def local_shards(self) -> list[XLAShard]:
            held = fake.held(self.global_tensor)
            assert held is not None
            return [
                XLAShard(s.data.clone(), s.indices, s.shard_device, s.replica_id)
                for s in fake.local(held)
            ]

        def load_local_shards_(self, shards: list[XLAShard]) -> None:
            held = fake.held(self.global_tensor)
            assert held is not None
            assert held.sharding_type is not ShardingType.REPLICATED  # torch_xla refuses it
            held.loads += 1
            for to, shard in zip(fake.local(held), shards, strict=True):
                assert (to.shard_device, to.data.shape) == (shard.shard_device, shard.data.shape)
                to.data = shard.data.clone()

    def wrap_if_sharded(value: Any) -> Any:
        held = fake.held(value)
        if held is None or isinstance(value, Sharded) or not held.shards:
            return value
        wrapped = torch.Tensor._make_subclass(Sharded, value.detach())
        wrapped.global_tensor = value
        return wrapped

    spmd, runtime = ModuleType("torch_xla.distributed.spmd"), ModuleType("torch_xla.runtime")
    vars(spmd).update(
        XLAShardedTensor=Sharded, ShardingType=ShardingType, wrap_if_sharded=wrap_if_sharded
    )
    vars(runtime).update(
        is_spmd=lambda: True,
        process_count=lambda: fake.num_processes,
        process_index=lambda: fake.process,
    )
    patch.setitem(sys.modules, "torch_xla.distributed.spmd", spmd)
    patch.setitem(sys.modules, "torch_xla.runtime", runtime)

    def device_of(tensor: torch.Tensor) -> torch.device:
        on_xla = fake.held(tensor) is not None
        return torch.device("xla", 0) if on_xla else _device.__get__(tensor)

    patch.setattr(torch.Tensor, "device", property(device_of))
    patch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    yield fake


@pytest.fixture
def fake_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeXla]:
    with _modules(FakeXla(), monkeypatch) as fake:
        yield fake
