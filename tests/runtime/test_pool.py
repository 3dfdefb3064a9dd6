# SPDX-License-Identifier: Apache-2.0
"""Worker threads: as many as asked for, more only while all of them hang."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorsnap.runtime import pool as pool_module
from actorsnap.runtime.pool import WorkerPool
from tests.conftest import LeakCheck


@pytest.fixture
def pool(no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.setattr(pool_module, "_HANGS_AFTER_S", 0.05)
    monkeypatch.setattr(pool_module, "_IDLE_S", 0.05)
    pool = WorkerPool(2)
    yield pool
    pool.stop(timeout_s=60)


def submit(pool: WorkerPool, fn: Callable[..., Any], *args: Any) -> threading.Event:
    done = threading.Event()
    pool.submit((fn, args, lambda result, error: done.set()))
    return done


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def test_threads_are_added_while_all_hang_and_retire(pool: WorkerPool) -> None:
    recovered = threading.Event()
    stuck = [submit(pool, recovered.wait) for _ in range(4)]
    waiting = submit(pool, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_HANGS_AFTER_S", 60)
        wait_until(lambda: len(pool._busy_since) == 2)
        assert pool.relieve()
        assert len(pool._threads) == 2  # not at once: they may be busy only
    wait_until(lambda: pool.relieve() and len(pool._threads) > 2)
    assert waiting.wait(60)
    assert len(pool._threads) <= 5
    recovered.set()
    assert all(done.wait(60) for done in stuck)
    wait_until(lambda: len(pool._threads) == 2)
    assert not pool.relieve()


def test_threads_that_make_progress_stay_alone(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_HANGS_AFTER_S", 0.5)
    jobs = [submit(pool, time.sleep, 0.01) for _ in range(150)]
    while pool.relieve():
        assert len(pool._threads) == 2
        time.sleep(0.02)
    assert all(done.wait(60) for done in jobs)


def test_threads_that_are_there_and_those_to_come_are_lowered(pool: WorkerPool) -> None:
    recovered = threading.Event()
    pool.lower_priority()
    nice: list[int] = []

    def look() -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert recovered.wait(60)

    jobs = [threading.Event() for _ in range(4)]
    for done in jobs:
        pool.submit_waiting((look, (), lambda *_, done=done: done.set()))
    wait_until(lambda: len(nice) == len(jobs))
    recovered.set()
    assert all(done.wait(60) for done in jobs)
    assert nice == [19] * 4


def test_they_are_bounded(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MAX_EXTRA", 3)
    recovered = threading.Event()
    for _ in range(9):
        submit(pool, recovered.wait)
    wait_until(lambda: pool.relieve() and len(pool._threads) == 5)
    time.sleep(0.1)
    pool.relieve()
    assert len(pool._threads) == 5
    recovered.set()


def test_stopping_is_bounded(no_leaks: LeakCheck) -> None:
    pool = WorkerPool(2)
    recovered = threading.Event()
    submit(pool, recovered.wait)
    time.sleep(0.05)
    began = time.monotonic()
    pool.stop(timeout_s=0.2)
    assert time.monotonic() - began < 30
    recovered.set()


def test_a_start_that_fails_leaves_no_thread(
    no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.endswith("-1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        WorkerPool(2)


def test_jobs_that_wait_get_a_thread_each_at_once(pool: WorkerPool) -> None:
    met = threading.Barrier(6)
    for _ in range(5):
        pool.submit_waiting((met.wait, (60,), lambda result, error: None))
    met.wait(60)  # all five are in it
    wait_until(lambda: len(pool._threads) == 2)
    for _ in range(3):
        wait_until(lambda: not pool._busy_since)
        done = threading.Event()
        pool.submit_waiting((int, (), lambda *_, done=done: done.set()))
        assert done.wait(60)
    assert len(pool._threads) == 2  # who is idle takes it


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_is_let_go_before_its_end_is_told(pool: WorkerPool, fails: bool) -> None:
    """Who is told may free what the job has copied."""

    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    told: list[bool] = []
    ended = threading.Event()

    def use(memory: Memory) -> None:
        if fails:
            raise ValueError

    def tell(result: object, error: BaseException | None) -> None:
        if error is not None:
            error.__traceback__ = None  # its frames hold the arguments
        told.append(alive() is not None)
        ended.set()

    pool.submit((use, (memory,), tell))
    del memory
    assert ended.wait(60)
    assert told == [False]
