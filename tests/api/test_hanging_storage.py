# SPDX-License-Identifier: Apache-2.0
"""A file system that hangs: the save ends by its deadline, and nothing else waits for it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from actorsnap import Options, SnapshotAborted, StateDict, sync
from actorsnap.actors import abandonable
from actorsnap.runtime.host import Host
from actorsnap.storage.base import ObjectWriter, Storage
from actorsnap.storage.wrapper import Wrapper, WriterWrapper
from tests.api.faults import faulty, faulty_url
from tests.api.test_process import run_script

pytestmark = [pytest.mark.blocking, pytest.mark.usefixtures("forker")]

MIB = 1 << 20
SHORT = Options(fsync=False, timeout_s=1.0)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abandonable, "_GRACE_S", 0.5)


class HangingStorage(Wrapper):
    """Blocking writes return once the event is set; the capability is kept."""

    def __init__(self, inner: Storage, recovered: threading.Event, verb: str) -> None:
        super().__init__(inner)
        self.recovered = recovered
        self.verb = verb
        self.num_written = 0
        self.hangs = threading.Event()
        assert self.capabilities.has_blocking_io

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return HangingWriter(self, inner)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        if self.verb == "put_if_absent":
            await Host.get().run_blocking(self.recovered.wait)
        await self.inner.put_if_absent(key, data)


class HangingWriter(WriterWrapper):
    storage: HangingStorage

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        storage = self.storage
        if storage.verb == "write_at":
            before = [bytes(view) for view in views]
            storage.hangs.set()
            storage.recovered.wait()
            assert [bytes(view) for view in views] == before, "the memory was reused meanwhile"
        super().write_at_blocking(offset, views)
        storage.num_written += 1


@contextmanager
def hanging(verb: str = "write_at") -> Iterator[list[HangingStorage]]:
    """``faulty://`` hangs in ``verb``; it recovers at the end."""
    recovered, storages = threading.Event(), []

    def wrap(inner: Storage) -> Storage:
        storages.append(HangingStorage(inner, recovered, verb))
        return storages[-1]

    with faulty(wrap):
        try:
            yield storages
        finally:
            recovered.set()
    deadline = time.monotonic() + 60
    while Host.get()._calls:
        assert time.monotonic() < deadline, "what hung has not ended"
        time.sleep(0.01)
    assert Host.get().resources.budget.leased_bytes == 0


def big() -> dict[str, StateDict]:
    return {"s": StateDict(x=torch.arange(5 * MIB))}  # 40 MiB, three chunks


def test_the_outcome_comes_by_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hanging(), caplog.at_level(logging.WARNING, "actorsnap"):
        pending = sync.Snapshot.async_take(faulty_url(tmp_path / "s"), big(), options=SHORT)
        began = time.monotonic()
        with pytest.raises(SnapshotAborted, match="timeout_s=1 "):
            pending.wait()
        assert time.monotonic() - began < 60  # it was: never
        said = [r.getMessage() for r in caplog.records if "the storage hangs" in r.getMessage()]
        assert len(said) == 1
        assert str(tmp_path) in said[0]
        assert "calls have not returned" in said[0]
        # What a stuck thread reads is lent until it returns; what only waited is not.
        leased = Host.get().resources.budget.leased_bytes
        assert 0 < leased <= 48 * MIB
    # It has cleaned up behind itself: nothing is left, not even the folder.
    assert os.listdir(tmp_path) == []


def test_what_waited_for_a_stuck_write_is_given_back(tmp_path: Path) -> None:
    options = Options(fsync=False, timeout_s=0.5, num_uploaders=1)
    with hanging():
        pending = sync.Snapshot.async_take(faulty_url(tmp_path / "s"), big(), options=options)
        with pytest.raises(SnapshotAborted):
            pending.wait()
        assert Host.get().resources.budget.leased_bytes <= 16 * MIB  # of 40


def test_a_commit_that_hangs(tmp_path: Path) -> None:
    with (
        hanging("put_if_absent"),
        pytest.raises(SnapshotAborted, match="may yet take effect"),
    ):
        sync.Snapshot.take(faulty_url(tmp_path / "s"), {"s": StateDict(x=1)}, options=SHORT)


def test_other_snapshots_go_on(tmp_path: Path) -> None:
    healthy = sync.Snapshot.take(tmp_path / "healthy", {"s": StateDict(x=torch.ones(9))})
    options = Options(fsync=False, timeout_s=60)
    with hanging():
        stuck = [
            sync.Snapshot.async_take(faulty_url(tmp_path / str(n)), big(), options=options)
            for n in range(2)
        ]
        state = StateDict(x=torch.zeros(9))
        began = time.monotonic()
        healthy.restore({"s": state})
        sync.Snapshot.take(tmp_path / "another", {"s": state})
        assert time.monotonic() - began < 20  # it was: when the others end
        assert torch.equal(state["x"], torch.ones(9))
        assert not any(pending.done() for pending in stuck)
    for pending in stuck:
        pending.wait()


def test_no_block_is_written_after_the_stop(tmp_path: Path) -> None:
    options = Options(fsync=False, num_uploaders=1)
    with hanging() as storages:
        pending = sync.Snapshot.async_take(faulty_url(tmp_path / "s"), big(), options=options)
        assert storages[0].hangs.wait(60)
        pending.cancel()
        with pytest.raises(SnapshotAborted):
            pending.wait()
    assert storages[0].num_written <= 1  # the one that hung, of 40


def test_the_process_exits(tmp_path: Path) -> None:
    done = run_script(
        """
        import threading
        from actorsnap.actors import abandonable
        from tests.api.test_hanging_storage import HangingStorage, big
        abandonable._GRACE_S = 0.5
        _scheme.wrap = lambda inner: HangingStorage(inner, threading.Event(), "write_at")
        short = Options(fsync=False, timeout_s=3.0)  # but time enough for staging
        actorsnap.sync.Snapshot.async_take(faulty_url(sys.argv[1] + "/s"), big(), options=short)
        print("last line")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "last line\n"
    assert "the storage hangs" in done.stderr
    assert "what they were doing is lost" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Task was destroyed" not in done.stderr
