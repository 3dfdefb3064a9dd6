# SPDX-License-Identifier: Apache-2.0
"""Runs code with frameworks in processes of its own: their warnings are no errors of ours."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.pages import ROOT

TIMEOUT_S = 200.0


def run_function(script: str, name: str, folder: Path, *, ranks: int = 1, expected: int = 0) -> Any:
    """Returns the result of a function of a script next to this file: JSON, on its last line.

    Args:
        ranks: Processes, as torchrun starts them.
        expected: Exit status of rank 0. Others than rank 0 may fail in any way if it is killed.
    """
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    children = []
    for rank in range(ranks):
        world: dict[str, str] = {}
        if ranks > 1:
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            world |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        children.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / script), name, str(folder)],
                env=environment | world,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [child.communicate(timeout=TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    for rank, (out, err) in enumerate(said):
        status = children[rank].returncode
        assert status == expected or (rank and expected and status), out[-2000:] + err[-4000:]
    return None if expected else json.loads(said[0][0].splitlines()[-1])


def run_example(name: str, folder: Path) -> str:
    """Returns what an example prints, which must end well."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
