# SPDX-License-Identifier: Apache-2.0
"""``progress=True``: bars on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

import actorsnap
from actorsnap import Options, SnapshotAborted, StateDict, UsageError, sync
from actorsnap.manager import every
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime import bars
from actorsnap.storage.base import Storage
from actorsnap.testing import FaultyStorage, ThrottledStorage
from tests.api.faults import faulty, faulty_url
from tests.conftest import LeakCheck
from tests.support import forker

NBYTES = 4 << 20
OPTIONS = Options(fsync=False, offload="thread", chunk_bytes=2 << 20, num_uploaders=1)


def state() -> dict[str, StateDict]:
    return {"model": StateDict(w=torch.zeros(NBYTES, dtype=torch.uint8))}


class Terminal:
    """A terminal in place of stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._ours, theirs = pty.openpty()
        self.file = open(theirs, "w", encoding="utf-8")
        self._received = bytearray()
        self._reader = threading.Thread(target=self._read)

    def attach(self, *, reads: bool = True) -> None:
        """In the test: pytest sets stderr between its phases."""
        self._monkeypatch.setattr(sys, "stderr", self.file)
        if reads:
            self.read_on()

    def fill(self) -> None:
        """Sends as much as it takes while nobody reads."""
        os.set_blocking(self.file.fileno(), False)
        with suppress(BlockingIOError):
            while True:
                os.write(self.file.fileno(), b"." * 64)
        os.set_blocking(self.file.fileno(), True)

    def read_on(self) -> None:
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # Linux: the other end is closed
                return
            if not data:
                return
            self._received += data

    def text(self) -> str:
        """All that it was sent. Closes it."""
        self.file.close()
        if not self._reader.ident:
            self._reader.start()
        self._reader.join(30)
        os.close(self._ours)
        return self._received.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(bars, "_FIRST_S", 0.0)
    yield terminal
    if not terminal.file.closed:
        terminal.text()


def phases(text: str) -> list[str]:
    """The phases of which bars were drawn, in their order, and whether each was seen complete."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    lines = [line for line in re.split(r"[\r\n]+", text) if "━" in line]
    seen = dict.fromkeys(line.split()[0] for line in lines)
    whole = {line.split()[0] for line in lines if "4.2/4.2 MiB" in line or "4.0/4.0 MiB" in line}
    assert whole == {*seen}, lines
    return [*seen]


def drawing() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "actorsnap-progress"]


def throttled(inner: Storage) -> Storage:
    return ThrottledStorage(inner, bytes_per_s=20 << 20)


def test_a_terminal_gets_a_bar_per_phase(
    terminal: Terminal, tmp_path: Path, no_leaks: LeakCheck
) -> None:
    sync.Snapshot.take(tmp_path / "warm", state(), options=OPTIONS)
    no_leaks.restart()
    terminal.attach()
    with faulty(throttled):
        snapshot = sync.Snapshot.take(
            faulty_url(tmp_path / "a"), state(), options=OPTIONS, progress=True
        )
        snapshot.restore(state(), progress=True)
        snapshot.copy_to(tmp_path / "b", progress=True)
    text = terminal.text()
    assert phases(text) == ["staging", "storing", "reading", "copying"]
    assert "storing a " in text
    assert "\x1b[?25l" not in text, "the cursor was hidden"
    # The bars are gone in the end.
    assert text.endswith("\x1b[2K")


def test_bars_while_a_pending_save_is_awaited(terminal: Terminal, tmp_path: Path) -> None:
    """Not in the meantime: the trainer writes to the terminal."""
    terminal.attach()

    with faulty(throttled):
        pending = sync.Snapshot.async_take(
            faulty_url(tmp_path), state(), options=OPTIONS, progress=True
        )
        for thread in drawing():
            thread.join(30)
        assert drawing() == []
        pending.wait()
    assert "storing" in phases(terminal.text())


def test_async_calls(terminal: Terminal, tmp_path: Path) -> None:
    terminal.attach()

    async def run() -> None:
        snapshot = await actorsnap.Snapshot.take(
            tmp_path / "a", state(), options=OPTIONS, progress=True
        )
        await snapshot.restore(state(), progress=True)
        await snapshot.copy_to(tmp_path / "b", progress=True)
        with pytest.raises(actorsnap.ObjectExists):
            await actorsnap.Snapshot.take(tmp_path / "a", state(), progress=True)
        pending = await actorsnap.Snapshot.async_take(tmp_path / "c", state(), progress=True)
        with anyio.move_on_after(0):
            await pending.wait()
        await pending

    anyio.run(run)
    assert {"storing", "reading", "copying"} <= {*phases(terminal.text().replace(" c ", " a "))}


def test_a_manager(terminal: Terminal, tmp_path: Path) -> None:
    terminal.attach()
    settings: Any = {"save": every.steps(1), "options": OPTIONS, "progress": True}
    with faulty(throttled):
        with CheckpointManager(faulty_url(tmp_path), state(), **settings) as manager:
            manager.maybe_save(0)
            manager.maybe_save(1)
            manager.restore_latest()
    text = terminal.text()
    assert phases(text)[-1] == "reading"
    assert "storing step-0000000000.g1" in text
    assert "storing step-0000000001.g1" in text


def test_a_failed_call_leaves_no_bar(terminal: Terminal, tmp_path: Path) -> None:
    terminal.attach()
    with faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["write_at"])):
        with pytest.raises(SnapshotAborted):
            sync.Snapshot.take(faulty_url(tmp_path), state(), options=OPTIONS, progress=True)
    assert terminal.text().endswith("\x1b[2K")


def test_a_paused_terminal_delays_nothing(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that draws blocks at its first frame."""
    terminal.attach(reads=False)
    terminal.fill()
    monkeypatch.setattr(bars, "_PATIENCE_S", 0.1)
    with faulty(throttled):
        sync.Snapshot.take(faulty_url(tmp_path), state(), options=OPTIONS, progress=True)
    (thread,) = drawing()
    terminal.read_on()
    thread.join(30)
    assert not thread.is_alive()


