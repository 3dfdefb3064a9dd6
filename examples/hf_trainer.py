# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny Llama with Hugging Face's Trainer, is killed in the middle of a save, and resumes.

    python examples/hf_trainer.py

needs ``pip install 'actorsnap[transformers]'``, and no GPU. Three runs, in processes of their own:

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
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from actorsnap import Options
from actorsnap.interop.transformers import ActorsnapTrainer

# Small chunks, one at a time: a save of 20 MiB is then in flight for long enough to be killed in.
# A real run keeps the defaults.
OPTIONS = Options(chunk_bytes=2 << 20, num_uploaders=1)


def tiny_llama() -> Any:
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_dropout=0.1,  # draws random numbers
    )
    torch.manual_seed(7)
    return LlamaForCausalLM(config)


def texts(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Counts upwards from random numbers."""
    starts = torch.randint(2000, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in starts + torch.arange(16)]


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints losses, and kills the run."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            print(f"step {state.global_step:>2}, loss {float(logs['loss']).hex()}", flush=True)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.kill_at:
            print("a save is in flight: SIGKILL", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, num_steps: int, kill_at: int | None) -> None:
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        folder,
        max_steps=num_steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=5,
        save_total_limit=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = ActorsnapTrainer(
        model=tiny_llama(),
        args=arguments,
        train_dataset=texts(),
        callbacks=[Report(kill_at)],
        snapshot_options=OPTIONS,
    )
    # The same program starts and resumes.
    found = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    print(f"resumes from: {found and os.path.basename(found)}", flush=True)
    trainer.train(resume_from_checkpoint=found)
    crc = 0
    for parameter in trainer.model.parameters():
        crc = zlib.crc32(parameter.detach().numpy().data, crc)
    print(f"kept: {', '.join(sorted(os.listdir(folder), key=len))}")
    print(f"the end: weights {crc:08x}")


def demo(num_steps: int) -> int:
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as name:
        straight = start("straight", Path(name) / "a", num_steps)
        start("killed", Path(name) / "b", num_steps, kill_at=num_steps // 2 // 5 * 5)
        print("left behind:", ", ".join(sorted(path.name for path in (Path(name) / "b").iterdir())))
        resumed = start("resumed", Path(name) / "b", num_steps)
        is_equal = straight[-3:] == resumed[-3:] and "the end" in straight[-1]
        print(f"\nresumed and straight are {'equal, bit for bit' if is_equal else 'DIFFERENT'}")
        return 0 if is_equal else 1


def start(who: str, folder: Path, num_steps: int, kill_at: int | None = None) -> list[str]:
    """Runs one training in a new process; returns what it prints."""
    print(f"\n{who}:", flush=True)
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(num_steps)]
    command += [] if kill_at is None else ["--kill-at", str(kill_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=300)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("{")]
    print("\n".join(lines))
    expected = 0 if kill_at is None else -signal.SIGKILL
    if done.returncode != expected:
        raise SystemExit(f"{who} ended with {done.returncode}, not {expected}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", help="TrainingArguments.output_dir; without it the demo runs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is None:
        return demo(args.steps)
    train(args.folder, args.steps, args.kill_at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
