# SPDX-License-Identifier: Apache-2.0
"""Errors of a first day with actorsnap: each tells what to do next."""

from __future__ import annotations

import argparse
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import actorsnap
from actorsnap import (
    ActorSnapError,
    ChecksumMismatch,
    IncompatibleState,
    ObjectExists,
    Options,
    SnapshotAborted,
    StateDict,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.manager.sync import CheckpointManager, every
from actorsnap.state.optim import ModelState
from actorsnap.sync import Snapshot
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url

FAST = Options(fsync=False)


# A state that is no dict -------------------------------------------------------------------------


class Loose:
    """A stateful whose state is no dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


LOOSE: dict[str, tuple[Any, str]] = {
    "int": (3, "the value 3"),
    "long text": ("a" * 9000, "a str"),
    "number": (1.5, "the value 1.5"),
    "list": ([1, 2], "a list"),
    "tensor": (torch.ones(2), "a tensor"),
}


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize("make", [StateDict, None])
def test_a_value_is_not_loaded_as_a_dict(
    tmp_path: Path, name: str, make: Callable[..., Any] | None
) -> None:
    value, shown = LOOSE[name]
    Snapshot.take(tmp_path / "s", {"epoch": Loose(value), "a": StateDict(x=1)}, options=FAST)
    snapshot = Snapshot(tmp_path / "s")
    first = StateDict(x=0)
    target = StateDict(epoch=0) if make is StateDict else ModelState(torch.nn.Linear(1, 1), [])
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"a": first, "epoch": target})
    (line,) = caught.value.mismatched
    assert line == (
        f"epoch: {shown} in the snapshot, not a dict; read it with snapshot.read_object('epoch')"
    )
    assert caught.value.is_untouched
    assert first["x"] == 0
    report = snapshot.restore({"a": first, "epoch": target}, strict=False)
    assert report.mismatched == (line,)
    assert first["x"] == 1
    loose = Loose(None)
    snapshot.restore({"epoch": loose})
    assert type(loose.state) is type(value)


def test_a_value_of_a_file_of_torch_is_not_loaded_as_a_dict(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "model": {"w": torch.ones(1)}}, tmp_path / "old.pt")
    progress = StateDict(epoch=0)
    with pytest.raises(IncompatibleState, match=r"epoch: the value 3 in the snapshot, not a dict"):
        Snapshot(tmp_path / "old.pt").restore({"epoch": progress})
    assert progress == {"epoch": 0}


# Classes that are gone or changed ----------------------------------------------------------------


class Own:
    pass


@dataclass
class Cfg:
    m: int = 1


def test_a_class_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = Options(fsync=False, allow_pickle=True)
    Snapshot.take(tmp_path / "s", {"x": StateDict(o=Own())}, options=trusting)
    monkeypatch.delattr(f"{__name__}.Own")
    snapshot = Snapshot(tmp_path / "s", options=trusting)
    text = (
        f"x/o: it was pickled from {__name__}.Own, which cannot be found: define or import it "
        "before you restore, or restore other keys"
    )
    for call in (lambda: snapshot.restore({"x": StateDict()}), lambda: snapshot.read_object("x/o")):
        with pytest.raises(UnsupportedFormat) as caught:
            call()
        assert str(caught.value).startswith(text)


def test_a_module_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = Options(fsync=False, allow_pickle=True)
    (tmp_path / "gone_by_then.py").write_text("class Own: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    gone: Any = __import__("gone_by_then")
    Snapshot.take(tmp_path / "s", {"x": StateDict(o=gone.Own())}, options=trusting)
    (tmp_path / "gone_by_then.py").unlink()
    monkeypatch.delitem(sys.modules, "gone_by_then")
    with pytest.raises(UnsupportedFormat, match=r"x/o: .* the module gone_by_then, which cannot"):
        Snapshot(tmp_path / "s", options=trusting).restore({"x": StateDict()})


@pytest.mark.parametrize("is_inline", [False, True])
def test_a_field_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_inline: bool
) -> None:
    @dataclass
    class Old:
        m: int = 1
        n: int = 2

    Old.__module__, Old.__qualname__ = __name__, "Cfg"
    value = {(0,): Old()} if is_inline else Old()
    Snapshot.take(tmp_path / "s", {"x": StateDict(c=value)}, options=FAST)
    snapshot = Snapshot(tmp_path / "s", options=Options(allowed_types=[Cfg]))
    with pytest.raises(UsageError) as caught:
        snapshot.restore({"x": StateDict()})
    text = str(caught.value)
    assert f"'x/c' is a {__name__}.Cfg, which no longer has the field 'n': add it back" in text
    assert "read the saved fields with read_object, without allowed_types" in text
    assert "Pass the classes" not in text
    assert Snapshot(tmp_path / "s").read_object("x/c") is not None


# Values that are not saved -----------------------------------------------------------------------


def _generator() -> Iterator[int]:
    yield 1


UNPICKLABLE: dict[str, Any] = {
    "lambda": lambda: 0,
    "lock": threading.Lock(),
    "generator": _generator(),
}


def _refusal(tmp_path: Path, **values: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Snapshot.take(tmp_path / "s", {"x": StateDict(**values)}, options=FAST)
    return str(caught.value)


@pytest.mark.parametrize("name", UNPICKLABLE)
@pytest.mark.parametrize("is_nested", [False, True])
def test_pickle_is_offered_only_where_it_works(tmp_path: Path, name: str, is_nested: bool) -> None:
    value = UNPICKLABLE[name]
    text = _refusal(tmp_path, v={(0,): value} if is_nested else value)
    assert "'x/v'" in text
    assert "leave it out of the state dict" in text
    assert "allow_pickle" not in text


def test_an_open_file_is_left_out(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file:
        text = _refusal(tmp_path, v=file)
    assert "has the type _io.TextIOWrapper" in text
    assert "leave it out of the state dict" in text
    assert "allow_pickle" not in text


def test_a_value_has_a_type(tmp_path: Path) -> None:
    text = _refusal(tmp_path, v=argparse.Namespace(lr=1))
    assert "'x/v' has the type argparse.Namespace, which needs pickle" in text
    assert "allow_pickle=True" in text


@pytest.mark.parametrize(
    ("stateful", "name"),
    [
        (torch.nn.Linear(1, 1), "model"),
        (torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), "optimizer"),
    ],
)
def test_a_stateful_belongs_into_the_app_state(tmp_path: Path, stateful: Any, name: str) -> None:
    text = _refusal(tmp_path, v=stateful)
    kind = "module" if name == "model" else "optimizer"
    assert f'put the {kind} itself into the app state: {{"{name}": {kind}}}' in text
    assert "allow_pickle" not in text
    text = _refusal(tmp_path, v=Loose(1))
    assert "put it itself into the app state, under a key of its own, or allow pickle" in text


# Words -------------------------------------------------------------------------------------------


def test_one_pickled_leaf(tmp_path: Path) -> None:
    trusting = Options(fsync=False, allow_pickle=True)
    Snapshot.take(tmp_path / "s", {"x": StateDict(o=Own())}, options=trusting)
    with pytest.raises(UsageError, match="^1 leaf is pickled, and unpickling"):
        Snapshot(tmp_path / "s").restore({"x": StateDict()})


# Whole modules in files of torch.save ------------------------------------------------------------


def _whole(file: Path, kind: str) -> str:
    return (
        f"{file.name} holds a whole module ({kind}), not a state dict. If you trust the file: "
        f"torch.save(torch.load('{file}', weights_only=False).state_dict(), 'state.pt')"
    )


class Net(torch.nn.Linear):
    pass


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("allow_pickle", [True, False])
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_whole_module_in_a_file(
    tmp_path: Path, is_zip: bool, allow_pickle: bool, is_allowed: bool
) -> None:
    modules = {
        "a.pt": (torch.nn.Sequential(torch.nn.Linear(1, 1)), "torch.nn.Sequential"),
        "b.pt": (Net(1, 1), f"{__name__}.Net"),
    }
    options = Options(allow_pickle=allow_pickle)
    with torch.serialization.safe_globals([torch.nn.Sequential, Net] if is_allowed else []):
        for file, (module, kind) in modules.items():
            torch.save(module, tmp_path / file, _use_new_zipfile_serialization=is_zip)
            with pytest.raises(UsageError) as caught:
                Snapshot(tmp_path / file, options=options).restore({"model": module})
            assert str(caught.value) == _whole(tmp_path / file, kind)
            saved = {"model": module, "epoch": 1}
            torch.save(saved, tmp_path / file, _use_new_zipfile_serialization=is_zip)
            with pytest.raises(UsageError) as caught:
                Snapshot(tmp_path / file, options=options).restore({"model": module})
            text = str(caught.value)
            assert f"{file} holds a whole module ({kind}) among its values" in text
            assert f"torch.load('{tmp_path / file}', weights_only=False)" in text


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_whole_module_whose_class_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_zip: bool
) -> None:
    """As in the shell, or in a notebook that does not define it yet."""

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

    Stack.__qualname__ = "Stack"
    monkeypatch.setitem(globals(), "Stack", Stack)
    path = tmp_path / "a.pt"
    torch.save(Stack(), path, _use_new_zipfile_serialization=is_zip)
    monkeypatch.delitem(globals(), "Stack")
    with pytest.raises(UsageError) as caught:
        Snapshot(path).keys()
    assert str(caught.value) == _whole(path, f"{__name__}.Stack")


def test_a_whole_module_in_an_object_store(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1), tmp_path / "a.pt")
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/whole/pytorch_model.bin", (tmp_path / "a.pt").read_bytes())
    with pytest.raises(UsageError, match="download it: torch.save") as caught:
        Snapshot("fsspec+memory://whole").keys()
    assert "torch.load('pytorch_model.bin', weights_only=False)" in str(caught.value)


def test_modules_without_tensors_are_values(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "loss": torch.nn.MSELoss()}, tmp_path / "a.pt")
    snapshot = Snapshot(tmp_path / "a.pt", options=Options(allow_pickle=True))
    assert type(snapshot.read_object("loss")) is torch.nn.MSELoss


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)


def test_tensors_in_other_objects_have_a_place(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "x": [Holder()]}, tmp_path / "a.pt")
    with pytest.raises(UsageError) as caught:
        Snapshot(tmp_path / "a.pt", options=Options(allow_pickle=True)).keys()
    assert str(caught.value) == (
        f"a.pt: there are tensors inside of 'x/0' ({__name__}.Holder), which cannot be read "
        "without loading the file: load it with torch.load, and save these tensors in dicts or "
        "lists"
    )


# Tracebacks --------------------------------------------------------------------------------------


def test_a_damaged_byte_shows_no_frames_of_actorsnap(tmp_path: Path) -> None:
    state = {f"x{n}": StateDict(w=torch.full((5000,), float(n))) for n in range(3)}
    Snapshot.take(tmp_path / "s", state, options=FAST)
    (file,) = (tmp_path / "s").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    for at in range(5000, len(data), 4096):
        data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumMismatch) as caught:
        Snapshot(tmp_path / "s").restore(state)
    text = "".join(traceback.format_exception(caught.value))
    assert "sub-exception" not in text
    assert "/actorsnap/" not in text.replace("/tests/", "")
    assert text.count("\n") < 20


# Storages ----------------------------------------------------------------------------------------


def test_a_package_that_a_storage_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    with pytest.raises(ActorSnapError) as caught:
        Snapshot.take("hdfs://x/y", {"x": StateDict(a=1)})
    assert "hdfs:// needs the package pyarrow: pip install pyarrow" in str(caught.value)


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"x": StateDict(w=torch.ones(500_000))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(SnapshotAborted) as caught:
            Snapshot.take(tmp_path / "s", state, options=FAST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large: this process may write files of at most 1048576 bytes" in str(
        caught.value
    )
    assert "ulimit -f" in str(caught.value)


def test_the_loser_of_two_saves_learns_what_to_do(tmp_path: Path) -> None:
    state = {"x": StateDict(a=1)}

    class Meanwhile(FaultyStorage):
        async def put_if_absent(self, key: str, data: bytes) -> None:
            if key == "actorsnap.json":
                await actorsnap.Snapshot.take(tmp_path / "s", state, options=FAST)
            await super().put_if_absent(key, data)

    with faulty(Meanwhile), pytest.raises(ObjectExists) as caught:
        Snapshot.take(faulty_url(str(tmp_path / "s")), state, options=FAST)
    text = "another snapshot was committed at this path in the meantime. Save to another path, or "
    assert f"{text}pass overwrite=True" in str(caught.value)


def test_a_run_does_not_go_back_for_a_class_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting = Options(fsync=False, allow_pickle=True)
    state = {"x": StateDict(o=1)}
    with CheckpointManager(tmp_path, state, save=every.steps(1), options=trusting) as manager:
        manager.maybe_save(1)
        state["x"]["o"] = Own()
        manager.maybe_save(2)
    monkeypatch.delattr(f"{__name__}.Own")
    with (
        CheckpointManager(tmp_path, state, save=every.steps(1), options=trusting) as manager,
        pytest.raises(UnsupportedFormat, match="which cannot be found"),
    ):
        manager.restore_latest()
