# SPDX-License-Identifier: Apache-2.0
"""Snapshots that earlier releases wrote are read for ever; damaged ones are told as such.

``tests/golden/make_v1.py`` made ``tests/golden/v1`` and says what must come back, as
``make_block_sizes.py`` does of ``block_sizes``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import pytest_asyncio
import torch
from typer.testing import CliRunner

from actorsnap import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    IncompatibleState,
    NotASnapshot,
    Options,
    StateDict,
    UnsupportedFormat,
    UsageError,
    cli,
)
from actorsnap import Snapshot as AsyncSnapshot
from actorsnap.format.checksum import crc32c
from actorsnap.format.manifest import (
    COMMIT_KEY,
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.format.owners import decode_owners, owners_key
from actorsnap.sync import Snapshot
from tests.api.same import assert_same
from tests.api.states import scribble
from tests.api.test_many_ranks import restored_by
from tests.golden import (
    make_annotations,
    make_block_sizes,
    make_compression,
    make_owners,
    make_several_meshes,
    make_tables,
    make_values,
)
from tests.golden.make_v1 import DTYPES, METADATA, app_state, make
from tests.support import forker
from tests.support.cases import slow
from tests.support.manifests import document_of

pytestmark = pytest.mark.usefixtures("forker")

V1 = Path(__file__).parent / "golden" / "v1"
BLOCK_SIZES = V1.with_name("block_sizes")
COMPRESSION = V1.with_name("compression")
TABLES = V1.with_name("tables")
OWNERS = V1.with_name("owners")
VALUES = V1.with_name("values")
ANNOTATIONS = V1.with_name("annotations")
SEVERAL_MESHES = V1.with_name("several_meshes")
ATTEMPT = "20260101T000000-00000000-1-00000000"
MANIFEST = f"{ATTEMPT}/manifest/0.json"
DATA = f"{ATTEMPT}/data/dense/0-0.safetensors"
KEYS = sorted(app_state())
TRUSTING = Options(allow_pickle=True)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(V1, tmp_path / "v1"))


# Reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_every_value_comes_back(key: str) -> None:
    found = Snapshot(V1, options=TRUSTING).get_state_dict_for_key(key)
    assert_same(found, app_state()[key].data)


@pytest.mark.parametrize("key", KEYS)
def test_every_value_is_restored_in_place(key: str) -> None:
    target = app_state()[key]
    scribble(target.data)
    report = Snapshot(V1, options=TRUSTING).restore({key: target})
    assert report.is_complete
    assert_same(target.data, app_state()[key].data)


def test_each_leaf_alone() -> None:
    snapshot = Snapshot(V1)
    for name, value in app_state()["values"].items():
        assert_same(snapshot.read_object(f"0/values/{name}"), value, name)


def test_reading_warns_of_nothing() -> None:
    """torch warns, once a process, of kinds of tensors that are new or will go."""
    script = (
        "from actorsnap.sync import Snapshot\n"
        f"snapshot = Snapshot({str(V1)!r})\n"
        f"for key in {sorted(set(KEYS) - {'pickled'})!r}:\n"
        "    snapshot.get_state_dict_for_key(key)\n"
    )
    done = subprocess.run(
        forker.command("-W", "error", "-c", script),
        cwd=V1.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_whole() -> None:
    snapshot = Snapshot(V1)
    report = snapshot.verify("full")
    assert report.ok, report.problems
    assert report.num_objects == len(list(V1.glob("*/data/*/*")))
    assert json.dumps(snapshot.metadata, sort_keys=True) == json.dumps(METADATA, sort_keys=True)


def test_it_has_everything_that_version_1_has() -> None:
    entries = Snapshot(V1).get_manifest().values()
    kinds = {type(entry) for entry in entries}
    assert kinds == {
        *(BytesEntry, CompositeEntry, ContainerEntry, TensorEntry, ValueEntry, ViewEntry)
    }

    def members(kind: type, name: str) -> set[Any]:
        return {getattr(entry, name) for entry in entries if isinstance(entry, kind)}

    assert set(DTYPES) <= members(TensorEntry, "dtype")
    tensor_types = {"tensor", "parameter", "buffer", "numpy", "numpy_scalar"}
    assert members(TensorEntry, "type") == tensor_types
    assert members(BytesEntry, "type") == {"bytes", "bytearray", "str", "pickle", "numpy"}
    assert members(ContainerEntry, "type") == {"dict", "ordered_dict", "list", "tuple"}
    assert members(CompositeEntry, "layout") == {
        *("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
        *("quantized_tensor", "quantized_channel"),
    }
    inline = {
        entry.value["$"]
        for entry in entries
        if isinstance(entry, ValueEntry) and isinstance(entry.value, dict)
    }
    assert inline == {
        *("int", "float", "complex", "bytes", "bytearray", "str"),
        *("size", "dtype", "device", "layout", "memory_format", "npdtype"),
    }
    assert any(entry.replicated for entry in entries if not isinstance(entry, ContainerEntry))


def test_pickled_leaves_are_refused_unless_allowed() -> None:
    with pytest.raises(UsageError, match=r"(?s)allow_pickle.*'pickled/date'"):
        Snapshot(V1).get_state_dict_for_key("pickled")


def test_what_made_it_still_makes_the_same_state(tmp_path: Path) -> None:
    """The writer may pack anew; what it says about leaves may change with a version only."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "again")

    def told(folder: Path) -> dict[str, Any]:
        manifest = document_of(next(folder.glob("*/manifest/0.json")).read_bytes())
        return {
            entry["path"]: {**entry, "data": entry.get("data", [None] * 4)[3]}
            for entry in manifest["entries"]
        }

    again, golden = told(tmp_path / "again"), told(V1)
    for path in ("pickled/date", "pickled/names"):  # values without pickle now
        assert (again.pop(path)["kind"], golden.pop(path)["type"]) == ("value", "pickle")
    assert again == golden


