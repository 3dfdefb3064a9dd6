# SPDX-License-Identifier: Apache-2.0
"""Tensors on a device: saved from there, restored into there.

What needs no device is tested on a simulated one: ``tests/api/test_devices.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import Options, SnapshotAborted, StateDict, shutdown
from actorsnap.runtime.host import Host
from actorsnap.runtime.uploader_client import find_uploader
from actorsnap.state import devices
from actorsnap.state.stateful import RNGState
from actorsnap.sync import Snapshot, warm_up
from tests.state.stored import store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KIB, MIB = 1 << 10, 1 << 20
THREAD = Options(offload="thread", fsync=False)
PROCESS = Options(offload="process", fsync=False)
each_way = pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])

LONG = 500_000_000
"""Cycles of a kernel that takes some tenths of a second."""


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    shutdown()


def save(path: Path, state: dict[str, Any], options: Options = THREAD) -> dict[str, Any]:
    """Saves asynchronously, overwrites everything once staged, and reads what was saved."""
    pending = Snapshot.async_take(str(path), {"s": StateDict(state)}, options=options)
    for value in state.values():
        value.zero_()
    pending.wait()
    assert Host.get().resources.arena.lent_bytes == 0
    return saved(path)


def saved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = Snapshot(str(path)).get_state_dict_for_key("s")
    return found


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


def test_layouts_and_shared_memory_on_a_device() -> None:
    def make(fill: float) -> dict[str, torch.Tensor]:
        x = torch.arange(60, dtype=torch.float32, device="cuda").view(3, 4, 5) + fill
        flat = torch.arange(20.0, device="cuda") + fill
        return {
            "plain": x.clone(),
            "transposed": x.clone().transpose(0, 2),
            "sliced": x.clone()[:, ::2, 1:3],
            "conj": torch.view_as_complex(x[..., :2].contiguous()).conj(),
            "whole": x,
            "part": x[1:],
            "a": flat[:12],
            "b": flat[8:],
            "expanded": (torch.ones(1, device="cuda") + fill).expand(100),
            "bf16": x.bfloat16(),
            "sparse": torch.eye(3, device="cuda").to_sparse() * (1 + fill),
            "empty": x[:0],
        }

    state, target = make(0.0), make(1000.0)
    memory = store(state)
    result = memory.restore("s", target)
    fresh = memory.restore("s")
    for name, tensor in state.items():
        assert result[name] is target[name]
        assert torch.equal(result[name].to_dense(), tensor.to_dense())
        assert fresh[name].device.type == "cpu"
        assert torch.equal(fresh[name].to_dense(), tensor.cpu().to_dense())


def test_generators_of_devices() -> None:
    torch.rand(1, device="cuda")
    state = RNGState().state_dict()
    assert len(state["cuda"]) == torch.cuda.device_count()
    expected = torch.rand(4, device="cuda").tolist()
    RNGState().load_state_dict(state)
    assert torch.rand(4, device="cuda").tolist() == expected


# Order --------------------------------------------------------------------------------------


@each_way
def test_saves_what_the_current_stream_writes_by_then(tmp_path: Path, options: Options) -> None:
    x, y = torch.zeros(4 * MIB, device="cuda"), torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.fill_(7.0)
        y.fill_(8.0)
        found = save(tmp_path / "s", {"x": x, "y": y}, options)
    assert found["x"].unique().tolist() == [7.0]
    assert found["y"].unique().tolist() == [8.0]


def test_no_other_stream_is_waited_for(tmp_path: Path) -> None:
    """Nor the device as a whole; the first save, which gets its memory, may."""
    x = torch.ones(4 * MIB, device="cuda")
    save(tmp_path / "first", {"x": x})
    x.fill_(2.0)
    torch.cuda.synchronize()
    busy, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(busy):
        for _ in range(10):
            torch.cuda._sleep(LONG)
        done.record()
    pending = Snapshot.async_take(
        str(tmp_path / "second"), {"s": StateDict({"x": x})}, options=THREAD
    )
    assert not done.query()
    x.fill_(3.0)
    pending.wait()
    assert saved(tmp_path / "second")["x"].unique().tolist() == [2.0]


def test_a_restore_comes_behind_what_was_launched_before(tmp_path: Path) -> None:
    value = numbers(1500, 700)
    save(tmp_path / "s", {"x": value.cuda(), "y": value.cuda()})
    target = {
        "x": torch.zeros(1500, 700, device="cuda"),
        "y": torch.zeros(700, 1500, device="cuda").t(),
    }
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        target["x"].fill_(-1.0)
        target["y"].fill_(-1.0)
        Snapshot(str(tmp_path / "s")).restore({"s": StateDict(target)})
        copies = {name: tensor.clone() for name, tensor in target.items()}
    torch.cuda.synchronize()
    for copy in copies.values():
        assert torch.equal(copy.cpu(), value)


# Bytes --------------------------------------------------------------------------------------


@each_way
def test_every_layout(tmp_path: Path, options: Options) -> None:
    base = numbers(4, 6, 8, 10)
    state = {
        "plain": base.cuda(),
        "channels_last": base.cuda().to(memory_format=torch.channels_last),
        "permuted": base.cuda().permute(3, 1, 0, 2),
        "bfloat16": base.bfloat16().cuda().transpose(1, 2),
        "float8": (base / 5).to(torch.float8_e4m3fn).cuda(),
        "bool": (base > 100).cuda(),
        "conj": torch.complex(base, -base).cuda().conj(),
        "large": numbers(1500, 1400).cuda().t(),
        "parameter": torch.nn.Parameter(base.cuda()),
        "host": base.clone(),
    }
    with torch.no_grad():
        expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
        found = save(tmp_path / "s", state, options)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(
            found[name].float() if name == "float8" else found[name],
            (tensor.float() if name == "float8" else tensor),
        ), name


@each_way
def test_many_small_tensors_cross_the_bus_together(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    original = devices.CudaStream.copy

    def copy(self: Any, out: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(out.nbytes)
        original(self, out, source)

    monkeypatch.setattr(devices.CudaStream, "copy", copy)
    # Odd sizes, too: what is packed behind them is not aligned.
    sizes = [KIB, 3, KIB - 1] * 1000
    state = {
        f"t{i}": torch.full((size,), i % 100, dtype=torch.uint8, device="cuda")
        for i, size in enumerate(sizes)
    }
    found = save(tmp_path / "s", state, options)
    for i, size in enumerate(sizes):
        assert found[f"t{i}"].tolist() == [i % 100] * size
    assert sum(copies) == sum(sizes)
    assert len(copies) <= 4


def test_several_devices_in_one_state(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    state = {f"t{i}": numbers(3000 + i).to(f"cuda:{i % 2}") for i in range(20)}
    late = torch.zeros(2 * MIB, device="cuda:1")
    for index in range(2):
        torch.cuda.synchronize(index)
    with torch.cuda.device(1):
        torch.cuda._sleep(LONG)
        late.fill_(3.0)
    found = save(tmp_path / "s", {**state, "late": late})
    for i in range(20):
        assert torch.equal(found[f"t{i}"], numbers(3000 + i))
    assert found["late"].unique().tolist() == [3.0]


# Memory -------------------------------------------------------------------------------------


@each_way
def test_memory_is_pinned_once(tmp_path: Path, options: Options) -> None:
    state = {"x": torch.ones(4 * MIB, device="cuda")}
    save(tmp_path / "s1", dict(state), options)
    arena = Host.get().resources.arena
    first = (arena.lent_bytes, arena.free_bytes, arena.pinned_bytes)
    assert arena.pinned_bytes >= 16 * MIB
    save(tmp_path / "s2", dict(state), options)
    assert (arena.lent_bytes, arena.free_bytes, arena.pinned_bytes) == first
    view = arena.allocate(16 * MIB)
    try:
        assert torch.frombuffer(view, dtype=torch.uint8).is_pinned()
    finally:
        arena.free(view)
    arena.trim()
    assert arena.pinned_bytes == 0


def test_a_warm_up_pins(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    warm_up(32 * MIB, options=THREAD)
    arena = Host.get().resources.arena
    assert arena.pinned_bytes >= 32 * MIB
    before = arena.pinned_bytes
    save(tmp_path / "s", {"x": torch.ones(4 * MIB - 4 * KIB, device="cuda")})  # one chunk
    assert arena.pinned_bytes == before


def test_memory_of_the_device_is_returned(tmp_path: Path) -> None:
    state = {"x": torch.ones(MIB, device="cuda"), "y": numbers(900, 800).cuda().t()}
    save(tmp_path / "s1", dict(state))
    gc.collect()
    before = torch.cuda.memory_allocated()
    for number in range(3):
        save(tmp_path / f"more{number}", dict(state))
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@each_way
def test_a_copy_that_fails_aborts_the_save(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        raise RuntimeError("CUDA error: out of patience")

    state = {"x": torch.ones(4 * MIB, device="cuda"), "y": torch.ones(9, device="cuda")}
    state["z"] = torch.ones(9, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(devices.CudaStream, "pack", refuse)
        with pytest.raises(SnapshotAborted, match="out of patience") as caught:
            save(tmp_path / "s", dict(state), options)
    assert caught.value.stage == "stage"
    assert Host.get().resources.arena.lent_bytes == 0
    state["x"].fill_(5.0)
    assert save(tmp_path / "s", dict(state), options)["x"].unique().tolist() == [5.0]


def test_the_uploader_process_knows_no_cuda(tmp_path: Path) -> None:
    save(tmp_path / "s", {"x": torch.ones(4 * MIB, device="cuda")}, PROCESS)
    pid = find_uploader(Host.get()).pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libcuda" not in maps
    assert "libtorch" not in maps
