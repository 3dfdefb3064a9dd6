# SPDX-License-Identifier: Apache-2.0
"""A trainer to disturb: one thread, small Python operations and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

import actorsnap
from bench.savers import Saver
from bench.state import State, compare, scramble

__all__ = ["Disturbance", "Trainer", "disturb"]

STEP_S = 0.02
WIDTH = 96
"""The products stay in the cache: what they lose is not memory bandwidth."""

FEWEST_STEPS = 25


class Trainer:
    """Steps that take ``STEP_S`` if nobody disturbs them. Each changes ``changed`` of the state.

    It keeps torch to one thread.
    """

    def __init__(self, state: State) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(20260105)
        self._weight = torch.rand(WIDTH, WIDTH, generator=generator) / WIDTH
        self._metrics: dict[str, float] = {}
        self.changed = [name for name in state if state[name].dim() == 1]
        self._tensors = [state[name] for name in self.changed]
        self._num_rounds = 1
        while (seconds := min(self.timed_step() for _ in range(3))) < STEP_S / 2:
            self._num_rounds *= 2
        self._num_rounds = max(1, round(self._num_rounds * STEP_S / seconds))

    def step(self) -> None:
        hidden = self._weight
        for number in range(self._num_rounds):
            hidden = torch.mm(self._weight, hidden).mul_(0.5).add_(self._weight)
            name = f"loss {number % 8}"
            self._metrics[name] = 0.9 * self._metrics.get(name, 0.0) + 0.1 * number
            _ = sorted(self._metrics.values())[:3]
        for tensor in self._tensors:
            tensor.add_(1e-3)

    def timed_step(self) -> float:
        begin = time.perf_counter()
        with actorsnap.step():  # some microseconds, for all contenders alike
            self.step()
        return time.perf_counter() - begin

    def steps(self, count: int) -> list[float]:
        return [self.timed_step() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What a save cost a trainer.

    Attributes:
        blocked_s: Until the trainer could go on.
        extra_s: What its steps took longer until the commit, over all of them.
        inflation: The same as a share of what they would have taken.
        committed_s: From the call on.
    """

    blocked_s: float
    extra_s: float
    inflation: float
    committed_s: float
    num_steps: int

    @property
    def lost_s(self) -> float:
        return self.blocked_s + self.extra_s


def disturb(
    trainer: Trainer,
    saver: Saver,
    state: State,
    target: State,
    url: str,
    *,
    meet: Callable[[], object] = lambda: None,
) -> Disturbance:
    """Saves while the trainer goes on, then compares what was saved.

    Args:
        meet: Called right before the save. Waits for the other ranks: ranks of a real job step
            together, so what one waits for a late one is not lost to the save.

    Raises:
        RuntimeError: the snapshot is not what the state was at the call.
    """
    before = trainer.steps(FEWEST_STEPS)
    expected = state | {name: state[name].clone() for name in trainer.changed}
    meet()
    start = time.perf_counter()
    saving = saver.begin(state, url)
    blocked_s = time.perf_counter() - start
    during: list[float] = []
    while not saving.is_done():
        during.append(trainer.timed_step())
    committed_s = time.perf_counter() - start
    saving.wait()
    # As many without the save as with it, on both sides of it: machines drift.
    after = trainer.steps(max(FEWEST_STEPS, len(during) - len(before)))
    usual_s = fmean(before + after)
    extra_s = sum(during) - len(during) * usual_s
    inflation = fmean(during) / usual_s - 1 if during else 0.0
    scramble(target)
    saver.load(url, target)
    compare(expected, target)
    return Disturbance(blocked_s, extra_s, inflation, committed_s, len(during))
