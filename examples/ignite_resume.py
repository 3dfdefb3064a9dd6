# SPDX-License-Identifier: Apache-2.0
"""PyTorch-Ignite: a trainer that saves snapshots, is killed in the middle of a save, and resumes.

    pip install 'actorsnap[ignite]'
    python examples/ignite_resume.py --folder checkpoints

trains, keeps the two newest checkpoints, and goes on from the newest whole one when started again.
Without ``--folder`` the whole demo runs, in processes of its own:

1. straight: all steps, without interruption;
2. killed:   the same, until it sends itself SIGKILL when part of a checkpoint is stored;
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
from typing import Any

import torch
from torch import Tensor, nn

from actorsnap import Options

# Small chunks, one at a time: a save of 25 MiB is then in flight for long enough to be killed in.
# A real run keeps the defaults.
OPTIONS = Options(chunk_bytes=2 << 20, num_uploaders=1)


def train(folder: str, num_steps: int, kill_at: int | None) -> None:
    """One run."""
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, global_step_from_engine

    from actorsnap.interop.ignite import ActorsnapSaver

    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def step(engine: Any, batch: int) -> float:
        # A function of the iteration, so that runs can be compared bit for bit.
        generator = torch.Generator().manual_seed(engine.state.iteration)
        inputs = torch.randn(16, 256, generator=generator)
        loss: Tensor = (model(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    def kill(engine: Any) -> None:
        if kill_at is None or engine.state.iteration < kill_at or saver.pending is None:
            return
        for now in saver.pending.events():
            if 0 < now.stored_bytes < now.total_bytes:
                print(f"step {engine.state.iteration}: part of a checkpoint is stored: SIGKILL")
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = Engine(step)
    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "schedule": schedule}
    with ActorsnapSaver(folder, options=OPTIONS) as saver:
        checkpoint = Checkpoint(
            to_save,
            saver,
            n_saved=2,
            include_self=True,  # what n_saved counts
            global_step_transform=global_step_from_engine(trainer, Events.ITERATION_COMPLETED),
        )
        newest = saver.latest()
        if newest is None:
            print("nothing to resume")
        else:
            print(f"resumes from {newest}")
            Checkpoint.load_objects({**to_save, "checkpointer": checkpoint}, saver.load(newest))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), checkpoint)
        trainer.add_event_handler(Events.ITERATION_STARTED, kill)
        trainer.run(range(10), max_epochs=num_steps // 10)
    print(f"kept: {', '.join(sorted(os.listdir(folder)))}")
    loss = float(trainer.state.output or 0.0).hex()
    print(f"the end: step {trainer.state.iteration}, loss {loss}, weights {fingerprint(model):08x}")


def fingerprint(model: nn.Module) -> int:
    """CRC-32 of all weights."""
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().numpy().data, crc)
    return crc


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", help="where the checkpoints are; without it the demo runs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is None:
        return demo(args.steps)
    train(args.folder, args.steps, args.kill_at)
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
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(num_steps)]
    command += [] if kill_at is None else ["--kill-at", str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    expected = 0 if kill_at is None else -signal.SIGKILL
    lines = done.stdout.splitlines()
    skipped = [line for line in done.stderr.splitlines() if "is skipped" in line]
    print("\n".join([*map(os.path.basename, skipped), *lines]))
    if done.returncode != expected:
        raise SystemExit(f"{done.stderr}\n{who} ended with {done.returncode}, not {expected}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
