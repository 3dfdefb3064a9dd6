# SPDX-License-Identifier: Apache-2.0
"""Calls of the async facade that nobody awaits, and all the ways to await them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

import actorsnap
from actorsnap import Options, PendingSnapshot, Snapshot, StateDict, UsageError, snapshot, sync
from actorsnap.interop.exports import export_dcp, export_torch
from actorsnap.manager import CheckpointManager, every
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import number_of, state
from tests.support import forker
from tests.support.cases import slow

pytestmark = pytest.mark.usefixtures("forker")

ROOT = Path(__file__).parents[2]
FAST = Options(fsync=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a snapshot of state 1."""
    sync.Snapshot.take(tmp_path / "saved", state(1), options=FAST)
    return tmp_path / "saved"


def calls(path: Path) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every public call that is async, by qualified name."""
    app_state = {"model": StateDict(x=1)}
    at = Snapshot(path)
    # Its save need not exist: nothing of a call runs before it is awaited.
    pending = PendingSnapshot(Unasked(path))  # type: ignore[arg-type]
    return {
        "warm_up": lambda: actorsnap.warm_up(1 << 20),
        "Snapshot.take": lambda: Snapshot.take(path, app_state),
        "Snapshot.async_take": lambda: Snapshot.async_take(path, app_state),
        "Snapshot.restore": lambda: at.restore(app_state),
        "Snapshot.plan_restore": lambda: at.plan_restore(app_state),
        "Snapshot.read_object": lambda: at.read_object("model/x"),
        "Snapshot.get_manifest": lambda: at.get_manifest(),
        "Snapshot.get_state_dict_for_key": lambda: at.get_state_dict_for_key("model"),
        "Snapshot.metadata": lambda: at.metadata,
        "Snapshot.step": lambda: at.step,
        "Snapshot.created": lambda: at.created,
        "Snapshot.world_size": lambda: at.world_size,
        "Snapshot.nbytes": lambda: at.nbytes,
        "Snapshot.keys": lambda: at.keys(),
        "Snapshot.tree": lambda: at.tree(),
        "Snapshot.exists": lambda: at.exists(),
        "Snapshot.list": lambda: Snapshot.list(path),
        "Snapshot.verify": lambda: at.verify(),
        "Snapshot.copy_to": lambda: at.copy_to(path / "copy"),
        "Snapshot.export_hf": lambda: at.export_hf(path / "hf"),
        "Snapshot.recover": lambda: at.recover(),
        "Snapshot.delete": lambda: at.delete(),
        "PendingSnapshot.staged": lambda: pending.staged(),
        "PendingSnapshot.wait": lambda: pending.wait(),
    }


class Unasked:
    def __init__(self, path: Path) -> None:
        self.url = str(path)


MISSED = {
    "warm_up": "prepared",
    "Snapshot.take": "saved",
    "Snapshot.async_take": "saved",
    "Snapshot.restore": "restored",
    "Snapshot.plan_restore": "planned",
    "Snapshot.exists": "looked for",
    "Snapshot.verify": "verified",
    "Snapshot.copy_to": "copied",
    "Snapshot.export_hf": "exported",
    "Snapshot.recover": "recovered",
    "Snapshot.delete": "deleted",
    "PendingSnapshot.staged": "waited for",
    "PendingSnapshot.wait": "waited for",
}


def public_functions() -> set[str]:
    """The qualified names of all functions in ``snapshot.py`` that are ``async def``."""
    found: list[Any] = [snapshot.warm_up, snapshot.Snapshot, snapshot.PendingSnapshot]
    for cls in [value for value in found if isinstance(value, type)]:
        found += [value for name, value in vars(cls).items() if not name.startswith("_")]
    names: set[str] = set()
    for value in found:
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            names.add(function.__qualname__)
    return names


def test_no_call_is_left_out(tmp_path: Path) -> None:
    assert public_functions() == calls(tmp_path).keys()


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_a_dropped_call_is_an_error(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls(tmp_path)[name]()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    subject = "" if name == "warm_up" else repr(str(tmp_path))
    missed = MISSED.get(name, "read")
    text = record.getMessage()
    assert text.startswith(f"{name}({subject}) was never awaited: nothing was {missed}. Write `")
    assert "await " in text
    imported = "warm_up" if name == "warm_up" else "Snapshot"
    assert f"or use `from actorsnap.sync import {imported}`, which needs no await" in text


def test_the_line_to_write(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    Snapshot(saved).restore(state(-1))  # type: ignore[unused-coroutine]
    assert caplog.messages == [
        f"Snapshot.restore('{saved}') was never awaited: nothing was restored. Write `await "
        "actorsnap.Snapshot(...).restore(...)`, or use `from actorsnap.sync import Snapshot`, "
        "which needs no await"
    ]


def test_the_line_to_write_for_a_manager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, state(1), save=every.steps(1))
    manager.maybe_save(1)  # type: ignore[unused-coroutine]
    assert caplog.messages == [
        f"CheckpointManager.maybe_save('{tmp_path}') was never awaited: nothing happened. Write "
        "`await manager.maybe_save(...)`, or use `from actorsnap.manager.sync import "
        "CheckpointManager`, which needs no await"
    ]


def test_the_line_to_write_for_an_export(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        export_torch(Snapshot(saved), "x.pt")
    export_dcp(Snapshot(saved), "x")
    assert caplog.messages == [
        f"{name}() was never awaited: nothing was exported. Write `await "
        f"{name}(actorsnap.Snapshot(...), ...)`, or pass a Snapshot of actorsnap.sync, without "
        "await"
        for name in ("export_torch", "export_dcp")
    ]


def test_a_dropped_call_in_a_loop_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, state(1), save=every.steps(1))
    for step in range(3):
        manager.maybe_save(step)  # type: ignore[unused-coroutine]
    assert len(caplog.messages) == 1
    manager.maybe_save(3)  # type: ignore[unused-coroutine]
    assert len(caplog.messages) == 2
    cell = "manager.maybe_save(4)"
    for _ in range(2):  # a notebook compiles a cell that runs again
        exec(compile(cell, "cell", "exec"), {"manager": manager})
    assert len(caplog.messages) == 4


def test_the_other_dropped_calls_are_counted_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
from actorsnap import Snapshot
for step in range(60):
    Snapshot({str(tmp_path / "a")!r}).keys()
"""
    )
    done = subprocess.run(
        forker.command(str(script)), capture_output=True, text=True, check=True, timeout=300
    )
    first, last = done.stderr.splitlines()
    assert "was never awaited" in first
    assert last.endswith(f"{script}:4: 59 more calls were never awaited")


