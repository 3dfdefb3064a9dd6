# SPDX-License-Identifier: Apache-2.0
"""ckpt-chaos 0.1.8, a stranger's judge, on ``examples/managed.py``: does every kill leave a run
that goes on?

    python -m pip install --target FOLDER ckpt-chaos==0.1.8
    python -m bench.chaos judge --tool FOLDER --keep all --jobs 2
    python -m bench.chaos judge --tool FOLDER --keep rotate --jobs 2

ckpt-chaos runs a command once without a fault and notes each file event below ``{out}``. Then one
copy of the command dies at each event: killed before it (``before``), killed after half of the file
is cut off (``torn``), or by SIGTERM and, after a grace, SIGKILL (``term``). The same command then
resumes, and the judge compares.

Four things of it do not fit, and are replaced here:

- Folders of attempts have random names, so no checkpoint ever equals that of the run without a
  fault, and lost work is never seen. They are folded to one name. Commit objects and manifests
  differ by some digits of times and sizes: JSON counts as equal if it can be parsed.
- It takes the last number of a checkpoint's name for its step. Here that is the generation.
- It cannot judge lost work if the run deletes checkpoints. With ``--keep rotate`` a checkpoint
  counts as complete if it has a commit object, which is more than it would ask.
- It tears files of Python's ``open`` and of torch only. Here those of ``os.open`` are torn as well,
  when they are closed.

Only the main process is watched: hence ``offload="thread"``. Cannot be seen: ``link``, the rename
without replacement by ``renameat2``, writes to a file that is open (``pwrite``), and the disk's
own cache. Kills in those are in ``tests/api/test_manager_faults.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from actorsnap.manager import keep
from actorsnap.manager.sync import CheckpointManager
from examples import managed

COMMIT = "actorsnap.json"
MODES = ("before", "torn", "term")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    calls = parser.add_subparsers(dest="call", required=True)
    for call in (calls.add_parser("judge"), calls.add_parser("train")):
        call.add_argument("--keep", choices=["all", "rotate"], required=True)
        call.add_argument("--steps", type=int, default=45)
    judging, training = calls.choices["judge"], calls.choices["train"]
    judging.add_argument("--tool", type=Path, required=True, help="folder with ckpt_chaos")
    judging.add_argument("--jobs", type=int, default=2)
    judging.add_argument("--max-points", type=int, default=10_000)
    judging.add_argument("--work", type=Path, help="stays; without it all is deleted at the end")
    training.add_argument("--folder", required=True)
    training.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    if args.call == "train":
        train(args.folder, args.steps, args.result, is_rotating=args.keep == "rotate")
        return 0
    with tempfile.TemporaryDirectory(prefix="actorsnap-chaos-") as folder:
        return judge(args, args.work or Path(folder))


# The job


class Tee(io.StringIO):
    """Also prints."""

    def __init__(self) -> None:
        super().__init__()
        self._out = sys.stdout

    def write(self, text: str) -> int:
        self._out.write(text)
        return super().write(text)


def tear_files_of_os_open() -> None:
    """``torn`` for these: when the file is closed, half of it is cut off, and the job dies."""
    inject: Any = sys.modules.get("ckpt_chaos.inject")
    if inject is None:  # the resuming job
        return
    count, open_file, close_file = inject._event, os.open, os.close
    doomed = threading.local()
    doomed_fds = set[int]()

    def event(kind: str, path: Any, tornable: bool) -> bool:
        is_doomed: bool = count(kind, path, tornable or kind == "open")
        doomed.is_next = is_doomed or getattr(doomed, "is_next", False)
        return is_doomed and tornable

    def opening(*args: Any, **kwargs: Any) -> int:
        fd = open_file(*args, **kwargs)  # fails where a folder is missing: then the next one
        if getattr(doomed, "is_next", False):
            doomed.is_next = False
            doomed_fds.add(fd)
        return fd

    def closing(fd: int) -> None:
        if fd in doomed_fds:
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
            os._exit(137)
        close_file(fd)

    inject._event, os.open, os.close = event, opening, closing


def train(folder: str, num_steps: int, result: Path, *, is_rotating: bool) -> None:
    """The example, on a thread. ``result`` gets its last line: loss and weights."""

    def manager(*args: Any, **kwargs: Any) -> CheckpointManager:
        kept = kwargs["keep"] if is_rotating else keep.all()
        return CheckpointManager(*args, **{**kwargs, "keep": kept})

    vars(managed)["CheckpointManager"] = manager
    options = msgspec.structs.replace(managed.OPTIONS, offload="thread")
    vars(managed)["OPTIONS"] = options
    tear_files_of_os_open()
    with contextlib.redirect_stdout(Tee()) as said:
        managed.train(folder, num_steps)
    result.write_text(said.getvalue().splitlines()[-1])


# The judge


def judge(args: argparse.Namespace, work: Path) -> int:
    sys.path.insert(0, str(args.tool))
    byo: Any = importlib.import_module("ckpt_chaos.byo")
    adapt(byo, is_rotating=args.keep == "rotate")
    command = [sys.executable, "-m", "bench.chaos", "train", "--keep", args.keep]
    command += ["--steps", str(args.steps), "--folder", "{out}", "--result", "{out}.result"]
    rows = byo.run_byo(
        command,
        None,
        work / args.keep,
        jobs=args.jobs,
        timeout=300,
        max_points=args.max_points,
        result_file="{out}.result",
        step_regex=r"(?:restored|to resume:) step (\d+)",
        modes=MODES,
        checkpoint_glob="{out}/step-*",
    )
    report(rows)
    return 0


def adapt(byo: Any, *, is_rotating: bool) -> None:
    """Replaces how ckpt-chaos reads names. Its verdicts stay as they are."""

    def snapshot(pattern: str, out: Path) -> dict[str, tuple[int, dict[str, int]]]:
        found = {}
        for folder in out.glob("step-*"):
            step = re.fullmatch(r"step-(\d+)\.g\d+", folder.name)
            if step is not None:
                found[folder.name] = (int(step[1]), signature(folder))
        return found

    def newest_with_commit(_reference: Any, found: Any, _ignores_size: bool = False) -> int:
        complete = [step for step, files in found.values() if COMMIT in files]
        return max(complete, default=0)

    byo._snapshot = snapshot
    if is_rotating:
        byo._newest_complete = newest_with_commit


def signature(folder: Path) -> dict[str, int]:
    """Sizes by name; without the attempt, and 0 for whole JSON."""
    sizes = {}
    for file in folder.rglob("*"):
        if file.is_file():
            name = re.sub(r"^\d{8}T\d{6}-[0-9a-f-]+/", "attempt/", str(file.relative_to(folder)))
            sizes[name] = 0 if is_json(file) else file.stat().st_size
    return sizes


def is_json(file: Path) -> bool:
    if file.suffix != ".json":
        return False
    try:
        json.loads(file.read_bytes().splitlines()[0])
    except (ValueError, IndexError):
        return False
    return True


def report(rows: list[Any]) -> None:
    """A table of verdicts per mode, and each point that did not pass."""
    modes = ["control", *MODES]
    verdicts: dict[str, Counter[str]] = {mode: Counter() for mode in modes}
    for row in rows:
        mode = next((mode for mode in MODES if row.label.endswith(f"[{mode}]")), "control")
        is_killed = row.crashed or mode == "control"  # a run may have fewer events than the first
        verdicts[mode][row.verdict if is_killed else "not killed"] += 1
        if row.verdict != "PASS":
            print(row)
    kinds = ["PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK"]
    kinds += sorted({kind for each in verdicts.values() for kind in each} - {*kinds})
    print(f"| | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for mode in modes:
        print(f"| {mode} | {' | '.join(str(verdicts[mode][kind]) for kind in kinds)} |")


if __name__ == "__main__":
    sys.exit(main())
