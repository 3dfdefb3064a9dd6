# SPDX-License-Identifier: Apache-2.0
"""Trains with a ``CheckpointManager``: resumes by itself, and keeps what a policy says.

    python examples/managed.py --folder runs/7
    torchrun --nproc-per-node 2 examples/managed.py --folder runs/7

trains, saves every few steps, and goes on from the newest whole snapshot when started again.
Without ``--folder`` the whole demo runs, in processes of its own:

1. straight: all steps, without interruption;
2. killed:   the same, until it sends itself SIGKILL with a save in flight;
3. resumed:  the same command as 2 again.

3 must end with the loss and the weights of 1, bit for bit. Exit code 0 if it does, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actorsnap import Options, RNGState, StateDict, Stateful
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager

# Small chunks, one at a time: a save of 15 MiB is then in flight for long enough to be killed in.
# A real run keeps the defaults.
OPTIONS = Options(chunk_bytes=2 << 20, num_uploaders=1)


class Training:
    """Everything that a run is made of; all of it is in ``app_state``."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7 + rank)
        self.num_ranks = num_ranks
        model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 64))
        self.model = nn.parallel.DistributedDataParallel(model) if num_ranks > 1 else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.progress = StateDict(samples=0, loss=0.0)
        self.app_state: dict[str, Stateful] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": self.progress,
            "rng": RNGState(),  # the batches and the dropout come from it
        }

    def step(self) -> float:
        """One step; returns the loss over the batches of all ranks."""
        inputs = torch.randn(32, 256)
        loss: Tensor = (self.model(inputs) - inputs[:, :64].sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress["samples"] += 32 * self.num_ranks
        mean = loss.detach() / self.num_ranks
        if self.num_ranks > 1:
            dist.all_reduce(mean)
        return mean.item()

    def fingerprint(self) -> int:
        """CRC-32 of all weights."""
        crc = 0
        for parameter in self.model.parameters():
            crc = zlib.crc32(parameter.detach().numpy().data, crc)
        return crc


def train(folder: str, num_steps: int, kill_at: int | None = None) -> None:
    """One run, on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    training = Training(rank, dist.get_world_size() if dist.is_initialized() else 1)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    with CheckpointManager(
        folder,
        training.app_state,
        save=every.steps(10) | every.last(),
        keep=keep.last(2) | keep.best("loss", "min"),
        replicated=["progress/**"],
        options=OPTIONS,
    ) as manager:
        found = manager.restore_latest()
        if found is None:
            say("nothing to resume: step 0")
        else:
            say(f"restored step {found.step}, {training.progress['samples']} samples")
            for url, why in found.skipped:
                say(f"skipped {url}: {why}")
        for step in range(found.step + 1 if found else 0, num_steps):
            loss = training.progress["loss"] = training.step()
            decision = manager.maybe_save(step, metrics={"loss": loss})
            if decision:
                say(f"step {step:>3}, loss {loss:.4f}: saves, {decision.reason}")
            if kill_at is not None and decision and step >= kill_at:
                say("a save is in flight: SIGKILL")
                os.kill(os.getpid(), signal.SIGKILL)
            if manager.should_stop:
                break
    say(f"kept: {', '.join(str(step) for step in manager.all_steps())}")
    say(f"the end: loss {training.progress['loss'].hex()}, weights {training.fingerprint():08x}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", help="where the snapshots are; without it the demo runs")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is None:
        return demo(args.steps)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    train(args.folder, args.steps, args.kill_at)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def demo(num_steps: int) -> int:
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as name:
        straight = start("straight", Path(name) / "a", num_steps)
        start("killed", Path(name) / "b", num_steps, kill_at=num_steps // 2)
        resumed = start("resumed", Path(name) / "b", num_steps)
        is_equal = straight[-1:] == resumed[-1:] and "the end" in straight[-1]
        print(f"\nresumed and straight are {'equal, bit for bit' if is_equal else 'DIFFERENT'}")
        return 0 if is_equal else 1


def start(who: str, folder: Path, num_steps: int, kill_at: int | None = None) -> list[str]:
    """Runs one training in a new process; returns what it prints."""
    print(f"\n{who}:", flush=True)
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(num_steps)]
    command += [] if kill_at is None else ["--kill-at", str(kill_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=300)
    expected = 0 if kill_at is None else -signal.SIGKILL
    lines = done.stdout.splitlines()
    print("\n".join(lines))
    if done.returncode != expected:
        raise SystemExit(f"{who} ended with {done.returncode}, not {expected}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
