"""Storages that are asked again and again, or that hang when they are closed."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from actorsnap import ActorSnapError, Options, Snapshot, SnapshotAborted, StorageError, Throttled
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage, register
from actorsnap.storage.wrappers import RetryPolicy, RetryStorage, Wrapper
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.api.places import assert_whole, number_of, state

BUSY = Throttled(op="get", key="k", backend="busy", detail="come back in the evening")
POLICY = RetryPolicy(max_attempts=1000, first_delay_s=0.1, max_delay_s=0.1, max_total_s=3600.0)
SHORT = Options(fsync=False, timeout_s=2.0)


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
        (_take, "writer"),
        (_take, "stat"),  # the commit
        (_restore, "read_into"),
        (_verify, "stat"),
        (_copy_to, "put"),
    ],
)
async def test_a_timeout_quotes_the_last_error_of_the_storage(
    tmp_path: Path, call: Callable[[str], object], verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    await Snapshot.take(tmp_path / "s", state(1))
    with (
        caplog.at_level(logging.WARNING, "actorsnap"),
        pytest.raises(ActorSnapError, match="timeout_s=2 is over.*come back in the evening") as e,
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


@pytest.mark.parametrize("call", [_take_first, _restore, _verify, _copy_from, _recover])
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
        snapshot = Snapshot(faulty_url(tmp_path / "s"), options=Options(timeout_s=6.0))
        await snapshot.restore(restored := state(-1))
    assert time.monotonic() - began < 8.0
    assert number_of(restored) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.restore(state(-1)),
        lambda s: s.read_object("model/weight"),
        lambda s: s.get_state_dict_for_key("model"),
    ],
    ids=["restore", "read_object", "get_state_dict_for_key"],
)
async def test_index_and_data_are_read_within_one_timeout(
    tmp_path: Path, call: Callable[[Snapshot], Awaitable[object]]
) -> None:
    """The commit object and the manifest take 1.6 s, the data as long: each is below 2 s."""
    await Snapshot.take(tmp_path / "s", state(1))

    def slow(inner: Storage) -> Storage:
        return FaultyStorage(inner, latency_s={"get": 0.8, "read_into": 1.6}, has_blocking_io=False)

    with faulty(slow):
        snapshot = Snapshot(faulty_url(tmp_path / "s"), options=SHORT)
        with pytest.raises(StorageError, match="timeout_s=2 is over"):
            await call(snapshot)
        await snapshot.get_manifest()  # another call has its own time
