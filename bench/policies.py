# SPDX-License-Identifier: Apache-2.0
"""Orbax 0.12.8 as an oracle: its policy classes and ours on the same random sets of steps.

    python -m pip install --target FOLDER orbax-checkpoint==0.12.8
    python -m bench.policies --orbax FOLDER --sets 5000
    python -m bench.policies --orbax FOLDER --idle

Each comparison is one JSON line: ``sets`` of random steps, metrics and parameters, how many of them
``agree``, and ``reasons`` for the rest. ``explained`` is the number of differences that are what
the reason says they are, and nothing else; ``unexplained`` must be 0.

``--idle`` measures Orbax's ``should_save`` alone against our whole ``maybe_save`` while nothing is
due, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import json
import math
import operator
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from actorsnap.manager import (
    CheckpointManager,
    KeepPolicy,
    StepName,
    StoredStep,
    every,
    keep,
    sync,
)

METRIC = "loss"
NUM_CALLS = 5_000
ROUNDS = 9


@dataclass
class Info:
    """What Orbax's policies get of a checkpoint."""

    step: int
    time: datetime
    metrics: dict[str, float] | None


@dataclass
class Case:
    """A set of steps, and one policy in both languages.

    Attributes:
        explain: Why both differ on this set; empty if they must agree.
        expected: The kept steps that the reason predicts of ours, from Orbax's; None: any.
    """

    theirs: Any
    ours: KeepPolicy
    steps: list[StoredStep]
    explain: str = ""
    expected: Callable[[set[int]], set[int]] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    parser.add_argument("--orbax", type=Path, required=True, help="folder with orbax-checkpoint")
    parser.add_argument("--sets", type=int, default=5000, help="per comparison")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--idle", action="store_true")
    args = parser.parse_args()
    sys.path.append(str(args.orbax))
    if args.idle:
        print(json.dumps(idle()))
        return
    compare(args.sets, random.Random(args.seed))


# Policies


def compare(num_sets: int, rng: random.Random) -> None:
    policies: Any = importlib.import_module(
        "orbax.checkpoint._src.checkpoint_managers.preservation_policy"
    )
    context = policies.PreservationContext()
    for name, make in COMPARISONS.items():
        agree, explained, unexplained = 0, dict[str, int](), 0
        for _ in range(num_sets):
            case = make(policies, rng)
            infos = [to_info(step) for step in case.steps]
            flags = case.theirs.should_preserve(infos, context=context)
            theirs = {info.step for info, flag in zip(infos, flags, strict=True) if flag}
            ours = {each.step for each in case.ours.judge(case.steps)}
            if ours == theirs:
                agree += 1
            elif case.explain and (case.expected is None or case.expected(theirs) == ours):
                explained[case.explain] = explained.get(case.explain, 0) + 1
            else:
                unexplained += 1
                print(f"{name}: ours {sorted(ours)}, theirs {sorted(theirs)}", file=sys.stderr)
                print(f"  {case.ours} on {case.steps}", file=sys.stderr)
        row = {"row": name, "sets": num_sets, "agree": agree}
        print(json.dumps(row | {"explained": explained, "unexplained": unexplained}), flush=True)


def to_info(step: StoredStep) -> Info:
    metrics = dict(step.metrics) or None
    return Info(step=step.step, time=datetime.fromtimestamp(step.created_s, UTC), metrics=metrics)


def make_steps(
    rng: random.Random, values: Callable[[int], float | None] = lambda _: None
) -> list[StoredStep]:
    """Up to 30 steps, on a grid or not; the metric of the i-th is ``values(i)``."""
    grid = rng.choice([1, 1, 7, 10, 100])
    numbers = sorted(rng.sample(range(200), rng.randint(0, 30)))
    steps = []
    for i, number in enumerate(numbers):
        value = values(i)
        metrics = {} if value is None else {METRIC: value}
        name = StepName(number * grid, 1)
        steps.append(StoredStep(name=name, created_s=1e9 + 60 * number, metrics=metrics))
    return steps


def latest(policies: Any, rng: random.Random) -> Case:
    n = rng.randint(1, 12)
    return Case(policies.LatestN(n), keep.last(n), make_steps(rng))


