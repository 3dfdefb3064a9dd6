# SPDX-License-Identifier: Apache-2.0
"""What pages of the site show is what happens; those with tests of their own aside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import StateDict
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot
from tests.pages import ROOT, play

DOCS = ROOT / "docs"
PAGES = {
    "index.md": 1,
    "install.md": 1,
    "howto/resume.md": 4,
    "howto/keep.md": 7,
    "howto/progress.md": 2,
    "howto/look-inside.md": 4,
    "howto/restore-a-part.md": 8,
    "howto/notebooks.md": 4,
    "howto/copy-and-verify.md": 1,
    "howto/operate.md": 0,
    "howto/save-without-stalling.md": 2,
    "howto/read-without-actorsnap.md": 2,
    "migrate/safetensors.md": 2,
    "concepts/ownership.md": 1,
    "concepts/values.md": 1,
}
"""The number of Python blocks by page."""


def prelude() -> dict[str, Any]:
    """The names that pages use without an explanation: a training, as in the tutorial."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    progress = StateDict(step=100)

    def train_step() -> torch.Tensor:
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        detached: torch.Tensor = loss.detach()
        return detached

    train_step()
    return {
        "__name__": "__main__",
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "app_state": {"model": model, "optimizer": optimizer, "progress": progress},
        "train_step": train_step,
        "evaluate": lambda: float(train_step()),
        "log": lambda text: None,
    }


def run_for_a_while(names: dict[str, Any]) -> None:
    """Leaves a run of three steps, and a save that was killed."""
    save, stay = every.steps(100), keep.last(3)
    with CheckpointManager("runs/7", names["app_state"], save=save, keep=stay) as manager:
        for step in range(0, 401, 100):
            manager.maybe_save(step, metrics={"loss": names["train_step"]()})
    killed = Path("runs/7/step-0000000500.g1")
    shutil.copytree("runs/7/step-0000000400.g1", killed)
    (killed / "actorsnap.json").unlink()
    for manifest in killed.glob("*/manifest/*"):
        manifest.unlink()


@pytest.mark.blocking
@pytest.mark.parametrize("page", PAGES)
def test_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = prelude()
    if page != "howto/notebooks.md":
        metadata = {"git": "4f2a"}
        snapshot = Snapshot.take("ckpt/step-100", names["app_state"], step=100, metadata=metadata)
    if page in ("howto/copy-and-verify.md", "howto/operate.md"):
        run_for_a_while(names)
    if page == "migrate/safetensors.md":
        snapshot.export_hf("hf-repo", key="model")
    assert play((DOCS / page).read_text(), names, page) == PAGES[page]


@pytest.mark.blocking
def test_lazy_staging_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of a list item, which is indented."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "howto/save-without-stalling.md").read_text()
    lines = text.partition("    ```python\n")[2].partition("    ```\n")[0].splitlines()
    names = prelude() | {"Snapshot": Snapshot}
    exec("\n".join(line[4:] for line in lines), names)
    assert names["snapshot"].verify("full").ok
