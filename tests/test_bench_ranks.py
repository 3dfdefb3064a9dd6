# SPDX-License-Identifier: Apache-2.0
"""The benchmarks with many ranks, on small states: what they say is measured, and of real saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actorsnap import Options
from bench.local import Setting
from bench.ranks import check, fsdp, hold, restore, row_dcp, scramble, take
from bench.world import Here, World


def fail_on_one(here: Here) -> int:
    if here.rank == 1:
        raise ValueError("no such thing")
    return here.rank


@pytest.mark.slow
def test_a_row_compares_with_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row_dcp(
        Setting(
            gib=0.01,
            repeat=1,
            small_count=0,
            tmpfs=tmp_path,
            disk=tmp_path,
            places=("tmpfs",),
            peers=(),
        )
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["FSDP2 take, 2 ranks", "FSDP2 restore, 2 ranks"]
    for row in rows:
        assert not row["missing"]
        assert set(row["ratios"]) == {"x dcp", "x dcp tuned"}
        assert all(value > 0 for value in row["ratios"].values())
    assert not list(tmp_path.iterdir()), "folders are left"


def test_what_is_not_restored_is_seen_and_ends_the_world(tmp_path: Path) -> None:
    with World(2) as world:
        nbytes = sum(world.call(hold, "small layers", 0.01, fsdp))
        world.call(take, str(tmp_path / "snapshot"))
        found = world.call(restore, f"metered://{tmp_path}/snapshot", Options())
        assert 1 <= sum(one.data_bytes for one in found) / nbytes < 1.01
        world.call(scramble)
        with pytest.raises(RuntimeError, match=r"rank [01]: RuntimeError: 165 tensors differ"):
            world.call(check)
        with pytest.raises(RuntimeError, match="have ended"):
            world.call(scramble)


def test_a_rank_that_raises_is_named() -> None:
    with World(2) as world, pytest.raises(RuntimeError, match="rank 1: ValueError: no such thing"):
        world.call(fail_on_one)
