# SPDX-License-Identifier: Apache-2.0
"""What every test gets: one loop backend, blockbuster, hypothesis profiles, a leak check.

pytest-asyncio runs the asynchronous tests of the public API, as users run it. anyio's plugin runs
the others, which may also go through trio: ``@pytest.mark.parametrize("anyio_backend", ["trio"])``.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

from actorsnap.runtime.host import Host
from actorsnap.runtime.process import default_budget_bytes
from tests.support import forker as forker_module

# Seconds mean nothing on a shared machine with two cores: no deadlines. In CI the examples are
# the same in every run, so that a red run can be repeated; new ones are found at the desk.
settings.register_profile("default", deadline=None)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# torch looks up the names of those that connect: a lost answer of the machine's resolver stops a
# process for 5 s otherwise. See also tests/support/store_server.py.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell without job control lets what runs in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


pytest_plugins = ["tests.servers.fixtures"]

CLOCKLESS = ("actors", "format", "planning", "protocol", "state")
"""Folders whose tests start no process and wait for no second: these never run twice."""


PUBLIC = ("api", "cloud", "formats", "test_golden.py")
"""Tests of the public API, which is asyncio's."""


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: Any) -> None:
    """Marks an asynchronous test for the plugin that runs it."""
    if collector.istestfunction(obj, name):
        test = obj.hypothesis.inner_test if hasattr(obj, "hypothesis") else obj
        if inspect.iscoroutinefunction(test):
            is_public = collector.path.relative_to(Path(__file__).parent).parts[0] in PUBLIC
            (pytest.mark.asyncio if is_public else pytest.mark.anyio)(obj)


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries fewer examples where a test does not say how many it needs."""
    if config.getoption("markexpr") == "not slow":
        settings.register_profile("fast", settings.default, max_examples=25)
        settings.load_profile("fast")


def few_of(cases: list[pytest.Function], num_cases: int | None) -> list[pytest.Function]:
    """So many cases, or as many as it takes, that have each value of each parameter.

    The next one is always that with the most values which were in none before, and of these the
    one whose values were in the fewest; of equals, the first.
    """
    num_seen: Counter[tuple[str, str]] = Counter()
    values = {case: [(n, repr(v)) for n, v in case.callspec.params.items()] for case in cases}
    num_values = len({value for each in values.values() for value in each})
    left, taken = list(cases), list[pytest.Function]()
    while left and (len(num_seen) < num_values if num_cases is None else len(taken) < num_cases):
        best = max(
            left,
            key=lambda case: (
                sum(not num_seen[value] for value in values[case]),
                -sum(num_seen[value] for value in values[case]),
            ),
        )
        left.remove(best)
        taken.append(best)
        num_seen.update(values[best])
    return taken


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `few`, all others are slow."""
    cases: defaultdict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Function]]
    cases = defaultdict(list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and item.get_closest_marker("few") is not None
            and item.get_closest_marker("slow") is None
        ):
            cases[item.parent, item.originalname].append(item)
    for group in cases.values():
        mark = group[0].get_closest_marker("few")
        assert mark is not None
        taken = few_of(group, mark.args[0] if mark.args else None)
        for item in group:
            if item not in taken:
                item.add_marker("slow")
    rerun_in_ci(items)


def rerun_in_ci(items: list[pytest.Item]) -> None:
    """In CI a failed test of real processes and servers runs once more; it may not fail twice.

    Ranks give each other up after a few seconds of silence, and CI's machine stands still for as
    long now and then: once in some ten thousand tests, which is every other run.
    """
    if not os.environ.get("CI"):
        return
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder not in CLOCKLESS:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints why a test was run once more: a defect that shows seldom shall not pass unseen."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"failed, then run once more: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def forker() -> Iterator[None]:
    """For ``forker.command``; of the session, so that no test takes it for a leak."""
    with forker_module.start() as server:
        yield
        server.terminate()  # not by its standard input: a fork that a test left may hold that


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """What a test disables is enabled for the next one."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _budget() -> Iterator[None]:
    """There is one memory budget per process: a test's own ends with it."""
    host = Host.running_here()
    before = default_budget_bytes() if host is None else host.resources.budget.limit_bytes
    yield
    host = Host.running_here()
    if host is not None:
        host.resources.set_budget(before)


@pytest.fixture(autouse=True)
def _blockbuster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a call of the package that blocks an event loop, in whichever thread that runs.

    Only frames of ``actorsnap`` count, without ``actorsnap.testing``: what a test and its tools do
    between two awaits is their own affair.
    """
    if request.node.get_closest_marker("blocking") is not None:
        yield
        return
    blockbuster = _made_blockbuster()
    blockbuster.activate()
    # Looks into the kernel's memory only; a relative path is resolved when it is given.
    blockbuster.functions["os.getcwd"].deactivate()
    try:
        yield
    finally:
        blockbuster.deactivate()


@functools.cache
def _made_blockbuster() -> BlockBuster:
    """Returns the only one: to make it takes longer than many a test."""
    made = BlockBuster("actorsnap", excluded_modules=["actorsnap.testing"])
    # A loop of its own, on a worker thread: there botocore may read its files.
    for function in made.functions.values():
        function.can_block_in("actorsnap/storage/s3_client.py", "_open_client")
    return made


class LeakCheck:
    """Threads and file descriptors of this process, now and at an earlier moment."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Counts from here: for a test that first warms up what lives as long as the process."""
        self._threads = set(threading.enumerate())
        self._fds = self._open_fds()

    @staticmethod
    def _open_fds() -> dict[int, str]:
        found: dict[int, str] = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:  # the descriptor of this very listing
                continue
        return found

    def leaked(self) -> list[str]:
        """One line per thread or descriptor that is new and still there."""
        threads = [t for t in threading.enumerate() if t not in self._threads]
        fds = self._open_fds()
        return [
            *(f"thread {t.name}" for t in threads),
            *(f"fd {n}: {to}" for n, to in fds.items() if self._fds.get(n) != to),
        ]

    def assert_none(self, within_s: float = 30.0) -> None:
        """Waits until nothing is left over; fails after ``within_s``. Blocks: not for a loop."""
        deadline = time.monotonic() + within_s
        while left := self.leaked():
            if time.monotonic() > deadline:
                pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
            gc.collect()
            time.sleep(0.01)


@pytest.fixture
def no_leaks() -> Iterator[LeakCheck]:
    """Fails the test if it leaves a thread or a file descriptor behind."""
    check = LeakCheck()
    yield check
    check.assert_none()
