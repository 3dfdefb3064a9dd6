# SPDX-License-Identifier: Apache-2.0
"""``export_torch`` and ``export_dcp``: what stock torch reads again, and what is refused."""

from __future__ import annotations

import copy
import datetime
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from actorsnap import ChecksumMismatch, ObjectExists, Options, Snapshot, StateDict, UsageError, sync
from actorsnap.interop import dcp, torch_archives
from actorsnap.interop.exports import export_dcp, export_torch
from actorsnap.storage.wrapper import Wrapper
from tests.api.faults import faulty, faulty_url
from tests.formats.checkpoints import training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    assert type(found) is type(wanted), path
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride()), path
        assert found.requires_grad == wanted.requires_grad, path
        assert torch.equal(found, wanted), path
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for number, each in enumerate(wanted):
            assert_same(found[number], each, f"{path}/{number}")
    else:
        assert found == wanted, path


def odd_state() -> dict[str, Any]:
    big = torch.arange(100.0).view(10, 10)
    return {
        "a": big,
        "b": big.t(),
        "c": big[2:4, 1:3],
        "u16": torch.ones(3, dtype=torch.uint16),
        "f8": torch.ones(5).to(torch.float8_e4m3fn),
        "c64": torch.ones(2, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "zero": torch.tensor(4.0),
        "none": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "frozen": torch.nn.Parameter(torch.ones(4), requires_grad=False),
        "bytes": b"abc",
        "array": bytearray(b"x"),
        "tuple": (1, "x" * 10_000, None, [True, 2.5, -(1 << 80)]),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "list": [torch.ones(2), {"q": 2, 3: "int"}],
        "ordered": OrderedDict(x=1),
        "empty": {},
    }


async def test_torch_round_trip(tmp_path: Path) -> None:
    _, _, saved = training_state()
    saved |= {"odd": odd_state()}
    torch.save(saved, tmp_path / "x.pt")
    await Snapshot(tmp_path / "x.pt").copy_to(tmp_path / "s")
    report = await export_torch(Snapshot(tmp_path / "s"), tmp_path / "y.pt")
    assert report.files == ("y.pt",)
    assert report.nbytes == (tmp_path / "y.pt").stat().st_size
    for mmap in (False, True):
        found = torch.load(tmp_path / "y.pt", weights_only=True, mmap=mmap)
        assert_same(found, saved)
        shared = {found["odd"][name].untyped_storage().data_ptr() for name in "abc"}
        assert len(shared) == 1
    with zipfile.ZipFile(tmp_path / "y.pt") as file:
        assert file.testzip() is None
        assert sum(info.file_size for info in file.infolist()) < report.nbytes
    # Read by our own reader, too.
    assert_same(await Snapshot(tmp_path / "y.pt").get_state_dict_for_key("odd"), saved["odd"])
    await export_torch(Snapshot(tmp_path / "s"), tmp_path / "z.pt", key="model")
    assert_same(torch.load(tmp_path / "z.pt"), OrderedDict(saved["model"]))


async def test_large_storages_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut, out of order, in little memory; and with the records of 64-bit zip files."""
    monkeypatch.setattr(torch_archives, "_SMALL", 3 << 20)
    state = {f"w{n}": torch.randn((1 << 20) + n) for n in range(5)} | {"s": torch.ones(3)}
    options = Options(chunk_bytes=2 << 20, memory_budget_bytes=4 << 20, compression="zstd")
    snapshot = await Snapshot.take(tmp_path / "s", {"model": StateDict(state)}, options=options)
    await export_torch(snapshot, tmp_path / "y.pt", key="model")
    assert_same(torch.load(tmp_path / "y.pt", mmap=True), state)
    with zipfile.ZipFile(tmp_path / "y.pt") as file:
        assert file.testzip() is None


def dcp_load(target: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(target, checkpoint_id=path)


async def test_dcp_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorsnap.interop.exports._MAX_FILE_BYTES", 4000)
    _, _, saved = training_state()
    _, _, target = training_state(1)
    odd = odd_state()
    for name in ("f8", "empty", "list", "array", "c64", "ordered"):
        del odd[name]
    saved |= {"odd": odd, "epoch": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(saved, checkpoint_id=tmp_path / "theirs")
    await Snapshot(tmp_path / "theirs").copy_to(tmp_path / "s")
    report = await export_dcp(Snapshot(tmp_path / "s"), tmp_path / "ours")
    assert len(report.files) > 2
    target |= {
        "odd": {
            k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in odd.items()
        }
    }
    dcp_load(target, tmp_path / "ours")
    mine, theirs = (
        FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs")
    )
    assert mine.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert mine.planner_data == theirs.planner_data
    assert target["epoch"] == 7
    assert all(torch.equal(target["model"][n], t) for n, t in saved["model"].items())
    for name, value in odd.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(target["odd"][name], value), name
        else:
            assert target["odd"][name] == value


@pytest.mark.parametrize("how", ["changed import", "writer", "stock"])
@pytest.mark.parametrize("kind", ["flat", "sections", "torchtitan"])
def test_a_save_of_dcp_is_exported_under_its_names(tmp_path: Path, how: str, kind: str) -> None:
    """Leaves of the top level are below a key in the snapshot, and at the top level again here."""
    model, optimizer, _ = training_state()
    state: dict[str, Any] = {**model.state_dict()}
    if kind == "sections":
        state = {"model": state, "step": 5, "io": BytesIO(b"content"), "mean": torch.ones(2)}
    elif kind == "torchtitan":  # the model's tensors at the top level, next to sections
        state["train_state"] = {"step": torch.tensor(5), "loader": b"place"}
    path = tmp_path / "s"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=tmp_path / "theirs")
        if how == "changed import":
            dcp.save(state, checkpoint_id=path)
        elif how == "writer":
            save(state, storage_writer=dcp.ActorsnapWriter(path))
        else:
            path = tmp_path / "theirs"
    snapshot = sync.Snapshot(path)
    export_dcp(snapshot, tmp_path / "ours")
    mine, theirs = (
        FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs")
    )
    assert mine.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert mine.planner_data == theirs.planner_data
    found: dict[str, Any] = {
        key: {name: torch.zeros_like(each) for name, each in value.items()}
        if key == "model"
        else copy.deepcopy(value)
        for key, value in state.items()
    }
    found |= {"step": 0, "io": None} if kind == "sections" else {}
    dcp_load(found, tmp_path / "ours")
    export_torch(snapshot, tmp_path / "x.pt")
    whole = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.keys() == state.keys() == whole.keys()
    if kind == "sections":
        assert found.pop("io").getvalue() == state.pop("io").getvalue()
        assert whole.pop("io") == ("actorsnap.BytesIO", b"content")
    for each in (found, whole):
        assert_same({key: each[key] for key in state}, state)
    snapshot.export_hf(tmp_path / "hf", {"sections": "model"}.get(kind, snapshot_key(how)))
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == model.state_dict().keys()


class Place(NamedTuple):
    x: int


def snapshot_key(how: str) -> str:
    """Returns the key of leaves of the top level."""
    return "model" if how == "stock" else "dcp"


def test_a_rename_puts_leaves_of_the_top_level_elsewhere(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "a": {"x": 1}}, checkpoint_id=tmp_path / "s")
    snapshot = sync.Snapshot(tmp_path / "s")
    export_torch(snapshot, tmp_path / "x.pt", rename={"dcp": "model"})
    assert torch.load(tmp_path / "x.pt").keys() == {"a", "model"}
    export_torch(snapshot, tmp_path / "y.pt", key="dcp")
    assert torch.load(tmp_path / "y.pt").keys() == {"w"}
    with pytest.raises(UsageError, match="'a' is a key of the snapshot, and of a leaf below 'dcp'"):
        export_torch(snapshot, tmp_path / "z.pt", rename={"dcp/w": "dcp/a"})


def test_hugging_face_without_the_key_of_a_flat_state_dict(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "s")
    snapshot = sync.Snapshot(tmp_path / "s")
    with pytest.raises(UsageError) as caught:
        snapshot.export_hf(tmp_path / "hf")
    assert str(caught.value) == (
        "pass the model's key in key= (on the command line --key): the snapshot has no path "
        "'model'; it has 'dcp'"
    )
    with pytest.raises(UsageError, match="it has 'dcp'$"):
        snapshot.export_hf(tmp_path / "hf", key="no")


@pytest.mark.parametrize("export", [export_torch, export_dcp])
def test_only_the_refused_leaf_of_the_top_level_is_left_out(tmp_path: Path, export: Any) -> None:
    state = {"w": torch.ones(2), "at": Place(1)}
    dcp.save(state, checkpoint_id=tmp_path / "s")
    with pytest.raises(UsageError, match="'dcp/at' is a .*--leave-out dcp/at;"):
        export(sync.Snapshot(tmp_path / "s"), tmp_path / "x")


@pytest.mark.parametrize("export", [export_torch, export_dcp, sync.Snapshot.export_hf])
def test_a_layer_of_a_module(tmp_path: Path, export: Any) -> None:
    layers = {"encoder": torch.nn.Linear(2, 2), "encoder2": torch.nn.Linear(2, 2)}
    sync.Snapshot.take(tmp_path / "s", {"model": torch.nn.ModuleDict(layers)})
    export(sync.Snapshot(tmp_path / "s"), tmp_path / "x", key="model/encoder")
    saved = layers["encoder"].state_dict()
    found: Any = {name: torch.zeros_like(each) for name, each in saved.items()}
    if export is export_torch:
        found = torch.load(tmp_path / "x", weights_only=True)
    elif export is export_dcp:
        dcp_load(found, tmp_path / "x")
    else:
        found = load_file(tmp_path / "x" / "model.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(saved.items())))


@pytest.mark.parametrize("export", [export_torch, export_dcp])
def test_a_path_below_a_key(tmp_path: Path, export: Any) -> None:
    """As for Hugging Face: of a ``ModelState``, only the model."""
    state = {"model": {"a/b": torch.ones(2), "c": torch.zeros(3)}, "optim": {"x": torch.ones(1)}}
    sync.Snapshot.take(tmp_path / "s", {"train": StateDict(state)})
    snapshot = sync.Snapshot(tmp_path / "s")
    export(snapshot, tmp_path / "out" / "x", key="train/model")
    found = {name: torch.full_like(each, 7) for name, each in state["model"].items()}
    if export is export_torch:
        found = torch.load(tmp_path / "out" / "x", weights_only=True)
    else:
        dcp_load(found, tmp_path / "out" / "x")
    assert_same(found, state["model"])
    for key, hint in [("train/modle", "did you mean 'train/model'"), ("no", "it has 'train'")]:
        with pytest.raises(UsageError, match=f"the snapshot has no path '{key}'; {hint}"):
            export(snapshot, tmp_path / "out" / "y", key=key)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (datetime.date(2026, 1, 1), "date"),
        (np.ones(2), "numpy array"),
        (torch.eye(3).to_sparse(), "sparse"),
        (slice(1, 2), "slice"),
        (torch.channels_last, "memory_format"),
    ],
)
@pytest.mark.parametrize("export", [export_torch, export_dcp])
async def test_refused_before_a_byte(tmp_path: Path, value: Any, what: str, export: Any) -> None:
    state = {"good": StateDict(w=torch.ones(3)), "bad": StateDict(deep=[{"odd": value}])}
    options = Options(allow_pickle=True)
    snapshot = await Snapshot.take(tmp_path / "s", state, options=options)
    (tmp_path / "older").mkdir()
    older = tmp_path / "older" / ".metadata"
    older.write_bytes(b"older")
    path = tmp_path / "older" if export is export_dcp else older
    with pytest.raises(UsageError, match="bad/deep/0/odd"):
        await export(snapshot, path, overwrite=True)
    assert older.read_bytes() == b"older"
    with pytest.raises(ObjectExists, match="overwrite"):
        await export(snapshot, path, key="good")
    await export(snapshot, path, key="good", overwrite=True)
    assert older.read_bytes() != b"older"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    snapshot = sync.Snapshot.take(tmp_path / "s", {"model": StateDict(w=torch.ones(2))})
    (tmp_path / "empty").mkdir()
    urls = (f"{tmp_path}/new/", tmp_path / "empty", f"file://{tmp_path}/empty", "memory://a/b/")
    for folder in urls:
        for overwrite in (False, True):
            with pytest.raises(UsageError, match=r"is a folder.*name the file.*/model\.pt"):
                export_torch(snapshot, folder, overwrite=overwrite)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "s"]


@pytest.mark.parametrize("export", [export_torch, export_dcp])
def test_damage_is_found(tmp_path: Path, export: Any) -> None:
    snapshot = sync.Snapshot.take(tmp_path / "s", {"model": StateDict(w=torch.randn(1 << 19))})
    (data,) = (tmp_path / "s").rglob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="'model/w'"):
        export(snapshot, tmp_path / "out" / "x")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_what_opens_the_file_is_written_last(tmp_path: Path, kind: str) -> None:
    """All else is on the disk before: a crash leaves nothing that looks whole."""
    done: list[str] = []

    class Noted(Wrapper):
        async def around(self, op: str, key: str, call: Any, *args: Any, **kwargs: Any) -> Any:
            result = await call(*args, **kwargs)
            if op in ("write_at", "copy_from", "release", "complete"):
                done.append(op)
            return result

    options = Options(chunk_bytes=2 << 20)
    state = StateDict({f"w{n}": torch.randn(1 << 19) for n in range(4)})
    snapshot = sync.Snapshot.take(tmp_path / "s", {"model": state}, options=options)
    with faulty(Noted):
        if kind == "torch":
            export_torch(snapshot, faulty_url(tmp_path / "out" / "x.pt"))
            torch.load(tmp_path / "out" / "x.pt")
        else:
            snapshot.export_hf(faulty_url(tmp_path / "out"))
            load_file(tmp_path / "out" / "model.safetensors")
    assert done[-3:] == ["release", "write_at", "complete"]
    assert len(done) > 3


@pytest.mark.parametrize("name", ["old.pt", "old.safetensors"])
def test_a_file_is_exported(tmp_path: Path, name: str) -> None:
    """Its data is in the file's folder, not below its URL."""
    state = {"w": torch.randn(300, 300), "b": torch.arange(5)}
    if name == "old.pt":
        torch.save(state, tmp_path / name)
    else:
        save_file(state, tmp_path / name)
    snapshot = sync.Snapshot(tmp_path / name)
    snapshot.export_hf(tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same({name: found[name] for name in state}, state)
    export_torch(snapshot, tmp_path / "new.pt", key="model")
    found = torch.load(tmp_path / "new.pt", weights_only=True)
    assert_same({name: found[name] for name in state}, state)
    export_dcp(snapshot, tmp_path / "dcp", key="model")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(target, checkpoint_id=tmp_path / "dcp")
    assert_same(target, state)


def test_what_is_exported_is_not_deleted(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 300)}
    sync.Snapshot.take(tmp_path / "s", {"model": StateDict(state)})
    torch.save(state, tmp_path / "old.pt")
    save({"model": state}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "link").symlink_to("hf")
    hf, dcp, file = (sync.Snapshot(tmp_path / name) for name in ("hf", "dcp", "old.pt"))
    own = sync.Snapshot(tmp_path / "s")
    calls: list[Callable[[], object]] = [
        lambda: hf.export_hf(tmp_path / "hf", overwrite=True),
        lambda: hf.export_hf(tmp_path / "link", overwrite=True),
        lambda: sync.Snapshot(tmp_path / "link").export_hf(tmp_path / "hf", overwrite=True),
        lambda: export_dcp(dcp, tmp_path / "dcp", overwrite=True),
        lambda: export_torch(file, tmp_path / "old.pt", overwrite=True),
        lambda: export_torch(own, tmp_path / "s" / "actorsnap.json", overwrite=True),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is part of what is exported"):
            call()
    for each in (hf, dcp, file, own):
        assert_same(each.get_state_dict_for_key("model"), state)
    export_torch(file, tmp_path / "new.pt")
    export_torch(file, tmp_path / "new.pt", overwrite=True)  # a neighbour is another file