# Blocks of several sizes ----------------------------------------------------------------------


def with_blocks_of_1_mib(folder: Path) -> Path:
    """Writes the manifest as releases did that did not know the feature ``block_sizes``."""
    copied = Path(shutil.copytree(BLOCK_SIZES, folder))
    manifest = json.loads((copied / MANIFEST).read_bytes())
    data = (copied / manifest["objects"][0]["key"]).read_bytes()
    for entry in manifest["entries"]:
        _, start, stop, checksums = entry["data"]
        checksums[:] = [
            crc32c(data[at : min(at + (1 << 20), stop)]) for at in range(start, stop, 1 << 20)
        ]
    raw = json.dumps(manifest).encode()
    (copied / MANIFEST).write_bytes(raw)

    def change(commit: dict[str, Any]) -> None:
        del commit["features"]
        commit["manifests"][0].update(size=len(raw), crc32c=crc32c(raw))

    rewrite(copied, change)
    return copied


def num_checksums(folder: Path) -> list[int]:
    entries = Snapshot(folder).get_manifest().values()
    return [len(entry.data.crc32c) for entry in entries if isinstance(entry, TensorEntry)]


@pytest.mark.parametrize("is_older", [False, True])
def test_leaves_come_back_whatever_the_size_of_their_blocks(tmp_path: Path, is_older: bool) -> None:
    folder = with_blocks_of_1_mib(tmp_path / "older") if is_older else BLOCK_SIZES
    assert num_checksums(folder) == ([0, 1, 1, 2, 3] if is_older else [0, 1, 2, 32, 17])
    snapshot = Snapshot(folder)
    expected = make_block_sizes.app_state()["leaves"].data
    assert_same(snapshot.get_state_dict_for_key("leaves"), expected)
    target = StateDict({name: torch.zeros_like(leaf) for name, leaf in expected.items()})
    assert snapshot.restore({"leaves": target}).is_complete
    assert_same(target.data, expected)
    assert snapshot.verify("full").ok