def every_exact(policies: Any, rng: random.Random) -> Case:
    """Orbax keeps multiples alone. A multiple is always the first of its cell."""
    k = rng.choice([2, 3, 10, 50, 70, 1000])
    steps = make_steps(rng)
    firsts: dict[int, int] = {}
    for step in steps:
        firsts.setdefault(step.step // k, step.step)
    return Case(
        policies.EveryNSteps(k),
        keep.every(steps=k),
        steps,
        explain="a cell without its multiple: ours keeps its first step",
        expected=lambda theirs: {
            *theirs,
            *(step for cell, step in firsts.items() if cell * k not in theirs),
        },
    )


def every_greedy(policies: Any, rng: random.Random) -> Case:
    """On multiples alone a chain of distances is the grid."""
    k = rng.choice([2, 3, 10, 50, 70])
    numbers = sorted(rng.sample(range(60), rng.randint(0, 20)))
    steps = [StoredStep(name=StepName(number * k, 1), created_s=0.0) for number in numbers]
    policy = policies.EveryNSteps(k, exact_interval=False)
    return Case(policy, keep.every(steps=k), steps)


def custom(policies: Any, rng: random.Random) -> Case:
    chosen = [rng.randrange(2000) for _ in range(rng.randint(1, 200))]
    return Case(policies.CustomSteps(chosen), keep.at(chosen), make_steps(rng))


def choose_mode(rng: random.Random) -> Literal["min", "max"]:
    return "min" if rng.random() < 0.5 else "max"


def best_policies(policies: Any, rng: random.Random, *, drops_missing: bool) -> tuple[Any, Any]:
    mode, n = choose_mode(rng), rng.randint(1, 6)
    theirs = policies.BestN(
        get_metric_fn=lambda metrics: metrics[METRIC],
        reverse=mode == "min",
        n=n,
        keep_checkpoints_without_metrics=not drops_missing,
    )
    return theirs, keep.best(METRIC, mode, n=n, pending=0 if drops_missing else 10**6)


def best(policies: Any, rng: random.Random) -> Case:
    values = rng.sample(range(-500, 500), 40)
    theirs, ours = best_policies(policies, rng, drops_missing=True)
    return Case(theirs, ours, make_steps(rng, lambda i: values[i] / 8))


def best_ties(policies: Any, rng: random.Random) -> Case:
    """As multisets of values both keep the same."""
    theirs, ours = best_policies(policies, rng, drops_missing=True)
    steps = make_steps(rng, lambda _: float(rng.randint(0, 3)))
    value_of = {step.step: step.metrics[METRIC] for step in steps}

    def oldest_of_equals(kept: set[int]) -> set[int]:
        found = set[int]()
        for value in {value_of[step] for step in kept}:
            equals = sorted(step for step in value_of if value_of[step] == value)
            found |= {*equals[: sum(value_of[step] == value for step in kept)]}
        return found

    return Case(
        theirs, ours, steps, "equal values: ours keeps the older, Orbax the newer", oldest_of_equals
    )


def best_nan(policies: Any, rng: random.Random) -> Case:
    values = rng.sample(range(-500, 500), 40)
    steps = make_steps(rng, lambda i: math.nan if rng.random() < 0.2 else values[i] / 8)
    mode, n = choose_mode(rng), rng.randint(1, 6)
    theirs = policies.BestN(get_metric_fn=lambda m: m[METRIC], reverse=mode == "min", n=n)
    numbers = [step for step in steps if not math.isnan(step.metrics[METRIC])]
    numbers.sort(key=lambda step: step.metrics[METRIC], reverse=mode == "max")
    numbers += [step for step in steps if math.isnan(step.metrics[METRIC])]
    expected = {step.step for step in numbers[:n]}
    ours = keep.best(METRIC, mode, n=n)
    return Case(
        theirs,
        ours,
        steps,
        "NaN: ours is worse than any number, sorted() has no order of it",
        lambda _: expected,
    )


def best_missing(policies: Any, rng: random.Random) -> Case:
    """Ours waits for the metric; the newer ones with it then stay, so that the count can end."""
    values = rng.sample(range(-500, 500), 40)
    theirs, ours = best_policies(policies, rng, drops_missing=False)
    steps = make_steps(rng, lambda i: None if rng.random() < 0.3 else values[i] / 8)
    missing = [i for i, step in enumerate(steps) if not step.metrics]
    oldest = missing[0] if missing else len(steps)
    return Case(
        theirs,
        ours,
        steps,
        "newer ones stay until the missing metric is recorded",
        lambda kept: kept | {step.step for step in steps[oldest:]} | best_of(ours, steps),
    )


def best_of(policy: Any, steps: Sequence[StoredStep]) -> set[int]:
    known = [step for step in steps if step.metrics]
    known.sort(key=lambda s: s.metrics[METRIC], reverse=policy.mode == "max")
    return {step.step for step in known[: policy.n]}


def best_dropped(policies: Any, rng: random.Random) -> Case:
    values = rng.sample(range(-500, 500), 40)
    theirs, ours = best_policies(policies, rng, drops_missing=True)
    steps = make_steps(rng, lambda i: None if rng.random() < 0.3 else values[i] / 8)
    missing = [step.step for step in steps if not step.metrics]
    return Case(
        theirs,
        ours,
        steps,
        "fewer than n have the metric: ours fills up with the others, oldest first",
        lambda kept: kept | {*missing[: ours.n - len(kept)]},
    )


def any_of(policies: Any, rng: random.Random) -> Case:
    """All of the above, on steps where each cell has its multiple."""
    values = rng.sample(range(-500, 500), 40)
    n, num_best, k = rng.randint(1, 5), rng.randint(1, 5), rng.choice([10, 20, 50, 200])
    chosen = [rng.randrange(2000) for _ in range(50)]
    mode = choose_mode(rng)
    steps = make_steps(rng, lambda i: values[i] / 8)
    numbers = {step.step for step in steps}
    steps = [step for step in steps if step.step // k * k in numbers]
    pairs = [
        (policies.LatestN(n), keep.last(n)),
        (policies.EveryNSteps(k), keep.every(steps=k)),
        (policies.CustomSteps(chosen), keep.at(chosen)),
        (
            policies.BestN(get_metric_fn=lambda m: m[METRIC], reverse=mode == "min", n=num_best),
            keep.best(METRIC, mode, n=num_best),
        ),
    ]
    pairs = rng.sample(pairs, rng.randint(1, 4))
    theirs = policies.AnyPreservationPolicy([each for each, _ in pairs])
    return Case(theirs, functools.reduce(operator.or_, [each for _, each in pairs]), steps)


COMPARISONS: dict[str, Callable[[Any, random.Random], Case]] = {
    "LatestN, keep.last": latest,
    "EveryNSteps, keep.every": every_exact,
    "EveryNSteps(exact_interval=False) on multiples, keep.every": every_greedy,
    "CustomSteps, keep.at": custom,
    "BestN, keep.best: distinct values": best,
    "BestN, keep.best: equal values": best_ties,
    "BestN, keep.best: NaN": best_nan,
    "BestN, keep.best: metrics missing, kept": best_missing,
    "BestN, keep.best: metrics missing, dropped": best_dropped,
    "AnyPreservationPolicy, |": any_of,
}


# Idle calls


def idle() -> dict[str, Any]:
    """Median time of a call while nothing is due, in us: of the best round, and of all."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    orbax: Any = importlib.import_module("orbax.checkpoint")
    with tempfile.TemporaryDirectory(prefix="actorsnap-idle-") as folder:
        settings = orbax.CheckpointManagerOptions(save_interval_steps=10**9, max_to_keep=3)
        theirs = orbax.CheckpointManager(Path(folder) / "orbax", options=settings)
        # Without a checkpoint it would save the first step.
        theirs.save(0, args=orbax.args.JsonSave({"a": 1}))
        theirs.wait_until_finished()
        never = every.steps(10**9) | every.last()
        ours = sync.CheckpointManager(Path(folder) / "ours", {}, save=never)
        asynchronous = CheckpointManager(Path(folder) / "ours", {}, save=never)
        step = 0
        policy = theirs._save_decision_policy
        decisions: Any = importlib.import_module(
            "orbax.checkpoint._src.checkpoint_managers.save_decision_policy"
        )
        context = decisions.DecisionContext(
            is_saving_in_progress=False,
            reached_preemption=False,
            multiprocessing_options=theirs._multiprocessing_options,
        )

        def policy_alone(number: int) -> bool:
            info = Info(step=number, time=datetime.now(UTC), metrics=None)
            return bool(
                policy.should_save(info, previous_steps=theirs._checkpoints, context=context)
            )

        names = ("orbax should_save", "orbax policy alone", "maybe_save", "await maybe_save")
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name, call in (
                ("orbax should_save", theirs.should_save),
                ("orbax policy alone", policy_alone),
                ("maybe_save", ours.maybe_save),
            ):
                began_s = time.perf_counter()
                for number in range(step + 1, step + NUM_CALLS + 1):
                    if call(number):
                        raise AssertionError("something is due")
                times[name].append((time.perf_counter() - began_s) / NUM_CALLS * 1e6)
            times["await maybe_save"].append(asyncio.run(awaited(asynchronous, step + 1)))
            step += NUM_CALLS
        theirs.close()
    found = {
        name: {"best": round(min(each), 2), "median": round(statistics.median(each), 2)}
        for name, each in times.items()
    }
    return {"row": "idle call, us", "load": round(os.getloadavg()[0], 1), **found}


async def awaited(manager: CheckpointManager, first: int) -> float:
    began_s = time.perf_counter()
    for number in range(first, first + NUM_CALLS):
        if await manager.maybe_save(number):
            raise AssertionError("something is due")
    return (time.perf_counter() - began_s) / NUM_CALLS * 1e6


if __name__ == "__main__":
    main()
