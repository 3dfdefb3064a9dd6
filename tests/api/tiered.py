# SPDX-License-Identifier: Apache-2.0
"""A managed run with a tier, and the invariants at its two places: for tests of kills."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from actorsnap.errors import ActorSnapError
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.steps import StepName
from actorsnap.manager import keep
from actorsnap.storage.base import Storage
from tests.api import managed
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally, TallyStorage, Trainer, committed_in

LAST_STEP = 3
KEEP = keep.last(2)


class Places:
    """``folder/run``, ``folder/tier``, and the names of all that were ever committed or drained."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tier = folder / "run", folder / "tier"
        self.saved, self.drained = folder / "saved.log", folder / "drained.log"
        self.violations = folder / "violations"

    def trainer(self) -> Trainer:
        tiers = [faulty_url(self.tier)]
        return Trainer(faulty_url(self.root), tiers=tiers, keep=KEEP, min_valid=1)

    def look(self, operation: Operation) -> None:
        """Before each operation: nothing is lost, nothing undrained is deleted."""
        saved = committed_in(self.saved)
        at_root = {n for n in saved if (self.root / str(n) / COMMIT_KEY).exists()}
        at_tier = {n for n in saved if (self.tier / str(n) / COMMIT_KEY).exists()}
        drained = {*committed_in(self.drained)}
        with self.drained.open("a") as log:
            log.writelines(f"{name}\n" for name in at_root - drained)
        lost = {*saved} - at_tier - at_root - drained
        if lost or {*saved[-1:]} - at_tier - at_root:
            with self.violations.open("a") as log:
                log.write(f"before {operation}: {lost} of {saved}\n")

    def note_last_commit(self) -> None:
        """Notes what was committed just before a kill."""
        saved = committed_in(self.saved)
        found = [name for name in managed.snapshots_at(self.tier) if name not in saved]
        with self.saved.open("a") as log:
            for name in sorted(found, key=lambda name: name.step):
                if (self.tier / str(name) / COMMIT_KEY).exists():
                    log.write(f"{name}\n")

    def check(self) -> None:
        self.look(Operation("the end", "", ""))
        assert not self.violations.exists(), self.violations.read_text()
        managed.whole_at(self.root)  # fails for damage
        managed.whole_at(self.tier)

    @contextmanager
    def tallied(self, at_root: Tally, at_tier: Tally) -> Iterator[None]:
        def wrap(inner: Storage) -> Storage:
            return TallyStorage(inner, at_tier if "/tier" in inner.url else at_root)

        with faulty(wrap):
            yield

    def run_and_fail(
        self, where: str, **settings: Any
    ) -> tuple[Operation | None, list[ActorSnapError]]:
        """Runs with a failing operation; goes on after errors, and returns them."""
        tallies = self.tallies(where, strike=managed.fail, **settings)
        errors: list[ActorSnapError] = []
        with self.tallied(*tallies):
            trainer = self.trainer()
            calls: list[Callable[[], object]] = [
                partial(trainer.train, step) for step in range(LAST_STEP + 1)
            ]
            for call in [*calls, trainer.manager.wait, trainer.manager.close]:
                for _ in range(2):
                    error = managed.silently(call)
                    if error is None:
                        break
                    errors.append(error)
        return tallies[where == "tier"].struck, errors

    def tallies(self, where: str, **settings: Any) -> tuple[Tally, Tally]:
        """Returns those of root and tier; ``settings`` for one of them."""

        def of(name: str) -> dict[str, Any]:
            return settings if name == where else {}

        return (
            Tally(look=self.look, **of("root")),
            Tally(look=self.look, log=self.saved, **of("tier")),
        )


def run_and_die(folder: str, where: str, at: int, when: str, writes_only: bool) -> int:
    """Returns the number of operations at ``where``, if it survived."""
    logging.disable(logging.WARNING)
    places = Places(Path(folder))
    tallies = places.tallies(where, at=at, when=when, strike=managed.die, writes_only=writes_only)
    with places.tallied(*tallies):
        trainer = places.trainer()
        trainer.train(0, 1)
        trainer.manager.wait()
        while trainer.manager.status().draining:
            time.sleep(0.01)
        trainer.train(*range(2, LAST_STEP + 1))
        trainer.manager.close()
    return tallies[where == "tier"].num_counted


def resume(folder: str) -> dict[str, Any]:
    """The next process: continues, drains what waits, and reports what it found."""
    logging.disable(logging.WARNING)
    places = Places(Path(folder))
    with places.tallied(*places.tallies("")):
        trainer = places.trainer()
        found = trainer.manager.restore_latest()
        if found is not None:
            trainer.check()
        said: dict[str, Any] = {
            "found": found and found.url.rpartition("/")[2],
            "skipped": list(found.skipped) if found else [],
        }
        trainer.train(*range(found.step + 1 if found else 0, LAST_STEP + 2))
        trainer.manager.close()
        status = trainer.manager.status()
        said["left"] = [status.draining, status.failed_drains, status.failed_deletes]
    return said


def assert_only_kept(places: Places, restored: StepName | None) -> None:
    """After a close: all is drained, and the tier has the newest one."""
    *_, before, newest = committed_in(places.saved)
    continued = {restored} if restored else set()
    assert managed.whole_at(places.root) == {before, newest} | continued
    assert managed.whole_at(places.tier) in ({newest}, {newest} | continued)
    managed.assert_no_rest(places.root)
    managed.assert_no_rest(places.tier)
