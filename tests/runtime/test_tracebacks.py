# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of public calls: short, and nothing else of the error is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import (
    NotASnapshot,
    ObjectExists,
    Options,
    Snapshot,
    SnapshotAborted,
    StateDict,
    StorageError,
    sync,
)
from actorsnap.interop import exports, torchsnapshot
from actorsnap.interop import torch as interop_torch
from actorsnap.manager.sync import CheckpointManager, every
from actorsnap.runtime import host, value_reading
from actorsnap.testing.faults import FaultyStorage
from tests.api.faults import faulty, faulty_url

STATE = {"model": StateDict(w=torch.ones(3))}
FAST = Options(fsync=False)


def files(error: BaseException) -> set[str]:
    """The files in an error's traceback."""
    return {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


MINE = {Path(__file__).name}

CALLS: dict[str, Callable[[Path], Any]] = {
    "take": lambda path: sync.Snapshot.take(path / "s", STATE),
    "async_take": lambda path: sync.Snapshot.async_take(path / "s", STATE).wait(),
    "restore": lambda path: sync.Snapshot(path / "no").restore(STATE),
    "step": lambda path: sync.Snapshot(path / "no").step,
    "snapshot": lambda path: sync.Snapshot("~/s"),
    "manager of no dict": lambda path: CheckpointManager(path, 3),  # type: ignore[arg-type]
    "list": lambda path: sync.Snapshot.list(path, options=3),  # type: ignore[arg-type]
    "manager": lambda path: CheckpointManager(path / "m", STATE, save=every.steps(1)).restore(7),
    "torch.load": lambda path: interop_torch.load(path / "no"),
    "torch.load of a number": lambda path: interop_torch.load(3),  # type: ignore[arg-type]
    "torch.save": lambda path: interop_torch.save(object(), path / "s"),
    "torchsnapshot": lambda path: torchsnapshot.Snapshot.take(
        str(path / "t"), {}, _custom_tensor_prepare_func=print
    ),
    "export": lambda path: exports.export_torch(sync.Snapshot(path / "no"), path / "x.pt"),
}
ASYNC: dict[str, Callable[[Path], Awaitable[Any]]] = {
    "take": lambda path: Snapshot.take(path / "s", STATE),
    "restore": lambda path: Snapshot(path / "no").restore(STATE),
    "step": lambda path: Snapshot(path / "no").step,
    "task": lambda path: asyncio.create_task(Snapshot(path / "no").verify()),
}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    sync.Snapshot.take(tmp_path / "s", STATE, options=FAST)
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
def test_blocking_calls(there: Path, call: str) -> None:
    with pytest.raises(Exception, match=".") as raised:
        CALLS[call](there)
    assert files(raised.value) == MINE


@pytest.mark.parametrize("call", ASYNC)
async def test_async_calls(there: Path, call: str) -> None:
    async def awaited() -> None:
        await ASYNC[call](there)

    with pytest.raises((NotASnapshot, ObjectExists)) as raised:
        await awaited()
    assert files(raised.value) == MINE
    assert names(raised.value)[-1] == "awaited"


def test_causes_and_notes_stay(tmp_path: Path) -> None:
    with faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["write_at"])):
        pending = sync.Snapshot.async_take(faulty_url(str(tmp_path / "x")), STATE, options=FAST)
        with pytest.raises(SnapshotAborted) as raised:
            pending.wait()
    error = raised.value
    assert files(error) == MINE
    assert isinstance(error.__cause__, StorageError)
    assert files(error.__cause__) <= {"faults.py"}  # a storage of another package
    text = "".join(traceback.format_exception(error))
    assert "direct cause" in text
    assert "test_tracebacks.py" in text


def test_interrupts(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = host.Call.start

    def interrupted(self: Any) -> None:
        start(self)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(host.Call, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        sync.Snapshot(there / "s").keys()
    assert not files(raised.value) & {"script.py", "snapshot.py", "host.py"}
    assert names(raised.value)[0] == "test_interrupts"


def test_an_interrupt_before_the_runtime_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's end drops what the traceback holds, and can start no runtime."""
    num_starts = 0

    def interrupted() -> None:
        nonlocal num_starts
        num_starts += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(host.Host, "_instance", None)
    monkeypatch.setattr(host.Host, "begin_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sync.Snapshot("nowhere").restore(STATE)
    gc.collect()
    assert num_starts == 1


class Refusing:
    """A stateful of the user."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.refuse()

    def refuse(self) -> None:
        raise ValueError("mine")


def test_code_of_the_user_stays(tmp_path: Path) -> None:
    snapshot = sync.Snapshot.take(tmp_path, {"m": Refusing()}, options=FAST)
    with pytest.raises(ValueError, match="mine") as raised:
        snapshot.restore({"m": Refusing()})
    assert names(raised.value)[-2:] == ["load_state_dict", "refuse"]
    assert files(raised.value) == MINE
    assert "load_state_dict() of 'm'" in raised.value.__notes__[0]


def test_a_bug_keeps_all_frames(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a frame of actorsnap itself: no call of it.
    monkeypatch.setattr(value_reading, "_begin", None)
    with pytest.raises(TypeError) as raised:
        sync.Snapshot(there / "s").keys()
    assert {"script.py", "value_reading.py"} < files(raised.value)


def test_the_log_has_all_frames(there: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "actorsnap"), pytest.raises(NotASnapshot):
        sync.Snapshot(there / "no").keys()
    assert "snapshot_reader.py" in caplog.text
