# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer, is killed in the middle of a snapshot, resumes, and compares.

Three runs, each a process of its own, of the same training on the text of the Python standard
library's docstrings:

1. straight: all steps, without interruption;
2. killed:   the same, until it sends itself SIGKILL while a snapshot is half stored;
3. resumed:  finds the newest committed snapshot, passes over the unfinished one, goes on.

The losses of 2 and 3 must equal those of 1 bit for bit, and so must the final weights. Exit code
0 if they do, 1 if not.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actorsnap import Options, PendingSnapshot, RNGState, Snapshot, StateDict, Stateful
from actorsnap.errors import NotASnapshot

# Small chunks, one at a time: a snapshot of tens of MiB then passes through enough states to be
# killed in. A real run keeps the defaults.
OPTIONS = Options(chunk_bytes=2 << 20, num_uploaders=1)
# All processes of the demo print times of one clock.
STARTED = float(os.environ.get("DEMO_STARTED", time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the training is."""

    steps: int = 60
    snapshot_every: int = 10
    kill_at: int = 40
    width: int = 160
    layers: int = 4
    buckets: int = 16384
    context: int = 96
    batch: int = 8


SIZES = {
    "demo": Size(),
    "small": Size(steps=12, snapshot_every=3, kill_at=9, width=64, layers=2, context=32, batch=4),
}


def say(who: str, text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {who:<9} {text}", flush=True)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


# -- the text and the model --------------------------------------------------------------------


def standard_library_text(limit_bytes: int = 400_000) -> Tensor:
    """The docstrings of this Python's standard library, as bytes."""
    pieces: list[str] = []
    size = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(source.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    pieces.append(text)
                    size += len(text)
        if size > limit_bytes:
            break
    data = "\n\n".join(pieces).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.reshape(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        deeper: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + deeper


class ByteTransformer(nn.Module):
    """Predicts the next byte from bytes, hashed pairs of bytes, and their positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.buckets = size.buckets
        self.bytes = nn.Embedding(256, size.width)
        self.pairs = nn.Embedding(size.buckets, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        previous = F.pad(tokens, (1, 0))[:, :-1]
        pairs = (previous * 256 + tokens) * 40503 % self.buckets
        places = torch.arange(tokens.shape[1])
        x = self.bytes(tokens) + self.pairs(pairs) + self.positions(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Training:
    """Everything that a run is made of; all of it is in ``app_state``."""

    def __init__(self, size: Size) -> None:
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(7)
        self.size = size
        self.text = standard_library_text()
        self.model = ByteTransformer(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / size.steps)
        )
        self.progress = StateDict(step=0, position=0)
        self.app_state: dict[str, Stateful] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "progress": self.progress,
            "rng": RNGState(),
        }

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next windows of the text; each begins at a random offset within its stride."""
        count, length = self.size.batch, self.size.context
        start: int = self.progress["position"]
        starts = (start + torch.arange(count) * length + torch.randint(length, (count,))).tolist()
        last = len(self.text) - length - 1
        windows = torch.stack([self.text[s % last :][: length + 1] for s in starts])
        self.progress["position"] = (start + count * length) % last
        return windows[:, :-1], windows[:, 1:]

    def step(self) -> float:
        inputs, targets = self.batch()
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.progress["step"] += 1
        return loss.item()

    def fingerprint(self) -> int:
        """CRC-32 of all weights."""
        crc = 0
        for parameter in self.model.parameters():
            crc = zlib.crc32(parameter.detach().numpy().data, crc)
        return crc


# -- one run, in a process of its own ----------------------------------------------------------


def snapshot_paths(folder: Path) -> list[Path]:
    """What looks like a snapshot in ``folder``, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


async def resume(who: str, training: Training, folder: Path) -> None:
    """Restores the newest committed snapshot in ``folder``."""
    for path in snapshot_paths(folder):
        begin = time.perf_counter()
        try:
            await Snapshot(str(path)).restore(training.app_state)
        except NotASnapshot as error:
            why = error.detail.partition(":")[0]
            say(who, f"{path.name} is skipped: it is {error.found}: {why}")
            continue
        elapsed = time.perf_counter() - begin
        say(who, f"{path.name} is committed: restored in {elapsed * 1e3:.0f} ms")
        return
    raise SystemExit(f"no committed snapshot in {folder}")


async def kill_in_the_middle(who: str, pending: PendingSnapshot) -> None:
    """Sends this process SIGKILL when part of the snapshot is stored, and not before."""
    async for now in pending.events():
        if 0 < now.stored_bytes < now.total_bytes:
            stored, total = mib(now.stored_bytes), mib(now.total_bytes)
            say(who, f"{stored} of {total} stored, nothing committed: SIGKILL")
            os.kill(os.getpid(), signal.SIGKILL)
    say(who, "the snapshot was faster than the signal; the next one will do")


async def run(who: str, size: Size, folder: Path, losses: Path, *, kill: bool) -> None:
    training = Training(size)
    if who == "resumed":
        await resume(who, training, folder)
    count = sum(p.numel() for p in training.model.parameters())
    first = training.progress["step"] + 1
    say(who, f"{count / 1e6:.1f} M parameters, {len(training.text):,} bytes of text, step {first}")
    pending: PendingSnapshot | None = None
    with losses.open("a") as log:
        while training.progress["step"] < size.steps:
            loss = training.step()
            step = training.progress["step"]
            log.write(json.dumps([step, loss.hex()]) + "\n")
            log.flush()
            if step % size.snapshot_every != 0:
                continue
            if pending is not None:
                await pending.wait()
            begin = time.perf_counter()
            path = folder / f"step-{step:05d}"
            pending = await Snapshot.async_take(str(path), training.app_state, options=OPTIONS)
            await pending.staged()
            blocked = time.perf_counter() - begin
            say(
                who,
                f"step {step:>3}, loss {loss:.4f}; {path.name} staged in {blocked * 1e3:.0f} ms",
            )
            if kill and step >= size.kill_at:
                await kill_in_the_middle(who, pending)
        if pending is not None:
            await pending.wait()
        log.write(json.dumps(["weights", training.fingerprint()]) + "\n")


# -- the three runs ----------------------------------------------------------------------------


def start(who: str, size: str, folder: Path, losses: Path, *, kill: bool = False) -> int:
    """Runs one training in a new process; returns its exit status."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--size", size, "--as", who]
    command += ["--folder", str(folder), "--losses", str(losses)] + ["--kill"] * kill
    # Threads that wait sleep instead of spinning: there may be fewer cores than threads.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "DEMO_STARTED": str(STARTED)}
    return subprocess.run(command, env=environment, check=False, timeout=300).returncode


def read(losses: Path) -> dict[str, str]:
    pairs = [json.loads(line) for line in losses.read_text().splitlines()]
    return {str(step): str(value) for step, value in pairs}


def folder_size(path: Path) -> str:
    files = [p for p in path.rglob("*") if p.is_file()]
    return f"{mib(sum(p.stat().st_size for p in files))} in {len(files)} files"


def demo(size_name: str) -> int:
    size = SIZES[size_name]
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as name:
        root = Path(name)
        say("demo", f"{size.steps} steps, a snapshot every {size.snapshot_every}, in {root}")
        if start("straight", size_name, root / "a", root / "a.log") != 0:
            return 1
        status = start("killed", size_name, root / "b", root / "b1.log", kill=True)
        if status != -signal.SIGKILL:
            say("demo", f"the second run should have died by SIGKILL, but ended with {status}")
            return 1
        for path in reversed(snapshot_paths(root / "b")):
            say("demo", f"left behind: {path.name}, {folder_size(path)}")
        if start("resumed", size_name, root / "b", root / "b2.log") != 0:
            return 1
        for path in reversed(snapshot_paths(root / "b")):
            say("demo", f"in the end: {path.name}, {folder_size(path)}")
        return compare(size, read(root / "a.log"), read(root / "b1.log"), read(root / "b2.log"))


def compare(
    size: Size, straight: dict[str, str], killed: dict[str, str], resumed: dict[str, str]
) -> int:
    """Prints the losses side by side; 0 if every one has the same bits."""
    print(f"\n{'step':>8}  {'straight':<22} {'killed':<22} {'resumed':<22}")
    steps = [str(n) for n in range(1, size.steps + 1)]
    wrong = 0
    for step in [*steps, "weights"]:
        others = [run[step] for run in (killed, resumed) if step in run]
        same = bool(others) and all(value == straight[step] for value in others)
        wrong += not same
        if same and step != "weights" and int(step) % max(1, size.steps // 12) != 0:
            continue
        row = "  ".join(f"{run.get(step, '-'):<21}" for run in (straight, killed, resumed))
        print(f"{step:>8}  {row} {'same bits' if same else 'DIFFERENT'}")
    first = min(int(step) for step in resumed if step != "weights")
    print()
    if wrong:
        say("demo", f"{wrong} of {len(steps) + 1} values differ")
        return 1
    say("demo", f"resumed at step {first}; all {len(steps)} losses and the final weights are equal")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--as", dest="who", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.who is None:
        return demo(args.size)
    asyncio.run(run(args.who, SIZES[args.size], args.folder, args.losses, kill=args.kill))
    return 0


if __name__ == "__main__":
    sys.exit(main())
