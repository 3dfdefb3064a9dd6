"""``CheckpointManager``: what it saves, keeps, finds and deletes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import (
    IncompatibleState,
    NoValidSnapshot,
    RootTaken,
    SnapshotAborted,
    StateDict,
    StorageError,
    UsageError,
)
from actorsnap import manager as asynchronous
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot


class Run:
    """A trainer whose state shows the step that it is of."""

    def __init__(self, root: Path, **settings: Any) -> None:
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
    return sorted(path.name for path in root.iterdir() if path.name != ".manager")


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
    assert found.skipped[0][1].startswith("ChecksumMismatch")
    assert "200.g1 is damaged" in caplog.text
    second.check(0)


def test_damage_everywhere_is_no_fresh_start(root: Path) -> None:
    first = Run(root)
    first.train(0, 100)
    first.close()
    for name in names(root):
        damage(root, name)
    second = Run(root)
    with pytest.raises(NoValidSnapshot) as caught:
        second.manager.restore_latest()
    assert len(caught.value.skipped) == 2
    assert second.manager.restore_latest(allow_fresh=True) is None


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


def test_damage_of_the_newest_deletes_nothing(root: Path) -> None:
    run = Run(root, keep=keep.last(1), min_valid=1)
    run.train(0, 100)
    run.manager.wait()
    damage_later = root / "step-0000000100.g1"
    for file in damage_later.glob("*/data/**/*.safetensors"):
        file.unlink()
    report = run.manager.prune()
    assert "step-0000000000.g1" in names(root) or not report.deleted


def test_steps_must_not_go_back(root: Path) -> None:
    run = Run(root)
    run.train(0, 100)
    with pytest.raises(UsageError, match="must not go back"):
        run.manager.maybe_save(50)
    assert not run.manager.maybe_save(100)
    run.close()


@pytest.mark.parametrize("bad", [-1, 1.0, True, "1", None])
def test_what_is_no_step(root: Path, bad: Any) -> None:
    with pytest.raises(UsageError, match="step"):
        Run(root).manager.maybe_save(bad)


def test_metrics_and_best(root: Path) -> None:
    run = Run(root, keep=keep.last(1) | keep.best("loss", "min"), min_valid=1)
    for step, loss in ((0, 3.0), (100, 1.0), (200, 2.0), (300, float("nan"))):
        run.train(step, metrics={"loss": torch.tensor(loss)})
    run.close()
    best = run.manager.best("loss", "min")
    assert best is not None
    assert (best.step, best.metrics) == (100, {"loss": 1.0})
    assert run.manager.all_steps() == [100, 300]


def test_metrics_are_computed_only_for_a_save(root: Path) -> None:
    run = Run(root)
    calls = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"loss": 0.0}

    run.train(*range(0, 201, 10), metrics=measure)
    run.close()
    assert len(calls) == 3


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
