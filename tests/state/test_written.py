# SPDX-License-Identifier: Apache-2.0
"""How bytes get into targets, and what is said when they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from actorsnap.errors import FormatError
from actorsnap.format.manifest import TensorEntry
from actorsnap.state.restore.aliasing import destination, find_conflicts, mark_written
from actorsnap.state.restore.build import prepare
from actorsnap.state.tensors import DTYPES, ClippedSink, ExtentSink, as_bytes
from tests.state.stored import store

SUB_BYTE = sorted(
    name for name in DTYPES if name.startswith(("int", "uint", "bits")) and name[-1] in "1234567"
)


def test_there_are_dtypes_that_torch_cannot_copy() -> None:
    assert {"int1", "int7", "uint1", "uint7"} <= set(SUB_BYTE)


@pytest.mark.parametrize("name", [n for n in SUB_BYTE if DTYPES[n].itemsize == 1])
def test_sub_byte_tensors_that_shared_memory_into_separate_ones(name: str) -> None:
    def of(raw: torch.Tensor) -> torch.Tensor:
        return raw.view(DTYPES[name])

    raw = torch.arange(8, dtype=torch.uint8)
    memory = store({"a": of(raw[:6]), "b": of(raw[2:])})
    zeros = torch.zeros(6, dtype=torch.uint8)
    strided = torch.zeros(12, dtype=torch.uint8)
    for spare in (zeros, strided[::2]):
        target = {"a": of(zeros.clone()), "b": of(spare)}
        result = memory.restore("s", target)
        assert result["a"] is target["a"]
        assert torch.equal(result["a"].view(torch.uint8), raw[:6])
        assert result["b"] is target["b"]
        assert torch.equal(result["b"].view(torch.uint8), raw[2:])
    repeated = store({"a": of(raw[3:4]).expand(4)})
    target = {"a": of(torch.zeros(1, dtype=torch.uint8)).expand(4)}
    assert repeated.restore("s", target)["a"].view(torch.uint8).tolist() == [3, 3, 3, 3]


def _dense() -> torch.Tensor:
    return torch.ones(2)


def _strided() -> torch.Tensor:
    return torch.ones(4)[::2]


@pytest.mark.parametrize("make", [_dense, _strided])
def test_autograd_sees_that_a_saved_tensor_was_overwritten(
    make: Callable[[], torch.Tensor],
) -> None:
    weight = torch.ones(2, requires_grad=True)
    x = make()
    y = (weight * x).sum()
    memory = store({"x": torch.full((2,), 5.0)})
    restore = prepare("s", memory.key("s"), target={"x": x}, allow_pickle=False)
    mark_written(each.target for each in restore.memory.destinations)
    memory.fill(restore.memory.reads)
    restore.build()
    assert x.tolist() == [5, 5]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    mark_written([x, np.ones(2)])


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")


@pytest.mark.parametrize("kind", ["alone", "view", "part", "stand-in"])
def test_too_little_memory_is_no_contradiction(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.ones(300)
    if kind == "part":
        x = torch.eye(3).to_sparse()
    else:
        x = base[100:200] if kind == "view" else torch.ones(100)
    memory = store({"base": base, "x": x})
    target = {"base": base, "x": x} if kind == "stand-in" else None
    apart = ["s/x"] if target else []
    monkeypatch.setattr(torch, "empty", _refuse)
    with pytest.raises(MemoryError, match=r"'s/(x|base|x@indices)': no memory for \d+ bytes"):
        prepare("s", memory.key("s"), target=target, allow_pickle=False, unshared=apart)


def test_a_contradiction_is_found_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = store({"x": torch.ones(100)})
    (entry,) = (e for e in memory.entries if isinstance(e, TensorEntry))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    wrong = TensorEntry(path=entry.path, dtype="float64", shape=(100,), data=entry.data)
    with pytest.raises(FormatError):
        prepare("s", [wrong], target=None, allow_pickle=False)


# Claims -----------------------------------------------------------------------------------------


def test_a_hundred_thousand_neighbours_are_no_dispute() -> None:
    flat = torch.zeros(1000)
    claims = [found for n in range(1000) for found in destination(f"{n}", flat[n : n + 1], f"{n}")]
    assert find_conflicts(claims) == []
    whole = destination("flat", flat, "flat")
    (pair,) = find_conflicts([*claims, *whole])[:1]
    assert [each.path for each in pair] == ["0", "flat"]
    assert len(find_conflicts([*whole, *claims])) == 1000


def test_very_many_columns_of_one_matrix_are_settled_by_their_extents() -> None:
    matrix = torch.zeros(3, 500)
    claims = [found for n in range(500) for found in destination(f"{n}", matrix[:, n], f"{n}")]
    assert find_conflicts(claims[:100]) == []
    found = find_conflicts(claims)
    assert found
    for owner, other in found:
        assert int(owner.path) < int(other.path)


def test_what_is_left_after_a_dispute_is_none() -> None:
    memory = torch.zeros(100)
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        claims = []
        for n in range(30):
            start, size = torch.randint(0, 90, (2,), generator=generator).tolist()
            claims += destination(f"{n}", memory[start : start + size // 9 + 1], f"{n}")
        losers = {id(other) for _, other in find_conflicts(claims)}
        left = [each for each in claims if id(each) not in losers]
        assert left
        assert find_conflicts(left) == []
        spans = sorted((each.start, each.stop) for each in left)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_nothing_is_claimed_of_what_cannot_be_written() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    for target in (array, torch.ones(3, device="meta"), torch.ones(0, 3), 5, None):
        assert destination("x", target, "x") == []


# Clipped sinks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 4, 20])
def test_a_clipped_sink_passes_on_its_part(step: int) -> None:
    out = np.zeros(5, np.uint8)
    sink = ClippedSink(as_bytes(out), 4, 12)
    data = bytes(range(12))
    for start in range(0, 12, step):
        sink.copy_from(start, memoryview(data)[start : start + step])
    assert out.tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(TypeError):
        sink.view(0, 1)


@pytest.mark.parametrize("step", [1, 2, 5, 7, 64, 1000])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5,), (7,)),
        ((), ()),
        ((1, 4, 1), (0, 3, 99)),
        ((4, 3), (9, 2)),
        ((3, 4), (2, 9)),
        ((2, 3, 2, 2), (5, 60, 20, 2)),
        ((3, 2, 4), (10, 0, 2)),
    ],
)
def test_a_strided_sink_keeps_the_elements_of_any_pieces(
    shape: tuple[int, ...], strides: tuple[int, ...], step: int
) -> None:
    memory = torch.arange(1000, dtype=torch.int16)
    view = memory.as_strided(shape, strides)
    out = torch.full((*shape, 2), -1, dtype=torch.int16)[..., 1]
    sink = ExtentSink(out, strides)
    data = memory.numpy().tobytes()[: sink.nbytes]
    pieces = range(0, sink.nbytes, 2 * step)
    for start in (*pieces[1::2], *pieces[::2]):
        sink.copy_from(start, memoryview(data)[start : start + 2 * step])
    assert torch.equal(out, view)
    assert sink.nbytes == 2 * (int(view.max()) + 1)
