# SPDX-License-Identifier: Apache-2.0
"""``CheckpointManager``: what it saves, keeps, finds and deletes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from typer.testing import CliRunner

from actorsnap import (
    ChecksumMismatch,
    IncompatibleState,
    NoValidSnapshot,
    RootTaken,
    SnapshotAborted,
    StateDict,
    StorageError,
    StorageFull,
    UsageError,
)
from actorsnap import manager as asynchronous
from actorsnap.cli import app
from actorsnap.errors import notes_of
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.manager import EventKind, StepName, every, keep, keeper
from actorsnap.manager.sync import CheckpointManager
from actorsnap.storage.wrapper import Wrapper
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally, TallyStorage, fail
from tests.api.slow_storage import gated


class Run:
    """A trainer whose state shows the step that it is of."""

    def __init__(self, root: str | Path, **settings: Any) -> None:
        self.state = StateDict(weight=torch.zeros(1000), step=-1)
        settings = {"save": every.steps(100), "keep": keep.last(2), **settings}
        self.manager = CheckpointManager(root, {"train": self.state}, **settings)

    def train(self, *steps: int, **given: Any) -> None:
        for step in steps:
            self.state["weight"].fill_(step)
            self.state["step"] = step
            self.manager.maybe_save(step, **given)

    def check(self, step: int) -> None:
        assert self.state["step"] == step
        assert torch.equal(self.state["weight"], torch.full((1000,), float(step)))

    def close(self) -> None:
        self.manager.close()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name not in (".manager", "latest"))


def damage(root: Path, name: str) -> None:
    (file,) = (root / name).glob("*/data/**/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    # Every deletion that began has ended.
    assert not [*tmp_path.glob("run/.manager/deleting/*")]


def test_saves_what_is_due_and_keeps_the_last(root: Path) -> None:
    run = Run(root)
    decisions = []
    for step in range(0, 501, 50):
        run.state["step"] = step
        decisions.append((step, bool(run.manager.maybe_save(step))))
    run.close()
    assert decisions == [(step, step % 100 == 0) for step in range(0, 501, 50)]
    assert names(root) == ["step-0000000400.g1", "step-0000000500.g1"]
    assert run.manager.all_steps() == [400, 500]
    assert Snapshot(root / "step-0000000500.g1").step == 500


def test_nothing_due_touches_nothing(root: Path) -> None:
    run = Run(root)
    for step in range(1, 100):
        assert not run.manager.maybe_save(step)
    run.close()
    assert not root.exists()


def test_a_manager_that_never_saves_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(root, {"s": StateDict(x=1)}) as manager:
        for step in range(3):
            assert not manager.maybe_save(step)
    assert caplog.text.count("maybe_save saves only on request: this manager has no save=") == 1


def test_resumes_where_the_run_ended(root: Path) -> None:
    first = Run(root)
    first.train(0, 100, 200)
    first.close()
    second = Run(root)
    found = second.manager.restore_latest()
    assert found is not None
    assert (found.step, found.skipped) == (200, ())
    second.check(200)
    second.train(200, 300)
    second.close()
    assert names(root) == ["step-0000000200.g1", "step-0000000300.g2"]


def test_a_fresh_start(root: Path) -> None:
    run = Run(root)
    assert run.manager.restore_latest() is None
    run.train(0)
    run.close()
    assert names(root) == ["step-0000000000.g1"]


def test_skips_damage_and_says_why(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Run(root, keep=keep.all())
    first.train(0, 100, 200)
    first.close()
    damage(root, "step-0000000200.g1")
    (root / "step-0000000100.g1/actorsnap.json").write_text("{}")
    second = Run(root)
    found = second.manager.restore_latest()
    assert found is not None
    assert found.step == 0
    assert [url.rpartition("/")[2] for url, _ in found.skipped] == [
        "step-0000000200.g1",
        "step-0000000100.g1",
    ]
    assert found.skipped[0][1].endswith("differs from what was saved")
    assert "overwritten" not in found.skipped[0][1] + caplog.text
    assert "200.g1 is damaged" in caplog.text
    second.check(0)


@pytest.mark.parametrize("pattern", ["data/**/*.safetensors", "manifest/0.json"])
def test_the_first_save_after_damage_blames_no_manager(
    root: Path, caplog: pytest.LogCaptureFixture, pattern: str
) -> None:
    first = Run(root)
    first.train(0, 100)
    first.close()
    (file,) = root.glob(f"step-0000000100.g1/*/{pattern}")
    os.truncate(file, file.stat().st_size // 2)
    second = Run(root)
    found = second.manager.restore_latest()
    assert found is not None
    assert found.step == 0
    second.train(100)
    second.close()
    (text,) = caplog.messages
    assert "restored" in text
    assert "step-0000000100.g1 is damaged" in text


def test_damage_everywhere_is_no_fresh_start(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Run(root)
    first.train(0, 100)
    first.close()
    for name in names(root):
        damage(root, name)
    second = Run(root)
    with pytest.raises(NoValidSnapshot) as caught:
        second.manager.restore_latest()
    assert len(caught.value.skipped) == 2
    (note,) = caught.value.__notes__
    assert note.startswith("The restore failed: train may be partly overwritten. Restore again")
    assert Run(root).manager.restore_latest(allow_fresh=True) is None
    assert "so train may be partly overwritten: make them again" in caplog.text


def test_another_app_state_than_the_saved_one(root: Path) -> None:
    """A manager does not take what the advice of the error names."""
    first = Run(root)
    first.train(0)
    first.close()
    with CheckpointManager(root, {"other": StateDict(x=1)}) as manager:
        for call in (manager.restore_latest, lambda: manager.restore(0)):
            with pytest.raises(IncompatibleState) as caught:
                call()
            note, ending = caught.value.__notes__
            assert note.startswith("A manager's restore")
            assert "() has no rename=: to pass it, " in note
            assert f'call Snapshot("{root}/step-0000000000.g1").restore instead' in note
            assert "begins a new run" in ending


def test_no_advice_that_would_not_help(root: Path) -> None:
    with CheckpointManager(root, {"own": StateDict(x=torch.zeros(2))}) as manager:
        manager.save(0)
    with CheckpointManager(root, {"own": StateDict(x=torch.zeros(3))}) as manager:
        with pytest.raises(IncompatibleState, match="shape") as caught:
            manager.restore_latest()
        assert not notes_of(caught.value)


def test_what_a_restore_found_damaged_counts_as_damaged(root: Path) -> None:
    first = Run(root, keep=keep.all())
    first.train(0, 100, 200)
    first.close()
    data = {path: path.read_bytes() for path in (root / "step-0000000200.g1").rglob("*.safe*")}
    damage(root, "step-0000000200.g1")
    manager = Run(root, keep=keep.last(1), min_valid=1).manager
    latest = manager.latest_valid()  # by sizes
    assert latest is not None
    assert latest.step == 200
    found = manager.restore_latest()
    assert found is not None
    assert found.step == 100
    latest = manager.latest_valid()
    assert latest is not None
    assert latest.step == 100
    verdicts = {verdict.name.step: verdict for verdict in manager.explain()}
    assert verdicts[200].keeps
    assert verdicts[200].reasons[0].startswith("damaged: ")
    assert "block 0 of 'train/weight'" in verdicts[200].reasons[0]
    assert "newest verified" in ", ".join(verdicts[100].reasons)
    manager.delete(0)
    with pytest.raises(UsageError, match="the only valid snapshot"):
        manager.delete(100)
    # A copy that was put back is found by the next restore, or by a full look.
    for path, content in data.items():
        path.write_bytes(content)
    assert (manager.latest_valid() or found).step == 100
    assert (manager.latest_valid("full") or found).step == 200
    assert (manager.latest_valid() or found).step == 200


def test_a_wrong_model_costs_no_steps(root: Path) -> None:
    first = Run(root)
    first.train(0, 100)
    first.close()
    state = StateDict(weight=torch.zeros(7), step=0)
    second = CheckpointManager(root, {"train": state}, save=every.steps(100))
    with pytest.raises(IncompatibleState):
        second.restore_latest()


def test_an_outage_costs_no_steps(root: Path) -> None:
    first = Run(root)
    first.train(0, 100)
    first.close()
    url = f"file://{root}"
    second = CheckpointManager(url, {}, save=every.steps(1), storage_options={"no": "such option"})
    with pytest.raises((StorageError, UsageError)):
        second.restore_latest()


def test_a_rewind_abandons_later_steps(root: Path) -> None:
    first = Run(root, keep=keep.all())
    first.train(0, 100, 200, 300)
    first.manager.restore(100)
    first.check(100)
    first.train(101, 200)
    first.close()
    assert first.manager.all_steps() == [0, 100, 200]
    second = Run(root)
    found = second.manager.restore_latest()
    assert found is not None
    assert found.url.endswith("step-0000000200.g2")
    states = {str(info.name): info.state for info in second.manager.steps(all=True)}
    assert states["step-0000000300.g1"] == states["step-0000000200.g1"] == "abandoned"
    with pytest.raises(UsageError) as raised:
        second.manager.restore(300)
    assert "step 300 to restore: it is abandoned. Steps: 0, 100, 200. Snapshot(" in str(
        raised.value
    )
    with pytest.raises(UsageError, match=r"step 7 to restore\. Steps: 0, 100, 200$"):
        second.manager.restore(7)


def test_abandoned_steps_and_strangers_stay(root: Path) -> None:
    first = Run(root, keep=keep.all())
    first.train(0, 100, 200, 300)
    first.manager.restore(0)
    Snapshot.take(root / "by-hand", {"train": first.state})
    (root / "notes.txt").write_text("mine")
    first.close()
    second = Run(root, keep=keep.last(1), min_valid=1)
    second.manager.restore(0)
    second.train(100, 200, 300)
    second.close()
    assert set(names(root)) >= {
        *("by-hand", "notes.txt"),
        *("step-0000000100.g1", "step-0000000200.g1", "step-0000000300.g1"),
    }
    # Of its own timeline: the one restored from, and the last.
    assert second.manager.all_steps() == [0, 300]


def test_files_in_folders_named_as_snapshots_stay(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = [
        root / "step-0000000001.g1" / "notes.txt",
        root / "step-0000000002.g1" / "photos" / "a.jpg",
        root / "step-0000000003.g1" / "model.safetensors",
        root / "step-0000000100.g2" / "export.onnx",  # next to a snapshot
        root / "step-0000000200.g2" / "export.onnx",
    ]
    first = Run(root, keep=keep.all())
    first.train(0)
    first.close()
    for file in mine[:3]:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    # An attempt of a killed process next to a stranger's file goes.
    rest = root / "step-0000000002.g1/20260101T000000-00000000-1-00000000/data/x/0-0.safetensors"
    rest.parent.mkdir(parents=True)
    rest.write_text("rest")
    os.utime(rest, (0, 0))  # of another host: it may still run if it has just stored something
    second = Run(root, keep=keep.last(1), min_valid=1)
    second.manager.restore_latest()
    second.train(100)
    second.manager.wait()
    mine[3].write_text("mine")
    second.train(200)
    second.manager.wait()
    mine[4].write_text("mine")
    second.train(300, 400)
    second.close()
    second.manager.prune()
    assert all(file.read_text() == "mine" for file in mine)
    assert [*(root / "step-0000000100.g2").iterdir()] == [mine[3]]
    assert not rest.exists()
    assert caplog.text.count("notes.txt stays") == 1
    assert second.manager.all_steps() == [0, 400]
    for file in mine:
        file.unlink()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_strangers_latest_stays(
    root: Path, caplog: pytest.LogCaptureFixture, is_link: bool
) -> None:
    run = Run(root)
    run.train(0)
    run.manager.wait()
    latest = root / "latest"
    run.close()
    assert os.readlink(latest) == "step-0000000000.g1"
    latest.unlink()
    if is_link:
        latest.symlink_to("/elsewhere/best")
    else:
        latest.write_text("mine")
    run = Run(root)
    run.manager.restore_latest()
    run.train(100, 200)
    run.close()
    if is_link:
        assert os.readlink(latest) == "/elsewhere/best"
    else:
        assert latest.read_text() == "mine"
    assert caplog.text.count("latest is not the manager's link") == 1


def test_a_later_manager_fences_an_earlier_one(root: Path) -> None:
    first, second = Run(root), Run(root)
    first.train(0, 100)
    first.manager.wait()
    second.manager.restore_latest()
    second.train(200)
    second.manager.wait()
    before = names(root)
    with pytest.raises(RootTaken):
        first.train(200)
    assert first.manager.status().is_superseded
    assert first.manager.prune(keep.last(1)).deleted == ()
    second.close()
    assert set(names(root)) <= set(before)


def test_looking_fences_nobody(root: Path) -> None:
    first = Run(root)
    first.train(0)
    evaluation = Run(root)
    evaluation.manager.restore_latest()
    evaluation.manager.steps(all=True)
    evaluation.close()
    first.train(100)
    first.close()
    assert first.manager.all_steps() == [0, 100]


def test_a_failed_save_is_raised_by_the_next(root: Path) -> None:
    run = Run(root)
    run.train(0)
    run.manager.wait()
    blocker = root / "step-0000000100.g1"
    blocker.write_text("a file in the way")
    with pytest.raises((SnapshotAborted, StorageError)):
        run.train(100, 200)
    blocker.unlink()


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_last_save_has_what_was_passed_with_its_step(root: Path, is_asked: bool) -> None:
    state = {"own": StateDict(x=torch.zeros(3))}
    saving = every.at([5]) if is_asked else every.at([5]) | every.last()
    with CheckpointManager(root, save=saving) as manager:
        for step in range(8):
            state["own"]["x"].fill_(step)
            given: dict[str, Any] = {"metrics": {"loss": 8.0 - step}, "metadata": {"at": step}}
            manager.maybe_save(step, app_state=state, **given)
        if is_asked:
            manager.request()
    assert [(info.step, info.metrics) for info in manager.steps()] == [
        (5, {"loss": 3.0}),
        (7, {"loss": 1.0}),
    ]
    latest = manager.latest()
    assert latest is not None
    assert Snapshot(latest.url).metadata["at"] == 7
    assert Snapshot(latest.url).created == latest.created


def test_an_explicit_save_does_not_lend_its_metrics_to_the_last(root: Path) -> None:
    run = Run(root, save=every.at([5]) | every.last(), keep=keep.all())
    with run.manager as manager:
        manager.maybe_save(5, metrics={"loss": 1.0})
        manager.save(6, metrics={"loss": 2.0})
        manager.maybe_save(7)
    assert [dict(info.metrics) for info in manager.steps()] == [{"loss": 1.0}, {"loss": 2.0}, {}]


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_best_lists_the_root_once(root: Path, metric: str) -> None:
    tally = Tally()
    with faulty(lambda inner: TallyStorage(inner, tally)):
        run = Run(faulty_url(root))
        run.train(0, 100, metrics={"loss": 1.0})
        run.close()
        before = len(tally.operations)
        CheckpointManager(faulty_url(root)).best(metric, "min")
        verbs = [operation.verb for operation in tally.operations[before:]]
        assert verbs.count("list_folders") == 1


@pytest.mark.parametrize("max_pending", [1, 2])
@pytest.mark.parametrize("stage", ["eager", "lazy"])
def test_the_call_that_raises_an_earlier_failure_saves_its_step(
    root: Path, stage: str, max_pending: int
) -> None:
    broken = True

    def strike(operation: Operation) -> None:
        if broken and (operation.verb, operation.key) == ("put_if_absent", COMMIT_KEY):
            fail(operation)

    with faulty(lambda inner: TallyStorage(inner, Tally(look=strike))):
        settings: dict[str, Any] = {"stage": stage, "max_pending": max_pending}
        run = Run(faulty_url(root), keep=keep.all(), **settings)
        first = run.manager.maybe_save(0)
        if max_pending == 2:
            run.train(100)
        while not all(save.finished.done() for _, save in run.manager._body._pending._saves):
            time.sleep(0.01)
        with pytest.raises(SnapshotAborted):
            first.pending.wait()
        broken = False
        run.train(101)
        run.manager.request("before the end")
        says = r"^snapshot of step 0 aborted: .*step-0000000000\.g1"
        with pytest.raises(SnapshotAborted, match=says) as caught:
            run.train(102)
        assert caught.value.step == 0
        run.state["weight"].fill_(-1.0)  # it is staged: nothing guards this
        if max_pending == 2:
            with pytest.raises(SnapshotAborted, match=r"step-0000000100\.g1"):
                run.manager.wait()
        run.close()
        events = [(event.kind, event.step) for event in run.manager.events()]
        assert (EventKind.FAILED, 102) not in events
        assert run.manager.all_steps() == [102]
        run.manager = CheckpointManager(faulty_url(root), {"train": run.state})
        run.manager.restore(102)
        run.check(102)


def test_other_checkpoints_at_the_root_of_a_new_run_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"own": StateDict(x=torch.zeros(3))}
    (tmp_path / "runs" / "logs-1").mkdir(parents=True)
    with CheckpointManager(tmp_path / "runs", state, save=every.steps(1)) as manager:
        assert manager.restore_latest() is None
    assert caplog.records == []
    for number in (900, 1000):
        Snapshot.take(tmp_path / f"runs/step-{number}", state)
    caplog.clear()
    for root, found in (("runs", "runs/step-1000"), ("runs/step-900", "runs/step-900")):
        with CheckpointManager(tmp_path / root, state, save=every.steps(1)) as manager:
            assert manager.restore_latest() is None
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"a checkpoint is at {tmp_path}/{found}. To continue from it, call" in line
        caplog.clear()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_first_save_that_cannot_begin_a_run(tmp_path: Path, is_async: bool) -> None:
    (tmp_path / "file").write_text("no folder")
    run = Run(tmp_path / "file" / "run")
    save = run.manager.maybe_save if is_async else run.manager.save
    with pytest.raises(SnapshotAborted, match="is a file") as caught:
        save(0)
    assert (caught.value.rank, caught.value.stage) == (0, "join")
    assert isinstance(caught.value.__cause__, StorageError)
    run.close()


def test_damage_of_the_newest_is_raised_and_deletes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(root, keep=keep.last(1), min_valid=1)
    run.train(0)
    run.manager.wait()
    verify = keeper.find_damage

    def lose_data() -> None:
        for file in root.glob("step-0000000100.g1/*/data/**/*.safetensors"):
            file.unlink()

    def lose_data_first(of: Any, name: StepName, level: str, **settings: Any) -> Any:
        yield lambda _: anyio.to_thread.run_sync(lose_data)
        return (yield from verify(of, name, level, **settings))

    monkeypatch.setattr(keeper, "find_damage", lose_data_first)
    run.train(100)
    with pytest.raises(ChecksumMismatch, match=r"step-0000000100\.g1 is damaged"):
        run.manager.wait()
    run.manager.wait()  # said once
    run.close()
    assert names(root) == ["step-0000000000.g1", "step-0000000100.g1"]
    assert run.manager.status().verified == 0
    found = Run(root).manager.restore_latest()
    assert found is not None
    assert found.step == 0


def test_steps_must_not_go_back(root: Path) -> None:
    run = Run(root)
    run.train(0, 100)
    with pytest.raises(UsageError, match=r"must not go back\. Count them across all epochs\. To"):
        run.manager.maybe_save(50)
    assert not run.manager.maybe_save(100)
    run.close()


@pytest.mark.parametrize("bad", [-1, 1.0, True, "1", None])
def test_what_is_no_step(root: Path, bad: Any) -> None:
    with pytest.raises(UsageError, match="step"):
        Run(root).manager.maybe_save(bad)


def test_a_step_that_is_too_great_is_not_seen(root: Path) -> None:
    run = Run(root)
    run.train(0)
    with pytest.raises(UsageError, match="step"):
        run.manager.maybe_save(2**70)
    run.train(100)
    run.close()
    assert run.manager.all_steps() == [0, 100]


def run_twice(root: Path) -> None:
    """A run saves 0 and 100; another one continues it and saves 200."""
    first = Run(root, keep=keep.all())
    first.train(0, 100)
    first.close()
    second = Run(root, keep=keep.all())
    second.manager.restore_latest()
    second.train(200)
    second.close()


@pytest.mark.parametrize("length", [0, 40])
def test_a_damaged_record_of_a_run(
    root: Path, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    run_twice(root)
    record = root / ".manager/runs/00000002.json"
    record.write_bytes(record.read_bytes()[:length])
    third = Run(root)
    found = third.manager.restore_latest()
    assert found is not None
    assert found.step == 200
    third.train(300)
    third.close()
    assert third.manager.all_steps() == [200, 300]
    assert "generation 2 continued" in caplog.text
    # What cannot be told to be of this run is not deleted.
    assert len(names(root)) == 4


@pytest.mark.parametrize("restores", [False, True])
def test_a_run_that_begins_again(
    root: Path, caplog: pytest.LogCaptureFixture, restores: bool
) -> None:
    """A cell of a notebook that runs again: its first commit abandons the earlier steps."""
    for step in (0, 100, 200):
        first = Run(root, keep=keep.all())
        first.manager.restore_latest()
        first.train(step)
        first.close()
    second = Run(root)
    assert not caplog.records
    if restores:
        second.manager.restore(100)
    second.train(150, 300, 400)
    second.close()
    texts = [record.getMessage() for record in caplog.records]
    if restores:
        assert texts == []
        return
    (text,) = texts
    assert "abandons what was saved before: steps 0, 100 and 200. To continue" in text
    assert "call restore_latest() first" in text
    assert second.manager.all_steps() == [300, 400]


def test_two_jobs_that_begin_in_one_root(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Run(root), Run(root)
    assert first.manager.restore_latest() is None
    assert second.manager.restore_latest() is None
    first.train(0)
    first.manager.wait()
    second.train(0)
    second.close()
    (text,) = [record.getMessage() for record in caplog.records]
    assert "restore_latest() found no intact step, so it abandons step 0. If another job" in text
    with pytest.raises(RootTaken):
        first.train(100)


def test_a_manager_that_was_not_closed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cell of a notebook that runs again: a save of the earlier manager is in flight."""
    first = Run(root, keep=keep.all())
    first.manager.restore_latest()
    first.train(0)
    first.manager.wait()
    second = Run(root)
    second.manager.restore_latest()
    first.train(100)
    first.close()
    assert not caplog.records
    second.train(50, 150, 200)
    second.close()
    (text,) = [record.getMessage() for record in caplog.records]
    assert "step 100 was committed after this run had restored step 0" in text
    assert "Close a manager before you begin the next one" in text


