# SPDX-License-Identifier: Apache-2.0
"""A managed run of six saves with a rewind, and what is at its root: for tests of faults.

The operations of all storages below the root count together. See ``Tally``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from actorsnap import ActorSnapError, Options, StateDict, StorageError, sync
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.steps import RunRecord, StepName, decode_record, marked, run_key
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.planning.keeping import timeline
from actorsnap.storage.base import ObjectInfo, Storage
from actorsnap.storage.wrapper import Wrapper
from tests.api.faults import faulty, faulty_url

T = TypeVar("T")
P = ParamSpec("P")

OPTIONS = Options(fsync=False)
LAST_STEP = 5
BEST_STEP = 2
KEEP = keep.last(2) | keep.best("loss", "min")
MIN_VALID = 2

_WRITING = frozenset(
    {"put", "put_if_absent", "write_at", "complete", "delete", "delete_folder", "reuse"}
)


class Operation(NamedTuple):
    """Of a storage below the root.

    Attributes:
        folder: A snapshot's name, empty for the root's own.
        key: Several are separated by spaces.
    """

    verb: str
    folder: str
    key: str

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.key}" if self.folder else self.key

    @property
    def is_writing(self) -> bool:
        return self.verb in _WRITING

    @property
    def is_keeping(self) -> bool:
        """Whether only retention does this."""
        is_unpin = self.key.startswith(".manager/marks/") and "/pin-" in self.key
        return (self.verb in ("delete", "delete_folder") and not is_unpin) or (
            "deleting/" in self.key and self.verb != "stat"  # a pin looks there
        )


class Tally:
    """Counts the operations below a root, and strikes at one of them.

    Args:
        at: The operation that is struck, from 1.
        when: ``before`` or ``after`` its effect.
        strike: Ends the process, or raises.
        writes_only: Only these count.
        log: A file that gets the name of each committed snapshot; by ``write``, so a kill
            loses none.
        look: Called before each operation.
    """

    def __init__(
        self,
        *,
        at: int = 0,
        when: str = "before",
        strike: Callable[[Operation], None] | None = None,
        writes_only: bool = False,
        log: Path | None = None,
        look: Callable[[Operation], None] | None = None,
    ) -> None:
        self._at = at
        self._when = when
        self._strike = strike
        self._writes_only = writes_only
        self._log = log
        self._look = look
        self._lock = threading.Lock()
        self.num_counted = 0
        self.operations: list[Operation] = []
        self.struck: Operation | None = None

    def begin(self, operation: Operation) -> bool:
        if self._look is not None:
            self._look(operation)
        with self._lock:
            self.operations.append(operation)
            if self._writes_only and not operation.is_writing:
                return False
            self.num_counted += 1
            is_struck = self.num_counted == self._at
            if is_struck:
                self.struck = operation
        if is_struck and self._when == "before":
            assert self._strike is not None
            self._strike(operation)
        return is_struck

    def end(self, operation: Operation, is_struck: bool) -> None:
        if self._log is not None and operation.verb == "put_if_absent":
            if operation.key == COMMIT_KEY:
                with self._log.open("a") as log:
                    log.write(f"{operation.folder}\n")
        if is_struck and self._when == "after":
            assert self._strike is not None
            self._strike(operation)


class TallyStorage(Wrapper):
    def __init__(self, inner: Storage, tally: Tally) -> None:
        super().__init__(inner)
        self._tally = tally
        name = self.url.rstrip("/").rpartition("/")[2]
        self._folder = name if StepName.parse(name) else ""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in ("aclose", "abort"):
            return await call(*args, **kwargs)
        operation = Operation(op, self._folder, key)
        is_struck = self._tally.begin(operation)
        found = await call(*args, **kwargs)
        self._tally.end(operation, is_struck)
        return found

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        operation = Operation(op, self._folder, key)
        is_struck = self._tally.begin(operation)
        found = call(*args, **kwargs)
        self._tally.end(operation, is_struck)
        return found

    async def delete(self, keys: Sequence[str]) -> None:
        await self.around("delete", " ".join(keys), self.inner.delete, keys)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        operation = Operation("list", self._folder, prefix)
        is_struck = self._tally.begin(operation)
        async for info in self.inner.list(prefix):
            yield info
        self._tally.end(operation, is_struck)


@contextmanager
def tallied(tally: Tally) -> Iterator[None]:
    """Within, ``faulty://`` URLs count."""
    with faulty(lambda inner: TallyStorage(inner, tally)):
        yield


def die(operation: Operation) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(operation: Operation) -> None:
    raise StorageError(
        op=operation.verb, key=operation.path, backend="b", detail="a scripted fault"
    )


