# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.torchtitan`` with torchtitan itself, on CPU."""

from __future__ import annotations

import concurrent.futures
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from actorsnap.errors import NoValidSnapshot
from actorsnap.sync import Snapshot
from tests.worlds import ROOT

pytest.importorskip("torchtitan")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
]

Manager = Callable[..., Any]


class Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Adapter:
    """Names the model as Hugging Face would."""

    fqn_to_index_mapping = None
    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in state.items()}


class Run:
    """A run's parts, as torchtitan's trainer has them, and its manager."""

    def __init__(self, dump: Path, seed: int = 0, **config: Any) -> None:
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        from actorsnap.interop.torchtitan import CheckpointManager

        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        settings = default_adamw(lr=0.1)
        settings.implementation = "foreach"
        self.optimizers = settings.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(
            optimizers=self.optimizers, training_steps=50
        )
        self.progress = Progress()
        settled = {"interval": 1, "keep_latest_k": 0, "enable": True} | config
        self.manager = CheckpointManager.Config(**settled).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=Adapter(),
            base_folder=str(dump),
        )

    def train(self, num_steps: int, last: int | None = None) -> None:
        for _ in range(num_steps):
            self.progress.step += 1
            self.model(torch.ones(2, 8)).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.manager.save(self.progress.step, last_step=self.progress.step == last)

    def values(self) -> dict[str, Any]:
        optimizer = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.optimizers.state_dict().items()
        }
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        schedulers = self.schedulers.state_dict()
        return {**model, **optimizer, **schedulers, "step": self.progress.step}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """torchtitan asks for its rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    return lambda: caplog.text


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_run_resumes_as_it_was(tmp_path: Path, mode: str) -> None:
    one = Run(tmp_path, async_mode=mode)
    assert not one.manager.load()
    one.train(3)
    saved = one.values()
    one.manager.close()
    other = Run(tmp_path, seed=1, async_mode=mode)
    assert other.manager.load()
    assert same(other.values(), saved)
    other.train(2)
    other.manager.close()
    one.train(0)
    assert [path.name for path in sorted((tmp_path / "checkpoint").iterdir())] == [
        f"step-{step}" for step in range(1, 6)
    ]
    snapshot = Snapshot(tmp_path / "checkpoint" / "step-3")
    assert snapshot.step == 3
    assert snapshot.verify("full").ok


def test_a_lazy_save_has_the_values_from_before_the_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.train(2)
    before = run.values()
    run.progress.step += 1
    run.manager.save(3)
    lazy = run.manager.staging_future._save.fence.lazy
    assert len(lazy._tensors) == 4 + 4 * 3  # weights, and AdamW's states
    run.train(1)
    run.manager.maybe_wait_for_saving()
    other = Run(tmp_path, seed=1)
    other.manager.load(step=3)
    assert same(other.values(), {**before, "step": 3})


def test_a_damaged_or_unfinished_step_is_passed_over(
    tmp_path: Path, logged: Callable[[], str]
) -> None:
    run = Run(tmp_path)
    run.train(3)
    folder = tmp_path / "checkpoint"
    (folder / "step-9").mkdir()
    (folder / "step-9" / ".metadata").write_bytes(b"")  # torchtitan's own manager would take it
    for path in (folder / "step-3").rglob("*"):
        if path.is_file() and path.name != "actorsnap.json":
            os.truncate(path, path.stat().st_size // 2)
    other = Run(tmp_path)
    assert other.manager.load()
    assert other.progress.step == 2
    assert "step 2 is loaded, because" in logged()
    for step in (1, 2):
        for path in (folder / f"step-{step}").rglob("*"):
            if path.is_file() and path.name != "actorsnap.json":
                path.unlink()
    with pytest.raises(NoValidSnapshot, match=r"(?s)step-3.*step-2.*step-1"):
        Run(tmp_path).manager.load()


def test_retention_keeps_whole_snapshots_and_foreign_folders(
    tmp_path: Path, logged: Callable[[], str]
) -> None:
    folder = tmp_path / "checkpoint"
    run = Run(tmp_path)
    run.train(3)
    for path in (folder / "step-3").rglob("*"):
        if path.is_file() and path.name != "actorsnap.json":
            path.unlink()
    (folder / "step-0").mkdir()
    (folder / "step-0" / "notes.txt").write_text("mine")
    run = Run(tmp_path, keep_latest_k=2, async_mode="async")
    run.manager.load()
    run.progress.step = 3
    run.train(1)
    run.manager.close()
    # 4 and 2 are whole; 3 is damaged, and does not count.
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-0",
        "step-2",
        "step-3",
        "step-4",
    ]
    assert "step-3 is damaged" in logged()
    assert "is not deleted" not in logged()
    assert (folder / "step-0" / "notes.txt").exists()


def test_folders_of_the_user_stay_and_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run = Run(tmp_path, keep_latest_k=2)
    run.train(2)
    shutil.copytree(folder / "step-1", folder / "step-1-best")
    shutil.copytree(folder / "step-2", folder / "step-20.bak")
    run.train(3)
    run.manager.close()
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"step-1-best", "step-20.bak", "step-4", "step-5"}
    other = Run(tmp_path)
    assert other.manager.load()
    assert other.progress.step == 5


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_the_newest_of_a_run_that_ended_stay(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "checkpoint"
    run = Run(tmp_path, keep_latest_k=2, async_mode=mode)
    run.train(4, last=4)
    run.manager.close()
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4"]
    run = Run(tmp_path, load_only=True, keep_latest_k=2)
    shutil.copytree(folder / "step-4", folder / "step-9")
    run.manager.load(step=3)
    run.manager.close()
    assert len([*folder.iterdir()]) == 3


@pytest.mark.parametrize("has_manifest", [False, True])
def test_what_a_killed_job_left_goes_with_older_steps(tmp_path: Path, has_manifest: bool) -> None:
    folder = tmp_path / "checkpoint"
    code = f"""
