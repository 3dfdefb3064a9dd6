# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer with FSDP2 on 2 ranks; resumes it on 1 and on 3.

    torchrun --nproc-per-node 2 examples/fsdp_resume.py --folder ckpt

trains, takes a snapshot every few steps, and goes on from the newest one when started again, with
as many ranks as you like. Without torchrun the whole demo runs, each line a torchrun of its own:

1. straight: 2 ranks, all steps, without interruption;
2. killed:   2 ranks, until one of them sends itself SIGKILL while a snapshot is half stored;
3. on 1, on 3: from what 2 has left behind, with 1 rank and with 3.

What is restored must have the bits of 1 at that step: weights and the optimizer's state. So must
the losses of 2, which adds the same numbers in the same order. Those of 3 may not have: every rank
sums over its part of the batch before the ranks' sums are added, and floating-point sums depend
on the order. The batch of a step is the same however many ranks divide it, so the losses differ
by rounding only, which must stay below ``TOLERANCE``. Exit code 0 if all that holds, 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from actorsnap import ModelState, Options, PendingSnapshot, StateDict, Stateful
from actorsnap.manager import CheckpointManager, every, keep

# Small chunks, one at a time: a snapshot of tens of MiB then passes through enough states to be
# killed in. A real run keeps the defaults.
OPTIONS = Options(chunk_bytes=2 << 20, num_uploaders=1)
TOLERANCE = 1e-5
LIMIT_S = 240.0
WIDTH, LAYERS, BUCKETS, CONTEXT = 96, 2, 16384, 64
BATCH = 12  # windows of text, in all ranks together: divisible by 1, 2, 3
# All processes of the demo print times of one clock.
STARTED = float(os.environ.get("DEMO_STARTED", time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the training is."""

    steps: int
    snapshot_every: int
    kill_at: int


SIZES = {
    "demo": Size(steps=60, snapshot_every=10, kill_at=40),
    "small": Size(steps=9, snapshot_every=3, kill_at=6),
}


def say(who: str, text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {who:<9} {text}", flush=True)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


# -- the training --------------------------------------------------------------------------------


class ByteTransformer(nn.Module):
    """Predicts the next byte from bytes, hashed pairs of bytes, and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.pairs = nn.Embedding(BUCKETS, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, WIDTH // 32, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        previous = F.pad(tokens, (1, 0))[:, :-1]
        pairs = (previous * 256 + tokens) * 40503 % BUCKETS
        x = self.bytes(tokens) + self.pairs(pairs) + self.positions(torch.arange(CONTEXT))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x.flatten(0, 1))
        return logits


class Training:
    """Everything that a run is made of; all of it is in ``app_state``. It learns the source of a
    module of the standard library."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        source = inspect.getsource(argparse).encode()
        self.text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
        self.model = ByteTransformer()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.progress = StateDict(step=0)
        self.app_state: dict[str, Stateful] = {
            "training": ModelState(self.model, self.optimizer),
            "progress": self.progress,
        }

    def batch(self) -> tuple[Tensor, Tensor]:
        """This rank's windows of the step's ``BATCH``: (BATCH / ranks, CONTEXT) each."""
        draws = torch.Generator().manual_seed(self.progress["step"])
        starts = torch.randint(len(self.text) - CONTEXT - 1, (BATCH,), generator=draws).tolist()
        own = starts[dist.get_rank() :: dist.get_world_size()]
        windows = torch.stack([self.text[start:][: CONTEXT + 1] for start in own])
        return windows[:, :-1], windows[:, 1:]

    def step(self) -> float:
        """One step; returns the loss over the batch of all ranks."""
        inputs, targets = self.batch()
        loss = F.cross_entropy(self.model(inputs), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress["step"] += 1
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def fingerprint(self) -> int:
        """CRC-32 of weights and optimizer state, put together from all ranks. Collective."""
        crc = 0
        parameters = self.model.state_dict()
        for value in [*parameters.values(), *self.optimizer_tensors()]:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            crc = zlib.crc32(whole.detach().numpy().data, crc)
        return crc

    def optimizer_tensors(self) -> list[Any]:
        states = self.optimizer.state_dict()["state"]
        return [
            states[number][name] for number in sorted(states) for name in sorted(states[number])
        ]


# -- one run: what each rank does ----------------------------------------------------------------


def name_of(step: int) -> str:
    """The name of a snapshot in the log."""
    return f"step-{step:05d}"


class Log:
    """Losses and fingerprints, written by rank 0."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a") if dist.get_rank() == 0 else None

    def write(self, name: str, value: float | int) -> None:
        if self._file is not None:
            text = value.hex() if isinstance(value, float) else f"{value:08x}"
            self._file.write(json.dumps([name, text]) + "\n")
            self._file.flush()


class Run:
    """One rank of one run."""

    def __init__(self, who: str, size: Size, folder: Path, *, kill: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.who = who
        self.size = size
        self.kill = kill
        self.training = Training()
        # Every rank makes the same. The step counter is the same on all of them; of the rest
        # actorsnap knows which rank holds what.
        self.manager = CheckpointManager(
            folder,
            self.training.app_state,
            save=every.steps(size.snapshot_every),
            keep=keep.all(),
            replicated=["progress/**"],
            options=OPTIONS,
        )
        self.log = Log(folder / "log.jsonl")

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            say(self.who, text)

    async def resume(self) -> None:
        """Restores the newest committed snapshot, if there is one."""
        begin = time.perf_counter()
        found = await self.manager.restore_latest()
        if found is None:
            return
        elapsed = time.perf_counter() - begin
        for info in await self.manager.steps(all=True):
            if info.step > found.step:
                self.say(f"{name_of(info.step)} is skipped: it is {info.state}")
        name = name_of(found.step)
        self.say(f"{name} is committed: restored in {elapsed * 1e3:.0f} ms")
        self.log.write(name, self.training.fingerprint())

    async def train(self) -> None:
        training, size = self.training, self.size
        self.say(f"{dist.get_world_size()} rank(s), step {training.progress['step'] + 1}")
        while training.progress["step"] < size.steps:
            loss = training.step()
            step = training.progress["step"]
            self.log.write(str(step), loss)
            begin = time.perf_counter()
            decision = await self.manager.maybe_save(step)
            if not decision:
                continue
            blocked = time.perf_counter() - begin
            self.say(f"step {step:>3}, loss {loss:.4f}; staged in {blocked * 1e3:.0f} ms")
            if self.kill and step >= size.kill_at:
                await self.kill_one(decision.pending)
            self.log.write(name_of(step), training.fingerprint())

    async def kill_one(self, pending: PendingSnapshot) -> None:
        """Sends the last rank SIGKILL when part of the snapshot is stored, and not before."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        async for now in pending.events():
            if 0 < now.stored_bytes < now.total_bytes:
                stored, total = mib(now.stored_bytes), mib(now.total_bytes)
                rank = dist.get_rank()
                say(self.who, f"rank {rank} has stored {stored} of its {total}: SIGKILL")
                os.kill(os.getpid(), signal.SIGKILL)


async def run(who: str, size: Size, folder: Path, *, kill: bool) -> None:
    dist.init_process_group("gloo")
    try:
        one = Run(who, size, folder, kill=kill)
        async with one.manager:
            await one.resume()
            await one.train()
    finally:
        dist.destroy_process_group()


# -- the demo: four runs -------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def torchrun(
    who: str, ranks: int, size: str, folder: Path, *, kill: bool = False
) -> subprocess.Popen[bytes]:
    """Starts one run; its errors go to a file beside ``folder``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), __file__]
    command += ["--size", size, "--as", who, "--folder", str(folder)] + ["--kill"] * kill
    environment = {
        **os.environ,
        "DEMO_STARTED": str(STARTED),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder.parent),
    }
    with errors_of(folder).open("w") as errors:
        return subprocess.Popen(command, env=environment, stderr=errors)


