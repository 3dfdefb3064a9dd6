# SPDX-License-Identifier: Apache-2.0
"""Steps are measured where they are marked, and saves are paced where they are stored."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import actorsnap
from actorsnap import Options, Snapshot, StateDict, shutdown
from actorsnap.runtime.copy import CopyEvent, CopyReport, copy
from actorsnap.runtime.host import Host
from actorsnap.runtime.location import make_location
from actorsnap.runtime.pacing import _Pacer, paced
from actorsnap.runtime.script import run_on_loop
from actorsnap.runtime.source import Source
from actorsnap.sync import PendingSnapshot
from actorsnap.sync import Snapshot as SyncSnapshot
from tests.conftest import LeakCheck
from tests.support.cases import slow

HELD = Path(__file__).parents[1] / "held"
NBYTES = 32 << 20
pytestmark = pytest.mark.blocking  # held:// looks for files on the loop
OFFLOADS = pytest.mark.parametrize("offload", ["thread", "process"])
THREAD_FIRST = pytest.mark.parametrize("offload", ["thread", slow("process")])
PROCESS_FIRST = pytest.mark.parametrize("offload", [slow("thread"), "process"])


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> Iterator[None]:
    shutdown()
    no_leaks.restart()
    _Pacer.forget()
    monkeypatch.syspath_prepend(HELD)
    yield
    shutdown()
    _Pacer.forget()
    no_leaks.assert_none()


def save(url: object, offload: str, max_slowdown: float | None = 0.02) -> PendingSnapshot:
    options = Options(offload=offload, fsync=False, chunk_bytes=2 << 20, max_slowdown=max_slowdown)
    state = {"model": StateDict(weight=torch.arange(NBYTES // 4))}
    return SyncSnapshot.async_take(str(url), state, options=options)


def check(url: object) -> None:
    found = SyncSnapshot(str(url)).get_state_dict_for_key("model")
    assert torch.equal(found["weight"], torch.arange(NBYTES // 4))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def set_duty(duty: float) -> None:
    host = Host.get()
    host.call_soon(lambda: host.resources.set_duty(duty))


def stored_bytes(pending: PendingSnapshot) -> int:
    return pending._save.board.latest.stored_bytes


@PROCESS_FIRST
def test_a_save_rests_and_goes_on_where_it_is_stored(offload: str, tmp_path: Path) -> None:
    save(tmp_path / "first", offload).wait()  # there is a process now
    set_duty(0.0)
    pending = save(tmp_path / "s", offload)
    time.sleep(1.2)  # a process tells its progress twice a second
    assert stored_bytes(pending) == 0
    assert not pending.done()
    set_duty(1.0)
    pending.wait()
    check(tmp_path / "s")


def test_a_process_that_is_started_later_keeps_the_pace(tmp_path: Path) -> None:
    set_duty(0.0)
    pending = save(tmp_path / "s", "process")
    time.sleep(1.2)
    assert stored_bytes(pending) == 0
    set_duty(1.0)
    pending.wait()


@OFFLOADS
def test_a_blocking_save_has_no_pace(offload: str, tmp_path: Path) -> None:
    set_duty(0.0)
    state = {"model": StateDict(weight=torch.arange(NBYTES // 4))}
    options = Options(offload=offload, fsync=False, max_slowdown=0.02)
    SyncSnapshot.take(str(tmp_path / "s"), state, options=options)
    check(tmp_path / "s")


class Trainer:
    """Says how long its steps took: half as long again while saves are stored."""

    def __init__(self) -> None:
        self.seconds = 0.1

    def steps(self, count: int) -> None:
        for _ in range(count):
            _Pacer.get().end_step(self.seconds * (1 + 0.5 * _Pacer.get()._controller.duty))


@pytest.mark.few(1)
@OFFLOADS
def test_a_save_that_slows_the_trainer_is_slowed(offload: str, tmp_path: Path) -> None:
    (tmp_path / "hold-manifest").touch()
    trainer = Trainer()
    for _ in range(20):
        _Pacer.get().end_step(0.1)
    pending = save(f"held://{tmp_path}/s", offload)
    wait_until((tmp_path / "held-manifest").exists)
    trainer.steps(100)
    wait_until(lambda: 0.0 < Host.get().resources.pace.duty < 0.1)
    (tmp_path / "hold-manifest").unlink()
    pending.wait()
    wait_until(lambda: Host.get().resources.pace.duty == 1.0)
    check(f"held://{tmp_path}/s")


@THREAD_FIRST
def test_it_is_not_slowed_when_the_trainer_stops(offload: str, tmp_path: Path) -> None:
    (tmp_path / "hold-manifest").touch()
    for _ in range(20):
        _Pacer.get().end_step(0.1)
    pending = save(f"held://{tmp_path}/s", offload)
    wait_until((tmp_path / "held-manifest").exists)
    Trainer().steps(100)
    wait_until(lambda: Host.get().resources.pace.duty < 1.0)
    wait_until(lambda: Host.get().resources.pace.duty == 1.0)
    assert not pending.done()
    (tmp_path / "hold-manifest").unlink()
    pending.wait()


def test_without_the_option_nothing_is_slowed(tmp_path: Path) -> None:
    (tmp_path / "hold-manifest").touch()
    for _ in range(20):
        _Pacer.get().end_step(0.1)
    pending = save(f"held://{tmp_path}/s", "thread", max_slowdown=None)
    wait_until((tmp_path / "held-manifest").exists)
    for _ in range(100):
        _Pacer.get().end_step(0.5)
    assert Host.get().resources.pace.duty == 1.0
    (tmp_path / "hold-manifest").unlink()
    pending.wait()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The lengths of the steps that the controller is given."""
    lengths: list[float] = []
    monkeypatch.setattr(_Pacer.get()._controller, "end_step", lengths.append)
    return lengths


