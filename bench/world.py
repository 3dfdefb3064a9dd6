# SPDX-License-Identifier: Apache-2.0
"""Real ranks for a benchmark: processes over gloo that one process tells what to do.

A rank runs one function at a time, on all ranks the same one, and keeps what it is to keep in
``Here.held``. Everything has a deadline; ranks that fail or are late take their world with them.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

__all__ = ["Here", "Span", "World", "span_s"]

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_S = 240.0
"""Of one function, on all ranks."""

_dist: Any = dist  # the stubs of its stores are not exported


@dataclass(frozen=True, slots=True)
class Span:
    """When something began and ended: seconds of the clock that all processes share."""

    begin_s: float
    end_s: float


def span_s(spans: list[Span]) -> float:
    """From the first rank's begin to the last one's end."""
    return max(span.end_s for span in spans) - min(span.begin_s for span in spans)


@dataclass(slots=True)
class Here:
    """Inside a rank."""

    rank: int
    num_ranks: int
    held: dict[str, Any] = field(default_factory=dict)

    def timed(self, work: Callable[[], object]) -> Span:
        """Runs ``work`` when all ranks are ready to, without the garbage of the turn before."""
        gc.collect()  # as ``Contest`` does in its own process
        if self.num_ranks > 1:
            dist.barrier()
        begin_s = time.perf_counter()
        work()
        return Span(begin_s, time.perf_counter())


class World:
    """Ranks, and the store that they find each other by. Use as a context manager.

    One rank is a process as any other, without a process group.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        port = 0
        if num_ranks > 1:
            # Not on IPv6, where a store waits for the machine's resolver at each connection.
            listener = socket.create_server(("127.0.0.1", 0), backlog=128)
            port = listener.getsockname()[1]
            self._server = _dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        # A server that has imported torch forks the ranks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.ranks"])
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            near, far = context.Pipe()
            process = context.Process(target=_serve, args=(far, rank, num_ranks, port), daemon=True)
            process.start()
            far.close()
            self._lines.append(near)
            self._processes.append(process)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(
        self, work: Callable[Concatenate[Here, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """What the function returns, by rank.

        Raises:
            RuntimeError: a rank raised, is gone, or was not ready in time. The world has ended.
        """
        if not self._lines:
            raise RuntimeError("the ranks have ended")
        try:
            for line in self._lines:
                line.send((work, args, kwargs))
            return self._answers()
        except BaseException:
            self.end(at_once=True)
            raise

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(answers) < self.num_ranks:
            open_lines = [line for n, line in enumerate(self._lines) if n not in answers]
            ready = wait(open_lines, timeout=deadline - time.monotonic())
            if not ready:
                raise RuntimeError(f"a rank was not ready in {LIMIT_S:.0f} s")
            for line in ready:
                assert isinstance(line, Connection)
                rank = self._lines.index(line)
                try:
                    answers[rank], error = line.recv()
                except EOFError:
                    error = "it is gone"
                if error:
                    raise RuntimeError(f"rank {rank}: {error}")
        return [answers[rank] for rank in range(self.num_ranks)]

    def end(self, *, at_once: bool = False) -> None:
        """Ends the processes; they are gone when this returns."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            if not at_once:
                process.join(10.0)
            process.kill()
            process.join()
        self._lines, self._processes = [], []


def _serve(line: Connection, rank: int, num_ranks: int, port: int) -> None:
    os.dup2(2, 1)  # gloo talks on standard output, which is for rows
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)  # as torchrun does
    if num_ranks > 1:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=_dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
    here = Here(rank, num_ranks)
    with suppress(EOFError, BrokenPipeError):
        while True:
            work, args, kwargs = line.recv()
            try:
                answer = work(here, *args, **kwargs), ""
            except Exception as error:
                traceback.print_exc()
                answer = None, f"{type(error).__name__}: {error}"
            line.send(answer)