def errors_of(folder: Path) -> Path:
    return folder.with_suffix(".errors")


def play(*processes: subprocess.Popen[bytes]) -> list[int]:
    """Waits for runs that go on side by side; returns their exit statuses."""
    try:
        return [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks, too
                process.wait()


def read(folder: Path) -> dict[str, str]:
    """Losses by step, and fingerprints by the name of the snapshot, as rank 0 wrote them."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return {name: text for name, text in map(json.loads, lines)}


def demo(size_name: str) -> int:
    size = SIZES[size_name]
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as name:
        root = Path(name)
        say("demo", f"{size.steps} steps, a snapshot every {size.snapshot_every}, in {root}")
        straight, killed, on_1, on_3 = (root / each for each in ("straight", "killed", "1", "3"))
        ended = play(
            torchrun("straight", 2, size_name, straight),
            torchrun("killed", 2, size_name, killed, kill=True),
        )
        if ended[0] != 0 or ended[1] == 0:
            return failed("straight run and killed run", ended, straight, killed)
        say("demo", f"torchrun has ended the killed run with status {ended[1]}")
        for folder in (on_1, on_3):
            shutil.copytree(killed, folder, ignore=shutil.ignore_patterns("*.jsonl"))
        ended = play(
            torchrun("on 1", 1, size_name, on_1),
            torchrun("on 3", 3, size_name, on_3),
        )
        if ended != [0, 0]:
            return failed("resumed runs", ended, on_1, on_3)
        return compare(size, *map(read, (straight, killed, on_1, on_3)))


def failed(what: str, statuses: list[int], *folders: Path) -> int:
    say("demo", f"{what} ended with {statuses}")
    for folder in folders:
        print(errors_of(folder).read_text(), file=sys.stderr)
    return 1


def compare(
    size: Size,
    straight: dict[str, str],
    killed: dict[str, str],
    on_1: dict[str, str],
    on_3: dict[str, str],
) -> int:
    """Prints the losses side by side; 0 if they are what the head of this file says."""
    runs = (straight, killed, on_1, on_3)
    titles = ("straight", "killed", "on 1", "on 3")

    def row(name: str, values: Sequence[str], note: str) -> None:
        print(f"{name:>12}  {''.join(f'{value:<14}' for value in values)}{note}".rstrip())

    print()
    row("step", titles, "difference")
    worst, wrong = 0.0, []
    (restored,) = {next(iter(one)) for one in (on_1, on_3)}
    for step in map(str, range(1, size.steps + 1)):
        losses = [float.fromhex(one[step]) if step in one else None for one in runs]
        first = losses[0]
        assert first is not None
        differences = [abs(loss / first - 1) for loss in losses[2:] if loss is not None]
        worst = max(worst, *differences, 0.0)
        if losses[1] not in (None, first) or any(each > TOLERANCE for each in differences):
            wrong.append(step)
        if int(step) % max(1, size.steps // 12) == 0:
            shown = ["-" if loss is None else f"{loss:.9f}" for loss in losses]
            row(step, shown, f"{max(differences):.1e}" if differences else "")
    states = [one[restored] for one in runs]
    row(restored, states, "state, CRC-32")
    print()
    if len(set(states)) > 1:
        wrong.append(restored)
    for one, title in zip(runs[2:], titles[2:], strict=True):
        if str(size.steps) not in one:
            wrong.append(f"the end of {title!r}")
    say("demo", f"losses differ by {worst:.1e} at most; {TOLERANCE:.0e} is allowed")
    if wrong:
        say("demo", f"wrong: {', '.join(wrong)}")
        return 1
    say("demo", f"{restored}, saved by 2 ranks, has the same bits on 1 and 3")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--folder", type=Path, default=Path("ckpt"), help="under torchrun")
    parser.add_argument("--as", dest="who", default="training", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        return demo(args.size)
    asyncio.run(run(args.who, SIZES[args.size], args.folder, kill=args.kill))
    return 0


if __name__ == "__main__":
    sys.exit(main())