def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    call = Snapshot.take("s3://me:hidden@host/bucket/s", state(1))
    assert "'s3://me@host/bucket/s'" in repr(call)
    del call
    assert "hidden" not in caplog.text
    assert "'s3://me@host/bucket/s'" in caplog.text


def test_reading_a_result_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: Any = Snapshot.take(tmp_path / "s", state(1))
    says = (
        r"Snapshot.take\(\) has to be awaited before its result has 'path'. Write `snapshot = "
        r"await actorsnap.Snapshot.take\(...\)`, or use `from actorsnap.sync import Snapshot`"
    )
    with pytest.raises(AttributeError, match=says):
        _ = taken.path
    pending: Any = Snapshot.async_take(tmp_path / "s", state(1))
    with pytest.raises(AttributeError, match=r"'done'. Write `pending = await"):
        pending.done()
    entries: Any = Snapshot(tmp_path / "s").get_manifest()
    for read in (lambda: entries["0/model/x"], lambda: list(entries)):
        with pytest.raises(
            TypeError, match=r"get_manifest\(\) has to be awaited .*`entries = await"
        ):
            read()
    exists: Any = Snapshot(tmp_path / "s").exists()
    says = r"exists\(\) has to be awaited before its result is tested. Write `if await .*exists"
    with pytest.raises(TypeError, match=says):
        assert exists
    exists.close()
    for call, name in ((taken, "take"), (pending, "async_take"), (entries, "get_manifest")):
        assert f"Snapshot.{name}(" in repr(call)
        assert "was not awaited: nothing was" in repr(call)
        assert "actorsnap.sync" in repr(call)
        call.close()
    assert repr(taken) == "<Snapshot.take()>"
    assert caplog.records == []


def test_a_call_that_raised_is_not_reported_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for read in (list, bool, lambda call: call.path):
        listed: Any = Snapshot.list(tmp_path)
        with pytest.raises((TypeError, AttributeError), match="has to be awaited"):
            read(listed)
        del listed
    gc.collect()
    assert caplog.records == []


def test_a_closed_call_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for call in calls(tmp_path).values():
        coroutine = call()
        assert isinstance(coroutine, Coroutine)
        coroutine.close()
    del coroutine
    gc.collect()
    assert caplog.records == []


def test_a_bad_argument_is_raised_by_await(tmp_path: Path) -> None:
    call = Snapshot.take(3, state(1))  # type: ignore[arg-type]
    assert "Snapshot.take('3')" in repr(call)
    with pytest.raises(UsageError, match="a URL or a path is needed"):
        asyncio.run(call)


