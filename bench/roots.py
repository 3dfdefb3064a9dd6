# SPDX-License-Identifier: Apache-2.0
"""What does a manager ask of S3 at a root of many snapshots, and how long does it look?

A real S3 server on loopback, with a proxy in front that adds a round trip to each request. The
root is filled with copies of one small snapshot, and a run record per generation.

Prints one JSON line per row on standard output. bench/README.md has it.
``python -m bench.roots --snapshots 1000 --runs 10 --latency-ms 50``
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from actorsnap.cli import app
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime import restore
from tests.cloud.roots import app_state, fill, requests_of
from tests.servers.base import S3Server
from tests.servers.ceph import CephServer
from tests.support.proxy import FaultProxy


class Bench:
    """One root and what is measured at it."""

    def __init__(self, server: S3Server, proxy: FaultProxy, bucket: str) -> None:
        self._proxy = proxy
        self._options = server.storage_options(proxy)
        self.url = server.url(bucket, "run")

    def manager(self, **settings: Any) -> CheckpointManager:
        return CheckpointManager(
            self.url,
            app_state(),
            **{
                "save": every.steps(1),
                "keep": keep.all(),
                "storage_options": self._options,
                **settings,
            },
        )

    def row(self, name: str, call: Callable[[], float | None]) -> None:
        """``call`` may return when the measured part ended."""
        self._proxy.forget()
        begun_s = time.perf_counter()
        ended_s = call() or time.perf_counter()
        asked = requests_of(self._proxy.exchanges())
        row = {"row": name, "seconds": round(ended_s - begun_s, 3), "requests": asked}
        print(json.dumps(row), flush=True)

    def find_latest(self) -> float:
        """Returns when the restore began."""
        begun: list[float] = []
        real = restore.try_restore

        def begin(*args: Any, **kwargs: Any) -> Any:
            begun.append(time.perf_counter())
            return real(*args, **kwargs)

        restore.try_restore = begin
        try:
            with self.manager() as manager:
                manager.restore_latest()
        finally:
            restore.try_restore = real
        return begun[0]

    def run(self, num_snapshots: int) -> None:
        self.row("restore_latest, first call of the process", self.find_latest)
        self.row("restore_latest, a new manager", self.find_latest)
        manager = self.manager()
        self.row("all_steps", lambda: void(manager.all_steps()))
        manager.restore_latest()
        manager.save(10 * num_snapshots)
        manager.prune()
        self.shell()
        self.row("a pass, nothing goes", lambda: void(manager.prune()))
        manager.save(10 * num_snapshots + 1)
        manager.prune()
        at = [info.step for info in manager.steps()[1:]]
        self.row("a pass, one step goes", lambda: void(manager.prune(keep.at(at))))
        self.row("a pass, all but three go", lambda: void(manager.prune(keep.last(3))))
        manager.close()

    def shell(self) -> None:
        given = [f"--option={key}={json.dumps(value)}" for key, value in self._options.items()]

        def steps() -> None:
            ended = CliRunner().invoke(app, ["steps", self.url, *given])
            assert ended.exit_code == 0, ended.output

        self.row("actorsnap steps", steps)


def void(_: object) -> None:
    """Ends a lambda."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, CephServer(Path(folder)) as server:
        bucket = server.make_bucket()
        fill(server, bucket, num_snapshots=args.snapshots, num_runs=args.runs)
        with FaultProxy(server.endpoint, latency_s=args.latency_ms / 1000) as proxy:
            bench = Bench(server, proxy, bucket)
            bench.run(args.snapshots)


if __name__ == "__main__":
    main()
