# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of these tests: each in a process of its own, whose warnings are not errors."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["ROOT", "needs", "run"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 380.0


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """For ``pytestmark``: slow, and skipped without the packages."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"needs {', '.join(missing)}"
    return [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=reason)]


def run(program: str, *args: str, cwd: Path) -> str:
    """Output of a program that must end well.

    Args:
        program: A path below the root of the repository.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *args],
        cwd=cwd,
        # Ray leaves files in the home directory.
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(cwd), "HOME": str(cwd)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
