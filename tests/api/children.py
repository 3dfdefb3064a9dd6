"""What forked children of the zygote do. Arguments and results are JSON."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

from actorsnap import ActorSnapError, NotASnapshot, Options, Snapshot, SnapshotAborted, sync
from actorsnap.actors import coordinator
from actorsnap.runtime.host import Host, shutdown
from actorsnap.storage.base import Storage
from actorsnap.testing import FaultyStorage
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import leftovers, number_at, runtime_threads, state

torch.set_num_threads(1)
logging.disable(logging.WARNING)

FAST = Options(fsync=False)


def save(
    url: str,
    number: int,
    *,
    how: str = "take",
    overwrite: bool = False,
    options: Options = FAST,
) -> str:
    """Takes a snapshot; returns the error's type, or nothing."""
    take = sync.Snapshot.take if how == "take" else sync.Snapshot.async_take
    try:
        taken = take(url, state(number), overwrite=overwrite, options=options)
        if isinstance(taken, sync.PendingSnapshot):
            taken.wait()
    except ActorSnapError as error:
        return type(error).__name__
    return ""


def save_and_die_at_operation(
    url: str, number: int, *, how: str, overwrite: bool, at: int, when: str
) -> str:
    """``save``, killed at the storage operation number ``at`` that writes."""
    with faulty(lambda inner: FaultyStorage(inner, kill_after=at, kill_when=when)):
        return save(faulty_url(url), number, how=how, overwrite=overwrite)


_WRITING = ("open", "mkdir", "ftruncate", "pwritev", "fsync", "rename", "link", "unlink", "rmdir")


def save_and_die_at_system_call(
    url: str, number: int, *, how: str, overwrite: bool, at: int, when: str
) -> list[str]:
    """``save``, killed at the system call number ``at`` that changes the file system.

    ``when`` is ``before``, ``after``, or ``torn``: the file system has written half of it.
    Returns the calls that were made, if it survived.
    """
    lock = threading.Lock()
    calls: list[str] = []

    def patched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return original(*args, **kwargs)
            with lock:
                calls.append(name)
                is_last = len(calls) == at
            if is_last and when != "after":
                if when == "torn" and name == "pwritev":
                    half = memoryview(args[1][0])
                    original(args[0], [half[: len(half) // 2]], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return original(*args, **kwargs)
            finally:
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in _WRITING:
        setattr(os, name, patched(name, getattr(os, name)))
    Host.get()
    assert save(url, number, how=how, overwrite=overwrite, options=Options()) == ""
    return calls


def look_and_save_again(url: str, number: int) -> dict[str, Any]:
    """What the next process finds at a place, and what is there after its own save."""

    async def run() -> dict[str, Any]:
        found = await number_at(url)
        try:
            await Snapshot(url).get_manifest()
            says = ""
        except NotASnapshot as error:
            says = error.found
        left_before = await leftovers(url)
        await Snapshot.take(url, state(number), overwrite=found is not None, options=FAST)
        return {
            "found": found,
            "says": says,
            "left_before": left_before,
            "then": await number_at(url),
            "left": await leftovers(url),
        }

    return asyncio.run(run())


def race(url: str, number: int, *, overwrite: bool, go: str, num_rounds: int) -> list[str]:
    """Saves to ``<url>/<round>`` in step with a twin, by way of the FIFOs ``go``."""
    outcomes = []
    with open(f"{go}-out", "wb", buffering=0) as out, open(f"{go}-in", "rb", buffering=0) as into:
        for round_ in range(num_rounds):
            out.write(b"x")
            into.read(1)
            outcomes.append(save(f"{url}/{round_}", number, overwrite=overwrite))
    return outcomes


def interrupted(
    url: str, *, how: str, at: int, stalls: bool, overwrite: bool = False
) -> dict[str, Any]:
    """A save that gets SIGINT (Ctrl-C) when its operation number ``at`` begins.

    With ``stalls`` the operation then waits until it is cancelled, else it goes on.
    """
    raised = ""
    coordinator._COMMIT_GRACE_S = 0.0  # a storage that never answers is not waited for
    barrier = _InterruptingBarrier(at, stalls=stalls)

    def wrap(inner: Storage) -> Storage:
        return BarrierStorage(inner, barrier, has_blocking_io=not stalls)

    async def main() -> None:
        await Snapshot.take(faulty_url(url), state(2), overwrite=overwrite, options=FAST)

    with faulty(wrap):
        try:
            if how == "asyncio.run":
                asyncio.run(main())
            else:
                save_sync(faulty_url(url), overwrite=overwrite)
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
        except SnapshotAborted:
            raised = "SnapshotAborted"
    idle = Host.get().budget.statistics().leased_bytes == 0
    found = asyncio.run(number_at(url))
    left = asyncio.run(leftovers(url))
    threads = len(runtime_threads())
    again = save(url, 3, overwrite=found is not None)
    then = asyncio.run(number_at(url))
    left_then = asyncio.run(leftovers(url))
    shutdown()
    return {
        "was_hit": barrier.was_reached,
        "verb": barrier.verb,
        "raised": raised,
        "idle": idle,
        "found": found,
        "left": left,
        "threads": threads,
        "again": again,
        "then": then,
        "left_then": left_then,
        "threads_at_end": runtime_threads(),
    }


def interrupted_while_waiting(url: str) -> dict[str, Any]:
    """SIGINT while ``wait`` blocks: the save goes on."""
    barrier = Barrier(1, verbs=frozenset({"put_if_absent"}))
    raised = ""

    def interrupt() -> None:
        assert barrier.wait_reached()
        os.kill(os.getpid(), signal.SIGINT)

    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = sync.Snapshot.async_take(faulty_url(url), state(2), options=FAST)
        threading.Thread(target=interrupt).start()
        try:
            pending.wait()
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
        barrier.release()
        pending.wait()
    found, left = asyncio.run(number_at(url)), asyncio.run(leftovers(url))
    return {"raised": raised, "found": found, "left": left}


def save_sync(url: str, *, overwrite: bool) -> None:
    sync.Snapshot.take(url, state(2), overwrite=overwrite, options=FAST)


class _InterruptingBarrier(Barrier):
    def __init__(self, at: int, *, stalls: bool) -> None:
        super().__init__(at)
        self._stalls = stalls

    def _is_held(self, verb: str, key: str, *, is_thread: bool = False) -> bool:
        if not super()._is_held(verb, key, is_thread=is_thread):
            return False
        self._reached.set()
        os.kill(os.getpid(), signal.SIGINT)
        return self._stalls