def test_what_made_it_still_makes_the_same_blocks(tmp_path: Path) -> None:
    """Also of a leaf that a chunk ends in. And the feature is named: older releases refuse it."""
    make_block_sizes.make(tmp_path / "again")
    again, golden = (
        document_of((folder / MANIFEST).read_bytes())
        for folder in (tmp_path / "again", BLOCK_SIZES)
    )
    assert "block_sizes" in again.pop("save")["features"]
    assert again.pop("optimizers") == {}
    assert again == golden
    assert json.loads((BLOCK_SIZES / ".actorsnap").read_bytes())["features"] == ["block_sizes"]


def test_the_same_values_in_other_blocks_are_no_difference(tmp_path: Path) -> None:
    older = with_blocks_of_1_mib(tmp_path / "older")
    run = CliRunner().invoke(cli.app, ["diff", str(older), str(BLOCK_SIZES)])
    assert (run.exit_code, run.stdout) == (0, "equal: 5 leaves\n")
    leaves = make_block_sizes.app_state()
    leaves["leaves"].data["uneven"][-1] += 1
    Snapshot.take(tmp_path / "changed", leaves)
    run = CliRunner().invoke(cli.app, ["diff", str(older), str(tmp_path / "changed")])
    assert (run.exit_code, run.stdout.split()[:2]) == (1, ["~", "0/leaves/uneven"])


@pytest.mark.parametrize(
    ("name", "at", "block"), [("most", (64 << 10) * 31, 31), ("uneven", -1, 16)]
)
def test_a_damaged_block_is_named(tmp_path: Path, name: str, at: int, block: int) -> None:
    folder = Path(shutil.copytree(BLOCK_SIZES, tmp_path / "copied"))
    entry = Snapshot(folder).get_manifest()[f"0/leaves/{name}"]
    assert isinstance(entry, TensorEntry)
    path = next(folder.glob("*/data/*/*"))
    data = bytearray(path.read_bytes())
    data[(entry.data.stop if at < 0 else entry.data.start) + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match=f"block {block} of 'leaves/{name}'"):
        Snapshot(folder).read_object(f"0/leaves/{name}")


# The feature "compression" ----------------------------------------------------------------------


def test_compressed_leaves_come_back() -> None:
    snapshot = Snapshot(COMPRESSION)
    for key, expected in make_compression.app_state().items():
        assert_same(snapshot.get_state_dict_for_key(key), expected.data)
    report = snapshot.verify("full")
    assert report.ok, report.problems
    # Of everything that there is: widths of all frames, a chunk as it is.
    (manifest,) = COMPRESSION.glob("*/manifest/0.json")
    widths, has_plain_chunk = set(), False
    for record in json.loads(manifest.read_bytes())["objects"]:
        for start, _, _, sizes in record["chunks"]:
            has_plain_chunk |= not sizes
            data = (COMPRESSION / record["key"] / str(start)).read_bytes()
            at = 0
            for size in sizes:
                widths.add(data[at])
                at += size
    assert widths >= {0, 1, 4}
    assert has_plain_chunk


def test_what_made_it_still_makes_the_same_chunks(tmp_path: Path) -> None:
    """Another release of zstd may compress to other sizes."""
    make_compression.make(tmp_path / "again")
    found = []
    for folder in (COMPRESSION, tmp_path / "again"):
        (path,) = folder.glob("*/manifest/0.json")
        document = document_of(path.read_bytes())
        for later in ("optimizers", "save"):
            document.pop(later, None)
        for record in document["objects"]:
            record["chunks"] = [(start, stop, len(f)) for start, stop, _, f in record["chunks"]]
        found.append(document)
    assert found[0] == found[1]
    features = json.loads((COMPRESSION / ".actorsnap").read_bytes())["features"]
    assert features == ["block_sizes", "compression"]


# The feature "annotations" ----------------------------------------------------------------------


def test_annotations_come_back() -> None:
    snapshot = Snapshot(ANNOTATIONS)
    assert (snapshot.step, snapshot.metadata) == (make_annotations.STEP, make_annotations.METADATA)
    expected = make_annotations.app_state()
    weight = snapshot.get_state_dict_for_key("model")["weight"]
    assert_same(weight, expected["model"].weight.detach())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.partition_dim == 1
    target = make_annotations.app_state()
    scribble(target["model"].state_dict())
    assert snapshot.restore(target).is_complete
    for key, each in expected.items():
        assert_same(target[key].state_dict(), each.state_dict())
    other = torch.optim.AdamW(target["model"].parameters())
    with pytest.raises(IncompatibleState, match="torch.optim.sgd.SGD"):
        snapshot.restore({"optim": other})
    assert snapshot.verify("full").ok


