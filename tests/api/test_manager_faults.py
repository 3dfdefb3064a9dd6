# SPDX-License-Identifier: Apache-2.0
"""A managed run that is killed, or whose storage fails, at every operation; and two managers.

The run makes six saves, records metrics, pins a step, goes back, and deletes what its policy gives
up: ``tests.api.managed``, where an observer checks invariants after every operation.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import anyio.to_thread
import pytest
import torch

from actorsnap import AccessDenied, NoValidSnapshot, Options, RootTaken, StateDict, sync
from actorsnap import manager as asynchronous
from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.steps import StepName
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime.host import Host
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import without_blocking_io
from tests.api import managed
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally, TallyStorage, Trainer
from tests.api.slow_storage import gated
from tests.api.zygote import Zygote

T = TypeVar("T")
P = ParamSpec("P")

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("tests.api.managed") as zygote:
        yield zygote


@pytest.mark.parametrize(
    ("when", "writes_only", "stride"),
    [
        ("after", True, 8),
        pytest.param("before", True, 1, marks=slow),
        pytest.param("after", True, 1, marks=slow),
        pytest.param("before", False, 1, marks=slow),
        pytest.param("after", False, 1, marks=slow),
    ],
)
def test_killed_at_an_operation(
    zygote: Zygote, tmp_path: Path, when: str, writes_only: bool, stride: int
) -> None:
    found = set()
    for at in itertools.count(1, stride):
        root, log = tmp_path / str(at) / "run", tmp_path / f"{at}.log"
        arguments = {"root": str(root), "log": str(log)}
        ending = zygote.call("run_and_die", at=at, when=when, writes_only=writes_only, **arguments)
        managed.settle(root, log)
        managed.assert_none_lost(root, log)
        expected = managed.timeline_of(managed.committed_in(log), root)[-1:]
        said = zygote.call("resume", **arguments).result()
        assert said["found"] == (str(expected[0]) if expected else None), at
        assert said["skipped"] == []
        if expected:
            # Saved by the first process before the rewind, or after it.
            assert said["state"] == [expected[0].step, expected[0].generation - 1]
        managed.assert_none_lost(root, log)
        managed.assert_only_kept(root, log, StepName.parse(said["found"] or ""))
        found.add(said["found"])
        # An operation that raises has no effect after which to kill.
        if not ending.was_killed and ending.result() < at:
            break
    assert at > (30 if writes_only else 100)
    assert {None, "step-0000000004.g2"} < found


# Failing operations


@pytest.mark.blocking  # the log of commits
@pytest.mark.parametrize(
    ("when", "writes_only", "stride"),
    [
        ("before", True, 5),
        pytest.param("before", False, 1, marks=slow),
        pytest.param("after", False, 1, marks=slow),
    ],
)
def test_a_failing_operation(tmp_path: Path, when: str, writes_only: bool, stride: int) -> None:
    num_kept = 0
    for at in itertools.count(1, stride):
        root, log = tmp_path / str(at), tmp_path / f"{at}.log"
        look = managed.observer(root, log)
        tally = Tally(
            at=at, when=when, strike=managed.fail, writes_only=writes_only, log=log, look=look
        )
        with managed.tallied(tally):
            trainer = Trainer(faulty_url(root))
            errors = managed.run_through(trainer, log)
        struck = tally.struck
        assert all("a scripted fault" in str(error) for error in errors), errors
        if struck is None:
            assert errors == []
        elif struck.is_keeping:
            num_kept += 1
            assert errors == [], struck
        elif struck.is_writing:
            assert len(errors) == 1, struck
        else:
            assert len(errors) <= 1, struck
        managed.assert_none_lost(root, log)
        expected = managed.timeline_of(managed.committed_in(log), root)[-1]
        said = managed.resume(str(root), str(log))
        assert said["found"] == str(expected), struck
        managed.assert_none_lost(root, log)
        managed.assert_only_kept(root, log, StepName.parse(said["found"]))
        if struck is None:
            break
    assert num_kept >= (1 if writes_only else 3)
    assert at > (30 if writes_only else 100)


def test_a_deletion_that_is_denied(tmp_path: Path) -> None:
    """It is shown, stops no other one, and does not concern the trainer."""

    def deny(operation: Operation) -> None:
        if operation.verb.startswith("delete") and "step-0000000001.g1" in operation.path:
            raise AccessDenied(op=operation.verb, key=operation.path, backend="b", detail="no")

    root = tmp_path / "run"
    with managed.tallied(Tally(look=deny)):
        trainer = Trainer(faulty_url(root), keep=keep.last(2))
        trainer.train(*range(6))
        trainer.manager.close()
        failed = trainer.manager.status().failed_deletes
    assert [url.rpartition("/")[2] for url in failed] == ["step-0000000001.g1"]
    assert "AccessDenied" in str(failed)
    assert {name.step for name in managed.snapshots_at(root)} == {1, 4, 5}
    again = Trainer(root, keep=keep.last(2))
    again.manager.restore_latest()
    again.train(6)
    again.manager.close()
    assert {name.step for name in managed.snapshots_at(root)} == {5, 6}
    managed.assert_no_rest(root)


def test_a_superseded_manager_reports_steps_that_it_cannot_read(tmp_path: Path) -> None:
    def deny(operation: Operation) -> None:
        if is_superseded and operation.verb == "get" and "step-0000000002.g2" in operation.path:
            raise AccessDenied(op="get", key=operation.path, backend="b", detail="no")

    root, is_superseded = tmp_path / "run", False
    with managed.tallied(Tally(look=deny)):
        older = Trainer(faulty_url(root), keep=keep.last(1))
        older.train(0, 1)
        older.manager.close()
        later = Trainer(root, keep=keep.all())
        later.manager.restore_latest()
        later.train(2)
        later.manager.close()
        is_superseded = True
        report = older.manager.prune()
    assert report.deleted == ()
    assert [url.rpartition("/")[2] for url in report.failed] == ["step-0000000002.g2"]


def test_a_root_that_denies_all_deletions(tmp_path: Path) -> None:
    def deny(operation: Operation) -> None:
        if operation.verb.startswith("delete"):
            raise AccessDenied(op=operation.verb, key=operation.path, backend="b", detail="no")

    root = tmp_path / "run"
    with managed.tallied(Tally(look=deny)):
        trainer = Trainer(faulty_url(root), keep=keep.last(2))
        trainer.train(*range(5))
        trainer.manager.close()
        assert len(trainer.manager.status().failed_deletes) == 3
    assert len(managed.whole_at(root)) == 5


def test_a_failed_save_is_raised_once(tmp_path: Path) -> None:
    """By the next save that is due, by ``wait`` or by ``close``; then training goes on."""

    def strike(operation: Operation) -> None:
        if operation.folder == "step-0000000001.g1" and operation.is_writing:
            managed.fail(operation)

    root = tmp_path / "run"
    for name in ("maybe_save", "wait", "close"):
        with managed.tallied(Tally(look=strike)):
            trainer = Trainer(faulty_url(root / name), save=every.at([0, 1, 3]))
            trainer.train(0, 1, 2)
            manager = trainer.manager
            call = (
                partial(manager.maybe_save, 3) if name == "maybe_save" else getattr(manager, name)
            )
            error = managed.silently(call)
            assert error is not None
            assert "a scripted fault" in str(error)
            if name != "close":
                trainer.train(3)
            trainer.manager.close()
        steps = {each.step for each in managed.whole_at(root / name)}
        assert steps == ({0} if name == "close" else {0, 3})


# Fresh starts


def test_a_fresh_start_that_committed_nothing_hides_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first = Trainer(root)
    first.train(0, 1)
    first.manager.close()

    def strike(operation: Operation) -> None:
        if operation.folder and operation.verb == "put_if_absent":
            managed.fail(operation)

    with managed.tallied(Tally(look=strike)):
        second = Trainer(faulty_url(root))
        second.train(0)
        assert managed.silently(second.manager.close) is not None
    (root / "step-0000000000.g2").mkdir(exist_ok=True)
    (root / "step-0000000000.g2" / "rest").write_text("as after a kill")
    third = Trainer(root)
    assert third.manager.all_steps() == [0, 1]
    found = third.manager.restore_latest()
    assert found is not None
    assert found.step == 1


def test_abandoned_snapshots_are_no_fresh_start(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first = Trainer(root, keep=keep.all())
    first.train(0, 1, 2)
    first.manager.restore(0)
    first.train(1)
    first.manager.close()
    for name in ("step-0000000000.g1", "step-0000000001.g2"):
        (root / name / "actorsnap.json").unlink()
    second = Trainer(root)
    with pytest.raises(NoValidSnapshot, match="abandoned"):
        second.manager.restore_latest()
    assert second.manager.restore_latest(allow_fresh=True) is None


def test_a_kept_snapshot_loses_its_intent(tmp_path: Path) -> None:
    """As after a kill between intent and deletion, and another policy."""
    root = tmp_path / "run"
    first = Trainer(root, keep=keep.all())
    first.train(0, 1, 2)
    intent = root / ".manager/deleting/step-0000000000.g1.json"
    first.manager.wait()
    intent.parent.mkdir()
    intent.write_text("{}")
    first.train(3)
    first.manager.close()
    assert first.manager.all_steps() == [0, 1, 2, 3]
    managed.assert_no_rest(root)


# Two managers


def test_two_managers_in_turns(tmp_path: Path) -> None:
    root = tmp_path / "run"
    one, other = Trainer(root), Trainer(root)
    step = 0
    one.train(step)
    for turn in range(4):
        earlier, later = (one, other) if turn % 2 == 0 else (other, one)
        earlier.manager.wait()
        found = later.manager.restore_latest()
        assert found is not None
        assert found.step == step
        assert not later.manager.status().is_superseded
        later.train(step + 1, step + 2)
        with pytest.raises(RootTaken):
            earlier.train(step + 1)
        step += 2
    one.manager.close()
    other.manager.close()
    assert other.manager.all_steps()[-1] == step
    assert len(managed.snapshots_at(root)) <= 4  # last(2), the best and the one restored from
    managed.assert_no_rest(root)


class Interposing(TallyStorage):
    """Runs ``work`` in a thread while the operation number ``at`` waits."""

    def __init__(self, inner: Storage, tally: Tally, at: int, work: Callable[[], None]) -> None:
        super().__init__(inner, tally)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._at = at
        self._work = work

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op != "aclose" and len(self._tally.operations) + 1 == self._at:
            self._tally.operations.append(Operation(op, self._folder, key))
            await anyio.to_thread.run_sync(self._work)
            return await call(*args, **kwargs)
        return await super().around(op, key, call, *args, **kwargs)


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=slow)])
def test_a_superseded_manager_deletes_nothing_more(tmp_path: Path, stride: int) -> None:
    """Another manager saves while a pass is at each of its operations."""
    num_stopped = 0
    for at in itertools.count(1, stride):
        root = tmp_path / str(at)
        first = Trainer(root, keep=keep.all())
        first.train(0, 1, 2, 3)
        first.manager.close()
        second = Trainer(root, keep=keep.all())
        seen: list[int] = []
        tally = Tally()

        def supersede(
            second: Trainer = second, tally: Tally = tally, seen: list[int] = seen
        ) -> None:
            assert second.manager.restore_latest() is not None
            second.train(4)
            second.manager.wait()
            seen.append(len(tally.operations))

        with faulty(partial(Interposing, tally=tally, at=at, work=supersede)):
            pruned = Trainer(faulty_url(root), keep=keep.all(), min_valid=1)
            # Takes a generation without a save of its own.
            pruned.manager._body._generation = 1
            report = pruned.manager.prune(keep.last(1))
        if seen:
            struck = tally.operations[at - 1]
            late = [op for op in tally.operations[seen[0] :] if op.verb.startswith("delete")]
            gone = [op for op in late if "deleting/" not in op.path]
            # The operation that waited may have been the last look before a deletion.
            assert len(gone) <= 2, (struck, gone)
            assert sum(COMMIT_KEY in op.key for op in gone) <= 1, (struck, gone)
            num_stopped += len(report.deleted) < 3
            found = Trainer(root).manager.restore_latest()
            assert found is not None
            assert found.step == 4
            second.train(5)
            second.manager.close()
            managed.assert_no_rest(root)
        else:
            assert len(report.deleted) == 3
            if at > len(tally.operations):  # else an operation that nothing can wait at
                break
    assert num_stopped > 3
    assert at > 20


# Idle


def test_nothing_due_makes_no_request(tmp_path: Path) -> None:
    tally = Tally()
    settings: dict[str, Any] = {
        "save": every.steps(10**6) | every.at([10**6 + 1]),
        "keep": keep.last(1),
    }

    async def run() -> None:
        manager = asynchronous.CheckpointManager(faulty_url(tmp_path / "a"), {}, **settings)
        for step in range(1, 1000):
            assert not await manager.maybe_save(step, metrics={"loss": 0.0})
        await manager.close()

    with managed.tallied(tally):
        asyncio.run(run())
        manager = CheckpointManager(faulty_url(tmp_path / "b"), {}, **settings)
        for step in range(1, 1000):
            assert not manager.maybe_save(step, metrics={"loss": 0.0})
        manager.close()
    assert tally.operations == []


def test_what_lost_its_commit_object_stays(tmp_path: Path) -> None:
    """Copies lose files. Only rests that nobody can use are deleted."""
    root = tmp_path / "run"
    first = Trainer(root, keep=keep.all())
    first.train(0, 1, 2)
    first.manager.close()
    complete, torn = root / "step-0000000000.g1", root / "step-0000000001.g1"
    for folder in (complete, torn):
        (folder / "actorsnap.json").unlink()
    (manifest,) = torn.glob("*/manifest/0.json")
    manifest.unlink()
    second = Trainer(root, keep=keep.all())
    second.manager.restore_latest()
    second.train(3)
    second.manager.close()
    assert not torn.exists()
    sync.Snapshot(complete).recover()
    assert second.manager.all_steps() == [0, 2, 3]


def test_a_restore_does_not_report_a_step_that_is_being_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cell of a notebook that runs again, with a save of the earlier manager in flight."""
    root = tmp_path / "run"
    first = Trainer(root, keep=keep.all())
    first.train(0, 1)
    first.manager.close()
    commit = root / "step-0000000001.g1" / "actorsnap.json"
    (attempt,) = map(Attempt.parse, [path.parent.name for path in commit.parent.glob("*/manifest")])
    assert attempt is not None
    commit.unlink()
    attempts = Host.get().resources.attempts
    attempts._running.add(attempt)
    second = Trainer(root, keep=keep.all())
    restored = second.manager.restore_latest()
    assert restored is not None
    assert restored.step == 0
    assert "is complete" not in caplog.text
    attempts.end(attempt)
    second.manager.restore_latest()
    assert "is complete, but was not committed" in caplog.text
    second.manager.close()


