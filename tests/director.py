"""The other end of ``tests.transport.ranks.main``: asks it to play scenarios."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Director:
    """Runs ``python -m module``: a process that has imported torch, and forks worlds."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __enter__(self) -> Director:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)

    def play(self, scenario: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([scenario, arguments]) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline())
        assert not said["error"], said["error"]
        return said["value"]
