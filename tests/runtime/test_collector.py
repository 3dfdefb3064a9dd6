# SPDX-License-Identifier: Apache-2.0
"""Saves and Python's garbage collector: few collections, none that is needed, none that harms."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import Options, StateDict, shutdown
from actorsnap.sync import Snapshot
from tests.conftest import LeakCheck
from tests.support.cases import slow

OFFLOADS = pytest.mark.parametrize("offload", ["thread", "process"])
THREAD_FIRST = pytest.mark.parametrize("offload", ["thread", slow("process")])
PROCESS_FIRST = pytest.mark.parametrize("offload", [slow("thread"), "process"])
NUM_TENSORS = 20_000


@pytest.fixture(autouse=True)
def _fresh(no_leaks: LeakCheck) -> Iterator[None]:
    shutdown()
    no_leaks.restart()
    was_enabled, threshold = gc.isenabled(), gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    if was_enabled:
        gc.enable()
    shutdown()
    no_leaks.assert_none()


def save(url: Path, state: dict[str, Any], offload: str) -> Any:
    options = Options(offload=offload, fsync=False)
    return Snapshot.async_take(str(url), state, options=options, overwrite=True)


@contextmanager
def counted() -> Iterator[Counter[tuple[int, bool]]]:
    """Collections, by generation and by whether they were on this thread."""
    here = threading.get_ident()
    found: Counter[tuple[int, bool]] = Counter()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found[info["generation"], threading.get_ident() == here] += 1

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


@PROCESS_FIRST
def test_a_save_of_many_tensors_causes_few_collections(offload: str, tmp_path: Path) -> None:
    tensors = {f"layer.{number}.weight": torch.ones(4) for number in range(NUM_TENSORS)}
    state = {"model": StateDict(tensors)}
    save(tmp_path / "s", state, offload).wait()
    gc.collect()
    blocks = sys.getallocatedblocks()
    with counted() as found:
        pending = save(tmp_path / "s", state, offload)
        taken = sys.getallocatedblocks() - blocks
        pending.wait()
    # The collector looks at each 700th new object that may be part of a circle: there is about one
    # per tensor on the trainer's thread. No collection walks over the trainer's own objects.
    assert found[0, True] + found[1, True] <= 60
    assert found[2, True] == found[2, False] == 0
    assert taken <= 20 * NUM_TENSORS


def test_a_blocking_save_of_many_tensors_causes_few_collections(tmp_path: Path) -> None:
    state = {
        "model": StateDict(
            {f"layer.{number}.weight": torch.ones(4) for number in range(NUM_TENSORS)}
        )
    }
    options = Options(fsync=False)
    Snapshot.take(str(tmp_path / "s"), state, options=options)
    gc.collect()
    with counted() as found:
        Snapshot.take(str(tmp_path / "s"), state, options=options, overwrite=True)
    # Per tensor, only a shape and a tuple of checksums outlive their step.
    assert found[0, True] + found[0, False] <= 70
    assert found[2, True] == found[2, False] == 0


@THREAD_FIRST
def test_without_the_collector_saves_keep_no_state_and_little_else(
    offload: str, tmp_path: Path
) -> None:
    tensors = {f"layer.{number}.weight": torch.ones(4) for number in range(2000)}
    state = {"model": StateDict(tensors)}
    save(tmp_path / "s", state, offload).wait()
    gc.collect()
    gc.disable()
    for _ in range(10):
        save(tmp_path / "s", state, offload).wait()
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    tensors.clear()
    state.clear()
    wait_until(lambda: not any([tensor() is not None for tensor in alive]))
    # Tasks and their groups are in circles, of which there are as many as actors, not as tensors.
    assert gc.collect() <= 10 * 700


@OFFLOADS
def test_saves_with_a_collector_that_never_rests(offload: str, tmp_path: Path) -> None:
    gc.freeze()
    gc.set_threshold(1, 1, 1)
    state = {"model": StateDict(weight=torch.arange(1000.0), step=3)}
    for _ in range(3):
        save(tmp_path / "s", state, offload).wait()
    assert torch.equal(restored(tmp_path / "s"), torch.arange(1000.0))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def restored(url: Path) -> torch.Tensor:
    target = {"model": StateDict(weight=torch.zeros(1000))}
    Snapshot(url).restore(target, strict=False)
    found = target["model"]["weight"]
    assert isinstance(found, torch.Tensor)
    return found
