# SPDX-License-Identifier: Apache-2.0
"""Drains that the uploader process makes: what each end, and each death, leads to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from actorsnap import Options, StateDict, shutdown
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime import uploader_client
from actorsnap.runtime.host import Host
from actorsnap.runtime.uploader_client import Uploader, find_uploader
from actorsnap.sync import Snapshot
from tests.conftest import LeakCheck

HELD = Path(__file__).parents[1] / "held"
PATIENCE_S = 120.0
NBYTES = 1 << 20

pytestmark = pytest.mark.usefixtures("forker")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> Iterator[None]:
    """A runtime, and so a process, of the test's own."""
    shutdown()
    no_leaks.restart()
    monkeypatch.syspath_prepend(HELD)
    yield
    shutdown()
    no_leaks.assert_none()


@pytest.fixture
def only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is made in this process."""

    def refused(*_: object, **__: object) -> object:
        raise AssertionError("copied here")

    monkeypatch.setattr("actorsnap.manager.tiers.copy", refused)


class Run:
    """A manager whose root is on a storage that the test holds (``tests/held``)."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self.root = folder / "run"
        self.state = StateDict(weight=torch.zeros(NBYTES // 4), step=-1)
        settings = {"offload": "process", "fsync": False, **options}
        self.manager = CheckpointManager(
            f"held://{self.root}",
            {"model": self.state},
            save=every.steps(1),
            keep=keep.all(),
            tiers=[folder / "tier"],
            options=Options(**settings),  # type: ignore[arg-type]
        )

    def save(self, step: int) -> None:
        self.state["step"] = step
        self.state["weight"].fill_(step)
        assert self.manager.maybe_save(step)
        self.manager.wait()

    def drained(self) -> list[int]:
        """Steps at the root, every byte checked."""
        found = []
        for place in sorted(self.root.glob("step-*")):
            if not (place / "actorsnap.json").exists():
                continue
            snapshot = Snapshot(place)
            assert snapshot.verify("full").ok
            model = snapshot.get_state_dict_for_key("model")
            assert set(model["weight"].tolist()) == {float(model["step"])}
            found.append(model["step"])
        return found

    # ``held`` looks for its files beside the snapshots.

    def hold(self, operation: str) -> None:
        (self.root / f"hold-{operation}").touch()

    def wait_held(self, operation: str) -> None:
        held = self.root / f"held-{operation}"
        until(held.exists)
        held.unlink()

    def let(self, operation: str) -> None:
        (self.root / f"hold-{operation}").unlink()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def uploader() -> Uploader:
    return find_uploader(Host.get())


def process() -> psutil.Process:
    pid = uploader().pid
    assert pid is not None
    return psutil.Process(pid)


def all_drained(run: Run) -> bool:
    status = run.manager.status()
    return not status.draining and not status.failed_drains


@pytest.mark.usefixtures("only_there")
@pytest.mark.parametrize("max_slowdown", [None, 0.5])
def test_the_process_drains(tmp_path: Path, max_slowdown: float | None) -> None:
    run = Run(tmp_path, max_slowdown=max_slowdown)
    for step in range(3):
        run.save(step)
    run.manager.close()
    assert run.drained() == [0, 1, 2]
    assert all_drained(run)


def test_by_default_a_large_drain_starts_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, offload="auto")
    run.save(0)
    until(lambda: run.drained() == [0] and all_drained(run))
    assert uploader().pid is None
    run.state["weight"] = torch.zeros(5 << 20)
    run.save(1)
    until(lambda: all_drained(run) and uploader().is_ready)
    monkeypatch.setattr("actorsnap.manager.tiers.copy", None)  # none is made here any more
    run.save(2)
    run.manager.close()
    assert run.drained() == [0, 1, 2]
    assert all_drained(run)


def test_without_a_process_drains_are_made_here(tmp_path: Path) -> None:
    run = Run(tmp_path, offload="thread")
    run.save(0)
    run.manager.close()
    assert run.drained() == [0]
    assert uploader().pid is None


def test_a_process_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no processes")

    monkeypatch.setattr(uploader_client, "_start", refused)
    run = Run(tmp_path)
    run.save(0)
    run.manager.close()
    assert run.drained() == [0]
    assert not uploader().is_usable


@pytest.mark.usefixtures("only_there")
def test_the_next_process_resumes_a_drain(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(0)
    until(lambda: all_drained(run))
    run.hold("manifest")  # the data is there
    run.save(1)
    run.wait_held("manifest")
    first = process()
    os.kill(first.pid, signal.SIGKILL)
    run.let("manifest")
    until(lambda: all_drained(run) and 1 in run.drained())
    assert process() != first
    run.save(2)
    run.manager.close()
    assert run.drained() == [0, 1, 2]


@pytest.mark.usefixtures("only_there")
def test_two_deaths_fail_the_drain_until_the_next_save(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(0)
    until(lambda: all_drained(run))
    run.hold("manifest")
    run.save(1)
    for _ in range(2):
        run.wait_held("manifest")
        os.kill(process().pid, signal.SIGKILL)
    until(lambda: run.manager.status().failed_drains)
    (error,) = run.manager.status().failed_drains.values()
    assert "was killed (SIGKILL)" in error
    assert run.manager.status().draining == (1,)
    run.let("manifest")
    run.save(2)
    run.manager.close()
    assert run.drained() == [0, 1, 2]
    assert all_drained(run)


@pytest.mark.usefixtures("only_there")
def test_an_error_arrives_as_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(0)
    until(lambda: all_drained(run))
    (run.root / "fail-writer").touch()
    run.save(1)
    until(lambda: run.manager.status().failed_drains)
    (error,) = run.manager.status().failed_drains.values()
    assert error.startswith("StorageFull: the copy's destination: no room (writer of ")
    (run.root / "fail-writer").unlink()
    run.save(2)
    run.manager.close()
    assert run.drained() == [0, 1, 2]


@pytest.mark.usefixtures("only_there")
def test_a_closed_manager_ends_the_copy_and_the_next_one_resumes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(0)
    until(lambda: all_drained(run))
    run.hold("manifest")
    run.save(1)
    run.wait_held("manifest")
    run.manager.close(timeout_s=0)
    assert run.drained() == [0]
    run.let("manifest")
    time.sleep(0.5)  # nobody works on
    assert run.drained() == [0]
    again = Run(tmp_path)
    found = again.manager.restore_latest()
    assert found is not None
    assert (found.step, again.state["step"]) == (1, 1)
    again.save(2)
    again.manager.close()
    assert again.drained() == [0, 1, 2]
