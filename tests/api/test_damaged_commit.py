"""A commit object that cannot be read is damage, not "no snapshot": it can be told and removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actorsnap import ChecksumMismatch, ObjectExists, Options, UnsupportedFormat, cli, sync
from actorsnap.format.manifest import COMMIT_KEY
from tests.api.damage import rewrite_commit
from tests.api.places import leftovers, state

FAST = Options(fsync=False)
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
    assert run("rm", "--garbage", "--force", damaged) == 0
    assert len([*damaged.rglob("*.safetensors")]) == 2
    assert run("rm", "--yes", damaged) == 0
    assert not (damaged / COMMIT_KEY).exists()
    # Who wrote it still lives, in this process, and might be at it again: now it is garbage.
    sync.Snapshot.take(damaged, state(2), options=FAST)
    assert asyncio.run(leftovers(damaged)) == []


def test_a_newer_releases_snapshot_is_not_replaced(tmp_path: Path) -> None:
    url = tmp_path / "s"
    sync.Snapshot.take(url, state(1), options=FAST)
    rewrite_commit(url, lambda commit: commit.update(version=2))
    with pytest.raises(UnsupportedFormat, match="format version 2"):
        sync.Snapshot.take(url, state(2), overwrite=True, options=FAST)
