# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints of other formats are, and what happens to them meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import state_dict_loader

from actorsnap import NotASnapshot, Options, Snapshot, SnapshotReplaced, UsageError, sync
from actorsnap.actors import formats
from actorsnap.actors.fetcher import FetcherPool
from actorsnap.actors.formats import Foreign, Place
from actorsnap.errors import FormatError
from actorsnap.format.manifest import Commit
from actorsnap.interop.dcp import ActorsnapReader
from actorsnap.interop.formats.describing import Description, path_of
from actorsnap.runtime.reading import each_pair
from actorsnap.runtime.script import drive_sync, run_sync
from actorsnap.runtime.source import OpenSource
from actorsnap.storage.base import ObjectInfo, Storage, StorageContext
from actorsnap.storage.registry import find_opener
from actorsnap.testing import run_blocking_in_thread
from tests.formats.checkpoints import (
    is_same,
    make_model,
    training_state,
    write_repo,
    write_safetensors,
)
from tests.servers.base import GcsServer, S3Server, Server


async def put_files(folder: Path, url: str, options: dict[str, Any]) -> None:
    context = StorageContext(run_blocking=run_blocking_in_thread, options=options)
    opener = await run_blocking_in_thread(find_opener, url)
    storage = opener(context)
    for path in folder.iterdir():
        await storage.put(path.name, [memoryview(path.read_bytes())])
    await storage.aclose()


@pytest.fixture(params=["memory", "moto", "fake_gcs"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A URL, and its options."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}/run", {}
    server: Server = request.getfixturevalue(request.param)
    assert isinstance(server, S3Server | GcsServer)
    return f"{server.scheme}://{server.make_bucket()}/run", server.storage_options()


async def test_far_away(tmp_path: Path, far: tuple[str, dict[str, Any]]) -> None:
    url, options = far
    saved, model, again = make_model(0), make_model(1), make_model(2)
    write_repo(tmp_path, saved.state_dict())
    torch.save(saved.state_dict(), tmp_path / "x.pt")
    torch.save(saved.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    await put_files(tmp_path, url, options)
    for place in (url, f"{url}/x.pt", f"{url}/old.pt", f"{url}/{REPO_FILE}"):
        snapshot = Snapshot(place, storage_options=options)
        await snapshot.restore({"model": model}, strict=place != f"{url}/{REPO_FILE}")
        await snapshot.restore({"model": again}, strict=place != f"{url}/{REPO_FILE}")
        if not place.endswith(REPO_FILE):
            assert is_same(model, saved)
        assert (await snapshot.verify("full")).ok
        model = make_model(1)
    report = await Snapshot(f"{url}/x.pt", storage_options=options).copy_to(tmp_path / "copy")
    assert report.num_copied == 2
    copied = Snapshot(tmp_path / "copy")
    await copied.restore({"model": model})
    assert is_same(model, saved)
    await copied.copy_to(f"{url}-2", storage_options=options)
    await Snapshot(tmp_path / "x.pt").copy_to(f"{url}-3", storage_options=options)
    assert (await Snapshot(f"{url}-3", storage_options=options).verify("full")).ok
    with pytest.raises(NotASnapshot, match="no files are there"):
        await Snapshot(f"{url}/absent.pt", storage_options=options).get_manifest()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
async def test_a_dcp_folder_far_away(tmp_path: Path, far: tuple[str, dict[str, Any]]) -> None:
    url, options = far
    model, optimizer, saved = training_state(0)
    await asyncio.to_thread(
        torch.distributed.checkpoint.save,  # type: ignore[attr-defined]
        saved,
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    await put_files(tmp_path, url, options)
    other, another, _ = training_state(1)
    snapshot = Snapshot(url, storage_options=options)
    await snapshot.restore({"model": other, "optimizer": another})
    assert is_same(other, model)
    assert str(another.state_dict()) == str(optimizer.state_dict())


REPO_FILE = "model-00001-of-00002.safetensors"


async def test_symbolic_links(tmp_path: Path) -> None:
    """Hugging Face's cache has links to blobs."""
    saved, model = make_model(0), make_model(1)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_repo(blobs, saved.state_dict())
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    await Snapshot(snapshot).restore({"model": model})
    assert is_same(model, saved)
    assert (await Snapshot(snapshot).verify("full")).ok


@pytest.mark.parametrize("is_file", [True, False])
async def test_another_file_is_noticed_by_the_same_handle(tmp_path: Path, is_file: bool) -> None:
    path = tmp_path / "model.safetensors"
    snapshot = Snapshot(path if is_file else tmp_path)
    for number in range(3):
        write_safetensors(path, {"w": torch.full((3 + number // 2,), float(number))})
        assert float((await snapshot.read_object("model/w"))[0]) == number


async def test_a_snapshot_of_ours_comes_first(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.zeros(3)})
    snapshot = Snapshot(tmp_path)
    assert float((await snapshot.read_object("model/w"))[0]) == 0
    model = torch.nn.Linear(1, 1)
    await Snapshot.take(tmp_path, {"model": model})
    assert "0/model/weight" in await snapshot.get_manifest()
    await snapshot.delete()
    assert float((await snapshot.read_object("model/w"))[0]) == 0


@contextmanager
def before_each_fetch(monkeypatch: pytest.MonkeyPatch, act: Any) -> Iterator[None]:
    fetch = FetcherPool.fetch

    async def acting(self: FetcherPool, requests: Any) -> None:
        act()
        await fetch(self, requests)

    with monkeypatch.context() as patched:
        patched.setattr(FetcherPool, "fetch", acting)
        yield


async def test_a_file_that_is_written_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    numbers = iter(range(1, 100))

    def overwrite() -> None:
        torch.save({"w": torch.full((3,), float(next(numbers)))}, path)
        later = time.time_ns() + next(numbers) * 1000
        os.utime(path, ns=(later, later))

    overwrite()
    with before_each_fetch(monkeypatch, overwrite), pytest.raises(SnapshotReplaced):
        await Snapshot(path).read_object("model/w")
    once = iter([overwrite])
    with before_each_fetch(monkeypatch, lambda: next(once, lambda: None)()):
        await Snapshot(path).read_object("model/w")  # begins again
    with before_each_fetch(monkeypatch, overwrite), pytest.raises(SnapshotReplaced):
        await Snapshot(path).copy_to(tmp_path / "copy")
    assert not any((tmp_path / "copy").rglob("*.json"))


async def test_what_other_calls_say(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"w": torch.zeros(3)})
    for snapshot in (Snapshot(tmp_path), Snapshot(path)):
        for call in (snapshot.delete, snapshot.recover):
            with pytest.raises(NotASnapshot):
                await call()
    assert path.exists()
    for level in ("quick", "full"):
        report = await Snapshot(path).verify(level)
        assert (report.ok, report.has_checksums) == (True, False)
        assert report.nbytes == (12 if level == "full" else 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="truncated"):
        await Snapshot(path).verify()


class Point:
    """An entry point of another package."""

    name, value = "numbers", "tests.formats.test_places:read_numbers"


async def read_numbers(place: Place) -> Foreign | None:
    """Text files: a tensor of bytes each, and what the test wants to be wrong."""
    if not place.file.endswith(".numbers"):
        return None
    info = await place.find(place.file)
    assert info is not None
    description = Description(place)
    for line in (await place.get(place.file)).decode().split():
        name, start, stop = line.split(",")
        stored = description.stored(place.file, int(start), int(stop))
        description.tensor(path_of("numbers", name), "uint8", (3,), stored)
    return Foreign(format="numbers", manifests=(description.manifest(),), step=7)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = metadata.entry_points

    def entry_points(**params: Any) -> Any:
        return [Point] if params == {"group": "actorsnap.formats"} else found(**params)

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    formats._readers.cache_clear()
    yield
    formats._readers.cache_clear()


@pytest.mark.usefixtures("installed")
async def test_readers_of_other_packages(tmp_path: Path) -> None:
    path = tmp_path / "a.numbers"
    path.write_text("a,0,3 b,3,6")
    assert bytes(await Snapshot(path).read_object("numbers/b")) == b",3 "[:3]
    assert await Snapshot(path).step == 7


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a,0,3 b,2,5", "overlap at byte 2"),
        ("a,0,300", "not in"),
        ("a,0,2", "of 2 bytes is not uint8"),
        ("a,3,0", "not in"),
        ("a,0,3 a,3,6", "two entries have the path"),
    ],
)
async def test_what_readers_return_is_checked(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "a.numbers"
    path.write_text(text)
    with pytest.raises(FormatError, match=match):
        await Snapshot(path).get_manifest()


async def test_a_broken_package_breaks_no_other_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Point, "value", "tests.formats.absent:read")
    monkeypatch.setattr(metadata, "entry_points", lambda **params: [Point])
    formats._readers.cache_clear()
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.zeros(3)})
    await Snapshot(tmp_path).get_manifest()
    assert caplog.text == ""  # nobody asked it
    (tmp_path / "a.numbers").write_text("a,0,2")
    with pytest.raises(NotASnapshot):
        await Snapshot(tmp_path / "a.numbers").get_manifest()
    formats._readers.cache_clear()
    assert "tests.formats.absent:read" in caplog.text


async def test_many_names_of_options(tmp_path: Path) -> None:
    """What is not verified need not have checksums."""
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.arange(3)})
    for options in (Options(verify=False), Options(chunk_bytes=2 << 20)):
        found = await Snapshot(tmp_path, options=options).read_object("model/w")
        assert found.tolist() == [0, 1, 2]


