# SPDX-License-Identifier: Apache-2.0
"""``interop.checkpoints``: dicts of frameworks, saved one at a time, removed after a commit."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import NotASnapshot, Options, SnapshotAborted, UsageError
from actorsnap.interop.checkpoints import REPLACED, Checkpoints, latest, read_checkpoint
from actorsnap.sync import Snapshot
from actorsnap.testing.faults import FaultyStorage
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url


def checkpoint(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    return {"epoch": int(value), "state_dict": model.state_dict()}


def value_of(loaded: dict[str, Any]) -> float:
    (value,) = loaded["state_dict"]["weight"].unique().tolist()
    assert loaded["epoch"] == int(value)
    return float(value)


@contextmanager
def held_save() -> Iterator[Barrier]:
    """Saves to ``faulty://`` wait at their first data object; at the end they go on."""
    barrier = Barrier(1, verbs=frozenset({"writer"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        try:
            yield barrier
        finally:
            barrier.release()


def test_what_a_framework_saves_comes_back(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    saved = {
        "epoch": 3,
        "nothing": None,
        "state_dict": OrderedDict(weight=shared, bias=shared[:2]),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []}],
        "lr_schedulers": [{"milestones": Counter([5, 7]), "_step_count": 1}],
        "callbacks": {"A{'k': 1}": {"best_k_models": {"/a/b.ckpt": torch.tensor(0.5)}}, "B": ()},
        "ema": shared,
    }
    saves = Checkpoints()
    saves.save(tmp_path / "a.ckpt", saved, step=7)
    found = saves.load(tmp_path / "a.ckpt")
    assert saves.pending is None
    assert found.keys() == saved.keys()
    assert repr(found) == repr({key: saved[key] for key in found})
    assert found["ema"].data_ptr() == found["state_dict"]["bias"].data_ptr()
    assert Snapshot(tmp_path / "a.ckpt").step == 7
    assert Snapshot(tmp_path / "a.ckpt").verify("full").ok


def test_the_latest_has_all_its_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = Checkpoints()
    for value in (1, 2, 3):
        saves.save(tmp_path / f"{value}.ckpt", checkpoint(value))
    saves.wait()
    (data,) = (tmp_path / "3.ckpt").rglob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    (data,) = (tmp_path / "2.ckpt").rglob("*.safetensors")
    data.unlink()
    assert latest(tmp_path) == str(tmp_path / "1.ckpt")
    assert "3.ckpt is skipped: it is damaged" in caplog.text
    assert "2.ckpt is skipped: it is damaged" in caplog.text


def test_a_removed_checkpoint_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    saves = Checkpoints()
    saves.save(path, checkpoint(1))
    saves.wait()
    torch.save(checkpoint(0), f"{path}{REPLACED}")  # as left by a job killed after the commit
    Checkpoints().remove(path)
    assert not [*tmp_path.iterdir()]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    urls = [faulty_url(tmp_path / name) for name in ("1.ckpt", "2.ckpt")]
    saves = Checkpoints()
    with held_save() as barrier:
        saves.save(urls[0], checkpoint(1))
        first = saves.pending
        assert first is not None
        assert barrier.wait_reached()
        assert not first.done()
        barrier.release()
        saves.save(urls[1], checkpoint(2))
        assert first.done()
        saves.wait()
    assert [value_of(saves.load(url)) for url in urls] == [1, 2]


def test_a_removal_waits_for_the_commit(tmp_path: Path) -> None:
    old, new = (faulty_url(tmp_path / name) for name in ("old.ckpt", "new.ckpt"))
    saves = Checkpoints()
    saves.save(tmp_path / "old.ckpt", checkpoint(1))
    saves.wait()
    with held_save() as barrier:
        saves.save(new, checkpoint(2))
        saves.remove(old)
        assert barrier.wait_reached()
        assert value_of(read_checkpoint(tmp_path / "old.ckpt")) == 1
        barrier.release()
        saves.wait()
    assert os.listdir(tmp_path) == ["new.ckpt"]
    saves.remove(tmp_path / "new.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_failed_save_keeps_the_old_one(tmp_path: Path) -> None:
    saves = Checkpoints()
    saves.save(tmp_path / "old.ckpt", checkpoint(1))
    saves.wait()
    storages: list[FaultyStorage] = []

    def failing(inner: Any) -> FaultyStorage:
        storages.append(FaultyStorage(inner, fail_at=1, fail_verbs=["put_if_absent", "put"]))
        return storages[-1]

    with faulty(failing):
        saves.save(faulty_url(tmp_path / "new.ckpt"), checkpoint(2))
        saves.remove(tmp_path / "old.ckpt")
        with pytest.raises(SnapshotAborted):
            saves.save(tmp_path / "next.ckpt", checkpoint(3))
    assert storages[0].was_hit
    saves.wait()  # raised once
    saves.save(tmp_path / "next.ckpt", checkpoint(3))
    saves.wait()
    assert value_of(saves.load(tmp_path / "old.ckpt")) == 1
    assert latest(tmp_path) == str(tmp_path / "next.ckpt")


def test_a_file_at_the_path_stays_until_the_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "last.ckpt"
    torch.save(checkpoint(1), path)
    saves = Checkpoints()
    with pytest.raises(UsageError):
        saves.save(path, checkpoint(2) | {"object": object()})
    assert value_of(saves.load(path)) == 1
    hasty = Checkpoints(options=Options(timeout_s=1e-6))
    with pytest.raises(SnapshotAborted):  # noqa: PT012 (in either call)
        hasty.save(path, checkpoint(2))
        hasty.wait()
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert value_of(saves.load(path)) == 1

    path.rename(str(path) + REPLACED)
    path.mkdir()  # as a kill leaves it
    assert latest(tmp_path) == str(path)
    assert value_of(saves.load(path)) == 1
    assert "has no commit" in caplog.text

    saves.save(path, checkpoint(3))
    saves.wait()
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert value_of(saves.load(path)) == 3


def test_links_and_files_are_removed_and_replaced_not_followed(tmp_path: Path) -> None:
    saves = Checkpoints()
    saves.save(tmp_path / "best.ckpt", checkpoint(1))
    link = tmp_path / "last.ckpt"
    link.symlink_to("best.ckpt")
    saves.wait()
    assert value_of(saves.load(link)) == 1
    saves.save(link, checkpoint(2))
    saves.wait()
    assert [value_of(saves.load(tmp_path / f"{n}.ckpt")) for n in ("best", "last")] == [1, 2]
    saves.remove(link)
    link.symlink_to("best.ckpt")
    torch.save(checkpoint(3), tmp_path / "old.ckpt")
    saves.remove(link)
    saves.remove(tmp_path / "old.ckpt")
    assert os.listdir(tmp_path) == ["best.ckpt"]
    assert value_of(saves.load(tmp_path / "best.ckpt")) == 1


def test_a_removal_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = Checkpoints()
    saves.remove(tmp_path / "absent.ckpt")
    assert f"{tmp_path}/absent.ckpt is not removed" in caplog.text


def test_the_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = Checkpoints()
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    torch.save(checkpoint(9), tmp_path / "old.ckpt")
    assert latest(tmp_path) == str(tmp_path / "old.ckpt")
    for step in (20, 3):
        saves.save(tmp_path / f"{step}.ckpt", checkpoint(step))
    saves.wait()
    assert latest(str(tmp_path)) == str(tmp_path / "3.ckpt")
    os.utime(tmp_path / "old.ckpt", (1e9, 4e9))
    assert latest(tmp_path) == str(tmp_path / "old.ckpt")
    (tmp_path / "old.ckpt").unlink()
    caplog.clear()
    (tmp_path / "3.ckpt" / "actorsnap.json").unlink()  # as if killed before the commit
    (tmp_path / "20.ckpt" / "actorsnap.json").write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) is None
    assert f"{tmp_path}/3.ckpt is skipped: it is unfinished" in caplog.text
    assert f"{tmp_path}/20.ckpt is skipped: it is damaged" in caplog.text


def test_objects_need_pickle(tmp_path: Path) -> None:
    class Config:
        def __reduce__(self) -> Any:
            return os.getpid, ()

    saved = checkpoint(1) | {"hyper_parameters": {"config": Config()}}
    with pytest.raises(UsageError, match=r"hyper_parameters/config.*Config.*allow_pickle"):
        Checkpoints().save(tmp_path / "a.ckpt", saved)
    saves = Checkpoints(options=Options(allow_pickle=True))
    saves.save(tmp_path / "a.ckpt", saved)
    assert saves.load(tmp_path / "a.ckpt")["hyper_parameters"] == {"config": os.getpid()}
    with pytest.raises(UsageError, match=r"hyper_parameters/config"):
        Checkpoints().load(tmp_path / "a.ckpt")


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotASnapshot):
        Checkpoints().load(tmp_path / "absent.ckpt")
