# SPDX-License-Identifier: Apache-2.0
"""Trains with Hugging Face's Accelerate, is killed in the middle of a save, and resumes.

    python examples/accelerate_resume.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_resume.py --folder runs/7

needs ``pip install 'actorsnap[accelerate]'``, and no GPU. Without ``--folder`` the whole demo runs,
in processes of their own:

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
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from actorsnap import Options, StateDict
from actorsnap.errors import NotASnapshot
from actorsnap.interop.accelerate import async_save_state, load_state
from actorsnap.sync import PendingSnapshot

# Small chunks, one at a time: a save of 15 MiB is then in flight for long enough to be killed in.
# A real run keeps the defaults.
OPTIONS = Options(chunk_bytes=2 << 20, num_uploaders=1)


def train(folder: str, num_epochs: int, kill_at: int | None) -> None:
    set_seed(7)
    torch.set_num_threads(1)
    # The order of each epoch then depends on the seed and the epoch alone; and with a generator of
    # its own, the loader draws nothing from the one that dropout uses, so skipping is exact.
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    inputs = torch.randn(320, 256)
    dataset = TensorDataset(inputs, inputs[:, :64].sin())
    loader = DataLoader(dataset, batch_size=32, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = StateDict(epoch=0, batches=0)
    accelerator.register_for_checkpointing(progress)
    try:
        load_state(accelerator, f"{folder}/latest")
        accelerator.print(f"resumes: epoch {progress['epoch']}, batch {progress['batches']}")
    except NotASnapshot:
        accelerator.print("nothing to resume")

    pending: PendingSnapshot | None = None
    while progress["epoch"] < num_epochs:
        loader.set_epoch(progress["epoch"])
        for inputs, targets in accelerator.skip_first_batches(loader, progress["batches"]):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress["batches"] += 1
            if progress["batches"] % 5 != 3:
                continue
            if pending is not None:
                pending.wait()
            pending = async_save_state(accelerator, f"{folder}/latest", options=OPTIONS)
            accelerator.print(f"epoch {progress['epoch']}, loss {loss.item():.6f}: saves")
            if kill_at is not None and progress["epoch"] >= kill_at:
                accelerator.print("a save is in flight: SIGKILL", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        progress.update(epoch=progress["epoch"] + 1, batches=0)
    if pending is not None:
        pending.wait()
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().numpy().data, crc)
    accelerator.print(f"the end: loss {loss.item().hex()}, weights {crc:08x}")
    accelerator.end_training()


def demo(num_epochs: int) -> int:
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as name:
        straight = start("straight", Path(name) / "a", num_epochs)
        start("killed", Path(name) / "b", num_epochs, kill_at=num_epochs // 2)
        resumed = start("resumed", Path(name) / "b", num_epochs)
        is_equal = straight[-1:] == resumed[-1:] and "the end" in straight[-1]
        print(f"\nresumed and straight are {'equal, bit for bit' if is_equal else 'DIFFERENT'}")
        return 0 if is_equal else 1


def start(who: str, folder: Path, num_epochs: int, kill_at: int | None = None) -> list[str]:
    """Runs one training in a new process; returns what it prints."""
    print(f"\n{who}:", flush=True)
    command = [sys.executable, __file__, "--folder", str(folder), "--epochs", str(num_epochs)]
    command += [] if kill_at is None else ["--kill-at", str(kill_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    print("\n".join(lines))
    expected = 0 if kill_at is None else -signal.SIGKILL
    if done.returncode != expected:
        raise SystemExit(f"{who} ended with {done.returncode}, not {expected}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", help="where the snapshot is; without it the demo runs")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is None:
        return demo(args.epochs)
    train(args.folder, args.epochs, args.kill_at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
