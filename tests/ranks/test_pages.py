# SPDX-License-Identifier: Apache-2.0
"""What pages show of many ranks, run by real ranks as torchrun starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorsnap.sync import Snapshot
from tests.pages import ROOT, all_blocks
from tests.ranks.models import MODULES
from tests.worlds import Director

PAGES = ["docs/howto/fsdp.md", "docs/distributed.md"]


def expected(page: str) -> list[str]:
    """What each Python block prints, as the page says: nothing, or the block behind it."""
    found = all_blocks((ROOT / page).read_text())
    return [
        found[n + 1][1] if n + 1 < len(found) and found[n + 1][0] == "" else ""
        for n, (language, _) in enumerate(found)
        if language == "python"
    ]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_the_page(tmp_path: Path, page: str, num_ranks: int) -> None:
    folder = tmp_path / "page"
    with Director("tests.ranks.pages", *MODULES) as director:
        printed = director.play("direct_page", num_ranks=num_ranks, name=page, folder=str(folder))
    assert printed == [expected(page)] * num_ranks
    for path in (folder / "ckpt").iterdir():
        assert Snapshot(path).verify("full").ok, path
        # As it says, one process reads it all.
        if "fsdp" in page or path.name == "step-1":
            weight = Snapshot(path).read_object("train/model/0.weight")
            assert weight.shape == (256, 64), path


def test_readme(tmp_path: Path) -> None:
    with Director("tests.ranks.pages", *MODULES) as director:
        director.play(
            "direct_page",
            num_ranks=2,
            name="README.md",
            folder=str(tmp_path),
            only="init_process_group",
        )
    (snapshot,) = Snapshot.list(tmp_path / "runs/fsdp")
    assert snapshot.verify("full").ok
    assert snapshot.read_object("train/model/0.weight").shape == (256, 64)


def test_the_tutorial_on_two_ranks_and_on_three(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorial.md").read_text()
    for num_ranks in (2, 3):
        with Director("tests.ranks.pages", *MODULES) as director:
            printed = director.play(
                "direct_page",
                num_ranks=num_ranks,
                name="docs/tutorial.md",
                folder=str(tmp_path),
                only="init_process_group",
            )
        session = text.partition(f"$ torchrun --nproc-per-node {num_ranks} train_fsdp.py\n")[2]
        assert printed == [[session.partition("\n")[0] + "\n"], *[[""]] * (num_ranks - 1)]
