# SPDX-License-Identifier: Apache-2.0
"""Boxes of distributed tensors equal torch's own cutting, on every rank of any mesh."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from actorsnap.format.geometry import Box, Placement, covers_exactly, place
from actorsnap.state.distributed import (
    Describer,
    Replica,
    Replication,
    Sharding,
    is_distributed,
    replication,
)
from tests.support import forker

pytestmark = pytest.mark.usefixtures("forker")


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


@st.composite
def layouts(draw: st.DrawFn, max_ranks: int = 64) -> tuple[Any, ...]:
    """Mesh shape, tensor shape, and how each axis cuts: (dim, groups), or None."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    while prod(mesh) > max_ranks:
        mesh.pop()
    shape = draw(st.lists(st.integers(0, 13), min_size=0, max_size=3))
    axes = []
    for _ in mesh:
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
        axes.append(None if dim is None else (dim, groups))
    return tuple(mesh), tuple(shape), axes


def torch_cuts(whole: torch.Tensor, mesh: Any, axes: Any, coordinate: Any) -> torch.Tensor:
    """The local tensor as torch's placements cut it."""
    local = whole
    for axis, cut in enumerate(axes):
        if cut is not None:
            dim, groups = cut
            placement: Any = Shard(dim) if groups == 1 else _StridedShard(dim, split_factor=groups)
            parts, _ = placement._split_tensor(local, mesh[axis], with_padding=False)
            local = parts[coordinate[axis]]
    return local


@given(layouts())
def test_boxes_are_where_torch_cuts(layout: Any) -> None:
    mesh, shape, axes = layout
    whole = torch.arange(prod(shape)).view(shape)
    held: dict[Any, list[Box]] = {}
    for coordinate in product(*map(range, mesh)):
        local = torch_cuts(whole, mesh, axes, coordinate)
        cuts = [
            Placement(cut[0], mesh[axis], coordinate[axis], cut[1])
            for axis, cut in enumerate(axes)
            if cut is not None
        ]
        placed, local_shape = place(shape, cuts)
        assert local_shape == tuple(local.shape)
        if 0 in shape:
            assert [p.box for p in placed] == [Box.whole(shape)]
            continue
        for one in placed:
            assert torch.equal(local[index(one.local)], whole[index(one.box)])
        if local.numel():
            assert covers_exactly(Box.whole(local.shape), [one.local for one in placed])
        else:
            assert not placed
        # Ranks along axes that cut nothing hold the same.
        key = tuple(c for c, cut in zip(coordinate, axes, strict=True) if cut is not None)
        boxes = [one.box for one in placed]
        assert held.setdefault(key, boxes) == boxes
    if 0 not in shape:
        assert covers_exactly(Box.whole(shape), [box for boxes in held.values() for box in boxes])


def test_few_boxes_and_no_wrong_cuts() -> None:
    halves = [Placement(0, 2, 1, 2), Placement(0, 2, 1)]
    assert [p.box for p in place((8,), halves)[0]] == [Box((6,), (2,))]
    assert [p.box for p in place((8,), halves[:1])[0]] == [Box((2,), (2,)), Box((6,), (2,))]
    assert len(place((8, 8), [Placement(0, 2, 0, 2), Placement(1, 2, 1, 2)])[0]) == 4
    assert place((), [])[0] != []
    for wrong in (
        Placement(1, 2, 0),
        Placement(0, 2, 2),
        Placement(0, 2, 0, 0),
        Placement(-1, 2, 0),
    ):
        with pytest.raises(ValueError, match="does not cut"):
            place((4,), [wrong])


# DTensor, seen from every rank of a world that is not there --------------------------------


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@settings(max_examples=40)
@given(layouts(max_ranks=8), st.integers(0, 2))
def test_dtensors_on_every_rank(layout: Any, more: int) -> None:
    mesh_shape, shape, axes = layout
    size = prod(mesh_shape)
    whole = torch.arange(float(prod(shape))).view(shape)
    placements = [
        Replicate()
        if cut is None
        else Shard(cut[0])
        if cut[1] == 1
        else _StridedShard(cut[0], split_factor=cut[1])
        for cut in axes
    ]
    by_box: dict[Any, set[int]] = {}
    said: dict[Any, set[Any]] = {}
    for rank in range(size + more):
        with fake_rank(rank, size + more):
            ranks = torch.arange(more, size + more).view(mesh_shape)
            tensor = distribute_tensor(
                whole, DeviceMesh("cpu", ranks), placements, src_data_rank=None
            )
            found = Describer().describe(tensor)
            assert isinstance(found, Sharding)
            assert found.global_shape == shape
            assert (found.dtype, found.kind, found.requires_grad) == ("float32", "tensor", False)
            if rank < more:
                assert found.pieces == ()
            for piece in found.pieces:
                assert torch.equal(piece.tensor, whole[index(piece.box)])
                assert tuple(piece.tensor.shape) == piece.box.sizes
                if piece.tensor.numel():
                    storage = tensor._local_tensor.untyped_storage().data_ptr()
                    assert piece.tensor.untyped_storage().data_ptr() == storage
                key = (piece.box.offsets, piece.box.sizes)
                by_box.setdefault(key, set()).add(rank)
                said.setdefault(key, set()).add(piece.holders or (rank,))
    assert covers_exactly(Box.whole(shape), [Box(*key) for key in by_box])
    assert by_box
    for key, ranks_ in by_box.items():
        assert said[key] == {tuple(sorted(ranks_))}


