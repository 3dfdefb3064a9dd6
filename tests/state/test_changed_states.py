# SPDX-License-Identifier: Apache-2.0
"""Captures between changes of a state: the fast path gives what the slow checks give.

One app state lives through each example, as in a program that saves again and again. The slow path
takes no address before all checks, and describes each distributed tensor anew.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from actorsnap.errors import UsageError
from actorsnap.format.geometry import Box
from actorsnap.state import capture as capturing
from actorsnap.state import distributed
from actorsnap.state.capture import capture
from actorsnap.state.distributed import Describer, Sharding
from actorsnap.state.sources import Leaf
from actorsnap.state.stateful import StateDict
from tests.state.test_tensors import raw
from tests.support.cases import examples

RANK = 4
PLACEMENTS = (
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(1)),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)

State = dict[str, Any]


def mesh_of_six() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(6).view(2, 3), _init_backend=False, _rank=RANK)


def numbers(random: Random, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    values = torch.arange(random.randrange(50), 50 + count, dtype=torch.float64)[:count]
    return values.view(shape).to(random.choice(DTYPES))


def distributed_as(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor[tuple([slice(o, o + s) for o, s in zip(offsets, shape, strict=True)])].clone()
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    made: Any = DTensor(local, spec, requires_grad=False)
    made.whole = tensor
    made.offsets = tuple(offsets)
    return made


class Changes:
    """Each method makes a change that a program may make between two saves."""

    def __init__(self, state: State, random: Random) -> None:
        self.state, self.random = state, random
        self.mesh = mesh_of_six()
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.random.randrange(10)}_{self.count}"

    def any_of(self, *, is_distributed: bool = False) -> str | None:
        names = [n for n, t in self.state.items() if isinstance(t, DTensor) is is_distributed]
        return self.random.choice(names) if names else None

    def add(self) -> None:
        self.state[self.name()] = numbers(self.random, 6, 4)

    def add_distributed(self) -> None:
        shape = self.random.choice([(6, 4), (9, 4), (6, 5), (2, 1)])
        whole = numbers(self.random, *shape)
        placements = self.random.choice(PLACEMENTS)
        self.state[self.name()] = distributed_as(whole, self.mesh, placements)

    def replace(self) -> None:
        if (name := self.any_of()) is not None:
            self.state[name] = numbers(self.random, self.random.randrange(5), 3)

    def resize(self) -> None:
        name = self.any_of()
        if name is not None and self.state[name].is_leaf and not self.state[name].requires_grad:
            self.state[name].resize_(self.random.randrange(1, 9)).fill_(self.count)

    def change_dtype(self) -> None:
        if (name := self.any_of()) is not None:
            tensor = self.state[name].detach()
            tensor.data = torch.ones_like(tensor, dtype=self.random.choice(DTYPES))
            self.state[name] = tensor

    def change_dtype_of_local(self) -> None:
        if (name := self.any_of(is_distributed=True)) is not None:
            local = self.state[name]._local_tensor
            local.data = torch.ones_like(local, dtype=torch.float16)

    def remove(self) -> None:
        if self.state:
            del self.state[self.random.choice(list(self.state))]

    def rename(self) -> None:
        if self.state:
            tensor = self.state.pop(self.random.choice(list(self.state)))
            self.state[self.name()] = tensor

    def reorder(self) -> None:
        items = list(reversed(self.state.items()))
        self.state.clear()
        self.state.update(items)

    def share(self) -> None:
        if (name := self.any_of()) is not None and self.state[name].ndim:
            self.state[self.name()] = self.state[name][self.random.randrange(2) :]

    def transpose(self) -> None:
        if (name := self.any_of()) is not None and self.state[name].ndim == 2:
            self.state[name] = self.state[name].detach().T.contiguous().T

    def conjugate(self) -> None:
        self.state[self.name()] = torch.randn(3, 2, dtype=torch.complex64).conj()

    def negate(self) -> None:
        self.state[self.name()] = torch._neg_view(torch.randn(3, 2))

    def take_memory(self) -> None:
        if (name := self.any_of()) is not None:
            tensor = self.state[name]
            held_bytes = tensor.untyped_storage().nbytes()
            tensor.untyped_storage().resize_(self.random.randrange(held_bytes + 1))

    def lose_end(self) -> None:
        whole = torch.zeros(64)
        self.state[self.name()] = whole[40:50]
        whole.untyped_storage().resize_(self.random.choice([0, 20, 45, 50]) * 4)

    def redistribute(self) -> None:
        if (name := self.any_of(is_distributed=True)) is not None:
            tensor = self.state[name]
            others = [each for each in PLACEMENTS if each != tensor.placements]
            placements = self.random.choice(others)
            self.state[name] = distributed_as(tensor.whole, self.mesh, placements)

    def move_local(self) -> None:
        if (name := self.any_of(is_distributed=True)) is not None:
            tensor = self.state[name]
            local = tensor._local_tensor
            tensor._local_tensor = local.T.clone(memory_format=torch.contiguous_format).T

    def cut_local(self) -> None:
        if (name := self.any_of(is_distributed=True)) is not None:
            tensor = self.state[name]
            tensor._local_tensor = tensor._local_tensor[:1]

    def wrap_local(self) -> None:
        if (name := self.any_of(is_distributed=True)) is not None:
            tensor = self.state[name]
            tensor._local_tensor = tensor._local_tensor.as_subclass(Marked)

    def require_grad(self) -> None:
        if (name := self.any_of()) is not None:
            tensor = self.state[name]
            if tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.requires_grad_(not tensor.requires_grad)

    def wrap(self) -> None:
        if (name := self.any_of()) is not None:
            made: Any = torch.nn.Parameter(self.state[name].detach(), requires_grad=False)
            made.note = self.count
            self.state[name] = made

    def subclass(self) -> None:
        if (name := self.any_of()) is not None:
            self.state[name] = self.state[name].detach().as_subclass(Marked)


class Marked(torch.Tensor):
    pass


NAMES = [name for name in vars(Changes) if name not in ("__init__", "name", "any_of")]
NAMES = [name for name in NAMES if not name.startswith("__")]


def taken(state: State) -> Any:
    """What a capture has found, or its error."""
    try:
        captured = capture({"m": StateDict(state)}, ranks=range(6), rank=RANK)
    except UsageError as error:
        return str(error)
    parts: list[Any] = []
    for part in captured.parts:
        if isinstance(part, Leaf):
            data = bytearray(part.item.nbytes)
            part.source.copy_into(0, memoryview(data))
            facts = (part.kind, part.dtype, part.requires_grad, part.holders, part.attributes)
            parts.append((part.item, facts, part.memory_format, bytes(data)))
        else:
            parts.append((part, (), None, b""))
    return parts, captured.sharded, captured.outline


class Forgetful(Describer):
    def describe(self, tensor: torch.Tensor) -> Sharding | str | None:
        return Describer().describe(tensor)


def taken_slowly(state: State) -> Any:
    with (
        mock.patch.object(capturing, "plain_address", return_value=0),
        mock.patch.object(distributed, "plain_address", return_value=0),
        mock.patch.object(capturing, "Describer", Forgetful),
    ):
        return taken(state)


def check_values(state: State, found: Any) -> None:
    """Compares with the tensors themselves, as far as they share no memory."""
    for item, facts, _, data in found[0]:
        name = getattr(item, "path", "").removeprefix("m/")
        if name not in state or not facts:
            continue
        tensor: Any = state[name]
        local = getattr(tensor, "_local_tensor", None)
        if local is not None:
            assert (item.offsets, item.shape) == (tensor.offsets, tuple(local.shape))
            assert item.global_shape == tuple(tensor.shape)
            tensor = local
        else:
            assert item.shape == tuple(tensor.shape)
        assert item.dtype == str(tensor.dtype).removeprefix("torch.")
        assert data == raw(tensor.detach().resolve_neg().resolve_conj())
    for each in found[1]:  # this rank's numbers are those of the job
        described = Describer().describe(state[each.path.removeprefix("m/")])
        assert isinstance(described, Sharding)
        assert (each.shape, each.layout) == (described.global_shape, described.layout)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=12), st.integers(0, 2**32))
def test_each_capture_is_of_the_state_as_it_is(names: list[str], seed: int) -> None:
    state: State = {}
    changes = Changes(state, Random(seed))
    for start in (changes.add, changes.add_distributed, changes.add, changes.add_distributed):
        start()
    for name in names:
        getattr(changes, name)()
        found = taken(state)
        assert found == taken_slowly(state)
        if isinstance(found, str):
            for lost in re.findall(r"'m/(\w+)'", found):  # torch may read behind their memory
                del state[lost]
        else:
            check_values(state, found)


@pytest.mark.parametrize("name", NAMES)
def test_each_change_is_seen(name: str) -> None:
    """Memory in another order holds the same values."""
    state: State = {}
    changes = Changes(state, Random(name))
    changes.add()
    changes.add_distributed()
    before = taken(state)
    getattr(changes, name)()
    after = taken(state)
    assert after == taken_slowly(state)
    assert (after != before) is (name not in ("transpose", "move_local"))


def test_a_view_behind_the_end_of_a_shrunk_storage_is_refused() -> None:
    """Its bytes would be read from memory that was given back."""
    whole = torch.zeros(100)
    state = {"view": whole[60:80]}
    whole.untyped_storage().resize_(50 * 4)
    assert "has lost its memory" in taken(state)
    whole.untyped_storage().resize_(80 * 4)
    assert not isinstance(taken(state), str)


class OwnShard(Shard):
    """Equals a ``Shard`` and has its hash, but may cut otherwise."""


class OwnStrided(_StridedShard):
    pass


def test_placements_that_compare_equal_are_told_apart() -> None:
    mesh = DeviceMesh("cpu", torch.arange(6), _init_backend=False, _rank=RANK)
    describer = Describer()

    def describe(placement: Any) -> Any:
        meta = TensorMeta(torch.Size([12, 12]), (12, 1), torch.float32)
        spec = DTensorSpec(mesh, (placement,), tensor_meta=meta)
        del spec.__dict__["shard_order"]  # versions of torch lack it
        shape = (12, 2) if placement.is_shard(1) else (2, 12)
        return describer.describe(DTensor(torch.ones(shape), spec, requires_grad=False))

    strided = _StridedShard(0, split_factor=2)
    known = (Shard(0), Shard(1), strided, _StridedShard(0, split_factor=3))
    boxes = [[piece.box for piece in describe(placement).pieces] for placement in known]
    assert boxes == [
        [Box((8, 0), (2, 12))],
        [Box((0, 8), (12, 2))],
        [Box((4, 0), (1, 12)), Box((10, 0), (1, 12))],
        boxes[3],
    ]
    assert boxes[3] != boxes[2]
    assert OwnStrided(0, split_factor=2) == strided
    for own in (OwnShard(0), OwnStrided(0, split_factor=2)):
        assert type(own).__name__ in describe(own)
    assert "local tensor has the shape" in describe(Replicate())
    assert [[piece.box for piece in describe(each).pieces] for each in known] == boxes
