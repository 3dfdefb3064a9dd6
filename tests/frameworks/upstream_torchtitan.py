# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own tests of its manager, with ours in its place: a plugin for pytest.

    cd upstream; pytest -c /dev/null --rootdir=. -p tests.frameworks.upstream_torchtitan \
        test_checkpoint.py test_torchft_checkpoint.py

with the files of torchtitan's ``tests/unit_tests`` and ``experiments/torchft/tests`` at the commit
of the installed version (0.3.0: 862f966a) in ``upstream/``, which git ignores, and the repository
on ``PYTHONPATH``. The tests mock ``dcp.save`` and ``dcp.load``; what they let these mocks do is
done by snapshots here, and what they read back is read from snapshots.
"""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import torchtitan.components.checkpoint
import torchtitan.components.checkpointer
import torchtitan.components.checkpointer.dcp
import torchtitan.experiments.torchft.checkpoint

from actorsnap import StateDict
from actorsnap.interop import torchft
from actorsnap.interop import torchtitan as ours
from actorsnap.sync import Snapshot

_dcp: Any = torch.distributed.checkpoint
_save, _load, _async_save = ours.save, ours.load, ours.async_save
_torch_load = torch.load

for module in (
    torchtitan.components.checkpoint,
    torchtitan.components.checkpointer,
    torchtitan.components.checkpointer.dcp,
):
    vars(module)["CheckpointManager"] = ours.CheckpointManager
vars(torchtitan.experiments.torchft.checkpoint)["TorchFTCheckpointManager"] = (
    torchft.TorchFTCheckpointManager
)

# The names that the tests mock.
_dcp.save, _dcp.load, _dcp.async_save = _save, _load, _async_save
vars(ours).update(
    save=lambda *args, **kwargs: _dcp.save(*args, **kwargs),
    load=lambda *args, **kwargs: _dcp.load(*args, **kwargs),
    async_save=lambda *args, **kwargs: _dcp.async_save(*args, **kwargs),
)

num_saved = 0


def _fake_save(_: Any, state_dict: Any, checkpoint_id: str, storage_writer: Any = None) -> None:
    global num_saved
    num_saved += 1
    _save(state_dict, checkpoint_id=checkpoint_id)


def _fake_load(_: Any, state_dict: Any, checkpoint_id: str) -> None:
    _load(state_dict, checkpoint_id=checkpoint_id)


def _read(path: Any, **kwargs: Any) -> Any:
    """What a test's ``torch.load`` of its own fake file gets."""
    if Path(path).name != "state_dict.pt":
        return _torch_load(path, **kwargs)
    snapshot = Snapshot(Path(path).parent)
    keys = {path.split("/")[1] for path in snapshot.get_manifest()}
    state = {key: snapshot.read_object(key) for key in keys}
    return {**state, **state.pop("dcp")}


def _open(path: Any, mode: str = "r") -> Any:
    """Tests make an empty ``.metadata`` to stand for a checkpoint."""
    if Path(path).name == ".metadata" and mode == "w":
        Snapshot.take(Path(path).parent, {"trainer": StateDict()})
    return builtins.open(path, mode)


setattr(torch, "load", _read)  # noqa: B010


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        item.module.open = _open
        if hasattr(item.cls, "fake_save"):
            item.cls.fake_save, item.cls.fake_load = _fake_save, _fake_load


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{num_saved} snapshots saved")
