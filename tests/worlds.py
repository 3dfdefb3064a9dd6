# SPDX-License-Identifier: Apache-2.0
"""Real processes that save together: ranks over gloo, forked by a helper.

Importing torch takes seconds. ``python -m tests.worlds`` imports it once, then forks for each line
``[modules, function, arguments]`` a *director*: that function of the first module makes a ``World``
of ranks and a store's server, tells them what to do, stops or kills them, and answers with what
they said.
``Director`` is the near end.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.store_server import serve_store

__all__ = ["LIMIT_S", "ROOT", "Child", "Director", "Rank", "World"]

ROOT = Path(__file__).resolve().parents[1]

LIMIT_S = 120
"""A process that hangs is killed by SIGALRM after so long."""

_dist: Any = dist  # the stubs of its stores are not exported


@dataclass
class Rank:
    """Inside a rank: its line to the director."""

    rank: int
    world: int
    port: int
    channel: Any

    def say(self, value: Any) -> None:
        self.channel.write(json.dumps(value) + "\n")
        self.channel.flush()

    def hear(self) -> Any:
        return json.loads(self.channel.readline())

    def store(self) -> Any:
        return _dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def follow_torchrun(self) -> None:
        """Puts into the environment what torchrun would: the store is its agent's."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def join_gloo(self) -> None:
        dist.init_process_group(
            "gloo",
            store=self.store(),
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )


class Child:
    """Outside of a rank: its line, and its process."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        near, far = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            near.close()
            # torch makes its pool anew after a fork, and its threads must not race for that.
            torch.set_num_threads(1)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            channel = far.makefile("rw")
            status = 1
            try:
                value = work(channel)
                answer = {"value": value, "error": ""}
                status = 0
            except BaseException as error:
                answer = {"value": None, "error": traceback.format_exc()}
                if isinstance(error, SystemExit):
                    raise
            with suppress(OSError):
                channel.write(json.dumps(answer) + "\n")
                channel.flush()
            os._exit(status)
        far.close()
        self._near = near
        self._channel = near.makefile("rw")

    def hear(self) -> Any:
        line = self._channel.readline()
        assert line, "the rank is gone"
        return json.loads(line)

    def result(self) -> Any:
        while True:
            said = self.hear()
            if isinstance(said, dict) and set(said) == {"value", "error"}:
                assert not said["error"], said["error"]
                return said["value"]

    def dies(self) -> bool:
        """Waits; whether the process has gone without a word."""
        return not self._channel.readline()

    def tell(self, value: Any = None) -> None:
        self._channel.write(json.dumps(value) + "\n")
        self._channel.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class World:
    """The ranks of one test, and a server of a store in a process of its own."""

    def __init__(self, num_ranks: int, work: Callable[..., Any], **arguments: Any) -> None:
        def serve(channel: Any) -> None:
            server = serve_store()
            channel.write(json.dumps(server.port) + "\n")
            channel.flush()
            while True:
                channel.readline()
                signal.alarm(LIMIT_S)
                channel.write(json.dumps(server.num_keys()) + "\n")
                channel.flush()

        self.server = Child(serve)
        self.port = self.server.hear()
        if arguments.get("how") == "env":
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]

        def run(rank: int) -> Callable[[Any], Any]:
            return lambda channel: work(Rank(rank, num_ranks, self.port, channel), **arguments)

        self.ranks = [Child(run(rank)) for rank in range(num_ranks)]

    def results(self) -> list[Any]:
        return [rank.result() for rank in self.ranks]

    def num_keys(self) -> int:
        """How many keys the store has. Whoever asks keeps its server alive."""
        self.server.tell()
        return int(self.server.hear())

    def end(self) -> None:
        for child in (*self.ranks, self.server):
            child.kill()
            os.waitpid(child.pid, 0)


# The helper


class Director:
    """A process that has imported torch, and forks worlds. Use as a context manager.

    Args:
        module: Where the functions are that it is to call.
        imports: Modules that each rank would import else.
        is_shared: It is one for all modules, and lives as long as this process; one play at a time.
    """

    def __init__(self, module: str, *imports: str, is_shared: bool = True) -> None:
        self._module = module
        self._imports = imports
        self._is_shared = is_shared

    def __enter__(self) -> Director:
        self._process = _shared_helper() if self._is_shared else _helper()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_shared:
            _end(self._process)

    def play(self, scenario: str, **arguments: Any) -> Any:
        """What that function returns in a process of its own."""
        if self._is_shared:
            self._process = _shared_helper()  # a new one, if a test has killed it
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = [[self._module, *self._imports], scenario, arguments]
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
            said = json.loads(self._process.stdout.readline())
        except BaseException:  # also a test's time limit: a late answer must not meet the next call
            self._process.kill()
            if self._is_shared:
                _shared_helper.cache_clear()
            raise
        assert not said["error"], said["error"]
        return said["value"]


def _helper() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.worlds"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@functools.cache
def _shared_helper() -> subprocess.Popen[str]:
    helper = _helper()
    atexit.register(_end, helper)
    return helper


def _end(helper: subprocess.Popen[str]) -> None:
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdin.close()
    helper.stdout.close()
    helper.wait(timeout=LIMIT_S)


def _direct(work: Callable[..., Any], arguments: dict[str, Any], channel: Any) -> Any:
    def give_up(*_: object) -> None:
        # Not killed, but told where it waits; and it ends its ranks, also one that is stopped.
        raise TimeoutError("no answer")

    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, give_up)
    return work(**arguments)


def main() -> None:
    logging.disable(logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        names, scenario, arguments = json.loads(line)
        module, *_ = [importlib.import_module(name) for name in names]
        child = Child(functools.partial(_direct, getattr(module, scenario), arguments))
        # A director that does not even give up is killed, with all its ranks.
        is_late = not select.select([child._near], [], [], 1.5 * LIMIT_S)[0]
        said = "" if is_late else child._channel.readline()
        if is_late:
            os.killpg(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        answers.write(said or json.dumps({"value": None, "error": "the director was killed"}))
        answers.write("" if said else "\n")
        answers.flush()
    os._exit(0)  # what torch does at exit takes long, and nobody needs it


if __name__ == "__main__":
    main()
