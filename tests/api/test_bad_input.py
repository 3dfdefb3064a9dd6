# SPDX-License-Identifier: Apache-2.0
"""Bad input and bad places: each has an error that says what is wrong and what to do."""

from __future__ import annotations

import ast
import asyncio
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap import (
    ChecksumMismatch,
    FormatError,
    IncompatibleState,
    ModelState,
    NotASnapshot,
    ObjectExists,
    Options,
    Snapshot,
    SnapshotAborted,
    StateDict,
    StorageError,
    UnsupportedFormat,
    UsageError,
    sync,
)
from actorsnap.errors import notes_of
from actorsnap.manager.sync import CheckpointManager, every
from actorsnap.options import from_env
from actorsnap.runtime.host import Host
from actorsnap.storage import StorageContext, open_storage
from actorsnap.testing import FaultyStorage, run_blocking_in_thread
from actorsnap.testing.faults import Verb
from tests.api.damage import files, flip_bit, resign, rewrite_commit
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import assert_whole, leftovers, number_at, number_of, state
from tests.api.zygote import Zygote

FAST = Options(fsync=False)


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.shared()


@pytest.fixture(scope="module")
def other() -> Iterator[Zygote]:
    """A second one: each runs one call at a time."""
    with Zygote() as other:
        yield other


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a snapshot of state 1."""
    sync.Snapshot.take(tmp_path / "saved", state(1), options=FAST)
    return tmp_path / "saved"


# What is given


class Untouchable:
    """A stateful of which nothing may be asked."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("state_dict was called")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("load_state_dict was called")


APP_STATES = [
    ({"model": torch.ones(3)}, r"'model' is of type Tensor.*StateDict"),
    ({"a": {"x": 1}, "b": 2}, r"(?s)'a' is of type dict.*'b' is of type int"),
    ({3: Untouchable()}, r"3 is of type int, not str"),
    ({"model": Untouchable}, r"'model' is of type type"),
    ([("model", Untouchable())], r"must be a dict.*not a list"),
    ({}, r"empty"),
    (None, r"must be a dict"),
]


@pytest.mark.parametrize(("app_state", "says"), APP_STATES)
def test_no_stateful(tmp_path: Path, app_state: Any, says: str) -> None:
    for call in (sync.Snapshot.take, sync.Snapshot.async_take):
        with pytest.raises(UsageError, match=says):
            call(tmp_path / "s", app_state)
    with pytest.raises(UsageError, match=says):
        sync.Snapshot(tmp_path / "s").restore(app_state)
    assert os.listdir(tmp_path) == []


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"replicated": "model/**"}, r"replicated must be a list of globs: \['model/\*\*'\]"),
    ({"replicated": 3}, "replicated must be a list"),
    ({"replicated": [3]}, "replicated must be a list"),
    ({"metadata": [1]}, "metadata"),
    ({"metadata": 7}, "metadata"),
    ({"metadata": {"a": {1, 2}}}, "metadata"),
    ({"metadata": {"a": (1, 2)}}, "metadata"),
    ({"metadata": {1: 2}}, "metadata"),
    ({"metadata": {"a": float("nan")}}, "metadata"),
    ({"metadata": {"a": [float("inf")]}}, "metadata"),
    ({"metadata": {"a": 1 << 64}}, "metadata"),
    ({"metadata": {"a": "\ud800"}}, "metadata"),
    ({"metadata": {"a": torch.ones(1)}}, "metadata"),
    ({"metadata": {"a": b"bytes"}}, "metadata"),
    *[
        ({"step": step}, "step must be an integer of at least 0, or None, not ")
        for step in (-1, True, 1.0, "7", 1 << 63, torch.tensor(3))
    ],
    ({"storage_options": 3}, "storage_options must be a dict"),
    ({"storage_options": {"region": "x"}}, "takes no storage_options, but got: region"),
    ({"options": {"fsync": False}}, "options must be actorsnap.Options, not dict"),
]


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    for call in (sync.Snapshot.take, sync.Snapshot.async_take):
        with pytest.raises(UsageError, match=says):
            call(tmp_path / "s", {"model": Untouchable()}, **arguments)
    assert os.listdir(tmp_path) == []


def test_metadata_that_nests_too_deep(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(600):
        deep = {"a": deep}
    with pytest.raises(UsageError, match="metadata"):
        sync.Snapshot.take(tmp_path / "s", state(1), metadata=deep)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["", None, 3, b"bytes", ["list"], "nul\0"])
def test_a_bad_path(path: Any) -> None:
    with pytest.raises(UsageError, match="path"):
        sync.Snapshot.take(path, {"model": Untouchable()})
    with pytest.raises(UsageError, match="path"):
        sync.Snapshot(path).get_manifest()


OPTIONS: list[dict[str, Any]] = [
    {"fsync": "no"},
    {"verify": None},
    {"allow_pickle": 1},
    {"timeout_s": 0},
    {"timeout_s": -1.0},
    {"timeout_s": float("nan")},
    {"timeout_s": float("inf")},
    {"timeout_s": "60"},
    {"timeout_s": None},
    {"timeout_s": 24 * 3600 + 1},
    {"memory_budget_bytes": 0},
    {"memory_budget_bytes": 1.5},
    {"chunk_bytes": 1 << 20},
    {"chunk_bytes": "16MiB"},
    {"num_uploaders": 0},
    {"max_objects": True},
    {"min_object_bytes": 0},
    {"max_gap_bytes": -1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"Options.{next(iter(options))} must"):
        Options(**options)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("ACTORSNAP_FSYNC", "maybe", "ACTORSNAP_FSYNC='maybe': write true, false, 1 or 0"),
        ("ACTORSNAP_CHUNK_BYTES", "16MiB", "ACTORSNAP_CHUNK_BYTES='16MiB'"),
        ("ACTORSNAP_CHUNK_BYTES", "1", "Options.chunk_bytes must be"),
        ("ACTORSNAP_TIMEOUT_S", "inf", "Options.timeout_s must"),
        ("ACTORSNAP_CHUNK_BYTE", "1", "_BYTE is unknown; did you mean 'ACTORSNAP_CHUNK_BYTES'?"),
    ],
)
def test_bad_environment(
    tmp_path: Path, variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        from_env({variable: value, "OTHER": "x"})
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=re.escape(says)):
        sync.Snapshot.take(tmp_path / "s", {"model": Untouchable()})
    with pytest.raises(UsageError, match=re.escape(says)):
        sync.Snapshot(tmp_path / "s")
    assert os.listdir(tmp_path) == []


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    says = r"unknown storage scheme 'nowhere'; known are: .*file, fs, .*memory"
    with pytest.raises(UsageError, match=says):
        sync.Snapshot.take("nowhere://host/s", {"model": Untouchable()})
    with pytest.raises(UsageError, match=says):
        sync.Snapshot("nowhere://host/s").restore({"model": Untouchable()})


