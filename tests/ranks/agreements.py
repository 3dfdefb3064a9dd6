# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_agreements.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from actorsnap import Options
from actorsnap.actors.agreeing import Agreement
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.manager import EventKind, every
from actorsnap.manager.sync import CheckpointManager
from actorsnap.protocol.agreement import Calls
from actorsnap.protocol.messages import Proceed
from actorsnap.transport.invitations import Invitations
from tests.api.faults import faulty, faulty_url
from tests.api.managed import Operation, Tally, TallyStorage
from tests.ranks.managers import Trainer, settled_traffic, traffic
from tests.ranks.troubles import outcome, warnings
from tests.worlds import Rank, World

__all__ = ["direct_agreements"]

LOST_AFTER_S = 3.0
OPTIONS = Options(timeout_s=60.0, lost_after_s=LOST_AFTER_S, fsync=False)
STEP_S = 0.02


@dataclass
class FakeNotice:
    reason: str
    grace_s: float | None


class FakeWatcher:
    """Gives a notice when the test does."""

    def __init__(self) -> None:
        self.is_stopped = False

    def start(self, on_notice: Callable[[Any], None]) -> None:
        self.notify = on_notice

    def stop(self) -> None:
        self.is_stopped = True


class Loop:
    """A training loop that notes where it saves and stops.

    Args:
        lag_s: How much longer a step takes on this rank.
    """

    def __init__(self, me: Rank, path: str, lag_s: float = 0.0, **settings: Any) -> None:
        settings.setdefault("save", every.steps(10**6, offset=1))
        self.trainer = Trainer(path, me.rank, **{"options": OPTIONS, **settings})
        self.manager = self.trainer.manager
        self.saved: dict[int, str] = {}
        self.longest_s = 0.0
        self.step = 0
        self._lag_s = lag_s

    def run(self, num_steps: int, at: dict[int, Callable[[], None]] | None = None) -> None:
        for _ in range(num_steps):
            self.step += 1
            time.sleep(STEP_S + self._lag_s)
            self.trainer.train_state["step"] = self.step
            began = time.monotonic()
            decision = self.manager.maybe_save(self.step)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if decision:
                self.saved[self.step] = decision.reason
            if self.manager.should_stop:
                break
            (at or {}).get(self.step, lambda: None)()

    def end(self) -> dict[str, Any]:
        said = outcome(self.manager.close)
        kinds = [event.kind for event in self.manager.events()]
        return {
            **said,
            "saved": {str(step): reason for step, reason in self.saved.items()},
            "step": self.step,
            "stops": self.manager.should_stop,
            "longest_s": self.longest_s,
            "agreed": self.manager.status().last_agreement,
            "kinds": kinds,
            "steps": self.manager.all_steps(),
        }


def request_on(me: Rank, path: str, whom: int, lag_s: float) -> dict[str, Any]:
    """Ranks that never communicated before; ``whom`` is slower than the others."""
    loop = Loop(me, path, lag_s if me.rank == whom else 0.0, save=every.steps(10**6))
    if me.rank == whom:
        # A handler must not wait for anything that the code below it holds.
        signal.signal(signal.SIGUSR1, lambda *_: loop.manager.request("signal"))
    loop.step = 5

    def ask() -> None:
        if me.rank == whom:
            os.kill(os.getpid(), signal.SIGUSR1)

    loop.run(60, {10: ask})
    return loop.end()


def requests_by_all(me: Rank, path: str) -> dict[str, Any]:
    """Several wants at once are one save."""
    loop = Loop(me, path, save=every.steps(10**6))
    loop.step = 5
    loop.run(10)
    dist.barrier()
    loop.run(60, {loop.step + 1: lambda: loop.manager.request(f"by {me.rank}")})
    return loop.end()


def clocks(me: Rank, path: str) -> dict[str, Any]:
    loop = Loop(me, path, save=every.minutes(0.01) | every.steps(100))
    loop.run(200)
    return loop.end()


