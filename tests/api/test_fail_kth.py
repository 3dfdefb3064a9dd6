# SPDX-License-Identifier: Apache-2.0
"""The k-th storage operation fails, for every k: a clear error, nothing half-committed.

Each sweep runs until a run has met no failure, so it covers operations that are added later.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from actorsnap import (
    ActorSnapError,
    ObjectExists,
    Options,
    Snapshot,
    SnapshotAborted,
    StorageError,
)
from actorsnap.storage.base import Storage
from actorsnap.storage.memory import forget_space
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.api.places import assert_idle, assert_whole, leftovers, number_at, number_of, state
from tests.conftest import LeakCheck

_numbers = itertools.count()


class Place:
    """Fresh URLs in one kind of storage, and the faults on the way to it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self.faults: list[FaultyStorage] = []

    def url(self) -> str:
        number = next(_numbers)
        if self.kind == "memory":
            return f"memory://fail-kth-{number}"
        return str(self._folder / str(number))

    @contextmanager
    def failing(self, **faults: Any) -> Iterator[None]:
        self.faults.clear()

        def wrap(inner: Storage) -> Storage:
            storage = FaultyStorage(inner, **faults)
            self.faults.append(storage)
            return storage

        with faulty(wrap):
            yield

    @property
    def was_hit(self) -> bool:
        return self._fault().was_hit

    def is_exhausted(self, k: int) -> bool:
        """Whether the scenario had no k-th operation. (One that raises by itself, such as a
        ``get`` of nothing, cannot fail *after* its effect, so ``was_hit`` does not tell.)"""
        return self._fault().num_operations < k

    def _fault(self) -> FaultyStorage:
        assert len(self.faults) == 1, "the scenario opened another place, or none"
        return self.faults[0]


