# SPDX-License-Identifier: Apache-2.0
"""The blocking facade in a thread whose event loop runs: refused, or allowed and whole."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import actorsnap
from actorsnap import Options, Snapshot, UsageError, sync
from actorsnap.manager import every
from actorsnap.manager.sync import CheckpointManager
from tests.api.places import number_of, state
from tests.support import forker

ROOT = Path(__file__).parents[2]
FAST = Options(fsync=False)

pytestmark = [pytest.mark.blocking, pytest.mark.usefixtures("forker")]


@pytest.fixture(autouse=True)
def _refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with the process' first answer, also after one that has changed it."""
    monkeypatch.setattr("actorsnap.runtime.script._is_blocking_allowed", False)
    monkeypatch.delenv("ACTORSNAP_ALLOW_IN_RUNNING_LOOP", raising=False)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)


class Untouchable:
    """A stateful of which nothing may be asked."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("state_dict was called")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("load_state_dict was called")


PENDING = "`pending = await actorsnap.Snapshot.async_take(...)`, then `"


async def test_every_call_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    await Snapshot.take(tmp_path / "s", state(1), options=FAST)
    snapshot = sync.Snapshot(tmp_path / "s")
    taken = await Snapshot.async_take(tmp_path / "p", state(1), options=FAST)
    pending = sync.PendingSnapshot(taken._save)
    untouchable = {"model": Untouchable()}
    calls: dict[str, Callable[[], object]] = {
        "await actorsnap.warm_up(...)": lambda: sync.warm_up(1 << 20),
        "snapshot = await actorsnap.Snapshot.take(...)": lambda: sync.Snapshot.take(
            tmp_path / "t", untouchable
        ),
        "pending = await actorsnap.Snapshot.async_take(...)": lambda: sync.Snapshot.async_take(
            tmp_path / "t", untouchable
        ),
        "await actorsnap.Snapshot(...).restore(...)": lambda: snapshot.restore(untouchable),
        "plan = await actorsnap.Snapshot(...).plan_restore(...)": lambda: snapshot.plan_restore(
            untouchable
        ),
        "value = await actorsnap.Snapshot(...).read_object(...)": lambda: snapshot.read_object(
            "model/weight"
        ),
        "entries = await actorsnap.Snapshot(...).get_manifest()": snapshot.get_manifest,
        "state_dict = await actorsnap.Snapshot(...).get_state_dict_for_key(...)": lambda: (
            snapshot.get_state_dict_for_key("model")
        ),
        "metadata = await actorsnap.Snapshot(...).metadata": lambda: snapshot.metadata,
        "report = await actorsnap.Snapshot(...).verify()": snapshot.verify,
        "report = await actorsnap.Snapshot(...).copy_to(...)": lambda: snapshot.copy_to(
            tmp_path / "t"
        ),
        "await actorsnap.Snapshot(...).delete()": snapshot.delete,
        f"{PENDING}await pending.staged()`": pending.staged,
        f"{PENDING}snapshot = await pending.wait()`": pending.wait,
        f"{PENDING}async for progress in pending.events():`": pending.events,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no coroutine is left that was never awaited
        for code, call in calls.items():
            line = code if code.startswith("`") else f"`{code}`"
            says = f"would block the event loop that runs in this thread. Write {line}. Or let"
            with pytest.raises(UsageError, match=re.escape(says)):
                call()
    assert not (tmp_path / "t").exists()
    # In a thread without a loop the same works, while the loop of this one runs.
    assert (await asyncio.to_thread(snapshot.verify)).ok
    await asyncio.to_thread(pending.wait)


async def test_a_manager_of_the_wrong_module_is_refused_at_its_begin(tmp_path: Path) -> None:
    """At its end, the refusal would replace the error of the block."""
    makes = CheckpointManager(tmp_path, {}, save=every.steps(1))
    with (
        pytest.raises(
            UsageError,
            match=r"^actorsnap\.manager\.sync\.CheckpointManager\.__enter__ would block .* Write "
            r"`async with actorsnap\.manager\.CheckpointManager\(\.\.\.\) as manager:`",
        ),
        makes,
    ):
        raise AssertionError("the block must not begin")


async def test_a_call_that_is_not_due_is_refused_too(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, state(1), save=every.steps(10))
    for step in (0, 1):
        await asyncio.to_thread(manager.maybe_save, step)
    with pytest.raises(UsageError, match=r"Write `await manager\.maybe_save\(\.\.\.\)`"):
        await manager.maybe_save(2)  # type: ignore[misc]
    await asyncio.to_thread(manager.close)


async def test_a_refusal_is_short(tmp_path: Path) -> None:
    try:
        raise KeyError("what the program was doing")
    except KeyError:
        with pytest.raises(UsageError) as caught:
            sync.Snapshot.take(tmp_path / "s", {"model": Untouchable()})
    error = caught.value
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert len(traceback.extract_tb(error.__traceback__)) <= 4
    assert "`actorsnap.sync.allow_in_running_loop()`" in str(error)
    assert "ACTORSNAP_ALLOW_IN_RUNNING_LOOP=1" in str(error)


async def use_everything(folder: Path) -> None:
    """Makes every blocking call in this running loop."""
    sync.warm_up(1 << 20)
    snapshot = sync.Snapshot.take(folder / "s", state(1), metadata={"n": 1}, options=FAST)
    pending = sync.Snapshot.async_take(folder / "p", state(2), options=FAST)
    pending.staged()
    assert [progress.phase for progress in pending.events()][-1] == "committed"
    assert pending.wait().path == str(folder / "p")
    target = state(-1)
    assert snapshot.plan_restore(target).is_complete
    assert snapshot.restore(target).is_complete
    assert number_of(target) == 1
    assert snapshot.read_object("progress/step") == 1
    assert snapshot.get_state_dict_for_key("progress")["step"] == 1
    assert "0/model/weight" in snapshot.get_manifest()
    assert snapshot.metadata == {"n": 1}
    assert not snapshot.copy_to(folder / "copy").was_there
    assert snapshot.verify("full").ok
    snapshot.delete()
    # The loop was blocked, and is whole: its own calls go on.
    await Snapshot(folder / "p").restore(target)
    assert number_of(target) == 2


async def test_allowed_by_the_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        sync.Snapshot(tmp_path / "p").verify()
    actorsnap.sync.allow_in_running_loop()
    await use_everything(tmp_path)


async def test_allowed_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORSNAP_ALLOW_IN_RUNNING_LOOP", "0")
    with pytest.raises(UsageError, match="would block"):
        sync.Snapshot(tmp_path / "p").verify()
    monkeypatch.setenv("ACTORSNAP_ALLOW_IN_RUNNING_LOOP", "perhaps")
    with pytest.raises(UsageError, match="ACTORSNAP_ALLOW_IN_RUNNING_LOOP='perhaps'"):
        sync.Snapshot(tmp_path / "p").verify()
    monkeypatch.setenv("ACTORSNAP_ALLOW_IN_RUNNING_LOOP", "1")
    await use_everything(tmp_path)


def ipython(shell: object) -> ModuleType:
    module = ModuleType("IPython")
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    return module


async def test_allowed_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ipython(SimpleNamespace(kernel=object())))
    await use_everything(tmp_path)


@pytest.mark.parametrize(
    "module",
    [ipython(None), ipython(SimpleNamespace()), ipython(SimpleNamespace(kernel=None)), None],
    ids=["imported", "terminal", "no kernel", "not imported"],
)
async def test_refused_where_ipython_is_no_kernel(
    tmp_path: Path, module: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if module is not None:
        monkeypatch.setitem(sys.modules, "IPython", module)
    with pytest.raises(UsageError, match="would block"):
        sync.Snapshot(tmp_path / "s").verify()


def test_the_line_of_the_refusal_can_be_typed() -> None:
    """After ``import actorsnap`` alone."""
    script = "import actorsnap; actorsnap.sync.allow_in_running_loop()"
    subprocess.run(forker.command("-c", script), cwd=ROOT, check=True, timeout=300)
