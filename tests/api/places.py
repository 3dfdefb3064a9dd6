# SPDX-License-Identifier: Apache-2.0
"""Small known states, and what lies at a place: the words in which tests of faults speak.

A state is told by its number: ``state(3)`` and ``state(4)`` differ in every leaf, so a
mixture of two is equal to none of them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from actorsnap import NotASnapshot, Options, Snapshot, StateDict
from actorsnap.format.manifest import (
    COMMIT_KEY,
    COMMIT_KEYS,
    OLDER_COMMIT_KEY,
    decode_commit,
)
from actorsnap.runtime.host import Host
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.testing import run_blocking_in_thread

__all__ = [
    "assert_idle",
    "assert_whole",
    "leftovers",
    "make_both",
    "make_older",
    "number_at",
    "number_of",
    "runtime_threads",
    "state",
]


def state(number: int, *, num_floats: int = 270_000) -> dict[str, StateDict]:
    """An app state of two data objects: a large key, and two small ones that share one."""
    return {
        "model": StateDict(
            {
                "weight": torch.full((num_floats,), float(number)),
                "bias": torch.full((3, 5), number, dtype=torch.int64).t(),
            }
        ),
        "optimizer": StateDict({"moment": torch.full((1000,), number, dtype=torch.int16)}),
        "progress": StateDict({"step": number, "name": f"run {number}"}),
    }


def number_of(app_state: dict[str, StateDict]) -> int:
    """The number of a state; fails if it is a mixture."""
    number = app_state["progress"]["step"]
    expected = state(number, num_floats=app_state["model"]["weight"].numel())
    for key, stateful in expected.items():
        for name, value in stateful.items():
            found = app_state[key][name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(found, value), f"{key}/{name} is not of state {number}"
            else:
                assert found == value, f"{key}/{name} is not of state {number}"
    return int(number)


async def number_at(url: object, *, num_floats: int = 270_000) -> int | None:
    """The number of the state that is committed at a place, verified to the last byte, or
    None where nothing is."""
    snapshot = Snapshot(str(url))
    try:
        report = await snapshot.verify("full")
    except NotASnapshot as error:
        if error.found not in ("absent", "unfinished"):
            raise
        return None
    assert report.ok, report.problems
    target = state(-1, num_floats=num_floats)
    await Snapshot(str(url)).restore(target)
    return number_of(target)


def _open(url: object) -> Storage:
    return open_storage(str(url), StorageContext(run_blocking=run_blocking_in_thread))


async def _keys(storage: Storage) -> AsyncIterator[str]:
    async for info in storage.list(""):
        yield info.key


async def leftovers(url: object) -> list[str]:
    """The keys at a place that do not belong to its committed snapshot."""
    storage = _open(url)
    keys = [key async for key in _keys(storage)]
    attempt = commit_key = None
    for commit_key in [key for key in COMMIT_KEYS if key in keys][:1]:
        attempt = decode_commit(await storage.get(commit_key)).attempt
    await storage.aclose()
    return [key for key in keys if key != commit_key and key.partition("/")[0] != attempt]


def make_older(root: Path) -> str:
    """Gives a snapshot's commit object the name of older releases; returns its attempt."""
    os.rename(root / COMMIT_KEY, root / OLDER_COMMIT_KEY)
    return decode_commit((root / OLDER_COMMIT_KEY).read_bytes()).attempt


async def make_both(root: Path, number: int) -> str:
    """Replaces an older snapshot by state ``number``, up to a crash right after the commit.

    Returns:
        The older snapshot's attempt, which is still there.
    """
    older = make_older(root)
    kept = root.parent / f"{root.name}-kept"
    shutil.copytree(root, kept)
    await Snapshot.take(root, state(number), overwrite=True, options=Options(fsync=False))
    for name in (older, OLDER_COMMIT_KEY):
        assert not (root / name).exists()
        os.rename(kept / name, root / name)
    return older


async def assert_whole(url: object, number: int | None, *, is_clean: bool = True) -> None:
    """Fails unless state ``number`` (or nothing, for None) is committed at the place."""
    assert await number_at(url) == number
    if is_clean:
        assert await leftovers(url) == []


def assert_idle() -> None:
    """Fails if the runtime still holds memory for a call."""
    budget = Host.get().resources.budget
    assert (budget.leased_bytes, budget.num_waiting) == (0, 0)


def runtime_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("actorsnap"))