@pytest.fixture
def rank_2_of_4() -> Iterator[None]:
    with fake_rank(2, 4):
        yield


@pytest.mark.usefixtures("rank_2_of_4")
def test_the_order_of_the_axes_may_be_told_apart_from_them() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    meta = TensorMeta(torch.Size([8]), (1,), torch.int64)
    found = []
    for placements, order in (
        ((Shard(0), Shard(0)), None),
        ((Shard(0), Shard(0)), (ShardOrderEntry(0, (1, 0)),)),
        ((_StridedShard(0, split_factor=2), Shard(0)), None),
    ):
        spec: Any = DTensorSpec(mesh, placements, meta, shard_order=order)  # type: ignore[arg-type]
        sharding = Describer().describe(DTensor(torch.arange(2), spec, requires_grad=False))
        assert isinstance(sharding, Sharding)
        found.append([piece.box for piece in sharding.pieces])
    # Rank 2 is at (1, 0).
    assert found == [[Box((4,), (2,))], [Box((2,), (2,))], [Box((2,), (2,))]]


@pytest.mark.usefixtures("rank_2_of_4")
def test_kinds_and_what_is_not_distributed() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4))
    tensor = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src_data_rank=None)
    parameter = torch.nn.Parameter(tensor)
    found = Describer().describe(parameter)
    assert isinstance(found, Sharding)
    assert (found.kind, found.requires_grad) == ("parameter", True)
    assert not found.pieces[0].tensor.requires_grad
    frozen = Describer().describe(torch.nn.Parameter(tensor, requires_grad=False))
    assert isinstance(frozen, Sharding)
    assert (frozen.kind, frozen.requires_grad) == ("parameter", False)
    buffer = Describer().describe(torch.nn.Buffer(tensor))
    assert isinstance(buffer, Sharding)
    assert buffer.kind == "buffer"
    strided = distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)], src_data_rank=None).t()
    found = Describer().describe(strided)
    assert isinstance(found, Sharding)
    ((box, local),) = [(piece.box, piece.tensor) for piece in found.pieces]
    assert (box.offsets, tuple(local.shape), local.is_contiguous()) == ((4, 0), (2, 4), False)
    assert Describer().describe(torch.ones(2)) is None
    assert Describer().describe(torch.nn.Parameter(torch.ones(2))) is None
    assert not is_distributed(torch.ones(2))
    assert not is_distributed("x")
    assert is_distributed(tensor)
    meta = distribute_tensor(torch.ones(4, device="meta"), mesh, [Shard(0)])
    assert isinstance(Describer().describe(meta), str)


@pytest.mark.usefixtures("rank_2_of_4")
def test_one_layout_is_computed_once() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4))
    describer = Describer()
    for _ in range(3):
        tensor = distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)
        assert isinstance(describer.describe(tensor), Sharding)
    assert len(describer._layouts) == 1


def test_replication_finds_the_longest_prefix() -> None:
    found = Replication()
    assert not found
    found[""] = Replica(None)
    found["a.b."] = Replica((1, 2))
    found["a.b.c"] = None
    assert found
    assert found.find("a.b.c") is None
    assert found.find("a.b.d") == Replica((1, 2))
    assert found.find("a.bd") == Replica(None)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    assert replication({"m": torch.nn.Linear(1, 1), "o": optimizer, "x": object()}) == {}
    assert replication({"x": {}, "y": torch.nn.Linear(1, 1)}) == {}


def test_looking_at_plain_tensors_imports_nothing() -> None:
    script = (
        "import sys, torch\n"
        "from actorsnap.state import distributed\n"
        "m = torch.nn.Linear(1, 1)\n"
        "assert distributed.Describer().describe(m.weight) is None\n"
        "assert distributed.replication({'m': m, 's': distributed.ModelState(m)}) == {}\n"
        "heavy = ('torch.distributed.tensor', 'torch.distributed.checkpoint', 'torch._dynamo')\n"
        "assert not [n for n in sys.modules if n.startswith(heavy)]\n"
    )
    done = subprocess.run(
        forker.command("-c", script),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