def test_short_calls_get_no_bars(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "_FIRST_S", 60.0)
    terminal.attach()
    sync.Snapshot.take(tmp_path, state(), options=OPTIONS, progress=True)
    assert terminal.text() == ""


@pytest.mark.parametrize("term", ["dumb", None])
def test_elsewhere_lines_are_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    term: str | None,
) -> None:
    """To stderr, whatever the logging is set to."""
    terminal: Terminal | None = None
    if term is not None:
        terminal = request.getfixturevalue("terminal")
        terminal.attach()
        monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(bars, "_LINE_S", 0.05)
    with faulty(throttled):
        snapshot = sync.Snapshot.take(faulty_url(tmp_path), state(), options=OPTIONS, progress=True)
        snapshot.restore(state(), progress=True)
    lines = (capsys.readouterr().err if terminal is None else terminal.text()).splitlines()
    assert len(lines) > 3
    size = r"\S+ \S+ of 4.0 MiB"
    assert any(re.search(f": staging {size}, storing {size}$", x) for x in lines)
    assert re.search(r": reading 4.0 MiB of 4.0 MiB$", lines[-1])
    assert all(str(tmp_path) in line for line in lines)


def test_a_short_call_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sync.Snapshot.take(tmp_path / "s", state(), options=OPTIONS, progress=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("/s: staging 4.0 MiB of 4.0 MiB, storing 4.0 MiB of 4.0 MiB")


def test_a_manager_writes_one_line_per_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app_state = {"a": StateDict(w=torch.zeros(10))}
    settings: Any = {"save": every.steps(1), "options": OPTIONS, "progress": True}
    with CheckpointManager(tmp_path, app_state, **settings) as manager:
        for step in range(3):
            manager.maybe_save(step)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, lines
    assert lines[-1].endswith("2.g1: staging 4.0 KiB of 4.0 KiB, storing 4.0 KiB of 4.0 KiB")


def test_no_stderr_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    sync.Snapshot.take(tmp_path / "s", state(), options=OPTIONS, progress=True)
    assert caplog.records == []


@pytest.mark.usefixtures("forker")
def test_lines_import_no_rich(tmp_path: Path) -> None:
    script = f"""
import sys, torch
from actorsnap import StateDict, sync
from actorsnap.runtime import bars
bars._LINE_S = 0.001
sync.Snapshot.take({str(tmp_path / "a")!r}, {{"s": StateDict(w=torch.zeros(9))}}, progress=True)
print("rich" in sys.modules)
"""
    done = subprocess.run(
        forker.command("-c", script), capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "False"


CELL = ContextVar("CELL", default=0)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """The outputs of a cell, each with its drawings: display messages in the caller's context."""
    outputs: list[list[tuple[str, str]]] = []
    CELL.set(1)

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        drawings: list[tuple[str, str]] = []
        outputs.append(drawings)
        cell = CELL.get()

        def update(bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            assert CELL.get() == cell
            drawings.append((bundle["text/plain"], bundle["text/html"]))

        assert display_id
        update(bundle, raw=raw)
        return SimpleNamespace(update=update)

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(bars, "_NOTEBOOK_S", 0.02)
    return outputs


def test_a_notebook(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    outputs: list[list[tuple[str, str]]],
) -> None:
    """One output, which is updated; no widgets."""
    monkeypatch.setattr(bars, "_FIRST_S", 0.0)
    with faulty(throttled):
        url = faulty_url(tmp_path / "a&b")
        sync.Snapshot.take(url, state(), options=OPTIONS, progress=True)
    (shown,) = outputs
    assert len(shown) > 2
    assert len(shown) == len(dict.fromkeys(shown))
    plain, html = shown[-1]
    assert plain == "a&b staging 4.0 MiB of 4.0 MiB\na&b storing 4.0 MiB of 4.0 MiB"
    assert html.count('"></progress> a&amp;b st') == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("first_s", [0.0, 60.0])
def test_a_manager_in_a_notebook(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outputs: list[list[tuple[str, str]]],
    first_s: float,
) -> None:
    """One output per cell, in which each save is complete in the end."""
    monkeypatch.setattr(bars, "_FIRST_S", first_s)
    settings: Any = {"save": every.steps(1), "options": OPTIONS, "progress": True}
    shell: Any = sys.modules["IPython"].get_ipython()
    shell.execution_count = 1
    with faulty(throttled):
        with CheckpointManager(faulty_url(tmp_path), state(), **settings) as manager:
            manager.maybe_save(0)
            manager.maybe_save(1)
            manager.wait()
            CELL.set(2)
            shell.execution_count = 2
            manager.maybe_save(2)
    first, second = [[text for text, _ in drawings] for drawings in outputs]
    size = "4.0 MiB of 4.0 MiB"
    ends = [
        f"{name} staging {size}\n{name} storing {size}"
        for name in [f"step-000000000{step}.g1" for step in range(3)]
    ]
    assert ends[0] in first
    assert (first[-1], second[-1]) == (ends[1], ends[2])


@pytest.mark.parametrize("waits", [False, True])
def test_a_notebook_shows_the_end_of_a_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outputs: list[list[tuple[str, str]]],
    waits: bool,
) -> None:
    """In each cell that shows the save, and if no call waits for it."""
    monkeypatch.setattr(bars, "_FIRST_S", 0.0)
    shell: Any = sys.modules["IPython"].get_ipython()
    shell.execution_count = 1
    with faulty(throttled):
        pending = sync.Snapshot.async_take(
            faulty_url(tmp_path / "a"), state(), options=OPTIONS, progress=True
        )
        assert not pending.done()
        CELL.set(2)
        shell.execution_count = 2
        if waits:
            pending.wait()
        end = "a staging 4.0 MiB of 4.0 MiB\na storing 4.0 MiB of 4.0 MiB"
        deadline = time.monotonic() + 10
        while {shown[-1][0] for shown in outputs} != {end} and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [shown[-1][0] for shown in outputs] == [end] * (1 + waits)


@pytest.mark.parametrize("first_s", [0.0, 60.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_refused_save_leaves_no_bar(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outputs: list[list[tuple[str, str]]],
    is_async: bool,
    first_s: float,
) -> None:
    monkeypatch.setattr(bars, "_FIRST_S", first_s)
    sync.Snapshot.take(tmp_path, state())
    take = sync.Snapshot.async_take if is_async else sync.Snapshot.take
    for _ in range(2):
        with pytest.raises(actorsnap.ObjectExists):
            take(tmp_path, state(), progress=True)
        monkeypatch.setitem(sys.modules, "IPython", None)  # then with lines
    for thread in drawing():
        thread.join(30)
    assert all(shown[-1] == ("", "") for shown in outputs)
    assert capsys.readouterr().err == ""


def test_a_bad_flag(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="progress must be"):
        sync.Snapshot.take(tmp_path / "a", state(), progress="yes")  # type: ignore[arg-type]
    snapshot = sync.Snapshot.take(tmp_path / "a", state())
    with pytest.raises(UsageError, match="progress must be"):
        snapshot.restore(state(), progress=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="progress must be"):
        snapshot.copy_to(tmp_path / "b", progress=None)  # type: ignore[arg-type]
