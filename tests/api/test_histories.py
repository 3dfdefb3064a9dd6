# SPDX-License-Identifier: Apache-2.0
"""Histories of one trainer: it saves, trains, restores and deletes; faults and deaths come between.

A history is random, told by its seed, and uses the public API only. The storage is one that the
uploader process opens, too, and whose operations can be held and made to fail (``tests/held``).
Each state that is saved bears its number, so that a mixture of two is equal to none. What must be
true of all histories:

- what is restored is bit for bit a state that may be there: the last that was reported as saved,
  one that was saved beside it, or one of which nobody said that it was not saved;
- what fails has a reason in the history, and an error that is documented;
- everything ends, and in the end nothing is left: no garbage, memory, thread, process, descriptor.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import math
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import msgspec
import psutil
import pytest
import torch
from typer.testing import CliRunner

import actorsnap
import actorsnap.sync
from actorsnap import (
    ActorSnapError,
    NotASnapshot,
    ObjectExists,
    Options,
    SnapshotAborted,
    SnapshotReplaced,
    StateChanged,
    StateDict,
    StorageFull,
    VerifyReport,
    shutdown,
)
from actorsnap.cli import app
from actorsnap.runtime.host import Host
from tests.api.facades import FACADES
from tests.api.places import assert_idle, leftovers
from tests.api.same import assert_same
from tests.conftest import LeakCheck
from tests.support.shm import shared_files

pytestmark = pytest.mark.blocking  # the storage looks for files on the loop

HELD = Path(__file__).parents[1] / "held"
MIB = 1 << 20
PATIENCE_S = 60.0
WIDTH = 512
"""A layer's weight is 1 MiB: with the optimizer's state, half a dozen chunks."""

SEEDS = (1, 5, 9)
"""All of it is reached by these."""

PLACES = ("a", "b")
WARM_UP = {"async": actorsnap.warm_up, "sync": actorsnap.sync.warm_up}
START_S = 10.0
"""So long it is waited for an uploader process."""

OPERATIONS = ("writer", "manifest", "commit", "committed")
Found: TypeAlias = dict[str, Any]


def copied(value: Any) -> Any:
    """The values of a state, without what tells apart kinds of containers and tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