async def test_an_unknown_scheme_is_looked_up_without_blocking() -> None:
    """Entry points are files. (A blocking call in an event loop fails the test.)"""
    with pytest.raises(UsageError, match="unknown storage scheme 'nowhere'"):
        await Snapshot.take("nowhere://host/s", {"model": Untouchable()})
    with pytest.raises(UsageError, match="unknown storage scheme 'nowhere'"):
        await Snapshot("nowhere://host/s").restore({"model": Untouchable()})


def test_bad_reading(saved: Path) -> None:
    snapshot = sync.Snapshot(saved)
    with pytest.raises(UsageError, match=r'level must be "quick" or "full"'):
        snapshot.verify("fast")
    with pytest.raises(UsageError, match=r"no key 'modle'; did you mean 'model'\?$"):
        snapshot.get_state_dict_for_key("modle")
    with pytest.raises(UsageError, match=r"no key 'rng'; it has 'model', 'optimizer'"):
        snapshot.get_state_dict_for_key("rng")
    for path in ("model/wieght", "0/model/wieght"):
        with pytest.raises(UsageError, match=r"no path 'model/wieght'; did you mean 'model/weight"):
            snapshot.read_object(path)
    with pytest.raises(UsageError, match=r"no path 'zz'; it has 'model', 'optimizer'"):
        snapshot.read_object("zz")
    with pytest.raises(UsageError, match="has only rank 0$"):
        snapshot.read_object("1/model/weight")
    with pytest.raises(UsageError, match="memory_budget_bytes must be at least 1048576"):
        snapshot.read_object("0/model/weight", memory_budget_bytes=1000)
    with pytest.raises(UsageError, match="path"):
        snapshot.read_object(3)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleState, match="float64 in out") as caught:
        snapshot.read_object("0/model/weight", out=torch.zeros(270_000, dtype=torch.float64))
    assert "out does not fit the snapshot; nothing was changed" in str(caught.value)
    assert "strict=" not in str(caught.value)
    assert "cast=" not in str(caught.value)


# Places


def test_a_file_system_that_takes_no_folders() -> None:
    for path in ("/proc/actorsnap", "/proc/actorsnap/below"):
        match = "the folder /proc/actorsnap cannot be created: the file system of /proc allows no"
        with pytest.raises(SnapshotAborted, match=match) as caught:
            sync.Snapshot.take(path, state(1))
        assert type(caught.value.__cause__) is StorageError


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for call in (sync.Snapshot.take, lambda *args: sync.Snapshot.async_take(*args).wait()):
        with pytest.raises(SnapshotAborted, match="is a file; name a folder") as caught:
            call(path, state(1))
        assert isinstance(caught.value.__cause__, StorageError)
        with pytest.raises(SnapshotAborted, match="is a file"):
            call(path / "below", state(1))
    with pytest.raises(
        NotASnapshot, match="a snapshot is a folder, and so is a run: check the path"
    ):
        sync.Snapshot(path).restore(state(1))
    with pytest.raises(StorageError, match=f"{path} is a file"):
        sync.Snapshot(path / "below").restore(state(1))
    assert path.read_text() == "mine"


def test_a_folder_without_permission(zygote: Zygote) -> None:
    # Not tmp_path: another user must be able to come near it.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sync.Snapshot.take(folder / "s", state(1), options=FAST)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            found = zygote.call("save_as_nobody", folder=name).result()
        finally:
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755)
        for outcome in (found["new"], found["replacing"]):
            assert outcome["error"] == "SnapshotAborted"
            assert outcome["cause"] == "AccessDenied"
            assert "check owner and mode of the file or folder: this process has" in outcome["says"]
        assert found["restored"] == 1
        assert found["hidden"] == "AccessDenied"
        assert os.listdir(folder) == ["s"]
        assert asyncio.run(number_at(folder / "s")) == 1
        assert asyncio.run(leftovers(folder / "s")) == []


def test_a_full_disk(zygote: Zygote, tmp_path: Path) -> None:
    found = zygote.call("fill_disk", folder=str(tmp_path)).result()
    failures, last = found["rounds"][:-1], found["rounds"][-1]
    assert len(failures) > 3
    for one in failures:
        assert one["error"] == "SnapshotAborted", one
        assert one["cause"] == "StorageFull", one
        assert "bytes were left when it failed. Delete old snapshots" in one["says"], one
        assert "`actorsnap prune ROOT --keep last:1`; others: `actorsnap rm PATH`)" in one["says"]
        assert one["older"] == 1, one
        assert one["left"] == [], one
    # Every object has been the one that did not fit.
    keys = {re.sub(r"^[0-9T]+-[0-9a-f-]+", "", one["key"]) for one in failures}
    assert {"/data/model/0-0.safetensors", "/manifest/0.json", "actorsnap.json"} <= keys
    assert last == {"error": "", "older": 2, "left": []}


def test_no_inodes(zygote: Zygote, tmp_path: Path) -> None:
    """The bytes that are free would send people looking for other reasons."""
    found = zygote.call("fill_inodes", folder=str(tmp_path)).result()
    assert (found["error"], found["cause"]) == ("SnapshotAborted", "StorageFull")
    assert "no inodes are free, so no file can be created. " in found["says"]
    assert "bytes were left" not in found["says"]


