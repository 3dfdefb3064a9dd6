# SPDX-License-Identifier: Apache-2.0
"""Snapshots of folders that ``torch.distributed.checkpoint`` wrote, by one process."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.state_dict import get_state_dict

from actorsnap import ModelState, Options, StateDict, UsageError
from actorsnap.errors import ActorSnapError, FormatError, NotASnapshot
from actorsnap.interop.dcp import ActorsnapReader, ActorsnapWriter
from actorsnap.interop.formats import dcp_items
from actorsnap.interop.formats.dcp_metadata import decode_metadata
from actorsnap.sync import Snapshot
from tests.formats.checkpoints import is_same, make_model, training_state

dcp: Any = torch.distributed.checkpoint  # its stubs export little

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse invariant"),
]


def save(state: dict[str, Any], path: Path, **arguments: Any) -> None:
    writer = dcp.FileSystemWriter(path, **arguments)
    dcp.save(state, storage_writer=writer, no_dist=True)


def changed(path: Path, change: Callable[[Any], object]) -> None:
    """Rewrites ``.metadata`` after a change of what is in it."""
    loaded = pickle.loads((path / ".metadata").read_bytes())
    made = change(loaded)
    (path / ".metadata").write_bytes(pickle.dumps(loaded if made is None else made))


@pytest.mark.parametrize(
    "arguments", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=repr
)
def test_restores_in_place(tmp_path: Path, arguments: dict[str, Any]) -> None:
    model, optimizer, saved = training_state(0)
    save(saved, tmp_path, **arguments)
    other, another, _ = training_state(1)
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    snapshot = Snapshot(tmp_path)
    assert (snapshot.restore({"model": other, "optimizer": another})).is_complete
    assert [parameter.data_ptr() for parameter in other.parameters()] == addresses
    assert is_same(other, model)
    assert str(another.state_dict()) == str(optimizer.state_dict())
    assert snapshot.read_object("epoch") == 3
    assert float(snapshot.read_object("loss")) == 0.5
    report = snapshot.verify("full")
    assert (report.ok, report.has_checksums) == (True, False)


def test_what_get_state_dict_returns(tmp_path: Path) -> None:
    model, optimizer, _ = training_state(0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, tmp_path)
    for targets in ("optimizer", "model state"):
        other, another, _ = training_state(1)
        if targets == "optimizer":
            Snapshot(tmp_path).restore({"model": other, "optimizer": another})
        else:
            Snapshot(tmp_path).restore(
                {"train": ModelState(other, another, flatten=False)},
                rename={"model": "train/model", "optimizer": "train/optim"},
            )
        assert is_same(other, model)
        assert str(another.state_dict()) == str(optimizer.state_dict())


def kinds() -> dict[str, Any]:
    return {
        "tensors": {
            "transposed": torch.arange(12.0).view(3, 4).t(),
            "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "slice": torch.arange(100.0)[10:20],
            "expanded": torch.ones(1, 3).expand(5, 3),
            "empty": torch.ones(0, 3),
            "scalar": torch.tensor(7),
            "bf16": torch.randn(3).bfloat16(),
            "fp8": torch.randn(3).to(torch.float8_e4m3fn),
            "u16": torch.tensor([1, 65535], dtype=torch.uint16),
            "complex": torch.ones(3, dtype=torch.complex128),
            "large": torch.randn(1000, 7),
            "parameter": torch.nn.Parameter(torch.ones(2)),
        },
        "values": {
            "plain": [1, 2.5, "x", None, True, b"\xff", 1 << 80, float("inf"), (1, [2])],
            "with tensors": (torch.ones(2), {"a": torch.zeros(3), "b": "x"}),
            "set": {"dtype": torch.bfloat16, "size": torch.Size([2, 3])},
            "list": [{"lr": 0.1}, {"lr": 0.2, "more": [torch.ones(1), [torch.zeros(2)]]}],
            "odd/name": {"a.b": 1, "": 2, "0": 3},
            "long": ["x" * 10_000, list(range(300))],
        },
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and one.equal(other)
    return type(one) is type(other) and one == other


def test_all_kinds_of_leaves(tmp_path: Path) -> None:
    state = kinds()
    save(state, tmp_path / "old")
    state["tensors"]["expanded"] = state["tensors"]["expanded"].contiguous()
    snapshot = Snapshot(tmp_path / "old")
    snapshot.copy_to(tmp_path / "new")
    assert (Snapshot(tmp_path / "new").verify("full")).has_checksums
    for url in ("old", "new"):
        for key, value in state.items():
            assert same(Snapshot(tmp_path / url).get_state_dict_for_key(key), value)
        into = {
            name: torch.zeros_like(tensor) if isinstance(tensor, torch.Tensor) else None
            for name, tensor in state["tensors"].items()
        }
        dcp.load({"tensors": into}, storage_reader=ActorsnapReader(tmp_path / url), no_dist=True)
        assert same(into, {name: value.detach() for name, value in state["tensors"].items()})


def test_a_flat_state_dict_is_the_model(tmp_path: Path) -> None:
    saved, model = make_model(0), make_model(1)
    save(saved.state_dict(), tmp_path)
    assert (Snapshot(tmp_path).restore({"model": model})).is_complete
    assert is_same(model, saved)
    into = make_model(2).state_dict()
    dcp.load(into, storage_reader=ActorsnapReader(tmp_path), no_dist=True)
    assert all(torch.equal(into[name], value) for name, value in saved.state_dict().items())


def test_torchtitans_layout(tmp_path: Path) -> None:
    """The model's tensors at the top level, next to dicts and values."""
    model, optimizer, _ = training_state(0)
    _, optimizer_state = get_state_dict(model, optimizer)
    train_state = {"step": torch.tensor(7), "losses": io.BytesIO(b"losses"), "none": io.BytesIO()}
    state = {**model.state_dict(), "optimizer": optimizer_state, "train_state": train_state}
    save({**state, "epoch": 3}, tmp_path)
    other, another, _ = training_state(1)
    snapshot = Snapshot(tmp_path)
    snapshot.restore({"model": other, "optimizer": another})
    assert is_same(other, model)
    assert str(another.state_dict()) == str(optimizer.state_dict())
    assert int(snapshot.read_object("train_state/step")) == 7
    assert snapshot.read_object("epoch") == 3
    into: dict[str, Any] = {
        **make_model(2).float().state_dict(),
        "train_state": {"losses": io.BytesIO(), "none": None},
        "epoch": 0,
    }
    snapshot.copy_to(tmp_path / "copy")
    for path in (tmp_path, tmp_path / "copy"):
        dcp.load(into, storage_reader=ActorsnapReader(path), no_dist=True)
        assert into["train_state"]["losses"].getvalue() == b"losses"
        assert into["train_state"]["none"].getvalue() == b""
        assert into["epoch"] == 3
        assert torch.equal(into["0.weight"], model.state_dict()["0.weight"])


