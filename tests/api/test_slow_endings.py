# SPDX-License-Identifier: Apache-2.0
"""Storages that are asked again and again, or that hang when they are closed."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio
import pytest

from actorsnap import (
    ActorSnapError,
    NotASnapshot,
    Options,
    Snapshot,
    SnapshotAborted,
    StorageError,
    Throttled,
)
from actorsnap.actors import abandonable
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.network import RetryPolicy, RetryStorage
from actorsnap.storage.registry import open_storage, register
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.api.places import assert_whole, number_of, state
from tests.support.cases import mostly_slow, slow

T = TypeVar("T")
P = ParamSpec("P")

BUSY = Throttled(op="get", key="k", backend="busy", detail="come back in the evening")
POLICY = RetryPolicy(max_attempts=1000, first_delay_s=0.1, max_delay_s=0.1, max_total_s=3600.0)
SHORT = Options(fsync=False, timeout_s=1.0)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a storage that does not answer gets for cleaning up."""
    monkeypatch.setattr(abandonable, "_GRACE_S", 0.5)


def _open_busy(url: str, context: StorageContext) -> Storage:
    """``busy://<verb>/path``: the verb never succeeds, and is tried again for an hour."""
    verb, _, path = url.removeprefix("busy://").partition("/")
    inner = open_storage(f"/{path}", context)
    busy = FaultyStorage(inner, fail_at=1, fail_verbs=[verb], error=BUSY, is_lasting=True)
    return RetryStorage(busy, policy=POLICY, on_retry=context.on_retry)


register("busy", _open_busy)


async def _take(url: str) -> None:
    await Snapshot.take(url, state(2), overwrite=True, options=SHORT)


async def _restore(url: str) -> None:
    await Snapshot(url, options=SHORT).restore(state(-1))


async def _verify(url: str) -> None:
    await Snapshot(url, options=SHORT).verify("full")


async def _copy_from(url: str) -> None:
    await Snapshot(url, options=SHORT).copy_to(f"{url.partition('/')[2]}-copy")


async def _copy_to(url: str) -> None:
    await Snapshot(f"/{url.removeprefix('busy://').partition('/')[2]}", options=SHORT).copy_to(
        f"{url}-copy"
    )


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        (_take, "get"),  # the look for an older snapshot
        slow(_take, "writer"),
        slow(_take, "list"),  # the commit
        (_restore, "read_into"),
        slow(_verify, "list"),
        (_copy_to, "put"),
    ],
)
async def test_a_timeout_quotes_the_last_error_of_the_storage(
    tmp_path: Path, call: Callable[[str], object], verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    await Snapshot.take(tmp_path / "s", state(1))
    with (
        caplog.at_level(logging.WARNING, "actorsnap"),
        pytest.raises(
            ActorSnapError, match="timeout_s=1 has passed.*come back in the evening"
        ) as e,
    ):
        await call(f"busy://{verb}{tmp_path}/s")  # type: ignore[misc]
    assert isinstance(e.value, SnapshotAborted if call is _take else StorageError)
    assert "trying again" in caplog.text
    await assert_whole(tmp_path / "s", 1)


class NeverClosed(Wrapper):
    async def aclose(self) -> None:
        await anyio.sleep_forever()


async def _take_first(url: str) -> None:
    await Snapshot.take(url, state(1), overwrite=True, options=SHORT)


async def _recover(url: str) -> None:
    Path(url.removeprefix("faulty://"), "actorsnap.json").unlink()
    await Snapshot(url, options=SHORT).recover(force=True)


@pytest.mark.parametrize("call", [_take_first, _restore, slow(_verify), _copy_from, slow(_recover)])
async def test_a_storage_that_is_never_closed_keeps_nobody_waiting(
    tmp_path: Path, call: Callable[[str], object], caplog: pytest.LogCaptureFixture
) -> None:
    await Snapshot.take(tmp_path / "s", state(1))
    began = time.monotonic()
    with faulty(NeverClosed), caplog.at_level(logging.WARNING, "actorsnap"):
        await call(faulty_url(tmp_path / "s"))  # type: ignore[misc]
    assert time.monotonic() - began < 25  # it was 30 s, or 60 s where two were opened
    assert "the storage was not closed" in caplog.text
    await assert_whole(tmp_path / "s", 1)


async def test_a_storage_that_is_never_closed_leaves_time_to_read(tmp_path: Path) -> None:
    """A restore opens the storage twice. The first close took all the time of the call."""
    await Snapshot.take(tmp_path / "s", state(1))
    began = time.monotonic()
    with faulty(NeverClosed):
        snapshot = Snapshot(faulty_url(tmp_path / "s"), options=Options(timeout_s=3.0))
        await snapshot.restore(restored := state(-1))
    assert time.monotonic() - began < 5.0
    assert number_of(restored) == 1


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda s: s.restore(state(-1)), id="restore"),
        slow(lambda s: s.read_object("model/weight"), id="read_object"),
        slow(lambda s: s.get_state_dict_for_key("model"), id="get_state_dict_for_key"),
    ],
)
async def test_index_and_data_are_read_within_one_timeout(
    tmp_path: Path, call: Callable[[Snapshot], Awaitable[object]]
) -> None:
    """The commit object and the manifest take 1.6 s, the data as long: each is below 2 s."""
    await Snapshot.take(tmp_path / "s", state(1))

    def slow(inner: Storage) -> Storage:
        return FaultyStorage(inner, latency_s={"get": 0.8, "read_into": 1.6}, has_blocking_io=False)

    with faulty(slow):
        snapshot = Snapshot(faulty_url(tmp_path / "s"), options=Options(timeout_s=2.0))
        with pytest.raises(StorageError, match="timeout_s=2 has passed"):
            await call(snapshot)
        await snapshot.get_manifest()  # another call has its own time