def test_without_its_commit_object_the_same_one_is_written_again(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(ANNOTATIONS, tmp_path / "copied"))
    (copied / COMMIT_KEY).unlink()
    Snapshot(copied).recover()
    assert (copied / COMMIT_KEY).read_bytes() == (ANNOTATIONS / COMMIT_KEY).read_bytes()


def test_what_made_it_still_makes_the_same_annotations(tmp_path: Path) -> None:
    make_annotations.make(tmp_path / "again")
    again, golden = (
        document_of((folder / MANIFEST).read_bytes())
        for folder in (tmp_path / "again", ANNOTATIONS)
    )
    again["save"]["features"].remove("tables")
    assert again == golden


# The feature "tables" ---------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", make_tables.WORLD_SIZES)
async def test_ranks_get_their_state_from_tables(world_size: int) -> None:
    folder = TABLES / str(world_size)
    for rank in range(world_size):
        expected, target = (make_tables.app_state(rank, world_size) for _ in range(2))
        for part in target["model"].values():
            part.local_shards()[0].tensor.zero_()
        for key in ("own", "same"):
            scribble(target[key].data)
        report = await anyio.to_thread.run_sync(restored_by, rank, folder, target)
        assert report.is_complete
        for key in ("own", "same"):
            assert_same(target[key].data, expected[key].data)
        for name, part in expected["model"].items():
            found = target["model"][name].local_shards()[0].tensor
            assert torch.equal(found, part.local_shards()[0].tensor), name
    snapshot = AsyncSnapshot(folder)
    assert (await snapshot.verify("full")).ok
    for number in range(make_tables.NUM_TENSORS):
        found = await snapshot.read_object(f"model/w{number}")
        assert torch.equal(found, make_tables.whole(number))


async def test_what_made_tables_still_makes_the_same(tmp_path: Path) -> None:
    await make_tables.make(tmp_path)
    paths = [path.relative_to(TABLES) for path in TABLES.glob("*/*/manifest/*.json")]
    assert len(paths) == sum(make_tables.WORLD_SIZES)
    for path in paths:
        again, golden = (document_of((folder / path).read_bytes()) for folder in (tmp_path, TABLES))
        assert set(again["save"].pop("features")) >= set(golden["save"].pop("features"))
        assert again == golden, path


@pytest.mark.parametrize("world_size", make_tables.WORLD_SIZES)
@pytest.mark.parametrize("of", ["recover", "copy"])
def test_another_commit_object_of_tables_is_the_same(
    tmp_path: Path, world_size: int, of: str
) -> None:
    golden = TABLES / str(world_size)
    if of == "copy":
        Snapshot(golden).copy_to(tmp_path / "copied")
    else:
        shutil.copytree(golden, tmp_path / "copied")
        (tmp_path / "copied" / COMMIT_KEY).unlink()
        Snapshot(tmp_path / "copied").recover()
    again = (tmp_path / "copied" / COMMIT_KEY).read_bytes()
    assert again == (golden / COMMIT_KEY).read_bytes()


# The feature "values" ---------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", make_values.WORLD_SIZES)
async def test_ranks_get_their_values(world_size: int) -> None:
    """A rank that did not save gets what all ranks saved alike."""
    folder, options = VALUES / str(world_size), Options(allowed_types=make_values.CLASSES)
    for rank in range(3):
        expected = make_values.app_state(rank if rank < world_size else 0)
        target = {key: StateDict() for key in expected if key != "own" or rank < world_size}
        restore = partial(restored_by, rank, folder, target, options=options)
        assert (await anyio.to_thread.run_sync(restore)).is_complete
        for key, value in target.items():
            assert repr_of(value.data) == repr_of(expected[key].data)
            assert (
                value["set" if key != "own" else "seen"]
                == (expected[key]["set" if key != "own" else "seen"])
            )
    snapshot = AsyncSnapshot(folder)
    assert (await snapshot.verify("full")).ok
    assert await snapshot.read_object("same/dataclass/seen") == 0