class Trainer:
    """A model, its optimizer, and values of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.own = StateDict(number=-1, noise=torch.zeros(3))
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "own": self.own}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, WIDTH)).square().sum().backward()
        self.optimizer.step()

    def copy(self) -> dict[str, Any]:
        return {key: copied(value.state_dict()) for key, value in self.state.items()}


@dataclass(eq=False, kw_only=True)
class Event:
    """What may have changed a place, from ``begun`` to ``ended`` on the history's clock.

    Attributes:
        numbers: Of the states that it may have put there; None for nothing, after a delete.
        has_succeeded: None where nobody knows.
        excuses: What lets it fail.
    """

    place: str
    numbers: frozenset[int | None]
    begun: int
    ended: float = math.inf
    has_succeeded: bool | None = None
    excuses: set[str] = field(default_factory=set)


@dataclass(eq=False, kw_only=True)
class Save(Event):
    """An ``async_take`` under way.

    Attributes:
        is_loose: The trainer's tensors may not have been copied yet, and no guard keeps its steps.
        is_detached: It goes on also when nothing here waits for it.
        num_deaths: Of uploader processes meanwhile.
    """

    pending: Any = None
    is_loose: bool = False
    is_detached: bool = False
    num_deaths: int = 0


class History:
    """One trainer's doings.

    Attributes:
        said: What happened, for whoever reads of a failure.
        did: How often what was reached.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.said: list[str] = []
        self.did: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._folder = folder
        self._api = self._rng.choice(FACADES)
        self._clock = itertools.count()
        self._trainer = Trainer(seed)
        self._states: list[Found] = []
        self._events: list[Event] = []
        self._others = living_children()
        self._stopped: psutil.Process | None = None
        self._is_tight = False
        for place in PLACES:
            (folder / place).mkdir(parents=True)

    def run(self, num_steps: int) -> None:
        """Does all there is at least once, and ``num_steps`` things more."""
        verbs = [*VERBS, *self._rng.choices(list(VERBS), list(VERBS.values()), k=num_steps)]
        self._rng.shuffle(verbs)
        for verb in verbs:
            getattr(self, verb)()
        self._end()

    def settle(self) -> None:
        """Nothing is held, stopped or failing any more."""
        self.let()
        self.mend()

    def _end(self) -> None:
        """Waits for everything, and looks at everything."""
        self._note("end")
        self.settle()
        for save in self._saves():
            self._finish(save)
        wait_until(lambda: not Host.get().pending_saves())
        for event in self._events:
            event.ended = min(event.ended, next(self._clock))  # those that were dropped
        for place in PLACES:
            self._restore(place, Trainer(0))
            self._verify(place, "full")
            # Each process knows only of its own attempts whether they have ended.
            for offload in ("process", "thread"):
                options = Options(offload=offload, fsync=False)
                save = self._async_take(place, overwrite=True, options=options)
                self._finish(save)
                assert save.has_succeeded
            assert anyio.run(leftovers, self._folder / place / "s") == []
        assert_idle()

    # How things are called

    def _url(self, place: str) -> str:
        return f"held://{self._folder / place}/s"

    def _snapshot(self, place: str) -> Any:
        return self._api.Snapshot(self._url(place))

    def _place(self) -> str:
        return self._rng.choice(PLACES)

    def _note(self, what: str, text: object = "") -> None:
        self.did[what] += 1
        self.said.append(f"{next(self._clock)}: {what} {text}".rstrip())

    def _call(self, call: Callable[[], Any]) -> Any:
        """What a call of the API returns, by either facade."""
        return self._bounded(lambda: self._api.run(call()))

    def _bounded(self, call: Callable[[], Any]) -> Any:
        """Calls, and takes away what holds it up, if anything does."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="trainer", daemon=True).start()
        if self._stopped is not None or any(self._folder.glob("*/hold-*")):
            concurrent.futures.wait([done], self._rng.choice([0.02, 0.2]))
            if not done.done():
                self.let()
        concurrent.futures.wait([done], PATIENCE_S)
        assert done.done(), "it hangs"
        return done.result()

    # What may be where

    def _saves(self) -> list[Save]:
        """Those of which nobody has said how they ended."""
        return [
            event for event in self._events if isinstance(event, Save) and event.ended == math.inf
        ]

    def _under_way(self, place: str) -> list[Event]:
        """What may be changing the place."""
        return [each for each in self._events if each.place == place and each.ended == math.inf]

    def _expected(self, place: str) -> set[int | None]:
        """Numbers of the states that may be there; None is nothing."""
        nothing = Event(place=place, numbers=frozenset([None]), begun=-1, ended=-1)
        here = [nothing, *[event for event in self._events if event.place == place]]
        last = max([event.begun for event in here if event.has_succeeded], default=-1)
        return {
            number
            for event in here
            if event.has_succeeded is not False and event.ended >= last
            for number in event.numbers
        }

    def _begin(self, event: Event, *, overwrite: bool) -> None:
        """Notes what may make the event fail from the beginning."""
        place = event.place
        if not overwrite and (self._expected(place) != {None} or self._under_way(place)):
            event.excuses.add("exists")
        if any((self._folder / place).glob("fail-*")):
            event.excuses.add("fail")
        self._events.append(event)

    def _read(
        self, place: str, read: Callable[[], Any], found: Callable[[Any], Found | None]
    ) -> bool:
        """Fails unless a state is read that may be there, or nothing is, and may be; returns
        whether there was one.

        Args:
            found: The state, by what ``read`` has returned. None: which one it is is not looked at.
        """
        before, was_changing = self._expected(place), bool(self._under_way(place))
        state, number = None, None
        try:
            state = found(self._call(read))
        except NotASnapshot as error:
            kind = error.found
        except SnapshotReplaced:
            assert was_changing, "nobody has replaced it"
            return False
        else:
            kind = "committed"
        allowed = before | self._expected(place)
        if kind != "committed":
            assert kind in ("absent", "unfinished")
        elif state is None:
            assert allowed != {None}
            return True
        else:
            number = state["own"]["number"]
        assert number in allowed, f"found state {number}, not one of {allowed}"
        for key, value in (state or {}).items():
            assert_same(value, self._states[number or 0][key], f"state {number}: {key}")
        return state is not None

    # Saving

    def take(self) -> None:
        place, how = self._place(), self._how()
        event = Event(place=place, numbers=self._new_state(), begun=next(self._clock))
        self._note("take", f"{event.numbers} to {place} {self._text(how)}")
        self._begin(event, overwrite=how["overwrite"])
        state = self._trainer.state
        self._conclude(event, lambda: self._api.Snapshot.take(self._url(place), state, **how))

    def async_take(self) -> None:
        rng, how = self._rng, self._how()
        how["stage"] = rng.choice(["eager", "lazy"])
        offload = rng.choice(["auto", "thread", "process", "process"])
        how["options"] = msgspec.structs.replace(
            how["options"],
            offload=offload,
            detach=offload != "thread" and rng.random() < 0.3,
            max_slowdown=rng.choice([None, 0.5]),
        )
        save = self._async_take(self._place(), **how)
        if save.pending is not None and save.is_loose and rng.random() < 0.7:
            self._note("guard")
            save.pending.guard(self._trainer.optimizer)
            save.is_loose = False

    def _async_take(self, place: str, **how: Any) -> Save:
        save = Save(place=place, numbers=self._new_state(), begun=next(self._clock))
        self._note("async_take", f"{save.numbers} to {place} {self._text(how)}")
        self._begin(save, overwrite=how["overwrite"])
        state, call = self._trainer.state, self._api.Snapshot.async_take
        try:
            save.pending = self._call(lambda: call(self._url(place), state, **how))
            save.is_loose = how.get("stage") == "lazy"
            save.is_detached = how["options"].detach
        except ActorSnapError as error:
            self._fail(save, error)
        return save

    def _new_state(self) -> frozenset[int | None]:
        """Its number, from now on in the state."""
        number = len(self._states)
        self._trainer.own["number"] = number
        self._states.append(self._trainer.copy())
        return frozenset([number])

    def _how(self) -> dict[str, Any]:
        """Arguments of all saves, at random."""
        rng = self._rng
        budget_bytes = rng.choice([None] * 8 + [2 * MIB, 4 * MIB, 64 * MIB])
        self._is_tight = self._is_tight or budget_bytes in (2 * MIB, 4 * MIB)
        options = Options(
            fsync=rng.random() < 0.1,
            chunk_bytes=2 * MIB,
            timeout_s=2 * PATIENCE_S,
            compression=rng.choice([None, None, None, "zstd:1", "zstd:3"]),
            memory_budget_bytes=budget_bytes,
        )
        return {
            "overwrite": rng.random() < 0.9,
            "resume": rng.random() < 0.1,
            "options": options,
        }

    def _text(self, how: dict[str, Any]) -> str:
        options: Options = how["options"]
        names = ("offload", "compression", "detach", "memory_budget_bytes", "max_slowdown")
        values = {name: value for name, value in how.items() if name != "options"}
        values |= {name: getattr(options, name) for name in names}
        said = [f"{name}={value}" for name, value in values.items() if value]
        self.did.update(said)
        return " ".join(said)

    def _conclude(self, event: Event, call: Callable[[], Any]) -> None:
        try:
            self._call(call)
        except ActorSnapError as error:
            self._fail(event, error)
        else:
            event.has_succeeded, event.ended = True, next(self._clock)
            self._note("committed", event.numbers)

    def _finish(self, save: Save) -> None:
        self._conclude(save, save.pending.wait)

    def _fail(self, event: Event, error: ActorSnapError) -> None:
        """Fails unless the history has a reason for the error."""
        self._note(type(error).__name__, f"{event.numbers}: {error}")
        event.ended = next(self._clock)
        event.has_succeeded = False
        match error:
            case ObjectExists():
                reason = "exists"
            case StateChanged():
                reason = "rash"
            case SnapshotAborted(stage="cancel"):
                reason = "cancel"
            case SnapshotAborted(__cause__=StorageFull()):
                reason = "fail"
            case SnapshotAborted():
                reason = "deaths"
            case _:
                raise error
        assert reason in event.excuses, f"it had no reason to fail: {error!r}"
        if isinstance(error, SnapshotAborted) and error.may_be_committed:
            event.has_succeeded = None

    def _some_save(self) -> Save | None:
        """One that was under way, or is begun now; None if it has failed already."""
        if not self._saves():
            self.async_take()
        saves = self._saves()
        return self._rng.choice(saves) if saves else None

    def wait(self) -> None:
        if save := self._some_save():
            self._note("wait")
            self._finish(save)

    def poll(self) -> None:
        self._note("poll")
        for save in self._saves():
            if save.pending.done():
                self._finish(save)

    def cancel(self) -> None:
        if save := self._some_save():
            save.pending.cancel()
            save.excuses.add("cancel")
            self._note("cancel", save.numbers)

    def drop(self) -> None:
        """The handle goes, the save goes on."""
        save = self._some_save()
        if save and not save.is_loose and not save.is_detached:
            self._note("drop", save.numbers)
            self._events.append(Event(place=save.place, numbers=save.numbers, begun=save.begun))
            self._events.remove(save)
            save.pending = None
            gc.collect()

    # Training

    def staged(self) -> None:
        if save := self._some_save():
            self._await_staged(save)

    def _await_staged(self, save: Save) -> None:
        self._note("staged", save.numbers)
        save.is_loose = False
        try:
            self._call(save.pending.staged)
        except ActorSnapError as error:
            self._fail(save, error)

    def step(self) -> None:
        for save in self._saves():
            if save.is_loose:
                self._await_staged(save)
        self._note("step")

        def step() -> None:
            with actorsnap.step():
                self._trainer.step()

        self._bounded(step)

    def rash(self) -> None:
        """Changes a parameter, without a step. One so small that no copy comes between the change
        and its counter's."""
        self._note("rash")
        for save in self._saves():
            save.excuses.add("rash")
        with torch.no_grad():
            self._trainer.model.get_parameter("1.bias").add_(1.0)

    def change(self) -> None:
        """Changes what is not the optimizer's, as one may when ``async_take`` has returned."""
        self._note("change")
        own, rng = self._trainer.own, self._rng
        own["noise"].add_(1.0)
        if rng.random() < 0.5:
            own["noise"] = torch.randn(rng.choice([0, 10, MIB]))
        own["text"] = "x" * rng.randrange(100)

    # Troubles

    def hold(self) -> None:
        operation, place = self._rng.choice(OPERATIONS), self._place()
        self._note("hold", f"{operation} at {place}")
        (self._folder / place / f"hold-{operation}").touch()

    def let(self) -> None:
        """Lets go on what is held, or stopped."""
        self._note("let")
        for path in self._folder.glob("*/hold-*"):
            path.unlink()
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            send(stopped, signal.SIGCONT)

    def fail(self) -> None:
        """Operations at a place fail from now on."""
        operation, place = self._rng.choice(OPERATIONS), self._place()
        self._note("fail", f"{operation} at {place}")
        (self._folder / place / f"fail-{operation}").touch()
        for event in self._under_way(place):
            event.excuses.add("fail")

    def mend(self) -> None:
        self._note("mend")
        for path in self._folder.glob("*/fail-*"):
            path.unlink()

    def kill(self) -> None:
        if process := self._uploader():
            self._note("kill")
            self._strike("deaths")
            send(process, signal.SIGKILL)
            self._stopped = None

    def terminate(self) -> None:
        if process := self._uploader():
            self._note("terminate")  # which it ignores
            send(process, signal.SIGTERM)

    def stop(self) -> None:
        if process := self._uploader():
            self._note("stop")
            send(process, signal.SIGSTOP)
            self._stopped = process

    def _uploader(self) -> psutil.Process | None:
        """The process; None where there is none to be had, because too many were killed."""
        warm_up = WARM_UP[self._api.name]
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if found := living_children() - self._others:
                return found.pop()
            self._call(lambda: warm_up(0, options=Options(offload="process")))
            time.sleep(0.01)
        return None

    def _strike(self, excuse: str) -> None:
        """One death is no excuse, but where memory is given back as soon as it is stored."""
        for save in self._saves():
            save.num_deaths += 1
            save.excuses |= {excuse} - {"deaths"}
            if self._is_tight or save.num_deaths > 1:
                save.excuses.add("deaths")

    # What else is done with a place

    def restore(self) -> None:
        place = self._place()
        self._note("restore", place)
        self._restore(place, Trainer(self._rng.randrange(100)))

    def roll_back(self) -> None:
        """The trainer itself goes on with what was saved."""
        place = self._place()
        for save in self._saves():
            self._await_staged(save)
        self._note("roll_back", place)
        self._restore(place, self._trainer)

    def _restore(self, place: str, trainer: Trainer) -> None:
        """Of what a trainer has, its own values come as they were saved, whatever there were."""
        before, trainer.own = trainer.own, StateDict()
        snapshot = self._snapshot(place)
        if not self._read(place, lambda: snapshot.restore(trainer.state), lambda _: trainer.copy()):
            trainer.own = before

    def restore_part(self) -> None:
        place, own = self._place(), StateDict()
        self._note("restore_part", place)
        snapshot = self._snapshot(place)
        self._read(
            place,
            lambda: snapshot.restore({"own": own}),
            lambda _: {"own": copied(own.state_dict())},
        )

    def verify(self) -> None:
        self._verify(self._place(), self._rng.choice(["quick", "full"]))

    def _verify(self, place: str, level: str) -> None:
        self._note("verify", f"{place} {level}")

        def look(report: VerifyReport) -> None:
            assert report.ok, report.problems

        snapshot = self._snapshot(place)
        self._read(place, lambda: snapshot.verify(level), look)

    def delete(self) -> None:
        place = self._place()
        event = Event(place=place, numbers=frozenset([None]), begun=next(self._clock))
        self._note("delete", place)
        before = self._expected(place)
        self._events.append(event)
        try:
            self._call(self._snapshot(place).delete)
            event.has_succeeded = True
        except NotASnapshot:
            assert None in before | self._expected(place)
            event.has_succeeded = False
        event.ended = next(self._clock)

    def copy(self) -> None:
        source, to = self._rng.sample(PLACES, 2)
        self._note("copy", f"{source} to {to}")
        event = Event(place=to, numbers=frozenset(), begun=next(self._clock))
        before, was_changing = self._expected(source), bool(self._under_way(source))
        event.numbers = frozenset(before - {None})
        self._begin(event, overwrite=True)
        snapshot = self._snapshot(source)
        event.has_succeeded = False
        try:
            self._call(lambda: snapshot.copy_to(self._url(to), overwrite=True))
            event.has_succeeded = True
        except NotASnapshot:
            assert None in before | self._expected(source)
        except SnapshotReplaced:
            assert was_changing, "nobody has replaced it"
        except StorageFull:
            assert "fail" in event.excuses
            event.has_succeeded = None
        event.numbers |= self._expected(source) - {None}
        event.ended = next(self._clock)

    def collect(self) -> None:
        place = self._place()
        self._note("collect", place)
        command = ["rm", "--garbage", self._url(place)]
        before = self._expected(place)
        is_busy = bool(self._under_way(place))
        done = self._bounded(lambda: CliRunner().invoke(app, command))
        is_nothing_there = None in before | self._expected(place)
        codes = {0, 3} if is_nothing_there else {0}
        if is_nothing_there and ": it is complete. `actorsnap recover" in done.output:
            codes = {5}  # left by a copy whose commit failed, or by a killed process
        if is_busy:
            codes.add(5)  # it leaves what is being saved
        assert done.exit_code in codes, done.output


