# SPDX-License-Identifier: Apache-2.0
"""A view that is read without the rest of its base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from actorsnap import ChecksumMismatch, StateDict, UsageError
from actorsnap.state.restore.build import read_one
from actorsnap.sync import Snapshot
from tests.state.stored import store

MIB = 1 << 20
BASE = torch.arange(3 * MIB, dtype=torch.int32)  # 12 blocks

VIEWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "start": (lambda b: b[:4], 1),
    "across two blocks": (lambda b: b[262_140:262_150], 2),
    "end": (lambda b: b[-3:], 1),
    "middle, long": (lambda b: b[300_000:1_500_001], 5),
    "odd address": (lambda b: b.view(torch.uint8)[MIB + 3 : MIB + 8], 1),
    "matrix": (lambda b: b[600_000:600_012].view(3, 4), 1),
    "columns": (lambda b: b[600_000:600_012].view(3, 4).t(), 1),
    "strided": (lambda b: b[700_000:700_100:7], 1),
    "column": (lambda b: b.view(-1, 1024)[:, 3], 12),
    "rows of columns": (lambda b: b.view(-1, 1024)[5:900:3, 7:1000:2].t(), 4),
    "cube": (lambda b: b.view(64, 48, 1024).permute(1, 2, 0)[::7, 5:9, 3:], 12),
    "repeated column": (lambda b: b.view(-1, 1, 1024)[::2, :, 9].expand(-1, 3), 12),
    "windows": (lambda b: b[262_000::9].unfold(0, 30, 10)[:1000], 2),
    "expanded": (lambda b: b[800_000:800_001].expand(5), 1),
    "empty": (lambda b: b[5:5], 0),
    "scalar": (lambda b: b[900_000], 1),
}


def contiguous(view: torch.Tensor) -> torch.Tensor:
    return torch.zeros(view.shape, dtype=view.dtype)


def other_strides(view: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*view.shape, 2, dtype=view.dtype)[..., 1]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    views = {name: take(BASE) for name, (take, _) in VIEWS.items()}
    state = {
        "a": StateDict(base=BASE),
        "v": StateDict(views),
        "np": StateDict(x=BASE.numpy()[9:12]),
    }
    return Snapshot.take(tmp_path_factory.mktemp("s"), state)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("out", [None, contiguous, other_strides])
def test_a_view_alone(
    snapshot: Snapshot,
    name: str,
    out: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    take, _ = VIEWS[name]
    view = take(BASE)
    target = None if out is None else out(view)
    found = snapshot.read_object(f"v/{name}", target, memory_budget_bytes=MIB)
    assert torch.equal(found, view)
    if target is None:
        # Its own span, and what aligns it.
        last = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
        assert found.untyped_storage().nbytes() <= (last + 1) * view.itemsize
        if "column" in name or name == "cube":
            assert found.untyped_storage().nbytes() <= view.nbytes
    else:
        assert found is target


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VIEWS)
def test_only_its_blocks_are_read(name: str) -> None:
    take, num_blocks = VIEWS[name]
    memory = store({"a": BASE, "v": take(BASE)})
    for out in (None, contiguous(take(BASE))):
        reads = read_one(memory.entries, "s/v", out, allow_pickle=False).memory.reads
        nbytes = sum(want.stored.stop - want.stored.start for want in reads)
        assert nbytes == num_blocks * MIB


def test_an_array_alone(snapshot: Snapshot) -> None:
    found = snapshot.read_object("np/x")
    np.testing.assert_array_equal(found, BASE.numpy()[9:12])
    out = np.zeros(3, np.int32)
    snapshot.read_object("np/x", out)
    np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize("dtype", ["<i4", "<c16", "|b1"])
def test_a_column_of_an_array_alone(tmp_path: Path, dtype: str) -> None:
    base = (np.arange(300_000) % 251).astype(dtype).reshape(-1, 3)
    column = base[:, 1]
    snapshot = Snapshot.take(tmp_path, {"s": StateDict(b=base, c=column)})
    found = snapshot.read_object("s/c", memory_budget_bytes=MIB)
    np.testing.assert_array_equal(found, column)
    assert found.dtype == column.dtype
    assert found.flags.c_contiguous
    for out in (np.zeros_like(base)[:, 2], np.zeros_like(base)[::-1, 2]):
        assert snapshot.read_object("s/c", out, memory_budget_bytes=MIB) is out
        np.testing.assert_array_equal(out, column)


@pytest.mark.parametrize("path", ["s/x@indices", "0/s/x@values"])
def test_a_part_is_no_value_of_its_own(tmp_path: Path, path: str) -> None:
    snapshot = Snapshot.take(tmp_path, {"s": StateDict(x=torch.eye(3).to_sparse())})
    with pytest.raises(UsageError, match=r"is a part of 's/x', which can be read"):
        snapshot.read_object(path)


def test_several_views_without_their_base_stay_shared(tmp_path: Path) -> None:
    base = torch.arange(1000, dtype=torch.int32)
    raw = base.view(torch.uint8)
    state = {
        "a": StateDict(base=base),
        "v": StateDict(x=base[200:210], y=base[205:220], r=raw[803:]),
    }
    snapshot = Snapshot.take(tmp_path, state)
    found = snapshot.get_state_dict_for_key("v")
    assert torch.equal(found["x"], base[200:210])
    assert torch.equal(found["y"], base[205:220])
    assert torch.equal(found["r"], raw[803:])
    assert found["x"][5:].data_ptr() == found["y"].data_ptr()
    assert found["r"].data_ptr() == found["x"].data_ptr() + 3
    memory = torch.zeros(1000, dtype=torch.int32)
    target = StateDict(x=memory[200:210], y=memory[205:220])
    snapshot.restore({"v": target})
    assert torch.equal(memory[200:220], base[200:220])
    assert memory[:200].sum() == memory[220:].sum() == 0


def test_damage_in_its_block_is_found_and_named(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"s": StateDict(b=BASE, v=BASE[600_000:600_004])})
    (data,) = [path for path in tmp_path.rglob("*.safetensors") if path.stat().st_size > 10 * MIB]
    size = data.stat().st_size
    start = size - BASE.nbytes
    with data.open("r+b") as file:
        file.seek(start + 2 * MIB + 17)
        file.write(b"\xff\xff\xff")
    with pytest.raises(ChecksumMismatch, match="block 2 of 's/b'"):
        Snapshot(tmp_path).read_object("s/v")
