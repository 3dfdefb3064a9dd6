# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of object stores, on a small state: what they say is measured, of real saves."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from bench import cloud
from bench.cloud import GcsSink, ObjectTask, Sink, new_url, running, tasks_of
from bench.cloud_peers import OBJECT_CLIENTS, Actorsnap, ActorsnapStorage, ObjectClient
from bench.local import Setting
from bench.state import llama
from tests.servers.base import Server

MIB = 1 << 20


def setting(tmp_path: Path) -> Setting:
    return Setting(
        gib=0.01,
        repeat=1,
        small_count=0,
        tmpfs=tmp_path,
        disk=tmp_path,
        places=(),
        peers=(),
    )


@pytest.mark.slow
def test_sink_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(os.environ)
    # A peer that is here wherever the tests run, and one that is not.
    names = ("aiobotocore", "no such client")
    peers = [make for make in OBJECT_CLIENTS if make().name in names]
    monkeypatch.setattr(cloud, "OBJECT_CLIENTS", (*peers, Missing))
    monkeypatch.setattr(cloud, "SAMPLE_GIB", 0.01)
    cloud.row_sink(setting(tmp_path))
    up, down = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [up["row"], down["row"]] == ["cloud sink upload", "cloud sink download"]
    for row in (up, down):
        assert row["missing"] == {"no such client": "RuntimeError: it is not installed"}
        assert set(row["seconds"]) == {"actorsnap", "actorsnap storage", "raw", "aiobotocore"}
        assert all(value > 0 for value in row["cpu_s_per_gib"].values())
        assert row["ratios"]["x aiobotocore"] > 0
    assert dict(os.environ) == before


class Missing(ObjectClient):
    name = "no such client"

    def open(self, server: Server) -> None:
        raise RuntimeError("it is not installed")

    def upload(self, url: str, data: bytes) -> None:
        raise AssertionError

    def download(self, url: str, target: memoryview) -> None:
        raise AssertionError


def test_one_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.row_one(setting(tmp_path))
    row = json.loads(capsys.readouterr().out)
    assert row["ok"], row
    assert row["opening_requests"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Sink, GcsSink])
def test_the_sink_keeps_what_it_is_told_to(kind: type[Server]) -> None:
    state = llama(0.01)
    with running(kind) as server:
        clients = [Actorsnap(), ActorsnapStorage()]
        tasks = tasks_of(clients, state, os.urandom(9 * MIB))
        for client, task in zip(clients, tasks, strict=True):
            client.open(server)
            url = new_url(server, "kept")
            task.up(url)
            task.spoil()
            task.down(url)
            task.check()
            client.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Sink, GcsSink])
def test_the_sink_gives_zeros_and_that_is_seen(kind: type[Server]) -> None:
    with running(kind) as server:
        client = ActorsnapStorage()
        client.open(server)
        [task] = tasks_of([client], {}, os.urandom(9 * MIB))
        assert isinstance(task, ObjectTask)
        url = new_url(server, server.make_bucket())
        task.up(url)
        assert client.num_bytes(url) >= 9 * MIB
        task.down(url)
        assert not any(itertools.islice(task.target, 0, None, 4096))
        with pytest.raises(RuntimeError, match="is not what was uploaded"):
            task.check()
        client.delete_below(url)
        assert client.num_bytes(url) == 0
        client.close()
