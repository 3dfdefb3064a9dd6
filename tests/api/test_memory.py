# SPDX-License-Identifier: Apache-2.0
"""How much memory a call takes, measured: the kernel's peak of a process (``memory_child.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.memory_child import MIB, SCENARIOS
from tests.support.cases import slow

ROOT = Path(__file__).parents[2]

READ_CONSTANT = 4 * MIB
"""What ``Snapshot.read_object`` promises beside the budget and the result."""

CONSTANT = 16 * MIB
"""Beside a budget: the plan, the manifest, the queues; 10 MiB were measured for 4100 tensors."""

BOUNDS = {
    "take": 64 * MIB,
    "take-strided": 64 * MIB,
    "async-take": 32 * MIB + CONSTANT,
    "async-take-strided": 32 * MIB + CONSTANT,
    "read-into": 1 * MIB + READ_CONSTANT,
    "read-into-strided": 1 * MIB + READ_CONSTANT,
    "read-fresh": SCENARIOS["read-fresh"][0] * MIB + 1 * MIB + READ_CONSTANT,
    "read-view": 1 * MIB + READ_CONSTANT,
    "read-into-view": 1 * MIB + READ_CONSTANT,
    "read-column": 1.5 * MIB + READ_CONSTANT,  # half a MiB is the result
    "read-into-column": 1 * MIB + READ_CONSTANT,
    # Their parts: 1 byte per element; 12 bytes per fourth element.
    "read-quantized": 16 * MIB + 1 * MIB + READ_CONSTANT,
    "read-into-quantized": 16 * MIB + 1 * MIB + READ_CONSTANT,
    "read-into-sparse": 48 * MIB + 1 * MIB + READ_CONSTANT,
    "restore": 16 * MIB + CONSTANT,
    "restore-strided": 16 * MIB + CONSTANT,
    "verify": 16 * MIB + CONSTANT,
}


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux' /proc")
@pytest.mark.parametrize(
    "names",
    [
        # One of each kind of call, and all of them.
        ["async-take", "read-into", "restore-strided", "verify"],
        slow(["take", "take-strided"]),
        slow(["async-take-strided"]),
        slow(["read-into-strided", "read-fresh"]),
        slow(
            [
                "read-view",
                "read-into-view",
                "read-column",
                "read-into-column",
                "read-quantized",
                "read-into-quantized",
                "read-into-sparse",
            ]
        ),
        slow(["restore"]),
    ],
    ids=lambda names: names[0],
)
def test_peak_growth(tmp_path: Path, names: list[str]) -> None:
    """A state is many times larger than what any call may take beside it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.api.memory_child", str(tmp_path), *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    growths = {name: growth / MIB for name, growth in json.loads(done.stdout).items()}
    bounds = {name: BOUNDS[name] / MIB for name in names}
    over = {name: (growths[name], bounds[name]) for name in names if growths[name] > bounds[name]}
    assert not over, f"grown by, allowed (MiB): {over}"
    assert set(growths) == set(names)


def test_all_scenarios_are_measured() -> None:
    assert set(BOUNDS) == set(SCENARIOS)