def test_a_planner_that_does_not_flatten(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"a.b": torch.ones(3), "values": {"x": [1, {"y": 2}]}}
    dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert Snapshot(tmp_path).read_object("model/values") == {"x": [1, {"y": 2}]}
    into: dict[str, Any] = {"a.b": torch.zeros(3), "values": None}
    load_planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(into, storage_reader=ActorsnapReader(tmp_path), planner=load_planner, no_dist=True)
    assert torch.equal(into["a.b"], torch.ones(3))  # torch's reader loads no more, either


# Faults ---------------------------------------------------------------------------------------


class Hostile:
    """What is executed if its pickle is."""

    executed: list[str] = []

    def __reduce__(self) -> Any:
        return Hostile.executed.append, ("executed",)


class System:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("hostile", [Hostile(), System()], ids=["append", "system"])
def test_a_hostile_metadata_is_not_executed(
    tmp_path: Path, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"model": {"w": torch.ones(3)}}, tmp_path)
    changed(tmp_path, lambda found: found.__dict__.update(planner_data=hostile))
    monkeypatch.chdir(tmp_path)
    name = "(posix.system|append|getattr)"
    with pytest.raises(UsageError, match=rf"\.metadata names .*{name}.*[Nn]othing .* executed"):
        Snapshot(tmp_path).get_manifest()
    # Not even then: nothing in the file needs to be run. What planners keep there is ignored.
    trusted = Snapshot(tmp_path, options=Options(allow_pickle=True))
    assert torch.equal(trusted.read_object("model/model.w"), torch.ones(3))
    assert not Hostile.executed
    assert not (tmp_path / "executed").exists()


def test_no_attribute_of_a_class_is_changed() -> None:
    """A pickle may set attributes of what it names, by ``BUILD`` of a pair."""
    saved = _metadata_of(torch.ones(3))  # pickling adds an attribute, too
    before = [*vars(dcp_metadata.Metadata)]
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("collections", "OrderedDict"),
        ("torch.serialization", "_get_layout"),
    ):
        pickled = f"c{module}\n{name}\n(N}}X\x01\x00\x00\x00aK\x01stb.".encode()
        for allow_pickle in (False, True):
            with pytest.raises(FormatError, match="damaged|is not metadata"):
                decode_metadata(pickled, ".metadata", allow_pickle=allow_pickle)
    assert decode_metadata(saved, ".metadata").leaves[0].fqn == "a"
    assert [*vars(dcp_metadata.Metadata)] == before
    assert not hasattr(tuple, "a")


