# SPDX-License-Identifier: Apache-2.0
"""Managers, readers and deletions at one root, in random order: listings are late, clocks lie.

Time is the number of writes at the root. A late listing misses what was written within ``lag``
writes, and still has what was deleted within them; reads by key are exact.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from actorsnap import NotASnapshot, RootTaken, SnapshotReplaced, StorageError, UsageError
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.steps import StepName
from actorsnap.manager import Pin, keep
from actorsnap.storage.base import ObjectInfo, Storage
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from tests.api import managed
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Trainer
from tests.api.test_manager_marks import looker

T = TypeVar("T")
P = ParamSpec("P")

slow = pytest.mark.slow


class History:
    """Of a root: when its keys were written and deleted."""

    def __init__(self, root: Path, lag: int) -> None:
        self.root = root
        self.lag = lag
        self.now = 0
        self.written: dict[str, int] = {}
        self.deleted: dict[str, tuple[int, ObjectInfo]] = {}

    def keys(self) -> dict[str, ObjectInfo]:
        """All objects at the root, while other operations run."""
        found = {}
        for folder, _, files in os.walk(self.root):
            for path in (Path(folder, file) for file in files):
                with contextlib.suppress(FileNotFoundError):
                    status, key = path.stat(), str(path.relative_to(self.root))
                    found[key] = ObjectInfo(
                        key=key, size=status.st_size, modified_s=status.st_mtime
                    )
        return found

    def note(self, before: dict[str, ObjectInfo]) -> None:
        self.now += 1
        after = self.keys()
        for key in after.keys() - before.keys():
            self.written[key] = self.now
        for key in before.keys() - after.keys():
            self.deleted[key] = self.now, before[key]

    def listed(self) -> list[ObjectInfo]:
        since = self.now - self.lag
        found = {k: i for k, i in self.keys().items() if self.written.get(k, 0) <= since}
        found |= {k: i for k, (at, i) in self.deleted.items() if at > since and k not in found}
        return [found[key] for key in sorted(found)]


class Late(Wrapper):
    def __init__(self, inner: Storage, history: History) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._history = history
        name = self.url.rstrip("/").rpartition("/")[2]
        self._prefix = f"{name}/" if StepName.parse(name) else ""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op not in ("put", "put_if_absent", "complete", "delete", "delete_folder"):
            return await call(*args, **kwargs)
        before = self._history.keys()
        try:
            return await call(*args, **kwargs)
        finally:
            self._history.note(before)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        start = self._prefix + prefix
        for info in self._history.listed():
            if info.key.startswith(start):
                key = info.key.removeprefix(self._prefix)
                yield ObjectInfo(key=key, size=info.size, modified_s=info.modified_s)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        return await Storage.list_folders(self, folder)


class World:
    """Two jobs that save, one that evaluates, and a person."""

    def __init__(self, root: Path, seed: int, lag: int) -> None:
        self.random = random.Random(seed)
        self.root = root
        self.history = History(root, lag)
        self.step = 0
        self.committed: list[StepName] = []
        self.pins: list[Pin] = []
        self.owner: int | None = None
        self.jobs = [self.begin(), self.begin()]

    def begin(self) -> Trainer:
        return Trainer(faulty_url(self.root), keep=keep.last(2) | keep.best("loss", "min"))

    def act(self) -> None:
        getattr(
            self,
            self.random.choice(
                ["save"] * 4
                + ["restart", "pin", "unpin", "record"] * 2
                + ["prune", "delete", "rewind"]
            ),
        )()

    def save(self) -> None:
        number = self.random.randrange(2)
        job = self.jobs[number]
        self.step += 1
        is_later = job.manager.status().generation is None
        try:
            job.train(self.step)
            job.manager.wait()
        except RootTaken:
            assert self.owner != number
            self.jobs[number] = self.begin()
            return
        assert is_later or self.owner == number, "a superseded manager saved"
        self.owner = number
        found = job.manager._body._saved
        assert found == self.step
        generation = job.manager.status().generation
        assert generation is not None
        self.committed.append(StepName(self.step, generation))

    def restart(self) -> None:
        number = self.random.randrange(2)
        self.jobs[number].manager.close()
        self.jobs[number] = self.begin()
        found = self.jobs[number].manager.restore_latest(allow_fresh=True)
        if self.history.lag == 0 and self.committed:
            assert found is not None
        if found is not None:
            self.jobs[number].check()

    def rewind(self) -> None:
        job = self.random.choice(self.jobs)
        # The other job's pass may delete it meanwhile: it is not pinned.
        with contextlib.suppress(UsageError, SnapshotReplaced, NotASnapshot):
            job.manager.restore(self.random.choice(job.manager.all_steps() or [0]))

    def pin(self) -> None:
        reader = looker(faulty_url(self.root))
        infos = reader.steps(all=True)
        if infos:
            with contextlib.suppress(UsageError, StorageError):
                self.pins.append(reader.pin(self.random.choice(infos).name, "evaluation"))
                self.history.now += self.history.lag  # until listings have it

    def unpin(self) -> None:
        if self.pins:
            looker(faulty_url(self.root)).unpin(self.pins.pop(0))

    def record(self) -> None:
        reader = looker(faulty_url(self.root))
        with contextlib.suppress(UsageError):
            steps = reader.all_steps()
            reader.record(self.random.choice(steps or [0]), {"loss": self.random.random()})

    def prune(self) -> None:
        self.random.choice(self.jobs).manager.prune(keep.last(1))

    def delete(self) -> None:
        job = self.random.choice(self.jobs)
        with contextlib.suppress(UsageError, RootTaken):
            steps = job.manager.all_steps()[:-2]  # neither the newest nor what verifies it
            job.manager.delete(self.random.choice(steps or [0]))

    def check(self) -> None:
        there = {name for name in self.committed if (self.root / str(name) / COMMIT_KEY).exists()}
        assert {pin.name for pin in self.pins} <= there
        assert set(self.committed[-1:]) <= there
        assert (self.root / "notes.txt").read_text() == "a person's"
        assert (self.root / "step-0000000001" / "x").exists()


@pytest.mark.blocking
@pytest.mark.parametrize("lag", [0, 6])
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 40))]
)
def test_a_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, lag: int) -> None:
    logging.disable(logging.ERROR)
    root = tmp_path / "run"
    (root / "step-0000000001").mkdir(parents=True)
    (root / "step-0000000001" / "x").write_text("not ours")
    (root / "notes.txt").write_text("a person's")
    world = World(root, seed, lag)
    real = time.time
    year_s = 365 * 86400.0
    with faulty(partial(Late, history=world.history)):
        for _ in range(40):
            jump_s = world.random.choice([0.0, year_s, -year_s])
            monkeypatch.setattr("time.time", lambda jump_s=jump_s: real() + jump_s)
            world.act()
            world.check()
        for job in world.jobs:
            job.manager.close()
        world.check()
    logging.disable(logging.NOTSET)
    # Without lies, one job ends what is left.
    monkeypatch.undo()
    last = Trainer(root, keep=keep.last(2) | keep.best("loss", "min"))
    last.manager.restore_latest(allow_fresh=True)
    last.train(world.step + 1, world.step + 2)
    last.manager.close()
    world.check()
    (root / "notes.txt").unlink()
    (root / "step-0000000001" / "x").unlink()
    managed.assert_no_rest(root)