def repr_of(value: Any) -> str:
    """Text of a value; sets have no order."""
    return "".join(sorted(repr(value)))


async def test_what_made_values_still_makes_the_same(tmp_path: Path) -> None:
    await make_values.make(tmp_path)
    paths = [path.relative_to(VALUES) for path in VALUES.glob("*/*/manifest/*.json")]
    assert len(paths) == sum(make_values.WORLD_SIZES)
    for path in [*paths, *[path.parents[1] / "data/=small/0-0.safetensors" for path in paths]]:
        assert (tmp_path / path).read_bytes() == (VALUES / path).read_bytes(), path


@pytest.mark.parametrize("world_size", make_values.WORLD_SIZES)
def test_a_recovered_snapshot_with_values_is_the_same(tmp_path: Path, world_size: int) -> None:
    golden = VALUES / str(world_size)
    shutil.copytree(golden, tmp_path / "copied")
    (tmp_path / "copied" / COMMIT_KEY).unlink()
    Snapshot(tmp_path / "copied").recover()
    assert (tmp_path / "copied" / COMMIT_KEY).read_bytes() == (golden / COMMIT_KEY).read_bytes()


# The feature "owners" ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [make_owners.NUM_RANKS, 12, 4])
async def test_ranks_get_their_state_by_the_owner_index(num_ranks: int) -> None:
    """As many ranks as saved, and fewer, whose boxes are on other ranks."""
    for rank in range(num_ranks):
        expected, target = (make_owners.app_state(rank) for _ in range(2))
        for state in (expected, target):
            state["model"] = StateDict(make_owners.model(rank, num_ranks))
        for key in ("own", "same"):
            scribble(target[key].data)
        for found in target["model"].values():
            found.to_local().zero_()
        for key in target.keys() & {"irregular", "stage"}:
            if num_ranks < make_owners.NUM_RANKS:
                del expected[key], target[key]
        for key in target.keys() & {"irregular"}:
            target[key]["x"].local_shards()[0].tensor.zero_()
        for key in target.keys() & {"stage"}:
            target[key]["x"].to_local().zero_()
        report = await anyio.to_thread.run_sync(restored_by, rank, OWNERS, target)
        assert report.is_complete
        for key in ("own", "same"):
            assert_same(target[key].data, expected[key].data)
        for name, found in target["model"].items():
            assert torch.equal(found.to_local(), expected["model"][name].to_local()), (rank, name)
        if "stage" in target:
            found, right = (each["stage"]["x"].to_local() for each in (target, expected))
            assert torch.equal(found, right)
        if "irregular" in target:
            found, right = (
                each["irregular"]["x"].local_shards()[0].tensor for each in (target, expected)
            )
            assert torch.equal(found, right)


async def test_each_object_by_the_owner_index() -> None:
    snapshot = AsyncSnapshot(OWNERS)
    assert (await snapshot.verify("full")).ok
    for name, path in (
        ("fsdp", "model/fsdp"),
        ("hsdp", "model/hsdp"),
        ("stage", "stage/x"),
        ("irregular", "irregular/x"),
    ):
        assert torch.equal(await snapshot.read_object(path), make_owners.WHOLE[name])
    assert await snapshot.read_object("17/own/rank") == 17
    assert await snapshot.read_object("17/own/empty") == [{}, ()]
    assert torch.equal(await snapshot.read_object("same/x"), torch.ones(3))


async def test_what_made_owners_still_makes_the_same(tmp_path: Path) -> None:
    await make_owners.make(tmp_path)
    paths = [path.relative_to(OWNERS) for path in OWNERS.glob("*/manifest/*.json")]
    assert len(paths) == make_owners.NUM_RANKS
    for path in paths:
        again, golden = (document_of((folder / path).read_bytes()) for folder in (tmp_path, OWNERS))
        assert set(again["save"].pop("features")) >= set(golden["save"].pop("features"))
        assert again == golden, path
    indices = [
        decode_owners(
            (folder / owners_key(ATTEMPT)).read_bytes(),
            attempt=ATTEMPT,
            world_size=make_owners.NUM_RANKS,
        )
        for folder in (tmp_path, OWNERS)
    ]
    assert indices[0] == indices[1]


