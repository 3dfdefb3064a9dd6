# SPDX-License-Identifier: Apache-2.0
"""Whatever mesh stored a tensor, whatever holds it now: each box gets just its elements."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from actorsnap.errors import FormatError
from actorsnap.format.geometry import Box, flat_range_boxes
from actorsnap.format.manifest import CompositeEntry, TensorEntry, ViewEntry
from actorsnap.state.distributed import Describer, Sharding
from actorsnap.state.restore.build import KeyRestore, prepare
from actorsnap.state.restore.match import entries_by_key
from actorsnap.state.sources import MemoryPart
from actorsnap.state.stateful import Matching
from actorsnap.state.tensors import BoxSink
from tests.state.saved import Part, Saved
from tests.state.test_distributed import fake_rank, index

DTYPES = [torch.float32, torch.uint8, torch.bfloat16, torch.complex128, torch.float8_e4m3fn]


@st.composite
def meshes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of a mesh of at most 8 ranks, and placements on it."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    while prod(mesh) > 8:
        mesh.pop()
    placements: list[Any] = []
    for _ in mesh:
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        groups = draw(st.sampled_from([1, 1, 2, 3]))
        if dim is None:
            placements.append(Replicate())
        elif groups == 1:
            placements.append(Shard(dim))
        else:
            placements.append(_StridedShard(dim, split_factor=groups))
    return tuple(mesh), placements


def distributed(whole: torch.Tensor, mesh: tuple[int, ...], placements: list[Any]) -> DTensor:
    ranks = torch.arange(prod(mesh)).view(mesh)
    return distribute_tensor(whole, DeviceMesh("cpu", ranks), placements, src_data_rank=None)


def saved_by(whole: torch.Tensor, mesh: tuple[int, ...], placements: list[Any]) -> Saved:
    """Each box is stored by the first rank that holds it."""
    ranks: list[list[Part]] = []
    for rank in range(prod(mesh)):
        with fake_rank(rank, prod(mesh)):
            found = Describer().describe(distributed(whole, mesh, placements))
            assert isinstance(found, Sharding)
            ranks.append(
                [
                    Part("k/w", piece.tensor.clone(), piece.box, found.global_shape)
                    for piece in found.pieces
                    if rank == (piece.holders or (rank,))[0]
                ]
            )
    return Saved(ranks)


def divided(whole: torch.Tensor, cuts: list[int]) -> Saved:
    """A plain tensor that ranks wrote together: each a range of its bytes, as boxes."""
    ranks = []
    shape = tuple(whole.shape)
    for start, stop in zip([0, *cuts], [*cuts, whole.numel()], strict=True):
        boxes = flat_range_boxes(shape, start, stop)
        ranks.append([Part("k/w", whole[index(box)], box, shape, replicated=True) for box in boxes])
    return Saved(ranks)


def restored(
    saved: Saved,
    target: object,
    rank: int = 0,
    matching: Matching = Matching.KEYS,
    step: int = 48,
) -> tuple[Any, KeyRestore]:
    view = saved.index(rank)
    restore = prepare(
        "k",
        entries_by_key(view.entries)["k"],
        target=target,
        allow_pickle=False,
        matching=matching,
        world_size=view.world_size,
    )
    assert not restore.match.mismatched
    saved.fill(view, restore.memory.reads, step)
    return restore.build(), restore


@given(st.data())
def test_any_mesh_to_any_mesh_equals_indexing(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = torch.arange(prod(shape)).to(torch.int16).view(shape).to(dtype)
    source = data.draw(st.sampled_from(["mesh", "mesh", "plain", "divided"]))
    if source == "mesh":
        saved = saved_by(whole, *data.draw(meshes(shape)))
    elif source == "plain":
        saved = Saved([[Part("k/w", whole)]])
    else:
        cuts = st.lists(st.integers(0, whole.numel()), min_size=1, max_size=3).map(sorted)
        saved = divided(whole, data.draw(cuts))
        if not whole.numel():
            saved = Saved([[Part("k/w", whole, replicated=True)], []])
    expected = whole.view(torch.uint8) if shape else whole
    # Into one process: fresh, and into a plain tensor, also one that is not contiguous.
    turn = list(reversed(range(len(shape))))
    zeros = torch.zeros_like(whole)
    for target in (None, zeros, zeros.permute(turn).contiguous().permute(turn)):
        found, restore = restored(saved, None if target is None else {"w": target})
        assert target is None or found["w"] is target
        now = found["w"]
        assert (now.dtype, now.shape) == (whole.dtype, whole.shape)
        assert torch.equal(now.contiguous().view(torch.uint8) if shape else now, expected)
        assert all(want.holders is None for want in restore.memory.reads)
    mesh, placements = data.draw(meshes(shape))
    for rank in range(prod(mesh)):
        with fake_rank(rank, prod(mesh)):
            into = distributed(torch.zeros_like(whole), mesh, placements)
            found, restore = restored(saved, {"w": into}, rank)
            assert found["w"] is into
            described = Describer().describe(into)
            assert isinstance(described, Sharding)
            for piece in described.pieces:
                assert torch.equal(
                    piece.tensor.contiguous().view(-1).view(torch.uint8),
                    whole[index(piece.box)].contiguous().view(-1).view(torch.uint8),
                )
            holders = {piece.holders or () for piece in described.pieces}
            assert {want.holders for want in restore.memory.reads} <= holders | {()}


# Bytes of a shard around those at which the size of its blocks changes.
EDGES = [(64 << 10) - 1, 64 << 10, (64 << 10) + 1, (2 << 20) - 1, 2 << 20, (2 << 20) + 1]


@settings(max_examples=8)
@given(st.data())
def test_any_mesh_to_any_mesh_across_many_blocks(data: st.DataObject) -> None:
    """Elements of one block go to several boxes, or nowhere."""
    mesh, placements = data.draw(meshes((0, 0)))
    columns = data.draw(st.sampled_from([1, 7, 4099]))
    nbytes = data.draw(st.sampled_from(EDGES)) * prod(mesh)
    shape = data.draw(st.permutations([nbytes // columns, columns]))
    generator = torch.Generator().manual_seed(7)
    whole = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    saved = saved_by(whole, mesh, placements)
    found, _ = restored(saved, None, step=999_999)
    assert torch.equal(found["w"], whole)
    mesh, placements = data.draw(meshes((0, 0)))
    rank = data.draw(st.integers(0, prod(mesh) - 1))
    with fake_rank(rank, prod(mesh)):
        into = distributed(torch.zeros_like(whole), mesh, placements)
        restored(saved, {"w": into}, rank, step=999_999)
        described = Describer().describe(into)
    assert isinstance(described, Sharding)
    for piece in described.pieces:
        assert torch.equal(piece.tensor, whole[index(piece.box)])


def test_fewer_ranks_read_hardly_more_than_they_hold() -> None:
    whole = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    assert whole.nbytes == 4 << 20
    saved = saved_by(whole, (4,), [Shard(0)])
    read = 0
    for rank in range(3):
        with fake_rank(rank, 3):
            into = distributed(torch.ones_like(whole), (3,), [Shard(0)])
            _, restore = restored(saved, {"w": into}, rank)
        read += sum(want.stored.stop - want.stored.start for want in restore.memory.reads)
    assert whole.nbytes < read <= 1.05 * whole.nbytes


def test_the_same_mesh_reads_each_shard_straight_into_place() -> None:
    whole = torch.arange(30.0).view(6, 5)
    saved = saved_by(whole, (3,), [Shard(0)])
    for rank in range(3):
        with fake_rank(rank, 3):
            into = distributed(torch.zeros(6, 5), (3,), [Shard(0)])
            _, restore = restored(saved, {"w": into}, rank)
            (want,) = restore.memory.reads
            assert isinstance(want.sink, MemoryPart)
            address = np.frombuffer(want.sink.view(0, want.nbytes), np.uint8).ctypes.data
            assert address == into.to_local().data_ptr()
            assert want.stored.object == 0
            assert want.holders == ()


def test_a_mesh_tells_who_else_wants_a_box() -> None:
    saved = saved_by(torch.arange(8.0), (2, 2), [Replicate(), Shard(0)])
    with fake_rank(3, 4):
        into = distributed(torch.zeros(8), (2, 2), [Replicate(), Shard(0)])
        _, restore = restored(saved, {"w": into}, 3)
        assert [want.holders for want in restore.memory.reads] == [(1, 3)]


def test_what_one_of_several_ranks_kept_to_itself_others_do_not_want() -> None:
    x = torch.arange(3.0)
    saved = Saved([[Part("k/w", x), Part("k/all", x, replicated=True)], [Part("k/w", x + 1)]])
    for rank in range(2):
        found, restore = restored(saved, {"w": torch.zeros(3)}, rank)
        assert torch.equal(found["w"], x + rank)
        assert [want.holders for want in restore.memory.reads] == [(), None]


def test_arrays_that_ranks_wrote_together() -> None:
    whole = torch.arange(24, dtype=torch.int32).view(4, 6)
    saved = divided(whole, [7, 15])
    saved.manifests = {
        rank: manifest_of_arrays(manifest) for rank, manifest in saved.manifests.items()
    }
    for target in (
        None,
        np.zeros((4, 6), np.int32),
        np.zeros((6, 4), np.int32).T,
        np.zeros((4, 6), np.int32)[::-1],
        np.broadcast_to(np.int32(0), (4, 6)),
    ):
        found, _ = restored(saved, None if target is None else {"w": target})
        assert type(found["w"]) is np.ndarray
        np.testing.assert_array_equal(found["w"], whole.numpy())
        is_replaced = target is None or not target.flags.writeable
        assert is_replaced or found["w"] is target


def manifest_of_arrays(manifest: Any) -> Any:
    change = msgspec.structs.replace
    entries = [change(entry, dtype="<i4", type="numpy") for entry in manifest.entries]
    return change(manifest, entries=tuple(entries))


def test_a_target_whose_elements_share_memory_is_replaced() -> None:
    whole = torch.arange(24.0).view(4, 6)
    found, _ = restored(divided(whole, [7, 15]), {"w": torch.zeros(1).expand(4, 6)})
    assert torch.equal(found["w"], whole)


def test_parameters_come_back_as_parameters() -> None:
    saved = divided(torch.ones(4), [2])
    entry = saved.index(0).entries[0]
    assert entry.path == "k/w"
    part = Part("k/w", torch.ones(2), Box((0,), (2,)), (4,), type="parameter")
    rest = Part("k/w", torch.ones(2), Box((2,), (2,)), (4,), type="parameter")
    found, _ = restored(Saved([[part], [rest]]), None)
    assert type(found["w"]) is torch.nn.Parameter


def test_shared_memory_into_distributed_tensors() -> None:
    base = torch.arange(24.0).view(4, 6)
    saved = Saved(
        [
            [
                Part("k/w", base),
                ViewEntry(path="k/v", of="k/w", dtype="float32", shape=(4, 6), strides=(6, 1)),
                ViewEntry(path="k/t", of="k/w", dtype="float32", shape=(6, 4), strides=(1, 6)),
            ]
        ]
    )
    for rank in range(2):
        with fake_rank(rank, 2):
            tied = distributed(torch.zeros(4, 6), (2,), [Shard(1)])
            turned = distributed(torch.zeros(6, 4), (2,), [Shard(0)])
            found, restore = restored(saved, {"w": tied, "v": tied, "t": turned}, rank)
            assert found["v"] is found["w"] is tied
            assert torch.equal(tied.to_local(), base[:, 3 * rank : 3 * rank + 3])
            assert torch.equal(turned.to_local(), base.T[3 * rank : 3 * rank + 3])
            by_path = {each.path: (each.base, each.origin) for each in restore.memory.destinations}
            assert by_path["k/w"] == by_path["k/v"]


def test_what_is_equal_under_two_names_may_share_memory() -> None:
    w = torch.arange(8.0)
    half = [Box((0,), (4,)), Box((4,), (4,))]
    ranks = [
        [Part(f"k/{n}", (w + (n == "c"))[index(box)], box, (8,)) for n in "abc"] for box in half
    ]
    with fake_rank(1, 2):
        tied = distributed(torch.zeros(8), (2,), [Shard(0)])
        target = {"a": tied, "b": tied, "c": distributed(torch.zeros(8), (2,), [Shard(0)])}
        _, restore = restored(Saved(ranks), target, 1)
    a, b, c = [(each.base, each.origin) for each in restore.memory.destinations]
    assert a == b != c


def mismatches(saved: Saved, target: Any, matching: Matching) -> list[str]:
    view = saved.index(0)
    restore = prepare(
        "k",
        entries_by_key(view.entries)["k"],
        target={"w": target},
        allow_pickle=False,
        matching=matching,
    )
    assert not restore.memory.reads
    assert restore.build() == {"w": target}
    return list(restore.match.mismatched)


@pytest.mark.parametrize("matching", [Matching.LEAVES, Matching.KEYS, Matching.NOTHING])
def test_a_distributed_tensor_that_does_not_fit_is_never_replaced(matching: Matching) -> None:
    saved = saved_by(torch.arange(8.0), (2,), [Shard(0)])
    plain = Saved([[Part("k/w", torch.arange(8.0))]])
    view = ViewEntry(path="k/w", of="k/w@storage", dtype="float32", shape=(8,), strides=(1,))
    viewed = Saved([[Part("k/w@storage", torch.arange(8.0)), view]])
    composite = CompositeEntry(
        path="k/w",
        layout="sparse_coo",
        dtype="float32",
        shape=(8,),
        parts=("indices", "values"),
        parameters={"is_coalesced": True},
    )
    indices = Part("k/w@indices", torch.zeros(1, 1).long())
    sparse = Saved([[composite, indices, Part("k/w@values", torch.ones(1))]])
    with fake_rank(0, 2):
        larger = distributed(torch.zeros(9), (2,), [Shard(0)])
        double = distributed(torch.zeros(8, dtype=torch.float64), (2,), [Shard(0)])
        on_meta = distributed(torch.zeros(8, device="meta"), (2,), [Shard(0)])
        for stored in (saved, plain, viewed):
            (line,) = mismatches(stored, larger, matching)
            assert line == "k/w: global shape (8,) in the snapshot, (9,) in the app state"
            (line,) = mismatches(stored, double, matching)
            assert line == "k/w: dtype float32 in the snapshot, float64 in the app state"
            (line,) = mismatches(stored, on_meta, matching)
            assert "to_empty" in line
        alike = distributed(torch.zeros(8), (2,), [Shard(0)])
        (line,) = mismatches(sparse, alike, matching)
        assert line == "k/w: sparse_coo tensor in the snapshot, distributed tensor in the app state"


def test_shards_that_lie_are_refused_before_memory_is_taken() -> None:
    view = saved_by(torch.arange(8.0), (2,), [Shard(0)]).index(0)
    (entry,) = view.entries
    change = msgspec.structs.replace
    for wrong in (
        change(entry, dtype="float64"),
        change(entry, dtype="unheard_of"),
        change(entry, shape=(7,)),
        change(entry, shape=(1 << 62,)),
        change(entry, shape=(8, 1)),
    ):
        with pytest.raises(FormatError, match="k/w"):
            prepare("k", [wrong], target=None, allow_pickle=False)
    shard = TensorEntry(
        path="k/w",
        dtype="float32",
        shape=(4,),
        data=entry.shards[0].data,  # type: ignore[union-attr]
        global_shape=(8,),
        offsets=(0,),
    )
    with pytest.raises(FormatError, match="stands alone"):
        prepare("k", [shard], target=None, allow_pickle=False)


def test_a_sink_spreads_any_range_of_a_box() -> None:
    whole = torch.arange(60.0).view(5, 12)
    box = Box((1, 2), (3, 8))
    stored = whole[index(box)].contiguous()
    left, right = torch.full((5, 4), -1.0), torch.full((12, 5), -1.0).T[:, 4:]
    targets = [(Box((0, 0), (5, 4)), left), (Box((0, 4), (5, 8)), right)]
    raw = memoryview(stored.numpy().tobytes())
    sink = BoxSink(box, 20, len(raw) - 20, targets)
    assert not sink.is_addressable
    for start in range(0, sink.nbytes, 12):
        sink.copy_from(start, raw[20 + start : min(32 + start, len(raw))])
    expected = torch.full((5, 12), -1.0)
    inner = expected[index(box)]
    flat = inner.contiguous().view(-1)
    flat[5:] = stored.view(-1)[5:]
    inner.copy_(flat.view(3, 8))
    assert torch.equal(torch.cat([left, right], 1), expected)
    with pytest.raises(TypeError, match="copy"):
        sink.view(0, 4)
