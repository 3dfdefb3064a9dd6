# SPDX-License-Identifier: Apache-2.0
"""Nothing grows from save to save, and the memory of one is bounded: the benchmarks' functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.child import in_child, watched
from bench.memory import budgeted, saves

MIB = 1 << 20
STATE_MIB = 0.25
"""What ``saves`` saves: a copy of it that each save leaves would be far above the bounds."""


@pytest.mark.slow  # that few of them leave nothing is in tests/runtime, too
@pytest.mark.parametrize("offload", ["thread", "process"])
@pytest.mark.parametrize(
    ("num_saves", "num_warm", "grown_mib"), [(60, 30, 15 * STATE_MIB), (1500, 1000, 1.0)]
)
def test_many_saves_leave_nothing(
    offload: str, num_saves: int, num_warm: int, grown_mib: float, tmp_path: Path
) -> None:
    before, after = in_child(
        saves, num_saves=num_saves, num_warm=num_warm, offload=offload, root=str(tmp_path)
    )
    assert before["processes"] == (2 if offload == "process" else 1)
    assert after["memory"] - before["memory"] <= grown_mib * MIB
    for kind in ("descriptors", "threads", "processes", "shared memory"):
        assert after[kind] <= before[kind], kind
    assert after["objects"] - before["objects"] < (num_saves - num_warm)


@pytest.mark.slow  # the peak is in tests/api/test_memory.py, too
@pytest.mark.parametrize("stage", ["eager", "lazy"])
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_an_asynchronous_save_takes_its_budget_and_little_more(
    offload: str, stage: str, tmp_path: Path
) -> None:
    found, memory = watched(
        budgeted, 0.005, gib=0.125, offload=offload, stage=stage, root=str(tmp_path)
    )
    assert memory.num_samples >= 3
    assert memory.peak["total"] - found["before"] <= found["budget"] + 64 * MIB
    assert found["resident"] <= found["budget"] + 64 * MIB
