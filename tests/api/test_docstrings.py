# SPDX-License-Identifier: Apache-2.0
"""``help()`` of each public method: complete in both facades, with examples that run."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import actorsnap
from actorsnap import Options, StateDict, snapshot, sync

FACADES = {
    "async": (actorsnap.Snapshot, snapshot.PendingSnapshot),
    "sync": (sync.Snapshot, sync.PendingSnapshot),
}
METHODS = sorted(
    (kind.__name__, name) for kind in FACADES["sync"] for name in dir(kind) if name[0] != "_"
)


def member(facade: str, kind: str, name: str) -> Any:
    return inspect.getattr_static(FACADES[facade][kind != "Snapshot"], name)


def docs(facade: str, kind: str, name: str) -> str:
    return inspect.getdoc(getattr(FACADES[facade][kind != "Snapshot"], name)) or ""


@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_each_is_complete(facade: str, kind: str, name: str) -> None:
    text, found = docs(facade, kind, name), member(facade, kind, name)
    if name == "path":
        assert text == "The path or URL, without secrets."
        return
    assert not text.startswith("See ")
    assert "Examples:\n    >>> " in text
    if facade == "sync":
        assert not re.search(r"\bawait |async (for|with)|Cancellation", text)
    if name not in ("cancel", "done", "events"):  # they raise nothing
        assert "Raises:" in text
    if not isinstance(found, property):
        bound = getattr(FACADES[facade][kind != "Snapshot"], name)
        arguments = inspect.signature(bound).parameters.keys() - {"self"}
        described = text.partition("Args:")[2].partition("Raises:")[0]
        assert [each for each in arguments if not re.search(rf"\b{each}\b", described)] == []


ORDER = (
    *("warm_up", "take", "async_take", "guard", "done", "cancel", "staged", "events", "wait"),
    *("exists", "keys", "tree", "metadata", "step", "created", "world_size", "nbytes", "list"),
    *("verify", "plan_restore", "restore", "read_object", "get_manifest", "get_state_dict_for_key"),
    *("export_hf", "copy_to", "recover", "delete"),
)


@pytest.mark.parametrize("facade", FACADES)
def test_the_examples_run(facade: str, tmp_path: Path) -> None:
    assert {*ORDER} == {name for _, name in METHODS} - {"path"} | {"warm_up"}
    handle, pending = FACADES[facade]
    warm_up = (actorsnap if facade == "async" else sync).warm_up
    owners = {name: getattr(handle, name, getattr(pending, name, warm_up)) for name in ORDER}
    model = torch.nn.Linear(2, 2)
    names: dict[str, Any] = {
        **{"Snapshot": handle, "warm_up": warm_up, "StateDict": StateDict, "Options": Options},
        **{"datetime": datetime, "UTC": UTC, "model": model, "batch": torch.ones(2)},
        **{"optimizer": torch.optim.SGD(model.parameters())},
    }
    with asyncio.Runner() as runner:

        def run(text: str | None) -> None:
            for example in doctest.DocTestParser().get_examples(text or ""):
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if facade == "async" else 0
                result = eval(compile(example.source, facade, "exec", flags), names)
                if inspect.iscoroutine(result):
                    runner.run(result)

        for number, kind in enumerate((handle, pending)):
            (tmp_path / f"{number}").mkdir()
            with contextlib.chdir(tmp_path / f"{number}"):
                run(inspect.getdoc(kind))
        with contextlib.chdir(tmp_path):
            for name in ORDER:
                if name == "recover":
                    shutil.copytree("ckpt/step-1", "copied/step-1")
                    Path("copied/step-1/actorsnap.json").unlink()
                run(inspect.getdoc(owners[name]))
    assert not (tmp_path / "ckpt/step-1").exists()
    assert (tmp_path / "copied/step-1/actorsnap.json").exists()
