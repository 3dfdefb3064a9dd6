# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch/XLA's SPMD mode, with a fake of torch_xla."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import FormatError, StateDict
from actorsnap.format.geometry import Box, covers_exactly
from actorsnap.format.manifest import TensorEntry
from actorsnap.interop.xla import CheckpointManager
from actorsnap.state.distributed import Describer, Sharding
from actorsnap.sync import Snapshot
from tests.state.fake_xla import FakeXla, fake_xla

__all__ = ["fake_xla"]

MESHES: list[tuple[tuple[int, ...], tuple[int | None, ...]]] = [
    ((4,), (0, None)),
    ((4,), (None, 0)),
    ((2, 2), (0, 1)),
    ((2, 2), (1, None)),
    ((2, 2), (None, None)),
]


def value(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1


class Module(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias


def make(fake: FakeXla, cut: Any, seed: float) -> Module:
    mesh, spec = cut
    return Module(fake.put(value(5, 6) * seed, mesh, spec), fake.put(value(5) * seed, mesh, None))


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("shape", [(5, 6), (3, 2), (0, 4)])
def test_processes_store_each_element_once_and_hold_their_shards(
    shape: tuple[int, ...], num: int, fake_xla: FakeXla
) -> None:
    for mesh, spec in [*MESHES, ((4,), None)]:
        fake_xla.num_processes = num
        whole = value(*shape)
        tensor = fake_xla.put(whole, mesh, spec)
        stored = []
        for fake_xla.process in range(num):
            sharding = Describer().describe(tensor)
            assert isinstance(sharding, Sharding)
            assert sharding.global_shape == shape
            assert sharding.ranks == tuple(range(num))
            boxes = [piece.box for piece in sharding.pieces]
            assert len(boxes) == len(set(boxes))
            for piece in sharding.pieces:
                part = whole[tuple(map(slice, piece.box.offsets, piece.box.stops))]
                assert torch.equal(piece.tensor, part)
            stored += [piece.box for piece in sharding.pieces if piece.is_stored]
        if 0 not in shape:
            assert covers_exactly(Box.whole(shape), stored)


def test_shards_are_restored_on_any_mesh(fake_xla: FakeXla, tmp_path: Path) -> None:
    for number, cut in enumerate(MESHES):
        path = str(tmp_path / str(number))
        saved = make(fake_xla, cut, 1)
        Snapshot.take(path, {"model": saved})
        entries = Snapshot(path).get_manifest()
        boxes = [e for e in entries.values() if isinstance(e, TensorEntry) and "weight" in e.path]
        held = fake_xla.held(saved.weight)
        assert held is not None
        assert len(boxes) == held.num_boxes
        for other in MESHES:
            model = make(fake_xla, other, -1)
            weight = model.weight
            Snapshot(path).restore({"model": model})
            assert model.weight is weight
            assert torch.equal(fake_xla.whole(weight), value(5, 6))
            assert torch.equal(fake_xla.whole(model.bias), value(5))
            target = fake_xla.held(weight)
            assert target is not None
            assert target.loads == (other[1] != (None, None))  # once, not per shard or read
        plain = Module(*(torch.nn.Parameter(torch.zeros(s)) for s in [(5, 6), (5,)]))
        Snapshot(path).restore({"model": plain})
        assert torch.equal(plain.weight, value(5, 6))


def test_a_process_reads_what_its_shards_need(fake_xla: FakeXla, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    Snapshot.take(path, {"state": StateDict(x=fake_xla.put(value(512, 256), (4,), (0, None)))})
    target = StateDict(x=fake_xla.put(-value(512, 256), (4,), (0, None)))
    fake_xla.num_processes, fake_xla.process = 4, 2  # of which this test is one
    report = Snapshot(path).restore(target_of := {"state": target})
    assert report.nbytes == 512 * 256
    held = fake_xla.held(target_of["state"]["x"])
    assert held is not None
    assert torch.equal(held.shards[2].data, value(512, 256)[256:384])
    assert torch.equal(held.shards[1].data, -value(512, 256)[128:256])


def test_damage_leaves_the_devices_as_they_were(fake_xla: FakeXla, tmp_path: Path) -> None:
    Snapshot.take(str(tmp_path / "a"), {"model": make(fake_xla, MESHES[0], 1)})
    (data,) = [f for f in (tmp_path / "a").rglob("*") if f.is_file() and f.stat().st_size > 4000]
    content = bytearray(data.read_bytes())
    content[4100] ^= 1
    data.write_bytes(content)
    model = make(fake_xla, MESHES[2], -1)
    with pytest.raises(FormatError):
        Snapshot(str(tmp_path / "a")).restore({"model": model})
    held = fake_xla.held(model.weight)
    assert held is not None
    assert held.loads == 0


def test_another_dtype_is_cast_on_the_way(fake_xla: FakeXla, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    Snapshot.take(path, {"state": StateDict(x=value(5, 6).double())})
    tensor = fake_xla.put(-value(5, 6), (2, 2), (0, 1))
    Snapshot(path).restore({"state": StateDict(x=tensor)}, cast=True)
    assert torch.equal(fake_xla.whole(tensor), value(5, 6))


def test_xlas_calls_take_wrapped_tensors(fake_xla: FakeXla, tmp_path: Path) -> None:
    wrap = sys.modules["torch_xla.distributed.spmd"].wrap_if_sharded
    tensor = fake_xla.put(value(5, 6), (2, 2), (0, None))
    manager = CheckpointManager(str(tmp_path), 1, chkpt_on_preemption=False)
    assert manager.save(0, {"model": {"weight": wrap(tensor)}})
    other = fake_xla.put(-value(5, 6), (2, 2), (0, 1))
    state = {"model": {"weight": wrap(other)}}
    manager.restore(0, state)
    assert torch.equal(fake_xla.whole(other), value(5, 6))
