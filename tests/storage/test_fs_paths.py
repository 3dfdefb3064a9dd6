# SPDX-License-Identifier: Apache-2.0
"""Which folder a path names, and what is said where it names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorsnap import Snapshot, StateDict
from actorsnap.errors import StorageError, UsageError
from actorsnap.storage.base import StorageContext
from actorsnap.storage.fs import FsStorage
from actorsnap.storage.registry import folder_and_name
from actorsnap.testing import run_blocking_in_thread


def storage_at(path: object) -> FsStorage:
    return FsStorage(str(path), StorageContext(run_blocking=run_blocking_in_thread))


async def test_what_follows_a_link_is_the_kernels_to_say(tmp_path: Path) -> None:
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "deep")
    storage = storage_at(f"{tmp_path}/link/../s")
    await storage.put("a", [memoryview(b"x")])
    assert (tmp_path / "disk" / "s" / "a").read_bytes() == b"x"
    await storage.delete(["a"])
    assert not (tmp_path / "disk" / "s").exists()
    assert (tmp_path / "disk" / "deep").is_dir()


@pytest.mark.parametrize("tail", ["/", "//", "/.", "/./"])
async def test_what_does_not_matter_is_dropped(tmp_path: Path, tail: str) -> None:
    storage = storage_at(f"{tmp_path}//./s{tail}")
    assert storage.root == f"{tmp_path}/s"
    await storage.put("a", [memoryview(b"x")])
    assert (tmp_path / "s" / "a").exists()


async def test_a_link_to_nothing_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "s").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "s", tmp_path / "s" / "below"):
        with pytest.raises(StorageError, match="is a symbolic link to nothing"):
            await storage_at(path).put("a", [memoryview(b"x")])


async def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"")
    for path in (tmp_path / "s", tmp_path / "s" / "below"):
        with pytest.raises(StorageError, match=f"{tmp_path}/s is a file"):
            await storage_at(path).put("a", [memoryview(b"x")])


async def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the path is too long.*255"):
        await storage_at(tmp_path / ("n" * 300)).put("a", [memoryview(b"x")])
    with pytest.raises(StorageError, match="the key is too long"):
        await storage_at(tmp_path / "s").put("n" * 300, [memoryview(b"x")])


async def test_a_relative_path_in_a_deleted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    app_state = {"x": StateDict(a=1)}
    for path in ("s", "./s", "fs://s"):
        with pytest.raises(UsageError, match="the working folder, which was deleted: pass an abs"):
            await Snapshot.take(path, app_state)
        with pytest.raises(UsageError, match="the working folder, which was deleted"):
            Snapshot(path)
    with pytest.raises(UsageError, match="the working folder, which was deleted"):
        storage_at("s")
    await Snapshot.take(tmp_path / "s", app_state)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("/a/b/model.pt", ("/a/b", "model.pt")),
        ("/a/b/", ("/a", "b")),
        ("/a", ("/", "a")),
        ("/", None),
        ("s3://bucket/a/model.pt", ("s3://bucket/a", "model.pt")),
        ("s3://bucket/a", ("s3://bucket", "a")),
        ("s3://bucket", None),
        ("s3://bucket/", None),
        ("file:///a/b", ("file:///a", "b")),
        ("file:///a", None),
        ("https://host/a/b?signature=x/y", None),
    ],
)
def test_the_folder_that_a_place_lies_in(url: str, parts: tuple[str, str] | None) -> None:
    assert folder_and_name(url) == parts