class Dying(Wrapper):
    """Answers no request from the ``at``-th on."""

    def __init__(self, inner: Storage, at: int) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._left = at - 1

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._left -= 1
        if self._left < 0:
            await anyio.sleep_forever()
        return await call(*args, **kwargs)


@pytest.mark.parametrize("at", mostly_slow(range(1, 12), 4, 7, 10))
async def test_a_storage_that_dies_keeps_no_save_waiting(tmp_path: Path, at: int) -> None:
    """Neither for cleaning up nor for the look whether the commit is there."""
    began = time.monotonic()
    aborted: SnapshotAborted | None = None
    with faulty(lambda inner: Dying(inner, at)):
        try:
            await Snapshot.take(faulty_url(tmp_path / "s"), state(2), options=SHORT)
        except SnapshotAborted as error:
            aborted = error
    assert time.monotonic() - began < SHORT.timeout_s + 5
    if aborted is None:
        await assert_whole(tmp_path / "s", 2)
    else:
        assert aborted.may_be_committed or not (tmp_path / "s" / COMMIT_KEY).exists()


async def test_a_recovery_closes_no_longer_than_its_time(tmp_path: Path) -> None:
    await Snapshot.take(tmp_path / "s", state(1))
    (tmp_path / "s" / COMMIT_KEY).unlink()
    began = time.monotonic()
    with faulty(NeverClosed):
        await Snapshot(faulty_url(tmp_path / "s"), options=SHORT).recover(force=True)
    assert time.monotonic() - began < SHORT.timeout_s + 5
    await assert_whole(tmp_path / "s", 1)


class Swallowing(Wrapper):
    """The commit object is not written, and its request returns when it is cancelled."""

    async def put_if_absent(self, key: str, data: bytes) -> None:
        with contextlib.suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()


@pytest.mark.parametrize("call", ["take", slow("recover"), "copy_to"])
async def test_a_client_that_swallows_a_cancellation_has_not_committed(
    tmp_path: Path, call: str
) -> None:
    there = tmp_path / "s"
    if call != "take":
        await Snapshot.take(tmp_path / "source", state(1))
    if call == "recover":
        shutil.copytree(tmp_path / "source", there, ignore=shutil.ignore_patterns(COMMIT_KEY))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "take": lambda: Snapshot.take(faulty_url(there), state(1), options=SHORT),
        "recover": lambda: Snapshot(faulty_url(there), options=SHORT).recover(force=True),
        "copy_to": lambda: Snapshot(tmp_path / "source", options=SHORT).copy_to(faulty_url(there)),
    }
    with faulty(Swallowing), pytest.raises(ActorSnapError, match="timeout_s=1 has passed"):
        await calls[call]()
    with pytest.raises(NotASnapshot):
        await Snapshot(there).metadata
