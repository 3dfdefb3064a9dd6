# SPDX-License-Identifier: Apache-2.0
"""Saves of one job to one path with ``overwrite=True`` commit in the order of their calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

from actorsnap import Options, SnapshotAborted, StateDict
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import PendingSnapshot, Snapshot, warm_up
from tests.api.faults import faulty, faulty_url

THREAD = Options(offload="thread", fsync=False)
PROCESS = Options(offload="process", fsync=False)


def app(number: int, count: int = 1 << 10) -> dict[str, Any]:
    return {"s": StateDict(x=torch.full((count,), float(number)))}


def committed(path: Path) -> int:
    value: torch.Tensor = Snapshot(path).read_object("s/x")
    return int(value[0])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "ways",
    [(THREAD, THREAD), (PROCESS, PROCESS), (THREAD, PROCESS), (PROCESS, THREAD)],
    ids=["threads", "process", "thread-process", "process-thread"],
)
def test_a_large_save_and_a_small_one(tmp_path: Path, ways: tuple[Options, Options]) -> None:
    """The small one would be faster."""
    warm_up(1 << 20, options=PROCESS)
    for number in range(2):
        pending = [
            Snapshot.async_take(
                tmp_path / "s", app(2 * number + n, count), overwrite=True, options=options
            )
            for n, (count, options) in enumerate(zip((16 << 20, 1), ways, strict=True))
        ]
        for one in pending:
            one.wait()
        assert committed(tmp_path / "s") == 2 * number + 1
        assert Snapshot(tmp_path / "s").verify("full").ok


class SlowCommit(Wrapper):
    """The first ``count`` commits are not answered, or only when they are let through."""

    def __init__(self, inner: Storage, count: int = 1) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self.count = count

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        if key == COMMIT_KEY and self.count:
            self.count -= 1
            await anyio.sleep_forever()
        await super().put(key, views)


def take(where: str, number: int, options: Options = THREAD) -> PendingSnapshot:
    return Snapshot.async_take(where, app(number), overwrite=True, options=options)


def test_a_commit_without_an_answer_is_reported_by_the_next_save(tmp_path: Path) -> None:
    """Whenever it takes effect: the next save may have been replaced, the one after it is safe."""
    where = faulty_url(tmp_path / "s")
    with faulty(SlowCommit):
        first = take(where, 1, msgspec.structs.replace(THREAD, timeout_s=1.0))
        second = take(where, 2)
        with pytest.raises(SnapshotAborted, match="may yet take effect") as caught:
            first.wait()
        assert caught.value.may_be_committed
        with pytest.raises(SnapshotAborted, match="an earlier save to this path") as caught:
            second.wait()
        assert caught.value.may_be_committed
        assert committed(tmp_path / "s") == 2
        take(where, 3).wait()
        assert committed(tmp_path / "s") == 3


def test_a_save_waits_no_longer_than_its_time(tmp_path: Path) -> None:
    where = faulty_url(tmp_path / "s")
    with faulty(SlowCommit):
        first = take(where, 1, msgspec.structs.replace(THREAD, timeout_s=4.0))
        begun = time.monotonic()
        second = take(where, 2, msgspec.structs.replace(THREAD, timeout_s=1.0))
        with pytest.raises(
            SnapshotAborted, match="timeout_s=1 has passed.*an earlier save"
        ) as caught:
            second.wait()
        assert not caught.value.may_be_committed
        assert time.monotonic() - begun < 3.5
        with pytest.raises(SnapshotAborted):
            first.wait()


@pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])
def test_a_save_that_fails_lets_the_next_one_commit(tmp_path: Path, options: Options) -> None:
    """Also one that fails before its turn has come: the one before it still counts."""
    large = Snapshot.async_take(tmp_path / "s", app(1, 40 << 20), overwrite=True, options=options)
    cancelled = take(str(tmp_path / "s"), 2, options)
    cancelled.cancel()
    last = take(str(tmp_path / "s"), 3, options)
    with pytest.raises(SnapshotAborted):
        cancelled.wait()
    last.wait()
    large.wait()
    assert committed(tmp_path / "s") == 3


def test_a_blocking_take_behind_a_pending_one(tmp_path: Path) -> None:
    pending = Snapshot.async_take(tmp_path / "s", app(1, 40 << 20), overwrite=True, options=THREAD)
    Snapshot.take(tmp_path / "s", app(2), overwrite=True, options=THREAD)
    pending.wait()
    assert committed(tmp_path / "s") == 2


def test_other_paths_do_not_wait(tmp_path: Path) -> None:
    where = faulty_url(tmp_path / "s")
    with faulty(SlowCommit):
        first = take(where, 1, msgspec.structs.replace(THREAD, timeout_s=2.5))
        take(str(tmp_path / "other"), 2).wait()
        assert not first.done()
        with pytest.raises(SnapshotAborted):
            first.wait()
