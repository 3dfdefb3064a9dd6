# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.ray`` with as much of Ray as it calls. See ``tests/frameworks`` for Ray."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from actorsnap import IncompatibleState, StateDict, UsageError
from actorsnap.errors import notes_of
from actorsnap.sync import Snapshot

MODULE = "actorsnap.interop.ray"


class Run:
    """A run of one worker: its storage, and what was reported."""

    def __init__(self, folder: Path) -> None:
        self.reported: list[SimpleNamespace] = []
        filesystem = SimpleNamespace(type_name="local")
        self.storage = SimpleNamespace(storage_filesystem=filesystem, experiment_fs_path=folder)
        context = SimpleNamespace(get_storage=lambda: self.storage, get_world_rank=lambda: 0)
        self.train = ModuleType("ray.train")
        vars(self.train).update(
            get_context=lambda: context,
            Checkpoint=lambda path, filesystem: SimpleNamespace(path=path, filesystem=filesystem),
            CheckpointUploadMode=SimpleNamespace(ASYNC="async"),
            get_all_reported_checkpoints=lambda: [*self.reported],
            get_checkpoint=lambda: self.reported[-1].checkpoint if self.reported else None,
            report=self.report,
        )

    def report(self, metrics: Any, checkpoint: Any, **settings: Any) -> None:
        done = settings["checkpoint_upload_fn"](checkpoint, "name")
        self.reported.append(SimpleNamespace(checkpoint=done, metrics=metrics))

    def names(self) -> list[str]:
        return [Path(each.checkpoint.path).name for each in self.reported]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", run.train)
    before = sys.modules.pop(MODULE, None)
    yield run
    sys.modules.pop(MODULE, None)
    if before is not None:
        sys.modules[MODULE] = before


def make_reporter() -> Any:
    return importlib.import_module(MODULE).ActorsnapReporter()


def test_a_step_that_was_reported_gets_a_folder_of_its_own(run: Run, tmp_path: Path) -> None:
    state = StateDict(value=0)
    reporter = make_reporter()
    with pytest.raises(UsageError, match="state/object"):
        reporter.report({}, {"state": StateDict(object=object())}, step=1)
    for step in (1, 2, 2):
        state["value"] += 1
        reporter.report({}, {"state": state}, step=step)
    assert run.names() == ["step-00000001", "step-00000002", "step-00000002-2"]
    # The workers start again, and count from the step that they restored.
    reporter = make_reporter()
    assert reporter.restore({"state": state}) == 2
    state["value"] += 1
    reporter.report({}, {"state": state}, step=2)
    reporter.wait()
    assert run.names()[3:] == ["step-00000002-3"]
    values = [Snapshot(tmp_path / name).read_object("state/value") for name in run.names()]
    assert values == [1, 2, 3, 4]


def test_a_snapshot_that_was_not_reported_is_replaced(run: Run, tmp_path: Path) -> None:
    reporter = make_reporter()
    Snapshot.take(tmp_path / "step-00000001", {"state": StateDict(value=0)})
    reporter.report({}, {"state": StateDict(value=1)}, step=1)
    assert run.names() == ["step-00000001"]
    assert Snapshot(tmp_path / "step-00000001").read_object("state/value") == 1


def test_a_state_that_does_not_fit(run: Run, tmp_path: Path) -> None:
    reporter = make_reporter()
    reporter.report({}, {"state": StateDict(value=0)}, step=1)
    with pytest.raises(IncompatibleState) as caught:
        reporter.restore({"state": StateDict(value=0, own=1)})
    url = tmp_path / "step-00000001"
    assert notes_of(caught.value) == [
        "A reporter's restore() has no strict= or rename=: to pass them, call "
        f'Snapshot("{url}").restore instead.'
    ]
    state = StateDict(value=-1, own=1)
    Snapshot(url).restore({"state": state}, strict=False)
    assert dict(state) == {"value": 0, "own": 1}
