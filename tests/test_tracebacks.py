# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of public calls: short, and nothing else of the error is lost."""

from __future__ import annotations

import asyncio
import errno
import gc
import inspect
import logging
import signal
import traceback
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

import actorsnap
from actorsnap import (
    ModelState,
    NotASnapshot,
    ObjectExists,
    Options,
    Snapshot,
    SnapshotAborted,
    StateDict,
    StorageError,
    UsageError,
    from_env,
    manager,
    prime_optimizer,
    sync,
)
from actorsnap.interop import dcp, exports, torchsnapshot, xla
from actorsnap.interop import torch as interop_torch
from actorsnap.manager.sync import CheckpointManager, every, keep, notices
from actorsnap.runtime import host, script, value_reading
from actorsnap.storage import register
from actorsnap.testing import check_resume
from actorsnap.testing.faults import FaultyStorage
from actorsnap.tracebacks import shorten
from tests.api.faults import faulty, faulty_url

STATE = {"model": StateDict(w=torch.ones(3))}
FAST = Options(fsync=False)


def files(error: BaseException) -> set[str]:
    """The files in an error's traceback."""
    return {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


PACKAGE = str(Path(actorsnap.__file__).parent)


def ours(error: BaseException) -> list[str]:
    """Lines that Python prints of frames of actorsnap, also of causes."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    # Of dataclasses, __init__ is in no file.
    return [line for line in lines if PACKAGE in line or 'File "<string>"' in line]


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


class Trainer:
    def __init__(self) -> None:
        self.app_state: dict[str, Any] = {"a": StateDict(x=1)}
        self.num_steps = 0

    def step(self) -> int:
        self.num_steps += 1
        return self.num_steps


TORCH: Any = torch.distributed.checkpoint  # its stubs export little


def planned(path: Path) -> None:
    """Torch's own calls, with a reader of ours."""
    reader = dcp.ActorsnapReader(path / "no")
    TORCH.load({"x": torch.ones(1)}, storage_reader=reader, no_dist=True)


def written(path: Path) -> None:
    writer = dcp.ActorsnapWriter(path / "s", overwrite=False)
    TORCH.save({"x": torch.ones(1)}, storage_writer=writer, no_dist=True)


def missing_metadata(path: Path) -> Any:
    saved = dcp.save({"a": 1}, checkpoint_id=path / "d")
    sync.Snapshot(path / "d").delete()
    return saved.state_dict_metadata


def preempted(path: Path) -> bool:
    checkpoints = xla.CheckpointManager(str(path / "x"), 2, chkpt_on_preemption=False)
    return checkpoints.reached_preemption(1)


def with_blocking(path: Path) -> None:
    with manager.CheckpointManager(path / "m"):
        pass


def managed(path: Path) -> CheckpointManager:
    return CheckpointManager(path / "m", STATE, save=every.steps(1), options=FAST)


FILE = "/etc/passwd"
LAYER = torch.nn.Linear(1, 1)
UNTYPED: Any = 3

MISTAKES: dict[str, Callable[[Path], Any]] = {
    "Options": lambda path: Options(chunk_bytes=-1),
    "Options by name": lambda path: Options(chunk_byte=1),  # type: ignore[call-arg]
    "Options by position": lambda path: Options(16),  # type: ignore[call-arg, arg-type]
    "Options.trace": lambda path: Options(trace="{x}"),
    "Options.compression": lambda path: Options(compression="lz4"),
    "from_env": lambda path: from_env({"ACTORSNAP_VERIFY": "maybe"}),
    "from_env of a number": lambda path: from_env({"ACTORSNAP_CHUNK_BYTES": "3"}),
    "every.steps": lambda path: every.steps(0),
    "every.steps without a number": lambda path: every.steps(),  # type: ignore[call-arg]
    "every.at": lambda path: every.at(["a"]),  # type: ignore[list-item]
    "every.minutes": lambda path: every.minutes(0),
    "every.custom": lambda path: every.custom(UNTYPED),
    "every or": lambda path: every.steps(2) | UNTYPED,
    "keep.last": lambda path: keep.last(-1),
    "keep.best": lambda path: keep.best("loss", "x"),  # type: ignore[arg-type]
    "keep.best of two modes": lambda path: keep.best("loss", UNTYPED, mode="min"),  # type: ignore[misc]
    "keep.thinned": lambda path: keep.thinned(daily=0),
    "keep.thinned by name": lambda path: keep.thinned(dayly=1),  # type: ignore[call-arg]
    "notices.signals": lambda path: notices.signals("SIGFOO"),
    "notices.file": lambda path: notices.file(UNTYPED),
    "notices.gce": lambda path: notices.gce(endpoint="here"),
    "ModelState": lambda path: ModelState(LAYER, UNTYPED),
    "prime_optimizer": lambda path: prime_optimizer(UNTYPED),
    "Snapshot without a path": lambda path: sync.Snapshot(),  # type: ignore[call-arg]
    "take by name": lambda path: sync.Snapshot.take(path, STATE, overwrit=True),  # type: ignore[call-arg]
    "read_object without a path": lambda path: sync.Snapshot(path).read_object(),  # type: ignore[call-arg]
    "take below a file": lambda path: sync.Snapshot.take(f"{FILE}/x", STATE),
    "take to a file": lambda path: sync.Snapshot.take(FILE, STATE),
    "take where no folders can be": lambda path: sync.Snapshot.take("/proc/x", STATE),
    "async_take to a file": lambda path: sync.Snapshot.async_take(FILE, STATE).wait(),
    "guard": lambda path: sync.Snapshot.async_take(path / "g", STATE).guard(UNTYPED),
    "restore of a file": lambda path: sync.Snapshot(FILE).restore(STATE),
    "exists": lambda path: sync.Snapshot(f"{FILE}/x").exists(),
    "copy_to": lambda path: sync.Snapshot(path / "s").copy_to(f"{FILE}/x"),
    "list of a file": lambda path: sync.Snapshot.list(FILE),
    "warm_up": lambda path: sync.warm_up(-1),
    "export of a number": lambda path: exports.export_torch(UNTYPED, path / "x.pt"),
    "export to a file": lambda path: exports.export_torch(sync.Snapshot(path / "s"), f"{FILE}/x"),
    "torch.load to a device": lambda path: interop_torch.load(path / "s", map_location="there"),
    "torchsnapshot of nothing": lambda path: torchsnapshot.Snapshot("no").restore(STATE),
    "torchsnapshot of a number": lambda path: torchsnapshot.Snapshot.take("x", {"a": 3}),
    "torchsnapshot generators": lambda path: torchsnapshot.Snapshot.take(
        "x", {"a": torchsnapshot.RNGState(), "b": torchsnapshot.RNGState()}
    ),
    "torchsnapshot metadata": lambda path: torchsnapshot.Snapshot("no").metadata,
    "torchsnapshot read": lambda path: torchsnapshot.Snapshot(str(path / "s")).read_object("0/x"),
    "torchsnapshot key": lambda path: torchsnapshot.Snapshot(
        str(path / "s")
    ).get_state_dict_for_key("x"),
    "torchsnapshot wait": lambda path: torchsnapshot.Snapshot.async_take(FILE, STATE).wait(),
    "xla": lambda path: xla.CheckpointManager("x", 0),
    "xla preemption": preempted,
    "manager by name": lambda path: CheckpointManager(path, saves=3),  # type: ignore[call-arg]
    "manager with": with_blocking,
    "manager request": lambda path: managed(path).request(""),
    "manager metric": lambda path: managed(path).maybe_save(1, metrics={"loss": torch.ones(2)}),
    "manager steps": lambda path: CheckpointManager(FILE, STATE).steps(),
    "register": lambda path: register("a b", UNTYPED),
    "check_resume": lambda path: check_resume(Trainer, steps=0),
    "check_resume differs": lambda path: check_resume(Trainer),
}
DCP: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: dcp.load({}, checkpoint_id=path / "no"),
    "load without a path": lambda path: dcp.load({}),
    "load of another size": lambda path: dcp.load(
        {"model": {"w": torch.ones(4)}}, checkpoint_id=path / "s"
    ),
    "save": lambda path: dcp.save({"a": object()}, checkpoint_id=path / "d"),
    "save below a file": lambda path: dcp.save({"a": 1}, checkpoint_id=f"{FILE}/x"),
    "save without a path": lambda path: dcp.save({"a": 1}),
    "async_save": lambda path: dcp.async_save({"a": 1}, checkpoint_id=f"{FILE}/x").result(),
    "metadata": missing_metadata,
    "ActorsnapWriter": lambda path: dcp.ActorsnapWriter(UNTYPED),
    "ActorsnapReader": lambda path: dcp.ActorsnapReader(UNTYPED),
    "install": lambda path: dcp.install(optoins=FAST),
    "load of torch": planned,
    "save of torch": written,
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


@pytest.mark.parametrize("call", MISTAKES)
def test_mistakes(there: Path, call: str) -> None:
    with pytest.raises(Exception, match=".") as raised:
        MISTAKES[call](there)
    assert files(raised.value) == MINE
    assert ours(raised.value) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("call", DCP)
def test_calls_of_dcp(there: Path, call: str) -> None:
    with pytest.raises((CheckpointException, UsageError, NotASnapshot)) as raised:
        DCP[call](there)
    assert ours(raised.value) == []


def test_errors_in_a_checkpoint_exception(there: Path) -> None:
    with pytest.raises(CheckpointException) as raised:
        dcp.load({}, checkpoint_id=there / "no")
    error, stack = raised.value.failures[0]
    assert isinstance(error, NotASnapshot)
    assert error is raised.value.__cause__
    assert isinstance(stack, traceback.StackSummary)
    assert str(raised.value).startswith("NotASnapshot: ")


@pytest.mark.parametrize("call", ASYNC)
async def test_async_calls(there: Path, call: str) -> None:
    async def awaited() -> None:
        await ASYNC[call](there)

    with pytest.raises((NotASnapshot, ObjectExists)) as raised:
        await awaited()
    assert files(raised.value) == MINE
    assert names(raised.value)[-1] == "awaited"


async def not_awaited(path: Path) -> Any:
    with closing(Snapshot(path / "s").keys()) as keys:
        return keys[0]  # type: ignore[index]


async def not_awaited_attribute(path: Path) -> Any:
    with closing(Snapshot(path / "s").keys()) as keys:
        return keys.count  # type: ignore[attr-defined]


async def with_async(path: Path) -> None:
    blocking: Any = managed(path)
    async with blocking:
        pass


async def at_exit(path: Path) -> None:
    last: Any = StateDict(x=object())
    async with manager.CheckpointManager(path / "m", save=every.last(), options=FAST) as saver:
        await saver.maybe_save(1, app_state={"a": last})


ASYNC_MISTAKES: dict[str, Callable[[Path], Awaitable[Any]]] = {
    "take by name": lambda path: Snapshot.take(path, STATE, overwrit=1),  # type: ignore[call-arg]
    "take to a file": lambda path: Snapshot.take(FILE, STATE),
    "warm_up": lambda path: actorsnap.warm_up(-1),
    "export": lambda path: exports.export_torch(Snapshot(path / "no"), path / "x.pt"),
    "manager": at_exit,
    "manager of actorsnap.manager.sync": with_async,
    "not awaited": not_awaited,
    "not awaited attribute": not_awaited_attribute,
}


@pytest.mark.parametrize("call", ASYNC_MISTAKES)
async def test_async_mistakes(there: Path, call: str) -> None:
    with pytest.raises(Exception, match=".") as raised:
        await ASYNC_MISTAKES[call](there)
    assert files(raised.value) == MINE
    assert ours(raised.value) == []


def test_policies_look_as_before() -> None:
    assert str(inspect.signature(every.steps)) == "(n: 'int', offset: 'int' = 0) -> None"
    assert str(inspect.signature(every.steps.__init__)).startswith("(self, n: 'int'")
    assert str(inspect.signature(keep.thinned)).startswith("(*, hourly: 'int | None' = None")
    for call, name in (("keep.best", "__init__"), ("every.steps", "__init__")):
        holder, _, policy = call.partition(".")
        with pytest.raises(TypeError) as raised:
            getattr({"keep": keep, "every": every}[holder], policy)()
        assert str(raised.value).startswith(f"{call}.{name}() missing")


def test_misspelt_arguments() -> None:
    with pytest.raises(TypeError, match=r"argument 'overwite'; did you mean 'overwrite'\?"):
        sync.Snapshot.take("x", {}, overwite=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'sav'; did you mean 'save'\?"):
        CheckpointManager("x", {}, sav=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'every'; did you mean 'save'\?"):
        CheckpointManager("x", {}, every=50)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'save_every'; did you mean 'save'\?"):
        CheckpointManager("x", {}, save_every=50)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'loss'; did you mean metrics={'loss': ...}\?"):
        CheckpointManager("x", {}).maybe_save(0, loss=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"were given; did you mean metrics={...}\?"):
        CheckpointManager("x", {}).maybe_save(0, {"loss": 1.0})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'metadat'; did you mean 'metadata'\?"):
        CheckpointManager("x", {}).save(0, metadat={})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'dtype'; did you mean 'cast'\?"):
        sync.Snapshot("x").restore({}, dtype=torch.bfloat16)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'dtype'$"):
        sync.Snapshot("x").read_object("x", dtype=torch.bfloat16)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'device'$"):
        sync.Snapshot("x").read_object("x", device=1)  # type: ignore[call-arg]


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


def test_one_exception_is_shown(tmp_path: Path) -> None:
    """Or two, where the documentation promises the second."""
    (tmp_path / "file").write_text("mine")
    snapshot = sync.Snapshot.take(tmp_path / "s", {"model": StateDict(w=torch.ones(2))})
    with pytest.raises(StorageError) as raised:
        snapshot.export_hf(tmp_path / "file", key="model")
    assert shown(raised.value) == [StorageError]
    assert isinstance(raised.value.__context__, NotADirectoryError)
    with pytest.raises(NotASnapshot) as absent, CheckpointManager(tmp_path / "file", STATE) as m:
        m.restore_latest()
    assert shown(absent.value) == [NotASnapshot]
    with pytest.raises(SnapshotAborted) as aborted:
        sync.Snapshot.take(tmp_path / "file", STATE)
    assert shown(aborted.value) == [SnapshotAborted, StorageError]
    assert aborted.value.__cause__ is not None
    number = getattr(aborted.value.__cause__.__context__, "errno", None)
    assert number == errno.ENOTDIR


@pytest.mark.parametrize("content", ["", "mine"])
@pytest.mark.parametrize("call", ["maybe_save", "restore_latest"])
def test_no_group_is_in_the_context(tmp_path: Path, content: str, call: str) -> None:
    """IPython would show its own frames."""
    file = tmp_path / "file"
    file.write_text(content)
    manager = CheckpointManager(file, STATE, save=every.steps(1))
    with pytest.raises(NotASnapshot, match="so is a run: check the path") as raised:
        getattr(manager, call)(*([1] if call == "maybe_save" else []))
    each: BaseException | None = raised.value
    while each is not None:
        assert not isinstance(each, BaseExceptionGroup)
        each = each.__context__


def shown(error: BaseException) -> list[type[BaseException]]:
    """The classes of the exceptions that a traceback shows, the error's own first."""
    found = []
    each: BaseException | None = error
    while each is not None:
        found.append(type(each))
        each = each.__cause__ if each.__suppress_context__ else each.__context__
    text = "".join(traceback.format_exception(error))
    assert text.count("The above exception") + text.count("During handling") == len(found) - 1
    return found


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


class Interrupting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_a_line_is_logged(there: Path, caplog: pytest.LogCaptureFixture) -> None:
    handler = Interrupting()
    caplog.set_level(logging.INFO, "actorsnap")
    logging.getLogger("actorsnap").addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            sync.Snapshot(there / "s").restore({"model": StateDict(w=torch.ones(3))})
    finally:
        logging.getLogger("actorsnap").removeHandler(handler)
    assert names(raised.value) == ["test_an_interrupt_while_a_line_is_logged", "emit"]


@pytest.mark.parametrize("saved", [torch.nn.Linear(2, 2), Path("a"), None])
def test_a_file_that_is_refused(tmp_path: Path, saved: object) -> None:
    path = tmp_path / "x.pt"
    if saved is None:
        path.write_text("no checkpoint")
    else:
        torch.save(saved, path)
    with pytest.raises((UsageError, NotASnapshot)) as raised:
        sync.Snapshot(path).read_object("model")
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("Traceback") == 1
    assert "direct cause" not in text
    assert not ours(raised.value)


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


OURS: dict[str, Any] = {"__name__": "actorsnap.made", "UsageError": UsageError}
exec(
    """
def fail(kind):
    raise kind("inside")

def translate(cause, *, to=UsageError):
    try:
        fail(cause)
    except Exception as error:
        raise to("outside") from error

def handle(first, second):
    try:
        fail(first)
    except Exception:
        fail(second)

def translate_handled(first, second):
    try:
        handle(first, second)
    except Exception as error:
        raise UsageError("outside") from error

def on_purpose():
    raise TypeError("outside") from None
""",
    OURS,
)


def made(name: str, *args: Any, **kwargs: Any) -> BaseException:
    """The shortened error of a call to a made-up part of actorsnap."""
    with pytest.raises(Exception, match=".") as raised:
        OURS[name](*args, **kwargs)
    shorten(raised.value)
    return raised.value


def test_causes() -> None:
    error = made("translate", FileNotFoundError)
    assert error.__cause__ is None
    assert isinstance(error.__context__, FileNotFoundError)
    assert names(error) == ["made"]
    assert names(error.__context__) == []
    error = made("translate", KeyError)
    assert error.__cause__ is not None
    assert names(error) == ["made"]
    assert names(error.__cause__) == ["translate", "fail"]


def test_contexts() -> None:
    error = made("translate_handled", FileNotFoundError, NotADirectoryError).__context__
    assert isinstance(error, NotADirectoryError)
    assert isinstance(error.__context__, FileNotFoundError)
    assert names(error) == names(error.__context__) == []
    error = made("translate_handled", KeyError, NotADirectoryError).__cause__
    assert isinstance(error, NotADirectoryError)
    assert isinstance(error.__context__, KeyError)
    assert names(error.__context__) == ["handle", "fail"]


def test_other_classes() -> None:
    """They are translations, or on purpose, if raised ``from``."""
    assert names(made("translate", UsageError, to=RuntimeError)) == ["made"]
    assert names(made("on_purpose")) == ["made"]
    assert names(made("fail", RuntimeError)) == ["made", "fail"]
    assert names(made("fail", FileNotFoundError)) == ["made", "fail"]


def test_a_bug_in_a_task_group_keeps_all_frames() -> None:
    with pytest.raises(KeyError) as raised:
        OURS["fail"](KeyError)
    group = ExceptionGroup("of tasks", [raised.value])
    error = script._unwrap_group(group)
    assert error is raised.value
    assert error.__cause__ is group
    shorten(error)
    assert names(error)[-1] == "fail"
