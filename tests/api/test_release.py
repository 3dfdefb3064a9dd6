# SPDX-License-Identifier: Apache-2.0
"""A save lets go of the app state by itself, without the cycle collector."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import ObjectExists, Options, SnapshotAborted, StateDict, sync
from actorsnap.testing.faults import FaultyStorage
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.support.cases import slow

FAST = Options(fsync=False)
State = dict[str, StateDict]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _take(url: str, state: State) -> None:
    sync.Snapshot.take(url, state, options=FAST)


def _async_take(url: str, state: State) -> None:
    sync.Snapshot.async_take(url, state, options=FAST).wait()


def _fail(url: str, state: State) -> None:
    with (
        faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["write_at"])),
        pytest.raises(SnapshotAborted),
    ):
        sync.Snapshot.take(faulty_url(url), state, options=FAST)


def _fail_early(url: str, state: State) -> None:
    with (
        faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["get"])),
        pytest.raises(SnapshotAborted),
    ):
        sync.Snapshot.take(faulty_url(url), state, options=FAST)


def _exists(url: str, state: State) -> None:
    sync.Snapshot.take(url, {"s": StateDict(x=1)}, options=FAST)
    with pytest.raises(ObjectExists):
        sync.Snapshot.take(url, state, options=FAST)


def _cancel(url: str, state: State) -> None:
    barrier = Barrier(1, verbs=frozenset({"write_at"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = sync.Snapshot.async_take(faulty_url(url), state, options=FAST)
        assert barrier.wait_reached()
        pending.cancel()
        with pytest.raises(SnapshotAborted):
            pending.wait()


@pytest.mark.parametrize(
    "save", [_take, _async_take, _fail, slow(_fail_early), slow(_exists), _cancel]
)
def test_the_app_state_is_let_go(tmp_path: Path, save: Callable[[str, State], None]) -> None:
    tensor, sparse = torch.ones(800_000), torch.eye(50).to_sparse()
    array = bytearray(10_000)
    state = {"s": StateDict(t=tensor, b=array, sparse=sparse)}
    alive: list[weakref.ref[Any]] = [
        weakref.ref(tensor),
        weakref.ref(sparse),
        weakref.ref(state["s"]),
    ]
    save(str(tmp_path / "s"), state)
    del state, tensor, sparse
    until = time.monotonic() + 30  # threads may still be on their way out of the last call
    while any(ref() is not None for ref in alive) and time.monotonic() < until:
        time.sleep(0.01)
    assert [ref() for ref in alive] == [None] * 3
    array.append(1)