# The run


class Trainer:
    """Its state is a function of the step and of ``lap``, which each rewind increases."""

    def __init__(self, url: object, **settings: Any) -> None:
        self.state = StateDict(weight=torch.zeros(500), bias=torch.zeros(3), step=-1, lap=0)
        self.manager = CheckpointManager(
            str(url),
            {"train": self.state},
            **{
                "save": every.steps(1),
                "keep": KEEP,
                "min_valid": MIN_VALID,
                "options": OPTIONS,
                **settings,
            },
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            self.compute(step)
            self.manager.maybe_save(step, metrics={"loss": abs(step - BEST_STEP)})

    def compute(self, step: int) -> None:
        self.state["weight"].fill_(step + 100 * self.state["lap"])
        self.state["bias"].fill_(-step)
        self.state["step"] = step

    def check(self) -> None:
        """Fails if the state is a mixture."""
        step, lap = self.state["step"], self.state["lap"]
        assert self.state["weight"].unique().tolist() == [step + 100 * lap]
        assert self.state["bias"].unique().tolist() == [-step]


def run_with_rewind(trainer: Trainer, log: Path) -> None:
    trainer.train(0, 1)
    mark(trainer, log)
    trainer.train(2, 3)
    trainer.manager.restore(2)
    trainer.check()
    trainer.state["lap"] = 1
    trainer.train(3)
    unmark(trainer, log)
    trainer.train(4)
    trainer.manager.close()


def mark(trainer: Trainer, log: Path, pinned: int = 0, recorded: int = 1) -> None:
    """Records something about a step, which may be in flight, and pins another one."""
    trainer.manager.record(recorded, {"val": 1.0})
    pin = trainer.manager.pin(pinned, "paper")
    with _pin_log(log).open("a") as file:
        file.write(f"{pin.name}\n")


def unmark(trainer: Trainer, log: Path) -> None:
    (name,) = pinned_in(log)
    _pin_log(log).unlink()  # from now on it may go
    trainer.manager.unpin(name)


def settle(root: Path, log: Path) -> None:
    """After a kill: logs what was committed just before, while another operation began."""
    known = committed_in(log)
    with log.open("a") as file:
        for name in sorted(
            whole_at(root) - {*known}, key=lambda name: (name.generation, name.step)
        ):
            file.write(f"{name}\n")


def _pin_log(log: Path) -> Path:
    return log.with_suffix(".pins")


def observer(root: Path, log: Path) -> Callable[[Operation], None]:
    """Checks after each operation, which is before the next one. Storages translate what is raised
    there, so violations are written down: see ``assert_none_lost``.
    """

    def look(operation: Operation) -> None:
        committed = committed_in(log)
        there = {name for name in committed if (root / str(name) / COMMIT_KEY).exists()}
        lost = {*committed[-1:], *pinned_in(log)} - there
        if lost or len(there) < min(len(committed), MIN_VALID):
            with log.with_suffix(".violations").open("a") as file:
                file.write(f"before {operation}: {committed}, but {there}\n")

    return look


def run_and_die(root: str, log: str, at: int, when: str, writes_only: bool) -> int:
    """Returns the number of operations, if it survived."""
    logging.disable(logging.WARNING)
    look = observer(Path(root), Path(log))
    tally = Tally(at=at, when=when, strike=die, writes_only=writes_only, log=Path(log), look=look)
    with tallied(tally):
        run_with_rewind(Trainer(faulty_url(root)), Path(log))
    return tally.num_counted


def resume(root: str, log: str) -> dict[str, Any]:
    """The next process: continues where the last one ended, and reports what it found."""
    tally = Tally(log=Path(log), look=observer(Path(root), Path(log)))
    with tallied(tally):
        trainer = Trainer(faulty_url(root))
        found = trainer.manager.restore_latest()
        if found is not None:
            trainer.check()
        said = {
            "found": found and found.url.rpartition("/")[2],
            "skipped": list(found.skipped) if found else [],
            "state": [trainer.state["step"], trainer.state["lap"]],
        }
        trainer.train(*range(found.step + 1 if found else 0, LAST_STEP + 1))
        trainer.manager.close()
    return said


def run_through(trainer: Trainer, log: Path) -> list[ActorSnapError]:
    """The run of a trainer that goes on after errors; returns them."""
    errors: list[ActorSnapError] = []

    def attempt(call: Callable[[], object]) -> None:
        for _ in range(2):
            error = silently(call)
            if error is None:
                return
            errors.append(error)

    def train(step: int) -> None:
        attempt(lambda: trainer.train(step))

    def mark_any() -> None:
        first, *_, last = trainer.manager.all_steps() * 2
        mark(trainer, log, pinned=first, recorded=last)

    def rewind() -> None:
        trainer.manager.restore(2 if 2 in trainer.manager.all_steps() else 1)
        trainer.check()

    for step in range(4):
        train(step)
        if step == 1:
            attempt(trainer.manager.wait)
            attempt(mark_any)
    attempt(trainer.manager.wait)
    attempt(rewind)
    trainer.state["lap"] = 1
    train(3)
    if pinned_in(log):
        error = silently(lambda: unmark(trainer, log))  # not again: it may be gone
        errors += [] if error is None else [error]
    train(4)
    attempt(trainer.manager.close)
    return errors


# The root


def committed_in(log: Path) -> list[StepName]:
    """All that were ever committed, in the order of their commits."""
    names = [StepName.parse(line) for line in log.read_text().split()] if log.exists() else []
    assert None not in names
    return [name for name in names if name is not None]


def pinned_in(log: Path) -> set[StepName]:
    """All whose pin was confirmed."""
    try:
        lines = _pin_log(log).read_text().split()
    except FileNotFoundError:  # another thread may have removed it just now
        lines = []
    return {name for line in lines if (name := StepName.parse(line)) is not None}


def pinned_at(root: Path) -> set[StepName]:
    """All with the mark of a pin, confirmed or not."""
    names = [StepName.parse(path.parent.name) for path in root.glob(".manager/marks/*/pin-*.json")]
    return {name for name in names if name is not None}


def snapshots_at(root: Path) -> list[StepName]:
    """Folders with a snapshot's name."""
    if not root.exists():
        return []
    names = [StepName.parse(path.name) for path in root.iterdir()]
    return [name for name in names if name is not None]


def whole_at(root: Path) -> set[StepName]:
    """Snapshots of which every byte is verified."""
    whole = set()
    for name in snapshots_at(root):
        if (root / str(name) / COMMIT_KEY).exists():
            assert sync.Snapshot(root / str(name)).verify("full").ok, name
            whole.add(name)
    return whole


def parents_at(root: Path) -> dict[int, StepName | None]:
    records = [
        decode_record(path.read_bytes(), RunRecord, path.name)
        for path in (root / run_key(1)).parent.glob("*.json")
    ]
    return {record.generation: StepName.parse(record.restored_from or "") for record in records}


def timeline_of(names: Collection[StepName], root: Path) -> list[StepName]:
    """The run of the newest generation that committed something or continues a snapshot."""
    parents = parents_at(root)
    newest = {name.generation for name in names} | {g for g, parent in parents.items() if parent}
    return timeline(names, parents, max(newest)) if newest else []


def assert_none_lost(root: Path, log: Path) -> None:
    """The invariants that hold at each moment."""
    committed, whole = committed_in(log), whole_at(root)
    assert len(whole) >= min(len(committed), MIN_VALID), (whole, committed)
    if committed:
        assert committed[-1] in whole
    assert pinned_in(log) <= whole
    violations = log.with_suffix(".violations")
    assert not violations.exists(), violations.read_text()


def assert_only_kept(root: Path, log: Path, restored: StepName | None) -> None:
    """After a close: what the policy keeps of all that was ever committed, and no rest."""
    committed = committed_in(log)
    run = timeline_of(committed, root)
    best = sorted(run, key=lambda name: abs(name.step - BEST_STEP))[:1]
    abandoned = {*committed} - {*run}
    kept = {*run[-2:], *best, *([restored] if restored else ()), *(pinned_at(root) & {*run})}
    assert whole_at(root) == kept | ({*snapshots_at(root)} & abandoned)
    assert_no_rest(root)


def assert_no_rest(root: Path) -> None:
    """No intent, and no file that belongs to no snapshot."""
    for name in {*snapshots_at(root)} - whole_at(root):
        # Killed just before its commit: `actorsnap recover` can use it.
        assert [*(root / str(name)).glob("*/manifest/0.json")], name
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    rest = {path for path in files if not StepName.parse(path.partition("/")[0])}
    rest -= {path for path in rest if marked(path) in {*snapshots_at(root)}}
    assert rest == {run_key(generation) for generation in parents_at(root)}, rest
    whole = {str(name) for name in whole_at(root)}
    # A copy killed while it writes its claim leaves a temporary, which goes with the snapshot.
    temporaries = {p for p in files if p.endswith(".tmp") and "/claim/copy/" not in p}
    assert not {path for path in temporaries if path.partition("/")[0] in whole}, temporaries


def silently(call: Callable[[], object]) -> ActorSnapError | None:
    """Returns the error that a call raises."""
    try:
        call()
    except ActorSnapError as error:
        return error
    return None
