# SPDX-License-Identifier: Apache-2.0
"""All commands of the shell, on each protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actorsnap.cli import app
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
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


@pytest.mark.parametrize("store", [slow("ceph"), "fake_gcs"], indirect=True)
def test_a_run_moves_to_a_bucket(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.env().items():
        monkeypatch.setenv(name, value)
    here, there = str(tmp_path / "run"), store.url(store.make_bucket(), "run")

    def manager(root: str) -> CheckpointManager:
        return CheckpointManager(
            root, state(5, num_floats=SMALL), save=every.steps(1), keep=keep.last(1), min_valid=1
        )

    with manager(here) as running:
        running.maybe_save(1)
        running.wait()
        running.pin(1, "paper")
        running.maybe_save(2)
    copied = [line.split("\t")[:2] for line in shell("cp", "--all", here, there).splitlines()]
    assert [state for _, state in copied] == ["copied", "copied"]
    again = [line.split("\t")[1] for line in shell("cp", "--all", here, there).splitlines()]
    assert again == ["was there", "was there"]
    shell("verify", "--all", "--full", there)
    with manager(there) as running:
        restored = running.restore_latest()
        assert restored is not None
        assert (restored.step, restored.url) == (2, f"{there}/{copied[1][0]}")
        running.maybe_save(3)
        running.maybe_save(4)
        running.wait()
        running.prune()
        assert [info.step for info in running.steps()] == [1, 2, 4]  # pinned, restored from
    assert shell("latest", there, "--full").startswith(f"{there}/step-0000000004.g2")
