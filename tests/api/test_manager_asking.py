# SPDX-License-Identifier: Apache-2.0
"""Saves that are asked for: clocks, metrics, requests and notices, without other ranks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from actorsnap import StateDict, UsageError, cli
from actorsnap import manager as asynchronous
from actorsnap.format.requests import request_key
from actorsnap.manager import EventKind, every, keep
from actorsnap.manager.events import EventBoard, EventReader
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Tally, TallyStorage

NEVER = every.steps(10**6, offset=10**5)


@dataclass
class FakeNotice:
    reason: str
    grace_s: float | None = None


class FakeWatcher:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, on_notice: Callable[[Any], None]) -> None:
        self.calls.append("start")
        self.notify = on_notice

    def stop(self) -> None:
        self.calls.append("stop")


def make(root: object, **settings: Any) -> CheckpointManager:
    state = {"train": StateDict(weight=torch.zeros(10))}
    return CheckpointManager(str(root), state, **{"save": NEVER, "keep": keep.all(), **settings})


def kinds(manager: CheckpointManager) -> list[str]:
    """Of a closed manager."""
    return [str(event.kind) for event in manager.events()]


def test_a_clock_saves_in_the_call_in_which_it_is_due(tmp_path: Path) -> None:
    with make(tmp_path / "run", save=every.minutes(0.3 / 60)) as manager:
        assert not manager.maybe_save(0)
        due_in_s = manager.status().due_in_s
        assert due_in_s is not None
        assert 0 < due_in_s <= 0.3
        time.sleep(0.31)
        decision = manager.maybe_save(1)
        assert decision.reason == "every 0.005 minutes"
        assert not manager.maybe_save(2)
    assert manager.all_steps() == [1]


def test_a_request_is_one_save_with_its_reason(tmp_path: Path) -> None:
    with make(tmp_path / "run") as manager:
        assert not manager.maybe_save(0)
        manager.request("eval")
        manager.request("eval")
        thread = threading.Thread(target=manager.request, args=["thread"])
        thread.start()
        thread.join()
        previous = signal.signal(signal.SIGUSR2, lambda *_: manager.request("signal"))
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
        finally:
            signal.signal(signal.SIGUSR2, previous)
        assert manager.status().requests == ("eval", "thread", "signal")
        assert manager.maybe_save(1).reason == "eval, thread, signal"
        assert not manager.maybe_save(2)
        assert manager.status().requests == ()
        assert "eval" in manager.status().last_agreement
    (info,) = manager.steps()
    assert Snapshot(info.url).metadata["manager"]["reason"] == "eval, thread, signal"


def test_one_save_for_a_request_and_a_due_step(tmp_path: Path) -> None:
    with make(tmp_path / "run", save=every.steps(2)) as manager:
        manager.maybe_save(1)
        manager.request("now")
        assert manager.maybe_save(2).reason == "every 2 steps, now"
        manager.request("after the save of this step")
        assert manager.maybe_save(3).reason == "after the save of this step"


def test_a_save_between_serves_a_request(tmp_path: Path) -> None:
    with make(tmp_path / "run") as manager:
        manager.maybe_save(1)
        manager.maybe_save(2)
        manager.request("now")
        assert manager.maybe_save(3)
        assert not manager.maybe_save(4)


def test_close_serves_a_request(tmp_path: Path) -> None:
    with make(tmp_path / "run") as manager:
        manager.maybe_save(5)
        manager.request("at the end")
    assert manager.all_steps() == [5]
    assert Snapshot(manager.steps()[0].url).metadata["manager"]["reason"] == "at the end"


def test_a_request_that_close_cannot_serve_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(manager: CheckpointManager) -> None:
        with manager:
            manager.maybe_save(0)
            manager.request("in vain")
            raise RuntimeError("of the trainer")

    with make(tmp_path / "run") as unused:
        unused.request("too early")
    failed = make(tmp_path / "run")
    with pytest.raises(RuntimeError):
        train(failed)
    for manager, reason in ((unused, "too early"), (failed, "in vain")):
        found = [(str(event.kind), event.detail) for event in manager.events()]
        assert found == [("unserved", reason)]
        assert f"closed without the save that was asked for: {reason}" in caplog.text


def test_a_request_after_the_save_of_the_last_step(tmp_path: Path) -> None:
    """The state that was asked for is saved."""
    with make(tmp_path / "run", save=every.steps(1)) as manager:
        manager.maybe_save(0)
        manager.request("at the end")
    assert manager.all_steps() == [0]
    assert "unserved" not in kinds(manager)


def test_an_improvement_of_a_misspelled_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = every.improvement("vall", "min") | every.improvement("acc", "max")
    with make(tmp_path / "run", save=policy, keep=keep.best("vall", "min")) as manager:
        assert not manager.maybe_save(0)
        assert not manager.maybe_save(1, metrics={})
        assert not caplog.records
        manager.maybe_save(2, metrics={"val": 0.5, "acc": 2})
        manager.maybe_save(3, metrics=lambda: {"val": 0.3, "acc": 3})
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1, texts
    assert "no metric 'vall' in metrics=; there are: val, acc. every.improvement saves" in texts[0]


def test_an_improvement_of_a_metric(tmp_path: Path) -> None:
    policy = every.improvement("loss", "min", min_delta=0.1) | every.improvement("acc", "max")
    saved: dict[int, str] = {}
    given: list[Any] = [
        {"loss": 3.0},
        {"loss": 2.95},
        {"loss": torch.tensor(2.0)},
        lambda: {"loss": 5.0, "acc": 0.1},
        {"loss": float("nan"), "acc": 0.1},
        None,
        {"acc": 0.2},
    ]
    with make(tmp_path / "run", save=policy) as manager:
        for step, metrics in enumerate(given):
            if decision := manager.maybe_save(step, metrics=metrics):
                saved[step] = decision.reason
    assert saved == {
        0: "loss improved: 3",
        2: "loss improved: 2",
        3: "acc improved: 0.1",
        6: "acc improved: 0.2",
    }


def test_a_resumed_run_knows_the_best(tmp_path: Path) -> None:
    policy = every.improvement("loss", "min")
    with make(tmp_path / "run", save=policy) as manager:
        manager.maybe_save(0, metrics={"loss": 1.0})
    with make(tmp_path / "run", save=policy) as manager:
        assert manager.restore_latest() is not None
        assert not manager.maybe_save(1, metrics={"loss": 1.5})
        assert manager.maybe_save(2, metrics={"loss": 0.5})


def test_pace_saves_when_the_last_is_stored(tmp_path: Path) -> None:
    with make(tmp_path / "run", save=every.pace()) as manager:
        assert manager.maybe_save(0)
        manager.wait()
        assert manager.maybe_save(1)
        manager.wait()
    with make(tmp_path / "other", save=every.pace(1000)) as manager:
        assert manager.maybe_save(0)
        manager.wait()
        assert not manager.maybe_save(1)


def test_overhead_measures_the_first_save(tmp_path: Path) -> None:
    with make(tmp_path / "run", save=every.overhead(1e-9)) as manager:
        assert manager.maybe_save(0)
        manager.wait()
        assert not manager.maybe_save(1)
        assert (manager.status().due_in_s or 0.0) > 1000


@pytest.mark.parametrize("grace_s", [None, 30.0])
def test_a_notice_saves_once_and_stops(tmp_path: Path, grace_s: float | None) -> None:
    watcher = FakeWatcher()
    policy = every.notice() | every.last()
    with make(tmp_path / "run", save=policy, notices=[watcher]) as manager:
        assert watcher.calls == ["start"]
        manager.maybe_save(0)
        watcher.notify(FakeNotice("spot", grace_s))
        watcher.notify(FakeNotice("SIGTERM", grace_s))
        stops = manager.should_stop
        assert not stops
        assert manager.maybe_save(1).reason == "spot, SIGTERM"
        assert manager.should_stop
        watcher.notify(FakeNotice("SIGTERM", grace_s))
        assert not manager.maybe_save(2)
    assert watcher.calls == ["start", "stop"]
    assert manager.all_steps() == [1, 2]  # the latter by every.last()
    assert kinds(manager).count("notice") == 2


def test_a_save_of_this_call_counts(tmp_path: Path) -> None:
    watcher = FakeWatcher()
    with make(tmp_path / "run", save=every.notice() | every.steps(2), notices=[watcher]) as manager:
        manager.maybe_save(2)
        watcher.notify(FakeNotice("spot"))
        assert not manager.maybe_save(3)
        assert manager.should_stop
    assert manager.all_steps() == [2]


def test_a_notice_without_time_saves_nothing_more(tmp_path: Path) -> None:
    watcher = FakeWatcher()
    with make(tmp_path / "run", save=every.notice() | every.last(), notices=[watcher]) as manager:
        for step in range(4):
            manager.maybe_save(step)
            time.sleep(0.1)
        watcher.notify(FakeNotice("spot", 0.05))  # less than a step
        assert not manager.maybe_save(4)
        assert manager.should_stop
        assert "no time" in manager.status().last_agreement
    assert manager.all_steps() == []


def test_without_the_policy_a_notice_only_stops(tmp_path: Path) -> None:
    watcher = FakeWatcher()
    with make(tmp_path / "run", notices=[watcher]) as manager:
        manager.maybe_save(0)
        watcher.notify(FakeNotice("spot"))
        assert not manager.maybe_save(1)
        assert manager.should_stop


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"save": every.notice()}, "notices="),
        ({"notices": ["SIGTERM"]}, "'SIGTERM' is not one"),
        ({"notices": FakeWatcher()}, "a list of watchers"),
        ({"notices": 5}, "a list of watchers"),
        ({"notices": "SIGTERM"}, "a list of watchers"),
        ({"watch_requests_s": 0}, "greater than 0"),
        ({"watch_requests_s": "1"}, "greater than 0"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(tmp_path / "run", **settings)


def test_a_rank_without_watchers_of_its_own(tmp_path: Path) -> None:
    """The notices come to other ranks. No rank may be refused alone: the others would wait."""
    with make(tmp_path / "run", save=every.notice() | every.steps(1), notices=[]) as manager:
        assert manager.maybe_save(0)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (5, "a text, not int"),
        (None, "a text, not NoneType"),
        (b"x", "a text, not bytes"),
        ("", "one line"),
        (" ", "one line"),
        ("two\nlines", "one line"),
        ("\ud800", "one line"),
        ("x" * 100_000, "has 100000 characters"),
    ],
)
def test_a_bad_reason_is_refused_and_changes_nothing(tmp_path: Path, bad: Any, text: str) -> None:
    root = tmp_path / "run"
    with make(root) as manager:
        manager.maybe_save(0)
        with pytest.raises(UsageError, match=text):
            manager.request(bad)
        assert manager.status().requests == ()
        assert not manager.maybe_save(1)
        manager.request("x" * 1000)
        assert manager.maybe_save(2)
    with pytest.raises(UsageError, match=text):
        manager.pin(2, bad)
    assert manager.steps()[0].pins == ()
    if isinstance(bad, str) and bad.isascii():
        shell = CliRunner().invoke(cli.app, ["save-now", str(root), "--reason", bad])
        assert shell.exit_code != 0
        assert text in shell.output.replace("\n", " ")
    assert not [*root.glob(".manager/requests/*")]


def test_a_notice_with_a_bad_reason_counts(tmp_path: Path) -> None:
    watcher = FakeWatcher()
    bad: Any = 5
    with make(tmp_path / "run", save=every.notice(), notices=[watcher]) as manager:
        manager.maybe_save(0)
        watcher.notify(FakeNotice(bad))
        assert manager.maybe_save(1).reason == "a notice"


def test_a_subclass_of_str_is_a_reason(tmp_path: Path) -> None:
    with make(tmp_path / "run") as manager:
        manager.request(EventKind.NOTICE)
        assert type(manager.status().requests[0]) is str
        assert manager.maybe_save(0).reason == "notice"


def test_the_shell_asks_for_a_save(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def ask() -> None:
        result = CliRunner().invoke(cli.app, ["save-now", str(root), "--reason", "by hand"])
        assert result.exit_code == 0, result.output

    assert CliRunner().invoke(cli.app, ["save-now", str(root)]).exit_code == 3
    with make(root, watch_requests_s=0.05) as manager:
        manager.save(0)
        (root / request_key("damaged")).parent.mkdir(parents=True)
        (root / request_key("damaged")).write_text("{}")
        ask()
        deadline = time.monotonic() + 30
        step, reason = 0, ""
        while not reason and time.monotonic() < deadline:
            step += 1
            reason = manager.maybe_save(step).reason
            time.sleep(0.01)
        assert reason == "by hand"
        assert not [*(root / ".manager/requests").glob("*.json")]
    ask()
    with make(root) as manager:  # it does not look
        manager.restore_latest()
        assert not manager.maybe_save(step + 1)
    assert len([*(root / ".manager/requests").glob("*.json")]) == 1


def test_no_request_while_nothing_is_due(tmp_path: Path) -> None:
    tally = Tally()
    policy = every.minutes(100) | every.notice() | every.improvement("loss", "min")
    with (
        faulty(lambda inner: TallyStorage(inner, tally)),
        make(faulty_url(tmp_path / "run"), save=policy, notices=[FakeWatcher()]) as manager,
    ):
        manager.maybe_save(0, metrics={"loss": 1.0})
        manager.wait()
        manager.prune(dry_run=True)
        number = len(tally.operations)
        for step in range(1, 100):
            assert not manager.maybe_save(step, metrics={"loss": 1.0})
        assert len(tally.operations) == number


def test_events_of_a_run(tmp_path: Path) -> None:
    with make(tmp_path / "run", save=every.steps(1), keep=keep.last(1), min_valid=1) as manager:
        manager.maybe_save(0)
        manager.wait()
        manager.maybe_save(1)
        other = make(tmp_path / "run", save=every.steps(1))
        manager.wait()
    found = [(str(event.kind), event.step) for event in manager.events()]
    for step in (0, 1):
        order = [kind for kind, of in found if of == step]
        assert order[:4] == ["decided", "staged", "committed", "verified"]
    assert ("pruned", 0) in found
    assert all(event.num_missed == 0 for event in manager.events())
    other.restore_latest()
    other.save(2)
    other.close()


def test_failures_are_events(tmp_path: Path) -> None:
    first, second = make(tmp_path / "run"), make(tmp_path / "run")
    first.save(0)
    second.restore_latest()
    second.save(1)
    with pytest.raises(Exception, match="another manager"):
        first.save(2)
    first.close()
    second.close()
    assert kinds(first)[-3:] == ["decided", "fenced", "failed"]


async def test_events_of_the_async_facade(tmp_path: Path) -> None:
    state = {"train": StateDict(weight=torch.zeros(10))}
    manager = asynchronous.CheckpointManager(tmp_path / "run", state, save=every.steps(1))
    async with manager:
        await manager.maybe_save(0)
        manager.request("more")
        decision = await manager.maybe_save(1)
        assert decision.reason == "every step, more"
    found = [event.kind async for event in manager.events()]
    assert found.count(EventKind.COMMITTED) == 2


def test_missed_events_are_counted() -> None:
    board = EventBoard()
    reader = EventReader(board)
    for step in range(1500):
        board.post(EventKind.STAGED, step)
    first, second = reader.read(), reader.read()
    assert first is not None
    assert second is not None
    assert (first.step, first.num_missed) == (500, 500)
    assert (second.step, second.num_missed) == (501, 0)
    while reader.read() is not None:
        pass
    assert not reader.is_over
    board.close()
    assert reader.read() is None
    assert reader.is_over


def test_the_records_of_requests_are_json(tmp_path: Path) -> None:
    with make(tmp_path / "run") as manager:
        manager.save(0)
    CliRunner().invoke(cli.app, ["save-now", str(tmp_path / "run")])
    (file,) = (tmp_path / "run/.manager/requests").glob("*.json")
    assert json.loads(file.read_text())
