# SPDX-License-Identifier: Apache-2.0
"""Snapshots that torchsnapshot 0.1.0 wrote (``written_by_torchsnapshot.py``)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import IncompatibleState, Options, Snapshot, StateDict, UsageError
from actorsnap.errors import ActorSnapError, FormatError
from actorsnap.format.manifest import BytesEntry
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import find_opener
from actorsnap.testing import run_blocking_in_thread
from tests.formats.written_by_torchsnapshot import (
    make_model,
    make_optimizer,
    make_shared,
    make_table,
    make_values,
)

DATA = Path(__file__).parent / "data" / "torchsnapshot"
METADATA = ".snapshot_metadata"
TRUSTED = Options(allow_pickle=True)


def is_equal(one: Any, other: Any) -> bool:
    """Whether values, their types, and the order of dicts are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(DATA / name, tmp_path / name))

    return copy


def change_metadata(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the manifest; ``change`` gets its entries, by rank and path."""
    path = folder / METADATA
    metadata = json.loads(path.read_text())
    change(metadata["manifest"])
    path.write_text(json.dumps(metadata))


async def test_restores_in_place() -> None:
    saved, model = make_model(), make_model()
    optimizer = make_optimizer(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    other = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    other.step()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    report = await Snapshot(DATA / "slabs").restore({"model": model, "optimizer": other})
    assert report.is_complete
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert is_equal(model.state_dict(), saved.state_dict())
    assert is_equal(other.state_dict(), optimizer.state_dict())


async def test_values_of_each_kind() -> None:
    values = make_values()
    snapshot = Snapshot(DATA / "slabs", options=TRUSTED)
    assert is_equal(await snapshot.get_state_dict_for_key("values"), values)
    target = StateDict({"bfloat16": torch.zeros(4, dtype=torch.bfloat16), "older": 1})
    await snapshot.restore({"values": target}, strict=False)
    assert is_equal({name: target[name] for name in values}, values)
    for name in values:
        assert is_equal(await snapshot.read_object(f"values/{name}"), values[name])
    rng = await snapshot.get_state_dict_for_key("rng")
    assert rng["rng_state"].dtype == torch.uint8


async def test_without_slabs() -> None:
    """Tensors in chunks are in several files each, some of them of ``torch.save``."""
    snapshot = Snapshot(DATA / "files")
    target = torch.zeros(20, 3)
    assert await snapshot.read_object("values/table", out=target) is target
    assert torch.equal(target, make_table(20, 3))
    values = await snapshot.get_state_dict_for_key("values")
    assert torch.equal(values["complex"], torch.arange(40).to(torch.complex64))
    model = make_model().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    await snapshot.restore({"model": model})
    saved = make_model()
    make_optimizer(saved)
    assert is_equal(model.state_dict(), saved.state_dict())


async def put_files(folder: Path, url: str) -> None:
    context = StorageContext(run_blocking=run_blocking_in_thread, options={})
    storage = (await run_blocking_in_thread(find_opener, url))(context)
    for path in folder.rglob("*"):
        if path.is_file():
            key = str(path.relative_to(folder))
            await storage.put(key, [memoryview(path.read_bytes())])
    await storage.aclose()


@pytest.mark.parametrize("name", ["slabs", "files", "ranks"])
async def test_far_away(tmp_path: Path, name: str) -> None:
    url = f"memory://{tmp_path.name}/{name}"
    await put_files(DATA / name, url)
    near, far = Snapshot(DATA / name, options=TRUSTED), Snapshot(url, options=TRUSTED)
    assert (await far.get_manifest()).keys() == (await near.get_manifest()).keys()
    for key in {path.split("/")[1] for path in await far.get_manifest(rank=0)}:
        one = await near.get_state_dict_for_key(key)
        assert is_equal(await far.get_state_dict_for_key(key), one)


async def test_who_may_read() -> None:
    snapshot = Snapshot(DATA / "ranks")
    for rank in range(2):
        found = await snapshot.read_object(f"{rank}/shared")
        assert is_equal({name: found[name] for name in make_shared(rank)}, make_shared(rank))
        only = await snapshot.read_object(f"{rank}/only{rank}")
        assert only["x"].tolist() == [rank, rank]
        for name in ("rows", "columns"):
            assert torch.equal(await snapshot.read_object(f"{rank}/sharded/{name}"), make_table())
    with pytest.raises(UsageError, match="rank 1"):
        await snapshot.read_object("0/only1/x")


@pytest.mark.parametrize("name", ["slabs", "files", "ranks"])
async def test_copies_have_checksums(tmp_path: Path, name: str) -> None:
    source = Snapshot(DATA / name, options=TRUSTED)
    await source.copy_to(tmp_path / "copy")
    copy = Snapshot(tmp_path / "copy", options=TRUSTED)
    report = await copy.verify("full")
    assert (report.ok, report.has_checksums) == (True, True)
    for path in await source.get_manifest():
        if path.count("/") == 1:
            assert is_equal(await copy.read_object(path), await source.read_object(path))
    report = await source.verify("full")
    assert (report.ok, report.has_checksums) == (True, False)


@pytest.mark.parametrize("name", ["slabs", "ranks"])
async def test_older_metadata_is_yaml(copied: Callable[[str], Path], name: str) -> None:
    yaml = pytest.importorskip("yaml")
    folder = copied(name)
    before = await Snapshot(folder).get_manifest()
    path = folder / METADATA
    metadata = json.loads(path.read_text())
    for entry in metadata["manifest"].values():
        if entry.get("byte_range", 0) is None:
            del entry["byte_range"]  # there were none at first
    path.write_text(yaml.dump(metadata, sort_keys=False))
    assert await Snapshot(folder).get_manifest() == before
    path.write_text("a: [b")
    with pytest.raises(FormatError, match="malformed"):
        await Snapshot(folder).get_manifest()


async def test_keys_that_torchsnapshot_loses(copied: Callable[[str], Path]) -> None:
    """It wrote them, and cannot read them: its parser of YAML, and its rebuilding of dicts."""
    folder = copied("slabs")

    def add(entries: dict[str, Any]) -> None:
        value = entries["0/values/str"]
        entries["0/flags"] = {"type": "dict", "keys": [True, "😀", "x" * 2000]}
        for token in ("True", "😀", "x" * 2000):
            entries[f"0/flags/{token}"] = value

    change_metadata(folder, add)
    found = await Snapshot(folder).get_state_dict_for_key("flags")
    assert list(found) == [True, "😀", "x" * 2000]


async def test_replicas_of_shards_and_of_leaves(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """Development versions list shards of DTensors by each holder, older ones all replicas."""
    folder = copied("ranks")

    def add(entries: dict[str, Any]) -> None:
        for number in range(2):
            entry = entries[f"{number}/sharded/rows"]
            entry |= {"type": "DTensor", "mesh": [[0], [1]], "dim_map": [[0], [-1]]}
        again = json.loads(json.dumps(entries["0/sharded/rows"]["shards"]))
        again[0]["tensor"] |= {"location": "1/again", "byte_range": None}
        entries["1/sharded/rows"]["shards"] += again
        entries["1/shared/replicated"] = entries["0/shared/replicated"]
        entries["1/shared/replicated_large"] = entries["0/shared/replicated_large"]

    change_metadata(folder, add)
    (folder / "1" / "again").write_bytes(make_table()[:2].numpy().tobytes())
    snapshot = Snapshot(folder)
    for rank in range(2):
        assert torch.equal(await snapshot.read_object(f"{rank}/sharded/rows"), make_table())
    await snapshot.copy_to(tmp_path / "copy")
    found = await Snapshot(tmp_path / "copy").read_object("1/sharded/rows")
    assert torch.equal(found, make_table())
    found = await snapshot.read_object("1/shared")
    assert is_equal({name: found[name] for name in make_shared(1)}, make_shared(1))


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return eval, (f"__import__('pathlib').Path({str(self.path)!r}).touch()",)


@pytest.mark.parametrize("location", ["0/values/tuple", "0/values/complex"])
async def test_a_hostile_pickle_is_not_executed(
    copied: Callable[[str], Path], tmp_path: Path, location: str
) -> None:
    folder, made = copied("slabs"), tmp_path / "made"
    torch.save(Hostile(made), folder / location)
    snapshot, path = Snapshot(folder), location.removeprefix("0/")
    model = make_model()
    await snapshot.restore({"model": model})
    assert isinstance((await snapshot.get_manifest())[location], BytesEntry)
    for level in ("quick", "full"):
        assert (await snapshot.verify(level)).ok
    with pytest.raises(UsageError, match=f"pickled.*\n.*{path}"):
        await snapshot.read_object(path)
    with pytest.raises(UsageError, match=f"pickled.*\n(.*\n)*.*{path}"):
        await snapshot.restore({"values": StateDict()})
    await snapshot.copy_to(tmp_path / "copy")
    assert not made.exists()
    await Snapshot(folder, options=TRUSTED).read_object(path)
    assert made.exists()


def _set(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        at: Any = entries
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return change


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        at: Any = entries
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return change


def _swap(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        one, other = [entries[name] for name in names]
        one["location"], other["location"] = other["location"], one["location"]

    return change


BIAS = "0/model/0.bias"
TABLE = "0/values/table"
ROWS = "0/sharded/rows"


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("slabs", _set(BIAS, "location", to="../x"), r"'\.\./x'.*not a file of a snapshot"),
        ("slabs", _set(BIAS, "location", to="/etc/passwd"), "not a file of a snapshot"),
        ("slabs", _set(BIAS, "location", to="joined/0"), "not a file of a snapshot"),
        ("slabs", _set(BIAS, "location", to="absent"), "absent.*missing"),
        ("slabs", _set(BIAS, "byte_range", 1, to=1 << 40), "truncated"),
        ("slabs", _set(BIAS, "byte_range", to=[0, 12]), "has 16 bytes"),
        ("slabs", _set(BIAS, "byte_range", to=[20, 4]), "has 16 bytes"),
        ("slabs", _set(BIAS, "byte_range", to=[50, 66]), "overlap"),
        ("slabs", _set(BIAS, "byte_range", to=None), "has 16 bytes"),
        ("slabs", _set(BIAS, "dtype", to="torch.float3"), "float3"),
        ("slabs", _set(BIAS, "dtype", to="float32"), "'float32'"),
        ("slabs", _set(BIAS, "dtype", to="torch.qint8"), "never wrote that"),
        ("slabs", _set(BIAS, "shape", to=[-4]), "malformed"),
        ("slabs", _set(BIAS, "serializer", to="per_tensor_qtensor"), "never wrote that"),
        ("slabs", _set(BIAS, "serializer", to="torch_save"), "two formats at once"),
        ("slabs", _set(BIAS, "type", to="Tensor2"), "Tensor2"),
        ("slabs", _set("0/values/none", "serializer", to="x"), None),
        ("slabs", _set("0/values/size", "serializer", to="x"), "never wrote that"),
        ("slabs", _set("0/values/complex", "shape", to=[3]), "tensor of shape"),
        ("slabs", _swap("0/values/complex", "0/values/tuple"), "no tensor"),
        ("slabs", _set("0/values/complex", "location", to="0/values/tuple"), "overwrote"),
        ("slabs", _set("0/values/int", "serialized_value", to="1.5"), "not of type int"),
        ("slabs", _set("0/values/bool", "serialized_value", to="true"), "not of type bool"),
        ("slabs", _set("0/values/bytes", "serialized_value", to="?"), "not of type bytes"),
        ("slabs", _set("0/values/float", "serialized_value", to="AAAA"), "not of type float"),
        ("slabs", _set("0/values/list/first", to={"type": "list"}), "no position"),
        ("slabs", _set("0/values/int/x", to={"type": "list"}), "in no list and no dict"),
        ("slabs", _set("0/absent/x", to={"type": "list"}), "in no list and no dict"),
        ("slabs", _drop("0/values/dict", "keys", 0), "in no list and no dict"),
        ("slabs", _set("1/x", to={"type": "list"}), "rank that its world of 1 lacks"),
        ("slabs", _set("x", to={"type": "list"}), "does not begin with a rank"),
        ("files", _drop(TABLE, "chunks", 1), "do not make"),
        ("files", _drop(TABLE, "chunks", 2), "do not make"),
        ("files", _set(TABLE, "chunks", 1, "offsets", 1, to=1), "do not make"),
        ("files", _set(TABLE, "chunks", 1, "sizes", 0, to=6), "do not make|not "),
        ("files", _set(TABLE, "chunks", 1, "tensor", "location", to="0/values/row"), "truncated"),
        (
            "files",
            _set(TABLE, "chunks", 1, "tensor", "location", to="0/values/table_0_0"),
            "one overwrote the other",
        ),
        ("files", _set(TABLE, "chunks", to=[]), "do not make"),
        ("ranks", _set(ROWS, "shards", 1, "offsets", to=[2]), "numbers of dims"),
        ("ranks", _set(ROWS, "shards", 1, "sizes", to=[1, 5]), "not"),
        ("ranks", _set(ROWS, "shards", 1, "tensor", "dtype", to="torch.int32"), "several tensors"),
    ],
)
async def test_damaged_metadata(
    copied: Callable[[str], Path], name: str, change: Any, match: str | None
) -> None:
    folder = copied(name)
    change_metadata(folder, change)
    if match is None:  # nothing was stored for it
        await Snapshot(folder).get_manifest()
        return
    with pytest.raises(FormatError, match=match):
        await Snapshot(folder).verify()


@pytest.mark.parametrize("name", ["slabs", "files", "ranks"])
async def test_damaged_files(copied: Callable[[str], Path], name: str) -> None:
    """Every file, one byte shorter, or missing: torchsnapshot itself restores some of them."""
    folder = copied(name)
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name in (METADATA, "none", "foreach", "fused"):
            continue
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(ActorSnapError, match="truncated|malformed"):
            await Snapshot(folder).get_manifest()
        path.unlink()
        with pytest.raises(FormatError, match="missing, which .snapshot_metadata names"):
            await Snapshot(folder).get_manifest()
        path.write_bytes(data)
    path = folder / METADATA
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FormatError, match="malformed"):
        await Snapshot(folder).get_manifest()


async def test_shards_that_are_missing(copied: Callable[[str], Path]) -> None:
    folder = copied("ranks")
    change_metadata(folder, _drop(ROWS, "shards", 1))
    report = await Snapshot(folder).verify()
    assert "no shard has the elements" in str(report.problems[0])
    with pytest.raises((FormatError, IncompatibleState), match="sharded/rows"):
        await Snapshot(folder).read_object("sharded/rows")


async def test_a_replaced_snapshot_is_noticed(copied: Callable[[str], Path]) -> None:
    folder = copied("files")
    snapshot = Snapshot(folder)
    first = await snapshot.read_object("values/table")
    path = folder / "0/values/table_7_0"
    path.write_bytes(bytes(path.stat().st_size))
    second = await snapshot.read_object("values/table")
    assert torch.equal(second[:7], first[:7])
    assert not second[7:14].any()
