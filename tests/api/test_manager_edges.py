# SPDX-License-Identifier: Apache-2.0
"""Mistakes with a manager, and what it says about them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorsnap import StateDict, UsageError
from actorsnap import manager as asynchronous
from actorsnap.manager import EventKind, StepName, every, keep, notices
from actorsnap.manager.sync import CheckpointManager
from tests.support import forker

NEVER = every.steps(10**6, offset=10**5)


def make(root: object, **settings: Any) -> CheckpointManager:
    state = {"train": StateDict(weight=torch.zeros(10))}
    return CheckpointManager(str(root), state, **{"save": NEVER, "keep": keep.all(), **settings})


@pytest.mark.parametrize("choose", [lambda steps: 1 / 0, lambda steps: ["step-1"]])
def test_a_failing_keep_policy_is_visible(tmp_path: Path, choose: Any) -> None:
    manager = make(tmp_path / "run", keep=keep.custom(choose))
    with manager:
        manager.save(1)
    assert [*manager.status().failed_deletes] == [manager.path]
    failed = [event for event in manager.events() if event.kind == EventKind.DELETE_FAILED]
    assert [event.step for event in failed] == [None]
    assert failed[0].detail == manager.status().failed_deletes[manager.path]


def test_the_next_good_pass_forgets_a_failing_policy(tmp_path: Path) -> None:
    manager = make(tmp_path / "run", keep=keep.custom(lambda steps: [1 // (len(steps) - 1)]))
    with manager:
        manager.save(1)
        until_s = time.monotonic() + 10
        while not manager.status().failed_deletes:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        manager.save(2)
    assert manager.status().failed_deletes == {}


def test_a_restore_watches_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    manager = make(tmp_path / "run", notices=[notices.signals("SIGUSR2")])
    try:
        assert signal.getsignal(signal.SIGUSR2) is before
        manager.restore_latest()
        os.kill(os.getpid(), signal.SIGUSR2)
        manager.maybe_save(0)
        assert manager.should_stop
    finally:
        manager.close()
    assert signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.parametrize("timeout_s", ["a", -1, None, float("nan"), True])
def test_a_bad_timeout_closes_nothing(tmp_path: Path, timeout_s: Any) -> None:
    manager = make(tmp_path / "run")
    manager.save(1)
    with pytest.raises(UsageError, match="timeout_s must be a number of at least 0"):
        manager.close(timeout_s)
    manager.save(2)
    manager.close(timeout_s=0)
    assert "verified" in [*map(str, (event.kind for event in manager.events()))]


def test_a_closed_manager_saves_nothing(tmp_path: Path) -> None:
    """Also at a step that is not due: the loop would run on for a long time."""
    with make(tmp_path / "run", save=every.steps(100)) as manager:
        manager.maybe_save(0)
    with pytest.raises(UsageError, match="is closed: call maybe_save inside the `with` block"):
        manager.maybe_save(1)
    with pytest.raises(UsageError, match="is closed"):
        manager.save(2)


def test_a_closed_manager_takes_no_request(tmp_path: Path) -> None:
    with make(tmp_path / "run") as manager:
        manager.save(1)
    with pytest.raises(UsageError, match="is closed"):
        manager.request("late")
    assert manager.status().requests == ()


NOT_CLOSED = """\
import sys
import torch
from actorsnap import StateDict
from actorsnap.manager import every
from actorsnap.manager.sync import CheckpointManager

policy = every.last() if sys.argv[2] == "last" else every.steps(1000)
manager = CheckpointManager(sys.argv[1], {"a": StateDict(w=torch.zeros(2))}, save=policy)
for step in range(1, 4):
    manager.maybe_save(step)
if sys.argv[2] == "request":
    manager.request("before the upgrade")
"""


@pytest.mark.usefixtures("forker")
@pytest.mark.parametrize(
    ("how", "what"), [("request", "before the upgrade"), ("last", "last step"), ("none", "")]
)
def test_a_manager_that_is_never_closed_says_what_it_did_not_save(
    tmp_path: Path, how: str, what: str
) -> None:
    command = forker.command("-c", NOT_CLOSED, str(tmp_path / "run"), how)
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("was not closed" in ended.stderr) == bool(what)
    assert what in ended.stderr


@pytest.mark.parametrize("policy", [3, "last:3", StepName])
def test_another_policy_must_be_one(tmp_path: Path, policy: Any) -> None:
    with make(tmp_path / "run") as manager:
        manager.save(1)
        for call in (manager.explain, manager.prune):
            with pytest.raises(UsageError, match=r"keep must be a policy like keep.last\(3\)"):
                call(policy)


def test_the_other_with(tmp_path: Path) -> None:
    other: Any = asynchronous.CheckpointManager(tmp_path / "run", {}, save=NEVER)
    with pytest.raises(UsageError, match="async with"), other:
        pass

    async def use() -> None:
        blocking: Any = make(tmp_path / "run")
        with pytest.raises(UsageError, match="write with CheckpointManager"):
            async with blocking:
                pass

    asyncio.run(use())


def test_steps_of_other_integer_types(tmp_path: Path) -> None:
    long: Any = np.int64
    with make(tmp_path / "run", save=every.steps(2)) as manager:
        assert manager.maybe_save(long(4))
        assert not manager.maybe_save(long(5))
        manager.save(long(7))
        manager.async_save(long(8))
        found = manager.restore(long(7))
        assert found.step == 7
    assert manager.all_steps() == [4, 7, 8]


@pytest.mark.parametrize("step", [None, True, 1.0, "1", -1, 1 << 63])
def test_no_steps(tmp_path: Path, step: Any) -> None:
    with make(tmp_path / "run", save=every.steps(1)) as manager:
        for call in (manager.maybe_save, manager.save, manager.async_save, manager.restore):
            with pytest.raises(UsageError, match="the training step: an integer of at"):
                call(step)
    assert manager.all_steps() == []


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"progress": 3}, "progress must be True or False"),
        ({"app_state": 3}, "app_state must be"),
        ({"app_state": []}, "app_state must be"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path: Path, settings: Any, what: str) -> None:
    arguments = {"root": str(tmp_path / "run"), "save": NEVER, **settings}
    with pytest.raises(UsageError, match=what):
        CheckpointManager(**arguments)


def test_a_custom_save_policy_returns_a_bool(tmp_path: Path) -> None:
    policy = every.custom(lambda step: "no")  # type: ignore[arg-type,return-value]
    with (
        make(tmp_path / "run", save=policy) as manager,
        pytest.raises(UsageError, match="return True or False"),
    ):
        manager.maybe_save(1)
    of_numpy: Any = np.bool_(True)
    with make(tmp_path / "run", save=every.custom(lambda step: of_numpy)) as manager:
        assert manager.maybe_save(1)


@pytest.mark.parametrize("metric", [3, "", None])
def test_best_needs_a_name(tmp_path: Path, metric: Any) -> None:
    with make(tmp_path / "run") as manager, pytest.raises(UsageError, match="metric"):
        manager.best(metric, "min")
