# SPDX-License-Identifier: Apache-2.0
"""This process' part in the calls of a group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorsnap import SnapshotAborted, StateDict
from actorsnap.options import Options
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import Aborted, CallKind, Label
from actorsnap.runtime.host import Host
from actorsnap.runtime.team import Team
from actorsnap.state.process_group import find_group
from actorsnap.sync import Snapshot
from tests.support.store_server import serve_store

ENDED = Label(CallKind.TAKE, "/ckpt/step-1", 1)
OWN = Label(CallKind.TAKE, "/ckpt/step-2", 2)


@pytest.fixture
def teams() -> Iterator[list[Team]]:
    """Ranks 0 and 1 of a group, both in this process."""
    store = serve_store(timeout=timedelta(seconds=30))
    found = []
    for rank in (0, 1):
        group = find_group(store=store, environ={"RANK": str(rank), "WORLD_SIZE": "2"})
        assert group is not None
        found.append(Team(group))
    yield found
    for team in found:
        team.port.close()


@pytest.mark.parametrize("label", [OWN, None], ids=["another call", "bad input"])
def test_a_rank_whose_number_has_ended_with_another_call(
    teams: list[Team], label: Label | None
) -> None:
    """It makes its own call with the next number; with bad input, it has no call to make."""
    failure = Failure(reason="enough", stage=Stage.CANCEL, rank=0)

    async def end(rank_0: Team) -> None:
        with rank_0.port.begin(tag=ENDED.digest) as save:
            assert save.coordinator is not None
            await save.coordinator.receive()  # its own beginning
            await save.coordinator.send(1, Aborted(failure, ENDED.digest))
            await anyio.sleep_forever()

    host = Host.get()
    ending = host.submit(end(teams[0]))
    call = teams[1].begin(label, Options(timeout_s=30))
    receiving = host.submit(call.participant.receive())
    if label is None:
        assert receiving.future.result(20) == Aborted(failure, ENDED.digest)
        assert teams[1].port.next_number == 1
    else:
        with pytest.raises(TimeoutError):
            receiving.future.result(2)
        assert teams[1].port.next_number == 2
    receiving.cancel()
    ending.cancel()
    call.close()


class _MuteStore:
    """A job's store that does not answer until ``go``."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.go = threading.Event()

    def clone(self) -> Any:
        self.go.wait()
        return self._store.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_does_not_answer_is_no_absent_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    store = _MuteStore(serve_store())
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = Options(timeout_s=0.5)
    try:
        with pytest.raises(SnapshotAborted, match=MUTE) as caught:
            Snapshot.take(tmp_path / "s", {"own": StateDict(x=1)}, store=store, options=options)
    finally:
        store.go.set()
    assert caught.value.rank is None


MUTE = r"timeout_s=0.5 has passed; still waiting for the job's store, which does not answer, to "


class _SlowPath:
    """The call begins long before its roll call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        time.sleep(0.3)
        return os.fspath(self._path)


def test_the_deadline_names_absent_ranks_after_a_slow_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = serve_store()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SnapshotAborted, match=r"waiting for rank 1 to call take\('.*/s'\): every"):
        Snapshot.take(
            _SlowPath(tmp_path / "s"),
            {"own": StateDict(x=1)},
            store=store,
            options=Options(timeout_s=2.0),
        )
