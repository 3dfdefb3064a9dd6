# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU: resumed bit for bit, by every way in, beside CUDA graphs, on a full device."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actorsnap import ModelState, Options, RNGState, StateDict, shutdown
from actorsnap.interop import dcp
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot
from tests.servers.base import free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).resolve().parents[2]
QUICK = Options(fsync=False)
WIDTH = 64


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    shutdown()


class Training:
    """A model with dropout and batch norm, in mixed precision, and all that its steps depend on."""

    def __init__(self, **flags: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)
        ).to("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **flags)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=3)
        self.app_state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "rng": RNGState(),
        }

    def step(self) -> str:
        """One step; returns the bits of its loss."""
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(torch.randn(32, WIDTH, device="cuda")).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return float(loss.detach()).hex()


@pytest.mark.parametrize(
    "flags",
    [{}, {"fused": True}, {"foreach": True}, {"capturable": True}],
    ids=["plain", "fused", "foreach", "capturable"],
)
def test_a_training_resumes_with_the_same_bits(tmp_path: Path, flags: dict[str, Any]) -> None:
    straight = Training(**flags)
    losses = []
    with CheckpointManager(
        tmp_path, straight.app_state, save=every.steps(3), keep=keep.last(2), options=QUICK
    ) as manager:
        for step in range(10):
            losses.append(straight.step())
            manager.maybe_save(step)
    resumed = Training(**flags)
    torch.rand(7, device="cuda")  # moves the generator
    with CheckpointManager(
        tmp_path, resumed.app_state, save=every.steps(3), options=QUICK
    ) as manager:
        assert manager.restore(6).step == 6
    assert [resumed.step() for _ in range(7, 10)] == losses[7:]
    for one, other in zip(
        straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
        assert other.is_cuda


def test_a_graph_that_was_captured_stays_valid(tmp_path: Path) -> None:
    """A restore writes into the same memory, which the graph's kernels know."""
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    inputs = torch.randn(8, WIDTH, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    state = {"model": model, "optimizer": optimizer}
    pending = Snapshot.async_take(tmp_path / "s", state, options=QUICK)
    for _ in range(3):
        graph.replay()
    pending.wait()
    expected = model.weight.detach().clone()
    graph.replay()
    assert not torch.equal(model.weight, expected)
    Snapshot(tmp_path / "s").restore(state)
    for _ in range(3):
        graph.replay()
    assert torch.equal(model.weight, expected)


def test_a_lazy_save_is_guarded_from_the_optimizer(tmp_path: Path) -> None:
    training = Training()
    training.step()
    expected = {name: value.cpu().clone() for name, value in training.model.state_dict().items()}
    state = {"train": ModelState(training.model, training.optimizer)}
    pending = Snapshot.async_take(tmp_path / "s", state, stage="lazy", options=QUICK)
    pending.guard(training.optimizer)
    for _ in range(3):
        training.step()
    pending.wait()
    fresh = Training()
    Snapshot(tmp_path / "s").restore({"train": ModelState(fresh.model, fresh.optimizer)})
    for name, value in fresh.model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name]), name


def test_between_the_devices(tmp_path: Path) -> None:
    value = torch.arange(3 << 20, dtype=torch.float32)
    Snapshot.take(tmp_path / "gpu", {"s": StateDict(x=value.cuda())}, options=QUICK)
    Snapshot.take(tmp_path / "cpu", {"s": StateDict(x=value)}, options=QUICK)
    for saved in ("gpu", "cpu"):
        for device in ("cuda", "cpu"):
            target = torch.zeros_like(value, device=device)
            Snapshot(tmp_path / saved).restore({"s": StateDict(x=target)})
            assert torch.equal(target.cpu(), value)
        assert Snapshot(tmp_path / saved).read_object("s/x").device.type == "cpu"


def test_dcp_saves_and_loads_tensors_of_the_gpu(tmp_path: Path) -> None:
    stock: Any = importlib.import_module("torch.distributed.checkpoint")
    warnings.filterwarnings("ignore", module=r"torch\.distributed")
    state: dict[str, Any] = {"x": torch.randn(1000, 100, device="cuda"), "n": 3}
    ours, theirs, beside = (tmp_path / name for name in ("ours", "theirs", "beside"))
    stock.save(state, storage_writer=dcp.FileSystemWriter(ours))
    stock.save(state, checkpoint_id=theirs)
    changed = {"x": state["x"].clone(), "n": 3}
    future = dcp.async_save(changed, checkpoint_id=beside)
    changed["x"].zero_()
    future.result()
    for path in (ours, theirs, beside):
        target: dict[str, Any] = {"x": torch.zeros(1000, 100, device="cuda"), "n": 0}
        stock.load(target, storage_reader=dcp.FileSystemReader(path))
        assert torch.equal(target["x"], state["x"])
        assert target["n"] == 3


def test_a_full_device_saves_without_slabs(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    state = {f"t{i}": torch.full((300 + i, 257), float(i), device="cuda") for i in range(100)}
    state["transposed"] = torch.ones(64, 32, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    kept = []
    try:
        for nbytes in (1 << 20, 1 << 16, 512):
            while True:
                try:
                    kept.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        Snapshot.async_take(tmp_path / "s", {"s": StateDict(state)}, options=QUICK).wait()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = Snapshot(tmp_path / "s").get_state_dict_for_key("s")
    for name, value in state.items():
        assert torch.equal(found[name], value.cpu()), name


@pytest.mark.parametrize(("saves", "restores"), [(1, 2), (2, 1), (2, 3)])
def test_fsdp_shards_of_the_gpu_are_resharded(tmp_path: Path, saves: int, restores: int) -> None:
    for what, num_ranks in (("save", saves), ("restore", restores)):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command += [str(num_ranks), "--master-addr", "127.0.0.1", "--master-port"]
        command += [str(free_port()), "-m", "tests.api.cuda_ranks", what, str(tmp_path / "s")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
