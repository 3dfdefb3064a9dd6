# SPDX-License-Identifier: Apache-2.0
"""Lightning: a ``Trainer`` that saves snapshots, is killed in the middle of a save, and resumes.

    pip install 'actorsnap[lightning]'
    python examples/lightning_resume.py --folder checkpoints
    python examples/lightning_resume.py --folder checkpoints --devices 2

trains, and goes on from the newest whole checkpoint when started again. Without ``--folder`` the
whole demo runs, in processes of its own:

1. straight: all steps, without interruption;
2. killed:   the same, until it sends itself SIGKILL when part of a checkpoint is stored;
3. resumed:  the same command as 2 again.

3 must end with the loss and the weights of 1, bit for bit. Exit code 0 if it does, 1 if not.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actorsnap import Options

# Small chunks, one at a time: a save of 25 MiB is then in flight for long enough to be killed in.
# A real run keeps the defaults.
OPTIONS = Options(chunk_bytes=2 << 20, num_uploaders=1)


def train(folder: str, num_steps: int, num_devices: int, kill_at: int | None) -> None:
    """One run. With several devices, Lightning starts the other processes."""
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from actorsnap.interop.lightning import ActorsnapCheckpointIO, latest

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 4096) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 256))
            self.last_loss = torch.zeros(())

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            # A function of the step and the rank, so that runs can be compared bit for bit.
            generator = torch.Generator().manual_seed(1000 * self.global_step + self.global_rank)
            inputs = torch.randn(16, 256, generator=generator)
            loss: Tensor = (self.layers(inputs) - inputs.sin()).square().mean()
            self.last_loss = loss.detach()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Kill(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if kill_at is None or trainer.global_step < kill_at or checkpoint_io.pending is None:
                return
            for now in checkpoint_io.pending.events():
                if 0 < now.stored_bytes < now.total_bytes:
                    print(f"step {trainer.global_step}: part of a checkpoint is stored: SIGKILL")
                    sys.stdout.flush()
                    os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    torch.manual_seed(7)
    checkpoint_io = ActorsnapCheckpointIO(options=OPTIONS)
    found = latest(folder) if os.path.isdir(folder) else None
    trainer = lightning.Trainer(
        max_steps=num_steps,
        accelerator="cpu",
        devices=num_devices,
        strategy="ddp" if num_devices > 1 else "auto",
        plugins=[checkpoint_io],
        callbacks=[
            ModelCheckpoint(folder, monitor="loss", every_n_train_steps=5, save_top_k=2),
            ModelCheckpoint(folder, "newest-{step}", every_n_train_steps=5),
            Kill(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    if trainer.is_global_zero:
        print(f"resumes from {os.path.basename(found)}" if found else "nothing to resume")
    batches: Any = torch.utils.data.DataLoader(torch.arange(10 * num_devices))  # type: ignore[arg-type]
    trainer.fit(model, batches, ckpt_path=found)
    if trainer.is_global_zero:
        print(f"kept: {', '.join(sorted(os.listdir(folder)))}")
        loss, weights = float(model.last_loss).hex(), fingerprint(model)
        print(f"the end: step {num_steps}, loss {loss}, weights {weights:08x}")


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
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is None:
        return demo(args.steps, args.devices)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train(args.folder, args.steps, args.devices, args.kill_at)
    return 0


def demo(num_steps: int, num_devices: int) -> int:
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as name:
        straight = start("straight", Path(name) / "a", num_steps, num_devices)
        start("killed", Path(name) / "b", num_steps, num_devices, kill_at=num_steps // 2)
        resumed = start("resumed", Path(name) / "b", num_steps, num_devices)
        is_equal = straight[-1:] == resumed[-1:] and "the end" in straight[-1]
        print(f"\nresumed and straight are {'equal, bit for bit' if is_equal else 'DIFFERENT'}")
        return 0 if is_equal else 1


def start(
    who: str, folder: Path, num_steps: int, num_devices: int, kill_at: int | None = None
) -> list[str]:
    """Runs one training in a new process; returns what it prints."""
    print(f"\n{who}:", flush=True)
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(num_steps)]
    command += ["--devices", str(num_devices)]
    command += [] if kill_at is None else ["--kill-at", str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    expected = 0 if kill_at is None else -signal.SIGKILL
    lines = done.stdout.splitlines()
    skipped = [line for line in done.stderr.splitlines() if "is skipped" in line]
    print("\n".join([*dict.fromkeys(map(os.path.basename, skipped)), *lines]))
    if done.returncode != expected:
        raise SystemExit(f"{done.stderr}\n{who} ended with {done.returncode}, not {expected}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
