# SPDX-License-Identifier: Apache-2.0
"""Late metrics, pins and ``delete``; and a pin that meets a deletion."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import anyio
import pytest

from actorsnap import AccessDenied, ActorSnapError, RootTaken, UsageError
from actorsnap.manager import StepName, every, keep, keeper
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime import marks
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import without_blocking_io
from tests.api import managed
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally, TallyStorage, Trainer

T = TypeVar("T")
P = ParamSpec("P")


def looker(root: object) -> CheckpointManager:
    """A manager of another job, such as an evaluation."""
    return CheckpointManager(str(root), {}, save=every.last())


def marks_at(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob(".manager/marks/*/*"))


def trained(root: Path, *steps: int, **settings: Any) -> Trainer:
    trainer = Trainer(root, **{"keep": keep.all(), "min_valid": 1, **settings})
    trainer.train(*steps)
    trainer.manager.wait()
    return trainer


def steps_of(root: Path) -> list[int]:
    return sorted(name.step for name in managed.snapshots_at(root))


# Late metrics


def test_late_metrics_are_shown_and_judged(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer = trained(root, 0, 1, 2)
    evaluation = looker(root)
    for step, accuracy in ((0, 0.5), (1, 0.9), (2, float("nan"))):
        evaluation.record(step, {"val/acc": accuracy})
    evaluation.record(0, {"val/acc": 0.7, "loss": 9})
    manager = trainer.manager
    assert [info.metrics.get("loss") for info in manager.steps()] == [9.0, 1.0, 0.0]
    best, latest = manager.best("val/acc", "max"), manager.latest()
    assert best is not None
    assert latest is not None
    assert (best.step, best.metrics["val/acc"], str(latest.metrics["val/acc"])) == (1, 0.9, "nan")
    reasons = {v.name.step: v.reasons for v in manager.explain(keep.best("val/acc", "max"))}
    assert "best val/acc (max): 0.9" in reasons[1]
    manager.prune(keep.best("val/acc", "max"))
    assert manager.all_steps() == [1, 2]
    assert marks_at(root) == [str(StepName(1, 1)), str(StepName(2, 1))]
    manager.close()
    managed.assert_no_rest(root)


def test_a_step_waits_for_its_late_metric(tmp_path: Path) -> None:
    root = tmp_path / "run"
    policy = keep.best("val", "min", pending=2)
    trainer = trained(root, 0, keep=policy)
    for step in range(1, 5):
        trainer.manager.record(step - 1, {"val": 10.0 - step})
        trainer.train(step)
        trainer.manager.wait()
    trainer.manager.close()
    # Each was worse than the next one, and went once that one had its value.
    assert steps_of(root) == [3, 4]


def test_metrics_of_a_save_in_flight(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer = Trainer(root)
    trainer.train(0)
    trainer.manager.record(0, {"val": 1.5})
    trainer.manager.close()
    found = trainer.manager.latest()
    assert found is not None
    assert found.metrics == {"loss": 2.0, "val": 1.5}


@pytest.mark.parametrize(
    ("step", "metrics", "text"),
    [
        (7, {"a": 1}, "no snapshot of step 7"),
        (0, {"a": "x"}, "'a' must be a number"),
        (0, [1.0], "numbers by name"),
        (0, {}, "name each metric"),
        (0, {"": 1.0}, "name each metric"),
        ("0", {"a": 1}, "a step is an integer"),
    ],
)
def test_what_cannot_be_recorded(tmp_path: Path, step: Any, metrics: Any, text: str) -> None:
    trainer = trained(tmp_path / "run", 0)
    with pytest.raises(UsageError, match=text):
        trainer.manager.record(step, metrics)
    trainer.manager.close()
    assert marks_at(tmp_path / "run") == []


# Pins


def test_a_pinned_step_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer = trained(root, 0, 1, 2, 3)
    manager = trainer.manager
    mine = manager.pin(0, "for the paper")
    theirs = looker(root).pin(1, "evaluation 7", until=timedelta(hours=1))
    assert (mine.step, mine.until_s) == (0, None)
    assert theirs.until_s is not None
    verdicts = {v.name.step: v for v in manager.explain(keep.last(1))}
    assert "pinned: for the paper" in str(verdicts[0].reasons)
    assert "evaluation 7" in str(verdicts[1].reasons)
    assert mine.holder.partition(":")[0] in str(verdicts[0].reasons)
    assert [len(info.pins) for info in manager.steps()] == [1, 1, 0, 0]
    manager.prune(keep.last(1))
    assert manager.all_steps() == [0, 1, 3]
    manager.unpin(0)
    looker(root).unpin(theirs)
    manager.prune(keep.last(1))
    assert manager.all_steps() == [3]
    assert marks_at(root) == []
    manager.close()
    managed.assert_no_rest(root)


def test_several_holders(tmp_path: Path) -> None:
    root = tmp_path / "run"
    manager = trained(root, 0, 1).manager
    first, second = manager.pin(0, "a"), looker(root).pin(0, "b")
    with pytest.raises(UsageError, match="name the reason"):
        manager.unpin(0)
    manager.unpin(0, "a")
    with pytest.raises(UsageError, match="no such pin; it is pinned: b"):
        manager.unpin(0, "a")
    manager.prune(keep.last(1))
    assert manager.all_steps() == [0, 1]
    manager.unpin(second)
    assert first.key != second.key
    manager.prune(keep.last(1))
    assert manager.all_steps() == [1]
    manager.close()


def test_a_pin_expires(tmp_path: Path) -> None:
    root = tmp_path / "run"
    manager = trained(root, 0, 1).manager
    manager.pin(0, "short", until=timedelta(milliseconds=1))
    assert manager.steps()[0].pins == ()
    manager.prune(keep.last(1))
    assert manager.all_steps() == [1]
    manager.close()


def test_a_wrong_clock_ends_no_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage's clock decides."""
    root = tmp_path / "run"
    manager = trained(root, 0, 1).manager
    pin = manager.pin(0, "an hour", until=timedelta(hours=1))
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: now() + 86400.0 * 365)
        assert not manager.explain(keep.last(1))[0].keeps
        assert manager.prune(keep.last(1)).deleted == ()
    assert manager.all_steps() == [0, 1]
    assert pin.until_s is not None
    manager.close()
    managed.assert_no_rest(root)


