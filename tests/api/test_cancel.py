# SPDX-License-Identifier: Apache-2.0
"""Cancellation, Ctrl-C and the deadline, in every stage of every call.

A barrier holds the k-th storage operation, so that the cancellation comes in the middle of it,
for every k. Afterwards: a whole snapshot or none, nothing left, and the process can go on.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
import pytest_asyncio

from actorsnap import (
    NotASnapshot,
    Options,
    PendingSnapshot,
    Snapshot,
    SnapshotAborted,
    StateDict,
    sync,
)
from actorsnap.actors import commit
from actorsnap.errors import notes_of
from actorsnap.runtime import host, local_engine, location, script
from actorsnap.runtime.save import Save
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import Wrapper
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import assert_idle, assert_whole, leftovers, number_at, number_of, state
from tests.api.zygote import Zygote
from tests.conftest import LeakCheck
from tests.support.cases import slow

LIMIT_S = 120.0
FAST = Options(fsync=False)


@pytest_asyncio.fixture
async def no_leaks_behind(tmp_path: Path) -> AsyncIterator[None]:
    """Like ``no_leaks``, once what lives as long as the process is there."""
    await Snapshot.take(tmp_path / "warm", state(0))
    await number_at(tmp_path / "warm")
    await asyncio.to_thread(int)  # the loop's own threads
    check = LeakCheck()
    yield
    check.assert_none()


@contextmanager
def held(barrier: Barrier, *, has_blocking_io: bool = False) -> Iterator[None]:
    def wrap(inner: Storage) -> Storage:
        return BarrierStorage(inner, barrier, has_blocking_io=has_blocking_io)

    try:
        with faulty(wrap):
            yield
    finally:
        barrier.release()  # a failing test leaves nobody waiting


async def cancel_in_the_middle(barrier: Barrier, work: Coroutine[Any, Any, Any]) -> str:
    """Cancels ``work`` when it is at the barrier; says how it ended."""
    task = asyncio.create_task(work)
    reached = asyncio.create_task(asyncio.to_thread(barrier.wait_reached))
    with anyio.fail_after(LIMIT_S):
        await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
        if barrier.was_reached:
            task.cancel()
            if barrier.is_blocking:
                barrier.release()
        else:
            barrier.give_up()
        await asyncio.wait([task, reached])
    if task.cancelled():
        return "cancelled"
    if task.exception() is not None:
        return type(task.exception()).__name__
    return "done"


async def take(url: str, number: int, *, overwrite: bool = False) -> None:
    await Snapshot.take(url, state(number), overwrite=overwrite, options=FAST)


async def async_take(url: str, number: int, *, overwrite: bool = False) -> PendingSnapshot:
    return await Snapshot.async_take(url, state(number), overwrite=overwrite, options=FAST)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that never answers the commit is not waited for."""
    monkeypatch.setattr(commit, "_COMMIT_GRACE_S", 0.0)


@pytest.mark.few
@pytest.mark.parametrize("overwrite", [False, True], ids=["first", "replacing"])
@pytest.mark.parametrize("has_blocking_io", [False, True], ids=["stalled", "slow"])
async def test_cancelling_a_take(
    tmp_path: Path,
    overwrite: bool,
    has_blocking_io: bool,
    short_grace: None,
    no_leaks_behind: None,
) -> None:
    """``stalled``: the operation never ends, but by the cancellation. ``slow``: it runs on a
    thread, which cannot be cancelled, and ends after it."""
    before = 1 if overwrite else None
    for k in itertools.count(1):
        url = str(tmp_path / str(k))
        if overwrite:
            await take(url, 1)
        barrier = Barrier(k, threads_only=has_blocking_io)
        with held(barrier, has_blocking_io=has_blocking_io):
            ending = await cancel_in_the_middle(
                barrier, take(faulty_url(url), 2, overwrite=overwrite)
            )
        assert_idle()
        if not barrier.was_reached:
            assert ending == "done"
            break
        assert ending == "cancelled"
        number = await number_at(url)
        is_commit = barrier.key == "actorsnap.json" and barrier.verb.startswith("put")
        is_after = any(
            key == "actorsnap.json" and verb.startswith("put") for verb, key in barrier.before
        )
        if has_blocking_io:
            assert number in (before, 2)  # the commit may be faster than the cancellation
        else:
            assert number == (2 if is_after else before)
        if number == before and not is_commit:
            # (An unanswered commit may take effect later, so its objects stay; and a clean-up
            # after the commit is cut short. Both are the next save's to collect.)
            assert await leftovers(url) == []
        await take(url, 3, overwrite=number is not None)
        await assert_whole(url, 3)
    assert k > (3 if has_blocking_io else 9)