def notice_on(
    me: Rank, path: str, whom: int, grace_s: float | None, save_s: float
) -> dict[str, Any]:
    """Twice, and on all ranks if ``whom`` is -1. Each save takes ``save_s`` on rank 0."""
    watcher = FakeWatcher()

    def slow(operation: Operation) -> None:
        if operation.key == COMMIT_KEY and operation.is_writing:
            time.sleep(save_s)

    with faulty(lambda inner: TallyStorage(inner, Tally(look=slow))):
        loop = Loop(
            me,
            faulty_url(path),
            save=every.notice() | every.steps(10**6, offset=2) | every.last(),
            notices=[watcher],
        )
        loop.run(4)
        loop.manager.wait()

        def notify() -> None:
            if whom in (me.rank, -1):
                watcher.notify(FakeNotice("spot", grace_s))
                watcher.notify(FakeNotice("spot again", grace_s))

        loop.run(200, {10: notify})
        said = loop.end()
    return {**said, "is_unwatched": watcher.is_stopped}


def ends_first(me: Rank, path: str) -> dict[str, Any]:
    """The loop ends before the agreed call: ``close`` is that call."""
    loop = Loop(me, path, save=every.steps(10**6))
    loop.step = 5
    loop.run(10)
    dist.barrier()
    if me.rank == 1:
        loop.manager.request("at the end")
    time.sleep(1.0)  # they agree on the next call
    said = loop.end()
    state = weakref.ref(loop.trainer.train_state)
    del loop
    gc.collect()
    return {**said, "is_freed": state() is None}


def asks_last(me: Rank, path: str, whom: int, late: int) -> dict[str, Any]:
    """A request after the last call; rank ``late`` comes to ``close`` last."""
    loop = Loop(me, path, save=every.steps(10**6))
    loop.step = 5
    loop.run(10)
    dist.barrier()
    if me.rank == whom:
        loop.manager.request("at the end")
    if me.rank == late:
        time.sleep(0.5)
    return loop.end()


def wait_until_agreed(manager: CheckpointManager) -> None:
    deadline = time.monotonic() + 60.0
    while not manager.status().last_agreement:
        assert time.monotonic() < deadline, "nothing was agreed on"
        time.sleep(0.01)


def leaves(me: Rank, path: str, whom: int, is_agreed: bool) -> dict[str, Any]:
    """``whom`` leaves its block with an error; there is a request. Its process lives on."""
    loop = Loop(me, path, save=every.steps(10**6))
    loop.step = 5

    class Mistake(Exception):
        pass

    def work() -> None:
        with loop.manager:
            loop.run(10)
            dist.barrier()
            if is_agreed and me.rank == 1:
                loop.manager.request("before the end")
            if is_agreed:  # on the next call
                wait_until_agreed(loop.manager)
            if me.rank == whom:
                if not is_agreed:
                    loop.manager.request("in vain")
                raise Mistake
            dist.barrier()
            loop.run(3)

    said = outcome(work)
    if me.rank == whom:
        dist.barrier()
    dist.barrier()
    events = [(str(event.kind), event.detail) for event in loop.manager.events()]
    return {**said, "events": events, "steps": loop.manager.all_steps()}


def restores_between(me: Rank, path: str) -> dict[str, Any]:
    """Other calls come between the agreement and its call."""
    loop = Loop(me, path, save=every.steps(10**6))
    loop.step = 5
    loop.run(5)
    loop.manager.save(loop.step)
    dist.barrier()
    if me.rank == 1:
        loop.manager.request("late")
    time.sleep(1.0)
    loop.manager.restore(loop.step)
    loop.run(5)
    return loop.end()


def is_idle(me: Rank, path: str) -> dict[str, Any]:
    """Counts the messages of a loop with clocks and watchers, then of one agreement."""
    tally = Tally()
    with faulty(lambda inner: TallyStorage(inner, tally)):
        loop = Loop(
            me,
            faulty_url(path),
            save=every.minutes(100) | every.notice() | every.pace(1000) | every.overhead(1e-9),
            notices=[FakeWatcher()],
        )
        while not loop.saved:  # a busy machine may need more steps to agree on the first save
            loop.run(20)
        loop.manager.wait()
        loop.manager.prune(dry_run=True)
        dist.barrier()
        before, num_operations = settled_traffic(), len(tally.operations)
        loop.run(50)
        after, requests = traffic(), len(tally.operations) - num_operations
        dist.barrier()
        answers: list[list[int]] = []
        agree = Calls.agree

        def note(calls: Calls, agreed: Any) -> None:
            agree(calls, agreed)
            answers.append(traffic())

        def ask() -> None:
            loop.manager.request("now")

        with mock.patch.object(Calls, "agree", note):
            loop.run(30, {loop.step + 5: ask} if me.rank == 1 else None)
            loop.manager.wait()
        agreed = [now - then for now, then in zip(answers[0], after, strict=True)]
        dist.barrier()
        said = loop.end()
    return {**said, "before": before, "after": after, "requests": requests, "cost": agreed}


