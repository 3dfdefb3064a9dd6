# SPDX-License-Identifier: Apache-2.0
"""A commit object that cannot be read is damage, not "no snapshot": it can be told and removed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actorsnap import (
    ChecksumMismatch,
    ObjectExists,
    Options,
    SnapshotAborted,
    StorageError,
    UnsupportedFormat,
    cli,
    sync,
)
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.runtime import location, maintenance
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from tests.api.damage import rewrite_commit
from tests.api.places import assert_whole, leftovers, make_both, state

FAST = Options(fsync=False)
_DEAD_PID = (1 << 22) + 1
"""Above what Linux gives to any process."""

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeroed": lambda data: bytes(len(data)),
    "short": lambda data: data[:10],
    "truncated": lambda data: data[:-5],
    "other": lambda data: b"PK\x03\x04",
    "version digit": lambda data: data.replace(b'"version":1', b'"version":3'),
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    url = tmp_path / "s"
    sync.Snapshot.take(url, state(1), options=FAST)
    path = url / COMMIT_KEY
    path.write_bytes(DAMAGES[request.param](path.read_bytes()))
    return url


def run(*arguments: object) -> int:
    return CliRunner().invoke(cli.app, [*map(str, arguments)]).exit_code


def test_it_is_named_and_can_be_deleted(damaged: Path) -> None:
    for call in (sync.Snapshot(damaged).verify, sync.Snapshot(damaged).get_manifest):
        with pytest.raises(ChecksumMismatch, match="commit object is damaged") as caught:
            call()
        assert caught.value.key == COMMIT_KEY
    with pytest.raises(ObjectExists, match="damaged"):
        sync.Snapshot.take(damaged, state(2), options=FAST)
    sync.Snapshot(damaged).delete()
    assert not damaged.exists()


def test_on_the_command_line(damaged: Path) -> None:
    assert run("verify", damaged) == 1
    # Whose data it is cannot be told, so what may be the snapshot's stays.
    assert run("rm", "--garbage", "--force", damaged) == 5
    assert len([*damaged.rglob("*.safetensors")]) == 2
    assert run("rm", "--yes", damaged) == 0
    assert not (damaged / COMMIT_KEY).exists()
    # Who wrote it still lives, in this process, and might be at it again: now it is garbage.
    sync.Snapshot.take(damaged, state(2), options=FAST)
    assert asyncio.run(leftovers(damaged)) == []


def collect(url: Path, *, force: bool = False) -> maintenance.Collected:
    source = Source(location.make_location(str(url), None), FAST)
    return run_sync(maintenance.collect(source, force=force), name="collect")


def test_garbage_next_to_it(damaged: Path) -> None:
    """Complete attempts stay: the commit object names one of them."""
    (attempt,) = (path.name for path in damaged.iterdir() if path.is_dir())
    complete = Path(shutil.copytree(damaged / attempt, damaged / dead(attempt, "00000000")))
    incomplete = Path(shutil.copytree(complete, damaged / dead(attempt, "00000001")))
    (incomplete / "manifest" / "0.json").unlink()
    for force in (False, True):
        report = collect(damaged, force=force)
        assert report.is_damaged
        assert {*report.kept} == {attempt, complete.name}
        assert not incomplete.exists()
    assert sync.Snapshot(damaged).recover(replace_damaged=True, attempt=attempt)
    assert not collect(damaged).is_damaged
    assert not complete.exists()


def dead(attempt: str, nonce: str) -> str:
    """The name of an attempt of the same second, whose process has ended."""
    begun, host, _, _ = attempt.split("-")
    return f"{begun}-{host}-{_DEAD_PID}-{nonce}"


@pytest.mark.parametrize("force", [False, True])
def test_garbage_next_to_an_incomplete_snapshot(tmp_path: Path, force: bool) -> None:
    """The commit object is intact, but names an attempt that lost a manifest: the other one may
    be all that is left."""
    url = tmp_path / "s"
    sync.Snapshot.take(url, state(1), options=FAST)
    (attempt,) = (path.name for path in url.iterdir() if path.is_dir())
    sync.Snapshot.take(tmp_path / "other", state(2), options=FAST)
    (other,) = (path.name for path in (tmp_path / "other").iterdir() if path.is_dir())
    shutil.copytree(tmp_path / "other" / other, url / other)
    (url / attempt / "manifest" / "0.json").unlink()
    before = {path for path in url.rglob("*") if path.is_file()}
    report = collect(url, force=force)
    assert (report.deleted, report.kept, report.left) == ([], [other], [])
    assert report.is_damaged
    assert {path for path in url.rglob("*") if path.is_file()} == before
    # Moved away, as the advice says, it can be recovered.
    (url / other).rename(tmp_path / "moved")
    (tmp_path / "place").mkdir()
    (tmp_path / "moved").rename(tmp_path / "place" / other)
    sync.Snapshot(tmp_path / "place").recover()
    asyncio.run(assert_whole(tmp_path / "place", 2))
    # It goes with the snapshot.
    shutil.copytree(tmp_path / "place" / other, url / other)
    sync.Snapshot.take(url, state(3), overwrite=True, options=FAST)
    asyncio.run(assert_whole(url, 3))


def test_an_incomplete_snapshot_next_to_an_older_one(tmp_path: Path) -> None:
    """A crash in an overwrite may leave both; the older one is whole."""
    url = tmp_path / "s"
    sync.Snapshot.take(url, state(1), options=FAST)
    older = asyncio.run(make_both(url, 2))
    for path in url.glob("*/manifest/0.json"):
        if older not in path.parts:
            path.unlink()
    before = {path for path in url.rglob("*") if path.is_file()}
    assert collect(url).kept == [older]
    assert {path for path in url.rglob("*") if path.is_file()} == before


def test_a_newer_releases_snapshot_is_not_replaced(tmp_path: Path) -> None:
    url = tmp_path / "s"
    sync.Snapshot.take(url, state(1), options=FAST)
    rewrite_commit(url, lambda commit: commit.update(version=2))
    with pytest.raises(UnsupportedFormat, match="format version 2"):
        sync.Snapshot.take(url, state(2), overwrite=True, options=FAST)


@pytest.mark.parametrize("kind", ["a folder", "a symbolic link to nothing"])
def test_what_is_no_object_is_not_called_a_snapshot(tmp_path: Path, kind: str) -> None:
    """Copies may leave either in the place of the commit object."""
    url = tmp_path / "s"
    sync.Snapshot.take(url, state(1), options=FAST)
    path = url / COMMIT_KEY
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match=f"{path} is {kind}, not an object; remove it"):
        sync.Snapshot(url).recover()
    with pytest.raises(SnapshotAborted, match=f"{path} is {kind}, not an object") as caught:
        sync.Snapshot.take(url, state(2), options=FAST)
    assert not caught.value.may_be_committed