class _Silent(Wrapper):
    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        await anyio.sleep_forever()
        return b""


async def test_cancelling_a_take_while_its_storage_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked of a storage then that may not answer."""
    opening, open_place = threading.Event(), location.open_location

    async def open_late(*args: Any, **more: Any) -> Storage:
        opening.set()
        await anyio.sleep(0.1)
        return _Silent(await open_place(*args, **more))

    monkeypatch.setattr(local_engine, "open_location", open_late)
    options = Options(fsync=False, timeout_s=10.0)
    task = asyncio.create_task(Snapshot.take(tmp_path / "s", state(1), options=options))
    assert await asyncio.to_thread(opening.wait, LIMIT_S)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5.0)
    assert done
    assert task.cancelled()


async def test_the_traceback_of_a_cancelled_take_has_no_frames_of_ours(tmp_path: Path) -> None:
    """Of a task, or of ``asyncio.wait_for``, which makes one."""
    barrier = Barrier(1)
    with held(barrier):
        call = Snapshot.take(faulty_url(str(tmp_path / "s")), state(1), options=FAST)
        task = asyncio.create_task(call)
        assert await asyncio.to_thread(barrier.wait_reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError, match=r"take\(\) was cancelled") as raised:
            await task
    shown = traceback.extract_tb(raised.value.__traceback__)
    assert {frame.filename for frame in shown} == {__file__}


@pytest.mark.parametrize("call", ["take", "events"])
async def test_the_interrupt_of_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """ipykernel's handler cancels the cell without waking its loop, which sleeps in ``select``."""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    await Snapshot.take(tmp_path / "s", state(1), options=FAST)
    loop, main, barrier = asyncio.get_running_loop(), threading.main_thread(), Barrier(1)
    url = faulty_url(str(tmp_path / "s"))

    async def cell() -> None:
        if call == "take":
            await Snapshot.take(url, state(2), overwrite=True, options=FAST)
        else:
            pending = await Snapshot.async_take(url, state(2), overwrite=True, options=FAST)
            try:
                async for _ in pending.events():
                    pass
            finally:
                pending.cancel()

    def interrupt() -> None:
        assert barrier.wait_reached()
        time.sleep(0.3)  # the loop goes to sleep
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)

    with held(barrier):
        task = asyncio.create_task(cell())
        before = signal.signal(signal.SIGINT, lambda *_: loop.call_soon(task.cancel))
        other = threading.Thread(target=interrupt)
        too_late = threading.Timer(20, barrier.release)
        try:
            other.start()
            too_late.start()
            with pytest.raises(asyncio.CancelledError) as raised:
                await task
            assert too_late.is_alive()
        finally:
            too_late.cancel()
            other.join()
            signal.signal(signal.SIGINT, before)
    if call == "take":
        assert str(raised.value) == "Snapshot.take() was cancelled"
        (note,) = raised.value.__notes__
        assert "Nothing was committed" in note
        assert "older snapshots are intact. Its files are deleted; any that remain are" in note
        await assert_whole(tmp_path / "s", 1)


async def test_elsewhere_no_timer_wakes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.delattr(asyncio.BaseEventLoop, "call_later")
    with host.interruptible():
        await asyncio.sleep(0)


async def test_cancelling_an_async_take_and_its_waiting(
    tmp_path: Path, short_grace: None, no_leaks_behind: None
) -> None:
    """While it is staged the save is aborted; later only the waiting ends."""
    for k in itertools.count(1):
        url = str(tmp_path / str(k))
        barrier = Barrier(k)
        pending: list[PendingSnapshot] = []

        async def work(url: str, pending: list[PendingSnapshot]) -> None:
            pending.append(await async_take(faulty_url(url), 2))
            await pending[0].wait()

        with held(barrier):
            ending = await cancel_in_the_middle(barrier, work(url, pending))
            assert ending == ("cancelled" if barrier.was_reached else "done")
            barrier.release()
            if pending:
                with anyio.fail_after(LIMIT_S):
                    await pending[0].wait()
        assert_idle()
        await assert_whole(url, 2 if pending else None)
        if not barrier.was_reached:
            break
        await take(url, 3, overwrite=bool(pending))
        await assert_whole(url, 3)
    assert k > 9