def test_the_reason_comes_first(tmp_path: Path) -> None:
    with faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs={Verb.PUT})):
        with pytest.raises(SnapshotAborted) as caught:
            sync.Snapshot.take(faulty_url(str(tmp_path / "s")), state(1), options=FAST)
    error = caught.value
    assert error.rank == 0
    assert error.stage == "store"
    assert error.key is not None
    key = re.escape(repr(error.key))
    says = rf"snapshot aborted: a scripted fault \(put of {key} in .*\) \(rank 0, stage 'store'\)"
    assert re.fullmatch(says, str(error))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.fields) == (str(error), error.fields)


# What lies there


OBJECTS = ["commit", "manifest", "data"]
READERS: dict[str, Callable[[Path], object]] = {
    "restore": lambda path: sync.Snapshot(path).restore(state(-1)),
    "read_object": lambda path: sync.Snapshot(path).read_object("0/model/weight"),
    "get_state_dict_for_key": lambda path: sync.Snapshot(path).get_state_dict_for_key("model"),
}


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path) -> None:
    flip_bit(path, 8 * path.stat().st_size * 2 // 3)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "emptied": _empty,
    "flipped": _flip,
    "missing": os.unlink,
}


@pytest.mark.few
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_reading_what_is_damaged(saved: Path, name: str, damage: str, reader: str) -> None:
    path = files(saved)[name]
    DAMAGES[damage](path)
    with pytest.raises(FormatError) as caught:
        READERS[reader](saved)
    if (name, damage) == ("commit", "missing"):
        assert isinstance(caught.value, NotASnapshot)
        assert caught.value.found == "unfinished"
    else:
        assert isinstance(caught.value, ChecksumMismatch)
        assert caught.value.key == str(path.relative_to(saved))
        assert caught.value.url == str(saved)
        said = str(caught.value)
        reason = f"{caught.value.key}: {caught.value.detail}"
        assert said.startswith(f"{reason}. The snapshot {saved} is damaged: ")
        assert "restore an older one. If it is a copy, verify its source" in said
        if name == "commit":
            assert f"`actorsnap recover {saved} --replace-damaged` writes it again" in said
        else:
            assert f"`actorsnap verify {saved} --full` shows all damage" in said
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.fields) == (said, caught.value.fields)