VERBS = {
    "take": 2,
    "async_take": 12,
    "wait": 3,
    "poll": 2,
    "cancel": 2,
    "drop": 1,
    "staged": 2,
    "step": 5,
    "rash": 1,
    "change": 4,
    "hold": 4,
    "let": 2,
    "fail": 1,
    "mend": 2,
    "kill": 2,
    "terminate": 1,
    "stop": 1,
    "restore": 2,
    "roll_back": 1,
    "restore_part": 1,
    "verify": 2,
    "delete": 1,
    "copy": 2,
    "collect": 2,
}
"""What histories are made of, and how often."""

ALSO_REACHED = {
    *("guard", "committed", "SnapshotAborted", "stage=lazy", "stage=eager", "overwrite=True"),
    *("resume=True", "offload=auto", "offload=thread", "offload=process", "detach=True"),
    *("compression=zstd:1", "compression=zstd:3", "max_slowdown=0.5"),
    *(f"memory_budget_bytes={size * MIB}" for size in (2, 4)),
}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def live(seed: int, folder: Path, num_steps: int) -> Counter[str]:
    """One history; what it did."""
    history = History(seed, folder)
    try:
        history.run(num_steps)
    except BaseException as error:
        error.add_note("\n".join([f"seed {seed}", *history.said]))
        raise
    finally:
        history.settle()
        shutdown()
    return history.did


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> Iterator[None]:
    """Nothing of a history is left: neither processes, nor memory, threads, or descriptors."""
    shutdown()
    no_leaks.restart()
    monkeypatch.syspath_prepend(HELD)
    shared, others = shared_files(), living_children()
    yield
    shutdown()
    assert living_children() <= others
    assert shared_files() <= shared


def living_children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if is_alive(child)}


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Sends a signal, unless the process is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def test_a_history(tmp_path: Path) -> None:
    live(SEEDS[0], tmp_path, 10)


@pytest.mark.slow
def test_some_histories_with_everything_in_them(tmp_path: Path) -> None:
    did: Counter[str] = Counter()
    for seed in SEEDS:
        did += live(seed, tmp_path / str(seed), 10)
    assert (VERBS.keys() | ALSO_REACHED) - did.keys() == set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_histories(tmp_path: Path, seed: int) -> None:
    live(seed, tmp_path, 40)