async def test_cancelling_a_pending_snapshot_by_its_handle(
    tmp_path: Path, short_grace: None, no_leaks_behind: None
) -> None:
    num_aborted = 0
    for k in itertools.count(1):
        url = str(tmp_path / str(k))
        barrier = Barrier(k, verbs=frozenset({"write_at", "complete", "put", "put_if_absent"}))
        with held(barrier):
            pending = await async_take(faulty_url(url), 2)
            reached = asyncio.create_task(asyncio.to_thread(barrier.wait_reached))
            finished = asyncio.create_task(pending.wait())
            await asyncio.wait([reached, finished], return_when=asyncio.FIRST_COMPLETED)
            if barrier.was_reached:
                pending.cancel()
                pending.cancel()  # twice is harmless
            else:
                barrier.give_up()
            with anyio.fail_after(LIMIT_S):
                await asyncio.wait([reached, finished])
        error = finished.exception()
        if not barrier.was_reached:
            assert error is None
            pending.cancel()  # too late, and harmless
            await assert_whole(url, 2)
            break
        assert isinstance(error, SnapshotAborted)
        num_aborted += 1
        assert pending.done()
        if barrier.verb == "put_if_absent":
            assert error.stage == "commit"
            assert "cancelled by the caller" in str(error)
            await assert_whole(url, None, is_clean=False)
        else:
            assert (error.stage, error.rank) == ("cancel", 0)
            assert error.reason == "cancelled by the caller"
            await assert_whole(url, None)
        assert_idle()
        await take(url, 3)
        await assert_whole(url, 3)
    assert num_aborted >= 6


async def turns_of_the_runtime() -> None:
    """Returns when everything that was under way on the runtime's loop has been dealt with."""

    async def turns() -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turns(), host.Host.get()._loop))


