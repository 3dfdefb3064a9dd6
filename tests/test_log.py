# SPDX-License-Identifier: Apache-2.0
"""Log lines and applications that have made logging their own."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from actorsnap import Options, SnapshotAborted, StateDict
from actorsnap.log import Log
from actorsnap.runtime.host import Host
from actorsnap.runtime.uploader_client import find_uploader
from actorsnap.sync import Snapshot


class BrokenHandler(logging.Handler):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self._error("this handler is broken")


def end_process(caplog: pytest.LogCaptureFixture) -> None:
    """The next uploader process knows the level of its start."""
    pid = find_uploader(Host.get()).pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)  # it ignores SIGTERM
        deadline = time.monotonic() + 30.0
        while "was killed" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "was killed" in caplog.text
        caplog.clear()


@pytest.fixture
def own_fields() -> Iterator[None]:
    """Each record of the application says its rank, as many trainers have it."""
    before = logging.getLogRecordFactory()

    def make(*args: object, **kwargs: object) -> logging.LogRecord:
        record = before(*args, **kwargs)
        record.rank = "seven"
        return record

    logging.setLogRecordFactory(make)
    yield
    logging.setLogRecordFactory(before)


@pytest.fixture(params=[RuntimeError, SystemExit])
def broken_handler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sees each of our lines."""
    logger, handler = logging.getLogger("actorsnap"), BrokenHandler(request.param)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    logger.setLevel(before)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise self.args[0]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_that_cannot_be_shown_breaks_no_line(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    kind: type[BaseException],
) -> None:
    with caplog.at_level(logging.INFO):
        Log("some").warning("of %d: %s", 3, Unspeakable(kind))
    (record,) = caplog.records
    assert record.getMessage() == f"of 3: <its __str__ raises {kind.__name__}>"
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("own_fields")
def test_fields_of_the_application_stay_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Log("some").info("of %d", 3, extra={"rank": 3, "message": "no", "key": "k"})
    (record,) = caplog.records
    assert record.getMessage() == "of 3"
    assert (vars(record)["rank"], vars(record)["key"]) == ("seven", "k")
    assert (record.filename, record.funcName) == (
        "test_log.py",
        "test_fields_of_the_application_stay_its_own",
    )


def test_what_nobody_wants_is_no_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Log("some").info("of %d", 3)
    assert not caplog.records


def test_a_failure_is_shown_below_its_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("of the day before")
    except RuntimeError as error:
        kept = error
        Log("some").warning("now", exc_info=True)
        Log("some").exception("still")
    Log("some").warning("later", exc_info=kept)
    for record in caplog.records:
        assert record.exc_info is not None
        assert record.exc_info[1] is kept
        assert record.funcName == "test_a_failure_is_shown_below_its_line"
    assert [record.message for record in caplog.records] == ["now", "still", "later"]


@pytest.mark.usefixtures("broken_handler")
def test_a_handler_that_raises_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Log("actorsnap.any").warning("of %d", 3)
    assert "this handler is broken" in capsys.readouterr().err


def test_a_factory_that_raises_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(*args: object, **kwargs: object) -> logging.LogRecord:
        raise RuntimeError("this factory is broken")

    monkeypatch.setattr(logging, "_logRecordFactory", make)
    Log("some").warning("of %d", 3)
    shown = capsys.readouterr().err
    assert "this factory is broken" in shown
    assert "Message: 'of %d'" in shown


@pytest.mark.few(2)
@pytest.mark.usefixtures("broken_handler")
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_saves_and_their_failures_beside_a_handler_that_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], offload: str
) -> None:
    options = Options(offload=offload, fsync=False, timeout_s=60)
    state = {"s": StateDict(w=torch.arange(1 << 18))}
    Snapshot.async_take(tmp_path / "s", state, options=options).wait()
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotAborted):
        Snapshot.async_take(tmp_path / "file" / "s", state, options=options).wait()
    Snapshot.async_take(tmp_path / "again", state, options=options).wait()
    target = {"s": StateDict(w=torch.zeros(1 << 18, dtype=torch.int64))}
    Snapshot(tmp_path / "again").restore(target)
    assert torch.equal(target["s"]["w"], state["s"]["w"])
    assert "this handler is broken" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.usefixtures("own_fields")
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_saves_and_their_failures_are_logged_with_fields_that_records_have_already(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, offload: str
) -> None:
    end_process(caplog)
    options = Options(offload=offload, fsync=False, timeout_s=60)
    state = {"s": StateDict(w=torch.arange(1 << 18))}
    caplog.set_level(logging.WARNING, "actorsnap")
    Snapshot.async_take(tmp_path / "unsaid", state, options=options).wait()
    assert ": committed, " not in caplog.text
    # The process is there already, and hears of it.
    caplog.set_level(logging.INFO, "actorsnap")
    Snapshot.async_take(tmp_path / "s", state, options=options).wait()
    assert ": committed, " in caplog.text
    caplog.set_level(logging.DEBUG, "actorsnap")
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotAborted):
        Snapshot.async_take(tmp_path / "file" / "s", state, options=options).wait()
    assert "given up" not in caplog.text
    assert "uploader process" not in caplog.text


def test_totals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of small states, too; with fields for formatters."""
    state = {"s": StateDict(w=torch.arange(100))}
    caplog.set_level(logging.INFO, "actorsnap")
    snapshot = Snapshot.take(tmp_path / "s", state)
    (saved,) = caplog.records
    assert re.search(r": committed, 4\.\d KiB in \d+\.\d\d s, staged after ", saved.message)
    caplog.clear()
    snapshot.restore(state)
    (restored,) = caplog.records
    attempt = vars(saved)["attempt"]
    assert re.fullmatch(
        rf"snapshot {tmp_path}/s rank 0 attempt {attempt}: restored, 800 B in \d+\.\d\d s",
        restored.message,
    )
    assert (restored.name, restored.levelname) == ("actorsnap.runtime.restore", "INFO")
    found = vars(restored)
    assert (found["snapshot"], found["attempt"]) == (vars(saved)["snapshot"], attempt)
    assert (found["rank"], found["total_bytes"]) == (0, 800)
    assert 0 < found["total_s"] < 60


def test_paths_are_absolute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "actorsnap")
    state = {"s": StateDict(x=1)}
    Snapshot.take("s", state)
    Snapshot.async_take("t", state).wait()
    Snapshot("s").restore(state)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    for line, record, name in zip(lines, caplog.records, "sts", strict=True):
        assert line.startswith(f"snapshot {tmp_path}/{name} rank 0 ")
        assert vars(record)["snapshot"] == f"{tmp_path}/{name}"


def test_an_exception_that_cannot_be_shown() -> None:
    class Unnoted(Exception):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    raised = ""
    try:
        raise Unnoted
    except Unnoted:
        try:
            Log("actorsnap.test").warning("it failed", exc_info=True)
        except RuntimeError as error:
            raised = str(error)
    assert not raised