def test_steps_are_measured(steps: list[float]) -> None:
    for _ in range(3):
        with actorsnap.step():
            time.sleep(0.01)
    assert len(steps) == 3
    assert all(0.01 <= seconds < 5.0 for seconds in steps)


def test_a_step_that_raises_does_not_count(steps: list[float]) -> None:
    with pytest.raises(ZeroDivisionError), actorsnap.step():
        _ = 1 / 0
    assert steps == []


async def test_steps_of_coroutines(steps: list[float], tmp_path: Path) -> None:
    options = Options(fsync=False, max_slowdown=0.5)
    state = {"model": StateDict(weight=torch.ones(1000))}
    pending = await Snapshot.async_take(tmp_path / "s", state, options=options)
    with actorsnap.step():
        await asyncio.sleep(0.01)
    await pending
    assert len(steps) == 1


def test_who_marks_no_step_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="actorsnap"):
        save(tmp_path / "1", "thread").wait()
        save(tmp_path / "2", "thread").wait()
    said = [line for line in caplog.messages if "max_slowdown has no effect" in line]
    assert len(said) == 1


def test_who_marks_steps_hears_nothing_of_a_save_within_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="actorsnap"):
        for number in range(2):
            with actorsnap.step():
                if number:
                    save(tmp_path / "s", "thread").wait()
    assert not caplog.messages


def test_a_save_that_fails_is_paced_no_more(tmp_path: Path) -> None:
    (tmp_path / "fail-manifest").touch()
    pending = save(f"held://{tmp_path}/s", "thread")
    with pytest.raises(actorsnap.ActorSnapError):
        pending.wait()
    wait_until(lambda: not _Pacer.get()._works)
    assert _Pacer.get()._controller._limits == {}


def test_a_forked_child_begins_anew(tmp_path: Path) -> None:
    pacer = _Pacer.get()
    with pacer._lock:
        child = os.fork()
        if child == 0:
            with actorsnap.step():
                pass
            os._exit(0 if _Pacer.get() is not pacer else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_paced_copy_rests(tmp_path: Path) -> None:
    save(tmp_path / "s", "thread").wait()
    options = Options(fsync=False, chunk_bytes=2 << 20, max_slowdown=0.02)
    source = Source(make_location(tmp_path / "s", None), options)
    moved: list[CopyEvent] = []
    host = Host.get()

    async def run() -> CopyReport:
        with paced(options, lambda: 0.0) as pace:
            to = make_location(tmp_path / "copy", None)
            copying = copy(source, to, overwrite=False, on_event=moved.append, pace=pace)
            return await run_on_loop(host, copying)

    set_duty(0.0)
    call = host.submit(run())
    wait_until(lambda: len(moved) == 1)
    time.sleep(0.5)
    assert [event.kind for event in moved] == ["begun"]
    set_duty(1.0)
    assert call.future.result().copied_bytes > NBYTES
    check(tmp_path / "copy")
    assert not _Pacer.get()._works


@pytest.mark.parametrize("stored", [1.0, 0.0])
def test_other_work_than_a_save_is_slowed_unless_it_is_late(stored: float) -> None:
    trainer = Trainer()
    for _ in range(20):
        _Pacer.get().end_step(0.1)
    # Late from the first look on, if nothing is stored.
    options = Options(max_slowdown=0.02, timeout_s=5.0)
    ended = threading.Event()

    async def run() -> None:
        with paced(options, lambda: stored) as pace:
            assert pace is Host.get().resources.pace
            await Host.get().run_blocking(ended.wait, 60)

    call = Host.get().submit(run())
    wait_until(lambda: bool(_Pacer.get()._works))

    def duty() -> float:
        trainer.steps(50)
        return Host.get().resources.pace.duty

    wait_until(lambda: 0.0 < duty() < 0.1)
    if not stored:
        wait_until(lambda: duty() == 1.0)
    ended.set()
    call.future.result()
    wait_until(lambda: Host.get().resources.pace.duty == 1.0)


async def test_without_the_option_other_work_has_no_pace() -> None:
    with paced(Options(), lambda: 0.0) as pace:
        assert pace is None