def test_a_restore_waits_for_a_manager_that_was_not_closed(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gated(str(root)) as (url, gate):
        first = Run(url)
        first.train(0)
        gate.wait_until_held()
        del first  # a cell that runs again
        second = Run(url)
        threading.Timer(0.2, gate.open).start()
        found = second.manager.restore_latest()
        assert found is not None
        assert found.step == 0
        second.train(100)
        second.close()
    assert not caplog.records


def test_metrics_and_best(root: Path) -> None:
    run = Run(root, keep=keep.last(1) | keep.best("loss", "min"), min_valid=1)
    for step, loss in ((0, 3.0), (100, 1.0), (200, 2.0), (300, float("nan"))):
        run.train(step, metrics={"loss": torch.tensor(loss)})
    run.close()
    best = run.manager.best("loss", "min")
    assert best is not None
    assert (best.step, best.metrics) == (100, {"loss": 1.0})
    at = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    run.manager.pin(100, "for the paper")
    (info, _) = run.manager.steps()
    pattern = rf"StepInfo\(step-0000000100\.g1, committed, {at}, loss=1, pinned.*paper.*\)"
    assert re.fullmatch(pattern, repr(info)), info
    assert run.manager.all_steps() == [100, 300]


def test_a_metric_that_no_step_has(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(root, keep=keep.last(1) | keep.best("vall", "min") | keep.best("acc", "max"))
    run.train(0)
    assert run.manager.best("vall", "min") is None
    assert not caplog.records
    run.train(*range(100, 1001, 100), metrics={"val": 1.0, "acc": 0.5})
    run.close()
    (text,) = [record.getMessage() for record in caplog.records]
    assert "5 saved steps lack the metric 'vall' (there are: acc, val), so keep.best" in text
    caplog.clear()
    assert run.manager.best("vall", "min") is None
    assert "no step has the metric 'vall'; there are: acc, val" in caplog.text
    caplog.clear()
    assert run.manager.best("val", "min") is not None
    assert not caplog.records


def test_a_metric_that_is_no_number(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(root)
    run.train(0, 100, metrics={"val": math.nan})
    assert run.manager.best("val", "min") is None
    assert "the metric 'val' is NaN in all steps that have it" in caplog.text
    run.close()
    ended = CliRunner().invoke(app, ["best", str(root), "val", "--min"])
    assert ended.exit_code == 3
    assert ended.stderr == "error: the metric 'val' is NaN in all steps that have it\n"


@pytest.mark.parametrize(
    "look",
    [
        lambda manager: manager.all_steps(),
        lambda manager: manager.steps(),
        lambda manager: manager.latest(),
        lambda manager: manager.best("val", "min"),
    ],
)
def test_a_manager_that_looks_at_a_wrong_root(
    root: Path, caplog: pytest.LogCaptureFixture, look: Callable[[CheckpointManager], object]
) -> None:
    assert not look(Run(root).manager)  # a run that begins
    assert not caplog.records
    with CheckpointManager(root) as manager:
        assert not look(manager)
        assert not look(manager)
    assert caplog.messages == [f"{root} has no committed step: check the path"]


def test_a_run_that_continues_without_a_key(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, scheduler = torch.nn.Linear(2, 2), StateDict(step=3)
    with CheckpointManager(root, {"model": model, "lr/now": scheduler}) as manager:
        manager.save(0)
        assert manager.restore_latest()
    with CheckpointManager(root) as manager:
        assert manager.restore_latest({"model": model})  # saves nothing
    with CheckpointManager(root, {"model": model}, save=every.steps(10)) as manager:
        assert manager.restore(0)
        assert not caplog.messages
        assert manager.restore_latest()
    assert caplog.messages == [
        f"{root}/step-0000000000.g1: the snapshot also has 'lr/now', which the app state lacks: "
        "not restored, and later saves will not have it"
    ]


def test_a_manager_without_saves_that_restores_from_a_wrong_root(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    with CheckpointManager(root, save=every.steps(10)) as manager:
        assert manager.restore_latest(state) is None
    assert not caplog.messages
    with CheckpointManager(root) as manager:
        assert manager.restore_latest(state) is None
        assert manager.restore_latest(state) is None
    assert caplog.messages == [
        f"{root} has no committed step, so nothing was restored: check the path"
    ]


def test_a_failed_save_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the program ends with an error while two saves fail."""

    def strike(operation: Operation) -> None:
        if operation.verb in ("complete", "put"):
            fail(operation)

    with faulty(lambda inner: TallyStorage(inner, Tally(look=strike))):
        with pytest.raises(SnapshotAborted, match="a scripted fault"):  # noqa: PT012
            with CheckpointManager(
                faulty_url(tmp_path),
                {"train": StateDict(weight=torch.zeros(1000))},
                save=every.steps(1),
            ) as manager:
                manager.maybe_save(0)
                manager.maybe_save(1)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [f"{step}.g1" in text for step, text in enumerate(texts)] == [True, True], texts


def test_metrics_at_steps_that_are_not_saved(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning as soon as a save lacks what a step before it had, and one of what stays."""
    run = Run(root, save=every.steps(10), keep=keep.last(3) | keep.best("val/loss", "min"))
    for step in range(0, 300):
        run.train(step, metrics={"val/loss": 1.0} if step % 50 == 49 else None)
        run.manager.wait()
    run.close()
    assert len(run.manager.all_steps()) == 30
    texts = [record.getMessage() for record in caplog.records]
    dropped, stay = sorted(texts, key=lambda text: "lack" in text)
    assert "step 49 are dropped: step 49 is not saved, and step 50 is saved without" in dropped
    assert "5 saved steps lack the metric 'val/loss', so keep.best deletes none of them" in stay


@pytest.mark.parametrize(("every_nth", "num_warnings"), [(1, 0), (2, 0), (3, 0), (5, 1)])
def test_a_metric_of_some_saved_steps(
    root: Path, caplog: pytest.LogCaptureFixture, every_nth: int, num_warnings: int
) -> None:
    run = Run(root, save=every.steps(10), keep=keep.last(3) | keep.best("val", "min"))
    for step in range(0, 400, 5):
        is_measured = step % (10 * every_nth) == 0
        run.train(step, metrics={"val": 400.0 - step} if is_measured else {"loss": 1.0})
        run.manager.wait()
    run.close()
    assert len(caplog.records) == num_warnings, caplog.text
    if num_warnings:
        assert "5 saved steps lack the metric 'val', so keep.best" in caplog.text


def test_metrics_of_each_step(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The usual loop: those of a step that is not saved are not missed."""
    run = Run(root, save=every.steps(10), keep=keep.last(1) | keep.best("loss", "min"))
    run.train(*range(55), metrics={"loss": 1.0})
    run.close()
    assert not caplog.records


def test_all_steps_stay_anyway(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(root, keep=keep.all() | keep.best("loss", "min"))
    run.train(*range(0, 1000, 100))
    run.close()
    assert not caplog.records


def test_a_manager_that_never_saves_by_itself(root: Path) -> None:
    run = Run(root)
    run.train(100, metrics={"loss": 1.0})
    run.close()
    state = StateDict(weight=torch.zeros(1000), step=-1)
    with CheckpointManager(root) as manager:
        best = manager.best("loss", "min")
        assert best is not None
        manager.restore(best.step, {"train": state})
    assert state["step"] == 100
    with CheckpointManager(root, {"train": state}) as manager:
        assert not manager.maybe_save(200)
        manager.save(201)
        assert not manager.maybe_save(202)
    assert manager.all_steps() == [201]


def test_two_threads_do_not_save_at_once(root: Path) -> None:
    run = Run(root)
    is_saving, may_save = threading.Event(), threading.Event()

    class Slow(StateDict):
        def state_dict(self) -> dict[str, Any]:
            is_saving.set()
            assert may_save.wait(60)
            return super().state_dict()

    slow = {"train": run.state, "slow": Slow(x=1)}
    thread = threading.Thread(target=run.manager.save, args=(0,), kwargs={"app_state": slow})
    thread.start()
    assert is_saving.wait(60)
    with pytest.raises(UsageError, match="another thread or task"):
        run.manager.maybe_save(100)
    may_save.set()
    thread.join()
    run.train(200)
    run.close()
    assert run.manager.all_steps() == [0, 200]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_save(root: Path) -> None:
    run = Run(root)
    run.train(0)
    manager = run.manager
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        num_refused = sum(
            "forked from" in raised_by(call, *args)
            for call, *args in (
                (manager.maybe_save, 100),
                (manager.maybe_save, 7),  # nothing is due
                (manager.save, 100),
                (manager.wait,),
                (manager.restore_latest,),
                (manager.restore, 0),
                (manager.request,),
                (manager.status,),
                (manager.events,),
                (lambda: manager.should_stop,),
                (manager.all_steps,),
                (manager.latest,),
                (manager.latest_valid,),
                (manager.best, "loss", "min"),
                (manager.explain,),
                (manager.prune,),
                (manager.delete, 0),
                (manager.record, 0, {"loss": 1.0}),
                (manager.pin, 0, "paper"),
                (manager.unpin, 0),
            )
        )
        assert str(root) in repr(manager)
        run.close()
        os._exit(num_refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20
    run.train(100)
    run.close()
    assert manager.all_steps() == [0, 100]


def raised_by(call: Any, *args: object) -> str:
    try:
        call(*args)
    except UsageError as error:
        return str(error)
    return ""


def test_what_are_no_metrics(root: Path) -> None:
    run = Run(root)
    with pytest.raises(UsageError, match="numbers by name"):
        run.train(0, metrics=[1.0])
    with pytest.raises(UsageError) as caught:
        run.train(0, metrics={"loss": torch.zeros(3, 100)})
    assert str(caught.value) == (
        "metric 'loss' must be a number, not a Tensor of shape (3, 100) and dtype torch.float32"
    )
    run.close()


def test_delete_waits_for_the_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(root)
    run.train(0)
    run.manager.wait()
    verify = keeper.find_damage

    def verify_later(*args: Any) -> Any:
        yield lambda _: anyio.sleep(0.3)
        return (yield from verify(*args))

    monkeypatch.setattr(keeper, "find_damage", verify_later)
    run.manager.async_save(100).wait()
    run.manager.delete(100)
    run.close()
    assert run.manager.all_steps() == [0]


def test_metrics_are_computed_only_for_a_save(root: Path) -> None:
    run = Run(root)
    calls = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"loss": 0.0}

    run.train(*range(0, 201, 10), metrics=measure)
    run.close()
    assert len(calls) == 3


def lose_commits(root: Path) -> None:
    for file in root.glob("step-*/actorsnap.json"):
        file.unlink()


def test_lost_commit_objects_of_a_run_that_was_continued(root: Path) -> None:
    run_twice(root)
    lose_commits(root)
    manager = Run(root).manager
    with pytest.raises(NoValidSnapshot, match="actorsnap recover") as caught:
        manager.restore_latest()
    ((url, _),) = caught.value.skipped
    assert url == f"{root}/step-0000000100.g1"
    assert manager.restore_latest(allow_fresh=True) is None
    Snapshot(url).recover()
    found = manager.restore_latest()
    assert found is not None
    assert found.step == 100


def test_complete_saves_without_commit_objects(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Run(root, keep=keep.all())
    first.train(0, 100)
    first.close()
    lose_commits(root)
    run = Run(root, keep=keep.all())

    def warned() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return sorted(text.split()[0] for text in texts if "`actorsnap recover`" in text)

    assert run.manager.restore_latest() is None
    both = [f"{root}/step-0000000000.g1", f"{root}/step-0000000100.g1"]
    assert warned() == both
    run.train(0, 100)
    run.close()
    assert warned() == []  # once per manager
    other = Run(root, keep=keep.all())
    other.manager.restore_latest()
    other.train(200, 300)
    other.close()
    assert warned() == both


def test_explain_and_prune(root: Path) -> None:
    run = Run(root, keep=keep.all(), min_valid=1)
    run.train(0, 100, 200)
    run.manager.wait()
    verdicts = run.manager.explain(keep.last(1))
    assert [verdict.keeps for verdict in verdicts] == [False, False, True]
    assert all(verdict.reasons for verdict in verdicts if verdict.keeps)
    dry = run.manager.prune(keep.last(1), dry_run=True)
    assert len(dry.deleted) == 2
    assert run.manager.all_steps() == [0, 100, 200]
    assert set(run.manager.prune(keep.last(1)).deleted) == {*dry.deleted}
    assert run.manager.all_steps() == [200]
    run.close()


class Full(Wrapper):
    """Has no room for another object."""

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        raise StorageFull(op="put", key=key, backend=self.url, detail="0 bytes are free")


def test_prunes_a_full_disk(root: Path) -> None:
    run = Run(root, keep=keep.all())
    run.train(0, 100, 200)
    run.close()
    with faulty(Full):
        shell = CliRunner().invoke(
            app, ["prune", faulty_url(root), "--keep", "last:1", "--min-valid", "1", "--yes"]
        )
    assert shell.exit_code == 0, shell.output
    assert names(root) == ["step-0000000200.g1"]


def test_finishes_the_deletions_of_a_killed_process(root: Path) -> None:
    first = Run(root, keep=keep.all())
    first.train(0, 100, 200)
    first.close()
    # As after a kill between the commit object and the rest.
    gone = root / "step-0000000000.g1"
    (gone / "actorsnap.json").unlink()
    intent = root / ".manager/deleting/step-0000000000.g1.json"
    intent.parent.mkdir()
    intent.write_text("{}")
    second = Run(root, keep=keep.all())
    second.manager.restore_latest()
    second.train(300)
    second.close()
    assert not gone.exists()
    assert second.manager.all_steps() == [100, 200, 300]


def test_the_last_step_at_the_end(root: Path) -> None:
    run = Run(root, save=every.steps(100) | every.last())
    run.train(*range(142))
    run.close()
    assert run.manager.all_steps() == [100, 141]


def test_an_error_saves_no_last_step(root: Path) -> None:
    run = Run(root, save=every.last())

    def train() -> None:
        with run.manager:
            run.train(0)
            raise RuntimeError("of the trainer")

    with pytest.raises(RuntimeError, match="of the trainer"):
        train()
    assert not root.exists()


def test_the_records_are_json_for_people(root: Path) -> None:
    run = Run(root)
    run.train(0)
    run.close()
    commit = json.loads((root / "step-0000000000.g1/actorsnap.json").read_text())
    assert commit["metadata"] == {"manager": {"reason": "every 100 steps"}}
    assert (root / ".manager/runs/00000001.json").exists()


async def test_the_async_facade(root: Path) -> None:
    state = StateDict(step=0)
    saved = []
    settings: dict[str, Any] = {"save": every.steps(10), "keep": keep.last(1)}
    async with asynchronous.CheckpointManager(root, {"s": state}, **settings) as manager:
        assert await manager.restore_latest() is None
        for step in range(31):
            state["step"] = step
            if await manager.maybe_save(step):
                saved.append(step)
        await manager.wait()
        assert manager.status().committed == 30
    assert saved == [0, 10, 20, 30]
    async with asynchronous.CheckpointManager(root, {"s": state}, **settings) as manager:
        state["step"] = -1
        found = await manager.restore_latest()
        assert found is not None
        assert (found.step, state["step"]) == (30, 30)