def test_signatures_are_kept() -> None:
    assert list(inspect.signature(Snapshot.take).parameters)[:2] == ["path", "app_state"]
    assert (Snapshot.restore.__doc__ or "").startswith("Reads the snapshot into")
    assert Snapshot.restore.__name__ == "restore"
    blocking = sync.Snapshot.restore
    assert list(inspect.signature(blocking).parameters)[:2] == ["self", "app_state"]
    assert (blocking.__doc__ or "").startswith("Reads the snapshot into")
    assert not inspect.iscoroutinefunction(blocking)
    if sys.version_info >= (3, 12):
        for function in (actorsnap.warm_up, Snapshot.take, Snapshot.restore, PendingSnapshot.wait):
            assert inspect.iscoroutinefunction(function)


# Every way to await


async def by_await(call: Coroutine[Any, Any, Any]) -> None:
    await call


async def by_task(call: Coroutine[Any, Any, Any]) -> None:
    assert inspect.getcoroutinestate(call) == inspect.CORO_CREATED
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    assert "Snapshot.restore" in repr(task)
    assert [frame.f_code.co_name for frame in task.get_stack()] == ["restore"]
    await task


async def by_task_group(call: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(call)


async def by_wait_for(call: Coroutine[Any, Any, Any]) -> None:
    await asyncio.wait_for(call, timeout=60.0)


async def by_gather(call: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(call)


async def by_shield(call: Coroutine[Any, Any, Any]) -> None:
    await asyncio.shield(call)


async def by_as_completed(call: Coroutine[Any, Any, Any]) -> None:
    for done in asyncio.as_completed([call]):
        await done


async def by_threadsafe(call: Coroutine[Any, Any, Any]) -> None:
    future = asyncio.run_coroutine_threadsafe(call, asyncio.get_running_loop())
    await asyncio.wrap_future(future)


async def by_anyio(call: Coroutine[Any, Any, Any]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: call)


WAYS = [
    by_await,
    by_task,
    by_task_group,
    by_wait_for,
    by_gather,
    by_shield,
    by_as_completed,
    by_threadsafe,
    by_anyio,
]


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_ways_to_await(
    saved: Path,
    way: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, None]],
    debug: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        target = state(-1)
        call = Snapshot(saved).restore(target)
        assert inspect.isawaitable(call)
        assert asyncio.iscoroutine(call)
        await way(call)
        assert number_of(target) == 1
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            await call

    asyncio.run(main(), debug=debug)
    gc.collect()
    assert [message for message in caplog.messages if "awaited" in message] == []


def test_ways_to_run(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(Snapshot(saved).verify()).ok
    with asyncio.Runner() as runner:
        assert runner.run(Snapshot(saved).verify()).ok
    taken = anyio.run(Snapshot.take, tmp_path / "s", state(2))
    assert isinstance(taken, Snapshot)
    with pytest.raises(UsageError, match="no asyncio event loop runs here"):
        trio.run(Snapshot(saved).verify)
    assert caplog.records == []


async def test_a_pending_snapshot_is_awaited(tmp_path: Path) -> None:
    pending = await Snapshot.async_take(tmp_path / "s", state(1), options=FAST)
    assert (await pending).path == str(tmp_path / "s")


@pytest.mark.parametrize("steps", [0, 1, 5])
async def test_a_cancelled_call_is_no_error(
    saved: Path, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its first step, and while it waits in anyio's scopes."""
    barrier = Barrier(1, verbs=frozenset({"get"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        task = asyncio.create_task(Snapshot(faulty_url(str(saved))).restore(state(-1)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        barrier.release()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    del task
    gc.collect()
    assert [message for message in caplog.messages if "awaited" in message] == []


# Scripts

SCRIPT = """
import sys, torch
from actorsnap import Snapshot, StateDict
app_state = {"model": StateDict(x=1)}
path = sys.argv[1]
"""


def run(script: str, path: Path) -> list[str]:
    """The lines that a fresh process prints on stderr."""
    done = subprocess.run(
        forker.command("-W", "error", "-c", SCRIPT + script, str(path)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    "script",
    [
        slow("Snapshot(path).restore(app_state)", id="dropped"),
        # Dropped by the interpreter's exit.
        pytest.param("report = Snapshot(path).restore(app_state)", id="global"),
        slow("report = [Snapshot(path).restore(app_state)]; report.append(report)", id="cycle"),
        slow(
            "import actorsnap.snapshot as s; s.kept = Snapshot(path).restore(app_state)",
            id="module",
        ),
    ],
)
def test_the_script_of_another_library(saved: Path, script: str) -> None:
    (line,) = run(script, saved)
    assert line.startswith(f"Snapshot.restore('{saved}') was never awaited: nothing was restored.")


def test_an_awaited_script_is_silent(saved: Path) -> None:
    script = "import asyncio; asyncio.run(Snapshot(path).verify())"
    assert run(script, saved) == []
