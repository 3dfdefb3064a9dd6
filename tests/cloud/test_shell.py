# SPDX-License-Identifier: Apache-2.0
"""All commands of the shell, on each protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actorsnap.cli import app
from actorsnap.sync import Snapshot
from tests.cloud.places import Store, is_state, keys_of, state
from tests.support.cases import slow

SMALL = 1000


def shell(*arguments: str, code: int = 0) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.mark.parametrize("store", [slow("ceph"), "fake_gcs"], indirect=True)
def test_all_commands(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.env().items():
        monkeypatch.setenv(name, value)
    bucket = store.make_bucket()
    runs = store.url(bucket, "runs")
    for number in (1, 2):
        Snapshot.take(f"{runs}/step-{number}", state(number, num_floats=SMALL))
    one, two = f"{runs}/step-1", f"{runs}/step-2"
    assert [line.split()[0] for line in shell("ls", runs).splitlines()] == ["step-1", "step-2"]
    assert "model/weight" in json.dumps(json.loads(shell("ls", "--json", two)))
    assert f"float32[{SMALL}]" in shell("inspect", two)
    assert shell("verify", "--full", two).startswith("ok: ")
    assert shell("cat", two, "at/step") == "2\n"
    assert "at/step" in shell("diff", one, two, code=1)
    copy = str(tmp_path / "copy")
    shell("cp", two, copy)
    shell("cp", "--overwrite", copy, one)
    shell("diff", one, two)
    target = state(3, num_floats=SMALL)
    Snapshot(one).restore(target)
    assert is_state(target, 2, num_floats=SMALL)
    shell("rm", "--garbage", one)
    for url in (one, two):
        shell("rm", "--yes", url)
    shell("inspect", one, code=3)
    assert keys_of(store, bucket) == []
