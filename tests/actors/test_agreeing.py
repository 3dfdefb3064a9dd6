# SPDX-License-Identifier: Apache-2.0
"""Ranks that agree on a call, over a bad network and under a virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
import trio.testing

from actorsnap.actors.agreeing import Agreement
from actorsnap.protocol.agreement import Agreed, Calls, Entered, Wish, Wishes
from actorsnap.protocol.failure import Failure
from actorsnap.protocol.messages import Arrived, Proceed
from actorsnap.transport.ends import RelayedEnds
from tests.support.network import SimulatedNetwork

BOUND_S = 30.0
HOLD_S = BOUND_S + 4.0
NUM_CALLS = 20


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@dataclass
class SimTrainer:
    calls: Calls = field(default_factory=Calls)
    agreement: Agreement | None = None
    answer: Agreed | Failure | None = None
    served: list[int] = field(default_factory=list)
    longest_hold_s: float = 0.0
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    stopped_until_s: float = 0.0


class AgreeingWorld:
    """Ranks that train, and agree once."""

    def __init__(self, num_ranks: int, rng: random.Random, *, bad: bool = True) -> None:
        self.rng = rng
        self.network = SimulatedNetwork(
            num_ranks,
            rng=rng,
            max_delay_s=rng.choice([0.0, 0.1, 5.0]) if bad else 0.0,
            repeats=rng.choice([0.0, 0.5]) if bad else 0.0,
            lost_after_s=BOUND_S,
        )
        self.ranks = [SimTrainer() for _ in range(num_ranks)]
        self.wishes = Wishes(saves_on_notice=True)
        for number in range(rng.randint(1, 3)):
            self.wishes.add(Wish(f"wish {number}", rng.randint(0, 2)))
        self.step_s = rng.choice([0.01, 1.0, 10.0])

    def decide(self, entered: Mapping[int, Entered]) -> Agreed | Failure:
        return self.wishes.decide(entered, lambda until_s, num_steps: True)[0]

    async def train(self, number: int) -> None:
        rank = self.ranks[number]
        for call in range(1, NUM_CALLS + 1):
            await anyio.sleep(self.rng.random() * self.step_s)
            await anyio.sleep_until(rank.stopped_until_s)
            if rank.calls.enter(closes=call == NUM_CALLS):
                began = anyio.current_time()
                while rank.calls.held is not None:
                    assert rank.agreement is not None
                    await rank.agreement.released()
                rank.longest_hold_s = max(rank.longest_hold_s, anyio.current_time() - began)
                if rank.calls.serve():
                    rank.served.append(call)

    async def agree(self, number: int, after_s: float) -> None:
        rank = self.ranks[number]
        await anyio.sleep(after_s)
        await anyio.sleep_until(rank.stopped_until_s)
        self.network.begin(number)
        ends: Any = SimpleNamespace(
            participant=self.network.participant(number),
            coordinator=self.network.coordinator() if number == 0 else None,
        )
        call: Any = SimpleNamespace(
            number=-2, bound_s=BOUND_S, rank=number, world_size=len(self.ranks), ends=ends
        )
        rank.agreement = Agreement(call, rank.calls, self.decide if number == 0 else None)
        rank.answer = await rank.agreement.run()

    async def live(self, number: int, begin_s: float) -> None:
        rank = self.ranks[number]
        with rank.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.agree, number, begin_s)
                await self.train(number)
                await anyio.sleep(10 * BOUND_S)  # an answer that comes late, or never
                tasks.cancel_scope.cancel()

    def kill(self, number: int) -> None:
        self.network.silence(number, math.inf)
        self.ranks[number].scope.cancel()

    def stop(self, number: int, for_s: float) -> None:
        self.network.silence(number, for_s)
        self.ranks[number].stopped_until_s = anyio.current_time() + for_s

    async def run(self, begin_s: float, *troubles: tuple[float, str, int, float]) -> None:
        async def trouble(after_s: float, what: str, number: int, for_s: float) -> None:
            await anyio.sleep(after_s)
            if what == "kill":
                self.kill(number)
            elif what == "stop":
                self.stop(number, for_s)
            else:
                self.network.break_off(number, "the store is gone")

        async with anyio.create_task_group() as tasks:
            for each in troubles:
                tasks.start_soon(trouble, *each)
            for number in range(len(self.ranks)):
                tasks.start_soon(self.live, number, begin_s + self.rng.random() * 0.01)


async def test_all_save_at_one_call() -> None:
    world = AgreeingWorld(64, random.Random(1), bad=False)
    world.step_s = 1.0
    await world.run(3.0)
    answer = world.ranks[0].answer
    assert isinstance(answer, Agreed)
    assert all(rank.answer == answer for rank in world.ranks)
    assert all(rank.served == [answer.at] for rank in world.ranks)


@pytest.mark.parametrize(
    "seed", [*range(10), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 300)]]
)
async def test_all_save_at_one_call_or_none_does(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 2, 3, 5, 12])
    world = AgreeingWorld(num_ranks, rng)
    begin_s = rng.random() * world.step_s * NUM_CALLS * 0.6
    troubles = [
        (
            begin_s + rng.choice([-1.0, 0.0, rng.random() * 10]) + 0.001,
            rng.choice(["kill", "stop", "stop", "break"]),
            rng.randrange(num_ranks),
            rng.choice([1.0, 20.0, 50.0]),
        )
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    troubles = [(max(0.0, after_s), what, who, for_s) for after_s, what, who, for_s in troubles]
    await world.run(begin_s, *troubles)
    gone = {who for _, what, who, _ in troubles if what == "kill"}
    stop_s = max([for_s for _, what, _, for_s in troubles if what == "stop"], default=0.0)
    living = [rank for number, rank in enumerate(world.ranks) if number not in gone]
    for rank in living:
        assert rank.calls.entered == NUM_CALLS
        assert rank.calls.held is None
        assert rank.longest_hold_s <= HOLD_S + 2 * stop_s + 5.0
    answers = [rank.answer for rank in living if isinstance(rank.answer, Agreed)]
    assert all(answer == answers[0] for answer in answers)
    hurt = {what for _, what, who, for_s in troubles if what != "stop" or for_s >= BOUND_S}
    if not hurt:
        # No rank was away for longer than the bound: all know, and all do the same.
        served = [rank.served for rank in living]
        assert all(one == served[0] for one in served), served
        assert len(answers) in (0, len(living))
    for rank in living:
        # A rank that had given up rank 0 may be late, never early, and never saves twice.
        assert len(rank.served) <= 1
        assert all(call >= answers[0].at for call in rank.served)


async def test_a_rank_left_without_an_answer_takes_it_later() -> None:
    """Rank 0 is stopped with the answer decided, and goes on after a minute."""
    sent: list[Any] = []
    wire: Any = SimpleNamespace(post=lambda to, message: sent.append(message))
    ends = RelayedEnds(wire, rank=1)
    call: Any = SimpleNamespace(number=-2, bound_s=BOUND_S, rank=1, world_size=2, ends=ends)
    calls = Calls()
    agreement = Agreement(call, calls)
    answers: list[Agreed | Failure] = []

    async def take_part() -> None:
        answers.append(await agreement.run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take_part)
        await anyio.sleep(HOLD_S - 0.1)
        assert calls.held == -2
        assert [type(message) for message in sent] == [Arrived]
        await anyio.sleep(0.2)
        assert _held(calls) is None
        await agreement.released()
        assert not calls.enter()
        await anyio.sleep(60.0)
        agreed = Agreed(at=1, since=0, reason="asked", saves=True)
        ends.put(False, Proceed(0, msgspec.msgpack.encode(agreed), is_last=True))
    ends.close()
    assert answers == [agreed]
    assert calls.enter()
    assert calls.serve() == "asked"


def _held(calls: Calls) -> int | None:
    """For mypy, which remembers an earlier ``assert``."""
    return calls.held