def _metadata_of(tensor: torch.Tensor) -> bytes:
    size = tensor.size()
    chunk = dcp_metadata.ChunkStorageMetadata(torch.Size([0]), size)
    tensors = dcp_metadata.TensorStorageMetadata(dcp_metadata.TensorProperties(), size, [chunk])
    index = dcp_metadata.MetadataIndex("a", torch.Size([0]))
    made = dcp_metadata.Metadata({"a": tensors}, None, {index: _StorageInfo("__0_0.distcp", 0, 9)})
    return pickle.dumps(made)


def test_a_hostile_value_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when it is wanted; the rest is read."""
    monkeypatch.chdir(tmp_path)
    save({"model": {"w": torch.ones(3)}, "more": {"bad": System(), "good": 1}}, tmp_path / "s")
    snapshot = Snapshot(tmp_path / "s")
    model = StateDict(w=torch.zeros(3))
    snapshot.restore({"model": model})
    assert torch.equal(model["w"], torch.ones(3))
    assert snapshot.read_object("more/good") == 1
    for call in (
        lambda: snapshot.read_object("more/bad"),
        lambda: snapshot.restore({"more": StateDict(bad=None, good=None)}),
        lambda: snapshot.copy_to(tmp_path / "copy"),
    ):
        with pytest.raises(UsageError, match=r"more\.bad.*posix\.system.*not executed"):
            call()
    snapshot.get_manifest()
    assert not (tmp_path / "executed").exists()


def test_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    value = argparse.Namespace(lr=0.1)
    save({"model": {"w": torch.ones(3)}, "args": value, "array": np.arange(3)}, tmp_path)
    with pytest.raises(UsageError, match=r"'args' in __0_0.distcp.*argparse.Namespace"):
        Snapshot(tmp_path).read_object("args")
    trusted = Snapshot(tmp_path, options=Options(allow_pickle=True))
    assert trusted.read_object("args") == value
    assert (trusted.read_object("array")).tolist() == [0, 1, 2]


def test_what_is_no_plain_value_is_refused_alone(tmp_path: Path) -> None:
    odd = Fraction(1, 3)
    save({"a": {"odd": odd, "deep": ({odd}, torch.ones(2)), "x": 1, "set": {1, 2}}}, tmp_path)
    snapshot = Snapshot(tmp_path)
    assert snapshot.read_object("a/x") == 1
    assert snapshot.read_object("a/set") == {1, 2}
    for name in ("odd", "deep"):
        with pytest.raises(UsageError, match="Fraction"):
            snapshot.read_object(f"a/{name}")


def _drop_item(found: Any) -> None:
    del found.storage_data[next(iter(found.storage_data))]


def _overlap(found: Any) -> None:
    first, second = list(found.storage_data)[:2]
    found.storage_data[second].offset = found.storage_data[first].offset + 8


def _other_shape(found: Any) -> None:
    found.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([3, 4])


def _outside(found: Any) -> None:
    found.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([5, 3])


def _each_item(**fields: Any) -> Any:
    def change(found: Any) -> None:
        for item in found.storage_data.values():
            vars(item).update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_drop_item, "'model.a' at .* is in no file"),
        (_overlap, "a"),
        (_other_shape, r"shape \(4, 3\).*\(3, 4\)"),
        (_outside, r"shape \(4, 3\).*\(5, 3\)"),
        (lambda found: {"a": 1}, "not metadata"),
        (lambda found: found.__dict__.update(state_dict_metadata=None), "not metadata"),
        (lambda found: found.__dict__.update(storage_data={"a": 1}), "not metadata"),
        (_each_item(relative_path="../x"), "not a file in its folder"),
        (_each_item(offset=-1), "not metadata"),
    ],
)
def test_contradictions(tmp_path: Path, change: Any, match: str) -> None:
    save({"model": {"a": torch.ones(4, 3), "b": torch.zeros(5)}}, tmp_path)
    changed(tmp_path, change)
    with pytest.raises(FormatError, match=match):
        Snapshot(tmp_path).get_manifest()


def test_a_shard_with_strides_is_refused(tmp_path: Path) -> None:
    save({"model": {"a": torch.arange(12.0).view(3, 4).t()}}, tmp_path)

    def make_shard(found: Any) -> None:
        found.state_dict_metadata["model.a"].size = torch.Size([8, 3])

    changed(tmp_path, make_shard)
    with pytest.raises(UsageError, match=r"'model\.a'.*row by row"):
        Snapshot(tmp_path).get_manifest()


def test_metadata_of_a_rank_is_missing(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(3)}}, tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / "__1.metadata")
    with pytest.raises(FormatError, match=r"__0\.metadata.*missing.*__1\.metadata"):
        Snapshot(tmp_path).get_manifest()


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(4, 3)}}, tmp_path)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    (tmp_path / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(FormatError, match=r"__0_0\.distcp.*truncated.*'model\.a' ends at"):
        Snapshot(tmp_path).get_manifest()
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(FormatError, match=r"__0_0\.distcp.*missing.*\.metadata names"):
        Snapshot(tmp_path).get_manifest()
    (tmp_path / ".metadata").rename(tmp_path / ".metadata.tmp")  # an unfinished save
    with pytest.raises(NotASnapshot):
        Snapshot(tmp_path).get_manifest()


def test_flipped_bits(tmp_path: Path) -> None:
    """Of the metadata and the zip files: the same tensors, or an error; never another."""
    state = {"a": torch.arange(12.0).view(4, 3).t(), "b": torch.zeros(5), "c": "text"}
    save({"model": state}, tmp_path)
    choose = random.Random(0)
    for file in (".metadata", "__0_0.distcp"):
        intact = (tmp_path / file).read_bytes()
        for _ in range(60):
            damaged = bytearray(intact)
            damaged[choose.randrange(len(intact))] ^= 1 << choose.randrange(8)
            (tmp_path / file).write_bytes(damaged)
            try:
                Snapshot(tmp_path).get_state_dict_for_key("model")
            except (ActorSnapError, KeyError):
                pass
        (tmp_path / file).write_bytes(intact)


def test_files_of_older_saves(tmp_path: Path) -> None:
    save({"model": {"w": torch.zeros(3)}}, tmp_path, thread_count=4)
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "__7_0.distcp")
    save({"model": {"w": torch.ones(3)}}, tmp_path)
    assert torch.equal(Snapshot(tmp_path).read_object("model/w"), torch.ones(3))


def test_a_marker_is_no_checkpoint(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.ones(3)}, storage_writer=ActorsnapWriter(tmp_path, marker=True), no_dist=True
    )
    for path in tmp_path.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    (tmp_path / "actorsnap.json").unlink()
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]
    with pytest.raises(NotASnapshot):
        Snapshot(tmp_path).get_manifest()


# What else torch writes -----------------------------------------------------------------------


def test_safetensors_files(tmp_path: Path) -> None:
    """torch's own reader cannot read these."""
    model, optimizer, saved = training_state(0)
    save(saved, tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    other, another, _ = training_state(1)
    Snapshot(tmp_path).restore({"model": other, "optimizer": another})
    assert is_same(other, model)
    assert str(another.state_dict()) == str(optimizer.state_dict())


# Reads ----------------------------------------------------------------------------------------


def test_items_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small reads are few; of large tensors hardly anything is read."""
    monkeypatch.setattr(dcp_items, "_BATCH_BYTES", 1 << 20)
    state: dict[str, Any] = {f"w{number}": torch.randn(500) for number in range(1000)}
    state |= {f"v{number}": torch.randn(1 << 18) for number in range(8)} | {"x": 1}
    save({"model": state}, tmp_path)
    reads: list[int] = []
    from actorsnap.storage.fs import FsStorage

    read_into = FsStorage.read_into_blocking

    def count(self: FsStorage, key: str, offset: int, batches: Any) -> None:
        def noted() -> Any:
            for views in batches:
                reads.append(sum(map(len, views)))
                yield views

        read_into(self, key, offset, noted())

    monkeypatch.setattr(FsStorage, "read_into_blocking", count)
    snapshot = Snapshot(tmp_path)
    snapshot.get_manifest()
    size = (tmp_path / "__0_0.distcp").stat().st_size
    assert len(reads) < 20
    assert sum(reads) < 4 << 20 < size
    for name in ("w0", "w999", "v0", "v7"):
        assert torch.equal(snapshot.read_object(f"model/{name}"), state[name])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_part_of_a_folder_names_the_folder(tmp_path: Path, name: str) -> None:
    save({"model": {"weight": torch.ones(2)}}, tmp_path / "old")
    with pytest.raises(NotASnapshot, match=f"a part of the DCP folder {tmp_path}/old: open that"):
        Snapshot(tmp_path / "old" / name).keys()