async def test_a_cancellation_that_comes_during_a_commit_lets_it_succeed(tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    barrier = Barrier(1, verbs=frozenset({"put_if_absent"}))
    with held(barrier):
        pending = await async_take(faulty_url(url), 2)
        assert await asyncio.to_thread(barrier.wait_reached)
        pending.cancel()
        await turns_of_the_runtime()  # the cancellation has come to the commit
        barrier.release()
        with anyio.fail_after(LIMIT_S):
            await pending.wait()
    await assert_whole(url, 2)


INTERRUPTED = (
    "The restore was interrupted: model, optimizer may be partly overwritten. Restore again before "
    "you use them."
)


async def test_cancelling_a_restore(tmp_path: Path, no_leaks_behind: None) -> None:
    url = str(tmp_path / "s")
    await take(url, 1)
    notes: list[list[str]] = []

    async def restore(target: dict[str, StateDict]) -> None:
        try:
            await Snapshot(faulty_url(url)).restore(target)
        except asyncio.CancelledError as error:
            notes.append(notes_of(error))
            is_same = bool((target["model"]["weight"] == -1).all())
            assert is_same or notes[-1]
            raise

    for k in itertools.count(1):
        barrier = Barrier(k)
        target = state(-1)
        with held(barrier):
            ending = await cancel_in_the_middle(barrier, restore(target))
        assert_idle()
        if not barrier.was_reached:
            assert number_of(target) == 1
            break
        assert ending == "cancelled"
        await Snapshot(url).restore(target)
        assert number_of(target) == 1
    await assert_whole(url, 1)
    assert k > 3
    assert notes == sorted(notes)  # none before the first read of data
    assert {tuple(each) for each in notes} == {(), (INTERRUPTED,)}


@pytest.mark.parametrize("call", ["verify", "delete", "get_manifest"])
async def test_cancelling_the_other_calls(tmp_path: Path, call: str, no_leaks_behind: None) -> None:
    for k in itertools.count(1):
        url = str(tmp_path / str(k))
        await take(url, 1)
        barrier = Barrier(k)
        with held(barrier):
            ending = await cancel_in_the_middle(barrier, getattr(Snapshot(faulty_url(url)), call)())
        if not barrier.was_reached:
            assert ending == "done"
            break
        assert ending == "cancelled"
        number = await number_at(url)
        assert number == 1 or call == "delete"
        await take(url, 3, overwrite=number is not None)
        await assert_whole(url, 3)
    assert k > 2


async def test_a_cancellation_just_after_the_staging_does_not_block_the_loop(
    tmp_path: Path, short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has succeeded: what is left is to abort the save, and to wait for that."""
    url = str(tmp_path / "s")
    await take(str(tmp_path / "first"), 0)  # the runtime is there, and knows the storage
    barrier = Barrier(1, verbs=frozenset({"put_if_absent"}))
    wait_done = host.wait_done
    waits: list[Any] = []

    async def cancelled_after(future: Any) -> None:
        await wait_done(future)
        if not waits:  # for the staging
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        waits.append(future)
        await asyncio.sleep(0)

    with held(barrier):
        monkeypatch.setattr(script, "wait_done", cancelled_after)
        task = asyncio.create_task(async_take(faulty_url(url), 1))
        await asyncio.wait([task])
        monkeypatch.undo()
    assert task.cancelled()
    await assert_whole(url, None)


async def test_a_scope_repeats_its_cancellation_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """anyio cancels again in each turn of the loop; the waiting must not spin with it."""
    url = str(tmp_path / "s")
    barrier = Barrier(1, verbs=frozenset({"write_at"}), threads_only=True)
    waits = []
    wait_done = host.wait_done

    async def counted(future: Any) -> None:
        waits.append(future)
        await wait_done(future)

    monkeypatch.setattr(script, "wait_done", counted)
    with held(barrier, has_blocking_io=True):
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(_cancel_at, barrier, scope)
                await take(faulty_url(url), 1)
        assert scope.cancelled_caught
    await assert_whole(url, None)
    assert len(waits) < 10


async def _cancel_at(barrier: Barrier, scope: anyio.CancelScope) -> None:
    assert await asyncio.to_thread(barrier.wait_reached)
    scope.cancel()
    for _ in range(100):  # turns of the loop, in which the scope cancels again
        await asyncio.sleep(0)
    barrier.release()


class Clock:
    """The time on the runtime's loop, which a test may put forward: no deadline takes seconds."""

    def __init__(self) -> None:
        self._loop = host.Host.get()._loop
        self._time = self._loop.time
        self._ahead_s = 0.0
        setattr(self._loop, "time", self._now)  # noqa: B010

    def _now(self) -> float:
        return self._time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
        self._loop.call_soon_threadsafe(lambda: None)  # looks at its timers


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The runtime ends with it: timers that it has set would wait for hours in the time after."""
    host.shutdown()
    yield Clock()
    host.shutdown()


@pytest.mark.parametrize("is_async", [False, True], ids=["take", "async_take"])
async def test_the_deadline_ends_a_stalled_save(
    tmp_path: Path,
    is_async: bool,
    clock: Clock,
    no_leaks_behind: None,
) -> None:
    """Wherever the storage stops answering, the caller is told when the time is over."""
    options = Options(fsync=False, timeout_s=3000)
    verbs_hit = []

    async def work(url: str) -> None:
        if is_async:
            await (await Snapshot.async_take(url, state(2), options=options)).wait()
        else:
            await Snapshot.take(url, state(2), options=options)

    for k in itertools.count(1):
        url = str(tmp_path / str(k))
        barrier = Barrier(k)
        with held(barrier), anyio.fail_after(LIMIT_S):
            task = asyncio.create_task(work(faulty_url(url)))
            reached = asyncio.create_task(asyncio.to_thread(barrier.wait_reached))
            await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
            clock.advance(2990)
            assert not task.done()
            clock.advance(20)
            await asyncio.wait([task, reached])
        assert barrier.was_reached
        if barrier.verb == "list_folders":
            break  # committed: what follows is only cleaning up
        verbs_hit.append(barrier.verb)
        error = task.exception()
        assert isinstance(error, SnapshotAborted)
        assert "timeout_s=3000 has passed" in error.reason
        assert error.rank == 0
        assert_idle()
        await assert_whole(url, None, is_clean=barrier.verb != "put_if_absent")
        await take(url, 3)
        await assert_whole(url, 3)
    assert task.exception() is None
    assert {"get", "writer", "write_at", "complete", "put", "put_if_absent"} <= {*verbs_hit}


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.shared()


def _interrupts() -> Iterator[Any]:
    """At each operation; what is not slow has each value, at every third operation."""
    for overwrite, stalls, is_sync in itertools.product((False, True), repeat=3):
        how = "sync" if is_sync else "asyncio.run"
        names = ("replacing" if overwrite else "first", "stalled" if stalls else "slow", how)
        case, name = (how, stalls, overwrite), "-".join(names)
        if stalls is is_sync is not overwrite:
            yield pytest.param(*case, 3, id=f"{name}-some")
        yield slow(*case, 1, id=name)


@pytest.mark.parametrize(("how", "stalls", "overwrite", "step"), [*_interrupts()])
def test_ctrl_c(
    zygote: Zygote, tmp_path: Path, how: str, stalls: bool, overwrite: bool, step: int
) -> None:
    before = 1 if overwrite else None
    verbs = []
    for at in itertools.count(1, step):
        url = str(tmp_path / str(at))
        if overwrite:
            assert zygote.call("save", url=url, number=1).result() == ""
        found = zygote.call(
            "interrupted", url=url, how=how, at=at, stalls=stalls, overwrite=overwrite
        ).result()
        if not found["was_hit"]:
            assert found["raised"] == ""
            assert found["found"] == 2
            break
        verbs.append(found["verb"])
        # One that comes in the last moment of a call is raised after it.
        assert found["raised"] == "KeyboardInterrupt", found
        assert found["idle"], found
        assert found["found"] in (before, 2), found
        # Not cleaned up: what an unanswered commit may yet name, and, where the commit was faster
        # than the interrupt, what it has replaced. The next save does that.
        is_commit = found["verb"].startswith("put") and found["key"] == "actorsnap.json"
        if found["found"] == before and not is_commit:
            assert found["left"] == [], found
        assert found["again"] == "", found
        assert (found["then"], found["left_then"]) == (3, []), found
        assert found["threads_at_end"] == [], found
    assert len(verbs) > 9 // step


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("what", [Save, host.Call])
def test_ctrl_c_between_two_steps_of_a_call(
    tmp_path: Path, what: Any, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save has just been handed to the runtime, or has not: nobody waits for it yet."""
    url = str(tmp_path / "s")
    start = what.start
    interrupts = iter([KeyboardInterrupt])

    def interrupted(self: Any) -> None:
        interrupt = next(interrupts, None)
        if interrupt is None or moment == "after":
            start(self)
        if interrupt is not None:
            raise interrupt

    monkeypatch.setattr(what, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        sync.Snapshot.take(url, state(1), options=FAST)
    assert "Nothing was committed" in raised.value.__notes__[0]
    assert host.Host.get().pending_saves() == []
    assert_idle()
    with pytest.raises(NotASnapshot, match="no files are there"):
        sync.Snapshot(url).get_manifest()
    sync.Snapshot.take(url, state(2), options=FAST)


def test_ctrl_c_in_a_restore(zygote: Zygote, tmp_path: Path) -> None:
    """When it is raised, nobody writes to the tensors any more."""
    url = str(tmp_path)
    notes = set()
    assert zygote.call("save", url=url, number=1).result() == ""
    for at in itertools.count(1):
        found = zygote.call("interrupted_restore", url=url, at=at).result()
        if not found["was_hit"]:
            break
        assert found["raised"]
        assert found["num_calls"] == 0
        assert found["again"] == 1
        notes.add(tuple(found["notes"]))
    assert at > 3
    assert notes == {(), (INTERRUPTED,)}


def test_ctrl_c_while_waiting_leaves_the_save_running(zygote: Zygote, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    found = zygote.call("interrupted_while_waiting", url=url).result()
    assert found == {"raised": "KeyboardInterrupt", "found": 2, "left": []}
