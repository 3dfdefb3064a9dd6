# SPDX-License-Identifier: Apache-2.0
"""A function of a benchmark in a process of its own, watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Memory", "in_child", "main", "memory_of", "shared_files", "watched"]

LIMIT_S = 600


def in_child(function: Callable[..., Any], **arguments: Any) -> Any:
    """What ``function(**arguments)`` returns in a new process. All of it is JSON.

    Raises:
        RuntimeError: it failed; the last line of what it said.
    """
    with _started(function, arguments) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    return _result(process, out, err)


def _started(function: Callable[..., Any], arguments: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from bench.child import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([function.__module__, function.__name__, arguments]))
    process.stdin.close()
    process.stdin = None  # ``communicate`` would flush it
    return process


def _result(process: subprocess.Popen[str], out: str, err: str) -> Any:
    if process.returncode != 0:
        raise RuntimeError((err.strip().splitlines() or ["no message"])[-1])
    return json.loads(out.splitlines()[-1])


def main() -> None:
    """What runs in the process."""
    module, name, arguments = json.load(sys.stdin)
    print(json.dumps(getattr(import_module(module), name)(**arguments)), flush=True)


# Memory -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Memory:
    """Bytes of a process and all below it: anonymous memory, and files in memory without a name,
    each once. Not pages of other files, which are the system's to drop, or what was saved.

    Mappings of shared pages (PSS) would not do: they are read process by process, and a page that
    moves from one to both meanwhile counts one and a half times.

    Attributes:
        peak: Most ever seen, by kind.
        num_samples: How often was looked.
    """

    peak: dict[str, int] = field(default_factory=dict)
    num_samples: int = 0

    def look(self, pid: int) -> None:
        now = memory_of(pid)
        if now["total"] >= self.peak.get("total", 0):
            self.peak = now
        self.num_samples += 1


def memory_of(pid: int) -> dict[str, int]:
    """Of the process, of all below it, what they share, and of all; see ``Memory``."""
    try:
        below = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        below = []
    own, others = _anonymous(pid), sum(map(_anonymous, below))
    shared = sum(shared_files([pid, *below], "/memfd:").values())
    return {"own": own, "below": others, "shared": shared, "total": own + others + shared}


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))


def shared_files(pids: Iterable[int], *beginnings: str) -> dict[int, int]:
    """Bytes of the files that these processes have open whose names begin so, by inode."""
    sizes: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):  # it has just ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(entry).startswith(beginnings):
                        about = entry.stat()
                        sizes[about.st_ino] = 512 * about.st_blocks
    return sizes


def watched(function: Callable[..., Any], every_s: float, **arguments: Any) -> tuple[Any, Memory]:
    """``in_child``, and the most memory that it took between two lines, ``begin`` and ``end``,
    that it prints."""
    memory = Memory()
    with _started(function, arguments) as process:
        out, err = process.stdout, process.stderr
        assert out is not None
        assert err is not None
        errors: list[str] = []
        reader = threading.Thread(target=errors.extend, args=(err,), daemon=True)
        reader.start()
        is_over = threading.Event()

        def look() -> None:
            while not is_over.is_set():
                memory.look(process.pid)
                time.sleep(every_s)

        looker = threading.Thread(target=look, daemon=True)
        lines: list[str] = []
        for line in out:
            lines.append(line)
            if line == "begin\n":
                looker.start()
            if line == "end\n":
                is_over.set()
        is_over.set()
        process.wait(LIMIT_S)
        reader.join()
    return _result(process, "".join(lines), "".join(errors)), memory
