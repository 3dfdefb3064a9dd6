# SPDX-License-Identifier: Apache-2.0
"""A manager with a tier: saves go there first and are copied to the root in the background."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import anyio.to_thread
import pytest
import torch
from typer.testing import CliRunner

from actorsnap import ChecksumMismatch, Options, RootTaken, StateDict, StorageFull, UsageError
from actorsnap.cli import app
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.steps import StepName
from actorsnap.manager import EventKind, every, keep, tiers
from actorsnap.manager.sync import CheckpointManager
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import Snapshot
from tests.api import managed, tiered
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally
from tests.api.test_manager_asking import FakeNotice, FakeWatcher
from tests.api.zygote import Zygote

T = TypeVar("T")
P = ParamSpec("P")

slow = pytest.mark.slow

OPTIONS = Options(fsync=False)


class Run:
    """A trainer whose state shows the step that it is of."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.root, self.tier = folder / "run", folder / "tier"
        self.state = StateDict(weight=torch.zeros(1000), step=-1)
        settings = {
            "save": every.steps(1),
            "keep": keep.last(2),
            "tiers": [self.tier],
            "options": OPTIONS,
            **settings,
        }
        self.manager = CheckpointManager(
            settings.pop("root", self.root), {"train": self.state}, **settings
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            self.state["weight"].fill_(step)
            self.state["step"] = step
            self.manager.maybe_save(step)

    def restored(self) -> tuple[int, str, list[str]]:
        """Returns step, place, and the names of what was skipped."""
        found = self.manager.restore_latest()
        assert found is not None
        assert self.state["step"] == found.step
        assert self.state["weight"].unique().tolist() == [found.step]
        skipped = ["/".join(url.split("/")[-2:]) for url, _ in found.skipped]
        return found.step, found.url.split("/")[-2], skipped


def steps_at(root: Path) -> list[int]:
    return sorted(name.step for name in managed.whole_at(root))


def drained(manager: CheckpointManager) -> list[int | None]:
    """Of a closed manager, in order."""
    return [event.step for event in manager.events() if event.kind == EventKind.DRAINED]


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def strike(verb: str, text: str) -> Tally:
    """Fails operations of ``verb`` whose path has ``text``."""

    def look(operation: Operation) -> None:
        if operation.verb == verb and text in operation.path:
            managed.fail(operation)

    return Tally(look=look)


def damage(root: Path, step: int) -> None:
    (file,) = next(root.glob(f"step-{step:010}.g*")).glob("*/data/**/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def only_at_tier(folder: Path, *steps: int) -> None:
    """Makes a run whose last steps were copied, but not committed at the root."""
    run = Run(folder)
    run.train(0)
    run.manager.close()
    with managed.tallied(strike("put_if_absent", COMMIT_KEY)):
        broken = Run(folder, root=faulty_url(folder / "run"))
        broken.manager.restore_latest()
        broken.train(*steps)
        broken.manager.close()


def test_saved_to_the_tier_then_copied(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pending = run.manager.async_save(0)
    assert str(run.tier) in str(pending.wait().path)
    run.train(1, 2, 3)
    run.manager.wait()
    run.manager.close()
    assert steps_at(run.root) == [2, 3]
    assert steps_at(run.tier) == [3]
    assert [(info.step, info.is_durable) for info in run.manager.steps()] == [(2, True), (3, True)]
    assert str(run.root) in run.manager.steps()[0].url
    status = run.manager.status()
    assert (status.draining, status.failed_drains) == ((), {})
    assert (run.root / "latest").resolve().name == "step-0000000003.g1"
    managed.assert_no_rest(run.root)
    managed.assert_no_rest(run.tier)


def test_the_nearest_whole_copy_is_restored(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.train(0, 1, 2)
    first.manager.close()
    assert Run(tmp_path).restored() == (2, "tier", [])
    again = Run(tmp_path)
    assert again.manager.restore(2).url.startswith(str(again.tier))
    assert again.manager.restore(1).url.startswith(str(again.root))
    damage(again.tier, 2)
    assert Run(tmp_path).restored() == (2, "run", ["tier/step-0000000002.g1"])
    found = Run(tmp_path).manager.restore(2)
    assert found.url.startswith(str(again.root))
    assert len(found.skipped) == 1
    damage(again.root, 2)
    names = ["tier/step-0000000002.g1", "run/step-0000000002.g1"]
    assert Run(tmp_path).restored() == (1, "run", names)


def test_what_is_only_at_the_tier_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    only_at_tier(tmp_path, 1, 2)
    assert "not copied to" in caplog.text
    run = Run(tmp_path)
    assert (steps_at(run.root), steps_at(run.tier)) == ([0], [0, 1, 2])
    infos = run.manager.steps()
    assert [(info.step, info.is_durable) for info in infos] == [(0, True), (1, False), (2, False)]
    assert infos[2].url == f"{run.tier}/step-0000000002.g2"
    latest = run.manager.latest_valid("full")
    assert latest is not None
    assert latest.url == infos[2].url
    run.manager.pin(1, "paper")
    run.manager.record(2, {"loss": 0.5})
    best = run.manager.best("loss", "min")
    assert best is not None
    assert best.step == 2
    reasons = {verdict.name.step: verdict.reasons for verdict in run.manager.explain()}
    assert reasons[2] == ("not at the root yet",)
    assert run.restored() == (2, "tier", [])
    run.train(3)
    run.manager.close()
    assert steps_at(run.root) == [1, 2, 3]
    assert steps_at(run.tier) == [1, 2, 3]  # pinned; restored from; newest
    assert (run.root / "latest").resolve().name == "step-0000000003.g3"  # though 1 came last
    assert drained(run.manager) == [3, 2, 1]
    managed.assert_no_rest(run.root)


def test_damage_that_is_only_at_the_tier(tmp_path: Path) -> None:
    only_at_tier(tmp_path, 1, 2)
    run = Run(tmp_path)
    damage(run.tier, 2)
    assert run.restored() == (1, "tier", ["tier/step-0000000002.g2"])
    run.train(3)
    run.manager.close()
    # Of the run; the abandoned step stays where it is.
    assert steps_at(run.root) == [1, 3]


def test_interrupted_drains_are_resumed_the_newest_first(tmp_path: Path) -> None:
    only_at_tier(tmp_path, 1, 2)
    tally = Tally()
    with managed.tallied(tally):
        run = Run(tmp_path, root=faulty_url(tmp_path / "run"), keep=keep.all())
        assert run.restored() == (2, "tier", [])
        run.train(3)
        run.manager.close()
    order = [op.folder for op in tally.operations if op.verb == "put_if_absent" and op.folder]
    assert order == ["step-0000000003.g3", "step-0000000002.g2", "step-0000000001.g2"]
    # The data of the interrupted copies was there.
    written = {op.folder for op in tally.operations if op.verb == "write_at"}
    assert written == {"step-0000000003.g3"}
    assert (steps_at(run.root), steps_at(run.tier)) == ([0, 1, 2, 3], [2, 3])


@pytest.mark.parametrize("verbs", [("write_at",), ("stat", "list", "list_folders", "put")])
def test_a_root_that_fails_for_a_while(tmp_path: Path, verbs: tuple[str, ...]) -> None:
    is_down = False

    def look(operation: Operation) -> None:
        if is_down and operation.verb in verbs:
            managed.fail(operation)

    with managed.tallied(Tally(look=look)):
        run = Run(tmp_path, root=faulty_url(tmp_path / "run"))
        run.train(0)
        run.manager.close(timeout_s=0)
        run = Run(tmp_path, root=faulty_url(tmp_path / "run"))
        run.restored()
        run.train(1)
        is_down = True
        run.train(2, 3)
        run.manager.wait()
        assert run.manager.status().verified == 3
        until(lambda: bool(run.manager.status().failed_drains))
        assert {2, 3} <= {*run.manager.status().draining}
        assert {2, 3} <= {*steps_at(run.tier)}
        is_down = False
        run.train(4)
        run.manager.close()
        status = run.manager.status()
        assert (status.draining, status.failed_drains) == ((), {})
        kinds = [event.kind for event in run.manager.events()]
        assert kinds.count(EventKind.DRAIN_FAILED) >= 1
        assert {2, 3, 4} <= {*drained(run.manager)}
    assert (steps_at(run.root), steps_at(run.tier)) == ([0, 3, 4], [0, 4])


hanging: set[str] = set()


class Gated(Wrapper):
    """Its writes wait for a gate."""

    def __init__(self, inner: Storage, gate: threading.Event, reached: threading.Event) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._gate = gate
        self._reached = reached

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in {"write_at", *hanging}:
            self._reached.set()
            await anyio.to_thread.run_sync(self._gate.wait, 60, abandon_on_cancel=True)
        return await call(*args, **kwargs)


@pytest.fixture
def gated() -> Iterator[tuple[threading.Event, threading.Event]]:
    gate, reached = threading.Event(), threading.Event()
    with faulty(lambda inner: Gated(inner, gate, reached)):
        yield gate, reached
        gate.set()


Gates = tuple[threading.Event, threading.Event]


def test_a_root_that_hangs_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gated: Gates
) -> None:
    monkeypatch.setattr(tiers, "_MAX_LOOK_S", 0.2)
    gates, reached = gated
    gates.set()
    run = Run(tmp_path, root=faulty_url(tmp_path / "run"))
    run.train(0)
    run.manager.wait()
    until(lambda: not run.manager.status().draining)
    gates.clear()
    hanging.add("stat")
    try:
        run.train(1, 2)
        run.manager.wait()
        assert steps_at(run.tier)[-2:] == [1, 2]
    finally:
        hanging.clear()
        gates.set()
    run.manager.close()
    assert reached.is_set()
    assert steps_at(run.root) == [1, 2]


def test_close_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture, gated: Gates) -> None:
    run = Run(tmp_path, root=faulty_url(tmp_path / "run"))
    run.train(0, 1)
    run.manager.wait()
    assert gated[1].wait(30)
    run.manager.close(timeout_s=0.2)
    assert "steps 0, 1. The next manager" in caplog.text
    assert steps_at(run.tier) == [0, 1]
    assert steps_at(run.root) == []


def test_a_restore_does_not_wait_for_drains(tmp_path: Path, gated: Gates) -> None:
    run = Run(tmp_path, root=faulty_url(tmp_path / "run"))
    run.train(0, 1, 2)
    run.manager.wait()
    assert gated[1].wait(30)
    assert run.manager.restore(1).url.startswith(str(run.tier))
    gated[0].set()
    run.train(2)
    run.manager.close()
    # The abandoned step stays where it is.
    assert managed.whole_at(run.root) == {StepName(1, 1), StepName(2, 2)}
    assert managed.whole_at(run.tier) == {StepName(1, 1), StepName(2, 1), StepName(2, 2)}


def test_what_is_damaged_at_the_root_stays_at_the_tier(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=keep.all())
    run.train(0)
    run.manager.wait()
    until(lambda: not run.manager.status().draining)
    run.manager.prune()  # ends after the pass of the drain
    (file,) = run.root.glob("step-*/*/data/**/*.safetensors")
    file.unlink()
    run.train(1)
    run.manager.close()
    assert steps_at(run.tier) == [0, 1]
    assert Run(tmp_path).manager.restore(0).url.startswith(str(run.tier))


def test_damage_at_the_root_is_reported(tmp_path: Path) -> None:
    first = Run(tmp_path, keep=keep.all())
    first.train(0, 1, 2)
    first.manager.close()
    (file,) = first.root.glob("step-0000000002.g1/*/data/**/*.safetensors")
    file.unlink()
    run = Run(tmp_path, keep=keep.all())
    assert run.restored() == (2, "tier", [])
    run.train(3)
    until(lambda: bool(run.manager.status().failed_drains))
    ((url, why),) = run.manager.status().failed_drains.items()
    assert url == f"{run.tier}/step-0000000002.g1"
    assert "delete the copy (`actorsnap rm`)" in why
    until(lambda: run.manager.status().draining == (2,))
    infos = {info.step: info for info in run.manager.steps()}
    assert [infos[step].is_durable for step in (1, 2, 3)] == [True, False, True]
    assert infos[2].url == url
    assert {v.name.step: v.reasons for v in run.manager.explain()}[2][0].startswith("damaged: ")
    shutil.rmtree(run.root / "step-0000000002.g1")
    run.train(4)
    run.manager.close()
    assert (run.manager.status().failed_drains, run.manager.status().draining) == ({}, ())
    assert steps_at(run.root) == [0, 1, 2, 3, 4]
    assert all(info.is_durable for info in run.manager.steps())
    failed = [event.step for event in run.manager.events() if event.kind == EventKind.DRAIN_FAILED]
    assert {*failed} == {2}


def test_bytes_that_are_damaged_at_the_root(tmp_path: Path) -> None:
    first = Run(tmp_path, keep=keep.all())
    first.train(0)
    first.manager.close()
    damage(first.root, 0)
    tier = first.tier.rename(tmp_path / "aside")
    run = Run(tmp_path, keep=keep.all())
    assert isinstance(managed.silently(lambda: run.manager.restore(0)), ChecksumMismatch)
    tier.rename(run.tier)
    assert run.restored() == (0, "tier", [])
    run.train(1)
    until(lambda: bool(run.manager.status().failed_drains))
    ((_, why),) = run.manager.status().failed_drains.items()
    assert "is damaged" in why
    assert f"actorsnap rm {run.root}/step-0000000000.g1" in why
    run.manager.close()


def test_what_the_tier_still_has_stays_at_the_root(tmp_path: Path) -> None:
    """Else it would look like a step to drain."""
    with managed.tallied(strike("delete", "step-0000000000")):
        run = Run(tmp_path, tiers=[faulty_url(tmp_path / "tier")], keep=keep.last(1), min_valid=1)
        run.train(0, 1, 2)
        run.manager.close()
    assert (steps_at(run.root), steps_at(run.tier)) == ([0, 2], [0, 2])
    again = Run(tmp_path, keep=keep.last(1), min_valid=1)
    again.train(3)
    again.manager.close()
    # A fresh start abandoned what was there.
    assert (steps_at(run.root), steps_at(run.tier)) == ([0, 2, 3], [3])


def test_a_fresh_start_that_saves_nothing_deletes_nothing(tmp_path: Path) -> None:
    """But it drains what fills the tier."""
    with managed.tallied(strike("put_if_absent", "step-0000000002.g1/" + COMMIT_KEY)):
        first = Run(tmp_path, root=faulty_url(tmp_path / "run"), keep=keep.all())
        first.train(0, 1, 2)
        first.manager.close()
    assert (steps_at(first.root), steps_at(first.tier)) == ([0, 1], [1, 2])
    with managed.tallied(strike("write_at", "step-0000000000.g2")):
        fresh = Run(tmp_path, tiers=[faulty_url(tmp_path / "tier")], keep=keep.last(1), min_valid=1)
        assert managed.silently(lambda: fresh.manager.save(0)) is not None
        until(lambda: (fresh.root / "step-0000000002.g1" / COMMIT_KEY).exists())
        fresh.manager.close()
    assert (steps_at(first.root), steps_at(first.tier)) == ([0, 1, 2], [2])


def test_a_vanished_tier(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.train(0, 1)
    first.manager.close()
    shutil.rmtree(first.tier)
    second = Run(tmp_path)
    assert second.restored() == (1, "run", [])
    second.train(2)
    second.manager.close()
    assert steps_at(second.tier) == [2]
    assert 2 in steps_at(second.root)


def test_a_full_tier(tmp_path: Path) -> None:
    """A failed save begins a pass."""
    is_full = False

    def look(operation: Operation) -> None:
        if is_full and operation.folder and operation.verb == "write_at":
            raise StorageFull(op="put", key=operation.path, backend="b", detail="no space")
        if not is_full and operation.verb.startswith("delete"):
            managed.fail(operation)

    with managed.tallied(Tally(look=look)):
        run = Run(tmp_path, tiers=[faulty_url(tmp_path / "tier")])
        run.train(0, 1)
        run.manager.wait()
        until(lambda: steps_at(run.root) == [0, 1])
        until(lambda: bool(run.manager.status().failed_deletes))
        assert steps_at(run.tier) == [0, 1]
        is_full = True
        error = managed.silently(lambda: run.train(2)) or managed.silently(run.manager.wait)
        assert "no space" in str(error)
        until(lambda: not (run.tier / "step-0000000000.g1").exists())
        until(lambda: not run.manager.status().failed_deletes)
        run.manager.close()
    assert steps_at(run.root) == [0, 1]


def test_a_superseded_manager_drains_nothing_more(tmp_path: Path, gated: Gates) -> None:
    first = Run(tmp_path, root=faulty_url(tmp_path / "run"))
    first.train(0, 1)
    first.manager.wait()
    assert gated[1].wait(30)
    second = Run(tmp_path, tiers=[])
    second.train(7)
    second.manager.close()
    gated[0].set()
    until(lambda: first.manager.status().is_superseded)
    with pytest.raises(RootTaken):
        first.train(2)
    first.manager.close()
    # The later manager may have deleted what was being copied. Nothing else was copied.
    assert managed.whole_at(first.root) - {StepName(0, 1)} == {StepName(7, 2)}
    assert steps_at(first.tier) == [0, 1]


def test_a_tier_of_another_root(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.train(0, 1)
    first.manager.close()
    other = Run(tmp_path, root=tmp_path / "other")
    for call in (other.manager.restore_latest, other.manager.steps, lambda: other.train(0)):
        error = managed.silently(call)
        assert isinstance(error, UsageError)
        assert "of another run" in str(error)
    assert not (tmp_path / "other/.manager/runs").exists()
    shutil.rmtree(tmp_path / "run")
    assert isinstance(managed.silently(Run(tmp_path).manager.restore_latest), UsageError)


def test_a_tier_that_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "a").mkdir()
    for same in (tmp_path / "link", f"{tmp_path}/a/../run"):
        for _ in range(2):
            error = managed.silently(partial(Run(tmp_path, tiers=[same]).train, 0))
            assert isinstance(error, UsageError)
            assert "a root, perhaps" in str(error)
            assert "Delete nothing" in str(error)
    alone = Run(tmp_path, tiers=())
    alone.train(0)
    alone.manager.close()
    looking = Run(tmp_path, tiers=[tmp_path / "link"]).manager
    for call in (looking.restore_latest, looking.steps):
        assert "a root, perhaps" in str(managed.silently(call))
    assert steps_at(tmp_path / "run") == [0]


def test_deleting_takes_both_copies(tmp_path: Path) -> None:
    only_at_tier(tmp_path, 1, 2)
    run = Run(tmp_path, keep=keep.all())
    run.restored()
    run.train(3)
    run.manager.wait()
    run.manager.delete(3, force=True)
    run.manager.delete(1)
    run.manager.close()
    assert steps_at(run.root) == [0, 2]
    assert steps_at(run.tier) == [2]
    managed.assert_no_rest(run.tier)


@pytest.mark.parametrize(
    ("place", "verb", "key"),
    [("run", "get", COMMIT_KEY), ("tier", "get", COMMIT_KEY), ("run", "list", "")],
)
def test_one_step_that_cannot_be_read_stops_no_drain_and_no_deletion(
    tmp_path: Path, place: str, verb: str, key: str
) -> None:
    """At either place: the others are copied, and deleted at the tier."""
    first = Run(tmp_path, keep=keep.all())
    first.train(0, 1)
    first.manager.close()
    at_tier = tmp_path / "tier" / "step-0000000000.g1"
    shutil.copytree(first.root / at_tier.name, at_tier)
    locked = strike(verb, f"{at_tier.name}/{key}")

    def wrap(inner: Storage) -> Storage:
        return managed.TallyStorage(inner, locked) if f"/{place}" in inner.url else inner

    with faulty(wrap):
        run = Run(
            tmp_path, root=faulty_url(first.root), tiers=[faulty_url(first.tier)], keep=keep.all()
        )
        run.restored()
        run.train(2, 3)
        run.manager.close()
    assert {*drained(run.manager)} == {2, 3}
    assert steps_at(run.root) == [0, 1, 2, 3]
    assert steps_at(run.tier) == [0, 1, 3]  # not compared, restored from, newest


@pytest.mark.blocking
def test_a_pin_in_a_deletion(tmp_path: Path) -> None:
    """What is only at the tier stays there."""
    only_at_tier(tmp_path, 1, 2)
    Run(tmp_path).manager.pin(1, "paper")
    (mark,) = tmp_path.glob("run/.manager/marks/step-0000000001.g2/pin-*.json")
    data = mark.read_bytes()
    mark.unlink()

    def pin(operation: Operation) -> None:
        if operation.verb == "put" and "deleting/" in operation.key:
            mark.write_bytes(data)

    with managed.tallied(Tally(look=pin)):
        run = Run(tmp_path, root=faulty_url(tmp_path / "run"))
        error = managed.silently(lambda: run.manager.delete(1))
    assert "pinned meanwhile" in str(error)
    assert 1 in steps_at(run.tier)


def test_a_tier_is_no_root(tmp_path: Path) -> None:
    """Its snapshots may be nowhere else."""
    only_at_tier(tmp_path, 1, 2)
    said = CliRunner().invoke(app, ["prune", str(tmp_path / "tier"), "--keep", "last:1", "--yes"])
    assert said.exit_code != 0
    assert "is a tier of" in said.output
    run = Run(tmp_path, root=tmp_path / "tier", tiers=[], keep=keep.last(1), min_valid=1)
    run.train(7, 8)
    for call in (lambda: run.manager.delete(1, force=True), run.manager.prune):
        assert "is a tier of" in str(managed.silently(call))
    run.manager.close()
    assert steps_at(run.tier) == [0, 1, 2, 7, 8]


def test_a_save_on_a_notice_is_drained_first(tmp_path: Path, gated: Gates) -> None:
    """Before what has waited for longer."""
    gate, reached = gated
    watcher = FakeWatcher()
    policy = every.steps(2) | every.notice()
    settings: dict[str, Any] = {"save": policy, "notices": [watcher], "keep": keep.all()}
    run = Run(tmp_path, root=faulty_url(tmp_path / "run"), **settings)
    run.train(0, 2, 3)
    run.manager.wait()
    assert reached.wait(30)
    watcher.notify(FakeNotice("spot", 30.0))
    run.train(5)
    assert run.manager.should_stop
    run.manager.wait()
    gate.set()
    run.manager.close()
    assert drained(run.manager) in ([0, 5, 2], [2, 5, 0])


def test_arguments(tmp_path: Path) -> None:
    for given, text in (
        (str(tmp_path / "tier"), "must be a list"),
        ([tmp_path / "a", tmp_path / "b"], "only one tier"),
        ([tmp_path / "run"], "another place"),
    ):
        with pytest.raises(UsageError, match=text):
            Run(tmp_path, tiers=given)


def test_the_snapshot_of_a_save_reads_from_the_tier(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.state["step"] = 5
    snapshot = run.manager.save(5)
    assert Snapshot(snapshot.path).verify("full").ok
    run.manager.close()


# Failures and kills


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["root", "tier"])
@pytest.mark.parametrize(
    ("when", "writes_only", "stride"),
    [
        ("before", True, 19),
        pytest.param("before", False, 1, marks=slow),
        pytest.param("after", False, 1, marks=slow),
    ],
)
@pytest.mark.blocking  # the log of commits
def test_a_failing_operation(
    tmp_path: Path, where: str, when: str, writes_only: bool, stride: int
) -> None:
    num_hidden = 0
    for at in itertools.count(1, stride):
        folder = tmp_path / str(at)
        folder.mkdir()
        places = tiered.Places(folder)
        struck, errors = places.run_and_fail(where, at=at, when=when, writes_only=writes_only)
        assert all("a scripted fault" in str(error) for error in errors), errors
        assert len(errors) <= (struck is not None), (struck, errors)
        num_hidden += struck is not None and not errors
        places.note_last_commit()
        places.check()
        saved = managed.committed_in(places.saved)
        said = tiered.resume(str(folder))
        assert said["found"] == str(saved[-1]), struck
        assert said["skipped"] == []
        assert said["left"] == [(), {}, {}], struck
        places.check()
        tiered.assert_only_kept(places, StepName.parse(said["found"]))
        if struck is None:
            break
    assert at > (15 if writes_only else 80)
    assert num_hidden > 0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("tests.api.tiered") as zygote:
        yield zygote


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["root", "tier"])
@pytest.mark.parametrize(
    ("when", "writes_only", "stride"),
    [
        ("after", True, 29),
        pytest.param("after", True, 1, marks=slow),
        pytest.param("before", False, 1, marks=slow),
    ],
)
def test_killed_at_an_operation(
    zygote: Zygote, tmp_path: Path, where: str, when: str, writes_only: bool, stride: int
) -> None:
    found = set()
    for at in itertools.count(1, stride):
        folder = tmp_path / str(at)
        folder.mkdir()
        places = tiered.Places(folder)
        ending = zygote.call(
            "run_and_die",
            folder=str(folder),
            where=where,
            at=at,
            when=when,
            writes_only=writes_only,
        )
        places.note_last_commit()
        places.check()
        saved = managed.committed_in(places.saved)
        said = zygote.call("resume", folder=str(folder)).result()
        assert said["found"] == (str(saved[-1]) if saved else None), at
        assert said["skipped"] == []
        assert said["left"] == [[], {}, {}]
        places.check()
        tiered.assert_only_kept(places, StepName.parse(said["found"] or ""))
        found.add(said["found"])
        # An operation that raises has no effect after which to kill.
        if not ending.was_killed and ending.result() < at:
            break
    assert at > (25 if writes_only else 80)
    assert len(found) > 1