from actorsnap import StateDict
from actorsnap.sync import Snapshot
Snapshot.take({str(folder / "step-1")!r}, {{"state": StateDict(x=1)}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    (folder / "step-1" / "actorsnap.json").unlink()
    if not has_manifest:
        (manifest,) = folder.rglob("manifest/0.json")
        manifest.unlink()
        (manifest.parents[1] / "data").mkdir()
        (manifest.parents[1] / "data" / "0-0.safetensors").write_bytes(b"some")
    run = Run(tmp_path, keep_latest_k=2)
    run.progress.step = 1
    run.train(3)
    run.manager.close()
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_after_a_rewind_the_newest_by_time_stay(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "checkpoint"
    Run(tmp_path).train(6)
    run = Run(tmp_path, keep_latest_k=2, async_mode=mode)
    run.manager.load(step=1)
    for step in (2, 3):  # in place of older ones
        run.train(1)
        run.manager.maybe_wait_for_saving()
        run.manager._wait_for_purge()
        assert Snapshot(folder / f"step-{step}").verify("full").ok
    run.manager.close()
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"step-2", "step-3", "step-5", "step-6"}
    run.manager.save(4)  # as torchtitan's manager does, also after close()


def test_a_run_continues_from_torchtitans_own_checkpoints(
    tmp_path: Path,
) -> None:
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    run = Run(tmp_path)
    stock = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0).build(
        dataloader=None,
        model_parts=[run.model],
        optimizers=run.optimizers,
        lr_schedulers=run.schedulers,
        states={"train_state": run.progress},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    run.manager = stock
    run.train(2)
    assert (tmp_path / "checkpoint" / "step-2" / ".metadata").exists()
    other = Run(tmp_path, seed=1, keep_latest_k=2)
    assert other.manager.load()
    assert same(other.values(), run.values())
    other.train(3)
    other.manager.close()
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {"step-1", "step-2", "step-4", "step-5"}
    assert Snapshot(tmp_path / "checkpoint" / "step-4").verify("full").ok
    # A fresh run takes the model alone from there.
    fresh = Run(
        tmp_path, 2, folder="new", initial_load_path=str(tmp_path / "checkpoint" / "step-2")
    )
    assert fresh.manager.load()
    stored = Snapshot(tmp_path / "checkpoint" / "step-2").read_object("model/0.weight")
    assert torch.equal(fresh.model[0].weight, stored)
    assert fresh.progress.step == 0


def test_what_is_excluded_stays(tmp_path: Path) -> None:
    Run(tmp_path).train(2)
    run = Run(tmp_path, seed=1, exclude_from_loading=["lr_scheduler", "train_state"])
    assert run.manager.load()
    assert (run.progress.step, run.schedulers.state_dict()) == (0, {"last_epoch": 0})
    assert run.optimizers.state_dict()["state.0.weight.step"] == 2


def test_the_last_save_is_of_the_model_in_another_dtype(tmp_path: Path) -> None:
    run = Run(tmp_path, interval=10, last_save_model_only=True, export_dtype="bfloat16")
    run.train(2, last=2)
    snapshot = Snapshot(tmp_path / "checkpoint" / "step-2")
    weight = snapshot.read_object("dcp/0.weight")
    assert torch.equal(weight, run.model[0].weight.bfloat16())
    assert {path.split("/")[1] for path in snapshot.get_manifest()} == {"dcp"}


def test_hugging_face_both_ways(tmp_path: Path) -> None:
    run = Run(tmp_path, last_save_in_hf=True, interval=10)
    run.train(1, last=1)
    exported = tmp_path / "checkpoint" / "step-1"
    assert [*exported.glob("*.safetensors")]
    other = Run(tmp_path, 1, folder="new", initial_load_path=str(exported), initial_load_in_hf=True)
    assert other.manager.load()
    assert torch.equal(other.model[1].bias, run.model[1].bias)
    assert torch.equal(other.model[0].weight, run.model[0].weight)


def test_a_failed_save_is_raised_by_the_next_and_logged_by_close(
    tmp_path: Path, logged: Callable[[], str]
) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    folder = tmp_path / "checkpoint"
    run = Run(tmp_path, async_mode="async")
    run.train(1)
    run.manager.maybe_wait_for_saving()
    (folder / "step-2").write_text("in the way")
    with pytest.raises(CheckpointException, match="step-2"):
        run.train(2)
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.manager.load()
    run.train(1)
    run.manager.close()
    assert "the last save failed" in logged()
    assert Snapshot(folder / "step-1").verify("full").ok


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_run_goes_on_after_a_failed_save(tmp_path: Path, mode: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    run = Run(tmp_path, async_mode=mode)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        run.train(1)
        concurrent.futures.wait([run.manager.save_future])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.manager.maybe_wait_for_staging()
    with pytest.raises(CheckpointException, match="File too large"):
        run.manager.save(3)
    run.train(2)
    run.manager.close()
    names = [f"step-{step}" for step in (1, 3, 4)]
    assert all(Snapshot(tmp_path / "checkpoint" / name).verify("full").ok for name in names)


def test_torchft_saves_the_loader_of_every_replica(tmp_path: Path) -> None:
    from actorsnap.interop.torchft import TorchFTCheckpointManager

    class Replica:
        """As much of a ``torchft.Manager`` as checkpoints need."""

        def participating_rank(self) -> int:
            return int(replica.replica_id)

        def set_state_dict_fns(self, *functions: Any) -> None:
            pass

    def manager(run: Run) -> Any:
        vars(run.optimizers)["init_cache_state_dict"] = lambda: None
        return TorchFTCheckpointManager.Config(enable=True, interval=1).build(
            dataloader=loader,
            model_parts=[run.model],
            optimizers=run.optimizers,
            lr_schedulers=run.schedulers,
            states={"train_state": run.progress},
            sd_adapter=None,
            base_folder=str(tmp_path),
            ft_manager=replica,
        )

    loader = Progress()
    replica = SimpleNamespace(enabled=True, replica_id=0, manager=Replica())
    run = Run(tmp_path, enable=False)
    run.manager = manager(run)
    run.train(1)
    loader.step, replica.replica_id = 7, 1
    other = Run(tmp_path, enable=False)
    other.manager = manager(other)
    other.progress.step = 4
    assert not other.manager.save(5)
    other.manager.close()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        *("ft-replicat-0", "ft-replicat-1", "step-1")
    ]
    loader.step = 0
    other = Run(tmp_path, seed=1, enable=False)
    other.manager = manager(other)
    assert other.manager.load()
    assert loader.step == 7
    assert same(other.values(), run.values())
    run.manager.close()


def test_the_example_of_two_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "torchtitan_resume.py")],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step-10 is half stored: SIGKILL" in done.stdout
    assert "left: step-5 (committed), step-10 (unfinished)" in done.stdout
    assert "resumed: step 5" in done.stdout
    assert "resumed and straight are equal, bit for bit" in done.stdout