@pytest.fixture(params=["fs", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    first = next(_numbers)
    yield Place(request.param, tmp_path)
    for number in range(first, next(_numbers)):
        forget_space(f"fail-kth-{number}")


@pytest_asyncio.fixture
async def no_leaks_behind(tmp_path: Path) -> AsyncIterator[None]:
    """Like ``no_leaks``, once what lives as long as the process is there."""
    await Snapshot.take(tmp_path / "warm", state(0))
    await number_at(tmp_path / "warm")
    check = LeakCheck()
    yield
    check.assert_none()


each_moment = pytest.mark.parametrize("fail_when", ["before", "after"])


# What an operation does to be durable is no operation of its own here; it would only take time.
FAST = Options(fsync=False)


async def take(url: str, number: int, *, overwrite: bool = False) -> None:
    await Snapshot.take(url, state(number), overwrite=overwrite, options=FAST)


async def async_take(url: str, number: int, *, overwrite: bool = False) -> None:
    pending = await Snapshot.async_take(url, state(number), overwrite=overwrite, options=FAST)
    await pending.wait()


each_take = pytest.mark.parametrize("save", [take, async_take], ids=["take", "async_take"])


def assert_clear(error: ActorSnapError) -> None:
    """The error of a save says where it failed, and why."""
    assert isinstance(error, SnapshotAborted)
    assert error.rank == 0
    assert error.stage in ("join", "store", "commit")
    assert error.key
    cause = error.__cause__
    assert isinstance(cause, StorageError)
    assert error.key == cause.key
    assert cause.op in str(error)
    assert "a scripted fault" in str(error)


@asynccontextmanager
async def failure_of(url: str) -> AsyncIterator[list[ActorSnapError]]:
    found: list[ActorSnapError] = []
    try:
        yield found
    except ActorSnapError as error:
        found.append(error)
    assert_idle()


def assert_names(error: SnapshotAborted, verb: str) -> None:
    cause = error.__cause__
    assert isinstance(cause, StorageError)
    assert cause.op == verb
    assert error.rank == 0
    assert error.key == cause.key != ""


Save = Callable[..., Awaitable[None]]


@pytest.mark.few
@each_take
@each_moment
async def test_a_first_save(
    place: Place, save: Save, fail_when: str, no_leaks_behind: None
) -> None:
    for k in itertools.count(1):
        url = place.url()
        with place.failing(fail_at=k, fail_when=fail_when):
            async with failure_of(url) as failures:
                await save(faulty_url(url), 1)
        if failures:
            assert place.was_hit
            assert_clear(failures[0])
            # A commit whose answer was lost may be there, whole.
            may_be_there = fail_when == "after" and failures[0].fields["stage"] == "commit"
            await assert_whole(url, await number_at(url) if may_be_there else None)
            await save(url, 2, overwrite=may_be_there)
            await assert_whole(url, 2)
        else:
            await assert_whole(url, 1)
            if place.is_exhausted(k):
                break
    assert k > 8


@pytest.mark.few(1)
@each_take
@each_moment
async def test_a_save_that_replaces_another(
    place: Place, save: Save, fail_when: str, no_leaks_behind: None
) -> None:
    for k in itertools.count(1):
        url = place.url()
        await take(url, 1)
        with place.failing(fail_at=k, fail_when=fail_when):
            async with failure_of(url) as failures:
                await save(faulty_url(url), 2, overwrite=True)
        if failures:
            assert place.was_hit
            assert_clear(failures[0])
            may_be_there = fail_when == "after" and failures[0].fields["stage"] == "commit"
            number = await number_at(url)
            assert number == 1 or (number == 2 and may_be_there)
            await assert_whole(url, number, is_clean=not may_be_there)
        else:
            # The cleaning-up may have failed: the older objects are garbage then.
            await assert_whole(url, 2, is_clean=not place.was_hit)
            if place.is_exhausted(k):
                break
        await save(url, 3, overwrite=True)
        await assert_whole(url, 3)
    assert k > 10


@pytest.mark.few(1)
@each_take
async def test_a_storage_that_is_gone_for_good(
    place: Place, save: Save, no_leaks_behind: None
) -> None:
    for k in itertools.count(1):
        url = place.url()
        await take(url, 1)
        with place.failing(fail_at=k, is_lasting=True):
            async with failure_of(url) as failures:
                await save(faulty_url(url), 2, overwrite=True)
        if failures:
            assert_clear(failures[0])
        # It cannot clean up; that is the next one's.
        number = await number_at(url)
        assert number == (1 if failures else 2)
        if not place.was_hit:
            break
        await save(url, 3, overwrite=True)
        await assert_whole(url, 3)


@each_take
async def test_a_second_save_without_overwrite(place: Place, save: Save) -> None:
    for k in itertools.count(1):
        url = place.url()
        await take(url, 1)
        with place.failing(fail_at=k):
            async with failure_of(url) as failures:
                await save(faulty_url(url), 2)
        await assert_whole(url, 1)
        assert len(failures) == 1
        if not place.was_hit:
            assert isinstance(failures[0], ObjectExists)
            break
        assert_clear(failures[0])


@each_moment
async def test_a_restore(place: Place, fail_when: str, no_leaks_behind: None) -> None:
    url = place.url()
    await take(url, 1)
    for k in itertools.count(1):
        target = state(-1)
        with place.failing(fail_at=k, fail_when=fail_when):
            async with failure_of(url) as failures:
                await Snapshot(faulty_url(url)).restore(target)
        if not failures:
            assert number_of(target) == 1
            assert place.is_exhausted(k)
            break
        assert type(failures[0]) is StorageError
        assert "a scripted fault" in str(failures[0])
        await Snapshot(url).restore(target)
        assert number_of(target) == 1
    await assert_whole(url, 1)
    assert k > 3


async def test_reading_one_object(place: Place, no_leaks_behind: None) -> None:
    url = place.url()
    await take(url, 1)
    for k in itertools.count(1):
        with place.failing(fail_at=k):
            async with failure_of(url) as failures:
                value = await Snapshot(faulty_url(url)).read_object("0/model/bias")
        if not failures:
            assert value.tolist() == [[1] * 3] * 5
            assert not place.was_hit
            break
        assert type(failures[0]) is StorageError
    assert k > 3


@pytest.mark.parametrize("level", ["quick", "full"])
async def test_a_verification(place: Place, level: str, no_leaks_behind: None) -> None:
    url = place.url()
    await take(url, 1)
    for k in itertools.count(1):
        found: list[object] = []
        with place.failing(fail_at=k):
            async with failure_of(url) as failures:
                found.extend((await Snapshot(faulty_url(url)).verify(level)).problems)
        if not failures and not found:
            assert not place.was_hit
            break
        # The snapshot may be whole: a storage that fails is no damage.
        assert not found
        assert type(failures[0]) is StorageError
    assert k > 3


@pytest.mark.few(1)
@each_moment
async def test_a_deletion(place: Place, fail_when: str, no_leaks_behind: None) -> None:
    for k in itertools.count(1):
        url = place.url()
        await take(url, 1)
        with place.failing(fail_at=k, fail_when=fail_when):
            async with failure_of(url) as failures:
                await Snapshot(faulty_url(url)).delete()
        if not failures:
            assert await leftovers(url) == []
            assert await number_at(url) is None
            if place.is_exhausted(k):
                break
            continue
        assert type(failures[0]) is StorageError
        # The snapshot is whole or no snapshot; never a ruin.
        number = await number_at(url)
        assert number in (1, None)
        await take(url, 2, overwrite=number is not None)
        await assert_whole(url, 2)
    assert k > 3


async def test_a_raw_exception_of_a_backend_does_not_ruin_a_commit(place: Place) -> None:
    """A backend that breaks the contract, at the worst moment: the commit has taken effect."""
    url = place.url()
    with (
        place.failing(
            fail_at=1, fail_verbs=["put_if_absent"], fail_when="after", error=RuntimeError("raw")
        ),
        pytest.raises(SnapshotAborted, match="raw") as caught,
    ):
        await take(faulty_url(url), 1)
    assert caught.value.stage == "commit"
    assert place.was_hit
    await assert_whole(url, 1)


@pytest.mark.parametrize("error", [SystemExit("leave"), KeyboardInterrupt("leave")])
async def test_a_backend_that_wants_to_leave(place: Place, error: BaseException) -> None:
    """Such errors end an event loop, and here all snapshots of the process with it."""
    url = place.url()
    for verb in ("writer", "put_if_absent"):
        with (
            place.failing(fail_at=1, fail_verbs=[verb], error=cast("Any", error)),
            pytest.raises(SnapshotAborted, match=f"{type(error).__name__}: leave") as caught,
        ):
            await take(faulty_url(url), 1)
        assert_names(caught.value, verb)
    await take(url, 2)
    await assert_whole(url, 2)


async def test_causes_in_a_circle(place: Place) -> None:
    """As behind ``raise error from error`` where a client tries again."""
    circle, other = RuntimeError("a circle"), RuntimeError("its cause")
    circle.__cause__, other.__cause__ = other, circle
    with (
        place.failing(fail_at=1, fail_verbs=["put_if_absent"], error=circle),
        pytest.raises(SnapshotAborted, match="a circle") as caught,
    ):
        await take(faulty_url(place.url()), 1)
    assert caught.value.stage == "commit"


async def test_a_commit_that_a_backend_repeated_by_itself_is_a_success(place: Place) -> None:
    """The first try's answer was lost, the backend's second try found the object."""
    url = place.url()
    exists = ObjectExists(op="put_if_absent", key="actorsnap.json", backend=url)
    with place.failing(fail_at=1, fail_verbs=["put_if_absent"], fail_when="after", error=exists):
        await take(faulty_url(url), 1)
    assert place.was_hit
    await assert_whole(url, 1)