@contextmanager
def struck(where: str, strike: Callable[[], None]) -> Iterator[None]:
    """Calls ``strike`` once, in an agreement."""
    struck: list[bool] = []

    def once() -> None:
        if not struck:
            struck.append(True)
            strike()

    if where == "arrived":
        hold = Calls.hold

        def held(calls: Calls, number: int) -> Any:
            try:
                return hold(calls, number)
            finally:
                once()

        with mock.patch.object(Calls, "hold", held):
            yield
    elif where == "answered":
        run = Agreement.run

        async def answered(agreement: Agreement) -> Any:
            answer = await run(agreement)
            once()
            return answer

        with mock.patch.object(Agreement, "run", answered):
            yield
    else:  # rank 0 has sent the answer to rank 1 alone
        send = Invitations.send

        def sent(invitations: Any, to: int | None, number: int, message: Any) -> None:
            if isinstance(message, Proceed) and to == 2:
                time.sleep(0.5)  # the sending thread is done with rank 1
                once()
            send(invitations, to, number, message)

        with mock.patch.object(Invitations, "send", sent):
            yield


def dies(me: Rank, path: str, whom: int, where: str) -> dict[str, Any]:
    """``whom`` is killed in the agreement that rank 1 asks for; others train for a while."""
    loop = Loop(me, path, save=every.steps(10**6))
    loop.step = 5

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if me.rank == whom:
        with struck(where, die):
            loop.run(10)
            dist.barrier()
            loop.run(1000)
    else:
        loop.run(10)
        dist.barrier()
        survivor = 0 if whom else 1
        if me.rank == survivor:
            loop.manager.request("before the end")
        said = outcome(lambda: loop.run(400))
        with suppress(Exception):
            loop.manager.close()
        return {
            **said,
            "saved": list(loop.saved),
            "longest_s": loop.longest_s,
            "step": loop.step,
            "agreed": loop.manager.status().last_agreement,
        }
    raise AssertionError("it lives")


def stops(me: Rank, path: str, whom: int, where: str) -> dict[str, Any]:
    """``whom`` is stopped in the agreement, longer than ``lost_after_s``, and goes on."""
    loop = Loop(me, path, save=every.steps(10**6), options=OPTIONS)
    loop.step = 5

    def stop() -> None:
        me.say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)

    loop.run(10)
    dist.barrier()
    if me.rank == 1:
        loop.manager.request("in spite of all")
    if me.rank == whom:
        with struck(where, stop):
            said = outcome(lambda: loop.run(100))
    else:
        said = outcome(lambda: loop.run(100))
    dist.barrier()
    if where == "half":
        # A rank that got the answer too late makes the save fail in its next call.
        loop.step = 1000
        then = {"error": ""} if said["error"] else outcome(lambda: loop.run(1))
        return {"first": said, "then": then, "steps": loop.manager.all_steps()}
    # All go on from the same place.
    loop.step = 1000
    loop.saved = {}
    if me.rank == 1:
        loop.manager.request("again")
    loop.run(500)
    return {"first": said, **loop.end()}


