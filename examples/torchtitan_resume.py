# SPDX-License-Identifier: Apache-2.0
"""Trains with torchtitan's parts, and ``actorsnap.interop.torchtitan`` as its checkpoint manager.

    pip install 'actorsnap[torchtitan]'
    torchrun --nproc-per-node 2 examples/torchtitan_resume.py --folder runs/titan

trains with FSDP2 on CPU as ``torchtitan.trainer.Trainer`` does on accelerators: the same calls of
optimizers, schedulers, data loader and checkpoint manager, in the same order. Started again, it
goes on from the newest whole step. Without ``--folder`` the whole demo runs, each line a torchrun:

1. straight: all steps, without interruption;
2. killed:   the same, until rank 1 sends itself SIGKILL while a snapshot is in flight;
3. resumed:  the same command as 2 again.

3 must end with the loss, weights and optimizer of 1, bit for bit. Exit code 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from actorsnap.interop.torchtitan import CheckpointManager

WIDTH, HIDDEN, BATCH = 256, 8192, 8
INTERVAL = 5
# Small chunks, one at a time: a save is then in flight for long enough to be killed in. A real run
# keeps the defaults.
SLOWED = {"ACTORSNAP_CHUNK_BYTES": "2097152", "ACTORSNAP_NUM_UPLOADERS": "1"}


class Samples(IterableDataset[Tensor]):
    """Random samples of this rank, which resume where they were."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.randn(WIDTH, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Trainer:
    """The part of torchtitan's trainer that a checkpoint manager sees."""

    def __init__(self, folder: str, num_steps: int) -> None:
        torch.manual_seed(7)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (num_ranks,))
        self.model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
        for part in (*self.model, self.model):
            fully_shard(part, mesh=mesh)
        optimizer = default_adamw(lr=1e-3)
        optimizer.implementation = "foreach"
        self.optimizers = optimizer.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=5)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=num_steps)
        self.dataloader = ParallelAwareDataloader(Samples(rank), rank, num_ranks, batch_size=BATCH)
        self.num_steps = num_steps
        self.step = 0
        self.loss = 0.0
        # The one thing to change: torchtitan's own default is its CheckpointManager.Config.
        config = CheckpointManager.Config(
            enable=True,
            folder="checkpoint",
            interval=INTERVAL,
            keep_latest_k=2,
            async_mode="async_with_pinned_mem",
            last_save_model_only=False,
        )
        self.checkpointer = config.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.loss = state["step"], state["loss"]

    def train(self, kill_at: int | None) -> None:
        self.checkpointer.load()
        say("nothing to resume" if self.step == 0 else f"resumed: step {self.step}")
        batches = iter(self.dataloader)
        while self.step < self.num_steps:
            self.step += 1
            inputs = next(batches)
            loss = (self.model(inputs) - inputs.sin()).square().mean()
            self.optimizers.zero_grad()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.loss = loss.item()
            if self.checkpointer.save(self.step, last_step=self.step == self.num_steps):
                say(f"step {self.step:>3}, loss {self.loss:.4f}: saves")
                if self.step == kill_at and dist.get_rank() == 1:
                    self.die_in_save()
        self.checkpointer.close()
        crc = 0
        for name, value in [
            *self.model.state_dict().items(),
            *self.optimizers.state_dict().items(),
        ]:
            if isinstance(value, Tensor):
                whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
                crc = zlib.crc32(whole.detach().numpy().tobytes(), zlib.crc32(name.encode(), crc))
        say(f"the end: loss {self.loss.hex()}, weights and optimizer {crc:08x}")

    def die_in_save(self) -> None:
        """Sends this rank SIGKILL once a part of the snapshot is stored."""
        folder = Path(self.checkpointer.folder) / f"step-{self.step}"
        while not self.checkpointer.save_future.done() and not [*folder.rglob("*")]:
            pass
        print(f"rank 1, {folder.name} is half stored: SIGKILL", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def demo(num_steps: int) -> int:
    kill_at = num_steps // 2 // INTERVAL * INTERVAL
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as name:
        straight = start("straight", Path(name) / "a", num_steps)
        start("killed", Path(name) / "b", num_steps, kill_at=kill_at)
        print("\nleft:", ", ".join(left(Path(name) / "b" / "checkpoint")))
        resumed = start("resumed", Path(name) / "b", num_steps)
        is_equal = straight[-1:] == resumed[-1:] and "the end" in straight[-1]
        is_equal = is_equal and f"resumed: step {kill_at - INTERVAL}" in resumed
        print(f"\nresumed and straight are {'equal, bit for bit' if is_equal else 'DIFFERENT'}")
        return 0 if is_equal else 1


def left(folder: Path) -> list[str]:
    return [
        f"{path.name} ({'committed' if (path / 'actorsnap.json').exists() else 'unfinished'})"
        for path in sorted(folder.iterdir(), key=lambda path: int(path.name.split("-")[1]))
    ]


def start(who: str, folder: Path, num_steps: int, kill_at: int | None = None) -> list[str]:
    """Runs one training by torchrun; returns what it prints."""
    print(f"\n{who}:", flush=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(port), __file__, "--folder", str(folder)]
    command += ["--steps", str(num_steps)] + (
        [] if kill_at is None else ["--kill-at", str(kill_at)]
    )
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **SLOWED, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    print(done.stdout, end="", flush=True)
    if (done.returncode == 0) != (kill_at is None):
        print(done.stderr, file=sys.stderr)
        sys.exit(f"{who} ended with {done.returncode}")
    return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", help="where the checkpoints are; without it the demo runs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is None:
        return demo(args.steps)
    dist.init_process_group("gloo")
    Trainer(args.folder, args.steps).train(args.kill_at)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
