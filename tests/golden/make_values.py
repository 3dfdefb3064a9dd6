# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/values``: format version 1 with the feature of that name.

The snapshots ``1`` and ``2`` of as many ranks. As ``make_v1.py``: run once, and neither this file
nor the snapshots are ever changed.

``python -m tests.golden.make_values FOLDER`` makes them again.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import anyio
import torch

from actorsnap import StateDict
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.testing import run_blocking_in_thread
from tests.support.world import SimulatedSave

ATTEMPT = "20260101T000000-00000000-1-00000000"
WORLD_SIZES = (1, 2)
MODULE = "tests.golden.make_values"


class Phase(enum.Enum):
    WARM = 1
    HOT = "hot"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Config:
    lr: Any
    phase: Phase = Phase.WARM
    seen: int = field(init=False, default=0)


CLASSES = (Phase, Level, Rights, Point, Config)
for _kind in CLASSES:
    _kind.__module__ = MODULE  # also as a program


def values() -> dict[str, Any]:
    """Returns one value of each kind, made anew by each call."""
    zone = timezone(timedelta(hours=5, minutes=30), "IST")
    return {
        "set": {1, "a", (2, None), frozenset({b"x"})},
        "frozenset": frozenset({1.5, True}),
        "empty": [set(), frozenset(), deque(), defaultdict(None), range(0)],
        "long set": set(range(3000)),
        "long deque": deque(range(3000), 4000),
        "deque": deque([torch.ones(2), {"a": [1]}, 3], maxlen=3),
        "defaultdict": defaultdict(list, {"a": [torch.zeros(2)], 3: []}),
        "factories": [defaultdict(kind) for kind in (int, dict, set, OrderedDict, deque, str)],
        "path": Path("/data/new run/é"),
        "pure paths": [PurePosixPath("a/\udcff"), PureWindowsPath("c:\\x\\y")],
        "datetime": [datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=zone), datetime(1, 1, 1, fold=1)],
        "date": date(9999, 12, 31),
        "time": [time(23, 59, 59, 999_999, tzinfo=UTC), time(fold=1)],
        "timedelta": [timedelta(-3, 4, 5), timedelta.max],
        "timezone": [UTC, zone],
        "range": [range(3), range(10**30, -1, -7)],
        "enum": [Phase.HOT, Level.LOW, Rights.READ | Rights.WRITE, Rights(0)],
        "dataclass": Config(torch.arange(3), Phase.HOT),
        "namedtuple": Point(torch.ones(1), Point(1, {Phase.WARM})),
        "odd keys": {Phase.HOT: Config(0.5), Point(1, 2): [date(2026, 1, 2)], (1,): deque([1])},
    }


def app_state(rank: int) -> dict[str, Any]:
    """Returns a rank's state: only rank 1 has values in ``own``."""
    own = {"rank": rank, "seen": {rank, "x"} if rank else [rank]}
    return {
        "own": StateDict(own),
        "equal": StateDict({"config": Config(rank * 0), "set": {"a", "b", "c"}}),
        "same": StateDict(values()),
    }


async def make(folder: Path) -> None:
    """Takes the snapshots."""
    for world_size in WORLD_SIZES:
        context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
        storage = open_storage(folder / str(world_size), context)
        world = SimulatedSave(
            storages=[storage] * world_size,
            states=[app_state(rank) for rank in range(world_size)],
            run_blocking=run_blocking_in_thread,
            attempt=ATTEMPT,
            replicated=["same/**"],
        )
        assert await world.run() == dict.fromkeys(range(world_size))
        await storage.aclose()


if __name__ == "__main__":
    anyio.run(make, Path(sys.argv[1]))