def never_calls_again(me: Rank, path: str, closes: bool) -> dict[str, Any]:
    """Rank 1 leaves the loop; its runtime answers."""
    options = Options(timeout_s=6.0, lost_after_s=LOST_AFTER_S, fsync=False)
    loop = Loop(me, path, save=every.steps(10**6), options=options)
    loop.step = 5
    loop.run(10)
    dist.barrier()
    said: dict[str, Any] = {"error": "", "seconds": 0.0}
    if me.rank == 1 and closes:
        loop.manager.close()
    dist.barrier()
    if me.rank == 0:
        loop.manager.request("anybody there?")
        # Longer than the pause before rank 0 would ask again.
        said = outcome(lambda: loop.run(50 if not closes else 200))
    dist.barrier()
    agreed = loop.manager.status().last_agreement
    if closes:
        said |= loop.end()
    return {**said, "saved": list(loop.saved), "step": loop.step, "agreed": agreed}


def asks_in_vain(me: Rank, path: str) -> dict[str, Any]:
    """Rank 1 has no manager when the others ask; then it has one, and a notice comes."""
    watcher = FakeWatcher()
    options = Options(timeout_s=60.0, lost_after_s=8.0, fsync=False)
    loop = Loop(
        me, path, save=every.notice() | every.steps(10**6), options=options, notices=[watcher]
    )
    loop.step = 5
    if me.rank == 0:
        loop.run(5)
        loop.manager.request("too early")
        time.sleep(9.0)  # the bound is over, and rank 0 pauses as long
    dist.barrier()
    if me.rank == 1:
        loop.run(5)
    assert loop.step == 10
    dist.barrier()
    began = time.monotonic()
    if me.rank == 0:
        watcher.notify(FakeNotice("spot", 25.0))
    loop.run(1000)
    return {**loop.end(), "seconds": time.monotonic() - began}


def is_alone(me: Rank, path: str, grace_s: float | None) -> list[str]:
    """The other ranks have no manager. Returns the warnings."""
    texts = warnings()
    if me.rank == 0:
        watcher = FakeWatcher()
        options = Options(timeout_s=60.0, lost_after_s=2.0, fsync=False)
        loop = Loop(me, path, save=every.notice(), options=options, notices=[watcher])
        loop.run(1)
        watcher.notify(FakeNotice("spot", grace_s))
        while not loop.manager.status().last_agreement:
            time.sleep(0.01)
        loop.manager.close()
    dist.barrier()
    return texts


def hurries(me: Rank, path: str) -> dict[str, Any]:
    """A notice comes while rank 0 waits for a rank that does not answer."""
    watcher = FakeWatcher()
    options = Options(timeout_s=60.0, lost_after_s=15.0, fsync=False)
    loop = Loop(
        me, path, save=every.notice() | every.steps(10**6), options=options, notices=[watcher]
    )
    loop.step = 5
    if me.rank == 0:
        loop.run(5)
        loop.manager.request("too early")
        time.sleep(1.0)
        watcher.notify(FakeNotice("spot", 6.0))
        time.sleep(7.0)
    dist.barrier()
    if me.rank == 1:
        loop.run(5)
    dist.barrier()
    loop.run(1000)
    loop.manager.close()
    times = {event.kind: event.time_s for event in [*loop.manager.events()][::-1]}
    return {
        **loop.end(),
        "waited_s": times.get(EventKind.NOT_AGREED, 0.0) - times.get(EventKind.NOTICE, 0.0),
    }


_SCENARIOS: dict[str, Callable[..., Any]] = {
    scenario.__name__: scenario
    for scenario in (
        request_on,
        requests_by_all,
        clocks,
        notice_on,
        ends_first,
        asks_last,
        leaves,
        restores_between,
        is_idle,
        dies,
        stops,
        never_calls_again,
        asks_in_vain,
        is_alone,
        hurries,
    )
}


def play(me: Rank, what: str, path: str, **arguments: Any) -> Any:
    me.join_gloo()
    return _SCENARIOS[what](me, path, **arguments)


def direct_agreements(
    num_ranks: int, *, dying: int = -1, stopped: int = -1, stop_s: float = 0.0, **arguments: Any
) -> list[Any]:
    """What the ranks said; None for one that dies."""
    world = World(num_ranks, play, **arguments)
    try:
        if stopped >= 0:
            assert world.ranks[stopped].hear() == "stopping"
            time.sleep(stop_s)
            world.ranks[stopped].kill(signal.SIGCONT)
        return [None if rank == dying else child.result() for rank, child in enumerate(world.ranks)]
    finally:
        world.end()