def test_diff_needs_checksums(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.arange(3)})
    source = sync.Snapshot(tmp_path)._source
    with pytest.raises(UsageError, match="no checksums to compare"):
        run_sync(each_pair(source, source, lambda *manifests: None), name="diff")


def test_a_file_beside_a_snapshot(tmp_path: Path) -> None:
    """Calls that read the commit twice in one operation."""
    sync.Snapshot.take(tmp_path, {"model": torch.nn.Linear(1, 1)})
    torch.save({"w": torch.arange(3)}, tmp_path / "x.pt")
    snapshot = sync.Snapshot(tmp_path / "x.pt")

    async def twice(opened: OpenSource) -> list[Commit]:
        return [await opened.reader.commit(), await opened.reader.commit()]

    first, second = drive_sync(snapshot._source.perform("read", twice))
    assert first == second
    target = {"model": {"w": torch.zeros(3, dtype=torch.int64)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = ActorsnapReader(tmp_path / "x.pt")
        state_dict_loader.load(target, storage_reader=reader, no_dist=True)
    assert target["model"]["w"].tolist() == [0, 1, 2]


async def test_files_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one has changed: a request each, over a network."""
    for number in range(8):
        write_safetensors(tmp_path / f"{number}.safetensors", {f"w{number}": torch.zeros(3)})
    num_open = most_open = 0
    stat = formats._stat

    async def counting(storage: Storage, key: str) -> ObjectInfo | None:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0)
        try:
            return await stat(storage, key)
        finally:
            num_open -= 1

    monkeypatch.setattr(formats, "_stat", counting)
    await Snapshot(tmp_path).read_object("model/w3")
    assert most_open == 8
