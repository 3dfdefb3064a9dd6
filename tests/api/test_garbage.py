# SPDX-License-Identifier: Apache-2.0
"""What a save leaves behind and takes away: live attempts stay, old snapshots until it is safe."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorsnap import Options, Snapshot, SnapshotAborted, sync
from actorsnap.actors import abandonable
from actorsnap.errors import StorageError
from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import COMMIT_KEY, decode_commit
from actorsnap.runtime import maintenance
from actorsnap.runtime.host import Host, shutdown
from actorsnap.runtime.location import make_location
from actorsnap.runtime.process import host_id
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.storage import posix
from actorsnap.storage.wrapper import Wrapper
from actorsnap.testing.faults import FaultyStorage
from tests.api.damage import resign, rewrite_commit
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import assert_whole, leftovers, number_at, state

FAST = Options(fsync=False)
_DEAD_PID = (1 << 22) + 1
"""Above what Linux gives to any process."""


def take(url: object, number: int, options: Options = FAST, **how: Any) -> None:
    sync.Snapshot.take(str(url), state(number), overwrite=True, options=options, **how)


async def overwrite(url: str, number: int) -> None:
    await Snapshot.take(url, state(number), overwrite=True, options=FAST)


def test_a_live_attempts_temporary_is_not_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is about to rename its commit object into place while another one collects."""
    url, rename = tmp_path / "s", os.rename
    is_held, may_go = threading.Event(), threading.Event()

    def held(source: str, target: str) -> None:
        if target.endswith(COMMIT_KEY) and not is_held.is_set():
            is_held.set()
            assert may_go.wait(60)
        rename(source, target)

    monkeypatch.setattr(os, "rename", held)
    slow = threading.Thread(target=take, args=(url, 1))
    slow.start()
    assert is_held.wait(60)
    alias = tmp_path / "alias"  # saves to one path commit in order
    alias.symlink_to(url)
    take(alias, 2)
    may_go.set()
    slow.join()
    asyncio.run(assert_whole(url, 1))


async def test_the_last_of_many_leaves_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    for _ in range(4):
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(overwrite, url, number)
        assert await leftovers(url) == []


