# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a training, on a small model: what it says is measured, and of real saves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.local import Setting
from bench.state import llama_7b_shapes
from bench.training import LIBRARIES, check, hold, row_restart, row_training, run, scramble
from bench.world import World

GIB = 0.01


@pytest.mark.parametrize(
    ("gib", "num_layers", "hidden"), [(12, 9, 4096), (3, 1, 4096), (2, 5, 2048)]
)
def test_a_model_has_as_many_layers_as_fit(gib: int, num_layers: int, hidden: int) -> None:
    shapes = llama_7b_shapes(gib << 30)
    assert shapes["layers.0.attention.wq.weight"] == (hidden, hidden)
    assert f"layers.{num_layers - 1}.ffn_norm.weight" in shapes
    assert f"layers.{num_layers}.ffn_norm.weight" not in shapes
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers.0."))
    nbytes = 6 * sum(math.prod(shape) for shape in shapes.values())
    assert gib * 2**30 - 6 * layer < nbytes <= gib * 2**30


@pytest.mark.slow
def test_a_training_is_saved_and_restored(tmp_path: Path) -> None:
    with World(2) as world:
        nbytes = sum(world.call(hold, GIB))
        assert 0.8 * GIB < nbytes / 2**30 <= GIB
        saved = world.call(run, "actorsnap", "async", tmp_path, looks=True)
        assert sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors")) >= nbytes
        assert all(0.0 < one.blocked_s <= one.span.end_s - one.span.begin_s for one in saved)
        assert sum(one.extra_bytes or 0 for one in saved) > nbytes / 2  # it was copied
        world.call(run, "actorsnap", "load", tmp_path, looks=False)
        world.call(scramble)
        with pytest.raises(RuntimeError, match=r"rank [01]: RuntimeError: \d+ tensors differ"):
            world.call(check)


@pytest.mark.slow
def test_rows_compare_with_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting(
        gib=GIB,
        repeat=1,
        small_count=0,
        tmpfs=tmp_path,
        disk=tmp_path,
        places=("disk",),
        peers=(),
    )
    row_training(1, list(LIBRARIES), setting)
    row_restart(setting)
    take, later, restore, restart = map(json.loads, capsys.readouterr().out.splitlines())
    for row in (take, later, restore, restart):
        assert not row["missing"]
    assert set(take["ratios"]) == {"of raw", "x dcp", "x torch.save"} == set(restore["ratios"])
    assert set(later["blocked_ms"]) == {"actorsnap", "dcp"}
    assert later["extra_mib"]["actorsnap"] > 0.5 * GIB * 1024
    assert set(restart["parts_s"]) == {"actorsnap", "dcp", "torch.save"}
    for name, parts in restart["parts_s"].items():
        assert sum(parts.values()) == pytest.approx(restart["seconds"][name], abs=0.01)
    assert not list(tmp_path.iterdir()), "folders are left"
