# SPDX-License-Identifier: Apache-2.0
"""Scripts of the pages, run as a user runs them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.pages import ROOT
from tests.support import forker

__all__ = ["run_script"]


def run_script(line: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Output of a command line ``python NAME.py ...``, which must end well, without a warning."""
    program, *arguments = shlex.split(line)
    assert program == "python", line
    done = subprocess.run(
        forker.command("-W", "error", *arguments),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
