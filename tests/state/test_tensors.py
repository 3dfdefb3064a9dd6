# SPDX-License-Identifier: Apache-2.0
"""Every dtype and layout comes back byte by byte; so do sparse and quantized tensors."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import CompositeEntry, TensorEntry
from actorsnap.planning.packing import Piece
from actorsnap.state.sources import ByteSource, Gathering, PartSource, gather
from actorsnap.state.tensors import (
    CARRIERS,
    DTYPES,
    QUANTIZED,
    StridedMemory,
    as_bytes,
    empty_tensor,
    plain_address,
)
from tests.state.stored import round_trip, store

DENSE = sorted(name for name, dtype in DTYPES.items() if dtype not in QUANTIZED)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits; for bool, random values."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    count = int(np.prod(shape)) * dtype.itemsize
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return flat.view(dtype).view(shape) if count else empty_tensor("x", shape, dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The C-order bytes, by a way of its own: through integers of one byte."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    carrier = CARRIERS[tensor.itemsize]
    flat = tensor.view(carrier).clone(memory_format=torch.contiguous_format).view(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 0, 3), (3, 5), (2, 3, 4)])
def test_every_dtype_comes_back(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(DTYPES[name], shape)
    memory = store({"v": tensor})
    (entry,) = memory.key("s")
    assert isinstance(entry, TensorEntry)
    assert (entry.dtype, entry.shape) == (name, shape)
    fresh = memory.restore("s")["v"]
    assert type(fresh) is torch.Tensor
    assert (fresh.dtype, fresh.shape, raw(fresh)) == (tensor.dtype, tensor.shape, raw(tensor))
    target = random_tensor(DTYPES[name], shape)
    pointer = target.data_ptr()
    assert memory.restore("s", {"v": target})["v"] is target
    assert (raw(target), target.data_ptr()) == (raw(tensor), pointer)


def test_every_dtype_of_torch_is_named() -> None:
    assert {str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)} == {
        f"torch.{name}" for name in DTYPES
    }
    for name in ("float8_e8m0fnu", "float4_e2m1fn_x2", "uint64", "int7", "bits16", "complex32"):
        assert name in DTYPES


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "sliced": lambda x: x[1:, ::2, 1:4],
    "rows": lambda x: x[1:3],
    "column": lambda x: x[:, 1, :],
    "channels_last": lambda x: x[None].to(memory_format=torch.channels_last),
    "offset": lambda x: x.view(-1)[3:],
    "zero-d": lambda x: x[1, 2, 3],
    "empty": lambda x: x[:, :0, ::2],
    "size-1 strides": lambda x: x[:1].transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool, DTYPES["int3"]]
)
def test_every_layout_is_saved_and_restored_in_place(layout: str, dtype: torch.dtype) -> None:
    if dtype is DTYPES["int3"] and layout == "channels_last":
        pytest.skip("torch cannot copy this dtype")
    tensor = LAYOUTS[layout](random_tensor(dtype, (4, 6, 5)))
    whole = random_tensor(dtype, (4, 6, 5))
    before = whole.view(CARRIERS[dtype.itemsize]).clone()
    target = LAYOUTS[layout](whole)
    memory = store({"v": tensor})
    assert memory.restore("s", {"v": target})["v"] is target
    assert raw(target) == raw(tensor)
    fresh = memory.restore("s")["v"]
    assert raw(fresh) == raw(tensor)
    # Only what the target shows has changed.
    if layout not in ("contiguous", "transposed", "permuted", "channels_last"):
        mask = torch.zeros((4, 6, 5), dtype=torch.bool)
        LAYOUTS[layout](mask).fill_(True)
        keep = ~mask
        same = raw(whole.view(CARRIERS[dtype.itemsize])[keep])
        assert same == raw(before[keep])


def test_only_the_compact_bytes_of_a_strided_tensor_are_stored() -> None:
    big = torch.randn(1000, 10)
    memory = store({"v": big[:, 3]})
    assert len(memory.data) == 4096 + 4000


@pytest.mark.parametrize("view", ["conj", "imag of conj"])
def test_lazily_conjugated_and_negated_tensors(view: str) -> None:
    def make() -> torch.Tensor:
        x = torch.randn(4, 5, dtype=torch.complex64)
        return x.conj() if view == "conj" else x.conj().imag

    tensor, target = make(), make()
    assert tensor.is_conj() or tensor.is_neg()
    memory = store({"v": tensor})
    torch.testing.assert_close(memory.restore("s")["v"], tensor, rtol=0, atol=0)
    assert memory.restore("s", {"v": target})["v"] is target
    torch.testing.assert_close(target, tensor, rtol=0, atol=0)
    # A tensor and its lazy conjugate share memory, and have different bytes.
    x = torch.randn(3, dtype=torch.complex64)
    both = round_trip({"x": x, "conj": x.conj()})
    torch.testing.assert_close(both["conj"], x.conj(), rtol=0, atol=0)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 3),
)
def test_any_range_of_any_strided_tensor(
    shape: list[int], random: Any, a: int, b: int, skew: int
) -> None:
    dims = list(range(len(shape)))
    random.shuffle(dims)
    base = torch.arange(int(np.prod(shape)) * 2, dtype=torch.int32)[::2].view(shape)
    tensor = base.permute(dims)
    count = tensor.numel()
    start, stop = sorted((a % (count + 1), b % (count + 1)))
    # An odd address: neither numpy nor torch promises to find aligned memory.
    out = memoryview(bytearray(4 * (stop - start) + skew))[skew:]
    StridedMemory(tensor).copy_into(4 * start, out)
    expected = raw(tensor)[4 * start : 4 * stop]
    assert out == expected
    for target in (torch.zeros_like(tensor), torch.zeros_like(base).permute(dims)):
        StridedMemory(target).copy_from(4 * start, out.toreadonly())
        assert raw(target)[4 * start : 4 * stop] == expected
        assert int(target.count_nonzero()) == sum(map(bool, np.frombuffer(expected, np.int32)))
    array = tensor.numpy()[::-1]
    array_source = as_bytes(array)
    array_source.copy_into(4 * start, out)
    assert out == array.tobytes()[4 * start : 4 * stop]
    array_target = np.zeros_like(base.numpy())[::-1].transpose(dims)
    as_bytes(array_target).copy_from(4 * start, out)
    assert array_target.tobytes()[4 * start : 4 * stop] == out


def test_contiguous_tensors_by_copies() -> None:
    """As a device has them."""
    tensor = torch.arange(20.0).view(4, 5)
    out = bytearray(12)
    StridedMemory(tensor).copy_into(16, memoryview(out))
    assert out == raw(tensor)[16:28]
    target = torch.zeros(4, 5)
    StridedMemory(target).copy_from(16, memoryview(out))
    assert torch.equal(target.view(-1)[4:7], tensor.view(-1)[4:7])
    assert target.count_nonzero() == 3


@pytest.mark.parametrize("shape", [(1300, 40), (600, 700, 3), (1300, 2), (511, 40)])
def test_tiles_of_transposed_tensors(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).view(shape).transpose(0, -1)
    expected = raw(tensor)
    for start, stop in ((0, len(expected)), (4, len(expected) - 12), (40, 100_000)):
        out = bytearray(len(expected[start:stop]))
        StridedMemory(tensor).copy_into(start, memoryview(out))
        assert bytes(out) == expected[start:stop]


def test_pieces_of_many_kinds_are_gathered() -> None:
    base = torch.arange(3000, dtype=torch.int32)
    array = np.arange(600, dtype=np.int16)[::-2]
    whole = as_bytes(base)
    sources: list[ByteSource] = [
        whole,
        as_bytes(base.view(50, 60).t()),
        PartSource(whole, 400, 1200),
        as_bytes(array),
        as_bytes(base[:7].to(torch.int8)),
    ]
    order = [(4, 0, 7), (0, 0, 12000), (1, 40, 8000), (2, 8, 1000), (3, 10, 600), (0, 3, 5)]
    expected = b""
    for item, start, stop in order:
        part = bytearray(stop - start)
        sources[item].copy_into(start, memoryview(part))
        expected += part
    out = bytearray(len(expected) + 2)
    pieces = [Piece(*piece) for piece in order]
    gather([Gathering(sources, pieces, memoryview(out)[1:-1], lambda pinner: None)])
    assert bytes(out) == b"\0" + expected + b"\0"


def test_small_pieces_cost_no_view_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((9,), float(i)) for i in range(500)]
    sources = [as_bytes(tensor) for tensor in tensors]
    out = bytearray(36 * 500)

    def refuse(*args: object) -> None:
        raise AssertionError("a view")

    monkeypatch.setattr("actorsnap.state.sources.memory_at", refuse)
    pieces = [Piece(i, 0, 36) for i in range(500)]
    gather([Gathering(sources, pieces, memoryview(out), lambda pinner: None)])
    assert bytes(out) == raw(torch.stack(tensors))


def test_views_keep_memory_alive_without_the_source() -> None:
    tensor = torch.arange(100, dtype=torch.int32)
    alive = weakref.ref(tensor)
    source = as_bytes(tensor)
    view = source.view(4, 12)
    del tensor, source
    gc.collect()
    assert alive() is not None
    assert view.format == "B"
    assert bytes(view) == raw(torch.tensor([1, 2], dtype=torch.int32))
    del view
    gc.collect()
    assert alive() is None


def test_capture_refers_to_live_memory() -> None:
    from actorsnap.state.capture import capture
    from actorsnap.state.stateful import StateDict

    tensor = torch.zeros(4)
    (leaf,) = capture({"s": StateDict(v=tensor)}).leaves
    tensor.fill_(1)
    assert bytes(leaf.source.view(0, 4)) == np.float32(1).tobytes()


def test_restoring_leaves_autograd_alone() -> None:
    source = torch.randn(3, 4)
    memory = store({"a": source, "b": source.t().clone().t(), "c": source.clone()})
    leaf = torch.zeros(3, 4, requires_grad=True)
    strided = torch.zeros(4, 3).t().requires_grad_()
    with torch.inference_mode():
        inference = torch.zeros(4, 3).t()
    target = {"a": leaf, "b": strided, "c": inference}
    result = memory.restore("s", target)
    for name, tensor in target.items():
        assert result[name] is tensor
        assert torch.equal(tensor, source)
    lazy = torch.zeros(3, dtype=torch.complex64).requires_grad_().conj()
    conj = torch.randn(3, dtype=torch.complex64).conj()
    assert store({"v": conj}).restore("s", {"v": lazy})["v"] is lazy
    assert torch.equal(lazy, conj)
    assert leaf.requires_grad
    assert leaf.grad_fn is None
    assert strided.is_leaf


def test_parameters_and_buffers_keep_their_types() -> None:
    value = {
        "p": torch.nn.Parameter(torch.randn(2)),
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "b": torch.nn.Buffer(torch.randn(2)),
        "g": torch.randn(2, requires_grad=True),
        "ints": torch.nn.Parameter(torch.arange(2), requires_grad=False),
    }
    back = round_trip(value)
    for name, tensor in value.items():
        assert type(back[name]) is type(tensor)
        assert back[name].requires_grad == tensor.requires_grad
        assert isinstance(back[name], torch.nn.Buffer) == (name == "b")
        assert torch.equal(back[name], tensor)


# Sparse and quantized -------------------------------------------------------------------------


def sparse_tensors() -> dict[str, torch.Tensor]:
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 0, 0], [0, 4, 5, 0]])
    indices = torch.tensor([[0, 0, 1], [2, 2, 0]])
    values = torch.randn(3)
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True),
        "hybrid": torch.sparse_coo_tensor(
            indices, torch.randn(3, 2), (2, 3, 2), check_invariants=True
        ),
        "coo empty": torch.zeros(3, 3).to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "batched csr": torch.stack([dense, dense]).to_sparse_csr(),
        "bool": (dense > 0).to_sparse(),
    }


def quantized_tensors() -> dict[str, torch.Tensor]:
    x = torch.randn(3, 5)
    channel = (torch.rand(3) + 0.1, torch.zeros(3), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "qint8": torch.quantize_per_tensor(x, 0.1, 3, torch.qint8),
            "quint8": torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
            "qint32": torch.quantize_per_tensor(x, 0.1, 3, torch.qint32),
            "transposed": torch.quantize_per_tensor(x, 0.1, 3, torch.qint8).t(),
            "channel": torch.quantize_per_channel(
                x, channel[0].double(), channel[1].long(), 0, torch.qint8
            ),
            "channel float": torch.quantize_per_channel(x, *channel, torch.quint8),
            "quint4x2": torch.quantize_per_channel(x, *channel, torch.quint4x2),
            "quint2x4": torch.quantize_per_channel(x, *channel, torch.quint2x4),
            "empty": torch.quantize_per_tensor(x[:0], 0.1, 3, torch.qint8),
        }


def parts(tensor: torch.Tensor) -> list[Any]:
    """All there is to know about a composite tensor."""
    known: list[Any] = [tensor.layout, tensor.dtype, tensor.shape]
    if tensor.is_quantized:
        if tensor.dtype in (torch.quint4x2, torch.quint2x4):
            flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            known += [flat.tolist()]
        else:
            known += [tensor.int_repr().tolist()]
        if tensor.qscheme() is torch.per_tensor_affine:
            return [*known, tensor.q_scale(), tensor.q_zero_point()]
        scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        known += [tensor.qscheme(), tensor.q_per_channel_axis()]
        return [*known, scales.dtype, scales.tolist(), points.dtype, points.tolist()]
    if tensor.layout is torch.sparse_coo:
        known += [tensor.is_coalesced(), tensor._indices().tolist()]
        return [*known, tensor._values().tolist()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    known += [tensor.crow_indices().tolist() if rows else tensor.ccol_indices().tolist()]
    known += [tensor.col_indices().tolist() if rows else tensor.row_indices().tolist()]
    return [*known, tensor.values().tolist()]


@pytest.mark.parametrize("name", sparse_tensors())
def test_sparse(name: str) -> None:
    tensor = sparse_tensors()[name]
    memory = store({"v": tensor, "p": torch.nn.Parameter(tensor.float())})
    back = memory.restore("s")
    assert parts(back["v"]) == parts(tensor)
    assert type(back["p"]) is torch.nn.Parameter
    assert back["p"].requires_grad
    same = {"v": tensor.clone(), "p": torch.nn.Parameter(tensor.float().clone())}
    for target in same.values():
        values = target._values() if target.layout is torch.sparse_coo else target.values()
        values.detach().zero_()
    result = memory.restore("s", dict(same))
    for key, target in same.items():
        assert result[key] is target
    assert parts(same["v"]) == parts(tensor)


@pytest.mark.parametrize("name", quantized_tensors())
def test_quantized(name: str) -> None:
    tensor = quantized_tensors()[name]
    memory = store({"v": tensor})
    assert isinstance(memory.key("s")[0], CompositeEntry)
    assert parts(memory.restore("s")["v"]) == parts(tensor)
    target = quantized_tensors()[name]
    result = memory.restore("s", {"v": target})["v"]
    assert parts(result) == parts(tensor)
    assert (result is target) == (name not in ("quint4x2", "quint2x4"))


def test_sparse_targets_of_another_size_take_coo_in_place_and_csr_fresh() -> None:
    tensor = torch.eye(4)
    for convert, in_place in ((torch.Tensor.to_sparse, True), (torch.Tensor.to_sparse_csr, False)):
        memory = store({"v": convert(tensor)})
        target = convert(torch.zeros(4, 4))
        result = memory.restore("s", {"v": target})["v"]
        assert (result is target) == in_place
        assert torch.equal(result.to_dense(), tensor)


def test_parts_that_make_no_sparse_tensor_are_a_format_error() -> None:
    memory = store({"v": torch.eye(3).to_sparse()})
    memory.data[4096] = 9  # an index of 9 where 3 is the size
    with pytest.raises(FormatError, match="s/v: its parts make no sparse_coo"):
        memory.restore("s")


# Refusals -------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    pass


def test_tensors_without_plain_bytes_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actorsnap.state.capture._MAX_SHOWN", 100)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with FakeTensorMode():
        fake = torch.empty(3)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    short = torch.ones(4, 4)
    short_column = short[:, 1]
    short.untyped_storage().resize_(32)
    lazy = torch.nn.LazyLinear(3).weight
    zeros = torch._efficientzerotensor((3, 4))  # autograd makes them
    wrapped: list[torch.Tensor] = []
    torch.func.vmap(lambda x: wrapped.append(x) or x.sum())(torch.ones(2, 3, 4))  # type: ignore[func-returns-value]
    state = {
        "subclass": torch.ones(2).as_subclass(Wrapped),
        "nested": nested,
        "jagged": jagged,
        "fake": fake,
        "meta": torch.empty(3, device="meta"),
        "mkldnn": torch.ones(3, 3).to_mkldnn(),
        "freed": freed,
        "short": short,
        "short column": short_column,
        "lazy": lazy,
        "zeros": zeros,
        "zeros column": zeros.t(),
        "other zeros column": zeros[:2].t(),
        "wrapped": wrapped[0],
        "functional": torch._to_functional_tensor(torch.ones(3)),
        "functional column": torch._to_functional_tensor(torch.ones(3, 3))[:, 1],
        "no quantizer": torch.zeros(4, dtype=torch.uint8).view(torch.quint8),
        "no signed quantizer": torch.zeros(4, dtype=torch.int32).view(torch.qint32),
        "no packed quantizer": torch.zeros(4, dtype=torch.uint8).view(torch.quint4x2),
        "unknown quantizer": torch.empty(4, dtype=torch.quint8),
        "unknown packed quantizer": torch.empty(4, dtype=torch.quint4x2),
        "good": torch.ones(3),
    }
    with pytest.raises(UsageError) as caught:
        store(state)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(state) - 1
    for name, remedy in {
        "subclass": "Wrapped; only Tensor",
        "nested": "nested",
        "jagged": "NestedTensor",
        "fake": "FakeTensor",
        "meta": "to_empty",
        "mkldnn": "to_dense",
        "freed": "storage was resized",
        "short": "storage was resized",
        "short column": "storage was resized",
        "lazy": "run the module once",
        "zeros": "x.clone()",
        "zeros column": "x.clone()",
        "other zeros column": "x.clone()",
        "wrapped": "torch.func",
        "functional": "save what the function returns",
        "functional column": "save what the function returns",
        "no quantizer": "has the dtype quint8, but no scale and zero point",
        "no signed quantizer": "save x.view(torch.int32)",
        "no packed quantizer": "save x.view(torch.uint8)",
        "unknown quantizer": "has the dtype quint8, but no scale and zero point",
        "unknown packed quantizer": "save x.int_repr()",
    }.items():
        (line,) = (line for line in lines if line.startswith(f"  's/{name}' "))
        assert remedy in line


def test_no_address_is_taken_of_a_tensor_without_bytes_in_order() -> None:
    without = (
        torch._to_functional_tensor(torch.ones(3)),
        torch._efficientzerotensor(3),
        torch.ones(2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(4, dtype=torch.int8).view(torch.qint8),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(3)),
        torch.ones(3, 4).T,
        torch.ones(0),
    )
    assert [plain_address(tensor) for tensor in without] == [0] * len(without)
    seen: list[int] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(plain_address(tensor))
        return tensor.sum()

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [0, 0]
    view = torch.arange(6.0)[2:4]
    assert plain_address(view) == view.data_ptr()