# Tensors of one name on several meshes ----------------------------------------------------------


@pytest_asyncio.fixture(params=["golden", "again"])
async def meshes(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The snapshot that stores equal shards once, and the one that is made now."""
    if request.param == "golden":
        return SEVERAL_MESHES
    await make_several_meshes.make(tmp_path / "again")
    return tmp_path / "again"


@pytest.mark.parametrize("rank", range(make_several_meshes.NUM_RANKS))
async def test_each_rank_has_its_parts_of_several_meshes_again(meshes: Path, rank: int) -> None:
    expected, target = (make_several_meshes.app_state(rank) for _ in range(2))
    for part in target["model"].values():
        part.local_shards()[0].tensor.zero_()
    target["own"].data.update(rank=-1, x=torch.zeros(5))
    report = await anyio.to_thread.run_sync(restored_by, rank, meshes, target)
    assert report.is_complete
    assert_same(target["own"].data, expected["own"].data)
    for name, part in expected["model"].items():
        found = target["model"][name].local_shards()[0].tensor
        assert torch.equal(found, part.local_shards()[0].tensor), name


async def test_equal_shards_of_several_meshes_are_one_tensor(meshes: Path) -> None:
    """Those that differ belong to the ranks that stored them."""
    snapshot = AsyncSnapshot(meshes)
    assert (await snapshot.verify("full")).ok
    for name, on in make_several_meshes.MESHES.items():
        if name in ("expert", "table"):
            with pytest.raises(IncompatibleState, match="ranks stored different values"):
                await snapshot.read_object(f"model/{name}")
        else:
            found = await snapshot.read_object(f"model/{name}")
            assert torch.equal(found, make_several_meshes.whole(name, on[0])), name


# Damage ---------------------------------------------------------------------------------------


def read_all(folder: Path) -> None:
    """What a user does who wants it all."""
    Snapshot(folder, options=TRUSTING).restore({"dense": StateDict(), "values": StateDict()})


def problems(folder: Path) -> list[ActorSnapError]:
    """What full verification finds, however it tells."""
    try:
        return list(Snapshot(folder).verify("full").problems)
    except ActorSnapError as error:
        return [error]


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)


DAMAGES: list[tuple[str, Callable[[Path], None], type[ActorSnapError], str]] = [
    (".actorsnap", remove, NotASnapshot, r"a copy left actorsnap.json out.* `actorsnap recover "),
    (".actorsnap", empty, ChecksumMismatch, r"\.actorsnap: the commit object is damaged"),
    (".actorsnap", cut, ChecksumMismatch, r"\.actorsnap"),
    (".actorsnap", grow, ChecksumMismatch, r"\.actorsnap"),
    (".actorsnap", flip, ChecksumMismatch, r"\.actorsnap"),
    (MANIFEST, remove, ChecksumMismatch, f"{MANIFEST}: the rank manifest is missing"),
    (MANIFEST, empty, ChecksumMismatch, MANIFEST),
    (MANIFEST, cut, ChecksumMismatch, MANIFEST),
    (MANIFEST, grow, ChecksumMismatch, MANIFEST),
    (MANIFEST, flip, ChecksumMismatch, MANIFEST),
    (DATA, remove, ChecksumMismatch, f"{DATA}: the object is missing"),
    (DATA, empty, ChecksumMismatch, DATA),
    (DATA, cut, ChecksumMismatch, DATA),
    (DATA, flip, ChecksumMismatch, f"{DATA}.*'dense/"),
]


@pytest.mark.parametrize(
    ("name", "damage", "error", "text"),
    DAMAGES,
    ids=[f"{Path(name).name}-{damage.__name__}" for name, damage, _, _ in DAMAGES],
)
def test_damage_is_named(
    copied: Path,
    name: str,
    damage: Callable[[Path], None],
    error: type[ActorSnapError],
    text: str,
) -> None:
    damage(copied / name)
    with pytest.raises(error, match=text):
        read_all(copied)
    (found,) = problems(copied)
    assert isinstance(found, FormatError)
    assert Path(name).name in str(found) or name == ".actorsnap"


def test_quick_verification_looks_at_sizes(copied: Path) -> None:
    """Also where no leaf that is read would notice: bytes too many, a file that is not needed."""
    grow(copied / DATA)
    remove(copied / ATTEMPT / "data" / "numpy" / "0-0.safetensors")
    report = Snapshot(copied).verify("quick")
    assert len(report.problems) == 2
    assert {Path(problem.fields["key"]).parent.name for problem in report.problems} == {
        "dense",
        "numpy",
    }


def spread(size: int, count: int) -> Iterator[int]:
    """Positions from the first byte to the last."""
    step = max(1, size // count)
    yield from range(0, size, step)
    yield size - 1


@pytest.mark.parametrize("name", [".actorsnap", MANIFEST, DATA])
@pytest.mark.parametrize("count", [20, slow(60)])
def test_any_flipped_bit_is_found(copied: Path, name: str, count: int) -> None:
    path = copied / name
    good = path.read_bytes()
    for number, position in enumerate(spread(len(good), count)):
        bad = bytearray(good)
        bad[position] ^= 1 << number % 8
        path.write_bytes(bad)
        found = problems(copied)
        assert len(found) == 1, position
        assert isinstance(found[0], FormatError), position
    path.write_bytes(good)
    assert problems(copied) == []


# Commit objects that are intact, and not what this release reads -----------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the commit object and makes its checksum right."""
    document = json.loads((folder / ".actorsnap").read_bytes())
    change(document)
    document["crc32c"] = "0" * 8
    raw = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    checksum = f"{crc32c(raw):08x}".encode()
    (folder / ".actorsnap").write_bytes(raw.replace(b"0" * 8, checksum, 1))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], type[ActorSnapError], str]] = {
    "newer version": (lambda d: d.update(version=2), UnsupportedFormat, "version 2"),
    "unknown feature": (
        lambda d: d.update(features=["delta", "zstd"]),
        UnsupportedFormat,
        "delta, zstd",
    ),
    "unknown member": (lambda d: d.update(color="red"), FormatError, "color"),
    "no member": (lambda d: d.pop("attempt"), FormatError, "attempt"),
    "climbing key": (
        lambda d: d["manifests"][0].update(key="../other/manifest/0.json"),
        FormatError,
        r"\.\./other",
    ),
    "absolute key": (
        lambda d: d["manifests"][0].update(key="/etc/passwd"),
        FormatError,
        "/etc/passwd",
    ),
    "another format": (lambda d: d.update(format="other"), NotASnapshot, "other"),
    "too few manifests": (lambda d: d.update(world_size=2), FormatError, "manifests"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_intact_but_not_ours(copied: Path, case: str) -> None:
    change, error, text = CHANGES[case]
    rewrite(copied, lambda document: None)
    read_all(copied)  # rewriting as such is harmless
    rewrite(copied, change)
    with pytest.raises(error, match=text):
        read_all(copied)


def test_a_manifest_that_climbs_is_refused(copied: Path) -> None:
    """The same for the keys of data objects, though all checksums are right."""
    path = copied / MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["objects"][0]["key"] = f"{ATTEMPT}/data/../../../../secret"
    raw = json.dumps(manifest).encode()
    path.write_bytes(raw)
    rewrite(copied, lambda d: d["manifests"][0].update(size=len(raw), crc32c=crc32c(raw)))
    with pytest.raises(FormatError, match="secret"):
        read_all(copied)


def test_quantized_leaves_are_of_a_dying_kind() -> None:
    """torch means to remove their constructors; then the key must still fail by name only."""
    assert {"qint8", "quint4x2"} <= set(dir(torch)), "torch dropped quantized dtypes: adapt v1"
