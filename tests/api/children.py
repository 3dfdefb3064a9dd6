# SPDX-License-Identifier: Apache-2.0
"""What forked children of the zygote do. Arguments and results are JSON."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import importlib
import json
import logging
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from actorsnap import ActorSnapError, NotASnapshot, Options, Snapshot, SnapshotAborted, sync
from actorsnap.actors import abandonable, commit
from actorsnap.errors import notes_of
from actorsnap.runtime import maintenance, taking
from actorsnap.runtime.host import Host, shutdown, wait_done
from actorsnap.runtime.location import make_location
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.testing import FaultyStorage, run_blocking_in_thread
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import leftovers, number_at, runtime_threads, state

# The children may be somebody who cannot read the installed packages.
importlib.import_module("actorsnap.storage.fs")
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
    url: str,
    number: int,
    *,
    how: str,
    overwrite: bool,
    at: int,
    when: str,
    compression: str | None = None,
) -> str:
    """``save``, killed at the storage operation number ``at`` that writes."""
    options = Options(fsync=False, compression=compression)
    with faulty(lambda inner: FaultyStorage(inner, kill_after=at, fail_when=when)):
        return save(faulty_url(url), number, how=how, overwrite=overwrite, options=options)


def copy_and_die_at_operation(source: str, to: str, *, at: int, when: str) -> None:
    """A copy that replaces, killed at the writing operation number ``at`` of the destination."""
    with faulty(lambda inner: FaultyStorage(inner, kill_after=at, fail_when=when)):
        sync.Snapshot(source).copy_to(faulty_url(to), overwrite=True)


def delete_and_die_at_operation(url: str, *, at: int, when: str) -> None:
    """A deletion, killed at the writing operation number ``at``."""
    with faulty(lambda inner: FaultyStorage(inner, kill_after=at, fail_when=when)):
        sync.Snapshot(faulty_url(url)).delete()


def write_and_die(root: str, *, k: int, when: str, how: str) -> None:
    """One operation of each verb, killed at the ``k``-th that writes."""

    async def write() -> None:
        inner = open_storage(root, StorageContext(run_blocking=run_blocking_in_thread))
        storage = FaultyStorage(inner, kill_after=k, fail_when=when)
        await storage.put("1", [memoryview(b"x")])
        await storage.get("1")
        await storage.put_if_absent("2", b"x")
        writer = await storage.writer("3", 1)
        if how == "blocking":
            await anyio.to_thread.run_sync(writer.write_at_blocking, 0, [memoryview(b"x")])
        else:
            await writer.write_at(0, [memoryview(b"x")])
        await writer.complete()
        await storage.delete(["1"])

    anyio.run(write)


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


def race(
    url: str,
    number: int,
    *,
    overwrite: bool,
    fifos: list[str],
    num_rounds: int,
    env: dict[str, str] | None = None,
) -> list[str]:
    """Saves to ``<url>/<round>`` in step with a twin that has the same two FIFOs, swapped."""
    os.environ |= env or {}
    Host.get()
    outcomes = []
    out, into = (os.open(path, os.O_RDWR) for path in fifos)
    for round_ in range(num_rounds):
        os.write(out, b"x")
        os.read(into, 1)
        outcomes.append(save(f"{url}/{round_}", number, overwrite=overwrite))
    return outcomes


def outcome_of(call: Callable[[], object]) -> dict[str, str]:
    """How a save ended, in words."""
    try:
        call()
    except SnapshotAborted as error:
        return {
            "error": type(error).__name__,
            "cause": type(error.__cause__).__name__,
            "says": str(error),
            "key": error.key or "",
        }
    except ActorSnapError as error:
        return {"error": type(error).__name__}
    return {"error": ""}


def save_as_nobody(folder: str) -> dict[str, Any]:
    """Saves to a folder that is only readable, and looks at one that is not even that."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    with tempfile.TemporaryDirectory() as hidden:
        os.chmod(hidden, 0)
        return {
            "new": outcome_of(lambda: sync.Snapshot.take(f"{folder}/new", state(2))),
            "replacing": outcome_of(
                lambda: sync.Snapshot.take(f"{folder}/s", state(2), overwrite=True)
            ),
            "restored": asyncio.run(number_at(f"{folder}/s")),
            "hidden": outcome_of(lambda: sync.Snapshot(f"{hidden}/s").restore(state(-1)))["error"],
        }