@pytest.mark.parametrize("name", ["manifest", "data"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_verifying_what_is_damaged(saved: Path, name: str, damage: str, level: str) -> None:
    path = files(saved)[name]
    DAMAGES[damage](path)
    report = sync.Snapshot(saved).verify(level)
    if (name, damage, level) == ("data", "flipped", "quick"):
        assert report.ok  # it looks at sizes only, and says so
        assert repr(report).startswith("VerifyReport(ok=True, level='quick', num_objects=")
        return
    assert not report.ok
    (problem,) = report.problems
    assert isinstance(problem, ChecksumMismatch)
    assert problem.key == str(path.relative_to(saved))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_can_be_replaced_and_deleted(saved: Path, damage: str) -> None:
    DAMAGES[damage](files(saved)["commit"])
    if damage != "missing":
        with pytest.raises(ObjectExists):
            sync.Snapshot.take(saved, state(2), options=FAST)
    sync.Snapshot.take(saved, state(2), overwrite=True, options=FAST)
    if damage == "missing":  # what had lost its commit object is left alone, once
        asyncio.run(assert_whole(saved, 2, is_clean=False))
        sync.Snapshot.take(saved, state(2), overwrite=True, options=FAST)
    asyncio.run(assert_whole(saved, 2))
    DAMAGES[damage](files(saved)["data"])
    sync.Snapshot(saved).delete()
    assert [path for path in saved.rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("victim") / "s"
    small = {"model": StateDict(w=torch.arange(300.0), b=torch.ones(7), c=[1, "x"])}
    sync.Snapshot.take(path, small, metadata={"epoch": 3}, options=FAST)
    return path


@given(data=st.data())
def test_any_flipped_bit_is_found(victim: Path, data: st.DataObject) -> None:
    everything = sorted(path for path in victim.rglob("*") if path.is_file())
    assert len(everything) == 3
    path = data.draw(st.sampled_from(everything))
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    flip_bit(path, bit)
    try:
        found: list[Any] = list(sync.Snapshot(victim).verify("full").problems)
    except FormatError as error:
        found = [error]
    finally:
        flip_bit(path, bit)
    assert len(found) == 1
    assert found[0].key == str(path.relative_to(victim))
    assert sync.Snapshot(victim).verify("full").ok


BAD_KEYS = ["../../outside", "/etc/passwd", "{attempt}/../../outside", "{attempt}//x", "other/x"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_manifest_that_names_what_is_outside(saved: Path, key: str) -> None:
    (saved.parent / "outside").write_bytes(files(saved)["data"].read_bytes())
    bad = key.format(attempt=files(saved)["manifest"].parts[-3])

    def change(manifest: dict[str, Any]) -> None:
        manifest["objects"][0]["key"] = bad

    resign(saved, change)
    for reader in READERS.values():
        with pytest.raises(FormatError, match=f"{re.escape(bad)}.* is not a key in") as caught:
            reader(saved)
        assert type(caught.value) is FormatError


def test_signing_anew_is_right(saved: Path) -> None:
    """The tests around it are worth nothing if it is not."""
    resign(saved, lambda manifest: None)
    rewrite_commit(saved, lambda commit: None)
    asyncio.run(assert_whole(saved, 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "format version 2, and this release reads up to version 1"),
        ({"version": 2, "manifests": "elsewhere", "new": 1}, "format version 2"),
        ({"features": ["delta", "zstd"]}, "needs the features delta, zstd"),
    ],
)
def test_a_snapshot_of_a_newer_release(saved: Path, change: dict[str, Any], says: str) -> None:
    rewrite_commit(saved, lambda commit: commit.update(change))
    for reader in READERS.values():
        with pytest.raises(UnsupportedFormat, match=f"{says}.*Install a newer actorsnap"):
            reader(saved)
    with pytest.raises(UnsupportedFormat):
        sync.Snapshot(saved).verify()
    with pytest.raises(UnsupportedFormat):
        sync.Snapshot(saved).delete()
    with pytest.raises(ObjectExists):
        sync.Snapshot.take(saved, state(2), options=FAST)


def _write_part_of_dcp(path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    (path / ".metadata").unlink()


def _write_dcp_inside(path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    path.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"w": torch.ones(3)}, checkpoint_id=path / "dcp", no_dist=True)


def _write_orbax(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "_CHECKPOINT_METADATA").write_text("{}")


def _write_torch_save(path: Path) -> None:
    path.mkdir()
    torch.save({"w": torch.ones(3)}, path / "last.pt")


def _delete(path: Path) -> None:
    sync.Snapshot(path).delete()


FOREIGN = [
    (_write_part_of_dcp, r"'__0_0\.distcp' is of .*\.metadata .* is missing: the save did not end"),
    (_write_dcp_inside, r"contains checkpoints of .*\(DCP\)\. Open one of them, such as dcp"),
    (_write_orbax, r"Orbax checkpoint.*: orbax\.checkpoint reads it"),
    (_write_torch_save, r"'last\.pt', which another program wrote: open the file by its own path"),
]


@pytest.mark.parametrize(("write", "says"), FOREIGN)
def test_another_librarys_folder(tmp_path: Path, write: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "s"
    write(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for reader in [*READERS.values(), _delete]:
        with pytest.raises(NotASnapshot, match=says) as caught:
            reader(path)
        assert caught.value.found == "foreign"
    # What others wrote is nobody's garbage.
    sync.Snapshot.take(path, state(1), options=FAST)
    sync.Snapshot.take(path, state(2), overwrite=True, options=FAST)
    assert asyncio.run(number_at(path)) == 2
    sync.Snapshot(path).delete()
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def _recover(path: Path) -> object:
    return sync.Snapshot(path).recover()


def _verify(path: Path) -> None:
    sync.Snapshot(path).verify()


def _save_file(path: Path) -> None:
    path.write_bytes(safetensors.torch.save({"w": torch.ones(3)}))


FILES: list[tuple[Callable[[Path], object], str, str]] = [
    (
        lambda path: path.write_bytes(pickle.dumps({"w": 1})),
        "foreign",
        r"a pickle file: pickle\.load reads it",
    ),
    (lambda path: path.write_bytes(b""), "unknown", "this file is empty: a save or a copy did not"),
    (lambda path: path.write_text("hello"), "unknown", "of no format that actorsnap reads"),
]
READABLE: list[tuple[Callable[[Path], object], str, str]] = [
    (
        lambda path: torch.save({"w": torch.ones(3)}, path),
        "foreign",
        r"a file that torch\.save wrote",
    ),
    (
        lambda path: torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False),
        "foreign",
        r"a file that an old torch\.save wrote",
    ),
    (_save_file, "foreign", r"a safetensors file"),
]


@pytest.mark.parametrize(("write", "found", "says"), [*FILES, *READABLE])
def test_a_file_is_told_by_its_content(
    tmp_path: Path, write: Callable[[Path], object], found: str, says: str
) -> None:
    path = tmp_path / "model.pt"
    write(path)
    is_readable = (write, found, says) in READABLE
    readers: list[Callable[[Path], object]] = [_delete, _recover]
    if not is_readable:
        readers += [*READERS.values(), _verify]
    for reader in readers:
        with pytest.raises(NotASnapshot, match=says) as caught:
            reader(path)
        assert caught.value.found == found
        assert caught.value.key == str(path)


async def test_an_object_is_told_by_its_content() -> None:
    """In an object store, nothing is below the URL of a file, and something is at it."""
    storage = open_storage("memory://files", StorageContext(run_blocking=run_blocking_in_thread))
    await storage.put("run/model.bin", [memoryview(pickle.dumps({"w": 1}))])
    with pytest.raises(NotASnapshot, match="this is a pickle file") as caught:
        await Snapshot("memory://files/run/model.bin").get_manifest()
    assert caught.value.found == "foreign"
    with pytest.raises(NotASnapshot, match="no files are there"):
        await Snapshot("memory://files/run/other.bin").get_manifest()


def test_our_own_files_are_called_so(saved: Path) -> None:
    (attempt,) = (path for path in saved.iterdir() if path.is_dir())
    inside = [attempt, attempt / "data", attempt / "data" / "model", attempt / "manifest"]
    for path in (*inside, attempt / "nothing", *files(saved).values()):
        with pytest.raises(NotASnapshot, match=f"the snapshot {saved}: open that") as caught:
            sync.Snapshot(path).restore(state(-1))
        assert caught.value.found == "part"


def test_a_part_that_was_copied_elsewhere(saved: Path, tmp_path: Path) -> None:
    (attempt,) = (path for path in saved.iterdir() if path.is_dir())
    for number, part in enumerate((attempt, attempt / "data", attempt / "data" / "model")):
        shutil.copytree(part, tmp_path / str(number))
        with pytest.raises(NotASnapshot, match="these files are a part of an actorsnap") as caught:
            sync.Snapshot(tmp_path / str(number)).restore(state(-1))
        assert caught.value.found == "part"


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(NotASnapshot, match="no files are there; check the path$") as caught:
        sync.Snapshot(tmp_path).restore(state(-1))
    assert caught.value.found == "absent"


def test_snapshots_and_attempts_further_below(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    shutil.copytree(saved, tmp_path / "runs" / "a" / "s")
    with pytest.raises(
        NotASnapshot, match="this folder contains snapshots. Open one of them, such as a/s"
    ) as caught:
        sync.Snapshot(tmp_path / "runs").restore(state(-1))
    assert caught.value.found == "unknown"
    files(tmp_path / "runs" / "a" / "s")["commit"].unlink()
    with pytest.raises(NotASnapshot, match="only unfinished attempts are there, in a/s") as caught:
        sync.Snapshot(tmp_path / "runs").restore(state(-1))
    assert caught.value.found == "unfinished"


def test_nothing_and_a_folder_of_snapshots(saved: Path) -> None:
    with pytest.raises(NotASnapshot, match="no files are there; check the path") as caught:
        sync.Snapshot(saved.parent / "svaed").restore(state(-1))
    assert caught.value.found == "absent"
    with pytest.raises(
        NotASnapshot, match="this folder contains snapshots. Open one of them, such as saved"
    ):
        sync.Snapshot(saved.parent).restore(state(-1))


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (5, r"attempts.*{} \(2 objects\)\. If a save.* wait for it.*actorsnap rm --garbage"),
        (6, r"a complete attempt: {} \(3 objects\).*actorsnap recover"),
    ],
)
def test_an_unfinished_attempt_says_what_is_in_it(
    zygote: Zygote, tmp_path: Path, at: int, says: str
) -> None:
    url = str(tmp_path / "s")
    killed = zygote.call(
        "save_and_die_at_operation",
        url=url,
        number=1,
        how="take",
        overwrite=False,
        at=at,
        when="after",
    )
    assert killed.was_killed
    (attempt,) = os.listdir(url)
    for reader in READERS.values():
        with pytest.raises(NotASnapshot, match=says.format(attempt)) as caught:
            reader(Path(url))
        assert caught.value.found == "unfinished"


# Two at once


@pytest.mark.parametrize("overwrite", [False, True], ids=["first", "replacing"])
def test_two_processes_take_to_the_same_path(
    zygote: Zygote, other: Zygote, tmp_path: Path, overwrite: bool
) -> None:
    num_rounds = 10
    for name in "ab":
        os.mkfifo(tmp_path / name)
    fifos = [str(tmp_path / name) for name in "ab"]
    for number, (one, pair) in enumerate([(zygote, fifos), (other, fifos[::-1])]):
        one.start(
            "race",
            url=str(tmp_path),
            number=number,
            overwrite=overwrite,
            fifos=pair,
            num_rounds=num_rounds,
        )
    outcomes = list(zip(zygote.end().result(), other.end().result(), strict=True))
    for round_, outcome in enumerate(outcomes):
        url = str(tmp_path / str(round_))
        found = asyncio.run(number_at(url))
        if overwrite:
            assert outcome == ("", "")
            assert found in (0, 1)
        else:
            assert sorted(outcome) == ["", "ObjectExists"]
            assert found == outcome.index("")
            assert asyncio.run(leftovers(url)) == []
        sync.Snapshot.take(url, state(3), overwrite=True, options=FAST)
        asyncio.run(assert_whole(url, 3))


@pytest.mark.few
@pytest.mark.parametrize("overwrite", [False, True], ids=["first", "replacing"])
@pytest.mark.parametrize("scheme", ["fs", "memory"])
async def test_two_tasks_take_to_the_same_path(
    tmp_path: Path, overwrite: bool, scheme: str
) -> None:
    for round_ in range(8):
        url = str(tmp_path / str(round_)) if scheme == "fs" else f"memory://two-tasks/{round_}"
        outcomes = dict.fromkeys(range(4), "")

        async def save(number: int, url: str = url, outcomes: dict[int, str] = outcomes) -> None:
            try:
                await Snapshot.take(url, state(number), overwrite=overwrite, options=FAST)
            except ObjectExists:
                outcomes[number] = "ObjectExists"

        async with anyio.create_task_group() as tasks:
            for number in outcomes:
                tasks.start_soon(save, number)
        committed = [number for number, outcome in outcomes.items() if not outcome]
        assert len(committed) == (4 if overwrite else 1)
        assert await number_at(url) in committed
        await Snapshot.take(url, state(5), overwrite=True, options=FAST)
        await assert_whole(url, 5)


async def test_a_late_collector_spares_what_was_committed_meanwhile(tmp_path: Path) -> None:
    """The first of two has committed and looks for garbage; then the second replaces it."""
    url = str(tmp_path / "s")
    late = LateCollector(url)
    with faulty(late.wrap):
        await Snapshot.take(faulty_url(url), state(1), overwrite=True, options=FAST)
    assert late.was_late
    await assert_whole(url, 2, is_clean=False)


class LateCollector:
    """Takes another snapshot to ``url`` just after somebody else has listed it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.was_late = False

    def wrap(self, inner: Any) -> Any:
        collector = self

        class Late(FaultyStorage):
            async def list_folders(self, folder: str = "") -> Any:
                await Snapshot.take(collector._url, state(2), overwrite=True, options=FAST)
                collector.was_late = True
                return await super().list_folders(folder)

        return Late(inner)


async def test_deleting_spares_what_another_is_writing(tmp_path: Path) -> None:
    """It would commit a ruin."""
    url = str(tmp_path / "s")
    await Snapshot.take(url, state(1), options=FAST)
    barrier = Barrier(1, verbs=frozenset({"put"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = await Snapshot.async_take(faulty_url(url), state(2), overwrite=True, options=FAST)
        assert await asyncio.to_thread(barrier.wait_reached)
        await Snapshot(url).delete()
        assert await number_at(url) is None
        barrier.release()
        await pending.wait()
    await assert_whole(url, 2)


# What does not fit


class Module(torch.nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 2, dtype=dtype)


class Recorded(Untouchable):
    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    old = Module(3, torch.float32)
    old.extra = torch.nn.Parameter(torch.ones(1))
    sync.Snapshot.take(
        url,
        {"net": old, "loose": StateDict(a=torch.ones(2), b=torch.ones(3), c=1, fits=torch.ones(9))},
        options=FAST,
    )
    net = Module(4, torch.float64)
    loose = StateDict(
        a=torch.zeros(5),
        b=torch.zeros(3, dtype=torch.int8),
        new=torch.zeros(1),
        fits=torch.zeros(9),
    )
    other = Recorded(x=1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    storages: list[FaultyStorage] = []

    def counted(inner: Any) -> FaultyStorage:
        storages.append(FaultyStorage(inner))
        return storages[-1]

    with faulty(counted), pytest.raises(IncompatibleState) as caught:
        sync.Snapshot(faulty_url(url)).restore({"net": net, "loose": loose, "other": other})
    error = caught.value
    assert set(error.missing) == {"loose/new", "other"}
    assert set(error.unexpected) == {"net/extra"}
    mismatched = "\n".join(error.mismatched)
    for path in ("net/layer.weight", "net/layer.bias", "loose/a", "loose/b"):
        assert path in mismatched
    assert len(error.mismatched) == 4
    for path in (*error.missing, *error.unexpected, *error.mismatched):
        assert path in str(error)
    assert "strict=False" in str(error)
    # Only the index was read, and nobody's tensor was touched.
    (storage,) = storages
    assert storage.counts[Verb.READ_INTO] == 0
    assert storage.counts[Verb.GET] == 2
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert loose["a"].tolist() == [0] * 5
    assert loose["fits"].tolist() == [0] * 9


def test_misspelt_keys_of_an_app_state(saved: Path) -> None:
    app_state = state(-1)
    app_state["modle"] = app_state.pop("model")
    app_state["unlike"] = app_state.pop("progress")
    with pytest.raises(IncompatibleState) as caught:
        sync.Snapshot(saved).restore(app_state)
    assert caught.value.missing == ("modle", "unlike")
    assert list(caught.value.hints) == [
        "the snapshot has no keys 'modle', 'unlike'; it has 'model', 'progress'. If the keys have "
        "other names there, pass rename={'model': 'modle', 'progress': 'unlike'} to "
        "Snapshot.restore"
    ]
    assert "other names, rename= of Snapshot.restore maps them" in str(caught.value)
    assert all(str(caught.value).count(hint) == 1 for hint in caught.value.hints)
    assert not notes_of(caught.value)  # which a traceback prints as well


def test_a_key_with_the_same_names_is_suggested(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    others = {name: 1 for name in ("args", "best", "epoch", "model_size", "rng", "sched")}
    torch.save({**others, "state_dict": model.state_dict()}, tmp_path / "old.pt")
    with pytest.raises(IncompatibleState) as caught:
        sync.Snapshot(tmp_path / "old.pt").restore({"model": torch.nn.Linear(3, 2)})
    assert list(caught.value.hints) == [
        "the snapshot has no key 'model'; it has 'state_dict', 'args', 'best', 'epoch', "
        "'model_size', .... If the key has another name there, pass rename={'state_dict': 'model'} "
        "to Snapshot.restore"
    ]


@pytest.mark.parametrize(
    ("rename", "right"),
    [
        ({"model/encoder": "det.trunk"}, {"model/encoder": "det/trunk"}),
        ({"model/encoder.": "det.trunk."}, {"model/encoder.": "det/trunk."}),
        ({"model/encoder": "deet"}, {"model/encoder": "det"}),
    ],
)
def test_a_rename_to_no_key_of_the_app_state(
    tmp_path: Path, rename: dict[str, str], right: dict[str, str]
) -> None:
    encoder, trunk = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    saved = torch.nn.ModuleDict({"encoder": encoder, "head": torch.nn.Linear(2, 1)})
    sync.Snapshot.take(tmp_path / "s", {"model": saved})
    is_whole = "det" in right.values()
    det = trunk if is_whole else torch.nn.ModuleDict({"trunk": trunk})
    snapshot = sync.Snapshot(tmp_path / "s")
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"det": det}, rename=rename)
    assert str(right) in caught.value.hints[0]
    snapshot.restore({"det": det}, rename=right)
    assert torch.equal(trunk.weight, encoder.weight)


def test_the_folder_of_a_step_is_named(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, {"p": StateDict(a=1)}, save=every.steps(1)) as manager:
        manager.maybe_save(350)
    (step,) = root.glob("step-*")
    for name in ("step-350", "step_350", "step-0000000350", "step-350.g7"):
        with pytest.raises(
            NotASnapshot, match=f"no files are there; that step is {step}$"
        ) as caught:
            sync.Snapshot(root / name).keys()
        assert caught.value.found == "absent"
    for name in ("step-35", "step-3500", "350"):
        with pytest.raises(NotASnapshot, match="no files are there; check the path$"):
            sync.Snapshot(root / name).keys()


def test_nothing_is_saved_through_a_link_with_an_absolute_target(tmp_path: Path) -> None:
    state = {"p": StateDict(a=1)}
    with CheckpointManager(tmp_path / "run", state, save=every.steps(1)) as manager:
        manager.maybe_save(350)
    (step,) = (tmp_path / "run").glob("step-*")
    targets = {"step": step, "latest": tmp_path / "run" / "latest", "root": tmp_path / "run"}
    for name, target in targets.items():
        link = tmp_path / name
        link.symlink_to(target)
        reason = "is the root of" if name == "root" else f"is a link to {step.name},"
        with pytest.raises(UsageError, match=f"^{link} {reason}"):
            sync.Snapshot.take(link, state, overwrite=True)


def test_a_misspelt_entry(tmp_path: Path) -> None:
    snapshot = sync.Snapshot.take(tmp_path / "s", {"p": StateDict(epoch=3, best=1, seed=2)})
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"p": StateDict(epochs=0, best=0, loss=0)})
    assert caught.value.missing == ("p/epochs", "p/loss")
    assert list(caught.value.hints) == ["the snapshot has no 'p/epochs'; did you mean 'p/epoch'?"]


def test_flat_names_are_compared_by_their_last_part(tmp_path: Path) -> None:
    app_state = {"p": StateDict({"groups.weight.lr": 1, "groups.weight.betas": 2})}
    snapshot = sync.Snapshot.take(tmp_path / "s", app_state)
    for name, hints in (
        ("initial_lr", []),
        ("beta", ["the snapshot has no 'p/groups.weight.beta'; did you mean "]),
    ):
        with pytest.raises(IncompatibleState) as caught:
            snapshot.restore({"p": StateDict({f"groups.weight.{name}": 0})})
        assert caught.value.missing == (f"p/groups.weight.{name}",)
        assert [hint.split("'p/groups.weight.betas'?")[0] for hint in caught.value.hints] == hints


def trained(names: str, *, has_scheduler: bool = False) -> dict[str, Any]:
    sizes = [(4, 3), (3, 2), (3, 2)]
    layers = zip(names.split(), sizes, strict=True)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in layers})
    optimizer = torch.optim.AdamW(model.parameters())
    if has_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"train": ModelState(model, optimizer)}


@pytest.mark.parametrize("rename", [None, {"train/model/0": "train/model/encoder"}])
def test_the_rename_of_a_layer_is_whole(tmp_path: Path, rename: dict[str, str] | None) -> None:
    """It has the optimizer's names, and the user's own, too."""
    app_state = trained("0 1 head")
    snapshot = sync.Snapshot.take(tmp_path / "s", app_state)
    other = trained("encoder 1 head")
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore(other, rename=rename)
    (hint,) = caught.value.hints
    found = re.fullmatch("if layers have other names, pass rename=(.*) to Snapshot.restore", hint)
    assert found is not None
    suggested = ast.literal_eval(found[1])
    assert suggested == {
        "train/model/0": "train/model/encoder",
        "train/optim/state.0": "train/optim/state.encoder",
        "train/optim/param_groups.0": "train/optim/param_groups.encoder",
    }
    assert "train/optim/state.encoder.bias.* (step, exp_avg, exp_avg_sq)" in str(caught.value)
    assert "param_groups.encoder.bias.* (lr, betas, eps and " in str(caught.value)
    assert len(str(caught.value).splitlines()) < 15
    assert snapshot.restore(other, rename=suggested).is_complete
    saved, restored = app_state["train"].model["0"], other["train"].model["encoder"]
    assert torch.equal(restored.weight, saved.weight)


@pytest.mark.parametrize(
    ("names", "rename"),
    [
        ("first one two", {"m/0": "m/first"}),  # the others are alike
        ("1 first head", {}),  # 1 has another shape
        ("first second head", {"m/0": "m/first", "m/1": "m/second"}),
    ],
)
def test_layers_that_are_alike_are_not_guessed(
    tmp_path: Path, names: str, rename: dict[str, str]
) -> None:
    snapshot = sync.Snapshot.take(tmp_path / "s", {"m": trained("0 1 head")["train"].model})
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"m": trained(names)["train"].model})
    hints = [f"if layers have other names, pass rename={rename} to Snapshot.restore"]
    assert list(caught.value.hints) == (hints if rename else [])


def test_a_scheduler_that_is_new(tmp_path: Path) -> None:
    snapshot = sync.Snapshot.take(tmp_path / "s", trained("0 1 head"))
    app_state = trained("0 1 head", has_scheduler=True)
    with pytest.raises(IncompatibleState, match="restore before you make the scheduler") as caught:
        snapshot.restore(app_state)
    assert "rename=" not in str(caught.value)
    report = snapshot.restore(app_state, strict=False)
    assert {path.rpartition(".")[2] for path in report.missing} == {"initial_lr"}
    (group,) = app_state["train"].optimizers[0].param_groups
    assert group["initial_lr"] == group["lr"]
    app_state = trained("0 1 head")
    assert snapshot.restore(app_state).is_complete
    torch.optim.lr_scheduler.StepLR(app_state["train"].optimizers[0], 10)


def test_a_scheduler_that_is_not_new(tmp_path: Path) -> None:
    """The rename is the remedy; strict=False would leave the layer out."""
    snapshot = sync.Snapshot.take(tmp_path / "s", trained("0 1 head", has_scheduler=True))
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore(trained("encoder 1 head", has_scheduler=True))
    (hint,) = caught.value.hints
    assert hint.startswith("if layers have other names")


def test_a_model_for_a_model_state_and_the_other_way_round(tmp_path: Path) -> None:
    snapshot = sync.Snapshot.take(tmp_path / "s", trained("0 1 head"))
    model = trained("0 1 head")["train"].model
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"train": model})
    assert list(caught.value.hints) == [
        "a ModelState saved 'train': pass ModelState(model) instead of the model"
    ]
    assert snapshot.restore({"train": ModelState(model)}).is_complete
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"model": model})
    assert list(caught.value.hints) == [
        "the snapshot has no key 'model'; it has 'train'. If the key has another name there, pass "
        "rename={'train/model': 'model'} to Snapshot.restore"
    ]
    assert snapshot.restore({"model": model}, rename={"train/model": "model"}).is_complete
    apart = sync.Snapshot.take(tmp_path / "t", {"model": model, "step": StateDict(n=1)})
    with pytest.raises(IncompatibleState) as caught:
        apart.restore({"train": ModelState(model)})
    assert list(caught.value.hints) == [
        "the snapshot has no key 'train'; it has 'model', 'step'. If the key has another name "
        "there, pass rename={'model': 'train/model'} to Snapshot.restore"
    ]
    assert apart.restore({"train": ModelState(model)}, rename={"model": "train/model"}).is_complete


def test_several_keys_that_the_snapshot_lacks(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    mine = {"model": model, "progress": StateDict(n=0), "other": StateDict(n=0)}
    snapshot = sync.Snapshot.take(tmp_path / "s", {"model": model})
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore(mine)
    assert list(caught.value.hints) == [
        "the snapshot has no keys 'progress', 'other'; it has 'model'. To leave them as they are, "
        "pass keys=['model'] to Snapshot.restore"
    ]
    # With other keys in the snapshot, most of it would be left out.
    snapshot = sync.Snapshot.take(tmp_path / "t", {"model": model, "xyz": StateDict(n=1)})
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"model": model, "one": StateDict(a=0), "two": StateDict(b=0)})
    assert list(caught.value.hints) == ["the snapshot has no keys 'one', 'two'; it has 'xyz'"]


def test_a_key_of_an_old_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save({"model_state_dict": model.state_dict(), "epoch": 3}, tmp_path / "old.pt")
    snapshot = sync.Snapshot(tmp_path / "old.pt")
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"model": torch.nn.Linear(3, 2)})
    assert list(caught.value.hints) == [
        "the snapshot has no key 'model'; it has 'model_state_dict', 'epoch'. If the key has "
        "another name there, pass rename={'model_state_dict': 'model'} to Snapshot.restore"
    ]
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"model_state_dict": model, "epoch": StateDict(), "more": StateDict()})
    assert list(caught.value.hints) == [
        "the snapshot has no key 'more'; it has 'epoch', 'model_state_dict'. To leave it as it is, "
        "pass keys=['model_state_dict', 'epoch'] to Snapshot.restore"
    ]


def app_states_of_an_old_run() -> dict[str, dict[str, Any]]:
    train = trained("0 1 head")["train"]
    model, (optimizer,) = train.model, train.optimizers
    return {
        "apart": {"model": model, "optimizer": optimizer},
        "progress": {"progress": StateDict(epoch=0), "model": model, "optimizer": optimizer},
        "other names": {"net": model, "opt": optimizer},
        "state": {"state": train},
        "layer": {"head": model["head"]},
    }


@pytest.mark.parametrize("names", [*app_states_of_an_old_run()])
@pytest.mark.parametrize("place", ["{}", "run/{}", "{}/module.", "deep/run/{}/module."])
def test_the_rename_of_an_old_checkpoint(tmp_path: Path, place: str, names: str) -> None:
    """One rename for all keys, wherever the file has them."""
    old = trained("0 1 head")["train"]
    (optimizer,) = old.optimizers
    sum(layer.weight.sum() for layer in old.model.values()).backward()
    optimizer.step()
    where, _, prefix = place.partition("/module")
    state = {f"{prefix and 'module.'}{k}": v for k, v in old.model.state_dict().items()}
    saved = {"model_state_dict": state, "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    for key in reversed(where.split("/")[:-1]):
        saved = {key: saved, "at": 1}
    torch.save(saved, tmp_path / "old.pt")
    app_state = app_states_of_an_old_run()[names]
    snapshot = sync.Snapshot(tmp_path / "old.pt")
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore(app_state)
    (hint,) = caught.value.hints
    rename = ast.literal_eval(hint.partition("rename=")[2].removesuffix(" to Snapshot.restore"))
    if names == "progress" and where == "{}":
        del app_state["progress"]  # the file's number has no key of its own
    assert snapshot.restore(app_state, rename=rename).is_complete
    model = app_state.get("model", app_state.get("net"))
    model = app_state["state"].model if "state" in app_state else model
    head = app_state["head"] if model is None else model["head"]
    assert torch.equal(head.weight, old.model["head"].weight)


@pytest.mark.parametrize("rename", [None, {"model": "train", "optimizer": "rest"}])
def test_a_plain_model_for_a_model_state(tmp_path: Path, rename: dict[str, str] | None) -> None:
    old = trained("0 1 head")["train"]
    parts = {"model": old.model, "optimizer": old.optimizers[0]}
    snapshot = sync.Snapshot.take(tmp_path / "s", parts)
    key = "model" if rename is None else "train"
    app_state = {key: trained("0 1 head")["train"]}
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore(app_state, rename=rename)
    whole = {"model": f"{key}/model", "optimizer": f"{key}/optim"}
    assert list(caught.value.hints) == [
        f"'{key}' is a plain model in the snapshot, and a ModelState in the app state: pass "
        f"rename={whole} to Snapshot.restore"
    ]
    assert snapshot.restore(app_state, rename=whole).is_complete


def test_the_rename_of_a_file_with_two_optimizers(tmp_path: Path) -> None:
    old = trained("0 1 head")["train"]
    state = old.optimizers[0].state_dict()
    file = {"model": old.model.state_dict(), "optim": state, "optimizer": state}
    torch.save(file, tmp_path / "old.pt")
    snapshot, app_state = sync.Snapshot(tmp_path / "old.pt"), trained("0 1 head")
    rename = {"model": "train/model", "optim": "train/optim"}
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore(app_state)
    assert f"pass rename={rename} to Snapshot.restore" in caught.value.hints[0]
    assert snapshot.restore(app_state, rename=rename).is_complete
    # The user's own is a part of it.
    with pytest.raises(IncompatibleState) as caught:
        snapshot.restore({"net": old.model, "opt": old.optimizers[0]}, rename={"model": "net"})
    rename = {"model": "net", "optim": "opt"}
    assert f"pass rename={rename} to Snapshot.restore" in caught.value.hints[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    sync.Snapshot.take(tmp_path, {"own": StateDict(w=torch.zeros(3))})
    with pytest.raises(IncompatibleState, match="dtype float32 in the snapshot") as caught:
        sync.Snapshot(tmp_path).restore({"own": StateDict(w=torch.zeros(3, dtype=dtype))})
    assert ("cast=True" in str(caught.value)) is dtype.is_floating_point


@pytest.mark.parametrize("cast", [False, True])
def test_another_dtype_and_shape(tmp_path: Path, cast: bool) -> None:
    """A cast would not help."""
    sync.Snapshot.take(tmp_path, {"own": StateDict(w=torch.zeros(3))})
    target = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(IncompatibleState, match="dtype float32 in the snapshot") as caught:
        sync.Snapshot(tmp_path).restore({"own": StateDict(w=target)}, cast=cast)
    assert "cast=True" not in str(caught.value)


def test_usable_after_all_that(tmp_path: Path) -> None:
    sync.Snapshot.take(tmp_path / "s", state(4), options=FAST)
    target = state(-1)
    sync.Snapshot(tmp_path / "s").restore(target)
    assert number_of(target) == 4
    assert Host.get().resources.budget.leased_bytes == 0
