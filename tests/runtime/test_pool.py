"""Worker threads: as many as asked for, more only while all of them hang."""

from __future__ import annotations

import threading
import time
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
    pool.stop(timeout_s=10)


def submit(pool: WorkerPool, fn: Callable[..., Any], *args: Any) -> threading.Event:
    done = threading.Event()
    pool.submit(fn, args, lambda result, error: done.set())
    return done


def test_threads_are_added_while_all_hang_and_retire(pool: WorkerPool) -> None:
    recovered = threading.Event()
    stuck = [submit(pool, recovered.wait) for _ in range(4)]
    waiting = submit(pool, int)
    assert pool.relieve()
    assert len(pool._threads) == 2  # not at once: they may be busy only
    time.sleep(0.1)
    assert pool.relieve()
    assert waiting.wait(10)
    assert len(pool._threads) <= 5
    recovered.set()
    assert all(done.wait(10) for done in stuck)
    deadline = time.monotonic() + 10
    while len(pool._threads) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not pool.relieve()


def test_threads_that_make_progress_stay_alone(pool: WorkerPool) -> None:
    jobs = [submit(pool, time.sleep, 0.01) for _ in range(40)]
    while pool.relieve():
        assert len(pool._threads) == 2
        time.sleep(0.02)
    assert all(done.wait(10) for done in jobs)


def test_they_are_bounded(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MAX_EXTRA", 3)
    recovered = threading.Event()
    for _ in range(9):
        submit(pool, recovered.wait)
    for _ in range(3):
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
    assert time.monotonic() - began < 5
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
        pool.submit_waiting(met.wait, (10,), lambda result, error: None)
    met.wait(10)  # all five are in it
    deadline = time.monotonic() + 10
    while len(pool._threads) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(3):
        pool.submit_waiting(int, (), lambda result, error: None)
        time.sleep(0.02)
    assert len(pool._threads) == 2  # who is idle takes it