async def test_what_is_replaced_at_the_last_moment_is_collected(tmp_path: Path) -> None:
    """Another process' attempt, committed after this one looked: its owner may live on."""
    url = str(tmp_path / "s")
    await Snapshot.take(url, state(1), options=FAST)
    barrier = Barrier(1, verbs=frozenset({"writer"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = await Snapshot.async_take(
            faulty_url(url), state(2, num_floats=1000), overwrite=True, options=FAST
        )
        assert await asyncio.to_thread(barrier.wait_reached)
        await Snapshot.take(url, state(3), overwrite=True, options=FAST)
        as_of_another_host(Path(url))
        barrier.release()
        await pending.wait()
    assert await leftovers(url) == []


def as_of_another_host(root: Path) -> None:
    """Renames the committed attempt, so that nobody here knows whether its owner lives."""
    attempt = decode_commit((root / COMMIT_KEY).read_bytes()).attempt
    time_, host, rest = attempt.split("-", 2)
    other = f"{time_}-{'0' * 8 if host != '0' * 8 else '1' * 8}-{rest}"

    def rename(document: dict[str, Any]) -> None:
        document["attempt"] = other
        for record in document.get("objects", ()):
            record["key"] = record["key"].replace(attempt, other)

    for path in root.glob("*"):
        if path.is_dir() and path.name != attempt:
            path.rename(root.parent / path.name)  # resign expects a single one
    resign(root, rename)
    rewrite_commit(root, rename)
    (root / attempt).rename(root / other)
    for path in root.parent.glob("*-*-*-*"):
        path.rename(root / path.name)


class Log:
    """The system calls that decide what a power loss leaves, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        for name in ("rename", "unlink"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        fsync = os.fsync

        def logged(fd: int) -> None:
            self.calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", logged)

    def _wrap(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def logged(*paths: str) -> None:
            self.calls.append((name, paths[-1]))
            call(*paths)

        return logged

    def index(self, call: str, end: str) -> int:
        return next(n for n, (c, p) in enumerate(self.calls) if c == call and p.endswith(end))


def test_a_durable_snapshot_is_replaced_durably(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "s"
    take(url, 1, Options())
    log = Log(monkeypatch)
    take(url, 2)
    commit = log.index("rename", COMMIT_KEY)
    before = [path for call, path in log.calls[:commit] if call == "fsync"]
    assert sum(path.endswith(".safetensors") for path in before) == 2
    assert any(path.endswith(".json") or "0.json" in path for path in before)
    after = log.calls[commit + 1 :]
    assert after.index(("fsync", str(url))) < min(
        n for n, (call, path) in enumerate(after) if call == "unlink" and "/data/" in path
    )
    assert not decode_commit((url / COMMIT_KEY).read_bytes()).fsync  # as was asked for
    log.calls.clear()
    take(url, 3)  # nobody was promised that the older one is durable
    assert "fsync" not in [call for call, _ in log.calls]


def test_deleting_is_durable_before_data_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "s"
    take(url, 1)
    log = Log(monkeypatch)
    sync.Snapshot(url).delete()
    assert (
        log.index("unlink", COMMIT_KEY)
        < log.calls.index(("fsync", str(url)))
        < log.index("unlink", ".safetensors")
    )


def test_an_outcome_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's fsync fails after the commit object was linked."""
    url = tmp_path / "s"
    fsync_folder = posix.fsync_folder

    def failing(folder: str) -> None:
        if folder == str(url) and (url / COMMIT_KEY).exists():
            raise OSError(5, "Input/output error")
        fsync_folder(folder)

    monkeypatch.setattr(posix, "fsync_folder", failing)
    with pytest.raises(SnapshotAborted, match="check the path before") as caught:
        sync.Snapshot.take(url, state(1))
    assert caught.value.may_be_committed
    assert asyncio.run(number_at(url)) == 1
    with pytest.raises(SnapshotAborted) as plain:
        sync.Snapshot.take(tmp_path / "t", state(1), options=Options(timeout_s=1e-9))
    assert not plain.value.may_be_committed


async def test_a_cancellation_after_the_commit_does_not_stop_the_collection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "s")
    await Snapshot.take(url, state(1), options=FAST)
    barrier = Barrier(1, verbs=frozenset({"list_folders"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)), caplog.at_level(logging.WARNING):
        task = asyncio.create_task(
            Snapshot.take(faulty_url(url), state(2), overwrite=True, options=FAST)
        )
        assert await asyncio.to_thread(barrier.wait_reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        barrier.release()
        await asyncio.to_thread(shutdown)  # waits for what goes on behind
    assert await leftovers(url) == []
    await assert_whole(url, 2)
    assert "too long" not in caplog.text


async def test_a_stalled_collection_does_not_hold_up_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "s")
    monkeypatch.setattr(abandonable, "_CLEANUP_S", 3.0)
    with faulty(lambda inner: FaultyStorage(inner, latency_s={"list_folders": math.inf})):
        await Snapshot.take(faulty_url(url), state(1), options=Options(fsync=False, timeout_s=0.5))
        assert Host.get()._calls, "the caller has waited for it"
        pending = await Snapshot.async_take(
            faulty_url(url), state(2), overwrite=True, options=Options(fsync=False, timeout_s=0.5)
        )
        await pending.wait()
        pending.cancel()
        await asyncio.to_thread(shutdown)
        pending.cancel()  # of a finished save, without a runtime: without effect
    assert await number_at(url) == 2


class _Reaper(Wrapper):
    """Deletes everything, as ``rm --garbage --force`` does, at one moment of a save."""

    def __init__(self, inner: Any, when: str) -> None:
        super().__init__(inner)
        self._when = when

    async def _reap(self, verb: str, key: str) -> None:
        if self._when == verb or self._when in key:
            self._when = "over"
            keys = [info.key async for info in self.inner.list("")]
            await self.inner.delete([key for key in keys if key != COMMIT_KEY])

    async def put(self, key: str, views: Any) -> None:
        await self._reap("put", key)
        await self.inner.put(key, views)

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> Any:
        writer = await self.inner.writer(key, size, older=older)
        if "=small" in key:
            await self._reap("writer", key)
        return writer

    async def list(self, prefix: str) -> AsyncIterator[Any]:
        if prefix.endswith("/manifest/"):  # the look at the rank manifests before the commit
            await self._reap("list", prefix)
        async for info in self.inner.list(prefix):
            yield info


@pytest.mark.parametrize("when", ["writer", "list"])
def test_objects_that_vanish_before_the_commit(tmp_path: Path, when: str) -> None:
    url = tmp_path / "s"
    take(url, 1)
    before = decode_commit((url / COMMIT_KEY).read_bytes())
    with (
        faulty(lambda inner: _Reaper(inner, when)),
        pytest.raises(SnapshotAborted, match="deleted|no such object") as caught,
    ):
        take(faulty_url(url), 2)
    assert not caught.value.may_be_committed
    assert isinstance(caught.value.__cause__, StorageError)
    assert decode_commit((url / COMMIT_KEY).read_bytes()) == before


def collected(url: object, **how: Any) -> maintenance.Collected:
    source = Source(make_location(str(url), None), FAST)
    return run_sync(maintenance.collect(source, **{"force": False, **how}), name="collect")


def dead_attempt() -> str:
    return str(Attempt(created_s=int(time.time()), host=host_id(), pid=_DEAD_PID, nonce="deadbeef"))


def empty_attempt(root: Path) -> Path:
    """As a kill between mkdir and the first file leaves it, or between unlink and rmdir."""
    attempt = root / dead_attempt()
    (attempt / "data" / "k").mkdir(parents=True)
    return attempt


def test_empty_folders_of_attempts_are_garbage(tmp_path: Path) -> None:
    url = tmp_path / "s"
    take(url, 1)
    attempt = empty_attempt(url)
    take(url, 2)
    assert not attempt.exists()
    empty_attempt(url)
    assert collected(url).deleted == []
    assert not attempt.exists()
    empty_attempt(url)
    sync.Snapshot(str(url)).delete()
    assert not url.exists()


def test_collecting_looks_into_attempts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, scandir, seen = tmp_path / "s", os.scandir, set()
    take(url, 1)
    take(url / "nested", 1)
    nested = empty_attempt(url / "nested")
    (url / "others" / "deep").mkdir(parents=True)
    (url / dead_attempt()).symlink_to(url / "others")

    def logged(path: str) -> Any:
        seen.add(str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", logged)
    take(url, 2)
    assert str(url) in seen
    assert not [path for path in seen if "nested" in path or "others" in path]
    assert nested.exists()
    assert (url / "others" / "deep").exists()
