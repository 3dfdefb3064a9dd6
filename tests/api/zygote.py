# SPDX-License-Identifier: Apache-2.0
"""Real processes in milliseconds: a helper process that has imported everything, and forks.

Importing torch takes seconds, and a process with threads should not be forked. The zygote
imports, never starts the runtime, and forks a child for each call of a function of a module.
``python -m tests.api.zygote MODULE`` is its main program; it speaks JSON lines.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Ending", "Zygote"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 180
"""A child that hangs is killed by SIGALRM after so long."""

_IMPORTS = (
    "_strptime",
    "anyio._backends._asyncio",
    "anyio.to_thread",
    "actorsnap.manager.body",
    "actorsnap.runtime.offloaded_copy",
    "actorsnap.storage.fs",
)
"""What most children import when they first need it."""


@dataclass(frozen=True)
class Ending:
    """How a child ended.

    Attributes:
        signal: The signal's number that killed it, or 0.
        value: What its function returned.
        error: The traceback, where it raised.
    """

    signal: int
    value: Any
    error: str

    @property
    def was_killed(self) -> bool:
        return self.signal == signal.SIGKILL

    def result(self) -> Any:
        """The value; fails if there is none."""
        assert not self.signal, f"killed by signal {self.signal}"
        assert not self.error, self.error
        return self.value


class Zygote:
    """The near end. Use as a context manager.

    Args:
        module: Where the functions are that children call.
        imports: What children import later, for example the backend of a storage.
    """

    def __init__(self, module: str = "tests.api.children", imports: Sequence[str] = ()) -> None:
        self._modules = (module, *imports)

    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.zygote", *self._modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *args: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=LIMIT_S)

    @classmethod
    @functools.cache
    def shared(cls, number: int = 0) -> Zygote:
        """One that lives as long as this process. Those of two numbers run at once."""
        zygote = cls()
        atexit.register(zygote.__exit__)
        return zygote.__enter__()

    def start(self, function: str, **arguments: Any) -> None:
        """Begins a call; ``end`` must follow."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()

    def end(self) -> Ending:
        """The ending of the oldest call that was begun."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote is gone"
        return Ending(**json.loads(line))

    def call(self, function: str, **arguments: Any) -> Ending:
        """Runs a function of the module in a fresh process."""
        self.start(function, **arguments)
        return self.end()


def _run_forked(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        # torch makes its pool anew after a fork, and its threads must not race for that.
        torch.set_num_threads(1)
        # A shell without job control lets what runs in the background ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(LIMIT_S)
        answer: dict[str, Any] = {"value": None, "error": ""}
        try:
            answer["value"] = function(**arguments)
        except BaseException:
            answer["error"] = traceback.format_exc()
        with os.fdopen(into, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    found = json.loads(text) if text else {"value": None, "error": ""}
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, **found}


def _main() -> None:
    children, *_ = [importlib.import_module(name) for name in (*sys.argv[1:], *_IMPORTS)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what children print must not look like an answer
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answers.write(json.dumps(_run_forked(getattr(children, name), arguments)) + "\n")
        answers.flush()
    os._exit(0)  # what torch does at exit takes long, and nobody needs it


if __name__ == "__main__":
    _main()