@pytest.mark.parametrize(
    ("reason", "until", "text"),
    [
        ("", None, "one line of text"),
        ("a", timedelta(), "timedelta"),
        ("a", datetime(2020, 1, 1, tzinfo=UTC), "to come"),
        ("a", datetime(2120, 1, 1), "time zone"),
        ("a", 60, "timedelta"),
    ],
)
def test_what_is_no_pin(tmp_path: Path, reason: str, until: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        looker(tmp_path).pin(0, reason, until)


def test_a_damaged_pin_protects(tmp_path: Path) -> None:
    root = tmp_path / "run"
    manager = trained(root, 0, 1).manager
    manager.pin(0, "a")
    (mark,) = root.glob(".manager/marks/*/*")
    mark.write_bytes(mark.read_bytes()[:-3])
    manager.prune(keep.last(1))
    assert manager.all_steps() == [0, 1]
    manager.close()


def test_marks_of_a_deleted_snapshot_go(tmp_path: Path) -> None:
    """As after a kill between the snapshot and its marks, with a mark that was not stored."""
    root = tmp_path / "run"
    trainer = trained(root, 1)
    folder = root / ".manager/marks" / str(StepName(0, 1))
    folder.mkdir(parents=True)
    for name in (f"pin-00000000-{'0' * 16}.json", ".pin-00000001-00.json.00ff.tmp"):
        (folder / name).write_text("{}")
    later = root / ".manager/marks" / str(StepName(9, 1)) / f"metrics-00000000-{'0' * 16}.json"
    later.parent.mkdir()
    later.write_text("{}")  # of a save to come
    temporary = root / ".manager/runs/.00000000.json.0123456789abcdef.tmp"
    temporary.write_text("{}")
    trainer.train(2)
    trainer.manager.close()
    assert marks_at(root) == [str(StepName(9, 1))]
    assert not temporary.exists()


def test_nothing_but_a_save_stops_another_manager(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer = trained(root, 0, 1, 2)
    other = looker(root)
    other.restore_latest({"train": Trainer(tmp_path / "other").state})
    pin = other.pin(0, "evaluation")
    other.record(1, {"val": 1.0})
    other.unpin(pin)
    other.explain(keep.last(1))
    other.delete(0)
    other.close()
    trainer.train(3)
    trainer.manager.close()
    assert not trainer.manager.status().is_superseded
    assert trainer.manager.all_steps() == [1, 2, 3]
    assert {name.generation for name in managed.snapshots_at(root)} == {1}


# delete


def test_delete_takes_the_step_of_the_run(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer = trained(root, 0, 1, 2)
    manager = trainer.manager
    manager.restore(0)
    trainer.train(1)
    manager.wait()
    manager.delete(1)
    assert {*managed.snapshots_at(root)} == {StepName(n, 1) for n in range(3)}
    manager.delete(1)  # the run has no such step any more
    manager.delete(StepName(2, 1))
    assert managed.snapshots_at(root) == [StepName(0, 1)]
    with pytest.raises(UsageError, match="no snapshot of step 2"):
        manager.delete(2)
    with pytest.raises(UsageError, match="only valid"):
        manager.delete(0)
    manager.delete(0, force=True)
    manager.close()
    managed.assert_no_rest(root)


def test_delete_refuses_what_protects_the_run(tmp_path: Path) -> None:
    root = tmp_path / "run"
    manager = trained(root, 0, 1).manager
    pin = manager.pin(0, "paper")
    with pytest.raises(UsageError, match="pinned: paper"):
        manager.delete(0)
    for file in (root / str(StepName(0, 1))).glob("*/data/**/*.safetensors"):
        file.unlink()
    with pytest.raises(UsageError, match="only valid"):
        manager.delete(1)
    manager.delete(0, force=True)
    assert manager.all_steps() == [1]
    manager.unpin(pin)
    manager.close()
    managed.assert_no_rest(root)


def test_delete_of_a_damaged_commit_object(tmp_path: Path) -> None:
    root = tmp_path / "run"
    manager = trained(root, 0, 1).manager
    manager.close()
    (root / str(StepName(0, 1)) / "actorsnap.json").write_text("{}")
    other = looker(root)
    other.delete(0)
    assert steps_of(root) == [1]
    managed.assert_no_rest(root)


def test_delete_in_a_superseded_manager(tmp_path: Path) -> None:
    root = tmp_path / "run"
    older = trained(root, 0, 1).manager
    newer = Trainer(root, keep=keep.all())
    newer.manager.restore_latest()
    newer.train(2)
    newer.manager.close()
    with pytest.raises(RootTaken):
        older.delete(0)
    assert older.status().is_superseded
    assert steps_of(root) == [0, 1, 2]


def test_delete_begins_with_an_intent(tmp_path: Path) -> None:
    tally = Tally()
    root = tmp_path / "run"
    trained(root, 0, 1).manager.close()
    with managed.tallied(tally):
        looker(faulty_url(root)).delete(0)
    writes = [op.path for op in tally.operations if op.is_writing]
    name = StepName(0, 1)
    intent = f".manager/deleting/{name}.json"
    assert writes == [intent, f"{name}/actorsnap.json", f"{name}", intent]


def test_a_failing_delete_is_raised(tmp_path: Path) -> None:
    def deny(operation: Operation) -> None:
        if operation.verb.startswith("delete") and "actorsnap.json" in operation.path:
            raise AccessDenied(op=operation.verb, key=operation.path, backend="b", detail="no")

    root = tmp_path / "run"
    trained(root, 0, 1).manager.close()
    with managed.tallied(Tally(look=deny)), pytest.raises(AccessDenied):
        looker(faulty_url(root)).delete(0)
    assert steps_of(root) == [0, 1]


# A pass that has no time


class Hanging(TallyStorage):
    """Hangs when the objects of several snapshots go."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner, Tally())
        self.capabilities = without_blocking_io(inner.capabilities)

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op == "delete" and "/data/" in key:
            await anyio.sleep_forever()
        return await super().around(op, key, call, *args, **kwargs)


def test_a_pass_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    trained(root, *range(5)).manager.close()
    monkeypatch.setattr(keeper, "MAX_PASS_S", 0.5)
    with faulty(Hanging):
        trainer = Trainer(faulty_url(root), keep=keep.last(1), min_valid=1)
        trainer.manager.restore_latest()
        trainer.train(5)
        trainer.manager.close()
        status = trainer.manager.status()
    assert status.num_deletes_left == 4
    assert status.failed_deletes == {}
    monkeypatch.undo()
    again = Trainer(root, keep=keep.last(1), min_valid=1)
    again.manager.restore_latest()
    again.train(6)
    again.manager.close()
    assert again.manager.status().num_deletes_left == 0
    # The one restored from stays.
    assert steps_of(root) == [5, 6]
    managed.assert_no_rest(root)


# A pin meets a deletion


class Meeting(TallyStorage):
    """Begins ``work`` in a thread before operation ``at``, and gives it time to wait."""

    def __init__(self, inner: Storage, tally: Tally, at: int, work: threading.Thread) -> None:
        super().__init__(inner, tally)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._at = at
        self._work = work

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        is_here = len(self._tally.operations) + 1 == self._at
        if op != "aclose" and is_here and self._work.ident is None:
            self._work.start()
            await anyio.to_thread.run_sync(self._work.join, 0.2)
        return await super().around(op, key, call, *args, **kwargs)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pin_is_kept_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """At each operation of a pass that deletes what is pinned."""
    logging.disable(logging.WARNING)
    monkeypatch.setattr(marks, "_POLL_S", 0.01)
    outcomes = set()
    for at in itertools.count(1, stride):
        root = tmp_path / str(at)
        trained(root, 0, 1, 2).manager.close()
        said: list[object] = []

        def pin(root: Path = root, said: list[object] = said) -> None:
            try:
                said.append(looker(root).pin(0, "evaluation"))
            except ActorSnapError as error:
                said.append(error)

        work, tally = threading.Thread(target=pin), Tally()
        with faulty(partial(Meeting, tally=tally, at=at, work=work)):
            pruned = Trainer(faulty_url(root), keep=keep.all(), min_valid=1)
            pruned.manager._body._generation = 1
            pruned.manager.prune(keep.last(1))
        if work.ident is None:
            if at > len(tally.operations):  # else an operation that nothing can wait at
                break
            continue
        work.join()
        is_pinned = not isinstance(said[0], Exception)
        assert (root / str(StepName(0, 1)) / "actorsnap.json").exists() == is_pinned, at
        assert len(marks_at(root)) == is_pinned
        assert not (root / str(StepName(1, 1))).exists()
        outcomes.add(is_pinned)
    logging.disable(logging.NOTSET)
    assert outcomes == {True, False}
    assert at > 15