@pytest.mark.parametrize("is_here", [True, False])
def test_a_pass_leaves_a_save_of_an_earlier_manager_that_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    root = tmp_path / "run"
    state = StateDict(big=torch.ones(2 * 2**20), small=torch.ones(1000))
    settings: dict[str, Any] = {"save": every.steps(1), "keep": keep.last(1)}
    with gated(str(root), free_bytes=2**20) as (url, gate):
        options = Options(offload="thread")
        first = CheckpointManager(url, {"train": state}, options=options, **settings)
        first.maybe_save(0)
        gate.wait_until_held()
        folder = root / "step-0000000000.g1"
        while not [*folder.glob("*/data/**/*.safetensors")]:
            time.sleep(0.01)
        if not is_here:
            monkeypatch.setattr("actorsnap.runtime.maintenance.host_id", lambda: "0" * 8)
        second = Trainer(root, **settings)
        second.train(0, 1)
        second.manager.close()
        gate.open()
        first.close()
        assert sync.Snapshot(str(folder)).verify("full").ok


def test_a_save_of_another_host_that_stores_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    first = Trainer(root, keep=keep.all())
    first.train(0)
    first.manager.close()
    folder = root / "step-0000000000.g1"
    (folder / "actorsnap.json").unlink()
    for manifest in folder.glob("*/manifest/*"):
        manifest.unlink()
    monkeypatch.setattr("actorsnap.runtime.maintenance.host_id", lambda: "0" * 8)
    second = Trainer(root, keep=keep.all())
    second.train(1)
    second.manager.close()
    assert folder.exists()
    an_hour_ago = time.time() - 3600
    for path in folder.rglob("*.safetensors"):
        os.utime(path, (an_hour_ago, an_hour_ago))
    third = Trainer(root, keep=keep.all())
    third.train(2)
    third.manager.close()
    assert not folder.exists()


def test_a_restore_reports_newer_steps_that_lost_their_commit_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    first = Trainer(root, keep=keep.all())
    first.train(0, 1)
    first.manager.close()
    second = Trainer(root, keep=keep.all())
    second.manager.restore_latest()
    second.train(2)
    second.manager.close()
    continued, last = root / "step-0000000001.g1", root / "step-0000000002.g2"
    (last / "actorsnap.json").unlink()
    third = Trainer(root, keep=keep.all())
    caplog.clear()
    restored = third.manager.restore_latest()
    assert restored is not None
    assert (restored.step, restored.skipped) == (1, ())
    assert f"{last} is complete, but was not committed, and stays (" in caplog.text
    in_time = "if you stop this job before its next save"
    assert f"KiB): `actorsnap recover` adds it to the run {in_time}, `" in caplog.text
    (continued / "actorsnap.json").unlink()
    restored = third.manager.restore_latest()
    assert restored is not None
    why = f"its commit object is gone: `actorsnap recover` writes it again, {in_time}"
    assert restored.skipped == ((str(continued), why),)
    third.manager.close()