def fill_disk(folder: str) -> dict[str, Any]:
    """Saves to a small file system of its own, with a page more of free space each time."""
    _mount_tmpfs(folder, size=6 << 20)
    sync.Snapshot.take(f"{folder}/old", state(1))
    page = 4096
    rounds: list[dict[str, Any]] = []
    with open(f"{folder}/filler", "wb") as filler:
        status = os.statvfs(folder)
        size = status.f_bavail * status.f_frsize
        os.posix_fallocate(filler.fileno(), 0, size)
        # Too little for the large object; then just about enough for all.
        needed = _bytes_below(f"{folder}/old")
        for free in (0, needed // 2, *range(needed - 8 * page, needed + 8 * page, page)):
            os.ftruncate(filler.fileno(), size - free)
            one: dict[str, Any] = outcome_of(
                lambda: sync.Snapshot.take(f"{folder}/old", state(2), overwrite=True)
            )
            one["older"] = asyncio.run(number_at(f"{folder}/old"))
            one["left"] = asyncio.run(leftovers(f"{folder}/old"))
            rounds.append(one)
            if not one["error"]:
                break
            os.posix_fallocate(filler.fileno(), 0, size)
    return {"rounds": rounds}


def fill_inodes(folder: str) -> dict[str, str]:
    """Saves to a file system with room for megabytes, but for no further file."""
    _mount_tmpfs(folder, size=64 << 20, nr_inodes=20)
    while os.statvfs(folder).f_favail:
        with open(f"{folder}/{os.statvfs(folder).f_favail}", "wb"):
            pass
    return outcome_of(lambda: sync.Snapshot.take(f"{folder}/s", state(1)))


def _bytes_below(folder: str) -> int:
    return sum(
        os.stat(os.path.join(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def _mount_tmpfs(folder: str, **limits: int) -> None:
    """A file system that only this process sees, gone with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x20000, 0x10000000, 0x44000  # MS_REC | MS_PRIVATE
    options = ",".join(f"{name}={limit}" for name, limit in limits.items())
    flags = new_mounts if os.geteuid() == 0 else new_mounts | new_user
    for answer in (
        libc.unshare(flags),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options.encode()),
    ):
        if answer:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def interrupted(
    url: str, *, how: str, at: int, stalls: bool, overwrite: bool = False
) -> dict[str, Any]:
    """A save that gets SIGINT (Ctrl-C) when its operation number ``at`` begins.

    With ``stalls`` the operation then waits until it is cancelled, else it goes on.
    """
    raised = ""
    commit._COMMIT_GRACE_S = 0.0  # a storage that never answers is not waited for
    abandonable._CLEANUP_S = 1.0
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
    idle = Host.get().resources.budget.leased_bytes == 0
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
        "key": barrier.key,
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


def interrupted_restore(url: str, at: int) -> dict[str, Any]:
    """SIGINT when operation number ``at`` of a restore begins, which then stalls."""
    barrier = _InterruptingBarrier(at, stalls=True)
    raised = False
    notes: list[str] = []
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        try:
            sync.Snapshot(faulty_url(url)).restore(state(-1))
        except KeyboardInterrupt as error:
            raised, notes = True, notes_of(error)
    deadline = time.monotonic() + 30
    while Host.get()._calls and time.monotonic() < deadline:
        time.sleep(0.001)  # what has ended is taken off the list a moment later
    return {
        "was_hit": barrier.was_reached,
        "raised": raised,
        "notes": notes,
        "num_calls": len(Host.get()._calls),
        "again": asyncio.run(number_at(url)),
    }


def interrupted_while_waiting(url: str) -> dict[str, Any]:
    """SIGINT while ``wait`` blocks: the save goes on."""
    barrier = Barrier(1, verbs=frozenset({"put_if_absent"}))
    raised = ""

    async def interrupting(future: Any) -> None:
        if not raised:
            os.kill(os.getpid(), signal.SIGINT)
        await wait_done(future)

    with (
        faulty(lambda inner: BarrierStorage(inner, barrier)),
        pytest.MonkeyPatch.context() as patch,
    ):
        pending = sync.Snapshot.async_take(faulty_url(url), state(2), options=FAST)
        patch.setattr(taking, "wait_done", interrupting)
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


def fork_with_pending(url: str) -> dict[str, Any]:
    """Forks while a save is held up; what works in the child, and what becomes of the save."""
    assert save(f"{url}/older", 1) == ""
    barrier = Barrier(1, verbs=frozenset({"put"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = sync.Snapshot.async_take(faulty_url(f"{url}/s"), state(2), options=FAST)
        assert barrier.wait_reached()

        def in_child() -> dict[str, Any]:
            return {
                "wait": raised_by(pending.wait),
                "staged": raised_by(pending.staged),
                "guard": raised_by(pending.guard),
                "done": raised_by(pending.done),
                "cancel": raised_by(pending.cancel),
                "events": raised_by(lambda: list(pending.events())),
                "saved": save(f"{url}/child", 1),
                "restored": asyncio.run(number_at(f"{url}/child")),
                "read": asyncio.run(number_at(f"{url}/older")),
            }

        child = forked(in_child)
        barrier.release()
        pending.wait()
    return {"child": child, "parent": asyncio.run(number_at(f"{url}/s"))}


def fork_and_exit(url: str) -> dict[str, Any]:
    """A child that exits with all its handlers while the parent's save is held up."""
    barrier = Barrier(1, verbs=frozenset({"put"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = sync.Snapshot.async_take(faulty_url(f"{url}/s"), state(2), options=FAST)
        assert barrier.wait_reached()
        pid = fork()
        if pid == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        barrier.release()
        pending.wait()
    return {"child": status, "parent": asyncio.run(number_at(f"{url}/s"))}


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except ActorSnapError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of forks of processes with threads: that is the point here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def forked(call: Callable[[], Any]) -> Any:
    """The JSON that ``call`` returns in a fork of this process."""
    out, into = os.pipe()
    if fork() == 0:
        signal.alarm(60)
        with os.fdopen(into, "w") as stream:
            json.dump(call(), stream)
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as stream:
        return json.load(stream)


def save_model_and_die(url: str, storage_options: dict[str, Any], seed: int, at: int) -> None:
    """Saves the state of ``test_resume``, and dies before the ``at``-th write to the storage."""
    from tests.api.test_resume import OPTIONS
    from tests.api.test_resume import state as model_of

    with faulty(lambda inner: FaultyStorage(inner, kill_after=at, fail_when="before")):
        sync.Snapshot.take(
            faulty_url(url), model_of(seed, 30), storage_options=storage_options, options=OPTIONS
        )


def folders_and_garbage(url: str, storage_options: dict[str, Any]) -> list[int]:
    """How many attempts lie there; how many keys their collection deletes; how many are left."""
    source = Source(make_location(url, storage_options), FAST)

    async def num_attempts() -> int:
        context = StorageContext(run_blocking=run_blocking_in_thread, options=storage_options)
        storage = open_storage(url, context)
        try:
            return len(await storage.list_folders())
        finally:
            await storage.aclose()

    before = asyncio.run(num_attempts())
    report = run_sync(maintenance.collect(source, force=False), name="collect")
    return [before, len(report.deleted), asyncio.run(num_attempts())]
