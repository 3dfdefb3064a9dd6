# SPDX-License-Identifier: Apache-2.0
"""How the runtime starts, and which process and which event loop it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import anyio
import pytest

from actorsnap import Snapshot, StateDict, UsageError
from actorsnap.runtime import host as host_module
from actorsnap.runtime.host import Host, Script, shutdown
from actorsnap.runtime.process import is_running
from actorsnap.runtime.script import run_sync
from tests.conftest import LeakCheck
from tests.support import forker
from tests.support.cases import slow

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("forker")


def run_script(body: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        forker.command("-c", textwrap.dedent(body), *map(str, arguments)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_interrupt_of_the_start_leaves_nothing(
    no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown()
    no_leaks.restart()
    new_event_loop = asyncio.new_event_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGINT)  # Python runs its handler in the main thread
        return new_event_loop()

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Host.get()
    host = Host.get()
    assert Host.get() is host
    shutdown()


def test_a_start_that_fails_leaves_nothing(
    no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown()
    no_leaks.restart()

    def fail(host: Host) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(host_module, "WorkerPool", fail)
        with pytest.raises(MemoryError):
            Host.get()
    no_leaks.assert_none()


@pytest.mark.parametrize(
    ("method", "ending"),
    [
        ("fork", "raise"),
        slow("forkserver", "raise"),
        slow("spawn", "return"),
        slow("fork", "return"),
        slow("forkserver", "return"),
        slow("spawn", "raise"),
    ],
)
def test_a_multiprocessing_child_finishes_its_snapshots(
    tmp_path: Path, method: str, ending: str
) -> None:
    """Such children leave by ``os._exit``."""
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        import torch
        from actorsnap import StateDict
        from actorsnap.sync import Snapshot
        from actorsnap.testing import FaultyStorage
        from tests.api.faults import _scheme, faulty_url

        def child(url, ending):
            torch.set_num_threads(1)
            _scheme.wrap = lambda inner: FaultyStorage(inner, latency_s={"put": 0.3})
            Snapshot.async_take(faulty_url(url), {"s": StateDict(x=7)})
            if ending == "raise":
                raise RuntimeError("on purpose")

        if __name__ == "__main__":
            url, method, ending = sys.argv[1:]
            process = multiprocessing.get_context(method).Process(target=child, args=(url, ending))
            process.start()
            process.join(60)
            sys.exit(process.exitcode)
        """)
    )
    url = tmp_path / "s"
    done = subprocess.run(
        forker.command(str(script), str(url), method, ending)
        if method == "fork"
        else [sys.executable, str(script), str(url), method, ending],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == (ending == "raise"), done.stderr
    assert asyncio.run(Snapshot(url).get_state_dict_for_key("s")) == {"x": 7}


def test_a_fork_inside_a_running_loop(tmp_path: Path) -> None:
    done = run_script(
        """
        import asyncio, os, sys
        from actorsnap import Snapshot, StateDict, UsageError

        async def main():
            pending = await Snapshot.async_take(sys.argv[1], {"s": StateDict(x=1)})
            if os.fork() == 0:
                try:
                    await pending.wait()
                except UsageError as error:
                    os.write(1, str(error).encode())
                finally:
                    os._exit(0)
            os.wait()
            await pending.wait()

        asyncio.run(main())
        """,
        tmp_path / "s",
    )
    assert done.returncode == 0, done.stderr
    assert "this object belongs to process" in done.stdout


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_under_trio(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"use asyncio, or .* actorsnap\.sync"):
        await Snapshot.take(tmp_path / "s", {"s": StateDict(x=1)})


def test_a_zombie_does_not_run() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(pid)
    finally:
        os.waitpid(pid, 0)
    assert not is_running(pid)
    assert is_running(os.getpid())


def test_a_look_at_the_threads_that_fails_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host.get()
    relieve, hangs = host._workers.relieve, threading.Event()
    looks = iter([True, False])

    def fail_once() -> bool:
        if next(looks, False):
            raise OSError("once")
        return relieve()

    async def work(host: Host) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(host.num_workers):
                tasks.start_soon(host.run_blocking, hangs.wait, 30)
            await anyio.sleep(1)
            await host.run_blocking(hangs.set)  # finds no thread, until one is added

    def script() -> Script[None]:
        yield work

    monkeypatch.setattr(host._workers, "relieve", fail_once)
    began = time.monotonic()
    run_sync(script(), name="test")
    assert time.monotonic() - began < 20
    assert "once" in caplog.text


@pytest.mark.parametrize("error", [SystemExit, StopIteration, asyncio.CancelledError])
def test_what_no_future_takes_ends_neither_the_loop_nor_in_silence(
    error: type[BaseException],
) -> None:
    host = Host.get()

    def leave() -> None:
        raise error

    call = host.submit(host.run_blocking(leave))
    with pytest.raises(RuntimeError, match=error.__name__):
        call.future.result(timeout=5)
    assert host.submit(host.run_blocking(os.getpid)).future.result(timeout=5) == os.getpid()
